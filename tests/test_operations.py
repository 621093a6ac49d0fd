"""The model on GPUs, where kernels.py takes part, here interpreted: the same loss and gradients as without."""
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

import pytest
import torch

import config
import grids
import model
import operations
import train
from data import MicroBatch

MODEL = ("--layers 2 --hidden 32 --heads 4 --kv-heads 2 --head-dim 16 --ffn 40 --vocab 61 --seq 12 --global-batch 2 "
         "--dtype fp32 --z-loss 0.01 --data " + __file__)


def gradients(flags: str, documents: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Of every parameter, and the loss."""
    settings = config.parse(f"{MODEL} {flags}".split())
    llama, optimizer = train.build(settings, grids.ALONE, torch.device("cpu"), torch.float32)
    for bucket in optimizer.buckets:  # so that outputs are of order one
        for param in bucket.params:
            if param.ndim > 1:
                param.data.mul_(8)
    tokens = torch.randint(61, (2, 13), generator=torch.Generator().manual_seed(0))
    labels = tokens[:, 1:].clone()
    labels[:, 3] = -100
    positions = None if documents is None else torch.arange(12).expand(2, -1)
    loss = train.gradients(llama, optimizer, [MicroBatch(tokens[:, :-1], labels, positions, documents)], grids.ALONE)
    return [loss, *(bucket.view(bucket.grad, param) for bucket in optimizer.buckets for param in bucket.params)]


@pytest.mark.parametrize("flags, packed", [
    ("", True), ("--qk-norm --qkv-bias --tied --recompute full", False),
    ("--experts 4 --expert-ffn 24 --shared-experts 1 --recompute selective", False)])
def test_a_model_with_kernels_equals_one_without(monkeypatch, flags, packed):
    documents = torch.arange(12).expand(2, -1) // 5 if packed else None
    want, used = gradients(f"--attention math {flags}", documents), []
    monkeypatch.setattr(operations, "fused", lambda x: used.append(x) or True)
    monkeypatch.setattr(model, "fused", lambda x: used.append(x) or True)
    got = gradients(f"--attention triton {flags}", documents)
    assert len(used) > 10
    for ours, plain in zip(got, want):
        assert (ours - plain).abs().max() < 1e-4 * plain.abs().max()
    assert max(grad.abs().max() for grad in want) > 0.01
