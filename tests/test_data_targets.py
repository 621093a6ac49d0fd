"""Where nothing is to be learned there is no loss: no 0 that looks like success."""
import numpy as np
import pytest
from runs import metrics, run

TINY = "--vocab 50 --layers 1 --hidden 32 --ffn 32 --seq-len 8 --global-batch 1 --sample-prompt="


def masked(path, mask) -> str:
    """A token file whose tokens are targets where the mask has a 1."""
    mask = np.asarray(mask, np.uint8)
    np.arange(len(mask), dtype=np.uint16).__mod__(50).astype(np.uint16).tofile(path)
    mask.tofile(path.with_suffix(".mask"))
    return str(path)


def test_a_step_without_a_target_has_no_loss(tmp_path):
    """The other steps' losses, and what is printed at the end, are of steps with targets."""
    spans = 6
    mask = np.zeros(8 * spans + 1)
    mask[1:17] = 1  # of two of six samples
    data, path = masked(tmp_path / "a.bin", mask), tmp_path / "metrics"
    said = run(f"{TINY} --data {data} --steps {spans} --metrics {path}")
    assert f"data    {len(mask)} tokens, of which 16 are targets, in 1 file: {spans} samples of 8" in said
    losses = [record["loss"] for record in metrics(path)]
    assert sum(loss is None for loss in losses) == spans - 2 and all(loss is None or loss > 1 for loss in losses)
    last = [loss for loss in losses if loss is not None][-1]
    assert said.count("has no loss: none of its tokens is a target") == 1 and f"last loss {last:.4f} nats" in said
    assert all(record["grad_norm"] == 0 for record in metrics(path) if record["loss"] is None)


@pytest.mark.parametrize("first_target, has_loss", [(1, True), (17, False)])
def test_a_validation_without_a_target_has_no_loss(tmp_path, first_target, has_loss):
    data, path = masked(tmp_path / "a.bin", np.ones(80)), tmp_path / "metrics"
    validated = masked(tmp_path / "b.bin", np.arange(80) >= first_target)
    said = run(f"{TINY} --data {data} --steps 1 --val-data {validated} --eval-steps 2 --metrics {path}")
    loss = metrics(path)[0]["val_loss"]
    assert (loss is not None and loss > 1) == has_loss == ("validation loss 3." in said or "validation loss 4." in said)
    assert ("no validation loss: none of the tokens of the 2 samples" in said) != has_loss
