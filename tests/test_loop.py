"""The loop of train.py: what it reads, at which rate it steps, and what its metrics say, after every step."""
import threading
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import grids
import numpy as np
import pytest
import reference
import runs
import sharding
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import slow
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from watch import Watch, in_order, reads_values

import cp
import train
from bench import __main__ as bench
from core import config, rules
from plan import costs
from run import checkpoint, faults, job, log
from run.data import Samples, open_samples
from run.log import Log
from run.meter import Meter
from zero import Optimizer

MODEL = f"{grids.TINY} --vocab 61 --seq-len 12 --sample-prompt= --separator 0 --device cpu"
RAMP = "4@0,8@96,12@250"  # 96: what two steps of 4 have seen


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Tokens to train on and tokens to evaluate on, of documents of about seven tokens."""
    folder = tmp_path_factory.mktemp("corpora")
    for name, seed, count in ("train", 0, 2000), ("unseen", 1, 12 * 10 + 1):
        tokens = np.random.default_rng(seed).integers(61, size=count)
        np.save(folder / f"{name}.npy", np.where(tokens < 8, 0, tokens).astype(np.uint16))
    return folder


def run(folder, flags: str) -> tuple[list[dict], list[tuple]]:
    """(the metrics of every step, (seed, sample numbers) of every micro-batch that was read)"""
    (folder / "metrics").unlink(missing_ok=True)
    with in_order((Samples, "micro_batch", lambda samples, numbers: (samples.seed, numbers))) as read:
        runs.run(f"{MODEL} --data {folder}/train.npy --metrics {folder}/metrics {flags}")
    return runs.metrics(folder / "metrics"), read


def loss_of(w: dict, spans: list[int], corpus: np.ndarray, settings: config.Config, z_loss=0.0) -> torch.Tensor:
    """The mean loss over samples that are these spans of the corpus, every document on its own."""
    S = settings.batch.seq_len
    windows = torch.from_numpy(np.stack([corpus[span * S:span * S + S + 1] for span in spans]).astype(np.int64))
    tokens, labels = windows[:, :-1], windows[:, 1:]
    rows = reference.logits(w, tokens, settings.model, {}, [], tokens == 0)
    return F.cross_entropy(rows.flatten(0, 1), labels.flatten()) + z_loss * rows.logsumexp(-1).square().mean()


def by_torch(folder, settings: config.Config) -> list[dict]:
    """The same run out of the reference's model, torch's AdamW, clipping and schedulers, and a list of samples."""
    optim = settings.optim
    w = {name: value.clone().requires_grad_() for name, value in grids.initial(settings).items()}
    rule = reference.make_optimizer(w, optim)
    rate = SequentialLR(rule, [LinearLR(rule, 1 / optim.warmup, total_iters=optim.warmup - 1),
                               CosineAnnealingLR(rule, optim.steps - optim.warmup, optim.min_lr)], [optim.warmup - 1])
    corpus, unseen = (np.load(folder / f"{name}.npy") for name in ("train", "unseen"))
    samples = open_samples(settings, settings.data.data, optim.seed)
    first, out = 0, []
    for step in range(optim.steps):
        seen = first * settings.batch.seq_len
        sequences = 4 if seen < 96 else 8 if seen < 250 else 12
        rule.zero_grad()
        spans = [samples.start(number) // settings.batch.seq_len for number in range(first, first + sequences)]
        loss = loss_of(w, spans, corpus, settings, optim.z_loss)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(w.values()), optim.grad_clip)
        record = dict(loss=loss.item(), grad_norm=norm.item(), lr=rate.get_last_lr()[0])
        rule.step()
        rate.step()
        first += sequences
        if step in (3, 7, 8):
            record["val_loss"] = loss_of(w, list(range(8)), unseen, settings).item()
        out.append(record | dict(step=step, tokens=first * settings.batch.seq_len, skipped=0))
    return out


FLAGS = ("--dtype fp64 --steps 9 --batch-ramp {} --micro-batch 2 --lr 0.02 --min-lr 0.003 --warmup 3 --grad-clip 0.5 "
         "--weight-decay 0.2 --betas 0.8,0.9 --seed 5 --mask-documents --z-loss 0.01 "
         "--val-data {}/unseen.npy --eval-every 4 --eval-steps 2")


def test_a_run_is_what_torchs_own_parts_make_of_the_same_samples(corpora):
    """With a batch ramp, accumulation, documents, a z-loss, warmup, clipping, and evaluations without the z-loss."""
    flags = FLAGS.format(RAMP, corpora)
    records, read = run(corpora, flags)
    want = by_torch(corpora, rules.parse(f"{MODEL} --data {corpora}/train.npy {flags}".split()))
    for record, true in zip(records, want, strict=True):
        assert {name: record[name] for name in true} == pytest.approx(true, rel=1e-10)
        assert ("val_loss" in record) == ("val_loss" in true)
    assert want[0]["grad_norm"] > 0.5, "clipping is active"
    trained = [numbers for seed, numbers in read if seed == 5]
    assert trained == [[i, i + 1] for i in range(0, want[-1]["tokens"] // 12, 2)], "each sample once, in order"
    assert [numbers for seed, numbers in read if seed is None] == 3 * [[i, i + 1] for i in range(0, 8, 2)]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_losses_of_micro_batches_in_16_bits_are_summed_in_fp32(corpora, dtype):
    flags = f"{MODEL} --data {corpora}/train.npy --dtype {dtype} --global-batch 40 --micro-batch 1"
    _, groups, model, pipeline, optimizer, share = runs.first_step(flags)
    with torch.no_grad():
        losses = [model(batch.tokens, labels=batch.labels).item() for batch in share]
    loss = train.forward_backward(model, pipeline, optimizer, share, groups)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(sum(losses) / (40 * 12), rel=1e-6)


# What is between two steps, one thing at a time, since the first that waits for the weights waits for all of them.
BETWEEN = {"check": "--check-replicas 1", "evaluate": "--val-data {}/text --eval-every 1 --eval-steps 1",
           "save": "--save-every 1 --checkpoint-dir {}/saved", "sample": "--sample-prompt abc"}


def run_late(flags: str, late: bool) -> str:
    with sharding.late_collectives() if late else nullcontext():
        return runs.run(flags)


@pytest.mark.parametrize("level, dtype", [(1, "fp32"), (2, "bf16")])
def test_between_steps_weights_are_whole_before_they_are_read(pool, tmp_path, level, dtype):
    """Levels 1 and 2 of ZeRO gather the updated weights while something else may begin. That must find what it finds
    if nothing is under way, and so must the losses and the gradients' noise in the metrics."""
    (tmp_path / "text").write_text("all the world's a stage, " * 40)
    flags = (f"{grids.TINY} --layers 1 --data {tmp_path}/text --steps 2 --global-batch 4 --lr 0.01 --warmup 1 "
             f"--zero {level} --dtype {dtype} --sample-prompt=")
    cases = {name: more.format(tmp_path) for name, more in BETWEEN.items()}
    cases["all"] = " ".join(cases.values()).replace("saved", "all")
    printed = grids.for_each(pool, 2, run_late, [
        dict(flags=f"{flags} {more} --metrics {tmp_path}/{name}.jsonl", late=name != "all")
        for name, more in cases.items()])
    texts = {name: said.partition("\nabc")[2][:12] for name, (said, _) in zip(cases, printed, strict=True)}
    records = {name: runs.metrics(tmp_path / f"{name}.jsonl") for name in cases}
    for name in BETWEEN:
        for found, want in zip(records[name], records["all"], strict=True):
            same = [key for key in ("loss", "grad_norm", "noise_trace", "val_loss") if key in found]
            assert {key: found[key] for key in same} == {key: want[key] for key in same} and len(same) >= 3
    assert "val_loss" in records["evaluate"][0] and "check_replicas_s" in records["check"][0]
    assert texts["sample"] == texts["all"] != ""
    saved, want = (runs.tensors(tmp_path / folder / "step-000002") for folder in ("saved", "all"))
    assert saved.keys() == want.keys() and all(torch.equal(saved[name], want[name]) for name in want)


@pytest.fixture(scope="module")
def sources(corpora):
    """Three files: of the first some stretches are targets, the third has no mask, and the only target of the second is
    behind its last whole sample."""
    rng = np.random.default_rng(3)
    some, none = np.repeat([0, 1, 0.05], 333), np.arange(400) == 399
    for name, count, mask in ("some", 999, some), ("none", 400, none), ("all", 200, None):
        np.save(corpora / f"{name}.npy", rng.integers(61, size=count).astype(np.uint16))
        if mask is not None:
            (rng.random(count) < mask).astype(np.uint8).tofile(corpora / f"{name}.mask")
    return corpora


MIXED = ("--data {0}/some.npy {0}/none.npy {0}/all.npy --data-weights 2,1,1 --val-data {0}/some.npy --dtype fp64 "
         "--global-batch 24 --steps 4 --warmup 1 --lr 0.02 --grad-clip 0.5 --eval-every 2 --metrics {0}/mixed")


def test_targets_that_ranks_and_micro_batches_have_in_very_different_numbers_make_one_mean(pool, sources):
    """Four grids are one process, which is torch's mean over the targets of the global batch."""
    flags = f"{MODEL} {MIXED.format(sources)}"
    settings = rules.parse(flags.split())
    runs.run(flags)
    want = [{name: record[name] for name in ("loss", "grad_norm", "val_loss") if name in record}
            for record in runs.metrics(sources / "mixed")]
    samples = open_samples(settings, settings.data.data, 0)
    share = [[(batch.labels >= 0).sum().item() for batch in samples.step(0, 24, 1, rank, 4)] for rank in range(4)]
    assert min(map(sum, share)) == 0 and max(map(sum, share)) == 6 * 12  # of four ranks, each has one source

    stream = [np.load(sources / f"{name}.npy").astype(np.int64) for name in ("some", "none", "all")]
    masks = [np.fromfile(sources / "some.mask", np.uint8), np.zeros(400, np.uint8), np.ones(200, np.uint8)]
    at = [samples.start(number) + np.arange(13) for number in range(24)]
    windows, targets = (torch.from_numpy(np.concatenate(parts)[np.stack(at)]) for parts in (stream, masks))
    inside, has_loss = windows[:, :-1], targets[:, 1:] == 1
    rows = reference.logits(grids.initial(settings), inside, settings.model, {}, [], torch.zeros_like(inside).bool())
    loss = F.cross_entropy(rows[has_loss], windows[:, 1:][has_loss])
    assert want[0]["loss"] == pytest.approx(loss.item(), rel=1e-10)

    for grid in ("--dp 4 --micro-batch 1", "--dp 2 --pp 2 --micro-batch 2 --zero 1", "--dp 2 --cp 2 --micro-batch 3",
                 "--dp 4 --zero 3 --micro-batch 6"):
        (sources / "mixed").unlink()
        pool.run(4, runs.run, flags=f"{flags} {grid}")
        for record, true in zip(runs.metrics(sources / "mixed"), want, strict=True):
            assert {name: record[name] for name in true} == pytest.approx(true, rel=1e-10), grid


def test_a_step_without_any_target_has_no_loss(sources):
    runs.run(f"{MODEL} --steps 12 --warmup 0 --global-batch 1 --metrics {sources}/m --data {sources}/some.npy")
    found = [(record["loss"], record["grad_norm"]) for record in runs.metrics(sources / "m")]
    assert (None, 0) in found and all(loss > 0 and norm > 0 for loss, norm in found if loss is not None)
    assert any(loss for loss, _ in found)


def test_a_step_is_read_after_the_next_has_been_issued(corpora, monkeypatch):
    """On a GPU, here feigned; but where an evaluation or the end waits for it, at once. The metrics are the same."""
    flags = FLAGS.format(RAMP, corpora)
    want, _ = run(corpora, flags)
    monkeypatch.setattr(job, "reads_late", lambda device: True)
    with in_order((job.Run, "end_step", lambda run, *_: ("end_step", run.step.number)),
                  (job, "read_results", lambda run, step: ("read_results", step.number)),
                  (job, "validation_loss", lambda run, *_: ("validation_loss", run.state.step - 1))) as seen:
        found, _ = run(corpora, flags)
    order = [(what, step) for step in range(9) for what, step, there in (
        ("end_step", step, True), ("read_results", step - 1, step not in (0, 4, 8)),
        ("read_results", step, step in (3, 7, 8)), ("validation_loss", step, step in (3, 7, 8))) if there]
    assert seen == order
    measured = {"step_s", "tokens_per_s", "tokens_per_s_per_gpu", "memory_gb", "busy_s"}
    for record, true in zip(found, want, strict=True):
        assert {name for name in record.keys() | true.keys() if record.get(name) != true.get(name)} <= measured


READS = "item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "unique"


def waits(flags: str) -> list[int]:
    """How often a rank waits for a GPU from the beginning of each step to that of the next: for the values of a tensor,
    or for those that the size of a result depends on."""
    def see(function, args, kwargs, out):
        is_method = function == torch.ops.aten._local_scalar_dense.default  # one of READS
        if not is_method and "output_size" not in kwargs and reads_values(function, args):
            events.append("wait")

    def of_host(*args, usual=cp.visible_blocks):
        before = len(events)
        blocks = usual(*args)
        del events[before:]  # of documents that have never left the host
        return blocks

    calls = (job, "read", "step"), *((torch.Tensor, name, "wait") for name in READS)
    with (in_order(*calls) as events, patch.object(job, "reads_late", lambda device: True),
          patch.object(cp, "visible_blocks", of_host), Watch(see)):
        runs.run(f"{MODEL} --data {config.__file__} --vocab 257 --separator auto --dtype bf16 --steps 6 "
                 f"--metrics /dev/null --global-batch 8 {flags}")
    return [step.count("wait") for step in " ".join(events).split("step")[2:-1]]  # but for the first and the last


MIXTURE = "--experts 4 --top-k 2 --expert-ffn 16 --router-bias-rate 0.01"


@pytest.mark.parametrize("ranks, flags, count", [
    (1, "--micro-batch 2", 1), (2, "--dp 2 --zero 2", 1), (2, "--cp 2 --mask-documents", 1),
    (1, f"--micro-batch 4 {MIXTURE}", 1 + 2 * 2), (2, f"--dp 2 --ep 2 --micro-batch 4 {MIXTURE}", 1 + 2),
    *slow((4, "--pp 2 --tp 2 --schedule zb-h1", 1))])
def test_a_step_waits_for_the_device_once(pool, ranks, flags, count):
    """To read the results of the step before; and once per layer of experts and micro-batch."""
    assert pool.run(ranks, waits, flags=flags) == ranks * [4 * [count]]


def test_a_step_that_is_skipped_leaves_weights_and_biases(corpora):
    """Its gradient is not finite. It counts as no update, and is read."""
    jobs, flags = [], "--experts 4 --expert-ffn 8 --router-bias-rate 0.1 --dtype fp32 --steps 1 --global-batch 4"
    with (patch.object(Optimizer, "scale_loss", lambda self, loss: torch.nan * loss),
          patch.object(job, "finish", jobs.append)):
        records, _ = run(corpora, flags)
    (done,), settings = jobs, rules.parse(f"{MODEL} --data {corpora}/train.npy {flags}".split())
    first = grids.initial(settings)
    assert all(torch.equal(p.double(), first[p.spec.name]) for p in done.model.parameters())
    assert not any(router.bias.any() for router in done.model.routers) and done.optimizer.steps == 0
    assert (done.state.step, done.state.samples, done.state.skipped) == (1, 4, 1)
    assert records[0]["grad_norm"] is None and records[0]["load_max_over_mean"] > 1


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_flops_in_the_metrics_are_those_that_are_dispatched(recompute):
    """HFU with what is recomputed, MFU without; a rank of two has half of the peak's share."""
    flags = f"{MODEL} --data {__file__} --vocab 257 --separator auto --dtype fp32 --attention math --global-batch 4"
    settings, groups, model, pipeline, optimizer, share = runs.first_step(f"{flags} --recompute {recompute}")
    with Meter(memory=False) as meter:
        train.forward_backward(model, pipeline, optimizer, share, groups)
    log = Log(settings, groups, torch.device("cpu"))
    log.peak, log.ranks = 1e9, 2
    step = job.Step(0, range(4), 0, [], sent=Counter())
    record = log.metrics(step, skipped=0, loss=1.0, norm=1.0, seconds=0.5)
    norms = 5 * 32  # weights that the convention of 6 FLOPs per parameter and token counts, too
    assert record["hfu"] * 0.5 * 2 * 1e9 == pytest.approx(meter.flops + 6 * norms * 4 * 12)
    assert (record["mfu"] == record["hfu"]) == (recompute == "none")
    scores = 3 * 2 * 2 * 2 * 4 * 4 * 8 * 12 * 12  # FLOPs of QK^T and PV, forward and twice backward, in 2 layers
    assert (record["mfu"] - record["mfu_causal"]) * 0.5 * 2 * 1e9 == pytest.approx(scores / 2)
    assert record["tokens_per_s_per_gpu"] == 4 * 12 / 0.5 / 2


@pytest.mark.parametrize("name, dtype, known", [
    ("NVIDIA H200", "bf16", True), ("NVIDIA A10G", "bf16", False), ("NVIDIA A10G", "fp32", None)])
def test_a_gpu_whose_peak_is_not_known_is_named_and_has_no_utilisation(monkeypatch, capsys, name, dtype, known):
    """In fp32 no GPU has one: the table is of 16 bits."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    settings, groups, model, *_ = runs.first_step(f"{MODEL} --data {__file__} --vocab 257 --separator auto --dtype fp32"
                                                  " --global-batch 4")
    settings.precision.dtype = dtype
    of_gpu = Log(settings, groups, torch.device("cuda"))
    with patch.object(log, "count_parameters", lambda *given: costs.parameters(settings.model).total):
        of_gpu.start(name, model, None)
    record = of_gpu.metrics(job.Step(0, range(4), 0, [], sent=Counter()), skipped=0, loss=1.0, norm=1.0, seconds=0.5)
    assert [record[each] is None for each in ("mfu", "mfu_causal", "hfu")] == 3 * [not known]
    said = [line for line in capsys.readouterr().err.splitlines() if "mfu" in line]
    assert said == ([f"train.py: {name}: its peak is not known here, so mfu, mfu_causal and hfu are null"]
                    if known is False else [])


# ---- every number in the metrics against one that is counted otherwise ----------------------------------------------

METRICS = {  # busy_s: test_faults.py; noise: test_noise.py; of experts: test_rivals.py
    "step", "tokens", "loss", "grad_norm", "lr", "skipped", "val_loss", "mfu", "mfu_causal", "hfu", "step_s",
    "tokens_per_s", "tokens_per_s_per_gpu", "check_replicas_s", "save_wait_s", "save_gb_per_s", "memory_gb", "comm_gb",
    "noise_trace", "noise_gradient2", "aux_loss", "load_max_over_mean", "busy_s"}


def test_the_balancing_loss_in_the_metrics_is_a_mean_over_the_sequences_of_a_step(corpora):
    """Of weights that stay as they are two steps have the mean that one of all their sequences has; what a layer
    computes again does not count."""
    flags = "--dtype fp64 --experts 4 --top-k 2 --micro-batch 2 --steps 3 --lr 1e-30"
    small, large = ([record["aux_loss"] for record in run(corpora, f"{flags} {batch}")[0]]
                    for batch in ("--batch-ramp 4@0,8@96", "--global-batch 8 --recompute full"))
    assert [sum(small[:2]) / 2, small[2]] == pytest.approx(large[:2], rel=1e-12)


def test_times_in_the_metrics_are_those_of_a_clock(corpora, tmp_path):
    """A clock that stands still but for what is listed; the thread that saves has its own."""
    clock = threading.local()

    def takes(seconds: float, event: str | None = None):
        def pass_time(*_, **__):
            clock.now = getattr(clock, "now", 0.0) + seconds
            return event
        return pass_time

    with (patch("time.perf_counter", lambda: getattr(clock, "now", 0.0)),
          in_order((train, "forward_backward", takes(2)), (train, "local_micro_batches", takes(0.25)),
                   (job, "mean_loss", takes(7)), (checkpoint.Stage, "copy", takes(3)),
                   (checkpoint, "checksums_of", takes(5)), (faults, "hash_of", takes(0.125, "hash"))) as hashes):
        records, _ = run(corpora, f"--dtype fp32 --steps 4 --global-batch 4 --checkpoint-dir {tmp_path} --save-every 2 "
                                     f"--check-replicas 4 --val-data {corpora}/unseen.npy --eval-every 1")
    assert [record["step_s"] for record in records] == 4 * [2.25]
    assert [record["tokens_per_s"] for record in records] == [48 / record["step_s"] for record in records]
    assert [record.get("save_wait_s") for record in records] == [None, 3, None, 3]
    state = 3 * 4 * costs.parameters(rules.parse(MODEL.split()).model).total
    assert records[1]["save_gb_per_s"] == 0  # no save has ended
    assert records[3]["save_gb_per_s"] == pytest.approx(state / 5 / 1e9, rel=1e-3)
    assert [record.get("check_replicas_s") for record in records] == 2 * [None, len(hashes) / 2 * 0.125]


def test_memory_in_the_metrics_is_the_kernels_peak():
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    assert log.peak_memory(torch.device("cpu")) == pytest.approx(int(peak.split()[1]) * 1024, rel=0.05)


def communicated(folder: str, flags: str) -> list[tuple[dict, dict]]:
    """For every step of a run on these ranks, what its metrics say this rank has sent, in bytes by group, and what its
    collectives have sent between the beginning of the step and its metrics."""
    meter, sent, steps = Meter(memory=False), [], []  # sent: by a group, or by a link of a pipeline
    measure = Log.metrics

    def exchanged(out, x, output_splits, input_splits, group, **rest):
        sent.append((group.group_name, x.nbytes - x[:input_splits[group.rank()]].nbytes))

    def counted_metrics(log, *args, **numbers):
        metrics, sums, bytes_of = measure(log, *args, **numbers), Counter(), Counter()
        names = {axis: group.process_group.group_name for axis, group in log.groups.items() if group.size > 1}
        pipeline = {link.group_name: names["pp"] for link in log.groups["pp"].links.values()}
        sent.extend((call.group, bench.bytes_sent(call)) for call in meter.collectives if call.name != "alltoall_base_")
        for group, count in sent:
            bytes_of[pipeline.get(group, group)] += count
        for axis, name in names.items():  # axes may share a group
            sums[name] += round(metrics["comm_gb"][axis] * 1e9)
        steps.append((sums, bytes_of))
        return metrics

    def restart(*_):
        meter.collectives.clear()
        sent.clear()

    (Path(folder) / "metrics").unlink(missing_ok=True)
    with (in_order((dist, "all_to_all_single", exchanged), (Log, "write", restart), (Log, "begin", restart)),
          patch.object(Log, "metrics", counted_metrics), meter):
        runs.run(f"{MODEL} --data {folder}/train.npy --metrics {folder}/metrics {flags}")
    return steps


def test_bytes_in_the_metrics_are_those_of_the_step_by_axis(pool, corpora, tmp_path):
    """Of this step, not of all so far, nor of evaluations, saving and comparisons between steps."""
    common = "--dtype fp64 --steps 3 --global-batch 8"
    everything = (f"{common} --pp 2 --ep 2 --zero 1 --micro-batch 2 --experts 4 --expert-ffn 8 --checkpoint-dir "
                  f"{tmp_path} "
                  f"--save-every 1 --check-replicas 1 --val-data {corpora}/unseen.npy --eval-every 1")
    for flags in everything, f"{common} --cp 2 --cp-style ring --tp 2 --micro-batch 4":
        for sent, counted in sum(pool.run(4, communicated, folder=str(corpora), flags=flags), []):
            assert sum(sent.values()) > 0 and sent == {group: counted[group] for group in sent}
        if flags == everything:
            keys = {key for record in runs.metrics(corpora / "metrics") for key in record}
            assert keys == METRICS
    page = Path(train.__file__).with_name("docs").joinpath("RUNNING.md").read_text()
    assert all(name in page for name in METRICS)
