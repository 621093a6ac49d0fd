"""What a Llama computes besides matmuls: norms, SwiGLU, rotary angles, attention; each with what it saves for backward.

All of them wait for memory, not for arithmetic. On GPUs the kernels of kernels.py and flash.py take their places, which
read and write everything once; here is the plain arithmetic, the only place where it is written down. What is at least
fp32 in every run: angles, and the statistics of norms and softmax.

Attention comes in two forms. `whole` is differentiable and sees all keys at once. For context parallelism, `forward`
and `backward` are about a block of scores, some queries x some keys: forward also returns the logsumexp of every row,
by which results of several blocks are merged, and backward is given the logsumexp of the whole row.

RMSNorm: Zhang & Sennrich 2019; SwiGLU: Shazeer 2020; rotary embedding: Su et al. 2021, its stretch: Llama Team 2024;
sliding windows: Beltagy et al. 2020, as in Mistral: Jiang et al. 2023. Pairs are rotated as in the published weights
(first half of a head with the second half).

Shapes: B batch, S sequence, T = B S tokens, N query heads, K key and value heads, D head width.
"""
import importlib
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.nn.attention import SDPBackend, sdpa_kernel

import config
from param import Spec, acc_dtype, accumulate_grad
from recompute import cheap, is_selective

Tensor = torch.Tensor


def kernels() -> ModuleType:
    """kernels.py, loaded where it is first used: it needs Triton, which machines without a GPU need not have."""
    return importlib.import_module("kernels")


def uses_kernels(x: Tensor) -> bool:
    """Whether kernels of ours compute with x."""
    return x.is_cuda and x.dtype != torch.float64


# ---- RMSNorm --------------------------------------------------------------------------------------------------------

class Norm(Function):
    """RMSNorm (Zhang & Sennrich 2019) over the last dimension. Saves its input and one number a token."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.weight, ctx.eps = weight, eps
        if uses_kernels(x):
            ctx.save_for_backward(x)
            return kernels().rms_norm(x, weight, eps)
        y, scale = rms_norm(x, weight, eps)
        ctx.save_for_backward(x, scale)
        return y

    @staticmethod
    def backward(ctx, dy):
        return norm_backward(ctx, dy, None), None, None


class AddNorm(Function):
    """(x + y, RMSNorm of it). Saves the sum, which is the residual stream anyway, and one number a token."""

    @staticmethod
    def forward(ctx, x, y, weight, eps):
        ctx.weight, ctx.eps = weight, eps
        if uses_kernels(x):
            total, normal = kernels().add_rms_norm(x, y, weight, eps)
            ctx.save_for_backward(total)
            return total, normal
        total = x + y
        normal, scale = rms_norm(total, weight, eps)
        ctx.save_for_backward(total, scale)
        return total, normal

    @staticmethod
    def backward(ctx, dtotal, dy):
        dx = norm_backward(ctx, dy, dtotal)
        return dx, dx, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x / rms times weight, 1 / rms)."""
    exact = x.to(acc_dtype(x.dtype))
    scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    return (exact * scale).mul_(weight).to(x.dtype), scale


def norm_backward(ctx, grad: Tensor, dtotal: Tensor | None) -> Tensor:
    """dx of what was normalised. dtotal: the derivative by it of all but the norm."""
    x, *scale = ctx.saved_tensors
    if not scale:
        dx, dweight = kernels().rms_norm_backward(grad, dtotal, x, ctx.weight, ctx.eps)
        accumulate_grad(ctx.weight, lambda out: out.add_(dweight), defer=False)
        return dx
    scale, = scale
    normal = x.detach() * scale  # in the dtype of the statistics, as all that follows
    weight, share = ctx.weight.to(scale.dtype), grad * normal
    accumulate_grad(ctx.weight, lambda out: out.add_(share.flatten(0, -2).sum(0)), defer=False)
    along = (share @ weight)[..., None] / x.shape[-1]  # how far the gradient points along the normalised x
    dx = (grad * weight).addcmul_(normal, along, value=-1).mul_(scale).to(x.dtype)
    return dx if dtotal is None else dx.add_(dtotal)


class RMSNorm(nn.Module):
    """x / rms(x) times a weight, for each row of x. along: how the weight lies on the ranks, see param.py."""

    def __init__(self, make: Callable[[Spec], nn.Parameter], name: str, width: int, eps: float,
                 along: dict[str, int | str]):
        super().__init__()
        self.weight, self.eps = make(Spec(name, (width,), along, mean=1.0, decay=False)), eps

    def forward(self, x: Tensor) -> Tensor:
        return Norm.apply(x, self.weight, self.eps)

    def after_add(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """(x + y, its norm), in one pass over memory; in two if the norm is to be recomputed from the sum."""
        if is_selective():
            x = x + y
            return x, cheap(self, x)
        return AddNorm.apply(x, y, self.weight, self.eps)


# ---- SwiGLU ---------------------------------------------------------------------------------------------------------

class SwiGLU(Function):
    """silu(gate) * up (Shazeer 2020), gate and up side by side in x [..., 2 ffn]. Saves x alone."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        if uses_kernels(x):
            return kernels().swiglu(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        if uses_kernels(x):
            return kernels().swiglu_backward(grad, x)
        gate, up = x.chunk(2, -1)
        dx = torch.empty_like(x)
        dgate, dup = dx.chunk(2, -1)
        torch.ops.aten.silu.out(gate, out=dup).mul_(grad)
        torch.mul(grad, up, out=dgate)
        torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
        return dx


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up of [gate, up]: ... 2F -> ... F."""
    return SwiGLU.apply(x)


# ---- rotary embedding -----------------------------------------------------------------------------------------------

class Rotate(Function):
    """Rotate every pair (x[i], x[i + D/2]) of the first `heads` heads in x by the angle of its token, in place.

    Backward rotates back, so nothing is saved; and what attention saves is the memory that the matmul wrote.
    """

    @staticmethod
    def forward(ctx, x, cos, sin, heads):  # T (heads D) or B S heads D; [B] S 1 D/2
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        ctx.mark_dirty(x)
        rotate_in_place(x, cos, sin, heads)
        return x

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        if uses_kernels(grad):
            return kernels().rope_backward(heads_of(grad, cos), cos, sin, ctx.heads).view(grad.shape), None, None, None
        grad = grad.clone(memory_format=torch.contiguous_format)
        rotate_in_place(grad, cos, -sin, ctx.heads)
        return grad, None, None, None


def rotate_(x: Tensor, angles: tuple[Tensor, Tensor], heads: int) -> Tensor:
    """Rotate the first `heads` heads of x, T (heads D) or B S heads D, in place. angles: cos and sin, [B] S 1 D/2."""
    return Rotate.apply(x, *angles, heads)


def rotate_in_place(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> None:
    if uses_kernels(x):
        return kernels().rope_(heads_of(x, cos), cos, sin, heads)
    a, b = heads_of(x, cos).unflatten(0, (-1, cos.shape[-3]))[:, :, :heads].chunk(2, -1)
    left, right = a.to(cos.dtype), b.to(cos.dtype)
    rotated = torch.mul(left, cos).addcmul_(right, sin, value=-1), torch.mul(right, cos).addcmul_(left, sin)
    a.copy_(rotated[0])
    b.copy_(rotated[1])


def heads_of(x: Tensor, cos: Tensor) -> Tensor:
    """T (heads D) or B S heads D -> T heads D, as a view."""
    width = 2 * cos.shape[-1]
    return x.view(-1, x.shape[-1] // width if x.dim() == 2 else x.shape[-2], width)


def rotary_angles(positions: Tensor, model: config.Model, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles at positions [B] S, as [B] S 1 D/2, in the accumulation dtype of `dtype`."""
    dtype = acc_dtype(dtype)
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


# ---- who sees whom --------------------------------------------------------------------------------------------------

class Mask(NamedTuple):
    """Which keys a query sees. All that it says must hold.

    causal: none after the query. window: the query's own and window - 1 before it; 0: any. documents: those of the
    query's own document; numbers of queries (B rows) and of keys (B columns). offset: the position of the first query,
    counted from the first key. tensor: what `visible` returns, if it was computed before.
    """
    causal: bool = True
    window: int = 0
    documents: tuple[Tensor, Tensor] | None = None
    offset: int = 0
    tensor: Tensor | None = None

    def is_causal(self, rows: int, columns: int) -> bool | None:
        """What torch calls is_causal, for rows x columns scores: True, a causal mask from the first key on; False,
        every query sees every key; None, neither is so."""
        hides_future = self.causal and self.offset < columns - 1
        hides_past = self.window > 0 and self.offset + rows > self.window
        if self.documents is not None or hides_past or (hides_future and (self.offset or rows != columns)):
            return None
        return hides_future

    def visible(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """[B 1] rows columns, bool."""
        if self.tensor is not None:
            return self.tensor
        seen = torch.ones(rows, columns, dtype=torch.bool, device=device)
        if self.causal:
            seen = seen.tril_(self.offset)
        if self.window:
            seen = seen.triu_(self.offset - self.window + 1)
        if self.documents is not None:
            queries, keys = self.documents
            seen = seen & (queries[:, None, :, None] == keys[:, None, None, :])
        return seen


CAUSAL = Mask()


# ---- attention written out ------------------------------------------------------------------------------------------

def masked_scores(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """B N rows columns, -inf where a query does not see a key. k: B N columns D."""
    acc, shape = acc_dtype(q.dtype), (q.shape[2], k.shape[2])
    scores = (q.to(acc) * q.shape[-1] ** -0.5) @ k.to(acc).transpose(-1, -2)
    return scores if mask.is_causal(*shape) is False else scores.where(mask.visible(*shape, q.device), -torch.inf)


def for_each_query_head(q: Tensor, *keys_and_values: Tensor) -> list[Tensor]:
    """B K columns D -> B N columns D: each key and value head as often as query heads share it."""
    return [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in keys_and_values]


def attention_math(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Attention, written out. It saves the S x S scores, which the fused kernels never do."""
    k, v = for_each_query_head(q, k, v)
    return masked_scores(q, k, mask).softmax(-1).to(v.dtype) @ v


def math_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    k, v = for_each_query_head(q, k, v)
    scores = masked_scores(q, k, mask)
    lse = scores.logsumexp(-1, keepdim=True)
    o = (scores - lse).exp().nan_to_num() @ v.to(scores.dtype)  # nan: a row that sees nothing
    return o.to(q.dtype), lse[..., 0]


def math_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                  mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
    """With p = exp(scores - lse): dv = p^T do, ds = p (do v^T - sum(do o)), dq = ds k, dk = ds^T q."""
    acc, shared, scale = acc_dtype(q.dtype), (k.shape[1], -1), q.shape[-1] ** -0.5
    all_k, all_v = for_each_query_head(q, k.to(acc), v.to(acc))
    do, o = do.to(acc), o.to(acc)
    p = (masked_scores(q, all_k, mask) - lse.to(acc)[..., None]).exp()
    ds = p * (do @ all_v.transpose(-1, -2) - (do * o).sum(-1, keepdim=True)) * scale
    dk, dv = ds.transpose(-1, -2) @ q.to(acc), p.transpose(-1, -2) @ do
    return (ds @ all_k).to(q.dtype), *(x.unflatten(1, shared).sum(2).to(k.dtype) for x in (dk, dv))


# ---- torch's attention ----------------------------------------------------------------------------------------------

FUSED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """torch's fused attention. q B N S D, k and v B K S D -> B N S D.

    What --attention auto takes: on an H100 cuDNN's forward reaches 518 TFLOP/s and Triton's tutorial, written as
    flash.py is, 353 (causal, S 4096, D 128; at D 64 both 363: flash-attention's authors, 2024). But not for documents
    or windows on a GPU, a mask of S x S to torch: with one cuDNN took 39 ms (a sliding window), where causal took 5.3;
    Triton that skips what is hidden took 0.8 and 6.5 (forward, S 16384, D 64: pull request 137036 of pytorch, 2024).
    """
    causal, visible = mask.is_causal(q.shape[2], k.shape[2]), None
    if causal is None:  # with a mask, no fused GPU kernel takes grouped queries: S x S scores would be saved
        k, v = for_each_query_head(q, k, v)
        visible = mask.visible(q.shape[2], k.shape[2], q.device)
    with sdpa_kernel(FUSED, set_priority=True) if q.is_cuda else nullcontext():  # cuDNN's is the fastest on Hopper
        return F.scaled_dot_product_attention(q, k, v, visible, is_causal=bool(causal), enable_gqa=causal is not None)


def sdpa_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    causal = mask.is_causal(q.shape[2], k.shape[2])
    if q.is_cuda:
        if causal is None or q.dtype not in (torch.bfloat16, torch.float16):
            return math_forward(q, k, v, mask)
        o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, *for_each_query_head(q, k, v), 0.0, causal)
        return o, lse
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if causal is not None:
        return forward(q, k, v, 0.0, causal)
    visible = mask.visible(q.shape[2], k.shape[2], q.device)
    o, lse = forward(q, k, v, 0.0, attn_mask=as_term(visible, q.dtype))
    return o, lse.masked_fill(~visible.any(-1), -torch.inf)  # the kernel does not say so, and its o there is finite


def sdpa_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                  mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
    causal = mask.is_causal(q.shape[2], k.shape[2])
    if q.is_cuda:
        if causal is None or q.dtype not in (torch.bfloat16, torch.float16):
            return math_backward(do, q, k, v, o, lse, mask)
        shared, unused = (k.shape[1], -1), torch.empty(0, dtype=torch.int64, device=q.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            do, q, *for_each_query_head(q, k, v), o, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused,
            unused)
        return dq, dk.unflatten(1, shared).sum(2), dv.unflatten(1, shared).sum(2)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    if causal is not None:
        return backward(do, q, k, v, o, lse, 0.0, causal)
    visible = mask.visible(q.shape[2], k.shape[2], q.device)
    return backward(do, q, k, v, o, lse, 0.0, False, attn_mask=as_term(visible, q.dtype))


def as_term(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores: 0 or -inf. B 1 rows columns or 1 1 rows columns."""
    term = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
    return term if term.dim() == 4 else term[None, None]


# ---- a choice of attention ------------------------------------------------------------------------------------------

class Attention(NamedTuple):
    """An implementation. q B N rows D, k and v B K columns D; o as q; lse B N rows, in at least fp32, -inf where a row
    sees nothing.

    whole(q, k, v, mask) -> o, differentiable. forward(q, k, v, mask) -> o, lse. backward(do, q, k, v, o, lse, mask) ->
    dq, dk, dv, where o and lse may be those of more keys. saves_scores: whether `whole` saves S x S scores.
    maskless: the values of Mask.is_causal for which it reads no mask from memory.
    """
    whole: Callable[..., Tensor]
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    saves_scores: bool = False
    maskless: tuple[bool | None, ...] = (True, False, None)

    def prepared(self, mask: Mask, rows: int, columns: int, device: torch.device) -> Mask:
        """The mask with its tensor, if one is needed: computed once for all layers."""
        if mask.is_causal(rows, columns) in self.maskless:
            return mask
        return mask._replace(tensor=mask.visible(rows, columns, device))


MATH = Attention(attention_math, math_forward, math_backward, saves_scores=True, maskless=(False,))
SDPA = Attention(attention_sdpa, sdpa_forward, sdpa_backward, maskless=(True, False))
