"""Data parallelism in three ways; what is in a bucket, and how much is sent. tests/test_zero.py shows when."""
import contextlib
import io
import re

import grids
import pytest
import sharding
import torch
from grids import NO_GROUPS
from sharding import Unit
from torch import nn
from watch import in_order

import dp
from core.collectives import ALONE
from core.param import Spec, parameter
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
    units = [Unit(Spec(f"{i}.matrix", (3, 3)), Spec(f"{i}.vector", (3,))) for i in range(2)]
    apart = [["0.matrix", "1.matrix"], ["0.vector", "1.vector"]]
    assert names(assign_to_buckets({0: units}, 25, {}, kind=lambda spec: len(spec.shape))) == apart


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
    for seen in pool.run(3, sharding.sent, flags=flags, dtype=torch.bfloat16):
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


# ---- naive, per parameter, in buckets --------------------------------------------------------------------------------

def make_model() -> nn.Sequential:
    """Two layers with a nonlinearity between them."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7, device="meta"), nn.Tanh(), nn.Linear(7, 3, device="meta"))
    for name, shape in (("0.weight", (7, 5)), ("0.bias", (7,)), ("2.weight", (3, 7)), ("2.bias", (3,))):
        param = parameter(Spec(name, shape), {}, torch.float64)
        param.data = torch.randn(shape, generator=generator, dtype=torch.float64)
        layer, attribute = name.split(".")
        setattr(model[int(layer)], attribute, param)
    return model


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two micro-batches of a rank: the ranks have different numbers of rows, and so have the micro-batches."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [(torch.randn(rows, 5, generator=generator, dtype=torch.float64),
             torch.randn(rows, 3, generator=generator, dtype=torch.float64)) for rows in (1 + rank, 4)]


def rows_of(ranks: int) -> int:
    return sum(len(inputs) for rank in range(ranks) for inputs, _ in batches(rank))


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().sum()


STEPS = {"naive": dp.naive_step, "per parameter": dp.overlapped_step, "in buckets": dp.bucketed_step}


def trained(way: str) -> list[list[torch.Tensor]]:
    """The gradients of three steps of SGD, then the weights."""
    group, model = grids.everyone(), make_model()
    params, found = list(model.parameters()), []
    settings = dict(group=group)
    if way == "in buckets":
        buckets = [Bucket(assigned, {"dp": group}) for assigned in assign_to_buckets({0: list(model)}, 1, {})]
        settings = dict(buckets=buckets)
    for _ in range(3):
        STEPS[way](model, squares, batches(group.rank), rows_of(group.size), **settings)
        grads = [param.sink.main_grad(param) if param.sink else param.grad for param in params]
        found.append([grad.clone() for grad in grads])
        with torch.no_grad():
            for param, grad in zip(params, grads):
                param.sub_(grad, alpha=0.1)
    return [*found, [param.detach() for param in params]]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("way", STEPS)
def test_each_way_trains_as_one_process_does(pool, way, ranks):
    """With all rows in one batch, and torch's own mean over them."""
    model = make_model()
    rows = [batch for rank in range(ranks) for batch in batches(rank)]
    inputs, targets = (torch.cat(part) for part in zip(*rows))
    optimizer, want = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        (3 * nn.functional.mse_loss(model(inputs), targets)).backward()  # torch's mean is over the 3 columns, too
        want.append([param.grad.clone() for param in model.parameters()])
        optimizer.step()
    want.append([param.detach() for param in model.parameters()])
    for found in pool.run(ranks, trained, way=way):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


def demo() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        dp.demo(grids.everyone())
    return printed.getvalue()


def test_the_demo_shows_when_each_way_begins_to_send(pool):
    """Before the backward of layers 6 to 1 and at the end: so many layers' gradients, in so many messages."""
    first, *others = pool.run(3, demo)
    nbytes = 2 * 2 * 64 * 64 * 8 // 3  # of one layer, all-reduced by 3 ranks
    for way, sent, messages in (("naive", [0, 0, 0, 0, 0, 0, 6], 6), ("per parameter", [0, 1, 2, 3, 4, 5, 6], 6),
                                ("in buckets", [0, 0, 0, 3, 3, 3, 6], 2)):
        line, = re.findall(f"^{way} +([\\d, ]+)$", first, re.MULTILINE)
        *found, count = (int(number.replace(",", "")) for number in line.split())
        assert found == pytest.approx([n * nbytes for n in sent], abs=6) and count == messages, way
    assert not any(others)
