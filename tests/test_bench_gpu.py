"""`python -m bench gpu` on a CPU: what it would run on cards of several sizes, in which order, and what it keeps.

Nothing here needs a GPU, so that whoever moves a file or renames a flag sees here what would fail there.
"""
import contextlib
import inspect
import io
import itertools
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from program import ROOT
from torch.distributed.run import get_args_parser

from bench import __main__ as bench
from bench import gpu, gpu_rows, probe_gpu, smoke, training
from bench import rows as bench_rows
from bench.gpu import Program
from bench.rows import Result, Row
from core import config
from plan.memory import memory_of_rank
from run import device

CARDS = {"RTX 4090": 25.3e9, "H100": 84.9e9, "H200": 150.1e9}  # bytes, as torch says them
each_card = pytest.mark.parametrize("card", CARDS)


def rows_of(card: str) -> list[Row]:
    return [row for rows in gpu_rows.rows_of(int(CARDS[card])).values() for row in rows]


def rows_that_call(function: Callable, card: str) -> list[Row]:
    return [row for row in rows_of(card) if getattr(row.measure, "func", None) is function]


def trained(card: str) -> dict[str, str]:
    """Name -> flags of the rows that train."""
    return {row.name: row.measure.args[0] for row in rows_that_call(training.measure_training, card)}


# ---- rows -----------------------------------------------------------------------------------------------------------

@each_card
def test_rows_can_be_called_in_another_process_and_have_different_names(card):
    rows = rows_of(card)
    names = [row.name for row in rows]
    assert [row.name for row in pickle.loads(pickle.dumps(rows))] == names
    assert len(set(names)) == len(names)
    known = set()
    for row in rows:  # a rival is measured before the row that is compared with it
        assert row.rival in {"", *known}
        known.add(row.name)
        if isinstance(row.measure, partial) and row.measure.func is not str:
            inspect.signature(row.measure.func).bind(*row.measure.args, **row.measure.keywords)


@each_card
def test_training_rows_have_flags_that_train_and_fit(card):
    """In memory: all that plan/memory.py counts."""
    rows = trained(card)
    for flags in rows.values():
        settings = training.settings_of(flags)
        assert settings.precision.dtype == "bf16" and settings.batch.seq_len in (1024, 4096) and settings.ranks == 1
        assert settings.batch.global_batch % settings.batch.micro_batch == 0
        device.check_device(settings, torch.device("cpu"))
        assert sum(memory_of_rank(settings, 0, 2, fused=True).values()) < CARDS[card]
    assert rows


def test_a_card_gets_the_largest_sizes_that_fit():
    """A small card hears of the others what they take. Each compares FP8 with bf16 of one size."""
    common = {"training Llama 1B", "training Llama 1B, one sequence of 1024"}
    largest = "training Llama 8B with 16 layers"
    fp8s = {f"--fp8 {recipe}" for recipe in config.FP8_RECIPES}
    offloads = {f"--recompute full --offload {what}" for what in ("none", "activations", "both")}
    assert set(trained("H200")) == common | {
        largest, *(f"{largest}, {more}" for more in fp8s | offloads | {"--micro-batch 2"}), "training Llama 3B",
        "training Llama 8B, all 32 layers, moments in bf16", "training Qwen3-30B-A3B with 4 layers",
        "training Qwen3-30B-A3B with 4 layers, --fp8 blockwise"}
    largest = "training Llama 8B with 8 layers, micro-batch 2"
    assert set(trained("H100")) == common | {
        largest, *(f"{largest}, {more}" for more in fp8s | offloads), "training Llama 3B, micro-batch 1",
        "training Qwen3-30B-A3B with 2 layers", "training Qwen3-30B-A3B with 2 layers, --fp8 blockwise"}
    assert set(trained("RTX 4090")) == {"training Llama 1B with 8 layers, micro-batch 1"}
    for card in CARDS:
        refused = rows_that_call(str, card)
        assert len(refused) + len(trained(card)) == 13 - (card != "H200")
        for row in refused:
            assert re.fullmatch(r"takes ([\d.]+) GB, and may take ([\d.]+) GB here", row.measure())
            takes, has = map(float, re.findall(r"[\d.]+(?= GB)", row.measure()))
            assert takes > has


@each_card
def test_programs_of_rows_exist(card):
    programs = rows_that_call(gpu_rows.run_python, card)
    assert len(programs) == 3
    for row in programs:
        kind, program = row.measure.args
        if kind == "-m":
            assert find_spec(program)
        else:
            module, name = re.match(r"from (\S+) import (\w+); \2\(\)", program).groups()
            assert callable(getattr(import_module(module), name))
        assert all(isinstance(value, str) for value in row.measure.keywords.values())


def test_a_program_s_last_line_is_its_row_s_and_all_of_it_its_report():
    row = gpu_rows.run_python("-c", "import os; print('one'); print(os.environ['TWO'])", TWO="two")
    assert (row.rate, row.report) == ("exit code 0: two", "one\ntwo\n")


def test_losses_that_are_not_finite_are_no_result(monkeypatch):
    record = dict(step_s=1.0, tokens_per_s=2.0, mfu=0.5, mfu_causal=0.4, memory_gb=3.0)
    losses = [9.0, 8.0, 7.0, 6.0]
    monkeypatch.setattr(training, "train_llama", lambda *_: ([record | dict(loss=loss) for loss in losses], []))
    assert "MFU 50.0% (causal 40.0%), 3 GB, loss 9.00 to 6.00" in training.measure_training("", 4, 0).rate
    for bad in float("nan"), float("inf"), None:
        losses[3] = bad
        with pytest.raises(RuntimeError, match="losses"):
            training.measure_training("", 4, 0)


def test_what_a_card_cannot_train_is_refused_before_it_trains(monkeypatch):
    monkeypatch.setattr(device, "choose_device", lambda asked: (torch.device("cuda"), ""))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: "A100")
    monkeypatch.setattr(training, "open_samples", lambda *_: pytest.fail("it trains"))
    with pytest.raises(ValueError, match="^--fp8 tensorwise: cannot run on A100"):
        training.train_llama("--preset llama-3.2-1b --fp8 tensorwise", 1)


# ---- programs whose output is kept ----------------------------------------------------------------------------------

def test_stages_are_rows_and_programs_and_each_of_them_once():
    rows = gpu_rows.rows_of(1 << 37)
    assert sorted([*rows, *gpu.OUTPUTS]) == sorted(gpu.STAGES) and gpu.Flags().only == [*gpu.STAGES]


def test_the_results_have_a_table_of_all_that_the_first_gpu_will_show():
    """In the order in which it is measured, with what is expected of an H200."""
    rows, wanted = gpu_rows.rows_of(int(CARDS["H200"])), []
    for stage in gpu.STAGES:
        wanted += [(stage, row.name, row.expected) for row in rows.get(stage, [])]
        wanted += [(stage, f"{stage}.txt: {name}", program.expected)
                   for name, program in gpu.OUTPUTS.get(stage, {}).items()]
    section = Path(ROOT, "docs/RESULTS.md").read_text().partition("\n## The first GPU\n")[2]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    assert [tuple(cells[:3]) for cells in lines[2:]] == wanted and all(cells[3] for cells in lines)


def test_modules_grids_and_flags_of_programs_exist():
    for program in (*gpu.RIGHT.values(), gpu.NCCL):
        assert program.arguments[0] == "-m" and find_spec(program.arguments[1]) and program.expected
    bench.check(["check"], [], 1)
    for words, ranks in (gpu.RIGHT["smoke"].arguments[2:], 1), (gpu.NCCL.arguments[-3:], 2):
        part, *flags = words
        bench.check([part], flags, ranks)
        grids, where = smoke.parse(flags, ranks)
        assert len(grids) == flags[1].count(";") + 1 and where == "auto"
    torchrun = get_args_parser().parse_args(gpu.NCCL.arguments[2:])
    assert (torchrun.nproc_per_node, torchrun.local_addr, torchrun.standalone) == ("2", "127.0.0.1", True)
    assert torchrun.training_script == "bench" and torchrun.module


def test_each_word_selects_a_test():
    """Among those that need a GPU are all of the files."""
    program = [*gpu.RIGHT["tests"].arguments, "--collect-only"]
    done = subprocess.run([sys.executable, *program], cwd=ROOT, capture_output=True, text=True)
    found = [line.partition("::") for line in done.stdout.splitlines() if "::" in line]
    assert done.returncode == 0 and {file for file, _, _ in found} == {*gpu.TESTS}, done.stdout[-1000:]
    for word in gpu.WORDS:
        assert any(word in name for _, _, name in found), word
    for file in gpu.TESTS:
        for name in re.findall(r"\n@gpu\ndef (\w+)", Path(ROOT, file).read_text()):
            assert any(name == found_name.partition("[")[0] for _, _, found_name in found), name


def test_output_is_kept_also_of_a_program_that_takes_too_long_and_its_children_end_with_it(tmp_path, capsys):
    waits = "import subprocess, sys, time; print('begun', flush=True); "
    child = "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid, flush=True); "
    programs = {"hangs": Program(("-c", f"{waits}{child}time.sleep(600)"), 5, "nothing"),
                "fails": Program(("-c", "print('half'); raise ValueError('no')"), 60, "all"),
                "works": Program(("-c", "print('whole')"), 60, "all")}
    gpu.keep_outputs(programs, str(tmp_path), "right.txt", 60)
    assert os.listdir(tmp_path) == ["right.txt"]
    text = (tmp_path / "right.txt").read_text()
    hangs, fails, works = re.split("^## ", text, flags=re.MULTILINE)[1:]
    assert hangs.startswith("hangs: ended after 5 s\nexpected: nothing\n\nbegun\n")
    assert fails.startswith("fails: exit code 1\nexpected: all\n\nhalf\n") and "ValueError: no" in fails
    assert works == "works: exit code 0\nexpected: all\n\nwhole\n\n" and "whole" in capsys.readouterr().out
    process = Path("/proc", hangs.splitlines()[4], "stat")  # the child's: gone, or a zombie that nobody waits for
    for _ in range(100):
        if not process.exists() or process.read_text().split()[2] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("the child lives on")


# ---- the command ----------------------------------------------------------------------------------------------------

@pytest.fixture
def bench_gpu(monkeypatch, tmp_path):
    """`python -m bench gpu` in an empty folder: flags, memory of the card -> (what is measured, the seconds it takes).

    A row takes 20 s, and programs as long as they may, by a clock that stands still otherwise."""
    now, measured = [1000.0], []

    def measure(self, row: Row, limit_s: float) -> Result | str:
        now[0] += min(limit_s, 20)
        if limit_s < 20:
            return bench_rows.too_long(limit_s)
        measured.append(row.name)
        return Result(1.0)

    def keep(programs: dict[str, Program], folder: str, name: str, limit_s: float) -> None:
        now[0] += max(min(program.limit_s, limit_s) for program in programs.values()) + gpu.GRACE_S
        measured.append(name)
        Path(folder, name).write_text("")

    def run(*flags: str, memory: float = CARDS["H200"], name: str = "a card") -> tuple[list[str], float]:
        properties = SimpleNamespace(name=name, total_memory=int(memory), multi_processor_count=132,
                                     L2_cache_size=50 << 20)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: properties)
        measured.clear()
        began = now[0]
        gpu.measure([*flags])
        return [*measured], now[0] - began

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUT", raising=False)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(bench_rows.Worker, "measure", measure)
    monkeypatch.setattr(gpu, "keep_outputs", keep)
    monkeypatch.setattr(gpu, "logged", lambda path: contextlib.nullcontext())
    monkeypatch.setattr(shutil, "which", lambda program: None)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    return run


@each_card
def test_runs_together_measure_all_once_in_order_and_within_their_limits(bench_gpu, card):
    """However long each of them may take."""
    stages, found = gpu_rows.rows_of(int(CARDS[card])), []
    limits = [120, 20, 300, 61, 800, 120, 575, 190, 700, 700]
    for limit in limits:
        measured, seconds = bench_gpu(f"--limit={limit}", memory=CARDS[card])
        assert seconds <= limit
        found += measured
    order = {"right": ["right.txt"], "nccl": ["nccl.txt"]} | {
        stage: [row.name for row in rows] for stage, rows in stages.items()}
    assert found.index("right.txt") == 0 and sorted(found) == sorted(itertools.chain(*order.values()))
    for stage in stages:
        assert [name for name in found if name in order[stage]] == order[stage]
    table = Path(gpu.RESULTS, "table.md").read_text()
    assert table.startswith("a card, ") and table.count("| 1000.000 |") == sum(map(len, stages.values()))
    assert "no time was left" not in table and bench_gpu(memory=CARDS[card]) == ([], 0)


def test_the_most_telling_rows_come_first(bench_gpu):
    measured, _ = bench_gpu()
    assert measured[:4] == ["right.txt", "training Llama 8B with 16 layers",
                            "training Llama 8B with 16 layers, --fp8 tensorwise",
                            "training Llama 8B, all 32 layers, moments in bf16"]
    assert "matmul of qkv, forward" in measured  # training does not take all the time
    assert bench_gpu("--only", "nccl", "--out", "another") == (["nccl.txt"], 150 + gpu.GRACE_S)


def test_another_card_is_measured_anew_in_the_same_folder(bench_gpu):
    first, _ = bench_gpu("--only", "training", "--limit", "700")
    assert bench_gpu("--only", "training", "--limit", "700", name="another card")[0] == first
    assert bench_gpu("--only", "training", "--limit", "700")[0] == []


def test_a_job_whose_results_are_fetched_from_elsewhere_goes_on_from_what_is_kept_here(bench_gpu, monkeypatch):
    monkeypatch.setenv("OUT", "job 1")
    bench_gpu("--limit", "300")
    first = {name: Path("job 1", name).read_text() for name in os.listdir("job 1")}
    assert first.keys() == {"right.txt", "rows.jsonl", "reports.txt", "table.md", "clocks.csv"}
    assert {name: Path(gpu.RESULTS, name).read_text() for name in os.listdir(gpu.RESULTS)} == first
    monkeypatch.setenv("OUT", "job 2")
    measured, _ = bench_gpu("--limit", "100")
    assert measured and "right.txt" not in measured
    assert Path("job 2", "rows.jsonl").read_text().startswith(first["rows.jsonl"])
    assert bench_gpu("--out", "alone", "--only", "right")[0] == ["right.txt"]  # this folder, and no other
    assert os.listdir("alone") == ["right.txt"] and sorted(os.listdir()) == ["alone", gpu.RESULTS, "job 1", "job 2"]


PRINTS = """
import os, sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
if __name__ == "__main__":
    from bench.gpu import logged
    with logged(sys.argv[1]):
        print("printed")
        os.system("echo a child")
        with ProcessPoolExecutor(1, get_context("forkserver")) as pool:  # its server lives on, and shares the output
            pool.submit(os.system, "echo a worker").result()
        print("an error", file=sys.stderr)
        print("x" * 200_000)  # more than a pipe holds
    print("afterwards")
"""


def test_all_that_is_printed_is_in_the_log_too(tmp_path):
    """Also what children and errors print, and if nobody reads the output."""
    script = tmp_path / "prints.py"
    script.write_text(PRINTS)
    command, log = [sys.executable, script, tmp_path / "log.txt"], ["a child", "a worker", "an error", "printed"]
    how = dict(env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120)
    done = subprocess.run(command, capture_output=True, text=True, **how)
    assert sorted(done.stdout.splitlines()) == sorted([*log, "x" * 200_000, "afterwards"]), done.stderr
    shell = ["bash", "-c", '"$@" | true', "", *command]
    subprocess.run(shell, stderr=subprocess.DEVNULL, **how)
    assert sorted((tmp_path / "log.txt").read_text().splitlines()) == sorted(2 * [*log, "x" * 200_000])


# ---- the probe ------------------------------------------------------------------------------------------------------

@cache
def probed() -> dict[str, tuple[str, str]]:
    """Question -> (what is found here, what is expected of a GPU), in small sizes."""
    small = dict(DEVICE="cpu", sdpa_choice=partial(probe_gpu.sdpa_choice, S=64),
                 measure_seconds=lambda function, *inputs: function(*inputs) is None or 1.0,
                 rates_of_copies=partial(probe_gpu.rates_of_copies, T=16, H=8))
    with patch.multiple(probe_gpu, **small), contextlib.redirect_stdout(io.StringIO()) as printed:
        probe_gpu.main()
        for question in probe_gpu.experts():
            print(probe_gpu.ask(question))
    lines = [re.fullmatch(r"(.*): (.*)   \(expected: (.*)\)", line) for line in printed.getvalue().splitlines()]
    return {line[1]: (line[2], line[3]) for line in lines}


def rounding(*bits: int) -> float:
    """The relative error of a product of factors with so many bits of mantissa. Within a power of two numbers are as
    frequent as 1/x, so their square is 3 / (2 ln 2) on average, and that of half a step at most 1/12 of a step's."""
    return math.hypot(*(2.0 ** -count / math.sqrt(12 * 1.5 / math.log(2)) for count in bits))


def test_the_probe_finds_here_what_is_expected_there():
    """FP8 is emulated on CPUs, and their attention adds up as precisely."""
    found = probed()
    assert len(found) > 25 and not any("Error" in text for text, _ in found.values())
    for question, (text, expected) in found.items():
        if question.startswith("FP8") and " 1 rows" not in question:
            wanted = rounding(3, 3), *[rounding(3, 2 if "tensorwise" in question else 3)] * 2
            assert [*map(float, text.split())] == pytest.approx(wanted, rel=0.12)
            assert [*map(float, re.findall(r"\S+e-\d\d", expected))][:2] == pytest.approx(
                wanted[:1 + ("each" not in expected)], rel=0.12)
        elif question.startswith(("attention's backward", "grouped_mm,")) or question == "grouped_mm":
            low, high = map(float, re.findall(r"\S+e-\d\d", expected)) if " to " in expected else (0, 0)
            assert text == expected or all(low <= float(error) <= high for error in text.split()), question
    assert found["an FP8 scale has the bits of a CPU"][0] == "True"
    assert found["amax / 448 has the bits of a CPU"][0] == "True"  # on a GPU it has not
    assert found["copies of tokens for experts"][0] == "gather 0.00 TB/s, sum 0.00 TB/s"
    choice, *errors = found["latent attention, values of 128 not padded to 192"][0].split()
    assert choice == "MATH" and all(1e-3 < float(error) < 6e-3 for error in errors) and len(errors) == 4


def test_a_question_that_fails_says_how():
    assert probe_gpu.ask(("x", lambda: [][1], "1")) == "x: IndexError: list index out of range   (expected: 1)"
    assert probe_gpu.ask(("x", lambda: 0.25, "1")) == "x: 2.5e-01   (expected: 1)"
