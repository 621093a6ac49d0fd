"""Collectives with async handles, byte counters and autograd wrappers: the floor that everything else stands on.

Three mistakes that torch.distributed lets pass in silence are ruled out here, once:
- a collective writes into the memory it is given: after a `.contiguous()` in the call, the result is in a lost copy;
- an asynchronous one uses its tensors until it has been waited on: freed or overwritten earlier, garbage is sent;
- inside an autograd graph it has no derivative, or one that fits another use of it.

Bytes that a rank sends for a tensor x on n ranks, if the collective runs as a ring (NCCL may choose another way):

    all_reduce       2 (n-1)/n |x|       = reduce_scatter, then all_gather
    reduce_scatter     (n-1)/n |x|       x is the whole tensor
    all_gather         (n-1)   |x|       x is one rank's shard
    all_to_all                 |x|       less what this rank keeps for itself
    shift, send                |x|

`sent` counts them by the name of the group. A group of None, or of one rank, makes every collective the identity: so
each module of the project also works alone in one process.
"""
import datetime
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None
Groups = dict[str, Group]  # by axis of the grid; this rank's coordinate on an axis is its rank in the axis's group
SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX

sent: Counter[str] = Counter()  # bytes by `name(group)`; the group itself must not outlive the run in a global

# torch 2.13 warns at the old names, torch 2.11 has no others.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def size(group: Group) -> int:
    """The number of ranks in a group."""
    return 1 if group is None else group.size()


def rank(group: Group) -> int:
    """This process's rank in a group."""
    return 0 if group is None else group.rank()


def name(group: Group) -> str:
    return "" if group is None else group.group_name


class Pending:
    """A collective under way, kept together with the tensors that it still reads and writes.

    After `wait()` the result may be used: by this process with gloo, by later work on the current stream with NCCL.
    """

    def __init__(self, work: dist.Work | list[dist.Work] | None, *tensors: torch.Tensor):
        self.works = work if isinstance(work, list) else [work] if work is not None else []
        self.tensors = tensors if self.works else ()

    def completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works, self.tensors = [], ()


@contextmanager
def world(device: torch.device | str = "cpu", timeout_s: float = 600) -> Iterator[dist.ProcessGroup]:
    """The group of all ranks that torchrun started: NCCL on GPUs, gloo on CPUs.

    Put one function call into the `with`, so that its variables are gone when it ends: a gloo group that something
    still refers to when the interpreter exits aborts the process, and only the garbage collector frees buckets and
    parameters, which refer to each other and to groups. After an error nothing is cleaned up: the caller exits.
    """
    device, timeout = torch.device(device), datetime.timedelta(seconds=timeout_s)
    if device.type == "cuda":
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    yield dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()


# ---- collectives that write into given memory ------------------------------------------------------------------------

def all_reduce(x: torch.Tensor, group: Group, op=SUM, async_op: bool = False) -> Pending:
    """Replace x, of any shape, by its sum (or maximum) over the ranks of the group."""
    if size(group) == 1:
        return Pending(None)
    assert x.is_contiguous(), "the result would be written to a copy"
    sent[name(group)] += 2 * nbytes(x) * (size(group) - 1) // size(group)
    return Pending(dist.all_reduce(x, op, group=group, async_op=async_op), x)


def all_gather(out: torch.Tensor, x: torch.Tensor, group: Group, async_op: bool = False) -> Pending:
    """Fill `out`, n times as long as x in its first dimension, with the x of every rank, in rank order."""
    if size(group) == 1:
        out.copy_(x)
        return Pending(None)
    assert x.is_contiguous() and out.is_contiguous()
    sent[name(group)] += nbytes(x) * (size(group) - 1)
    return Pending(_all_gather(out, x, group=group, async_op=async_op), out, x)


def reduce_scatter(out: torch.Tensor, x: torch.Tensor, group: Group, async_op: bool = False) -> Pending:
    """Fill `out` with this rank's shard of the sum of x over the ranks; x is n times as long in its first dimension."""
    if size(group) == 1:
        out.copy_(x)
        return Pending(None)
    assert x.is_contiguous() and out.is_contiguous()
    sent[name(group)] += nbytes(x) * (size(group) - 1) // size(group)
    return Pending(_reduce_scatter(out, x, group=group, async_op=async_op), out, x)


def all_to_all(out: torch.Tensor, x: torch.Tensor, output_splits: list[int], input_splits: list[int], group: Group,
               async_op: bool = False) -> Pending:
    """Send input_splits[i] rows of x to rank i and receive output_splits[i] rows from it, both in rank order."""
    if size(group) == 1:
        out.copy_(x)
        return Pending(None)
    assert x.is_contiguous() and out.is_contiguous()
    sent[name(group)] += nbytes(x) - nbytes(x[:input_splits[rank(group)]])
    return Pending(dist.all_to_all_single(out, x, output_splits, input_splits, group=group, async_op=async_op), out, x)


def shift(incoming: torch.Tensor, outgoing: torch.Tensor, group: Group) -> Pending:
    """Send to the next rank of the group while receiving from the previous one; always asynchronous.

    Both go in one batch: with NCCL a lone send may wait for its receive, and the whole ring would deadlock.
    """
    assert incoming.is_contiguous() and outgoing.is_contiguous()
    sent[name(group)] += nbytes(outgoing)
    n, me = size(group), rank(group)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, outgoing, group=group, group_peer=(me + 1) % n),
                                    dist.P2POp(dist.irecv, incoming, group=group, group_peer=(me - 1) % n)])
    return Pending(works, incoming, outgoing)


def send(x: torch.Tensor, peer: int, group: Group) -> Pending:
    """Begin to send x to a rank of the group. Two ranks must issue all that they exchange in the same order."""
    assert x.is_contiguous()
    sent[name(group)] += nbytes(x)
    return Pending(dist.isend(x, group=group, group_dst=peer), x)


def receive(x: torch.Tensor, peer: int, group: Group) -> Pending:
    """Begin to fill x with what a rank of the group sends."""
    assert x.is_contiguous()
    return Pending(dist.irecv(x, group=group, group_src=peer), x)


def nbytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


# ---- collectives that return a new tensor ----------------------------------------------------------------------------

def all_reduced(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of x over the ranks."""
    out = x.clone(memory_format=torch.contiguous_format)
    all_reduce(out, group)
    return out


def all_gathered(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """The x of all ranks, concatenated along `dim`."""
    shard = x.movedim(dim, 0).contiguous()
    out = shard.new_empty(shard.shape[0] * size(group), *shard.shape[1:])
    all_gather(out, shard, group)
    return out.movedim(0, dim)


def reduce_scattered(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """This rank's shard along `dim` of the sum of x over the ranks. Raises ValueError where they do not divide it."""
    if x.shape[dim] % size(group):
        raise ValueError(f"{size(group)} ranks cannot share a dimension of {x.shape[dim]} in equal parts")
    whole = x.movedim(dim, 0).contiguous()
    out = whole.new_empty(whole.shape[0] // size(group), *whole.shape[1:])
    reduce_scatter(out, whole, group)
    return out.movedim(0, dim)


def all_to_all_rows(x: torch.Tensor, output_splits: list[int], input_splits: list[int], group: Group) -> torch.Tensor:
    """The rows that other ranks have for this one, in rank order."""
    out = x.new_empty(sum(output_splits), *x.shape[1:])
    all_to_all(out, x.contiguous(), output_splits, input_splits, group)
    return out


# ---- collectives with derivatives ------------------------------------------------------------------------------------
# Each is named after what it does in forward and, after "__", what it does in backward. Which backward is right depends
# on what the ranks do with the result: where each uses it differently, their gradients are terms of a sum; where all
# use it in the same way, each of them has the complete gradient already. Shoeybi et al. 2019 call the first two f and
# g; Korthikanti et al. 2022 call them f and f bar, and the next two, of sequence parallelism, g and g bar.

class Identity__AllReduce(torch.autograd.Function):
    """x is the same on every rank, and each rank uses it differently."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return all_reduced(grad, ctx.group), None


class AllReduce__Identity(torch.autograd.Function):
    """Every rank has a term of the sum, and all ranks use the sum in the same way."""

    @staticmethod
    def forward(ctx, x, group):
        return all_reduced(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class AllGather__ReduceScatter(torch.autograd.Function):
    """Every rank has a shard along `dim`, and each rank uses the whole differently."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return all_gathered(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scattered(grad, ctx.dim, ctx.group), None, None


class ReduceScatter__AllGather(torch.autograd.Function):
    """Every rank has a term of the sum, and goes on with its own shard of the sum along `dim`."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return reduce_scattered(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return all_gathered(grad, ctx.dim, ctx.group), None, None


class AllToAll__AllToAll(torch.autograd.Function):
    """Rows are sent to other ranks; their gradients are sent back."""

    @staticmethod
    def forward(ctx, x, output_splits, input_splits, group):
        ctx.output_splits, ctx.input_splits, ctx.group = output_splits, input_splits, group
        return all_to_all_rows(x, output_splits, input_splits, group)

    @staticmethod
    def backward(ctx, grad):
        return all_to_all_rows(grad, ctx.input_splits, ctx.output_splits, ctx.group), None, None, None
