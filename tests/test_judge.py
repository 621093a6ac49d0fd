"""learn/judge.py finds errors in other people's trainers, names their factors, and accuses nobody of what is right."""
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import judged
import pytest
import torch
from safetensors.torch import load_file

from learn import judge
from learn.judge import Piece, Record, Run
from test_grids import EXACT, GRIDS, MORE, model_flags

WAYS = ["ddp", "sequence", "fsdp", "dtensor", "pipeline"]
FAULTS = [  # the way, the error, what a line must say, the factor and an axis that must be named
    ("ddp", "mean of ranks", "gradient of .* differs, by", None, ""),
    ("ddp", "mean of micro-batches", "gradient of .* differs, by", None, ""),
    ("ddp", "last micro-batch", "gradient of .* differs, by", None, ""),
    ("ddp", "not reduced", "hold different bits .* averaged over these 2 they are .* has not been reduced", None, ""),
    ("ddp", "reduced twice", "is 2.000 times one process's: dp = 2 is counted once too often", 2.0, "dp"),
    ("ddp", "drift", "step 1: weight of norm.weight: rank 0 and rank 1 hold different bits", None, ""),
    ("ddp", "decay", "step 1: weight of norm.weight: .* the update differs by -1.0e-03 times the weight", None, ""),
    ("ddp", "balance", "step 0: gradient of embed.weight.*: differs", None, ""),
    ("sequence", "positions", "step 0: gradient of embed.weight, positions.weight.*: differs", None, ""),
    ("fsdp", "local clip", "step 1: weight of .* the gradient agreed, the update", None, ""),
    ("fsdp", "stale", "step 1: weight of head.weight: is still that of step 0", None, ""),
    ("fsdp", "permuted", "step 1: weight of up.weight: rows are permuted: blocks 1 0 of 2", None, ""),
    ("dtensor", "norm per tp rank", "step 0: norm: is 1.* times one process's: every replica is counted", None, ""),
    ("pipeline", "loss over pp", "is 0.500 times one process's: pp = 2 is divided by once too often", 0.5, "pp"),
    ("pipeline", "loss over micro-batches", "is 0.250 times one process's: micro = 4 is divided by", 0.25, "micro"),
]


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("judged")
    judged.one(str(folder / "one"))
    judged.one(str(folder / "without"), balance=0.0)  # the truth of ways that have no balance loss
    return folder


def findings(pool, one: Path, way: str, fault: str = "", **more) -> list[judge.Finding]:
    folder = Path(tempfile.mkdtemp(dir=one))
    pool.run(2, "judged:run", way=way, folder=str(folder), fault=fault)
    truth = "without" if way in ("sequence", "pipeline") else "one"
    return judge.Judge(Run(one / truth), Run(folder), **more).findings()


@pytest.mark.parametrize("way", WAYS)
def test_a_right_trainer_differs_in_nothing(pool, one, way):
    assert findings(pool, one, way) == []


@pytest.mark.parametrize("way, fault, says, factor, axis", FAULTS, ids=[fault for _, fault, *_ in FAULTS])
def test_an_error_is_found_and_its_factor_named(pool, one, way, fault, says, factor, axis):
    found = findings(pool, one, way, fault)
    lines = list(judge.lines_of(found))
    assert any(re.search(says, line) for line in lines), lines
    if factor:
        assert all(f.factor == pytest.approx(factor, rel=1e-6) and f.axes == (axis,) for f in found) and found


def test_a_scaled_balance_loss_touches_no_gradient_that_it_does_not_reach(pool, one):
    assert {f.name for f in findings(pool, one, "ddp", "balance")}.isdisjoint({"head.weight", "head.bias"})


def record(folder: Path, *parts: tuple, steps: int = 1) -> None:
    """A record of one rank of which (name, box, weights) are given."""
    kept = Record(str(folder))
    for _ in range(steps):
        kept.step(model=[Piece(name, x, x + 1, box) for name, box, x in parts])


def said(tmp_path: Path, *parts: tuple) -> str:
    x = torch.arange(24.0, dtype=torch.float64).view(6, 4)
    record(tmp_path / "one", ("x", (slice(0, 6), slice(0, 4)), x))
    record(tmp_path / "grid", *parts)
    return "\n".join(judge.lines_of(judge.Judge(Run(tmp_path / "one"), Run(tmp_path / "grid")).findings()))


def rows(first: int, last: int) -> tuple:
    return "x", (slice(first, last), slice(0, 4)), torch.arange(24.0, dtype=torch.float64).view(6, 4)[first:last]


def test_boxes_must_cover_a_tensor_once(tmp_path):
    assert said(tmp_path / "a", rows(0, 2), rows(2, 6)) == ""
    assert said(tmp_path / "b", rows(0, 2), rows(1, 4)) == (
        "step 0: weight of x: of 24 elements 8 missing on every rank, 4 covered twice")
    assert said(tmp_path / "c", rows(0, 6), ("y", (slice(0, 1),), torch.ones(1))) == (
        "step 0: weight of y: one process has none")
    assert said(tmp_path / "d") == "step 0: weight of x: missing on every rank"
    assert "rank 0 has [slice(0, 7, None)" in said(
        tmp_path / "e", ("x", (slice(0, 7), slice(0, 4)), torch.zeros(7, 4, dtype=torch.float64)))


def test_a_flat_range_is_a_box_of_one_slice(tmp_path):
    flat = torch.arange(24.0, dtype=torch.float64)
    assert said(tmp_path, ("x", (slice(0, 10),), flat[:10]), ("x", (slice(10, 24),), flat[10:])) == ""


def test_one_wrong_shard_of_two_is_named(tmp_path):
    name, box, value = rows(2, 6)
    assert said(tmp_path, rows(0, 2), (name, box, 3 * value)) == (
        "step 0: weight of x: differs: rank 0 has 3.000 times it, by 2.0e+00 of the largest element")


def test_what_is_not_finite_is_said(tmp_path):
    assert said(tmp_path, ("x", (slice(0, 6), slice(0, 4)), torch.full((6, 4), torch.nan))) == (
        "step 0: weight of x: 24 of 24 elements are not finite")


def test_noise_says_what_is_tolerated(tmp_path):
    x = torch.linspace(1, 2, 24, dtype=torch.float32).view(6, 4)
    for name, factor in ("one", 1.0), ("other", 1 + 1e-6), ("grid", 1 + 5e-6), ("wrong", 1 + 5e-5):
        Record(str(tmp_path / name)).step(model=[Piece("x", x, x * factor, (slice(0, 6), slice(0, 4)))])
    runs = {name: Run(tmp_path / name) for name in ("one", "other", "grid", "wrong")}
    assert judge.Judge(runs["one"], runs["wrong"]).findings() == []  # 1.2e-4 are tolerated in fp32
    assert judge.Judge(runs["one"], runs["grid"], runs["other"]).findings() == []
    assert judge.Judge(runs["one"], runs["wrong"], runs["other"]).findings() != []


def test_what_is_nothing_but_rounding_is_no_finding(tmp_path):
    """A gradient that is zero but for rounding, as of a bias of keys, beside others that are not."""
    x, box = torch.ones(6, 4, dtype=torch.float64), (slice(0, 6), slice(0, 4))
    for name, tiny in ("one", 1e-17), ("grid", -2e-17), ("wrong", 1e-9):
        Record(str(tmp_path / name)).step(model=[Piece("x", x, x, box), Piece("bias", x, x * tiny, box)], loss=1.0)
    assert judge.Judge(Run(tmp_path / "one"), Run(tmp_path / "grid")).findings() == []
    assert [f.name for f in judge.Judge(Run(tmp_path / "one"), Run(tmp_path / "wrong")).findings()] == ["bias"]


def test_a_loss_that_is_no_number_is_one_that_differs(tmp_path):
    for name, loss in ("one", 1.0), ("grid", float("nan")):
        Record(str(tmp_path / name)).step(model=[Piece("x", torch.ones(2), torch.ones(2), (slice(0, 2),))], loss=loss)
    assert [f.kind for f in judge.Judge(Run(tmp_path / "one"), Run(tmp_path / "grid")).findings()] == ["loss"]


def test_other_sizes_of_axes_explain_a_factor():
    sentence, factor, axes = judge.explain_factor(4.0, dict(dp=4, tp=2, cp=2))
    assert axes == ("dp",) and sentence == "dp = 4 is counted once too often"
    assert judge.explain_factor(0.5, dict(dp=4, tp=2, cp=2))[2] == ("tp", "cp")
    assert judge.explain_factor(8.0, dict(dp=4, tp=2))[2] == ("dp", "tp")
    assert judge.explain_factor(3.0, dict(dp=4, tp=2))[::2] == ("no axis has this size", ())


def test_the_file_works_alone_and_ends_with_the_verdict(tmp_path, one):
    """Copied beside somebody's trainer; a line for what differs, and 0, 1 or 2."""
    copy = tmp_path / "judge.py"
    copy.write_text(Path(judge.__file__).read_text())

    def run(*arguments) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, copy, *map(str, arguments)], cwd=tmp_path, capture_output=True,
                              text=True)

    same = run(one / "one", one / "one")
    assert (same.returncode, same.stdout) == (0, "")
    wrong = run(one / "one", one / "without", "--json")
    kinds = {found["kind"] for found in json.loads(wrong.stdout)}
    assert wrong.returncode == 1 and kinds == {"gradient", "loss", "norm"}
    missing = run(one / "one", tmp_path / "nowhere")
    assert missing.returncode == 2 and missing.stderr == (
        f"judge: {tmp_path / 'nowhere'}: has no record, which Record(folder) writes\n")


def test_a_record_is_not_written_twice_nor_compared_with_another_length(tmp_path):
    record(tmp_path / "a", rows(0, 6))
    record(tmp_path / "b", rows(0, 6), steps=2)
    with pytest.raises(ValueError, match="has a record already"):
        Record(str(tmp_path / "a"))
    with pytest.raises(ValueError, match="has 0 steps, .*b 1: record as many"):
        judge.Judge(Run(tmp_path / "a"), Run(tmp_path / "b"))


def test_replicas_are_written_once(pool, one):
    pool.run(2, "judged:run", way="ddp", folder=str(one / "replicas"))
    files = [one / "replicas" / f"rank{rank}.step0.safetensors" for rank in range(2)]
    assert [bool(load_file(file)) for file in files] == [True, False]


def test_terms_of_a_sum_are_summed(pool, tmp_path):
    """As gradients of DTensors that are partial."""
    judged.terms(str(tmp_path / "one"))
    for ranks in 2, 4:
        pool.run(ranks, "judged:terms", folder=str(tmp_path / f"grid {ranks}"))
        assert judge.Judge(Run(tmp_path / "one"), Run(tmp_path / f"grid {ranks}")).findings() == []


def grid_differs(pool, folder: Path, ranks: int, grid: str) -> list[judge.Finding]:
    judged.ours(str(folder / "one"), model_flags(grid))
    pool.run(ranks, "judged:ours", folder=str(folder / "grid"), grid=grid)
    return judge.Judge(Run(folder / "one"), Run(folder / "grid")).findings()


@pytest.mark.parametrize("ranks, grid", [(4, "--micro-batch 6 --tp 2 --zero 2 --kv-heads 2"),
                                         (2, "--micro-batch 6 --pp 2 --schedule zb-h1 --tied")])
def test_right_grids_of_ours_are_not_accused(pool, tmp_path, ranks, grid):
    assert grid_differs(pool, tmp_path, ranks, grid) == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks, grid", [case for case in (*GRIDS, *MORE, *EXACT) if case[0] > 1])
def test_no_right_grid_is_accused(pool, tmp_path, ranks, grid):
    assert grid_differs(pool, tmp_path, ranks, grid) == []


@pytest.mark.slow
def test_a_hundred_million_parameters_on_eight_ranks_take_less_than_a_minute(pool, tmp_path):
    judged.large(str(tmp_path / "one"))
    pool.run(8, "judged:large", folder=str(tmp_path / "grid"))
    began = time.monotonic()
    assert judge.main([str(tmp_path / "one"), str(tmp_path / "grid")]) == 0
    assert time.monotonic() - began < 60
