"""FlashAttention: attention whose scores [S, S] are never in memory, forward and backward, in Triton.

           keys ──►
    q 0    ◩ · · · · ·                      ■ every query sees every key: no mask is applied
    u 1    ■ ◩ · · · ·                      ◩ the mask is applied
    e 2    ■ ■ ◩ · · ·                      · hidden: its keys and values are not loaded
    r 3    ■ ■ ■ ◩ · ·
    i 4    ■ ■ ■ ■ ◩ ·  ◄── a program of the forward kernel, or of the dq kernel, computes a row of
    e 5    ■ ■ ■ ■ ■ ◩      tiles. It keeps its queries in registers, and loops over tiles of keys.
    s            ▲
                 └───── a program of the dkv kernel computes a column of tiles. It keeps its keys and
                        values, loops over tiles of queries, and applies the mask to every tile.

Documents or a window hide more tiles, and then the mask is applied to all tiles that are computed.

Plain attention writes all scores, reads them for the softmax, and writes and reads the probabilities. That is many
bytes for few FLOPs. Here a tile of scores exists only in registers. The softmax of a row needs the row's largest
score and the sum of the row's exponentials, so a program keeps a running maximum m_i and a running sum l_i. When a
tile of keys has a larger score, l_i and the result so far, acc, are scaled down:

    s = q_i k_j^T / sqrt(D)                         scores of this tile
    m_new = max(m_i, max s)                         alpha = exp(m_i - m_new)
    p = exp(s - m_new)
    l_i = alpha l_i + sum p                         acc = alpha acc + p v_j                         m_i = m_new

The result is o_i = acc / l_i. Backward computes p again, from one number per row, lse = m_i + log l_i:

    p = exp(s - lse)
    ds = p (do_i v_j^T - delta_i)                   delta_i = sum of do_i o_i over V
    dq_i += ds k_j / sqrt(D)                        in the dq kernel
    dk_j += ds^T q_i / sqrt(D),  dv_j += p^T do_i   in the dkv kernel

With two kernels no two programs add to the same memory. So there are no atomics, and every run gives the same bits.
In return backward has 7 matmuls instead of 5, because each kernel computes s and ds. Sums and exponentials are fp32.

Dao et al. 2022, FlashAttention; Dao 2023, FlashAttention-2 (this order of loops); Milakov & Gimelshein 2018.
Shapes: B batch, S sequence, N query heads, K key and value heads, D width of queries and keys, V width of values and o;
rows: queries, columns: keys.
Names: i and j number queries and keys. q_i is a tile of queries, k_j a tile of keys.
"""
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from kernels import KernelError, failed, launch, run_kernel_demo
from operations import CAUSAL, Mask
from sdpa import attention_sdpa, sdpa_backward, sdpa_forward

# ---- the plain version: the same loops in plain torch ---------------------------------------------------------------

def flash_forward_reference(q: Tensor, k: Tensor, v: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Compute causal attention of heads [..., S, D] and v [..., S, V] in tiles of rows x columns. Return o [..., S, V]
    and lse [..., S]."""
    o, lse = torch.empty_like(v), q.new_empty(q.shape[:-1])
    for queries in tiles_of(q, rows):  # each iteration is a program of the forward kernel
        q_i = q[..., queries, :]
        m_i, l_i = q.new_full(q_i.shape[:-1], -torch.inf), q.new_zeros(q_i.shape[:-1])
        acc = torch.zeros_like(v[..., queries, :])
        for keys in tiles_of(k, columns):
            if keys.start >= queries.stop:  # this tile and all later ones are hidden
                break
            s = hide_later(q_i @ k[..., keys, :].mT * q.shape[-1] ** -0.5, queries, keys)
            m_new = torch.maximum(m_i, s.amax(-1))
            alpha, p = torch.exp(m_i - m_new), torch.exp(s - m_new[..., None])
            l_i = alpha * l_i + p.sum(-1)
            acc = alpha[..., None] * acc + p @ v[..., keys, :]
            m_i = m_new
        o[..., queries, :] = acc / l_i[..., None]
        lse[..., queries] = m_i + l_i.log()
    return o, lse


def flash_backward_reference(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, rows: int,
                             columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv, computing each tile of scores twice."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    scale, delta = q.shape[-1] ** -0.5, (do * o).sum(-1)

    def p_and_ds(queries: slice, keys: slice) -> tuple[Tensor, Tensor]:
        s = hide_later(q[..., queries, :] @ k[..., keys, :].mT * scale, queries, keys)
        p = torch.exp(s - lse[..., queries, None])
        return p, p * (do[..., queries, :] @ v[..., keys, :].mT - delta[..., queries, None])

    for queries in tiles_of(q, rows):  # programs of the dq kernel
        for keys in tiles_of(k, columns):
            p, ds = p_and_ds(queries, keys)
            dq[..., queries, :] += ds @ k[..., keys, :] * scale
    for keys in tiles_of(k, columns):  # programs of the dkv kernel
        for queries in tiles_of(q, rows):
            p, ds = p_and_ds(queries, keys)
            dv[..., keys, :] += p.mT @ do[..., queries, :]
            dk[..., keys, :] += ds.mT @ q[..., queries, :] * scale
    return dq, dk, dv


def tiles_of(x: Tensor, size: int) -> list[slice]:
    """Return slices that divide the S tokens of x [..., S, D] into tiles of `size`. The last one may be shorter."""
    S = x.shape[-2]
    return [slice(start, min(start + size, S)) for start in range(0, S, size)]


def hide_later(s: Tensor, queries: slice, keys: slice) -> Tensor:
    """Replace scores of keys that come after the query with -inf."""
    i, j = torch.arange(queries.start, queries.stop), torch.arange(keys.start, keys.stop)
    return s.where((j <= i[:, None]).to(s.device), -torch.inf)


# The kernels compute this for any mask, for query heads that share key and value heads, and in 16 bits or fp32. They
# skip hidden tiles. Without documents or a window, the forward and the dq kernel apply the mask only to tiles that it
# hides in part.


# ---- tiles ----------------------------------------------------------------------------------------------------------

class Tiles(NamedTuple):
    """Launch options. A tile of scores has ROWS queries and COLUMNS keys. num_stages - 1 tiles are prefetched."""
    ROWS: int
    COLUMNS: int
    num_warps: int
    num_stages: int


# (kernel, padded head width) -> tiles in 16 bits. Comments say how many registers a thread needs. An SM has 65,536
# registers, so two programs of 8 warps fit on it if a thread needs at most 128 (docs/NOTES.md). A thread can have 255:
# what exceeds them is spilled to memory.
TILES = {
    ("forward", 64): Tiles(128, 128, 8, 3),
    ("forward", 128): Tiles(128, 64, 8, 3),  # 184 registers, so one program per SM, and nothing overlaps its softmax
    ("forward", 256): Tiles(64, 64, 8, 2),
    ("dq", 64): Tiles(128, 64, 8, 3),  # 124 registers, so two programs per SM
    ("dq", 128): Tiles(128, 64, 8, 3),  # 210 registers
    ("dq", 256): Tiles(64, 32, 8, 2),
    ("dkv", 64): Tiles(32, 128, 8, 2),
    ("dkv", 128): Tiles(32, 128, 8, 2),  # dk and dv take 128 registers; with ROWS = 64 some would be spilled
    ("dkv", 256): Tiles(16, 64, 8, 2)}  # with documents, 136 bytes per thread are spilled; with ROWS = 32, 248
FP32_TILES = Tiles(32, 32, 4, 2)  # for heads up to 128 wide
WIDE_FP32_TILES = Tiles(16, 16, 4, 1)  # for heads up to 256 wide


# ---- parts of kernels: loading a tile, hiding scores, finding visible keys ------------------------------------------
# A tensor [B, heads, S, D] is one argument x of a kernel: x[0] is its address, and x[1:] are the strides of B, heads
# and S. b is the index of a sequence, and h the index of a head. Offsets are 64 bits, because a tensor may have more
# than 2^31 elements. WIDTH is D, padded to a power of 2. V and V_WIDTH are the same of values, o and do.

@triton.jit
def tile_of(x, b, h, start, S, D: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    """Return pointers to COUNT rows of a head, from row `start` on, and True for the elements that exist."""
    row, column = tl.arange(0, COUNT), tl.arange(0, WIDTH)
    first = x[0] + b * x[1] + h * x[2] + tl.cast(start, tl.int64) * x[3]
    offsets = row.to(tl.int64)[:, None] * x[3] + column[None, :]
    return first + offsets, (start + row < S)[:, None] & (column < D)[None, :]


@triton.jit
def load_tile(x, b, h, start, S, D: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr, EDGE: tl.constexpr):
    """Load COUNT rows of a head. EDGE: whether some rows may not exist. They are 0."""
    pointers, inside = tile_of(x, b, h, start, S, D, WIDTH, COUNT)
    if EDGE or D < WIDTH:
        return tl.load(pointers, inside, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_tile(x, tile, b, h, start, S, D: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    """Store COUNT rows of a head."""
    pointers, inside = tile_of(x, b, h, start, S, D, WIDTH, COUNT)
    tl.store(pointers, tile.to(x[0].dtype.element_ty), inside)


@triton.jit
def hide(scores, hidden, i, j, i_document, j_document, columns, offset, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Replace the scores that operations.Mask hides, and scores of keys that do not exist, with `hidden`.

    i, j: the positions of queries and keys, one as a column, the other as a row.
    i_document, j_document: the document numbers of these tokens. j_document is None if there are no documents.
    """
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
    """Return the document numbers of a tile, and the range, first to stop, of other tokens that may share a document
    with the tile. If the tile is of queries, the other tokens are the keys, and the other way round.

    own, others: document numbers of the tile's side, with own_count elements, and of the other side, with `count`.
    start: the tile's first token. OWN: the number of its tokens. CHUNK: tokens of `others` that are read at once.

    This scans all of `others` for numbers between the tile's smallest and largest. The range is narrow only if
    documents are contiguous.
    """
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
    """Return (documents [ROWS, 1], masked_from, stop) for the tile of queries that begins at `start`.

    documents: the tile's document numbers. masked_from, stop: they divide the keys:

        mask                    keys before masked_from     from masked_from to stop    from stop on
        none, or causal         visible to all queries      the mask decides            hidden
        documents or a window   hidden, not unmasked        the mask decides            hidden

    With documents or a window, masked_from is thus the first key that may be visible. It is rounded down to a multiple
    of COLUMNS.
    """
    i_document, masked_from, stop = 0, columns, columns
    if CAUSAL:  # all queries see keys up to the first query, none sees keys after the last
        masked_from = tl.minimum(tl.maximum(start + 1 + offset, 0), columns)
        stop = tl.minimum(tl.maximum(tl.minimum(start + ROWS, rows) + offset, 0), columns)
    if WINDOW:  # the first query's window begins first
        masked_from = tl.maximum(start + offset - WINDOW + 1, 0)
    if q_documents is not None:
        i_document, begin, end = find_span(q_documents + b * rows, start, rows, k_documents + b * columns,
                                           columns, ROWS)
        masked_from = tl.maximum(begin, masked_from) if WINDOW else begin
        i_document, stop = i_document[:, None], tl.minimum(stop, end)
    return i_document, masked_from // COLUMNS * COLUMNS, stop


# ---- kernels --------------------------------------------------------------------------------------------------------
# A program computes one tile of one head h of one sequence b. The loop over keys is written once and compiled
# twice:
#
#     for MASKED in tl.static_range(WINDOW > 0 or DOCUMENTS, 2)       unrolled when the kernel is compiled
#         MASKED = 0       keys before masked_from. Documents or a window hide these keys, so the condition
#                          is 1, and the loop starts with MASKED = 1.
#         MASKED = 1       keys from masked_from to `stop`
#
# scale: log2 e / sqrt(D), so that exp2 takes the place of exp. Scaled scores and m_i are logarithms to base 2.
# group: N / K query heads share a key and value head. offset, CAUSAL, WINDOW: see operations.Mask.
# lse, delta: [B, N, rows].

LOG2_E = tl.constexpr(1.4426950408889634)  # GPUs compute 2^x, so exp(x) = 2^(x log2 e)


@triton.jit
def flash_forward_kernel(q, k, v, o, lse, q_documents, k_documents, scale, group, rows, columns, offset,
                         D: tl.constexpr, WIDTH: tl.constexpr, V: tl.constexpr, V_WIDTH: tl.constexpr,
                         ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Each program computes o_i and lse of a tile of queries."""
    start_i = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # the last tile has the most keys, so it starts first
    DOCUMENTS: tl.constexpr = q_documents is not None
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_document, masked_from, stop = find_keys(b, start_i, q_documents, k_documents, rows, columns, offset, ROWS,
                                              COLUMNS, CAUSAL, WINDOW)
    # Before the loop: the queries, and nothing summed yet.
    q_i = load_tile(q, b, h, start_i, rows, D, WIDTH, ROWS, True)
    i = start_i + tl.arange(0, ROWS)
    m_i = tl.full([ROWS], -float("inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, V_WIDTH], tl.float32)
    for MASKED in tl.static_range(WINDOW > 0 or DOCUMENTS, 2):
        for start_j in range(masked_from if MASKED else 0, stop if MASKED else masked_from, COLUMNS):
            # Scores of this tile.
            k_j = load_tile(k, b, h // group, start_j, columns, D, WIDTH, COLUMNS, MASKED)
            s = tl.dot(q_i, tl.trans(k_j), input_precision="ieee")
            # The mask.
            if MASKED:
                j = start_j + tl.arange(0, COLUMNS)
                j_document = tl.load(k_documents + b * columns + j, j < columns)[None, :] if DOCUMENTS else None
                s = hide(s, -float("inf"), i[:, None], j[None, :], i_document, j_document, columns, offset, CAUSAL,
                         WINDOW)
            # The new maximum, and probabilities relative to it.
            m_new = tl.maximum(m_i, tl.max(s, 1) * scale)
            # While a row has seen no key, shift is 0: -inf minus -inf would be NaN.
            shift = tl.where(m_new == -float("inf"), 0.0, m_new) if MASKED else m_new
            p = tl.exp2(s * scale - shift[:, None])
            # Scale the sums so far down, and add this tile.
            alpha = tl.exp2(m_i - shift)
            l_i = l_i * alpha + tl.sum(p, 1)
            v_j = load_tile(v, b, h // group, start_j, columns, V, V_WIDTH, COLUMNS, MASKED)
            acc = tl.dot(p.to(v_j.dtype), v_j, acc * alpha[:, None], input_precision="ieee")
            m_i = m_new
    # After the loop: divide, and store.
    store_tile(o, acc / tl.where(l_i == 0, 1.0, l_i)[:, None], b, h, start_i, rows, V, V_WIDTH, ROWS)
    tl.store(lse + (b * tl.num_programs(1) + h) * rows + i, (m_i + tl.log2(l_i)) / LOG2_E, i < rows)  # base e


@triton.jit
def flash_dq_kernel(q, k, v, o, do, dq, lse, delta, q_documents, k_documents, scale, group, rows, columns, offset,
                    D: tl.constexpr, WIDTH: tl.constexpr, V: tl.constexpr, V_WIDTH: tl.constexpr,
                    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Each program computes dq_i of a tile of queries. It also writes delta, which flash_dkv_kernel reads."""
    start_i = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    DOCUMENTS: tl.constexpr = q_documents is not None
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_document, masked_from, stop = find_keys(b, start_i, q_documents, k_documents, rows, columns, offset, ROWS,
                                              COLUMNS, CAUSAL, WINDOW)
    # Before the loop: everything that belongs to the queries.
    q_i = load_tile(q, b, h, start_i, rows, D, WIDTH, ROWS, True)
    do_i = load_tile(do, b, h, start_i, rows, V, V_WIDTH, ROWS, True)
    o_i = load_tile(o, b, h, start_i, rows, V, V_WIDTH, ROWS, True)
    i, row = start_i + tl.arange(0, ROWS), (b * tl.num_programs(1) + h) * rows
    lse_i = tl.load(lse + row + i, i < rows, other=0.0) * LOG2_E
    delta_i = tl.sum(do_i.to(tl.float32) * o_i.to(tl.float32), 1)
    tl.store(delta + row + i, delta_i, i < rows)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for MASKED in tl.static_range(WINDOW > 0 or DOCUMENTS, 2):
        for start_j in range(masked_from if MASKED else 0, stop if MASKED else masked_from, COLUMNS):
            # p, computed again from lse; then the mask.
            k_j = load_tile(k, b, h // group, start_j, columns, D, WIDTH, COLUMNS, MASKED)
            v_j = load_tile(v, b, h // group, start_j, columns, V, V_WIDTH, COLUMNS, MASKED)
            p = tl.exp2(tl.dot(q_i, tl.trans(k_j), input_precision="ieee") * scale - lse_i[:, None])
            if MASKED:
                j = start_j + tl.arange(0, COLUMNS)
                j_document = tl.load(k_documents + b * columns + j, j < columns)[None, :] if DOCUMENTS else None
                p = hide(p, 0.0, i[:, None], j[None, :], i_document, j_document, columns, offset, CAUSAL, WINDOW)
            # ds, and dq_i += ds k_j.
            ds = p * (tl.dot(do_i, tl.trans(v_j), input_precision="ieee") - delta_i[:, None])
            acc = tl.dot(ds.to(k_j.dtype), k_j, acc, input_precision="ieee")
    store_tile(dq, acc * (scale / LOG2_E), b, h, start_i, rows, D, WIDTH, ROWS)  # scale / LOG2_E: D^-0.5


@triton.jit
def flash_dkv_kernel(q, k, v, do, dk, dv, lse, delta, q_documents, k_documents, scale, group, rows, columns, offset,
                     D: tl.constexpr, WIDTH: tl.constexpr, V: tl.constexpr, V_WIDTH: tl.constexpr,
                     ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Each program computes dk_j and dv_j of a tile of keys. It loops over the queries of all heads that share this key
    and value head.

    Tiles of scores are transposed, keys x queries. The mask is applied to every tile, because dk and dv take so many
    registers that none are left for a second loop.
    """
    start_j = tl.program_id(0) * COLUMNS
    DOCUMENTS: tl.constexpr = q_documents is not None
    kv_head, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    k_j = load_tile(k, b, kv_head, start_j, columns, D, WIDTH, COLUMNS, True)
    v_j = load_tile(v, b, kv_head, start_j, columns, V, V_WIDTH, COLUMNS, True)
    j = start_j + tl.arange(0, COLUMNS)
    # Queries from `first` to `stop` may see these keys.
    first, stop, j_document = 0, rows, None
    if CAUSAL:
        first = tl.maximum(start_j - offset, 0)
    if DOCUMENTS:
        q_documents += b * rows
        j_document, begin, stop = find_span(k_documents + b * columns, start_j, columns, q_documents, rows, COLUMNS)
        first, j_document = tl.maximum(first, begin), j_document[:, None]
    if WINDOW:
        stop = tl.minimum(stop, start_j + COLUMNS - 1 + WINDOW - offset)
    acc_dk = tl.zeros([COLUMNS, WIDTH], tl.float32)
    acc_dv = tl.zeros([COLUMNS, V_WIDTH], tl.float32)
    for member in range(group):
        h = kv_head * group + member
        row = (b * tl.num_programs(1) * group + h) * rows
        for start_i in range(first // ROWS * ROWS, stop, ROWS):
            # Everything that belongs to this tile of queries. Queries that do not exist have p = 0.
            q_i = load_tile(q, b, h, start_i, rows, D, WIDTH, ROWS, True)
            do_i = load_tile(do, b, h, start_i, rows, V, V_WIDTH, ROWS, True)
            i = start_i + tl.arange(0, ROWS)
            lse_i = tl.load(lse + row + i, i < rows, other=float("inf")) * LOG2_E
            delta_i = tl.load(delta + row + i, i < rows, other=0.0)
            # p, computed again from lse; then the mask.
            p = tl.exp2(tl.dot(k_j, tl.trans(q_i), input_precision="ieee") * scale - lse_i[None, :])
            i_document = tl.load(q_documents + i, i < rows)[None, :] if DOCUMENTS else None
            p = hide(p, 0.0, i[None, :], j[:, None], i_document, j_document, columns, offset, CAUSAL, WINDOW)
            # dv_j += p^T do_i, and dk_j += ds^T q_i.
            acc_dv = tl.dot(p.to(do_i.dtype), do_i, acc_dv, input_precision="ieee")
            ds = p * (tl.dot(v_j, tl.trans(do_i), input_precision="ieee") - delta_i[None, :])
            acc_dk = tl.dot(ds.to(q_i.dtype), q_i, acc_dk, input_precision="ieee")
    store_tile(dk, acc_dk * (scale / LOG2_E), b, kv_head, start_j, columns, D, WIDTH, COLUMNS)
    store_tile(dv, acc_dv, b, kv_head, start_j, columns, V, V_WIDTH, COLUMNS)


# ---- launches -------------------------------------------------------------------------------------------------------

def prepare(mask: Mask, q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> tuple:
    """Return what kernels read: the mask, with document numbers of 32 bits, and the tensors, with the last dimension
    contiguous and any other strides. Raises AssertionError if tensors do not fit together."""
    # k.shape[::3] is B and D, and x.shape[::2] is B and the number of tokens.
    assert q.dim() == k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3] and k.shape[::3] == q.shape[::3], \
        f"q {list(q.shape)} must be B N rows D, k {list(k.shape)} B K columns D and v {list(v.shape)} B K columns V"
    assert k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0, f"{q.shape[1]} heads cannot share {k.shape[1]} kv heads"
    for width in q.shape[3], v.shape[3]:
        assert width in range(1, 257), f"heads are {width} wide; at least 1 and at most 256 fit"
    assert q.dtype == k.dtype == v.dtype, f"q is {q.dtype}, k {k.dtype}, v {v.dtype}: they must be of one type"
    if mask.documents is not None:
        for documents, x in zip(mask.documents, (q, k)):
            assert documents.shape == x.shape[::2] and not documents.is_floating_point(), \
                f"documents must be {list(x.shape[::2])} integers, one per token"
        mask = mask._replace(documents=tuple(documents.to(torch.int32).contiguous() for documents in mask.documents))
    return mask, *(x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, *more))


def empty_heads(x: Tensor, width: int) -> Tensor:
    """Allocate [B, N, S, width] for x [B, N, S, D]. All heads of a token are contiguous in memory, because the matmul
    after attention needs that."""
    B, N, S, _ = x.shape
    return x.new_empty(B, S, N, width).transpose(1, 2)


def launch_tiles(kernel: triton.JITFunction, step: str, mask: Mask, heads: tuple[Tensor, ...],
                 *per_row: Tensor) -> None:
    """Launch a program for each tile of queries of each head, or for each tile of keys if step is "dkv".

    heads: q, k, v and others. per_row: lse, delta. WIDTH is at least 16, because tensor cores need that.
    """
    (B, N, rows, D), (_, K, columns, V) = heads[0].shape, heads[2].shape
    width, v_width = (max(16, triton.next_power_of_2(each)) for each in (D, V))
    widest = max(width, v_width)
    if heads[0].element_size() == 2:
        tiles = TILES[step, max(64, widest)]
    else:
        tiles = FP32_TILES if widest <= 128 else WIDE_FP32_TILES
    # Masking padded columns needs the registers that prefetching would use.
    if step == "dkv" and (D < width or V < v_width) and widest <= 128:
        tiles = tiles._replace(num_stages=1)
    grid = (triton.cdiv(columns, tiles.COLUMNS), K, B) if step == "dkv" else (triton.cdiv(rows, tiles.ROWS), N, B)
    launch(kernel, grid, *[(x, *x.stride()[:3]) for x in heads], *per_row, *(mask.documents or (None, None)),
           D ** -0.5 * LOG2_E.value, N // K, rows, columns, mask.offset, D=D, WIDTH=width, V=V, V_WIDTH=v_width,
           CAUSAL=mask.causal, WINDOW=mask.window, **tiles._asdict())


def flash_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask = CAUSAL) -> tuple[Tensor, Tensor]:
    """Return o [B, N, rows, V], and lse [B, N, rows]: logsumexp of scores, in fp32. It is -inf where a row sees no key.

    q: [B, N, rows, D]. k: [B, K, columns, D]. v: [B, K, columns, V]. K is a divisor of N. Strides may be any. D and V
        are at most 256. Each is padded to a power of 2, so other widths waste work.
    mask: document numbers must be below 2^31.

    Raises AssertionError if tensors do not fit together.
    """
    mask, q, k, v = prepare(mask, q, k, v)
    o, lse = empty_heads(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)
    try:
        launch_tiles(flash_forward_kernel, "forward", mask, (q, k, v, o), lse)
        return o, lse
    except KernelError:
        return sdpa_forward(q, k, v, mask)


def flash_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                   mask: Mask = CAUSAL) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv, with the same bits in every run.

    do, o, lse: of attention to all keys that the queries see, even if k and v are only a block of them, as in context
        parallelism (cp.py).
    """
    mask, q, k, v, do, o = prepare(mask, q, k, v, do, o)
    assert do.shape == o.shape == (*q.shape[:3], v.shape[3]), \
        f"do {list(do.shape)} and o {list(o.shape)} must be as q {list(q.shape)}, with the width of v {list(v.shape)}"
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32, \
        f"q is {list(q.shape)}, so lse {list(lse.shape)} must be its rows, in fp32"
    dq, dk, dv = (empty_heads(x, x.shape[3]) for x in (q, k, v))
    lse, delta = lse.contiguous(), lse.new_empty(lse.shape)
    try:
        launch_tiles(flash_dq_kernel, "dq", mask, (q, k, v, o, do, dq), lse, delta)
        launch_tiles(flash_dkv_kernel, "dkv", mask, (q, k, v, do, dk, dv), lse, delta)
        return dq, dk, dv
    except KernelError:
        return sdpa_backward(do, q, k, v, o, lse, mask)


class FlashAttention(Function):
    """flash_forward's o, differentiable. Saves q, k, v, o and lse, and no scores."""

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
    """Return flash_forward's o, differentiable. If one kernel does not run here, torch's fused attention computes both
    forward and backward."""
    if any(name.startswith("flash_") for name in failed):
        return attention_sdpa(q, k, v, mask)
    return FlashAttention.apply(q, k, v, mask)


# ---- demo: python flash.py ------------------------------------------------------------------------------------------

def find_loaded_tiles(mask: Mask, S: int, rows: int, columns: int) -> list[list[bool]]:
    """Find by experiment which tiles of S x S scores the forward kernel computes.

    Tile n of keys has NaN in column n of the values, so the values are as wide as the number of tiles. The NaN reaches
    column n of the result in every row whose program loads this tile, whether the mask hides the tile or not.
    """
    with torch.device("cpu" if triton.knobs.runtime.interpret else "cuda"):
        tiles = torch.eye(S // columns, dtype=torch.bool).repeat_interleave(columns, 0)[None, None]
        q, k, v = torch.zeros(3, *tiles.shape)
    return flash_forward(q, k, v.masked_fill(tiles, torch.nan), mask)[0][0, 0, ::rows].isnan().tolist()


def demo() -> None:
    """Draw which tiles are computed under three masks, and compare the kernels with the plain version."""
    device = "cpu" if triton.knobs.runtime.interpret else "cuda"
    sizes = torch.tensor([70, 60, 20, 106], device=device)
    documents = torch.arange(4, device=device).repeat_interleave(sizes)[None]
    print(f"Tiles of 32 x 32 scores that are computed (■): causal; documents of {sizes.tolist()} tokens; window 64:\n")
    masks = CAUSAL, Mask(documents=(documents, documents)), Mask(window=64)
    loaded = [find_loaded_tiles(mask, 256, 32, 32) for mask in masks]
    for rows in zip(*loaded):
        print("    " + "        ".join(" ".join("■" if tile else "·" for tile in row) for row in rows))
    counts = [sum(map(sum, tiles)) for tiles in loaded]

    q, k, v, do = torch.randn(4, 1, 1, 96, 16, generator=torch.Generator().manual_seed(0)).to(device)
    o, lse = flash_forward_reference(q, k, v, 32, 32)
    plain = (o, *flash_backward_reference(do, q, k, v, o, lse, 32, 32))
    kernel = (flash_forward(q, k, v)[0], *flash_backward(do, q, k, v, o, lse))
    difference = max((a - b).abs().max().item() for a, b in zip(kernel, plain))
    print(f"\nOf 64 tiles {counts[0]}, {counts[1]} and {counts[2]} are computed: hidden tiles cost nothing.\n"
          f"The kernels and the loops in plain torch differ by at most {difference:.0e}, in o, dq, dk and dv.")


if __name__ == "__main__":
    run_kernel_demo(demo)
