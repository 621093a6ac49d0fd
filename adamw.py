"""AdamW in one pass over memory: unscale, clip, update, copy to 16 bits and zero the gradient, of all parameters.

An update computes some 15 FLOPs per parameter and is bound by memory. Once the norm of the whole gradient is known,
everything else needs one reading and one writing of each tensor. Bytes per parameter of a bf16 model at ZeRO level 0:

                                        one by one         here      here, with bf16 moments
    zero the gradient                        4               4                  4
    the gradient's norm                      4               4                  4
    unscale and clip                       4 + 4             -                  -
    AdamW: gradient, master, m, v       4 + 8 + 8 + 8   4 + 8 + 8 + 8     4 + 8 + 4 + 4
    copy to 16 bits                        4 + 2             2                  2
    together                                50              38                 30

One by one, bf16 moments take 24 more: torch's AdamW takes them in fp32 only, so they are copied there and back.

Two launches per step, one for the norm and one for the update, however many parameters and buckets there are: the
kernels read a table of spans (pointers, a length, whether they decay, whether this rank counts them), find their own
span in it, and take BLOCK of its elements. The norm is a sum of one partial sum per program, in a fixed order: no
atomics, the same bits in every run. No number comes to the host: a gradient that is not finite, `found_inf`, updates
nothing.

`--optimizer adamw-one-pass` takes it on a GPU. The reference, and the default until a GPU has compared them (`python
bench.py gpu --only variants`), is torch's fused AdamW, whose results are the same but for rounding.

Loshchilov & Hutter 2019 (AdamW); Rajbhandari et al. 2020 (flat shards). Shapes: everything is flat.
"""
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels import INTERPRETED, check

Tensor = torch.Tensor
BLOCK = 4096
COLUMNS = 8  # of the table: five addresses, the length, decays + 2 owned + 4 zeroes, the number of the first program
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class Span(NamedTuple):
    """Equally long flat tensors of a shard. master, grad: fp32. weights: 16 bits, or the master weights themselves.
    decays: by weight_decay. owned: this rank counts it in the norm. zeroes: the update zeroes the gradient."""
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
    """ALIGNED: addresses and lengths are multiples of 16, so that a thread may move 16 bytes at once."""
    pointer = tl.load(row + COLUMN).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def elements_of(row, block, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """(the indices of a program's elements in its span, which of them exist)."""
    i, count = block * BLOCK + tl.arange(0, BLOCK), tl.load(row + 5)
    if ALIGNED:
        count = tl.multiple_of(count, 16)
    return i, i < count


@triton.jit
def squares_kernel(table, spans, partial, SPANS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
                   ALIGNED: tl.constexpr):
    """A program sums the squares of BLOCK gradients, if this rank counts them. Moves 4 bytes per parameter."""
    row, block = find_span(table, spans, SPANS, COLUMNS)
    owned = (tl.load(row + 6) & 2) != 0
    i, inside = elements_of(row, block, BLOCK, ALIGNED)
    grad = tl.load(pointer_to(row, 1, tl.float32, ALIGNED) + i, owned & inside, other=0.0)
    tl.store(partial + tl.program_id(0), tl.sum(grad * grad, 0))


@triton.jit
def adamw_kernel(table, spans, scalars, lr, weight_decay, beta1, beta2, eps, MOMENT: tl.constexpr, WEIGHT: tl.constexpr,
                 COPY: tl.constexpr, SPANS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
                 ALIGNED: tl.constexpr):
    """A program updates BLOCK parameters. Moves 34 bytes per parameter; COPY: `weights` are not the master weights.
    scalars: what gradients are multiplied by, found_inf, and 1 - beta^t of both betas."""
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
    """The table of some spans, whose moments have one type and whose weights have one, and the kernels' launches."""

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
        spans = [span for span in spans if span.grad.numel()]
        rows, self.programs = [], 0
        for span in spans:
            flags = span.decays + 2 * span.owned + 4 * span.zeroes
            rows.append([*(x.data_ptr() for x in span.tensors()), span.grad.numel(), flags, self.programs])
            self.programs += triton.cdiv(span.grad.numel(), BLOCK)
        self.addresses = addresses(spans)
        self.table = torch.tensor(rows, dtype=torch.int64, device=first.grad.device).view(-1, COLUMNS)
        self.options = dict(SPANS=triton.next_power_of_2(max(1, len(rows))), COLUMNS=COLUMNS, BLOCK=BLOCK, num_warps=8,
                            ALIGNED=all(x.data_ptr() % 16 == x.numel() % 16 == 0 for span in spans
                                        for x in span.tensors()))
        self.types = dict(MOMENT=TYPES[first.m.dtype], WEIGHT=TYPES[first.weights.dtype],
                          COPY=first.weights.dtype != torch.float32)

    def squared_norm(self) -> Tensor:
        """The sum of the squared gradients that this rank owns; a scalar tensor."""
        partial = torch.zeros(self.programs, device=self.table.device)
        if self.programs:
            squares_kernel[(self.programs,)](self.table, len(self.table), partial, **self.options)
        return partial.sum()

    def update(self, factor: Tensor | float, found_inf: Tensor, steps: Tensor, *, lr: float, betas: tuple[float, float],
               eps: float, weight_decay: float) -> None:
        """AdamW's step number `steps` + 1, for gradients times `factor`. Where found_inf is 1 it only zeroes gradients.
        The tensors are scalars."""
        corrections = [1 - beta ** (steps.double() + 1) for beta in betas]  # in fp32, 1 - 0.999 would have 4 digits
        scalars = torch.stack([torch.as_tensor(x, device=steps.device).double()
                               for x in (factor, found_inf, *corrections)]).float()
        if self.programs:
            adamw_kernel[(self.programs,)](self.table, len(self.table), scalars, lr, weight_decay, *betas, eps,
                                           **self.types, **self.options)


def addresses(spans: list[Span]) -> list[int]:
    """Of the gradients, which may be allocated anew: a table is right as long as these are the same."""
    return [span.grad.data_ptr() for span in spans]
