"""Tensor parallelism: every matrix is cut among the ranks; sequence parallelism: between matrices, the tokens are.

Saves: all but 1/t of weights, gradients and optimizer state; of activations too, but without sequence parallelism not
       of what lies between layers. Time: each rank does 1/t of every matmul.
Costs: in a layer's forward and backward 4 all-reduces of T H elements; or, the same bytes, 4 all-gathers and 4
       reduce-scatters, and 2 all-gathers more, hidden under matmuls, of what is gathered again instead of kept.
Stops helping when: ranks are not on one fast network, since every layer waits for it; or H/t gets too small a matmul.

A pair of matrices needs one exchange before and one after, and nothing between, if the first is cut by rows of W (its
outputs: "column parallel", a column of the X W^T) and the second by columns of W (its inputs: "row parallel"):

              X ──f──► X A_0^T ─ act ─► Y_0 B_0^T ──┐            rank 0
              X ──f──► X A_1^T ─ act ─► Y_1 B_1^T ──┴─ sum g ──► rank 1          attention: heads;  ffn: its width

    tensor parallelism          f: identity,   backward all-reduce         g: all-reduce,      backward identity
    with sequence parallelism   f: all-gather, backward reduce-scatter     g: reduce-scatter,  backward all-gather

The backward. Let rank i have Y_i = X A_i^T and Z = sum_i Y_i B_i^T, and write dZ for the derivative of the loss by Z:

    dY_i = dZ B_i         complete: Z is a plain sum, so each term gets the whole dZ. Hence g's backward is the identity
    dB_i = dZ^T Y_i       complete, of this rank's part alone                       (or gathers dZ, if each has a part).
    dX   = sum_i dY_i A_i A sum, because every rank used X. Hence f's backward is an all-reduce (or reduce-scatter, if
    dA_i = dY_i^T X       each rank wants only the tokens it has).

With sequence parallelism X exists as parts of T/t tokens, so norms and residuals cost 1/t. Each rank keeps its part
and gathers X again for dA. A column-parallel backward is, in this order, so that every message hides under a matmul:

    network    ├─ gather X ─┤      ├─ reduce-scatter dX ─┤
    compute    ├─ dX = dY A ─┤     ├─ dA += dY^T X ──────┤

`ring` ("async TP") hides the exchanges that nothing else hides: X arrives part by part, each multiplied while the next
one travels; and the sum of a part travels on while the terms of the next are multiplied.

What all ranks hold alike (norms) is a "copy" without sequence parallelism, where every rank computes its whole
gradient, and a "sum" with it, where each saw other tokens: see param.py. So are, always, keys' and values' weights
where there are more ranks than such heads, since ranks that share a head have other queries.

Vocabulary. The table is cut by rows, any number of them. A rank looks up the tokens it has and adds zeros for others.
No rank sees a row of logits: the loss needs their largest value, a sum and one logit, each of which is reduced.

Shoeybi et al. 2019 (Megatron-LM: f and g, section 3); Korthikanti et al. 2022 (sequence parallelism: section 4.2);
Wang et al. 2023, Overlap Communication with Dependent Computation via Decomposition (ring).
Letters: t ranks, T tokens of a micro-batch (B S, flat), H hidden, V vocabulary.
"""
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd import Function
from torch.nn.functional import pad

from collectives import (
    MAX,
    AllGather__ReduceScatter,
    AllReduce__Identity,
    Group,
    Identity__AllReduce,
    all_gather,
    all_reduce,
    name,
    reduce_scatter,
    sent,
    shift,
    world,
)
from param import (
    IGNORED,
    Spec,
    accumulate_grad,
    add_product,
    at_least_fp32,
    cut,
    deferring,
    parameter,
    rank,
    size,
    stacked,
)


class Matmul:
    """The three products of a linear layer, Y = X W^T, dX = dY W and dW += dY^T X, and what of X is sent and kept.

    Here everything is as it is. A class with the same methods (fp8.py has one) may hold X and dY in one form where
    weights multiply them, called rows, and in another where tokens are summed over, called columns.

    spread: (arriving rows of all ranks' x, what to keep of this rank's: tensors); keep: the latter alone. columns: of
    what all ranks kept. both: rows and columns of all ranks' x. What arrives is waited for by a call. weights: each
    N K, below each other. grad: x is a gradient.
    """
    one_form = True  # rows may be kept as columns

    def spread(self, x, tp, keep=True):
        return start_gather(x, tp), (x,)

    def keep(self, x, tp, grad=False):
        return (x,)

    def columns(self, kept, tp, grad=False):
        return start_gather(*kept, tp)

    def both(self, x, tp, grad=False):
        arriving = start_gather(x, tp)
        return lambda: (arriving(),) * 2

    def forward(self, rows, weights):
        return rows @ together(weights).t()

    def input_grad(self, rows, weights):
        return rows @ together(weights)

    def add_weight_grad(self, out, grad, x):
        add_product(out, grad.t(), x)


class TensorParallel(NamedTuple):
    """How layers are shared by the ranks of a group. Functions take it as `tp`; without a group nothing is shared.

    sequence: between layers a rank has T/t tokens, the group's ranks in order. ring: in pieces, see above. keep: what
    was gathered for a matmul is kept for its backward, t times the memory, instead of being gathered again. matmul: how
    linear layers multiply; a ring multiplies by itself.
    """
    group: Group = None
    sequence: bool = False
    ring: bool = False
    keep: bool = False
    matmul: Matmul = Matmul()


ALONE = TensorParallel()


# ---- f, g and their duals -------------------------------------------------------------------------------------------
# Started here and finished by a call of what is returned, so that something else can be computed meanwhile.

Arrived = Callable[[], torch.Tensor]


def start_gather(x: torch.Tensor, tp: TensorParallel) -> Arrived:
    """f: the rows of all ranks, in rank order; with sequence parallelism, or else x, which has them all."""
    if not tp.sequence:
        return lambda: x
    whole = x.new_empty(len(x) * size(tp.group), *x.shape[1:])
    pending = all_gather(whole, x.contiguous(), tp.group, async_op=True)

    def arrived():
        pending.wait()
        return whole
    return arrived


def start_sum(terms: torch.Tensor, tp: TensorParallel) -> Arrived:
    """g: the sum of all ranks' terms: this rank's rows with sequence parallelism, or else all. `terms` is used up."""
    if tp.sequence:
        total = terms.new_empty(len(terms) // size(tp.group), *terms.shape[1:])
        pending = reduce_scatter(total, terms, tp.group, async_op=True)
    else:
        total, pending = terms, all_reduce(terms, tp.group, async_op=True)

    def arrived():
        pending.wait()
        return total
    return arrived


def ring_gather(whole: torch.Tensor, x: torch.Tensor, group: Group) -> Iterator[slice]:
    """Fill `whole` with the rows of all ranks and yield which of them are there, while the next ones travel."""
    n, me, rows = size(group), rank(group), len(x)
    parts = [slice(owner * rows, (owner + 1) * rows) for owner in range(n)]
    whole[parts[me]] = x
    for hop in range(n - 1):
        here, following = parts[(me - hop) % n], parts[(me - hop - 1) % n]
        travelling = shift(whole[following], whole[here], group)
        yield here
        travelling.wait()
    yield parts[(me + 1) % n]


def ring_sum(term: Callable[[slice], torch.Tensor], rows: int, group: Group) -> torch.Tensor:
    """This rank's rows of the sum of all ranks' terms; term(rows) is computed while the sum of other rows travels."""
    n, me = size(group), rank(group)
    total = None
    for hop in range(n):
        owner = (me - 1 - hop) % n  # a sum is begun by the rank after its owner, and passes all others on its way home
        if total is not None:
            incoming = torch.empty_like(total)
            travelling = shift(incoming, total, group)
        new = term(slice(owner * rows, (owner + 1) * rows))
        if total is not None:
            travelling.wait()
            new += incoming
        total = new
    return total


def ring_product(x: torch.Tensor, matrix: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """(X M, X) of the gathered rows X."""
    whole = x.new_empty(len(x) * size(group), x.shape[1])
    product = x.new_empty(len(whole), matrix.shape[1])
    for part in ring_gather(whole, x, group):
        torch.mm(whole[part], matrix, out=product[part])
    return product, whole


def ring_summed_product(x: torch.Tensor, matrix: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's rows of the sum over the ranks of X M."""
    return ring_sum(lambda part: x[part] @ matrix, len(x) // size(group), group)


# ---- linear layers --------------------------------------------------------------------------------------------------

Before = Callable[[torch.Tensor], torch.Tensor]  # what is applied to the input of a linear layer, cheap to repeat


class Column(Function):
    """X times the transposes of weights [rows / t, H], side by side: T/t H -> T rows/t.

    Weights that read the same X (queries, keys, values) share one gather and one matmul, and dX is summed once.
    before: applied to x first, and again in backward, so that only x is kept. keep: X is kept, not gathered again, as
    with tp.keep (unless there is a `before`).
    """

    @staticmethod
    def forward(ctx, x, before, tp, defer, keep, *weights):
        y, matmul = before(x) if before else x, tp.matmul
        if tp.ring:
            product, whole = ring_product(y, together(weights).t(), tp.group)
            kept = (y,)
        else:
            arriving, kept = matmul.spread(y, tp, before is None)
            whole = arriving()
            product = matmul.forward(whole, weights)
        ctx.whole = (keep or tp.keep) and before is None and not deferring(defer) and matmul.one_form
        ctx.save_for_backward(*((x,) if before else (whole,) if ctx.whole else kept))
        ctx.before, ctx.tp, ctx.defer = before, tp, defer
        ctx.weights = weights  # as an attribute: recomputation would hand back an alias without a sink
        return product

    @staticmethod
    def backward(ctx, grad):
        tp, matmul = ctx.tp, ctx.tp.matmul
        x, y, kept = repeated(ctx.before, ctx.saved_tensors, tp)
        arriving = (lambda: kept[0]) if ctx.whole else None if deferring(ctx.defer) else matmul.columns(kept, tp)
        if tp.ring:
            columns, dx = grad, ring_summed_product(grad, together(ctx.weights), tp.group)
            whole = arriving() if arriving else None
        else:
            rows, columns = matmul.both(grad, ALONE, grad=True)()
            terms = matmul.input_grad(rows, ctx.weights)
            whole = arriving() if arriving else None
            dx = start_sum(terms, tp)

        def add(out):
            matmul.add_weight_grad(out, columns, matmul.columns(kept, tp)() if whole is None else whole)

        accumulate_grad(ctx.weights, add, ctx.defer)
        dx = dx if tp.ring else dx()
        return through(ctx.before, x, y, dx), None, None, None, None, *[None] * len(ctx.weights)


class Row(Function):
    """X times the transpose of a weight [H, columns / t], summed over the ranks: T columns/t -> T/t H.

    before: as in Column. skip: the result is not needed, only its backward (a layer that runs again ends here).
    """

    @staticmethod
    def forward(ctx, x, before, tp, skip, weight):
        ctx.before, ctx.tp, ctx.weights, matmul = before, tp, (weight,), tp.matmul
        if skip:
            ctx.save_for_backward(*((x,) if before else matmul.keep(x, ALONE)))
            rows = len(x) // size(tp.group) if tp.sequence else len(x)
            return x.new_zeros(()).expand(rows, len(weight))
        y = before(x) if before else x
        if tp.ring:
            ctx.save_for_backward(x)
            return ring_summed_product(y, weight.t(), tp.group)
        arriving, kept = matmul.spread(y, ALONE, before is None)
        ctx.save_for_backward(*((x,) if before else kept))
        return start_sum(matmul.forward(arriving(), ctx.weights), tp)()

    @staticmethod
    def backward(ctx, grad):
        tp, matmul = ctx.tp, ctx.tp.matmul
        if tp.ring:
            x, y, kept = repeated(ctx.before, ctx.saved_tensors)
            dy, columns = ring_product(grad, *ctx.weights, tp.group)
        else:
            arriving = matmul.both(grad, tp, grad=True)
            x, y, kept = repeated(ctx.before, ctx.saved_tensors, ALONE._replace(matmul=matmul))
            rows, columns = arriving()
            dy = matmul.input_grad(rows, ctx.weights)
        if deferring() and tp.sequence:  # T/t rows wait in the queue, not T
            own = matmul.keep(grad, tp, grad=True)
            accumulate_grad(ctx.weights, lambda out: matmul.add_weight_grad(
                out, matmul.columns(own, tp, grad=True)(), matmul.columns(kept, ALONE)()))
        else:
            accumulate_grad(ctx.weights, lambda out: matmul.add_weight_grad(
                out, columns, matmul.columns(kept, ALONE)()))
        return through(ctx.before, x, y, dy), None, None, None, None


def repeated(before: Before | None, saved: tuple[torch.Tensor, ...], tp: TensorParallel = ALONE) -> tuple:
    """(x, before(x), what is kept of it), and the graph between the first two, if there is a `before`."""
    if before is None:
        return None, None, tuple(part.detach() for part in saved)
    x = saved[0].detach().requires_grad_()
    with torch.enable_grad():
        y = before(x)
    return x, y, tp.matmul.keep(y.detach(), tp)  # what waits in a queue must not hold a graph


def through(before: Before | None, x: torch.Tensor | None, y: torch.Tensor | None, dy: torch.Tensor) -> torch.Tensor:
    """The derivative by x, given that by y = before(x)."""
    if before is None:
        return dy
    torch.autograd.backward(y, dy)
    return x.grad


def together(weights: tuple[nn.Parameter, ...]) -> torch.Tensor:
    """The weights below each other: a view if they lie so, else a copy."""
    if len(weights) == 1:
        return weights[0].detach()
    view = stacked([weight.detach() for weight in weights])
    return torch.cat(weights) if view is None else view


def column(x: torch.Tensor, *weights: nn.Parameter, tp: TensorParallel, before: Before | None = None,
           defer: bool = True, keep: bool = False) -> torch.Tensor:
    return Column.apply(x, before, tp, defer, keep, *weights)


def row(x: torch.Tensor, weight: nn.Parameter, tp: TensorParallel, before: Before | None = None,
        skip: bool = False) -> torch.Tensor:
    return Row.apply(x, before, tp, skip, weight)


# ---- layers that are not cut ----------------------------------------------------------------------------------------

def own_tokens(x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """This rank's share of the tokens, whoever has them between layers: T/t H -> T/t H, or T H -> about T/t H."""
    if tp.sequence or size(tp.group) == 1:
        return x
    return Identity__AllReduce.apply(x, tp.group)[cut(len(x), size(tp.group), rank(tp.group))]


def every_token(x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """All tokens on every rank, each of which uses them differently: T/t H -> T H, or T H as they are."""
    if size(tp.group) == 1:
        return x
    return AllGather__ReduceScatter.apply(x, 0, tp.group) if tp.sequence else Identity__AllReduce.apply(x, tp.group)


def all_tokens(y: torch.Tensor, count: int, tp: TensorParallel) -> torch.Tensor:
    """The inverse: what each rank made of its share, where it is wanted. count: of the tokens between layers."""
    if tp.sequence or size(tp.group) == 1:
        return y
    mine = cut(count, size(tp.group), rank(tp.group))
    return AllReduce__Identity.apply(pad(y, (0, 0, mine.start, count - mine.stop)), tp.group)


# ---- the vocabulary -------------------------------------------------------------------------------------------------

class Embed(Function):
    """Rows of a table [V / t, H]. The gradient is added row by row: a dense V x H one would be mostly zeros."""

    @staticmethod
    def forward(ctx, tokens, table, tp):  # T -> T/t H
        rows, mine = local_index(tokens, table.box[0])
        ctx.save_for_backward(rows, mine)
        ctx.table, ctx.tp = table, tp
        return start_sum(table[rows].mul_(mine[:, None]), tp)()

    @staticmethod
    def backward(ctx, grad):
        rows, mine = ctx.saved_tensors
        grad = start_gather(grad, ctx.tp)() * mine[:, None]
        accumulate_grad(ctx.table, lambda out: out.index_add_(0, rows, grad.to(out.dtype)), defer=False)
        return None, None, None


def local_index(numbers: torch.Tensor, held: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """(index among those held, whether it is held); those that are not get any valid index."""
    mine = (numbers >= held.start) & (numbers < held.stop)
    return (numbers - held.start).clamp(0, held.stop - held.start - 1), mine


def embed(tokens: torch.Tensor, table: nn.Parameter, tp: TensorParallel) -> torch.Tensor:
    return Embed.apply(tokens, table, tp)


class CrossEntropy(Function):
    """Keeps the logits in the dtype they came in and two numbers a token; probabilities are computed again."""

    @staticmethod
    def forward(ctx, logits, labels, weights, z_loss, held, group):
        wide = logits.to(at_least_fp32(logits.dtype))
        index, mine = local_index(labels, held)
        local = wide.logsumexp(-1)
        largest = local.clone()
        all_reduce(largest, group, MAX)
        sums = torch.stack((local.sub_(largest).exp_(), wide.gather(-1, index[:, None])[:, 0] * mine))
        all_reduce(sums, group)
        total, chosen = sums[0].log_().add_(largest), sums[1]  # logarithm of the sum over V; the label's logit
        counts = (labels != IGNORED).to(wide.dtype)
        weights = counts if weights is None else counts * weights
        ctx.save_for_backward(logits, index, mine, total, weights)
        ctx.z_loss = z_loss
        return (weights * (total - chosen + z_loss * total.square())).sum()

    @staticmethod
    def backward(ctx, grad):
        logits, index, mine, total, weights = ctx.saved_tensors
        weights = weights * grad
        out = (logits - total[:, None]).exp_().mul_((weights * (1 + 2 * ctx.z_loss * total))[:, None])
        out.scatter_add_(-1, index[:, None], -(weights * mine)[:, None])
        return out.to(logits.dtype), None, None, None, None, None


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None, z_loss: float = 0.0,
                  held: slice | None = None, group: Group = None) -> torch.Tensor:
    """The sum (not the mean) of the tokens' losses in nats; IGNORED labels have none.

    logits: ..., V/t, those of the vocabulary that this rank holds, `held` (default: all). labels: ...
    weights: as labels, what each token counts. z_loss: times the squared logarithm of the softmax's denominator is
    added (Chowdhery et al. 2022, section 5), which keeps logits from drifting.
    """
    held = slice(0, logits.shape[-1]) if held is None else held
    weights = None if weights is None else weights.flatten()
    return CrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), weights, z_loss, held, group)


def whole_rows(logits: torch.Tensor, vocab: int, group: Group) -> torch.Tensor:
    """N V/t -> N V on every rank. For sampling only: training never has a whole row."""
    n = size(group)
    parts = [cut(vocab, n, i) for i in range(n)]
    widest = max(part.stop - part.start for part in parts)
    padded = pad(logits, (0, widest - logits.shape[-1]))
    out = logits.new_empty(n * len(logits), widest)
    all_gather(out, padded.contiguous(), group)
    return torch.cat([block[:, :part.stop - part.start] for block, part in zip(out.chunk(n), parts)], -1)


# ---- demo: torchrun --nproc_per_node=4 tp.py ------------------------------------------------------------------------

def demo(group) -> None:
    t, T, H = size(group), 64, 32
    groups = {"tp": group}
    up = parameter(Spec("up", (4 * H, H), {"tp": 0}), groups, torch.float32)
    down = parameter(Spec("down", (H, 4 * H), {"tp": 1}), groups, torch.float32)
    for weight in (up, down):
        weight.data = torch.randn(weight.shape) / 6
    lines = [f"Two matrices on {t} ranks (one rank a letter), {T} tokens of width {H}:", ""]
    letters = [chr(ord("A") + i) * (32 // t) for i in range(t)]
    for which in ("first matrix, by rows    ", "second matrix, by columns"):
        lines.append(f"    {which}  {''.join(letters)}")
    lines.append("")
    for title, tp, tokens in (("tensor parallelism", TensorParallel(group), "every rank has all"),
                              ("and sequence parallelism", TensorParallel(group, True), "".join(letters)),
                              ("in ring pieces", TensorParallel(group, True, True), "".join(letters))):
        sent.clear()
        x = torch.randn(T // t if tp.sequence else T, H, requires_grad=True)
        row(torch.tanh(column(x, up, tp=tp)), down, tp).sum().backward()
        count = sent[name(group)] * t / (t - 1) / (T * H * 4)  # in units of (t-1)/t T H
        lines.append(f"    {title:24s}   tokens between: {tokens:32s}   sent: {count:.0f} x (t-1)/t of T H")
    lines.append("\nTwo all-reduces count 2 each; two gathers and two reduce-scatters 1, and one gather is repeated.")
    if rank(group) == 0:
        print("\n".join(lines))


if __name__ == "__main__":
    with world() as group:
        demo(group)
