"""FP8's Triton kernel: it reads a matrix once and writes both quantised copies. fp8.py has the same in plain torch.

fp8.py says why a linear layer needs two copies of x [T, K]. Each program quantises a tile of 128 rows
and writes it to both copies:

            K                        rowwise [T, K]            columnwise [K, T]
        ┌─────────────┐              ┌─────────────┐           ┌───────┐
        │    ┌────┐   │              │    ┌────┐   │           │ ┌──┐  │
      T │    │tile│   │     ──►      │    │data│   │     +     │ │  │  │
        │    └────┘   │              │    └────┘   │           │ └──┘  │
        └─────────────┘              └─────────────┘           │       │
                                                               └───────┘

Numbers that share a scale are quantised by these formulas (functions scale_of and to_fp8):

    scale = max(amax, SMALLEST) / LIMIT            amax: their largest |x|
    data  = clamp(x (1 / scale), -LIMIT, LIMIT)    rounded to FP8, whose largest number is LIMIT; NaN stays NaN

Which numbers share a scale:

                           rowwise                columnwise
    one scale, given       all of x               all of x
    1 x 128 blocks         a row of the tile      a column of the tile
    tiles of 128 x 128     the tile               the tile

The kernel moves 4 bytes per element of a 16-bit matrix: it reads 2, and writes 1 to each copy. Scales of
blocks add 1/16 of a byte. Divisions are rounded to nearest, so the kernel gives the same bits as fp8.py.

Sources: as fp8.py. Shapes: T rows (tokens, or rows of a weight), K columns. kernels.py says how to read a kernel.
"""
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import INTERPRETED, launch, run_kernel_demo

BLOCK = 128
Matrix = tuple[Tensor, Tensor]  # data and scales of an fp8.Quantised

# ---- the kernel -----------------------------------------------------------------------------------------------------


@triton.jit
def to_fp8(x, LIMIT: tl.constexpr, FORMAT: tl.constexpr):
    """Round numbers that have been divided by their scale to FP8."""
    return tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL).to(FORMAT)


@triton.jit
def scale_of(amax, LIMIT: tl.constexpr, SMALLEST: tl.constexpr):
    """Return the scale that maps amax to LIMIT."""
    return tl.div_rn(tl.maximum(amax, SMALLEST, propagate_nan=tl.PropagateNan.ALL), LIMIT)


@triton.jit
def quantise_kernel(x, scale, rowwise, row_scales, columnwise, column_scales, T, K, T_padded, LIMIT: tl.constexpr,
                    SMALLEST: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr):
    """Quantise the program's tile, BLOCK rows x WIDTH columns, of one of e matrices, [e, T, K].

    rowwise, columnwise: the copies to write, or None.
    scale: the given scale, or None. Then each tile has a scale if TILES, and otherwise each block: a row of the tile in
        the rowwise copy, and a column of the tile in the columnwise copy.
    """
    # Read the tile, once.
    i, j, matrix = tl.program_id(1), tl.program_id(0), tl.program_id(2).to(tl.int64)
    t, k = i * BLOCK + tl.arange(0, BLOCK), j * WIDTH + tl.arange(0, WIDTH)
    offsets = (matrix * T + t)[:, None] * K + k[None, :]
    inside = (t < T)[:, None] & (k < K)[None, :]
    tile = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    # A scale that both copies share.
    if scale is not None:
        tile = tile * tl.div_rn(1.0, tl.load(scale))
    if TILES:
        by_tile = scale_of(tl.max(tl.max(tl.abs(tile), 1), 0), LIMIT, SMALLEST)
        tl.store(row_scales + (j * tl.num_programs(2) + matrix) * tl.num_programs(1) + i, by_tile)
        tile = tile * tl.div_rn(1.0, by_tile)
    # The rowwise copy.
    if rowwise is not None:
        scaled = tile
        if scale is None and not TILES:
            by_row = scale_of(tl.max(tl.abs(tile), 1), LIMIT, SMALLEST)
            tl.store(row_scales + j.to(tl.int64) * T + t, by_row, mask=t < T)
            scaled = tile * tl.div_rn(1.0, by_row)[:, None]
        tl.store(rowwise + offsets, to_fp8(scaled, LIMIT, rowwise.dtype.element_ty), mask=inside)
    # The columnwise copy: the tile is transposed before it is stored.
    if columnwise is not None:
        scaled = tile
        if scale is None and not TILES:
            by_column = scale_of(tl.max(tl.abs(tile), 0), LIMIT, SMALLEST)
            tl.store(column_scales + i.to(tl.int64) * K + k, by_column, mask=k < K)
            scaled = tile * tl.div_rn(1.0, by_column)[None, :]
        data = tl.trans(to_fp8(scaled, LIMIT, columnwise.dtype.element_ty))
        tl.store(columnwise + (matrix * K + k)[:, None] * T_padded + t[None, :], data,
                 mask=(k < K)[:, None] & (t < T_padded)[None, :])


# ---- its launcher ---------------------------------------------------------------------------------------------------

def quantise(x: Tensor, dtype: torch.dtype, scale: Tensor | None, smallest: float,
             rowwise: bool = True, columnwise: bool = True, tiles: bool = False) -> tuple[Matrix | None, Matrix | None]:
    """Return the copies of x [T, K], or of e matrices [e, T, K], that are asked for, each with its scales, as
    fp8.quantise does.

        scale   tiles   rowwise [T, K] has scales   columnwise [K, T_padded] has scales   T_padded: a multiple of
        given   False   scale, a scalar             scale                                 16
        None    False   [T, K/128]                  [K, T_padded/128]                     128
        None    True    [T/128, K/128]              [K/128, T/128]                        128

    Data and scales of e matrices have a first dimension of e, except a given scale.
    smallest: fp8.SMALLEST.

    Raises ValueError if x does not consist of whole blocks: without a given scale K must be a multiple of 128, and with
    tiles T, too. fp8.py pads K in plain torch, and this kernel does not. Blocks of 1 x 128 are for one matrix only.
    """
    (*matrices, T, K), x = x.shape, x.contiguous()
    if scale is None and (K % BLOCK or tiles and T % BLOCK):
        raise ValueError(f"{T} x {K} does not consist of blocks of {'128' if tiles else '1'} x 128")
    assert not matrices or tiles or scale is not None, "blocks of 1 x 128 are for one matrix"
    e = matrices[0] if matrices else 1
    # Columns and warps of a program. With these a thread needs at most 128 registers, so two programs of 8 warps fit on
    # an SM. With one scale, 128 columns and 8 warps took 247 registers per thread on Triton 3.6.
    width, num_warps = (BLOCK, 16 if tiles else 8) if scale is None else (64, 8)
    across, down, T_padded = triton.cdiv(K, width), triton.cdiv(T, BLOCK), T + -T % (BLOCK if scale is None else 16)
    row_data = x.new_empty(*matrices, T, K, dtype=dtype) if rowwise else None
    column_data = x.new_empty(*matrices, K, T_padded, dtype=dtype) if columnwise else None
    # Scales are allocated transposed, so the results are column-major: scales of consecutive rows are adjacent, as
    # cuBLAS reads blocks and as programs write them. With tiles the columnwise scales are the rowwise ones, transposed.
    row_scales = x.new_empty(across, e * (down if tiles else T), dtype=torch.float32) if scale is None else scale
    column_scales = x.new_empty(down, K, dtype=torch.float32) if scale is None and not tiles else row_scales
    if T:
        launch(quantise_kernel, (across, down, e), x, scale, row_data, row_scales, column_data, column_scales, T, K,
               T_padded, LIMIT=torch.finfo(dtype).max, SMALLEST=smallest, BLOCK=BLOCK, WIDTH=width,
               TILES=tiles, num_warps=num_warps)
    if scale is None:
        row_scales = row_scales.t()
        if matrices:
            row_scales = row_scales.unflatten(0, (e, down))
        column_scales = row_scales.mT if tiles else column_scales.t()
    return (row_data, row_scales) if rowwise else None, (column_data, column_scales) if columnwise else None


# ---- demo: python fp8_kernels.py ------------------------------------------------------------------------------------

def demo() -> None:
    """Quantise a matrix whose numbers FP8 has exactly, in every way, and compare data times scales with the matrix.

    Each row and column of a tile has a 448, the largest number of E4M3, times a power of two. The interpreter rounds
    wrongly, so there must be nothing to round.
    """
    device = "cpu" if INTERPRETED else "cuda"
    dtype = torch.float8_e4m3fn
    tile = torch.arange(BLOCK * BLOCK).view(BLOCK, BLOCK) % 9 - 4.0
    tile.fill_diagonal_(448.0)
    powers = torch.tensor([[1.0, 2.0, 4.0], [0.5, 1.0, 2.0]])  # of the six tiles: these should be their scales
    x = torch.kron(powers, tile).to(device)
    print(f"x {list(x.shape)} in tiles of 128 x 128, whose scales should be {powers.tolist()}\n")
    ways = {"one scale, given": dict(scale=torch.tensor(4.0, device=device)), "1 x 128 blocks": dict(scale=None),
            "tiles of 128 x 128": dict(scale=None, tiles=True)}
    for name, how in ways.items():
        copies = quantise(x, dtype, smallest=2.0 ** -100, **how)
        for copy, (data, scales), exact in zip(("rowwise", "columnwise"), copies, (x, x.t())):
            by_number = scales
            if scales.ndim:  # a scale for each number
                height = len(data) // len(scales)
                by_number = scales.repeat_interleave(height, 0).repeat_interleave(BLOCK, 1)
            same = torch.equal(data.float() * by_number, exact)
            print(f"{name:20s}{copy:12s}data {list(data.shape)}   scales {str(list(scales.shape)):12s}"
                  f"data x scales {'is' if same else 'IS NOT'} x{'' if copy == 'rowwise' else '^T'}")
    print(f"\nscales of tiles: {quantise(x, dtype, None, 2.0 ** -100, tiles=True)[0][1].tolist()}\n"
          "Both copies come from one reading of x. In blocks, each copy has scales of its own.")


if __name__ == "__main__":
    run_kernel_demo(demo)
