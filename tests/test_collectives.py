"""The named collectives: results, derivatives against dense autograd, and bytes counted against bytes computed."""
import ast
import contextlib
import datetime
import itertools
import os
import sys
import threading
from types import SimpleNamespace

import pytest
import sharding
import torch
import torch.distributed as dist
from grids import DEEPSEEK, LATENT, MIXTRAL, everyone, for_each
from program import ROOT, python

from core import collectives
from run import dryrun, ranks
from run.data import MicroBatch


def duals() -> list[tuple[float, int]]:
    """On every rank: the largest error of each Function's result and derivative, against all ranks' tensors together;
    and the bytes of both that are counted. Tensors are not contiguous, and upstream gradients differ between ranks, so
    that a sum too many or too few shows. Rank i gives rank j (3 + i + 2 j) % 4 rows in the last of them."""
    group, n, r = everyone(), dist.get_world_size(), dist.get_rank()
    rows, found = 4 * n, []
    xs, ups = ([torch.randn(3, 2, length, generator=torch.Generator().manual_seed(first + i),
                            dtype=torch.float64).transpose(0, 2) for i in range(n)]
               for length, first in ((rows, 0), (n * rows, 50)))
    given = [[(3 + i + 2 * j) % 4 for j in range(n)] for i in range(n)]
    received = [list(column) for column in zip(*given)]
    for function, x, splits, want, want_grad in (
            (collectives.Identity__AllReduce, xs[0], [], xs[0], sum(ups)[:rows]),
            (collectives.AllReduce__Identity, xs[r], [], sum(xs), ups[r][:rows]),
            (collectives.AllGather__ReduceScatter, xs[r], [], torch.cat(xs), sum(ups)[rows * r:rows * (r + 1)]),
            (collectives.AllToAll__AllToAll, xs[r][:sum(given[r])], [received[r], given[r]],
             *(torch.cat([x[:sum(parts)].split(parts)[r] for x, parts in zip(all_x, of_ranks)])
               for all_x, of_ranks in ((xs, given), (ups, received))))):
        collectives.sent.clear()
        y = function.apply(x.requires_grad_(), *splits, group)
        grad, = torch.autograd.grad(y, x, ups[r][:len(y)])
        error = max((y - want).abs().max().item(), (grad - want_grad).abs().max().item())
        found.append((error, collectives.sent[group.axis]))
    return found


@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_pair_is_the_derivative_of_the_other(pool, n):
    """And sends what a ring sends, or rows that do not stay."""
    row = 2 * 3 * 8
    x = 4 * n * row
    for r, found in enumerate(pool.run(n, duals)):
        errors, sent = zip(*found)
        rows = sum((3 + r + 2 * j) % 4 + (3 + j + 2 * r) % 4 for j in range(n) if j != r)
        assert max(errors) < 1e-12
        assert sent == (2 * (n - 1) * x // n, 2 * (n - 1) * x // n, 2 * (n - 1) * x, rows * row)


def recorded() -> tuple[list[ranks.Call], dict[str, int]]:
    """The flight record after each collective, and bytes by axis; a second group has a record of its own."""
    group, me = collectives.Group("pp", dist.group.WORLD), dist.get_rank()
    other, x, y, out = collectives.Group("dp", dist.group.WORLD), torch.ones(4), torch.ones(2), []
    ranks.record.calls.clear()
    collectives.sent.clear()
    for call in (lambda: collectives.all_reduce(x, group), lambda: collectives.all_reduce(x, other, collectives.MAX),
                 lambda: collectives.all_gather(x, y, group), lambda: collectives.reduce_scatter(y, x, group),
                 lambda: collectives.all_to_all(x, x.clone(), [2, 2], [2, 2], group),
                 lambda: collectives.shift(y, torch.ones(2), group).wait(),
                 lambda: (collectives.receive if me else collectives.send)(x, 1 - me, group).wait(),
                 lambda: collectives.all_reduce(x, group)):
        call()
        assert ranks.record.waiting_for is None
        out.append(ranks.record.last)
    return out, dict(collectives.sent)


def test_a_rank_records_what_it_calls_on_which_axis(pool):
    """As a watchdog reads it: operation, axis, the number of the call there, and who is at the other end. Transfers, of
    which ranks make different numbers, do not count among collectives."""
    operations = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift"]
    for me, (calls, sent) in enumerate(pool.run(2, recorded)):
        assert calls.pop(1) == ("all_reduce", "dp", 1, None)
        assert calls == [*((name, "pp", number, None) for number, name in enumerate(operations, 1)),
                         ("receive" if me else "send", "pp", 1, 1 - me), ("all_reduce", "pp", 6, None)]
        assert sent == {"dp": 16, "pp": 16 + 8 + 8 + 8 + 8 + 16 * (1 - me) + 16}


@pytest.mark.parametrize("device, where", [
    ("cpu", dict(backend="gloo")), ("cuda:1", dict(backend="nccl", device_id=torch.device("cuda:1")))])
def test_a_world_waits_as_long_as_asked_and_is_left_together(monkeypatch, device, where):
    did, store = [], dist.HashStore()
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(dist, "init_process_group", lambda **how: did.append(how))
    monkeypatch.setattr(dist, "barrier", lambda: did.append("barrier"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: did.append("destroyed"))
    how = dict(where, store=store, rank=2, world_size=3, timeout=datetime.timedelta(seconds=90))
    with collectives.world(device, 90, store):
        did.append("body")
    with pytest.raises(KeyError), collectives.world(device, 90):
        raise KeyError
    assert did == [how, "body", "barrier", "destroyed", how | dict(store=None)]  # after an exception the process exits
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "new_group", lambda **how: how)
    assert ranks.host_group(90).process_group == dict(backend="gloo", timeout=datetime.timedelta(seconds=90))


@pytest.mark.parametrize("call", [
    lambda x, y, group: collectives.all_gather(x, y[:2], group), lambda x, y, group: collectives.send(x, 1, group),
    lambda x, y, group: collectives.all_gather(y, x[:2], group), lambda x, y, group: collectives.receive(x, 1, group),
    lambda x, y, group: collectives.reduce_scatter(x[:2], y, group), lambda x, y, group: collectives.shift(x, y, group),
    lambda x, y, group: collectives.reduce_scatter(y[:2], x, group), lambda x, y, group: collectives.shift(y, x, group),
    lambda x, y, group: collectives.all_to_all(x, y, [2, 2], [2, 2], group),
    lambda x, y, group: collectives.all_to_all(y, x, [2, 2], [2, 2], group),
    lambda x, y, group: collectives.all_reduce(x, group)], ids=range(11))
def test_no_collective_takes_a_strided_tensor(call):
    with dryrun.fake_world(2, 0):
        call(torch.ones(4, 4), torch.ones(4, 4), everyone())
        with pytest.raises(AssertionError):
            call(torch.ones(4, 4).t(), torch.ones(4, 4), everyone())


def test_a_group_of_one_rank_sends_nothing_to_the_world():
    own, incoming = torch.full((3,), 10.0), torch.empty(3)
    with dryrun.fake_world(2, 0):
        collectives.sent.clear()
        collectives.shift(incoming, own, collectives.ALONE).wait()
        assert incoming.tolist() == [10.0] * 3 and sum(collectives.sent.values()) == 0
        for transfer, verb in (collectives.send, "send to"), (collectives.receive, "receive from"):
            with pytest.raises(AssertionError, match=f"^a group of one rank has no peer to {verb}$"):
                transfer(own, 0, collectives.ALONE)


def test_a_pending_has_ended_when_all_of_its_work_has_and_then_holds_nothing():
    ended, x = [True, False], torch.ones(1)
    works = [SimpleNamespace(is_completed=lambda i=i: ended[i], wait=lambda i=i: ended.__setitem__(i, True))
             for i in range(2)]
    pending = collectives.Pending(works, x)
    assert not pending.completed() and pending.tensors == (x,)
    assert pending.wait() is x
    assert pending.completed() and (pending.works, pending.tensors, pending.result) == ([], (), None)
    synchronous = collectives.Pending(None, x)
    assert synchronous.completed() and synchronous.tensors == () and synchronous.wait() is x


def test_seconds_of_all_waits_of_a_step_add_up(monkeypatch):
    """And what it waits for stays known if that fails. On GPUs backward runs in autograd's threads, which count, too;
    the thread that saves does not."""
    ticks = itertools.count(step=2.5)
    record = ranks.FlightRecord()
    monkeypatch.setattr(ranks.time, "perf_counter", lambda: next(ticks))
    calls = [ranks.Call("all_reduce", "dp", number) for number in (1, 2, 3)]

    def wait(call):
        with record.waiting(call):
            return record.waiting_for

    def in_thread(name):
        thread = threading.Thread(target=wait, args=calls[:1], name=name)
        thread.start()
        thread.join()

    assert [wait(call) for call in calls[:2]] == calls[:2]
    assert record.waited_s == 2 * 2.5 and record.waiting_for is None
    for name, turns in (ranks.SAVING, 2), ("autograd's", 3):
        in_thread(name)
        assert record.waited_s == turns * 2.5
    with pytest.raises(KeyError), record.waiting(calls[2]):
        in_thread(ranks.SAVING)
        raise KeyError
    assert record.waiting_for == calls[2]


def test_of_several_problems_all_ranks_raise_the_first(monkeypatch):
    def fail():
        raise ValueError("second")

    monkeypatch.setattr(ranks, "gather_objects", lambda problem, group: [None, "first", problem, None])
    for work in (fail, lambda: 7):
        with pytest.raises(ValueError, match="^first$"):
            ranks.agree(work, "all ranks")
    monkeypatch.setattr(ranks, "gather_objects", lambda problem, group: [None, problem])
    with pytest.raises(ValueError, match="^second$"):
        ranks.agree(fail, "all ranks")
    assert ranks.agree(lambda: 7, "all ranks") == 7


@pytest.mark.parametrize("index, late, limits", [(0, "1, 2", [30, 9, 0.001]), (1, "0", [40])])
def test_rank_0_which_knows_who_is_missing_gives_up_first(monkeypatch, index, late, limits):
    """However many questions it answers meanwhile. The store waits, and nobody polls it."""
    clock, waits = [0.0], []

    def wait(keys, limit):
        waits.append(limit.total_seconds())
        clock[0] += 21
        if len(waits) == len(limits):
            raise dist.DistStoreError("wait timeout")

    store = SimpleNamespace(wait=wait, queue_push=lambda *_: None, queue_pop=lambda key: b"1 gone",
                            set=lambda *_: None)
    monkeypatch.setattr(collectives.dist, "rendezvous", lambda *_, **__: iter([(store, index, 3)]))
    monkeypatch.setattr(ranks.time, "monotonic", lambda: clock[0])
    with pytest.raises(TimeoutError, match=f"^rank {late} has not started in 30 s$"):
        ranks.meet(30)
    assert waits == limits


# ---- what `python FILE.py` does --------------------------------------------------------------------------------------

@pytest.mark.parametrize("words", [["demo.py"], ["-m", "learn.x"]])
@pytest.mark.parametrize("env, ranks, want", [
    ({}, 1, "alone"), ({}, 3, "started"), ({"WORLD_SIZE": "1"}, 3, "in a world")])
def test_a_demo_runs_alone_in_torchruns_ranks_or_in_ranks_that_it_starts(monkeypatch, env, ranks, want, words):
    done = []
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for key, value in dict(OMP_NUM_THREADS="7", **env).items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    monkeypatch.setattr(sys, "orig_argv", ["python", *words])
    monkeypatch.setattr(os, "execv", lambda *how: done.append((*how, os.environ["OMP_NUM_THREADS"])))
    monkeypatch.setattr(collectives, "world", lambda: contextlib.nullcontext("all ranks"))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: done.append(count))
    collectives.run_demo(done.append, ranks)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=3", *words]
    assert done == [1] + {"alone": [collectives.ALONE], "in a world": ["all ranks"],
                          "started": [(sys.executable, torchrun, "1")]}[want]


# ---- copies between the host and a GPU, by stand-ins -----------------------------------------------------------------

def test_copies_to_a_gpu_are_made_from_pinned_memory_and_not_waited_for(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: (seen.append("pinned"), x)[1])
    monkeypatch.setattr(torch.Tensor, "to", lambda x, device, non_blocking: (
        seen.append((str(device), non_blocking)), x)[1])
    MicroBatch(torch.ones(1, 2), torch.ones(1, 2)).to(torch.device("cuda"))
    assert seen == 2 * ["pinned", ("cuda", True)]


def test_numbers_of_a_gpu_are_copied_to_pinned_memory_and_waited_for_when_they_are_read(monkeypatch):
    seen, empty = [], torch.empty
    event = SimpleNamespace(record=lambda: seen.append("recorded"),
                            synchronize=lambda: seen.append(ranks.record.waiting_for))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory, **how: (seen.append(f"pinned {pin_memory}"),
                                                                           empty(*shape, **how))[1])
    monkeypatch.setattr(torch.Tensor, "copy_", lambda out, x, non_blocking: (
        seen.append(f"copied, not waited for {non_blocking}"), torch.add(x, 0, out=out))[1])
    calls = [ranks.Call("all_reduce", "world", number) for number in (1, 2)]
    monkeypatch.setattr(ranks.record, "last", calls[0])
    copy = ranks.HostCopy(loss=torch.tensor(2.5), votes=torch.tensor([1.0, 0.0]), one=torch.tensor([3.0]),
                                steps=torch.tensor(2**24 + 1))
    ranks.record.last = calls[1]
    assert seen == ["pinned True", "copied, not waited for True", "recorded"]
    assert copy.read() == dict(loss=2.5, votes=[1.0, 0.0], one=[3.0], steps=2**24 + 1)
    assert seen[3:] == [calls[0]]  # as a watchdog sees it: what was called before the copy


@pytest.mark.parametrize("words, path", [
    (["zero.py"], "zero.py"), (["-m", "learn.written_out"], "learn/written_out.py")])
def test_a_file_without_flags_refuses_them_and_explains_itself(words, path):
    wrong = python(*words, "--pp", "2")
    assert (wrong.returncode, wrong.stdout) == (2, "") and "error: unrecognized arguments: --pp 2\n" in wrong.stderr
    helped = python(*words, "--help")
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text()), clean=False)
    assert (helped.returncode, helped.stderr) == (0, "") and docstring in helped.stdout


def test_nothing_is_sent_that_nobody_reads(pool):
    """Numbers, that is, in a step; pp.py's engine asserts the same of what it transfers."""
    again = ("--tp 2", "--tp 2 --sp off --mtp", "--tp 2 --sp async --kv-heads 1", "--cp 2", "--cp 2 --cp-style ring",
             "--cp 2 --cp-style ulysses", "--zero 3 --bucket-mb 0", f"{LATENT} --cp 2", f"{LATENT} --tp 2 --sp off",
             f"{MIXTRAL} --tp 2 --ep 2", f"{DEEPSEEK} --tp 2 --sp off", f"{DEEPSEEK} --tp 2 --sp off --ep 2")
    grids = "--tp 2", f"{MIXTRAL} --ep 2 --zero 2", *(f"{flags} --recompute full" for flags in again)
    cases = [dict(flags=f"--layers 2 --global-batch 2 {flags}") for flags in grids]
    for flags, of_ranks in zip(grids, for_each(pool, 2, sharding.unread, cases), strict=True):
        for found in of_ranks:
            unread = [call for *call, is_read in found if not is_read]
            assert found and not unread, f"{flags}: nobody reads what {unread} delivers"
