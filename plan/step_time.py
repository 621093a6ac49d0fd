"""A prediction of the time and memory of a step on a machine, before anything runs.

The time of a step on a rank, without exchanges between sites (plan/scaling.py), is the sum of:

    pipeline           all actions of the schedule's plan (schedules.py), each with the time of its stage
    data axis          its communication that no backward hides; that of the other axes is part of the stages
    tied embedding     its gradient is summed over the first and the last stage
    optimizer          40 bytes per parameter are read and written, 16 of them for AdamW's moments in fp32; with
                       --offload 22 on the GPU and 34 on the host (see zero.py)

The forward of a layer takes the time of its matmuls and its attention, at the speed that kernels reach. To this
are added the time to read and write its activations, and its exposed communication. If all that is shorter than
the launches of the layer's kernels, the layer takes the time of the launches. FLOPs, bytes and shapes come from
plan/costs.py, times of collectives from plan/machines.py, and the memory of the fullest pipeline rank from
plan/memory.py.

Two arguments supply facts that are not in the settings. A `Code` describes the code that runs: which communication it
overlaps, how it divides layers into stages, which tensors it saves. `OURS` is this project. `Constants` are speeds.
They were fitted to published runs of other codes by tests/published, which describes those codes, because no run of
this code on a GPU has been published.

    T  tokens of a micro-batch on a rank       A  micro-batches of a rank
    H  hidden                                  P  parameters of a rank
    V  vocabulary                              n  ranks of the data axis
    t  tensor parallel ranks
"""
from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import schedules
from core import config, rules
from core.config import Config, need, padded_length
from plan import costs, memory
from plan.machines import Machine, collective_seconds, family_of, read_machine

AXES = "sites", "dp", "cp", "tp", "pp"  # their sizes multiply to the number of GPUs
HELD_OUT = Path(__file__).parent / "held_out.json"

# ---- the code that runs, and its constants --------------------------------------------------------------------------

class Code:
    """The behaviour of the code that runs, where it changes time or memory. This class describes this project; a
    subclass describes another code.

    attention_fraction: the share of peak FLOP/s that attention reaches, forward and backward together, on Ampere and on
        later GPUs. The values are those of FlashAttention 2, which is slower than cuDNN's attention on Hopper (Dao
        2023, figures 4 to 7).
    overlaps: whether the data axis communicates under a backward. A code that does not overlap also all-reduces
        gradients at ZeRO level 1, and sums a tied embedding's gradient before it shards it.
    """
    attention_fraction = 0.60, 0.33
    overlaps = True

    def stages(self, settings: Config) -> list[range]:
        """The layers of every pipeline stage."""
        return costs.stages_of(settings)

    def attention(self, run: Run, scores: float) -> Seconds:
        """Seconds of attention. scores: FLOPs of a rank's visible scores in forward. Before Hopper, kernels need values
        as wide as keys, so the values of latent attention are padded (sdpa.py)."""
        ampere, later = self.attention_fraction
        fraction, D, V = later, run.settings.model.head_dim, run.settings.model.value_dim
        if run.machine.peak() < 5e14:
            fraction, scores = ampere, scores * 2 * D / (D + V)
        seconds = scores / (run.machine.peak() * fraction)
        return Seconds(seconds, 2.5 * seconds)

    def passes(self, run: Run) -> float:
        """How often a layer reads or writes each byte of its activations, forward and backward."""
        return run.constants.passes

    def exchanges(self, run: Run, one: float, count: int, columns: list[float]) -> Seconds:
        """Exposed seconds of `count` tensor parallel exchanges in forward, and as many in backward.

        one: seconds of one exchange
        columns: seconds of the weight gradient of each column parallel layer; each of these hides an exchange"""
        return Seconds(count * one, count * one - sum(min(one, seconds) for seconds in columns))

    def host_seconds(self, run: Run, layer: int) -> float:
        """Seconds that the host takes to launch a layer's operations, forward and backward. The GPU waits if this is
        longer than its own work.

        The seconds were measured with torch 2.11 on one core, with launches that did nothing (a real launch takes some
        us more), and with a version whose kernels took about 10 us more per call (docs/NOTES.md). The seconds of
        several techniques are added."""
        settings, grid = run.settings, run.settings.grid
        seconds = 2.1e-3 + 0.9e-3 * (grid.zero == 3) + 2.9e-3 * settings.model.has_experts(layer)
        seconds += 5.0e-3 if grid.sp == "async" else 1.1e-3 * (grid.tp > 1)
        if layer in settings.fp8_layers():
            seconds += 1.2e-3 if settings.precision.fp8_recipe().blocks else 2.6e-3
        return seconds

    def activations(self, run: Run, stages: Mapping[int, range], in_flight: int) -> int:
        """Bytes that the forwards of a pipeline rank with these stages save."""
        return memory.activation_bytes(run.settings, 2, stages.values(), in_flight, run.last_stage in stages)

    def more_memory(self, run: Run, rank: int, stages: Mapping[int, range]) -> dict[str, int]:
        """Bytes of a pipeline rank that plan/memory.py does not have, by kind."""
        return {}


OURS = Code()


class Constants(NamedTuple):
    """Speeds, fitted by `python -m tests.published fit`, and three margins of memory, fitted by hand."""
    ampere: float = 0.835  # speed of a model's matmuls, relative to the machine's best one, by generation of GPUs
    hopper: float = 0.799
    blackwell: float = 0.942
    passes: float = 6.36  # reads and writes of each activation byte that a layer makes, forward and backward
    logit_bytes: float = 55.4  # read and written per logit, forward and backward
    hidden: float = 0.626  # of the data axis' communication under computation, at levels 2 and 3 of ZeRO
    exchange_s: float = 6.9e-5  # per tensor parallel exchange, besides latency: streams wait for each other
    fixed_s: float = 33.5e-3  # per step
    node: float = 0.853  # bandwidth inside a node, relative to one large collective
    network: float = 0.739  # bandwidth of the network, relative to one large collective
    latency: float = 1.55  # relative to the machine's
    reserved: float = 0.3e9  # bytes that the allocator and libraries hold besides
    usable: float = 0.95  # of a GPU's memory
    spread: float = 0.12  # standard deviation of the error of a predicted memory, relative


CONSTANTS = Constants()


# ---- the time of a stage --------------------------------------------------------------------------------------------

class Seconds(NamedTuple):
    """Seconds of one micro-batch: forward, and the halves of backward (input gradients, weight gradients)."""
    forward: float = 0.0
    input: float = 0.0
    weight: float = 0.0

    def plus(self, other: Seconds, times: float = 1.0) -> Seconds:
        return Seconds(*(a + times * b for a, b in zip(self, other)))

    @property
    def total(self) -> float:
        return sum(self)


Parts = dict[str, Seconds]  # "matmul", "attention", ... -> the seconds spent on it


def add_parts(into: Parts, parts: Parts, times: float = 1.0) -> None:
    for name, seconds in parts.items():
        into[name] = into.get(name, Seconds()).plus(seconds, times)


class Run(NamedTuple):
    """A run to predict. All experts are assumed to get equally many tokens."""
    settings: Config
    machine: Machine
    code: Code = OURS
    constants: Constants = CONSTANTS

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a context parallel rank."""
        batch, grid = self.settings.batch, self.settings.grid
        return batch.micro_batch * padded_length(batch.seq_len, grid.cp, grid.sequence_shards) // grid.cp

    @property
    def micro_batches(self) -> int:
        batch = self.settings.batch
        return batch.ramp()[-1][0] // batch.micro_batch // self.settings.grid.batch_shares

    @property
    def fused(self) -> bool:
        """Whether this project's kernels run. They need fewer temporaries than plain torch."""
        return self.settings.precision.kernels == "auto" and self.machine.name != "cpu"

    @property
    def last_stage(self) -> int:
        return self.settings.grid.pp * self.settings.grid.virtual_stages - 1

    def stages_of_rank(self, rank: int) -> dict[int, range]:
        """The pipeline stages of a rank -> their layers."""
        return memory.stages_of_rank(self.settings, rank, self.code.stages(self.settings))

    def matmul(self, flops: float, fp8: bool = False) -> float:
        machine, constants = self.machine, self.constants
        speed = (constants.ampere if machine.peak() < 5e14 else constants.hopper if machine.peak() < 1.5e15
                 else constants.blackwell)
        return flops / (machine.best_matmul(fp8) * speed)

    def memory(self, nbytes: float) -> float:
        return nbytes / self.machine.memory_bandwidth

    def collective(self, nbytes: float, n: int, stride: int = 1, collective: str = "all_gather",
                   calls: float = 1) -> float:
        """collective_seconds of plan/machines.py, with the bandwidths and latencies of the constants."""
        constants = self.constants
        levels = tuple(level._replace(
            latency_s=level.latency_s * constants.latency,
            bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * (constants.network if i else constants.node))
            for i, level in enumerate(self.machine.levels))
        return collective_seconds(self.machine._replace(levels=levels), nbytes, n, stride, collective, calls)


def tensor_parallel_part(run: Run, exchanges: int, columns: list[float]) -> Parts:
    """Exposed seconds of the all-gathers and reduce-scatters of activations [T, H]: `exchanges` in forward, and as many
    in backward. columns: see Code.exchanges."""
    grid = run.settings.grid
    if grid.tp == 1 or grid.sp == "async":
        return {}
    nbytes = (grid.tp - 1) / grid.tp * 2 * run.tokens * run.settings.model.hidden
    one = run.collective(nbytes, grid.tp) + run.constants.exchange_s
    return dict(tp=run.code.exchanges(run, one, exchanges, columns))


def layer_parts(run: Run, layer: int) -> Parts:
    """Seconds of a block on a rank, for one micro-batch."""
    settings, T = run.settings, run.tokens
    model, grid, recompute = settings.model, settings.grid, settings.precision.recompute
    fp8 = layer in settings.fp8_layers()
    table = costs.llama_layer(model, settings.batch.seq_len, costs.LayerOptions(tp=grid.tp, cp=grid.cp), layer)
    scores = table["attention"].flops / 2 * T / grid.tp  # visible ones
    flops = {name: activation.flops * T / grid.tp for name, activation in table.items() if name != "attention"}
    product = run.matmul(sum(flops.values()), fp8)
    weights = sum(costs.layer_elements(settings, layer).values())
    parts = dict(matmul=Seconds(product + run.memory(2 * weights), product + run.memory(2 * weights),
                                product + run.memory(14 * weights)))
    touched = run.memory(costs.saved_bytes(table, "none", grid.tp, grid.sequence_parallel) * T
                         * run.code.passes(run))
    parts["elementwise"] = Seconds(touched / 3, touched * 2 / 3)
    if fp8:
        inputs, gradients = (T * count for count in costs.fp8_operands(settings, layer))
        one, two = (costs.fp8_bytes(settings, copies) for copies in (1, 2))  # inputs are read again in backward
        parts["quantise"] = Seconds(run.memory(one * inputs), run.memory(one * inputs + two * gradients))
    parts["attention"] = run.code.attention(run, scores)
    columns = [run.matmul(flops[name], fp8) for name in ("qkv", "queries", "gate_up", "shared_gate_up")
               if name in flops]
    parts |= tensor_parallel_part(run, 4, columns)
    parts |= context_parallel_part(run, parts["attention"]) | expert_parallel_part(run, layer)
    if recompute == "full":
        last = run.matmul(costs.forward_flops(table) - costs.recomputed_flops(table, "full"), fp8) * T / grid.tp
        again = sum(part.forward for part in parts.values()) - last
        again -= parts.get("tp", Seconds()).forward / 4 + parts.get("ep", Seconds()).forward / 2
        parts["recomputed"] = Seconds(0.0, again)
    elif recompute == "selective":
        parts["recomputed"] = Seconds(0.0, touched / 6 + run.matmul(flops.get("keys_values", 0.0), fp8))  # of latents
    forward, backward = (sum(part.forward for part in parts.values()),
                         sum(part.input + part.weight for part in parts.values()))
    if settings.precision.offloads("activations"):  # the block's input, to the host in forward and back in backward
        copied = 2 * T * model.hidden / grid.tp / run.machine.host_link
        parts["offload"] = Seconds(max(0.0, copied - forward), max(0.0, copied - backward))
    host = run.code.host_seconds(run, layer)
    parts["launch"] = Seconds(max(0.0, host / 3 - forward), max(0.0, host * 2 / 3 - backward))
    return parts


def context_parallel_part(run: Run, attention: Seconds) -> Parts:
    """Seconds of exchanging keys and values [T, 2 kv/t]. They are gathered in forward and in backward, and their
    gradients are reduce-scattered. A ring sends as many bytes, but attention hides them. Ranks that exchange heads send
    queries, keys, values and results."""
    model, grid = run.settings.model, run.settings.grid
    if grid.cp == 1:
        return {}
    kv = 2 * max(model.kv_heads // grid.tp, 1) * model.head_dim
    if model.kv_lora_rank:  # latents, whose gradients are in 16 bits, too
        kv = model.kv_lora_rank + model.rope_head_dim
    near, far = grid.head_ranks, grid.cp // grid.head_ranks
    one = run.collective((far - 1) * 2 * run.tokens * kv, far, grid.tp * near)
    exchanged = 2 * run.tokens * (2 * model.heads // grid.tp * model.head_dim + kv) * (near - 1) / near
    heads = run.collective(exchanged, near, grid.tp, "all_to_all")
    back = one if model.kv_lora_rank else 2 * one
    hidden = attention if grid.cp_style == "ring" else Seconds()
    return dict(cp=Seconds(heads + max(0.0, one - hidden.forward), heads + max(0.0, back - hidden.input)))


def expert_parallel_part(run: Run, layer: int) -> Parts:
    """Dispatch and combine, in forward and in backward: H elements per copy of a token each; with a copy 8 k bytes,
    with its gradient 4 k."""
    model, grid = run.settings.model, run.settings.grid
    if grid.ep == 1 or not model.has_experts(layer):
        return {}
    copies = costs.copies_per_token(model, grid.ep) * run.tokens
    nbytes = copies * (2 * model.hidden + 3 * model.top_k) / grid.tp * (grid.ep - 1) / grid.ep
    one = run.collective(nbytes, grid.ep, 1 if grid.sequence_parallel else grid.tp, "all_to_all")
    return dict(ep=Seconds(2 * one, 2 * one))


def head_parts(run: Run) -> Parts:
    model, grid = run.settings.model, run.settings.grid
    product = run.matmul(2 * run.tokens * model.hidden * model.vocab / grid.tp)
    logits = run.memory(run.constants.logit_bytes * run.tokens * model.vocab / grid.tp)
    parts = dict(head=Seconds(product + logits / 3, product + logits * 2 / 3, product))
    return parts | tensor_parallel_part(run, 1, [product])


def stage_parts(run: Run) -> list[Parts]:
    """Seconds of each stage for one micro-batch, by part."""
    settings = run.settings
    kinds, of_kind = costs.layer_kinds(settings), costs.by_kind(settings, lambda layer: layer_parts(run, layer))
    stages, made = [], {}  # made: stages with the same layers share one table
    for layers in run.code.stages(settings):
        counts = Counter(kinds[layer] for layer in layers)
        key = tuple(counts.items())
        if key not in made:
            made[key] = {}
            for kind, count in key:
                add_parts(made[key], of_kind[kind], count)
        stages.append(made[key])
    stages[-1] = dict(stages[-1])
    add_parts(stages[-1], head_parts(run), 1 + settings.model.mtp)
    return stages


def stage_seconds(stages: list[Parts]) -> list[Seconds]:
    """Seconds of each stage for one micro-batch, over all parts."""
    sums: dict[int, Seconds] = {}
    for parts in stages:
        if id(parts) not in sums:
            sums[id(parts)] = Seconds(*map(sum, zip(*parts.values()))) if parts else Seconds()
    return [sums[id(parts)] for parts in stages]


# ---- the pipeline ---------------------------------------------------------------------------------------------------

@lru_cache(256)
def plan_and_turns(schedule: str, p: int, m: int, v: int) -> tuple[schedules.Plan, list[tuple]]:
    plan = schedules.make_plan(schedule, p, m, v)
    return plan, schedules.in_turns(plan)


def busy_seconds(run: Run, stages: list[Seconds]) -> list[float]:
    """Seconds that each pipeline rank computes in a step."""
    busy = [0.0] * run.settings.grid.pp
    for stage, seconds in enumerate(stages):
        busy[memory.owner(run.settings.grid, stage)] += run.micro_batches * seconds.total
    return busy


def pipeline_seconds(run: Run, stages: list[Seconds]) -> tuple[float, list[float]]:
    """(seconds of all micro-batches, seconds that each rank is busy).

    The steady state of a schedule repeats every p micro-batches. So 4 p of them are simulated, and each further p are
    assumed to take as long as the last p of these."""
    grid, m = run.settings.grid, run.micro_batches
    p, hop, busy = grid.pp, hop_seconds(run), busy_seconds(run, stages)
    if p == 1:
        return busy[0], busy
    costs_of_stages = [schedules.Costs(*seconds, hop) for seconds in stages]

    def of(count: int) -> float:
        plan, turns = plan_and_turns(grid.schedule, p, count, grid.virtual_stages)
        return max(spans[-1].stop for spans in schedules.simulate(plan, costs_of_stages, turns=turns))

    few = memory.few_micro_batches(grid, m)
    total = of(few)
    if few < m:
        total += (m - few) / p * (total - of(few - p))
    return total, busy


def hop_seconds(run: Run) -> float:
    """Seconds to send a micro-batch's activations to the next stage; by network unless one node has all stages."""
    grid = run.settings.grid
    nbytes = 2 * run.tokens * run.settings.model.hidden / (grid.sequence_shards)
    return run.collective(nbytes, 2, -(-grid.dp * grid.cp * grid.tp * grid.pp // 2))


# ---- a step ---------------------------------------------------------------------------------------------------------

class Step(NamedTuple):
    """Seconds of a step. parts: the seconds of the busiest rank by part, of which communication is only the exposed
    part."""
    seconds: float
    parts: dict[str, float]


def data_parallel_seconds(run: Run, elements: Mapping[str, list[int]], layers: int, one: Seconds,
                          busy: float) -> float:
    """Exposed seconds of the data axis in a step.

    elements: elements of the rank's buckets by data axis
    layers: number of layers of the rank
    one, busy: seconds of one micro-batch, and of all of them

    A rank sends 2 P, 2 P, (A+1) P and 3 A P elements at ZeRO levels 0 to 3, times (n-1)/n. Gradients are in fp32 or in
    --reduce-dtype, weights in 16 bits. With R replicas, n ranks shard, and the gradients of a shard are all-reduced
    over R.

    At level 0 the last backward hides this communication, as far as its time reaches; at level 1 a forward does, too.
    At levels 2 and 3 the micro-batches hide the share `hidden` of it.
    """
    grid, A = run.settings.grid, run.micro_batches
    gradient, weight = costs.reduced_bytes(run.settings, 2), 2
    sums = 1 if run.code.overlaps else 2
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
    if not run.code.overlaps or grid.tp > run.machine.levels[0].ranks:  # tensor parallel ranks use the network, too
        return seconds
    return max(seconds * (1 - run.constants.hidden) if grid.zero >= 2 else 0.0, seconds - under)


def tied_seconds(run: Run) -> float:
    """Seconds to sum a tied embedding's gradient over the first and the last pipeline rank, after all backwards. This
    project sums shards. Code that does not overlap sums before it shards."""
    model, grid = run.settings.model, run.settings.grid
    if not (model.tied or model.mtp) or grid.pp == 1 or grid.v_shaped:  # a V's first rank has both stages
        return 0.0
    shards = grid.dp // grid.dp_replicate * grid.cp if grid.zero and run.code.overlaps else 1
    nbytes = 4 * model.vocab * model.hidden / grid.tp / shards
    return run.collective(nbytes, 2, grid.dp * grid.cp * grid.tp * (grid.pp - 1), "all_reduce")


def bound_seconds(run: Run, sums: list[Seconds]) -> tuple[float, list[float]]:
    """A lower bound of pipeline_seconds, without a simulation: the time of the busiest rank, plus the time of the first
    micro-batch on the other ranks, divided by the number of model chunks."""
    grid, busy = run.settings.grid, busy_seconds(run, sums)
    hops = 2 * (grid.pp - 1) * hop_seconds(run) if grid.pp > 1 else 0.0
    return max(busy) + (sum(busy) - max(busy)) / run.micro_batches / grid.virtual_stages + hops, busy


def update_seconds(run: Run, buckets: list[float]) -> float:
    """Seconds of the optimizer's update. buckets: parameters of each bucket.

    If the state is on the host, three things overlap (core/collectives.py): gradients are copied to the host, buckets
    that have arrived are updated there, and updated weights are copied back."""
    moments, machine = 2 * memory.moment_bytes(run.settings, 2), run.machine
    if not run.settings.precision.offloads("optimizer"):
        return run.memory((24 + moments) * sum(buckets))
    arrived = updated = returned = 0.0  # when a bucket's gradient is on the host, is applied, its weights are back
    for count in buckets:
        arrived += 4 * count / machine.host_link
        updated = max(arrived, updated) + (18 + moments) * count / machine.host_memory
        returned = max(updated, returned) + 2 * count / machine.host_link
    return run.memory(22 * sum(buckets)) + returned


def muon_seconds(run: Run, stages: Mapping[int, range]) -> float:
    """Further seconds of --optimizer muon: its matmuls, divided evenly over the owners, and its two all-to-alls in 16
    bits, which send nearly every row to another rank."""
    grid, model, layers = run.settings.grid, run.settings.model, list(chain(*stages.values()))
    if run.settings.optim.optimizer != "muon":
        return 0.0
    n = grid.dp // grid.dp_replicate * grid.cp * grid.tp
    nbytes = 2 * sum(count * rows * columns for layer in layers
                     for (rows, columns), count in costs.layer_matrices(model, layer).items())
    sent = 2 * (n - 1) / n * nbytes / n if grid.zero else (n - 1) / n * nbytes / grid.tp
    seconds = run.collective(sent, n, 1, "all_to_all", 2) if n > 1 else 0.0
    return seconds + run.matmul(sum(costs.muon_flops(model, layer) for layer in layers) / n)


def step_seconds(run: Run, stages: list[Parts] | None = None, simulated: bool = True) -> Step:
    """The time of a step, and its parts.

    stages: the result of stage_parts, if it is known
    simulated: simulate the pipeline; otherwise use bound_seconds
    """
    grid = run.settings.grid
    stages = stages or stage_parts(run)
    sums = stage_seconds(stages)
    seconds, busy = (pipeline_seconds if simulated else bound_seconds)(run, sums)
    busiest = max(range(grid.pp), key=busy.__getitem__)
    parts: Parts = {}
    for stage in run.stages_of_rank(busiest):
        add_parts(parts, stages[stage], run.micro_batches)
    spent = {name: part.total for name, part in parts.items() if part.total}
    spent["bubble"] = seconds - busy[busiest]
    data = update = 0.0
    for rank in {0, grid.pp - 1}:
        mine = run.stages_of_rank(rank)
        elements = costs.bucket_elements(run.settings, mine, 2)
        one = Seconds(*map(sum, zip(*(sums[stage] for stage in mine))))
        data = max(data, data_parallel_seconds(run, elements, sum(map(len, mine.values())), one, busy[busiest]))
        shards = memory.shards_of(run.settings)
        quantised = costs.fp8_elements(run.settings, chain(*mine.values())) * costs.fp8_bytes(run.settings, 2)
        times = 2 * run.micro_batches if grid.zero == 3 else 1  # weights are quantised when they change or are gathered
        sharded = [count / shards[axis] for axis, counts in elements.items() for count in counts]
        update = max(update, update_seconds(run, sharded) + run.memory(times * quantised) + muon_seconds(run, mine))
    spent |= dict(dp=data, tie=tied_seconds(run), optimizer=update, fixed=run.constants.fixed_s)
    return Step(seconds + sum(spent[name] for name in ("dp", "tie", "optimizer", "fixed")), spent)


# ---- memory ---------------------------------------------------------------------------------------------------------

def activations_of_rank(run: Run, rank: int) -> int:
    """Bytes that the forwards of a pipeline rank save."""
    in_flight, _ = memory.plan_in_memory(run.settings, rank)
    return run.code.activations(run, run.stages_of_rank(rank), in_flight)


def memory_of_rank(run: Run, rank: int, own: int | None = None) -> dict[str, int]:
    """Bytes of a pipeline rank by kind. own: its activations, if they are known."""
    own = activations_of_rank(run, rank) if own is None else own
    kinds = Counter(memory.memory_of_rank(run.settings, rank, 2, fused=run.fused, activations=own,
                                          stages=run.code.stages(run.settings)))
    kinds.update(run.code.more_memory(run, rank, run.stages_of_rank(rank)))
    return dict(kinds)


def activations(run: Run) -> dict[int, int]:
    """Pipeline rank -> bytes of its activations, for the ranks that may need the most memory: the first two, which hold
    the most micro-batches, and the last."""
    p = run.settings.grid.pp
    return {rank: activations_of_rank(run, rank) for rank in sorted({0, min(1, p - 1), p - 1})}


def needed_memory(run: Run, saved: Mapping[int, int] | None = None) -> dict[str, int]:
    """Bytes by kind of the pipeline rank that needs the most. saved: the result of `activations`, if it is known."""
    ranks = saved or activations(run)
    return max((memory_of_rank(run, rank, own) for rank, own in ranks.items()), key=lambda kinds: sum(kinds.values()))


def probability_of_fit(run: Run, nbytes: float) -> float:
    """The probability that a run with this predicted memory does not run out of memory. nbytes: without `reserved`."""
    needed, there = nbytes + run.constants.reserved, run.machine.memory_bytes * run.constants.usable
    return NormalDist(0, run.constants.spread).cdf(math.log(there / needed))


# ---- a prediction ---------------------------------------------------------------------------------------------------

class Prediction(NamedTuple):
    step_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    mfu_causal: float
    hfu: float
    memory_gb: float
    fits: float  # a probability


def predict(run: Run) -> Prediction:
    settings, grid = run.settings, run.settings.grid
    seconds = step_seconds(run).seconds
    gpus = grid.ranks
    rate = settings.batch.ramp()[-1][0] * settings.batch.seq_len / seconds / gpus
    share = {name: flops * rate / run.machine.peak() for name, flops in costs.flops_by_convention(settings).items()}
    needed = sum(needed_memory(run).values())
    return Prediction(seconds, rate, **share, memory_gb=(needed + run.constants.reserved) / 1e9,
                      fits=probability_of_fit(run, needed))


def kind_of(run: Run) -> str:
    """The kind of a run. Errors of predicted step times are known by kind, from published runs."""
    grid, experts, fp8 = run.settings.grid, run.settings.model.experts, run.settings.precision.fp8 != "none"
    gpus = grid.ranks // grid.sites  # sites compute their steps by themselves
    return ", ".join(("experts" if experts else "dense", "FP8" if fp8 else "16 bits",
                      family_of(run.machine) or run.machine.name, "pipeline" if grid.pp > 1 else "no pipeline",
                      "at most 256 GPUs" if gpus <= 256 else "more than 256 GPUs"))


def held_out() -> dict[str, dict[str, Any]]:
    """Errors of the predictions for published runs that had no part in the fit: "steps", by kind of run, and "memory".
    `python -m tests.published fit` writes this file."""
    return json.loads(HELD_OUT.read_text())


def run_of(request: Mapping[str, Any], code: Code = OURS) -> Run:
    """The Run that a request describes.

    request: settings of train.py by name; `machine`, a name or a file; `gpus`, by default as many as the grid has

    Raises ValueError for settings that cannot run."""
    asked = {name.replace("-", "_"): value for name, value in request.items()}
    machine = read_machine(asked.pop("machine", "h100"))
    gpus = int(asked.pop("gpus", 0)) or math.prod(max(1, int(asked.get(axis, 1))) for axis in AXES)
    settings = parse(to_flags(asked), gpus)
    need(settings.grid.grid == "given", "--grid auto: give a grid, such as python -m plan search finds")
    return Run(with_dtype(settings, machine), machine, code)


def parse(flags: list[str], gpus: int) -> Config:
    """Parse flags by rules.parse. Refuse --init-from and --resume, because only run/cli.py reads models and
    checkpoints."""
    given = config.read(flags)
    for name in ("init_from", "resume"):
        path = given.get(name)
        need(not path, f"{config.flag(name)} {path}: plan reads neither models nor checkpoints: give --preset or the "
             "model's flags")
    return rules.parse(flags, gpus)


def to_flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings by name as flags of train.py: {"tp": 2, "tied": False} -> ["--tp", "2", "--no-tied"]."""
    flags = []
    for name, value in settings.items():
        flag = config.flag(name)
        if value is True:
            flags.append(flag)
        elif value is False:
            flags.append("--no-" + flag[2:])
        elif value is not None:
            flags += [flag, config.written(name, value)]
    return flags


def with_dtype(settings: Config, machine: Machine) -> Config:
    """The settings, with `auto` replaced by bf16. Raises ValueError for a dtype whose times are not known, and for FP8
    on a machine without it."""
    precision = settings.precision
    if precision.dtype == "auto":
        precision.dtype = "bf16"
    need(precision.dtype in ("bf16", "fp16"),
         f"--dtype {precision.dtype}: times are known in bf16 and fp16, use one of them, or auto")
    need(precision.fp8 == "none" or machine.has_fp8(),
         f"--fp8 {precision.fp8}: {machine.name} has no FP8: use --fp8 none, or another --machine")
    return settings
