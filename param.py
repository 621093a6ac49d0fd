"""A parameter's place on the grid, its first values, and the one door through which gradients reach it.

Everything the project does with a parameter follows from one record, its `Spec`, which says for every axis of the grid
how the ranks along that axis share it:

    cut    {"tp": 0}        each rank holds other rows                                  a column-parallel weight
    copy   {"tp": "copy"}   all hold the same, each computes the whole gradient         a norm, each with all tokens
    sum    {"tp": "sum"}    all hold the same, each computes a term of the gradient     a norm, each with some tokens

and over which data axis its gradient is summed and its optimizer state may be sharded ("dp", or "edp" for experts).
First values, reduction, gradient norm, weight decay, checkpoints and tests read the record; nothing restates it.

Axes with names of their own: "tie" joins the first and the last pipeline stage, which share one table; "mirror" joins
two ranks that hold the same stage; "kv" and "kv_copy" split the tensor parallel ranks where there are more of them than
key and value heads; "edp" is what is left of the data parallel ranks once experts are dealt out.

Values come in and go out as boxes of the global tensor. A *source* is a function (spec, box) -> tensor that yields any
box of any parameter: `draw` (seeded random numbers) is one, a checkpoint and a file of published weights are others.
So no rank ever builds more of a parameter than it holds.

Gradients of big weights are added, not assigned: a matmul can add its result to a buffer without a temporary, and a
pipeline schedule wants to compute weight gradients later than input gradients. Both need that a layer says *how* to add
and somebody else decides *where* and *when*. That is the door, `accumulate_grad`:

    layer's backward --add(out)--> accumulate_grad --now, or queued until backward_weight--> a flat bucket, or .grad

The bucket, called the parameter's *sink*, hears of every parameter once per backward pass: `sink.ready(param)`.
"""
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge

Box = tuple[slice, ...]  # a rectangular part of a global tensor, one slice a dimension
Groups = dict[str, dist.ProcessGroup | None]  # by axis; this rank's coordinate on an axis is its rank in the group
IGNORED = -100  # the label of a token that has no loss


def size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype of whatever must not be rounded to 16 bits: sums of gradients, statistics, angles, losses."""
    return torch.promote_types(dtype, torch.float32)


# ---- the record -----------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Spec:
    """Where a parameter lives and how it begins.

    name: canonical and global, such as "layers.7.attention.wq", the same whatever the grid.
    shape: of the whole parameter.
    along: axis -> dimension it is cut on | "copy" | "sum", for the axes of the grid that share it (see above).
    data: the axis whose ranks see other tokens and each compute a term of the gradient.
    decay: whether weight decay applies.
    mean, std: of the normal distribution it is drawn from; a gain begins at mean 1, std 0.
    """
    name: str
    shape: tuple[int, ...]
    along: dict[str, int | str] = field(default_factory=dict)
    data: str = "dp"
    decay: bool = True
    mean: float = 0.0
    std: float = 0.0

    @property
    def sums(self) -> tuple[str, ...]:
        return tuple(axis for axis, how in self.along.items() if how == "sum")

    @property
    def copies(self) -> tuple[str, ...]:
        """The axes along which several ranks hold the same elements."""
        return tuple(axis for axis, how in self.along.items() if how in ("sum", "copy"))


def cut(n: int, parts: int, index: int) -> slice:
    """Part `index` when n things are dealt to `parts` ranks in order; parts differ by at most one."""
    return slice(index * n // parts, (index + 1) * n // parts)


def box_of(spec: Spec, groups: Groups) -> Box:
    """The part of the parameter that this rank holds."""
    box = [slice(0, n) for n in spec.shape]
    for axis, dim in spec.along.items():
        if dim not in ("copy", "sum"):
            box[dim] = cut(spec.shape[dim], size(groups.get(axis)), rank(groups.get(axis)))
    return tuple(box)


def is_first_copy(spec: Spec, groups: Groups) -> bool:
    """Whether this rank counts and saves its part, of all those along the model's axes that hold the same elements."""
    return not any(rank(groups.get(axis)) for axis in spec.copies)


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(s.stop - s.start for s in box)


def parameter(spec: Spec, groups: Groups, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.nn.Parameter:
    """A Parameter with the local shape but no memory (one element, seen everywhere) until its bucket gives it some.

    It carries `spec`, `box` (the part it is), `sink` (who takes its gradient; None: autograd's own `.grad`) and
    `generation`, a number that changes with its values and with every step, for whoever keeps what was made of them.
    """
    box = box_of(spec, groups)
    param = torch.nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(shape_of(box)))
    param.spec, param.box, param.sink, param.generation = spec, box, None, 0
    return param


# ---- first values ---------------------------------------------------------------------------------------------------

Source = Callable[[Spec, Box], torch.Tensor]
DRAWN_TOGETHER = 2**20  # elements of one generator: a rank draws fewer in vain than that at either end of its box


def draw(seed: int) -> Source:
    """The source of random first values.

    They depend on the seed, the name and the place in the global tensor, and on nothing else: every block of rows has a
    generator of its own, always on the CPU. So each grid, on each device, begins with the same model to the bit.
    """
    def source(spec: Spec, box: Box) -> torch.Tensor:
        if spec.std == 0:
            return torch.full(shape_of(box), spec.mean)
        out, (wanted, *others) = torch.empty(shape_of(box)), box
        block = max(1, DRAWN_TOGETHER // math.prod(spec.shape[1:]))
        for first in range(wanted.start // block * block, wanted.stop, block):
            key = hashlib.sha256(f"{seed} {spec.name} {first}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
            values = torch.randn((min(block, spec.shape[0] - first), *spec.shape[1:]), generator=generator)
            start, stop = max(first, wanted.start), min(first + block, wanted.stop)
            out[start - wanted.start:stop - wanted.start] = values[start - first:stop - first][(slice(None), *others)]
        return out * spec.std + spec.mean
    return source


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The elements start..stop of an n-dimensional array in C order, as at most 2n-1 boxes, in order.

    A matrix gives the end of a first row, whole rows, and the beginning of a last row. This is how a flat shard, which
    begins and ends anywhere, enters and leaves a checkpoint without a gather.
    """
    if start == stop:
        return
    if len(shape) == 1:
        yield (slice(start, stop),)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows are first..last
    if first > last:  # it begins and ends inside one row
        yield from ((slice(last, first), *box) for box in boxes(shape[1:], start - last * row, stop - last * row))
        return
    if start < first * row:
        yield from ((slice(first - 1, first), *box) for box in boxes(shape[1:], start - (first - 1) * row, row))
    if first < last:
        yield (slice(first, last), *(slice(0, n) for n in shape[1:]))
    if last * row < stop:
        yield from ((slice(last, last + 1), *box) for box in boxes(shape[1:], 0, stop - last * row))


# ---- the door -------------------------------------------------------------------------------------------------------

Key = tuple[int, int]  # (stage, micro-batch)


class Sink(Protocol):
    """Whoever collects gradients: a flat bucket."""

    def main_grad(self, param: torch.nn.Parameter) -> torch.Tensor:
        """Where to add. Asked for at every use, since a sink may change buffers while a reduction is in flight."""

    def ready(self, param: torch.nn.Parameter) -> None:
        """A backward pass has added everything it has for `param`."""


_splitting: Key | None = None  # set while a backward computes input gradients only. Not thread-local: on CUDA autograd
#                                runs backward functions on threads of its own.
_queue: dict[Key, dict[tuple[torch.nn.Parameter, ...], list[Callable[[torch.Tensor], None]]]] = {}


def accumulate_grad(params: torch.nn.Parameter | tuple[torch.nn.Parameter, ...], add: Callable[[torch.Tensor], None],
                    defer: bool = True) -> None:
    """The door: `add(out)` adds the gradient of one use of `params` into `out`, now or when backward_weight says so.

    params: a parameter, or a tuple of matrices with equally long rows that share an input (queries, keys, values),
        which get their gradient in one piece: `out` is all of them, below each other.
    add: called without autograd. It must not hold tensors that require gradients, or the graph lives as long as it.
    defer: False for what must not outlive its backward (a head's logits are larger than everything else).
    """
    params = params if isinstance(params, tuple) else (params,)
    if deferring(defer):
        _queue[_splitting].setdefault(params, []).append(add)
    else:
        add_to(params, add)


def deferring(defer: bool = True) -> bool:
    """Whether a gradient that enters the door now is computed later, and its inputs kept until then."""
    return defer and _splitting is not None


def add_to(params: tuple[torch.nn.Parameter, ...], add: Callable[[torch.Tensor], None]) -> None:
    outs = [main_grad(param) for param in params]
    out = stacked(outs)
    if out is not None:
        add(out)
        return
    out = torch.zeros((sum(o.shape[0] for o in outs), *outs[0].shape[1:]), dtype=outs[0].dtype, device=outs[0].device)
    add(out)
    for target, part in zip(outs, out.split([o.shape[0] for o in outs])):
        target.add_(part)


def main_grad(param: torch.nn.Parameter) -> torch.Tensor:
    if param.sink is not None:
        return param.sink.main_grad(param)
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return param.grad


def stacked(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """Tensors with equal rows as one view, first above second; None unless they lie so, side by side in one buffer."""
    first, end = tensors[0], tensors[0].storage_offset()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and tensor.storage_offset() == end and tensor.is_contiguous()):
            return None
        end += tensor.numel()
    return first.as_strided((sum(t.shape[0] for t in tensors), *first.shape[1:]), first.stride())


def add_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """out += a b. In bf16 runs out is fp32: on GPUs the matmul adds to it, elsewhere each product is rounded once."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif out.is_cuda and out.dtype == torch.float32:
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)  # torch.addmm takes no out_dtype with out
    else:
        out.add_(a @ b)


def watch(param: torch.nn.Parameter, sink: Sink) -> None:
    """From now on `sink` takes the gradient of `param`, whichever way it comes: through the door or from autograd."""
    param.sink = sink
    param.register_post_accumulate_grad_hook(arrived)  # which holds no sink: the collector cannot see inside hooks


def arrived(param: torch.nn.Parameter) -> None:
    """Autograd calls this once in a backward pass, after the parameter's last use, also when every use gave None."""
    if param.grad is not None:
        param.sink.main_grad(param).add_(param.grad)
        param.grad = None
    queued = _queue.get(_splitting, ())
    if not any(param is other for params in queued for other in params):
        param.sink.ready(param)


def backward_input(key: Key, output: GradientEdge | torch.Tensor, grad: torch.Tensor | None) -> None:
    """The first half of a split backward: gradients of inputs now, of weights that come through the door later."""
    global _splitting
    assert key not in _queue, f"stage and micro-batch {key} already wait for their weight gradients"
    _splitting, _queue[key] = key, {}
    try:
        torch.autograd.backward(output, grad)
    finally:
        _splitting = None


@torch.no_grad()  # autograd is not running here: without this every gradient would begin a graph that nobody ends
def backward_weight(key: Key) -> None:
    """The second half: the weight gradients that backward_input left behind."""
    queue = _queue.pop(key)
    for params, adds in queue.items():
        while adds:
            add_to(params, adds.pop(0))  # popped, so that activations are freed one by one
    for param in dict.fromkeys(param for params in queue for param in params):
        if param.sink is not None:
            param.sink.ready(param)


def waiting() -> list[Key]:
    """The (stage, micro-batch) whose weight gradients are still to come: none, after a step."""
    return list(_queue)
