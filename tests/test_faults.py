"""Faults, in real processes where it matters: nothing is lost, nobody waits for ever, one line says what happened."""
import contextlib
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import runs
import torch
import torch.distributed as dist
from program import python
from runs import metrics, tensors
from watch import in_order

import train
import zero
from core import collectives, rules
from run import checkpoint, cli, faults, job, ranks
from run.ranks import Call, meet

ROOT = Path(__file__).parent.parent
SMALL = ("--layers 1 --hidden 16 --heads 2 --ffn 16 --seq-len 16 --warmup 2 --global-batch 12 --sample-prompt= "
         f"--dtype fp64 --data {ROOT}/train.py")


def run(flags: str, spoiled: tuple = (), factor: float = math.inf, late: bool = False, rank: int = -1, also: str = "",
        stop_at: int | str = -1, state: job.RunState | None = None) -> str:
    """The ranks of the pool, or this process, as a run of train.py: what it prints. To this rank, or with -1 to every
    rank, happens:

    spoiled: the loss of these steps, of each once and in this order, is multiplied by a factor. late: a step's results
    are read after the next one has been issued, as on a GPU. also: it has these flags, too. stop_at: the step or the
    activity in which it is asked to end."""
    state, wanted = state or job.RunState(), faults.Stop.wanted
    with contextlib.ExitStack() as stack:
        if rank in (-1, dist.get_rank() if dist.is_initialized() else 0):
            flags = f"{flags} {also}"
            stack.enter_context(spoil(state, list(spoiled), factor))
            stack.enter_context(patch.object(job, "reads_late", lambda device: late))
            stack.enter_context(patch.object(
                faults.Stop, "wanted", lambda self: wanted(self) or stop_at in (state.step, state.activity)))
        return runs.run(f"{SMALL} {flags}", state)


def losses(path: Path) -> list[float | None]:
    return [line["loss"] for line in metrics(path)]


def spoil(state: job.RunState, steps: list[int], factor: float):
    """When a run has gone back, the same steps have other samples, and are spoiled only if they are here twice."""
    forward_backward, scale_loss = train.forward_backward, zero.Optimizer.scale_loss

    def spoiled(*args):
        if not steps or state.step != steps[0]:
            return forward_backward(*args)
        steps.pop(0)
        with patch.object(zero.Optimizer, "scale_loss", lambda self, loss: factor * scale_loss(self, loss)):
            return forward_backward(*args)
    return patch.object(train, "forward_backward", spoiled)


def assert_as_undisturbed(pool, folder: Path, ranks: int, flags: str = "--steps 12") -> None:
    """The run in this folder, with --checkpoint-dir out and --metrics m, has taken the steps of one without a fault."""
    pool.run(ranks, run, flags=f"{flags} --metrics {folder}/straight")
    assert losses(folder / "m") == losses(folder / "straight")
    checkpoint.verify(folder / "out" / f"step-{len(losses(folder / 'm')):06d}")
    assert left_over(folder) == []


# ---- stopping -------------------------------------------------------------------------------------------------------

def test_a_request_to_one_rank_ends_all_after_the_same_step_and_nothing_is_lost(pool, tmp_path):
    flags = f"--steps 6 --tp 2 --metrics {tmp_path}/m --checkpoint-dir {tmp_path}/out"
    said = pool.run(2, run, flags=flags, rank=1, stop_at=2)[0]
    assert "3 of 6 steps, as asked (on another rank)\n" in said
    assert f" train.py --checkpoint-dir {tmp_path}/out --resume auto\n" in said
    assert len(metrics(tmp_path / "m")) == 3
    pool.run(2, run, flags=f"{flags} --resume auto")
    assert_as_undisturbed(pool, tmp_path, 2, "--steps 6 --tp 2")


def test_a_request_in_an_evaluation_does_not_wait_for_its_end(pool, tmp_path):
    flags = f"--steps 6 --val-data {ROOT}/pp.py --eval-every 2 --checkpoint-dir {tmp_path}/out --metrics {tmp_path}/m"
    said = pool.run(2, run, flags=flags, rank=1, stop_at="evaluating after step 1")[0]
    assert "ended after 2 of 6" in said and metrics(tmp_path / "m")[1]["val_loss"] is None
    assert (tmp_path / "out" / "step-000002" / "run.json").exists()
    assert "ended after 0 of 0 steps" in run(f"--steps 0 --val-data {ROOT}/pp.py", stop_at="evaluating after step -1")


def test_a_time_limit_ends_a_run_which_without_out_saves_nothing():
    said = run("--steps 500 --time-limit 1e-9")
    assert "ended after 1 of 500 steps, as asked (--time-limit)\nnext    nothing is saved: --checkpoint-dir " in said


def test_signals_within_a_second_of_the_first_are_one_request_however_many(monkeypatch, capfd):
    stop, clock = faults.Stop(), iter([10.0, 10.5, 10.9, 11.5])
    monkeypatch.setattr(faults.time, "monotonic", lambda: next(clock))
    with patch.object(os, "_exit", side_effect=SystemExit) as ended, pytest.raises(SystemExit):
        for number in signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGTERM:
            stop.on_signal(number)
    ended.assert_called_once_with(128 + signal.SIGTERM)
    assert stop.reason == "SIGHUP" and stop.wanted() and next(clock, None) is None
    assert capfd.readouterr().err == "train.py: rank 0 ends at once: SIGTERM again\n"


def test_a_time_limit_is_in_minutes_and_gives_way_to_an_earlier_request(monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(faults.time, "monotonic", lambda: clock[0])
    stop, asked = faults.Stop(time_limit_min=2.0), faults.Stop(time_limit_min=2.0)
    asked.on_signal(signal.SIGTERM)
    for now in 1000.0 + 119, 1000.0 + 121:
        clock[0] = now
        assert stop.wanted() == (now > 1120) and asked.wanted()
    assert (stop.reason, asked.reason) == ("--time-limit", "SIGTERM")


@pytest.mark.parametrize("ignored", [{signal.SIGHUP}, set()], ids=["nohup", "none"])
def test_signals_that_nohup_ignores_stay_ignored(monkeypatch, ignored):
    """And the others are requests; test_train.py sends a real one."""
    stop, handled = faults.Stop(), {}
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    monkeypatch.setattr(signal, "signal", handled.__setitem__)
    stop.listen()
    assert handled == dict.fromkeys({signal.SIGTERM, signal.SIGINT, signal.SIGHUP} - ignored, stop.on_signal)


@pytest.mark.parametrize("asked, reason", [("", "torchrun is gone"), ("SIGTERM", "SIGTERM")])
def test_a_rank_whose_torchrun_has_gone_has_the_timeout_to_save(monkeypatch, asked, reason):
    """torchrun may have been asked to end, too, and have gone before its ranks."""
    parents, alarms = iter([7, 7, 1]), []
    dog = dog_without_a_thread(torchrun=7, poll=Mock())
    dog.stop.timeout_s, dog.stop.reason = 30.5, asked
    monkeypatch.setattr(faults.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(faults.signal, "alarm", alarms.append)
    monkeypatch.setattr(faults.time, "sleep", lambda seconds: None)
    dog.watch()
    assert (dog.stop.reason, alarms, dog.poll.call_count) == (reason, [31], 2)


# ---- gradients ------------------------------------------------------------------------------------------------------

def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(pool, tmp_path):
    said = pool.run(2, run, flags=f"--steps 5 --metrics {tmp_path}/m", spoiled=(2,), factor=math.nan,
                    rank=1)
    assert "train.py: warning: step 2 was skipped: the norm of its gradient is nan\n" in said[0]
    assert [line["skipped"] for line in metrics(tmp_path / "m")] == [0, 0, 1, 1, 1] and "skipped" not in said[1]


def test_too_many_skipped_steps_in_a_row_end_the_run(tmp_path):
    with pytest.raises(faults.Failure, match="^3 steps in a row, from step 5 on, were skipped: lower --lr, raise"):
        run("--steps 20 --max-skipped 3", (5, 6, 7))
    assert "trained 20 steps" in run("--steps 20 --max-skipped 4", (5, 6, 7))
    with pytest.raises(faults.Failure, match="were skipped: lower --lr.*, with --rewind\n"):  # it has gone back twice
        run("--steps 20 --max-skipped 3", (5, 6, 7), state=job.RunState(rewinds=2))
    with pytest.raises(faults.Failure, match="with --rewind 3\n"):
        run(f"--steps 20 --max-skipped 3 --rewind 2 --save-every 9 --checkpoint-dir {tmp_path}", (5, 6, 7),
            state=job.RunState(rewinds=2))
    with pytest.raises(faults.Failure, match="^3 steps in a row, from step 5 on, were skipped, and there is no check"):
        run(f"--steps 9 --max-skipped 3 --rewind 1 --save-every 8 --checkpoint-dir {tmp_path}/later", (5, 6, 7))
    assert "ended after 8 of 20 steps, as asked" in run("--steps 20 --max-skipped 3", (5, 6, 7), stop_at=7)


def test_a_run_that_skips_all_its_steps_fails_and_exports_nothing(tmp_path):
    flags = f"--steps 3 --dtype fp32 --checkpoint-dir {tmp_path}/out --export-hf {tmp_path}/hf"
    with pytest.raises(faults.Failure, match="^all 3 steps were skipped, so the weights are those of the beginning"):
        run(flags, (0, 1, 2))
    assert not (tmp_path / "hf").exists()
    run(f"--resume {tmp_path}/out --steps 3 --val-data {ROOT}/pp.py")  # an evaluation, which has no step to take
    assert "trained 4 steps" in run("--steps 4", (0, 1, 2))
    assert "ended after 3 of 9 steps, as asked" in run("--steps 9", (0, 1, 2), stop_at=2)


@pytest.mark.parametrize("late, most, every, left_out, folders", [
    (False, 3, 4, [[60, 96]], ["set-aside-step-000008", "step-000004", "step-000008", "step-000012"]),
    (True, 2, 4, [[60, 84]], ["step-000004", "step-000008", "step-000012"]),
    (False, 3, 5, [[60, 96], [96, 132]], ["step-000005", "step-000010", "step-000012"])], ids=["once", "late", "twice"])
def test_a_rewind_leaves_out_the_samples_and_nothing_else(pool, tmp_path, late, most, every, left_out, folders):
    """It ends as a run does that never reads those samples. Read late, a step is under way that nobody will read. The
    checkpoint may be that of just before the first step that was skipped."""
    flags, times = f"--steps 12 --save-every {every} --keep-checkpoints 0 --checkpoint-dir {tmp_path}", len(left_out)
    said = pool.run(2, run, spoiled=times * (5, 6, 7), late=late,
                    flags=f"{flags}/out --max-skipped {most} --rewind {times} --metrics {tmp_path}/m")[0]
    assert said.count(f"{most} steps in a row, from step 5 on, were skipped: went back to") == times
    assert all(f"/{folders[-3]} and left out samples {start} to {end - 1}" in said for start, end in left_out)
    assert [line["step"] for line in metrics(tmp_path / "m")] == list(range(12))
    pool.run(2, run, flags=f"{flags}/straight", state=job.RunState(left_out=left_out))
    want, got = (tensors(tmp_path / name / "step-000012") for name in ("straight", "out"))
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)
    written = cli.read_run(str(tmp_path / "out" / "step-000012"))
    samples = 12 * 12 + sum(end - start for start, end in left_out)
    assert (written["samples"], written["left_out"], written["rewinds"]) == (samples, left_out, times)
    assert sorted(path.name[:21] for path in (tmp_path / "out").glob("*step-*")) == folders


def test_replicas_are_compared_every_so_many_steps_and_before_a_checkpoint_is_saved(tmp_path):
    for flags, late, steps in ((f"--save-every 2 --checkpoint-dir {tmp_path}/out", False, [1, 3, 5]), ("", False, [3]),
                               ("", True, [3])):
        (tmp_path / "m").unlink(missing_ok=True)
        run(f"--steps 6 --check-replicas 4 --metrics {tmp_path}/m {flags}", late=late)
        assert [line["step"] for line in metrics(tmp_path / "m") if "check_replicas_s" in line] == steps


def test_samples_that_were_left_out_are_passed_over_by_any_batch():
    found = [faults.next_sample(first, 4, [[8, 12], [12, 16]]) for first in (0, 4, 5, 8, 12, 16)]
    assert found == [0, 4, 16, 16, 16, 16]
    for left_out in ([[8, 12], [12, 16]], [[12, 16], [8, 12]], [[12, 16], [8, 14]]):  # later rewinds go further
        assert faults.next_sample(6, 4, left_out) == 16
        for first, count in itertools.product(range(20), (1, 2, 3, 5, 8, 13)):
            is_read = [not any(start <= number < end for start, end in left_out) for number in range(50)]
            want = next(n for n in range(first, 50) if all(is_read[n:n + count]))
            assert faults.next_sample(first, count, left_out) == want


# ---- replicas -------------------------------------------------------------------------------------------------------

def compare_after_a_flip(flags: str, rank: int, what: str) -> None:
    """Calls check_replicas when one bit of a tensor, of this rank and bucket 0, is another one."""
    _, groups, model, pipeline, optimizer, share = runs.first_step(f"{SMALL} {flags}")
    train.forward_backward(model, pipeline, optimizer, share, groups)
    optimizer.step(0.01)
    bucket = optimizer.buckets[0]
    tensors = bucket.state | dict(weights=bucket.weights, bias=model.routers[0].bias if model.routers else None,
                                  steps=optimizer.steps)
    bucket.unsharding.wait()
    if dist.get_rank() == rank:
        first = tensors[what].view(-1)[:1]
        first.view(faults.INTEGERS[first.element_size()]).bitwise_xor_(1)
    faults.check_replicas(optimizer, model.routers, groups)


@pytest.mark.parametrize("ranks, flags, what, rank, says", [
    (3, "--dtype bf16", "master", 1, "/master: rank 1 has different values from 0, 2 (axis dp)"),
    (3, "--dtype fp32", "v", 2, "/v: rank 2 has different values from 0, 1 (axis dp)"),
    (3, "--dtype bf16 --zero 2", "weights", 0, ": rank 0 has different values from 1, 2 ("),
    (4, "--dtype fp32 --zero 3 --dp-replicate 2", "m", 3, "/m: ranks 1, 3 have different values (axis replicate)"),
    (4, "--dtype fp32 --zero 1 --dp-replicate 2 --experts 2 --router-bias-rate 0.01", "bias", 3,
     ": rank 3 has different values from 0, 1, 2 (axis data)"),
    (2, "--dtype fp32 --tp 2", "steps", 1, "steps: ranks 0, 1 have different values (axis world)"),
])
def test_one_flipped_bit_is_found_with_its_tensor_and_rank(pool, ranks, flags, what, rank, says):
    with pytest.raises(RuntimeError, match=rf"Failure: \S*{re.escape(says)}"):
        pool.run(ranks, compare_after_a_flip, flags=flags, rank=rank, what=what)


def compare_and_hash(flags: str) -> int:
    """Calls check_replicas, and returns what Python on this rank makes of a string."""
    _, groups, model, _, optimizer, _ = runs.first_step(f"{SMALL} {flags}")
    faults.check_replicas(optimizer, model.routers, groups)
    return hash("an axis")


def test_replicas_are_compared_in_one_order_by_ranks_that_hash_strings_differently(pool):
    """Else each rank would wait for another one, along another axis."""
    hashes = pool.run(4, compare_and_hash, timeout=30, flags="--zero 1 --dp-replicate 2 --dtype fp32")
    assert hashes[0] == hashes[3] != hashes[1] == hashes[2]


def test_ranks_that_were_started_differently_do_not_begin(pool):
    for rank, also, line in ((2, "--lr 0.1", "settings: rank 2 has different values from 0, 1"),
                             (0, f"--data {ROOT}/pp.py", "data: rank 0 has different values from 1, 2")):
        with pytest.raises(RuntimeError) as error:
            pool.run(3, run, flags="", rank=rank, also=also)
        assert str(error.value).count(f"\nValueError: {line}: start every rank with the same") == 3


@pytest.mark.parametrize("ranks, values, says", [
    (3, {}, ""), (3, dict(b={1: -5}), "b: rank 1 has different values from 0, 2"),
    (3, dict(b={1: 5}, c={2: 4}), "b (and 1 more): rank 1 has different values from 0, 2"),
    (4, dict(a={0: 9, 3: 9}), "a: ranks 0, 1, 2, 3 have different values"),
    (5, dict(a={0: 9, 3: 8}), "a: rank 0, 3 has different values from 1, 2, 4"),
    (10, dict(c={4: 1}), "c: rank 4 has different values from 0, 1, 2, 3, 5, 6, 7, 8 and 1 more"),
    (9, dict(c={4: 1}), "c: rank 4 has different values from 0, 1, 2, 3, 5, 6, 7, 8")])
def test_what_differs_between_ranks_is_named_with_the_ranks_that_are_in_the_minority(monkeypatch, ranks, values, says):
    """Names a, b and c have a value each, the same on all ranks, but for `values`: what the first rank says."""
    usual = dict(a=-2, b=-3, c=-4)
    hashes = torch.tensor([[values.get(name, {}).get(rank, usual[name]) for name in "abc"] for rank in range(ranks)])

    def all_gather(out, x, group):
        assert torch.equal(x, hashes[0])
        out.copy_(hashes.flatten())
    monkeypatch.setattr(faults, "all_gather", all_gather)
    monkeypatch.setattr(faults, "ranks_of", lambda group: list(range(ranks)))
    assert faults.difference(list("abc"), hashes[0], SimpleNamespace(size=ranks)) == says


# ---- slow, silent and dead ranks ------------------------------------------------------------------------------------

def run_with_a_slow_rank(flags: str) -> None:
    """Of each step 100 s pass on the clock of rank 1, of which it has waited 60 s for other ranks."""
    slow = SimpleNamespace(seconds=0)
    clock = SimpleNamespace(monotonic=time.monotonic, perf_counter=lambda: time.perf_counter() + slow.seconds)

    def forward(*_):
        slow.seconds += 100 * (dist.get_rank() == 1)
        faults.record.waited_s += 60 * (dist.get_rank() == 1)
    with in_order((train, "forward_backward", forward)), patch.object(faults, "time", clock):
        run(flags)


def test_metrics_name_the_slowest_rank(pool, tmp_path):
    """Waits are not its own seconds. Limits are far from both: a busy machine adds seconds."""
    pool.run(3, run_with_a_slow_rank, flags=f"--steps 4 --metrics {tmp_path}/m")
    for line in metrics(tmp_path / "m"):
        assert line["busy_s"]["slowest_rank"] == 1
        assert line["busy_s"]["min"] <= line["busy_s"]["median"] < 39 < line["busy_s"]["max"] < 100


def watched(port: int, late: int, timeout_s: float) -> list[str]:
    """What the watchdogs say if one rank is late for a collective."""
    said, rank = [], dist.get_rank()
    os.environ |= dict(RANK=str(rank), WORLD_SIZE=str(dist.get_world_size()))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    group = collectives.Group("tp", dist.new_subgroups_by_enumeration([[0, 1, 2]])[0])
    stop = faults.Stop()
    ranks.record.calls.clear()
    with (patch.object(faults, "say", said.append), patch.object(faults.os, "_exit", side_effect=SystemExit)):
        dog = faults.Watchdog(store, timeout_s, lambda: "in step 7", stop)
        dog.learn({"tp": group, "cp": collectives.ALONE})
        collectives.all_reduce(torch.ones(2), group)
        if rank == late:
            time.sleep(1.3 * timeout_s)
        collectives.all_reduce(torch.ones(2), group)
        stop.ending = True
    return said


def test_a_rank_that_waits_names_step_collective_axis_and_who_is_missing(pool):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    said = pool.run(3, watched, port=store.port, late=1, timeout_s=4.0)
    (line,) = said[0] + said[2]
    assert said[1] == [] and re.fullmatch(
        r"rank [02] failed in step 7: all_reduce, call 2 on axis tp \(ranks 0, 1, 2\), waits for rank 1, which is in "
        r"no collective but in test_faults.py:\d+, watched \(after 3\.\d s of --timeout 4\)", line)


@pytest.mark.parametrize("calls, says", [
    ({0: ("tp", 5, None), 1: ("dp", 9, None), 2: ("pp", 1, 0)}, "waits for rank 3, which does not answer"),
    ({0: ("tp", 5, None), 1: ("dp", 9, None), 2: None, 3: None},
     "waits for rank 2, 3, which is in no collective but in cp.py:7, f"),
    ({0: ("tp", 5, None), 1: ("dp", 9, None), 2: ("pp", 1, 0), 3: ("dp", 9, None)},
     "waits for rank 1, which is in gather, call 9 on axis dp (ranks 1, 3), or later in cp.py:7, f"),
    ({0: ("pp", 2, 1), 1: ("dp", 9, None), 2: ("pp", 7, 0), 3: ("dp", 9, None)},
     "waits for rank 2, which is in gather, call 7 on axis pp (ranks 0, 2), or later in cp.py:7, f"),
    (dict.fromkeys(range(4), ("world", 2, None)), "has not ended although all ranks have called it"),
], ids=["silent", "computing", "elsewhere", "peer", "none"])
def test_missing_are_ranks_that_do_not_answer_or_compute_or_wait_elsewhere(monkeypatch, calls, says):
    monkeypatch.setattr(faults, "innermost_line", lambda: "in cp.py:7, f")
    store = dist.HashStore()
    for rank, call in reversed(calls.items()):
        dog = dog_without_a_thread(store=store, rank=rank, ranks=4, members=dict(
            tp=[0, 1] if rank < 2 else [2, 3], pp=[0, 2] if rank % 2 == 0 else [1, 3], dp=[1, 3]))
        monkeypatch.setattr(faults.record, "calls", {call[0]: call[1]} if call else {})
        dog.answer(call and Call("gather", *call))
    assert dog.describe(Call("gather", *calls[0]), dog.answers()).endswith(f"), {says}")


def dog_without_a_thread(**attributes) -> faults.Watchdog:
    """With a store of its own, which notes its calls."""
    dog = faults.Watchdog.__new__(faults.Watchdog)
    usual = dict(stop=faults.Stop(), store=Mock(wraps=dist.HashStore()), activity=lambda: "in step 3", members={},
                 rank=0, ranks=2, timeout_s=40.0, poll_s=1.0, torchrun=os.getppid(), seen=None, since=0.0)
    for name, value in (usual | attributes).items():
        setattr(dog, name, value)
    return dog


@pytest.mark.parametrize("reporter, says", [(0, ", waits for rank 1, which is in all_gather, call 8 on axis tp"),
                                            (1, ", while rank 0 has called more there")], ids=["waits", "missing"])
def test_a_host_that_stands_in_a_launch_waits_for_its_last_call(monkeypatch, reporter, says):
    """With NCCL no rank waits in a collective: all stall behind the last ones. Rank 1 has made one fewer."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(faults.record, "waiting_for", None)
    store, members = dist.HashStore(), dict(tp=[0, 1])
    for rank in (1 - reporter, reporter):
        dog = dog_without_a_thread(rank=rank, store=store, members=members)
        monkeypatch.setattr(faults.record, "last", Call("all_gather", "tp", 9 - rank))
        monkeypatch.setattr(faults.record, "calls", dict(tp=9 - rank))
        dog.answer(call := dog.waits_for())
    assert f"all_gather, call {9 - reporter} on axis tp (ranks 0, 1){says}" in dog.describe(call, dog.answers())
    assert re.search(r", or later in \S+\.py:\d+, ", dog.answers()[0]["where"])
    dog.activity = lambda: "reading"
    assert dog.waits_for() is None


def polled(monkeypatch, dog: faults.Watchdog, waits: bool, moves_until: float = 0.0) -> tuple[list[str], list[str]]:
    """(what the rank asks of the store in 100 seconds or until it ends, and what it reports): it makes progress until
    then, and computes, or waits for a collective."""
    clock, asked, reported = [0.0], Mock(wraps=dog.store), []
    dog.store, dog.activity = asked, lambda: f"in step {min(clock[0], moves_until)}"

    def sleep(seconds):
        clock[0] += seconds
        dog.stop.ending = clock[0] > 100
    monkeypatch.setattr(faults.record, "waiting_for", Call("all_reduce", "dp", 3) if waits else None)
    with (patch.object(faults.time, "sleep", sleep), patch.object(faults.time, "monotonic", lambda: clock[0]),
          patch.object(faults.os, "_exit", side_effect=SystemExit), patch.object(faults, "say", reported.append),
          contextlib.suppress(SystemExit)):
        dog.watch()
    return [f"{name} {args[0]}" for name, args, _ in asked.mock_calls], reported


@pytest.mark.parametrize("ranks", [8, 1024])
def test_a_rank_that_waits_asks_all_once_and_then_reports(monkeypatch, ranks):
    """Rank 4 does not answer. Calls of the store do not depend on the number of ranks."""
    dog = dog_without_a_thread(rank=5, ranks=ranks)
    for rank in set(range(ranks)) - {4, 5}:
        dog.store.append("answers", json.dumps([rank, dict(waits=False, calls={}, where="")]) + "\n")
    asked, reported = polled(monkeypatch, dog, waits=True, moves_until=50)
    assert asked == [*83 * ["check ['reports']"], "add reports", "append answers", "get answers"]
    (line,) = reported
    assert line.startswith("rank 0 failed in step 50: all_reduce, call 3 on axis dp (ranks 0, 1, 2")
    assert line.endswith("waits for rank 4, which does not answer (after 36.0 s of --timeout 40)")


@pytest.mark.parametrize("asked, waits", [(True, True), (True, False), (False, False)])
def test_a_rank_that_is_asked_answers_and_ends_and_else_may_compute_for_long(monkeypatch, asked, waits):
    dog = dog_without_a_thread()
    if asked:
        dog.store.add("reports", 1)
    calls = ["check ['reports']", "append answers"] if asked else 100 * ["check ['reports']"]
    assert polled(monkeypatch, dog, waits) == (calls, []) and dog.stop.ending != asked


def test_a_rank_whose_store_has_gone_reports_alone(monkeypatch):
    gone = Mock(check=Mock(side_effect=RuntimeError("Broken pipe")))
    _, (line,) = polled(monkeypatch, dog_without_a_thread(store=gone), waits=True)
    assert line.startswith("rank 0 failed in step 0.0: all_reduce, call 3 on axis dp (ranks 0, 1), waits for rank 1, ")


@pytest.mark.parametrize("timeout_s", [2.0, 20.0, 600.0])
def test_a_watchdog_reports_before_the_collective_s_own_timeout(timeout_s):
    """It waits for up to a poll after four fifths of the timeout, and three more for others' answers."""
    with patch.dict(os.environ, RANK="0", WORLD_SIZE="1"), patch.object(faults.threading, "Thread"):
        dog = faults.Watchdog(Mock(), timeout_s, lambda: "", faults.Stop())
    assert 0 < dog.poll_s <= 1 and 0.8 * timeout_s + 4 * dog.poll_s < timeout_s


def end_of(capsys, error: Exception, dog: faults.Watchdog, timer: Mock | None = None, sleep=lambda s: None) -> str:
    """What a rank says that ends because of this error, with exit code 1."""
    stop = faults.Stop()
    with (patch.object(faults.threading, "Timer", timer or Mock()), patch.object(faults.time, "sleep", sleep),
          patch.object(faults.os, "_exit", side_effect=SystemExit) as ended, pytest.raises(SystemExit)):
        faults.fail("in step 3", error, dog, stop)
    ended.assert_called_with(1)
    assert stop.ending
    return capsys.readouterr().err


@pytest.mark.parametrize("error, waits, lost", [
    (RuntimeError("Connection closed by peer"), True, True), (dist.DistBackendError("NCCL error"), True, True),
    (torch.AcceleratorError("CUDA error: an illegal memory access"), True, False),
    (torch.OutOfMemoryError("CUDA out of memory"), True, False), (TypeError("no tensor"), True, False),
    (KeyError(), True, False), (RuntimeError("a fault of its own"), False, False),
], ids=["gloo", "NCCL", "GPU", "memory", "usage", "no message", "computes"])
def test_an_error_is_a_lost_connection_only_if_a_rank_waits_and_it_is_one_of_the_network(monkeypatch, capsys, error,
                                                                                         waits, lost):
    """Of all ranks that fail only the first speaks, with a traceback if that says more. Those that lose a connection
    wait a second before they ask who reports; who fails has asked when it ends."""
    dog, says = dog_without_a_thread(), "all_reduce, call 3 on axis world (ranks 0, 1), lost its connection: " * lost
    monkeypatch.setattr(faults.record, "waiting_for", Call("all_reduce", "world", 3) if waits else None)
    with in_order((faults.Watchdog, "is_first_to_report", "asks")) as done:
        said = end_of(capsys, error, dog, sleep=done.append)
    assert said.splitlines()[-1] == f"train.py: rank 0 failed in step 3: {says}{str(error) or 'KeyError'}"
    assert done == [1] * lost + ["asks"]
    assert (said.count("\n") == 1) == lost and end_of(capsys, error, dog) == ""


def test_a_rank_whose_report_fails_reports_alone_and_ends(monkeypatch, capsys):
    """The store has gone; or there is no memory for a thread; or the store does not answer."""
    alone, gone = "train.py: rank 0 failed in step 3: of a kind\n", Mock(side_effect=RuntimeError)
    assert end_of(capsys, faults.Failure("of a kind"), Mock(is_first_to_report=gone)) == alone
    assert end_of(capsys, faults.Failure("of a kind"), dog_without_a_thread(), timer=gone) == alone
    ended = threading.Event()
    monkeypatch.setattr(faults, "STORE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(faults.os, "_exit", lambda code: ended.set())
    dog = Mock(is_first_to_report=lambda: ended.wait(60))
    faults.fail("in step 3", faults.Failure("of a kind"), dog, faults.Stop())
    assert capsys.readouterr().err.startswith(alone) and ended.is_set()


def test_ranks_that_are_started_again_read_no_key_of_those_before(monkeypatch):
    """Three starts with different numbers of ranks, and one before them that has never been complete."""
    server, here = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), threading.local()
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(server.clone(), *here.place)]))
    for question in "1 gone", "2 gone", "5 answer":
        server.queue_push("questions", question)

    def start(index: int, ranks: int) -> dist.Store:
        time.sleep(0.05 * (ranks - index))  # rank 0 comes last: it finds questions of this start and of earlier ones
        here.place = index, ranks
        store = meet(5)
        store.append("started", f"{index} ")
        return store
    for count in (3, 2, 4, 4):
        with ThreadPoolExecutor(count) as threads:
            stores = list(threads.map(start, range(count), [count] * count))
        assert all(sorted(store.get("started").split()) == sorted(b"0 1 2 3".split()[:count]) for store in stores)
    here.place = 0, 3
    with pytest.raises(TimeoutError, match="^rank 1, 2 has not started in 0.1 s$"):
        meet(0.1)


@pytest.mark.parametrize("error", [TimeoutError, dist.DistNetworkError])
def test_ranks_that_do_not_meet_are_told_why_in_one_line(monkeypatch, capsys, error):
    for name in "stdout", "stderr":  # `started` replaces them
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(faults.Stop, "listen", lambda self: None)
    with (patch.object(job, "meet", side_effect=error("rank 1 has not started in 9 s")),
          patch.object(faults.os, "_exit", side_effect=SystemExit), pytest.raises(SystemExit),
          job.started(rules.parse([]))):
        pass
    assert capsys.readouterr().err == "train.py: rank 0 failed before the first step: rank 1 has not started in 9 s\n"


def launch(ranks: int, fault: str, number: int | str, step: int | str, where: str, flags: str, restarts: int = 0,
           nodes: str = "") -> subprocess.Popen:
    """torchrun with a faulty train.py: see help/faulty.py."""
    torchrun = f"-m torch.distributed.run {nodes} --nproc_per_node={ranks} --max-restarts {restarts}"
    command = f"{torchrun} tests/help/faulty.py {fault} {number} {step} {where} {SMALL} {flags}".split()
    return subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, start_new_session=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def finished(process: subprocess.Popen, timeout_s: float = 300) -> tuple[str, str]:
    """(stdout, stderr), once it has ended; nothing of it may be left."""
    try:
        return process.communicate(timeout=timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def left_over(folder: Path, within_s: float = 0) -> list[str]:
    """What unfinished saves have left in the folder, and the processes that name it, if they do not end in time."""
    deadline = time.monotonic() + within_s
    while True:
        lines = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout.splitlines()
        left = [line for line in lines if str(folder) in line]
        if not left or time.monotonic() > deadline:
            return left + [path.name for path in folder.rglob(".*") if path.name != ".metadata"]
        time.sleep(0.5)


TWELVE = "--steps 12 --checkpoint-dir {0}/out --save-every 2 --timeout 60 --metrics {0}/m --resume auto"
NODES = "--nnodes {count} --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-id faults"


@pytest.mark.parametrize("fault, line, reported", [
    ("kill", "rank 0 failed in step 7: .* lost its connection", "exitcode: -9. local_rank: 1"),
    ("raise", "rank 1 failed in step 7: a fault of its own", "traceback : train.py: rank 1 failed in step 7")])
def test_one_line_says_how_a_rank_has_failed_and_nothing_is_lost(pool, tmp_path, fault, line, reported):
    """It says so itself, or if it cannot, one that waits for it; torchrun, which ends the others, comes to know it."""
    flags, torchrun = TWELVE.format(tmp_path), "-m torch.distributed.run --nproc_per_node=2"
    done = python(*f"{torchrun} tests/help/faulty.py {fault} 1 7 backward {SMALL} {flags}".split())
    said = [text for text in done.stderr.splitlines() if text.startswith("train.py: ")]
    assert len(said) == 1 and re.match(f"train.py: {line}", said[0]) and done.returncode == 1, done.stderr
    assert done.stderr.count("FloatingPointError: a fault of its own\ntrain.py: ") == (fault == "raise")
    assert done.stderr.split("Process ")[0].count("Traceback") == (fault == "raise")  # before torchrun's own
    assert re.search(reported, done.stderr)
    assert re.search("resumed .* after [46] steps", pool.run(2, run, flags=flags)[0])
    assert_as_undisturbed(pool, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["before", "loading", "forward", "collective", "optimizer", "staging", "writing",
                                   "commit", "evaluation", "sampling", "exit"])
def test_a_rank_may_be_killed_anywhere(pool, tmp_path, where):
    """It is restarted, and nothing but the steps since the last checkpoint is lost."""
    step = {"before": 0, "loading": 0, "evaluation": 5, "sampling": 11, "exit": 11}.get(where, 7)
    flags = (f"--steps 12 --checkpoint-dir {tmp_path}/out --save-every 5 --metrics {tmp_path}/m --resume auto "
             f"--val-data {ROOT}/pp.py --eval-every 6 --sample-prompt def")
    number = 0 if where in ("writing", "commit", "sampling") else 1
    process = launch(2, "kill", number, step, where, flags, restarts=3)
    out, err = finished(process)
    assert process.returncode == 0 and re.search("exitcode: -9|Connection closed", err), err  # of the one seen first
    resumed = re.findall(r"resumed .* after (\d+) steps", out)
    known = dict(before=[], loading=[], staging=["5"], sampling=["12"], exit=["12"])  # else 5's save may be under way
    assert resumed in ([known[where]] if where in known else [[], ["5"]])
    assert_as_undisturbed(pool, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["term", "term-parent", "int", "kill-parent"])
@pytest.mark.parametrize("where", ["forward", "loading", "evaluation", "writing"])
def test_all_ranks_save_and_end_when_one_is_asked_to(tmp_path, fault, where):
    """By its own SIGTERM or SIGINT, by torchrun's SIGTERM, or because torchrun was killed."""
    step = dict(loading=0, evaluation=4).get(where, 7)
    flags = f"--steps 4000 --checkpoint-dir {tmp_path}/out --save-every 5 --val-data {ROOT}/pp.py --eval-every 4"
    process, began = launch(2, fault, 0, step, where, flags), time.monotonic()
    out, err = finished(process)
    assert time.time() - float(out.split("fault at ")[1].split("\n")[0]) < 20
    assert (process.returncode == 0) == (fault in ("term", "int"))  # torchrun's own code: it was asked, too
    assert left_over(tmp_path, 60) == [] and time.monotonic() - began < 100
    if where == "loading" and fault == "kill-parent":  # with torchrun its store has gone: ranks cannot find each other
        return
    newest = cli.checkpoints_in(tmp_path / "out")[0]
    checkpoint.verify(newest)
    if fault != "kill-parent":
        assert f"ended after {cli.step_of(newest)} of 4000 steps, as asked" in out
        assert "train.py:" not in err and "exitcode" not in err


@pytest.mark.slow
def test_no_rank_stays_when_torchrun_is_killed_and_a_rank_loops_for_ever(tmp_path):
    process = launch(3, "kill-parent-and-loop", 1, 3, "forward", f"--steps 4000 --timeout 20 --metrics {tmp_path}/m")
    process.wait(120)
    assert left_over(tmp_path, 120) == []
    finished(process)


@pytest.mark.slow
def test_two_torchruns_restart_their_ranks_together(pool, tmp_path):
    """The rank of one was killed, the rank of the other has lost its connection."""
    flags, nodes = TWELVE.format(tmp_path), NODES.format(count=2, port=free_port())
    processes = [launch(1, "kill", 1, 7, "forward", flags, restarts=3, nodes=nodes) for _ in range(2)]
    said = [finished(process) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert any("lost its connection" in err for _, err in said)
    assert_as_undisturbed(pool, tmp_path, 2)


@pytest.mark.slow
def test_a_torchrun_that_has_lost_another_machine_goes_on_with_fewer_ranks(pool, tmp_path):
    """Four ranks, then two: the same global batch, the same samples."""
    flags, port = TWELVE.format(tmp_path), free_port()
    nodes = NODES.format(count="1:2", port=port) + " --rdzv-conf last_call_timeout=10"
    stays = launch(2, "kill-machine", 3, 7, "forward", flags, restarts=3, nodes=nodes)
    while stays.poll() is None and socket.socket().connect_ex(("127.0.0.1", port)):  # it serves torchrun's store
        time.sleep(0.1)
    lost = launch(2, "kill-machine", 3, 7, "forward", flags, restarts=3, nodes=nodes)
    out, err = finished(stays)
    finished(lost)
    assert stays.returncode == 0 and lost.returncode == -9, err
    assert ", 4 ranks, gloo" in out and ", 2 ranks, gloo" in out and "lost its connection" in err
    pool.run(4, run, flags=f"--steps 12 --metrics {tmp_path}/straight")
    assert losses(tmp_path / "m") == pytest.approx(losses(tmp_path / "straight"), rel=1e-10)
    assert len(losses(tmp_path / "m")) == 12 and left_over(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stop", "loop"])
@pytest.mark.parametrize("ranks, where, flags, says", [
    (2, "forward", "--steps 4000", "rank 0 failed in step 3: all_reduce, call "),
    (3, "forward", "--steps 4000 --pp 3 --layers 3 --micro-batch 4", "rank [02] failed in step 3: "),
    (2, "export", "--steps 4 --checkpoint-dir {0}/out --export-hf {0}/hf", "rank 0 failed exporting: "
                                                                           "all_gather_object, call ")])
def test_a_rank_that_hangs_is_named_within_the_timeout(tmp_path, fault, ranks, where, flags, says):
    process = launch(ranks, fault, 1, 3, where, f"--timeout 20 --metrics {tmp_path}/m {flags.format(tmp_path)}")
    began = time.monotonic()
    out, err = finished(process)
    assert process.returncode == 1 and time.monotonic() - began < 120
    lines = [line for line in err.splitlines() if line.startswith("train.py:")]
    assert len(lines) == 1, err
    answer = "does not answer" if fault == "stop" else "is in no collective but in faulty.py:"
    assert re.match(f"train.py: {says}", lines[0])
    assert f"waits for rank 1, which {answer}" in lines[0] and lines[0].endswith(" s of --timeout 20)")
    assert 10 < float(lines[0].split("(after ")[1].split(" ")[0]) <= 20
    assert err.split("Root Cause")[1].count(lines[0]) == 1 and "Traceback" not in err.split("train.py:")[0]
    assert left_over(tmp_path) == []


# ---- disks ----------------------------------------------------------------------------------------------------------

def fill_disk(folder: Path) -> None:
    """No file can grow beyond 4 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def remove_folder(folder: Path) -> None:
    folder.rename(f"{folder}-gone")
    while not folder.is_file():  # the thread that saves may make the folder again
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(IsADirectoryError):
            folder.write_text("no folder")


@pytest.mark.parametrize("fault", [fill_disk, remove_folder])
def test_a_save_that_fails_is_a_warning_and_the_last_whole_checkpoint_stays(tmp_path, fault):
    folder, state, limits = tmp_path / "out", job.RunState(), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with (pytest.raises(faults.Failure, match="the checkpoint of step 6 could not be saved") as error,
              in_order((train, "forward_backward", lambda *_: state.step == 3 and fault(folder)))):
            run(f"--steps 6 --checkpoint-dir {folder} --save-every 1 --export-hf {tmp_path}/hf", state=state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "hf").exists()
    warnings = [line for line in error.value.__notes__[0].splitlines() if "train.py: warning" in line]
    assert 3 <= len(warnings) <= 4  # step 3 may have been on its way
    assert all(f"the checkpoint of step {step} could not be saved" in line
               for step, line in zip((6, 5, 4, 3), reversed(warnings)))
    whole = cli.checkpoints_in(folder if fault is fill_disk else tmp_path / "out-gone")
    assert whole
    for path in whole:
        checkpoint.verify(path)
    if fault is fill_disk:
        assert warnings[-1].endswith("/out cannot be written to: File too large")
        assert len(whole) == 2 and sorted(path.name for path in folder.iterdir())[:2] == ["latest", "lock"]
        assert left_over(folder) == []


def test_a_run_goes_on_when_the_reader_of_its_output_has_gone():
    gone = Mock(side_effect=OSError("Broken pipe"))
    stream = faults.Tolerant(Mock(write=gone, flush=gone))
    assert stream.write("a line\n") == 7
    print("another", file=stream, flush=True)


# ---- for long -------------------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_a_run_survives_a_fault_every_two_steps(pool, tmp_path):
    """Its end state is that of an undisturbed run, to the bit."""
    draw, count = random.Random(3), 12
    kinds = [draw.choice(["kill", "kill", "raise", "stop", "loop"]) for _ in range(count)]
    places = [draw.choice(["forward", "backward", "collective", "optimizer"]) for _ in range(count)]
    hit, steps = [draw.randrange(4) for _ in range(count)], range(2, 2 + 2 * count, 2)
    flags = f"--steps {4 + 2 * count} --save-every 1 --timeout 15 --metrics {tmp_path}/m"
    process = launch(4, *(",".join(map(str, each)) for each in (kinds, hit, steps, places)),
                     f"{flags} --checkpoint-dir {tmp_path}/out --resume auto", restarts=count)
    out, err = finished(process, timeout_s=1200)
    assert process.returncode == 0 and out.count("fault at") == count, err
    pool.run(4, run, flags=f"{flags} --checkpoint-dir {tmp_path}/straight --metrics "
                                         f"{tmp_path}/straight.jsonl")
    want, got = (tensors(cli.checkpoints_in(tmp_path / name)[0]) for name in ("straight", "out"))
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)
    assert losses(tmp_path / "m") == losses(tmp_path / "straight.jsonl") and left_over(tmp_path) == []
