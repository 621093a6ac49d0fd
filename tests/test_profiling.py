"""Profiling: a trace of steps 3 to 5 in which phases and actions have names; nothing where it is not asked for."""
import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from grids import TINY, everyone
from runs import run
from watch import in_order

import pp
from core.collectives import Pending
from run import cli, log
from run.meter import Meter
from schedules import make_plan

SEVEN_STEPS = f"{TINY} --dtype fp32 --sample-prompt= --micro-batch 8 --steps 7 --data {pp.__file__} --profile"


def test_a_trace_names_phases_and_actions(tmp_path):
    assert "Self CPU time total" in run(f"{SEVEN_STEPS} {tmp_path / 'traces'}")
    events = json.loads((tmp_path / "traces" / "rank-0.json").read_text())["traceEvents"]
    count = {name: sum(event.get("cat") == "user_annotation" and event["name"] == name for event in events)
             for name in ("F0.0", "F0.1", "B0.1", "forward and backward", "optimizer", "read data", "ProfilerStep#2",
                          "ProfilerStep#3", "ProfilerStep#5", "ProfilerStep#6")}
    assert list(count.values()) == [3] * 6 + [0, 1, 1, 0]


def test_a_trace_that_a_full_disk_has_no_room_for_is_a_warning(tmp_path):
    """Torch says nothing, and leaves a file of another name."""
    (tmp_path / "rank-0.json").touch()
    with patch.object(torch.profiler.profile, "export_chrome_trace", lambda self, path: Path(f"{path}.tmp").touch()):
        printed = run(f"{SEVEN_STEPS} {tmp_path}")
    assert "written:" not in printed
    assert f"warning: --profile {tmp_path}: the trace could not be written there: is the disk full?" in printed


@pytest.mark.parametrize("cuda, by", [(False, "self_cpu_time_total"), (True, "self_device_time_total")])
def test_the_longest_operations_are_those_of_the_device(monkeypatch, tmp_path, capsys, cuda, by):
    monkeypatch.setattr(log, "profile", lambda on_trace_ready, **_: on_trace_ready)
    averages = SimpleNamespace(table=lambda sort_by, row_limit, **_: f"{row_limit} by {sort_by}\n")
    profiler = SimpleNamespace(export_chrome_trace=lambda path: Path(path).touch(), key_averages=lambda: averages)
    log.start_profiler(str(tmp_path), 0, cuda)(profiler)
    assert capsys.readouterr().out == f"10 by {by}\nwritten: {tmp_path}/rank-0.json\n"


@pytest.mark.parametrize("rank, steps, dumped_after", [(0, 4, range(1, 5)), (0, 9, range(1, 7)), (1, 9, [])])
def test_rank_0_writes_who_allocated_memory_after_each_of_six_steps(monkeypatch, rank, steps, dumped_after):
    """So a run that fails has that of its last step."""
    dumps, recorded, done = [], [], 0
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: recorded.append(done))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: dumps.append((path, done)))
    with log.profiling("", "memory.pickle", rank, torch.device("cpu")) as end_step:
        for _ in range(steps):
            done += 1
            end_step()
    assert recorded == [0] and dumps == [("memory.pickle", step) for step in dumped_after]


def order_of_waits() -> list[str]:
    """When the engine of this rank of 1f1b waits for a receive, and when an action begins for traces and dry runs."""
    @contextmanager
    def around(action):
        seen.append("begins")
        yield

    weight = torch.nn.Parameter(torch.ones(1))
    engine = pp.Engine(make_plan("1f1b", 2, 2), everyone(), around=around)
    receives = Pending, "wait", lambda each: "wait" if each.call and each.call.operation == "receive" else None
    with in_order(receives) as seen:
        engine.run(lambda stage, k, x: (torch.ones(1) if x is None else x) * weight, (1,), torch.float32)
    return seen


def test_what_an_action_waits_for_is_not_its_time(pool):
    """1f1b's first rank does F F B B and waits before each B; its last rank F B F B, and waits before each F."""
    assert pool.run(2, order_of_waits) == [
        ["begins", "begins", "wait", "begins", "wait", "begins"], ["wait", "begins", "begins"] * 2]


def test_names_cost_no_operation_unless_a_profiler_is_on():
    with Meter() as meter, pp.profile_range("a name"):
        pass
    assert meter.operations == 0


@pytest.mark.parametrize("flags, says", [
    ("--profile {file}", "--profile {file}: is a file, name a folder"),
    ("--memory-snapshot {file}/a", "--memory-snapshot {file}/a: {file} is a file")])
def test_what_cannot_be_written_is_refused_before_the_run(flags, says):
    with pytest.raises(ValueError, match="^" + says.format(file=__file__)):
        cli.parse(flags.format(file=__file__).split())
