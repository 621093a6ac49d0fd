"""Offloading changes no bit; copies are in order, one block ahead; on a fake GPU, bytes are where they belong."""
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import grids
import pytest
import sharding
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

import config
import recompute
import train
from run import offload
from run.data import MicroBatch
from run.meter import Meter

MODEL = ("--layers 4 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --vocab 61 --seq 16 --global-batch 4 --micro-batch 2 "
         "--warmup 0 --data " + __file__)


def build(flags: str) -> tuple:
    return grids.build(config.parse(f"{MODEL} {flags}".split()))[1:]


def micro_batches(device: str = "cpu") -> list[MicroBatch]:
    tokens = torch.arange(2 * 2 * 16, device=device).view(2, 2, 16) % 61
    return [MicroBatch(one, one.roll(-1, 1), None, None) for one in tokens]


def train_steps(flags: str) -> list[torch.Tensor]:
    """Losses, weights and the optimizer's state."""
    model, optimizer = build(flags)
    losses = []
    for _ in range(2):  # the second one begins with what the first one has copied
        losses.append(train.forward_backward(model, optimizer, micro_batches(), grids.NO_GROUPS))
        optimizer.step(0.01)
    return [*losses, *(flat for bucket in optimizer.buckets for flat in (bucket.weights, *bucket.state.values()))]


def equal_on_ranks() -> list[bool]:
    """For levels 1 and 3: whether two steps with and without offload give equal weights, master weights and moments."""
    found = []
    for level in (1, 3):
        states = []
        for what in ("none", "optimizer"):
            flags = f"--zero {level} --layers 1 --global-batch 2 --micro-batch 1 --offload {what}"
            groups, model, optimizer, share = sharding.built(flags, torch.bfloat16)
            for _ in range(2):
                train.forward_backward(model, optimizer, share, groups)
                optimizer.step(0.01)
            for bucket in optimizer.buckets:
                bucket.unshard()
            states.append([flat for bucket in optimizer.buckets for flat in (bucket.weights, *bucket.state.values())])
        found.append(all(map(torch.equal, *states)))
    return found


def test_offloaded_shards_train_to_the_same_bits(pool):
    assert pool.run(2, "test_offload:equal_on_ranks") == [[True, True]] * 2


# ---- order ----------------------------------------------------------------------------------------------------------

class LateCopy:
    """A copy on a GPU at the latest possible moment: when somebody waits for it."""

    def __init__(self, events: list[str], what: str, copy: Callable):
        self.events, self.what, self.copy = events, what, cache(copy)

    def wait(self) -> None:
        self.events.append(f"kernels wait for {self.what}")
        self.copy()

    def synchronize(self) -> None:
        self.events.append(f"host waits for {self.what}")
        self.copy()


class LateCopies:
    """Names a copy by the sum of what is copied, or by the copy that comes first."""

    def __init__(self):
        self.events, self.on_host = [], []

    def zeros(self, shape, dtype, device) -> torch.Tensor:
        self.on_host.append(torch.zeros(shape, dtype=dtype))
        return self.on_host[-1]

    def start_copy(self, target: torch.Tensor, source: torch.Tensor, after: LateCopy | None = None) -> LateCopy:
        def copy() -> None:
            if after:
                after.copy()
            target.copy_(source)

        what = after.what if after else f"{source.sum().item():g}"
        to_host = any(x.untyped_storage().data_ptr() == target.untyped_storage().data_ptr() for x in self.on_host)
        self.events.append(f"{'save' if to_host else 'fetch'} {what}")
        return LateCopy(self.events, what, copy)


@pytest.fixture
def events(monkeypatch) -> list[str]:
    late = LateCopies()
    monkeypatch.setattr(offload, "host_zeros", late.zeros)
    monkeypatch.setattr(offload, "start_copy", late.start_copy)
    return late.events


@pytest.mark.parametrize("dtype", ["bf16 --moments bf16", "fp32", "bf16 --optimizer muon"])
def test_offloading_changes_no_bit(dtype, request):
    """Whether copies are made at once or as late as can be."""
    flags = f"--recompute full --dtype {dtype}"
    states = [train_steps(flags), train_steps(f"{flags} --offload both")]
    events = request.getfixturevalue("events")
    states.append(train_steps(f"{flags} --offload both"))
    assert {event.split()[0] for event in events} == {"save", "fetch", "kernels", "host"}
    for there in states[1:]:
        assert all(map(torch.equal, states[0], there))


def test_each_direction_has_a_stream_which_waits_for_kernels_and_for_the_copy_named(monkeypatch):
    """On stand-ins for a GPU's streams and memory, which list what they are asked for."""
    calls, streams = [], ["kernels"]

    class Stream(NamedTuple):
        name: str

        def wait_stream(self, other: str) -> None:
            calls.append(f"{self.name} waits for {other}")

        def record_event(self) -> SimpleNamespace:
            return SimpleNamespace(wait=lambda: calls.append(f"{streams[-1]} waits for what was copied {self.name}"))

    class Memory(NamedTuple):
        is_cuda: bool
        device: str = "cuda"

        def copy_(self, source: "Memory", non_blocking: bool) -> None:
            calls.append(f"{streams[-1]} copies" + " while the host goes on" * non_blocking)

        def record_stream(self, stream: Stream) -> None:
            calls.append(f"{stream.name} keeps the {'GPU' if self.is_cuda else 'host'}'s memory")

    @contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        streams.append(stream.name)
        yield
        streams.pop()

    monkeypatch.setattr(offload, "stream_of", lambda device, to_host: Stream("out" if to_host else "in"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    gpu, host = Memory(True), Memory(False)
    saved = offload.start_copy(host, gpu)
    offload.start_copy(gpu, host, after=saved).wait()
    assert calls == [
        "out waits for kernels", "out copies while the host goes on", "out keeps the GPU's memory",
        "in waits for kernels", "in waits for what was copied out", "in copies while the host goes on",
        "in keeps the GPU's memory", "kernels waits for what was copied in"]


def test_copies_of_one_direction_share_a_stream_and_memory_of_the_host_is_pinned(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(offload, "stream_of", cache(offload.stream_of.__wrapped__))
    first, second = torch.device("cuda:6"), torch.device("cuda:7")
    streams = {offload.stream_of(device, to_host) for device in 2 * (first, second) for to_host in (False, True)}
    assert len(streams) == 4
    asked = []
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: asked.append(kwargs))
    for device in first, torch.device("cpu"):
        offload.host_zeros(4, torch.float32, device)
    assert asked == [dict(dtype=torch.float32, pin_memory=True), dict(dtype=torch.float32, pin_memory=False)]


def test_checkpoints_return_one_block_ahead(events):
    """The input of the block before is fetched before a block runs again, and waited for only when its turn comes."""
    recomputing, x = recompute.Recompute("full", slots=3, rows=offload.HostRows), torch.ones(1, requires_grad=True)
    y = x
    for factor in (2, 3, 5):
        y = recomputing(lambda x, factor=factor: (events.append(f"times {factor}"), x * factor)[1], y)
    y.backward()
    assert x.grad == 30 and events == [
        "save 1", "times 2", "save 2", "times 3", "save 6", "times 5",
        "fetch 6", "kernels wait for 6", "fetch 2", "times 5",
        "kernels wait for 2", "fetch 1", "times 3", "kernels wait for 1", "times 2"]


def test_two_micro_batches_fetch_their_own_checkpoints(events):
    """As in a pipeline, where forwards of other micro-batches run before a backward."""
    recomputing = recompute.Recompute("full", slots=4, rows=offload.HostRows)
    inputs, outputs = [torch.full((1,), float(value), requires_grad=True) for value in (1, 10)], []
    for x in inputs:
        recomputing.start_forward()
        outputs.append(recomputing(lambda x: x * x, recomputing(lambda x: x * 2, x)))
    for y in outputs:
        y.backward()
    assert [x.grad.item() for x in inputs] == [8, 80]
    assert events[4:] == ["fetch 2", "kernels wait for 2", "fetch 1", "kernels wait for 1",
                          "fetch 20", "kernels wait for 20", "fetch 10", "kernels wait for 10"]


def test_gradients_leave_while_the_cpu_updates(events):
    """All are on their way before the first update, and each update waits for its own only."""
    _, optimizer = build("--dtype fp32 --bucket-mb 0 --offload optimizer --optimizer sgd --clip 0 --weight-decay 0")
    optimizer.begin_step(1)
    for number, bucket in enumerate(optimizer.buckets):
        bucket.master.zero_()
        bucket.update_weights()
        bucket.grad[0] = number + 1.0
    events.clear()
    optimizer.step(1.0)
    count = len(optimizer.buckets)
    assert count > 4 and events[:count] == [f"save {number + 1}" for number in range(count)]
    assert events[count:] == [event for number in range(1, count + 1) for event in (
        f"host waits for {number}", "host waits for 0", f"fetch {-number}", f"kernels wait for {-number}")]


# ---- live bytes by device -------------------------------------------------------------------------------------------

class ByDevice(Meter):
    """Labels what an operation brings by its device."""

    def saw_new(self, args, kwargs, out) -> bool:
        self.kind = next((leaf.device.type for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)), "other")
        return super().saw_new(args, kwargs, out)


def bytes_by_device(flags: str) -> tuple[Counter, dict[str, int], int]:
    """(live bytes of a step's peak by device, where "meta" stands in for a GPU; the formula's by kind; parameters)."""
    settings = config.parse(f"{MODEL} --attention math {flags}".split())
    with FakeTensorMode(), ByDevice() as meter:
        _, model, optimizer = grids.build(settings, "bf16", device="meta", filled=False)
        train.forward_backward(model, optimizer, micro_batches("meta"), grids.NO_GROUPS)
        optimizer.step(0.01)
    return meter.at_peak, grids.memory_of_rank(settings, {}, fused=False), sum(p.numel() for p in model.parameters())


def test_what_is_offloaded_is_on_the_host():
    """12 bytes per parameter, and all inputs of blocks but two, leave the GPU, as the formula says."""
    flags, inputs = "--dtype bf16 --recompute full --offload ", 4 * 2 * 16 * 32 * 2
    (none, formula, count), (optimizer, without_state, _), (activations, without_inputs, _) = (
        bytes_by_device(flags + what) for what in ("none", "optimizer", "activations"))
    assert none["meta"] - optimizer["meta"] == formula["optimizer"] == 12 * count and without_state["optimizer"] == 0
    assert optimizer["cpu"] - none["cpu"] == (12 + 4 + 2) * count  # and the copies of gradients and weights
    assert none["meta"] - activations["meta"] == inputs // 2
    assert formula["activations"] - without_inputs["activations"] == inputs // 2
    assert activations["cpu"] - none["cpu"] == inputs


def test_master_weights_are_on_the_host_also_where_the_weights_have_their_dtype():
    with FakeTensorMode():
        settings = config.parse(f"{MODEL} --offload optimizer".split())
        *_, optimizer = grids.build(settings, "fp32", device="meta", filled=False)
        for bucket in optimizer.buckets:
            on_host = {what: flat.device.type for what, flat in bucket.state.items()}
            assert on_host == dict(master="cpu", m="cpu", v="cpu") and bucket.weights.is_meta


def test_inputs_of_blocks_are_offloaded_in_shards_with_and_without_sequence_parallelism():
    """Of 4 blocks' inputs, 2 stay; each rank of 2 has half of every one: 64 tokens of 32 numbers of 4 bytes."""
    flags = "--layers 4 --hidden 32 --heads 2 --ffn 32 --seq 64 --global-batch 1 --dtype fp32 --tp 2 --recompute full"
    for sp in ("--sp on", "--sp off"):
        none, activations = (sum(grids.memory_of_rank(config.parse(f"{flags} {sp} --offload {what}".split(), 2), {},
                                                      fused=True).values()) for what in ("none", "activations"))
        assert none - activations == (4 - 2) * 64 * 32 * 4 / 2
