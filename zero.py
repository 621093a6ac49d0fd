"""ZeRO: shard optimizer state, gradients and weights over the data parallel ranks. Level 0 is plain data parallelism.

Saves: all but 1/n of the optimizer state (level 1), also of the gradients (level 2), also of the weights (level 3).
Costs: elements sent per step, see the table, times (n-1)/n: gradients in fp32, or as --reduce-dtype says, weights in
       their own dtype. (Level 3 gathers embedding and head at most once per micro-batch, not twice: see UnitWeights.)
Stops helping when: activations fill the memory; at levels 2 and 3, a micro-batch is too small to hide its collectives.

What each rank holds of one bucket of dp.py on n = 4 ranks, and sends:

    level   weights   gradients   master, m, v
    0       ████      ████        ████            2P        all-reduce of gradients per step
    1       ████      ████        █               2P        reduce-scatter of gradients, all-gather of weights per step
    2       ████      █           █               (A+1)P    reduce-scatter per micro-batch, all-gather per step
    3       █         █           █               3AP       reduce-scatter and two all-gathers per micro-batch

What a rank has in the course of a step, the whole bucket or only its own shard:

    tensor            when                      level 0   level 1     level 2     level 3
    weights           between steps             whole     whole       whole       shard
                      forward and backward      whole     whole       whole       whole while their unit runs
                      update                    whole     shard (a)   shard (a)   shard
    gradient          between steps, forward    whole     whole       shard       shard
                      backward                  whole     whole       both (b)    both (b)
                      update                    whole     shard (c)   shard       shard
    optimizer state   always                    whole     shard       shard       shard

    (a) The update changes this shard. An all-gather, which runs under the next forward, then makes the weights whole.
    (b) The gradient of a micro-batch is whole until it is reduced. The result is added to the shard.
    (c) The whole gradient keeps its memory, but only this shard of it is summed over the ranks.

The data parallel ranks are shards x replicas. Level 0 is one shard on n replicas. Levels 1 to 3 are n shards. Hybrid
sharding is n shards on each of r replicas, which add up their shards of the gradients (2P/n more, times (r-1)/r).

A level answers three questions about a bucket:

    is_sharded      Is it cut into shards?                                             levels 1, 2, 3
    frees_grad      Is its gradient reduced after every micro-batch, and then freed?   levels 2, 3
    frees_weights   Are its weights whole only while a unit uses them?                 level 3

Overlap: reductions run under backward, but the last; all-gathers of levels 1 and 2 under the next forward, of level 3
         under the unit before. Not hidden: a forward's first and, at level 3, that of a backward without the head.
Memory:  levels 2 and 3 hold at most two buckets' whole gradients per data axis, level 3 also two units' whole weights.
         More is held by afab and dualpipev (the head's weights, and the block's before it, until the head's backward),
         split backwards (a bucket's gradient until its weight gradients are computed), a tied table (its gradient
         until the second backward), Muon at level 2 (all norms' gradients), and by levels 0 and 1 with --reduce-dtype
         bf16 (all gradients in 16 bits, too, until finish_step).

Rajbhandari et al. 2020 (ZeRO); Zhao et al. 2023 (FSDP: prefetching); Micikevicius et al. 2018 (mixed precision).
Shapes: n ranks of the data axis, P parameters, A micro-batches per step; a unit: embedding, a block, or head.
"""
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from core.collectives import ALONE, Group, Groups, Pending, all_gather, all_reduce, done, reduce_scatter, run_demo, sent
from core.config import need, padded_elements
from core.param import Box, Source, Spec, is_first_replica, most_elements, parameter, pieces_within
from dp import Bucket, Units, assign_to_buckets
from muon import Muon, kind_of
from optimizers import UPDATE_RULES, LossScale, Parts, StepScalars, UpdateRule


class Span(NamedTuple):
    """Elements start..stop of a bucket's flat tensors: parameters that are treated alike. spec: the first one's."""
    start: int
    stop: int
    spec: Spec


def treatment(spec: Spec) -> tuple:
    """What finish_step (partial_axes), the norm (replicated_axes) and the update rule (decay) treat differently.

    A bucket is sorted by it. Inside a span parameters keep the order of the model. So wq, wk and wv stay neighbours
    (if tp <= K), and one matmul adds to all three gradients.
    """
    return spec.partial_axes, spec.replicated_axes, not spec.decay


def sorted_by_treatment(params: dict[nn.Parameter, int]) -> dict[nn.Parameter, int]:
    return {param: params[param] for param in sorted(params, key=lambda param: treatment(param.spec))}


def find_spans(bucket: Bucket) -> list[Span]:
    spans: list[Span] = []
    for param in bucket.params:
        start = bucket.offset[param]
        stop = start + most_elements(param.spec, bucket.groups)
        if spans and treatment(spans[-1].spec) == treatment(param.spec):
            spans[-1] = spans[-1]._replace(stop=stop)
        else:
            spans.append(Span(start, stop, param.spec))
    return spans


class StateOnDevice:
    """Keeps the optimizer state of a bucket on its device. run/offload.py's OffloadedState has the same methods."""

    def __init__(self, bucket: "ShardedBucket"):
        self.device = bucket.device

    def zeros(self, length: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(length, dtype=dtype, device=self.device)

    def copy_grad(self, grad: Tensor) -> Pending:
        """Start to copy the gradient to where the state is, for an update. Here it is there already."""
        return done(grad)

    def copy_weights(self, master: Tensor, weight_shard: Tensor) -> None:
        """Round the master weights to the weights' dtype, after an update. The two may be one tensor."""
        if master is not weight_shard:
            weight_shard.copy_(master)


class ShardedBucket(Bucket):
    """The weights, gradient and optimizer state of a bucket, in flat tensors:

                          whole, `numel` elements   this rank's shard
        weights           weights                   weight_shard, a view of `weights`; at level 3 a tensor of its own
        gradient          grad                      grad_shard, a view of `grad`; at levels 2 and 3 a tensor of its own
        optimizer state                             state: name -> tensor; "master", and the moments in rule_state

    Of Bucket: `offset`, where each parameter begins; acc_dtype, fp32 or fp64. `numel` is padded here.
    shard: this rank's slice of a whole tensor. shards: the ranks that have different shards. replicas: the ranks that
    have the same shard. last_started: process group -> the bucket that started a reduction on it last; all buckets
    share this dict.
    """

    def __init__(self, params: dict[nn.Parameter, int], groups: Groups, *, level: int, rule_state: tuple[str, ...],
                 moments_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None,
                 offload: Callable | None, last_started: dict):
        super().__init__(sorted_by_treatment(params), groups)
        self.spans = find_spans(self)
        self.reduce_dtype, self.last_started = reduce_dtype or self.acc_dtype, last_started

        # Shards. With hybrid sharding the data axis is the ranks of one replica. "replicate" is the ranks with the same
        # shard.
        self.shards, self.replicas = (self.group, groups["replicate"]) if level else (ALONE, self.group)
        self.level = level if self.shards.size > 1 else 0  # one shard is no sharding
        self.numel = padded_elements(self.numel, self.shards.size)  # the padding is in no span
        length, dtype = self.numel // self.shards.size, self.params[0].dtype
        self.shard = slice(self.shards.rank * length, (self.shards.rank + 1) * length)

        # Weights.
        self.weights = self.zeros(self.numel, dtype)
        for param in self.params:
            # .data has a version counter of its own: gathering in place does not count as a change of the parameter.
            param.data = self.view(self.weights, param)
        self.weight_shard = self.zeros(length, dtype) if self.frees_weights else self.weights[self.shard]
        self.unsharding = done(self.weights)  # the last all-gather
        self.users = 0  # calls of `unshard` less calls of `reshard`: with afab many micro-batches use the head at once
        if self.frees_weights:
            self.free_weights()

        # Optimizer state.
        self.store = offload(self) if offload else StateOnDevice(self)
        needs_master = dtype != self.acc_dtype or offload is not None  # else the weights are their own master weights
        self.master = self.store.zeros(length, self.acc_dtype) if needs_master else self.weight_shard
        self.state = {"master": self.master}
        for name in rule_state:
            self.state[name] = self.store.zeros(length, moments_dtype or self.acc_dtype)

        # Gradient. If it is freed, `grad` exists from a micro-batch's first main_grad to its reduction.
        self.grad = None if self.frees_grad else self.zeros(self.numel, self.acc_dtype)
        self.grad_shard = self.zeros(length, self.acc_dtype) if self.frees_grad else self.grad[self.shard]
        self.scattering: Pending | None = None  # the reduce-scatter over shards, while it is running
        self.summing: Pending | None = None  # the all-reduce over replicas, while it is running
        self.reductions = self.reduced = 0  # of this step: reductions over shards; how many of them are in grad_shard

    @property
    def is_sharded(self) -> bool:
        return self.level >= 1

    @property
    def frees_grad(self) -> bool:
        return self.level >= 2

    @property
    def frees_weights(self) -> bool:
        return self.level == 3

    def within_shard(self, flat: Tensor, start: int, stop: int) -> Tensor:
        """Return elements start..stop of the whole bucket, if this shard has them. flat: as long as the shard."""
        start, stop = (min(max(i - self.shard.start, 0), len(flat)) for i in (start, stop))
        return flat[start:stop]

    def parts(self, flat: Tensor) -> Parts:
        """Return (spec, part) for every span that overlaps this shard. flat: as long as the shard."""
        found = []
        for start, stop, spec in self.spans:
            part = self.within_shard(flat, start, stop)
            if len(part):
                found.append((spec, part))
        return found

    # Gradient. A backward adds it to main_grad(param) and calls ready(param). The reduction has three steps:
    #
    #     start_reduction       Start to reduce-scatter `grad` over the shards.
    #     continue_reduction    Wait for the reduce-scatter and add its result to grad_shard. After the last one of the
    #                           step, start to all-reduce grad_shard over the replicas, if there are any.
    #     finish_step           Wait for the all-reduce.
    #
    # Level 0 has one shard: there start_reduction starts the all-reduce at once.
    #
    # `ready` calls start_reduction. The next bucket that starts a reduction calls continue_reduction of this one. If
    # there is none, finish_step does. So all collectives except the last run under a backward. The end of a step with
    # replicas:
    #
    #     ready       bucket 3                bucket 2                  bucket 1                  finish_step
    #     bucket 3    start reduce-scatter    add, start all-reduce                               wait
    #     bucket 2                            start reduce-scatter      add, start all-reduce     wait
    #     bucket 1                                                      start reduce-scatter      add, all-reduce, wait

    def begin_step(self, micro_batches: int) -> None:
        super().begin_step(micro_batches)
        self.reductions = micro_batches if self.frees_grad else 1
        self.reduced = 0
        self.scattering = self.summing = None  # not None if the step before has failed

    def ready(self, param: nn.Parameter) -> None:
        """If gradients are freed, also start a reduction after as many gradients as a micro-batch has.

        In a split backward these can come from different micro-batches, because the gradients of norms are computed
        before the gradients of matrices. Each gradient is still reduced once.
        """
        super().ready(param)  # starts a reduction if this was the last gradient of the step
        if self.frees_grad and self.missing > 0 and self.missing % self.grads_per_micro_batch == 0:
            self.start_reduction()

    def start_reduction(self) -> None:
        if not self.is_sharded:
            self.start_all_reduce()
            return
        # Levels 2 and 3 now free the gradient of the bucket before, so that at most two whole gradients exist. With
        # replicas, this starts the all-reduce of the bucket before, which backward then hides. Level 1 without replicas
        # has neither reason, and does not wait: if the network were a bucket behind, backward would stand still.
        if self.frees_grad or self.replicas.size > 1:
            axis = self.shards.process_group
            if axis in self.last_started:
                self.last_started[axis].continue_reduction()
            self.last_started[axis] = self
        whole = self.grad.to(self.reduce_dtype)
        if self.frees_grad:
            self.grad = None  # its memory is freed when the reduce-scatter has been waited for
        # The first result of a step is received in grad_shard itself, if dtypes allow. At level 1 that is this rank's
        # slice of `whole`, as NCCL wants it for a reduce-scatter in place.
        in_place = self.reduced == 0 and whole.dtype == self.acc_dtype
        received = self.grad_shard if in_place else whole.new_empty(len(self.grad_shard))
        self.scattering = reduce_scatter(received, whole, self.shards, async_op=True)

    def continue_reduction(self) -> None:
        """Do nothing if no reduce-scatter is running."""
        if self.scattering is None:
            return
        self.add_to_shard(self.scattering.wait())
        self.scattering = None
        self.reduced += 1
        if self.reduced == self.reductions:
            self.start_all_reduce()

    def add_to_shard(self, received: Tensor) -> None:
        """Add the result of a reduce-scatter. The first one of a step overwrites what is left of the step before."""
        if received is self.grad_shard:
            return
        if self.reduced == 0:
            self.grad_shard.copy_(received)
        else:
            self.grad_shard.add_(received)

    def start_all_reduce(self) -> None:
        if self.replicas.size > 1:
            self.summing = all_reduce(self.grad_shard.to(self.reduce_dtype), self.replicas, async_op=True)

    def finish_step(self) -> None:
        """Wait until grad_shard is the sum over all ranks and micro-batches. Call this after the last backward."""
        self.check_complete()
        self.continue_reduction()
        if self.summing:
            total = self.summing.wait()
            self.summing = None
            if total is not self.grad_shard:
                self.grad_shard.copy_(total)
        for spec, part in self.parts(self.grad_shard):
            for axis in spec.partial_axes:  # with sp, gradients of norms' weights are partial over tp
                all_reduce(part, self.groups[axis])

    def owns(self, spec: Spec) -> bool:
        """Whether this rank, of all that hold the same shard of such a parameter, counts it in the norm."""
        return self.replicas.rank == 0 and is_first_replica(spec, self.groups)

    def squared_norm(self) -> Tensor:
        """The sum of the squared gradients that this rank owns; a scalar tensor."""
        total = torch.zeros((), dtype=self.acc_dtype, device=self.device)
        for spec, part in self.parts(self.grad_shard):
            if self.owns(spec):
                total += torch.linalg.vector_norm(part).square()
        return total

    # Weights. Levels 1 and 2 all-gather them after the update; at level 3 they are whole from unshard to reshard.

    def update_weights(self) -> None:
        """From the master weights: this rank's shard, which levels 1 and 2 then start to all-gather."""
        self.unsharding.wait()  # an unused prefetch may be in flight: it reads weight_shard and writes weights
        for param in self.params:
            param.generation += 1  # caches of what was computed from the weights are invalid: fp8.py
        self.store.copy_weights(self.master, self.weight_shard)
        if self.frees_weights:  # a forward whose backward never ran has left old weights unsharded
            self.users = 0
            self.free_weights()
        elif self.is_sharded:
            self.unsharding = all_gather(self.weights, self.weight_shard, self.shards, async_op=True)

    def prefetch(self) -> None:
        """Start the all-gather of the weights at level 3, if they are not whole already."""
        if self.frees_weights and self.weights.untyped_storage().nbytes() == 0:
            self.weights.untyped_storage().resize_(self.weights.nbytes)
            self.unsharding = all_gather(self.weights, self.weight_shard, self.shards, async_op=True)

    def unshard(self) -> None:
        """Wait until the weights are whole. They stay so until every `unshard` has been matched by a `reshard`."""
        self.prefetch()
        self.unsharding.wait()
        self.users += 1

    def reshard(self) -> None:
        self.users -= 1
        assert self.users >= 0, f"{self.name}: more calls of reshard than of unshard"
        if self.frees_weights and self.users == 0:
            self.free_weights()

    def free_weights(self) -> None:
        """The parameters stay views of the freed memory, valid once it is allocated again."""
        self.weights.untyped_storage().resize_(0)

    # Values in and out.

    def pieces(self, part: slice | None = None) -> Iterator[tuple[nn.Parameter, Box, slice]]:
        """This rank's shard, or the slice `part` of it, as boxes of global tensors: (parameter, box, where the box's
        elements are in grad_shard and in each tensor of `state`). Each element is in one piece, padding in none."""
        part = part or slice(0, len(self.master))
        for param in self.params:
            begin = self.offset[param] - self.shard.start  # of the parameter, in the shard; below 0, if before it
            for box, place in pieces_within(part, param.box, begin):
                yield param, box, place

    def load(self, source: Source, what: str = "master") -> None:
        """Fill state[what] from a source. "master" also updates the weights, with a collective at levels 1 and 2."""
        self.unsharding.wait()  # or an all-gather of old weights would overwrite these
        for param, box, place in self.pieces():
            self.state[what][place] = source(param.spec, box).flatten().to(self.state[what].device, self.acc_dtype)
        if what == "master":
            self.update_weights()


# ---- weights around a unit ------------------------------------------------------------------------------------------

class UnitWeights:
    """Hooks around a unit, so that its weights are whole while it uses them. U: unshard, wait until they are (at levels
    1 and 2 for the all-gather of the update). At level 3 also P: prefetch, start the all-gather of the unit that runs
    next; R: reshard. The head stays whole from its forward to its backward, which in most schedules follows directly.
    The embedding's backward reads no weights.

        forward     U1 P2 [unit 1] R1     U2 P3 [unit 2] R2     U3 [head] P2
        backward          [head]   R3     U2 P1 [unit 2] R2     U1 [unit 1] R1

    following: the UnitWeights of the stage's next unit, None for its last.
    """

    def __init__(self, unit: nn.Module, buckets: list[ShardedBucket], following: "UnitWeights | None", is_head: bool):
        self.buckets, self.following, self.is_head = buckets, following, is_head
        # The unit before, whose backward comes after this one's: that unit's forward sets it here.
        self.previous: UnitWeights | None = None
        unit.register_forward_pre_hook(self.before_forward)
        unit.register_forward_hook(self.after_forward)

    def unshard(self, then: "UnitWeights | None") -> None:
        for bucket in self.buckets:
            bucket.unshard()
        if then:
            then.prefetch()

    def prefetch(self) -> None:
        for bucket in self.buckets:
            bucket.prefetch()

    def reshard(self) -> None:
        for bucket in self.buckets:
            bucket.reshard()

    def before_forward(self, unit: nn.Module, inputs: tuple) -> tuple:
        self.unshard(self.following)
        x, *others = inputs
        x = call_in_backward(self.reshard, x)  # its gradient is the last that is computed from weights
        # An evaluation has no backward, and the embedding's (x: token ids) reads no weights. Any other would miss them.
        misses = torch.is_grad_enabled() and x.is_floating_point() and not x.requires_grad
        if misses and any(bucket.frees_weights for bucket in self.buckets):
            raise ValueError(f"ZeRO level 3: the input of {type(unit).__name__} does not require grad, so its weights "
                             "would be missing in backward: call x.requires_grad_()")
        return x, *others

    def after_forward(self, unit: nn.Module, inputs: tuple, y: Tensor) -> Tensor:
        if not inputs[0].requires_grad:  # an evaluation, or the embedding: no backward reads weights
            self.reshard()
            return y
        if self.following:
            self.following.previous = self
        if self.is_head:
            if self.previous:
                self.previous.prefetch()
            return y
        self.reshard()
        return call_in_backward(lambda: self.unshard(self.previous), y)


def add_hooks(units: Units, buckets: list[ShardedBucket], head: nn.Module | None) -> None:
    """Give every unit its UnitWeights, with the buckets of its parameters."""
    bucket_of = {param: bucket for bucket in buckets for param in bucket.params}
    for modules in units.values():
        following = None
        for unit in reversed(modules):
            buckets_of_unit = list(dict.fromkeys(bucket_of[param] for param in unit.parameters()))  # each once
            following = UnitWeights(unit, buckets_of_unit, following, unit is head)


def call_in_backward(action: Callable[[], None], x: Tensor) -> Tensor:
    """x, whose complete gradient backward passes on only after calling `action`."""
    x = x.view_as(x)  # a node of its own in the graph: backward comes to it after all that has used it, and before x
    if x.requires_grad:
        x.register_hook(lambda grad: action())
    return x


# ---- the update -----------------------------------------------------------------------------------------------------

class ElementwiseUpdate:
    """The update of buckets by a rule that treats every element alone. It has the methods of muon.Muon.

    settings: betas, eps and weight_decay.
    """

    def __init__(self, buckets: list[ShardedBucket], rule: UpdateRule, **settings):
        self.buckets, self.rule, self.settings = buckets, rule, settings

    def start(self, grads: Mapping[ShardedBucket, Pending], step: StepScalars) -> None:
        """Update all buckets. grads: bucket -> gradient of its shard."""
        for bucket in self.buckets:
            self.update(bucket, grads[bucket].wait(), step)
            bucket.update_weights()

    def finish(self, step: StepScalars) -> None:
        """Do nothing: the update needs no exchange."""

    def update(self, bucket: ShardedBucket, grad: Tensor, step: StepScalars) -> None:
        moments = [bucket.state[name].to(bucket.acc_dtype) for name in self.rule.state]  # copies, if they are in bf16
        parts = [bucket.parts(flat) for flat in (bucket.master, grad, *moments)]
        self.rule.update(*parts, **step._asdict(), **self.settings)
        for name, moment in zip(self.rule.state, moments):
            if moment is not bucket.state[name]:
                bucket.state[name].copy_(moment)


class Optimizer:
    """The buckets of a model and their update: `load` once; then, in each step, begin_step, all backwards, finish_step
    and step.

    groups: of all axes, and "world" and "replicate" (the ranks with the same shard, in hybrid sharding).
    bucket_mb: see dp.py; level 3 takes 0, a bucket per unit. clip: largest norm of the whole gradient, 0 for none.
    moments_dtype: of m and v. reduce_dtype: in which gradients are sent and summed over ranks. Default of both: the
    accumulation dtype, in which micro-batches are always summed. head: the unit that at level 3 stays whole from its
    forward to its backward. offload: run/offload.py's OffloadedState, or None. peers: only for rule="muon", see
    groups.peers_of; by default this rank alone.
    """

    def __init__(self, units: Units, groups: Groups, *, bucket_mb: float = 25.0, level: int = 0, rule: str = "adamw",
                 betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.1,
                 clip: float = 1.0, moments_dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None,
                 head: nn.Module | None = None, offload: Callable | None = None, peers: Sequence = ()):
        need(level in range(4), f"ZeRO level {level}: must be 0, 1, 2 or 3")
        need(level or groups.get("replicate", ALONE).size == 1,
             "ZeRO level 0 has no shards to replicate: use level 1, 2 or 3, or a group \"replicate\" of one rank")
        need(all(0 <= beta < 1 for beta in betas), f"betas {betas}: must be from 0 to below 1")
        need(moments_dtype != torch.bfloat16 or betas[1] <= 0.99, f"betas {betas}: with moments in bf16 the second "
             "must be at most 0.99, as an average in bf16 cannot move by less than 1/256 of itself")
        need(min(clip, weight_decay) >= 0, f"clip {clip}, weight_decay {weight_decay}: must be 0 (none) or more")
        self.world, self.clip = groups["world"], clip

        kind = kind_of if rule == "muon" else lambda spec: None
        last_started = {}
        self.buckets, self.of_matrices, others = [], [], []  # all; those that Muon updates; the others
        for params in assign_to_buckets(units, 0 if level == 3 else bucket_mb, groups, kind):
            is_matrix = kind(list(params)[0].spec) == "matrix"
            bucket = ShardedBucket(params, groups, level=level, moments_dtype=moments_dtype, reduce_dtype=reduce_dtype,
                                   offload=offload, last_started=last_started,
                                   rule_state=Muon.state if is_matrix else UPDATE_RULES[rule].state)
            self.buckets.append(bucket)
            if is_matrix:
                self.of_matrices.append(bucket)
            else:
                others.append(bucket)

        self.updates = [ElementwiseUpdate(others, UPDATE_RULES[rule], betas=betas, eps=eps, weight_decay=weight_decay)]
        self.muon = None
        if self.of_matrices:
            self.muon = Muon(self.of_matrices, groups["muon"], peers or [groups], weight_decay)
            self.updates = [self.muon, *self.updates]  # Muon first: the other update hides the exchange that it starts

        device = self.buckets[0].device
        self.steps = torch.zeros((), device=device)  # updates so far, for AdamW's bias correction
        self.loss_scale = LossScale(device) if self.buckets[0].weights.dtype == torch.float16 else None
        add_hooks(units, self.buckets, head)

    def load(self, source: Source, what: str = "master") -> None:
        """Fill the tensors `what` of the buckets' states, where there are such, from a source. Every rank calls it."""
        for bucket in self.buckets:
            if what in bucket.state:
                bucket.load(source, what)

    def begin_step(self, micro_batches: int) -> None:
        """Zero the gradients, and expect `micro_batches` backward passes through each stage."""
        for bucket in self.buckets:
            bucket.begin_step(micro_batches)

    def scale_loss(self, loss: Tensor | float) -> Tensor | float:
        """What to call backward on, the loss or a factor of it: in fp16 runs times the loss scale. Of 1 the scale."""
        return loss * self.loss_scale.value if self.loss_scale else loss

    def finish_step(self) -> None:
        """Finish all gradients, in an order that all ranks share: pipeline ranks may list their stages differently."""
        for bucket in sorted(self.buckets, key=lambda bucket: bucket.name):
            bucket.finish_step()

    def step(self, lr: float, to_sum: Tensor | None = None) -> Tensor:
        """Clip and update. Returns the norm of the whole gradient before clipping, the same on every rank. If that is
        not finite, the step is skipped: nothing changes but the loss scale. to_sum: a vector that is replaced by its
        sum over all ranks, in the same reduction as the norm."""
        squared = torch.stack([bucket.squared_norm() for bucket in self.buckets]).sum()[None]
        summed = squared if to_sum is None else torch.cat((squared, to_sum.to(squared)))
        all_reduce(summed, self.world)
        if to_sum is not None:
            to_sum.copy_(summed[1:])
        norm = summed[0].sqrt() / self.scale_loss(1.0)
        found_inf = (~norm.isfinite()).float()
        self.update(lr, found_inf, self.clip_grads(norm))
        self.steps += 1 - found_inf
        if self.loss_scale:
            self.loss_scale.update(found_inf)
        return norm

    def clip_grads(self, norm: Tensor) -> Tensor:
        """Clip, and undo the loss scale. Update rules' kernels do it as they read gradients: they divide by grad_scale,
        which this returns. That saves a pass. They read it in fp32, which is too coarse for fp64 runs, whose gradients
        are all multiplied here; in other runs those of matrices are, as Muon has no such kernel."""
        limit = (self.clip / (norm + 1e-6)).clamp(max=1) if self.clip else torch.ones_like(norm)
        factor = limit / self.scale_loss(1.0)
        is_fp64 = factor.dtype == torch.float64
        for bucket in self.buckets if is_fp64 else self.of_matrices:
            bucket.grad_shard.mul_(factor)
        return torch.ones((), device=factor.device) if is_fp64 else 1 / factor

    def update(self, lr: float, found_inf: Tensor, grad_scale: Tensor) -> None:
        """Update all weights, where the optimizer state is: on the device or, if it is offloaded, on the host."""
        grads = {bucket: bucket.store.copy_grad(bucket.grad_shard) for bucket in self.buckets}
        where = self.buckets[0].master.device
        step = StepScalars(lr, self.steps.to(where), found_inf.to(where), grad_scale.to(where))
        for update in self.updates:
            update.start(grads, step)
        for update in self.updates:
            update.finish(step)

    def extra_state(self) -> dict[str, Tensor]:
        """Scalars that belong to no parameter and are the same on every rank. To restore them, copy into them."""
        scale = self.loss_scale
        return {"steps": self.steps} | ({"scale": scale.value, "good_steps": scale.good_steps} if scale else {})


# ---- demo: python zero.py -------------------------------------------------------------------------------------------

def demo(group: Group) -> None:
    groups, x = {"world": group, "replicate": ALONE, "dp": group}, torch.ones(1, 256).bfloat16().requires_grad_()
    for level in range(4):
        layers = [nn.Linear(256, 256, bias=False, device="meta") for _ in range(12)]
        for number, layer in enumerate(layers):
            layer.weight = parameter(Spec(f"{number}", (256, 256)), groups, x.dtype)
        optimizer = Optimizer({0: layers}, groups, bucket_mb=0, level=level)
        sent.clear()
        optimizer.begin_step(micro_batches=1)  # so A = 1; a gradient has 4 bytes, a weight 2
        nn.Sequential(*layers)(x).sum().backward()
        optimizer.finish_step()
        flat = [value for bucket in optimizer.buckets for value in (*vars(bucket).values(), *bucket.state.values())]
        held = sum(storage.nbytes() for storage in {y.untyped_storage() for y in flat if isinstance(y, Tensor)}) / 1e6
        optimizer.step(lr=1e-3)
        if group.rank == 0:
            print(f"level {level}: {held:5.2f} MB held, {sum(sent.values()) / 1e6:5.2f} sent  {'█' * round(3 * held)}")
        nn.Sequential(*layers)(x)  # waits for the all-gathers that the update has started


if __name__ == "__main__":
    run_demo(demo, ranks=4)
