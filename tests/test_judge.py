"""learn/judge.py finds errors in other people's trainers, names their factors, and accuses nobody of what is right."""
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import judged
import pytest
import torch
from pool import slow
from program import python
from safetensors.torch import load_file

from learn import judge
from learn.judge import Piece, Record, Run
from test_grids import GRIDS, MORE, model_flags, pairs_that_meet

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
    ("pipeline", "loss over micro-batches", "is 0.250 times one process's: micro = 4 is divided by", 0.25, "micro")]


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("judged")
    judged.one(str(folder / "one"))
    judged.one(str(folder / "without"), balance=0.0)  # the truth of ways that have no balance loss
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_errors_are_found_and_what_is_right_is_not_accused(pool, one, way):
    faults = {fault: expected for kind, fault, *expected in FAULTS if kind == way}
    pool.run(2, judged.run, way=way, folder=str(one), faults=["right", *faults])
    truth = Run(one / ("without" if way in ("sequence", "pipeline") else "one"))
    assert judge.Judge(truth, Run(one / f"{way} right")).findings() == []
    for fault, (says, factor, axis) in faults.items():
        found = judge.Judge(truth, Run(one / f"{way} {fault}")).findings()
        assert any(re.search(says, line) for line in judge.lines_of(found)), (fault, found)
        if factor:
            assert all(f.factor == pytest.approx(factor, rel=1e-6) and f.axes == (axis,) for f in found), fault
        if fault == "balance":  # which reaches no gradient of the head
            assert {f.name for f in found}.isdisjoint({"head.weight", "head.bias"})
    if way == "ddp":  # replicas are written once
        files = [one / f"{way} right" / f"rank{rank}.step0.safetensors" for rank in range(2)]
        assert [bool(load_file(file)) for file in files] == [True, False]


def recorded(folder: Path, *pieces: Piece, **more: float) -> Run:
    """A record of one step of one rank."""
    Record(str(folder)).step(model=pieces, **more)
    return Run(folder)


X, WHOLE = torch.arange(24.0, dtype=torch.float64).view(6, 4), (slice(0, 6), slice(0, 4))


def piece(*box: slice, times: float = 1, of: torch.Tensor = X) -> Piece:
    return Piece("x", times * of[box], times * of[box] + 1, box)


@pytest.mark.parametrize("pieces, says", [
    ([piece(slice(0, 2), slice(0, 4)), piece(slice(2, 6), slice(0, 4))], ""),
    ([piece(slice(0, 10), of=X.flatten()), piece(slice(10, 24), of=X.flatten())], ""),  # flat ranges are boxes, too
    ([piece(slice(0, 2), slice(0, 4)), piece(slice(1, 4), slice(0, 4))],
     "step 0: weight of x: of 24 elements 8 missing on every rank, 4 covered twice"),
    ([piece(*WHOLE), Piece("y", torch.ones(1), torch.ones(1), (slice(0, 1),))],
     "step 0: weight of y: one process has none"),
    ([], "step 0: weight of x: missing on every rank"),
    ([piece(slice(0, 7), slice(0, 4), of=torch.zeros(7, 4, dtype=torch.float64))],
     "step 0: weight of x: rank 0 has [slice(0, 7, None), slice(0, 4, None)], one process [6, 4]"),
    ([piece(slice(0, 2), slice(0, 4)), piece(slice(2, 6), slice(0, 4), times=3)],
     "step 0: weight of x: differs: rank 0 has 3.000 times it, by 2.0e+00 of the largest element"),
    ([piece(*WHOLE, times=torch.nan)], "step 0: weight of x: 24 of 24 elements are not finite")],
    ids=["shards", "flat ranges", "twice and never", "unknown", "never", "too large", "one wrong shard", "not finite"])
def test_boxes_must_cover_a_tensor_once(tmp_path, pieces, says):
    truth, grid = recorded(tmp_path / "one", piece(*WHOLE)), recorded(tmp_path / "grid", *pieces)
    assert "\n".join(judge.lines_of(judge.Judge(truth, grid).findings())) == says


def test_noise_and_the_coarser_dtype_of_both_say_what_is_tolerated(tmp_path):
    x = torch.linspace(1, 2, 24, dtype=torch.float64).view(6, 4)
    exact = recorded(tmp_path / "exact", Piece("x", x, x, WHOLE))
    one, other, grid, wrong, far = (
        recorded(tmp_path / str(factor), Piece("x", x.float(), (x * factor).float(), WHOLE))
        for factor in (1.0, 1 + 1e-6, 1 + 5e-6, 1 + 5e-5, 1 + 1e-3))
    for truth in one, exact:
        assert judge.Judge(truth, wrong).findings() == [] != judge.Judge(truth, far).findings()  # fp32's 1.2e-4
    assert judge.Judge(one, grid, other).findings() == [] != judge.Judge(one, wrong, other).findings()


def test_what_is_nothing_but_rounding_is_no_finding_and_what_is_no_number_is_one(tmp_path):
    """A gradient that is zero but for rounding, as of a bias of keys, beside others that are not; a loss."""
    x = torch.ones(6, 4, dtype=torch.float64)
    one, grid, wrong = (
        recorded(tmp_path / str(tiny), Piece("x", x, x, WHOLE), Piece("bias", x, x * tiny, WHOLE), loss=loss)
        for tiny, loss in ((1e-17, 1.0), (-2e-17, 1.0), (1e-9, float("nan"))))
    assert judge.Judge(one, grid).findings() == []
    assert sorted((f.kind, f.name) for f in judge.Judge(one, wrong).findings()) == [("gradient", "bias"), ("loss", "")]


def test_other_sizes_of_axes_explain_a_factor():
    sentence, factor, axes = judge.explain_factor(4.0, dict(dp=4, tp=2, cp=2))
    assert axes == ("dp",) and sentence == "dp = 4 is counted once too often"
    assert judge.explain_factor(0.5, dict(dp=4, tp=2, cp=2))[2] == ("tp", "cp")
    assert judge.explain_factor(8.0, dict(dp=4, tp=2))[2] == ("dp", "tp")
    assert judge.explain_factor(3.0, dict(dp=4, tp=2))[::2] == ("no axis has this size", ())


def test_the_file_works_alone_and_ends_with_the_verdict(tmp_path, one, capsys):
    """Copied beside somebody's trainer; a line for what differs, and 0, 1 or 2."""
    copy = tmp_path / "judge.py"
    copy.write_text(Path(judge.__file__).read_text())
    assert judge.main([str(one / "one"), str(one / "one")]) == 0 and capsys.readouterr().out == ""
    wrong = subprocess.run([sys.executable, copy, one / "one", one / "without", "--json"], cwd=tmp_path,
                           capture_output=True, text=True)
    kinds = {found["kind"] for found in json.loads(wrong.stdout)}
    assert wrong.returncode == 1 and kinds == {"gradient", "loss", "norm"}
    missing = python(copy, one / "one", tmp_path / "nowhere")
    assert missing.returncode == 2 and missing.stderr == (
        f"judge: {tmp_path / 'nowhere'}: has no record, which Record(folder) writes\n")


SCRIPT = """
import os, sys, warnings
sys.modules["numpy"] = None  # importing it raises ImportError
import torch, torch.distributed as dist
import judge

rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
try:
    torch.ones(1).numpy()
    sys.exit("numpy is there")
except RuntimeError:
    pass
if ranks > 1:
    dist.init_process_group("gloo", init_method=f"file://{os.path.abspath(folder)}.meet", rank=rank, world_size=ranks)
torch.manual_seed(0)
model, x = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1)), torch.randn(4, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = x.chunk(ranks)[rank]
loss = model(x).square().sum()
loss.backward()
if ranks > 1:
    for param in model.parameters():
        dist.all_reduce(param.grad)
warnings.simplefilter("error")
{lines}
"""


def test_the_three_lines_of_the_docstring_record_a_run_without_numpy_and_without_a_warning(tmp_path):
    """Copied beside a trainer in torch, which then updates between the second line and the third. One line says where
    the record is: "one/", and "grid/" on each of two ranks."""
    first, second, third = re.findall(r"^    (record\b.*?) *#.*$", judge.__doc__, re.MULTILINE)
    first = first.replace("record = judge.Record(\"one/\")", "record = judge.Record(folder)")
    lines = "\n".join([first, second, "optimizer.step()", third])
    (tmp_path / "judge.py").write_text(Path(judge.__file__).read_text())
    (tmp_path / "trainer.py").write_text(SCRIPT.replace("{lines}", lines))
    trainers = [subprocess.Popen([sys.executable, "trainer.py", str(rank), str(ranks), folder], cwd=tmp_path,
                                 stderr=subprocess.PIPE, text=True)
                for folder, ranks in (("one", 1), ("grid", 2)) for rank in range(ranks)]
    for trainer in trainers:
        _, error = trainer.communicate(timeout=300)
        assert trainer.returncode == 0, error
    truth, grid = Run(tmp_path / "one"), Run(tmp_path / "grid")
    assert (truth.ranks, truth.steps, grid.ranks, grid.steps) == (1, 2, 2, 2)
    found = judge.Judge(truth, grid).findings()
    assert [(f.kind, f.name) for f in found] == [("loss", "")]  # of each half of the batch
    weights = load_file(tmp_path / "grid" / "rank0.step0.safetensors")  # the package reads what the judge writes
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
    assert {key: x.shape for key, x in weights.items()} == {
        str(2 * i + j): param.shape for i, param in enumerate(model.parameters()) for j in range(2)}
    assert all(torch.equal(weights[str(2 * i)], param) for i, param in enumerate(model.parameters()))
    assert load_file(tmp_path / "grid" / "rank1.step0.safetensors") == {}


def test_tensors_of_all_dtypes_are_saved_as_safetensors_reads_them(tmp_path):
    tensors = {name: torch.randn(shape).to(getattr(torch, dtype)) for name, dtype, shape in (
        ("a", "float16", (3,)), ("b", "float64", (2, 3)), ("c", "bfloat16", (5, 1)), ("d", "float32", ()),
        ("e", "float16", (0, 4)), ("f", "float64", (1,)))}
    assert {str(x.dtype)[6:] for x in tensors.values()} == set(judge.TOLERANCE)
    judge.save(tensors, tmp_path / "file")
    loaded = load_file(tmp_path / "file")
    assert loaded.keys() == tensors.keys()
    for name, x in tensors.items():
        assert loaded[name].dtype == x.dtype and torch.equal(loaded[name], x)


def test_a_record_is_not_written_twice_nor_compared_with_another_length(tmp_path):
    longer = Record(str(tmp_path / "b"))
    for _ in range(2):
        longer.step(model=[piece(*WHOLE)])
    one = recorded(tmp_path / "a", piece(*WHOLE))
    with pytest.raises(ValueError, match="has a record already"):
        Record(str(tmp_path / "a"))
    with pytest.raises(ValueError, match="has 0 steps, .*b 1: record as many"):
        judge.Judge(one, Run(tmp_path / "b"))


def test_terms_of_a_sum_are_summed(pool, tmp_path):
    """As gradients of DTensors that are partial."""
    judged.terms(str(tmp_path / "one"))
    for ranks in 2, 4:
        pool.run(ranks, judged.terms, folder=str(tmp_path / str(ranks)))
        assert judge.Judge(Run(tmp_path / "one"), Run(tmp_path / str(ranks))).findings() == []


@pytest.mark.parametrize("ranks, grid", [
    (4, "--micro-batch 6 --tp 2 --zero 2 --kv-heads 2"), (2, "--micro-batch 6 --pp 2 --schedule zb-h1 --tied"),
    *slow(*(case for case in (*GRIDS, *MORE, *pairs_that_meet(exact=True)) if case[0] > 1))])
def test_no_right_grid_is_accused(pool, tmp_path, ranks, grid):
    judged.ours(str(tmp_path / "one"), model_flags(grid))
    pool.run(ranks, judged.ours, folder=str(tmp_path / "grid"), grid=grid)
    assert judge.Judge(Run(tmp_path / "one"), Run(tmp_path / "grid")).findings() == []


@pytest.mark.timing
def test_a_hundred_million_parameters_on_eight_ranks_take_less_than_a_minute(pool, tmp_path):
    judged.large(str(tmp_path / "one"))
    pool.run(8, judged.large, folder=str(tmp_path / "grid"))
    began = time.monotonic()
    assert judge.main([str(tmp_path / "one"), str(tmp_path / "grid")]) == 0
    assert time.monotonic() - began < 60


def test_more_than_ten_ranks_are_read_in_their_order(tmp_path, monkeypatch):
    """As text, rank10 is before rank2. Ranks 10 and 11 have other bits than ranks 2 to 9, which come first."""
    one = recorded(tmp_path / "one", piece(*WHOLE))
    for rank in range(12):
        monkeypatch.setattr(judge, "dist", SimpleNamespace(
            is_initialized=lambda: True, get_rank=lambda rank=rank: rank, get_world_size=lambda: 12))
        monkeypatch.setattr(judge, "gather_lines", lambda mine: [[]] * 12)
        grid = Record(str(tmp_path / "grid"))
        grid.step(model=[piece(*WHOLE, times=1 + (rank >= 10))] if rank >= 2 else [])
    (found,) = judge.Judge(one, Run(tmp_path / "grid")).findings()
    assert found.says == "rank 2 and rank 10 hold different bits of a replicated tensor" and found.off == 1.0
