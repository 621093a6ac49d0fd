"""Muon: the update of a matrix is its momentum made orthogonal, which takes the whole matrix, not a shard of it.

Saves: the second moment of all matrices (4 of 18 bytes a parameter in bf16); and steps: about half as many as AdamW's,
       say Liu et al.
Costs: 5 iterations of three matmuls for each matrix and step, about 30 min(R, C) FLOPs per parameter, which its owner
       alone computes; and elements sent: at most P per direction, in 16 bits in a bf16 run.
Stops helping when: ranks are many and batches small, so that a step's matmuls do not hide it; or a few large matrices
       cannot be divided evenly among the owners. Tables of the vocabulary, biases and norms keep AdamW.

    momentum  M = mu M + (1 - mu) G           of each rank's shard; U = (1 - mu) G + mu M (Nesterov)
    Newton-Schulz, from X = U / |U|, 5 times:
              A = X X^T;  X = a X + (b A + c A A) X     moves each singular value towards 1: X -> about U V^T
    update    W = W - lr (0.2 sqrt(max(R, C)) X + decay W), an update as large as AdamW's, with its lr and decay

No rank has a whole matrix: ZeRO shards flat buckets, tensor parallelism rows or columns. To orthogonalise each shard
alone gives another update: in the demo it is 71% off on 2 ranks, 98% on 8. To gather every matrix everywhere repeats
its matmuls on all ranks. So each matrix has one owner among the ranks that share it, those of a pipeline stage:

    shards of U    rank 0 [a b c|d]   rank 1 [d e|f g]        before: each rank has a slice of all matrices
    all-to-all     rank 0 a d e       rank 1 b c f g          owners have whole matrices, and orthogonalise them
    all-to-all     rank 0 [a b c|d]   rank 1 [d e|f g]        after: each rank has its slice of all updates

Owners are chosen so that each has about the same FLOPs: the longest first, to the rank that has most of the matrix
of those with room for it, else to the one with the least to do. Experts are matrices of their own, gate and up as well.

Jordan et al. 2024 (Muon); Liu et al. 2025 (Muon is scalable for LLM training: decay, the factor 0.2 sqrt(max(R, C))).
Shapes: n ranks of the stage (data axis x tp), P parameters, R x C a whole matrix.
"""
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from collectives import ALONE, Group, all_to_all, run_demo
from param import Box, Spec, box_shape, boxes, local_box, shard_slice

MOMENTUM = 0.95
COEFFICIENTS = 3.4445, -4.7750, 2.0315  # a, b, c: the steepest at 0 that still keep singular values near 1
ITERATIONS = 5
STACKED = 2**24  # the most elements of equal matrices that are orthogonalised in one batched matmul


def kind_of(spec: Spec) -> str:
    """Muon updates matrices; it does not update vectors, nor tables of the vocabulary, whose rows are looked up."""
    return "vector" if len(spec.shape) == 1 else "matrix" if spec.matrices else "table"


def matrix_shape(spec: Spec) -> tuple[int, int]:
    """Of each of the spec.matrices equal matrices that are stacked in the parameter."""
    return math.prod(spec.shape[:-1]) // spec.matrices, spec.shape[-1]


def orthogonalize(x: Tensor) -> Tensor:
    """[k, R, C] -> about U V^T of each one's singular value decomposition U S V^T: singular values of 0.7 to 1.2, by
    Newton-Schulz iterations in the dtype of x."""
    a, b, c = COEFFICIENTS
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)  # sums are rounded once
    return x.mT if tall else x


def orthogonalize_flops(rows: int, columns: int) -> int:
    small, large = sorted((rows, columns))
    return ITERATIONS * (4 * small * small * large + 2 * small**3)


class Piece(NamedTuple):
    """A box of a matrix, and where its elements are in the shard of the rank that has them."""
    rank: int
    bucket: int
    place: slice
    box: Box


class Matrix(NamedTuple):
    """One of the matrices of a parameter, as the ranks of a stage have it. pieces: of all ranks; a box that several
    ranks have (replicated along an axis, or at level 0) is in several pieces."""
    shape: tuple[int, int]
    pieces: list[Piece]


def find_matrices(buckets: Sequence, peers: Sequence[Mapping[str, Group]]) -> list[Matrix]:
    """The matrices of a stage, in an order that all its ranks share. buckets: zero.ShardedBuckets of nothing else, laid
    out alike on all ranks; peers: the groups of each rank of the stage, as collectives.peers_of returns them."""
    found: dict[tuple[str, int], Matrix] = {}
    for number, bucket in enumerate(buckets):
        for rank, groups in enumerate(peers):
            axis = groups[bucket.group.axis] if bucket.level else ALONE
            shard = shard_slice(bucket.padded, axis.size, axis.rank)
            for param in bucket.params:
                spec, box = param.spec, local_box(param.spec, groups)
                shape, start = matrix_shape(spec), bucket.offset[param]
                first = box[0].start * spec.matrices // spec.shape[0]  # of the matrices that this rank has shards of
                inside = box if spec.matrices == 1 else tuple(slice(0, n) for n in shape)  # experts are sharded whole
                count = math.prod(box_shape(inside))
                low, high = max(shard.start, start), min(shard.stop, start + param.numel())
                for i in range((low - start) // count, -(-(high - start) // count)) if low < high else ():
                    matrix = found.setdefault((spec.name, first + i), Matrix(shape, []))
                    begin = start + i * count
                    place = max(low, begin)
                    for part in boxes(box_shape(inside), place - begin, min(high, begin + count) - begin):
                        whole = tuple(slice(own.start + s.start, own.start + s.stop) for own, s in zip(inside, part))
                        stop = place + math.prod(box_shape(whole))
                        matrix.pieces.append(
                            Piece(rank, number, slice(place - shard.start, stop - shard.start), whole))
                        place = stop
    return [found[key] for key in sorted(found)]


def choose_owners(matrices: Sequence[Matrix], n: int) -> list[int]:
    """The rank, of n, that orthogonalises each matrix."""
    costs, loads = [orthogonalize_flops(*matrix.shape) for matrix in matrices], [0] * n
    owners, mean = [0] * len(matrices), sum(costs) / n
    for i in sorted(range(len(matrices)), key=lambda i: -costs[i]):
        held = [0] * n
        for piece in matrices[i].pieces:
            held[piece.rank] += math.prod(box_shape(piece.box))
        room = [rank for rank in range(n) if loads[rank] + costs[i] <= mean]
        owners[i] = (max(room, key=lambda rank: (held[rank], -loads[rank])) if room else
                     min(range(n), key=lambda rank: (loads[rank], -held[rank])))
        loads[owners[i]] += costs[i]
    return owners


def senders(pieces: list[Piece], owner: int) -> list[Piece]:
    """One piece of each box: the owner's own, if it has the box, else that of the first rank that has it."""
    chosen: dict[str, Piece] = {}
    for piece in pieces:
        if piece.rank == owner:
            chosen[str(piece.box)] = piece
        chosen.setdefault(str(piece.box), piece)
    return list(chosen.values())


class Muon:
    """The update of all matrices of a pipeline stage. buckets: zero.ShardedBuckets of nothing else, whose state has
    "m", the momentum. group: the ranks of the stage. peers: see find_matrices."""
    state = ("m",)

    def __init__(self, buckets: Sequence, group: Group, peers: Sequence[Mapping[str, Group]]):
        self.buckets, self.group, first = buckets, group, buckets[0]
        self.device = first.device
        self.dtype = torch.bfloat16 if first.weights.itemsize == 2 else first.acc_dtype
        self.matrices = find_matrices(buckets, peers)
        self.owners = choose_owners(self.matrices, group.size)
        self.to_owners, self.from_owners = Exchange(group), Exchange(group)
        for i, (matrix, owner) in enumerate(zip(self.matrices, self.owners)):
            for piece in senders(matrix.pieces, owner):
                self.to_owners.add(i, piece, source=piece.rank, target=owner)
            for piece in matrix.pieces:
                self.from_owners.add(i, piece, source=owner, target=piece.rank)

    def update(self, grads: Sequence[Tensor], *, lr: float, weight_decay: float, found_inf: Tensor) -> Iterator[None]:
        """The master weights of all buckets, by the grads of their shards; nothing changes if found_inf is 1. At the
        `yield` momenta are on their way to the owners, under whatever the caller does meanwhile."""
        applied = found_inf == 0  # as the host does not read it, all is computed, and then not applied
        updates = [self.add_to_momentum(bucket, grad, applied) for bucket, grad in zip(self.buckets, grads)]
        nothing = updates[0][:0]  # what a rank sends that owns no matrix
        self.to_owners.start(nothing, lambda i, piece: updates[piece.bucket][piece.place])
        yield
        wholes = {i: nothing.new_empty(self.matrices[i].shape) for i, _ in self.to_owners.incoming()}
        self.to_owners.finish(lambda i, piece: wholes[i][piece.box])
        self.orthogonalize(wholes)
        self.from_owners.start(nothing, lambda i, piece: wholes[i][piece.box].flatten())
        self.from_owners.finish(lambda i, piece: updates[piece.bucket][piece.place])
        for bucket, update in zip(self.buckets, updates):
            update = update.to(bucket.master.device, bucket.acc_dtype)
            rate = lr * applied.to(update)
            bucket.master.mul_(1 - weight_decay * rate).sub_(update.mul_(rate))

    def add_to_momentum(self, bucket, grad: Tensor, applied: Tensor) -> Tensor:
        """-> the shard of U."""
        m = bucket.state["m"]
        grad = torch.where(applied, grad, m)  # if not applied, m does not change, and U is finite
        m.lerp_(grad, 1 - MOMENTUM)
        return grad.lerp_(m, MOMENTUM).to(self.device, self.dtype)

    def orthogonalize(self, wholes: dict[int, Tensor]) -> None:
        """Replace matrices by their scaled updates. Equal ones are multiplied together: experts are small."""
        alike = defaultdict(list)
        for i, whole in wholes.items():
            alike[whole.shape].append(i)
        for shape, own in alike.items():
            step = max(1, STACKED // math.prod(shape))
            for some in (own[start:start + step] for start in range(0, len(own), step)):
                results = orthogonalize(torch.stack([wholes.pop(i) for i in some]))
                wholes.update(zip(some, results.mul_(0.2 * max(shape)**0.5)))


class Exchange:
    """An all-to-all of pieces, flat and in one tensor: for each rank those of the first matrix first."""

    def __init__(self, group: Group):
        self.group = group
        self.sends, self.receives = ([[] for _ in range(group.size)] for _ in range(2))  # by rank: (matrix, piece)

    def add(self, matrix: int, piece: Piece, source: int, target: int) -> None:
        if source == self.group.rank:
            self.sends[target].append((matrix, piece))
        if target == self.group.rank:
            self.receives[source].append((matrix, piece))

    def incoming(self) -> list[tuple[int, Piece]]:
        return sum(self.receives, [])

    def start(self, nothing: Tensor, read: Callable[[int, Piece], Tensor]) -> None:
        """nothing: a tensor without elements. read: returns the values of a piece that this rank sends."""
        values = torch.cat([nothing, *(read(i, piece) for to_one in self.sends for i, piece in to_one)])
        splits = [[sum(math.prod(box_shape(piece.box)) for _, piece in pieces) for pieces in lists]
                  for lists in (self.receives, self.sends)]
        self.pending = all_to_all(nothing.new_empty(sum(splits[0])), values, *splits, self.group, async_op=True)

    def finish(self, place: Callable[[int, Piece], Tensor]) -> None:
        """place: returns the tensor that is to have the values of a piece that this rank receives."""
        values = self.pending.wait()
        del self.pending
        for (i, piece), part in zip(self.incoming(), values.split([math.prod(box_shape(piece.box))
                                                                   for _, piece in self.incoming()])):
            into = place(i, piece)
            into.copy_(part.view_as(into))


# ---- demo: python muon.py -------------------------------------------------------------------------------------------

def demo(group: Group) -> None:
    size, generator = 512, torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator) for _ in range(2))
    momentum = (a * torch.logspace(0, -3, size) @ b)[None]  # as of gradients: a few directions are much the largest
    whole = orthogonalize(momentum)
    for title, x in ("momentum", momentum), ("its update", whole):
        values = torch.linalg.svdvals(x)
        print(f"{title:12s} singular values from {values.min():.2g} to {values.max():.2g}")
    for t in 2, 4, 8:
        alone = torch.cat([orthogonalize(shard) for shard in momentum.chunk(t, dim=1)], dim=1)
        print(f"each shard of {t} ranks orthogonalised alone: {(alone - whole).norm() / whole.norm():.0%} off")
    shapes = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)]
    matrices = [Matrix(shape, []) for _ in range(32) for shape in shapes]
    for n in 8, 32, 64:
        loads = [0] * n
        for matrix, owner in zip(matrices, choose_owners(matrices, n)):
            loads[owner] += orthogonalize_flops(*matrix.shape)
        print(f"Llama 8B's matrices on {n:2d} owners: the busiest has {max(loads) * n / sum(loads):.2f} of the mean")


if __name__ == "__main__":
    run_demo(demo)
