"""How a parameter is sharded over the grid, how it is initialised, and how it receives its gradient.

Everything the project does with a parameter follows from one record, its `Spec`. For every axis of the grid it says how
the parameter lies on the ranks along that axis, in the terms of torch's DTensor:

    in `along`             DTensor                                   an example, on the tensor parallel axis
    {"tp": 0}              Shard(0)                                  a column-parallel weight: other rows on each rank
    {"tp": "replicate"}    Replicate, gradient Replicate             a norm's weight, where each rank sees all tokens
    {"tp": "partial"}      Replicate, gradient Partial: each rank    a norm's weight, where each rank sees some of the
                           has one term of a sum                     tokens (sequence parallelism)

It also names the data axis, over which gradients are summed and optimizer state may be sharded: "dp", or "edp" for
experts. Initialisation, gradient reduction, gradient norm, weight decay, checkpoints and tests all read the Spec;
nothing restates it.

Axes that are not among the five dimensions: "tie" joins the first and the last pipeline stage, which share a tied
embedding; "kv" and "kv_copy" split the tensor parallel ranks where they outnumber the key and value heads; "edp" is the
expert-data-parallel axis: the ranks that hold the same experts.

Values are read and written as boxes of the global tensor. A *source* is a function (spec, box) -> tensor that yields
any box of any parameter: `draw` (seeded random numbers) is one; checkpoints and published weights are others. So no
rank ever builds more of a parameter than it holds.

Gradients of large weights are accumulated in place, not assigned: a matmul can add its result to a buffer without a
temporary, and a pipeline schedule may want weight gradients later than input gradients. So a layer says *how* to add,
and somebody else decides *where* and *when*. Both meet in `accumulate_grad`, the one entry for gradients:

    layer's backward --add(out)--> accumulate_grad --now, or queued until backward_weight--> a flat bucket, or .grad

The bucket, called the parameter's *sink*, gets one call for every parameter and backward pass: `sink.ready(param)`.
"""
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.autograd.graph import GradientEdge

from collectives import Groups, rank, size

Box = tuple[slice, ...]  # a rectangular part of a global tensor, one slice a dimension
IGNORED = -100  # the label of a token that has no loss


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The accumulation dtype of a run in `dtype`, at least fp32: of gradients, statistics, angles and losses."""
    return torch.promote_types(dtype, torch.float32)


# ---- the record -----------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Spec:
    """How a parameter is sharded and initialised.

    name: canonical and global, such as "layers.7.attention.wq", the same on every grid.
    shape: of the whole parameter.
    along: axis -> the dimension it is sharded on, "replicate" or "partial", for the model's axes (see above).
    data_axis: the axis whose ranks see other tokens, so that each computes one term of the gradient.
    decay: whether weight decay applies.
    mean, std: of the normal distribution that initial values are drawn from; norm weights are initialised to 1.
    """
    name: str
    shape: tuple[int, ...]
    along: dict[str, int | str] = field(default_factory=dict)
    data_axis: str = "dp"
    decay: bool = True
    mean: float = 0.0
    std: float = 0.0

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """The axes over which the gradient has still to be summed, besides the data axis."""
        return tuple(axis for axis, how in self.along.items() if how == "partial")

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """The axes along which several ranks hold the same elements."""
        return tuple(axis for axis, how in self.along.items() if how in ("replicate", "partial"))


def shard_slice(n: int, shards: int, index: int) -> slice:
    """The place of shard `index` when n things are split in order into shards whose sizes differ by at most one."""
    return slice(index * n // shards, (index + 1) * n // shards)


def local_box(spec: Spec, groups: Groups) -> Box:
    """The part of the parameter that this rank holds."""
    box = [slice(0, n) for n in spec.shape]
    for axis, dim in spec.along.items():
        if dim not in ("replicate", "partial"):
            box[dim] = shard_slice(spec.shape[dim], size(groups.get(axis)), rank(groups.get(axis)))
    return tuple(box)


def is_first_replica(spec: Spec, groups: Groups) -> bool:
    """Whether this rank is the one that counts and saves its part, of all that hold the same along the model's axes."""
    return not any(rank(groups.get(axis)) for axis in spec.replicated_axes)


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(s.stop - s.start for s in box)


def parameter(spec: Spec, groups: Groups, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.nn.Parameter:
    """A Parameter of the local shape without memory (one element, expanded), until its bucket allocates some.

    It carries `spec`, `box` (the part that this rank holds), `sink` (what collects its gradient; None: autograd's own
    `.grad`) and `generation`, a number that changes whenever its values may have: caches of what was computed from them
    compare it.
    """
    box = local_box(spec, groups)
    param = torch.nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(box_shape(box)))
    param.spec, param.box, param.sink, param.generation = spec, box, None, 0
    return param


# ---- initial values -------------------------------------------------------------------------------------------------

Source = Callable[[Spec, Box], torch.Tensor]
DRAW_BLOCK = 2**20  # elements drawn by one generator: a rank draws fewer than these in vain at either end of its box


def draw(seed: int) -> Source:
    """The source of random initial values.

    A value depends on the seed, the parameter's name and its place in the global tensor, and on nothing else: every
    block of rows has its own generator, always on the CPU. So every grid, on every device, starts from the same bits.
    """
    def source(spec: Spec, box: Box) -> torch.Tensor:
        if spec.std == 0:
            return torch.full(box_shape(box), spec.mean)
        out, (wanted, *others) = torch.empty(box_shape(box), dtype=torch.float32), box
        block = max(1, DRAW_BLOCK // math.prod(spec.shape[1:]))
        for first in range(wanted.start // block * block, wanted.stop, block):
            key = hashlib.sha256(f"{seed} {spec.name} {first}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
            rows = min(block, spec.shape[0] - first)
            values = torch.randn((rows, *spec.shape[1:]), generator=generator, dtype=torch.float32)
            start, stop = max(first, wanted.start), min(first + block, wanted.stop)
            out[start - wanted.start:stop - wanted.start] = values[start - first:stop - first][(slice(None), *others)]
        return out * spec.std + spec.mean
    return source


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The elements start..stop of an n-dimensional array in C order, as at most 2n-1 boxes, in order.

    A range of a matrix is the end of a first row, whole rows, and the beginning of a last row. This is how a flat
    shard, which begins and ends anywhere, is loaded and saved without a gather.
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


# ---- the entry for gradients ----------------------------------------------------------------------------------------

Key = tuple[int, int]  # (pipeline stage, micro-batch)


class Sink(Protocol):
    """What collects the gradients of parameters: a flat bucket."""

    def main_grad(self, param: torch.nn.Parameter) -> torch.Tensor:
        """Where to add. Asked for at every use: a sink may change buffers while a reduction is in flight."""

    def ready(self, param: torch.nn.Parameter) -> None:
        """A backward pass has added all that it has for `param`."""


# Set while a backward computes input gradients only. A plain global, not thread-local: on CUDA, autograd runs backward
# functions on threads of its own.
_deferring: Key | None = None
_queue: dict[Key, dict[tuple[torch.nn.Parameter, ...], list[Callable[[torch.Tensor], None]]]] = {}


def accumulate_grad(params: torch.nn.Parameter | tuple[torch.nn.Parameter, ...], add: Callable[[torch.Tensor], None],
                    defer: bool = True) -> None:
    """Have `add(out)` add the gradient of one use of `params` into `out`: now, or when backward_weight runs.

    params: a parameter, or a tuple of matrices with equally long rows that share an input (queries, keys, values),
        which get their gradient in one piece: `out` is all of them, one below the other.
    add: called without autograd. It must not hold tensors that require gradients, or the graph lives as long as it.
    defer: False for what must not outlive its backward (a head's logits are larger than everything else).
    """
    params = params if isinstance(params, tuple) else (params,)
    if is_deferred(defer):
        _queue[_deferring].setdefault(params, []).append(add)
    else:
        add_now(params, add)


def is_deferred(defer: bool = True) -> bool:
    """Whether a gradient that is accumulated now is computed later, so that its inputs are kept until then."""
    return defer and _deferring is not None


def add_now(params: tuple[torch.nn.Parameter, ...], add: Callable[[torch.Tensor], None]) -> None:
    outs = [main_grad(param) for param in params]
    out = stacked_view(outs)
    if out is not None:
        add(out)
        return
    out = torch.zeros((sum(o.shape[0] for o in outs), *outs[0].shape[1:]), dtype=outs[0].dtype, device=outs[0].device)
    add(out)
    for target, part in zip(outs, out.split([o.shape[0] for o in outs])):
        target.add_(part)


def main_grad(param: torch.nn.Parameter) -> torch.Tensor:
    """The buffer in which the gradient is accumulated: the sink's, or `.grad` without a sink."""
    if param.sink is not None:
        return param.sink.main_grad(param)
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return param.grad


def stacked_view(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """Tensors with equal rows, one below the other, as one view; None unless they lie so in one buffer."""
    first, end = tensors[0], tensors[0].storage_offset()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and tensor.storage_offset() == end and tensor.is_contiguous()):
            return None
        end += tensor.numel()
    return first.as_strided((sum(t.shape[0] for t in tensors), *first.shape[1:]), first.stride())


def accumulate_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """out += a b. In 16-bit runs `out` is fp32: on GPUs the matmul adds to it, else each product is rounded once."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif out.is_cuda and out.dtype == torch.float32:
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)  # torch.addmm takes no out_dtype with out
    else:
        out.add_(a @ b)


def attach_sink(param: torch.nn.Parameter, sink: Sink) -> None:
    """From now on `sink` collects the gradient of `param`, from accumulate_grad and from autograd alike."""
    param.sink = sink
    param.register_post_accumulate_grad_hook(on_grad_accumulated)  # it holds no sink: gc cannot see inside hooks


def on_grad_accumulated(param: torch.nn.Parameter) -> None:
    """Autograd calls this once a backward pass, after the parameter's last use, even when every use returned None."""
    if param.grad is not None:
        param.sink.main_grad(param).add_(param.grad)
        param.grad = None
    queued = _queue.get(_deferring, ())
    if not any(param is other for params in queued for other in params):
        param.sink.ready(param)


def backward_input(key: Key, output: GradientEdge | torch.Tensor, grad: torch.Tensor | None) -> None:
    """The first half of a split backward: gradients of inputs now, those of weights (unless not deferred) later."""
    global _deferring
    assert key not in _queue, f"stage and micro-batch {key} already wait for their weight gradients"
    _deferring, _queue[key] = key, {}
    try:
        torch.autograd.backward(output, grad)
    finally:
        _deferring = None


@torch.no_grad()  # autograd is not running here: without this every gradient would begin a graph that nobody ends
def backward_weight(key: Key) -> None:
    """The second half: the weight gradients that backward_input has queued."""
    queue = _queue.pop(key)
    for params, adds in queue.items():
        while adds:
            add_now(params, adds.pop(0))  # popped, so that activations are freed one by one
    for param in dict.fromkeys(param for params in queue for param in params):
        if param.sink is not None:
            param.sink.ready(param)


def queued_keys() -> list[Key]:
    """The (stage, micro-batch) pairs whose weight gradients have not been computed: none, after a step."""
    return list(_queue)
