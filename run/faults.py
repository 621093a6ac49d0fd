"""Faults and stop requests: no finished work is lost, no rank waits for ever, and one line says what happened.

    event                          detected by                                consequence
    SIGTERM, Ctrl-C, --time-limit  any rank: it asks all ranks to stop        all ranks save after this step and exit
    the gradient is not finite     all ranks: they have the same norm         no update; if repeated, error or rewind
    replicas differ                --check-replicas: hashes are gathered      an error that names tensor and ranks
    a rank hangs                   watchdog threads of the ranks that wait    an error that names the missing rank
    a rank dies                    torchrun, and ranks that lose connections  an error; torchrun restarts all ranks
    torchrun dies                  watchdog threads of its ranks              as after SIGTERM

In a step, ranks agree without an additional collective. Every step sums the squared norm of the gradient over all
ranks. The request to stop, and each rank's seconds (a metric), are appended to this number and summed with it.
The device decides whether to skip the update. The host learns all this when it reads the step's results, on a GPU
after it has issued the next step.

Torch ends a wait, but it does not say which rank is missing. After its timeout gloo raises an error on every rank that
waits. NCCL's watchdog aborts the process, and its flight recorder leaves a file per rank, to be compared later. Every
torchrun reports all failed ranks of its own machine. So here a thread on each rank looks a little before that timeout,
and a single rank reports, in one line.

If several ranks fail, the one that asks torchrun's key-value store first reports. A rank that has only lost a
connection asks a moment later, so that the cause is reported.

    after             rank 0, in a collective                 rank 1, in a loop
    0.8 --timeout     asks all ranks where they are           answers with the line that it executes
    a moment later    reports for whom it waits, and exits    exits

Shapes: no tensors but scalars, hashes [tensors] and votes [1 + ranks].
"""
import contextlib
import hashlib
import json
import math
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TextIO

import torch
import torch.distributed as dist

from core.collectives import ALONE, MAX, Call, Group, Groups, all_gather, all_reduce, to_device
from core.config import OUTER_STATE
from run.cli import say, tell_torchrun
from run.ranks import record

REQUESTS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP  # to save and end
SAME_REQUEST_S = 1.0  # within this time a second signal is the same request, forwarded by torchrun
STORE_TIMEOUT_S = 20.0  # a failed rank reports without asking if torchrun's store has not answered after this time;
#                         the store's own timeout is for keys, and does not end a call to a machine that has gone


class Failure(RuntimeError):
    """An error that the run itself has diagnosed: its message suffices, so no traceback is printed."""


# ---- stop requests --------------------------------------------------------------------------------------------------

class Stop:
    """Whether this rank has been asked to save and exit: by a signal, by the time limit, or by torchrun's death."""

    def __init__(self, time_limit_min: float = 0.0, timeout_s: float = 600.0):
        self.deadline = time.monotonic() + 60 * time_limit_min if time_limit_min else math.inf
        self.timeout_s = timeout_s
        self.reason, self.asked_at = "", 0.0
        self.ending = False  # this process has failed or finished: the watchdog stops

    def wanted(self) -> bool:
        if not self.reason and time.monotonic() > self.deadline:
            self.reason = "--time-limit"
        return bool(self.reason)

    def listen(self) -> None:
        """Treat SIGTERM, SIGINT and SIGHUP as requests from now on. Python allows this in the main thread only. The
        handler runs there, too: after the collective in which that thread may wait."""
        for number in REQUESTS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self.on_signal)

    def on_signal(self, number: int, frame: Any = None) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        if self.asked_at and now > self.asked_at + SAME_REQUEST_S:
            os.write(2, f"train.py: rank {os.environ.get('RANK', 0)} ends at once: {name} again\n".encode())
            os._exit(128 + number)
        self.reason, self.asked_at = self.reason or name, self.asked_at or now

    def torchrun_is_gone(self) -> None:
        """Save and end as if asked to. The rank has --timeout to do so: then the kernel ends it, as nobody else would
        end a rank that hangs."""
        self.reason = self.reason or "torchrun is gone"
        signal.alarm(math.ceil(self.timeout_s))


# ---- decisions after every step -------------------------------------------------------------------------------------

class Guard:
    """The decisions that all ranks make alike after every step, from numbers summed together with the gradient's norm.

    world: the ranks over which that norm is summed: of one site, if there are several. sites: the others with the same
    coordinates.
    """

    def __init__(self, stop: Stop, world: Group, device: torch.device, sites: Group = ALONE):
        self.stop, self.world, self.device, self.sites = stop, world, device, sites
        self.stopping = False  # all ranks have agreed to stop
        self.streak: list[tuple[int, range]] = []  # (step, its samples) of the latest consecutive skipped steps
        self.seconds: list[float] = []  # per rank: its time in the last step minus its waits for collectives
        self.began = self.waited = 0.0

    def begin_step(self) -> None:
        self.began, self.waited = time.perf_counter(), record.waited_s

    def votes(self, may_stop: bool = True) -> torch.Tensor:
        """[1 + ranks], to be summed in place: 1 if this rank wants to stop; at 1 + rank, its seconds without waits.
        may_stop: whether all ranks hear of this wish. Else it waits for a step in which they do."""
        votes = torch.zeros(1 + self.world.size)
        votes[0] = float(may_stop and self.stop.wanted())
        votes[1 + self.world.rank] = time.perf_counter() - self.began - (record.waited_s - self.waited)
        return to_device(votes, self.device)

    def after_step(self, step: int, samples: range, *, norm: float, votes: list[float]) -> None:
        """Record a step's results: the gradient's norm, without which it was skipped, and the summed votes."""
        stop_votes, *self.seconds = votes
        self.stopping = self.stopping or stop_votes > 0
        if math.isfinite(norm):
            self.streak.clear()
        else:
            self.streak.append((step, samples))
            warn(f"step {step} was skipped: the norm of its gradient is {norm}", self.world)

    def metrics(self) -> dict[str, Any]:
        """busy_s: seconds per rank in the last step, without waits, as min, median and max; {} for a single rank.

        On GPUs these are seconds of the host, which issues kernels and does not wait for them: a rank is named whose
        data or processor is slow, and not one whose GPU is.
        """
        if len(self.seconds) < 2:
            return {}
        least, most = min(self.seconds), max(self.seconds)
        return dict(busy_s=dict(min=least, median=statistics.median(self.seconds), max=most,
                                slowest_rank=self.seconds.index(most)))

    def agree_to_stop(self) -> bool:
        """Agree on `stopping` outside of a step, by a separate reduction; every rank must call this."""
        wanted = torch.tensor(float(self.stop.wanted()), device=self.device)
        for group in (self.world, self.sites):
            all_reduce(wanted, group, MAX)
        self.stopping = self.stopping or wanted.item() > 0
        return self.stopping


def next_sample(first: int, count: int, left_out: list[list[int]]) -> int:
    """The smallest n >= first with no sample from n to n + count - 1 in a range [start, end) of `left_out`."""
    for start, end in sorted(left_out):
        if first < end and start < first + count:
            first = end
    return first


# ---- replicas -------------------------------------------------------------------------------------------------------

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def hash_of(x: torch.Tensor) -> torch.Tensor:
    """The sum, modulo 2^64, of the elements' bits, read as integers. A flip of a single bit always changes it."""
    return x.detach().reshape(-1).view(INTEGERS[x.element_size()]).sum(dtype=torch.int64)


def replicated_tensors(optimizer, routers: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor, set[str]]]:
    """Yield (name, tensor, axes) of weights, master weights, moments, biases and counters. All ranks of each of these
    axes must have the same bits. The outer optimizer's state is also the same on all sites (diloco.py).

    optimizer, routers: a zero.Optimizer, and the model's ep.Routers"""
    for bucket in optimizer.buckets:
        bucket.unsharding.wait()
        for param in bucket.params:
            start, stop = bucket.offset[param], bucket.offset[param] + param.numel()
            replicated = {"replicate", *param.spec.replicated_axes}
            unsharded = replicated | {param.spec.data_axis}
            shards = bucket.state | {"weight": bucket.weight_shard}
            if not bucket.frees_weights:
                yield param.spec.name, bucket.weights[start:stop], unsharded
                shards = {what: shard for what, shard in shards.items() if shard is not bucket.weight_shard}
            for what, shard in shards.items():
                axes = replicated if bucket.is_sharded else unsharded
                if what in OUTER_STATE:
                    axes = axes | {"sites"}
                yield f"{param.spec.name}/{what}", bucket.within_shard(shard, start, stop), axes
    for router in routers:
        yield router.name, router.bias, {"data", "tp"}
    for what, value in optimizer.extra_state().items():
        yield what, value, {"world"}


def check_replicas(optimizer, routers: list[torch.nn.Module], groups: Groups) -> float:
    """Compare replicated tensors by their hashes. Return the seconds that this took.

    Every rank must call this. It gathers 8 bytes per tensor from every rank of each replicated axis. Raises Failure on
    all ranks of a group that has a difference."""
    began = time.perf_counter()
    hashes: dict[str, dict[str, torch.Tensor]] = {}
    for tensor_name, tensor, axes in replicated_tensors(optimizer, routers):
        tensor_hash = hash_of(tensor).to(optimizer.steps.device)  # offloaded state is on the host
        for axis in axes:
            if groups[axis].size > 1:
                hashes.setdefault(axis, {})[tensor_name] = tensor_hash
    differences = []
    for axis in sorted(hashes):  # all axes, even after a difference: ranks of a different group find none and go on
        names = sorted(hashes[axis])
        stacked = torch.stack([hashes[axis][tensor_name] for tensor_name in names])
        if found := difference(names, stacked, groups[axis]):
            differences.append(f"{found} (axis {axis})")
    if differences:
        raise Failure("; ".join(differences) + ": memory or arithmetic of a rank is faulty; continue from a checkpoint "
                      "(--resume auto)")
    return time.perf_counter() - began


def agree_on(facts: dict[str, Any], world: Group, device: torch.device) -> None:
    """Compare `facts` (name -> any value) over all ranks by their repr. Raises ValueError on all if one differs."""
    digests = [hashlib.blake2b(repr(fact).encode(), digest_size=7).digest() for fact in facts.values()]
    hashes = torch.tensor([int.from_bytes(digest) for digest in digests], device=device)
    if found := difference(list(facts), hashes, world):
        raise ValueError(f"{found}: start every rank with the same")


def difference(names: list[str], hashes: torch.Tensor, group: Group) -> str:
    """A sentence that names what differs between ranks, and the ranks; "" if nothing does. hashes: int64 [names]."""
    gathered = hashes.new_empty(group.size * len(names))
    all_gather(gathered, hashes, group)
    of_ranks = gathered.view(group.size, len(names))
    differ = (of_ranks != of_ranks[0]).any(0).nonzero().flatten().tolist()
    if not differ:
        return ""
    ranks, found = ranks_of(group), of_ranks[:, differ[0]].tolist()
    [(most_common, count)] = Counter(found).most_common(1)
    what = names[differ[0]] + (f" (and {len(differ) - 1} more)" if len(differ) > 1 else "")
    if 2 * count <= len(ranks):
        return f"{what}: ranks {listed(ranks)} have different values"
    odd = [rank for rank, its_hash in zip(ranks, found) if its_hash != most_common]
    equal = [rank for rank in ranks if rank not in odd]
    return f"{what}: rank {listed(odd)} has different values from {listed(equal)}"


def ranks_of(group: Group) -> list[int]:
    return dist.get_process_group_ranks(group.process_group)


def listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


# ---- the watchdog ---------------------------------------------------------------------------------------------------

class Watchdog:
    """A thread that polls this rank's flight record (run/ranks.py), and ends the rank if it waits too long, or if
    another rank reports; see the top of this file.

    store: a clone of the store that `meet` of run/ranks.py returns; a call that blocks would hold the main thread's
        connection
    activity(): the activity of the rank in words, such as "in step 3"; it changes when the rank makes progress
    stop: its `ending` is read, and it is told when torchrun, the parent of this process, has died
    """

    def __init__(self, store: dist.Store, timeout_s: float, activity: Callable[[], str], stop: Stop):
        self.store, self.timeout_s, self.activity, self.stop = store, timeout_s, activity, stop
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.torchrun = os.getppid()
        self.members: dict[str, list[int]] = {}  # axis -> the ranks of this rank's group; all, if it is not here
        # All ranks together call the store at most 10,000 times per second.
        self.poll_s = max(min(1.0, timeout_s / 40), self.ranks / 10_000)
        self.seen, self.since = None, time.monotonic()  # the last state, and when it began
        threading.Thread(target=self.watch, name="watchdog", daemon=True).start()

    def learn(self, groups: Groups) -> None:
        """Name the ranks of these groups in messages from now on."""
        self.members = {axis: ranks_of(group) for axis, group in groups.items() if group.size > 1}

    def watch(self) -> None:
        """The watchdog thread."""
        while True:
            time.sleep(self.poll_s)
            if self.stop.ending:
                return
            if os.getppid() != self.torchrun:
                return self.stop.torchrun_is_gone()
            try:
                self.poll()
            except Exception:  # torchrun's store has gone, so this rank reports without asking
                self.store = dist.HashStore()

    def poll(self) -> None:
        call = self.waits_for()
        state = sum(record.calls.values()), call, self.activity()
        if state != self.seen:
            self.seen, self.since = state, time.monotonic()
        if call and time.monotonic() - self.since > 0.8 * self.timeout_s and self.is_first_to_report():
            self.answer(call)
            time.sleep(3 * self.poll_s)  # until the other ranks have answered
            problem, stalled_s = self.describe(call, self.answers()), time.monotonic() - self.since
            report(self.activity(), Failure(f"{problem} (after {stalled_s:.1f} s of --timeout {self.timeout_s:g})"))
        if self.store.check(["reports"]):
            self.answer(call)
            time.sleep(6 * self.poll_s)  # until the rank that reports has ended: torchrun names the first as the cause
            os._exit(1)

    def waits_for(self) -> Call | None:
        """The call that this rank waits for, if it has stalled. NCCL's calls return at once, and the host then blocks
        in a later launch until its GPU goes on. So in a step on GPUs it is the last call, or an earlier one."""
        in_launch = torch.cuda.is_initialized() and self.activity().startswith("in step")
        return record.waiting_for or (record.last if in_launch else None)

    def is_first_to_report(self) -> bool:
        return self.store.add("reports", 1) == 1

    def answer(self, call: Call | None) -> None:
        """Append to the store whether this rank waits for a call, where it is, in words, and how many calls it has made
        on each axis."""
        where = f"{self.name(call)}, or later" if call else "no collective but"  # later: with NCCL, in a launch
        answer = dict(waits=bool(call), calls=record.calls, where=f"{where} {innermost_line()}")
        self.store.append("answers", json.dumps([self.rank, answer]) + "\n")

    def answers(self) -> dict[int, dict[str, Any]]:
        """Rank -> its answer."""
        return dict(map(json.loads, self.store.get("answers").splitlines()))

    def describe(self, call: Call, answers: dict[int, dict[str, Any]]) -> str:
        """Say which ranks are missing in the call that this rank waits for, and where the first of them is."""
        missing = self.missing_in(call, answers)
        if missing:
            does = f"is in {answers[missing[0]]['where']}" if missing[0] in answers else "does not answer"
            return f"{self.name(call)}, waits for rank {listed(missing)}, which {does}"
        ahead = [rank for rank, made in self.calls_made(call, answers).items() if made > call.number]
        if ahead:  # this rank is the one that is missing, in a later call
            return f"{self.name(call)}, while rank {listed(ahead)} has called more there"
        return f"{self.name(call)}, has not ended although all ranks have called it"

    def missing_in(self, call: Call, answers: dict[int, dict[str, Any]]) -> list[int]:
        """The ranks that do not answer. If all answer, the ranks that compute. If all wait, the peer of a send or
        receive, or the ranks of the call's group that have not made this call."""
        silent = [rank for rank in range(self.ranks) if rank not in answers]
        if silent:
            return silent
        computing = [rank for rank in range(self.ranks) if not answers[rank]["waits"]]
        if computing:
            return computing
        if call.peer is not None:
            return [self.group_of(call)[call.peer]]
        return [rank for rank, made in self.calls_made(call, answers).items() if made < call.number]

    def calls_made(self, call: Call, answers: dict[int, dict[str, Any]]) -> dict[int, int]:
        """Rank of the call's group -> how many calls it has made there."""
        return {rank: answers[rank]["calls"].get(call.axis, 0) for rank in self.group_of(call)}

    def group_of(self, call: Call) -> list[int]:
        return self.members.get(call.axis, list(range(self.ranks)))

    def name(self, call: Call) -> str:
        return f"{call.operation}, call {call.number} on axis {call.axis} (ranks {listed(self.group_of(call))})"


def may_be_lost_connection(error: Exception) -> bool:
    """Whether a collective raises such an error when a peer has gone: gloo a plain RuntimeError, NCCL a DistError. A
    fault of the GPU, which may also surface while the host waits, is an AcceleratorError."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def fail(activity: str, error: Exception, watchdog: Watchdog | None, stop: Stop) -> NoReturn:
    """Report what failed, unless another rank does, and end this process; see the top of this file."""
    stop.ending = True  # the watchdog stops
    if watchdog:
        with contextlib.suppress(Exception):
            # The store may be gone, with the machine that served it. If no memory is left for a thread, this rank
            # reports without asking.
            threading.Timer(STORE_TIMEOUT_S, report, (activity, error)).start()
            if record.waiting_for and may_be_lost_connection(error):
                time.sleep(1)  # until the rank that failed by itself has reported
                error = Failure(f"{watchdog.name(record.waiting_for)}, lost its connection: {reason(error)}")
            if not watchdog.is_first_to_report():
                time.sleep(1)  # until the rank that reports has ended: torchrun names the first as the cause
                os._exit(1)
    report(activity, error)


def report(activity: str, error: Exception) -> NoReturn:
    """Say why this rank failed, with a traceback if a line does not suffice, in torchrun's report too, and end this
    process at once: a normal exit might block in a collective."""
    if not isinstance(error, Failure | TimeoutError | dist.DistError):
        traceback.print_exception(error)
    line = f"rank {os.environ.get('RANK', 0)} failed {activity}: {reason(error)}"
    say(line)
    tell_torchrun(f"train.py: {line}")
    os._exit(1)


# ---- messages -------------------------------------------------------------------------------------------------------

def reason(error: Exception) -> str:
    """The first line of an error's message, or its type if there is no message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def innermost_line() -> str:
    """The innermost line of the project's files that the main thread executes now, as words."""
    frame = sys._current_frames()[threading.main_thread().ident]
    folder = os.path.dirname(os.path.dirname(__file__))
    while frame.f_back and not frame.f_code.co_filename.startswith(folder):
        frame = frame.f_back
    return f"in {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}, {frame.f_code.co_name}"


def warn(line: str, world: Group) -> None:
    if world.rank == 0:
        say(f"warning: {line}")


class Tolerant:
    """A stream that drops text which it cannot write, because its reader is gone or its disk is full."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.stream, attribute)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.flush()
