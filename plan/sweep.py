"""Run the best candidates of plan/search.py for ten steps each on this machine, and measure their speed and memory.

    python -m plan sweep --preset llama-3.2-1b --gpus 8 --machine h100 --top 12 --seq 4096 --global-batch 64
    python -m plan sweep --gpus 4 --machine cpu --top 3 --out sweep.jsonl

The Ultra-Scale Playbook measured thousands of grids in this way. torchrun starts train.py with the flags of each
candidate; the measurements are train.py's metrics. One JSON object per run is appended to --out as soon as it ended:

    flags, status ("ok", "out of memory" or "failed"), error; step_s, tokens_per_s, mfu, memory_gb, measured after the
    first `WARMUP` steps; predicted_s, predicted_gb

A sweep that is started again with the same --out skips the runs in that file. It needs neither torch nor a GPU.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from statistics import median

import config
from plan.search import Candidate, describe

STEPS, WARMUP = 10, 3
OUT_OF_MEMORY = "OutOfMemoryError", "out of memory", "can't allocate memory", "Cannot allocate memory", "exitcode: -9"


def sweep(candidates: list[Candidate], flags: list[str], ranks: int, out: str, timeout_s: float) -> Iterator[dict]:
    """Run each candidate on `ranks` processes of this machine and yield its JSON object. flags: flags of train.py that
    all runs share. out: the file of JSON lines to append to, "" for none. timeout_s: for each run."""
    known = {}  # command -> its JSON object
    if out and os.path.exists(out):
        with open(out) as file:
            known = {record["command"]: record for record in map(json.loads, file)}
    for candidate in candidates:
        given = [*flags, *describe(candidate.run.settings).split()]
        command = " ".join(given)
        if command not in known:
            known[command] = dict(command=command, flags=describe(candidate.run.settings), ranks=ranks,
                                  **run(given, ranks, timeout_s), predicted_s=candidate.seconds,
                                  predicted_gb=candidate.memory / 1e9)
            if out:
                with open(out, "a") as file:
                    print(json.dumps(known[command]), file=file)
        yield known[command]


def run(flags: list[str], ranks: int, timeout_s: float) -> dict:
    """Train STEPS steps with these flags of train.py. Returns the status, and medians of the metrics if it is "ok"."""
    train = os.path.join(os.path.dirname(config.__file__), "train.py")
    with tempfile.TemporaryDirectory() as folder:
        metrics = os.path.join(folder, "metrics.jsonl")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", train,
                   *flags, "--steps", str(STEPS), "--sample", "", "--metrics", metrics]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return dict(status="failed", error=f"took more than {timeout_s:g} s")
        if ended.returncode:
            if any(word in ended.stderr for word in OUT_OF_MEMORY):
                return dict(status="out of memory", error="")
            errors = [line for line in ended.stderr.splitlines() if line.startswith("train.py: ")]
            return dict(status="failed", error=errors[0] if errors else ended.stderr.strip()[-200:])
        with open(metrics) as file:
            records = [json.loads(line) for line in file]
    steady = records[WARMUP:]
    found = {name: median(record[name] for record in steady) for name in ("step_s", "tokens_per_s")}
    mfu = [record["mfu"] for record in steady if record["mfu"] is not None]  # None: a device without a known peak
    return dict(status="ok", error="", **found, mfu=median(mfu) if mfu else None, memory_gb=steady[-1]["memory_gb"])


def table_line(record: dict) -> str:
    """One run as a line of the printed table."""
    if record["status"] != "ok":
        return (f"{record['status']:14s}{'':42s}{record['predicted_s']:9.3f} s  {record['flags']}  "
                f"{record['error']}").rstrip()
    mfu = f"{record['mfu']:7.1%}" if record["mfu"] is not None else "      -"
    return (f"{'ok':14s}{record['step_s']:8.3f} s{record['tokens_per_s']:13,.0f}{mfu} {record['memory_gb']:8.2f} GB"
            f"{record['predicted_s']:9.3f} s  {record['flags']}")


HEADER = f"{'status':14s}{'step':>10s}{'tokens/s':>13s}{'MFU':>7s}{'memory':>12s}{'predicted':>11s}  flags"


def draw(records: list[dict]) -> str:
    """The playbook's map: for each tp and pp, the tokens per second, ZeRO level and micro-batch of the fastest run, or
    the status if no run succeeded."""
    def value_of(record: dict, name: str) -> int:
        words = record["flags"].split()
        return int(words[words.index("--" + name) + 1]) if "--" + name in words else 1

    columns = sorted({value_of(record, "tp") for record in records})
    lines = ["tokens per second of the fastest run, by tp and pp (zero, micro-batch):",
             "        " + "".join(f"{f'tp {tp}':>26s}" for tp in columns)]
    for pp in sorted({value_of(record, "pp") for record in records}):
        cells = []
        for tp in columns:
            runs = [record for record in records if (value_of(record, "tp"), value_of(record, "pp")) == (tp, pp)]
            best = max((record for record in runs if record["status"] == "ok"), default=None,
                       key=lambda record: record["tokens_per_s"])
            status = runs[0]["status"] if runs else ""
            cells.append(status if best is None else
                         f"{best['tokens_per_s']:,.0f} (z{value_of(best, 'zero')}, mb {value_of(best, 'micro-batch')})")
        lines.append(f"pp {pp:<5d}" + "".join(f"{cell:>26s}" for cell in cells))
    return "\n".join(lines)
