"""The watchdog: when a rank hangs or dies, no other rank waits for ever, and one line says who and where.

The ranks that wait for a rank that hangs notice it; if a rank dies, those whose connection to it breaks. When several
ranks fail, one of them reports: the lowest that raised an error of its own, else the lowest that lost a connection or
waited too long. They agree on it through torchrun's key-value store, otherwise unused but at the start.

    after             rank 0, in a collective         rank 1, in a loop
    0.5 --timeout     posts "waits", and for what     posts "computes", and in which line
    0.9 --timeout     sets "end"                      reads "end"
    a moment later    reports, exits                  exits

Shapes: no tensors.
"""
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import NoReturn

import torch.distributed as dist

from collectives import Groups, record
from run.faults import Stop, explain, innermost_line, last_words, listed, ranks_of, reason, say

STORE_TIMEOUT_S = 20.0  # a rank that has failed reports alone if torchrun's store has not answered after this time
GRACE_S = 5.0  # this long after it was asked to stop, a rank looks for dead ones: torchrun stops all when one has died


class Watchdog:
    """A thread that ends this rank if it waits too long; of all ranks that wait, one reports which rank is missing.

    The thread polls this rank's flight record (collectives.record). If it has not changed for half the timeout, the
    thread posts to torchrun's store where the rank is: in which call of which group, or in which line. When the first
    rank has waited for nine tenths of the timeout, all ranks that still respond have posted. The lowest one that waits
    then reports the missing ranks: those that have called fewer collectives of its group, or have not posted.

    Unless it has been asked to stop, a rank that makes progress never calls the store; one that does not calls it once
    per poll, however many ranks there are. Only the rank that reports reads the posts.

    store: what collectives.meet returns, cloned, because a blocked call would hold the main thread's connection.
    activity(): what the rank does, in words, such as "in step 3"; it changes when the rank makes progress.
    stop: its `asked_at` and `ending` are read.
    """

    def __init__(self, store: dist.Store, timeout_s: float, activity: Callable[[], str], stop: Stop):
        self.store, self.timeout_s, self.activity, self.stop = store, timeout_s, activity, stop
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        first = self.rank - int(os.environ["LOCAL_RANK"])
        self.siblings = range(first, first + int(os.environ["LOCAL_WORLD_SIZE"]))  # the ranks of the same torchrun
        self.members: dict[str, list[int]] = {}  # axis -> the ranks of this rank's group
        self.poll_s = min(1.0, timeout_s / 40)
        self.reporting = threading.Lock()  # taken for good by the thread, watchdog's or main, that ends this process
        self.store.set(f"process {self.rank}", str(os.getpid()))
        threading.Thread(target=self.run, name="watchdog", daemon=True).start()

    def learn(self, groups: Groups) -> None:
        """From now on messages name the axes of these groups and their ranks; until then all is "world"."""
        self.members = {axis: ranks_of(group) for axis, group in groups.items() if group}

    def axis_of(self, group: str) -> tuple[str, list[int]]:
        """(axis, ranks) of a group by its name in `record`; a group of no axis is taken for all ranks."""
        return (group, self.members[group]) if group in self.members else ("world", list(range(self.ranks)))

    def run(self) -> None:
        """The watchdog thread."""
        try:
            self.watch()
        except Exception as error:
            if not self.stop.ending:
                say(f"warning: rank {self.rank} is no longer watched, as torchrun's store failed: {reason(error)}")

    def watch(self) -> None:
        seen, since, posted = None, time.monotonic(), False  # the last state, when it began, whether it is in the store
        while True:
            time.sleep(self.poll_s)
            if self.stop.ending:
                return
            if self.stop.asked_at and time.monotonic() > self.stop.asked_at + GRACE_S and self.dead():
                self.reporting.acquire()
                os._exit(128 + signal.SIGTERM)  # torchrun sent the signal, to restart all ranks
            now = sum(record.calls.values()), record.waiting, self.activity()
            if now != seen:
                seen, since = now, time.monotonic()
                if posted:
                    self.post("moves")
                posted = False
                continue
            stalled = time.monotonic() - since
            if stalled > 0.5 * self.timeout_s and not posted:
                self.post("waits" if record.waiting else "computes")
                posted = True
            if (record.waiting and stalled > 0.9 * self.timeout_s) or (posted and self.store.check(["end"])):
                self.store.set("end", "")
                self.end_process(stalled)

    def post(self, state: str) -> None:
        """Write to the store where this rank is. state: "waits", "computes", "moves" (again), "lost" (a connection) or
        "failed". A line of "states" has a rank, its state, and the ranks that it has seen die."""
        where = "" if record.waiting else innermost_line()
        self.store.set(f"post {self.rank}", json.dumps(dict(
            call=record.waiting, calls=record.calls, activity=self.activity(), where=where)))
        died = self.dead() if state == "lost" else []
        self.store.append("states", json.dumps([self.rank, state, died]) + "\n")

    def states(self) -> dict[int, tuple[str, list[int]]]:
        """Rank -> (its last state, the ranks that it has seen die), of ranks that have posted and do not move."""
        latest = {}
        for rank, state, died in map(json.loads, self.store.get("states").splitlines()):
            latest[rank] = state, died
        return {rank: found for rank, found in latest.items() if found[0] != "moves"}

    def posts(self, ranks: Collection[int]) -> dict[int, dict]:
        """Rank -> its post, of ranks that have posted."""
        return dict(zip(ranks, map(json.loads, self.store.multi_get([f"post {rank}" for rank in ranks]))))

    def end_process(self, stalled: float) -> NoReturn:
        """Report the missing rank if this is the lowest rank that waits; then end this process with exit code 1."""
        self.reporting.acquire()
        time.sleep(2 * self.poll_s)  # until ranks that are about to post have done so
        states = self.states()
        if self.rank == min(ranks_that("waits", states), default=self.rank):
            where = self.describe(self.rank, self.posts(states)).removeprefix("is in ")
            last_words(f"rank {self.rank} failed {self.activity()}: {where} (after {stalled:.1f} s of --timeout "
                       f"{self.timeout_s:g})", time.time() - stalled)
        else:
            time.sleep(1)  # the rank that reports exits first, so that torchrun names it as the cause
        for rank, pid in self.processes().items():
            if rank not in states and is_alive(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # torchrun would wait 30 s for a stopped process to exit
        os._exit(1)

    def describe(self, rank: int, posts: dict[int, dict], visited: tuple[int, ...] = ()) -> str:
        """What a rank does, and what the first rank does that it waits for. visited: ranks described before it."""
        if rank not in posts:
            return "does not answer"
        post = posts[rank]
        if not post["call"]:
            return f"is in no collective but {post['where'] or post['activity']}"
        _, group, count, peer = post["call"]
        _, ranks = self.axis_of(group)
        missing = [ranks[peer]] if peer is not None else [
            member for member in ranks if member not in posts or posts[member]["calls"].get(group, 0) < count]
        text = f"is in {self.name_call(post['call'])}"
        if not missing:
            return f"{text} has not ended although all ranks have called it"
        text += f" waits for rank {listed(missing)}"
        if missing[0] in visited:
            return f"{text}: they wait for each other"
        return f"{text}, which {self.describe(missing[0], posts, (*visited, rank))}"

    def name_call(self, call: Sequence) -> str:
        operation, group, count, _ = call
        axis, ranks = self.axis_of(group)
        return f"{operation}, call {count} on axis {axis} (ranks {listed(ranks)}),"

    def dead(self) -> list[int]:
        """The siblings whose processes no longer exist, or have ended and wait for torchrun to notice."""
        return [rank for rank, pid in self.processes().items() if not is_alive(pid)]

    def processes(self) -> dict[int, int]:
        """Rank -> process id, of the siblings that have started."""
        return {rank: int(self.store.get(f"process {rank}")) for rank in self.siblings
                if self.store.check([f"process {rank}"])}

    def report(self, error: Exception) -> None:
        """Report why this rank failed, if it is the rank that reports; see the top of this file."""
        self.reporting.acquire()
        lost = record.waiting is not None and may_be_lost_connection(error)
        time.sleep(0.5 if lost else 0.0)  # until torchrun has reaped dead ranks
        self.post("lost" if lost else "failed")
        time.sleep(0.5 if lost else 0.3)  # until all failed ranks have posted
        states = self.states()
        if self.rank != min(ranks_that("failed", states) or ranks_that("lost", states)):
            time.sleep(1)
        elif not lost:
            explain(f"rank {self.rank} failed {self.activity()}: {reason(error)}", error)
        else:
            died = sorted({rank for _, seen in states.values() for rank in seen})
            last_words(f"rank {self.rank} failed {self.activity()}: {self.name_call(record.waiting)} lost its "
                       f"connection: {f'rank {listed(died)} has died' if died else reason(error)}")


def ranks_that(have: str, states: dict[int, tuple[str, list[int]]]) -> list[int]:
    """The ranks with this state, of Watchdog.states()."""
    return [rank for rank, (state, _) in states.items() if state == have]


def may_be_lost_connection(error: Exception) -> bool:
    """Whether a collective raises such an error when a peer has gone: gloo a plain RuntimeError, NCCL a DistError. A
    fault of the GPU, which may also surface while the host waits, is an AcceleratorError."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def is_alive(pid: int) -> bool:
    """Whether a sibling still runs: a process with this id and this process's parent, as ids are used again."""
    try:
        os.kill(pid, 0)  # signal 0 only asks whether the process exists
        if sys.platform != "linux":
            return True
        with open(f"/proc/{pid}/stat") as file:
            state, parent, *_ = file.read().rpartition(")")[2].split()
        return state != "Z" and int(parent) == os.getppid()
    except (ProcessLookupError, PermissionError, FileNotFoundError):
        return False


def fail(activity: str, error: Exception, watchdog: Watchdog | None, stop: Stop) -> NoReturn:
    """Report in one line what failed and end this process at once; a normal exit might block in a collective."""
    def report_alone() -> NoReturn:
        explain(f"rank {os.environ.get('RANK', 0)} failed {activity}: {reason(error)}", error)
        os._exit(1)

    stop.ending = True  # the watchdog stops
    if watchdog:
        threading.Timer(STORE_TIMEOUT_S, report_alone).start()  # the store may be gone, with the machine that served it
        with contextlib.suppress(Exception):
            watchdog.report(error)
            os._exit(1)
    report_alone()
