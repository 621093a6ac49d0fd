"""The operations of a Llama besides linear layers: RMSNorm, SwiGLU, rotary embedding, masks, attention.

                 forward                                    backward: from dy, or do, and what forward saved
    RMSNorm      r = sqrt(mean(x^2) + eps)                  g = dy w
                 x_hat = x / r                              dx = (g - x_hat mean(g x_hat)) / r
                 y = x_hat w                                dw = sum over rows of dy x_hat
    SwiGLU       s = sigmoid(gate)                          dgate = dy up s (1 + gate (1 - s))
                 y = gate s up                              dup = dy gate s
    rotary       (a, b) becomes                             the same with -sin in place of sin
                 (a cos - b sin, b cos + a sin)
    attention    p = softmax(q k^T / sqrt(D))               dv = p^T do
                 o = p v                                    ds = p (do v^T - sum over D of do o) / sqrt(D)
                                                            dq = ds k,  dk = ds^T q

Every operation is written here in plain torch, with its derivative. Plain torch reads and writes memory many
times for few FLOPs, so fused kernels replace it where they run:

    RMSNorm, SwiGLU, rotary embedding    kernels.py on a GPU (see `try_kernel`)
    attention                            sdpa.py (torch's kernels) or flash.py (in Triton): cp.choose_attention
                                         picks one by --attention, mask and device. --attention math picks
                                         the plain torch of this file.

Rotary angles and the statistics of norms and softmax are computed in the accumulation dtype, at least fp32.

RMSNorm: Zhang & Sennrich 2019; SwiGLU: Shazeer 2020; rotary embedding: Su et al. 2021, its scaling: Llama Team 2024;
sliding windows: Beltagy et al. 2020, as in Mistral: Jiang et al. 2023.
Shapes: B batch, S sequence, T = B S, N query heads, K key and value heads, D head width, F ffn, rows x columns scores.
"""
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from core.collectives import run_demo
from core.config import Model
from core.gradients import accumulate_grad
from core.param import Spec, acc_dtype

# ---- a kernel, or plain torch ---------------------------------------------------------------------------------------
# Every operation that has a kernel is written like this:
#
#     y = try_kernel(x, lambda kernels: kernels.swiglu(x))
#     if y is None:
#         y = ...                                               # the same in plain torch
#
#     where                                    the lambda is                              try_kernel returns
#     CPU, fp64, or --kernels torch            not called, and Triton is not imported     None
#     GPU                                      called with the module kernels.py          what the lambda returns
#     GPU, where a kernel does not compile     called, and raises KernelError before      None, now and from now on
#     or launch                                it changes anything; the reason is
#                                              printed once

allows_kernels = True  # False with --kernels torch: train.py sets it


def uses_kernels(x: Tensor) -> bool:
    """Whether kernels, not plain torch, compute with x."""
    return allows_kernels and x.is_cuda and x.dtype != torch.float64


def try_kernel(x: Tensor, compute: Callable[..., Any]) -> Any:
    """Return compute(kernels), where `kernels` is the module kernels.py, or None if plain torch has to compute.

    x: the tensor whose device and dtype decide. compute must not change anything before its first launch.
    """
    if uses_kernels(x):
        import kernels  # needs Triton, which a CPU does without
        with suppress(kernels.KernelError):
            return compute(kernels)
    return None


# ---- RMSNorm --------------------------------------------------------------------------------------------------------
# With a residual stream, add and norm are one Function:    total = x + residual,  out = RMSNorm(total)
# Both results are used later, so backward gets a gradient for each, and sums them:
#
#     dx = dresidual = dtotal + (g - x_hat mean(g x_hat)) / r        g = dout w

class RMSNormFunction(Function):
    """Return (total, RMSNorm(total)), where total = x + residual, or x if residual is None. Norms are over the last
    dimension.

    Saves the tensor that it normalises, `total`. This is the residual stream, which is kept anyway. Plain torch also
    saves 1 / r of each row, and the kernel computes it again. The weight gets its gradient from accumulate_grad
    (core/gradients.py), which adds it to the gradient buffer, and not from autograd.
    """

    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        ctx.set_materialize_grads(False)  # a result that is not used has the gradient None
        ctx.weight, ctx.eps, ctx.adds = weight, eps, residual is not None
        results = try_kernel(x, lambda kernels: kernels.rms_norm(x, residual, weight, eps))
        if results is not None:
            total, out = results
            rstd = None
        else:
            total = x if residual is None else x + residual
            total_acc = total.to(acc_dtype(x.dtype))
            rstd = torch.rsqrt(total_acc.square().mean(-1, keepdim=True) + eps)  # 1 / r
            out = (total_acc * rstd).mul_(weight).to(x.dtype)
        ctx.save_for_backward(total, rstd)
        return total, out

    @staticmethod
    def backward(ctx, dtotal, dout):
        total, rstd = ctx.saved_tensors
        weight, eps = ctx.weight, ctx.eps
        if dout is None:  # rare. dtotal is often None, and then the kernel reads one tensor less
            dout = torch.zeros_like(total)
        results = try_kernel(total, lambda kernels: kernels.rms_norm_backward(dout, dtotal, total, weight, eps))
        if results is not None:
            dx, dweight = results
            accumulate_grad(weight, lambda out: out.add_(dweight), defer=False)
        else:
            if rstd is None:  # forward's kernel ran, and backward's does not
                rstd = torch.rsqrt(total.to(acc_dtype(total.dtype)).square().mean(-1, keepdim=True) + eps)
            x_hat = total * rstd  # in the accumulation dtype, like everything below
            dweight_terms = dout * x_hat
            accumulate_grad(weight, lambda out: out.add_(dweight_terms.flatten(0, -2).sum(0)), defer=False)
            weight = weight.to(rstd.dtype)
            component = (dweight_terms @ weight)[..., None] / total.shape[-1]  # mean(g x_hat)
            dx = (dout * weight).addcmul_(x_hat, component, value=-1).mul_(rstd).to(total.dtype)
            if dtotal is not None:
                dx.add_(dtotal)
        return dx, dx if ctx.adds else None, None, None


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension of x [..., width], with a weight [width].

    make: the function that makes a parameter from its Spec. along: the weight's Spec.along, see core/param.py.
    """

    def __init__(self, make: Callable[[Spec], nn.Parameter], name: str, width: int, eps: float,
                 along: dict[str, int | str]):
        super().__init__()
        self.weight = make(Spec(name, (width,), along, mean=1.0, decay=False))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return RMSNormFunction.apply(x, None, self.weight, self.eps)[1]

    def branch(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the residual stream, to which `residual` is added if it is given, and the norm of the stream.

        x: the stream. residual: what a block has computed for it, or None.
        """
        return RMSNormFunction.apply(x, residual, self.weight, self.eps)


# ---- SwiGLU ---------------------------------------------------------------------------------------------------------

def swiglu(x: Tensor, row_factors: Tensor | None = None) -> Tensor:
    """Return gate sigmoid(gate) up, where x is gate and up side by side: [..., 2F] -> [..., F].

    row_factors: [rows], for x [rows, 2F]: each row of the result is multiplied by its factor, such as the router's
        weight of the expert.
    """
    return SwiGLUFunction.apply(x, row_factors)


class SwiGLUFunction(Function):
    """Saves x and row_factors, not the result. Backward computes the result again if it needs it, for the gradient of
    row_factors."""

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


def swiglu_no_grad(x: Tensor) -> Tensor:
    """Return gate sigmoid(gate) up, [..., F], of x [..., 2F], outside of autograd."""
    y = try_kernel(x, lambda kernels: kernels.swiglu(x))
    if y is not None:
        return y
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


def swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Return dx [..., 2F], dgate and dup side by side, from dy [..., F] and x [..., 2F]."""
    dx = try_kernel(x, lambda kernels: kernels.swiglu(x, dy=dy))
    if dx is not None:
        return dx
    gate, up = x.chunk(2, -1)
    dx = torch.empty_like(x)
    dgate, dup = dx.chunk(2, -1)  # views: results are written into dx, without temporaries
    torch.ops.aten.silu.out(gate, out=dup).mul_(dy)
    torch.mul(dy, up, out=dgate)
    torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
    return dx


# ---- rotary embedding -----------------------------------------------------------------------------------------------
# A head of D channels consists of pairs. Each pair (a, b) of a query or key is turned by an angle, which is
# the token's position times the pair's frequency. Two functions differ in which channels are a pair:
#
#     rotate_and_split    (x[i], x[i + D/2]), of all D channels                     as in Hugging Face's Llama
#     rotate_tail         (x[2i], x[2i + 1]), of the last rotated_dim channels      as in DeepSeek: mla.py
#
# Meta's Llama pairs (x[2i], x[2i + 1]), too. Hugging Face's checkpoints have the rows of wq and wk in another order,
# which makes the results equal.
#
# Both functions write into x and return its memory, so x must not be used afterwards.

def rotary_angles(positions: Tensor, model: Model, dtype: torch.dtype, length: int = 0) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the angles, in acc_dtype(dtype): [S] or [B, S] positions -> [..., S, 1, rotated_dim/2], one
    angle per pair. With YaRN both include model.rotary_factor.

    length: the tokens of a whole sequence. Only --rope-type dynamic reads it.
    """
    dtype = acc_dtype(dtype)
    even = torch.arange(0, model.rotated_dim, 2, device=positions.device, dtype=dtype)
    angle = positions[..., None, None].to(dtype) * rotary_frequencies(even, model, length)
    cos, sin = angle.cos(), angle.sin()
    if model.rotary_factor != 1:
        cos, sin = cos * model.rotary_factor, sin * model.rotary_factor
    return cos, sin


# For contexts longer than in pre-training, slow pairs would come to angles that they had never reached. So their
# frequency is lowered. With L = original_seq_len, a pair of frequency f makes L f / 2 pi turns in pre-training.
#
#     linear     divides every frequency by rope_scaling, as if positions were closer to each other (Chen et al. 2023).
#     llama3     divides it for pairs that make at most 1 turn, and keeps it for pairs that make at least fast_turns.
#                Between them, the share that is kept rises linearly with the number of turns (Llama 3.1).
#     yarn       does the same, but the share rises linearly with the number of the pair (Peng et al. 2023). Besides,
#                scores are multiplied by a factor: see rotary_factor and score_factor of core/config.py's Model.
#     dynamic    raises theta, for sequences longer than L only. The fastest pair keeps its frequency, and the slowest
#                is divided by rope_scaling x length / L - (rope_scaling - 1).

def rotary_frequencies(even: Tensor, model: Model, length: int) -> Tensor:
    """Return the angle per token of each pair, [rotated_dim/2]. even: 0, 2, ..., rotated_dim - 2."""
    d, theta, factor = model.rotated_dim, model.rope_theta, model.rope_scaling
    if model.rope_type == "dynamic":
        growth = max(length / model.original_seq_len, 1.0)
        theta = theta * (factor * growth - (factor - 1)) ** (d / (d - 2))
    frequency = theta ** (-even / d)
    if factor == 1 or model.rope_type == "dynamic":
        return frequency
    if model.rope_type == "linear":
        return frequency / factor
    if model.rope_type == "llama3":
        turns = model.original_seq_len * frequency / (2 * torch.pi)
        kept = ((turns - 1) / (model.fast_turns - 1)).clamp(0, 1)
    else:
        def pair_with(turns: float) -> float:  # its number, if pairs were numbered continuously
            return d * math.log(model.original_seq_len / (2 * math.pi * turns)) / (2 * math.log(theta))

        first = max(math.floor(pair_with(model.fast_turns)), 0)  # the last pair that is kept
        last = min(math.ceil(pair_with(1)), d - 1)  # the first pair that is divided
        kept = 1 - ((even / 2 - first) / (last - first or 0.001)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / factor)


def rotate_and_split(x: Tensor, angles: tuple[Tensor, Tensor], heads: list[int]) -> tuple[Tensor, ...]:
    """Split x [B, S, N, D] into queries, keys and values, and rotate the first two.

    angles: rotary_angles of x's tokens.
    heads: how many heads each part has, N in all. With [N], all heads are queries, or all are keys.
    """
    return RotateFunction.apply(x, *angles, heads)


def rotate_tail(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the last channels of every head of x [B, S, N, D], as latent attention's decoupled embedding does."""
    rotated, = RotateFunction.apply(x, *angles, [x.shape[2]], True)
    return rotated


class RotateFunction(Function):
    """Rotates pairs of both kinds. Saves only the angles, which all layers share. Backward turns gradients back by the
    same angles."""

    @staticmethod
    def forward(ctx, x, cos, sin, heads, tail=False):
        ctx.save_for_backward(cos, sin)
        ctx.rotated_heads, ctx.tail = sum(heads[:2]), tail  # of queries and keys; values come third
        # x is changed in place without mark_dirty, through a detached alias, so that autograd does not refuse it. This
        # is right only because no operation that makes x (a matmul, RMSNorm, a gather) reads its result in backward.
        x = x.detach()
        rotate_(x, cos, sin, ctx.rotated_heads, 1.0, tail)
        # split returns views of one tensor. Autograd would track them as views, and refuse to change them in place.
        # Detached, they are results like any other.
        return tuple(part.detach() for part in x.split(heads, dim=2))

    @staticmethod
    def backward(ctx, *grads):
        dx = torch.cat(grads, dim=2)
        rotate_(dx, *ctx.saved_tensors, ctx.rotated_heads, -1.0, ctx.tail)
        return dx, None, None, None, None


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, rotated_heads: int, sign: float, tail: bool) -> None:
    """Turn the pairs of the first heads of x [B, S, N, D] by sign x angle, in place.

    tail: whether to pair channels as rotate_tail does. There is no kernel for it.
    """
    if tail:
        rotated = x[:, :, :rotated_heads, x.shape[-1] - 2 * cos.shape[-1]:]
        a, b = rotated[..., 0::2], rotated[..., 1::2]
    else:
        if try_kernel(x, lambda kernels: kernels.rope_(x, cos, sin, rotated_heads, sign)) is not None:
            return
        a, b = x[:, :, :rotated_heads].chunk(2, -1)
    a_acc, b_acc = a.to(cos.dtype), b.to(cos.dtype)
    rotated_a = torch.mul(a_acc, cos).addcmul_(b_acc, sin, value=-sign)
    b.copy_(torch.mul(b_acc, cos).addcmul_(a_acc, sin, value=sign))
    a.copy_(rotated_a)


# ---- masks ----------------------------------------------------------------------------------------------------------

class Mask(NamedTuple):
    """Which keys (columns) each query (row) sees in a block of scores. A query sees the keys that meet all conditions:

    causal: The key is not after the query.
    window: The key is less than `window` positions before the query. 0: there is no window.
    documents: The key belongs to the query's document. This is a pair of tensors of document ids, [B, rows] for the
        queries and [B, columns] for the keys. Ids are integers below 2^31, and a document need not be contiguous.
        None: there is one document.

    offset: the position of the first query minus the position of the first key. It is 0 if queries and keys are the
        same tokens, the number of cached keys in generation, and the distance of two chunks of a sequence in cp.py.
    tensor: the result of `visible`, if AttentionKernel.prepare_mask has computed it already.
    """
    causal: bool = True
    window: int = 0
    documents: tuple[Tensor, Tensor] | None = None
    offset: int = 0
    tensor: Tensor | None = None

    def kind(self, rows: int, columns: int) -> str:
        """Return the kind of mask of [rows, columns] scores:

            "unmasked"    every query sees every key
            "causal"      a square in which query i sees keys 0 to i: torch's is_causal
            "general"     any other, which torch takes only as a boolean tensor
        """
        hides_later = self.causal and self.offset < columns - 1  # the first query sees keys up to `offset`
        hides_earlier = self.window > 0 and self.offset + rows > self.window  # the last query no longer sees key 0
        is_square = self.offset == 0 and rows == columns
        if self.documents is not None or hides_earlier or (hides_later and not is_square):
            return "general"
        return "causal" if hides_later else "unmasked"

    def visible(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """Return True where the query sees the key: [rows, columns], or with documents [B, 1, rows, columns]."""
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
    """An implementation of attention. q: [B, N, rows, D]. k: [B, K, columns, D], with K a divisor of N: N/K query heads
    share a key and value head. v: [B, K, columns, V], with V = D except in latent attention, where V <= D (mla.py).

    attend(q, k, v, mask) -> o [B, N, rows, V]
        Attention over whole sequences. Differentiable.
    forward(q, k, v, mask) -> (o, lse)
        Attention to one block of keys. cp.py merges the results of all blocks. lse [B, N, rows]: logsumexp of each
        row's scores, in at least fp32. It is -inf where a row sees no key.
    backward(do, q, k, v, o, lse, mask) -> (dq, dk, dv)
        Computes the block's term of the gradients. do, o and lse belong to the merged result.
    saves_scores: whether attend saves [rows, columns] scores for backward. If so, selective recomputation recomputes
        attention.
    kinds_as_tensor: the kinds of mask (Mask.kind) that attend takes as a tensor. prepare_mask makes it for all layers.
    """
    attend: Callable[..., Tensor]
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    saves_scores: bool = False
    kinds_as_tensor: tuple[str, ...] = ()

    def prepare_mask(self, mask: Mask, rows: int, columns: int, device: torch.device) -> Mask:
        """Return the mask with its tensor if `attend` reads one, so that it is computed once, not in every layer."""
        if mask.kind(rows, columns) in self.kinds_as_tensor:
            return mask._replace(tensor=mask.visible(rows, columns, device))
        return mask


def masked_scores(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """Return q k^T / sqrt(D), [B, N, rows, columns], with -inf where a query does not see a key. q: [B, N, rows, D].
    k: [B, N, columns, D]."""
    acc, rows, columns = acc_dtype(q.dtype), q.shape[2], k.shape[2]
    scores = (q.to(acc) * q.shape[-1] ** -0.5) @ k.to(acc).transpose(-1, -2)
    if mask.kind(rows, columns) == "unmasked":
        return scores
    return scores.where(mask.visible(rows, columns, q.device), -torch.inf)


def repeat_kv_heads(q: Tensor, *keys_and_values: Tensor) -> list[Tensor]:
    """Copy each key and value head for every query head that uses it: [B, K, columns, D] -> [B, N, columns, D]."""
    return [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in keys_and_values]


def attention_math(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """`attend` in plain torch. Autograd saves all scores, [B, N, rows, columns], which fused kernels never do."""
    k, v = repeat_kv_heads(q, k, v)
    return masked_scores(q, k, mask).softmax(-1).to(v.dtype) @ v


def math_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """`forward` in plain torch: p = exp(scores - lse), o = p v."""
    k, v = repeat_kv_heads(q, k, v)
    scores = masked_scores(q, k, mask)
    lse = scores.logsumexp(-1, keepdim=True)
    # The clamp is for rows that see no key. Their lse is -inf, and with the clamp their o becomes 0, not NaN.
    o = (scores - lse.clamp(min=torch.finfo(lse.dtype).min)).exp() @ v.to(scores.dtype)
    return o.to(q.dtype), lse[..., 0]


def math_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                  mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
    """`backward` in plain torch, by the formulas at the top of this file. It computes p again from lse."""
    acc = acc_dtype(q.dtype)
    k_acc, v_acc = repeat_kv_heads(q, k.to(acc), v.to(acc))
    do, o = do.to(acc), o.to(acc)
    # The lse of the merged result is finite, because every query sees at least itself.
    p = (masked_scores(q, k_acc, mask) - lse.to(acc)[..., None]).exp()
    ds = p * (do @ v_acc.transpose(-1, -2) - (do * o).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    dk, dv = ds.transpose(-1, -2) @ q.to(acc), p.transpose(-1, -2) @ do  # of each query head
    # Sum over the query heads that share a key and value head.
    dk, dv = (dx.unflatten(1, (k.shape[1], -1)).sum(2).to(k.dtype) for dx in (dk, dv))
    return (ds @ k_acc).to(q.dtype), dk, dv


MATH = AttentionKernel(attention_math, math_forward, math_backward, saves_scores=True,
                       kinds_as_tensor=("causal", "general"))


# ---- demo: python operations.py -------------------------------------------------------------------------------------

def saved_bytes(compute: Callable[[], Any], inputs: list[Tensor]) -> int:
    """Return how many bytes autograd saves for backward besides the inputs."""
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = compute()  # keeps the storages alive, so that no address is reused
    for x in inputs:
        storages.pop(x.untyped_storage().data_ptr(), None)
    del result
    return sum(storages.values())


def plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    x_acc = x.to(acc_dtype(x.dtype))
    return (x_acc * torch.rsqrt(x_acc.square().mean(-1, keepdim=True) + 1e-5) * weight).to(x.dtype)


def plain_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return gate * gate.sigmoid() * up


def plain_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def demo() -> None:
    """Compare each Function with autograd's derivative of its formula, and what both save for backward."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weights = {torch.float64: nn.Parameter(numbers(256))}
    weights[torch.bfloat16] = nn.Parameter(weights[torch.float64].detach().bfloat16())
    for weight in weights.values():
        weight.sink = None  # its gradient is added to weight.grad
    cos, sin = rotary_angles(torch.arange(64), Model(head_dim=64), torch.float64)
    rows = {  # operation: its input, the Function of this file, the formula
        "RMSNorm": (numbers(64, 256), lambda x: RMSNormFunction.apply(x, None, weights[x.dtype], 1e-5)[1],
                    lambda x: plain_rms_norm(x, weights[x.dtype])),
        "SwiGLU": (numbers(64, 256), swiglu, plain_swiglu),
        "rotary": (numbers(1, 64, 4, 64), lambda x: rotate_and_split(x, (cos, sin), [4])[0],
                   lambda x: plain_rotation(x, cos, sin))}
    print("Bytes that are saved for backward besides the input, per element of it, in bf16;\n"
          "largest difference of the input's gradients, in fp64, relative to the largest gradient\n\n"
          f"{'':12s}{'this file':>12s}{'autograd of the formula':>27s}{'difference':>14s}")
    for name, (values, function, formula) in rows.items():
        gradients, saved = [], []
        for compute in (function, formula):
            x = values.clone().requires_grad_()
            y = compute(x * 1)  # a copy, because rotate_and_split writes into its input
            gradients += torch.autograd.grad(y, x, torch.ones_like(y).cumsum(-1))
            x = values.bfloat16().requires_grad_()
            saved.append(saved_bytes(partial(compute, x), [x, *weights.values(), cos, sin]) / x.numel())
        difference = (gradients[0] - gradients[1]).abs().max() / gradients[1].abs().max()
        print(f"{name:12s}{saved[0]:12.2f}{saved[1]:27.2f}{difference:14.0e}")
    print("\nThe Functions compute again from their inputs what autograd would save.")


if __name__ == "__main__":
    run_demo(lambda group: demo())
