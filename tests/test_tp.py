"""Tensor parallelism: layers against dense ones, the order of events, what is sent, and what no rank ever computes."""
import math
import re
import weakref
from collections import Counter
from functools import partial
from itertools import chain
from types import SimpleNamespace
from unittest.mock import patch

import grids
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exact import Broken
from grids import LATENT, for_each
from pool import slow
from torch.autograd.graph import get_gradient_edge
from torch.distributed import _symmetric_memory as symmetric_memory
from watch import Watch, in_order, waits

import cp
import ep
import fp8
import kernels
import tp
from core import collectives, gradients, rules
from core.collectives import ALONE
from core.config import FP8_RECIPES
from core.param import Spec, parameter, shard_slice
from plan.costs import LayerOptions, copies_per_token, llama_layer, recomputed_flops
from plan.memory import activation_bytes
from recompute import Recompute
from run.meter import Meter
from test_dryrun import measured_on
from tp import IGNORED, MATMUL, Column, Row, TensorParallel

SHAPE = "--layers 2 --hidden 48 --heads 8 --kv-heads 4 --head-dim 6 --ffn 40 --seq-len 24 --global-batch 2 --dtype fp64"


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def weight(values: torch.Tensor) -> torch.nn.Parameter:
    """One that has no bucket."""
    made = torch.nn.Parameter(values)
    made.sink, made.generation = None, 0
    return made


def own_tokens(how: TensorParallel, T: int) -> slice:
    """Those that this rank has between layers."""
    return shard_slice(T, how.size, how.group.rank) if how.sequence else slice(None)


# ---- layers ---------------------------------------------------------------------------------------------------------

class PairOfLayers:
    """A column parallel layer of two matrices, [a; b], and a row parallel one, c, on all ranks: this rank's parts, and
    whole. dtype fp64."""

    def __init__(self, T: int, H: int, a: int, b: int):
        self.group = group = grids.everyone()
        self.x, self.up = normal(T, H, seed=1), normal(T, H, seed=2)
        self.ab, self.c = normal(a + b, H, seed=3), normal(H, a + b, seed=4)
        # The rank's rows of a and of b, side by side, meet the same columns of c.
        rows = [part.view(group.size, -1)[group.rank] for part in torch.arange(a + b).split((a, b))]
        self.columns = torch.cat(rows)
        self.mine = [*(weight(self.ab[part]) for part in rows), weight(self.c[:, self.columns])]

    def run(self, how: TensorParallel, mm: tp.Matmul, mode: str, split: bool = False) -> list[torch.Tensor]:
        """y, dx, dc and d[a; b] of this rank. split: the backward, in two halves. mode: of recomputation."""
        a, b, c = self.mine
        a.grad = b.grad = c.grad = None
        part = own_tokens(how, len(self.x))
        drop, mine = Recompute(mode).drop, self.x[part].clone().requires_grad_()
        h = torch.tanh(mine)
        ab = Column.apply(h, how, mm, True, a, b)
        drop(h, ab, torch.tanh, mine)
        hidden = torch.tanh(ab)
        y = Row.apply(hidden, how, mm, False, c)
        drop(hidden, y, torch.tanh, ab)
        if split:
            gradients.backward_input((0, 0), y, self.up[part])
            gradients.backward_weight((0, 0))
        else:
            y.backward(self.up[part])
        return [y, mine.grad, c.grad, torch.cat((a.grad, b.grad))]

    def part(self, how: TensorParallel, y, dx, dc, dab) -> list[torch.Tensor]:
        """Of the results of all ranks that of this one."""
        part = own_tokens(how, len(self.x))
        return [y[part], dx[part], dc[:, self.columns], dab[self.columns]]


def pair() -> dict[tuple, list[float]]:
    """The largest relative errors of a column and row parallel pair against the dense computation, for each way."""
    layers = PairOfLayers(24, 10, 48, 24)
    x, ab, c = (whole.clone().requires_grad_() for whole in (layers.x, layers.ab, layers.c))
    y = torch.tanh(torch.tanh(x) @ ab.T) @ c.T
    y.backward(layers.up)
    errors = {}
    for sequence, async_tp in [(False, False), (True, False), (True, True)][:3 if layers.group.size > 1 else 1]:
        how = TensorParallel(layers.group, sequence, async_tp)
        wanted = layers.part(how, y, x.grad, c.grad, ab.grad)
        errors |= {(sequence, async_tp, mode): [((got - want).abs().max() / want.abs().max()).item()
                                                for got, want in zip(layers.run(how, MATMUL, mode), wanted)]
                   for mode in ("none", "selective")}
    return errors


@pytest.mark.parametrize("n", [1, 2, 3, *slow(4, 8)])
def test_a_pair_of_matrices_equals_the_dense_one(pool, n):
    for errors in pool.run(n, pair):
        assert max(map(max, errors.values())) < 1e-13, errors


def test_asynchronous_layers_refuse_whole_tokens_and_fp8():
    x, matrix = torch.ones(4, 4), weight(torch.ones(4, 4))
    eight_bits = fp8.Fp8(FP8_RECIPES["tensorwise"], torch.float32)
    layers = {"column": lambda how, mm: Column.apply(x, how, mm, True, matrix),
              "row": lambda how, mm: Row.apply(x, how, mm, False, matrix)}
    for name, layer in layers.items():
        assert torch.equal(layer(TensorParallel(sequence=True, async_tp=True), MATMUL), 4 * x), name
        with pytest.raises(AssertionError, match="needs sequence parallelism"):
            layer(TensorParallel(async_tp=True), MATMUL)
        with pytest.raises(AssertionError, match="does not multiply in FP8"):
            layer(TensorParallel(sequence=True, async_tp=True), eight_bits)


def trained(column: str, row: str) -> tuple[float, list[torch.Tensor]]:
    """A two-layer MLP of the file's plain layers after three steps of AdamW: the last loss, and this rank's weights."""
    group, T = grids.everyone(), 24
    up = getattr(tp, column)(normal(15, 10, seed=1), group)
    down = getattr(tp, row)(normal(10, 15, seed=2), group)
    is_sharded = column == "PlainSequenceColumn"
    part = shard_slice(T, group.size, group.rank) if is_sharded else slice(None)
    x, wanted = normal(T, 10, seed=3)[part], normal(T, 10, seed=4)[part]
    optimizer = torch.optim.AdamW([*up.parameters(), *down.parameters()], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = (down(torch.tanh(up(x))) - wanted).square().sum()
        loss.backward()
        optimizer.step()
    total = collectives.sum_over_ranks(loss.detach(), group) if is_sharded else loss.detach()
    return total.item(), [up.weight.detach(), down.weight.detach()]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("column, row", [("PlainColumn", "PlainRow"), ("PlainSequenceColumn", "PlainSequenceRow")])
def test_an_mlp_of_plain_layers_trains_as_in_one_process(pool, n, column, row):
    """Torch's own linear layers, AdamW and loss are the reference. 15 hidden channels: uneven shards on 2 ranks."""
    a, b = (torch.nn.Parameter(normal(*shape, seed=seed)) for shape, seed in (((15, 10), 1), ((10, 15), 2)))
    optimizer = torch.optim.AdamW([a, b], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        want = (F.linear(torch.tanh(F.linear(normal(24, 10, seed=3), a)), b) - normal(24, 10, seed=4)).square().sum()
        want.backward()
        optimizer.step()
    results = pool.run(n, trained, column=column, row=row)
    for loss, _ in results:
        assert loss == pytest.approx(want.item(), rel=1e-12)
    shards = zip(*(weights for _, weights in results))
    for dim, whole, parts in zip((0, 1), (a, b), shards, strict=True):
        assert {part.shape[dim] for part in parts} == ({7, 8} if n == 2 else {15 // n})
        assert (torch.cat(parts, dim) - whole).abs().max() < 1e-12 * whole.abs().max()


def plain_gradients(column: str, row: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Z of two pairs of plain layers one after the other, and the gradient of their input."""
    group, T = grids.everyone(), 24
    layers = [getattr(tp, name)(normal(*shape, seed=seed), group)
              for seed, (name, shape) in enumerate(2 * [(column, (12, 10)), (row, (10, 12))])]
    part = shard_slice(T, group.size, group.rank) if column == "PlainSequenceColumn" else slice(None)
    x = normal(T, 10, seed=9)[part].requires_grad_()
    z = x
    for up, down in zip(layers[::2], layers[1::2]):
        z = z + down(torch.tanh(up(torch.tanh(z))))
    z.square().sum().backward()
    return z.detach(), x.grad


@pytest.mark.parametrize("column, row", [("PlainColumn", "PlainRow"), ("PlainSequenceColumn", "PlainSequenceRow")])
def test_plain_pairs_pass_complete_gradients_on(pool, column, row):
    a, b, c, d = (normal(*shape, seed=seed) for seed, shape in enumerate(2 * [(12, 10), (10, 12)]))
    x = normal(24, 10, seed=9).requires_grad_()
    y = x + torch.tanh(torch.tanh(x) @ a.t()) @ b.t()
    z = y + torch.tanh(torch.tanh(y) @ c.t()) @ d.t()
    z.square().sum().backward()
    for rank, found in enumerate(pool.run(3, plain_gradients, column=column, row=row)):
        part = shard_slice(24, 3, rank) if column == "PlainSequenceColumn" else slice(None)
        for got, want in zip(found, (z, x.grad), strict=True):
            assert (got - want[part]).abs().max() < 1e-12 * want.abs().max()


def rounded(sequence: bool) -> list[float]:
    """How many elements of the results of a column and a row parallel layer in bf16, and of their inputs' gradients,
    are those of products in fp64 that each rank rounds once."""
    group, T, H, C = grids.everyone(), 32, 512, 1024
    how = TensorParallel(group, sequence)
    a, b = (weight(normal(*shape, seed=group.rank).bfloat16()) for shape in ((C, H), (H, C)))
    part = own_tokens(how, T)
    x, up = normal(T, H, seed=3).bfloat16(), normal(T, H, seed=4).bfloat16()
    mine = x[part].clone().requires_grad_()
    hidden = Column.apply(mine, how, MATMUL, True, a)
    y = Row.apply(hidden, how, MATMUL, False, b)
    d_hidden, dx = torch.autograd.grad(y, (hidden, mine), up[part])

    def exact(left, right, summed=False):
        product = (left.double() @ right.double()).bfloat16()
        if summed:
            collectives.all_reduce(product, group)
        return product[part] if summed else product

    pairs = [(hidden, exact(x, a.t())), (y, exact(hidden, b.t(), True)), (d_hidden, exact(up, b)),
             (dx, exact(d_hidden, a, True))]
    return [(got == want).double().mean().item() for got, want in pairs]


@pytest.mark.parametrize("n, sequence", [(1, False), (2, True), (2, False)])
def test_products_in_bf16_are_rounded_once(pool, n, sequence):
    """Apart from those that fp32 sums put on the other side of a tie."""
    for shares in pool.run(n, rounded, sequence=sequence):
        assert min(shares) > 0.99, shares


@pytest.mark.parametrize("layer", ["column", "row", "experts", *FP8_RECIPES])
def test_a_queued_weight_gradient_keeps_no_graph_alive(layer):
    """Nor what is in it, until the second half of a split backward."""
    matrix, alone = weight(normal(2, 8, 128) if layer == "experts" else normal(128, 128)), TensorParallel()
    route = SimpleNamespace(rows_per_expert=[1, 3], group=ALONE)
    mm = fp8.Fp8(FP8_RECIPES[layer], torch.float64) if layer in FP8_RECIPES else MATMUL
    run = {"row": lambda x: Row.apply(x, alone, mm, False, matrix),
           "experts": lambda x: ep.GroupedLinear.apply(x, matrix, ep.GroupedMatmul(), route, False)}.get(
               layer, lambda x: Column.apply(x, alone, mm, True, matrix))
    x = normal(4, 128).requires_grad_().clone()
    x.grad_fn.metadata["token"] = token = set()  # as long as there is a graph
    alive, result = weakref.ref(token), [run(x).sum()]
    del token, x
    assert alive() is not None
    gradients.backward_input((0, 0), result.pop(), None)
    assert alive() is None and matrix.grad is None
    gradients.backward_weight((0, 0))
    assert matrix.grad.abs().sum() > 0


def test_only_matrices_of_blocks_wait_for_the_second_half_of_a_split_backward():
    """What tables, routers, norms and biases would keep until then is larger than their gradients."""
    settings = rules.parse(f"{SHAPE} --qk-norm --qkv-bias --experts 4 --expert-ffn 12 --shared-experts 1 "
                            f"--dense-layers 1 --vocab 61 --data {__file__}".split())
    _, model, _, optimizer = grids.build(settings)
    optimizer.begin_step(1)
    tokens = torch.arange(48).view(2, 24)
    gradients.backward_input((0, 0), model(tokens, labels=tokens), None)
    waiting = {weight.spec.name for queued in gradients._queue[0, 0] for weight in queued.params}
    gradients.backward_weight((0, 0))
    want = {weight.spec.name for weight in model.parameters() if weight.ndim > 1}
    assert waiting == want - {"embedding", "head", "layers.1.router"} and len(waiting) == (
        2 * 4 + 3 + 2 + 3)  # attention of two layers, a dense layer, experts, a shared expert


@pytest.mark.parametrize("t, schedule, rank", [(8, "zb-v", 8), *slow((8, "zb1p", 0), (2, "zb-h1", 0), (4, "zb-v", 4))])
def test_hidden_gathers_of_weight_gradients_raise_the_peak_by_one_gathered_tensor_at_most(
        monkeypatch, t, schedule, rank):
    """Over what is alive if each gather begins when its turn comes."""
    def peaks_of_weight_gradients() -> list[int]:
        found = measured_on("--layers 4 --hidden 256 --heads 8 --ffn 896 --vocab 64 --seq-len 256 --global-batch 4 "
                            f"--micro-batch 1 --dtype fp32 --tp {t} --pp 2 --schedule {schedule}", 2 * t, rank)
        return [peak for action, peak in found.peak_of_action if action.op == "W"]

    hidden, gather = peaks_of_weight_gradients(), TensorParallel.gather
    monkeypatch.setattr(TensorParallel, "gather", lambda tp, x: SimpleNamespace(wait=lambda: gather(tp, x).wait()))
    rises = [peak - later for peak, later in zip(hidden, peaks_of_weight_gradients(), strict=True)]
    assert rises and 0 <= min(rises) and max(rises) <= 256 * 256 * 4


# ---- the order of events --------------------------------------------------------------------------------------------

NAMES = {"mm": "matmul", "addmm_": "matmul+add", "_allgather_base_": "gather…", "_reduce_scatter_base_": "scatter…",
         "send": "shift…", "allreduce_": "agree"}


def traced(run, *args) -> tuple[str, object]:
    """What run(*args) does, in order, and returns: "gather…" is started, "…done" has been waited for."""
    with in_order(waits("…done")) as events, Watch(
            lambda function, *_: events.append(NAMES.get(function.overloadpacket.__name__))):
        result = run(*args)
    return " ".join(filter(None, events)), result


def order_of_layers(kind: str, pairs: int = 1) -> list[str]:
    """What pairs of a column and a row parallel layer do: forward, the whole backward, and a backward in two halves.
    kind: "plain", "async", "full" for recomputed pairs, or a recipe of FP8, of which ranks have agreed on the weights'
    scales already."""
    group, H, recompute = grids.everyone(), 128, Recompute(kind)
    how = TensorParallel(group, sequence=True, async_tp=kind == "async")
    mm = fp8.Fp8(FP8_RECIPES[kind], torch.float32, (group,), (group,)) if kind in FP8_RECIPES else MATMUL
    ups, downs = ([weight(torch.randn(shape)) for _ in range(pairs)] for shape in ((2 * H, H), (H, 2 * H)))
    for matrix in (*ups, *downs) if mm is not MATMUL else ():
        mm.quantise_weight((matrix,))
    x = torch.randn(8, H, requires_grad=True)

    def forward():
        y = x
        for up, down in zip(ups, downs):
            y = recompute(lambda y, up=up, down=down: Row.apply(
                torch.tanh(Column.apply(y, how, mm, True, up)), how, mm, False, down), y)
        return get_gradient_edge(y.sum())

    first, edge = traced(forward)
    return [first, traced(torch.autograd.backward, edge)[0],
            traced(gradients.backward_input, (0, 0), forward(), None)[0], traced(gradients.backward_weight, (0, 0))[0]]


def test_in_the_column_layers_backward_a_matmul_lies_between_each_start_and_its_wait(pool):
    """As in the timeline above Column.backward. The weights' half runs later, and hides each gather but the first."""
    forward = "gather… …done matmul matmul scatter… …done"  # column, row
    backward = "gather… …done matmul matmul+add gather… matmul scatter… …done matmul+add …done"  # row, column
    for found in pool.run(2, order_of_layers, kind="plain", pairs=2):
        assert found == [
            f"{forward} {forward}", f"{backward} {backward}", f"{forward} {forward}",
            "gather… " + 3 * "gather… …done matmul+add " + "…done matmul+add"]


def test_a_split_backward_of_a_recomputed_pair_gathers_the_output_gradient_twice(pool):
    """For the inputs dZ, and X, which is recomputed; then both once more."""
    for *_, inputs, weights in pool.run(2, order_of_layers, kind="full"):
        assert (inputs.count("gather"), weights.count("gather")) == (2, 2)


@pytest.mark.parametrize("n", [2, 3])
def test_every_hop_of_the_ring_hides_under_the_matmul_of_a_shard(pool, n):
    """Of a gather before the last shard's matmul, of a reduction after the first one's; in a split backward, too, where
    no weight gradient hides the reduction of dX."""
    hops = (n - 1) * "shift… matmul …done "
    gather_matmul, matmul_reduce = hops + "matmul", ("matmul " + hops).strip()
    for found in pool.run(n, order_of_layers, kind="async"):
        assert found == [
            f"{gather_matmul} {matmul_reduce}",
            f"{gather_matmul} matmul+add gather… matmul scatter… …done matmul+add …done",
            f"{gather_matmul} {matmul_reduce}", "gather… gather… …done matmul+add …done matmul+add"]


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_fp8_hides_the_same_exchanges(pool, recipe):
    """With one scale per tensor, ranks agree on those of X and dY before exchanges begin, and not again while one is
    hidden, behind which they would wait."""
    agree = "" if FP8_RECIPES[recipe].blocks else "agree "
    for found in pool.run(2, order_of_layers, kind=recipe):
        assert found == [
            f"gather… …done {agree}matmul {agree}matmul scatter… …done",
            f"gather… …done {agree}matmul matmul {agree}gather… matmul scatter… …done matmul …done",
            f"gather… …done {agree}matmul {agree}matmul scatter… …done",
            "gather… gather… …done matmul …done matmul"]


# ---- the vocabulary -------------------------------------------------------------------------------------------------

def dense_loss(logits: torch.Tensor, labels: torch.Tensor, z: float) -> torch.Tensor:
    loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss + z * logits[labels >= 0].logsumexp(-1).square().sum()


def losses(vocab: int, scale: float, z: float) -> list[float]:
    """Errors of the vocabulary parallel loss and its gradient, of logits of this scale, and the loss of no label."""
    group, T = grids.everyone(), 40
    logits = normal(2, T, vocab) * scale
    labels = torch.randint(vocab, (2, T), generator=torch.Generator().manual_seed(3))
    shards = [shard_slice(vocab, group.size, i) for i in range(group.size)]
    edges = torch.tensor([place for part in shards for place in (part.start, part.stop - 1)])
    labels[0, :len(edges)], labels[1, ::3], shard = edges, IGNORED, shards[group.rank]
    mine, dense = logits[..., shard].clone().requires_grad_(), logits.requires_grad_()
    loss, want = tp.cross_entropy(mine, labels, z, vocab, group), dense_loss(dense, labels, z)
    (3 * loss).backward()
    (3 * want).backward()
    error = (mine.grad - dense.grad[..., shard]).abs().max() / dense.grad.abs().max()
    nothing = tp.cross_entropy(mine, torch.full_like(labels, IGNORED), z, vocab, group)
    return [abs(loss.item() / want.item() - 1), error.item(), nothing.item()]


def test_logits_are_saved_in_their_own_dtype():
    saved, logits = [], normal(4, 8).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        tp.cross_entropy(logits, torch.arange(4)).backward()
    assert [x.dtype for x in saved if x.shape == logits.shape] == [torch.bfloat16]


@pytest.mark.parametrize("n", [1, 2, 3, *slow(4, 8)])
def test_the_loss_and_its_gradient_equal_the_dense_ones(pool, n):
    cases = [dict(vocab=vocab, scale=scale, z=z) for vocab in (97, 257) for scale in (1.0, 1e4) for z in (0.0, 0.01)]
    for errors in chain(*for_each(pool, n, losses, cases)):
        assert max(errors) < 1e-12, errors


def fused_head(sequence: bool, without: int, x: torch.Tensor, table: torch.Tensor, labels: torch.Tensor) -> tuple:
    """Loss in training and in evaluation, dx and dW of this rank's part of a head by the kernel, which does not run on
    rank `without`."""
    group = grids.everyone()
    how = TensorParallel(group, sequence)
    kernel = Broken("cross_entropy_kernel") if group.rank == without else kernels.cross_entropy_kernel
    head = tp.VocabParallelHead(partial(parameter, groups={"tp": group}, dtype=torch.float32),
                                Spec("head", table.shape, {"tp": 0}), z_loss=0.1)
    head.weight.data, x = table[head.weight.box].float(), x[own_tokens(how, len(x))].float().requires_grad_()
    with (patch.object(tp, "uses_kernels", lambda x: True), patch.object(kernels, "failed", {}),
          patch.object(kernels, "cross_entropy_kernel", kernel),
          patch.dict(kernels.linear_cross_entropy.__kwdefaults__, chunk=4)):  # so there are three chunks of tokens
        loss = head(x, how, labels, torch.tensor(3.0))
        (3 * loss).backward()
        with torch.no_grad():
            return loss.detach(), head(x, how, labels), x.grad, head.weight.grad


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels need tensors on the GPU")
@pytest.mark.parametrize("sequence, without", [(False, -1), (True, -1), (True, 1)])
def test_a_fused_head_on_ranks_equals_the_dense_one(pool, sequence, without):
    """The vocabulary in uneven parts; also where the kernel of one rank does not run."""
    given = dict(x=normal(10, 8, seed=2), table=normal(37, 8, seed=1), labels=torch.arange(10) * 3)
    given["labels"][4] = IGNORED
    results = pool.run(2, fused_head, sequence=sequence, without=without, **given)
    losses, evaluated, dx, dw = zip(*results)
    x, table = given["x"].requires_grad_(), given["table"].requires_grad_()
    loss, plain = (dense_loss(x @ table.t(), given["labels"], z) for z in (0.1, 0))
    wanted = torch.autograd.grad(3 * loss, [x, table])
    assert losses == pytest.approx(2 * (loss.item(),), rel=1e-5)
    assert evaluated == pytest.approx(2 * (plain.item(),), rel=1e-5)
    for whole, want in zip([torch.cat(dx) if sequence else torch.stack(dx), torch.cat(dw)], wanted):
        assert (whole - want).abs().max() < 1e-5 * want.abs().max()


def answers(vocab: int, ids: list[int]) -> dict[str, str]:
    """What every loss says to these labels, and the embedding to these tokens; "" if it returns finite numbers."""
    group, x = grids.everyone(), normal(len(ids), 8).float()
    how, make = TensorParallel(group), partial(parameter, groups={"tp": group}, dtype=torch.float32)
    head, embedding = (layer(make, Spec("table", (vocab, 8), {"tp": 0}))
                       for layer in (tp.VocabParallelHead, tp.VocabParallelEmbedding))
    head.weight.data = embedding.table.data = table = normal(vocab, 8)[head.weight.box].float()

    def fused_head(labels: torch.Tensor) -> torch.Tensor:
        with patch.object(tp, "uses_kernels", lambda x: True):
            return head(x, how, labels)

    ways = {"cross_entropy": lambda labels: tp.cross_entropy(x @ table.t(), labels, 0.0, vocab, group),
            "linear_cross_entropy": lambda labels: kernels.linear_cross_entropy(
                x, head.weight, labels, vocab_size=vocab, group=group),
            "head": lambda labels: head(x, how, labels), "fused head": fused_head,
            "embedding": lambda tokens: embedding(tokens, how)}
    said = {}
    for name, way in ways.items():
        try:
            assert way(torch.tensor(ids)).isfinite().all()
            said[name] = ""
        except RuntimeError as error:
            said[name] = str(error)
    return said


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels need tensors on the GPU, and fail there")
@pytest.mark.parametrize("n", [1, 2])
def test_labels_and_tokens_outside_of_the_vocabulary_are_refused(pool, n):
    """Whatever torch refuses. Tokens below 0 are padding."""
    bad = [-101, -99, -1, 37, 38]
    for label in bad:
        with pytest.raises(IndexError):
            F.cross_entropy(torch.zeros(1, 37), torch.tensor([label]))
    good, *others = for_each(pool, n, answers, [
        dict(vocab=37, ids=ids) for ids in ([0, 18, 19, IGNORED, 36], *([1, label, 36] for label in bad))])
    for said in good:
        assert len(said) == 5 and set(said.values()) == {""}
    for label, of_ranks in zip(bad, others, strict=True):
        for said in of_ranks:
            tokens = said.pop("embedding")
            assert tokens == ("" if label < 0 else "a token is not below 37")
            assert set(said.values()) == {"a label is neither in 0..36 nor -100 (no loss)"}


# ---- in the model ---------------------------------------------------------------------------------------------------

def step(flags: str) -> dict:
    """What one forward and backward of a model sends, makes and keeps on this rank, and its gradients."""
    settings = rules.parse(f"{SHAPE} --data {__file__} {flags}".split(), dist.get_world_size())
    groups, model, _, optimizer = grids.build(settings)
    tokens = torch.randint(settings.model.vocab, (2, 24), generator=torch.Generator().manual_seed(0))
    tokens, labels, positions, _ = cp.shard_sequences(tokens, tokens, None, None, settings.grid.cp, groups["cp"].rank)
    longest, exchange = 0, ep.exchange_counts

    def counted(*args):
        splits = exchange(*args)
        copies.append(sum(splits[0]))
        return splits

    def see(function, args, kwargs, out):
        nonlocal longest
        if isinstance(out, torch.Tensor) and out.ndim > 1:
            longest = max(longest, *out.shape)

    for _ in range(2):  # the first makes what stays
        optimizer.begin_step(1)
        meter = Meter()
        for bucket in optimizer.buckets:
            meter.label("state", bucket.weights, bucket.grad, *bucket.state.values())
        meter.label("other", *model.angles_in_sequence(tokens.shape[1], tokens.device))  # the formula has them
        if arena := model.recompute.arena:
            meter.label("arena", arena.shards, arena.whole)
        copies = []
        with meter, Watch(see), patch.object(ep, "exchange_counts", counted):
            ahead = dict(next_tokens=tokens, next_labels=labels) if settings.model.mtp else {}
            loss = model(tokens, positions, labels=labels, aux_loss_scale=0.5, **ahead)
            saved = meter.settled()
            loss.sum().backward()
        optimizer.finish_step()
    return dict(
        calls=meter.collectives, flops=meter.flops, longest=longest,
        saved=saved["other"] + saved["arena"] - loss.nbytes, copies=sum(copies),
        grads=[bucket.grad.clone() for bucket in optimizer.buckets], formula=activation_bytes(settings, 8))


GATHERS, SCATTERS, SUMS = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"
EXPERTS = "--experts 4 --expert-ffn 24"
LAYER = {  # how often a layer sends all activations
    "--sp off": {SUMS: 4},
    # Sent of an all-reduce is 2 (n-1)/n, of a gather or scatter (n-1)/n: the same but for the two that save memory.
    **dict.fromkeys(("--recompute none", "--recompute selective"), {GATHERS: 4 + 2, SCATTERS: 4}),
    # A layer that runs again repeats neither its last sum nor, just before it is needed, a gather.
    "--recompute full": {GATHERS: 4 + 2, SCATTERS: 4 + 1},
    # Shared inputs: the sum after attention is repeated, and the input gathered (flat, hence not counted here).
    "--recompute full --sp off": {SUMS: 4 + 1},
    # Experts without sequence parallelism: ranks route shards of the tokens. An all-reduce merges the results, and one
    # in backward their gradients. With it, tokens are sharded anyway. A shared expert is a pair, as a feed-forward is.
    **{f"{EXPERTS} --sp off{shared} --recompute {mode}": {SUMS: sums + repeated}
       for shared, sums in (("", 4), (" --shared-experts 1", 6)) for mode, repeated in (("none", 0), ("full", 1))},
    EXPERTS: {GATHERS: 2 + 1, SCATTERS: 2}, f"{EXPERTS} --recompute full": {GATHERS: 2 + 1, SCATTERS: 2 + 1}}


def test_a_layer_sends_what_the_papers_say(pool):
    """Whatever is in a step of three layers, but not in one of two."""
    def sent(step: dict) -> Counter:
        return Counter((call.name, call.bytes) for call in step["calls"] if len(call.shape) == 2 and call.shape[0] > 2)

    found = for_each(pool, 2, step, [
        dict(flags=f"--tp 2 {flags} --layers {layers}") for flags in LAYER for layers in (2, 3)])
    for calls, *steps in zip(LAYER.values(), found[::2], found[1::2]):
        for two, three in zip(*steps):
            assert sent(three) - sent(two) == {(name, 2 * 24 * 48 * 8): count for name, count in calls.items()}  # T H


@pytest.mark.parametrize("n, flags", [(2, ""), (2, "--tied --sp off"), (4, "--kv-heads 2 --sp async")])
def test_no_rank_sees_a_row_of_logits(pool, n, flags):
    for i, seen in enumerate(pool.run(n, step, flags=f"--tp {n} --layers 1 --vocab 4001 {flags}")):
        part = shard_slice(4001, n, i)
        assert seen["longest"] == part.stop - part.start  # of any dimension of any tensor


MODES = "none", "selective", "full"


def steps(pool, n: int, flags: str) -> list[tuple]:
    """In every mode of recomputation a step of every rank."""
    return for_each(pool, n, step, [dict(flags=f"{flags} --recompute {mode}") for mode in MODES])


KEPT = ["--tp 1", "--mtp", "--tp 2 --qkv-bias", f"--tp 2 {LATENT}", "--tp 2 --kv-heads 1 --qk-norm --sp off",
        f"--tp 2 {LATENT} --q-lora-rank 0 --v-head-dim 10 --sp off",
        "--cp 2", "--cp 2 --tp 2 --cp-style ring", f"--cp 2 {LATENT}",
        "--tp 2 --out-bias --ffn-bias --no-rope-every 2", "--cp 2 --cp-style ulysses",
        "--cp 2 --cp-style ulysses --attention math", "--tp 1 --attention math"]
RARELY = ["--qk-norm", "--tp 2 --mtp", LATENT, "--tp 4 --kv-heads 2", "--tp 8 --kv-heads 2", "--cp 2 --cp-style ring",
          "--cp 4 --cp-style ring", "--cp 4 --cp-style ring --cp-ulysses 2", "--cp 4 --kv-heads 2 --cp-style ulysses"]


@pytest.mark.parametrize("flags", [*KEPT, *slow(*RARELY, *(
    f"{flags} --attention math" for flags in KEPT[1:-2] + RARELY if "ulysses" not in flags))])
def test_a_rank_keeps_what_the_formula_says_and_recomputation_changes_no_bit(pool, flags):
    """To the byte, as storages that live between forward and backward; recomputation adds the FLOPs that it says: where
    ranks gather latents, each makes keys and values of all tokens twice. The CPU's kernel also multiplies zeros, with
    which values are padded to the width of keys."""
    grid = {name: int(n) for name, n in re.findall(r"--(cp|tp) (\d)", flags)}
    n, attention = math.prod(grid.values()), "math" if "math" in flags else "auto"
    model = rules.parse(f"{SHAPE} {flags}".split(), n).model
    layer = llama_layer(model, 24, LayerOptions(8, attention=attention, **grid))
    divided = not (model.mtp or model.kv_heads % n or model.kv_lora_rank and "--sp off" in flags)  # all of its matmuls
    few = 1024 if "ulysses" in flags else 0  # the order of chunks, a few numbers a layer
    at_once = "cp" not in grid  # blocks compute fewer scores
    zeros = 2 * model.heads * (model.head_dim - model.value_dim) * 24 * (attention == "auto")
    for plain, *others in zip(*steps(pool, n, f"--vocab 320 {flags}")):
        for seen, mode in zip((plain, *others), MODES):
            assert seen["formula"] <= seen["saved"] <= seen["formula"] + few
            assert all(torch.equal(a, b) for a, b in zip(plain["grads"], seen["grads"]))
            if divided and (at_once and mode != "none" or attention == "auto" and mode == "selective"):
                again = recomputed_flops(layer, mode) + zeros * (mode == "full")
                assert seen["flops"] - plain["flops"] == 2 * 48 * again / n


@pytest.mark.parametrize("n, flags", [(1, "--router sigmoid"), (2, "--ep 2"),
                                      (2, "--tp 2 --ep 2 --shared-experts 2 --dense-layers 1"),
                                      *slow((2, "--tp 2 --sp off"), (4, "--tp 2 --ep 4"), (4, "--tp 4 --sp off"))])
def test_ranks_keep_what_the_formula_says_of_experts(pool, n, flags):
    """On average, as some get more tokens than others; besides, with full recomputation coefficients of losses, a few
    numbers a layer. On one rank also where experts' rows end. On several, where a meter does not see those, three
    numbers for each copy of a token that is sent beyond those that random choices make."""
    flags = f"--global-batch {4 * n} --vocab 320 --micro-batch 2 --experts 8 --expert-ffn 24 {flags}"
    settings = rules.parse(f"{SHAPE} {flags}".split(), n)
    model, ep, layers = settings.model, settings.grid.ep, 2 - settings.model.dense_layers
    for mode, seen in zip(MODES, steps(pool, n, flags), strict=True):
        few = layers * (2 + 1) * (8 + 1) * 8 * (mode == "full")  # sequences, padding; experts, z
        saved, formula, copies = (sum(rank[what] for rank in seen) / n for what in ("saved", "formula", "copies"))
        if ep == 1:
            few += layers * 8 * 4
        else:
            few += 24 * (copies - layers * 2 * 24 // settings.grid.tp * copies_per_token(model, ep))
        assert saved == pytest.approx(formula + few, abs=1)


# ---- by symmetric memory ---------------------------------------------------------------------------------------------

def by_operators() -> list[bool]:
    """Whether results, and the bytes counted, are those of the ring when torch's operators are asked, of which CPUs
    have only what torch computes the shapes with."""
    group = grids.everyone()
    x, y = normal(6, 8, seed=group.rank), normal(6 * group.size, 10, seed=group.rank)
    wide, narrow = normal(12, 8).t(), normal(14, 10).t()

    def both() -> tuple[tuple[torch.Tensor, ...], dict]:
        collectives.sent.clear()
        products = *tp.all_gather_matmul(x, wide, group), tp.matmul_reduce_scatter(y, narrow, group)
        return products, collectives.sent.copy()

    want, sent = both()
    with (torch.library._scoped_library("symm_mem", "IMPL") as library, patch.object(tp, "shift", None),
          patch.object(tp, "uses_kernels", lambda x: True)):
        library.impl("fused_all_gather_matmul", symmetric_memory._fused_all_gather_matmul_fallback, "CPU")
        library.impl("fused_matmul_reduce_scatter", symmetric_memory._fused_matmul_reduce_scatter_fallback, "CPU")
        got, got_sent = both()
    same = [torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(want, got, strict=True)]
    return [*same, got_sent == sent]


def test_operators_on_symmetric_memory_compute_what_the_ring_does(pool):
    assert pool.run(3, by_operators) == 3 * [[True] * 4]
