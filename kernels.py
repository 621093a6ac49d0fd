"""Fused Triton kernels: RMSNorm, rotary embedding, SwiGLU, cross-entropy with the head's matmul, and two for experts.

    plain torch    x ──► square ──► mean ──► rsqrt ──► multiply ──► multiply ──► y     every arrow: a tensor in memory
    fused          x ──►[square     mean     rsqrt     multiply     multiply]──► y     two arrows; the rest: registers

A GPU computes some 200 FLOPs in the time in which it moves one byte, so memory bandwidth limits every
operation except matmuls. One kernel for a chain of operations reads its input once, writes its result once,
and keeps intermediate results in registers. Bytes moved, with e bytes per element:

                     forward      backward
    RMSNorm          2 T H e      4 T H e    saves its input. Backward adds the gradient of the input's other
                                             uses, dtotal. 4 includes reading dtotal; without it 3 T H e
    add, RMSNorm     4 T H e      4 T H e    saves the sum, which is the residual stream
    rotary           2 T H e      2 T H e    in place, where H is the width of queries and keys; saves nothing
    SwiGLU           3 T F e      5 T F e    saves gate and up
    cross-entropy    3 T V e      none       matmuls not counted. Logits exist in chunks, and their gradient
                                             overwrites them
    sum of copies    (C + T) H e             of T tokens that have C copies. The derivative is a gather

Each section has a formula, a reference in plain torch, the kernel, and its launcher. References are for tests
and benchmarks, which compare backward with autograd's derivative of the reference; cross-entropy's reference also
computes where its kernel does not run. The autograd Functions are in operations.py, except cross-entropy's. If a
kernel does not run, its caller computes in plain torch. flash.py and fp8_kernels.py define more kernels, and also
start them with `launch`.

How to read a kernel (learn/triton_primer.py teaches it, one idea at a time):

    program        A launch starts a grid of programs. Each computes a part of the result, such as a row, and
                   tl.program_id(0) is its number. Programs do not wait for each other.
    x              A tensor is passed as the address of its first element. x + column is a vector of the addresses
                   of several elements. Offsets that may exceed 2^31 elements are 64 bits.
    inside         Which of these elements exist. A width is padded to a power of 2, WIDTH, so tl.load and
                   tl.store take this mask. Elements that do not exist read as `other`.
    tl.constexpr   A constant. The kernel is compiled anew for each of its values. An argument that is None is a
                   constant, too, so `if residual is not None` costs nothing.
    tl.float32     Sums, statistics and exponentials are fp32, and results are rounded once.

Sources: operations.py; Milakov & Gimelshein 2018 (softmax); Hsu et al. 2024 (Liger); Wijmans et al. 2024 (no logits).
Shapes: B batch, S sequence, T = B S tokens, H hidden, F ffn, V vocabulary, V/t a tensor parallel rank's, D head width.
        Of experts: E on this rank, C copies of tokens, R rows of all experts.
"""
import os
import sys
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core.collectives import ALONE, MAX, Group, all_reduce, run_demo
from core.gradients import accumulate_grad, accumulate_product
from core.param import IGNORED, check_labels, shard_slice

# ---- launching a kernel ---------------------------------------------------------------------------------------------

# Whether Triton's interpreter runs kernels, slowly, on CPUs. Triton reads TRITON_INTERPRET when @triton.jit decorates a
# function, and decorates functions of its own when it is imported. So set TRITON_INTERPRET=1 before that import.
INTERPRETED = triton.knobs.runtime.interpret
UNFIT = {torch.float64, torch.bfloat16} if INTERPRETED else {torch.float64}  # the interpreter computes bf16 wrongly
failed: dict[str, str] = {}  # kernel that does not run here, and is not tried again -> the first line of the error


class KernelError(RuntimeError):
    """A kernel does not compile or launch here, and has computed nothing. The caller then computes in plain torch."""


def launch(kernel: triton.JITFunction, grid: tuple[int, ...], *args, **options) -> None:
    """Run a grid of programs of a kernel.

    args: tensors, tuples of a tensor and its strides, numbers, None.

    Raises KernelError if the kernel does not compile or launch. From then on every launch of this kernel raises it
    without a try. The first and the last rank print the reason; the last one, because in a pipeline only the last stage
    computes the cross-entropy. Raises AssertionError for tensors that no kernel accepts. Formatting a message costs as
    much as a launch, so it happens only on failure.
    """
    tensors = []
    for arg in args:
        first = arg[0] if isinstance(arg, tuple) else arg
        if isinstance(first, Tensor):
            tensors.append(first)
    device = tensors[0].device
    assert INTERPRETED or device.type == "cuda", \
        f"kernels run on GPUs, not on {device}, or interpreted: set TRITON_INTERPRET=1 before the import"
    for x in tensors:
        assert x.device == device, f"tensors are on {device} and on {x.device}"
        assert x.dtype not in UNFIT, f"kernels{' that are interpreted' if INTERPRETED else ''} take no {x.dtype}"
    name = kernel.__name__
    if name in failed:
        raise KernelError(f"{name}: {failed[name]}")
    try:
        kernel[grid](*args, **options)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        failed[name] = f"{type(error).__name__}: {lines[0]}"
        if not dist.is_initialized() or dist.get_rank() in (0, dist.get_world_size() - 1):
            print(f"{name} does not run here, torch computes in its place: {failed[name]}", flush=True)
        raise KernelError(f"{name}: {failed[name]}") from error


# ---- RMSNorm, forward -----------------------------------------------------------------------------------------------
#     total = x + residual, or x            y = total / sqrt(mean(total^2) + eps) * weight

def rms_norm_reference(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return total and y, of x [..., H]."""
    total = x if residual is None else x + residual
    return total, torch.nn.functional.rms_norm(total, weight.shape, weight, eps)


@triton.jit
def rms_norm_kernel(x, residual, weight, total, y, eps, H, WIDTH: tl.constexpr):
    """Each program computes one row of H elements. rstd: 1 / sqrt(mean(total^2) + eps)."""
    start, column = tl.program_id(0).to(tl.int64) * H, tl.arange(0, WIDTH)
    inside = column < H
    row = tl.load(x + start + column, inside, other=0.0)
    if residual is not None:
        row = (row.to(tl.float32) + tl.load(residual + start + column, inside, other=0.0)).to(row.dtype)
        tl.store(total + start + column, row, inside)
    row = row.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(row * row, 0) / H + eps)
    w = tl.load(weight + column, inside, other=0.0).to(tl.float32)
    tl.store(y + start + column, (row * rstd * w).to(y.dtype.element_ty), inside)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return total and y, both [..., H]. x: [..., H]. residual: [..., H] or None. weight: [H], with H at most 2^15."""
    H, rows, residual = len(weight), x.contiguous(), None if residual is None else residual.contiguous()
    assert x.shape[-1] == H and 0 < H <= 2**15, f"weight of {H} (1 to {2**15} elements) for rows of {x.shape[-1]}"
    assert residual is None or (residual.shape, residual.dtype) == (x.shape, x.dtype), f"not {x.shape} {x.dtype}"
    y, total = torch.empty_like(rows), x if residual is None else torch.empty_like(rows)
    launch(rms_norm_kernel, (x.numel() // H,), rows, residual, weight, total, y, eps, H, **row_options(H))
    return total, y


def row_options(H: int) -> dict:
    """Launch options for programs that keep a whole row in registers."""
    width = triton.next_power_of_2(H)
    return dict(WIDTH=width, num_warps=min(16, max(1, width // 512)))  # 16 elements per thread, up to 16 warps


# ---- RMSNorm, backward ----------------------------------------------------------------------------------------------
# The kernel computes rstd again from x, and x_hat = x rstd. dtotal is the gradient from other uses of x. With
# g = dy weight:
#
#     dx = rstd (g - x_hat mean(g x_hat)) + dtotal         the bracket has no component along x_hat
#     dweight = sum over rows of dy x_hat

PROGRAMS_PER_SM = 2


@cache
def count_programs(device: torch.device) -> int:
    """Return how many programs share the rows. The interpreter runs as many as on a GPU with one SM."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return PROGRAMS_PER_SM * sms



@triton.jit
def rms_norm_backward_kernel(dy, dtotal, x, weight, dx, dweights, eps, T, H, WIDTH: tl.constexpr):
    """Program i of n computes rows i, i + n, i + 2 n and so on. It adds up their terms of dweight, and writes
    the sum to row i of dweights [n, H]."""
    column = tl.arange(0, WIDTH)
    inside = column < H
    w = tl.load(weight + column, inside, other=0.0).to(tl.float32)
    dweight = tl.zeros([WIDTH], tl.float32)
    for t in range(tl.program_id(0), T, tl.num_programs(0)):
        start = tl.cast(t, tl.int64) * H
        row = tl.load(x + start + column, inside, other=0.0).to(tl.float32)
        grad = tl.load(dy + start + column, inside, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(row * row, 0) / H + eps)
        x_hat = row * rstd
        dweight += grad * x_hat
        grad *= w
        out = rstd * (grad - x_hat * (tl.sum(grad * x_hat, 0) / H))  # without the component along x_hat
        if dtotal is not None:  # rounded first, to give the same bits as two separate operations
            out = out.to(dx.dtype.element_ty).to(tl.float32)
            out += tl.load(dtotal + start + column, inside, other=0.0).to(tl.float32)
        tl.store(dx + start + column, out.to(dx.dtype.element_ty), inside)
    tl.store(dweights + tl.program_id(0) * H + column, dweight, inside)


def rms_norm_backward(dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor,
                      eps: float) -> tuple[Tensor, Tensor]:
    """Return dx [..., H] and dweight [H], which is fp32.

    x: the tensor that was normalised, `total` of forward. dtotal: the gradient from other uses of x, or None.
    """
    x, dy, dtotal = x.contiguous(), dy.contiguous(), None if dtotal is None else dtotal.contiguous()
    H, T = len(weight), x.numel() // len(weight)
    programs = min(T, count_programs(x.device))
    dx, dweights = torch.empty_like(x), x.new_empty(programs, H, dtype=torch.float32)
    launch(rms_norm_backward_kernel, (programs,), dy, dtotal, x, weight, dx, dweights, eps, T, H, **row_options(H))
    return dx, dweights.sum(0)


# ---- rotary embedding -----------------------------------------------------------------------------------------------
#     (a, b) becomes (a cos - b sin, b cos + a sin), for the pairs a = x[i], b = x[i + D/2] of a head

def rope_reference(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """Rotate the first `heads` heads of x [B, S, N, D], into a new tensor."""
    a, b = x[:, :, :heads].chunk(2, -1)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
    return torch.cat((turned, x[:, :, heads:]), 2)


@triton.jit
def rope_kernel(x, cos, sin, angle_rows, stride, heads, sign, HALF: tl.constexpr, WIDTH: tl.constexpr,
                HEADS: tl.constexpr):
    """Each program rotates the first `heads` heads of one token, in place.

    stride: the distance of two tokens in memory. HALF: D/2. WIDTH, HEADS: HALF and heads, padded to powers of 2.
    angle_rows: how many rows cos and sin have: S if all sequences share them, or B S.
    """
    t = tl.program_id(0)
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    angle = (t % angle_rows) * HALF + pair
    c = tl.load(cos + angle, pair < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, pair < HALF, other=0.0).to(tl.float32) * sign
    pair_at, inside = x + tl.cast(t, tl.int64) * stride + head * (2 * HALF) + pair, (head < heads) & (pair < HALF)
    a = tl.load(pair_at, inside, other=0.0).to(tl.float32)
    b = tl.load(pair_at + HALF, inside, other=0.0).to(tl.float32)
    tl.store(pair_at, (a * c - b * s).to(x.dtype.element_ty), inside)
    tl.store(pair_at + HALF, (b * c + a * s).to(x.dtype.element_ty), inside)


def rope_(x: Tensor, cos: Tensor, sin: Tensor, heads: int, sign: float = 1.0) -> Tensor:
    """Rotate the first `heads` heads (queries and keys) of x [B, S, N, D] in place, and return x.

    cos, sin: of each token's angles, [S, 1, D/2] or [B, S, 1, D/2]. sign: -1 rotates back, as backward does.
    """
    (B, S, N, D), tokens = x.shape, x.flatten(0, 1)
    half, width, padded = D // 2, triton.next_power_of_2(D // 2), triton.next_power_of_2(heads)
    assert 0 < heads <= N, f"x {x.shape} has no {heads} heads to rotate"
    assert cos.shape == sin.shape and cos.shape in ((S, 1, half), (B, S, 1, half)), f"cos {cos.shape}, x {x.shape}"
    assert tokens.data_ptr() == x.data_ptr() and tokens.stride()[1:] == (D, 1), \
        f"the heads of a token must be contiguous, not apart: x has strides {x.stride()}"
    launch(rope_kernel, (B * S,), tokens, cos.contiguous(), sin.contiguous(), cos.numel() // half, tokens.stride(0),
           heads, sign, HALF=half, WIDTH=width, HEADS=padded, num_warps=min(8, max(1, width * padded // 512)))
    return x


# ---- SwiGLU ---------------------------------------------------------------------------------------------------------
# With s = sigmoid(gate):
#
#     forward     y = gate s up
#     backward    dgate = dy up s (1 + gate (1 - s))        dup = dy gate s

SWIGLU_BLOCK = 1024  # elements of a row that one program computes


def swiglu_reference(x: Tensor) -> Tensor:
    """Return y [..., F]. x: [..., 2F], gate and up side by side."""
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@triton.jit
def swiglu_kernel(x, dy, out, F, BLOCK: tl.constexpr):
    """Each program reads BLOCK of the F gates of a row, and the corresponding ups. With dy it computes backward."""
    t, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    gate = tl.load(x + t * 2 * F + column, inside, other=0.0).to(tl.float32)
    up = tl.load(x + t * 2 * F + F + column, inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    if dy is not None:
        grad = tl.load(dy + t * F + column, inside, other=0.0).to(tl.float32)
        dgate = (grad * up * sigmoid * (1 + gate * (1 - sigmoid))).to(out.dtype.element_ty)
        tl.store(out + t * 2 * F + column, dgate, inside)
        tl.store(out + t * 2 * F + F + column, (grad * gate * sigmoid).to(out.dtype.element_ty), inside)
    else:
        tl.store(out + t * F + column, (gate * sigmoid * up).to(out.dtype.element_ty), inside)


def swiglu(x: Tensor, dy: Tensor | None = None) -> Tensor:
    """Return y [..., F] of x [..., 2F], which is gate and up side by side. With dy [..., F], return dx [..., 2F]."""
    *rows, width = x.shape
    F, dy = width // 2, None if dy is None else dy.contiguous()
    assert width == 2 * F > 0, f"x {x.shape} must end with gate and up"
    assert dy is None or dy.shape == (*rows, F), f"dy {dy.shape} must be half as wide as x {x.shape}"
    out = x.new_empty(*rows, F if dy is None else width)
    grid = x.numel() // width, triton.cdiv(F, SWIGLU_BLOCK)
    launch(swiglu_kernel, grid, x.contiguous(), dy, out, F, SWIGLU_BLOCK, num_warps=4)
    return out


# ---- cross-entropy, fused with the head's matmul ---------------------------------------------------------------------
# The loss of a token, and its gradient with respect to the token's logits z:
#
#     loss = lse - z[label] + z_loss lse^2            lse = log of the sum of exp(z)
#     dz = (1 + 2 z_loss lse) softmax(z) - one_hot(label)
#
# All logits would be the largest tensor of a step, T x V. So they exist for a chunk of tokens at a time:
#
#     x [T, H]   ┌───────┐                 one buffer [chunk, V/t]
#                │ chunk │  1. z = x W^T        ┌──────────┐
#                ├───────┤ ──────────────────►  │ logits   │  2. lse, z[label]; all-reduced if the head is sharded
#                │ chunk │  4. dx = dz W        │    ▼     │  3. overwritten by their gradient
#                ├───────┤     dW += dz^T x     │ gradient │
#                │ chunk │ ◄──────────────────  └──────────┘
#                └───────┘
#
# cuBLAS computes 1 and 4, and the kernel of the next section computes 2 and 3. No matmul is repeated: 6 T H V
# FLOPs. All of this happens in forward, so the caller passes the upstream gradient of the loss, loss_grad, to
# forward. dW goes straight into its gradient buffer, and only dx waits for backward.

def linear_cross_entropy_reference(x: Tensor, weight: Tensor, labels: Tensor, z_loss: float = 0.0) -> Tensor:
    """Return the sum of the tokens' losses, on one rank and with all logits at once. IGNORED labels have no loss."""
    logits = x @ weight.t()
    lse = logits.logsumexp(-1)
    label_logit = logits.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    losses = lse - label_logit + z_loss * lse ** 2
    return losses.where(labels != IGNORED, 0).sum()


def linear_cross_entropy(x: Tensor, weight: torch.nn.Parameter, labels: Tensor, *, z_loss: float = 0.0,
                         vocab_size: int | None = None, group: Group = ALONE, chunk: int = 4096,
                         loss_grad: Tensor | None = None) -> Tensor:
    """Return the sum of the tokens' losses, in nats. IGNORED labels have no loss.

    x: [T, H], the same on all ranks of the group. The gradient of x is partial: this rank's term of a sum over the
        group.
    weight: [V/t, H], this rank's rows of the head, shard_slice(V, t, rank). The gradient of the weight goes through
        `accumulate_grad`.
    vocab_size: V, by default the rows of `weight`.
    labels: [T], tokens or IGNORED. Raises RuntimeError for others (param.check_labels).
    chunk: the number of tokens whose logits exist at once. These take chunk V/t e bytes.
    loss_grad: the gradient that the result will get, a scalar tensor, 1 by default. Backward checks it.

    Unless autograd is off, this call adds the gradient of `weight` to its buffer, whether or not backward follows. So
    call backward exactly once, on the result or on something computed from it. Without backward, x would get no
    gradient. After two backwards, x would have the gradient twice and the weight once.
    """
    vocab_size = len(weight) if vocab_size is None else vocab_size
    vocab = shard_slice(vocab_size, group.size, group.rank)
    assert vocab.stop - vocab.start == len(weight) > 0, f"{len(weight)} rows of the head, but {vocab}"
    assert labels.shape == x.shape[:1], f"{len(x)} tokens need as many labels"
    check_labels(labels, vocab_size)
    if not torch.is_grad_enabled():  # gradients would be computed for nothing
        x, weight = x.detach(), weight.detach()
    loss_grad = x.new_ones((), dtype=torch.float32) if loss_grad is None else loss_grad.float()
    return LinearCrossEntropy.apply(x, weight, labels.contiguous(), z_loss, vocab.start, group, chunk, loss_grad)


class LinearCrossEntropy(Function):
    """See linear_cross_entropy. Saves dx, and no logits (Wijmans et al. 2024, Cut Your Losses)."""

    @staticmethod
    def forward(ctx, x, weight, labels, z_loss, first, group, chunk, loss_grad):
        wants_gradient = any(ctx.needs_input_grad)  # of both x and weight, or of neither
        is_sharded = group.size > 1
        matrix = weight.detach()
        dx = torch.empty_like(x) if wants_gradient else None
        lse, label_logit = x.new_empty(2, len(x), dtype=torch.float32)
        buffer = x.new_empty(min(chunk, len(x)), len(weight))
        for start in range(0, len(x), chunk):
            rows = slice(start, start + chunk)
            # 1. This rank's logits of the chunk.
            logits = torch.mm(x[rows], matrix.t(), out=buffer[:len(x[rows])])
            compute = partial(cross_entropy_, logits, labels[rows], lse[rows], label_logit[rows], loss_grad=loss_grad,
                              first=first, z_loss=z_loss)
            # 2. Statistics, and 3. the gradient. One launch computes both, unless the head is sharded: then the
            #    gradient needs the statistics of all ranks' columns.
            compute(statistics=True, gradient=wants_gradient and not is_sharded)
            if is_sharded:
                combine_statistics(lse[rows], label_logit[rows], group)
                if wants_gradient:
                    compute(statistics=False, gradient=True)
            # 4. dx and dW, while the chunk's gradient exists. From here on `logits` is that gradient.
            if wants_gradient:
                torch.mm(logits, matrix, out=dx[rows])
                accumulate_grad(weight, partial(accumulate_product, a=logits.t(), b=x[rows]), defer=False)
        ctx.weight = weight
        ctx.save_for_backward(dx, loss_grad)
        return (lse - label_logit + z_loss * lse.square()).masked_fill_(labels == IGNORED, 0).sum()

    @staticmethod
    def backward(ctx, grad):
        dx, loss_grad = ctx.saved_tensors
        torch._assert_async((grad == loss_grad).all(), "the loss's gradient is not loss_grad")  # the host does not wait
        # Forward has added dW, so this adds nothing. It only makes sure that the gradient buffer exists. After this
        # backward, autograd's hook tells zero.py that the weight's gradient is complete, which may start a reduction of
        # the buffer. If ZeRO-2 has reduced and freed the buffer since forward, this allocates a new one, of zeros.
        accumulate_grad(ctx.weight, lambda out: None, defer=False)
        return dx, *[None] * 7


def combine_statistics(lse: Tensor, label_logit: Tensor, group: Group) -> None:
    """Combine the logsumexp and the label's logit of every rank's columns into the values for the whole vocabulary, in
    place."""
    largest = lse.clone()
    all_reduce(largest, group, MAX)
    sums = torch.stack((lse.sub_(largest).exp_(), label_logit))
    all_reduce(sums, group)
    torch.add(sums[0].log_(), largest, out=lse)
    label_logit.copy_(sums[1])


# ---- the kernel of cross-entropy: steps 2 and 3 ----------------------------------------------------------------------

def cross_entropy_reference_(logits, labels, lse, label_logit, loss_grad, first, z_loss, statistics, gradient) -> None:
    """Do what cross_entropy_ does, in plain torch."""
    own, x = labels - first, logits.float()
    here, column = (own >= 0) & (own < x.shape[1]), own.clamp(0, x.shape[1] - 1)[:, None]
    if statistics:
        label_logit.copy_(x.gather(1, column)[:, 0].where(here, 0))
        lse.copy_(x.logsumexp(1))
    if gradient:
        factor = loss_grad.where(labels != IGNORED, 0)
        grad = (x - lse[:, None]).exp_().mul_((factor * (1 + 2 * z_loss * lse))[:, None])
        logits.copy_(grad.scatter_add_(1, column, -(factor * here)[:, None]))


@triton.jit
def cross_entropy_kernel(logits, labels, lse, label_logit, loss_grad, ignored, first, V, z_loss, BLOCK: tl.constexpr,
                         STATISTICS: tl.constexpr, GRADIENT: tl.constexpr):
    """Each program computes the row of one token: V logits, this rank's part of the vocabulary, from token `first` on.

    STATISTICS: store lse and the label's logit, or 0 if another rank has the label. lse is the online logsumexp of
        Milakov & Gimelshein, which reads the row once. When a larger logit appears, the sum so far is scaled down.
    GRADIENT: overwrite the logits with the loss's gradient. This reads the row a second time, from memory, because long
        rows do not stay in the L2 cache.
    """
    t = tl.program_id(0)
    row, label = logits + tl.cast(t, tl.int64) * V, tl.load(labels + t)
    own = label - first  # the label's column, if this rank has it
    if STATISTICS:
        # Read the label's logit before the reductions, which make the warps wait for each other. After them, a faster
        # warp may already have overwritten the logit with its gradient.
        tl.store(label_logit + t, tl.load(row + own, (own >= 0) & (own < V), other=0.0).to(tl.float32))
        largest, sum_exp = -float("inf"), 0.0
        for n in range(0, V, BLOCK):
            column = n + tl.arange(0, BLOCK)
            x = tl.load(row + column, column < V, other=-float("inf")).to(tl.float32)
            new_largest = tl.maximum(largest, tl.max(x, 0))
            sum_exp = sum_exp * tl.exp(largest - new_largest) + tl.sum(tl.exp(x - new_largest), 0)
            largest = new_largest
        row_lse = largest + tl.log(sum_exp)
        tl.store(lse + t, row_lse)
    else:
        row_lse = tl.load(lse + t)
    if GRADIENT:
        factor = tl.where(label == ignored, 0.0, tl.load(loss_grad))
        slope = factor * (1 + 2 * z_loss * row_lse)
        for n in range(0, V, BLOCK):
            column = n + tl.arange(0, BLOCK)
            x = tl.load(row + column, column < V, other=-float("inf")).to(tl.float32)
            grad = slope * tl.exp(x - row_lse) - tl.where(column == own, factor, 0.0)
            tl.store(row + column, grad.to(logits.dtype.element_ty), column < V)


def cross_entropy_(logits: Tensor, labels: Tensor, lse: Tensor, label_logit: Tensor, *, loss_grad: Tensor, first: int,
                   z_loss: float, statistics: bool, gradient: bool) -> None:
    """Launch cross_entropy_kernel, or compute the same in torch.

    statistics: write lse and label_logit [T], this rank's terms.
    gradient: overwrite logits [T, V/t] with their gradient. Without `statistics`, lse must hold the logsumexp over the
        whole vocabulary.
    labels: [T]. loss_grad: []. first: the first token of this rank's part of the vocabulary.

    The fallback is here, not around the whole loss, so that a rank whose kernel fails still joins the all-reduce that
    follows.
    """
    T, V = logits.shape
    assert logits.is_contiguous() and V > 0, f"logits {logits.shape} must be contiguous and not empty"
    block = min(8192, triton.next_power_of_2(V))
    try:
        launch(cross_entropy_kernel, (T,), logits, labels, lse, label_logit, loss_grad, IGNORED, first, V, z_loss,
               block, statistics, gradient, num_warps=max(1, block // 512))
    except KernelError:
        cross_entropy_reference_(logits, labels, lse, label_logit, loss_grad, first, z_loss, statistics, gradient)


# ---- copies of tokens for experts: summing them ---------------------------------------------------------------------
# ep.py copies tokens to experts, and sums the copies of a token:
#
#     y_i = sum over the copies c of item i of x_c        order[starts[i]:starts[i + 1]] are its copies
#
# Each copy is read once, and each sum is written once. torch.embedding_bag computes the same, but its threads load one
# element at a time, and these load 16 bytes.

def sum_rows_reference(x: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """Return the sum of each item's rows, [N, D]: see sum_rows."""
    counts = torch.diff(starts, append=starts.new_full((1,), len(order)))
    items = torch.arange(len(starts), device=x.device).repeat_interleave(counts)
    return x.new_zeros(len(starts), x.shape[1]).index_add(0, items, x[order])


@triton.jit
def sum_rows_kernel(x, order, starts, y, N, C, D, BLOCK: tl.constexpr):
    """Each program sums BLOCK columns of the rows of one item, in their order."""
    i, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, total = column < D, tl.zeros([BLOCK], tl.float32)
    for place in range(tl.load(starts + i), tl.load(starts + i + 1, i + 1 < N, other=C)):
        total += tl.load(x + tl.load(order + place) * D + column, inside, other=0.0).to(tl.float32)
    tl.store(y + i * D + column, total.to(y.dtype.element_ty), inside)


def sum_rows(x: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """Return the sum of each item's rows, [N, D], added up in fp32 in their order. An item may have no row.

    x: [C, D]. order: [C], int64, the rows of item 0, then those of item 1 and so on. starts: [N], int64, where each
    item begins in `order`.
    """
    (C, D), N, x = x.shape, len(starts), x.contiguous()
    assert len(order) == C and order.dtype == starts.dtype == torch.int64, f"order {order.shape} of {C} rows"
    y, block = x.new_empty(N, D), min(1024, triton.next_power_of_2(max(D, 1)))
    if y.numel():
        launch(sum_rows_kernel, (N, triton.cdiv(D, block)), x, order, starts, y, N, C, D, block,
               num_warps=max(1, block // 256))  # 16 bytes per thread in 16 bits
    return y


# ---- weight gradients of experts ------------------------------------------------------------------------------------
# Rows are sorted by expert, and ends[i] is where those of expert i end:
#
#     dW_i += dy_i^T x_i            dy_i [rows, N], x_i [rows, K]: the rows of expert i
#
# One launch computes all experts. It reads `ends` on the device, so the host need not know how many rows each has.
# F.grouped_mm would round the products to 16 bits before they are added to fp32.

def add_expert_gradients_reference(dw: Tensor, dy: Tensor, x: Tensor, ends: Tensor) -> None:
    """Add each expert's dy^T x [N, K] to dw [E, N, K], in place."""
    start = 0
    for matrix, end in zip(dw, ends.tolist()):
        accumulate_product(matrix, dy[start:end].t(), x[start:end])
        start = end


@triton.jit
def expert_gradients_kernel(dy, x, ends, dw, N, K, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Each program computes a tile of one expert's matrix, BLOCK x BLOCK, and reads ROWS of its rows at a time."""
    expert, n = tl.program_id(2), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first_k = tl.program_id(0) * BLOCK
    k = first_k + tl.arange(0, BLOCK)
    start, stop = tl.load(ends + expert - 1, expert > 0, other=0), tl.load(ends + expert)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for first in range(start, stop, ROWS):
        row = first + tl.arange(0, ROWS)
        at, inside = row.to(tl.int64)[:, None], (row < stop)[:, None]
        dy_rows = tl.load(dy + at * N + n[None, :], inside & (n < N)[None, :], other=0.0)
        x_rows = tl.load(x + at * K + k[None, :], inside & (k < K)[None, :], other=0.0)
        total = tl.dot(tl.trans(dy_rows), x_rows, total, input_precision="ieee")
    if stop > start:
        # Half of the tile's columns at a time. With all at once a thread needed 186 registers, not 100, and only one
        # program would fit on an SM.
        halves = tl.split(tl.permute(tl.reshape(total, (BLOCK, 2, BLOCK // 2)), (0, 2, 1)))
        for half in tl.static_range(2):
            column = first_k + half * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
            tile = dw + expert.to(tl.int64) * N * K + n[:, None] * K + column[None, :]
            exists = (n < N)[:, None] & (column < K)[None, :]
            tl.store(tile, (tl.load(tile, exists).to(tl.float32) + halves[half]).to(dw.dtype.element_ty), exists)


def add_expert_gradients(dw: Tensor, dy: Tensor, x: Tensor, ends: Tensor) -> None:
    """Add each expert's dy^T x [N, K] to dw [E, N, K], in place. The sums over rows are in fp32.

    dy: [R, N], x: [R, K], in 16 bits or fp32, with rows sorted by expert. ends: [E], int32, where each expert's end.
    """
    (E, N, K), dy, x = dw.shape, dy.contiguous(), x.contiguous()
    assert dw.is_contiguous() and (dy.shape, x.shape) == ((len(dy), N), (len(dy), K)), f"dw {dw.shape}, dy {dy.shape}"
    assert len(ends) == E and ends.dtype == torch.int32, f"{len(ends)} ends of {E} experts"
    assert N * K < 2**31, f"a matrix of {N} x {K}"  # offsets in one matrix are 32 bits
    block = 128 if dy.itemsize == 2 else 32
    launch(expert_gradients_kernel, (triton.cdiv(K, block), triton.cdiv(N, block), E), dy, x, ends, dw, N, K,
           ROWS=block // 2, BLOCK=block, num_warps=8, num_stages=3)


# ---- demo: python kernels.py ----------------------------------------------------------------------------------------

def run_kernel_demo(demo: Callable[[], None]) -> None:
    """Run the demo of a file of kernels: on a GPU or, if there is none, in Triton's interpreter.

    For the interpreter, this starts Python again with TRITON_INTERPRET=1: see INTERPRETED.
    """
    if not (torch.cuda.is_available() or INTERPRETED):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"TRITON_INTERPRET": "1"})
    run_demo(lambda group: demo())


class MovedBytes(TorchDispatchMode):
    """Inside this context, count the bytes that torch's operations read and write. Views and matmuls are left out."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view and function.overloadpacket.__name__ not in ("mm", "t", "detach"):
            tensors = [x for x in tree_leaves((args, result)) if isinstance(x, Tensor)]
            self.total += sum(x.nbytes for x in tensors)
        return result


def demo() -> None:
    """Compare each kernel with its reference: the difference of results, and the bytes that are moved."""
    generator = torch.Generator().manual_seed(0)
    device = "cpu" if INTERPRETED else "cuda"

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    T, H, F, V = 8, 256, 512, 1024
    x, y, weight, heads = numbers(T, H), numbers(T, H), numbers(H), numbers(1, T, 4, H // 4)
    gate_up, angle = numbers(T, 2 * F), numbers(T, 1, H // 8)
    cos, sin = angle.cos(), angle.sin()
    head, labels = numbers(V, H) / H ** 0.5, torch.arange(T, device=device)
    head.sink = None  # its gradient is added to head.grad

    def grad_of_loss(loss: Callable[..., Tensor]) -> Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(loss(leaf, head, labels), leaf)[0]

    rows = {  # name: the kernel, its reference, the bytes that the kernel moves, by the table at the top
        "RMSNorm": (lambda: rms_norm(x, None, weight, 1e-5)[1],
                    lambda: rms_norm_reference(x, None, weight, 1e-5)[1], 2 * T * H * 4),
        "add, RMSNorm": (lambda: rms_norm(x, y, weight, 1e-5)[1],
                         lambda: rms_norm_reference(x, y, weight, 1e-5)[1], 4 * T * H * 4),
        "rotary": (lambda: rope_(heads.clone(), cos, sin, 4),
                   lambda: rope_reference(heads, cos, sin, 4), 2 * T * H * 4),
        "SwiGLU": (lambda: swiglu(gate_up), lambda: swiglu_reference(gate_up), 3 * T * F * 4),
        "cross-entropy": (lambda: grad_of_loss(linear_cross_entropy),
                          lambda: grad_of_loss(linear_cross_entropy_reference), 3 * T * V * 4)}
    print("Relative difference of results, in fp32, and kB that are moved, in forward. Of cross-entropy:\n"
          "gradients, and kB of forward and backward without matmuls.\n\n"
          f"{'':16s}{'difference':>12s}{'by the kernel':>16s}{'by plain torch':>16s}")
    for name, (kernel, reference, nbytes) in rows.items():
        with MovedBytes() as moved:
            expected = reference()
        difference = (kernel() - expected).abs().max() / expected.abs().max()
        print(f"{name:16s}{difference:12.0e}{nbytes / 1e3:16.1f}{moved.total / 1e3:16.1f}")
    print("\nA kernel moves less than plain torch, because intermediate results stay in registers.")


if __name__ == "__main__":
    run_kernel_demo(demo)
