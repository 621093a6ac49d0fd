"""Tensor parallelism: weight matrices are sharded over t ranks. Sequence parallelism: so are the tokens between them.

Matrices come in pairs, S = X A^T, Y = act(S), Z = Y B^T. On t = 2 ranks:

    rank 0    X ─ f ─► S_0 = X A_0^T ─ act ─► Y_0 ──► Y_0 B_0^T ─┐
                                                                 ├─ g ─► Z = Y_0 B_0^T + Y_1 B_1^T
    rank 1    X ─ f ─► S_1 = X A_1^T ─ act ─► Y_1 ──► Y_1 B_1^T ─┘

A pair is the up and down projection of a feed-forward layer, or the projections to queries, keys and
values with the output projection of attention. A is sharded by rows, its output features ("column
parallel": they are columns of A^T). B is sharded by columns, its input features ("row parallel"). act
needs no exchange, since it treats channels or heads apart. A pair has one exchange before it, f, and one
after it, g:

                                  f forward         f backward           g forward           g backward
    tensor parallelism            -                 all-reduce dX        all-reduce Z        -
    and sequence parallelism      all-gather X      reduce-scatter dX    reduce-scatter Z    all-gather dZ

With sequence parallelism, a rank has 1/t of the tokens of X and Z, because norms and residuals treat each
token by itself. It saves its shard of X, and gathers X again in backward. A column parallel layer hides both
exchanges of its backward under its matmuls:

    network    ├─ all-gather X ─┤ ├─ reduce-scatter dX ─┤
    compute    ├─ dX = dS A ────┤ ├─ dA += dS^T X ──────┤

Asynchronous tensor parallelism (--sp async) hides the other exchanges, too. It splits an exchange into t
steps, each under the matmul of one shard of the layer.

Shapes: T tokens of a micro-batch (flat), H hidden, V vocabulary. A whole A has R rows, and a whole B has
C columns. [T/t, H] is what a rank has between layers; without sequence parallelism it is [T, H].

Saves: A rank stores 1/t of the matrices of each pair (at least one head of wk and wv), of the embedding
       and of the head; of their gradients and optimizer state; and of activations inside a pair. With
       sequence parallelism also of activations between pairs.
Costs: A layer has two pairs: 4 all-reduces of T H elements in forward and backward. With sequence
       parallelism, 4 all-gathers and 4 reduce-scatters send as many bytes. 2 more all-gathers fetch X
       in backward, and 2 more fetch dZ if backward is split.
       With sequence parallelism norms see T/t tokens, so their gradients are summed over ranks (zero.py).
       The embedding needs a g, the head an f, and the loss 3 numbers per token.
Stops helping when: ranks are not on one fast network, since every layer waits for it; or R/t, C/t are small.

Shoeybi et al. 2019 (f, g); Korthikanti et al. 2022 (sequence parallelism: their g is f, their g bar is
g); Wang et al. 2023 (asynchronous).
"""
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import _symmetric_memory  # noqa: F401, which defines torch.ops.symm_mem

from core.collectives import (
    ALONE,
    MAX,
    AllGather__ReduceScatter,
    Group,
    Identity__AllReduce,
    Pending,
    all_reduce,
    calling,
    done,
    gather_rows,
    reduce_rows,
    run_demo,
    sent,
    shift,
)
from core.gradients import (
    Params,
    accumulate_grad,
    accumulate_product,
    add_to,
    is_deferring,
    stacked_weight,
    start_weight_grad,
)
from core.param import IGNORED, Spec, acc_dtype, check_labels, draw, local_box, parameter, shard_slice
from operations import uses_kernels
from recompute import is_recomputing

MakeParameter = Callable[[Spec], nn.Parameter]  # makes this rank's shard of a parameter


class TensorParallel(NamedTuple):
    """Which exchanges layers make. Functions take it as `tp`.

    group: by default one rank, which exchanges nothing. The weights' shards follow from their Specs.
    sequence: sequence parallelism. Between layers each rank has T/t contiguous tokens, in rank order.
    async_tp: asynchronous tensor parallelism. It needs `sequence`, and does not work with FP8.
    """
    group: Group = ALONE
    sequence: bool = False
    async_tp: bool = False

    @property
    def size(self) -> int:
        return self.group.size

    def gather(self, x: Tensor) -> Pending:
        """Start f's forward, or g's backward: [T/t, H] -> [T, H], in rank order."""
        if self.sequence:
            return gather_rows(x, self.group, async_op=True)
        return done(x)

    def reduce(self, terms: Tensor) -> Pending:
        """Start g's forward, or f's backward: [T, H] -> [T/t, H], summed over ranks.

        Without sequence parallelism the sum replaces `terms`.
        """
        if self.sequence:
            return reduce_rows(terms, self.group, async_op=True)
        return all_reduce(terms, self.group, async_op=True)

    def gather_with_grad(self, x: Tensor) -> Tensor:
        """f, for autograd: [T/t, ...] -> [T, ...]. For a tensor that ranks use differently outside of a Column: latents
        (mla.py), and the input of the fused head."""
        if self.sequence:
            return AllGather__ReduceScatter.apply(x, self.group)
        return Identity__AllReduce.apply(x, self.group)


# ---- linear layers --------------------------------------------------------------------------------------------------
# If nothing were hidden, the two layers of a pair would be these lines. x, dx, z and dz are this rank's
# T/t tokens. X, S, Y, Z and their gradients have all T tokens.
#
#     Column    forward     X = gather(x)         f
#                           S = X A^T             saves x
#               backward    X = gather(x)
#                           dX = dS A
#                           dx = reduce(dX)
#                           dA += dS^T X
#
#     Row       forward     Z = Y B^T             this rank's term of the sum; saves Y
#                           z = reduce(Z)         g
#               backward    dZ = gather(dz)
#                           dY = dZ B
#                           dB += dZ^T Y
#
# Four features change some of these lines:
#
#     mm                  In FP8 an fp8.Fp8 makes the three products, in place of `Matmul`.
#     tp.async_tp         A gather and a product are one function, and so are a product and a reduction.
#     is_recomputing()    A block's second forward comes just before its backward. Column saves X there,
#                         and does not gather again. Row skips a product that backward does not read.
#     is_deferring()      The first half of a split backward (zero-bubble pipelines) computes dx and dY,
#                         and queues dA and dB for the second half.
#
# dA and dB are added to gradient buffers (core/gradients.py), and autograd gets None for weights. Weights are
# inputs of the Functions all the same, so that autograd runs their hooks, which tell a weight's bucket
# that its gradient is complete.

class Column(Function):
    """f, then S = X A^T: [T/t, H] -> [T, R/t].

    weights: A. Weights with the same input (queries, keys, values) share a gather, a matmul and a dX.
    defer: False to compute dA in the first half of a split backward, too.
    """

    @staticmethod
    def forward(ctx, x, tp, mm, defer, *weights):
        assert not tp.async_tp or (tp.sequence and mm is MATMUL), "the ring shards tokens, and knows no FP8"
        ctx.tp, ctx.mm, ctx.defer = tp, mm.begin(), defer
        ctx.weights = weights  # not saved: hooks of saved tensors may return copies, which have no bucket
        if tp.async_tp:
            product, gathered = all_gather_matmul(x, stacked_weight(weights).t(), tp.group)
        else:
            gathered = tp.gather(x).wait()
            product = ctx.mm.forward(gathered, weights)
        ctx.saves_gathered = is_recomputing() and not is_deferring()  # X is too large to be queued
        ctx.save_for_backward(gathered if ctx.saves_gathered else x)
        return product

    @staticmethod
    def backward(ctx, ds):
        tp, mm, weights = ctx.tp, ctx.mm, ctx.weights
        x = ctx.saved_tensors[0].detach()  # a queued weight gradient must not keep a graph alive
        ds = mm.prepare_grad(ds)
        gather = done if ctx.saves_gathered else tp.gather
        # Before: gather X and wait, dX = dS A, reduce dX and wait, dA += dS^T X.
        # Now:    the gather of X runs under dS A, and the reduction of dX under dS^T X.
        add_da = start_weight_grad(weights, partial(gather, x), lambda out, gathered: mm.wgrad(out, ds, gathered),
                                   ctx.defer)
        if tp.async_tp and ctx.defer and is_deferring():  # dA is queued, and cannot hide the reduction
            dx = done(matmul_reduce_scatter(ds, stacked_weight(weights), tp.group))
        else:
            dx = tp.reduce(mm.dgrad(ds, weights))
        add_da()  # does nothing if dA is queued
        return dx.wait(), None, None, None, *[None] * len(weights)


class Row(Function):
    """Z = Y B^T, then g: [T, C/t] -> [T/t, H].

    weight: B. skip: return zeros instead, in a recomputed block whose backward does not read Z.
    """

    @staticmethod
    def forward(ctx, y, tp, mm, skip, weight):
        ctx.save_for_backward(y)
        ctx.tp, ctx.mm, ctx.weights = tp, mm.begin(), (weight,)
        if skip:
            own_tokens = len(y) // tp.size if tp.sequence else len(y)
            return y.new_zeros(()).expand(own_tokens, len(weight))
        if tp.async_tp:
            return matmul_reduce_scatter(y, weight.t(), tp.group)
        return tp.reduce(ctx.mm.forward(y, ctx.weights)).wait()

    @staticmethod
    def backward(ctx, dz):
        tp, mm, weights, y = ctx.tp, ctx.mm, ctx.weights, ctx.saved_tensors[0].detach()
        if tp.async_tp:
            dy, gathered = all_gather_matmul(dz, stacked_weight(weights), tp.group)
        else:
            gathered = mm.prepare_grad(tp.gather(dz).wait())
            dy = mm.dgrad(gathered, weights)
        if is_deferring():  # dZ is too large to be queued: dz is queued, then gathered and prepared again
            start_weight_grad(weights, partial(tp.gather, dz),
                              lambda out, whole: mm.wgrad(out, mm.prepare_grad(whole), y))
        else:
            add_to(weights, lambda out: mm.wgrad(out, gathered, y))
        return dy, None, None, None, None


class Matmul:
    """The three products of a linear layer Y = X W^T, where W is all weights, stacked along their output dimension.

    fp8.Fp8 has the same methods, and multiplies in FP8.
    """

    def begin(self) -> "Matmul":
        """Return what multiplies in one forward and its backward: this, or in FP8 a copy that keeps the scales."""
        return self

    def forward(self, x: Tensor, weights: Params) -> Tensor:
        return x @ stacked_weight(weights).t()

    def prepare_grad(self, dy: Tensor) -> Any:
        """Return dY as dgrad and wgrad take it: in FP8 quantised, with the same scale in each call."""
        return dy

    def dgrad(self, dy: Any, weights: Params) -> Tensor:
        """dX = dY W."""
        return dy @ stacked_weight(weights)

    def wgrad(self, out: Tensor, dy: Any, x: Tensor) -> None:
        """out += dY^T X."""
        accumulate_product(out, dy.t(), x)


MATMUL = Matmul()


# ---- modules --------------------------------------------------------------------------------------------------------

class ColumnParallelLinear(nn.Module):
    """[T/t, H] -> [T, R/t]: one or several weights with the same input. Their outputs are concatenated."""
    mm = MATMUL  # train.py may replace it by an fp8.Fp8

    def __init__(self, make: MakeParameter, *specs: Spec, biases: Sequence[Spec] = ()):
        super().__init__()
        self.weights = nn.ParameterList(make(spec) for spec in specs)
        self.biases = nn.ParameterList(make(spec) for spec in biases)

    def forward(self, x: Tensor, tp: TensorParallel) -> Tensor:
        y = Column.apply(x, tp, self.mm, True, *self.weights)
        return y + torch.cat(tuple(self.biases)) if len(self.biases) else y


class RowParallelLinear(nn.Module):
    """[T, C/t] -> [T/t, H]."""
    mm = MATMUL  # train.py may replace it by an fp8.Fp8

    def __init__(self, make: MakeParameter, spec: Spec):
        super().__init__()
        self.weight = make(spec)

    def forward(self, x: Tensor, tp: TensorParallel, skip: bool = False) -> Tensor:
        """skip: return zeros instead, in a recomputed block whose backward does not read the result."""
        return Row.apply(x, tp, self.mm, skip, self.weight)


class VocabParallelEmbedding(nn.Module):
    """Look up the rows of tokens in a table [V/t, H]: [T] -> [T/t, H]. Tokens below 0 are padding, and get zeros."""

    def __init__(self, make: MakeParameter, spec: Spec):
        super().__init__()
        self.table = make(spec)

    def forward(self, tokens: Tensor, tp: TensorParallel) -> Tensor:
        vocab_size = self.table.spec.shape[0]
        torch._assert_async((tokens < vocab_size).all(), f"a token is not below {vocab_size}")  # see check_labels
        return Embed.apply(tokens, self.table, tp)


class VocabParallelHead(nn.Module):
    """Compute logits [T, V/t] of [T/t, H] with a table [V/t, H], or with labels [T] the sum of the tokens' losses.

    weight: the embedding's table, if the two are tied and this rank has it. z_loss: see cross_entropy.
    loss_grad: the gradient that the sum will have in backward (default 1). Only the fused kernel needs
    it in forward.
    """

    def __init__(self, make: MakeParameter, spec: Spec, weight: nn.Parameter | None = None, z_loss: float = 0.0):
        super().__init__()
        self.weight, self.z_loss = make(spec) if weight is None else weight, z_loss

    def forward(self, x: Tensor, tp: TensorParallel, labels: Tensor | None = None,
                loss_grad: Tensor | None = None) -> Tensor:
        z_loss = self.z_loss if torch.is_grad_enabled() else 0.0  # an evaluation's loss is the cross entropy
        vocab_size = self.weight.spec.shape[0]
        if labels is not None and uses_kernels(x):  # this kernel never stores all logits
            from kernels import linear_cross_entropy  # needs Triton, which a CPU does without
            x = tp.gather_with_grad(x) if tp.size > 1 else x
            return linear_cross_entropy(x, self.weight, labels, z_loss=z_loss, vocab_size=vocab_size, group=tp.group,
                                        loss_grad=loss_grad)
        logits = Column.apply(x, tp, MATMUL, False, self.weight)  # not deferred: dS is as large as all logits
        return logits if labels is None else cross_entropy(logits, labels, z_loss, vocab_size, tp.group)


# ---- the vocabulary -------------------------------------------------------------------------------------------------
# The table is sharded by rows. A rank looks up the tokens whose rows it has, takes zeros for the others,
# and g sums these terms. No rank has all V logits of a token. With l_r, the logsumexp of rank r's logits,
#
#     loss = logsumexp - logit of the label,    logsumexp = m + log(sum over r of exp(l_r - m)),    m = max l_r
#
# takes three numbers per token: one all-reduce of m, and one of both sums (one rank has the label's logit).

class Embed(Function):
    """Rows of a table [V/t, H], then g. Gradients are added row by row: a dense gradient would be mostly zeros."""

    @staticmethod
    def forward(ctx, tokens, table, tp):
        rows, in_shard = local_index(tokens, table.box[0])  # box[0]: which rows of the whole table this rank has
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
    """Return (index into this rank's part `vocab` of the vocabulary, whether a token is in that part).

    Tokens that are not in it get some valid index.
    """
    in_shard = (tokens >= vocab.start) & (tokens < vocab.stop)
    return (tokens - vocab.start).clamp(0, vocab.stop - vocab.start - 1), in_shard


class CrossEntropy(Function):
    """Saves the logits in their own dtype, and a few numbers per token; backward computes the probabilities again."""

    @staticmethod
    def forward(ctx, logits, labels, z_loss, vocab, group):
        upcast = logits.to(acc_dtype(logits.dtype))
        index, in_shard = local_index(labels, vocab)
        shard_logsumexp = upcast.logsumexp(-1)
        largest = shard_logsumexp.clone()  # m, which is subtracted so that exp cannot overflow
        all_reduce(largest, group, MAX)
        label_logit = upcast.gather(-1, index[:, None])[:, 0] * in_shard
        sums = torch.stack((shard_logsumexp.sub_(largest).exp_(), label_logit))
        all_reduce(sums, group)
        logsumexp, label_logit = sums[0].log_().add_(largest), sums[1]  # over the whole vocabulary
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


def cross_entropy(logits: Tensor, labels: Tensor, z_loss: float = 0.0, vocab_size: int | None = None,
                  group: Group = ALONE) -> Tensor:
    """Return the sum (not the mean) of the tokens' losses in nats. Tokens with the label IGNORED have no loss.

    logits: [..., V/t], of this rank's part of the vocabulary, shard_slice(V, t, rank).
    labels: [...], tokens or IGNORED; RuntimeError for others (param.check_labels).
    vocab_size: V. By default there is one rank, whose logits are all V.
    z_loss: coefficient of the square of logsumexp, which is added to a token's loss so that logits do
    not drift (Chowdhery et al. 2022, section 5).
    """
    vocab_size = logits.shape[-1] if vocab_size is None else vocab_size
    vocab = shard_slice(vocab_size, group.size, group.rank)
    assert logits.shape[-1] == vocab.stop - vocab.start, f"{logits.shape[-1]} logits per token, but {vocab}"
    check_labels(labels, vocab_size)
    return CrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), z_loss, vocab, group)


# ---- asynchronous: rings that hide an exchange under the layer's own matmul -----------------------------------------
# In forward, in a row layer's backward and in a split backward, no other matmul can hide a linear layer's
# exchange. So it is split into steps round a ring of ranks, each under the matmul of one shard.
#
# Where kernels.py runs, torch's operators take these steps: ranks copy each other's shards from symmetric
# memory, which all of them must reach (NVLink). That takes few calls, and no kernels of NCCL, which would
# take SMs from the matmuls.

def all_gather_matmul(x: Tensor, matrix: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Return (gathered x @ matrix, gathered x): x [T/t, H], matrix [H, R/t] -> [T, R/t], [T, H]."""
    n, me = group.size, group.rank
    x = x.contiguous()
    if n > 1 and uses_kernels(x):
        with calling("fused_all_gather_matmul", group, (n - 1) * x.nbytes):
            gathered, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(
                x, [matrix], 0, group.process_group.group_name)
        return product, gathered
    # Before: gather all n shards, then multiply them.
    # Now:    multiply the shard that is here while the next one is being received.
    gathered = x.new_empty(len(x) * n, x.shape[1])
    product = x.new_empty(len(gathered), matrix.shape[1])
    shards, products = gathered.chunk(n), product.chunk(n)
    shards[me].copy_(x)
    for hop in range(n):
        owner = (me - hop) % n  # whose shard is here; next comes the shard of the rank before it
        pending = shift(shards[owner - 1], shards[owner], group) if hop < n - 1 else done(x)
        torch.mm(shards[owner], matrix, out=products[owner])  # while this shard is sent and the next one received
        pending.wait()
    return product, gathered


def matmul_reduce_scatter(x: Tensor, matrix: Tensor, group: Group) -> Tensor:
    """Return this rank's tokens of x @ matrix, summed over ranks: x [T, C/t], matrix [C/t, H] -> [T/t, H]."""
    n, me = group.size, group.rank
    if n > 1 and uses_kernels(x):
        with calling("fused_matmul_reduce_scatter", group, (n - 1) * len(x) // n * matrix.shape[1] * x.itemsize):
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, matrix, "sum", 0, group.process_group.group_name)
    # Before: multiply all n shards of tokens, then sum over ranks.
    # Now:    multiply one shard while the sum of another is being sent. Each sum passes all ranks.
    shards = x.chunk(n)
    total = shards[me - 1] @ matrix  # the sum of rank me-1's shard starts here, and reaches that rank n-1 hops later
    for hop in range(1, n):
        incoming = torch.empty_like(total)
        pending = shift(incoming, total, group)
        total = shards[me - 1 - hop] @ matrix  # while one sum is sent and the next one received
        pending.wait()
        total += incoming
    return total


# ---- demo: python tp.py ---------------------------------------------------------------------------------------------

def demo(group: Group) -> None:
    """Run a pair of matrices in three ways, count what each sends, and compare with whole matrices on one rank."""
    t, H = group.size, 32
    T = 64 // t * t
    A = Spec("A", (4 * H, H), {"tp": 0}, std=0.2)
    B = Spec("B", (H, 4 * H), {"tp": 1}, std=0.2)
    make = partial(parameter, groups={"tp": group}, dtype=torch.float64)
    up, down = ColumnParallelLinear(make, A), RowParallelLinear(make, B)
    for weight in (*up.parameters(), *down.parameters()):
        weight.data = draw(0)(weight.spec, weight.box).double()
    x, dz = torch.randn(2, T, H, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    whole_a, whole_b = (draw(0)(spec, local_box(spec, {})).double() for spec in (A, B))
    whole_x = x.clone().requires_grad_()
    whole_z = torch.tanh(whole_x @ whole_a.t()) @ whole_b.t()
    whole_z.backward(dz)
    expected = torch.stack((whole_z.detach(), whole_x.grad))

    if group.rank == 0:
        print(f"Matrices A {A.shape} and B {B.shape} on t = {t} ranks; T = {T} tokens, H = {H}\n")
    error = torch.zeros((), dtype=torch.float64)
    for title, tp in {"tensor parallelism": TensorParallel(group),
                      "and sequence parallelism": TensorParallel(group, sequence=True),
                      "asynchronous": TensorParallel(group, sequence=True, async_tp=True)}.items():
        sent.clear()
        own = shard_slice(T, t, group.rank) if tp.sequence else slice(T)
        own_x = x[own].clone().requires_grad_()
        z = down(torch.tanh(up(own_x, tp)), tp)
        z.backward(dz[own])
        difference = torch.stack((z.detach(), own_x.grad)) - expected[:, own]
        error = torch.maximum(error, difference.abs().max() / expected.abs().max())
        units = round(sent[group.axis] * t / max(t - 1, 1) / x.nbytes)
        if group.rank == 0:
            print(f"    {title:24s}   {len(own_x)} tokens between pairs   sent: {units} x (t-1)/t of T H")
    all_reduce(error, group, MAX)
    if group.rank == 0:
        print(f"\nZ and dX are what one rank with whole matrices computes. Relative difference: {error:.0e}")


if __name__ == "__main__":
    run_demo(demo, ranks=4)
