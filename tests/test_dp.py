"""Buckets: what is in them, when they are sent, how much is sent."""
import contextlib
import io
from functools import partial

import grids
import pytest
import torch
import torch.distributed as dist
from grids import ALONE
from pool import slow
from torch import nn

import collectives
import dp
import param
from dp import Bucket, DataParallel, assign_to_buckets
from param import Spec, parameter
from run.meter import Meter


class Unit(nn.Module):
    """A unit of parameters with these specs."""

    def __init__(self, *specs: Spec, groups=ALONE, dtype=torch.float64):
        super().__init__()
        self.weights = nn.ParameterList(parameter(spec, groups, dtype) for spec in specs)


def names(buckets: list[list[nn.Parameter]]) -> list[list[str]]:
    return [[p.spec.name for p in bucket] for bucket in buckets]


def test_whole_units_share_a_bucket_until_it_is_large_enough():
    units = [Unit(Spec(f"{i}.a", (100, 100)), Spec(f"{i}.b", (100,))) for i in range(5)]  # 80.8 kB each, in fp64
    assert names(assign_to_buckets({0: units}, 0)) == [[f"{i}.a", f"{i}.b"] for i in range(5)]
    pairs = [["0.a", "0.b", "1.a", "1.b"], ["2.a", "2.b", "3.a", "3.b"], ["4.a", "4.b"]]
    assert names(assign_to_buckets({0: units}, 0.1)) == pairs
    assert len(assign_to_buckets({0: units}, 25)) == 1
    assert len(assign_to_buckets({0: units[:2], 1: units[2:]}, 25)) == 2, "stages never share a bucket"


def test_buckets_have_as_many_gradients_in_16_bits_as_in_fp32():
    """Gradients are in fp32 in both, so messages are as large."""
    whole, half = ([Unit(Spec(f"{i}", (100, 100)), dtype=dtype) for i in range(6)]
                   for dtype in (torch.float32, torch.bfloat16))  # 40 kB of gradients each
    assert names(assign_to_buckets({0: half}, 0.07)) == names(assign_to_buckets({0: whole}, 0.07)) == [
        ["0", "1"], ["2", "3"], ["4", "5"]]


def test_what_is_shared_or_different_is_apart():
    table = Spec("table", (7, 3))
    first = Unit(table, Spec("a", (3,)))
    last = Unit(Spec("b", (3,)), Spec("expert", (4, 3), {"ep": 0}, "edp"), Spec("twin", (2, 3), {"tie": "partial"}),
                groups=ALONE | {"ep": None, "edp": None})
    last.weights.append(first.weights[0])
    assert names(assign_to_buckets({0: [first, last]}, 25)) == [["table"], ["a", "b"], ["expert"], ["twin"]]
    mixed = Unit(Spec("wide", (3,))), Unit(Spec("narrow", (3,)), dtype=torch.bfloat16)
    assert names(assign_to_buckets({0: list(mixed)}, 25)) == [["wide"], ["narrow"]]


def test_parameters_treated_alike_are_one_span_and_neighbours_stay_neighbours():
    groups = ALONE | {"tp": None}
    unit = Unit(Spec("norm", (4,), {"tp": "partial"}, decay=False), Spec("wq", (8, 4)), Spec("bias", (5,), decay=False),
                Spec("wk", (2, 4)), Spec("wv", (2, 4)), Spec("router", (3, 4), {"tp": "partial"}), groups=groups)
    bucket = Bucket(list(unit.weights), {p: [0] for p in unit.weights}, groups)
    assert [p.spec.name for p in bucket.params] == ["wq", "wk", "wv", "bias", "router", "norm"]
    assert [(start, stop) for start, stop, _ in bucket.spans] == [(0, 48), (48, 53), (53, 65), (65, 69)]
    bucket.begin_step({0: 1})
    wq, wk, wv = (bucket.main_grad(p) for p in bucket.params[:3])
    assert param.stacked_view([wq, wk, wv]).shape == (12, 4)


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
    groups = ALONE | {"world": dist.group.WORLD, "data": dist.group.WORLD, "dp": dist.group.WORLD}
    events = []

    class LoggedBucket(Bucket):
        def ready(self, param):
            events.append(param.spec.name)
            super().ready(param)

        def start_reduction(self):
            events.append(f"send {self.name}")
            super().start_reduction()

        def finish_step(self):
            events.append("finish")
            super().finish_step()

    specs = [Spec(f"layers.{i}", (4, 4)) for i in range(3)]
    units = [Unit(spec) for spec in specs]
    replicas = DataParallel({0: units}, groups, 0, LoggedBucket)
    for unit in units:
        unit.weights[0].data = torch.eye(4, dtype=torch.float64)
    replicas.begin_step({0: 2})
    for _ in range(2):
        x = torch.ones(4, dtype=torch.float64)
        for unit in units:
            x = unit.weights[0] @ x
        x.sum().backward()
    replicas.finish_step()
    return events


def test_a_bucket_is_sent_by_its_last_gradient_before_backward_ends(pool):
    for events in pool.run(2, "test_dp:order_of_events"):
        assert events == ["layers.2", "layers.1", "layers.0",
                          "layers.2", "send layers.2", "layers.1", "send layers.1", "layers.0", "send layers.0",
                          "finish", "finish", "finish"]


def demo() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        dp.demo(dist.group.WORLD)  # asserts that all ways to sum have the same gradients
    return printed.getvalue()


def test_the_demo_sums_naively_per_parameter_and_by_buckets(pool):
    first, *others = pool.run(3, "test_dp:demo")
    nbytes = 6 * (2 * 2 * 64 * 64 * 8 // 3), 2 * (2 * 2 * 3 * 64 * 64 * 8 // 3)  # by layers, and by threes of them
    assert [line.split() for line in first.splitlines()[2:5]] == [line.split() for line in (
        f"naive g6 g5 g4 g3 g2 g1 R6 R5 R4 R3 R2 R1 sends {nbytes[0]:,} bytes",
        f"per parameter g6 R6 g5 R5 g4 R4 g3 R3 g2 R2 g1 R1 sends {nbytes[0]:,} bytes",
        f"bucketed g6 g5 g4 R654 g3 g2 g1 R321 sends {nbytes[1]:,} bytes")] and not any(others)


def sums_over_other_axes() -> dict[str, float]:
    """A 2 x 2 grid (dp, tp), where the ranks' gradients of all parameters are 1, 10, 100, 1000: what each ends with."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = ALONE | {"world": dist.group.WORLD, "dp": mesh.get_group("dp"), "tp": mesh.get_group("tp")}
    unit = Unit(Spec("shard", (4, 1), {"tp": 0}), Spec("replica", (3,), {"tp": "replicate"}),
                Spec("partial", (3,), {"tp": "partial"}), groups=groups)
    replicas = DataParallel({0: [unit]}, groups)
    for p in unit.weights:
        p.data = torch.ones(p.shape, dtype=torch.float64)
    replicas.begin_step({0: 1})
    (sum(p.sum() for p in unit.weights) * 10 ** dist.get_rank()).backward()
    replicas.finish_step()
    return {p.spec.name: p.sink.main_grad(p).unique().tolist() for p in unit.weights}


def test_partial_gradients_are_summed_over_their_axis_and_replicated_ones_are_not(pool):
    for rank, gradients in enumerate(pool.run(4, "test_dp:sums_over_other_axes")):
        over_dp = [101.0] if rank % 2 == 0 else [1010.0]  # ranks 0, 2 and ranks 1, 3
        assert gradients == {"shard": over_dp, "replica": over_dp, "partial": [1111.0]}


def test_buckets_are_finished_in_one_order_and_each_step_begins_at_zero():
    """However a pipeline rank lists its stages."""
    for stages in ("ab", "ba"):
        replicas, finished = DataParallel({stage: [Unit(Spec(stage, (3,)))] for stage in stages}, ALONE), []
        for bucket in replicas.buckets:
            bucket.params[0].data = torch.ones(3, dtype=torch.float64)
            bucket.finish_step = partial(finished.append, bucket.name)
        for _ in range(2):
            replicas.begin_step(dict.fromkeys(stages, 1))
            sum((2 * bucket.params[0]).sum() for bucket in replicas.buckets).backward()
            replicas.finish_step()
            assert [bucket.grad.tolist() for bucket in replicas.buckets] == [[2.0] * 3] * 2
        assert finished == ["a", "b"] * 2


def test_a_gradient_too_few_or_too_many_is_noticed():
    unit = Unit(Spec("a", (3,)), Spec("b", (3,)))
    replicas = DataParallel({0: [unit]}, ALONE)
    for p in unit.weights:
        p.data = torch.ones(3, dtype=torch.float64)
    replicas.begin_step({0: 1})
    unit.weights[0].sum().backward()
    with pytest.raises(AssertionError, match="a and 1 more wait for 1 gradients"):
        replicas.finish_step()
    unit.weights[1].sum().backward()
    replicas.finish_step()
    with pytest.raises(AssertionError, match="more backward passes than the step was begun with"):
        unit.weights[1].sum().backward()
