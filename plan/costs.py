"""The costs of a run by formula: its parameters, its FLOPs, and the activations of its layers.

The formulas take settings and shapes. They need neither torch nor a run. The tests compare them with:
- published totals of parameters, exactly;
- the bytes of state and activations that run/meter.py counts in a real step, to the byte (with FP8 to 2%);
- the FLOPs that it counts, to 1%, because the formulas leave out norms and softmax.

Parameters and FLOPs. In forward a token multiplies and adds once with each of the P parameters that it passes
through, in backward twice. That makes 6 P FLOPs per token (papers write 6 N). Experts to which a token is
not sent do not count in P. Attention's scores, and their product with the values, add 12 L q S. If only the
visible half of the scores counts (causal), they add 6 L q S.

Activations. A layer is a table of the tensors that its forward makes. An entry has the bytes per token, the
strongest recomputation under which the tensor is still saved, the axis that shards it, and the FLOPs that make
it. The bytes that a rank saves and the FLOPs that it repeats follow from this table.

    H   hidden                            E   experts
    F   ffn                               k   experts per token
    q   heads x head width                S   tokens of a sequence
    kv  key and value heads x head width  W   window
    L   layers                            P   parameters
"""
from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from core.config import Config, Model

RECOMPUTE = ("none", "selective", "full")  # from weakest to strongest


def acc_bytes(element: int) -> int:
    """Bytes per element of main gradients and norm statistics, if a weight takes `element` bytes."""
    return max(element, 4)


def reduced_bytes(settings: Config, element: int) -> int:
    """Bytes per element of a gradient that is summed over the data axis, by --reduce-dtype."""
    return 2 if settings.precision.reduce_dtype == "bf16" else acc_bytes(element)


# ---- parameters and FLOPs -------------------------------------------------------------------------------------------

class Parameters(NamedTuple):
    """The number of parameters of a model by component.

    experts: all experts' parameters
    active_experts: the parameters of the top k experts of one token
    """
    embedding: int
    attention: int
    ffn: int
    experts: int
    active_experts: int
    router: int
    norms: int
    head: int  # 0 if it is tied to the embedding
    projection: int  # the matrix of multi-token prediction; its block counts as a layer

    @property
    def total(self) -> int:
        return sum(self) - self.active_experts

    @property
    def active(self) -> int:
        """The parameters that a token passes through."""
        return self.total - self.experts + self.active_experts


def parameters(model: Model) -> Parameters:
    H, L = model.hidden, model.blocks
    moe = sum(map(model.has_experts, range(L)))  # layers with experts
    expert = 3 * H * model.expert_ffn
    return Parameters(
        embedding=model.vocab * H,
        attention=L * attention_elements(model),
        ffn=(L - moe) * ffn_elements(model) + moe * model.shared_experts * expert,
        experts=moe * model.experts * expert,
        active_experts=moe * model.top_k * expert,
        router=moe * model.experts * H,
        norms=(2 * L + 1 + 3 * model.mtp) * H + L * norm_elements(model),
        head=0 if model.tied else model.vocab * H,
        projection=model.mtp * 2 * H * H)


def attention_elements(model: Model, t: int = 1) -> int:
    """Elements of attention's matrices and biases in a layer, on one of t tensor parallel ranks."""
    H, D, N = model.hidden, model.head_dim, model.heads // t
    if model.kv_lora_rank:
        up = model.kv_lora_rank * (D - model.rope_head_dim + model.value_dim)
        return latent_elements(model) + N * ((model.q_lora_rank or H) * D + up + model.value_dim * H)
    q, kv = N * D, max(model.kv_heads // t, 1) * D
    return 2 * H * q + 2 * H * kv + model.qkv_bias * (q + 2 * kv) + model.out_bias * H


def ffn_elements(model: Model, t: int = 1) -> int:
    """Elements of the matrices and biases of a dense feed-forward, on one of t tensor parallel ranks."""
    H, F = model.hidden, model.ffn // t
    return 3 * H * F + model.ffn_bias * (2 * F + H)


def latent_elements(model: Model) -> int:
    """Elements, on every rank, of the matrices of a layer that make latents; which FP8 leaves in 16 bits."""
    return model.hidden * (model.kv_lora_rank + model.rope_head_dim + model.q_lora_rank)


def norm_elements(model: Model) -> int:
    """Elements of the norms inside a layer's attention."""
    return model.qk_norm * 2 * model.head_dim + model.kv_lora_rank + model.q_lora_rank


def lecture_parameters(model: Model) -> dict[str, int]:
    """Parameters of GPT-2's architecture by component, h V + L (12 h^2 + 13 h) + 2 h (Narayanan et al. 2021).

    The embedding is tied. A layer has four h x h matrices and a feed-forward of width 4 h. Matrices and norms have
    biases. Learned positions are left out."""
    h, L = model.hidden, model.layers
    return dict(vocabulary=model.vocab * h, attention=4 * L * h * h, ffn=8 * L * h * h,
                norms_and_biases=L * (4 + 5 + 4) * h + 2 * h)


def visible_keys(model: Model, layer: int, seq: int) -> float:
    """The keys that a token of a layer sees, averaged over a sequence: S/2, or W - W^2 / 2S with a window of W."""
    window = min(model.window_of(layer) or seq, seq)
    return window - window * window / (2 * seq)


def flops_per_token(model: Model, seq: int, causal: bool = False) -> float:
    """Floating-point operations per token, forward and backward: 6 P + 12 L q S (Chowdhery et al. 2022, appendix B).

    P is the number of active parameters without the input embedding, which is not multiplied.

    causal: count only the visible scores, which are half of them: 6 P + 6 L q S

    In a layer with a window, S is twice the number of visible keys. If values are narrower than keys, q is the mean of
    both widths. With multi-token prediction the head multiplies twice.
    """
    count = parameters(model)
    multiplied = count.active - (0 if model.tied else count.embedding) + model.mtp * model.vocab * model.hidden
    visible = sum(visible_keys(model, layer, seq) for layer in range(model.blocks))
    return 6 * multiplied + (1 if causal else 2) * 6 * model.heads * (model.head_dim + model.value_dim) * visible


# ---- layers of a stage, elements of its buckets ---------------------------------------------------------------------

def partition(work: Sequence[float], stages: int, last: float = 0.0, least: int = 1) -> list[range]:
    """The layers of each stage, chosen so that the largest work of a stage is as small as possible.

    If several partitions are equally good, this returns the one with the fewest layers in early stages, because
    early stages hold the activations of more micro-batches.

    work: the work of each layer
    last: the work of the head, which belongs to the last stage
    least: the smallest number of layers of a stage, 1 or 0

    Raises ValueError if there are too few layers.
    """
    if stages * least > len(work):
        raise ValueError(f"{len(work)} layers cannot be split into {stages} stages: use 1 to {len(work)}")
    sums = [0.0, *accumulate(work)]

    def fill(limit: float) -> list[int] | None:
        """The first layer of each stage, if late stages take as many layers as the limit allows and at least `least`.
        None if a stage exceeds the limit."""
        starts, stop = [], len(work)
        for stage in reversed(range(stages)):
            room = limit + 1e-9 - last * (stage == stages - 1)
            start = max(stage * least, min(stop - least, bisect_left(sums, sums[stop] - room))) if stage else 0
            if stop - start > least and sums[stop] - sums[start] > room:
                return None
            starts.insert(0, start)
            stop = start
        return starts

    low, high = 0.0, sums[-1] + last  # the smallest possible limit lies between them
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if fill(middle) is None else (low, middle)
    starts = fill(high)
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(work)])]


def layer_kinds(settings: Config) -> tuple[tuple, ...]:
    """The kind of each block. Blocks of the same kind have the same costs."""
    model = settings.model
    first_expert = model.dense_layers if model.experts else model.blocks
    return kinds_of_layers(model.layers, model.blocks, first_expert, model.window, model.full_attention_every,
                           settings.fp8_layers())


@lru_cache(64)
def kinds_of_layers(layers: int, blocks: int, first_expert: int, window: int, full_attention_every: int,
                    fp8: range) -> tuple[tuple, ...]:
    return tuple((layer >= first_expert,
                  window > 0 and not (full_attention_every and (layer + 1) % full_attention_every == 0),
                  layer in fp8, layer == layers) for layer in range(blocks))


def by_kind(settings: Config, cost: Callable[[int], Any]) -> dict[tuple, Any]:
    """Kind -> cost(layer), called for one layer of each kind."""
    return {kind: cost(layer) for kind, layer in one_of_each(layer_kinds(settings)).items()}


@lru_cache(64)
def one_of_each(kinds: tuple[tuple, ...]) -> dict[tuple, int]:
    return {kind: layer for layer, kind in enumerate(kinds)}


def stages_of(settings: Config) -> list[range]:
    """The layers of each pipeline stage. Stages have about equal FLOPs; the last one includes the head."""
    grid, fields = settings.grid, tuple(vars(settings.model).values())
    return divide(fields, layer_kinds(settings), settings.batch.seq_len, grid.pp * grid.virtual_stages)


@lru_cache(1024)
def divide(fields: tuple, kinds: tuple[tuple, ...], seq: int, stages: int) -> list[range]:
    """The layers of each of `stages` stages. fields: the values of a Model (a cache needs hashable arguments)."""
    work, head = relative_work(Model(*fields), kinds, seq)
    return partition(work, stages, head)


def relative_work(model: Model, kinds: tuple[tuple, ...], seq: int, scores: bool = True) -> tuple[list[float], float]:
    """Forward FLOPs of each layer and of the head, relative to the largest layer.

    kinds: the kind of each layer
    scores: whether attention's scores count
    """
    tables = {kind: llama_layer(model, seq, layer=layer) for layer, kind in enumerate(kinds)}
    of_kind = {kind: forward_flops(table) - table["attention"].flops * (not scores) for kind, table in tables.items()}
    unit = max(of_kind.values())
    return [of_kind[kind] / unit for kind in kinds], (1 + model.mtp) * 2 * model.vocab * model.hidden / unit


def layer_elements(settings: Config, layer: int) -> dict[str, int]:
    """Parameters of a block on one rank by data axis, which is "dp", or "edp" for experts."""
    model, grid = settings.model, settings.grid
    H, t = model.hidden, grid.tp
    dense = 2 * H + attention_elements(model, t) + norm_elements(model)
    dense += (layer == model.layers) * (3 * H + 2 * H * H)  # of multi-token prediction
    if not model.has_experts(layer):
        return dict(dp=dense + ffn_elements(model, t))
    shared = model.shared_experts * model.expert_ffn
    return dict(dp=dense + model.experts * H + 3 * H * shared // t,
                edp=model.experts // grid.ep * 3 * H * model.expert_ffn)


def layer_matrices(model: Model, layer: int) -> dict[tuple[int, int], int]:
    """Shape -> number of matrices of that shape in a block, before any sharding. The router's matrix is included."""
    H, q, kv = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    found = Counter([(q, H), (kv, H), (kv, H), (H, q)])
    if model.kv_lora_rank:
        R, r, Q, v = model.kv_lora_rank, model.rope_head_dim, model.q_lora_rank, model.value_dim
        found = Counter([(R + r, H), (q, Q or H), (model.heads * (model.head_dim - r + v), R), (H, model.heads * v)])
        found[Q, H] += Q > 0
    feed_forwards = [(model.ffn, 1)]
    if model.has_experts(layer):
        feed_forwards = [(model.expert_ffn, model.experts), (model.shared_experts * model.expert_ffn, 1)]
        found[model.experts, H] += 1
    if layer == model.layers:
        found[H, 2 * H] += 1
    for ffn, count in feed_forwards:
        if ffn:
            found += Counter({(ffn, H): 2 * count}) + Counter({(H, ffn): count})
    return found


def muon_flops(model: Model, layer: int) -> int:
    """FLOPs of Muon's update of a block: 5 iterations, each with X X^T, its square, and their product with X."""
    return sum(count * 5 * (4 * min(shape)**2 * max(shape) + 2 * min(shape)**3)
               for shape, count in layer_matrices(model, layer).items())


def vector_elements(settings: Config, layer: int) -> int:
    """Elements of the norms and biases of a block on one rank."""
    model, t = settings.model, settings.grid.tp
    biases = model.qkv_bias * (model.heads // t + 2 * max(model.kv_heads // t, 1)) * model.head_dim
    biases += model.out_bias * model.hidden + model.ffn_bias * (2 * model.ffn // t + model.hidden)
    norms = 5 if layer == model.layers else 2  # the block of multi-token prediction has three more
    return norms * model.hidden + norm_elements(model) + biases


def bucket_elements(settings: Config, stages: Mapping[int, range], element: int) -> dict[str, list[int]]:
    """Elements of each bucket of a rank by data axis, as dp.assign_to_buckets makes them.

    stages: the rank's pipeline stages -> their layers
    element: bytes per element of a weight

    Among tensor parallel ranks, this is the one with the most rows of the vocabulary."""
    model, grid = settings.model, settings.grid
    capacity = 0 if grid.zero == 3 else grid.bucket_mb * 1e6 / acc_bytes(element)
    table, last_stage = -(-model.vocab // grid.tp) * model.hidden, grid.pp * grid.virtual_stages - 1
    tables = (0 in stages) + (last_stage in stages)
    buckets: dict[str, list[int]] = {"dp": [table] if (model.tied or model.mtp) and tables else []}
    muon = settings.optim.optimizer == "muon"  # matrices, vectors and tables are in buckets of their own

    def block(layer: int) -> dict[tuple[str, str], int]:
        counts = {(axis, ""): count for axis, count in layer_elements(settings, layer).items()}
        if muon:
            counts["dp", "vector"] = vector_elements(settings, layer)
            counts["dp", ""] -= counts["dp", "vector"]
        return counts

    kinds, elements = layer_kinds(settings), by_kind(settings, block)
    table_key, norm_key = (("dp", "table"), ("dp", "vector")) if muon else (("dp", ""), ("dp", ""))
    for stage, layers in stages.items():
        units = [elements[kinds[layer]] for layer in layers]
        if stage == 0 and not (model.tied or model.mtp):
            units.insert(0, {table_key: table})
        if stage == last_stage:
            units.append(Counter({norm_key: model.hidden}) + Counter({table_key: 0 if model.tied else table}))
        filling: dict[tuple[str, str], int] = {}
        for unit in units:
            for key, count in unit.items():
                filling[key] = filling.get(key, 0) + count
                if filling[key] >= capacity:
                    buckets.setdefault(key[0], []).append(filling.pop(key))
        for (axis, _), count in filling.items():
            buckets.setdefault(axis, []).append(count)
    return buckets


def matrix_elements(settings: Config, layers: Iterable[int]) -> dict[str, int]:
    """Elements of the blocks' matrices on one rank, by data axis."""
    found = Counter()
    for layer in layers:
        found.update(layer_elements(settings, layer))
        found["dp"] -= vector_elements(settings, layer)
    return found


def fp8_elements(settings: Config, layers: Iterable[int]) -> int:
    """Elements of the blocks' matrices that multiply in FP8, on one rank. The router and the matrices that make
    latents stay in 16 bits."""
    model, layers = settings.model, [layer for layer in layers if layer in settings.fp8_layers()]
    in_16_bits = sum(model.has_experts(layer) * model.experts * model.hidden + latent_elements(model)
                     for layer in layers)
    return sum(matrix_elements(settings, layers).values()) - in_16_bits


def fp8_operands(settings: Config, layer: int) -> tuple[float, float]:
    """Elements per token that a rank quantises in a block: (inputs of FP8 linear layers, gradients of their outputs).

    Tensors are gathered in 16 bits, and each rank quantises the gathered tensor."""
    model, t = settings.model, settings.grid.tp
    H = model.hidden
    q, kv = model.heads // t * model.head_dim, max(model.kv_heads // t, 1) * model.head_dim
    inputs, gradients = H + q, q + 2 * kv + H
    if model.kv_lora_rank:
        v = model.heads // t * model.value_dim
        up = settings.grid.cp * (q - model.heads // t * model.rope_head_dim + v)
        inputs = (model.q_lora_rank or H) + settings.grid.cp * model.kv_lora_rank + v
        gradients = q + up + H
    if model.has_experts(layer):
        routed, F = model.top_k / t, model.expert_ffn
        inputs, gradients = inputs + routed * (H + F), gradients + routed * (2 * F + H)
    F = model.shared_experts * model.expert_ffn if model.has_experts(layer) else model.ffn
    if F:
        inputs, gradients = inputs + H + F / t, gradients + 2 * F / t + H
    return inputs, gradients


def fp8_bytes(settings: Config, copies: int) -> int:
    """Bytes read and written to quantise an element of 16 bits (fp8.py).

    It is read once. With one scale per tensor it is read twice, first to find the largest value. `copies` copies are
    written: 1 (rowwise or columnwise) or 2 (both)."""
    recipe = settings.precision.fp8_recipe()
    return (2 if recipe.blocks else 4) + copies if recipe else 0


# ---- what a layer makes ---------------------------------------------------------------------------------------------

class Activation(NamedTuple):
    """A tensor that a layer's forward makes, per token.

    nbytes: bytes on all tensor parallel ranks together, including copies of key and value heads
    saved_under: the strongest of RECOMPUTE under which it is still saved
    sharded_by: "tp" (tensor parallelism), "sp" (only sequence parallelism) or "" (neither)
    flops: FLOPs that make it
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
    """FLOPs per token that backward repeats to make the activations that are not saved. The last matmul of a layer is
    never repeated, because the layer's backward does not read its result."""
    return sum(activation.flops for activation in layer.values()
               if RECOMPUTE.index(activation.saved_under) < RECOMPUTE.index(recompute))


class LayerOptions(NamedTuple):
    """The settings of a layer's execution that change which tensors it saves.

    element: bytes per element of an activation
    tp, cp: ranks; if tp exceeds kv_heads, each key and value head exists tp / kv_heads times
    attention: "math" saves the scores
    aux, router_z: whether the router has these losses
    copies: how many ranks each token is sent to on average (copies_per_token); 0 if all experts are on one rank
    """
    element: int = 2
    tp: int = 1
    attention: str = "auto"
    aux: bool = True
    router_z: bool = False
    copies: float = 0.0
    cp: int = 1


BF16 = LayerOptions()


def llama_layer(model: Model, seq: int, options: LayerOptions = BF16, layer: int = -1) -> Layer:
    """The table of a block of model.py, by default of the last layer."""
    layer = model.layers - 1 if layer == -1 else layer
    ffn = experts_half(model, options) if model.has_experts(layer) else ffn_half(model, options)
    rest = joining_half(model, options) if layer == model.layers else {}
    attention = latent_attention_half if model.kv_lora_rank else attention_half
    return attention(model, layer, seq, options) | ffn | rest


def joining_half(model: Model, options: LayerOptions) -> Layer:
    """The further tensors of a block of multi-token prediction.

    The embedding of the next token and the result of the last layer are normalised and concatenated. Their product
    with a matrix is the block's input. The model returns two results, one of them a copy. All of these tensors are
    saved under any recomputation."""
    H, e, acc = model.hidden, options.element, acc_bytes(options.element)
    return dict(joined=Activation(4 * H * e, "full", "sp", 4 * H * H),
                joined_norms_statistics=Activation(3 * acc, "full", "sp"),
                results=Activation(2 * H * e, "full", "sp"))


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
        attention_norm=Activation(H * e, "none", "sp"),
        attention_norm_statistic=Activation(acc, "selective", "sp"),
        qkv=Activation(qkv, "selective", "tp", 2 * H * (q + 2 * kv)),
        attention=Activation(q * e, "selective", "tp", 0 if math else scores_flops),
        residual=Activation(H * e, "selective", "sp", 2 * q * H))
    if not math:
        return activations | dict(logsumexp=Activation(model.heads * acc, "selective", "tp"))
    scores = model.heads * seq * (acc if e == acc else acc + e)  # the softmax, and its result rounded
    copies = (2 * acc + e) * q - (q + (kv if model.qk_norm else 2 * kv)) * e  # of q, k, v, in place of qkv
    return activations | dict(scores=Activation(scores, "none", "tp", scores_flops),
                              attention_copies=Activation(copies, "none", "tp"))


def latent_attention_half(model: Model, layer: int, seq: int, options: LayerOptions) -> Layer:
    """Attention of DeepSeek-V3. Each context parallel rank expands the keys and values of all tokens."""
    e, acc, c = options.element, acc_bytes(options.element), options.cp
    H, D, v, N = model.hidden, model.head_dim, model.value_dim, model.heads
    R, r, Q = model.kv_lora_rank, model.rope_head_dim, model.q_lora_rank
    math, scores_flops = options.attention == "math", 2 * N * (D + v) * 2 * visible_keys(model, layer, seq)
    activations = dict(
        input=Activation(H * e, "full", "sp"),
        attention_norm=Activation(H * e, "none", "sp"),
        attention_norm_statistic=Activation(acc, "selective", "sp"),
        latents=Activation((R + r + Q) * e, "selective", "sp", 2 * H * (R + r + Q)),
        q_norm=Activation(Q * e, "none", "sp"),
        latent_norms_statistics=Activation((1 + (Q > 0)) * acc, "selective", "sp"),
        gathered_latents=Activation(c * (R + r) * e, "selective", ""),
        queries=Activation(N * D * e, "selective", "tp", 2 * (Q or H) * N * D),
        keys_values=Activation(c * N * (D + v) * e, "none", "tp", c * 2 * R * N * (D - r + v)),
        attention=Activation(N * v * e, "selective", "tp", 0 if math else scores_flops),
        residual=Activation(H * e, "selective", "sp", 2 * N * v * H))
    if not math:
        return activations | dict(logsumexp=Activation(N * acc, "selective", "tp"))
    return activations | dict(scores=Activation(N * seq * (acc if e == acc else acc + e), "none", "tp", scores_flops),
                              attention_copies=Activation((2 * acc - 2 * e) * N * D, "none", "tp"))


def ffn_half(model: Model, options: LayerOptions) -> Layer:
    H, F = model.hidden, model.ffn
    e, acc = options.element, acc_bytes(options.element)
    return dict(
        ffn_norm=Activation(H * e, "none", "sp"),
        ffn_norm_statistic=Activation(acc, "selective", "sp"),
        gate_up=Activation(2 * F * e, "selective", "tp", 4 * H * F),
        swiglu=Activation(F * e, "none", "tp"),
        output=Activation(0, "full", "sp", 2 * F * H))


def experts_half(model: Model, options: LayerOptions) -> Layer:
    """The feed-forward half of a block with experts (ep.py), if all experts get equally many tokens.

    Selective recomputation saves the tokens dispatched to experts, because to make them again it would have to
    communicate again. Full recomputation also saves the routing (see ep.py).
    """
    H, F, E, k = model.hidden, model.expert_ffn, model.experts, model.top_k
    e, acc = options.element, acc_bytes(options.element)
    router_scores = 1 + options.aux + options.router_z  # times E: scores, the auxiliary loss's coefficients, logits
    sent = options.copies
    gates = k + model.router_norm * (k + 1) + options.aux * (model.router == "sigmoid") + 2 * options.router_z
    activations = dict(
        ffn_norm=Activation(H * e, "none", "sp"),
        ffn_norm_statistic=Activation(acc, "selective", "sp"),
        router_scores=Activation(router_scores * E * acc, "selective", "tp", 2 * H * E),
        gates=Activation(gates * acc, "selective", "tp"),
        route=Activation(24 * k + 8 + (24 * sent if sent else 0), "full", "tp"),
        tokens_dispatched=Activation(k * H * e, "selective", "tp"),
        experts_gate_up=Activation(2 * k * F * e, "selective", "tp", 4 * H * k * F),
        experts_swiglu=Activation(k * F * e, "none", "tp"),
        experts_output=Activation(0, "full", "tp", 2 * k * F * H))
    shared = model.shared_experts * F
    if shared:
        activations |= dict(shared_gate_up=Activation(2 * shared * e, "selective", "tp", 4 * H * shared),
                            shared_swiglu=Activation(shared * e, "none", "tp"))
    return activations | dict(output=Activation(0, "full", "sp", 2 * shared * H))


def copies_per_token(model: Model, ranks: int) -> float:
    """The expected number of ranks that hold a token's experts, if every choice of top_k experts is equally likely."""
    E, k = model.experts, model.top_k
    return ranks * (1 - math.comb(E - E // ranks, k) / math.comb(E, k))


# ---- utilisation ----------------------------------------------------------------------------------------------------

def flops_by_convention(settings: Config) -> dict[str, float]:
    """FLOPs per token, forward and backward, as each kind of utilisation counts them.

    mfu: counts masked scores, too (in a layer with a window, as many masked scores as visible ones)
    mfu_causal: counts only visible scores
    hfu: mfu plus the FLOPs that are recomputed
    """
    model, precision, seq = settings.model, settings.precision, settings.batch.seq_len
    options = LayerOptions(attention=precision.attention)
    recomputed = sum(recomputed_flops(llama_layer(model, seq, options, layer), precision.recompute)
                     for layer in range(model.blocks))
    flops = flops_per_token(model, seq)
    return dict(mfu=flops, mfu_causal=flops_per_token(model, seq, causal=True), hfu=flops + recomputed)
