"""Eight processes that stay alive for the whole test session and run any function as the ranks of a fresh world.

Starting processes costs seconds, so they are started once. Fork servers that have torch loaded make
eight in one second. A world costs a tenth of a second, so every job gets its own. `run(4,
grids.train, ...)` initialises a default process group over ranks 0..3, exactly as torchrun would,
calls `grids.train(...)` on each, and returns their results.
"""
import contextlib
import datetime
import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.distributed as dist
from program import end_with_parent, start, start_servers

RANKS = 8


def slow(*cases) -> list:
    """Mark cases of a parametrised test as slow. Most slow cases have many ranks."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


def work(number: int, port: int, stacks_of: str, connection) -> None:
    """Work: receive jobs and send (ok, result), until None comes."""
    os.environ.pop("PYTHONHASHSEED", None)  # set for the server; processes that a rank starts must not inherit it
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    ForkingPickler.register(torch.Tensor, by_value)
    stacks = open(stacks_of, "w")
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)  # the pool sends it when a job hangs
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    gc.freeze()  # no object that exists now is garbage, so the collector can skip all of them
    while (job := connection.recv()) is not None:
        number, rank, world, function, arguments, timeout = job
        try:
            dist.init_process_group("gloo", store=dist.PrefixStore(str(number), store), rank=rank, world_size=world,
                                    timeout=datetime.timedelta(seconds=timeout))
            result = True, function(**arguments)
            dist.barrier()
        except BaseException:
            result = False, traceback.format_exc()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # otherwise models, in cycles, keep their groups, and each group two threads that never sleep
        connection.send(result)


def by_value(x: torch.Tensor) -> tuple:
    """Send a tensor as an array of bytes. Torch would share its memory, or write a file for each
    tensor."""
    return restored, (x.detach().reshape(-1).view(torch.uint8).numpy(), x.dtype, x.shape)


def restored(numbers, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.from_numpy(numbers).view(dtype).view(shape)


class Pool:
    def __init__(self, ranks: int = RANKS):
        self.jobs = 0
        self.folder = tempfile.TemporaryDirectory()
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        start_servers()
        self.workers = [self.start(number) for number in range(ranks)]

    def start(self, number: int) -> tuple:
        """Start a worker.

        Half of the ranks hash strings differently: of any two neighbours of a grid, one does. So if
        the order of collectives depends on hashes, the ranks wait for each other in a circle.
        """
        here, there = multiprocessing.Pipe()
        arguments = number, self.store.port, self.stacks_of(number), there
        return start(work, arguments, second=number.bit_count() % 2 == 1), here

    def stacks_of(self, number: int) -> str:
        return os.path.join(self.folder.name, f"stacks{number}")

    def run(self, world: int, function: Callable, timeout: float = 300, **arguments) -> list:
        """Return the results of `function(**arguments)` on every rank of a world of its own.

        `function` must be at the top level of a module, because ranks import it by its name. Raise
        RuntimeError with the traceback of every rank that failed and, if time ran out, with the
        position of each rank.
        """
        self.jobs += 1
        connections = [connection for _, connection in self.workers[:world]]
        for rank, connection in enumerate(connections):
            connection.send((self.jobs, rank, world, function, arguments, timeout))
        deadline, results = time.monotonic() + timeout, []
        try:
            for connection in connections:
                if not connection.poll(max(0, deadline - time.monotonic())):
                    break
                results.append(connection.recv())
        except EOFError:
            raise RuntimeError(f"{function.__name__}: rank {len(results)} has died.\n{self.replace(world)}") from None
        late = [rank for rank in range(len(results), world) if not connections[rank].poll()]
        results += [(True, None) if rank in late else connections[rank].recv() for rank in range(len(results), world)]
        problems = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(results) if not ok]
        if late:  # perhaps because another rank has failed
            problems.append(f"took more than {timeout} s.\n{self.replace(world)}")
        if problems:
            raise RuntimeError(f"{function.__name__} on {world} ranks:\n" + "\n".join(problems))
        return [result for _, result in results]

    def replace(self, world: int) -> str:
        """Return the stack of every rank, and start new workers, because the old ones can no longer
        be trusted."""
        for process, _ in self.workers[:world]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)
        stacks = []
        for rank in range(world):
            with open(self.stacks_of(rank)) as file:
                stacks.append(f"rank {rank}:\n{file.read()}")
            self.stop(rank)
            self.workers[rank] = self.start(rank)
        return "\n".join(stacks)

    def stop(self, worker: int) -> None:
        process, _ = self.workers[worker]
        process.kill()
        process.join()

    def close(self) -> None:
        for _, connection in self.workers:
            with contextlib.suppress(OSError):  # if it has ended
                connection.send(None)  # a kill would leave tqdm's lock behind
        for worker, (process, _) in enumerate(self.workers):
            process.join(1)
            self.stop(worker)
