"""Fused Triton kernels: RMSNorm, rotary embedding, SwiGLU, cross-entropy with the head's matmul.

A GPU computes some 200 FLOPs in the time in which it moves one byte, so everything except matmuls is bound by memory
bandwidth. One kernel for a chain of operations reads and writes no intermediate results. Bytes moved, e per element:

                     forward     backward
    RMSNorm          2 T H e      4 T H e     saves its input; adds the gradient of its other uses (if none: 3 T H e)
    add, RMSNorm     4 T H e      4 T H e     saves the sum, the residual stream; backward recomputes 1 / rms
    rotary           2 T H e      2 T H e     in place, H the width of queries and keys; saves nothing
    SwiGLU           3 T F e      5 T F e     saves gate and up
    cross-entropy    3 T V e      none        besides the matmuls; logits exist in chunks, overwritten by their gradient

Cross-entropy: cuBLAS writes a chunk of logits, the kernel overwrites it with softmax - one_hot, and two matmuls make
from it the chunk's rows of dx and its term of dW. No matmul is repeated: 6 T H V FLOPs. The caller gives in forward the
gradient that the loss will have, so dW goes straight into the main gradient, and dx is all that waits for backward.

A section has the same in plain torch, to compare with, then the kernel, then its launch. `launch` also starts the
kernels of flash.py and fp8_kernels.py. Where a kernel does not run, torch computes: cross_entropy_reference_ here, and
the others in operations.py, which has their autograd functions. A kernel is compiled anew for arguments that are None,
so an `if` that asks for them costs nothing.
Sums, statistics and exponentials are fp32. Offsets that may exceed 2^31 elements are 64 bits.

Sources: operations.py; Milakov & Gimelshein 2018 (softmax); Hsu et al. 2024 (Liger); Wijmans et al. 2024 (no logits).
Shapes: B batch, S sequence, T = B S tokens, H hidden, F ffn, V vocabulary, V/t a tensor parallel rank's, D head width.
"""
from functools import partial

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from core.collectives import ALONE, MAX, Group, all_reduce
from core.gradients import accumulate_grad, accumulate_product
from core.param import IGNORED, check_labels, shard_slice

INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1 when triton was imported: on CPUs, slowly
failed: dict[str, str] = {}  # kernels that do not run here, so are not tried again, and the first line of the error
UNFIT = {torch.float64, torch.bfloat16} if INTERPRETED else {torch.float64}  # interpreted, bf16 is computed wrongly


class KernelError(RuntimeError):
    """A kernel does not compile or launch here, and has computed nothing: who called it does, in plain torch."""


def launch(kernel: triton.JITFunction, grid: tuple[int, ...], *args, **options) -> None:
    """Run a grid of programs. Raises KernelError; the first and the last rank print why: a pipeline's cross-entropy is
    on the last alone. A tuple is a tensor and its strides. A message is formatted only if its assertion fails: that
    takes as long as a launch."""
    tensors = [x for arg in args for x in (arg if isinstance(arg, tuple) else [arg]) if isinstance(x, Tensor)]
    device = tensors[0].device
    assert INTERPRETED or device.type == "cuda", \
        f"kernels run on GPUs, not on {device}, or interpreted: set TRITON_INTERPRET=1 before the import"
    for x in tensors:
        assert x.device == device, f"tensors are on {device} and on {x.device}"
        assert x.dtype not in UNFIT, f"kernels{' that are interpreted' if INTERPRETED else ''} take no {x.dtype}"
    if (name := kernel.__name__) in failed:
        raise KernelError(f"{name}: {failed[name]}")
    try:
        kernel[grid](*args, **options)
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if not dist.is_initialized() or dist.get_rank() in (0, dist.get_world_size() - 1):
            print(f"{name} does not run here, torch computes in its place: {failed[name]}", flush=True)
        raise KernelError(f"{name}: {failed[name]}") from error


# ---- RMSNorm --------------------------------------------------------------------------------------------------------

PROGRAMS = 264  # of the backward kernel, which share the rows: two per SM of an H100 or H200


def rms_norm_reference(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual
    return total, torch.nn.functional.rms_norm(total, weight.shape, weight, eps)


@triton.jit
def rms_norm_kernel(x, residual, weight, total, y, eps, H, WIDTH: tl.constexpr):
    """A program has one row. Moves 2 T H e bytes; with a residual 4 T H e."""
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


@triton.jit
def rms_norm_backward_kernel(dy, dtotal, x, weight, dx, dweights, eps, T, H, WIDTH: tl.constexpr):
    """Of n programs each has every n-th row, and sums dweight over these. Moves 3 T H e bytes; with dtotal 4 T H e."""
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


def row_options(H: int) -> dict:
    """Launch options of programs that have a whole row in registers."""
    width = triton.next_power_of_2(H)
    return dict(WIDTH=width, num_warps=min(16, max(1, width // 512)))


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(total = x + residual, or x; total / rms(total) * weight), both [..., H]. weight: [H], H at most 2^15."""
    H, rows, residual = len(weight), x.contiguous(), None if residual is None else residual.contiguous()
    assert x.shape[-1] == H and 0 < H <= 2**15, f"weight of {H} (1 to {2**15} elements) for rows of {x.shape[-1]}"
    assert residual is None or (residual.shape, residual.dtype) == (x.shape, x.dtype), f"not {x.shape} {x.dtype}"
    y, total = torch.empty_like(rows), x if residual is None else torch.empty_like(rows)
    launch(rms_norm_kernel, (x.numel() // H,), rows, residual, weight, total, y, eps, H, **row_options(H))
    return total, y


def rms_norm_backward(dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor,
                      eps: float) -> tuple[Tensor, Tensor]:
    """(dx [..., H], dweight [H] in fp32). x: what was normalised. dtotal: added to dx, x's gradient from other uses."""
    x, dy, dtotal = x.contiguous(), dy.contiguous(), None if dtotal is None else dtotal.contiguous()
    H, T = len(weight), x.numel() // len(weight)
    dx, dweights = torch.empty_like(x), x.new_empty(min(T, PROGRAMS), H, dtype=torch.float32)  # a row per program
    launch(rms_norm_backward_kernel, (len(dweights),), dy, dtotal, x, weight, dx, dweights, eps, T, H, **row_options(H))
    return dx, dweights.sum(0)


# ---- rotary embedding -----------------------------------------------------------------------------------------------

def rope_reference(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    a, b = x[:, :, :heads].chunk(2, -1)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
    return torch.cat((turned, x[:, :, heads:]), 2)


@triton.jit
def rope_kernel(x, cos, sin, angle_rows, stride, heads, sign, HALF: tl.constexpr, WIDTH: tl.constexpr,
                HEADS: tl.constexpr):
    """A program rotates the first `heads` of a token's heads, in place. WIDTH, HEADS: HALF = D/2 and heads, padded."""
    t = tl.program_id(0)
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    angle = (t % angle_rows) * HALF + pair  # S rows: the same for each sequence; or B S
    c = tl.load(cos + angle, pair < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, pair < HALF, other=0.0).to(tl.float32) * sign
    pair_at, inside = x + tl.cast(t, tl.int64) * stride + head * (2 * HALF) + pair, (head < heads) & (pair < HALF)
    a = tl.load(pair_at, inside, other=0.0).to(tl.float32)
    b = tl.load(pair_at + HALF, inside, other=0.0).to(tl.float32)
    tl.store(pair_at, (a * c - b * s).to(x.dtype.element_ty), inside)
    tl.store(pair_at + HALF, (b * c + a * s).to(x.dtype.element_ty), inside)


def rope_(x: Tensor, cos: Tensor, sin: Tensor, heads: int, sign: float = 1.0) -> Tensor:
    """Rotate pairs (x[i], x[i + D/2]) of the first `heads` heads (queries and keys) of x [B, S, N, D] by the token's
    angles, in place. cos, sin: [S, 1, D/2] or [B, S, 1, D/2]. sign: -1 rotates back, as backward does."""
    (B, S, N, D), tokens = x.shape, x.flatten(0, 1)
    half, width, padded = D // 2, triton.next_power_of_2(D // 2), triton.next_power_of_2(heads)
    assert 0 < heads <= N, f"x {x.shape} has no {heads} heads to rotate"
    assert cos.shape == sin.shape and cos.shape in ((S, 1, half), (B, S, 1, half)), f"cos {cos.shape}, x {x.shape}"
    assert tokens.data_ptr() == x.data_ptr() and tokens.stride()[1:] == (D, 1), f"heads apart: {x.stride()}"
    launch(rope_kernel, (B * S,), tokens, cos.contiguous(), sin.contiguous(), cos.numel() // half, tokens.stride(0),
           heads, sign, HALF=half, WIDTH=width, HEADS=padded, num_warps=min(8, max(1, width * padded // 512)))
    return x


# ---- SwiGLU ---------------------------------------------------------------------------------------------------------

SWIGLU_BLOCK = 1024


def swiglu_reference(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@triton.jit
def swiglu_kernel(x, dy, out, F, BLOCK: tl.constexpr):
    """A program has BLOCK of a row's F gates and F ups. Moves 3 T F e bytes; backward, if there is a dy, 5 T F e."""
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
    """silu(gate) * up, where x is gate and up side by side: [..., 2F] -> [..., F]. With dy [..., F]: dx [..., 2F]."""
    *rows, width = x.shape
    F, dy = width // 2, None if dy is None else dy.contiguous()
    assert width == 2 * F > 0, f"x {x.shape} must end with gate and up"
    assert dy is None or dy.shape == (*rows, F), f"dy {dy.shape} must be half as wide as x {x.shape}"
    out = x.new_empty(*rows, F if dy is None else width)
    grid = x.numel() // width, triton.cdiv(F, SWIGLU_BLOCK)
    launch(swiglu_kernel, grid, x.contiguous(), dy, out, F, SWIGLU_BLOCK, num_warps=4)
    return out


# ---- cross-entropy, fused with the head's matmul; tp.cross_entropy is all of it in torch, of all logits at once ------

def cross_entropy_reference_(logits, labels, lse, label_logit, loss_grad, first, z_loss, statistics, gradient) -> None:
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
    """A program has a row of V logits: this rank's, of the vocabulary from `first` on. STATISTICS: store logsumexp and
    the label's logit, or 0 where another rank has the label. GRADIENT: overwrite the logits with the loss's gradient.
    Moves 3 T V e bytes: long rows do not stay in the L2 cache until the second reading."""
    t = tl.program_id(0)
    row, label = logits + tl.cast(t, tl.int64) * V, tl.load(labels + t)
    own = label - first  # its column, if this rank has it
    if STATISTICS:
        # The label's logit first: after a reduction, faster warps may already have overwritten it with its gradient.
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
    """Launch cross_entropy_kernel, or compute the same in torch: here, not around the whole loss: a rank whose kernel
    fails must reach the all-reduce between calls. logits: [T, V/t]. labels, lse, label_logit: [T]. loss_grad: []."""
    T, V = logits.shape
    assert logits.is_contiguous() and V > 0, f"logits {logits.shape} must be contiguous and not empty"
    block = min(8192, triton.next_power_of_2(V))
    try:
        launch(cross_entropy_kernel, (T,), logits, labels, lse, label_logit, loss_grad, IGNORED, first, V, z_loss,
               block, statistics, gradient, num_warps=max(1, block // 512))
    except KernelError:
        cross_entropy_reference_(logits, labels, lse, label_logit, loss_grad, first, z_loss, statistics, gradient)


class LinearCrossEntropy(Function):
    """See linear_cross_entropy. Saves dx, and no logits (Wijmans et al. 2024, Cut Your Losses)."""

    @staticmethod
    def forward(ctx, x, weight, labels, z_loss, first, group, chunk, loss_grad):
        wants_gradient, is_sharded = any(ctx.needs_input_grad), group.size > 1  # of both x and weight, or of neither
        dx, matrix = torch.empty_like(x) if wants_gradient else None, weight.detach()
        lse, label_logit = x.new_empty(2, len(x), dtype=torch.float32)
        buffer = x.new_empty(min(chunk, len(x)), len(weight))
        for start in range(0, len(x), chunk):
            rows = slice(start, start + chunk)
            logits = torch.mm(x[rows], matrix.t(), out=buffer[:len(x[rows])])
            compute = partial(cross_entropy_, logits, labels[rows], lse[rows], label_logit[rows], loss_grad=loss_grad,
                              first=first, z_loss=z_loss)
            # Sharded, the gradient needs the statistics of all ranks' columns; else both are made in one launch.
            compute(statistics=True, gradient=wants_gradient and not is_sharded)
            if is_sharded:
                combine_statistics(lse[rows], label_logit[rows], group)
                if wants_gradient:
                    compute(statistics=False, gradient=True)
            if wants_gradient:  # now, while this chunk's exists
                torch.mm(logits, matrix, out=dx[rows])
                accumulate_grad(weight, partial(accumulate_product, a=logits.t(), b=x[rows]), defer=False)
        ctx.weight = weight
        ctx.save_for_backward(dx, loss_grad)
        return (lse - label_logit + z_loss * lse.square()).masked_fill_(labels == IGNORED, 0).sum()

    @staticmethod
    def backward(ctx, grad):
        dx, loss_grad = ctx.saved_tensors
        torch._assert_async((grad == loss_grad).all(), "the loss's gradient is not loss_grad")  # the host does not wait
        # dW was added in forward; if ZeRO-2 has freed it since, `ready` needs one, of 0.
        accumulate_grad(ctx.weight, lambda out: None, defer=False)
        return dx, *[None] * 7


def combine_statistics(lse: Tensor, label_logit: Tensor, group: Group) -> None:
    """Reduce the logsumexp and label logit of each rank's columns to those of the full vocabulary, in place."""
    largest = lse.clone()
    all_reduce(largest, group, MAX)
    sums = torch.stack((lse.sub_(largest).exp_(), label_logit))
    all_reduce(sums, group)
    torch.add(sums[0].log_(), largest, out=lse)
    label_logit.copy_(sums[1])


def linear_cross_entropy(x: Tensor, weight: torch.nn.Parameter, labels: Tensor, *, z_loss: float = 0.0,
                         vocab_size: int | None = None, group: Group = ALONE, chunk: int = 4096,
                         loss_grad: Tensor | None = None) -> Tensor:
    """The sum of the tokens' losses, in nats, for logits x W^T, as tp.cross_entropy; IGNORED labels have none.

    Unless autograd is off, this accumulates the gradient of `weight` already. So call backward once, on the result or
    on what is computed from it. The gradient that arrives here must be loss_grad (a scalar tensor, default 1): checked.

    x: [T, H], the same on all ranks of the group; its gradient is partial: this rank's term of a sum over the group.
    weight: [V/t, H], this rank's rows of the head, shard_slice(V, t, rank); its gradient goes through
    `accumulate_grad`. vocab_size: V, by default that of one rank.
    labels: [T], tokens or IGNORED: RuntimeError for others (param.check_labels).
    chunk: tokens whose logits exist at once, chunk V/t e bytes.
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
