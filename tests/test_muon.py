"""Muon over shards: every grid equals one process, its owners have equal work, and it sends what is said."""
import math

import pytest
import reference
import torch
from grids import DEEPSEEK, MIXTRAL, NO_GROUPS, ready
from sharding import Unit
from watch import in_order

import muon
import train
from core import rules
from core.collectives import sent
from core.groups import build_groups
from core.param import Spec
from muon import ITERATIONS, orthogonalize, orthogonalize_flops
from optimizers import UpdateRule
from plan import costs
from run.dryrun import fake_tensors, fake_world
from run.meter import Meter
from test_grids import cases, equals_one_process
from zero import Optimizer

GRIDS = [
    (1, "--micro-batch 8"),
    (8, "--micro-batch 3 --layers 1"),  # a matrix less than ranks
    (4, "--micro-batch 6 --tp 2 --zero 3"),
    (4, "--micro-batch 12 --tp 4 --kv-heads 2 --sp off --qkv-bias"),
    (1, f"--micro-batch 8 {MIXTRAL}"),
    (2, f"--micro-batch 6 {MIXTRAL} --experts 1 --top-k 1 --zero 1"),
]
MORE = [
    (4, f"--micro-batch 6 {MIXTRAL} --tp 2 --ep 2 --zero 1"),
    (8, "--micro-batch 3 --zero 2 --dp-replicate 4"),
    (8, "--micro-batch 6 --tp 4 --zero 3 --kv-heads 2 --vocab 257 --recompute selective"),
    (4, f"--micro-batch 6 {DEEPSEEK} --ep 4"),
    (8, f"--micro-batch 12 {DEEPSEEK} --pp 2 --cp 2 --tp 2 --ep 4 --schedule dualpipev --layers 5 --recompute full"),
]


@pytest.mark.parametrize("ranks, grid", cases(GRIDS) + cases(MORE, [pytest.mark.slow]))
def test_a_grid_equals_one_process(pool, ranks, grid):
    equals_one_process(pool, ranks, grid + " --optimizer muon")


@pytest.mark.parametrize("shape", [(1, 64, 96), (1, 96, 64), (3, 40, 24)])
def test_orthogonalize_moves_all_singular_values_near_one(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with Meter() as meter:
        y = orthogonalize(x)
    assert meter.flops == shape[0] * orthogonalize_flops(*shape[1:]) and ITERATIONS == 5
    values = torch.linalg.svdvals(y)
    assert values.min() > 0.6 and values.max() < 1.3
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    along = u.mT @ y @ v.mT  # diagonal: the same singular vectors
    assert (along - torch.diag_embed(along.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-10


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_a_whole_matrix_is_updated_as_by_the_reference_and_as_by_its_shards(shape):
    """The reference iterates on exact singular values. The optimizer's bucket here is one shard."""
    unit = Unit(Spec("w", shape), dtype=torch.float64)
    optimizer = Optimizer({0: [unit]}, NO_GROUPS, rule="muon", weight_decay=0.1, clip=0.0)
    exact, plain = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)), torch.zeros(shape, dtype=torch.float64)
    m = torch.zeros_like(plain)
    other = reference.Muon([dict(params=[exact], shape=shape)], dict(lr=0.01, weight_decay=0.1))
    for step in range(3):
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.begin_step(1)
        (unit.weights[0] * grad).sum().backward()
        optimizer.finish_step()
        optimizer.step(0.01)
        exact.grad, kept = grad, grad.clone()
        other.step()
        muon.update_whole(plain, grad, m, lr=0.01, weight_decay=0.1)
        assert torch.equal(grad, kept), "the gradient is the caller's"
    torch.testing.assert_close(plain, exact.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(optimizer.buckets[0].master.view(shape), plain, rtol=0, atol=1e-10)


def test_equal_matrices_are_multiplied_together_as_many_as_fit(monkeypatch):
    found = [{n: torch.full((4, 6), n + 1.0).tril(n) for n in range(3)} for _ in range(3)]
    with in_order((muon, "orthogonalize", len)) as counts:
        for numbers, most in zip(found, (72, 48, 23)):
            monkeypatch.setattr(muon, "STACKED", most)
            muon.replace_by_updates(numbers)
    assert counts == [3, 2, 1, 1, 1, 1]
    assert all(torch.allclose(other[n], found[0][n]) for n in range(3) for other in found[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_update_is_as_near_the_exact_one_as_that_of_torch(dtype):
    """Both iterate in bf16, the exact one in fp64. Momenta are in fp32: each step rounds two products and their sum, of
    numbers up to 4, which is less than 2^-21 in all."""
    unit = Unit(Spec("w", (48, 80)), dtype=dtype)
    optimizer = Optimizer({0: [unit]}, NO_GROUPS, rule="muon", weight_decay=0.1, clip=0.0)
    if optimizer.loss_scale:
        optimizer.loss_scale.value.fill_(64.0)
    theirs, exact = (torch.nn.Parameter(torch.zeros(48, 80, dtype=kind)) for kind in (torch.float32, torch.float64))
    others = [torch.optim.Muon([theirs], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
              reference.Muon([dict(params=[exact], shape=(48, 80))], dict(lr=0.01, weight_decay=0.1))]
    for step in range(3):
        grad = torch.randn(48, 80, generator=torch.Generator().manual_seed(step)).bfloat16()  # fp16 has these, too
        optimizer.begin_step(1)
        optimizer.scale_loss(unit.weights[0] * grad.to(dtype)).sum().backward()
        optimizer.finish_step()
        optimizer.step(0.01)
        theirs.grad, exact.grad = grad.float(), grad.double()
        for other in others:
            other.step()
        error, of_torch = ((x.detach() - exact).norm() / exact.norm()
                           for x in (optimizer.buckets[0].master.view(48, 80), theirs))
        assert error < 1.2 * of_torch < 0.06
        momentum = optimizer.buckets[0].state["m"].view(48, 80)
        assert (momentum - others[1].state[exact]["exp_avg"]).abs().max() < (step + 1) * 2.0 ** -21


@pytest.mark.parametrize("flags, n", [("--dp 8", 8), ("--dp 16 --tp 2 --pp 2", 32)])
def test_owners_of_a_llama_have_equal_work_on_matrices_that_they_hold(flags, n):
    world = n * (2 if "--pp" in flags else 1)
    settings = rules.parse(f"--preset llama-3.1-8b --seq-len 64 --micro-batch 1 --dtype bf16 --optimizer muon --zero 1 "
                            f"--global-batch {2 * n} {flags}".split(), world)
    with fake_world(world, 0), fake_tensors():
        groups = build_groups(settings.grid, settings.model)
        model = train.build_model(settings, groups, "cpu")
        muon = train.build_optimizer(settings, model, groups).muon
    assert len(muon.matrices) == 7 * len(model.blocks)
    work = [0] * n
    for matrix, owner in zip(muon.matrices, muon.owners):
        work[owner] += orthogonalize_flops(*matrix.shape)
    assert max(work) / (sum(work) / n) < 1.1
    assert sum(work) == len(model.blocks) * costs.muon_flops(settings.model, 0)
    moved = by_chance = least = 0
    for matrix, owner in zip(muon.matrices, muon.owners):
        held = [sum(piece.numel for piece in matrix.pieces if piece.rank == rank) for rank in range(n)]
        moved += sum(held) - held[owner]
        by_chance += sum(held) * (n - 1) / n
        least += sum(held) - max(held)
    assert least <= moved < (least + by_chance) / 2  # the least is sent if work does not count


def sent_for_matrices(grid: str, dtype: str) -> tuple[int, int]:
    """(bytes that this rank sends in an update, elements of all matrices of the model)"""
    groups, model, pipeline, optimizer, share = ready(f"{grid} --optimizer muon", dtype)
    train.forward_backward(model, pipeline, optimizer, share, groups)
    sent.clear()
    optimizer.step(0.01)
    return sent["muon"], sum(math.prod(matrix.shape) for matrix in optimizer.muon.matrices)


@pytest.mark.parametrize("grid, dtype, least, most", [
    ("--micro-batch 12 --tp 4", "fp64", 2, 2), ("--micro-batch 12 --tp 4", "fp32", 1, 1),
    ("--micro-batch 12 --tp 4", "bf16", 0.5, 0.5), ("--micro-batch 6 --zero 1", "fp64", 0.1, 2),
    ("--micro-batch 6", "fp64", 4, 4)])
def test_a_matrix_is_sent_to_its_owner_and_back(pool, grid, dtype, least, most):
    """2 (n-1)/n of it, less if its owner is chosen because most of the matrix is there already; at level 0 n-1 of it,
    from the owner to all."""
    results, n = pool.run(4, sent_for_matrices, grid=grid, dtype=dtype), 4
    nbytes, elements = sum(nbytes for nbytes, _ in results), results[0][1]
    assert least <= nbytes / ((n - 1) / n * elements * 8) <= most


def test_the_exchange_is_hidden_under_the_other_updates():
    """Order of events: momenta are sent, vectors and tables are updated, then the owners wait."""
    groups, model, pipeline, optimizer, share = ready("--micro-batch 12 --optimizer muon")
    train.forward_backward(model, pipeline, optimizer, share, groups)
    exchange = optimizer.muon.to_owners
    with in_order((exchange, "start", "send"), (exchange, "finish", "wait"),
                  (UpdateRule, "update", "update")) as events:
        optimizer.step(0.01)
    assert events[0] == "send" and events[-1] == "wait" and set(events[1:-1]) == {"update"}


def test_momenta_have_no_loss_scale():
    """Or they would count more, or less, after the scale has changed. Gradients are rounded to fp16 at either scale."""
    norms = []
    for scale in 256.0, 4096.0:
        groups, model, pipeline, optimizer, share = ready("--micro-batch 12 --optimizer muon", "fp16")
        optimizer.loss_scale.value.fill_(scale)
        train.forward_backward(model, pipeline, optimizer, share, groups)
        optimizer.step(0.01)
        norms.append(torch.stack([bucket.state["m"].norm() for bucket in optimizer.of_matrices]))
    torch.testing.assert_close(*norms, rtol=0.01, atol=0)
