"""Fused Triton kernels: RMSNorm, rotary embedding, SwiGLU, and cross-entropy with the head's matmul.

A GPU computes some 200 FLOPs in the time in which it moves one byte, so everything except matmuls is bound by memory
bandwidth. One kernel for a chain of operations reads and writes no intermediate results. Bytes moved, e per element:

                     forward     backward
    RMSNorm          2 T H e      4 T H e     saves its input, the residual stream, and adds the gradient of its other
    add, RMSNorm     4 T H e      4 T H e     uses (3 T H e if there are none); backward recomputes 1 / rms
    rotary           2 T H e      2 T H e     H: queries and keys, in place; in backward values, too; saves nothing
    SwiGLU           3 T F e      5 T F e     saves gate and up
    cross-entropy    3 T V e      none        logits exist in chunks and are overwritten by their gradient

Cross-entropy is fused with the head's matmul: the kernel reads a chunk of logits, which cuBLAS wrote, for its sum of
exponentials, then overwrites it with softmax - one_hot, from which two matmuls compute the chunk's terms of dx and dW.
No matmul is repeated: 6 T H V FLOPs. Forward knows by which number the loss will be multiplied (1 / valid tokens, and
the loss scale), so dW goes straight into the main gradient, and dx is all that waits for backward.

All are custom operators (torch.ops.penteract), so torch.compile sees one node and profilers show the name. Derivatives
are in operations.py, attention is in flash.py. Sums, statistics and exponentials are fp32. Offsets that may exceed
2^31 elements are 64 bits.

Sources: see operations.py; Milakov & Gimelshein 2018 (online softmax); Hsu et al. 2024, Liger Kernel (cross-entropy).
Shapes: B batch, S sequence, T = B S tokens, H hidden, F ffn, V vocabulary, V/t a tensor parallel rank's, D head width.
"""
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.library import custom_op

from collectives import MAX, Group, all_reduce, size
from param import IGNORED, accumulate_grad, accumulate_product

INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1 when triton was imported: on CPUs, slowly
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def check_launch(*tensors: Tensor) -> None:
    """Raise ValueError for tensors that kernels cannot take (the interpreter would compute bf16 wrongly)."""
    first = tensors[0]
    check(INTERPRETED or first.device.type == "cuda",
          f"kernels run on GPUs, not on {first.device}, or interpreted: set TRITON_INTERPRET=1 before the import")
    for x in tensors:
        check(x.dtype in DTYPES, f"{x.dtype} is not among {', '.join(map(str, DTYPES))}")
        check(x.device == first.device, f"tensors are on {first.device} and on {x.device}")


# ---- RMSNorm --------------------------------------------------------------------------------------------------------

# Among how many programs backward divides the rows: two per SM of an H100 or H200. STAGES - 1 rows are loaded ahead, so
# that a program does not wait for memory with nothing under way. `python -m bench gpu --only variants` compares others.
PROGRAMS, STAGES = 264, 1


@triton.jit
def rms_norm_kernel(x, residual, weight, total, y, eps, H, WIDTH: tl.constexpr, ADD: tl.constexpr):
    """A program has one row. Moves 2 T H e bytes; with ADD 4 T H e."""
    start, column = tl.program_id(0).to(tl.int64) * H, tl.arange(0, WIDTH)
    inside = column < H
    row = tl.load(x + start + column, inside, other=0.0)
    if ADD:
        row = (row.to(tl.float32) + tl.load(residual + start + column, inside, other=0.0)).to(row.dtype)
        tl.store(total + start + column, row, inside)
    row = row.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(row * row, 0) / H + eps)
    w = tl.load(weight + column, inside, other=0.0).to(tl.float32)
    tl.store(y + start + column, (row * rstd * w).to(y.dtype.element_ty), inside)


@triton.jit
def rms_norm_backward_kernel(dy, dtotal, x, weight, dx, dweights, eps, T, H, WIDTH: tl.constexpr,
                             ADD: tl.constexpr, STAGES: tl.constexpr):
    """A program has every PROGRAMS-th row; it sums their terms of dweight. Moves 3 T H e bytes; with ADD 4 T H e."""
    column = tl.arange(0, WIDTH)
    inside = column < H
    w = tl.load(weight + column, inside, other=0.0).to(tl.float32)
    dweight = tl.zeros([WIDTH], tl.float32)
    for t in tl.range(tl.program_id(0), T, tl.num_programs(0), num_stages=STAGES):
        start = tl.cast(t, tl.int64) * H
        row = tl.load(x + start + column, inside, other=0.0).to(tl.float32)
        grad = tl.load(dy + start + column, inside, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(row * row, 0) / H + eps)
        x_hat = row * rstd
        dweight += grad * x_hat
        grad *= w
        out = rstd * (grad - x_hat * (tl.sum(grad * x_hat, 0) / H))  # without the component along x_hat
        if ADD:  # rounded first, to give the same bits as two separate operations
            out = out.to(dx.dtype.element_ty).to(tl.float32)
            out += tl.load(dtotal + start + column, inside, other=0.0).to(tl.float32)
        tl.store(dx + start + column, out.to(dx.dtype.element_ty), inside)
    tl.store(dweights + tl.program_id(0) * H + column, dweight, inside)


def check_norm(x: Tensor, weight: Tensor, *others: Tensor) -> None:
    check(x.dim() > 0 and weight.shape == x.shape[-1:] and 0 < len(weight) <= 2**15,
          f"weight {list(weight.shape)} must be as long as rows of x {list(x.shape)}: 1 to {2**15} elements")
    check(all(other.shape == x.shape and other.dtype == x.dtype for other in others),
          f"{[list(other.shape) for other in others]} must have the shape {list(x.shape)} and type {x.dtype} of x")
    check_launch(x, weight, *others)


def row_launch(width: int) -> dict:
    """Launch options of programs that each have a whole row in registers."""
    padded = triton.next_power_of_2(width)
    return dict(WIDTH=padded, num_warps=min(16, max(1, padded // 512)))


@custom_op("penteract::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight, x [..., H], weight [H]. Raises ValueError for unfit tensors, as do all operators below."""
    check_norm(x, weight)
    x, H = x.contiguous(), len(weight)
    y, T = torch.empty_like(x), x.numel() // H
    rms_norm_kernel[(T,)](x, x, weight, y, y, eps, H, ADD=False, **row_launch(H))
    return y


@custom_op("penteract::add_rms_norm", mutates_args=())
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(total = x + residual, RMSNorm of total), both [..., H]."""
    check_norm(x, weight, residual)
    x, residual, H = x.contiguous(), residual.contiguous(), len(weight)
    total, y, T = torch.empty_like(x), torch.empty_like(x), x.numel() // H
    rms_norm_kernel[(T,)](x, residual, weight, total, y, eps, H, ADD=True, **row_launch(H))
    return total, y


@custom_op("penteract::rms_norm_backward", mutates_args=())
def rms_norm_backward(dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor,
                      eps: float) -> tuple[Tensor, Tensor]:
    """(dx [..., H], dweight [H] in fp32). x: what was normalised. dtotal: added to dx, x's gradient from other uses."""
    grads = (dy,) if dtotal is None else (dy, dtotal)
    check_norm(x, weight, *grads)
    x, H = x.contiguous(), len(weight)
    dx, T = torch.empty_like(x), x.numel() // H
    dweights = x.new_empty(min(T, PROGRAMS), H, dtype=torch.float32)  # a row per program
    rms_norm_backward_kernel[(len(dweights),)](
        dy.contiguous(), grads[-1].contiguous(), x, weight, dx, dweights, eps, T, H,
        ADD=dtotal is not None, STAGES=STAGES, **row_launch(H))
    return dx, dweights.sum(0)


rms_norm.register_fake(lambda x, weight, eps: x.new_empty(x.shape))
add_rms_norm.register_fake(lambda x, residual, weight, eps: (x.new_empty(x.shape), x.new_empty(x.shape)))
rms_norm_backward.register_fake(lambda dy, dtotal, x, weight, eps: (
    x.new_empty(x.shape), weight.new_empty(weight.shape, dtype=torch.float32)))


# ---- rotary embedding -----------------------------------------------------------------------------------------------

@triton.jit
def load_angles(cos, sin, t, angle_rows, HALF: tl.constexpr, WIDTH: tl.constexpr):
    """cos and sin of a token's angles, [1, WIDTH]."""
    pair = tl.arange(0, WIDTH)[None, :]
    start = (t % angle_rows) * HALF
    return (tl.load(cos + start + pair, pair < HALF, other=0.0).to(tl.float32),
            tl.load(sin + start + pair, pair < HALF, other=0.0).to(tl.float32))


@triton.jit
def turn_heads(x, head_stride, out, heads, c, s, HALF: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr):
    """Rotate a token's heads by angles of which c is the cosine and s the sine. In `out` they are contiguous."""
    head, pair = tl.arange(0, HEADS)[:, None].to(tl.int64), tl.arange(0, WIDTH)[None, :]
    inside = (head < heads) & (pair < HALF)
    a = tl.load(x + head * head_stride + pair, inside, other=0.0).to(tl.float32)
    b = tl.load(x + head * head_stride + HALF + pair, inside, other=0.0).to(tl.float32)
    tl.store(out + head * (2 * HALF) + pair, (a * c - b * s).to(out.dtype.element_ty), inside)
    tl.store(out + head * (2 * HALF) + HALF + pair, (b * c + a * s).to(out.dtype.element_ty), inside)


@triton.jit
def rope_kernel(x, cos, sin, angle_rows, stride, heads, HALF: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr):
    """A program rotates the first `heads` of a token's heads, in place. Moves 2 T (heads D) e bytes.
    HALF: D/2. WIDTH, HEADS: HALF and heads, rounded up to powers of 2."""
    t = tl.program_id(0)
    c, s = load_angles(cos, sin, t, angle_rows, HALF, WIDTH)
    x += tl.cast(t, tl.int64) * stride
    turn_heads(x, 2 * HALF, x, heads, c, s, HALF, WIDTH, HEADS)


@triton.jit
def token_of(x, strides, b, i):
    """Pointer to token i of sequence b of x [B, S, heads, D]."""
    return x + tl.cast(b, tl.int64) * strides[0] + tl.cast(i, tl.int64) * strides[1]


@triton.jit
def rope_backward_kernel(dq, dk, dv, out, cos, sin, angle_rows, seq, dq_strides, dk_strides, dv_strides, heads,
                         kv_heads, HALF: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
                         KV_HEADS: tl.constexpr):
    """A program has a token. It rotates dq and dk by minus the angles, and writes both and dv side by side. Moves
    2 T ((N + 2 K) D) e bytes. dk, dv: may be None."""
    t = tl.program_id(0)
    b, i = t // seq, t % seq
    c, s = load_angles(cos, sin, t, angle_rows, HALF, WIDTH)
    out += tl.cast(t, tl.int64) * (heads + 2 * kv_heads) * (2 * HALF)
    turn_heads(token_of(dq, dq_strides, b, i), dq_strides[2], out, heads, c, -s, HALF, WIDTH, HEADS)
    if dk is not None:
        out += heads * (2 * HALF)
        turn_heads(token_of(dk, dk_strides, b, i), dk_strides[2], out, kv_heads, c, -s, HALF, WIDTH, KV_HEADS)
        out += kv_heads * (2 * HALF)
        turn_heads(token_of(dv, dv_strides, b, i), dv_strides[2], out, kv_heads, 1.0, 0.0, HALF, WIDTH, KV_HEADS)


def check_rope(x: Tensor, cos: Tensor, sin: Tensor) -> dict:
    """Raise ValueError if x [B, S, heads, D] does not fit its angles. Returns the constants of a launch."""
    half = cos.shape[-1]
    check(x.dim() == 4 and x.shape[3] == 2 * half, f"x {list(x.shape)} must be B S heads {2 * half}")
    check(cos.shape == sin.shape and cos.shape[-2] == 1 and cos.shape[:-2] in (x.shape[:2], x.shape[1:2]),
          f"cos {list(cos.shape)} and sin {list(sin.shape)} must be [B] S 1 D/2 for x {list(x.shape)}")
    check_launch(x, cos, sin)
    width, heads = triton.next_power_of_2(half), triton.next_power_of_2(x.shape[2])
    return dict(HALF=half, WIDTH=width, HEADS=heads, num_warps=min(8, max(1, width * heads // 512)))


@custom_op("penteract::rope_", mutates_args=("x",))
def rope_(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> None:
    """Rotate pairs (x[i], x[i + D/2]) of the first `heads` heads of x [B, S, N, D] by the token's angles, in place. One
    launch rotates queries and keys, which are contiguous in memory. cos, sin: [S, 1, D/2] or [B, S, 1, D/2]."""
    check(0 < heads <= x.shape[2], f"x {list(x.shape)} has no {heads} heads to rotate")
    launch, tokens = check_rope(x[:, :, :heads], cos, sin), x.flatten(0, 1)
    check(tokens.data_ptr() == x.data_ptr() and tokens.stride()[1:] == (x.shape[3], 1),
          f"tokens must be evenly spaced and a token's heads contiguous, not {x.stride()}")
    rope_kernel[(len(tokens),)](tokens, cos.contiguous(), sin.contiguous(), cos.numel() // cos.shape[-1],
                                tokens.stride(0), heads, **launch)


@custom_op("penteract::rope_backward", mutates_args=())
def rope_backward(dq: Tensor, dk: Tensor | None, dv: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient [B, S, N + 2 K, D] of queries, keys and values side by side, before queries and keys were rotated:
    from dq [B, S, N, D] and dk, dv [B, S, K, D] of any strides, or from dq alone: [B, S, N, D]."""
    dx, (B, S, N, _) = make_rope_gradient(dq, dk, dv, cos, sin), dq.shape
    launch = check_rope(dq, cos, sin)
    dq, dk, dv = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (dq, dk, dv))
    strides = [(0, 0, 0) if x is None else x.stride()[:3] for x in (dq, dk, dv)]
    kv_heads = 0 if dk is None else dk.shape[2]
    rope_backward_kernel[(B * S,)](
        dq, dk, dv, dx, cos.contiguous(), sin.contiguous(), cos.numel() // cos.shape[-1], S,
        *strides, N, kv_heads, KV_HEADS=triton.next_power_of_2(kv_heads), **launch)
    return dx


@rope_backward.register_fake
def make_rope_gradient(dq, dk, dv, cos, sin):
    check((dk is None) == (dv is None) and (dk is None or dk.shape == dv.shape and dq.dtype == dk.dtype == dv.dtype and
                                            (*dk.shape[:2], dk.shape[3]) == (*dq.shape[:2], dq.shape[3])),
          "dq, dk and dv must be B S N D, B S K D and B S K D, of one type, or dq alone")
    B, S, N, D = dq.shape
    return dq.new_empty(B, S, N + (0 if dk is None else 2 * dk.shape[2]), D)


# ---- SwiGLU ---------------------------------------------------------------------------------------------------------

SWIGLU_BLOCK = 1024


@triton.jit
def swiglu_kernel(x, dy, out, F, BLOCK: tl.constexpr, BACKWARD: tl.constexpr):
    """A program has BLOCK of a row's F gates and F ups. Moves 3 T F e bytes; backward 5 T F e."""
    t, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    gate = tl.load(x + t * 2 * F + column, inside, other=0.0).to(tl.float32)
    up = tl.load(x + t * 2 * F + F + column, inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    if BACKWARD:
        grad = tl.load(dy + t * F + column, inside, other=0.0).to(tl.float32)
        dgate = (grad * up * sigmoid * (1 + gate * (1 - sigmoid))).to(out.dtype.element_ty)
        dup = (grad * gate * sigmoid).to(out.dtype.element_ty)
        tl.store(out + t * 2 * F + column, dgate, inside)
        tl.store(out + t * 2 * F + F + column, dup, inside)
    else:
        y = (gate * sigmoid * up).to(out.dtype.element_ty)
        tl.store(out + t * F + column, y, inside)


def launch_swiglu(x: Tensor, dy: Tensor, out: Tensor, backward: bool) -> Tensor:
    F = x.shape[-1] // 2
    grid = x.numel() // (2 * F), triton.cdiv(F, SWIGLU_BLOCK)
    swiglu_kernel[grid](x.contiguous(), dy.contiguous(), out, F, SWIGLU_BLOCK, backward, num_warps=4)
    return out


def make_swiglu_output(x: Tensor) -> Tensor:
    check(x.dim() > 0 and x.shape[-1] % 2 == 0 and x.shape[-1] > 0, f"x {list(x.shape)} must end with gate and up")
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@custom_op("penteract::swiglu", mutates_args=())
def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up, where x is gate and up side by side: [..., 2F] -> [..., F]."""
    check_launch(x)
    y = make_swiglu_output(x)
    return launch_swiglu(x, y, y, backward=False)


@custom_op("penteract::swiglu_backward", mutates_args=())
def swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """dx [..., 2F], from dy [..., F] and x [..., 2F]."""
    check_launch(x, dy)
    check(dy.shape == make_swiglu_output(x).shape, f"dy {list(dy.shape)} must be half as wide as x {list(x.shape)}")
    return launch_swiglu(x, dy, x.new_empty(x.shape), backward=True)


swiglu.register_fake(make_swiglu_output)
swiglu_backward.register_fake(lambda dy, x: x.new_empty(x.shape))


# ---- weight gradients of experts ------------------------------------------------------------------------------------

GROUPED_TILE = (64, 128, 128)  # rows per step, and the tile of the result


@triton.jit
def grouped_product_kernel(dy, x, ends, out, N, K, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """A program adds to a tile of an expert's matrix: out[e] += dy^T x of its rows; without rows it adds nothing."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    expert = tl.program_id(2)
    first, end = tl.load(ends + expert - 1, expert > 0, other=0), tl.load(ends + expert)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(first, end, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        a = tl.load(dy + row * N + n[None, :], (row < end) & (n[None, :] < N), other=0.0)
        b = tl.load(x + row * K + k[None, :], (row < end) & (k[None, :] < K), other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision="ieee")
    if end > first:
        place = out + expert.to(tl.int64) * N * K + n[:, None] * K + k[None, :]
        inside = (n[:, None] < N) & (k[None, :] < K)
        tl.store(place, tl.load(place, inside) + total, inside)


@custom_op("penteract::add_grouped_product", mutates_args=("out",))
def add_grouped_product(out: Tensor, dy: Tensor, x: Tensor, ends: Tensor) -> None:
    """out[e] += dy[rows]^T x[rows] for the rows of each expert e, which end at ends[e]: fp32 [E, N, K], dy [R, N], x
    [R, K], ends int32 [E]. The host need not know how many rows an expert has."""
    check_launch(dy, x)
    check(out.dtype == torch.float32 and out.is_contiguous() and out.shape == (len(ends), dy.shape[1], x.shape[1]),
          f"out {list(out.shape)} must be contiguous, in fp32, [{len(ends)}, {dy.shape[1]}, {x.shape[1]}]")
    rows, block_n, block_k = GROUPED_TILE
    grid = triton.cdiv(out.shape[1], block_n), triton.cdiv(out.shape[2], block_k), len(out)
    grouped_product_kernel[grid](dy.contiguous(), x.contiguous(), ends, out, *out.shape[1:], rows, block_n, block_k,
                                 num_warps=8, num_stages=3)


add_grouped_product.register_fake(lambda out, dy, x, ends: None)


# ---- cross-entropy, fused with the head's matmul --------------------------------------------------------------------

@triton.jit
def softmax_kernel(logits, labels, weights, lse, label_logit, first, T, V, z_loss, BLOCK: tl.constexpr,
                   STATISTICS: tl.constexpr, GRADIENT: tl.constexpr):
    """A program has a row of V logits, or every so many-th row: those of the vocabulary from `first` on. STATISTICS:
    store logsumexp and the label's logit, or 0 where another rank has the label. GRADIENT: overwrite the logits with
    the loss's gradient. Moves 3 T V e bytes; the second reading finds a row in the L2 cache only if all rows that
    programs work on fit in there: 132 of 128k logits do (34 MB of 60), not those of several programs per SM."""
    for t in range(tl.program_id(0), T, tl.num_programs(0)):
        row = logits + tl.cast(t, tl.int64) * V
        label = tl.load(labels + t) - first
        has_label = (label >= 0) & (label < V)
        if STATISTICS:
            largest, sum_exp = -float("inf"), 0.0
            for n in range(0, V, BLOCK):
                column = n + tl.arange(0, BLOCK)
                x = tl.load(row + column, column < V, other=-float("inf")).to(tl.float32)
                new_largest = tl.maximum(largest, tl.max(x, 0))
                sum_exp = sum_exp * tl.exp(largest - new_largest) + tl.sum(tl.exp(x - new_largest), 0)
                largest = new_largest
            row_lse = largest + tl.log(sum_exp)
            tl.store(lse + t, row_lse)
            own_logit = tl.load(row + tl.where(has_label, label, 0), has_label, other=0.0)
            tl.store(label_logit + t, own_logit.to(tl.float32))
        else:
            row_lse = tl.load(lse + t)
        if GRADIENT:
            weight = tl.load(weights + t)
            slope = weight * (1 + 2 * z_loss * row_lse)
            for n in range(0, V, BLOCK):
                column = n + tl.arange(0, BLOCK)
                x = tl.load(row + column, column < V, other=-float("inf")).to(tl.float32)
                grad = slope * tl.exp(x - row_lse) - tl.where(column == label, weight, 0.0)
                tl.store(row + column, grad.to(logits.dtype.element_ty), column < V)


@custom_op("penteract::softmax_", mutates_args=("logits", "lse", "label_logit"))
def softmax_(logits: Tensor, labels: Tensor, weights: Tensor, lse: Tensor, label_logit: Tensor, first: int,
             z_loss: float, statistics: bool, gradient: bool) -> None:
    """Launch softmax_kernel. logits: [T, V/t], columns `first` to first + V/t of the vocabulary. Other tensors: [T]."""
    T, V = logits.shape
    check(labels.shape == weights.shape == lse.shape == label_logit.shape == (T,), f"{T} rows of logits need as many "
          f"labels, weights and outputs, not {len(labels)}, {len(weights)}, {len(lse)} and {len(label_logit)}")
    check(logits.is_contiguous() and V > 0, f"logits {list(logits.shape)} must be contiguous and not empty")
    check_launch(logits, weights, lse, label_logit)
    block = min(8192, triton.next_power_of_2(V))
    softmax_kernel[(T,)](logits, labels, weights, lse, label_logit, first, T, V, z_loss, block,
                                             statistics, gradient, num_warps=max(1, block // 512))


class LinearCrossEntropy(Function):
    """See linear_cross_entropy. Saves dx, and no logits."""

    @staticmethod
    def forward(ctx, x, weight, labels, weights, z_loss, first, group, chunk, loss_grad):
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        dx, token_grads = torch.empty_like(x) if wants_dx else None, weights * loss_grad
        lse, label_logit = x.new_empty(2, len(x), dtype=torch.float32)
        matrix, wants_gradient, is_sharded = weight.detach(), wants_dx or wants_dw, size(group) > 1
        buffer = x.new_empty(min(chunk, len(x)), len(weight))
        for start in range(0, len(x), chunk):
            rows = slice(start, start + chunk)
            logits = torch.mm(x[rows], matrix.t(), out=buffer[:len(x[rows])])
            inputs = labels[rows], token_grads[rows], lse[rows], label_logit[rows], first, z_loss
            softmax_(logits, *inputs, statistics=True, gradient=wants_gradient and not is_sharded)
            if is_sharded:
                combine_statistics(lse[rows], label_logit[rows], group)
            if is_sharded and wants_gradient:
                softmax_(logits, *inputs, statistics=False, gradient=True)
            if wants_dx:
                torch.mm(logits, matrix, out=dx[rows])
            if wants_dw:
                accumulate_grad(weight, partial(accumulate_product, a=logits.t(), b=x[rows]), defer=False)
        ctx.weight = weight if wants_dw else None
        ctx.save_for_backward(dx, loss_grad)
        return (weights * (lse - label_logit + z_loss * lse.square())).sum()

    @staticmethod
    def backward(ctx, grad):
        dx, loss_grad = ctx.saved_tensors
        torch._assert_async((grad == loss_grad).all())  # on a GPU the host does not wait for the answer
        if ctx.weight is not None:  # its gradient is there; the next one of ZeRO levels 2 and 3 needs a buffer, too
            accumulate_grad(ctx.weight, lambda out: None, defer=False)
        return dx, *[None] * 8


def combine_statistics(lse: Tensor, label_logit: Tensor, group: Group) -> None:
    """Reduce the logsumexp and label logit of each rank's columns to those of the full vocabulary, in place."""
    largest = lse.clone()
    all_reduce(largest, group, MAX)
    sums = torch.stack((lse.sub_(largest).exp_(), label_logit))
    all_reduce(sums, group)
    torch.add(sums[0].log_(), largest, out=lse)
    label_logit.copy_(sums[1])


def linear_cross_entropy(x: Tensor, weight: torch.nn.Parameter, labels: Tensor, weights: Tensor | None = None,
                         z_loss: float = 0.0, vocab: slice | None = None, group: Group = None,
                         chunk: int = 4096, loss_grad: Tensor | None = None) -> Tensor:
    """The sum of the tokens' losses, in nats, for logits x W^T, as tp.cross_entropy; IGNORED labels have none.

    Unless autograd is off, this accumulates the gradient of `weight` already, so call backward once on the result, or
    on what is computed from it; there its gradient must be loss_grad (a scalar tensor, default 1), which is checked.

    x: [T, H], the same on all ranks of the group; its gradient is partial: this rank's term of a sum over the group.
    weight: [V/t, H], the rows `vocab` of the head (default: all); its gradient goes through `accumulate_grad`.
    labels: [T]. weights: [T], factors of the losses. chunk: tokens whose logits exist at once, chunk V/t e bytes.
    """
    vocab = slice(0, len(weight)) if vocab is None else vocab
    check(x.dim() == weight.dim() == 2 and x.shape[1] == weight.shape[1] and x.dtype == weight.dtype,
          f"x {list(x.shape)} {x.dtype} and weight {list(weight.shape)} {weight.dtype} must be T H, V H, of one type")
    check(vocab.stop - vocab.start == len(weight) > 0, f"{len(weight)} weight rows, vocab {vocab.start}..{vocab.stop}")
    check(labels.shape == x.shape[:1] and (weights is None or weights.shape == labels.shape),
          f"{len(x)} tokens need as many labels, and as many weights or none; there are {list(labels.shape)} labels")
    check(chunk > 0, f"chunk is {chunk}; use 2048 or 4096")
    check_launch(x, weight)
    if not torch.is_grad_enabled():  # gradients would be computed for nothing
        x, weight = x.detach(), weight.detach()
    labels, counts = labels.contiguous(), (labels != IGNORED).float()
    weights = counts if weights is None else counts * weights
    loss_grad = counts.new_ones(()) if loss_grad is None else loss_grad.to(counts.dtype)
    return LinearCrossEntropy.apply(x, weight, labels, weights, z_loss, vocab.start, group, chunk, loss_grad)


# ---- FP8: both quantised copies of a matrix -------------------------------------------------------------------------
#
# A program has a tile of 128 x 128. Its rows are blocks of the rowwise copy, its columns are blocks of the columnwise
# one, so that one reading of x serves both. (With `tiles`, one scale of the tile does; if the whole tensor has one
# scale, tiles are narrower.) Bytes per element: 2 read, 1 + 1 written, 2/32 of scales. 16k x 4096 elements take 68 us
# at 4 TB/s.
#
#                    ┌──────┐ ──► amax of each row ─────► rowwise     [T, K]
#       x  T K  ──►  │ tile │
#                    └──────┘ ──► amax of each column ──► columnwise  [K, T]
#
# On a CPU Triton's interpreter runs it, in fp32.

QUANTISED_BLOCK = 128
# Columns of quantise_kernel's tile, and warps: Triton 3.6, too, needs at most 128 registers per thread for them. (With
# 128 columns and 8 warps it takes 247 for one scale and 221 for tiles, and one program fills an SM.)
SHAPES = {"one scale": (64, 8), "blocks": (128, 8), "tiles": (128, 16)}
# Triton's name, mantissa bits, exponent of the smallest normal number.
FORMATS = {torch.float8_e4m3fn: (tl.float8e4nv, 3, -6), torch.float8_e5m2: (tl.float8e5, 2, -14)}
Matrix = tuple[Tensor, Tensor]  # an fp8.Quantised: data, scales (here views of [C/128, R], as cuBLAS reads)


@triton.jit
def round_to_format(x, BITS: tl.constexpr, LOWEST: tl.constexpr):
    """x rounded to the nearest number of a format, still in fp32: adding 1.5 x 2^23 rounds to integers."""
    exponent = tl.maximum(((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127, LOWEST)
    step = ((exponent - BITS + 127) << 23).to(tl.float32, bitcast=True)
    return ((x / step + 12582912.0) - 12582912.0) * step


@triton.jit
def to_fp8(x, LIMIT: tl.constexpr, FORMAT: tl.constexpr, BITS: tl.constexpr, LOWEST: tl.constexpr, ROUND: tl.constexpr):
    x = tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if ROUND:  # in the interpreter, whose cast carries into the exponent wrongly, and makes numbers of NaN
        data = round_to_format(x, BITS, LOWEST).to(FORMAT).to(tl.uint8, bitcast=True)
        return tl.where(x == x, data, 0x7F).to(tl.uint8).to(FORMAT, bitcast=True)
    return x.to(FORMAT)


@triton.jit
def scale_of(amax, LIMIT: tl.constexpr, SMALLEST: tl.constexpr, POW2: tl.constexpr):
    scale = tl.div_rn(tl.maximum(amax, SMALLEST, propagate_nan=tl.PropagateNan.ALL), LIMIT)
    if POW2:  # see fp8.scale_of
        next_exponent = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(scale < float("inf"), next_exponent, scale)
    return scale


@triton.jit
def quantise_kernel(x, scale, rowwise, row_scales, columnwise, column_scales, T, K, T_padded, ONE: tl.constexpr,
                    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, LIMIT: tl.constexpr, SMALLEST: tl.constexpr,
                    POW2: tl.constexpr, FORMAT: tl.constexpr, BITS: tl.constexpr, LOWEST: tl.constexpr,
                    ROUND: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr):
    """ONE: `scale` is that of the whole tensor. TILES: one scale per tile. T_padded: columns of the columnwise copy.
    WIDTH: columns of the tile; BLOCK, unless there is one scale."""
    i, j = tl.program_id(1), tl.program_id(0)
    t, k = i * BLOCK + tl.arange(0, BLOCK), j * WIDTH + tl.arange(0, WIDTH)
    offsets = t.to(tl.int64)[:, None] * K + k[None, :]
    inside = (t < T)[:, None] & (k < K)[None, :]
    tile = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    if ONE:
        tile = tile * tl.div_rn(1.0, tl.load(scale))
    if TILES:
        by_tile = scale_of(tl.max(tl.max(tl.abs(tile), 1), 0), LIMIT, SMALLEST, POW2)
        tl.store(row_scales + j * tl.num_programs(1) + i, by_tile)
        tile = tile * tl.div_rn(1.0, by_tile)
    if ROWWISE:
        scaled = tile
        if not (ONE or TILES):
            by_row = scale_of(tl.max(tl.abs(tile), 1), LIMIT, SMALLEST, POW2)
            tl.store(row_scales + j.to(tl.int64) * T + t, by_row, mask=t < T)
            scaled = tile * tl.div_rn(1.0, by_row)[:, None]
        tl.store(rowwise + offsets, to_fp8(scaled, LIMIT, FORMAT, BITS, LOWEST, ROUND), mask=inside)
    if COLUMNWISE:
        scaled = tile
        if not (ONE or TILES):
            by_column = scale_of(tl.max(tl.abs(tile), 0), LIMIT, SMALLEST, POW2)
            tl.store(column_scales + i.to(tl.int64) * K + k, by_column, mask=k < K)
            scaled = tile * tl.div_rn(1.0, by_column)[None, :]
        transposed = tl.trans(to_fp8(scaled, LIMIT, FORMAT, BITS, LOWEST, ROUND))
        tl.store(columnwise + k.to(tl.int64)[:, None] * T_padded + t[None, :], transposed,
                 mask=(k < K)[:, None] & (t < T_padded)[None, :])


def quantise(x: Tensor, dtype: torch.dtype, scale: Tensor | None, smallest: float, pow2: bool = False,
             rowwise: bool = True, columnwise: bool = True, tiles: bool = False) -> tuple[Matrix | None, Matrix | None]:
    """fp8.quantise of x [T, K]. smallest: fp8.SMALLEST. Raises ValueError if x has no whole blocks."""
    (T, K), x, by_block = x.shape, x.contiguous(), scale is None
    T_padded = T + -T % (QUANTISED_BLOCK if by_block else 16)
    width, num_warps = SHAPES["tiles" if tiles else "blocks" if by_block else "one scale"]
    across, down = triton.cdiv(K, width), triton.cdiv(T, QUANTISED_BLOCK)
    if by_block and (K % QUANTISED_BLOCK or tiles and T % QUANTISED_BLOCK):
        raise ValueError(f"{T} x {K} has no blocks of 128{' x 128' if tiles else ''}")
    format, bits, lowest = FORMATS[dtype]
    a, b = x.new_empty(T if rowwise else 0, K, dtype=dtype), x.new_empty(K, T_padded if columnwise else 0, dtype=dtype)
    a_scales = x.new_empty(across, down if tiles else T if rowwise and by_block else 0, dtype=torch.float32)
    b_scales = x.new_empty(down, K if columnwise and by_block and not tiles else 0, dtype=torch.float32)
    if T:
        quantise_kernel[(across, down)](
            x, scale, a, a_scales, b, b_scales, T, K, T_padded, ONE=not by_block, ROWWISE=rowwise,
            COLUMNWISE=columnwise, LIMIT=torch.finfo(dtype).max, SMALLEST=smallest, POW2=pow2, FORMAT=format, BITS=bits,
            LOWEST=lowest, ROUND=INTERPRETED, BLOCK=QUANTISED_BLOCK, TILES=tiles, WIDTH=width,
            num_warps=num_warps)
    by_column = a_scales if tiles else b_scales.t()
    return ((a, a_scales.t() if by_block else scale) if rowwise else None,
            (b, by_column if by_block else scale) if columnwise else None)
