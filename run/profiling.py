"""Profile a run: which operations take the time of a few steps, and which allocate a GPU's memory.

    torchrun --nproc_per_node=8 train.py --profile traces       traces/rank-0.json …, for chrome://tracing or Perfetto
    python train.py --memory-snapshot memory.pickle             for pytorch.org/memory_viz; needs a GPU

Steps 3, 4 and 5, counted from 0, are recorded; earlier ones allocate, compile and connect. In the trace every phase of
a step and every action of a pipeline has a name, such as "F1.0", the forward of stage 1 for micro-batch 0; kernels lie
under the name that launched them. The first rank also prints the ten operations that take longest, on the GPU if there
is one, else on the CPU. With --pp, traces/pipeline.svg shows when each rank's actions of the last step began and ended,
by events on GPUs.
"""
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

WAIT, ACTIVE = 3, 3  # steps that are not recorded, and steps that are


def named(name: str) -> AbstractContextManager:
    """Within this context operations have this name in the trace. Without a running profiler it adds no operation."""
    return record_function(name) if torch.autograd._profiler_enabled() else nullcontext()


@contextmanager
def profiling(folder: str, snapshot: str, rank: int, device: torch.device) -> Iterator[Callable[[], None]]:
    """Yield a function to be called after each step. folder, snapshot: --profile and --memory-snapshot; "": off."""
    cuda = device.type == "cuda"
    if snapshot:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    with start(folder, rank, cuda) if folder else nullcontext() as profiler:
        steps = 0

        def end_step() -> None:
            nonlocal steps
            steps += 1
            if profiler:
                profiler.step()
            if snapshot and rank == 0 and steps == WAIT + ACTIVE:
                torch.cuda.memory._dump_snapshot(snapshot)

        yield end_step
        if snapshot and rank == 0 and steps < WAIT + ACTIVE:
            torch.cuda.memory._dump_snapshot(snapshot)


def start(folder: str, rank: int, cuda: bool) -> profile:
    os.makedirs(folder, exist_ok=True)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda

    def write(profiler: profile) -> None:
        path = os.path.join(folder, f"rank-{rank}.json")
        profiler.export_chrome_trace(path)
        if rank == 0:
            print(longest(profiler, cuda) + f"\nwritten: {path}", flush=True)

    return profile(activities=activities, schedule=schedule(wait=WAIT - 1, warmup=1, active=ACTIVE, repeat=1),
                   on_trace_ready=write, acc_events=True)


def longest(profiler: profile, cuda: bool, count: int = 10) -> str:
    """A table of the `count` operations with the longest time of their own, without the operations they call."""
    times = {event.key: (event.self_device_time_total if cuda else event.self_cpu_time_total, event.count)
             for event in profiler.key_averages()}
    total = sum(us for us, _ in times.values()) or 1.0
    lines = [f"{'the longest, by ' + ('device' if cuda else 'CPU') + ' time of their own':60s}{'ms':>10s}{'share':>8s}"
             f"{'calls':>8s}"]
    for name, (us, calls) in sorted(times.items(), key=lambda item: -item[1][0])[:count]:
        lines.append(f"  {name[:58]:58s}{us / 1e3:10.2f}{us / total:8.1%}{calls:8,d}")
    return "\n".join(lines)
