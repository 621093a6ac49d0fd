"""FP8: linear layers multiply 8-bit floats, in forward and in both matmuls of backward.

Saves: up to half the time of a matmul. (What is saved for backward, and gathered, stays in 16 bits.)
Costs: quantising reads weights and dY once (experts' dY twice), X twice (in forward and for dW), and writes two FP8
       copies of each. One scale per tensor needs one more read, for the largest element, on which ranks agree. Both
       copies of a weight, 2 bytes per parameter, are cached until it changes; at ZeRO level 3 every use makes both.
Stops helping when: matrices are so small that quantising costs more than the faster matmul saves; or the loss rises.

    format   sign, exponent, mantissa   largest   smallest   normal from   rounding error   range             used for
    E4M3     1 4 3                      448       2^-9       2^-6          up to 1/16       18 powers of 2    the rest
    E5M2     1 5 2                      57344     2^-16      2^-14         up to 1/8        32 powers of 2    some dY

What is stored is x / scale, scale = amax / (largest number of the format), TE's scale_inv; amax is the largest |x| of

    tensorwise   the tensor (wq, wk, wv are one, and all experts): an outlier 1000 times as large as the rest costs
                 the rest 10 of the 18 powers of two; small gradients would be 0, hence E5M2 for dY. Ranks with shards
                 of a tensor agree on its amax, one number per axis, so results do not depend on how it is sharded.
    blockwise    1 x 128 elements along the dimension that the product sums over; of a weight, a tile of 128 x 128, so
                 that the same numbers serve W and W^T. An outlier affects its own block only: E4M3 for dY, too.

                        X W^T = Y                  dY W = dX                 dY^T X = dW
    sums over           K                          N                         T
    blocks of X, dY     ▬▬▬▬▬▬▬  1 x 128           ▬▬▬▬▬▬▬  1 x 128          ▮  128 x 1 of both
    blocks of W         ■ 128 x 128                ■ the same                -

So X and dY are quantised twice: rowwise [T, C], to be multiplied by weights, and columnwise [C, T], to be summed over
tokens: transposed, because Hopper needs the dimension of the sum to be contiguous.

Micikevicius et al. 2022 (the formats); DeepSeek-AI 2024 (V3, section 3.3: blocks); NVIDIA Transformer Engine (rowwise,
columnwise). Shapes: T tokens, N rows and K columns of a weight: X [T, K], dY [T, N]. R x C: any matrix. e experts.
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
ROWS = 4  # cuBLAS reads the scales of 1 x 128 blocks by rows of 16 bytes: so many rows of a matrix, or a multiple
SMALLEST = 2.0 ** -100  # an amax is taken to be at least this, so that scales and their reciprocals are normal numbers


# ---- formats and scaling --------------------------------------------------------------------------------------------

class Quantised(NamedTuple):
    """A matrix [R, C] in FP8, or e of them: data times scales. C is the dimension that a product sums over."""
    data: Tensor  # [R, C] or [e, R, C], in FP8
    scales: Tensor  # fp32: [] of the tensor, [R, C/128] of 1 x 128 blocks, [R/128, C/128] of tiles, or e of these

    def select(self, index: int) -> "Quantised":
        """One of e matrices."""
        return Quantised(self.data[index], self.scales[index] if self.scales.ndim else self.scales)

    def split(self, sizes: list[int], dim: int) -> list["Quantised"]:
        """A matrix without tiles, in parts of so many rows (dim 0), or of so many columns, in whole blocks (dim 1)."""
        parts, unit = self.data.split(sizes, dim), BLOCK if dim == 1 else 1
        if self.scales.ndim == 0:
            return [Quantised(part, self.scales) for part in parts]
        return [*map(Quantised, parts, self.scales.split([size // unit for size in sizes], dim))]

    def transpose(self) -> "Quantised":
        """[C, R], R padded with zeros to a multiple of 16. Not for 1 x 128 blocks, which do not survive a transpose."""
        data, missing = self.data, -self.data.shape[-2] % 16
        if missing:  # as bytes, because F.pad has no FP8
            data = F.pad(data.view(torch.uint8), (0, 0, 0, missing)).view(data.dtype)
        return Quantised(data.mT.contiguous(), self.scales.mT.contiguous() if self.scales.ndim else self.scales)


class Layouts(NamedTuple):
    """Copies of X or dY [T, K], those that were asked for; of a weight W both."""
    rowwise: Quantised | None  # [T, K], or W
    columnwise: Quantised | None  # [K, T], or W^T


def to_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to the nearest number of the format, what is too large to its largest, not to inf; NaN stays NaN."""
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale that maps `amax` to the largest number of the format, in fp32."""
    # By a tensor of this device: a GPU divides by a number of the host by multiplying with its reciprocal, which may
    # differ in the last bit from the quotient that CPUs and the kernel compute.
    return amax.float().clamp(min=SMALLEST) / amax.new_full((), torch.finfo(dtype).max, dtype=torch.float32)


def quantise_at_scale(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Quantised:
    """[R, C], with one scale."""
    return Quantised(to_fp8(x.to(acc_dtype(x.dtype)) * scale.reciprocal(), dtype), scale)


def quantise_blocks(x: Tensor, dtype: torch.dtype, height: int = 1) -> Quantised:
    """[R, C] in blocks of height x 128: 1 x 128, or 128 x 128 tiles. C is padded with zeros."""
    blocks = rearrange(F.pad(x, (0, -x.shape[1] % BLOCK)), "(r i) (c j) -> r i c j", i=height, j=BLOCK)
    scales = scale_of(blocks.abs().amax((1, 3)), dtype)
    data = to_fp8(blocks * scales.reciprocal()[:, None, :, None], dtype)
    return Quantised(rearrange(data, "r i c j -> (r i) (c j)").contiguous(), scales)


def quantise(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None, rowwise: bool = True,
             columnwise: bool = True, tiles: bool = False) -> Layouts:
    """The copies of x [T, C] that are asked for, padded with zeros. On a GPU one kernel makes both (fp8_kernels.py).

        scale   tiles   scales                                     rowwise [T, C]           columnwise [C, T]
        given   False   that one                                   as it is                 T to a multiple of 16
        None    False   of the 1 x 128 blocks of each copy         C to a multiple of 128   T to a multiple of 128
        None    True    of 128 x 128 blocks, the same in both      T and C must be multiples of 128
    """
    def by_kernel(_) -> tuple:
        import fp8_kernels  # needs Triton, which a CPU does without
        return fp8_kernels.quantise(x, dtype, scale, SMALLEST, rowwise, columnwise, tiles)

    if copies := try_kernel(x, by_kernel):
        return Layouts(*(None if copy is None else Quantised(*copy) for copy in copies))
    if scale is None and not tiles:
        return Layouts(quantise_blocks(x, dtype) if rowwise else None,
                       quantise_blocks(x.t(), dtype) if columnwise else None)
    q = quantise_blocks(x, dtype, BLOCK) if tiles else quantise_at_scale(x, scale, dtype)
    return Layouts(q if rowwise else None, q.transpose() if columnwise else None)


def dequantise(q: Quantised, dtype: torch.dtype) -> Tensor:
    """The numbers [R, C] that one quantised matrix stands for. For CPUs: a GPU multiplies FP8 itself."""
    # A table of all 256 numbers: torch's own cast from E4M3 takes several times as long on one core.
    table = torch.arange(256, dtype=torch.uint8).view(q.data.dtype).to(dtype)
    numbers = table.index_select(0, q.data.reshape(-1).view(torch.uint8).int()).view(q.data.shape)
    if q.scales.ndim == 0:
        return numbers * q.scales
    height = 1 if len(q.scales) == len(q.data) else BLOCK  # of blocks, or of tiles
    blocks = rearrange(numbers, "(r i) (c j) -> r i c j", i=height, j=BLOCK)
    return (blocks * q.scales[:, None, :, None]).view(numbers.shape)


# ---- the product ----------------------------------------------------------------------------------------------------

def product(a: Quantised, b: Quantised, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """A B^T, [R, C] x [N, C] -> [R, N], in `dtype`. fast: let Hopper's tensor cores add along all of C, with about 14
    bits (errors reach 2% at C = 4096: DeepSeek-V3, 3.3.2); only where a and b have one scale each. Otherwise partial
    sums are added up in fp32, with blocks every 128 elements.

    A GPU needs N and C to be multiples of 16, or of 128 with blocks; FP8 needs compute capability 8.9, blocks exactly
    9.0 (Hopper). A CPU multiplies what a and b stand for in fp32, or in fp64 for a result in fp64.
    """
    if not a.data.is_cuda:
        return (dequantise(a, acc_dtype(dtype)) @ dequantise(b, acc_dtype(dtype)).t()).to(dtype)
    rows, a = len(a.data), pad_rows(a)
    return F.scaled_mm(a.data, b.data.t(), *for_scaled_mm(a), *for_scaled_mm(b), output_dtype=dtype,
                       use_fast_accum=fast)[:rows]


def pad_rows(q: Quantised) -> Quantised:
    """q with its rows padded with zeros to a multiple of ROWS, if it has 1 x 128 blocks. This copies q, so experts'
    rows are padded before they are quantised; other batches rarely have such a number of tokens."""
    missing = -len(q.data) % ROWS
    if not missing or q.scales.ndim == 0 or len(q.scales) != len(q.data):
        return q
    data = F.pad(q.data.view(torch.uint8), (0, 0, 0, missing)).view(q.data.dtype)  # as bytes: F.pad has no FP8
    return Quantised(data, F.pad(q.scales, (0, 0, 0, missing), value=1.0))


def pad_tile_scales(q: Quantised) -> Quantised:
    """q, in memory as cuBLAS reads scales of tiles: rows padded to a multiple of 4. Weights are padded when they are
    quantised, so that no product copies their scales."""
    if q.scales.ndim == 0:
        return q
    *rows, columns = q.scales.shape
    padded = q.scales.new_zeros(*rows, columns + -columns % 4)
    padded[..., :columns] = q.scales
    return q._replace(scales=padded[..., :columns])


def for_scaled_mm(q: Quantised) -> tuple[Tensor, F.ScalingType]:
    """(scales with the strides that cuBLAS reads, their kind). Those of tiles: see pad_tile_scales."""
    if q.scales.ndim == 0:
        return q.scales, F.ScalingType.TensorWise
    if len(q.scales) == len(q.data):  # [R, C/128], contiguous along R; as_strided, as t() gives one row other strides
        return q.scales.t().contiguous().as_strided(q.scales.shape, (1, len(q.scales))), F.ScalingType.BlockWise1x128
    rows, padded = len(q.scales), q.scales.stride(0)
    assert padded % 4 == 0 and q.scales.stride(1) == 1, f"scales of tiles with strides {q.scales.stride()}"
    # [C/128 padded to 4, R/128], contiguous along C
    return q.scales.as_strided((rows, padded), (padded, 1)).t(), F.ScalingType.BlockWise128x128


# ---- operands -------------------------------------------------------------------------------------------------------

class Quantiser:
    """Makes FP8 copies of activations, their gradients and weights by one recipe, and caches those of weights.

    dtype: of the products. amax_groups, weight_amax_groups: the groups whose ranks have shards of one activation, or of
    one weight, and must agree on one scale. cached: FP8 weights are reused until the weights change; otherwise they are
    quantised for every use (at ZeRO level 3: the cache would keep as many bytes as it frees).
    """

    def __init__(self, recipe: Fp8Recipe, dtype: torch.dtype, amax_groups: tuple[Group, ...] = (),
                 weight_amax_groups: tuple[Group, ...] = (), cached: bool = True):
        self.recipe, self.dtype, self.cached = recipe, dtype, cached
        self.grad_format = FORMATS[recipe.grad]
        self.amax_groups, self.weight_amax_groups = amax_groups, weight_amax_groups
        self.cache: dict[Params, tuple[list, Layouts]] = {}
        self.x_scale = self.dy_scale = None

    def begin(self) -> "Quantiser":
        """A copy for one forward of a layer and its one backward, with the same cache. It keeps the scales of X and dY
        on which ranks have agreed (tensorwise), as both may be gathered and quantised again, X for wgrad, dY for a
        deferred one: another all-reduce there would wait for the exchange that the matmul is to hide. Where
        recomputation has skipped the forward, ranks agree on X's in wgrad."""
        return copy(self)

    def agreed_scale(self, x: Tensor, dtype: torch.dtype, groups: tuple[Group, ...]) -> Tensor | None:
        """One scale for a tensor sharded over these groups: an all-reduce of amax, which every rank must call. None if
        each block has its own."""
        if self.recipe.blocks:
            return None
        amax = torch.linalg.vector_norm(x, torch.inf).float() if x.numel() else x.new_zeros((), dtype=torch.float32)
        for group in groups:
            all_reduce(amax, group, MAX)
        return scale_of(amax, dtype)

    def quantise_tokens(self, x: Tensor, dtype: torch.dtype = E4M3, scale: Tensor | None = None,
                        **which: bool) -> tuple[Layouts, Tensor | None]:
        """(copies of X or dY, their scale). scale: if it is known already. which: rowwise, columnwise of `quantise`."""
        if scale is None:
            scale = self.agreed_scale(x, dtype, self.amax_groups)
        return quantise(x, dtype, scale, **which), scale

    def quantise_weight(self, weights: Params) -> Layouts:
        """Copies of weights that share an input (wq, wk, wv), as one matrix; or of one parameter [e, R, C]."""
        # ZeRO writes into the flat buffer and then counts `generation` up; a parameter's own edits show in _version.
        state = [(weight.generation, weight._version) for weight in weights]
        if weights in self.cache and self.cache[weights][0] == state:
            return self.cache[weights][1]
        w = stacked_weight(weights)
        scale = self.agreed_scale(w, E4M3, self.weight_amax_groups)
        copies = quantise(w.flatten(0, -2), E4M3, scale, columnwise=w.ndim == 2,
                          tiles=self.recipe.blocks)
        if w.ndim == 3:  # all experts' rows were quantised at once, but each expert's matrix is transposed
            data, scales = copies.rowwise
            experts = Quantised(data.view(w.shape), scales.unflatten(0, (len(w), -1)) if scales.ndim else scales)
            copies = Layouts(experts, experts.transpose())
        copies = Layouts(*map(pad_tile_scales, copies))
        if self.cached:
            self.cache[weights] = state, copies
        return copies


# ---- layers ---------------------------------------------------------------------------------------------------------

class Fp8(Quantiser):
    """The three products of a linear layer, as tp.Matmul has them."""

    def forward(self, x: Tensor, weights: Params) -> Tensor:
        """Y = X W^T: the only product with fast accumulation, as in TE."""
        (rowwise, _), self.x_scale = self.quantise_tokens(x, columnwise=False)
        return product(rowwise, self.quantise_weight(weights).rowwise, self.dtype, fast=not self.recipe.blocks)

    def prepare_grad(self, dy: Tensor) -> Layouts:
        """Copies of dY, for dgrad and for wgrad."""
        copies, self.dy_scale = self.quantise_tokens(dy, self.grad_format, self.dy_scale)
        return copies

    def dgrad(self, dy: Layouts, weights: Params) -> Tensor:
        """dX = dY W."""
        return product(dy.rowwise, self.quantise_weight(weights).columnwise, self.dtype)

    def wgrad(self, out: Tensor, dy: Layouts, x: Tensor) -> None:
        """out += dY^T X. This moves 16 bytes per element of out, as F.scaled_mm cannot add to its result."""
        (_, columnwise), _ = self.quantise_tokens(x, scale=self.x_scale, rowwise=False)
        out.add_(product(dy.columnwise, columnwise, out.dtype))


class Fp8Experts(Quantiser):
    """The three products of ep.GroupedLinear, as ep.GroupedMatmul has them: a matrix per expert, rows sorted by expert.
    The two copies are made apart, of rows that are padded for each expert: for the rowwise one to a multiple of ROWS if
    there are blocks, for the columnwise one to whole blocks, so that none has two experts' tokens. route: ep.Route."""

    def forward(self, x: Tensor, weight: nn.Parameter, route) -> Tensor:
        rowwise, self.x_scale = self.rowwise_by_expert(x, E4M3, route)
        return self.multiply(rowwise, self.quantise_weight((weight,)).rowwise, route)

    def prepare_grad(self, dy: Tensor, route) -> tuple[list[Quantised], list[Quantised]]:
        rowwise, scale = self.rowwise_by_expert(dy, self.grad_format, route)
        return rowwise, self.columnwise_by_expert(dy, self.grad_format, scale, route)

    def dgrad(self, dy: list[Quantised], weight: nn.Parameter, route) -> Tensor:
        return self.multiply(dy, self.quantise_weight((weight,)).columnwise, route)

    def wgrad(self, out: Tensor, dy: list[Quantised], x: Tensor, route) -> None:
        """out [e, out, in] += dY^T X of each expert's rows."""
        for matrix, dy_part, x_part in zip(out, dy, self.columnwise_by_expert(x, E4M3, self.x_scale, route)):
            if dy_part.data.numel():
                matrix.add_(product(dy_part, x_part, out.dtype))

    def rowwise_by_expert(self, x: Tensor, dtype: torch.dtype, route) -> tuple[list[Quantised], Tensor | None]:
        """(each expert's part of the rowwise copy, the scale of all)."""
        padded, rows = pad_experts(x, route.rows_per_expert, ROWS if self.recipe.blocks else 1)
        (rowwise, _), scale = self.quantise_tokens(padded, dtype, columnwise=False)
        return rowwise.split(rows, dim=0), scale

    def columnwise_by_expert(self, x: Tensor, dtype: torch.dtype, scale: Tensor | None, route) -> list[Quantised]:
        """Each expert's part of the columnwise copy."""
        unit = BLOCK if self.recipe.blocks else 16  # what the dimension of a sum must be a multiple of
        padded, rows = pad_experts(x, route.rows_per_expert, unit)
        (_, columnwise), _ = self.quantise_tokens(padded, dtype, scale, rowwise=False)
        return columnwise.split(rows, dim=1)

    def multiply(self, parts: list[Quantised], matrices: Quantised, route) -> Tensor:
        """[R, in], in a part per expert with padding, times the transposes of [e, out, in] -> [R, out]."""
        products = [product(part, matrices.select(expert), self.dtype)[:rows]
                    for expert, (part, rows) in enumerate(zip(parts, route.rows_per_expert)) if rows]
        if not products:
            return matrices.data.new_empty(0, matrices.data.shape[1], dtype=self.dtype)
        return torch.cat(products)


def pad_experts(x: Tensor, rows: list[int], unit: int) -> tuple[Tensor, list[int]]:
    """(x, in which each expert's rows are padded with zeros to a multiple of `unit`; the number of rows of each)."""
    padded = [count + -count % unit for count in rows]
    if padded == rows:
        return x, rows
    zeros, pieces = x.new_zeros(unit, x.shape[1]), []
    for part, count in zip(x.split(rows), padded):
        pieces += [part, zeros[:count - len(part)]]
    return torch.cat(pieces), padded


# ---- demo: python fp8.py --------------------------------------------------------------------------------------------

def demo() -> None:
    """Gradients with an outlier token: the errors of the three products, and what part of dY is rounded to 0."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(512, 384, generator=generator), nn.Parameter(torch.randn(256, 384, generator=generator) / 20)
    w.generation = 0
    dy = torch.randn(512, 256, generator=generator) * torch.exp2(-12 * torch.rand(512, 1, generator=generator))
    print(f"{'Relative error, mean over rows':50s}{'X W^T':>9s}{'dY W':>9s}{'dY^T X':>9s}{'dY = 0':>10s}")
    for outlier in (1, 1e6):
        dy[0] *= outlier
        for name, recipe in {**FP8_RECIPES, "E4M3 for all, one scale": Fp8Recipe("e4m3", False)}.items():
            mm, dw = Fp8(recipe, torch.float32), torch.zeros(w.shape)
            quantised, y = mm.prepare_grad(dy), mm.forward(x, (w,))
            mm.wgrad(dw, quantised, x)
            pairs = (y, x @ w.t()), (mm.dgrad(quantised, (w,)), dy @ w), (dw, dy.t() @ x)
            errors = "".join(f"{((a - b).norm(dim=1) / b.norm(dim=1)).mean():9.2%}" for a, b in pairs)
            lost = (dequantise(quantised.rowwise, x.dtype) == 0).float().mean().item()
            print(f"one token {outlier:9,.0f} x   {name:26s}{errors}{lost:10.2%}")


if __name__ == "__main__":
    run_demo(lambda group: demo())
