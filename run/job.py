"""A run on one rank: its beginning, the work between two steps, resuming, going back to a checkpoint, and its end.

`started` sets up the device, the world of ranks, signals and the watchdog. train.py uses `Run`: first `begin` and
`load`, then, for every step, `steps`, `to_sum` and `end_step`.
"""
import contextlib
import gc
import math
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from core import collectives, config
from core.collectives import ALONE, MAX, Group, Groups, all_reduce
from core.config import need
from core.groups import within_site
from core.param import IGNORED, Source, Spec, draw
from plan import search
from pp import Pipeline, profile_range
from run import checkpoint, cli, device, faults, generate, huggingface
from run.checkpoint import Saver
from run.data import Corpus, MicroBatch, Samples, note_shared, open_samples
from run.log import GradientNoise, Log, profiling
from run.ranks import HostCopy, agree, gather_objects, host_group, meet
from run.tokenizing import Codec, codec_of, description_of, same_tokenizer

BEFORE = "before the first step"
ROOT = Path(__file__).parent.parent


@dataclass
class RunState:
    """The progress of a run. Checkpoints save all fields except `activity`."""
    step: int = 0  # number of completed steps
    samples: int = 0  # the number of the next sample: those before it have been read or left out
    tokens: int = 0  # trained on so far
    skipped: int = 0  # number of steps without an update: the gradient was not finite
    left_out: list[list[int]] = field(default_factory=list)  # samples [first, end) that rewinds have left out
    rewinds: int = 0  # number of times that the run has gone back to a checkpoint
    activity: str = BEFORE  # the current activity, for error messages

    def progress(self) -> dict:
        return {name: value for name, value in asdict(self).items() if name != "activity"}

    def restore(self, saved: dict) -> None:
        for name in self.progress():
            setattr(self, name, saved[name])


@dataclass
class Step:
    """A step's number and data and, from `end_step` on, the results that the host reads later."""
    number: int
    samples: range  # of the global batch
    tokens: int  # since the beginning of the run, including this step
    micro_batches: list[MicroBatch]  # of this rank
    began: float = 0.0  # by time.perf_counter
    lr: float = 0.0
    sent: Counter[str] | None = None  # bytes by axis
    results: HostCopy | None = None


@dataclass
class Run:
    """The parts of a run on this rank. `begin`, `load` and `steps` fill those that are None."""
    settings: config.Config
    training: Samples
    validation: Samples | None
    device: torch.device
    device_reason: str  # why this device, for the first line
    state: RunState = field(default_factory=RunState)
    stop: faults.Stop = field(default_factory=faults.Stop)
    watchdog: faults.Watchdog | None = None
    groups: Groups | None = None
    model: torch.nn.Module | None = None  # a model.Llama
    log: Log | None = None
    host: Group = ALONE  # all ranks, on gloo: for threads and CPU tensors
    optimizer: Any = None  # a zero.Optimizer
    published: str = ""  # the folder with the model that the run, or the one it continues, began with; "": none
    tokenizer: str = ""  # the folder with the run's tokenizer.json, "" if there is none
    described: dict = field(default_factory=dict)  # what an export says of the data, see cli.DESCRIBED
    codec: Codec | None = None  # for --sample-prompt
    saver: Saver | None = None
    resumed: Path | None = None  # the checkpoint that the run was resumed from
    local_micro_batches: Callable[..., list[MicroBatch]] | None = None  # train.py's
    guard: faults.Guard | None = None
    noise: GradientNoise | None = None
    step: Step | None = None  # the one that the loop is in

    def begin(self, groups: Groups, model: torch.nn.Module, pipeline: Pipeline) -> None:
        """Say what will happen, and find out whether it can. Raises ValueError, on every rank."""
        self.groups, self.model, self.pipeline = groups, model, pipeline
        settings, run = self.settings, self.settings.run
        if self.watchdog:
            self.watchdog.learn(groups)
        self.log = Log(settings, groups, self.device)
        self.log.start(self.device_reason, model, self.training)
        device.check_memory(settings, groups["pp"].rank, self.device)
        if run.checkpoint_dir or run.resume or run.init_from or run.export_hf or run.tensorboard or run.wandb:
            self.host = host_group(run.timeout)
        need(not self.validation or self.validation.corpus.is_text == self.training.corpus.is_text,
             "--val-data: is text and --data token files, or the other way round: give both of one kind")
        if self.validation:
            note_shared(self.training, self.validation)
        for samples in filter(None, (self.training, self.validation)):
            world, corpus = groups["world"], samples.corpus
            outside = torch.tensor(corpus.outside(world.rank, world.size), device=self.device)
            all_reduce(outside, world, MAX)
            if outside >= 0:
                corpus.refuse(int(outside))
        sections = [section for name, section in asdict(settings).items()
                    if name not in ("data", "before_defaults", "arguments")]
        faults.agree_on({"settings": sections, "data": self.training.identity(),
                         "version of Python or torch": (sys.version, torch.__version__)}, groups["world"], self.device)
        if run.tensorboard or run.wandb:
            agree(self.log.open_curves, self.host)

    def load(self, optimizer) -> None:
        """Initial weights, published ones, or the state of a checkpoint; then the Saver, if the run saves. Raises
        ValueError, on every rank, for a checkpoint, data or a folder that cannot be used."""
        self.optimizer, settings, asked, saved = optimizer, self.settings, self.settings.run, {}
        if asked.resume:
            found = agree(lambda: cli.candidates(asked.resume, asked.checkpoint_dir), self.host)
            with cli.told_if_slow("comparing the checkpoint's files with their checksums"):
                self.resumed = find_whole(gather_objects(found, self.host)[0], self.host)
            saved = cli.read_run(self.resumed)
            agree(lambda: check_data(self.training, saved, settings), self.host)
            restore(self, self.resumed, saved)
        else:
            doing = f"reading the weights of {asked.init_from}" if asked.init_from else "drawing the initial weights"
            with cli.told_if_slow(doing):
                agree(lambda: load_first(self, initial_weights(settings)), self.host)
        self.published = os.path.abspath(asked.init_from) if asked.init_from else saved.get("published", "")
        self.tokenizer = tokenizer_folder(asked.init_from, saved.get("tokenizer", ""), self.training.corpus)
        longest = max(settings.batch.seq_len, saved["described"]["longest"] if saved else 0)
        self.described = description_of(self.training.corpus) | dict(longest=longest)
        if asked.sample_prompt:
            self.codec = agree(lambda: codec_of(self.training.corpus, self.tokenizer), self.host)
            agree(lambda: self.codec and self.codec.prompt(asked.sample_prompt, asked.sample_chat), self.host)
        path, step = self.resumed, self.state.step
        if asked.checkpoint_dir and (step < settings.optim.steps or (asked.export_hf and not path)):
            pieces = list(checkpoint.pieces_of_run(optimizer, self.model.routers, self.groups, saving=True))
            continues = path is not None and os.path.realpath(path.parent) == os.path.realpath(asked.checkpoint_dir)
            self.saver = Saver(asked.checkpoint_dir, pieces, asked.keep_checkpoints,
                               self.host, step if continues else None)
        if path and self.log.is_first_rank:
            print(f"resumed {path} after {cli.counted(step, 'step')}", flush=True)
            if 0 < settings.optim.steps <= step:
                print(f"nothing to train: --steps {settings.optim.steps} counts from the beginning of the run, which "
                      f"has {step}", flush=True)

    def steps(self, local_micro_batches: Callable[..., list[MicroBatch]]) -> Iterator[Step]:
        """The steps of a run that begins or is resumed, until --steps are done or it is asked to end; what is due
        between them and after the last. local_micro_batches: train.py's.

        A GPU computes a step while the host issues the next one; only then the host reads the step's results, so that
        the GPU never waits for it. Where something else waits for the step, the host reads them at once.
        """
        settings, state, run = self.settings, self.state, self.settings.run
        self.local_micro_batches = local_micro_batches
        self.log.begin(state.step)
        world, sites = within_site(self.groups)["world"], self.groups["sites"]
        guard = self.guard = faults.Guard(self.stop, world, self.device, sites)
        measured = run.metrics and settings.grid.cp == 1 and self.groups["data"].size > 1
        self.noise = GradientNoise(self.optimizer, self.groups["data"].size) if measured else None
        unread: Step | None = None
        with without_garbage_collector(), profiling(run.profile, run.memory_snapshot, self.log.rank,
                                                    self.device) as profiled_step:
            while state.step < settings.optim.steps and not guard.stopping:
                with profile_range("read data"):
                    self.step = step = read(self)
                yield step
                if unread:
                    self.log.write(read_results(self, unread))
                unread, due = step, due_after(self, step.number)
                heard = settings.grid.sites > 1 and settings.sites_meet(state.step)  # requests to stop, by all sites
                reads_now = guard.stopping or due or heard or not reads_late(self.device)
                if reads_now and not self.too_many_skipped():
                    record, unread = read_results(self, step), None
                    self.log.write(record | pause(self, due))
                profiled_step()
                if self.too_many_skipped():
                    rewind(self)
                    unread = None
        finish(self)

    def to_sum(self) -> torch.Tensor:
        """What Optimizer.step is to sum over ranks: votes of faults.Guard, and the two squares of GradientNoise."""
        votes = self.guard.votes(may_stop=self.settings.sites_meet(self.step.number + 1))
        return torch.cat((votes, self.noise.squares())) if self.noise else votes

    def end_step(self, lr: float, results: dict[str, torch.Tensor]) -> None:
        """Take the results of a step, which the device may still be computing: the summed `to_sum` and the metrics. The
        host reads them later."""
        state, step, votes, sites = self.state, self.step, results.pop("to_sum"), self.settings.grid.sites
        if self.noise:
            votes, squares = votes.tensor_split([-2])
            results |= self.noise.estimate(len(step.samples) // sites * self.settings.batch.seq_len, squares)
        if self.settings.sites_meet(step.number + 1):
            all_reduce(votes[:1], self.guard.sites)  # requests to stop
        state.step, state.samples, state.tokens = state.step + 1, step.samples.stop, step.tokens
        step.results = HostCopy(votes=votes, **results)
        step.lr, step.sent, step.micro_batches = lr, collectives.sent.copy(), []

    def too_many_skipped(self) -> bool:
        return 0 < self.settings.run.max_skipped <= len(self.guard.streak) and not self.guard.stopping


@contextmanager
def started(settings: config.Config) -> Iterator[Run]:
    """What surrounds a run. A mistake of the user before the first step is one line and exit code 2; whatever else
    fails is reported by one rank, see run/faults.py."""
    state, run = RunState(), settings.run
    sys.stdout, sys.stderr = faults.Tolerant(sys.stdout), faults.Tolerant(sys.stderr)
    stop, watchdog, store = faults.Stop(run.time_limit, run.timeout), None, None
    try:
        chosen, reason = device.choose_device(run.device)
        if settings.grid.grid == "auto":
            settings = choose_grid(settings, chosen)
        if settings.precision.dtype == "auto":
            settings.precision.dtype = "bf16" if chosen.type == "cuda" else "fp32"
        device.check_device(settings, chosen)
        need(chosen.type == "cuda" or not run.memory_snapshot, f"--memory-snapshot {run.memory_snapshot}: needs a GPU")
        training = open_samples(settings, settings.data.data, settings.optim.seed)
        validation = open_samples(settings, settings.data.val_data, None) if settings.data.val_data else None
    except ValueError as error:
        cli.refuse(error)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    try:
        if "WORLD_SIZE" in os.environ:
            with cli.told_if_slow("waiting for the other ranks to start"):
                store = meet(run.timeout)
        stop.listen()  # until here a signal ends the process: there is nothing to save
        if store and "TORCHELASTIC_RUN_ID" in os.environ:
            watchdog = faults.Watchdog(store.clone(), run.timeout, lambda: state.activity, stop)
        with collectives.world(chosen, run.timeout, store) if store else contextlib.nullcontext():
            try:
                yield Run(settings, training, validation, chosen, reason, state, stop, watchdog)
            except ValueError as error:
                if state.activity == BEFORE:
                    cli.refuse(error)
                raise
            stop.ending = True
    except Exception as error:
        faults.fail(state.activity, error, watchdog, stop)


def choose_grid(settings: config.Config, chosen: torch.device) -> config.Config:
    """The settings with plan/search.py's grid for this machine, which rank 0 prints. Raises ValueError if none fits."""
    gpu = (torch.cuda.get_device_name(chosen), device.memory_of_device(chosen)) if chosen.type == "cuda" else ()
    machine = search.this_machine(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), *gpu)
    settings, reason = search.fill_grid(settings, int(os.environ.get("WORLD_SIZE", 1)), machine)
    if int(os.environ.get("RANK", 0)) == 0:
        print("auto    " + reason, flush=True)
    return settings


@contextmanager
def without_garbage_collector() -> Iterator[None]:
    """Collect once, then switch Python's collector off: a step leaves no reference cycles, and a collection would only
    delay kernel launches. What a save leaves, its thread collects."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# ---- where a run begins ---------------------------------------------------------------------------------------------

def initial_weights(settings: config.Config) -> Source:
    """Random ones, or those of --init-from, which has none of multi-token prediction."""
    drawn, folder, ahead = draw(settings.optim.seed), settings.run.init_from, f"layers.{settings.model.layers}."
    published = huggingface.source_of(folder) if folder else drawn
    return lambda spec, box: (drawn if spec.name.startswith(ahead) else published)(spec, box)


def load_first(run: Run, source: Source) -> None:
    """Weights, and the biases of routers, which random weights begin with 0."""
    run.optimizer.load(source)
    run.optimizer.load(source, "outer")  # with several sites: as if they had just exchanged them
    for router in run.model.routers:
        spec = Spec(router.name, tuple(router.bias.shape))
        router.bias.copy_(source(spec, (slice(0, len(router.bias)),)))


def find_whole(candidates: list[Path], group: Group) -> Path:
    """The first checkpoint that is undamaged; damaged ones are named on stderr. Raises ValueError if all are."""
    need(candidates != [], "the checkpoint to resume is gone: another run has removed it")
    for path in candidates:
        try:
            agree(partial(checkpoint.verify, path, group.rank, group.size), group)
            return path
        except ValueError as error:
            if path is candidates[-1]:
                raise
            faults.warn(f"{error}: passed over", group)


def restore(run: Run, path: Path, saved: dict) -> None:
    """Load the checkpoint at `path` into the run. saved: its run.json."""
    run.state.restore(saved)
    checkpoint.load(path, run.optimizer, run.model.routers, run.groups, run.host, saved["grid"]["sites"])


def check_data(training: Samples, saved: dict, settings: config.Config) -> None:
    """Raise ValueError if the training data differs from the checkpoint's. saved: the checkpoint's run.json."""
    for name, value in training.identity().items():
        then = saved["corpus"].get(name)
        need(value == then or settings.run.allow_mismatch,
             f"--resume {settings.run.resume}: the data differs: {name} {then} in the checkpoint, {value} now; give "
             f"--allow-mismatch to read what is there now, from sample {saved['samples']:,} on")


def description(run: Run) -> dict:
    """The content of run.json except the list of files: progress, settings, model, grid, data, tokenizer."""
    settings, given = run.settings, dict(run.settings.before_defaults)
    for name in ("data", "val_data"):
        given[name] = [os.path.abspath(path) for path in given[name]]
    for name in ("checkpoint_dir", "metrics", "tensorboard"):
        given[name] = given[name] and os.path.abspath(given[name])
    return run.state.progress() | dict(
        settings=given, model=asdict(settings.model), grid=asdict(settings.grid), ranks=run.groups["world"].size,
        corpus=run.training.identity(), tokenizer=run.tokenizer, published=run.published, described=run.described,
        torch=torch.__version__)


def tokenizer_folder(init_from: str, resumed: str, corpus: Corpus) -> str:
    """The folder with the run's tokenizer.json: --init-from, the resumed run's, or the data's, which is the run's if
    the two differ (--allow-mismatch). "" if there is none."""
    data = "" if corpus.is_text else str(corpus.files[0].parent)
    found = [Path(folder, "tokenizer.json") for folder in (init_from, resumed, data) if folder]
    found = [file for file in found if file.is_file()]
    if not found:
        return ""
    chosen = found[0] if same_tokenizer(found[0], found[-1]) else found[-1]
    return os.path.abspath(chosen.parent)


# ---- what a step reads ----------------------------------------------------------------------------------------------

def read(run: Run) -> Step:
    """The step that is next, with this rank's micro-batches."""
    state, batch, began = run.state, run.settings.batch, time.perf_counter()
    state.activity = f"in step {state.step}"
    collectives.sent.clear()
    run.guard.begin_step()
    sequences = sequences_at(state.tokens, batch.ramp())
    first = faults.next_sample(state.samples, sequences, state.left_out)
    return Step(state.step, range(first, first + sequences), state.tokens + sequences * batch.seq_len,
                micro_batches(run, run.training, first, sequences), began)


def micro_batches(run: Run, samples: Samples, first: int, sequences: int, end: int | None = None) -> list[MicroBatch]:
    """train.py's local_micro_batches, on the device."""
    documents = run.groups["cp"].size == 1  # context parallel ranks read them on the host
    return [micro_batch.to(run.device, documents) for micro_batch in run.local_micro_batches(
        samples, first, sequences, run.settings, run.groups, end)]


def sequences_at(tokens: int, ramp: list[tuple[int, float]]) -> int:
    """The global batch, in sequences, after so many tokens. ramp: see config.Batch.ramp."""
    return [sequences for sequences, start in ramp if start <= tokens][-1]


# ---- between two steps, and at the end ------------------------------------------------------------------------------

def reads_late(device: torch.device) -> bool:
    """Whether a step's results are read after the next step has been issued. On a CPU they are there at once."""
    return device.type == "cuda"


def read_results(run: Run, step: Step) -> dict:
    """Wait for a step's results, let the guard see them, and return the step's metrics."""
    found, state, guard = step.results.read(), run.state, run.guard
    loss, norm, votes = (found.pop(name) for name in ("loss", "norm", "votes"))
    guard.after_step(step.number, step.samples, norm=norm, votes=votes)
    state.skipped += bool(guard.streak)
    metrics = run.log.metrics(step, skipped=state.skipped, loss=loss, norm=norm, seconds=run.log.lap(step.began))
    return metrics | guard.metrics() | found


def due_after(run: Run, step: int) -> set[str]:
    """What is due after this step and needs its results; after the last step, evaluating and saving always are."""
    data, asked = run.settings.data, run.settings.run
    intervals = dict(save=asked.save_every, check=asked.check_replicas,
                     evaluate=data.eval_every if run.validation else 0)
    due = {what for what, every in intervals.items() if every and (step + 1) % every == 0}
    return due | {"evaluate", "save"} if step == run.settings.optim.steps - 1 else due


def pause(run: Run, due: set[str]) -> dict:
    """Between two steps: evaluate, compare replicas and save, if it is time to. Returns their metrics."""
    state, guard, asked, record = run.state, run.guard, run.settings.run, {}
    after = f"after step {state.step - 1}"
    if run.validation and "evaluate" in due and not guard.stopping:
        state.activity = f"evaluating {after}"
        with cli.told_if_slow(state.activity):
            record["val_loss"] = validation_loss(run)
    saves = run.saver and ("save" in due or guard.stopping)
    if asked.check_replicas and ("check" in due or saves):
        record["check_replicas_s"] = faults.check_replicas(run.optimizer, run.model.routers, within_site(run.groups))
    if saves:  # in the background
        state.activity = f"saving {after}"
        with cli.told_if_slow("waiting for the save before this one"):
            record["save_wait_s"] = run.saver.save(state.step, description(run))
        record["save_gb_per_s"] = run.saver.bytes_per_s / 1e9
    return record


def finish(run: Run) -> None:
    """Evaluate if there was no step to run, finish saving, then export and sample, unless the run was asked to end.

    Raises faults.Failure if work is lost or no step updated the weights, so that the run does not pass for a good one.
    """
    settings, state, log, guard, problem = run.settings, run.state, run.log, run.guard, ""
    asked = settings.run
    if log.last_loss is None:  # no step was left to train, so none has done this
        log.print_validation_loss(state.step, pause(run, {"evaluate", "save"}).get("val_loss"))
    log.close(state.step, state.tokens)
    if run.saver:
        state.activity = "saving"
        with cli.told_if_slow(f"saving the checkpoint of step {state.step}"):
            problem = run.saver.finish()
    if guard.stopping and log.is_first_rank:
        print(f"ended after {state.step} of {settings.optim.steps} steps, as asked "
              f"({guard.stop.reason or 'on another rank'})")
    if log.last_loss is not None and state.skipped == state.step and not guard.stopping:
        problem = problem or (f"all {state.step} steps were skipped, so the weights are those of the beginning: lower "
                              "--lr, or look at the data and the weights that the run began with")
    if problem:
        raise faults.Failure(problem)
    if run.saver and log.is_first_rank:
        print(f"saved {Path(asked.checkpoint_dir, f'step-{state.step:06d}')}")
    if asked.export_hf and not guard.stopping:
        state.activity = "exporting"
        dtype = settings.precision.dtype
        path = Path(asked.checkpoint_dir, f"step-{state.step:06d}") if run.saver else run.resumed
        try:
            with cli.told_if_slow(f"exporting the model to {asked.export_hf}"):
                checkpoint.export(path, asked.export_hf, "fp32" if dtype == "fp64" else dtype, run.host)
        except ValueError as error:
            raise faults.Failure(f"--export-hf: {error}") from None
        if log.is_first_rank:
            print(f"exported {path} to {asked.export_hf}")
    if asked.sample_prompt and math.isfinite(log.last_loss or 0.0) and not guard.stopping:
        state.activity = "sampling"
        guessing = math.log(settings.model.vocab)
        if not is_worth_reading(log.last_loss, guessing):
            if log.is_first_rank:
                print(f"no sample: at a loss of {log.last_loss:.2f} it would be noise (guessing has {guessing:.2f})",
                      file=sys.stderr)
        elif run.codec:
            with cli.told_if_slow("sampling"):
                generate.continue_prompt(run.model, run.codec, settings, run.groups, run.device)
        elif log.is_first_rank:
            print("no sample: the data are tokens, without a tokenizer.json beside them", file=sys.stderr)
    if log.last_loss is not None and log.is_first_rank:
        print("\n".join(what_next(run)), flush=True)


def what_next(run: Run) -> list[str]:
    """Two lines of commands after training: one that continues it, and others that sample, export and draw its losses.
    They can be pasted into the shell from which the run was started."""
    asked, state, ranks = run.settings.run, run.state, run.groups["world"].size
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if ranks == 1:
        start = "python train.py"
    elif ranks == here:
        start = f"torchrun --nproc_per_node={ranks} train.py"
    else:
        start = (f"torchrun --nnodes={ranks // here} --nproc_per_node={here} --rdzv_backend=c10d "
                 f"--rdzv_endpoint={os.environ.get('MASTER_ADDR')}:29500 train.py")
    steps = "" if state.step < run.settings.optim.steps else f" --steps {2 * state.step}"
    folder, anyway = quoted(asked.checkpoint_dir), " --allow-mismatch" if asked.allow_mismatch else ""
    first, others = "nothing is saved: --checkpoint-dir FOLDER would save it, to continue, sample or export", []
    if asked.checkpoint_dir:
        first = f"{start} --checkpoint-dir {folder} --resume auto{steps}{anyway}"
        if run.training.corpus.is_text or run.tokenizer:
            prompt = asked.sample_prompt if asked.sample_prompt.isprintable() else ""
            others.append(f"python -m run.generate {folder} --prompt {shlex.quote(prompt or 'The ')}{anyway}")
        with contextlib.suppress(ValueError):  # for a model that no class of transformers has
            huggingface.class_for_export(run.settings.model)
            others.append(f"python -m run.checkpoint export {folder} {quoted(f'{asked.checkpoint_dir}-hf')}")
    if os.path.isfile(asked.metrics):
        others.append(f"python -m learn.pictures loss {quoted(asked.metrics)}")
    away = "" if os.path.samefile(os.curdir, ROOT) else f"cd {shlex.quote(str(ROOT))}; "  # where the commands work
    lines = [away * bool(asked.checkpoint_dir) + first, *([away + "; ".join(others)] if others else [])]
    return [label + line for label, line in zip(("next    ", "        "), lines)]


def quoted(path: str) -> str:
    """A path for a command in the project's folder."""
    return shlex.quote(path if os.path.samefile(os.curdir, ROOT) else os.path.abspath(path))


def is_worth_reading(loss: float | None, guessing: float) -> bool:
    """Whether a sample after training says something: at half of the loss of guessing, ln(vocab), words begin to look
    like words. loss: None if nothing was trained: whoever only samples gets a sample."""
    return loss is None or loss < guessing / 2


def validation_loss(run: Run) -> float | None:
    """The mean loss over the first samples: --eval-steps global batches (of a ramp's first size), or all there are.
    None if the run is asked to end meanwhile, or if none of their tokens is a target."""
    sequences, samples = run.settings.batch.ramp()[0][0], run.validation
    end = min(run.settings.data.eval_steps * sequences, samples.spans)

    def global_batches() -> Iterator[list[MicroBatch]]:
        for first in range(0, end, sequences):
            if run.guard.agree_to_stop():
                return
            yield micro_batches(run, samples, first, sequences, end)
    loss = mean_loss(run.model, run.pipeline, global_batches(), run.groups)
    if loss is None and not run.guard.stopping:
        faults.warn(f"no validation loss: none of the tokens of the {end:,} samples that are evaluated is a target",
                    run.groups["world"])
    return None if run.guard.stopping else loss


@torch.no_grad()
def mean_loss(model: torch.nn.Module, pipeline: Pipeline, global_batches: Iterable[list[MicroBatch]],
              groups: Groups) -> float | None:
    """The mean loss over all valid tokens of all ranks' micro-batches; None if there are none. Every rank must have the
    same number of micro-batches."""
    summed = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)  # losses, tokens

    def forward(given: list[MicroBatch], stage: int, k: int, x: torch.Tensor | None) -> torch.Tensor:
        batch = given[k]
        y = model(batch.tokens, batch.positions, batch.documents, stage=stage, x=x, labels=batch.labels)
        if stage == model.last_stage:
            summed.add_(torch.stack((y.double(), (batch.labels != IGNORED).sum().double())))
        return y

    for given in global_batches:
        engine = pipeline.engine(len(given), evaluating=True)
        engine.run(partial(forward, given), model.boundary_shape(given[0].tokens), model.execution.dtype)
    for axis in ("data", "pp", "sites"):  # each site evaluates its weights on its part of the samples
        all_reduce(summed, groups[axis])
    loss, tokens = summed.tolist()
    return loss / tokens if tokens else None


def rewind(run: Run) -> None:
    """Go back to the newest checkpoint from before the consecutive skipped steps, and leave out their samples.
    Raises faults.Failure if --rewind does not allow it, or if there is no such checkpoint."""
    state, asked, guard = run.state, run.settings.run, run.guard
    (step, samples), (_, last) = guard.streak[0], guard.streak[-1]
    what = f"{len(guard.streak)} steps in a row, from step {step} on, were skipped"
    if state.rewinds >= asked.rewind:  # a resumed run may allow fewer than there were
        raise faults.Failure(f"{what}: lower --lr, raise --max-skipped, or allow to go back to the last checkpoint and "
                             f"leave out these samples, with --rewind{f' {asked.rewind + 1}' if asked.rewind else ''}")
    state.activity = f"going back from step {state.step}"
    run.saver.finish()
    paths = [path for path in cli.checkpoints_in(asked.checkpoint_dir) if cli.step_of(path) <= step]
    paths, *_ = gather_objects(paths, run.host)  # all ranks take the first rank's list
    if not paths:
        raise faults.Failure(f"{what}, and there is no checkpoint of an earlier step")
    path = find_whole(paths, run.host)
    left_out, rewinds = [*state.left_out, [samples.start, last.stop]], state.rewinds + 1
    restore(run, path, cli.read_run(path))
    state.left_out, state.rewinds = left_out, rewinds
    guard.streak.clear()
    run.saver.begin_at(state.step)
    run.log.begin(state.step)
    faults.warn(f"{what}: went back to {path} and left out samples {samples.start} to {last.stop - 1}",
                run.groups["world"])
