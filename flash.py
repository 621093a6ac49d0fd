"""FlashAttention: attention whose scores [S, S] are never in memory, forward and backward, in Triton.

A GPU computes some 200 FLOPs in the time it moves one byte, and writing scores, reading them, writing softmax … moves
bytes for a few FLOPs each. Here a program holds some queries and goes through the keys, tile by tile:

           keys ──►                      ■ all visible, no mask needed      m  largest score so far
    q 0    ◩ · · · · ·                   ◩ mask needed                      l  sum of exp(score - m)
      1    ■ ◩ · · · ·                   · not even loaded                  o  sum of exp(score - m) v
      2    ■ ■ ◩ · · ·   ◄── a program
      3    ■ ■ ■ ◩ · ·       for each tile:  m' = max(m, max s)     l, o *= exp(m - m')     p = exp(s - m')
      4    · · · · ◩ ·                       l += sum p             o += p v                m = m'
      5    · · · · ■ ◩       at the end:     o / l, and for backward l' = m + log l (logsumexp), one number a row
           └─ document ─┘

Backward computes p = exp(s - l') again. With dp = do v^T, delta = sum(do o) of a row and ds = p (dp - delta):

    dq = ds k      a program holds queries and goes through keys        dk = ds^T q,  dv = p^T do      the reverse

Two kernels, so that no two programs add to the same memory: no atomics, and the same bits every time. It costs the
scores once more: 7 matmuls instead of 5.

FlashAttention 1 goes through keys outside and through queries inside, and so reads and writes o and dq once a tile of
keys. FlashAttention 2, and what is below, turns that round: o stays in registers until it is whole and is divided by l
once; rows are programs of their own, so that few long sequences fill a GPU, too. FlashAttention 3 is 2 for Hopper: some
warps do nothing but load (TMA), two groups of others take turns at softmax and matmul (wgmma), in FP8 if wanted. What
Triton makes of the code below uses wgmma, too, but loads and softmax are not given to different warps.

What the FlashAttention paper measured, forward and backward of GPT-2 medium (B 64, N 16, S 1024, D 64), by formula:

                 in memory                                                   GB        "GFLOPs"
    standard     18 B N S S + 12 B N S D numbers of 2 bytes                  40.3      66.6
    Flash 1      (8 + 8 c) B N S D of 2 bytes, (2 + 6 c) B N S of 4          4.4       75.2

Standard, passes over scores (one for a read or a write): 1 gives s, 2 add the mask, 2 softmax, 2.5 dropout (its mask is
a byte), 1 takes p; backward 1, 1, 2.5, 3 and 2 for dv, dp, dropout, softmax, dq and dk. Flash 1: its outer loop turns
c = 3 times, as keys and values of M / 4D = 384 tokens at a time fit in the M numbers of an A100's on-chip memory. What
its FLOPs are, the paper does not say. 6 and 7 matmuls are 825 and 962 GFLOP; but if these count 1/16, as A100 tensor
cores are 16 times as fast as its other units, and each score has 14 other operations (1 mask, 5 softmax, 2 dropout;
backward 2 and 4), both numbers are as printed. So we read them, and the passes over scores, which fit as well.

The operators are torch's (torch.ops.penteract), as those of kernels.py. In 16 bits, sums and exponentials are fp32.
Offsets that may pass 2^31 elements are 64 bits.

Dao et al. 2022, FlashAttention (algorithms 1 and 4, figure 2); Dao 2023, FlashAttention-2; Shah et al. 2024,
FlashAttention-3; Milakov & Gimelshein 2018 (online softmax).
Letters: B batch, S sequence, N heads, K key and value heads, D head width.
"""
from math import ceil
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.library import custom_op

from kernels import check, check_launch
from param import at_least_fp32

Tensor = torch.Tensor
LOG2_E = tl.constexpr(1.4426950408889634)  # GPUs have 2^x: exp(x) = 2^(x log2 e)


# ---- costs ----------------------------------------------------------------------------------------------------------

class Cost(NamedTuple):
    flops: float
    nbytes: float


TENSOR_CORES, OTHERS = 16, 14  # speed of an A100's, relative to its other units; operations a score but matmuls


def attention_cost(how: str, B: int, N: int, S: int, D: int, itemsize: int = 2, on_chip: int = 192 * 1024) -> Cost:
    """FLOPs of all matmuls, and bytes read and written, of forward and backward without causal mask.

    how: "standard" (scores in memory, with mask and dropout), "flash 1" (algorithms 1 and 4 of the paper, on_chip bytes
    of memory beside each unit) or "here" (what the L2 cache holds is read once a kernel).
    """
    matmul, tensor, numbers = 2 * B * N * S * S * D, B * N * S * D * itemsize, B * N * S * 4
    if how == "standard":
        forward, backward = 1 + 2 + 2 + 2.5 + 1, 1 + 1 + 2.5 + 3 + 2  # passes over scores
        return Cost(6 * matmul, (forward + backward) * B * N * S * S * itemsize + (4 + 8) * tensor)
    if how == "flash 1":
        turns = ceil(S / (on_chip // itemsize // (4 * D)))
        forward = (2 + 1 + 3 * turns) * tensor + (2 + 4 * turns) * numbers  # k v; o = 0; q o, o; m l = 0; m l, m l
        backward = (2 + 2 + 1 + 5 * turns) * tensor + 2 * turns * numbers  # k v; dk dv; dq = 0; q o do dq, dq; m l
        return Cost(7 * matmul, forward + backward)
    forward, backward = 4 * tensor, (6 + 6) * tensor  # q k v, o; q k v o do, dq; q k v do, dk dv
    return Cost(9 * matmul, forward + backward + 5 * numbers)


def published_flops(how: str, B: int, N: int, S: int, D: int) -> float:
    """FLOPs as figure 2 of Dao et al. 2022 seems to count them, see above."""
    return attention_cost(how, B, N, S, D).flops / TENSOR_CORES + OTHERS * B * N * S * S


# ---- reference ------------------------------------------------------------------------------------------------------

def attention_reference(q: Tensor, k: Tensor, v: Tensor, causal: bool = True,
                        documents: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """(o, logsumexp) as `flash_forward`, with all scores in memory."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)).to(at_least_fp32(q.dtype)) * q.shape[-1] ** -0.5
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril(k.shape[2] - q.shape[2])
    if documents is not None:
        seen = seen & (documents[0][:, None, :, None] == documents[1][:, None, None, :])
    scores = scores.masked_fill(~seen, -torch.inf)
    p = scores.softmax(-1).masked_fill(~seen, 0)  # a row that sees nothing: nan, but for this
    return p.to(v.dtype) @ v, scores.logsumexp(-1)


# ---- tiles ----------------------------------------------------------------------------------------------------------

class Tiling(NamedTuple):
    """Queries and keys in a tile of scores; warps in a program; how many tiles are loaded ahead, plus one."""
    rows: int
    columns: int
    num_warps: int
    num_stages: int


TILINGS = {("forward", 64): Tiling(128, 128, 8, 3), ("forward", 128): Tiling(128, 64, 8, 3),
           ("dq", 64): Tiling(128, 64, 8, 3), ("dq", 128): Tiling(128, 64, 8, 3),
           ("dkv", 64): Tiling(64, 128, 8, 2), ("dkv", 128): Tiling(32, 128, 8, 2)}
FP32_TILING = Tiling(32, 32, 4, 2)


def tiling(step: str, q: Tensor, causal: bool, documents: Tensor | None) -> tuple[Tiling, dict]:
    """The tiling of a kernel and what it is launched with. WIDTH: a power of 2, and no less than tensor cores take."""
    D = q.shape[-1]
    width = max(16, triton.next_power_of_2(D))
    tiles = TILINGS[step, max(64, width)] if q.element_size() == 2 else FP32_TILING
    return tiles, dict(D=D, WIDTH=width, ROWS=tiles.rows, COLUMNS=tiles.columns, CAUSAL=causal,
                       DOCUMENTS=int(documents is not None), num_warps=tiles.num_warps, num_stages=tiles.num_stages)


@triton.jit
def head_of(x, strides, b, h):
    """Where head h of sequence b begins."""
    return x + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]


@triton.jit
def of_sequence(numbers, b, count):
    """Where numbers of sequence b begin, of which each has `count`."""
    return numbers + tl.cast(b, tl.int64) * count


@triton.jit
def load_numbers(numbers, b, tokens, count):
    return tl.load(of_sequence(numbers, b, count) + tokens, tokens < count, other=0)


@triton.jit
def pointers_to(x, start, stride, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    rows = tl.arange(0, COUNT).to(tl.int64) * stride
    return x + tl.cast(start, tl.int64) * stride + rows[:, None] + tl.arange(0, WIDTH)[None, :]


@triton.jit
def is_inside(start, count, D: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    return (start + tl.arange(0, COUNT) < count)[:, None] & (tl.arange(0, WIDTH) < D)[None, :]


@triton.jit
def load_tile(x, start, stride, count, D: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr, EDGE: tl.constexpr):
    """Rows start, start + 1 … of the `count` rows of x, with 0 for what is outside; EDGE: some rows may be."""
    pointers = pointers_to(x, start, stride, WIDTH, COUNT)
    if EDGE or D < WIDTH:
        return tl.load(pointers, is_inside(start, count, D, WIDTH, COUNT), other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_tile(x, tile, start, stride, count, D: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    inside = is_inside(start, count, D, WIDTH, COUNT)
    tl.store(pointers_to(x, start, stride, WIDTH, COUNT), tile.to(x.dtype.element_ty), inside)


@triton.jit
def seen(scores, i, j, i_document, j_document, ahead, hidden, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Replace by `hidden` what query i does not see of key j. Causal: it sees keys up to i + ahead."""
    if CAUSAL:
        scores = tl.where(j <= i + ahead, scores, hidden)
    if DOCUMENTS:
        scores = tl.where(i_document == j_document, scores, hidden)
    return scores


@triton.jit
def span(own, start, own_count, others, count, OWN: tl.constexpr, AT_ONCE: tl.constexpr = 1024):
    """Document numbers of a tile of tokens, and from where to where other tokens may be of the same documents.

    Numbers need no order, but spans are narrow only if each document is in one piece.
    """
    tokens = start + tl.arange(0, OWN)
    numbers = tl.load(own + tokens, tokens < own_count, other=0)
    low = tl.min(tl.where(tokens < own_count, numbers, 2147483647))
    high = tl.max(tl.where(tokens < own_count, numbers, -2147483648))
    first, stop = count, 0
    for n in range(0, count, AT_ONCE):
        them = n + tl.arange(0, AT_ONCE)
        number = tl.load(others + them, them < count, other=0)
        meets = (them < count) & (low <= number) & (number <= high)
        first = tl.minimum(first, tl.min(tl.where(meets, them, count)))
        stop = tl.maximum(stop, tl.max(tl.where(meets, them + 1, 0)))
    return numbers, first, stop


# ---- kernels --------------------------------------------------------------------------------------------------------
# A loop over keys is written once and unrolled twice: for tiles that need no mask, and for those that do (all, if there
# are documents). scale: D^-0.5 log2 e, as 2^x takes the place of e^x.

@triton.jit
def own_queries(q_documents, k_documents, heads, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr):
    """(sequence, head, first query) of a program; and of its tile of queries (full, stop, documents). Keys from `stop`
    on are not seen; keys before `full` need no mask, or, if there are documents, are not seen either."""
    tiles = tl.cdiv(rows, ROWS)
    head = tl.program_id(0) // tiles
    b, start = head // heads, (tiles - 1 - tl.program_id(0) % tiles) * ROWS  # the last have most to do: they begin
    full, stop, i_document = columns, columns, 0
    if CAUSAL:
        full = tl.minimum(tl.maximum(start + 1 + columns - rows, 0), columns)
        stop = tl.maximum(tl.minimum(start + ROWS, rows) + columns - rows, 0)
    full = full // COLUMNS * COLUMNS
    if DOCUMENTS:
        q_documents, k_documents = of_sequence(q_documents, b, rows), of_sequence(k_documents, b, columns)
        i_document, begin, end = span(q_documents, start, rows, k_documents, columns, ROWS)
        i_document, full, stop = i_document[:, None], begin // COLUMNS * COLUMNS, tl.minimum(stop, end)
    return b, head % heads, start, full, stop, i_document


@triton.jit
def flash_forward_kernel(q, k, v, o, lse, q_documents, k_documents, q_strides, k_strides, v_strides, o_strides, scale,
                         heads, group, rows, columns, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
                         COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr):
    b, h, start, full, stop, i_document = own_queries(q_documents, k_documents, heads, rows, columns, ROWS, COLUMNS,
                                                      CAUSAL, DOCUMENTS)
    k, v = head_of(k, k_strides, b, h // group), head_of(v, v_strides, b, h // group)
    queries = load_tile(head_of(q, q_strides, b, h), start, q_strides[2], rows, D, WIDTH, ROWS, True)
    i, lse = start + tl.arange(0, ROWS), of_sequence(lse, b * heads + h, rows)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    for MASKED in tl.static_range(DOCUMENTS, 2):
        for n in range(full if MASKED else 0, stop if MASKED else full, COLUMNS):
            keys = load_tile(k, n, k_strides[2], columns, D, WIDTH, COLUMNS, MASKED)
            s = tl.dot(queries, tl.trans(keys), input_precision="ieee")
            if MASKED:
                j = n + tl.arange(0, COLUMNS)
                j_document = load_numbers(k_documents, b, j, columns)[None, :] if DOCUMENTS else 0
                s = tl.where(j[None, :] < columns, s, -float("inf"))
                s = seen(s, i[:, None], j[None, :], i_document, j_document, columns - rows, -float("inf"), CAUSAL,
                         DOCUMENTS)
            higher = tl.maximum(top, tl.max(s, 1) * scale)
            shift = tl.where(higher == -float("inf"), 0.0, higher) if MASKED else higher  # a row that sees nothing yet
            p = tl.exp2(s * scale - shift[:, None])
            fade = tl.exp2(top - shift)
            total = total * fade + tl.sum(p, 1)
            values = load_tile(v, n, v_strides[2], columns, D, WIDTH, COLUMNS, MASKED)
            out = tl.dot(p.to(values.dtype), values, out * fade[:, None], input_precision="ieee")
            top = higher
    store_tile(head_of(o, o_strides, b, h), out / tl.where(total == 0, 1.0, total)[:, None], start, o_strides[2], rows,
               D, WIDTH, ROWS)
    tl.store(lse + i, (top + tl.log2(total)) / LOG2_E, i < rows)


@triton.jit
def flash_dq_kernel(do, q, k, v, o, lse, dq, delta, q_documents, k_documents, do_strides, q_strides, k_strides,
                    v_strides, o_strides, dq_strides, scale, heads, group, rows, columns, D: tl.constexpr,
                    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr,
                    DOCUMENTS: tl.constexpr):
    """Also writes delta, for the next kernel."""
    b, h, start, full, stop, i_document = own_queries(q_documents, k_documents, heads, rows, columns, ROWS, COLUMNS,
                                                      CAUSAL, DOCUMENTS)
    k, v = head_of(k, k_strides, b, h // group), head_of(v, v_strides, b, h // group)
    queries = load_tile(head_of(q, q_strides, b, h), start, q_strides[2], rows, D, WIDTH, ROWS, True)
    grads = load_tile(head_of(do, do_strides, b, h), start, do_strides[2], rows, D, WIDTH, ROWS, True)
    outs = load_tile(head_of(o, o_strides, b, h), start, o_strides[2], rows, D, WIDTH, ROWS, True)
    i, row = start + tl.arange(0, ROWS), b * heads + h
    own_delta = tl.sum(grads.to(tl.float32) * outs.to(tl.float32), 1)
    tl.store(of_sequence(delta, row, rows) + i, own_delta, i < rows)
    own_lse = tl.load(of_sequence(lse, row, rows) + i, i < rows, other=0.0) * LOG2_E
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    for MASKED in tl.static_range(DOCUMENTS, 2):
        for n in range(full if MASKED else 0, stop if MASKED else full, COLUMNS):
            keys = load_tile(k, n, k_strides[2], columns, D, WIDTH, COLUMNS, MASKED)
            values = load_tile(v, n, v_strides[2], columns, D, WIDTH, COLUMNS, MASKED)
            p = tl.exp2(tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale - own_lse[:, None])
            if MASKED:
                j = n + tl.arange(0, COLUMNS)
                j_document = load_numbers(k_documents, b, j, columns)[None, :] if DOCUMENTS else 0
                p = tl.where(j[None, :] < columns, p, 0.0)
                p = seen(p, i[:, None], j[None, :], i_document, j_document, columns - rows, 0.0, CAUSAL, DOCUMENTS)
            ds = p * (tl.dot(grads, tl.trans(values), input_precision="ieee") - own_delta[:, None])
            out = tl.dot(ds.to(keys.dtype), keys, out, input_precision="ieee")
    store_tile(head_of(dq, dq_strides, b, h), out * (scale / LOG2_E), start, dq_strides[2], rows, D, WIDTH, ROWS)


@triton.jit
def flash_dkv_kernel(do, q, k, v, lse, delta, dk, dv, q_documents, k_documents, do_strides, q_strides, k_strides,
                     v_strides, dkv_strides, scale, heads, group, rows, columns, D: tl.constexpr, WIDTH: tl.constexpr,
                     ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Goes through all heads that share a key head. Tiles of scores lie on their side, keys by queries.

    The loop is not unrolled into two: registers, most of which hold dk and dv, would not suffice.
    """
    tiles = tl.cdiv(columns, COLUMNS)
    start, head = tl.program_id(0) % tiles * COLUMNS, tl.program_id(0) // tiles
    b, kv_head = head // (heads // group), head % (heads // group)
    keys = load_tile(head_of(k, k_strides, b, kv_head), start, k_strides[2], columns, D, WIDTH, COLUMNS, True)
    values = load_tile(head_of(v, v_strides, b, kv_head), start, v_strides[2], columns, D, WIDTH, COLUMNS, True)
    j = start + tl.arange(0, COLUMNS)
    first, stop, j_document = 0, rows, 0
    if CAUSAL:
        first = tl.maximum(start + rows - columns, 0)
    if DOCUMENTS:
        j_document, begin, stop = span(of_sequence(k_documents, b, columns), start, columns,
                                       of_sequence(q_documents, b, rows), rows, COLUMNS)
        first, j_document = tl.maximum(first, begin), j_document[:, None]
    grad_k = tl.zeros([COLUMNS, WIDTH], tl.float32)
    grad_v = tl.zeros([COLUMNS, WIDTH], tl.float32)
    for member in range(group):
        h = kv_head * group + member
        q_here, do_here = head_of(q, q_strides, b, h), head_of(do, do_strides, b, h)
        row = b * heads + h
        for n in range(first // ROWS * ROWS, stop, ROWS):
            queries = load_tile(q_here, n, q_strides[2], rows, D, WIDTH, ROWS, True)
            grads = load_tile(do_here, n, do_strides[2], rows, D, WIDTH, ROWS, True)
            i = n + tl.arange(0, ROWS)
            row_lse = tl.load(of_sequence(lse, row, rows) + i, i < rows, other=float("inf")) * LOG2_E  # no row: p = 0
            row_delta = tl.load(of_sequence(delta, row, rows) + i, i < rows, other=0.0)
            p = tl.exp2(tl.dot(keys, tl.trans(queries), input_precision="ieee") * scale - row_lse[None, :])
            i_document = load_numbers(q_documents, b, i, rows)[None, :] if DOCUMENTS else 0
            p = seen(p, i[None, :], j[:, None], i_document, j_document, columns - rows, 0.0, CAUSAL, DOCUMENTS)
            grad_v = tl.dot(p.to(grads.dtype), grads, grad_v, input_precision="ieee")
            ds = p * (tl.dot(values, tl.trans(grads), input_precision="ieee") - row_delta[None, :])
            grad_k = tl.dot(ds.to(queries.dtype), queries, grad_k, input_precision="ieee")
    store_tile(head_of(dk, dkv_strides, b, kv_head), grad_k * (scale / LOG2_E), start, dkv_strides[2], columns, D,
               WIDTH, COLUMNS)
    store_tile(head_of(dv, dkv_strides, b, kv_head), grad_v, start, dkv_strides[2], columns, D, WIDTH, COLUMNS)


# ---- operators ------------------------------------------------------------------------------------------------------

def check_attention(q: Tensor, k: Tensor, v: Tensor, q_documents: Tensor | None, k_documents: Tensor | None) -> None:
    check(q.dim() == k.dim() == 4 and k.shape == v.shape and k.shape[::3] == q.shape[::3],
          f"q {list(q.shape)} must be B N rows D, k {list(k.shape)} and v {list(v.shape)} B K columns D")
    check(k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0, f"{q.shape[1]} heads cannot share {k.shape[1]} of keys")
    check(q.shape[3] in range(1, 129), f"heads are {q.shape[3]} wide; at least 1 and at most 128 fit")
    check(q.dtype == k.dtype == v.dtype, f"q is {q.dtype}, k {k.dtype}, v {v.dtype}: they must be of one type")
    check_launch(q, k, v)
    check((q_documents is None) == (k_documents is None), "documents: of queries and of keys, or of neither")
    for documents, x in ((q_documents, q), (k_documents, k)):
        check(documents is None or documents.shape == x.shape[::2] and not documents.is_floating_point(),
              f"documents must be {list(x.shape[::2])} integers, a number for each token")


def empty_heads(B: int, N: int, rows: int, D: int, like: Tensor) -> Tensor:
    """Memory for B N rows D, in which heads of a token lie side by side, as the matmul after attention wants them."""
    return like.new_empty(B, rows, N, D).transpose(1, 2)


def in_rows(*tensors: Tensor) -> list[Tensor]:
    """Kernels take any strides but that of the last dimension."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def as_int32(documents: Tensor | None) -> Tensor | None:
    return None if documents is None else documents.to(torch.int32).contiguous()


@custom_op("penteract::flash_attention", mutates_args=())
def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, q_documents: Tensor | None,
                   k_documents: Tensor | None) -> tuple[Tensor, Tensor]:
    o, lse = _flash_forward_fake(q, k, v, causal, q_documents, k_documents)
    q, k, v = in_rows(q, k, v)
    q_documents, k_documents = as_int32(q_documents), as_int32(k_documents)
    (B, N, rows, D), (_, K, columns, _), (tiles, launch) = q.shape, k.shape, tiling("forward", q, causal, q_documents)
    flash_forward_kernel[(B * N * triton.cdiv(rows, tiles.rows),)](
        q, k, v, o, lse, q_documents, k_documents, q.stride(), k.stride(), v.stride(), o.stride(),
        D ** -0.5 * LOG2_E.value, N, N // K, rows, columns, **launch)
    return o, lse


@_flash_forward.register_fake
def _flash_forward_fake(q, k, v, causal, q_documents, k_documents):
    check_attention(q, k, v, q_documents, k_documents)
    return empty_heads(*q.shape, like=q), q.new_empty(q.shape[:3], dtype=torch.float32)


@custom_op("penteract::flash_attention_backward", mutates_args=())
def _flash_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool,
                    q_documents: Tensor | None, k_documents: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _flash_backward_fake(do, q, k, v, o, lse, causal, q_documents, k_documents)
    do, q, k, v, o = in_rows(do, q, k, v, o)
    lse, q_documents, k_documents = lse.contiguous(), as_int32(q_documents), as_int32(k_documents)
    delta, (B, N, rows, D), (_, K, columns, _) = torch.empty_like(lse), q.shape, k.shape
    numbers = D ** -0.5 * LOG2_E.value, N, N // K, rows, columns
    strides = do.stride(), q.stride(), k.stride(), v.stride()
    tiles, launch = tiling("dq", q, causal, q_documents)
    flash_dq_kernel[(B * N * triton.cdiv(rows, tiles.rows),)](
        do, q, k, v, o, lse, dq, delta, q_documents, k_documents, *strides, o.stride(), dq.stride(), *numbers, **launch)
    tiles, launch = tiling("dkv", q, causal, q_documents)
    flash_dkv_kernel[(B * K * triton.cdiv(columns, tiles.columns),)](
        do, q, k, v, lse, delta, dk, dv, q_documents, k_documents, *strides, dk.stride(), *numbers, **launch)
    return dq, dk, dv


@_flash_backward.register_fake
def _flash_backward_fake(do, q, k, v, o, lse, causal, q_documents, k_documents):
    check_attention(q, k, v, q_documents, k_documents)
    check(do.shape == o.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32,
          f"do {list(do.shape)} and o {list(o.shape)} must be as q {list(q.shape)}, lse {list(lse.shape)} fp32 as its "
          "rows")
    return (empty_heads(*q.shape, like=q), *(empty_heads(*k.shape, like=k) for _ in range(2)))


def _flash_save(ctx, inputs, output):
    q, k, v, ctx.causal, q_documents, k_documents = inputs
    ctx.save_for_backward(q, k, v, *output, q_documents, k_documents)
    ctx.mark_non_differentiable(output[1])


def _flash_autograd(ctx, do, _):
    q, k, v, o, lse, q_documents, k_documents = ctx.saved_tensors
    return (*_flash_backward(do, q, k, v, o, lse, ctx.causal, q_documents, k_documents), None, None, None)


_flash_forward.register_autograd(_flash_autograd, setup_context=_flash_save)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool = True,
                  documents: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Attention o [B N rows D] and the logsumexp of each row's scores [B N rows], fp32, -inf where a row sees nothing.

    q: B N rows D. k, v: B K columns D, K a divisor of N, any strides. D: up to 128; powers of 2 waste nothing.
    causal: the last query sees all keys, the one before it all but one … documents: numbers, below 2^31, of queries'
    documents (B rows) and keys' (B columns); a query sees those of its own number only. lse has no derivative.
    """
    return _flash_forward(q, k, v, causal, *(documents or (None, None)))


def flash_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool = True,
                   documents: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, the same bits every time. o, lse: of all keys that the queries see, if k and v are some of them.

    So `Block(flash_forward, flash_backward)` is attention of a block in context parallelism, see cp.py.
    """
    return _flash_backward(do, q, k, v, o, lse, causal, *(documents or (None, None)))


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, documents: Tensor | None = None) -> Tensor:
    """o alone, of queries and keys of the same tokens. documents: B S or None."""
    return flash_forward(q, k, v, causal, None if documents is None else (documents, documents))[0]


# ---- demo: TRITON_INTERPRET=1 python flash.py -----------------------------------------------------------------------

def tiles_loaded(documents: Tensor, rows: int, columns: int) -> list[list[bool]]:
    """Which tiles of scores the kernel computes, found out by experiment: values that are nan spoil every row of the
    tiles they enter, even where they are masked, and nothing else."""
    S = documents.shape[1]
    q, k = torch.zeros(2, 1, 1, S, 16)
    found = []
    for start in range(0, S, columns):
        v = torch.zeros(1, 1, S, 16)
        v[:, :, start:start + columns] = torch.nan
        found.append(flash_attention(q, k, v, True, documents)[0, 0, ::rows, 0].isnan().tolist())
    return [list(row) for row in zip(*found)]


def demo() -> None:
    sizes = torch.tensor([70, 60, 20, 106])
    documents = torch.arange(4).repeat_interleave(sizes)[None]
    print(f"256 tokens, tiles of 32 x 32. Computed (■), causal, then with documents of {sizes.tolist()} tokens:\n")
    for rows in zip(tiles_loaded(torch.zeros_like(documents), 32, 32), tiles_loaded(documents, 32, 32)):
        print("    " + "        ".join(" ".join("■" if tile else "·" for tile in row) for row in rows))
    shape = dict(B=64, N=16, S=1024, D=64)
    print(f"\nForward and backward without causal mask, {shape}:\n")
    for how, printed in (("standard", "66.6 and 40.3"), ("flash 1", "75.2 and 4.4"), ("here", None)):
        cost = attention_cost(how, **shape)
        print(f"    {how:9s} {cost.flops / 1e9:5.0f} GFLOP of matmuls {cost.nbytes / 1e9:6.1f} GB  "
              f"{cost.flops / cost.nbytes:4.0f} FLOPs a byte" +
              (f"  (published: {printed}; by formula {published_flops(how, **shape) / 1e9:.1f})" if printed else ""))
    print("\nAn H200 moves a byte in the time of 206 bf16 FLOPs: what has fewer waits for memory.")


if __name__ == "__main__":
    demo()
