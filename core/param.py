"""How a parameter is sharded over the grid, and how it gets its initial values.

One example, wq of a model with 2 heads of size 3 and a hidden size of 4, on --tp 2 --dp 2 --zero 1:

    Spec("layers.0.attention.wq", shape=(6, 4), along={"tp": 0}, std=0.02)      its record, the same on every rank

             tensor parallelism      ZeRO flattens the boxes of a bucket one after the other, and cuts the bucket into
             cuts the rows           equal shards without regard to rows. Here the bucket has only wq.
    row 0    . . . .
    row 1    . . . .   tp rank 0
    row 2    . . . .
    row 3    x x x x                 a a a a
    row 4    x x x x   tp rank 1     a a b b       a: the shard of dp rank 0
    row 5    x x x x                 b b b b       b: the shard of dp rank 1

    (slice(3, 6), slice(0, 4))                     the box of tp rank 1

    source(spec, (slice(4, 5), slice(2, 4)))       the calls by which tp rank 1, dp rank 1 gets the initial values of
    source(spec, (slice(5, 6), slice(0, 4)))       its shard b: the end of row 4, and all of row 5

Spec        A record that says what a parameter is. Its initial values, the reduction and norm of its gradient, weight
            decay and checkpoints all follow from it.
box         A block of a global tensor: one slice per dimension. A rank's box is its part of the parameter.
source      A function (spec, box) -> tensor that returns the values of any box of any parameter: draw(seed), or a
            checkpoint. So a checkpoint of one grid loads on any other. A rank asks only for the elements of its shard.
            If it needs whole weights, an all-gather then brings the shards of the other ranks (zero.py).

core/gradients.py says how a parameter receives its gradient.
"""
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from core.collectives import ALONE, Group, Groups, run_demo

Box = tuple[slice, ...]


# ---- Spec -----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Spec:
    """How a parameter is sharded and initialised.

    `along` says how the parameter and its gradient lie on the ranks of each axis. Placements are named as in DTensor;
    "partial" names the gradient's placement:

        along                  parameter    gradient     an example
        {"tp": 0}              Shard(0)     Shard(0)     a column-parallel weight: each rank has different rows
        {"tp": "replicate"}    Replicate    Replicate    a norm's weight, if every rank has all tokens
        {"tp": "partial"}      Replicate    Partial      a norm's weight, if each rank has different tokens (sequence
                                                         parallelism): a rank's gradient is one term of the sum

    A parameter may lie on two axes:

        {"tp": 0, "tie": "partial"}         a tied embedding: its rows are sharded over tp, and both the first and the
                                            last pipeline stage compute a term of its gradient
        {"kv": 0, "kv_copy": "partial"}     wk or wv, if there are more tp ranks than KV heads (heads of keys and
                                            values)

    The axes in `along`, all from core/groups.py:

        "tp", "ep"           tensor and expert parallelism
        "tie"                the first and the last pipeline stage
        "kv", "kv_copy"      the tp ranks, in two dimensions. With 2 KV heads on 4 tp ranks, the coordinate
                             on "kv" says which head a rank has (0 0 1 1), and the coordinate on "kv_copy" which copy
                             of this head (0 1 0 1). Each copy serves other query heads: its gradient is a term.

    The axis `data_axis` is not in `along`. Before ZeRO cuts anything, every parameter is Replicate on it, and its
    gradient is Partial.
    """
    name: str  # the same on every grid
    shape: tuple[int, ...]  # of the global tensor
    along: dict[str, int | str] = field(default_factory=dict)
    data_axis: str = "dp"  # the axis over which ZeRO shards it and reduce-scatters its gradient; "edp" for experts
    decay: bool = True  # whether weight decay applies
    mean: float = 0.0  # of the normal distribution from which initial values are drawn
    std: float = 0.0  # 0: all initial values are `mean`
    # For muon.py: how many matrices of the same shape are stacked in it, along the first dimensions. For example, 2E in
    # w_gate_up [E, 2F, H], which has a gate and an up projection for each of E experts. 0: an embedding or a head,
    # which Muon leaves to AdamW. The number has no meaning for vectors.
    matrices: int = 1

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """The axes over which the gradient has to be summed, besides `data_axis`."""
        return tuple(axis for axis, how in self.along.items() if how == "partial")

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """The axes along which all ranks have the same elements."""
        return tuple(axis for axis, how in self.along.items() if how in ("replicate", "partial"))


def parameter(spec: Spec, groups: Groups, dtype: torch.dtype, device: torch.device | str = "cpu") -> nn.Parameter:
    """Return the nn.Parameter for this rank's box. It has no memory of its own: one element is expanded to the shape.

    The parameter's bucket (dp.py, zero.py) allocates the memory later.
    """
    box = local_box(spec, groups)
    param = nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(box_shape(box)))
    param.spec, param.box = spec, box
    param.sink = None  # its bucket, set by attach_sink (core/gradients.py). Without one, gradients go to `.grad`
    param.generation = 0  # counts changes of the values, so that caches can see whether they are stale
    return param


# ---- box ------------------------------------------------------------------------------------------------------------

def local_box(spec: Spec, groups: Groups) -> Box:
    """Return the box of the parameter that this rank has."""
    box = [slice(0, n) for n in spec.shape]
    for axis, dim in spec.along.items():
        if isinstance(dim, int):
            group = groups.get(axis, ALONE)
            box[dim] = shard_slice(spec.shape[dim], group.size, group.rank)
    return tuple(box)


def shard_slice(n: int, shards: int, index: int) -> slice:
    """Return the slice of shard `index`, if n items are cut in order into shards. Their sizes differ by at most one."""
    return slice(index * n // shards, (index + 1) * n // shards)


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(side.stop - side.start for side in box)


def most_elements(spec: Spec, groups: Groups) -> int:
    """Return the number of elements of the largest box of any rank: a vocabulary need not divide evenly."""
    shape = list(spec.shape)
    for axis, dim in spec.along.items():
        if isinstance(dim, int):
            shape[dim] = math.ceil(spec.shape[dim] / groups.get(axis, ALONE).size)
    return math.prod(shape)


def is_first_replica(spec: Spec, groups: Groups) -> bool:
    """Return whether this rank is the first of the ranks that have its box, apart from the data axis.

    Only the first replica counts the box in the gradient norm, and saves it.
    """
    return not any(groups.get(axis, ALONE).rank for axis in spec.replicated_axes)


def boxes(box: Box, start: int, stop: int) -> list[Box]:
    """Return elements start..stop of a flattened box as boxes of the global tensor, in order.

    These are at most 2n-1 boxes for n dimensions. For a matrix: the end of a row, complete rows, the start of a row.

        . . a a
        b b b b       start = 2, stop = 13: boxes a, b, c
        b b b b
        c . . .

    A row is one index of the first dimension. In three dimensions it is a matrix. For a part of a row the function
    calls itself, on a box with one dimension less. In one dimension a row is one element, so every row is complete.
    """
    found = []
    first_row, row_size = box[0].start, math.prod(box_shape(box[1:]))
    while start < stop:
        row, offset = divmod(start, row_size)
        if offset == 0 and start + row_size <= stop:  # complete rows
            last = stop // row_size
            found.append((slice(first_row + row, first_row + last), *box[1:]))
            start = last * row_size
        else:  # a part of one row
            end = min(stop, (row + 1) * row_size)
            this_row = slice(first_row + row, first_row + row + 1)
            for rest in boxes(box[1:], offset, end - row * row_size):
                found.append((this_row, *rest))
            start = end
    return found


def pieces_within(part: slice, box: Box, begin: int) -> list[tuple[Box, slice]]:
    """Return the pieces of a flattened box that lie in slice `part` of a flat tensor.

    The flat tensor holds the box from element `begin` on. A piece is (box of the global tensor, its slice of the flat
    tensor). There are several, because `part` may begin and end inside a row.

    In zero.py and muon.py the flat tensor is a shard, and positions count from its start. A box that begins before the
    shard has a negative `begin`. zero.py loads and saves its own shard by these pieces, without a gather. muon.py lists
    the pieces of each matrix in the shards of all ranks. In the demo the flat tensor is a whole bucket, and `part` is a
    shard.
    """
    found = []
    place = max(part.start, begin)
    stop = min(part.stop, begin + math.prod(box_shape(box)))
    for piece in boxes(box, place - begin, stop - begin):  # none if stop <= place
        count = math.prod(box_shape(piece))
        found.append((piece, slice(place, place + count)))
        place += count
    return found


# ---- source ---------------------------------------------------------------------------------------------------------

Source = Callable[[Spec, Box], Tensor]
DRAW_BLOCK = 2**20  # elements per generator, rounded down to whole rows; at least one row


def draw(seed: int) -> Source:
    """Return the source of random initial values: the same bits on every grid and device.

    The global tensor is divided into blocks of whole rows (a row is one index of the first dimension). Each block has
    its own generator, on the CPU. A rank draws the blocks that overlap its box, one at a time, and
    copies its elements. If a weight is sharded by columns, the rank draws whole rows and keeps some
    of their columns.
    """
    def source(spec: Spec, box: Box) -> Tensor:
        if spec.std == 0:
            return torch.full(box_shape(box), spec.mean)
        out = torch.empty(box_shape(box), dtype=torch.float32)
        rows, *columns = box
        block = max(1, DRAW_BLOCK // math.prod(spec.shape[1:]))  # rows
        for first in range(rows.start // block * block, rows.stop, block):
            key = hashlib.sha256(f"{seed} {spec.name} {first}".encode()).digest()
            # A generator on the CPU uses only 32 bits of its seed. Any four bytes of the hash would do, but other bytes
            # would change the initial values that belong to a --seed.
            generator = torch.Generator().manual_seed(int.from_bytes(key[3:7], "big"))
            last = min(first + block, spec.shape[0])
            values = torch.randn((last - first, *spec.shape[1:]), generator=generator, dtype=torch.float32)
            start, stop = max(first, rows.start), min(last, rows.stop)
            out[start - rows.start:stop - rows.start] = values[(slice(start - first, stop - first), *columns)]
        return out * spec.std + spec.mean
    return source


# ---- dtypes and labels, which many files share ----------------------------------------------------------------------
# They have nothing to do with sharding. They are here because most files that compute import this one.

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
# cuBLAS may compute the sum of a dot product in parts (split-K), and then add these parts in 16 bits. With these
# settings of the whole process, it adds them in fp32 and rounds only the result.
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
IGNORED = -100  # the label of a token that has no loss


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for long sums in a run with weights of `dtype`: fp64 in fp64 runs, and fp32 in all others.

    The sums are gradients, losses and the statistics of norms. The angles of the rotary embedding have this dtype, too.
    """
    return torch.promote_types(dtype, torch.float32)


def check_labels(labels: Tensor, vocab_size: int) -> None:
    """Raise RuntimeError unless each label is a token of the vocabulary or IGNORED.

    The assertion is evaluated on the device, so the host does not wait for the GPU. There it is a later call that
    raises, as with torch's own cross entropy.
    """
    is_known = (labels >= 0) & (labels < vocab_size) | (labels == IGNORED)
    torch._assert_async(is_known.all(), f"a label is neither in 0..{vocab_size - 1} nor {IGNORED} (no loss)")


# ---- demo: python -m core.param -------------------------------------------------------------------------------------

def demo(group: Group) -> None:
    """Show who asks the source for which boxes in the example of the docstring, and whether the values are right."""
    spec = Spec("layers.0.attention.wq", shape=(6, 4), along={"tp": 0}, std=0.02)
    source = draw(seed=0)
    whole = source(spec, (slice(0, 6), slice(0, 4)))  # as one process would draw it
    print(f"{spec.name} {list(spec.shape)}, {spec.along}, on tp 2 x dp 2 with ZeRO\n")
    values = torch.zeros(spec.shape)
    for tp_rank in range(2):
        groups = {"tp": SimpleNamespace(size=2, rank=tp_rank)}
        param = parameter(spec, groups, torch.float32)
        print(f"tp rank {tp_rank} has the box {shown(param.box)} and a parameter of the shape {list(param.shape)}")
        for dp_rank in range(2):
            shard = shard_slice(param.numel(), 2, dp_rank)  # of the flat bucket, in which wq begins at element 0
            print(f"    dp rank {dp_rank} has elements {shard.start}:{shard.stop} of it, and asks for")
            for box, place in pieces_within(shard, param.box, begin=0):
                values[box] = source(spec, box)
                print(f"        wq{shown(box)}, which are elements {place.start}:{place.stop}")
    print(f"\nAll pieces together are equal to the tensor of one process: {torch.equal(values, whole)}")


def shown(box: Box) -> str:
    """Return a box in Python's notation for an index, such as "[3:6, 0:4]"."""
    return f"[{', '.join(f'{side.start}:{side.stop}' for side in box)}]"


if __name__ == "__main__":
    run_demo(demo)
