"""Eight processes that stay alive for the whole test session and run any function as the ranks of a fresh world.

Starting processes costs seconds, so it is done once (a fork server that has torch loaded makes eight in one second); a
world costs a tenth of a second, so every job gets its own: `run(4, "grids:train", ...)` initialises a default process
group over ranks 0..3, exactly as torchrun would, calls `train` of tests/grids.py on each, and returns their results.
"""
import contextlib
import datetime
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback

import torch.distributed as dist

RANKS = 8


def work(rank: int, port: int, folder: str, connection) -> None:
    """A worker: jobs in, (ok, result) out, until None comes."""
    import torch
    torch.set_num_threads(1)
    stacks = open(os.path.join(folder, f"stacks{rank}"), "w")
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)  # asked for when a job hangs
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    gc.freeze()  # what is here now is no garbage, and need not be looked at again
    while (job := connection.recv()) is not None:
        number, world, function, arguments, timeout = job
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
        self.jobs, self.ranks = 0, ranks
        self.folder = tempfile.TemporaryDirectory()
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])  # the last: modes that count
        self.workers = []
        for rank in range(self.ranks):
            here, there = context.Pipe()
            process = context.Process(target=work, args=(rank, self.store.port, self.folder.name, there), daemon=True)
            process.start()
            self.workers.append((process, here))

    def run(self, world: int, function: str, timeout: float = 300, **arguments) -> list:
        """The results of `function` ("module:name", called with `arguments`) on every rank of a world of its own.

        Raises RuntimeError with the traceback of every rank that failed, or with where each stood when time ran out.
        """
        self.jobs += 1
        for _, connection in self.workers[:world]:
            connection.send((self.jobs, world, function, arguments, timeout))
        deadline, results = time.monotonic() + timeout, []
        for _, connection in self.workers[:world]:
            if not connection.poll(max(0, deadline - time.monotonic())):
                stacks = self.where_they_stand(world)
                raise RuntimeError(f"{function} on {world} ranks took more than {timeout} s.\n{stacks}")
            results.append(pickle.loads(connection.recv_bytes()))
        failed = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(results) if not ok]
        if failed:
            raise RuntimeError(f"{function} on {world} ranks:\n" + "\n".join(failed))
        return [result for _, result in results]

    def where_they_stand(self, world: int) -> str:
        """The stack of every rank; then a new set of workers, since these cannot be trusted any more."""
        for process, _ in self.workers[:world]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)
        stacks = []
        for rank in range(world):
            with open(os.path.join(self.folder.name, f"stacks{rank}")) as file:
                stacks.append(f"rank {rank}:\n{file.read()}")
        self.close()
        self.start()
        return "\n".join(stacks)

    def close(self) -> None:
        for process, _ in self.workers:
            process.kill()
            process.join()
