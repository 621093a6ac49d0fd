"""What happens when something fails: nothing is lost, nobody waits for ever, one line says what happened.

    what                        who notices                                    what follows
    SIGTERM, Ctrl-C, a limit    the rank that is told                          all ranks save after this step and end
    a gradient, not finite      all ranks, by the same norm                    no update; if many, an error or a rewind
    a gradient that spikes      all ranks, by the same norm and statistics     the same, with --skip-spikes
    replicas that differ        --check-replicas: hashes, one reduction        an error that names tensor and ranks
    a slow rank                 all ranks, by the seconds of each              a warning that names it
    a rank that waits           its watchdog, a thread                         an error that names whom it waits for
    a rank that dies            the ranks that were connected with it          an error; torchrun starts all anew

Ranks agree without any collective of their own: the request to stop and each rank's seconds are further elements of the
vector whose first is the squared norm of the gradient, which every step sums over all ranks anyway.

When ranks fail, only one speaks: the lowest of those that failed by themselves, else the lowest of those that lost a
connection or waited too long. They find that out through the store by which torchrun introduced them to each other.
Nothing is written there while all is well.

Shapes: no tensors but scalars, hashes [tensors] and ballots [1 + ranks].
"""
import contextlib
import hashlib
import json
import math
import os
import select
import signal
import socket
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
from tqdm import tqdm

import config
from collectives import MAX, Group, Groups, all_gather, all_reduce, name, process_group, rank, record, size
from ep import Router
from zero import Optimizer

SAME_REQUEST_S = 1.0  # a signal to all processes reaches a rank twice: by itself, and by torchrun
SLOW, SLOW_STEPS = 1.5, 10  # a rank is slow that takes so many times the median, for so many steps
HORIZON, SETTLED = 100, 20  # steps over which norms are averaged, and that it takes before a spike is one


class Failure(RuntimeError):
    """What the run found out about itself: its message is all that needs to be said."""


# ---- stop requests --------------------------------------------------------------------------------------------------

class Stop:
    """Whether this rank has been asked to save and end: by a signal, by the time limit, or by torchrun's death.

    Under a torchrun that has noticed the death of another rank, SIGTERM is no request: see Watchdog.
    A thread reads signals from a pipe, as the main thread may be inside a collective, where Python handles none.
    """

    def __init__(self, time_limit_min: float = 0.0):
        self.deadline = time.monotonic() + 60 * time_limit_min if time_limit_min else math.inf
        self.reason, self.asked_at = "", 0.0
        self.ending = False  # this process fails, or is done

    def wanted(self) -> bool:
        if not self.reason and time.monotonic() > self.deadline:
            self.reason = "--time-limit"
        return bool(self.reason)

    def listen(self) -> None:
        """From now on signals are requests. Call it from the main thread."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, lambda *_: None)
        threading.Thread(target=self.hear, args=(reading, os.getppid()), name="signals", daemon=True).start()

    def hear(self, pipe: int, parent: int) -> None:
        """What the thread does. A rank whose torchrun was killed would be nobody's child, and train on."""
        while True:
            if select.select([pipe], [], [], 1.0)[0]:
                for number in os.read(pipe, 64):
                    self.on_signal(signal.Signals(number))
            elif "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != parent and not self.reason:
                self.reason = "torchrun is gone"

    def on_signal(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self.asked_at and now > self.asked_at + SAME_REQUEST_S:
            say(f"rank {os.environ.get('RANK', 0)} ends at once: {number.name} again")
            os._exit(128 + number)
        self.reason, self.asked_at = self.reason or number.name, self.asked_at or now


# ---- what every step asks and answers -------------------------------------------------------------------------------

class Guard:
    """The decisions that all ranks take alike after every step, from what the norm's reduction has brought them.

    spikes: a norm that is so many deviations above its mean is a spike, 0: none is. norms: [count, mean, variance] of
    the norms of the steps that were taken, averaged over about HORIZON steps; changed in place, part of checkpoints.
    """

    def __init__(self, stop: Stop, world: Group, device: torch.device, norms: list[float], spikes: float = 0.0):
        self.stop, self.world, self.device, self.norms, self.spikes = stop, world, device, norms, spikes
        self.stopping = False  # all ranks have agreed to
        self.streak: list[tuple[int, int]] = []  # (step, its first sample) of the skipped steps in a row
        self.seconds: list[float] = []  # of each rank in the last step, without its waits
        self.slow_rank, self.slow_steps = -1, 0
        self.began = self.waited = 0.0

    def begin_step(self) -> None:
        self.began, self.waited = time.perf_counter(), record.waited_s

    def limit(self) -> float:
        """A step with a norm from here on is skipped."""
        count, mean, variance = self.norms
        return mean + self.spikes * math.sqrt(variance) if self.spikes and count >= SETTLED else math.inf

    def ballot(self) -> torch.Tensor:
        """[1 + ranks]: whether this rank wants to stop; its seconds in this step, without waits, and zeros."""
        self.votes = torch.zeros(1 + size(self.world))
        self.votes[0] = float(self.stop.wanted())
        self.votes[1 + rank(self.world)] = time.perf_counter() - self.began - (record.waited_s - self.waited)
        self.votes = self.votes.to(self.device, non_blocking=True)
        return self.votes

    def after_step(self, step: int, first_sample: int, norm: float, limit: float) -> None:
        """Count the ballots; decide as the optimizer did whether the step was taken."""
        stop, *self.seconds = self.votes.tolist()
        self.stopping = stop > 0
        self.find_slow_rank(step)
        if norm < limit:
            self.streak.clear()
            self.add(norm)
            return
        self.streak.append((step, first_sample))
        usual = f", the mean {self.norms[1]:.4g}" if math.isfinite(norm) else ""
        warn(f"step {step} was skipped: the norm of its gradient is {norm:.4g}{usual}", self.world)

    def add(self, norm: float) -> None:
        count, mean, variance = self.norms
        weight = 1 / min(count + 1, HORIZON)
        difference = norm - mean
        self.norms[:] = count + 1, mean + weight * difference, (1 - weight) * (variance + weight * difference**2)

    def find_slow_rank(self, step: int) -> None:
        median, most = statistics.median(self.seconds), max(self.seconds)
        slowest = self.seconds.index(most) if most > SLOW * median else -1
        self.slow_steps = self.slow_steps + 1 if slowest == self.slow_rank else 1
        self.slow_rank = slowest
        if slowest >= 0 and self.slow_steps == SLOW_STEPS:
            warn(f"rank {slowest} is slow: without its waits it took {most:.3f} s in step {step}, the median rank "
                 f"{median:.3f} s, and so for {SLOW_STEPS} steps", self.world)

    def metrics(self) -> dict[str, Any]:
        """busy_s, in a run of several ranks: seconds of a rank in the last step, without its waits."""
        if len(self.seconds) < 2:
            return {}
        least, most = min(self.seconds), max(self.seconds)
        return dict(busy_s=dict(min=least, median=statistics.median(self.seconds), max=most,
                                slowest_rank=self.seconds.index(most)))

    def agree_to_stop(self) -> bool:
        """The same, outside of a step, by a reduction of its own."""
        wanted = torch.tensor(float(self.stop.wanted()), device=self.device)
        all_reduce(wanted, self.world, MAX)
        self.stopping = self.stopping or wanted.item() > 0
        return self.stopping


def next_sample(first: int, count: int, left_out: list[list[int]]) -> int:
    """The number of the first sample from `first` on, of which and the next count - 1 none is left out."""
    for start, end in sorted(left_out):
        if first < end and start < first + count:
            first = end
    return first


# ---- replicas -------------------------------------------------------------------------------------------------------

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def hash_of(x: torch.Tensor) -> torch.Tensor:
    """The sum of the elements' bits, read as integers, modulo 2^64: another one if any one bit is another one."""
    return x.detach().reshape(-1).view(INTEGERS[x.element_size()]).sum(dtype=torch.int64)


def replicated_tensors(optimizer: Optimizer, routers: list[Router]) -> Iterator[tuple[str, torch.Tensor, set[str]]]:
    """(name, tensor, axes) of weights, master weights, moments, biases and counters: all ranks of these axes have the
    same bits."""
    for bucket in optimizer.buckets:
        bucket.unsharding.wait()
        for param in bucket.params:
            start, stop = bucket.offset[param], bucket.offset[param] + param.numel()
            alike, data = {"replicate", *param.spec.replicated_axes}, {param.spec.data_axis}
            shards = bucket.state | {"weight": bucket.weight_shard}
            if bucket.level < 3:
                yield param.spec.name, bucket.weights[start:stop], alike | data
                shards = {what: shard for what, shard in shards.items() if shard is not bucket.weight_shard}
            for what, shard in shards.items():
                axes = alike | data if bucket.level == 0 else alike
                yield f"{param.spec.name}/{what}", bucket.within_shard(shard, start, stop), axes
    for router in routers:
        yield router.name, router.bias, {"data", "tp"}
    for what, value in optimizer.extra_state().items():
        yield what, value, {"world"}


def check_replicas(optimizer: Optimizer, routers: list[Router], groups: Groups) -> float:
    """Raises Failure, on the ranks concerned, if tensors that replicas must hold alike have different hashes; else
    returns the seconds that this took. One reduction of 16 bytes per tensor on every axis that has replicas."""
    began = time.perf_counter()
    hashes: dict[str, dict[str, torch.Tensor]] = {}
    for tensor_name, tensor, axes in replicated_tensors(optimizer, routers):
        found = hash_of(tensor)
        for axis in axes:
            if size(groups[axis]) > 1:
                hashes.setdefault(axis, {})[tensor_name] = found
    differences = []
    for axis in sorted(hashes):  # every one, though the first may differ: other ranks take part in the next
        names = sorted(hashes[axis])
        numbers = torch.stack([hashes[axis][tensor_name] for tensor_name in names])
        if found := difference(names, numbers, groups[axis]):
            differences.append(f"{found} (axis {axis})")
    if differences:
        raise Failure("; ".join(differences) + ": memory or arithmetic of a rank is faulty; continue from a checkpoint "
                      "(--resume auto)")
    return time.perf_counter() - began


def agree_on(facts: dict[str, Any], world: Group, device: torch.device) -> None:
    """Raises ValueError on all ranks if one of these facts is not the same on all of them."""
    hashes = [hashlib.blake2b(repr(fact).encode(), digest_size=7).digest() for fact in facts.values()]
    numbers = torch.tensor([int.from_bytes(found) for found in hashes], device=device)
    if found := difference(list(facts), numbers, world):
        raise ValueError(f"{found}: start every rank with the same")


def difference(names: list[str], hashes: torch.Tensor, group: Group) -> str:
    """What differs between ranks, in words, if anything does. hashes: [names] of this rank."""
    extremes = torch.cat((hashes, ~hashes))  # ~x falls where x rises: the largest of these is that of the least
    all_reduce(extremes, group, MAX)
    differ = (extremes[:len(names)] != ~extremes[len(names):]).nonzero().flatten().tolist()
    if not differ:
        return ""
    of_ranks = hashes.new_empty(size(group))
    all_gather(of_ranks, hashes[differ[:1]], group)
    ranks, found = ranks_of(group), of_ranks.tolist()
    [(usual, count), *_] = Counter(found).most_common()
    odd = [number for number, this in zip(ranks, found) if this != usual]
    more = f" (and {len(differ) - 1} more)" if len(differ) > 1 else ""
    if 2 * count <= len(ranks):
        return f"{names[differ[0]]}{more}: ranks {listed(ranks)} have different values"
    others = [number for number in ranks if number not in odd]
    return f"{names[differ[0]]}{more}: rank {listed(odd)} has other values than {listed(others)}"


def ranks_of(group: Group) -> list[int]:
    return dist.get_process_group_ranks(process_group(group))


def listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


# ---- who is missing -------------------------------------------------------------------------------------------------

class Watchdog:
    """A thread that ends a rank which waits too long, and lets one rank of all say for whom.

    It looks at this rank's flight record. If that has not changed for half the timeout, it posts to the store of
    torchrun's agent where the rank stands: in which call of which group, or in which line. So when the first rank has
    waited for nine tenths of it, all ranks that still answer have posted, and the lowest that waits knows who is
    missing: those that have called fewer collectives of its group, or have not posted.
    """

    def __init__(self, timeout_s: float, activity: Callable[[], str], stop: Stop):
        self.timeout_s, self.activity, self.stop = timeout_s, activity, stop
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.axes: dict[str, tuple[str, list[int]]] = {}  # name(group) -> (axis, its ranks)
        self.step_s = min(1.0, timeout_s / 40)
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                              wait_for_workers=False)  # a connection of its own: another thread may hold torch's
        self.store = dist.PrefixStore(f"faults/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        self.store.set(f"process {self.rank}", json.dumps([socket.gethostname(), os.getpid()]))
        threading.Thread(target=self.watch, name="watchdog", daemon=True).start()

    def learn(self, groups: Groups) -> None:
        """The names of axes."""
        self.axes = {name(group): (axis, ranks_of(group)) for axis, group in reversed(groups.items()) if group}

    def watch(self) -> None:
        """What the thread does."""
        seen, since, posted = None, time.monotonic(), False
        while not self.stop.ending:
            time.sleep(self.step_s)
            if self.stop.asked_at and time.monotonic() > self.stop.asked_at + 5 and self.dead():
                os._exit(128 + signal.SIGTERM)  # torchrun ends what is left, to start all anew
            now = sum(record.calls.values()), record.waiting, self.activity()
            if now != seen:
                seen, since = now, time.monotonic()
                if posted:
                    self.store.delete_key(f"post {self.rank}")
                posted = False
                continue
            stalled = time.monotonic() - since
            if stalled > 0.5 * self.timeout_s and not posted:
                self.post("waits" if record.waiting else "computes")
                posted = True
            if (record.waiting and stalled > 0.9 * self.timeout_s) or (posted and self.store.check(["end"])):
                self.store.set("end", "")
                self.end(stalled)

    def post(self, state: str) -> None:
        """state: waits, computes, lost (a connection) or failed."""
        where = "" if record.waiting else innermost_line()
        self.store.set(f"post {self.rank}", json.dumps(dict(
            state=state, call=record.waiting, calls=record.calls, activity=self.activity(), where=where)))

    def posts(self) -> dict[int, dict]:
        """Of all ranks that have posted."""
        found = [number for number in range(self.ranks) if self.store.check([f"post {number}"])]
        return {number: json.loads(self.store.get(f"post {number}")) for number in found}

    def end(self, stalled: float) -> NoReturn:
        time.sleep(2 * self.step_s)  # for the ranks that are about to post
        posts = self.posts()
        if self.rank == min((number for number, post in posts.items() if post["state"] == "waits"), default=self.rank):
            last_words(f"rank {self.rank} failed {self.activity()}: {self.describe(self.rank, posts)} (after "
                       f"{stalled:.1f} s of --timeout {self.timeout_s:g})", time.time() - stalled)
        else:
            time.sleep(1)  # the rank that speaks ends first, so torchrun names it
        self.kill_silent_ranks(posts)
        os._exit(1)

    def describe(self, number: int, posts: dict[int, dict], told: tuple[int, ...] = ()) -> str:
        """Where a rank stands and, if it waits for others, where these stand."""
        if number not in posts:
            return "does not answer"
        post = posts[number]
        if not post["call"]:
            return f"is in no collective but {post['where'] or post['activity']}"
        operation, group, count, peer = post["call"]
        axis, ranks = self.axes.get(group, ("world", list(range(self.ranks))))
        missing = [ranks[peer]] if peer is not None else [
            other for other in ranks if other not in posts or posts[other]["calls"].get(group, 0) < count]
        text = f"{operation}, call {count} on axis {axis} (ranks {listed(ranks)}),"
        if not missing:
            return f"{text} has not ended although all ranks have called it"
        text += f" waits for rank {listed(missing)}"
        if missing[0] in told:
            return f"{text}: they wait for each other"
        return f"{text}, which {'is in ' if posts.get(missing[0], {}).get('call') else ''}" \
               f"{self.describe(missing[0], posts, (*told, number))}"

    def kill_silent_ranks(self, posts: dict[int, dict]) -> None:
        """Of this machine. A process that is stopped would hold up torchrun for another 30 seconds."""
        for number, process in self.processes():
            if number not in posts:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def dead(self) -> list[int]:
        """The ranks of this machine whose processes do not exist any more."""
        found = []
        for number, process in self.processes():
            try:
                os.kill(process, 0)
            except ProcessLookupError:
                found.append(number)
        return found

    def processes(self) -> Iterator[tuple[int, int]]:
        """(rank, process) of the ranks of this machine that have started."""
        for number in range(self.ranks):
            if self.store.check([f"process {number}"]):
                host, process = json.loads(self.store.get(f"process {number}"))
                if host == socket.gethostname():
                    yield number, process

    def fail(self, error: Exception) -> None:
        """Say why this rank failed, unless another rank has more to say."""
        lost = record.waiting is not None  # an exception of a collective: other ranks have gone
        self.post("lost" if lost else "failed")
        time.sleep(1.0 if lost else 0.3)  # for the others to post, and for torchrun to notice that a process is gone
        posts = self.posts()
        failed = [number for number, post in posts.items() if post["state"] == "failed"]
        if self.rank != min(failed or posts):
            time.sleep(1)
        elif failed:
            explain(f"rank {self.rank} failed {self.activity()}: {reason(error)}", error)
        else:
            gone = self.dead()
            operation, group, count, _ = record.waiting
            axis, ranks = self.axes.get(group, ("world", list(range(self.ranks))))
            last_words(f"rank {self.rank} failed {self.activity()}: {operation}, call {count} on axis {axis} (ranks "
                       f"{listed(ranks)}), lost its connection: "
                       + (f"rank {listed(gone)} has died" if gone else reason(error)))


def innermost_line() -> str:
    """The line of the project that the main thread executes."""
    frame = sys._current_frames()[threading.main_thread().ident]
    folder = os.path.dirname(os.path.abspath(__file__))
    while frame.f_back and not frame.f_code.co_filename.startswith(folder):
        frame = frame.f_back
    return f"in {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}, {frame.f_code.co_name}"


# ---- what is said ---------------------------------------------------------------------------------------------------

def fail(activity: str, error: Exception, watchdog: Watchdog | None, stop: Stop) -> NoReturn:
    """Say in one line what failed, and end this process at once: other ranks may be waiting in a collective."""
    stop.ending = True
    number = os.environ.get("RANK", "0")
    try:
        if watchdog:
            watchdog.fail(error)
    except Exception:  # the store is gone with its rank
        watchdog = None
    if not watchdog:
        explain(f"rank {number} failed {activity}: {reason(error)}", error)
    os._exit(1)


def reason(error: Exception) -> str:
    """In one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def explain(line: str, error: Exception) -> None:
    """The traceback, unless the error explains itself, and the line."""
    if not isinstance(error, Failure):
        traceback.print_exception(error)
    last_words(line)


def last_words(line: str, when: float | None = None) -> None:
    """Print the line, and give it to torchrun's report. when: it happened; torchrun takes the first for the cause."""
    say(line)
    config.tell_torchrun(f"train.py: {line}", when or time.time())


def say(line: str) -> None:
    tqdm.write(f"train.py: {line}", file=sys.stderr)  # not into a progress bar
    sys.stderr.flush()


def warn(line: str, world: Group) -> None:
    if rank(world) == 0:
        say(f"warning: {line}")


class Tolerant:
    """A stream whose reader may be gone or whose disk may be full: what cannot be written is dropped."""

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
