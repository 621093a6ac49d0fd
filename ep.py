"""Expert parallelism: a layer has many feed-forward networks, its experts, on several ranks; a token uses k of them.

Saves: all but 1/n of the experts' weights, gradients and optimizer state. (That a token costs the FLOPs of k experts
       while it learns from E is what a mixture of experts saves, on one rank, too.)
Costs: every token is sent to its experts and back: a rank sends 4 T k H (n-1)/n elements in a layer's forward and
       backward, if experts are used equally (6 if the layer is recomputed in between); and once a layer the host waits
       for the device, to learn how many rows it receives.
Stops helping when: experts get too few rows for a fast matmul, or one gets so many that all others wait for it.

Two ranks, four experts, k = 2. Rank 0 has tokens a b c, rank 1 has d e:

                 rank 0, experts 0 and 1            rank 1, experts 2 and 3
    route        a: 0 2   b: 2 3   c: 0 1           d: 1 2   e: 2 3
    permute      a0 c0 c1 | a2 b2 b3                d1 | d2 e2 e3               by expert, hence by rank
    dispatch     a0 c0 c1   d1                      a2 b2 b3   d2 e2 e3         an all-to-all of uneven splits
    permute      0: a c   1: c d                    2: a b d e   3: b e         by expert
    compute      one grouped matmul: for each expert, its rows by its matrix; no row is dropped, none is padded
    combine      the same way back; a token's result is the sum of its k rows, each times its weight

Routing. The router gives a token E logits; a softmax over all of them, or a sigmoid of each, makes scores, in fp32 or
better. The k best experts are chosen, and their scores are the weights, usually divided by their sum. (For softmax this
is the softmax of the chosen logits alone: exp(l) / sum of all exp, divided by the sum of these over the chosen. Mixtral
computes the one, Qwen the other.) With groups of experts, only the best groups are open to a token, so that, if a group
is what a machine has, the token goes to few machines (DeepSeek-V3).

A choice has no derivative; router and tokens learn through the weights. So what was chosen is saved, and a layer that
is recomputed does not choose again: a near tie could be decided the other way, and then other rows would be sent.

Balance. Nothing above keeps the router from sending everything to one expert. Two remedies:
- An auxiliary loss (Fedus et al. 2021): E / (k S^2) sum over experts of (tokens sent there) x (sum of its
  probabilities), which is 1 if all are used equally. Over every sequence of S tokens, as in DeepSeek-V3, it is the same
  number on any grid; over micro-batches it depends on their size. What is sent has no derivative, so the loss is linear
  in the probabilities, each with a coefficient. Padding has no part in it; tokens without a label have.
- A bias (Wang et al. 2024), added to the scores for choosing only: after a step, each expert used less than the mean
  gets `rate` more, each used more gets less. No gradient, nothing that pulls against the real loss.

Folding. Attention sees the ranks of a pipeline stage as dp x cp x tp; experts see the same ranks as edp x ep: ep
neighbours have all experts between them, and the ranks of edp hold the same ones. Every rank sends the tokens it has,
which are others on each rank, so an expert's gradient is complete once it is summed over edp, with no factor.

Shazeer et al. 2017; Lepikhin et al. 2020 (GShard); Fedus et al. 2021 (Switch: the loss, section 2.2); Zoph et al. 2022
(the z-loss); Gale et al. 2022 (dropless); Wang et al. 2024 (Loss-Free Balancing); DeepSeek-AI 2024 (V3, section 2.1.2);
Liu et al. 2025 (folding). Shapes: T tokens of a rank, H hidden, F width of an expert, E experts, k chosen, n ranks of
ep, e = E/n experts here, B sequences of S tokens, R rows received here.
"""
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn
from torch.autograd import Function

from collectives import AllToAll__AllToAll, Group, all_reduce, all_to_all, rank, size, world
from config import Model
from operations import swiglu
from param import Spec, acc_dtype, accumulate_grad, accumulate_product, draw, parameter, shard_slice
from recompute import cheap, dropping_cheap, is_recomputing, once

Tensor = torch.Tensor


# ---- records --------------------------------------------------------------------------------------------------------

class Balance(NamedTuple):
    """What keeps the experts' loads equal. aux_loss, z_loss: coefficients of the two losses. over: "sequence" or
    "micro-batch", in which loads should be equal. bias_rate: of the bias, a step."""
    aux_loss: float = 0.0
    over: str = "sequence"
    z_loss: float = 0.0
    bias_rate: float = 0.0


NO_BALANCE = Balance()


class Tokens(NamedTuple):
    """What a router needs to know of the tokens that this rank routes.

    sequence: [T], of each the number of its sequence, 0 to B-1; that of padding is B. sequences: B. sharing: groups
    whose ranks have other tokens of the same sequences. weight: of a sequence in the auxiliary losses, 1 / (sequences
    of the step) times fp16's loss scale; None outside of training.
    """
    sequence: Tensor
    sequences: int
    sharing: tuple[Group, ...] = ()
    weight: float | Tensor | None = None


def routed_tokens(tokens: Tensor, cp: Group, tp: Group, weight: float | Tensor | None) -> Tokens:
    """Of tokens B s, those that this rank routes: its share, if tensor parallel ranks have the same; all, if each has
    its own. Tokens below 0 are padding. cp, tp: groups that share sequences."""
    (count, s), mine = tokens.shape, shard_slice(tokens.numel(), size(tp), rank(tp))
    sequence = torch.arange(mine.start, mine.stop, device=tokens.device) // s
    sequence = sequence.masked_fill(tokens.flatten()[mine] < 0, count)
    return Tokens(sequence, count, (cp, tp), weight)


class Route(NamedTuple):
    """Which rows go where: decided once, and used in forward, backward and recomputation."""
    group: Group
    chosen: Tensor  # T k, numbers of experts
    order: Tensor  # T k, flat: row n that is sent is choice order[n], of token order[n] // k
    inverse: Tensor  # T k, flat: where each choice is among the rows
    input_splits: list[int]  # rows sent to each rank
    output_splits: list[int]  # rows received from each rank
    rows_per_expert: list[int]  # of the experts here
    ends: Tensor  # e, int32: where their rows end, on the device
    by_expert: Tensor | None  # R: the order that sorts received rows by expert; None on one rank, where they are sorted
    by_rank: Tensor | None  # R: its inverse
    coefficients: tuple[Tensor, Tensor] | None  # of the auxiliary losses, see Router.loss_coefficients


# ---- routing --------------------------------------------------------------------------------------------------------

class Router:
    """How a layer's tokens choose, and what it remembers: a bias, and loads and losses since the last `update_biases`.

    model: experts, top_k, router and what follows in config.Model. The router's weight is a parameter of the model.
    """

    def __init__(self, name: str, model: Model, balance: Balance = NO_BALANCE, dtype: torch.dtype = torch.float32,
                 device: torch.device | str = "cpu"):
        self.name, self.model, self.balance = name, model, balance
        self.bias = torch.zeros(model.experts, dtype=acc_dtype(dtype), device=device)
        self.load = torch.zeros(model.experts, dtype=torch.int64, device=device)  # tokens that chose each expert
        self.loss = torch.zeros((), dtype=self.bias.dtype, device=device)  # auxiliary losses, summed over sequences

    def __call__(self, x: Tensor, weight: nn.Parameter, tokens: Tokens, group: Group) -> tuple[Route, Tensor]:
        """Where tokens x, T H, are sent, and their weights, T k."""
        with dropping_cheap():
            logits = RouterLogits.apply(x, weight)
        scores = logits.softmax(-1) if self.model.router == "softmax" else logits.sigmoid()
        route = once(lambda: self.route(scores.detach(), tokens, group))
        weights = scores.gather(-1, route.chosen)
        weights = (normalised(weights) if self.model.router_norm else weights) * self.model.router_scale
        if route.coefficients is not None:
            loss = self.auxiliary_loss(logits, scores, tokens, route.coefficients)
            weights = WithAuxiliaryLoss.apply(weights, loss, tokens.weight)
            if not is_recomputing():
                self.loss += loss.detach()
        return route, weights

    @torch.no_grad()
    def route(self, scores: Tensor, tokens: Tokens, group: Group) -> Route:
        """Choose experts, count loads, and exchange how many rows will be sent."""
        E, k = self.model.experts, self.model.top_k
        chosen = best_experts(scores + self.bias, self.model)
        cells = (tokens.sequence[:, None] * E + chosen).flatten()
        loads = cells.new_zeros((tokens.sequences + 1) * E).scatter_add_(0, cells, torch.ones_like(cells)).view(-1, E)
        coefficients = None
        if tokens.weight is not None:
            self.load += loads[:-1].sum(0)
            if self.balance.aux_loss or self.balance.z_loss:
                coefficients = self.loss_coefficients(loads[:-1], tokens, k)

        order = chosen.flatten().argsort(stable=True)
        sent, received = exchange_counts(loads.sum(0), group)
        rows_per_expert = [sum(column) for column in zip(*received)]
        ends = torch.tensor(rows_per_expert).cumsum(0).int().to(scores.device, non_blocking=True)
        by_expert = by_rank = None
        if size(group) > 1:
            counts = torch.tensor(received).flatten().to(scores.device, non_blocking=True)
            experts = torch.arange(len(rows_per_expert), device=scores.device).repeat(size(group))
            by_expert = experts.repeat_interleave(counts, output_size=sum(rows_per_expert)).argsort(stable=True)
            by_rank = inverse(by_expert)
        return Route(group, chosen, order, inverse(order), [*map(sum, sent)], [*map(sum, received)], rows_per_expert,
                     ends, by_expert, by_rank, coefficients)

    def loss_coefficients(self, loads: Tensor, tokens: Tokens, k: int) -> tuple[Tensor, Tensor]:
        """What the auxiliary losses multiply a sequence's probabilities at each expert by, and its squared logsumexps:
        B+1 E and B+1 1; 0 for padding. loads: B E, how many tokens of this rank chose each expert."""
        loads = loads.to(self.bias.dtype)
        for group in tokens.sharing:
            all_reduce(loads, group)
        pooled = loads.sum(0, keepdim=True) if self.balance.over == "micro-batch" else loads
        factor = self.balance.aux_loss * self.model.experts / k * len(loads) / len(pooled)
        aux = factor * pooled / (pooled.sum(-1, keepdim=True) / k).square()
        z = self.balance.z_loss / (loads.sum(-1, keepdim=True) / k)
        return tuple(F.pad(part.expand(len(loads), -1), (0, 0, 0, 1)) for part in (aux, z))

    def auxiliary_loss(self, logits: Tensor, scores: Tensor, tokens: Tokens,
                       coefficients: tuple[Tensor, Tensor]) -> Tensor:
        """The losses of this rank's tokens. Loads have no derivative; probabilities have."""
        loss = logits.new_zeros(())
        if self.balance.aux_loss:
            probabilities = scores if self.model.router == "softmax" else normalised(scores)
            loss = loss + (probabilities * coefficients[0][tokens.sequence]).sum()
        if self.balance.z_loss:
            loss = loss + (logits.logsumexp(-1, keepdim=True).square() * coefficients[1][tokens.sequence]).sum()
        return loss


class RouterLogits(Function):
    """X times the transpose of the router's weight [E, H], in at least fp32: T H -> T E."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        acc = acc_dtype(x.dtype)
        return x.to(acc) @ weight.to(acc).t()

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        exact = x.detach().to(grad.dtype)
        accumulate_grad(ctx.weight, lambda out: out.addmm_(grad.t(), exact), defer=False)
        return (grad @ ctx.weight.to(grad.dtype)).to(x.dtype), None


class WithAuxiliaryLoss(Function):
    """x, unchanged; in backward weight x loss gets its derivative, too. So a loss is added in the middle of a model."""

    @staticmethod
    def forward(ctx, x, loss, weight):
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.new_ones(()) * ctx.weight, None


def best_experts(scores: Tensor, model: Model) -> Tensor:
    """The experts with the highest scores, T k, of those in the best groups: by the sum of a group's best two."""
    if model.top_groups < model.expert_groups:
        grouped = rearrange(scores, "t (g e) -> t g e", g=model.expert_groups)
        merit = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
        best = merit.topk(model.top_groups, -1).indices
        closed = torch.ones_like(merit, dtype=torch.bool).scatter(-1, best, False)
        scores = grouped.masked_fill(closed[..., None], -torch.inf).flatten(-2)
    return scores.topk(model.top_k, -1).indices


def normalised(scores: Tensor) -> Tensor:
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)  # all sigmoids of a token may underflow


def inverse(order: Tensor) -> Tensor:
    """Where each number is in a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def exchange_counts(loads: Tensor, group: Group) -> tuple[list[list[int]], list[list[int]]]:
    """How many rows each rank gets from this one, and this one from each, by the experts that are there: two n x e.

    The one place where the host waits for the device. A run without tokens can put numbers of its own in its place.
    """
    n = size(group)
    theirs, even = torch.empty_like(loads), [len(loads) // n] * n
    all_to_all(theirs, loads, even, even, group)
    sent, received = torch.stack((loads, theirs)).view(2, n, -1).tolist()
    return sent, received


@torch.no_grad()
def update_biases(routers: list[Router], sharing: tuple[Group, ...],
                  apply: bool | Tensor = True) -> tuple[Tensor, Tensor]:
    """After a step: sum loads over all ranks that routed other tokens, change the biases, count anew.

    apply: False after a step that was skipped: biases stay. Returns the highest load of an expert over the mean of its
    layer, and the auxiliary losses of all sequences and layers, summed.
    """
    loads = torch.stack([router.load for router in routers])
    loss = torch.stack([router.loss for router in routers]).double().sum()
    for group in sharing:
        all_reduce(loads, group)
        all_reduce(loss, group)
    mean = loads.double().mean(-1, keepdim=True)
    for router, above in zip(routers, (loads - mean).sign()):
        router.bias -= above.to(router.bias.dtype) * router.balance.bias_rate * apply
        router.load.zero_()
        router.loss.zero_()
    return (loads / mean).max(), loss


# ---- dispatch and combine -------------------------------------------------------------------------------------------

def dispatch(x: Tensor, route: Route) -> Callable[[], Tensor]:
    """Start to send tokens T H to their experts. What is returned waits for the rows of the experts here, R H."""
    rows = Permute.apply(x, route)
    if size(route.group) == 1:
        return lambda: rows
    transfer = Transfer(route)
    placeholder = StartDispatch.apply(rows, transfer)
    return lambda: Reorder.apply(FinishDispatch.apply(placeholder, transfer), route.by_expert, route.by_rank)


def combine(y: Tensor, weights: Tensor, route: Route) -> Tensor:
    """Send results R H back, and sum each token's: T H."""
    if size(route.group) > 1:
        y = Reorder.apply(y, route.by_rank, route.by_expert)
        y = AllToAll__AllToAll.apply(y, route.input_splits, route.output_splits, route.group)
    return UnpermuteAndSum.apply(y, weights, route)


class Permute(Function):
    """The rows to send: each token's, as often as it chose. Backward sums them in a fixed order."""

    @staticmethod
    def forward(ctx, x, route):  # T H -> T k H, flat
        ctx.route = route
        return x[route.order // route.chosen.shape[1]]

    @staticmethod
    def backward(ctx, grad):
        return unpermuted(grad, ctx.route).sum(1), None


class UnpermuteAndSum(Function):
    """What a token gets of its experts, summed in at least fp32: rows as sent, and weights T k -> T H."""

    @staticmethod
    def forward(ctx, y, weights, route):
        ctx.save_for_backward(y, weights)
        ctx.route = route
        return (weights[:, None] @ unpermuted(y, route).to(weights.dtype))[:, 0].to(y.dtype)

    @staticmethod
    def backward(ctx, grad):
        y, weights = ctx.saved_tensors
        exact = grad.to(weights.dtype)
        dweights = (unpermuted(y, ctx.route).to(exact.dtype) @ exact[..., None])[..., 0]
        dy = (weights[..., None] * exact[:, None]).to(y.dtype).flatten(0, 1)
        return dy[ctx.route.order], dweights, None


def unpermuted(rows: Tensor, route: Route) -> Tensor:
    """Rows as sent -> T k H."""
    return rows[route.inverse].view(*route.chosen.shape, rows.shape[1])


class Reorder(Function):
    """x[order]; backward by the inverse order."""

    @staticmethod
    def forward(ctx, x, order, inverse):
        ctx.inverse = inverse
        return x[order]

    @staticmethod
    def backward(ctx, grad):
        return grad[ctx.inverse], None, None


class Transfer:
    """An all-to-all under way, in forward or in backward."""

    def __init__(self, route: Route):
        self.input_splits, self.output_splits, self.group = route.input_splits, route.output_splits, route.group

    def start(self, x: Tensor, output_splits: list[int], input_splits: list[int]) -> Tensor:
        self.out = x.new_empty(sum(output_splits), x.shape[1])
        self.pending = all_to_all(self.out, x.contiguous(), output_splits, input_splits, self.group, async_op=True)
        return self.out

    def finish(self) -> Tensor:
        self.pending.wait()
        out, self.out = self.out, None
        return out


class StartDispatch(Function):
    """Start to send rows; what is returned is a placeholder for them in the graph, until FinishDispatch.

    Backward, their gradients have been on the network since FinishDispatch's backward; what was computed in between in
    forward has had its backward in the meantime.
    """

    @staticmethod
    def forward(ctx, x, transfer):
        ctx.transfer = transfer
        transfer.start(x, transfer.output_splits, transfer.input_splits)
        return x.new_zeros(()).expand(x.shape)  # in the shape of x, as its gradient will be, and without memory

    @staticmethod
    def backward(ctx, grad):
        return ctx.transfer.finish(), None


class FinishDispatch(Function):
    """The rows received. Backward returns memory that is still being filled: its only reader, StartDispatch, waits."""

    @staticmethod
    def forward(ctx, placeholder, transfer):
        ctx.transfer = transfer
        return transfer.finish()

    @staticmethod
    def backward(ctx, grad):
        return ctx.transfer.start(grad, ctx.transfer.input_splits, ctx.transfer.output_splits), None


# ---- experts --------------------------------------------------------------------------------------------------------

class GroupedExperts(nn.Module):
    """The experts of this rank, SwiGLU networks: rows sorted by expert R H -> R H."""

    def __init__(self, make: Callable[[Spec], nn.Parameter], gate_up: Spec, down: Spec):
        super().__init__()
        self.w_gate_up, self.w_down = make(gate_up), make(down)  # e 2F H and e H F

    def forward(self, rows: Tensor, route: Route, fp8: Any = None) -> Tensor:
        """fp8: an fp8.Fp8, whose grouped linear layers are used in place of the one below."""
        linear = fp8.grouped if fp8 else GroupedLinear.apply
        inner = cheap(swiglu, linear(rows, self.w_gate_up, route))
        with dropping_cheap():
            return linear(inner, self.w_down, route)


class GroupedLinear(Function):
    """Rows, sorted by expert, each times the transpose of its expert's matrix: R in, e out in -> R out."""

    @staticmethod
    def forward(ctx, x, weight, route):
        ctx.save_for_backward(x)
        ctx.weight, ctx.route = weight, route
        return grouped_matmul(x, weight.transpose(1, 2), route)

    @staticmethod
    def backward(ctx, grad):
        (x,), grad, route = ctx.saved_tensors, grad.contiguous(), ctx.route
        x = x.detach()
        # Also if no expert here received a token: the bucket counts gradients.
        accumulate_grad(ctx.weight, lambda out: accumulate_grouped_product(out, grad, x, route))
        return grouped_matmul(grad, ctx.weight, route), None, None


def grouped_matmul(x: Tensor, matrices: Tensor, route: Route) -> Tensor:
    """R in, e in out -> R out."""
    if fits_grouped_mm(x, matrices, matrices.transpose(1, 2)):
        return F.grouped_mm(x, matrices, offs=route.ends)
    return torch.cat([rows @ matrix for rows, matrix in zip(x.split(route.rows_per_expert), matrices)])


def accumulate_grouped_product(out: Tensor, grad: Tensor, x: Tensor, route: Route) -> None:
    """out, e out in, += grad^T x of every expert's rows. One by one, they are added without a temporary."""
    if out.dtype != x.dtype and fits_grouped_mm(grad, x):
        out.add_(F.grouped_mm(grad.t(), x, offs=route.ends))
        return
    for matrix, a, b in zip(out, grad.split(route.rows_per_expert), x.split(route.rows_per_expert)):
        accumulate_product(matrix, a.t(), b)


def fits_grouped_mm(*tensors: Tensor) -> bool:
    """Whether torch's grouped matmul takes them: no fp64, and rows of multiples of 16 bytes."""
    return all(x.dtype != torch.float64 and x.shape[-1] * x.element_size() % 16 == 0 for x in tensors)


# ---- demo: python ep.py, or torchrun --nproc_per_node=4 ep.py -------------------------------------------------------

def trained(balance: Balance, group: Group, steps: int = 300) -> tuple[list[float], float]:
    """Each expert's share of the last 20 steps' tokens, and their mean loss in nats: bytes of this file after 4 others.

    Embedding, one layer of 8 experts of which a token chooses one, as in Switch, head. Ranks read different positions.
    """
    E, k, H, width, context, batch = 8, 1, 64, 64, 4, 256
    with open(__file__, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
    groups, dtype = {"ep": group}, torch.float32
    specs = {"embedding": (256, H // context), "router": (E, H), "head": (256, H)}
    weights = {name: parameter(Spec(name, shape, std=0.1), groups, dtype) for name, shape in specs.items()}
    experts = GroupedExperts(partial(parameter, groups=groups, dtype=dtype),
                             Spec("w_gate_up", (E, 2 * width, H), {"ep": 0}, std=0.1),
                             Spec("w_down", (E, H, width), {"ep": 0}, std=0.1))
    params = [*weights.values(), *experts.parameters()]
    for weight in params:
        weight.data = draw(0)(weight.spec, weight.box)
    router = Router("demo", Model(experts=E, top_k=k, router_norm=False), balance)
    optimizer = torch.optim.AdamW(params, lr=3e-3)
    generator, shares, losses = torch.Generator().manual_seed(rank(group)), torch.zeros(E), []
    for step in range(steps):
        positions = torch.randint(len(text) - context, (batch,), generator=generator)
        x = weights["embedding"][text[positions[:, None] + torch.arange(context)]].flatten(1)
        h = F.rms_norm(x, (H,))
        tokens = Tokens(torch.zeros(batch, dtype=torch.long), 1, (group,), weight=1.0)
        route, scores = router(h, weights["router"], tokens, group)
        y = combine(experts(dispatch(h, route)(), route), scores, route)
        loss = F.cross_entropy((x + y) @ weights["head"].t(), text[positions + context], reduction="sum") / batch
        (loss / size(group)).backward()
        if step >= steps - 20:
            shares += router.load
            losses.append(loss.detach())
        for name in specs:  # experts have the gradients of all tokens already
            all_reduce(weights[name].grad, group)
        optimizer.step()
        optimizer.zero_grad()
        update_biases([router], (group,))
    mean = torch.stack(losses).mean() / size(group)
    for total in (shares, mean):
        all_reduce(total, group)
    return (shares / shares.sum()).tolist(), mean.item()


def demo(group: Group) -> None:
    lines = ["Share of the tokens that each of 8 experts gets after 300 steps (equal: ████), and nats a byte:", ""]
    ways = {"nothing": NO_BALANCE, "a loss": Balance(aux_loss=0.1), "a bias": Balance(bias_rate=0.01)}
    for title, balance in ways.items():
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
