"""Run train.py with a fault: torchrun ... faulty.py FAULT RANK STEP WHERE, and then the flags of
train.py.

The fault happens when rank RANK reaches the place WHERE in step STEP (counted from 0). Places are
before, loading, forward, backward, collective, optimizer, staging, writing, commit, evaluation,
export, sampling and exit. The fault happens only in the first start of the run. Several faults,
separated by commas, happen in one start each.
"""
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import train
from run import checkpoint, cli, generate, job
from zero import Optimizer


def loop() -> None:
    while True:
        time.sleep(0.01)


def fail() -> None:
    raise FloatingPointError("a fault of its own")


def kill_parent_and_loop() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    loop()


def kill_machine() -> None:
    """Kill torchrun and all its ranks."""
    parent = os.getppid()
    ranks = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True).stdout.split()
    for process in (parent, *(int(rank) for rank in ranks if int(rank) != os.getpid()), os.getpid()):
        with contextlib.suppress(ProcessLookupError):  # ps itself has ended
            os.kill(process, signal.SIGKILL)


FAULTS: dict[str, Callable[[], Any]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM), "int": lambda: os.kill(os.getpid(), signal.SIGINT),
    "term-parent": lambda: os.kill(os.getppid(), signal.SIGTERM), "kill-parent": lambda: os.kill(os.getppid(), 9),
    "kill-machine": kill_machine, "kill-parent-and-loop": kill_parent_and_loop, "loop": loop, "raise": fail,
    "none": lambda: None}


def inject(fault: str, where: str, step: int) -> None:
    """Make `fault` happen at the place."""
    state, done = job.RunState(), []
    job.RunState = lambda: state

    def before(owner: Any, attribute: str, happens: Callable[[], bool]) -> None:
        original = getattr(owner, attribute)

        def replaced(*args, **kwargs):
            if happens() and not done:
                done.append(True)
                print(f"fault at {time.time()}", flush=True)
                FAULTS[fault]()
            return original(*args, **kwargs)
        setattr(owner, attribute, replaced)

    is_in = dict(
        step=lambda: state.step == step, collective=lambda: state.step == step and "in step" in state.activity,
        end=lambda: state.step > step,
        thread=lambda: state.step > step and threading.current_thread().name == "checkpoint")
    for when, owner, attribute in PLACES[where]:
        before(owner, attribute, is_in[when])


PLACES = {  # where -> (the part of a run, the function before which the fault happens)
    "before": [("step", train, "local_micro_batches")], "loading": [("step", train, "build_model")],
    "forward": [("step", train.Llama, "forward")],
    "backward": [("step", torch.Tensor, "backward"), ("step", torch.autograd, "backward")],
    "collective": [("collective", dist, "all_reduce")],  # in the middle of a collective: the other ranks are inside
    "optimizer": [("step", Optimizer, "step")], "staging": [("end", checkpoint.Stage, "copy")],
    "writing": [("thread", checkpoint, "checksums_of")], "commit": [("thread", checkpoint, "sync")],
    "evaluation": [("end", job, "mean_loss")], "sampling": [("end", generate, "continue_prompt")],
    "export": [("end", checkpoint, "export")], "exit": [("end", dist, "destroy_process_group")]}


def main() -> None:
    *faults, flags = *(argument.split(",") for argument in sys.argv[1:5]), sys.argv[5:]
    sys.argv[1:] = flags
    settings, number = cli.from_command_line(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if number < len(faults[0]):
        fault, rank, step, where = (found[number] for found in faults)
        if os.environ.get("RANK", "0") == rank:
            inject(fault, where, int(step))
    train.main(settings)


if __name__ == "__main__":
    main()
