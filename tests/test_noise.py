"""The gradient noise scale: unbiased, from norms before the reduction, and the same on every grid."""
import pytest
import torch
import torch.distributed as dist
from torch import nn

import grids
from collectives import size
from noise import GradientNoise, solve
from param import Spec, draw, parameter
from zero import LossScale, Optimizer

SHAPE, TOKENS = (6, 5), 24  # of a step


def test_both_unknowns_are_found_without_bias():
    """Eight gradients of 10 tokens around a known one, with a known covariance, and their mean, 20,000 times."""
    true, spread = torch.linspace(-1, 1, 50).double(), torch.linspace(0.5, 3, 50).double()
    noise = torch.randn(20_000, 8, 50, dtype=torch.float64) * spread / 10 ** 0.5
    local = true + noise
    small, large = local.square().sum(-1).mean(1), local.mean(1).square().sum(-1)
    for found, want in zip(solve(10, small, 80, large), (true.square().sum(), spread.square().sum())):
        assert abs(found.mean() - want) < 4 * found.std() / 20_000 ** 0.5 < 0.02 * want


class Line(nn.Module):
    """Its gradient is its input."""

    def __init__(self, groups):
        super().__init__()
        self.weight = parameter(Spec("weight", SHAPE), groups, torch.float64)

    def forward(self, x):
        return (self.weight * x).sum()


def given(ranks: int, micro_batches: int) -> torch.Tensor:
    return torch.randn(ranks, micro_batches, *SHAPE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def measured(level: int, micro_batches: int) -> list[dict]:
    world = dist.group.WORLD
    groups = {"world": world, "replicate": None, "dp": world}
    line = Line(groups)
    optimizer = Optimizer({0: [line]}, groups, level=level)
    optimizer.load(draw(0))
    optimizer.loss_scale = LossScale(torch.device("cpu"), start=4.0)  # as in fp16
    noise, found = GradientNoise(optimizer, size(world)), []
    for _ in range(2):  # the second step's are its own
        optimizer.begin_step({0: micro_batches})
        for x in given(size(world), micro_batches)[world.rank()]:
            optimizer.scale_loss(line(x.clone().requires_grad_())).backward()
        optimizer.finish_step()
        optimizer.step(1e-3)
        found.append(noise.estimate(TOKENS))
    return found


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_norms_of_local_gradients_are_those_before_the_reduction(pool, level):
    gradients = given(2, 3) if level >= 2 else given(2, 3).sum(1, keepdim=True)
    count = gradients.shape[0] * gradients.shape[1]
    small = (count * gradients).square().sum((-1, -2)).mean().item()
    want = solve(TOKENS / count, small, TOKENS, gradients.sum((0, 1)).square().sum().item())
    for found in pool.run(2, "test_noise:measured", level=level, micro_batches=3):
        for step in found:
            assert (step["noise_gradient2"], step["noise_trace"]) == pytest.approx(want, rel=1e-12)


def estimate(grid: str) -> dict:
    settings = grids.settings_of(grid, dist.get_world_size())
    groups, model, optimizer = grids.build(settings)
    noise = GradientNoise(optimizer, size(groups["data"]))
    grids.forward_backward(settings, groups, model, optimizer, *grids.batches(settings)[0])
    optimizer.step(0.0)
    found = noise.estimate(settings.batch.global_batch * settings.batch.seq)
    return {name: value.item() for name, value in found.items()}


def test_every_grid_measures_the_same_noise(pool):
    want = pool.run(2, "test_noise:estimate", grid="--micro-batch 12")[0]  # which sets whose sequences are whose
    assert want["noise_trace"] > 0
    for ranks, grid in (4, "--tp 2 --no-sp"), (4, "--pp 2"), (2, "--zero 1"):
        for found in pool.run(ranks, "test_noise:estimate", grid=f"--micro-batch 12 {grid}"):
            assert found == pytest.approx(want, rel=1e-9)
