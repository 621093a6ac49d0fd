"""FP8: a linear layer multiplies 8-bit floats, in forward and in both matmuls of backward.

Every product is A B^T: the last dimension of both factors is the one that the product sums over.

                 forward                     gradient of the input       gradient of the weight
                 Y = X W^T                   dX = dY W                   dW = dY^T X
                 sums over K                 sums over N                 sums over T

                        K                           N                           T
    left           ┌─────────────┐             ┌─────────────┐             ┌─────────────┐
    factor       T │ ▬▬▬ ▬▬▬ ▬▬▬ │ X         T │ ▬▬▬ ▬▬▬ ▬▬▬ │ dY        N │ ▬▬▬ ▬▬▬ ▬▬▬ │ dY^T
                   │ ▬▬▬ ▬▬▬ ▬▬▬ │             │ ▬▬▬ ▬▬▬ ▬▬▬ │             │ ▬▬▬ ▬▬▬ ▬▬▬ │
                   └─────────────┘             └─────────────┘             └─────────────┘
    right          ┌─────────────┐             ┌─────────────┐             ┌─────────────┐
    factor       N │ ███ ███ ███ │ W         K │ ███ ███ ███ │ W^T       K │ ▬▬▬ ▬▬▬ ▬▬▬ │ X^T
                   │ ███ ███ ███ │             │ ███ ███ ███ │             │ ▬▬▬ ▬▬▬ ▬▬▬ │
                   └─────────────┘             └─────────────┘             └─────────────┘

    ▬▬▬ and ███    numbers that share a scale in blockwise FP8: 1 x 128 numbers, or a tile of 128 x 128
    tensorwise     all numbers of a matrix share one scale

A number x is stored as data = x / scale, rounded to FP8. The scale maps amax, the largest |x| that
shares it, to the largest number of the format. A product multiplies data, and then scales.
`linear_in_fp8` below is all of this in ten lines.

Symbols: T tokens, N rows (outputs) and K columns (inputs) of a weight: X [T, K], W [N, K], dY [T, N].
         [R, C] is any matrix, and e the number of experts.
         A matrix has a rowwise copy, quantised as it is, and a columnwise copy, quantised as its
         transpose. Each matrix needs both, because it is a factor of two products, which sum over
         different dimensions of it. The columnwise copy is stored transposed, because Hopper needs the
         summed dimension to be contiguous.

    format   sign, exponent, mantissa   largest   smallest   normal from   rounding error   range
    E4M3     1 4 3                      448       2^-9       2^-6          up to 1/16       18 powers of 2
    E5M2     1 5 2                      57344     2^-16      2^-14         up to 1/8        32 powers of 2

    --fp8        X, W   dY     numbers that share a scale           effect of an outlier
    tensorwise   E4M3   E5M2   a tensor: wq, wk and wv count as     If it is 1000 times as large as the
                               one, and so do all experts           others, they lose 10 of the 18 powers
                                                                    of two. Small gradients would become
                                                                    0 in E4M3, hence E5M2 for dY.
    blockwise    E4M3   E4M3   1 x 128 numbers along the sum; in    It affects only its own block, so
                               a weight 128 x 128, so that W and    E4M3 suffices for dY, too.
                               W^T are the same numbers

Saves: A matmul takes as little as half the time. Activations that are saved for backward, or gathered
       by ranks, stay in 16 bits.
Costs: Quantising reads W and dY once (experts' dY twice) and X twice, in forward and for dW. It writes
       two FP8 copies of each.
       With one scale per tensor, every tensor is read once more, for its amax. Ranks that have shards of
       one tensor agree on its amax, with one all-reduce of a single number per mesh axis, so results do
       not depend on the sharding.
       Both copies of a weight, 2 bytes per parameter, are cached until the weight changes. At ZeRO level
       3 they are not cached, and every use of the weight quantises it again.
Stops helping when: matrices are so small that quantising costs more than the faster matmul saves; or
       it costs accuracy: the loss rises.

Micikevicius et al. 2022 (the formats); DeepSeek-AI 2024 (V3, section 3.3: blocks); NVIDIA Transformer Engine
(rowwise, columnwise; it calls the scale scale_inv).
"""
from copy import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from core.collectives import MAX, Group, all_reduce, run_demo
from core.config import FP8_RECIPES, Fp8Recipe
from core.gradients import Params, stacked_weight
from core.param import acc_dtype
from operations import try_kernel

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}  # as config.Fp8Recipe names them
BLOCK = 128


# ---- the plain version: the three products of a linear layer --------------------------------------------------------

def linear_in_fp8(x: Tensor, w: Tensor, dy: Tensor, recipe: Fp8Recipe) -> tuple[Tensor, Tensor, Tensor]:
    """Return Y = X W^T, dX = dY W and dW = dY^T X of one layer on one rank, each computed in FP8.

    x: [T, K]. w: [N, K]; with blocks, N and K must be multiples of 128. dy: [T, N].
    """
    grad_format = FORMATS[recipe.grad]

    def quantise_tokens(matrix: Tensor, dtype: torch.dtype) -> "Quantised":
        return quantise_blocks(matrix, dtype) if recipe.blocks else quantise_tensor(matrix, dtype)

    def quantise_weight(matrix: Tensor) -> "Quantised":
        return quantise_blocks(matrix, E4M3, height=BLOCK) if recipe.blocks else quantise_tensor(matrix, E4M3)

    y = product(quantise_tokens(x, E4M3), quantise_weight(w), x.dtype)                      # sums over K
    dx = product(quantise_tokens(dy, grad_format), quantise_weight(w.t()), x.dtype)         # sums over N
    dw = product(quantise_tokens(dy.t(), grad_format), quantise_tokens(x.t(), E4M3), x.dtype)      # sums over T
    return y, dx, dw


# The rest of the file computes the same products, with these differences:
#
#     `quantise`              makes the rowwise and the columnwise copy of a matrix together. On a GPU one
#                             kernel reads the matrix once for both.
#     `product`               calls cuBLAS on a GPU, which reads scales in layouts of its own.
#     Quantiser, Fp8          cache FP8 weights until the weights change, make ranks agree on one scale,
#                             and add dW to a gradient buffer.
#     Fp8Experts              multiplies each expert's tokens by the expert's own weight.


# ---- formats and scales ---------------------------------------------------------------------------------------------

SMALLEST = 2.0 ** -100  # lower bound of amax, so that scales and their reciprocals are normal fp32 numbers


class Quantised(NamedTuple):
    """A matrix [R, C] in FP8, or e matrices: data times scales. C is the dimension that a product sums over.

        kind       scales, in fp32         each scale is shared by
        "tensor"   []                      all numbers
        "blocks"   [R, C/128]              1 x 128 numbers
        "tiles"    [R/128, C/128]          128 x 128 numbers

    With e matrices, data and the scales of blocks or tiles have a first dimension of e.
    """
    data: Tensor  # [R, C] or [e, R, C], in FP8
    scales: Tensor

    @property
    def kind(self) -> str:
        if self.scales.ndim == 0:
            return "tensor"
        return "blocks" if self.scales.shape[-2] == self.data.shape[-2] else "tiles"

    def select(self, index: int) -> "Quantised":
        """Return one of e matrices."""
        return Quantised(self.data[index], self.scales if self.kind == "tensor" else self.scales[index])

    def split(self, sizes: list[int], dim: int) -> list["Quantised"]:
        """Split a matrix without tiles into parts of the given numbers of rows (dim 0), or of columns (dim 1), which
        must be whole blocks."""
        parts = self.data.split(sizes, dim)
        if self.kind == "tensor":
            return [Quantised(part, self.scales) for part in parts]
        columns_per_scale = BLOCK if dim == 1 else 1
        scales = self.scales.split([size // columns_per_scale for size in sizes], dim)
        return [Quantised(*pair) for pair in zip(parts, scales)]

    def transpose(self) -> "Quantised":
        """Return [C, R], with R padded with zeros to a multiple of 16. Blocks of 1 x 128 cannot be transposed."""
        data, missing = self.data, -self.data.shape[-2] % 16
        if missing:
            data = F.pad(data.view(torch.uint8), (0, 0, 0, missing)).view(data.dtype)  # as bytes: F.pad has no FP8
        return Quantised(data.mT.contiguous(), self.scales if self.kind == "tensor" else self.scales.mT.contiguous())


def to_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x to the nearest number of the format. Numbers that are too large become its largest. NaN stays NaN."""
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale that maps `amax` to the largest number of the format, in fp32."""
    # The divisor is a tensor, because PyTorch on CUDA divides by a Python scalar by multiplying by its reciprocal. The
    # result may differ in the last bit from the quotient that CPUs and the kernel compute.
    return amax.float().clamp(min=SMALLEST) / amax.new_full((), torch.finfo(dtype).max, dtype=torch.float32)


# ---- tensorwise: one scale per tensor -------------------------------------------------------------------------------

def quantise_tensor(x: Tensor, dtype: torch.dtype) -> Quantised:
    """Quantise [R, C] with the scale of its own largest number."""
    return quantise_at_scale(x, scale_of(x.abs().amax(), dtype), dtype)


def quantise_at_scale(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Quantised:
    """Quantise [R, C] with a given scale, such as one on which ranks have agreed."""
    return Quantised(to_fp8(x.to(acc_dtype(x.dtype)) * scale.reciprocal(), dtype), scale)


# ---- blockwise: one scale per 1 x 128 numbers, or per tile ----------------------------------------------------------

def quantise_blocks(x: Tensor, dtype: torch.dtype, height: int = 1) -> Quantised:
    """Quantise [R, C] in blocks of height x 128. C is padded with zeros to a multiple of 128.

    height: 1, or BLOCK for tiles, which need an R that is a multiple of BLOCK.
    """
    padded = F.pad(x, (0, -x.shape[1] % BLOCK))
    blocks = rearrange(padded, "(r i) (c j) -> r i c j", i=height, j=BLOCK)
    scales = scale_of(blocks.abs().amax((1, 3)), dtype)
    data = to_fp8(blocks * scales.reciprocal()[:, None, :, None], dtype)
    return Quantised(rearrange(data, "r i c j -> (r i) (c j)").contiguous(), scales)


# ---- both copies of a matrix ----------------------------------------------------------------------------------------

class Layouts(NamedTuple):
    """The two copies of a matrix, one for each product that has the matrix as a factor. None: not asked for.

                      X [T, K]            dY [T, N]           W [N, K]
        rowwise       X, for Y            dY, for dX          W, for Y
        columnwise    X^T, for dW         dY^T, for dW        W^T, for dX
    """
    rowwise: Quantised | None
    columnwise: Quantised | None


def quantise(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None, rowwise: bool = True,
             columnwise: bool = True, tiles: bool = False) -> Layouts:
    """Make the copies of x [T, C] that are asked for. On a GPU one kernel makes both (fp8_kernels.py). With a given
    scale, or with tiles, x may also be e matrices, [e, T, C]. A copy is padded with zeros along its last dimension:

        scale   tiles   scales                                   rowwise [T, C]           columnwise [C, T]
        given   False   the given one                            not padded               T to a multiple of 16
        None    False   one per 1 x 128 block of each copy       C to a multiple of 128   T to a multiple of 128
        None    True    one per tile, the same in both copies    T and C must be multiples of 128

    In blocks, plain torch pads C. The kernel raises ValueError if C is no multiple of 128: core/rules.py refuses --fp8
    blockwise for such widths.
    """
    def by_kernel(_) -> tuple:  # try_kernel passes kernels.py, but this kernel is in a file of its own
        import fp8_kernels  # needs Triton, which a CPU does without
        return fp8_kernels.quantise(x, dtype, scale, SMALLEST, rowwise, columnwise, tiles)

    if copies := try_kernel(x, by_kernel):
        return Layouts(*(None if copy is None else Quantised(*copy) for copy in copies))
    if scale is None and not tiles:  # the copies have different scales: to make one from the other would round twice
        return Layouts(quantise_blocks(x, dtype) if rowwise else None,
                       quantise_blocks(x.t(), dtype) if columnwise else None)
    rows = x.flatten(0, -2)
    data, scales = quantise_blocks(rows, dtype, BLOCK) if tiles else quantise_at_scale(rows, scale, dtype)
    if x.ndim == 3:
        data, scales = data.view(x.shape), scales.unflatten(0, (len(x), -1)) if tiles else scales
    q = Quantised(data, scales)
    return Layouts(q if rowwise else None, q.transpose() if columnwise else None)


# ---- the product ----------------------------------------------------------------------------------------------------

def product(a: Quantised, b: Quantised, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Return A B^T, [R, C] x [N, C] -> [R, N], in `dtype`.

    fast: Let Hopper's tensor cores add up all C terms with about 14 bits. Errors reach 2% at C = 4096 (DeepSeek-V3,
        3.3.2). This needs one scale for each of a and b. Otherwise partial sums are added up in fp32; with blocks,
        every 128 elements.

    A GPU needs N and C to be multiples of 16, or of 128 with blocks. FP8 needs compute capability 8.9 or higher, and
    blocks need exactly 9.0 (Hopper). A CPU dequantises a and b and multiplies in fp32, or in fp64 if `dtype` is fp64.
    """
    if not a.data.is_cuda:
        return (dequantise(a, acc_dtype(dtype)) @ dequantise(b, acc_dtype(dtype)).t()).to(dtype)
    rows, a = len(a.data), pad_rows(a)
    return F.scaled_mm(a.data, b.data.t(), *for_scaled_mm(a), *for_scaled_mm(b), output_dtype=dtype,
                       use_fast_accum=fast)[:rows]


def dequantise(q: Quantised, dtype: torch.dtype) -> Tensor:
    """Return data times scales, [R, C]. Only CPUs need this, because a GPU multiplies FP8 itself."""
    # This looks numbers up in a table of all 256. Torch's own cast from E4M3 takes several times as long on one core.
    table = torch.arange(256, dtype=torch.uint8).view(q.data.dtype).to(dtype)
    numbers = table.index_select(0, q.data.reshape(-1).view(torch.uint8).int()).view(q.data.shape)
    if q.kind == "tensor":
        return numbers * q.scales
    height = 1 if q.kind == "blocks" else BLOCK
    blocks = rearrange(numbers, "(r i) (c j) -> r i c j", i=height, j=BLOCK)
    return (blocks * q.scales[:, None, :, None]).view(numbers.shape)


# cuBLAS reads scales in layouts of its own:
#
#     "tensor"    one number
#     "blocks"    [R, C/128], column-major. Each column of scales must be a multiple of 16 bytes long, so R
#                 must be a multiple of 4.
#     "tiles"     [R/128, C/128], row-major. The row stride is the padded C/128, a multiple of 4. F.scaled_mm
#                 takes the transpose of this memory, padding included.

ROW_MULTIPLE = 4  # 16 bytes of fp32 scales


def pad_tile_scales(q: Quantised) -> Quantised:
    """Copy scales of tiles to memory whose row stride is a multiple of 4. This is done once, when a weight is
    quantised, so that no product copies scales."""
    if q.kind == "tensor":
        return q
    *rows, columns = q.scales.shape
    padded = q.scales.new_zeros(*rows, columns + -columns % 4)
    padded[..., :columns] = q.scales
    return q._replace(scales=padded[..., :columns])


def for_scaled_mm(q: Quantised) -> tuple[Tensor, F.ScalingType]:
    """Return the scales in cuBLAS's layout, and torch's name for their kind. Scales of tiles must come from
    pad_tile_scales."""
    if q.kind == "tensor":
        return q.scales, F.ScalingType.TensorWise
    if q.kind == "blocks":  # as_strided, because t() gives a matrix of one row other strides
        return q.scales.t().contiguous().as_strided(q.scales.shape, (1, len(q.scales))), F.ScalingType.BlockWise1x128
    rows, padded = len(q.scales), q.scales.stride(0)
    assert padded % 4 == 0 and q.scales.stride(1) == 1, f"scales of tiles with strides {q.scales.stride()}"
    return q.scales.as_strided((rows, padded), (padded, 1)).t(), F.ScalingType.BlockWise128x128


def pad_rows(q: Quantised) -> Quantised:
    """Pad the rows of a matrix with blocks to a multiple of ROW_MULTIPLE.

    This copies the matrix, so experts' rows are padded before they are quantised. Elsewhere the number of tokens is
    rarely odd enough to need padding.
    """
    missing = -len(q.data) % ROW_MULTIPLE
    if not missing or q.kind != "blocks":
        return q
    data = F.pad(q.data.view(torch.uint8), (0, 0, 0, missing)).view(q.data.dtype)  # as bytes: F.pad has no FP8
    return Quantised(data, F.pad(q.scales, (0, 0, 0, missing), value=1.0))


# ---- a linear layer -------------------------------------------------------------------------------------------------
# tp.Column and tp.Row (the autograd Functions of tp.py) call these methods of an Fp8, in this order. tp.Matmul has the
# same methods, in 16 bits.
#
#     forward     mm = fp8.begin()
#                 Y = mm.forward(X, weights)        all-reduces amax of X; quantises weights, unless they are cached
#     backward    dY = mm.prepare_grad(dY)          all-reduces amax of dY; makes both copies of dY
#                 dX = mm.dgrad(dY, weights)        takes weights from the cache, or quantises them again (ZeRO-3)
#                 mm.wgrad(dW, dY, X)               quantises X again, with the scale from forward
#
# With blocks nothing is all-reduced, because each block has a scale of its own.

class Quantiser:
    """Quantises activations, their gradients and weights by one recipe, and caches FP8 weights.

    dtype: the dtype of the products.
    amax_groups, weight_amax_groups: the groups whose ranks have shards of one activation, or of one weight, and must
        agree on one scale.
    cached: whether FP8 weights are kept until the weights change. Otherwise every use quantises them again. train.py
        sets it to False at ZeRO level 3, where the cache would keep as many bytes as sharding frees.
    """

    def __init__(self, recipe: Fp8Recipe, dtype: torch.dtype, amax_groups: tuple[Group, ...] = (),
                 weight_amax_groups: tuple[Group, ...] = (), cached: bool = True):
        self.recipe, self.dtype, self.cached = recipe, dtype, cached
        self.grad_format = FORMATS[recipe.grad]
        self.amax_groups, self.weight_amax_groups = amax_groups, weight_amax_groups
        self.cache: dict[Params, tuple[list, Layouts]] = {}  # weights -> (their versions, their FP8 copies)
        self.x_scale = self.dy_scale = None  # scales on which ranks have agreed: see begin

    def begin(self) -> "Quantiser":
        """Return a copy for one forward of a layer and its backward. The copy shares the cache, and keeps the scales of
        X and dY.

        X and dY may be gathered and quantised a second time: X for wgrad, and dY for a wgrad that is deferred. A second
        all-reduce of amax would wait behind the gather (of X or dY) that is meant to overlap with the matmul. If
        recomputation did not run this product's forward, x_scale is still None, and ranks agree on it in wgrad.
        """
        return copy(self)

    def agreed_scale(self, x: Tensor, dtype: torch.dtype, groups: tuple[Group, ...]) -> Tensor | None:
        """Return one scale for a tensor that is sharded over these groups, or None if each block has its own. This
        method all-reduces amax, so every rank must call it."""
        if self.recipe.blocks:
            return None
        # The infinity norm is amax, and needs no temporary tensor.
        amax = torch.linalg.vector_norm(x, torch.inf).float() if x.numel() else x.new_zeros((), dtype=torch.float32)
        for group in groups:
            all_reduce(amax, group, MAX)
        return scale_of(amax, dtype)

    def quantise_tokens(self, x: Tensor, dtype: torch.dtype = E4M3, scale: Tensor | None = None,
                        **which: bool) -> tuple[Layouts, Tensor | None]:
        """Return the copies of X or dY, and their scale, which is None with blocks.

        scale: the scale on which ranks have already agreed, if they have. which: `rowwise` and `columnwise` of
            `quantise`.
        """
        if scale is None:
            scale = self.agreed_scale(x, dtype, self.amax_groups)
        return quantise(x, dtype, scale, **which), scale

    def quantise_weight(self, weights: Params) -> Layouts:
        """Return both copies of the weights.

        weights: weights that share an input, such as wq, wk and wv, which are quantised as one matrix; or one parameter
            [e, R, C], the weights of e experts.
        """
        # Two counters show that a weight has changed. zero.py writes into its flat buffer, which autograd does not
        # see, and counts `generation` up. In-place operations on the parameter itself count `_version` up.
        state = [(weight.generation, weight._version) for weight in weights]
        if weights in self.cache and self.cache[weights][0] == state:
            return self.cache[weights][1]
        w = stacked_weight(weights)
        scale = self.agreed_scale(w, E4M3, self.weight_amax_groups)
        copies = quantise(w, E4M3, scale, tiles=self.recipe.blocks)
        copies = Layouts(*map(pad_tile_scales, copies))
        if self.cached:
            self.cache[weights] = state, copies
        return copies


class Fp8(Quantiser):
    """The three products of a linear layer, as in linear_in_fp8, for tp.Column and tp.Row."""

    def forward(self, x: Tensor, weights: Params) -> Tensor:
        """Return Y = X W^T. As in Transformer Engine, only this product uses fast accumulation."""
        (rowwise, _), self.x_scale = self.quantise_tokens(x, columnwise=False)
        return product(rowwise, self.quantise_weight(weights).rowwise, self.dtype, fast=not self.recipe.blocks)

    def prepare_grad(self, dy: Tensor) -> Layouts:
        """Return both copies of dY, for dgrad and for wgrad."""
        copies, self.dy_scale = self.quantise_tokens(dy, self.grad_format, self.dy_scale)
        return copies

    def dgrad(self, dy: Layouts, weights: Params) -> Tensor:
        """Return dX = dY W."""
        return product(dy.rowwise, self.quantise_weight(weights).columnwise, self.dtype)

    def wgrad(self, out: Tensor, dy: Layouts, x: Tensor) -> None:
        """out += dY^T X. F.scaled_mm cannot accumulate into `out`, so an fp32 `out` costs 16 bytes per element: the
        product is written (4) and read (4), and `out` is read and written (8)."""
        (_, columnwise), _ = self.quantise_tokens(x, scale=self.x_scale, rowwise=False)
        out.add_(product(dy.columnwise, columnwise, out.dtype))


# ---- experts --------------------------------------------------------------------------------------------------------

class Fp8Experts(Quantiser):
    """The three products of ep.GroupedLinear, with the methods of ep.GroupedMatmul: one weight matrix per expert.

    The rows of X and dY are sorted by expert, and `route.rows_per_expert` says how many rows each expert has
    (ep.Route). Before they are quantised, each expert's rows are padded with zeros, so that every expert's part is a
    matrix that cuBLAS accepts. The two copies need different padding, so they are made by two calls of `quantise`:

                      with blocks                                                      with one scale
        rowwise       rows to a multiple of ROW_MULTIPLE                               none
        columnwise    rows to whole blocks, so that no block has rows of two experts   rows to a multiple of 16

    weight: [e, out, in].
    """

    def forward(self, x: Tensor, weight: nn.Parameter, route) -> Tensor:
        """Return Y [R, out]: each expert's rows of X [R, in] times the expert's W^T."""
        rowwise, self.x_scale = self.rowwise_by_expert(x, E4M3, route)
        return self.multiply(rowwise, self.quantise_weight((weight,)).rowwise, route)

    def prepare_grad(self, dy: Tensor, route) -> tuple[list[Quantised], list[Quantised]]:
        """Return each expert's part of the rowwise, and of the columnwise copy of dY."""
        rowwise, scale = self.rowwise_by_expert(dy, self.grad_format, route)
        return rowwise, self.columnwise_by_expert(dy, self.grad_format, scale, route)

    def dgrad(self, dy: list[Quantised], weight: nn.Parameter, route) -> Tensor:
        """Return dX [R, in] from the rowwise parts of dY."""
        return self.multiply(dy, self.quantise_weight((weight,)).columnwise, route)

    def wgrad(self, out: Tensor, dy: list[Quantised], x: Tensor, route) -> None:
        """out [e, out, in] += dY^T X of each expert's rows, from the columnwise parts of dY."""
        for matrix, dy_part, x_part in zip(out, dy, self.columnwise_by_expert(x, E4M3, self.x_scale, route)):
            if dy_part.data.numel():
                matrix.add_(product(dy_part, x_part, out.dtype))

    def rowwise_by_expert(self, x: Tensor, dtype: torch.dtype, route) -> tuple[list[Quantised], Tensor | None]:
        """Return each expert's part of the rowwise copy, and the scale that all parts share."""
        padded, rows = pad_experts(x, route.rows_per_expert, ROW_MULTIPLE if self.recipe.blocks else 1)
        (rowwise, _), scale = self.quantise_tokens(padded, dtype, columnwise=False)
        return rowwise.split(rows, dim=0), scale

    def columnwise_by_expert(self, x: Tensor, dtype: torch.dtype, scale: Tensor | None, route) -> list[Quantised]:
        """Return each expert's part of the columnwise copy."""
        unit = BLOCK if self.recipe.blocks else 16  # the summed dimension must be a multiple of this
        padded, rows = pad_experts(x, route.rows_per_expert, unit)
        (_, columnwise), _ = self.quantise_tokens(padded, dtype, scale, rowwise=False)
        return columnwise.split(rows, dim=1)

    def multiply(self, parts: list[Quantised], matrices: Quantised, route) -> Tensor:
        """Multiply each expert's part, [rows, in] with padding, by the transpose of its matrix -> [R, out]."""
        products = []
        for expert, (part, rows) in enumerate(zip(parts, route.rows_per_expert)):
            if rows:
                products.append(product(part, matrices.select(expert), self.dtype)[:rows])
        if not products:
            return matrices.data.new_empty(0, matrices.data.shape[1], dtype=self.dtype)
        return torch.cat(products)


def pad_experts(x: Tensor, rows: list[int], unit: int) -> tuple[Tensor, list[int]]:
    """Pad each expert's rows of x with zeros to a multiple of `unit`. Return the result, and each expert's new number
    of rows."""
    padded = [count + -count % unit for count in rows]
    if padded == rows:
        return x, rows
    zeros = x.new_zeros(unit, x.shape[1])
    pieces = []
    for part, count in zip(x.split(rows), padded):
        pieces += [part, zeros[:count - len(part)]]
    return torch.cat(pieces), padded


# ---- demo: python fp8.py --------------------------------------------------------------------------------------------

def relative_error(got: Tensor, exact: Tensor) -> float:
    """Return the relative error of a row, in the Euclidean norm, averaged over rows."""
    return ((got - exact).norm(dim=1) / exact.norm(dim=1)).mean().item()


def demo() -> None:
    """Compare the three products with fp32's, for ordinary gradients, and if one token's gradient is an outlier."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(512, 384, generator=generator), torch.randn(256, 384, generator=generator) / 20
    dy = torch.randn(512, 256, generator=generator) * torch.exp2(-12 * torch.rand(512, 1, generator=generator))
    recipes = {**FP8_RECIPES, "E4M3 for all, one scale": Fp8Recipe(grad="e4m3", blocks=False)}
    print(f"{'Relative error, mean over rows':50s}{'X W^T':>9s}{'dY W':>9s}{'dY^T X':>9s}{'dY = 0':>10s}")
    for outlier in (1, 1e6):
        dy[0] *= outlier
        lost = {}
        for name, recipe in recipes.items():
            exact = x @ w.t(), dy @ w, dy.t() @ x
            errors = [relative_error(*pair) for pair in zip(linear_in_fp8(x, w, dy, recipe), exact)]
            grad_format = FORMATS[recipe.grad]
            dy_q = quantise_blocks(dy, grad_format) if recipe.blocks else quantise_tensor(dy, grad_format)
            lost[name] = (dequantise(dy_q, dy.dtype) == 0).float().mean().item()
            columns = "".join(f"{error:9.2%}" for error in errors)
            print(f"one token {outlier:9,.0f} x   {name:26s}{columns}{lost[name]:10.2%}")
    print(f"\nIf all share one scale, an outlier turns {lost['E4M3 for all, one scale']:.0%} of dY into 0 in E4M3. "
          f"Both recipes avoid this:\ntensorwise by the wider range of E5M2, blockwise by a scale for every block.")


if __name__ == "__main__":
    run_demo(lambda group: demo())
