"""Rows of a benchmark on a GPU: contenders timed and checked, every outcome in a file as soon as it is there.

A row is measured in another process, which is replaced after a failure, so that a failing row harms no other; a
contender that fails is named beside the times of those that do not. In the output folder:

    table.md       a line per row; rewritten after each
    rows.jsonl     the same as JSON, with everything that the table leaves out. A row that is in here is not measured
                   again, so the same command goes on where it ended; delete a line to measure its row again
    reports.txt    longer texts: kernels by the time that they take
    clocks.csv     twice a second the SM clock, the power, the temperature and the utilisation, by nvidia-smi

A contender's error is that of its results relative to the same in fp64, |x - exact| / |exact|, the largest of all its
results. `choose` names the fastest contender whose error is at most twice the smallest.
"""
import contextlib
import csv
import io
import json
import math
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.testing import do_bench

Contenders = dict[str, Callable]  # by name; the first is ours, what training runs by default
Rate = Callable[[float], str]  # of a time in seconds
CLOCKS = "timestamp,clocks.sm,power.draw,temperature.gpu,utilization.gpu"
IS_NUMBER = re.compile(r"\d+(\.\d+)?")


class Result(NamedTuple):
    seconds: float  # ours
    rate: str = ""  # ours
    rivals: dict[str, float] = {}  # seconds, by name
    errors: dict[str, float] = {}  # of every contender that was checked, relative to fp64
    failures: dict[str, str] = {}  # contenders without a time, and why
    report: str = ""
    ours: str = "ours"


class Row(NamedTuple):
    name: str
    measure: Callable[[], Result]  # picklable
    aim: str = ""  # the largest good ratio, or the rate to reach
    rival: str = ""  # the name of the earlier row that this one is compared with, if any


Outcomes = dict[str, tuple[Result | str, str]]  # by a row's name: its result, or why there is none, and the clocks


# ---- contenders -----------------------------------------------------------------------------------------------------

def measure_seconds(function: Callable, *arguments: Any) -> float:
    """The median of calls for a tenth of a second, at least one, each with an empty L2 cache."""
    return do_bench(partial(function, *arguments), return_mode="median") / 1e3


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def relative_error(results: Tensor | tuple[Tensor, ...], exact: Tensor | tuple[Tensor, ...]) -> float:
    """The largest |x - exact| / |exact| of all results; infinite if one is not finite."""
    pairs = zip(results, exact) if isinstance(exact, tuple) else [(results, exact)]
    errors = [((x.double() - right).norm() / right.norm()).item() for x, right in pairs]
    return max(error if math.isfinite(error) else math.inf for error in errors)


def compare(contenders: Contenders, inputs: tuple, rate: Rate, exact: Callable | None = None,
            make_checked: Callable[[], tuple] = tuple) -> Result:
    """Times of all contenders, each called with these inputs. exact: what they compute, in fp64, with which every
    contender's result is compared; make_checked: makes the arguments for that, which may be smaller than those that are
    timed. It is called again for each contender, under the same seed, because some work in place."""
    def results_of(function: Callable) -> Tensor | tuple[Tensor, ...]:
        torch.manual_seed(0)
        return function(*make_checked())

    ours, seconds, errors, failures = next(iter(contenders)), {}, {}, {}
    right = results_of(exact) if exact else None
    for name, contender in contenders.items():
        try:
            if exact:
                errors[name] = relative_error(results_of(contender), right)
            seconds[name] = measure_seconds(contender, *inputs)
        except Exception as error:  # it harms no other contender, unless the GPU itself has failed
            failures[name] = first_line(error)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    if ours not in seconds:
        raise RuntimeError(f"{ours}: {failures[ours]}; others in ms: {as_ms(seconds)}")
    time_of_ours = seconds.pop(ours)
    return Result(time_of_ours, rate(time_of_ours), seconds, errors, failures, ours=ours)


def choose(result: Result) -> str:
    """The fastest contender among those that are right; "" if none was checked."""
    if not result.errors:
        return ""
    seconds = {result.ours: result.seconds} | result.rivals
    right = [name for name in seconds if result.errors.get(name, math.inf) <= 2 * min(result.errors.values())]
    return min(right, key=seconds.get, default="none is right")


# ---- clocks ---------------------------------------------------------------------------------------------------------

class ClockLog:
    """clocks.csv, which nvidia-smi writes while this is open. Without nvidia-smi it stays empty."""

    def __init__(self, folder: str):
        self.path, self.place = os.path.join(folder, "clocks.csv"), 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with open(self.path, "a") as file:
            self.place = file.tell()
            command = ["nvidia-smi", "-i", "0", f"--query-gpu={CLOCKS}", "--format=csv,nounits", "-lms", "500"]
            process = subprocess.Popen(command, stdout=file) if shutil.which(command[0]) else None
            try:
                yield
            finally:
                if process:
                    process.terminate()
                    process.wait()

    def since_last_call(self) -> str:
        """Medians over the samples since the last call in which the GPU was busy: "1755 MHz, 690 W"; "" of none. What
        nvidia-smi cannot say, such as the power "[N/A]", is left out."""
        with open(self.path) as file:
            file.seek(self.place)
            text = file.read()
        whole = text[:text.rfind("\n") + 1]
        self.place += len(whole.encode())
        rows = [row for row in csv.reader(io.StringIO(whole), skipinitialspace=True) if len(row) == 5]
        busy = [row for row in rows if row[4].isdecimal() and int(row[4]) >= 50]
        medians = []
        for column, unit in (1, "MHz"), (2, "W"):
            values = [float(row[column]) for row in busy if IS_NUMBER.fullmatch(row[column])]
            medians += [f"{statistics.median(values):.0f} {unit}"] if values else []
        return ", ".join(medians)


# ---- the table ------------------------------------------------------------------------------------------------------

def as_ms(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {value * 1e3:.3f}" for name, value in seconds.items())


def table(rows: list[Row], outcomes: Outcomes) -> str:
    """Markdown."""
    lines = ["| what | ours, ms | rate | rivals, ms | ratio: ours / fastest rival | aim | errors; the choice | clock |",
             "|---|---|---|---|---|---|---|---|"]
    results = {name: outcome for name, (outcome, _) in outcomes.items() if isinstance(outcome, Result)}
    for row in rows:
        outcome, clock = outcomes.get(row.name, ("no time was left", ""))
        if row.name not in results:
            lines.append(f"| {row.name} | not measured: {outcome} | | | | {row.aim} | | |")
            continue
        rivals = dict(outcome.rivals)
        if row.rival in results:
            rivals[row.rival] = results[row.rival].seconds
        ratio = f"{outcome.seconds / min(rivals.values()):.2f}" if rivals else ""
        others = "; ".join(filter(None, [as_ms(rivals), *(f"{name}: {why}" for name, why in outcome.failures.items())]))
        errors = ", ".join(f"{name} {error:.1e}" for name, error in outcome.errors.items())
        choice = f"{errors}; choose {choose(outcome)}" if errors else ""
        lines.append(f"| {row.name} | {outcome.seconds * 1e3:.3f} | {outcome.rate} | {others} | {ratio} | {row.aim} "
                     f"| {choice} | {clock} |")
    return "\n".join(lines)


class Worker:
    """A process that measures one row after the other, and is replaced after a failure."""
    executor: ProcessPoolExecutor | None = None

    def measure(self, row: Row, limit_s: float) -> Result | str:
        """The result, or why there is none."""
        self.executor = self.executor or ProcessPoolExecutor(1, multiprocessing.get_context("forkserver"))
        try:
            return self.executor.submit(row.measure).result(limit_s)
        except Exception as error:
            traceback.print_exc()
            for process in list(self.executor._processes.values()):  # Python 3.14 has kill_workers()
                process.kill()
            self.executor = None
            return f"more than {limit_s:g} s" if isinstance(error, TimeoutError) else first_line(error)


def measure_rows(rows: list[Row], title: str, folder: str, start_limit_s: float, row_limit_s: float = 120) -> None:
    """Measure in this order what is not in the folder yet, writing the files after each row. No row begins after
    start_limit_s; one that takes longer than row_limit_s is abandoned."""
    os.makedirs(folder, exist_ok=True)
    os.environ["TQDM_DISABLE"] = "1"  # of the process that measures: no progress bars in the log
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as in training, see run/start.py
    began, known, worker, log = time.monotonic(), read_outcomes(folder), Worker(), ClockLog(folder)
    with log.running():
        for row in rows:
            elapsed_s = time.monotonic() - began
            if row.name not in known and elapsed_s <= start_limit_s:
                known[row.name] = worker.measure(row, row_limit_s), log.since_last_call()
                write_outcome(folder, row, *known[row.name], elapsed_s)
            with open(os.path.join(folder, "table.md"), "w") as file:
                file.write(f"{title}\n\n{table(rows, known)}\n")
    left = sum(row.name not in known for row in rows)
    more = ": the same command measures the others" if left else ""
    print(f"{len(rows) - left} of {len(rows)} rows are in {folder}{more}")


def read_outcomes(folder: str) -> Outcomes:
    if not os.path.exists(path := os.path.join(folder, "rows.jsonl")):
        return {}
    outcomes = {}
    with open(path) as file:
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # cut short, or of another version: again
                found = json.loads(line)
                outcomes[found["row"]] = found.get("failure") or Result(**found["result"]), found["clock"]
    return outcomes


def write_outcome(folder: str, row: Row, outcome: Result | str, clock: str, began_s: float) -> None:
    """Print an outcome in a line, and append it to rows.jsonl and its report to reports.txt."""
    measured, report = dict(failure=outcome), ""
    if isinstance(outcome, Result):
        measured, report = dict(result=outcome._replace(report="")._asdict()), outcome.report
    print(f"{began_s:.0f} s: {row.name}: {clock} {measured}", flush=True)
    with open(os.path.join(folder, "rows.jsonl"), "a") as file:  # whose last line may have been cut short
        print("\n" + json.dumps(dict(row=row.name, began_s=began_s, clock=clock) | measured), file=file)
    with open(os.path.join(folder, "reports.txt"), "a") as file:
        file.write(f"## {row.name}\n\n{report}\n\n" if report else "")
