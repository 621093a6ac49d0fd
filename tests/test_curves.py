"""--tensorboard and --wandb: what they are given are the metrics, by name and step, also in a resumed run.

The packages are optional. Fakes record what they are called with; where a package is installed, it reads its own files.
"""
import glob
import json
import sys
from pathlib import Path

import grids
import pytest
import torch.distributed as dist
from program import python
from runs import metrics, run

from core import config
from run import cli

ROOT = Path(config.__file__).parent.parent
TRAIN = f"{grids.TINY} --seq-len 32 --global-batch 4 --dtype fp32 --device cpu --sample-prompt= --data {ROOT}/pp.py"
# What the fakes are called with goes to standard error, one JSON list a line: the package, what it does, the rest.
FAKE_WANDB = '''
import json, sys
class Run:
    def __init__(self, id, project, resume, config, allow_val_change):
        self.id = id or "new"
        self.tell("open", [id, project, resume, config["layers"]])
    def tell(self, *words):
        print(json.dumps(["wandb", *words]), file=sys.stderr)
    def log(self, numbers, step):
        self.tell("write", step, numbers)
    def finish(self):
        self.tell("close")
init = Run
'''
FAKE_WRITER = '''
import json, sys
class SummaryWriter:
    def __init__(self, folder, purge_step):
        self.tell("open", [folder, purge_step])
    def tell(self, *words):
        print(json.dumps(["tensorboard", *words]), file=sys.stderr)
    def add_scalar(self, name, number, step):
        self.tell("write", step, {name: number})
    def flush(self):
        pass
    def close(self):
        self.tell("close")
'''


def fake(folder: Path) -> None:
    """Let this process find the packages in this folder, and nothing else by their names."""
    folder.mkdir(exist_ok=True)
    (folder / "wandb.py").write_text(FAKE_WANDB)
    (folder / "tensorboard.py").touch()
    (folder / "writer.py").write_text(FAKE_WRITER)
    sys.path.insert(0, str(folder))
    for name in "wandb", "tensorboard", "writer":
        sys.modules.pop(name, None)
    import writer
    sys.modules["torch.utils.tensorboard"] = writer


def unfake(folder: Path) -> None:
    sys.path.remove(str(folder))
    for name in "wandb", "tensorboard", "writer", "torch.utils.tensorboard":
        sys.modules.pop(name, None)


def calls(folder: Path, flags: str) -> list[list]:
    """What a run calls the packages with on this rank."""
    fake(folder)
    try:
        return [json.loads(line) for line in run(f"{TRAIN} {flags}").splitlines() if line.startswith('["')]
    finally:
        unfake(folder)


def written(seen: list[list], package: str) -> dict[int, dict[str, float]]:
    """Step -> name -> number."""
    found = {}
    for name, what, *rest in seen:
        if (name, what) == (package, "write"):
            found.setdefault(rest[0], {}).update(rest[1])
    return found


def in_file(path: Path) -> dict[int, dict[str, float]]:
    """The same from a file of metrics: null is no number, and of an object every entry is one."""
    found = {}
    for record in metrics(path):
        step, numbers = record.pop("step"), {}
        for name, value in record.items():
            is_object = isinstance(value, dict)
            numbers.update({f"{name}/{part}": value[part] for part in value} if is_object else {name: value})
        found[step] = {name: number for name, number in numbers.items() if number is not None}
    return found


def test_both_get_the_numbers_of_the_metrics_and_a_resumed_run_continues(tmp_path):
    flags = (f"--metrics {tmp_path}/m --tensorboard {tmp_path}/tb --wandb project --checkpoint-dir {tmp_path}/out "
             "--save-every 2 --val-data {0}/dp.py --eval-every 3".format(ROOT))
    first = calls(tmp_path / "fakes", f"{flags} --steps 3")
    records = in_file(tmp_path / "m")
    assert list(records) == [0, 1, 2] and "val_loss" in records[2] and "mfu" not in records[0]
    for package, opened in ("tensorboard", [f"{tmp_path}/tb", 0]), ("wandb", [None, "project", "allow", 2]):
        ours = [call for call in first if call[0] == package]
        assert written(ours, package) == records
        assert ours[0][1:] == ["open", opened] and ours[-1][1:] == ["close"]
    again = calls(tmp_path / "fakes", f"--resume {tmp_path}/out/step-000002 --steps 5 --checkpoint-dir {tmp_path}/out")
    records = in_file(tmp_path / "m")
    for package, opened in ("tensorboard", [f"{tmp_path}/tb", 2]), ("wandb", ["new", "project", "allow", 2]):
        ours = [call for call in again if call[0] == package]
        assert written(ours, package) == {step: records[step] for step in (2, 3, 4)}
        assert ours[0][1:] == ["open", opened]


def test_a_run_from_a_copy_of_a_checkpoint_is_another_run(tmp_path):
    flags = f"--tensorboard {tmp_path}/tb --wandb project --checkpoint-dir {tmp_path}/out --steps 1"
    calls(tmp_path / "fakes", flags)
    (tmp_path / "out").rename(tmp_path / "copy")
    assert calls(tmp_path / "fakes", f"--resume {tmp_path}/copy --steps 2") == []


def calls_of_rank(folder: str, flags: str) -> tuple[int, list[list]]:
    return dist.get_rank(), calls(Path(folder, f"fakes-{dist.get_rank()}"), flags)


def test_only_the_first_rank_writes(pool, tmp_path):
    """With what ranks send and how long they work, each number by its own name."""
    (_, first), *others = pool.run(2, calls_of_rank, folder=str(tmp_path), flags=(
        f"--steps 2 --metrics {tmp_path}/m --tensorboard {tmp_path}/tb --wandb project"))
    assert [seen for _, seen in others] == [[]]
    records = in_file(tmp_path / "m")
    assert {"comm_gb/dp", "busy_s/max", "busy_s/slowest_rank"} <= set(records[0])
    assert written(first, "tensorboard") == written(first, "wandb") == records


def test_one_that_fails_is_dropped_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "FAKE_WANDB", FAKE_WANDB.replace(
        'self.tell("write", step, numbers)', 'raise OSError("gone\\nfar away")'))
    fake(tmp_path / "fakes")
    said = run(f"{TRAIN} --steps 3 --metrics {tmp_path}/m --tensorboard {tmp_path}/tb --wandb project")
    unfake(tmp_path / "fakes")
    assert said.count("train.py: warning: --wandb: OSError: gone: training goes on without\n") == 1
    seen = [json.loads(line) for line in said.splitlines() if line.startswith('["')]
    assert written(seen, "tensorboard") == in_file(tmp_path / "m") and len(metrics(tmp_path / "m")) == 3


def test_one_that_cannot_be_opened_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "FAKE_WANDB", FAKE_WANDB.replace(
        'self.id = id or "new"', 'raise RuntimeError("not logged in\\nrun wandb login")'))
    with pytest.raises(ValueError, match="^--wandb project: not logged in$"):
        calls(tmp_path / "fakes", "--steps 3 --wandb project")


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_one_line_before_anything_else(tmp_path, monkeypatch, package):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("wandb_of_no_package").mkdir()
    assert not cli.is_installed("wandb_of_no_package")  # wandb makes such a folder where a run is started
    assert not cli.is_installed("no_such_package") and cli.is_installed("json")
    monkeypatch.setattr(cli, "is_installed", lambda name: name != package)
    says = f"^--{package} here: needs a package that is not installed: pip install {package}$"
    with pytest.raises(ValueError, match=says):
        cli.parse([f"--{package}", "here"])
    assert cli.parse([f"--{package}", "here", "--dry-run", "0/8"]).value(package) == "here"


# ---- where a package is installed, it reads its own files -----------------------------------------------------------

def commands(folder: Path, flags: str) -> None:
    """Three steps, and then the last of them and two more, as a user starts them."""
    for more in ["--steps", "3"], ["--steps", "5", "--resume", f"{folder}/out/step-000002"]:
        done = python("train.py", *f"{TRAIN} {flags} --metrics {folder}/m --checkpoint-dir {folder}/out --save-every 2 "
                                   "--keep-checkpoints 0".split(), *more, WANDB_MODE="offline", WANDB_DIR=str(folder))
        assert done.returncode == 0, done.stderr


def test_tensorboard_reads_the_curves_of_a_resumed_run(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    commands(tmp_path, f"--tensorboard {tmp_path}/tb")
    events = EventAccumulator(f"{tmp_path}/tb").Reload()
    records = in_file(tmp_path / "m")
    assert list(records) == [0, 1, 2, 3, 4]
    for name in events.Tags()["scalars"]:
        found = {event.step: event.value for event in events.Scalars(name)}
        assert found == pytest.approx({step: numbers[name] for step, numbers in records.items() if name in numbers})
    assert set(events.Tags()["scalars"]) == {name for numbers in records.values() for name in numbers}


def test_wandb_writes_both_parts_of_a_resumed_run_as_one(tmp_path):
    pytest.importorskip("wandb")
    commands(tmp_path, "--wandb project")
    name = (tmp_path / "out" / "wandb-run").read_text().strip()
    files = sorted(glob.glob(f"{tmp_path}/wandb/offline-run-*/run-{name}.wandb"))
    assert len(files) == 2 and all(b"grad_norm" in Path(file).read_bytes() for file in files)
