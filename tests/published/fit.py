"""Fit time.Constants on the published runs of tables/, again, or without some of them.

    python -m plan.fit [--rounds 10] [--leave model|nodes]     prints the constants of plan/time.py

What is minimised is the mean over tables of |log(predicted / measured)| of step times, where a run counts at most 0.35
and errors beyond what a group should reach count more, plus what the errors that `python -m plan check` prints exceed
of their goals. Each round takes errors as linear in the logarithms of the constants, and descends along one at a time.
`--leave` fits without the playbook's runs of each model, or of each number of nodes, in turn, and without goals, which
are for all runs together; it prints the errors on those that were left out.
"""
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np

import config
from config import need, setting
from plan import predict, published, time
from plan.published import FLAGGED

WEIGHTS = {FLAGGED: 1.0, "playbook_runs, of these tp <= 8": 1.0, "llmfoundry, bf16": 0.6, "BLOOM": 0.3,
           "SC21 (Narayanan et al. 2021)": 0.15, "Korthikanti et al. 2022": 0.15, "Megatron-LM on H100": 0.2,
           "NVIDIA, dense without CP": 0.2, "NVIDIA, dense with CP": 0.4}
LIMIT = {"playbook_runs, of these tp <= 8": 0.09}  # beyond which errors count more, by default 0.2
GOALS = [(FLAGGED, 0.5, 0.04), (FLAGGED, 0.9, 0.2), ("playbook_runs, of these tp <= 8", 0.5, 0.03),
         ("playbook_runs, of these tp <= 8", 0.9, 0.1), ("llmfoundry, bf16", 0.5, 0.04), ("BLOOM", 0.5, 0.05),
         ("SC21 (Narayanan et al. 2021)", 0.5, 0.05), ("Megatron-LM on H100", 0.5, 0.08),
         ("NVIDIA, dense with CP", 0.5, 0.06)]  # group, quantile of its errors, its goal
FREE = ("ampere", "hopper", "blackwell", "passes", "fused", "logit_bytes", "launch_s", "hidden", "exchange_s",
        "fixed_s", "node", "network", "latency")
ROUNDS = 10
MOST = dict(ampere=0.98, hopper=0.98, blackwell=0.98, hidden=0.98)  # parts of what there is
START = time.CONSTANTS._replace(ampere=0.8, hopper=0.8, blackwell=0.8, passes=15.0, fused=7.0, logit_bytes=55.0,
                                launch_s=4e-3, hidden=0.7, exchange_s=5e-5, fixed_s=0.03, node=0.85, network=0.8,
                                latency=1.5)  # round numbers, so that a run that is left out has had no influence
Members = dict[str, np.ndarray]  # group -> indices of its rows


def runs() -> list[tuple[published.Row, time.Run]]:
    out = []
    for row in published.rows():
        if row.step_s and set(row.groups) & set(WEIGHTS):
            try:
                out.append((row, predict.run_of(row.request)))
            except ValueError:
                pass
    return out


def log_error(row: published.Row, run: time.Run, constants: time.Constants, simulated: bool = True) -> float:
    return math.log(time.step_seconds(run._replace(constants=constants), simulated=simulated).seconds / row.step_s)


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
            total += 2 * max(0.0, published.quantile(found, part) / goal - 0.96)
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


def fit(rows: list, rounds: int, goals: list = GOALS) -> time.Constants:
    """The constants with the smallest value after so many rounds, with three digits."""
    rows = [pair for pair in rows if set(pair[0].groups) & set(WEIGHTS)]
    members = {group: np.array([i for i, (row, _) in enumerate(rows) if group in row.groups], int)
               for group in WEIGHTS}

    def errors_of(constants: time.Constants, simulated: bool = True) -> np.ndarray:
        return np.array([log_error(row, run, constants, simulated) for row, run in rows])

    def moved(constants: time.Constants, changes: dict[str, float]) -> time.Constants:
        return constants._replace(**{name: float(f"{getattr(constants, name) * math.exp(change):.3g}")
                                     for name, change in changes.items()})

    constants, best, reach = START, (math.inf, START), 0.3
    for number in range(rounds + 1):
        errors = errors_of(constants)
        best = min(best, (value(errors, members, goals), constants), key=lambda pair: pair[0])
        print(f"round {number}: {best[0]:.4f}", file=sys.stderr)
        if number == rounds:
            return best[1]
        bounds, slopes = errors_of(constants, simulated=False), []  # pipelines are not simulated for slopes
        for name in FREE:
            beside = constants._replace(**{name: 1.01 * getattr(constants, name)})
            slopes.append((errors_of(beside, simulated=False) - bounds) / math.log(1.01))
        most = [math.log(MOST.get(name, math.inf) / getattr(constants, name)) for name in FREE]
        constants = moved(constants, dict(zip(FREE, descend(errors, slopes, members, goals, reach, most))))
        reach *= 0.75


def ratios(rows: list, constants: time.Constants) -> list[float]:
    """Of each run, the predicted over the measured step time."""
    return [math.exp(log_error(row, run, constants)) for row, run in rows]


def left_out(rows: list, by: str, rounds: int) -> Iterator[tuple[int, list, list[float]]]:
    """Yield each model (its hidden size) or number of nodes of the playbook's runs, its runs, and their ratios with
    constants that were fitted without them."""
    def key(row: published.Row) -> int:
        return row.request["hidden"] if by == "model" else row.request["gpus"] // 8

    flagged = [pair for pair in rows if FLAGGED in pair[0].groups]
    for value in sorted({key(row) for row, _ in flagged}):
        rest = [pair for pair in rows if pair[0].table != "playbook_runs" or key(pair[0]) != value]
        left = [pair for pair in flagged if key(pair[0]) == value]
        yield value, left, ratios(left, fit(rest, rounds, []))


def print_errors(title: str, found: list[float]) -> None:
    """found: predicted over measured times. The range is that of measured over predicted ones, but for a tenth of the
    runs at each end."""
    errors, shares = sorted(abs(ratio - 1) for ratio in found), sorted(1 / ratio for ratio in found)
    low, high = published.quantile(shares, 0.1), published.quantile(shares, 0.9)
    print(f"{title:44s}{len(found):5d} runs  median {median(errors):6.1%}  p90 {published.quantile(errors, 0.9):6.1%}  "
          f"four of five take {low:.2f} to {high:.2f} times what is predicted", flush=True)


@dataclass
class Flags:
    rounds: int = setting(ROUNDS, "of fitting")
    leave: str = setting("none", "fit without the runs of each in turn", ("none", "model", "nodes"))


def main() -> None:
    asked, rest = config.read_known(Flags, sys.argv[1:], "python -m plan.fit [--rounds 10] [--leave model|nodes]")
    need(not rest, f"{' '.join(rest)}: unknown")
    everything = runs()
    if asked.leave == "none":
        found = fit(everything, asked.rounds)
        print(found)
        for group in WEIGHTS:
            print_errors(group, ratios([pair for pair in everything if group in pair[0].groups], found))
    else:
        pooled = []
        for value_left, left, found in left_out(everything, asked.leave, asked.rounds):
            print_errors(f"without {'hidden' if asked.leave == 'model' else 'nodes'} {value_left}, on those", found)
            pooled += [(row, ratio) for (row, _), ratio in zip(left, found)]
        print_errors("all, each with constants fitted without it", [ratio for _, ratio in pooled])
        print_errors("of these tp <= 8", [ratio for row, ratio in pooled if row.request["tp"] <= 8])


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"plan.fit: {error}", file=sys.stderr)
        sys.exit(2)
