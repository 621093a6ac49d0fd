"""What a Llama computes besides linear layers: RMSNorm, SwiGLU, rotary embedding, masks, attention; with derivatives.

Each is written here in plain torch, which reads and writes memory many times for few FLOPs. Fused kernels replace it:

    RMSNorm, SwiGLU, rotary embedding    kernels.py on a GPU; plain torch on a CPU and in fp64 (see `try_kernel`)
    attention                            sdpa.py (torch's kernels) or flash.py (in Triton), by --attention, mask and
                                         device: see cp.choose_attention. --attention math: plain torch, as here

Rotary angles and the statistics of norms and softmax are in the accumulation dtype, which is at least fp32.

RMSNorm: Zhang & Sennrich 2019; SwiGLU: Shazeer 2020; rotary embedding: Su et al. 2021, its scaling: Llama Team 2024;
sliding windows: Beltagy et al. 2020, as in Mistral: Jiang et al. 2023.
Shapes: B batch, S sequence, T = B S, N query heads, K key and value heads, D head width, F ffn, rows x columns scores.
"""
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from core.config import Model
from core.gradients import accumulate_grad
from core.param import Spec, acc_dtype

allows_kernels = True  # whether --kernels does; train.py sets it


def uses_kernels(x: Tensor) -> bool:
    """Whether kernels.py computes with x, rather than plain torch."""
    return allows_kernels and x.is_cuda and x.dtype != torch.float64


def try_kernel(x: Tensor, compute: Callable[..., Any]) -> Any:
    """compute(kernels.py), which runs whole or raises KernelError before it changes anything (kernels.py prints why,
    once). None then, and where `uses_kernels` is False: plain torch has to take over."""
    if uses_kernels(x):
        import kernels  # needs Triton, which a CPU does without
        with suppress(kernels.KernelError):
            return compute(kernels)


# ---- RMSNorm --------------------------------------------------------------------------------------------------------

class RMSNormFunction(Function):
    """(x, RMSNorm(x)), or with y (x + y, RMSNorm(x + y)), over the last dimension: one backward sums the gradients that
    come from both. Saves what is normalised (the residual stream, which is there anyway) and, in plain torch, 1 / rms
    of each row. With x_hat = x / rms and g = dout * weight: dx = (g - x_hat mean(g x_hat)) / rms."""

    @staticmethod
    def forward(ctx, x, y, weight, eps):
        ctx.set_materialize_grads(False)  # a result that is not used has the gradient None
        ctx.weight, ctx.eps, ctx.adds = weight, eps, y is not None
        if found := try_kernel(x, lambda kernels: kernels.rms_norm(x, y, weight, eps)):
            (total, out), rstd = found, None
        else:
            total = x if y is None else x + y
            total_acc = total.to(acc_dtype(x.dtype))
            rstd = torch.rsqrt(total_acc.square().mean(-1, keepdim=True) + eps)
            out = (total_acc * rstd).mul_(weight).to(x.dtype)
        ctx.save_for_backward(total, rstd)
        return total, out

    @staticmethod
    def backward(ctx, dtotal, dout):
        total, rstd = ctx.saved_tensors
        weight, eps = ctx.weight, ctx.eps
        if dout is None:  # rare; a missing dtotal is not, and saves reading one
            dout = torch.zeros_like(total)
        if found := try_kernel(total, lambda kernels: kernels.rms_norm_backward(dout, dtotal, total, weight, eps)):
            dx, dweight = found
            accumulate_grad(weight, lambda out: out.add_(dweight), defer=False)
        else:
            if rstd is None:  # forward's kernel saves none
                rstd = torch.rsqrt(total.to(acc_dtype(total.dtype)).square().mean(-1, keepdim=True) + eps)
            x_hat = total.detach() * rstd  # in the accumulation dtype, like everything below
            dweight_terms = dout * x_hat
            accumulate_grad(weight, lambda out: out.add_(dweight_terms.flatten(0, -2).sum(0)), defer=False)
            weight = weight.to(rstd.dtype)
            component = (dweight_terms @ weight)[..., None] / total.shape[-1]
            dx = (dout * weight).addcmul_(x_hat, component, value=-1).mul_(rstd).to(total.dtype)
            if dtotal is not None:
                dx.add_(dtotal)
        return dx, dx if ctx.adds else None, None, None


class RMSNorm(nn.Module):
    """x / rms(x) * weight, over the last dimension of x [..., width].

    along: the weight's Spec.along, see core/param.py.
    """

    def __init__(self, make: Callable[[Spec], nn.Parameter], name: str, width: int, eps: float,
                 along: dict[str, int | str]):
        super().__init__()
        self.weight = make(Spec(name, (width,), along, mean=1.0, decay=False))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return RMSNormFunction.apply(x, None, self.weight, self.eps)[1]

    def branch(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(x, its norm), or with y (x + y, the norm of that): the residual stream, and what leaves it here."""
        return RMSNormFunction.apply(x, y, self.weight, self.eps)


# ---- SwiGLU ---------------------------------------------------------------------------------------------------------

class SwiGLUFunction(Function):
    """silu(gate) * up, where x is gate and up side by side: [..., 2F] -> [..., F]. With row_factors [R] each row of
    this result is multiplied by its own, and backward repeats SwiGLU(x). Saves x and row_factors alone."""

    @staticmethod
    def forward(ctx, x, row_factors):
        ctx.save_for_backward(x, row_factors)
        y = swiglu_no_grad(x)
        return y if row_factors is None else y.mul_(row_factors[:, None])

    @staticmethod
    def backward(ctx, dy):
        x, row_factors = ctx.saved_tensors
        if row_factors is None:
            return swiglu_backward(dy, x), None
        drow_factors = swiglu_no_grad(x).mul_(dy).sum(-1, dtype=row_factors.dtype)
        return swiglu_backward(dy, x).mul_(row_factors[:, None]), drow_factors


def swiglu(x: Tensor, row_factors: Tensor | None = None) -> Tensor:
    return SwiGLUFunction.apply(x, row_factors)


def swiglu_no_grad(x: Tensor) -> Tensor:
    if (y := try_kernel(x, lambda kernels: kernels.swiglu(x))) is not None:
        return y
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


def swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """dx [..., 2F], from dy [..., F] and x [..., 2F]."""
    if (dx := try_kernel(x, lambda kernels: kernels.swiglu(x, dy=dy))) is not None:
        return dx
    gate, up = x.chunk(2, -1)
    dx = torch.empty_like(x)
    dgate, dup = dx.chunk(2, -1)  # views: results are written into dx, without temporaries
    torch.ops.aten.silu.out(gate, out=dup).mul_(dy)
    torch.mul(dy, up, out=dgate)
    torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
    return dx


# ---- rotary embedding -----------------------------------------------------------------------------------------------
# In heads of queries and keys, pairs (a, b) of channels become (a cos - b sin, b cos + a sin). Which pairs:
#
#     rotate_and_split    pairs (x[i], x[i + D/2]) of all channels                        as in Llama
#     rotate_tail         pairs (x[2i], x[2i + 1]) of the last rotated_dim channels       as in DeepSeek: mla.py
#
# Both write into x, which must not be used after this: what they return is its memory.

def rotary_angles(positions: Tensor, model: Model, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin at positions [S] or [B, S]: [..., S, 1, rotated_dim/2], one for each pair, in acc_dtype(dtype)."""
    dtype = acc_dtype(dtype)
    even = torch.arange(0, model.rotated_dim, 2, device=positions.device, dtype=dtype)
    frequency = model.rope_theta ** (-even / model.rotated_dim)
    if model.rope_scaling != 1:
        # Llama 3.1: pairs that turn less than once in the 8192 tokens of pre-training get 1 / rope_scaling of their
        # frequency, those that turn more than 4 times all of it, and it is interpolated in between.
        turns = 8192 * frequency / (2 * torch.pi)
        unscaled = ((turns - 1) / (4 - 1)).clamp(0, 1)
        frequency = frequency * (unscaled + (1 - unscaled) / model.rope_scaling)
    angle = positions[..., None, None].to(dtype) * frequency
    return angle.cos(), angle.sin()


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, rotated_heads: int, sign: float, tail: bool) -> None:
    """Rotate the first heads of x [B, S, N, D] by sign x angle, in place. tail: pairs are those of rotate_tail."""
    if tail:
        rotated = x[:, :, :rotated_heads, x.shape[-1] - 2 * cos.shape[-1]:]
        a, b = rotated[..., 0::2], rotated[..., 1::2]
    elif try_kernel(x, lambda kernels: kernels.rope_(x, cos, sin, rotated_heads, sign)) is not None:
        return
    else:
        a, b = x[:, :, :rotated_heads].chunk(2, -1)
    a_acc, b_acc = a.to(cos.dtype), b.to(cos.dtype)
    rotated_a = torch.mul(a_acc, cos).addcmul_(b_acc, sin, value=-sign)
    b.copy_(torch.mul(b_acc, cos).addcmul_(a_acc, sin, value=sign))
    a.copy_(rotated_a)


class RotateFunction(Function):
    """Both layouts. Saves only the angles, which all layers share. Backward rotates by minus these."""

    @staticmethod
    def forward(ctx, x, cos, sin, heads, tail=False):
        ctx.save_for_backward(cos, sin)
        ctx.rotated_heads, ctx.tail = sum(heads[:2]), tail  # of queries and keys; values come third
        x = x.detach()  # rotated in place without autograd's knowledge: the backward that made x must not read it
        rotate_(x, cos, sin, ctx.rotated_heads, 1.0, tail)
        return tuple(part.detach() for part in x.split(heads, dim=2))  # else autograd would take them for views

    @staticmethod
    def backward(ctx, *grads):
        dx = torch.cat(grads, dim=2)
        rotate_(dx, *ctx.saved_tensors, ctx.rotated_heads, -1.0, ctx.tail)
        return dx, None, None, None, None


def rotate_and_split(x: Tensor, angles: tuple[Tensor, Tensor], heads: list[int]) -> tuple[Tensor, ...]:
    """x [B, S, N, D] -> queries and keys, rotated, and values as they are, with `heads` of each, N in all. heads = [N]:
    x is queries or keys alone. angles: rotary_angles of x's tokens."""
    return RotateFunction.apply(x, *angles, heads)


def rotate_tail(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """x [B, S, N, D], with the tail of all heads rotated: latent attention's decoupled embedding."""
    rotated, = RotateFunction.apply(x, *angles, [x.shape[2]], True)
    return rotated


# ---- masks ----------------------------------------------------------------------------------------------------------

class Mask(NamedTuple):
    """Which keys (columns) each query (row) sees in a block of scores: those for which all of this holds.

    causal: the key is not after the query. window: it is less than `window` positions before the query; 0: any number.
    documents: key and query belong to the same document. A pair of document ids: of each query, [B, rows], and of each
        key, [B, columns]. Ids are any integers, and a document need not be contiguous. None: there is one document.
    offset: the first query's position minus the first key's. 0 where queries and keys are those of the same tokens; in
        generation the number of cached keys; between two chunks of a sequence (cp.py) their distance.
    tensor: the result of `visible`, if AttentionKernel.prepare_mask has computed it already.
    """
    causal: bool = True
    window: int = 0
    documents: tuple[Tensor, Tensor] | None = None
    offset: int = 0
    tensor: Tensor | None = None

    def kind(self, rows: int, columns: int) -> str:
        """For [rows, columns] scores. "unmasked": every query sees every key. "causal": a square where query i sees
        keys 0 to i, torch's is_causal. "general": anything else, which torch takes only as a boolean tensor."""
        hides_later = self.causal and self.offset < columns - 1  # the first query sees keys up to `offset`
        hides_earlier = self.window > 0 and self.offset + rows > self.window  # the last query no longer sees key 0
        is_square = self.offset == 0 and rows == columns
        if self.documents is not None or hides_earlier or (hides_later and not is_square):
            return "general"
        return "causal" if hides_later else "unmasked"

    def visible(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """True where the query sees the key: [rows, columns], or with documents [B, 1, rows, columns]."""
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


# ---- attention ------------------------------------------------------------------------------------------------------

class AttentionKernel(NamedTuple):
    """An implementation of attention. q: [B, N, rows, D]; k and v: [B, K, columns, D], K a divisor of N.

    attend(q, k, v, mask) -> o [B, N, rows, D]: differentiable.
    forward(q, k, v, mask) -> (o, lse): attention to one block of keys; cp.py merges those of all blocks.
        lse [B, N, rows]: logsumexp of each row's scores, in at least fp32, -inf where a row sees no key.
    backward(do, q, k, v, o, lse, mask) -> (dq, dk, dv): the block's share of the gradients; o, lse and do are merged.
    saves_scores: attend saves [rows, columns] scores for backward, so selective recomputation recomputes the attention.
    kinds_as_tensor: kinds of mask (Mask.kind) that attend takes as a tensor, which prepare_mask makes for all layers.
    """
    attend: Callable[..., Tensor]
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    saves_scores: bool = False
    kinds_as_tensor: tuple[str, ...] = ()

    def prepare_mask(self, mask: Mask, rows: int, columns: int, device: torch.device) -> Mask:
        """Add the mask's tensor if `attend` reads it, so that it is computed once and not in every layer."""
        if mask.kind(rows, columns) in self.kinds_as_tensor:
            return mask._replace(tensor=mask.visible(rows, columns, device))
        return mask


def masked_scores(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """q [B, N, rows, D], k [B, N, columns, D] -> [B, N, rows, columns], -inf where a query does not see a key."""
    acc, rows, columns = acc_dtype(q.dtype), q.shape[2], k.shape[2]
    scores = (q.to(acc) * q.shape[-1] ** -0.5) @ k.to(acc).transpose(-1, -2)
    if mask.kind(rows, columns) == "unmasked":
        return scores
    return scores.where(mask.visible(rows, columns, q.device), -torch.inf)


def repeat_kv_heads(q: Tensor, *keys_and_values: Tensor) -> list[Tensor]:
    """[B, K, columns, D] -> [B, N, columns, D]: a copy of each key and value head for every query head that uses it."""
    return [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in keys_and_values]


def attention_math(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Saves all scores, [B, N, rows, columns], which the fused kernels never do."""
    k, v = repeat_kv_heads(q, k, v)
    return masked_scores(q, k, mask).softmax(-1).to(v.dtype) @ v


def math_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    k, v = repeat_kv_heads(q, k, v)
    scores = masked_scores(q, k, mask)
    lse = scores.logsumexp(-1, keepdim=True)
    o = (scores - lse.clamp(min=torch.finfo(lse.dtype).min)).exp() @ v.to(scores.dtype)  # 0 in rows that see nothing
    return o.to(q.dtype), lse[..., 0]


def math_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                  mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
    """With p = exp(scores - lse): dv = p^T do, ds = p (do v^T - sum(do o)) / sqrt(D), dq = ds k, dk = ds^T q."""
    acc = acc_dtype(q.dtype)
    k_acc, v_acc = repeat_kv_heads(q, k.to(acc), v.to(acc))
    do, o = do.to(acc), o.to(acc)
    p = (masked_scores(q, k_acc, mask) - lse.to(acc)[..., None]).exp()  # lse, merged, is finite: a query sees itself
    ds = p * (do @ v_acc.transpose(-1, -2) - (do * o).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    dk, dv = ds.transpose(-1, -2) @ q.to(acc), p.transpose(-1, -2) @ do  # of each query head
    dk, dv = (dx.unflatten(1, (k.shape[1], -1)).sum(2).to(k.dtype) for dx in (dk, dv))
    return (ds @ k_acc).to(q.dtype), dk, dv


MATH = AttentionKernel(attention_math, math_forward, math_backward, saves_scores=True,
                       kinds_as_tensor=("causal", "general"))
