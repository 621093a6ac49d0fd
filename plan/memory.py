"""The memory of a rank by formula: model state, saved activations, and the peak of a step.

Model state of P parameters at ZeRO level 0, in bytes:

    weights           w P   w = 2 in bf16
    main gradients    a P   a = 4
    master weights    a P   none if w = a
    AdamW's moments   m P   m = 8

In bf16 that is 18 bytes per parameter. zero.py says which of these each level shards.

The peak lies where a backward begins, when all activations are saved. It is in one of two places:
- the head, where the gradient of the logits has the accumulation dtype;
- the last block, where the gradients of matrices exist in the weights' dtype before they are added to the main
  gradients (unless a kernel adds to fp32).
At ZeRO levels 2 and 3 only a few buckets have unsharded gradients at that moment.

The tests compare these formulas with dry runs (run/dryrun.py), which count the tensors of the code that trains.

Shapes: T tokens of a micro-batch on a rank, H hidden, F ffn, V vocabulary, t tensor parallel ranks.
"""
from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, chain
from math import gcd
from typing import NamedTuple

import schedules
from core.config import OPTIMIZERS, Config, Grid, padded_elements, padded_length
from plan.costs import (
    Activation,
    LayerOptions,
    acc_bytes,
    bucket_elements,
    by_kind,
    copies_per_token,
    fp8_elements,
    layer_kinds,
    llama_layer,
    matrix_elements,
    reduced_bytes,
    saved_bytes,
    stages_of,
)
from schedules import SCHEDULES, Action


def activation_bytes(settings: Config, element: int, stages: Collection[Iterable[int]] | None = None,
                     in_flight: int = 1, has_head: bool = True) -> int:
    """Bytes that forwards save on a rank for their backwards, if all experts get equally many tokens.

    element: bytes per element of an activation
    stages: the layers of each pipeline stage on this rank; None: all layers, in one stage
    in_flight: the largest number of (stage, micro-batch) pairs whose activations are saved at once
    has_head: whether the rank has the last stage

    These are the tensors that plain torch saves. The Triton kernels save less on GPUs: no statistics of norms, and dx
    and dW of the head instead of its logits. Left out are masks of documents and windows, small tensors per sequence,
    and offloaded tensors.
    """
    model, grid, batch, precision = settings.model, settings.grid, settings.batch, settings.precision
    tp, sp, acc, recompute = grid.tp, grid.sequence_parallel, acc_bytes(element), precision.recompute
    seq = padded_length(batch.seq_len, grid.cp, tp if sp else 1)
    local_seq, near = seq // grid.cp, grid.head_ranks
    by_blocks = grid.cp > near  # attention by blocks saves no scores
    options = layer_options(settings, element, by_blocks)

    def bytes_per_token(number: int) -> float:
        layer = llama_layer(model, seq, options, number)
        if near > 1:  # also saved: kv heads repeated until `near` divides them; fused, the output before its all-to-all
            kv_heads = max(model.kv_heads // tp, 1)  # per rank
            heads = 2 * tp * kv_heads * (near // gcd(near, kv_heads) - 1)
            heads += model.heads if options.attention != "math" else 0
            layer["attention_by_heads"] = Activation(heads * model.head_dim * element, "selective", "tp")
        return saved_bytes(layer, recompute, tp, sp or recompute == "full")  # checkpoints are always sharded

    stages = stages or [range(model.blocks)]
    kinds, saved = layer_kinds(settings), by_kind(settings, bytes_per_token)
    per_token = in_flight * max(sum(saved[kinds[layer]] for layer in layers) for layers in stages)
    if precision.offloads("activations"):  # two of the blocks' inputs are on the GPU
        per_token -= max(0, in_flight * max(map(len, stages)) - 2) * model.hidden * element / tp
    if has_head:
        losses = min(in_flight, losses_in_memory(*plan_needed(settings)))  # micro-batches whose logits are saved
        norm = model.hidden * element * (1 if recompute == "selective" else 2) + acc
        logits = -(-model.vocab // tp) * element + 3 * acc
        indices = 2 * 9  # per token: its index in the table and its label's in the vocabulary, each with a mask
        per_token += losses * (norm / (tp if sp else 1) + (1 + model.mtp) * (logits + indices))
    if recompute == "full" and tp > 1 and not sp:
        per_token += model.hidden * element  # one gathered checkpoint
    if model.experts and recompute == "full":
        per_token += in_flight * 8 / tp  # each token's sequence number, for recomputing a block
    angles = local_seq * model.rotated_dim * acc  # cos and sin of rotary embedding
    mask = seq * seq if precision.attention == "math" and not by_blocks else 0
    return round(batch.micro_batch * local_seq * per_token + angles + mask)


def layer_options(settings: Config, element: int, by_blocks: bool = False) -> LayerOptions:
    grid, optim = settings.grid, settings.optim
    return LayerOptions(element, grid.tp, "auto" if by_blocks else settings.precision.attention,
                        aux=optim.aux_loss > 0, router_z=optim.router_z_loss > 0,
                        copies=copies_per_token(settings.model, grid.ep) if grid.ep > 1 else 0.0, cp=grid.cp)


# ---- the peak of a step ---------------------------------------------------------------------------------------------

class Moment(NamedTuple):
    """The memory of a rank at one moment of a step, besides its shards and the saved activations."""
    gradients: int  # elements unsharded or being reduced, in the accumulation dtype, at ZeRO levels 2 and 3
    weights: int  # elements unsharded, at level 3
    temporaries: float  # bytes
    freed: float = 0.0  # bytes of saved activations that have been freed by then


class Backward(NamedTuple):
    """A backward of a rank's plan, with the facts about its place in the plan that change the memory."""
    op: str  # B, I or W
    stage: int
    before: int | None  # the stage whose gradients were completed last; its reduction may still be in flight
    passes: int  # how many micro-batches' gradients of that stage are complete; 2 means two or more
    held: int  # how many (stage, micro-batch) activations the rank holds when this backward begins
    halves: int  # how many of them have had their I and not yet their W


def backwards_in_memory(actions: list[Action]) -> list[Backward]:
    """The distinct backwards of a rank's plan. If several differ only in `held`, the one that holds the most."""
    found: dict[Backward, Backward] = {}
    passes: dict[int | None, int] = {}
    before, held, halves = None, 0, 0
    for op, stage, _ in actions:
        if op == "F":
            held += 1
            continue
        backward = Backward(op, stage, before, min(2, passes.get(before, 0)), held, halves)
        key = backward._replace(held=0)
        found[key] = max(found.get(key, backward), backward)
        if op == "I":
            halves += 1
        else:
            held, halves = held - 1, halves - (op == "W")
            before, passes[stage] = stage, passes.get(stage, 0) + 1
    return list(found.values())


def owner(grid: Grid, stage: int) -> int:
    """The pipeline rank of a stage."""
    return SCHEDULES[grid.schedule].rank_of(stage, grid.pp) if grid.pp > 1 else 0


def stages_of_rank(settings: Config, rank: int, stages: list[range] | None = None) -> dict[int, range]:
    """The pipeline stages of a rank -> their layers. stages: the layers of every stage, by default train.py's."""
    return {stage: layers for stage, layers in enumerate(stages or stages_of(settings))
            if owner(settings.grid, stage) == rank}


@lru_cache(4096)
def plans_in_memory(schedule: str, p: int, m: int, v: int) -> list[tuple[int, list[Backward]]]:
    """For each rank: (the largest number of (stage, micro-batch) activations that it holds, its backwards)."""
    plan = schedules.make_plan(schedule, p, m, v)
    return [(max(schedules.activations_held(actions)), backwards_in_memory(actions)) for actions in plan.ranks]


@lru_cache(4096)
def losses_in_memory(schedule: str, p: int, m: int, v: int) -> int:
    """The largest number of micro-batches whose loss has been computed while its backward has not begun."""
    plan = schedules.make_plan(schedule, p, m, v)
    ops = [[action.op for action in actions if action.stage == plan.stages - 1] for actions in plan.ranks]
    return max(max(accumulate(dict(F=1, B=-1, I=-1, W=0)[op] for op in of_rank)) for of_rank in ops if of_rank)


def plan_needed(settings: Config) -> tuple[str, int, int, int]:
    """The arguments of make_plan: schedule, ranks, as many micro-batches as show the memory, chunks."""
    grid, batch = settings.grid, settings.batch
    m = few_micro_batches(grid, max(size for size, _ in batch.ramp()) // batch.micro_batch // grid.batch_shares)
    return grid.schedule if grid.pp > 1 else "1f1b", grid.pp, m, grid.virtual_stages


def plan_in_memory(settings: Config, rank: int) -> tuple[int, list[Backward]]:
    """See plans_in_memory."""
    return plans_in_memory(*plan_needed(settings))[rank]


def few_micro_batches(grid: Grid, m: int) -> int:
    """A number of micro-batches, at most m, that needs the same memory as m. The steady state of a schedule repeats
    every p micro-batches."""
    p = grid.pp
    if m <= 5 * p:
        return m
    if p == 1:
        return 4
    schedule, few = SCHEDULES[grid.schedule], 4 * p + m % p
    in_groups = schedule.grouped and m % p
    too_few = few - p < schedule.min_micro_batches_per_rank * p  # plan/step_time.py also asks for p fewer
    return m if in_groups or too_few or grows(grid.schedule, p, few, grid.virtual_stages) else few


def grows(schedule: str, p: int, m: int, v: int) -> bool:
    """Whether ranks hold more activations if there are p more micro-batches, for example if all forwards come first."""
    held, held_of_more = ([most for most, _ in plans_in_memory(schedule, p, count, v)] for count in (m, m + p))
    return held != held_of_more


def moment_bytes(settings: Config, element: int) -> int:
    """Bytes of all moments per parameter. With Muon: per parameter of a matrix."""
    each = 2 if settings.precision.moments_dtype == "bf16" else acc_bytes(element)
    return len(OPTIMIZERS[settings.optim.optimizer]) * each


def outer_bytes(settings: Config, element: int) -> int:
    """Bytes per parameter of the outer optimizer's state (diloco.py): weights and momentum; 0 with one site."""
    return 2 * acc_bytes(element) if settings.grid.sites > 1 else 0


def all_moments(settings: Config, element: int, buckets: dict[str, list[int]], layers: Iterable[int]) -> int:
    """Bytes of the moments of a rank with these buckets and blocks."""
    n, each = shards_of(settings), moment_bytes(settings, element)
    nbytes = sum(each * sum(counts) // n[axis] for axis, counts in pad(settings, buckets).items())
    if settings.optim.optimizer == "muon":  # parameters outside of matrices have AdamW's moments
        others = sum(buckets["dp"]) - matrix_elements(settings, layers)["dp"]
        more = (len(OPTIMIZERS["adamw"]) - len(OPTIMIZERS["muon"])) * acc_bytes(element)
        nbytes += more * padded_elements(others, n["dp"]) // n["dp"]
    return nbytes


def host_bytes(settings: Config, rank: int, element: int) -> int:
    """Bytes of the host's memory that a pipeline rank with a GPU needs.

    With --offload optimizer the host holds the optimizer state, and a copy of gradients and weights. Each tensor is
    rounded up to a power of two bytes, because that is how torch pins memory. With --checkpoint-dir it also holds a
    copy of the state that is being saved."""
    buckets = pad(settings, bucket_elements(settings, stages_of_rank(settings, rank), element))
    shards = [count // n for axis, n in shards_of(settings).items() for count in buckets[axis]]
    acc, total = acc_bytes(element), 0
    saved = acc + moment_bytes(settings, element) + outer_bytes(settings, element)
    if settings.precision.offloads("optimizer"):
        total += (saved + acc + element) * sum(1 << (count - 1).bit_length() for count in shards)
    if settings.run.checkpoint_dir:
        total += saved * sum(shards)
    return total


def memory_of_rank(settings: Config, rank: int, element: int, fused: bool = False, activations: int | None = None,
                   stages: list[range] | None = None) -> dict[str, int]:
    """Bytes of a pipeline rank by kind ("weights", "gradients", ...) at the peak of a step. Among tensor parallel ranks
    this is the one with the most rows of the vocabulary.

    element: bytes of a weight
    fused: whether kernels compute the loss chunk by chunk and add matrix gradients to fp32, as they do on GPUs
    activations: bytes that the rank's forwards save, by default those of activation_bytes
    stages: see stages_of_rank

    Left out are activations and gradients that pipeline ranks send or have received. At ZeRO levels 2 and 3 a tied
    table's gradient is left out, and so are the gradients being reduced if only experts are sharded. With split
    backwards the sum of all kinds is up to 13% too large at level 3.
    """
    grid, acc = settings.grid, acc_bytes(element)
    stages, (in_flight, backwards) = stages_of_rank(settings, rank, stages), plan_in_memory(settings, rank)
    layers, has_head = list(chain(*stages.values())), grid.pp * grid.virtual_stages - 1 in stages
    if activations is None:
        activations = activation_bytes(settings, element, stages.values(), in_flight, has_head)
    buckets = bucket_elements(settings, stages, element)
    padded = pad(settings, buckets)
    level = grid.zero if any(n > 1 and padded[axis] for axis, n in shards_of(settings).items()) else 0
    unsharded = sum(map(sum, padded.values()))  # elements of all buckets
    sharded = sum(sum(padded[axis]) // n for axis, n in shards_of(settings).items())  # of this rank's shards
    master = 0 if element == acc else acc
    work = Work(settings, element, fused)
    found = moments_of_backwards(work, stages, backwards, activations, in_flight)
    if reduced_bytes(settings, element) < acc:
        found += moments_of_reduction(work, padded, activations, has_head)
    if settings.optim.optimizer == "muon":
        found.append(moment_of_matrices(settings, element, layers, activations))
    moment = max(found, key=lambda moment: moment.gradients * acc * (level >= 2) + moment.weights * element
                 * (level == 3) + moment.temporaries - moment.freed)
    memory = dict(weights=(sharded + moment.weights if level == 3 else unsharded) * element,
                  gradients=(sharded + moment.gradients if level >= 2 else unsharded) * acc,
                  optimizer=0 if settings.precision.offloads("optimizer") else
                  sharded * (master + outer_bytes(settings, element)) + all_moments(settings, element, buckets, layers))
    fp8_weights = fp8_elements(settings, layers)
    if fp8_weights and grid.zero < 3:
        memory["FP8 weights"] = 2 * fp8_weights
    return memory | dict(activations=activations - round(moment.freed), temporaries=round(moment.temporaries))


def shards_of(settings: Config, level: int | None = None) -> dict[str, int]:
    """Data axis -> how many ranks shard its buckets at a ZeRO level, by default the level of the settings."""
    grid = settings.grid
    level = grid.zero if level is None else level
    shards = grid.dp // grid.dp_replicate * grid.cp
    return dict(dp=shards, edp=shards * grid.tp // grid.ep) if level else dict(dp=1, edp=1)


def pad(settings: Config, buckets: dict[str, list[int]]) -> dict[str, list[int]]:
    return {axis: [padded_elements(count, n) for count in buckets.get(axis, [])]
            for axis, n in shards_of(settings).items()}


class Work:
    """Quantities that the moments of a step share.

    T: tokens of a micro-batch on a rank
    rows: rows of the vocabulary on a rank
    block, block_of_weights: bytes of a block's temporaries in its backward, and in the second half of a split backward
    """

    def __init__(self, settings: Config, element: int, fused: bool):
        self.settings, self.element, self.fused = settings, element, fused
        grid, batch, acc = settings.grid, settings.batch, acc_bytes(element)
        self.T = batch.micro_batch * padded_length(batch.seq_len, grid.cp, grid.sequence_shards) // grid.cp
        self.rows = -(-settings.model.vocab // grid.tp)
        self.sent = reduced_bytes(settings, element)
        self.rounded = element if element < acc and not fused else 0  # per element of a gradient not yet added
        self.block = self.of_block(settings)
        self.block_of_weights = self.of_block(without_recomputation(settings))

    def of_block(self, settings: Config) -> float:
        return max(by_kind(settings, lambda layer: block_temporaries(settings, self.element, self.rounded, self.T,
                                                                     layer)).values())


def moments_of_backwards(work: Work, stages: Mapping[int, range], backwards: list[Backward], activations: int,
                         in_flight: int) -> list[Moment]:
    """Candidates for the peak in each backward: in its loss, its head's matrix, its last block, and at its end."""
    settings, rounded, T, rows = work.settings, work.rounded, work.T, work.rows
    acc, sent, shards = acc_bytes(work.element), work.sent, shards_of(settings)
    whole = settings  # with Muon vectors are apart, but small
    if settings.optim.optimizer == "muon":
        whole = replace(settings, optim=replace(settings.optim, optimizer="adamw"))
    padded = {stage: pad(settings, bucket_elements(whole, {stage: layers}, work.element))
              for stage, layers in stages.items()}
    for buckets in padded.values():  # other codes' stages may be empty
        buckets["dp"] = buckets["dp"] or [0]
    per_micro_batch, found = activations / in_flight, []
    for op, stage, before, passes, held, halves in backwards:
        units, experts = padded[stage]["dp"], padded[stage]["edp"] if shards["edp"] > 1 else []
        shares_bucket = units[-1] > (rows + 1) * settings.model.hidden  # the head's bucket also has blocks
        if op in "IW" and before is None and halves > 1:  # gradients that no W waits for are reduced after I
            before, passes = stage, 1 if shares_bucket else 2
        # The gradient that is still being reduced, and the shard that receives the sum. (The first one of a step
        # receives it in the main shard itself.)
        pending = padded[before]["dp"][-1 if op in "IW" else 0] * sent // acc if before is not None else 0
        pending += pending // shards["dp"] * (passes > 1)
        last, two = units[-1], sum(units[stage == 0:][-2:])  # the embedding's backward needs no weights
        pair = last * sent // acc + sum(units[-2:-1]) + sum(experts[-1:])
        if op in "IW":  # between the halves of a backward all gradients are unsharded
            last = pair = sum(units) + sum(experts)
        freed = (in_flight - held) * per_micro_batch
        if halves:
            freed -= halves * recomputed_bytes(settings, work.element, stages)
        if op == "W":
            found.append(Moment(pending + last, 0, work.block_of_weights, freed))
            continue
        first_pair = units[0] + (sum(units[1:2]) + sum(units[1:2]) // shards["dp"] * (passes > 1)) * sent // acc
        table = rows * settings.model.hidden * (stage == 0)  # the embedding's backward is the last, and reads nothing
        done = 1 - max(0, units[0] - table) / max(1, sum(units) - table)  # of the blocks' backwards
        found.append(Moment(first_pair, two, work.block, freed + done * per_micro_batch))
        if stage < settings.grid.pp * settings.grid.virtual_stages - 1:
            first = experts[-1] if experts and op == "B" else last  # a block's experts come before the rest of it
            found.append(Moment(pending + first, two + sum(experts[-2:]), work.block, freed))
            continue
        loss, dlogits = 0 if work.fused else (acc + rounded) * T * rows, work.element * T * rows
        # Multi-token prediction's loss has its backward before the other one; its block reads the embedding, too.
        mtp, ahead = settings.model.mtp, rows * settings.model.hidden * settings.model.mtp
        found += [Moment(pending + last * (halves > 0), two + ahead, loss, freed),
                  Moment(pending + last, two + ahead, max(loss * mtp, rounded * rows * settings.model.hidden),
                         freed + dlogits * mtp),
                  Moment((pending + last if shares_bucket else pair) + ahead,
                         sum(units[-3:-1]) + ahead + sum(experts[-2:]), work.block, freed + dlogits * (1 + mtp))]
    return found


def recomputed_bytes(settings: Config, element: int, stages: Mapping[int, range]) -> int:
    """Bytes of the recomputed activations of a micro-batch. The second half of a split backward still needs them."""
    all_saved, some = (activation_bytes(which, element, stages.values(), has_head=False)
                       for which in (without_recomputation(settings), settings))
    return all_saved - some


def without_recomputation(settings: Config) -> Config:
    return replace(settings, precision=replace(settings.precision, recompute="none"))


def moments_of_reduction(work: Work, padded: dict[str, list[int]], activations: int, has_head: bool) -> list[Moment]:
    """Candidates for the peak while gradients are reduced as copies in the dtype that is sent.

    ZeRO levels 2 and 3 make one copy beside an unsharded gradient. Levels 0 and 1 keep all copies until the backward
    ends, and level 1 also the shards that receive the sums. With replicas they keep the shards and one copy."""
    grid, units, sent = work.settings.grid, padded["dp"], work.sent
    shards = grid.dp // grid.dp_replicate * grid.cp
    if grid.zero >= 2:
        dlogits = work.element * work.T * work.rows * has_head
        return [Moment(units[-1], sum(units[-2:]), sent * units[-1], dlogits)] if shards > 1 else []
    copies = received = 0
    for axis, n in dict(dp=shards, edp=shards * grid.tp // grid.ep).items():
        if n > 1:
            copies += sum(padded[axis])
            received += grid.zero * sum(padded[axis]) // n
    if grid.dp_replicate > 1:
        copies = units[0]
    return [Moment(0, 0, sent * (copies + received), activations),
            Moment(0, 0, work.block + sent * max(0, copies + received - units[0]), activations)]


def moment_of_matrices(settings: Config, element: int, layers: Iterable[int], activations: int) -> Moment:
    """The peak of --optimizer muon, whose updates begin after all activations have been freed.

    While owners send updated matrices, a rank holds the matrices that it owns and three tensors as large as its shards:
    the one that it sends, the one that it receives, and the one that it had sent before. While it orthogonalises, it
    holds the factors of matrices with up to 2**24 elements in total."""
    total = matrix_elements(settings, layers)
    held, owned = (sum(count // shards[axis] for axis, count in total.items())
                   for shards in (shards_of(settings), shards_of(settings, level=1)))
    return Moment(0, 0, element * max(3 * held + owned, held + owned + 3 * min(owned, 2**24)), activations)


def block_temporaries(settings: Config, element: int, rounded: int, T: int, layer: int) -> float:
    """Bytes of a block's temporaries in the middle of its feed-forward's backward, less the saved activations that have
    been freed by then.

    The temporaries are the gradients of gate, up and input, the input, which is gathered once more, and the gradient of
    the matrix before it is added to the main gradient. With recomputation, the recomputed activations are added."""
    model, grid, recompute = settings.model, settings.grid, settings.precision.recompute
    H, t, sp = model.hidden, grid.tp, grid.sequence_parallel and grid.tp > 1
    if model.has_experts(layer):
        rows, F = T / t * model.top_k, model.expert_ffn
        nbytes = element * rows * (F + H) + rounded * model.experts // grid.ep * 2 * F * H
    else:
        F = model.ffn / t
        nbytes = element * (T * F + T * H * (2 if sp else 1) + T * H / (t if sp else 1)) + rounded * 2 * F * H
    if recompute != "none":
        table = llama_layer(model, settings.batch.seq_len, layer_options(settings, element), layer)
        recomputed = saved_bytes(table, "none", t, sp) - saved_bytes(table, recompute, t, sp)
        nbytes += T * (recomputed if recompute == "full" else element * F)
    return nbytes


def format_bytes(count: float) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
