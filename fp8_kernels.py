"""FP8 on GPUs, in Triton: x to eight bits in both forms in one reading; and a product of blocks of 128, to be read.

quantise_kernel   one program has a tile of 128 x 128. Its rows are blocks of the one form, its columns blocks of the
                  other, so both sets of scales come from numbers that are in registers:

                                 ┌──────┐ ──► largest of each row ─────► rows     [T, K], as x lies
                    x  T K  ──►  │ tile │
                                 └──────┘ ──► largest of each column ──► columns  [K, T], turned on the way out

                  Bytes of an element: 2 read, 1 + 1 written, and 2/32 of scales. 16k x 4096 take 68 us at 4 TB/s.

product_kernel    A B^T of blocks of 128 along K. Tensor cores sum 128 products, in 14 bits; that is times both scales,
                  and added up in fp32. A weight has one scale a tile (128 x 128), everything else one a row:

                     acc = 0;   for each 128 of K:   acc += (a tile · b tile) x scales of a (down) x of b (across)

fp8.py runs F.scaled_mm, which cuBLAS has for the same blocks. The interpreter runs both kernels on a CPU, in fp32.

A weight has one scale a tile, which serves both forms. Scales are written [C/128, R], R adjacent, and seen transposed,
as cuBLAS wants them.
Letters: T tokens, K what is summed over, M and N rows of what is multiplied, R x C a form.
"""
import torch
import triton
import triton.language as tl

from fp8 import BLOCK, E4M3, SMALLEST, Quantised

TILE, GROUP = 128, 8  # rows of a product's tiles; tiles of A that share those of B while they are in L2
FORMATS = {E4M3: (tl.float8e4nv, 3, -6), torch.float8_e5m2: (tl.float8e5, 2, -14)}  # mantissa, smallest normal


@triton.jit
def rounded(x, BITS: tl.constexpr, LOWEST: tl.constexpr):
    """x to the nearest number of a format, still in fp32: adding 1.5 x 2^23 leaves no bit behind the point."""
    exponent = tl.maximum(((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127, LOWEST)
    step = ((exponent - BITS + 127) << 23).to(tl.float32, bitcast=True)
    return ((x / step + 12582912.0) - 12582912.0) * step


@triton.jit
def to_fp8(x, LIMIT: tl.constexpr, FORMAT: tl.constexpr, BITS: tl.constexpr, LOWEST: tl.constexpr, ROUND: tl.constexpr):
    x = tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if ROUND:  # whose own cast carries into the exponent wrongly: the interpreter
        x = rounded(x, BITS, LOWEST)
    return x.to(FORMAT)


@triton.jit
def scale_of(amax, LIMIT: tl.constexpr, LEAST: tl.constexpr, POW2: tl.constexpr):
    scale = tl.div_rn(tl.maximum(amax, LEAST), LIMIT)
    if POW2:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def quantise_kernel(x, scale, rows, row_scales, columns, column_scales, T, K, filled, ONE: tl.constexpr,
                    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LIMIT: tl.constexpr, LEAST: tl.constexpr,
                    POW2: tl.constexpr, FORMAT: tl.constexpr, BITS: tl.constexpr, LOWEST: tl.constexpr,
                    ROUND: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """scale: of everything, if ONE. TILES: each tile has one. filled: tokens of `columns`, T and what fills it up."""
    i, j = tl.program_id(1), tl.program_id(0)
    t, k = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    place = t.to(tl.int64)[:, None] * K + k[None, :]
    inside = (t < T)[:, None] & (k < K)[None, :]
    tile = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ONE:
        tile = tile * tl.div_rn(1.0, tl.load(scale))
    if TILES:
        by_tile = scale_of(tl.max(tl.max(tl.abs(tile), 1), 0), LIMIT, LEAST, POW2)
        tl.store(row_scales + j * tl.num_programs(1) + i, by_tile)
        tile = tile * tl.div_rn(1.0, by_tile)
    if ROWS:
        scaled = tile
        if not (ONE or TILES):
            by_row = scale_of(tl.max(tl.abs(tile), 1), LIMIT, LEAST, POW2)
            tl.store(row_scales + j.to(tl.int64) * T + t, by_row, mask=t < T)
            scaled = tile * tl.div_rn(1.0, by_row)[:, None]
        tl.store(rows + place, to_fp8(scaled, LIMIT, FORMAT, BITS, LOWEST, ROUND), mask=inside)
    if COLUMNS:
        scaled = tile
        if not (ONE or TILES):
            by_column = scale_of(tl.max(tl.abs(tile), 0), LIMIT, LEAST, POW2)
            tl.store(column_scales + i.to(tl.int64) * K + k, by_column, mask=k < K)
            scaled = tile * tl.div_rn(1.0, by_column)[None, :]
        turned = tl.trans(to_fp8(scaled, LIMIT, FORMAT, BITS, LOWEST, ROUND))
        tl.store(columns + k.to(tl.int64)[:, None] * filled + t[None, :], turned,
                 mask=(k < K)[:, None] & (t < filled)[None, :])


@triton.jit
def product_kernel(a, b, a_scales, b_scales, out, M, N, K, b_row, b_block, ADD: tl.constexpr, TILES: tl.constexpr,
                   TILE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """out = A B^T, or out += A B^T if ADD. a_scales [K/128, M]. TILES: b has 128 x 128 blocks. b_row, b_block: how far
    apart the scales of neighbours along N (128 x 128: tiles) and along K are."""
    # Programs that run together share tiles: GROUP tiles down, then one across.
    down, across, program = tl.cdiv(M, TILE), tl.cdiv(N, TILE), tl.program_id(0)
    first = program // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    i, j = first + program % (GROUP * across) % height, program % (GROUP * across) // height
    m, n, k = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK)
    a_place = a + m.to(tl.int64)[:, None] * K + k[None, :]
    b_place = b + n.to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros((TILE, TILE), tl.float32)
    for _ in range(0, K, BLOCK):
        a_tile = tl.load(a_place, mask=(m < M)[:, None], other=0.0)
        b_tile = tl.load(b_place, mask=(n < N)[None, :], other=0.0)
        a_scale = tl.load(a_scales + m, mask=m < M, other=0.0)
        part = tl.dot(a_tile, b_tile)
        if TILES:  # a scale for all of it
            acc += part * (a_scale * tl.load(b_scales + j * b_row))[:, None]
        else:
            acc += part * a_scale[:, None] * tl.load(b_scales + n * b_row, mask=n < N, other=0.0)[None, :]
        a_place, b_place, a_scales, b_scales = a_place + BLOCK, b_place + BLOCK, a_scales + M, b_scales + b_block
    place = out + m.to(tl.int64)[:, None] * N + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    if ADD:
        acc += tl.load(place, mask=inside, other=0.0)
    tl.store(place, acc.to(out.dtype.element_ty), mask=inside)


def quantise(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None, pow2: bool = False,
             rows: bool = True, columns: bool = True, tiles: bool = False
             ) -> tuple[Quantised | None, Quantised | None]:
    """As fp8.quantise, of x T K."""
    (T, K), x = x.shape, x.contiguous()
    unit = BLOCK if scale is None else 16
    filled = triton.cdiv(T, unit) * unit
    across, down = triton.cdiv(K, BLOCK), triton.cdiv(T, BLOCK)
    if scale is None and (K % BLOCK or tiles and T % BLOCK):
        raise ValueError(f"{T} x {K} has no blocks of {BLOCK}{f' x {BLOCK}' if tiles else ''}")
    format, bits, lowest = FORMATS[dtype]
    a, b = x.new_empty(T if rows else 0, K, dtype=dtype), x.new_empty(K, filled if columns else 0, dtype=dtype)
    blocks = scale is None
    a_scales = x.new_empty(across, down if tiles else T if rows and blocks else 0, dtype=torch.float32)
    b_scales = x.new_empty(down, K if columns and blocks and not tiles else 0, dtype=torch.float32)
    if T:
        quantise_kernel[(across, down)](
            x, scale, a, a_scales, b, b_scales, T, K, filled, ONE=not blocks, ROWS=rows, COLUMNS=columns,
            LIMIT=torch.finfo(dtype).max, LEAST=SMALLEST, POW2=pow2, FORMAT=format, BITS=bits, LOWEST=lowest,
            ROUND=triton.knobs.runtime.interpret, BLOCK=BLOCK, TILES=tiles, num_warps=8)
    by_column = a_scales if tiles else b_scales.t()
    return (Quantised(a, a_scales.t() if blocks else scale) if rows else None,
            Quantised(b, by_column if blocks else scale) if columns else None)


def product(a: Quantised, b: Quantised, out: torch.Tensor, add: bool = False) -> torch.Tensor:
    """A B^T of M K in 1 x 128 blocks and N K in 1 x 128 or 128 x 128 ones, into `out` M N, or added to it."""
    (M, K), N = a.data.shape, len(b.data)
    if K % BLOCK or a.scales.shape != (M, K // BLOCK) or len(b.scales) not in (N, N // BLOCK):
        raise ValueError(f"{M} x {K} with {tuple(a.scales.shape)} scales by {N} x {K} with {tuple(b.scales.shape)}: "
                         f"need 1 x {BLOCK} blocks, and K a multiple of {BLOCK}")
    tiles = len(b.scales) != N
    product_kernel[(triton.cdiv(M, TILE) * triton.cdiv(N, TILE),)](
        a.data.contiguous(), b.data.contiguous(), a.scales.t().contiguous(), b.scales, out, M, N, K,
        *b.scales.stride(), ADD=add, TILES=tiles, TILE=TILE, GROUP=GROUP, BLOCK=BLOCK, num_warps=8, num_stages=3)
    return out
