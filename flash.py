"""FlashAttention: attention whose scores [S, S] are never in memory, forward and backward, in Triton.

Writing scores, reading them for the softmax, and writing and reading its result moves many bytes for few FLOPs. Here a
program has a tile of queries in registers and loops over tiles of keys, with a running maximum and a running sum:

           keys ──►
    q 0    ◩ · · · · ·                    ■ every query sees every key: no mask is applied
      1    ■ ◩ · · · ·                    ◩ the mask is applied
      2    ■ ■ ◩ · · ·   ◄── a program    · hidden: its keys and values are not loaded
      3    ■ ■ ■ ◩ · ·
      4    ■ ■ ■ ■ ◩ ·                    Documents or a window hide more tiles, and
      5    ■ ■ ■ ■ ■ ◩                    the mask is then applied to all the others.

m is the largest score so far, l the sum of exp(score - m), o the sum of exp(score - m) v. For each tile of scores s:

    m' = max(m, max s)     l, o *= exp(m - m')     p = exp(s - m')     l += sum p     o += p v     m = m'

The result is o / l. Backward recomputes p = exp(s - lse) from lse = m + log l (logsumexp), one number per row, and with
dp = do v^T, delta = sum(do o) per row and ds = p (dp - delta) computes

    dq = ds k                      in programs that have a tile of queries and loop over keys
    dk = ds^T q,  dv = p^T do      in programs that have a tile of keys and loop over queries

in two kernels, so that no two programs add to the same memory: no atomics, the same bits in every run, and 7 matmuls
instead of 5. The same in plain torch: operations.math_forward, math_backward. Sums and exponentials are fp32.
Dao et al. 2022, FlashAttention; Dao 2023, FlashAttention-2 (this order of loops); Milakov & Gimelshein 2018.
Shapes: B batch, S sequence, N query heads, K key and value heads, D head width; rows queries, columns keys.
"""
import os
import sys
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from core.collectives import run_demo
from kernels import KernelError, failed, launch
from operations import CAUSAL, Mask
from sdpa import attention_sdpa, sdpa_backward, sdpa_forward

LOG2_E = tl.constexpr(1.4426950408889634)  # GPUs have 2^x: exp(x) = 2^(x log2 e)


# ---- tiles ----------------------------------------------------------------------------------------------------------

class Tiles(NamedTuple):
    """Launch options: a tile of scores has ROWS x COLUMNS; num_stages - 1 of them are loaded ahead."""
    ROWS: int
    COLUMNS: int
    num_warps: int
    num_stages: int


# Numbers in comments: registers per thread. An SM has 65,536, so with up to 128 two programs of 8 warps live on it
# (docs/NOTES.md).
TILES = {
    ("forward", 64): Tiles(128, 128, 8, 3),
    ("forward", 128): Tiles(128, 64, 8, 3),  # 184: one program per SM, which waits for each matmul before its softmax
    ("forward", 256): Tiles(64, 64, 8, 2),
    ("dq", 64): Tiles(128, 64, 8, 3),  # 124: two programs per SM
    ("dq", 128): Tiles(128, 64, 8, 3),  # 210
    ("dq", 256): Tiles(64, 32, 8, 2),
    ("dkv", 64): Tiles(32, 128, 8, 2),
    ("dkv", 128): Tiles(32, 128, 8, 2),  # dk and dv take 128 registers of 255: 64 rows of queries would be spilled
    ("dkv", 256): Tiles(16, 64, 8, 2)}  # with documents 136 bytes a thread are spilled, with 32 rows 248
FP32_TILES, WIDE_FP32_TILES = Tiles(32, 32, 4, 2), Tiles(16, 16, 4, 1)  # up to 128, and above


# Heads [B, heads, S, D] are one argument x of a kernel: x[0] is their pointer, x[1:] the strides of B, heads and S. The
# offsets of the sequence b, its head h and a row are 64 bits: there may be more than 2^31 elements. WIDTH: D, padded.

@triton.jit
def tile_of(x, b, h, start, S, D: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    """Pointers to COUNT rows of a head, from row `start` on, and which of them exist."""
    row, column = tl.arange(0, COUNT), tl.arange(0, WIDTH)
    first = x[0] + b * x[1] + h * x[2] + tl.cast(start, tl.int64) * x[3]
    offsets = row.to(tl.int64)[:, None] * x[3] + column[None, :]
    return first + offsets, (start + row < S)[:, None] & (column < D)[None, :]


@triton.jit
def load_tile(x, b, h, start, S, D: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr, EDGE: tl.constexpr):
    """EDGE: some rows may not exist; they are 0."""
    pointers, inside = tile_of(x, b, h, start, S, D, WIDTH, COUNT)
    if EDGE or D < WIDTH:
        return tl.load(pointers, inside, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_tile(x, tile, b, h, start, S, D: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    pointers, inside = tile_of(x, b, h, start, S, D, WIDTH, COUNT)
    tl.store(pointers, tile.to(x[0].dtype.element_ty), inside)


@triton.jit
def hide(scores, hidden, i, j, i_document, j_document, columns, offset, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Replace with `hidden` the scores of queries i and keys j that operations.Mask hides, or where there is no key.
    j_document: None if there are no documents."""
    scores = tl.where(j < columns, scores, hidden)
    if CAUSAL:
        scores = tl.where(j <= i + offset, scores, hidden)
    if WINDOW:
        scores = tl.where(j > i + offset - WINDOW, scores, hidden)
    if j_document is not None:
        scores = tl.where(i_document == j_document, scores, hidden)
    return scores


@triton.jit
def find_span(own, start, own_count, others, count, OWN: tl.constexpr, CHUNK: tl.constexpr = 1024):
    """Document numbers of a tile of `own` tokens, and the first and last + 1 of the `count` other tokens, which are all
    read, with one between the smallest and the largest of them. A narrow span only if documents are contiguous."""
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


@triton.jit
def find_keys(b, start, q_documents, k_documents, rows, columns, offset, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
              CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Of a tile of queries from `start` on: (documents [ROWS, 1], masked_from, stop). Keys before masked_from are
    visible to all these queries or, with documents or a window, to none; the mask decides on those from there to
    `stop`; later ones are visible to none."""
    i_document, masked_from, stop = 0, columns, columns
    if CAUSAL:  # all queries see keys up to the first query, none sees keys after the last
        masked_from = tl.minimum(tl.maximum(start + 1 + offset, 0), columns)
        stop = tl.minimum(tl.maximum(tl.minimum(start + ROWS, rows) + offset, 0), columns)
    if WINDOW:  # of all queries' windows the first one's begins first
        masked_from = tl.maximum(start + offset - WINDOW + 1, 0)
    if q_documents is not None:
        i_document, begin, end = find_span(q_documents + b * rows, start, rows, k_documents + b * columns,
                                           columns, ROWS)
        masked_from = tl.maximum(begin, masked_from) if WINDOW else begin
        i_document, stop = i_document[:, None], tl.minimum(stop, end)
    return i_document, masked_from // COLUMNS * COLUMNS, stop


# ---- kernels --------------------------------------------------------------------------------------------------------
# A loop over keys is written once and compiled twice: MASKED = 0 for keys from 0 to masked_from, 1 for those from there
# to `stop`; with documents or a window for these alone. Programs: (tile, head h, sequence b). scale: D^-0.5 log2 e, for
# 2^x in place of e^x. group: N / K. offset, CAUSAL, WINDOW: see operations.Mask. lse, delta: [B, N, rows].

@triton.jit
def flash_forward_kernel(q, k, v, o, lse, q_documents, k_documents, scale, group, rows, columns, offset,
                         D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                         CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """A program has a tile of queries. top, total, out, higher, decay: above m, l, o, m', exp(m - m'); to base 2."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # the last have most keys: they start first
    DOCUMENTS: tl.constexpr = q_documents is not None
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_document, masked_from, stop = find_keys(b, start, q_documents, k_documents, rows, columns, offset, ROWS, COLUMNS,
                                              CAUSAL, WINDOW)
    queries = load_tile(q, b, h, start, rows, D, WIDTH, ROWS, True)
    i = start + tl.arange(0, ROWS)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    for MASKED in tl.static_range(WINDOW > 0 or DOCUMENTS, 2):
        for n in range(masked_from if MASKED else 0, stop if MASKED else masked_from, COLUMNS):
            keys = load_tile(k, b, h // group, n, columns, D, WIDTH, COLUMNS, MASKED)
            s = tl.dot(queries, tl.trans(keys), input_precision="ieee")
            if MASKED:
                j = n + tl.arange(0, COLUMNS)
                j_document = tl.load(k_documents + b * columns + j, j < columns)[None, :] if DOCUMENTS else None
                s = hide(s, -float("inf"), i[:, None], j[None, :], i_document, j_document, columns, offset, CAUSAL,
                         WINDOW)
            higher = tl.maximum(top, tl.max(s, 1) * scale)
            shift = tl.where(higher == -float("inf"), 0.0, higher) if MASKED else higher  # -inf: no visible key yet
            p = tl.exp2(s * scale - shift[:, None])
            decay = tl.exp2(top - shift)
            total = total * decay + tl.sum(p, 1)
            values = load_tile(v, b, h // group, n, columns, D, WIDTH, COLUMNS, MASKED)
            out = tl.dot(p.to(values.dtype), values, out * decay[:, None], input_precision="ieee")
            top = higher
    store_tile(o, out / tl.where(total == 0, 1.0, total)[:, None], b, h, start, rows, D, WIDTH, ROWS)
    tl.store(lse + (b * tl.num_programs(1) + h) * rows + i, (top + tl.log2(total)) / LOG2_E, i < rows)  # base e


@triton.jit
def flash_dq_kernel(q, k, v, o, do, dq, lse, delta, q_documents, k_documents, scale, group, rows, columns, offset,
                    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                    CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """A program has a tile of queries and loops over keys. It also writes delta, for flash_dkv_kernel."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    DOCUMENTS: tl.constexpr = q_documents is not None
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_document, masked_from, stop = find_keys(b, start, q_documents, k_documents, rows, columns, offset, ROWS, COLUMNS,
                                              CAUSAL, WINDOW)
    queries = load_tile(q, b, h, start, rows, D, WIDTH, ROWS, True)
    grads = load_tile(do, b, h, start, rows, D, WIDTH, ROWS, True)
    outs = load_tile(o, b, h, start, rows, D, WIDTH, ROWS, True)
    i, row = start + tl.arange(0, ROWS), (b * tl.num_programs(1) + h) * rows
    own_lse = tl.load(lse + row + i, i < rows, other=0.0) * LOG2_E
    own_delta = tl.sum(grads.to(tl.float32) * outs.to(tl.float32), 1)
    tl.store(delta + row + i, own_delta, i < rows)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    for MASKED in tl.static_range(WINDOW > 0 or DOCUMENTS, 2):
        for n in range(masked_from if MASKED else 0, stop if MASKED else masked_from, COLUMNS):
            keys = load_tile(k, b, h // group, n, columns, D, WIDTH, COLUMNS, MASKED)
            values = load_tile(v, b, h // group, n, columns, D, WIDTH, COLUMNS, MASKED)
            p = tl.exp2(tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale - own_lse[:, None])
            if MASKED:
                j = n + tl.arange(0, COLUMNS)
                j_document = tl.load(k_documents + b * columns + j, j < columns)[None, :] if DOCUMENTS else None
                p = hide(p, 0.0, i[:, None], j[None, :], i_document, j_document, columns, offset, CAUSAL, WINDOW)
            ds = p * (tl.dot(grads, tl.trans(values), input_precision="ieee") - own_delta[:, None])
            out = tl.dot(ds.to(keys.dtype), keys, out, input_precision="ieee")
    store_tile(dq, out * (scale / LOG2_E), b, h, start, rows, D, WIDTH, ROWS)  # scale / LOG2_E: D^-0.5


@triton.jit
def flash_dkv_kernel(q, k, v, do, dk, dv, lse, delta, q_documents, k_documents, scale, group, rows, columns, offset,
                     D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                     CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """A program has a tile of keys and loops over queries of all heads that use them. Tiles of scores are transposed:
    keys x queries. All are masked, because dk and dv take too many registers for a second loop."""
    start = tl.program_id(0) * COLUMNS
    DOCUMENTS: tl.constexpr = q_documents is not None
    kv_head, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    keys = load_tile(k, b, kv_head, start, columns, D, WIDTH, COLUMNS, True)
    values = load_tile(v, b, kv_head, start, columns, D, WIDTH, COLUMNS, True)
    j = start + tl.arange(0, COLUMNS)
    first, stop, j_document = 0, rows, None
    if CAUSAL:
        first = tl.maximum(start - offset, 0)
    if DOCUMENTS:
        q_documents += b * rows
        j_document, begin, stop = find_span(k_documents + b * columns, start, columns, q_documents, rows, COLUMNS)
        first, j_document = tl.maximum(first, begin), j_document[:, None]
    if WINDOW:
        stop = tl.minimum(stop, start + COLUMNS - 1 + WINDOW - offset)
    grad_k = tl.zeros([COLUMNS, WIDTH], tl.float32)
    grad_v = tl.zeros([COLUMNS, WIDTH], tl.float32)
    for member in range(group):
        h = kv_head * group + member
        row = (b * tl.num_programs(1) * group + h) * rows
        for n in range(first // ROWS * ROWS, stop, ROWS):
            queries = load_tile(q, b, h, n, rows, D, WIDTH, ROWS, True)
            grads = load_tile(do, b, h, n, rows, D, WIDTH, ROWS, True)
            i = n + tl.arange(0, ROWS)
            row_lse = tl.load(lse + row + i, i < rows, other=float("inf")) * LOG2_E  # no row: p = 0
            row_delta = tl.load(delta + row + i, i < rows, other=0.0)
            p = tl.exp2(tl.dot(keys, tl.trans(queries), input_precision="ieee") * scale - row_lse[None, :])
            i_document = tl.load(q_documents + i, i < rows)[None, :] if DOCUMENTS else None
            p = hide(p, 0.0, i[None, :], j[:, None], i_document, j_document, columns, offset, CAUSAL, WINDOW)
            grad_v = tl.dot(p.to(grads.dtype), grads, grad_v, input_precision="ieee")
            ds = p * (tl.dot(values, tl.trans(grads), input_precision="ieee") - row_delta[None, :])
            grad_k = tl.dot(ds.to(queries.dtype), queries, grad_k, input_precision="ieee")
    store_tile(dk, grad_k * (scale / LOG2_E), b, kv_head, start, columns, D, WIDTH, COLUMNS)
    store_tile(dv, grad_v, b, kv_head, start, columns, D, WIDTH, COLUMNS)


# ---- launches -------------------------------------------------------------------------------------------------------

def prepare(mask: Mask, q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> tuple:
    """What kernels read: the mask, with documents of 32 bits; and tensors, which must fit together, with the last
    dimension contiguous and any other strides."""
    assert q.dim() == k.dim() == 4 and k.shape == v.shape and k.shape[::3] == q.shape[::3], \
        f"q {list(q.shape)} must be B N rows D, k {list(k.shape)} and v {list(v.shape)} B K columns D"
    assert k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0, f"{q.shape[1]} heads cannot share {k.shape[1]} kv heads"
    assert q.shape[3] in range(1, 257), f"heads are {q.shape[3]} wide; at least 1 and at most 256 fit"
    assert q.dtype == k.dtype == v.dtype, f"q is {q.dtype}, k {k.dtype}, v {v.dtype}: they must be of one type"
    if mask.documents is not None:
        for documents, x in zip(mask.documents, (q, k)):
            assert documents.shape == x.shape[::2] and not documents.is_floating_point(), \
                f"documents must be {list(x.shape[::2])} integers, one per token"
        mask = mask._replace(documents=tuple(documents.to(torch.int32).contiguous() for documents in mask.documents))
    return mask, *(x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, *more))


def empty_heads(x: Tensor) -> Tensor:
    """As x [B, N, S, D], with the heads of a token contiguous in memory, as the matmul after attention needs them."""
    B, N, S, D = x.shape
    return x.new_empty(B, S, N, D).transpose(1, 2)


def launch_tiles(kernel: triton.JITFunction, step: str, mask: Mask, heads: tuple[Tensor, ...],
                 *per_row: Tensor) -> None:
    """Launch a program for each tile of queries, or of keys if step is "dkv", of each head. heads: q, k and others.
    per_row: lse, delta. WIDTH: D rounded up to a power of 2, at least 16 for tensor cores."""
    (B, N, rows, D), (_, K, columns, _) = heads[0].shape, heads[1].shape
    width = max(16, triton.next_power_of_2(D))
    if heads[0].element_size() == 2:
        tiles = TILES[step, max(64, width)]
    else:
        tiles = FP32_TILES if width <= 128 else WIDE_FP32_TILES
    if step == "dkv" and D < width <= 128:  # the mask of padded columns takes registers of a tile loaded ahead
        tiles = tiles._replace(num_stages=1)
    grid = (triton.cdiv(columns, tiles.COLUMNS), K, B) if step == "dkv" else (triton.cdiv(rows, tiles.ROWS), N, B)
    launch(kernel, grid, *[(x, *x.stride()[:3]) for x in heads], *per_row, *(mask.documents or (None, None)),
           D ** -0.5 * LOG2_E.value, N // K, rows, columns, mask.offset, D=D, WIDTH=width, CAUSAL=mask.causal,
           WINDOW=mask.window, **tiles._asdict())


def flash_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask = CAUSAL) -> tuple[Tensor, Tensor]:
    """o [B, N, rows, D]; and lse [B, N, rows], logsumexp of scores, fp32, -inf where a row sees no key.

    q: [B, N, rows, D]. k, v: [B, K, columns, D], K a divisor of N. Any strides. D: at most 256; powers of 2 waste
    nothing. mask: document numbers below 2^31. Asserts that tensors fit together.
    """
    mask, q, k, v = prepare(mask, q, k, v)
    o, lse = empty_heads(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    try:
        launch_tiles(flash_forward_kernel, "forward", mask, (q, k, v, o), lse)
        return o, lse
    except KernelError:
        return sdpa_forward(q, k, v, mask)


def flash_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                   mask: Mask = CAUSAL) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, the same bits every time. do, o, lse: those of all keys that the queries see, even where k and v are
    only some of them, as in context parallelism (cp.py)."""
    mask, q, k, v, do, o = prepare(mask, q, k, v, do, o)
    assert do.shape == o.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32, \
        f"do {list(do.shape)}, o {list(o.shape)} must be as q {list(q.shape)}, lse {list(lse.shape)} its rows, fp32"
    dq, dk, dv = map(empty_heads, (q, k, v))
    lse, delta = lse.contiguous(), lse.new_empty(lse.shape)
    try:
        launch_tiles(flash_dq_kernel, "dq", mask, (q, k, v, o, do, dq), lse, delta)
        launch_tiles(flash_dkv_kernel, "dkv", mask, (q, k, v, do, dk, dv), lse, delta)
        return dq, dk, dv
    except KernelError:
        return sdpa_backward(do, q, k, v, o, lse, mask)


class FlashAttention(Function):
    """flash_forward's o, differentiable. Saves q, k, v, o and lse: no scores."""

    @staticmethod
    def forward(ctx, q, k, v, mask):
        o, lse = flash_forward(q, k, v, mask)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.mask = mask
        return o

    @staticmethod
    def backward(ctx, do):
        return *flash_backward(do, *ctx.saved_tensors, ctx.mask), None


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask = CAUSAL) -> Tensor:
    if any(name.startswith("flash_") for name in failed):  # all of it in torch's fused kernel, not call by call
        return attention_sdpa(q, k, v, mask)
    return FlashAttention.apply(q, k, v, mask)


# ---- demo: python flash.py ------------------------------------------------------------------------------------------

def find_loaded_tiles(mask: Mask, S: int, rows: int, columns: int) -> list[list[bool]]:
    """Which tiles of S x S scores the forward kernel computes, found by experiment: each tile of keys has NaN in a
    column of values, which reaches that column of every row whose program loads the tile, masked or not."""
    with torch.device("cpu" if triton.knobs.runtime.interpret else "cuda"):
        tiles = torch.eye(S // columns, dtype=torch.bool).repeat_interleave(columns, 0)[None, None]
        q, k, v = torch.zeros(3, *tiles.shape)
    return flash_forward(q, k, v.masked_fill(tiles, torch.nan), mask)[0][0, 0, ::rows].isnan().tolist()


def demo() -> None:
    sizes = torch.tensor([70, 60, 20, 106], device="cpu" if triton.knobs.runtime.interpret else "cuda")
    documents = torch.arange(4, device=sizes.device).repeat_interleave(sizes)[None]
    print(f"Tiles of 32 x 32 scores that are computed (■): causal; documents of {sizes.tolist()} tokens; window 64:\n")
    masks = CAUSAL, Mask(documents=(documents, documents)), Mask(window=64)
    for rows in zip(*(find_loaded_tiles(mask, 256, 32, 32) for mask in masks)):
        print("    " + "        ".join(" ".join("■" if tile else "·" for tile in row) for row in rows))


if __name__ == "__main__":
    if not (torch.cuda.is_available() or triton.knobs.runtime.interpret):  # kernels then run in Triton's interpreter
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"TRITON_INTERPRET": "1"})
    run_demo(lambda group: demo())
