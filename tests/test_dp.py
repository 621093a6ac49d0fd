"""Buckets: what is in them, and how much is sent; tests/test_zero.py shows when."""
import contextlib
import io
import re

import grids
import pytest
import torch
from grids import NO_GROUPS
from sharding import Unit
from torch import nn
from watch import in_order

import dp
from core.collectives import ALONE
from core.param import Spec
from dp import Bucket, assign_to_buckets
from run import dryrun


def names(buckets: list[list[nn.Parameter]]) -> list[list[str]]:
    return [[p.spec.name for p in bucket] for bucket in buckets]


def test_whole_units_share_a_bucket_until_it_is_large_enough():
    units = [Unit(Spec(f"{i}.a", (100, 100)), Spec(f"{i}.b", (100,))) for i in range(5)]  # 40.4 kB each
    assert names(assign_to_buckets({0: units}, 0, {})) == [[f"{i}.a", f"{i}.b"] for i in range(5)]
    pairs = [["0.a", "0.b", "1.a", "1.b"], ["2.a", "2.b", "3.a", "3.b"], ["4.a", "4.b"]]
    assert names(assign_to_buckets({0: units}, 0.05, {})) == pairs
    assert len(assign_to_buckets({0: units}, 25, {})) == 1
    assert len(assign_to_buckets({0: units[:2], 1: units[2:]}, 25, {})) == 2, "stages never share a bucket"


def test_buckets_have_as_many_gradients_in_16_bits_as_in_fp32():
    """Gradients are in fp32 in both, so messages are as large."""
    for dtype in torch.float32, torch.bfloat16:
        units = [Unit(Spec(f"{i}", (100, 100)), dtype=dtype) for i in range(6)]  # 40 kB of gradients each
        assert names(assign_to_buckets({0: units}, 0.07, {})) == [["0", "1"], ["2", "3"], ["4", "5"]]


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


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_step_sends_2P_once_whatever_the_micro_batches(pool, accumulated):
    """Times (n-1)/n, by one all-reduce of each bucket."""
    flags = f"--zero 0 --global-batch {3 * accumulated} --micro-batch 1"
    for seen in pool.run(3, "sharding:sent", flags=flags, dtype=torch.bfloat16):
        assert seen["by_op"] == {"allreduce_": 2 * sum(seen["padded"]) * 4, "_reduce_scatter_base_": 0,
                                 "_allgather_base_": 0} and not seen["others"] and len(seen["padded"]) == 6


def test_a_bucket_is_sent_by_its_last_gradient_before_backward_ends():
    """In the last of two micro-batches."""
    units = [Unit(Spec(f"layers.{i}", (4, 4))) for i in range(3)]
    with dryrun.fake_world(2, 0), in_order((Bucket, "ready", lambda bucket, param: param.spec.name),
                                           (Bucket, "start_reduction", lambda bucket: f"send {bucket.name}")) as events:
        groups = NO_GROUPS | {"dp": grids.everyone()}
        buckets = [Bucket(params, groups) for params in assign_to_buckets({0: units}, 0, {})]
        for unit, bucket in zip(units, buckets):
            unit.weights[0].data = torch.eye(4)
            bucket.begin_step(2)
        for _ in range(2):
            x = torch.ones(4)
            for unit in units:
                x = unit.weights[0] @ x
            x.sum().backward()
        events.append("finish")
        for bucket in buckets:
            bucket.finish_step()
    assert events == ["layers.2", "layers.1", "layers.0", "layers.2", "send layers.2", "layers.1", "send layers.1",
                      "layers.0", "send layers.0", "finish"]


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
