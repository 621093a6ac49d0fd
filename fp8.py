"""FP8: linear layers multiply numbers of 8 bits, in forward and in both halves of backward.

Saves: up to half the time of every matmul, half the bytes of what it keeps for backward and of what is gathered for it.
Costs: reading each operand once more to find scales and to write it in 8 bits, twice: as it is and transposed. Weights
       get two FP8 copies beside the 16-bit ones, 2 bytes a parameter, which live for an optimizer step.
Stops helping when: matrices are so small that the reading costs more than the multiplying saves; or the loss says so.

Two formats. A number is sign, exponent, mantissa: 3 bits of mantissa are three significant bits behind the leading one.

             bits      largest    smallest normal    smallest     a rounding errs by at most
    E4M3     1 4 3     448        2^-6               2^-9         1/16 of the number     18 powers of two
    E5M2     1 5 2     57344      2^-14              2^-16        1/8                    32

Weights and activations are within a few powers of two of each other and want digits: E4M3. Gradients spread over many
more; with one scale for all of them, small ones would fall below E4M3's 2^-9: hence E5M2 (Micikevicius et al. 2022).

Scales. What is stored is x / scale, with scale = (largest |x|) / (largest number of the format), computed from the very
tensor (current scaling); clamped before it is cast, or what is too large becomes inf, or, in E4M3, which has no inf,
NaN. Scales guessed from earlier steps (delayed scaling) spare one reading and clip whenever a tensor suddenly grows.

    tensorwise   one scale for a tensor. An outlier of 1000 times the rest pushes the rest down 10 powers of two, of the
                 18 there are. Ranks that have parts of one tensor must agree on the largest, a small all-reduce.
    blockwise    one for 1 x 128 elements along what a product sums over; for 128 x 128 of a weight, so that the same
                 numbers serve W and its transpose. An outlier spoils its own block; E4M3 is enough for gradients, too.
                 No rank asks another, and the same numbers come out on every grid, as long as it cuts no block.
                 (Experts' columns are blocks of the rows that came, from whatever ranks.)

                        X W^T = Y                  dY W = dX                 dY^T X = dW
    sums over           H                          the rows of W             tokens
    blocks of X, dY     ▬▬▬▬▬▬▬  1 x 128           ▬▬▬▬▬▬▬  1 x 128          ▮  128 x 1 of both
    blocks of W         ■ 128 x 128                ■ the same                                    (▮ = 1 x 128 of dY^T)

A block of 1 x 128 has its numbers where one product sums, and the other product sums elsewhere: X and dY are written in
two forms, `rows` and `columns` (held transposed: Hopper multiplies FP8 only if what is summed over is adjacent). Both
are made from x in one reading; making one from the other would round twice.

Sums. Hopper's tensor cores add FP8 products with about 14 bits: over K = 4096 errors reach 2% (DeepSeek-V3, 3.3.2).
Blockwise sums 128 products there and adds that to an fp32 sum, after multiplying by both scales, which it has to do
anyway. Tensorwise lets forward accumulate fast, and asks backward, whose errors go into weights, for the exact way.

What stays as it is: embedding, head, norms, router, attention, master weights, sums of gradients. They have few FLOPs,
or their errors go far. Many recipes spare the first and the last block, too (--no-fp8-ends).

Where recipes went wrong. Without scales most of a gradient is 0 in E4M3, and a small Llama stops learning (RESULTS.md).
(With one current scale E4M3 lets it learn as well as E5M2 does, whose roundings err twice as much: what E5M2 is for,
small runs do not show.) Delayed tensorwise scaling lost a 7B Llama after 200 billion tokens, as SwiGLU grew outliers
(Fishman et al. 2024). DeepSeek-V3's 16B test diverged with 128 x 128 blocks of dY: outliers sit in tokens, so blocks of
several tokens mix them. Scales fitted to powers of two (--fp8-pow2) multiply without rounding and cost up to one power.
FP8 master weights lose steps smaller than 1/16 of a weight. Weight gradients that are summed in FP8 need a scale that
follows them (FP8-LM). Quantised weights of norms made MX formats unstable.

With sequence parallelism a rank has T/t tokens of X. Rows are gathered in FP8, half the bytes; columns, too, where T/t
are whole blocks, or else x is gathered as it is, so that blocks lie the same on any number of ranks.

Bytes a parameter at ZeRO stage 0, as in zero.py, which has published recipes beside:

    --dtype bf16 --fp8 ...                    2 + 2 fp8     4      4      4 + 4     20
    --dtype bf16 --fp8 ... --moments bf16     2 + 2 fp8     4      4      2 + 2     16
    and at stage 3 no copy outlives its use: weights are quantised whenever they are gathered.

On a CPU the same FP8 numbers are multiplied in fp32, which has no 14 bits: formats and scales are exactly as on a GPU,
sums are better.

Micikevicius et al. 2022 (FP8 formats for deep learning); DeepSeek-AI 2024 (V3: section 3.3, appendix B); Peng et al.
2023 (FP8-LM); Fishman et al. 2024 (Scaling FP8 training to trillion-token LLMs); NVIDIA Transformer Engine.
Letters: T tokens, K what is summed over, N rows of a weight, t ranks, e experts.
"""
import json
import sys
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from collectives import MAX, Group, all_gather, all_reduce
from param import at_least_fp32, size

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
    """R C in 1 x 128 blocks; C is filled up with zeros."""
    x = F.pad(x, (0, -x.shape[1] % BLOCK))
    blocks = x.unflatten(1, (x.shape[1] // BLOCK, BLOCK))
    scales = scale_of(blocks.abs().amax(-1), dtype, pow2)
    return Quantised(to_fp8(blocks * scales.reciprocal()[..., None], dtype).flatten(1).contiguous(), scales)


def in_tiles(w: Tensor, dtype: torch.dtype, pow2: bool) -> Quantised:
    """R C in 128 x 128 blocks."""
    tiles = w.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = scale_of(tiles.abs().amax((1, 3)), dtype, pow2)
    return Quantised(to_fp8(tiles * scales.reciprocal()[:, None, :, None], dtype).view(w.shape), scales)


def at_scale(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Quantised:
    return Quantised(to_fp8(x.to(at_least_fp32(x.dtype)) * scale.reciprocal(), dtype), scale)


def transposed(q: Quantised) -> Quantised:
    """The same numbers summed over the other way: only where one scale serves both."""
    return Quantised(q.data.mT.contiguous(), q.scales.mT.contiguous() if q.scales.ndim else q.scales)


def quantise(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None, pow2: bool = False, rows: bool = True,
             columns: bool = True, tiles: bool = False) -> tuple[Quantised | None, Quantised | None]:
    """(rows, columns) of x T K: [T, K] and its transpose [K, T], T filled up with zeros to 128, or 16 with one scale.

    scale: of the whole tensor; None: of blocks, 1 x 128 ones of each form, or 128 x 128 `tiles` of both, which fit. On
    a GPU one kernel reads x once.
    """
    if x.is_cuda:
        import fp8_kernels  # needs Triton, which a CPU does without

        return fp8_kernels.quantise(x, dtype, scale, pow2, rows, columns, tiles)
    if tiles:
        whole = in_tiles(x, dtype, pow2)
        return whole if rows else None, transposed(whole) if columns else None
    if scale is None:
        return along_rows(x, dtype, pow2) if rows else None, along_rows(x.t(), dtype, pow2) if columns else None
    whole = at_scale(x, scale, dtype)
    return whole if rows else None, transposed(whole._replace(data=filled(whole.data, 16))) if columns else None


def filled(x: Tensor, unit: int) -> Tensor:
    """x with zeros below, so that its rows are a multiple of `unit`."""
    return F.pad(x.view(torch.uint8), (0, 0, 0, -len(x) % unit)).view(x.dtype) if len(x) % unit else x


def values(q: Quantised, dtype: torch.dtype) -> Tensor:
    """The numbers that a matrix stands for, R C."""
    # a table of all 256 numbers: torch's own cast from E4M3 takes four times as long on a CPU
    table = torch.arange(256, dtype=torch.uint8).view(q.data.dtype).to(dtype)
    wide = table.index_select(0, q.data.reshape(-1).view(torch.uint8).int()).view(q.data.shape)
    if q.scales.ndim == 0:
        return wide * q.scales
    R, C = q.scales.shape
    tiles = wide.view(R, len(wide) // max(R, 1), C, BLOCK) if wide.numel() else wide
    return (tiles * q.scales[:, None, :, None]).view(wide.shape) if wide.numel() else wide


# ---- the product ----------------------------------------------------------------------------------------------------

def product(a: Quantised, b: Quantised, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """A B^T of M K and N K, in `dtype`. fast: one scale each; the tensor cores may sum everything by themselves.

    On a GPU by torch's F.scaled_mm: N and K are multiples of 16, or of 128 with blocks, and the GPU is a Hopper. On a
    CPU the numbers that a and b stand for are multiplied in fp32, or in fp64 for a result in fp64.
    """
    if a.data.is_cuda:
        return F.scaled_mm(a.data, b.data.t(), *for_scaled_mm(a), *for_scaled_mm(b), output_dtype=dtype,
                           use_fast_accum=fast)
    wide = at_least_fp32(dtype)
    return (values(a, wide) @ values(b, wide).t()).to(dtype)


def for_scaled_mm(q: Quantised) -> tuple[Tensor, F.ScalingType]:
    """(scales in the order of elements that cuBLAS reads, their kind)."""
    if q.scales.ndim == 0:
        return q.scales, F.ScalingType.TensorWise
    if len(q.scales) == len(q.data):  # [R, C/128], R adjacent
        return q.scales.t().contiguous().t(), F.ScalingType.BlockWise1x128
    filled_up = F.pad(q.scales, (0, -q.scales.shape[1] % 4)).contiguous()  # a pad by nothing keeps the order
    return filled_up.t(), F.ScalingType.BlockWise128x128  # [C/128 filled up, R/128], C adjacent


# ---- what travels ---------------------------------------------------------------------------------------------------

def gathered(x: Tensor, dim: int, group: Group) -> Callable[[], Tensor]:
    """Begin to gather the parts of all ranks along a dimension of a matrix; a call of what is returned waits."""
    parts = x.new_empty(len(x) * size(group), *x.shape[1:])
    pending = all_gather(parts, x.contiguous(), group, async_op=True)

    def arrived():
        pending.wait()
        return parts if dim == 0 else parts.unflatten(0, (size(group), -1)).movedim(0, 1).flatten(1)
    return arrived


def gathered_quantised(q: Quantised, dim: int, group: Group) -> Callable[[], Quantised]:
    """As bytes: gloo has no FP8. One scale is the same on all ranks, and stays."""
    data = gathered(q.data.view(torch.uint8), dim, group)
    scales = gathered(q.scales, dim, group) if q.scales.ndim else lambda: q.scales
    return lambda: Quantised(data().view(q.data.dtype), scales())


# ---- the three products of a layer ----------------------------------------------------------------------------------

class Fp8:
    """How a linear layer multiplies: what tp.py calls a Matmul, and ep.py a GroupedMatmul; see there for the methods.

    dtype: of results. sharers: groups whose ranks have parts of the same activations, and weight_sharers of the same
    weights: where one scale serves a tensor, they agree on it. cached: FP8 weights are kept until weights change, or
    else made anew for every use (ZeRO-3, whose weights do not stay either).
    """
    one_form = False

    def __init__(self, recipe: Recipe, dtype: torch.dtype, sharers: tuple[Group, ...] = (),
                 weight_sharers: tuple[Group, ...] = (), cached: bool = True):
        self.recipe, self.dtype, self.sharers, self.weight_sharers = recipe, dtype, sharers, weight_sharers
        self.unit = BLOCK if recipe.blocks else 16  # what columns are filled up to
        self.cached = cached
        self.cache: dict[tuple[nn.Parameter, ...], tuple[list, tuple[Quantised, Quantised]]] = {}

    def one_scale(self, x: Tensor, dtype: torch.dtype, sharers: tuple[Group, ...]) -> Tensor:
        """Of a tensor of which the ranks have parts."""
        amax = torch.linalg.vector_norm(x, torch.inf).float() if x.numel() else x.new_zeros((), dtype=torch.float32)
        for group in sharers:
            all_reduce(amax, group, MAX)
        return scale_of(amax, dtype, self.recipe.pow2)

    def how(self, x: Tensor, grad: bool) -> tuple[torch.dtype, Tensor | None]:
        """(format, scale of the whole) of activations or their gradient."""
        dtype = self.recipe.grad if grad else self.recipe.x
        return dtype, None if self.recipe.blocks else self.one_scale(x, dtype, self.sharers)

    def quantised(self, x: Tensor, grad: bool, rows: bool = True, columns: bool = True):
        return quantise(x, *self.how(x, grad), self.recipe.pow2, rows, columns)

    def weight(self, weights: tuple[nn.Parameter, ...]) -> tuple[Quantised, Quantised]:
        """(W, its transpose) of matrices below each other, or of e matrices."""
        state = [(weight.generation, weight._version) for weight in weights]
        if weights in self.cache and self.cache[weights][0] == state:
            return self.cache[weights][1]
        whole = torch.cat([weight.detach() for weight in weights]) if len(weights) > 1 else weights[0].detach()
        if whole.shape[-1] % self.unit or whole.shape[-2] % self.unit:
            raise ValueError(f"{weights[0].spec.name} is {' x '.join(map(str, whole.shape))} on this rank: in FP8 with "
                             f"{'128 x 128 blocks' if self.recipe.blocks else 'one scale'}, multiples of {self.unit}")
        scale = None if self.recipe.blocks else self.one_scale(whole, self.recipe.x, self.weight_sharers)
        made = quantise(whole.flatten(0, -2), self.recipe.x, scale, self.recipe.pow2, columns=whole.ndim == 2,
                        tiles=self.recipe.blocks)
        if whole.ndim == 3:
            (data, scales), _ = made
            rows = Quantised(data.view(whole.shape), scales.unflatten(0, (len(whole), -1)) if scales.ndim else scales)
            made = rows, transposed(rows)
        if self.cached:
            self.cache[weights] = state, made
        return made

    # One matrix.

    def whole_blocks(self, x: Tensor, tp) -> bool:
        """Whether columns of this rank's tokens are columns of all ranks' tokens."""
        return not tp.sequence or len(x) % self.unit == 0

    def spread(self, x: Tensor, tp, keep: bool = True):
        now = keep and self.whole_blocks(x, tp)
        rows, columns = self.quantised(x, False, columns=now)
        arriving = gathered_quantised(rows, 0, tp.group) if tp.sequence else lambda: rows
        return arriving, columns if now else (x,)

    def keep(self, x: Tensor, tp, grad: bool = False):
        return self.quantised(x, grad, rows=False)[1] if self.whole_blocks(x, tp) else (x,)

    def columns(self, kept, tp, grad: bool = False):
        if len(kept) == 1:
            arriving = gathered(*kept, 0, tp.group)
            return lambda: self.quantised(arriving(), grad, rows=False)[1]
        return gathered_quantised(Quantised(*kept), 1, tp.group) if tp.sequence else lambda: Quantised(*kept)

    def both(self, x: Tensor, tp, grad: bool = False):
        if not tp.sequence:
            made = self.quantised(x, grad)
            return lambda: made
        if self.recipe.blocks:  # two forms in FP8 are as many bytes as one in 16 bits, which blocks may cross
            arriving = gathered(x, 0, tp.group)
            return lambda: self.quantised(arriving(), grad)
        arriving_rows = gathered_quantised(self.quantised(x, grad, columns=False)[0], 0, tp.group)

        def arrived():
            rows = arriving_rows()
            return rows, transposed(rows._replace(data=filled(rows.data, self.unit)))
        return arrived

    def forward(self, rows: Quantised, weights: tuple[nn.Parameter, ...]) -> Tensor:
        return product(rows, self.weight(weights)[0], self.dtype, fast=not self.recipe.blocks)

    def input_grad(self, rows: Quantised, weights: tuple[nn.Parameter, ...]) -> Tensor:
        return product(rows, self.weight(weights)[1], self.dtype)

    def add_weight_grad(self, out: Tensor, grad: Quantised, x: Quantised) -> None:
        out.add_(product(grad, x, out.dtype))

    # A matrix for each expert, whose rows follow each other. Columns of an expert begin with a block of their own.

    def pack(self, x: Tensor, route, grad: bool = False):
        how = self.how(x, grad)
        apart = torch.cat([F.pad(part, (0, 0, 0, -len(part) % self.unit)) for part in x.split(route.counts)])
        return (quantise(x, *how, self.recipe.pow2, columns=False)[0],
                quantise(apart, *how, self.recipe.pow2, rows=False)[1])

    def per_expert(self, rows: Quantised, matrices: Quantised, route) -> Tensor:
        ends = [0, *accumulate(route.counts)]
        parts = [product(rows_of(rows, slice(*ends[i:i + 2])), matrix_of(matrices, i), self.dtype)
                 for i, count in enumerate(route.counts) if count]
        return torch.cat(parts) if parts else rows.data.new_empty(0, matrices.data.shape[1], dtype=self.dtype)

    def grouped_forward(self, rows: Quantised, weight: nn.Parameter, route) -> Tensor:
        return self.per_expert(rows, self.weight((weight,))[0], route)

    def grouped_input_grad(self, rows: Quantised, weight: nn.Parameter, route) -> Tensor:
        return self.per_expert(rows, self.weight((weight,))[1], route)

    def add_grouped_weight_grad(self, out: Tensor, grad: Quantised, x, route) -> None:
        start = 0
        for matrix, count in zip(out, route.counts):
            stop = start + count + -count % self.unit
            if count:
                matrix.add_(product(*(columns_of(Quantised(*q), slice(start, stop)) for q in (grad, x)), out.dtype))
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
            rows, columns = layer.quantised(x, False)
            grad_rows, grad_columns = layer.quantised(grad, True)
            matrix = in_tiles(w, E4M3, False) if recipe.blocks else at_scale(w, layer.one_scale(w, E4M3, ()), E4M3)
            got = (product(rows, matrix, x.dtype), product(grad_rows, transposed(matrix), x.dtype),
                   product(grad_columns, columns, x.dtype))
            errors = [((a - b).norm(dim=1) / b.norm(dim=1)).mean().item() for a, b in zip(got, exact)]
            lost = (values(grad_rows, x.dtype) == 0).float().mean().item()
            print(f"        {name:26s}" + "".join(f"{error:9.2%}" for error in errors) + f"{lost:10.2%}")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(curves({path: read_losses(path) for path in sys.argv[1:]}))
    else:
        demo()
