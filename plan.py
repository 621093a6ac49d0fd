"""What a run needs before it runs: does it fit, how long does a step take, which grid is best, what does it cost?

    python plan.py params   --preset llama-3.1-8b                                          parameters by component
    python plan.py memory   --preset llama-3.1-8b --tp 8 --pp 2 --gpus 64 --machine h100   bytes by kind and choice
    python plan.py step     … the same flags                                            seconds by cause; MFU
    python plan.py balance  … the same flags             does communication hide under compute, and from what batch on?
    python plan.py search   --preset llama-3.1-70b --gpus 256 --global-batch 1024 --seq 8192     the best grids
    python plan.py scaling  --preset llama-3.1-8b --gpus 64 --train-tokens 1e12             compute, data, days, cost
    python plan.py predict  runs.jsonl                                                  one JSON object per line
    python plan.py check    [--tables DIR] [--json FILE]                                errors on published runs

Flags are those of train.py, plus --gpus and --machine (a name, or the file that `bench.py probe` writes). Neither torch
nor a GPU is needed: formulas are those of costs.py, times those of machines.py, pipelines those of schedules.py.

Search follows the three steps of the Ultra-Scale Playbook: grids that fit in memory; of these, those that reach the
global batch; of these, the fastest. A bound ranks all of them; the best are simulated.

Letters: N parameters, D tokens, C = 6 N D FLOPs (Kaplan et al. 2020); h hidden, L layers, V vocabulary.
"""
from __future__ import annotations

import argparse
import copy
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import checks
import config
import costs
import machines
import published
from checks import need
from config import Config
from machines import MACHINES, Kernels, Run, read_machine

GB = 1e9


# ---- settings -------------------------------------------------------------------------------------------------------

def to_flags(request: dict) -> list[str]:
    """A request's settings as flags: {"tp": 2, "sp": False} -> ["--tp", "2", "--no-sp"]."""
    flags = []
    for name, value in request.items():
        flag = checks.flag(name)
        if value is True:
            flags.append(flag)
        elif value is False:
            flags.append("--no-" + flag[2:])
        elif value is not None:
            flags += [flag, str(value)]
    return flags


def run_of(request: dict) -> Run:
    """What a request asks for. Raises ValueError for what cannot run. Keys: settings by name; machine; gpus, by default
    as many as the grid has; kernels, a dict of fields of machines.Kernels; imbalance."""
    asked = {name.replace("-", "_"): value for name, value in request.items()}
    machine = read_machine(asked.pop("machine", "h100"))
    gpus = int(asked.pop("gpus", 0)) or math.prod(max(1, int(asked.get(axis, 1))) for axis in ("dp", "cp", "tp", "pp"))
    given = asked.pop("kernels", None) or {}
    need(isinstance(given, dict), f"kernels {given}: write an object with fields of {', '.join(Kernels._fields)}")
    unknown = set(given) - set(Kernels._fields)
    need(not unknown, f"kernels: {', '.join(sorted(unknown))} unknown, use {', '.join(Kernels._fields)}")
    kernels = Kernels(**given)
    known = ("standard", *machines.ATTENTION_FRACTION)
    need(kernels.attention in known, f"kernels: attention {kernels.attention}: use one of {', '.join(known)}")
    imbalance = float(asked.pop("imbalance", 1.0))
    layers = int(asked.get("layers") or config.PRESETS.get(asked.get("preset", "tiny"), {}).get("layers", 4))
    if kernels.division != "balanced":  # other codes' stages may have the embedding, the norm or the head alone
        stages = int(asked.get("pp", 1)) * max(1, int(asked.get("chunks") or 1))
        need(stages <= layers + 4, f"--pp {asked.get('pp')}: {stages} stages of {layers} layers and four parts besides")
        asked["layers"] = max(layers, stages)
    settings = config.parse(to_flags(asked), gpus)
    settings.model.layers = layers if "layers" in asked else settings.model.layers
    return Run(in_16_bits(settings), machine, kernels, imbalance=imbalance)


def in_16_bits(settings: Config) -> Config:
    """The settings with their dtype decided. Raises ValueError for one that has no times here."""
    if settings.precision.dtype == "auto":
        settings.precision.dtype = "bf16"
    dtype = settings.precision.dtype
    need(dtype in ("bf16", "fp16"), f"--dtype {dtype}: times are known in bf16 and fp16, use one of them, or auto")
    return settings


def changed(run: Run, **values) -> Run | None:
    """The run with these settings changed; None if that cannot run."""
    settings = copy.deepcopy(run.settings)
    for section in config.SECTIONS:
        for name in values.keys() & vars(getattr(settings, section)).keys():
            setattr(getattr(settings, section), name, values[name])
    grid = settings.grid
    try:
        checks.complete(settings, grid.dp * grid.cp * grid.tp * grid.pp)
    except ValueError:
        return None
    return run._replace(settings=settings)


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
    seconds = machines.step_seconds(run).seconds
    gpus = grid.dp * grid.cp * grid.tp * grid.pp
    rate = settings.batch.ramp()[-1][0] * settings.batch.seq / seconds / gpus
    share = {name: flops * rate / run.machine.peak() for name, flops in costs.flops_by_convention(settings).items()}
    needed = sum(machines.memory(run).values())
    return Prediction(seconds, rate, **share, memory_gb=(needed + run.constants.reserved) / GB,
                      fits=machines.probability_of_fit(run, needed))


# ---- what is printed ------------------------------------------------------------------------------------------------

def bar(value: float, whole: float, width: int = 40) -> str:
    return "█" * round(width * min(1.0, value / whole)) if whole else ""


def size(nbytes: float) -> str:
    return f"{nbytes / GB:,.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


def print_params(run: Run) -> None:
    """Exact, beside h V + L (12 h^2 + 13 h) + 2 h, which the lectures use, and what is different."""
    model = run.settings.model
    ours, gpt = costs.parameters(model), costs.lecture_parameters(model)
    rows = [("vocabulary", ours.embedding + ours.head, gpt["vocabulary"],
             "one tied table, as theirs" if model.tied else "a table for the input and one for the output"),
            ("attention", ours.attention, gpt["attention"],
             f"{model.kv_heads} of {model.heads} heads have keys and values" if model.kv_heads < model.heads
             else "four matrices, as theirs"),
            ("feed-forward", ours.ffn, gpt["ffn"], f"SwiGLU has 3 h F, F = {model.ffn}; with 8/3 h = "
                                                   f"{8 * model.hidden / 3:,.0f} it would be 8 h^2, as theirs"),
            ("experts", ours.experts, 0, f"{model.experts} per layer, {model.top_k} per token"),
            ("router", ours.router, 0, ""),
            ("norms, biases", ours.norms, gpt["norms_and_biases"], "RMSNorm has no biases, nor have matrices")]
    total = sum(gpt.values())
    print(f"{model.preset}: {ours.total:,} parameters, {ours.active:,} active per token")
    print(f"{'component':15s}{'parameters':>20s}{'share':>9s}{'GPT formula':>20s}  why they differ")
    for name, count, theirs, why in rows:
        if count or theirs:
            print(f"{name:15s}{count:20,d}{count / ours.total:9.1%}{theirs:20,d}  {why}")
    print(f"{'total':15s}{ours.total:20,d}{1:9.1%}{total:20,d}  h V + L (12 h^2 + 13 h) + 2 h is "
          f"{total / ours.total - 1:+.1%} off (Narayanan et al. 2021)")


STATE = {"bf16 weights 2 + gradients 2, fp32 master 4 + moments 8": 16, "with fp32 gradients besides": 20,
         "16 with moments in bf16": 12, "this code: fp32 gradients instead": 18,
         "this code with --moments bf16": 14}  # bytes per parameter


def print_memory(run: Run) -> None:
    settings, machine = run.settings, run.machine
    kinds = machines.memory(run)
    needed, there = sum(kinds.values()), machine.memory_bytes
    print(f"{machine.name}: the pipeline rank that needs most, of {settings.grid.pp}, needs {size(needed)} of "
          f"{size(there)}, {size(run.constants.reserved)} reserved besides: fits with probability "
          f"{machines.probability_of_fit(run, needed):.2f}")
    for kind, nbytes in kinds.items():
        print(f"  {kind:14s}{size(nbytes):>14s}  {bar(nbytes, there)}")
    choices = {"pipeline rank": {str(rank): machines.memory_of_rank(run, rank) for rank in
                                 range(settings.grid.pp)} if settings.grid.pp > 1 else {}}
    for name, values in (("recompute", costs.RECOMPUTE), ("zero", (0, 1, 2, 3)),
                         ("seq", [settings.batch.seq << k >> 2 for k in range(6)])):
        made = {str(value): changed(run, **{name: value}) for value in values}
        choices["--" + name] = {value: machines.memory(other) for value, other in made.items() if other}
    for title, choice in choices.items():
        if choice:
            print(f"by {title}, total and activations:")
        for value, kinds in choice.items():
            nbytes = sum(kinds.values())
            print(f"  {value:14s}{size(nbytes):>14s}{size(kinds['activations']):>14s}  {bar(nbytes, there)}")
    print_state(costs.parameters(settings.model).total, settings.model.preset)


def print_state(parameters: int, name: str) -> None:
    """Bytes of model state per parameter (Rajbhandari et al. 2020, section 3.1), before anything is sharded."""
    counts = {name: parameters, "1B": 10**9, "7B": 7 * 10**9, "70B": 70 * 10**9, "405B": 405 * 10**9}
    print(f"{'model state, GB, bytes per parameter':60s}" + "".join(f"{title:>16s}" for title in counts))
    for kind, nbytes in STATE.items():
        print(f"  {f'{nbytes}: {kind}':58s}" + "".join(f"{nbytes * count / GB:16,.0f}" for count in counts.values()))


WHY = {"matmul": "matrix products at the speed that models reach",
       "elementwise": "norms, SwiGLU, residuals: limited by memory",
       "attention": "visible scores", "tp": "tensor parallel, not hidden", "cp": "keys and values, not hidden",
       "ep": "dispatch and combine", "recomputed": "forward in backward", "launch": "layers below their launches",
       "head": "logits and loss", "bubble": "the pipeline fills, drains or waits", "dp": "data axis, not hidden",
       "optimizer": "40 bytes per parameter", "fixed": "per step"}


def print_step(run: Run) -> None:
    step, found = machines.step_seconds(run), predict(run)
    batch, grid = run.settings.batch, run.settings.grid
    print(f"{run.machine.name}: {step.seconds:.3f} s per step of {batch.ramp()[-1][0]} sequences, "
          f"{found.tokens_per_s_per_gpu * grid.dp * grid.cp * grid.tp * grid.pp:,.0f} tokens/s, "
          f"{found.tokens_per_s_per_gpu:,.0f} tokens/s per GPU")
    for name, seconds in sorted(step.parts.items(), key=lambda item: -item[1]):
        if seconds > 0:
            print(f"  {name:12s}{seconds:9.3f} s {seconds / step.seconds:6.1%}  {bar(seconds, step.seconds, 30):30s} "
                  f"{WHY[name]}")
    print(f"MFU {found.mfu:.1%} (6 N + 12 L h s), {found.mfu_causal:.1%} (6 N + 6 L h s, visible scores), HFU "
          f"{found.hfu:.1%} (with what is recomputed), of {run.machine.peak() / 1e12:,.0f} TFLOP/s in bf16")
    print(f"memory {found.memory_gb:.1f} GB, fits with probability {found.fits:.2f}")


class Overlap(NamedTuple):
    """What a technique communicates beside the compute that it can hide under; it is exposed where ratio is above 1."""
    technique: str
    nbytes: float  # that a rank sends
    bandwidth: float  # bytes per second and rank, of its group
    flops: float  # of a rank
    speed: float  # FLOP/s that matmuls reach
    formula: str  # of the ratio
    limit: Callable[[float], str]  # the ratio -> when it falls below 1

    @property
    def communication_s(self) -> float:
        return self.nbytes / self.bandwidth

    @property
    def compute_s(self) -> float:
        return self.flops / self.speed

    @property
    def ratio(self) -> float:
        return self.communication_s / self.compute_s


def overlaps(run: Run) -> list[Overlap]:
    """The Ultra-Scale Playbook's question of each technique, for one layer (pp: one stage), with activations and
    weights in 16 bits and sums in fp32.

    F: FLOP/s. B: bandwidth. n: ranks. T: tokens of a micro-batch on a rank. p: multiplications per token in a layer
    (its parameters, and scores); P: in a stage. A forward takes 2 p T / F, a backward twice that.
    """
    model, grid, batch, machine = run.settings.model, run.settings.grid, run.settings.batch, run.machine
    speed, T = machine.peak() * machine.achieved_fraction, batch.micro_batch * batch.seq / grid.cp
    p = costs.forward_flops(costs.llama_layer(model, batch.seq)) / 2
    H, q, kv = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    dp, cp, tp, ep = grid.dp * grid.cp, grid.cp, grid.tp, grid.ep
    layers, keys = model.layers / (grid.pp * grid.chunks), batch.seq / cp

    def tokens(ratio: float) -> str:
        return f"from {T * ratio:,.0f} tokens per micro-batch on"

    rows = [  # what, n, stride, collective, bytes, FLOPs, ratio, limit
        ("dp: gradients' all-reduce under a backward", dp, tp, "all_reduce", 2 * (dp - 1) / dp * 4 * p / tp,
         4 * p * T / tp, "2 (n-1)/n F / (B T)", tokens),
        ("ZeRO-3: the next layer's all-gather under a forward", dp, tp, "all_gather", (dp - 1) / dp * 2 * p / tp,
         2 * p * T / tp, "(n-1)/n F / (B T)", tokens),
        ("ZeRO-3: all-gather, reduce-scatter under a backward", dp, tp, "all_gather", (dp - 1) / dp * (2 + 4) * p / tp,
         4 * p * T / tp, "3/2 (n-1)/n F / (B T)", tokens),
        ("tp: 2 all-gathers, 2 reduce-scatters of a forward", tp, 1, "all_gather", 4 * (tp - 1) / tp * 2 * T * H,
         2 * p * T / tp, "4 (n-1) H F / (B p)",
         lambda ratio: f"up to {1 + (tp - 1) / ratio:,.1f} ranks, whatever the batch"),
        ("cp: the ring's keys, values under a block of scores", cp, tp, "all_gather", 2 * 2 * kv * T / tp,
         4 * q * T * keys / 2 / tp, "2 kv/q F / (B S/n)",
         lambda ratio: f"from sequences of {batch.seq * ratio:,.0f} tokens on"),
        ("pp: a boundary's activations under a stage's forward", grid.pp, tp * dp, "all_gather", 2 * T * H / tp,
         2 * p * layers * T / tp, "H F / (B P)",
         lambda ratio: f"from {layers * ratio:,.2f} layers per stage on, whatever the batch"),
        ("ep: dispatch, combine beside the experts' forward", ep, 1, "all_gather",
         2 * (ep - 1) / ep * 2 * model.top_k * T * H, 6 * model.top_k * T * H * model.expert_ffn,
         "2/3 (n-1)/n F / (B ffn)",
         lambda ratio: f"from experts {model.expert_ffn * ratio:,.0f} wide on, whatever the batch")]
    return [Overlap(technique, nbytes, 1e9 / machines.collective_seconds(machine, 1e9, n, stride, collective), flops,
                    speed, formula, limit)
            for technique, n, stride, collective, nbytes, flops, formula, limit in rows if n > 1]


def print_balance(run: Run) -> None:
    """Communication beside the compute that can hide it, by technique; interconnects; what each pipeline rank does."""
    print(f"{run.machine.name}: matmuls reach {run.machine.peak() * run.machine.achieved_fraction / 1e12:.3g} TFLOP/s")
    print(f"{'per layer (pp: per stage)':53s}{'B':>10s}{'sending':>13s}{'computing':>13s}{'ratio':>8s}  "
          f"{'ratio =':25s}hidden")
    for overlap in overlaps(run):
        print(f"{overlap.technique:53s}{overlap.bandwidth / GB:5.3g} GB/s{overlap.communication_s * 1e3:10.3g} ms"
              f"{overlap.compute_s * 1e3:10.3g} ms{overlap.ratio:8.3g}  {overlap.formula:25s}"
              f"{overlap.limit(overlap.ratio)}")
    print("\ninterconnects, GB/s per direction: "
          + ", ".join(f"{name} {gb_s:g}" for name, gb_s in machines.INTERCONNECTS.items()) + "\n")
    print_pipeline(run)


def print_pipeline(run: Run) -> None:
    """What each pipeline rank holds and does in a step."""
    sums = machines.stage_seconds(machines.stage_parts(run))
    seconds, busy = machines.pipeline_seconds(run, sums)
    print(f"{'rank':>4s}{'layers':>8s}{'busy':>11s}{'idle':>8s}{'memory':>14s}")
    for rank, spent in enumerate(busy):
        layers = sum(map(len, machines.stages_of_rank(run, rank).values()))
        nbytes = sum(machines.memory_of_rank(run, rank).values())
        print(f"{rank:4d}{layers:8d}{spent:9.3f} s{1 - spent / seconds:8.1%}{size(nbytes):>14s}  "
              f"{bar(spent, seconds, 30)}")


# ---- search ---------------------------------------------------------------------------------------------------------

class Candidate(NamedTuple):
    """A grid and its settings; seconds: bound or, once simulated, step time."""
    run: Run
    seconds: float
    parts: dict[str, float]
    memory: float

    def limit(self) -> str:
        """What takes most time besides matrix products."""
        name, seconds = max(((name, seconds) for name, seconds in self.parts.items() if name != "matmul"),
                            key=lambda item: item[1])
        return f"{name} {seconds / self.seconds:.0%}"


def grids(settings: Config, gpus: int) -> Iterator[dict[str, int]]:
    """All axes of so many GPUs, with at least 512 tokens per context parallel rank. checks.py says which are valid."""
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    experts = settings.model.experts
    for tp in divisors:
        for pp in divisors:
            for cp in divisors if tp * pp <= gpus and tp <= settings.model.heads else ():
                if gpus % (tp * pp * cp) == 0 and cp * 512 <= max(512, settings.batch.seq):
                    dp = gpus // (tp * pp * cp)
                    for ep in [n for n in divisors if experts and experts % n == 0 and dp * cp * tp % n == 0] or [1]:
                        yield dict(tp=tp, pp=pp, cp=cp, ep=ep, dp=dp)


def variants(run: Run, grid: dict[str, int], fell: Counter) -> Iterator[Run]:
    """The micro-batches, schedules and recomputations of a grid. fell: counts why others cannot run."""
    base = copy.deepcopy(run.settings)
    base.grid = config.Grid(**grid, cp_style=base.grid.cp_style, sp=base.grid.sp, bucket_mb=base.grid.bucket_mb)
    try:
        checks.check_grid(base.grid, base.model, math.prod(grid[axis] for axis in ("tp", "pp", "cp", "dp")))
        checks.check_fp8(base.precision, base.model, base.grid)
    except ValueError as error:
        fell[reason(error)] += 1
        return
    sequences = base.batch.ramp()[-1][0]
    if sequences % grid["dp"]:
        fell["step 2: the global batch is not a multiple of dp"] += 1
        return
    share = sequences // grid["dp"]
    for micro_batch in (n for n in (1, 2, 4, 8, 16, 32) if share % n == 0):
        m = share // micro_batch
        names = ["1f1b"]
        if grid["pp"] > 1:
            names += ["interleaved"] * (m % grid["pp"] == 0 and base.model.layers >= 2 * grid["pp"])
        for schedule in names:
            settings = copy.copy(base)
            settings.batch = copy.copy(base.batch)
            settings.batch.micro_batch = micro_batch
            settings.grid = copy.copy(base.grid)
            settings.grid.schedule, settings.grid.chunks = schedule, 2 if schedule == "interleaved" else 1
            try:
                checks.check_batch(settings.batch, settings.grid)
            except ValueError as error:
                fell[reason(error)] += 1
                continue
            for recompute in costs.RECOMPUTE:
                settings = copy.copy(settings)
                settings.precision = copy.copy(base.precision)
                settings.precision.recompute = recompute
                yield run._replace(settings=settings)


def reason(error: ValueError) -> str:
    return "cannot run: " + " ".join(word for word in str(error).split(":")[0].split() if not word[0].isdigit())


def search(run: Run, gpus: int, simulated: int = 40) -> tuple[list[Candidate], Counter]:
    """(candidates that fit, fastest first, of which so many are simulated; why how many others fell)."""
    fell: Counter = Counter()
    found = []
    usable = run.machine.memory_bytes * run.constants.usable
    for grid in grids(run.settings, gpus):
        levels = (0, 1, 2, 3) if grid["dp"] * grid["cp"] > 1 else (0,)
        fitting: set[tuple] = set()  # what fits with less recomputation, so that more would only be slower
        for variant in variants(run, grid, fell):
            alike = variant.settings.batch.micro_batch, variant.settings.grid.schedule
            left = [level for level in levels if (alike, level) not in fitting]
            fell["step 3: slower"] += len(levels) - len(left)
            if not left:
                continue
            stages, saved = None, machines.activations(variant)
            if max(saved.values()) > usable:
                fell["step 1: does not fit in memory"] += len(left)
                continue
            for level in left:
                settings = copy.copy(variant.settings)
                settings.grid = copy.copy(settings.grid)
                settings.grid.zero = level
                candidate = variant._replace(settings=settings)
                needed = sum(machines.memory(candidate, saved).values()) + run.constants.reserved
                if needed > usable:
                    fell["step 1: does not fit in memory"] += 1
                    continue
                fitting.add((alike, level))
                stages = stages or machines.stage_parts(variant)
                step = machines.step_seconds(candidate, stages, simulated=False)
                found.append(Candidate(candidate, step.seconds, step.parts, needed))
    found.sort(key=lambda candidate: candidate.seconds)
    best = [candidate._replace(**machines.step_seconds(candidate.run)._asdict()) for candidate in found[:simulated]]
    best.sort(key=lambda candidate: candidate.seconds)
    fell["step 3: slower"] += max(0, len(found) - 10)
    return best + found[simulated:], fell


def describe(settings: Config) -> str:
    grid, batch = settings.grid, settings.batch
    axes = "".join(f" --{axis} {getattr(grid, axis)}" for axis in ("dp", "cp", "tp", "pp", "ep")
                   if getattr(grid, axis) > 1 or axis == "dp")
    schedule = f" --schedule {grid.schedule}" if grid.pp > 1 and grid.schedule != "1f1b" else ""
    recompute = f" --recompute {settings.precision.recompute}" if settings.precision.recompute != "none" else ""
    return f"{axes} --zero {grid.zero} --micro-batch {batch.micro_batch}{schedule}{recompute}".strip()


def print_search(run: Run, gpus: int) -> None:
    found, fell = search(run, gpus)
    if not found:
        state = 18 * costs.parameters(run.settings.model).total / GB
        reasons = ", ".join(f"{why}: {count}" for why, count in fell.most_common(2))
        raise ValueError(f"--gpus {gpus} --machine {run.machine.name}: of {sum(fell.values())} settings none fits "
                         f"({reasons}); model state alone is {state:,.0f} GB, {nearest(run, gpus)}")
    gpu_tokens = run.settings.batch.ramp()[-1][0] * run.settings.batch.seq / gpus
    print(f"{run.machine.name}, {gpus} GPUs: {len(found)} settings fit; the best, with what limits each:")
    print(f"{'step':>10s}{'tokens/s/GPU':>14s}{'memory':>12s}  limit            flags")
    for candidate in found[:10]:
        print(f"{candidate.seconds:8.3f} s{gpu_tokens / candidate.seconds:14,.0f}{size(candidate.memory):>12s}  "
              f"{candidate.limit():15s}  {describe(candidate.run.settings)}")
    print("others fell: " + "; ".join(f"{why}: {count:,}" for why, count in fell.most_common(8)))


def nearest(run: Run, gpus: int) -> str:
    """How many GPUs of this machine would do, with full recomputation and as much sharding as the pipeline allows."""
    for more in (2 * gpus, 4 * gpus, 8 * gpus, 16 * gpus):
        for grid in grids(run.settings, more):
            for variant in variants(run, grid, Counter()):
                grid_settings = copy.copy(variant.settings.grid)
                grid_settings.zero = 3 if grid_settings.pp == 1 else 1
                settings = copy.copy(variant.settings)
                settings.grid = grid_settings
                needed = sum(machines.memory(variant._replace(settings=settings)).values()) + run.constants.reserved
                if settings.precision.recompute == "full" and needed <= run.machine.memory_bytes * run.constants.usable:
                    return f"use --gpus {more}"
    return "use more GPUs, a smaller --seq or a smaller model"


# ---- predictions ----------------------------------------------------------------------------------------------------

def predict_request(request: dict) -> dict[str, float]:
    return predict(run_of(request))._asdict()


def predict_file(path: str) -> None:
    """Print each line of a file of requests, with its prediction added. Raises ValueError, naming the line."""
    need(os.path.isfile(path), f"{path}: there is no such file")
    with open(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    request = json.loads(line)
                    need(isinstance(request, dict), "not an object")
                    print(json.dumps(request | predict_request(request)))
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None


# ---- scaling --------------------------------------------------------------------------------------------------------

PF_DAY = 8.64e19  # FLOPs: 1e15 per second for a day (Kaplan et al. 2020)


class Fit(NamedTuple):
    """L(N, D) = E + A / N^alpha + B / D^beta, whose minimum at C = 6 N D is N = G (C/6)^a, with a = beta / (alpha +
    beta) and G = (alpha A / beta B)^(1 / (alpha + beta)) (Hoffmann et al. 2022, equation 4)."""
    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def optimum(self, flops: float) -> tuple[float, float]:
        """(N, D) with the least loss."""
        both = self.alpha + self.beta
        scale = (self.alpha * self.A / (self.beta * self.B)) ** (1 / both)
        parameters = scale * (flops / 6) ** (self.beta / both)
        return parameters, flops / 6 / parameters

    def loss(self, parameters: float, tokens: float) -> float:
        return self.E + self.A / parameters ** self.alpha + self.B / tokens ** self.beta


FITS = {"approach 3, as printed (Hoffmann 2022)": Fit(1.69, 406.4, 410.7, 0.34, 0.28),
        "approach 3, unrounded (its TeX source)": Fit(1.6933736809989528, 406.4010175194737, 410.7228269450398,
                                                      0.33917084, 0.2849083),
        "refit (Besiroglu et al. 2024)": Fit(1.81686, 482.00572, 2085.4342, 0.34781, 0.36585)}


def power_law(flops: float, parameters: float, at_flops: float, exponent: float) -> tuple[float, float]:
    found = parameters * (flops / at_flops) ** exponent
    return found, flops / 6 / found


def optima(flops: float) -> dict[str, tuple[float, float]]:
    """(N, D) that each law says is best for so many FLOPs. Approaches 1 and 2 through their tables' row for 67B."""
    laws = {"approach 1 (Hoffmann 2022, table 3)": power_law(flops, 67e9, 5.76e23, 0.50),
            "approach 2 (Hoffmann 2022, table A3)": power_law(flops, 67e9, 6.88e23, 0.49)}
    laws |= {name: fit.optimum(flops) for name, fit in FITS.items()}
    return laws | {"Kaplan et al. 2020": power_law(flops, 1.3e9, PF_DAY, 0.73)}


def critical_batch(loss: float) -> float:
    """Tokens: 2e8 L^(-1/0.21), at which steps and tokens are both twice their least (Kaplan et al. 2020, section 5.1;
    McCandlish et al. 2018)."""
    return 2e8 * loss ** (-1 / 0.21)


def ramp(final: int, seq: int) -> str:
    """A --batch-ramp of four doublings up to the final number of sequences, at the tokens where MiniMax-01 doubled, in
    proportion to the critical batch: 1, 11.4 and 68 times the first stage's 69B tokens at a last batch of 128M."""
    first = 69e9 * final * seq / 128e6
    starts = (0, first, first * 790 / 69, first * 4700 / 69)
    return ",".join(f"{max(1, final >> (3 - i))}@{start:.3g}" for i, start in enumerate(starts))


def ring_seconds(parameters: float, km: float, bytes_per_s: float, sites: int = 23, itemsize: int = 2) -> float:
    """Of an all-reduce round a ring of datacentres, km long, in both directions at once: each carries half of the
    2 (n-1)/n of all bytes that a ring sends, and the latency is one lap of light in glass, at 2e8 m/s (Epoch AI 2025:
    72T parameters, 23 sites, 4,800 km). bytes_per_s: of a link in one direction."""
    return (sites - 1) / sites * parameters * itemsize / bytes_per_s + km * 1000 / 2e8


def print_scaling(run: Run, tokens: float, price: float) -> None:
    settings, grid = run.settings, run.settings.grid
    count = costs.parameters(settings.model)
    tokens = tokens or 20 * count.active
    flops = 6 * count.active * tokens
    found = predict(run)
    gpus = grid.dp * grid.cp * grid.tp * grid.pp
    seconds = tokens / (found.tokens_per_s_per_gpu * gpus)
    print(f"{settings.model.preset}: N {count.active:,} active, D {tokens:.3g} tokens ({tokens / count.active:.1f} per "
          f"parameter): C = 6 N D = {flops:.3g} FLOPs = {flops / PF_DAY:,.1f} PF-days")
    hours = gpus * seconds / 3600
    print(f"on {gpus} x {run.machine.name}, as `step` predicts: {seconds / 86400:,.2f} days, {hours:,.0f} GPU-hours, "
          f"{hours * price:,.0f} dollars at {price} per GPU-hour")
    print(f"{'compute-optimal for these FLOPs':42s}{'N':>12s}{'D':>12s}{'D/N':>8s}{'loss':>8s}")
    for name, (parameters, data) in optima(flops).items():
        loss = f"{FITS[name].loss(parameters, data):8.3f}" if name in FITS else ""
        print(f"  {name:40s}{parameters:12.3g}{data:12.3g}{data / parameters:8.1f}{loss}")
    loss = FITS["refit (Besiroglu et al. 2024)"].loss(count.active, tokens)
    sequences = settings.batch.ramp()[-1][0]
    print(f"loss of this N and D: {loss:.3f} nats per token (refit); critical batch {critical_batch(loss):.3g} tokens "
          f"(Kaplan et al. 2020), this run's {sequences * settings.batch.seq:.3g}")
    if sequences >= 8 and sequences % (8 * grid.dp) == 0:
        print(f'a ramp in proportion to MiniMax-01\'s: --batch-ramp "{ramp(sequences, settings.batch.seq)}"')
    print("a ring of 23 datacentres, 4,800 km long, at 100 Tb/s each way: "
          f"{ring_seconds(count.total, 4800, 12.5e12):.3f} s per all-reduce in bf16")


# ---- the command line -----------------------------------------------------------------------------------------------

def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = config.Parser(prog="plan.py", usage="python plan.py COMMAND [flags of train.py] [--gpus N] [--machine "
                           f"{'|'.join(MACHINES)}|FILE]", allow_abbrev=False)
    parser.add_argument("command", choices=("params", "memory", "step", "balance", "search", "scaling", "predict",
                                            "check"))
    parser.add_argument("--gpus", type=int, default=0, help="GPUs; 0: as many as the grid's flags multiply to")
    parser.add_argument("--machine", default="h100", help="a built-in machine, or a file of bench.py probe")
    parser.add_argument("--train-tokens", type=float, default=0.0, help="scaling: tokens; 0: 20 per active parameter")
    parser.add_argument("--price", type=float, default=2.5, help="scaling: dollars per GPU-hour")
    parser.add_argument("--tables", default=published.FOLDER, help="check: a folder of published runs")
    parser.add_argument("--json", default="", help="check: write one object per run here")
    parser.add_argument("--imbalance", type=float, default=1.0, help="tokens of the fullest expert rank over the mean")
    return parser.parse_known_args(arguments)


def world_of(flags: list[str]) -> int:
    axes = config.Parser(allow_abbrev=False)
    for axis in ("dp", "cp", "tp", "pp"):
        axes.add_argument("--" + axis, type=int, default=1)
    given, _ = axes.parse_known_args(flags)
    return math.prod(max(1, value) for value in vars(given).values())


def main(arguments: list[str]) -> None:
    asked, rest = parse(config.expand(arguments))
    if asked.command == "predict":
        need(len(rest) == 1, "predict needs one file of requests, one JSON object per line")
        return predict_file(rest[0])
    if asked.command == "check":
        need(not rest, f"check: {' '.join(rest)} unknown")
        return published.print_check(asked.tables, asked.json, predict_request)
    need(asked.gpus >= 0, f"--gpus {asked.gpus}: must be above 0")
    gpus = asked.gpus or world_of(rest)
    need(asked.imbalance >= 1, f"--imbalance {asked.imbalance}: must be at least 1")
    machine = read_machine(asked.machine)
    settings = config.parse(rest, world_of(rest) if asked.command == "search" else gpus)  # search ignores its axes
    run = Run(in_16_bits(settings), machine, imbalance=asked.imbalance)
    if asked.command == "search":
        return print_search(run, gpus)
    if asked.command == "scaling":
        return print_scaling(run, asked.train_tokens, asked.price)
    dict(params=print_params, memory=print_memory, step=print_step, balance=print_balance)[asked.command](run)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        print(f"plan.py: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(1)
