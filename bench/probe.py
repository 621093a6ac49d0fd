"""Measure the network: latency and bandwidth of every collective on every axis of a grid, and slow
pairs of ranks.

    torchrun --nproc_per_node=4 -m bench.probe                     the node, and the network between nodes
    torchrun --nproc_per_node=8 -m bench.probe --tp 2 --pp 2       also the axes of this grid: train.py's flags give it
    torchrun --nproc_per_node=8 -m bench.probe --out cluster.json  a machine for `python -m plan --machine cluster.json`

The terms are those of nccl-tests. The payload is the larger of a rank's input and output. Algorithm
bandwidth is payload / time. Bus bandwidth is algorithm bandwidth times a factor (FACTORS below).
With the best algorithm it equals the bytes that a rank sends per second.
"""
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from math import log2
from typing import NamedTuple

import torch
import torch.distributed as dist

from core import collectives, config
from core.collectives import Group
from core.config import need, setting
from core.groups import build_groups
from learn import written_out as ring
from plan import machines
from run import cli
from run.device import choose_device, memory_of_device

AXES = "tp", "cp", "ep", "edp", "dp", "data", "replicate", "pp"
SECONDS = {"cpu": 10, "cuda": 90}  # for all collectives; three payloads are measured anyway
TURNS, PAIR_BYTES, SLOW_PAIR = 7, 1 << 20, 2.0  # a pair is slow if it takes this many times the median of its kind
HOST_BYTES = 1 << 26  # more than a core's share of the caches
FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all", "scatter", "gather"), lambda n: (n - 1) / n),
    **dict.fromkeys(("broadcast", "reduce", "send"), lambda n: 1.0)}  # send: to the next rank of a ring


class Sample(NamedTuple):
    """The seconds of a collective of `nbytes` payload: median, 10th and 90th percentile of the turns."""
    nbytes: int
    seconds: float
    low: float
    high: float


class Fit(NamedTuple):
    """seconds = latency + bus bytes / bandwidth. error: the median of |fitted / measured - 1|."""
    latency: float
    bandwidth: float
    error: float


def prepare(op: str, nbytes: int, group: Group, device: torch.device) -> tuple[int, Callable[[], None]]:
    """Return (payload in bytes, a function that runs the collective once). The payload is `nbytes`,
    rounded to equal shards."""
    n, first = group.size, group.rank == 0
    count = max(1, nbytes // (4 * n))  # fp32 numbers per shard
    full, received, shard = (torch.zeros(elements, device=device) for elements in (n * count, n * count, count))
    parts, splits = list(full.split(count)) if first else None, [count] * n
    calls = {"all_reduce": lambda: collectives.all_reduce(full, group),
             "reduce_scatter": lambda: collectives.reduce_scatter(shard, full, group),
             "all_gather": lambda: collectives.all_gather(full, shard, group),
             "all_to_all": lambda: collectives.all_to_all(received, full, splits, splits, group),
             "broadcast": lambda: dist.broadcast(full, group=group.process_group, group_src=0),
             "reduce": lambda: dist.reduce(full, group=group.process_group, group_dst=0),
             "scatter": lambda: dist.scatter(shard, parts, group=group.process_group, group_src=0),
             "gather": lambda: dist.gather(shard, parts, group=group.process_group, group_dst=0),
             "send": lambda: collectives.shift(received, full, group).wait()}
    return full.nbytes, calls[op]


def slowest(seconds: list[float], device: torch.device) -> list[float]:
    """Return the maximum over all ranks of each element, so that all ranks decide alike."""
    times = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def time_turns(call: Callable[[], None], device: torch.device) -> list[float]:
    """Return the seconds of a call in each turn, on the slowest rank. A turn repeats short calls
    for about 3 ms."""
    def turn(repeats: int) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / repeats

    turn(1)
    estimate, = slowest([turn(1)], device)
    repeats = min(20, max(1, int(0.003 / estimate)))
    return slowest([turn(repeats) for _ in range(TURNS)], device)


def payloads(most_bytes: int) -> list[int]:
    """Return the payloads to measure: 1 kB, 256 kB and 4 MB always, then the other 4**k kB that
    memory allows."""
    first, every = [1 << 10, 1 << 18, 1 << 22], [1 << k for k in range(10, 64, 2)]
    return first + [nbytes for nbytes in every if nbytes not in first and nbytes <= most_bytes]


def measure_op(op: str, group: Group, device: torch.device, most_bytes: int, limit_s: float) -> list[Sample]:
    """Measure one sample per payload, while time allows. Every rank measures the same payloads."""
    samples, began, rate = [], time.perf_counter(), 0.0
    for nbytes in payloads(most_bytes):
        spent, = slowest([time.perf_counter() - began], device)
        if len(samples) >= 3 and spent + nbytes / rate * (TURNS + 2) > limit_s:
            break
        payload, call = prepare(op, nbytes, group, device)
        times = sorted(time_turns(call, device))
        low, high = times[len(times) // 10], times[len(times) * 9 // 10]
        samples.append(Sample(payload, statistics.median(times), low, high))
        rate = max(rate, payload / samples[-1].seconds)
    return sorted(samples)


def fit(samples: list[Sample], factor: float) -> Fit:
    """Fit latency and bandwidth by least squares of relative errors, so that every payload has the
    same weight.

    Neither becomes negative.
    """
    seconds = torch.tensor([sample.seconds for sample in samples], dtype=torch.float64)
    bus_bytes = torch.tensor([sample.nbytes * factor for sample in samples], dtype=torch.float64)
    ones = torch.ones_like(seconds)
    latency, per_byte = torch.linalg.lstsq(torch.stack((ones, bus_bytes), 1) / seconds[:, None], ones).solution.tolist()
    if latency < 0:
        rates = bus_bytes / seconds
        latency, per_byte = 0.0, (rates.sum() / rates.square().sum()).item()
    if per_byte <= 0:  # time does not grow with the payload: all of it is latency
        latency, per_byte = seconds.median().item(), (seconds / bus_bytes).min().item()
    errors = (latency + bus_bytes * per_byte) / seconds - 1
    return Fit(latency, 1 / per_byte, errors.abs().median().item())


def largest_payload(device: torch.device, local_ranks: int) -> int:
    """Return an eighth of the least free memory of all ranks.

    It must hold the payload, the received data, and as much again for the backend.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // local_ranks
    return int(-slowest([-free / 8], device)[0])  # the least of all ranks


def probed_groups(settings: config.Config, local_ranks: int) -> dict[str, Group]:
    """Return this rank's groups from the innermost outward.

    They are the node, the network (ranks with the same place in every node), and the axes of the
    grid. A group that several of them share is listed once, as in "node, dp".
    """
    nodes, groups = torch.arange(dist.get_world_size()).view(-1, local_ranks), {}
    for level, members in ("node", nodes), ("network", nodes.T):
        if members.shape[1] > 1:
            groups[level] = Group(level, dist.new_subgroups_by_enumeration(members.tolist())[0])
    axes = build_groups(settings.grid, settings.model)
    groups |= {axis: axes[axis] for axis in AXES if axes[axis].size > 1}
    names = {}
    for level, group in groups.items():
        names.setdefault(tuple(dist.get_process_group_ranks(group.process_group)), []).append(level)
    inward_out = sorted(names, key=lambda ranks: (ranks[-1] - ranks[0], len(ranks)))
    return {", ".join(names[ranks]): groups[names[ranks][0]] for ranks in inward_out}


def curve(samples: list[Sample], factor: float, top: float) -> str:
    """Draw one character per payload of 4**k kB. Each height is twice the one below. The highest is
    `top` bytes/s."""
    heights = {round(log2(nbytes / 1024) / 2): round(7 + log2(nbytes * factor / seconds / top))
               for nbytes, seconds, *_ in samples}
    return "".join("▁▂▃▄▅▆▇█"[min(7, max(0, heights[k]))] if k in heights else "·" for k in range(max(heights) + 1))


def describe(level: str, group: Group, measured: dict[str, list[Sample]], fits: dict[str, Fit]) -> list[str]:
    """Return a line per collective and payload, then a line per collective with its fit and its
    curve."""
    n = group.size
    ranks = " ".join(map(str, dist.get_process_group_ranks(group.process_group)))
    lines = [f"{level}: {n} ranks ({ranks}); groups at once: {dist.get_world_size() // n}", ""]
    lines.append(f"{'collective':16}{'bytes':>14}{'us':>12}{'10% to 90%, us':>22}{'algorithm GB/s':>16}"
                 f"{'bus GB/s':>10}")
    for op, samples in measured.items():
        for nbytes, seconds, low, high in samples:
            spread = f"{low * 1e6:,.0f} to {high * 1e6:,.0f}"
            rate = nbytes / seconds / 1e9
            lines.append(f"{op:16s}{nbytes:14,}{seconds * 1e6:12,.1f}{spread:>22s}{rate:16.3f}"
                         f"{rate * FACTORS[op](n):10.3f}")
    top = max(nbytes * FACTORS[op](n) / seconds for op in measured for nbytes, seconds, *_ in measured[op])
    lines += ["", f"{'fitted':16}{'latency, us':>14}{'bus GB/s':>10}{'off by':>8}    bus bandwidth over payload, 1 kB, "
                  f"4 kB, …; █ is {top / 1e9:.2g} GB/s, ▇ half as much, …"]
    for op, (latency, bandwidth, error) in fits.items():
        lines.append(f"{op:16s}{latency * 1e6:14,.1f}{bandwidth / 1e9:10.3f}{error:8.0%}    "
                     + curve(measured[op], FACTORS[op](n), top))
    return [*lines, ""]


def measure_pairs(device: torch.device) -> torch.Tensor:
    """Return [n, n], the seconds in which two ranks exchange PAIR_BYTES, the best of several times.

    All pairs meet once, in a round-robin tournament. In each round every rank has one partner. The
    first rank keeps its seat, and the others rotate.
    """
    n, me = dist.get_world_size(), dist.get_rank()
    seats = list(range(n + n % 2))  # the last seat is empty if n is odd
    outgoing, incoming = torch.zeros(2, PAIR_BYTES // 4, device=device)
    seconds = torch.zeros(n, dtype=torch.float64, device=device)
    for _ in range(len(seats) - 1):
        partner = seats[-1 - seats.index(me)]
        times = []
        for _ in range(TURNS):
            dist.barrier()
            began = time.perf_counter()
            if partner < n:
                ring.exchange(Group("world", dist.group.WORLD), outgoing, partner, incoming, partner)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
        if partner < n:
            seconds[partner] = min(times)
        seats.insert(1, seats.pop())
    matrix = seconds.new_empty(n, n)
    collectives.all_gather(matrix.view(-1), seconds, Group("world", dist.group.WORLD))
    return torch.maximum(matrix, matrix.T).cpu()


def name_slow_pairs(seconds: torch.Tensor, local_ranks: int) -> list[str]:
    """Return a line per slow pair, or one line about the slowest. Pairs inside nodes and between
    nodes are judged separately."""
    slow, worst = [], []
    for kind, between in ("inside a node", False), ("between nodes", True):
        pairs = {(i, j): seconds[i, j].item() for i in range(len(seconds)) for j in range(i)
                 if (i // local_ranks != j // local_ranks) == between}
        if pairs:
            median = statistics.median(pairs.values())
            for (i, j), took in sorted(pairs.items(), key=lambda item: -item[1]):
                line = (f"ranks {j} and {i} exchange {PAIR_BYTES >> 20} MiB in {took * 1e6:,.0f} us, "
                        f"{took / median:.1f} times the median of {len(pairs)} pairs {kind}")
                (slow if took > SLOW_PAIR * median else worst).append(line)
                if took <= SLOW_PAIR * median:
                    break
    return ["slow pair: " + line for line in slow] or ["no slow pair; the slowest: " + "; ".join(worst)]


def describe_level(name: str, ranks: int, n: int, fits: dict[str, Fit]) -> dict:
    """Return a level of the cluster file, which connects `ranks` ranks. fits: of groups of n ranks.

    Latencies are per hop of a ring. Bandwidths are bus bandwidths per rank. The values of the level
    are the medians over its collectives.
    """
    hops = {op: n - 1 for op in fits} | {"all_reduce": 2 * (n - 1), "send": 1}
    per_collective = {op: {"latency_s": fitted.latency / hops[op], "bandwidth_bytes_per_s": fitted.bandwidth}
                      for op, fitted in fits.items()}
    medians = {key: statistics.median(figures[key] for figures in per_collective.values())
               for key in ("latency_s", "bandwidth_bytes_per_s")}
    return {"name": name, "ranks": ranks, **medians, "per_collective": per_collective}


def host_rates(device: torch.device) -> dict[str, float]:
    """Return the bytes per second of copies from host to device, and of a CPU's reads and writes of
    host memory.

    All ranks copy at the same time. On a CPU both are copies of the same memory.
    """
    one, other = torch.zeros(2, HOST_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.zeros_like(one, device=device)
    link, memory = (HOST_BYTES / statistics.median(time_turns(copy, device))
                    for copy in (lambda: there.copy_(one, non_blocking=True), lambda: other.copy_(one)))
    return {"host_link_bytes_per_s": link, "host_memory_bytes_per_s": 2 * memory}


def describe_cluster(levels: list[dict], device: torch.device, local_ranks: int) -> dict:
    """Return the content of the cluster file.

    matmul_flops is the rate of a matmul while all ranks multiply, in fp32 on CPUs.
    """
    cuda = device.type == "cuda"
    kind = torch.cuda.get_device_name(device) if cuda else platform.processor() or "CPU"
    width, dtype = (8192, torch.bfloat16) if cuda else (512, torch.float32)
    x = torch.randn(width, width, device=device, dtype=dtype)
    seconds = statistics.median(time_turns(lambda: x @ x, device))
    peak, reached = machines.peak_flops(kind) if cuda else None, 2 * width ** 3 / seconds
    measured = {"date": date.today().isoformat(), "backend": dist.get_backend(), "torch": torch.__version__,
                "device": kind}
    return {"name": f"{dist.get_world_size() // local_ranks} x {local_ranks} {kind}", "gpus_per_node": local_ranks,
            **({"peak_flops": {"bf16": peak}} if peak else {}), "matmul_flops": {"bf16": reached},
            "memory_bytes": memory_of_device(device), **host_rates(device), "levels": levels,
            "measured": measured}


USAGE = "torchrun --nproc_per_node=N -m bench.probe [--out FILE] [flags of train.py]"


@dataclass
class Flags:
    out: str = setting("", "the cluster file to write, which python -m plan --machine reads")


def parse(flags: list[str], ranks: int) -> tuple[config.Config, str]:
    """Return the settings and the file to write ("": none). Only the grid and the device of the
    settings are used.

    Raise ValueError for a wrong flag or a file that cannot be written.
    """
    known, flags = config.read_known(Flags, flags, USAGE)
    folder = os.path.dirname(known.out) or "."
    need(os.path.isdir(folder), f"--out {known.out}: there is no folder {folder}")
    need(not os.path.isdir(known.out), f"--out {known.out} is a folder: name a file")
    return cli.parse(flags, ranks), known.out


def probe(settings: config.Config, out: str, device: torch.device) -> None:
    """Measure and print everything, and write the cluster file `out` unless it is ""."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    groups = probed_groups(settings, local_ranks)
    most_bytes = largest_payload(device, local_ranks)
    lines, levels, began, left = [], [], time.perf_counter(), len(groups) * len(FACTORS)
    for level, group in groups.items():
        measured = {}
        for op in FACTORS:
            spent, = slowest([time.perf_counter() - began], device)
            measured[op] = measure_op(op, group, device, most_bytes, (SECONDS[device.type] - spent) / left)
            left -= 1
        fits = {op: fit(samples, FACTORS[op](group.size)) for op, samples in measured.items()}
        lines += describe(level, group, measured, fits)
        if level.startswith("node"):
            levels.append(describe_level("node", local_ranks, group.size, fits))
        elif level.startswith("network"):
            levels.append(describe_level("network", dist.get_world_size(), group.size, fits))
    lines += name_slow_pairs(measure_pairs(device), local_ranks)
    cluster = describe_cluster(levels, device, local_ranks)
    if dist.get_rank() == 0:
        print("\n".join(lines))
        if out:
            with open(out, "w") as file:
                json.dump(cluster, file, indent=1)
            print(f"written: {out}")


if __name__ == "__main__":
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    try:
        config.read_known(Flags, sys.argv[1:], USAGE)  # answers --help, even in a single process
        need(ranks > 1, "a network needs several ranks: run under torchrun --nproc_per_node=4 -m bench.probe")
        settings, out = parse(sys.argv[1:], ranks)
        device = choose_device(settings.run.device)[0]
    except ValueError as error:
        cli.refuse(error, "bench.probe")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with collectives.world(device):
        with cli.told_if_slow("measuring the network", "bench.probe"):
            probe(settings, out, device)
