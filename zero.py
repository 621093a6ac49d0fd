"""ZeRO: shard optimizer state, gradients and weights over the data parallel ranks. Level 0 is plain data parallelism.

Saves: all but 1/n of the optimizer state (level 1), also of the gradients (level 2), also of the weights (level 3).
Costs: a rank sends 2P, 2P, (A+1)P and almost 3AP elements, times (n-1)/n, per step of A micro-batches at levels 0 to
       3: gradients in fp32, or by --reduce-dtype in bf16, and weights in their own dtype. In bytes of a bf16 model 8P,
       6P, (4A+2)P and 8AP. (Almost: the embedding's backward needs no weights, and the head's runs right after its
       forward, so each saves one all-gather per micro-batch.)
Stops helping when: activations are what fills the memory, or A is so large that levels 2 and 3 only communicate.

What each rank holds of one bucket of dp.py on n = 4 ranks:

    level   weights    gradients    master, m, v     collectives
    0       ████       ████         ████             all-reduce of gradients per step
    1       ████       ████         █                reduce-scatter of gradients, all-gather of weights per step
    2       ████       █            █                reduce-scatter per micro-batch, all-gather per step
    3       █          █            █                reduce-scatter and two all-gathers per micro-batch

Level 3 unshards (all-gathers) the weights of a unit (embedding, block or head) before its forward and before its
backward, and reshards (frees) them after each.
Overlap: gradients are reduced during backward, as in dp.py. At levels 1 and 2 the all-gather starts after the update,
and the next forward waits for it where it first uses the weights. Level 3 prefetches the next unit's weights.
Hybrid sharding: the n ranks of each of R replicas do all this; once per step R ranks all-reduce each gradient shard. A
shard's all-reduce starts when the next bucket's reduction does.

The gradient norm is that of the whole model: each element is counted by one rank, its owner, and squares are summed
over the world. So all ranks clip by the same number and skip the same steps.

In bf16 a parameter takes 18 bytes: weight 2, main gradient 4, master weight 4, moments 4 + 4 (docs/NOTES.md has other
recipes, and why). At levels 2 and 3 at most two whole gradients per data axis exist at once, and at level 3 two units'
whole weights; but a tied table's gradient waits for its second backward, and schedules that split backward (zb-*) keep
every bucket's gradient whole from the input half to the weight half.

Rajbhandari et al. 2020 (ZeRO: section 5 the levels, 7 their communication); Zhao et al. 2023 (FSDP: prefetching);
Micikevicius et al. 2018 (master weights, loss scaling); Loshchilov & Hutter 2019 (AdamW); Hugging Face 2025 (the
playbook).
Shapes: n ranks of the data axis, P parameters, A micro-batches per step.
"""
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd import Function
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.sgd import sgd

from collectives import (
    Copied,
    CopyStreams,
    Group,
    Groups,
    all_gather,
    all_reduce,
    done,
    process_group,
    rank,
    reduce_scatter,
    run_demo,
    sent,
    size,
)
from config import padded_elements
from dp import Bucket, DataParallel, Units
from param import Box, Source, Spec, box_shape, boxes, draw, is_first_replica, parameter, shard_slice

# ---- a bucket and this rank's shard of it ---------------------------------------------------------------------------

class ShardedBucket(Bucket):
    """The weights, gradients and optimizer state of a bucket, sharded as the ZeRO level says: flat tensors.

    level: 0 if the data axis has one rank. padded: how many elements the bucket has, padded to equal shards.
    shard: this rank's slice of them; at level 0 all of it. weight_shard, grad_shard: of `weights` and `grad`.
    state: name -> tensor as long as the shard: "master", the master weights, and AdamW's "m" and "v".
    """

    def __init__(self, params: list[nn.Parameter], stages_of: dict[nn.Parameter, list[int]], groups: Groups, *,
                 level: int, rule_state: tuple[str, ...], moments_dtype: torch.dtype | None,
                 reduce_dtype: torch.dtype | None, reducing: dict[Group, Bucket], offload: bool):
        super().__init__(params, stages_of, groups)
        self.level = level if size(self.group) > 1 else 0
        shards, index = (size(self.group), rank(self.group)) if self.level else (1, 0)
        self.padded = padded_elements(self.numel, shards)
        length = self.padded // shards
        self.shard = slice(index * length, (index + 1) * length)

        dtype = params[0].dtype
        self.weights = self.zeros(self.padded, dtype)
        for param in self.params:
            # .data keeps the parameter's version counter apart from the flat tensor's: autograd must not complain when
            # an all-gather refills weights that were saved for backward.
            param.data = self.view(self.weights, param)
        self.weight_shard = self.weights[self.shard]
        if self.level == 3:
            self.weight_shard = self.zeros(length, dtype)
            self.free_weights()
        self.unsharding = done(self.weights)
        self.users = 0  # calls of `unshard` less calls of `reshard`
        self.copies = CopyStreams(self.device) if offload else None
        state_zeros = self.copies.zeros if offload else self.zeros
        is_own_master = dtype == self.acc_dtype and not offload
        self.master = self.weight_shard if is_own_master else state_zeros(length, self.acc_dtype)
        moments = {name: state_zeros(length, moments_dtype or self.acc_dtype) for name in rule_state}
        self.state = {"master": self.master} | moments
        if offload:
            self.host_grad, self.host_weights = state_zeros(length, self.acc_dtype), state_zeros(length, dtype)
            self.weights_copied = Copied()

        self.grads_per_micro_batch = sum(len(stages_of[param]) for param in params)
        self.grad_shard = None
        self.reduced = self.store = None  # the result of the reduction under way, and what puts it into grad_shard
        self.before_reduction = lambda: None  # see run/log.py
        self.reduce_dtype = reduce_dtype or self.acc_dtype
        self.reducing = reducing  # shared by all buckets: a group -> the bucket whose gradient it is reducing

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=self.device)

    def within_shard(self, flat: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Those elements of `flat`, a tensor as long as the shard, that are start..stop of the whole bucket."""
        start, stop = (min(max(i - self.shard.start, 0), len(flat)) for i in (start, stop))
        return flat[start:stop]

    # Gradients. Levels 0 and 1 reduce the whole gradient once per step; 2 and 3 reduce and free it per micro-batch.

    def begin_step(self, backwards: dict[int, int]) -> None:
        super().begin_step(backwards)
        self.accumulated, self.replicas_started = 0, False

    def zero_grad(self) -> None:
        if self.level < 2:
            if self.grad is None:
                self.grad = self.zeros(self.padded, self.acc_dtype)
            else:
                self.grad.zero_()
            self.grad_shard = self.grad[self.shard]
        elif self.grad_shard is None:
            self.grad_shard = self.zeros(self.shard.stop - self.shard.start, self.acc_dtype)

    def main_grad(self, param: nn.Parameter) -> torch.Tensor:
        if self.grad is None:  # levels 2 and 3: the previous micro-batch's is being reduced, or is freed
            self.grad = self.zeros(self.padded, self.acc_dtype)
        return self.view(self.grad, param)

    def ready(self, param: nn.Parameter) -> None:
        self.accumulated += 1
        if self.level >= 2 and self.accumulated % self.grads_per_micro_batch == 0 and self.expected > 1:
            self.start_reduction()  # of every micro-batch but the last, whose reduction super().ready starts
        super().ready(param)

    def start_reduction(self) -> None:
        """Start to sum the gradient over the data axis. First finish the group's previous reduction: at levels 2 and 3,
        so that at most two whole gradients exist; with replicas, so that its shard can be summed over them."""
        self.before_reduction()
        if self.level >= 2 or size(self.groups["replicate"]) > 1:
            if before := self.reducing.get(process_group(self.group)):
                before.finish_reduction()
                if before is not self:  # whose last reduction is only starting now
                    before.start_replicas()
            self.reducing[process_group(self.group)] = self
        first = self.level < 2 or self.accumulated <= self.grads_per_micro_batch
        sent = self.grad.to(self.reduce_dtype) if size(self.group) > 1 else self.grad
        in_place = first and sent is self.grad
        store = self.grad_shard.copy_ if first else self.grad_shard.add_
        self.store = None if in_place else store
        if self.level == 0:
            self.reduced = sent
            self.reduction = all_reduce(sent, self.group, async_op=True)
        else:
            self.reduced = self.grad_shard if in_place else sent.new_empty(len(self.grad_shard))
            self.reduction = reduce_scatter(self.reduced, sent, self.group, async_op=True)
        if self.level >= 2:
            self.grad = None

    def finish_reduction(self) -> None:
        """Wait for the reduction under way and add its result to those of earlier micro-batches."""
        if self.reduction:
            self.reduction.wait()
        if self.store:
            self.store(self.reduced)
        self.reduction = self.store = self.reduced = None

    def start_replicas(self) -> None:
        """After the step's last reduction: start to sum the shard over replicas (hybrid sharding)."""
        if self.expected == 0 and not self.replicas_started and size(self.groups["replicate"]) > 1:
            self.replicas_started = True
            self.reduced = self.grad_shard.to(self.reduce_dtype)
            self.store = None if self.reduced is self.grad_shard else self.grad_shard.copy_
            self.reduction = all_reduce(self.reduced, self.groups["replicate"], async_op=True)

    def finish_step(self) -> None:
        """Finish `grad_shard`: sum it over the data axis, over replicas and over partial axes."""
        assert self.expected == 0, f"{self.name} and {len(self.params) - 1} more wait for {self.expected} gradients"
        self.finish_reduction()
        self.start_replicas()
        self.finish_reduction()
        self.reducing.clear()
        for start, stop, spec in self.spans:  # shards lie alike on all ranks of a partial axis
            for axis in spec.partial_axes:
                all_reduce(self.within_shard(self.grad_shard, start, stop), self.groups[axis])

    def start_offload(self) -> None:
        """If the optimizer's state is on the host: start to copy the gradient there."""
        if self.copies:
            self.grad_copied = self.copies.start(self.host_grad, self.grad_shard)

    def grad_of_update(self) -> torch.Tensor:
        """The gradient of this rank's shard, where the optimizer's state is."""
        if not self.copies:
            return self.grad_shard
        self.grad_copied.synchronize()
        return self.host_grad

    # Weights. Levels 1 and 2 all-gather them after the update; at level 3 they are whole from unshard to reshard.

    def update_weights(self) -> None:
        """Copy the master weights into this rank's shard of the weights; levels 1 and 2 then start to all-gather it."""
        for param in self.params:
            param.generation += 1
        if self.copies:
            self.weights_copied.synchronize()
            self.host_weights.copy_(self.master)
            self.weights_copied = self.copies.start(self.weight_shard, self.host_weights)
            self.weights_copied.wait()
        elif self.master is not self.weight_shard:
            self.weight_shard.copy_(self.master)
        if self.level == 3:  # a forward whose backward never ran has left old weights unsharded
            self.users = 0
            self.free_weights()
        elif self.level:
            self.unsharding = all_gather(self.weights, self.weight_shard, self.group, async_op=True)

    def unshard(self) -> None:
        """Wait until the weights are whole. They stay so until every `unshard` has been matched by a `reshard`."""
        self.prefetch()
        self.unsharding.wait()
        self.users += 1

    def reshard(self) -> None:
        """Free the whole weights at level 3, unless another unit still uses them."""
        self.users -= 1
        assert self.users >= 0, f"{self.name}: more calls of reshard than of unshard"
        if self.level == 3 and self.users == 0:
            self.free_weights()

    def free_weights(self) -> None:
        """Free the memory of the whole weights. The parameters stay views of it, valid once it is allocated again."""
        self.weights.untyped_storage().resize_(0)

    def prefetch(self) -> None:
        """Start the all-gather of the weights at level 3, if they are not whole already."""
        if self.level == 3 and self.weights.untyped_storage().nbytes() == 0:
            self.weights.untyped_storage().resize_(self.weights.nbytes)
            self.unsharding = all_gather(self.weights, self.weight_shard, self.group, async_op=True)

    # Ownership, and state in and out.

    def owns(self, spec: Spec) -> bool:
        """Whether this rank, of all that hold the same shard of such a parameter, counts it in the norm."""
        first_replica = rank(self.groups["replicate"]) == 0 and (self.level > 0 or rank(self.group) == 0)
        return first_replica and is_first_replica(spec, self.groups)

    def squared_norm(self) -> torch.Tensor:
        """The sum of the squared gradients that this rank owns; a scalar tensor."""
        total = torch.zeros((), dtype=self.acc_dtype, device=self.device)
        for start, stop, spec in self.spans:
            if self.owns(spec):
                total += torch.linalg.vector_norm(self.within_shard(self.grad_shard, start, stop)).square()
        return total

    def pieces(self, part: slice | None = None) -> Iterator[tuple[nn.Parameter, Box, slice]]:
        """Yield this rank's shard, or the slice `part` of it, as boxes of global tensors: (parameter, box, place).

        place: where the elements of the box lie, in row-major order, in `grad_shard` and in every tensor of `state`.
        Each element of the shard is in one piece, padding in none. Also yields parameters that this rank does not own.
        """
        part = part or slice(0, self.shard.stop - self.shard.start)
        start, stop = self.shard.start + part.start, self.shard.start + part.stop
        for param in self.params:
            offset = self.offset[param]
            first, last = max(start, offset), min(stop, offset + param.numel())
            if first >= last:
                continue
            place = first - self.shard.start
            for local in boxes(tuple(param.shape), first - offset, last - offset):
                box = tuple(slice(mine.start + inner.start, mine.start + inner.stop)
                            for inner, mine in zip(local, param.box))
                count = math.prod(box_shape(box))
                yield param, box, slice(place, place + count)
                place += count

    def pieces_to_save(self) -> Iterator[tuple[nn.Parameter, Box, slice]]:
        """The pieces that this rank writes to a checkpoint; data ranks with the same shard write a part of it each."""
        replicas = [self.groups["replicate"], *([self.group] if self.level == 0 else [])]
        writers, writer = 1, 0
        for group in replicas:
            writers, writer = writers * size(group), writer * size(group) + rank(group)
        part = shard_slice(self.shard.stop - self.shard.start, writers, writer)
        for param, box, place in self.pieces(part):
            if is_first_replica(param.spec, self.groups):
                yield param, box, place

    def load(self, source: Source, what: str = "master") -> None:
        """Fill state[what] from a source. "master" also updates the weights, with a collective at levels 1 and 2."""
        self.unsharding.wait()  # or an all-gather of old weights would overwrite these
        for param, box, place in self.pieces():
            self.state[what][place] = source(param.spec, box).flatten().to(self.state[what].device, self.acc_dtype)
        if what == "master":
            self.update_weights()


# ---- the update -----------------------------------------------------------------------------------------------------

class UpdateRule(NamedTuple):
    """state: names of the tensors that it remembers, each as large as the weights. apply: changes weights and state.

    apply(weights, grads, *state, steps=..., lr=..., betas=..., eps=..., weight_decay=..., found_inf=...) gets lists of
    flat tensors. It must itself do nothing where the tensor found_inf is 1: the host never reads that.
    """
    state: tuple[str, ...]
    apply: Callable[..., None]


def apply_adamw(weights, grads, m, v, *, steps, betas, **settings) -> None:
    """torch's fused AdamW."""
    steps_of = [steps.clone() for _ in weights]  # the kernel increments them
    torch_adamw(weights, grads, m, v, [], steps_of, beta1=betas[0], beta2=betas[1], fused=True, amsgrad=False,
                maximize=False, **settings)


def apply_sgd(weights, grads, *, lr, weight_decay, found_inf, **_) -> None:
    """torch's fused SGD without momentum."""
    sgd(weights, grads, [None] * len(weights), lr=lr, weight_decay=weight_decay, found_inf=found_inf, fused=True,
        momentum=0.0, dampening=0.0, nesterov=False, maximize=False)


UPDATE_RULES = {"adamw": UpdateRule(("m", "v"), apply_adamw), "sgd": UpdateRule((), apply_sgd)}


class LossScale:
    """The factor of fp16 losses: halved when a gradient overflows, doubled after `interval` steps in a row
    without overflow. torch's GradScaler has the same rule, but would search all gradients for infinities itself."""

    def __init__(self, device: torch.device, start: float = 2.0**16, interval: int = 2000):
        self.value, self.interval = torch.tensor(start, device=device), interval
        self.good_steps = torch.tensor(0, dtype=torch.int32, device=device)

    def update(self, found_inf: torch.Tensor) -> None:
        torch._amp_update_scale_(self.value, self.good_steps, found_inf, 2.0, 0.5, self.interval)


class Optimizer(DataParallel):
    """Gradient buckets as in dp.py, sharded as the level says, and the update. Call `load` once; then, in each step,
    begin_step, all backwards, finish_step and step.

    units: what this rank holds of each pipeline stage; the weights of a unit are unsharded together at level 3.
    groups: of all axes, and "world" and "replicate" (the ranks with the same shard, in hybrid sharding).
    bucket_mb: see DataParallel; at level 3 every unit has its own bucket. rule: of UPDATE_RULES.
    clip: largest norm of the whole gradient, 0 for none. weight_decay: applied where Spec.decay is true.
    moments_dtype: of what the rule remembers; None: the accumulation dtype. reduce_dtype: in which gradients are sent
    and summed over ranks; None: the accumulation dtype, in which micro-batches are always summed. last_unit: its
    backward follows its forward at once (the head), so its weights stay unsharded in between. offload: what the rule
    remembers and the master weights are on the host, whose CPU updates them (collectives.py).
    """

    def __init__(self, units: Units, groups: Groups, *, bucket_mb: float = 25.0, level: int = 0, rule: str = "adamw",
                 betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.1,
                 clip: float = 1.0, moments_dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None,
                 last_unit: nn.Module | None = None, offload: bool = False):
        self.rule = UPDATE_RULES[rule]
        make_bucket = partial(ShardedBucket, level=level, rule_state=self.rule.state, moments_dtype=moments_dtype,
                              reduce_dtype=reduce_dtype, reducing={}, offload=offload)
        super().__init__(units, groups, 0 if level == 3 else bucket_mb, make_bucket)
        self.world, self.last_unit = groups["world"], last_unit
        self.clip, self.weight_decay, self.rule_settings = clip, weight_decay, dict(betas=betas, eps=eps)
        self.steps = torch.zeros((), device=self.buckets[0].device)  # updates so far, for AdamW's bias correction
        fp16 = any(bucket.weights.dtype == torch.float16 for bucket in self.buckets)
        self.loss_scale = LossScale(self.steps.device) if fp16 else None
        self.noise = None  # see run/log.py
        self.attach_unshard_hooks(units)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """What to call backward on: the loss, times the loss scale in fp16 runs."""
        return loss * self.loss_scale.value if self.loss_scale else loss

    def step(self, lr: float, limit: float | torch.Tensor = math.inf,
             extra: torch.Tensor | None = None) -> torch.Tensor:
        """Clip and update. Returns the norm of the whole gradient before clipping, the same on every rank. If that is
        not below `limit`, or not a number, the step is skipped: nothing changes but the loss scale.

        extra: a vector that is replaced by its sum over all ranks, in the same reduction as the norm.
        """
        unscale = 1 / self.loss_scale.value if self.loss_scale else 1.0
        norm = self.summed_norm(unscale, extra)
        found_inf = (~(norm < limit)).float()
        factor = unscale * (self.clip / (norm + 1e-6)).clamp(max=1) if self.clip else unscale
        for bucket in self.buckets:
            bucket.grad_shard.mul_(factor)
            bucket.start_offload()
        scalars = [x.to(self.buckets[0].master.device) for x in (self.steps, found_inf)]
        for bucket in self.buckets:
            self.update(bucket, lr, *scalars)
            bucket.update_weights()
        self.steps += 1 - found_inf
        if self.loss_scale:
            self.loss_scale.update((~norm.isfinite()).float())  # a finite norm above `limit` is no overflow
        return norm

    def summed_norm(self, unscale: float | torch.Tensor, extra: torch.Tensor | None) -> torch.Tensor:
        """The norm of the whole gradient times `unscale`, from squares of all buckets and ranks. extra: see step."""
        squared = torch.stack([bucket.squared_norm() for bucket in self.buckets]).sum()
        terms = torch.stack([squared, *(self.noise.squares() if self.noise else ())])
        summed = terms if extra is None else torch.cat((terms, extra.to(terms)))
        all_reduce(summed, self.world)
        if extra is not None:
            extra.copy_(summed[len(terms):])
        squared = self.noise.receive(summed[:len(terms)], unscale) if self.noise else summed[0]
        return squared.sqrt() * unscale

    def update(self, bucket: ShardedBucket, lr: float, steps: torch.Tensor, found_inf: torch.Tensor) -> None:
        """Apply the rule to this rank's shard, in the accumulation dtype: to what decays, then to what does not. All
        tensors are where the optimizer's state is."""
        grad = bucket.grad_of_update()
        moments = {name: bucket.state[name].to(bucket.acc_dtype) for name in self.rule.state}  # a copy only if bf16
        for decays in (True, False):
            spans = [(start, stop) for start, stop, spec in bucket.spans if spec.decay == decays]
            lists = [[bucket.within_shard(flat, start, stop) for start, stop in spans]
                     for flat in (bucket.master, grad, *moments.values())]
            if spans:
                self.rule.apply(*lists, steps=steps, lr=lr, found_inf=found_inf, **self.rule_settings,
                                weight_decay=self.weight_decay if decays else 0.0)
        for name, moment in moments.items():
            if moment is not bucket.state[name]:
                bucket.state[name].copy_(moment)

    # Hooks around every unit: unshard its weights before its forward and its backward, reshard them after each. At
    # levels 1 and 2 they wait for the all-gather that followed the update.

    def attach_unshard_hooks(self, units: Units) -> None:
        bucket_of = {param: bucket for bucket in self.buckets for param in bucket.params}
        self.buckets_of, self.next_unit, self.previous_unit = {}, {}, {}
        for modules in units.values():
            for unit, following in zip(modules, [*modules[1:], None]):
                self.buckets_of[unit] = list(dict.fromkeys(bucket_of[param] for param in unit.parameters()))
                self.next_unit[unit] = following
                unit.register_forward_pre_hook(self.before_forward)
                unit.register_forward_hook(self.after_forward)

    def unshard(self, unit: nn.Module, then: nn.Module | None) -> None:
        """Unshard a unit's weights and prefetch those of the unit that runs `then`."""
        for bucket in self.buckets_of[unit]:
            bucket.unshard()
        for bucket in self.buckets_of.get(then, ()):
            bucket.prefetch()

    def reshard(self, unit: nn.Module) -> None:
        for bucket in self.buckets_of[unit]:
            bucket.reshard()

    def before_forward(self, unit: nn.Module, inputs: tuple) -> tuple:
        self.unshard(unit, self.next_unit[unit])
        x, *others = inputs
        if x.requires_grad:
            # The unit's backward ends with the gradient of x. Weight gradients that are deferred read no weights.
            return CallInBackward.apply(x, lambda: self.reshard(unit)), *others
        # Backward will not unshard: an evaluation has none, and the embedding's (x: token ids) reads no weights. Every
        # other unit would miss its weights, and without a gradient of x nothing would say when to free them.
        if torch.is_grad_enabled() and x.is_floating_point() and any(b.level == 3 for b in self.buckets_of[unit]):
            raise ValueError(f"ZeRO level 3: the input of {type(unit).__name__} does not require grad, so its weights "
                             "would be missing in backward: call x.requires_grad_()")
        return inputs

    def after_forward(self, unit: nn.Module, inputs: tuple, y: torch.Tensor) -> torch.Tensor:
        has_backward = inputs[0].requires_grad
        if has_backward and self.next_unit[unit] is not None:
            self.previous_unit[self.next_unit[unit]] = unit  # to be prefetched during that one's backward
        if has_backward and unit is self.last_unit:
            for bucket in self.buckets_of.get(self.previous_unit.get(unit), ()):
                bucket.prefetch()
            return y
        self.reshard(unit)
        if not has_backward:
            return y
        return CallInBackward.apply(y, lambda: self.unshard(unit, self.previous_unit.get(unit)))

    def load(self, source: Source, what: str = "master") -> None:
        """Fill the tensors `what` of all buckets' states from a source. Every rank has to call it."""
        for bucket in self.buckets:
            bucket.load(source, what)

    def extra_state(self) -> dict[str, torch.Tensor]:
        """The state that belongs to no parameter, as scalars that are the same on every rank: "steps", the updates so
        far, and in fp16 runs "scale" and "good_steps" of the loss scale. To restore it, copy into these tensors."""
        scale = self.loss_scale
        return {"steps": self.steps} | ({"scale": scale.value, "good_steps": scale.good_steps} if scale else {})


class CallInBackward(Function):
    """The identity, which calls `action` before its backward passes the gradient on."""

    @staticmethod
    def forward(ctx, x, action):
        ctx.action = action
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.action()
        return grad, None


# ---- demo: python zero.py -------------------------------------------------------------------------------------------

class Layer(nn.Module):
    def __init__(self, number: int, groups: Groups):
        super().__init__()
        self.weight = parameter(Spec(str(number), (256, 256), std=1 / 16), groups, torch.bfloat16)

    def forward(self, x):
        return torch.tanh(x @ self.weight.T)


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Of the storages that these tensors are in, or parts of."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors if tensor is not None}
    return sum(storage.nbytes() for storage in storages.values())


def demo(group: Group) -> None:
    groups: Groups = {"world": group, "replicate": None, "dp": group}
    lines = [f"Megabytes that each of {size(group)} ranks holds after a backward, 12 layers in bf16, AdamW; sent: per "
             "step.", "█ weights  ▓ gradients  ▒ optimizer state", "", "                held    sent"]
    x = torch.ones(1, 256, dtype=torch.bfloat16, requires_grad=True)
    for level in range(4):
        layers = [Layer(number, groups) for number in range(12)]
        optimizer = Optimizer({0: layers}, groups, bucket_mb=0, level=level)
        optimizer.load(draw(0))
        sent.clear()
        optimizer.begin_step({0: 1})
        nn.Sequential(*layers)(x).sum().backward()
        optimizer.finish_step()
        weights, gradients, state = [], [], []
        for bucket in optimizer.buckets:
            weights += bucket.weights, bucket.weight_shard
            gradients += bucket.grad, bucket.grad_shard
            state += bucket.state.values()
        held = [nbytes(*kind) / 1e6 for kind in (weights, gradients, state)]
        optimizer.step(1e-3)
        bar = "".join(sign * round(3 * megabytes) for sign, megabytes in zip("█▓▒", held))
        lines.append(f"    level {level}  {sum(held):8.2f} {sum(sent.values()) / 1e6:7.2f}   {bar}")
    if rank(group) == 0:
        print("\n".join(lines))


if __name__ == "__main__":
    run_demo(demo, ranks=4)
