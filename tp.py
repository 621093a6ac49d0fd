"""Tensor parallelism: every matrix is sharded over the ranks; sequence parallelism: between matrices, tokens are.

Saves: all but 1/t of weights, gradients and optimizer state; of activations too, but without sequence parallelism not
       of those between layers. Time: each rank does 1/t of every matmul.
Costs: in a layer's forward and backward 4 all-reduces of T H elements; or, the same bytes, 4 all-gathers and 4
       reduce-scatters, and 2 all-gathers more, hidden under matmuls, of inputs that are gathered again, not saved.
Stops helping when: ranks are not on one fast network, since every layer waits for it; or H/t makes too small a matmul.

A pair of matrices needs one exchange before and one after, and none in between, if the first is sharded by rows of W
(its outputs: "column parallel", a column of the X W^T) and the second by columns of W (its inputs: "row parallel"):

              X ──f──► X A_0^T ─ act ─► Y_0 B_0^T ──┐            rank 0
              X ──f──► X A_1^T ─ act ─► Y_1 B_1^T ──┴─ sum g ──► rank 1          attention: heads;  ffn: its width

    tensor parallelism          f: identity,   backward all-reduce         g: all-reduce,      backward identity
    with sequence parallelism   f: all-gather, backward reduce-scatter     g: reduce-scatter,  backward all-gather

The backward. Let rank i have Y_i = X A_i^T and Z = sum_i Y_i B_i^T, and write dZ for the derivative of the loss by Z:

    dY_i = dZ B_i         complete: Z is a plain sum, so each term gets the whole dZ. Hence g's backward is the identity
    dB_i = dZ^T Y_i       complete, of this rank's shard alone              (or gathers dZ, if each has a shard of it).
    dX   = sum_i dY_i A_i A sum, because every rank used X. Hence f's backward is an all-reduce (or reduce-scatter, if
    dA_i = dY_i^T X       each rank wants its own tokens only).

With sequence parallelism X exists as shards of T/t tokens, so norms and residuals cost 1/t. Each rank saves its shard
and gathers X again for dA. A column-parallel backward is, in this order, so that every message hides under a matmul:

    network    ├─ gather X ─┤      ├─ reduce-scatter dX ─┤
    compute    ├─ dX = dY A ─┤     ├─ dA += dY^T X ──────┤

Asynchronous tensor parallelism hides the exchanges that nothing else hides: X is gathered shard by shard round a ring,
and each shard is multiplied while the next is sent; a sum goes round the ring while its next terms are multiplied.

Replicated parameters. A norm's weight is "replicate" without sequence parallelism, where every rank computes its whole
gradient, and "partial" with it, where each saw other tokens: see param.py. Partial are also, always, the weights of
keys and values where ranks outnumber such heads, since ranks that share a head have other queries.

Vocabulary. The embedding table is sharded by rows, any number of them. A rank looks up the tokens it has and adds zeros
for others. No rank sees a row of logits: the loss needs their maximum, a sum and one logit, each of which is reduced.

Shoeybi et al. 2019 (Megatron-LM: f and g, section 3); Korthikanti et al. 2022 (sequence parallelism: section 4.2);
Wang et al. 2023, Overlap Communication with Dependent Computation via Decomposition (the ring).
Shapes: t ranks, T tokens of a micro-batch (B S, flat), H hidden, V vocabulary.
"""
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

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
    rank,
    reduce_scatter,
    sent,
    shift,
    size,
    world,
)
from operations import kernels, uses_kernels
from param import (
    IGNORED,
    Spec,
    acc_dtype,
    accumulate_grad,
    accumulate_product,
    is_deferred,
    parameter,
    shard_slice,
    stacked_view,
)
from recompute import dropping_cheap, is_recomputing

Tensor = torch.Tensor


Finish = Callable[[], Tensor]  # waits for what was started and returns its result


class TensorParallel(NamedTuple):
    """How layers are shared by the ranks of a group. Functions take it as `tp`; without a group nothing is sharded.

    sequence: sequence parallelism, between layers a rank has T/t tokens, the group's ranks in order. async_tp: exchange
    and multiply shard by shard, see above. keep_gathered: save the gathered inputs of matmuls, t times the memory,
    instead of gathering them again. fp8: linear layers in FP8 in place of those below (fp8.py has them).
    """
    group: Group = None
    sequence: bool = False
    async_tp: bool = False
    keep_gathered: bool = False
    fp8: Any = None

    @property
    def size(self) -> int:
        return size(self.group)

    # f and g: started here, and finished by a call of what is returned, so that something can be computed in between.

    def start_gather(self, x: Tensor) -> Finish:
        """f: the tokens of all ranks, in rank order, with sequence parallelism; else x, which has them all already."""
        if not self.sequence:
            return lambda: x
        whole = x.new_empty(len(x) * size(self.group), *x.shape[1:])
        pending = all_gather(whole, x.contiguous(), self.group, async_op=True)

        def finish() -> Tensor:
            pending.wait()
            return whole
        return finish

    def start_reduce(self, terms: Tensor) -> Finish:
        """g: the sum of all ranks' terms; with sequence parallelism, this rank's tokens of it. Overwrites `terms`."""
        if self.sequence:
            total = terms.new_empty(len(terms) // size(self.group), *terms.shape[1:])
            pending = reduce_scatter(total, terms, self.group, async_op=True)
        else:
            total, pending = terms, all_reduce(terms, self.group, async_op=True)

        def finish() -> Tensor:
            pending.wait()
            return total
        return finish

    def skipped_output(self, x: Tensor, width: int) -> Tensor:
        """Something of the shape of a row parallel layer's output, without memory."""
        tokens = len(x) // size(self.group) if self.sequence else len(x)
        return x.new_zeros(()).expand(tokens, width)


# ---- linear layers --------------------------------------------------------------------------------------------------

class Column(Function):
    """X times the transposes of weights [rows / t, H], side by side: T/t H -> T rows/t.

    Weights that read the same X (queries, keys, values) share one gather and one matmul, and dX is reduced once.
    """

    @staticmethod
    def forward(ctx, x, tp, defer, *weights):
        product, whole = start_gather_matmul(x, stacked_weight(weights).t(), tp)()
        ctx.gathered = (tp.keep_gathered or is_recomputing()) and not is_deferred(defer)
        ctx.save_for_backward(whole if ctx.gathered else x)
        ctx.weights, ctx.tp, ctx.defer = weights, tp, defer  # weights as an attribute: saved, they would be aliases
        return product

    @staticmethod
    def backward(ctx, grad):
        tp, (saved,) = ctx.tp, ctx.saved_tensors
        saved, deferred = saved.detach(), is_deferred(ctx.defer)  # what waits in a queue must not hold a graph
        gather = (lambda: saved) if ctx.gathered else None if deferred else tp.start_gather(saved)
        reduce = start_matmul_reduce(grad, stacked_weight(ctx.weights), tp)  # while X is gathered
        whole = gather() if gather else None

        def add(out):
            x = tp.start_gather(saved)() if whole is None else whole
            accumulate_product(out, grad.t(), x)

        accumulate_grad(ctx.weights, add, ctx.defer)  # while dX is reduced
        return reduce(), None, None, *[None] * len(ctx.weights)


class Row(Function):
    """X times the transpose of a weight [H, columns / t], summed over the ranks: T columns/t -> T/t H.

    skip: do not compute the result, whose value nobody reads (the last layer of a block that is recomputed).
    """

    @staticmethod
    def forward(ctx, x, tp, skip, weight):
        ctx.save_for_backward(x)
        ctx.weight, ctx.tp = weight, tp
        return tp.skipped_output(x, len(weight)) if skip else start_matmul_reduce(x, weight.t(), tp)()

    @staticmethod
    def backward(ctx, grad):
        tp, product = ctx.tp, start_gather_matmul(grad, ctx.weight, ctx.tp)
        x, = ctx.saved_tensors  # if it is recomputed, this is where: while the gradient is gathered
        x, (dy, whole) = x.detach(), product()
        if is_deferred() and tp.sequence:  # T/t tokens wait in the queue, not T
            whole = None
        accumulate_grad(ctx.weight, lambda out: accumulate_product(
            out, (tp.start_gather(grad)() if whole is None else whole).t(), x))
        return dy, None, None, None


def column(x: Tensor, *weights: nn.Parameter, tp: TensorParallel, defer: bool = True) -> Tensor:
    """Column parallel linear layer: T/t H -> T rows/t. defer: whether its weight gradients may be computed later."""
    with dropping_cheap():
        return (tp.fp8.column if tp.fp8 else Column.apply)(x, tp, defer, *weights)


def row(x: Tensor, weight: nn.Parameter, tp: TensorParallel, skip: bool = False) -> Tensor:
    """Row parallel linear layer: T columns/t -> T/t H. skip: see Row."""
    with dropping_cheap():
        return (tp.fp8.row if tp.fp8 else Row.apply)(x, tp, skip, weight)


def stacked_weight(weights: tuple[nn.Parameter, ...]) -> Tensor:
    """The weights one below the other: a view if they lie so, else a copy."""
    if len(weights) == 1:
        return weights[0].detach()
    view = stacked_view([weight.detach() for weight in weights])
    return torch.cat(weights) if view is None else view


def start_gather_matmul(x: Tensor, matrix: Tensor, tp: TensorParallel) -> Callable[[], tuple[Tensor, Tensor]]:
    """f, then a matmul: finished, (X M, X) of the gathered X."""
    if tp.async_tp:
        return lambda: all_gather_matmul(x, matrix, tp.group)
    gather = tp.start_gather(x)

    def finish() -> tuple[Tensor, Tensor]:
        whole = gather()
        return whole @ matrix, whole
    return finish


def start_matmul_reduce(x: Tensor, matrix: Tensor, tp: TensorParallel) -> Finish:
    """A matmul, then g: finished, the sum of X M over the ranks, or this rank's tokens of it."""
    if tp.async_tp:
        total = matmul_reduce_scatter(x, matrix, tp.group)
        return lambda: total
    return tp.start_reduce(x @ matrix)


# ---- asynchronous: in ring steps, each hidden under the matmul of another shard --------------------------------------

def all_gather_matmul(x: Tensor, matrix: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """(X M, X) of the gathered X."""
    whole = x.new_empty(len(x) * size(group), x.shape[1])
    product = x.new_empty(len(whole), matrix.shape[1])
    for shard in ring_all_gather(whole, x, group):
        torch.mm(whole[shard], matrix, out=product[shard])
    return product, whole


def matmul_reduce_scatter(x: Tensor, matrix: Tensor, group: Group) -> Tensor:
    """This rank's tokens of the sum of X M over the ranks."""
    return ring_reduce_scatter(lambda shard: x[shard] @ matrix, len(x) // size(group), group)


def ring_all_gather(whole: Tensor, x: Tensor, group: Group) -> Iterator[slice]:
    """Fill `whole` with the rows of all ranks; yield where those lie that are there, while the next are being sent."""
    n, me, rows = size(group), rank(group), len(x)
    shards = [slice(owner * rows, (owner + 1) * rows) for owner in range(n)]
    whole[shards[me]] = x
    for hop in range(n - 1):
        here, following = shards[(me - hop) % n], shards[(me - hop - 1) % n]
        pending = shift(whole[following], whole[here], group)
        yield here
        pending.wait()
    yield shards[(me + 1) % n]


def ring_reduce_scatter(term: Callable[[slice], Tensor], rows: int, group: Group) -> Tensor:
    """This rank's rows of the sum of all ranks' terms; term(shard) is computed while another shard's sum is sent."""
    n, me = size(group), rank(group)
    total = None
    for hop in range(n):
        owner = (me - 1 - hop) % n  # a sum begins at the rank after its owner, and ends, n-1 hops later, at its owner
        if total is not None:
            incoming = torch.empty_like(total)
            pending = shift(incoming, total, group)
        new = term(slice(owner * rows, (owner + 1) * rows))
        if total is not None:
            pending.wait()
            new += incoming
        total = new
    return total


# ---- modules --------------------------------------------------------------------------------------------------------

Make = Callable[[Spec], nn.Parameter]  # makes this rank's shard of a parameter


class ColumnParallelLinear(nn.Module):
    """One or several weights that read the same input; their outputs lie side by side. T/t H -> T rows/t."""

    def __init__(self, make: Make, *specs: Spec, biases: Sequence[Spec] = ()):
        super().__init__()
        self.weights = nn.ParameterList(make(spec) for spec in specs)
        self.biases = nn.ParameterList(make(spec) for spec in biases)

    def forward(self, x: Tensor, tp: TensorParallel) -> Tensor:
        y = column(x, *self.weights, tp=tp)
        return y + torch.cat(tuple(self.biases)) if len(self.biases) else y


class RowParallelLinear(nn.Module):
    """T columns/t -> T/t H. ends_block: it is the last layer of a block, whose value a recomputation does not need."""

    def __init__(self, make: Make, spec: Spec, ends_block: bool = False):
        super().__init__()
        self.weight, self.ends_block = make(spec), ends_block

    def forward(self, x: Tensor, tp: TensorParallel) -> Tensor:
        return row(x, self.weight, tp, skip=self.ends_block and is_recomputing())


class VocabParallelEmbedding(nn.Module):
    """A table [V / t, H]: tokens T -> T/t H."""

    def __init__(self, make: Make, spec: Spec):
        super().__init__()
        self.table = make(spec)

    def forward(self, tokens: Tensor, tp: TensorParallel) -> Tensor:
        return Embed.apply(tokens, self.table, tp)


class VocabParallelHead(nn.Module):
    """A table [V / t, H]: T/t H -> logits T V/t; or, with labels T, the sum of their losses. weight: the embedding's,
    if it is tied and on this rank."""

    def __init__(self, make: Make, spec: Spec, weight: nn.Parameter | None = None, z_loss: float = 0.0):
        super().__init__()
        self.weight, self.z_loss = make(spec) if weight is None else weight, z_loss

    def forward(self, x: Tensor, tp: TensorParallel, labels: Tensor | None = None) -> Tensor:
        how = dict(z_loss=self.z_loss, vocab=self.weight.box[0], group=tp.group)
        if labels is not None and uses_kernels(x):  # logits never exist as a whole
            return kernels().linear_cross_entropy(gather_tokens(x, tp), self.weight, labels, **how)
        logits = column(x, self.weight, tp=tp, defer=False)
        return logits if labels is None else cross_entropy(logits, labels, **how)


# ---- tokens of layers that are not sharded: routers, the fused head --------------------------------------------------

def split_tokens(x: Tensor, tp: TensorParallel) -> Tensor:
    """This rank's share of the tokens: T/t H -> T/t H with sequence parallelism; without, T H -> about T/t H."""
    if tp.sequence or size(tp.group) == 1:
        return x
    return Identity__AllReduce.apply(x, tp.group)[shard_slice(len(x), size(tp.group), rank(tp.group))]


def merge_tokens(y: Tensor, count: int, tp: TensorParallel) -> Tensor:
    """The inverse of split_tokens. count: of the tokens that a rank has between layers."""
    if tp.sequence or size(tp.group) == 1:
        return y
    mine = shard_slice(count, size(tp.group), rank(tp.group))
    return AllReduce__Identity.apply(pad(y, (0, 0, mine.start, count - mine.stop)), tp.group)


def gather_tokens(x: Tensor, tp: TensorParallel) -> Tensor:
    """All tokens on every rank, each of which uses them differently: T/t H -> T H, or T H as they are."""
    if size(tp.group) == 1:
        return x
    return AllGather__ReduceScatter.apply(x, 0, tp.group) if tp.sequence else Identity__AllReduce.apply(x, tp.group)


# ---- the vocabulary -------------------------------------------------------------------------------------------------

class Embed(Function):
    """Rows of a table [V / t, H]. The gradient is accumulated row by row: a dense V x H one would be mostly zeros."""

    @staticmethod
    def forward(ctx, tokens, table, tp):  # T -> T/t H
        rows, mine = local_index(tokens, table.box[0])
        ctx.save_for_backward(rows, mine)
        ctx.table, ctx.tp = table, tp
        return tp.start_reduce(table[rows].mul_(mine[:, None]))()

    @staticmethod
    def backward(ctx, grad):
        rows, mine = ctx.saved_tensors
        grad = ctx.tp.start_gather(grad)() * mine[:, None]
        accumulate_grad(ctx.table, lambda out: out.index_add_(0, rows, grad.to(out.dtype)), defer=False)
        return None, None, None


def local_index(tokens: Tensor, vocab: slice) -> tuple[Tensor, Tensor]:
    """(index within `vocab`, whether it is in there); tokens that are not get any valid index."""
    mine = (tokens >= vocab.start) & (tokens < vocab.stop)
    return (tokens - vocab.start).clamp(0, vocab.stop - vocab.start - 1), mine


class CrossEntropy(Function):
    """Saves the logits in the dtype they came in and two numbers a token; probabilities are computed again."""

    @staticmethod
    def forward(ctx, logits, labels, weights, z_loss, vocab, group):
        exact = logits.to(acc_dtype(logits.dtype))
        index, mine = local_index(labels, vocab)
        local = exact.logsumexp(-1)
        maximum = local.clone()
        all_reduce(maximum, group, MAX)
        sums = torch.stack((local.sub_(maximum).exp_(), exact.gather(-1, index[:, None])[:, 0] * mine))
        all_reduce(sums, group)
        logsumexp, chosen = sums[0].log_().add_(maximum), sums[1]  # over V; the label's logit
        counts = (labels != IGNORED).to(exact.dtype)
        weights = counts if weights is None else counts * weights
        ctx.save_for_backward(logits, index, mine, logsumexp, weights)
        ctx.z_loss = z_loss
        return (weights * (logsumexp - chosen + z_loss * logsumexp.square())).sum()

    @staticmethod
    def backward(ctx, grad):
        logits, index, mine, logsumexp, weights = ctx.saved_tensors
        weights = weights * grad
        out = (logits - logsumexp[:, None]).exp_().mul_((weights * (1 + 2 * ctx.z_loss * logsumexp))[:, None])
        out.scatter_add_(-1, index[:, None], -(weights * mine)[:, None])
        return out.to(logits.dtype), None, None, None, None, None


def cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None = None, z_loss: float = 0.0,
                  vocab: slice | None = None, group: Group = None) -> Tensor:
    """The sum (not the mean) of the tokens' losses in nats; tokens with the label IGNORED have none.

    logits: ..., V/t, those of the part `vocab` of the vocabulary that this rank holds (default: all). labels: ...
    weights: as labels, how much each token counts. z_loss: times the squared logarithm of the softmax's denominator is
    added (Chowdhery et al. 2022, section 5), which keeps logits from drifting.
    """
    vocab = slice(0, logits.shape[-1]) if vocab is None else vocab
    weights = None if weights is None else weights.flatten()
    return CrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), weights, z_loss, vocab, group)


def gather_logits(logits: Tensor, vocab: int, group: Group) -> Tensor:
    """N V/t -> N V on every rank. For sampling only: training never has a whole row."""
    n = size(group)
    shards = [shard_slice(vocab, n, i) for i in range(n)]
    widest = max(shard.stop - shard.start for shard in shards)
    padded = pad(logits, (0, widest - logits.shape[-1]))
    out = logits.new_empty(n * len(logits), widest)
    all_gather(out, padded.contiguous(), group)
    return torch.cat([rows[:, :shard.stop - shard.start] for rows, shard in zip(out.chunk(n), shards)], -1)


# ---- demo: torchrun --nproc_per_node=4 tp.py ------------------------------------------------------------------------

def demo(group: Group) -> None:
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
                              ("asynchronous", TensorParallel(group, True, True), "".join(letters))):
        sent.clear()
        x = torch.randn(T // t if tp.sequence else T, H, requires_grad=True)
        row(torch.tanh(column(x, up, tp=tp)), down, tp).sum().backward()
        count = sent[name(group)] * t / (t - 1) / (T * H * 4)  # in units of (t-1)/t T H
        lines.append(f"    {title:24s}   tokens between: {tokens:32s}   sent: {count:.0f} x (t-1)/t of T H")
    lines.append("\nTwo all-reduces count 2 each; two gathers and two reduce-scatters 1, and one gather is done twice.")
    if rank(group) == 0:
        print("\n".join(lines))


if __name__ == "__main__":
    with world() as group:
        demo(group)
