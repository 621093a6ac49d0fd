"""Tensor parallelism: weight matrices are sharded over t ranks. Sequence parallelism: so are the tokens between them.

    rank 0    X ─ f ─► S_0 = X A_0^T ─ act ─► Y_0 ──► Y_0 B_0^T ─┐
                                                                 ├─ g ─► Z = Y_0 B_0^T + Y_1 B_1^T
    rank 1    X ─ f ─► S_1 = X A_1^T ─ act ─► Y_1 ──► Y_1 B_1^T ─┘

                                  f forward         f backward           g forward           g backward
    tensor parallelism            -                 all-reduce dX        all-reduce Z        -
    and sequence parallelism      all-gather X      reduce-scatter dX    reduce-scatter Z    all-gather dZ

Two matrices that follow each other are sharded as a pair: S = X A^T, Y = act(S), Z = Y B^T. In the
figure t = 2. A rank has some rows of A and the same columns of B. It computes its part Y_r of the
hidden channels without communication, because act treats channels (or the heads of attention)
independently of each other. Y_r B_r^T is one term of Z, and g sums the terms over the ranks. So a
pair communicates only at its ends, in f and in g.

A is "column parallel", because its rows are columns of A^T; B is "row parallel". A transformer
layer is two pairs: the projections to queries, keys and values with attention's output projection,
and the up and the down projection of the feed-forward layer.

Without sequence parallelism, all ranks have all tokens of X and Z, and each repeats the norms and
residual additions between pairs. With it, a rank has only T/t tokens there. Norms and residuals
need no communication, because they treat tokens independently of each other.

Symbols: t ranks, T tokens of a micro-batch (all its sequences, flattened), H hidden, V vocabulary.

         name    whole     on rank r          tokens on rank r
         A       [R, H]    A_r    [R/t, H]
         B       [H, C]    B_r    [H, C/t]
         X, Z    [T, H]    X, Z   [T, H]      all
         x, z              x, z   [T/t, H]    its own, between pairs
         S       [T, R]    S_r    [T, R/t]    all
         Y       [T, C]    Y_r    [T, C/t]    all

Without sequence parallelism, all ranks have all tokens: read T/t as T. In a feed-forward layer, R
is C, or 2 C with SwiGLU. In attention, R counts the rows of wq, wk and wv together. A rank has at
least one head of wk and wv, which is more than R/t rows if t exceeds the KV heads.

In code, all variables are in lower case. A layer's input is `x`: this is x with sequence
parallelism, and X without it. The real column layer calls X `gathered`.

Saves: A rank stores 1/t of the matrices of each pair (more of wk and wv if t exceeds the KV heads),
       of the embedding and of the head. It also stores 1/t of their gradients and optimizer states,
       and 1/t of the activations inside a pair. With sequence parallelism, the same holds for the
       activations between pairs.
Costs: A layer has two pairs. They make 4 all-reduces of T H elements: 2 in forward and 2 in
       backward. With sequence parallelism, 4 all-gathers and 4 reduce-scatters send as many bytes.
       2 more all-gathers fetch X in backward, and 2 more fetch dZ if backward is split.
       The embedding needs a g, the head an f, and the loss all-reduces 3 numbers per token.
Stops helping when: The ranks are not on one fast network, so every layer waits for communication;
       or R/t and C/t are too small for fast matmuls.

Easily got wrong: With sequence parallelism, norms see different tokens on each rank. The gradients
       of their weights are then terms of a sum over tp ranks (`along={"tp": "partial"}` in
       core/param.py; zero.py computes the sum).

Shoeybi et al. 2019 (f, g); Korthikanti et al. 2022 (sequence parallelism; their g is our f, and
their g bar is our g); Wang et al. 2023 (asynchronous tensor parallelism).
"""
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import _symmetric_memory  # noqa: F401, which defines torch.ops.symm_mem

from core import collectives
from core.collectives import (
    ALONE,
    MAX,
    AllGather__ReduceScatter,
    AllReduce__Identity,
    Group,
    Identity__AllReduce,
    Pending,
    all_reduce,
    calling,
    done,
    gather_rows,
    reduce_rows,
    run_demo,
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
from core.param import IGNORED, Spec, acc_dtype, check_labels, parameter, shard_slice
from operations import uses_kernels
from recompute import is_recomputing

MakeParameter = Callable[[Spec], nn.Parameter]  # makes this rank's shard of a parameter


# ---- the plain version: a pair of linear layers ---------------------------------------------------------------------
# f and g are autograd Functions. The name of a Function has the collective of its forward, then
# "__", then the collective of its backward.
#
# f    All ranks have the same X, and each multiplies it by different rows of A. Autograd on a rank
#      knows only that rank's rows, and computes one term of dX. So the backward of f sums the terms.
# g    Each rank has one term of Z. After g, all ranks have the same Z and compute the same from it.
#      So every rank already has the complete dZ, and the backward of g does nothing.

class PlainColumn(nn.Module):
    """f, then S_r = X A_r^T: [T, H] -> [T, R/t]. a: the whole matrix A [R, H]. This rank keeps its rows, A_r."""
    f = Identity__AllReduce.apply  # bound to its class already, so self.f(x, group) does not pass self

    def __init__(self, a: Tensor, group: Group):
        super().__init__()
        shards = a.tensor_split(group.size, dim=0)
        self.weight = nn.Parameter(shards[group.rank].clone())
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        x = self.f(x, self.group)
        return x @ self.weight.t()


class PlainRow(nn.Module):
    """Y_r B_r^T, then g: [T, C/t] -> [T, H]. b: the whole matrix B [H, C]. This rank keeps its columns, B_r."""
    g = AllReduce__Identity.apply

    def __init__(self, b: Tensor, group: Group):
        super().__init__()
        shards = b.tensor_split(group.size, dim=1)
        self.weight = nn.Parameter(shards[group.rank].clone())
        self.group = group

    def forward(self, y: Tensor) -> Tensor:
        term = y @ self.weight.t()
        return self.g(term, self.group)


# ---- sequence parallelism -------------------------------------------------------------------------------------------
# Only f and g change. An all-reduce is a reduce-scatter followed by an all-gather. Now g does the
# first half, and the f of the next pair does the second half. In between, a rank has T/t tokens.
#
# The other autograd Functions are in core/collectives.py. This one is here because only the plain
# layers use it: the real layers below call its collectives in a backward of their own.

class ReduceScatter__AllGather(Function):
    """Each rank has one term of the sum, and gets the sum of its own rows: [T, ...] -> [T/t, ...]."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduce_rows(x, group).wait()

    @staticmethod
    def backward(ctx, grad):
        return gather_rows(grad, ctx.group).wait(), None


class PlainSequenceColumn(PlainColumn):
    """[T/t, H] -> [T, R/t]."""
    f = AllGather__ReduceScatter.apply


class PlainSequenceRow(PlainRow):
    """[T, C/t] -> [T/t, H]."""
    g = ReduceScatter__AllGather.apply


# ---- the real layers ------------------------------------------------------------------------------------------------
# They compute the same as the plain layers, in other ways.
#
#                   plain layers                     real layers
#     Column saves    X [T, H]                         x [T/t, H]; backward gathers X again
#     collectives     the computation waits for each   Column's backward hides two under its matmuls
#     dA, dB          tensors that autograd adds up    added to gradient buffers: core/gradients.py
#     wq, wk, wv      three layers                     one layer: one gather, one matmul, one dX
#
# So their forward and backward are written by hand. Without hidden collectives, they would read as
# follows. A, B, S and Y are this rank's parts A_r, B_r, S_r and Y_r.
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

class TensorParallel(NamedTuple):
    """The collectives that layers call. Functions take it as `tp`. A Pending is a collective in flight.

    group: by default one rank, which sends nothing.
    sequence: sequence parallelism. Between pairs each rank has T/t contiguous tokens, in rank order.
    async_tp: asynchronous tensor parallelism (the last section). It needs `sequence`, and does not
    work with FP8.
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
        return done(x)  # a Pending that has its result already

    def reduce(self, terms: Tensor) -> Pending:
        """Start g's forward, or f's backward: [T, H] -> [T/t, H], summed over ranks.

        Without sequence parallelism the sum replaces `terms`.
        """
        if self.sequence:
            return reduce_rows(terms, self.group, async_op=True)
        return all_reduce(terms, self.group, async_op=True)

    def gather_with_grad(self, x: Tensor) -> Tensor:
        """The f of the plain layers: [T/t, ...] -> [T, ...].

        It is for tensors that ranks use differently, outside of a Column: latents (mla.py), and the
        input of the fused head.
        """
        if self.sequence:
            return AllGather__ReduceScatter.apply(x, self.group)
        return Identity__AllReduce.apply(x, self.group)


# Weights are inputs of the Functions below, although they get None as their gradient. Autograd runs
# a parameter's post-accumulate-grad hook even then, which tests/test_gradients.py checks. The hook
# tells the weight's bucket (dp.py, zero.py) that its gradient is complete.
#
# Five features each change a line or two of the pseudo-code above.
#
#     mm                  The three products of a layer: `Matmul` below, or in FP8 an fp8.Fp8.
#     tp.async_tp         A collective and a product are one function; see the last section.
#     is_recomputing()    Full recomputation runs a block's forward again, just before its backward.
#                         Column then saves X, and does not gather it again in backward.
#     skip                The last Row of a recomputed block may return zeros. Its result is only added
#                         to the residual stream, so no backward reads it. The caller
#                         (model.FeedForward) passes `skip` in that second forward. Attention's Row
#                         never skips its product, because the norm after it reads the result.
#     is_deferring()      The first half of a split backward (zero-bubble pipelines) computes dx and
#                         dY, and queues dA and dB for the second half.

class Column(Function):
    """f, then S = X A^T: [T/t, H] -> [T, R/t].

    weights: A_r, or the parts that A_r is stacked from, such as wq, wk and wv of this rank's heads.
    defer: False to compute dA in the first half of a split backward, too.
    """

    @staticmethod
    def forward(ctx, x, tp, mm, defer, *weights):
        check_async(tp, mm)
        ctx.tp, ctx.mm, ctx.defer = tp, mm.begin(), defer
        ctx.weights = weights  # not saved: saved_tensors_hooks may return a copy, without the parameter's `sink`
        if tp.async_tp:
            product, gathered = all_gather_matmul(x, stacked_weight(weights).t(), tp.group)
        else:
            gathered = tp.gather(x).wait()
            product = ctx.mm.forward(gathered, weights)
        ctx.saves_gathered = is_recomputing() and not is_deferring()  # a split backward would queue X, which is large
        ctx.save_for_backward(gathered if ctx.saves_gathered else x)
        return product

    # Two collectives of backward run under its two matmuls.
    #
    #     pseudo-code    network    ├─ gather X ─┤               ├─ reduce dX ─┤
    #                    compute                 ├─ dX = dS A ──┤              ├─ dA += dS^T X ─┤
    #
    #     here           network    ├─ gather X ──┤├─ reduce dX ─────┤
    #                    compute    ├─ dX = dS A ─┤├─ dA += dS^T X ──┤

    @staticmethod
    def backward(ctx, ds):
        tp, mm, weights = ctx.tp, ctx.mm, ctx.weights
        x = ctx.saved_tensors[0].detach()  # a queued weight gradient must not keep a graph alive
        ds = mm.prepare_grad(ds)
        gather = done if ctx.saves_gathered else tp.gather
        add_da = start_weight_grad(weights, partial(gather, x), lambda out, gathered: mm.wgrad(out, ds, gathered),
                                   ctx.defer)  # starts to gather X, unless dA is queued
        if tp.async_tp and ctx.defer and is_deferring():  # dA is queued, and cannot hide the reduction
            dx = done(matmul_reduce_scatter(ds, stacked_weight(weights), tp.group))
        else:
            dx = tp.reduce(mm.dgrad(ds, weights))
        add_da()  # waits for X and adds dA; does nothing if dA is queued
        return dx.wait(), None, None, None, *[None] * len(weights)


class Row(Function):
    """Z = Y B^T, then g: [T, C/t] -> [T/t, H].

    Backward waits for dZ, because both of its products depend on dZ. Only asynchronous tensor
    parallelism hides this gather.

    weight: B_r.
    skip: return zeros, for a recomputed block whose backward does not read Z. The caller decides.
    """

    @staticmethod
    def forward(ctx, y, tp, mm, skip, weight):
        check_async(tp, mm)
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
        tp, mm, weights = ctx.tp, ctx.mm, ctx.weights
        y = ctx.saved_tensors[0].detach()
        if tp.async_tp:
            dy, gathered = all_gather_matmul(dz, stacked_weight(weights), tp.group)
        else:
            gathered = mm.prepare_grad(tp.gather(dz).wait())
            dy = mm.dgrad(gathered, weights)
        if is_deferring():  # dZ is too large to be queued: dz is queued, then gathered and prepared again
            start_weight_grad(weights, partial(tp.gather, dz),
                              lambda out, whole: mm.wgrad(out, mm.prepare_grad(whole), y))
        else:  # dZ is gathered already: add at once
            add_to(weights, lambda out: mm.wgrad(out, gathered, y))
        return dy, None, None, None, None


class Matmul:
    """The three products of any linear layer Y = X W^T, where W is all its weights, stacked.

    Here X, W and Y are the input, weight and output of either layer, Column or Row. fp8.Fp8 has the
    same methods, and multiplies in FP8.
    """

    def begin(self) -> "Matmul":
        """Return the object that multiplies in one forward and its backward: this, or in FP8 a copy with its scales."""
        return self

    def forward(self, x: Tensor, weights: Params) -> Tensor:
        """Y = X W^T."""
        return x @ stacked_weight(weights).t()

    def prepare_grad(self, dy: Tensor) -> Any:
        """Return dY as dgrad and wgrad take it.

        In FP8, dY is quantised. Calling this again for the same gradient gives the same scale.
        """
        return dy

    def dgrad(self, dy: Any, weights: Params) -> Tensor:
        """dX = dY W."""
        return dy @ stacked_weight(weights)

    def wgrad(self, out: Tensor, dy: Any, x: Tensor) -> None:
        """out += dY^T X."""
        accumulate_product(out, dy.t(), x)


MATMUL = Matmul()


def check_async(tp: TensorParallel, mm: Matmul) -> None:
    """AssertionError if asynchronous tensor parallelism is asked to do what it cannot."""
    if tp.async_tp:
        assert tp.sequence, "asynchronous tensor parallelism needs sequence parallelism: its rings shard tokens"
        assert mm is MATMUL, "asynchronous tensor parallelism does not multiply in FP8"


class ColumnParallelLinear(nn.Module):
    """[T/t, H] -> [T, R/t]: one or several weights with the same input. Their outputs are concatenated."""
    mm = MATMUL  # train.py may replace it with an fp8.Fp8

    def __init__(self, make: MakeParameter, *specs: Spec, biases: Sequence[Spec] = ()):
        super().__init__()
        self.weights = nn.ParameterList(make(spec) for spec in specs)
        self.biases = nn.ParameterList(make(spec) for spec in biases)

    def forward(self, x: Tensor, tp: TensorParallel) -> Tensor:
        y = Column.apply(x, tp, self.mm, True, *self.weights)
        return y + torch.cat(tuple(self.biases)) if len(self.biases) else y


class RowParallelLinear(nn.Module):
    """[T, C/t] -> [T/t, H]. The bias is whole on each rank, and added after g: in the sum of g's terms it would be
    counted t times."""
    mm = MATMUL  # train.py may replace it with an fp8.Fp8

    def __init__(self, make: MakeParameter, spec: Spec, bias: Spec | None = None):
        super().__init__()
        self.weight = make(spec)
        self.bias = make(bias) if bias else None

    def forward(self, x: Tensor, tp: TensorParallel, skip: bool = False) -> Tensor:
        """skip: see Row."""
        z = Row.apply(x, tp, self.mm, skip, self.weight)
        return z if self.bias is None else z + self.bias


# ---- embedding ------------------------------------------------------------------------------------------------------
# The table [V, H] is sharded by rows, that is by vocabulary. A rank looks up the tokens whose rows
# it has, and takes zeros for the others. One rank has the row of a token, so g sums over ranks.

class VocabParallelEmbedding(nn.Module):
    """Look up the rows of tokens in a table [V/t, H]: [T] -> [T/t, H]. Tokens below 0 are padding, and get zeros."""

    def __init__(self, make: MakeParameter, spec: Spec):
        super().__init__()
        self.table = make(spec)

    def forward(self, tokens: Tensor, tp: TensorParallel) -> Tensor:
        return self.look_up(tokens, tp)

    def look_up(self, tokens: Tensor, tp: TensorParallel) -> Tensor:
        """Return the same as a call of the module, without running its hooks.

        Multi-token prediction (model.py) calls this from another unit of ZeRO, where the hooks of
        this module must not run.
        """
        vocab_size = self.table.spec.shape[0]
        torch._assert_async((tokens < vocab_size).all(), f"a token is not below {vocab_size}")  # see check_labels
        return Embed.apply(tokens, self.table, tp)


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


# ---- head and loss: vocabulary-parallel cross-entropy ---------------------------------------------------------------
# The head is a column parallel layer: each rank computes the logits of its V/t tokens of the
# vocabulary. They are never gathered, so no rank has all V logits of a token. Let l_r be the
# logsumexp of rank r's logits. The loss of a token is then:
#
#     loss = logsumexp - (logit of the label)
#     logsumexp = m + log(sum over r of exp(l_r - m)),    m = max over r of l_r
#
# Three numbers per token are all-reduced: first m, then two sums. The second sum is of the label's
# logit, which is 0 on ranks that do not have the label.

class VocabParallelHead(nn.Module):
    """Return logits [T, V/t] of [T/t, H]. Given labels [T], return the sum of the tokens' losses instead.

    weight: the embedding's table [V/t, H], if the two are tied and this rank has it. By default the
    head makes a table of its own.
    z_loss: see cross_entropy.
    loss_grad: the upstream gradient of the returned sum (default 1). Only the fused kernel needs it
    in forward, because it already computes the gradients there.
    """

    def __init__(self, make: MakeParameter, spec: Spec, weight: nn.Parameter | None = None, z_loss: float = 0.0):
        super().__init__()
        self.weight = make(spec) if weight is None else weight
        self.z_loss = z_loss

    def forward(self, x: Tensor, tp: TensorParallel, labels: Tensor | None = None,
                loss_grad: Tensor | None = None) -> Tensor:
        z_loss = self.z_loss if torch.is_grad_enabled() else 0.0  # an evaluation's loss is the cross-entropy
        vocab_size = self.weight.spec.shape[0]
        if labels is not None and uses_kernels(x):  # this kernel never stores all logits
            from kernels import linear_cross_entropy  # imported here, because only GPUs have Triton
            x = tp.gather_with_grad(x) if tp.size > 1 else x
            return linear_cross_entropy(x, self.weight, labels, z_loss=z_loss, vocab_size=vocab_size, group=tp.group,
                                        loss_grad=loss_grad)
        logits = Column.apply(x, tp, MATMUL, False, self.weight)  # not deferred: dS is as large as all logits
        return logits if labels is None else cross_entropy(logits, labels, z_loss, vocab_size, tp.group)


def cross_entropy(logits: Tensor, labels: Tensor, z_loss: float = 0.0, vocab_size: int | None = None,
                  group: Group = ALONE) -> Tensor:
    """Return the sum (not the mean) of the tokens' losses in nats. Tokens with the label IGNORED have no loss.

    logits: [..., V/t], of this rank's part of the vocabulary, shard_slice(V, t, rank).
    labels: [...], tokens or IGNORED; RuntimeError for others (param.check_labels).
    vocab_size: V. By default there is one rank, whose logits are all V.
    z_loss: coefficient of the square of logsumexp, which is added to a token's loss so that logits
    do not drift (Chowdhery et al. 2022, section 5).
    """
    vocab_size = logits.shape[-1] if vocab_size is None else vocab_size
    vocab = shard_slice(vocab_size, group.size, group.rank)
    assert logits.shape[-1] == vocab.stop - vocab.start, f"{logits.shape[-1]} logits per token, but {vocab}"
    check_labels(labels, vocab_size)
    return CrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), z_loss, vocab, group)


class CrossEntropy(Function):
    """Saves the logits in their own dtype, and a few numbers per token. Backward computes the probabilities again:

        d loss / d logit_v = p_v - (1 if v is the label),    p_v = exp(logit_v - logsumexp)

    The z-loss z logsumexp^2 adds 2 z logsumexp p_v.
    """

    @staticmethod
    def forward(ctx, logits, labels, z_loss, vocab, group):
        upcast = logits.to(acc_dtype(logits.dtype))
        index, in_shard = local_index(labels, vocab)
        shard_logsumexp = upcast.logsumexp(-1)  # l_r
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


# ---- asynchronous tensor parallelism: collectives hidden under the layer's own matmul -------------------------------
# Column's backward hides each collective under a matmul that does not depend on it. Elsewhere there
# is no such matmul: in forward, in Row's backward, and in a split backward. With asynchronous tensor
# parallelism (`async_tp`; --sp async), the collective is split into steps round a ring of ranks.
# Each step moves one shard of tokens, and is hidden under the matmul of another shard. `shift`
# starts a step: it sends to the next rank, and receives from the previous one.
#
# On GPUs, two operators of torch do the same with direct copies between peers in symmetric memory
# (NVLink), not in a ring. No kernels of NCCL take SMs from the matmuls.
#
#     fused_all_gather_matmul        A rank copies each shard from the rank that it belongs to, while
#                                    it multiplies another shard.
#     fused_matmul_reduce_scatter    A rank computes a term for every other rank, which copies it
#                                    while the next term is computed. So each rank collects the t
#                                    terms of its own tokens, and sums them at the end.
#
# They send as many bytes as a ring. `calling` counts the call and the bytes, as core/collectives.py
# does for its own collectives.


# The ring on rank 0 of 3. X[r] are the tokens of rank r.
#
#     collective    network    ├─ gather X ─┤
#                   compute                 ├─ X[0] A^T ─┤├─ X[1] A^T ─┤├─ X[2] A^T ─┤
#
#     ring          network    ├─ get X[2] ─┤├─ get X[1] ─┤
#                   compute    ├─ X[0] A^T ─┤├─ X[2] A^T ─┤├─ X[1] A^T ─┤

def all_gather_matmul(x: Tensor, matrix: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Return (gathered x @ matrix, gathered x): x [T/t, H], matrix [H, R/t] -> [T, R/t], [T, H].

    Column's forward passes x and A^T. Row's backward passes dz and B, [H, C/t].
    """
    n, me = group.size, group.rank  # t, and r of this rank
    x = x.contiguous()
    if n > 1 and uses_kernels(x):
        with calling("fused_all_gather_matmul", group, (n - 1) * x.nbytes):
            gathered, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(
                x, [matrix], 0, group.process_group.group_name)
        return product, gathered
    gathered = x.new_empty(len(x) * n, x.shape[1])
    product = x.new_empty(len(gathered), matrix.shape[1])
    shards, products = gathered.chunk(n), product.chunk(n)
    shards[me].copy_(x)
    for hop in range(n):
        owner = (me - hop) % n  # whose shard is here; next comes the shard of the rank before it
        # shift(incoming, outgoing): fill the first tensor from the previous rank, send the second to the next rank
        pending = shift(shards[owner - 1], shards[owner], group) if hop < n - 1 else done(x)
        torch.mm(shards[owner], matrix, out=products[owner])  # while this shard is sent and the next one received
        pending.wait()
    return product, gathered


# The ring on rank 0 of 3. Y[r] and Z[r] belong to the tokens of rank r. The sum Z[r] is sent round
# the ring. Every rank adds its term Y[r] B^T, and rank r gets the complete sum.
#
#     collective    network                                              ├─ reduce-scatter Z ─┤
#                   compute    ├─ Y[0] B^T ─┤├─ Y[1] B^T ─┤├─ Y[2] B^T ─┤
#
#     ring          network                  ├─ send Z[2], get Z[1] ─┤├─ send Z[1], get Z[0] ─┤
#                   compute    ├─ Y[2] B^T ─┤├─ Y[1] B^T ────────────┤├─ Y[0] B^T ────────────┤

def matmul_reduce_scatter(x: Tensor, matrix: Tensor, group: Group) -> Tensor:
    """Return this rank's tokens of x @ matrix, summed over ranks: x [T, C/t], matrix [C/t, H] -> [T/t, H].

    Row's forward passes Y and B^T. Column's backward, if it is split, passes dS and A, [R/t, H].
    """
    n, me = group.size, group.rank  # t, and r of this rank
    if n > 1 and uses_kernels(x):
        with calling("fused_matmul_reduce_scatter", group, (n - 1) * len(x) // n * matrix.shape[1] * x.itemsize):
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, matrix, "sum", 0, group.process_group.group_name)
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
    """Run a pair of matrices in five ways, count the elements that each sends, and compare with one rank."""
    t, H = group.size, 32
    T, C = 64 // t * t, 4 * H // t * t
    generator = torch.Generator().manual_seed(0)
    a, b, x, dz = (torch.randn(shape, dtype=torch.float64, generator=generator) / 4
                   for shape in ((C, H), (H, C), (T, H), (T, H)))

    make = partial(parameter, groups={"tp": group}, dtype=torch.float64)
    up = ColumnParallelLinear(make, Spec("A", a.shape, {"tp": 0}))
    down = RowParallelLinear(make, Spec("B", b.shape, {"tp": 1}))
    up.weights[0].data = a[up.weights[0].box]  # box: the rows and columns that this rank has
    down.weight.data = b[down.weight.box]
    ways: dict[str, tuple[Callable, Callable, bool]] = {  # column layer, row layer, whether tokens are sharded
        "plain layers": (PlainColumn(a, group), PlainRow(b, group), False),
        "plain, sequence parallel": (PlainSequenceColumn(a, group), PlainSequenceRow(b, group), True)}
    for title, tp in {"tensor parallel": TensorParallel(group),
                      "and sequence parallel": TensorParallel(group, sequence=True),
                      "asynchronous": TensorParallel(group, sequence=True, async_tp=True)}.items():
        ways[title] = partial(up, tp=tp), partial(down, tp=tp), tp.sequence

    whole_x = x.clone().requires_grad_()
    whole_z = torch.tanh(whole_x @ a.t()) @ b.t()
    whole_z.backward(dz)
    expected = torch.stack((whole_z.detach(), whole_x.grad))

    if group.rank == 0:
        print(f"t = {t} ranks, T = {T} tokens, H = {H}. A is {list(a.shape)}, and a rank has "
              f"{list(up.weights[0].shape)}.\nB is {list(b.shape)}, and a rank has {list(down.weight.shape)}.\n")
    error = torch.zeros((), dtype=torch.float64)
    for title, (column, row, is_sharded) in ways.items():
        collectives.sent.clear()
        own = shard_slice(T, t, group.rank) if is_sharded else slice(T)
        own_x = x[own].clone().requires_grad_()
        z = row(torch.tanh(column(own_x)))
        z.backward(dz[own])
        difference = torch.stack((z.detach(), own_x.grad)) - expected[:, own]
        error = torch.maximum(error, difference.abs().max() / expected.abs().max())
        units = round(collectives.sent[group.axis] * t / max(t - 1, 1) / x.nbytes)
        if group.rank == 0:
            print(f"    {title:24s}   {len(own_x)} tokens between pairs   sent: {units} x (t-1)/t x T H elements")
    all_reduce(error, group, MAX)
    if group.rank == 0:
        if t > 1:
            print("\nSequence parallelism keeps 1/t of the tokens between pairs, and the plain layers send as much\n"
                  "as before. With it, the real layers send more: they save 1/t of X for backward, and gather\n"
                  "it again.")
        print(f"\nOne rank with whole matrices computes the same Z and dX. Relative difference: {error:.0e}")


if __name__ == "__main__":
    run_demo(demo, ranks=4)
