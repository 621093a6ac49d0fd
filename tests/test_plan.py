"""The plan: memory equal to train.py's, pipelines as schedules.py simulates them, the best grid, refusals.

test_published.py says how far predictions are off.
"""
import contextlib
import json
import math
import re
import subprocess
import sys
import time
from collections import Counter
from functools import cache
from itertools import chain, product
from types import SimpleNamespace

import grids
import pytest
from program import ROOT
from tqdm import tqdm

import muon
import plan.__main__
import plan.memory
import plan.step_time
import schedules
import train
from core import config, rules
from core.groups import build_groups, members_of_axes
from dp import assign_to_buckets
from plan import costs, machines, scaling, search
from plan.machines import MACHINES, Level, Machine
from plan.step_time import Code, Run, Seconds
from run import dryrun


def run_for(flags: str, ranks: int = 0, machine: str = "h100", **rest) -> Run:
    arguments = flags.split()
    settings = rules.parse(arguments, ranks or plan.__main__.world_of(arguments))
    settings.precision.dtype = "bf16"
    return Run(settings, MACHINES[machine], **rest)


class WithoutOverlap(Code):
    overlaps = False


def printed(capsys, command: str) -> str:
    plan.__main__.main(command.split())
    return capsys.readouterr().out


# ---- parameters and memory ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("flags, ranks", [
    ("--preset llama-3.2-1b --tp 2 --pp 2 --recompute selective", 8),
    ("--preset llama-3.1-8b --tp 2 --zero 3 --bucket-mb 100", 8),
    ("--preset qwen2.5-0.5b --tp 2 --cp 2 --zero 2 --sp off", 8),
    ("--preset smollm-135m --pp 3 --schedule zb-h1 --moments-dtype bf16", 6),
    ("--preset mixtral-8x7b --tp 2 --ep 4 --zero 1 --pp 2 --schedule zb-v", 16),
    ("--preset qwen3-0.6b --fp8 tensorwise --pp 4 --schedule interleaved --zero 1", 8),
    ("--preset llama-3.1-8b --mtp --tp 2 --pp 2 --zero 1", 8),
    ("--preset llama-3.2-1b --mtp --pp 4 --schedule zb-v --zero 3", 8),
    ("--preset llama-3.1-8b --tp 16 --seq-len 512 --recompute full", 16),
    ("--preset qwen2.5-0.5b --tp 2 --zero 2 --optimizer muon", 8),
    ("--preset llama-2-7b --zero 2 --optimizer muon", 8),
    ("--preset llama-3.2-1b --tp 2 --zero 2 --optimizer muon --out-bias --ffn-bias", 8),
    ("--preset llama-3.2-1b --mtp --pp 2 --zero 3 --optimizer muon", 8),
    ("--preset deepseek-v3 --mtp --ep 16 --pp 4 --zero 1 --fp8 blockwise --no-fp8-ends", 64),
    ("--preset deepseek-v3 --mtp --ep 16 --pp 4 --zero 1 --optimizer muon", 64)])
def test_memory_is_that_of_the_buckets_and_stages_that_train_py_builds(flags, ranks):
    run = run_for(f"{flags} --global-batch 64 --micro-batch 1", ranks)
    settings, grid = run.settings, run.settings.grid
    for rank in range(grid.pp):
        me = rank * ranks // grid.pp + grid.tp - 1  # one with the most rows of the vocabulary
        groups = grids.NO_GROUPS | {
            axis: SimpleNamespace(size=len(members), rank=members.index(me))
            for axis, lists in members_of_axes(grid, settings.model, ranks).items() for members in lists
            if me in members and len(members) > 1}
        model = train.build_model(settings, groups, "cpu")
        stages, (in_flight, backwards) = (plan.memory.stages_of_rank(settings, rank),
                                          plan.memory.plan_in_memory(settings, rank))
        actions = train.build_pipeline(settings, groups, "cpu").plan_of(64 // grid.dp).ranks[rank]
        assert stages == model.layers_of_stage and in_flight == train.own_stages(settings, groups["pp"]).in_flight
        assert set(backwards) == set(plan.memory.backwards_in_memory(actions))
        built, kind = {}, muon.kind_of if settings.optim.optimizer == "muon" else lambda spec: None
        for params in assign_to_buckets(model.units(), 0 if grid.zero == 3 else grid.bucket_mb, groups, kind):
            built.setdefault(next(iter(params)).spec.data_axis, []).append(sum(param.numel() for param in params))
        buckets = costs.bucket_elements(settings, stages, 2)
        assert {axis: sorted(counts) for axis, counts in buckets.items() if counts} == {
            axis: sorted(counts) for axis, counts in built.items()}
        for number, block in model.blocks.items():
            specs = [param.spec for param in block.parameters() if muon.kind_of(param.spec) == "matrix"]
            shapes = Counter(muon.matrix_shape(spec) for spec in specs for _ in range(spec.matrices))
            assert shapes == costs.layer_matrices(settings.model, int(number))
        in_16_bits = "router", "w_kv_down", "w_q_down"
        assert costs.fp8_elements(settings, chain(*stages.values())) == sum(
            param.numel() for layer, block in model.blocks.items() if int(layer) in settings.fp8_layers()
            for param in block.parameters() if param.ndim > 1 and not param.spec.name.endswith(in_16_bits))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", config.OPTIMIZERS)
def test_the_optimizers_memory_is_that_of_its_buckets_state(optimizer, dtype):
    """Of every optimizer that core/config.py declares; fp32 weights are their own master weights."""
    settings = rules.parse(f"{grids.TINY} --dtype {dtype} --optimizer {optimizer} --data {__file__}".split())
    *_, built = grids.build(settings)
    states = {id(tensor): tensor.nbytes for bucket in built.buckets for tensor in bucket.state.values()}
    weights = {id(bucket.weights) for bucket in built.buckets} | {id(bucket.weight_shard) for bucket in built.buckets}
    there = sum(nbytes for tensor, nbytes in states.items() if tensor not in weights)
    element = 2 if dtype == "bf16" else 4
    assert plan.memory.memory_of_rank(settings, 0, element)["optimizer"] == there


def test_layers_of_one_kind_are_alike_and_no_others():
    flags = "--preset deepseek-v3 --mtp --window 9 --full-attention-every 3 --dtype bf16 --fp8 tensorwise --no-fp8-ends"
    settings = rules.parse(flags.split())
    model, fp8, kinds = settings.model, settings.fp8_layers(), costs.layer_kinds(settings)
    alike = [(model.window_of(n), n < model.dense_layers, n in fp8, n == model.layers) for n in range(model.blocks)]
    assert [*map(kinds.index, kinds)] == [*map(alike.index, alike)]


def test_heads_that_ulysses_copies_are_in_memory():
    """Of 24 heads, 6 with keys and values, tensor parallel ranks have 12 and 3, which 4 ranks divide as 4 x 3. More
    than others save: 12 heads of the output, and 9 of both keys and values; of 2 layers and 64 / 4 tokens."""
    flags = "--layers 2 --hidden 96 --heads 24 --kv-heads 6 --head-dim 8 --seq-len 64 --tp 2 --cp 4 --global-batch 1"
    ulysses, others = (plan.memory.activation_bytes(rules.parse(f"{flags} --cp-style {style}".split(), 8), 2)
                       for style in ("ulysses", "allgather"))
    assert ulysses - others == 2 * 16 * (12 + 2 * 9) * 8 * 2


# ---- machines -------------------------------------------------------------------------------------------------------

TWO_LEVELS = Machine("test", 8, {"bf16": 1e15}, {"bf16": 8e14}, 80e9, 3e12,
                     (Level("node", 8, 1e-6, 300e9, {"all_reduce": 400e9}), Level("network", 1024, 10e-6, 40e9)))


@pytest.mark.parametrize("n, stride, collective, seconds", [
    (1, 1, "all_gather", 0.0),
    (8, 1, "all_gather", 1 / 300 + 7e-6),  # inside a node
    (8, 1, "all_reduce", 1 / 400 + 7e-6),
    (16, 1, "all_gather", 1 / 300 + 15 * 10e-6),  # eight cards carry 320 GB/s, the node's links 300
    (4, 4, "all_gather", 1 / 80 + 3 * 10e-6),  # two ranks per node: two cards
    (4, 8, "all_gather", 1 / 40 + 3 * 10e-6)],  # one rank per node
    ids=["one rank", "in a node", "all-reduce in a node", "two nodes", "two ranks per node", "one rank per node"])
def test_a_group_that_leaves_a_node_shares_its_cards(n, stride, collective, seconds):
    assert machines.collective_seconds(TWO_LEVELS, 1e9, n, stride, collective) == pytest.approx(seconds)


def test_a_cluster_file_is_a_machine(tmp_path):
    file, level = tmp_path / "cluster.json", dict(
        name="node", ranks=4, latency_s=2e-6, bandwidth_bytes_per_s=1e11,
        per_collective={"all_reduce": dict(latency_s=1e-6, bandwidth_bytes_per_s=2e11)})

    def read(**more) -> Machine:
        known = dict(name="mine", gpus_per_node=4, peak_flops={"bf16": 2e14}, levels=[level])
        file.write_text(json.dumps(known | dict(memory_bytes=2**34) | more))
        return machines.read_machine(str(file))

    machine = read()
    assert machine.levels[0] == Level("node", 4, 2e-6, 1e11, {"all_reduce": 2e11})
    assert (machine.peak(), machine.memory_bytes, machine.host_link) == (2e14, 2**34, 0.0)
    assert (machine.best_matmul(), machine.best_matmul(fp8=True)) == (0.8 * 2e14, 2 * 0.8 * 2e14)  # 80% if unknown
    assert machine.memory_bandwidth == pytest.approx(2e14 * 3.35e12 / 989e12, rel=2e-3)  # an H100's per FLOP
    with pytest.raises(ValueError, match="--offload both: .*cluster.json has no host_link_bytes_per_s and host_memory"):
        plan.__main__.main(f"step --machine {file} --recompute full --offload both --gpus 1".split())
    machine = read(matmul_flops={"bf16": 1e14, "fp8": 1.5e14}, memory_bytes_per_s=1e12, host_link_bytes_per_s=3e10,
                   host_memory_bytes_per_s=5e10)
    assert (machine.best_matmul(), machine.best_matmul(fp8=True)) == (1e14, 1.5e14) and machine.peak() == 2e14
    assert (machine.memory_bandwidth, machine.host_link, machine.host_memory) == (1e12, 3e10, 5e10)
    with pytest.raises(ValueError, match="--machine .*cluster.json: the file has no 'ranks'"):
        read(levels=[dict(name="node")])
    for wrong in (dict(memory_bytes=math.nan), dict(gpus_per_node=math.inf), dict(peak_flops={}), dict(peak_flops=3),
                  dict(matmul_flops={"bf16": -1}), dict(achieved_fraction=0.5), dict(levels=[]), dict(levels=[3]),
                  dict(levels=[level | dict(bandwidth_bytes_per_s=0)]), dict(host_link_bytes_per_s=-1),
                  dict(memory_bytes_per_s="x")):
        with pytest.raises(ValueError, match="^--machine .*cluster.json: "):
            read(**wrong)
    file.write_text(json.dumps(dict(name="mine", levels=[level])))
    with pytest.raises(ValueError, match="has neither peak_flops nor matmul_flops$"):
        machines.read_machine(str(file))
    file.write_text("[" * 99_999)
    with pytest.raises(ValueError, match="cluster.json: cannot be read"):
        machines.read_machine(str(file))


# ---- a step ---------------------------------------------------------------------------------------------------------

OFFLOADED = "--preset llama-3.1-8b --seq-len 4096 --global-batch 4 --micro-batch 1 --recompute full --offload"


def on_the_machine(run: Run, **other) -> Run:
    """With other rates of memory, of the host's and of the link between them, or other levels."""
    return run._replace(machine=run.machine._replace(**other))


def test_an_update_on_the_host_hides_all_copies_but_the_first_and_the_last():
    """By hand: a bucket's gradient takes 2 s, its update 1 s, its weights 1 s; the link carries both ways at once. Of a
    parameter 22 bytes are read or written on the GPU, on the host 18 and the moments that there are."""
    def seconds(buckets: int, host: float, link: float = 2.0, gpu: float = math.inf, more: str = "") -> float:
        run = on_the_machine(run_for(f"{OFFLOADED} optimizer {more}", 1), memory_bandwidth=gpu, host_link=link,
                             host_memory=host)
        return plan.step_time.update_seconds(run, [1.0] * buckets)

    assert seconds(2, 34.0) == 2 + 2 + 1 + 1
    assert seconds(1, 34.0) == 2 + 1 + 1
    assert seconds(2, math.inf) == 2 + 2 + 1  # the first weights return under a gradient
    assert seconds(2, 3.4) == 2 + 10 + 10 + 1
    for more, moments in ("", 16), ("--moments-dtype bf16", 8), ("--optimizer sgd", 0):
        assert seconds(1, 1.0, math.inf, 1.0, more) == 22 + 18 + moments


def test_inputs_of_blocks_are_copied_under_the_blocks():
    """What a copy takes longer than the block is left: 2 T H / t bytes each way."""
    run = run_for(f"{OFFLOADED} activations --tp 2", 2)
    fast, slow = (plan.step_time.layer_parts(on_the_machine(run, host_link=link), 0) for link in (1e15, 1e8))
    others = [part for name, part in slow.items() if name not in ("offload", "launch")]
    copied = 2 * 4096 * 4096 / 2 / 1e8
    assert fast["offload"] == Seconds()
    assert slow["offload"].forward == pytest.approx(copied - sum(part.forward for part in others))
    assert slow["offload"].input == pytest.approx(copied - sum(part.input + part.weight for part in others))


def test_what_is_pinned_in_the_hosts_memory_is_rounded_to_powers_of_two():
    """As torch 2.11's allocator counted it for Llama 8B with 16 layers: 96.6 GB, where the tensors have 81.7."""
    flags = "--preset llama-3.1-8b --layers 16 --dtype bf16 --global-batch 4 --recompute full".split()
    nbytes = {offload: plan.memory.host_bytes(rules.parse([*flags, "--offload", offload]), 0, 2)
              for offload in ("none", "activations", "optimizer", "both")}
    assert nbytes == dict(none=0, activations=0, optimizer=96_636_764_160, both=96_636_764_160)
    words = [*flags, "--checkpoint-dir", "x", "--zero", "1", "--moments-dtype", "bf16"]
    saving = plan.memory.host_bytes(rules.parse(words, 4), 0, 2)
    assert saving == 8 * 4_540_469_248 // 4  # master weights and moments of a fourth


def test_utilisation_is_flops_over_time_and_peak():
    flags = "--preset llama-2-7b --dp 8 --zero 1 --seq-len 4096 --micro-batch 1"
    found = plan.step_time.predict(run_for(f"{flags} --global-batch 64"))
    assert found == plan.step_time.predict(run_for(f"{flags} --batch-ramp 16@0,64@1e6"))  # at its last size
    flops = 6 * (6_738_415_616 - 32000 * 4096) + 12 * 32 * 4096 * 4096  # per token
    assert found.mfu == pytest.approx(flops * 64 * 4096 / found.step_s / 8 / 989e12)
    assert found.hfu == found.mfu > found.mfu_causal


@pytest.mark.parametrize("schedule", [name for name, schedule in schedules.SCHEDULES.items() if schedule.runs])
def test_few_micro_batches_show_what_many_need(schedule, monkeypatch):
    """Memory and time of a plan that is cut short, beside those of all of it; also where p does not divide them, and
    where chunks take turns in groups. Of few micro-batches all are simulated, hops included."""
    for m, hop in (61, 0.0), (64, 0.0), (66, 0.0), (8, 0.4):
        monkeypatch.setattr(plan.step_time, "hop_seconds", lambda run, hop=hop: hop)
        flags = f"--layers 16 --pp 4 --global-batch {m} --micro-batch 1 --schedule {schedule}"
        run = run_for(flags, 4)
        grid = run.settings.grid
        whole = plan.memory.plans_in_memory(schedule, 4, m, grid.virtual_stages)
        for rank in range(4):
            most, backwards = plan.memory.plan_in_memory(run.settings, rank)
            assert most == whole[rank][0] and set(backwards) == set(whole[rank][1]), (m, rank)
        stages = [Seconds(1.0 + 0.1 * i, 1.1, 0.9 + 0.05 * i) for i in range(4 * grid.virtual_stages)]
        built = schedules.make_plan(schedule, 4, m, grid.virtual_stages)
        spans = schedules.simulate(built, [schedules.Costs(*stage, hop) for stage in stages])
        seconds, spent = plan.step_time.pipeline_seconds(run, stages)
        assert seconds == pytest.approx(max(row[-1].stop for row in spans), rel=1e-9 if hop else 2e-3), m
        assert spent == pytest.approx([sum(span.stop - span.start for span in row) for row in spans]), m


def test_the_bound_of_equal_stages_is_the_pipelines_formula(monkeypatch):
    """(m + p - 1) times a micro-batch, p - 1 of them in 1 / chunks of the time, and 2 (p - 1) hops."""
    monkeypatch.setattr(plan.step_time, "hop_seconds", lambda run: 0.5)
    for chunks, schedule in (1, "1f1b"), (2, "interleaved"):
        run = run_for(f"--layers 8 --pp 4 --global-batch 8 --micro-batch 1 --schedule {schedule}", 4)
        stages = [Seconds(1.0, 1.0, 1.0)] * 4 * chunks
        bound, busy = plan.step_time.bound_seconds(run, stages)
        assert bound == pytest.approx((8 + 3 / chunks) * 3 * chunks + 6 * 0.5) and busy == [24.0 * chunks] * 4
        assert bound <= plan.step_time.pipeline_seconds(run, stages)[0] * 1.001
    alone = run_for("--layers 8 --global-batch 8 --micro-batch 1")
    assert plan.step_time.bound_seconds(alone, [Seconds(1.0, 1.0, 1.0)]) == (24.0, [24.0])


@pytest.mark.parametrize("flags, nbytes, stride", [
    ("--dp 2 --tp 4 --pp 2", 2 * 4096 * 4096 / 4, 8), ("--dp 2 --tp 4 --pp 2 --sp off", 2 * 4096 * 4096, 8),
    ("--cp 2 --pp 4", 2 * 2048 * 4096, 4)])
def test_a_hop_takes_what_sending_half_of_all_ranks_away_takes(flags, nbytes, stride):
    """Pessimistic: over the network, unless all stages are in one node."""
    run = run_for(f"--preset llama-3.1-8b --seq-len 4096 --global-batch 8 --micro-batch 1 {flags}")
    assert plan.step_time.hop_seconds(run) == pytest.approx(run.collective(nbytes, 2, stride))


@pytest.mark.parametrize("flags, overlap, axis, sent", [
    *((f"--dp 8 --zero {level} --reduce-dtype {dtype}", overlap, "dp",
       [(7 / 8 * 960 * nbytes, 8, 1, "all_gather" if level else "all_reduce", calls * 10 / 2)])
      for level, overlap, dtype, nbytes, calls in (
          (0, True, "fp32", 8, 2), (1, True, "fp32", 4 + 2, 2), (1, False, "fp32", 8 + 2, 2),
          (2, True, "fp32", 4 * 4 + 2, 5), (3, True, "fp32", 4 * (4 + 4), 12), (0, True, "bf16", 4, 2),
          (1, True, "bf16", 2 + 2, 2), (2, True, "bf16", 4 * 2 + 2, 5), (3, True, "bf16", 4 * (2 + 4), 12))),
    ("--dp 8 --tp 2 --zero 1", True, "dp", [(7 / 8 * 960 * 6, 8, 2, "all_gather", 10)]),
    ("--dp 8 --tp 2 --dp-replicate 2 --zero 1", True, "dp", [(3 / 4 * 960 * 6, 4, 2, "all_gather", 10),
                                                             (960, 2, 8, "all_reduce", 5)]),
    *((f"--preset tiny-moe --ep 4 {grid} --zero 1", True, "edp", [(1 / 2 * 960 * 6, 2, 4, "all_gather", 10)])
      for grid in ("--dp 8", "--dp 2 --cp 2 --tp 2")),
    ("--preset tiny-moe --dp 8 --tp 2 --ep 2 --zero 2 --dp-replicate 2", True, "edp", [
        (3 / 4 * 960 * 18, 4, 2, "all_gather", 25), (960, 2, 8, "all_reduce", 5)])])
def test_what_the_data_axis_sends_how_often_and_to_whom(monkeypatch, flags, overlap, axis, sent):
    """Bytes, ranks, how far apart, collective, calls. 4 micro-batches: 2 P, 2 P, (A + 1) P and 3 A P elements, times
    (n-1)/n; gradients 4 bytes, or 2 if they are reduced in bf16, weights 2; code that overlaps nothing all-reduces at
    level 1. Calls: gradients, weights; per micro-batch gradients, or weights twice and gradients; two layers share one.
    Tensor parallel ranks are nearest, as are an expert group's, replicas farthest; all that have an expert shard it."""
    seen = []
    monkeypatch.setattr(Run, "collective", lambda self, nbytes, n, stride=1, collective="all_gather", calls=1:
                        seen.append((nbytes, n, stride, collective, calls)) or 0.0)
    run = run_for(f"{flags} --global-batch 32 --micro-batch 1", code=Code() if overlap else WithoutOverlap())
    plan.step_time.data_parallel_seconds(run, {axis: [900, 60]}, 10, Seconds(), 0.0)
    assert seen == sent
    assert plan.memory.shards_of(run.settings)[axis] == (sent[0][1] if run.settings.grid.zero else 1)


@pytest.mark.parametrize("flags, hides", [
    ("--zero 0", 2 + 3), ("--zero 1", 1 + 2 + 3), ("--zero 2", 60), ("--zero 3", 60), ("--zero 0 --tp 16", 0)])
def test_the_data_axis_hides_under_what_its_level_lets_it(monkeypatch, flags, hides):
    """The last backward, with level 1 a forward, too; with 2 and 3 all micro-batches, but only a part of it; nothing
    where tensor parallel ranks use the network, too."""
    run = run_for(f"--dp 8 --heads 16 --kv-heads 16 --hidden 1024 --global-batch 80 --micro-batch 1 {flags}")
    for sent in 200.0, 80.0, 4.0:
        monkeypatch.setattr(Run, "collective", lambda *_, sent=sent, **__: sent)
        exposed = plan.step_time.data_parallel_seconds(run, dict(dp=[960]), 1, Seconds(1.0, 2.0, 3.0), 60.0)
        least = sent * (1 - run.constants.hidden) if run.settings.grid.zero >= 2 else 0.0
        assert exposed == max(sent - hides, least)


@pytest.mark.parametrize("flags, nbytes", [
    ("--dp 4 --zero 1 --dp-replicate 2", 40 / 2), ("--dp 4 --zero 3", 40 / 4), ("--dp 4 --zero 0", 40),
    ("--dp 2 --cp 2 --zero 1", 40 / 4), ("--dp 8 --zero 1 --moments-dtype bf16", 32 / 8),
    ("--dp 8 --zero 1 --optimizer sgd", 24 / 8), *(
        (f"--preset mixtral-8x7b --dp 8 --zero 1 --ep {ep}", 40 / 8) for ep in (1, 2, 8))])
def test_an_update_reads_and_writes_the_state_of_a_shard(flags, nbytes):
    """AdamW's two moments in fp32 are 16 of 40 bytes per parameter. Of experts it is an equal share, too, whether they
    are on one rank or sharded over several."""
    parts = plan.step_time.step_seconds(run_for(f"--preset llama-3.1-8b --global-batch 8 {flags}")).parts
    count = 46_702_792_704 if "mixtral" in flags else 8_030_261_248
    assert parts["optimizer"] == pytest.approx(nbytes * count / 3.35e12)


def test_fp8_weights_are_quantised_whenever_they_are_gathered():
    """Twice per micro-batch at level 3, once a step below it."""
    flags = "--preset llama-3.1-8b --dp 8 --seq-len 4096 --global-batch 32 --micro-batch 1 --fp8-ends --fp8"
    matrices = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
    for level, times in (1, 1), (3, 2 * 4):
        with_fp8, without = (plan.step_time.step_seconds(run_for(f"{flags} {recipe} --zero {level}")).parts["optimizer"]
                             for recipe in ("tensorwise", "none"))
        assert with_fp8 - without == pytest.approx(times * matrices * 6 / 3.35e12)


def test_the_ends_of_a_pipeline_both_count():
    """The first rank has the table, the last one alone the head and a norm: the step waits for the larger."""
    for rank, vocab in enumerate((200000, 128)):
        run = run_for(f"--layers 8 --vocab {vocab} --hidden 256 --heads 4 --dp 2 --pp 2 --zero 0 --global-batch 8")
        elements = [sum(costs.bucket_elements(run.settings, plan.memory.stages_of_rank(run.settings, rank), 2)["dp"])
                    for rank in (0, 1)]
        assert elements.index(max(elements)) == rank
        assert plan.step_time.step_seconds(run).parts["optimizer"] == pytest.approx(40 * max(elements) / 3.35e12)
        first, last = plan.step_time.stage_parts(run)
        assert last.keys() - first.keys() == {"head"}


@pytest.mark.parametrize("flags", [
    "--pp 4 --schedule 1f1b", "--pp 4 --schedule zb-v", "--pp 4 --schedule interleaved", "--pp 3 --layers 15",
    "--pp 4 --schedule zb-h1 --recompute full", "--pp 4 --vocab 200000", "--pp 4 --layers 17", "--pp 2 --tied"])
def test_no_rank_needs_more_than_what_is_said(flags):
    run = run_for(f"--layers 16 --hidden 256 --heads 4 --vocab 256 --global-batch 16 --micro-batch 1 {flags}")
    every = [sum(plan.step_time.memory_of_rank(run, rank).values()) for rank in range(run.settings.grid.pp)]
    assert sum(plan.step_time.needed_memory(run).values()) == max(every)


def test_a_fit_is_as_likely_as_the_error_of_a_prediction_says():
    """Half where a run needs, with what is reserved, all that can be used; 84% where it needs a standard deviation of
    12% less: e^-0.12 of it."""
    run = run_for("--preset tiny")
    usable = 0.95 * 80 * 2**30
    for share, expected in (1.0, 0.5), (math.exp(-0.12), 0.8413), (math.exp(0.24), 0.0228):
        assert plan.step_time.probability_of_fit(run, share * usable - 0.3e9) == pytest.approx(expected, abs=1e-4)
    found = plan.step_time.predict(run)
    assert found.memory_gb == pytest.approx(sum(plan.step_time.needed_memory(run).values()) / 1e9 + 0.3)
    assert found.fits == pytest.approx(plan.step_time.probability_of_fit(run, found.memory_gb * 1e9 - 0.3e9))


@pytest.mark.parametrize("recipe", config.FP8_RECIPES)
def test_fp8_operands_are_read_and_written(recipe):
    """Per element: reads for the largest, where a tensor has one scale, and for the copies; two copies are written. An
    input's are written at two times, by the matmuls that need them."""
    nbytes = 2 + 1 + 1 if config.FP8_RECIPES[recipe].blocks else 2 + 2 + 1 + 1
    run = run_for(f"--preset llama-3.1-8b --seq-len 4096 --global-batch 1 --fp8 {recipe} --fp8-ends")
    inputs, gradients = costs.fp8_operands(run.settings, 0)
    moved = inputs * 2 * (nbytes - 1) + gradients * nbytes
    assert plan.step_time.step_seconds(run).parts["quantise"] == pytest.approx(32 * 4096 * moved / 3.35e12)


FP8_EXPERTS = "--preset tiny-moe --hidden 64 --heads 4 --kv-heads 2 --expert-ffn 48 --top-k 2"


@pytest.mark.parametrize("flags, inputs, gradients", [
    ("--preset llama-3.1-8b", 4096 + 4096 + 4096 + 14336, (4096 + 2 * 1024) + 4096 + 2 * 14336 + 4096),
    ("--preset deepseek-v3 --cp 2 --tp 2", 1536 + 2 * 512 + 64 * 128 + 7168 + 9216,  # latents are made in 16 bits
     64 * 192 + 2 * 64 * 256 + 7168 + 2 * 9216 + 7168),
    *((f"{FP8_EXPERTS} --shared-experts 2 --tp {tp} {sp}", 64 + 64 / tp + 2 / tp * (64 + 48) + 64 + 96 / tp,
       128 / tp + 64 + 2 / tp * (2 * 48 + 64) + 2 * 96 / tp + 64)
      for tp, sp in ((1, ""), (2, ""), (2, "--sp off"))),
    (f"{FP8_EXPERTS} --tp 2", 64 + 64 / 2 + 112, 128 / 2 + 64 + 160)])
def test_fp8_operands_of_a_token_are_those_of_its_matrices(flags, inputs, gradients):
    """Inputs of qkv, the output's, gate and up, and down, routed experts before shared ones; gradients of results.
    Column parallel layers take all tokens, which have been gathered, row parallel ones a rank's own channels."""
    settings = run_for(f"{flags} --dp 2 --global-batch 2 --micro-batch 1").settings
    assert costs.fp8_operands(settings, 0) == pytest.approx((inputs, gradients))


@pytest.mark.parametrize("model", ["llama-3.1-8b", "mixtral-8x7b --shared-experts 2"])
def test_tensor_parallel_exchanges_hide_under_weight_gradients(model):
    """Of 8 exchanges of a layer, 2 reduce-scatters of its backward are under the matmuls of weight gradients, as are 2
    all-gathers of inputs that are not saved; one of each under the matmuls of shared experts, if there are any."""
    run = run_for(f"--preset {model} --tp 8 --global-batch 4 --micro-batch 1 --seq-len 32768")
    one = 7 / 8 * 2 * 32768 * 4096 / 3e12 / run.constants.node + run.constants.exchange_s
    spent = plan.step_time.step_seconds(on_the_machine(run, levels=(Level("node", 8, 0.0, 3e12),))).parts["tp"]
    assert spent == pytest.approx(4 * (32 * 6 + 1) * one)


def test_each_replica_orthogonalises_all_matrices():
    flags = "--preset llama-3.2-1b --optimizer muon --zero 1 --dp"
    one, two = (plan.step_time.muon_seconds(run_for(f"{flags} {dp}", n), {0: range(16)})
                for dp, n in (("4", 4), ("8 --dp-replicate 2", 8)))
    assert one == two > 0


@pytest.mark.parametrize("flags, shards", [("--zero 0", 1), ("--zero 1", 4), ("--zero 1 --schedule zb-v", math.inf),
                                           ("--zero 1 --dp 2 --cp 2", 4), ("--zero 1 --dp-replicate 2", 2),
                                           ("--zero 0 --no-tied --mtp", 1)])
def test_a_tied_tables_gradient_is_summed_over_its_stages(flags, shards):
    """In fp32; at level 1 a shard of it; not at all where one rank has both stages."""
    run = run_for(f"--preset llama-3.2-1b --dp 4 --pp 2 --global-batch 32 {flags}")
    before = plan.step_time.tied_seconds(run._replace(code=WithoutOverlap()))  # anything is sharded
    for found, n in (plan.step_time.step_seconds(run).parts["tie"], shards), (before, 1):
        expected = 4 * 128256 * 2048 / n / 436e9 + 3e-6 * plan.step_time.CONSTANTS.latency
        assert found == (pytest.approx(expected) if shards < math.inf else 0.0)


def layer(flags: str, **rest) -> dict[str, Seconds]:
    flags = f"--preset llama-3.1-8b --seq-len 4096 --global-batch 64 --micro-batch 2 {flags}"
    return plan.step_time.layer_parts(run_for(flags, **rest), 0)


def test_a_layers_parts_are_their_formulas():
    """On an H100, with T = 8,192 tokens: matrices 3 times, each with what it reads and writes, weight gradients with 14
    bytes per weight; activations a third in forward; half of the scores, 3.5 times, at half of the peak or so."""
    parts, c = layer("--micro-batch 2"), plan.step_time.CONSTANTS
    weights = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    product = 2 * 8192 * weights / (794e12 * c.hopper)
    norms = 2 * 4096  # they are read and written, too
    assert parts["matmul"] == pytest.approx((product + 2 * (weights + norms) / 3.35e12,) * 2
                                            + (product + 14 * (weights + norms) / 3.35e12,))
    scores = 2 * 2 * 8192 * 4096 * 2048 / (0.33 * 989e12)
    assert parts["attention"] == pytest.approx((scores, 2.5 * scores, 0))
    saved = 2 * (4096 * 6 + 2 * 1024 + 3 * 14336) + 2 * 4 + 4 * 32  # inputs of all, statistics, logsumexp
    touched = 8192 * saved * c.passes / 3.35e12
    assert parts["elementwise"] == pytest.approx((touched / 3, touched * 2 / 3, 0))
    assert set(parts) == {"matmul", "attention", "elementwise", "launch"} and parts["launch"] == Seconds()


def test_the_heads_parts_are_their_formulas_and_exchanges_hide_as_far_as_there_is_time():
    run = run_for("--preset llama-3.1-8b --tp 2 --seq-len 4096 --global-batch 2 --micro-batch 2")
    product = 2 * 8192 * 4096 * 128256 / 2 / (794e12 * plan.step_time.CONSTANTS.hopper)
    logits = plan.step_time.CONSTANTS.logit_bytes * 8192 * 128256 / 2 / 3.35e12
    parts = plan.step_time.head_parts(run)
    assert parts["head"] == pytest.approx((product + logits / 3, product + logits * 2 / 3, product))
    one = 8192 * 4096 / 363e9 / run.constants.node + 3e-6 * run.constants.latency + run.constants.exchange_s
    assert parts["tp"] == pytest.approx((one, 0, 0))  # backward's is under the weight gradient
    assert plan.step_time.tensor_parallel_part(run, 2, [1e-4, 1.0])["tp"] == pytest.approx((2 * one, one - 1e-4, 0))


@pytest.mark.parametrize("flags", ["", "--zero 3", "--tp 2", "--preset tiny-moe", "--fp8 tensorwise"])
def test_a_layer_below_its_launches_takes_as_long_as_those(flags):
    """Each technique's launches are added to a plain layer's."""
    run, plain = (run_for(f"--dp 2 --global-batch 2 --micro-batch 1 {more}") for more in (flags, ""))
    parts, host = plan.step_time.layer_parts(run, 0), run.code.host_seconds(run, 0)
    assert (host > plain.code.host_seconds(plain, 0)) == (flags != "")
    forward, both = (sum(map(of, parts.values())) for of in (lambda part: part.forward, lambda part: part.total))
    assert (forward, both) == pytest.approx((host / 3, host))


@pytest.mark.parametrize("flags, axis, ratio, elements", [
    ("--tp 2", "tp", 4, 4096 * 14336 / 2), ("--preset mixtral-8x7b --dp 8 --ep 8", "ep", 2, 2 * 4096 * 14336)])
def test_recomputation_repeats_the_forward_but_what_no_backward_reads(flags, axis, ratio, elements):
    """In full: neither the last matmul, down (of two experts per token), nor its reduce-scatter or combine; selective:
    half of what a forward touches."""
    parts = layer(f"{flags} --recompute full")
    again = parts.pop("recomputed")
    down = 2 * 8192 * elements / (794e12 * plan.step_time.CONSTANTS.hopper)
    expected = sum(part.forward for part in parts.values()) - down - parts[axis].forward / ratio
    assert again == pytest.approx((0, expected, 0))
    some = layer(f"{flags} --recompute selective")
    assert some["recomputed"] == pytest.approx((0, some["elementwise"].forward / 2, 0))


LLAMA_CP = "--preset llama-3.1-8b --tp 2 --seq-len 8192 --cp 4 --cp-style"
Q, KV = 16 * 128, 2 * 4 * 128  # elements of a token, on one of two tensor parallel ranks


@pytest.mark.parametrize("flags, heads, keys", [
    (f"{LLAMA_CP} allgather", 0, 3 * KV), (f"{LLAMA_CP} ring", 0, 3 * KV),
    (f"{LLAMA_CP} ulysses", 3 / 4 * (2 * Q + KV), 0),
    *((f"{LLAMA_CP} ring --cp 8 --seq-len 16384 --cp-ulysses {near}", (1 - 1 / near) * (2 * Q + KV),
       (8 // near - 1) * KV)
      for near in (2, 4)),
    ("--preset deepseek-v3 --cp 4 --tp 2 --seq-len 8192", 0, 3 * (512 + 64)),  # latents, on every tensor parallel rank
    ("--preset llama-3.2-1b --cp 2 --tp 16 --seq-len 4096", 0, 2 * 64)],  # 8 kv heads: a rank sends one
    ids=["allgather", "ring", "ulysses", "2 in 8", "4 in 8", "latents", "more ranks than kv heads"])
def test_what_context_parallel_ranks_send(flags, heads, keys):
    """Of 2,048 tokens in 16 bits: an exchange of heads keeps a share of q, k, v and the result, forward and backward;
    keys and values go to each of the others, in backward with their gradients. A ring's are under the scores."""
    run = on_the_machine(run_for(f"{flags} --global-batch 1 --micro-batch 1"), levels=(Level("all", 256, 0.0, 1e9),))
    heads, keys = (2 * 2048 * count / 1e9 / run.constants.node for count in (heads, keys))
    scores = Seconds(0.2 * keys, 0.5 * keys)
    back = keys if "deepseek" in flags else 2 * keys
    made = plan.step_time.context_parallel_part(run, scores)["cp"]
    hidden = scores if "ring" in flags else Seconds()
    assert made == pytest.approx((heads + keys - hidden.forward, heads + back - hidden.input, 0))
    assert plan.step_time.context_parallel_part(run, Seconds(9.0, 9.0))["cp"] == (
        pytest.approx((heads, heads, 0)) if "ring" in flags else made)


def test_a_layer_with_latents_makes_keys_and_values_of_all_ranks_tokens():
    """512 wide, into 64 heads of 128 + 128 on one of two ranks, for 2 x 2,048 tokens; once more in backward."""
    run = run_for("--preset deepseek-v3 --cp 2 --tp 2 --seq-len 4096 --global-batch 1 --micro-batch 1 "
                  "--recompute selective --fp8 blockwise --fp8-ends")
    parts = plan.step_time.layer_parts(run, 0)
    again = run.matmul(2 * 512 * 64 * 256 * 2 * 2048, True)
    assert parts["recomputed"].input == pytest.approx(parts["elementwise"].forward / 2 + again)


@pytest.mark.parametrize("flags, tp, stride", [
    ("--dp 8 --ep 8", 1, 1), ("--dp 4 --tp 2 --ep 8", 2, 1), ("--dp 1 --tp 8 --ep 8", 8, 1),
    ("--dp 8 --tp 8 --ep 8 --sp off", 8, 8)])
def test_what_experts_are_sent(flags, tp, stride):
    """In 16 bits, with 8 bytes per choice, or 4 of its gradient: on average 6. 2 copies of each token, 7/8 of them
    elsewhere; dispatch and combine. Without sequence parallelism ranks are as far apart as tensor parallel groups."""
    run = run_for(f"--preset mixtral-8x7b {flags} --seq-len 4096 --global-batch 8 --micro-batch 1")
    copies = 2 * 4096 / tp
    one = run.collective(copies * (2 * 4096 + 2 * (8 + 4) / 4) * 7 / 8, 8, stride, "all_to_all")
    assert plan.step_time.expert_parallel_part(run, 0)["ep"] == pytest.approx((2 * one, 2 * one, 0))
    dense = run_for("--preset tiny-moe --dense-layers 1 --dp 2 --ep 2")
    assert plan.step_time.expert_parallel_part(dense, 0) == {} != plan.step_time.expert_parallel_part(dense, 1)


@pytest.mark.parametrize("machine, name", [("a100", "ampere"), ("h100", "hopper"), ("b200", "blackwell"),
                                           ("mi300x", "hopper")])
def test_kernels_have_their_generations_speed(machine, name):
    run = run_for("--preset tiny", machine=machine)
    assert run.matmul(1e15) == pytest.approx(1e15 / run.machine.best_matmul() / getattr(run.constants, name))
    seconds = run.code.attention(run, 1e15)
    forward = 1e15 / run.machine.peak() / (0.60 if name == "ampere" else 0.33)
    assert seconds == pytest.approx((forward, 2.5 * forward, 0))


@pytest.mark.parametrize("machine, values", [("a100", 192), ("h100", 128)])
def test_values_of_latents_are_padded_to_the_width_of_keys_before_hopper(machine, values):
    """Of 64 heads on each of two ranks, half of 4,096 keys for each of 4,096 tokens."""
    run = run_for("--preset deepseek-v3 --tp 2 --seq-len 4096 --global-batch 1 --micro-batch 1", machine=machine)
    scores = 2 * 64 * (192 + values) * 2048 * 4096
    fraction = dict(a100=0.60, h100=0.33)[machine]
    assert plan.step_time.layer_parts(run, 0)["attention"].forward * fraction * run.machine.peak() == (
        pytest.approx(scores))


def test_tokens_and_scores_of_a_rank_are_equal_shares():
    """Padded: of 2 sequences of 50 tokens on cp 2 (two halves of a zig-zag each) and tp 3: 60 tokens, 30 on a rank."""
    model = "--hidden 48 --heads 6 --kv-heads 6 --ffn 96 --vocab 96 --seq-len 50 --global-batch 8 --micro-batch 2"
    assert run_for(f"{model} --cp 2 --tp 3").tokens == 2 * 60 / 2
    assert run_for(f"{model} --cp 2 --tp 3 --sp off").tokens == 2 * 52 / 2
    assert run_for(f"{model} --dp 2").micro_batches == 2
    flags = "--preset llama-3.1-8b --seq-len 32768 --global-batch 4 --micro-batch 4 --cp"
    one, four = (plan.step_time.step_seconds(run_for(f"{flags} {cp}")).parts for cp in (1, 4))
    assert four["attention"] == pytest.approx(one["attention"] / 4) and four["cp"] > 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp32 --mtp"])
def test_ratios_are_those_of_their_formulas(dtype):
    """The formula that is printed, evaluated, is communication beside compute; all techniques at once."""
    run = run_for("--preset mixtral-8x7b --dp 4 --cp 2 --tp 4 --pp 2 --ep 4 --global-batch 8 --micro-batch 1 "
                  f"--seq-len 4096 --reduce-dtype {dtype}")
    model, blocks = run.settings.model, 33 if "mtp" in dtype else 32
    p = costs.forward_flops(costs.llama_layer(model, 4096)) / 2
    letters = dict(F=run.machine.best_matmul(), T=2048, S=4096, H=model.hidden, p=p, P=p * blocks / 2,
                   kv=model.kv_heads, q=model.heads, ffn=model.expert_ffn, k=2,
                   u=4 * (1 - 15 / 28))  # C(6, 2) of C(8, 2) pairs of experts are on other ranks
    limits = [("T", 1, 8), ("T", 1, 8), ("T", 1, 8), ("n", 1, 4), ("S", 1, 2), ("P", p, 2), ("ffn", 1, 4)]
    found = plan.__main__.overlaps(run)
    assert [overlap.technique[:2] for overlap in found] == ["dp", "Ze", "Ze", "tp", "cp", "pp", "ep"]
    for overlap, (letter, each, n) in zip(found, limits):
        expression, given = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", overlap.formula), dict(B=overlap.bandwidth, n=n)
        assert overlap.ratio == pytest.approx(eval(expression, letters | given))
        limit = re.search(r"\d[\d,.]*\d", overlap.limit(overlap.ratio))[0].replace(",", "")  # where the ratio is 1
        at_limit = letters | given | {letter: float(limit) * each}
        assert eval(expression, at_limit) == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("flags, bandwidths", [
    ("--dp 2 --tp 4 --pp 2", dict(dp=400, Ze=300, tp=300, pp=40)),  # pipeline ranks 8 apart: one card
    ("--dp 4 --cp 2 --tp 4", dict(dp=80, Ze=80, tp=300, cp=300)),  # two of dp x cp in each node
    ("--preset tiny-moe --dp 16 --ep 4 --layers 4", dict(dp=320, Ze=300, ep=300)),
    ("--preset deepseek-v3 --dp 4 --cp 4 --ep 16", dict(dp=320, Ze=300, ep=300))])  # no ring: nothing hides latents
def test_ratios_have_the_bandwidth_of_their_group(flags, bandwidths):
    """GB/s in a node and between nodes of 8, where a group's ranks in a node use as many cards."""
    levels = tuple(level._replace(latency_s=0.0) for level in TWO_LEVELS.levels)
    run = run_for(f"{flags} --global-batch 16 --micro-batch 1")._replace(machine=TWO_LEVELS._replace(levels=levels))
    found = {overlap.technique[:2]: overlap.bandwidth / 1e9 for overlap in plan.__main__.overlaps(run)}
    assert found == pytest.approx(bandwidths)
    assert not plan.__main__.overlaps(run_for("--preset tiny --dp 1"))


# ---- what is printed ------------------------------------------------------------------------------------------------

STEP = ("--preset llama-3.1-8b --dp 2 --cp 2 --tp 4 --pp 2 --zero 1 --seq-len 8192 --global-batch 64 --micro-batch 1 "
        "--recompute full")


@pytest.mark.parametrize("command, words", [
    ("params --preset llama-2-7b", ["6,738,415,616", "6,575,235,072", "8/3 h = 10,923"]),  # h = 4096, L = 32, V = 32000
    (f"memory {STEP}", ["by pipeline rank, ", "by --recompute, ", "by --zero, ", "by --seq-len, ",
                        "  1,120  6,480", "  1,400  8,100", "  840  4,860",  # GB of 70B and 405B parameters, 16 bytes
                        "  1,260  7,290", "  980  5,670"]),  # each as in the playbook, 20, 12, this code's 18 and 14
    (f"overlap {STEP}", [" tokens per micro-batch"]), (f"step {STEP}", ["  cp ", "  recomputed ", "  bubble "]),
    ("step --hidden 256 --layers 8 --heads 4 --vocab 1000 --seq-len 512 --global-batch 64 --micro-batch 64 "
     "--recompute full --offload activations --gpus 1", ["  offload "]),
    ("scaling --preset llama-3.1-8b --dp 8 --global-batch 64 --micro-batch 1 --train-tokens 1e12", [
        "= 557.7 PF-days", '--batch-ramp "', *scaling.optima(1e21), *scaling.TRAININGS, *scaling.MODELS]),
    (f"sites {STEP} --sites 3 --global-batch 96", ["3 sites of 32 x h100", scaling.EPOCH, "0.208 s, which is 5% "])])
def test_what_is_asked_for_is_printed(capsys, command, words):
    out = printed(capsys, command)
    assert [word for word in words if word not in out] == []


@pytest.mark.parametrize("section, name, values", [
    ("precision", "recompute", costs.RECOMPUTE), ("grid", "zero", range(4)), ("batch", "seq_len", (512, 2048, 16384))])
def test_a_run_with_another_setting_is_that_of_its_flag(section, name, values):
    flags = "--preset llama-3.2-1b --pp 2 --dp 2 --seq-len 2048 --global-batch 16 --micro-batch 1"
    for value in values:
        assert plan.step_time.needed_memory(plan.__main__.changed(run_for(flags), section, **{name: value})) == (
            plan.step_time.needed_memory(run_for(f"{flags} --{name} {value}")))


def test_search_prints_the_best_with_their_rate_per_gpu_and_whether_they_fit(capsys):
    flags = "--preset tiny --seq-len 512 --global-batch 64 --zero 1"
    found, _ = search.search(run_for(f"{flags} --grid auto", 4), 4, dict(zero=1))
    _, _, first, _, *rows, steps, last = printed(capsys, f"search {flags} --gpus 4").splitlines()
    assert f" {len(found)} settings fit" in first and last.startswith("others fell: ") and steps.startswith("a search")
    assert [row.split("  ")[-1] for row in rows] == [search.describe(best.run.settings) for best in found[:10]]
    assert f"  {64 * 512 / found[0].seconds / 4:,.0f}  " in rows[0] and "  >0.99  " in rows[0] and found[0].fits > 0.99
    assert all(f"{best.rank:.3f} s" in row for best, row in zip(found, rows))
    assert found[0]._replace(seconds=10.0, parts=dict(matmul=6.0, attention=3.0, bubble=1.0)).limit() == "attention 30%"


def test_a_wrong_flag_may_mean_one_of_the_planner():
    for line, says in (("step --num-gpus 8", "did you mean --gpus?"), ("step --pricing 2", "did you mean --price?"),
                       ("step --epochs 2", "give --steps; "), ("step --norm-ep 1", "did you mean --norm-eps?")):
        with pytest.raises(ValueError, match=re.escape(says)):
            plan.__main__.main(line.split())


@pytest.mark.parametrize("probability, printed", [(1.0, ">0.99"), (0.9949, ">0.99"), (0.99, "0.990"), (0.5, "0.500")])
def test_no_fit_is_printed_as_certain(probability, printed):
    assert search.shown(probability) == printed


TINY_RUNS = "16 sequences of 256 tokens, 4,096 tokens per step"


@pytest.mark.parametrize("command", ["memory", "step", "overlap", "search", "scaling", "sites --sites 2"])
@pytest.mark.parametrize("flags, line", [
    ("--preset llama-3.2-1b",
     f"{TINY_RUNS}. Warning: --global-batch and --seq-len are not given, and the default is the tiny run's"),
    ("--preset llama-3.2-1b --global-batch 16",
     f"{TINY_RUNS}. Warning: --seq-len is not given, and the default is the tiny run's"),
    ("--preset llama-3.2-1b --batch-ramp 8@0,16@9 --seq-len 256", TINY_RUNS), ("--preset tiny", TINY_RUNS)])
def test_the_batch_is_printed_and_a_default_of_the_tiny_run_is_pointed_at(capsys, command, flags, line):
    batch, machine, *_ = printed(capsys, f"{command} --gpus 2 {flags}").splitlines()
    assert batch == f"batch    {line}"
    assert machine == "machine  2 x h100, 2 per node, 85.90 GB each; kernels: of this project (--kernels auto)"


def test_a_step_is_as_accurate_as_runs_of_its_kind_that_were_held_out(capsys, monkeypatch):
    """Where none is held out, the nearest kind of which five runs or more are."""
    def errors(runs: int, median: float, **rest) -> dict:
        return dict(runs=runs, median=median, p90=0.2, low=0.9, high=1.3, sources=["them"], **rest)

    dense = "dense, 16 bits, Hopper, no pipeline, at most 256 GPUs"
    moe = "experts, FP8, Blackwell, no pipeline, at most 256 GPUs"
    piped = "dense, 16 bits, Hopper, pipeline, at most 256 GPUs"
    known = {"experts, 16 bits, Hopper, no pipeline, more than 256 GPUs": errors(4, 0.4), moe: errors(13, 0.3),
             dense: errors(99, 0.1), piped: dict(runs=0, sources=[], read_off_times=515)}
    monkeypatch.setattr(plan.step_time, "held_out", lambda: dict(steps=known, memory=errors(7, 0.5)))
    said = {kind: printed(capsys, f"step --gpus 2 --global-batch 4 {flags}").split("\naccuracy of such runs (")[1]
            for kind, flags in ((dense, ""), ("experts, 16 bits", "--preset tiny-moe"), (piped, "--pp 2"))}
    assert said[dense].startswith(dense + ")")
    assert "  step: median error 10%, nine of ten within 20%; four of five took 0.90 to 1.30 times " in said[dense]
    assert all("  memory: median error 50%" in text for text in said.values())
    assert "  step: unknown. No such run is published\n" in said["experts, 16 bits"]
    assert f"  the nearest kind ({moe}): median error 30%" in said["experts, 16 bits"]
    assert "  step: unknown. Such runs are published, but what the code of all 515 did was read off " in said[piped]
    assert f"  the nearest kind ({dense}): median error 10%" in said[piped]


@pytest.mark.parametrize("flags, kind", [
    ("--preset tiny-moe --dp 512 --fp8 tensorwise --machine b200 --global-batch 512",
     "experts, FP8, Blackwell, no pipeline, more than 256 GPUs"),
    ("--pp 2 --dp 128 --global-batch 512 --machine a100-opa", "dense, 16 bits, A100, pipeline, at most 256 GPUs"),
    ("--machine rtx-4090", "dense, 16 bits, Ada, no pipeline, at most 256 GPUs"),
    ("--machine cpu", "dense, 16 bits, cpu, no pipeline, at most 256 GPUs")])
def test_a_runs_kind_is_that_of_its_model_dtype_gpu_and_grid(capsys, flags, kind):
    assert f"\naccuracy of such runs ({kind})" in printed(capsys, f"step {flags}")


@pytest.mark.parametrize("flags", ["", "--pp 2", "--recompute selective --zero 3"])
def test_memory_says_what_plain_torch_needs_which_a_dry_run_is(capsys, flags):
    """Kernels of this project make neither logits nor matrices' gradients in 16 bits; a dry run says the same."""
    flags = f"--preset llama-3.2-1b --gpus 4 --seq-len 4096 --global-batch 16 --micro-batch 1 {flags}"
    fused, plain = (plan.step_time.needed_memory(run_for(f"{flags} --kernels {kernels}".replace("--gpus 4", ""), 4))
                    for kernels in ("auto", "torch"))
    settings = rules.parse(f"{flags} --dtype bf16".replace("--gpus 4", "").split(), 4)
    counted = [sum(plan.memory.memory_of_rank(settings, rank, 2).values()) for rank in range(settings.grid.pp)]
    assert sum(plain.values()) == max(counted) > sum(fused.values())
    out = printed(capsys, f"memory {flags}")
    assert "kernels: of this project" in out and (
        "with --kernels torch, and in train.py --dry-run, which runs plain torch, temporaries are "
        f"{plan.memory.format_bytes(plain['temporaries'])}\n") in out
    out = printed(capsys, f"memory {flags} --kernels torch")
    assert "kernels: plain torch" in out and "--dry-run" not in out


@pytest.mark.parametrize("asked", ["--help", "-h", *(f"{name} --help" for name in plan.__main__.COMMANDS)])
def test_help_says_what_commands_answer_with_examples_that_run(capsys, asked):
    out = printed(capsys, asked)
    named = [name for name in plan.__main__.COMMANDS if name in asked] or [*plan.__main__.COMMANDS]
    examples = re.findall(r"^ {9}python -m plan (\w+ .*)", out, re.MULTILINE)  # below what a command answers
    assert [example.split()[0] for example in examples] == named and "--memory-gb FLOAT" in out
    if "--help" != asked != "-h" and "search" not in asked:  # which takes seconds
        assert len(printed(capsys, examples[0])) > 500


@pytest.mark.parametrize("grid, copies, sites, gpus", [
    ("--zero 1 --dp 4 --tp 2", 1, 2, 16), ("--zero 3 --dp 4 --dp-replicate 2", 2, 4, 16), ("--dp 2 --cp 2", 4, 2, 8)])
def test_sites_that_wait_5_percent_of_the_time_exchange_as_rarely_as_is_printed(capsys, grid, copies, sites, gpus):
    """Over a ring of links of 10 Gbit/s and 20 ms. Not a step more rarely. A third of the model is hidden in tau."""
    flags = f"--preset llama-3.2-1b --seq-len 2048 --global-batch 64 --micro-batch 1 --sites {sites} {grid}"
    n, P, step = sites, 1_235_814_400, plan.step_time.step_seconds(run_for(flags)).seconds
    out = printed(capsys, f"sites {flags} --sync-fragments 3 --sync-every 51 --steps 204 --link-gbit 10 --link-ms 20")
    assert f"{n} sites of {gpus // n} x h100" in out and f"{copies * P:,} elements of each site" in out
    assert (f", in {copies} copies: " in out) == (copies > 1)
    rows = {row.split()[0]: row.split() for row in out.splitlines() if row.startswith("  ")}
    assert rows.keys() == set(config.SYNC_DTYPES)
    for dtype, nbytes, hops in (("fp32", 8 * (n - 1) / n, 2 * (n - 1)), ("bf16", 4 * (n - 1) / n, 2 * (n - 1)),
                                ("int8", (n - 1) * (1 + 4 / 128), n - 1)):
        whole, third = (part * copies * P * nbytes / 1.25e9 + 0.02 * hops for part in (1, 1 / 3))
        _, gigabytes, seconds, _, H, tau = rows[dtype]
        assert gigabytes == f"{nbytes * copies * P / 1e9:,.1f}" and seconds == f"{whole:.3g}"
        H, tau = int(H.replace(",", "")), int(tau.replace(",", ""))
        assert whole / (H * step + whole) <= 0.05 < whole / ((H - 1) * step + whole)
        assert (tau - 1) * step < third <= tau * step


@pytest.mark.parametrize("flags, says", [
    ("", "--sites 1: nothing is sent between sites: give 2 or more"),
    ("--sites 2 --link-gbit 0", "--link-gbit 0: must be above 0")])
def test_sites_that_send_nothing_are_refused(flags, says):
    with pytest.raises(ValueError, match=f"^{says}$"):
        plan.__main__.main(f"sites --gpus 2 {flags}".split())


@pytest.mark.parametrize("dtype, flags", [
    ("bf16", "--dp 4 --zero 1 --tp 2"), ("fp32", "--dp 4 --zero 3"), ("fp32", "--dp 2")])
def test_the_state_of_the_outer_optimizer_is_planned(dtype, flags):
    """Two tensors in fp32 as large as the shards, counted as they are allocated."""
    settings = run_for(f"--sites 2 --dtype {dtype} {flags}").settings
    settings.precision.dtype = dtype
    with dryrun.fake_world(settings.grid.ranks, 0), dryrun.fake_tensors():
        groups = build_groups(settings.grid, settings.model)
        optimizer = train.build_optimizer(settings, train.build_model(settings, groups, "cpu"), groups)
        train.build_outer(settings, optimizer, groups)
        state = sum(tensor.nbytes for bucket in optimizer.buckets for tensor in bucket.state.values()
                    if tensor is not bucket.weight_shard)
    element = 2 if dtype == "bf16" else 4
    assert plan.memory.memory_of_rank(settings, 0, element)["optimizer"] == state


def test_scaling_prints_days_and_dollars(capsys):
    """Of 20 tokens per active parameter."""
    flags = "--preset mixtral-8x7b --dp 8 --ep 8 --zero 3 --seq-len 4096 --global-batch 64 --micro-batch 1"
    N, D = 12_879_925_248, 20 * 12_879_925_248
    hours = D / plan.step_time.predict(run_for(flags)).tokens_per_s_per_gpu / 3600
    loss = 1.81686 + 482.00572 / N ** 0.34781 + 2085.4342 / D ** 0.36585
    out = printed(capsys, f"scaling {flags} --price 3")
    assert f"{N:,} active, D {D:.3g} tokens" in out and f"loss of this N and D: {loss:.3f} " in out
    assert f": {hours / 8 / 24:,.2f} days, {hours:,.0f} GPU-hours, {3 * hours:,.0f} dollars" in out
    assert "--batch-ramp" in out and "--batch-ramp" not in printed(capsys, f"scaling {flags} --global-batch 72")


def test_a_mistake_is_one_line_and_exit_code_2_without_torch():
    program = ("import runpy, sys; sys.modules['torch'] = None; "
               "runpy.run_module('plan', run_name='__main__', alter_sys=True)")
    command = "search --preset llama-3.2-1b --gpus 1 --global-batch 4 --seq-len 131072 --recompute none".split()
    ended = subprocess.run([sys.executable, "-c", program, *command], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1, ended.stderr
    assert re.search(r"^plan: on 1 x h100 .* none fits .*: use \d+ ranks or --preset \S+, the largest", ended.stderr)


@pytest.mark.parametrize("asked, line", [
    ("memory --preset llama-3.1-8b --tp 3", "--tp 3 does not divide --heads (32): use one of 1, 2, 4, 8, 16, 32"),
    ("step --machine abacus", "--machine abacus: unknown: give --peak-tflops (dense, bf16) and --memory-gb of its "),
    ("step --machine abacus --memory-gb 24", "--machine abacus: unknown: give --peak-tflops"),
    ("step --peak-tflops -1", "--peak-tflops -1.0: must be above 0"),
    ("step --machine a10 --fp8 tensorwise --preset llama-3.1-8b", "--fp8 tensorwise: a10 has no FP8: use --fp8 none"),
    ("abacus", "abacus: use one of params, memory"), ("balance", "balance: use its new name, python -m plan overlap"),
    ("check", "check: use its new name, python -m tests.published check"),
    ("step --init-from x", "--init-from x: plan reads neither models nor checkpoints: give --preset"),
    ("step --resume x", "--resume x: plan reads neither models nor checkpoints: give --preset"),
    ("step --grid auto", "--grid auto: step is of a grid"), ("search --gpus 1000001", "--gpus 1000001: must be at "),
    (dict(dtype="fp32"), "--dtype fp32: times are known in bf16 and fp16, use one of them, or auto"),
    (dict(tp=3, gpus=3), "--tp 3 does not divide --heads"), (dict(grid="auto"), "--grid auto: give a grid"),
    (dict(machine={"a": 1}), "--machine {'a': 1}: write a name"), (dict(init_from="x"), "--init-from x: plan reads"),
    (dict(machine="a100", fp8="tensorwise", hidden=1024), "--fp8 tensorwise: a100 has no FP8")])
def test_a_command_or_a_request_that_is_wrong_is_refused(asked, line):
    with pytest.raises(ValueError, match="^" + re.escape(line)):
        if isinstance(asked, dict):
            plan.step_time.run_of(dict(global_batch=9, micro_batch=1) | asked)
        else:
            plan.__main__.main(asked.split())


def test_a_request_is_its_flags():
    request = {"preset": "llama-3.1-8b", "tp": 4, "gpus": 16, "machine": "h100", "global-batch": 64, "micro_batch": 1,
               "seq_len": 4096, "sp": "off"}
    run = plan.step_time.run_of(request | dict(tied=True, dtype="fp16", no_such=None))
    assert (run.settings.grid.tp, run.settings.grid.sp, run.settings.model.tied) == (4, "off", True)
    assert (run.settings.precision.dtype, run.machine, run.code) == ("fp16", MACHINES["h100"], plan.step_time.OURS)
    same = run_for("--preset llama-3.1-8b --tp 4 --sp off --tied --global-batch 64 --micro-batch 1 --seq-len 4096", 16)
    assert run.settings.grid == same.settings.grid and run.settings.batch == same.settings.batch
    assert plan.step_time.run_of(dict(preset="tiny")).settings.precision.dtype == "bf16"
    assert plan.step_time.run_of(dict(preset="tiny", dp=2, pp=2, global_batch=8)).settings.ranks == 4


# ---- search ---------------------------------------------------------------------------------------------------------

MODEL = "--preset llama-3.1-8b --layers 15 --seq-len 4096 --global-batch 64"


@cache
def searched() -> tuple[list[search.Candidate], Counter]:
    return search.search(run_for(f"{MODEL} --grid auto", 16), 16)


def test_search_proposes_runs_that_are_valid_fit_and_are_in_order():
    found, fell = searched()
    assert [candidate.rank for candidate in found[:40]] == sorted(candidate.rank for candidate in found[:40])
    for candidate in found[:10]:
        again = run_for(f"{MODEL} {search.describe(candidate.run.settings)}", 16)
        step = plan.step_time.step_seconds(again)
        assert step.seconds == pytest.approx(candidate.seconds) and min(step.parts.values()) > -1e-9
        assert sum(step.parts.values()) == pytest.approx(step.seconds)
        needed = sum(plan.step_time.needed_memory(again).values()) + again.constants.reserved
        assert needed == pytest.approx(candidate.memory)
        in_use = needed - again.constants.reserved
        assert candidate.fits == pytest.approx(plan.step_time.probability_of_fit(again, in_use))
        assert candidate.memory <= again.constants.usable * 80 * 2**30
    assert fell["step 1: does not fit in memory"] > 30
    assert min(candidate.rank for candidate in found[40:]) > 0.9 * found[0].rank  # what was not simulated is no better


def test_what_may_not_fit_has_to_be_faster_and_competes_with_more_recomputation():
    found, _ = searched()
    assert found[0]._replace(seconds=3.0, fits=0.75).rank == 4.0
    unsure = [candidate for candidate in found if 0.5 <= candidate.fits <= 0.9]
    assert unsure and min(candidate.fits for candidate in found) >= 0.5
    keys = {(str(candidate.run.settings.grid), candidate.run.settings.batch.micro_batch,
             candidate.run.settings.precision.recompute) for candidate in found}
    for candidate in unsure:
        settings = candidate.run.settings
        if settings.precision.recompute == "none":
            assert (str(settings.grid), settings.batch.micro_batch, "selective") in keys


def test_what_is_simulated_is_in_order():
    """Bounds, by which these were found, have another order."""
    found, _ = search.search(run_for("--preset tiny --grid auto", 4), 4)
    ranks = [candidate.rank for candidate in found[:40]]
    assert ranks == sorted(ranks)


@pytest.mark.parametrize("preset, experts, micro_batches", [
    ("tiny", (1,), (1, 2, 4)), ("tiny-moe --micro-batch 1", (1, 2, 4), (1,))])
def test_search_leaves_nothing_out_that_the_command_line_takes(preset, experts, micro_batches):
    """All fit, and recomputation would only be slower; ZeRO shards over dp x cp, and 1 rank has nothing to shard."""
    model, sizes = f"--preset {preset} --seq-len 1024 --global-batch 4", (1, 2, 4)
    found, _ = search.search(run_for(f"{model} --grid auto", 4), 4, search.given_by_flags(model.split()))
    taken = set()
    for tp, pp_, cp, ep, level, micro, schedule in product(sizes, sizes, (1, 2), experts, range(4), micro_batches,
                                                           ("1f1b", "interleaved")):
        dp = 4 // (tp * pp_ * cp)
        if dp and (level == 0 or dp * cp > 1) and (pp_ > 1 or schedule == "1f1b"):
            flags = (f"--dp {dp} --cp {cp} --tp {tp} --pp {pp_} --ep {ep} --zero {level} --micro-batch {micro} "
                     f"--schedule {schedule}")
            with contextlib.suppress(ValueError):
                taken.add(search.describe(rules.parse(f"{model} {flags}".split(), 4)))
    assert len(taken) > 50 and {search.describe(candidate.run.settings) for candidate in found} == taken


def test_advice_is_the_fewest_ranks_and_the_largest_model(monkeypatch):
    """Of twice to 256 times as many ranks, where an own --dp does not count, and of the presets below this one."""
    monkeypatch.setattr(search, "any_fits", lambda run, gpus, given: gpus >= 100 if given == dict(tp=1) else (
        costs.parameters(run.settings.model).total < 9e9))
    run = run_for("--preset llama-3.1-70b --dp 8")
    models = {costs.parameters(rules.parse(["--preset", name]).model).total: name for name in config.PRESETS}
    largest = models[max(count for count in models if count < 9e9)]
    assert search.nearest(run, 8, dict(dp=8, tp=1)) == f"use 128 ranks or --preset {largest}, the largest that fits"
    monkeypatch.setattr(search, "any_fits", lambda run, gpus, given: gpus > 8 * 256)
    said = search.why_none_fits(run, 8, {}, Counter(a=3, b=5, c=1))
    assert "9 settings none fits (b: 5, a: 3)" in said and " 1,269.97 GB: use more GPUs" in said  # 18 x 70,553,706,496
    assert "no grid has these axes" in search.why_none_fits(run, 8, {}, Counter())


def test_a_host_is_its_cores(monkeypatch):
    """30 GFLOP/s, 5 GB/s of memory and 0.5 GB/s of gloo for a core, of which a rank has one at most."""
    monkeypatch.setattr(search.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(search.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 20}[name])
    for ranks, cores in (2, 1.0), (8, 0.5):
        host = search.this_machine(ranks)
        assert (host.peak(), *{host.memory_bandwidth, host.host_link, host.host_memory}) == (3e10 * cores, 5e9 * cores)
        assert (host.memory_bytes, *host.levels[0][1:4]) == (2**32 / ranks, ranks, 1e-4, 5e8 * cores)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_matmuls_reach_a_part_of_the_peak_and_faster_levels_are_nearer(machine):
    node, network = machine.levels
    assert machine.peak() > machine.best_matmul() > 0.5 * machine.peak()
    assert machine.best_matmul(fp8=True) == pytest.approx(2 * machine.best_matmul(), rel=0.15)
    assert machine.has_fp8() == (machine.peak_flops["fp8"] > 0)
    assert node.ranks == machine.gpus_per_node and node.latency_s < network.latency_s
    assert network.bandwidth_bytes_per_s < node.bandwidth_bytes_per_s
    if machine.host_link:
        assert network.bandwidth_bytes_per_s < machine.host_link < machine.host_memory < node.bandwidth_bytes_per_s
    measured = machines.MEASURED.get(machine.name, machines.Measured())
    assert (measured.bf16 > 0 and measured.node_gb_s > 0) == (not machine.assumed)


@pytest.mark.parametrize("name, bf16, fp8, gib, gb_s, link", [  # from the data sheets and white papers that CARDS names
    ("rtx-3090", 71, None, 24, 936, ("PCIe 4", 31)), ("rtx-4090", 165.2, 330.3, 24, 1008, ("PCIe 4", 31)),
    ("rtx-5090", 209.5, 419, 32, 1792, ("PCIe 5", 63)), ("l40s", 362, 733, 48, 864, ("PCIe 4", 31)),
    ("l4", 242 / 2, 485 / 2, 24, 300, ("PCIe 4", 31)), ("a10", 125, None, 24, 600, ("PCIe 4", 31)),
    ("a100-pcie", 312, None, 80, 1935, ("PCIe 4", 31)), ("a100-pcie-40gb", 312, None, 40, 1555, ("PCIe 4", 31)),
    ("a100", 312, None, 80, 2039, ("NVLink", 600 / 2)), ("a100-40gb", 312, None, 40, 1555, ("NVLink", 600 / 2)),
    ("h100", 1979 / 2, 3958 / 2, 80, 3350, ("NVLink", 900 / 2)),
    ("h100-pcie", 1513 / 2, 3026 / 2, 80, 2000, ("PCIe 5", 63)),
    ("h200", 1979 / 2, 3958 / 2, 141, 4800, ("NVLink", 900 / 2)),
    ("b200", 4500 / 2, 9000 / 2, 180, 8000, ("NVLink", 1800 / 2)),
    ("mi300x", 1307.4, 2614.9, 192, 5300, ("Infinity Fabric", 896 / 2))])
def test_cards_are_their_data_sheets(name, bf16, fp8, gib, gb_s, link):
    """Dense: half of the rates with sparsity. Links per direction: half of the sum of both."""
    card = machines.CARDS[name]
    assert (card.bf16, card.fp8, card.memory_gib) == pytest.approx((bf16, fp8 or 0, gib), rel=2e-3)
    assert (card.memory_tb_s * 1e3, card.link, card.link_gb_s) == (pytest.approx(gb_s, rel=5e-3), *link) and card.source
    machine = machines.read_machine(name)
    assert (machine.peak(), machine.memory_bytes) == (card.bf16 * 1e12, gib * 2**30)


def test_a_gpu_that_nobody_knows_is_planned_by_its_peak_and_memory(capsys):
    machine = machines.read_machine("mine", 100.0, 24.0)
    assert (machine.peak(), machine.best_matmul(), machine.memory_bytes) == (1e14, 0.8e14, 24 * 2**30)
    assert machine.memory_bandwidth == pytest.approx(1e14 * 3.35 / 989) and machine.has_fp8()  # an H100's per FLOP
    out = printed(capsys, "step --machine mine --peak-tflops 100 --memory-gb 24")
    assert "machine  1 x mine, 1 per node, 25.77 GB each" in out and machine.assumed in out and "of 100 TFLOP/s" in out
    assert "assumed, not measured: matmuls at 80% of the peak; PCIe 4 at 80% of 31 GB/s per GPU; " in machine.assumed
    large = machines.read_machine("RTX-4090", memory_gb=48.0)
    assert (large.memory_bytes, large.peak()) == (48 * 2**30, 165.2e12)
    half = machines.read_machine("h100", peak_tflops=989 / 2)
    assert half.best_matmul() == pytest.approx(MACHINES["h100"].best_matmul() / 2)
    assert machines.read_machine("NVIDIA GeForce RTX 4090") == MACHINES["rtx-4090"]


@pytest.mark.timing
def test_search_of_1024_gpus_takes_less_than_ten_seconds():
    began = time.process_time()
    search.search(run_for("--preset llama-3.1-70b --seq-len 8192 --global-batch 1024 --micro-batch 1"), 1024)
    assert time.process_time() - began < 10


# ---- scaling --------------------------------------------------------------------------------------------------------

PUBLISHED = json.loads((ROOT / "tests" / "data" / "scaling.json").read_text())


def test_the_best_sizes_are_the_published_ones_and_have_the_least_loss():
    """For Chinchilla's compute; for OPT's, with each exponent (a lecture's table, whose C is up to 0.3% off); of
    Hoffmann's tables, within the rounding of their exponents: off by 0.005, N differs by (C / C0)^0.005."""
    optima = scaling.optima(5.76e23)
    for law, sizes in PUBLISHED["optima for 5.76e23 FLOPs"].items():
        assert optima[law] == pytest.approx(sizes, rel=1e-3)
    for found, row in zip(scaling.optima_of_opt().values(), PUBLISHED["Berkeley CS 288, OPT"], strict=True):
        assert found == pytest.approx(row, rel=3e-3)
    for law, table in PUBLISHED["tables of Hoffmann 2022"].items():
        for flops, *sizes in table["rows"]:
            allowed = 0.015 + 0.005 * abs(math.log(flops / table["fixed"]))
            assert scaling.optima(flops)[law] == pytest.approx(sizes, rel=allowed)
    for law in scaling.FITS.values():
        parameters, tokens = law.optimum(1e22)
        assert all(law.loss(parameters * x, tokens / x) > law.loss(parameters, tokens) for x in (0.9, 1.1))


@pytest.mark.parametrize("name, days", [("GPT-3", 34), ("1T", 84), ("OPT-175B", 33)])
def test_days_of_published_runs(name, days):
    """Narayanan et al. 2021, section 5.1; OPT's logbook."""
    run, = (run for title, run in scaling.TRAININGS.items() if title.startswith(name))
    assert round(run.days) == days


def test_the_batch_is_minimaxs_at_its_losses_and_size():
    for loss, tokens in PUBLISHED["MiniMax-01's batch by loss"]:
        assert scaling.critical_batch_of_minimax(loss) == pytest.approx(tokens, rel=0.01)
    ramp = scaling.ramp(128_000_000 // 8192, 8192)
    stages = [[float(part) for part in stage.split("@")] for stage in ramp.split(",")]
    assert [size * 8192 for size, _ in stages] == pytest.approx([16e6, 32e6, 64e6, 128e6], rel=0.01)
    assert [start for _, start in stages] == pytest.approx([0, 69e9, 790e9, 4700e9], rel=0.01)


def test_a_ring_of_datacentres_takes_what_its_steps_take():
    """Epoch AI 2025: 72T parameters in 16 bits, 23 sites on 4,800 km, no time in between: each site's block goes round
    both ways; sums are made by the same steps in reverse. Reported, rounded: 6 Pb/s, 220 ms."""
    step = 2 * 72e12 / 23 / (6e15 / 8) + 4800e3 / 23 / 2e8  # of 11, after which a site has those of 11 to each side
    assert scaling.ring_seconds(72e12, 4800, 6e15 / 8) == pytest.approx(2 * 11 * step, rel=0.01)
    assert scaling.ring_seconds(72e12, 4800, 6.5e15 / 8) < 0.22 < scaling.ring_seconds(72e12, 4800, 5.5e15 / 8)


# ---- train.py --grid auto -------------------------------------------------------------------------------------------

def auto(flags: str, ranks: int, machine: Machine) -> tuple[config.Config, str]:
    return search.fill_grid(rules.parse(f"--grid auto {flags}".split(), ranks), ranks, machine)


def test_the_grid_that_is_chosen_is_the_best_one_that_was_found():
    """What a flag gives is not changed, unless it says that nothing is given."""
    settings, reason = auto(f"{MODEL} --dp auto --micro-batch auto", 16, MACHINES["h100"])
    found, _ = searched()
    best, second, *_ = found
    assert reason.startswith(f"{search.describe(settings)}: of {len(found)} settings ")
    assert f" fits with probability {search.shown(best.fits)}, limit {best.limit()}; next " in reason
    assert reason.endswith(f"{search.describe(second.run.settings)}, {second.seconds:.3g} s")
    again = rules.parse([*MODEL.split(), *search.describe(best.run.settings).split()], 16)
    assert (settings.grid, settings.batch, settings.precision) == (again.grid, again.batch, again.precision)
    settings, _ = auto("--preset llama-3.1-8b --seq-len 4096 --global-batch 64 --tp 4 --pp 2 --schedule zb-h1 --zero 0 "
                       "--micro-batch 2 --recompute full", 16, MACHINES["h100"])
    grid = settings.grid
    assert (grid.tp, grid.pp, grid.cp, grid.dp, grid.zero, grid.schedule) == (4, 2, 1, 2, 0, "zb-h1")
    assert (settings.batch.micro_batch, settings.precision.recompute) == (2, "full")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_first_rank_shows_how_far_a_search_is(monkeypatch, capsys, rank):
    """A bar for the grids that are tried, and one for the best of them, which are simulated."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(search, "tqdm", lambda *given, delay, **named: tqdm(*given, **named))  # at once
    auto("--preset tiny --global-batch 4 --schedule 1f1b --recompute none", 2, MACHINES["h100"])
    said = capsys.readouterr().err
    assert ("searching: " in said, "simulating: " in said) == (rank == "0", rank == "0")


def test_a_model_that_fits_nowhere_is_refused_with_what_would_fit():
    host = search.this_machine(2, None, 8e9)  # 4 GB for each of 2 ranks
    batch = "--seq-len 512 --global-batch 16 --micro-batch 1 --schedule 1f1b --recompute full"
    with pytest.raises(ValueError) as refusal:
        auto(f"--preset smollm-1.7b {batch}", 2, host)
    line = str(refusal.value)
    assert line.startswith("--grid auto: on 2 x cpu with 4 GB each, of ") and " none fits (step 1: " in line
    more, preset = re.search(r": use (\d+) ranks or --preset (\S+), the largest that fits$", line).groups()
    auto(f"--preset smollm-1.7b {batch}", int(more), host)
    auto(f"--preset {preset} {batch}", 2, host)


@pytest.mark.parametrize("device, known", [
    ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
    ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA H100 PCIe", "h100-pcie"), ("AMD Instinct MI300X", "mi300x"),
    ("NVIDIA GB200", "gb200"), ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA L4", "l4"), ("NVIDIA L40S", "l40s"),
    ("NVIDIA A100 80GB PCIe", "a100-pcie"), ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"), ("NVIDIA B200", "b200"),
    ("NVIDIA A10", "a10"), ("NVIDIA GeForce RTX 3090", "rtx-3090"), ("NVIDIA GeForce RTX 5090", "rtx-5090"),
    ("NVIDIA H100 NVL", "h100-nvl"), ("NVIDIA GH200 480GB", "gh200"), ("NVIDIA B300 SXM6 AC", "b300"),
    ("AMD Instinct MI300X OAM", "mi300x"),
    *((name, None) for name in ("Quadro of some kind", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A10G",
                                "NVIDIA L40", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
                                "NVIDIA GeForce RTX 5090 D", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "GRID A100-10C",
                                "NVIDIA A10-4Q", "NVIDIA H100 80GB HBM2e", "NVIDIA A100-SXM-64GB", "NVIDIA H20"))])
def test_a_gpu_is_known_by_its_name_or_said_to_be_unknown(device, known):
    assert machines.card_of(device) == (known or "")
    if known:
        machine = search.this_machine(4, device, 4e10)
        assert (machine.name, machine.memory_bytes, machine.levels[0].ranks) == (known, 4e10, 4)
        assert machine.peak() == machines.peak_flops(device) == MACHINES[known].peak()
    else:
        assert machines.peak_flops(device) is None
        with pytest.raises(ValueError, match=f"^--grid auto: {device} is an unknown GPU: .* --memory-gb 37,"):
            search.this_machine(4, device, 4e10)
