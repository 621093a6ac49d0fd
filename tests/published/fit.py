"""Fit machines.Constants on the published runs of this folder, again, or without some of them.

    python tests/published/fit.py [--seconds 150] [--leave model|nodes] [--seed 0]

The objective is the mean over tables of |log(predicted / measured)| of step times, where a run counts at most 0.35 and
large errors count more; the search tries random changes of one to three constants and keeps what is better. `--leave`
fits without the playbook's runs of each model, or of each number of nodes, in turn, and prints the errors on those that
were left out. Half of the playbook's rows and a third of llmfoundry's are fitted: the others are only predicted.
"""
import argparse
import math
import os
import random
import sys
import time
from statistics import median

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import machines
import plan
import published
from published import FLAGGED

WEIGHTS = {FLAGGED: 1.0, "playbook_runs, of these tp <= 8": 1.0, "llmfoundry, bf16": 0.6, "BLOOM": 0.2,
           "SC21 (Narayanan et al. 2021)": 0.15, "Korthikanti et al. 2022": 0.15, "Megatron-LM on H100": 0.15,
           "NVIDIA, dense without CP": 0.2, "NVIDIA, dense with CP": 0.3}
EVERY = {FLAGGED: 2, "playbook_runs, of these tp <= 8": 2, "llmfoundry, bf16": 3, "BLOOM": 4}  # rows that are fitted
FREE = ("ampere", "hopper", "blackwell", "passes", "fused", "logit_bytes", "launch_s", "hidden", "tp_hidden", "fixed_s",
        "node", "network", "data", "latency")
START = machines.CONSTANTS._replace(ampere=0.8, hopper=0.8, blackwell=0.8, passes=12.0, fused=8.0, logit_bytes=40.0,
                                    launch_s=4e-3, hidden=0.8, fixed_s=0.03, node=1.0, network=0.8, data=0.6,
                                    latency=1.0)  # so that a run that is left out has had no influence


def runs() -> list[tuple[published.Row, machines.Run]]:
    out = []
    for row in published.rows():
        if row.step_s and set(row.groups) & set(WEIGHTS):
            try:
                out.append((row, plan.run_of(row.request)))
            except ValueError:
                pass
    return out


def log_error(row: published.Row, run: machines.Run, constants: machines.Constants) -> float:
    return math.log(machines.step_seconds(run._replace(constants=constants)).seconds / row.step_s)


def objective(chosen: dict[str, list], constants: machines.Constants) -> float:
    total = 0.0
    for group, members in chosen.items():
        found = [log_error(row, run, constants) for row, run in members]
        total += WEIGHTS[group] * sum(min(abs(e), 0.35) + 0.5 * min(e * e, 0.1) for e in found) / len(found)
    return total


def fit(rows: list, seconds: float, seed: int, start: machines.Constants = START) -> machines.Constants:
    chosen = {}
    for group in WEIGHTS:
        members = [pair for pair in rows if group in pair[0].groups][::EVERY.get(group, 1)]
        if members:
            chosen[group] = members
    generator, constants, step = random.Random(seed), start, 0.1
    best, end = objective(chosen, constants), time.time() + seconds
    while time.time() < end:
        names = generator.sample(FREE, generator.choice((1, 1, 2, 3)))
        changed = {name: getattr(constants, name) * math.exp(generator.gauss(0, step)) for name in names}
        for name in changed.keys() & {"hidden", "tp_hidden"}:
            changed[name] = min(0.99, changed[name])
        tried = constants._replace(**changed)
        value = objective(chosen, tried)
        if value < best:
            best, constants, step = value, tried, min(0.15, step * 1.15)
        else:
            step = max(0.01, step * 0.97)
    return constants


def print_errors(title: str, rows: list, constants: machines.Constants) -> None:
    found = sorted(abs(math.exp(log_error(row, run, constants)) - 1) for row, run in rows)
    if found:
        tail = published.quantile(found, 0.9)
        print(f"{title:44s}{len(found):5d} runs  median {median(found):6.1%}  p90 {tail:6.1%}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--leave", choices=("model", "nodes"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--go-on", action="store_true", help="start from the constants of machines.py")
    asked = parser.parse_args()
    everything = runs()
    if not asked.leave:
        found = fit(everything, asked.seconds, asked.seed, machines.CONSTANTS if asked.go_on else START)
        print(found)
        for group in WEIGHTS:
            print_errors(group, [pair for pair in everything if group in pair[0].groups], found)
    else:
        def key(row: published.Row) -> int:
            return row.request["hidden"] if asked.leave == "model" else row.request["gpus"] // 8

        flagged = [pair for pair in everything if FLAGGED in pair[0].groups]
        for value in sorted({key(row) for row, _ in flagged}):
            rest = [pair for pair in everything if pair[0].table != "playbook_runs" or key(pair[0]) != value]
            found = fit(rest, asked.seconds, asked.seed)
            print_errors(f"without {'hidden' if asked.leave == 'model' else 'nodes'} {value}, on those",
                         [pair for pair in flagged if key(pair[0]) == value], found)
