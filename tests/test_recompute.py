"""Recomputed layers: the same gradients from inputs alone, shared among ranks, in memory that is allocated once."""
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from meter import Meter
from recompute import Arena, Recomputed, gpt_layer, kept


def checkpoints(layers: int, steps: int = 3) -> dict:
    """Gradients of a stack of layers on ranks that hold the same activations: kept whole, and as shared checkpoints."""
    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    weights = [random(20, 20).div(4).requires_grad_() for _ in range(layers)]
    x = random(3, 8, 20).requires_grad_()

    def layer(weight):
        return lambda x: x + torch.tanh(x @ weight).square() @ weight

    y = x
    for weight in weights:
        y = layer(weight)(y)
    plain = torch.autograd.grad(y.square().sum(), [x, *weights])

    meter = Meter()
    arena = Arena(layers, x, group)
    meter.label("arena", arena.parts, arena.whole)
    meter.label("rest", x, *weights)
    seen = []
    for _ in range(steps):
        x.grad = None
        for weight in weights:
            weight.grad = None
        meter.collectives.clear()
        with meter:
            y = x
            for weight in weights:
                run = layer(weight)
                y = Recomputed.apply(run, run, arena, y)
            between = meter.live()  # forward is over, backward has not begun
            y.square().sum().backward()
        seen.append(dict(between=dict(between), peak=dict(meter.peak), gathers=list(meter.collectives)))
        del y
    same = all(torch.equal(want, got.grad) for want, got in zip(plain, [x, *weights]))
    return dict(same=same, steps=seen, arena=(arena.parts.nbytes, arena.whole.nbytes), unused=len(arena.unused))


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_checkpoints_are_shared_and_gathered_once_a_layer(pool, n):
    x = 3 * 8 * 20 * 8  # bytes of a layer's input
    for seen in pool.run(n, "test_recompute:checkpoints", layers=5):
        assert seen["same"], "gradients are those without checkpoints, to the bit"
        assert seen["arena"] == (5 * x // n, x if n > 1 else 0) and seen["unused"] == 5
        for step in seen["steps"]:
            assert step["between"]["arena"] == sum(seen["arena"])
            assert step["between"]["other"] <= 2 * x, "between forward and backward there is no activation but the last"
            gathers = [call for call in step["gathers"] if call.name == "_allgather_base_"]
            assert len(gathers) == len(step["gathers"]) == (5 if n > 1 else 0)
            assert all(call.bytes == x for call in gathers)
        sent = sum(call.bytes for call in seen["steps"][0]["gathers"])
        with_tensor_parallelism = 5 * 6 * 2 * x  # all-reduces: two each in forward, recomputation and backward
        assert sent * 12 == with_tensor_parallelism or n == 1


def test_shared_checkpoints_make_no_new_storage(pool):
    seen = pool.run(2, "test_recompute:checkpoints", layers=6)[0]["steps"]
    assert seen[0]["between"] == seen[1]["between"] == seen[2]["between"]
    assert seen[0]["peak"] == seen[2]["peak"]


def test_a_checkpoint_that_cannot_be_shared_is_refused():
    group = SimpleNamespace(size=lambda: 7, rank=lambda: 0)
    with pytest.raises(ValueError, match="7 ranks cannot share a checkpoint of 480 elements in equal parts"):
        Arena(1, torch.zeros(3, 8, 20), group)


@pytest.mark.parametrize("name, heads, hidden, figure", [  # figure 7 of the paper, in per cent of tensor parallelism
    ("22B", 64, 6144, (66.84, 49.42, 16.18, 7.64)), ("175B", 96, 12288, (62.04, 56.53, 18.49, 8.71))])
def test_the_papers_own_layer_keeps_what_the_paper_says(name, heads, hidden, figure):
    """Korthikanti et al. 2022: formulas of table 2 for 2048 tokens and 8 ranks, and the bars of figure 7."""
    h, s, t, layer = hidden, 2048, 8, gpt_layer(hidden, heads, 2048)
    scores = 5 * heads * s / h
    assert kept(layer, "none") == pytest.approx(h * (34 + scores))
    base = kept(layer, "none", t, sequence=False)
    assert base == pytest.approx(h * (10 + 24 / t + scores / t))
    bars = (kept(layer, "none", t), kept(layer, "selective", t, sequence=False), kept(layer, "selective", t),
            kept(layer, "full"))
    assert bars == pytest.approx((h * (34 + scores) / t, h * (10 + 24 / t), h * 34 / t, 2 * h))
    assert [100 * bar / base for bar in bars] == pytest.approx(figure, abs=0.1)
