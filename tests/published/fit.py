"""Fit constants on the published runs of tables/, on all of them and without each table in turn.

What is minimised is the mean over groups of |log(predicted / measured)| of step times, where a run counts at most 0.35
and errors beyond what a group should reach count more, plus what the errors of a group exceed of its goal. Each round
takes errors as linear in the logarithms of the constants, and descends along one constant at a time. What is fitted
without a table has no goals, because they are for all runs together.
"""
from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from plan import step_time
from plan.step_time import Run

from . import runs
from .codes import Constants, with_constants
from .requests import run_of
from .runs import IN_FIT, Row

WEIGHTS = {IN_FIT: 1.0, "playbook, in the fit, tp <= 8": 1.0, "llm-foundry, bf16": 0.6, "BLOOM": 0.3,
           "SC21 (Narayanan et al. 2021)": 0.15, "Korthikanti et al. 2022": 0.15, "Megatron-LM on H100": 0.2,
           "NVIDIA, dense without CP": 0.2, "NVIDIA, dense with CP": 0.4}
LIMIT = {"playbook, in the fit, tp <= 8": 0.09}  # beyond which errors count more, by default 0.2
GOALS = [(IN_FIT, 0.5, 0.04), (IN_FIT, 0.9, 0.2), ("playbook, in the fit, tp <= 8", 0.5, 0.03),
         ("playbook, in the fit, tp <= 8", 0.9, 0.1), ("llm-foundry, bf16", 0.5, 0.04), ("BLOOM", 0.5, 0.05),
         ("SC21 (Narayanan et al. 2021)", 0.5, 0.05), ("Megatron-LM on H100", 0.5, 0.08),
         ("NVIDIA, dense with CP", 0.5, 0.06)]  # group, quantile of its errors, its goal
# Round numbers to start from, so that a run that is left out has had no influence. The order is that of the descent.
START = dict(ampere=0.8, hopper=0.8, blackwell=0.8, unfused_passes=15.0, passes=7.0, logit_bytes=55.0, launch_s=4e-3,
             hidden=0.7, exchange_s=5e-5, fixed_s=0.03, node=0.85, network=0.8, latency=1.5)
MOST = dict(ampere=0.98, hopper=0.98, blackwell=0.98, hidden=0.98)  # parts of what there is
ROUNDS = 10
Values = dict[str, float]  # the constants that are fitted, by name
Members = dict[str, np.ndarray]  # group -> indices of its rows
Pair = tuple[Row, Run]


def measured() -> list[Pair]:
    """The runs that are fitted."""
    out = []
    for row in runs.rows():
        if row.step_s and set(row.groups) & set(WEIGHTS):
            try:
                out.append((row, run_of(row.request)))
            except ValueError:
                pass
    return out


def shipped() -> Values:
    """The constants of plan/step_time.py and codes.py."""
    both = step_time.CONSTANTS._asdict() | Constants()._asdict()
    return {name: both[name] for name in START}


def log_error(row: Row, run: Run, values: Values, simulated: bool = True) -> float:
    return math.log(step_time.step_seconds(with_constants(run, values), simulated=simulated).seconds / row.step_s)


def value(errors: np.ndarray, members: Members, goals: list) -> float:
    """What is minimised. An error above a group's limit, but not beyond twice as much, counts 2.5 times."""
    total = 0.0
    for group, weight in WEIGHTS.items():
        found, limit = np.abs(errors[members[group]]), LIMIT.get(group, 0.2)
        costs = np.minimum(found, 0.35) + 1.5 * np.minimum(np.maximum(found - limit, 0.0), limit)
        total += weight * costs.mean() if len(found) else 0.0
    for group, part, goal in goals:
        if len(members[group]):
            found = np.sort(np.abs(np.expm1(errors[members[group]])))
            total += 2 * max(0.0, found[min(len(found) - 1, int(part * len(found)))] / goal - 0.96)
    return total


def descend(errors: np.ndarray, slopes: list, members: Members, goals: list, reach: float, most: list) -> list[float]:
    """The change of each logarithm, at most `reach` and its `most`, with the smallest value, along one at a time."""
    changes, sizes, best = [0.0] * len(slopes), [reach / 3] * len(slopes), value(errors, members, goals)
    while max(sizes) > 5e-4:
        for i, slope in enumerate(slopes):
            for size in (sizes[i], -sizes[i]):
                changed = min(max(changes[i] + size, -reach), reach, most[i])
                tried = errors + (changed - changes[i]) * slope
                if (found := value(tried, members, goals)) < best - 1e-6:
                    errors, best, changes[i] = tried, found, changed
                    break
            else:
                sizes[i] *= 0.6
    return changes


def fit(pairs: list[Pair], rounds: int = ROUNDS, goals: list = GOALS) -> Values:
    """The constants with the smallest value after so many rounds, with three digits."""
    members = {group: np.array([i for i, (row, _) in enumerate(pairs) if group in row.groups], int)
               for group in WEIGHTS}

    def errors_of(values: Values, simulated: bool = True) -> np.ndarray:
        return np.array([log_error(row, run, values, simulated) for row, run in pairs])

    values, best, reach = START, (math.inf, START), 0.3
    for number in range(rounds + 1):
        errors = errors_of(values)
        best = min(best, (value(errors, members, goals), values), key=lambda pair: pair[0])
        print(f"round {number}: {best[0]:.4f}", file=sys.stderr)
        if number == rounds:
            return best[1]
        bounds, slopes = errors_of(values, simulated=False), []  # pipelines are not simulated for slopes
        for name in START:
            beside = values | {name: 1.01 * values[name]}
            slopes.append((errors_of(beside, simulated=False) - bounds) / math.log(1.01))
        most = [math.log(MOST.get(name, math.inf) / values[name]) for name in START]
        changes = dict(zip(START, descend(errors, slopes, members, goals, reach, most)))
        values = {name: float(f"{values[name] * math.exp(change):.3g}") for name, change in changes.items()}
        reach *= 0.75


def left_out(pairs: list[Pair], key: Callable[[Row], Any], rounds: int = ROUNDS) -> Iterator[tuple[Any, Values]]:
    """Yield each value of `key` and the constants that are fitted without the runs that have it; None has no turn."""
    for one in sorted({key(row) for row, _ in pairs} - {None}):
        yield one, fit([pair for pair in pairs if key(pair[0]) != one], rounds, goals=[])


def write(rounds: int = ROUNDS) -> None:
    """Fit, print the constants beside the ones in use, and write left_out.json."""
    pairs = measured()
    found, used = fit(pairs, rounds), shipped()
    print("constants of plan/step_time.py and codes.py, as fitted now: as they are")
    for name in START:
        print(f"    {name:14s} {found[name]:10.3g} {used[name]:10.3g}")
    without = dict(left_out(pairs, lambda row: row.table, rounds))
    lines = [f"{json.dumps(name)}: {json.dumps(values)}" for name, values in without.items()]
    runs.LEFT_OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"written: {runs.LEFT_OUT}")
