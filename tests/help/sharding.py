"""Jobs of ranks for tests/test_zero.py. They measure the bytes that a step sends and holds, and
skipped steps."""
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import grids
import torch
import torch.distributed as dist
from watch import in_order

import pp
import train
import zero
from core import collectives
from core.collectives import Pending
from core.param import DTYPES, Spec, parameter
from run import job
from run.faults import INTEGERS
from run.meter import Meter

# Widths are prime, so nothing is divisible. Blocks are the largest units. Tokens are few, so
# activations are small.
PRIMES = ("--layers 4 --hidden 37 --heads 3 --kv-heads 1 --head-dim 6 --ffn 101 --vocab 97 --seq-len 5 --bucket-mb 0 "
          f"--grad-clip 0.1 --data {__file__}")


class Unit(torch.nn.Module):
    """A unit of parameters with these specs. The first two are the matrices of a layer."""

    def __init__(self, *specs: Spec, groups=grids.NO_GROUPS, dtype=torch.float32):
        super().__init__()
        self.weights = torch.nn.ParameterList(parameter(spec, groups, dtype) for spec in specs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weights[0]).tanh() @ self.weights[1]


def built(flags: str, dtype: torch.dtype):
    """Return (groups, model, pipeline, optimizer, this rank's micro-batches of a global batch)."""
    return grids.ready(flags, {v: k for k, v in DTYPES.items()}[dtype], PRIMES)


def sent(flags: str, dtype: torch.dtype) -> dict:
    """Return the bytes of gradients and weights that a second step sends, its other calls, its
    gradients, and the padded sizes of the buckets."""
    groups, model, pipeline, optimizer, share = built(flags, dtype)
    for lr in 0.0, 1e-3:
        with Meter(memory=False) as meter:
            train.forward_backward(model, pipeline, optimizer, share, groups)
            grads = grids.pieces(optimizer, "grad")
            optimizer.step(lr)
    factor = {"allreduce_": 2, "_reduce_scatter_base_": 1, "_allgather_base_": 1}
    buckets = [call for call in meter.collectives if len(call.shape) == 1 and call.shape != (1,)]  # not the norm
    by_op = {op: sum(call.bytes for call in buckets if call.name == op) * times for op, times in factor.items()}
    return dict(by_op=by_op, others={call.name for call in meter.collectives} - factor.keys(), grads=grads,
                padded=[bucket.numel for bucket in optimizer.buckets])


def wait_and_settle(pending: Pending, wait=Pending.wait) -> torch.Tensor:
    """Wait until gloo's threads have also released the tensors, which they hold a moment longer."""
    seconds, result = 0.01 * bool(pending.works), wait(pending)
    time.sleep(seconds)
    return result


@patch.object(Pending, "wait", wait_and_settle)
def held(flags: str, dtype: torch.dtype) -> dict:
    """Return live bytes by kind: at rest after a step, and the peak of a second step."""
    groups, model, pipeline, optimizer, share = built(flags, dtype)
    meter = Meter()
    exact = torch.promote_types(dtype, torch.float32)
    for bucket in optimizer.buckets:  # what exists before the first step
        meter.label("weights", bucket.weights, bucket.weight_shard)
        meter.label_size("gradients", bucket.numel * exact.itemsize)
        if isinstance(bucket, zero.Level2Bucket):  # level 3 is its subclass
            meter.label("gradient shards", bucket.grad_shard)
            meter.label_size("gradient shards", (bucket.shard.stop - bucket.shard.start) * exact.itemsize)
        else:
            meter.label("gradients", bucket.grad)
        for state in bucket.state.values():
            if state.untyped_storage().data_ptr() != bucket.weight_shard.untyped_storage().data_ptr():
                meter.label("optimizer", state)
    del bucket, state
    with meter:
        train.forward_backward(model, pipeline, optimizer, share, groups)
        optimizer.step(1e-3)
    for bucket in optimizer.buckets:  # let the last all-gather of levels 1 and 2 arrive
        bucket.unshard()
        bucket.reshard()
    rest, meter.peak = meter.settled(), type(meter.peak)()
    with meter:
        train.forward_backward(model, pipeline, optimizer, share, groups)
        optimizer.step(1e-3)
    return dict(rest=rest, peak=meter.peak, padded=[bucket.numel for bucket in optimizer.buckets])


@contextmanager
def late_collectives() -> Iterator[None]:
    """Let every asynchronous collective deliver its result only when it is waited for, and check
    its inputs.

    The inputs must be unchanged since the start of the collective. Until the wait, the result is
    NaN, a different NaN on each rank.

    gloo is so fast in these tests that results nearly always arrive before anything waits, which
    hides a missing wait.
    """
    def spoil(out: torch.Tensor) -> None:
        out.fill_(torch.nan if out.is_floating_point() else 1)
        out.view(INTEGERS[out.element_size()]).add_(dist.get_rank())

    class Late(collectives.Pending):
        def __init__(self, work, *tensors, call=None):
            super().__init__(work, *tensors, call=call)
            self.late, self.inputs = None, []
            if call and call.operation == "send":  # it may end only after the receive, below, has been called
                self.inputs = [(x, x.clone()) for x in tensors]
            elif work is not None and call.operation != "receive":
                for one in self.works:
                    one.wait()
                self.works = []  # gloo's sends and receives can be waited for once
                out, *inputs = tensors
                given = [(x, x.clone()) for x in inputs]
                self.inputs = [(x, was) for x, was in given
                               if x.untyped_storage().data_ptr() != out.untyped_storage().data_ptr()]
                self.late = out, out.clone()
                spoil(out)
                if call.operation == "all_gather":
                    for x, was in given:  # a rank already has its own part if it is a view of the result
                        x.copy_(was)

        def check_inputs(self):
            assert all(torch.equal(x, was) for x, was in self.inputs), "an input of a collective that is under way"
            self.inputs = []

        def completed(self):
            ended = super().completed()
            if ended:
                self.check_inputs()
            return ended

        def wait(self):
            self.check_inputs()
            result = super().wait()
            if self.late:
                self.late[0].copy_(self.late[1])
            self.late = None
            return result

    def receive(x, peer, group):
        hidden = torch.empty_like(x)
        pending = collectives.receive(hidden, peer, group)
        pending.late = x, hidden
        spoil(x)
        return pending

    with patch.object(collectives, "Pending", Late), patch.object(pp, "receive", receive):
        yield


def delayed(flags: str) -> dict:
    """Run the steps of a grid with late collectives."""
    with late_collectives():
        return grids.run(flags)


def unread(flags: str) -> list[tuple[str, str, bool]]:
    """Return (operation, axis, whether this rank reads the result) of each collective of a step
    that delivers numbers.

    The step is repeated. Each time the result of another collective is NaN. If the result is read,
    the loss, a router's loss or a gradient becomes NaN.
    """
    groups, model, pipeline, optimizer, share = grids.ready(flags)
    spoilt, calls = -1, []  # the number of the call whose result is NaN; the calls of this step

    class Spoilt(collectives.Pending):
        def __init__(self, work, result, *inputs, call=None):
            super().__init__(work, result, *inputs, call=call)
            self.is_spoilt = False
            if call and call.operation != "send" and result.is_floating_point():
                self.is_spoilt = len(calls) == spoilt
                calls.append(call)
                if self.is_spoilt and not self.works:  # it has ended
                    result.fill_(torch.nan)

        def wait(self):
            result = super().wait()
            return result.fill_(torch.nan) if self.is_spoilt else result

    def is_finite() -> bool:
        calls.clear()
        loss = train.forward_backward(model, pipeline, optimizer, share, groups)
        seen = [loss, *(bucket.grad_shard for bucket in optimizer.buckets), *(router.loss for router in model.routers)]
        finite = all(x.isfinite().all() for x in seen)
        for router in model.routers:
            router.loss.zero_()
        return finite

    with patch.object(collectives, "Pending", Spoilt):
        assert is_finite()
        found = [(call.operation, call.axis) for call in calls]
        for spoilt in range(len(found)):
            found[spoilt] += (not is_finite(),)
    return found


def overflow() -> list[tuple]:
    """Train four fp16 steps on a 2 x 2 grid of replicas and shards.

    In step 1 only the gradient of rank 3 is infinite. In step 2 one element of rank 1's shard of
    the sum is infinite.
    """
    groups, model, pipeline, optimizer, share = built(
        "--global-batch 8 --micro-batch 1 --zero 2 --dp-replicate 2 --dtype fp16", torch.float16)
    optimizer.loss_scale.value.fill_(1024.0)
    seen = []
    for step in range(4):
        if step == 1 and dist.get_rank() == 3:
            optimizer.scale_loss = lambda loss: loss * torch.inf
        train.forward_backward(model, pipeline, optimizer, share, groups)
        optimizer.__dict__.pop("scale_loss", None)
        if step == 2 and dist.get_rank() == 1:
            optimizer.buckets[2].grad_shard[7] = torch.inf
        before = [bucket.master.clone() for bucket in optimizer.buckets]
        norm = optimizer.step(1e-2)
        moved = any(not torch.equal(was, bucket.master) for was, bucket in zip(before, optimizer.buckets))
        seen.append((norm.isfinite().item(), moved, optimizer.loss_scale.value.item(), optimizer.steps.item()))
    return seen


def trained(flags: str, dtype=torch.float32, steps=1, lr=1.0, forwards=0) -> tuple[list[tuple], list[int]]:
    """Return the weights after `steps` steps, and the bytes of gathered weights that are left.

    Before each step there are `forwards` forwards without a backward. The bytes are counted after
    the steps, and again after an evaluation.
    """
    groups, model, pipeline, optimizer, share = built(f"--global-batch 8 --micro-batch 2 {flags}", dtype)
    if dtype == torch.float16:
        optimizer.loss_scale.value.fill_(1024.0)
    for _ in range(steps):
        for _ in range(forwards):
            model(share[0].tokens, labels=share[0].labels)
        train.forward_backward(model, pipeline, optimizer, share, groups)
        optimizer.step(lr)
    weights = [bucket.weights.untyped_storage() for bucket in optimizer.buckets]
    left = [sum(storage.nbytes() for storage in weights)]
    job.mean_loss(model, pipeline, [share], groups)
    return grids.pieces(optimizer, "master"), [*left, sum(storage.nbytes() for storage in weights)]


def events(flags: str) -> list[str]:
    """Return the events of a step of two micro-batches that concern gradients, in order.

    They are "ready" when a gradient is accumulated, the name and group of each collective on
    gradients when it is launched, and "finish" when backward has ended.
    """
    groups, model, pipeline, optimizer, share = built(f"--global-batch 16 --micro-batch 2 {flags}", torch.float32)
    axes = {id(group): axis for axis, group in groups.items() if group.size > 1}

    def launched(name):
        return lambda *args, async_op=False: f"{name} {axes.get(id(args[-1]))}{'' if async_op else ' and wait'}"

    with in_order(*((zero, name, launched(name)) for name in ("all_reduce", "reduce_scatter")),
                  (zero.ShardedBucket, "ready", "ready"), (optimizer, "finish_step", "finish")) as seen:
        train.forward_backward(model, pipeline, optimizer, share, groups)
    return seen
