"""learn/judge.py on frameworks that the package index has: none is accused unpatched, an error of use is named.

    pip install accelerate deepspeed transformers spmd_types==0.2.3 torchdata datasets tensorboard
    pip install --no-deps megatron-core torchtitan
    pytest -m foreign
"""
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from learn import judge
from learn.judge import Run

pytestmark = pytest.mark.foreign
FOREIGN = Path(__file__).parent / "help" / "foreign.py"
WAYS = ["accelerate", "deepspeed-1", "deepspeed-2", "deepspeed-3", "megatron-ddp", "megatron-tensor",
        "megatron-sequence", "transformers-Llama", "transformers-Qwen3", "torchtitan-spmd_types-fsdp",
        *(f"torchtitan-{backend}_dtensor-{name}" for backend in ("partial", "full")
          for name in ("fsdp", "tensor", "sequence"))]
NOT_HERE = {  # what a way needs that may be missing, as its exception says
    "torchtitan-spmd_types-fsdp": "When dp_mesh_dims is provided, all parameters must be DTensors"}  # by torch 2.13.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("foreign")


def recorded(way: str, fault: str, folder: Path, *launch: str) -> Path:
    """Each record is written once."""
    name = folder / f"{way} {fault}".strip()
    if not name.exists():
        done = subprocess.run([sys.executable, *launch, FOREIGN, way, name, fault], capture_output=True, text=True,
                              env=os.environ | dict(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1"))
        if way in NOT_HERE and NOT_HERE[way] in done.stderr:
            pytest.skip(f"{way}: {NOT_HERE[way]}")
        assert done.returncode == 0, done.stderr
    return name


def lines(folder: Path, way: str, fault: str = "") -> list[str]:
    package = way.split("-")[0]
    if not importlib.util.find_spec(package):
        pytest.skip(f"{package} is not installed")
    truth = {"transformers": f"{way}-one", "torchtitan": "torchtitan-one"}.get(package, "one")
    one = recorded(truth, "", folder)
    many = recorded(way, fault, folder, "-m", "torch.distributed.run", "--nproc_per_node=2")
    return list(judge.lines_of(judge.Judge(Run(one), Run(many)).findings()))


@pytest.mark.parametrize("way", WAYS)
def test_a_framework_is_one_process(folder, way):
    assert lines(folder, way) == []


@pytest.mark.parametrize("way, fault, factor, axes", [
    ("accelerate", "divided by accumulation", "0.500", "accumulation = 2"),
    *((f"deepspeed-{level}", "divided by ranks", "0.500", "dp = 2") for level in (1, 2, 3)),
    ("megatron-ddp", "divided by ranks", "0.500", "dp = 2"),
    ("megatron-tensor", "reduced", "2.000", "tp = 2"),  # as only sequence parallelism needs
    ("megatron-sequence", "summed", "2.000", "tp = 2"),  # gathered as for what is divided, then used whole
    ("transformers-Llama", "reduced", "2.000", "tp = 2"),
    ("torchtitan-partial_dtensor-fsdp", "averaged by FSDP", "0.500", "fsdp = 2"),
    ("torchtitan-partial_dtensor-sequence", "divided by ranks", "0.500", "tp = 2")])
def test_a_factor_of_one_axis_is_named(folder, way, fault, factor, axes):
    line, = lines(folder, way, fault)
    assert f"is {factor} times one process's" in line and axes in line


def test_gradients_that_sequence_parallelism_leaves_to_the_trainer_are_named(folder):
    line, = lines(folder, "megatron-sequence", "not reduced")
    assert line.startswith("step 0: gradient of positions.weight, norm.weight, norm.bias and 1 more: rank 0 and rank 1")
    assert "summed over these 2 they are one process's: it has not been reduced" in line


def test_a_gradient_that_megatron_core_sums_twice_is_named(folder):
    """What only depends on it, as the norm before the matrix, is twice as large; what precedes is off by no factor."""
    found = lines(folder, "megatron-tensor", "reduced twice")
    assert any("gradient of norm.weight, norm.bias: is 2.000 times one process's: tp = 2" in line for line in found)


def test_transformers_sums_what_accumulates_once_more_with_each_micro_batch(folder):
    """Not planted: of two micro-batches with gradients A and B, norms of the style replicated_with_grad_allreduce get
    2 A + B on two ranks, in transformers 5.23.0, as a hook all-reduces .grad and not the term that came."""
    assert lines(folder, "transformers-Llama", "accumulated") == []  # has no such norms
    line, = lines(folder, "transformers-Qwen3", "accumulated")
    first, *_ = names = line.removeprefix("step 0: gradient of ").split(", ")
    assert first == "model.layers.0.self_attn.q_norm.weight" and all("_norm." in name for name in names[:3])
    assert "and 1 more: differs" in line
