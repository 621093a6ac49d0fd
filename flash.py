"""FlashAttention: attention whose scores [S, S] are never in memory, forward and backward, in Triton.

A GPU computes some 200 FLOPs in the time in which it moves one byte. Writing scores, reading them for the softmax, and
writing and reading its result moves many bytes for few FLOPs. Here a program has a tile of queries in registers and
loops over tiles of keys, with a running maximum and a running sum (online softmax):

           keys ──►
    q 0    ◩ · · · · ·                    ■ every query sees every key: no mask is applied
      1    ■ ◩ · · · ·                    ◩ the mask is applied
      2    ■ ■ ◩ · · ·   ◄── a program    · hidden: its keys and values are not loaded
      3    ■ ■ ■ ◩ · ·
      4    · · · · ◩ ·
      5    · · · · ■ ◩
           └ document ┘

m is the largest score so far, l the sum of exp(score - m), o the sum of exp(score - m) v. For each tile of scores s:

    m' = max(m, max s)     l, o *= exp(m - m')     p = exp(s - m')     l += sum p     o += p v     m = m'

The result is o / l. Backward recomputes p = exp(s - lse) from lse = m + log l (logsumexp), one number per row, and with
dp = do v^T, delta = sum(do o) per row and ds = p (dp - delta) computes

    dq = ds k                      in programs that have a tile of queries and loop over keys
    dk = ds^T q,  dv = p^T do      in programs that have a tile of keys and loop over queries

Two kernels, so that no two programs add to the same memory: no atomics, and the same bits in every run. The price is
that each of them computes the scores: 7 matmuls instead of 5.

What decides the speed on a GPU of Hopper's kind:

    occupancy           An SM has 65,536 registers, and a warp that waits hides its latency only behind other warps that
                        are there, too. A tile of 128 x 128 fp32 results takes 64 of the registers of 256 threads, so
                        one program of 8 warps fills an SM. Larger tiles reuse more, smaller ones wait less.
    asynchronous wgmma  A group of 4 warps starts a matmul on operands in shared memory, and may compute something else
                        until it needs the result. But the softmax of a tile needs its scores: a program that alone has
                        an SM waits for them, tensor cores idle meanwhile, then they wait for it.

FlashAttention 1 has the loop over queries inside that over keys, so it reads and writes o and dq once per tile of keys.
FlashAttention 2, like this file, exchanges the loops: o stays in registers until it is complete, and each tile of
queries is a program, so that even a few long sequences fill a GPU. FlashAttention 3 is 2 with warps of two kinds: one
asks the copy engine (TMA) for tiles, a few ahead; two groups of 4 have half of the rows each, and while one computes
its softmax, the other's matmul runs. `python -m plan.costs` prints the FLOPs and bytes of all.
Sums and exponentials are fp32. Offsets that may exceed 2^31 elements are 64 bits.

Dao et al. 2022, FlashAttention (algorithms 1 and 4, figure 2); Dao 2023, FlashAttention-2; Shah et al. 2024,
FlashAttention-3; Milakov & Gimelshein 2018 (online softmax).
Shapes: B batch, S sequence, N query heads, K key and value heads, D head width; rows queries, columns keys.
"""
import os
import sys
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from collectives import run_demo
from kernels import launch
from operations import CAUSAL, Mask

LOG2_E = tl.constexpr(1.4426950408889634)  # GPUs have 2^x: exp(x) = 2^(x log2 e)


# ---- tiles ----------------------------------------------------------------------------------------------------------

class Tiling(NamedTuple):
    """A tile of scores has rows x columns; num_warps are those of a program; num_stages - 1 tiles are loaded ahead."""
    rows: int
    columns: int
    num_warps: int
    num_stages: int


# Registers per thread decide, 65,536 of an SM's: up to 168 let three groups of 4 warps live on it, up to 255 two.
TILINGS = {
    ("forward", 64): Tiling(128, 128, 8, 3),
    ("forward", 128): Tiling(128, 64, 8, 3),  # 184: one program per SM, which waits for each matmul before its softmax
    ("dq", 64): Tiling(128, 64, 8, 3),  # 123: two programs per SM
    ("dq", 128): Tiling(128, 64, 8, 3),  # 210
    ("dkv", 64): Tiling(32, 128, 8, 2),
    ("dkv", 128): Tiling(32, 128, 8, 2)}  # dk and dv take 128 registers of 255: 64 rows of queries would be spilled
FP32_TILING = Tiling(32, 32, 4, 2)


def choose_tiling(step: str, q: Tensor, causal: bool, window: int, documents: Tensor | None) -> tuple[Tiling, dict]:
    """A kernel's tiling and launch options. WIDTH: D rounded up to a power of 2, at least 16 for tensor cores."""
    D = q.shape[-1]
    width = max(16, triton.next_power_of_2(D))
    tiles = TILINGS[step, max(64, width)] if q.element_size() == 2 else FP32_TILING
    if step == "dkv" and D < width:  # the mask of narrow heads takes the registers of a tile loaded ahead
        tiles = tiles._replace(num_stages=1)
    return tiles, dict(D=D, WIDTH=width, ROWS=tiles.rows, COLUMNS=tiles.columns, CAUSAL=causal, WINDOW=int(window > 0),
                       DOCUMENTS=int(documents is not None), num_warps=tiles.num_warps, num_stages=tiles.num_stages)


@triton.jit
def head_of(x, strides, b, h):
    """Pointer to head h of sequence b."""
    return x + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]


@triton.jit
def row_of(x, b, count):
    """Pointer to row b of x, whose rows have `count` elements."""
    return x + tl.cast(b, tl.int64) * count


@triton.jit
def load_documents(documents, b, tokens, count):
    return tl.load(row_of(documents, b, count) + tokens, tokens < count, other=0)


@triton.jit
def tile_pointers(x, start, stride, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    rows = tl.arange(0, COUNT).to(tl.int64) * stride
    return x + tl.cast(start, tl.int64) * stride + rows[:, None] + tl.arange(0, WIDTH)[None, :]


@triton.jit
def in_bounds(start, count, D: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    return (start + tl.arange(0, COUNT) < count)[:, None] & (tl.arange(0, WIDTH) < D)[None, :]


@triton.jit
def load_tile(x, start, stride, count, D: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr, EDGE: tl.constexpr):
    """COUNT rows of x [count, D] from row `start` on. EDGE: some may lie beyond the last; they are 0."""
    pointers = tile_pointers(x, start, stride, WIDTH, COUNT)
    if EDGE or D < WIDTH:
        return tl.load(pointers, in_bounds(start, count, D, WIDTH, COUNT), other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_tile(x, tile, start, stride, count, D: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    inside = in_bounds(start, count, D, WIDTH, COUNT)
    tl.store(tile_pointers(x, start, stride, WIDTH, COUNT), tile.to(x.dtype.element_ty), inside)


@triton.jit
def hide(scores, i, j, i_document, j_document, offset, window, hidden, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
         DOCUMENTS: tl.constexpr):
    """Replace with `hidden` the scores of queries i and keys j that operations.Mask hides."""
    if CAUSAL:
        scores = tl.where(j <= i + offset, scores, hidden)
    if WINDOW:
        scores = tl.where(j > i + offset - window, scores, hidden)
    if DOCUMENTS:
        scores = tl.where(i_document == j_document, scores, hidden)
    return scores


@triton.jit
def find_span(own, start, own_count, others, count, OWN: tl.constexpr, CHUNK: tl.constexpr = 1024):
    """Document numbers of a tile of `own` tokens, and the first and last + 1 of the `count` other tokens that may have
    one of them, those between the smallest and the largest. A narrow span only if documents are contiguous."""
    tokens = start + tl.arange(0, OWN)
    documents = tl.load(own + tokens, tokens < own_count, other=0)
    low = tl.min(tl.where(tokens < own_count, documents, 2147483647))
    high = tl.max(tl.where(tokens < own_count, documents, -2147483648))
    first, stop = count, 0
    for n in range(0, count, CHUNK):
        j = n + tl.arange(0, CHUNK)
        document = tl.load(others + j, j < count, other=0)
        meets = (j < count) & (low <= document) & (document <= high)
        first = tl.minimum(first, tl.min(tl.where(meets, j, count)))
        stop = tl.maximum(stop, tl.max(tl.where(meets, j + 1, 0)))
    return documents, first, stop


# ---- kernels --------------------------------------------------------------------------------------------------------
# Loops over keys are written once and compiled twice: for tiles that need no mask, and for those that do (all, if there
# are documents or a window). scale: D^-0.5 log2 e, for 2^x in place of e^x. heads: N. group: N / K. offset, window: see
# operations.Mask. lse, delta: [B, N, rows].

@triton.jit
def assign_queries(q_documents, k_documents, heads, rows, columns, offset, window, ROWS: tl.constexpr,
                   COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr):
    """A program's tile of queries: (sequence, head, first query, masked_from, stop, documents). Keys from `stop` on are
    hidden; keys before masked_from need no mask or, if there are documents or a window, are hidden, too."""
    tiles = tl.cdiv(rows, ROWS)
    head = tl.program_id(0) // tiles
    b, start = head // heads, (tiles - 1 - tl.program_id(0) % tiles) * ROWS  # the last have most keys: they start first
    masked_from, stop, i_document = columns, columns, 0
    if CAUSAL:
        masked_from = tl.minimum(tl.maximum(start + 1 + offset, 0), columns)
        stop = tl.minimum(tl.maximum(tl.minimum(start + ROWS, rows) + offset, 0), columns)
    if WINDOW:
        masked_from = tl.maximum(start + offset - window + 1, 0)
    masked_from = masked_from // COLUMNS * COLUMNS
    if DOCUMENTS:
        q_documents, k_documents = row_of(q_documents, b, rows), row_of(k_documents, b, columns)
        i_document, begin, end = find_span(q_documents, start, rows, k_documents, columns, ROWS)
        masked_from = tl.maximum(begin // COLUMNS * COLUMNS, masked_from * WINDOW)
        i_document, stop = i_document[:, None], tl.minimum(stop, end)
    return b, head % heads, start, masked_from, stop, i_document


@triton.jit
def flash_forward_kernel(q, k, v, o, lse, q_documents, k_documents, q_strides, k_strides, v_strides, o_strides, scale,
                         heads, group, rows, columns, offset, window, D: tl.constexpr, WIDTH: tl.constexpr,
                         ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
                         DOCUMENTS: tl.constexpr):
    """A program has a tile of queries and loops over keys. top, total, out: m, l and o above, exponents to base 2."""
    b, h, start, masked_from, stop, i_document = assign_queries(
        q_documents, k_documents, heads, rows, columns, offset, window, ROWS, COLUMNS, CAUSAL, WINDOW, DOCUMENTS)
    k = head_of(k, k_strides, b, h // group)
    v = head_of(v, v_strides, b, h // group)
    q = head_of(q, q_strides, b, h)
    queries = load_tile(q, start, q_strides[2], rows, D, WIDTH, ROWS, True)
    i, lse = start + tl.arange(0, ROWS), row_of(lse, b * heads + h, rows)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    for MASKED in tl.static_range(WINDOW | DOCUMENTS, 2):
        for n in range(masked_from if MASKED else 0, stop if MASKED else masked_from, COLUMNS):
            keys = load_tile(k, n, k_strides[2], columns, D, WIDTH, COLUMNS, MASKED)
            s = tl.dot(queries, tl.trans(keys), input_precision="ieee")
            if MASKED:
                j = n + tl.arange(0, COLUMNS)
                j_document = load_documents(k_documents, b, j, columns)[None, :] if DOCUMENTS else 0
                s = tl.where(j[None, :] < columns, s, -float("inf"))
                s = hide(s, i[:, None], j[None, :], i_document, j_document, offset, window, -float("inf"), CAUSAL,
                         WINDOW, DOCUMENTS)
            higher = tl.maximum(top, tl.max(s, 1) * scale)
            shift = tl.where(higher == -float("inf"), 0.0, higher) if MASKED else higher  # -inf: no visible key yet
            p = tl.exp2(s * scale - shift[:, None])
            decay = tl.exp2(top - shift)
            total = total * decay + tl.sum(p, 1)
            values = load_tile(v, n, v_strides[2], columns, D, WIDTH, COLUMNS, MASKED)
            out = tl.dot(p.to(values.dtype), values, out * decay[:, None], input_precision="ieee")
            top = higher
    store_tile(head_of(o, o_strides, b, h), out / tl.where(total == 0, 1.0, total)[:, None], start, o_strides[2], rows,
               D, WIDTH, ROWS)
    tl.store(lse + i, (top + tl.log2(total)) / LOG2_E, i < rows)


@triton.jit
def flash_dq_kernel(do, q, k, v, o, lse, dq, delta, q_documents, k_documents, do_strides, q_strides, k_strides,
                    v_strides, o_strides, dq_strides, scale, heads, group, rows, columns, offset, window,
                    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr):
    """A program has a tile of queries and loops over keys. It also writes delta, for flash_dkv_kernel."""
    b, h, start, masked_from, stop, i_document = assign_queries(
        q_documents, k_documents, heads, rows, columns, offset, window, ROWS, COLUMNS, CAUSAL, WINDOW, DOCUMENTS)
    k = head_of(k, k_strides, b, h // group)
    v = head_of(v, v_strides, b, h // group)
    q = head_of(q, q_strides, b, h)
    do = head_of(do, do_strides, b, h)
    o = head_of(o, o_strides, b, h)
    queries = load_tile(q, start, q_strides[2], rows, D, WIDTH, ROWS, True)
    grads = load_tile(do, start, do_strides[2], rows, D, WIDTH, ROWS, True)
    outs = load_tile(o, start, o_strides[2], rows, D, WIDTH, ROWS, True)
    i, row = start + tl.arange(0, ROWS), b * heads + h
    own_delta = tl.sum(grads.to(tl.float32) * outs.to(tl.float32), 1)
    tl.store(row_of(delta, row, rows) + i, own_delta, i < rows)
    own_lse = tl.load(row_of(lse, row, rows) + i, i < rows, other=0.0) * LOG2_E
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    for MASKED in tl.static_range(WINDOW | DOCUMENTS, 2):
        for n in range(masked_from if MASKED else 0, stop if MASKED else masked_from, COLUMNS):
            keys = load_tile(k, n, k_strides[2], columns, D, WIDTH, COLUMNS, MASKED)
            values = load_tile(v, n, v_strides[2], columns, D, WIDTH, COLUMNS, MASKED)
            p = tl.exp2(tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale - own_lse[:, None])
            if MASKED:
                j = n + tl.arange(0, COLUMNS)
                j_document = load_documents(k_documents, b, j, columns)[None, :] if DOCUMENTS else 0
                p = tl.where(j[None, :] < columns, p, 0.0)
                p = hide(p, i[:, None], j[None, :], i_document, j_document, offset, window, 0.0, CAUSAL, WINDOW,
                         DOCUMENTS)
            ds = p * (tl.dot(grads, tl.trans(values), input_precision="ieee") - own_delta[:, None])
            out = tl.dot(ds.to(keys.dtype), keys, out, input_precision="ieee")
    store_tile(head_of(dq, dq_strides, b, h), out * (scale / LOG2_E), start, dq_strides[2], rows, D, WIDTH, ROWS)


@triton.jit
def flash_dkv_kernel(do, q, k, v, lse, delta, dk, dv, q_documents, k_documents, do_strides, q_strides, k_strides,
                     v_strides, dkv_strides, scale, heads, group, rows, columns, offset, window, D: tl.constexpr,
                     WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr,
                     WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr):
    """A program has a tile of keys and loops over queries of all heads that use them. Tiles of scores are transposed:
    keys x queries. All are masked, because dk and dv take too many registers for a second loop."""
    tiles = tl.cdiv(columns, COLUMNS)
    start, head = tl.program_id(0) % tiles * COLUMNS, tl.program_id(0) // tiles
    b, kv_head = head // (heads // group), head % (heads // group)
    keys = load_tile(head_of(k, k_strides, b, kv_head), start, k_strides[2], columns, D, WIDTH, COLUMNS, True)
    values = load_tile(head_of(v, v_strides, b, kv_head), start, v_strides[2], columns, D, WIDTH, COLUMNS, True)
    j = start + tl.arange(0, COLUMNS)
    first, stop, j_document = 0, rows, 0
    if CAUSAL:
        first = tl.maximum(start - offset, 0)
    if DOCUMENTS:
        q_row, k_row = row_of(q_documents, b, rows), row_of(k_documents, b, columns)
        j_document, begin, stop = find_span(k_row, start, columns, q_row, rows, COLUMNS)
        first, j_document = tl.maximum(first, begin), j_document[:, None]
    if WINDOW:
        stop = tl.minimum(stop, start + COLUMNS - 1 + window - offset)
    first = first // ROWS * ROWS
    grad_k = tl.zeros([COLUMNS, WIDTH], tl.float32)
    grad_v = tl.zeros([COLUMNS, WIDTH], tl.float32)
    for member in range(group):
        h = kv_head * group + member
        row = b * heads + h
        head_q = head_of(q, q_strides, b, h)
        head_do = head_of(do, do_strides, b, h)
        for n in range(first, stop, ROWS):
            queries = load_tile(head_q, n, q_strides[2], rows, D, WIDTH, ROWS, True)
            grads = load_tile(head_do, n, do_strides[2], rows, D, WIDTH, ROWS, True)
            i = n + tl.arange(0, ROWS)
            row_lse = tl.load(row_of(lse, row, rows) + i, i < rows, other=float("inf")) * LOG2_E  # no row: p = 0
            row_delta = tl.load(row_of(delta, row, rows) + i, i < rows, other=0.0)
            p = tl.exp2(tl.dot(keys, tl.trans(queries), input_precision="ieee") * scale - row_lse[None, :])
            i_document = load_documents(q_documents, b, i, rows)[None, :] if DOCUMENTS else 0
            p = hide(p, i[None, :], j[:, None], i_document, j_document, offset, window, 0.0, CAUSAL, WINDOW, DOCUMENTS)
            grad_v = tl.dot(p.to(grads.dtype), grads, grad_v, input_precision="ieee")
            ds = p * (tl.dot(values, tl.trans(grads), input_precision="ieee") - row_delta[None, :])
            grad_k = tl.dot(ds.to(queries.dtype), queries, grad_k, input_precision="ieee")
    store_tile(head_of(dk, dkv_strides, b, kv_head), grad_k * (scale / LOG2_E), start, dkv_strides[2], columns, D,
               WIDTH, COLUMNS)
    store_tile(head_of(dv, dkv_strides, b, kv_head), grad_v, start, dkv_strides[2], columns, D, WIDTH, COLUMNS)


# ---- operators ------------------------------------------------------------------------------------------------------

def check_attention(q: Tensor, k: Tensor, v: Tensor, q_documents: Tensor | None, k_documents: Tensor | None) -> None:
    assert q.dim() == k.dim() == 4 and k.shape == v.shape and k.shape[::3] == q.shape[::3], \
        f"q {list(q.shape)} must be B N rows D, k {list(k.shape)} and v {list(v.shape)} B K columns D"
    assert k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0, f"{q.shape[1]} heads cannot share {k.shape[1]} kv heads"
    assert q.shape[3] in range(1, 129), f"heads are {q.shape[3]} wide; at least 1 and at most 128 fit"
    assert q.dtype == k.dtype == v.dtype, f"q is {q.dtype}, k {k.dtype}, v {v.dtype}: they must be of one type"
    assert (q_documents is None) == (k_documents is None), "documents: give those of queries and of keys, or neither"
    for documents, x in ((q_documents, q), (k_documents, k)):
        assert documents is None or documents.shape == x.shape[::2] and not documents.is_floating_point(), \
            f"documents must be {list(x.shape[::2])} integers, one per token"


def empty_heads(B: int, N: int, rows: int, D: int, like: Tensor) -> Tensor:
    """[B, N, rows, D], with the heads of a token contiguous in memory, as the matmul after attention needs them."""
    return like.new_empty(B, rows, N, D).transpose(1, 2)


def make_rows_contiguous(*tensors: Tensor) -> list[Tensor]:
    """Kernels take any strides except of the last dimension."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def as_int32(documents: Tensor | None) -> Tensor | None:
    return None if documents is None else documents.to(torch.int32).contiguous()


@custom_op("penteract::flash_attention", mutates_args=())
def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int, offset: int, q_documents: Tensor | None,
                   k_documents: Tensor | None) -> tuple[Tensor, Tensor]:
    o, lse = _flash_forward_fake(q, k, v, causal, window, offset, q_documents, k_documents)
    q, k, v = make_rows_contiguous(q, k, v)
    q_documents, k_documents = as_int32(q_documents), as_int32(k_documents)
    (B, N, rows, D), (_, K, columns, _) = q.shape, k.shape
    tiles, options = choose_tiling("forward", q, causal, window, q_documents)
    launch(flash_forward_kernel, (B * N * triton.cdiv(rows, tiles.rows),),
           q, k, v, o, lse, q_documents, k_documents, q.stride(), k.stride(), v.stride(), o.stride(),
           D ** -0.5 * LOG2_E.value, N, N // K, rows, columns, offset, window, **options)
    return o, lse


@_flash_forward.register_fake
def _flash_forward_fake(q, k, v, causal, window, offset, q_documents, k_documents):
    check_attention(q, k, v, q_documents, k_documents)
    return empty_heads(*q.shape, like=q), q.new_empty(q.shape[:3], dtype=torch.float32)


@custom_op("penteract::flash_attention_backward", mutates_args=())
def _flash_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, window: int,
                    offset: int, q_documents: Tensor | None,
                    k_documents: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _flash_backward_fake(do, q, k, v, o, lse, causal, window, offset, q_documents, k_documents)
    do, q, k, v, o = make_rows_contiguous(do, q, k, v, o)
    lse, q_documents, k_documents = lse.contiguous(), as_int32(q_documents), as_int32(k_documents)
    delta, (B, N, rows, D), (_, K, columns, _) = torch.empty_like(lse), q.shape, k.shape
    scalars = D ** -0.5 * LOG2_E.value, N, N // K, rows, columns, offset, window
    strides = do.stride(), q.stride(), k.stride(), v.stride()
    tiles, options = choose_tiling("dq", q, causal, window, q_documents)
    launch(flash_dq_kernel, (B * N * triton.cdiv(rows, tiles.rows),), do, q, k, v, o, lse, dq, delta, q_documents,
           k_documents, *strides, o.stride(), dq.stride(), *scalars, **options)
    tiles, options = choose_tiling("dkv", q, causal, window, q_documents)
    launch(flash_dkv_kernel, (B * K * triton.cdiv(columns, tiles.columns),), do, q, k, v, lse, delta, dk, dv,
           q_documents, k_documents, *strides, dk.stride(), *scalars, **options)
    return dq, dk, dv


@_flash_backward.register_fake
def _flash_backward_fake(do, q, k, v, o, lse, causal, window, offset, q_documents, k_documents):
    check_attention(q, k, v, q_documents, k_documents)
    assert do.shape == o.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32, \
        f"do {list(do.shape)}, o {list(o.shape)} must be as q {list(q.shape)}, lse {list(lse.shape)} its rows, fp32"
    return empty_heads(*q.shape, like=q), empty_heads(*k.shape, like=k), empty_heads(*k.shape, like=k)


def _flash_save(ctx, inputs, output):
    q, k, v, ctx.causal, ctx.window, ctx.offset, q_documents, k_documents = inputs
    ctx.save_for_backward(q, k, v, *output, q_documents, k_documents)
    ctx.mark_non_differentiable(output[1])


def _flash_autograd(ctx, do, _):
    q, k, v, o, lse, *documents = ctx.saved_tensors
    return (*_flash_backward(do, q, k, v, o, lse, ctx.causal, ctx.window, ctx.offset, *documents), *[None] * 5)


_flash_forward.register_autograd(_flash_autograd, setup_context=_flash_save)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask = CAUSAL) -> tuple[Tensor, Tensor]:
    """o [B, N, rows, D]; and lse [B, N, rows], logsumexp of scores, fp32, -inf where a row sees no key, no derivative.

    q: [B, N, rows, D]. k, v: [B, K, columns, D], K a divisor of N. Any strides. D: at most 128; powers of 2 waste
    nothing. mask: document numbers below 2^31. Asserts that tensors fit together.
    """
    return _flash_forward(q, k, v, *unpack_mask(mask))


def flash_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                   mask: Mask = CAUSAL) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, the same bits every time. do, o, lse: those of all keys that the queries see, even where k and v are
    only some of them, as in context parallelism (cp.py)."""
    return _flash_backward(do, q, k, v, o, lse, *unpack_mask(mask))


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask = CAUSAL) -> Tensor:
    """o [B, N, rows, D] of flash_forward, differentiable."""
    return flash_forward(q, k, v, mask)[0]


def unpack_mask(mask: Mask) -> tuple:
    """A mask as arguments of the operators."""
    return mask.causal, mask.window, mask.offset, *(mask.documents or (None, None))


# ---- demo: python flash.py ------------------------------------------------------------------------------------------

def find_loaded_tiles(mask: Mask, S: int, rows: int, columns: int) -> list[list[bool]]:
    """Which tiles of S x S scores the forward kernel computes, found by experiment: NaN in the values of a tile of keys
    reaches every row whose program loads that tile, masked or not."""
    (q, k), found = torch.zeros(2, 1, 1, S, 16), []
    for start in range(0, S, columns):
        v = torch.zeros(1, 1, S, 16)
        v[:, :, start:start + columns] = torch.nan
        found.append(flash_attention(q, k, v, mask)[0, 0, ::rows, 0].isnan().tolist())
    return [list(row) for row in zip(*found)]


def demo() -> None:
    sizes = torch.tensor([70, 60, 20, 106])
    documents = torch.arange(4).repeat_interleave(sizes)[None]
    print(f"Tiles of 32 x 32 scores that are computed (■): causal; documents of {sizes.tolist()} tokens; window 64:\n")
    masks = CAUSAL, Mask(documents=(documents, documents)), Mask(window=64)
    for rows in zip(*(find_loaded_tiles(mask, 256, 32, 32) for mask in masks)):
        print("    " + "        ".join(" ".join("■" if tile else "·" for tile in row) for row in rows))


if __name__ == "__main__":
    if not (torch.cuda.is_available() or triton.knobs.runtime.interpret):  # kernels then run in Triton's interpreter
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"TRITON_INTERPRET": "1"})
    run_demo(lambda group: demo())
