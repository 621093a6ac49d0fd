"""AdamW in one pass over memory: unscale, clip, update, copy to 16 bits and zero the gradient, of all parameters.

An update takes about 15 FLOPs per parameter and is bound by memory. Once the norm of the whole gradient is known, all
else can be done while each tensor is read and written once. Bytes per parameter of a bf16 model at ZeRO level 0:

                                     separate passes     one pass    one pass, bf16 moments
    zero the gradient                        4               4                  4
    the gradient's norm                      4               4                  4
    unscale and clip                       4 + 4             -                  -
    AdamW: gradient, master, m, v       4 + 8 + 8 + 8   4 + 8 + 8 + 8     4 + 8 + 4 + 4
    copy to 16 bits                        4 + 2             2                  2
    total                                   50              38                 30

In separate passes bf16 moments add 24 bytes: torch's AdamW accepts only fp32, so they are converted there and back.

A step has two launches, one for the norm and one for the update, for any number of parameters and buckets: each program
finds its span in a table of spans (pointers, length, flags) and processes BLOCK of its elements. The norm adds one
partial sum per program in a fixed order, without atomics: it has the same bits in every run. No number is read by the
host: if the gradient is not finite (`found_inf`), the kernel updates nothing.

`--optimizer adamw-one-pass` selects it on GPUs. The reference is torch's fused AdamW, with the same results except for
rounding. It stays the default until both have been compared on a GPU (`python -m bench gpu --only variants`).

Loshchilov & Hutter 2019 (AdamW); Rajbhandari et al. 2020 (flat shards). Shapes: all tensors are flat, [elements].
"""
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import INTERPRETED, check

BLOCK = 4096
COLUMNS = 8  # of the table: five addresses, the length, decays + 2 owned + 4 zeroes, the number of the first program
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class Span(NamedTuple):
    """Flat tensors of equal length, of one shard. master, grad: fp32. weights: 16 bits, or the master weights. decays:
    weight_decay applies. owned: this rank counts the span in the norm. zeroes: the update zeroes the gradient."""
    master: Tensor
    grad: Tensor
    m: Tensor
    v: Tensor
    weights: Tensor
    decays: bool
    owned: bool
    zeroes: bool

    def tensors(self) -> tuple[Tensor, ...]:
        return self[:5]


@triton.jit
def find_span(table, spans, SPANS: tl.constexpr, COLUMNS: tl.constexpr):
    """(the row of this program's span in the table, its first element). SPANS: `spans`, rounded up to a power of 2."""
    i = tl.arange(0, SPANS)
    first = tl.load(table + i * COLUMNS + 7, i < spans, other=2147483647)
    row = table + (tl.sum((first <= tl.program_id(0)).to(tl.int32), 0) - 1) * COLUMNS
    return row, tl.program_id(0) - tl.load(row + 7)


@triton.jit
def pointer_to(row, COLUMN: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The address in one column of the table. ALIGNED: addresses and lengths are multiples of 16: vector loads."""
    pointer = tl.load(row + COLUMN).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def elements_of(row, block, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """(the indices of a program's elements in its span, a mask of those inside the span)."""
    i, count = block * BLOCK + tl.arange(0, BLOCK), tl.load(row + 5)
    if ALIGNED:
        count = tl.multiple_of(count, 16)
    return i, i < count


@triton.jit
def squares_kernel(table, spans, partial, SPANS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
                   ALIGNED: tl.constexpr):
    """Each program sums the squares of BLOCK gradients, if this rank counts them. Moves 4 bytes per parameter."""
    row, block = find_span(table, spans, SPANS, COLUMNS)
    owned = (tl.load(row + 6) & 2) != 0
    i, inside = elements_of(row, block, BLOCK, ALIGNED)
    grad = tl.load(pointer_to(row, 1, tl.float32, ALIGNED) + i, owned & inside, other=0.0)
    tl.store(partial + tl.program_id(0), tl.sum(grad * grad, 0))


@triton.jit
def adamw_kernel(table, spans, scalars, lr, weight_decay, beta1, beta2, eps, MOMENT: tl.constexpr, WEIGHT: tl.constexpr,
                 COPY: tl.constexpr, SPANS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
                 ALIGNED: tl.constexpr):
    """Each program updates BLOCK parameters. Moves 34 bytes per parameter. COPY: `weights` are not the master weights.
    scalars, fp32 [4]: the factor of the gradients, found_inf, and 1 - beta^t for both betas."""
    row, block = find_span(table, spans, SPANS, COLUMNS)
    i, inside = elements_of(row, block, BLOCK, ALIGNED)
    flags = tl.load(row + 6)
    grads = pointer_to(row, 1, tl.float32, ALIGNED) + i
    if tl.load(scalars + 1) == 0:
        masters = pointer_to(row, 0, tl.float32, ALIGNED) + i
        ms, vs = pointer_to(row, 2, MOMENT, ALIGNED) + i, pointer_to(row, 3, MOMENT, ALIGNED) + i
        grad = tl.load(grads, inside, other=0.0) * tl.load(scalars)
        weight = tl.load(masters, inside, other=0.0)
        m = tl.load(ms, inside, other=0.0).to(tl.float32)
        v = tl.load(vs, inside, other=0.0).to(tl.float32)
        m += (1 - beta1) * (grad - m)
        v = beta2 * v + (1 - beta2) * grad * grad
        step = lr / tl.load(scalars + 2) * m / (tl.sqrt(v / tl.load(scalars + 3)) + eps)
        weight = weight * (1 - lr * weight_decay * (flags & 1)) - step
        tl.store(masters, weight, inside)
        tl.store(ms, m.to(MOMENT), inside)
        tl.store(vs, v.to(MOMENT), inside)
        if COPY:
            tl.store(pointer_to(row, 4, WEIGHT, ALIGNED) + i, weight.to(WEIGHT), inside)
    tl.store(grads, tl.zeros([BLOCK], tl.float32), inside & ((flags & 4) != 0))


class OnePass:
    """The table of `spans`, and the launches. Raises ValueError if they are not flat, mix dtypes or are on a CPU."""

    def __init__(self, spans: list[Span]):
        first = spans[0]
        for span in spans:
            tensors = span.tensors()
            types = span.master.dtype, span.grad.dtype, span.m.dtype, span.v.dtype, span.weights.dtype
            check(types == (torch.float32, torch.float32, first.m.dtype, first.m.dtype, first.weights.dtype),
                  "one pass of AdamW needs fp32 master weights and gradients, and one type of moments and of weights, "
                  f"not {', '.join(map(str, types))}")
            check(all(x.is_contiguous() and x.numel() == span.grad.numel() for x in tensors), "spans must be flat")
        check(INTERPRETED or first.grad.is_cuda, f"one pass of AdamW runs on GPUs, not on {first.grad.device}")
        self.addresses = addresses(spans)
        spans = [span for span in spans if span.grad.numel()]
        rows, self.programs = [], 0
        for span in spans:
            flags = span.decays + 2 * span.owned + 4 * span.zeroes
            pointers = [x.data_ptr() for x in span.tensors()]
            rows.append(pointers + [span.grad.numel(), flags, self.programs])
            self.programs += triton.cdiv(span.grad.numel(), BLOCK)
        self.table = torch.tensor(rows, dtype=torch.int64, device=first.grad.device).view(-1, COLUMNS)
        self.options = dict(SPANS=triton.next_power_of_2(max(1, len(rows))), COLUMNS=COLUMNS, BLOCK=BLOCK, num_warps=8,
                            ALIGNED=all(x.data_ptr() % 16 == x.numel() % 16 == 0 for span in spans
                                        for x in span.tensors()))
        self.types = dict(MOMENT=TYPES[first.m.dtype], WEIGHT=TYPES[first.weights.dtype],
                          COPY=first.weights.dtype != torch.float32)

    def squared_norm(self) -> Tensor:
        """The sum of squares of the gradients that this rank owns: an fp32 scalar tensor."""
        partial = torch.zeros(self.programs, device=self.table.device)
        if self.programs:
            squares_kernel[(self.programs,)](self.table, len(self.table), partial, **self.options)
        return partial.sum()

    def update(self, factor: Tensor | float, found_inf: Tensor, steps: Tensor, *, lr: float, betas: tuple[float, float],
               eps: float, weight_decay: float) -> None:
        """Step number `steps` + 1 of AdamW, for gradients multiplied by `factor`. If found_inf is 1, it only zeroes
        gradients. All tensors are scalars."""
        corrections = [1 - beta ** (steps.double() + 1) for beta in betas]  # in fp32, 1 - 0.999 would have 4 digits
        scalars = torch.stack([torch.as_tensor(x, device=steps.device).double()
                               for x in (factor, found_inf, *corrections)]).float()
        if self.programs:
            adamw_kernel[(self.programs,)](self.table, len(self.table), scalars, lr, weight_decay, *betas, eps,
                                           **self.types, **self.options)


def addresses(spans: list[Span]) -> list[int]:
    """The gradients' addresses. Gradients may be reallocated: a table is valid while these stay the same."""
    return [span.grad.data_ptr() for span in spans]
