"""The program as its users start it: what it prints, writes and refuses, and that it learns."""
import contextlib
import gc
import math
import os
import re
import shlex
import signal
import sys
import time
from types import SimpleNamespace
from unittest.mock import patch

import grids
import numpy as np
import pairs
import program
import pytest
import runs
import tokenizers
import torch
import torch.distributed as dist
from runs import first_step, metrics, run

import train
from core import config, rules
from core.collectives import ALONE
from core.groups import build_groups
from learn import pictures
from model import Llama
from plan import costs, search
from run import checkpoint, cli, data, device, dryrun, generate, job, log
from run.data import open_samples
from run.tokenizing import Codec

ROOT = os.path.dirname(train.__file__)
SMALL = f"{grids.TINY} --seq-len 32 --warmup 2"
UNSEEN = "".join(f"{i * i} bottles of beer on the wall, " for i in range(20))[:10 * 32]  # ten samples


def test_a_run_says_what_it_does_learns_and_saves_when_it_is_asked_to_end(tmp_path):
    command = (f"train.py {SMALL} --steps 100000 --lr 0.01 --metrics {tmp_path}/m "
               f"--checkpoint-dir {tmp_path}/out").split()
    process, file = program.forks().Process(target=program.run, args=(command, str(tmp_path), {})), tmp_path / "m"
    process.start()
    while process.is_alive() and not (file.exists() and file.read_text().count("\n") > 60):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    process.join(120)
    assert process.exitcode == 0, (tmp_path / "stderr").read_text()
    records, lines = metrics(file), (tmp_path / "stdout").read_text().splitlines()
    (saved,), steps = cli.checkpoints_in(tmp_path / "out"), len(records)
    for line, has in zip(lines, ("device", "grid", "512 tokens", "31,968 parameters", "data", f"trained {steps} steps",
                                 f"ended after {steps} of 100000 steps, as asked (SIGTERM)", f"saved {saved}",
                                 f"python train.py --checkpoint-dir {tmp_path}/out --resume auto", "-m run.generate "
                                 f"{tmp_path}/out --prompt"), strict=True):
        assert has in line
    assert cli.step_of(saved) == steps
    checkpoint.verify(saved)
    assert [record["step"] for record in records] == list(range(steps))
    assert records[0]["loss"] == pytest.approx(5.55, abs=0.05) and records[59]["loss"] < 4
    assert records[0]["mfu"] is None and records[0]["comm_gb"] == {}  # a CPU has no peak to be compared with


@pytest.fixture
def pasted(monkeypatch):
    """What the commands of a line do, in this process, in the project's folder."""
    def call(words: list[str]) -> None:
        monkeypatch.setattr(sys, "argv", words[1:])
        monkeypatch.setattr(os, "execv", lambda program, arguments: print(run(arguments[2:])))
        programs = {"train.py": lambda words: print(run(words)), "run.generate": generate.main,
                    "run.checkpoint": lambda words: checkpoint.main(), "learn.pictures": pictures.main}
        programs[words[1] if words[0] == "-m" else words[0]](words[1 + (words[0] == "-m"):])

    def paste(line: str) -> None:
        for command in line.removeprefix("next").strip().split("; "):
            program, *words = shlex.split(command)
            if program == "cd":
                assert words == [ROOT]
                monkeypatch.chdir(ROOT)
            else:
                assert program == "python"
                call(words)
    return paste


def test_what_a_run_says_to_do_next_can_be_pasted(pasted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pictures, "FOLDER", tmp_path / "pictures")
    said = run([*f"{SMALL} --data {ROOT}/pp.py --steps 2 --metrics m.jsonl".split(), "--checkpoint-dir", "my run",
                "--sample-prompt", "it's"])
    first, second = said.splitlines()[-2:]
    assert "\nsaved my run/step-000002\n" in said
    assert first.startswith("next    ") and second.startswith("        ")
    pasted(second)
    printed, saved = capsys.readouterr().out, tmp_path / "my run"
    assert "\nit's" in printed and f"\nexported {saved}/step-000002 to {saved}-hf\n" in printed
    assert (tmp_path / "my run-hf" / "model.safetensors").exists() and (tmp_path / "pictures" / "loss.svg").exists()
    pasted(first)
    assert "trained 4 steps" in capsys.readouterr().out and len(metrics(tmp_path / "m.jsonl")) == 4


def test_next_is_only_what_can_be_done(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, np.arange(400, dtype=np.uint16) % 256)
    # Of a model that no class of transformers has:
    flags = f"{SMALL} --warmup 0 --data {tokens} --steps 1 --qk-norm --qkv-bias"
    assert run(flags).splitlines()[-1].startswith("next    nothing is saved: --checkpoint-dir FOLDER ")
    *_, before, last = run(f"{flags} --checkpoint-dir {tmp_path}/out --allow-mismatch").splitlines()
    assert last == f"next    python train.py --checkpoint-dir {tmp_path}/out --resume auto --steps 2 --allow-mismatch"
    assert "run.generate" not in before
    assert "next " not in run(f"--resume {tmp_path}/out")  # nothing was trained


@pytest.mark.parametrize("here, start", [
    (8, "torchrun --nproc_per_node=8 train.py"),
    (4, "torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=first:29500 train.py")])
def test_a_run_of_several_ranks_is_continued_by_torchrun(monkeypatch, tmp_path, here, start):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    monkeypatch.setenv("MASTER_ADDR", "first")
    corpus, world = SimpleNamespace(is_text=True), SimpleNamespace(size=8)
    settings = rules.parse(["--checkpoint-dir", str(tmp_path), "--steps", "5"])
    line, _ = job.what_next(job.Run(settings, SimpleNamespace(corpus=corpus), None, None, "", job.RunState(step=3),
                                    groups=dict(world=world)))
    assert line.endswith(f"{start} --checkpoint-dir {tmp_path} --resume auto")


def outcomes(pool, folder, grids: list[tuple[int, str]], flags: str) -> list[tuple[list[dict], str]]:
    """(metrics, what was printed) of a run on each grid, (ranks, flags): the same numbers to 1e-10, the same text."""
    found = []
    for i, (ranks, grid) in enumerate(grids):
        (folder / str(i)).unlink(missing_ok=True)
        first, *others = pool.run(ranks, runs.run, flags=f"{SMALL} {flags} {grid} --metrics {folder / str(i)}")
        assert not any(others)
        found.append((metrics(folder / str(i)), first))
    records, printed = found[0]
    for other, text in found:
        for record, want in zip(other, records, strict=True):
            for what in {"loss", "grad_norm", "val_loss", "aux_loss", "load_max_over_mean"} & want.keys():
                assert record[what] == pytest.approx(want[what], rel=1e-10), what
        sample, wanted = (said.split("\nimport")[1].split("\nnext ")[0] for said in (text, printed))
        assert sample == wanted and len(sample) > 8
    return found


def test_grids_train_evaluate_and_sample_as_one_process(pool, tmp_path):
    """Of ten validation samples every grid takes each once, whatever its micro-batches."""
    (tmp_path / "unseen.txt").write_text(UNSEEN)
    flags = (f"--data {ROOT}/train.py --val-data {tmp_path}/unseen.txt --dtype fp64 --steps 4 --lr 0.01 "
             f"--global-batch 8 --mask-documents --eval-every 2 --eval-steps 2 --sample-prompt import "
             "--sample-top-k 60 --sample-top-p 0.9 --sample-temperature 1.5")
    grids = [(1, "--micro-batch 1"), (2, "--micro-batch 2"), (2, "--micro-batch 4 --zero 3"),
             (2, "--cp 2 --cp-style ring"), (4, "--micro-batch 2 --pp 2 --schedule zb-h1 --zero 3"),
             (2, "--micro-batch 4 --pp 2"), (4, "--cp 2 --tp 2 --zero 3"),
             (4, "--micro-batch 1 --zero 1 --dp-replicate 2")]
    found = outcomes(pool, tmp_path, grids, flags)
    records, _ = found[0]
    assert ["val_loss" in record for record in records] == [False, True, False, True]
    assert 4 < records[-1]["val_loss"] < 6
    measured = ["noise_trace" in other[0] for other, _ in found]  # with two gradients, and no shared sequences
    assert measured == [False, True, True, False, True, False, False, True]


def test_validation_takes_each_sample_once_whatever_the_global_batch(tmp_path):
    """Ten samples in batches of 8, the second of which is filled up; of 5 and of 2, which are whole. The folder of the
    metrics is made."""
    (tmp_path / "unseen.txt").write_text(UNSEEN)
    found = []
    for size in 8, 5, 2:
        run(f"{SMALL} --data {ROOT}/train.py --val-data {tmp_path}/unseen.txt --dtype fp64 --steps 1 --warmup 0 "
            f"--lr 1e-15 --global-batch {size} --sample-prompt= --metrics {tmp_path}/new/{size}")
        found.append(metrics(tmp_path / "new" / str(size))[0]["val_loss"])
    assert found == pytest.approx(3 * [found[-1]], rel=1e-10)


def test_grids_of_experts_train_evaluate_and_sample_as_one_process(pool, tmp_path):
    """The second time with a dense layer, which is a stage of the pipeline."""
    flags = (f"--preset tiny-moe --experts 4 --expert-ffn 24 --router-bias-rate 0.02 --data {ROOT}/train.py "
             f"--val-data {ROOT}/pp.py --dtype fp64 --steps 3 --lr 0.01 --global-batch 8 --eval-every 3 --eval-steps 1 "
             "--sample-prompt import")
    grids = [(1, "--micro-batch 2"), (2, "--ep 2 --recompute full"), (2, "--tp 2 --sp off --ep 2 --micro-batch 2"),
             (4, "--cp 2 --ep 4 --zero 3"), (2, "--pp 2 --micro-batch 2")]
    (records, _), *_ = outcomes(pool, tmp_path, grids, flags)
    assert 0.01 * 2 < records[0]["aux_loss"] < 0.01 * 2 * 1.3  # of two layers, a little above the least
    assert records[-1]["load_max_over_mean"] > 1
    grids = [(1, "--micro-batch 4"), (4, "--pp 2 --ep 2 --micro-batch 2")]
    outcomes(pool, tmp_path, grids, f"{flags} --dense-layers 1")


def test_a_step_that_fails_is_named_and_not_the_one_before(monkeypatch):
    """And Python's garbage collector, which is off in the loop, is on again."""
    def fails(step: int, optim: config.Optim) -> float:
        assert not gc.isenabled()
        if step == 2:
            raise FloatingPointError
        return optim.lr

    monkeypatch.setattr(train, "learning_rate", fails)
    state = job.RunState()
    with pytest.raises(FloatingPointError):
        run("--seq-len 32 --global-batch 2 --steps 4", state)
    assert state.activity == "in step 2" and gc.isenabled()


@pytest.mark.parametrize("flags", ["--data", "--data {folder}/good.npy --val-data"])
def test_a_token_of_another_vocabulary_is_refused_before_the_first_step(pool, tmp_path, flags):
    """Also where only the second rank's part of the corpus has it."""
    tokens = np.zeros(2**22 + 100, np.uint16)
    tokens[2**22 + 5] = 9999
    np.save(tmp_path / "tokens.npy", tokens)
    np.save(tmp_path / "good.npy", tokens[:1000])
    flags = flags.format(folder=tmp_path)
    flags = (f"{SMALL} --vocab 300 --sample-prompt= --checkpoint-dir {tmp_path / 'out'} {flags} "
             f"{tmp_path / 'tokens.npy'}")
    with pytest.raises(RuntimeError) as error:
        pool.run(2, runs.run, flags=flags)
    line = f"\nValueError: {tmp_path / 'tokens.npy'}: token 4,194,309 is 9999, outside of 0..299: raise"
    assert str(error.value).count(line) == 2 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("content, says", [
    ("{", ": is no tokenizer.json: "), (tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 300}, "a")).to_str(),
                                        ": has the token 300, outside of 0..299: raise --vocab to 301, or give "
                                        "--sample-prompt=")])
def test_a_tokenizer_that_could_not_be_used_is_refused_before_the_first_step(tmp_path, content, says):
    np.save(tmp_path / "tokens.npy", np.zeros(1000, np.uint16))
    (tmp_path / "tokenizer.json").write_text(content)
    flags = f"--data {tmp_path}/tokens.npy --vocab 300 --layers 1 --hidden 32 --ffn 32 --seq-len 32 --global-batch 2"
    with pytest.raises(ValueError, match=f"^{tmp_path}/tokenizer.json{says}"):
        run(f"{flags} --steps 1 --checkpoint-dir {tmp_path / 'out'}")
    assert not (tmp_path / "out").exists()
    run(f"{flags} --steps 1 --sample-prompt=")


def test_a_snapshot_of_a_gpus_memory_needs_a_gpu(tmp_path, monkeypatch):
    for name in "stdout", "stderr":  # `started` replaces them
        monkeypatch.setattr(sys, name, getattr(sys, name))
    with (patch.object(cli, "refuse", side_effect=lambda error: (_ for _ in ()).throw(error)),
          pytest.raises(ValueError, match=f"^--memory-snapshot {tmp_path}/memory: needs a GPU"),
          job.started(rules.parse(f"--memory-snapshot {tmp_path}/memory --device cpu".split()))):
        raise AssertionError("it has started")


def test_fewer_gpus_than_ranks_is_an_error_and_none_is_not(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    for gpus, asked, want in ((0, "auto", "cpu"), (0, "cpu", "cpu"), (2, "cpu", "cpu"), (4, "auto", "cuda:3"),
                              (2, "auto", "2 GPUs: use --nproc_per_node=2 or --device cpu"),
                              (0, "cuda", "--device cuda: 4 ranks on this machine and 0 GPUs: use --device cpu")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        with pytest.raises(ValueError, match=want) if "use" in want else contextlib.nullcontext():
            assert str(device.choose_device(asked)[0]) == want


def test_the_memory_of_a_machine_is_shared_by_its_ranks(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(device.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 20}[name])
    assert device.memory_of_device(torch.device("cpu")) == 2**32 // 4


@pytest.mark.parametrize("activations, least", [(0, 16), (16, 16), (18, 17)])
def test_what_stays_must_fit_and_all_may_take_twice_the_memory(monkeypatch, activations, least):
    """As activations and temporaries are estimates."""
    kinds = dict(weights=2, gradients=4, optimizer=10, activations=activations)
    monkeypatch.setattr(device, "memory_of_rank", lambda *_, **__: kinds)
    settings = rules.parse([])
    for memory in least, least - 1:
        monkeypatch.setattr(device, "memory_of_device", lambda device, memory=memory: memory)
        too_small = pytest.raises(ValueError, match="takes .* on this rank")
        with too_small if memory < least else contextlib.nullcontext():
            device.check_memory(settings, None, torch.device("cpu"))


def test_what_a_gpu_pins_must_fit_into_its_share_of_the_hosts_memory(monkeypatch):
    monkeypatch.setattr(device, "memory_of_rank", lambda *_, **__: dict(weights=0, gradients=0, optimizer=0))
    monkeypatch.setattr(device, "memory_of_device", lambda where: 10**11 if where.type == "cuda" else 96 * 10**9)
    flags = "--preset llama-3.1-8b --layers 16 --dtype bf16 --global-batch 4".split()
    device.check_memory(rules.parse([*flags, "--checkpoint-dir", "x"]), 0, torch.device("cuda"))
    for where, refused in (("cpu", contextlib.nullcontext()), ("cuda", pytest.raises(ValueError, match=(
            "--offload: takes 96.64 GB of the host's memory for this rank, which has 96.00 GB: use more ranks with")))):
        with refused:
            device.check_memory(rules.parse([*flags, "--offload", "optimizer"]), 0, torch.device(where))


@pytest.mark.parametrize("rank", [0, 4])
def test_grid_auto_is_chosen_for_this_machine_and_all_ranks_and_rank_0_says_it(monkeypatch, capsys, rank):
    """Two machines of four ranks each."""
    for name, value in dict(WORLD_SIZE=8, LOCAL_WORLD_SIZE=4, RANK=rank, LOCAL_RANK=rank % 4).items():
        monkeypatch.setenv(name, str(value))
    settings = rules.parse(f"--grid auto --data {__file__}".split(), 8)
    chosen = job.choose_grid(settings, torch.device("cpu"))
    grid, again, said = chosen.grid, search.fill_grid(settings, 8, search.this_machine(4)), capsys.readouterr().out
    assert grid.dp * grid.cp * grid.tp * grid.pp == 8
    assert (chosen.grid, said) == (again[0].grid, "" if rank else f"auto    {again[1]}\n")
    assert rank or "on 8 x cpu" in said


@pytest.mark.parametrize("schedule", ["wsd", "constant"])
def test_learning_rate_schedules(schedule):
    """Cosine: test_loop.py."""
    optim = rules.parse(f"--lr 1 --min-lr 0.1 --warmup 10 --steps 110 --lr-schedule {schedule}".split()).optim
    rates = [train.learning_rate(step, optim) for step in range(110)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    falling = 22 if schedule == "wsd" else 0  # the last fifth of 110 steps
    assert rates[10:110 - falling] == [1.0] * (100 - falling)
    assert rates[110 - falling:] == pytest.approx([1 - 0.9 * (i + 1) / 22 for i in range(falling)])


def test_progress_is_20_to_40_lines_of_which_the_last_step_is_one(capsys):
    progress = log.Log(rules.parse("--steps 45 --dtype fp32".split()), grids.NO_GROUPS, torch.device("cpu"))
    for step in range(45):
        progress.write(dict(step=step, loss=0.5, tokens_per_s=1234.4))
    lines = [line.split("/")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == [f"step {done}" for done in (*range(2, 45, 2), 45)]


def test_slow_steps_have_a_line_after_five_seconds_and_then_every_thirty(capsys, monkeypatch):
    clock = 0.0
    monkeypatch.setattr(log.time, "monotonic", lambda: clock)
    progress = log.Log(rules.parse("--steps 1000 --dtype fp32".split()), grids.NO_GROUPS, torch.device("cpu"))
    progress.begin(0)
    for step in range(49):  # the 50th has a line because a twentieth of the steps is done
        clock += 3.0
        progress.write(dict(step=step, loss=0.5, tokens_per_s=1.0))
    lines = [line.split("/")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["step 2", "step 12", "step 22", "step 32", "step 42"]


def slowly(function):
    def slow(*arguments, **named):
        time.sleep(0.4)
        return function(*arguments, **named)
    return slow


def test_what_takes_long_says_what_it_is(tmp_path, monkeypatch, capsys):
    """Here everything takes long, and long is a twentieth of a second."""
    monkeypatch.setattr(cli, "SOON_S", 0.05)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # for the tokens of the third run
    for module, name in ((data, "find"), (data, "Corpus"), (job, "load_first"), (job, "find_whole"), (job, "mean_loss"),
                         (checkpoint.Saver, "finish"), (checkpoint, "export"), (runs, "sample")):  # which `run` calls
        monkeypatch.setattr(module, name, slowly(getattr(module, name)))
    flags = f"{SMALL} --warmup 0 --data {ROOT}/pp.py --val-data {ROOT}/dp.py --global-batch 4 --eval-steps 1"
    said = run(f"{flags} --steps 1 --checkpoint-dir {tmp_path}/out --export-hf {tmp_path}/hf --sample-prompt a")
    said += run(f"{flags} --steps 2 --resume {tmp_path}/out") + run(f"{flags} --init-from {tmp_path}/hf --steps 0")
    said += capsys.readouterr().err  # of what comes before the ranks have met
    for doing in ("looking for files of data", "reading the data", "drawing the initial weights",
                  f"reading the weights of {tmp_path}/hf", "comparing the checkpoint's files with their checksums",
                  "evaluating after step 0", "waiting for the save before this one", "saving the checkpoint of step 1",
                  f"exporting the model to {tmp_path}/hf", "sampling"):
        assert re.search(rf"train\.py: {re.escape(doing)}: \d+ s so far\n", said), doing


def test_only_the_first_rank_says_that_it_takes_long_and_nobody_afterwards(monkeypatch, capsys):
    monkeypatch.setattr(cli, "SOON_S", 0.02)
    monkeypatch.setattr(cli, "LATER_S", 0.02)
    for rank, lines in ("0", 2), ("1", 0):
        monkeypatch.setenv("RANK", rank)
        said, began = "", time.monotonic()
        with cli.told_if_slow("waiting", "this"):
            time.sleep(0.15)
            while said.count("\n") < lines and time.monotonic() < began + 60:  # on a busy machine threads run late
                time.sleep(0.02)
                said += capsys.readouterr().err
        said += capsys.readouterr().err
        assert len(re.findall(r"this: waiting: \d+ s so far\n", said)) >= lines and bool(said) == bool(lines)
        time.sleep(0.1)
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("noise, line", [
    ([(9e9, 1), (9e9, 1), (1e4, 1), (2e4, 2), (float("nan"), 1), (6e4, 3)], "of the last 3 steps: 15,000 tokens"),
    ([(1, 1), (-3, 2)], "of the last 1 step: 0 tokens"), ([(1, 1), (3, -2)], ""), ([(float("nan"), 1)], "")])
def test_the_last_lines_are_of_the_whole_run_and_of_the_noise_in_its_second_half(capsys, noise, line):
    end = log.Log(rules.parse(["--dtype", "fp32"]), grids.NO_GROUPS, torch.device("cpu"))
    end.close(3, 99)  # prints nothing, as nothing has been trained yet
    for step, (trace, gradient2) in enumerate(noise):
        end.write(dict(step=step, loss=1.23456 + step, tokens_per_s=1.0, noise_trace=trace, noise_gradient2=gradient2))
    end.close(200, 1234567)
    last = f"trained 200 steps on 1,234,567 tokens: last loss {1.23456 + step:.4f} nats per token"
    assert capsys.readouterr().out.splitlines() == [last] + [f"gradient noise scale {line}"] * bool(line)


def test_the_first_lines_name_fp8_active_parameters_the_grid_that_is_shown_a_ramps_beginning_and_the_data(tmp_path):
    np.save(tmp_path / "tokens.npy", np.zeros(32 * 1234, np.uint16))
    settings = rules.parse(f"--preset tiny-moe --fp8 tensorwise --seq-len 32 --dtype bf16 --tp 2 --pp 2 --cp 2 "
                            f"--micro-batch 1 --batch-ramp 4@0,8@2e3 --data {tmp_path}/tokens.npy".split(), 8)
    settings.grid_is_example, samples = True, open_samples(settings, settings.data.data, 0)
    count = costs.parameters(settings.model)
    said = log.first_lines(settings, {}, "cpu", samples=samples)
    assert "model   tiny-moe: 1,234 parameters (" in log.first_lines(settings, {}, "cpu", 1234, samples)
    for words in ("fp8 tensorwise", "--dp 8", "batch 4 = micro 1 x accum 4 x dp 1; ", "ramp 4@0,8@2e3",
                  f"{count.total:,} parameters ({count.active:,} active)", "1,233 samples"):  # that take one more token
        assert words in said, said


def counted(flags: str) -> int:
    """The parameters of the model of this rank's grid, all ranks together."""
    settings = rules.parse(flags.split(), dist.get_world_size())
    groups = build_groups(settings.grid, settings.model)
    return log.count_parameters(train.build_model(settings, groups, "cpu"), groups, torch.device("cpu"))


@pytest.mark.parametrize("ranks, flags", [
    (2, "--tied --pp 2"), (2, "--mtp --pp 2"), (2, "--mtp --tied --pp 2 --schedule zb-v"), (2, "--pp 2 --qkv-bias"),
    (4, "--pp 2 --tp 2 --tied --vocab 259"), (4, "--tp 4 --kv-heads 2 --qk-norm"), (2, "--zero 3 --tied"),
    (4, "--preset tiny-moe --pp 2 --ep 2 --shared-experts 1 --dense-layers 1"),
    (4, f"--preset tiny-moe --mtp --tp 2 --pp 2 --ep 2 {pairs.LATENT} --head-dim 32 --schedule interleaved")])
def test_parameters_of_all_ranks_are_counted_once(pool, ranks, flags):
    """Of one rank as many as torch counts without a grid, and as plan/ does."""
    flags = f"--dtype fp32 {flags} --micro-batch 1 --data {__file__}"
    model = rules.parse(flags.split(), ranks).model
    alone = sum(math.prod(p.spec.shape) for p in Llama(model, {}).parameters())
    assert alone == costs.parameters(model).total
    assert pool.run(ranks, counted, flags=flags) == [alone] * ranks


@pytest.mark.parametrize("flags, has", [
    ("--tp 2 --pp 2 --schedule interleaved --zero 1 --layers 4 --experts 8 --expert-ffn 8 --ep 4 --micro-batch 1", [
        "ep 4 x edp 1, ", "2 of 4 stages", "1/2 of every layer", "1/2 of the tokens between layers, but 2 of 8 experts",
        "1/2 of its optimizer state (1/1 of experts')", "1/2 of the sequences"]),
    ("--cp 2 --tp 2 --sp off", ["all tokens between layers", "1/2 of the sequences, 1/2 of each sequence"]),
    ("--zero 3 --dp-replicate 4", ["computes with", "1/2 of its weights, gradients, optimizer state in 4 replicas"]),
    ("--cp 2 --zero 2 --dp-replicate 2 --experts 8 --expert-ffn 8 --ep 2", [
        "the whole model, but 4 of 8 experts", "1/4 of its gradients, optimizer state (1/2 of experts') in 2"])])
def test_the_second_line_says_which_part_a_rank_has(flags, has):
    settings = rules.parse(flags.split(), 8)
    line = log.grid_line(settings.grid, settings.model)
    assert all(words in line for words in has), line


def test_a_sample_begins_with_a_separator_and_rings_no_bell(monkeypatch, capsys):
    prompts, said = [], [256, *b"ab", 7, 8, *b"\n\tc\xff"]
    monkeypatch.setattr(generate, "sample", lambda model, prompt, *_: (
        prompts.append(prompt.tolist()), torch.tensor([said]))[1])
    settings = rules.parse("--sample-prompt ab".split())
    generate.continue_prompt(None, Codec(256), settings, grids.NO_GROUPS, torch.device("cpu"))
    assert prompts == [[[256, *b"ab"]]] and capsys.readouterr().out == "ab\ufffd\ufffd\n\tc\ufffd\n"


def test_sampling_is_a_run_of_no_steps(monkeypatch, tmp_path):
    called = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execv", lambda program, arguments: called.append(arguments[1:]))
    generate.main([str(tmp_path), "--tp", "2", "--prompt", "@home"])
    (tmp_path / "config.json").touch()
    generate.main([str(tmp_path), "--prompt", "-"])
    for (file, *flags), wanted, prompt in zip(called, ("--resume", "--init-from"), ("@home", "-")):
        assert file == os.path.join(ROOT, "train.py")  # from whatever folder it is started
        assert flags[:2] == [wanted, str(tmp_path)] and flags[flags.index("--steps") + 1] == "0"
        assert f"--sample-prompt={prompt}" in flags and "--prompt" not in flags
        settings = config.read([word for word in flags if word != str(tmp_path)][1:])
        assert not any(settings[name] for name in ("metrics", "tensorboard", "wandb", "checkpoint_dir"))
    assert called[0][-3:-1] == ["--tp", "2"]
    for wrong in (["--prompt", "a"], ["--tp", "--prompt", "a"], [str(tmp_path), "--tp", "2"],
                  [str(tmp_path), "--tp", "--prompt"], [str(tmp_path), "--prompt", ""]):
        with pytest.raises(SystemExit, match="2"):
            generate.main(wrong)


@pytest.mark.parametrize("flags", ["--recompute full", "--recompute selective --experts 4 --shared-experts 1"])
def test_a_step_leaves_no_cycles(flags):
    """The collector is off while a run goes on: whatever refers to itself would stay."""
    _, groups, model, pipeline, optimizer, share = first_step(f"{SMALL} --dtype fp32 --data {ROOT}/train.py {flags}")
    gc.disable()
    try:
        for _ in range(2):  # the first leaves what building the model has made
            train.forward_backward(model, pipeline, optimizer, share, groups)
            train.update_balance(model, groups, optimizer.step(0.01).isfinite(), 16)
            cycles = gc.collect()
    finally:
        gc.enable()
    assert cycles == 0


def test_the_head_counts_as_layers():
    """Of Llama 3.2 1B's 16 layers, the head has the FLOPs of four: the last of four stages gets three less."""
    stages = costs.stages_of(rules.parse("--preset llama-3.2-1b --pp 4 --seq-len 4096 --dp 1".split(), 4))
    *layers, last = map(len, stages)
    assert sum(layers) + last == 16 and last <= min(layers) - 2


@pytest.mark.parametrize("flags, want", [
    ("--tp 2 --zero 1 --dp-replicate 2 --kv-heads 1", dict(
        muon=[4, 5, 6, 7], data=[1, 3, 5, 7], replicate=[1, 5], dp=[5, 7], tp=[4, 5], kv_copy=[4, 5])),
    ("--tp 2 --cp 2 --kv-heads 1", dict(
        muon=[*range(8)], data=[1, 3, 5, 7], dp=[1, 3, 5, 7], cp=[5, 7], tp=[4, 5], kv_copy=[4, 5])),
    ("--tp 2 --ep 4 --experts 8", dict(ep=[4, 5, 6, 7], edp=[1, 5])),
    ("--pp 2 --cp 2 --ep 2 --experts 8", dict(ep=[4, 5], edp=[5, 7])),
    ("--tp 2 --zero 1 --dp-replicate 2 --ep 2 --experts 8", dict(ep=[4, 5], edp=[5, 7]))])
def test_neighbours_share_layers_then_shards_and_replicas_are_far_apart(flags, want):
    """The ranks of each group of rank 5 of 8; without experts of all groups."""
    settings = rules.parse(flags.split(), 8)
    with dryrun.fake_world(8, 5):
        groups = build_groups(settings.grid, settings.model)
        found = {axis: dist.get_process_group_ranks(group.process_group) for axis, group in groups.items()
                 if group.size > 1}
    assert found.pop("world") == [*range(8)]
    assert (found if "ep" not in want else {axis: found[axis] for axis in want}) == want


@pytest.mark.parametrize("ramp", ["4@0,8@99", "8@0,4@99"])
def test_a_pipeline_is_made_for_the_largest_batch_of_a_ramp(ramp):
    """As many inputs of blocks, for example, as its first rank holds then."""
    settings = rules.parse(f"--pp 2 --schedule afab --micro-batch 1 --batch-ramp {ramp}".split(), 2)
    assert train.own_stages(settings, ALONE).in_flight == 8
