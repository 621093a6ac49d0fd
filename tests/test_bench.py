"""The parts of the benchmarks that need no measuring: who is compared, how tables and results are written."""
import contextlib
import io
import os
import re
import time
from functools import partial
from unittest.mock import Mock, patch

import pytest
import torch
from exact import Broken
from grids import TINY
from pool import slow
from program import ROOT, python
from watch import in_order

import flash
import fp8
import kernels
from bench import __main__ as bench
from bench import check, gpu_rows, smoke, training
from bench import gpu as bench_gpu
from bench import kernels as bench_kernels
from bench import rows as bench_rows
from bench.rows import Report, Result, Row
from core import config, param
from run import device, job
from run.meter import Meter
from zero import Optimizer


def test_a_table_has_a_line_per_row_and_ratios_to_the_fastest_rival():
    """And the choice, which is the fastest contender that is right, and what was expected."""
    rows = [Row("x", None, "2 TB/s"), Row("y", None, "fast"), Row("z", None, "0.5", "x"), Row("w", None, rival="y")]
    x = Result(0.003, "3 TB/s", {"fast": 0.002, "wrong": 0.001}, {"ours": 1e-3, "fast": 1.5e-3, "wrong": 5e-3},
               rates={"fast": "4 TB/s"})
    w = Result(1, rivals={"unchecked": 2, "wrong": 0.5}, errors={"ours": 1e-3, "wrong": float("inf")})
    outcomes = dict(x=(x, "9 MHz"), z=(Result(0.006, failures={"TMA": "OutOfResources: shared"}), ""), w=(w, ""))
    assert bench_rows.table(rows, outcomes).splitlines()[2:] == [
        "| x | 3.000 | 3 TB/s | 2 TB/s | fast 2.000 4 TB/s; wrong 1.000 | 3.00 "
        "| ours 1.0e-03, fast 1.5e-03, wrong 5.0e-03; choose fast | 9 MHz |",
        "| y | not measured: no time was left |  | fast |  |  |  |  |",
        "| z | 6.000 |  | 0.5 | x 3.000; TMA: OutOfResources: shared | 2.00 |  |  |",
        "| w | 1000.000 |  |  | unchecked 2000.000; wrong 500.000 | 2.00 | ours 1.0e-03, wrong inf; choose ours |  |"]


def test_a_call_is_timed_by_triton_in_ms(monkeypatch):
    called, timer = Mock(), Mock(return_value=3.0)
    monkeypatch.setattr(bench_rows, "do_bench", timer)
    assert bench_rows.measure_seconds(called, 1, 2) == 0.003 and timer.call_args.kwargs == dict(return_mode="median")
    timer.call_args.args[0]()
    called.assert_called_once_with(1, 2)


def test_contenders_are_checked_against_fp64_on_equal_inputs_and_a_failing_one_is_named(monkeypatch):
    def double_in_place(x):
        return x.mul_(2)

    def fail(x):
        raise RuntimeError("no such\nkernel")

    contenders = {"ours": double_in_place, "off": lambda x: 2.5 * x, "broken": fail, "nan": lambda x: x * torch.nan}
    monkeypatch.setattr(bench_rows, "measure_seconds", lambda function, *inputs: 1.0)
    found = bench_rows.compare(contenders, (), str, lambda x: 2 * x.double(), lambda: (torch.randn(9),))
    assert found.errors == {"ours": 0, "off": pytest.approx(0.25), "nan": float("inf")}
    assert found.failures == {"broken": "RuntimeError: no such"} and set(found.rivals) == {"off", "nan"}
    with pytest.raises(RuntimeError, match="^ours: RuntimeError: no such; others in ms: x 1000.000$"):
        bench_rows.compare({"ours": fail, "x": double_in_place}, (), str, abs, lambda: (torch.randn(9),))


def test_clocks_are_medians_of_busy_samples_since_the_last_row(tmp_path):
    log = bench_rows.ClockLog(str(tmp_path))
    with open(log.path, "w") as file:
        print("timestamp, clocks.current.sm [MHz], power.draw [W], temperature.gpu, utilization.gpu [%]", file=file)
        for clock, used in (1980, 0), (1700, 99), (1600, 98), (1650, 97):
            print(f"2026/01/01 00:00:00.000, {clock}, {clock - 1000}.5, 50, {used}", file=file)
        file.write("2026/01/01 00:00:00.0")  # a line that is being written
    assert log.since_last_call() == "1650 MHz, 650 W" and log.since_last_call() == ""


@pytest.mark.parametrize("samples, found", [
    (["1700, [N/A]", "1600, [Not Supported]"], "1650 MHz"), (["[N/A], 690.00", "[Unknown Error], nan"], "690 W"),
    (["1700, [N/A]", "1600, 600", "[N/A], 500"], "1650 MHz, 550 W"), (["[N/A], [N/A]"], "")])
def test_what_nvidia_smi_cannot_say_is_left_out(tmp_path, samples, found):
    log = bench_rows.ClockLog(str(tmp_path))
    with open(log.path, "w") as file:
        for sample in samples:
            print(f"2026/01/01 00:00:00.000, {sample}, [N/A], 99", file=file)
        print("2026/01/01 00:00:00.000, 1, 1, 50, [N/A]", file=file)  # who knows whether it was busy
    assert log.since_last_call() == found


result = partial(Result, 1.0, report="many kernels")  # what a row's process calls, which need not import this file


def test_a_failing_row_harms_no_other_and_the_same_command_goes_on_where_it_ended(tmp_path):
    """Rows for which no time was left, or that were cut short, are measured the next time, and those alone. Of another
    card's rows nothing is taken."""
    def measure(rows: list[Row], limit_s: float = 420, **limits: float) -> list[str]:
        """Of each row its time in ms, or the failure."""
        report = Report(str(tmp_path), [*rows, Row("of another stage", None)], "a GPU")
        bench_rows.measure_rows(rows, report, limit_s, **limits)
        lines = (tmp_path / "table.md").read_text().splitlines()[4:]
        assert lines.pop().startswith("| of another stage | not measured: no time was left |")
        return [line.split(" | ")[1].removeprefix("not measured: ") for line in lines]

    for name, card, seconds in ("known", "a GPU", 1.0), ("first", "another GPU", 2.0):
        bench_rows.write_outcome(Report(str(tmp_path), [], card), Row(name, None), Result(seconds), "1650 MHz", 2.0)
    with open(tmp_path / "rows.jsonl", "a") as file:
        file.write('{"row": "of another version", "clock": "", "card": "a GPU"}\n{"row": "cut sho')
    rows = [Row("known", None), Row("first", result), Row("raises", partial(int, "x")),
            Row("dies", partial(os._exit, 3)), Row("does not fit", partial(str, "takes 9 GB")), Row("follows", result)]
    known, first, raises, dies, fits, follows = before = measure(rows)
    assert known == first == follows == "1000.000" and dies.startswith("BrokenProcessPool") and fits == "takes 9 GB"
    assert raises.startswith("ValueError: invalid literal for int() with base 10: 'x'")
    assert (tmp_path / "reports.txt").read_text() == "## first\n\nmany kernels\n\n## follows\n\nmany kernels\n\n"
    rows = [row._replace(measure=None) for row in rows]
    assert measure([*rows, Row("late", result, rival="first")], limit_s=bench_rows.LEAST_S - 1) == [
        *before, "no time was left"]
    assert measure([*rows, Row("late", result, rival="first")]) == [*before, "1000.000"]
    table = (tmp_path / "table.md").read_text()
    assert "| first 1000.000 | 1.00 |" in table and table.count("| 1650 MHz |") == 1
    hanging = [Row("hangs", partial(time.sleep, 600))]
    with patch.object(bench_rows, "LEAST_S", 0):
        assert measure(hanging, limit_s=0.5) == ["no time was left"]
    assert measure(hanging, row_limit_s=0.5) == ["more than 0.5 s"]


@pytest.mark.parametrize("refuse, flags, message", [
    (bench_gpu.parse, "--only loss", "--only loss: the stages are right, training, "),
    (bench_gpu.parse, "--layers 2", "--layers 2: gpu knows --limit"),
    (bench_gpu.parse, f"--out {__file__}", f"--out {__file__} is a file: name a folder"),
    (bench_gpu.parse, "--limit x", "--limit x: write a number"),
    (check.main, "--preset nemo", "--preset nemo"), (check.main, "--preset tiny --tp 2", "--tp 2: unknown"),
    (partial(smoke.parse, ranks=2), "--grids=--tp=3", "--tp 3"),
    (partial(bench.check, ["cp"], ranks=1), "", "cp needs several ranks: run under torchrun --nproc_per_node=4 -m "),
    (partial(bench.check, ["zero"], ranks=1), "--layers 2", "zero needs several ranks: run under torchrun "),
    (partial(bench.check, ["ep"], ranks=1), "--layers 2", "--layers 2: ep has fixed sizes and needs no flags"),
    (partial(bench.check, ["gpu", "dp"], ranks=1), "", "gpu shares no run: its flags are not those of train.py"),
    (partial(bench.check, ["dp", "train"], ranks=4), "", "train is for one process, not 4 ranks: run python -m "),
    (partial(bench.check, ["gpu"], ranks=1), "--limt 3", "--limt 3: gpu knows --limit"),  # also without a GPU
    pytest.param(partial(bench.check, ["gpu"], ranks=1), "", "gpu needs a GPU, and there is none here",
                 marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"))])
def test_what_a_part_cannot_do_is_refused_in_a_line(refuse, flags, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)) as caught:
        refuse(flags.split())
    assert "\n" not in str(caught.value)


def test_steps_are_timed_by_the_clock_on_a_cpu_and_between_events_on_a_gpu(monkeypatch):
    seen = Mock()
    monkeypatch.setattr(bench.time, "perf_counter", Mock(side_effect=[10.0, 16.0, 20.0]))
    assert bench.measure_seconds(seen.step, 3) == 2.0 and seen.step.call_count == 3
    seen.reset_mock()
    seen.Event.side_effect = [seen.start, seen.stop]
    seen.start.elapsed_time.return_value = 6000.0
    monkeypatch.setattr(bench, "device", torch.device("cuda"))
    monkeypatch.setattr(torch, "cuda", seen)
    assert bench.measure_seconds(seen.step, 3) == 2.0
    assert [name for name, *_ in seen.mock_calls] == [
        "synchronize", "Event", "Event", "_sleep", "start.record", *3 * ["step"], "stop.record", "stop.synchronize",
        "start.elapsed_time"]
    seen.Event.assert_called_with(enable_timing=True)
    seen.start.elapsed_time.assert_called_with(seen.stop)


@contextlib.contextmanager
def on_a_small_cpu():
    """What rows ask of a GPU is done on the CPU, in fp32, once, with small sizes."""
    def without_device(function):
        return lambda *args, device=None, **kwargs: function(*args, **kwargs)

    small = dict(T=256, S=64, H=128, FFN=256, copy_rate=lambda: 1.0,
                 sdpa_kernel=lambda backends: contextlib.nullcontext(),
                 parameter=lambda spec, groups, dtype, device: param.parameter(spec, groups, dtype))
    made = {name: without_device(getattr(torch, name))
            for name in ("randn", "empty", "zeros", "ones", "randint", "arange", "logspace")}
    cuda = dict(memory_allocated=lambda: 0, max_memory_allocated=lambda *device: 0, current_stream=lambda: None,
                reset_peak_memory_stats=lambda: None)
    with patch.multiple(bench_kernels, **small), patch.multiple(torch.cuda, **cuda), patch.multiple(
            torch, bfloat16=torch.float32, compile=lambda function: function, **made), patch.object(
            device, "choose_device", lambda asked: (torch.device("cpu"), "")), patch.object(
            torch.Tensor, "cuda", lambda x: x), patch.object(bench_rows, "measure_seconds",
            lambda function, *inputs: (function(*inputs), 1.0)[1]):
        bench_kernels.angles.cache_clear()
        yield


BF16 = {"bf16", *config.FP8_RECIPES}
SMALL_ROWS = [  # function, arguments, its contenders
    ("norm_programs", (), {"2 programs", "4 programs", "8 programs"}),  # of one SM
    ("sum_of_copies", (2,), {"ours", "embedding_bag"}),
    ("expert_gradients", (3, 40, 48, 16), {"ours", "a matmul per expert"}),
    ("loss", (300, 64), {"ours", "compiled", "eager"}),
    *(("attention", (step, 1, 64, 4, 2, 16), {"ours", "cuDNN", "torch's flash"}) for step in ("forward", "backward")),
    *(("attention", (step, 1, 64, 4, 2, 16, 3), {"ours", "torch's, with a mask"}) for step in ("forward", "backward")),
    *(("block_of_keys", (step, 32, 16, 4, 2, 16), {"cuDNN", "flash.py"}) for step in ("forward", "backward")),
    *(("block_matmul", (kind, 64, 256, 128), BF16) for kind in ("forward", "input gradients")),
    ("block_matmul", ("weight gradients", 64, 256, 128), BF16 | {"bf16, rounded, then added"})]


@pytest.mark.parametrize("measure, contenders", [
    *(pytest.param(row.measure, None, id=row.name) for row in gpu_rows.kernel_rows(1 << 37)
      if re.search("fused|quantise|fp8", str(row.measure))),
    *((partial(getattr(bench_kernels, f"measure_{name}"), *how), names) for name, how, names in SMALL_ROWS)])
def test_rows_run_and_agree_with_fp64(cudnn, measure, contenders):
    with on_a_small_cpu():
        found = measure()
    compared = {found.ours, *found.rivals}
    fp8 = re.search("block_matmul|quantise|fp8", getattr(measure, "func", measure).__name__)
    assert contenders in (None, compared) and not found.failures and found.seconds == 1.0
    assert found.errors.keys() == (set() if fp8 else compared) and all(error < 1e-5 for error in found.errors.values())


@pytest.mark.parametrize("late", [True, False])
def test_a_profile_has_the_last_steps_and_no_others(monkeypatch, late):
    """Whether results are read at once or, as on a GPU, when the next step has been launched. Metrics are of all."""
    profiler = Mock(events=list)
    monkeypatch.setattr(training, "profile", lambda activities: profiler)
    monkeypatch.setattr(job, "reads_late", lambda device: late)
    calls = (Optimizer, "step", "step"), (profiler, "start", "start"), (profiler, "stop", "stop")
    with on_a_small_cpu(), in_order(*calls) as events:
        records, kernels = training.train_llama(
            "--layers 1 --hidden 32 --heads 2 --kv-heads 2 --ffn 48 --seq-len 32 --dtype fp32", 6, 2)
    assert events == [*4 * ["step"], "start", "step", "step", "stop"] and kernels == []
    assert [record["step"] for record in records] == [*range(6)] and records[0]["step_s"] > 0


def test_kernels_are_listed_by_the_time_that_they_take_which_is_split_by_their_names():
    kernels = [(0, 10, "nvjet_a"), (10, 20, "nvjet_a"), (30, 60, "flash_forward_kernel"), (60, 80, "copy")]
    split, report = training.describe_kernels(kernels, steps=2)
    assert split == "attention 37.5%, GEMM 25.0%, elementwise 25.0%, idle 12.5%"
    assert [line.split() for line in report.splitlines()[3:]] == [
        ["0.01", "0", "37.5%", "flash_forward_kernel"], ["0.01", "1", "25.0%", "nvjet_a"],
        ["0.01", "0", "25.0%", "copy"]]
    for kernel, kind in [
            ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention"), ("cross_entropy_kernel", "loss"),
            ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "GEMM"), ("sm90_xmma_gemm_bf16bf16_bf16f32", "GEMM"),
            ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
            ("expert_gradients_kernel", "GEMM"), ("sum_rows_kernel", "elementwise"),
            ("rms_norm_backward_kernel", "elementwise"), ("vectorized_elementwise_kernel", "elementwise")]:
        assert training.kind_of(kernel) == kind


# ---- rows against rivals --------------------------------------------------------------------------------------------

def test_a_refusal_is_one_line():
    done = python("-m", "bench", "train", "--dtype", "bf16")
    assert (done.returncode, done.stderr) == (
        2, "bench: --dtype bf16: all contenders compute in fp32, so leave it out\n")


def rows(name: str) -> str:
    """What the first rank prints of a comparison of small sizes, whose times are those of one step each."""
    turns, flags = bench.take_turns, f"{TINY} --kv-heads 4 --global-batch 4".split()
    small = dict(CP_SEQUENCES=(256, 512), PP_TOKENS=16, EP_TOKENS=64, CHECKPOINT_MODEL="--zero 1",
                 take_turns=lambda contenders, repeats, steps: turns(contenders, 1, 1))
    with patch.multiple(bench, **small), contextlib.redirect_stdout(io.StringIO()) as printed:
        bench.PARTS[name](flags) if name in bench.TRAINING else bench.PARTS[name]()
    return printed.getvalue()


COMPARED = [
    ("train", 1, 1, ["transformers + fused AdamW"]), ("dp", 2, 1, ["DistributedDataParallel"]),
    ("tp", 2, 1, ["DTensor"]),
    ("cp", 2, 6, ["torch, gather and mask, S 256", "torch, gather and mask, S 512"]),
    *slow(("zero", 2, 3, ["ZeroRedundancyOptimizer", "fully_shard", "fully_shard, reduce_dtype bf16"]),
          ("pp", 4, 4, ["Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble",
                        "ScheduleZBVZeroBubble"]),
          ("ep", 1, 1, ["transformers, loop", "transformers, grouped"])),
    ("ep", 2, 2, []),
    ("checkpoint", 2, 0, ["run/checkpoint.py", "DCP, each rank's shards", "torch.save of the gathered state"])]


def test_every_part_with_rivals_has_a_case():
    assert {getattr(case, "values", case)[0] for case in COMPARED} == bench.PARTS.keys() - {*bench.OWN_FLAGS}


@pytest.mark.parametrize("name, ranks, ours, rivals", COMPARED)
def test_every_part_compares_ours_with_its_rivals(pool, name, ranks, ours, rivals):
    printed, *others = pool.run(ranks, rows, name=name) if ranks > 1 else [rows(name)]
    headings, lines = [], []
    for line in printed.splitlines():
        cells = re.split("  +", line)
        (lines if cells[0] and not cells[0].startswith("(") else headings).append(cells)
    assert not any(others) and sum(cells[0].startswith("penteract") for cells in lines) == ours
    assert [cells[0] for cells in lines if not cells[0].startswith("penteract")] == rivals
    if name == "checkpoint":  # at the peak a copy of this half of master weights and moments; the gathered state
        copies, _, gathered = (float(cells[-1].replace(",", "")) for cells in lines)
        assert copies == pytest.approx(804_224 * 12 / 2 / 1e6, abs=0.1) and gathered > 2 * copies
    elif ranks > 1:
        sent = [float(cells[headings[0].index("MB sent")].split()[0]) for cells in lines]
        assert all(sent[:-1]) and (name == "ep") == (sent[-1] == 0)


def flops_of_contenders(name: str) -> list[dict[str, int]]:
    """Of each comparison of a part, the FLOPs of the second step of every contender on this rank."""
    found = []

    def compare(contenders, tokens, repeats, steps):
        found.append({})
        for contender, build in contenders.items():
            step = build()
            step()
            with Meter(memory=False) as meter:
                step()
            found[-1][contender] = meter.flops

    flags = f"{TINY} --vocab 96 --kv-heads 4 --global-batch 4".split()
    with patch.multiple(bench, compare=compare, PP_TOKENS=16, PP_WIDTH=16):
        bench.PARTS[name](flags) if name in bench.TRAINING else bench.PARTS[name]()
    return found


@pytest.mark.parametrize("name", ["pp", *slow("dp", "zero", "tp")])
def test_contenders_do_the_same_work(pool, name):
    """On each rank they compute exactly as many FLOPs. Not in cp, where the rival computes a whole mask."""
    for comparisons in pool.run(2, flops_of_contenders, name=name):
        assert comparisons
        for flops in comparisons:
            ours, theirs = flops.values()
            assert ours == theirs > 0, flops


def test_a_line_has_the_median_the_range_and_the_ratio_to_the_last(capsys):
    times = dict(ours=[0.001, 0.004, 0.002], rival=[0.004, 0.003, 0.005])
    with patch.object(bench, "take_turns", lambda contenders, repeats, steps: times):
        bench.compare(dict.fromkeys(times, lambda: None), tokens=100)
    assert [re.split("  +", line) for line in capsys.readouterr().out.splitlines()] == [
        ["(ratio to the last line)", "min to max, ms", "tokens/s", "ms per step"],
        ["ours", "1.0 to 4.0", "50,000", "2 (0.50)"], ["rival", "3.0 to 5.0", "25,000", "4 (1.00)"]]


# ---- bench smoke ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ranks, nccl", [(1, (2, 28, 9)), (2, (2, 28, 9)), (2, (2, 30, 7))])
def test_ranks_that_share_a_gpu_are_allowed_to(monkeypatch, ranks, nccl):
    """Of one rank nothing is changed; symmetric memory, which --sp async needs, takes one variable of torch's."""
    monkeypatch.setattr(os, "environ", dict(LOCAL_RANK=str(ranks - 1), LOCAL_WORLD_SIZE=str(ranks)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: nccl)
    assert smoke.choose_device("auto") == torch.device("cuda", 0)
    shared = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"}
    shared |= {"NCCL_MULTI_RANK_GPU_ENABLE"} if nccl > (2, 30) else {
        "NCCL_HOSTID", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME"}
    assert os.environ.keys() == {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} | (shared if ranks > 1 else set())


def test_smoke_compares_each_dtype_with_one_process_on_the_cpu(capsys, monkeypatch):
    monkeypatch.setattr(smoke.subprocess, "run", lambda command, **options: python(*command[1:]))
    smoke.main(["--grids", f"--recompute full --layers 1 --seq-len 64 --data {ROOT}/pp.py"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["fp32", "bf16"]
    assert float(lines[0][4]) <= 1e-6 < float(lines[1][4]) < 2e-2  # on the same device the fp32 run is the same one


def test_smoke_fails_where_losses_differ(capsys, monkeypatch):
    monkeypatch.setattr(smoke, "train_grid", lambda flags, where, store: [5.0, 4.0])
    monkeypatch.setattr(smoke, "losses_of_one_process", lambda flags: [5.0, 4.001])
    with pytest.raises(SystemExit) as ended:
        smoke.main(["--grids", "--zero 1; --zero 2"])
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1 and [line.endswith("differs") for line in lines] == [True, False] * 2


def test_smoke_takes_the_grids_that_its_ranks_can_be():
    grids, _ = smoke.parse([], 1)
    assert "--zero 0" in grids and not any("--tp 2" in grid for grid in grids)
    assert set(smoke.parse([], 8)[0]) == set(smoke.GRIDS) and smoke.model_flags("") == ""
    assert smoke.model_flags("--tp=2 --no-router-norm --cp_style ring --data a b --betas 0.9,0.99 --zero 3") == (
        "--no-router-norm --data a b --betas 0.9,0.99")


@pytest.mark.slow
def test_smoke_trains_every_grid_of_four_ranks():
    # Little text: each run reads it.
    grids = [f"{grid} --seq-len 32 --data {ROOT}/pp.py" for grid in smoke.parse([], 4)[0]]
    command = "-m torch.distributed.run --nproc_per_node=4 -m bench smoke --grids"
    done = python(*command.split(), ";".join(grids), timeout=1200)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2 * len(grids) > 30


# ---- bench check ----------------------------------------------------------------------------------------------------

def verdicts(capsys) -> dict[str, str]:
    """Kernel -> verdict, of what was printed."""
    head, *lines = [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()[1:]]
    assert head == ["kernel", "shapes", "its error", "torch's", "verdict"]
    return {line[0]: line[-1] for line in lines}


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run in other processes")
def test_check_finds_kernels_that_are_wrong_or_do_not_run(capsys, monkeypatch):
    """Fallen back on torch they would be right."""
    with pytest.raises(SystemExit) as ended:
        check.main(["--preset", "tiny"])
    right = verdicts(capsys)
    assert not ended.value.code and set(right.values()) == {"ok"} and len(right) == 2 * 9 + 1
    rope_ = kernels.rope_
    monkeypatch.setattr(kernels, "rope_", lambda x, cos, sin, *rest: rope_(x, cos, 1.001 * sin, *rest))
    monkeypatch.setattr(kernels, "swiglu_kernel", Broken("swiglu_kernel"))
    monkeypatch.setattr(flash, "flash_dkv_kernel", Broken("flash_dkv_kernel"))
    with pytest.raises(SystemExit) as ended:
        check.main([])
    no = "does not run: RuntimeError: no such"
    assert ended.value.code == 1 and verdicts(capsys) == {name: "ok" for name in right if name != "SwiGLU backward"} | {
        "rotary embedding": "differs", "rotary embedding backward": "differs", "SwiGLU": no,
        **{f"attention, {kind} backward": no for kind in ("causal", "window", "documents")}}
    assert not kernels.failed


def test_check_compares_fp8_with_the_numbers_themselves(monkeypatch):
    """Where a GPU has it: here torch is compared with torch."""
    monkeypatch.setattr(check, "ON_GPU", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    monkeypatch.setattr(fp8, "try_kernel", lambda x, compute: None)
    for kind in "one scale", "1 x 128 blocks", "128 x 128 tiles":
        (_, shape, ours, torchs, verdict), = check.check(f"FP8, {kind}", "smollm-135m")
        assert shape == "128x640" and verdict == "ok" and 0.02 < float(ours) == float(torchs) < 0.03  # 3 bits
