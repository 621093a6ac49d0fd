"""Every comparison on CPUs, one after the other, into docs/RESULTS.md: `python -m bench all`, on an idle machine.

Each command below runs by itself, as a reader would type it; contenders take turns inside. What it prints is printed
here as soon as it ends. At the end, the part of docs/RESULTS.md between two comments (BEGIN and END) is replaced by all
of it, with machine, versions and date, and nothing else changes. A command that fails or hangs is named with its error,
keeps the tables that it had printed, and the others go on; the exit code is then 1.
"""
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

from config import need

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "RESULTS.md"
BEGIN, END = "<!-- bench all: begin -->\n", "<!-- bench all: end -->\n"
COMMANDS = ["python -m bench train", "python -m bench ep",
            *(f"torchrun --nproc_per_node=4 -m bench {part}" for part in ("dp", "zero", "tp", "cp", "pp", "ep",
                                                                          "checkpoint"))]
LIMIT_S = 600  # of a command


def split_at_markers(text: str) -> tuple[str, str]:
    """What is before the part that is replaced, and after it, with the comments. Raises ValueError without them."""
    need(text.count(BEGIN) == text.count(END) == 1 and text.index(BEGIN) < text.index(END),
         f"{RESULTS.name}: needs one line {BEGIN.strip()} and after it one line {END.strip()}")
    return text[:text.index(BEGIN) + len(BEGIN)], text[text.index(END):]


def describe_machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    return (f"{os.cpu_count()} cores of {found[1] if found else platform.machine()}, {memory:.0f} GiB, "
            f"no GPU used, Python {platform.python_version()}, {versions}")


def run(command: str) -> tuple[str, str]:
    """(what the command prints, why it failed or "")."""
    launch = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    program, *words = command.split()
    process = subprocess.Popen([*launch[program], *words], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    try:
        printed, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks
        return process.communicate()[0], f"took more than {LIMIT_S} s"
    if process.returncode == 0:
        return printed, ""
    named = re.search(r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Exception): .*|bench: .*)", errors, re.MULTILINE)
    return printed, named[1] if named else f"exit code {process.returncode}"


def main() -> None:
    before, after = split_at_markers(RESULTS.read_text())
    blocks, failed = [], 0
    for number, command in enumerate(COMMANDS, 1):
        print(f"{number} of {len(COMMANDS)}: {command}", file=sys.stderr, flush=True)
        began = time.perf_counter()
        printed, failure = run(command)
        failed += bool(failure)
        outcome = f"failed: {failure}" if failure else f"{time.perf_counter() - began:.0f} s"
        blocks.append(f"`{command}`, {outcome}\n" + f"\n```\n{printed.rstrip()}\n```\n" * bool(printed.strip()))
        print(blocks[-1], flush=True)
    title = (f"`python -m bench all`, {date.today()}, {describe_machine()}. Times are medians of turns, with the "
             "fastest and the slowest turn beside them.\n")
    before, after = split_at_markers(RESULTS.read_text())  # it may have been edited meanwhile
    RESULTS.write_text(before + "\n".join(["", title, *blocks, ""]) + after)
    if failed:
        raise SystemExit(f"bench: {failed} of {len(COMMANDS)} commands failed; {RESULTS.name} names them")
