"""How a parameter is sharded over the grid, and how it is initialised. How it receives its gradient: core/gradients.py.

Three words, in the order in which a parameter meets them:

Spec    A record that says what a parameter is. Initialisation, gradient reduction, gradient norm, weight decay and
        checkpoints all follow from it. An example, an [F, H] weight of which each tensor parallel rank has F/t rows:

            Spec("layers.7.ffn.w_up", shape=(F, H), along={"tp": 0}, std=0.02)

box     A block of the global tensor, one slice per dimension. With t = 2, the second rank's box of this weight is
        (slice(F/2, F), slice(0, H)).
source  A function (spec, box) -> tensor that returns the values of any box of any parameter. `draw` returns seeded
        random numbers; a checkpoint is another source. A rank asks only for boxes that it has.

Shapes: t tensor parallel ranks, K key and value heads, F ffn, H hidden.
"""
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from core.collectives import ALONE, Groups

Box = tuple[slice, ...]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
IGNORED = -100  # the label of a token that has no loss
# A product whose sum cuBLAS computes in parts is rounded once, not part by part.
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def check_labels(labels: Tensor, vocab_size: int) -> None:
    """Raise RuntimeError unless each label is a token of the vocabulary or IGNORED.

    The host does not wait for a GPU: there an assertion fails on the device, and a later call raises, as after torch's
    own cross entropy.
    """
    is_known = (labels >= 0) & (labels < vocab_size) | (labels == IGNORED)
    torch._assert_async(is_known.all(), f"a label is neither in 0..{vocab_size - 1} nor {IGNORED}, that of no loss")


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype, at least fp32, in which a run in `dtype` accumulates gradients, statistics, angles and losses."""
    return torch.promote_types(dtype, torch.float32)


# ---- Spec and box ---------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Spec:
    """How a parameter is sharded and initialised. `along` says how it lies on the ranks of an axis, as DTensor says it:

        along                  parameter    gradient     an example
        {"tp": 0}              Shard(0)     Shard(0)     a column-parallel weight: each rank has different rows
        {"tp": "replicate"}    Replicate    Replicate    a norm's weight, if every rank has all tokens
        {"tp": "partial"}      Replicate    Partial      a norm's weight, if each rank has different tokens (sequence
                                                         parallelism): a rank's gradient is one term of the sum

    Axes are "tp"; "ep"; "tie", the first and the last pipeline stage, which share a tied embedding; and of wk and wv in
    place of "tp", if t > K: "kv", which head (0 0 1 1 on 4 tp ranks if K = 2), and "kv_copy", which copy of it (0 1 0
    1). The data axis is not in `along`: before ZeRO a parameter is replicated on its ranks, its gradient partial.
    """
    name: str  # global: the same on every grid
    shape: tuple[int, ...]  # of the global tensor
    along: dict[str, int | str] = field(default_factory=dict)
    data_axis: str = "dp"  # the axis that ZeRO shards it over; of experts "edp": see core/groups.py
    decay: bool = True  # whether weight decay applies
    mean: float = 0.0  # of the normal distribution that initial values are drawn from
    std: float = 0.0  # 0: all initial values are `mean`
    matrices: int = 1  # how many equal matrices it is a stack of, along the first dimensions; 0: no matrix to muon.py

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """The axes over which the gradient has to be summed, besides the data axis."""
        return tuple(axis for axis, how in self.along.items() if how == "partial")

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """The axes along which all ranks have the same elements."""
        return tuple(axis for axis, how in self.along.items() if how in ("replicate", "partial"))


def shard_slice(n: int, shards: int, index: int) -> slice:
    """Shard `index` of n items, in order, in shards whose sizes differ by at most one."""
    return slice(index * n // shards, (index + 1) * n // shards)


def local_box(spec: Spec, groups: Groups) -> Box:
    """The box of the parameter that this rank has."""
    box = [slice(0, n) for n in spec.shape]
    for axis, dim in spec.along.items():
        if isinstance(dim, int):
            box[dim] = shard_slice(spec.shape[dim], groups.get(axis, ALONE).size, groups.get(axis, ALONE).rank)
    return tuple(box)


def most_elements(spec: Spec, groups: Groups) -> int:
    """How many elements the largest of all ranks' boxes has: a table's vocabulary need not divide evenly."""
    shards_of = {dim: groups.get(axis, ALONE).size for axis, dim in spec.along.items() if isinstance(dim, int)}
    return math.prod(-(-n // shards_of.get(dim, 1)) for dim, n in enumerate(spec.shape))


def is_first_replica(spec: Spec, groups: Groups) -> bool:
    """Whether this rank, of those that have the same box (data axis aside), counts it in the norm and saves it."""
    return not any(groups.get(axis, ALONE).rank for axis in spec.replicated_axes)


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(s.stop - s.start for s in box)


def boxes(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Elements start..stop of a flattened box of a tensor with n dimensions, as at most 2n-1 boxes of it, in order. Of
    a matrix . . a a | b b b b | b b b b | c . . . the end of a row, complete rows, and the beginning of a row."""
    first_row, row_size = box[0].start, math.prod(box_shape(box[1:]))
    while start < stop:
        row, offset = divmod(start, row_size)
        if offset == 0 and start + row_size <= stop:  # complete rows
            last = stop // row_size
            yield (slice(first_row + row, first_row + last), *box[1:])
            start = last * row_size
        else:  # a part of one row
            end, this_row = min(stop, (row + 1) * row_size), slice(first_row + row, first_row + row + 1)
            yield from ((this_row, *columns) for columns in boxes(box[1:], offset, end - row * row_size))
            start = end


def pieces_within(part: slice, box: Box, begin: int) -> Iterator[tuple[Box, slice]]:
    """What the slice `part` of a flat tensor has of a flattened box that begins at `begin`: boxes, and where each is in
    the tensor. So a shard, which may begin and end inside a row, is loaded and saved without a gather."""
    place, stop = max(part.start, begin), min(part.stop, begin + math.prod(box_shape(box)))
    for piece in boxes(box, place - begin, stop - begin):  # none if no element of the box is in `part`
        count = math.prod(box_shape(piece))
        yield piece, slice(place, place + count)
        place += count


def parameter(spec: Spec, groups: Groups, dtype: torch.dtype, device: torch.device | str = "cpu") -> nn.Parameter:
    """A Parameter of the local shape without memory (one element, expanded), until its bucket allocates some."""
    box = local_box(spec, groups)
    param = nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(box_shape(box)))
    param.spec, param.box = spec, box
    param.sink = None  # until attach_sink: autograd's `.grad` collects the gradient
    param.generation = 0  # increases whenever the values may have changed: caches of what depends on them compare it
    return param


# ---- source: initial values -----------------------------------------------------------------------------------------

Source = Callable[[Spec, Box], Tensor]
DRAW_BLOCK = 2**20  # elements per generator, rounded down to whole rows; at least one row


def draw(seed: int) -> Source:
    """The source of random initial values: the same bits on every grid and device. The global tensor is divided into
    blocks of whole rows (a row: one index of the first dimension), and each block has its own generator, on the CPU. A
    rank draws whole blocks, one at a time, and copies the elements of its box: so each rank draws all of a weight that
    is sharded along columns."""
    def source(spec: Spec, box: Box) -> Tensor:
        if spec.std == 0:
            return torch.full(box_shape(box), spec.mean)
        out = torch.empty(box_shape(box), dtype=torch.float32)
        rows, *columns = box
        block = max(1, DRAW_BLOCK // math.prod(spec.shape[1:]))
        for first in range(rows.start // block * block, rows.stop, block):
            key = hashlib.sha256(f"{seed} {spec.name} {first}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key[3:7], "big"))  # CPUs take 32 bits of a seed
            last = min(first + block, spec.shape[0])
            values = torch.randn((last - first, *spec.shape[1:]), generator=generator, dtype=torch.float32)
            start, stop = max(first, rows.start), min(last, rows.stop)
            out[start - rows.start:stop - rows.start] = values[(slice(start - first, stop - first), *columns)]
        return out * spec.std + spec.mean
    return source
