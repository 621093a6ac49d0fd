"""A Llama-style model, dense or with experts, written almost as for one GPU.

    tokens ──► embedding ──► block ──► block ── ... ──► norm ──► head ──► logits, or with labels the loss

    block:   x ──┬── norm ──► attention ──(+)──┬── norm ──► feed-forward, or experts ──(+)──►
                 └─────────────────────────┘   └────────────────────────────────────────┘

    B    sequences in a micro-batch                         V    vocabulary
    S    tokens of a sequence                               H    hidden size
    s    S/c tokens, on each of c context parallel ranks    N    query heads
    t    tensor parallel ranks                              K    key and value heads
    T    B s tokens, which the t ranks of a tensor          D    head width
         parallel group have in common                      F    channels of a feed-forward or of an expert
                                                            E    experts

With sequence parallelism, a rank has T/t of the T tokens between layers: an activation [T/t, H]. Without it, each
tensor parallel rank has all of them there: [T, H].

What makes it parallel is inside the layers that it is built from. `context`, a ForwardContext, holds what all layers of
a forward share.

    tensor      A ColumnParallelLinear gathers all T tokens from [T/t, H] and computes this rank's heads or channels. A
                RowParallelLinear sums over ranks, back to [T/t, H] (tp.py).
    context     The function in `context.attention` lets this rank's queries see all keys (cp.py).
    expert      MixtureOfExperts sends each token to the ranks that have its experts (ep.py).
    pipeline    Llama builds this rank's stages only, and `forward` runs one of them. Its caller connects them (pp.py).
    data        No layer communicates over it. The optimizer sums gradients and, with ZeRO-3, gathers a block's weights,
                by hooks on the modules that Llama.units lists (dp.py, zero.py). MultiTokenPrediction is written so
                that it does not disturb these hooks.

A layer says how each of its weights is divided in a Spec (core/param.py): {"tp": 0} is sharded by rows over the tensor
parallel ranks, {"tp": 1} by columns. A weight that is whole on each rank is "replicate" if all have its full gradient,
"partial" if each has one term of it and the terms must be summed. `make` turns a Spec into this rank's parameter.

Recomputation (recompute.py): with --recompute full, `context.recompute(block, x)` saves only x and runs the block again
in backward. --recompute selective shows in two places. An attention that would save its scores computes them again
instead (attention_by_window). And in

    h = norm(x)
    y = layer(h)
    context.recompute.drop(h, y, norm, x)

`drop` frees h, and computes it again as norm(x) when the backward of y begins. Without --recompute, `recompute` only
calls the block, and `drop` does nothing.

On a first reading: Attention, FeedForward, Block and Llama.forward. Come back for the rest after tp.py and zero.py.

Touvron et al. 2023 (Llama); Ainslie et al. 2023 (grouped queries).
"""
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import pad

from core.collectives import ALONE, AllReduce__Identity, Groups, Identity__AllReduce  # X__Y: X forward, Y backward
from core.config import Model
from core.param import Spec, parameter, shard_slice
from cp import attention_by_window, gather_tokens, own_positions
from ep import Balance, GroupedExperts, Router, make_routing_info
from mla import LatentAttention
from operations import RMSNorm, rotary_angles, rotate_and_split, swiglu
from recompute import Recompute, is_recomputing
from tp import ColumnParallelLinear, RowParallelLinear, TensorParallel, VocabParallelEmbedding, VocabParallelHead

MakeParameter = Callable[[Spec], nn.Parameter]
INIT_STD = 0.02  # standard deviation of initial weights, as in GPT-2


class ForwardContext(NamedTuple):
    """What all layers of one forward share."""
    tp: TensorParallel
    seq: int  # s
    angles: tuple[Tensor, Tensor]  # rotary cos and sin, [s, 1, d/2] or [B, s, 1, d/2]; d of the D channels are rotated
    attention: dict[int, Callable[[Tensor, Tensor, Tensor], Tensor]]  # window (0: none) -> function of q, k, v
    recompute: Recompute
    routing: tuple | None  # an ep.RoutingInfo; None without experts
    cache: Any = None  # while text is generated: run/generate.py's KVCache, keys and values of earlier tokens
    gather_latents: Callable | None = None  # for LatentAttention: [B, s, ...] of this rank's tokens -> [B, S, ...]
    next_tokens: Tensor | None = None  # [B, s], the token after each; None without multi-token prediction


def output_std(config: Model) -> float:
    """Return the initial std of matrices that write to the residual stream.

    It is INIT_STD divided by the square root of the number of additions to the stream, 2 per layer, as in GPT-2.
    """
    return INIT_STD / (2 * config.layers) ** 0.5


# ---- layers of every model ------------------------------------------------------------------------------------------

class Attention(nn.Module):
    """Grouped-query attention. A tensor parallel rank has N/t query heads, and K/t key and value heads (at least 1).
    """

    def __init__(self, layer: int, config: Model, make: MakeParameter, t: int, whole_along: dict):
        super().__init__()
        H, D, name = config.hidden, config.head_dim, f"layers.{layer}.attention."
        self.layer, self.window, self.head_dim = layer, config.window_of(layer), D
        self.has_rope = config.has_rope(layer)
        kv_heads = max(config.kv_heads // t, 1)
        self.head_counts = [config.heads // t, kv_heads, kv_heads]  # of q, k and v, on this rank

        q_rows, kv_rows = config.heads * D, config.kv_heads * D
        # If t > K, tp splits into kv x kv_copy: t = 8 and K = 2 give kv 2 x kv_copy 4. The K ranks along "kv" have one
        # head each. The t/K ranks along "kv_copy" have the same head and different queries, so each has one term of
        # the head's gradient.
        kv_along = {"kv": 0, "kv_copy": "partial"} if t > config.kv_heads else {"tp": 0}
        projections = (
            ("q", q_rows, {"tp": 0}),
            ("k", kv_rows, kv_along),
            ("v", kv_rows, kv_along),
        )
        weights = [Spec(f"{name}w{x}", (rows, H), along, std=INIT_STD) for x, rows, along in projections]
        biases = [Spec(f"{name}b{x}", (rows,), along, decay=False) for x, rows, along in projections]
        self.qkv = ColumnParallelLinear(make, *weights, biases=biases if config.qkv_bias else [])
        # The output's bias is whole on each rank, and is added to the tokens that a norm sees: it gets its gradient as
        # a norm does.
        self.out = RowParallelLinear(make, Spec(name + "wo", (H, q_rows), {"tp": 1}, std=output_std(config)),
                                     Spec(name + "bo", (H,), whole_along, decay=False) if config.out_bias else None)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            # Whole on each rank. Each rank's heads give one term of the gradient (with kv_copy, its queries do).
            along = {"tp": "partial"}
            self.q_norm = RMSNorm(make, name + "q_norm", D, config.norm_eps, along)
            self.k_norm = RMSNorm(make, name + "k_norm", D, config.norm_eps, along)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:  # [T/t, H] -> [T/t, H]
        qkv = self.qkv(x, context.tp)  # [T, n D], n heads of q, k and v: one gather and one matmul for all three
        qkv = rearrange(qkv, "(b s) (n d) -> b s n d", s=context.seq, d=self.head_dim)
        if self.has_rope and self.q_norm is None:
            q, k, v = rotate_and_split(qkv, context.angles, self.head_counts)  # v is not rotated
        else:
            q, k, v = qkv.split(self.head_counts, dim=2)
            if self.q_norm is not None:
                q, k = self.q_norm(q), self.k_norm(k)
            if self.has_rope:
                (q,) = rotate_and_split(q, context.angles, self.head_counts[:1])
                (k,) = rotate_and_split(k, context.angles, self.head_counts[1:2])
        if context.cache is not None:
            k, v = context.cache.extend(self.layer, k, v, self.window)
        q, k, v = (rearrange(heads, "b s n d -> b n s d") for heads in (q, k, v))
        attend = context.attention[self.window]  # context parallelism is in here
        o = attend(q, k, v)
        return self.out(rearrange(o, "b n s d -> (b s) (n d)"), context.tp)


class FeedForward(nn.Module):
    """SwiGLU. A tensor parallel rank has F/t of its channels.

    biases_along: how the bias of w_down, which is whole on each rank, gets its gradient. None: there are no biases.
    """

    def __init__(self, name: str, ffn: int, config: Model, make: MakeParameter, biases_along: dict | None = None):
        super().__init__()
        gate = Spec(name + "w_gate", (ffn, config.hidden), {"tp": 0}, std=INIT_STD)
        up = Spec(name + "w_up", (ffn, config.hidden), {"tp": 0}, std=INIT_STD)
        down = Spec(name + "w_down", (config.hidden, ffn), {"tp": 1}, std=output_std(config))
        biases, bias = [], None
        if biases_along is not None:
            biases = [Spec(name + b, (ffn,), {"tp": 0}, decay=False) for b in ("b_gate", "b_up")]
            bias = Spec(name + "b_down", (config.hidden,), biases_along, decay=False)
        self.gate_up = ColumnParallelLinear(make, gate, up, biases=biases)
        self.down = RowParallelLinear(make, down, bias)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:  # [T/t, H] -> [T/t, H]
        gate_up = self.gate_up(x, context.tp)
        hidden = swiglu(gate_up)
        # When the block is recomputed, nobody reads y: it is only added to x, and an addition's backward reads nothing.
        # So the last matmul and its sum over ranks are skipped.
        y = self.down(hidden, context.tp, skip=is_recomputing())
        context.recompute.drop(hidden, y, swiglu, gate_up)
        return y


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)).

    t: tensor parallel ranks.
    whole_along: how weights that are whole on each rank, such as those of norms, get their gradients: the
        `along` of a Spec.
    """

    def __init__(self, layer: int, config: Model, make: MakeParameter, *, t: int, whole_along: dict, groups: Groups,
                 balance: Balance):
        super().__init__()
        name = f"layers.{layer}."
        self.attention_norm = RMSNorm(make, name + "attention_norm", config.hidden, config.norm_eps, whole_along)
        if config.kv_lora_rank:
            self.attention = LatentAttention(layer, config, make, whole_along, INIT_STD, output_std(config))
        else:
            self.attention = Attention(layer, config, make, t, whole_along)
        self.ffn_norm = RMSNorm(make, name + "ffn_norm", config.hidden, config.norm_eps, whole_along)
        if config.has_experts(layer):
            self.ffn = MixtureOfExperts(layer, config, make, groups, balance)
        else:
            self.ffn = FeedForward(name + "ffn.", config.ffn, config, make, whole_along if config.ffn_bias else None)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:  # [T/t, H] -> [T/t, H]
        return context.recompute(partial(self.attention_and_ffn, context=context), x)

    def attention_and_ffn(self, x: Tensor, context: ForwardContext) -> Tensor:
        # `branch` returns x and norm(x). With a plain h = norm(x), autograd would sum the two gradients of x in a
        # kernel of its own, which reads and writes [T/t, H] once more. Here the norm's kernel sums them in backward,
        # and computes x + y in forward.
        x, h = self.attention_norm.branch(x)
        y = self.attention(h, context)
        context.recompute.drop(h, y, self.attention_norm, x)
        x, h = self.ffn_norm.branch(x, y)  # x = x + y; h = norm(x)
        y = self.ffn(h, context)
        context.recompute.drop(h, y, self.ffn_norm, x)
        return x + y


class Head(nn.Module):
    """The last norm, then logits or the loss. table: the embedding's, if it is tied and on this rank."""

    def __init__(self, config: Model, make: MakeParameter, whole_along: dict, table: nn.Parameter | None,
                 z_loss: float):
        super().__init__()
        self.norm = RMSNorm(make, "norm", config.hidden, config.norm_eps, whole_along)
        spec = table_spec(config, "embedding" if config.tied else "head")
        self.vocabulary = VocabParallelHead(make, spec, table, z_loss)

    def forward(self, x: Tensor, context: ForwardContext, labels: Sequence[Tensor | None],
                loss_grad: Sequence[Tensor | None]) -> Tensor:
        """Return logits [T, V/t] if labels is [None]; otherwise the sum of the tokens' losses, a scalar.

        labels: [T] for the next token and, with multi-token prediction, [T] for the one after it. Then the result is
        [2], a sum for each prediction, and x is [2 T/t, H]: the lower half comes from MultiTokenPrediction, which has
        its own last norm.
        """
        ahead = None
        if len(labels) == 2:
            x, ahead = x.chunk(2)
        h = self.norm(x)
        y = self.vocabulary(h, context.tp, labels[0], loss_grad[0])
        context.recompute.drop(h, y, self.norm, x)
        if ahead is None:
            return y
        return torch.stack((y, self.vocabulary(ahead, context.tp, labels[1], loss_grad[1])))


def table_spec(config: Model, name: str) -> Spec:
    """Return the Spec of the embedding's or the head's table.

    The first and the last pipeline stage both have the table if embedding and head are tied, or if multi-token
    prediction reads the embedding. The table's gradient is then the sum of both stages' gradients, over the axis "tie".

    matrices=0 says that the parameter has no matrix for Muon. AdamW updates it, as usual for tables (muon.py).
    """
    tie = {"tie": "partial"} if config.tied or (config.mtp and name == "embedding") else {}
    return Spec(name, (config.vocab, config.hidden), {"tp": 0} | tie, std=INIT_STD, matrices=0)


# ---- the model ------------------------------------------------------------------------------------------------------

class Execution(NamedTuple):
    """How a model is executed. Apart from rounding, no setting here changes the result."""
    dtype: torch.dtype = torch.float32  # of parameters
    device: torch.device | str = "cpu"
    attention: str = "auto"  # or "sdpa", "triton", "math"
    recompute: str = "none"  # or "selective", "full"
    # Where --recompute full saves block inputs: in run/offload.py's HostRows, or with None on the device.
    rows: Callable | None = None
    cp_style: str = "allgather"  # one of config.CP_STYLES
    sequence: bool = True  # sequence parallelism
    async_tp: bool = False  # asynchronous tensor parallelism


class Stages(NamedTuple):
    """The pipeline stages of a rank.

    layers_of_stage: each stage of this rank -> its layers.
    owners: the rank of every stage of the pipeline.
    in_flight: the largest number of (stage, micro-batch) pairs whose activations this rank holds at once.
    """
    layers_of_stage: dict[int, range]
    owners: Sequence[int] = (0,)
    in_flight: int = 1


class Llama(nn.Module):
    """The layers of a Llama that this rank has. Parameters get memory and values from an Optimizer.

    groups: the grid, axis -> Group; {} for one rank.
    stages: None for all blocks, in one stage. config.blocks counts config.layers layers and, with multi-token
        prediction, the block that it adds.
    z_loss, balance: auxiliary losses, see tp.cross_entropy and ep.py.
    mtp_weight: the factor of multi-token prediction's loss, which train.forward_backward applies.
    """

    def __init__(self, config: Model, groups: Groups, execution: Execution = Execution(), *,
                 stages: Stages | None = None, z_loss: float = 0.0, balance: Balance = Balance(),
                 mtp_weight: float = 0.3):
        super().__init__()
        self.config, self.groups, self.execution, self.mtp_weight = config, groups, execution, mtp_weight
        stages = stages or Stages({0: range(config.blocks)})
        self.layers_of_stage, self.owners = stages.layers_of_stage, stages.owners
        self.last_stage = len(stages.owners) - 1
        tp = groups.get("tp", ALONE)
        # One rank: no sequence parallelism.
        self.tp = TensorParallel(tp, execution.sequence, execution.async_tp) if tp.size > 1 else TensorParallel(tp)
        self.recompute = make_recompute(execution, stages, self.tp)
        self.cached_angles: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

        make = partial(parameter, groups=groups, dtype=execution.dtype, device=execution.device)
        whole_along = {"tp": "partial" if self.tp.sequence else "replicate"}  # partial: tp ranks see different tokens
        common = dict(config=config, make=make, t=self.tp.size, whole_along=whole_along, groups=groups, balance=balance)
        has_first_stage, has_last_stage = 0 in self.layers_of_stage, self.last_stage in self.layers_of_stage
        predicts_ahead = has_last_stage and config.mtp

        self.embedding = None
        if has_first_stage or predicts_ahead:
            self.embedding = VocabParallelEmbedding(make, table_spec(config, "embedding"))
        self.blocks = nn.ModuleDict()  # by number of the layer
        for layers in self.layers_of_stage.values():
            for layer in layers:
                if layer < config.layers:
                    self.blocks[str(layer)] = Block(layer, **common)
        if predicts_ahead:  # its number is config.layers, the last one of the last stage
            self.blocks[str(config.layers)] = MultiTokenPrediction(self.embedding, config.layers, **common)
        self.routers = [block.ffn.router for block in self.blocks.values() if isinstance(block.ffn, MixtureOfExperts)]
        self.head = None
        if has_last_stage:
            table = self.embedding.table if config.tied and self.embedding else None
            self.head = Head(config, make, whole_along, table, z_loss)

    def units(self) -> dict[int, list[nn.Module]]:
        """Return each stage's modules in forward order. Each is an FSDP unit: ZeRO-3 gathers and frees its weights, and
        reduces its gradients, together.

        On a rank with the first and the last stage, a tied table is a parameter of two modules. So is the embedding's
        with multi-token prediction. dp.py puts such a table into a bucket of its own, which is reduced after the
        gradients of both.
        """
        units = {}
        for stage, layers in self.layers_of_stage.items():
            modules = [self.blocks[str(layer)] for layer in layers]
            if stage == 0:
                modules.insert(0, self.embedding)
            if stage == self.last_stage:
                modules.append(self.head)
            units[stage] = modules
        return units

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None, *,
                labels: Tensor | None = None, next_tokens: Tensor | None = None, next_labels: Tensor | None = None,
                stage: int = 0, x: Tensor | None = None, cache: Any = None,
                aux_loss_scale: float | Tensor | None = None,
                loss_grad: Sequence[Tensor | None] = (None, None)) -> Tensor:
        """Return logits [B, s, V/t] of tokens [B, s], for this rank's part of the vocabulary.

        With labels, return the sum of the tokens' losses in nats, a scalar that is equal on all tensor parallel ranks.
        With next_labels, return the sums of both predictions, [2]. A stage before the last returns an activation
        [T/t, H] for the next one.

        tokens: below 0 for padding. With context parallelism, tokens and positions are this rank's (shard_sequences).
        positions: [B, s], each token's position in its document; default: in the sequence.
        documents: [B, S], in the host's memory, of whole sequences: the number of each token's document. Tokens see
            only their own document.
        labels: [B, s]; param.IGNORED for tokens without a loss.
        next_tokens, next_labels: [B, s], for multi-token prediction: tokens and labels one place further on
            (run/data.py's MicroBatch.one_ahead).
        stage, x: which of this rank's stages to run, and the activation from the stage before it.
        cache: keys and values of earlier tokens, which these tokens follow; every rank then has all tokens.
        aux_loss_scale: the factor of a sequence's auxiliary losses, or None to leave them out (ep.AddAuxiliaryLoss).
        loss_grad: the gradient that each sum will have in backward (default 1). The fused loss needs it in forward.
        """
        if cache is not None:
            assert positions is None, "with a KV cache, positions follow from the number of tokens in it"
            assert documents is None, "a KV cache knows of no documents"
        assert (next_tokens is None) == (next_labels is None)
        assert next_labels is None or (labels is not None and self.config.mtp)
        context = self.make_context(stage, tokens, positions, documents, cache, aux_loss_scale, next_tokens)
        self.recompute.start_forward()
        if stage == 0:
            x = self.embedding(tokens.flatten(), context.tp)
        for layer in self.layers_of_stage[stage]:
            x = self.blocks[str(layer)](x, context)
        if stage < self.last_stage:
            return x
        if labels is None:
            return self.head(x, context, [None], loss_grad).unflatten(0, tokens.shape)
        labels = [each.flatten() for each in (labels, next_labels) if each is not None]
        return self.head(x, context, labels, loss_grad)

    def angles_in_sequence(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return rotary cos and sin of this rank's positions, one copy for all micro-batches in flight."""
        key = length, device
        if key not in self.cached_angles:
            cp = self.groups.get("cp", ALONE)
            positions = own_positions(length, cp.size, cp.rank, device)
            self.cached_angles[key] = rotary_angles(positions, self.config, self.execution.dtype, length * cp.size)
        return self.cached_angles[key]

    def make_context(self, stage: int, tokens: Tensor, positions: Tensor | None, documents: Tensor | None, cache: Any,
                     aux_loss_scale: float | Tensor | None, next_tokens: Tensor | None) -> ForwardContext:
        execution, config = self.execution, self.config
        tp, groups, earlier = self.tp, self.groups, 0  # earlier: the number of tokens in the cache
        if cache is not None:  # generating: too few tokens for sequence or context parallelism
            tp, groups, earlier = TensorParallel(tp.group), {}, cache.length(self.layers_of_stage[stage][0])
            positions = torch.arange(earlier, earlier + tokens.shape[1], device=tokens.device)
        cp = groups.get("cp", ALONE)
        style = "latents" if config.kv_lora_rank else execution.cp_style  # LatentAttention gathers its latents itself
        attention = attention_by_window(
            map(config.window_of, self.layers_of_stage[stage]), tokens, documents, kernel=execution.attention,
            head_dim=config.head_dim, dtype=execution.dtype, groups=groups, style=style, earlier=earlier,
            recompute=execution.recompute == "selective")  # "full" recomputes the whole block, attention with it
        routing = make_routing_info(tokens, cp, tp.group, aux_loss_scale) if self.routers else None
        if positions is None:
            angles = self.angles_in_sequence(tokens.shape[1], tokens.device)
        else:
            length = earlier + tokens.shape[1] * cp.size
            angles = rotary_angles(positions, config, execution.dtype, length)
        return ForwardContext(tp, seq=tokens.shape[1], angles=angles, attention=attention, recompute=self.recompute,
                              routing=routing, cache=cache, gather_latents=partial(gather_tokens, group=cp),
                              next_tokens=next_tokens)

    def boundary_shape(self, tokens: Tensor, sequence: bool = True) -> tuple[int, int]:
        """Return the shape of the activation between two stages. tokens: [B, s]. sequence=False: without sequence
        parallelism, as when text is generated."""
        return tokens.numel() // (self.tp.size if self.tp.sequence and sequence else 1), self.config.hidden


def make_recompute(execution: Execution, stages: Stages, tp: TensorParallel) -> Recompute:
    """Build the context's `recompute`, with room for the block inputs that it saves at once."""
    slots = stages.in_flight * max(map(len, stages.layers_of_stage.values()))
    # Ranks with equal block inputs save 1/t of every input each.
    group_with_same_inputs = ALONE if tp.sequence else tp.group
    return Recompute(execution.recompute, slots, group_with_same_inputs, execution.rows)


# ---- layers of some models ------------------------------------------------------------------------------------------

class MixtureOfExperts(nn.Module):
    """Each token goes through its top-k experts, and through the shared experts, which all tokens have.

    groups["ep"] shares out the top-k experts; ranks of groups["edp"] have copies of the same ones (core/groups.py).
    """

    def __init__(self, layer: int, config: Model, make: MakeParameter, groups: Groups, balance: Balance):
        super().__init__()
        # "edp" is the axis over which experts' gradients are summed. matrices: how many matrices are stacked in a
        # parameter, because Muon orthogonalises each of them. An expert has one in w_down and two in w_gate_up.
        E, H, F, name = config.experts, config.hidden, config.expert_ffn, f"layers.{layer}."
        self.ep_group = groups.get("ep", ALONE)
        self.w_router = make(Spec(name + "router", (E, H), {"tp": "partial"}, std=INIT_STD))  # ranks' tokens differ
        self.router = Router(name + "router.bias", self.w_router, config, balance)
        self.experts = GroupedExperts(
            make, Spec(name + "experts.w_gate_up", (E, 2 * F, H), {"ep": 0}, "edp", std=INIT_STD, matrices=2 * E),
            Spec(name + "experts.w_down", (E, H, F), {"ep": 0}, "edp", std=output_std(config), matrices=E))
        shared = config.shared_experts * F
        self.shared = FeedForward(name + "shared.", shared, config, make) if shared else None

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:  # [T/t, H] -> [T/t, H]
        tokens = split_tokens(x, context.tp)
        route, gates = self.router(tokens, context.routing, self.ep_group)
        dispatched = route.dispatch(tokens, gates)
        shared = self.shared(x, context) if self.shared else None  # hides the dispatch
        # wait returns rows [R, H], the tokens of this rank's experts, and their gates [R]. They have no names here,
        # because a name would keep them in memory during `combine`.
        y = route.combine(self.experts(*dispatched.wait(), route, context.recompute))
        y = merge_tokens(y, len(x), context.tp, skip=is_recomputing())  # recomputed, nobody reads y: see FeedForward
        return y if shared is None else y + shared


# Every token must be sent to its experts once. With sequence parallelism the tensor parallel ranks have different
# tokens. Without it they have the same [T, H], and each sends a shard.

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
    """One more block after the last layer, only in training, from which the head predicts the token after the next.

        h, the last layer's result    ──► norm ──┐
                                                 ├─► concatenate ──► project ──► block ──► norm ──► (head)
        e, the next token's embedding ──► norm ──┘

    DeepSeek-V3, section 2.2, depth 1. e comes before h, as in its published weights, though not in its equation.
    """

    def __init__(self, embedding: VocabParallelEmbedding, layer: int, config: Model, make: MakeParameter,
                 whole_along: dict, **rest):
        super().__init__(layer, config, make, whole_along=whole_along, **rest)
        name, H = f"layers.{layer}.", config.hidden
        self.embedding = embedding
        self.e_norm = RMSNorm(make, name + "enorm", H, config.norm_eps, whole_along)
        self.h_norm = RMSNorm(make, name + "hnorm", H, config.norm_eps, whole_along)
        self.norm = RMSNorm(make, name + "shared_head.norm", H, config.norm_eps, whole_along)
        # A plain linear layer, replicated over tp: forward calls it with a group of one, for the tokens that the rank
        # has between layers. It is a ColumnParallelLinear only so that train.py's multiply_in_fp8 converts it, too.
        # Its gradient is summed like a norm's.
        self.project = ColumnParallelLinear(make, Spec(name + "eh_proj", (H, 2 * H), whole_along, std=INIT_STD))

    def forward(self, h: Tensor, context: ForwardContext) -> Tensor:
        """Return h and, below it, the normalised activation that predicts the token after the next: [2 T/t, H].

        Both are in one tensor, because ZeRO's hooks follow one result per unit.
        """
        if context.next_tokens is None:
            return h
        # The table belongs to this unit, too, so its weights are there. Calling self.embedding(...) would trigger the
        # ZeRO hooks of another unit, the embedding, which would take this for the beginning of a forward.
        e = self.embedding.look_up(context.next_tokens.flatten(), context.tp)
        x = self.project(torch.cat((self.e_norm(e), self.h_norm(h)), 1), TensorParallel())
        return torch.cat((h, self.norm(super().forward(x, context))))


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
