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

import collectives
from collectives import ALONE, Call, Group

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
        # Of a step also autograd's threads call collectives, on GPUs; only saving's waits hold up nobody.
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
    """Wait for the other ranks. Returns torchrun's key-value store, with a prefix that no earlier start of ranks used.

    A torchrun that restarts its ranks keeps the store, and in it the addresses of ranks that are gone; how often it has
    restarted them may differ between machines. So every rank draws a name and appends it to a list. Rank 0 writes, for
    each name in the list, which prefix to use, until as many ranks as there are have confirmed this prefix. It answers
    the last name of each rank, which is an earlier start's until this start's has come. Raises TimeoutError.
    """
    store, index, ranks = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=timeout_s)))
    name, answered, began = uuid.uuid4().hex, set(), time.monotonic()
    store.append("names", f"{index} {name}\n")

    def missing() -> set[int]:
        """The ranks that this one still waits for."""
        if index > 0:
            return set() if store.check([f"prefix/{name}"]) else {0}
        last_names = dict(line.split() for line in store.get("names").decode().splitlines())
        for other in set(last_names.values()) - answered:
            store.set(f"prefix/{other}", name)
            answered.add(other)
        return set(range(ranks)) - set(map(int, store.get(f"confirmed/{name}").split()))

    if index == 0:
        store.append(f"confirmed/{name}", "0 ")
    while waits_for := missing():
        if time.monotonic() > began + timeout_s + 10 * (index > 0):  # of all ranks, rank 0 knows who is missing
            raise TimeoutError(f"rank {', '.join(map(str, sorted(waits_for)))} has not started in {timeout_s:g} s")
        time.sleep(max(0.01, ranks / 10_000))  # all ranks together call the store at most 10,000 times per second
    prefix = store.get(f"prefix/{name}").decode()
    if index > 0:
        store.append(f"confirmed/{prefix}", f"{index} ")
    return dist.PrefixStore(prefix, store)


def host_group(timeout_s: float) -> Group:
    """All ranks, with gloo: for objects, and for a thread beside the groups of a step. ALONE in one process."""
    if not dist.is_initialized():
        return ALONE
    return Group("host", dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s)))


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
