"""Requests: a run as an object of JSON, and what the plan predicts of it.

    {"preset": "llama-3.1-8b", "tp": 2, "zero": 1, "seq": 8192, "global_batch": 64, "gpus": 64, "machine": "h100"}

A request has settings by name, and besides them machine; gpus, by default as many as its grid has; kernels, an object
with fields of plan.time.Kernels. Published runs are stored as requests (plan/published.py).
"""
from __future__ import annotations

import copy
import math
from typing import NamedTuple

import config
from config import Config, need
from plan import costs, search, time
from plan.machines import read_machine
from plan.time import Kernels, Run
from run import start

KERNELS = {"attention": ("standard", *time.ATTENTION_FRACTION), "division": ("balanced", "any", "cumulative"),
           "tp_overlap": ("none", "backward", "all"),
           "launch": ("ours", "fitted", "free")}  # what fields of Kernels may be


def to_flags(request: dict) -> list[str]:
    """A request's settings as flags: {"tp": 2, "tied": False} -> ["--tp", "2", "--no-tied"]."""
    flags = []
    for name, value in request.items():
        flag = config.flag(name)
        if value is True:
            flags.append(flag)
        elif value is False:
            flags.append("--no-" + flag[2:])
        elif value is not None:
            flags += [flag, str(value)]
    return flags


def run_of(request: dict) -> Run:
    """What a request asks for. Raises ValueError for what cannot run. Keys: settings by name; machine; gpus, by default
    as many as the grid has; kernels, a dict of fields of Kernels."""
    asked = {name.replace("-", "_"): value for name, value in request.items()}
    machine = read_machine(asked.pop("machine", "h100"))
    gpus = int(asked.pop("gpus", 0)) or math.prod(max(1, int(asked.get(axis, 1))) for axis in ("dp", "cp", "tp", "pp"))
    given = asked.pop("kernels", None) or {}
    need(isinstance(given, dict) and set(given) <= set(Kernels._fields),
         f"kernels {given}: write an object with fields of {', '.join(Kernels._fields)}")
    kernels = Kernels(**given)
    for name, known in KERNELS.items():
        value = getattr(kernels, name)
        need(value in known, f"kernels: {name} {value}: use one of {', '.join(known)}")
    layers = int(asked.get("layers") or config.PRESETS.get(asked.get("preset", "tiny"), {}).get("layers", 4))
    if kernels.division != "balanced":  # other codes' stages may have the embedding, the norm or the head alone
        stages = int(asked.get("pp", 1)) * max(1, int(asked.get("chunks") or 1))
        need(stages <= layers + 4, f"--pp {asked.get('pp')}: {stages} stages of {layers} layers and four parts besides")
        asked["layers"] = max(layers, stages)
    settings = start.parse(to_flags(asked), gpus)
    need(settings.grid.grid == "given", "--grid auto: give a grid, such as python -m plan search finds")
    settings.model.layers = layers if "layers" in asked else settings.model.layers
    costs.stages_of(settings, kernels.division)  # raises ValueError for stages that cannot be
    return Run(in_16_bits(settings), machine, kernels)


def in_16_bits(settings: Config) -> Config:
    """The settings with their dtype decided. Raises ValueError for one that has no times here."""
    if settings.precision.dtype == "auto":
        settings.precision.dtype = "bf16"
    dtype = settings.precision.dtype
    need(dtype in ("bf16", "fp16"), f"--dtype {dtype}: times are known in bf16 and fp16, use one of them, or auto")
    return settings


def changed(run: Run, section: str, **values) -> Run | None:
    """The run with these settings of a section changed; None if that cannot run."""
    settings = search.replaced(copy.deepcopy(run.settings), section, **values)
    grid = settings.grid
    try:
        config.complete(settings, grid.dp * grid.cp * grid.tp * grid.pp)
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
    seconds = time.step_seconds(run).seconds
    gpus = grid.dp * grid.cp * grid.tp * grid.pp
    rate = settings.batch.ramp()[-1][0] * settings.batch.seq / seconds / gpus
    share = {name: flops * rate / run.machine.peak() for name, flops in costs.flops_by_convention(settings).items()}
    needed = sum(time.needed_memory(run).values())
    return Prediction(seconds, rate, **share, memory_gb=(needed + run.constants.reserved) / 1e9,
                      fits=time.probability_of_fit(run, needed))


def predict_request(request: dict) -> dict[str, float]:
    return predict(run_of(request))._asdict()
