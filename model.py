"""Llama, written as for one GPU: embedding, blocks, head, and what they cost.

    tokens -> embedding -> [ x + attention(norm(x)) -> x + ffn(norm(x)) ] per layer -> norm -> head -> loss

It reads as for one GPU because each weight says how the grid cuts it, and `column`, `row`, `embed` and `cross_entropy`
of tp.py take any part: from T/t tokens (sequence parallelism) or all T to the heads of this rank, and back.

Recomputation. "selective" keeps what matmuls give and computes again what is cheap: norms, SwiGLU, and attention if its
kernel keeps scores. "full" keeps the input of a block. Both change no bit of any gradient; see recompute.py.

Llama: Touvron et al. 2023; grouped queries: Ainslie et al. 2023.

Letters: B batch, S sequence, T = B S tokens, t tensor parallel ranks, H hidden, N query heads, K key and value heads, D
head width, V vocabulary, L layers.
"""
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

import config
from collectives import Group
from cp import FLASH_CPU, FLASH_GPU, WRITTEN_OUT, ContextParallel, padded
from cp import Block as AttentionBlock
from ep import AS_IT_IS, NO_BALANCE, Balance, GroupedLinear, GroupedMatmul, Route, Router, Tokens, combine, dispatch
from operations import Rotate, SwiGLU, add_norm, angles, attention_math, attention_sdpa, fused, kernels, norm, visible
from param import Groups, Spec, at_least_fp32, cut, parameter, rank, size
from pp import Pipeline, one_stage
from recompute import Arena, Part, Recomputed, forgetting, kept, llama_layer
from tp import Matmul, TensorParallel, all_tokens, column, cross_entropy, embed, every_token, own_tokens, row

# ---- the model ------------------------------------------------------------------------------------------------------

class Shared(NamedTuple):
    """What all layers of one forward pass are given."""
    tp: TensorParallel
    rotation: tuple[torch.Tensor, torch.Tensor]
    attend: Callable  # (q B N s D, k and v B K s D) -> B N s D
    cache: object  # see sampling.py
    selective: bool  # keep what norms and SwiGLU take, not what they give
    experts: tuple[Tokens, Group] | None  # what routers are told, and the expert parallel group
    again: bool = False  # a layer runs again, for a backward that follows at once
    routes: list[Route] | None = None  # where tokens of such a layer went the first time
    grouped: GroupedMatmul = AS_IT_IS  # how experts multiply


class Embedding(nn.Module):
    def __init__(self, model: config.Model, make):
        super().__init__()
        self.table = make(table_of(model))

    def forward(self, tokens, tp):  # T -> T/t H
        return embed(tokens, self.table, tp)


class Attention(nn.Module):
    def __init__(self, layer: int, model: config.Model, make, t: int):
        super().__init__()
        self.layer, self.width, self.eps = layer, model.head_dim, model.norm_eps
        H, D, name = model.hidden, model.head_dim, f"layers.{layer}.attention."
        q_rows, kv_rows, kv = model.heads * D, model.kv_heads * D, {"tp": 0}
        if model.kv_heads % t:  # more ranks than heads: neighbours share one, and each has other queries for it
            kv = {"kv": 0, "kv_copy": "sum"}
        self.wq = make(Spec(name + "wq", (q_rows, H), {"tp": 0}, std=0.02))
        self.wk = make(Spec(name + "wk", (kv_rows, H), kv, std=0.02))
        self.wv = make(Spec(name + "wv", (kv_rows, H), kv, std=0.02))
        self.wo = make(Spec(name + "wo", (H, q_rows), {"tp": 1}, std=0.02 / (2 * model.layers) ** 0.5))
        self.biases = nn.ParameterList()
        if model.qkv_bias:
            pairs = ("bq", self.wq), ("bk", self.wk), ("bv", self.wv)
            self.biases = nn.ParameterList(make(Spec(name + bias, w.spec.shape[:1], w.spec.along, decay=False))
                                           for bias, w in pairs)
        self.norms = nn.ParameterList()
        if model.qk_norm:
            self.norms = nn.ParameterList(make(gain(name + part, D, {"tp": "sum"})) for part in ("q_norm", "k_norm"))

    def forward(self, x, before, shared):  # T/t H -> T/t H
        qkv = column(x, self.wq, self.wk, self.wv, tp=shared.tp, before=before, keep=shared.again)
        if len(self.biases):
            qkv = qkv + torch.cat(tuple(self.biases))
        heads, kv_heads = len(self.wq) // self.width, len(self.wk) // self.width
        sequence, split = shared.rotation[0].shape[-3], [heads, kv_heads, kv_heads]
        if len(self.norms):
            q, k, v = qkv.unflatten(-1, (-1, self.width)).split(split, -2)
            q, k = (norm(part, weight, self.eps) for part, weight in zip((q, k), self.norms))
            q, k = (Rotate.apply(part, *shared.rotation, part.shape[-2]) for part in (q, k))
            q, k, v = (part.unflatten(0, (-1, sequence)) for part in (q, k, v))
        else:
            qkv = Rotate.apply(qkv, *shared.rotation, heads + kv_heads)
            q, k, v = qkv.view(-1, sequence, sum(split), self.width).split(split, 2)  # B S heads D
        if shared.cache is not None:
            k, v = shared.cache.extend(self.layer, k, v)
        o = shared.attend(*(part.transpose(1, 2) for part in (q, k, v)))
        return row(o.transpose(1, 2).flatten(0, 1).flatten(1), self.wo, shared.tp)


class FeedForward(nn.Module):
    def __init__(self, name: str, ffn: int, model: config.Model, make):
        super().__init__()
        H = model.hidden
        self.w_gate = make(Spec(name + "w_gate", (ffn, H), {"tp": 0}, std=0.02))
        self.w_up = make(Spec(name + "w_up", (ffn, H), {"tp": 0}, std=0.02))
        self.w_down = make(Spec(name + "w_down", (H, ffn), {"tp": 1}, std=0.02 / (2 * model.layers) ** 0.5))

    def forward(self, x, before, shared):  # T/t H -> T/t H
        tp, again = shared.tp, shared.again
        both = column(x, self.w_gate, self.w_up, tp=tp, before=before, keep=again)
        if shared.selective:
            return row(both, self.w_down, tp, before=SwiGLU.apply)
        return row(SwiGLU.apply(both), self.w_down, tp, skip=again)


class Experts(nn.Module):
    """A mixture: a token goes through the experts that the router chooses for it, and through the shared ones."""

    def __init__(self, layer: int, model: config.Model, make, balance: Balance):
        super().__init__()
        E, H, width, name = model.experts, model.hidden, model.expert_ffn, f"layers.{layer}."
        self.w_router = make(Spec(name + "router", (E, H), {"tp": "sum"}, std=0.02))  # ranks of tp route other tokens
        self.w_gate_up = make(Spec(name + "experts.w_gate_up", (E, 2 * width, H), {"ep": 0}, "edp", std=0.02))
        self.w_down = make(Spec(name + "experts.w_down", (E, H, width), {"ep": 0}, "edp",
                                std=0.02 / (2 * model.layers) ** 0.5))
        self.shared = None
        if model.shared_experts:
            self.shared = FeedForward(name + "shared.", model.shared_experts * width, model, make)
        self.router = Router(name + "router.bias", E, model.top_k, model.router, model.router_norm, model.router_scale,
                             model.expert_groups, model.top_groups, balance, self.w_router.dtype, self.w_router.device)

    def forward(self, x, before, shared):  # T/t H -> T/t H
        tp, (tokens, group), first_route = shared.tp, shared.experts, shared.routes[0] if shared.again else None
        h, given = (before(x) if before else x), x.detach()
        with forgetting(h, lambda: before(given)) if before else nullcontext():
            own = own_tokens(h, tp)
            route, weights = self.router(own, self.w_router, tokens, group, first_route)
            arrive = dispatch(own, route, group)
            as_it_is = (lambda h: h) if before else None  # nothing is left to do, but to keep the input alone
            beside = self.shared(h, as_it_is, shared) if self.shared else None  # while tokens travel
        if shared.routes is not None and not shared.again:
            shared.routes.append(route)
        both = GroupedLinear.apply(arrive(), self.w_gate_up, route, shared.grouped)
        inside, gates = SwiGLU.apply(both), both.detach()
        with forgetting(inside, lambda: SwiGLU.apply(gates)) if shared.selective else nullcontext():
            y = GroupedLinear.apply(inside, self.w_down, route, shared.grouped)
        y = all_tokens(combine(y, weights, route, group), len(h), tp)
        return y if beside is None else y + beside


class Block(nn.Module):
    """x + attention(norm(x)), then the same with the feed-forward layer. arena: where to keep inputs, see Llama."""

    def __init__(self, layer: int, model: config.Model, make, t: int, how: str | int, balance: Balance):
        super().__init__()
        self.eps = model.norm_eps
        self.attention_norm = make(gain(f"layers.{layer}.attention_norm", model.hidden, {"tp": how}))
        self.attention = Attention(layer, model, make, t)
        self.ffn_norm = make(gain(f"layers.{layer}.ffn_norm", model.hidden, {"tp": how}))
        if has_experts(model, layer):
            self.ffn = Experts(layer, model, make, balance)
        else:
            self.ffn = FeedForward(f"layers.{layer}.ffn.", model.ffn, model, make)

    def forward(self, x, shared, arena=None):  # T/t H -> T/t H
        if arena is None:
            return torch.add(*self.terms(x, shared))
        shared = shared._replace(routes=[])
        return Recomputed.apply(lambda x: torch.add(*self.terms(x, shared)),
                                lambda x: self.terms(x, shared._replace(again=True)), arena, x)

    def terms(self, x, shared):
        """Two tensors whose sum is the result."""
        x, h, before = self.normed(x, None, self.attention_norm, shared)
        y = self.attention(h, before, shared)
        x, h, before = self.normed(x, y, self.ffn_norm, shared)
        return x, self.ffn(h, before, shared)

    def normed(self, x, y, weight, shared):
        """(x + y, h, before): the next layer takes before(h). Selective recomputation leaves the norm to the layer, who
        does it again in backward; else h is normalised and `before` None."""
        before = partial(norm, weight=weight, eps=self.eps)
        if shared.selective:
            x = x if y is None else x + y
            return x, x, before
        return (x, before(x), None) if y is None else (*add_norm(x, y, weight, self.eps), None)


class Head(nn.Module):
    """table: of the embedding, if it is tied and here."""

    def __init__(self, model: config.Model, make, table: nn.Parameter | None, how: str | int, z_loss: float):
        super().__init__()
        self.eps, self.z_loss = model.norm_eps, z_loss
        self.norm = make(gain("norm", model.hidden, {"tp": how}))
        own = table_of(model) if model.tied else Spec("head", (model.vocab, model.hidden), {"tp": 0}, std=0.02)
        self.weight = make(own) if table is None else table

    def forward(self, x, shared, labels=None):  # T/t H -> T V/t; or, with labels T, the sum of their losses
        tp, normalise = shared.tp, partial(norm, weight=self.norm, eps=self.eps)
        about = dict(z_loss=self.z_loss, held=self.weight.box[0], group=tp.group)
        if labels is not None and fused(x):  # logits never exist
            return kernels().linear_cross_entropy(every_token(normalise(x), tp), self.weight, labels, **about)
        x, before = (x, normalise) if shared.selective else (normalise(x), None)
        logits = column(x, self.weight, tp=tp, before=before, defer=False)
        return logits if labels is None else cross_entropy(logits, labels, **about)


def has_experts(model: config.Model, layer: int) -> bool:
    return model.experts > 0 and layer >= model.dense_layers


def table_of(model: config.Model) -> Spec:
    """A tied table may be on two pipeline ranks, that of the first stage and that of the last, each with a term of its
    gradient."""
    return Spec("embedding", (model.vocab, model.hidden), {"tp": 0} | ({"tie": "sum"} if model.tied else {}), std=0.02)


def gain(name: str, width: int, along: dict) -> Spec:
    return Spec(name, (width,), along, mean=1.0, decay=False)


class Llama(nn.Module):
    """groups: the grid. attention: "auto", "sdpa" or "math". recompute: "none", "selective" or "full".

    pipeline: which stages this rank has; None: everything is one. cp_style: see cp.py. z_loss: see cross_entropy.
    balance: of experts, see ep.py.
    sequence, ring, keep: how tensor parallel ranks share, see tp.py.
    fp8: how the linear layers of blocks multiply, see tp.Matmul and ep.GroupedMatmul, but not when text is sampled;
    fp8_ends: also those of the first and the last block.
    Parameters have no memory yet: an optimizer's `load` gives it to them and fills it from a source.
    """

    def __init__(self, model: config.Model, groups: Groups, dtype: torch.dtype = torch.float32,
                 device: torch.device | str = "cpu", attention: str = "auto", recompute: str = "none",
                 sequence: bool = True, ring: bool = False, z_loss: float = 0.0, keep: bool = False,
                 cp_style: str = "allgather", pipeline: Pipeline | None = None, balance: Balance = NO_BALANCE,
                 fp8: tuple[Matmul, GroupedMatmul] | None = None, fp8_ends: bool = True):
        super().__init__()
        self.fp8, ends = fp8, 0 if fp8_ends else 1
        self.in_fp8 = range(ends, model.layers - ends) if fp8 else range(0)
        self.pipeline = pipeline or one_stage(model.layers)
        self.stages, self.last = self.pipeline.stages, self.pipeline.last
        make = partial(parameter, groups=groups, dtype=dtype, device=device)
        t = size(groups.get("tp"))
        self.tp = TensorParallel(groups.get("tp"), sequence and t > 1, ring and t > 1, keep and t > 1)
        how = "sum" if self.tp.sequence else "copy"  # norms see other tokens on every rank, or the same ones
        self.model, self.dtype, self.wide = model, dtype, at_least_fp32(dtype)
        self.recompute, self.arena, self.attention = recompute, None, attention
        self.cp, self.cp_style, self.ep = groups.get("cp"), cp_style, groups.get("ep")
        layers = sorted(layer for stage in self.stages.values() for layer in stage)
        self.embedding = Embedding(model, make) if 0 in self.stages else None
        self.blocks = nn.ModuleDict({str(layer): Block(layer, model, make, t, how, balance) for layer in layers})
        self.routers = [block.ffn.router for block in self.blocks.values() if isinstance(block.ffn, Experts)]
        self.head = None
        if self.last in self.stages:
            table = self.embedding.table if model.tied and self.embedding else None
            self.head = Head(model, make, table, how, z_loss)

    def chunks(self) -> dict[int, list[nn.Module]]:
        """For each stage what is reduced, gathered and freed together, in forward order."""
        return {stage: [*([self.embedding] if stage == 0 else []), *(self.blocks[str(layer)] for layer in layers),
                        *([self.head] if stage == self.last else [])] for stage, layers in self.stages.items()}

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None,
                documents: torch.Tensor | None = None, cache=None, stage: int = 0, x: torch.Tensor | None = None,
                labels: torch.Tensor | None = None, weight: float | torch.Tensor | None = None) -> torch.Tensor:
        """Logits B S V/t of tokens B S: those of the part of the vocabulary that this rank holds.

        labels: B S, or IGNORED; with them the sum of the losses of all tokens instead, the same on every tensor
        parallel rank. stage: with several, one of them, from x, T/t H, which the one before gave; the last gives logits
        or the loss.

        positions: S or B S, by default 0, 1, 2 … documents: B S, numbers of the documents, which do not see each other.
        With context parallelism tokens and positions are this rank's, as cp.cut gives them, and documents are all.
        Tokens below 0 are padding. weight: what a sequence counts in the losses that balance experts; None: they have
        no part in it. cache: the keys and values of earlier tokens, which these follow; every rank then has all tokens.
        """
        assert cache is None or documents is None, "what is sampled is one document"
        tp = self.tp if cache is None else TensorParallel(self.tp.group)
        before = cache.count(self.stages[stage][0]) if cache is not None else 0
        if positions is None:
            positions = torch.arange(before, before + tokens.shape[1], device=tokens.device)
        attend = self.attends(tokens, before, documents, whole=cache is not None)
        routing = (self.routed(tokens, tp, weight), self.ep) if self.routers else None
        shared = Shared(tp, angles(positions, self.model, self.wide), attend, cache, self.recompute == "selective",
                        routing)
        low = shared
        if self.fp8 and cache is None:
            low = shared._replace(tp=tp._replace(matmul=self.fp8[0]), grouped=self.fp8[1])
        if stage == 0:
            x = self.embedding(tokens.flatten(), tp)
        arena = self.checkpoints(x) if self.recompute == "full" and x.requires_grad else None
        for layer in self.stages[stage]:
            x = self.blocks[str(layer)](x, low if layer in self.in_fp8 else shared, arena)
        if stage < self.last:
            return x
        if labels is not None:
            return self.head(x, shared, labels.flatten())
        return self.head(x, shared).unflatten(0, tokens.shape)

    def fp8_weights(self) -> int:
        """Elements of the matrices here that multiply in FP8."""
        return sum(param.numel() for layer, block in self.blocks.items() if int(layer) in self.in_fp8
                   for param in block.parameters() if param.ndim > 1 and not param.spec.name.endswith("router"))

    def between(self, tokens: torch.Tensor, sequence: bool = True) -> tuple[int, int]:
        """The shape of what goes from stage to stage, of tokens B S. sequence: cut, if tensor parallelism cuts it."""
        return tokens.numel() // (size(self.tp.group) if self.tp.sequence and sequence else 1), self.model.hidden

    def routed(self, tokens: torch.Tensor, tp: TensorParallel, weight: float | torch.Tensor | None) -> Tokens:
        """Which of tokens B s this rank sends to experts: its share, where tensor parallel ranks have the same."""
        (count, s), mine = tokens.shape, cut(tokens.numel(), size(tp.group), rank(tp.group))
        sequence = torch.arange(mine.start, mine.stop, device=tokens.device) // s
        sequence = sequence.masked_fill(tokens.flatten()[mine] < 0, count)
        return Tokens(sequence, count, (self.cp, tp.group), weight)

    def attends(self, tokens: torch.Tensor, before: int, documents: torch.Tensor | None, whole: bool) -> Callable:
        """What computes attention of tokens B s, with `before` others cached. whole: on every rank all of them."""
        c = 1 if whole else size(self.cp)
        seq = c * tokens.shape[1]
        masked_on_gpu = documents is not None and fused(tokens) and self.dtype != torch.float64
        ours = self.attention == "triton" or (self.attention == "auto" and masked_on_gpu and self.model.head_dim <= 128)
        written_out = self.attention == "math"
        core = attention_math if written_out else attention_sdpa
        if ours:
            import flash  # needs Triton, which a CPU does without

            core = partial(flash.flash_attention, documents=documents)
        elif c == 1 or self.cp_style == "ulysses":
            everything_before = documents is None and before == 0 and not written_out
            places = torch.arange(before, before + seq, device=tokens.device)
            core = partial(core, mask=None if everything_before else visible(places, before + seq, documents))
            if written_out and self.recompute == "selective":  # it keeps scores; a fused kernel keeps what it takes
                core = partial(Recomputed.apply, core, core, None)
        if c == 1:
            return core
        block = WRITTEN_OUT if written_out else FLASH_CPU if tokens.device.type == "cpu" else FLASH_GPU
        if ours:
            block = AttentionBlock(flash.flash_forward, flash.flash_backward)
        return ContextParallel(self.cp, self.cp_style, seq, documents, block, core)

    def checkpoints(self, x: torch.Tensor) -> Arena:
        """Where blocks keep inputs like x. Ranks that hold the same x share each; all else would make new storages."""
        if self.arena is None or self.arena.shape != x.shape:
            slots = self.pipeline.in_flight * max(len(layers) for layers in self.stages.values())
            self.arena = Arena(slots, x.detach(), None if self.tp.sequence else self.tp.group)
        return self.arena


# ---- costs ----------------------------------------------------------------------------------------------------------

def parameter_count(model: config.Model) -> int:
    """Elements of all weights, a tied table once. Builds the model, which takes no memory."""
    params = {p.spec.name: p for p in Llama(model, {}).parameters()}
    return sum(p.numel() for p in params.values())


def active_count(model: config.Model) -> int:
    """Elements of the weights that a token meets: all but those of the experts it is not sent to."""
    layers = range(model.layers)
    idle = sum(has_experts(model, layer) for layer in layers) * (model.experts - model.top_k)
    return parameter_count(model) - idle * 3 * model.expert_ffn * model.hidden


def flops_per_token(model: config.Model, seq: int, causal: bool = False) -> float:
    """Floating-point operations of one token, forward and backward: 6 N + 12 L h S, with h = heads x head width.

    N is the active weights without the input embedding, which multiplies nothing. causal=True counts only the scores
    that are visible, half of them: 6 N + 6 L h S (Chowdhery et al. 2022, appendix B, has the first form).
    """
    n = active_count(model) - (0 if model.tied else model.vocab * model.hidden)
    scores = 12 * model.layers * model.heads * model.head_dim * seq
    return 6 * n + (scores / 2 if causal else scores)


def activation_bytes(settings: config.Config, dtype: torch.dtype, pipeline: Pipeline | None = None) -> int:
    """Bytes that forwards keep on a rank for their backwards (without masks of documents and what a whole sequence has
    one of, experts used equally): of one micro-batch, or of as many as a pipeline rank has in flight."""
    model, grid, recompute, attention = (settings.model, settings.grid, settings.precision.recompute,
                                         settings.precision.attention)
    t, one, wide = grid.tp, dtype.itemsize, at_least_fp32(dtype).itemsize
    seq = padded(settings.batch.seq, grid.cp, t if grid.sp else 1)
    own, pieces = seq // grid.cp, grid.cp > 1 and grid.cp_style != "ulysses"
    routing = dict(aux=settings.optim.aux_loss > 0, z=settings.optim.router_z_loss > 0, travels=grid.ep > 1)

    precision, ends = settings.precision, 0 if settings.precision.fp8_ends else 1
    in_fp8 = range(ends, model.layers - ends) if precision.fp8 != "none" else ()
    fp8 = 1 + (4 / 128 if precision.fp8 == "blockwise" else 0)  # with the scale of a block

    def block(number: int) -> float:
        core = "auto" if pieces else attention  # pieces keep no scores
        layer = llama_layer(model, seq, dtype, core, t, grid.sp_keep, number, fp8 * (number in in_fp8), **routing)
        if grid.cp > 1 and not pieces:
            layer.append(Part("result before it goes home", model.heads * model.head_dim * one, "selective", "tp"))
        return kept(layer, recompute, t, grid.sp or recompute == "full")  # ranks share even equal inputs

    norm = model.hidden * one if recompute == "selective" else 2 * model.hidden * one + wide
    logits = -(-model.vocab // t) * one + 3 * wide
    indices = 2 * 9  # into the table and into the vocabulary
    pipeline = pipeline or one_stage(model.layers)
    token = pipeline.in_flight * max(sum(map(block, layers)) for layers in pipeline.stages.values())
    if pipeline.last in pipeline.stages:
        token += norm / (t if grid.sp else 1) + logits + indices
        if grid.sp_keep and recompute != "selective":
            token += model.hidden * one * (1 - 1 / t)
    if recompute == "full" and t > 1 and not grid.sp:
        token += model.hidden * one  # one input put together again
    if model.experts and recompute == "full":
        token += pipeline.in_flight * 8 / t  # to which sequence it belongs, for the layers that run again
    masks = seq * seq if attention == "math" and not pieces else 0
    return round(settings.batch.micro_batch * own * token + own * model.head_dim * wide + masks)
