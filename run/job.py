"""A run on one rank: its parts and its progress; how it begins or resumes, saves, and goes back to a checkpoint."""
import os
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

import config
from assemble import DTYPES, build
from checks import need
from collectives import Group, Groups, agree, gather_objects, host_group, rank, size
from model import Llama
from param import draw
from run import checkpoint, faults, huggingface
from run.checkpoint import Saver
from run.data import Corpus, Samples
from run.log import Log
from zero import Optimizer


@dataclass
class RunState:
    """The progress of a run. Checkpoints save all fields except `activity`."""
    step: int = 0  # number of completed steps
    samples: int = 0  # the number of the next sample: those before it have been read or left out
    tokens: int = 0  # trained on so far
    skipped: int = 0  # number of steps without an update: the gradient was not finite, or a spike
    norms: list[float] = field(default_factory=lambda: [0, 0.0, 0.0])  # see faults.Guard
    left_out: list[list[int]] = field(default_factory=list)  # samples [first, end) that rewinds have left out
    rewinds: int = 0  # number of times that the run has gone back to a checkpoint
    activity: str = "before the first step"  # what the run is doing, for error messages

    def progress(self) -> dict:
        return {name: value for name, value in asdict(self).items() if name != "activity"}

    def restore(self, saved: dict) -> None:
        for name in self.progress().keys() & saved.keys():  # a checkpoint of an earlier version may lack some
            setattr(self, name, saved[name])


@dataclass
class Job:
    """The parts of a run on this rank. `begin_or_resume` fills the tokenizer and those that are None, and then train.py
    `guard`."""
    settings: config.Config
    groups: Groups
    device: torch.device
    training: Samples
    validation: Samples | None
    state: RunState
    log: Log
    tokenizer: str = ""  # the folder with the run's tokenizer.json, "" if there is none
    host: Group = None  # all ranks, on gloo: for threads and CPU tensors
    model: Llama | None = None
    optimizer: Optimizer | None = None
    saver: Saver | None = None
    guard: faults.Guard | None = None


def begin_or_resume(job: Job) -> None:
    """Make the model and its optimizer, with initial weights or those of a checkpoint; and the Saver, if the run saves.
    Raises ValueError, on every rank, for a checkpoint, data or a folder that cannot be used."""
    settings, run, path, tokenizer = job.settings, job.settings.run, None, ""
    if run.out or run.resume or run.init_from or run.export_hf:
        job.host = host_group(run.timeout)
    for samples in filter(None, (job.training, job.validation)):
        agree(samples.identity, job.host)  # reads the tokens, so bad ones are refused now
    sections = [section for name, section in asdict(settings).items() if name not in ("data", "given", "arguments")]
    faults.agree_on({"settings": sections, "data": job.training.identity(),
                     "version of Python or torch": (sys.version, torch.__version__)}, job.groups["world"], job.device)
    dtype = DTYPES[settings.precision.dtype]
    job.model, job.optimizer = build(settings, job.groups, job.device, dtype, filled=False)
    if run.resume:
        found = agree(lambda: config.candidates(run.resume, run.out), job.host)
        path = find_whole(gather_objects(found, job.host)[0], job.host)
        saved = config.read_run(path)
        agree(lambda: check_data(job.training, saved, settings), job.host)
        restore(job, path, saved)
        tokenizer = saved["tokenizer"]
    else:
        agree(lambda: job.optimizer.load(
            huggingface.source(run.init_from) if run.init_from else draw(settings.optim.seed)), job.host)
    job.tokenizer = tokenizer_folder(run.init_from, tokenizer, job.training.corpus)
    open_saver(job, path)


def open_saver(job: Job, path: Path | None) -> None:
    """Make the Saver, if the run saves, and say where the run continues. path: the checkpoint that is resumed."""
    run, state, steps = job.settings.run, job.state, job.settings.optim.steps
    out = run.out if state.step < steps else ""  # after the last step there is nothing left to save
    folder = out or (run.export_hf and os.path.join(run.export_hf, ".checkpoint"))
    continues = path is not None and os.path.realpath(path.parent) == os.path.realpath(folder)
    if folder:
        pieces = list(checkpoint.pieces_of_run(job.optimizer, job.model.routers, job.groups, saving=True))
        job.saver = Saver(folder, pieces, run.keep, job.host, state.step if continues else 0, temporary=not out)
    done = state.step if state.step >= steps else None
    if out and (continues or not path):
        done = job.saver.done_before
    if rank(job.groups["world"]) == 0 and (path or done):
        print(where_it_continues(path, state.step, done), flush=True)


def where_it_continues(path: Path | None, step: int, done: int | None) -> str:
    """The line that names the checkpoint of this step and what is lost. done: how many steps the run before had done;
    None if that is not known."""
    begins = f"resumed {path} after {step} steps" if path else "begins at step 0, as there is no checkpoint"
    if done is None:
        return f"{begins}: later steps, if there were any, are lost and taken again"
    lost = max(0, done - step)
    return f"{begins}: {lost} later step{'s are' if lost != 1 else ' is'} lost{' and taken again' if lost else ''}"


def find_whole(candidates: list[Path], group: Group) -> Path:
    """The first checkpoint that is undamaged; damaged ones are named on stderr. Raises ValueError if all are."""
    need(candidates != [], "the checkpoint to resume is gone: another run has removed it")
    for path in candidates:
        try:
            agree(partial(checkpoint.verify, path, rank(group), size(group)), group)
            return path
        except ValueError as error:
            if path is candidates[-1]:
                raise
            if rank(group) == 0:
                print(f"train.py: warning: {error}: passed over", file=sys.stderr, flush=True)


def restore(job: Job, path: Path, saved: dict) -> None:
    """Load the checkpoint at `path` into the job. saved: its run.json."""
    job.state.restore(saved)
    checkpoint.load(path, job.optimizer, job.model.routers, job.groups, job.host)


def check_data(training: Samples, saved: dict, settings: config.Config) -> None:
    """Raises ValueError if the training data is not that of the checkpoint. saved: the checkpoint's run.json."""
    for name, value in training.identity().items():
        need(value == saved["corpus"][name] or settings.run.insist,
             f"--resume {settings.run.resume}: the data differs, its {name} was {saved['corpus'][name]} and is "
             f"{value}; give --insist to change it")


def description(job: Job) -> dict:
    """The content of run.json except the list of files: progress, settings, model, grid, data, tokenizer."""
    settings, given = job.settings, dict(job.settings.given)
    for name in ("data", "val_data"):
        given[name] = [os.path.abspath(path) for path in given[name]]
    for name in ("out", "metrics"):
        given[name] = given[name] and os.path.abspath(given[name])
    return job.state.progress() | dict(
        settings=given, model=asdict(settings.model), grid=asdict(settings.grid), ranks=size(job.groups["world"]),
        corpus=job.training.identity(), tokenizer=job.tokenizer, torch=torch.__version__)


def tokenizer_folder(init_from: str, resumed: str, corpus: Corpus) -> str:
    """The folder with the run's tokenizer.json: --init-from, the resumed run's, or the data's. "" if there is none."""
    for folder in (init_from, resumed, "" if corpus.is_text else str(corpus.files[0].parent)):
        if folder and os.path.isfile(os.path.join(folder, "tokenizer.json")):
            return os.path.abspath(folder)
    return ""


def save(job: Job) -> dict:
    """Start to save the current state in the background. Returns the metrics save_wait_s and save_gb_per_s."""
    job.state.activity = f"saving after step {job.state.step - 1}"
    job.state.norms = job.guard.norms.tolist()
    wait = job.saver.save(job.state.step, description(job))
    return dict(save_wait_s=wait, save_gb_per_s=job.saver.bytes_per_s / 1e9)


def rewind(job: Job) -> None:
    """Go back to the newest checkpoint from before the consecutive skipped steps, and leave out their samples.
    Raises faults.Failure if --rewind does not allow it, or if there is no such checkpoint."""
    state, run, guard = job.state, job.settings.run, job.guard
    (step, samples), (_, last) = guard.streak[0], guard.streak[-1]
    what = f"{len(guard.streak)} steps in a row, from step {step} on, were skipped"
    if state.rewinds >= run.rewind:  # a resumed run may allow fewer than there were
        raise faults.Failure(f"{what}: lower --lr, raise --max-skipped, or allow to go back to the last checkpoint and "
                             "leave out these samples, with --rewind" + (f" {run.rewind + 1}" if run.rewind else ""))
    state.activity = f"going back from step {state.step}"
    job.saver.finish()
    paths = [path for path in config.checkpoints_in(run.out) if config.step_of(path) <= step]
    paths, *_ = gather_objects(paths, job.host)  # those that the first rank sees
    if not paths:
        raise faults.Failure(f"{what}, and there is no checkpoint of an earlier step")
    path = find_whole(paths, job.host)
    left_out, rewinds = [*state.left_out, [samples.start, last.stop]], state.rewinds + 1
    restore(job, path, config.read_run(path))
    state.left_out, state.rewinds = left_out, rewinds
    guard.streak.clear()
    guard.norms.copy_(torch.tensor(state.norms, dtype=guard.norms.dtype))
    job.saver.begin_at(state.step)
    job.log.begin(state.step)
    faults.warn(f"{what}: went back to {path} and left out samples {samples.start} to {last.stop - 1}",
                job.groups["world"])
