"""A Llama, which reads almost as if for one GPU: embedding, blocks, head.

    tokens -> embedding -> [ x + attention(norm(x)) -> x + ffn(norm(x)) ] per layer -> norm -> head -> loss

Most communication is inside the layers it is built from. A column-parallel layer takes the [T/t, H] that a rank has
between layers and returns all T tokens for this rank's heads or channels; a row-parallel layer returns to [T/t, H].
Context parallelism is inside attention (and in rotary positions, and the loss that balances experts). The grid shows
mostly in Specs: {"tp": 0} is a weight that tp ranks share by rows; a "replicate" or "partial" one is whole on each,
with equal gradients, or with gradients to be summed. Besides, Attention counts this rank's heads, MixtureOfExperts
dispatches tokens to experts, and Llama builds this rank's pipeline stages.
With --recompute full `context.recompute(block, x)` saves x alone, and runs the block again in backward. With selective
`context.recompute.drop(h, y, f, x)` frees h = f(x), which y is computed from, until the backward of y begins.

Touvron et al. 2023 (Llama); Ainslie et al. 2023 (grouped queries).
Shapes: B batch, S tokens of a sequence, s = S/c on this rank with c context parallel ranks, T = B s, t tensor parallel
ranks, H hidden, N query heads, K key and value heads, D head width, F ffn, V vocabulary, E experts, L layers.
[T/t, H] is what a rank has between layers with sequence parallelism; without, it is [T, H].
"""
import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import pad

from core.collectives import ALONE, AllReduce__Identity, Groups, Identity__AllReduce
from core.config import Model
from core.param import Spec, parameter, shard_slice
from cp import attention_by_window, gather_tokens, own_positions
from ep import Balance, GroupedExperts, Router, make_routing_info
from mla import LatentAttention
from operations import RMSNorm, rotary_angles, rotate_and_split, swiglu
from recompute import Recompute, is_recomputing
from tp import ColumnParallelLinear, RowParallelLinear, TensorParallel, VocabParallelEmbedding, VocabParallelHead

MakeParameter = Callable[[Spec], nn.Parameter]
INIT_STD = 0.02  # of weights, as in GPT-2


class ForwardContext(NamedTuple):
    """What all layers of one forward share."""
    tp: TensorParallel
    seq: int  # s
    angles: tuple[Tensor, Tensor]  # cos and sin of rotary embedding: [s, 1, d/2] or [B, s, 1, d/2], d rotated of D
    attention: dict[int, Callable[[Tensor, Tensor, Tensor], Tensor]]  # window (0: none) -> its function of q, k, v
    recompute: Recompute
    routing: tuple | None  # an ep.RoutingInfo; None without experts
    cache: Any = None  # when text is sampled, run/generate.py's KVCache: keys and values of earlier tokens
    gather_latents: Callable | None = None  # for LatentAttention, [B, s, ...] of this rank's tokens -> [B, S, ...]
    next_tokens: Tensor | None = None  # [B, s], the token after each; None: no multi-token prediction


def table_spec(model: Model, name: str) -> Spec:
    """Of the embedding or the head. If both the first and the last pipeline stage have it (a tied one, or an embedding
    that multi-token prediction reads), its gradient is the sum of theirs: axis "tie"."""
    tie = {"tie": "partial"} if model.tied or (model.mtp and name == "embedding") else {}
    return Spec(name, (model.vocab, model.hidden), {"tp": 0} | tie, std=INIT_STD, matrices=0)  # for AdamW, not Muon


def output_std(model: Model) -> float:
    """Initial std of matrices that write to the residual stream: as in GPT-2, over the root of its 2 L additions."""
    return INIT_STD / (2 * model.layers) ** 0.5


# ---- layers of every model ------------------------------------------------------------------------------------------

class Attention(nn.Module):
    """Grouped-query attention. A tensor parallel rank has N/t query heads, and K/t key and value heads, at least 1."""

    def __init__(self, layer: int, model: Model, make: MakeParameter, t: int):
        super().__init__()
        H, D, name = model.hidden, model.head_dim, f"layers.{layer}.attention."
        q_rows, kv_rows, kv_heads = model.heads * D, model.kv_heads * D, max(model.kv_heads // t, 1)
        self.layer, self.window, self.head_dim = layer, model.window_of(layer), D
        self.head_counts = [model.heads // t, kv_heads, kv_heads]  # of q, k and v, on this rank
        # If t > K, the t/K ranks of "kv_copy" share a head but have different queries: its gradient is partial.
        kv_along = {"kv": 0, "kv_copy": "partial"} if t > model.kv_heads else {"tp": 0}
        projections = ("q", q_rows, {"tp": 0}), ("k", kv_rows, kv_along), ("v", kv_rows, kv_along)
        weights = [Spec(f"{name}w{x}", (rows, H), along, std=INIT_STD) for x, rows, along in projections]
        biases = [Spec(f"{name}b{x}", (rows,), along, decay=False) for x, rows, along in projections]
        self.qkv = ColumnParallelLinear(make, *weights, biases=biases if model.qkv_bias else [])
        self.out = RowParallelLinear(make, Spec(name + "wo", (H, q_rows), {"tp": 1}, std=output_std(model)))
        # Partial: each rank has other heads (with kv_copy the same key head, but other queries of it).
        self.q_norm, self.k_norm = (RMSNorm(make, name + norm, D, model.norm_eps, {"tp": "partial"})
                                    if model.qk_norm else None for norm in ("q_norm", "k_norm"))

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:  # [T/t, H] -> [T/t, H]
        qkv = self.qkv(x, context.tp)  # [T, heads D]: one gather and one matmul for all three
        qkv = rearrange(qkv, "(b s) (n d) -> b s n d", s=context.seq, d=self.head_dim)
        if self.q_norm is None:
            q, k, v = rotate_and_split(qkv, context.angles, self.head_counts)  # v is not rotated
        else:
            q, k, v = qkv.split(self.head_counts, dim=2)
            q, = rotate_and_split(self.q_norm(q), context.angles, self.head_counts[:1])
            k, = rotate_and_split(self.k_norm(k), context.angles, self.head_counts[1:2])
        if context.cache is not None:
            k, v = context.cache.extend(self.layer, k, v, self.window)
        q, k, v = (rearrange(heads, "b s n d -> b n s d") for heads in (q, k, v))
        o = context.attention[self.window](q, k, v)  # context parallelism is in here
        return self.out(rearrange(o, "b n s d -> (b s) (n d)"), context.tp)


class FeedForward(nn.Module):
    """SwiGLU. A tensor parallel rank has F/t of its channels."""

    def __init__(self, name: str, ffn: int, model: Model, make: MakeParameter):
        super().__init__()
        gate, up = (Spec(name + which, (ffn, model.hidden), {"tp": 0}, std=INIT_STD) for which in ("w_gate", "w_up"))
        down = Spec(name + "w_down", (model.hidden, ffn), {"tp": 1}, std=output_std(model))
        self.gate_up, self.down = ColumnParallelLinear(make, gate, up), RowParallelLinear(make, down)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:  # [T/t, H] -> [T/t, H]
        gate_up = self.gate_up(x, context.tp)
        hidden = swiglu(gate_up)
        y = self.down(hidden, context.tp, skip=is_recomputing())  # a second run is for backward, and y is only added
        context.recompute.drop(hidden, y, swiglu, gate_up)
        return y


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)). norm_along: Spec.along of weights that are whole on each rank."""

    def __init__(self, layer: int, model: Model, make: MakeParameter, *, t: int, norm_along: dict, groups: Groups,
                 balance: Balance):
        super().__init__()
        name = f"layers.{layer}."
        self.attention_norm = RMSNorm(make, name + "attention_norm", model.hidden, model.norm_eps, norm_along)
        self.attention = (LatentAttention(layer, model, make, norm_along, INIT_STD, output_std(model))
                          if model.kv_lora_rank else Attention(layer, model, make, t))
        self.ffn_norm = RMSNorm(make, name + "ffn_norm", model.hidden, model.norm_eps, norm_along)
        self.ffn = (MixtureOfExperts(layer, model, make, groups, balance) if model.has_experts(layer) else
                    FeedForward(name + "ffn.", model.ffn, model, make))

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:  # [T/t, H] -> [T/t, H]
        return context.recompute(partial(self.attention_and_ffn, context=context), x)

    def attention_and_ffn(self, x: Tensor, context: ForwardContext) -> Tensor:
        x, h = self.attention_norm.branch(x)  # h = norm(x); x is the same, and its two gradients are added by the norm
        y = self.attention(h, context)
        context.recompute.drop(h, y, self.attention_norm, x)
        x, h = self.ffn_norm.branch(x, y)  # x = x + y; h = norm(x)
        y = self.ffn(h, context)
        context.recompute.drop(h, y, self.ffn_norm, x)
        return x + y


class Head(nn.Module):
    """The last norm, and logits or the loss. table: the embedding's, if it is tied and on this rank."""

    def __init__(self, model: Model, make: MakeParameter, norm_along: dict, table: nn.Parameter | None, z_loss: float):
        super().__init__()
        self.norm = RMSNorm(make, "norm", model.hidden, model.norm_eps, norm_along)
        spec = table_spec(model, "embedding" if model.tied else "head")
        self.vocabulary = VocabParallelHead(make, spec, table, z_loss)

    def forward(self, x: Tensor, context: ForwardContext, labels: Sequence[Tensor | None],
                loss_grad: Sequence[Tensor | None]) -> Tensor:
        """labels: [None] for logits; else [T] of each prediction. Of two, x is [2 T/t, H]: the lower half, normalised
        already, is MultiTokenPrediction's."""
        x, ahead = x.chunk(2) if len(labels) == 2 else (x, None)
        h = self.norm(x)
        y = self.vocabulary(h, context.tp, labels[0], loss_grad[0])
        context.recompute.drop(h, y, self.norm, x)
        if ahead is None:
            return y
        return torch.stack((y, self.vocabulary(ahead, context.tp, labels[1], loss_grad[1])))  # normalised already


# ---- the model ------------------------------------------------------------------------------------------------------

class Execution(NamedTuple):
    """How a model is executed. Apart from rounding, no setting here changes the result."""
    dtype: torch.dtype = torch.float32  # of parameters
    device: torch.device | str = "cpu"
    attention: str = "auto"  # or "sdpa", "triton", "math"
    recompute: str = "none"  # or "selective", "full"
    rows: Callable | None = None  # for what "full" saves: run/offload.py's HostRows, or None: on the device
    cp_style: str = "allgather"  # of config.CP_STYLES
    sequence: bool = True  # sequence parallelism
    async_tp: bool = False  # asynchronous tensor parallelism


class Stages(NamedTuple):
    """The pipeline stages of a rank.

    layers: the rank's stages -> their layers. owners: the rank of every stage of the pipeline.
    in_flight: the most forwards, each of one stage and one micro-batch, whose backwards this rank still has to run.
    """
    layers: dict[int, range]
    owners: Sequence[int] = (0,)
    in_flight: int = 1


class Llama(nn.Module):
    """The layers of a Llama that this rank has. Parameters get memory and values from an Optimizer.

    groups: the grid, axis -> Group; {}: one rank. stages: None: all layers, in one. z_loss: see tp.cross_entropy.
    balance: of experts, see ep.py. mtp_weight: the weight of multi-token prediction's loss, for the caller.
    """

    def __init__(self, model: Model, groups: Groups, execution: Execution = Execution(), *,
                 stages: Stages | None = None, z_loss: float = 0.0, balance: Balance = Balance(),
                 mtp_weight: float = 0.3):
        super().__init__()
        self.model, self.groups, self.execution = model, groups, execution
        self.mtp_weight = mtp_weight
        stages = stages or Stages({0: range(model.blocks)})
        self.stages, self.owners, self.last_stage = stages.layers, stages.owners, len(stages.owners) - 1
        make = partial(parameter, groups=groups, dtype=execution.dtype, device=execution.device)
        cp, tp = (groups.get(axis, ALONE) for axis in ("cp", "tp"))
        self.angles_in_sequence = lru_cache(None)(lambda s, device: rotary_angles(  # those in flight share them
            own_positions(s, cp.size, cp.rank, device), model, execution.dtype))
        self.tp = TensorParallel(tp, execution.sequence, execution.async_tp) if tp.size > 1 else TensorParallel(tp)
        slots = stages.in_flight * max(map(len, self.stages.values()))  # for inputs of blocks saved at once
        same_inputs = ALONE if self.tp.sequence else self.tp.group  # its t ranks save 1/t of a block's input each
        self.recompute = Recompute(execution.recompute, slots, same_inputs, execution.rows)
        norm_along = {"tp": "partial" if self.tp.sequence else "replicate"}  # partial: tp ranks see different tokens
        reads_tokens = 0 in self.stages or (model.mtp and self.last_stage in self.stages)
        self.embedding = VocabParallelEmbedding(make, table_spec(model, "embedding")) if reads_tokens else None
        common = dict(model=model, make=make, t=self.tp.size, norm_along=norm_along, groups=groups, balance=balance)
        self.blocks = nn.ModuleDict({str(layer): Block(layer, **common) for layers in self.stages.values()
                                     for layer in layers if layer < model.layers})
        if model.mtp and self.last_stage in self.stages:  # its number is model.layers, the last in self.stages
            self.blocks[str(model.layers)] = MultiTokenPrediction(self.embedding, model.layers, **common)
        self.routers = [block.ffn.router for block in self.blocks.values() if isinstance(block.ffn, MixtureOfExperts)]
        table = self.embedding.table if model.tied and self.embedding else None
        self.head = Head(model, make, norm_along, table, z_loss) if self.last_stage in self.stages else None

    def units(self) -> dict[int, list[nn.Module]]:
        """Each stage's modules in forward order. A module is an FSDP unit: reduced, unsharded, resharded as one."""
        return {stage: [*([self.embedding] if stage == 0 else []), *(self.blocks[str(layer)] for layer in layers),
                        *([self.head] if stage == self.last_stage else [])] for stage, layers in self.stages.items()}

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None, *,
                labels: Tensor | None = None, next_tokens: Tensor | None = None, next_labels: Tensor | None = None,
                stage: int = 0, x: Tensor | None = None, cache: Any = None,
                aux_loss_scale: float | Tensor | None = None,
                loss_grad: Sequence[Tensor | None] = (None, None)) -> Tensor:
        """Logits [B, s, V/t] of tokens [B, s], for this rank's part of the vocabulary. With labels the sum of these
        tokens' losses in nats, the same on every tensor parallel rank; with next_labels [2], both predictions' sums.
        Of a stage before the last its result, [T/t, H].

        tokens: below 0: padding. With context parallelism tokens and positions are this rank's (shard_sequences).
        positions: [B, s], in documents; by default those in the sequence.
        documents: [B, S], of whole sequences, in the host's memory: numbers of documents, which do not see each other.
        labels: [B, s], param.IGNORED for tokens without a loss. next_tokens, next_labels: [B, s], both or neither:
        tokens and labels one place further on, for multi-token prediction (run/data.py's MicroBatch.one_ahead).
        stage, x: run this one of this rank's pipeline stages, from x [T/t, H], the result of the stage before it.
        cache: of earlier tokens, which these follow; every rank then has all tokens.
        aux_loss_scale: factor of a sequence's auxiliary losses (ep.AddAuxiliaryLoss adds their gradient); None: none.
        loss_grad: the gradient that each sum will have in backward (default 1), as a fused loss computes its own in
        forward."""
        assert cache is None or documents is positions is None, "a KV cache counts positions, and knows of no documents"
        assert (next_tokens is None) == (next_labels is None)
        assert next_labels is None or (labels is not None and self.model.mtp)
        context = self.make_context(stage, tokens, positions, documents, cache, aux_loss_scale, next_tokens)
        self.recompute.start_forward()
        if stage == 0:
            x = self.embedding(tokens.flatten(), context.tp)
        for layer in self.stages[stage]:
            x = self.blocks[str(layer)](x, context)
        if stage < self.last_stage:
            return x
        if labels is None:
            return self.head(x, context, [None], loss_grad).unflatten(0, tokens.shape)
        labels = [each.flatten() for each in (labels, next_labels) if each is not None]
        return self.head(x, context, labels, loss_grad)

    def make_context(self, stage: int, tokens: Tensor, positions: Tensor | None, documents: Tensor | None, cache: Any,
                     aux_loss_scale: float | Tensor | None, next_tokens: Tensor | None) -> ForwardContext:
        execution, model = self.execution, self.model
        tp, groups, earlier = self.tp, self.groups, 0
        if cache is not None:  # sampling: too few tokens to be shared
            tp, groups, earlier = TensorParallel(tp.group), {}, cache.length(self.stages[stage][0])
            positions = torch.arange(earlier, earlier + tokens.shape[1], device=tokens.device)
        cp = groups.get("cp", ALONE)
        style = "latents" if model.kv_lora_rank else execution.cp_style  # LatentAttention gathers itself
        attention = attention_by_window(
            map(model.window_of, self.stages[stage]), tokens, documents, kernel=execution.attention,
            head_dim=model.head_dim, dtype=execution.dtype, groups=groups, style=style, earlier=earlier,
            recompute=execution.recompute == "selective")
        routing = make_routing_info(tokens, cp, tp.group, aux_loss_scale) if self.routers else None
        angles = (self.angles_in_sequence(tokens.shape[1], tokens.device) if positions is None else
                  rotary_angles(positions, model, execution.dtype))
        return ForwardContext(tp, seq=tokens.shape[1], angles=angles, attention=attention, recompute=self.recompute,
                              routing=routing, cache=cache, gather_latents=partial(gather_tokens, group=cp),
                              next_tokens=next_tokens)

    def boundary_shape(self, tokens: Tensor, sequence: bool = True) -> tuple[int, int]:
        """The shape of what one stage sends to the next. tokens: [B, s]. sequence=False: as when text is sampled."""
        return tokens.numel() // (self.tp.size if self.tp.sequence and sequence else 1), self.model.hidden


# ---- layers of some models ------------------------------------------------------------------------------------------

class MixtureOfExperts(nn.Module):
    """Each token goes through its top-k experts, which are sharded over groups["ep"], and through the shared ones."""

    def __init__(self, layer: int, model: Model, make: MakeParameter, groups: Groups, balance: Balance):
        super().__init__()
        # "edp": the data axis of experts, see core/groups.py.
        # matrices: how many are stacked in a parameter, for muon.py.
        E, H, F, name = model.experts, model.hidden, model.expert_ffn, f"layers.{layer}."
        self.ep_group = groups.get("ep", ALONE)
        self.w_router = make(Spec(name + "router", (E, H), {"tp": "partial"}, std=INIT_STD))  # ranks' tokens differ
        self.router = Router(name + "router.bias", self.w_router, model, balance)
        self.experts = GroupedExperts(
            make, Spec(name + "experts.w_gate_up", (E, 2 * F, H), {"ep": 0}, "edp", std=INIT_STD, matrices=2 * E),
            Spec(name + "experts.w_down", (E, H, F), {"ep": 0}, "edp", std=output_std(model), matrices=E))
        shared = model.shared_experts * F
        self.shared = FeedForward(name + "shared.", shared, model, make) if shared else None

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:  # [T/t, H] -> [T/t, H]
        tokens = split_tokens(x, context.tp)
        route, gates = self.router(tokens, context.routing, self.ep_group)
        dispatched = route.dispatch(tokens, gates)
        shared = self.shared(x, context) if self.shared else None  # hides the dispatch
        y = route.combine(self.experts(*dispatched.wait(), route, context.recompute))
        y = merge_tokens(y, len(x), context.tp, skip=is_recomputing())  # as in FeedForward
        return y if shared is None else y + shared


# Every token must be sent to its experts once. With sequence parallelism the ranks of tp have different tokens. Without
# it all have the same [T, H], and each sends a shard of them.

def split_tokens(x: Tensor, tp: TensorParallel) -> Tensor:
    """Return the tokens that this rank sends to experts: all of x, or its shard [T, H] -> about [T/t, H]."""
    if tp.sequence or tp.size == 1:
        return x
    return Identity__AllReduce.apply(x, tp.group)[shard_slice(len(x), tp.size, tp.group.rank)]


def merge_tokens(y: Tensor, count: int, tp: TensorParallel, skip: bool = False) -> Tensor:
    """Undo `split_tokens`, of a tensor that had `count` tokens.

    skip: do not sum over ranks, in a recomputed block whose backward does not read the result.
    """
    if tp.sequence or tp.size == 1:
        return y
    shard = shard_slice(count, tp.size, tp.group.rank)
    padded = pad(y, (0, 0, shard.start, count - shard.stop))
    return padded if skip else AllReduce__Identity.apply(padded, tp.group)


class MultiTokenPrediction(Block):
    """Only in training, after the last layer: its result h and the next token's embedding e, each normalised, are
    concatenated, projected and passed through one more block; from that the model's head predicts the token after the
    next. DeepSeek-V3, section 2.2, depth 1; e before h, as in its published weights, though not in its equation."""

    def __init__(self, embedding: VocabParallelEmbedding, layer: int, model: Model, make: MakeParameter,
                 norm_along: dict, **rest):
        super().__init__(layer, model, make, norm_along=norm_along, **rest)
        name, H = f"layers.{layer}.", model.hidden
        self.embedding = embedding
        self.e_norm, self.h_norm, self.norm = (RMSNorm(make, name + norm, H, model.norm_eps, norm_along)
                                               for norm in ("enorm", "hnorm", "shared_head.norm"))
        # Whole on every rank, and applied to the tokens that it has between layers: no tensor parallelism.
        self.project = ColumnParallelLinear(make, Spec(name + "eh_proj", (H, 2 * H), norm_along, std=INIT_STD))

    def forward(self, h: Tensor, context: ForwardContext) -> Tensor:
        """[T/t, H] -> [2 T/t, H]: h, and below it, already normalised, what predicts the token after the next."""
        if context.next_tokens is None:
            return h
        # Not called: zero.py's hooks would take it for the first unit of a forward. The table is in this unit as well.
        e = self.embedding.forward(context.next_tokens.flatten(), context.tp)
        x = self.project(torch.cat((self.e_norm(e), self.h_norm(h)), 1), TensorParallel())
        return torch.cat((h, self.norm(super().forward(x, context))))  # one tensor, as a unit's hooks follow one result


# ---- demo: python model.py ------------------------------------------------------------------------------------------

def demo() -> None:
    from types import SimpleNamespace

    from core.collectives import Group
    from core.param import draw
    settings = Model(head_dim=32)
    two_ranks = SimpleNamespace(size=lambda: 2, rank=lambda: 0)  # in place of torch's group: nothing is sent
    model, sharded = Llama(settings, {}), Llama(settings, {"tp": Group("tp", two_ranks)})
    print(f"The tiny Llama, {sum(p.numel() for p in model.parameters()):,} parameters, on 2 tensor parallel ranks\n"
          "tp: the dimension that is sharded; partial: whole on each rank, and its gradients are summed over ranks,\n"
          "since between layers each rank has other tokens (sequence parallelism)\n")
    for name, unit in {"embedding": sharded.embedding, "each block": sharded.blocks["0"], "head": sharded.head}.items():
        print(f"    {name}, {sum(math.prod(p.spec.shape) for p in unit.parameters()):,} parameters")
        for p in unit.parameters():
            print(f"        {p.spec.name:28s}{str(p.spec.shape):14s} tp: {str(p.spec.along['tp']):9s}"
                  f"rank 0 has {tuple(p.shape)}")
    for p in model.parameters():
        p.data = draw(0)(p.spec, p.box)
    tokens = torch.randint(settings.vocab, (2, 65), generator=torch.Generator().manual_seed(0))
    loss = model(tokens[:, :-1], labels=tokens[:, 1:]).item() / 128
    print(f"\nFirst loss {loss:.3f} nats per token, guessing ln {settings.vocab} = {math.log(settings.vocab):.3f}")


if __name__ == "__main__":
    from core.collectives import run_demo
    run_demo(lambda group: demo())
