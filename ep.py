"""Expert parallelism: a layer's feed-forward networks, its experts, are sharded over ranks; each token uses k of them.

Saves: all but 1/n of the experts' weights, gradients and optimizer state.
Costs: every token is sent once to each of the u ranks that have experts of it, and back: a rank sends 4 T u H (n-1)/n
       elements per layer in forward and backward, 5 with full recomputation; also 8 k bytes with each token, and 4 k
       with its gradient, rounded up to 16. If all choices are equally likely, u = n (1 - C(E - e, k) / C(E, k)), with
       binomials C: for k = 8 of 256 experts on 8 ranks 5.3. Once per layer the host waits for the device, to learn how
       many tokens the rank will receive; on one rank in bf16 it never does.
Stops helping when: experts get too few rows for a fast matmul, or one gets so many that all ranks wait for it.

Shapes: T tokens of a rank, H hidden, F ffn of an expert, E experts, k experts per token, n ranks of ep, e = E/n experts
of a rank, B sequences of S tokens, U copies of tokens that a rank sends, M that it receives, R rows of its experts.

A layer in three lines:

    route, gates = router(x, info, group)                     x [T, H], gates [T, k]; the router's logits are [T, E]
    rows, row_gates = dispatch(x, gates, route)()             [R, H], [R]
    y = combine(experts(rows, row_gates, route), route)       [R, H] -> [T, H]

Two ranks, four experts, k = 2. Rank 0 has the tokens a b c, rank 1 has d e:

                 rank 0, experts 0 and 1            rank 1, experts 2 and 3
    route        a: 0 2   b: 2 3   c: 0 1           d: 1 2   e: 2 3
    copies       a c | a b                          d | d e
    dispatch     a c d                              a b d e
    rows         0: a c   1: c d                    2: a b d e   3: b e
    combine      a0  c0+c1  d1                      a2  b2+b3  d2  e2+e3
                 a0+a2   b2+b3   c0+c1              d1+d2   e2+e3

Each token is copied once for each rank with experts of it. Dispatch is an all-to-all with uneven splits. A rank makes
rows of the tokens that it has received, one for each of its experts, sorted by expert. One grouped matmul multiplies
each expert's rows by its matrix: no row is dropped, and none is padded. A token brings its gates, which multiply the
experts' hidden activations: by linearity this is the results times the gates, and no result has to be saved for the
gates' gradients. Combine sums a token's results on each rank, sends the sums back, and sums those.

Routing. The router computes E logits per token. A softmax over all of them, or a sigmoid of each, makes scores, in at
least fp32. The k experts with the highest scores are chosen; their scores, usually divided by their sum, are the gates.
(After a softmax this equals a softmax over the k chosen logits.) With groups of experts, a token may choose only from
the best groups: with a group per machine, it is sent to few machines. The choice has no derivative; the router learns
through the gates. Recomputation reuses the saved choice, because a near tie could be decided differently.

Balance. Nothing above keeps the router from sending all tokens to one expert. Two remedies, and a loss that keeps
logits small; c_e of the S tokens of a sequence chose expert e, and p_te is its probability for token t:

    auxiliary loss   E / (k S^2) sum over e of c_e (sum over t of p_te)       1 if experts are used equally
    bias             b_e += rate x sign(mean load - load of e), per step      added to the scores, for choosing only
    z-loss           1 / S sum over t of (log sum over e of exp(logit_te))^2

The losses are averaged over sequences. The auxiliary loss per sequence is the same on any grid; per micro-batch, it
depends on the size of micro-batches. c_e has no derivative. Padding does not count; tokens without a label do.

Folding. Experts see the ranks of a pipeline stage, dp x cp x tp, as edp x ep. The ranks of an ep group have all experts
between them, those of an edp group the same ones. All ranks send different tokens, so that the sum over edp is an
expert's complete gradient, with no further factor.

Shazeer et al. 2017; Lepikhin et al. 2020 (GShard); Fedus et al. 2021 (Switch, section 2.2: the auxiliary loss); Zoph et
al. 2022 (ST-MoE: the z-loss); Gale et al. 2022 (MegaBlocks: no dropped rows); Wang et al. 2024 (the bias); DeepSeek-AI
2024 (V3, section 2.1.2: groups, the loss per sequence); Liu et al. 2025 (folding).
"""
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.autograd import Function

from collectives import Group, all_reduce, all_to_all, exchange_rows, rank, run_demo, size, to_device
from config import Model
from operations import load_kernels, uses_kernels, weighted_swiglu
from param import Spec, acc_dtype, accumulate_grad, accumulate_product, draw, parameter, shard_slice
from recompute import Recompute, decide_once, is_recomputing

# ---- records --------------------------------------------------------------------------------------------------------

class Balance(NamedTuple):
    """How the experts' loads are kept equal: by default not at all. aux_loss, z_loss: coefficients of the two losses.
    over: "sequence" or "micro-batch", for the auxiliary loss. bias_rate: how far a bias moves per step."""
    aux_loss: float = 0.0
    over: str = "sequence"
    z_loss: float = 0.0
    bias_rate: float = 0.0


class RoutingInfo(NamedTuple):
    """What a router needs to know of the T tokens that this rank routes.

    sequence_ids: [T], the sequence of each token, 0 to B-1; B for padding. sequences: B. groups: those whose ranks have
    different tokens of the same sequences. aux_loss_scale: the factor of a sequence's losses, 1 / (sequences per step)
    times fp16's loss scale; None outside of training.
    """
    sequence_ids: Tensor
    sequences: int
    groups: tuple[Group, ...] = ()
    aux_loss_scale: float | Tensor | None = None


def make_routing_info(tokens: Tensor, cp: Group, tp: Group, aux_loss_scale: float | Tensor | None) -> RoutingInfo:
    """The RoutingInfo of tokens [B, S]. The ranks of `tp` have the same tokens, and each routes a shard of them; the
    ranks of `cp` have different tokens of the same sequences. Tokens below 0 are padding."""
    B, S = tokens.shape
    shard = shard_slice(tokens.numel(), size(tp), rank(tp))
    sequence_ids = torch.arange(shard.start, shard.stop, device=tokens.device) // S
    sequence_ids = sequence_ids.masked_fill(tokens.flatten()[shard] < 0, B)
    return RoutingInfo(sequence_ids, B, (cp, tp), aux_loss_scale)


class Copies(NamedTuple):
    """Copies of tokens, and what `sum_per_token` needs to sum what became of them. C copies of N tokens."""
    order: Tensor  # [C], where each copy is from: see Route
    by_token: Tensor  # [C], the order that sorts copies by token
    starts: Tensor  # [N], where a token's copies start in by_token


def group_by_token(order: Tensor, token: Tensor, per_token: Tensor) -> Copies:
    """token: [C], of which token each copy is. per_token: [N], how many copies a token has."""
    return Copies(order, token.argsort(stable=True), per_token.cumsum(0) - per_token)


@dataclass
class Route:
    """Who computes which tokens: decided once per layer, and used in forward, backward and recomputation."""
    group: Group
    chosen: Tensor  # [T, k], the experts of each token
    ends: Tensor  # on the device, int32: where the rows of each expert end; [E] at first, [e] of this rank's after all
    coefficients: tuple[Tensor, Tensor] | None  # see Router.loss_coefficients
    # The R rows of this rank's experts, sorted by expert: row i is choice order[i] of all M k, of token order[i] // k.
    # On several ranks they are known when tokens have been received.
    rows: Copies | None = None
    # On several ranks, the U copies that are sent, one to each rank with experts of the token, sorted by rank: entry
    # r T + t of `order` is token t's copy for rank r.
    sent: Copies | None = None
    input_splits: list[int] | None = None  # copies sent to each rank
    output_splits: list[int] | None = None  # copies received from each rank

    @cached_property
    def rows_per_expert(self) -> list[int]:
        """Rows of each expert of this rank. On several ranks it is set; on one the host waits if asked: not in bf16."""
        return read_counts(self)


# ---- routing --------------------------------------------------------------------------------------------------------

class Router:
    """Chooses the experts of a layer's tokens. Its state is a bias per expert, and loads and losses per step.

    name: of the bias, in checkpoints. weight: [E, H], a parameter of the model.
    """

    def __init__(self, name: str, weight: nn.Parameter, model: Model, balance: Balance = Balance()):
        self.name, self.weight, self.model, self.balance = name, weight, model, balance
        self.bias = torch.zeros(model.experts, dtype=acc_dtype(weight.dtype), device=weight.device)
        self.load = torch.zeros_like(self.bias, dtype=torch.int64)  # tokens that chose each expert
        self.loss = torch.zeros_like(self.bias[0])  # auxiliary losses, summed over sequences

    def __call__(self, x: Tensor, info: RoutingInfo, group: Group) -> tuple[Route, Tensor]:
        """Where tokens [T, H] are sent, and their gates [T, k]. group: of expert parallelism."""
        logits = RouterLogits.apply(x, self.weight)
        scores = logits.softmax(-1) if self.model.router == "softmax" else logits.sigmoid()
        route = decide_once(lambda: self.route(scores.detach(), info, group))
        gates = scores.gather(-1, route.chosen)
        if self.model.router_norm:
            gates = normalise(gates)
        gates = gates * self.model.router_scale
        if route.coefficients is not None:
            loss = self.auxiliary_loss(logits, scores, info, route.coefficients)
            gates = AddAuxiliaryLoss.apply(gates, loss, info.aux_loss_scale)
            if not is_recomputing():
                self.loss += loss.detach()
        return route, gates

    @torch.no_grad()
    def route(self, scores: Tensor, info: RoutingInfo, group: Group) -> Route:
        """Choose experts, count loads, and exchange how many rows each rank will send."""
        E = self.model.experts
        chosen = choose_experts(scores + self.bias, self.model)
        cells = (info.sequence_ids[:, None] * E + chosen).flatten()  # each choice's cell in a table [B + 1, E]
        counts = cells.new_zeros((info.sequences + 1) * E).scatter_add_(0, cells, torch.ones_like(cells)).view(-1, E)
        coefficients = None
        if info.aux_loss_scale is not None:
            self.load += counts[:-1].sum(0)
            if self.balance.aux_loss or self.balance.z_loss:
                coefficients = self.loss_coefficients(counts[:-1], info)

        route = Route(group, chosen, counts.sum(0).cumsum(0).int(), coefficients)
        if size(group) == 1:
            route.rows = sort_by_expert(chosen, E, chosen.numel())
        else:
            plan_copies(route, counts.sum(0))
        return route

    def loss_coefficients(self, counts: Tensor, info: RoutingInfo) -> tuple[Tensor, Tensor]:
        """The factors of probabilities, [B + 1, E], and of squared logsumexps, [B + 1, 1], in the losses of their
        sequence; 0 for padding. counts: [B, E], how many of this rank's tokens chose each expert."""
        k, counts = self.model.top_k, counts.to(self.bias.dtype)
        for group in info.groups:
            all_reduce(counts, group)
        pooled = counts.sum(0, keepdim=True) if self.balance.over == "micro-batch" else counts
        factor = self.balance.aux_loss * self.model.experts / k * len(counts) / len(pooled)
        aux = factor * pooled / (pooled.sum(-1, keepdim=True) / k).square()
        z = self.balance.z_loss / (counts.sum(-1, keepdim=True) / k)
        return tuple(F.pad(part.expand(len(counts), -1), (0, 0, 0, 1)) for part in (aux, z))

    def auxiliary_loss(self, logits: Tensor, scores: Tensor, info: RoutingInfo,
                       coefficients: tuple[Tensor, Tensor]) -> Tensor:
        """Both losses of this rank's tokens, times their coefficients, summed over sequences."""
        aux, z = coefficients
        loss = logits.new_zeros(())
        if self.balance.aux_loss:
            probabilities = scores if self.model.router == "softmax" else normalise(scores)
            loss = loss + (probabilities * aux[info.sequence_ids]).sum()
        if self.balance.z_loss:
            loss = loss + (logits.logsumexp(-1, keepdim=True).square() * z[info.sequence_ids]).sum()
        return loss


class RouterLogits(Function):
    """[T, H] -> [T, E]: X times the transpose of the router's weight, in at least fp32."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        acc = acc_dtype(x.dtype)
        return x.to(acc) @ weight.to(acc).t()

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        accumulate_grad(ctx.weight, lambda out: out.addmm_(grad.t(), x.detach().to(grad.dtype)), defer=False)
        return (grad @ ctx.weight.to(grad.dtype)).to(x.dtype), None


class AddAuxiliaryLoss(Function):
    """x, unchanged. In backward `loss` gets the gradient `weight`: weight x loss is added to the model's loss."""

    @staticmethod
    def forward(ctx, x, loss, weight):
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.new_ones(()) * ctx.weight, None


def choose_experts(scores: Tensor, model: Model) -> Tensor:
    """[T, E] -> [T, k]: the highest scores in the best groups. A group's score is the sum of its two highest."""
    if model.top_groups < model.expert_groups:
        grouped = rearrange(scores, "t (g e) -> t g e", g=model.expert_groups)
        group_scores = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
        best_groups = group_scores.topk(model.top_groups, -1).indices
        closed = torch.ones_like(group_scores, dtype=torch.bool).scatter(-1, best_groups, False)
        scores = grouped.masked_fill(closed[..., None], -torch.inf).flatten(-2)
    return scores.topk(model.top_k, -1).indices


def normalise(scores: Tensor) -> Tensor:
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)  # all sigmoids of a token may underflow


def sort_by_expert(experts: Tensor, e: int, R: int) -> Copies:
    """The rows of this rank's experts. experts: [M, k], the choices of each token; e: an expert of a different rank."""
    order = experts.flatten().argsort(stable=True)[:R].clone()  # a view would save all M k
    return group_by_token(order, order // experts.shape[1], (experts < e).sum(1))


def plan_copies(route: Route, rows: Tensor) -> None:
    """Fill the fields for several ranks. rows: [E], how many rows of this rank's tokens each expert has."""
    (T, k), n = route.chosen.shape, size(route.group)
    rank_of = route.chosen // (len(rows) // n)
    is_sent = rows.new_zeros(n, T, dtype=torch.bool).scatter_(0, rank_of.t(), True)
    counts = torch.cat((rows.view(n, -1), is_sent.sum(1, keepdim=True)), 1)
    route.input_splits, route.output_splits, route.rows_per_expert = exchange_counts(counts, T, k, route.group)
    route.ends = to_device(torch.tensor(route.rows_per_expert), rows.device).cumsum(0).int()
    order = (~is_sent.flatten()).argsort(stable=True)[:sum(route.input_splits)].clone()
    route.sent = group_by_token(order, order % T, is_sent.sum(0))


def exchange_counts(counts: Tensor, T: int, k: int, group: Group) -> tuple[list[int], list[int], list[int]]:
    """(copies that this rank sends to each rank, copies that it receives from each, rows of each of its experts).

    counts: [n, e + 1], for each rank the rows of its e experts, and the copies that it is sent, of T tokens that chose
    k experts each. The host waits for the device here; run/dryrun.py replaces this.
    """
    received_counts, splits = torch.empty_like(counts), [1] * size(group)
    all_to_all(received_counts, counts, splits, splits, group)
    sent, received = torch.stack((counts, received_counts)).tolist()
    assert sum(sum(rows) for *rows, _ in sent) == T * k, "a choice of an expert was not counted, or counted twice"
    input_splits, output_splits = ([copies for *_, copies in of_ranks] for of_ranks in (sent, received))
    *rows_per_expert, _ = map(sum, zip(*received))
    return input_splits, output_splits, rows_per_expert


def read_counts(route: Route) -> list[int]:
    """The rows of each expert. The host waits for the device here, too; run/dryrun.py replaces this."""
    ends = [0, *map(int, route.ends.cpu())]
    return [stop - start for start, stop in pairwise(ends)]


@torch.no_grad()
def update_biases(routers: list[Router], groups: tuple[Group, ...],
                  apply: bool | Tensor = True) -> tuple[Tensor, Tensor]:
    """After a step: sum loads and losses over the ranks of `groups`, move the biases, reset loads and losses.

    apply: False leaves the biases as they are, after a step that was skipped. Returns the largest load of an expert
    over the mean of its layer, and the losses summed over all sequences and layers.
    """
    sums = torch.stack([torch.cat((router.load.double(), router.loss.double()[None])) for router in routers])
    for group in groups:
        all_reduce(sums, group)  # one for loads (counts are exact in fp64) and losses of all layers
    loads, loss = sums[:, :-1], sums[:, -1].sum()
    mean = loads.mean(-1, keepdim=True)
    for router, direction in zip(routers, (mean - loads).sign()):
        router.bias += direction.to(router.bias.dtype) * router.balance.bias_rate * apply
        router.load.zero_()
        router.loss.zero_()
    return (loads / mean).max(), loss


# ---- dispatch and combine -------------------------------------------------------------------------------------------

def dispatch(x: Tensor, gates: Tensor, route: Route) -> Callable[[], tuple[Tensor, Tensor]]:
    """Start to send tokens [T, H] and gates [T, k]. Calling the result waits, and returns the rows of this rank's
    experts [R, H], and their gates, [R]."""
    if size(route.group) == 1:
        received = MakeRows.apply(x, gates, route)
        return lambda: received
    transfer = Transfer(route)
    placeholder = StartDispatch.apply(x, gates, transfer)
    return lambda: MakeRows.apply(*FinishDispatch.apply(placeholder, x.shape[1], gates.dtype, transfer), route)


class MakeRows(Function):
    """Permute: tokens [M, H] and gates [M, k] -> rows [R, H] by expert, and their gates [R]. On one rank M = T."""

    @staticmethod
    def forward(ctx, x, gates, route):
        ctx.route = route
        return x[route.rows.order // gates.shape[1]], gates.flatten()[route.rows.order]

    @staticmethod
    def backward(ctx, drows, dgates):
        rows, k = ctx.route.rows, ctx.route.chosen.shape[1]
        of_choices = dgates.new_zeros(len(rows.starts), k)  # those of other ranks' experts get 0
        of_choices.view(-1).index_copy_(0, rows.order, dgates)
        return sum_per_token(drows, rows), of_choices, None


class Transfer:
    """An all-to-all of copies that is under way, to the experts in forward, of gradients back in backward."""

    def __init__(self, route: Route):
        self.route = route

    def start(self, x: Tensor, output_splits: list[int], input_splits: list[int]) -> None:
        self.out = x.new_empty(sum(output_splits), x.shape[1])
        self.pending = all_to_all(self.out, x, output_splits, input_splits, self.route.group, async_op=True)

    def finish(self) -> Tensor:
        self.pending.wait()
        out, self.out = self.out, None
        return out


class StartDispatch(Function):
    """Start to send tokens [T, H], with their gates [T, k]. The result is a placeholder for FinishDispatch, which in
    backward starts to send gradients. What forward computes in between (shared experts) has its backward in between."""

    @staticmethod
    def forward(ctx, x, gates, transfer):
        ctx.transfer, ctx.shapes = transfer, (x.shape[1], gates.shape[1], gates.dtype)
        route, e = transfer.route, len(transfer.route.ends)
        rank_of_copy, token = route.sent.order // len(x), route.sent.order % len(x)
        expert = route.chosen[token] - e * rank_of_copy[:, None]  # 0 to e - 1 on that rank; elsewhere e
        expert = expert.where((expert >= 0) & (expert < e), e)
        copies = pack(x, token, torch.cat((gates[token], expert.to(gates.dtype)), 1))
        transfer.start(copies, route.output_splits, route.input_splits)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        route = ctx.transfer.route
        dx, dgates = unpack(ctx.transfer.finish(), *ctx.shapes)
        return sum_per_token(dx, route.sent), sum_per_token(dgates, route.sent), None


class FinishDispatch(Function):
    """Wait for the copies of this rank's tokens [M, H] and their gates [M, k], and learn their experts."""

    @staticmethod
    def forward(ctx, placeholder, H, dtype, transfer):
        ctx.transfer, route = transfer, transfer.route
        k = route.chosen.shape[1]
        x, metadata = unpack(transfer.finish(), H, 2 * k, dtype)
        gates, experts = metadata.split(k, 1)
        route.rows = sort_by_expert(experts, len(route.ends), sum(route.rows_per_expert))
        return x, gates

    @staticmethod
    def backward(ctx, dx, dgates):
        route = ctx.transfer.route
        ctx.transfer.start(pack(dx, None, dgates), route.input_splits, route.output_splits)
        return dx.new_zeros(()), None, None, None


class Combine(Function):
    """Unpermute: sum the results [R, H] of each token on each rank, send the sums back, and sum those: [T, H]. Backward
    needs no result, so full recomputation skips this exchange and returns a placeholder."""

    @staticmethod
    def forward(ctx, y, route):
        ctx.route = route
        if is_recomputing():
            return y.new_zeros(()).expand(len(route.chosen), y.shape[1])
        sums = sum_per_token(y, route.rows)
        if size(route.group) == 1:
            return sums
        received = exchange_rows(sums, route.input_splits, route.output_splits, route.group)
        return sum_per_token(received, route.sent)

    @staticmethod
    def backward(ctx, grad):
        route = ctx.route
        if size(route.group) > 1:
            copies = grad[route.sent.order % len(grad)]
            grad = exchange_rows(copies, route.output_splits, route.input_splits, route.group)
        return grad[route.rows.order // route.chosen.shape[1]], None


combine = Combine.apply


def sum_per_token(x: Tensor, copies: Copies) -> Tensor:
    """[C, w] -> [N, w]: each token's copies, summed in a fixed order, in at least fp32."""
    return torch.embedding_bag(x.contiguous(), copies.by_token, copies.starts, mode=0)[0]  # mode 0 sums


def pack(x: Tensor, order: Tensor | None, metadata: Tensor) -> Tensor:
    """Rows x[order], each followed by its metadata [U, w], of any dtype: [U, H + c]. Zeros fill them up to whole 16
    bytes, so that the next row is aligned for vector loads."""
    as_elements = metadata.contiguous().view(x.dtype)  # the same bits
    width = -(-metadata.shape[1] * metadata.itemsize // 16) * 16 // x.itemsize
    packed = x.new_empty(len(metadata), x.shape[1] + width)
    rows = packed[:, :x.shape[1]]
    rows.copy_(x) if order is None else torch.index_select(x, 0, order, out=rows)
    packed[:, x.shape[1]:] = F.pad(as_elements, (0, width - as_elements.shape[1]))
    return packed


def unpack(packed: Tensor, H: int, w: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rows [U, H], a view, and their metadata [U, w], of this dtype."""
    return packed[:, :H], packed[:, H:H + w * dtype.itemsize // packed.itemsize].contiguous().view(dtype)


# ---- experts --------------------------------------------------------------------------------------------------------

class GroupedMatmul:
    """The three products of a grouped linear layer. fp8.Fp8Experts has the same methods, and multiplies in FP8."""

    def forward(self, x: Tensor, weight: nn.Parameter, route: Route) -> Tensor:
        return grouped_matmul(x, weight.transpose(1, 2), route)

    def gradient(self, dy: Tensor, route: Route) -> Any:
        """dY in the form in which the other two take it."""
        return dy

    def dgrad(self, dy: Any, weight: nn.Parameter, route: Route) -> Tensor:
        return grouped_matmul(dy, weight, route)

    def wgrad(self, out: Tensor, dy: Any, x: Tensor, route: Route) -> None:
        accumulate_grouped_product(out, dy, x, route)


class GroupedExperts(nn.Module):
    """The SwiGLU networks of this rank's experts, times gates: rows [R, H], sorted by expert, gates [R] -> [R, H]."""
    mm = GroupedMatmul()  # train.py may replace it, by an fp8.Fp8Experts

    def __init__(self, make: Callable[[Spec], nn.Parameter], gate_up: Spec, down: Spec):
        super().__init__()
        self.w_gate_up = make(gate_up)  # [e, 2F, H]
        self.w_down = make(down)  # [e, H, F]

    def forward(self, rows: Tensor, gates: Tensor, route: Route, recompute: Recompute = Recompute()) -> Tensor:
        gate_up = GroupedLinear.apply(rows, self.w_gate_up, self.mm, route, False)
        hidden = weighted_swiglu(gate_up, gates)
        y = GroupedLinear.apply(hidden, self.w_down, self.mm, route, is_recomputing())
        recompute.drop(hidden, y, weighted_swiglu, gate_up, gates)
        return y


class GroupedLinear(Function):
    """Rows [R, in], sorted by expert, times the transposes of the experts' weights [e, out, in] -> [R, out]. skip:
    return a placeholder, as no backward reads the result."""

    @staticmethod
    def forward(ctx, x, weight, mm, route, skip):
        ctx.save_for_backward(x)
        ctx.weight, ctx.mm, ctx.route = weight, mm, route
        return x.new_zeros(()).expand(len(x), weight.shape[1]) if skip else mm.forward(x, weight, route)

    @staticmethod
    def backward(ctx, dy):
        weight, mm, route, x = ctx.weight, ctx.mm, ctx.route, ctx.saved_tensors[0].detach()
        dy = mm.gradient(dy.contiguous(), route)
        # Also without any row: a bucket counts the gradients of all its parameters.
        accumulate_grad(weight, lambda out: mm.wgrad(out, dy, x, route))
        return mm.dgrad(dy, weight, route), None, None, None, None


def grouped_matmul(x: Tensor, matrices: Tensor, route: Route) -> Tensor:
    """[R, in] times [e, in, out] -> [R, out]."""
    if fits_grouped_mm(x, matrices, matrices.transpose(1, 2)):
        return F.grouped_mm(x, matrices, offs=route.ends)
    return torch.cat([rows @ matrix for rows, matrix in zip(x.split(route.rows_per_expert), matrices)])


def accumulate_grouped_product(out: Tensor, grad: Tensor, x: Tensor, route: Route) -> None:
    """out [e, out, in] += grad^T x of each expert's rows, rounded only where accumulate_product rounds: on a GPU not at
    all. An expert without rows gets nothing. On one rank the host does not know the counts; on several it does."""
    if size(route.group) == 1 and uses_kernels(x):
        load_kernels().add_grouped_product(out, grad, x, route.ends)
    elif size(route.group) == 1 and fits_grouped_mm(grad, x):
        out.add_(F.grouped_mm(grad.t(), x, offs=route.ends))
    else:
        for matrix, dy, rows in zip(out, grad.split(route.rows_per_expert), x.split(route.rows_per_expert)):
            accumulate_product(matrix, dy.t(), rows)


def fits_grouped_mm(*tensors: Tensor) -> bool:
    """Whether F.grouped_mm takes these operands: bf16, and every row begins at a multiple of 16 bytes."""
    return all(x.dtype == torch.bfloat16 and x.storage_offset() * x.element_size() % 16 == 0
               and x.shape[-1] * x.element_size() % 16 == 0 for x in tensors)


# ---- demo: python ep.py, or torchrun --nproc_per_node=4 ep.py -------------------------------------------------------

def train_demo(balance: Balance, group: Group, steps: int = 300) -> tuple[list[float], float]:
    """Predict each byte of this file from the 4 before it: an embedding, 8 experts of which a token uses one, a head.

    Returns each expert's share of the tokens, and the mean loss in nats per byte, over the last 20 steps.
    """
    E, H, context, batch = 8, 64, 4, 256
    with open(__file__, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
    make = partial(parameter, groups={"ep": group}, dtype=torch.float32)
    shapes = {"embedding": (256, H // context), "router": (E, H), "head": (256, H)}
    replicated = embedding, w_router, head = [make(Spec(name, shape, std=0.1)) for name, shape in shapes.items()]
    experts = GroupedExperts(make, Spec("w_gate_up", (E, 2 * H, H), {"ep": 0}, std=0.1),
                             Spec("w_down", (E, H, H), {"ep": 0}, std=0.1))
    params = [*replicated, *experts.parameters()]
    for param in params:
        param.data = draw(0)(param.spec, param.box)
    router = Router("demo", w_router, Model(experts=E, top_k=1, router_norm=False), balance)
    info = RoutingInfo(torch.zeros(batch, dtype=torch.long), 1, (group,), aux_loss_scale=1.0)
    optimizer = torch.optim.AdamW(params, lr=3e-3)
    generator = torch.Generator().manual_seed(rank(group))  # ranks read different positions
    loads, mean_loss = torch.zeros(E), torch.zeros(())
    for step in range(steps):
        positions = torch.randint(len(text) - context, (batch,), generator=generator)
        x = embedding[text[positions[:, None] + torch.arange(context)]].flatten(1)
        h = F.rms_norm(x, (H,))
        route, gates = router(h, info, group)
        y = combine(experts(*dispatch(h, gates, route)(), route), route)
        loss = F.cross_entropy((x + y) @ head.t(), text[positions + context]) / size(group)
        loss.backward()
        if step >= steps - 20:
            loads += router.load
            mean_loss += loss.detach() / 20
        for param in replicated:  # the experts' gradients already are those of all tokens
            all_reduce(param.grad, group)
        optimizer.step()
        optimizer.zero_grad()
        update_biases([router], (group,))
    all_reduce(loads, group)
    all_reduce(mean_loss, group)
    return (loads / loads.sum()).tolist(), mean_loss.item()


def demo(group: Group) -> None:
    lines = ["Share of the tokens that each of 8 experts gets after 300 steps (equal: ████), and nats per byte:", ""]
    worst, ways = [], {"nothing": Balance(), "a loss": Balance(aux_loss=0.1), "a bias": Balance(bias_rate=0.01)}
    for title, balance in ways.items():
        shares, loss = train_demo(balance, group)
        worst.append(max(shares) * 8)
        lines.append(f"    balanced by {title}: the most used {max(shares) * 8:.2f} times the mean, loss {loss:.3f}")
        lines += [f"        {expert}  {'█' * round(share * 32)}" for expert, share in enumerate(shares)]
    lines.append(f"\nWithout balance one expert gets {worst[0]:.1f} times the mean, with a loss {worst[1]:.1f}, with "
                 f"biases {worst[2]:.1f}.")
    if rank(group) == 0:
        print("\n".join(lines))


if __name__ == "__main__":
    run_demo(demo)
