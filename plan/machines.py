"""Machines: the rates of their GPUs and of the levels of their network, and the time of a collective on them.

A collective of n ranks that sends b bytes per rank takes b / bandwidth + (n - 1) x latency, as in a ring (Patarasuk and
Yuan 2009). A group that spans several nodes shares each node's network cards with its neighbours: if r of its ranks are
in a node, it uses the cards of r ranks.

A machine is one of CARDS in nodes, or a file that bench/probe.py wrote:

    {"name", "gpus_per_node", "memory_bytes", "memory_bytes_per_s",
     "peak_flops": {"bf16": FLOP/s, ...}, of data sheets; "matmul_flops": the same of the best matmul, as measured,
     "host_link_bytes_per_s", "host_memory_bytes_per_s": see Machine; only --offload needs them,
     "levels": [{"name", "ranks", "latency_s", "bandwidth_bytes_per_s",            from the innermost outward
                 "per_collective": {"all_reduce": {"bandwidth_bytes_per_s"}, ...}}, ...]}

One of the two rates may be missing. Without matmul_flops, the best matmul is assumed to reach 80% of the peak. Without
peak_flops (a device that is in no table), utilisation is relative to the rate of the best matmul.
"""
from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from core.config import need


class Level(NamedTuple):
    """A level of the network.

    ranks: how many ranks it connects
    latency_s: seconds per hop of a ring
    bandwidth_bytes_per_s: per rank and direction
    per_collective: name of a collective -> its bandwidth, if it is known and differs
    """
    name: str
    ranks: int
    latency_s: float
    bandwidth_bytes_per_s: float
    per_collective: Mapping[str, float] = {}

    def bandwidth(self, collective: str) -> float:
        return self.per_collective.get(collective, self.bandwidth_bytes_per_s)


class Machine(NamedTuple):
    """GPUs in nodes, and the network between them.

    peak_flops: FLOP/s of the data sheet, by dtype ("bf16", "fp8")
    matmul_flops: FLOP/s of the best matmul, by dtype; without "fp8", FP8 is taken to be twice as fast as bf16, and 0
        says that there is no FP8
    levels: from the innermost outward
    host_link: bytes per second and GPU of copies to or from the host's memory; 0: unknown
    host_memory: bytes per second and GPU that the CPUs read and write in the host's memory; 0: unknown
    """
    name: str
    gpus_per_node: int
    peak_flops: Mapping[str, float]
    matmul_flops: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    levels: tuple[Level, ...]
    host_link: float = 0.0
    host_memory: float = 0.0
    assumed: str = ""  # the figures among these that nobody has measured, in words

    def peak(self) -> float:
        return self.peak_flops["bf16"]

    def has_fp8(self) -> bool:
        return self.matmul_flops.get("fp8") != 0

    def best_matmul(self, fp8: bool = False) -> float:
        bf16 = self.matmul_flops["bf16"]
        return (self.matmul_flops.get("fp8") or 2 * bf16) if fp8 else bf16


# ---- GPUs -----------------------------------------------------------------------------------------------------------

class Card(NamedTuple):
    """A GPU, as its maker's data sheet describes it.

    bf16, fp8: dense TFLOP/s with fp32 accumulation; fp8 is 0 if there is none
    link, link_gb_s: the link between the GPUs of a node, and its GB/s per GPU and direction
    """
    family: str
    bf16: float
    fp8: float
    memory_gib: float
    memory_tb_s: float
    link: str
    link_gb_s: float
    source: str


# Data sheets print rates with sparsity, which are twice the dense rates in this table. A GeForce card multiplies at
# half of its rate if it accumulates in fp32, and its white paper has a row for that. The rate of PCIe is for 16
# lanes, after the encoding (github:stas00/ml-engineering @744d01e, network). NVLink bridges, which join two or four
# cards, are left out. If a name covers several sizes of memory, the table has the smallest.
PCIE4, PCIE5 = ("PCIe 4", 31.0), ("PCIe 5", 63.0)
GA102 = "NVIDIA Ampere GA102 GPU architecture white paper 2.0, appendix A"
ADA = "NVIDIA Ada GPU architecture white paper 2.1, appendix A"
RTX_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture white paper 1.1, table 3"
CARDS = {  # by the words that its name has, in lower case
    #                     family       bf16    fp8     GiB  TB/s   link      GB/s   source
    "a100":          Card("A100",      312,    0,      80,  2.04,  "NVLink", 300,   "NVIDIA A100 data sheet"),
    "a100-40gb":     Card("A100",      312,    0,      40,  1.56,  "NVLink", 300,   "NVIDIA A100 data sheet"),
    "a100-pcie":     Card("A100",      312,    0,      80,  1.935, *PCIE4,          "NVIDIA A100 data sheet"),
    "a100-pcie-40gb": Card("A100",     312,    0,      40,  1.555, *PCIE4,          "NVIDIA A100 PCIe data sheet"),
    "h100":          Card("Hopper",    989,    1979,   80,  3.35,  "NVLink", 450,   "NVIDIA H100 data sheet"),
    "h100-pcie":     Card("Hopper",    756,    1513,   80,  2.0,   *PCIE5,          "NVIDIA H100 PCIe data sheet"),
    "h100-nvl":      Card("Hopper",    835,    1671,   94,  3.9,   *PCIE5,          "NVIDIA H100 NVL data sheet"),
    "h200":          Card("Hopper",    989,    1979,   141, 4.8,   "NVLink", 450,   "NVIDIA H200 data sheet"),
    "h200-nvl":      Card("Hopper",    835,    1671,   141, 4.8,   *PCIE5,          "NVIDIA H200 data sheet"),
    "gh200":         Card("Hopper",    989,    1979,   96,  4.0,   "NVLink", 450,   "NVIDIA GH200 data sheet"),
    "b200":          Card("Blackwell", 2250,   4500,   180, 8.0,   "NVLink", 900,   "NVIDIA B200 data sheet"),
    "gb200":         Card("Blackwell", 2500,   5000,   186, 8.0,   "NVLink", 900,   "NVIDIA GB200 data sheet"),
    "b300":          Card("Blackwell", 2250,   4500,   288, 8.0,   "NVLink", 900,   "NVIDIA B300 data sheet"),
    "gb300":         Card("Blackwell", 2500,   5000,   288, 8.0,   "NVLink", 900,   "NVIDIA GB300 data sheet"),
    "mi300x":        Card("MI300",     1307.4, 2614.9, 192, 5.3,   "Infinity Fabric", 448, "AMD MI300X data sheet"),
    "mi325x":        Card("MI300",     1307.4, 2614.9, 256, 6.0,   "Infinity Fabric", 448, "AMD MI325X data sheet"),
    "a10":           Card("Ampere",    125,    0,      24,  0.6,   *PCIE4,          "NVIDIA A10 data sheet"),
    "l4":            Card("Ada",       121,    242.5,  24,  0.3,   *PCIE4,          "NVIDIA L4 data sheet"),
    "l40s":          Card("Ada",       362,    733,    48,  0.864, *PCIE4,          "NVIDIA L40S data sheet"),
    "rtx-3090":      Card("Ampere",    71,     0,      24,  0.936, *PCIE4,          GA102),
    "rtx-4090":      Card("Ada",       165.2,  330.3,  24,  1.008, *PCIE4,          ADA),
    "rtx-5090":      Card("RTX 50",    209.5,  419,    32,  1.792, *PCIE5,          RTX_BLACKWELL),
}
# Words of a slower card, of a part of one, and of cards without a data sheet: the A100 of 64 GB, H100s with HBM2. So is
# the profile of a virtual GPU, such as 10C.
OTHER_CARD = {"laptop", "mobile", "max", "ti", "super", "d", "mig", "64gb", "hbm2", "hbm2e"}
VIRTUAL = re.compile(r"\d+[abcq]")


def card_of(device_name: str) -> str:
    """The name in CARDS of a GPU that calls itself so, "NVIDIA GeForce RTX 4090"; "" for one that is not there."""
    words = set(re.split("[ -]", device_name.lower()))
    if words & OTHER_CARD or any(VIRTUAL.fullmatch(word) for word in words):
        return ""
    found = [name for name in CARDS if set(name.split("-")) <= words]
    return max(found, key=lambda name: name.count("-"), default="")


def peak_flops(device_name: str) -> float | None:
    """FLOP/s of a GPU in 16 bits; None for one that is not in the table, since a utilisation needs a known peak."""
    name = card_of(device_name)
    return CARDS[name].bf16 * 1e12 if name else None


# ---- built-in machines ----------------------------------------------------------------------------------------------

UNMEASURED = 0.8  # the share of the data sheet that matmuls and collectives are assumed to reach, if not measured
NETWORK_GB_S = 12.5  # between nodes, per GPU, if nothing is known: 100 Gb/s


class Measured(NamedTuple):
    """Figures of a node that others have measured (github:stas00/ml-engineering @744d01e), and figures of its host.

    The host's figures are from its makers: its link, and the memory of all its CPUs divided by its GPUs (16 channels of
    DDR4-3200, DDR5-4800 or DDR5-5600, 24 of DDR5-4800, or 512 GB/s for two GPUs). 0: unknown.
    """
    bf16: float = 0.0  # TFLOP/s of the best matmul
    fp8: float = 0.0
    node_gb_s: float = 0.0  # of collectives in a node, per GPU and direction
    network_gb_s: float = 0.0
    host_link_gb_s: float = 0.0
    host_memory_gb_s: float = 0.0
    latency_us: tuple[float, float] = (3.0, 10.0)
    ranks: int = 8
    per_collective: Mapping[str, float] = {}


MEASURED = {
    #                       bf16  fp8   node network, link, host: GB/s per GPU
    "a100":        Measured(271,  0,    175, 22.5, 31,  51),
    "a100-40gb":   Measured(271,  0,    175, 22.5, 31,  51),
    "a100-opa":    Measured(271,  0,    175, 5.5,  31,  51),  # BLOOM's: four cards of 100 Gb/s per node
    "h100":        Measured(794,  1403, 363, 45,   63,  77, per_collective={"all_reduce": 436}),
    # The playbook's cluster. The latency per hop is the slope of a line through the times of its 256 MB all-gathers
    # on 2 to 32 nodes. A ring of 32 H200s on EFA sends 365 GB/s.
    "h100-efa":    Measured(794,  1403, 363, 45,   63,  77, (3.0, 33.0), per_collective={"all_reduce": 436}),
    "h200":        Measured(794,  1453, 363, 45,   63,  77, per_collective={"all_reduce": 480}),
    "b200":        Measured(1745, 3432, 680, 45,   63,  90, per_collective={"all_reduce": 838}),
    "gb200":       Measured(1822, 3616, 680, 45,   225, 256, ranks=64),
    "gb300":       Measured(1966, 3726, 680, 90,   225, 256, ranks=64),  # matmuls: a B300's, scaled
    "mi300x":      Measured(668,  0,    310, 45,   63,  115),
    "gh200":       Measured(828,  1535),
    "b300":        Measured(1769, 3353),
    "mi325x":      Measured(785,  0),
}


def gpu_node(name: str, card: Card, measured: Measured) -> Machine:
    """Nodes of this card. FP8 that nobody has measured is taken to be as far from its peak as bf16."""
    guesses = [f"matmuls at {UNMEASURED:.0%} of the peak"] * (not measured.bf16)
    if not measured.node_gb_s:
        guesses += [f"{card.link} at {UNMEASURED:.0%} of {card.link_gb_s:g} GB/s per GPU",
                    f"a network of {NETWORK_GB_S:g} GB/s per GPU"]
    bf16, in_node = measured.bf16 or UNMEASURED * card.bf16, measured.per_collective
    fp8 = measured.fp8 or bf16 * card.fp8 / card.bf16
    levels = (Level("node", measured.ranks, measured.latency_us[0] * 1e-6,
                    (measured.node_gb_s or UNMEASURED * card.link_gb_s) * 1e9,
                    {collective: gb_s * 1e9 for collective, gb_s in in_node.items()}),
              Level("network", 1 << 20, measured.latency_us[1] * 1e-6, (measured.network_gb_s or NETWORK_GB_S) * 1e9))
    return Machine(name, measured.ranks, dict(bf16=card.bf16 * 1e12, fp8=card.fp8 * 1e12),
                   dict(bf16=bf16 * 1e12, fp8=fp8 * 1e12), card.memory_gib * 2**30, card.memory_tb_s * 1e12, levels,
                   measured.host_link_gb_s * 1e9, measured.host_memory_gb_s * 1e9,
                   "assumed, not measured: " + "; ".join(guesses) if guesses else "")


MACHINES = {name: gpu_node(name, CARDS[card_of(name)], MEASURED.get(name, Measured()))
            for name in {**MEASURED, **CARDS}}


def family_of(machine: Machine) -> str:
    """The family of its GPUs, as CARDS has it; "" for a GPU that is not there, and for CPUs."""
    name = card_of(machine.name)
    return CARDS[name].family if name else ""


def number(fields: Mapping, name: str, default: float | None = None) -> float:
    """A field of a cluster file: finite, and above 0 unless it is a latency."""
    value = float(fields[name] if default is None else fields.get(name) or default)
    need(math.isfinite(value) and (value > 0 or value == 0 and name == "latency_s"), f"{name} {value}: must be above 0")
    return value


def rates_of(found: Mapping, name: str) -> dict[str, float]:
    """FLOP/s by dtype, bf16 among them; {} if a cluster file has no such rates."""
    return {dtype: number(found[name], dtype) for dtype in {"bf16": 0} | found[name]} if name in found else {}


def read_machine(name: str, peak_tflops: float = 0.0, memory_gb: float = 0.0) -> Machine:
    """A machine by its name, or from a file that `bench/probe.py` wrote; or any other GPU, by its peak and its memory.
    Where a machine is known, these replace its own. Raises ValueError for an unknown GPU without them, and for a file
    that lacks a field or has no number in it."""
    need(isinstance(name, str), f"--machine {name}: write a name")
    if name.lower() in MACHINES:
        machine = MACHINES[name.lower()]
    elif os.path.isfile(name):
        machine = read_file(name)
    elif " " in name and card_of(name):  # as the GPU calls itself
        machine = MACHINES[card_of(name)]
    else:
        need(peak_tflops and memory_gb, f"--machine {name}: unknown: give --peak-tflops (dense, bf16) and --memory-gb "
             f"of its GPU, or use a cluster file of bench/probe.py or one of {', '.join(MACHINES)}")
        bytes_per_flop = 3.35 / 989  # an H100's
        machine = gpu_node(name, Card("", peak_tflops, 0, memory_gb, peak_tflops * bytes_per_flop, *PCIE4, ""),
                           Measured())
        machine = machine._replace(
            matmul_flops=dict(bf16=machine.matmul_flops["bf16"]),  # FP8: unknown
            assumed=f"{machine.assumed}; memory at {machine.memory_bandwidth / 1e12:.2g} TB/s")
    if peak_tflops:
        scale = peak_tflops * 1e12 / machine.peak()
        machine = machine._replace(**{field: {dtype: flops * scale for dtype, flops in getattr(machine, field).items()}
                                      for field in ("peak_flops", "matmul_flops")})
    return machine._replace(memory_bytes=memory_gb * 2**30) if memory_gb else machine


def read_file(name: str) -> Machine:
    """A machine from a file of `bench/probe.py`. Raises ValueError if it lacks a field or has no number in it."""
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
