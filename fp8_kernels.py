"""FP8's Triton kernel: it reads a matrix once and writes both quantised copies; fp8.py has the same in plain torch.

fp8.py says why a linear layer needs two copies of x [T, K]. A program has a tile of 128 rows, and
writes it into both:

            K                        rowwise [T, K]            columnwise [K, T]
        ┌─────────────┐              ┌─────────────┐           ┌───────┐
        │    ┌────┐   │              │    ┌────┐   │           │ ┌──┐  │
      T │    │tile│   │     ──►      │    │data│   │     +     │ │  │  │
        │    └────┘   │              │    └────┘   │           │ └──┘  │
        └─────────────┘              └─────────────┘           │       │
                                                               └───────┘

Numbers that share a scale are quantised by one formula (functions scale_of and to_fp8):

    scale = max(amax, SMALLEST) / LIMIT            amax: their largest |x|
    data  = clamp(x (1 / scale), -LIMIT, LIMIT)    rounded to FP8, whose largest number is LIMIT; NaN stays NaN

Which numbers share a scale:

                           rowwise                columnwise
    one scale, given       all                    all
    1 x 128 blocks         a row of the tile      a column of the tile
    tiles of 128 x 128     the tile               the tile

Moves 4 bytes per element of a 16-bit matrix: 2 are read, and each copy is 1. Scales of blocks add
1/16 of a byte. Divisions are rounded to nearest, so the bits are those of fp8.py.

Sources: as fp8.py. Shapes: T rows (tokens, or rows of a weight), K columns.
"""
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import launch

BLOCK = 128
Matrix = tuple[Tensor, Tensor]  # data and scales of an fp8.Quantised


@triton.jit
def to_fp8(x, LIMIT: tl.constexpr, FORMAT: tl.constexpr):
    return tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL).to(FORMAT)


@triton.jit
def scale_of(amax, LIMIT: tl.constexpr, SMALLEST: tl.constexpr):
    return tl.div_rn(tl.maximum(amax, SMALLEST, propagate_nan=tl.PropagateNan.ALL), LIMIT)


@triton.jit
def quantise_kernel(x, scale, rowwise, row_scales, columnwise, column_scales, T, K, T_padded, LIMIT: tl.constexpr,
                    SMALLEST: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr):
    """Quantise the program's tile. Rows of a tile are blocks of the rowwise copy, columns are blocks of the columnwise
    one. A copy that is None is not wanted. scale: the one given, or None: each block has one or, with TILES, each tile.
    """
    i, j = tl.program_id(1), tl.program_id(0)
    t, k = i * BLOCK + tl.arange(0, BLOCK), j * WIDTH + tl.arange(0, WIDTH)
    offsets = t.to(tl.int64)[:, None] * K + k[None, :]
    inside = (t < T)[:, None] & (k < K)[None, :]
    tile = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    if scale is not None:
        tile = tile * tl.div_rn(1.0, tl.load(scale))
    if TILES:
        by_tile = scale_of(tl.max(tl.max(tl.abs(tile), 1), 0), LIMIT, SMALLEST)
        tl.store(row_scales + j * tl.num_programs(1) + i, by_tile)
        tile = tile * tl.div_rn(1.0, by_tile)
    if rowwise is not None:
        scaled = tile
        if scale is None and not TILES:
            by_row = scale_of(tl.max(tl.abs(tile), 1), LIMIT, SMALLEST)
            tl.store(row_scales + j.to(tl.int64) * T + t, by_row, mask=t < T)
            scaled = tile * tl.div_rn(1.0, by_row)[:, None]
        tl.store(rowwise + offsets, to_fp8(scaled, LIMIT, rowwise.dtype.element_ty), mask=inside)
    if columnwise is not None:
        scaled = tile
        if scale is None and not TILES:
            by_column = scale_of(tl.max(tl.abs(tile), 0), LIMIT, SMALLEST)
            tl.store(column_scales + i.to(tl.int64) * K + k, by_column, mask=k < K)
            scaled = tile * tl.div_rn(1.0, by_column)[None, :]
        data = tl.trans(to_fp8(scaled, LIMIT, columnwise.dtype.element_ty))
        tl.store(columnwise + k.to(tl.int64)[:, None] * T_padded + t[None, :], data,
                 mask=(k < K)[:, None] & (t < T_padded)[None, :])


def quantise(x: Tensor, dtype: torch.dtype, scale: Tensor | None, smallest: float,
             rowwise: bool = True, columnwise: bool = True, tiles: bool = False) -> tuple[Matrix | None, Matrix | None]:
    """Return the copies of x that are wanted, each with its scales, as fp8.quantise does. smallest: fp8.SMALLEST.

        scale   tiles   rowwise [T, K] has scales   columnwise [K, T_padded] has scales   T_padded: a multiple of
        given   False   scale, a scalar             scale                                 16
        None    False   [T, K/128]                  [K, T_padded/128]                     128
        None    True    [T/128, K/128]              [K/128, T/128]                        128

    Raises ValueError if x has no whole blocks.
    """
    (T, K), x = x.shape, x.contiguous()
    if scale is None and (K % BLOCK or tiles and T % BLOCK):
        raise ValueError(f"{T} x {K} has no blocks of 128{' x 128' if tiles else ''}")
    # Columns and warps of a program. With these a thread needs at most 128 registers; with one scale, 128 columns and 8
    # warps took 247 on Triton 3.6.
    width, num_warps = (BLOCK, 16 if tiles else 8) if scale is None else (64, 8)
    across, down, T_padded = triton.cdiv(K, width), triton.cdiv(T, BLOCK), T + -T % (BLOCK if scale is None else 16)
    row_data = x.new_empty(T, K, dtype=dtype) if rowwise else None
    column_data = x.new_empty(K, T_padded, dtype=dtype) if columnwise else None
    # Contiguous along the rows, as cuBLAS reads scales and programs write them.
    row_scales = x.new_empty(across, down if tiles else T, dtype=torch.float32) if scale is None else scale
    column_scales = x.new_empty(down, K, dtype=torch.float32) if scale is None and not tiles else row_scales
    if T:
        launch(quantise_kernel, (across, down), x, scale, row_data, row_scales, column_data, column_scales, T, K,
               T_padded, LIMIT=torch.finfo(dtype).max, SMALLEST=smallest, BLOCK=BLOCK, WIDTH=width,
               TILES=tiles, num_warps=num_warps)
    if scale is None:
        row_scales, column_scales = row_scales.t(), column_scales if tiles else column_scales.t()
    return (row_data, row_scales) if rowwise else None, (column_data, column_scales) if columnwise else None
