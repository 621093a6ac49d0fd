r"""A dry run: the training code itself, run in one process as any rank of any number of ranks, in seconds.

    python train.py --dry-run 0/16384 --preset llama-3.1-405b --tp 8 --cp 16 --pp 16 --seq-len 131072 --zero 1 \
                    --global-batch 128 --micro-batch 1

The code is not simulated: train.py builds its groups, model, buckets and pipeline engine, and runs steps. Only four
things are replaced:

    tensors               by fake ones (FakeTensorMode): a shape, a dtype and a storage with a size, but no memory
    process groups        by fake ones: every collective returns at once and sends nothing
    ep.exchange_counts    by `uniform_counts`: fake counts cannot be read, so all experts get equally many tokens
    Pending.completed     by `complete`: what a rank sends has been received by its next action, so that it is freed

So run/meter.py sees every operation, tensor and collective that this rank would execute. It counts the peak of live
bytes, by kind and by action of the pipeline, FLOPs, and the bytes sent on each axis.

A dry run does not show time, fragmentation of the allocator, or what CUDA, NCCL and cuBLAS allocate themselves. It runs
plain torch, as on CPUs; Triton's kernels on GPUs save less. Temporaries inside torch's own kernels are not counted; nor
does run/meter.py see them in a real run.

Kinds of bytes: "weights", "gradients" and "optimizer" are the buckets' tensors (zero.py); "FP8 weights" are cached
copies; "activations" are allocated in forward; "temporaries" are all others, allocated in backward or in the update.
"""
import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore  # private: torch has no public group without peers
from tqdm import tqdm

import ep
from core import collectives, config
from core.collectives import Group, Groups, Pending
from core.groups import build_groups
from plan.memory import format_bytes
from run import cli
from run.data import MicroBatch, Samples
from run.device import check_device, memory_of_rank
from run.log import first_lines
from run.meter import Meter
from schedules import Action

KINDS = "weights", "gradients", "optimizer", "FP8 weights", "activations", "temporaries"


# ---- the environment ------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def fake_world(ranks: int, me: int) -> Iterator[None]:
    """Within this context this process is rank `me` of `ranks`, and every collective returns at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=me, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Within this context tensors have no memory, and all experts get equally many tokens."""
    with (patch.object(ep, "exchange_counts", uniform_counts), patch.object(Pending, "completed", complete),
          FakeTensorMode()):
        yield


def complete(pending: Pending) -> bool:
    """As Pending.completed if each transfer ends as early as its receiver lets it. (NCCL reports a transfer's end; gloo
    and the fake group do not.)"""
    pending.wait()
    return True


def uniform_counts(counts: torch.Tensor, T: int, k: int, group: Group) -> tuple[list[int], list[int], list[int]]:
    """As ep.exchange_counts if all choices of k experts are equally often made: counts differ by at most one."""
    n, e = group.size, counts.shape[1] - 1
    collectives.all_to_all(torch.empty_like(counts), counts, [1] * n, [1] * n, group)
    least, rest = divmod(T * k, n * e)
    own = [least + (expert < rest) for expert in range(group.rank * e, (group.rank + 1) * e)]  # of each rank's rows
    copies = round(T * (1 - math.comb(n * e - e, k) / math.comb(n * e, k)))  # see costs.copies_per_token
    return [copies] * n, [copies] * n, [n * count for count in own]


class ZeroSamples(Samples):
    """Samples of token 0, without files."""

    def __init__(self, seq: int):
        self.seq = seq

    def micro_batch(self, numbers: list[int]) -> MicroBatch:
        tokens = torch.zeros(len(numbers), self.seq, dtype=torch.long)
        return MicroBatch(tokens, tokens.clone())


# ---- measuring ------------------------------------------------------------------------------------------------------

class DryRun(NamedTuple):
    """Measurements of one rank's first step, which later steps repeat."""
    peak: int  # the most bytes alive at once
    at_peak: dict[str, int]  # kind -> its bytes at that moment
    peak_of_kind: dict[str, int]  # kind -> the most bytes of it at any moment
    peak_of_action: list[tuple[Action, int]]  # bytes, in the order of the pipeline's plan
    flops: int  # of matmuls
    calls: dict[str, dict[str, int]]  # axis -> collective -> number of calls
    sent: dict[str, int]  # axis -> bytes that this rank sends


def measure(step: Callable[[], Any], model: Any, optimizer: Any, engine: Any, groups: Groups) -> DryRun:
    """Run `step()`, one forward, backward and update, and measure it. It uses `model` (model.Llama), `optimizer`
    (zero.Optimizer) and `engine` (pp.Engine); their tensors and groups may be fake or real."""
    meter, peak_of_action = Meter(), []
    meter.kind = "temporaries"
    label(meter, model, optimizer)

    @contextlib.contextmanager
    def around(action: Action) -> Iterator[None]:
        before = meter.restart_window()  # what is received, before it, counts as well
        yield
        peak_of_action.append((action, max(before, meter.restart_window())))
        bar.update()

    with meter, tqdm(desc="dry run", unit="action", delay=2) as bar:
        collectives.sent.clear()
        engine.around = around
        step()
    axes: dict[str, str] = {}  # torch's name of a group -> its axis, the last one if several axes share the group
    for axis, group in groups.items():
        if group.size > 1:
            axes |= {part.group_name: axis for part in (group.process_group, *group.links.values())}
    calls: dict[str, dict[str, int]] = {axis: Counter() for axis, group in groups.items() if group.size > 1}
    for call in meter.collectives:
        calls[axes[call.group]][call.name] += 1
    at_peak, peak_of_kind = ({kind: of[kind] for kind in KINDS if of[kind]} for of in (meter.at_peak, meter.peak))
    return DryRun(meter.peak["all"], at_peak, peak_of_kind, peak_of_action, meter.flops, calls,
                  {axis: collectives.sent[axis] for axis in calls})


def label(meter: Meter, model: Any, optimizer: Any) -> None:
    """Tell the meter which kind each tensor is: existing ones now, others by the function that allocates them."""
    def label_made_by(function: Callable, kind: str) -> Callable:
        def labelling(*args, **kwargs):
            before, meter.kind = meter.kind, kind
            try:
                return function(*args, **kwargs)
            finally:
                meter.kind = before
        return labelling

    for bucket in optimizer.buckets:
        meter.label("optimizer", *bucket.state.values())
        meter.label("weights", bucket.weights, bucket.weight_shard)  # "weights" even if they are also master weights
        meter.label("gradients", *(grad for grad in (bucket.grad, bucket.grad_shard) if grad is not None))
        bucket.main_grad = label_made_by(bucket.main_grad, "gradients")
        bucket.ready = label_made_by(bucket.ready, "gradients")  # it starts reductions
    for mm in {module.mm for module in model.modules() if hasattr(module, "mm")}:
        if getattr(mm, "cached", False):
            mm.quantise_weight = label_made_by(mm.quantise_weight, "FP8 weights")
    model.forward = label_made_by(model.forward, "activations")


# ---- train.py --dry-run ---------------------------------------------------------------------------------------------

def main(settings: config.Config, measured_step: Callable[..., DryRun]) -> None:
    """Run a step on fake tensors as rank R of N, --dry-run R/N, and print what it would need, compute and send.
    measured_step: train.py's."""
    precision, (me, ranks), began = settings.precision, settings.run.dry_run_as(), time.perf_counter()
    if precision.dtype == "auto":
        precision.dtype = "bf16"  # as on GPUs
    if precision.attention == "triton":
        precision.attention = "sdpa"  # saves the same and has as many FLOPs; no kernel of ours runs on fake tensors
    try:
        check_device(settings, torch.device("cpu"))
    except ValueError as error:
        cli.refuse(error)
    with fake_world(ranks, me):
        groups = build_groups(settings.grid, settings.model)
        print(first_lines(settings, groups, f"none (dry run), {ranks:,} ranks"), flush=True)
        with fake_tensors():
            found = measured_step(settings, groups)
        formula, on_gpu = (memory_of_rank(settings, groups["pp"].rank, fused=fused) for fused in (False, True))
        print(report(found, groups, formula, time.perf_counter() - began, on_gpu["temporaries"]))


# ---- printing -------------------------------------------------------------------------------------------------------

BARS = " ▁▂▃▄▅▆▇█"


def report(found: DryRun, groups: Groups, formula: dict[str, int], seconds: float, fused: int | None = None) -> str:
    """Memory, pipeline, FLOPs and communication as printed. formula: kind -> bytes by plan/memory.py, to compare.
    fused: bytes of temporaries where this project's kernels run, which a dry run does not."""
    coordinates = ", ".join(f"{axis} {group.rank} of {group.size}" for axis, group in groups.items()
                            if group.size > 1 and axis not in ("muon", "world"))
    lines = [f"dry run rank {groups['world'].rank} of {groups['world'].size:,} ({coordinates or 'alone'}), "
             f"{seconds:.1f} s",
             f"memory  peak {format_bytes(found.peak)}; by kind, at that moment, at its own peak, and by formula:"]
    lines += [f"    {kind:14s}{format_bytes(found.at_peak.get(kind, 0)):>12s}{format_bytes(most):>12s}"
              f"{format_bytes(formula[kind]) if kind in formula else '':>12s}  "
              f"{'█' * round(40 * found.at_peak.get(kind, 0) / found.peak)}"
              for kind, most in found.peak_of_kind.items()]
    if fused is not None:
        lines += [f"    this is plain torch, as --kernels torch; with --kernels auto on a GPU temporaries are "
                  f"{format_bytes(fused)} by formula, as in python -m plan memory"]
    lines += [f"plan    {len(found.peak_of_action)} actions (F forward, B backward, I and W its halves), each with its "
              f"peak (█ {format_bytes(found.peak)}):"]
    for first in range(0, len(found.peak_of_action), 100):
        part = found.peak_of_action[first:first + 100]
        lines += ["    " + "".join(action.op for action, _ in part),
                  "    " + "".join(BARS[math.ceil(8 * nbytes / found.peak)] for _, nbytes in part)]
    lines += [f"compute {found.flops:.4g} FLOPs in matmuls per step"]
    if found.sent:
        lines += ["network calls and bytes that this rank sends per step:"]
    lines += [f"    {axis:10s}{groups[axis].size:7,d} ranks{sum(found.calls[axis].values()):9,d} calls"
              f"{format_bytes(nbytes):>12s}  {', '.join(f'{n:,} {call}' for call, n in found.calls[axis].items())}"
              for axis, nbytes in found.sent.items()]
    return "\n".join(lines)
