"""What a rank runs on: its device, its memory, and what of the settings cannot run there."""
import os

import torch

from core import config
from core.config import need
from core.param import DTYPES
from plan import memory
from plan.memory import format_bytes


def choose_device(asked: str) -> tuple[torch.device, str]:
    """(device of this rank, its name or why it was chosen). asked: "auto", "cpu" or "cuda".

    "auto" chooses GPUs if this machine has one for each of its ranks, and the CPU if it has none. Raises ValueError if
    it has some but too few, and for "cuda" if it has too few.
    """
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if asked == "cpu":
        return torch.device("cpu"), "as asked"
    if gpus >= ranks:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        return device, torch.cuda.get_device_name(device)
    if gpus or asked == "cuda":
        raise ValueError(f"--device {asked}: {ranks} ranks on this machine and {gpus} GPUs: "
                         + (f"use --nproc_per_node={gpus} or " if gpus else "use ") + "--device cpu")
    return torch.device("cpu"), "there is no GPU here"


def check_device(settings: config.Config, device: torch.device) -> None:
    """Raises ValueError for settings that this device cannot run. Our kernels need Triton, whose import fails on all
    ranks here, and not on some of them in a step. FP8 needs a GPU of compute capability 8.9 or above,
    blockwise FP8 one of 9.x (cuBLAS). On a CPU Triton's kernels need its interpreter, which computes bf16 wrongly. On
    GPUs context parallelism calls torch's FlashAttention itself, which does not pad heads."""
    precision, grid, width = settings.precision, settings.grid, settings.model.head_dim
    if uses_kernels(settings, device):
        try:
            import kernels  # noqa: F401
        except Exception as error:
            raise ValueError(f"--kernels auto: Triton does not run here ({error}): use --kernels torch") from error
    if device.type == "cuda" and grid.cp > grid.head_ranks:
        is_unused = precision.attention in ("math", "triton") or precision.dtype in ("fp32", "fp64")
        need(is_unused or (width % 8 == 0 and width <= 256), f"--cp {grid.cp} with heads {width} wide: torch's "
             "FlashAttention takes multiples of 8 up to 256, use --attention math")
    if precision.fp8 != "none" and device.type == "cuda":
        capability, name = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
        if capability < (8, 9) or (precision.fp8_recipe().blocks and capability[0] != 9):
            others = [f"--fp8 {name}" for name, recipe in config.FP8_RECIPES.items() if not recipe.blocks]
            option = ", or " + " or ".join(others) if capability >= (8, 9) and others else ""
            raise ValueError(f"--fp8 {precision.fp8}: cannot run on {name}: use a Hopper GPU, or --fp8 none{option}")
    if precision.attention == "triton" and device.type == "cpu":
        need(os.environ.get("TRITON_INTERPRET") == "1", "--attention triton needs a GPU, or TRITON_INTERPRET=1 "
             "to be interpreted, slowly: use auto or math")
        need(precision.dtype != "bf16", "--attention triton with --dtype bf16: Triton's interpreter computes it "
             "wrongly, use fp32, or --attention auto or math")


def uses_kernels(settings: config.Config, device: torch.device) -> bool:
    return device.type == "cuda" and settings.precision.kernels == "auto" and settings.precision.dtype != "fp64"


def memory_of_device(device: torch.device) -> int:
    """The bytes of this rank's GPU, or its share of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def check_memory(settings: config.Config, rank: int, device: torch.device) -> None:
    """Raises ValueError if weights, gradients and optimizer state of a pipeline rank exceed its memory, or all kinds
    twice that; or if what a GPU's rank keeps in the host's memory exceeds its share of that."""
    parts = memory_of_rank(settings, rank, fused=uses_kernels(settings, device))
    needed = max(sum(parts[kind] for kind in ("weights", "gradients", "optimizer")), sum(parts.values()) / 2)
    there = memory_of_device(device)
    need(needed <= there, f"--preset {settings.model.preset}: takes {format_bytes(sum(parts.values()))} on this rank, "
         f"which has {format_bytes(there)}: use a smaller model or --micro-batch, or more ranks with --zero 3 or --tp")
    if device.type == "cuda":
        needed = memory.host_bytes(settings, rank, DTYPES[settings.precision.dtype].itemsize)
        there = memory_of_device(torch.device("cpu"))
        flags = " and ".join(flag for flag, given in {"--offload": settings.precision.offloads("optimizer"),
                                                      "--checkpoint-dir": settings.run.checkpoint_dir}.items() if given)
        need(needed <= there, f"{flags}: takes {format_bytes(needed)} of the host's memory for this rank, which has "
             f"{format_bytes(there)}: use more ranks with --zero 1, or leave it out")


def memory_of_rank(settings: config.Config, rank: int, fused: bool = False) -> dict[str, int]:
    """Kind -> bytes at the peak of a pipeline rank, by plan/memory.py. fused: see memory.memory_of_rank."""
    return memory.memory_of_rank(settings, rank, DTYPES[settings.precision.dtype].itemsize, fused)
