"""Rows of a benchmark on a GPU: time and check contenders, and write every outcome at once.

Each row is measured in another process, which is replaced after a failure, so a failing row does
not affect the others. If a contender fails, the table shows its error with the times of the others.
The output folder contains:

    table.md       a line per row; rewritten after each row
    rows.jsonl     the same as JSON, with everything that the table leaves out. A row in this file is not measured again
                   on the same card, so the same command continues where it ended. Delete a line to measure its row
                   again
    reports.txt    longer texts, such as kernels sorted by time
    clocks.csv     the SM clock, power, temperature and utilisation twice a second, by nvidia-smi

A contender's error is |x - exact| / |exact|, where `exact` is the result in fp64. If it has several
results, the largest error counts. `choose` names the fastest contender whose error is at most twice
the smallest.
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

Contenders = dict[str, Callable]  # by name; the first is ours, which training uses by default
Rate = Callable[[float], str]  # of a time in seconds
CLOCKS = "timestamp,clocks.sm,power.draw,temperature.gpu,utilization.gpu"
IS_NUMBER = re.compile(r"\d+(\.\d+)?")


LEAST_S = 30  # no row begins with less time left
ROW_LIMIT_S = 90  # a row that takes longer is given up


class Result(NamedTuple):
    seconds: float  # ours
    rate: str = ""  # ours
    rivals: dict[str, float] = {}  # seconds, by name
    errors: dict[str, float] = {}  # by name, of every contender that was checked, relative to fp64
    failures: dict[str, str] = {}  # contenders without a time, and why
    report: str = ""
    ours: str = "ours"
    rates: dict[str, str] = {}  # of rivals, by name


class Row(NamedTuple):
    name: str
    measure: Callable[[], Result | str]  # picklable. A text says why there is no result
    expected: str = ""  # the expected figure that the table shows, and how it was computed
    rival: str = ""  # the name of the earlier row that this one is compared with, if any


class Report(NamedTuple):
    """The folder, rows and card of a report."""
    folder: str
    rows: list[Row]  # all lines of the table
    card: str = ""
    title: str = ""  # above the table


Outcomes = dict[str, tuple[Result | str, str]]  # a row's name -> (its result, or why there is none; the clocks)


# ---- contenders -----------------------------------------------------------------------------------------------------

def measure_seconds(function: Callable, *arguments: Any) -> float:
    """Return the median time of calls for a tenth of a second, at least one, each with an empty L2
    cache."""
    return do_bench(partial(function, *arguments), return_mode="median") / 1e3


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def relative_error(results: Tensor | tuple[Tensor, ...], exact: Tensor | tuple[Tensor, ...]) -> float:
    """Return the largest |x - exact| / |exact| of all results; infinity if one is not finite."""
    pairs = zip(results, exact) if isinstance(exact, tuple) else [(results, exact)]
    errors = [((x.double() - right).norm() / right.norm()).item() for x, right in pairs]
    return max(error if math.isfinite(error) else math.inf for error in errors)


def compare(contenders: Contenders, inputs: tuple, rate: Rate, exact: Callable | None = None,
            make_checked: Callable[[], tuple] = tuple) -> Result:
    """Time all contenders on these inputs and compare their results with `exact`.

    exact: computes the same in fp64. make_checked: makes the arguments for this check, which may be
    smaller than the timed inputs. It is called again for each contender, with the same seed,
    because some contenders work in place.
    """
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
        except Exception as error:  # other contenders go on, unless the GPU itself has failed
            failures[name] = first_line(error)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    if ours not in seconds:
        raise RuntimeError(f"{ours}: {failures[ours]}; others in ms: {as_ms(seconds)}")
    time_of_ours = seconds.pop(ours)
    rates = {name: rate(time) for name, time in seconds.items()}
    return Result(time_of_ours, rate(time_of_ours), seconds, errors, failures, ours=ours, rates=rates)


def choose(result: Result) -> str:
    """Return the fastest contender with a correct result; "" if none was checked."""
    if not result.errors:
        return ""
    seconds = {result.ours: result.seconds} | result.rivals
    right = [name for name in seconds if result.errors.get(name, math.inf) <= 2 * min(result.errors.values())]
    return min(right, key=seconds.get, default="none is right")


# ---- clocks ---------------------------------------------------------------------------------------------------------

class ClockLog:
    """clocks.csv, which nvidia-smi writes while `running` lasts. Without nvidia-smi it stays empty."""

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
        """Return medians, such as "1755 MHz, 690 W", over the samples since the last call in which
        the GPU was busy.

        Without such samples it is "". A value that nvidia-smi cannot read, such as a power of
        "[N/A]", is left out.
        """
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


COLUMNS = ("what", "ours, ms", "rate", "expected", "rivals, ms", "ratio: ours / fastest rival", "errors; the choice",
           "clock")


def table(rows: list[Row], outcomes: Outcomes) -> str:
    """Return the table in Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    results = {name: outcome for name, (outcome, _) in outcomes.items() if isinstance(outcome, Result)}
    for row in rows:
        outcome, clock = outcomes.get(row.name, ("no time was left", ""))
        if row.name not in results:
            lines.append([row.name, f"not measured: {outcome}", "", row.expected, "", "", "", ""])
            continue
        rivals = dict(outcome.rivals)
        if row.rival in results:
            rivals[row.rival] = results[row.rival].seconds
        others = [f"{as_ms({name: seconds})} {outcome.rates.get(name, '')}".strip() for name, seconds in rivals.items()]
        others += [f"{name}: {why}" for name, why in outcome.failures.items()]
        ratio = f"{outcome.seconds / min(rivals.values()):.2f}" if rivals else ""
        errors = ", ".join(f"{name} {error:.1e}" for name, error in outcome.errors.items())
        choice = f"{errors}; choose {choose(outcome)}" if errors else ""
        lines.append([row.name, f"{outcome.seconds * 1e3:.3f}", outcome.rate, row.expected, "; ".join(others), ratio,
                      choice, clock])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


class Worker:
    """A process that measures one row after the other, and is replaced after a failure."""
    executor: ProcessPoolExecutor | None = None

    def measure(self, row: Row, limit_s: float) -> Result | str:
        """Return the result, or why there is none."""
        self.executor = self.executor or ProcessPoolExecutor(1, multiprocessing.get_context("forkserver"))
        try:
            return self.executor.submit(row.measure).result(limit_s)
        except Exception as error:
            traceback.print_exc()
            for process in list(self.executor._processes.values()):  # Python 3.14 has kill_workers()
                process.kill()
            self.executor = None
            return too_long(limit_s) if isinstance(error, TimeoutError) else first_line(error)

    def close(self) -> None:
        """End the process, which frees its memory on the GPU."""
        if self.executor:
            self.executor.shutdown()


def too_long(limit_s: float) -> str:
    return f"more than {limit_s:g} s"


def measure_rows(rows: list[Row], report: Report, limit_s: float, row_limit_s: float = ROW_LIMIT_S) -> None:
    """Measure the rows that the report's folder does not have yet, and write the files after each.

    The measurement ends after limit_s. A row that is cut short, or that would begin with less than
    LEAST_S left, is left to the next run.
    """
    os.makedirs(report.folder, exist_ok=True)
    os.environ["TQDM_DISABLE"] = "1"  # for the process that measures: no progress bars in the log
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as in training, see run/cli.py
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "8")  # for rivals: one for each core starts more slowly
    began, known, worker, log = time.monotonic(), read_outcomes(report), Worker(), ClockLog(report.folder)
    write_table(report, known)
    with log.running():
        for row in rows:
            began_s = time.monotonic() - began
            row_s = min(row_limit_s, limit_s - began_s)
            if row.name in known or limit_s - began_s < LEAST_S:
                continue
            outcome, clock = worker.measure(row, row_s), log.since_last_call()
            if outcome != too_long(row_s) or row_s == row_limit_s:
                known[row.name] = outcome, clock
                write_outcome(report, row, outcome, clock, began_s)
                write_table(report, known)
    worker.close()
    left = sum(row.name not in known for row in rows)
    more = ": the same command measures the others" if left else ""
    print(f"{len(rows) - left} of {len(rows)} rows are in {report.folder}{more}", flush=True)


def write_table(report: Report, outcomes: Outcomes) -> None:
    with open(os.path.join(report.folder, "table.md"), "w") as file:
        file.write(f"{report.title}\n\n{table(report.rows, outcomes)}\n")


def read_outcomes(report: Report) -> Outcomes:
    """Return the outcomes in rows.jsonl that were measured on this card."""
    if not os.path.exists(path := os.path.join(report.folder, "rows.jsonl")):
        return {}
    outcomes = {}
    with open(path) as file:
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a line cut short, or of another version
                found = json.loads(line)
                if found["card"] == report.card:
                    outcomes[found["row"]] = found.get("failure") or Result(**found["result"]), found["clock"]
    return outcomes


def write_outcome(report: Report, row: Row, outcome: Result | str, clock: str, began_s: float) -> None:
    """Print an outcome in a line, and append it to rows.jsonl and its report to reports.txt."""
    measured, text = dict(failure=outcome), ""
    if isinstance(outcome, Result):
        measured, text = dict(result=outcome._replace(report="")._asdict()), outcome.report
    print(f"{began_s:.0f} s: {row.name}: {clock} {measured}" + f"; expected: {row.expected}" * bool(row.expected),
          flush=True)
    record = dict(row=row.name, card=report.card, began_s=began_s, clock=clock, expected=row.expected) | measured
    with open(os.path.join(report.folder, "rows.jsonl"), "a") as file:  # whose last line may have been cut short
        print("\n" + json.dumps(record), file=file)
    with open(os.path.join(report.folder, "reports.txt"), "a") as file:
        file.write(f"## {row.name}\n\n{text}\n\n" if text else "")
