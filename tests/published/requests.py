"""A published run as an object of JSON, and the plan.step_time.Run that it describes.

    {"preset": "llama-3.1-8b", "tp": 2, "zero": 1, "seq_len": 8192, "global_batch": 64, "gpus": 64, "machine": "h100",
     "code": {"attention_kernel": "flash3", "launch": "free"}}

A request is one of plan.step_time.run_of, with a code: fields of codes.Other.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from core import config
from core.config import need
from plan import step_time
from plan.step_time import Run

from .codes import CHOICES, Other

FIELDS = [field.name for field in fields(Other) if field.name != "constants"]


def run_of(request: Mapping[str, Any]) -> Run:
    """What a request asks for. Raises ValueError for what cannot run."""
    asked = dict(request)
    given = asked.pop("code", None) or {}
    need(isinstance(given, dict) and set(given) <= set(FIELDS),
         f"code {given}: write an object with fields of {', '.join(FIELDS)}")
    code = Other(**given)
    for name, known in CHOICES.items():
        value = getattr(code, name)
        need(value in known, f"code: {name} {value}: use one of {', '.join(known)}")
    layers = int(asked.get("layers") or config.PRESETS.get(asked.get("preset", "tiny"), {}).get("layers", 4))
    if code.division != "balanced":  # other codes' stages may have the embedding, the norm or the head alone
        stages = int(asked.get("pp", 1)) * max(1, int(asked.get("virtual_stages") or 1))
        need(stages <= layers + 4, f"--pp {asked.get('pp')}: {stages} stages of {layers} layers and four parts besides")
        asked["layers"] = max(layers, stages)  # or the command line refuses them
    run = step_time.run_of(asked, code)
    run.settings.model.layers = layers
    code.stages(run.settings)  # raises ValueError for stages that cannot be
    return run
