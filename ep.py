"""Expert parallelism: experts are sharded over ranks, and each token is sent to the ranks that have its experts.

The figure has two ranks, and each token uses two of four experts. Rank 0 has tokens a b c, rank 1
has d e. A bar separates copies for, or from, rank 0 and rank 1. a0 is expert 0's result for a,
times its gate.

                                        rank 0, experts 0 and 1        rank 1, experts 2 and 3
    Router      choose                  a: 0 2   b: 2 3   c: 0 1       d: 1 2   e: 2 3
    Dispatch    permute by rank         a c | a b                      d | d e
                all-to-all              a c | d                        a b | d e
                permute by expert       0: a c   1: c d                2: a b d e   3: b e
    Experts     compute                 0: a0 c0   1: c1 d1            2: a2 b2 d2 e2   3: b3 e3
    Combine     unpermute               a0  c0+c1 | d1                 a2  b2+b3 | d2  e2+e3
                all-to-all              a0  c0+c1 | a2  b2+b3          d1 | d2  e2+e3
                unpermute               a0+a2   b2+b3   c0+c1          d1+d2   e2+e3

A layer has E feed-forward networks, its experts. A router chooses k of them for each token, and the
token's result is the sum of their results, each times a number, its gate. Each of n ranks has
tokens of its own, and E/n of the experts. Dispatch sends one copy of a token to each rank that has
any of its experts, and combine sends the results back, already summed over the experts of a rank.
The backward of dispatch is a combine of gradients, and the backward of combine is a dispatch.

Symbols: E experts, e = E/n of them on each of n ranks; expert i is on rank i // e. A token uses k
         experts. H hidden, F the width inside an expert. Tokens, copies and rows are vectors [H]:

         token    A rank routes T tokens, which are parts of B sequences of S tokens (cp and tp split
                  sequences).
         copy     A token that is sent to one rank. A rank sends U copies, and receives M copies.
         row      A received copy that one expert reads. The experts of a rank read R rows.

         In the figure, rank 0 has T = 3 tokens, sends U = 4 copies (a c | a b), receives M = 3
         copies (a c | d), and its experts read R = 4 rows (a c | c d).

Saves: A rank stores 1/n of the experts' weights and gradients, and of their optimizer state, which
       ZeRO may shard anyway.
Costs: There are four all-to-alls: dispatch and combine in forward, and both in backward. Each sends
       T u H (n-1)/n elements, where u is the number of ranks that have any of a token's experts. If
       all choices are equally likely, u = n (1 - C(E - e, k) / C(E, k)), with binomial coefficients
       C. That is 5.3 for k = 8 of 256 experts on 8 ranks. Full recomputation repeats dispatch.

       Shared experts, which every token uses, hide dispatch and its backward. Combine is not hidden.

       The k expert indices of a copy are sent once, before the copy, and are not hidden. Dispatch
       also sends the k gates of a copy, and its backward their gradients. Indices, gates and gates'
       gradients take 4 k bytes per copy each.

       Ranks exchange counts once per layer and micro-batch. The host waits for the device there, to
       learn how many rows there are. One rank alone needs no counts: its experts get T k rows, and
       grouped matmuls read on the device where each expert's rows end.
Stops helping when: Experts get too few rows for a fast matmul, or one expert gets so many that all
       ranks wait for it.

Easily got wrong: A rank computes its experts for the tokens of all n ranks, so the gradients of
       experts are not summed over the n ranks. The router's gradient is, because each rank routes
       only its own tokens.

Shazeer et al. 2017; Lepikhin et al. 2020 (GShard); Gale et al. 2022 (MegaBlocks: no token is
dropped. Here no row is padded either, except in FP8); DeepSeek-AI 2025 (DeepEP: one copy per rank).
"""
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import lcm
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from core import collectives
from core.collectives import (
    AllToAll__AllToAll,
    Group,
    all_reduce,
    all_to_all,
    exchange_rows,
    gather_rows,
    run_demo,
    sum_over_ranks,
    to_device,
)
from core.config import Model, need
from core.gradients import accumulate_grad, accumulate_product
from core.param import Spec, acc_dtype, parameter, shard_slice
from operations import swiglu, try_kernel
from recompute import Recompute, decide_once, is_recomputing

# ---- the plain version: a mixture of experts on one rank ------------------------------------------------------------
# This is a layer:
#
#     chosen, gates = plain_router(x, weight, k)
#     y = plain_mixture(x, chosen, gates, gate_up, down)

def plain_router(x: Tensor, weight: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k experts of each token, and their gates: both [T, k]. x: [T, H]. weight: [E, H]."""
    scores = (x @ weight.t()).softmax(-1)  # [T, E]
    gates, chosen = scores.topk(k)
    return chosen, gates


def plain_expert(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """A SwiGLU network: [rows, H] -> [rows, H]. gate_up: [2F, H]. down: [H, F]."""
    return swiglu(rows @ gate_up.t()) @ down.t()


def plain_mixture(x: Tensor, chosen: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return the sum over each token's experts i of gate_i times expert_i(token): [T, H] -> [T, H].

    chosen, gates: [T, k]. gate_up: [E, 2F, H]. down: [E, H, F].
    """
    y = torch.zeros_like(x)
    for i in range(len(gate_up)):
        tokens, choice = (chosen == i).nonzero(as_tuple=True)  # expert i is a token's choice-th expert
        results = plain_expert(x[tokens], gate_up[i], down[i])
        y = y.index_add(0, tokens, gates[tokens, choice][:, None] * results)
    return y


# ---- the plain version on n ranks: one dispatch and one combine per expert ------------------------------------------
# The loop stays the same. Before expert i computes, all ranks send their tokens for it to its rank;
# then its rank sends the results back.

def plain_expert_parallel(x: Tensor, chosen: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor,
                          group: Group) -> Tensor:
    """Return what plain_mixture returns, for this rank's tokens: [T, H] -> [T, H].

    chosen, gates: [T, k], for this rank's tokens.
    gate_up, down: [e, 2F, H] and [e, H, F], the weights of this rank's experts.
    x must require a gradient, because all ranks must take part in the backward of each all-to-all.
    On a rank that does not own expert i, combine would otherwise have no input that requires a
    gradient, and the owner's backward would hang.
    """
    n, e = group.size, len(gate_up)
    load = torch.bincount(chosen.flatten(), minlength=n * e)  # how many tokens of this rank chose each expert
    loads = gather_rows(load[None], group).wait().tolist()  # [n, E], of all ranks
    y = torch.zeros_like(x)
    for i in range(n * e):
        owner = i // e
        to_send, to_receive = [0] * n, [0] * n  # how many rows, to and from each rank
        to_send[owner] = loads[group.rank][i]
        if group.rank == owner:
            to_receive = [of_rank[i] for of_rank in loads]

        tokens, choice = (chosen == i).nonzero(as_tuple=True)
        rows = AllToAll__AllToAll.apply(x[tokens], to_receive, to_send, group)  # dispatch
        if group.rank == owner:
            rows = plain_expert(rows, gate_up[i % e], down[i % e])
        results = AllToAll__AllToAll.apply(rows, to_send, to_receive, group)  # combine: back the same way
        y = y.index_add(0, tokens, gates[tokens, choice][:, None] * results)
    return y


# ---- the real version: the route ------------------------------------------------------------------------------------
# It computes the same, in other ways.
#
#     plain                                          real
#     a token is sent once to each of its experts    once to each rank that has any of them
#     two all-to-alls per expert                     two for all experts: copies are sorted by rank
#     two matmuls per expert                         two grouped matmuls: rows are sorted by expert
#     gates multiply results on the token's rank     gates are sent with tokens: sums come back
#     the computation waits for each all-to-all      dispatch is in flight while shared experts compute
#
# This is a layer:
#
#     route, gates = router(x, info, group)            # info: a RoutingInfo
#     dispatched = route.dispatch(x, gates)            # starts the all-to-all
#     y = shared_experts(x)                            # hides it
#     rows, row_gates = dispatched.wait()
#     y = y + route.combine(experts(rows, row_gates, route))
#
# The route comes first: a record of where tokens go, made before any token is sent. Copies is the
# record of one sort. A Route has two Copies: to_ranks and to_experts.

class Copies(NamedTuple):
    """C copies of N items, sorted by destination.

    `sort_copies` makes them from a table [N, w]. A row of the table is an item. A cell is a
    destination, to which the item is copied, or none. A Route has two Copies:

                      N items                      C copies                    destinations
        to_ranks      the T tokens of this rank    the U copies that it sends  ranks
        to_experts    the M copies that arrive     the R rows of its experts   experts of this rank

    The example is `to_ranks` of rank 0 in the figure at the top of this file. A `-` is a cell with
    no destination: the rank has none of the token's experts.

        table         indices of its cells
        a:  0  1      a:  0  1
        b:  -  1      b:  2  3
        c:  0  -      c:  4  5

                      sorted by destination: rank 0 | rank 1
        copies        a  c | a  b
        cells         0  4 | 1  3      the cell that asks for each copy
        items         0  2 | 0  1      the item of each copy, that is the row of its cell: cell // w

                      sorted by item: a | b | c
        by_item       0  2 | 3 | 1     indices of copies: a has copies 0 and 2, b has copy 3, c has copy 1
        starts        0      2   3     where each item begins in by_item

    permute and unpermute are transposes of each other, so each is the other's derivative.
    """
    cells: Tensor  # [C], the table's cell that asks for each copy
    width: int  # w
    by_item: Tensor  # [C], the indices of the copies, sorted by item
    starts: Tensor  # [N], where each item begins in by_item

    @property
    def items(self) -> Tensor:
        """[C], the item of each copy. It is recomputed at each use, because keeping it would take 8 bytes per copy."""
        return self.cells // self.width

    def permute(self, x: Tensor) -> Tensor:
        """Copy items: [N, D] -> [C, D]."""
        return x[self.items]

    def unpermute(self, x: Tensor) -> Tensor:
        """Sum the copies of each item: [C, D] -> [N, D], in a fixed order, accumulated in at least fp32."""
        y = try_kernel(x, lambda kernels: kernels.sum_rows(x, self.by_item, self.starts))
        if y is None:
            # An embedding bag is a sum of rows of a table. Here x is the table, and each item is a bag of copies.
            y = torch.embedding_bag(x.contiguous(), self.by_item, self.starts, mode=0)[0]  # mode 0 sums each bag
        return y


def sort_copies(table: Tensor, destinations: int, C: int) -> Copies:
    """Sort the copies that a table [N, w] of destinations asks for.

    A row of the table is an item. A cell is a destination from 0 to destinations - 1, or another
    number that asks for no copy. C is the number of copies. The caller passes it in because counting
    here would make the host wait.
    """
    w = table.shape[1]
    is_copy = (table >= 0) & (table < destinations)
    cells = table.where(is_copy, destinations).flatten().argsort(stable=True)  # cells that ask for no copy come last
    cells = cells[:C].clone()  # a view would keep all N w alive
    by_item = (cells // w).argsort(stable=True)
    per_item = is_copy.sum(1)  # copies of each item
    return Copies(cells, w, by_item, per_item.cumsum(0) - per_item)


@dataclass
class Route:
    """Where a rank's tokens go: `make_route` decides it once per layer and micro-batch.

    Forward, backward and recomputation use the same route.
    """
    group: Group
    chosen: Tensor  # [T, k], the experts of each token
    to_ranks: Copies | None  # U copies of this rank's T tokens, by the rank that gets them; None: there is one rank
    to_experts: Copies  # R rows: copies of the M tokens that this rank receives, by the expert that gets them
    sent: list[int]  # how many copies go to each rank in dispatch, and come back from it in combine
    received: list[int]  # how many copies come from each rank in dispatch, and go back to it in combine
    ends: Tensor  # [e], int32, on the device: where the rows of each expert end, the offs of F.grouped_mm
    counted: list[int] | None  # rows of each of this rank's experts, if the host knows them

    @property
    def rows_per_expert(self) -> list[int]:
        """How many rows each of this rank's experts has. On one rank, the first read makes the host wait for the
        device: use `ends` where you can."""
        if self.counted is None:
            load = self.ends.diff(prepend=self.ends.new_zeros(1))
            T, k = self.chosen.shape
            counts = torch.cat((load.new_tensor([T]), load))[None]
            *_, self.counted = exchange_counts(counts, T, k, self.group)  # a call that run/dryrun.py replaces
        return self.counted

    def dispatch(self, tokens: Tensor, gates: Tensor) -> "Dispatch":
        return Dispatch(tokens, gates, self)

    def combine(self, rows: Tensor) -> Tensor:
        return Combine.apply(rows, self)


COUNTED_WRONG = "a choice of an expert was not counted, or counted twice"


def make_route(chosen: Tensor, load: Tensor, group: Group) -> Route:
    """Decide where tokens go. chosen: [T, k], their experts. load: [E], how many tokens chose each expert.

    There are five steps. In the figure, these are the values of rank 0.

        1  count               for rank 0: 2 copies, 2 + 1 rows          for rank 1: 2 copies, 2 + 1 rows
        2  exchange counts     from rank 0: 2 copies, 2 + 1 rows         from rank 1: 1 copy, 0 + 1 rows
        3  sort by rank        a c | a b
        4  exchange choices    a: 0 2   c: 0 1 | d: 1 2
        5  sort by expert      0: a c   1: c d
    """
    T, k = chosen.shape
    n, e = group.size, len(load) // group.size  # expert i is on rank i // e
    if n == 1:  # nothing is sent, so steps 1 to 4 are left out, and the host need not wait for counts
        ends = load.cumsum(0, dtype=torch.int32)
        torch._assert_async(ends[-1] == T * k, COUNTED_WRONG)
        return Route(group, chosen, None, sort_copies(chosen, e, T * k), [T], [T], ends, None)

    # 1. Count. A token that chose several experts of a rank is one copy and several rows there.
    is_sent = chosen.new_zeros(T, n, dtype=torch.bool).scatter_(1, chosen // e, True)
    counts = torch.cat((is_sent.sum(0)[:, None], load.view(n, e)), 1)

    # 2. Exchange counts. Now each rank knows the sizes of all that it sends and receives.
    sent, received, rows_per_expert = exchange_counts(counts, T, k, group)

    # 3. Sort by rank.
    ranks = torch.arange(n, device=chosen.device).where(is_sent, n)  # [T, n]; there is no rank n
    to_ranks = sort_copies(ranks, n, sum(sent))

    # 4. Exchange choices. Step 5 needs the experts of each copy; dispatch sends the copies.
    experts = exchange_rows(to_ranks.permute(chosen).int(), output_splits=received, input_splits=sent,
                            group=group)  # [M, k]

    # 5. Sort by expert. After the subtraction, this rank's experts have the indices 0 to e - 1. The
    #    experts of other ranks have indices outside of that range, which ask for no row.
    to_experts = sort_copies(experts - e * group.rank, e, sum(rows_per_expert))
    ends = to_device(torch.tensor([*accumulate(rows_per_expert)], dtype=torch.int32), chosen.device)
    return Route(group, chosen, to_ranks, to_experts, sent, received, ends, rows_per_expert)


def exchange_counts(counts: Tensor, T: int, k: int, group: Group) -> tuple[list[int], list[int], list[int]]:
    """Return (copies sent to each rank, copies received from each rank, rows of each of this rank's experts).

    counts: [n, 1 + e]. For each rank, how many copies this rank sends to it, and how many rows they
    are for each of its e experts. T and k: this rank has T tokens, which chose k experts each.
    run/dryrun.py replaces this function.
    """
    n = group.size
    from_ranks = torch.empty_like(counts)
    all_to_all(from_ranks, counts, [1] * n, [1] * n, group)
    # The host waits for the device here, and nowhere else in a layer.
    # Each [1 + e, n]. Row 0: copies. Rows 1 to e: rows per expert.
    counts_sent, counts_received = torch.stack((counts, from_ranks)).mT.tolist()
    sent, *rows_sent = counts_sent
    received, *rows_received = counts_received
    assert sum(map(sum, rows_sent)) == T * k, COUNTED_WRONG
    return sent, received, [sum(of_expert) for of_expert in rows_received]


# ---- dispatch and combine -------------------------------------------------------------------------------------------
# Dispatch copies tokens, and combine sums results. Each is the backward of the other. The gradient
# of a token is the sum of its copies' gradients, and every term of a sum gets the sum's gradient.
#
#     dispatch, forward     tokens   ─► permute by rank ─► all-to-all ─► permute by expert ─►  rows of experts
#     combine, backward     the same, of gradients of results
#
#     combine, forward      results  ◄──── unpermute ◄──── all-to-all ◄───── unpermute ◄─────  results of experts
#     dispatch, backward    the same, of gradients of rows
#
# Dispatch is a chain of autograd Functions, because its caller computes something else between the
# start and the end of the all-to-all. Combine, which nothing hides, is one Function.

class Dispatch:
    """Permute by rank, all-to-all, permute by expert. The all-to-all is in flight until `wait`."""

    def __init__(self, x: Tensor, gates: Tensor, route: Route):
        self.route = route
        if route.to_ranks is None:  # there is one rank
            self.exchange, self.arriving = None, (x, gates)
        else:
            self.exchange = Exchange(route.received, route.sent, route.group)
            self.arriving = self.exchange.start(Permute.apply(x, route.to_ranks), Permute.apply(gates, route.to_ranks))

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return the rows of this rank's experts [R, H], sorted by expert, and their gates [R]."""
        x, gates = self.arriving
        self.arriving = None  # callers may keep this object, and should not keep all tokens that have arrived
        if self.exchange is not None:
            x, gates = self.exchange.finish(x, gates)
        return Permute.apply(x, self.route.to_experts), GatesOfRows.apply(gates, self.route.to_experts)


class Permute(Function):
    """Copy tokens, and in backward sum the gradients of their copies: [N, D] -> [C, D]."""

    @staticmethod
    def forward(ctx, x, copies):
        ctx.copies = copies
        return copies.permute(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.copies.unpermute(grad), None


class GatesOfRows(Function):
    """Pick the gate of each row: [M, k] -> [R].

    A row comes from a cell of the table of experts [M, k], and its gate is in the same cell of the
    table of gates. A cell asks for at most one row, so backward has nothing to sum.
    """

    @staticmethod
    def forward(ctx, gates, to_experts):
        ctx.shape, ctx.cells = gates.shape, to_experts.cells
        return gates.flatten()[ctx.cells]

    @staticmethod
    def backward(ctx, grad):
        dgates = grad.new_zeros(ctx.shape)  # gates of other ranks' experts get 0
        dgates.view(-1).index_copy_(0, ctx.cells, grad)
        return dgates, None


class Exchange:
    """An all-to-all of several tensors that is in flight while its caller computes, in forward and in backward.

                    StartExchange                                            FinishExchange
        forward     starts to send   ──►  the caller computes           ──►  waits
        backward    waits            ◄──  backward of that computation  ◄──  starts to send back

    Both are nodes of autograd's graph. Autograd runs backward in the order drawn here: among the
    nodes whose gradients are ready, it takes the one created last.

    The tensors between the two nodes only create the graph edge. Data moves through `exchange`, the
    object of this class that both nodes hold.

    forward     StartExchange returns the buffers that the all-to-all is still filling. FinishExchange
                waits, and returns the same buffers, now full.
    backward    FinishExchange starts to send gradients, and returns the same tensors, because autograd
                checks that each buffer gets a gradient of its shape. StartExchange ignores them,
                waits for the gradients that arrive from other ranks, and returns those.
    """

    def __init__(self, to_receive: list[int], to_send: list[int], group: Group):
        """to_receive, to_send: how many rows, from and to each rank."""
        self.to_receive, self.to_send, self.group, self.in_flight = to_receive, to_send, group, []

    def start(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Start to send tensors [rows, D]. Returns the buffers that receive, for `finish`."""
        return StartExchange.apply(self, *tensors)

    def finish(self, *arriving: Tensor) -> tuple[Tensor, ...]:
        """Wait for the tensors that other ranks have sent to this one, and return them. arriving: from `start`."""
        return FinishExchange.apply(self, *arriving)

    def send(self, tensors: tuple[Tensor, ...], to_receive: list[int], to_send: list[int]) -> None:
        self.in_flight = [all_to_all(x.new_empty(sum(to_receive), x.shape[1]), x, to_receive, to_send, self.group,
                                     async_op=True) for x in tensors]

    def wait(self) -> tuple[Tensor, ...]:
        """Wait, and return the received tensors. in_flight then keeps none alive: Pending.wait drops its result."""
        return tuple(pending.wait() for pending in self.in_flight)


class StartExchange(Function):
    @staticmethod
    def forward(ctx, exchange, *tensors):
        ctx.exchange = exchange
        exchange.send(tensors, exchange.to_receive, exchange.to_send)
        return tuple(pending.result for pending in exchange.in_flight)  # still being filled

    @staticmethod
    def backward(ctx, *shapes_only):  # the gradients that FinishExchange has sent
        return None, *ctx.exchange.wait()


class FinishExchange(Function):
    @staticmethod
    def forward(ctx, exchange, *arriving):  # arriving only connects the two nodes: `exchange` has the same tensors
        ctx.exchange = exchange
        return tuple(x.view_as(x) for x in exchange.wait())  # new tensor objects: x itself is StartExchange's output

    @staticmethod
    def backward(ctx, *grads):
        exchange = ctx.exchange
        exchange.send(grads, exchange.to_send, exchange.to_receive)  # back to where the tensors came from
        return None, *grads  # only their shapes matter


class Combine(Function):
    """Unpermute, all-to-all, unpermute: [R, H] -> [T, H]. Backward is a dispatch of the gradient."""

    @staticmethod
    def forward(ctx, y, route):
        ctx.route = route
        if is_recomputing():  # in full recomputation, only what was saved on the way is needed
            return y.new_zeros(()).expand(len(route.chosen), y.shape[1])
        y = route.to_experts.unpermute(y)
        if route.to_ranks is None:
            return y
        # The way back: this rank receives as many copies as it sent in dispatch.
        y = exchange_rows(y, output_splits=route.sent, input_splits=route.received, group=route.group)
        return route.to_ranks.unpermute(y)

    @staticmethod
    def backward(ctx, grad):
        route = ctx.route
        if route.to_ranks is not None:  # with the splits of dispatch
            grad = exchange_rows(route.to_ranks.permute(grad), output_splits=route.received, input_splits=route.sent,
                                 group=route.group)
        return route.to_experts.permute(grad), None


# ---- experts --------------------------------------------------------------------------------------------------------
# Rows are sorted by expert: rows.split(route.rows_per_expert) has a tensor for each expert. Two
# grouped matmuls do the work of this loop.
#
#     for x, g, gate_up, down in experts:      # x [rows, H], gates g [rows], gate_up [2F, H], down [H, F]
#         y = (swiglu(x @ gate_up.T) * g[:, None]) @ down.T
#
# A gate multiplies hidden activations instead of the result: down (g h) = g (down h). So no result
# has to be saved for the gates' gradients.

class GroupedMatmul:
    """The three products of a grouped linear layer. fp8.Fp8Experts has the same methods, and multiplies in FP8."""

    def begin(self) -> "GroupedMatmul":
        """Return the object for one forward and its backward: this one, or in FP8 a copy.

        The copy keeps X's scale, because wgrad quantises X again.
        """
        return self

    def forward(self, x: Tensor, weight: nn.Parameter, route: Route) -> Tensor:
        return grouped_matmul(x, weight.transpose(1, 2), route)

    def prepare_grad(self, dy: Tensor, route: Route) -> tuple[Any, Any]:
        """Return dY as dgrad takes it, and as wgrad takes it."""
        return dy, dy

    def dgrad(self, dy: Any, weight: nn.Parameter, route: Route) -> Tensor:
        return grouped_matmul(dy, weight, route)

    def wgrad(self, out: Tensor, dy: Any, x: Tensor, route: Route) -> None:
        """out [e, out, in] += dY^T X of each expert's rows."""
        def by_kernel(kernels) -> bool:
            kernels.add_expert_gradients(out, dy, x, route.ends)
            return True  # try_kernel returns None where there is no kernel

        if dy.itemsize == 2 and try_kernel(dy, by_kernel):  # one launch for all experts
            return
        # A matmul per expert, because F.grouped_mm cannot add to fp32.
        for matrix, rows_dy, rows in zip(out, dy.split(route.rows_per_expert), x.split(route.rows_per_expert)):
            accumulate_product(matrix, rows_dy.t(), rows)


class GroupedExperts(nn.Module):
    """This rank's experts: rows [R, H], sorted by expert, and their gates [R] -> [R, H]."""
    mm = GroupedMatmul()  # train.py may replace it with an fp8.Fp8Experts

    def __init__(self, make: Callable[[Spec], nn.Parameter], gate_up: Spec, down: Spec):
        super().__init__()
        self.w_gate_up = make(gate_up)  # [e, 2F, H]
        self.w_down = make(down)  # [e, H, F]

    def forward(self, rows: Tensor, gates: Tensor, route: Route, recompute: Recompute = Recompute()) -> Tensor:
        gate_up = GroupedLinear.apply(rows, self.w_gate_up, self.mm, route, False)
        hidden = swiglu(gate_up, gates)  # each row times its gate
        y = GroupedLinear.apply(hidden, self.w_down, self.mm, route, is_recomputing())
        # With --recompute selective, this frees the storage of `hidden`. When the backward of y begins, it
        # is filled again with swiglu(gate_up, gates).
        recompute.drop(hidden, y, swiglu, gate_up, gates)
        return y


class GroupedLinear(Function):
    """Rows [R, in] times the transposes of weights [e, out, in] -> [R, out].

    skip: return zeros instead, in full recomputation, where no backward reads the result. It is an
    argument because only the second of an expert's two layers may skip: SwiGLU reads the first's.
    """

    @staticmethod
    def forward(ctx, x, weight, mm, route, skip):
        ctx.save_for_backward(x)
        ctx.weight, ctx.mm, ctx.route = weight, mm.begin(), route
        return x.new_zeros(()).expand(len(x), weight.shape[1]) if skip else ctx.mm.forward(x, weight, route)

    @staticmethod
    def backward(ctx, dy):
        weight, mm, route = ctx.weight, ctx.mm, ctx.route
        x = ctx.saved_tensors[0].detach()  # a queued weight gradient must not keep a graph alive
        for_dgrad, for_wgrad = mm.prepare_grad(dy.contiguous(), route)
        # Call this even if there are no rows. It asks the parameter's bucket (dp.py, zero.py) for the
        # gradient buffer. A bucket may allocate its buffer only on this call, and the bucket's reduction,
        # a collective, needs the buffer. A split backward (zero-bubble pipelines) queues the call.
        accumulate_grad(weight, lambda out: mm.wgrad(out, for_wgrad, x, route))
        return mm.dgrad(for_dgrad, weight, route), None, None, None, None


def grouped_matmul(x: Tensor, matrices: Tensor, route: Route) -> Tensor:
    """[R, in] times [e, in, out] -> [R, out]."""
    if fits_grouped_mm(x) and fits_grouped_mm(matrices):
        return F.grouped_mm(x, matrices, offs=route.ends)
    return torch.cat([rows @ matrix for rows, matrix in zip(x.split(route.rows_per_expert), matrices)])


def fits_grouped_mm(operand: Tensor) -> bool:
    """Return whether F.grouped_mm takes this operand of grouped_matmul: bf16, with rows at multiples of 16 bytes.

    A transposed `matrices` has a row stride of `in`, not of its last dimension. `in` is checked as
    the last dimension of the other operand, x.
    """
    return operand.dtype == torch.bfloat16 and operand.storage_offset() % 8 == 0 and operand.shape[-1] % 8 == 0


# ---- the router -----------------------------------------------------------------------------------------------------
# It chooses the k experts of each token, and computes a gate for each choice.
#
#     logits = x W^T                             W: `weight`, [E, H]
#     scores = softmax(logits)                   or the sigmoid of each logit
#     chosen = topk(scores + bias)               the bias only affects this choice; see the section on balance
#     gates = scores[chosen] × router_scale      first divided by their sum, unless router_norm is off
#
# Gates have a derivative, the choice has none.

class Router:
    """A router's state: the bias and, for the current step, each expert's load and the two auxiliary losses."""

    def __init__(self, name: str, weight: nn.Parameter, model: Model, balance: "Balance | None" = None):
        """name: the name of the bias in checkpoints. weight: a parameter of the model."""
        balance = balance or Balance()
        need(model.router in ("softmax", "sigmoid"), f"router {model.router}: must be softmax or sigmoid")
        need(balance.over in ("sequence", "micro-batch"), f"over {balance.over}: must be sequence or micro-batch")
        candidates = model.experts // model.expert_groups * model.top_groups
        need(model.top_k <= candidates, f"top_k {model.top_k}: top_groups have only {candidates} experts")
        self.name, self.weight, self.model, self.balance = name, weight, model, balance
        self.bias = torch.zeros(model.experts, dtype=acc_dtype(weight.dtype), device=weight.device)
        self.load = torch.zeros_like(self.bias, dtype=torch.int64)  # tokens that chose each expert
        self.loss = torch.zeros_like(self.bias[0])  # both auxiliary losses, summed over sequences

    def __call__(self, x: Tensor, info: "RoutingInfo", group: Group) -> tuple[Route, Tensor]:
        """Return the route of tokens [T, H] and their gates [T, k]. group: the ranks of ep."""
        logits = RouterLogits.apply(x, self.weight)
        scores = logits.softmax(-1) if self.model.router == "softmax" else logits.sigmoid()
        # Full recomputation uses the first run's decision: a near tie could be decided differently when recomputed.
        route, coefficients = decide_once(lambda: self.decide(scores.detach(), info, group))
        gates = scores.gather(-1, route.chosen)
        if self.model.router_norm:
            gates = normalise(gates)
        gates = gates * self.model.router_scale
        if coefficients is not None:
            loss = router_losses(self, logits, scores, info, coefficients)
            gates = AddAuxiliaryLoss.apply(gates, loss * info.aux_loss_scale)
            if not is_recomputing():
                self.loss += loss.detach()
        return route, gates

    @torch.no_grad()
    def decide(self, scores: Tensor, info: "RoutingInfo", group: Group) -> tuple[Route, tuple[Tensor, Tensor] | None]:
        """Choose experts and count loads. Return the route and the losses' coefficients, or None without losses."""
        chosen = choose_experts(scores + self.bias, self.model)
        counts = count_choices(chosen, info, self.model.experts)  # [B + 1, E]; the last row is for padding
        coefficients = None
        if info.aux_loss_scale is not None:  # in training
            self.load += counts[:-1].sum(0)
            if self.balance.aux_loss or self.balance.z_loss:
                coefficients = loss_coefficients(self, counts[:-1], info)
        return make_route(chosen, counts.sum(0), group), coefficients  # padding is sent and computed, too


class RouterLogits(Function):
    """[T, H] -> [T, E]: X times the transpose of the router's weight, in at least fp32."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        acc = acc_dtype(x.dtype)
        if x.is_cuda and x.dtype != acc:
            return torch.mm(x, weight.t(), out_dtype=acc)  # the same without a copy of X
        return x.to(acc) @ weight.to(acc).t()

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        x_acc = x.detach().to(grad.dtype)  # in at least fp32
        # Not deferred: this is too little work to fill a pipeline bubble.
        accumulate_grad(ctx.weight, lambda out: accumulate_product(out, grad.t(), x_acc), defer=False)
        return (grad @ ctx.weight.to(grad.dtype)).to(x.dtype), None


def choose_experts(scores: Tensor, model: Model) -> Tensor:
    """Return the k experts with the highest scores: [T, E] -> [T, k].

    If the experts are divided into groups (model.expert_groups), a token chooses only from the
    experts of `top_groups` groups. These are the groups with the highest scores. A group's score is
    the sum of its two highest scores of experts.
    """
    if model.top_groups < model.expert_groups:
        grouped = scores.unflatten(-1, (model.expert_groups, -1))
        group_scores = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
        best_groups = group_scores.topk(model.top_groups, -1).indices
        closed = torch.ones_like(group_scores, dtype=torch.bool).scatter(-1, best_groups, False)
        scores = grouped.masked_fill(closed[..., None], -torch.inf).flatten(-2)
    return scores.topk(model.top_k, -1).indices


def normalise(scores: Tensor) -> Tensor:
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)  # all sigmoids of a token may underflow


def count_choices(chosen: Tensor, info: "RoutingInfo", E: int) -> Tensor:
    """Return how many tokens of each sequence chose each expert: [T, k] -> [B + 1, E]. The last row is for padding."""
    counts = chosen.new_zeros(info.sequences + 1, E, dtype=torch.int64)
    places = (info.sequence_ids[:, None] * E + chosen).flatten()  # in counts
    counts.view(-1).scatter_add_(0, places, torch.ones_like(places))
    return counts


class RoutingInfo(NamedTuple):
    """Which sequences this rank's T tokens belong to, and whether they are trained on."""
    sequence_ids: Tensor  # [T], the sequence of each token, 0 to B - 1; B for padding
    sequences: int  # B
    sequence_groups: tuple[Group, ...] = ()  # process groups whose ranks have different tokens of the same sequences
    # 1 / (sequences per step) times fp16's loss scale. None: no training, so no load is counted.
    aux_loss_scale: float | Tensor | None = None


def make_routing_info(tokens: Tensor, cp: Group, tp: Group, aux_loss_scale: float | Tensor | None) -> RoutingInfo:
    """Return the RoutingInfo of tokens [B, s]. Tokens below 0 are padding.

    All ranks of `tp` pass the same tokens, and each of them routes a shard. With sequence
    parallelism, that is the shard that it has between layers. Without it, model.split_tokens picks
    the shard.
    The c ranks of `cp` have different tokens of the same sequences: s = S/c.
    """
    B, s = tokens.shape
    shard = shard_slice(tokens.numel(), tp.size, tp.rank)
    sequence_ids = torch.arange(shard.start, shard.stop, device=tokens.device) // s
    sequence_ids = sequence_ids.masked_fill(tokens.flatten()[shard] < 0, B)
    return RoutingInfo(sequence_ids, B, (cp, tp), aux_loss_scale)


# ---- balance: losses and biases that keep the experts' loads equal --------------------------------------------------
# Symbols: c_i is the number of a sequence's S tokens that chose expert i. p_ti is the probability of
# expert i for token t: its score, divided by the sum of the token's scores. Padding does not count.
# Tokens without a label do.
#
#     balance loss   E / (k S^2) sum over i of c_i (sum over t of p_ti)         1 if loads are equal
#     z-loss         1 / S sum over t of (log sum over i of exp(logit_ti))^2    keeps logits small
#     bias           b_i += rate × sign(mean load - load of i), once per step   changes the choice
#
# The two losses are auxiliary: they are added to the model's loss.
#
# Counts have no derivative. So both losses are sums over tokens, with coefficients that are known
# once experts have been chosen: E c_i / (k S^2) for p_ti, and 1 / S for the square.
# `loss_coefficients` computes them from the counts of all ranks that have tokens of a sequence.
# `router_losses` then sums over this rank's own tokens.

class Balance(NamedTuple):
    """How the experts' loads are kept equal. By default nothing keeps them equal."""
    aux_loss: float = 0.0  # coefficient of the balance loss, which is averaged over sequences
    over: str = "sequence"  # or "micro-batch": c, S and the sum of p in the balance loss are over its B sequences
    z_loss: float = 0.0  # coefficient of the z-loss, which is averaged over sequences
    router_bias_rate: float = 0.0


def loss_coefficients(router: Router, counts: Tensor, info: RoutingInfo) -> tuple[Tensor, Tensor]:
    """Return the coefficients of p_ti, [B + 1, E], and of squared logsumexps, [B + 1, 1], in the losses.

    They are E c_i / (k S^2) times Balance.aux_loss, and 1 / S times Balance.z_loss. Each has a row
    per sequence, and the last row, for padding, is 0. counts: [B, E], how many of this rank's
    tokens chose each expert.
    """
    balance, k = router.balance, router.model.top_k
    B, c = len(counts), counts.to(router.bias.dtype)
    for group in info.sequence_groups:
        all_reduce(c, group)
    S = c.sum(-1, keepdim=True) / k  # 0 for a sequence of padding only, whose coefficients no token reads
    z = balance.z_loss / S  # always by sequence
    if balance.over == "micro-batch":
        # The micro-batch is like one long sequence. The factors of its coefficient, without E / k:
        #
        #     B                     losses are summed over sequences, so the micro-batch's loss counts B times
        #     B mean(c)             the counts of the long sequence
        #     1 / (B mean(S))²      the length of the long sequence is B mean(S)
        #
        # B · B mean(c) / (B mean(S))² = mean(c) / mean(S)²: the formula of a sequence, with mean(c) and mean(S).
        c, S = c.mean(0, keepdim=True), S.mean(0, keepdim=True)
    aux = balance.aux_loss * router.model.experts / (k * S.square()) * c
    return tuple(F.pad(part.expand(B, -1), (0, 0, 0, 1)) for part in (aux, z))


def router_losses(router: Router, logits: Tensor, scores: Tensor, info: RoutingInfo,
                  coefficients: tuple[Tensor, Tensor]) -> Tensor:
    """Return the sum of the balance loss and the z-loss of this rank's tokens, over sequences, with coefficients."""
    aux, z = coefficients
    loss = logits.new_zeros(())
    if router.balance.aux_loss:
        probabilities = scores if router.model.router == "softmax" else normalise(scores)
        loss = loss + (probabilities * aux[info.sequence_ids]).sum()
    if router.balance.z_loss:
        loss = loss + (logits.logsumexp(-1, keepdim=True).square() * z[info.sequence_ids]).sum()
    return loss


class AddAuxiliaryLoss(Function):
    """Return x unchanged. In backward `loss` gets the gradient 1, as if it had been added to the model's loss."""

    @staticmethod
    def forward(ctx, x, loss):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.new_ones(())


@torch.no_grad()
def update_biases(routers: list[Router], groups: tuple[Group, ...],
                  apply: bool | Tensor = True) -> tuple[Tensor, Tensor]:
    """Sum loads and losses over the ranks of `groups`, move the biases, and reset loads and losses.

    groups: process groups whose ranks have different tokens.
    apply: False after a step that was skipped. Biases then stay the same.

    Returns the largest load of an expert, divided by the mean load of its layer; and the losses,
    summed over all sequences and layers.
    """
    sums = torch.stack([torch.cat((router.load.double(), router.loss.double()[None])) for router in routers])
    for group in groups:
        all_reduce(sums, group)  # loads and losses of all layers at once; counts are exact in fp64
    loads, loss = sums[:, :-1], sums[:, -1].sum()
    mean = loads.mean(-1, keepdim=True)
    for router, direction in zip(routers, (mean - loads).sign()):
        router.bias += direction.to(router.bias.dtype) * router.balance.router_bias_rate * apply
        router.load.zero_()
        router.loss.zero_()
    return (loads / mean).max(), loss


# ---- demo: python ep.py ---------------------------------------------------------------------------------------------

def demo(group: Group) -> None:
    show_route(group)
    show_exchanges(group)
    show_balance(group)


def tokens_of_figure(group: Group, H: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's tokens [T, H], the experts that they choose [T, 2], and the gates [T, 2]."""
    x = torch.randn(5, H, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 3
    x[:, 0] = torch.arange(5)  # so that each row shows which token it is
    chosen = torch.tensor([[0, 2], [2, 3], [0, 1], [1, 2], [2, 3]])
    own = slice(3 * group.rank, 3 * group.rank + 3)
    return x[own], chosen[own], torch.full_like(x[own, :2], 0.5)


def show_route(group: Group) -> None:
    """Send the tokens of the figure to experts, and print who sends and who reads which."""
    n, rank, E, names = group.size, group.rank, lcm(4, group.size), "abcde"
    x, chosen, gates = tokens_of_figure(group)
    route = make_route(chosen, torch.bincount(chosen.flatten(), minlength=E), group)
    rows, _ = route.dispatch(x, gates).wait()
    reads = torch.zeros(E, 5)  # which experts read which tokens
    for expert, part in enumerate(rows.split(route.rows_per_expert), E // n * rank):
        reads[expert, part[:, 0].long()] = 1
    all_reduce(reads, group)
    copies = gather_rows(torch.tensor([route.sent]), group).wait().tolist()
    if rank == 0:
        print(f"{n} ranks, {E} experts, k = 2 experts per token\n")
        for sender in range(n):
            tokens = " ".join(names[3 * sender:3 * sender + 3])
            print(f"    rank {sender} has tokens {tokens:6s}   copies that it sends to each rank: {copies[sender]}")
        for expert in range(E):
            tokens = [names[i] for i in reads[expert].nonzero()]
            print(f"    expert {expert}, on rank {expert * n // E}, reads", *tokens)


def show_exchanges(group: Group) -> None:
    """Compute the figure by the plain and by the real version, and compare with one rank that has all experts."""
    E, H, ffn = lcm(4, group.size), 8, 16
    x, chosen, gates = tokens_of_figure(group, H)
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(E, 2 * ffn, H, dtype=torch.float64, generator=generator) / 3
    down = torch.randn(E, H, ffn, dtype=torch.float64, generator=generator) / 3
    own = shard_slice(E, group.size, group.rank)  # this rank's experts
    experts = GroupedExperts(partial(parameter, groups={"ep": group}, dtype=torch.float64),
                             Spec("gate_up", gate_up.shape, {"ep": 0}), Spec("down", down.shape, {"ep": 0}))
    experts.w_gate_up.data = gate_up[own]
    experts.w_down.data = down[own]

    def plain(x: Tensor) -> Tensor:
        return plain_expert_parallel(x, chosen, gates, gate_up[own], down[own], group)

    def real(x: Tensor) -> Tensor:
        route = make_route(chosen, torch.bincount(chosen.flatten(), minlength=E), group)
        rows, row_gates = route.dispatch(x, gates).wait()
        return route.combine(experts(rows, row_gates, route))

    def run(way: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the results, and the gradients of tokens."""
        collectives.calls.clear()
        collectives.sent.clear()
        tokens = x.clone().requires_grad_()
        y = way(tokens)
        y.square().sum().backward()
        return torch.stack((y.detach(), tokens.grad))

    expected = run(lambda x: plain_mixture(x, chosen, gates, gate_up, down))
    sums = torch.stack((torch.zeros(()).double(), expected.abs().sum()))  # of differences, and of expected values
    if group.rank == 0:
        print("\n    forward and backward        collectives   bytes that rank 0 sends")
    for title, way in {"plain, expert by expert": plain, "real, with a route": real}.items():
        sums[0] += (run(way) - expected).abs().sum()
        if group.rank == 0:
            calls, nbytes = collectives.calls[group.axis], collectives.sent[group.axis]
            print(f"    {title:24s} {calls:14d} {nbytes:18d}")
    all_reduce(sums, group)
    if group.rank == 0:
        print("\nWith a route, all experts share a collective, and a token is sent to a rank once, even if the rank\n"
              "has several of its experts. One rank with all experts computes the same results and gradients.\n"
              f"Relative difference: {sums[0] / sums[1]:.0e}\n")


def show_balance(group: Group) -> None:
    """Move the biases of a router whose tokens are so much alike that most of them choose the same experts."""
    T, H, E, k, updates = 256, 16, lcm(8, group.size), 2, 30
    weight = nn.Parameter(torch.randn(E, H, generator=torch.Generator().manual_seed(0)) / 4)
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(group.rank)) + torch.linspace(-2, 2, H)
    router = Router("demo", weight, Model(experts=E, top_k=k, router="sigmoid"), Balance(router_bias_rate=0.01))
    info = RoutingInfo(torch.zeros(T, dtype=torch.long), 1, aux_loss_scale=1.0)
    loads, largest = [], []
    for _ in range(updates + 1):
        router(x, info, group)
        loads.append(sum_over_ranks(router.load, group).tolist())
        largest.append(update_biases([router], (group,))[0].item())
    if group.rank == 0:
        print(f"{group.size} ranks, {T} tokens on each, {E} experts, k = {k} experts per token\n")
        for number in range(0, updates + 1, 10):
            print(f"    after {number:2d} updates of the biases, tokens that chose each expert: {loads[number]}")
        print(f"\nThe busiest expert had {largest[0]:.1f} times the mean load; biases made it {largest[-1]:.1f} times.")


if __name__ == "__main__":
    run_demo(demo, ranks=2)
