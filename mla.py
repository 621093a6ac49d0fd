"""Latent attention: keys and values of all heads are computed from one narrow vector per token, the latent.

    keys and values                  cached, per token             computed from it, for every head

    x ──► w_kv_down ──┬─► kv_norm ──► latent [R] ────► w_kv_up ──┬─► k [D - r] ──┐
                      │                                          │               ├──► key [D]
                      └─► rotate ───► shared key [r] ────────────┼───────────────┘
                                                                 └──────────────────► value [v]

    queries                          nothing is cached             computed for every head

    x ──► w_q_down ─────► q_norm ────► latent of queries [Q] ────► w_q_up ────► rotate the last r ────► query [D]

Symbols: H hidden, N query heads, K key and value heads of grouped queries, B batch; t tensor parallel and c context
         parallel ranks.
         S: length of a sequence. s = S/c: the tokens of a sequence that a context parallel rank has, its chunk.
         T = B s: all tokens of the chunk. A tensor parallel rank has T/t of them between layers, or T without sequence
         parallelism.
         Widths: R, the latent of keys and values. Q, the latent of queries. r, the shared key. v, the value of a head.
         D, the query or key of a head, whose last r numbers are rotated (DeepSeek: qk_nope + qk_rope).

Grouped queries cache K key and value heads, 2 K D numbers per token. Here R + r numbers are cached,
and w_kv_up makes the keys and values of all N heads from them at every use. `latent_attention`
below is all of this for one sequence on one rank.

The rotated part of a key comes from x directly, not from the latent. This allows an inference
engine to fold w_kv_up into w_q_up: it multiplies the two once, and attends to latents. If keys were
rotated after w_kv_up, rotations that depend on the positions of the two tokens would stand between
the two matrices. (run/generate.py does not fold: it computes keys and values.) All heads share the
rotated part, because otherwise N r numbers would be cached for it.

Queries have a latent of their own. With Q = 0 they have none, and one matrix, wq, computes them
from x.

Saves: The KV cache has R + r numbers per token and layer, in place of 2 K D (python mla.py). Context parallel ranks
       send latents, in place of keys and values: see the table in cp.py.
Costs: Every tensor parallel rank caches all R + r numbers. With grouped queries it caches 2 K D / t, or 2 D if t > K.
       It also stores the whole matrices that make latents.
       Every context parallel rank computes the keys and values of all tokens, which is c times its share of this work.
       Some attention kernels need values as wide as keys (sdpa.py). There attention's forward needs 2 D / (D + v)
       times as many FLOPs, which is 1.2 times for DeepSeek-V3.
Stops helping when: nothing is generated, and c = 1. Training keeps the keys and values of all N heads, or recomputes
       them, so it saves no memory.

DeepSeek-AI 2024 (V2), section 2.1.
"""
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from core.collectives import run_demo
from core.config import Model, need
from core.param import Spec
from core.rules import parse
from operations import RMSNorm, rotary_angles, rotate_tail
from tp import ColumnParallelLinear, MakeParameter, RowParallelLinear, TensorParallel

# ---- the plain version: one sequence on one rank --------------------------------------------------------------------

def latent_attention(x: Tensor, weights: dict[str, Tensor], model: Model) -> tuple[Tensor, Tensor]:
    """Attend causally in one sequence x [S, H]. Return the result [S, H], and the numbers to cache, [S, R + r].

    weights: the matrices and norms by their names in the figure, and "wo". With Q = 0 "wq" replaces
        "w_q_down", "q_norm" and "w_q_up".
    """
    S, N, D = len(x), model.heads, model.head_dim
    R, r, v = model.kv_lora_rank, model.rope_head_dim, model.value_dim
    cos, sin = rotary_angles(torch.arange(S), model, x.dtype, length=S)  # [S, 1, r/2]

    # What is cached.
    latent, shared_key = (x @ weights["w_kv_down"].T).split([R, r], -1)
    latent = F.rms_norm(latent, (R,), weights["kv_norm"], model.norm_eps)
    shared_key = rotate_pairs(shared_key[:, None], cos, sin)  # [S, 1, r]: one head

    # Keys and values, computed from these cached numbers.
    k, values = (latent @ weights["w_kv_up"].T).view(S, N, D - r + v).split([D - r, v], -1)
    keys = torch.cat((k, shared_key.expand(S, N, r)), -1)  # [S, N, D]

    # Queries.
    if model.q_lora_rank:
        q_latent = x @ weights["w_q_down"].T
        q = F.rms_norm(q_latent, (model.q_lora_rank,), weights["q_norm"], model.norm_eps) @ weights["w_q_up"].T
    else:
        q = x @ weights["wq"].T
    q, rotated = q.view(S, N, D).split([D - r, r], -1)
    queries = torch.cat((q, rotate_pairs(rotated, cos, sin)), -1)  # [S, N, D]

    # Attention.
    scores = torch.einsum("ind,jnd->nij", queries, keys) / D ** 0.5 * model.score_factor
    is_later = torch.ones(S, S, dtype=torch.bool).triu(1)
    p = scores.masked_fill(is_later, -torch.inf).softmax(-1)
    o = torch.einsum("nij,jnv->inv", p, values)
    return o.flatten(1) @ weights["wo"].T, torch.cat((latent, shared_key[:, 0]), -1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[2i], x[2i + 1]) of [S, heads, r] by their angles."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


# ---- the layer: tensor and context parallel, with a cache -----------------------------------------------------------

NO_EXCHANGE = TensorParallel()  # a group of one rank: layers neither gather tokens nor sum gradients over ranks


class LatentAttention(nn.Module):
    """[T/t, H] -> [T/t, H], as latent_attention, for a batch of sequences and on a grid.

    Tensor parallelism: A rank has N/t heads, and the rows of w_q_up and w_kv_up that belong to these heads. The
        matrices and norms that make latents are whole on every rank, and each rank applies them to the tokens that it
        has between layers. With sequence parallelism these are T/t tokens, so each rank's gradient of such a weight is
        partial, one term of a sum over ranks. Without it every rank has the same T tokens, so the gradient is
        replicated. The same holds for the gradients of a block's norms.
        `gather_with_grad` gathers the latents and shared keys of all T tokens. Each rank's heads
        contribute a part of the gradient of latents and shared keys. gather_with_grad's backward
        sums these parts (by a reduce-scatter, or by an all-reduce without sequence parallelism).
    Context parallelism: `context.gather_latents`, which is cp.gather_tokens, gathers latents and shared
        keys over context parallel ranks, in the order of the sequence. Its backward sums the
        gradients of all ranks, and gives each rank those of its own tokens. Attention then has the
        style "latents" of cp.py: a rank attends to all keys in one step.
    Generation: The cache keeps latents and shared keys.
    Recomputation: With --recompute selective, the normed latent of queries and the keys and values are
        freed after use in forward, and computed again in backward.

    whole_along: Spec.along of the matrices and norms that are whole on every rank: {"tp": "partial"} or
        {"tp": "replicate"}.
    std, out_std: standard deviation of the initial weights. out_std is for wo.
    """

    def __init__(self, layer: int, model: Model, make: MakeParameter, whole_along: dict, std: float, out_std: float):
        super().__init__()
        H, N, D, name = model.hidden, model.heads, model.head_dim, f"layers.{layer}.attention."
        R, r, v, Q = model.kv_lora_rank, model.rope_head_dim, model.value_dim, model.q_lora_rank
        need(0 < r < D and r % 2 == 0, f"rope_head_dim {r}: must be even, above 0 and below head_dim {D}")
        need(not (model.qk_norm or model.qkv_bias), "qk_norm and qkv_bias: latent attention has neither")

        def spec(weight: str, rows: int, columns: int, along: dict) -> Spec:
            return Spec(name + weight, (rows, columns), along, std=std)

        self.layer, self.window, self.head_dim = layer, model.window_of(layer), D
        self.score_factor = model.score_factor  # of YaRN, with --rope-mscale; otherwise 1
        self.widths = [R, r, Q]  # of the two down-projections of x: latent, shared key, latent of queries
        self.head_widths = [D - r, v]  # of the two parts that w_kv_up computes for a head: k, value
        down = [spec("w_kv_down", R + r, H, whole_along)]
        if Q:
            down.append(spec("w_q_down", Q, H, whole_along))
        # These matrices are whole on every rank, and `forward` calls their layer with NO_EXCHANGE. It is column
        # parallel only because such a layer multiplies by several weights at once, and adds to their gradient buffers.
        self.to_latents = ColumnParallelLinear(make, *down)
        self.kv_norm = RMSNorm(make, name + "kv_norm", R, model.norm_eps, whole_along)
        self.q_norm = RMSNorm(make, name + "q_norm", Q, model.norm_eps, whole_along) if Q else None
        # {"tp": n}: dimension n is sharded over tp. 0: the rows, 1: the columns.
        self.q_up = ColumnParallelLinear(make, spec("w_q_up" if Q else "wq", N * D, Q or H, {"tp": 0}))
        self.kv_up = ColumnParallelLinear(make, spec("w_kv_up", N * (D - r + v), R, {"tp": 0}))
        self.out = RowParallelLinear(make, Spec(name + "wo", (H, N * v), {"tp": 1}, std=out_std))

    def forward(self, x: Tensor, context) -> Tensor:  # context: model.ForwardContext
        # Latents of the tokens that this rank has between layers. w_kv_down and w_q_down are one matmul. If Q = 0,
        # q_latent is empty.
        latent, shared_key, q_latent = self.to_latents(x, NO_EXCHANGE).split(self.widths, -1)  # each [T/t, width]

        # Queries of this rank's heads, for all T tokens of the chunk.
        h = self.q_norm(q_latent) if self.q_norm else x
        q = self.q_up(h, context.tp)  # [T, N D / t]
        if self.q_norm:
            # With --recompute selective, this frees h, because q has been computed from it. When the backward of q
            # begins, h is computed again, as self.q_norm(q_latent). The arguments are: what is freed, until whose
            # backward, the function that computes it again, and that function's input.
            context.recompute.drop(h, q, self.q_norm, q_latent)
        if self.score_factor != 1:
            # YaRN multiplies scores by this factor, besides 1 / sqrt(D). An AttentionKernel takes no such factor, so
            # scale q instead of the scores.
            q = q * self.score_factor
        q = rearrange(q, "(b s) (n d) -> b s n d", s=context.seq, d=self.head_dim)
        # rotate_tail works in place. It rotates the last r of each head's D numbers.
        q = rearrange(rotate_tail(q, context.angles), "b s n d -> b n s d")

        # Latents and shared keys of the chunk. kv_up is column parallel and would gather its input itself. We gather
        # here instead, with the shared keys, in one call, and call kv_up with NO_EXCHANGE (in `expand`). The gather
        # comes before the rotation, because `angles` belong to all T tokens.
        local_latents = context.tp.gather_with_grad(torch.cat((self.kv_norm(latent), shared_key), -1))  # [T, R + r]
        local_latents = rearrange(local_latents, "(b s) w -> b s 1 w", s=context.seq)
        local_latents = rotate_tail(local_latents, context.angles)  # rotates the shared key, in place
        if context.cache is not None:
            # The cache keeps latents as its keys, and shared keys as its values. `extend` appends those of the new
            # tokens, and returns them after those of earlier tokens. With a window, it keeps only window - 1 earlier
            # tokens.
            seen = context.cache.extend(self.layer, *local_latents.split(self.widths[:2], -1), self.window)
            local_latents = torch.cat(seen, -1)
        latents = context.gather_latents(local_latents)  # [B, S, 1, R + r], of whole sequences

        # Keys and values of this rank's heads, and attention.
        keys_values = self.expand(latents)  # [B, N/t, S, D + v]
        keys, values = keys_values.tensor_split([self.head_dim], -1)
        # context.attention has the attention function of each window (model.ForwardContext).
        o = context.attention[self.window](q, keys, values)  # [B, N/t, s, v]
        context.recompute.drop(keys_values, o, self.expand, latents)  # freed until the backward of o begins
        return self.out(rearrange(o, "b n s v -> (b s) (n v)"), context.tp)

    def expand(self, latents: Tensor) -> Tensor:
        """Make keys and values, side by side: latents and shared keys [B, S, 1, R + r] -> [B, N/t, S, D + v]."""
        latent, shared_key = latents.split(self.widths[:2], -1)
        heads = rearrange(self.kv_up(latent.flatten(0, 2), NO_EXCHANGE), "(b s) (n d) -> b n s d", b=len(latents),
                          d=sum(self.head_widths))
        k, v = heads.split(self.head_widths, -1)
        shared_key = shared_key.transpose(1, 2).expand(-1, k.shape[1], -1, -1)
        return torch.cat((k, shared_key, v), -1)


# ---- demo: python mla.py --------------------------------------------------------------------------------------------

def cached_numbers(model: Model) -> int:
    """Return how many numbers the KV cache keeps per token and layer."""
    if model.kv_lora_rank:
        return model.kv_lora_rank + model.rope_head_dim
    return 2 * model.kv_heads * model.head_dim


def demo() -> None:
    """Compare the caches of published models, and run the plain version."""
    for name in ("llama-2-7b", "llama-3.1-70b", "llama-3.1-405b", "deepseek-v3", "kimi-k2"):
        model = parse(["--preset", name]).model
        cached = cached_numbers(model)
        print(f"{name:16s}{model.heads:4d} heads   {cached:5,d} numbers per token and layer in the KV cache")

    model = parse(["--preset", "deepseek-v3"]).model
    cached, computed = cached_numbers(model), model.heads * (model.head_dim + model.value_dim)
    print(f"\nDeepSeek-V3 computes {computed:,} numbers, the keys and values of {model.heads} heads, from {cached} "
          f"cached ones: {computed / cached:.0f} times as many.")

    model = Model(hidden=64, heads=4, kv_heads=4, head_dim=24, kv_lora_rank=32, rope_head_dim=8, v_head_dim=16)
    shapes = {"w_kv_down": (32 + 8, 64), "kv_norm": (32,), "w_kv_up": (4 * (16 + 16), 32), "wq": (4 * 24, 64),
              "wo": (64, 4 * 16)}
    weights = {name: torch.ones(shape) for name, shape in shapes.items()}
    y, cached = latent_attention(torch.ones(10, 64), weights, model)
    print(f"latent_attention: 10 tokens give {list(y.shape)}, and {list(cached.shape)} to cache. "
          f"Keys and values of its 4 heads are {[10, 4 * (24 + 16)]}.")


if __name__ == "__main__":
    run_demo(lambda group: demo())
