"""What a run costs, by formula: parameters, FLOPs, bytes of model state and of saved activations.

Nothing is measured here and nothing needs torch: every formula takes only settings, so it answers before anything
runs. meter.py counts the same quantities in a real step, and the tests demand that both agree: parameters, state and
activations exactly, FLOPs to 1% (the formulas leave out norms and softmax).

Parameters and FLOPs. Each of the P parameters that a token passes through takes part in one multiplication and one
addition in forward, and in two of each in backward: 6 P FLOPs per token (papers write 6 N). Attention's scores and
their product with the values add 12 L q S, where q is heads x head width, or 6 L q S if only the visible half of the
scores counts (causal). Experts that a token is not sent to do not count in P.

Model state of P parameters at ZeRO level 0: weights w P, gradients a P, master weights a P (none if w = a) and AdamW's
moments m P, with w = 2, a = 4, m = 8 in bf16: 18 bytes per parameter. See zero.py for what each level divides.

Activations. A layer is a table of what its forward makes: bytes per token, the strongest recomputation under which it
is still saved, what shards it, and the FLOPs that make it. From it follow what a rank saves and what is recomputed.

Letters: H hidden, F ffn, q heads x head width, kv key and value heads x head width, E experts, k experts per token, S
sequence, L layers.
"""
from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from math import gcd
from typing import NamedTuple

from config import Config, Model, padded_length

RECOMPUTE = ("none", "selective", "full")  # from weakest to strongest


def acc_bytes(element: int) -> int:
    """Bytes per element of the accumulation dtype (of main gradients, norms' statistics) if weights take `element`."""
    return max(element, 4)


# ---- parameters and FLOPs -------------------------------------------------------------------------------------------

class Parameters(NamedTuple):
    """How many parameters a model has, by component. experts: of all experts; active_experts: of a token's top k."""
    embedding: int
    attention: int
    ffn: int
    experts: int
    active_experts: int
    router: int
    norms: int
    head: int  # 0 if it is tied to the embedding

    @property
    def total(self) -> int:
        return sum(self) - self.active_experts

    @property
    def active(self) -> int:
        """The parameters that a token passes through."""
        return self.total - self.experts + self.active_experts


def parameters(model: Model) -> Parameters:
    H, L, q, kv = model.hidden, model.layers, model.heads * model.head_dim, model.kv_heads * model.head_dim
    moe = sum(map(model.has_experts, range(L)))  # layers with experts
    expert = 3 * H * model.expert_ffn
    return Parameters(
        embedding=model.vocab * H,
        attention=L * (2 * H * q + 2 * H * kv + model.qkv_bias * (q + 2 * kv)),
        ffn=(L - moe) * 3 * H * model.ffn + moe * model.shared_experts * expert,
        experts=moe * model.experts * expert,
        active_experts=moe * model.top_k * expert,
        router=moe * model.experts * H,
        norms=(2 * L + 1) * H + model.qk_norm * 2 * L * model.head_dim,
        head=0 if model.tied else model.vocab * H)


def visible_keys(model: Model, layer: int, seq: int) -> float:
    """How many keys a token sees in a layer, averaged over a sequence: S/2, or W - W^2 / 2S with a window of W."""
    window = min(model.window_of(layer) or seq, seq)
    return window - window * window / (2 * seq)


def flops_per_token(model: Model, seq: int, causal: bool = False) -> float:
    """Floating-point operations per token, forward and backward: 6 P + 12 L q S (Chowdhery et al. 2022, appendix B).

    P: active parameters without the input embedding, which multiplies nothing. causal: count only the visible scores,
    half of them: 6 P + 6 L q S. In a layer with a window, twice its visible keys take the place of S.
    """
    count = parameters(model)
    dense = count.active - (0 if model.tied else count.embedding)
    visible = sum(visible_keys(model, layer, seq) for layer in range(model.layers))
    return 6 * dense + (1 if causal else 2) * 12 * model.heads * model.head_dim * visible


# ---- model state ----------------------------------------------------------------------------------------------------

def state_bytes(buckets: list[int], level: int, n: int, *, weight: int, accumulated: int,
                moments: int) -> dict[str, int]:
    """The most bytes that a rank has at once of weights, gradients and optimizer state.

    buckets: elements of each. n: ranks that shard them. level: of ZeRO. weight: bytes per element of the weights;
    accumulated: of main gradients and master weights; moments: of all moments together. At level 3 two neighbouring
    buckets' weights are unsharded at once, at levels 2 and 3 two neighbouring buckets' gradients; the largest possible
    sum of two is taken. Left out at levels 2 and 3: the gradient of a tied table, and one shard being received; with
    bf16 moments: one bucket's moments in fp32 during its update.
    """
    if n == 1:
        level = 0
    padded = [-(-count // n) * n for count in buckets] if level else buckets
    all_elements = sum(padded)
    shard = all_elements // n
    two = sum(sorted(padded)[-2:]) if len(padded) > 1 else 2 * all_elements
    master = 0 if weight == accumulated else accumulated
    return dict(weights=(shard + two if level == 3 else all_elements) * weight,
                gradients=(shard + two if level >= 2 else all_elements) * accumulated,
                optimizer=(shard if level else all_elements) * (master + moments))


# ---- what a layer makes ---------------------------------------------------------------------------------------------

class Activation(NamedTuple):
    """A tensor that a layer's forward makes, per token.

    nbytes: without parallelism. saved_under: the strongest of RECOMPUTE under which it is still saved. sharded_by:
    "tp": by tensor parallelism; "sp": by sequence parallelism only; "": by neither. flops: to make it.
    """
    nbytes: float
    saved_under: str
    sharded_by: str
    flops: float = 0


Layer = dict[str, Activation]


def saved_bytes(layer: Layer, recompute: str, tp: int = 1, sp: bool = True) -> float:
    """Bytes per token that a layer saves on each of tp ranks, with or without sequence parallelism."""
    shards = {"tp": tp, "sp": tp if sp else 1, "": 1}
    return sum(activation.nbytes / shards[activation.sharded_by] for activation in layer.values()
               if RECOMPUTE.index(activation.saved_under) >= RECOMPUTE.index(recompute))


def forward_flops(layer: Layer) -> float:
    return sum(activation.flops for activation in layer.values())


def recomputed_flops(layer: Layer, recompute: str) -> float:
    """FLOPs per token that backward repeats, of all activations that are not saved. A layer's last matmul is never
    repeated: its result is the next layer's input."""
    return sum(activation.flops for activation in layer.values()
               if RECOMPUTE.index(activation.saved_under) < RECOMPUTE.index(recompute))


def gpt_layer(hidden: int, heads: int, seq: int) -> Layer:
    """The layer of Korthikanti et al. 2022, section 4: 16 bits, GELU, dropout, scores saved: s b h (34 + 5 a s / h).

    Attention's FLOPs count all scores, masked ones too, as the paper and torch do.
    """
    h, scores = hidden, heads * seq
    return dict(
        input=Activation(2 * h, "full", "sp"),
        attention_norm=Activation(2 * h, "selective", "sp"),
        qkv=Activation(6 * h, "selective", "tp", 6 * h * h),
        softmax=Activation(2 * scores, "none", "tp", 4 * h * seq),  # q k^T and softmax v
        softmax_dropped=Activation(2 * scores, "none", "tp"),
        softmax_mask=Activation(scores, "none", "tp"),
        attention=Activation(2 * h, "selective", "tp"),
        attention_mask=Activation(h, "selective", "sp", 2 * h * h),
        residual=Activation(2 * h, "selective", "sp"),
        ffn_norm=Activation(2 * h, "selective", "sp"),
        up=Activation(8 * h, "selective", "tp", 8 * h * h),
        gelu=Activation(8 * h, "selective", "tp"),
        ffn_mask=Activation(h, "selective", "sp"),
        output=Activation(0, "full", "sp", 8 * h * h))


class LayerOptions(NamedTuple):
    """How a layer is executed, as far as it changes what is saved.

    element: bytes per element of an activation. tp: ranks; above kv_heads, each kv head exists tp / kv_heads times.
    attention: "math" saves scores. sp_keep: gathered inputs of linear layers are saved. fp8: bytes per element in which
    FP8 linear layers save their inputs, scales included; 0: not FP8. aux, router_z: whether the router has these
    losses. dispatched: whether tokens are sent to experts on other ranks.
    """
    element: int = 2
    tp: int = 1
    attention: str = "auto"
    sp_keep: bool = False
    fp8: float = 0.0
    aux: bool = True
    router_z: bool = False
    dispatched: bool = False


BF16 = LayerOptions()


def llama_layer(model: Model, seq: int, options: LayerOptions = BF16, layer: int = -1) -> Layer:
    """A block of model.py; by default the last."""
    layer %= model.layers
    ffn = experts_half(model, options) if model.has_experts(layer) else ffn_half(model, options)
    return attention_half(model, layer, seq, options) | ffn


def attention_half(model: Model, layer: int, seq: int, options: LayerOptions) -> Layer:
    e, acc = options.element, acc_bytes(options.element)
    kv_heads = max(model.kv_heads, options.tp)
    H, q, kv = model.hidden, model.heads * model.head_dim, kv_heads * model.head_dim
    qkv = (q + 2 * kv) * e  # the matmul's result, in which queries and keys are rotated in place
    if model.qk_norm:
        qkv += (q + kv) * e + (model.heads + kv_heads) * acc  # normalised copies, and the norms' statistics
    scores_flops = 4 * q * 2 * visible_keys(model, layer, seq)  # q k^T and its product with v, masked half included
    math = options.attention == "math"
    activations = dict(
        input=Activation(H * e, "full", "sp"),
        attention_norm=Activation(H * (options.fp8 or e), "none", "" if options.sp_keep else "sp"),
        attention_norm_statistic=Activation(acc, "none", "sp"),
        qkv=Activation(qkv, "selective", "tp", 2 * H * (q + 2 * kv)),
        attention=Activation(q * e, "selective", "tp", 0 if math else scores_flops),
        residual=Activation(H * e, "selective", "sp", 2 * q * H))
    if options.fp8:
        activations["attention_fp8"] = Activation(q * options.fp8, "selective", "tp")
    if not math:
        return activations | dict(logsumexp=Activation(model.heads * acc, "selective", "tp"))
    scores = model.heads * seq * (acc if e == acc else acc + e)  # the softmax, and its result rounded
    copies = (2 * acc + e) * q - (q + (kv if model.qk_norm else 2 * kv)) * e  # of q, k, v, in place of qkv
    return activations | dict(scores=Activation(scores, "none", "tp", scores_flops),
                              attention_copies=Activation(copies, "none", "tp"))


def ffn_half(model: Model, options: LayerOptions) -> Layer:
    H, F = model.hidden, model.ffn
    e, acc = options.element, acc_bytes(options.element)
    return dict(
        ffn_norm=Activation(H * (options.fp8 or e), "none", "" if options.sp_keep else "sp"),
        ffn_norm_statistic=Activation(acc, "none", "sp"),
        gate_up=Activation(2 * F * e, "selective", "tp", 4 * H * F),
        swiglu=Activation(F * (options.fp8 or e), "none", "tp"),
        output=Activation(0, "full", "sp", 2 * F * H))


def experts_half(model: Model, options: LayerOptions) -> Layer:
    """The feed-forward half of a block with experts (ep.py) which all get equally many tokens.

    Under selective recomputation, too, the tokens dispatched to experts are saved, since making them again would
    communicate again. The routing is saved under full recomputation as well, see ep.py.
    """
    H, F, E, k = model.hidden, model.expert_ffn, model.experts, model.top_k
    e, acc = options.element, acc_bytes(options.element)
    linear_input = options.fp8 or e
    router_scores = 1 + options.aux + options.router_z  # times E: scores, the auxiliary loss's coefficients, logits
    gates = k + model.router_norm * (k + 1) + options.aux * (model.router == "sigmoid") + 2 * options.router_z
    activations = dict(
        ffn_norm=Activation(H * e, "none", "sp"),
        ffn_norm_statistic=Activation(acc, "none", "sp"),
        router_scores=Activation(router_scores * E * acc, "selective", "tp", 2 * H * E),
        gates=Activation(gates * acc, "selective", "tp"),
        route=Activation((40 if options.dispatched else 24) * k, "full", "tp"),
        tokens_dispatched=Activation(k * H * linear_input, "selective", "tp"),
        experts_gate_up=Activation(2 * k * F * e, "selective", "tp", 4 * H * k * F),
        experts_swiglu=Activation(k * F * linear_input, "selective" if options.fp8 else "none", "tp"),
        experts_output=Activation(k * H * e, "selective", "tp", 2 * k * F * H))  # for the gates' gradient
    shared = model.shared_experts * F
    if shared:
        activations |= dict(shared_gate_up=Activation(2 * shared * e, "selective", "tp", 4 * H * shared),
                            shared_swiglu=Activation(shared * linear_input, "none", "tp"))
        if options.fp8:
            activations["ffn_norm_fp8"] = Activation(H * options.fp8, "none", "sp")
        if options.sp_keep:
            activations["ffn_norm_gathered"] = Activation(H * e, "none", "")
    return activations | dict(output=Activation(0, "full", "sp", 2 * shared * H))


def latent_attention_half(hidden: int, heads: int, seq: int, element: int, q_rank: int, kv_rank: int, width: int,
                          rotated: int) -> Layer:
    """Attention of DeepSeek-V3 (MLA) with fused scores: queries, keys and values made from two low-rank vectors.

    width: channels per head without position. rotated: channels per head that are rotated by position; their keys are
    shared by all heads.
    """
    H, e, acc = hidden, element, acc_bytes(element)
    qk = heads * (width + rotated)
    narrow = q_rank + kv_rank + rotated
    return dict(
        input=Activation(H * e, "full", "sp"),
        attention_norm=Activation(H * e, "none", "sp"),
        attention_norm_statistic=Activation(acc, "none", "sp"),
        narrow=Activation(narrow * e, "selective", "sp", 2 * H * narrow),
        narrow_norms=Activation((q_rank + kv_rank) * e + 2 * acc, "none", "sp"),
        qkv=Activation((2 * qk + heads * width) * e, "selective", "tp", 2 * q_rank * qk + 4 * kv_rank * heads * width),
        attention=Activation(heads * width * e, "selective", "tp", 2 * seq * heads * (2 * width + rotated)),
        logsumexp=Activation(heads * acc, "selective", "tp"),
        residual=Activation(H * e, "selective", "sp", 2 * heads * width * H))


class AttentionCost(NamedTuple):
    flops: float  # of all matmuls, forward and backward
    nbytes: float  # read and written


def attention_cost(algorithm: str, B: int, N: int, S: int, D: int, itemsize: int = 2,
                   on_chip: int = 192 * 1024) -> AttentionCost:
    """Attention without a causal mask, forward and backward. algorithm: one of

    "standard": scores in memory, with mask and dropout. Passes over them (one for a read or a write) in forward: 1
    writes s, 2 add the mask, 2 softmax, 2.5 dropout (its mask is a byte), 1 for p v; in backward 1 dv, 1 dp, 2.5
    dropout, 3 softmax, 2 dq and dk.
    "flash 1": algorithms 1 and 4 of Dao et al. 2022, with on_chip bytes of memory beside each SM, an A100's by default.
    The outer loop has one turn for each on_chip / 4D keys and values.
    "here": flash.py, where the L2 cache serves what a kernel reads twice.
    """
    matmul, tensor, rows = 2 * B * N * S * S * D, B * N * S * D * itemsize, B * N * S * 4
    if algorithm == "standard":
        passes = (1 + 2 + 2 + 2.5 + 1) + (1 + 1 + 2.5 + 3 + 2)
        return AttentionCost(6 * matmul, passes * B * N * S * S * itemsize + (4 + 8) * tensor)
    if algorithm == "flash 1":
        turns = -(-S // (on_chip // itemsize // (4 * D)))
        forward = (2 + 1 + 3 * turns) * tensor + (2 + 4 * turns) * rows  # k v; o = 0; q o, o; m l = 0; m l, m l
        backward = (2 + 2 + 1 + 5 * turns) * tensor + 2 * turns * rows  # k v; dk dv; dq = 0; q o do dq, dq; m l
        return AttentionCost(7 * matmul, forward + backward)
    forward, backward = 4 * tensor, (6 + 6) * tensor  # q k v, o; q k v o do, dq; q k v do, dk dv
    return AttentionCost(9 * matmul, forward + backward + 5 * rows)


def published_flops(algorithm: str, B: int, N: int, S: int, D: int) -> float:
    """FLOPs as figure 2 of Dao et al. 2022 seems to count them.

    The paper prints 66.6 "GFLOPs" and 40.3 GB for standard attention, 75.2 and 4.4 for FlashAttention (GPT-2 medium: B
    64, N 16, S 1024, D 64), where 6 and 7 matmuls are 825 and 962 GFLOP. Its text does not say what is counted. But if
    matmuls count 1/16, as an A100's tensor cores are 16 times as fast as its other units, and each score has 14 other
    operations (1 mask, 5 softmax, 2 dropout; backward 2 and 4), both figures are as printed.
    """
    return attention_cost(algorithm, B, N, S, D).flops / 16 + 14 * B * N * S * S


# ---- memory of a rank -----------------------------------------------------------------------------------------------

def activation_bytes(settings: Config, element: int, stages: Collection[Iterable[int]] | None = None,
                     in_flight: int = 1, has_head: bool = True) -> int:
    """Bytes that forwards save on a rank for their backwards, if all experts get equally many tokens.

    element: bytes per element of an activation. stages: the layers of each pipeline stage on this rank; None: all
    layers, in one stage. in_flight: micro-batches whose activations the rank has at once. has_head: whether it has the
    last stage. Left out: masks of documents and windows, and what exists once per sequence.
    """
    model, grid, batch, precision, optim = (settings.model, settings.grid, settings.batch, settings.precision,
                                            settings.optim)
    tp, sp, acc, recompute = grid.tp, grid.sp, acc_bytes(element), precision.recompute
    seq = padded_length(batch.seq, grid.cp, tp if sp else 1)
    local_seq = seq // grid.cp
    by_heads = grid.cp > 1 and grid.style().whole_sequences  # Ulysses
    by_blocks = grid.cp > 1 and not by_heads  # attention by blocks saves no scores
    options = LayerOptions(element, tp, "auto" if by_blocks else precision.attention, grid.sp_keep,
                           aux=optim.aux_loss > 0, router_z=optim.router_z_loss > 0, dispatched=grid.ep > 1)
    fp8_bytes = {"none": 0.0, "tensorwise": 1.0, "blockwise": 1 + 4 / 128}[precision.fp8]  # a scale per 128 elements

    def block(number: int) -> float:
        fp8 = fp8_bytes if number in settings.fp8_layers() else 0.0
        layer = llama_layer(model, seq, options._replace(fp8=fp8), number)
        if by_heads:  # the output before it is exchanged, and kv heads repeated until cp divides them
            kv_heads = max(model.kv_heads // tp, 1)  # of a rank
            repeated = 2 * tp * kv_heads * (grid.cp // gcd(grid.cp, kv_heads) - 1)
            layer["attention_by_heads"] = Activation((model.heads + repeated) * model.head_dim * element, "selective",
                                                     "tp")
        return saved_bytes(layer, recompute, tp, sp or recompute == "full")  # checkpoints are sharded without sp, too

    stages = stages or [range(model.layers)]
    per_token = in_flight * max(sum(map(block, layers)) for layers in stages)
    if has_head:
        norm = model.hidden * element if recompute == "selective" else 2 * model.hidden * element + acc
        logits = -(-model.vocab // tp) * element + 3 * acc
        indices = 2 * 9  # of the token in the table and of its label in the vocabulary, each with a mask
        per_token += norm / (tp if sp else 1) + logits + indices
        if grid.sp_keep and recompute != "selective":
            per_token += model.hidden * element * (1 - 1 / tp)
    if recompute == "full" and tp > 1 and not sp:
        per_token += model.hidden * element  # one checkpoint, gathered
    if model.experts and recompute == "full":
        per_token += in_flight * 8 / tp  # the sequence that a token belongs to, for recomputing a block
    mask = seq * seq if precision.attention == "math" and not by_blocks else 0
    return round(batch.micro_batch * local_seq * per_token + local_seq * model.head_dim * acc + mask)


def memory_bytes(settings: Config, element: int, moments: int, buckets: dict[str, list[int]], fp8_weights: int,
                 activations: int) -> dict[str, int]:
    """Bytes of a rank by kind. buckets: elements of each, by data axis. moments: bytes per element of all moments.
    fp8_weights: elements of this rank's matrices that multiply in FP8."""
    grid = settings.grid
    shards = grid.dp // grid.dp_replicate * grid.cp
    memory = dict.fromkeys(("weights", "gradients", "optimizer"), 0)
    for axis, n in ("dp", shards), ("edp", shards * grid.tp // grid.ep):
        if buckets.get(axis):
            state = state_bytes(buckets[axis], grid.zero, n, weight=element, accumulated=acc_bytes(element),
                                moments=moments)
            memory = {kind: count + state[kind] for kind, count in memory.items()}
    if fp8_weights and grid.zero < 3:
        memory["FP8 weights"] = 2 * fp8_weights
    return memory | dict(activations=activations)


# ---- utilisation ----------------------------------------------------------------------------------------------------

# Peak dense TFLOP/s in bf16 and fp16, by words of the name that the driver gives; the first fits. From data sheets.
PEAK_TFLOPS = {"H100 PCIe": 756, "H100 NVL": 835, "H200 NVL": 835, "H100": 989, "H200": 989, "GH200": 989, "B200": 2250,
               "GB200": 2500, "B300": 2250, "GB300": 2500, "A100": 312, "L40S": 362, "MI300X": 1307, "MI325X": 1307}


def peak_flops(device_name: str) -> float | None:
    """FLOP/s of a GPU in 16 bits; None for one that is not in the table, since a utilisation needs a known peak."""
    words = set(re.split("[ -]", device_name))
    return next((peak * 1e12 for key, peak in PEAK_TFLOPS.items() if set(key.split()) <= words), None)


def flops_by_convention(settings: Config) -> dict[str, float]:
    """FLOPs per token, forward and backward, as each kind of utilisation counts them: mfu with all scores, mfu_causal
    with the visible ones only, hfu as mfu, plus what is recomputed."""
    model, precision, seq = settings.model, settings.precision, settings.batch.seq
    options = LayerOptions(attention=precision.attention)
    recomputed = sum(recomputed_flops(llama_layer(model, seq, options, layer), precision.recompute)
                     for layer in range(model.layers))
    flops = flops_per_token(model, seq)
    return dict(mfu=flops, mfu_causal=flops_per_token(model, seq, causal=True), hfu=flops + recomputed)
