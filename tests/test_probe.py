"""The network probe: fits that find latency and bandwidth, slow pairs by name, and the file that plan/ reads."""
import contextlib
import io
import itertools
import json
import os
import re
import time
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from program import python
from watch import in_order

from bench import probe
from core.collectives import Group
from plan.machines import read_machine


def samples(latency: float, bandwidth: float, factor: float) -> list[probe.Sample]:
    return [probe.Sample(4 ** k, latency + factor * 4 ** k / bandwidth, 0, 0) for k in range(5, 13)]


def test_a_fit_finds_latency_and_bus_bandwidth():
    latency, bandwidth, error = probe.fit(samples(2e-5, 3e9, 1.5), 1.5)
    assert (latency, bandwidth, error) == pytest.approx((2e-5, 3e9, 0), rel=1e-6, abs=1e-9)
    *others, largest = samples(2e-5, 3e9, 1.5)
    off = probe.fit([*others, largest._replace(seconds=largest.seconds * 1.3)], 1.5)
    assert off.latency == pytest.approx(2e-5, rel=0.1) and off.bandwidth == pytest.approx(3e9, rel=0.3)
    assert off.error < 0.2  # a large payload that is off does not decide the latency


def test_a_fit_has_no_negative_part():
    growing = [probe.Sample(n, n ** 1.5 / 1e9, 0, 0) for n in (1024, 4096, 16384)]
    assert probe.fit(growing, 1.0).latency == 0 and probe.fit(growing, 1.0).bandwidth > 0
    shrinking = [probe.Sample(n, 1e-3 - n / 1e9, 0, 0) for n in (1024, 4096, 16384)]
    assert probe.fit(shrinking, 1.0).latency > 0 and 0 < probe.fit(shrinking, 1.0).bandwidth < float("inf")


def test_bus_bandwidth_has_the_factors_of_nccl_tests():
    factors = {op: factor(8) for op, factor in probe.FACTORS.items()}
    assert factors == {"all_reduce": 1.75, "reduce_scatter": 0.875, "all_gather": 0.875, "all_to_all": 0.875,
                       "broadcast": 1, "reduce": 1, "scatter": 0.875, "gather": 0.875, "send": 1}


def test_a_slow_pair_is_named_and_judged_among_pairs_of_its_kind():
    seconds = torch.full((4, 4), 1e-4, dtype=torch.float64)
    seconds[0:2, 2:4] = seconds[2:4, 0:2] = 5e-4  # two nodes of two ranks
    seconds[1, 0] = seconds[0, 1] = 1.1e-4
    line, = probe.name_slow_pairs(seconds, 2)
    assert line.startswith("no slow pair; the slowest: ranks 0 and 1 exchange 1 MiB in 110 us, 1.0 times the median of "
                           "2 pairs inside a node; ranks ")
    seconds[3, 0] = seconds[0, 3] = 2e-3
    line, = probe.name_slow_pairs(seconds, 2)
    assert line == "slow pair: ranks 0 and 3 exchange 1 MiB in 2,000 us, 4.0 times the median of 4 pairs between nodes"
    assert probe.name_slow_pairs(torch.ones(3, 3), 3)[0].startswith("no slow pair")


def test_a_level_of_the_cluster_file_has_latencies_per_hop():
    level = probe.describe_level("node", 4, 4, dict.fromkeys(probe.FACTORS, probe.Fit(6e-5, 1e9, 0.0)))
    latencies = {op: figures["latency_s"] for op, figures in level["per_collective"].items()}
    assert latencies["all_reduce"] == 1e-5 and latencies["all_gather"] == 2e-5 and latencies["send"] == 6e-5
    assert (level["latency_s"], level["bandwidth_bytes_per_s"]) == (2e-5, 1e9)


@pytest.mark.parametrize("flags, message", [
    ("--out", "--out: expected one argument"),
    ("--out /nowhere/c.json", "--out /nowhere/c.json: there is no folder /nowhere"),
    ("--out /tmp", "--out /tmp is a folder: name a file"),
    ("--tp 3", "--tp 3 does not divide the ranks that --pp leaves (4): ")])
def test_a_probe_that_cannot_run_is_refused(flags, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        probe.parse(flags.split(), 4)


def test_a_probe_needs_ranks():
    done = python("-m", "bench.probe", "--tp", "2")
    assert (done.returncode, done.stderr) == (2, "bench.probe: a network needs several ranks: run under torchrun "
                                                 "--nproc_per_node=4 -m bench.probe\n")


def short_probe(flags: list[str], local_ranks: int, slow: tuple[int, ...]) -> str:
    """What the first rank prints of a short probe, of nodes with so many ranks, in which one pair is slow."""
    def delay(group, outgoing, to, *_):
        time.sleep(0.1 * ({to, dist.get_rank()} == set(slow)))

    with (patch.multiple(probe, SECONDS={"cpu": 0}, TURNS=2), in_order((probe.ring, "exchange", delay)),
          patch.dict(os.environ, LOCAL_WORLD_SIZE=str(local_ranks)),
          contextlib.redirect_stdout(io.StringIO()) as printed):
        probe.probe(*probe.parse(flags, dist.get_world_size()), torch.device("cpu"))
    return printed.getvalue()


def payloads_measured_with_a_late_clock() -> int:
    """How many; the last rank's clock says that time is up long before the others' do."""
    clock, hours = time.perf_counter, itertools.count()
    group = Group("world", dist.group.WORLD)
    with patch.object(probe, "TURNS", 2), patch.object(
            probe.time, "perf_counter", lambda: clock() + 3600 * (next(hours) if group.rank else 0)):
        return len(probe.measure_op("all_reduce", group, torch.device("cpu"), 2**16, limit_s=60))


def test_ranks_end_a_probe_together_whatever_their_clocks_say(pool):
    first, second = pool.run(2, payloads_measured_with_a_late_clock)
    assert first == second == 3


def test_a_probe_measures_every_axis_and_writes_the_cluster_file(pool, tmp_path):
    out = tmp_path / "cluster.json"
    arguments = dict(flags=["--out", str(out), "--tp", "2", "--pp", "2"], local_ranks=2, slow=(1, 3))
    printed, *others = pool.run(4, short_probe, **arguments)
    assert not any(others)
    machine = read_machine(str(out))
    assert machine.gpus_per_node == 2 and machine.name.startswith("2 x 2 ") and machine.memory_bytes > 1e6
    assert 1e8 < machine.host_link < 1e12 and 1e8 < machine.host_memory < 1e12
    assert [(level.name, level.ranks) for level in machine.levels] == [("node", 2), ("network", 4)]
    cluster = json.loads(out.read_text())
    assert set(cluster["measured"]) == {"date", "backend", "torch", "device"}
    for level in cluster["levels"]:
        assert set(level["per_collective"]) == set(probe.FACTORS)
        for figures in (level, *level["per_collective"].values()):
            assert figures["latency_s"] >= 0 and 0 < figures["bandwidth_bytes_per_s"] < float("inf")
    assert [line for line in printed.splitlines() if "groups at once" in line] == [
        "node, tp: 2 ranks (0 1); groups at once: 2", "network, pp: 2 ranks (0 2); groups at once: 2"]
    assert "slow pair: ranks 1 and 3 exchange 1 MiB in " in printed and "pairs between nodes" in printed
    assert printed.endswith(f"written: {out}\n")


@pytest.fixture
def alone(monkeypatch):
    """One rank, whose times count."""
    monkeypatch.setattr(probe, "slowest", lambda seconds, device: seconds)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    return torch.device("cpu")


def test_a_turn_repeats_short_calls_for_three_milliseconds(alone, monkeypatch):
    """One call first, one to estimate, then 7 turns, of 20 calls at most; a turn's time is that of one call."""
    now = [0.0]
    monkeypatch.setattr(probe.time, "perf_counter", lambda: now[0])
    for seconds, repeats in (0.9e-3, 3), (1e-5, 20), (0.5, 1):
        calls = []

        def call(seconds=seconds, calls=calls):
            now[0] += seconds
            calls.append(seconds)

        assert probe.time_turns(call, alone) == pytest.approx([seconds] * 7)
        assert len(calls) == 2 + 7 * repeats


def test_a_sample_is_the_median_with_its_deciles_while_time_allows(alone, monkeypatch):
    turns = [7e-3, 1e-3, 3e-3, 2e-3, 5e-3, 4e-3, 6e-3, 8e-3, 9e-3, 10e-3, 11e-3]
    monkeypatch.setattr(probe, "time_turns", lambda call, device: turns)
    monkeypatch.setattr(probe, "prepare", lambda op, nbytes, group, device: (nbytes, None))
    found = probe.measure_op("send", None, alone, 1 << 16, 1e9)
    assert [sample.nbytes for sample in found] == [1 << k for k in (10, 12, 14, 16, 18, 22)]
    assert set(sample[1:] for sample in found) == {(6e-3, 2e-3, 10e-3)}
    assert [sample.nbytes for sample in probe.measure_op("send", None, alone, 1 << 30, 0.0)] == [1 << 10, 1 << 18,
                                                                                                 1 << 22]
    # 4 kB more would take 9 turns at the best rate of before, 4 MB in 6 ms
    monkeypatch.setattr(probe.time, "perf_counter", lambda: 1.0)
    limit = 9 * (1 << 12) / ((1 << 22) / 6e-3)
    assert [len(probe.measure_op("send", None, alone, 1 << 12, share * limit)) for share in (0.9, 1.1)] == [3, 4]


def test_rates_of_the_host_count_what_is_read_and_written(alone, monkeypatch):
    monkeypatch.setattr(probe, "time_turns", lambda call, device: (call(), [0.25, 0.5, 4.0])[1])
    monkeypatch.setattr(probe, "HOST_BYTES", 1 << 20)
    assert probe.host_rates(alone) == dict(host_link_bytes_per_s=2.0 ** 21, host_memory_bytes_per_s=2.0 ** 22)


@pytest.mark.parametrize("device, peak", [("", 0), ("NVIDIA RTX PRO 6000", 0), ("NVIDIA H100 80GB HBM3", 989e12)])
def test_a_measured_rate_is_read_back_as_it_was_measured(alone, monkeypatch, tmp_path, device, peak):
    """With the peak of the data sheet or, of CPUs and a GPU that is in no table, with none."""
    randn, where = torch.randn, SimpleNamespace(type="cuda") if device else alone
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: device)
    monkeypatch.setattr(torch, "randn", lambda *shape, device, dtype: randn(8, 8))
    monkeypatch.setattr(probe, "memory_of_device", lambda where: 2**30)
    monkeypatch.setattr(probe, "host_rates", lambda where: {})
    monkeypatch.setattr(probe, "time_turns", lambda call, device: [0.25, 0.5, 4.0])
    level = dict(name="node", ranks=4, latency_s=1e-6, bandwidth_bytes_per_s=1e9)
    cluster = probe.describe_cluster([level], where, 4)
    assert cluster["name"].startswith("2 x 4 ") and cluster.get("peak_flops", {}).get("bf16", 0) == peak
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(cluster))
    machine, measured = read_machine(str(file)), 2 * (8192 if device else 512) ** 3 / 0.5
    assert (machine.best_matmul(), machine.best_matmul(fp8=True)) == (measured, 2 * measured)
    assert machine.peak() == (peak or measured)


def test_a_probe_prints_microseconds_and_bus_bandwidth(monkeypatch):
    """And a curve, with a step for each factor of two."""
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 4])
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    rates = {0: 1e3, 1: 7.8e6, 3: 2.5e8, 4: 5e8, 5: 1e9}  # bus bytes per second of payloads of 4**k kB; none of 16 kB
    found = [probe.Sample(1024 * 4 ** k, 1024 * 4 ** k * 0.5 / rate, 1e-3, 4e-3) for k, rate in rates.items()]
    group = SimpleNamespace(size=2, process_group=None)
    lines = probe.describe("dp", group, dict(all_gather=found), dict(all_gather=probe.Fit(15e-6, 0.75e9, 0.2)))
    assert lines[6].split() == ["all_gather", "262,144", "262.1", "1,000", "to", "4,000", "1.000", "0.500"]
    assert lines[-2].split() == ["all_gather", "15.0", "0.750", "20%", "▁▁·▆▇█"]
