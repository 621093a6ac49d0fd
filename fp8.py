"""FP8: linear layers multiply numbers of 8 bits, in forward and in both halves of backward.

Saves: up to half the time of every matmul, half the bytes of what it saves for backward and of what is gathered for it.
Costs: each operand is read once more, to find its scales and to write it in 8 bits, twice: as it is and transposed.
       Weights get two FP8 copies beside the 16-bit ones, 2 bytes a parameter, which live for an optimizer step.
Stops helping when: matrices are so small that quantising costs more than the faster matmul saves; or the loss says so.

Two formats. A number has a sign, an exponent and a mantissa; 3 bits of mantissa are 3 bits behind the leading one.

             bits      largest    smallest normal    smallest     a rounding errs by at most
    E4M3     1 4 3     448        2^-6               2^-9         1/16 of the number     18 powers of two
    E5M2     1 5 2     57344      2^-14              2^-16        1/8                    32

Weights and activations are within a few powers of two of each other and need precision: E4M3. Gradients spread over
many more; with one scale for all of them, small ones would fall below E4M3's 2^-9: hence E5M2 (Micikevicius et al.
2022).

Scales. What is stored is x / scale, with scale = (largest |x|) / (largest number of the format), computed from this
very tensor (current scaling), and clamped before the cast: what is too large would become inf, or NaN in E4M3, which
has no inf. Scales guessed from earlier steps (delayed scaling) save one reading and clip whenever a tensor grows.

    tensorwise   one scale a tensor. An outlier of 1000 times the rest pushes the rest down by 10 powers of two, of the
                 18 there are. Ranks that have shards of one tensor must agree on its largest |x|: a small all-reduce.
    blockwise    one scale for 1 x 128 elements along the dimension that a product sums over; for 128 x 128 of a weight,
                 so that the same numbers serve W and its transpose. An outlier spoils its own block; E4M3 is enough for
                 gradients, too. Ranks need not agree, and every grid gets the same numbers, if it splits no block.
                 (Experts' columns are blocks of the rows that they received, from whichever ranks.)

                        X W^T = Y                  dY W = dX                 dY^T X = dW
    sums over           H                          the rows of W             tokens
    blocks of X, dY     ▬▬▬▬▬▬▬  1 x 128           ▬▬▬▬▬▬▬  1 x 128          ▮  128 x 1 of both
    blocks of W         ■ 128 x 128                ■ the same                                    (▮ = 1 x 128 of dY^T)

So X and dY are needed in two layouts: `rows`, to multiply weights, and `columns`, to be summed over tokens (stored
transposed: Hopper multiplies FP8 only if what is summed over is adjacent). Both are quantised from x in one reading;
making one from the other would round twice.

Accumulation. Hopper's tensor cores add FP8 products with about 14 bits: over K = 4096 errors reach 2% (DeepSeek-V3,
3.3.2). Blockwise sums 128 products there and adds that, times both scales, to an fp32 sum. Tensorwise lets forward
accumulate fast, and asks backward, whose errors go into weights, for the precise way.

What stays in 16 bits or more: embedding, head, norms, router, attention, master weights, main gradients. They have few
FLOPs, or their errors have large effects. Many recipes spare the first and the last block, too (--no-fp8-ends).

Where recipes went wrong. Without scales most of a gradient is 0 in E4M3, and a small Llama stops learning (RESULTS.md).
(With one current scale it learns in E4M3 as well as in E5M2, whose roundings err twice as much: small runs do not show
what E5M2 is for.) Delayed tensorwise scaling lost a 7B Llama after 200 billion tokens, as SwiGLU grew outliers (Fishman
et al. 2024). DeepSeek-V3's 16B test diverged with 128 x 128 blocks of dY: outliers sit in tokens, so blocks of several
tokens mix them. Scales that are powers of two (--fp8-pow2) multiply without rounding and cost up to one power of range.
FP8 master weights lose updates smaller than 1/16 of a weight. Weight gradients that are summed in FP8 need a scale that
follows them (FP8-LM). Quantised weights of norms made MX formats unstable.

With sequence parallelism a rank has T/t tokens of X. Rows are gathered in FP8, half the bytes; columns, too, where T/t
are whole blocks; otherwise x is gathered as it is, so that blocks lie the same on any number of ranks.

Bytes a parameter at ZeRO level 0; zero.py has published recipes beside them:

    --dtype bf16 --fp8 ...                    2 + 2 fp8     4      4      4 + 4     20
    --dtype bf16 --fp8 ... --moments bf16     2 + 2 fp8     4      4      2 + 2     16
    and at level 3 no copy outlives its use: weights are quantised whenever they are unsharded.

On a CPU the same FP8 numbers are multiplied in fp32, not with 14 bits: formats and scales are exactly as on a GPU, sums
are better.

Micikevicius et al. 2022 (FP8 formats for deep learning); DeepSeek-AI 2024 (V3: section 3.3, appendix B); Peng et al.
2023 (FP8-LM); Fishman et al. 2024 (Scaling FP8 training to trillion-token LLMs); NVIDIA Transformer Engine.
Shapes: T tokens, K what is summed over, N rows of a weight, t ranks, e experts.
"""
import json
import sys
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn
from torch.autograd import Function

from collectives import MAX, Group, all_gather, all_reduce, size
from param import acc_dtype, accumulate_grad, is_deferred
from recompute import is_cheap

Tensor = torch.Tensor
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK = 128
SMALLEST = 2.0 ** -100  # largest |x| of a block is taken to be at least this, so that scales are normal numbers


class Recipe(NamedTuple):
    """x, grad: formats of activations and weights, and of gradients. blocks: a scale for each, or one for a tensor."""
    x: torch.dtype
    grad: torch.dtype
    blocks: bool
    pow2: bool = False


RECIPES = {"tensorwise": Recipe(E4M3, E5M2, blocks=False), "blockwise": Recipe(E4M3, E4M3, blocks=True)}


class Quantised(NamedTuple):
    """A matrix R x C, in the order in which products want it: they sum over C. It stands for data times scales."""
    data: Tensor  # R C, or e R C, in FP8
    scales: Tensor  # fp32: of the whole, or [R, C/128] of its 1 x 128 blocks, or [R/128, C/128], or e of these


# ---- to eight bits and back -----------------------------------------------------------------------------------------

def to_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to the nearest number of the format, what is too large to its largest; NaN stays NaN."""
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def scale_of(amax: Tensor, dtype: torch.dtype, pow2: bool) -> Tensor:
    """What the largest |x| is divided by to fit; pow2: rounded up to a power of two."""
    scale = amax.float().clamp(min=SMALLEST) / torch.finfo(dtype).max
    if pow2:  # the exponent of the next power of two: a mantissa that is not 0 carries into it
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return scale


def along_rows(x: Tensor, dtype: torch.dtype, pow2: bool) -> Quantised:
    """R C in 1 x 128 blocks; C is padded with zeros."""
    blocks = rearrange(F.pad(x, (0, -x.shape[1] % BLOCK)), "r (c b) -> r c b", b=BLOCK)
    scales = scale_of(blocks.abs().amax(-1), dtype, pow2)
    return Quantised(to_fp8(blocks * scales.reciprocal()[..., None], dtype).flatten(1).contiguous(), scales)


def in_tiles(w: Tensor, dtype: torch.dtype, pow2: bool) -> Quantised:
    """R C in 128 x 128 blocks."""
    tiles = rearrange(w, "(r i) (c j) -> r i c j", i=BLOCK, j=BLOCK)
    scales = scale_of(tiles.abs().amax((1, 3)), dtype, pow2)
    return Quantised(to_fp8(tiles * scales.reciprocal()[:, None, :, None], dtype).view(w.shape), scales)


def at_scale(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Quantised:
    return Quantised(to_fp8(x.to(acc_dtype(x.dtype)) * scale.reciprocal(), dtype), scale)


def transposed(q: Quantised) -> Quantised:
    """The same numbers summed over the other way: only where one scale serves both."""
    return Quantised(q.data.mT.contiguous(), q.scales.mT.contiguous() if q.scales.ndim else q.scales)


def quantise(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None, pow2: bool = False, rows: bool = True,
             columns: bool = True, tiles: bool = False) -> tuple[Quantised | None, Quantised | None]:
    """(rows, columns) of x T K: [T, K] and its transpose [K, T], T padded with zeros to 128, or 16 with one scale.

    scale: of the whole tensor; None: of blocks, 1 x 128 ones of each layout, or 128 x 128 `tiles`, which serve both. On
    a GPU one kernel reads x once.
    """
    if x.is_cuda:
        import fp8_kernels  # needs Triton, which a CPU does without

        both = fp8_kernels.quantise(x, dtype, scale, SMALLEST, pow2, rows, columns, tiles)
        return tuple(None if one is None else Quantised(*one) for one in both)
    if tiles:
        whole = in_tiles(x, dtype, pow2)
        return whole if rows else None, transposed(whole) if columns else None
    if scale is None:
        return along_rows(x, dtype, pow2) if rows else None, along_rows(x.t(), dtype, pow2) if columns else None
    whole = at_scale(x, scale, dtype)
    return whole if rows else None, transposed(whole._replace(data=padded_rows(whole.data, 16))) if columns else None


def padded_rows(x: Tensor, unit: int) -> Tensor:
    """x with zeros below, so that its rows are a multiple of `unit`."""
    return F.pad(x.view(torch.uint8), (0, 0, 0, -len(x) % unit)).view(x.dtype) if len(x) % unit else x


def dequantise(q: Quantised, dtype: torch.dtype) -> Tensor:
    """The numbers that a matrix stands for, R C."""
    # A table of all 256 numbers: torch's own cast from E4M3 takes four times as long on a CPU.
    table = torch.arange(256, dtype=torch.uint8).view(q.data.dtype).to(dtype)
    numbers = table.index_select(0, q.data.reshape(-1).view(torch.uint8).int()).view(q.data.shape)
    if q.scales.ndim == 0:
        return numbers * q.scales
    if numbers.numel() == 0:
        return numbers
    R, C = q.scales.shape
    blocks = rearrange(numbers, "(r i) (c b) -> r i c b", r=R, c=C)
    return (blocks * q.scales[:, None, :, None]).view(numbers.shape)


# ---- the product ----------------------------------------------------------------------------------------------------

def product(a: Quantised, b: Quantised, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """A B^T of M K and N K, in `dtype`. fast: one scale each; the tensor cores may accumulate by themselves.

    On a GPU by torch's F.scaled_mm: N and K are multiples of 16, or of 128 with blocks, and the GPU is a Hopper. On a
    CPU the numbers that a and b stand for are multiplied in fp32, or in fp64 for a result in fp64.
    """
    if a.data.is_cuda:
        return F.scaled_mm(a.data, b.data.t(), *for_scaled_mm(a), *for_scaled_mm(b), output_dtype=dtype,
                           use_fast_accum=fast)
    return (dequantise(a, acc_dtype(dtype)) @ dequantise(b, acc_dtype(dtype)).t()).to(dtype)


def for_scaled_mm(q: Quantised) -> tuple[Tensor, F.ScalingType]:
    """(scales in the order of elements that cuBLAS reads, their kind)."""
    if q.scales.ndim == 0:
        return q.scales, F.ScalingType.TensorWise
    if len(q.scales) == len(q.data):  # [R, C/128], R adjacent
        return q.scales.t().contiguous().t(), F.ScalingType.BlockWise1x128
    padded = F.pad(q.scales, (0, -q.scales.shape[1] % 4)).contiguous()  # a pad by nothing keeps the order
    return padded.t(), F.ScalingType.BlockWise128x128  # [C/128 padded, R/128], C adjacent


# ---- gathering ------------------------------------------------------------------------------------------------------

def start_gather_matrix(x: Tensor, dim: int, group: Group) -> Callable[[], Tensor]:
    """Begin to gather the shards of all ranks along a dimension of a matrix; a call of what is returned waits."""
    shards = x.new_empty(len(x) * size(group), *x.shape[1:])
    pending = all_gather(shards, x.contiguous(), group, async_op=True)

    def finish() -> Tensor:
        pending.wait()
        return shards if dim == 0 else rearrange(shards, "(n r) c -> r (n c)", n=size(group))
    return finish


def start_gather_quantised(q: Quantised, dim: int, group: Group) -> Callable[[], Quantised]:
    """As bytes: gloo has no FP8. One scale is the same on all ranks, and is not gathered."""
    data = start_gather_matrix(q.data.view(torch.uint8), dim, group)
    scales = start_gather_matrix(q.scales, dim, group) if q.scales.ndim else lambda: q.scales
    return lambda: Quantised(data().view(q.data.dtype), scales())


# ---- linear layers in FP8 -------------------------------------------------------------------------------------------

class Fp8:
    """Linear layers that multiply in FP8: what tp.py and ep.py use in place of their own where they are given it.

    dtype: of results. amax_groups, weight_amax_groups: the groups whose ranks have shards of one activation, or of one
    weight, and must agree on a scale that serves a whole tensor. cached: FP8 weights are kept until the weights change;
    otherwise they are quantised for every use (ZeRO-3, whose weights do not stay either).
    """

    def __init__(self, recipe: Recipe, dtype: torch.dtype, amax_groups: tuple[Group, ...] = (),
                 weight_amax_groups: tuple[Group, ...] = (), cached: bool = True):
        self.recipe, self.dtype = recipe, dtype
        self.amax_groups, self.weight_amax_groups = amax_groups, weight_amax_groups
        self.unit = BLOCK if recipe.blocks else 16  # columns are padded to multiples of this
        self.cached = cached
        self.cache: dict[tuple[nn.Parameter, ...], tuple[list, tuple[Quantised, Quantised]]] = {}

    def column(self, x: Tensor, tp, defer: bool, *weights: nn.Parameter) -> Tensor:
        """tp.column. tp: a TensorParallel."""
        return Fp8Column.apply(x, self, tp, defer, *weights)

    def row(self, x: Tensor, tp, skip: bool, weight: nn.Parameter) -> Tensor:
        """tp.row."""
        return Fp8Row.apply(x, self, tp, skip, weight)

    def grouped(self, x: Tensor, weight: nn.Parameter, route) -> Tensor:
        """ep.grouped_linear. route: an ep.Route."""
        return Fp8Grouped.apply(x, self, weight, route)

    # The three products.

    def output(self, rows: Quantised, weights: tuple[nn.Parameter, ...]) -> Tensor:
        """X W^T"""
        return product(rows, self.weight(weights)[0], self.dtype, fast=not self.recipe.blocks)

    def input_grad(self, rows: Quantised, weights: tuple[nn.Parameter, ...]) -> Tensor:
        """dY W"""
        return product(rows, self.weight(weights)[1], self.dtype)

    def add_weight_grad(self, out: Tensor, grad: Quantised, x: Quantised) -> None:
        """out += dY^T X"""
        out.add_(product(grad, x, out.dtype))

    # Operands.

    def agreed_scale(self, x: Tensor, dtype: torch.dtype, groups: tuple[Group, ...]) -> Tensor:
        """The scale of a tensor of which the ranks of these groups have shards."""
        amax = torch.linalg.vector_norm(x, torch.inf).float() if x.numel() else x.new_zeros((), dtype=torch.float32)
        for group in groups:
            all_reduce(amax, group, MAX)
        return scale_of(amax, dtype, self.recipe.pow2)

    def format_and_scale(self, x: Tensor, grad: bool) -> tuple[torch.dtype, Tensor | None]:
        """Of activations or their gradient; the scale is None if every block has its own."""
        dtype = self.recipe.grad if grad else self.recipe.x
        return dtype, None if self.recipe.blocks else self.agreed_scale(x, dtype, self.amax_groups)

    def quantise(self, x: Tensor, grad: bool, rows: bool = True, columns: bool = True):
        """(rows, columns) of activations or their gradient."""
        return quantise(x, *self.format_and_scale(x, grad), self.recipe.pow2, rows, columns)

    def weight(self, weights: tuple[nn.Parameter, ...]) -> tuple[Quantised, Quantised]:
        """(W, its transpose) of matrices one below the other, or of e matrices."""
        state = [(weight.generation, weight._version) for weight in weights]
        if weights in self.cache and self.cache[weights][0] == state:
            return self.cache[weights][1]
        whole = torch.cat([weight.detach() for weight in weights]) if len(weights) > 1 else weights[0].detach()
        if whole.shape[-1] % self.unit or whole.shape[-2] % self.unit:
            raise ValueError(f"{weights[0].spec.name} is {' x '.join(map(str, whole.shape))} on this rank: in FP8 with "
                             f"{'128 x 128 blocks' if self.recipe.blocks else 'one scale'}, multiples of {self.unit}")
        scale = None if self.recipe.blocks else self.agreed_scale(whole, self.recipe.x, self.weight_amax_groups)
        both = quantise(whole.flatten(0, -2), self.recipe.x, scale, self.recipe.pow2, columns=whole.ndim == 2,
                        tiles=self.recipe.blocks)
        if whole.ndim == 3:
            (data, scales), _ = both
            rows = Quantised(data.view(whole.shape), scales.unflatten(0, (len(whole), -1)) if scales.ndim else scales)
            both = rows, transposed(rows)
        if self.cached:
            self.cache[weights] = state, both
        return both

    # What is saved for the weight gradient: columns in FP8; or x itself, if that costs no memory (it is recomputed), or
    # if blocks of columns would cross the borders between ranks.

    def has_whole_blocks(self, x: Tensor, tp) -> bool:
        """Whether columns of this rank's tokens are columns of all ranks' tokens."""
        return not tp.sequence or len(x) % self.unit == 0

    def rows_and_saved(self, x: Tensor, tp) -> tuple[Quantised, tuple[Tensor, ...]]:
        """Rows of x, and what to save of it, in one reading."""
        save_columns = self.has_whole_blocks(x, tp) and not is_cheap(x)
        rows, columns = self.quantise(x, grad=False, columns=save_columns)
        return rows, columns if save_columns else (x,)

    def saved(self, x: Tensor, tp, grad: bool = False) -> tuple[Tensor, ...]:
        """What to keep of x until its columns are needed."""
        return self.quantise(x, grad, rows=False)[1] if self.has_whole_blocks(x, tp) else (x,)

    def start_gather_columns(self, saved: tuple[Tensor, ...], tp, grad: bool = False) -> Callable[[], Quantised]:
        """Columns of all ranks' tokens, from what each has saved."""
        if len(saved) == 1:
            gather = start_gather_matrix(*saved, 0, tp.group)
            return lambda: self.quantise(gather(), grad, rows=False)[1]
        return start_gather_quantised(Quantised(*saved), 1, tp.group) if tp.sequence else lambda: Quantised(*saved)

    def start_gather_both(self, grad: Tensor, tp) -> Callable[[], tuple[Quantised, Quantised]]:
        """Rows and columns of all ranks' tokens of a gradient."""
        if not tp.sequence:
            both = self.quantise(grad, True)
            return lambda: both
        if self.recipe.blocks:  # two layouts in FP8 are as many bytes as one in 16 bits
            gather = start_gather_matrix(grad, 0, tp.group)
            return lambda: self.quantise(gather(), True)
        gather_rows = start_gather_quantised(self.quantise(grad, True, columns=False)[0], 0, tp.group)

        def finish() -> tuple[Quantised, Quantised]:
            rows = gather_rows()
            return rows, transposed(rows._replace(data=padded_rows(rows.data, self.unit)))
        return finish


class Fp8Column(Function):
    """tp.Column, in the same order of events."""

    @staticmethod
    def forward(ctx, x, fp8, tp, defer, *weights):
        rows, saved = fp8.rows_and_saved(x, tp)
        gather = start_gather_quantised(rows, 0, tp.group) if tp.sequence else lambda: rows
        ctx.save_for_backward(*saved)
        ctx.fp8, ctx.tp, ctx.defer, ctx.weights = fp8, tp, defer, weights
        return fp8.output(gather(), weights)

    @staticmethod
    def backward(ctx, grad):
        fp8, tp = ctx.fp8, ctx.tp
        saved = detached(ctx.saved_tensors)
        if len(saved) == 1:
            saved = fp8.saved(*saved, tp)
        gather = None if is_deferred(ctx.defer) else fp8.start_gather_columns(saved, tp)
        rows, columns = fp8.quantise(grad, True)
        terms = fp8.input_grad(rows, ctx.weights)  # while X is gathered
        x = gather() if gather else None
        reduce = tp.start_reduce(terms)
        accumulate_grad(ctx.weights, lambda out: fp8.add_weight_grad(  # while dX is reduced
            out, columns, fp8.start_gather_columns(saved, tp)() if x is None else x), ctx.defer)
        return reduce(), None, None, None, *[None] * len(ctx.weights)


class Fp8Row(Function):
    """tp.Row, in the same order of events. It has all tokens of X, so only gradients are gathered."""

    @staticmethod
    def forward(ctx, x, fp8, tp, skip, weight):
        ctx.fp8, ctx.tp, ctx.weights = fp8, tp, (weight,)
        if skip:
            ctx.save_for_backward(*fp8.saved(x, tp._replace(sequence=False)))
            return tp.skipped_output(x, len(weight))
        rows, saved = fp8.rows_and_saved(x, tp._replace(sequence=False))
        ctx.save_for_backward(*saved)
        return tp.start_reduce(fp8.output(rows, ctx.weights))()

    @staticmethod
    def backward(ctx, grad):
        fp8, tp = ctx.fp8, ctx.tp
        gather = fp8.start_gather_both(grad, tp)
        saved = detached(ctx.saved_tensors)  # if x is recomputed, this is where: while the gradient is gathered
        x = Quantised(*(fp8.saved(*saved, tp._replace(sequence=False)) if len(saved) == 1 else saved))
        rows, columns = gather()
        dy = fp8.input_grad(rows, ctx.weights)
        if is_deferred() and tp.sequence:  # T/t tokens wait in the queue, not T
            own = fp8.saved(grad, tp, grad=True)
            accumulate_grad(ctx.weights, lambda out: fp8.add_weight_grad(
                out, fp8.start_gather_columns(own, tp, grad=True)(), x))
        else:
            accumulate_grad(ctx.weights, lambda out: fp8.add_weight_grad(out, columns, x))
        return dy, None, None, None, None


def detached(saved: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Without their graph: what waits in a queue must not hold one."""
    return tuple(x.detach() for x in saved)


# ---- experts in FP8: a matrix for each, rows sorted by expert --------------------------------------------------------

class Fp8Grouped(Function):
    """ep.GroupedLinear. Columns of an expert begin with a block of their own."""

    @staticmethod
    def forward(ctx, x, fp8, weight, route):
        rows, columns = rows_and_columns(fp8, x, route, grad=False)
        ctx.save_for_backward(*columns)
        ctx.fp8, ctx.weight, ctx.route = fp8, weight, route
        return for_each_expert(fp8, rows, fp8.weight((weight,))[0], route)

    @staticmethod
    def backward(ctx, grad):
        fp8, route, x = ctx.fp8, ctx.route, Quantised(*detached(ctx.saved_tensors))
        rows, columns = rows_and_columns(fp8, grad.contiguous(), route, grad=True)
        # Also if no expert here received a token: the bucket counts gradients.
        accumulate_grad(ctx.weight, lambda out: add_experts_weight_grad(fp8, out, columns, x, route))
        return for_each_expert(fp8, rows, fp8.weight((ctx.weight,))[1], route), None, None, None


def rows_and_columns(fp8: Fp8, x: Tensor, route, grad: bool) -> tuple[Quantised, Quantised]:
    """Of rows sorted by expert; in columns every expert's tokens are padded to whole blocks."""
    how = fp8.format_and_scale(x, grad)
    apart = torch.cat([F.pad(part, (0, 0, 0, -len(part) % fp8.unit)) for part in x.split(route.rows_per_expert)])
    return (quantise(x, *how, fp8.recipe.pow2, columns=False)[0],
            quantise(apart, *how, fp8.recipe.pow2, rows=False)[1])


def for_each_expert(fp8: Fp8, rows: Quantised, matrices: Quantised, route) -> Tensor:
    """Every expert's rows times the transpose of its matrix."""
    ends = [0, *accumulate(route.rows_per_expert)]
    parts = [product(rows_of(rows, slice(*ends[i:i + 2])), matrix_of(matrices, i), fp8.dtype)
             for i, count in enumerate(route.rows_per_expert) if count]
    return torch.cat(parts) if parts else rows.data.new_empty(0, matrices.data.shape[1], dtype=fp8.dtype)


def add_experts_weight_grad(fp8: Fp8, out: Tensor, grad: Quantised, x: Quantised, route) -> None:
    start = 0
    for matrix, count in zip(out, route.rows_per_expert):
        stop = start + count + -count % fp8.unit
        if count:
            matrix.add_(product(*(columns_of(q, slice(start, stop)) for q in (grad, x)), out.dtype))
        start = stop


def rows_of(q: Quantised, rows: slice) -> Quantised:
    return Quantised(q.data[rows], q.scales[rows] if q.scales.ndim else q.scales)


def columns_of(q: Quantised, columns: slice) -> Quantised:
    blocks = slice(columns.start // BLOCK, columns.stop // BLOCK)
    return Quantised(q.data[:, columns], q.scales[:, blocks] if q.scales.ndim else q.scales)


def matrix_of(q: Quantised, i: int) -> Quantised:
    return Quantised(q.data[i], q.scales[i] if q.scales.ndim else q.scales)


# ---- demo: python fp8.py, or python fp8.py bf16.jsonl fp8.jsonl, files of train.py --metrics -------------------------

def curves(losses: dict[str, list[float]], width: int = 60) -> str:
    """How far the loss of each run is from the first one's, in percent: a picture of means over equally many steps."""
    first, *others = losses
    steps = min(len(run) for run in losses.values())
    cuts = [range(steps * i // width, max(steps * (i + 1) // width, steps * i // width + 1)) for i in range(width)]
    gaps = {name: [100 * (sum(losses[name][i] for i in cut) / sum(losses[first][i] for i in cut) - 1) for cut in cuts]
            for name in others}
    low, high = (limit(0.0, *(limit(gap) for gap in gaps.values())) for limit in (min, max))
    step = max((high - low) / 12, 1e-3)
    rows = [[" "] * width for _ in range(round((high - low) / step) + 1)]
    rows[round(high / step)] = ["-"] * width
    for sign, gap in zip("ABCDEFGH", gaps.values()):
        for column, value in enumerate(gap):
            rows[round((high - value) / step)][column] = sign
    lines = [f"Loss over that of {first}, means of {len(cuts[-1])} steps; " + ", ".join(
        f"{sign}: {name}, at the end {gap[-1]:+.2f}%" for sign, (name, gap) in zip("ABCDEFGH", gaps.items())), ""]
    return "\n".join(lines + [f"{high - i * step:+8.2f}%  {''.join(row).rstrip()}" for i, row in enumerate(rows)])


def read_losses(path: str) -> list[float]:
    with open(path) as file:
        return [json.loads(line)["loss"] for line in file]


def demo() -> None:
    """What each recipe makes of gradients with a few large tokens: how far products are off, and how much became 0."""
    generator = torch.Generator().manual_seed(0)
    T, N, K = 512, 256, 384
    x, w = torch.randn(T, K, generator=generator), torch.randn(N, K, generator=generator) / K ** 0.5
    grad = torch.randn(T, N, generator=generator) * torch.exp2(-12 * torch.rand(T, 1, generator=generator))
    naive = Recipe(E4M3, E4M3, blocks=False)
    print(f"Products of {T} tokens, widths {K} and {N}, whose gradients spread over 12 powers of two: error\n"
          "of a row over the row, mean of all rows, and part of the gradient that is rounded to 0:\n\n"
          "                                      X W^T     dY W     dY^T X    dY = 0")
    for outlier in (1, 1e6):
        grad[0] *= outlier
        print(f"    the first token's gradient {outlier:g} times as large")
        exact = x @ w.t(), grad @ w, grad.t() @ x
        for name, recipe in {**RECIPES, "E4M3 for all, one scale": naive}.items():
            layer = Fp8(recipe, torch.float32)
            rows, columns = layer.quantise(x, False)
            grad_rows, grad_columns = layer.quantise(grad, True)
            matrix = in_tiles(w, E4M3, False) if recipe.blocks else at_scale(w, layer.agreed_scale(w, E4M3, ()), E4M3)
            got = (product(rows, matrix, x.dtype), product(grad_rows, transposed(matrix), x.dtype),
                   product(grad_columns, columns, x.dtype))
            errors = [((a - b).norm(dim=1) / b.norm(dim=1)).mean().item() for a, b in zip(got, exact)]
            lost = (dequantise(grad_rows, x.dtype) == 0).float().mean().item()
            print(f"        {name:26s}" + "".join(f"{error:9.2%}" for error in errors) + f"{lost:10.2%}")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(curves({path: read_losses(path) for path in sys.argv[1:]}))
    else:
        demo()
