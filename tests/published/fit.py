"""Fit stagetime.Constants on the published runs of this folder, again, or without some of them.

    python tests/published/fit.py [--rounds 8] [--go-on] [--polish 4] [--leave model|nodes]

The objective is the mean over tables of |log(predicted / measured)| of step times, where a run counts at most 0.35 and
errors beyond what a group should reach count more. It is minimised by reweighted least squares: each round linearises
the errors in the logarithms of the constants, and takes the step, or a half, quarter, ... of it, that is better.
`--leave` fits without the playbook's runs of each model, or of each number of nodes, in turn, and prints the errors on
those that were left out. A part of the rows of large tables is fitted: the others are only predicted.
"""
import argparse
import math
import os
import sys
from collections.abc import Iterator
from statistics import median

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import estimate
import plan
import published
import stagetime
from published import FLAGGED

WEIGHTS = {FLAGGED: 1.0, "playbook_runs, of these tp <= 8": 1.0, "llmfoundry, bf16": 0.6, "BLOOM": 0.3,
           "SC21 (Narayanan et al. 2021)": 0.15, "Korthikanti et al. 2022": 0.15, "Megatron-LM on H100": 0.2,
           "NVIDIA, dense without CP": 0.2, "NVIDIA, dense with CP": 0.4}
EVERY = {FLAGGED: 2, "playbook_runs, of these tp <= 8": 2, "llmfoundry, bf16": 3, "BLOOM": 4}  # rows that are fitted
LIMIT = {"playbook_runs, of these tp <= 8": 0.09}  # beyond which errors count more, by default 0.2
GOALS = [(FLAGGED, 0.5, 0.04), (FLAGGED, 0.9, 0.2), ("playbook_runs, of these tp <= 8", 0.5, 0.03),
         ("playbook_runs, of these tp <= 8", 0.9, 0.1), ("llmfoundry, bf16", 0.5, 0.04), ("BLOOM", 0.5, 0.05),
         ("SC21 (Narayanan et al. 2021)", 0.5, 0.05), ("Megatron-LM on H100", 0.5, 0.08),
         ("NVIDIA, dense with CP", 0.5, 0.06)]  # group, quantile of its errors, its goal
FREE = ("ampere", "hopper", "blackwell", "passes", "fused", "logit_bytes", "launch_s", "hidden", "exchange_s",
        "fixed_s", "node", "network", "latency")
MOST = dict(ampere=0.98, hopper=0.98, blackwell=0.98, hidden=0.98)  # parts of what there is
START = stagetime.CONSTANTS._replace(ampere=0.8, hopper=0.8, blackwell=0.8, passes=12.0, fused=8.0, logit_bytes=40.0,
                                    launch_s=4e-3, hidden=0.8, fixed_s=0.03, node=1.0, network=0.8,
                                    latency=1.0)  # so that a run that is left out has had no influence


def runs() -> list[tuple[published.Row, stagetime.Run]]:
    out = []
    for row in published.rows():
        if row.step_s and set(row.groups) & set(WEIGHTS):
            try:
                out.append((row, plan.run_of(row.request)))
            except ValueError:
                pass
    return out


def log_error(row: published.Row, run: stagetime.Run, constants: stagetime.Constants, simulated: bool = True) -> float:
    return math.log(estimate.step_seconds(run._replace(constants=constants), simulated=simulated).seconds / row.step_s)


def cost(error: float, limit: float) -> float:
    """Of a run: an error above `limit`, but not beyond twice as much, counts 2.5 times."""
    return min(abs(error), 0.35) + 1.5 * min(max(abs(error) - limit, 0.0), limit)


def objective(rows: list, errors: list[float]) -> float:
    return sum(weight * cost(error, limit) for (_, _, weight, limit), error in zip(rows, errors))


def weighted(rows: list) -> list:
    """(row, run, weight, limit) of the rows that are fitted."""
    out = []
    for group, weight in WEIGHTS.items():
        members = [pair for pair in rows if group in pair[0].groups][::EVERY.get(group, 1)]
        out += [(*pair, weight / len(members), LIMIT.get(group, 0.2)) for pair in members]
    return out


def fit(rows: list, rounds: int, start: stagetime.Constants = START) -> stagetime.Constants:
    chosen = weighted(rows)

    def errors_of(constants: stagetime.Constants, simulated: bool = True) -> list[float]:
        return [log_error(row, run, constants, simulated) for row, run, _, _ in chosen]

    def moved(constants: stagetime.Constants, step: list[float]) -> stagetime.Constants:
        values = {name: getattr(constants, name) * math.exp(change) for name, change in zip(FREE, step)}
        return constants._replace(**{name: min(value, MOST.get(name, value)) for name, value in values.items()})

    constants, errors = start, errors_of(start)
    for _ in range(rounds):
        bounds, columns = errors_of(constants, simulated=False), []  # pipelines are not simulated for derivatives
        for i in range(len(FREE)):
            beside = errors_of(moved(constants, [0.01 * (i == j) for j in range(len(FREE))]), simulated=False)
            columns.append([(b - a) / 0.01 for a, b in zip(bounds, beside)])
        factors = torch.tensor([weight / max(abs(error), 0.02) * (abs(error) < 0.35) * (1 + 1.5 * (abs(error) > limit))
                                for (_, _, weight, limit), error in zip(chosen, errors)]).sqrt()
        matrix, target = torch.tensor(columns).T * factors[:, None], -torch.tensor(errors) * factors
        damping = 0.03 * matrix.norm(dim=0).max() * torch.eye(len(FREE))
        step = torch.linalg.lstsq(torch.cat((matrix, damping)), torch.cat((target, torch.zeros(len(FREE)))))[0]
        for part in (1.0, 0.5, 0.25, 0.1, 0.03):
            tried = moved(constants, (part * step.clamp(-0.3, 0.3)).tolist())
            found = errors_of(tried)
            if objective(chosen, found) < objective(chosen, errors):
                constants, errors = tried, found
                break
        else:
            break
    return constants


def polish(rows: list, constants: stagetime.Constants, rounds: int) -> stagetime.Constants:
    """The constants after a descent along one of them at a time on what `plan.py check` prints, relative to its goals:
    by quantiles, which least squares do not know."""
    members = {group: [pair for pair in rows if group in pair[0].groups] for group, _, _ in GOALS}

    def value(constants: stagetime.Constants) -> float:
        shares = [published.quantile(relative_errors(members[group], constants), part) / goal
                  for group, part, goal in GOALS]
        return sum(max(0.0, share - 0.97) for share in shares) + 0.03 * sum(shares)

    steps, best = dict.fromkeys(FREE, 0.03), value(constants)
    for _ in range(rounds):
        for name in FREE:
            steps[name] /= 2
            for change in (2 * steps[name], -2 * steps[name]):
                value_tried = min(getattr(constants, name) * (1 + change), MOST.get(name, math.inf))
                tried = constants._replace(**{name: value_tried})
                if (found := value(tried)) < best - 1e-4:
                    constants, best, steps[name] = tried, found, 1.3 * change
                    break
    return constants


def relative_errors(rows: list, constants: stagetime.Constants) -> list[float]:
    return sorted(abs(math.exp(log_error(row, run, constants)) - 1) for row, run in rows)


def left_out(rows: list, by: str, rounds: int, start: stagetime.Constants = START) -> Iterator[tuple[int, list[float]]]:
    """Yield each model (its hidden size) or number of nodes of the playbook's runs, and the errors of its runs with
    constants that were fitted without them."""
    def key(row: published.Row) -> int:
        return row.request["hidden"] if by == "model" else row.request["gpus"] // 8

    flagged = [pair for pair in rows if FLAGGED in pair[0].groups]
    for value in sorted({key(row) for row, _ in flagged}):
        rest = [pair for pair in rows if pair[0].table != "playbook_runs" or key(pair[0]) != value]
        yield value, relative_errors([pair for pair in flagged if key(pair[0]) == value], fit(rest, rounds, start))


def print_errors(title: str, found: list[float]) -> None:
    tail = published.quantile(found, 0.9)
    print(f"{title:44s}{len(found):5d} runs  median {median(found):6.1%}  p90 {tail:6.1%}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--leave", choices=("model", "nodes"))
    parser.add_argument("--polish", type=int, default=0, help="rounds of descent on the goals")
    parser.add_argument("--go-on", action="store_true", help="start from the constants of stagetime.py")
    asked = parser.parse_args()
    everything, first = runs(), stagetime.CONSTANTS if asked.go_on else START
    if not asked.leave:
        found = polish(everything, fit(everything, asked.rounds, first), asked.polish)
        print(found)
        for group in WEIGHTS:
            print_errors(group, relative_errors([pair for pair in everything if group in pair[0].groups], found))
    else:
        pooled = []
        for value, found in left_out(everything, asked.leave, asked.rounds, first):
            print_errors(f"without {'hidden' if asked.leave == 'model' else 'nodes'} {value}, on those", found)
            pooled += found
        print_errors("all, each with constants fitted without it", sorted(pooled))
