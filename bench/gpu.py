"""Test one GPU: does it compute everything correctly, and how fast?

Figures are shown beside expected figures and the figures of rivals.

    python -m bench gpu                 the first ten minutes, in 575 seconds
    python -m bench gpu --limit 190     three more minutes for what is left. Each call continues where the last ended

The stages run in this order. `--only NAMES` selects some of them. bench/gpu_rows.py lists the rows
of training, kernels and rest.

    right       the probe (bench/probe_gpu.py), bench check, bench smoke and the tests that need a GPU, all at the same
                time, in 75 s. Timings in right.txt therefore mean nothing
    training    training runs of the largest sizes that fit the card
    kernels     matmuls, attention, short runs, and kernels bound by memory
    nccl        two ranks on this GPU train on each grid, compared with one process (nccl.txt). This shows the order of
                streams and collectives, not speed
    rest        variants, streams, and other training runs

Files: right.txt; nccl.txt; log.txt, with everything that is printed; and table.md, rows.jsonl,
reports.txt and clocks.csv, which bench/rows.py explains. Nothing that is in right.txt, nccl.txt or
rows.jsonl is measured again. Delete it there to measure it again. No setting of the GPU is changed.

The files are in the folder of --out, by default gpu-results/. Without --out, an environment
variable OUT may name the folder. This is for jobs whose results are fetched from there. The files
of gpu-results/ are then copied to OUT first, and all files are copied back after each stage, so
that the next job continues from gpu-results/.

What to look for on an unknown GPU:

    a line differs from expected     fix it first, or train with --kernels torch
    a grid of nccl.txt hangs         run only this grid, with NCCL_DEBUG=INFO and TORCH_NCCL_BLOCKING_WAIT=1
    matmuls below 640 TFLOP/s        on an H100 or H200: look at the clocks; do not tune
    more than 3% idle                the host is too slow: use larger micro-batches, less tensor parallelism
    flash_fwd among the kernels      if torch's attention was expected: cuDNN was refused, so find out why
    attention above 12%              the same
    elementwise above 7%             try other tile sizes in kernels.py
    FP8 / bf16 above 0.85            FP8 does not pay off here
    a variant is faster              if its training row gains 1%, make it the default; otherwise remove its code
    more blocked pairs at 8          than at 32 connections: train with CUDA_DEVICE_MAX_CONNECTIONS=32. 1 is never
                                     needed. Megatron uses 1 to order launches; here events order what is dependent

Kernels are timed by triton.testing.do_bench, each call with an empty L2 cache, on random bf16
inputs. Contenders of one row do equal work. A ratio is our time divided by the time of the fastest
rival, so below 1 we are faster. Kernels that are bound by memory are also compared with the rate of
a copy. Results are checked against fp64 on smaller inputs. The GPU stays cool in short bursts of
calls. Only training rows show the clocks that a run sustains.
"""
import contextlib
import datetime
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy
import torch
import triton

from bench.gpu_rows import ROOT, rows_of
from bench.rows import Report, Row, measure_rows
from core import config
from core.config import need, setting

STAGES = "right", "training", "kernels", "nccl", "rest"
RESULTS = "gpu-results"
LEAST_S = 60  # no program begins with less time left
END = b"\0end of the log\0"
GRACE_S = 40  # the time that a program has to end when asked: torchrun gives its ranks 30 s


# ---- programs whose output is kept ----------------------------------------------------------------------------------

class Program(NamedTuple):
    arguments: tuple[str, ...]  # of Python
    limit_s: float
    expected: str


# Tests that need a GPU, and tests of kernels, which run compiled on a GPU.
TESTS = "tests/test_kernels.py", "tests/test_flash.py", "tests/test_cp.py", "tests/test_fp8.py"
WORDS = "bf16", "billion", "linear_cross_entropy", "norm", "rope", "swiglu", "one_device", "a_gpu_computes"
GRIDS = ("--zero 1", "--zero 3", "--tp 2", "--pp 2", "--pp 2 --schedule zb-v", "--cp 2", "--cp 2 --cp-style ring",
         "--cp 2 --cp-style ulysses", "--preset tiny-moe --ep 2 --zero 1", "--tp 2 --sp async")
RIGHT = {
    "probe": Program(("-m", "bench.probe_gpu"), 60, "see each line"),
    "check": Program(("-m", "bench", "check"), 100, "ok in every line"),
    "smoke": Program(("-m", "bench", "smoke", "--grids", "--zero 0; --preset tiny-moe"), 110,
                     "off by at most 1e-6 in fp32, 1e-3 in bf16"),
    "tests": Program(("-m", "pytest", "-q", "-n", "6", "-p", "no:cacheprovider", *TESTS, "-k", " or ".join(WORDS)), 110,
                     "all pass")}
# The address is given because a machine without a network may be unable to resolve its own name.
NCCL = Program(("-m", "torch.distributed.run", "--standalone", "--local_addr", "127.0.0.1", "--nproc_per_node=2", "-m",
                "bench", "smoke", "--grids", "; ".join(GRIDS)), 150,
               "off by less than 1e-6 in fp32, 1e-3 in bf16; 2 to 5 s a line")
OUTPUTS = dict(right=RIGHT, nccl=dict(nccl=NCCL))  # of stages without rows


class Running:
    """A program that writes into a file."""

    def __init__(self, program: Program, path: str, limit_s: float):
        self.path, self.limit_s = path, min(program.limit_s, limit_s)
        self.ends = time.monotonic() + self.limit_s
        with open(path, "w") as file:
            self.process = subprocess.Popen([sys.executable, *program.arguments], cwd=ROOT, stdout=file,
                                            stderr=subprocess.STDOUT, start_new_session=True)

    def finish(self) -> str:
        """Wait for the program and return how it ended. At its limit, end it and all processes that
        it has started."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"exit code {self.process.wait(max(0, self.ends - time.monotonic()))}"
        for ending, patience_s in (signal.SIGTERM, GRACE_S), (signal.SIGKILL, None):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, ending)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_s)
        return f"ended after {self.limit_s:.0f} s"


def keep_outputs(programs: dict[str, Program], folder: str, name: str, limit_s: float) -> None:
    """Run programs at the same time and write what they print to the file `name` in the folder.

    This includes the output of a program that takes too long.
    """
    running = {part: Running(program, os.path.join(folder, f"{name}.{part}"), limit_s)
               for part, program in programs.items()}
    sections = []
    for part, one in running.items():
        ended = one.finish()
        with open(one.path) as file:
            sections.append(f"## {part}: {ended}\nexpected: {programs[part].expected}\n\n{file.read()}\n")
        os.remove(one.path)
        print("\n".join(line[:160] for line in sections[-1].splitlines()[-40:]), flush=True)
    with open(os.path.join(folder, name), "w") as file:
        file.writelines(sections)


# ---- the command ----------------------------------------------------------------------------------------------------

USAGE = f"python -m bench gpu [--limit SECONDS] [--out FOLDER] [--only {'|'.join(STAGES)} …]"


@dataclass
class Flags:
    limit: float = setting(575.0, "the command ends within this many seconds")
    out: str = setting("", f"the folder of the results; by default the one that the variable OUT names, or {RESULTS}")
    only: list = setting(list(STAGES), "stages")


def parse(flags: list[str]) -> Flags:
    """Raise ValueError for an unknown flag or stage, or if --out is a file."""
    settings, unknown = config.read_known(Flags, flags, USAGE)
    need(not unknown, f"{' '.join(unknown)}: gpu knows --limit SECONDS, --out FOLDER and --only STAGES")
    for stage in settings.only:
        need(stage in STAGES, f"--only {stage}: the stages are {', '.join(STAGES)}")
    need(not os.path.isfile(settings.out), f"--out {settings.out} is a file: name a folder")
    return settings


def choose_folders(out: str) -> tuple[str, str]:
    """Return (the folder of results, the folder from which the next job continues or "")."""
    folder = out or os.environ.get("OUT") or RESULTS
    keeps_copy = not out and os.path.abspath(folder) != os.path.abspath(RESULTS)
    return folder, RESULTS if keeps_copy else ""


def copy_files(there: str, here: str, replace: bool) -> None:
    os.makedirs(here, exist_ok=True)
    for name in os.listdir(there) if os.path.isdir(there) else ():
        if replace or not os.path.exists(os.path.join(here, name)):
            shutil.copy(os.path.join(there, name), here)


@contextlib.contextmanager
def logged(path: str) -> Iterator[None]:
    """Also append everything that this process and its children print to the file."""
    terminal, (read_end, write_end) = (os.dup(1), os.dup(2)), os.pipe()
    thread = threading.Thread(target=copy_output, args=(read_end, path, terminal[0]))
    sys.stdout.flush()
    for number in 1, 2:
        os.dup2(write_end, number)
    thread.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(write_end, END)
        thread.join()
        for number, saved in zip((1, 2), terminal):
            os.dup2(saved, number)


def copy_output(read_end: int, path: str, terminal: int) -> None:
    """Copy a pipe to a file and to the terminal, up to END.

    The end of the pipe cannot be the signal, because processes that live as long as this one, such
    as multiprocessing's, hold it open.
    """
    with open(path, "ab") as file, open(terminal, "wb", closefd=False) as screen:
        is_last = False
        while not is_last:
            chunk = os.read(read_end, 1 << 20)  # a pipe holds less than this, so END comes in one piece
            is_last = chunk.endswith(END)
            for copy in file, screen:
                with contextlib.suppress(OSError):  # raised if the terminal is gone
                    copy.write(chunk.removesuffix(END))
                    copy.flush()


def describe_machine(properties) -> str:
    """properties: torch.cuda.get_device_properties."""
    return (f"{describe_card(properties)}, {properties.multi_processor_count} SMs, L2 "
            f"{properties.L2_cache_size / 2**20:.0f} MiB; Python {platform.python_version()}, torch "
            f"{torch.__version__}, triton {triton.__version__}, numpy {numpy.__version__}, CUDA {torch.version.cuda}, "
            f"cuDNN {torch.backends.cudnn.version()}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")


def describe_card(properties) -> str:
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def run_stage(stage: str, rows: dict[str, list[Row]], report: Report, left_s: float) -> None:
    if stage in rows:
        measure_rows(rows[stage], report, left_s)
        return
    name, programs = f"{stage}.txt", OUTPUTS[stage]
    if os.path.exists(os.path.join(report.folder, name)):
        print(f"{name} is there")
    elif left_s < GRACE_S + LEAST_S:
        print(f"no time is left for {name}: the same command makes it")
    else:
        keep_outputs(programs, report.folder, name, left_s - GRACE_S)


def measure(flags: list[str]) -> None:
    """Run the stages that are asked for, one after the other, as long as there is time."""
    began, settings, properties = time.monotonic(), parse(flags), torch.cuda.get_device_properties(0)
    os.environ["PYTHONUNBUFFERED"] = "1"  # for the programs: their output is kept even if they are ended
    rows, (folder, copy) = rows_of(properties.total_memory), choose_folders(settings.out)
    copy_files(copy, folder, replace=False)
    with logged(os.path.join(folder, "log.txt")):
        machine = describe_machine(properties)
        title = f"{machine}, {datetime.date.today()}, `python -m bench gpu {' '.join(flags)}`."
        report = Report(folder, [row for stage in rows.values() for row in stage], describe_card(properties), title)
        print(machine, flush=True)
        if shutil.which("nvidia-smi"):
            subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,power.draw,power.limit,"
                            "temperature.gpu", "--format=csv"])
        for stage in STAGES:
            if stage in settings.only:
                elapsed_s = time.monotonic() - began
                print(f"=== {elapsed_s:.0f} s: {stage}", flush=True)
                run_stage(stage, rows, report, settings.limit - elapsed_s)
                if copy:
                    copy_files(folder, copy, replace=True)
        print_table(folder)


def print_table(folder: str) -> None:
    if os.path.exists(path := os.path.join(folder, "table.md")):
        with open(path) as file:
            print(file.read(), flush=True)
