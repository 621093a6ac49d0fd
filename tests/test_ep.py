"""Experts: whoever has them and however unequally they are chosen, the same results and gradients as one dense loop."""
import time
import weakref
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import grids
import pytest
import reference
import torch
import torch.distributed as dist
from pool import slow
from torch.utils._pytree import tree_leaves
from watch import Watch, in_order, reads_values

import ep
import train
import zero
from core import collectives, config, rules
from core.collectives import ALONE
from core.param import draw, parameter, shard_slice
from model import ForwardContext, MixtureOfExperts
from plan import costs
from recompute import Recompute
from run import job
from test_grids import MIXTRAL
from test_loop import READS
from tp import TensorParallel

LAYER = "--hidden 16 --heads 2 --kv-heads 2 --experts 8 --expert-ffn 12 --dtype fp64 --aux-loss 0.5"
KINDS = {"softmax": LAYER + " --top-k 1 --no-router-norm --router-z-loss 0.1",
         "sigmoid": LAYER + " --top-k 3 --router sigmoid --expert-groups 4 --top-groups 2 --shared-experts 1 "
                              "--router-scale 2.5"}
B, S = 8, 6


def make_layer(flags: str, group, dtype=torch.float64) -> MixtureOfExperts:
    """Expert 2 is chosen by nobody (feature 0 is always 1), and tokens of the second sequence all by expert 5."""
    settings = rules.parse(flags.split())
    optim, groups = settings.optim, {"ep": group, "edp": ALONE}
    balance = ep.Balance(optim.aux_loss, optim.aux_over, optim.router_z_loss, optim.router_bias_rate)
    layer = MixtureOfExperts(0, settings.model, partial(parameter, groups=groups, dtype=dtype), groups, balance)
    for weight in layer.parameters():
        weight.data = (10 * draw(0)(weight.spec, weight.box).double()).to(dtype)
    layer.router.weight.data[2, 0], layer.router.weight.data[5, 1] = -30, 6
    return layer


def inputs() -> torch.Tensor:
    x = torch.randn(B, S, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) / 2
    x[..., 0], x[..., 1] = 1, 0
    x[1, :, 1] = 1
    return x


def run_layer(layer: MixtureOfExperts, x: torch.Tensor, number: torch.Tensor, mode: str = "none") -> torch.Tensor:
    tokens = ep.RoutingInfo(number, B, (layer.ep_group,), aux_loss_scale=1 / B)
    return layer(x, ForwardContext(TensorParallel(), S, None, {}, Recompute(mode), tokens))


def on_ranks(kind: str) -> dict:
    """Results, loads and gradients of one layer, whose sequences are dealt to the ranks."""
    layer, mine = make_layer(KINDS[kind], grids.everyone()), shard_slice(B, dist.get_world_size(), dist.get_rank())
    x = inputs()[mine].flatten(0, 1).requires_grad_()
    number = torch.arange(B).repeat_interleave(S)[mine.start * S:mine.stop * S]
    y = run_layer(layer, x, number)
    (y * y.detach().cos()).sum().backward()
    y = y.detach()
    assert not layer.router.loss.requires_grad, "or a step's graphs would live until its end"
    return dict(y=y, dx=x.grad, load=layer.router.load, loss=layer.router.loss,
                grads={weight.spec.name: (weight.box, weight.grad) for weight in layer.parameters()})


@pytest.mark.parametrize("n", [1, 2, *slow(4, 8)])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_on_ranks_equal_a_dense_loop(pool, kind, n):
    settings = rules.parse(KINDS[kind].split())
    weights = {weight.spec.name: weight for weight in make_layer(KINDS[kind], ALONE).parameters()}
    x = inputs().requires_grad_()
    mixture = reference.mixture(x, weights, "layers.0.", torch.zeros(8), settings.model)
    want, loads = mixture[0], mixture[1]
    assert loads[:, 2].sum() == 0 and (loads[1, 5] == S) and loads.sum() == B * S * settings.model.top_k
    losses = reference.balance_losses([mixture], settings.model, settings.optim, 1)
    ((want * want.detach().cos()).sum() + losses).backward()

    results = pool.run(n, on_ranks, kind=kind)
    assert (torch.cat([r["y"] for r in results]) - want.flatten(0, 1)).abs().max() < 1e-12 * want.abs().max()
    dx = torch.cat([r["dx"] for r in results])
    assert (dx - x.grad.flatten(0, 1)).abs().max() < 1e-12 * x.grad.abs().max()
    for name, weight in weights.items():
        total = torch.zeros_like(weight)
        for result in results:
            box, grad = result["grads"][name]
            total[box] += grad
        assert (total - weight.grad).abs().max() < 1e-11 * weight.grad.abs().max(), name
    assert torch.equal(sum(r["load"] for r in results), loads.sum(0))
    assert sum(r["loss"] for r in results).item() / B == pytest.approx(losses.item(), rel=1e-12)


# ---- the plain versions ----------------------------------------------------------------------------------------------

def plain_weights() -> list[torch.Tensor]:
    """The router's weight, of 8 experts, then gate_up and down. Nobody chooses expert 2: feature 0 is always 1."""
    generator = torch.Generator().manual_seed(7)
    router, gate_up, down = (torch.randn(shape, dtype=torch.float64, generator=generator) / 2
                             for shape in ((8, 16), (8, 2 * 12, 16), (8, 16, 12)))
    router[2, 0] = -30
    return [router, gate_up, down]


def dense_mixture(x: torch.Tensor, weights: list[torch.Tensor], k: int) -> torch.Tensor:
    """Every expert computes every token, and scores that are not among a token's k highest are 0."""
    router, gate_up, down = weights
    scores = (x @ router.T).softmax(-1)
    gates = scores * (scores >= scores.topk(k).values[..., -1:])
    gate, up = torch.einsum("th,efh->etf", x, gate_up).chunk(2, -1)
    results = torch.einsum("etf,ehf->eth", gate * gate.sigmoid() * up, down)
    return torch.einsum("te,eth->th", gates, results)


def trained_plainly(k: int) -> tuple:
    """After three steps of SGD, this rank's last results, and its router and experts."""
    group = grids.everyone()
    n = group.size
    own = shard_slice(8, n, group.rank)
    router, gate_up, down = plain_weights()
    weights = [torch.nn.Parameter(values.clone()) for values in (router, gate_up[own], down[own])]
    x = inputs().flatten(0, 1)[shard_slice(B * S, n, group.rank)].requires_grad_()
    optimizer = torch.optim.SGD(weights, lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        x.grad = None
        chosen, gates = ep.plain_router(x, weights[0], k)
        y = ep.plain_expert_parallel(x, chosen, gates, *weights[1:], group)
        y.square().sum().backward()
        weights[0].grad = collectives.sum_over_ranks(weights[0].grad, group)  # each rank routes its own tokens
        optimizer.step()
    alone = ep.plain_mixture(x, *ep.plain_router(x, router, k), gate_up, down) if n == 1 else None
    return y.detach(), x.grad, [weight.detach() for weight in weights], alone


@pytest.mark.parametrize("n, k", [(1, 2), (2, 1), (4, 3)])
def test_plain_experts_on_ranks_train_as_dense_ones_in_one_process(pool, n, k):
    x = inputs().flatten(0, 1).requires_grad_()
    weights = [torch.nn.Parameter(values) for values in plain_weights()]
    optimizer = torch.optim.SGD(weights, lr=0.01)
    first = dense_mixture(x, plain_weights(), k)
    for _ in range(3):
        optimizer.zero_grad()
        x.grad = None
        y = dense_mixture(x, weights, k)
        y.square().sum().backward()
        optimizer.step()
    assert weights[1].grad[2].abs().max() == 0  # nobody chose it, on any rank
    results, dx, trained, alone = zip(*pool.run(n, trained_plainly, k=k))
    routers, *experts = zip(*trained)
    found = [torch.cat(parts) for parts in (results, dx, *experts)]
    for got, want in zip(found, (y, x.grad, *weights[1:]), strict=True):
        assert (got - want).abs().max() < 1e-12 * want.abs().max()
    for router in routers:
        assert (router - weights[0]).abs().max() < 1e-12 * weights[0].abs().max()
    if n == 1:
        assert (alone[0] - first).abs().max() < 1e-12 * first.abs().max()


# ---- what is sent, when, and what the host waits for -----------------------------------------------------------------

def bytes_sent(chosen: int, rows: int, recompute: str) -> int:
    """In forward and backward of a layer, T being `rows`, which choose experts in turn."""
    def in_turn(scores: torch.Tensor, model: config.Model) -> torch.Tensor:
        return torch.arange(rows * chosen).view(rows, chosen) % model.experts

    group, x = grids.everyone(), torch.randn(rows, 16, requires_grad=True)
    layer = make_layer(f"{LAYER} --top-k {chosen} --aux-loss 0 --no-router-norm", group, torch.float32)
    collectives.sent.clear()
    with patch.object(ep, "choose_experts", in_turn):
        block = partial(run_layer, layer, number=torch.zeros(rows, dtype=torch.long))
        Recompute(recompute)(block, x).sum().backward()
    return collectives.sent[group.axis]


@pytest.mark.parametrize("n", [2, 4, *slow(8)])
def test_a_layer_sends_every_token_once_to_a_rank_and_back_and_that_twice(pool, n):
    """However many experts it has there; recomputation sends it once more, and no result. With a token are sent its
    experts, once, and its gates, with its gradient those of its gates: 4 bytes each."""
    for k, T, mode in ((1, 16, "none"), (3, 24, "none"), (3, 24, "full")):
        of_tokens = [{(t * k + i) % 8 * n // 8 for i in range(k)} for t in range(T)]
        for rank, sent in enumerate(pool.run(n, bytes_sent, chosen=k, rows=T, recompute=mode)):
            copies = sum(len(ranks - {rank}) for ranks in of_tokens)
            gradients = sum(rank in ranks for ranks in of_tokens) * (n - 1)  # of what it receives from others
            loads = 8 * (8 + n) * (n - 1) // n
            assert sent == loads + copies * (2 * 16 * 4 + 8 * k) + gradients * (2 * 16 * 4 + 4 * k) + (
                copies * (16 * 4 + 4 * k) if mode == "full" else 0)


@pytest.mark.parametrize("E, k, n", [(256, 8, 8), (8, 2, 4), (128, 8, 2)])
def test_copies_of_random_choices_are_as_many_as_the_formula_expects(E, k, n):
    chosen = torch.rand(4000, E, generator=torch.Generator().manual_seed(0)).topk(k).indices * n // E
    found = sum(len(set(ranks)) for ranks in chosen.tolist()) / 4000
    assert found == pytest.approx(costs.copies_per_token(config.Model(experts=E, top_k=k), n), rel=0.01)


def watched(dtype: torch.dtype) -> tuple[int, int, set[tuple]]:
    """How often the host asked a tensor for its values, or for the size of a result, in forward and in backward; and
    the shapes made by operations that add several numbers to one place, in whatever order they come."""
    layer = make_layer(KINDS["sigmoid"] + " --expert-ffn 16", grids.everyone(), dtype)
    main_grads = {weight: torch.zeros(weight.shape) for weight in layer.parameters()}
    for weight in main_grads:
        weight.sink = SimpleNamespace(main_grad=main_grads.__getitem__)
    x, unordered = inputs().flatten(0, 1).to(dtype).requires_grad_(), set()

    def see(function, args, kwargs, out):
        name = str(function)
        if "output_size" not in kwargs and reads_values(function, args):
            seen.append(function)
        assert "aten.sort." not in name or name == "aten.sort.stable", "a GPU may sort equal keys in any order"
        if any(word in name for word in ("index_add", "index_put", "scatter_add", "scatter_reduce")):
            unordered.update(tuple(leaf.shape) for leaf in tree_leaves(out) if leaf.is_floating_point())

    with in_order(*((torch.Tensor, name, name) for name in READS)) as seen, Watch(see):
        y = run_layer(layer, x, torch.arange(B).repeat_interleave(S))
        in_forward = len(seen)
        y.sum().backward()
    return in_forward, len(seen) - in_forward, unordered


@pytest.mark.parametrize("n, dtype", [(1, torch.float32), (2, torch.float32), (4, torch.bfloat16)])
def test_the_host_waits_once_a_layer_and_rows_are_summed_in_a_fixed_order(pool, n, dtype):
    """But for weights into the scores of their experts, of which each has one place."""
    assert pool.run(n, watched, dtype=dtype) == [(1, 0, {(B * S, 8)})] * n


def by_ends() -> SimpleNamespace:
    """What kernels.py has for experts, in bf16, which the interpreter computes wrongly."""
    def add_expert_gradients(dw, dy, x, ends):
        expert = (torch.arange(len(x))[:, None] >= ends).sum(1, keepdim=True)  # of each row
        of_expert = (expert == torch.arange(len(ends))).to(x.dtype)
        dw += torch.einsum("re,rn,rk->enk", of_expert, dy, x)

    def sum_rows(x, order, starts):
        return torch.embedding_bag(x.contiguous(), order, starts, mode=0)[0]

    return SimpleNamespace(add_expert_gradients=add_expert_gradients, sum_rows=sum_rows)


def test_on_one_rank_the_host_does_not_wait_where_kernels_run():
    with patch.object(ep, "try_kernel", lambda x, compute: compute(by_ends())), patch.object(
            grids, "everyone", lambda: ALONE):
        assert watched(torch.bfloat16) == (0, 0, {(B * S, 8)})


def test_on_one_rank_a_choice_that_is_not_counted_is_noticed_without_a_wait():
    with pytest.raises(RuntimeError, match="a choice of an expert was not counted, or counted twice"):
        ep.make_route(torch.tensor([[0, 1], [1, 2]]), torch.tensor([1, 1, 1]), ALONE)


def events() -> list[str]:
    """What a rank does in which order, of a layer with shared experts: exchanges, and matmuls by their width."""
    layer = make_layer(KINDS["sigmoid"] + " --shared-experts 3", grids.everyone())

    def see(function, args, kwargs, out):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            widths = {size for leaf in tree_leaves((args, out)) if isinstance(leaf, torch.Tensor)
                      for size in leaf.shape}
            kind = "shared" if widths & {36, 72} else "router" if 8 in widths else "experts"  # none gets 8 rows
            if seen[-1:] != [kind]:
                seen.append(kind)

    def sent(out, x, *rest, async_op=False):
        assert async_op or x.dtype == torch.int64, "only counts are waited for at once"
        return "sent" if async_op and x.shape[1] == 16 else None

    def received(pending):
        return "received" if pending.works and pending.tensors[0].shape[1:] == (16,) else None

    x = torch.randn(24, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    with in_order((ep, "all_to_all", sent), (collectives.Pending, "wait", received)) as seen, Watch(see):
        y = run_layer(layer, x, torch.arange(24) // 6)
        seen.append("backward")
        y.sum().backward()
    return seen


def test_shared_experts_compute_while_tokens_travel(pool):
    for seen in pool.run(2, events):
        forward, backward = " ".join(seen).split(" backward ")
        assert forward == "router sent shared received experts"
        assert backward == "experts sent shared received router"


def kept_after_dispatch() -> list[bool]:
    """Of tokens and gates, whether the buffer in which they arrived is kept once rows have been made from it."""
    def receives(out: torch.Tensor, *_, async_op: bool = False):
        return weakref.ref(out) if async_op else None

    chosen = torch.rand(6, 4).topk(2).indices
    route = ep.make_route(chosen, torch.bincount(chosen.flatten(), minlength=4), grids.everyone())
    with in_order((ep, "all_to_all", receives)) as buffers:
        dispatched = route.dispatch(torch.randn(6, 3, requires_grad=True), torch.rand(6, 2, requires_grad=True))
        results = dispatched.wait()
    assert all(result.requires_grad for result in results)
    for _ in range(200):  # gloo's thread may let go of a buffer a moment after `wait` returns
        if not any(buffer() is not None for buffer in buffers):
            break
        time.sleep(0.01)
    return [buffer() is not None for buffer in buffers]


def test_what_has_arrived_is_kept_by_nobody_once_experts_have_their_rows(pool):
    """Neither by the graph nor by the objects of the dispatch, which the layer keeps while experts compute."""
    assert pool.run(2, kept_after_dispatch) == [[False, False]] * 2


def test_a_route_keeps_what_it_has_and_not_the_table_that_it_is_sorted_in():
    """Of 5 tokens with 3 destinations each, 4 copies go to ranks 0 and 1."""
    table = torch.tensor([[0, 1, -1], [-1, 2, -1], [1, 7, -1], [-1, -1, -1], [0, 2, 9]])
    copies = ep.sort_copies(table, 2, 4)
    assert copies.cells.tolist() == [0, 12, 1, 6] and copies.cells.untyped_storage().nbytes() == copies.cells.nbytes


def test_a_choice_that_is_not_counted_is_noticed():
    for rows in (2, 4):
        with pytest.raises(AssertionError, match="a choice of an expert was not counted, or counted twice"):
            ep.exchange_counts(torch.tensor([[2, rows, 1]]), 2, 2, ALONE)  # of 2 tokens that choose 2 experts each


# ---- matmuls --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 0], [0, 40, 0, 0]])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_grouped_matmuls_equal_the_loop(counts, dtype, bound):
    generator = torch.Generator().manual_seed(0)
    x, weight, up = (torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).double() for shape in
                     ((sum(counts), 16), (4, 24, 16), (sum(counts), 24)))
    route = SimpleNamespace(rows_per_expert=counts, ends=torch.tensor(counts).cumsum(0).int())

    def results(dtype) -> list[torch.Tensor]:
        given, matrix = x.to(dtype).requires_grad_(), torch.nn.Parameter(weight.to(dtype))
        matrix.sink = None
        y = ep.GroupedLinear.apply(given, matrix, ep.GroupedMatmul(), route, False)
        y.backward(up.to(dtype))
        return [part.double() for part in (y, given.grad, matrix.grad)]

    assert ep.fits_grouped_mm(x.to(dtype)) == (dtype == torch.bfloat16) and not ep.fits_grouped_mm(x)
    for got, want in zip(results(dtype), results(torch.float64)):
        assert got.shape == want.shape
        assert (got - want).abs().sum() <= bound * want.abs().sum()


def test_weight_gradients_of_experts_are_summed_in_fp32():
    """512 micro-batches add 2^-10 each to 1: a bf16 sum would never move."""
    route = SimpleNamespace(rows_per_expert=[1, 0], ends=torch.tensor([1, 1], dtype=torch.int32))
    weight, total = torch.nn.Parameter(torch.ones(2, 8, 8).bfloat16()), torch.ones(2, 8, 8)
    weight.sink = SimpleNamespace(main_grad=lambda weight: total)
    x = torch.full((1, 8), 2.0 ** -10, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(512):
        ep.GroupedLinear.apply(x, weight, ep.GroupedMatmul(), route, False).sum().backward()
    assert (total[0] == 1.5).all() and (total[1] == 1).all()


def test_grouped_mm_is_not_given_rows_that_begin_between_multiples_of_16_bytes():
    """Which a GPU refuses: a weight may lie anywhere in its flat bucket."""
    bucket = torch.randn(4 * 24 * 16 + 8).bfloat16()
    for offset in range(9):
        weight = bucket[offset:offset + 4 * 24 * 16].view(4, 24, 16)
        assert ep.fits_grouped_mm(weight) == (offset in (0, 8))


# ---- choosing again, and not at all ---------------------------------------------------------------------------------

SMALL = MIXTRAL + " --global-batch 8 --seq-len 12"


def random_choices(recompute: str) -> tuple[list[tuple], list[torch.Tensor]]:
    """Gradients and loads of a step whose layers choose differently in every call, as near ties may be decided."""
    groups, model, pipeline, optimizer, share = grids.ready(f"{SMALL} --micro-batch 2 --ep 2 --recompute {recompute}")
    generator = torch.Generator().manual_seed(1)

    def at_random(scores: torch.Tensor, model: config.Model) -> torch.Tensor:
        return torch.rand(scores.shape, generator=generator).topk(model.top_k, -1).indices

    with patch.object(ep, "choose_experts", at_random), in_order((ep, "exchange_counts", "exchange")) as exchanged:
        train.forward_backward(model, pipeline, optimizer, share, groups)
    assert len(exchanged) == 3 * len(share)
    return grids.pieces(optimizer, "grad"), [router.load for router in model.routers]


def test_a_layer_that_runs_again_does_not_choose_again(pool):
    plain, *others = (pool.run(2, random_choices, recompute=how) for how in ("none", "selective", "full"))
    for results in (plain, *others):
        for (grads, _), (want, _) in zip(results, plain):
            for got, expected in zip(grads, want):
                assert torch.equal(got[-1], expected[-1]), got[0]
        assert sum(torch.stack(loads) for _, loads in results).sum(1).tolist() == 3 * [8 * 12 * 2]  # T k A


# ---- balance --------------------------------------------------------------------------------------------------------

def test_biases_move_by_the_rate_once_a_step_and_not_at_all_when_it_is_skipped():
    model, weight = config.Model(experts=4, top_k=1), torch.nn.Parameter(torch.eye(4))
    router = ep.Router("r", weight, model, ep.Balance(router_bias_rate=0.25))
    for apply, want in ((True, [-0.25, 0.25, 0.25, 0.0]), (False, [-0.25, 0.25, 0.25, 0.0])):
        router.load.copy_(torch.tensor([9, 1, 2, 4]))
        worst, _ = ep.update_biases([router], (), torch.tensor(apply))
        assert worst == 9 / 4 and router.bias.tolist() == want and router.load.sum() == 0
    router.load.copy_(2 ** 24 + torch.tensor([1, -1, 0, 0]))  # one token more than fp32 counts to
    ep.update_biases([router], ())
    assert router.bias.tolist() == [-0.5, 0.5, 0.25, 0.0]


def test_loads_are_summed_over_every_group_and_compared_within_their_layer(monkeypatch):
    """Groups of two and of three ranks with equal loads, in place of which there are their sizes."""
    monkeypatch.setattr(ep, "all_reduce", lambda sums, size: sums.mul_(size))
    model, balance = config.Model(experts=2, top_k=1), ep.Balance(router_bias_rate=1.0)
    routers = [ep.Router(name, torch.nn.Parameter(torch.eye(2)), model, balance) for name in "ab"]
    for router, load in zip(routers, ([3, 1], [50, 70])):
        router.load.copy_(torch.tensor(load))
        router.loss.fill_(0.25)
    worst, loss = ep.update_biases(routers, (2, 3))
    assert worst == 3 / 2 and loss == 2 * 3 * (0.25 + 0.25)
    assert [router.bias.tolist() for router in routers] == [[-1, 1], [1, -1]]
    assert not any(router.load.any() or router.loss for router in routers)


def test_the_losses_carry_the_scale_of_fp16():
    """Every gradient is multiplied by it, or what balance asks for would shrink to nothing."""
    grads = []
    for scale in (1.0, 1024.0):
        flags = f"{SMALL} --aux-loss 1 --router-z-loss 0.1 --mtp --z-loss 0.1"
        groups, model, pipeline, optimizer, share = grids.ready(flags)
        optimizer.loss_scale = zero.LossScale(torch.device("cpu"), scale)
        train.forward_backward(model, pipeline, optimizer, share, groups)
        grads.append(torch.cat([bucket.grad_shard for bucket in optimizer.buckets]) / scale)
    assert (grads[0] - grads[1]).abs().max() < 1e-12 * grads[0].abs().max()


def test_evaluation_counts_nothing():
    groups, model, pipeline, _, share = grids.ready(f"{SMALL} --router-bias-rate 0.1")
    job.mean_loss(model, pipeline, [share], groups)
    assert not any(router.load.any() for router in model.routers)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_without_tokens_takes_part(kind):
    layer = make_layer(KINDS[kind], ALONE)
    x = torch.zeros(0, 16, dtype=torch.float64, requires_grad=True)
    y = run_layer(layer, x, torch.zeros(0, dtype=torch.long), "selective")  # which drops results without elements
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 16)
    assert all(weight.grad is not None and weight.grad.abs().max() == 0 for weight in layer.parameters())


def test_statistics_of_a_bf16_router_are_fp32():
    """Logits in bf16 would send one token in seventy elsewhere."""
    weight, x = torch.nn.Parameter((torch.randn(8, 16) / 4).bfloat16()), torch.randn(512, 16).bfloat16()
    router = ep.Router("r", weight, config.Model(experts=8, top_k=2), ep.Balance(aux_loss=1.0))
    route, weights = router(x, ep.RoutingInfo(torch.zeros(512, dtype=torch.long), 1, aux_loss_scale=1.0), ALONE)
    assert weights.dtype == router.bias.dtype == torch.float32
    exact = (x.double() @ weight.double().t()).topk(2)
    assert torch.equal(route.chosen, exact.indices)
    assert (weights - exact.values.softmax(-1)).abs().max() < 1e-5


def test_results_in_bf16_are_rounded_once():
    y = torch.randn(600, 16).bfloat16()
    copies = ep.sort_copies(torch.arange(600).view(200, 3) % 8, 8, 600)
    exact = torch.zeros(200, 16, dtype=torch.double).index_add_(0, copies.cells // 3, y.double())
    got = copies.unpermute(y)
    assert got.dtype == torch.bfloat16 and ((got.double() - exact).abs() <= exact.abs() * 2 ** -8 + 1e-6).all()


def test_a_sigmoid_that_underflows_is_no_nan():
    model, weight = config.Model(experts=4, top_k=2, router="sigmoid"), torch.nn.Parameter(torch.eye(4))
    router = ep.Router("r", weight, model, ep.Balance(aux_loss=1.0))
    weight.sink, x = None, torch.full((3, 4), -120.0, requires_grad=True)
    _, weights = router(x, ep.RoutingInfo(torch.zeros(3, dtype=torch.long), 1, aux_loss_scale=1.0), ALONE)
    weights.sum().backward()
    assert x.grad.isfinite().all() and weight.grad.isfinite().all() and router.loss.isfinite()


def test_a_group_is_as_good_as_its_two_best_experts_or_its_only_one():
    """And a closed group stays closed where biases make scores negative."""
    for groups, top_groups, chosen, scores in (
            (2, 1, [2, 3], [0.9, 0.1, 0.6, 0.5]),  # 1.1 is more than 1.0
            (2, 1, [0, 1], [0.6, 0.5, 0.0, 0.45, 0.4, 0.4]),  # and than 0.85, though all three are 1.1 against 1.25
            (2, 1, [0, 1], [-0.1, -0.2, -0.5, -0.6]), (4, 2, [1, 2], [0.1, 0.4, 0.3, 0.2])):
        model = config.Model(experts=len(scores), top_k=2, expert_groups=groups, top_groups=top_groups)
        assert ep.choose_experts(torch.tensor([scores]), model).tolist() == [chosen]
