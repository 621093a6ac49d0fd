"""ZeRO: shard optimizer state, gradients and parameters over the data parallel ranks. Level 0 is the plain optimizer.

Saves: all but 1/n of the bytes below: of optimizer state (level 1), of gradients too (2), of weights too (3).
Costs: elements sent by a rank in a step of A micro-batches, times (n-1)/n: 2P, 2P, (A+1)P and 3AP at levels 0 to 3.
       (Level 3 saves two all-gathers: the embedding's backward reads no weights, the head's follows its forward.)
Stops helping when: activations are what fills the memory, or A is so large that levels 2 and 3 only communicate.

What each rank holds of one bucket of dp.py on n = 4 ranks:

    level   weights    gradients    master, m, v     what is communicated, and when
    0       ████       ████         ████             all-reduce gradients, once a step
    1       ████       ████         █                reduce-scatter gradients, once a step; all-gather weights after
                                                     the update, waited for where the next forward first uses them
    2       ████       █            █                as 1, but reduce-scatter gradients after every micro-batch
    3       █          █            █                as 2, but all-gather (unshard) a layer's weights just before it
                                                     runs, forward and backward, prefetching the next layer's; free
                                                     them (reshard) just after

Bytes a parameter at level 0 (divide what is sharded by n; padding adds less than n elements a bucket):

    recipe                  weights   gradients   master   moments   together
    fp32                       4          4          -       4 + 4       16     --dtype fp32
    bf16 or fp16, mixed        2          4          4       4 + 4       18     --dtype bf16
    the same, bf16 moments     2          4          4       2 + 2       14     --dtype bf16 --moments bf16
    --fp8 with bf16          2 + 2        4          4       4 + 4       20     FP8 copies of what blocks multiply;
    fp8 and bf16 moments     2 + 2        4          4       2 + 2       16     none at level 3: see fp8.py
    playbook's mixed           2        2 + 4        4       4 + 4       20     bf16 gradients beside their fp32 sum
    Transformer Engine         4          4          -       4 + 4       16     FP8 copies made for each matmul
    DeepSeek-V3                1        2 + 4        4       2 + 2       15     FP8 weights
    nanotron fp8               1        1 + 4        2       1 + 1       10     FP8 weights, gradients, moments
    FP8-LM                     1        1 + 2        2       1 + 2        9     FP8 weights, gradients, first moments

Formats: why gradients are accumulated and weights kept in fp32, and why only fp16 needs its loss scaled.

              bits: sign exponent mantissa    largest    smallest normal      step at 1
    fp32                 1     8        23    3.4e38          1.2e-38          1.2e-07
    bf16                 1     8         7    3.4e38          1.2e-38          7.8e-03
    fp16                 1     5        10     65504          6.1e-05          9.8e-04
    fp8 e4m3             1     4         3       448          1.6e-02          1.2e-01
    fp8 e5m2             1     5         2     57344          6.1e-05          2.5e-01

An update of 1e-3 to a bf16 weight of 1 is rounded away: hence master weights. Gradients of fp16 runs fall below 6e-5:
hence the loss is multiplied by a scale, which is halved when a gradient overflows (every rank skips that step) and
doubled after 2000 good steps. bf16 moments need beta2 well below 1 - 2^-8, or averages would stop moving.

The gradient norm is that of the whole model: every element counts on one rank, its owner, and squares are summed over
the world. So all ranks clip by the same number and skip the same steps.

ZeRO-R, the other half of the paper, is about what remains: buffers of constant size, which the buckets are (at most two
whole gradients and two layers' weights exist at once, however deep the model; a tied table's gradient is one more, from
the head's backward to the embedding's), and activations, for which see recompute.py.

Rajbhandari et al. 2020 (ZeRO: section 5 the levels, 7 what they send); Zhao et al. 2023 (FSDP: prefetching);
Micikevicius et al. 2018 (master weights, loss scaling); Loshchilov & Hutter 2019 (AdamW).
Shapes: n ranks of the data axis, P parameters, A micro-batches a step.
"""
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd import Function
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from collectives import Groups, Pending, all_gather, all_reduce, rank, reduce_scatter, size, world
from dp import Bucket, DataParallel, Units
from param import Box, Source, Spec, boxes, draw, is_first_replica, parameter

# ---- a bucket and this rank's shard of it ---------------------------------------------------------------------------

class ShardedBucket(Bucket):
    """Weights, gradients and optimizer state of a bucket, sharded according to the ZeRO level.

    All are flat, in the bucket's order. `weights` and `grad` are whole; `weight_shard`, `grad_shard` and the tensors of
    `state` (the master weights and what the update rule remembers, such as AdamW's m and v) are this rank's `shard`, a
    slice of the whole, which at level 0 is everything. A rank alone on its data axis is at level 0.
    """

    def __init__(self, params: list[nn.Parameter], stages_of: dict[nn.Parameter, list[int]], groups: Groups, level: int,
                 rule_state: tuple[str, ...], moments_dtype: torch.dtype, reducing: list["ShardedBucket"]):
        super().__init__(params, stages_of, groups)
        n = size(self.group)
        self.level = level if n > 1 else 0
        self.padded = -(-self.numel // n) * n if self.level else self.numel
        length = self.padded // n if self.level else self.padded
        first = rank(self.group) * length if self.level else 0
        self.shard = slice(first, first + length)

        dtype = params[0].dtype
        self.weights = self.zeros(self.padded, dtype)
        for param in self.params:
            # Through .data, which leaves the parameter its own version counter: to autograd, refilling is no change.
            param.data = self.view(self.weights, param)
        self.weight_shard, self.unsharding, self.users = self.weights[self.shard], Pending(None), 0
        if self.level == 3:
            self.weight_shard, self.nbytes = self.zeros(length, dtype), self.weights.untyped_storage().nbytes()
            self.weights.untyped_storage().resize_(0)
        self.master = self.weight_shard if dtype == self.acc_dtype else self.zeros(length, self.acc_dtype)
        self.state = {"master": self.master} | {name: self.zeros(length, moments_dtype) for name in rule_state}

        self.grads_a_micro_batch = sum(len(stages_of[param]) for param in params)
        self.grad_shard, self.received = None, None
        self.reducing = reducing  # shared by all buckets: the one whose whole gradient is being reduced

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=self.device)

    def within_shard(self, flat: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """The part of a shard-long tensor that lies at start..stop of the whole."""
        start, stop = (min(max(i, self.shard.start), self.shard.stop) - self.shard.start for i in (start, stop))
        return flat[start:stop]

    def counts(self, spec: Spec) -> bool:
        """Whether this rank counts and saves its shard of such a parameter: of all that hold the same, the first."""
        first_replica = rank(self.groups["replicate"]) == 0 and (self.level > 0 or rank(self.group) == 0)
        return first_replica and is_first_replica(spec, self.groups)

    def pieces(self) -> Iterator[tuple[nn.Parameter, Box, slice]]:
        """(parameter, box of the global tensor, its place in the shard), every element of the shard once."""
        for param in self.params:
            offset = self.offset[param]
            first, last = max(self.shard.start, offset), min(self.shard.stop, offset + param.numel())
            place = first - self.shard.start
            for local in boxes(tuple(param.shape), first - offset, last - offset) if first < last else ():
                count = math.prod(part.stop - part.start for part in local)
                box = tuple(slice(mine.start + part.start, mine.start + part.stop)
                            for part, mine in zip(local, param.box))
                yield param, box, slice(place, place + count)
                place += count

    def load(self, source: Source, what: str = "master") -> None:
        """Fill a tensor of `state` from a source."""
        self.unsharding.wait()  # or an all-gather of old weights would overwrite these
        for param, box, place in self.pieces():
            self.state[what][place] = source(param.spec, box).flatten().to(self.device, self.acc_dtype)
        if what == "master":
            self.update_weights()

    # Gradients. Levels 0 and 1 have a whole one, reduced once a step; 2 and 3 reduce and free it every micro-batch.

    def begin_step(self, backwards: dict[int, int]) -> None:
        self.expected = sum(backwards[stage] for param in self.params for stage in self.stages_of[param])
        self.accumulated = 0
        for param in self.params:
            param.generation += 1  # a replayed CUDA graph makes again, in every step, what it caches of weights
        if self.level < 2:
            self.grad = self.zeros(self.padded, self.acc_dtype) if self.grad is None else self.grad.zero_()
            self.grad_shard = self.grad[self.shard]
        elif self.grad_shard is None:
            self.grad_shard = self.zeros(self.shard.stop - self.shard.start, self.acc_dtype)

    def main_grad(self, param: nn.Parameter) -> torch.Tensor:
        if self.grad is None:  # levels 2 and 3, when the previous one is being reduced or gone
            self.grad = self.zeros(self.padded, self.acc_dtype)
        return self.view(self.grad, param)

    def ready(self, param: nn.Parameter) -> None:
        self.accumulated += 1
        if self.level >= 2 and self.accumulated % self.grads_a_micro_batch == 0 and self.expected > 1:
            self.start_reduction()  # of this micro-batch; the last one's is started by the step's last gradient
        super().ready(param)

    def start_reduction(self) -> None:
        if self.level == 0:
            super().start_reduction()
        elif self.level == 1:
            self.reduction = reduce_scatter(self.grad_shard, self.grad, self.group, async_op=True)
        else:
            for bucket in self.reducing:  # while one whole gradient is reduced the next is filled: no third exists
                bucket.finish_reduction()
            first = self.accumulated <= self.grads_a_micro_batch
            self.received = self.grad_shard if first else torch.empty_like(self.grad_shard)
            self.reduction = reduce_scatter(self.received, self.grad, self.group, async_op=True)
            self.grad, self.reducing[:] = None, [self]

    def finish_reduction(self) -> None:
        """Wait for the reduction under way and add its result to those of earlier micro-batches."""
        self.reduction.wait()
        if self.received is not None and self.received is not self.grad_shard:
            self.grad_shard.add_(self.received)
        self.received = None

    def finish_step(self) -> None:
        assert self.expected == 0, f"{self.name} and {len(self.params) - 1} more wait for {self.expected} gradients"
        self.finish_reduction()
        all_reduce(self.grad_shard, self.groups["replicate"])
        for start, stop, spec in self.spans:  # after the data axis: shards lie alike on all ranks of other axes
            for axis in spec.partial_axes:
                all_reduce(self.within_shard(self.grad_shard, start, stop), self.groups[axis])

    def squared_norm(self) -> torch.Tensor:
        """The sum of the squared gradients that this rank counts."""
        total = torch.zeros((), dtype=self.acc_dtype, device=self.device)
        for start, stop, spec in self.spans:
            if self.counts(spec):
                total += torch.linalg.vector_norm(self.within_shard(self.grad_shard, start, stop)).square()
        return total

    # Weights. Level 1 and 2 all-gather them after the update; level 3 has them whole between unshard and reshard only.

    def update_weights(self) -> None:
        """Copy the master weights to the model's, and start the all-gather of those."""
        for param in self.params:
            param.generation += 1
        if self.master is not self.weight_shard:
            self.weight_shard.copy_(self.master)
        if self.level == 3:  # a forward whose backward never ran has left old weights unsharded
            self.users = 0
            self.weights.untyped_storage().resize_(0)
        elif self.level:
            self.unsharding = all_gather(self.weights, self.weight_shard, self.group, async_op=True)

    def prefetch(self) -> None:
        """Start the all-gather of the weights."""
        if self.level == 3 and self.weights.untyped_storage().nbytes() == 0:
            self.weights.untyped_storage().resize_(self.nbytes)
            self.unsharding = all_gather(self.weights, self.weight_shard, self.group, async_op=True)

    def unshard(self) -> None:
        """Have whole weights, until `reshard` was called as often as `unshard`."""
        self.prefetch()
        self.unsharding.wait()
        self.users += 1

    def reshard(self) -> None:
        """Free the whole weights again."""
        self.users -= 1
        assert self.users >= 0
        if self.level == 3 and self.users == 0:
            self.weights.untyped_storage().resize_(0)


# ---- the update -----------------------------------------------------------------------------------------------------

Tensors = list[torch.Tensor]


class UpdateRule(NamedTuple):
    """state: the tensors that it remembers, as large as the weights. apply: changes weights and state in place.

    apply(weights, grads, *state, steps=..., lr=..., betas=..., eps=..., weight_decay=..., found_inf=...) is given lists
    of flat spans; it must do nothing where the tensor found_inf is 1, so that the host need not wait to know.
    """
    state: tuple[str, ...]
    apply: Callable[..., None]


def apply_adamw(weights: Tensors, grads: Tensors, m: Tensors, v: Tensors, steps: torch.Tensor, lr: float,
                betas: tuple[float, float], eps: float, weight_decay: float, found_inf: torch.Tensor) -> None:
    """torch's fused AdamW."""
    adamw(weights, grads, m, v, [], [steps.clone() for _ in weights], fused=True, found_inf=found_inf, amsgrad=False,
          beta1=betas[0], beta2=betas[1], lr=lr, weight_decay=weight_decay, eps=eps, maximize=False)


def apply_sgd(weights: Tensors, grads: Tensors, steps: torch.Tensor, lr: float, betas: tuple[float, float], eps: float,
              weight_decay: float, found_inf: torch.Tensor) -> None:
    """torch's fused SGD without momentum."""
    sgd(weights, grads, [None] * len(weights), fused=True, found_inf=found_inf, weight_decay=weight_decay, momentum=0.0,
        lr=lr, dampening=0.0, nesterov=False, maximize=False)


UPDATE_RULES = {"adamw": UpdateRule(("m", "v"), apply_adamw), "sgd": UpdateRule((), apply_sgd)}  # --optimizer


class LossScale:
    """The factor of fp16 losses: halved by a gradient that overflows, doubled after `interval` steps without."""

    def __init__(self, device: torch.device, start: float = 2.0**16, interval: int = 2000):
        self.value, self.interval = torch.tensor(start, device=device), interval
        self.good_steps = torch.tensor(0, dtype=torch.int32, device=device)

    def update(self, found_inf: torch.Tensor) -> None:
        # The rule of torch's GradScaler, which it does not offer without its own search for what is not finite.
        torch._amp_update_scale_(self.value, self.good_steps, found_inf, 2.0, 0.5, self.interval)


class Optimizer(DataParallel):
    """Gradients as in dp.py, sharding, the update. `load`; then for each step begin_step, backwards, finish_step, step.

    units: what this rank holds of each pipeline stage; the weights of a unit are unsharded together at level 3.
    rule: of UPDATE_RULES. clip: largest norm of the whole gradient, 0 for none. weight_decay: of matrices only.
    moments_dtype: of what the rule remembers. last_unit: its backward follows its forward at once (the head), so its
    weights stay unsharded in between.
    """

    def __init__(self, units: Units, groups: Groups, *, bucket_mb: float = 25.0, level: int = 0, rule: str = "adamw",
                 betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.1,
                 clip: float = 1.0, moments_dtype: torch.dtype = torch.float32, last_unit: nn.Module | None = None):
        self.rule, reducing = UPDATE_RULES[rule], []

        def make(params, stages_of, groups):
            return ShardedBucket(params, stages_of, groups, level, self.rule.state, moments_dtype, reducing)

        super().__init__(units, groups, 0 if level == 3 else bucket_mb, make)
        self.world, self.betas, self.eps = groups["world"], betas, eps
        self.weight_decay, self.clip, self.last_unit = weight_decay, clip, last_unit
        fp16 = any(bucket.weights.dtype == torch.float16 for bucket in self.buckets)
        self.steps = torch.zeros((), device=self.buckets[0].device)  # updates so far, for AdamW's bias correction
        self.loss_scale = LossScale(self.buckets[0].device) if fp16 else None
        self.unshard_around(units)

    def load(self, source: Source, what: str = "master") -> None:
        """Fill the master weights, or another tensor of every bucket's state, from a source."""
        for bucket in self.buckets:
            bucket.load(source, what)

    def extra_state(self) -> dict[str, torch.Tensor]:
        """The state that belongs to no parameter, by name; to restore it, copy into these tensors."""
        scale = self.loss_scale
        return {"steps": self.steps} | ({"scale": scale.value, "good_steps": scale.good_steps} if scale else {})

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """What to call backward on: the loss, times the loss scale in fp16 runs."""
        return loss * self.loss_scale.value if self.loss_scale else loss

    def step(self, lr: float) -> torch.Tensor:
        """Clip and update. Returns the norm of the whole gradient before clipping, the same on every rank.

        If that is not finite, the step is skipped: everything stays as it was, but for the loss scale.
        """
        squared = torch.stack([bucket.squared_norm() for bucket in self.buckets]).sum()
        all_reduce(squared, self.world)
        unscale = 1 / self.loss_scale.value if self.loss_scale else 1.0
        norm = squared.sqrt() * unscale
        found_inf = (~norm.isfinite()).float()
        clip = (self.clip / (norm + 1e-6)).clamp(max=1) if self.clip else 1.0
        for bucket in self.buckets:
            bucket.grad_shard.mul_(clip * unscale)
            self.update(bucket, lr, found_inf)
        self.steps += 1 - found_inf
        if self.loss_scale:
            self.loss_scale.update(found_inf)
        return norm

    def update(self, bucket: ShardedBucket, lr: float, found_inf: torch.Tensor) -> None:
        """Apply the rule to a shard, in its accumulation dtype, to what decays and to what does not."""
        moments = {name: bucket.state[name].to(bucket.acc_dtype) for name in self.rule.state}  # a copy only if bf16
        for decays in (True, False):
            spans = [(start, stop) for start, stop, spec in bucket.spans if spec.decay == decays]
            lists = [[bucket.within_shard(flat, start, stop) for start, stop in spans]
                     for flat in (bucket.master, bucket.grad_shard, *moments.values())]
            if spans:
                self.rule.apply(*lists, steps=self.steps, lr=lr, betas=self.betas, eps=self.eps,
                                weight_decay=self.weight_decay if decays else 0.0, found_inf=found_inf)
        for name, moment in moments.items():
            if moment is not bucket.state[name]:
                bucket.state[name].copy_(moment)
        bucket.update_weights()

    # Level 3: hooks unshard a unit's weights before its forward and before its backward, and reshard them after.

    def unshard_around(self, units: Units) -> None:
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
        if not x.requires_grad:  # an evaluation, or tokens: no backward ends here
            return inputs
        return ReshardAfterBackward.apply(x, self, unit), *others

    def after_forward(self, unit: nn.Module, inputs: tuple, y: torch.Tensor) -> torch.Tensor:
        has_backward = inputs[0].requires_grad
        if has_backward and self.next_unit[unit] is not None:
            self.previous_unit[self.next_unit[unit]] = unit  # to be prefetched during that one's backward
        if has_backward and unit is self.last_unit:
            for bucket in self.buckets_of.get(self.previous_unit.get(unit), ()):
                bucket.prefetch()
            return y
        self.reshard(unit)
        return UnshardBeforeBackward.apply(y, self, unit) if has_backward else y


class UnshardBeforeBackward(Function):
    """Identity at the output of a unit, where its backward begins."""

    @staticmethod
    def forward(ctx, y, optimizer, unit):
        ctx.optimizer, ctx.unit = optimizer, unit
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        ctx.optimizer.unshard(ctx.unit, ctx.optimizer.previous_unit.get(ctx.unit))
        return grad, None, None


class ReshardAfterBackward(Function):
    """Identity at the input of a unit, where its backward ends. Weight gradients that are deferred need no weights."""

    @staticmethod
    def forward(ctx, x, optimizer, unit):
        ctx.optimizer, ctx.unit = optimizer, unit
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.optimizer.reshard(ctx.unit)
        return grad, None, None


# ---- demo: torchrun --nproc_per_node=8 zero.py ----------------------------------------------------------------------

class Layer(nn.Module):
    def __init__(self, number: int, groups: Groups):
        super().__init__()
        self.weight = parameter(Spec(str(number), (256, 256), std=1 / 16), groups, torch.bfloat16)

    def forward(self, x):
        return torch.tanh(x @ self.weight.T)


def measured(level: int, groups: Groups) -> tuple[dict[str, int], dict[str, float]]:
    """The peak bytes of live storages by kind in two steps of a model of 12 layers, and the formula's."""
    from costs import state_bytes
    from meter import Meter

    layers = [Layer(number, groups) for number in range(12)]
    optimizer = Optimizer({0: layers}, groups, bucket_mb=0, level=level)
    optimizer.load(draw(0))
    meter, kinds = Meter(), ("weights", "gradients", "optimizer")
    for bucket in optimizer.buckets:
        meter.label("optimizer", *bucket.state.values())
        meter.label("weights", bucket.weights, bucket.weight_shard)
        meter.label_size("gradients", 4 * bucket.padded, 4 * bucket.master.numel())
    x = torch.ones(1, 256, dtype=torch.bfloat16, requires_grad=True)
    with meter:
        for _ in range(2):
            optimizer.begin_step({0: 1})
            nn.Sequential(*layers)(x).sum().backward()
            optimizer.finish_step()
            optimizer.step(1e-3)
    formula = state_bytes([bucket.numel for bucket in optimizer.buckets], level, size(groups["dp"]), weight=2,
                          accumulated=4, moments=8)
    return {kind: meter.peak[kind] for kind in kinds}, formula


def demo(group) -> None:
    groups: Groups = {"world": group, "replicate": None, "dp": group}
    lines = [f"Megabytes on each of {size(group)} ranks, 12 layers in bf16, AdamW; measured: the most alive at once.",
             "█ weights  ▓ gradients  ▒ optimizer state", "", "             measured  formula"]
    for level in range(4):
        peak, formula = measured(level, groups)
        bar = "".join(sign * round(peak[kind] / 3e5) for sign, kind in zip("█▓▒", peak))
        lines.append(f"    level {level}  {sum(peak.values()) / 1e6:8.2f} {sum(formula.values()) / 1e6:8.2f}   {bar}")
    if rank(group) == 0:
        print("\n".join(lines))


if __name__ == "__main__":
    with world() as group:
        demo(group)
