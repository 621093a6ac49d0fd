"""FP8 on GPUs, in Triton: one kernel that makes both quantised copies of x.

A program has a tile of 128 x 128. Its rows are blocks of the rowwise copy, its columns are blocks of
the columnwise one, so that one reading of x serves both. (With `tiles`, one scale of the tile does; if the whole tensor
has one scale, tiles are narrower.) Bytes per element: 2 read, 1 + 1 written, 2/32 of scales. 16k x 4096 elements take
68 us at 4 TB/s.

                   ┌──────┐ ──► amax of each row ─────► rowwise     [T, K]
      x  T K  ──►  │ tile │
                   └──────┘ ──► amax of each column ──► columnwise  [K, T]

On a CPU Triton's interpreter runs it, in fp32.
Shapes: T tokens, K columns, R x C a copy.
"""
import torch
import triton
import triton.language as tl

BLOCK = 128
# Columns of quantise_kernel's tile, and warps: Triton 3.6, too, needs at most 128 registers per thread for them. (With
# 128 columns and 8 warps it takes 247 for one scale and 221 for tiles, and one program fills an SM.)
SHAPES = {"one scale": (64, 8), "blocks": (128, 8), "tiles": (128, 16)}
# Triton's name, mantissa bits, exponent of the smallest normal number.
FORMATS = {torch.float8_e4m3fn: (tl.float8e4nv, 3, -6), torch.float8_e5m2: (tl.float8e5, 2, -14)}
Matrix = tuple[torch.Tensor, torch.Tensor]  # an fp8.Quantised: data, scales (here views of [C/128, R], as cuBLAS reads)


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


def quantise(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None, smallest: float, pow2: bool = False,
             rowwise: bool = True, columnwise: bool = True, tiles: bool = False) -> tuple[Matrix | None, Matrix | None]:
    """fp8.quantise of x [T, K]. smallest: fp8.SMALLEST. Raises ValueError if x has no whole blocks."""
    (T, K), x, by_block = x.shape, x.contiguous(), scale is None
    T_padded = T + -T % (BLOCK if by_block else 16)
    width, num_warps = SHAPES["tiles" if tiles else "blocks" if by_block else "one scale"]
    across, down = triton.cdiv(K, width), triton.cdiv(T, BLOCK)
    if by_block and (K % BLOCK or tiles and T % BLOCK):
        raise ValueError(f"{T} x {K} has no blocks of {BLOCK}{f' x {BLOCK}' if tiles else ''}")
    format, bits, lowest = FORMATS[dtype]
    a, b = x.new_empty(T if rowwise else 0, K, dtype=dtype), x.new_empty(K, T_padded if columnwise else 0, dtype=dtype)
    a_scales = x.new_empty(across, down if tiles else T if rowwise and by_block else 0, dtype=torch.float32)
    b_scales = x.new_empty(down, K if columnwise and by_block and not tiles else 0, dtype=torch.float32)
    if T:
        quantise_kernel[(across, down)](
            x, scale, a, a_scales, b, b_scales, T, K, T_padded, ONE=not by_block, ROWWISE=rowwise,
            COLUMNWISE=columnwise, LIMIT=torch.finfo(dtype).max, SMALLEST=smallest, POW2=pow2, FORMAT=format, BITS=bits,
            LOWEST=lowest, ROUND=triton.knobs.runtime.interpret, BLOCK=BLOCK, TILES=tiles, WIDTH=width,
            num_warps=num_warps)
    by_column = a_scales if tiles else b_scales.t()
    return ((a, a_scales.t() if by_block else scale) if rowwise else None,
            (b, by_column if by_block else scale) if columnwise else None)
