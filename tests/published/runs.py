"""Published runs, as requests that plan/ can predict (plan/predict.py), and how far its predictions are off.

A table, NAME.json in plan/tables/ or any other folder, has where its runs were published, how its fields were read
(about), and its runs: the settings that are the `same` in all, and `columns` of `rows`, where a kind is a row's groups
and what the code of the run does (plan.time.Kernels), as its authors describe it. Nothing here is fitted.
"""
from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from config import need
from run.start import table

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tables")
FLAGGED = "playbook_runs, flagged, <= 32 nodes"


# What `python -m plan.fit --leave model` (or nodes) prints of flagged runs that the constants have not seen
# (2026-11-26): median and 90th percentile of step times' errors; measured over predicted times, but for a tenth at each
# end.
LEFT_OUT = {"model": (0.036, 0.190, 0.94, 1.23), "model, of these tp <= 8": (0.029, 0.133, 0.95, 1.11),
            "nodes": (0.028, 0.195, 0.95, 1.24)}


class Row(NamedTuple):
    """A published run. groups: under which titles its errors are reported. None where nothing is known."""
    table: str
    number: int
    groups: list[str]
    request: dict[str, Any]
    step_s: float | None = None
    memory_gb: float | None = None
    fits: bool | None = None


GOALS = {FLAGGED: "step 4 / 20%, memory 5 / 15%",
         "playbook_runs, of these tp <= 8": "step 3 / 10%", "SC21 (Narayanan et al. 2021)": "step 5%",
         "Megatron-LM on H100": "step 8%", "BLOOM": "step 5%", "llmfoundry, bf16": "step 4%",
         "NVIDIA, dense with CP": "step 6%"}


def rows(folder: str = FOLDER) -> Iterator[Row]:
    """The runs of all tables of a folder. Raises ValueError if it has none, or if a file cannot be read."""
    names = sorted(name for name in os.listdir(folder) if name.endswith(".json")) if os.path.isdir(folder) else []
    need(names != [], f"--tables {folder}: has no tables, NAME.json")
    for name in names:
        path = os.path.join(folder, name)
        try:
            with open(path) as file:
                table = json.load(file)
            for row in table["rows"]:
                values = dict(zip(table["columns"], row, strict=True))
                kind = table["kinds"][values.pop("kind")]
                number, *measured = (values.pop(column) for column in ("row", "step_s", "memory_gb", "fits"))
                request = table["same"] | values | dict(kernels=kind["kernels"])
                yield Row(name.removesuffix(".json"), number, kind["groups"], request, *measured)
        except (OSError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: cannot be read: {type(error).__name__} {error}") from None


# ---- predictions beside them ----------------------------------------------------------------------------------------

Predict = Callable[[dict], Mapping[str, float]]  # a request -> fields of plan.predict.Prediction; ValueError if refused


def check_rows(rows: list[Row], predict: Predict) -> list[dict]:
    """One object per published run: what was measured and what is predicted; None where nothing is known. A run that
    cannot be predicted is predicted not to run."""
    objects = []
    for row in rows:
        request = row.request
        try:
            found = predict(request)
        except ValueError as error:
            objects.append(dict(table=row.table, row=row.number, groups=row.groups, refused=str(error),
                                measured=dict(fits=row.fits), predicted=dict(fits=0.0)))
            continue
        rate = request["global_batch"] * request["seq"] / row.step_s / request["gpus"] if row.step_s else None
        measured = dict(step_s=row.step_s, tokens_per_s_per_gpu=rate, memory_gb=row.memory_gb, fits=row.fits)
        predicted = {name: found[name] for name in measured}
        objects.append(dict(table=row.table, row=row.number, groups=row.groups, measured=measured, predicted=predicted))
    return objects


def errors(objects: list[dict], name: str) -> list[float]:
    return sorted(abs(row["predicted"][name] / row["measured"][name] - 1) for row in objects
                  if row["measured"].get(name) and name in row["predicted"])


def quantile(values: list[float], part: float) -> float:
    return values[min(len(values) - 1, int(part * len(values)))]


def proposals_close(runs: list[Row], objects: list[dict]) -> dict[str, float]:
    """In what part of the playbook's (model, nodes) groups the best of three proposals is within 5% of the best run:
    proposals by predicted step time, and by the rule "smallest tp x pp, then largest micro-batch"; of those, in both
    cases, that are predicted to fit. A proposal that failed is worth nothing."""
    groups: dict[tuple, list[tuple[Row, dict]]] = {}
    for row, found in zip(runs, objects):
        if any(FLAGGED in group or group.endswith("failed") for group in row.groups):
            if found["predicted"]["fits"] >= 0.5 and row.request["gpus"] <= 256:
                groups.setdefault((row.request["hidden"], row.request["gpus"]), []).append((row, found))
    orders = {"predicted": lambda row, found: found["predicted"]["step_s"],
              "rule": lambda row, found: (row.request["tp"] * row.request["pp"], -row.request["micro_batch"])}
    close = Counter()
    counted = [members for members in groups.values() if any(row.step_s for row, _ in members)]
    for members in counted:
        best = min(row.step_s for row, _ in members if row.step_s)
        for name, order in orders.items():
            first = sorted(members, key=lambda pair, order=order: order(*pair))[:3]
            close[name] += min((row.step_s or math.inf for row, _ in first)) <= 1.05 * best
    return {name: close[name] / len(counted) for name in orders} if counted else {}


def print_check(folder: str, predict: Predict) -> None:
    """The table of errors, with goals."""
    runs = list(rows(folder))
    objects = check_rows(runs, predict)
    groups: dict[str, list[dict]] = {}
    for row in objects:
        for group in row["groups"]:
            groups.setdefault(group, []).append(row)
    lines = [("published runs", "rows", "step: median", "p90", "memory: median", "p90", "goal")]
    for group, members in groups.items():
        found = [errors(members, name) for name in ("step_s", "memory_gb")]
        lines.append((group, len(members), *(f"{quantile(values, part):.1%}" if values else "" for values in found
                                             for part in (0.5, 0.9)), GOALS.get(group, "reported")))
    print(table(lines, "<>>>>><"))
    print("constants are fitted on these runs; step times of flagged ones without each in turn: "
          + "; ".join(f"{what}: {middle:.1%}, p90 {tail:.1%}" for what, (middle, tail, *_) in LEFT_OUT.items()))
    for word, ran in (("P(fit | ran)", True), ("P(no fit | failed)", False)):
        there = [row for row in objects if row["table"] == "playbook_runs" and row["measured"]["fits"] is ran]
        if there:
            right = sum((row["predicted"]["fits"] >= 0.5) is ran for row in there) / len(there)
            print(f"{word:42s}{len(there):6d}{right:14.1%}  goal {'99' if ran else '88'}%")
    if close := proposals_close(runs, objects):
        print(f"search: best of three proposals within 5% of the best run in {close['predicted']:.0%} of (model, "
              f"nodes); by the rule smallest tp x pp, largest micro-batch in {close['rule']:.0%}  goal 90%")
    refused = Counter(row["refused"].split(":")[0] for row in objects if "refused" in row)
    for why, count in refused.most_common(5):
        print(f"refused, {count} rows: {why}")
