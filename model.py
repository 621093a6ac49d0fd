"""A Llama, which reads almost as if for one GPU: embedding, blocks, head.

    tokens -> embedding -> [ x + attention(norm(x)) -> x + ffn(norm(x)) ] per layer -> norm -> head -> loss

Most communication is inside the layers it is built from. A column-parallel layer takes the [T/t, H] that a rank has
between layers and returns all T tokens for this rank's heads or channels; a row-parallel layer returns to [T/t, H].
Context parallelism is inside attention (and in the loss that balances experts, which counts whole sequences). The grid
shows in three places: a Spec says how each weight is sharded, MixtureOfExperts dispatches tokens to experts, and Llama
builds only this rank's pipeline stages. recompute.py decides what is saved for backward; here `cheap(f, x)` only marks
what selective recomputation recomputes.

Llama: Touvron et al. 2023; grouped queries: Ainslie et al. 2023.

Shapes: B batch, S tokens of a sequence on this rank (1/c of it with c context parallel ranks), T = B S, t tensor
parallel ranks, H hidden, N query heads, K key and value heads, D head width, F ffn, V vocabulary, E experts, L layers.
[T/t, H] is what a rank has between layers with sequence parallelism; without, it is [T, H].
"""
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from collectives import Groups
from config import Model
from cp import attention_by_window
from ep import Balance, GroupedExperts, Router, combine, dispatch, make_routing_info
from operations import RMSNorm, rotary_angles, rotate_and_split, swiglu
from param import Spec, parameter
from pp import Pipeline
from recompute import Recompute, cheap, is_recomputing
from tp import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    VocabParallelHead,
    merge_tokens,
    split_tokens,
)

MakeParameter = Callable[[Spec], nn.Parameter]
INIT_STD = 0.02  # of weights, as in GPT-2


class ForwardContext(NamedTuple):
    """What all layers of one forward share. recomputing: a block runs for the second time."""
    tp: TensorParallel
    seq: int  # tokens of a sequence on this rank
    angles: tuple[Tensor, Tensor]  # cos and sin of rotary embedding: [S, 1, D/2] or [B, S, 1, D/2]
    attention: dict[int, Callable[[Tensor, Tensor, Tensor], Tensor]]  # window (0: none) -> its function of q, k, v
    recompute: Recompute
    routing: Any  # an ep.RoutingInfo; None without experts
    recomputing: bool = False
    cache: Any = None  # a sampling.KVCache


def table_spec(model: Model, name: str) -> Spec:
    """A tied table is on the first and on the last pipeline stage; its gradient is the sum of theirs (axis "tie")."""
    tie = {"tie": "partial"} if model.tied else {}
    return Spec(name, (model.vocab, model.hidden), {"tp": 0} | tie, std=INIT_STD)


def output_std(model: Model) -> float:
    """Initial std of matrices that write to the residual stream, scaled as in GPT-2 by the 2 L additions to it."""
    return INIT_STD / (2 * model.layers) ** 0.5


# ---- layers ---------------------------------------------------------------------------------------------------------

class Attention(nn.Module):
    """Grouped-query attention. A tensor parallel rank has N/t query heads, and K/t key and value heads, at least 1."""

    def __init__(self, layer: int, model: Model, make: MakeParameter, t: int):
        super().__init__()
        H, D, name = model.hidden, model.head_dim, f"layers.{layer}.attention."
        kv_heads = max(model.kv_heads // t, 1)
        self.layer, self.window, self.head_dim = layer, model.window_of(layer), D
        self.heads = [model.heads // t, kv_heads, kv_heads]  # of q, k and v, on this rank
        kv_along = {"tp": 0}
        if model.kv_heads % t:  # t > K: t/K ranks share a head but have different queries, so its gradient is partial
            kv_along = {"kv": 0, "kv_copy": "partial"}
        projections = [("q", model.heads * D, {"tp": 0}), ("k", model.kv_heads * D, kv_along),
                       ("v", model.kv_heads * D, kv_along)]
        weights = [Spec(f"{name}w{x}", (rows, H), along, std=INIT_STD) for x, rows, along in projections]
        biases = [Spec(f"{name}b{x}", (rows,), along, decay=False) for x, rows, along in projections]
        self.qkv = ColumnParallelLinear(make, *weights, biases=biases if model.qkv_bias else [])
        self.out = RowParallelLinear(make, Spec(name + "wo", (H, model.heads * D), {"tp": 1}, std=output_std(model)))
        self.q_norm = self.k_norm = None
        if model.qk_norm:
            self.q_norm = RMSNorm(make, name + "q_norm", D, model.norm_eps, {"tp": "partial"})
            self.k_norm = RMSNorm(make, name + "k_norm", D, model.norm_eps, {"tp": "partial"})

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:  # [T/t, H] -> [T/t, H]
        qkv = self.qkv(x, context.tp)  # [T, (N + 2K) D / t]: one gather and one matmul for all three
        qkv = rearrange(qkv, "(b s) (n d) -> b s n d", s=context.seq, d=self.head_dim)
        if self.q_norm is None:
            q, k, v = rotate_and_split(qkv, context.angles, self.heads)
        else:
            q, k, v = qkv.split(self.heads, dim=2)
            q, = rotate_and_split(self.q_norm(q), context.angles, self.heads[:1])
            k, = rotate_and_split(self.k_norm(k), context.angles, self.heads[1:2])
        if context.cache is not None:
            k, v = context.cache.extend(self.layer, k, v, self.window)
        q, k, v = (rearrange(heads, "b s n d -> b n s d") for heads in (q, k, v))
        o = context.attention[self.window](q, k, v)  # context parallelism is in here
        return self.out(rearrange(o, "b n s d -> (b s) (n d)"), context.tp)


class FeedForward(nn.Module):
    """SwiGLU. A tensor parallel rank has F/t of its channels."""

    def __init__(self, name: str, ffn: int, model: Model, make: MakeParameter):
        super().__init__()
        H = model.hidden
        self.gate_up = ColumnParallelLinear(make, Spec(name + "w_gate", (ffn, H), {"tp": 0}, std=INIT_STD),
                                            Spec(name + "w_up", (ffn, H), {"tp": 0}, std=INIT_STD))
        self.down = RowParallelLinear(make, Spec(name + "w_down", (H, ffn), {"tp": 1}, std=output_std(model)))

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:  # [T/t, H] -> [T/t, H]
        hidden = cheap(swiglu, self.gate_up(x, context.tp))
        return self.down(hidden, context.tp, skip=context.recomputing)  # no backward reads the result


class MixtureOfExperts(nn.Module):
    """Each token goes through its top-k experts, which are sharded over ep_group, and through the shared ones."""

    def __init__(self, layer: int, model: Model, make: MakeParameter, ep_group: Any, balance: Balance):
        super().__init__()
        E, H, F, name = model.experts, model.hidden, model.expert_ffn, f"layers.{layer}."
        self.ep_group = ep_group
        # Partial: tensor parallel ranks route different tokens.
        self.w_router = make(Spec(name + "router", (E, H), {"tp": "partial"}, std=INIT_STD))
        self.router = Router(name + "router.bias", self.w_router, model, balance)
        self.experts = GroupedExperts(
            make, Spec(name + "experts.w_gate_up", (E, 2 * F, H), {"ep": 0}, data_axis="edp", std=INIT_STD),
            Spec(name + "experts.w_down", (E, H, F), {"ep": 0}, data_axis="edp", std=output_std(model)))
        self.shared = None
        if model.shared_experts:
            self.shared = FeedForward(name + "shared.", model.shared_experts * F, model, make)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:  # [T/t, H] -> [T/t, H]
        tokens = split_tokens(x, context.tp)
        route, gates = self.router(tokens, context.routing, self.ep_group)
        receive = dispatch(tokens, gates, route)
        shared = self.shared(x, context) if self.shared else None  # hides the dispatch
        y = combine(self.experts(*receive(), route), route)
        y = merge_tokens(y, len(x), context.tp)
        return y if shared is None else y + shared


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)). norm_along: Spec.along of the norms' weights."""

    def __init__(self, layer: int, model: Model, make: MakeParameter, t: int, norm_along: dict, ep_group: Any,
                 balance: Balance):
        super().__init__()
        name = f"layers.{layer}."
        self.attention_norm = RMSNorm(make, name + "attention_norm", model.hidden, model.norm_eps, norm_along)
        self.attention = Attention(layer, model, make, t)
        self.ffn_norm = RMSNorm(make, name + "ffn_norm", model.hidden, model.norm_eps, norm_along)
        if model.has_experts(layer):
            self.ffn = MixtureOfExperts(layer, model, make, ep_group, balance)
        else:
            self.ffn = FeedForward(name + "ffn.", model.ffn, model, make)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:  # [T/t, H] -> [T/t, H]
        return context.recompute(partial(self.attention_and_ffn, context=context), x)

    def attention_and_ffn(self, x: Tensor, context: ForwardContext) -> Tensor:
        if is_recomputing():  # backward follows at once, so that inputs need not be gathered again
            context = context._replace(recomputing=True, tp=context.tp._replace(save_gathered=True))
        x, h = self.attention_norm.branch(x)  # h = norm(x)
        x, h = self.ffn_norm.branch(x, self.attention(h, context))  # x = x + attention(h); h = norm(x)
        return x + self.ffn(h, context)


class Head(nn.Module):
    """The last norm, and logits or the loss. table: the embedding's, if it is tied and on this rank."""

    def __init__(self, model: Model, make: MakeParameter, norm_along: dict, table: nn.Parameter | None, z_loss: float):
        super().__init__()
        self.norm = RMSNorm(make, "norm", model.hidden, model.norm_eps, norm_along)
        spec = table_spec(model, "embedding" if model.tied else "head")
        self.vocabulary = VocabParallelHead(make, spec, table, z_loss)

    def forward(self, x: Tensor, context: ForwardContext, labels: Tensor | None = None,
                loss_grad: Tensor | None = None) -> Tensor:
        return self.vocabulary(cheap(self.norm, x), context.tp, labels, loss_grad)


# ---- the model ------------------------------------------------------------------------------------------------------

@dataclass
class Execution:
    """How a model is executed. Apart from rounding, which is coarse in FP8, no setting here changes the result.

    dtype, device: of parameters. attention: "auto", "sdpa", "triton" or "math". recompute: "none", "selective" or
    "full". offload: what "full" saves is in the host's memory. cp_style: of config.CP_STYLES. sequence, async_tp:
    see tp.TensorParallel.
    """
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    attention: str = "auto"
    recompute: str = "none"
    offload: bool = False
    cp_style: str = "allgather"
    sequence: bool = True
    async_tp: bool = False


class Llama(nn.Module):
    """The layers of a Llama that this rank has.

    groups: the grid, axis -> process group; {}: one rank. pipeline: which stages are on this rank; None: all layers, in
    one stage. z_loss: see tp.cross_entropy. balance: of experts, see ep.py. Parameters have no memory until an
    Optimizer's buckets (zero.py) allocate it, and no values until `Optimizer.load`.
    """

    def __init__(self, model: Model, groups: Groups, execution: Execution | None = None, *,
                 pipeline: Pipeline | None = None, z_loss: float = 0.0, balance: Balance = Balance()):
        super().__init__()
        self.model, self.groups, self.execution = model, groups, execution or Execution()
        self.pipeline = pipeline or Pipeline.one_stage(model.layers)
        self.stages, self.last_stage = self.pipeline.stages, self.pipeline.last
        options, self.tp = self.execution, TensorParallel(groups.get("tp"))
        make = partial(parameter, groups=groups, dtype=options.dtype, device=options.device)
        if self.tp.size > 1:  # selective recomputes the norms' shards and gathers them again: no gathered input is kept
            self.tp = self.tp._replace(sequence=options.sequence, async_tp=options.async_tp)
        checkpoints = self.pipeline.in_flight * max(len(layers) for layers in self.stages.values())
        self.recompute = Recompute(options.recompute, checkpoints, None if self.tp.sequence else self.tp.group,
                                   options.offload)
        norm_along = {"tp": "partial" if self.tp.sequence else "replicate"}  # partial: tp ranks see different tokens
        self.embedding = VocabParallelEmbedding(make, table_spec(model, "embedding")) if 0 in self.stages else None
        self.blocks = nn.ModuleDict({
            str(layer): Block(layer, model, make, self.tp.size, norm_along, groups.get("ep"), balance)
            for layers in self.stages.values() for layer in layers})
        self.routers = [block.ffn.router for block in self.blocks.values() if isinstance(block.ffn, MixtureOfExperts)]
        self.head = None
        if self.last_stage in self.stages:
            table = self.embedding.table if model.tied and self.embedding else None
            self.head = Head(model, make, norm_along, table, z_loss)

    def units(self) -> dict[int, list[nn.Module]]:
        """Each stage's modules in forward order. A module is an FSDP unit: reduced, unsharded, resharded as one."""
        return {stage: [*([self.embedding] if stage == 0 else []), *(self.blocks[str(layer)] for layer in layers),
                        *([self.head] if stage == self.last_stage else [])] for stage, layers in self.stages.items()}

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None, *,
                labels: Tensor | None = None, stage: int = 0, x: Tensor | None = None, cache: Any = None,
                loss_grad: Tensor | None = None, aux_loss_scale: float | Tensor | None = None) -> Tensor:
        """Logits [B, S, V/t] of tokens [B, S], for the part of the vocabulary that this rank has.

        labels: [B, S], IGNORED for tokens without a loss. With labels the result is the sum of this rank's tokens'
        losses in nats instead, the same on every tensor parallel rank. loss_grad: the gradient that this sum will have
        in backward, a scalar tensor (default 1).
        stage: which of this rank's pipeline stages to run, from x [T/t, H], the result of the stage before it; the last
        stage returns logits or the loss.
        positions: [S] or [B, S], by default 0, 1, 2 … documents: [B, S], numbers of the documents, which do not see
        each other. With context parallelism tokens and positions are this rank's, as cp.shard_sequences returns them,
        and documents are those of whole sequences, in the host's memory. Tokens below 0 are padding.
        aux_loss_scale: the factor of a sequence's auxiliary losses of experts, of which only the gradient is added
        (ep.AddAuxiliaryLoss), not the value; None: no such loss.
        cache: keys and values of earlier tokens, which these follow; every rank then has all tokens.
        """
        assert cache is None or documents is None, "a KV cache knows of no documents"
        context = self.context(stage, tokens, positions, documents, cache, aux_loss_scale)
        with self.recompute.scope():
            if stage == 0:
                x = self.embedding(tokens.flatten(), context.tp)
            for layer in self.stages[stage]:
                x = self.blocks[str(layer)](x, context)
            if stage < self.last_stage:
                return x
            if labels is not None:
                return self.head(x, context, labels.flatten(), loss_grad)
            return self.head(x, context).unflatten(0, tokens.shape)

    def context(self, stage: int, tokens: Tensor, positions: Tensor | None, documents: Tensor | None, cache: Any,
                aux_loss_scale: float | Tensor | None) -> ForwardContext:
        options, model, seq = self.execution, self.model, tokens.shape[1]
        tp, cp, past = self.tp, self.groups.get("cp"), 0
        if cache is not None:  # sampling: few tokens, all of them on every rank
            tp, cp, past = TensorParallel(tp.group), None, cache.length(self.stages[stage][0])
        if positions is None:
            assert cp is None, "with context parallelism a rank's positions must be given"
            positions = torch.arange(past, past + seq, device=tokens.device)
        attention = attention_by_window(
            map(model.window_of, self.stages[stage]), tokens, documents, kernel=options.attention,
            head_dim=model.head_dim, dtype=options.dtype, group=cp, style=options.cp_style, earlier=past)
        return ForwardContext(
            tp, seq, rotary_angles(positions, model, options.dtype), attention, self.recompute,
            make_routing_info(tokens, cp, tp.group, aux_loss_scale) if self.routers else None, cache=cache)

    def boundary_shape(self, tokens: Tensor, sequence: bool = True) -> tuple[int, int]:
        """The shape of what one stage sends to the next. tokens: [B, S]. sequence=False: as when text is sampled."""
        return tokens.numel() // (self.tp.size if self.tp.sequence and sequence else 1), self.model.hidden


# ---- demo: python model.py ------------------------------------------------------------------------------------------

def demo(group: Any) -> None:
    """Parameters, unit by unit, with their global shapes, and the loss before training."""
    from param import draw

    settings = Model(heads=4, kv_heads=2, head_dim=32)
    model = Llama(settings, {})
    print(f"The tiny Llama, {sum(p.numel() for p in model.parameters()):,} parameters; along tp: the dimension that is "
          "sharded, or replicate\n")
    for name, unit in {"embedding": model.embedding, "each block": model.blocks["0"], "head": model.head}.items():
        print(f"    {name}, {sum(p.numel() for p in unit.parameters()):,} parameters")
        for p in unit.parameters():
            print(f"        {p.spec.name:28s}{str(p.spec.shape):14s} tp: {p.spec.along.get('tp', '-')}")
    for p in model.parameters():
        p.data = draw(0)(p.spec, p.box)
    tokens = torch.randint(settings.vocab, (2, 65), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = model(tokens[:, :-1], labels=tokens[:, 1:]) / 128
    print(f"\nBefore training the loss is {loss:.3f} nats per token, close to that of guessing: ln {settings.vocab} = "
          f"{math.log(settings.vocab):.3f}.")


if __name__ == "__main__":
    from collectives import run_demo

    run_demo(demo)
