"""The optimizer: precision, decay, clipping, and everything once. That it equals torch.optim is tested on grids."""
import math

import pytest
import torch
from torch import nn

from dp import Chunks
from param import Groups, Spec, parameter
from zero import Optimizer

ALONE: Groups = {"world": None, "dp": None}


class Unit(nn.Module):
    def __init__(self, *specs: Spec, dtype=torch.float32):
        super().__init__()
        self.weights = nn.ParameterList(parameter(spec, ALONE, dtype) for spec in specs)


def made(*specs: Spec, dtype=torch.float32, **settings) -> tuple[list[nn.Parameter], Optimizer]:
    """Parameters and their optimizer, filled with ones."""
    unit = Unit(*specs, dtype=dtype)
    chunks: Chunks = {0: [unit]}
    optimizer = Optimizer(chunks, ALONE, **settings)
    optimizer.load(lambda spec, box: torch.ones([s.stop - s.start for s in box]))
    return list(unit.weights), optimizer


def step(params: list[nn.Parameter], optimizer: Optimizer, grads: list[torch.Tensor], lr: float = 0.1) -> torch.Tensor:
    optimizer.begin({0: 1})
    sum((p * grad.to(p.dtype)).sum() for p, grad in zip(params, grads)).backward()
    optimizer.finish()
    return optimizer.step(lr)


def test_1024_bf16_gradients_add_up():
    """B2: in bf16 the sum would be off by a fifth; in the fp32 buckets it is off by the rounding of its terms."""
    params, optimizer = made(Spec("w", (64, 64)), dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    grads = [(torch.rand(64, 64, generator=generator) + 0.5).bfloat16() for _ in range(1024)]
    optimizer.begin({0: 1024})
    for grad in grads:
        (params[0] * grad).sum().backward()
    optimizer.finish()
    exact = sum(grad.double() for grad in grads)
    bf16 = torch.zeros(64, 64, dtype=torch.bfloat16)
    for grad in grads:
        bf16 += grad
    assert ((optimizer.buckets[0].grad.view(64, 64) - exact) / exact).abs().max() < 1e-5
    assert ((bf16.double() - exact) / exact).abs().max() > 0.1


def test_small_steps_move_bf16_weights():
    """100 steps of 1e-4 move a weight of 1 by 1e-2; kept in bf16 alone it would not move at all."""
    params, optimizer = made(Spec("w", (8,)), dtype=torch.bfloat16, weight_decay=0.0, clip=0.0)
    for _ in range(100):
        step(params, optimizer, [torch.ones(8)], lr=1e-4)
    bucket = optimizer.buckets[0]
    assert bucket.master.dtype == torch.float32
    assert bucket.master.tolist() == pytest.approx([1 - 1e-2] * 8, abs=1e-5)
    assert torch.equal(params[0].data, bucket.master.bfloat16()) and (params[0] < 1).all()
    assert params[0].data.untyped_storage().data_ptr() == bucket.weights.untyped_storage().data_ptr()


def test_only_matrices_decay():
    params, optimizer = made(Spec("norm", (4,), decay=False), Spec("w", (3, 4)), Spec("bias", (2,), decay=False),
                             dtype=torch.float64, weight_decay=0.5)
    step(params, optimizer, [torch.zeros(p.shape) for p in params])
    assert [p.unique().item() for p in params] == [1.0, 1 - 0.1 * 0.5, 1.0]


def test_clipping_scales_the_whole_gradient_to_the_limit():
    params, optimizer = made(Spec("a", (4,)), Spec("b", (5, 4)), dtype=torch.float64, rule="sgd", clip=0.5,
                             weight_decay=0.0)
    norm = step(params, optimizer, [torch.full((4,), 3.0), torch.full((5, 4), 4.0)], lr=1.0)
    assert norm.item() == pytest.approx(math.sqrt(4 * 9 + 20 * 16), rel=1e-12)
    moved = torch.cat([(1 - p).flatten() for p in params])
    assert moved.norm().item() == pytest.approx(0.5, rel=1e-7)  # less the 1e-6 that keeps a zero norm from dividing
    assert (moved[4:] / moved[0]).tolist() == pytest.approx([4 / 3] * 20)
    below = step(params, optimizer, [torch.full((4,), 1e-3), torch.zeros(5, 4)], lr=1.0)
    assert below.item() == pytest.approx(2e-3) and (params[0] + moved[0] - 1).tolist() == pytest.approx([-1e-3] * 4)


@pytest.mark.parametrize("rule", ["adamw", "sgd"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_step_that_is_not_finite_changes_nothing(rule, bad, clip):
    (param,), optimizer = made(Spec("w", (2, 3)), rule=rule, clip=clip)
    step([param], optimizer, [torch.ones(2, 3)])
    bucket = optimizer.buckets[0]
    kept = [getattr(bucket, what).clone() for what in ("master", "m", "v", "steps")]
    grad = torch.ones(2, 3)
    grad[1, 2] = bad
    assert not step([param], optimizer, [grad]).isfinite()
    assert all(torch.equal(was, getattr(bucket, what)) for was, what in zip(kept, ("master", "m", "v", "steps")))
    step([param], optimizer, [torch.ones(2, 3)])
    assert bucket.master.isfinite().all() and not torch.equal(kept[0], bucket.master)


def test_refilling_the_flat_weights_between_forward_and_backward_is_no_modification():
    """Sharded parameters are gathered again before backward: the same values, written anew, are no change."""
    params, optimizer = made(Spec("a", (3,)), Spec("b", (3,)))
    optimizer.begin({0: 1})
    x = torch.ones(3, requires_grad=True)
    y = (x * params[0]).tanh() * params[1]  # autograd keeps both parameters
    weights = optimizer.buckets[0].weights
    weights.copy_(weights.clone())
    y.sum().backward()
    optimizer.finish()
    assert x.grad.isfinite().all()


def test_state_comes_in_by_name_and_box():
    specs = [Spec("norm", (4,), decay=False), Spec("w", (3, 4))]
    params, optimizer = made(*specs, dtype=torch.bfloat16)
    values = {what: {spec.name: torch.rand(spec.shape) for spec in specs} for what in ("master", "m", "v")}
    for what, named in values.items():
        optimizer.load(lambda spec, box, named=named: named[spec.name][box], what)
    for p in params:
        assert torch.equal(p.data, values["master"][p.spec.name].bfloat16())
    for what, named in values.items():
        for bucket in optimizer.buckets:
            seen = 0
            for p, box, place in bucket.pieces():
                assert torch.equal(getattr(bucket, what)[place], named[p.spec.name][box].flatten())
                seen += place.stop - place.start
            assert seen == bucket.numel
