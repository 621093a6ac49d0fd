"""The best grid for a model, a batch and a number of GPUs, by formula: neither torch nor a GPU is needed.

    python -m plan search --preset llama-3.1-70b --gpus 256 --global-batch 1024 --seq-len 8192     the best grids
    torchrun --nproc_per_node=8 train.py --grid auto --tp 2                  the best one with --tp 2, for this machine

The search takes the three steps of the Ultra-Scale Playbook:

1. Keep the combinations of grid, micro-batch, schedule, recomputation and ZeRO level that fit in memory.
2. Keep those among them that reach the global batch.
3. Take the fastest.

A prediction of memory has an error, so a run fits with some probability. Candidates are ranked by step time divided by
this probability: a candidate that fits with probability 0.8 must be 1.25 times as fast as one that surely fits. All
candidates are first ranked by a lower bound of the time (step_time.bound_seconds). The best are then simulated.
Settings given by flags stay fixed.
"""
from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tqdm import tqdm

from core import config, rules
from core.config import Config, need
from plan import costs, step_time
from plan.machines import MACHINES, Level, Machine, card_of
from plan.step_time import Run, stage_parts
from schedules import SCHEDULES

SURE = 0.99  # a run that fits with this probability is not tried with more recomputation, which would only be slower
CHOSEN = "dp", "cp", "tp", "pp", "ep", "zero", "micro_batch", "schedule", "recompute"  # by search, unless flags do


class Candidate(NamedTuple):
    """Settings that may fit, and their predictions."""
    run: Run
    seconds: float  # per step, simulated or a lower bound
    parts: dict[str, float]  # part of a step -> its seconds
    memory: float  # bytes of the fullest rank
    fits: float  # the probability that the run fits in memory

    @property
    def rank(self) -> float:
        return self.seconds / self.fits

    def limit(self) -> str:
        """The name and share of the part that takes the most time, other than matrix products."""
        name, seconds = max(((name, seconds) for name, seconds in self.parts.items() if name != "matmul"),
                            key=lambda item: item[1])
        return f"{name} {seconds / self.seconds:.0%}"


def shown(probability: float) -> str:
    """A probability to fit, as printed. None is certain."""
    return ">0.99" if probability > SURE else f"{probability:.3f}"


def grids(settings: Config, gpus: int, given: Mapping[str, Any]) -> Iterator[dict[str, int]]:
    """Yield axis -> size for all grids of `gpus` ranks that have the `given` sizes and at least 512 tokens per context
    parallel rank. Some of them are invalid: `variants` rejects these."""
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    experts, seq = settings.model.experts, settings.batch.seq_len
    for tp in choices(given, "tp", [n for n in divisors if n <= settings.model.heads]):
        for pp in choices(given, "pp", divisors):
            for cp in choices(given, "cp", [n for n in divisors if n * 512 <= max(512, seq)]):
                dp, remainder = divmod(gpus, tp * pp * cp)
                if remainder or not dp or given.get("dp", dp) != dp:
                    continue
                ep_sizes = [n for n in divisors if experts and experts % n == 0 and dp * cp * tp % n == 0]
                for ep in choices(given, "ep", ep_sizes or [1]):
                    yield dict(tp=tp, pp=pp, cp=cp, ep=ep, dp=dp)


def choices(given: Mapping[str, Any], name: str, values: Sequence) -> Sequence:
    """The values to try for a setting: only the given one if there is one, else all of `values`."""
    return [given[name]] if name in given else values


def variants(run: Run, axes: dict[str, int], given: Mapping[str, Any], rejected: Counter) -> Iterator[Run]:
    """Yield the grid with every valid micro-batch, schedule and recomputation. Count in `rejected` why others are not
    valid."""
    base = run.settings
    model, pp = base.model, axes["pp"]
    try:
        chunks = base.grid.virtual_stages or SCHEDULES[base.grid.schedule].chunks
        base = replace(replaced(base, "grid", **axes, grid="given", virtual_stages=chunks if pp > 1 else 1),
                       ranks=math.prod(axes[axis] for axis in ("tp", "pp", "cp", "dp")))
        rules.check_grid(base)
    except ValueError as error:
        rejected[kind_of(error)] += 1
        return
    sequences = base.batch.ramp()[-1][0]
    if sequences % axes["dp"]:
        rejected["step 2: the global batch is not a multiple of dp"] += 1
        return
    per_rank = sequences // axes["dp"]
    schedules = ["1f1b", "interleaved"] if 1 < pp <= model.layers // 2 else ["1f1b"]
    for micro_batch in choices(given, "micro_batch", [n for n in (1, 2, 4, 8, 16, 32) if per_rank % n == 0]):
        for schedule in choices(given, "schedule", schedules):
            chunks = (run.settings.grid.virtual_stages or SCHEDULES[schedule].chunks) if pp > 1 else 1
            settings = replaced(replaced(base, "batch", micro_batch=micro_batch), "grid", schedule=schedule,
                                virtual_stages=chunks)
            try:
                rules.check_grid(settings)
                rules.check_batch(settings)
                if "schedule" in given:
                    rules.check_schedule(settings)
            except ValueError as error:
                rejected[kind_of(error)] += 1
                continue
            for recompute in choices(given, "recompute", costs.RECOMPUTE):
                yield run._replace(settings=replaced(settings, "precision", recompute=recompute))


def replaced(settings: Config, section: str, **values: Any) -> Config:
    """A copy of the settings with these values in one section."""
    return replace(settings, **{section: replace(getattr(settings, section), **values)})


def kind_of(error: ValueError) -> str:
    return "cannot run: " + " ".join(word for word in str(error).split(":")[0].split() if not word[0].isdigit())


def search(run: Run, gpus: int, given: Mapping[str, Any] | None = None,
           simulated: int = 40) -> tuple[list[Candidate], Counter]:
    """(candidates that fit, the best first; reason -> number of rejected settings).

    given: settings of CHOSEN that stay fixed, by name
    simulated: how many of the best candidates are simulated
    """
    rejected, found, given = Counter(), [], given or {}
    usable = run.machine.memory_bytes * run.constants.usable
    for axes in with_bar(grids(run.settings, gpus, given), "searching"):
        levels = choices(given, "zero", (0, 1, 2, 3) if axes["dp"] * axes["cp"] > 1 else (0,))
        fitting: set[tuple] = set()  # these surely fit with less recomputation
        for variant in variants(run, axes, given, rejected):
            key = variant.settings.batch.micro_batch, variant.settings.grid.schedule
            levels_left = [level for level in levels if (key, level) not in fitting]
            rejected["step 3: slower"] += len(levels) - len(levels_left)
            if not levels_left:
                continue
            stages, saved = None, step_time.activations(variant)
            if max(saved.values()) > usable:
                rejected["step 1: does not fit in memory"] += len(levels_left)
                continue
            for level in levels_left:
                candidate = variant._replace(settings=replaced(variant.settings, "grid", zero=level))
                own = sum(step_time.needed_memory(candidate, saved).values())
                needed, fits = own + run.constants.reserved, step_time.probability_of_fit(candidate, own)
                if needed > usable:
                    rejected["step 1: does not fit in memory"] += 1
                    continue
                if fits > SURE:
                    fitting.add((key, level))
                stages = stages or stage_parts(variant)
                step = step_time.step_seconds(candidate, stages, simulated=False)
                found.append(Candidate(candidate, step.seconds, step.parts, needed, fits))
    found.sort(key=lambda candidate: candidate.rank)
    best = [candidate._replace(**step_time.step_seconds(candidate.run)._asdict())
            for candidate in with_bar(found[:simulated], "simulating")]
    best.sort(key=lambda candidate: candidate.rank)
    rejected["step 3: slower"] += max(0, len(found) - 10)
    return best + found[simulated:], rejected


def with_bar(grids: Iterable, what: str) -> tqdm:
    """The grids, with a progress bar if they take longer than two seconds. With --grid auto all ranks search: the first
    one shows it."""
    return tqdm(grids, what, unit=" grids", delay=2, leave=False, disable=os.environ.get("RANK", "0") != "0")


def describe(settings: Config) -> str:
    """The settings of CHOSEN as flags of train.py."""
    grid, batch = settings.grid, settings.batch
    axes = "".join(f" --{axis} {getattr(grid, axis)}" for axis in ("dp", "cp", "tp", "pp", "ep")
                   if getattr(grid, axis) > 1 or axis == "dp")
    schedule = f" --schedule {grid.schedule}" if grid.pp > 1 and grid.schedule != "1f1b" else ""
    recompute = f" --recompute {settings.precision.recompute}" if settings.precision.recompute != "none" else ""
    return f"{axes} --zero {grid.zero} --micro-batch {batch.micro_batch}{schedule}{recompute}".strip()


def any_fits(run: Run, gpus: int, given: Mapping[str, Any]) -> bool:
    """Whether any grid fits with full recomputation and the highest ZeRO level: 3, or 1 in a pipeline."""
    usable = run.machine.memory_bytes * run.constants.usable
    for axes in grids(run.settings, gpus, given):
        level = (3 if axes["pp"] == 1 else 1) if axes["dp"] * axes["cp"] > 1 else 0
        smallest = dict(recompute="full", zero=level) | given
        for variant in variants(run, axes, smallest, Counter()):
            candidate = variant._replace(settings=replaced(variant.settings, "grid", zero=smallest["zero"]))
            if sum(step_time.needed_memory(candidate).values()) + run.constants.reserved <= usable:
                return True
    return False


def nearest(run: Run, gpus: int, given: Mapping[str, Any] | None = None) -> str:
    """Advice: how many GPUs this model needs, and which is the largest preset that fits on this many GPUs."""
    given, advice = given or {}, []
    for more in (2 * gpus, 4 * gpus, 8 * gpus, 16 * gpus, 64 * gpus, 256 * gpus):
        if any_fits(run, more, {name: value for name, value in given.items() if name != "dp"}):
            advice.append(f"use {more} ranks")
            break
    models = [rules.parse(["--preset", name]).model for name in config.PRESETS]
    models.sort(key=lambda model: costs.parameters(model).total, reverse=True)
    size = costs.parameters(run.settings.model).total
    for model in (model for model in models if costs.parameters(model).total < size):
        if any_fits(run._replace(settings=replace(run.settings, model=model)), gpus, given):
            advice.append(f"{'or' if advice else 'use'} --preset {model.preset}, the largest that fits")
            break
    return " ".join(advice) or "use more GPUs, a smaller --seq-len or a smaller model"


def why_none_fits(run: Run, gpus: int, given: Mapping[str, Any], rejected: Counter) -> str:
    top = ", ".join(f"{why}: {count}" for why, count in rejected.most_common(2) if count) or "no grid has these axes"
    state = 18 * costs.parameters(run.settings.model).total / 1e9  # bytes per parameter: see plan/memory.py
    return (f"on {gpus} x {run.machine.name} with {run.machine.memory_bytes / 1e9:.3g} GB each, of "
            f"{sum(rejected.values())} settings none fits ({top}); model state alone is {state:,.2f} GB: "
            f"{nearest(run, gpus, given)}")


# ---- train.py --grid auto -------------------------------------------------------------------------------------------

def given_by_flags(arguments: list[str], names: Sequence[str] = CHOSEN) -> dict[str, Any]:
    """Name -> value of the settings in `names` that the command line gives."""
    return {name: value for name, value in config.read(arguments).items()
            if name in names and (name, value) not in (("dp", -1), ("micro_batch", 0))}


def fill_grid(settings: Config, gpus: int, machine: Machine) -> tuple[Config, str]:
    """(the settings with the best grid that fits, why it was chosen). Raises ValueError if none fits.

    A resumed run's grid is not kept, unless flags give it."""
    rest = dict(schedule="1f1b", dp_replicate=1, virtual_stages=0)
    given = given_by_flags(settings.arguments, (*CHOSEN, *rest))
    rest |= {name: given[name] for name in rest.keys() & given.keys()}
    run = Run(replaced(settings, "grid", **rest), machine)
    found, rejected = search(run, gpus, given)
    if not found:
        raise ValueError("--grid auto: " + why_none_fits(run, gpus, given, rejected))
    best, chosen = found[0], found[0].run.settings
    values = vars(chosen.grid) | vars(chosen.batch) | vars(chosen.precision)
    flags = [word for name in dict.fromkeys((*CHOSEN, *rest))
             for word in (config.flag(name), config.written(name, values[name]))]
    reason = (f"{describe(chosen)}: of {len(found)} settings that fit on {gpus} x {machine.name}, the best by "
              f"predicted step time and probability to fit: {best.seconds:.3g} s per step, {best.memory / 1e9:.2f} GB, "
              f"fits with probability {shown(best.fits)}, limit {best.limit()}")
    if len(found) > 1:
        reason += f"; next {describe(found[1].run.settings)}, {found[1].seconds:.3g} s"
    return rules.parse([*settings.arguments, *flags, "--grid", "given"], gpus, settings.before_defaults), reason


def this_machine(ranks: int, device_name: str | None = None, memory_bytes: float = 0.0) -> Machine:
    """The Machine that this process runs on, with `ranks` ranks.

    device_name, memory_bytes: the name and memory of one of its GPUs. Without a name the ranks are on CPUs and share
        memory_bytes, by default all memory of the host.

    Raises ValueError for a GPU that is not in machines.CARDS. A CPU core is assumed to compute 30 GFLOP/s in fp32, to
    read 5 GB/s and to send 0.5 GB/s through gloo. These are low for any server, but the choice depends only on ratios.
    """
    if device_name is not None:
        need(card_of(device_name), f"--grid auto: {device_name} is an unknown GPU: ask python -m plan search --gpus N "
             f"--machine mine --peak-tflops (dense, bf16) --memory-gb {memory_bytes / 2**30:.0f}, and give its flags")
        known = MACHINES[card_of(device_name)]
        return known._replace(memory_bytes=memory_bytes, gpus_per_node=ranks,
                              levels=(known.levels[0]._replace(ranks=ranks), *known.levels[1:]))
    memory_bytes = memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = min(1.0, (os.cpu_count() or 1) / ranks)  # per rank, one at most
    flops = {"bf16": 3e10 * cores}
    levels = (Level("host", ranks, 1e-4, 5e8 * cores), Level("network", 1 << 20, 2e-4, 1e8))
    return Machine("cpu", ranks, flops, flops, memory_bytes / ranks, 5e9 * cores, levels, 5e9 * cores, 5e9 * cores)
