"""Profiling: a trace of steps 3 to 5 in which phases and actions have names; nothing where it is not asked for."""
import json

import pytest
import torch

import assemble
import config
import job
import pp
import profiling
import train
from meter import Meter


def run(flags: str) -> None:
    settings = config.parse("--layers 2 --hidden 32 --heads 2 --ffn 48 --seq 32 --dtype fp32 --sample= --micro-batch 8 "
                            f"--data {pp.__file__} {flags}".split())
    samples = assemble.open_samples(settings, settings.data.data, 0)
    train.train(settings, samples, None, torch.device("cpu"), "as asked", job.RunState())


def test_a_trace_names_phases_and_actions(tmp_path, capsys):
    run(f"--steps 7 --profile {tmp_path / 'traces'}")
    printed = capsys.readouterr().out
    assert "the longest, by CPU time of their own" in printed
    assert len(printed.split("the longest")[1].split("written:")[0].splitlines()) == 1 + 10
    events = json.loads((tmp_path / "traces" / "rank-0.json").read_text())["traceEvents"]
    count = {name: sum(event.get("cat") == "user_annotation" and event["name"] == name for event in events)
             for name in ("F0.0", "F0.1", "B0.1", "forward and backward", "optimizer", "read data", "ProfilerStep#2",
                          "ProfilerStep#3", "ProfilerStep#5", "ProfilerStep#6")}
    assert list(count.values()) == [3] * 6 + [0, 1, 1, 0]


def test_names_cost_no_operation_unless_a_profiler_is_on():
    with Meter() as meter, profiling.named("a name"):
        pass
    assert meter.operations == 0


@pytest.mark.parametrize("flags, says", [
    ("--profile {file}", "--profile {file}: is a file, name a folder"),
    ("--memory-snapshot no/such/file", "--memory-snapshot no/such/file: there is no folder no/such")])
def test_what_cannot_be_written_is_refused_before_the_run(flags, says):
    with pytest.raises(ValueError, match="^" + says.format(file=__file__)):
        config.parse(flags.format(file=__file__).split())
