"""The groups of the grid, and collectives with async handles, byte counters and autograd wrappers: all communication.

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

`sent` counts these bytes per axis of the grid. In a group of one rank every collective is the identity and
sends nothing, so each module also works alone in one process; only `send` and `receive` need a second rank.

learn/collectives.py has every collective written out, and shows who sends what to whom.

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
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange


@dataclass(frozen=True)
class Group:
    """The ranks along an axis of the grid, for which its bytes are counted. process_group: as torch knows them (axes
    that are never busy at once may share one); None: this rank alone, for which every collective is the identity.

    links: (from, to), ranks of this group -> a process group of these two, for what the first sends the second. Work of
    one process group is executed in order, so a transfer in the group of all would wait for every earlier one.
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
SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX

sent: Counter[str] = Counter()  # bytes per axis

# torch 2.13 deprecates the names that end in _tensor; torch 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def create_groups(members: list[list[int]], timeout_s: float) -> dist.ProcessGroup | None:
    """The one of these process groups that this rank is in; None if it is alone in it. Every rank calls this once.

    members: the ranks of each group; together they are all ranks. NCCL makes all of them in one split of the world's
    communicator; with other backends a rank makes its own group alone.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    if dist.group.WORLD.bound_device_id is not None:  # see `world`
        group = dist.split_group(split_ranks=members, timeout=timeout)
    else:
        mine = next(ranks for ranks in members if dist.get_rank() in ranks)
        group = dist.new_group(mine, timeout=timeout, use_local_synchronization=True)
    return group if group.size() > 1 else None


class Observer:
    """Hears of every collective that this rank calls and waits for. This one does nothing; run/ranks.py puts a flight
    record in its place, from which a watchdog finds out who is missing when ranks wait for ever."""

    def calling(self, operation: str, axis: str, peer: int | None = None) -> AbstractContextManager[Any]:
        """The body of the `with` makes the call. Its value is whatever `waiting` is to be given."""
        return nullcontext()

    def waiting(self, call: Any) -> AbstractContextManager[None]:
        """The body waits for a call."""
        return nullcontext()


observer = Observer()


def calling(operation: str, group: Group, nbytes: int, peer: int | None = None) -> AbstractContextManager[Any]:
    """Wrap every call. nbytes: that this rank sends; peer: the other rank, in the group, of a send or receive."""
    sent[group.axis] += nbytes
    return observer.calling(operation, group.axis, peer)


class Pending:
    """A collective in flight: its result, and references to all tensors that it still reads and writes.

    `wait()` returns the result, which may then be used: with gloo by this process, with NCCL by later work on the
    current stream; it also lets go of all tensors. work: None when nothing is in flight, because the collective was
    synchronous.
    """

    def __init__(self, work: dist.Work | list[dist.Work] | None, result: torch.Tensor, *inputs: torch.Tensor,
                 call: Any = None):
        works = work if isinstance(work, list) else [work]
        self.works = [work for work in works if work is not None]
        self.tensors = (result, *inputs) if self.works else ()
        self.result, self.call = result, call

    def completed(self) -> bool:
        """Whether the collective has ended; does not wait."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> torch.Tensor:
        if self.works:
            with observer.waiting(self.call):
                for work in self.works:
                    work.wait()
        result, self.works, self.tensors, self.result = self.result, [], (), None
        return result


def done(result: torch.Tensor) -> Pending:
    """A result for which nothing is in flight, as in a group of one rank."""
    return Pending(None, result)


@contextmanager
def world(device: torch.device | str = "cpu", timeout_s: float = 600,
          store: dist.Store | None = None) -> Iterator[Group]:
    """The group of all ranks that torchrun started: NCCL on GPUs, gloo on CPUs. store: their key-value store; None:
    torch finds it.

    The body of the `with` should be one function call, whose variables are freed when it returns: a gloo group that is
    still referenced when the interpreter exits aborts the process. Buckets and parameters refer to each other and to
    groups, so they are freed by the garbage collector. After an exception nothing is cleaned up: the process exits.
    """
    device = torch.device(device)
    where = dict(backend="nccl", device_id=device) if device.type == "cuda" else dict(backend="gloo")
    dist.init_process_group(**where, store=store, rank=int(os.environ["RANK"]),
                            world_size=int(os.environ["WORLD_SIZE"]), timeout=datetime.timedelta(seconds=timeout_s))
    yield Group("world", dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()


# ---- collectives that write into tensors of the caller ---------------------------------------------------------------
# They return a Pending; without async_op it has already been waited on. Tensors must be contiguous.

def all_reduce(x: torch.Tensor, group: Group, op=SUM, async_op: bool = False) -> Pending:
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
    assert group.size > 1, "a group of one rank has no peer to send to"  # for torch, None is the world
    assert x.is_contiguous()
    with calling("send", group, x.nbytes, peer) as call:
        return Pending(dist.isend(x, **link(group, group.rank, peer)), x, call=call)


def receive(x: torch.Tensor, peer: int, group: Group) -> Pending:
    """Start to fill x with the tensor that rank `peer` of the group sends."""
    assert group.size > 1, "a group of one rank has no peer to receive from"
    assert x.is_contiguous()
    with calling("receive", group, 0, peer) as call:
        return Pending(dist.irecv(x, **link(group, peer, group.rank)), x, call=call)


def to_device(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor of the host on the device. The host does not wait for the copy: it is made from pinned memory."""
    if torch.device(device).type == "cuda" and not x.is_cuda:
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def link(group: Group, source: int, target: int) -> dict:
    """Where torch is to send what rank `source` of the group sends to rank `target`, or to receive it."""
    peer, end = (target, "group_dst") if group.rank == source else (source, "group_src")
    pair = group.links.get((source, target))
    if pair is None:
        return {"group": group.process_group, end: peer}
    return {"group": pair, end: 1 - pair.rank()}


# ---- collectives that return a new tensor ----------------------------------------------------------------------------

def sum_over_ranks(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of x over the ranks."""
    out = x.clone(memory_format=torch.contiguous_format)
    all_reduce(out, group)
    return out


def all_gather_along(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """The x of all ranks, concatenated along `dim`."""
    shard = x.movedim(dim, 0).contiguous()
    out = shard.new_empty(shard.shape[0] * group.size, *shard.shape[1:])
    all_gather(out, shard, group)
    return out.movedim(0, dim)


def reduce_scatter_along(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """This rank's shard along `dim` of the sum of x. Raises ValueError if the ranks do not divide that dimension."""
    if x.shape[dim] % group.size:
        raise ValueError(f"{group.size} ranks cannot share a dimension of {x.shape[dim]} in equal parts")
    full = x.movedim(dim, 0).contiguous()
    out = full.new_empty(full.shape[0] // group.size, *full.shape[1:])
    reduce_scatter(out, full, group)
    return out.movedim(0, dim)


def exchange_rows(x: torch.Tensor, output_splits: list[int], input_splits: list[int], group: Group) -> torch.Tensor:
    """The rows that all ranks send to this one, in rank order; splits as in `all_to_all`."""
    out = x.new_empty(sum(output_splits), *x.shape[1:])
    all_to_all(out, x.contiguous(), output_splits, input_splits, group)
    return out


# ---- collectives with derivatives ------------------------------------------------------------------------------------
# A name gives the collective of forward and, after "__", that of backward. Which backward is right depends on how the
# ranks use the result: where each uses it differently, their gradients are terms of a sum; where all compute the same
# from it, each rank already has the complete gradient. The first two are f and g in Shoeybi et al. 2019, f and f bar in
# Korthikanti et al. 2022, who call the third, for sequence parallelism, g.

class Identity__AllReduce(torch.autograd.Function):
    """x is the same on every rank, and each rank uses it differently."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return sum_over_ranks(grad, ctx.group), None


class AllReduce__Identity(torch.autograd.Function):
    """Every rank has a term of the sum, and all ranks compute the same from the sum."""

    @staticmethod
    def forward(ctx, x, group):
        return sum_over_ranks(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class AllGather__ReduceScatter(torch.autograd.Function):
    """Every rank has a shard along `dim`, and each rank uses the gathered tensor differently."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return all_gather_along(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter_along(grad, ctx.dim, ctx.group), None, None


class AllToAll__AllToAll(torch.autograd.Function):
    """Rows are sent to other ranks; their gradients are sent back."""

    @staticmethod
    def forward(ctx, x, output_splits, input_splits, group):
        ctx.output_splits, ctx.input_splits, ctx.group = output_splits, input_splits, group
        return exchange_rows(x, output_splits, input_splits, group)

    @staticmethod
    def backward(ctx, grad):
        return exchange_rows(grad, ctx.input_splits, ctx.output_splits, ctx.group), None, None, None


# ---- the grid: which ranks share an axis ----------------------------------------------------------------------------
#
# RANKS is an einops pattern that numbers the ranks. Its last name varies fastest: tensor parallel ranks (kv x copy)
# have consecutive numbers, pipeline ranks are furthest apart. AXIS_GROUPS arranges the ranks as matrices
# [groups, members]:
#
#     pp          the ranks of one pipeline
#     data        all ranks with different tokens: --dp x --cp
#     replicate   hybrid sharding: ranks that have the same shard, --dp-replicate of them
#     dp          the ranks that ZeRO shards over: --dp / --dp-replicate x --cp
#     cp          the ranks with shards of the same sequences
#     tp          the ranks with shards of the same layers; if they are more than the key and value heads, also:
#     kv, kv_copy    one rank per head, and the ranks with copies of the same head
#     ep, edp     the same ranks divided for experts: an ep group has each expert once, an edp group copies of the same
#     tie         the first and the last pipeline rank, which share a tied embedding
#     world       all ranks
#
# With NCCL each process group has a communicator with buffers, and a stream that executes its work in order. So few are
# made: one call makes all groups of an axis, and axes with the same members share a group unless both have TRAFFIC, of
# different kinds. (While gradients are reduced, backward goes on to communicate over cp, tp and ep.)
#
# Pipeline transfers need the opposite: a receive that waits for its sender must not block any other. So each directed
# pair of ranks that communicate has its own group, a link. One call makes the links of all pairs without a common rank:
# 2 calls for two ranks, 4 for a chain, 4 or 6 for a ring.

RANKS = "(pp replicate shard cp kv copy)"
AXIS_GROUPS = {
    "pp": "(replicate shard cp kv copy) pp",
    "data": "(pp kv copy) (replicate shard cp)",
    "replicate": "(pp shard cp kv copy) replicate",
    "dp": "(pp replicate kv copy) (shard cp)",
    "cp": "(pp replicate shard kv copy) cp",
    "tp": "(pp replicate shard cp) (kv copy)",
    "kv": "(pp replicate shard cp copy) kv",
    "kv_copy": "(pp replicate shard cp kv) copy",
}
EXPERT_RANKS, EXPERT_GROUPS = "(pp replicate edp ep)", {"edp": "(pp replicate ep) edp", "ep": "(pp replicate edp) ep"}
AXES = ("world", "pp", "tie", "data", "replicate", "dp", "cp", "tp", "kv", "kv_copy", "ep", "edp")
TRAFFIC = {"dp": "gradients", "edp": "gradients", "cp": "keys", "tp": "activations", "ep": "tokens"}


def build_groups(grid, model, timeout_s: float = 600) -> Groups:
    """Axis -> this rank's group. Every rank must call this, with equal arguments. grid, model: a config.Grid and a
    config.Model."""
    groups = {axis: Group(axis) for axis in AXES}
    if not dist.is_initialized():
        return groups
    made = []  # per call: the ranks of all groups that it makes, this rank's group, the kind of traffic on it or None
    for axis, members in members_of_axes(grid, model, dist.get_world_size()).items():
        if max(map(len, members)) == 1:
            continue
        traffic = TRAFFIC.get(axis)
        entry = next((e for e in made if e["ranks"] == members and (not traffic or e["kind"] in (None, traffic))), None)
        if not entry:
            group = create_groups(members, timeout_s) if made else dist.group.WORLD  # "world" is the first axis
            entry = dict(ranks=members, group=group, kind=None)
            made.append(entry)
        entry["kind"] = traffic or entry["kind"]
        links = connect(members, pairs_of(grid), timeout_s) if axis == "pp" else {}
        groups[axis] = Group(axis, entry["group"], links)
    return groups


def members_of_axes(grid, model, world: int) -> dict[str, list[list[int]]]:
    """Axis -> a list of the ranks of each of its groups; "world" comes first. An axis's groups cover all ranks."""
    ranks, heads = torch.arange(world), min(grid.tp, model.kv_heads)
    lengths = dict(pp=grid.pp, replicate=grid.dp_replicate, cp=grid.cp, kv=heads, copy=grid.tp // heads)
    matrices = {axis: rearrange(ranks, f"{RANKS} -> {pattern}", **lengths) for axis, pattern in AXIS_GROUPS.items()
                if axis not in ("kv", "kv_copy") or grid.tp > model.kv_heads}
    if model.experts:
        lengths = dict(pp=grid.pp, replicate=grid.dp_replicate, ep=grid.ep)
        matrices |= {axis: rearrange(ranks, f"{EXPERT_RANKS} -> {pattern}", **lengths)
                     for axis, pattern in EXPERT_GROUPS.items()}
    members = {"world": [list(range(world))]} | {axis: matrix.tolist() for axis, matrix in matrices.items()}
    if grid.pp > 1 and not grid.v_shaped:  # else one rank has the first and the last stage
        members["tie"] = []
        for pipeline in members["pp"]:
            members["tie"] += [[pipeline[0], pipeline[-1]]] + [[r] for r in pipeline[1:-1]]
    return members


def pairs_of(grid) -> list[tuple[int, int]]:
    """(sender, receiver) of all transfers of a pipeline: activations in one direction, their gradients in the other."""
    p = grid.pp
    chain = [(r, r + 1) for r in range(p - 1)]
    if grid.chunks > 1 and not grid.v_shaped and p > 2:
        chain.append((p - 1, 0))  # from the last rank's chunk to the next chunk of the first
    return [pair for a, b in chain for pair in ((a, b), (b, a))]


def connect(pipelines: list[list[int]], pairs: list[tuple[int, int]],
            timeout_s: float) -> dict[tuple[int, int], dist.ProcessGroup]:
    """This rank's links: (sender, receiver) -> process group, for each pair that this rank is in."""
    rounds = [[] for _ in pairs]  # each pair joins the first round in which both of its ranks are free
    for pair in pairs:
        next(busy for busy in rounds if not any(set(pair) & set(other) for other in busy)).append(pair)
    me, links = dist.get_rank(), {}
    for together in filter(None, rounds):
        alone = [(r,) for r in range(len(pipelines[0])) if not any(r in pair for pair in together)]
        members = [[ranks[r] for r in part] for ranks in pipelines for part in together + alone]
        group = create_groups(members, timeout_s)
        for ranks in pipelines:
            links |= {(a, b): group for a, b in together if me in (ranks[a], ranks[b])}
    return links


# ---- what `python FILE.py` does -------------------------------------------------------------------------------------

def run_demo(demo: Callable[[Group], None], ranks: int = 1) -> None:
    """What `python FILE.py` does: run the demo, with one thread per process, on the ranks that torchrun started, or
    start so many; --help prints the file's docstring, and there are no other flags."""
    flags, spec = sys.argv[1:], sys.modules["__main__"].__spec__
    program = ["-m", spec.name] if spec else sys.argv[:1]
    torch.set_num_threads(1)
    if flags in (["-h"], ["--help"]):
        print(sys.modules["__main__"].__doc__)
    elif flags:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"{os.path.basename(program[-1])}: {' '.join(flags)}: unknown, it needs no flags", file=sys.stderr)
        sys.exit(2)
    elif "WORLD_SIZE" in os.environ:
        with world() as group:
            demo(group)
    elif ranks > 1:
        os.environ["OMP_NUM_THREADS"] = "1"  # or torchrun says that it sets it
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}",
                                  *program])
    else:
        demo(ALONE)
