"""Run programs of the project as users start them, but fork them from a server that has torch
loaded.

Starting Python and importing torch takes two or three seconds of a core. A fork takes some
hundredths of a second. This file imports nothing of the project, so that the server has none of it
loaded either.

There are two servers, because all processes that are forked from one server hash strings alike.
Each rank that a user starts has its own order of a set of names.
"""
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parent.parent.parent
PRELOADED = ["torch", "torch.distributed.checkpoint", "torch.distributed.optim", "torch.distributed.pipelining",
             "torch._dynamo", "triton", "numpy", "einops", "tqdm", "pytest", "libraries"]


def forks() -> multiprocessing.context.BaseContext:
    """Return the context that makes processes with torch loaded. In such a process itself it forks."""
    if multiprocessing.parent_process():
        return multiprocessing.get_context("fork")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with patch.dict(os.environ, PYTHONHASHSEED=HASH_SEEDS[0]):
        forkserver.ensure_running()
    return context


# The seeds of the two servers. With them, 81 of 91 pairs of names of axes (core/groups.py) are in
# opposite orders in a set.
HASH_SEEDS = "47", "51"
SECOND_ADDRESS = "PENTERACT_TESTS_SECOND_SERVER"  # where forked processes find the second server


class SecondServer(forkserver.ForkServer):
    """A second fork server, in addition to the one of multiprocessing."""

    def ensure_running(self) -> None:
        if SECOND_ADDRESS not in os.environ:
            with patch.dict(os.environ, PYTHONHASHSEED=HASH_SEEDS[1]):
                super().ensure_running()
            os.environ[SECOND_ADDRESS] = self._forkserver_address
        elif self._forkserver_address is None:  # use the server of the parent process
            self._forkserver_address, self._forkserver_alive_fd = os.environ[SECOND_ADDRESS], os.pipe()[1]


@cache
def second_server() -> SecondServer:
    server = SecondServer()
    server.set_forkserver_preload(PRELOADED)
    return server


def start_servers() -> None:
    """Load torch while this process does other things, on both servers at the same time."""
    second_server().ensure_running()
    forks()


def start(function: Callable, arguments: tuple, second: bool) -> multiprocessing.Process:
    """Start a process that calls the function. second: fork it from the second server."""
    if not second:
        process = forks().Process(target=function, args=arguments, daemon=True)
        process.start()
        return process
    process = multiprocessing.get_context("forkserver").Process(target=function, args=arguments, daemon=True)
    with patch.object(forkserver, "connect_to_new_process", second_server().connect_to_new_process):
        process.start()
    return process


def end_with_parent() -> None:
    """End with the parent. The second server's processes are not in the process group of the
    process that starts them."""
    multiprocessing.parent_process().join()
    os._exit(1)


def python(*arguments: str, timeout: float = 300, root: Path = ROOT, **env: str) -> subprocess.CompletedProcess:
    """Run `python ARGUMENTS` in the project's folder. The first argument is a file there, or -m
    before a module.

    root: the folder of the project, or of a copy.
    """
    words = [str(argument) for argument in arguments]
    with tempfile.TemporaryDirectory() as folder:
        process = forks().Process(target=run, args=(words, folder, env, root))
        process.start()
        if not ends(process, timeout):
            raise subprocess.TimeoutExpired(words, timeout)
        printed = [Path(folder, name).read_text() for name in ("stdout", "stderr")]
    return subprocess.CompletedProcess(words, process.exitcode, *printed)


def ends(process: multiprocessing.Process, within_s: float) -> bool:
    """Return whether the process ends within this time, or somewhat more on a busy machine.

    If not, kill it and everything that it has started.
    """
    process.join(within_s * max(1.0, os.getloadavg()[0] / os.cpu_count()))
    if hangs := process.is_alive():
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return not hangs


def run(words: list[str], folder: str, env: dict[str, str], root: Path = ROOT) -> None:
    """Run the program in the forked process, and exit as it does. folder: for its output."""
    os.setsid()
    os.chdir(root)
    os.environ.pop("PYTHONHASHSEED", None)  # set for the server; processes that the program starts must not inherit it
    os.environ.update(env)
    for descriptor, name in (1, "stdout"), (2, "stderr"):
        os.dup2(os.open(os.path.join(folder, name), os.O_CREAT | os.O_WRONLY), descriptor)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)
    ours = ROOT, ROOT / "tests", ROOT / "tests" / "help"  # not an environment in the checkout
    sys.path[:] = [str(root), *(path for path in sys.path if Path(path) not in ours)]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
