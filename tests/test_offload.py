"""Offloading changes no bit; copies are in order, one block ahead; on a fake GPU, bytes are where they belong."""
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import grids
import pairs
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

import recompute
import train
from core import rules
from core.param import DTYPES
from run import offload
from run.data import MicroBatch
from run.meter import Meter

MODEL = f"{grids.TINY} --layers 4 --vocab 61 --seq-len 16 --global-batch 4 --micro-batch 2 --warmup 0 --data {__file__}"


def build(flags: str) -> tuple:
    return grids.build(rules.parse(f"{MODEL} {flags}".split()))[1:]


def micro_batches(device: str = "cpu") -> list[MicroBatch]:
    tokens = torch.arange(2 * 2 * 16, device=device).view(2, 2, 16) % 61
    return [MicroBatch(one, one.roll(-1, 1), None, None) for one in tokens]


def train_steps(flags: str) -> list[torch.Tensor]:
    """Losses, weights and the optimizer's state."""
    model, pipeline, optimizer = build(flags)
    losses = []
    for _ in range(2):  # the second one begins with what the first one has copied
        losses.append(train.forward_backward(model, pipeline, optimizer, micro_batches(), grids.NO_GROUPS))
        optimizer.step(0.01)
    return [*losses, *(flat for bucket in optimizer.buckets for flat in (bucket.weights, *bucket.state.values()))]


@pytest.mark.parametrize("grid, what", [("--layers 1 --zero 1", "optimizer"), ("--layers 1 --zero 3", "optimizer"),
                                        ("--pp 2 --layers 4 --recompute full", "activations")])
def test_offloaded_shards_train_to_the_same_bits(pool, grid, what):
    """Stages of a pipeline fetch the inputs of one forward, not those of the forward before."""
    grid = f"--micro-batch 12 --dtype bf16 {grid} --offload"
    here, there = (pool.run(2, grids.run, grid=f"{grid} {where}") for where in ("none", what))
    assert [rank["visible"] for rank in here] == [rank["visible"] for rank in there]
    for name in ("params", "m", "v"):
        wants, found = (grids.whole([rank[name] for rank in ranks]) for ranks in (here, there))
        assert all(torch.equal(found[name], want) for name, want in wants.items())


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


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """Of late copies. A copy is named by the sum of what is copied, or by the copy that comes first."""
    events, on_host = [], []

    def zeros(shape, dtype, device) -> torch.Tensor:
        on_host.append(torch.zeros(shape, dtype=dtype))
        return on_host[-1]

    def start_copy(target: torch.Tensor, source: torch.Tensor, after: LateCopy | None = None) -> LateCopy:
        def copy() -> None:
            if after:
                after.copy()
            target.copy_(source)

        what = after.what if after else f"{source.sum().item():g}"
        to_host = any(x.untyped_storage().data_ptr() == target.untyped_storage().data_ptr() for x in on_host)
        events.append(f"{'save' if to_host else 'fetch'} {what}")
        return LateCopy(events, what, copy)

    monkeypatch.setattr(offload, "host_zeros", zeros)
    monkeypatch.setattr(offload, "start_copy", start_copy)
    return events


@pytest.mark.parametrize("dtype", [f"bf16 --moments-dtype bf16 --fp8 blockwise {pairs.WIDE.format(64)}", "fp32",
                                   "fp16 --optimizer muon"], ids=["bf16 moments, fp8", "fp32", "fp16, muon"])
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
    calls, streams, names = [], ["kernels"], iter(["out", "in"])  # nobody asks for a third one

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

    monkeypatch.setattr(offload, "stream_of", cache(offload.stream_of.__wrapped__))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(next(names)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    gpu, host = Memory(True), Memory(False)
    for _ in range(2):
        saved = offload.start_copy(host, gpu)
        offload.start_copy(gpu, host, after=saved).wait()
    assert calls == 2 * [
        "out waits for kernels", "out copies while the host goes on", "out keeps the GPU's memory",
        "in waits for kernels", "in waits for what was copied out", "in copies while the host goes on",
        "in keeps the GPU's memory", "kernels waits for what was copied in"]


def test_memory_of_the_host_is_pinned_for_a_gpu(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "zeros", lambda *args, pin_memory, **how: asked.append(pin_memory))
    for device in "cuda", "cpu":
        offload.host_zeros(4, torch.float32, torch.device(device))
    assert asked == [True, False]


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
    *_, optimizer = build("--dtype fp32 --bucket-mb 0 --offload optimizer --optimizer sgd --grad-clip 0 --weight-decay "
                         "0")
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


def test_an_offloaded_update_has_the_cores_of_the_host_divided_by_its_ranks(monkeypatch):
    """Under torchrun a rank has one thread. Nobody gets fewer threads than before."""
    monkeypatch.setattr(offload, "host_zeros", lambda shape, dtype, device: torch.zeros(shape, dtype=dtype))
    monkeypatch.setattr(offload.os, "sched_getaffinity", lambda process: range(7))
    monkeypatch.setattr(torch, "get_num_threads", lambda: asked[-1])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: asked.append(count))
    for device, before, ranks, want in (("cuda", 1, 2, 3), ("cuda", 1, 8, 1), ("cuda", 4, 2, 4), ("cpu", 1, 2, 1)):
        asked = [before]
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        weights = torch.zeros(4)
        offload.OffloadedState(SimpleNamespace(device=torch.device(device), weight_shard=weights, weights=weights,
                                               acc_dtype=weights.dtype))
        assert asked[-1] == want, (device, before, ranks)


# ---- live bytes by device -------------------------------------------------------------------------------------------

class ByDevice(Meter):
    """Labels what an operation brings by its device."""

    def saw_new(self, args, kwargs, out) -> bool:
        self.kind = next((leaf.device.type for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)), "other")
        return super().saw_new(args, kwargs, out)


def bytes_by_device(flags: str) -> tuple[Counter, dict[str, int], int]:
    """(live bytes of a step's peak by device, where "meta" stands in for a GPU; the formula's by kind; parameters)."""
    settings = rules.parse(f"{MODEL} --attention math {flags}".split())
    with FakeTensorMode(), ByDevice() as meter:
        _, model, pipeline, optimizer = grids.build(settings, device="meta", filled=False)
        train.forward_backward(model, pipeline, optimizer, micro_batches("meta")[:1], grids.NO_GROUPS)
        optimizer.step(0.01)
    return meter.at_peak, grids.memory_of_rank(settings, {}, fused=False), sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("dtype, state, at_host", [("bf16", 12, 12 + 4 + 2), ("fp32", 8, 12 + 4 + 4)])
def test_what_is_offloaded_is_on_the_host(dtype, state, at_host):
    """Bytes of each parameter, and all inputs of blocks but two, leave the GPU, as the formula says. The host also has
    copies of gradients and weights, and in fp32 master weights, which without offloading are the weights."""
    flags, inputs = f"--dtype {dtype} --recompute full --offload ", 4 * 2 * 16 * 32 * DTYPES[dtype].itemsize
    (none, formula, count), (optimizer, without_state, _), (activations, without_inputs, _) = (
        bytes_by_device(flags + what) for what in ("none", "optimizer", "activations"))
    assert none["meta"] - optimizer["meta"] == formula["optimizer"] == state * count
    assert without_state["optimizer"] == 0 and optimizer["cpu"] - none["cpu"] == at_host * count
    assert none["meta"] - activations["meta"] == inputs // 2
    assert formula["activations"] - without_inputs["activations"] == inputs // 2
    assert activations["cpu"] - none["cpu"] == inputs


def test_inputs_of_blocks_are_offloaded_in_shards_with_and_without_sequence_parallelism():
    """Of 4 blocks' inputs, 2 stay; each rank of 2 has half of every one: 64 tokens of 32 numbers of 4 bytes."""
    flags = ("--layers 4 --hidden 32 --heads 2 --ffn 32 --seq-len 64 --global-batch 1 --dtype fp32 --tp 2 "
             "--recompute full")
    for sp in ("--sp on", "--sp off"):
        none, activations = (sum(grids.memory_of_rank(rules.parse(f"{flags} {sp} --offload {what}".split(), 2), {},
                                                      fused=True).values()) for what in ("none", "activations"))
        assert none - activations == (4 - 2) * 64 * 32 * 4 / 2
