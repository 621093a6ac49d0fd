"""Ours beside what one would use instead: the same work, taking turns, so that both see the same machine.

    python bench.py train                               a training step, beside transformers' Llama with fused AdamW
    python bench.py ep                                  a layer of experts, beside transformers' Mixtral block with its
                                                        grouped matmul, and with its loop over experts
    torchrun --nproc_per_node=4 bench.py ep             the same layer as more ranks share its experts
    python bench.py gpu                                 everything that one GPU can show, see bench_gpu.py
    torchrun --nproc_per_node=4 bench.py pp             a step of a pipeline, beside torch.distributed.pipelining
    torchrun --nproc_per_node=4 bench.py cp             attention of one long sequence in three styles, beside keys
                                                        and values gathered by torch and its attention with a mask
    torchrun --nproc_per_node=4 bench.py dp zero tp     the same step on 4 ranks, beside DistributedDataParallel,
                                                        ZeroRedundancyOptimizer (stage 1), fully_shard (stage 3), and
                                                        DTensor's parallelize_module with sequence parallelism

Flags of train.py choose the model and the batch. Each contender computes the mean loss over the valid tokens of the
global batch, clips the norm of the whole gradient, and updates with fused AdamW; gradients are summed in fp32.

Times are medians and 10th to 90th percentile. Bytes sent, collectives and live bytes are counted in a step of their
own, at every operation (meter.py). A ratio is ours / theirs: below 1 we are faster, or send or hold less.
"""
import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import pipelining
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.distributed_c10d import _resolve_process_group

import collectives
import config
import schedules
import train
from collectives import rank, size
from config import CP_STYLES
from cp import attention_by_window
from data import MicroBatch
from ep import NO_BALANCE, GroupedExperts, Router, combine, dispatch, routed_tokens
from meter import Meter
from param import Spec, draw, parameter
from pp import Engine
from tp import TensorParallel, column, row

Step = Callable[[], None]

# Tokens: of the sequences of `cp`, of a micro-batch of `pp`, and of a rank of `ep`.
CP_SEQUENCES, PP_TOKENS, EP_TOKENS = (4096, 8192), 512, 2048


# ---- measuring ------------------------------------------------------------------------------------------------------

def take_turns(contenders: dict[str, Step], repeats: int, steps: int) -> dict[str, list[float]]:
    """Seconds a step: for each contender in turn, `repeats` times, the mean of `steps`. A first turn does not count."""
    seconds = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name, step in contenders.items():
            if dist.is_initialized():
                dist.barrier()
            began = time.perf_counter()
            for _ in range(steps if turn else 2):
                step()
            if turn:
                seconds[name].append((time.perf_counter() - began) / steps)
    return seconds


def counted(build: Callable[[], Step]) -> dict[str, float]:
    """What a step sends and holds on this rank, by the ring's formulas and by live storages from its making on."""
    meter = Meter()
    with meter:
        step = build()
        step()
        rest = meter.live()["all"]
        meter.peak.clear()
        meter.collectives.clear()
        step()
    times, sent = {"allreduce_": 2, "all_reduce": 2}, 0  # by others once
    for call in meter.collectives:
        n = _resolve_process_group(call.group).size()
        sent += {"send": 1, "recv_": 0}.get(call.name, times.get(call.name, 1) * (n - 1) / n) * call.bytes
    return {"MB sent": sent / 1e6, "collectives": len(meter.collectives), "MB at rest": rest / 1e6,
            "MB at peak": meter.peak["all"] / 1e6}


def compare(contenders: dict[str, Callable[[], Step]], tokens: int, repeats: int = 5, steps: int = 20) -> None:
    """One line a contender, given as what builds its step; the ratio is of its figure to the last one's."""
    counts = {name: counted(build) if dist.is_initialized() else {} for name, build in contenders.items()}
    seconds = take_turns({name: build() for name, build in contenders.items()}, repeats, steps)
    if dist.is_initialized() and dist.get_rank():
        return
    *_, last = contenders
    for name, times in seconds.items():
        median = statistics.median(times)
        low, high = (sorted(times)[int(len(times) * q)] for q in (0.1, 0.9))
        print(f"    {name:28s} {median * 1e3:7.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f})  "
              f"{tokens / median:8,.0f} tokens/s   ratio {median / statistics.median(seconds[last]):.2f}")
        for what, value in counts[name].items():
            ratio = f"ratio {value / counts[last][what]:.2f}" if counts[last][what] else ""
            print(f"        {what:14s} {value:8.2f}   {ratio}")


# ---- contenders -----------------------------------------------------------------------------------------------------

def ours(settings: config.Config, tokens: torch.Tensor, labels: torch.Tensor) -> Step:
    groups = train.build_groups(settings.grid, settings.model)
    model, optimizer = train.build(settings, groups, torch.device("cpu"), torch.float32)
    share = slice(rank(groups["data"]), None, size(groups["data"]))
    batch = MicroBatch(tokens[share].contiguous(), labels[share].contiguous())

    def step() -> None:
        train.forward_backward(model, optimizer, [batch], groups)
        optimizer.step(settings.optim.lr)

    return step


def their_llama(shape: config.Model) -> torch.nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied, attn_implementation="sdpa", use_cache=False)).train()


def decayed_and_not(model: torch.nn.Module, optim: config.Optim) -> list[dict]:
    matrices, vectors = ([p for p in model.parameters() if (p.ndim >= 2) == wanted] for wanted in (True, False))
    return [dict(params=matrices, weight_decay=optim.weight_decay), dict(params=vectors, weight_decay=0.0)]


def theirs(settings: config.Config, tokens: torch.Tensor, labels: torch.Tensor, wrap: str = "") -> Step:
    """transformers' Llama and torch's AdamW, alone or wrapped by "ddp", "zero1" or "fsdp"."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model, optim = their_llama(settings.model), settings.optim
    if wrap == "fsdp":
        for layer in (model.model.embed_tokens, *model.model.layers):  # the units that we have, too
            fully_shard(layer)
        fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False)
        fully_shard(model)
    elif wrap:
        model = DistributedDataParallel(model, bucket_cap_mb=settings.grid.bucket_mb, forward_sync_buffers=False)
    decayed, rule = decayed_and_not(model, optim), dict(lr=optim.lr, betas=optim.betas, fused=True)
    adamw = ZeroRedundancyOptimizer(decayed, torch.optim.AdamW, **rule) if wrap == "zero1" else \
        torch.optim.AdamW(decayed, **rule)
    share = slice(dist.get_rank(), None, dist.get_world_size()) if wrap else slice(None)
    tokens, labels = tokens[share].contiguous(), labels[share].contiguous()

    def step() -> None:
        valid = (labels >= 0).sum()
        if wrap:
            dist.all_reduce(valid)
        logits = model(input_ids=tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / valid
        (loss * dist.get_world_size() if wrap else loss).backward()  # both wrappers divide by the number of ranks
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip)
        if wrap:
            dist.all_reduce(loss.detach())
            norm.full_tensor() if wrap == "fsdp" else norm
        adamw.step()
        adamw.zero_grad()

    return step


def dtensor(settings: config.Config, tokens: torch.Tensor, labels: torch.Tensor) -> Step:
    """transformers' Llama under parallelize_module, with the plan that torchtitan uses; the loss in parts, too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    model, optim = their_llama(settings.model), settings.optim
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
    parallelize_module(model, mesh, plan)
    adamw = torch.optim.AdamW(decayed_and_not(model, optim), lr=optim.lr, betas=optim.betas, fused=True)
    positions = torch.arange(tokens.shape[1])[None]

    def step() -> None:
        with loss_parallel():
            logits = model(input_ids=tokens, position_ids=positions).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (labels >= 0).sum()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip).full_tensor()
        adamw.step()
        adamw.zero_grad()

    return step


# ---- comparisons ----------------------------------------------------------------------------------------------------

def random_batch(settings: config.Config) -> tuple[torch.Tensor, torch.Tensor]:
    shape = settings.batch.global_batch, settings.batch.seq + 1
    window = torch.randint(settings.model.vocab, shape, generator=torch.Generator().manual_seed(0))
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def settings_for(flags: list[str]) -> config.Config:
    return config.parse(flags, dist.get_world_size() if dist.is_initialized() else 1)


def bench_train(flags: list[str]) -> None:
    settings = settings_for(flags)
    batch = random_batch(settings)
    compare({"penteract": partial(ours, settings, *batch),
             "transformers + fused AdamW": partial(theirs, settings, *batch)}, batch[0].numel(), repeats=60, steps=1)


def bench_sharded(flags: list[str], pairs: dict[str, tuple[str, str]]) -> None:
    for stage, (name, wrap) in pairs.items():
        settings = settings_for([*flags, "--zero", stage])
        batch = random_batch(settings)
        compare({f"penteract --zero {stage}": partial(ours, settings, *batch),
                 name: partial(theirs, settings, *batch, wrap)}, batch[0].numel())


def bench_dp(flags: list[str]) -> None:
    bench_sharded(flags, {"0": ("DistributedDataParallel", "ddp")})


def bench_zero(flags: list[str]) -> None:
    bench_sharded(flags, {"1": ("ZeroRedundancyOptimizer", "zero1"), "3": ("fully_shard", "fsdp")})


def bench_tp(flags: list[str]) -> None:
    ways = {"gathering again": [], "--sp-keep": ["--sp-keep"]}
    for name, more in ways.items():
        settings = settings_for(["--kv-heads", "4", *flags, "--tp", str(dist.get_world_size()), *more])
        batch = random_batch(settings)
        compare({f"penteract, {name}": partial(ours, settings, *batch),
                 "DTensor": partial(dtensor, settings, *batch)}, batch[0].numel())


def attention_step(how: str, seq: int) -> Step:
    """Forward and backward of this rank's part of one sequence: 4 heads of 64, 2 of keys and values, fp32."""
    group, c, i = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    q, k, v = (torch.randn(1, heads, seq // c, 64, requires_grad=True) for heads in (4, 2, 2))
    do = torch.randn(q.shape)
    if how == "by hand":
        visible = torch.arange(i * seq // c, (i + 1) * seq // c)[:, None] >= torch.arange(seq)

        def attend(q, k, v):
            k, v = (all_gather_tensor_autograd(x, 2, group) for x in (k, v))
            return F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True)
    else:
        attend = attention_by_window([0], torch.empty(1, seq // c), None, kernel="auto", head_dim=64,
                                     dtype=torch.float32, group=group, style=how)[0]

    def step() -> None:
        q.grad = k.grad = v.grad = None
        attend(q, k, v).backward(do)

    return step


def bench_cp(flags: list[str]) -> None:
    for seq in CP_SEQUENCES:
        compare({f"{how}, {seq} tokens": partial(attention_step, how, seq) for how in (*CP_STYLES, "by hand")}, seq,
                repeats=5, steps=1)


class Stage(torch.nn.Module):
    """Three times x + down(tanh(up(x))): with our layers, or with torch's."""

    def __init__(self, ours: bool, width: int = 256):
        super().__init__()
        self.ours, shapes = ours, ((4 * width, width), (width, 4 * width))
        if ours:
            self.weights = torch.nn.ParameterList(parameter(Spec(f"{i}", shape), {}, torch.float32)
                                                  for i, shape in enumerate(3 * shapes))
            for weight in self.weights:
                weight.data = torch.randn(weight.shape) / 64
        else:
            self.layers = torch.nn.ModuleList(torch.nn.Linear(shape[1], shape[0], bias=False) for shape in 3 * shapes)

    def forward(self, x):
        for i in (0, 2, 4):
            if self.ours:
                tp = TensorParallel()
                x = x + row(torch.tanh(column(x, self.weights[i], tp=tp)), self.weights[i + 1], tp)
            else:
                x = x + self.layers[i + 1](torch.tanh(self.layers[i](x)))
        return x


def pipelined(schedule: str, kind: str | None, width: int = 256, m: int = 8) -> Step:
    """kind: the class of torch's schedule; None: ours."""
    group, p, tokens = dist.group.WORLD, dist.get_world_size(), PP_TOKENS
    plan = schedules.plan(schedule, p, m)
    mine = [stage for stage, owner in enumerate(plan.owners[0]) if owner == dist.get_rank()]
    chunks, x = {stage: Stage(kind is None) for stage in mine}, torch.randn(m * tokens, width)
    if kind is None:
        engine = Engine(plan, group)

        def forward(stage: int, k: int, given: torch.Tensor | None) -> torch.Tensor:
            y = chunks[stage](x[k * tokens:(k + 1) * tokens] if given is None else given)
            return y.square().sum() if stage == plan.stages - 1 else y

        def run() -> None:
            engine.run(forward, (tokens, width), torch.float32)
    else:
        example = torch.randn(tokens, width, requires_grad=True)  # so, it expects gradients
        stages = [pipelining.PipelineStage(chunks[stage], stage, plan.stages, torch.device("cpu"), (example,),
                                           (example,), group=group) for stage in mine]
        given = stages if len(stages) > 1 else stages[0]
        steps = getattr(pipelining.schedules, kind)(given, m, lambda y, target: y.square().sum(), scale_grads=False)

        def run() -> None:
            first, last = ((x,) if 0 in chunks else ()), (x if plan.stages - 1 in chunks else None)
            steps.step(*first, target=last, return_outputs=False)

    def step() -> None:
        for chunk in chunks.values():
            for param in chunk.parameters():
                param.grad = None
        run()

    return step


def bench_pp(flags: list[str]) -> None:
    for schedule, kind in (("1f1b", "Schedule1F1B"), ("interleaved", "ScheduleInterleaved1F1B"),
                           ("zb1p", "ScheduleInterleavedZeroBubble"), ("zb-v", "ScheduleZBVZeroBubble")):
        ours, theirs = (partial(pipelined, schedule, whose) for whose in (None, kind))
        compare({f"penteract, {schedule}": ours, kind: theirs}, 8 * PP_TOKENS, repeats=5, steps=3)


def experts_step(how: str, group: collectives.Group) -> Step:
    """Forward and backward of a layer of 8 experts, 2 a token, 512 wide, 1024 inside; gradients add up. how: "ours", or
    as transformers computes its experts."""
    model = config.parse("--hidden 512 --heads 8 --kv-heads 8 --ffn 1024 --experts 8 --top-k 2".split()).model
    tokens = EP_TOKENS
    x, up = (torch.randn(tokens, model.hidden) for _ in range(2))
    if how == "ours":
        E, H, F = model.experts, model.hidden, model.expert_ffn
        make = partial(parameter, groups={"ep": group}, dtype=torch.float32)
        w_router, router = make(Spec("router", (E, H), std=0.02)), Router("router.bias", model, NO_BALANCE)
        layer = GroupedExperts(make, Spec("w_gate_up", (E, 2 * F, H), {"ep": 0}, "edp", std=0.02),
                               Spec("w_down", (E, H, F), {"ep": 0}, "edp", std=0.02))
        for weight in (w_router, *layer.parameters()):
            weight.data = draw(0)(weight.spec, weight.box)
        info = routed_tokens(torch.zeros(1, tokens, dtype=torch.long), None, None, None)

        def forward(x):
            route, weights = router(x, w_router, info, group)
            return combine(layer(dispatch(x, route)(), route), weights, route)
    else:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        theirs = MixtralConfig(hidden_size=model.hidden, intermediate_size=model.ffn, num_local_experts=model.experts,
                               num_experts_per_tok=model.top_k, experts_implementation=how)
        layer = MixtralSparseMoeBlock(theirs)
        for weight in layer.parameters():
            weight.data = torch.randn(weight.shape) / 50

        def forward(x):
            return layer(x[None])[0]

    def step() -> None:
        forward(x.detach().requires_grad_()).backward(up)

    return step


def bench_ep(flags: list[str]) -> None:
    if not dist.is_initialized():
        ways = {"penteract": "ours", "transformers, loop": "eager", "transformers, grouped": "grouped_mm"}
        compare({name: partial(experts_step, how, None) for name, how in ways.items()}, EP_TOKENS, repeats=10, steps=2)
        return
    n, contenders = dist.get_world_size(), {}
    for ep in (ep for ep in range(1, n + 1) if n % ep == 0):
        neighbours = torch.arange(n).view(-1, ep).tolist()
        group = dist.new_subgroups_by_enumeration(neighbours)[0] if ep > 1 else None
        contenders[f"ep {ep}"] = partial(experts_step, "ours", group)
    compare(dict(reversed(contenders.items())), n * EP_TOKENS, repeats=5, steps=2)


def bench_gpu(flags: list[str]) -> None:
    import bench_gpu

    bench_gpu.measure()


BENCHES = {"train": bench_train, "dp": bench_dp, "zero": bench_zero, "tp": bench_tp, "cp": bench_cp, "pp": bench_pp,
           "ep": bench_ep, "gpu": bench_gpu}


def main(chosen: list[str], flags: list[str]) -> None:
    settings = settings_for(flags)
    if not dist.is_initialized() or dist.get_rank() == 0:
        batch = settings.batch
        print(f"{settings.model.preset}, {batch.global_batch} x {batch.seq} tokens, fp32, {settings.grid.dp} ranks, "
              f"{torch.get_num_threads()} threads each, torch {torch.__version__}")
    for name in chosen:
        BENCHES[name](flags)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=BENCHES)
    known, flags = parser.parse_known_args()
    if "gpu" in known.what and not torch.cuda.is_available():
        parser.exit(2, "bench.py: gpu needs a GPU, and there is none here\n")
    with collectives.world() if "WORLD_SIZE" in os.environ else nullcontext():
        main(known.what, flags)
