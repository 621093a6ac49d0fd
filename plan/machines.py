"""Machines: what their GPUs and the levels of their network do, and how long a collective takes on them.

A collective of n ranks that sends b bytes per rank takes b / bandwidth + (n - 1) x latency, a ring's (Patarasuk and
Yuan 2009). A group that leaves a node shares the node's network cards with its neighbours: r of its ranks in each node
use the cards of r ranks.

A machine is a built-in one, whose figures others have measured, or a file that bench/probe.py wrote:

    {"name", "gpus_per_node", "memory_bytes", "memory_bytes_per_s",
     "peak_flops": {"bf16": FLOP/s, ...}, of data sheets; "matmul_flops": the same of the best matmul, as measured,
     "host_link_bytes_per_s", "host_memory_bytes_per_s": see Machine; only --offload needs them,
     "levels": [{"name", "ranks", "latency_s", "bandwidth_bytes_per_s",            from the innermost outward
                 "per_collective": {"all_reduce": {"bandwidth_bytes_per_s"}, ...}}, ...]}

Of the two rates one may be missing. Without matmul_flops the best matmul is assumed to reach 80% of the peak. Without
peak_flops, of a device that is in no table, utilisations are those of the best matmul's rate.
"""
from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import NamedTuple

from config import need
from plan.costs import peak_flops


class Level(NamedTuple):
    """A level of the network. ranks: how many it connects. The bandwidth is per rank and direction, the latency is per
    hop of a ring. per_collective: name -> bandwidth, where it is known and differs."""
    name: str
    ranks: int
    latency_s: float
    bandwidth_bytes_per_s: float
    per_collective: Mapping[str, float] = {}

    def bandwidth(self, collective: str) -> float:
        return self.per_collective.get(collective, self.bandwidth_bytes_per_s)


class Machine(NamedTuple):
    """matmul_flops: FLOP/s of the best matmul. peak_flops, matmul_flops: by dtype, "bf16" and "fp8"; without the latter
    twice as much as in bf16. levels: from the innermost outward. In bytes per second and GPU, 0 if unknown: host_link,
    of copies to or from the host's memory; host_memory, what the CPUs read and write there."""
    name: str
    gpus_per_node: int
    peak_flops: Mapping[str, float]
    matmul_flops: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    levels: tuple[Level, ...]
    host_link: float = 0.0
    host_memory: float = 0.0

    def peak(self) -> float:
        return self.peak_flops["bf16"]

    def best_matmul(self, fp8: bool = False) -> float:
        return self.matmul_flops.get("fp8", 2 * self.matmul_flops["bf16"]) if fp8 else self.matmul_flops["bf16"]


def gpu_node(name: str, bf16: float, fp8: float, memory_gib: float, memory_tb_s: float, node_gb_s: float,
             network_gb_s: float, link_gb_s: float, host_gb_s: float, latency_us: tuple[float, float] = (3.0, 10.0),
             ranks: int = 8, **per_collective: float) -> Machine:
    """bf16, fp8: TFLOP/s of the best matmul, 0 if unknown; bandwidths per GPU and direction. As measured by others
    (github:stas00/ml-engineering @744d01e), but for what the makers say of the host: its link, and the memory of all
    its CPUs divided by its GPUs (16 channels of DDR4-3200, DDR5-4800 or DDR5-5600, 24 of DDR5-4800; or 512 GB/s for
    two)."""
    in_node = {collective: gb_s * 1e9 for collective, gb_s in per_collective.items()}
    levels = (Level("node", ranks, latency_us[0] * 1e-6, node_gb_s * 1e9, in_node),
              Level("network", 1 << 20, latency_us[1] * 1e-6, network_gb_s * 1e9))
    best = dict(bf16=bf16 * 1e12) | (dict(fp8=fp8 * 1e12) if fp8 else {})
    peak = dict(bf16=peak_flops(name.split("-")[0].upper()))
    return Machine(name, ranks, peak, best, memory_gib * 2**30, memory_tb_s * 1e12, levels, link_gb_s * 1e9,
                   host_gb_s * 1e9)


MACHINES = {machine.name: machine for machine in (
    #                     bf16  fp8    GiB  TB/s  node  network, link, host: GB/s per GPU
    gpu_node("a100",      271,  0,     80,  2.04, 175,  22.5, 31,  51),
    gpu_node("a100-40gb", 271,  0,     40,  1.56, 175,  22.5, 31,  51),
    gpu_node("a100-opa",  271,  0,     80,  2.04, 175,   5.5, 31,  51),  # BLOOM's: four cards of 100 Gb/s per node
    gpu_node("h100",      794,  1403,  80,  3.35, 363,  45,   63,  77, all_reduce=436),
    # The playbook's: hops take what a line through the times of its 256 MB all-gathers on 2 to 32 nodes says; a ring of
    # 32 H200s on EFA sends 365 GB/s.
    gpu_node("h100-efa",  794,  1403,  80,  3.35, 363,  45,   63,  77, (3.0, 33.0), all_reduce=436),
    gpu_node("h200",      794,  1453,  141, 4.8,  363,  45,   63,  77, all_reduce=480),
    gpu_node("b200",      1745, 3432,  180, 8.0,  680,  45,   63,  90, all_reduce=838),
    gpu_node("gb200",     1822, 3616,  186, 8.0,  680,  45,   225, 256, ranks=64),
    gpu_node("gb300",     1966, 3726,  288, 8.0,  680,  90,   225, 256, ranks=64),  # matmuls: a B300's, scaled
    gpu_node("mi300x",    668,  0,     192, 5.3,  310,  45,   63,  115),
)}


def number(fields: Mapping, name: str, default: float | None = None) -> float:
    """A field of a cluster file: finite, and above 0 unless it is a latency."""
    value = float(fields[name] if default is None else fields.get(name) or default)
    need(math.isfinite(value) and (value > 0 or value == 0 and name == "latency_s"), f"{name} {value}: must be above 0")
    return value


def rates_of(found: Mapping, name: str) -> dict[str, float]:
    """FLOP/s by dtype, bf16 among them; {} if a cluster file has no such rates."""
    return {dtype: number(found[name], dtype) for dtype in {"bf16": 0} | found[name]} if name in found else {}


def read_machine(name: str) -> Machine:
    """A machine by its name, or from a file that `bench/probe.py` wrote. Raises ValueError if there is none, or if the
    file lacks a field or has no number in it."""
    need(isinstance(name, str), f"--machine {name}: write a name")
    if name.lower() in MACHINES:
        return MACHINES[name.lower()]
    need(os.path.isfile(name), f"--machine {name}: unknown, use one of {', '.join(MACHINES)} or a cluster file")
    try:
        with open(name) as file:
            found = json.load(file)
        levels = tuple(Level(level["name"], int(number(level, "ranks")), number(level, "latency_s"),
                             number(level, "bandwidth_bytes_per_s"),
                             {op: number(figures, "bandwidth_bytes_per_s")
                              for op, figures in (level.get("per_collective") or {}).items()})
                       for level in found["levels"])
        need(levels, "has no levels")
        peaks, best = (rates_of(found, name) for name in ("peak_flops", "matmul_flops"))
        need(peaks or best, "has neither peak_flops nor matmul_flops")
        need("achieved_fraction" not in found, "achieved_fraction is of an older probe: write matmul_flops instead")
        best = best or {dtype: 0.8 * peak for dtype, peak in peaks.items()}
        peaks = peaks or best
        host = [number(found, link) if found.get(link) else 0.0
                for link in ("host_link_bytes_per_s", "host_memory_bytes_per_s")]
        return Machine(str(found["name"]), int(number(found, "gpus_per_node")), peaks, best,
                       number(found, "memory_bytes"),
                       number(found, "memory_bytes_per_s", peaks["bf16"] / 295),  # an H100's FLOPs per byte
                       levels, *host)
    except KeyError as error:
        raise ValueError(f"--machine {name}: the file has no {error}") from None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"--machine {name}: cannot be read: {error}") from None


def collective_seconds(machine: Machine, nbytes: float, n: int, stride: int = 1, collective: str = "all_gather",
                       calls: int = 1) -> float:
    """Seconds that `calls` collectives take, in which each of n ranks, `stride` apart, sends nbytes in all."""
    if n == 1:
        return 0.0
    bandwidth, inside = 0.0, 1  # ranks of the group inside a unit of the level below
    for level in machine.levels:
        shared = level.bandwidth(collective) * (inside if bandwidth else 1)
        bandwidth = min(bandwidth, shared) if bandwidth else shared
        inside = max(1, min(n, level.ranks // stride))
        if inside == n:
            break
    return nbytes / bandwidth + calls * (n - 1) * level.latency_s
