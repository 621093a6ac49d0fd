"""The gradient noise scale: unbiased, from norms before the reduction, and the same on every grid."""
from itertools import accumulate, chain

import grids
import pytest
import runs
import torch
import torch.distributed as dist
from torch import nn

from core.collectives import ALONE
from core.param import Spec, draw, parameter
from run.log import GradientNoise, solve
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
    world = grids.everyone()
    groups = {"world": world, "replicate": ALONE, "dp": world}
    line = Line(groups)
    optimizer = Optimizer({0: [line]}, groups, level=level)
    optimizer.load(draw(0))
    optimizer.loss_scale = LossScale(torch.device("cpu"), start=4.0)  # as in fp16
    noise, found = GradientNoise(optimizer, world.size), []
    for _ in range(2):  # the second step's are its own
        optimizer.begin_step(micro_batches)
        for x in given(world.size, micro_batches)[world.rank]:
            optimizer.scale_loss(line(x.clone().requires_grad_())).backward()
        optimizer.finish_step()
        squares = noise.squares()
        optimizer.step(1e-3, to_sum=squares)
        found.append(noise.estimate(TOKENS, squares))
    return found


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_norms_of_local_gradients_are_those_before_the_reduction(pool, level):
    gradients = given(2, 3) if level >= 2 else given(2, 3).sum(1, keepdim=True)
    count = gradients.shape[0] * gradients.shape[1]
    small = (count * gradients).square().sum((-1, -2)).mean().item()
    want = solve(TOKENS / count, small, TOKENS, gradients.sum((0, 1)).square().sum().item())
    for found in pool.run(2, measured, level=level, micro_batches=3):
        for step in found:
            assert (step["noise_gradient2"], step["noise_trace"]) == pytest.approx(want, rel=1e-12)


def estimate(grid: str, left_out: str | None = None) -> dict:
    """The estimates of a grid, without the parameters whose names contain `left_out`."""
    settings = grids.settings_of(grid, dist.get_world_size())
    groups, model, pipeline, optimizer = grids.build(settings)
    noise = GradientNoise(optimizer, groups["data"].size)
    counts = noise.counts
    noise.counts = lambda bucket, spec: (left_out is None or left_out not in spec.name) and counts(bucket, spec)
    grids.forward_backward(settings, groups, model, pipeline, optimizer, *grids.batches(settings)[0])
    squares = noise.squares()
    optimizer.step(0.0, to_sum=squares)
    found = noise.estimate(settings.batch.global_batch * settings.batch.seq_len, squares)
    return {name: value.item() for name, value in found.items()}


def test_grids_measure_the_same_noise(pool):
    (want, *others), *more = [found for ranks, flags in ((2, ("", "--zero 1")), (4, ("--tp 2 --sp off", "--pp 2")))
                              for found in grids.for_each(pool, ranks, estimate, [
                                  dict(grid=f"--micro-batch 12 {grid}") for grid in flags])]
    assert want["noise_trace"] > 0  # micro-batches of 12 set whose sequences are whose
    for found in chain(others, *more):
        assert found == pytest.approx(want, rel=1e-9)


def test_experts_and_gradients_that_are_partial_over_tp_do_not_count(pool):
    experts = "--micro-batch 12 --experts 4 --expert-ffn 16 --dense-layers 1"
    for left_out, (ranks, alone), (more, grid) in (
            ("norm", (2, "--micro-batch 12"), (4, "--micro-batch 12 --tp 2")),
            (".experts.", (2, experts), (2, experts + " --ep 2"))):
        want = pool.run(ranks, estimate, grid=alone, left_out=left_out)[0]
        for found in pool.run(more, estimate, grid=grid):
            assert found == pytest.approx(want, rel=1e-9)


def test_the_noise_in_the_metrics_is_that_of_each_steps_own_tokens(pool, tmp_path):
    """With a batch that grows, in fp16: |G|^2 + tr(S) / B is the squared norm of the gradient."""
    flags = ("--layers 1 --hidden 16 --heads 2 --ffn 16 --seq-len 16 --steps 4 --dtype fp16 --batch-ramp 4@0,8@128 "
             "--sample-prompt=")
    (tmp_path / "text").write_text("all the world's a stage " * 99)
    pool.run(2, runs.run, flags=f"{flags} --data {tmp_path}/text --metrics {tmp_path}/m")
    records = runs.metrics(tmp_path / "m")
    tokens = [64, 64, 128, 128]
    assert [record["tokens"] for record in records] == list(accumulate(tokens))
    for record, count in zip(records, tokens):
        squared = record["noise_gradient2"] + record["noise_trace"] / count
        assert squared == pytest.approx(record["grad_norm"] ** 2, rel=1e-4)
