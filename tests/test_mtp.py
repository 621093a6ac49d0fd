"""Multi-token prediction, besides its grids: what it reads and predicts, and who does without it."""
import grids
import pytest
import runs
import torch
from safetensors.torch import load_file

import train
from core import param
from run import job
from run.data import MicroBatch
from run.generate import sample

SMALL = f"{grids.TINY} --seq-len 12 --global-batch 4 --dtype fp32 --sample-prompt="


@pytest.mark.parametrize("documents, labels", [(None, [22, -100, 24, 25, -100]),
                                               ([[1, 1, 1, 2, 2]], [22, -100, -100, 25, -100])])
def test_the_token_after_the_next_is_predicted_from_the_next_one(documents, labels):
    """But not across the end of a document that attention keeps apart; the second label is one without a loss."""
    tokens, given = torch.tensor([[10, 11, 12, 13, 14]]), torch.tensor([[21, 22, -100, 24, 25]])
    batch = MicroBatch(tokens, given, None, None if documents is None else torch.tensor(documents))
    next_tokens, next_labels = batch.one_ahead()
    assert next_tokens.tolist() == [[11, 12, 13, 14, -1]]
    assert next_labels.tolist() == [labels]
    both = batch._replace(next_tokens=next_tokens, next_labels=next_labels).count_labels()
    assert batch.count_labels().tolist() == [4] and both.tolist() == [4, sum(label > 0 for label in labels)]


PROMPT = torch.arange(10).view(2, 5)


def evaluated(flags: str) -> tuple[float, torch.Tensor]:
    """The mean loss of a model with the seed's weights, and a text that it continues."""
    groups, model, pipeline, _, share = grids.ready(flags)
    return job.mean_loss(model, pipeline, [share], groups), sample(model, PROMPT, 6, temperature=0)


@pytest.mark.parametrize("flags", ["--pp 2 --micro-batch 12", "--zero 3", "--cp 2 --mask-documents"])
def test_evaluations_and_samples_are_those_of_the_model_without(pool, flags):
    """With --pp 2 it is alone on its stage."""
    want, text = evaluated("--layers 2" + " --mask-documents" * ("--mask-documents" in flags))
    for loss, same in pool.run(2, evaluated, flags=f"--layers 2 --mtp {flags}"):
        assert loss == pytest.approx(want, rel=1e-12) and torch.equal(same, text)


def gathered(flags: str) -> set[str]:
    """Of ZeRO level 3: what has whole weights between forward and backward."""
    _, model, _, optimizer, (batch, *_) = grids.ready(flags)
    optimizer.begin_step(1)
    loss = model(batch.tokens, labels=batch.labels, next_tokens=batch.next_tokens, next_labels=batch.next_labels)
    whole = {".".join(param.spec.name.split(".")[:2]) for bucket in optimizer.buckets for param in bucket.params
             if bucket.weights.untyped_storage().nbytes()}
    loss.sum().backward()
    optimizer.finish_step()
    return whole


def test_reading_the_embedding_gathers_no_other_weights(pool):
    """It is the first unit of a model, whose own forward prefetches the first layer."""
    for whole in pool.run(2, gathered, flags="--layers 2 --mtp --zero 3 --micro-batch 12"):
        assert whole == {"embedding", "layers.2", "norm", "head"}


def test_an_export_leaves_it_out_and_who_starts_from_one_draws_it(pool, tmp_path):
    runs.run(f"{SMALL} --data {__file__} --mtp --steps 2 --checkpoint-dir {tmp_path}/first --export-hf {tmp_path}/hf")
    pool.run(2, runs.run, flags=f"--init-from {tmp_path}/hf --data {__file__} --mtp --steps 0 --seed 7 "
                                  "--sample-prompt= "
             f"--global-batch 4 --micro-batch 1 --pp 2 --checkpoint-dir {tmp_path}/second --export-hf {tmp_path}/again")
    written, again = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "again"))
    assert {name.split(".")[2] for name in written if name.startswith("model.layers.")} == {"0", "1"}
    assert written.keys() == again.keys() and all(torch.equal(written[name], again[name]) for name in written)
    first, second = (weights(tmp_path / name) for name in ("first/step-000002", "second/step-000000"))
    assert first.keys() == second.keys() and any(name.startswith("layers.2.") for name in first)
    draw = param.draw(7)
    for p in train.Llama(grids.rules.parse([*SMALL.split(), "--mtp"]).model, {}).parameters():
        want = draw(p.spec, p.box) if p.spec.name.startswith("layers.2.") else first[p.spec.name]
        assert torch.equal(second[p.spec.name], want), p.spec.name


def weights(path) -> dict[str, torch.Tensor]:
    """The master weights in a checkpoint, by name."""
    return {name.removesuffix("/master"): value for name, value in runs.tensors(path).items()
            if name.endswith("/master")}
