"""ZeRO: data parallel ranks shard the optimizer state, at level 2 also gradients, at level 3 also weights.

What each of n = 4 ranks holds of P parameters, and how many elements it sends per step of A micro-batches. Level 0 is
plain data parallelism (dp.py). Level 3 is what PyTorch calls FSDP.

    level   weights   gradient   optimizer state   sent, x (n-1)/n   by
    0       ████      ████       ████              2P                all-reduce gradient
    1       ████      ████       █                 2P                reduce-scatter gradient, all-gather weights
    2       ████      █          █                 (A+1)P            A reduce-scatters, one all-gather
    3       █         █          █                 3AP               A reduce-scatters, 2A all-gathers

The idea: an all-reduce is a reduce-scatter and then an all-gather. ZeRO puts the update between the two. Each rank sums
one shard of the gradient, updates this shard of the weights, and sends it to the others. So each rank needs the
optimizer state of its shard only. Level 2 keeps only the shard of the gradient after each micro-batch. Level 3 also
gathers the weights of a unit before its forward, and again before its backward.

Symbols: n ranks of the data axis ("dp", for experts "edp": core/groups.py), which is not the axis named "data" of
train.py. P parameters. A micro-batches per step. A unit is the embedding, a block, or the head. A bucket holds the
parameters of one or more units (dp.py). The papers call a level a stage. In this repository, "stage" means a pipeline
stage. "Whole" is the opposite of sharded: FSDP calls whole weights full or unsharded.

When a rank holds a whole tensor, and when only its shard of it:

    tensor            when                     level 0   level 1     level 2     level 3
    weights           between steps            whole     whole       whole       shard
                      forward and backward     whole     whole       whole       whole while their unit runs
                      update                   whole     shard (a)   shard (a)   shard
    gradient          between steps, forward   whole     whole       shard       shard
                      backward                 whole     whole       both (b)    both (b)
                      update                   whole     shard (c)   shard       shard
    optimizer state   always                   whole     shard       shard       shard

    (a) The update changes this shard. An all-gather, which runs under the next forward, then makes the weights whole.
    (b) The gradient of a micro-batch is whole until it is reduced. The result is added to the shard.
    (c) The whole gradient keeps its memory, but only this shard of it is summed over the ranks.

Where to read: PlainLevel1 is level 1 in its simplest form. Everything else refines it:

    spans             Neighbours in a bucket that are treated alike.                   Span
    buckets           The collectives run under backward and forward.                  ShardedBucket
    hybrid sharding   n ranks shard, r groups of n ranks replicate: PyTorch's HSDP.    ShardedBucket
    reduce dtype      Gradients are sent and summed over ranks in 16 bits.             ShardedBucket
    level 2           Each micro-batch's gradient is reduced at once, then freed.      Level2Bucket
    level 3           Weights are gathered before each use, then freed.                Level3Bucket
    prefetch          The weights of the next unit are gathered while this one runs.   UnitWeights
    offload           The host keeps the optimizer state and updates it.               StateOnDevice; run/offload.py
    Muon              Matrices are updated whole, each by one rank.                    Optimizer; muon.py
    clipping          The norm of a gradient of which each rank holds a shard.          Optimizer

Saves: all but 1/n of the optimizer state (level 1), also of the gradients (level 2), also of the weights (level 3).
Costs: the elements sent, as above. Gradients are sent in fp32 or --reduce-dtype, weights in their dtype.
       Level 3 gathers the embedding and the head once per micro-batch, not twice (see UnitWeights).
       Hybrid sharding over r replicas of n ranks sends 2P/n (r-1)/r more.
Stops helping when: activations fill the memory; at levels 2 and 3, a micro-batch is too small to hide its collectives.

Which collectives of weights and gradients are not hidden under computation:
- the last reduction of a backward;
- the first all-gather of a forward and, at level 3, the first of a backward on a pipeline stage without the head;
- the sums over other axes in finish_step: of norm weights' gradients over tp, and of a tied embedding's over "tie";
- the second exchange of Muon (muon.py).

Levels 2 and 3 hold at most two buckets' whole gradients per data axis. Level 3 also holds at most two units' whole
weights. Level2Bucket and UnitWeights list the exceptions.

Rajbhandari et al. 2020 (ZeRO); Zhao et al. 2023 (FSDP: prefetching); Micikevicius et al. 2018 (mixed precision).
"""
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from core.collectives import ALONE, Group, Groups, Pending, all_gather, all_reduce, done, reduce_scatter, run_demo, sent
from core.config import need, padded_elements
from core.param import Box, Source, Spec, is_first_replica, most_elements, parameter, pieces_within
from dp import Bucket, Units, assign_to_buckets
from muon import Muon, kind_of
from optimizers import UPDATE_RULES, LossScale, Parts, StepScalars, UpdateRule

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


# ---- the plain version: level 1 of one flat buffer ------------------------------------------------------------------

class PlainLevel1:
    """Level 1 of a whole model in one flat buffer, with any element-wise optimizer of torch.

        optimizer = PlainLevel1(model.parameters(), group, lambda shard: torch.optim.AdamW(shard, lr=1e-3))
        loss.backward()      # per micro-batch: the sum over this rank's tokens, divided by the tokens of all ranks
        optimizer.step()     # all ranks have the same new weights

    All ranks must begin with the same weights. `step` also zeroes the gradient. Do not call model.zero_grad(): it would
    replace `.grad`, which must stay a view of the flat buffer.
    """

    def __init__(self, params: Iterable[nn.Parameter], group: Group, make_optimizer: MakeOptimizer):
        params, self.group = list(params), group
        length = -(-sum(param.numel() for param in params) // group.size)  # of a shard, rounded up
        own = slice(group.rank * length, (group.rank + 1) * length)

        self.weights = params[0].new_zeros(group.size * length)  # whole, on every rank; padding at the end
        self.grad = torch.zeros_like(self.weights)  # whole: backward adds to all of it
        start = 0
        for param in params:
            stop = start + param.numel()
            self.weights[start:stop] = param.detach().flatten()
            param.data = self.weights[start:stop].view(param.shape)
            param.grad = self.grad[start:stop].view(param.shape)
            start = stop

        self.weight_shard = nn.Parameter(self.weights[own])  # a view of `weights`
        self.weight_shard.grad = self.grad[own]
        self.optimizer = make_optimizer([self.weight_shard])  # its state has the size of the shard

    def step(self) -> None:
        reduce_scatter(self.weight_shard.grad, self.grad, self.group)  # the shard is now the sum over the ranks
        self.optimizer.step()
        all_gather(self.weights, self.weight_shard.detach(), self.group)
        self.grad.zero_()


# ---- spans: neighbours in a bucket that are treated alike -----------------------------------------------------------
# A shard may begin and end anywhere in a parameter. Some operations on its elements depend on the parameter's Spec. So
# a bucket is sorted by `treatment`, and these operations go over the few spans of equal treatment.

class Span(NamedTuple):
    """Elements start..stop of the flat tensors of a bucket: parameters that are treated alike.

    spec: the first parameter's Spec.
    """
    start: int
    stop: int
    spec: Spec


def treatment(spec: Spec) -> tuple:
    """Return the three facts on which the treatment of a parameter's elements depends.

    partial_axes       the axes over which finish_step sums the gradient, such as "tp" for norm weights
    replicated_axes    the axes along which ranks have copies, which the norm counts once
    decay              whether the update applies weight decay (parameters with decay come first)
    """
    return spec.partial_axes, spec.replicated_axes, not spec.decay


def sorted_by_treatment(params: dict[nn.Parameter, int]) -> dict[nn.Parameter, int]:
    """Sort the `params` of a Bucket by treatment. Parameters that are treated alike keep the order of the model.

    So wq, wk and wv stay neighbours, and one matmul adds to all three gradients. (There is an exception: with more tp
    ranks than key and value heads, wk and wv are replicated over "kv_copy", and wq is not. See core/param.py.)
    """
    return {param: params[param] for param in sorted(params, key=lambda param: treatment(param.spec))}


def find_spans(bucket: Bucket) -> list[Span]:
    """Return the spans of a sorted bucket. They have no gaps.

    Where a rank's vocabulary shard is smaller than the largest, the unused elements after it are in the span. They are
    always zero.
    """
    spans: list[Span] = []
    for param in bucket.params:
        start = bucket.offset[param]
        stop = start + most_elements(param.spec, bucket.groups)
        if spans and treatment(spans[-1].spec) == treatment(param.spec):
            spans[-1] = spans[-1]._replace(stop=stop)
        else:
            spans.append(Span(start, stop, param.spec))
    return spans


# ---- buckets: levels 0 and 1, hybrid sharding, reduce dtype ---------------------------------------------------------

class ShardedBucket(Bucket):
    """The weights, gradient and optimizer state of one bucket at levels 0 and 1. Levels 2 and 3 are its subclasses.

    Flat tensors:

                          whole, `numel` elements   this rank's shard, numel / (number of shards) elements
        weights           weights                   weight_shard, a view of `weights`
        gradient          grad                      grad_shard, a view of `grad`
        optimizer state                             state: name -> tensor; "master" weights, and moments (rule_state)

    The four steps of PlainLevel1.step happen at different times:

        reduce_scatter     start_reduction, when backward has added the bucket's last gradient; continue_reduction and
                           finish_step wait for it
        optimizer.step     Optimizer.step, which calls update_weights
        all_gather         update_weights starts it; unshard, before the next forward of a unit, waits for it
        grad.zero_         begin_step

    In addition, gradients and optimizer state are in fp32 or wider (acc_dtype), except moments in moments_dtype.
    Weights in 16 bits have master weights.

    Two groups of ranks: `shards` are the ranks with different shards of this bucket. `replicas` are the ranks with the
    same shard as this rank. The data axis is "dp", or "edp" for experts.

                           shards                        replicas
        level 0            this rank only                the n ranks of the data axis
        levels 1 to 3      the n ranks of the data axis  this rank only
        hybrid sharding    the n ranks of the data axis  the r ranks of the axis "replicate"

    So in hybrid sharding the data axis spans only the ranks of one replica, and n r ranks have different data.

    reduce_dtype: the dtype in which gradients are sent and summed over ranks, by default acc_dtype. If it differs,
        level 0, and level 1 without hybrid sharding, hold a second copy of all gradients in this dtype until
        finish_step.
    offload: the class OffloadedState of run/offload.py, which is called with the bucket, or None for StateOnDevice.
    last_started: process group -> the bucket that last started a reduction on it. All buckets share this dict.
    """
    frees_weights = False  # level 3: `weights` have memory only while a unit uses them

    def __init__(self, params: dict[nn.Parameter, int], groups: Groups, shards: Group, replicas: Group, *,
                 rule_state: tuple[str, ...], moments_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None,
                 offload: Callable | None, last_started: dict):
        super().__init__(sorted_by_treatment(params), groups)
        self.spans = find_spans(self)
        self.shards, self.replicas = shards, replicas
        self.reduce_dtype = reduce_dtype or self.acc_dtype
        self.last_started = last_started
        self.numel = padded_elements(self.numel, self.shards.size)  # this padding is in no span
        length = self.numel // self.shards.size
        self.shard = slice(self.shards.rank * length, (self.shards.rank + 1) * length)

        self.allocate_weights(length)
        self.unsharding = done(self.weights)  # the most recent all-gather of the weights; at first, a finished one

        self.store = offload(self) if offload else StateOnDevice(self)
        needs_master = self.weights.dtype != self.acc_dtype or offload is not None
        self.master = self.store.zeros(length, self.acc_dtype) if needs_master else self.weight_shard
        self.state = {"master": self.master}
        for name in rule_state:
            self.state[name] = self.store.zeros(length, moments_dtype or self.acc_dtype)

        self.allocate_gradient(length)
        self.scattering: Pending | None = None  # the reduce-scatter over shards, while it is running
        self.summing: Pending | None = None  # the all-reduce over replicas, while it is running
        self.reductions = 1  # reduce-scatters per step
        self.reduced = 0  # how many of them are in grad_shard

    @property
    def is_sharded(self) -> bool:
        return self.shards.size > 1

    def allocate_weights(self, length: int) -> None:
        """Allocate the whole weights, and the shard, which has `length` elements."""
        self.weights = self.zeros(self.numel, self.params[0].dtype)
        for param in self.params:
            # Assigning .data keeps the parameter's own version counter, so gathering into `weights` does not trip
            # autograd's check of saved tensors.
            param.data = self.view(self.weights, param)
        self.weight_shard = self.weights[self.shard]

    def allocate_gradient(self, length: int) -> None:
        self.grad = self.zeros(self.numel, self.acc_dtype)
        self.grad_shard = self.grad[self.shard]

    # The gradient. Every reduction has three steps:
    #
    #     start_reduction       Start to reduce-scatter `grad` over the shards.
    #     continue_reduction    Wait for the reduce-scatter, and put its result into grad_shard. After the last one of
    #                           the step, start to all-reduce grad_shard over the replicas.
    #     finish_step           Call continue_reduction, if no bucket has done so, and wait for the all-reduce.
    #
    # Level 0 has one shard, so it begins with the all-reduce. Without hybrid sharding, levels 1 to 3 have one replica,
    # and there is no all-reduce.
    #
    # With hybrid sharding, the bucket that starts the next reduction first calls continue_reduction of this one. So
    # the all-reduces also run under backward, except the last. The end of a step:
    #
    #     ready       bucket 3                bucket 2                  bucket 1                  finish_step
    #     bucket 3    start reduce-scatter    start all-reduce                                    wait
    #     bucket 2                            start reduce-scatter      start all-reduce          wait
    #     bucket 1                                                      start reduce-scatter      all-reduce, wait

    def begin_step(self, micro_batches: int) -> None:
        super().begin_step(micro_batches)
        self.reduced = 0
        self.scattering = self.summing = None  # not None if the step before has failed

    def start_reduction(self) -> None:
        if not self.is_sharded:
            self.start_all_reduce()
            return
        # Without replicas no all-reduce follows, so nothing is waited for here: if the network lagged by a bucket,
        # backward would stall. (Level 2 accepts this to bound memory.)
        if self.replicas.size > 1:
            self.continue_reduction_before()
        self.start_reduce_scatter(self.grad.to(self.reduce_dtype))

    def continue_reduction_before(self) -> None:
        """Continue the reduction that was started before this one on the same ranks."""
        ranks = self.shards.process_group
        if ranks in self.last_started:
            self.last_started[ranks].continue_reduction()
        self.last_started[ranks] = self

    def start_reduce_scatter(self, whole: Tensor) -> None:
        """Start to sum `whole` over the ranks, each of which receives its shard.

        The first result of a step is received in grad_shard itself, if the dtypes are the same. At level 1 grad_shard
        is this rank's slice of `whole`, so NCCL works in place. Later results are received in a new tensor.
        """
        into_shard = self.reduced == 0 and whole.dtype == self.acc_dtype
        received = self.grad_shard if into_shard else whole.new_empty(len(self.grad_shard))
        self.scattering = reduce_scatter(received, whole, self.shards, async_op=True)

    def continue_reduction(self) -> None:
        """Wait for the reduce-scatter, and perhaps start the all-reduce. Do nothing if no reduce-scatter is running."""
        if self.scattering is None:
            return
        self.put_into_shard(self.scattering.wait())
        self.scattering = None
        self.reduced += 1
        if self.reduced == self.reductions:
            self.start_all_reduce()

    def put_into_shard(self, received: Tensor) -> None:
        """Put the result of a reduce-scatter into grad_shard. It overwrites the gradient of the step before."""
        if received is not self.grad_shard:  # Pending.wait returns the tensor that was received into
            self.grad_shard.copy_(received)

    def start_all_reduce(self) -> None:
        """Start to sum grad_shard over the replicas."""
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
        # Sum over other axes. With sequence parallelism, tensor parallel ranks have different tokens, so each computes
        # one term of the gradients of norm weights. The first and the last pipeline stage each compute one term of a
        # tied embedding's gradient (axis "tie").
        for spec, part in self.parts(self.grad_shard):
            for axis in spec.partial_axes:
                all_reduce(part, self.groups[axis])

    def owns(self, spec: Spec) -> bool:
        """Return whether this rank counts its elements of a parameter in the gradient norm.

        Among the ranks that hold copies of the same elements, exactly one counts them.
        """
        return self.replicas.rank == 0 and is_first_replica(spec, self.groups)

    def squared_norm(self) -> Tensor:
        """Return the sum of squares of the gradient elements that this rank owns, a scalar tensor."""
        total = torch.zeros((), dtype=self.acc_dtype, device=self.device)
        for spec, part in self.parts(self.grad_shard):
            if self.owns(spec):
                total += torch.linalg.vector_norm(part).square()
        return total

    # The weights.

    def update_weights(self) -> None:
        """Copy the master weights, rounded, into this rank's shard of the weights, and start to send it to the others.

        Call this after `master` has changed. (Level 3 sends nothing yet: see replace_whole_weights.)
        """
        self.unsharding.wait()  # an all-gather that nobody waited for may still read weight_shard
        for param in self.params:
            param.generation += 1  # makes caches of values that were computed from the weights stale: fp8.py
        self.store.copy_weights(self.master, self.weight_shard)
        self.replace_whole_weights()

    def replace_whole_weights(self) -> None:
        """The whole weights are out of date: start to gather new ones."""
        if self.is_sharded:
            self.unsharding = all_gather(self.weights, self.weight_shard, self.shards, async_op=True)

    def prefetch(self) -> None:
        """Do nothing: the all-gather of the weights has been started. See Level3Bucket."""

    def unshard(self) -> None:
        """Wait until the weights are whole. A unit calls this before it uses them, and reshard afterwards."""
        self.unsharding.wait()

    def reshard(self) -> None:
        """Do nothing: the weights stay whole. See Level3Bucket."""

    # Parts of the shard.

    def within_shard(self, flat: Tensor, start: int, stop: int) -> Tensor:
        """Return the elements start..stop of the bucket that are in this shard, as a slice of `flat`, perhaps empty.

        flat: a tensor as long as the shard, such as grad_shard.
        """
        start = min(max(start - self.shard.start, 0), len(flat))
        stop = min(max(stop - self.shard.start, 0), len(flat))
        return flat[start:stop]

    def parts(self, flat: Tensor) -> Parts:
        """Return (spec, slice of `flat`) for every span that overlaps this shard. flat: see within_shard."""
        found = []
        for start, stop, spec in self.spans:
            part = self.within_shard(flat, start, stop)
            if len(part):
                found.append((spec, part))
        return found

    def pieces(self, part: slice | None = None) -> Iterator[tuple[nn.Parameter, Box, slice]]:
        """Yield this rank's shard, or the slice `part` of it, as boxes of parameters.

        A box is a block of the global tensor: one slice per dimension (core/param.py). `load` asks a source of initial
        values for these boxes, and checkpoints read and write them, so a checkpoint does not depend on the grid.

        Yields (parameter, box, the slice of grad_shard and of each tensor of `state` that has the box's elements).
        Each element is in one box, padding in none.
        """
        part = part or slice(0, len(self.master))
        for param in self.params:
            # Where the parameter begins, counted from the start of the shard. Below 0 if it begins before the shard.
            begin = self.offset[param] - self.shard.start
            for box, place in pieces_within(part, param.box, begin):
                yield param, box, place

    def load(self, source: Source, what: str = "master") -> None:
        """Fill state[what] from a source, a function (spec, box) -> tensor (core/param.py).

        "master" also updates the weights, with a collective at levels 1 and 2.
        """
        self.unsharding.wait()  # or an all-gather of old weights would overwrite the new ones
        for param, box, place in self.pieces():
            self.state[what][place] = source(param.spec, box).flatten().to(self.state[what].device, self.acc_dtype)
        if what == "master":
            self.update_weights()


# ---- level 2: reduce the gradient after every micro-batch, then free it ---------------------------------------------

class Level2Bucket(ShardedBucket):
    """A bucket whose whole gradient exists only during a backward.

    Changed from level 1: a step has one reduction per micro-batch. Its result is added to grad_shard, a tensor of its
    own. `grad` is allocated at a micro-batch's first gradient (Bucket.main_grad), and freed when it has been reduced.

    At most two buckets per data axis hold a whole gradient: one is being reduced, and backward adds to the other. There
    are three exceptions:
    - In a split backward (zero-bubble schedules) a bucket holds its buffer from the first gradient that is not deferred
      (a norm weight's) to the end of backward_weight, which computes the deferred ones (core/gradients.py).
    - The bucket of a tied embedding keeps its gradient from the head's backward to the embedding's.
    - With Muon at level 2, the norm weights and biases of many units share one bucket. It keeps its gradient until the
      backward of the last of these units.
    """

    def allocate_gradient(self, length: int) -> None:
        self.grad = None
        self.grad_shard = self.zeros(length, self.acc_dtype)

    def begin_step(self, micro_batches: int) -> None:
        super().begin_step(micro_batches)
        self.reductions = micro_batches

    def ready(self, param: nn.Parameter) -> None:
        """Count a gradient. When the count reaches the number of a micro-batch's gradients, start a reduction.

        A reduction takes everything that has been added so far. In a split backward, this may include gradients of
        different micro-batches. Gradients of norm weights are not deferred, so micro-batch 2's may be added before the
        matrices' gradients of micro-batch 1. The sum is right all the same. A gradient is counted after it has been
        added, so it is reduced exactly once, at the latest by the last reduction of the step.
        """
        super().ready(param)  # starts a reduction if this was the last gradient of the step
        if self.missing > 0 and self.missing % self.grads_per_micro_batch == 0:
            self.start_reduction()

    def start_reduction(self) -> None:
        # This frees the gradient of the bucket before, so at most two whole gradients exist.
        self.continue_reduction_before()
        whole = self.grad.to(self.reduce_dtype)
        self.grad = None  # the reduce-scatter keeps `whole` until it has been waited for
        self.start_reduce_scatter(whole)

    def put_into_shard(self, received: Tensor) -> None:
        """Add the result of a reduce-scatter to grad_shard. The first of a step overwrites the last step's gradient."""
        if self.reduced == 0:
            super().put_into_shard(received)
        else:
            self.grad_shard.add_(received)


# ---- level 3: gather weights before each use, then free them --------------------------------------------------------

class Level3Bucket(Level2Bucket):
    """A bucket whose whole weights have memory only while a unit uses them.

    Changed from level 2: weight_shard is a tensor of its own. `unshard` gathers the whole weights, `reshard` frees
    them. The parameters stay views of the freed memory, and are valid again once the weights have been gathered again.
    """
    frees_weights = True

    def allocate_weights(self, length: int) -> None:
        super().allocate_weights(length)
        self.weight_shard = self.zeros(length, self.weights.dtype)
        # Calls of unshard that no reshard has matched. With the schedule afab many micro-batches use the head at once.
        self.users = 0
        self.free_weights()

    def free_weights(self) -> None:
        self.weights.untyped_storage().resize_(0)

    def replace_whole_weights(self) -> None:
        """The whole weights are out of date: free them.

        Some are still whole if a forward with gradients had no backward.
        """
        self.users = 0
        self.free_weights()

    def prefetch(self) -> None:
        """Start to gather the weights, unless they are whole or being gathered."""
        if self.weights.untyped_storage().nbytes() == 0:
            self.weights.untyped_storage().resize_(self.weights.nbytes)
            self.unsharding = all_gather(self.weights, self.weight_shard, self.shards, async_op=True)

    def unshard(self) -> None:
        """Wait until the weights are whole. They stay whole until every `unshard` has been matched by a `reshard`."""
        self.prefetch()
        self.unsharding.wait()
        self.users += 1

    def reshard(self) -> None:
        self.users -= 1
        assert self.users >= 0, f"{self.name}: more calls of reshard than of unshard"
        if self.users == 0:
            self.free_weights()


def make_bucket(params: dict[nn.Parameter, int], groups: Groups, level: int, **settings) -> ShardedBucket:
    """Return a bucket of the class that the level needs, with the groups of ShardedBucket's table.

    A data axis of one rank has nothing to shard, so its buckets are ShardedBuckets at every level.
    settings: the other arguments of ShardedBucket.
    """
    data_axis = groups[list(params)[0].spec.data_axis]
    shards, replicas = (data_axis, groups["replicate"]) if level else (ALONE, data_axis)
    is_sharded = shards.size > 1
    if is_sharded and level == 3:
        return Level3Bucket(params, groups, shards, replicas, **settings)
    if is_sharded and level == 2:
        return Level2Bucket(params, groups, shards, replicas, **settings)
    return ShardedBucket(params, groups, shards, replicas, **settings)


# ---- prefetch: the weights of a unit, and of the next one -----------------------------------------------------------

class UnitWeights:
    """Hooks around a unit, so that its weights are whole while it uses them.

        U    unshard: wait until the weights of this unit are whole
        P    prefetch: start the all-gather of the unit that runs next
        R    reshard: free the weights

    Level 3, with two blocks and a head:

        forward     U1 P2 [block 1] R1     U2 P3 [block 2] R2     U3 [head] P2
        backward          [head]    R3     U2 P1 [block 2] R2     U1 [block 1] R1

    At levels 1 and 2, U waits for the all-gather that the update has started, and P and R do nothing.

    The head's weights stay whole from its forward to its backward, which in most schedules follows directly. The
    embedding's backward reads no weights, so nothing is gathered for it. At most two units have whole weights, with one
    exception: the schedules afab (all forwards, then all backwards) and dualpipev (which interleaves forwards and
    backwards of different micro-batches) run other work between the head's forward and its backward. Meanwhile the
    weights of the head stay whole, and so do the prefetched weights of the block before it.

    When a block is recomputed (recompute.py), its backward runs its forward again, between U and R. These hooks are not
    called again, because recomputation calls a method of the block, not the module.

    following: the UnitWeights of the next unit of the stage, None for the last one.
    """

    def __init__(self, unit: nn.Module, buckets: list[ShardedBucket], following: "UnitWeights | None", is_head: bool):
        self.buckets, self.following, self.is_head = buckets, following, is_head
        # The unit before, whose backward comes next. Its forward sets this, because only then is it known whether its
        # backward will read weights: the embedding's does not, so nothing is prefetched for it. `following` can be set
        # here, because add_hooks makes the UnitWeights of a stage from the last to the first.
        self.previous: UnitWeights | None = None
        unit.register_forward_pre_hook(self.before_forward)
        unit.register_forward_hook(self.after_forward)

    def unshard(self, then: "UnitWeights | None") -> None:
        """Wait until the weights are whole, and start to gather the weights of the unit that runs `then`."""
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
        x = call_in_backward(self.reshard, x)  # after the gradient of x, backward no longer reads these weights
        # Backward calls nothing if x needs no gradient. That is right in an evaluation, which has no backward, and for
        # the embedding, whose x is token ids and whose backward reads no weights. Other units would miss their weights.
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
    """Return a view of x. When the view's gradient is complete, backward calls `action` before it goes on."""
    # The view has a node of its own in the graph. Backward reaches it after all uses of the view, and before the node
    # that produced the original x.
    x = x.view_as(x)
    if x.requires_grad:
        x.register_hook(lambda grad: action())
    return x


# ---- offload: where the optimizer state is --------------------------------------------------------------------------

class StateOnDevice:
    """Keeps the optimizer state of a bucket on its device. run/offload.py's OffloadedState has the same methods."""

    def __init__(self, bucket: ShardedBucket):
        self.device = bucket.device

    def zeros(self, length: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(length, dtype=dtype, device=self.device)

    def copy_grad(self, grad: Tensor) -> Pending:
        """Start to copy the gradient to the optimizer state, for an update. It is on the same device already."""
        return done(grad)

    def copy_weights(self, master: Tensor, weight_shard: Tensor) -> None:
        """Copy the master weights, rounded, into the shard of the weights. The two may be one tensor."""
        if master is not weight_shard:
            weight_shard.copy_(master)


# ---- the update: clipping, loss scale, Muon -------------------------------------------------------------------------

class ElementwiseUpdate:
    """The update of buckets by an element-wise rule. Updating shards then equals updating the whole.

    muon.Muon has the same methods. settings: betas, eps and weight_decay.
    """

    def __init__(self, buckets: list[ShardedBucket], rule: UpdateRule, **settings):
        self.buckets, self.rule, self.settings = buckets, rule, settings

    def start(self, grads: Mapping[ShardedBucket, Pending], step: StepScalars) -> None:
        """Update all buckets. grads: bucket -> a Pending whose result is the gradient of its shard."""
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
    """The buckets of a model and their update.

        optimizer.load(source)                  once: the first weights
        optimizer.begin_step(micro_batches)     in each step
        ... all backward passes ...             hooks add gradients to the buckets, and reduce them
        optimizer.finish_step()
        norm = optimizer.step(lr)

    groups: axis -> group. It must have "world", "replicate" (of one rank without hybrid sharding), the data axes of
        the parameters and, for rule="muon", "muon".
    bucket_mb: the size of a bucket (dp.py). Level 3 ignores it and uses 0, so that a bucket holds the parameters of one
        unit.
    clip: the largest norm of the whole gradient; 0 for no clipping.
    moments_dtype: the dtype of the moments m and v. Default: the accumulation dtype.
    reduce_dtype: the dtype in which gradients are sent and summed over ranks. Default: the accumulation dtype. The sum
        over micro-batches is always in the accumulation dtype.
    head: the unit whose weights stay whole from its forward to its backward at level 3.
    offload: the class OffloadedState of run/offload.py, or None to keep the optimizer state on the device.
    peers: the ranks that share the work of rule="muon", as peers_of of core/groups.py returns them. Default: this rank
        does all the work.
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

        # With rule="muon" matrices have buckets of their own, which Muon updates. AdamW updates all others.
        kind = kind_of if rule == "muon" else lambda spec: None
        self.buckets, self.of_matrices, others = [], [], []
        last_started = {}
        for params in assign_to_buckets(units, 0 if level == 3 else bucket_mb, groups, kind):
            is_matrix = kind(list(params)[0].spec) == "matrix"
            bucket = make_bucket(params, groups, level, moments_dtype=moments_dtype, reduce_dtype=reduce_dtype,
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
        """Fill the tensors `what` of the buckets' states from a source, where they exist. Every rank calls this."""
        for bucket in self.buckets:
            if what in bucket.state:
                bucket.load(source, what)

    def begin_step(self, micro_batches: int) -> None:
        """Zero the gradients, and expect `micro_batches` backward passes through each stage."""
        for bucket in self.buckets:
            bucket.begin_step(micro_batches)

    def scale_loss(self, loss: Tensor | float) -> Tensor | float:
        """Multiply a loss, or a factor of it, by the loss scale in fp16 runs. Otherwise return it unchanged.

        scale_loss(1.0) is the scale.
        """
        return loss * self.loss_scale.value if self.loss_scale else loss

    def finish_step(self) -> None:
        """Finish all gradients, in the order of the buckets' names.

        Ranks must call the blocking collectives that they share in the same order, and pipeline ranks may list their
        buckets in different orders.
        """
        for bucket in sorted(self.buckets, key=lambda bucket: bucket.name):
            bucket.finish_step()

    def step(self, lr: float, to_sum: Tensor | None = None) -> Tensor:
        """Clip and update. Return the norm of the whole gradient before clipping, the same on every rank.

        If the norm is not finite, the step is skipped: nothing changes except the loss scale.
        to_sum: a vector that is replaced by its sum over all ranks, in the all-reduce that the norm needs anyway.
        """
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
        """Return grad_scale, by which the update divides gradients. One division clips and undoes the loss scale.

        The kernels of update rules divide while they read the gradients, which saves a pass over them. Two kinds of
        gradients are scaled here instead. In fp64 runs, all gradients are scaled here and grad_scale is 1, because
        kernels read it in fp32, which is too coarse. In other runs, the gradients of matrices under Muon are scaled
        here, because Muon ignores grad_scale.
        """
        limit = (self.clip / (norm + 1e-6)).clamp(max=1) if self.clip else torch.ones_like(norm)
        factor = limit / self.scale_loss(1.0)
        is_fp64 = factor.dtype == torch.float64
        buckets = self.buckets if is_fp64 else self.of_matrices
        for bucket in buckets:
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
        """Return scalars that belong to no parameter, the same on every rank. To restore them, copy into them."""
        scale = self.loss_scale
        return {"steps": self.steps} | ({"scale": scale.value, "good_steps": scale.good_steps} if scale else {})


# ---- demo: python zero.py -------------------------------------------------------------------------------------------

LAYERS, WIDTH = 12, 256


def bytes_held(optimizer: Optimizer) -> int:
    """Return the bytes of all storages of the buckets: weights, gradients and optimizer state."""
    tensors = []
    for bucket in optimizer.buckets:
        tensors += [value for value in (*vars(bucket).values(), *bucket.state.values()) if isinstance(value, Tensor)]
    return sum(storage.nbytes() for storage in {tensor.untyped_storage() for tensor in tensors})


def demo(group: Group) -> None:
    groups = {"world": group, "replicate": ALONE, "dp": group}
    x = torch.ones(1, WIDTH).bfloat16().requires_grad_()
    if group.rank == 0:
        print(f"{LAYERS} layers of {WIDTH} x {WIDTH} weights in bf16, {group.size} ranks, one micro-batch. Bytes per "
              "parameter: weights 2, gradient 4,\noptimizer state 12 (master weights and two moments in fp32).\n")
    for level in range(4):
        layers = [nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(LAYERS)]
        for number, layer in enumerate(layers):
            layer.weight = parameter(Spec(f"{number}", (WIDTH, WIDTH)), groups, x.dtype)
        optimizer = Optimizer({0: layers}, groups, bucket_mb=0, level=level)
        sent.clear()
        optimizer.begin_step(micro_batches=1)
        nn.Sequential(*layers)(x).sum().backward()
        optimizer.finish_step()
        held = bytes_held(optimizer) / 1e6
        optimizer.step(lr=1e-3)
        if group.rank == 0:
            print(f"level {level}: {held:5.2f} MB held, {sum(sent.values()) / 1e6:5.2f} sent  {'█' * round(3 * held)}")
        nn.Sequential(*layers)(x)  # waits for the all-gathers that the update has started
    if group.rank == 0:
        print("\nHeld: between backward and update. Level 1 saves most, and sends as many elements as level 0, half of "
              "them weights\nin bf16. With A micro-batches level 2 sends A times as many gradients, and level 3 also "
              "2A times as many weights.")


if __name__ == "__main__":
    run_demo(demo, ranks=4)
