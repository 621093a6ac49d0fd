"""Expert parallelism: a layer's feed-forward networks, its experts, are sharded over ranks; each token uses k of them.

Saves: all but 1/n of the experts' weights, gradients and optimizer state.
Costs: every token is sent to its experts and back: a rank sends 4 T k H (n-1)/n elements per layer in forward and
       backward, 6 if the layer is recomputed, if experts are used equally. Once per layer the host waits for the
       device, to learn how many rows the rank will receive.
Stops helping when: experts get too few rows for a fast matmul, or one gets so many that all ranks wait for it.

Two ranks, four experts, k = 2. Rank 0 has the tokens a b c, rank 1 has d e:

                 rank 0, experts 0 and 1            rank 1, experts 2 and 3
    route        a: 0 2   b: 2 3   c: 0 1           d: 1 2   e: 2 3
    permute      a0 c0 c1 | a2 b2 b3                d1 | d2 e2 e3
    dispatch     a0 c0 c1   d1                      a2 b2 b3   d2 e2 e3
    permute      0: a c   1: c d                    2: a b d e   3: b e
    combine      a0 c0 c1 | a2 b2 b3                d1 | d2 e2 e3

The first permutation sorts rows by expert, and so by rank. Dispatch is an all-to-all with uneven splits; after it, rows
are sorted by expert again. One grouped matmul multiplies each expert's rows by its matrix: no row is dropped, and none
is padded. Combine sends the results back and sums the k rows of each token, each times its gate.

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

Shapes: T tokens of a rank, H hidden, F ffn of an expert, E experts, k experts per token, n ranks of ep, e = E/n experts
of a rank, B sequences of S tokens, R rows that a rank receives.
"""
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn
from torch.autograd import Function

from collectives import AllToAll__AllToAll, Group, all_reduce, all_to_all, rank, run_demo, size
from config import Model
from operations import swiglu
from param import Spec, acc_dtype, accumulate_grad, accumulate_product, draw, parameter, shard_slice
from recompute import cheap, decide_once, dropping_cheap, is_recomputing

Tensor = torch.Tensor


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
    different tokens of the same sequences. sequence_weight: the factor of a sequence's losses, 1 / (sequences per step)
    times fp16's loss scale; None outside of training.
    """
    sequence_ids: Tensor
    sequences: int
    groups: tuple[Group, ...] = ()
    sequence_weight: float | Tensor | None = None


def make_routing_info(tokens: Tensor, cp: Group, tp: Group, sequence_weight: float | Tensor | None) -> RoutingInfo:
    """The RoutingInfo of tokens [B, S]. The ranks of `tp` have the same tokens, and each routes a shard of them; the
    ranks of `cp` have different tokens of the same sequences. Tokens below 0 are padding."""
    B, S = tokens.shape
    shard = shard_slice(tokens.numel(), size(tp), rank(tp))
    sequence_ids = torch.arange(shard.start, shard.stop, device=tokens.device) // S
    sequence_ids = sequence_ids.masked_fill(tokens.flatten()[shard] < 0, B)
    return RoutingInfo(sequence_ids, B, (cp, tp), sequence_weight)


class Route(NamedTuple):
    """Which rows are sent where: decided once per layer, and used in forward, backward and recomputation."""
    group: Group
    chosen: Tensor  # [T, k], the experts of each token
    order: Tensor  # [T k], choices sorted by expert: row i is choice order[i], of token order[i] // k
    inverse: Tensor  # [T k], its inverse: choice i is row inverse[i]
    input_splits: list[int]  # rows sent to each rank
    output_splits: list[int]  # rows received from each rank
    rows_per_expert: list[int]  # rows received for each expert of this rank
    ends: Tensor  # [e] int32 on the device: where the rows of each expert of this rank end
    by_expert: Tensor | None  # [R], the order that sorts received rows by expert; None on one rank: they are sorted
    by_rank: Tensor | None  # [R], its inverse
    coefficients: tuple[Tensor, Tensor] | None  # see Router.loss_coefficients


# ---- routing --------------------------------------------------------------------------------------------------------

class Router:
    """Chooses the experts of a layer's tokens. Its state is a bias per expert, and loads and losses per step.

    name: of the bias, in checkpoints. dtype, device: of the router's weight, which is a parameter of the model.
    """

    def __init__(self, name: str, model: Model, balance: Balance = Balance(), dtype: torch.dtype = torch.float32,
                 device: torch.device | str = "cpu"):
        self.name, self.model, self.balance = name, model, balance
        self.bias = torch.zeros(model.experts, dtype=acc_dtype(dtype), device=device)
        self.load = torch.zeros(model.experts, dtype=torch.int64, device=device)  # tokens that chose each expert
        self.loss = torch.zeros((), dtype=self.bias.dtype, device=device)  # auxiliary losses, summed over sequences

    def __call__(self, x: Tensor, weight: nn.Parameter, info: RoutingInfo, group: Group) -> tuple[Route, Tensor]:
        """Where tokens [T, H] are sent, and their gates [T, k]. group: of expert parallelism."""
        with dropping_cheap():
            logits = RouterLogits.apply(x, weight)
        scores = logits.softmax(-1) if self.model.router == "softmax" else logits.sigmoid()
        route = decide_once(lambda: self.route(scores.detach(), info, group))
        gates = scores.gather(-1, route.chosen)
        if self.model.router_norm:
            gates = normalise(gates)
        gates = gates * self.model.router_scale
        if route.coefficients is not None:
            loss = self.auxiliary_loss(logits, scores, info, route.coefficients)
            gates = AddAuxiliaryLoss.apply(gates, loss, info.sequence_weight)
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
        if info.sequence_weight is not None:
            self.load += counts[:-1].sum(0)
            if self.balance.aux_loss or self.balance.z_loss:
                coefficients = self.loss_coefficients(counts[:-1], info)

        order = chosen.flatten().argsort(stable=True)
        sent, received = exchange_counts(counts.sum(0), chosen.numel(), group)
        input_splits, output_splits = [sum(row) for row in sent], [sum(row) for row in received]
        rows_per_expert = [sum(column) for column in zip(*received)]
        ends = torch.tensor(rows_per_expert).cumsum(0).int().to(scores.device, non_blocking=True)
        by_expert = by_rank = None
        if size(group) > 1:
            row_counts = torch.tensor(received).flatten().to(scores.device, non_blocking=True)
            experts = torch.arange(len(rows_per_expert), device=scores.device).repeat(size(group))
            by_expert = experts.repeat_interleave(row_counts, output_size=sum(rows_per_expert)).argsort(stable=True)
            by_rank = invert(by_expert)
        return Route(group, chosen, order, invert(order), input_splits, output_splits, rows_per_expert, ends,
                     by_expert, by_rank, coefficients)

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


def invert(order: Tensor) -> Tensor:
    """The inverse of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def exchange_counts(counts: Tensor, rows: int, group: Group) -> tuple[list[list[int]], list[list[int]]]:
    """(rows sent to each rank, rows received from each rank), for each expert of the receiver: lists [n][e]. counts:
    [E], rows of this rank; rows: their sum. Only here does the host wait for the device; dryrun.py replaces this."""
    n = size(group)
    received_counts, splits = torch.empty_like(counts), [len(counts) // n] * n
    all_to_all(received_counts, counts, splits, splits, group)
    sent, received = torch.stack((counts, received_counts)).view(2, n, -1).tolist()
    assert sum(map(sum, sent)) == rows, "a choice of an expert was not counted, or counted twice"
    return sent, received


@torch.no_grad()
def update_biases(routers: list[Router], groups: tuple[Group, ...],
                  apply: bool | Tensor = True) -> tuple[Tensor, Tensor]:
    """After a step: sum loads and losses over the ranks of `groups`, move the biases, reset loads and losses.

    apply: False leaves the biases as they are, after a step that was skipped. Returns the largest load of an expert
    over the mean of its layer, and the losses summed over all sequences and layers.
    """
    sums = torch.stack([torch.cat((router.load.double(), router.loss.double()[None])) for router in routers])
    for group in groups:
        all_reduce(sums, group)  # one for loads, which fp64 counts exactly, and losses of all layers
    loads, loss = sums[:, :-1], sums[:, -1].sum()
    mean = loads.mean(-1, keepdim=True)
    for router, above_mean in zip(routers, (loads - mean).sign()):
        router.bias -= above_mean.to(router.bias.dtype) * router.balance.bias_rate * apply
        router.load.zero_()
        router.loss.zero_()
    return (loads / mean).max(), loss


# ---- dispatch and combine -------------------------------------------------------------------------------------------

def dispatch(x: Tensor, route: Route) -> Callable[[], Tensor]:
    """Start to send tokens [T, H]. Calling the result waits, and returns the rows received [R, H], by expert."""
    rows = Permute.apply(x, route.order, route.inverse, route.chosen.shape[1])
    if size(route.group) == 1:
        return lambda: rows
    transfer = Transfer(route)
    placeholder = StartDispatch.apply(rows, transfer)
    return lambda: Permute.apply(FinishDispatch.apply(placeholder, transfer), route.by_expert, route.by_rank, 1)


def combine(y: Tensor, gates: Tensor, route: Route) -> Tensor:
    """Send the experts' results [R, H] back, and sum those of each token, times its gates [T, k]: [T, H]."""
    if size(route.group) > 1:
        y = Permute.apply(y, route.by_rank, route.by_expert, 1)
        y = AllToAll__AllToAll.apply(y, route.input_splits, route.output_splits, route.group)
    return UnpermuteAndSum.apply(y, gates, route)


class Permute(Function):
    """[T, H] -> [T k, H]: row i is that of choice order[i]. Backward sums each token's k rows in a fixed order."""

    @staticmethod
    def forward(ctx, x, order, inverse, k):
        ctx.inverse, ctx.k = inverse, k
        return x[order // k if k > 1 else order]

    @staticmethod
    def backward(ctx, grad):
        rows = unpermute(grad, ctx.inverse, ctx.k)
        return rows.sum(1) if ctx.k > 1 else rows[:, 0], None, None, None


class UnpermuteAndSum(Function):
    """Rows [T k, H] as sent, gates [T, k] -> [T, H]: the sum of each token's rows times gates, in at least fp32."""

    @staticmethod
    def forward(ctx, y, gates, route):
        ctx.save_for_backward(y, gates)
        ctx.route = route
        return (gates[:, None] @ unpermute(y, route.inverse, gates.shape[1]).to(gates.dtype))[:, 0].to(y.dtype)

    @staticmethod
    def backward(ctx, grad):
        y, gates = ctx.saved_tensors
        grad_acc = grad.to(gates.dtype)
        dgates = (unpermute(y, ctx.route.inverse, gates.shape[1]).to(gates.dtype) @ grad_acc[..., None])[..., 0]
        dy = (gates[..., None] * grad_acc[:, None]).to(y.dtype).flatten(0, 1)
        return dy[ctx.route.order], dgates, None


def unpermute(rows: Tensor, inverse: Tensor, k: int) -> Tensor:
    """[T k, H], permuted -> [T, k, H]."""
    return rows[inverse].view(-1, k, rows.shape[1])


class Transfer:
    """An all-to-all of rows that is under way, in forward or in backward."""

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
    """Start to send rows; the result is a placeholder for FinishDispatch, which in backward starts to send gradients.
    What forward computes in between (shared experts) has its backward in between, too."""

    @staticmethod
    def forward(ctx, x, transfer):
        ctx.transfer = transfer
        transfer.start(x, transfer.output_splits, transfer.input_splits)
        return x.new_zeros(()).expand(x.shape)  # a gradient must have this shape; one element of memory

    @staticmethod
    def backward(ctx, grad):
        return ctx.transfer.finish(), None


class FinishDispatch(Function):
    """The rows received. Backward returns memory that is still being filled: only StartDispatch reads it, and waits."""

    @staticmethod
    def forward(ctx, placeholder, transfer):
        ctx.transfer = transfer
        return transfer.finish()

    @staticmethod
    def backward(ctx, grad):
        return ctx.transfer.start(grad, ctx.transfer.input_splits, ctx.transfer.output_splits), None


# ---- experts --------------------------------------------------------------------------------------------------------

class GroupedExperts(nn.Module):
    """The SwiGLU networks of this rank's experts: rows [R, H], sorted by expert -> [R, H]."""

    def __init__(self, make: Callable[[Spec], nn.Parameter], gate_up: Spec, down: Spec):
        super().__init__()
        self.w_gate_up = make(gate_up)  # [e, 2F, H]
        self.w_down = make(down)  # [e, H, F]

    def forward(self, rows: Tensor, route: Route, fp8: Any = None) -> Tensor:
        """fp8: an fp8.Fp8, whose grouped linear layer replaces GroupedLinear."""
        linear = fp8.grouped if fp8 else GroupedLinear.apply
        hidden = cheap(swiglu, linear(rows, self.w_gate_up, route))
        with dropping_cheap():
            return linear(hidden, self.w_down, route)


class GroupedLinear(Function):
    """Rows [R, in], sorted by expert, times the transposes of the experts' weights [e, out, in] -> [R, out]."""

    @staticmethod
    def forward(ctx, x, weight, route):
        ctx.save_for_backward(x)
        ctx.weight, ctx.route = weight, route
        return grouped_matmul(x, weight.transpose(1, 2), route)

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        x, grad, route = x.detach(), grad.contiguous(), ctx.route
        # Also without any row: a bucket counts the gradients of all its parameters.
        accumulate_grad(ctx.weight, lambda out: accumulate_grouped_product(out, grad, x, route))
        return grouped_matmul(grad, ctx.weight, route), None, None


def grouped_matmul(x: Tensor, matrices: Tensor, route: Route) -> Tensor:
    """[R, in] times [e, in, out] -> [R, out]."""
    if fits_grouped_mm(x, matrices, matrices.transpose(1, 2)):
        return F.grouped_mm(x, matrices, offs=route.ends)
    return torch.cat([rows @ matrix for rows, matrix in zip(x.split(route.rows_per_expert), matrices)])


def accumulate_grouped_product(out: Tensor, grad: Tensor, x: Tensor, route: Route) -> None:
    """out [e, out, in] += grad^T x of each expert's rows, in fp32 as of dense layers. (grouped_mm rounds to bf16, and
    on some GPUs leaves numbers where an expert has no row.) An expert without rows gets nothing."""
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
    router = Router("demo", Model(experts=E, top_k=1, router_norm=False), balance)
    info = RoutingInfo(torch.zeros(batch, dtype=torch.long), 1, (group,), sequence_weight=1.0)
    optimizer = torch.optim.AdamW(params, lr=3e-3)
    generator = torch.Generator().manual_seed(rank(group))  # ranks read different positions
    loads, mean_loss = torch.zeros(E), torch.zeros(())
    for step in range(steps):
        positions = torch.randint(len(text) - context, (batch,), generator=generator)
        x = embedding[text[positions[:, None] + torch.arange(context)]].flatten(1)
        h = F.rms_norm(x, (H,))
        route, gates = router(h, w_router, info, group)
        y = combine(experts(dispatch(h, route)(), route), gates, route)
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
