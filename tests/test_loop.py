"""The loop of train.py: what it reads, at which rate it steps, and what its metrics say, after every step."""
import contextlib
import io
import json
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import assemble
import config
import grids
import job
import reference
import train
from data import Samples
from log import Log
from meter import Meter

MODEL = ("--layers 2 --hidden 24 --heads 4 --kv-heads 2 --head-dim 6 --ffn 32 --vocab 61 --seq 12 --sample= "
         "--separator 0 --device cpu")
RAMP = "4@0,8@90,12@250"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Tokens to train on and tokens to evaluate on, of documents of about seven tokens."""
    folder = tmp_path_factory.mktemp("corpora")
    for name, seed, count in ("train", 0, 2000), ("unseen", 1, 12 * 10 + 1):
        tokens = np.random.default_rng(seed).integers(61, size=count)
        np.save(folder / f"{name}.npy", np.where(tokens < 8, 0, tokens).astype(np.uint16))
    return folder


def run(folder, flags: str) -> tuple[list[dict], list[tuple], str]:
    """(the metrics of every step, (seed, sample numbers) of every micro-batch that was read, what was printed)"""
    read, usual = [], Samples.micro_batch

    def micro_batch(samples, numbers):
        read.append((samples.seed, numbers))
        return usual(samples, numbers)

    file = folder / "metrics"
    settings = config.parse(f"{MODEL} --data {folder}/train.npy --metrics {file} {flags}".split())
    training = assemble.open_samples(settings, settings.data.data, settings.optim.seed)
    unseen = assemble.open_samples(settings, settings.data.val_data, None) if settings.data.val_data else None
    with patch.object(Samples, "micro_batch", micro_batch), contextlib.redirect_stdout(io.StringIO()) as printed:
        train.train(settings, training, unseen, torch.device("cpu"), "as asked", job.RunState())
    return [json.loads(line) for line in file.read_text().splitlines()], read, printed.getvalue()


def loss_of(w: dict, spans: list[int], corpus: np.ndarray, settings: config.Config) -> torch.Tensor:
    """The mean loss over samples that are these spans of the corpus, every document on its own."""
    S = settings.batch.seq
    windows = torch.from_numpy(np.stack([corpus[span * S:span * S + S + 1] for span in spans]).astype(np.int64))
    tokens, labels = windows[:, :-1], windows[:, 1:]
    rows = reference.logits(w, tokens, settings.model, {}, [], tokens == 0)
    return F.cross_entropy(rows.flatten(0, 1), labels.flatten())


def by_torch(folder, settings: config.Config) -> list[dict]:
    """The same run out of the reference's model, torch's AdamW, clipping and schedulers, and a list of samples."""
    optim = settings.optim
    w = {name: value.clone().requires_grad_() for name, value in grids.initial(settings).items()}
    rule = reference.rule_of(w, optim)
    rate = SequentialLR(rule, [LinearLR(rule, 1 / optim.warmup, total_iters=optim.warmup - 1),
                               CosineAnnealingLR(rule, optim.steps - optim.warmup, optim.min_lr)], [optim.warmup - 1])
    corpus, unseen = (np.load(folder / f"{name}.npy") for name in ("train", "unseen"))
    order = assemble.open_samples(settings, settings.data.data, optim.seed).span
    first, out = 0, []
    for step in range(optim.steps):
        seen = first * settings.batch.seq
        sequences = 4 if seen < 90 else 8 if seen < 250 else 12
        rule.zero_grad()
        loss = loss_of(w, [order(number) for number in range(first, first + sequences)], corpus, settings)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(w.values()), optim.clip)
        record = dict(loss=loss.item(), grad_norm=norm.item(), lr=rate.get_last_lr()[0])
        rule.step()
        rate.step()
        first += sequences
        if step in (3, 7, 8):
            record["val_loss"] = loss_of(w, list(range(8)), unseen, settings).item()
        out.append(record | dict(step=step, tokens=first * settings.batch.seq, skipped=0))
    return out


FLAGS = ("--dtype fp64 --steps 9 --batch-ramp {} --micro-batch 2 --lr 0.02 --min-lr 0.003 --warmup 3 --clip 0.5 "
         "--weight-decay 0.2 --betas 0.8,0.9 --seed 5 --doc-mask "
         "--val-data {}/unseen.npy --eval-every 4 --eval-steps 2")


def test_a_run_is_what_torchs_own_parts_make_of_the_same_samples(corpora):
    """With a batch ramp, accumulation, documents, warmup, clipping, and evaluations in between."""
    flags = FLAGS.format(RAMP, corpora)
    records, read, _ = run(corpora, flags)
    want = by_torch(corpora, config.parse(f"{MODEL} --data {corpora}/train.npy {flags}".split()))
    for record, true in zip(records, want, strict=True):
        assert {name: record[name] for name in true} == pytest.approx(true, rel=1e-10)
        assert ("val_loss" in record) == ("val_loss" in true)
    assert want[0]["grad_norm"] > 0.5, "clipping is active"
    trained = [numbers for seed, numbers in read if seed == 5]
    assert trained == [[i, i + 1] for i in range(0, want[-1]["tokens"] // 12, 2)], "each sample once, in order"
    assert [numbers for seed, numbers in read if seed is None] == 3 * [[i, i + 1] for i in range(0, 8, 2)]


def test_skipped_steps_are_counted_as_they_happen(corpora):
    """In fp16, z-loss makes gradients overflow until the loss scale has been halved often enough."""
    records, _, _ = run(corpora, "--dtype fp16 --z-loss 30 --steps 20 --global-batch 4")
    finite = [record["grad_norm"] is not None for record in records]
    assert not finite[0] and finite[-1]
    assert [record["skipped"] for record in records] == [finite[:i + 1].count(False) for i in range(20)]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_flops_in_the_metrics_are_those_that_are_dispatched(recompute):
    """HFU with what is recomputed, MFU without; a rank of two has half of the peak's share."""
    flags = f"{MODEL} --data {__file__} --vocab 257 --separator -1 --dtype fp32 --attention math --global-batch 4"
    settings = config.parse(f"{flags} --recompute {recompute}".split())
    model, optimizer = assemble.build(settings, grids.ALONE, torch.device("cpu"), torch.float32)
    samples = assemble.open_samples(settings, settings.data.data, 0)
    share = train.local_micro_batches(samples, 0, 4, settings, grids.ALONE)
    with Meter(memory=False) as meter:
        train.forward_backward(model, optimizer, share, grids.ALONE)
    log = Log(settings, grids.ALONE, torch.device("cpu"))
    log.peak, log.ranks = 1e9, 2
    record = log.record(0, tokens=0, skipped=0, sequences=4, loss=1.0, norm=1.0, lr=1.0, seconds=0.5)
    norms = 5 * 24  # weights that the convention of 6 FLOPs per parameter and token counts, too
    assert record["hfu"] * 0.5 * 2 * 1e9 == pytest.approx(meter.flops + 6 * norms * 4 * 12)
    assert (record["mfu"] == record["hfu"]) == (recompute == "none") and record["mfu_causal"] < record["mfu"]
    assert (record["tokens_per_s"], record["tokens_per_s_per_gpu"]) == (4 * 12 / 0.5, 4 * 12 / 0.5 / 2)
