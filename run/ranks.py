"""What the ranks of a long run need of each other besides a step: to meet, to exchange objects, to fail together; and
the flight record: how many collectives this rank has called on each axis, and for which one it waits."""
import datetime
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from core import collectives
from core.collectives import ALONE, Call, Group

SAVING = "checkpoint"  # the name of the thread that saves


class FlightRecord:
    """The record of this process, which another thread may read."""

    def __init__(self):
        self.last: Call | None = None  # that this rank has made or waited for
        self.calls = collectives.calls
        self.waiting_for: Call | None = None  # what a step waits for; after an exception, what has failed
        self.waited_s = 0.0  # by steps, so far

    @contextmanager
    def waiting(self, call: Call | None) -> Iterator[Call | None]:
        """The body makes this call, or waits for it."""
        self.last = call
        # On GPUs autograd calls collectives in threads of its own, for which a step waits, too. For the thread that
        # saves a step does not wait.
        if threading.current_thread().name == SAVING:
            yield call
            return
        self.waiting_for, began = call, time.perf_counter()
        yield call  # if the body raises, this call stays recorded as the one that failed
        self.waited_s += time.perf_counter() - began
        self.waiting_for = None


record = FlightRecord()
collectives.watch = record.waiting  # from now on


def meet(timeout_s: float = 600) -> dist.Store:
    """Wait until all ranks have started. Return torchrun's key-value store, with a prefix for the keys of this start.

    A torchrun that restarts its ranks keeps the store. Without a new prefix, init_process_group would
    read in it the addresses of ranks that are gone. TORCHELASTIC_RESTART_COUNT is no such prefix: it
    may differ between machines. So rank 0 draws one, and every other rank asks rank 0 for it. Raises
    TimeoutError.
    """
    store, rank, ranks = next(dist.rendezvous("env://", timeout=seconds(timeout_s)))
    prefix = hand_out_prefix(store, ranks, timeout_s) if rank == 0 else ask_for_prefix(store, rank, timeout_s)
    return dist.PrefixStore(prefix, store)


def ask_for_prefix(store: dist.Store, rank: int, timeout_s: float) -> str:
    """Ask under a name that no earlier start has used, and confirm the answer."""
    name = uuid.uuid4().hex
    store.queue_push("questions", f"{rank} {name}")
    try:
        store.wait([f"prefix/{name}"], seconds(timeout_s + 10))  # rank 0, which knows who is missing, gives up first
    except dist.DistStoreError:
        raise TimeoutError(f"rank 0 has not started in {timeout_s:g} s") from None
    prefix = store.get(f"prefix/{name}").decode()
    store.queue_push("questions", f"{rank} {prefix}")
    return prefix


def hand_out_prefix(store: dist.Store, ranks: int, timeout_s: float) -> str:
    """Answer until all other ranks have confirmed. An earlier start may have left questions, whose answer nobody
    confirms."""
    prefix, missing, deadline = uuid.uuid4().hex, set(range(1, ranks)), time.monotonic() + timeout_s
    while missing:
        try:
            store.wait(["questions"], seconds(max(0.001, deadline - time.monotonic())))  # 0 would be without end
        except dist.DistStoreError:
            late = ", ".join(map(str, sorted(missing)))
            raise TimeoutError(f"rank {late} has not started in {timeout_s:g} s") from None
        other, word = store.queue_pop("questions").decode().split()
        if word == prefix:
            missing.discard(int(other))
        else:
            store.set(f"prefix/{word}", prefix)
    return prefix


def seconds(count: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=count)


def host_group(timeout_s: float) -> Group:
    """All ranks, with gloo: for objects, and for a thread beside the groups of a step. ALONE in one process."""
    if not dist.is_initialized():
        return ALONE
    return Group("host", dist.new_group(backend="gloo", timeout=seconds(timeout_s)))


def gather_objects(value: Any, group: Group) -> list:
    """The value of every rank. group: of `host_group`."""
    values = [value] * group.size
    if group.size > 1:
        with collectives.calling("all_gather_object", group, 0):
            dist.all_gather_object(values, value, group=group.process_group)
    return values


def agree(work: Callable[[], Any], group: Group) -> Any:
    """Do the work on every rank. If it raises ValueError on one, so it does on all, with that one's message."""
    try:
        result, problem = work(), None
    except ValueError as error:
        result, problem = None, str(error)
    for found in gather_objects(problem, group):
        if found is not None:
            raise ValueError(found)
    return result


class HostCopy:
    """A copy of named scalars and vectors to the host, which the device makes when it has computed them. `read` waits
    for it; what is called in between, the device does meanwhile."""

    def __init__(self, **tensors: torch.Tensor):
        self.lengths = {name: x.numel() if x.dim() else None for name, x in tensors.items()}
        self.numbers = torch.cat([x.detach().double().flatten() for x in tensors.values()])
        self.call, self.copied = record.last, None
        if self.numbers.is_cuda:
            host = torch.empty(self.numbers.shape, dtype=self.numbers.dtype, pin_memory=True)
            self.numbers = host.copy_(self.numbers, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record()

    def read(self) -> dict[str, float | list[float]]:
        """Name -> number or list of numbers. On a GPU the host waits here, for what it called before the copy."""
        with record.waiting(self.call):
            if self.copied:
                self.copied.synchronize()
            numbers = iter(self.numbers.tolist())
        return {name: next(numbers) if length is None else [next(numbers) for _ in range(length)]
                for name, length in self.lengths.items()}
