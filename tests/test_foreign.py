"""learn/judge.py on frameworks that the package index has: none is accused unpatched, an error of use is named.

    pip install accelerate deepspeed megatron-core && pytest -m foreign
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
WAYS = ["accelerate", "deepspeed-1", "deepspeed-2", "deepspeed-3", "megatron"]


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("foreign") / "one"
    subprocess.run([sys.executable, FOREIGN, "one", folder], check=True)
    return folder


def lines(one: Path, way: str, fault: str = "") -> list[str]:
    package = way.split("-")[0]
    if not importlib.util.find_spec(package):
        pytest.skip(f"{package} is not installed")
    folder = one.parent / f"{way} {fault}"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    done = subprocess.run([*launch, FOREIGN, way, folder, fault], capture_output=True, text=True,
                          env=os.environ | dict(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr
    return list(judge.lines_of(judge.Judge(Run(one), Run(folder)).findings()))


@pytest.mark.parametrize("way", WAYS)
def test_a_framework_is_one_process(one, way):
    assert lines(one, way) == []


@pytest.mark.parametrize("way, fault, factor, axes", [
    ("accelerate", "divided by accumulation", "0.500", "accumulation = 2"),
    *((f"deepspeed-{level}", "divided by ranks", "0.500", "dp = 2") for level in (1, 2, 3))])
def test_a_loss_that_is_divided_once_more_is_named(one, way, fault, factor, axes):
    line, = lines(one, way, fault)
    assert f"is {factor} times one process's" in line and axes in line


def test_a_gradient_that_megatron_core_sums_twice_is_named(one):
    """What only depends on it, as the norm before the matrix, is twice as large; what precedes is off by no factor."""
    found = lines(one, "megatron", "reduced twice")
    assert any("gradient of norm.weight, norm.bias: is 2.000 times one process's: tp = 2" in line for line in found)
