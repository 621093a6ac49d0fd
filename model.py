"""Llama, written as for one GPU: embedding, blocks, head, sampling, and what they cost.

    tokens -> embedding -> [ x + attention(norm(x)) -> x + ffn(norm(x)) ] per layer -> norm -> head -> loss

Weights are made by `parameter`, which knows how the grid cuts them, and used by `linear`, whose weight gradients go
through the door of param.py. Nothing else here knows that there are other ranks.

What is at least fp32 in every run ("wide"): rotary angles, the statistics of norms and softmax, and the loss.

Llama: Touvron et al. 2023; grouped queries: Ainslie et al. 2023; rotary embedding: Su et al. 2021; its stretch: Llama
Team 2024. Pairs are turned as in the published weights (first half of a head with the second half).

Letters: B batch, S sequence, H hidden, N query heads, K key and value heads, D head width, V vocabulary, L layers.
"""
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

import config
from param import Groups, Spec, accumulate_grad, at_least_fp32, parameter, stacked

IGNORED = -100  # the label of a token that has no loss


# ---- operations -----------------------------------------------------------------------------------------------------

class Linear(Function):
    """x [..., H] times the transpose of one or several weights [rows, H], their results side by side.

    Several weights that read the same x (queries, keys and values) are one matmul.
    """

    @staticmethod
    def forward(ctx, x, defer, *weights):
        ctx.save_for_backward(x)
        ctx.weights, ctx.defer = weights, defer  # as attributes: recomputation would hand back an alias without a sink
        return x @ together(weights).t()

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        dx = grad @ together(ctx.weights)
        x, grad = x.detach().flatten(0, -2), grad.flatten(0, -2)
        accumulate_grad(ctx.weights, lambda out: add_product(out, grad.t(), x), ctx.defer)
        return dx, None, *[None] * len(ctx.weights)


def together(weights: tuple[nn.Parameter, ...]) -> torch.Tensor:
    """The weights below each other: a view if they lie so, else a copy."""
    view = stacked([w.detach() for w in weights])
    return torch.cat(weights) if view is None else view


def add_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """out += a b. In bf16 runs out is fp32: each product is rounded once, their sum is not."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    else:
        out.add_(a @ b)


def linear(x: torch.Tensor, *weights: nn.Parameter, defer: bool = True) -> torch.Tensor:
    return Linear.apply(x, defer, *weights)


class Lookup(Function):
    """Rows of a table [V, H]. The gradient is added row by row: a dense V x H one would be mostly zeros."""

    @staticmethod
    def forward(ctx, tokens, table):
        ctx.save_for_backward(tokens)
        ctx.table = table
        return table[tokens]

    @staticmethod
    def backward(ctx, grad):
        tokens, = ctx.saved_tensors
        accumulate_grad(ctx.table, lambda out: out.index_add_(0, tokens.flatten(), grad.flatten(0, -2).to(out.dtype)),
                        defer=False)
        return None, None


class Norm(Function):
    """RMSNorm (Zhang & Sennrich 2019) over the last dimension. Keeps its input and one number a token."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.to(at_least_fp32(x.dtype))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, scale)
        ctx.weight = weight
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        normal = x.detach() * scale  # in the dtype of the statistics, as all that follows
        weight, share = ctx.weight.to(scale.dtype), grad * normal
        accumulate_grad(ctx.weight, lambda out: out.add_(share.flatten(0, -2).sum(0)), defer=False)
        along = (share @ weight)[..., None] / x.shape[-1]  # how far the gradient points along the normalised x
        return (grad * weight).addcmul_(normal, along, value=-1).mul_(scale).to(x.dtype), None, None


def norm(x: torch.Tensor, weight: nn.Parameter, eps: float) -> torch.Tensor:
    return Norm.apply(x, weight, eps)


class SwiGLU(Function):
    """silu(gate) * up (Shazeer 2020), gate and up side by side in x [..., 2 ffn]. Keeps x alone."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        dx = torch.empty_like(x)
        dgate, dup = dx.chunk(2, -1)
        torch.ops.aten.silu.out(gate, out=dup).mul_(grad)
        torch.mul(grad, up, out=dgate)
        torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
        return dx


class Rotate(Function):
    """Turn every pair (x[i], x[i + D/2]) by the angle of its position. Backward turns back, so x is not saved."""

    @staticmethod
    def forward(ctx, x, cos, sin):  # B S heads D, and [B] S 1 D/2
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return turned(grad, cos, -sin), None, None


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.to(cos.dtype).chunk(2, -1)
    out = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
    left, right = out.chunk(2, -1)
    torch.mul(a, cos, out=left).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=right).addcmul_(a, sin)
    return out.to(x.dtype)


def angles(positions: torch.Tensor, model: config.Model, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the rotary angles at positions [B] S, as [B] S 1 D/2. dtype: fp32 or better."""
    pairs = torch.arange(0, model.head_dim, 2, device=positions.device, dtype=dtype)
    frequency = model.rope_theta ** (-pairs / model.head_dim)
    if model.rope_scaling != 1:
        # Llama 3.1: pairs that turn less than once in the 8192 tokens of pre-training are slowed by the whole factor,
        # those that turn more than 4 times are left, and in between the factor blends in.
        turns = 8192 * frequency / (2 * torch.pi)
        keep = ((turns - 1) / (4 - 1)).clamp(0, 1)
        frequency = frequency * (keep + (1 - keep) / model.rope_scaling)
    angle = positions[..., None, None].to(dtype) * frequency
    return angle.cos(), angle.sin()


def visible(places: torch.Tensor, keys: int, documents: torch.Tensor | None) -> torch.Tensor:
    """Which of `keys` keys each query sees: none behind its place, none of another document. [B 1] S keys, bool."""
    mask = places[:, None] >= torch.arange(keys, device=places.device)
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    return mask


def attention_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """torch's fused attention. q B N S D, k and v B K S D, mask True where visible (None: causal) -> B N S D."""
    if mask is not None:  # with a mask, no fused GPU kernel takes grouped queries: S x S scores would be kept
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=mask is None)


def attention_math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The same sum written out. It keeps the S x S scores, which the fused kernels never do."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    if mask is None:
        mask = visible(torch.arange(q.shape[2], device=q.device), k.shape[2], None)
    wide = at_least_fp32(q.dtype)
    scores = (q.to(wide) @ k.to(wide).transpose(-1, -2)) * q.shape[-1] ** -0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype) @ v


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum (not the mean) of the tokens' losses in nats; IGNORED labels have none. logits B S V, labels B S."""
    logits = logits.to(at_least_fp32(logits.dtype)).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")


# ---- the model ------------------------------------------------------------------------------------------------------

class Embedding(nn.Module):
    def __init__(self, model: config.Model, make):
        super().__init__()
        self.table = make(Spec("embedding", (model.vocab, model.hidden), std=0.02))

    def forward(self, tokens):  # B S -> B S H
        return Lookup.apply(tokens, self.table)


class Attention(nn.Module):
    def __init__(self, layer: int, model: config.Model, make, core):
        super().__init__()
        self.model, self.layer, self.core = model, layer, core
        H, D, name = model.hidden, model.head_dim, f"layers.{layer}.attention."
        q_rows, kv_rows = model.heads * D, model.kv_heads * D
        self.wq = make(Spec(name + "wq", (q_rows, H), std=0.02))
        self.wk = make(Spec(name + "wk", (kv_rows, H), std=0.02))
        self.wv = make(Spec(name + "wv", (kv_rows, H), std=0.02))
        self.wo = make(Spec(name + "wo", (H, q_rows), std=0.02 / (2 * model.layers) ** 0.5))
        if model.qkv_bias:
            self.bq, self.bk, self.bv = (make(Spec(name + b, (rows,), decay=False))
                                         for b, rows in (("bq", q_rows), ("bk", kv_rows), ("bv", kv_rows)))
        if model.qk_norm:
            self.q_norm, self.k_norm = (make(gain(name + part, D)) for part in ("q_norm", "k_norm"))

    def forward(self, x, rotation, mask, cache):  # B S H -> B S H
        model = self.model
        q, k, v = linear(x, self.wq, self.wk, self.wv).split([len(self.wq), len(self.wk), len(self.wv)], -1)
        if model.qkv_bias:
            q, k, v = q + self.bq, k + self.bk, v + self.bv
        q, k, v = (part.unflatten(-1, (-1, model.head_dim)) for part in (q, k, v))  # B S heads D
        if model.qk_norm:
            q, k = norm(q, self.q_norm, model.norm_eps), norm(k, self.k_norm, model.norm_eps)
        q, k = Rotate.apply(q, *rotation), Rotate.apply(k, *rotation)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        o = self.core(*(part.transpose(1, 2) for part in (q, k, v)), mask)
        return linear(o.transpose(1, 2).flatten(2), self.wo)


class FeedForward(nn.Module):
    def __init__(self, layer: int, model: config.Model, make):
        super().__init__()
        H, ffn, name = model.hidden, model.ffn, f"layers.{layer}.ffn."
        self.w_gate = make(Spec(name + "w_gate", (ffn, H), std=0.02))
        self.w_up = make(Spec(name + "w_up", (ffn, H), std=0.02))
        self.w_down = make(Spec(name + "w_down", (H, ffn), std=0.02 / (2 * model.layers) ** 0.5))

    def forward(self, x):  # B S H -> B S H
        return linear(SwiGLU.apply(linear(x, self.w_gate, self.w_up)), self.w_down)


class Block(nn.Module):
    def __init__(self, layer: int, model: config.Model, make, core):
        super().__init__()
        self.eps = model.norm_eps
        self.attention_norm = make(gain(f"layers.{layer}.attention_norm", model.hidden))
        self.attention = Attention(layer, model, make, core)
        self.ffn_norm = make(gain(f"layers.{layer}.ffn_norm", model.hidden))
        self.ffn = FeedForward(layer, model, make)

    def forward(self, x, rotation, mask, cache=None):  # B S H -> B S H
        x = x + self.attention(norm(x, self.attention_norm, self.eps), rotation, mask, cache)
        return x + self.ffn(norm(x, self.ffn_norm, self.eps))


class Head(nn.Module):
    def __init__(self, model: config.Model, make, table: nn.Parameter | None):
        super().__init__()
        self.eps = model.norm_eps
        self.norm = make(gain("norm", model.hidden))
        self.weight = make(Spec("head", (model.vocab, model.hidden), std=0.02)) if table is None else table

    def forward(self, x):  # B S H -> B S V
        return linear(norm(x, self.norm, self.eps), self.weight, defer=False)


def gain(name: str, width: int) -> Spec:
    return Spec(name, (width,), mean=1.0, decay=False)


class Llama(nn.Module):
    """groups: the grid; the model asks it only for its own part of every weight. attention: "auto", "sdpa" or "math".

    Parameters have no memory yet: an optimizer's `load` gives it to them and fills it from a source.
    """

    def __init__(self, model: config.Model, groups: Groups, dtype: torch.dtype = torch.float32,
                 device: torch.device | str = "cpu", attention: str = "auto"):
        super().__init__()
        make = partial(parameter, groups=groups, dtype=dtype, device=device)
        core = attention_math if attention == "math" else attention_sdpa
        self.model, self.wide = model, at_least_fp32(dtype)
        self.embedding = Embedding(model, make)
        self.blocks = nn.ModuleList(Block(layer, model, make, core) for layer in range(model.layers))
        self.head = Head(model, make, self.embedding.table if model.tied else None)

    def units(self) -> list[nn.Module]:
        """What is reduced, gathered and freed together, in forward order."""
        return [self.embedding, *self.blocks, self.head]

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None,
                documents: torch.Tensor | None = None, cache: "Cache | None" = None) -> torch.Tensor:
        """Logits B S V of tokens B S.

        positions: S or B S, by default 0, 1, 2 … documents: B S, numbers of the documents, which do not see each other.
        cache: the keys and values of earlier tokens, which these follow.
        """
        assert cache is None or documents is None, "what is sampled is one document"
        before = len(cache) if cache is not None else 0
        places = torch.arange(before, before + tokens.shape[1], device=tokens.device)
        rotation = angles(places if positions is None else positions, self.model, self.wide)
        only_causal = documents is None and before == 0
        mask = None if only_causal else visible(places, before + tokens.shape[1], documents)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotation, mask, cache)
        return self.head(x)


# ---- sampling -------------------------------------------------------------------------------------------------------

class Cache:
    """Keys and values of the tokens so far, by layer."""

    def __init__(self):
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __len__(self) -> int:
        return self.layers[0][0].shape[1] if self.layers else 0

    def extend(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append k and v, B S K D, and return all there are."""
        if layer in self.layers:
            k, v = (torch.cat(pair, 1) for pair in zip(self.layers[layer], (k, v)))
        self.layers[layer] = k, v
        return k, v


@torch.no_grad()
def sample(model: Llama, tokens: torch.Tensor, count: int, temperature: float = 0.8, seed: int = 0) -> torch.Tensor:
    """Continue tokens B S by `count` tokens, each drawn from softmax(logits / temperature); 0 takes the likeliest."""
    generator = torch.Generator().manual_seed(seed)
    cache, new = Cache(), tokens
    for _ in range(count):
        logits = model(new, cache=cache)[:, -1].float().cpu()
        if temperature == 0:
            new = logits.argmax(-1, keepdim=True)
        else:
            new = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        new = new.to(tokens.device)
        tokens = torch.cat((tokens, new), 1)
    return tokens


# ---- costs ----------------------------------------------------------------------------------------------------------

def parameter_count(model: config.Model) -> int:
    """Elements of all weights, a tied table once. Builds the model, which takes no memory."""
    params = {p.spec.name: p for p in Llama(model, {}).parameters()}
    return sum(p.numel() for p in params.values())


def flops_per_token(model: config.Model, seq: int, causal: bool = False) -> float:
    """Floating-point operations of one token, forward and backward: 6 N + 12 L h S, with h = heads x head width.

    N leaves out the input embedding, which multiplies nothing. causal=True counts only the scores that are visible,
    half of them: 6 N + 6 L h S (Chowdhery et al. 2022, appendix B, has the first form).
    """
    n = parameter_count(model) - (0 if model.tied else model.vocab * model.hidden)
    scores = 12 * model.layers * model.heads * model.head_dim * seq
    return 6 * n + (scores / 2 if causal else scores)


def activation_bytes(model: config.Model, micro_batch: int, seq: int, dtype: torch.dtype) -> int:
    """Bytes that the forward of one micro-batch keeps for its backward, with fused attention and no recomputation."""
    H, V, N, K = model.hidden, model.vocab, model.heads * model.head_dim, model.kv_heads * model.head_dim
    block = (4 * H  # what each of two norms takes and gives
             + (N + 2 * K) + (N + K)  # q, k, v in one tensor; q and k turned
             + N  # the attention's output
             + 3 * model.ffn)  # gate and up in one tensor, what SwiGLU makes of them
    head = 2 * H
    wide = model.layers * (2 + model.heads) + 1 + V  # statistics of norms and attention; logarithms of probabilities
    return micro_batch * seq * ((model.layers * block + head) * dtype.itemsize + wide * at_least_fp32(dtype).itemsize)
