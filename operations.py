"""What a Llama computes besides matmuls: norms, SwiGLU, rotary angles, attention; each with what it keeps.

Every one waits for memory, not for arithmetic, so on GPUs those of kernels.py take their places, which read and write
everything once. What is at least fp32 in every run ("wide"): angles, and the statistics of norms and softmax.

RMSNorm: Zhang & Sennrich 2019; SwiGLU: Shazeer 2020; rotary embedding: Su et al. 2021, its stretch: Llama Team 2024.
Pairs are turned as in the published weights (first half of a head with the second half).

Letters: B batch, S sequence, T = B S tokens, N query heads, K key and value heads, D head width.
"""
import importlib
from contextlib import nullcontext
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.nn.attention import SDPBackend, sdpa_kernel

import config
from param import accumulate_grad, at_least_fp32

FUSED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def kernels() -> ModuleType:
    """kernels.py, loaded where it is first used: it needs Triton, which machines without a GPU need not have."""
    return importlib.import_module("kernels")


def fused(x: torch.Tensor) -> bool:
    """Whether kernels of ours compute with x."""
    return x.is_cuda and x.dtype != torch.float64


# ---- norm, SwiGLU, rotary angles ------------------------------------------------------------------------------------

class Norm(Function):
    """RMSNorm (Zhang & Sennrich 2019) over the last dimension. Keeps its input and one number a token."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.weight, ctx.eps = weight, eps
        if fused(x):
            ctx.save_for_backward(x)
            return kernels().rms_norm(x, weight, eps)
        y, scale = rms_norm(x, weight, eps)
        ctx.save_for_backward(x, scale)
        return y

    @staticmethod
    def backward(ctx, dy):
        return norm_backward(ctx, dy, None), None, None


class AddNorm(Function):
    """(x + y, RMSNorm of it). Keeps the sum, which is the residual stream anyway, and one number a token."""

    @staticmethod
    def forward(ctx, x, y, weight, eps):
        ctx.weight, ctx.eps = weight, eps
        if fused(x):
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


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(x / rms times weight, 1 / rms)."""
    wide = x.to(at_least_fp32(x.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).mul_(weight).to(x.dtype), scale


def norm_backward(ctx, grad: torch.Tensor, dtotal: torch.Tensor | None) -> torch.Tensor:
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


def norm(x: torch.Tensor, weight: nn.Parameter, eps: float) -> torch.Tensor:
    return Norm.apply(x, weight, eps)


def add_norm(x: torch.Tensor, y: torch.Tensor, weight: nn.Parameter, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return AddNorm.apply(x, y, weight, eps)


class SwiGLU(Function):
    """silu(gate) * up (Shazeer 2020), gate and up side by side in x [..., 2 ffn]. Keeps x alone."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        if fused(x):
            return kernels().swiglu(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        if fused(x):
            return kernels().swiglu_backward(grad, x)
        gate, up = x.chunk(2, -1)
        dx = torch.empty_like(x)
        dgate, dup = dx.chunk(2, -1)
        torch.ops.aten.silu.out(gate, out=dup).mul_(grad)
        torch.mul(grad, up, out=dgate)
        torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
        return dx


class Rotate(Function):
    """Turn every pair (x[i], x[i + D/2]) of the first `heads` heads in x by the angle of its token, in place.

    Backward turns back, so nothing is kept; and what attention keeps is the memory that the matmul wrote.
    """

    @staticmethod
    def forward(ctx, x, cos, sin, heads):  # T (heads D) or T heads D; [B] S 1 D/2
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        ctx.mark_dirty(x)
        turn_(x, cos, sin, heads)
        return x

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        if fused(grad):
            return kernels().rope_backward(heads_of(grad, cos), cos, sin, ctx.heads).view(grad.shape), None, None, None
        grad = grad.clone(memory_format=torch.contiguous_format)
        turn_(grad, cos, -sin, ctx.heads)
        return grad, None, None, None


def turn_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> None:
    if fused(x):
        return kernels().rope_(heads_of(x, cos), cos, sin, heads)
    a, b = heads_of(x, cos).unflatten(0, (-1, cos.shape[-3]))[:, :, :heads].chunk(2, -1)
    left, right = a.to(cos.dtype), b.to(cos.dtype)
    turned = torch.mul(left, cos).addcmul_(right, sin, value=-1), torch.mul(right, cos).addcmul_(left, sin)
    a.copy_(turned[0])
    b.copy_(turned[1])


def heads_of(x: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """T (heads D) or T heads D -> T heads D, as a view."""
    width = 2 * cos.shape[-1]
    return x.view(len(x), x.shape[1:].numel() // width, width)


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


# ---- attention ------------------------------------------------------------------------------------------------------

def visible(places: torch.Tensor, keys: int, documents: torch.Tensor | None) -> torch.Tensor:
    """Which of `keys` keys each query sees: none behind its place, none of another document. [B 1] S keys, bool."""
    mask = places[:, None] >= torch.arange(keys, device=places.device)
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    return mask


def attention_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """torch's fused attention. q B N S D, k and v B K S D, mask True where visible (None: causal) -> B N S D.

    What --attention auto takes: on an H100 cuDNN's forward reaches 518 TFLOP/s and Triton's tutorial, written as
    flash.py is, 353 (causal, S 4096, D 128; at D 64 both 363: flash-attention's authors, 2024). But not for documents
    on a GPU, a mask of S x S to torch: with one cuDNN took 39 ms (a sliding window), which causal were 5.3; Triton that
    skips what is hidden took 0.8 and 6.5 (forward, S 16384, D 64: pull request 137036 of pytorch, 2024).
    """
    if mask is not None:  # with a mask, no fused GPU kernel takes grouped queries: S x S scores would be kept
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    with sdpa_kernel(FUSED, set_priority=True) if q.is_cuda else nullcontext():  # cuDNN's is the fastest on Hopper
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=mask is None)


def attention_math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The same sum written out. It keeps the S x S scores, which the fused kernels never do."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    if mask is None:
        mask = visible(torch.arange(q.shape[2], device=q.device), k.shape[2], None)
    wide = at_least_fp32(q.dtype)
    scores = (q.to(wide) * q.shape[-1] ** -0.5) @ k.to(wide).transpose(-1, -2)
    return scores.where(mask, -torch.inf).softmax(-1).to(v.dtype) @ v
