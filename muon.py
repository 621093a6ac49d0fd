"""Muon: the update of a matrix is its momentum made orthogonal, which takes the whole matrix, not a shard of it.

Saves: the second moment of all matrices (4 of 18 bytes a parameter in bf16); and steps: about half as many as AdamW's,
       say Liu et al.
Costs: 5 iterations of three matmuls for each matrix and step, 20 to 30 min(R, C) FLOPs per parameter, by its owner
       alone; in each of two all-to-alls a rank sends about P/n elements with ZeRO, without it up to P in the second, in
       bf16 in 16-bit runs; meanwhile 3 more elements of memory per element of the shard, and 1 per element owned
       (plan/memory.py).
Stops helping when: batches are so small that these FLOPs are no longer few beside those of forward and backward; or a
       few large matrices cannot be divided evenly. Embedding, head, biases and norms keep AdamW.

    momentum  M = mu M + (1 - mu) G           of each rank's shard; N = (1 - mu) G + mu M (Nesterov)
    Newton-Schulz, from X = N / |N|, 5 times:
              Y = X X^T;  X = a X + (b Y + c Y Y) X     moves singular values towards 1: N = U S V^T -> about U V^T
    update    W = W - lr (0.2 sqrt(max(R, C)) X + decay W), an update as large as AdamW's, with its lr and decay

ZeRO and tensor parallelism cut matrices. To orthogonalise each shard alone gives another update: in the demo it is 71%
off on 2 ranks, 98% on 8. To gather every matrix everywhere repeats its matmuls on all ranks. So each matrix has one
owner, of the n ranks of the axis "muon": all of dp x cp x tp that have the same stages (at ZeRO level 0, too, where dp
ranks have copies and share the work). With --dp-replicate each replica does this work for itself.

    flat bucket    [a a b b c|c d d e e]      cut by ZeRO for 2 ranks: each has a half of matrix c
    shards of N    rank 0 a b c'   rank 1 c" d e
    all-to-all     rank 0 a b      rank 1 c d e    owners have whole matrices, and orthogonalise them
    all-to-all     rank 0 a b c'   rank 1 c" d e   each rank has the updates of its shard

The first all-to-all overlaps with AdamW's updates, the second with nothing. Owners are chosen so that each has about
the same FLOPs: the largest matrix first, to the rank that has most of it, among those whose load does not exceed the
mean; if there is none, to that with the least. Each expert's gate, up and down projections are matrices of their own.

Jordan et al. 2024 (Muon); Liu et al. 2025 (Muon is scalable for LLM training: decay, the factor 0.2 sqrt(max(R, C))).
Shapes: n ranks of the axis "muon", P parameters in the matrices of a pipeline rank, R x C a whole matrix.
"""
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.collectives import ALONE, Group, Pending, all_to_all, run_demo
from core.config import OPTIMIZERS
from core.param import Box, Spec, box_shape, local_box, pieces_within, shard_slice
from optimizers import StepScalars

MOMENTUM = 0.95
COEFFICIENTS = 3.4445, -4.7750, 2.0315  # a, b, c by Jordan: steepest at 0, and singular values stay near 1
ITERATIONS = 5
STACKED = 2**24  # the most elements of equal matrices that are orthogonalised in one batched matmul


def kind_of(spec: Spec) -> str:
    """Muon updates matrices, not vectors, nor tables (embedding and head). Each kind has its own buckets: vectors are
    so small that one bucket has a whole stage's, and is complete only when backward ends; a table in it would wait."""
    return "vector" if len(spec.shape) == 1 else "matrix" if spec.matrices else "table"


def matrix_shape(spec: Spec) -> tuple[int, int]:
    """The shape of each of the spec.matrices equal matrices that are stacked in the parameter."""
    return math.prod(spec.shape[:-1]) // spec.matrices, spec.shape[-1]


def orthogonalize(x: Tensor) -> Tensor:
    """[k, R, C] -> about U V^T of each one's singular value decomposition U S V^T, by Newton-Schulz iterations in the
    dtype of x: singular values near 0.7 to 1.2, except those below about 1/600 of the norm."""
    a, b, c = COEFFICIENTS
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # fused: sums are rounded once
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def replace_by_updates(whole: dict[Hashable, Tensor]) -> None:
    """Replace each N by 0.2 sqrt(max(R, C)) X. Matrices of a shape are multiplied together: experts are small."""
    alike = defaultdict(list)
    for name, matrix in whole.items():
        alike[matrix.shape].append(name)
    for shape, names in alike.items():
        most = max(1, STACKED // math.prod(shape))
        for some in (names[start:start + most] for start in range(0, len(names), most)):
            results = orthogonalize(torch.stack([whole.pop(name) for name in some]))
            whole.update(zip(some, results.mul_(0.2 * max(shape)**0.5)))


def orthogonalize_flops(rows: int, columns: int) -> int:
    small, large = sorted((rows, columns))
    return ITERATIONS * (4 * small * small * large + 2 * small**3)


class Piece(NamedTuple):
    """A box of a matrix, and where its elements are in the shard of the rank that has them. Of a matrix a shard has at
    most 3 boxes: the end of a row, complete rows, the beginning of a row (param.pieces_within)."""
    matrix: tuple[str, int]
    box: Box
    rank: int
    bucket: int
    place: slice

    @property
    def numel(self) -> int:
        return self.place.stop - self.place.start


class Matrix(NamedTuple):
    """One of the matrices of a parameter, and its pieces on all ranks of the group. A box that several ranks have
    (replicated along an axis, or at level 0) is as many pieces: one is sent to the owner, all get the update."""
    name: tuple[str, int]  # of the parameter; the matrix's number in it
    shape: tuple[int, int]
    pieces: list[Piece]


def local_matrices(spec: Spec, groups: Mapping) -> Iterator[tuple[int, Box]]:
    """What a rank has of each matrix of a parameter before ZeRO cuts it: (number, box of the matrix), in the order of
    the bucket. Only experts are stacked (w_gate_up [E, 2F, H] is 2E [F, H]), and only ep cuts them, between experts."""
    box = local_box(spec, groups)
    if spec.matrices == 1:  # tp may have sharded it
        yield 0, box
        return
    per_expert = spec.matrices // spec.shape[0]  # whole ones
    for number in range(box[0].start * per_expert, box[0].stop * per_expert):
        yield number, tuple(slice(0, n) for n in matrix_shape(spec))


def find_matrices(buckets: Sequence, peers: Sequence[Mapping]) -> list[Matrix]:
    """The matrices of a pipeline rank, which all ranks of its axis "muon" list alike, without communication. buckets:
    zero.py's ShardedBuckets of matrices alone, laid out alike on these ranks: `numel` elements in equal shards over
    `group` (at level 0 in one), a parameter from its `offset`. peers: for each of these ranks axis -> the size of its
    group on that axis and its rank in it, by groups.peers_of."""
    found: dict[tuple[str, int], Matrix] = {}
    for index, bucket in enumerate(buckets):
        for rank, places in enumerate(peers):
            shards = places[bucket.group.axis] if bucket.is_sharded else ALONE
            shard = shard_slice(bucket.numel, shards.size, shards.rank)
            for param in bucket.params:
                begin = bucket.offset[param] - shard.start  # of a matrix, in the shard; perhaps before it, or after
                for number, box in local_matrices(param.spec, places):
                    name = param.spec.name, number
                    matrix = found.setdefault(name, Matrix(name, matrix_shape(param.spec), []))
                    for piece, place in pieces_within(slice(0, shard.stop - shard.start), box, begin):
                        matrix.pieces.append(Piece(name, piece, rank, index, place))
                    begin += math.prod(box_shape(box))
    return [found[name] for name in sorted(found)]


def choose_owners(matrices: Sequence[Matrix], n: int) -> list[int]:
    """The rank, of n, that orthogonalises each matrix: see the rule above."""
    costs, loads = [orthogonalize_flops(*matrix.shape) for matrix in matrices], [0] * n
    owners, mean = [0] * len(matrices), sum(costs) / n
    for i in sorted(range(len(matrices)), key=lambda i: -costs[i]):
        held = [0] * n
        for piece in matrices[i].pieces:
            held[piece.rank] += piece.numel
        room = [rank for rank in range(n) if loads[rank] + costs[i] <= mean]
        owners[i] = (max(room, key=lambda rank: (held[rank], -loads[rank])) if room else
                     min(range(n), key=lambda rank: (loads[rank], -held[rank])))
        loads[owners[i]] += costs[i]
    return owners


def senders(pieces: list[Piece], owner: int) -> list[Piece]:
    """Return one piece of each box: the owner's own if it has the box, else the nearest rank's."""
    nearest: dict[tuple, Piece] = {}
    for piece in pieces:
        box = tuple((side.start, side.stop) for side in piece.box)
        if box not in nearest or abs(piece.rank - owner) <= abs(nearest[box].rank - owner):
            nearest[box] = piece
    return list(nearest.values())


class Muon:
    """The update of all matrices of a pipeline rank. What is computed between start and finish hides an all-to-all.

    buckets, peers: see find_matrices. `master` and state["m"], the momentum, of a bucket are this rank's shards, in the
    dtype of gradients. group: the axis "muon".
    """
    state = OPTIMIZERS["muon"]

    def __init__(self, buckets: Sequence, group: Group, peers: Sequence[Mapping], weight_decay: float):
        assert len(peers) == group.size and all(param.spec.decay for bucket in buckets for param in bucket.params)
        self.buckets, self.group, self.weight_decay, first = buckets, group, weight_decay, buckets[0]
        # From start to finish: N of this rank's shards, and whether the step is applied.
        self.shards: list[Tensor] | None = None
        self.applied: Tensor | None = None
        self.matrices = find_matrices(buckets, peers)
        self.owners = choose_owners(self.matrices, group.size)
        dtype = torch.bfloat16 if first.weights.itemsize == 2 else first.acc_dtype
        self.to_owners, self.from_owners = (Exchange(group, dtype, first.device) for _ in range(2))
        for matrix, owner in zip(self.matrices, self.owners):
            pieces = senders(matrix.pieces, owner)
            assert sum(piece.numel for piece in pieces) == math.prod(matrix.shape)
            for piece in pieces:
                self.to_owners.add(piece, source=piece.rank, target=owner)
            for piece in matrix.pieces:
                self.from_owners.add(piece, source=owner, target=piece.rank)

    def start(self, grads: Mapping[Any, Pending], step: StepScalars) -> None:
        """Update the momenta and start to send them to the owners.

        grads: bucket -> gradient of its shard, clipped and without a loss scale. If found_inf is 1 nothing changes: the
        host does not read it, so all is computed and then not applied.
        """
        self.applied = step.found_inf == 0
        self.shards = [self.add_to_momentum(bucket, grads[bucket].wait(), self.applied) for bucket in self.buckets]
        self.to_owners.start(lambda piece: self.shards[piece.bucket][piece.place])

    def finish(self, step: StepScalars) -> None:
        """Orthogonalise the matrices that this rank owns, send the updates back, and apply them to the shards."""
        shards, applied = self.shards, self.applied
        self.shards = self.applied = None  # they live until this returns
        whole = {matrix.name: shards[0].new_empty(matrix.shape) for matrix, owner in zip(self.matrices, self.owners)
                 if owner == self.group.rank}
        self.to_owners.finish(lambda piece: whole[piece.matrix][piece.box])
        replace_by_updates(whole)
        self.from_owners.start(lambda piece: whole[piece.matrix][piece.box])
        whole.clear()
        self.from_owners.finish(lambda piece: shards[piece.bucket][piece.place])
        for bucket, of_shard in zip(self.buckets, shards):
            update = of_shard.to(bucket.master.device, bucket.acc_dtype)
            rate = step.lr * applied.to(update)
            bucket.master.mul_(1 - self.weight_decay * rate).sub_(update.mul_(rate))
            bucket.update_weights()

    def add_to_momentum(self, bucket, grad: Tensor, applied: Tensor) -> Tensor:
        """Update this rank's shard of M. Return its shard of N, in the dtype and on the device of the exchange."""
        m = bucket.state["m"]
        grad = torch.where(applied, grad, m)  # a copy; if not applied, m does not change, and N is finite
        m.lerp_(grad, 1 - MOMENTUM)
        return grad.lerp_(m, MOMENTUM).to(self.to_owners.like)


class Exchange:
    """An all-to-all of pieces, flat and in one tensor: for each rank those of the first matrix first. `start` and
    `finish` take a function of a piece, which returns the view to send from, or to receive in."""

    def __init__(self, group: Group, dtype: torch.dtype, device: torch.device):
        self.group, self.like = group, torch.empty(0, dtype=dtype, device=device)  # like: of what is exchanged
        self.sends, self.receives = ([[] for _ in range(group.size)] for _ in range(2))  # by the other rank: pieces
        self.pending: Pending | None = None

    def add(self, piece: Piece, source: int, target: int) -> None:
        if source == self.group.rank:
            self.sends[target].append(piece)
        if target == self.group.rank:
            self.receives[source].append(piece)

    def start(self, view: Callable[[Piece], Tensor]) -> None:
        output_splits, input_splits = ([sum(piece.numel for piece in pieces) for pieces in by_rank]
                                       for by_rank in (self.receives, self.sends))
        # like: a rank may have nothing to send, and cat takes no empty list
        values = torch.cat([self.like, *(view(piece).flatten() for piece in sum(self.sends, []))])
        received = self.like.new_empty(sum(output_splits))
        self.pending = all_to_all(received, values, output_splits, input_splits, self.group, async_op=True)

    def finish(self, view: Callable[[Piece], Tensor]) -> None:
        incoming = sum(self.receives, [])
        values = self.pending.wait().split([piece.numel for piece in incoming])
        for piece, value in zip(incoming, values):
            into = view(piece)
            into.copy_(value.view_as(into))


# ---- demo: python muon.py -------------------------------------------------------------------------------------------

def demo(group: Group) -> None:
    size, generator = 512, torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator, dtype=torch.float64) for _ in range(2))
    momentum = (a * torch.logspace(0, -3, size, dtype=a.dtype) @ b)[None]  # like a gradient's: few directions dominate
    whole = orthogonalize(momentum)
    for title, x in ("momentum", momentum), ("its update", whole):
        values = torch.linalg.svdvals(x)
        low, middle, high = values.min(), values.median(), values.max()
        print(f"{title:12s} singular values from {low:.2g} to {high:.2g}, median {middle:.2g}")
    for t in 2, 4, 8:
        alone = torch.cat([orthogonalize(shard) for shard in momentum.chunk(t, dim=1)], dim=1)
        print(f"each shard of {t} ranks orthogonalised alone: {(alone - whole).norm() / whole.norm():.0%} off")


if __name__ == "__main__":
    run_demo(demo)
