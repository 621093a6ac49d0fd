"""Collectives with async handles, byte counters and autograd wrappers: all communication.

Three mistakes that torch.distributed does not report, and what this file does about them:
- `all_reduce(x.contiguous())` may leave its result in a copy of x. Here a tensor that is not contiguous is an error.
- An asynchronous collective whose tensors are freed before it has ended sends garbage. A `Pending` keeps them alive.
- In an autograd graph a collective has no derivative, or a wrong one. The Functions below have the right one.

Bytes that a rank sends for a tensor x of |x| bytes on n ranks, with a ring (NCCL may choose a different algorithm):

    all_reduce       2 (n-1)/n |x|       a reduce_scatter, then an all_gather
    reduce_scatter     (n-1)/n |x|       x is the full tensor
    all_gather         (n-1)   |x|       x is one rank's shard
    all_to_all                 |x|       minus the rows that stay on this rank
    shift, send                |x|

`sent` counts these bytes per axis of the grid. In a group of one rank every collective is the identity and sends
nothing, so each module also works alone in one process; only `send` and `receive` need a second rank.
learn/written_out.py has every collective written out, and shows who sends what to whom.

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
    """The ranks along an axis of the grid, for which its bytes are counted. process_group: as torch knows them (axes
    that are never busy at once may share one); None: this rank alone, for which every collective is the identity.
    links: (from, to), ranks of this group -> a process group of these two, for what the first sends the second.
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


# ---- counting and watching calls -------------------------------------------------------------------------------------

class Call(NamedTuple):
    """A collective that this rank has called."""
    operation: str
    axis: str
    number: int  # of all calls on this axis, from 1; the same on every rank of it, but for sends and receives
    peer: int | None = None  # the other rank, in the group, of a send or receive


sent: Counter[str] = Counter()  # bytes per axis
calls: Counter[str] = Counter()  # collectives per axis

# The context in which every collective is called and waited for: this one does nothing. run/ranks.py sets one that
# records calls, from which a watchdog finds out who is missing when ranks wait for ever.
watch: Callable[[Call | None], AbstractContextManager] = nullcontext


def calling(operation: str, group: Group, nbytes: int, peer: int | None = None) -> AbstractContextManager[Call]:
    """Count a call, which its caller makes in the context that is returned. nbytes: that this rank sends."""
    sent[group.axis] += nbytes
    calls[group.axis] += 1
    return watch(Call(operation, group.axis, calls[group.axis], peer))


class Pending:
    """A collective in flight, with references to all tensors that it still reads and writes. To hide it:
    `pending = all_gather(out, x, group, async_op=True)`, then compute something else, then `out = pending.wait()`.
    After `wait` this process may use the result, with NCCL only in later work on the current stream.

    work: None if the collective was synchronous; a list if it has several parts, as `shift`."""

    def __init__(self, work: dist.Work | list[dist.Work] | None, result: torch.Tensor, *inputs: torch.Tensor,
                 call: Call | None = None):
        works = work if isinstance(work, list) else [work]
        self.works = [work for work in works if work is not None]
        self.tensors = (result, *inputs) if self.works else ()
        self.result, self.call = result, call

    def completed(self) -> bool:
        """Whether the collective has ended; does not wait."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> torch.Tensor:
        if self.works:
            with watch(self.call):
                for work in self.works:
                    work.wait()
        result, self.works, self.tensors, self.result = self.result, [], (), None
        return result


def done(result: torch.Tensor) -> Pending:
    """A result for which nothing is in flight, as in a group of one rank."""
    return Pending(None, result)


# ---- collectives that write into tensors of the caller ---------------------------------------------------------------
# They return a Pending; without async_op it has already been waited on. Tensors must be contiguous.

def all_reduce(x: torch.Tensor, group: Group, op=dist.ReduceOp.SUM, async_op: bool = False) -> Pending:
    """Replace x, of any shape, by its sum over the ranks of the group, or with op=MAX by its maximum."""
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
    with calling("all_to_all", group, x.nbytes - x[:input_splits[group.rank]].nbytes) as call:
        work = dist.all_to_all_single(out, x, output_splits, input_splits, group=group.process_group,
                                      async_op=async_op)
        return Pending(work, out, x, call=call)


def shift(incoming: torch.Tensor, outgoing: torch.Tensor, group: Group) -> Pending:
    """Send `outgoing` to the next rank of the ring and fill `incoming` from the previous one; always asynchronous.

    Both are issued in one batch: with NCCL a separate send may block until its receive is issued, on every rank.
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
    """Start to send x to rank `peer` of the group. Two ranks must issue their transfers in the same order."""
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


# ---- the same into new tensors ---------------------------------------------------------------------------------------
# Tensors may be strided. gather_rows and reduce_rows, which tensor parallel layers hide, return a Pending, as above.

def sum_over_ranks(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of x over the ranks."""
    return all_reduce(x.clone(memory_format=torch.contiguous_format), group).wait()


def gather_rows(x: torch.Tensor, group: Group, async_op: bool = False) -> Pending:
    """The rows of all ranks, in rank order: [R, ...] -> [n R, ...]."""
    return all_gather(x.new_empty(group.size * len(x), *x.shape[1:]), x.contiguous(), group, async_op)


def reduce_rows(x: torch.Tensor, group: Group, async_op: bool = False) -> Pending:
    """This rank's rows of the sum over the ranks: [n R, ...] -> [R, ...]."""
    return reduce_scatter(x.new_empty(len(x) // group.size, *x.shape[1:]), x.contiguous(), group, async_op)


def exchange_rows(x: torch.Tensor, output_splits: list[int], input_splits: list[int], group: Group) -> torch.Tensor:
    """The rows that all ranks send to this one, in rank order; splits as in `all_to_all`."""
    out = x.new_empty(sum(output_splits), *x.shape[1:])
    return all_to_all(out, x.contiguous(), output_splits, input_splits, group).wait()


# ---- collectives with derivatives ------------------------------------------------------------------------------------
# A name gives the collective of forward and, after "__", that of backward. Which backward is right depends on how the
# ranks use the result: where each uses it differently, their gradients are terms of a sum; where all compute the same
# from it, each rank already has the complete gradient.

class Identity__AllReduce(torch.autograd.Function):
    """x is the same on every rank, and each rank uses it differently (f of Shoeybi et al. 2019)."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return sum_over_ranks(grad, ctx.group), None


class AllReduce__Identity(torch.autograd.Function):
    """Every rank has a term of the sum, and all ranks compute the same from the sum (g of Shoeybi et al. 2019)."""

    @staticmethod
    def forward(ctx, x, group):
        return sum_over_ranks(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class AllGather__ReduceScatter(torch.autograd.Function):
    """Every rank has R of n R rows, and each uses the gathered tensor differently (g of Korthikanti et al. 2022)."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gather_rows(x, group).wait()

    @staticmethod
    def backward(ctx, grad):
        return reduce_rows(grad, ctx.group).wait(), None


class AllToAll__AllToAll(torch.autograd.Function):
    """Rows are sent to other ranks; their gradients are sent back."""

    @staticmethod
    def forward(ctx, x, output_splits, input_splits, group):
        ctx.output_splits, ctx.input_splits, ctx.group = output_splits, input_splits, group
        return exchange_rows(x, output_splits, input_splits, group)

    @staticmethod
    def backward(ctx, grad):
        return exchange_rows(grad, ctx.input_splits, ctx.output_splits, ctx.group), None, None, None


# ---- a process: its world, copies to its device, and what `python FILE.py` does --------------------------------------

@contextmanager
def world(device: torch.device | str = "cpu", timeout_s: float = 600,
          store: dist.Store | None = None) -> Iterator[Group]:
    """The group of all ranks that torchrun started: NCCL on GPUs, gloo on CPUs. store: of keys (None: torch's own).

    The body of the `with` should be one function call, whose variables are freed when it returns: a gloo group that is
    still referenced when the interpreter exits aborts the process. Buckets and parameters refer to each other and to
    groups, so they are freed by the garbage collector. After an exception nothing is cleaned up: the process exits.
    """
    device = torch.device(device)
    # torch warns that a link executes one transfer after the other: it is meant, as both its ranks issue them in order.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    where = dict(backend="nccl", device_id=device) if device.type == "cuda" else dict(backend="gloo")
    dist.init_process_group(**where, store=store, rank=int(os.environ["RANK"]),
                            world_size=int(os.environ["WORLD_SIZE"]), timeout=datetime.timedelta(seconds=timeout_s))
    yield Group("world", dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()


def to_device(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor of the host on the device. The host does not wait for the copy: it is made from pinned memory."""
    if torch.device(device).type == "cuda" and not x.is_cuda:
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def run_demo(demo: Callable[[Group], None], ranks: int = 1) -> None:
    """Run a file's demo: on the ranks that torchrun started, else on so many that are started here. --help prints the
    file's docstring, and there are no other flags."""
    arguments = sys.argv[1:]
    if arguments in (["--help"], ["-h"]):
        print(sys.modules["__main__"].__doc__)
        return
    if arguments:
        print(f"{os.path.basename(sys.argv[0])}: error: unrecognized arguments: {' '.join(arguments)}", file=sys.stderr)
        sys.exit(2)
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        with world() as group:
            demo(group)
    elif ranks > 1:
        os.environ["OMP_NUM_THREADS"] = "1"  # or torchrun says that it sets it
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}",
                                  *sys.orig_argv[1:]])
    else:
        demo(ALONE)
