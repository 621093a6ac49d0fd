"""Compare our techniques with those of torch and transformers: equal work, measured in turns.

    python -m bench train                            a training step; rival: transformers' Llama with fused AdamW
    python -m bench ep                               a layer of experts; rivals: transformers' Mixtral blocks
    python -m bench check                            do our kernels run here, and are they correct? See bench/check.py
    torchrun --nproc_per_node=2 -m bench smoke       three steps on every grid, on GPUs or CPUs. See bench/smoke.py
    python -m bench gpu                              correctness and speed of everything on a GPU, in 575 s or
                                                     --limit SECONDS. The same command continues where it ended.
                                                     Results are in --out FOLDER. --only STAGES. See bench/gpu.py
    torchrun --nproc_per_node=4 -m bench dp zero tp  a training step; rivals: DistributedDataParallel; at ZeRO level 1
                                                     ZeroRedundancyOptimizer, at level 3 fully_shard (FSDP2); DTensor
    torchrun --nproc_per_node=4 -m bench cp          attention over one long sequence; rival: torch's with a mask,
                                                     over all-gathered keys and values
    torchrun --nproc_per_node=4 -m bench pp          a pipeline step; rival: torch.distributed.pipelining
    torchrun --nproc_per_node=4 -m bench ep          a layer of experts on 1, 2 and 4 ranks
    torchrun --nproc_per_node=4 -m bench checkpoint  saving a training state; rivals: torch.distributed.checkpoint of
                                                     each rank's shards; torch.save of the gathered state

In train, dp, zero and tp, flags of train.py choose the model, the batch and the optimizer. check,
smoke and gpu have their own flags. Other parts accept no flags. A training step computes the mean
loss over the valid tokens of the global batch in fp32, clips the norm of the complete gradient, and
updates with fused AdamW. All parts except checkpoint use GPUs if there is one for each rank, and
CPUs otherwise. On GPUs, fp32 matmuls are in TF32; this has not been tried on a GPU yet.

Columns: the median time per step, the times of the fastest and the slowest turn, and tokens per
second. The other columns are for one step of rank 0, counted at every operation (run/meter.py): MB
sent if collectives run as rings, the number of collectives, and MB live between two steps (at rest)
and at the peak. Brackets show the ratio to the last line. Below 1 we are faster, or send or hold
less.
"""
import argparse
import importlib
import inspect
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, parallel
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from torch.nn.parallel import DistributedDataParallel

import schedules
import train
from bench import smoke
from core import collectives, config, rules
from core.collectives import ALONE, Group, Groups
from core.config import CP_STYLES, need
from core.groups import build_groups
from core.param import Spec, draw, parameter
from cp import attention_by_window
from ep import GroupedExperts, Router, make_routing_info
from model import Llama
from plan.printing import table
from pp import Engine
from run import checkpoint, cli
from run.data import MicroBatch
from run.device import choose_device
from run.meter import Collective, Meter
from run.ranks import gather_objects, host_group
from tp import MATMUL, Column, Row, TensorParallel
from zero import Optimizer

Step = Callable[[], None]
Build = Callable[[], Step]  # makes a contender's model and returns a function that runs one step
CP_SEQUENCES = 4096, 8192  # tokens of each sequence
PP_TOKENS, PP_MICRO_BATCHES, PP_WIDTH = 512, 8, 256  # tokens per micro-batch
EP_TOKENS = 2048  # per rank
device = torch.device("cpu")  # of all contenders; main chooses it


# ---- measuring ------------------------------------------------------------------------------------------------------

def take_turns(contenders: dict[str, Step], repeats: int, steps: int) -> dict[str, list[float]]:
    """Return the mean seconds of `steps` steps, `repeats` times per contender.

    The contenders take turns. The first turn is a warmup and does not count.
    """
    seconds = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"turn {turn} of {repeats}", file=sys.stderr, flush=True)
        for name, step in contenders.items():
            if dist.is_initialized():
                dist.barrier()
            spent = measure_seconds(step, steps if turn else 2)
            if turn:
                seconds[name].append(spent)
    return seconds


def measure_seconds(step: Step, steps: int) -> float:
    """Return the mean seconds of `steps` calls of `step`.

    On a GPU this is the time between two events on its stream, so it includes neither the host's
    work before the first launch nor its wait for the last kernel. On a CPU it is wall-clock time.
    """
    synchronize()
    if device.type == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)  # a millisecond: on an idle stream `start` would complete before the first launch
        start.record()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3 / steps
    return (time.perf_counter() - began) / steps


def synchronize() -> None:
    """Wait until this rank's GPU, if it has one, has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bytes_sent(call: Collective) -> float:
    """Return the bytes that this rank sends if the collective runs as a ring: see
    core/collectives.py."""
    if call.name in ("send", "recv_"):
        return call.bytes if call.name == "send" else 0
    n = _resolve_process_group(call.group).size()
    return (2 if call.name in ("allreduce_", "all_reduce") else 1) * (n - 1) / n * call.bytes


def count(build: Build) -> dict[str, float]:
    """Count what this rank sends and holds in its second step.

    Live bytes are those allocated since before the model was made.
    """
    with Meter() as meter:
        step = build()
        step()
        at_rest = meter.settled()["all"]
        meter.peak.clear()
        meter.collectives.clear()
        step()
    sent = sum(bytes_sent(call) for call in meter.collectives)
    return {"MB sent": sent / 1e6, "collectives": len(meter.collectives), "MB at rest": at_rest / 1e6,
            "MB at peak": meter.peak["all"] / 1e6}


def compare(contenders: dict[str, Build], tokens: int, repeats: int = 5, steps: int = 20) -> None:
    """Print a line per contender. Ratios refer to the last one. tokens: per step, of all ranks."""
    counts = {name: count(build) if dist.is_initialized() else {} for name, build in contenders.items()}
    seconds = take_turns({name: build() for name, build in contenders.items()}, repeats, steps)
    if dist.is_initialized() and dist.get_rank():
        return
    figures = {name: {"ms per step": statistics.median(times) * 1e3} | counts[name] for name, times in seconds.items()}
    rival = list(contenders)[-1]
    rows = [("(ratio to the last line)", "min to max, ms", "tokens/s", *figures[rival])]
    for name, times in seconds.items():
        row = [name, f"{min(times) * 1e3:.1f} to {max(times) * 1e3:.1f}", f"{tokens / statistics.median(times):,.0f}"]
        for heading, value in figures[name].items():
            base = figures[rival][heading]
            row.append(f"{value:,.2f}".removesuffix(".00") + (f" ({value / base:.2f})" if base else ""))
        rows.append(row)
    print(table(rows, "<" + ">" * (len(rows[0]) - 1)))


# ---- training steps -------------------------------------------------------------------------------------------------

def build(settings: config.Config, groups: Groups) -> tuple[Llama, Optimizer]:
    """Build the model in fp32, with the seed's weights, and its optimizer."""
    settings.precision.dtype = "fp32"
    model = train.build_model(settings, groups, device)
    optimizer = train.build_optimizer(settings, model, groups)
    optimizer.load(draw(settings.optim.seed))
    return model, optimizer


def build_ours(settings: config.Config, tokens: Tensor, labels: Tensor) -> Step:
    groups = build_groups(settings.grid, settings.model)
    model, optimizer = build(settings, groups)
    pipeline = train.build_pipeline(settings, groups, device)
    sequences = slice(groups["data"].rank, None, groups["data"].size)  # of this rank
    batch = MicroBatch(tokens[sequences].contiguous(), labels[sequences].contiguous())

    def step() -> None:
        train.forward_backward(model, pipeline, optimizer, [batch], groups)
        optimizer.step(settings.optim.lr)

    return step


def build_llama(model: config.Model) -> torch.nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=model.vocab, hidden_size=model.hidden, intermediate_size=model.ffn, num_hidden_layers=model.layers,
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, head_dim=model.head_dim,
        tie_word_embeddings=model.tied, attn_implementation="sdpa", use_cache=False)).to(device).train()


def build_adamw(model: torch.nn.Module, optim: config.Optim, zero1: bool = False) -> torch.optim.Optimizer:
    """Build a fused AdamW that decays only matrices. zero1: use torch's ZeRO level 1."""
    groups = [dict(params=[p for p in model.parameters() if p.ndim >= 2], weight_decay=optim.weight_decay),
              dict(params=[p for p in model.parameters() if p.ndim < 2], weight_decay=0.0)]
    make = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW) if zero1 else torch.optim.AdamW
    return make(groups, lr=optim.lr, betas=optim.betas, fused=True)


def shard_fully(model: torch.nn.Module, reduce_dtype: torch.dtype | None = None) -> None:
    """Apply FSDP2 to transformers' Llama, with the same units as ours. Gradients are reduced in
    `reduce_dtype`."""
    shard = partial(fully_shard, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    for layer in (model.model.embed_tokens, *model.model.layers):
        shard(layer)
    shard([model.model.norm, model.lm_head], reshard_after_forward=False)
    shard(model)


def shard_by_dtensor(model: torch.nn.Module, ranks: int) -> None:
    """Apply tensor and sequence parallelism to transformers' Llama, with torchtitan's plan."""
    gather, scatter = dict(input_layouts=Shard(1)), dict(output_layouts=Shard(1))
    plan = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), **scatter),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(**gather, output_layouts=Shard(-1), use_local_output=False)}
    for i in range(len(model.model.layers)):
        layer = f"model.layers.{i}."
        plan |= {layer + norm: SequenceParallel() for norm in ("input_layernorm", "post_attention_layernorm")}
        plan |= {layer + linear: ColwiseParallel() for linear in (
            "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")}
        plan |= {layer + linear: RowwiseParallel(**scatter) for linear in ("self_attn.o_proj", "mlp.down_proj")}
        plan |= {layer + "self_attn": PrepareModuleInput(input_kwarg_layouts={"hidden_states": Shard(1)},
                                                         desired_input_kwarg_layouts={"hidden_states": Replicate()}),
                 layer + "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))}
    parallel.parallelize_module(model, init_device_mesh(device.type, (ranks,)), plan)


def build_theirs(settings: config.Config, tokens: Tensor, labels: Tensor, wrap: str) -> Step:
    """Build a step of transformers' Llama and torch's AdamW.

    wrap: "ddp", "zero1", "fsdp" or "dtensor"; "" for none of them.
    """
    model, optim, inputs = build_llama(settings.model), settings.optim, {}
    if wrap == "fsdp":
        shard_fully(model, torch.bfloat16 if settings.precision.reduce_dtype == "bf16" else None)
    elif wrap == "dtensor":
        shard_by_dtensor(model, settings.grid.tp)
        inputs = dict(position_ids=torch.arange(tokens.shape[1], device=device)[None])
    elif wrap:
        model = DistributedDataParallel(model, bucket_cap_mb=settings.grid.bucket_mb, broadcast_buffers=False)
    adamw = build_adamw(model, optim, zero1=wrap == "zero1")
    data_parallel = dist.get_world_size() if wrap in ("ddp", "zero1", "fsdp") else 1
    if data_parallel > 1:
        tokens, labels = (x[dist.get_rank()::data_parallel].contiguous() for x in (tokens, labels))

    def step() -> None:
        valid = (labels >= 0).sum()
        if data_parallel > 1:
            dist.all_reduce(valid)
        with parallel.loss_parallel() if wrap == "dtensor" else nullcontext():
            logits = model(input_ids=tokens, **inputs).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / valid
            (loss * data_parallel).backward()  # all three wrappers divide gradients by the number of ranks
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip)
        if data_parallel > 1:
            dist.all_reduce(loss.detach())
        if wrap in ("fsdp", "dtensor"):
            norm.full_tensor()
        adamw.step()
        adamw.zero_grad()

    return step


TRAINING = {  # part -> (our flags, the rival's name, its wrapper)
    "train": [("", "transformers + fused AdamW", "")],
    "dp": [("--zero 0", "DistributedDataParallel", "ddp")],
    "zero": [("--zero 1", "ZeroRedundancyOptimizer", "zero1"), ("--zero 3", "fully_shard", "fsdp"),
             ("--zero 3 --reduce-dtype bf16", "fully_shard, reduce_dtype bf16", "fsdp")],
    "tp": [("--tp {n}", "DTensor", "dtensor")]}


def bench_training(part: str, flags: list[str]) -> None:
    """Compare a training step of train.py's model with the same step by torch or transformers.

    Flags of train.py choose the model, the batch and the optimizer. All contenders compute in fp32.
    """
    n = dist.get_world_size() if dist.is_initialized() else 1
    for our_flags, rival, wrap in TRAINING[part]:
        our_flags = our_flags.format(n=n)
        heads = ["--kv-heads", str(n)] if part == "tp" else []  # DTensor cannot replicate them
        try:
            settings = cli.parse([*heads, *flags, *our_flags.split()], n)
            dtype = settings.precision.dtype
            need(dtype in ("auto", "fp32"), f"--dtype {dtype}: all contenders compute in fp32, so leave it out")
        except ValueError as error:
            cli.refuse(error, "bench")
        torch.manual_seed(0)  # all ranks draw the same global batch
        windows = torch.randint(settings.model.vocab, (settings.batch.global_batch, settings.batch.seq_len + 1))
        batch = windows[:, :-1].contiguous().to(device), windows[:, 1:].contiguous().to(device)
        repeats, steps = (5, 20) if n > 1 else (60, 1)
        compare({f"penteract {our_flags}": partial(build_ours, settings, *batch),
                 rival: partial(build_theirs, settings, *batch, wrap)}, batch[0].numel(), repeats, steps)


# ---- attention, a pipeline, a layer of experts ----------------------------------------------------------------------

def build_attention(style: str | None, seq: int) -> Step:
    """Build forward and backward of attention for this rank's chunk of one sequence.

    4 query heads, 2 key and value heads, 64 wide, in fp32. style: one of CP_STYLES, or None for
    torch's attention over all-gathered keys and values.
    """
    group, c, i = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    q, k, v = (torch.randn(1, heads, seq // c, 64, device=device, requires_grad=True) for heads in (4, 2, 2))
    do = torch.randn_like(q)
    if style is None:
        own = torch.arange(i * seq // c, (i + 1) * seq // c, device=device)
        visible = own[:, None] >= torch.arange(seq, device=device)

        def attend(q, k, v):
            k, v = all_gather_tensor_autograd(k, 2, group), all_gather_tensor_autograd(v, 2, group)
            return F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True)
    else:
        attend = attention_by_window([0], torch.empty(1, seq // c, device=device), None, kernel="auto", head_dim=64,
                                     dtype=torch.float32, groups={"cp": Group("cp", group)}, style=style)[0]

    def step() -> None:
        q.grad = k.grad = v.grad = None
        attend(q, k, v).backward(do)

    return step


def bench_cp() -> None:
    """Compare attention over one long sequence, forward and backward, in every style of context
    parallelism.

    The rival is torch's attention with a mask over all-gathered keys and values. Sizes are fixed,
    so there are no flags.
    """
    for seq in CP_SEQUENCES:
        styles = {f"penteract --cp-style {style}": style for style in CP_STYLES} | {"torch, gather and mask": None}
        compare({f"{name}, S {seq}": partial(build_attention, style, seq) for name, style in styles.items()}, seq, 5, 1)


class Stage(torch.nn.Module):
    """x + down(tanh(up(x))), three times, by our layers or by torch's."""

    def __init__(self, ours: bool):
        super().__init__()
        shapes = 3 * ((4 * PP_WIDTH, PP_WIDTH), (PP_WIDTH, 4 * PP_WIDTH))
        self.weights = torch.nn.ParameterList(parameter(Spec(f"{i}", shape), {}, torch.float32, device)
                                              for i, shape in enumerate(shapes))
        for weight in self.weights:
            weight.data = torch.randn(weight.shape, device=device) / 64
        tp = TensorParallel()
        self.up = (lambda x, weight: Column.apply(x, tp, MATMUL, True, weight)) if ours else F.linear
        self.down = (lambda x, weight: Row.apply(x, tp, MATMUL, False, weight)) if ours else F.linear

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad:  # in a model the first stage's input is an embedding, with a gradient
            x = x.detach().requires_grad_()
        for i in (0, 2, 4):
            x = x + self.down(torch.tanh(self.up(x, self.weights[i])), self.weights[i + 1])
        return x


def run_ours(plan: schedules.Plan, chunks: dict[int, Stage], x: Tensor) -> Step:
    """Build a step on our engine. chunks: this rank's stages by number. x: the input of all
    micro-batches."""
    engine = Engine(plan, Group("pp", dist.group.WORLD), device=device)
    micro_batches = x.split(PP_TOKENS)
    last_stage = plan.stages - 1

    def forward(stage: int, k: int, received: Tensor | None) -> Tensor:
        y = chunks[stage](micro_batches[k] if received is None else received)
        return y.square().sum() if stage == last_stage else y

    return lambda: engine.run(forward, (PP_TOKENS, PP_WIDTH), torch.float32)


def run_theirs(schedule_class: str, plan: schedules.Plan, chunks: dict[int, Stage], x: Tensor) -> Step:
    """Build the same step on torch.distributed.pipelining."""
    example = torch.randn(PP_TOKENS, PP_WIDTH, device=device, requires_grad=True)  # so the stage expects gradients
    stages = [pipelining.PipelineStage(chunk, stage, plan.stages, device, (example,), (example,),
                                       group=dist.group.WORLD) for stage, chunk in chunks.items()]
    schedule = getattr(pipelining.schedules, schedule_class)(
        stages if len(stages) > 1 else stages[0], PP_MICRO_BATCHES, lambda y, _: y.square().sum(), scale_grads=False)
    inputs = (x,) if 0 in chunks else ()
    target = x if plan.stages - 1 in chunks else None  # which the loss ignores
    return lambda: schedule.step(*inputs, target=target, return_outputs=False)


def build_pipeline(name: str, schedule_class: str | None) -> Step:
    """Build a step of a pipeline. name: our schedule. schedule_class: the name of torch's schedule,
    which runs instead of ours unless it is None."""
    plan = schedules.make_plan(name, dist.get_world_size(), PP_MICRO_BATCHES)
    chunks = {stage: Stage(ours=schedule_class is None) for stage in range(plan.stages)
              if plan.owner[stage, 0] == dist.get_rank()}
    x = torch.randn(PP_MICRO_BATCHES * PP_TOKENS, PP_WIDTH, device=device)
    run = run_theirs(schedule_class, plan, chunks, x) if schedule_class else run_ours(plan, chunks, x)

    def step() -> None:
        for chunk in chunks.values():
            chunk.zero_grad()
        run()

    return step


def bench_pp() -> None:
    """Compare a step of a pipeline on our engine with the same schedule of
    torch.distributed.pipelining.

    Sizes are fixed, so there are no flags.
    """
    for name, rival in (("1f1b", "Schedule1F1B"), ("interleaved", "ScheduleInterleaved1F1B"),
                        ("zb1p", "ScheduleInterleavedZeroBubble"), ("zb-v", "ScheduleZBVZeroBubble")):
        compare({f"penteract --schedule {name}": partial(build_pipeline, name, None),
                 rival: partial(build_pipeline, name, rival)}, PP_MICRO_BATCHES * PP_TOKENS, repeats=5, steps=3)


def build_experts(how: str, group: Group) -> Step:
    """Build forward and backward of a layer of 8 experts, 2 per token, 512 wide and 1024 inside.

    Gradients accumulate. how: "ours", or the name of transformers' implementation.
    """
    model = rules.parse("--hidden 512 --heads 8 --kv-heads 8 --ffn 1024 --experts 8 --top-k 2".split()).model
    x, dy = (torch.randn(EP_TOKENS, model.hidden, device=device) for _ in range(2))
    if how == "ours":
        E, H, F = model.experts, model.hidden, model.expert_ffn
        make = partial(parameter, groups={"ep": group}, dtype=torch.float32, device=device)
        w_router = make(Spec("router", (E, H), std=0.02))
        router = Router("router.bias", w_router, model)
        layer = GroupedExperts(make, Spec("w_gate_up", (E, 2 * F, H), {"ep": 0}, "edp", std=0.02),
                               Spec("w_down", (E, H, F), {"ep": 0}, "edp", std=0.02))
        for weight in (w_router, *layer.parameters()):
            weight.data = draw(0)(weight.spec, weight.box).to(device)
        tokens = torch.zeros(1, EP_TOKENS, dtype=torch.long, device=device)
        info = make_routing_info(tokens, ALONE, ALONE, None)

        def forward(x: Tensor) -> Tensor:
            route, gates = router(x, info, group)
            return route.combine(layer(*route.dispatch(x, gates).wait(), route))
    else:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        layer = MixtralSparseMoeBlock(MixtralConfig(
            hidden_size=model.hidden, intermediate_size=model.ffn, num_local_experts=model.experts,
            num_experts_per_tok=model.top_k, experts_implementation=how))
        for weight in layer.parameters():
            weight.data = torch.randn(weight.shape, device=device) / 50

        def forward(x: Tensor) -> Tensor:
            return layer(x[None])[0]

    return lambda: forward(x.detach().requires_grad_()).backward(dy)


def bench_ep() -> None:
    """Compare a layer of experts, forward and backward, with transformers' Mixtral blocks.

    This is for one process. Several processes compare our layer with its experts divided over all
    ranks, over some, or not at all. Sizes are fixed, so there are no flags.
    """
    if not dist.is_initialized():
        contenders = {"penteract": "ours", "transformers, loop": "eager", "transformers, grouped": "grouped_mm"}
        compare({name: partial(build_experts, how, ALONE) for name, how in contenders.items()}, EP_TOKENS, 10, 2)
        return
    n, contenders = dist.get_world_size(), {}
    for ep in (ep for ep in range(n, 0, -1) if n % ep == 0):
        group = ALONE
        if ep > 1:
            group = Group("ep", dist.new_subgroups_by_enumeration(torch.arange(n).view(-1, ep).tolist())[0])
        contenders[f"penteract --ep {ep}"] = partial(build_experts, "ours", group)
    compare(contenders, n * EP_TOKENS, repeats=5, steps=2)


# ---- checkpoints ----------------------------------------------------------------------------------------------------

CHECKPOINT_MODEL = "--layers 8 --hidden 512 --heads 8 --ffn 1408 --zero 1"  # 26M parameters


def gather_and_save(tensors: list[Tensor], path: str) -> None:
    """Save as a trainer without shards does: the first rank gathers everything and writes it."""
    for i, tensor in enumerate(tensors):
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
        dist.gather(tensor, parts)
        tensors[i] = torch.cat(parts) if parts else None
    if dist.get_rank() == 0:
        torch.save(tensors, path)
    dist.barrier()


def bench_checkpoint() -> None:
    """Compare saving the optimizer's state, without the check that files can be read back.

    The rivals are torch.distributed.checkpoint of each rank's shards and torch.save of the gathered
    state. Sizes are fixed, so there are no flags.
    """
    settings = rules.parse(CHECKPOINT_MODEL.split(), dist.get_world_size())
    groups = build_groups(settings.grid, settings.model)
    model, optimizer = build(settings, groups)
    shards = [tensor for bucket in optimizer.buckets for tensor in bucket.state.values()]
    host = host_group(600)
    folder = gather_objects(tempfile.mkdtemp() if dist.get_rank() == 0 else None, host)[0]
    pieces = list(checkpoint.pieces_of_run(optimizer, model.routers, groups, saving=True))
    saver = None

    def save_ours(turn: int) -> float:
        nonlocal saver
        if turn == 0:  # the turn whose bytes are counted: with its staging memory, and without a thread
            saver = checkpoint.Saver(f"{folder}/ours", pieces, 1, host)
            saver.stage.copy()
            return saver.write(turn, {})
        wait = saver.save(turn, {})
        saver.finish()
        return wait

    named = {f"{host.rank} {i}": x for i, x in enumerate(shards)}
    contenders = {"run/checkpoint.py": save_ours,
                  "DCP, each rank's shards": lambda turn: dcp.save(named, checkpoint_id=f"{folder}/dcp {turn}"),
                  "torch.save of the gathered state": lambda turn: gather_and_save(list(shards), f"{folder}/{turn}.pt")}
    rows = [("", "s a step waits", "s until saved", "min to max, s", "MB/s", "MB more at peak")]
    for name, save in contenders.items():
        waits, totals, meter = [], [], Meter()
        with meter:
            save(0)
        for turn in range(1, 6):
            dist.barrier()
            began = time.perf_counter()
            wait = save(turn)
            totals.append(time.perf_counter() - began)
            waits.append(wait if isinstance(wait, float) else totals[-1])
        total, spread = statistics.median(totals), f"{min(totals):.3f} to {max(totals):.3f}"
        rows.append((name, f"{statistics.median(waits):.3f}", f"{total:.3f}", spread,
                     f"{saver.nbytes / total / 1e6:,.0f}", f"{meter.peak['other'] / 1e6:,.1f}"))
    if dist.get_rank() == 0:
        print(table(rows, "<>>>>>"))
        shutil.rmtree(folder)


# ---- the command line -----------------------------------------------------------------------------------------------

def bench_check(flags: list[str]) -> None:
    """Run bench check. If Triton, already imported, must interpret, first restart this process."""
    if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
        os.execve(sys.executable, sys.orig_argv, os.environ | {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"})
    importlib.import_module("bench.check").main(flags)


PARTS = {**{part: partial(bench_training, part) for part in TRAINING}, "cp": bench_cp, "pp": bench_pp, "ep": bench_ep,
         "checkpoint": bench_checkpoint, "smoke": smoke.main, "check": bench_check,
         "gpu": lambda flags: importlib.import_module("bench.gpu").measure(flags)}  # it needs Triton
OWN_FLAGS = "gpu", "smoke", "check"
WITH_FLAGS = *TRAINING, *OWN_FLAGS
ONE_PROCESS = "train", "gpu", "check"  # parts for one process


def check(parts: list[str], flags: list[str], ranks: int) -> None:
    """Raise ValueError with one line if the parts cannot run."""
    for part in OWN_FLAGS:
        need(part not in parts or len(parts) == 1, f"{part} shares no run: its flags are not those of train.py")
    for part in parts:
        need(not flags or part in WITH_FLAGS, f"{' '.join(flags)}: {part} has fixed sizes and needs no flags")
        need(ranks > 1 or part in (*ONE_PROCESS, "ep", "smoke"),
             f"{part} needs several ranks: run under torchrun --nproc_per_node=4 -m bench {part}")
        need(ranks == 1 or part not in ONE_PROCESS,
             f"{part} is for one process, not {ranks} ranks: run python -m bench {part}")
    if "gpu" in parts:
        importlib.import_module("bench.gpu").parse(flags)  # a wrong flag is refused on every machine
        need(torch.cuda.is_available(), "gpu needs a GPU, and there is none here")


def explain(part: str) -> None:
    """Print the help of one part."""
    if part in OWN_FLAGS:
        module = importlib.import_module(f"bench.{part}")
        config.read_known(module.Flags, ["--help"], module.USAGE)  # which ends this process
    launch = "python" if part in ONE_PROCESS else "torchrun --nproc_per_node=4"
    print(f"usage: {launch} -m bench {part}{' [flags of train.py]' if part in TRAINING else ''}\n")
    if part in TRAINING:
        print(inspect.getdoc(bench_training), "\n")
        contenders = [("   ", f"penteract {flags.format(n='N')}", "beside", rival)
                      for flags, rival, _ in TRAINING[part]]
        print(table(contenders, "<<<<"))
    else:
        print(inspect.getdoc(PARTS[part]))
    print("\npython -m bench --help explains the columns and lists the other parts.")


def read_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return (the parts, the other flags). --help explains the part before it, or prints this page.

    Raise ValueError for an unknown part.
    """
    if arguments[:1] and arguments[0] in PARTS and {"-h", "--help"} & set(arguments):
        explain(arguments[0])
        sys.exit()
    parser = config.Parser("python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="part", help=", ".join(PARTS))
    known, flags = parser.parse_known_args(arguments)
    return known.parts, flags


if __name__ == "__main__":
    try:
        parts, flags = read_arguments(sys.argv[1:])
        check(parts, flags, int(os.environ.get("WORLD_SIZE", 1)))
        if parts[0] in OWN_FLAGS:
            sys.exit(PARTS[parts[0]](flags))  # each of smoke's runs has a world of its own
        device, _ = choose_device("auto")
    except ValueError as error:
        cli.refuse(error, "bench")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    with collectives.world(device) if "WORLD_SIZE" in os.environ else nullcontext():
        for part in parts:
            with cli.told_if_slow(f"measuring {part}", "bench"):
                PARTS[part](flags) if part in WITH_FLAGS else PARTS[part]()
