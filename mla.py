"""Latent attention: keys and values of all heads are made of one narrow vector per token, and a key that heads share.

Saves: the KV cache has R + r numbers per token and layer in place of 2 K D of grouped queries (python mla.py); with
       context parallelism latents are sent in place of keys and values: see cp.py's table.
Costs: each tensor parallel rank caches all R + r, where of grouped queries it has 2 K D / t, and has the matrices that
       make latents; each context parallel rank makes keys and values of all tokens, c times its share of that work;
       attention's forward on padded values has 2 D / (D + v) times the FLOPs (DeepSeek-V3: 1.2).
Stops helping when: nothing is sampled, and c = 1: training saves keys and values of all N heads, or recomputes them.

    x ── w_q_down ── q_norm ── w_q_up ──► N heads [ q | q to be rotated ]
    x ── w_kv_down ┬─ kv_norm ── w_kv_up ► N heads [ k | v ]          a head's key is [ k | the shared key ]
                   └───────────────────►     [ the shared key, to be rotated ]

The rotated part of a key is not made of the latent: were it rotated after w_kv_up, no inference engine could multiply
w_kv_up into w_q_up once for all, and attend to latents (run/generate.py makes keys of them). It is shared, or the cache
would have N r. Queries are made of a latent of their own, or of x (Q = 0).

DeepSeek-AI 2024 (V2), section 2.1.
Shapes: as in model.py. Widths: R latent of keys and values, Q latent of queries, r shared key; D a query or key head, r
of them rotated (DeepSeek: qk_nope + qk_rope); v a value head.
"""
import torch
from einops import rearrange
from torch import Tensor, nn

from core.config import Model, need
from core.param import Spec
from core.rules import parse
from operations import RMSNorm, rotate_tail
from tp import ColumnParallelLinear, MakeParameter, RowParallelLinear, TensorParallel

NO_EXCHANGE = TensorParallel()  # for linear layers that gather no tokens in forward, and sum no gradient in backward


class LatentAttention(nn.Module):
    """[T/t, H] -> [T/t, H]. A tensor parallel rank has N/t heads. The matrices that make latents are whole on every
    rank, and applied to the tokens that it has between layers, so their gradients are partial or replicated, as norms'
    are. `gather_with_grad` gathers all tokens' latents and shared keys, which get partial gradients from each rank's
    heads; its backward sums these. Attention kernels take values as wide as keys: values are padded with zeros.

    norm_along: Spec.along of weights that are whole on every rank. std, out_std: of initial weights, and of wo."""

    def __init__(self, layer: int, model: Model, make: MakeParameter, norm_along: dict, std: float, out_std: float):
        super().__init__()
        H, N, D, name = model.hidden, model.heads, model.head_dim, f"layers.{layer}.attention."
        R, r, v, Q = model.kv_lora_rank, model.rope_head_dim, model.value_dim, model.q_lora_rank
        need(0 < r < D and r % 2 == 0, f"rope_head_dim {r}: must be even, above 0 and below head_dim {D}")
        need(not (model.qk_norm or model.qkv_bias), "qk_norm and qkv_bias: latent attention has neither")

        def spec(weight: str, rows: int, columns: int, along: dict) -> Spec:
            return Spec(name + weight, (rows, columns), along, std=std)

        self.layer, self.window, self.head_dim = layer, model.window_of(layer), D
        self.widths = [R, r, Q]  # of what x is made into: latent of keys and values, shared key, latent of queries
        self.head_widths = [D - r, v]  # of what kv_up makes for a head: key, value
        down = [spec("w_kv_down", R + r, H, norm_along)] + ([spec("w_q_down", Q, H, norm_along)] if Q else [])
        self.to_latents = ColumnParallelLinear(make, *down)
        self.kv_norm = RMSNorm(make, name + "kv_norm", R, model.norm_eps, norm_along)
        self.q_norm = RMSNorm(make, name + "q_norm", Q, model.norm_eps, norm_along) if Q else None
        self.q_up = ColumnParallelLinear(make, spec("w_q_up" if Q else "wq", N * D, Q or H, {"tp": 0}))
        self.kv_up = ColumnParallelLinear(make, spec("w_kv_up", N * (D - r + v), R, {"tp": 0}))
        self.out = RowParallelLinear(make, Spec(name + "wo", (H, N * v), {"tp": 1}, std=out_std))

    def forward(self, x: Tensor, context) -> Tensor:  # context: model.ForwardContext
        latent, shared_key, q_latent = self.to_latents(x, NO_EXCHANGE).split(self.widths, -1)  # each [T/t, width]
        h = self.q_norm(q_latent) if self.q_norm else x
        q = self.q_up(h, context.tp)  # [T, N D / t]
        if self.q_norm:
            context.recompute.drop(h, q, self.q_norm, q_latent)
        q = rearrange(q, "(b s) (n d) -> b s n d", s=context.seq, d=self.head_dim)
        q = rearrange(rotate_tail(q, context.angles), "b s n d -> b n s d")  # the last r of each head's D are rotated
        own = context.tp.gather_with_grad(torch.cat((self.kv_norm(latent), shared_key), -1))  # [T, R + r], kv_up's f
        own = rotate_tail(rearrange(own, "(b s) w -> b s 1 w", s=context.seq), context.angles)
        if context.cache is not None:  # what it calls keys are latents, and values shared keys
            own = torch.cat(context.cache.extend(self.layer, *own.split(self.widths[:2], -1), self.window), -1)
        latents = context.gather_latents(own)  # [B, S, 1, R + r], of all tokens
        keys_values = self.expand(latents)  # [B, N/t, S, 2D]
        o = context.attention[self.window](q, *keys_values.chunk(2, -1))
        context.recompute.drop(keys_values, o, self.expand, latents)
        return self.out(rearrange(o[..., :self.head_widths[1]], "b n s d -> (b s) (n d)"), context.tp)

    def expand(self, latents: Tensor) -> Tensor:
        """Latents and rotated keys [B, S, 1, R + r] -> keys, and values padded to their width, [B, N/t, S, 2D]."""
        latent, shared_key = latents.split(self.widths[:2], -1)
        heads = rearrange(self.kv_up(latent.flatten(0, 2), NO_EXCHANGE), "(b s) (n d) -> b n s d", b=len(latents),
                          d=sum(self.head_widths))
        k, v = heads.split(self.head_widths, -1)
        shared_key = shared_key.transpose(1, 2).expand(-1, k.shape[1], -1, -1)
        padding = v.new_zeros(()).expand(*v.shape[:-1], self.head_dim - v.shape[-1])
        return torch.cat((k, shared_key, v, padding), -1)


# ---- demo: python mla.py -----------------------------------------------------------------------------------------

def demo() -> None:
    for name in ("llama-2-7b", "llama-3.1-70b", "llama-3.1-405b", "deepseek-v3", "kimi-k2"):
        model = parse(["--preset", name]).model
        cached = (model.kv_lora_rank + model.rope_head_dim if model.kv_lora_rank else
                  2 * model.kv_heads * model.head_dim)
        print(f"{name:16s}{model.heads:4d} heads   {cached:5,d} numbers per token and layer in the KV cache")


if __name__ == "__main__":
    from core.collectives import run_demo
    run_demo(lambda group: demo())
