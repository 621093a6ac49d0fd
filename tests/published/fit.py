"""Fit stagetime.Constants on the published runs of this folder, again, or without some of them.

    python tests/published/fit.py [--rounds 8] [--leave model|nodes]

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
FREE = ("ampere", "hopper", "blackwell", "passes", "fused", "logit_bytes", "launch_s", "hidden", "tp_hidden", "fixed_s",
        "node", "network", "latency")
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


def log_error(row: published.Row, run: stagetime.Run, constants: stagetime.Constants) -> float:
    return math.log(estimate.step_seconds(run._replace(constants=constants)).seconds / row.step_s)


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

    def errors_of(constants: stagetime.Constants) -> list[float]:
        return [log_error(row, run, constants) for row, run, _, _ in chosen]

    def moved(constants: stagetime.Constants, step: list[float]) -> stagetime.Constants:
        values = {name: getattr(constants, name) * math.exp(change) for name, change in zip(FREE, step)}
        return constants._replace(**{name: min(value, 0.99) if "hidden" in name else value
                                     for name, value in values.items()})

    constants, errors = start, errors_of(start)
    for _ in range(rounds):
        columns = [[(b - a) / 0.01 for a, b in zip(errors, errors_of(moved(constants, [0.01 * (i == j) for j in
                                                                                      range(len(FREE))])))]
                   for i in range(len(FREE))]
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


def print_errors(title: str, rows: list, constants: stagetime.Constants) -> None:
    found = sorted(abs(math.exp(log_error(row, run, constants)) - 1) for row, run in rows)
    if found:
        tail = published.quantile(found, 0.9)
        print(f"{title:44s}{len(found):5d} runs  median {median(found):6.1%}  p90 {tail:6.1%}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--leave", choices=("model", "nodes"))
    parser.add_argument("--go-on", action="store_true", help="start from the constants of stagetime.py")
    asked = parser.parse_args()
    everything, first = runs(), stagetime.CONSTANTS if asked.go_on else START
    if not asked.leave:
        found = fit(everything, asked.rounds, first)
        print(found)
        for group in WEIGHTS:
            print_errors(group, [pair for pair in everything if group in pair[0].groups], found)
    else:
        def key(row: published.Row) -> int:
            return row.request["hidden"] if asked.leave == "model" else row.request["gpus"] // 8

        flagged = [pair for pair in everything if FLAGGED in pair[0].groups]
        for value in sorted({key(row) for row, _ in flagged}):
            rest = [pair for pair in everything if pair[0].table != "playbook_runs" or key(pair[0]) != value]
            found = fit(rest, asked.rounds, first)
            print_errors(f"without {'hidden' if asked.leave == 'model' else 'nodes'} {value}, on those",
                         [pair for pair in flagged if key(pair[0]) == value], found)
