"""Muon: the update of a matrix is its momentum, made orthogonal. It needs the whole matrix, and ranks have shards.

    A flat bucket of five matrices, which ZeRO has cut in two: each rank has half of w3.

                          rank 0           rank 1
    gradient, momentum    w1  w2  w3'      w3" w4  w5       element by element, in the shards
    all-to-all                    w3' ──►  w3
    orthogonalise         w1  w2           w3  w4  w5       each matrix once, by its owner
    all-to-all                    w3' ◄──  w3
    update of weights     w1  w2  w3'      w3" w4  w5       element by element, in the shards

The momentum of a matrix usually has a few large singular values, so a step along it changes the weights in few
directions. Muon sets all singular values to about 1: if the momentum is U S V^T, the update is about U V^T. A few
matmuls compute this without a decomposition (Newton-Schulz iterations). For a matrix W of R x C, with its gradient G:

    M = mu M + (1 - mu) G                     momentum, mu = 0.95
    N = mu M + (1 - mu) G                     Nesterov's look ahead, with the new M
    X = N / |N|                               |N|: the Frobenius norm. So no singular value is above 1
    5 times     Y = X X^T
                X = a X + (b Y + c Y Y) X     moves each singular value s to a s + b s^3 + c s^5
    W = W - lr (0.2 sqrt(max(R, C)) X + decay W)      about as large as an AdamW update: lr and decay can be the same

Embedding, head, biases and norms keep AdamW (optimizers.py).

ZeRO and tensor parallelism cut matrices. Orthogonalising each shard on its own would be a different update: in the demo
it is 71% off on 2 ranks and 98% on 8. Gathering every matrix on every rank would repeat its matmuls n times. So each
matrix has one owner among the n ranks that share its pipeline stage: the axis "muon", shard x cp x tp. At ZeRO level 0
ranks hold copies, and share the work in the same way. With --dp-replicate each replica does all the work.

Shapes: n ranks of the axis "muon"; P parameters in the matrices of a pipeline rank's layers, over all its tp ranks;
R x C a whole matrix.

Saves: the second moment of all matrices, which is 4 of 18 bytes per parameter in a bf16 run (weight 2, gradient 4,
       master weight 4, two moments 8). Also steps: Liu et al. need about half as many as with AdamW.
Costs: 20 to 30 min(R, C) FLOPs per matrix parameter and step, computed only by the owner.
       Two all-to-alls, in bf16 in 16-bit runs. With ZeRO a rank sends about P/n elements in each. At level 0 it sends
       less in the first, because an owner may have a copy, and up to P in the second. The first overlaps with AdamW's
       updates, the second with nothing.
       Memory during the update, in elements of 2 bytes in 16-bit runs: up to 3 times the rank's shard (N, what the rank
       sends, what it receives), and the matrices that it owns. The temporaries of `orthogonalize` are usually smaller
       than that.
Stops helping when: batches are so small that these FLOPs are not negligible compared with forward and backward; or a
       few large matrices cannot be divided evenly among the owners.

Jordan et al. 2024 (Muon); Liu et al. 2025 (Muon is scalable for LLM training: decay, the factor 0.2 sqrt(max(R, C))).
"""
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.collectives import ALONE, Group, Pending, all_to_all, run_demo
from core.config import OPTIMIZERS
from core.param import Box, Spec, box_shape, local_box, parameter, pieces_within, shard_slice
from optimizers import StepScalars

MOMENTUM = 0.95  # mu
COEFFICIENTS = 3.4445, -4.7750, 2.0315  # a, b, c by Jordan: a steep slope at 0; values end near 1, not at 1
ITERATIONS = 5
STACKED = 2**24  # the most elements of equal matrices that are orthogonalised in one batched matmul


# ---- the update of one matrix ---------------------------------------------------------------------------------------

def nesterov_momentum(grad: Tensor, m: Tensor) -> Tensor:
    """Update the momentum m in place, and return N, which overwrites `grad`. Elements do not depend on each other."""
    m.lerp_(grad, 1 - MOMENTUM)
    return grad.lerp_(m, MOMENTUM)


def orthogonalize(x: Tensor) -> Tensor:
    """Return about U V^T of each matrix U S V^T of x, a stack [k, R, C], by Newton-Schulz iterations in its dtype.

    Singular values end between 0.7 and 1.2, except values that were below about 1/600 of the norm.
    """
    a, b, c = COEFFICIENTS
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x  # so that X X^T is the smaller product
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT  # Y
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b Y + c Y Y; fused: sums are rounded once
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def update_factor(shape: Sequence[int]) -> float:
    """Return the factor of an orthogonal R x C matrix that makes its elements as large as AdamW's updates are."""
    return 0.2 * max(shape)**0.5


def update_whole(weight: Tensor, grad: Tensor, m: Tensor, *, lr: float, weight_decay: float) -> None:
    """Update one whole matrix and its momentum m, in place. This is Muon; the rest of the file does it in shards."""
    n = nesterov_momentum(grad.clone(), m)  # each rank, of its shard
    x = orthogonalize(n[None])[0]  # the owner, after the first all-to-all
    update = x * update_factor(x.shape)
    weight.mul_(1 - lr * weight_decay).sub_(lr * update)  # each rank, of its shard, after the second all-to-all


def replace_by_updates(whole: dict[Hashable, Tensor]) -> None:
    """Replace the N of each matrix that this rank owns by its update. whole: name -> matrix.

    Matrices of the same shape are stacked and multiplied together, because the matrices of experts are small.
    """
    alike = defaultdict(list)  # shape -> names
    for name, matrix in whole.items():
        alike[matrix.shape].append(name)
    for shape, names in alike.items():
        most = max(1, STACKED // math.prod(shape))
        for start in range(0, len(names), most):
            some = names[start:start + most]
            # The stack gets no name here, so that orthogonalize can free it early.
            results = orthogonalize(torch.stack([whole.pop(name) for name in some]))
            results.mul_(update_factor(shape))
            whole.update(zip(some, results))


def orthogonalize_flops(rows: int, columns: int) -> int:
    """Return the FLOPs of the three matmuls of all iterations, for one matrix."""
    small, large = sorted((rows, columns))
    return ITERATIONS * (4 * small * small * large + 2 * small**3)


# ---- which parameters are matrices ----------------------------------------------------------------------------------

def kind_of(spec: Spec) -> str:
    """Return "matrix", "vector" or "table" (embedding and head). Muon updates only matrices.

    zero.py does not mix kinds in a bucket. Tables and vectors have the same update, but different buckets. Vectors are
    so small that one bucket has all vectors of a stage, and this bucket is complete only at the end of backward. A
    table in it would be reduced only then.
    """
    if len(spec.shape) == 1:
        return "vector"
    return "matrix" if spec.matrices else "table"


def matrix_shape(spec: Spec) -> tuple[int, int]:
    """Return R, C of each matrix in a parameter, which is a stack of spec.matrices matrices of the same shape.

    An expert's gate and up projections are two matrices: w_gate_up [E, 2F, H] of E experts is a stack of 2E [F, H].
    """
    return math.prod(spec.shape[:-1]) // spec.matrices, spec.shape[-1]


def local_matrices(spec: Spec, places: Mapping) -> Iterator[tuple[int, Box]]:
    """Yield (number of the matrix, box of it that the rank has), in the order in which the bucket has them.

    A box is a block of a matrix: one slice per dimension. ZeRO's cut comes later, in pieces_of.

    2 dimensions   A single matrix, which tensor parallelism may cut. The gate and the up projection of a dense layer
                   are two parameters, of one matrix each.
    3 dimensions   A weight of E experts, [E, ...], with the same number of matrices per expert. Only expert
                   parallelism cuts it, and only between experts, so its matrices are whole.

    places: axis -> the rank's place on it, as in groups.peers_of: `size` of its group there, and its `rank` in the
        group.
    """
    box = local_box(spec, places)
    if len(spec.shape) == 2:
        yield 0, box
        return
    experts = spec.shape[0]
    assert spec.matrices % experts == 0, f"{spec.name}: {spec.matrices} matrices do not divide among {experts} experts"
    per_expert = spec.matrices // experts
    for number in range(box[0].start * per_expert, box[0].stop * per_expert):
        yield number, tuple(slice(0, n) for n in matrix_shape(spec))


# ---- who has what, and who owns what --------------------------------------------------------------------------------
# Every rank computes this for all ranks of its axis "muon". All of them get the same results without communication.

class Piece(NamedTuple):
    """A box of a matrix that lies in one rank's shard of a bucket, row by row.

    A shard may begin and end inside a row. So it has at most 3 pieces of a matrix: the end of a row, complete rows, and
    the beginning of a row (param.pieces_within).
    """
    matrix_name: tuple[str, int]  # the parameter's name, and the number of the matrix in the parameter
    box: Box
    rank: int  # the rank that has the piece, on the axis "muon"
    bucket: int  # the index of the bucket in Muon.buckets
    place: slice  # where the piece lies in the rank's shard of this bucket; not one of the `places` of an axis

    @property
    def numel(self) -> int:
        return self.place.stop - self.place.start


class Matrix(NamedTuple):
    """A matrix, and its pieces on all ranks.

    Several ranks may have a copy of the same box: along an axis that replicates it, or at ZeRO level 0. Then each of
    them has a piece with this box.
    """
    name: tuple[str, int]
    shape: tuple[int, int]
    pieces: list[Piece]


def find_matrices(buckets: Sequence, peers: Sequence[Mapping]) -> list[Matrix]:
    """Return the matrices of all layers of this pipeline rank, sorted by name.

    buckets: zero.py's ShardedBuckets with matrices. They have the same layout on all ranks: bucket.numel elements, in
        which each parameter begins at bucket.offset[parameter]. If bucket.is_sharded, the ranks of bucket.group have
        shards of equal size.
    peers: the places (see local_matrices) of each rank of the axis "muon".
    """
    found: dict[tuple[str, int], Matrix] = {}
    for rank, places in enumerate(peers):
        for index, bucket in enumerate(buckets):
            for shape, piece in pieces_of(bucket, index, rank, places):
                if piece.matrix_name not in found:
                    found[piece.matrix_name] = Matrix(piece.matrix_name, shape, [])
                found[piece.matrix_name].pieces.append(piece)
    return [found[name] for name in sorted(found)]


def pieces_of(bucket, index: int, rank: int, places: Mapping) -> Iterator[tuple[tuple[int, int], Piece]]:
    """Yield (shape of the matrix, piece) for each piece in one rank's shard of the bucket.

    index: the bucket's. rank, places: of the rank that has the shard. All positions below count from the start of the
    shard, so a matrix that begins before the shard has a negative `begin`.
    """
    data_place = places[bucket.group.axis] if bucket.is_sharded else ALONE  # which of the equal shards the rank has
    shard = shard_slice(bucket.numel, data_place.size, data_place.rank)
    in_shard = slice(0, shard.stop - shard.start)
    for param in bucket.params:
        begin = bucket.offset[param] - shard.start  # of the parameter's first matrix; then of the next one
        for number, box in local_matrices(param.spec, places):
            name = param.spec.name, number
            for part, place in pieces_within(in_shard, box, begin):
                yield matrix_shape(param.spec), Piece(name, part, rank, index, place)
            begin += math.prod(box_shape(box))


def choose_owners(matrices: Sequence[Matrix], n: int) -> list[int]:
    """Return the owner of each matrix, one of n ranks. Owners get about equal work, on matrices that they hold.

    Assign the largest matrix first. Its owner is the rank that holds most of it, among the ranks that stay within the
    mean load. If there is no such rank, its owner is the rank with the least load.
    """
    costs = [orthogonalize_flops(*matrix.shape) for matrix in matrices]
    mean = sum(costs) / n
    loads = [0] * n
    owners = [0] * len(matrices)
    for i in sorted(range(len(matrices)), key=lambda i: -costs[i]):
        held = [0] * n  # elements of this matrix on each rank
        for piece in matrices[i].pieces:
            held[piece.rank] += piece.numel
        room = [rank for rank in range(n) if loads[rank] + costs[i] <= mean]
        if room:
            owners[i] = max(room, key=lambda rank: (held[rank], -loads[rank]))  # of equals, the least loaded
        else:
            owners[i] = min(range(n), key=lambda rank: (loads[rank], -held[rank]))  # of equals, who has most of it
        loads[owners[i]] += costs[i]
    return owners


def one_of_each_box(pieces: list[Piece], owner: int) -> list[Piece]:
    """Return the pieces that the owner receives, one of each box: its own if it has the box, or the nearest rank's.

    Boxes of different ranks are equal or have no element in common (asserted in Muon.__init__): buckets have the same
    layout on all ranks, so ZeRO cuts all copies of a part of the matrix in the same places.
    """
    nearest: dict[tuple, Piece] = {}
    for piece in pieces:
        box = tuple((side.start, side.stop) for side in piece.box)  # as a key: Python before 3.12 cannot hash slices
        if box not in nearest or abs(piece.rank - owner) <= abs(nearest[box].rank - owner):
            nearest[box] = piece
    return list(nearest.values())


# ---- the exchange ---------------------------------------------------------------------------------------------------

class Exchange:
    """An all-to-all of pieces. The pieces that an owner has itself also go through it: it sends them to itself.

    add         Call this once for each piece that any rank sends, on all ranks in the same order.
    start       Start to send. Takes the values of the pieces that this rank sends, in the order of `outgoing`.
    finish      Wait. Takes a tensor for each piece that this rank receives, in the order of `incoming`, and fills it.
    """

    def __init__(self, group: Group, dtype: torch.dtype, device: torch.device):
        self.group = group
        self.like = torch.empty(0, dtype=dtype, device=device)  # has the dtype and device of all that is exchanged
        self.sends: list[list[Piece]] = [[] for _ in range(group.size)]  # to each rank
        self.receives: list[list[Piece]] = [[] for _ in range(group.size)]  # from each rank
        self.pending: Pending | None = None

    def add(self, piece: Piece, sender: int, receiver: int) -> None:
        if sender == self.group.rank:
            self.sends[receiver].append(piece)
        if receiver == self.group.rank:
            self.receives[sender].append(piece)

    @property
    def outgoing(self) -> list[Piece]:
        return [piece for pieces in self.sends for piece in pieces]

    @property
    def incoming(self) -> list[Piece]:
        return [piece for pieces in self.receives for piece in pieces]

    def start(self, values: list[Tensor]) -> None:
        """Start to send the values of the outgoing pieces."""
        input_splits = [sum(piece.numel for piece in pieces) for pieces in self.sends]
        output_splits = [sum(piece.numel for piece in pieces) for pieces in self.receives]
        # With `like`, because a rank may have nothing to send, and cat takes no empty list.
        sent = torch.cat([self.like, *(value.flatten() for value in values)])
        received = self.like.new_empty(sum(output_splits))
        self.pending = all_to_all(received, sent, output_splits, input_splits, self.group, async_op=True)

    def finish(self, targets: list[Tensor]) -> None:
        """Wait, and copy each piece into its target, which has the shape of the piece's box or is flat."""
        received = self.pending.wait().split([piece.numel for piece in self.incoming])
        for target, values in zip(targets, received):
            target.copy_(values.view_as(target))


# ---- the update of all matrices -------------------------------------------------------------------------------------

class Muon:
    """The update of all matrices of a pipeline rank, in two halves. Between them zero.py lets AdamW update the other
    parameters, which hides the first all-to-all.

    start       Update the momenta of the shards, and start to send N to the owners.
    finish      Orthogonalise the matrices that this rank owns, send the updates back, and update the shards.

    buckets, peers: see find_matrices. A bucket has this rank's shard of the weights in bucket.master, and of the
    momentum in bucket.state["m"], both in the dtype of gradients.
    group: the axis "muon".
    """
    state = OPTIMIZERS["muon"]  # the moments of matrices, ("m",). UPDATE_RULES["muon"] is AdamW, for all other weights

    def __init__(self, buckets: Sequence, group: Group, peers: Sequence[Mapping], weight_decay: float):
        assert len(peers) == group.size and all(param.spec.decay for bucket in buckets for param in bucket.params)
        self.buckets, self.group, self.weight_decay = buckets, group, weight_decay
        # From start to finish: N of this rank's shard of each bucket, and whether the step is applied.
        self.n_of_shards: list[Tensor] | None = None
        self.applied: Tensor | None = None

        self.matrices = find_matrices(buckets, peers)
        self.owners = choose_owners(self.matrices, group.size)
        first = buckets[0]
        dtype = torch.bfloat16 if first.weights.itemsize == 2 else first.acc_dtype
        self.to_owners = Exchange(group, dtype, first.device)
        self.from_owners = Exchange(group, dtype, first.device)
        for matrix, owner in zip(self.matrices, self.owners):
            pieces = one_of_each_box(matrix.pieces, owner)
            assert sum(piece.numel for piece in pieces) == math.prod(matrix.shape)
            for piece in pieces:
                self.to_owners.add(piece, sender=piece.rank, receiver=owner)
            for piece in matrix.pieces:  # all of them: ranks with copies of a box each get its update
                self.from_owners.add(piece, sender=owner, receiver=piece.rank)

    def start(self, grads: Mapping[Any, Pending], step: StepScalars) -> None:
        """Update the momenta, and start to send N to the owners.

        grads: bucket -> gradient of its shard. zero.py has divided it by step.grad_scale (in Optimizer.clip_grads). The
            rules of optimizers.py divide in their fused kernels, but Muon has none. With --offload optimizer the
            gradient may still be in transfer to the host, which has the momenta. So it is a Pending.

        If step.found_inf is 1, nothing changes. The host cannot read it without waiting for the GPU. So everything is
        computed, and then not applied.
        """
        self.applied = step.found_inf == 0
        self.n_of_shards = [self.add_to_momentum(bucket, grads[bucket].wait(), self.applied) for bucket in self.buckets]
        self.to_owners.start([self.n_of_shards[piece.bucket][piece.place] for piece in self.to_owners.outgoing])

    def add_to_momentum(self, bucket, grad: Tensor, applied: Tensor) -> Tensor:
        """Update this rank's shard of M. Return its shard of N, in the dtype and on the device of the exchange."""
        m = bucket.state["m"]
        grad = torch.where(applied, grad, m)  # a copy. If the step is not applied, M and N are m, which is finite
        return nesterov_momentum(grad, m).to(self.to_owners.like)

    def finish(self, step: StepScalars) -> None:
        """Orthogonalise the matrices that this rank owns, send the updates back, and apply them to the shards."""
        n_of_shards, applied = self.n_of_shards, self.applied
        self.n_of_shards = self.applied = None  # so that they are freed when this returns
        whole = {}  # name -> matrix that this rank owns: first N, then its update
        for matrix, owner in zip(self.matrices, self.owners):
            if owner == self.group.rank:
                whole[matrix.name] = self.to_owners.like.new_empty(matrix.shape)
        self.to_owners.finish([whole[piece.matrix_name][piece.box] for piece in self.to_owners.incoming])
        replace_by_updates(whole)

        self.from_owners.start([whole[piece.matrix_name][piece.box] for piece in self.from_owners.outgoing])
        whole.clear()
        # The updates overwrite N, which is not needed any more. Padding belongs to no piece, so it keeps its N. That is
        # zero, because the gradient of padding is zero.
        updates = n_of_shards
        self.from_owners.finish([updates[piece.bucket][piece.place] for piece in self.from_owners.incoming])
        for bucket, update_of_shard in zip(self.buckets, updates):
            update = update_of_shard.to(bucket.master.device, bucket.acc_dtype)
            rate = step.lr * applied.to(update)  # 0 if the step is not applied
            bucket.master.mul_(1 - self.weight_decay * rate).sub_(update.mul_(rate))
            bucket.update_weights()


# ---- demo: python muon.py -------------------------------------------------------------------------------------------

def demo(group: Group) -> None:
    """Show what orthogonalising does, why it needs whole matrices, and the figure of the docstring."""
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

    print("\nFive 4 x 8 matrices in a bucket that ZeRO has cut for 2 ranks")
    params = [parameter(Spec(name, (4, 8)), {}, torch.float32) for name in ("w1", "w2", "w3", "w4", "w5")]
    bucket = SimpleNamespace(params=params, offset={param: 32 * i for i, param in enumerate(params)}, numel=5 * 32,
                             group=Group("dp"), is_sharded=True)
    peers = [{"dp": SimpleNamespace(size=2, rank=rank)} for rank in range(2)]
    matrices = find_matrices([bucket], peers)
    for matrix, owner in zip(matrices, choose_owners(matrices, 2)):
        rows = " and ".join(f"rows {piece.box[0].start} to {piece.box[0].stop - 1} on rank {piece.rank}"
                            for piece in matrix.pieces)
        sent = sum(piece.numel for piece in matrix.pieces if piece.rank != owner)
        print(f"    {matrix.name[0]}: {rows}. Rank {owner} owns it; {sent} elements are sent there and back.")


if __name__ == "__main__":
    run_demo(demo)
