"""Does every technique train here? Three steps on each grid, in fp32 and bf16, compared with one
process on the CPU.

    torchrun --nproc_per_node=2 -m bench smoke [--grids "--tp 2; --pp 2 --schedule zb-v"] [--device cpu]

Run this command second on a new machine, after the tests. With a GPU per rank it uses NCCL, and
without GPUs gloo. If there are more ranks than GPUs, ranks share GPUs. NCCL has a switch for this
from 2.30 on. With an older NCCL, each rank pretends to be a host of its own, and all communicate
through sockets. So one GPU can show the order of streams and collectives, but not their speed.

Each grid and dtype has a line: the losses, their largest relative difference from the losses of one
process in fp32 on the CPU, and the seconds. Small differences are expected: in fp32 from another
order of sums, in bf16 from the rounding of each activation. A line beyond TOLERANCE ends in
"differs", and the exit code is 1.
"""
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

import train
from core import collectives, config, rules
from core.config import need, setting
from run import device, job, log
from run.data import open_samples
from run.ranks import meet

ROOT = Path(__file__).parent.parent
GRIDS = ["--zero 0", "--zero 1", "--zero 2 --micro-batch 2", "--zero 3 --recompute full", "--tp 2", "--tp 2 --sp off",
         "--tp 2 --sp async --recompute selective", "--cp 2", "--cp 2 --cp-style ring --mask-documents",
         "--cp 2 --cp-style ulysses", "--cp 4 --cp-style ring --cp-ulysses 2", "--pp 2",
         "--pp 2 --schedule interleaved --virtual-stages 2", "--pp 2 --schedule zb-v", "--preset tiny-moe",
         "--preset tiny-moe --ep 2 --zero 1", "--zero 3 --dp-replicate 2", "--pp 2 --tp 2",
         "--cp 2 --tp 2 --zero 3", "--pp 2 --cp 2 --tp 2 --preset tiny-moe --ep 4 --schedule zb-h1"]
COMMON = "--steps 3 --warmup 0 --global-batch 16 --sample-prompt="
TOLERANCE = dict(fp32=1e-4, bf16=2e-2)
NOT_THE_MODEL = ("dp", "cp", "cp_style", "cp_zigzag", "cp_ulysses", "tp", "pp", "schedule", "virtual_stages", "ep",
                 "zero", "dp_replicate", "sp")
USAGE = 'torchrun --nproc_per_node=N -m bench smoke [--grids "FLAGS; FLAGS"] [--device auto|cpu]'


@dataclass
class Flags:
    grids: str = setting("; ".join(GRIDS), "flags of train.py for each run, separated by semicolons; by default all "
                                           "grids that this number of ranks can form")
    device: str = setting("auto", "cpu: use gloo even if there are GPUs", ("auto", "cpu"))


def parse(arguments: list[str], ranks: int) -> tuple[list[str], str]:
    """Return (flags of each grid, device). Raise ValueError for a grid that cannot run on this
    number of ranks."""
    settings, rest = config.read_known(Flags, arguments, USAGE)
    need(not rest, f"{' '.join(rest)}: unknown, usage: {USAGE}")
    grids = []
    for grid in settings.grids.split(";"):
        try:
            rules.parse(f"{COMMON} {grid}".split(), ranks)
            grids.append(grid.strip())
        except ValueError:
            if settings.grids != Flags().grids:
                raise
    return grids, settings.device


def choose_device(asked: str) -> torch.device:
    """Return this rank's GPU, which it may share, or the CPU. Prepare NCCL for sharing."""
    gpus, rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
    if asked == "cpu" or not gpus:
        return torch.device("cpu")
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > gpus:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # or --sp async would be refused
        if torch.cuda.nccl.version() >= (2, 30):
            os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        else:
            os.environ |= dict(NCCL_HOSTID=f"rank {rank}", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1",
                               NCCL_SOCKET_IFNAME="lo")
    torch.cuda.set_device(rank % gpus)
    return torch.device("cuda", rank % gpus)


def train_grid(flags: str, where: torch.device, store: dist.Store | None) -> list[float]:
    """Train in this process and the other ranks, in a world of their own. Return the losses, on
    rank 0."""
    losses, write = [], log.Log.write
    keep = patch.object(log.Log, "write", lambda self, record: (losses.append(record["loss"]), write(self, record)))
    with keep, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        settings = rules.parse(f"{COMMON} {flags}".split(), int(os.environ.get("WORLD_SIZE", 1)))
        device.check_device(settings, where)
        samples = open_samples(settings, settings.data.data, settings.optim.seed)
        with collectives.world(where, 120, store) if store else contextlib.nullcontext():
            train.train(job.Run(settings, samples, None, where, "of bench smoke"))
    return losses


def model_flags(grid: str) -> str:
    """Return the flags without those that only divide the work."""
    flags = (" " + " ".join(config.expand(grid.split()))).split(" --")[1:]
    return " ".join(f"--{words}" for words in flags if config.name_of(words.replace("=", " ")) not in NOT_THE_MODEL)


@cache
def losses_of_one_process(flags: str) -> list[float]:
    """Return the losses of train.py in one process on the CPU, in fp32."""
    alone = {name: value for name, value in os.environ.items()
             if not name.startswith(("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC"))}
    with tempfile.TemporaryDirectory() as folder:
        command = f"train.py {COMMON} {flags} --device cpu --dtype fp32 --metrics {folder}/metrics"
        done = subprocess.run([sys.executable, *command.split()], cwd=ROOT, env=alone, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"one process fails: python {command}\n{done.stderr}")
        return [json.loads(line)["loss"] for line in Path(folder, "metrics").read_text().splitlines()]


def main(arguments: list[str]) -> None:
    grids, asked = parse(arguments, int(os.environ.get("WORLD_SIZE", 1)))
    where, rank = choose_device(asked), int(os.environ.get("RANK", 0))
    store = meet() if "WORLD_SIZE" in os.environ else None
    failed = False
    for number, grid in enumerate(grids):
        for dtype in TOLERANCE:
            began = time.monotonic()
            own = store and dist.PrefixStore(f"{number} {dtype}", store)
            losses = train_grid(f"{grid} --dtype {dtype}", where, own)
            seconds = time.monotonic() - began
            if rank == 0:
                truth = losses_of_one_process(model_flags(grid))
                off = max(abs(loss / right - 1) for loss, right in zip(losses, truth, strict=True))
                failed |= (differs := off > TOLERANCE[dtype])
                print(f"{dtype}  {' '.join(f'{loss:.4f}' for loss in losses)}  {off:8.1e}  {seconds:5.1f} s  {grid}"
                      + "  differs" * differs, flush=True)
    if failed:
        sys.exit(1)
