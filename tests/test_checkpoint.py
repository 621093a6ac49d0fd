"""Any grid writes a checkpoint, any grid reads it; a resumed run is the uninterrupted one; what is damaged is named."""
import errno
import gc
import json
import logging
import math
import os
import pickle
import random
import re
import resource
import shutil
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import grids
import numpy as np
import pytest
import runs
import torch
import torch.distributed as dist
import transformers
from runs import metrics, run, tensors
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.distributed.checkpoint.filesystem import _StorageInfo
from watch import in_order

import train
from core import config, rules
from core.collectives import ALONE
from plan import search
from run import checkpoint, cli, data, generate, job
from run.chat import CHATML_MARKERS
from run.data import Corpus
from run.log import Log
from run.meter import Meter
from run.ranks import host_group
from run.tokenizing import codec_of
from test_huggingface import loaded

ROOT = os.path.dirname(train.__file__)
SMALL = f"{grids.TINY} --vocab 97 --global-batch 8 --warmup 2"
ONE = ("--dp auto --dp-replicate 1 --cp 1 --cp-style allgather --tp 1 --sp on --pp 1 --schedule 1f1b "
       "--virtual-stages auto --ep 1 --zero 0")  # the grid of one process: else a resumed run has the checkpoint's
MOE = "--experts 4 --top-k 2 --expert-ffn 24"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> str:
    """A file of tokens in documents that token 0 begins. Beside it is another one, "answers", with a mask."""
    file, rng = tmp_path_factory.mktemp("tokens") / "tokens.npy", np.random.default_rng(0)
    for path in file, file.with_name("answers.npy"):
        np.save(path, rng.integers(0, 97, 5000))
    rng.integers(0, 2, 5000).astype(np.uint8).tofile(file.with_name("answers.mask"))
    return str(file)


# ---- exact resumption -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ranks, flags", [
    (1, "--val-data {tokens} --eval-every 2 --batch-ramp 8@0,16@800 --lr-schedule wsd"),  # 16 from step 5 on
    (2, "{folder}/answers.npy --data-weights 1,2 --dtype bf16 --zero 3 --moments-dtype bf16 --separator 0 "
        "--mask-documents"),
    (2, "--dtype fp16 --pp 2 --micro-batch 2 --tied --z-loss 30"),  # gradients overflow, and the scale is halved
    (4, f"{MOE} --tp 2 --ep 2 --router sigmoid --router-bias-rate 0.01 --zero 1"),
    (1, "--dtype bf16 --fp8 blockwise --hidden 128 --ffn 128 --head-dim 32 --kv-heads 4"),
    (2, "--mtp --pp 2 --micro-batch 2 --val-data {tokens} --eval-every 2"),
], ids=["ramp, wsd, evaluation", "bf16 moments, documents", "fp16", "experts", "fp8", "mtp"])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(pool, tmp_path, tokens, ranks, flags):
    """After four of six steps: in its tensors, in all that run.json says of its progress, and in its metrics."""
    flags = flags.format(tokens=tokens, folder=os.path.dirname(tokens))
    flags = f"{SMALL} --data {tokens} {flags} --steps 6 --save-every 2 --keep-checkpoints 0"
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    pool.run(ranks, runs.run, flags=f"{flags} --checkpoint-dir {straight} --metrics {straight}.jsonl")
    shutil.copytree(straight / "step-000004", resumed / "step-000004")
    shutil.copy(f"{straight}.jsonl", f"{resumed}.jsonl")
    pool.run(ranks, runs.run, flags=f"--resume auto --checkpoint-dir {resumed} --metrics {resumed}.jsonl")
    ends = [folder / "step-000006" for folder in (straight, resumed)]
    want, got = map(tensors, ends)
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)
    want, got = map(cli.read_run, ends)
    assert {*got["files"], "run.json"} == {path.name for path in ends[1].iterdir()}  # of all ranks
    assert want | dict(files=[], settings=[]) == got | dict(files=[], settings=[])
    lines = [metrics(Path(f"{folder}.jsonl")) for folder in (straight, resumed)]
    assert [line["step"] for line in lines[1] if "save_wait_s" in line] == [1, 3, 5]
    assert (lines[0][-1]["skipped"] > 0) == ("fp16" in flags)
    for name in ("step", "tokens", "loss", "mtp_loss", "grad_norm", "lr", "skipped", "val_loss", "aux_loss"):
        assert [line.get(name) for line in lines[0]] == [line.get(name) for line in lines[1]]


# ---- from grid to grid ----------------------------------------------------------------------------------------------

# Each grid takes a step from the checkpoint of the one before. 28 ordered pairs, 10 of them not in the slow tier, where
# there are 100 random ones, too.
CHAINS = {
    "dense": ("", [(1, ""), (4, "--tp 4 --kv-heads 4"), (3, "--zero 3"), (1, "")]),
    "dense, more, too": ("", [(4, "--dp 2 --cp 2 --zero 2"), (2, "--pp 2 --schedule zb-v"), (1, "")]),
    "tied": ("--tied", [(1, ""), (3, "--pp 3"), (4, "--pp 2 --tp 2 --zero 1"), (1, "")]),
    "experts": (f"{MOE} --router-bias-rate 0.01", [(1, ""), (2, "--ep 2"), (4, "--dp 4 --ep 2 --zero 3"), (2, "--pp 2"),
                                            (1, "")]),
    "dense, more": ("", [(1, ""), (2, "--zero 1"), (4, "--zero 1 --dp-replicate 2"), (8, "--tp 8 --sp off"),
                         (4, "--pp 2 --schedule interleaved"), (2, "--tp 2 --sp off"), (2, "--cp 2 --cp-style ulysses"),
                         (8, ""), (6, ""), (8, ""), (1, ""), (2, "--zero 2")]),
    "tied, more": ("--tied", [(2, "--pp 2 --schedule dualpipev"), (3, "--zero 2"), (2, "--cp 2 --cp-style ring")]),
    "experts, more": (f"{MOE} --router-bias-rate 0.01", [(4, "--ep 4 --tp 2 --zero 1"), (4, "--cp 2 --ep 4"),
                                                  (2, "--tp 2 --sp off"), (8, "--pp 2 --tp 2 --ep 4")])}
draw = random.Random(0)
for name in ("dense", "tied", "experts"):
    grids_of_model = [grid for key in CHAINS if key.startswith(name) for grid in CHAINS[key][1]]
    CHAINS[f"{name}, more at random"] = CHAINS[name][0], draw.choices(grids_of_model, k=35)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if "more" in name else ())
                                  for name in CHAINS])
def test_a_checkpoint_of_one_grid_continues_on_another(pool, tmp_path, tokens, name):
    """Master weights, moments, counts and biases after every step are those of one process, to 1e-10 in fp64; and no
    replica is accused of a difference before it is saved."""
    model, chain = CHAINS[name]
    flags = f"{grids.BASE} --layers 4 {model} --data {tokens} --save-every 1 --check-replicas 1 --keep-checkpoints 0"
    straight = f"--micro-batch 24 --steps {len(chain)} --checkpoint-dir {tmp_path / 'straight'}"
    pool.run(1, runs.run, flags=f"{flags} {straight}")
    for step, (ranks, grid) in enumerate(chain, 1):
        dp = rules.parse(f"{flags} {ONE} {grid} --checkpoint-dir {tmp_path}".split(), ranks).grid.dp
        grid = f"{ONE} {grid} --micro-batch {48 // dp // (4 if dp == 1 else 2)}"
        said = pool.run(ranks, runs.run,
                        flags=f"{flags} {grid} --steps {step} --checkpoint-dir {tmp_path / 'chain'} --resume auto")[0]
        assert (f"step-{step - 1:06d} after {step - 1} step" in said) == (step > 1)
        want, got = (tensors(tmp_path / name / f"step-{step:06d}") for name in ("straight", "chain"))
        assert want.keys() == got.keys()
        for name in want:
            error = (want[name] - got[name]).abs().max()
            assert error <= 1e-10 * want[name].abs().max(), f"{name}: {error}, from {chain[step - 2]} to {grid}"


# ---- what a save does -----------------------------------------------------------------------------------------------

def state_of(shape=(4, 3)) -> list[checkpoint.Piece]:
    return [checkpoint.whole("w/master", torch.randn(shape, generator=torch.Generator().manual_seed(0)))]


def saved(folder, steps=(1,), keep: int = 0, resumed: int = 0, pieces: list[checkpoint.Piece] | None = None) -> None:
    """Checkpoints of a small tensor, which grows by 1 per step, or of these pieces."""
    pieces = pieces or state_of()
    saver = checkpoint.Saver(str(folder), pieces, keep, ALONE, resumed)
    for step in steps:
        pieces[0].values.add_(1)
        saver.save(step, dict(step=step))
    saver.finish()
    saver.lock.close()


def test_what_is_saved_is_the_state_at_the_call_and_nothing_is_saved_a_second_time(tmp_path, capfd):
    """A save waits for the one before, which reads the same copies. Nor does a run save the checkpoint that it goes on
    with, if it ends before its first step."""
    pieces = state_of()
    saver, wants = checkpoint.Saver(str(tmp_path), pieces, 0, ALONE), []
    saver.stage.wait = lambda: time.sleep(0.1)  # the thread has not read them when the next update and save come
    for step in (1, 2, 3):
        wants.append(pieces[0].values.add_(1).clone())
        saver.save(step, {})
    pieces[0].values.add_(1)
    saver.save(3, {})
    saver.lock.close()
    saved(tmp_path, (3,), resumed=3, pieces=pieces)
    for step, want in enumerate(wants, 1):
        assert torch.equal(tensors(tmp_path / f"step-{step:06d}")["w/master"], want)
    assert capfd.readouterr().err == "", "a save has failed"


def test_checkpoints_of_later_steps_than_the_one_resumed_are_set_aside(tmp_path, capsys):
    """Else `keep`, which keeps the newest, would count them, and --resume auto go on with them. So is what only has the
    name of one: somebody's folder or file, or a copy that was interrupted. What a killed run left is removed, before
    the disk is found full."""
    saved(tmp_path, (999998, 1000000, 1000002))
    for name in "step-000001", "step-1", "step-000300-good", ".writing-step-000003", ".removing-step-000001":
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis").write_text(name)
    (tmp_path / "step-000300-good" / "run.json").write_text("{}")
    (tmp_path / "step-000002").write_text("step-000002")
    with patch.object(shutil, "disk_usage", lambda _: SimpleNamespace(free=0 if any(tmp_path.glob(".*")) else 99)):
        saved(tmp_path, (1000001,), keep=2, resumed=1000000)
    said = capsys.readouterr().out
    none, later = "is no checkpoint: it has no run.json", "is of a later step than the one resumed"
    for name, why in {"step-000001": none, "step-1": none, "step-000002": none, "step-1000002": later}.items():
        aside, = tmp_path.glob(f"set-aside-{name}-*")
        assert f"{tmp_path}/{name} {why}, so it was renamed {aside.name}\n" in said
        if why == none:
            assert (aside if aside.is_file() else aside / "thesis").read_text() == name
    assert said.count("\n") == 4 and (tmp_path / "latest").read_text() == "step-1000001\n"
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("set-aside-")) == [
        "latest", "lock", "step-000300-good", "step-1000000", "step-1000001"]


def test_a_checkpoint_has_its_name_only_when_it_is_whole_and_on_the_disk(tmp_path):
    """Every file is written and forced to the disk, then its folder; then the folder has its name, and that is forced,
    too; then `latest` follows, and then old checkpoints go."""
    saved(tmp_path)

    def synced(descriptor):
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        return f"sync {Path(os.readlink(f'/proc/self/fd/{number}')).name}"

    def renamed(source, target):
        if Path(target).name == "step-000002":
            checkpoint.verify(source)
        return f"{Path(source).name} -> {Path(target).name[:16]}"

    with in_order((os, "fsync", synced), (Path, "rename", renamed)) as events:
        saved(tmp_path, (2,), keep=1, resumed=1)
    first = events.index("sync .run.json.tmp")
    assert {"sync __0_0.distcp", "sync .metadata.tmp"} <= {*events[:first]} and "sync .writing-step-000002" in events
    assert events[first:] == [
        "sync .run.json.tmp", ".run.json.tmp -> run.json", "sync .writing-step-000002", "sync .writing-step-000002",
        ".writing-step-000002 -> step-000002", f"sync {tmp_path.name}", "sync .latest.tmp", ".latest.tmp -> latest",
        f"sync {tmp_path.name}", "step-000001 -> .removing-step-0"]


GONE, POSITION = OSError(5, "gone\nfor good"), RuntimeError("unexpected pos 704 vs 598")
OF_RANKS = checkpoint.dcp.api.CheckpointException("a write", {3: (GONE, None), 4: (ValueError(), None)})


@pytest.mark.parametrize("failing, says", [
    ({"run.checkpoint.checksums_of": GONE}, "OSError: [Errno 5] gone"),
    ({"run.ranks.gather_objects": lambda mine, group: ["OSError: gone", None]}, "OSError: gone"),
    ({"run.ranks.gather_objects": lambda mine, group: [None, "OSError: gone"]}, "OSError: gone"),
    ({"torch.distributed.checkpoint.save": OF_RANKS}, "OSError: [Errno 5] gone"),
    ({"torch.distributed.checkpoint.save": POSITION}, "RuntimeError: unexpected pos 704 vs 598"),
    ({"torch.distributed.checkpoint.save": POSITION, "tempfile.TemporaryFile": OSError(28, "No space left")},
     "{folder} cannot be written to: No space left")],
    ids=["this rank", "the first of two ranks", "the second", "a rank of many", "position", "full disk"])
def test_a_save_that_failed_is_said_once_and_why_in_one_line(tmp_path, capsys, failing, says):
    """Of a full disk torch reports a position in its file. Nothing of the save stays."""
    saver = checkpoint.Saver(str(tmp_path), state_of(), 0, ALONE)
    with ExitStack() as patches:
        for target, error in failing.items():
            patches.enter_context(patch(target, side_effect=error))
        saver.save(1, {})
        line = f"the checkpoint of step 1 could not be saved: {says.format(folder=tmp_path)}"
        assert (saver.finish(), saver.finish()) == (line, "") and saver.bytes_per_s == 0
    assert capsys.readouterr().err == f"train.py: warning: {line}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_copies_of_gpus_are_queued_before_the_event_that_the_thread_waits_for(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(
        record=lambda: calls.append("event"), synchronize=lambda: calls.append("host waits")))
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, pin_memory: SimpleNamespace(
        copy_=lambda values, non_blocking: calls.append((values.name, non_blocking, pin_memory))))
    stage = checkpoint.Stage([
        checkpoint.Piece(name, (2,), (), SimpleNamespace(name=name, is_cuda=is_cuda, shape=(2,), dtype=None))
        for name, is_cuda in (("offloaded", False), ("weights", True))])
    stage.copy()
    stage.wait()
    assert calls == [("offloaded", True, True), ("weights", True, True), "event", "host waits"]


def share(flags: str, folder: str) -> tuple[int, int, int]:
    """(bytes that this rank writes, bytes of its copies, bytes of all ranks) in a run on this grid."""
    settings = rules.parse(f"{grids.BASE} {flags}".split(), dist.get_world_size())
    groups, model, _, optimizer = grids.build(settings, "fp32")
    pieces = list(checkpoint.pieces_of_run(optimizer, model.routers, groups, saving=True))
    saver = checkpoint.Saver(folder, pieces, 0, host_group(60))
    return (sum(piece.values.nbytes for piece in saver.stage.pieces),
            sum(copy.values.untyped_storage().nbytes() for copy in saver.stage.copies), saver.nbytes)


@pytest.mark.parametrize("ranks, flags", [(4, "--zero 0"), (4, "--zero 1 --dp-replicate 2"),
                                          (4, "--tp 2"), (3, "--zero 3"), (4, f"{MOE} --ep 2"), (2, "--pp 2 --tied")])
def test_ranks_write_equal_shares_and_copy_nothing_else(pool, tmp_path, ranks, flags):
    written, copied, whole = zip(*pool.run(ranks, share, flags=flags, folder=f"{tmp_path}/many"))
    (everything, _, _), = pool.run(1, share, flags=f"{flags} {ONE}", folder=f"{tmp_path}/one")
    assert sum(written) == everything and copied == written and set(whole) == {everything}
    if "--pp" not in flags:  # whose stages have different sizes
        assert max(written) <= 1.1 * everything / ranks  # vectors that tp ranks share are written by the first


def test_loading_needs_no_more_than_two_stored_boxes(tmp_path):
    """DCP keeps one until it has read the next."""
    shapes = dict(a=(64, 64), b=(32, 64), c=(64,), d=(30, 64))
    pieces = [checkpoint.whole(name, torch.randn(shape)) for name, shape in shapes.items()]
    saved(tmp_path, pieces=pieces)
    loaded, meter = [checkpoint.whole(piece.name, torch.zeros_like(piece.values)) for piece in pieces], Meter()
    meter.label("state", *(piece.values for piece in loaded))
    with meter:
        checkpoint.read(tmp_path / "step-000001", loaded)
    assert all(torch.equal(piece.values, there.values) for piece, there in zip(pieces, loaded))
    assert 0 < meter.peak["other"] + meter.peak["outside"] <= 4 * (64 * 64 + 32 * 64)


def test_saves_leave_no_objects(tmp_path, monkeypatch):
    """The collector is off while a run goes on; DCP leaves two classes per tensor and save."""
    state = [checkpoint.whole(f"w{i}", torch.ones(2)) for i in range(8)]
    saver = checkpoint.Saver(str(tmp_path), state, 1, ALONE)
    monkeypatch.setattr(logging.Logger, "isEnabledFor", lambda *_: False)  # pytest keeps all that is logged
    with job.without_garbage_collector():
        counts = []
        for step in range(1, 11):
            saver.save(step, dict(step=step))
            assert saver.finish() == ""
            counts.append(len(gc.get_objects()))
    assert max(counts[5:]) <= counts[4], counts


@pytest.mark.timing
def test_the_plan_of_70b_on_1024_ranks_is_small(tokens):
    """pp 4 x dp 32 x tp 8 at ZeRO level 1, on tensors without memory; data ranks differ in their shards alone. DCP
    raises ValueError if a tensor is not whole."""
    pp, dp, tp = 4, 32, 8
    settings = rules.parse(f"--preset llama-3.1-70b --dtype bf16 --pp {pp} --tp {tp} --zero 1 --global-batch {dp} "
                            f"--seq-len 4096 --data {tokens}".split(), pp * dp * tp)
    plans, seconds = [], []
    for stage, shard in product(range(pp), range(tp)):
        groups = grids.NO_GROUPS | {axis: SimpleNamespace(rank=rank, size=size, process_group=None)
                                    for axis, rank, size in (("pp", stage, pp), ("tp", shard, tp), ("dp", 0, dp))}
        groups["data"] = groups["dp"]
        _, model, _, optimizer = grids.build(settings, "bf16", groups, device="meta", filled=False)
        for data_rank in range(dp):
            for bucket in optimizer.buckets:
                length = bucket.shard.stop - bucket.shard.start
                bucket.shard = slice(data_rank * length, (data_rank + 1) * length)
            began = time.process_time()
            planner = checkpoint.SaveBoxes(list(checkpoint.pieces_of_run(optimizer, model.routers, groups, True)))
            plans.append(planner.create_local_plan())
            seconds.append(time.process_time() - began)
    began = time.process_time()
    new_plans, metadata = planner.create_global_plan(plans)
    assert max(seconds) + time.process_time() - began < 10
    metadata.storage_data = {item.index: _StorageInfo(f"__{i}_0.distcp", 10**6 * k, 10**6)
                             for i, plan in enumerate(new_plans) for k, item in enumerate(plan.items)}
    assert len(pickle.dumps(metadata)) < 64e6


# ---- what is refused ------------------------------------------------------------------------------------------------

HARMS = {  # of a file's bytes, at a random place
    "cut": lambda content, at: content[:at],
    "flip": lambda content, at: content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1:],
    "remove": lambda content, at: None, "empty": lambda content, at: b"", "text": lambda content, at: b"{}\n",
    "grow": lambda content, at: content + bytes([at % 256]),
    "swap": lambda content, at: content[len(content) // 2:] + content[:len(content) // 2],
    "zero": lambda content, at: content[:at] + bytes(len(content[at:at + 64])) + content[at + 64:]}


def test_a_hundred_damaged_checkpoints_are_named_and_the_one_before_is_taken(tmp_path, capsys):
    """Whatever happens to one file: or else its numbers are right."""
    saved(tmp_path, (1, 2))
    newest, oldest = (tmp_path / f"step-{step:06d}" for step in (2, 1))
    want, draw, named = tensors(newest), random.Random(0), 0
    cases = cycle(product(("__0_0.distcp", ".metadata", "run.json"), HARMS))
    for number, (name, harm) in zip(range(100), cases):
        copy = shutil.copytree(newest, tmp_path / f"{number}")
        content = (copy / name).read_bytes()
        (copy / name).unlink()
        if (harmed := HARMS[harm](content, draw.randrange(len(content)))) is not None:
            (copy / name).write_bytes(harmed)
        capsys.readouterr()  # the bar of a slow save
        if job.find_whole([copy, oldest], ALONE) == copy:
            assert all(torch.equal(want[key], value) for key, value in tensors(copy).items()), (name, harm)
            continue
        says = "damaged" if harm != "remove" else "has no run.json" if name == "run.json" else "missing"
        warning, named = capsys.readouterr().err, named + 1
        assert warning.startswith(f"train.py: warning: {copy}") and says in warning and warning.count("\n") == 1
        with pytest.raises(ValueError, match=f"^{copy}.*{says}"):
            job.find_whole([copy], ALONE)
    assert named >= 90


def test_any_number_of_ranks_verifies_each_file_once(tmp_path):
    saved(tmp_path)
    folder = tmp_path / "step-000001"
    for parts in range(1, 6):
        with in_order((checkpoint, "checksum", lambda file: file.name)) as verified:
            for part in range(parts):
                checkpoint.verify(folder, part, parts)
        assert sorted(verified) == sorted({file.name for file in folder.iterdir()} - {"run.json"})


def find_whole(candidates: list[Path]) -> Path:
    return job.find_whole(candidates, host_group(60))


def test_all_ranks_pass_over_a_checkpoint_that_one_finds_damaged(pool, tmp_path):
    """The ranks share the files; one of these two is checked by the second rank."""
    saved(tmp_path, (1, 2, 3))
    newest, middle, oldest = (tmp_path / f"step-{step:06d}" for step in (3, 2, 1))
    for file in newest / ".metadata", middle / "__0_0.distcp":
        file.write_bytes(b"damaged")
    assert pool.run(2, find_whole, candidates=[newest, middle, oldest]) == [oldest] * 2


def test_tensors_of_another_model_or_outside_of_the_folder_are_named(tmp_path):
    saved(tmp_path)
    path = tmp_path / "step-000001"
    with pytest.raises(ValueError, match=r"--dtype fp16\): w/master is 4 x 2 here and 4 x 3 there$"):
        checkpoint.read(path, state_of((4, 2)))
    _, metadata = checkpoint.open_checkpoint(path)
    metadata.state_dict_metadata["w/master"].chunks.clear()
    with pytest.raises(ValueError, match="step-000001 does not have all of w/master"):
        checkpoint.LoadBoxes(state_of(), metadata, path)
    next(iter(metadata.storage_data.values())).relative_path = "../elsewhere"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"/\.metadata cannot be trusted or read: names files outside of its folder$"):
        checkpoint.open_checkpoint(path)


def test_a_folder_that_cannot_be_used_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "latest" / "latest").mkdir(parents=True)
    saved(tmp_path / "used")
    busy = checkpoint.Saver(str(tmp_path / "busy"), state_of(), 0, ALONE)
    with patch.object(checkpoint.time, "sleep", lambda seconds: busy.lock.close()):  # until a killed run is gone
        busy = checkpoint.Saver(str(tmp_path / "busy"), state_of(), 0, ALONE)
    monkeypatch.setattr(checkpoint, "LOCK_WAIT_S", 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=47 if folder.name == "full" else 48))
    for folder, says in (("file/run", "file/run: cannot be written to"),
                         ("full", "full: a checkpoint takes 4.8e-08 GB, and 4.7e-08 GB are free"),
                         ("latest", "/latest/latest: is a folder: move it away"),
                         ("used", "used: has checkpoints of another run, or of this one from its beginning"),
                         ("busy", "another run writes there")):
        with pytest.raises(ValueError, match=says):
            checkpoint.Saver(str(tmp_path / folder), state_of(), 0, ALONE)
    busy.lock.close()


def test_a_file_system_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, capfd):
    """Any other failure of a lock is one of the folder."""
    def fails(number: int):
        def flock(*_) -> None:
            raise OSError(number, os.strerror(number))
        return flock
    for number in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
        monkeypatch.setattr(checkpoint.fcntl, "flock", fails(number))
        folder = tmp_path / str(number)
        saved(folder)
        assert (folder / "step-000001" / "run.json").is_file()
        assert re.fullmatch(rf"train.py: warning: --checkpoint-dir {folder}: this file system has no locks \(.*\), so "
                            r"nothing prevents another run from writing there\n", capfd.readouterr().err)
    monkeypatch.setattr(checkpoint.fcntl, "flock", fails(errno.EIO))
    with pytest.raises(ValueError, match="cannot be written to: Input/output error"):
        saved(tmp_path / "broken")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tokens) -> Path:
    """A run of two steps, on a mixture."""
    folder = tmp_path_factory.mktemp("trained")
    np.save(folder / "other.npy", np.load(tokens)[:500])
    run(f"{SMALL} --data {tokens} {folder}/other.npy --data-weights 3,1 --steps 2 --checkpoint-dir {folder}")
    return folder


@pytest.mark.parametrize("flags, line", [
    ("--norm-eps 1e-6", "--norm-eps 1e-06: the checkpoint's model has 1e-05; give --allow-mismatch to change it"),
    ("--layers 3", "--layers 3: the checkpoint's model has 2; give --allow-mismatch to change it"),
    ("--layers 3 --allow-mismatch", "attention.wq/master is 32 x 32 here and missing there, and 26 more tensors "
                                    "differ"),
    ("--layers 1 --allow-mismatch", " weights, and this model only "),
    ("--init-from model", "has weights, so leave out --init-from; only auto, which may find none, goes with it"),
    ("--seed 1", "the data differs: seed 0 in the checkpoint, 1 now; give --allow-mismatch to "
                 "read what is there now, from sample "),
    ("--seq-len 12", "the data differs: seq 24 in the checkpoint, 12 now; "),
    ("--data other.npy {trained}/other.npy", "the data differs: hash "),
    ("--data-weights=1,1", "sources [[5000, 3], [500, 1]] in the checkpoint, [[5000, 1], [500, 1]] now; give "),
    ("--data-weights=", "the data differs: sources [[5000, 3], [500, 1]] in the checkpoint, [] now; give --"),
    ("--data other.npy --allow-mismatch", " (--data-weights is the checkpoint's: "),
])
def test_a_change_of_model_or_data_is_refused_unless_insisted_on(trained, tokens, tmp_path, monkeypatch, flags, line):
    monkeypatch.chdir(tmp_path)
    values = np.load(tokens)
    values[2500] += 1
    np.save("other.npy", values)
    flags = flags.format(trained=trained)
    with pytest.raises(ValueError) as error:
        run(f"--resume {trained} --checkpoint-dir {tmp_path / 'new'} --steps 3 {flags}")
    assert line in str(error.value) and "\n" not in str(error.value)
    if "--layers" not in flags and "--init-from" not in flags and "--allow-mismatch" not in flags:
        said = run(f"--resume {trained} --checkpoint-dir {tmp_path / 'new'} --steps 3 --allow-mismatch {flags}")
        assert "trained 3 steps" in said and f"resumed {trained}/step-000002 after 2 steps\n" in said


def test_a_run_that_ended_is_continued_with_more_steps_and_says_what_follows(tokens, tmp_path, capsys):
    """With as many steps or fewer nothing is left to do, and nothing is lost. A run saved before its first step has
    all of them left, in the same folder."""
    folder = tmp_path / "run"
    run(f"{SMALL} --data {tokens} --steps 0 --checkpoint-dir {folder} --export-hf {tmp_path}/hf")
    assert "resumed" in (said := run(f"--resume auto --checkpoint-dir {folder} --steps 2 --lr 1e-3 --warmup 0"))
    assert "trained 2 steps" in said and "nothing to train" not in said
    for steps in (1, 2):
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
        said = run(f"--resume auto --checkpoint-dir {folder} --steps {steps}")
        assert f"nothing to train: --steps {steps} counts from the beginning of the run, which has 2\n" in said
        assert before == {path: path.stat().st_mtime_ns for path in before}
    line, rises = f"--resume auto --checkpoint-dir {folder}", "--steps 4: the learning rate rises again, from --min-lr "
    capsys.readouterr()
    for flags, warned in (("--steps 4", True), ("--steps 2", False), ("--steps 0", False),
                          ("--steps 4 --lr-schedule constant --lr 1e-4", False)):
        settings = cli.parse(f"{line} {flags}".split())
        assert (rises in capsys.readouterr().err) == warned, flags
    assert train.learning_rate(2, settings.optim) == 1e-4 == cli.parse(line.split()).optim.min_lr
    assert train.learning_rate(2, cli.parse(f"{line} --steps 4".split()).optim) > 1.1e-4


def test_a_preset_that_contradicts_the_checkpoint_is_refused(trained, tokens):
    """Also the tiny one, whose settings are all defaults. The preset of the run before goes with what flags changed."""
    line = f"--resume {trained} --data {tokens} {trained}/other.npy".split()
    was = cli.read_run(next(trained.glob("step-*")))["model"]
    assert was["preset"] == "tiny" and was["layers"] == 2
    assert cli.parse([*line, "--preset", "tiny"]).model == config.Model(**was)
    with pytest.raises(ValueError, match="^--preset smollm-135m: has --layers 30: the checkpoint's model has 2; give "):
        cli.parse([*line, "--preset", "smollm-135m"])
    found = cli.resumed_run(str(trained), "")
    other = dict(model=was | dict(preset="other"), settings=found["settings"] | dict(preset="other"))
    with patch.object(cli, "resumed_run", lambda *_: found | other):
        with pytest.raises(ValueError, match="^--preset tiny: has --layers 4: the checkpoint's model has 2; give "):
            cli.parse([*line, "--preset", "tiny"])
        assert cli.parse([*line, "--preset", "tiny", "--allow-mismatch"]).model.layers == 4


def test_a_run_is_resumed_with_another_number_of_ranks_without_a_flag(pool, tokens, tmp_path):
    """The data axis fills, a setting that does not fit is said to be the checkpoint's, the published model is kept."""
    pool.run(4, runs.run, flags=f"{SMALL} --data {tokens} --steps 1 --warmup 0 --checkpoint-dir {tmp_path} --dp 2 "
                                  "--tp 2")
    forge(tmp_path / "step-000001" / "run.json", published="weights")
    assert cli.parse(f"--resume auto --checkpoint-dir {tmp_path}".split(), 8).grid.dp == 4
    pool.run(2, runs.run, flags=f"--resume auto --checkpoint-dir {tmp_path} --steps 2 --warmup 0")
    run = cli.read_run(tmp_path / "step-000002")
    assert (run["grid"]["dp"], run["grid"]["tp"], run["published"]) == (1, 2, "weights")
    with pytest.raises(ValueError, match=r"^--tp 2 .* \(--tp is the checkpoint's: give another\)$"):
        cli.parse(f"--resume auto --checkpoint-dir {tmp_path}".split(), 1)
    with pytest.raises(ValueError, match=r"^--tp 4 .* --nproc_per_node\)$"):
        cli.parse(f"--resume auto --checkpoint-dir {tmp_path} --tp 4".split(), 1)
    cli.parse(f"--resume auto --checkpoint-dir {tmp_path} --tp 1".split(), 1)


def test_flags_that_are_given_win_and_the_rest_is_the_checkpoints(trained):
    """But for what belongs to one start of a run."""
    with had(trained, allow_mismatch=True, resume="auto", init_from="a", export_hf="b", profile="c",
             memory_snapshot="d"):
        settings = cli.parse(f"--resume {trained} --lr 0.5".split())
    assert settings.optim.lr == 0.5 and settings.model.hidden == 32 and settings.optim.betas == (0.9, 0.95)
    assert settings.run.resume == settings.run.checkpoint_dir == str(trained) and settings.batch.global_batch == 8
    assert not any((settings.run.allow_mismatch, settings.run.init_from, settings.run.export_hf, settings.run.profile,
                    settings.run.memory_snapshot))
    settings = cli.parse(f"--resume {trained} --preset qwen3-0.6b --hidden 64 --allow-mismatch".split())
    assert (settings.model.preset, settings.model.layers, settings.model.hidden) == ("qwen3-0.6b", 28, 64)
    assert settings.model.qk_norm and settings.batch.global_batch == 8


def forge(file: Path, **values) -> None:
    """Change values of a run.json, or with None remove them. Its checksum stays right."""
    run = cli.read_json(file.parent)
    for name, value in values.items():
        run[name] = run[name] | value if isinstance(value, dict) else value
    run = {name: value for name, value in run.items() if value is not None}
    file.write_text(json.dumps(run | {"checksum": cli.checksum_of_json(run)}))


FORGED = {  # what is said of a run.json -> changes of it, of which each is said so
    "/run.json has no {name}": [(name, None) for name in sorted(cli.CONTENT.keys() - {"files"})],
    "/run.json is damaged or cannot be read": [("files", None)],
    " has format {value}, and this version reads 1": [("format", None), ("format", "1")],
    "/run.json names {setting}, which is outside of its folder": [
        ("files", {name: [0, ""]}) for name in ("../elsewhere", "/etc/passwd", "a/../../elsewhere")],
    "/__0_0.distcp is damaged": [("files", {"__0_0.distcp": "x"}), ("files", {"__0_0.distcp": ["x", "x"]})],
    "/run.json is damaged: its {name} is {value}": [("step", -5), ("tokens", 10**30)],
    "/run.json is damaged: its {name} are no ranges": [("left_out", [[1]])],
    "/run.json is damaged: its {name} is of another kind": [
        ("step", "2"), ("step", 2.5), ("left_out", [[0, "x"]]), ("files", "x"), ("corpus", 7), ("tokenizer", 7),
        ("settings", "x")],
    "/run.json is damaged: its {name} {setting} is of another kind": [
        ("corpus", {"tokens": "x"}), ("settings", {"lr": "fast"}), ("settings", {"betas": [0.9, "x"]}),
        ("settings", {"data": [7]}), ("settings", {"tied": 1}), ("model", {"layers": "x"})],
    "/run.json is of another version: it has a setting that is unknown here, {setting}": [
        ("settings", {"optimizer": "none of ours"}), ("grid", {"sp": "no"}), ("model", {"layers": 10**9}),
        ("model", {"wings": 2})]}


@pytest.mark.parametrize("says", FORGED)
def test_a_run_json_of_another_version_or_kind_is_named_or_passed_over(trained, tmp_path, monkeypatch, capsys, says):
    """Its checksum is right, so another program wrote it, or another version of this one."""
    forged, before = (shutil.copytree(trained / "step-000002", tmp_path / f"step-{step:06d}") for step in (3, 2))
    for name, value in FORGED[says]:
        shutil.copy(before / "run.json", forged)
        forge(forged / "run.json", **{name: value})
        setting = next(iter(value)) if isinstance(value, dict) else ""
        line = str(forged) + says.format(name=name, value=value, setting=setting)
        assert refused(monkeypatch, capsys, "export", forged, "hf").startswith(f"run.checkpoint: {line}")
        if (name, type(value)) != ("files", dict):  # which is found when files are read
            with pytest.raises(ValueError, match=f"^{re.escape(line)}"):
                cli.parse(f"--resume {forged}".split())
            assert cli.resumed_run("auto", str(tmp_path))["step"] == 2


def test_a_checkpoint_whose_settings_have_old_names_is_resumed_with_them(trained, tmp_path):
    """Of every section of run.json that has settings."""
    old = {new: name for name, new in config.RENAMED.items()}
    folder = shutil.copytree(trained / "step-000002", tmp_path / "step-000002")
    run = cli.read_json(folder)
    for section in cli.SECTIONS:
        run[section] = {old.get(name, name): value for name, value in run[section].items()}
    run["settings"] |= {"clip": 0.25, "seq": 9}
    run["model"] |= {"window": 6, "window_every": 2}
    (folder / "run.json").write_text(json.dumps(run | {"checksum": cli.checksum_of_json(run)}))
    now = cli.read_run(folder)
    assert now["settings"]["grad_clip"] == 0.25 and now["settings"]["seq_len"] == 9
    assert now["model"]["full_attention_every"] == 2
    assert not config.RENAMED.keys() & {name for section in cli.SECTIONS for name in now[section]}
    settings = cli.parse(f"--resume {folder} --window 6 --full-attention-every 2".split())
    assert (settings.optim.grad_clip, settings.batch.seq_len) == (0.25, 9)


def test_a_run_goes_on_in_its_folder_from_anywhere_and_a_copy_of_it_in_none(tokens, tmp_path, monkeypatch):
    """Its files were named from where it began; a checkpoint names them from everywhere. --keep-checkpoints removes the
    one that the run was resumed from after two more."""
    monkeypatch.chdir(os.path.dirname(tokens))
    out, link, copy = (tmp_path / name for name in ("out", "link", "copy"))
    run(f"{SMALL} --data tokens.npy --val-data tokens.npy --checkpoint-dir {os.path.relpath(out)} --metrics m --steps "
        "2 --save-every 2")
    monkeypatch.chdir(ROOT)
    link.symlink_to(out)
    for same in out, link, os.path.relpath(out):
        settings = cli.parse(f"--resume {same}".split())
        assert settings.data.data == settings.data.val_data == [tokens] and settings.run.checkpoint_dir == str(out)
        assert settings.run.metrics == os.path.join(os.path.dirname(tokens), "m")
    settings = cli.parse(f"--resume {shutil.copytree(out, copy)} --steps 3".split())
    assert settings.run.checkpoint_dir == settings.run.metrics == "" and settings.run.save_every == 0
    said = run(f"--resume {out}/step-000002 --checkpoint-dir {link} --steps 6 --save-every 1 --sample-prompt 2")
    assert "trained 6 steps" in said and not (out / "step-000002").exists()


def had(trained: Path, **settings):
    """Lets the run in `trained` have had these settings."""
    run = cli.read_run(trained / "step-000002")
    return patch.object(cli, "read_run", lambda path: run | {"settings": run["settings"] | settings})


def test_a_run_on_any_grid_is_sampled_from_on_one_rank(trained, monkeypatch):
    called = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: called.append(arguments[2:]))
    for ranks in "1", "4":
        monkeypatch.setenv("WORLD_SIZE", ranks)
        generate.main([str(trained), "--prompt", "a"])
    with had(trained, dp=2, dp_replicate=2, cp=4, cp_style="ring", cp_zigzag="document", cp_ulysses=2, tp=4, sp="async",
             pp=4, zero=1, ep=4, schedule="interleaved", virtual_stages=2, recompute="full", micro_batch=4,
             global_batch=32, batch_ramp="16@0,32@99", eval_every=3, save_every=2, metrics="m", checkpoint_dir="o",
             val_data=[__file__], moments_dtype="bf16", dtype="bf16", offload="both", rewind=1):
        settings, on_four = cli.parse(called[0]), cli.parse(called[1], 4)
    assert replace(settings.grid, cp_style="allgather") == rules.parse([]).grid
    assert (settings.run.metrics, settings.run.checkpoint_dir, settings.optim.steps) == ("", "", 0)
    assert settings.data.val_data == [] and settings.optim.optimizer == "sgd"
    assert settings.precision.moments_dtype != "bf16"
    assert on_four.grid.dp == on_four.batch.global_batch == 4


def test_grid_auto_keeps_nothing_of_the_grid_of_the_run_that_is_resumed(trained):
    flags = f"--resume {trained} --layers 8 --allow-mismatch --grid auto"
    with had(trained, dp=4, dp_replicate=2, tp=2, pp=2, zero=1, schedule="interleaved", virtual_stages=4,
             recompute="full", micro_batch=2, global_batch=16):
        for ranks, more in (1, ""), (2, "--pp 2 --schedule 1f1b"), (2, "--pp 2 --virtual-stages 2 --schedule "
                                                                       "interleaved"):
            settings, _ = search.fill_grid(cli.parse(f"{flags} {more}".split(), ranks), ranks,
                                           search.this_machine(ranks))
            grid = settings.grid
            assert grid.dp * grid.pp * grid.tp * grid.cp == ranks and grid.pp == ranks
            assert grid.virtual_stages == (2 if "--virtual-stages" in more else 1)
            assert settings.precision.recompute == "none"


def test_a_checkpoint_is_evaluated_without_a_step_and_metrics_are_left_alone(trained, tokens, tmp_path):
    path, before = tmp_path / "m.jsonl", '{"step": 0}\n{"step": 1}\n{"step": 2}\n{"st'
    path.write_text(before)
    said = run(f"--resume {trained} --steps 0 --val-data {tokens} --metrics {path}")
    assert "after 2 steps: validation loss 4." in said and "trained 2" not in said and path.read_text() == before
    assert "no sample: the data are tokens, without a tokenizer.json beside them" in said
    assert f"resumed {trained}/step-000002 after 2 steps\n" in run(f"--resume {trained} --data-weights 6,2")


def log_to(path: Path) -> Log:
    return Log(rules.parse(f"--dtype fp32 --metrics {path}".split()), grids.NO_GROUPS, torch.device("cpu"))


@pytest.mark.parametrize("before, after", [
    ('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"step": 3}\n', '{"step": 0}\n{"step": 1}\n'),
    ('{"step": 1}\n{"step": 2}', '{"step": 1}\n'),
    ('{"step": 0}\n{"step": 1, "lo', '{"step": 0}\n'),
    ('{"step": 0}\n{"step": 1, "comm_gb": {"dp": 0.1}', '{"step": 0}\n'),
    ('{"step": 0}\n{"step": 1, "comm_gb": {"dp": 0.1}}', '{"step": 0}\n{"step": 1, "comm_gb": {"dp": 0.1}}\n'),
    ('notes\n\n{"step": 1}\n{"a": 1}\n7\n{"step": 10}\nmore', 'notes\n\n{"step": 1}\n{"a": 1}\n7\n'),
    ("", ""),
], ids=["later", "later without an end", "torn", "torn after a bracket", "whole", "other lines", "empty"])
def test_metrics_are_cut_once_and_in_place(before, after, tmp_path):
    """The file stays the same one, behind the same link."""
    path, link = tmp_path / "metrics", tmp_path / "link"
    path.write_text(before)
    link.symlink_to(path)
    inode, log = path.stat().st_ino, log_to(link)
    log.append(dict(step=2))
    assert path.read_text() == after + '{"step": 2}\n'
    path.write_text('{"step": 9}\n')
    log.append(dict(step=3))
    assert path.read_text() == '{"step": 9}\n{"step": 3}\n'
    assert link.is_symlink() and path.stat().st_ino == inode and len(list(tmp_path.iterdir())) == 2


def test_metrics_after_a_full_disk_are_whole_lines(tmp_path, capsys):
    log, usual = log_to(tmp_path / "m"), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for step, room in enumerate((99, 20, 20, 99)):  # bytes; a line has 12
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, usual[1]))
            log.append(dict(step=step))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert [record["step"] for record in metrics(tmp_path / "m")] == [0, 3]
    assert capsys.readouterr().err.count("warning: --metrics") == 1


def test_metrics_in_the_file_that_standard_output_goes_to_overwrite_nothing(capfd):
    log = log_to(Path("/dev/stdout"))
    os.write(1, b"first\n")
    for step in range(2):
        log.append(dict(step=step))
    os.write(1, b"last\n")
    assert capfd.readouterr().out == 'first\n{"step": 0}\n{"step": 1}\nlast\n'


def run_where_rank_1_reads_nan(flags: str) -> None:
    def spoiled(path, pieces, *args, original=checkpoint.read, **kwargs):
        original(path, pieces, *args, **kwargs)
        if dist.get_rank() == 1:
            next(piece for piece in pieces if piece.name.endswith("wk/master")).values[-1, -1] = math.nan
    with patch.object(checkpoint, "read", spoiled):
        run(flags)


def test_weights_that_are_not_finite_on_one_rank_are_not_resumed_on_any(pool, trained):
    flags = f"--resume {trained} --steps 3 --checkpoint-dir= --save-every 0 --dp 2"
    with pytest.raises(RuntimeError) as error:
        pool.run(2, run_where_rank_1_reads_nan, flags=flags)
    line = f"ValueError: {trained}/step-000002: layers.0.attention.wk/master has values that are not finite: continue"
    assert str(error.value).count(line) == 2


@pytest.mark.parametrize("call", [(os.mkdir, "ran"), (eval, "open('ran', 'w')"), (exec, "open('ran', 'w')"),
                                  (torch.load, "nowhere")])
def test_a_checkpoint_runs_no_code(tmp_path, monkeypatch, capsys, call):
    """Nor does one whose checksums are right."""
    class Planted:
        def __reduce__(self):
            return call[0], call[1:]

    saved(tmp_path)
    there = tmp_path / "step-000001" / ".metadata"
    monkeypatch.chdir(tmp_path)
    there.write_bytes(pickle.dumps(Planted()))
    forge(there.with_name("run.json"), files={".metadata": [there.stat().st_size, checkpoint.checksum(there)]})
    said = refused(monkeypatch, capsys, "export", there.parent, "hf")
    assert not Path("ran").exists() and f"{there} cannot be trusted or read: names " in said


# ---- exports, published models and tokenizers -----------------------------------------------------------------------

def command(monkeypatch, *words) -> None:
    """python -m run.checkpoint WORDS. Raises SystemExit for an exit code that is not 0."""
    monkeypatch.setattr("sys.argv", ["run.checkpoint", *map(str, words)])
    monkeypatch.setattr(os, "_exit", sys.exit)
    checkpoint.main()


def refused(monkeypatch, capsys, *words) -> str:
    """What the command says, in one line, when it ends with exit code 2."""
    with pytest.raises(SystemExit, match="^2$"):
        command(monkeypatch, *words)
    said = capsys.readouterr().err
    assert said.startswith("run.checkpoint: ") and said.count("\n") == 1
    return said


def test_what_cannot_be_exported_is_refused_in_one_line(trained, monkeypatch, capsys, tmp_path):
    (tmp_path / "config.json").mkdir()
    for words, says in ((("export", tmp_path, "hf"), f"{tmp_path}: is no checkpoint, and no folder that has any"),
                        (("export", tmp_path), "usage: python -m run.checkpoint export "),
                        (("export", trained / "step-000002", tmp_path),
                         f"{tmp_path}/config.json: cannot be written: Is a directory")):
        assert refused(monkeypatch, capsys, *words).startswith(f"run.checkpoint: {says}")


def test_of_a_folder_of_checkpoints_the_newest_undamaged_one_is_exported(trained, monkeypatch, capsys, tmp_path):
    """As --resume and sampling take it."""
    older = shutil.copytree(trained / "step-000002", tmp_path / "runs" / "step-000001")
    newest = shutil.copytree(trained / "step-000002", older.with_name("step-000010"))
    weights = {}
    for name in "whole", "damaged":
        command(monkeypatch, "export", older.parent, tmp_path / name)
        printed = capsys.readouterr()
        assert printed.out == f"exported {older if name == 'damaged' else newest} to {tmp_path / name}\n"
        assert printed.err.count("\n") == printed.err.count(": passed over\n") == (name == "damaged")
        weights[name] = load_file(tmp_path / name / "model.safetensors")
        with open(next(newest.glob("*.distcp")), "r+b") as file:
            file.write(b"\0")
    assert weights["whole"].keys() == weights["damaged"].keys()
    shutil.rmtree(older)
    assert refused(monkeypatch, capsys, "export", newest.parent, tmp_path / "none").endswith(
        ", and were " + printed.err.split(", and were ")[1].replace(": passed over", ""))


def test_an_export_that_fails_is_one_line_and_the_checkpoint_is_exported_later(published, tokens, tmp_path):
    """By a run with no step left, with files of the model that the first began with; without tokenizer.json, too."""
    tokenizer = shutil.copytree(published, tmp_path / "given") / "tokenizer.model"
    tokenizer.with_suffix(".json").rename(tokenizer)
    flags = (f"--init-from {tmp_path}/given --data {tokens} --seq-len 24 --global-batch 2 --steps 1 --checkpoint-dir "
             f"{tmp_path}/out "
             f"--export-hf {tmp_path}/hf")
    with patch("safetensors.torch.save_file", side_effect=OSError(28, "No space left on device")):
        with pytest.raises(RuntimeError, match=f"^--export-hf: {tmp_path}/hf/model.safetensors: cannot be written: "
                                                 r"\[Errno 28\] No space left on device"):
            run(flags)
    assert not list((tmp_path / "hf").iterdir())
    run(f"--resume {tmp_path}/out --export-hf {tmp_path}/hf")
    assert (tmp_path / "hf" / "tokenizer.model").read_bytes() == tokenizer.read_bytes()
    assert (tmp_path / "hf" / "model.safetensors").stat().st_mode == (tmp_path / "hf" / "config.json").stat().st_mode


@pytest.mark.parametrize("dtype, of_run, flags, of_command", [
    ("bf16", torch.bfloat16, ["--dtype", "fp32"], torch.float32), ("fp16", torch.float16, [], torch.bfloat16),
    ("fp64", torch.float32, [], torch.bfloat16)])
def test_weights_are_exported_in_the_dtype_of_the_run_or_fp32_and_by_the_command_line_in_bf16_or_as_asked(
        tokens, tmp_path, monkeypatch, dtype, of_run, flags, of_command):
    path = tmp_path / "run" / "step-000000"
    run(f"{SMALL} --data {tokens} --steps 0 --dtype {dtype} --checkpoint-dir {tmp_path}/run --export-hf "
        f"{tmp_path}/first")
    command(monkeypatch, "export", path, tmp_path / "second", *flags)
    for folder, exported in (tmp_path / "first", of_run), (tmp_path / "second", of_command):
        weights, settings = load_file(folder / "model.safetensors"), transformers.AutoConfig.from_pretrained(folder)
        assert {tensor.dtype for tensor in weights.values()} == {settings.dtype} == {exported}
        assert torch.equal(weights["lm_head.weight"], tensors(path)["head/master"].to(exported))
        assert settings.max_position_embeddings == 24


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A small Llama with a tokenizer, as it could have been downloaded."""
    folder = tmp_path_factory.mktemp("published")
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.train_from_iterator([Path(train.__file__).read_text()],
                                  trainers.BpeTrainer(
                                      vocab_size=400, special_tokens=["<unk>", "<|endoftext|>", *CHATML_MARKERS]))
    tokenizer.save(str(folder / "tokenizer.json"))
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2)).save_pretrained(folder)
    return folder


def test_a_tokenizer_is_that_of_the_weights_then_of_the_run_before_then_of_the_data(published, tmp_path, monkeypatch):
    """Text has no separator that it knows."""
    monkeypatch.chdir(tmp_path)
    for name in "weights", "before", "data":
        Path(name).mkdir()
        Path(name, "tokenizer.json").touch()
    Path("data", "a.txt").write_text("text")
    np.save("data/tokens.npy", np.zeros(9, np.uint16))
    corpus, text = Corpus(["data/tokens.npy"], 97), Corpus(["data/a.txt"], 400)
    for given, found in ((("weights", "before", corpus), "weights"), (("none", "before", corpus), "before"),
                         (("", "none", corpus), "data"), (("", "", corpus), "data"), (("none", "", text), "")):
        assert job.tokenizer_folder(*given) == (found and str(tmp_path / found))
    assert codec_of(text, str(published)).separator is None


@pytest.mark.parametrize("chat", [False, True], ids=["text", "conversations"])
def test_a_downloaded_model_is_tuned_in_two_commands(pool, published, tmp_path, monkeypatch, capsys, chat):
    """The loss falls and is transformers' mean, of conversations over answers' tokens alone, of all samples at once."""
    rng, given, corpus = random.Random(0), tmp_path / ("chat.jsonl" if chat else "text"), tmp_path / "corpus" / "t.bin"
    lines = [dict(prompt=f"import {rng.randrange(99)}?", completion="def {}: return" * rng.randrange(1, 4))
             for _ in range(40)]
    given.write_text("\n".join(json.dumps(line) if chat else "{prompt} {completion}".format(**line) for line in lines))
    words = ["tokenize", "--tokenizer", published / "tokenizer.json", "--out", corpus, given]
    monkeypatch.setattr("sys.argv", ["run.data", *map(str, words)])
    data.main()
    tokens = np.fromfile(corpus, np.uint16, offset=24)
    mask = np.fromfile(corpus.with_suffix(".mask"), np.uint8) if chat else np.ones_like(tokens)
    vocab = transformers.AutoTokenizer.from_pretrained(published).vocab_size
    assert capsys.readouterr().out == f"{corpus}: {len(tokens):,} tokens" + (
        f", of which {mask.sum():,} are targets" if chat else "") + f"; train on them with --vocab {vocab}, or more\n"
    spans, tuned = (len(tokens) - 1) // 32, tmp_path / "tuned"
    said = pool.run(2, runs.run, flags=f"--init-from {published} --data {corpus} --seq-len 32 --global-batch "
                                         f"{2 * spans} "
                    f"--steps 6 --warmup 0 --lr 0.01 --zero 1 --checkpoint-dir {tmp_path}/run --export-hf {tuned} "
                    f"--sample-prompt def --metrics {tmp_path}/metrics")[0]
    at = np.arange(spans)[:, None] * 32 + np.arange(33)
    assert f"\nexported {tmp_path}/run/step-000006 to {tuned}\n" in said
    batch, learned = (torch.from_numpy(array.astype(np.int64)[at]) for array in (tokens, mask))
    labels = batch.where(learned == 1, -100)
    before, after = (transformers.AutoModelForCausalLM.from_pretrained(folder)(batch, labels=labels).loss.item()
                     for folder in (published, tuned))
    assert metrics(tmp_path / "metrics")[0]["loss"] == pytest.approx(before, rel=1e-5) and after < before - 1
    assert (tuned / "tokenizer.json").exists() and re.search("^ ?def", said, re.M)  # the sample


def test_a_harness_that_evaluates_an_export_gets_the_log_likelihoods_of_our_model(published, tmp_path):
    """With what lm-eval loads and asks for: after a context, or after the token that begins a text, a continuation.
    The tokenizer came without the files in which transformers looks for that token. Generation ends with it."""
    (tmp_path / "given").mkdir()
    shutil.copy(published / "tokenizer.json", tmp_path / "given")
    (tmp_path / "text").write_text(Path(data.__file__).read_text())
    data.tokenize([str(tmp_path / "text")], str(tmp_path / "given/tokenizer.json"), str(tmp_path / "corpus/a.bin"))
    run(f"{SMALL} --vocab 400 --data {tmp_path}/corpus/a.bin --steps 2 --checkpoint-dir {tmp_path}/run --export-hf "
        f"{tmp_path}/hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours, codec = loaded(str(tmp_path / "hf")), codec_of(Corpus([f"{tmp_path}/corpus/a.bin"], 400), tmp_path / "corpus")
    separator = Tokenizer.from_file(str(published / "tokenizer.json")).token_to_id("<|endoftext|>")
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == separator
    assert theirs.config.bos_token_id == theirs.generation_config.eos_token_id == separator
    for context, continuation in ("import torch", " as nothing"), ("def f(", "x): return"), ("", "class A: pass"):
        begun = codec.encode(context) if context else [separator]
        whole = codec.encode(context + continuation) if context else begun + codec.encode(continuation)
        asked = tokenizer(context + continuation, add_special_tokens=False).input_ids
        assert whole == ([] if context else [tokenizer.bos_token_id]) + asked
        inputs, targets = torch.tensor([whole[:-1]]), torch.tensor(whole[1:])
        with torch.no_grad():
            want, got = (model_logits[0].log_softmax(-1)[range(len(targets)), targets][len(begun) - 1:]
                         for model_logits in (ours(inputs), theirs(inputs).logits))
        assert len(got) == len(whole) - len(begun) > 1
        assert got.sum().item() == pytest.approx(want.sum().item(), rel=1e-5)
