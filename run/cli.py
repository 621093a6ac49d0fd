"""The start of a command: it reads its settings, or prints one line about a mistake in them.

A run inherits the settings that its flags do not give: with --resume from a checkpoint, with --init-from from a
published model. Everything is read and checked before torch is imported, so a wrong flag is answered at once. For that
reason this file needs only the standard library. run/checkpoint.py writes the run.json that is read here.
"""
import contextlib
import contextvars
import hashlib
import importlib.util
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NoReturn

from core import config, rules
from core.config import FIELDS, PRESETS, Config, flag, is_of_kind, need, problem_of
from run import huggingface

CHECKPOINT_FORMAT = 1  # of run.json and of tensors' names
CONTENT = dict(  # an example of the contents of run.json, without format and checksum
    step=0, samples=0, tokens=0, skipped=0, left_out=[[0]], rewinds=0, ranks=0, torch="", tokenizer="", published="",
    corpus=dict(tokens=0, files=0), files={}, model=asdict(config.Model()), grid=asdict(config.Grid()),
    settings={name: value for section in config.SECTIONS.values() for name, value in asdict(section()).items()})
# "described" in run.json: facts about the data, for exports. Checkpoints of earlier versions do not have it.
#     bos        the token that begins a document; -1: there is none
#     eos        the tokens at which a program that generates should stop
#     longest    the longest sample so far, in tokens
#     is_bytes   whether text is read as bytes, without a tokenizer
DESCRIBED = dict(bos=-1, eos=[0], chat_template="", longest=0, is_bytes=False)
SECTIONS = "settings", "model", "grid"  # of CONTENT, which have settings
# They belong to one start of a run.
NOT_INHERITED = {"resume", "allow_mismatch", "init_from", "export_hf", "profile", "memory_snapshot"}
METRIC = b'{"step":'  # how a line of --metrics begins
SHOWN = {4: ["--tp", "2"], 8: ["--tp", "2", "--pp", "2"]}  # ranks -> the grid if no flag names grid or model
# Where there is a GPU for each rank, also this model of 284M parameters, in place of 0.8M: on 8 H100s a step is
# predicted to take 0.23 s (python -m plan step).
ON_GPUS = ("--layers 24 --hidden 1024 --heads 16 --kv-heads 8 --ffn 2816 --seq-len 2048 --global-batch 64 "
           "--micro-batch 8 --recompute selective").split()
GPUS = "/proc/driver/nvidia/gpus"  # a folder for each GPU of this machine


# ---- settings -------------------------------------------------------------------------------------------------------

def parse(arguments: list[str], world: int = 1) -> Config:
    """rules.parse, with what these flags inherit. Raises ValueError also for a checkpoint that cannot be resumed, and
    for an --export-hf that could not be written after the last step."""
    flags, inherited, owner, model = config.read(arguments), None, "", {}
    resume = flags.get("resume", "")
    for name, value in flags.items():
        need("\0" not in "".join(value if isinstance(value, list) else [str(value)]), f"{flag(name)}: has a NUL byte")
    need(resume in ("", "auto") or not flags.get("init_from"),
         f"--resume {resume}: has weights, so leave out --init-from; only auto, which may find none, goes with it")
    resumed = resumed_run(resume, flags.get("checkpoint_dir", ""))
    if resumed:  # with another number of ranks, too: dp=-1 takes all that the other axes leave
        model, owner = resumed["model"], "the checkpoint's"
        inherited = resumed["settings"] | dict(dp=-1) | preset_of(flags, model["preset"])
    else:
        arguments = [*arguments, *(["--resume="] if "resume" in flags else [])]  # there is nothing to resume
        if folder := flags.get("init_from"):
            need(os.path.isdir(folder) or not re.fullmatch(r"[\w.-]+/[\w.-]+", folder),
                 f"--init-from {folder}: there is no such folder, and nothing is downloaded: hf download {folder} "
                 "--local-dir FOLDER does, then give --init-from FOLDER")
            inherited = dict(preset=Path(folder).resolve().name) | huggingface.read_config(folder)
            owner = f"of --init-from {folder}"
    settings = rules.parse(arguments, world, inherited, owner)
    check_paths(settings)
    if not resume:  # one that resumes with auto may find no checkpoint and begin again, after a fault
        check_metrics_are_new(settings)
    if settings.run.init_from and not resumed and not settings.run.dry_run:
        for line in huggingface.check_weights(settings.run.init_from, settings.model, settings.run.allow_mismatch):
            warn(line)
    huggingface.check_export(settings)
    for name, there in model.items():
        here = getattr(settings.model, name)
        given = f"{flag(name)} {here}"
        if "preset" in flags and name not in flags:
            given = f"--preset {flags['preset']}: has {given}"
        need(here == there or name == "preset" or settings.run.allow_mismatch,
             f"{given}: the checkpoint's model has {there}; give --allow-mismatch to change it")
    if resumed:
        warn_of_schedule(settings, resumed)
    return settings


def preset_of(flags: dict[str, Any], before: str) -> dict[str, Any]:
    """All settings of a model by the preset that a flag gives; {} if it is the one from before, whose settings, and
    what flags then changed in them, the checkpoint has."""
    name = flags.get("preset", before)
    if name == before or name not in PRESETS:
        return {}
    return asdict(config.Model(preset=name)) | PRESETS[name]


def warn_of_schedule(settings: Config, resumed: dict[str, Any]) -> None:
    """Say if a run that ended, with its learning rate at the lowest, is continued."""
    optim, ended, step = settings.optim, resumed["settings"]["steps"], resumed["step"]
    if ended and step >= ended and optim.steps > step and "constant" not in (
            optim.lr_schedule, resumed["settings"]["lr_schedule"]) and optim.min_lr < optim.lr:
        warn(f"--steps {optim.steps}: the learning rate rises again, from --min-lr {optim.min_lr:.3g}, where the "
             f"schedule of {ended} steps had ended; --lr-schedule constant --lr {optim.min_lr:.3g} would keep it there")


def from_command_line() -> Config:
    """Parse the command line of this process, which may be one of many ranks. If it names neither grid nor model, the
    grid is taken from SHOWN, and on GPUs the model from ON_GPUS."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until run/faults.py listens: Ctrl-C ends without imports' traceback
    for name in ("stdout", "stderr"):  # a closed one is None, and a checkpoint's file would get its number
        setattr(sys, name, getattr(sys, name) or open(os.devnull, "w"))
    sys.stdout.reconfigure(errors="backslashreplace")  # in the C locale it could not print a prompt, for example
    # Of GPUs' memory, which torch reads when CUDA starts: what ZeRO-3 frees and allocates again leaves no holes.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    arguments = sys.argv[1:]
    try:
        os.getcwd()  # raises OSError if it is gone
        ranks = ranks_started()
        names = {f.name for section in (config.Model, config.Grid) for f in fields(section)} | {"resume", "init_from"}
        given = config.read(arguments)
        if ranks in SHOWN and not given.keys() & names:
            with contextlib.suppress(ValueError):  # a batch that only pure data parallelism can divide, for example
                settings = parse([*SHOWN[ranks], *(ON_GPUS if has_gpus(given) else ()), *arguments], ranks)
                settings.grid_is_example = True
                return settings
        return parse(arguments, ranks)
    except OSError as error:
        refuse(ValueError(f"{error.filename or 'the current folder'}: {error.strerror}"))
    except ValueError as error:
        refuse(error)


def ranks_started() -> int:
    """How many ranks there are. Raises ValueError for what their launcher has set wrongly, or forgotten."""
    for name, number in dict(LOCAL_RANK=r"\d+", LOCAL_WORLD_SIZE=r"[1-9]\d*").items():
        text = os.environ.get(name, "1")
        need(re.fullmatch(number, text), f"{name}={text}: is no number: start ranks with torchrun, which sets it")
    if "WORLD_SIZE" not in os.environ:
        return 1
    here = {name: os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK", "MASTER_PORT", "MASTER_ADDR")}
    ranks, rank, port, address = here.values()
    need(all(map(str.isdecimal, (ranks, rank, port))) and int(rank) < int(ranks) < 2**31 and int(port) < 2**16
         and address,
         f"{' '.join(f'{name}={text}' for name, text in here.items())}: no rank can start with these: start ranks with "
         "torchrun, which sets them")
    return int(ranks)


def has_gpus(given: dict[str, Any]) -> bool:
    """Whether each rank of this machine can have a GPU; torch, which knows for certain, has not been imported yet."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(os.listdir(GPUS)) if os.path.isdir(GPUS) else 0
    count = count if visible is None else min(count, len([name for name in visible.split(",") if name]))
    return given.get("device") != "cpu" and count >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def check_paths(settings: Config) -> None:
    """Raises ValueError for what cannot be read or written; run/checkpoint.py finds the rest of --checkpoint-dir."""
    run = settings.run
    for name in ("data", "val_data"):
        for path in getattr(settings.data, name):
            need(os.path.exists(path), f"{flag(name)} {path}: no such file or folder")
    for name in ("checkpoint_dir", "export_hf", "tensorboard", "profile"):
        path = getattr(run, name)
        need(not os.path.exists(path) or os.path.isdir(path), f"{flag(name)} {path}: is a file, name a folder")
        if path and name != "checkpoint_dir":
            check_folder(f"{flag(name)} {path}", Path(path))
    for name, package in dict(tensorboard="tensorboard", wandb="wandb", sample_chat="transformers").items():
        value = getattr(run, name)
        need(not value or run.dry_run or is_installed(package),
             f"{flag(name)} {value}: needs a package that is not installed: pip install {package}")
    for name in ("memory_snapshot", "metrics"):
        if path := getattr(run, name):
            taken = [folder for folder in (run.checkpoint_dir, run.export_hf) if folder]
            check_file(f"{flag(name)} {path}", path, taken)
    if os.path.isfile(run.metrics) and not run.dry_run:  # which is what a resumed run cuts, so it must be of metrics
        with open(run.metrics, "rb") as file:
            need(os.path.getsize(run.metrics) == 0 or any(line.startswith(METRIC) for line in file),
                 f"--metrics {run.metrics}: has lines, but none of metrics: name another file, or remove it")


def check_metrics_are_new(settings: Config) -> None:
    """Raises ValueError if --metrics has steps, which a run that begins would erase. A dry run erases nothing."""
    path = settings.run.metrics
    if os.path.isfile(path) and not settings.run.dry_run:
        with open(path, "rb") as file:
            need(not any(line.startswith(METRIC) for line in file),
                 f"--metrics {path}: has steps of another run: give --resume auto to continue it, or another file")


def is_installed(package: str) -> bool:
    """Whether Python finds the package. A folder of its name, such as the one that wandb makes, has no origin."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def check_folder(what: str, path: Path) -> None:
    """Whether JSON and tensors can be written into a folder that may not be there yet."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()  # which has no name
    except OSError as error:
        raise ValueError(f"{what}: {there} cannot be written to: {error.strerror}") from None
    for file in (*path.glob("*.json"), *path.glob("*.safetensors")):
        need(file.is_file(), f"{what}: has {file.name}, which is no file, name another folder")


def check_file(what: str, path: str, folders: list[str]) -> None:
    """Whether this file can be written, in a folder that is made if it is not there. folders: of other files."""
    folder = str(next(parent for parent in Path(path).absolute().parents if parent.exists()))
    need(os.path.isdir(folder), f"{what}: {folder} is a file")
    taken = [os.path.realpath(os.path.join(folder, name)) for folder in folders for name in ("", "latest", "lock")]
    need(os.path.realpath(path) not in taken,
         f"{what}: is the folder of --checkpoint-dir or --export-hf, name a file that checkpoints do not have")
    need(not os.path.isdir(path), f"{what}: is a folder, name a file")
    need(not Path(path).is_fifo() or is_stdout(path), f"{what}: is a pipe, name a file")
    with contextlib.suppress(FileNotFoundError):
        os.stat(path)  # raises OSError for a link to itself
    target = path if os.path.exists(path) else folder
    need(os.access(target, os.W_OK), f"{what}: {target} cannot be written to")


def is_stdout(path: str) -> bool:
    """Whether this file, such as /dev/stdout, is where standard output goes."""
    return os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(1))


# ---- run.json of checkpoints ----------------------------------------------------------------------------------------

def checkpoints_in(folder: str | Path) -> list[Path]:
    """The checkpoints in a folder, newest first."""
    found = [path.parent for path in Path(folder).glob("step-*/run.json")]
    return sorted((path for path in found if step_of(path) >= 0), key=step_of, reverse=True)


def checkpoints_at(path: str, what: str) -> list[Path]:
    """The checkpoint at this path, or the checkpoints in this folder, newest first. what: the name of the path in
    errors. Raises ValueError if there is none."""
    found = [Path(path)] if Path(path, "run.json").is_file() else checkpoints_in(path)
    need(found != [], f"{what}: is no checkpoint, and no folder that has any")
    return found


def step_of(path: Path) -> int:
    """The step in a checkpoint's name; -1 if it is no such name."""
    digits = path.name.removeprefix("step-")
    return int(digits) if digits.isdecimal() else -1


def candidates(resume: str, out: str) -> list[Path]:
    """The checkpoints that --resume may take, newest first. Raises ValueError if there are none where it points."""
    if not resume:
        return []
    if resume == "auto":
        need(out != "", "--resume auto needs --checkpoint-dir, the folder to look in")
        return checkpoints_in(out)
    return checkpoints_at(resume, f"--resume {resume}")


def resumed_run(resume: str, out: str) -> dict | None:
    """run.json of the newest checkpoint where that is undamaged; None if there is nothing to resume."""
    problems = []
    for path in candidates(resume, out):
        try:
            run = read_run(path)
        except ValueError as error:
            problems.append(error)
            continue
        settings = {name: value for name, value in run["settings"].items() if name not in NOT_INHERITED}
        settings["betas"] = tuple(settings["betas"])  # JSON has no tuples
        if os.path.realpath(settings["checkpoint_dir"]) != os.path.realpath(path.parent):  # a copy of the checkpoint
            settings |= dict.fromkeys(("checkpoint_dir", "metrics", "tensorboard", "wandb"), "")
            settings |= {} if out else dict(save_every=0)
        return run | dict(settings=settings)
    if problems:
        raise problems[0]
    return None


def read_run(path: str | Path) -> dict[str, Any]:
    """run.json of a checkpoint. A setting that it lacks has its default. Raises ValueError as `read_json` does, and if
    anything else is missing."""
    run = read_json(path)
    run["described"] = DESCRIBED | dict(eos=[]) | run.get("described", {})
    for name in sorted(CONTENT.keys() - run.keys()):
        raise ValueError(f"{path}/run.json has no {name}")
    return run | {name: example | run[name] for name, example in CONTENT.items() if isinstance(example, dict)}


def read_json(path: str | Path) -> dict[str, Any]:
    """run.json of a checkpoint, which has its files and perhaps more. Raises ValueError if it is missing, damaged or of
    another format, or has a setting that this version does not know."""
    file = Path(path, "run.json")
    try:
        run = json.loads(file.read_text())
        expected, _ = run.pop("checksum"), run["files"]
    except FileNotFoundError:
        raise ValueError(f"{path} is no checkpoint: it has no run.json") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ValueError(f"{file} is damaged or cannot be read") from None
    need(checksum_of_json(run) == expected, f"{file} is damaged: its checksum differs")
    need(run.get("format") == CHECKPOINT_FORMAT,
         f"{path} has format {run.get('format')}, and this version reads {CHECKPOINT_FORMAT}")
    for section in SECTIONS:
        if isinstance(run.get(section), dict):  # else it is damaged, see below
            run[section] = {config.RENAMED.get(name, name): value for name, value in run[section].items()}
    for name, example in (CONTENT | dict(described=DESCRIBED)).items():
        value = run.get(name, example)
        need(is_of_kind(value, example), f"{file} is damaged: its {name} is of another kind")
        need(type(value) is not int or 0 <= value < 2**63, f"{file} is damaged: its {name} is {value}")
        for inner, its_example in example.items() if isinstance(example, dict) else ():
            need(is_of_kind(value.get(inner, its_example), its_example),
                 f"{file} is damaged: its {name} {inner} is of another kind")
    for section in SECTIONS:
        for name, value in run.get(section, {}).items():
            need(name in FIELDS and not problem_of(name, value),
                 f"{file} is of another version: it has a setting that is unknown here, {name} {value}")
    need(all(len(ends) == 2 for ends in run.get("left_out", [])), f"{file} is damaged: its left_out are no ranges")
    return run


def checksum_of_json(content: dict) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


# ---- mistakes -------------------------------------------------------------------------------------------------------

def refuse(error: ValueError, program: str = "train.py") -> NoReturn:
    """End this rank with exit code 2 because of a mistake of the user, which every rank of a node must find.

    The first rank of the node says it. The others wait a moment, because torchrun kills all as soon as one has ended.
    """
    local_rank = os.environ.get("LOCAL_RANK", "0")
    if local_rank == "0" or not local_rank.isdecimal():
        print(f"{program}: {error}", file=sys.stderr, flush=True)
        tell_torchrun(f"{program}: {error}")
    else:
        time.sleep(2)
    sys.stdout.flush()
    os._exit(2)  # at once, without destroying process groups, whose other ranks may be gone


def say(line: str, program: str = "train.py") -> None:
    from tqdm import tqdm
    tqdm.write(f"{program}: {line}", file=sys.stderr)  # tqdm moves its progress bar out of the way
    sys.stderr.flush()


SOON_S, LATER_S = 5, 30  # seconds until a first line about slow work, and from one such line to the next


@contextlib.contextmanager
def told_if_slow(what: str, program: str = "train.py") -> Iterator[None]:
    """Print a line if the body takes longer than SOON_S, and another one every LATER_S, with the seconds so far. Only
    the first rank prints. what: the work in words, such as "saving a checkpoint"."""
    over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        pause = SOON_S
        while not over.wait(pause):
            say(f"{what}: {time.monotonic() - began:.0f} s so far", program)
            pause = LATER_S

    thread = threading.Thread(target=tell, daemon=True)
    if os.environ.get("RANK", "0") == "0":
        thread.start()
    try:
        yield
    finally:
        over.set()


speaking = contextvars.ContextVar("speaking", default=False)  # whether only this rank does the current work


def note(line: str) -> None:
    """Print a line about the data, on the first rank, or on the only rank that does the work (`speaking`)."""
    if os.environ.get("RANK", "0") == "0" or speaking.get():
        from tqdm import tqdm
        tqdm.write(f"data: {line}", file=sys.stderr)
        sys.stderr.flush()


def warn(line: str) -> None:
    """Say something about the settings, by the first rank."""
    if os.environ.get("RANK", "0") == "0":
        say(f"warning: {line}")


def counted(count: int, noun: str) -> str:
    """Such as "1 file" and "2,000 files"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def tell_torchrun(line: str) -> None:
    """Let torchrun's report say why this rank failed. The file is what torch.distributed.elastic's @record would write.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = dict(py_callstack=line, timestamp=str(int(time.time())))
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump(dict(message=dict(message=line, extraInfo=extra)), file)
