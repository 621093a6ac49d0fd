"""Other people's code as a judge: torch's FSDP2, DTensor, pipelining and ring attention give transformers' Llama the
same gradients as our techniques give ours, and transformers and torch.optim train our models to the same losses.

Both sides begin with the same weights: ours are exported, and transformers opens them.
"""
import tempfile
from collections.abc import Iterator
from unittest.mock import patch

import grids
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.tensor import DTensor, parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer
from transformers.models.llama import modeling_llama
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import train
from bench import __main__ as bench
from core import config, param
from learn import judge
from learn.judge import Record
from run import huggingface
from test_grids import compare, model_flags


def exported(settings: config.Config) -> nn.Module:
    """transformers' class of the model with our first weights, in fp64, apart from what it always computes in fp32."""
    specs = [p.spec for p in train.Llama(settings.model, {}).parameters()]
    with tempfile.TemporaryDirectory() as folder:
        huggingface.export(folder, settings.model, specs, param.draw(settings.optim.seed), "fp32")
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="sdpa", experts_implementation="eager",
            use_cache=False).train()  # eager: torch's grouped matmul has no fp64


# ---- gradients of one step, to 1e-10 --------------------------------------------------------------------------------

class Angles(nn.Module):
    """cos and sin of the rotary embedding in fp64, [B, S, D]; transformers' own are in fp32."""

    def __init__(self, config: transformers.LlamaConfig):
        super().__init__()
        self.theta, self.width = config.rope_parameters["rope_theta"], config.head_dim

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = self.theta ** -(torch.arange(0, self.width, 2, dtype=x.dtype) / self.width)
        angles = (position_ids[..., None] * frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


def exact_llama(settings: config.Config) -> nn.Module:
    """transformers' Llama with norms and angles in fp64, too."""
    with patch.multiple(modeling_llama, LlamaRMSNorm=nn.RMSNorm, LlamaRotaryEmbedding=Angles):
        return exported(settings)


def by_fsdp(llama: nn.Module, tokens: Tensor, labels: Tensor) -> None:
    bench.shard_fully(llama)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    loss = summed(llama(input_ids=tokens[mine]).logits, labels[mine]) / (labels >= 0).sum()
    (loss * dist.get_world_size()).backward()  # FSDP averages over ranks


def by_dtensor(llama: nn.Module, tokens: Tensor, labels: Tensor) -> None:
    bench.shard_by_dtensor(llama, dist.get_world_size())
    with parallel.loss_parallel():
        logits = llama(input_ids=tokens, position_ids=torch.arange(tokens.shape[1])[None]).logits
        (summed(logits, labels) / (labels >= 0).sum()).backward()


class Stage(nn.Module):
    """The layers of a pipeline stage, the first with the embedding, the last with the head."""

    def __init__(self, llama: nn.Module, stage: int, stages: int):
        super().__init__()
        count = len(llama.model.layers) // stages
        self.embedding = llama.model.embed_tokens if stage == 0 else None
        self.layers = llama.model.layers[stage * count:(stage + 1) * count]
        self.head = nn.Sequential(llama.model.norm, llama.lm_head) if stage == stages - 1 else nn.Identity()
        self.angles = llama.model.rotary_emb

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        angles = self.angles(x, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x = layer(x, position_embeddings=angles)
        return self.head(x)


def by_pipelining(llama: nn.Module, tokens: Tensor, labels: Tensor, schedule: str, stages: list[list[int]],
                  micro_batches: int) -> None:
    """stages: of each rank."""
    count, valid = sum(map(len, stages)), (labels >= 0).sum()
    parts = [pipelining.PipelineStage(Stage(llama, stage, count), stage, count, torch.device("cpu"))
             for stage in stages[dist.get_rank()]]
    engine = getattr(pipelining.schedules, schedule)(
        parts if len(parts) > 1 else parts[0], micro_batches, lambda y, labels: summed(y, labels) / valid,
        scale_grads=False)
    mine = stages[dist.get_rank()]
    engine.step(*[tokens] * (0 in mine), target=labels if count - 1 in mine else None)


class TorchRing(torch.autograd.Function):
    """Causal attention by torch's ring, over which context_parallel() runs CUDA's kernels; here it runs the CPU's."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = torch_ring._templated_ring_attention(
            dist.group.WORLD, 2, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v,
            is_causal=True, dropout_p=0.0)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return torch_ring._templated_ring_attention_backward(
            dist.group.WORLD, 2, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default, grad,
            "grad_out", q, k, v, out, lse, is_causal=True, dropout_p=0.0)


def by_ring(llama: nn.Module, tokens: Tensor, labels: Tensor) -> None:
    n, S, valid = dist.get_world_size(), tokens.shape[1], (labels >= 0).sum()
    mesh = dist.device_mesh.init_device_mesh("cpu", (n,))
    buffers = [tokens, labels, torch.arange(S).expand(tokens.shape)]
    tokens, labels, positions = torch_ring._context_parallel_shard(
        mesh, buffers, [1, 1, 1], _HeadTailLoadBalancer(S, n, torch.device("cpu")))

    def attention(q, k, v, **settings):
        groups = q.shape[1] // k.shape[1]
        return TorchRing.apply(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))

    with (patch.object(F, "scaled_dot_product_attention", attention),
          patch.object(torch_ring._cp_options, "convert_to_f32", False)):
        logits = llama(input_ids=tokens, position_ids=positions).logits
        (summed(logits, labels) / valid).backward()
    for p in llama.parameters():
        dist.all_reduce(p.grad)


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


RIVALS = {"fsdp": by_fsdp, "dtensor": by_dtensor, "ring": by_ring, "pipelining": by_pipelining}


def gradients(rival: str, flags: str, folder: str, **more) -> tuple[list, dict[str, Tensor]]:
    """What this rank holds of our gradients of the first step, and of the rival's by our names; a record of these."""
    settings = grids.settings_of(flags, dist.get_world_size())
    ours = grids.run(flags, last=1)["grads"][0]
    llama = exact_llama(settings)
    RIVALS[rival](llama, *grids.batches(settings)[0], **more)
    Record(folder).step(model=llama)
    theirs = {name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
              for name, p in llama.named_parameters() if p.grad is not None}
    names = {huggingface.names_on_disk(name, "LlamaForCausalLM")[0]: name for name in grids.initial(settings)}
    return ours, {names[name]: grad for name, grad in theirs.items()}


@pytest.mark.parametrize("ranks, flags, rival", [
    (2, "--zero 3", dict(rival="fsdp")), (2, "--tp 2 --vocab 98", dict(rival="dtensor")),
    (2, "--cp 2 --cp-style ring", dict(rival="ring")),
    pytest.param(4, "--cp 4", dict(rival="ring"), marks=pytest.mark.slow),
    (2, "--pp 2 --layers 4 --schedule 1f1b", dict(
        rival="pipelining", schedule="Schedule1F1B", stages=[[0], [1]], micro_batches=4)),
    (2, "--pp 2 --layers 4 --schedule zb-v", dict(
        rival="pipelining", schedule="ScheduleZBVZeroBubble", stages=[[0, 3], [1, 2]], micro_batches=4))])
def test_gradients_are_those_of_torchs_own_parallelism(pool, tmp_path, ranks, flags, rival):
    """And learn/judge.py, which knows nothing of ours, accuses it of nothing."""
    flags = f"--global-batch 8 --micro-batch 2 {flags}"
    results = pool.run(ranks, gradients, flags=flags, folder=str(tmp_path / "grid"), **rival)
    theirs = {}
    for _, grads in results:
        theirs |= grads
    compare(grids.whole([ours for ours, _ in results]), theirs, "gradient")
    settings = grids.settings_of(model_flags(flags))
    llama, (tokens, labels) = exact_llama(settings), grids.batches(settings)[0]
    (summed(llama(input_ids=tokens).logits, labels) / (labels >= 0).sum()).backward()
    Record(tmp_path / "one").step(model=llama)
    assert judge.Judge(judge.Run(tmp_path / "one"), judge.Run(tmp_path / "grid")).findings() == []


# ---- losses of 20 steps, to 1e-7: norms, routers and angles of transformers are in fp32 -----------------------------

MIXTRAL = "--experts 8 --top-k 2 --expert-ffn 20 --micro-batch 16 --aux-loss {} --aux-over micro-batch"
Steps = Iterator[tuple[float, float, float]]  # loss, that which balances experts, largest load of one over the mean


def steps(settings: config.Config, batches: list[tuple[Tensor, Tensor]]) -> Steps:
    _, ours, pipeline, optimizer = grids.build(settings, "fp64", grids.NO_GROUPS)
    for tokens, labels in batches:
        share = grids.GivenSamples(tokens, labels).step(0, len(tokens), settings.batch.micro_batch, 0, 1)
        loss = train.forward_backward(ours, pipeline, optimizer, share, grids.NO_GROUPS).item()
        finite = optimizer.step(settings.optim.lr).isfinite()
        found = train.update_balance(ours, grids.NO_GROUPS, finite, len(tokens)) if settings.model.experts else {}
        yield loss, float(found.get("aux_loss", 0)), float(found.get("load_max_over_mean", 0))


def steps_of_transformers(settings: config.Config, batches: list[tuple[Tensor, Tensor]]) -> Steps:
    model, optim, theirs = settings.model, settings.optim, exported(settings)
    adamw = bench.build_adamw(theirs, optim)
    for tokens, labels in batches:
        result = theirs(input_ids=tokens, **dict(output_router_logits=True) if model.experts else {})
        loss, balance = summed(result.logits, labels) / (labels >= 0).sum(), torch.zeros(())
        if optim.aux_loss and model.experts:  # theirs counts each of the top_k choices, ours their mean
            balance = optim.aux_loss / model.top_k * load_balancing_loss_func(
                result.router_logits, model.experts, model.top_k)
        (loss + balance).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), optim.grad_clip)
        adamw.step()
        adamw.zero_grad()
        chosen = [logits.topk(model.top_k).indices.flatten() for logits in getattr(result, "router_logits", ())]
        loads = [experts.bincount(minlength=model.experts).double() for experts in chosen]
        yield loss.item(), balance.item(), max(((load.max() / load.mean()).item() for load in loads), default=0)


@pytest.mark.parametrize("flags", ["", "--qk-norm", MIXTRAL.format(0), MIXTRAL.format(0.5) + " --layers 1"],
                         ids=["llama", "qwen3", "mixtral", "mixtral, one layer, balanced"])
def test_20_steps_of_transformers_and_torch_have_the_same_losses(flags):
    settings = grids.settings_of(f"--global-batch 16 --micro-batch 4 --layers 2 {flags}")
    generator, batches = torch.Generator().manual_seed(3), []
    for _ in range(20):
        window = torch.randint(settings.model.vocab, (16, 25), generator=generator)
        batches.append((window[:, :-1], window[:, 1:]))
    for ours, want in zip(steps(settings, batches), steps_of_transformers(settings, batches), strict=True):
        assert ours[0] == pytest.approx(want[0], rel=1e-7) and ours[1:] == pytest.approx(want[1:], rel=1e-6)
