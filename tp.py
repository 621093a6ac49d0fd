"""Tensor parallelism: weight matrices are sharded over t ranks. Sequence parallelism: so are the tokens between them.

Saves: all but 1/t of the matrices, embedding and head, with their gradients and optimizer state, and of the activations
       inside a pair of matrices; with sequence parallelism also of those between pairs; all but 1/t of the matmuls.
Costs: per layer (two pairs), forward and backward: 4 all-reduces of T H elements. With sequence parallelism 4
       all-gathers and 4 reduce-scatters, which are as many bytes, and 2 more all-gathers of inputs that are not saved.
Stops helping when: ranks are not on one fast network, since every layer waits for it; or H/t makes too small a matmul.

Matrices come in pairs, S = X A^T, Y = act(S), Z = Y B^T: up and down projection of a feed-forward layer; queries, keys,
values and the output projection of attention. A is sharded by rows, its output features ("column parallel": columns of
A^T), B by columns, its input features ("row parallel"). A pair needs one exchange before it, f, and one after it, g:

    rank 0    X ─ f ─► S_0 = X A_0^T ─ act ─► Y_0 ──► Y_0 B_0^T ─┐
                                                                 ├─ g ─► Z = Y_0 B_0^T + Y_1 B_1^T
    rank 1    X ─ f ─► S_1 = X A_1^T ─ act ─► Y_1 ──► Y_1 B_1^T ─┘

                                  f forward         f backward           g forward           g backward
    tensor parallelism            -                 all-reduce dX        all-reduce Z        -
    and sequence parallelism      all-gather X      reduce-scatter dX    reduce-scatter Z    all-gather dZ

Norms and residuals treat each token alone, so with sequence parallelism a rank has T/t tokens of X and Z. It saves its
shard of X, and gathers X once more in backward, where both exchanges of a column parallel layer hide under matmuls:

    network    ├─ all-gather X ─┤ ├─ reduce-scatter dX ─┤
    compute    ├─ dX = dS A ────┤ ├─ dA += dS^T X ──────┤

Shoeybi et al. 2019 (Megatron-LM: f and g, section 3); Korthikanti et al. 2022 (sequence parallelism: section 4.2);
Wang et al. 2023, Overlap Communication with Dependent Computation via Decomposition (asynchronous: the ring).
Shapes: t ranks, T tokens of a micro-batch (batch x sequence, flat), H hidden, V vocabulary, R rows or C columns of a
whole weight; [T/t, H] is [T, H] without sequence parallelism.
"""
from collections.abc import Callable, Sequence
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
    done,
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
    Params,
    Spec,
    Steps,
    acc_dtype,
    accumulate_grad,
    accumulate_product,
    add_to,
    finish_weight_grad,
    is_deferring,
    parameter,
    shard_slice,
    stacked_weight,
    start_weight_grad,
)

MakeParameter = Callable[[Spec], nn.Parameter]  # makes this rank's shard of a parameter


class TensorParallel(NamedTuple):
    """How the ranks of a group share layers. Functions take it as `tp`; without a group nothing is sharded.

    sequence: sequence parallelism; between layers each rank has T/t contiguous tokens, in rank order.
    async_tp: asynchronous tensor parallelism, which needs `sequence`.
    save_gathered: a column parallel layer saves its all-gathered input, where a backward follows at once.
    """
    group: Group = None
    sequence: bool = False
    async_tp: bool = False
    save_gathered: bool = False

    @property
    def size(self) -> int:
        return size(self.group)

    # f and g start an exchange. The caller may compute something before it waits.

    def gather(self, x: Tensor) -> Pending:
        """Forward of f, backward of g, [T/t, H] -> [T, H]: all-gather by rank. Without sequence parallelism: x."""
        if not self.sequence:
            return done(x)
        gathered = x.new_empty(len(x) * self.size, *x.shape[1:])
        return all_gather(gathered, x.contiguous(), self.group, async_op=True)

    def reduce(self, terms: Tensor) -> Pending:
        """Forward of g, backward of f, [T, H] -> [T/t, H]: sum the terms of all ranks, in place without sequence
        parallelism."""
        if not self.sequence:
            return all_reduce(terms, self.group, async_op=True)
        total = terms.new_empty(len(terms) // self.size, *terms.shape[1:])
        return reduce_scatter(total, terms, self.group, async_op=True)

    # Experts see every token once, without sequence parallelism, too.

    def split(self, x: Tensor) -> Tensor:
        """This rank's shard of the tokens: x itself with sequence parallelism; else [T, H] -> about [T/t, H]."""
        if self.sequence or self.size == 1:
            return x
        return Identity__AllReduce.apply(x, self.group)[shard_slice(len(x), self.size, rank(self.group))]

    def merge(self, y: Tensor, count: int) -> Tensor:
        """The inverse of split. count: tokens of the x that was split."""
        if self.sequence or self.size == 1:
            return y
        shard = shard_slice(count, self.size, rank(self.group))
        return AllReduce__Identity.apply(pad(y, (0, 0, shard.start, count - shard.stop)), self.group)


# ---- linear layers --------------------------------------------------------------------------------------------------
# A split backward (zero-bubble pipelines) computes dX first, weight gradients later. In between only shards of X and dZ
# are kept. Both are gathered again for dA and dB, dZ for the second time: [T, H] would wait in t times the memory.

class Matmul:
    """The three products of a linear layer Y = X W^T, where W are weights one below the other. fp8.Fp8 has the same
    methods, and multiplies in FP8."""

    def forward(self, x: Tensor, weights: Params) -> Tensor:
        return x @ stacked_weight(weights).t()

    def gradient(self, dy: Tensor) -> Any:
        """dY in the form in which the other two take it."""
        return dy

    def dgrad(self, dy: Any, weights: Params) -> Tensor:
        """dX = dY W."""
        return dy @ stacked_weight(weights)

    def wgrad(self, out: Tensor, dy: Any, x: Tensor) -> None:
        """out += dY^T X."""
        accumulate_product(out, dy.t(), x)


MATMUL = Matmul()


def column(x: Tensor, *weights: nn.Parameter, tp: TensorParallel, mm: Matmul = MATMUL, defer: bool = True) -> Tensor:
    """Column parallel linear layer: [T/t, H] -> [T, R/t]. Weights that have the same input (queries, keys, values)
    share one gather, one matmul and one dX. defer: in a split backward, weight gradients are computed in its second
    half."""
    return Column.apply(x, tp, mm, defer, *weights)


def row(x: Tensor, weight: nn.Parameter, tp: TensorParallel, mm: Matmul = MATMUL, skip: bool = False) -> Tensor:
    """Row parallel linear layer: [T, C/t] -> [T/t, H]. skip: nobody reads the result; return a placeholder."""
    return Row.apply(x, tp, mm, skip, weight)


class Column(Function):
    """f, then S = X A^T."""

    @staticmethod
    def forward(ctx, x, tp, mm, defer, *weights):
        if tp.async_tp:
            product, gathered = all_gather_matmul(x, stacked_weight(weights).t(), tp.group)
        else:
            gathered = tp.gather(x).wait()
            product = mm.forward(gathered, weights)
        tp = tp._replace(save_gathered=tp.save_gathered and not is_deferring())  # else X would wait in the queue whole
        ctx.save_for_backward(gathered if tp.save_gathered else x)
        ctx.tp, ctx.mm, ctx.defer, ctx.weights = tp, mm, defer, weights  # unpacked weights would lack spec and sink
        return product

    @staticmethod
    def backward(ctx, ds):
        tp, mm, weights = ctx.tp, ctx.mm, ctx.weights
        x = ctx.saved_tensors[0].detach()  # a queued weight gradient must not keep a graph alive
        ds = mm.gradient(ds)
        weight_grad = column_weight_grad(x, ds, tp, mm, weights)
        start_weight_grad(weights, weight_grad, ctx.defer)
        if tp.async_tp:
            dx = done(matmul_reduce_scatter(ds, stacked_weight(weights), tp.group))
        else:
            dx = tp.reduce(mm.dgrad(ds, weights))  # the matmul hides the gather of X
        finish_weight_grad(weight_grad)  # its matmul hides the reduction of dX
        return dx.wait(), None, None, None, *[None] * len(weights)


def column_weight_grad(x: Tensor, ds: Any, tp: TensorParallel, mm: Matmul, weights: Params) -> Steps:
    """dA += dS^T X, while X is gathered unless it has been saved whole."""
    gathering = done(x) if tp.save_gathered else tp.gather(x)
    yield
    gathered = gathering.wait()
    add_to(weights, lambda out: mm.wgrad(out, ds, gathered))


class Row(Function):
    """Z = Y B^T, then g."""

    @staticmethod
    def forward(ctx, y, tp, mm, skip, weight):
        ctx.save_for_backward(y)
        ctx.tp, ctx.mm, ctx.weights = tp, mm, (weight,)
        if skip:
            return y.new_zeros(()).expand(len(y) // tp.size if tp.sequence else len(y), len(weight))
        if tp.async_tp:
            return matmul_reduce_scatter(y, weight.t(), tp.group)
        return tp.reduce(mm.forward(y, ctx.weights)).wait()

    @staticmethod
    def backward(ctx, dz):
        tp, mm, weights = ctx.tp, ctx.mm, ctx.weights
        gathering = None if tp.async_tp else tp.gather(dz)
        y = ctx.saved_tensors[0].detach()
        if tp.async_tp:
            dy, gathered = all_gather_matmul(dz, stacked_weight(weights), tp.group)
        else:
            gathered = mm.gradient(gathering.wait())
            dy = mm.dgrad(gathered, weights)
        if is_deferring():  # until then dZ waits as [T/t, H], not as [T, H]
            start_weight_grad(weights, row_weight_grad(y, dz, tp, mm, weights))
        else:
            add_to(weights, lambda out: mm.wgrad(out, gathered, y))
        return dy, None, None, None, None


def row_weight_grad(y: Tensor, dz: Tensor, tp: TensorParallel, mm: Matmul, weights: Params) -> Steps:
    """dB += dZ^T Y, of the second half of a split backward: dZ is gathered once more."""
    gathering = tp.gather(dz)
    yield
    gathered = mm.gradient(gathering.wait())
    add_to(weights, lambda out: mm.wgrad(out, gathered, y))


# ---- asynchronous: exchanges in steps round a ring, each hidden under the matmul of a shard --------------------------
# So the exchanges of forward and of a row parallel layer's backward are hidden too, beside which nothing independent is
# left to compute.

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
    mm = MATMUL  # train.py may replace it, by an fp8.Fp8

    def __init__(self, make: MakeParameter, *specs: Spec, biases: Sequence[Spec] = ()):
        super().__init__()
        self.weights = nn.ParameterList(make(spec) for spec in specs)
        self.biases = nn.ParameterList(make(spec) for spec in biases)

    def forward(self, x: Tensor, tp: TensorParallel) -> Tensor:
        y = column(x, *self.weights, tp=tp, mm=self.mm)
        return y + torch.cat(tuple(self.biases)) if len(self.biases) else y


class RowParallelLinear(nn.Module):
    """[T, C/t] -> [T/t, H]. skip: see `row`."""
    mm = MATMUL  # train.py may replace it, by an fp8.Fp8

    def __init__(self, make: MakeParameter, spec: Spec):
        super().__init__()
        self.weight = make(spec)

    def forward(self, x: Tensor, tp: TensorParallel, skip: bool = False) -> Tensor:
        return row(x, self.weight, tp, self.mm, skip)


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


# ---- tokens for the fused head --------------------------------------------------------------------------------------

def gather_tokens(x: Tensor, tp: TensorParallel) -> Tensor:
    """[T/t, H] -> [T, H]: all tokens on every rank. Each rank uses them differently, so their gradients are summed."""
    if tp.size == 1:
        return x
    return AllGather__ReduceScatter.apply(x, 0, tp.group) if tp.sequence else Identity__AllReduce.apply(x, tp.group)


# ---- the vocabulary -------------------------------------------------------------------------------------------------
# The table is sharded by rows: a rank looks up the tokens of its rows and adds zeros for the rest. No rank has a whole
# row of logits: the loss reduces the largest logsumexp of a row's shards, then the sum of exp(logsumexp - largest) and
# the label's logit.

class Embed(Function):
    """Rows of a table [V/t, H]. Their gradients are added row by row: a dense [V/t, H] one would be mostly zeros."""

    @staticmethod
    def forward(ctx, tokens, table, tp):
        rows, in_shard = local_index(tokens, table.box[0])
        ctx.save_for_backward(rows, in_shard)
        ctx.table, ctx.tp = table, tp
        return tp.reduce(table[rows].mul_(in_shard[:, None])).wait()

    @staticmethod
    def backward(ctx, grad):
        rows, in_shard = ctx.saved_tensors
        grad = ctx.tp.gather(grad).wait() * in_shard[:, None]
        accumulate_grad(ctx.table, lambda out: out.index_add_(0, rows, grad.to(out.dtype)), defer=False)
        return None, None, None


def local_index(tokens: Tensor, vocab: slice) -> tuple[Tensor, Tensor]:
    """(index into this rank's part `vocab` of the vocabulary, whether a token is in it); others get any valid index."""
    in_shard = (tokens >= vocab.start) & (tokens < vocab.stop)
    return (tokens - vocab.start).clamp(0, vocab.stop - vocab.start - 1), in_shard


class CrossEntropy(Function):
    """Saves the logits in their own dtype, and a few numbers per token; backward computes the probabilities again."""

    @staticmethod
    def forward(ctx, logits, labels, z_loss, vocab, group):
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
        ctx.save_for_backward(logits, index, in_shard, logsumexp, counted)
        ctx.z_loss = z_loss
        return (counted * (logsumexp - label_logit + z_loss * logsumexp.square())).sum()

    @staticmethod
    def backward(ctx, grad):
        logits, index, in_shard, logsumexp, counted = ctx.saved_tensors
        grads = counted * grad
        out = (logits - logsumexp[:, None]).exp_().mul_((grads * (1 + 2 * ctx.z_loss * logsumexp))[:, None])
        out.scatter_add_(-1, index[:, None], -(grads * in_shard)[:, None])
        return out.to(logits.dtype), None, None, None, None


def cross_entropy(logits: Tensor, labels: Tensor, z_loss: float = 0.0, vocab: slice | None = None,
                  group: Group = None) -> Tensor:
    """The sum (not the mean) of the tokens' losses in nats; tokens with the label IGNORED have none.

    logits: [..., V/t], for the part `vocab` of the vocabulary that this rank has (default: all of it). labels: [...].
    z_loss: coefficient of the squared logarithm of the softmax's denominator, which is added to a token's loss so that
    logits do not drift (Chowdhery et al. 2022, section 5).
    """
    vocab = slice(0, logits.shape[-1]) if vocab is None else vocab
    return CrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), z_loss, vocab, group)


# ---- demo: python tp.py ---------------------------------------------------------------------------------------------

def demo(group: Group) -> None:
    """What a pair of matrices sends, forward and backward, in three ways."""
    t, T, H = size(group), 64, 32
    up, down = (parameter(Spec(name, shape, {"tp": dim}), {"tp": group}, torch.float32)
                for name, shape, dim in (("up", (4 * H, H), 0), ("down", (H, 4 * H), 1)))
    up.data, down.data = (torch.randn(weight.shape) / 6 for weight in (up, down))
    for title, tp in {"tensor parallelism": TensorParallel(group),
                      "and sequence parallelism": TensorParallel(group, sequence=True),
                      "asynchronous": TensorParallel(group, sequence=True, async_tp=True)}.items():
        sent.clear()
        x = torch.randn(T // t if tp.sequence else T, H, requires_grad=True)
        row(torch.tanh(column(x, up, tp=tp)), down, tp).sum().backward()
        units = round(sent[name(group)] * t / max(t - 1, 1) / x.new_empty(T, H).nbytes)
        if rank(group) == 0:
            print(f"{title:24s}   {len(x)} tokens between pairs   sent: {units} x (t-1)/t of T H")


if __name__ == "__main__":
    run_demo(demo, ranks=4)
