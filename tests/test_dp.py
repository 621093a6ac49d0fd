"""Buckets: what is in them, when they are sent, how much is sent."""
import contextlib
import io
import re

import grids
import pytest
import torch
import torch.distributed as dist
from grids import NO_GROUPS
from pool import slow
from torch import nn

import collectives
import dp
from collectives import ALONE
from dp import Bucket, assign_to_buckets
from param import Spec, parameter
from run.meter import Meter


class Unit(nn.Module):
    """A unit of parameters with these specs."""

    def __init__(self, *specs: Spec, groups=NO_GROUPS, dtype=torch.float64):
        super().__init__()
        self.weights = nn.ParameterList(parameter(spec, groups, dtype) for spec in specs)


def names(buckets: list[list[nn.Parameter]]) -> list[list[str]]:
    return [[p.spec.name for p in bucket] for bucket in buckets]


def test_whole_units_share_a_bucket_until_it_is_large_enough():
    units = [Unit(Spec(f"{i}.a", (100, 100)), Spec(f"{i}.b", (100,))) for i in range(5)]  # 80.8 kB each, in fp64
    assert names(assign_to_buckets({0: units}, 0, {})) == [[f"{i}.a", f"{i}.b"] for i in range(5)]
    pairs = [["0.a", "0.b", "1.a", "1.b"], ["2.a", "2.b", "3.a", "3.b"], ["4.a", "4.b"]]
    assert names(assign_to_buckets({0: units}, 0.1, {})) == pairs
    assert len(assign_to_buckets({0: units}, 25, {})) == 1
    assert len(assign_to_buckets({0: units[:2], 1: units[2:]}, 25, {})) == 2, "stages never share a bucket"


def test_buckets_have_as_many_gradients_in_16_bits_as_in_fp32():
    """Gradients are in fp32 in both, so messages are as large."""
    whole, half = ([Unit(Spec(f"{i}", (100, 100)), dtype=dtype) for i in range(6)]
                   for dtype in (torch.float32, torch.bfloat16))  # 40 kB of gradients each
    assert names(assign_to_buckets({0: half}, 0.07, {})) == names(
        assign_to_buckets({0: whole}, 0.07, {})) == [
        ["0", "1"], ["2", "3"], ["4", "5"]]


def test_what_is_shared_or_different_is_apart():
    table = Spec("table", (7, 3))
    first = Unit(table, Spec("a", (3,)))
    last = Unit(Spec("b", (3,)), Spec("expert", (4, 3), {"ep": 0}, "edp"), Spec("twin", (2, 3), {"tie": "partial"}),
                groups=NO_GROUPS | {"ep": ALONE, "edp": ALONE})
    last.weights.append(first.weights[0])
    assert names(assign_to_buckets({0: [first, last]}, 25, {})) == [["table"], ["twin"], ["a", "b"], ["expert"]]


def test_a_parameter_gets_a_gradient_from_each_stage_that_uses_it():
    """However many of the stage's units do."""
    first, last = Unit(Spec("table", (7, 3)), Spec("a", (3,))), Unit(Spec("b", (3,)))
    last.weights.append(first.weights[0])
    for units, grads in ({0: [first, last]}, 1), ({0: [first], 1: [last]}, 2):
        table, *others = assign_to_buckets(units, 25, {})
        assert list(table.values()) == [grads] and {n for bucket in others for n in bucket.values()} == {1}


# ---- what a step sends ----------------------------------------------------------------------------------------------

def elements_sent(flags: str) -> tuple[int, int, float, list[str]]:
    """Of one step: gradient reductions, parameters, elements a rank sends for them, the names of all collectives."""
    world = dist.get_world_size()
    settings = grids.settings_of(flags, world)
    groups, model, optimizer = grids.build(settings)
    collectives.sent.clear()
    with Meter(memory=False) as meter:
        grids.forward_backward(settings, groups, model, optimizer, *grids.batches(settings)[0])
    sizes = [torch.Size(call.shape).numel() for call in meter.collectives if call.name == "allreduce_"]
    gradients = [count for count in sizes if count > 1]
    sent = sum(gradients) * 2 * (world - 1) / world
    counted = collectives.sent["dp"] / 8
    assert abs(counted - sent) <= len(sizes), "the bytes in the metrics are those that were dispatched, rounded down"
    return len(gradients), sum(p.numel() for p in model.parameters()), sent, [call.name for call in meter.collectives]


@pytest.mark.parametrize("ranks", [2, 3, *slow(4, 8)])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_step_sends_2P_once_whatever_the_micro_batches(pool, ranks, accumulated):
    flags = f"--micro-batch {48 // ranks // accumulated} --bucket-mb 0 --ffn 53"  # sizes no number of ranks divides
    for reductions, parameters, sent, calls in pool.run(ranks, "test_dp:elements_sent", flags=flags):
        assert reductions == 5, "embedding, three blocks, head"
        assert sent == 2 * parameters * (ranks - 1) / ranks
        assert set(calls) == {"allreduce_"}


def order_of_events() -> list[str]:
    """Gradients as they arrive and reductions as they are started, in one step of two micro-batches."""
    groups = NO_GROUPS | {"world": grids.everyone(), "data": grids.everyone(), "dp": grids.everyone()}
    events = []

    class LoggedBucket(Bucket):
        def ready(self, param):
            events.append(param.spec.name)
            super().ready(param)

        def reduction(self):
            events.append(f"send {self.name}")
            yield from super().reduction()

    units = [Unit(Spec(f"layers.{i}", (4, 4))) for i in range(3)]
    buckets = [LoggedBucket(params, groups) for params in assign_to_buckets({0: units}, 0, {})]
    for unit in units:
        unit.weights[0].data = torch.eye(4, dtype=torch.float64)
    for bucket in buckets:
        bucket.begin_step(2)
    for _ in range(2):
        x = torch.ones(4, dtype=torch.float64)
        for unit in units:
            x = unit.weights[0] @ x
        x.sum().backward()
    for bucket in buckets:
        events.append("finish")
        bucket.finish_step()
    return events


def test_a_bucket_is_sent_by_its_last_gradient_before_backward_ends(pool):
    for events in pool.run(2, "test_dp:order_of_events"):
        assert events == ["layers.2", "layers.1", "layers.0",
                          "layers.2", "send layers.2", "layers.1", "send layers.1", "layers.0", "send layers.0",
                          "finish", "finish", "finish"]


def demo() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        dp.demo(grids.everyone())
    return printed.getvalue()


def test_the_demo_sends_each_gradient_or_three_together_as_soon_as_they_are_complete(pool):
    first, *others = pool.run(3, "test_dp:demo")
    nbytes = 2 * 2 * 64 * 64 * 8 // 3  # of one layer, all-reduced by 3 ranks
    for line, sent in zip(first.splitlines(), ((1, 2, 3, 4, 5, 6), (0, 0, 3, 3, 3, 6)), strict=True):
        found = re.findall(r"g(\d) +([\d,]+)", line)
        assert [name for name, _ in found] == list("654321")
        assert [int(count.replace(",", "")) for _, count in found] == pytest.approx([n * nbytes for n in sent], abs=6)
    assert not any(others)


def sums_of_two_steps() -> list[list[float]]:
    """Of a parameter whose gradient is 1 on rank 0 and 10 on rank 1, in each of two micro-batches."""
    unit, sums = Unit(Spec("a", (3,))), []
    unit.weights[0].data = torch.ones(3, dtype=torch.float64)
    bucket = Bucket({unit.weights[0]: 1}, NO_GROUPS | {"dp": grids.everyone()})
    for _ in range(2):
        bucket.begin_step(2)
        for _ in range(2):
            (unit.weights[0].sum() * 10 ** dist.get_rank()).backward()
        bucket.finish_step()
        sums.append(bucket.grad.tolist())
    return sums


def test_each_step_sums_over_ranks_and_micro_batches_and_begins_at_zero(pool):
    assert pool.run(2, "test_dp:sums_of_two_steps") == [[[22.0] * 3] * 2] * 2
