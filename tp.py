"""Tensor parallelism: weight matrices are sharded over t ranks. Sequence parallelism: so are the tokens between them.

Saves: all but 1/t of the matrices, embedding and head, with their gradients and optimizer state (norms stay whole), and
       of the activations inside a pair of matrices; with sequence parallelism also of those between pairs. Time: each
       rank does 1/t of every matmul.
Costs: per layer (two pairs), forward and backward: 4 all-reduces of T H elements. With sequence parallelism the same
       bytes, as 4 all-gathers and 4 reduce-scatters, and 2 more all-gathers of inputs that are not saved.
Stops helping when: ranks are not on one fast network, since every layer waits for it; or H/t makes too small a matmul.

Tensor parallelism. Matrices come in pairs, S = X A^T, Y = act(S), Z = Y B^T: up and down projection of a feed-forward
layer; queries, keys, values and the output projection of attention. A is sharded by rows, its output features ("column
parallel": columns of A^T), B by columns, its input features ("row parallel"). A pair then needs one exchange before it,
f, one after it, g, and none in between. X and Z are the same on every rank:

    rank 0    X ─ f ─► S_0 = X A_0^T ─ act ─► Y_0 ──► Y_0 B_0^T ─┐
                                                                 ├─ g ─► Z = Y_0 B_0^T + Y_1 B_1^T
    rank 1    X ─ f ─► S_1 = X A_1^T ─ act ─► Y_1 ──► Y_1 B_1^T ─┘

    f   forward: identity      backward: all-reduce    dX = sum_i dS_i A_i, since every rank has used X
    g   forward: all-reduce    backward: identity      rank i has what dY_i = dZ B_i and dB_i = dZ^T Y_i need

Sequence parallelism. Norms and residuals treat each token alone, so between pairs each rank may have T/t tokens of X
and Z. An all-reduce is a reduce-scatter and an all-gather: g keeps the first half, and the next f does the second.

    f   forward: all-gather X         backward: reduce-scatter dX
    g   forward: reduce-scatter Z     backward: all-gather dZ

Overlap. Each rank saves its own shard of X, and all-gathers X once more in backward, for dA_i = dS_i^T X. There both
exchanges of a column parallel layer are hidden under matmuls:

    network    ├─ all-gather X ─┤ ├─ reduce-scatter dX ─┤
    compute    ├─ dX = dS A ────┤ ├─ dA += dS^T X ──────┤

Asynchronous tensor parallelism also hides those of forward and of a row parallel layer's backward, where nothing
independent is left to compute: a ring sends one shard while the matmul of another shard runs.

Split backward, as in zero-bubble pipelines: input gradients first, weight gradients later. In between, only shards of X
and dZ are kept. Both are all-gathered for dA and dB, each under the matmul before it, but for the first few, where two
gathered tensors at once would raise the peak of memory. For dZ it is the second time, as [T, H] in
the queue would take t times the memory: 4 + 2 + 2 all-gathers per layer.

Replicated parameters. A norm's weight is "replicate" (see param.py) without sequence parallelism, where every rank
computes its complete gradient, and "partial" with it, where ranks see different tokens. Always "partial": the norms of
queries and keys, since ranks have different heads; and if ranks outnumber the key and value heads, the weights of
those, since ranks that share a head have different queries.

Vocabulary. The embedding table is sharded by rows; a rank looks up the tokens of its rows and adds zeros for the rest.
In training no rank has a complete row of logits: the loss reduces the largest logsumexp of a row's shards, then the sum
of exp(logsumexp - largest) and the label's logit. Sampling gathers rows.

Shoeybi et al. 2019 (Megatron-LM: f and g, section 3); Korthikanti et al. 2022 (sequence parallelism: section 4.2);
Wang et al. 2023, Overlap Communication with Dependent Computation via Decomposition (the ring).
Shapes: t ranks, T tokens of a micro-batch (batch x sequence, flat), H hidden, V vocabulary, R rows or C columns of a
whole weight; [T/t, H] is [T, H] without sequence parallelism.
"""
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import pad

from collectives import (
    MAX,
    AllGather__ReduceScatter,
    AllReduce__Identity,
    Group,
    Identity__AllReduce,
    Pending,
    all_gather,
    all_reduce,
    name,
    rank,
    reduce_scatter,
    run_demo,
    sent,
    shift,
    size,
)
from operations import load_kernels, uses_kernels
from param import (
    IGNORED,
    Finish,
    Spec,
    acc_dtype,
    accumulate_grad,
    accumulate_product,
    is_deferred,
    parameter,
    shard_slice,
    stacked_weight,
)
from recompute import dropping_cheap, is_recomputing

MakeParameter = Callable[[Spec], nn.Parameter]  # makes this rank's shard of a parameter


class TensorParallel(NamedTuple):
    """How the ranks of a group share layers. Functions take it as `tp`; without a group nothing is sharded.

    sequence: sequence parallelism; between layers each rank has T/t contiguous tokens, in rank order.
    async_tp: asynchronous tensor parallelism, which needs `sequence`.
    fp8: an object with `column` and `row` (fp8.Fp8), whose linear layers in FP8 replace those of this file.
    """
    group: Group = None
    sequence: bool = False
    async_tp: bool = False
    fp8: Any = None

    @property
    def size(self) -> int:
        return size(self.group)

    # f and g only start an exchange. The caller may compute something before it calls what they return.

    def start_gather(self, x: Tensor) -> Finish:
        """Forward of f, backward of g, [T/t, H] -> [T, H]: all-gather by rank. Without sequence parallelism: x."""
        if not self.sequence:
            return lambda: x
        gathered = x.new_empty(len(x) * self.size, *x.shape[1:])
        return partial(wait_for, all_gather(gathered, x.contiguous(), self.group, async_op=True), gathered)

    def start_reduce(self, terms: Tensor) -> Finish:
        """Forward of g, backward of f, [T, H] -> [T/t, H]: sum the terms of all ranks, in place without sequence
        parallelism."""
        if not self.sequence:
            return partial(wait_for, all_reduce(terms, self.group, async_op=True), terms)
        total = terms.new_empty(len(terms) // self.size, *terms.shape[1:])
        return partial(wait_for, reduce_scatter(total, terms, self.group, async_op=True), total)

    def skipped_output(self, x: Tensor, width: int) -> Tensor:
        """A placeholder with the shape of a row parallel layer's output, [T/t, width], which takes no memory."""
        tokens = len(x) // self.size if self.sequence else len(x)
        return x.new_zeros(()).expand(tokens, width)


def wait_for(pending: Pending, result: Tensor) -> Tensor:
    pending.wait()
    return result


# ---- linear layers --------------------------------------------------------------------------------------------------

def column(x: Tensor, *weights: nn.Parameter, tp: TensorParallel, defer: bool = True) -> Tensor:
    """Column parallel linear layer: [T/t, H] -> [T, R/t]. defer: in a split backward, weight gradients are
    computed in its second half."""
    with dropping_cheap():
        return (tp.fp8.column if tp.fp8 else Column.apply)(x, tp, defer, *weights)


def row(x: Tensor, weight: nn.Parameter, tp: TensorParallel, skip: bool = False) -> Tensor:
    """Row parallel linear layer: [T, C/t] -> [T/t, H]. skip: return a placeholder, as no backward reads it."""
    with dropping_cheap():
        return (tp.fp8.row if tp.fp8 else Row.apply)(x, tp, skip, weight)


class Column(Function):
    """S = X A^T. Weights that have the same input (queries, keys, values) share one gather, one matmul and one dX."""

    @staticmethod
    def forward(ctx, x, tp, defer, *weights):
        product, gathered = start_gather_matmul(x, stacked_weight(weights).t(), tp)()
        # The second run of a block keeps all of X, as backward follows at once; a split backward keeps shards.
        ctx.saves_gathered = is_recomputing() and not is_deferred(defer)
        ctx.save_for_backward(gathered if ctx.saves_gathered else x)
        ctx.weights, ctx.tp, ctx.defer = weights, tp, defer  # not saved: unpacked weights would lack spec and sink
        return product

    @staticmethod
    def backward(ctx, grad):
        tp, saves_gathered = ctx.tp, ctx.saves_gathered
        saved = ctx.saved_tensors[0].detach()  # a queued weight gradient must not keep a graph alive

        def start_gather() -> Finish:
            return (lambda: saved) if saves_gathered else tp.start_gather(saved)

        started = None if is_deferred(ctx.defer) else start_gather()
        finish_reduce = start_matmul_reduce(grad, stacked_weight(ctx.weights), tp)  # dX, while X is gathered

        def add_weight_grad(out: Tensor, x: Tensor) -> None:
            accumulate_product(out, grad.t(), x)

        accumulate_grad(ctx.weights, add_weight_grad, ctx.defer, lambda: started or start_gather(),  # dX is reduced
                        holds=grad.nbytes)
        return finish_reduce(), None, None, *[None] * len(ctx.weights)


class Row(Function):
    """Z = the sum of Y B^T over the ranks."""

    @staticmethod
    def forward(ctx, x, tp, skip, weight):
        ctx.save_for_backward(x)
        ctx.weight, ctx.tp = weight, tp
        if skip:
            return tp.skipped_output(x, len(weight))
        return start_matmul_reduce(x, weight.t(), tp)()

    @staticmethod
    def backward(ctx, grad):
        tp = ctx.tp
        finish_gather_matmul = start_gather_matmul(grad, ctx.weight, tp)
        x = ctx.saved_tensors[0].detach()  # recomputes x if it is cheap, while dZ is gathered
        dx, gathered = finish_gather_matmul()
        if is_deferred():
            gathered = None  # the weight gradient gathers dZ again: its queue keeps [T/t, H], not [T, H]

        def start_gather() -> Finish:
            return tp.start_gather(grad) if gathered is None else lambda: gathered

        def add_weight_grad(out: Tensor, dz: Tensor) -> None:
            accumulate_product(out, dz.t(), x)

        accumulate_grad(ctx.weight, add_weight_grad, start_gather=start_gather, holds=x.nbytes)
        return dx, None, None, None


def start_gather_matmul(x: Tensor, matrix: Tensor, tp: TensorParallel) -> Callable[[], tuple[Tensor, Tensor]]:
    """Gather the tokens of x, then multiply. The function returned finishes both (async_tp: does both), and returns
    (gathered x @ matrix, gathered x)."""
    if tp.async_tp:
        return partial(all_gather_matmul, x, matrix, tp.group)
    finish_gather = tp.start_gather(x)

    def finish_matmul() -> tuple[Tensor, Tensor]:
        gathered = finish_gather()
        return gathered @ matrix, gathered
    return finish_matmul


def start_matmul_reduce(x: Tensor, matrix: Tensor, tp: TensorParallel) -> Finish:
    """Multiply, then sum over the ranks: x @ matrix."""
    if tp.async_tp:
        total = matmul_reduce_scatter(x, matrix, tp.group)
        return lambda: total
    return tp.start_reduce(x @ matrix)


# ---- asynchronous: exchanges in steps round a ring, each hidden under the matmul of a shard --------------------------

def all_gather_matmul(x: Tensor, matrix: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """(gathered x @ matrix, gathered x): x [T/t, H], matrix [H, R] -> [T, R], [T, H]."""
    n, me = size(group), rank(group)
    gathered = x.new_empty(len(x) * n, x.shape[1])
    product = x.new_empty(len(gathered), matrix.shape[1])
    shards, products = gathered.chunk(n), product.chunk(n)
    shards[me].copy_(x)
    for hop in range(n):
        owner = (me - hop) % n
        if hop < n - 1:
            pending = shift(shards[owner - 1], shards[owner], group)
        torch.mm(shards[owner], matrix, out=products[owner])  # while this shard is sent and the next one received
        if hop < n - 1:
            pending.wait()
    return product, gathered


def matmul_reduce_scatter(x: Tensor, matrix: Tensor, group: Group) -> Tensor:
    """This rank's tokens of x @ matrix, summed over the ranks: x [T, C], matrix [C, H] -> [T/t, H]."""
    n, me = size(group), rank(group)
    shards = x.chunk(n)
    total = shards[me - 1] @ matrix  # a shard's sum starts at the rank after its owner and reaches it n-1 hops later
    for hop in range(1, n):
        incoming = torch.empty_like(total)
        pending = shift(incoming, total, group)
        total = shards[me - 1 - hop] @ matrix  # while one sum is sent and the next one received
        pending.wait()
        total += incoming
    return total


# ---- modules --------------------------------------------------------------------------------------------------------

class ColumnParallelLinear(nn.Module):
    """[T/t, H] -> [T, R/t]: one or several weights with the same input. Their outputs are concatenated."""

    def __init__(self, make: MakeParameter, *specs: Spec, biases: Sequence[Spec] = ()):
        super().__init__()
        self.weights = nn.ParameterList(make(spec) for spec in specs)
        self.biases = nn.ParameterList(make(spec) for spec in biases)

    def forward(self, x: Tensor, tp: TensorParallel) -> Tensor:
        y = column(x, *self.weights, tp=tp)
        return y + torch.cat(tuple(self.biases)) if len(self.biases) else y


class RowParallelLinear(nn.Module):
    """[T, C/t] -> [T/t, H]. skip_when_recomputing: no backward reads its result, so full recomputation returns a
    placeholder instead."""

    def __init__(self, make: MakeParameter, spec: Spec, skip_when_recomputing: bool = False):
        super().__init__()
        self.weight, self.skip_when_recomputing = make(spec), skip_when_recomputing

    def forward(self, x: Tensor, tp: TensorParallel) -> Tensor:
        return row(x, self.weight, tp, skip=self.skip_when_recomputing and is_recomputing())


class VocabParallelEmbedding(nn.Module):
    """A table [V/t, H]: tokens [T] -> [T/t, H]."""

    def __init__(self, make: MakeParameter, spec: Spec):
        super().__init__()
        self.table = make(spec)

    def forward(self, tokens: Tensor, tp: TensorParallel) -> Tensor:
        return Embed.apply(tokens, self.table, tp)


class VocabParallelHead(nn.Module):
    """A table [V/t, H]: [T/t, H] -> logits [T, V/t]; with labels [T], the sum of the tokens' losses instead.

    weight: the embedding's table, where the two are tied and this rank has it. z_loss: see cross_entropy. loss_grad:
    the gradient that the sum will have in backward (default 1); the fused kernel needs it in forward.
    """

    def __init__(self, make: MakeParameter, spec: Spec, weight: nn.Parameter | None = None, z_loss: float = 0.0):
        super().__init__()
        self.weight, self.z_loss = make(spec) if weight is None else weight, z_loss

    def forward(self, x: Tensor, tp: TensorParallel, labels: Tensor | None = None,
                loss_grad: Tensor | None = None) -> Tensor:
        z_loss = self.z_loss if torch.is_grad_enabled() else 0.0  # an evaluation's loss is the cross entropy alone
        loss_options = dict(z_loss=z_loss, vocab=self.weight.box[0], group=tp.group)
        if labels is not None and uses_kernels(x):  # this kernel never stores all logits
            return load_kernels().linear_cross_entropy(gather_tokens(x, tp), self.weight, labels, loss_grad=loss_grad,
                                                       **loss_options)
        logits = column(x, self.weight, tp=tp, defer=False)
        return logits if labels is None else cross_entropy(logits, labels, **loss_options)


# ---- tokens for experts and for the fused head ----------------------------------------------------------------------

def split_tokens(x: Tensor, tp: TensorParallel) -> Tensor:
    """This rank's shard of the tokens: x itself with sequence parallelism; else [T, H] -> about [T/t, H]."""
    if tp.sequence or tp.size == 1:
        return x
    return Identity__AllReduce.apply(x, tp.group)[shard_slice(len(x), tp.size, rank(tp.group))]


def merge_tokens(y: Tensor, count: int, tp: TensorParallel) -> Tensor:
    """The inverse of split_tokens. count: tokens of the x that was split."""
    if tp.sequence or tp.size == 1:
        return y
    shard = shard_slice(count, tp.size, rank(tp.group))
    return AllReduce__Identity.apply(pad(y, (0, 0, shard.start, count - shard.stop)), tp.group)


def gather_tokens(x: Tensor, tp: TensorParallel) -> Tensor:
    """[T/t, H] -> [T, H]: all tokens on every rank. Each rank uses them differently, so their gradients are summed."""
    if tp.size == 1:
        return x
    return AllGather__ReduceScatter.apply(x, 0, tp.group) if tp.sequence else Identity__AllReduce.apply(x, tp.group)


# ---- the vocabulary -------------------------------------------------------------------------------------------------

class Embed(Function):
    """Rows of a table [V/t, H]. Their gradients are added row by row: a dense [V/t, H] one would be mostly zeros."""

    @staticmethod
    def forward(ctx, tokens, table, tp):
        rows, in_shard = local_index(tokens, table.box[0])
        ctx.save_for_backward(rows, in_shard)
        ctx.table, ctx.tp = table, tp
        return tp.start_reduce(table[rows].mul_(in_shard[:, None]))()

    @staticmethod
    def backward(ctx, grad):
        rows, in_shard = ctx.saved_tensors
        grad = ctx.tp.start_gather(grad)() * in_shard[:, None]
        accumulate_grad(ctx.table, lambda out: out.index_add_(0, rows, grad.to(out.dtype)), defer=False)
        return None, None, None


def local_index(tokens: Tensor, vocab: slice) -> tuple[Tensor, Tensor]:
    """(index into this rank's part `vocab` of the vocabulary, whether a token is in it); others get any valid index."""
    in_shard = (tokens >= vocab.start) & (tokens < vocab.stop)
    return (tokens - vocab.start).clamp(0, vocab.stop - vocab.start - 1), in_shard


class CrossEntropy(Function):
    """Saves the logits in their own dtype, and a few numbers per token; backward computes the probabilities again."""

    @staticmethod
    def forward(ctx, logits, labels, weights, z_loss, vocab, group):
        upcast = logits.to(acc_dtype(logits.dtype))
        index, in_shard = local_index(labels, vocab)
        shard_logsumexp = upcast.logsumexp(-1)
        largest = shard_logsumexp.clone()  # subtracted before exp, which then cannot overflow
        all_reduce(largest, group, MAX)
        sums = torch.stack((shard_logsumexp.sub_(largest).exp_(), upcast.gather(-1, index[:, None])[:, 0] * in_shard))
        all_reduce(sums, group)
        logsumexp = sums[0].log_().add_(largest)  # over the whole vocabulary
        label_logit = sums[1]
        counted = (labels != IGNORED).to(upcast.dtype)
        weights = counted if weights is None else counted * weights
        ctx.save_for_backward(logits, index, in_shard, logsumexp, weights)
        ctx.z_loss = z_loss
        return (weights * (logsumexp - label_logit + z_loss * logsumexp.square())).sum()

    @staticmethod
    def backward(ctx, grad):
        logits, index, in_shard, logsumexp, weights = ctx.saved_tensors
        weights = weights * grad
        out = (logits - logsumexp[:, None]).exp_().mul_((weights * (1 + 2 * ctx.z_loss * logsumexp))[:, None])
        out.scatter_add_(-1, index[:, None], -(weights * in_shard)[:, None])
        return out.to(logits.dtype), None, None, None, None, None


def cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None = None, z_loss: float = 0.0,
                  vocab: slice | None = None, group: Group = None) -> Tensor:
    """The sum (not the mean) of the tokens' losses in nats; tokens with the label IGNORED have none.

    logits: [..., V/t], for the part `vocab` of the vocabulary that this rank has (default: all of it). labels: [...].
    weights: [...], a factor per token. z_loss: coefficient of the squared logarithm of the softmax's denominator, which
    is added to a token's loss so that logits do not drift (Chowdhery et al. 2022, section 5).
    """
    vocab = slice(0, logits.shape[-1]) if vocab is None else vocab
    weights = None if weights is None else weights.flatten()
    return CrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), weights, z_loss, vocab, group)


# ---- demo: python tp.py ---------------------------------------------------------------------------------------------

def demo(group: Group) -> None:
    t, T, H = size(group), 64, 32
    up = parameter(Spec("up", (4 * H, H), {"tp": 0}), {"tp": group}, torch.float32)
    down = parameter(Spec("down", (H, 4 * H), {"tp": 1}), {"tp": group}, torch.float32)
    for weight in (up, down):
        weight.data = torch.randn(weight.shape) / 6
    shards = "".join(chr(ord("A") + i) * (32 // t) for i in range(t))
    lines = [f"Two matrices, sharded over {t} rank(s), one letter per rank, and {T} tokens of width {H}:\n",
             f"    first matrix, by rows      {shards}", f"    second matrix, by columns  {shards}\n"]
    for title, tp in {"tensor parallelism": TensorParallel(group),
                      "and sequence parallelism": TensorParallel(group, sequence=True),
                      "asynchronous": TensorParallel(group, sequence=True, async_tp=True)}.items():
        sent.clear()
        x = torch.randn(T // t if tp.sequence else T, H, requires_grad=True)
        row(torch.tanh(column(x, up, tp=tp)), down, tp).sum().backward()
        tokens = shards if tp.sequence else "every rank has all"
        units = round(sent[name(group)] * t / max(t - 1, 1) / x.new_empty(T, H).nbytes)
        lines.append(f"    {title:24s}   tokens between: {tokens:32s}   sent: {units} x (t-1)/t of T H")
    lines.append("\n4 = two all-reduces, of 2 each. 5 = two all-gathers, two reduce-scatters, and X gathered again in "
                 "backward, of 1 each.")
    if rank(group) == 0:
        print("\n".join(lines))


if __name__ == "__main__":
    run_demo(demo, ranks=4)
