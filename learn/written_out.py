"""Every collective, written out with send and receive: who sends what to whom, and at what cost.

A collective is a few steps per rank. In a step a rank sends one tensor, or receives one, or does both at once:

    exchange(group, outgoing, to, incoming, source)

The α-β model (Hockney 1994) predicts time. A message of s bytes starts when both ranks have reached it and takes

    α + s β seconds         α: latency of a message       β: seconds per byte, 1 / bandwidth

So an algorithm that waits for h messages one after the other (its *hops*) takes h α plus the bytes
of these messages times β. Small tensors need few hops, and large tensors need few bytes per rank.
No algorithm is best at both:

    all-reduce              hops          bytes per rank
    ring                    2 (n-1)       2 (n-1)/n X         few bytes, many hops
    tree                    2 log2 n      2 log2 n X          few messages; the root is busy from beginning to end
    recursive doubling      log2 n        log2 n X            fewest hops
    hierarchical            a ring in each node, then rings between nodes, which carry 1/m of the bytes

The docstrings below contain Python expressions for the time, and for the messages and bytes of all
ranks together. `cost` evaluates them. `recording` and `replay` count and time the actual messages,
and the tests compare the two.

    n    ranks                                          X    bytes of this rank's x
    L    log2 n, rounded up                             l    log2 n, rounded down; p = 2**l
    ones    the ones in the binary digits of 0 … n-1: n/2 log2 n if n is a power of two
    m, k    ranks per node, nodes; α2 and β2 are those of messages between nodes

Every function returns a new tensor and does not change x. All ranks must pass the same shape, dtype
and root. As in torch.distributed, nothing checks this. Sizes need not be divisible: as in
torch.tensor_split, the first chunks may have one more row or element. A group of one rank sends
nothing.

Sources: Thakur, Rabenseifner and Gropp 2005 (the choice by size); Patarasuk and Yuan 2009 (ring); Bruck et al. 1997;
Hensgen, Finkel and Manber 1988 (dissemination).
"""
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from core.collectives import Group, run_demo, sent


class Step(NamedTuple):
    """One step of a rank. Ranks are global ranks."""
    to: int | None
    source: int | None
    nbytes: int  # sent
    values: list  # of the tensor that is sent


log: list[Step] | None = None  # None: nothing is recorded


@contextmanager
def recording() -> Iterator[list[Step]]:
    """Record the steps of this rank while the `with` lasts. Use small tensors: their values are
    recorded, too."""
    global log
    log = steps = []
    try:
        yield steps
    finally:
        log = None


def exchange(group: Group, outgoing: Tensor | None = None, to: int | None = None, incoming: Tensor | None = None,
             source: int | None = None) -> None:
    """Send `outgoing` to rank `to` of the group while filling `incoming` from rank `source`; either may be left out.

    Both go into one batch. With NCCL a send may block until its receive is issued, so separate
    sends around a ring would never end.
    """
    ring, transfers = group.process_group, []
    if outgoing is not None:
        sent[group.axis] += outgoing.nbytes
        transfers.append(dist.P2POp(dist.isend, outgoing, group=ring, group_peer=to))
    if incoming is not None:
        transfers.append(dist.P2POp(dist.irecv, incoming, group=ring, group_peer=source))
    if log is not None:
        to, source = (None if peer is None else dist.get_global_rank(ring, peer) for peer in (to, source))
        nbytes, values = (0, []) if outgoing is None else (outgoing.nbytes, outgoing.flatten().tolist())
        log.append(Step(to, source, nbytes, values))
    for work in dist.batch_isend_irecv(transfers):
        work.wait()


def copy(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


def doublings(n: int) -> list[int]:
    """1, 2, 4, … below n: the distances at which trees, Bruck's algorithm and dissemination exchange."""
    return [2 ** i for i in range((n - 1).bit_length())]


# ---- from one to all, and back ---------------------------------------------------------------------------------------
# Ranks are counted from the root: v = (rank - root) % n. So the pictures, which have root 0, hold
# for every root.

def broadcast(x: Tensor, root: int, group: Group) -> Tensor:
    """The root's x on every rank, by a binomial tree: in each hop every rank that has x passes it on.

        hop 1   0 → 1
        hop 2   0 → 2   1 → 3
        hop 3   0 → 4   1 → 5   2 → 6   3 → 7

        messages  n - 1
        bytes     (n-1) * X
        time      L * (α + X*β)
    """
    n = group.size
    v = (group.rank - root) % n
    out = copy(x)
    for step in doublings(n):
        if v < step and v + step < n:
            exchange(group, out, (v + step + root) % n)
        elif step <= v < 2 * step:
            exchange(group, incoming=out, source=(v - step + root) % n)
    return out


def reduce(x: Tensor, root: int, group: Group) -> Tensor | None:
    """The sum of x on the root, None elsewhere: the tree of broadcast from its leaves to the root, with additions.

        hop 1   4 → 0   5 → 1   6 → 2   7 → 3
        hop 2   2 → 0   3 → 1
        hop 3   1 → 0

        messages  n - 1
        bytes     (n-1) * X
        time      L * (α + X*β)
    """
    n = group.size
    v = (group.rank - root) % n
    out = copy(x)
    for step in reversed(doublings(n)):
        if v < step and v + step < n:
            incoming = torch.empty_like(out)
            exchange(group, incoming=incoming, source=(v + step + root) % n)
            out += incoming
        elif step <= v < 2 * step:
            exchange(group, out, (v - step + root) % n)
    return out if v == 0 else None


def gather(x: Tensor, root: int, group: Group) -> Tensor | None:
    """[...] -> [n, ...], the x of every rank in rank order on the root, None elsewhere; messages double in size.

        hop 1   1 → 0: b      3 → 2: d      5 → 4: f      7 → 6: h
        hop 2   2 → 0: cd                   6 → 4: gh
        hop 3   4 → 0: efgh

        messages  n - 1
        bytes     ones * X
        time      L*α + (n-1)*X*β
    """
    n = group.size
    v = (group.rank - root) % n
    blocks = x.new_empty(n, *x.shape)  # the root's comes first
    blocks[v] = x.detach()
    for step in doublings(n):
        if v % (2 * step) == step:
            exchange(group, blocks[v:v + step], (v - step + root) % n)
        elif v % (2 * step) == 0 and v + step < n:
            exchange(group, incoming=blocks[v + step:v + 2 * step], source=(v + step + root) % n)
    return torch.cat((blocks[n - root:], blocks[:n - root])) if v == 0 else None  # in rank order


def scatter(x: Tensor, root: int, group: Group) -> Tensor:
    """[R, ...] -> [R/n, ...], this rank's rows of the root's x. On other ranks x only has the shape and dtype.

        hop 1   0 → 4: efgh
        hop 2   0 → 2: cd                   4 → 6: gh
        hop 3   0 → 1: b      2 → 3: d      4 → 5: f      6 → 7: h

        messages  n - 1
        bytes     ones * X/n
        time      L*α + (n-1)/n * X*β
    """
    n = group.size
    v = (group.rank - root) % n
    chunks = x.detach().tensor_split(n)
    chunks = chunks[root:] + chunks[:root]  # the root's comes first
    rows = torch.cat(chunks)
    begin = [0, *accumulate(len(chunk) for chunk in chunks)]
    for step in reversed(doublings(n)):
        if v % (2 * step) == 0 and v + step < n:
            last = min(v + 2 * step, n)
            exchange(group, rows[begin[v + step]:begin[last]], (v + step + root) % n)
        elif v % (2 * step) == step:
            last = min(v + step, n)
            exchange(group, incoming=rows[begin[v]:begin[last]], source=(v - step + root) % n)
    return rows[begin[v]:begin[v + 1]].clone()


# ---- rings -----------------------------------------------------------------------------------------------------------

def reduce_round(chunks: tuple[Tensor, ...], group: Group) -> None:
    """Replace chunk r on rank r by its sum over the ranks. Other chunks are left with terms of their sums.

    A chunk starts on the rank after its own and collects a term from every rank that it passes:

        hop 1   0 → 1: d0      1 → 2: a1      2 → 3: b2      3 → 0: c3
        hop 2   0 → 1: c03     1 → 2: d01     2 → 3: a12     3 → 0: b23       c03: chunk c of ranks 0 and 3, summed
        hop 3   0 → 1: b023    1 → 2: c013    2 → 3: d012    3 → 0: a123
    """
    n, r = group.size, group.rank
    for hop in range(n - 1):
        target = chunks[(r - hop - 2) % n]
        incoming = torch.empty_like(target)
        exchange(group, chunks[(r - hop - 1) % n], (r + 1) % n, incoming, (r - 1) % n)
        target += incoming


def gather_round(chunks: tuple[Tensor, ...], group: Group) -> None:
    """Fill all chunks on every rank; rank r already has chunk r. What has just arrived is passed on:

        hop 1   0 → 1: a    1 → 2: b    2 → 3: c    3 → 0: d
        hop 2   0 → 1: d    1 → 2: a    2 → 3: b    3 → 0: c
        hop 3   0 → 1: c    1 → 2: d    2 → 3: a    3 → 0: b
    """
    n, r = group.size, group.rank
    for hop in range(n - 1):
        exchange(group, chunks[(r - hop) % n], (r + 1) % n, chunks[(r - hop - 1) % n], (r - 1) % n)


def ring_reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """[R, ...] -> [R/n, ...], this rank's rows of the sum, by one round.

        messages  n * (n-1)
        bytes     (n-1) * X
        time      (n-1) * (α + X/n*β)
    """
    chunks = copy(x).tensor_split(group.size)
    reduce_round(chunks, group)
    return chunks[group.rank].clone()


def ring_all_gather(x: Tensor, group: Group) -> Tensor:
    """[...] -> [n, ...], the x of every rank in rank order, by one round.

        messages  n * (n-1)
        bytes     n * (n-1) * X
        time      (n-1) * (α + X*β)
    """
    out = x.new_empty(group.size, *x.shape)
    out[group.rank] = x.detach()
    gather_round(out.unbind(), group)
    return out


def ring_all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum on every rank, by two rounds; the same to the bit, because one rank adds a chunk and all others copy it.

        messages  2 * n * (n-1)
        bytes     2 * (n-1) * X
        time      2 * (n-1) * (α + X/n*β)

    No all-reduce that adds can send fewer bytes per rank. It beats the tree above X = (n-1-L) / (L - (n-1)/n) α/β:
    0.8 α/β on 4 ranks, 1.9 on 8, 11 on 64. With α 5 µs and 50 GB/s, α/β is 250 kB.
    """
    out = copy(x)
    chunks = out.view(-1).tensor_split(group.size)  # views: adding to a chunk adds to `out`
    reduce_round(chunks, group)
    gather_round(chunks, group)
    return out


def hierarchical_all_reduce(x: Tensor, inner: Group, outer: Group) -> Tensor:
    """The sum over inner x outer, two levels. inner: the ranks of this node. outer: those with this place in a node.

        node 0   0  1      1. each node: reduce_round of m chunks          0 ↔ 1   2 ↔ 3
        node 1   2  3      2. chunk by chunk: all-reduce between nodes     0 ↔ 2   1 ↔ 3
                           3. each node: gather_round                      0 ↔ 1   2 ↔ 3

        messages  2 * n * (m-1 + k-1)
        bytes     2 * (n-1) * X
        time      2 * (m-1) * (α + X/m*β) + 2 * (k-1) * (α2 + X/n*β2)

    This sends as many bytes as one ring over all ranks. Only 2 (k-1) X of them go between nodes, on
    all m network cards of a node at once, in only 2 (k-1) hops.
    """
    out = copy(x)
    chunks = out.view(-1).tensor_split(inner.size)
    pieces = chunks[inner.rank].tensor_split(outer.size)
    reduce_round(chunks, inner)
    reduce_round(pieces, outer)
    gather_round(pieces, outer)
    gather_round(chunks, inner)
    return out


# ---- doubling: few hops ----------------------------------------------------------------------------------------------

def tree_all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum on every rank: reduce to rank 0, then broadcast, see their pictures. The fewest messages possible.

        messages  2 * (n-1)
        bytes     2 * (n-1) * X
        time      2 * L * (α + X*β)
    """
    total = reduce(x, 0, group)
    return broadcast(x if total is None else total, 0, group)


def doubling_all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum on every rank by recursive doubling: pairs at distance 1, 2, 4, … exchange their sums and add.

        hop 1   0 ↔ 1   2 ↔ 3   4 ↔ 5   6 ↔ 7      sums of 2
        hop 2   0 ↔ 2   1 ↔ 3   4 ↔ 6   5 ↔ 7      sums of 4
        hop 3   0 ↔ 4   1 ↔ 5   2 ↔ 6   3 ↔ 7      sums of 8

    Let p be the largest power of two up to n. The ranks r from p on first send their x to rank r -
    p, and receive the sum at the end.

        messages  p*l + 2*(n-p)
        bytes     (p*l + 2*(n-p)) * X
        time      (l + 2*(n > p)) * (α + X*β)
    """
    n, r = group.size, group.rank
    p = 2 ** (n.bit_length() - 1)
    out = copy(x)
    incoming = torch.empty_like(out)
    if r >= p:
        exchange(group, out, r - p)
        exchange(group, incoming=out, source=r - p)
        return out
    if r + p < n:
        exchange(group, incoming=incoming, source=r + p)
        out += incoming
    for step in doublings(p):
        exchange(group, out, r ^ step, incoming, r ^ step)
        out += incoming
    if r + p < n:
        exchange(group, out, r + p)
    return out


def bruck_all_gather(x: Tensor, group: Group) -> Tensor:
    """[...] -> [n, ...], the x of every rank in rank order: all blocks that a rank has go to the rank `step` before it.

        hop 1   1 → 0: b       2 → 1: c       3 → 2: d       0 → 3: a
        hop 2   2 → 0: cd      3 → 1: da      0 → 2: ab      1 → 3: bc

    This sends as many bytes as the ring in L instead of n-1 hops, so it is never slower in this
    model. But its messages are long and go to distant ranks, and a final copy puts the blocks in
    order.

        messages  n * L
        bytes     n * (n-1) * X
        time      L*α + (n-1)*X*β
    """
    n, r = group.size, group.rank
    blocks = x.new_empty(n, *x.shape)  # of ranks r, r + 1, …
    blocks[0] = x.detach()
    for step in doublings(n):
        count = min(step, n - step)
        exchange(group, blocks[:count], (r - step) % n, blocks[step:step + count], (r + step) % n)
    return torch.cat((blocks[n - r:], blocks[:n - r]))  # in rank order


def barrier(group: Group, device: torch.device | str = "cpu") -> None:
    """Returns when every rank has called it, by dissemination: after hop h a rank has heard of 2**h ranks.

        hop 1   0 → 1   1 → 2   2 → 3   3 → 0
        hop 2   0 → 2   1 → 3   2 → 0   3 → 1

        messages  n * L
        bytes     n * L
        time      L * (α + β)
    """
    n, r = group.size, group.rank
    outgoing, incoming = torch.zeros(2, 1, dtype=torch.uint8, device=device)
    for step in doublings(n):
        exchange(group, outgoing, (r + step) % n, incoming, (r - step) % n)


# ---- from each to each -----------------------------------------------------------------------------------------------

def all_to_all(x: Tensor, output_splits: list[int], input_splits: list[int], group: Group) -> Tensor:
    """Send input_splits[i] rows of x to rank i and receive output_splits[i] rows from it, both in rank order.

        hop 1   0 → 1: b0   1 → 2: c1   2 → 3: d2   3 → 0: a3      c1: the rows of rank 1 for rank 2
        hop 2   0 → 2: c0   1 → 3: d1   2 → 0: a2   3 → 1: b3
        hop 3   0 → 3: d0   1 → 0: a1   2 → 1: b2   3 → 2: c3

    In every hop each rank sends one message and receives one. With equal splits:

        messages  n * (n-1)
        bytes     (n-1) * X
        time      (n-1) * (α + X/n*β)
    """
    n, r = group.size, group.rank
    out = x.new_empty(sum(output_splits), *x.shape[1:])
    outgoing, incoming = x.detach().contiguous().split(input_splits), out.split(output_splits)
    incoming[r].copy_(outgoing[r])
    for hop in range(1, n):
        to, source = (r + hop) % n, (r - hop) % n
        exchange(group, outgoing[to], to, incoming[source], source)
    return out


# ---- what they cost: by formula, and counted -------------------------------------------------------------------------

class Cost(NamedTuple):
    """messages and bytes: of all ranks together. hops: messages that must follow each other."""
    messages: int
    bytes: float
    hops: int
    time: float


def formulas(function: Callable) -> dict[str, str]:
    """Return the expressions in the docstring of a collective: {"messages": ..., "bytes": ...,
    "time": ...}."""
    return dict(re.findall(r"^ +(messages|bytes|time) {2,}(.+)$", function.__doc__, re.MULTILINE))


def cost(function: Callable, n: int, X: float, α: float = 1.0, β: float = 0.0, *, m: int = 1, α2: float | None = None,
         β2: float | None = None) -> Cost:
    """Evaluate the formulas in the docstring of a collective of this file. The arguments are their
    letters."""
    L, l = (n - 1).bit_length(), n.bit_length() - 1
    letters = dict(n=n, X=X, L=L, l=l, p=2 ** l, ones=sum(i.bit_count() for i in range(n)), m=m, k=n // m)
    seconds = dict(α=α, β=β, α2=α if α2 is None else α2, β2=β if β2 is None else β2)
    one_per_message = dict(α=1, β=0, α2=1, β2=0)
    texts = formulas(function)
    return Cost(eval(texts["messages"], letters), eval(texts["bytes"], letters),
                eval(texts["time"], letters | one_per_message), eval(texts["time"], letters | seconds))


class Message(NamedTuple):
    source: int
    to: int
    nbytes: int
    values: list
    end: float  # when it has been received


def replay(logs: list[list[Step]], link: Callable[[int, int], tuple[float, float]] = lambda *ranks: (1, 0)
           ) -> list[Message]:
    """Return the messages of all ranks' recorded steps, in the order in which they end, by the α-β
    model.

    link: (source, to) -> (α, β). With the default, the end of a message is the number of its hop.

    A step of a rank starts when the rank's previous step has ended. A message starts when the steps
    of both its ranks have started.
    """
    queues = defaultdict(lambda: ([], []))  # (source, to) -> numbers of the steps that send, and that receive
    for r, steps in enumerate(logs):
        for i, step in enumerate(steps):
            if step.to is not None:
                queues[r, step.to][0].append(i)
            if step.source is not None:
                queues[step.source, r][1].append(i)
    out_of = {}  # (rank, step) -> the message that it sends: (source, its step, receiver, its step)
    into = {}
    for (source, to), (sends, receives) in queues.items():
        for i, j in zip(sends, receives, strict=True):  # messages of a pair of ranks stay in order
            out_of[source, i] = into[to, j] = source, i, to, j

    @cache
    def start(r: int, i: int) -> float:
        before = out_of.get((r, i - 1)), into.get((r, i - 1))
        return max((end(*message) for message in before if message), default=0.0)

    def end(source: int, i: int, to: int, j: int) -> float:
        α, β = link(source, to)
        return max(start(source, i), start(to, j)) + α + logs[source][i].nbytes * β

    messages = [Message(source, to, logs[source][i].nbytes, logs[source][i].values, end(source, i, to, j))
                for source, i, to, j in out_of.values()]
    return sorted(messages, key=lambda message: (message.end, message.source, message.to))


# ---- demo: python -m learn.written_out ------------------------------------------------------------------------------

def two_levels(n: int) -> tuple[int, Group, Group]:
    """Return (ranks per node, this rank's node, the ranks with its place in a node).

    There are two nodes if n is even and above 2, and otherwise one.
    """
    m = n // 2 if n % 2 == 0 and n > 2 else n
    ranks = torch.arange(n).view(-1, m)
    inner, outer = (dist.new_subgroups_by_enumeration(groups.tolist())[0] for groups in (ranks, ranks.T))
    return m, Group("", inner), Group("", outer)


def examples(group: Group, inner: Group, outer: Group, x: Tensor, shard: Tensor) -> dict[Callable, Callable]:
    """Return every collective as a call without arguments, with x [n C, ...] or this rank's shard."""
    splits = [len(chunk) for chunk in x.tensor_split(group.size)]
    received = [splits[group.rank]] * group.size
    return {
        broadcast: lambda: broadcast(x, 0, group),
        reduce: lambda: reduce(x, 0, group),
        tree_all_reduce: lambda: tree_all_reduce(x, group),
        ring_all_reduce: lambda: ring_all_reduce(x, group),
        doubling_all_reduce: lambda: doubling_all_reduce(x, group),
        hierarchical_all_reduce: lambda: hierarchical_all_reduce(x, inner, outer),
        ring_reduce_scatter: lambda: ring_reduce_scatter(x, group),
        gather: lambda: gather(shard, 0, group),
        scatter: lambda: scatter(x, 0, group),
        ring_all_gather: lambda: ring_all_gather(shard, group),
        bruck_all_gather: lambda: bruck_all_gather(shard, group),
        all_to_all: lambda: all_to_all(x, received, splits, group),
        barrier: lambda: barrier(group),
    }


def label(values: list[int], n: int) -> str:
    """Return the chunks in a message of the demo, each with the ranks whose terms have been added
    to it."""
    parts: list[list[str]] = []  # [letters of chunks, digits of ranks]
    for row in (values[i:i + n] for i in range(0, len(values), n)):
        if any(row):
            letter, ranks = chr(ord("a") + max(row) - 1), "".join(str(r) for r in range(n) if row[r])
            if parts and parts[-1][1] == ranks:
                parts[-1][0] += letter
            else:
                parts.append([letter, ranks])
    return ",".join(letters + ranks for letters, ranks in parts)


def picture(messages: list[Message], n: int) -> list[str]:
    """Draw a line per hop."""
    cells = [f"{message.source} → {message.to}: {label(message.values, n)}".removesuffix(": ") for message in messages]
    width, lines = max(map(len, cells), default=0) + 3, defaultdict(str)
    for message, cell in zip(messages, cells):
        lines[message.end] += cell.ljust(width)
    return [f"    hop {hop:g}   {line}".rstrip() for hop, line in lines.items()]


def demo(group: Group) -> None:
    n, r = group.size, group.rank
    m, inner, outer = two_levels(n)
    x = torch.zeros(n, n, dtype=torch.int64)
    x[:, r] = torch.arange(1, n + 1)  # row c is chunk c, and column r of it is rank r's term
    lines = [f"{n} ranks. a, b, c, … are chunks; c013 is chunk c of ranks 0, 1 and 3, summed.", ""]
    table = ["collective                  messages     bytes  hops    time by formula"]
    for function, call in examples(group, inner, outer, x, x[r:r + 1]).items():
        with recording() as steps:
            call()
        logs = [None] * n
        dist.all_gather_object(logs, steps, group=group.process_group)
        messages = replay(logs)
        nbytes = sum(message.nbytes for message in messages)
        hops = messages[-1].end if messages else 0
        X = 8 * n if function in (gather, ring_all_gather, bruck_all_gather) else 8 * n * n
        assert (len(messages), nbytes, hops) == cost(function, n, X, m=m)[:3], function
        lines += [function.__name__, "    " + function.__doc__.splitlines()[0], *picture(messages, n), ""]
        table.append(function.__name__.ljust(26) + f"{len(messages):10,}{nbytes:10,}{hops:6g}    "
                     + formulas(function)["time"])
    lines += [*table, "", "Messages, bytes and hops were counted, and equal the formulas in the docstrings."]
    if r == 0:
        print("\n".join(lines))


if __name__ == "__main__":
    run_demo(demo, ranks=4)
