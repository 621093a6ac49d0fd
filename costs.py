"""What a run costs, by formula: parameters, FLOPs, bytes of model state and of saved activations.

Nothing here is measured and nothing needs torch: a formula is read from the settings, so it answers before anything
runs. meter.py counts the same things in a real step, and the tests demand that both agree: parameters to the integer,
state and activations to the byte, FLOPs to 1% (norms and softmax are left out here).

Parameters and FLOPs. A token meets N weights; each takes part in one multiplication and one addition in forward and in
two of each in backward: 6 N FLOPs. Scores and their product with values add 12 L h S, h being heads x head width, or 6
L h S if only the visible half of the scores counts (causal). Experts that a token is not sent to do not count in N.

Model state of P parameters at ZeRO level 0: weights w P, gradients a P, master weights a P (none if w = a) and AdamW's
moments m P, with w = 2, a = 4, m = 8 in bf16: 18 bytes a parameter. See zero.py for what each level divides.

Activations. A layer is a table of what its forward makes: bytes a token, the strongest recomputation under which it is
still saved, what shards it, and the FLOPs that make it. What a rank saves and what recomputation costs follow from it.

Shapes: H hidden, F ffn, N heads x head width, K kv heads x head width, E experts of which k are chosen, S sequence.
"""
from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from config import Config, Model, padded_length

RECOMPUTE = ("none", "selective", "full")  # from weakest to strongest


def acc_bytes(element: int) -> int:
    """Bytes of an element in the accumulation dtype of a run whose elements take `element` bytes."""
    return max(element, 4)


# ---- parameters and FLOPs -------------------------------------------------------------------------------------------

class Parameters(NamedTuple):
    """How many parameters a model has, by component. experts: of all of them; active: those that a token is sent to."""
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
        """The parameters that a token meets."""
        return self.total - self.experts + self.active_experts


def parameters(model: Model) -> Parameters:
    H, N, K, L = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim, model.layers
    moe = L - model.dense_layers if model.experts else 0  # layers with experts
    expert = 3 * H * model.expert_ffn
    return Parameters(
        embedding=model.vocab * H,
        attention=L * (2 * H * N + 2 * H * K + model.qkv_bias * (N + 2 * K)),
        ffn=(L - moe) * 3 * H * model.ffn + moe * model.shared_experts * expert,
        experts=moe * model.experts * expert,
        active_experts=moe * model.top_k * expert,
        router=moe * model.experts * H,
        norms=(2 * L + 1) * H + model.qk_norm * 2 * L * model.head_dim,
        head=0 if model.tied else model.vocab * H)


def flops_per_token(model: Model, seq: int, causal: bool = False) -> float:
    """Floating-point operations of one token, forward and backward: 6 N + 12 L h S.

    N is the active weights without the input embedding, which multiplies nothing. causal=True counts only the scores
    that are visible, half of them: 6 N + 6 L h S (Chowdhery et al. 2022, appendix B, has the first form). Of a layer
    with a window of W, W - W^2 / 2S keys are visible to a token in the mean, in place of S / 2.
    """
    count = parameters(model)
    n = count.active - (0 if model.tied else count.embedding)
    visible = 0.0  # keys that a token sees, summed over layers
    for layer in range(model.layers):
        window = min(model.window_of(layer) or seq, seq)
        visible += window - window * window / (2 * seq)
    return 6 * n + (1 if causal else 2) * 12 * model.heads * model.head_dim * visible


# ---- model state ----------------------------------------------------------------------------------------------------

def state_bytes(buckets: list[int], level: int, n: int, *, weight: int, accumulated: int,
                moments: int) -> dict[str, int]:
    """The most that a rank holds at once of weights, gradients and optimizer state, in bytes.

    buckets: elements of each. n: ranks that shard them at this ZeRO level. weight, accumulated, moments: bytes an
    element of weights, of main gradients and master weights, and of all that the update rule remembers. At level 3 two
    neighbours' weights are unsharded at once, at levels 2 and 3 two neighbours' gradients are whole; their largest
    possible sum is taken. Left out, at levels 2 and 3: a tied table's gradient besides those two, and one shard that is
    being received; with bf16 moments, one bucket's in fp32 during its update.
    """
    level = level if n > 1 else 0
    padded = [-(-count // n) * n for count in buckets] if level else buckets
    whole, shard, two = sum(padded), sum(padded) // n, sum(sorted(padded if len(padded) > 1 else 2 * padded)[-2:])
    master = 0 if weight == accumulated else accumulated
    return dict(weights=(shard + two if level == 3 else whole) * weight,
                gradients=(shard + two if level >= 2 else whole) * accumulated,
                optimizer=(shard if level else whole) * (master + moments))


# ---- what a layer makes ---------------------------------------------------------------------------------------------

class Made(NamedTuple):
    """Something that a layer's forward makes, a token.

    nbytes: if one rank had all of it. saved_under: the strongest of RECOMPUTE under which it is still saved.
    sharded_by: "tp", if tensor parallelism shards it; "sp", if sequence parallelism alone does; "". flops: to make it.
    """
    nbytes: float
    saved_under: str
    sharded_by: str
    flops: float = 0


Layer = dict[str, Made]


def saved_bytes(layer: Layer, recompute: str, tp: int = 1, sp: bool = True) -> float:
    """Bytes a token that a layer saves on each of tp ranks, with or without sequence parallelism."""
    def ranks(made: Made) -> int:
        return tp if made.sharded_by == "tp" or (made.sharded_by == "sp" and sp) else 1

    return sum(made.nbytes / ranks(made) for made in layer.values()
               if RECOMPUTE.index(made.saved_under) >= RECOMPUTE.index(recompute))


def forward_flops(layer: Layer) -> float:
    return sum(made.flops for made in layer.values())


def recomputed_flops(layer: Layer, recompute: str) -> float:
    """FLOPs a token that are done twice: of all that is not saved. The last matmul makes the next layer's input."""
    return sum(made.flops for made in layer.values()
               if RECOMPUTE.index(made.saved_under) < RECOMPUTE.index(recompute))


def gpt_layer(hidden: int, heads: int, seq: int) -> Layer:
    """The layer of Korthikanti et al. 2022, section 4: 16 bits, GELU, dropout, scores saved: s b h (34 + 5 a s / h).

    FLOPs of attention are those of all scores, visible or not, as the paper and torch count them.
    """
    h, scores = hidden, heads * seq
    return dict(
        input=Made(2 * h, "full", "sp"),
        attention_norm=Made(2 * h, "selective", "sp"),
        qkv=Made(6 * h, "selective", "tp", 6 * h * h),
        softmax=Made(2 * scores, "none", "tp", 4 * h * seq),  # q k^T; and softmax v, which runs twice with it
        softmax_dropped=Made(2 * scores, "none", "tp"),
        softmax_mask=Made(scores, "none", "tp"),
        attention=Made(2 * h, "selective", "tp"),
        attention_mask=Made(h, "selective", "sp", 2 * h * h),
        residual=Made(2 * h, "selective", "sp"),
        ffn_norm=Made(2 * h, "selective", "sp"),
        up=Made(8 * h, "selective", "tp", 8 * h * h),
        gelu=Made(8 * h, "selective", "tp"),
        ffn_mask=Made(h, "selective", "sp"),
        output=Made(0, "full", "sp", 8 * h * h))


class LayerOptions(NamedTuple):
    """How a layer is computed, as far as it changes what is saved.

    element: bytes of an activation. tp: ranks; above kv_heads, keys and values exist tp / kv_heads times. attention:
    "math" saves scores. sp_keep: gathered inputs of linear layers are saved. fp8: bytes of an element, with its share
    of a scale, in which linear layers save inputs; 0: as they are. aux, router_z: whether the router has these losses.
    dispatched: whether tokens are sent to experts on other ranks.
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


def llama_layer(model: Model, seq: int, how: LayerOptions = BF16, number: int = -1) -> Layer:
    """Block `number` of model.py."""
    has_experts = model.experts and number % model.layers >= model.dense_layers
    return attention_half(model, seq, how) | (experts_half(model, how) if has_experts else ffn_half(model, how))


def attention_half(model: Model, seq: int, how: LayerOptions) -> Layer:
    e, acc, kv_heads = how.element, acc_bytes(how.element), max(model.kv_heads, how.tp)
    H, N, K = model.hidden, model.heads * model.head_dim, kv_heads * model.head_dim
    qkv = (N + 2 * K) * e  # the matmul's result, in which queries and keys are rotated in place
    if model.qk_norm:
        qkv += (N + K) * e + (model.heads + kv_heads) * acc  # normalised copies, and the norms' statistics
    core, math = 4 * N * seq, how.attention == "math"
    made = dict(
        input=Made(H * e, "full", "sp"),
        attention_norm=Made(H * (how.fp8 or e), "none", "" if how.sp_keep else "sp"),
        attention_norm_statistic=Made(acc, "none", "sp"),
        qkv=Made(qkv, "selective", "tp", 2 * H * (N + 2 * K)),
        attention=Made(N * e, "selective", "tp", 0 if math else core),
        residual=Made(H * e, "selective", "sp", 2 * N * H))
    if how.fp8:
        made["attention_fp8"] = Made(N * how.fp8, "selective", "tp")
    if math:
        scores = model.heads * seq * (acc if e == acc else acc + e)  # the softmax, and its result rounded
        copies = (2 * acc + e) * N - (N + (K if model.qk_norm else 2 * K)) * e  # of q, k, v, which are not saved, then
        return made | dict(scores=Made(scores, "none", "tp", core), attention_copies=Made(copies, "none", "tp"))
    return made | dict(logsumexp=Made(model.heads * acc, "selective", "tp"))


def ffn_half(model: Model, how: LayerOptions) -> Layer:
    H, F, e, acc = model.hidden, model.ffn, how.element, acc_bytes(how.element)
    return dict(
        ffn_norm=Made(H * (how.fp8 or e), "none", "" if how.sp_keep else "sp"),
        ffn_norm_statistic=Made(acc, "none", "sp"),
        gate_up=Made(2 * F * e, "selective", "tp", 4 * H * F),
        swiglu=Made(F * (how.fp8 or e), "none", "tp"),
        output=Made(0, "full", "sp", 2 * F * H))


def experts_half(model: Model, how: LayerOptions) -> Layer:
    """The feed-forward half of a block with experts (ep.py), which all get equally many tokens.

    Tokens that were dispatched to an expert are saved in every mode but full, since to have them again is to send them
    again; what routing chose is always saved, see ep.py.
    """
    H, F, E, k, e, acc = (model.hidden, model.expert_ffn, model.experts, model.top_k, how.element,
                          acc_bytes(how.element))
    linear_input = how.fp8 or e
    router_scores = 1 + how.aux + how.router_z  # times E: scores, coefficients of the auxiliary loss, logits
    router_weights = (k + model.router_norm * (k + 1) + how.aux * (model.router == "sigmoid") + 2 * how.router_z)
    made = dict(
        ffn_norm=Made(H * e, "none", "sp"),
        ffn_norm_statistic=Made(acc, "none", "sp"),
        router_scores=Made(router_scores * E * acc, "selective", "tp", 2 * H * E),
        router_weights=Made(router_weights * acc, "selective", "tp"),
        route=Made((40 if how.dispatched else 24) * k, "full", "tp"),
        tokens_dispatched=Made(k * H * linear_input, "selective", "tp"),
        experts_gate_up=Made(2 * k * F * e, "selective", "tp", 4 * H * k * F),
        experts_swiglu=Made(k * F * linear_input, "selective" if how.fp8 else "none", "tp"),
        experts_output=Made(k * H * e, "selective", "tp", 2 * k * F * H))  # for the gradient of the router's weights
    if model.shared_experts:
        F = model.shared_experts * F
        made |= dict(shared_gate_up=Made(2 * F * e, "selective", "tp", 4 * H * F),
                     shared_swiglu=Made(F * linear_input, "none", "tp"))
        if how.fp8:
            made["ffn_norm_fp8"] = Made(H * how.fp8, "none", "sp")
        if how.sp_keep:
            made["ffn_norm_gathered"] = Made(H * e, "none", "")
    return made | dict(output=Made(0, "full", "sp", 2 * model.shared_experts * model.expert_ffn * H))


def latent_attention_half(hidden: int, heads: int, seq: int, element: int, q_rank: int, kv_rank: int, width: int,
                          rotated: int) -> Layer:
    """Attention of DeepSeek-V3 (MLA) with fused scores: queries, keys and values made from two narrow vectors.

    width: of a head, besides `rotated` channels of it that carry rotary angles, one set of keys for all heads.
    """
    H, e, acc, qk = hidden, element, acc_bytes(element), heads * (width + rotated)
    narrow = q_rank + kv_rank + rotated
    return dict(
        input=Made(H * e, "full", "sp"),
        attention_norm=Made(H * e, "none", "sp"),
        attention_norm_statistic=Made(acc, "none", "sp"),
        narrow=Made(narrow * e, "selective", "sp", 2 * H * narrow),
        narrow_norms=Made((q_rank + kv_rank) * e + 2 * acc, "none", "sp"),
        qkv=Made((2 * qk + heads * width) * e, "selective", "tp", 2 * q_rank * qk + 4 * kv_rank * heads * width),
        attention=Made(heads * width * e, "selective", "tp", 2 * seq * heads * (2 * width + rotated)),
        logsumexp=Made(heads * acc, "selective", "tp"),
        residual=Made(H * e, "selective", "sp", 2 * heads * width * H))


class AttentionCost(NamedTuple):
    flops: float  # of all matmuls, forward and backward
    nbytes: float  # read and written


def attention_cost(how: str, B: int, N: int, S: int, D: int, itemsize: int = 2, on_chip: int = 192 * 1024
                   ) -> AttentionCost:
    """Attention without a causal mask, forward and backward. how: one of

    "standard": scores in memory, with mask and dropout. Passes over them (one for a read or a write) in forward: 1
    writes s, 2 add the mask, 2 softmax, 2.5 dropout (its mask is a byte), 1 for p v; in backward 1 dv, 1 dp, 2.5
    dropout, 3 softmax, 2 dq and dk.
    "flash 1": algorithms 1 and 4 of Dao et al. 2022, with on_chip bytes of memory beside each SM, an A100's by default.
    The outer loop has one turn for each on_chip / 4D keys and values.
    "here": flash.py, where the L2 cache serves what a kernel reads twice.
    """
    matmul, tensor, rows = 2 * B * N * S * S * D, B * N * S * D * itemsize, B * N * S * 4
    if how == "standard":
        passes = (1 + 2 + 2 + 2.5 + 1) + (1 + 1 + 2.5 + 3 + 2)
        return AttentionCost(6 * matmul, passes * B * N * S * S * itemsize + (4 + 8) * tensor)
    if how == "flash 1":
        turns = -(-S // (on_chip // itemsize // (4 * D)))
        forward = (2 + 1 + 3 * turns) * tensor + (2 + 4 * turns) * rows  # k v; o = 0; q o, o; m l = 0; m l, m l
        backward = (2 + 2 + 1 + 5 * turns) * tensor + 2 * turns * rows  # k v; dk dv; dq = 0; q o do dq, dq; m l
        return AttentionCost(7 * matmul, forward + backward)
    forward, backward = 4 * tensor, (6 + 6) * tensor  # q k v, o; q k v o do, dq; q k v do, dk dv
    return AttentionCost(9 * matmul, forward + backward + 5 * rows)


def published_flops(how: str, B: int, N: int, S: int, D: int) -> float:
    """FLOPs as figure 2 of Dao et al. 2022 seems to count them.

    The paper prints 66.6 "GFLOPs" and 40.3 GB for standard attention, 75.2 and 4.4 for FlashAttention (GPT-2 medium: B
    64, N 16, S 1024, D 64), where 6 and 7 matmuls are 825 and 962 GFLOP. Its text does not say what is counted. But if
    matmuls count 1/16, as an A100's tensor cores are 16 times as fast as its other units, and each score has 14 other
    operations (1 mask, 5 softmax, 2 dropout; backward 2 and 4), both figures are as printed.
    """
    return attention_cost(how, B, N, S, D).flops / 16 + 14 * B * N * S * S


# ---- what a rank holds ----------------------------------------------------------------------------------------------

def activation_bytes(settings: Config, element: int, stages: Collection[Iterable[int]] | None = None,
                     in_flight: int = 1, has_head: bool = True) -> int:
    """Bytes that forwards save on a rank for their backwards, experts being used equally.

    element: bytes of an activation. stages: the layers of each pipeline stage on this rank, None: all in one;
    in_flight: micro-batches that it has at once; has_head: whether the last stage is here. Left out: masks of
    documents and windows, and what a whole sequence has one of.
    """
    model, grid, batch, precision, optim = (settings.model, settings.grid, settings.batch, settings.precision,
                                            settings.optim)
    tp, sp, acc, recompute = grid.tp, grid.sp, acc_bytes(element), precision.recompute
    seq = padded_length(batch.seq, grid.cp, tp if sp else 1)
    local, in_blocks = seq // grid.cp, grid.cp > 1 and not grid.style().whole_sequences
    how = LayerOptions(element, tp, "auto" if in_blocks else precision.attention, grid.sp_keep, aux=optim.aux_loss > 0,
                    router_z=optim.router_z_loss > 0, dispatched=grid.ep > 1)  # attention in blocks saves no scores
    fp8 = {"none": 0.0, "tensorwise": 1.0, "blockwise": 1 + 4 / 128}[precision.fp8]  # with the scale of a block

    def block(number: int) -> float:
        layer = llama_layer(model, seq, how._replace(fp8=fp8 * (number in settings.fp8_layers())), number)
        if grid.cp > 1 and not in_blocks:
            layer["attention_by_heads"] = Made(model.heads * model.head_dim * element, "selective", "tp")
        return saved_bytes(layer, recompute, tp, sp or recompute == "full")  # checkpoints are sharded without sp, too

    stages = stages or [list(range(model.layers))]
    token = in_flight * max(sum(map(block, layers)) for layers in stages)
    if has_head:
        norm = model.hidden * element if recompute == "selective" else 2 * model.hidden * element + acc
        logits, indices = -(-model.vocab // tp) * element + 3 * acc, 2 * 9  # into the table and into the vocabulary
        token += norm / (tp if sp else 1) + logits + indices
        if grid.sp_keep and recompute != "selective":
            token += model.hidden * element * (1 - 1 / tp)
    if recompute == "full" and tp > 1 and not sp:
        token += model.hidden * element  # one checkpoint put together
    if model.experts and recompute == "full":
        token += in_flight * 8 / tp  # the sequence that a token belongs to, for the second run of a block
    mask = seq * seq if precision.attention == "math" and not in_blocks else 0
    return round(batch.micro_batch * local * token + local * model.head_dim * acc + mask)


def memory_bytes(settings: Config, element: int, moments: int, buckets: dict[str, list[int]], fp8_weights: int,
                 activations: int) -> dict[str, int]:
    """What a rank holds, by kind. buckets: elements of each, by data axis. moments: bytes an element of the update
    rule's state. fp8_weights: elements of the matrices here that multiply in FP8."""
    grid = settings.grid
    shards = grid.dp // grid.dp_replicate * grid.cp
    memory = dict.fromkeys(("weights", "gradients", "optimizer"), 0)
    for axis, n in ("dp", shards), ("edp", shards * grid.tp // grid.ep):
        if buckets.get(axis):
            held = state_bytes(buckets[axis], grid.zero, n, weight=element, accumulated=acc_bytes(element),
                               moments=moments)
            memory = {kind: count + held[kind] for kind, count in memory.items()}
    if fp8_weights and grid.zero < 3:
        memory["FP8 weights"] = 2 * fp8_weights
    return memory | dict(activations=activations)


# ---- utilisation ----------------------------------------------------------------------------------------------------

# Peak dense TFLOP/s in bf16 and fp16, by words of the name that the driver gives; the first fits. From data sheets.
PEAK_TFLOPS = {"H100 PCIe": 756, "H100 NVL": 835, "H200 NVL": 835, "H100": 989, "H200": 989, "GH200": 989, "B200": 2250,
               "GB200": 2500, "B300": 2250, "GB300": 2500, "A100": 312, "L40S": 362, "MI300X": 1307, "MI325X": 1307}


def peak_flops(device_name: str) -> float | None:
    """FLOP/s of a GPU in 16 bits; None for what is not in the table: a utilisation of a guess is no measurement."""
    words = set(re.split("[ -]", device_name))
    return next((peak * 1e12 for key, peak in PEAK_TFLOPS.items() if set(key.split()) <= words), None)


def flops_by_convention(settings: Config) -> dict[str, float]:
    """FLOPs of a token, forward and backward, by what a utilisation is called that is counted so: mfu with all scores,
    mfu_causal with the visible ones, hfu with what is recomputed, too."""
    model, precision, seq = settings.model, settings.precision, settings.batch.seq
    how = LayerOptions(attention=precision.attention)
    recomputed = sum(recomputed_flops(llama_layer(model, seq, how, number), precision.recompute)
                     for number in range(model.layers))
    flops = flops_per_token(model, seq)
    return dict(mfu=flops, mfu_causal=flops_per_token(model, seq, causal=True), hfu=flops + recomputed)
