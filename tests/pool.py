"""Eight processes that stay alive for the whole test session and run any function as the ranks of a fresh world.

Starting processes costs seconds, so it is done once (a fork server that has torch loaded makes eight in one second); a
world costs a tenth of a second, so every job gets its own: `run(4, "grids:train", ...)` initialises a default process
group over ranks 0..3, exactly as torchrun would, calls `train` of tests/grids.py on each, and returns their results.

A job takes as many workers as it has ranks, so two of four ranks run at once. Jobs that are known when the session
begins (tests marked `ahead`) run in the background, while the session's own process is busy with tests that need no
other: `run` then finds their results.
"""
import contextlib
import datetime
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch.distributed as dist

from program import forks

RANKS = 8
AT_ONCE = 2  # jobs in the background


def slow(*cases) -> list:
    """Cases of a parametrised test that are in the slow tier: most have many ranks."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


def work(number: int, port: int, stacks_of: str, connection) -> None:
    """A worker: jobs in, (ok, result) out, until None comes."""
    import torch
    torch.set_num_threads(1)
    stacks = open(stacks_of, "w")
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)  # asked for when a job hangs
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    gc.freeze()  # what is here now is no garbage, and need not be looked at again
    while (job := connection.recv()) is not None:
        number, rank, world, function, arguments, timeout = job
        try:
            dist.init_process_group("gloo", store=dist.PrefixStore(str(number), store), rank=rank, world_size=world,
                                    timeout=datetime.timedelta(seconds=timeout))
            module, _, name = function.partition(":")
            result = True, getattr(importlib.import_module(module), name)(**arguments)
            dist.barrier()
        except BaseException:
            result = False, traceback.format_exc()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # or models, in cycles, would keep their groups, and each group two threads that never sleep
        connection.send_bytes(pickle.dumps(result))  # plain pickle: tensors travel by value


class Pool:
    def __init__(self, ranks: int = RANKS):
        self.jobs = 0
        self.folder = tempfile.TemporaryDirectory()
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.context = forks()
        self.workers = [self.start(number) for number in range(ranks)]
        self.free, self.turn, self.released = list(range(ranks)), threading.Lock(), threading.Condition()
        self.background, self.known = ThreadPoolExecutor(AT_ONCE), dict[tuple, Future]()

    def start(self, number: int) -> tuple:
        here, there = self.context.Pipe()
        arguments = number, self.store.port, self.stacks_of(number), there
        process = self.context.Process(target=work, args=arguments, daemon=True)
        process.start()
        return process, here

    def stacks_of(self, number: int) -> str:
        return os.path.join(self.folder.name, f"stacks{number}")

    def ahead(self, world: int, function: str, **arguments) -> None:
        """Run this in the background: `run`, called with the same, will return its results."""
        self.known[self.key(world, function, arguments)] = self.background.submit(
            self.run_now, world, function, 300, arguments)

    def key(self, world: int, function: str, arguments: dict) -> tuple:
        return world, function, repr(sorted(arguments.items()))

    def run(self, world: int, function: str, timeout: float = 300, **arguments) -> list:
        """The results of `function` ("module:name", called with `arguments`) on every rank of a world of its own.

        Raises RuntimeError with the traceback of every rank that failed, or with where each stood when time ran out.
        """
        if known := self.known.pop(self.key(world, function, arguments), None):
            return known.result()
        return self.run_now(world, function, timeout, arguments)

    def run_now(self, world: int, function: str, timeout: float, arguments: dict) -> list:
        with self.turn, self.released:  # whoever has the turn gets the next workers that are released
            self.released.wait_for(lambda: len(self.free) >= world)
            mine, self.free = self.free[:world], self.free[world:]
            self.jobs += 1
            job = self.jobs
        try:
            results = self.results_of(mine, (job, world, function, arguments, timeout))
        finally:
            with self.released:
                self.free = sorted(self.free + mine)
                self.released.notify_all()
        failed = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(results) if not ok]
        if failed:
            raise RuntimeError(f"{function} on {world} ranks:\n" + "\n".join(failed))
        return [result for _, result in results]

    def results_of(self, mine: list[int], job: tuple) -> list:
        number, world, function, arguments, timeout = job
        connections = [self.workers[worker][1] for worker in mine]
        for rank, connection in enumerate(connections):
            connection.send((number, rank, world, function, arguments, timeout))
        deadline, results = time.monotonic() + timeout, []
        for connection in connections:
            if not connection.poll(max(0, deadline - time.monotonic())):
                stacks = self.where_they_stand(mine)
                raise RuntimeError(f"{function} on {world} ranks took more than {timeout} s.\n{stacks}")
            results.append(pickle.loads(connection.recv_bytes()))
        return results

    def where_they_stand(self, mine: list[int]) -> str:
        """The stack of every rank; then new workers in their places, since these cannot be trusted any more."""
        for worker in mine:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.workers[worker][0].pid, signal.SIGUSR1)
        time.sleep(1)
        stacks = []
        for rank, worker in enumerate(mine):
            with open(self.stacks_of(worker)) as file:
                stacks.append(f"rank {rank}:\n{file.read()}")
            self.stop(worker)
            self.workers[worker] = self.start(worker)
        return "\n".join(stacks)

    def stop(self, worker: int) -> None:
        process, _ = self.workers[worker]
        process.kill()
        process.join()

    def close(self) -> None:
        self.background.shutdown(wait=False, cancel_futures=True)
        for worker in range(len(self.workers)):
            self.stop(worker)
