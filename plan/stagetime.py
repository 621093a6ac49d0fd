"""What a pipeline stage takes for one micro-batch on a machine, before anything runs.

The forward of a layer takes the time of its matmuls and attention at the speed that kernels reach, plus that of reading
and writing its activations, plus its exposed communication; a layer that is smaller than its kernels' launches takes
as long as those. FLOPs, bytes and shapes are those of plan/costs.py, collectives those of plan/machines.py.

The constants of time and memory are the same for every run. They were fitted on public runs; none belongs to a row, a
model or a paper. plan/fit.py fits those of time again, also without any one model or number of nodes.
`Kernels` says what a run's code does: which attention, what it overlaps, what it saves.

Letters: T tokens of a micro-batch on a rank, H hidden, V vocabulary, t tensor parallel ranks.
"""
from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from config import Config, padded_length
from plan import costs
from plan.machines import Machine, collective_seconds

# ---- what a run's code does -----------------------------------------------------------------------------------------

class Kernels(NamedTuple):
    """What the code of a run does, as far as it changes time or memory: facts, not fits.

    attention: standard, flash1, flash2 or flash3 (cuDNN's is as fast). overlap: the data axis communicates under
    backward; where it does not, gradients are all-reduced at level 1 of ZeRO, too (DeepSpeed's _bf16_reduce_grads,
    nanotron's trainer.py). tp_overlap: which tensor parallel communication is under matmuls: none, that of column
    parallel layers' backward (tp.py), or all. fused: a norm is one kernel, and so is an activation function, and
    gradients in bf16 are not held beside those in fp32. launch: operations are launched from Python, many per layer.
    gathered: how many of a layer's two inputs that tensor parallel ranks gather are saved. division: into stages, see
    costs.stages_of.
    """
    attention: str = "flash2"
    overlap: bool = True
    tp_overlap: str = "backward"
    fused: bool = True
    launch: bool = True
    gathered: int = 0
    division: str = "balanced"


# Fractions of the peak that attention reaches, forward and backward together, on Ampere and on later GPUs: Dao 2022;
# Dao 2023, figures 4 to 7; Shah et al. 2024, figures 5 and 6.
ATTENTION_FRACTION = {"flash1": (0.35, 0.20), "flash2": (0.60, 0.33), "flash3": (0.60, 0.60)}


class Constants(NamedTuple):
    """Fitted on public runs by plan/fit.py."""
    ampere: float = 0.83  # speed of a model's matmuls, relative to the machine's best one, by generation of GPUs
    hopper: float = 0.785
    blackwell: float = 0.929
    passes: float = 15.3  # reads and writes of each activation byte that a layer makes, forward and backward
    fused: float = 6.41  # the same, where norms and SwiGLU are one kernel each
    logit_bytes: float = 58.4  # read and written per logit, forward and backward
    launch_s: float = 4.33e-3  # for a layer, forward and backward, from Python
    hidden: float = 0.667  # of the data axis' communication under computation, at levels 2 and 3 of ZeRO
    exchange_s: float = 7.43e-5  # per tensor parallel exchange, besides latency: streams wait for each other
    fixed_s: float = 33.7e-3  # per step
    node: float = 0.848  # bandwidth of a node, relative to what is measured for one large collective
    network: float = 0.799  # the same of the network
    latency: float = 1.57  # relative to the machine's
    unfused: float = 1.4  # activations that a layer saves in code which is not `fused`, relative to plan/memory.py
    reserved: float = 0.3e9  # bytes that the allocator and libraries hold besides
    usable: float = 0.95  # of a GPU's memory
    spread: float = 0.12  # standard deviation of the error of a predicted memory, relative


CONSTANTS = Constants()


# ---- the time of a stage --------------------------------------------------------------------------------------------

class Seconds(NamedTuple):
    """Of one micro-batch: forward, and the two halves of backward."""
    forward: float = 0.0
    input: float = 0.0
    weight: float = 0.0

    def plus(self, other: Seconds, times: float = 1.0) -> Seconds:
        return Seconds(*(a + times * b for a, b in zip(self, other)))

    @property
    def total(self) -> float:
        return sum(self)


Parts = dict[str, Seconds]  # what time is spent on -> how much


def add_parts(into: Parts, parts: Parts, times: float = 1.0) -> None:
    for name, seconds in parts.items():
        into[name] = into.get(name, Seconds()).plus(seconds, times)


class Run(NamedTuple):
    """What is to be timed. imbalance: tokens of the most loaded rank's experts over the mean of all ranks."""
    settings: Config
    machine: Machine
    kernels: Kernels = Kernels()
    constants: Constants = CONSTANTS
    imbalance: float = 1.0

    @property
    def tokens(self) -> int:
        """Of a micro-batch on a context parallel rank."""
        batch, grid = self.settings.batch, self.settings.grid
        return batch.micro_batch * padded_length(batch.seq, grid.cp, grid.sequence_shards) // grid.cp

    @property
    def micro_batches(self) -> int:
        batch = self.settings.batch
        return batch.ramp()[-1][0] // batch.micro_batch // self.settings.grid.dp

    def matmul(self, flops: float, fp8: bool = False) -> float:
        machine, constants = self.machine, self.constants
        speed = (constants.ampere if machine.peak() < 5e14 else constants.hopper if machine.peak() < 1.5e15
                 else constants.blackwell)
        return flops / (machine.best_matmul(fp8) * speed)

    def attention(self, flops: float) -> float:
        """flops: of visible scores, forward or backward."""
        ampere, later = ATTENTION_FRACTION[self.kernels.attention]
        return flops / (self.machine.peak() * (ampere if self.machine.peak() < 5e14 else later))

    def memory(self, nbytes: float) -> float:
        return nbytes / self.machine.memory_bandwidth

    def collective(self, nbytes: float, n: int, stride: int = 1, collective: str = "all_gather",
                   calls: float = 1) -> float:
        """With the constants: see collective_seconds."""
        constants = self.constants
        levels = tuple(level._replace(
            latency_s=level.latency_s * constants.latency,
            bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * (constants.network if i else constants.node))
            for i, level in enumerate(self.machine.levels))
        return collective_seconds(self.machine._replace(levels=levels), nbytes, n, stride, collective, calls)


def tensor_parallel_part(run: Run, exchanges: int, columns: list[float]) -> Parts:
    """All-gathers and reduce-scatters of a micro-batch's activations [T, H], so many in forward and as many in
    backward, less what is under matmuls. Inputs of column parallel layers that are not saved are gathered again: under
    matmuls, if anything is. columns: seconds of each such layer's weight gradient."""
    grid, overlap = run.settings.grid, run.kernels.tp_overlap
    if grid.tp == 1 or grid.async_tp or overlap == "all":
        return {}
    nbytes = (grid.tp - 1) / grid.tp * 2 * run.tokens * run.settings.model.hidden
    one = run.collective(nbytes, grid.tp) + run.constants.exchange_s
    hidden = sum(min(one, seconds) for seconds in columns) if overlap == "backward" else 0.0
    again = len(columns[run.kernels.gathered:]) if overlap == "none" and grid.sequence_parallel else 0
    return dict(tp=Seconds(exchanges * one, (exchanges + again) * one - hidden))


def layer_parts(run: Run, layer: int) -> Parts:
    """What a block takes on a rank, for one micro-batch."""
    settings, constants, T = run.settings, run.constants, run.tokens
    model, grid, recompute = settings.model, settings.grid, settings.precision.recompute
    fp8 = layer in settings.fp8_layers()
    table = costs.llama_layer(model, settings.batch.seq, costs.LayerOptions(tp=grid.tp), layer)
    scores = table["attention"].flops / 2 * T / grid.tp  # visible ones
    flops = {name: activation.flops * T / grid.tp * (run.imbalance if name.startswith("experts") else 1)
             for name, activation in table.items() if name != "attention"}
    product = run.matmul(sum(flops.values()), fp8)
    weights = sum(costs.layer_elements(settings, layer).values())
    parts = dict(matmul=Seconds(product + run.memory(2 * weights), product + run.memory(2 * weights),
                                product + run.memory(14 * weights)))
    touched = run.memory(costs.saved_bytes(table, "none", grid.tp, grid.sequence_parallel) * T
                         * (constants.fused if run.kernels.fused else constants.passes))
    parts["elementwise"] = Seconds(touched / 3, touched * 2 / 3)
    if fp8:
        quantised = (run.memory(costs.fp8_bytes(settings) * T * count) for count in costs.fp8_operands(settings, layer))
        parts["quantise"] = Seconds(*quantised)
    if run.kernels.attention == "standard":  # all scores, in memory
        cost = costs.attention_cost("standard", 1, model.heads, settings.batch.seq, model.head_dim)
        nbytes = cost.nbytes / settings.batch.seq * T / grid.tp
        seconds = run.matmul(2 * scores) * (16 if model.head_dim % 8 else 1)  # A100: without tensor cores peak / 16
        parts["attention"] = Seconds(seconds + run.memory(nbytes / 3), 2 * seconds + run.memory(nbytes * 2 / 3))
    else:
        seconds = run.attention(scores)
        parts["attention"] = Seconds(seconds, 2.5 * seconds)
    columns = [run.matmul(flops[name], fp8) for name in ("qkv", "gate_up", "shared_gate_up") if name in flops]
    parts |= tensor_parallel_part(run, 4, columns)
    parts |= context_parallel_part(run, parts["attention"]) | expert_parallel_part(run, layer)
    if recompute == "full":
        last = run.matmul(costs.forward_flops(table) - costs.recomputed_flops(table, "full"), fp8) * T / grid.tp
        again = sum(part.forward for part in parts.values()) - last
        again -= parts.get("tp", Seconds()).forward / 4 + parts.get("ep", Seconds()).forward / 2
        parts["recomputed"] = Seconds(0.0, again)
    elif recompute == "selective":
        parts["recomputed"] = Seconds(0.0, touched / 6)
    forward, backward = (sum(part.forward for part in parts.values()),
                         sum(part.input + part.weight for part in parts.values()))
    if settings.precision.offloads("activations"):  # the block's input, to the host in forward and back in backward
        copied = 2 * T * model.hidden / grid.tp / run.machine.host_link
        parts["offload"] = Seconds(max(0.0, copied - forward), max(0.0, copied - backward))
    if run.kernels.launch:
        parts["launch"] = Seconds(max(0.0, constants.launch_s / 3 - forward),
                                  max(0.0, constants.launch_s * 2 / 3 - backward))
    return parts


def context_parallel_part(run: Run, attention: Seconds) -> Parts:
    """Keys and values [T, 2 kv/t] of all cp ranks: gathered in forward and backward, gradients reduce-scattered; in a
    ring as much is sent, under attention. Ulysses exchanges q, k, v and the result."""
    model, grid = run.settings.model, run.settings.grid
    if grid.cp == 1:
        return {}
    kv = 2 * max(model.kv_heads // grid.tp, 1) * model.head_dim
    one = run.collective((grid.cp - 1) * 2 * run.tokens * kv, grid.cp, grid.tp)
    if grid.cp_style == "ring":
        return dict(cp=Seconds(max(0.0, one - attention.forward), max(0.0, 2 * one - attention.input)))
    if grid.cp_style == "ulysses":
        exchanged = 2 * run.tokens * (2 * model.heads // grid.tp * model.head_dim + kv) * (grid.cp - 1) / grid.cp
        one = run.collective(exchanged, grid.cp, grid.tp, "all_to_all")
        return dict(cp=Seconds(one, one))
    return dict(cp=Seconds(one, 2 * one))


def expert_parallel_part(run: Run, layer: int) -> Parts:
    """Dispatch and combine, in forward and in backward: H elements per copy of a token each; with a copy 8 k bytes,
    with its gradient 4 k."""
    model, grid = run.settings.model, run.settings.grid
    if grid.ep == 1 or not model.has_experts(layer):
        return {}
    copies = costs.copies_per_token(model, grid.ep) * run.tokens
    nbytes = copies * (2 * model.hidden + 3 * model.top_k) / grid.tp * (grid.ep - 1) / grid.ep * run.imbalance
    one = run.collective(nbytes, grid.ep, 1 if grid.sequence_parallel else grid.tp, "all_to_all")
    return dict(ep=Seconds(2 * one, 2 * one))


def head_parts(run: Run) -> Parts:
    model, grid = run.settings.model, run.settings.grid
    product = run.matmul(2 * run.tokens * model.hidden * model.vocab / grid.tp)
    logits = run.memory(run.constants.logit_bytes * run.tokens * model.vocab / grid.tp)
    parts = dict(head=Seconds(product + logits / 3, product + logits * 2 / 3, product))
    return parts | tensor_parallel_part(run, 1, [product])


def stage_parts(run: Run) -> list[Parts]:
    """What every stage takes for one micro-batch."""
    settings = run.settings
    kinds, of_kind = costs.layer_kinds(settings), costs.by_kind(settings, lambda layer: layer_parts(run, layer))
    stages, made = [], {}  # made: stages with the same layers share one table
    for layers in costs.stages_of(settings, run.kernels.division):
        counts = Counter(kinds[layer] for layer in layers)
        key = tuple(counts.items())
        if key not in made:
            made[key] = {}
            for kind, count in key:
                add_parts(made[key], of_kind[kind], count)
        stages.append(made[key])
    stages[-1] = dict(stages[-1])
    add_parts(stages[-1], head_parts(run))
    return stages


def stage_seconds(stages: list[Parts]) -> list[Seconds]:
    """What every stage takes for one micro-batch, all parts together."""
    sums: dict[int, Seconds] = {}
    for parts in stages:
        if id(parts) not in sums:
            sums[id(parts)] = Seconds(*map(sum, zip(*parts.values()))) if parts else Seconds()
    return [sums[id(parts)] for parts in stages]
