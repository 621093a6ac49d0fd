"""The collectives everybody uses, under one name each, with their bytes counted and their derivatives beside them.

Three things go wrong silently when torch.distributed is called directly, and are settled here once:
- a collective writes into the memory it is given: a `.contiguous()` in the call reduces a copy and throws it away;
- an asynchronous one uses its tensors until it is waited on: whoever frees or refills them earlier sends garbage;
- inside an autograd graph it has no derivative (or one that fits another use of it).

What a rank sends for x, which is `bytes` long and belongs to n ranks, as a ring would (NCCL may choose another way):

    all_reduce       2 (n-1)/n bytes       = reduce_scatter, then all_gather
    reduce_scatter     (n-1)/n bytes       x is the whole
    all_gather         (n-1)   bytes       x is the shard
    all_to_all                 bytes less what stays here
    shift, send                bytes

`sent` adds them up by the name of the group. A group of None or of one rank is the identity and sends nothing.
"""
import datetime
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from param import rank, size

Group = dist.ProcessGroup | None
SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX

sent: Counter[str] = Counter()  # bytes by `name(group)`; the group itself must not outlive the run in a global

# torch 2.13 warns at the old names, torch 2.11 has no others.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Pending:
    """A collective under way, kept together with the tensors it still reads and writes.

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

    Put one function call into the `with`, so that its variables are gone when it ends. A gloo group that is still
    referred to when the interpreter ends aborts the process, and buckets and parameters, which refer to each other and
    to groups, are freed by the collector only. After an error nothing is tidied up: who catches it ends the process.
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


def all_reduce(x: torch.Tensor, group: Group, op=SUM, async_op: bool = False) -> Pending:
    """Replace x, any shape, by its sum (or maximum) over the ranks of the group."""
    if size(group) == 1:
        return Pending(None)
    assert x.is_contiguous(), "the result would be written to a copy"
    sent[name(group)] += 2 * nbytes(x) * (size(group) - 1) // size(group)
    return Pending(dist.all_reduce(x, op, group=group, async_op=async_op), x)


def all_gather(out: torch.Tensor, x: torch.Tensor, group: Group, async_op: bool = False) -> Pending:
    """Fill out, n times as long as x in its first dimension, with the x of every rank in rank order."""
    if size(group) == 1:
        out.copy_(x)
        return Pending(None)
    assert x.is_contiguous() and out.is_contiguous()
    sent[name(group)] += nbytes(x) * (size(group) - 1)
    return Pending(_all_gather(out, x, group=group, async_op=async_op), out, x)


def reduce_scatter(out: torch.Tensor, x: torch.Tensor, group: Group, async_op: bool = False) -> Pending:
    """Fill out with this rank's part of x, which is n times as long in its first dimension, summed over the ranks."""
    if size(group) == 1:
        out.copy_(x)
        return Pending(None)
    assert x.is_contiguous() and out.is_contiguous()
    sent[name(group)] += nbytes(x) * (size(group) - 1) // size(group)
    return Pending(_reduce_scatter(out, x, group=group, async_op=async_op), out, x)


def all_to_all(out: torch.Tensor, x: torch.Tensor, received: list[int], given: list[int], group: Group,
               async_op: bool = False) -> Pending:
    """Send given[i] rows of x to rank i and fill out with received[i] rows from it, both in rank order."""
    if size(group) == 1:
        out.copy_(x)
        return Pending(None)
    assert x.is_contiguous() and out.is_contiguous()
    sent[name(group)] += nbytes(x) - nbytes(x[:given[rank(group)]])
    return Pending(dist.all_to_all_single(out, x, received, given, group=group, async_op=async_op), out, x)


def shift(incoming: torch.Tensor, outgoing: torch.Tensor, group: Group) -> Pending:
    """Send to the next rank of the group while receiving from the one before; always asynchronous.

    Both go in one batch: with NCCL a lone send may wait for its receive, and the whole ring would stand still.
    """
    assert incoming.is_contiguous() and outgoing.is_contiguous()
    sent[name(group)] += nbytes(outgoing)
    n, me = size(group), rank(group)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, outgoing, group=group, group_peer=(me + 1) % n),
                                    dist.P2POp(dist.irecv, incoming, group=group, group_peer=(me - 1) % n)])
    return Pending(works, incoming, outgoing)


def send(x: torch.Tensor, peer: int, group: Group) -> Pending:
    """Begin to send x to a rank of the group. All that two ranks exchange must be issued by both in the same order."""
    assert x.is_contiguous()
    sent[name(group)] += nbytes(x)
    return Pending(dist.isend(x, group=group, group_dst=peer), x)


def receive(x: torch.Tensor, peer: int, group: Group) -> Pending:
    """Begin to fill x with what a rank of the group sends."""
    assert x.is_contiguous()
    return Pending(dist.irecv(x, group=group, group_src=peer), x)


def name(group: Group) -> str:
    return "" if group is None else group.group_name


def nbytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


# ---- with derivatives -----------------------------------------------------------------------------------------------
# Each is named by what it does forward and, after "__", what it does backward. Which backward is right depends on what
# the ranks do with the result: where they go on differently, their gradients are terms of a sum; where they all do the
# same, each has the whole gradient already. Shoeybi et al. 2019 call the first two f and g; Korthikanti et al. 2022
# call them f and f bar, and the two after them, of sequence parallelism, g and g bar.

class Identity__AllReduce(torch.autograd.Function):
    """x is the same on every rank and each uses it differently."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return summed(grad, ctx.group), None


class AllReduce__Identity(torch.autograd.Function):
    """Every rank has a term of the sum, and all use the sum in the same way."""

    @staticmethod
    def forward(ctx, x, group):
        return summed(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class AllGather__ReduceScatter(torch.autograd.Function):
    """Every rank has a part along `dim`; each uses the whole differently."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return gathered(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return scattered_sum(grad, ctx.dim, ctx.group), None, None


class ReduceScatter__AllGather(torch.autograd.Function):
    """Every rank has a term of the sum and goes on with its own part of it along `dim`."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return scattered_sum(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return gathered(grad, ctx.dim, ctx.group), None, None


class AllToAll__AllToAll(torch.autograd.Function):
    """Rows go to other ranks; their gradients come back the same way."""

    @staticmethod
    def forward(ctx, x, received, given, group):
        ctx.received, ctx.given, ctx.group = received, given, group
        return exchanged(x, received, given, group)

    @staticmethod
    def backward(ctx, grad):
        return exchanged(grad, ctx.given, ctx.received, ctx.group), None, None, None


def summed(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of x over the ranks, as a new tensor."""
    out = x.clone(memory_format=torch.contiguous_format)
    all_reduce(out, group)
    return out


def exchanged(x: torch.Tensor, received: list[int], given: list[int], group: Group) -> torch.Tensor:
    """The rows that other ranks have for this one, in rank order."""
    out = x.new_empty(sum(received), *x.shape[1:])
    all_to_all(out, x.contiguous(), received, given, group)
    return out


def gathered(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """The parts of all ranks put together along `dim`."""
    first = x.movedim(dim, 0).contiguous()
    out = first.new_empty(first.shape[0] * size(group), *first.shape[1:])
    all_gather(out, first, group)
    return out.movedim(0, dim)


def scattered_sum(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """This rank's part along `dim` of the sum of x over the ranks. Raises ValueError where they do not divide it."""
    if x.shape[dim] % size(group):
        raise ValueError(f"{size(group)} ranks cannot share a dimension of {x.shape[dim]} in equal parts")
    first = x.movedim(dim, 0).contiguous()
    out = first.new_empty(first.shape[0] // size(group), *first.shape[1:])
    reduce_scatter(out, first, group)
    return out.movedim(0, dim)
