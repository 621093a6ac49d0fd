"""Published runs, their kinds, and how far predictions are off.

A table, tables/NAME.json, has the sources of its runs, how its fields were read (`about`), and its runs: the settings
that are the `same` in all, and `columns` of `rows`, where the column `kind` is the place of a row's kind in `kinds`:

    groups      titles under which its errors are reported
    code        what the code of the run did: fields of codes.Other, as its authors describe it
    read_off    which of these labels were read off outcomes instead: {"times": [...], "memory": [...]}

Labels that were read off outcomes. They are the playbook's. Its runs are of several versions of nanotron, which the
source does not tell apart. From their times it was concluded that pipelines hide no tensor parallel exchange
(`tp_overlap`), and which pipelines are in the fit (`the choice of runs`). From their memory it was concluded how many
gathered inputs a version saves (`gathered`). Errors of such runs say how well the formulas can be made to fit, not how
well they predict. So no run whose times (or memory) gave a label is in a figure of times (or memory) that is called
held out.

A run of the playbook is in the fit if it ran on at most 32 nodes and either has no pipeline, or has a pipeline that
kept up: bubble aside, it made at least 60% of the tokens per second of the best run without a pipeline of the same
model, tp and micro-batch. On 64 nodes nearly equal runs differ 3 to 6 times.

Held out: predicted with constants that were fitted without any run of the same table, that is without that code and
that cluster. left_out.json has these constants; `python -m tests.published fit` writes it.
"""
from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tqdm import tqdm

from core.config import need
from plan import step_time
from plan.printing import table

from .codes import with_constants
from .requests import run_of

FOLDER = Path(__file__).parent / "tables"
LEFT_OUT = Path(__file__).parent / "left_out.json"
IN_FIT, FAILED = "playbook, in the fit", "playbook, failed"


class Row(NamedTuple):
    """A published run. read_off: see above. None where nothing is known."""
    table: str
    number: int
    groups: list[str]
    request: dict[str, Any]
    read_off: Mapping[str, list[str]] = {}
    step_s: float | None = None
    memory_gb: float | None = None
    fits: bool | None = None


def rows(folder: str | Path = FOLDER) -> Iterator[Row]:
    """The runs of all tables of a folder. Raises ValueError if it has none, or if a file cannot be read."""
    paths = sorted(Path(folder).glob("*.json"))
    need(paths != [], f"--tables {folder}: has no tables, NAME.json")
    for path in paths:
        try:
            made = json.loads(path.read_text())
            for row in made["rows"]:
                values = dict(zip(made["columns"], row, strict=True))
                kind = made["kinds"][values.pop("kind")]
                number, *measured = (values.pop(column) for column in ("row", "step_s", "memory_gb", "fits"))
                request = made["same"] | values | dict(code=kind["code"])
                yield Row(path.stem, number, kind["groups"], request, kind.get("read_off", {}), *measured)
        except (OSError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: cannot be read: {type(error).__name__} {error}") from None


# ---- predictions beside them ----------------------------------------------------------------------------------------

class Found(NamedTuple):
    """A run and what is predicted of it: with the constants of plan/step_time.py, which most runs helped to fit, and
    the step held out; None for what is not known or may not be called so."""
    row: Row
    kind: str = ""  # see step_time.kind_of
    step_s: float | None = None
    held_out_s: float | None = None
    memory_gb: float | None = None
    fits: float = 0.0
    refused: str = ""  # why the run cannot be predicted; it is then predicted not to run


def predict(row: Row, left_out: Mapping[str, Mapping[str, float]]) -> Found:
    """left_out: table -> constants that were fitted without it, by name."""
    try:
        run = run_of(row.request)
    except ValueError as error:
        return Found(row, refused=str(error))
    found, held_out = step_time.predict(run), None
    if row.step_s and "times" not in row.read_off and row.table in left_out:
        held_out = step_time.step_seconds(with_constants(run, left_out[row.table])).seconds
    return Found(row, step_time.kind_of(run), found.step_s, held_out, found.memory_gb, found.fits)


def read_left_out() -> dict[str, dict[str, float]]:
    return json.loads(LEFT_OUT.read_text())


def ratios(found: Iterable[Found], predicted: str, measured: str = "step_s") -> list[float]:
    """Predicted over measured, of the runs of which both are known."""
    pairs = ((getattr(one, predicted), getattr(one.row, measured)) for one in found)
    return [guess / truth for guess, truth in pairs if guess and truth]


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def summary(found: list[float]) -> dict[str, float]:
    """Of ratios: their number, the median and the 90th percentile of the error, and between which factors of what is
    predicted four of five runs lie, a tenth being below and a tenth above."""
    errors, shares = [abs(ratio - 1) for ratio in found], [1 / ratio for ratio in found]
    return dict(runs=len(found), median=round(median(errors), 3), p90=round(quantile(errors, 0.9), 3),
                low=round(quantile(shares, 0.1), 2), high=round(quantile(shares, 0.9), 2))


def held_out(found: Iterable[Found]) -> dict[str, Any]:
    """What plan/held_out.json has: of each kind of run the errors of steps that were held out, by sources, and how many
    runs more have labels that were read off their times; and the errors of memory that was held out."""
    kinds: dict[str, list[Found]] = {}
    found = list(found)
    for one in found:
        if one.row.step_s and one.step_s:
            kinds.setdefault(one.kind, []).append(one)
    steps = {}
    for kind, members in sorted(kinds.items()):
        known = [one for one in members if one.held_out_s]
        steps[kind] = summary(ratios(known, "held_out_s")) if known else dict(runs=0)
        steps[kind] |= dict(sources=sorted({one.row.table for one in known}),
                            read_off_times=sum("times" in one.row.read_off for one in members))
    memory = [one for one in found if one.row.memory_gb and "memory" not in one.row.read_off]
    return dict(steps=steps, memory=summary(ratios(memory, "memory_gb", "memory_gb"))
                | dict(sources=sorted({one.row.table for one in memory})))


def proposals_close(found: Iterable[Found]) -> dict[str, float]:
    """In what part of the playbook's (model, nodes) groups the best of three proposals is within 5% of the best run:
    proposals by predicted step time, and by the rule "smallest tp x pp, then largest micro-batch"; of the runs, in both
    cases, that are predicted to fit. A proposal that failed is worth nothing."""
    groups: dict[tuple, list[Found]] = {}
    for one in found:
        request = one.row.request
        if {IN_FIT, FAILED} & set(one.row.groups) and one.fits >= 0.5 and request["gpus"] <= 256:
            groups.setdefault((request["hidden"], request["gpus"]), []).append(one)
    orders: dict[str, Callable[[Found], Any]] = {
        "predicted": lambda one: one.step_s,
        "rule": lambda one: (one.row.request["tp"] * one.row.request["pp"], -one.row.request["micro_batch"])}
    close = Counter()
    counted = [members for members in groups.values() if any(one.row.step_s for one in members)]
    for members in counted:
        best = min(one.row.step_s for one in members if one.row.step_s)
        for name, order in orders.items():
            first = sorted(members, key=order)[:3]
            close[name] += min(one.row.step_s or math.inf for one in first) <= 1.05 * best
    return {name: close[name] / len(counted) for name in orders} if counted else {}


# ---- what is printed ------------------------------------------------------------------------------------------------

def error_cells(found: list[float]) -> tuple[str, ...]:
    """Number, median and 90th percentile of the errors; empty without runs."""
    if not found:
        return "", "", ""
    of = summary(found)
    return f"{of['runs']}", f"{of['median']:.1%}", f"{of['p90']:.1%}"


def print_check(folder: str | Path = FOLDER) -> None:
    """Errors of step times by kind of run and by source, of memory, of what fits; and why runs are refused."""
    left_out = read_left_out()
    found = [predict(row, left_out) for row in tqdm([*rows(folder)], desc="predicting", unit="run", delay=2)]
    ran = [one for one in found if one.row.step_s and one.step_s]
    print("Errors of step times. Fitted: with the constants of plan/step_time.py, which most of these runs helped to "
          "fit.\nHeld out: with constants fitted without the run's source, but for runs whose labels were read off "
          "times.")
    titles = {"by kind of run": lambda one: [one.kind], "by source": lambda one: one.row.groups}
    for title, names_of in titles.items():
        groups: dict[str, list[Found]] = {}
        for one in ran:
            for name in names_of(one):
                groups.setdefault(name, []).append(one)
        lines = [(title, "fitted: runs", "median", "p90", "held out: runs", "median", "p90",
                  "four of five took, of what was predicted")]
        for name, members in sorted(groups.items()):
            out = ratios(members, "held_out_s")
            of = summary(out) if out else {}
            lines.append((name, *error_cells(ratios(members, "step_s")), *error_cells(out),
                          f"{of['low']:.2f} to {of['high']:.2f}" if of else "none: labels were read off their times"))
        print(table(lines, "<>>>>>><"))
    print_memory(found)
    refused = Counter(one.refused for one in found if one.refused)
    for why, count in refused.most_common():
        print(f"refused, {count} runs: {why}")


def print_memory(found: list[Found]) -> None:
    lines = [("memory", "runs", "median", "p90")]
    for title, read_off in ("held out", False), ("chosen on these runs, labels read off them", True):
        lines.append((title, *error_cells(ratios([one for one in found if ("memory" in one.row.read_off) == read_off],
                                                 "memory_gb", "memory_gb"))))
    print(table(lines, "<>>>"))
    for word, ran in (("predicted to fit, of those that ran", True), ("predicted not to, of those that failed", False)):
        there = [one for one in found if one.row.table == "playbook_runs" and one.row.fits is ran]
        if there:
            right = sum((one.fits >= 0.5) is ran for one in there) / len(there)
            print(f"playbook, {len(there)} runs: {right:.1%} {word} (labels read off memory)")
    if close := proposals_close(found):
        print(f"playbook: the best of three proposals is within 5% of the best run in {close['predicted']:.0%} of "
              f"(model, nodes); by the rule smallest tp x pp, largest micro-batch in {close['rule']:.0%}")
