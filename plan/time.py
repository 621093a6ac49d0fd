"""How long a step takes on a machine, and what memory it needs, before anything runs.

A step is, on each rank,

    the pipeline       every action of the schedule's plan (schedules.py), with its stage's times (plan/stagetime.py)
    communication      of the data axis, as far as it is not hidden under a backward; all other axes' is in the stages
    a tied table       its gradient is summed over the first and the last stage
    the optimizer      reads and writes 40 bytes per parameter, 16 of them AdamW's moments in fp32; with --offload 22 on
                       the GPU and 34 on the host, see zero.py

Memory is that of plan/memory.py, for the pipeline rank that needs most; other codes save more, see stagetime.Kernels.

Letters: A micro-batches of a rank, P parameters of a rank, n ranks of the data axis.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from statistics import NormalDist
from typing import NamedTuple

import schedules
from config import Grid
from plan import costs
from plan import memory as footprint
from plan.stagetime import Parts, Run, Seconds, add_parts, stage_parts, stage_seconds
from schedules import SCHEDULES

# ---- the pipeline ---------------------------------------------------------------------------------------------------

@lru_cache(256)
def order(schedule: str, p: int, m: int, v: int, n: int) -> list[tuple[int, str, int, int, tuple]]:
    """A plan's actions, each after all that it needs: (rank, op, stage, number of its result, what it needs:
    (number, whether another rank sends it))."""
    plan = schedules.make_plan(schedule, p, m, v, n)
    numbers, actions = {}, []
    for rank, action in schedules.execute_in_turns(plan):
        needs = tuple((numbers[result], plan.owner(result.stage, result.micro_batch) != rank)
                      for result in schedules.required_results(action, plan.stages))
        number = numbers.setdefault(action.result, len(numbers))
        actions.append((rank, action.op, action.stage, number, needs))
    return actions


def simulate(actions: list, p: int, times: list[Mapping[str, float]], hop: float) -> tuple[float, list[float]]:
    """(when the last rank ends, how long each of p ranks is busy). times: of each stage, by op. As schedules.simulate,
    where all stages are alike."""
    finished, free, busy = {}, [0.0] * p, [0.0] * p
    for rank, op, stage, number, needs in actions:
        start = free[rank]
        for needed, sent in needs:
            start = max(start, finished[needed] + (hop if sent else 0.0))
        free[rank] = finished[number] = start + times[stage][op]
        busy[rank] += times[stage][op]
    return max(free), busy


def pipeline_seconds(run: Run, stages: list[Seconds]) -> tuple[float, list[float]]:
    """(seconds of all micro-batches, seconds that each rank is busy). The steady state of a schedule repeats, so of
    many micro-batches 4 p are simulated; what p more of them take is what they add to 3 p."""
    grid, m = run.settings.grid, run.micro_batches
    p, hop = grid.pp, hop_seconds(run)
    times = [dict(F=s.forward, B=s.input + s.weight, I=s.input, W=s.weight) for s in stages]
    schedule = grid.schedule if p > 1 else "1f1b"
    per_micro_batch = [0.0] * p
    for stage, seconds in enumerate(stages):
        per_micro_batch[owner(grid, stage)] += seconds.total
    if p == 1:
        return m * per_micro_batch[0], [m * per_micro_batch[0]]

    def of(count: int) -> float:
        return simulate(order(schedule, p, count, grid.chunks, grid.pp_group), p, times, hop)[0]

    least = 4 * p
    in_groups = grid.pp_group or (SCHEDULES[schedule].grouped and grid.chunks > 1 and m % p)
    if m <= least + p or schedule == "afab" or in_groups:
        total = of(m)
    else:
        first = least + (m - least) % p
        total = of(first)
        total += (m - first) / p * (total - of(first - p))
    return total, [m * seconds for seconds in per_micro_batch]


def owner(grid: Grid, stage: int) -> int:
    """The pipeline rank of a stage."""
    p = grid.pp
    return min(stage, 2 * p - 1 - stage) if p > 1 and SCHEDULES[grid.schedule].v_shaped else stage % p


def hop_seconds(run: Run) -> float:
    """Of sending a micro-batch's activations to the next stage, over the network unless all stages are in one node."""
    grid = run.settings.grid
    nbytes = 2 * run.tokens * run.settings.model.hidden / (grid.sequence_shards)
    return run.collective(nbytes, 2, -(-grid.dp * grid.cp * grid.tp * grid.pp // 2))


# ---- a step ---------------------------------------------------------------------------------------------------------

class Step(NamedTuple):
    """Seconds of a step. parts: what the busiest rank spends them on, communication only where nothing hides it."""
    seconds: float
    parts: dict[str, float]


def data_parallel_seconds(run: Run, elements: Mapping[str, list[int]], layers: int, one: Seconds,
                          busy: float) -> float:
    """What the data axis adds to a step. elements: of a rank's buckets. layers: of the rank. one: seconds of a
    micro-batch; busy: of all of them. What is sent is hidden as far as there is time: at level 0 under the last
    backward, at level 1 under a forward, too; at levels 2 and 3 the part `hidden` of it, under all micro-batches.

    Elements sent per rank with A micro-batches: 2 P, 2 P, (A+1) P and 3 A P at levels 0 to 3 of ZeRO, times (n-1)/n;
    gradients in fp32 or as --reduce-dtype says, weights in 16 bits. With R replicas n ranks shard, and the gradients of
    a shard are all-reduced over R.
    """
    grid, A = run.settings.grid, run.micro_batches
    gradient, weight = costs.reduced_bytes(run.settings, 2), 2
    sums = 1 if run.kernels.overlap else 2
    per_element, calls, under = {
        0: (2 * gradient, 2, one.total - one.forward), 1: (sums * gradient + weight, 2, one.total),
        2: (A * gradient + weight, A + 1, busy), 3: (A * (gradient + 2 * weight), 3 * A, busy)}[grid.zero]
    seconds = 0.0
    R = grid.dp_replicate
    shards = grid.dp // R * grid.cp
    for axis, n, stride in ("dp", shards, grid.tp), ("edp", shards * grid.tp // grid.ep, grid.ep):
        count = sum(elements.get(axis, []))
        if n > 1 and count:
            seconds += run.collective((n - 1) / n * count * per_element, n, stride,
                                      "all_gather" if grid.zero else "all_reduce", calls * layers / 2)
        if R > 1 and count:
            seconds += run.collective(2 * (R - 1) / R * count / n * gradient, R, stride * n, "all_reduce", layers / 2)
    if not run.kernels.overlap or grid.tp > run.machine.levels[0].ranks:  # tensor parallel ranks use the network, too
        return seconds
    return max(seconds * (1 - run.constants.hidden) if grid.zero >= 2 else 0.0, seconds - under)


def tied_seconds(run: Run) -> float:
    """Of the sum of a tied table's gradients over the first and the last pipeline rank, after all backwards. Here it is
    a sum of shards; code that does not overlap makes it before it shards."""
    model, grid = run.settings.model, run.settings.grid
    if not model.tied or grid.pp == 1 or SCHEDULES[grid.schedule].v_shaped:  # a V's first rank has both stages
        return 0.0
    shards = grid.dp // grid.dp_replicate * grid.cp if grid.zero and run.kernels.overlap else 1
    nbytes = 4 * model.vocab * model.hidden / grid.tp / shards
    return run.collective(nbytes, 2, grid.dp * grid.cp * grid.tp * (grid.pp - 1), "all_reduce")


def bound_seconds(run: Run, sums: list[Seconds]) -> tuple[float, list[float]]:
    """As pipeline_seconds, without simulating: the busiest rank, and the first micro-batch through the other ranks, in
    1 / chunks of the time if there are several model chunks."""
    grid, m = run.settings.grid, run.micro_batches
    busy = [0.0] * grid.pp
    for stage, seconds in enumerate(sums):
        busy[owner(grid, stage)] += seconds.total
    hops = 2 * (grid.pp - 1) * hop_seconds(run) if grid.pp > 1 else 0.0
    return m * max(busy) + (sum(busy) - max(busy)) / grid.chunks + hops, [m * seconds for seconds in busy]


def update_seconds(run: Run, buckets: list[float]) -> float:
    """Of the optimizer's update of so many parameters per bucket. If the host has its state, gradients are copied there
    while it updates those that have arrived, and weights are copied back at the same time (collectives.py)."""
    moments, machine = 2 * moment_bytes(run), run.machine
    if not run.settings.precision.offloads("optimizer"):
        return run.memory((24 + moments) * sum(buckets))
    arrived = updated = returned = 0.0  # when a bucket's gradient is on the host, is applied, its weights are back
    for count in buckets:
        arrived += 4 * count / machine.host_link
        updated = max(arrived, updated) + (18 + moments) * count / machine.host_memory
        returned = max(updated, returned) + 2 * count / machine.host_link
    return run.memory(22 * sum(buckets)) + returned


def step_seconds(run: Run, stages: list[Parts] | None = None, simulated: bool = True) -> Step:
    """The time of a step and what it is made of. stages: those of stage_parts, if they are known. Not simulated: the
    pipeline takes what bound_seconds says."""
    grid = run.settings.grid
    stages = stages or stage_parts(run)
    sums = stage_seconds(stages)
    seconds, busy = (pipeline_seconds if simulated else bound_seconds)(run, sums)
    busiest = max(range(grid.pp), key=busy.__getitem__)
    parts: Parts = {}
    for stage in stages_of_rank(run, busiest):
        add_parts(parts, stages[stage], run.micro_batches)
    spent = {name: part.total for name, part in parts.items() if part.total}
    spent["bubble"] = seconds - busy[busiest]
    data = update = 0.0
    for rank in {0, grid.pp - 1}:
        mine = stages_of_rank(run, rank)
        elements = costs.bucket_elements(run.settings, mine, 2)
        one = Seconds(*map(sum, zip(*(sums[stage] for stage in mine))))
        data = max(data, data_parallel_seconds(run, elements, sum(map(len, mine.values())), one, busy[busiest]))
        shards = footprint.shards_of(run.settings)
        quantised = costs.fp8_elements(run.settings, chain(*mine.values())) * costs.fp8_bytes(run.settings)
        times = 2 * run.micro_batches if grid.zero == 3 else 1  # weights are quantised when they change or are gathered
        sharded = [count / shards[axis] for axis, counts in elements.items() for count in counts]
        update = max(update, update_seconds(run, sharded) + run.memory(times * quantised))
    spent |= dict(dp=data, tie=tied_seconds(run), optimizer=update, fixed=run.constants.fixed_s)
    return Step(seconds + sum(spent[name] for name in ("dp", "tie", "optimizer", "fixed")), spent)


# ---- memory ---------------------------------------------------------------------------------------------------------

@lru_cache(4096)
def plans_in_memory(schedule: str, p: int, m: int, v: int, n: int) -> list[tuple[int, list[footprint.Backward]]]:
    """For each rank: (the most (stage, micro-batch) activations that it has at once, its backwards)."""
    plan = schedules.make_plan(schedule, p, m, v, n)
    return [(max(schedules.activations_held(actions)), footprint.backwards_in_memory(actions))
            for actions in plan.ranks]


def stages_of_rank(run: Run, rank: int) -> dict[int, range]:
    divided = costs.stages_of(run.settings, run.kernels.division)
    return {stage: layers for stage, layers in enumerate(divided) if owner(run.settings.grid, stage) == rank}


def plan_in_memory(run: Run, rank: int) -> tuple[int, list[footprint.Backward]]:
    """See plans_in_memory. The steady state of a schedule repeats, so few micro-batches show what many need."""
    grid, m = run.settings.grid, run.micro_batches
    enough = m
    in_groups = grid.pp_group or (SCHEDULES[grid.schedule].grouped and m % grid.pp)
    if grid.pp > 1 and grid.schedule != "afab" and not in_groups and m > 4 * grid.pp:
        enough = 4 * grid.pp + m % grid.pp
    if grid.pp == 1:
        enough = min(m, 4)
    return plans_in_memory(grid.schedule if grid.pp > 1 else "1f1b", grid.pp, enough, grid.chunks, grid.pp_group)[rank]


def activations_of_rank(run: Run, rank: int) -> int:
    """Bytes that the forwards of a pipeline rank save. Code that is not `fused` saves more of a layer, and logits in 16
    bits and in fp32, twice: as they are and less their maximum, which becomes the softmax in place."""
    stages, last = stages_of_rank(run, rank), run.settings.grid.pp * run.settings.grid.chunks - 1
    fused, (count, _) = run.kernels.fused, plan_in_memory(run, rank)
    own = footprint.activation_bytes(run.settings, 2, stages.values(), count, fused and last in stages)
    if not fused:
        logits = run.tokens * run.settings.model.vocab / run.settings.grid.tp
        own = round(run.constants.unfused * own + (2 + 4 + 4) * logits * (last in stages))
    return own


def moment_bytes(run: Run) -> int:
    """Bytes per parameter of all moments of the optimizer."""
    each = 2 if run.settings.precision.moments == "bf16" else 4
    return 0 if run.settings.optim.optimizer == "sgd" else 2 * each


def memory_of_rank(run: Run, rank: int, own: int | None = None) -> dict[str, int]:
    """Bytes of a pipeline rank by kind, by the formulas of plan/memory.py, as train.py prints them for its own code.
    own: its activations, if they are known."""
    settings, kernels, grid = run.settings, run.kernels, run.settings.grid
    stages = stages_of_rank(run, rank)
    own = activations_of_rank(run, rank) if own is None else own
    in_flight, backwards = plan_in_memory(run, rank)
    elements = costs.bucket_elements(settings, stages, 2)
    numbers = [layer for layers in stages.values() for layer in layers]
    memory = footprint.memory_bytes(settings, 2, moment_bytes(run), elements, costs.fp8_elements(settings, numbers),
                                    own, in_flight, stages, backwards, fused=True)
    if not kernels.fused:
        memory["gradients"] += 2 * sum(map(sum, elements.values()))
    if kernels.gathered and grid.tp > 1:  # in 16 bits, of all tokens
        inputs = kernels.gathered * max(map(len, stages.values()))
        memory["gathered"] = round(inputs * in_flight * run.tokens * 2 * settings.model.hidden * (1 - 1 / grid.tp))
    return memory


def activations(run: Run) -> dict[int, int]:
    """Of the pipeline ranks that may need most: the first two, which hold the most micro-batches, and the last."""
    p = run.settings.grid.pp
    return {rank: activations_of_rank(run, rank) for rank in sorted({0, min(1, p - 1), p - 1})}


def memory(run: Run, saved: Mapping[int, int] | None = None) -> dict[str, int]:
    """Of the pipeline rank that needs most. saved: `activations` of the run, if they are known."""
    ranks = saved or activations(run)
    return max((memory_of_rank(run, rank, own) for rank, own in ranks.items()), key=lambda kinds: sum(kinds.values()))


def probability_of_fit(run: Run, nbytes: float) -> float:
    """That a run whose predicted memory this is, without what is reserved, does not run out of it."""
    needed, there = nbytes + run.constants.reserved, run.machine.memory_bytes * run.constants.usable
    return NormalDist(0, run.constants.spread).cdf(math.log(there / needed))
