"""Our techniques beside what torch and transformers ship: the same work in one run, the contenders taking turns.

    python bench.py train                            a training step; rival: transformers' Llama with fused AdamW
    python bench.py ep                               a layer of experts; rivals: transformers' Mixtral block with its
                                                     loop over experts, and with its grouped matmul
    python bench.py gpu                              kernels and training on one GPU, see bench_gpu.py; --out FOLDER
    torchrun --nproc_per_node=4 bench.py dp zero tp  a training step; rivals: DistributedDataParallel; at ZeRO level 1
                                                     ZeroRedundancyOptimizer, at level 3 fully_shard (FSDP2); DTensor
    torchrun --nproc_per_node=4 bench.py cp          attention over one long sequence in three styles; rival: torch's
                                                     attention with a mask, over all-gathered keys and values
    torchrun --nproc_per_node=4 bench.py pp          a pipeline step; rival: torch.distributed.pipelining
    torchrun --nproc_per_node=4 bench.py ep          a layer of experts on 1, 2 and 4 ranks
    torchrun --nproc_per_node=4 bench.py checkpoint  saving a training state; rivals: torch.distributed.checkpoint of
                                                     each rank's shards; torch.save of the gathered state
    torchrun --nproc_per_node=4 bench.py probe       latency and bandwidth of every collective on every axis of a grid,
                                                     and slow pairs of ranks; --out cluster.json: for plan.py

In train, dp, zero and tp, flags of train.py choose the model, the batch and the optimizer, in probe the grid and the
device; gpu has flags of its own, and other parts refuse all. A training step computes in fp32 the mean loss over the
valid tokens of the global batch, clips the norm of the complete gradient, and updates with fused AdamW.

Columns: the median time per step, its 10th to 90th percentile, tokens per second; and per step of rank 0, counted at
every operation (meter.py): MB that a ring sends, collectives, MB live between two steps (at rest), MB live at the peak.
The ratio in brackets divides a figure by that of the last line: below 1 we are faster, or send or hold less.
"""
import argparse
import importlib
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date
from functools import partial
from math import log2
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed import pipelining
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.distributed_c10d import _resolve_process_group

import assemble
import checkpoint
import collectives
import config
import costs
import ring
import schedules
import train
from checks import need
from collectives import Group, rank, size
from config import CP_STYLES
from cp import attention_by_window
from data import MicroBatch
from ep import GroupedExperts, Router, combine, dispatch, make_routing_info
from groups import build_groups
from meter import Collective, Meter
from param import Spec, draw, parameter
from pp import Engine
from tp import TensorParallel, column, row

Tensor = torch.Tensor
Step = Callable[[], None]
Build = Callable[[], Step]  # makes a contender's model; what it returns runs one step
CP_SEQUENCES = 4096, 8192  # tokens of each sequence
PP_TOKENS, PP_MICRO_BATCHES, PP_WIDTH = 512, 8, 256  # tokens per micro-batch
EP_TOKENS = 2048  # per rank


# ---- measuring ------------------------------------------------------------------------------------------------------

def take_turns(contenders: dict[str, Step], repeats: int, steps: int) -> dict[str, list[float]]:
    """`repeats` times per contender, in turns: the mean seconds of `steps` steps. A turn of warmup comes first."""
    seconds = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"turn {turn} of {repeats}", file=sys.stderr, flush=True)
        for name, step in contenders.items():
            if dist.is_initialized():
                dist.barrier()
            began = time.perf_counter()
            for _ in range(steps if turn else 2):
                step()
            if turn:
                seconds[name].append((time.perf_counter() - began) / steps)
    return seconds


def bytes_sent(call: Collective) -> float:
    """What this rank sends in a collective that runs as a ring, see collectives.py."""
    if call.name in ("send", "recv_"):
        return call.bytes if call.name == "send" else 0
    n = _resolve_process_group(call.group).size()
    return (2 if call.name in ("allreduce_", "all_reduce") else 1) * (n - 1) / n * call.bytes


def count(build: Build) -> dict[str, float]:
    """What this rank sends and holds in a step, the second one. Live bytes count from before the model is made."""
    meter = Meter()
    with meter:
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
    """Print a line per contender. The last one is the rival that ratios refer to. tokens: per step, of all ranks."""
    counts = {name: count(build) if dist.is_initialized() else {} for name, build in contenders.items()}
    seconds = take_turns({name: build() for name, build in contenders.items()}, repeats, steps)
    if dist.is_initialized() and dist.get_rank():
        return
    figures = {name: {"ms per step": statistics.median(times) * 1e3} | counts[name] for name, times in seconds.items()}
    rival = list(contenders)[-1]
    print("(ratio to the last line)".ljust(40) + "10% to 90%, ms".rjust(18) + "tokens/s".rjust(10)
          + "".join(heading.rjust(18) for heading in figures[rival]))
    for name, times in seconds.items():
        low, high = (sorted(times)[int(len(times) * q)] * 1e3 for q in (0.1, 0.9))
        line = f"{low:.1f} to {high:.1f}".rjust(18) + f"{tokens / statistics.median(times):,.0f}".rjust(10)
        for heading, value in figures[name].items():
            base = figures[rival][heading]
            line += (f"{value:,.2f}".removesuffix(".00") + (f" ({value / base:.2f})" if base else "")).rjust(18)
        print(name.ljust(40) + line)


# ---- training steps -------------------------------------------------------------------------------------------------

def build_ours(settings: config.Config, tokens: Tensor, labels: Tensor) -> Step:
    groups = build_groups(settings.grid, settings.model)
    model, optimizer = assemble.build(settings, groups, torch.device("cpu"), torch.float32)
    sequences = slice(rank(groups["data"]), None, size(groups["data"]))  # of this rank
    batch = MicroBatch(tokens[sequences].contiguous(), labels[sequences].contiguous())

    def step() -> None:
        train.forward_backward(model, optimizer, [batch], groups)
        optimizer.step(settings.optim.lr)

    return step


def build_llama(model: config.Model) -> torch.nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=model.vocab, hidden_size=model.hidden, intermediate_size=model.ffn, num_hidden_layers=model.layers,
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, head_dim=model.head_dim,
        tie_word_embeddings=model.tied, attn_implementation="sdpa", use_cache=False)).train()


def build_adamw(model: torch.nn.Module, optim: config.Optim, zero1: bool = False) -> torch.optim.Optimizer:
    """Fused AdamW that decays matrices and not vectors. zero1: torch's ZeRO level 1."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    groups = [dict(params=[p for p in model.parameters() if p.ndim >= 2], weight_decay=optim.weight_decay),
              dict(params=[p for p in model.parameters() if p.ndim < 2], weight_decay=0.0)]
    make = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW) if zero1 else torch.optim.AdamW
    return make(groups, lr=optim.lr, betas=optim.betas, fused=True)


def build_theirs(settings: config.Config, tokens: Tensor, labels: Tensor, wrap: str = "") -> Step:
    """transformers' Llama and torch's AdamW, alone or wrapped by "ddp", "zero1" or "fsdp"."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model, optim = build_llama(settings.model), settings.optim
    if wrap == "fsdp":
        for layer in (model.model.embed_tokens, *model.model.layers):  # the same units as ours
            fully_shard(layer)
        fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False)
        fully_shard(model)
    elif wrap:
        model = DistributedDataParallel(model, bucket_cap_mb=settings.grid.bucket_mb, forward_sync_buffers=False)
    adamw = build_adamw(model, optim, zero1=wrap == "zero1")
    sequences = slice(dist.get_rank(), None, dist.get_world_size()) if wrap else slice(None)  # of this rank
    tokens, labels = tokens[sequences].contiguous(), labels[sequences].contiguous()

    def step() -> None:
        valid = (labels >= 0).sum()
        if wrap:
            dist.all_reduce(valid)
        logits = model(input_ids=tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / valid
        scale = dist.get_world_size() if wrap else 1  # all three wrappers divide gradients by the number of ranks
        (loss * scale).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip)
        if wrap:
            dist.all_reduce(loss.detach())
        if wrap == "fsdp":
            norm.full_tensor()
        adamw.step()
        adamw.zero_grad()

    return step


def build_dtensor(settings: config.Config, tokens: Tensor, labels: Tensor) -> Step:
    """transformers' Llama under parallelize_module, with torchtitan's plan and a vocabulary parallel loss."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, parallel
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

    model, optim = build_llama(settings.model), settings.optim
    mesh = init_device_mesh("cpu", (settings.grid.tp,))
    gather, scatter = dict(input_layouts=Shard(1)), dict(output_layouts=Shard(1))
    plan = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), **scatter),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(**gather, output_layouts=Shard(-1), use_local_output=False)}
    for i in range(settings.model.layers):
        layer = f"model.layers.{i}."
        plan |= {layer + norm: SequenceParallel() for norm in ("input_layernorm", "post_attention_layernorm")}
        plan |= {layer + linear: ColwiseParallel() for linear in (
            "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")}
        plan |= {layer + linear: RowwiseParallel(**scatter) for linear in ("self_attn.o_proj", "mlp.down_proj")}
        plan |= {layer + "self_attn": PrepareModuleInput(input_kwarg_layouts={"hidden_states": Shard(1)},
                                                         desired_input_kwarg_layouts={"hidden_states": Replicate()}),
                 layer + "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))}
    parallel.parallelize_module(model, mesh, plan)
    adamw = build_adamw(model, optim)
    positions = torch.arange(tokens.shape[1])[None]

    def step() -> None:
        with parallel.loss_parallel():
            logits = model(input_ids=tokens, position_ids=positions).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (labels >= 0).sum()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip).full_tensor()
        adamw.step()
        adamw.zero_grad()

    return step


TRAINING = {  # by part: our flags, the rival, what builds the rival's step
    "train": [("", "transformers + fused AdamW", build_theirs)],
    "dp": [("--zero 0", "DistributedDataParallel", partial(build_theirs, wrap="ddp"))],
    "zero": [("--zero 1", "ZeroRedundancyOptimizer", partial(build_theirs, wrap="zero1")),
             ("--zero 3", "fully_shard", partial(build_theirs, wrap="fsdp"))],
    "tp": [("--tp {n}", "DTensor", build_dtensor), ("--tp {n} --sp-keep", "DTensor", build_dtensor)]}


def bench_training(part: str, flags: list[str]) -> None:
    n = dist.get_world_size() if dist.is_initialized() else 1
    for our_flags, rival, build_rival in TRAINING[part]:
        our_flags = our_flags.format(n=n)
        heads = ["--kv-heads", str(n)] if part == "tp" else []  # DTensor cannot replicate them
        try:
            settings = config.parse([*heads, *flags, *our_flags.split()], n)
            dtype = settings.precision.dtype
            need(dtype in ("auto", "fp32"), f"--dtype {dtype}: all contenders compute in fp32, so leave it out")
        except ValueError as error:
            config.refuse(error, "bench.py")
        torch.manual_seed(0)  # all ranks draw the same global batch
        windows = torch.randint(settings.model.vocab, (settings.batch.global_batch, settings.batch.seq + 1))
        batch = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        repeats, steps = (5, 20) if n > 1 else (60, 1)
        compare({f"penteract {our_flags}": partial(build_ours, settings, *batch),
                 rival: partial(build_rival, settings, *batch)}, batch[0].numel(), repeats, steps)


# ---- attention, a pipeline, a layer of experts ----------------------------------------------------------------------

def build_attention(style: str | None, seq: int) -> Step:
    """Forward and backward of this rank's chunk of one sequence: 4 heads of 64, 2 of keys and values, fp32. style: one
    of CP_STYLES, or None for torch's attention over all-gathered keys and values."""
    group, c, i = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    q, k, v = (torch.randn(1, heads, seq // c, 64, requires_grad=True) for heads in (4, 2, 2))
    do = torch.randn(q.shape)
    if style is None:
        visible = torch.arange(i * seq // c, (i + 1) * seq // c)[:, None] >= torch.arange(seq)

        def attend(q, k, v):
            k, v = all_gather_tensor_autograd(k, 2, group), all_gather_tensor_autograd(v, 2, group)
            return F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True)
    else:
        attend = attention_by_window([0], torch.empty(1, seq // c), None, kernel="auto", head_dim=64,
                                     dtype=torch.float32, group=group, style=style)[0]

    def step() -> None:
        q.grad = k.grad = v.grad = None
        attend(q, k, v).backward(do)

    return step


def bench_cp() -> None:
    for seq in CP_SEQUENCES:
        styles = {f"penteract --cp-style {style}": style for style in CP_STYLES} | {"torch, gather and mask": None}
        compare({f"{name}, S {seq}": partial(build_attention, style, seq) for name, style in styles.items()}, seq, 5, 1)


class Stage(torch.nn.Module):
    """Three times x + down(tanh(up(x))), by our layers or by torch's."""

    def __init__(self, ours: bool):
        super().__init__()
        shapes = 3 * ((4 * PP_WIDTH, PP_WIDTH), (PP_WIDTH, 4 * PP_WIDTH))
        self.weights = torch.nn.ParameterList(parameter(Spec(f"{i}", shape), {}, torch.float32)
                                              for i, shape in enumerate(shapes))
        for weight in self.weights:
            weight.data = torch.randn(weight.shape) / 64
        tp = TensorParallel()
        self.up, self.down = (partial(column, tp=tp), partial(row, tp=tp)) if ours else (F.linear, F.linear)

    def forward(self, x: Tensor) -> Tensor:
        for i in (0, 2, 4):
            x = x + self.down(torch.tanh(self.up(x, self.weights[i])), self.weights[i + 1])
        return x


def run_ours(plan: schedules.Plan, chunks: dict[int, Stage], x: Tensor) -> Step:
    """A step on our engine. chunks: this rank's stages by number. x: the input of all micro-batches."""
    engine, micro_batches = Engine(plan, dist.group.WORLD), x.split(PP_TOKENS)

    def forward(stage: int, k: int, received: Tensor | None) -> Tensor:
        y = chunks[stage](micro_batches[k] if received is None else received)
        return y.square().sum() if stage == plan.stages - 1 else y

    return lambda: engine.run(forward, (PP_TOKENS, PP_WIDTH), torch.float32)


def run_theirs(schedule_class: str, plan: schedules.Plan, chunks: dict[int, Stage], x: Tensor) -> Step:
    """The same step on torch.distributed.pipelining."""
    example = torch.randn(PP_TOKENS, PP_WIDTH, requires_grad=True)  # requires_grad: the stage expects gradients
    stages = [pipelining.PipelineStage(chunk, stage, plan.stages, torch.device("cpu"), (example,), (example,),
                                       group=dist.group.WORLD) for stage, chunk in chunks.items()]
    schedule = getattr(pipelining.schedules, schedule_class)(
        stages if len(stages) > 1 else stages[0], PP_MICRO_BATCHES, lambda y, _: y.square().sum(), scale_grads=False)
    inputs = (x,) if 0 in chunks else ()
    target = x if plan.stages - 1 in chunks else None  # which the loss ignores
    return lambda: schedule.step(*inputs, target=target, return_outputs=False)


def build_pipeline(name: str, schedule_class: str | None) -> Step:
    """name: of our schedule. schedule_class: the name of torch's, which is run unless it is None."""
    plan = schedules.plan(name, dist.get_world_size(), PP_MICRO_BATCHES)
    chunks = {stage: Stage(ours=schedule_class is None) for stage, owner in enumerate(plan.owners[0])
              if owner == dist.get_rank()}
    x = torch.randn(PP_MICRO_BATCHES * PP_TOKENS, PP_WIDTH)
    run = run_theirs(schedule_class, plan, chunks, x) if schedule_class else run_ours(plan, chunks, x)

    def step() -> None:
        for chunk in chunks.values():
            chunk.zero_grad()
        run()

    return step


def bench_pp() -> None:
    for name, rival in (("1f1b", "Schedule1F1B"), ("interleaved", "ScheduleInterleaved1F1B"),
                        ("zb1p", "ScheduleInterleavedZeroBubble"), ("zb-v", "ScheduleZBVZeroBubble")):
        compare({f"penteract --schedule {name}": partial(build_pipeline, name, None),
                 rival: partial(build_pipeline, name, rival)}, PP_MICRO_BATCHES * PP_TOKENS, repeats=5, steps=3)


def build_experts(how: str, group: Group) -> Step:
    """Forward and backward of a layer of 8 experts, 2 per token, 512 wide, 1024 inside; gradients accumulate. how:
    "ours", or the name of transformers' implementation."""
    model = config.parse("--hidden 512 --heads 8 --kv-heads 8 --ffn 1024 --experts 8 --top-k 2".split()).model
    x, dy = (torch.randn(EP_TOKENS, model.hidden) for _ in range(2))
    if how == "ours":
        E, H, F = model.experts, model.hidden, model.expert_ffn
        make = partial(parameter, groups={"ep": group}, dtype=torch.float32)
        w_router, router = make(Spec("router", (E, H), std=0.02)), Router("router.bias", model)
        layer = GroupedExperts(make, Spec("w_gate_up", (E, 2 * F, H), {"ep": 0}, "edp", std=0.02),
                               Spec("w_down", (E, H, F), {"ep": 0}, "edp", std=0.02))
        for weight in (w_router, *layer.parameters()):
            weight.data = draw(0)(weight.spec, weight.box)
        info = make_routing_info(torch.zeros(1, EP_TOKENS, dtype=torch.long), None, None, None)

        def forward(x: Tensor) -> Tensor:
            route, gates = router(x, w_router, info, group)
            return combine(layer(dispatch(x, route)(), route), gates, route)
    else:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        layer = MixtralSparseMoeBlock(MixtralConfig(
            hidden_size=model.hidden, intermediate_size=model.ffn, num_local_experts=model.experts,
            num_experts_per_tok=model.top_k, experts_implementation=how))
        for weight in layer.parameters():
            weight.data = torch.randn(weight.shape) / 50

        def forward(x: Tensor) -> Tensor:
            return layer(x[None])[0]

    return lambda: forward(x.detach().requires_grad_()).backward(dy)


def bench_ep() -> None:
    if not dist.is_initialized():
        contenders = {"penteract": "ours", "transformers, loop": "eager", "transformers, grouped": "grouped_mm"}
        compare({name: partial(build_experts, how, None) for name, how in contenders.items()}, EP_TOKENS, 10, 2)
        return
    n, contenders = dist.get_world_size(), {}
    for ep in (ep for ep in range(n, 0, -1) if n % ep == 0):
        group = dist.new_subgroups_by_enumeration(torch.arange(n).view(-1, ep).tolist())[0] if ep > 1 else None
        contenders[f"penteract --ep {ep}"] = partial(build_experts, "ours", group)
    compare(contenders, n * EP_TOKENS, repeats=5, steps=2)


# ---- checkpoints ----------------------------------------------------------------------------------------------------

CHECKPOINT_MODEL = "--layers 8 --hidden 512 --heads 8 --ffn 1408 --zero 1"  # 26M parameters


def gather_and_save(tensors: list[Tensor], path: str) -> None:
    """What a trainer without shards does: the first rank gathers everything and writes it."""
    for i, tensor in enumerate(tensors):
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
        dist.gather(tensor, parts)
        tensors[i] = torch.cat(parts) if parts else None
    if dist.get_rank() == 0:
        torch.save(tensors, path)
    dist.barrier()


def bench_checkpoint() -> None:
    """Saving the optimizer's state, without the check that files can be read back."""
    settings = config.parse(CHECKPOINT_MODEL.split(), dist.get_world_size())
    groups = build_groups(settings.grid, settings.model)
    model, optimizer = assemble.build(settings, groups, torch.device("cpu"), torch.float32)
    shards = [tensor for bucket in optimizer.buckets for tensor in bucket.state.values()]
    host = checkpoint.host_group(600)
    folder = checkpoint.exchange(tempfile.mkdtemp() if dist.get_rank() == 0 else None, host)[0]
    pieces = list(checkpoint.pieces_of_run(optimizer, model.routers, groups, saving=True))
    saver = None

    def save_ours(turn: int) -> float:
        nonlocal saver
        if turn == 0:  # the one whose bytes are counted: with its staging memory, and without a thread
            saver = checkpoint.Saver(f"{folder}/ours", pieces, 1, host)
            saver.stage.copy()
            return saver.write(turn, {})
        wait = saver.save(turn, {})
        saver.finish()
        return wait

    def save_shards(turn: int) -> None:
        dcp.save({f"{rank(host)} {i}": x for i, x in enumerate(shards)}, checkpoint_id=f"{folder}/dcp {turn}")

    contenders = {"checkpoint.py": save_ours, "DCP, each rank's shards": save_shards,
                  "torch.save of the gathered state": lambda turn: gather_and_save(list(shards), f"{folder}/{turn}.pt")}
    lines = ["".ljust(40) + "s a step waits".rjust(18) + "s until saved".rjust(18) + "MB/s".rjust(10)
             + "MB more at peak".rjust(18)]
    for name, save in contenders.items():
        waits, totals, meter = [], [], Meter()
        with meter:
            save(0)
        for turn in range(1, 6):
            dist.barrier()
            began = time.perf_counter()
            wait = save(turn)
            totals.append(time.perf_counter() - began)
            waits.append(totals[-1] if wait is None else wait)
        total = statistics.median(totals)
        lines.append(name.ljust(40) + f"{statistics.median(waits):.3f}".rjust(18) + f"{total:.3f}".rjust(18)
                     + f"{saver.nbytes / total / 1e6:,.0f}".rjust(10) + f"{meter.peak['other'] / 1e6:,.1f}".rjust(18))
    if dist.get_rank() == 0:
        print("\n".join(lines))
        shutil.rmtree(folder)


# ---- the network -----------------------------------------------------------------------------------------------------
# As in nccl-tests: the payload is the larger of a rank's input and output, algorithm bandwidth is payload / time, and
# bus bandwidth is that times the factor below, so that with the best algorithm it is what a rank sends per second.

PROBED_AXES = "tp", "cp", "ep", "edp", "dp", "data", "replicate", "pp"
PROBE_SECONDS = {"cpu": 10, "cuda": 90}  # for all collectives; three payloads are measured anyway
PROBE_TURNS, PAIR_BYTES, SLOW_PAIR = 7, 1 << 20, 2.0  # slow: a pair that takes so many times the median of its kind
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


def prepare(op: str, nbytes: int, group: Group, device: torch.device) -> tuple[int, Step]:
    """A collective of the backend as (its payload in bytes: nbytes, rounded to equal shards; what runs it once)."""
    n, first = size(group), rank(group) == 0
    count = max(1, nbytes // (4 * n))  # fp32 numbers per shard
    full, received, shard = (torch.zeros(elements, device=device) for elements in (n * count, n * count, count))
    parts, splits = list(full.split(count)) if first else None, [count] * n
    calls = {"all_reduce": lambda: collectives.all_reduce(full, group),
             "reduce_scatter": lambda: collectives.reduce_scatter(shard, full, group),
             "all_gather": lambda: collectives.all_gather(full, shard, group),
             "all_to_all": lambda: collectives.all_to_all(received, full, splits, splits, group),
             "broadcast": lambda: dist.broadcast(full, group=group, group_src=0),
             "reduce": lambda: dist.reduce(full, group=group, group_dst=0),
             "scatter": lambda: dist.scatter(shard, parts, group=group, group_src=0),
             "gather": lambda: dist.gather(shard, parts, group=group, group_dst=0),
             "send": lambda: collectives.shift(received, full, group).wait()}
    return full.nbytes, calls[op]


def slowest(seconds: list[float], device: torch.device) -> list[float]:
    """Element by element the maximum over all ranks, so that all decide alike."""
    times = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def time_turns(call: Step, device: torch.device) -> list[float]:
    """The seconds of a call in each turn, on the slowest rank. A turn repeats short calls for about 3 ms."""
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
    return slowest([turn(repeats) for _ in range(PROBE_TURNS)], device)


def payloads(most_bytes: int) -> list[int]:
    """1 kB, 256 kB and 4 MB, which are always measured, then the other 4**k kB that memory allows."""
    first, every = [1 << 10, 1 << 18, 1 << 22], [1 << k for k in range(10, 64, 2)]
    return first + [nbytes for nbytes in every if nbytes not in first and nbytes <= most_bytes]


def measure_op(op: str, group: Group, device: torch.device, most_bytes: int, limit_s: float) -> list[Sample]:
    """One sample per payload, while time allows; the same payloads on every rank."""
    samples, began, rate = [], time.perf_counter(), 0.0
    for nbytes in payloads(most_bytes):
        spent, = slowest([time.perf_counter() - began], device)
        if len(samples) >= 3 and spent + nbytes / rate * (PROBE_TURNS + 2) > limit_s:
            break
        payload, call = prepare(op, nbytes, group, device)
        times = sorted(time_turns(call, device))
        low, high = times[len(times) // 10], times[len(times) * 9 // 10]
        samples.append(Sample(payload, statistics.median(times), low, high))
        rate = max(rate, payload / samples[-1].seconds)
    return sorted(samples)


def fit(samples: list[Sample], factor: float) -> Fit:
    """Least squares of relative errors, so that every payload counts alike. Neither part becomes negative."""
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
    """An eighth of this rank's free memory: the payload, what is received, and as much again for the backend."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // local_ranks
    return int(-slowest([-free / 8], device)[0])


def probed_groups(settings: config.Config, local_ranks: int) -> dict[str, Group]:
    """This rank's groups from the innermost outward: the node, the network (ranks with the same place in every node),
    and the axes of the grid. A group that several of them have in common is named once, "node, dp"."""
    nodes, groups = torch.arange(dist.get_world_size()).view(-1, local_ranks), {}
    for level, members in ("node", nodes), ("network", nodes.T):
        if members.shape[1] > 1:
            groups[level], _ = dist.new_subgroups_by_enumeration(members.tolist())
    axes = build_groups(settings.grid, settings.model)
    groups |= {axis: axes[axis].process_group for axis in PROBED_AXES if axes[axis] is not None}
    names = {}
    for level, group in groups.items():
        names.setdefault(tuple(dist.get_process_group_ranks(group)), []).append(level)
    inward_out = sorted(names, key=lambda ranks: (ranks[-1] - ranks[0], len(ranks)))
    return {", ".join(names[ranks]): groups[names[ranks][0]] for ranks in inward_out}


def curve(samples: list[Sample], factor: float, top: float) -> str:
    """A character per payload of 4**k kB; each height is twice the one below, and the highest is `top` bytes/s."""
    heights = {round(log2(nbytes / 1024) / 2): round(7 + log2(nbytes * factor / seconds / top))
               for nbytes, seconds, *_ in samples}
    return "".join("▁▂▃▄▅▆▇█"[min(7, max(0, heights[k]))] if k in heights else "·" for k in range(max(heights) + 1))


def describe(level: str, group: Group, measured: dict[str, list[Sample]], fits: dict[str, Fit]) -> list[str]:
    """A line per collective and payload, then one per collective with its fit and its curve."""
    n = size(group)
    ranks = " ".join(map(str, dist.get_process_group_ranks(group)))
    lines = [f"{level}: {n} ranks ({ranks}); groups at once: {dist.get_world_size() // n}", ""]
    lines.append("collective".ljust(16) + "bytes".rjust(14) + "us".rjust(12) + "10% to 90%, us".rjust(22)
                 + "algorithm GB/s".rjust(16) + "bus GB/s".rjust(10))
    for op, samples in measured.items():
        for nbytes, seconds, low, high in samples:
            spread = f"{low * 1e6:,.0f} to {high * 1e6:,.0f}"
            rate = nbytes / seconds / 1e9
            lines.append(f"{op:16s}{nbytes:14,}{seconds * 1e6:12,.1f}{spread:>22s}{rate:16.3f}"
                         f"{rate * FACTORS[op](n):10.3f}")
    top = max(nbytes * FACTORS[op](n) / seconds for op in measured for nbytes, seconds, *_ in measured[op])
    lines += ["", "fitted".ljust(16) + "latency, us".rjust(14) + "bus GB/s".rjust(10) + "off by".rjust(8)
              + f"    bus bandwidth over payload, 1 kB, 4 kB, …; █ is {top / 1e9:.2g} GB/s, ▇ half as much, …"]
    for op, (latency, bandwidth, error) in fits.items():
        lines.append(f"{op:16s}{latency * 1e6:14,.1f}{bandwidth / 1e9:10.3f}{error:8.0%}    "
                     + curve(measured[op], FACTORS[op](n), top))
    return [*lines, ""]


def measure_pairs(device: torch.device) -> torch.Tensor:
    """[n, n] seconds in which two ranks exchange PAIR_BYTES, the best of several times; all pairs meet once.

    In each round of a round-robin tournament every rank has one partner: the first stays, the others rotate.
    """
    n, me = dist.get_world_size(), dist.get_rank()
    seats = list(range(n + n % 2))  # the last is empty if n is odd
    outgoing, incoming = torch.zeros(2, PAIR_BYTES // 4, device=device)
    seconds = torch.zeros(n, dtype=torch.float64, device=device)
    for _ in range(len(seats) - 1):
        partner = seats[-1 - seats.index(me)]
        times = []
        for _ in range(PROBE_TURNS):
            dist.barrier()
            began = time.perf_counter()
            if partner < n:
                ring.exchange(dist.group.WORLD, outgoing, partner, incoming, partner)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
        if partner < n:
            seconds[partner] = min(times)
        seats.insert(1, seats.pop())
    matrix = seconds.new_empty(n, n)
    collectives.all_gather(matrix.view(-1), seconds, dist.group.WORLD)
    return torch.maximum(matrix, matrix.T).cpu()


def name_slow_pairs(seconds: torch.Tensor, local_ranks: int) -> list[str]:
    """A line per slow pair, or one about the slowest. Pairs inside nodes and between them are judged apart."""
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
    """A level of the cluster file, which connects so many ranks; fits: of groups of n. Latencies are per hop of a
    ring, bandwidths bus bandwidths per rank; the level's own are the medians over collectives."""
    hops = {op: n - 1 for op in fits} | {"all_reduce": 2 * (n - 1), "send": 1}
    per_collective = {op: {"latency_s": fitted.latency / hops[op], "bandwidth_bytes_per_s": fitted.bandwidth}
                      for op, fitted in fits.items()}
    medians = {key: statistics.median(figures[key] for figures in per_collective.values())
               for key in ("latency_s", "bandwidth_bytes_per_s")}
    return {"name": name, "ranks": ranks, **medians, "per_collective": per_collective}


def describe_cluster(levels: list[dict], device: torch.device, local_ranks: int) -> dict:
    """The cluster file's content. Where a device's peak is not known, it is what a matmul reaches here, in fp32 on
    CPUs, all ranks at once."""
    cuda = device.type == "cuda"
    kind = torch.cuda.get_device_name(device) if cuda else platform.processor() or "CPU"
    width, dtype = (8192, torch.bfloat16) if cuda else (512, torch.float32)
    x = torch.randn(width, width, device=device, dtype=dtype)
    seconds = statistics.median(time_turns(lambda: x @ x, device))
    peak, reached = costs.peak_flops(kind) if cuda else None, 2 * width ** 3 / seconds
    memory = (torch.cuda.get_device_properties(device).total_memory if cuda
              else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // local_ranks)
    measured = {"date": date.today().isoformat(), "backend": dist.get_backend(), "torch": torch.__version__,
                "device": kind}
    return {"name": f"{dist.get_world_size() // local_ranks} x {local_ranks} {kind}", "gpus_per_node": local_ranks,
            "peak_flops": {"bf16": peak or reached}, "achieved_fraction": reached / peak if peak else None,
            "memory_bytes": memory, "levels": levels, "measured": measured}


def parse_probe(flags: list[str], ranks: int) -> tuple[config.Config, str]:
    """The settings, of which the grid and the device count, and the file to write ("": none). Raises ValueError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--out", default="")
    try:
        known, flags = parser.parse_known_args(flags)
    except argparse.ArgumentError:
        raise ValueError("--out needs the name of a file") from None
    folder = os.path.dirname(known.out) or "."
    need(os.path.isdir(folder), f"--out {known.out}: there is no folder {folder}")
    need(not os.path.isdir(known.out), f"--out {known.out} is a folder: name a file")
    return config.parse(flags, ranks), known.out


def bench_probe(flags: list[str]) -> None:
    settings, out = parse_probe(flags, dist.get_world_size())
    device = assemble.choose_device(settings.run.device)[0]
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    groups = probed_groups(settings, local_ranks)
    most_bytes = largest_payload(device, local_ranks)
    lines, levels, began, left = [], [], time.perf_counter(), len(groups) * len(FACTORS)
    for level, group in groups.items():
        measured = {}
        for op in FACTORS:
            spent, = slowest([time.perf_counter() - began], device)
            measured[op] = measure_op(op, group, device, most_bytes, (PROBE_SECONDS[device.type] - spent) / left)
            left -= 1
        fits = {op: fit(samples, FACTORS[op](size(group))) for op, samples in measured.items()}
        lines += describe(level, group, measured, fits)
        if level.startswith("node"):
            levels.append(describe_level("node", local_ranks, size(group), fits))
        elif level.startswith("network"):
            levels.append(describe_level("network", dist.get_world_size(), size(group), fits))
    lines += name_slow_pairs(measure_pairs(device), local_ranks)
    cluster = describe_cluster(levels, device, local_ranks)
    if dist.get_rank() == 0:
        print("\n".join(lines))
        if out:
            with open(out, "w") as file:
                json.dump(cluster, file, indent=1)
            print(f"written: {out}")


# ---- the command line -----------------------------------------------------------------------------------------------

PARTS = {**{part: partial(bench_training, part) for part in TRAINING}, "cp": bench_cp, "pp": bench_pp, "ep": bench_ep,
         "checkpoint": bench_checkpoint, "probe": bench_probe,
         "gpu": lambda flags: importlib.import_module("bench_gpu").measure(flags)}  # it needs Triton
WITH_FLAGS = *TRAINING, "probe", "gpu"


def check(parts: list[str], flags: list[str], ranks: int) -> None:
    """Raises ValueError, one line, for what cannot run."""
    need("gpu" not in parts or len(parts) == 1, "gpu shares no run: its flags are not those of train.py")
    for part in parts:
        need(not flags or part in WITH_FLAGS, f"{' '.join(flags)}: {part} has fixed sizes and needs no flags")
        need(ranks > 1 or part in ("train", "ep", "gpu"),
             f"{part} needs several ranks: run under torchrun --nproc_per_node=4 bench.py {part}")
        need(ranks == 1 or part not in ("train", "gpu"),
             f"{part} is for one process, not {ranks} ranks: run python bench.py {part}")
    need("probe" not in parts or len(parts) == 1, "probe shares no run: its --out is not that of train.py")
    need("gpu" not in parts or torch.cuda.is_available(), "gpu needs a GPU, and there is none here")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="part", help=", ".join(PARTS))
    known, flags = parser.parse_known_args()
    ranks, device = int(os.environ.get("WORLD_SIZE", 1)), torch.device("cpu")
    try:
        check(known.parts, flags, ranks)
        if known.parts == ["gpu"]:
            importlib.import_module("bench_gpu").parse(flags)
        if known.parts == ["probe"]:
            device = assemble.choose_device(parse_probe(flags, ranks)[0].run.device)[0]
    except ValueError as error:
        config.refuse(error, "bench.py")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with collectives.world(device) if "WORLD_SIZE" in os.environ else nullcontext():
        for part in known.parts:
            PARTS[part](flags) if part in WITH_FLAGS else PARTS[part]()
