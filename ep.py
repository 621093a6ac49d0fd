"""Expert parallelism: a layer has many feed-forward networks, its experts; a token goes to k of them, whoever has them.

Saves: all but 1/n of the experts' weights, gradients and optimizer state. (That a token costs the FLOPs of k experts
       while it learns from E is what a mixture saves, on one rank, too.)
Costs: every token travels to its experts and back: a rank sends 4 T k H (n-1)/n elements in a layer's forward and
       backward, if experts are used equally (6 if the layer runs again between them); and once a layer the host waits
       for the device, to know how many rows.
Stops helping when: experts get too few rows for a fast matmul, or one gets so many that all others wait for it.

Two ranks, four experts, k = 2. Rank 0 has tokens a b c, rank 1 has d e:

                 rank 0, experts 0 and 1            rank 1, experts 2 and 3
    choose       a: 0 2   b: 2 3   c: 0 1           d: 1 2   e: 2 3
    sort         a0 c0 c1 | a2 b2 b3                d1 | d2 e2 e3               by expert, hence by rank
    dispatch     a0 c0 c1   d1                      a2 b2 b3   d2 e2 e3         an all-to-all of uneven parts
    sort         0: a c   1: c d                    2: a b d e   3: b e         by expert
    compute      one grouped matmul: for each expert, its rows by its matrix; no row is dropped, none is padded
    combine      the same way back; a token's result is the sum of its k rows, each times its weight

Choosing. The router gives a token E logits, of which softmax over all, or a sigmoid of each, makes scores, in fp32 or
better. The k best are chosen, and their scores are the weights, usually divided by their sum. (For softmax this is the
softmax of the chosen logits alone: exp(l) / sum of all exp, divided by the sum of these over the chosen. Mixtral
computes the one, Qwen the other.) With groups of experts, only the best groups are open to a token, so that, if a group
is what a machine has, it goes to few machines (DeepSeek-V3).

A choice has no derivative; router and token learn through the weights. So what was chosen is kept, and a layer that
runs again for its backward does not choose again: a near tie may fall the other way, and then other rows would travel.

Balance. Nothing above keeps the router from sending everything to one expert. Two remedies:
- A loss (Fedus et al. 2021): E / (k S^2) sum over experts of (tokens sent there) x (sum of its probabilities), which is
  1 if all are used equally. Over every sequence of S tokens, as DeepSeek-V3 does it, it is the same number on any grid;
  over micro-batches it depends on their size. What is sent has no derivative, so the loss is linear in probabilities:
  its coefficient is the price of an expert. Padding has no part in it; tokens without a label have.
- A bias (Wang et al. 2024): added to the scores for choosing only; after a step, each expert used less than the mean
  gets `rate` more, each used more gets less. No gradient, nothing that pulls against the real loss.

Folding. Attention sees the ranks of a pipeline stage as dp x cp x tp; experts see the same ranks as edp x ep, ep
neighbours having all experts between them, and edp ranks the same ones. Every rank sends the tokens it has, which are
others on each rank, so an expert's gradient is complete once it is summed over edp, with no factor.

Shazeer et al. 2017; Lepikhin et al. 2020 (GShard); Fedus et al. 2021 (Switch: the loss, section 2.2); Zoph et al. 2022
(the z-loss); Gale et al. 2022 (dropless); Wang et al. 2024 (Loss-Free Balancing); DeepSeek-AI 2024 (V3, section 2.1.2);
Liu et al. 2025 (folding). Letters: T tokens of a rank, H hidden, F width of an expert, E experts, k chosen, n ranks of
ep, e = E/n, B sequences of S tokens, R rows that arrive here.
"""
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

from collectives import AllToAll__AllToAll, Group, all_reduce, all_to_all, world
from param import Spec, accumulate_grad, add_product, at_least_fp32, draw, parameter, rank, size

Tensor = torch.Tensor


# ---- choosing -------------------------------------------------------------------------------------------------------

class Tokens(NamedTuple):
    """What routers are told of the tokens that this rank sends.

    sequence: [T], of each the number of its sequence, 0 to B-1; that of padding is B. count: B. sharers: groups whose
    ranks have other tokens of the same sequences. weight: what a sequence's loss for balance is multiplied by, 1 / (all
    sequences of the step), times fp16's loss scale; None outside of training.
    """
    sequence: Tensor
    count: int
    sharers: tuple[Group, ...] = ()
    weight: float | Tensor | None = None


class Route(NamedTuple):
    """Who goes where: made once, and used in forward, backward and recomputation."""
    chosen: Tensor  # T k, numbers of experts
    order: Tensor  # T k, flat: the n-th row that is sent is choice order[n], of token order[n] // k
    place: Tensor  # T k, flat: where that choice is among the rows, the inverse of order
    given: list[int]  # rows for each rank
    received: list[int]  # rows from each rank
    counts: list[int]  # rows of each expert that is here
    ends: Tensor  # e, int32: where they end, on the device
    by_expert: Tensor | None  # R: the arrived rows in the order of experts; None if they are, with one rank
    by_rank: Tensor | None  # R, its inverse
    prices: tuple[Tensor, Tensor] | None  # by sequence, see Router.prices


class Logits(Function):
    """X times the transpose of the router's weight [E, H], in at least fp32: T H -> T E."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        wide = at_least_fp32(x.dtype)
        return x.to(wide) @ weight.to(wide).t()

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        wide = x.detach().to(grad.dtype)
        accumulate_grad(ctx.weight, lambda out: out.addmm_(grad.t(), wide), defer=False)
        return (grad @ ctx.weight.to(grad.dtype)).to(x.dtype), None


class WithLoss(Function):
    """x, which does not change; in backward, weight x loss has its derivative, too. So a loss enters amid a model."""

    @staticmethod
    def forward(ctx, x, loss, weight):
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.new_ones(()) * ctx.weight, None


def best(scores: Tensor, k: int, groups: int = 1, top_groups: int = 1) -> Tensor:
    """The k experts with the highest scores, T k, of those in the best groups: by the sum of a group's best two."""
    if top_groups < groups:
        grouped = scores.unflatten(-1, (groups, -1))
        merit = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
        closed = torch.ones_like(merit, dtype=torch.bool).scatter(-1, merit.topk(top_groups, -1).indices, False)
        scores = grouped.masked_fill(closed[..., None], -torch.inf).flatten(-2)
    return scores.topk(k, -1).indices


class Balance(NamedTuple):
    """What keeps the experts' loads equal. aux, z: what the two losses are multiplied by. over: "sequence" or
    "micro-batch", in which loads shall be equal. rate: of the bias."""
    aux: float = 0.0
    over: str = "sequence"
    z: float = 0.0
    rate: float = 0.0


NO_BALANCE = Balance()


class Router:
    """How a layer's tokens choose, and what it remembers: the bias, and loads and losses since the last `rebalance`.

    kind: "softmax" or "sigmoid". normalise: weights sum to `scale`. groups, top_groups: see `best`.
    """

    def __init__(self, name: str, experts: int, k: int, kind: str = "softmax", normalise: bool = True,
                 scale: float = 1.0, groups: int = 1, top_groups: int = 1, balance: Balance = NO_BALANCE,
                 dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
        self.name, self.experts, self.k, self.kind, self.balance = name, experts, k, kind, balance
        self.normalise, self.scale, self.groups, self.top_groups = normalise, scale, groups, top_groups
        self.bias = torch.zeros(experts, dtype=at_least_fp32(dtype), device=device)
        self.load = torch.zeros(experts, dtype=torch.int64, device=device)  # tokens that chose each expert
        self.cost = torch.zeros((), dtype=self.bias.dtype, device=device)  # the losses, summed over sequences

    def __call__(self, x: Tensor, weight: nn.Parameter, tokens: Tokens, group: Group,
                 route: Route | None = None) -> tuple[Route, Tensor]:
        """Where tokens x T H go, and with which weights, T k. route: that of the first time, if a layer runs again."""
        logits = Logits.apply(x, weight)
        scores = logits.softmax(-1) if self.kind == "softmax" else logits.sigmoid()
        first_time = route is None
        if first_time:
            route = self.choose(scores.detach(), tokens, group)
        weights = scores.gather(-1, route.chosen)
        weights = (normalised(weights) if self.normalise else weights) * self.scale
        if route.prices is not None:
            loss = self.unequal(logits, scores, tokens, route.prices)
            weights = WithLoss.apply(weights, loss, tokens.weight)
            if first_time:
                self.cost += loss.detach()
        return route, weights

    @torch.no_grad()
    def choose(self, scores: Tensor, tokens: Tokens, group: Group) -> Route:
        """Choose, count, and find out what travels."""
        chosen = best(scores + self.bias, self.k, self.groups, self.top_groups)
        E, flat = self.experts, chosen.flatten()
        cells = (tokens.sequence[:, None] * E + chosen).flatten()
        loads = cells.new_zeros((tokens.count + 1) * E).scatter_add_(0, cells, torch.ones_like(cells)).view(-1, E)
        prices = None
        if tokens.weight is not None:
            self.load += loads[:-1].sum(0)
            prices = self.prices(loads[:-1], tokens) if self.balance.aux or self.balance.z else None

        order = flat.argsort(stable=True)
        given, received = rows_between(loads.sum(0), group)
        counts = [sum(column) for column in zip(*received)]
        ends = torch.tensor(counts).cumsum(0).int().to(scores.device, non_blocking=True)
        by_expert = by_rank = None
        if size(group) > 1:
            arriving = torch.tensor(received).flatten().to(scores.device, non_blocking=True)
            experts = torch.arange(len(counts), device=scores.device).repeat(size(group))
            by_expert = experts.repeat_interleave(arriving, output_size=sum(counts)).argsort(stable=True)
            by_rank = inverse(by_expert)
        return Route(chosen, order, inverse(order), [*map(sum, given)], [*map(sum, received)], counts, ends,
                     by_expert, by_rank, prices)

    def prices(self, loads: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """By which a sequence's probabilities at each expert, and its squared logsumexps, are multiplied in the loss:
        B+1 E and B+1 1; 0 for padding. loads: B E, how many tokens of this rank chose each expert."""
        loads = loads.to(self.bias.dtype)
        for group in tokens.sharers:
            all_reduce(loads, group)
        together = loads.sum(0, keepdim=True) if self.balance.over == "micro-batch" else loads
        factor = self.balance.aux * self.experts / self.k * len(loads) / len(together)
        aux = factor * together / (together.sum(-1, keepdim=True) / self.k).square()
        z = self.balance.z / (loads.sum(-1, keepdim=True) / self.k)
        return tuple(F.pad(price.expand(len(loads), -1), (0, 0, 0, 1)) for price in (aux, z))

    def unequal(self, logits: Tensor, scores: Tensor, tokens: Tokens, prices: tuple[Tensor, Tensor]) -> Tensor:
        """The losses of this rank's tokens. Loads have no derivative; probabilities have."""
        loss = logits.new_zeros(())
        if self.balance.aux:
            probabilities = scores if self.kind == "softmax" else normalised(scores)
            loss = loss + (probabilities * prices[0][tokens.sequence]).sum()
        if self.balance.z:
            loss = loss + (logits.logsumexp(-1, keepdim=True).square() * prices[1][tokens.sequence]).sum()
        return loss


def normalised(scores: Tensor) -> Tensor:
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)  # all sigmoids of a token may underflow


def inverse(order: Tensor) -> Tensor:
    """Where each number is in a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def rows_between(loads: Tensor, group: Group) -> tuple[list[list[int]], list[list[int]]]:
    """How many rows each rank gets from this one, and this one from each, by the experts that are there: two n x e.

    The one place where the host waits for the device. A run without tokens can put numbers of its own in its place.
    """
    n = size(group)
    theirs, even = torch.empty_like(loads), [len(loads) // n] * n
    all_to_all(theirs, loads, even, even, group)
    given, received = torch.stack((loads, theirs)).view(2, n, -1).tolist()
    return given, received


@torch.no_grad()
def rebalance(routers: list[Router], sharers: tuple[Group, ...], apply: bool | Tensor = True) -> tuple[Tensor, Tensor]:
    """After a step: add up loads over all ranks that had other tokens, move biases, begin anew.

    apply: False after a step that was skipped: biases stay. Returns the highest load of an expert over the mean of its
    layer, and the losses of all sequences and layers, summed.
    """
    loads = torch.stack([router.load for router in routers])
    cost = torch.stack([router.cost for router in routers]).double().sum()
    for group in sharers:
        all_reduce(loads, group)
        all_reduce(cost, group)
    mean = loads.double().mean(-1, keepdim=True)
    for router, above in zip(routers, (loads - mean).sign()):
        router.bias -= above.to(router.bias.dtype) * router.balance.rate * apply
        router.load.zero_()
        router.cost.zero_()
    return (loads / mean).max(), cost


# ---- there and back -------------------------------------------------------------------------------------------------

class Exchange:
    """An all-to-all under way, forward or backward."""

    def __init__(self, given: list[int], received: list[int], group: Group):
        self.given, self.received, self.group = given, received, group

    def start(self, x: Tensor, received: list[int], given: list[int]) -> Tensor:
        self.out = x.new_empty(sum(received), x.shape[1])
        self.pending = all_to_all(self.out, x.contiguous(), received, given, self.group, async_op=True)
        return self.out

    def finish(self) -> Tensor:
        self.pending.wait()
        out, self.out = self.out, None
        return out


class Depart(Function):
    """Rows begin to travel; what is returned stands for them in the graph, until Arrive.

    Backward, their gradients have been on the way since Arrive's, and what was computed beside goes back meanwhile.
    """

    @staticmethod
    def forward(ctx, x, exchange):
        ctx.exchange = exchange
        exchange.start(x, exchange.received, exchange.given)
        return x.new_zeros(()).expand(x.shape)  # in the shape of x, as its gradient will be, and without memory

    @staticmethod
    def backward(ctx, grad):
        return ctx.exchange.finish(), None


class Arrive(Function):
    """The rows that came. What backward returns is still being filled: Depart, its only reader, waits for it."""

    @staticmethod
    def forward(ctx, stand_in, exchange):
        ctx.exchange = exchange
        return exchange.finish()

    @staticmethod
    def backward(ctx, grad):
        return ctx.exchange.start(grad, ctx.exchange.given, ctx.exchange.received), None


class Spread(Function):
    """The rows that are sent: each token's, as often as it chose. Backward adds them up in a fixed order."""

    @staticmethod
    def forward(ctx, x, route):  # T H -> T k H, flat
        ctx.route = route
        return x[route.order // route.chosen.shape[1]]

    @staticmethod
    def backward(ctx, grad):
        return of_tokens(grad, ctx.route).sum(1), None


class Permuted(Function):
    """x[order], and back by the inverse."""

    @staticmethod
    def forward(ctx, x, order, inverse):
        ctx.inverse = inverse
        return x[order]

    @staticmethod
    def backward(ctx, grad):
        return grad[ctx.inverse], None, None


class WeightedSum(Function):
    """What a token gets of its experts, summed in at least fp32: rows as sent, and weights T k -> T H."""

    @staticmethod
    def forward(ctx, y, weights, route):
        ctx.save_for_backward(y, weights)
        ctx.route = route
        return (weights[:, None] @ of_tokens(y, route).to(weights.dtype))[:, 0].to(y.dtype)

    @staticmethod
    def backward(ctx, grad):
        y, weights = ctx.saved_tensors
        wide = grad.to(weights.dtype)
        dweights = (of_tokens(y, ctx.route).to(wide.dtype) @ wide[..., None])[..., 0]
        dy = (weights[..., None] * wide[:, None]).to(y.dtype).flatten(0, 1)
        return dy[ctx.route.order], dweights, None


def of_tokens(rows: Tensor, route: Route) -> Tensor:
    """T k H of rows as sent."""
    return rows[route.place].view(*route.chosen.shape, rows.shape[1])


def dispatch(x: Tensor, route: Route, group: Group) -> Callable[[], Tensor]:
    """Let tokens T H travel to their experts. What is returned waits for the rows of the experts here, R H."""
    rows = Spread.apply(x, route)
    if size(group) == 1:
        return lambda: rows
    exchange = Exchange(route.given, route.received, group)
    stand_in = Depart.apply(rows, exchange)
    return lambda: Permuted.apply(Arrive.apply(stand_in, exchange), route.by_expert, route.by_rank)


def combine(y: Tensor, weights: Tensor, route: Route, group: Group) -> Tensor:
    """Let results R H travel back, and sum each token's: T H."""
    if size(group) > 1:
        y = Permuted.apply(y, route.by_rank, route.by_expert)
        y = AllToAll__AllToAll.apply(y, route.given, route.received, group)
    return WeightedSum.apply(y, weights, route)


# ---- experts --------------------------------------------------------------------------------------------------------

class GroupedMatmul:
    """The three products of a grouped linear layer. As tp.py's Matmul, it may hold x in two forms: rows and columns."""

    def pack(self, x, route, grad=False):
        """(rows, what to keep until columns are multiplied: tensors). grad: x is a gradient."""
        return x, (x,)

    def grouped_forward(self, rows, weight, route):
        return grouped(rows, weight.transpose(1, 2), route)

    def grouped_input_grad(self, rows, weight, route):
        return grouped(rows, weight, route)

    def add_grouped_weight_grad(self, out, grad, x, route):
        add_grouped(out, *grad, *x, route)


AS_IT_IS = GroupedMatmul()


class GroupedLinear(Function):
    """Rows, sorted by expert, each times the transpose of its expert's matrix: R in, e out in -> R out."""

    @staticmethod
    def forward(ctx, x, weight, route, matmul=AS_IT_IS):
        rows, kept = matmul.pack(x, route)
        ctx.save_for_backward(*kept)
        ctx.weight, ctx.route, ctx.matmul = weight, route, matmul
        return matmul.grouped_forward(rows, weight, route)

    @staticmethod
    def backward(ctx, grad):
        x, route, matmul = [part.detach() for part in ctx.saved_tensors], ctx.route, ctx.matmul
        rows, columns = matmul.pack(grad.contiguous(), route, grad=True)
        # also if no row came: it is counted
        accumulate_grad(ctx.weight, lambda out: matmul.add_grouped_weight_grad(out, columns, x, route))
        return matmul.grouped_input_grad(rows, ctx.weight, route), None, None, None


def aligned(*tensors: Tensor) -> bool:
    """Whether torch's grouped matmul takes them: no fp64, and rows of multiples of 16 bytes."""
    return all(x.dtype != torch.float64 and x.shape[-1] * x.element_size() % 16 == 0 for x in tensors)


def grouped(x: Tensor, matrices: Tensor, route: Route) -> Tensor:
    """R in, e in out -> R out."""
    if aligned(x, matrices, matrices.transpose(1, 2)):
        return F.grouped_mm(x, matrices, offs=route.ends)
    return torch.cat([rows @ matrix for rows, matrix in zip(x.split(route.counts), matrices)])


def add_grouped(out: Tensor, grad: Tensor, x: Tensor, route: Route) -> None:
    """out, e out in, += grad^T x of every expert's rows. One by one, they are added without a temporary."""
    if out.dtype != x.dtype and aligned(grad, x):
        out.add_(F.grouped_mm(grad.t(), x, offs=route.ends))
        return
    for matrix, a, b in zip(out, grad.split(route.counts), x.split(route.counts)):
        add_product(matrix, a.t(), b)


# ---- demo: python ep.py, or torchrun --nproc_per_node=4 ep.py -------------------------------------------------------

def trained(balance: Balance, group: Group, steps: int = 300) -> tuple[list[float], float]:
    """Each expert's share of the last 20 steps' tokens, and their mean loss in nats: bytes of this file after 4 others.

    Embedding, one layer of 8 experts of which a token chooses one, as in Switch, head. Ranks have other places.
    """
    E, k, H, wide, context, batch = 8, 1, 64, 64, 4, 256
    with open(__file__, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
    groups, dtype = {"ep": group}, torch.float32
    specs = {"embedding": (256, H // context), "router": (E, H), "head": (256, H)}
    weights = {name: parameter(Spec(name, shape, std=0.1), groups, dtype) for name, shape in specs.items()}
    for name, shape in {"w_gate_up": (E, 2 * wide, H), "w_down": (E, H, wide)}.items():
        weights[name] = parameter(Spec(name, shape, {"ep": 0}, std=0.1), groups, dtype)
    for weight in weights.values():
        weight.data = draw(0)(weight.spec, weight.box)
    router = Router("demo", E, k, normalise=False, balance=balance)
    optimizer = torch.optim.AdamW(weights.values(), lr=3e-3)
    generator, shares, losses = torch.Generator().manual_seed(rank(group)), torch.zeros(E), []
    for step in range(steps):
        places = torch.randint(len(text) - context, (batch,), generator=generator)
        x = weights["embedding"][text[places[:, None] + torch.arange(context)]].flatten(1)
        h = F.rms_norm(x, (H,))
        tokens = Tokens(torch.zeros(batch, dtype=torch.long), 1, (group,), weight=1.0)
        route, given = router(h, weights["router"], tokens, group)
        gate, up = GroupedLinear.apply(dispatch(h, route, group)(), weights["w_gate_up"], route).chunk(2, -1)
        y = combine(GroupedLinear.apply(F.silu(gate) * up, weights["w_down"], route), given, route, group)
        loss = F.cross_entropy((x + y) @ weights["head"].t(), text[places + context], reduction="sum") / batch
        (loss / size(group)).backward()
        if step >= steps - 20:
            shares += router.load
            losses.append(loss.detach())
        for name in specs:  # experts have the gradients of all tokens already
            all_reduce(weights[name].grad, group)
        optimizer.step()
        optimizer.zero_grad()
        rebalance([router], (group,))
    mean = torch.stack(losses).mean() / size(group)
    for total in (shares, mean):
        all_reduce(total, group)
    return (shares / shares.sum()).tolist(), mean.item()


def demo(group: Group) -> None:
    lines = ["Share of the tokens that each of 8 experts gets after 300 steps (equal: ████), and nats a byte:", ""]
    for title, balance in ("nothing", Balance()), ("a loss", Balance(aux=0.1)), ("a bias", Balance(rate=0.01)):
        shares, loss = trained(balance, group)
        lines.append(f"    balanced by {title}: the most used {max(shares) * 8:.2f} times the mean, loss {loss:.3f}")
        lines += [f"        {expert}  {'█' * round(share * 32)}" for expert, share in enumerate(shares)]
    if rank(group) == 0:
        print("\n".join(lines))


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        with world() as group:
            demo(group)
    else:
        demo(None)
