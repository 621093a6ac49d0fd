"""All communication: collectives with handles, byte counters and derivatives.

                     x, which a rank     result                         bytes that a rank sends
                     passes in
                     rank 0    rank 1    rank 0         rank 1
    all_reduce       a0 a1     b0 b1     a0+b0 a1+b1    a0+b0 a1+b1     2 (n-1)/n |x|
    reduce_scatter   a0 a1     b0 b1     a0+b0          a1+b1             (n-1)/n |x|
    all_gather       a0 a1     b0 b1     a0 a1 b0 b1    a0 a1 b0 b1       (n-1)   |x|
    all_to_all       a0 a1     b0 b1     a0 b0          a1 b1                     |x| minus rows that stay
    shift            a0 a1     b0 b1     b0 b1          a0 a1                     |x|
    send, receive    a0 a1                              a0 a1                     |x| from rank 0

Two ranks: the halves of x are a0 and a1 on rank 0, and b0 and b1 on rank 1. The formulas are for n ranks and an x of
|x| bytes.

An all-reduce is a reduce-scatter and then an all-gather. The formulas hold for ring algorithms; NCCL may choose others.
learn/written_out.py has every collective written out, hop by hop.

The derivative of a collective depends on how ranks use its result:

    forward          used by the ranks    backward         autograd function
    identity         each differently     all_reduce       Identity__AllReduce           f of Shoeybi et al. 2019
    all_reduce       all in the same way  identity         AllReduce__Identity           their g
    all_gather       each differently     reduce_scatter   AllGather__ReduceScatter      g of Korthikanti et al. 2022
    all_to_all       each its own rows    all_to_all       AllToAll__AllToAll            rows go back

If each rank uses the same tensor differently, each computes one term of its gradient, so backward sums the terms. If
all ranks compute the same from it, each has the complete gradient already. A sum would be n times too large. A
reduce_scatter in forward, with an all_gather in backward, is in tp.py, the only file that needs this pair.

In a group of one rank every collective is the identity and sends nothing. So all other files also work in one process.
(`send` and `receive` need a second rank.)

Three mistakes for which torch.distributed raises no error, and what this file does about them:
- `all_reduce(x.contiguous())` may leave its result in a copy of x. This file refuses a tensor that is not contiguous.
- An asynchronous operation may never end if its handle is dropped while it runs. With gloo, for example, the receiver
  of a large tensor then waits forever. A `Pending` keeps the handle and the tensors.
- In an autograd graph a collective has no derivative, or a wrong one. The autograd functions have the right one.

Shapes: n ranks, R rows (the first dimension) per rank.
"""
import datetime
import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Group:
    """This rank's group on one axis of the grid, such as "tp". core/groups.py makes them.

    axis: the name under which bytes are counted.
    process_group: the group in torch. Several axes may share one. None for a group of one rank.
    links: (sender, receiver) -> the process group for transfers from one rank of this group to another.
    """
    axis: str = ""
    process_group: dist.ProcessGroup | None = None
    links: dict[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return 1 if self.process_group is None else self.process_group.size()

    @property
    def rank(self) -> int:
        """This process's rank in the group, its coordinate on the axis."""
        return 0 if self.process_group is None else self.process_group.rank()


ALONE = Group()
Groups = dict[str, Group]  # axis of the grid -> this rank's group
MAX = dist.ReduceOp.MAX

# torch 2.13 deprecates the names that end in _tensor; torch 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


# ---- handles --------------------------------------------------------------------------------------------------------

class Pending:
    """A collective in flight: a handle, like dist.Work. It keeps alive all tensors that the collective still reads or
    writes.

        pending = all_gather(out, x, group, async_op=True)      starts
        y = other @ work                                        hides the communication
        out = pending.wait()                                    may be read from now on

    With NCCL `wait` does not block the host: it makes later work on the current stream wait.
    work: None if the collective was synchronous; a list if it has several parts, as `shift` has.
    """

    def __init__(self, work: dist.Work | list[dist.Work] | None, result: torch.Tensor, *inputs: torch.Tensor,
                 call: "Call | None" = None):
        works = work if isinstance(work, list) else [work]
        self.works = [work for work in works if work is not None]
        self.tensors = (result, *inputs) if self.works else ()
        self.result, self.call = result, call

    def completed(self) -> bool:
        """Return whether the collective has ended, without waiting.

        With gloo this is False for a send or a receive until it has been waited for.
        """
        return all(work.is_completed() for work in self.works)

    def wait(self) -> torch.Tensor:
        """Wait for the collective and return its result. Afterwards this object holds no tensors."""
        if self.works:
            with watch(self.call):
                for work in self.works:
                    work.wait()
        result = self.result
        self.works, self.tensors, self.result = [], (), None
        return result


def done(result: torch.Tensor) -> Pending:
    """Return a Pending with a result for which nothing is in flight, as in a group of one rank."""
    return Pending(None, result)


# ---- counting and watching calls ------------------------------------------------------------------------------------

class Call(NamedTuple):
    """A call of a collective by this rank.

    number: counts this rank's calls on the axis, from 1. The same collective has the same number on every rank of its
        group. Sends and receives are counted by themselves, because ranks make different numbers of them.
    """
    operation: str
    axis: str
    number: int
    peer: int | None = None  # the other rank of a send or receive, counted within the group


sent: Counter[str] = Counter()  # axis -> bytes that this rank has sent
calls: Counter[str] = Counter()  # axis -> collectives that it has called; "pp transfers" -> its sends and receives

# A hook. Every collective is called, and later waited for, in the context watch(call), which yields the call. The
# default, nullcontext, does nothing more. run/ranks.py replaces it by a context that records the calls. If ranks wait
# forever, the watchdog of run/faults.py can then say which rank is missing.
watch: Callable[[Call | None], AbstractContextManager] = nullcontext


def calling(operation: str, group: Group, nbytes: int, peer: int | None = None) -> AbstractContextManager[Call]:
    """Count a call that sends `nbytes` from this rank. Return watch(call), a context in which the caller makes it."""
    sent[group.axis] += nbytes
    counted_as = group.axis if peer is None else f"{group.axis} transfers"
    calls[counted_as] += 1
    return watch(Call(operation, group.axis, calls[counted_as], peer))


# ---- collectives that write into tensors of the caller --------------------------------------------------------------
# Each returns a Pending. Without async_op, the collective has already been waited for. Tensors must be contiguous.

def all_reduce(x: torch.Tensor, group: Group, op=dist.ReduceOp.SUM, async_op: bool = False) -> Pending:
    """Replace x, of any shape, by its sum over the ranks of the group; with op=MAX, by its maximum."""
    if group.size == 1:
        return done(x)
    assert x.is_contiguous(), "the result would be written to a copy"
    with calling("all_reduce", group, 2 * x.nbytes * (group.size - 1) // group.size) as call:
        return Pending(dist.all_reduce(x, op, group=group.process_group, async_op=async_op), x, call=call)


def all_gather(out: torch.Tensor, x: torch.Tensor, group: Group, async_op: bool = False) -> Pending:
    """Fill `out` with the x of every rank, in rank order: [R, ...] -> [n R, ...]."""
    if group.size == 1:
        return done(out.copy_(x))
    assert x.is_contiguous() and out.is_contiguous()
    with calling("all_gather", group, x.nbytes * (group.size - 1)) as call:
        return Pending(_all_gather(out, x, group=group.process_group, async_op=async_op), out, x, call=call)


def reduce_scatter(out: torch.Tensor, x: torch.Tensor, group: Group, async_op: bool = False) -> Pending:
    """Fill `out` with this rank's shard of the sum of x over the ranks: [n R, ...] -> [R, ...]."""
    if group.size == 1:
        return done(out.copy_(x))
    assert x.is_contiguous() and out.is_contiguous()
    with calling("reduce_scatter", group, x.nbytes * (group.size - 1) // group.size) as call:
        return Pending(_reduce_scatter(out, x, group=group.process_group, async_op=async_op), out, x, call=call)


def all_to_all(out: torch.Tensor, x: torch.Tensor, output_splits: list[int], input_splits: list[int], group: Group,
               async_op: bool = False) -> Pending:
    """Send input_splits[i] rows of x to rank i and receive output_splits[i] rows from it, both in rank order."""
    if group.size == 1:
        return done(out.copy_(x))
    assert x.is_contiguous() and out.is_contiguous()
    own_rows = input_splits[group.rank]  # how many stay here; below, the first rows of x stand in for them
    with calling("all_to_all", group, x.nbytes - x[:own_rows].nbytes) as call:
        work = dist.all_to_all_single(out, x, output_splits, input_splits, group=group.process_group,
                                      async_op=async_op)
        return Pending(work, out, x, call=call)


def shift(incoming: torch.Tensor, outgoing: torch.Tensor, group: Group) -> Pending:
    """Send `outgoing` to the next rank of the ring and fill `incoming` from the previous rank. Always asynchronous.

    Both transfers are issued in one batch. With NCCL a separate send may block until its receive is issued, and every
    rank would block in its send.
    """
    if group.size == 1:
        return done(incoming.copy_(outgoing))
    assert incoming.is_contiguous() and outgoing.is_contiguous()
    n, me = group.size, group.rank
    with calling("shift", group, outgoing.nbytes) as call:
        ring = group.process_group
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, outgoing, group=ring, group_peer=(me + 1) % n),
                                        dist.P2POp(dist.irecv, incoming, group=ring, group_peer=(me - 1) % n)])
        return Pending(works, incoming, outgoing, call=call)


def send(x: torch.Tensor, peer: int, group: Group) -> Pending:
    """Start to send x to rank `peer` of the group. Both ranks must issue their transfers in the same order."""
    assert group.size > 1, "a group of one rank has no peer to send to"  # torch would take None for the world
    assert x.is_contiguous()
    link = group.links.get((group.rank, peer), group.process_group)
    with calling("send", group, x.nbytes, peer) as call:
        return Pending(dist.isend(x, dist.get_global_rank(group.process_group, peer), link), x, call=call)


def receive(x: torch.Tensor, peer: int, group: Group) -> Pending:
    """Start to fill x with the tensor that rank `peer` of the group sends."""
    assert group.size > 1, "a group of one rank has no peer to receive from"
    assert x.is_contiguous()
    link = group.links.get((peer, group.rank), group.process_group)
    with calling("receive", group, 0, peer) as call:
        return Pending(dist.irecv(x, dist.get_global_rank(group.process_group, peer), link), x, call=call)


# ---- the same into new tensors --------------------------------------------------------------------------------------
# These functions also take strided tensors. gather_rows and reduce_rows return a Pending, because tp.py overlaps them
# with matmuls. The others return the result.

def sum_over_ranks(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of x over the ranks."""
    return all_reduce(x.clone(memory_format=torch.contiguous_format), group).wait()


def gather_rows(x: torch.Tensor, group: Group, async_op: bool = False) -> Pending:
    """Gather the rows of all ranks, in rank order: [R, ...] -> [n R, ...]."""
    return all_gather(x.new_empty(group.size * len(x), *x.shape[1:]), x.contiguous(), group, async_op)


def reduce_rows(x: torch.Tensor, group: Group, async_op: bool = False) -> Pending:
    """Sum x over the ranks, and keep this rank's rows: [n R, ...] -> [R, ...]."""
    return reduce_scatter(x.new_empty(len(x) // group.size, *x.shape[1:]), x.contiguous(), group, async_op)


def exchange_rows(x: torch.Tensor, output_splits: list[int], input_splits: list[int], group: Group) -> torch.Tensor:
    """Return the rows that all ranks send to this rank, in rank order. The splits are as in `all_to_all`."""
    out = x.new_empty(sum(output_splits), *x.shape[1:])
    return all_to_all(out, x.contiguous(), output_splits, input_splits, group).wait()


# ---- collectives with derivatives -----------------------------------------------------------------------------------
# A name is the collective of forward, "__", the collective of backward. The table at the top says when each is right.

class Identity__AllReduce(torch.autograd.Function):
    """For an x that is the same on every rank, and that each rank uses differently: the input of a column-parallel
    layer, for example."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)  # a new tensor, whose grad_fn is this function

    @staticmethod
    def backward(ctx, grad):
        return sum_over_ranks(grad, ctx.group), None


class AllReduce__Identity(torch.autograd.Function):
    """For an x that is one term of a sum on each rank, if all ranks compute the same from the sum: the output of a
    row-parallel layer, for example."""

    @staticmethod
    def forward(ctx, x, group):
        return sum_over_ranks(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class AllGather__ReduceScatter(torch.autograd.Function):
    """For an x that is R of n R rows on each rank, if each rank uses all rows, each differently: with sequence
    parallelism, the input of a column-parallel layer."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gather_rows(x, group).wait()

    @staticmethod
    def backward(ctx, grad):
        return reduce_rows(grad, ctx.group).wait(), None


class AllToAll__AllToAll(torch.autograd.Function):
    """For rows of x that other ranks use, such as tokens that are sent to their experts. Backward sends the gradients
    of the rows back."""

    @staticmethod
    def forward(ctx, x, output_splits, input_splits, group):
        ctx.output_splits, ctx.input_splits, ctx.group = output_splits, input_splits, group
        return exchange_rows(x, output_splits, input_splits, group)

    @staticmethod
    def backward(ctx, grad):
        return exchange_rows(grad, ctx.input_splits, ctx.output_splits, ctx.group), None, None, None


# ---- a process: its world, copies to its device, and what `python FILE.py` does -------------------------------------

@contextmanager
def world(device: torch.device | str = "cpu", timeout_s: float = 600,
          store: dist.Store | None = None) -> Iterator[Group]:
    """Yield the group of all ranks that torchrun started. The backend is NCCL on GPUs, and gloo on CPUs.

    store: where the ranks find each other; None for torch's own.

    A gloo group that is alive when the interpreter exits aborts the process. Buckets and parameters refer to groups and
    to each other, so only the garbage collector can free them, in the gc.collect() at the end. Nothing else may refer
    to them then: let the body of the `with` be one function call, whose variables are freed when it returns.

    After an exception nothing is cleaned up: the process exits.
    """
    device = torch.device(device)
    # torch warns that a link executes its transfers one after the other. Both its ranks issue them in the same order.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    backend = dict(backend="nccl", device_id=device) if device.type == "cuda" else dict(backend="gloo")
    dist.init_process_group(**backend, store=store, rank=int(os.environ["RANK"]),
                            world_size=int(os.environ["WORLD_SIZE"]), timeout=datetime.timedelta(seconds=timeout_s))
    yield Group("world", dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()


def to_device(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a tensor of the host to the device. It is pinned first, so that the host need not wait for the copy to the
    device."""
    if torch.device(device).type == "cuda" and not x.is_cuda:
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def run_demo(demo: Callable[[Group], None], ranks: int = 1) -> None:
    """Run a file's demo, on the ranks that torchrun started. If torchrun has not started this process, and the demo
    needs several ranks, replace the process by a torchrun that starts them.

    --help prints the file's docstring. There are no other flags.
    """
    arguments, main = sys.argv[1:], sys.modules["__main__"]
    if arguments in (["--help"], ["-h"]):
        print(main.__doc__)
        return
    if arguments:
        name = main.__spec__.name if main.__spec__ else os.path.basename(sys.argv[0])  # the spec: python -m NAME
        print(f"{name}: error: unrecognized arguments: {' '.join(arguments)}", file=sys.stderr)
        sys.exit(2)
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        with world() as group:
            demo(group)
    elif ranks > 1:
        os.environ["OMP_NUM_THREADS"] = "1"  # or torchrun says that it sets it
        program = sys.orig_argv[1:]  # what this process was started with: FILE.py, or -m NAME
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", *program])
    else:
        demo(ALONE)


# ---- demo: python -m core.collectives -------------------------------------------------------------------------------

def demo(group: Group) -> None:
    """Print both tables of the docstring, with numbers and counted bytes."""
    n = group.size
    if group.rank == 0:
        print("Results of rank 0, rank 1 and so on, and bytes sent")

    def show(name: str, result: torch.Tensor, nbytes: int) -> None:
        """Print the result of every rank, and how many bytes this rank has sent for it."""
        of_ranks = gather_rows(result.detach(), group).wait().view(n, -1).int().tolist()
        if group.rank == 0:
            print(f"{name:26s}{''.join(f'{str(values):20s}' for values in of_ranks)}{nbytes:3d}")

    x = torch.arange(1.0, n + 1) * 10**group.rank  # fp32
    show(f"x, {x.nbytes} bytes", x, 0)
    whole, one, same = torch.empty(n * n), torch.empty(1), torch.empty(n)
    for name, call in (
            ("all_reduce", lambda: all_reduce(x.clone(), group)),
            ("reduce_scatter", lambda: reduce_scatter(one, x, group)),
            ("all_gather", lambda: all_gather(whole, x, group)),
            ("all_to_all", lambda: all_to_all(same, x, [1] * n, [1] * n, group)),
            ("shift", lambda: shift(same, x, group))):
        before = sent[group.axis]
        result = call().wait()
        show(name, result, sent[group.axis] - before)

    # The loss of a rank is a factor times the sum of its result. Ranks that use the result differently have different
    # factors: rank r has 10^r. After an all-reduce in forward all ranks compute the same, with the factor 1.
    factor_of_rank = 10**group.rank
    if group.rank == 0:
        print("\nGradients of x, and bytes sent in backward")
    for function, splits, loss_factor in (
            (Identity__AllReduce, (), factor_of_rank),
            (AllReduce__Identity, (), 1),
            (AllGather__ReduceScatter, (), factor_of_rank),
            (AllToAll__AllToAll, ([1] * n, [1] * n), factor_of_rank)):
        leaf = x.clone().requires_grad_()
        loss = loss_factor * function.apply(leaf, *splits, group).sum()
        before = sent[group.axis]
        loss.backward()
        show(function.__name__, leaf.grad, sent[group.axis] - before)


if __name__ == "__main__":
    run_demo(demo, ranks=2)
