"""Build the parts of a run from its settings: the device, the samples, the model and its optimizer.

Techniques do not see the settings: here each setting becomes an argument of the file that implements it. train.py, dry
runs, benchmarks and tests build the same model by the same functions.
"""
import os
from functools import partial

import torch

import config
from checks import need
from collectives import Group, Groups
from dp import assign_to_buckets
from ep import Balance
from fp8 import RECIPES, Fp8
from model import Execution, Llama
from param import acc_dtype, draw
from plan import costs, search
from plan import memory as footprint
from plan.memory import format_bytes
from pp import Pipeline
from run.data import Corpus, Samples
from schedules import plan_of
from zero import UPDATE_RULES, Optimizer

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


# ---- the model and its optimizer ------------------------------------------------------------------------------------

def build(settings: config.Config, groups: Groups, device: torch.device, dtype: torch.dtype,
          filled: bool = True) -> tuple[Llama, Optimizer]:
    """The model and its optimizer. filled: with initial weights from the seed; else all weights are zeros."""
    grid, optim = settings.grid, settings.optim
    model = build_model(settings, groups, device, dtype)
    optimizer = Optimizer(model.units(), groups, bucket_mb=grid.bucket_mb, level=grid.zero, rule=optim.optimizer,
                          betas=optim.betas, weight_decay=optim.weight_decay, clip=optim.clip,
                          moments_dtype=moments_dtype(settings, dtype), last_unit=model.head,
                          reduce_dtype=torch.bfloat16 if settings.precision.reduce_dtype == "bf16" else None,
                          offload=settings.precision.offloads("optimizer"))
    if filled:
        optimizer.load(draw(optim.seed))
    return model, optimizer


def build_model(settings: config.Config, groups: Groups, device: torch.device | str, dtype: torch.dtype) -> Llama:
    """The model, with parameters without memory: an Optimizer allocates them in buckets, its `load` fills them."""
    grid, precision, optim = settings.grid, settings.precision, settings.optim
    fp8_linear, fp8_experts = fp8_of(settings, groups, dtype)
    execution = Execution(dtype=dtype, device=device, attention=precision.attention, recompute=precision.recompute,
                          offload=precision.offloads("activations"), cp_style=grid.cp_style,
                          sequence=grid.sequence_parallel, async_tp=grid.async_tp,
                          fp8_linear=fp8_linear, fp8_experts=fp8_experts, fp8_layers=settings.fp8_layers())
    balance = Balance(optim.aux_loss, optim.aux_over, optim.router_z_loss, optim.bias_rate)
    return Llama(settings.model, groups, execution, pipeline=build_pipeline(settings, groups.get("pp"), device),
                 z_loss=optim.z_loss, balance=balance)


def build_pipeline(settings: config.Config, group: Group, device: torch.device | str = "cpu") -> Pipeline:
    """This rank's pipeline stages, and a function from a number of micro-batches to the schedule's plan."""
    grid, batch = settings.grid, settings.batch
    most = max(sequences for sequences, _ in batch.ramp()) // batch.micro_batch // grid.dp
    return Pipeline(partial(plan_of, grid), costs.stages_of(settings), most, group, device)


def fp8_of(settings: config.Config, groups: Groups, dtype: torch.dtype) -> tuple[Fp8 | None, Fp8 | None]:
    """(Fp8 of linear layers, Fp8 of experts), or (None, None). Ranks with shards of one tensor agree on its tensorwise
    scale: of activations over cp and tp, of experts' inputs also over ep; of weights over tp, of experts' over ep."""
    precision, cached = settings.precision, settings.grid.zero < 3
    if precision.fp8 == "none":
        return None, None
    recipe = RECIPES[precision.fp8]._replace(pow2=precision.fp8_pow2)
    cp, tp, ep = (groups.get(axis) for axis in ("cp", "tp", "ep"))
    return (Fp8(recipe, dtype, amax_groups=(cp, tp), weight_amax_groups=(tp,), cached=cached),
            Fp8(recipe, dtype, amax_groups=(cp, tp, ep), weight_amax_groups=(ep,), cached=cached))


def moments_dtype(settings: config.Config, dtype: torch.dtype) -> torch.dtype:
    """The dtype of AdamW's moments in a run in `dtype`."""
    return torch.bfloat16 if settings.precision.moments == "bf16" else acc_dtype(dtype)


def memory_of_rank(settings: config.Config, groups: Groups, fused: bool = False) -> dict[str, int]:
    """Kind -> bytes at this rank's peak, from the shapes of its parameters and the formulas of plan/memory.py."""
    dtype, grid, optim = DTYPES[settings.precision.dtype], settings.grid, settings.optim
    model = build_model(settings, groups, "cpu", dtype)
    buckets: dict[str, list[int]] = {}
    for params in assign_to_buckets(model.units(), 0 if grid.zero == 3 else grid.bucket_mb):
        buckets.setdefault(params[0].spec.data_axis, []).append(sum(param.numel() for param in params))
    moments = len(UPDATE_RULES[optim.optimizer].state) * moments_dtype(settings, dtype).itemsize
    pipeline, has_head = model.pipeline, model.head is not None
    activations = footprint.activation_bytes(settings, dtype.itemsize, pipeline.stages.values(), pipeline.in_flight,
                                             has_head)
    return footprint.memory_bytes(settings, dtype.itemsize, moments, buckets, model.fp8_weights(), activations,
                                  pipeline.in_flight, pipeline.stages, footprint.backwards_in_memory(pipeline.actions),
                                  fused)


def open_samples(settings: config.Config, paths: list[str], seed: int | None) -> Samples:
    """The samples of the files at `paths`, shuffled by a seed; None: in order. Raises ValueError naming a bad file."""
    data = settings.data
    try:
        corpus = Corpus(paths, settings.model.vocab, data.data_dtype, data.separator)
    except OSError as error:
        raise ValueError(f"{error.filename}: cannot be read: {error.strerror}") from None
    return Samples(corpus, settings.batch.seq, seed, data.doc_mask)


# ---- the device -----------------------------------------------------------------------------------------------------

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
    """Raises ValueError for settings that this device cannot run. FP8 needs a GPU of compute capability 8.9 or above,
    blockwise FP8 one of 9.x (cuBLAS). On a CPU Triton's kernels need its interpreter, which computes bf16 wrongly. On
    GPUs context parallelism calls torch's FlashAttention itself, which does not pad heads."""
    precision, grid, width = settings.precision, settings.grid, settings.model.head_dim
    if device.type == "cuda" and grid.cp > 1 and not config.CP_STYLES[grid.cp_style].whole_sequences:
        is_unused = precision.attention in ("math", "triton") or precision.dtype in ("fp32", "fp64")
        need(is_unused or (width % 8 == 0 and width <= 256), f"--cp {grid.cp} with heads {width} wide: torch's "
             "FlashAttention takes multiples of 8 up to 256, use --attention math")
    if precision.fp8 != "none" and device.type == "cuda":
        capability, name = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
        if capability < (8, 9) or (precision.fp8_recipe().blocks and capability[0] != 9):
            option = ", or --fp8 tensorwise" if capability >= (8, 9) else ""
            raise ValueError(f"--fp8 {precision.fp8}: cannot run on {name}: use a Hopper GPU, or --fp8 none{option}")
    if precision.attention == "triton" and device.type == "cpu":
        need(os.environ.get("TRITON_INTERPRET") == "1", "--attention triton needs a GPU, or TRITON_INTERPRET=1 "
             "to be interpreted, slowly: use auto or math")
        need(precision.dtype != "bf16", "--attention triton with --dtype bf16: Triton's interpreter computes it "
             "wrongly, use fp32, or --attention auto or math")


def memory_of_device(device: torch.device) -> int:
    """The bytes of this rank's GPU, or its share of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def check_memory(settings: config.Config, groups: Groups, device: torch.device) -> None:
    """Raises ValueError if weights, gradients and optimizer state exceed this rank's memory, or all kinds twice it."""
    parts = memory_of_rank(settings, groups, fused=device.type == "cuda")
    needed = max(sum(parts[kind] for kind in ("weights", "gradients", "optimizer")), sum(parts.values()) / 2)
    memory = memory_of_device(device)
    need(needed <= memory, f"--preset {settings.model.preset}: takes {format_bytes(sum(parts.values()))} on this rank, "
         f"which has {format_bytes(memory)}: use a smaller model or --micro-batch, or more ranks with --zero 3 or --tp")


def choose_grid(settings: config.Config, device: torch.device) -> config.Config:
    """The settings with plan/search.py's grid for this machine, which rank 0 prints. Raises ValueError if none fits."""
    gpu = (torch.cuda.get_device_name(device), memory_of_device(device)) if device.type == "cuda" else ()
    machine = search.this_machine(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), *gpu)
    settings, reason = search.fill_grid(settings, int(os.environ.get("WORLD_SIZE", 1)), machine)
    if int(os.environ.get("RANK", 0)) == 0:
        print("auto    " + reason, flush=True)
    return settings
