"""Kernels: operations that would go to memory several times, in Triton, each with one trip. Attention: see flash.py.

A GPU computes some 200 FLOPs in the time it moves one byte, so all but matmuls wait for memory, and what several
operations read and write in turn is read and written once if one kernel does them all. Bytes that bound them (T tokens,
H or F wide, e bytes an element):

    RMSNorm        forward 2 T H e    backward 3 T H e         keeps its input; 1 / rms is computed again
    add, RMSNorm           4 T H e             4 T H e         keeps the sum, which is the residual stream anyway
    rotary                 2 T H e             2 T H e         H of queries and keys; in place, keeps nothing
    SwiGLU                 3 T F e             5 T F e         keeps gate and up
    cross-entropy          2 T V e             none            logits are made in chunks and become their gradient

The last is fused with the head's matmul: a chunk's logits, written by cuBLAS, are read for maximum and sum, read again
and overwritten by (p - onehot), from which two matmuls make the chunk's share of dx and dW. 6 T H V FLOPs, none twice.
These gradients are those of the sum; backward multiplies them by whatever derivative arrives.

All are operators of torch (torch.ops.penteract), which compilers see as one node, fake tensors pass and profilers name.
In 16 bits, sums, statistics and exponentials are fp32. Offsets that may pass 2^31 elements are 64 bits.

Zhang & Sennrich 2019 (RMSNorm); Su et al. 2021 (rotary embedding); Shazeer 2020 (SwiGLU); Milakov & Gimelshein 2018
(online softmax); Hsu et al. 2024, Liger Kernel (gradients in forward).
Letters: B batch, S sequence, T = B S tokens, H hidden, F ffn, V vocabulary, D head width.
"""
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.autograd import Function
from torch.library import custom_op

from collectives import MAX, Group, all_reduce
from param import IGNORED, accumulate_grad, add_product, at_least_fp32, size

Tensor = torch.Tensor
INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1 when triton was imported: on CPUs, slowly
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)


def check(right: bool, message: str) -> None:
    if not right:
        raise ValueError(message)


def check_launch(*tensors: Tensor) -> None:
    """Raise ValueError where a kernel would read what is not there or, interpreted, compute nonsense (bf16)."""
    first = tensors[0]
    check(INTERPRETED or first.device.type == "cuda", f"kernels run on GPUs, not on {first.device}, or interpreted: "
          "set TRITON_INTERPRET=1 before the import")
    for x in tensors:
        check(x.dtype in DTYPES, f"{x.dtype} is not among {', '.join(map(str, DTYPES))}")
        check(x.device == first.device, f"tensors are on {first.device} and on {x.device}")


# ---- RMSNorm --------------------------------------------------------------------------------------------------------

PROGRAMS = 264  # that share the rows of a backward: two for each unit of an H100 or H200


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(at_least_fp32(x.dtype))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


@triton.jit
def rms_norm_kernel(x, residual, weight, total, y, eps, H, WIDTH: tl.constexpr, ADD: tl.constexpr):
    """A row. 2 T H e bytes; with ADD, 4."""
    start, column = tl.program_id(0).to(tl.int64) * H, tl.arange(0, WIDTH)
    inside = column < H
    row = tl.load(x + start + column, inside, other=0.0)
    if ADD:
        row = (row.to(tl.float32) + tl.load(residual + start + column, inside, other=0.0)).to(row.dtype)
        tl.store(total + start + column, row, inside)
    row = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, 0) / H + eps)
    gain = tl.load(weight + column, inside, other=0.0).to(tl.float32)
    tl.store(y + start + column, (row * scale * gain).to(y.dtype.element_ty), inside)


@triton.jit
def rms_norm_backward_kernel(dy, dtotal, x, weight, dx, shares, eps, T, H, WIDTH: tl.constexpr, ADD: tl.constexpr):
    """Every PROGRAMS-th row, and their share of the weight's gradient. 3 T H e bytes; with ADD, 4."""
    column = tl.arange(0, WIDTH)
    inside = column < H
    gain = tl.load(weight + column, inside, other=0.0).to(tl.float32)
    share = tl.zeros([WIDTH], tl.float32)
    for t in range(tl.program_id(0), T, tl.num_programs(0)):
        start = tl.cast(t, tl.int64) * H
        row = tl.load(x + start + column, inside, other=0.0).to(tl.float32)
        grad = tl.load(dy + start + column, inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(row * row, 0) / H + eps)
        normal = row * scale
        share += grad * normal
        grad *= gain
        out = scale * (grad - normal * (tl.sum(grad * normal, 0) / H))  # less what points along the normalised row
        if ADD:  # rounded before: the same bits as of two operations
            out = out.to(dx.dtype.element_ty).to(tl.float32)
            out += tl.load(dtotal + start + column, inside, other=0.0).to(tl.float32)
        tl.store(dx + start + column, out.to(dx.dtype.element_ty), inside)
    tl.store(shares + tl.program_id(0) * H + column, share, inside)


def check_norm(x: Tensor, weight: Tensor, *others: Tensor) -> None:
    check(x.dim() > 0 and weight.shape == x.shape[-1:] and 0 < len(weight) <= 2**15,
          f"weight {list(weight.shape)} must be as long as rows of x {list(x.shape)}, and they at most {2**15}")
    check(all(other.shape == x.shape and other.dtype == x.dtype for other in others),
          f"{[list(other.shape) for other in others]} must have the shape {list(x.shape)} and type {x.dtype} of x")
    check_launch(x, weight, *others)


def row_launch(width: int) -> tuple[int, dict]:
    """What a program that holds a row is given: its width as a power of 2, and warps for it."""
    width = triton.next_power_of_2(width)
    return width, dict(num_warps=min(16, max(1, width // 512)))


@custom_op("penteract::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (Zhang & Sennrich 2019) of the rows [H] of x, times weight [H]."""
    check_norm(x, weight)
    x, (width, launch) = x.contiguous(), row_launch(len(weight))
    y = torch.empty_like(x)
    rms_norm_kernel[(x.numel() // len(weight),)](x, x, weight, y, y, eps, len(weight), width, False, **launch)
    return y


@custom_op("penteract::add_rms_norm", mutates_args=())
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + residual, RMSNorm of it)."""
    check_norm(x, weight, residual)
    x, residual, (width, launch) = x.contiguous(), residual.contiguous(), row_launch(len(weight))
    total, y = torch.empty_like(x), torch.empty_like(x)
    rms_norm_kernel[(x.numel() // len(weight),)](x, residual, weight, total, y, eps, len(weight), width, True, **launch)
    return total, y


@custom_op("penteract::rms_norm_backward", mutates_args=())
def rms_norm_backward(dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor,
                      eps: float) -> tuple[Tensor, Tensor]:
    """(dx, dweight, the latter fp32). x: what was normalised. dtotal: the derivative by x of all but the norm."""
    others = (dy,) if dtotal is None else (dy, dtotal)
    check_norm(x, weight, *others)
    x, H, (width, launch) = x.contiguous(), len(weight), row_launch(len(weight))
    dx, T = torch.empty_like(x), x.numel() // H
    shares = x.new_empty(min(T, PROGRAMS), H, dtype=torch.float32)
    rms_norm_backward_kernel[(len(shares),)](dy.contiguous(), others[-1].contiguous(), x, weight, dx, shares, eps, T, H,
                                             width, dtotal is not None, **launch)
    return dx, shares.sum(0)


rms_norm.register_fake(lambda x, weight, eps: x.new_empty(x.shape))
add_rms_norm.register_fake(lambda x, residual, weight, eps: (x.new_empty(x.shape), x.new_empty(x.shape)))
rms_norm_backward.register_fake(lambda dy, dtotal, x, weight, eps: (
    x.new_empty(x.shape), weight.new_empty(weight.shape, dtype=torch.float32)))


def _rms_norm_save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])
    ctx.eps = inputs[2]


def _rms_norm_autograd(ctx, dy):
    x, weight = ctx.saved_tensors
    dx, dweight = rms_norm_backward(dy, None, x, weight, ctx.eps)
    return dx, dweight.to(weight.dtype), None


def _add_rms_norm_save(ctx, inputs, output):
    ctx.save_for_backward(output[0], inputs[2])
    ctx.eps = inputs[3]


def _add_rms_norm_autograd(ctx, dtotal, dy):
    total, weight = ctx.saved_tensors
    dx, dweight = rms_norm_backward(dy, dtotal, total, weight, ctx.eps)
    return dx, dx.clone(), dweight.to(weight.dtype), None


rms_norm.register_autograd(_rms_norm_autograd, setup_context=_rms_norm_save)
add_rms_norm.register_autograd(_add_rms_norm_autograd, setup_context=_add_rms_norm_save)


# ---- rotary embedding -----------------------------------------------------------------------------------------------

def rope_reference(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    a, b = x[:, :heads].to(cos.dtype).unflatten(0, (-1, cos.shape[-3])).chunk(2, -1)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).flatten(0, 1)
    return torch.cat((turned.to(x.dtype), x[:, heads:]), 1)


@triton.jit
def rope_kernel(x, out, cos, sin, angles, x_stride, out_stride, heads, all_heads, HALF: tl.constexpr,
                WIDTH: tl.constexpr, HEADS: tl.constexpr, BACK: tl.constexpr):
    """All heads of a token: `heads` are turned, others copied. 2 T (heads D) e bytes."""
    t, head, pair = tl.program_id(0), tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    c = tl.load(cos + (t % angles) * HALF + pair, pair < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + (t % angles) * HALF + pair, pair < HALF, other=0.0).to(tl.float32)
    if BACK:
        s = -s
    c, s = tl.where(head < heads, c, 1.0), tl.where(head < heads, s, 0.0)
    place, inside = head * (2 * HALF) + pair, (head < all_heads) & (pair < HALF)
    x, out = x + tl.cast(t, tl.int64) * x_stride, out + tl.cast(t, tl.int64) * out_stride
    a = tl.load(x + place, inside, other=0.0).to(tl.float32)
    b = tl.load(x + place + HALF, inside, other=0.0).to(tl.float32)
    tl.store(out + place, (a * c - b * s).to(out.dtype.element_ty), inside)
    tl.store(out + place + HALF, (b * c + a * s).to(out.dtype.element_ty), inside)


def launch_rope(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, heads: int, back: bool) -> None:
    """heads: as many as are turned; as many as `out` has are written."""
    half, count = cos.shape[-1], out.shape[1]
    check(x.dim() == 3 and x.shape[2] == 2 * half and 0 < heads <= x.shape[1],
          f"x {list(x.shape)} must be T heads {2 * half}, of which {heads} heads are turned")
    check(cos.shape == sin.shape and cos.dim() in (3, 4) and cos.shape[-2] == 1, f"cos {list(cos.shape)} and sin "
          f"{list(sin.shape)} must be [B] S 1 D/2")
    angles = cos.numel() // half
    check(x.shape[0] == angles or cos.dim() == 3 and angles > 0 and x.shape[0] % angles == 0,
          f"{x.shape[0]} tokens are not sequences of the {angles} that have angles")
    check(x.numel() == 0 or x.stride()[1:] == (2 * half, 1), f"heads of a token must lie together, not {x.stride()}")
    check_launch(x, cos, sin)
    width, all_heads = triton.next_power_of_2(half), triton.next_power_of_2(count)
    rope_kernel[(len(x),)](x, out, cos.contiguous(), sin.contiguous(), angles, x.stride(0), out.stride(0), heads, count,
                           half, width, all_heads, back, num_warps=min(8, max(1, width * all_heads // 512)))


@custom_op("penteract::rope_", mutates_args=("x",))
def rope_(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> None:
    """Turn every pair (x[i], x[i + D/2]) of the first `heads` heads of x [T, heads, D] by its angle, [B] S 1 D/2.

    Queries and keys of a token lie side by side as the matmul writes them, and so are turned in one launch, in place.
    """
    launch_rope(x, x[:, :heads], cos, sin, heads, False)


@custom_op("penteract::rope_backward", mutates_args=())
def rope_backward(grad: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """The same angles backward, into new memory: a gradient may have other readers."""
    grad = grad.contiguous()
    out = torch.empty_like(grad)
    launch_rope(grad, out, cos, sin, heads, True)
    return out


rope_backward.register_fake(lambda grad, cos, sin, heads: grad.new_empty(grad.shape))


# ---- SwiGLU ---------------------------------------------------------------------------------------------------------

SWIGLU_BLOCK = 1024


def swiglu_reference(x: Tensor) -> Tensor:
    gate, up = x.to(at_least_fp32(x.dtype)).chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)


@triton.jit
def swiglu_kernel(x, dy, out, width, BLOCK: tl.constexpr, BACKWARD: tl.constexpr):
    """Part of a row of `width` gates and as many ups. 3 T F e bytes; backward 5."""
    t, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + t * 2 * width + column, inside, other=0.0).to(tl.float32)
    up = tl.load(x + t * 2 * width + width + column, inside, other=0.0).to(tl.float32)
    chance = tl.sigmoid(gate)
    if BACKWARD:
        grad = tl.load(dy + t * width + column, inside, other=0.0).to(tl.float32)
        dgate = grad * up * chance * (1 + gate * (1 - chance))
        tl.store(out + t * 2 * width + column, dgate.to(out.dtype.element_ty), inside)
        tl.store(out + t * 2 * width + width + column, (grad * gate * chance).to(out.dtype.element_ty), inside)
    else:
        tl.store(out + t * width + column, (gate * chance * up).to(out.dtype.element_ty), inside)


def launch_swiglu(x: Tensor, dy: Tensor, out: Tensor, backward: bool) -> Tensor:
    width = x.shape[-1] // 2
    swiglu_kernel[(x.numel() // (2 * width), triton.cdiv(width, SWIGLU_BLOCK))](
        x.contiguous(), dy.contiguous(), out, width, SWIGLU_BLOCK, backward, num_warps=4)
    return out


def half_as_wide(x: Tensor) -> Tensor:
    check(x.dim() > 0 and x.shape[-1] % 2 == 0 and x.shape[-1] > 0, f"x {list(x.shape)} must end with gate and up")
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@custom_op("penteract::swiglu", mutates_args=())
def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020), gate and up side by side in x [..., 2 F]."""
    check_launch(x)
    y = half_as_wide(x)
    return launch_swiglu(x, y, y, False)


@custom_op("penteract::swiglu_backward", mutates_args=())
def swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    check_launch(x, dy)
    check(dy.shape == half_as_wide(x).shape, f"dy {list(dy.shape)} must be half as wide as x {list(x.shape)}")
    return launch_swiglu(x, dy, x.new_empty(x.shape), True)


swiglu.register_fake(half_as_wide)
swiglu_backward.register_fake(lambda dy, x: x.new_empty(x.shape))
swiglu.register_autograd(lambda ctx, dy: swiglu_backward(dy, *ctx.saved_tensors),
                         setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


# ---- cross-entropy, fused with the head's matmul --------------------------------------------------------------------

def linear_cross_entropy_reference(x: Tensor, weight: Tensor, labels: Tensor, weights: Tensor | None = None,
                                   z_loss: float = 0.0) -> Tensor:
    """`linear_cross_entropy` of a whole vocabulary, with all logits in memory."""
    logits = (x @ weight.t()).to(at_least_fp32(x.dtype))
    losses = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
    losses = losses + (labels != IGNORED) * z_loss * logits.logsumexp(-1).square()
    return (losses if weights is None else losses * weights).sum()


@triton.jit
def softmax_kernel(logits, labels, weights, total, chosen, first, V, z_loss, BLOCK: tl.constexpr,
                   STATISTICS: tl.constexpr, GRADIENT: tl.constexpr):
    """Of a row of logits: logsumexp and the label's logit (0 if it is not here), then its gradient, in place.

    2 T V e bytes read, of which the second half comes from the L2 cache, T V e written.
    """
    t = tl.program_id(0)
    logits += t.to(tl.int64) * V
    label = tl.load(labels + t) - first
    here = (label >= 0) & (label < V)
    if STATISTICS:
        top, mass = -float("inf"), 0.0
        for n in range(0, V, BLOCK):
            column = n + tl.arange(0, BLOCK)
            x = tl.load(logits + column, column < V, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(x, 0))
            mass = mass * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
            top = higher
        row_total = top + tl.log(mass)
        tl.store(total + t, row_total)
        tl.store(chosen + t, tl.load(logits + tl.where(here, label, 0), here, other=0.0).to(tl.float32))
    else:
        row_total = tl.load(total + t)
    if GRADIENT:
        weight = tl.load(weights + t)
        slope = weight * (1 + 2 * z_loss * row_total)
        for n in range(0, V, BLOCK):
            column = n + tl.arange(0, BLOCK)
            x = tl.load(logits + column, column < V, other=-float("inf")).to(tl.float32)
            grad = slope * tl.exp(x - row_total) - tl.where(column == label, weight, 0.0)
            tl.store(logits + column, grad.to(logits.dtype.element_ty), column < V)


@custom_op("penteract::softmax_", mutates_args=("logits", "total", "chosen"))
def softmax_(logits: Tensor, labels: Tensor, weights: Tensor, total: Tensor, chosen: Tensor, first: int, z_loss: float,
             statistics: bool, gradient: bool) -> None:
    """One launch of the kernel. logits: T V/t, those of the vocabulary from `first` on. The others: T."""
    T, V = logits.shape
    check(labels.shape == weights.shape == total.shape == chosen.shape == (T,), f"{T} rows need as many labels, "
          f"{len(labels)}, weights, {len(weights)}, and places for results, {len(total)} and {len(chosen)}")
    check(logits.is_contiguous() and V > 0, "logits must be contiguous, and some")
    check_launch(logits, weights, total, chosen)
    block = min(8192, triton.next_power_of_2(V))
    softmax_kernel[(T,)](logits, labels, weights, total, chosen, first, V, z_loss, block, statistics, gradient,
                         num_warps=max(1, block // 512))


class LinearCrossEntropy(Function):
    """Keeps dx and dW, and no logits."""

    @staticmethod
    def forward(ctx, x, weight, labels, weights, z_loss, first, group, chunk):
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        dx = torch.empty_like(x) if wants_x else None
        dw = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        total, chosen = x.new_empty(2, len(x), dtype=torch.float32)
        matrix, gradient, alone = weight.detach(), wants_x or wants_weight, size(group) == 1
        room = x.new_empty(min(chunk, len(x)), len(weight))
        for part in (slice(start, start + chunk) for start in range(0, len(x), chunk)):
            logits = torch.mm(x[part], matrix.t(), out=room[:len(x[part])])
            about = labels[part], weights[part], total[part], chosen[part], first, z_loss
            softmax_(logits, *about, True, gradient and alone)
            if not alone:
                share_statistics(total[part], chosen[part], group)
                if gradient:
                    softmax_(logits, *about, False, True)
            if wants_x:
                torch.mm(logits, matrix, out=dx[part])
            if wants_weight:
                add_product(dw, logits.t(), x[part])
        ctx.weight, ctx.gradients = weight, (dx, dw)
        return (weights * (total - chosen + z_loss * total.square())).sum()

    @staticmethod
    def backward(ctx, grad):
        dx, dw = ctx.gradients
        if dw is not None:
            accumulate_grad(ctx.weight, lambda out: out.addcmul_(dw, grad), defer=False)
        return None if dx is None else (dx.to(grad.dtype) * grad).to(dx.dtype), *[None] * 7


def share_statistics(total: Tensor, chosen: Tensor, group: Group) -> None:
    """Make of each rank's logsumexp and chosen logit those of the whole vocabulary."""
    largest = total.clone()
    all_reduce(largest, group, MAX)
    sums = torch.stack((total.sub_(largest).exp_(), chosen))
    all_reduce(sums, group)
    torch.add(sums[0].log_(), largest, out=total)
    chosen.copy_(sums[1])


def linear_cross_entropy(x: Tensor, weight: torch.nn.Parameter, labels: Tensor, weights: Tensor | None = None,
                         z_loss: float = 0.0, held: slice | None = None, group: Group = None,
                         chunk: int = 4096) -> Tensor:
    """The sum of the tokens' losses, in nats, of logits x W^T; IGNORED labels have none. As tp.cross_entropy of them.

    x: T H, the same on all ranks of the group; its gradient is this rank's term of a sum over the group (tp.py's f adds
    them up). weight: V/t H, the rows `held` of the head (default: all); its gradient goes through `accumulate_grad`.
    labels: T. weights: T, what each token counts. chunk: tokens whose logits exist at a time, chunk V/t e bytes.
    """
    held = slice(0, len(weight)) if held is None else held
    check(x.dim() == weight.dim() == 2 and x.shape[1] == weight.shape[1] and x.dtype == weight.dtype,
          f"x {list(x.shape)} {x.dtype} and weight {list(weight.shape)} {weight.dtype} must be T H, V H, of one type")
    check(held.stop - held.start == len(weight) > 0, f"{len(weight)} rows of weight, words {held.start}..{held.stop}")
    check(labels.shape == x.shape[:1] and (weights is None or weights.shape == labels.shape),
          f"{len(x)} tokens need as many labels, and as many weights or none; there are {list(labels.shape)} labels")
    check(chunk > 0, f"chunk is {chunk}; use 2048 or 4096")
    check_launch(x, weight)
    if not torch.is_grad_enabled():  # then gradients would be made in vain
        x, weight = x.detach(), weight.detach()
    counts = (labels != IGNORED).float()
    weights = counts if weights is None else counts * weights
    return LinearCrossEntropy.apply(x, weight, labels, weights, z_loss, held.start, group, chunk)
