"""Train a Llama-style model: read the settings, build the grid, go round the loop.

    python train.py                                   one process
    torchrun --nproc_per_node=8 train.py              8 ranks: NCCL if there is a GPU for each, else CPUs with gloo
    torchrun --nproc_per_node=8 train.py --grid auto  on the grid that is predicted to be the fastest here (search.py)
    python train.py --dry-run --gpus 1024             what a rank of 1,024 would need, compute and send (dryrun.py)
    python train.py --help                            every setting

The file reads from the whole to its parts: the run and its loop; one step; evaluation and sampling; the model and its
optimizer; the choice of a device; what is printed and written.

A step divides every loss by the number of valid tokens of the global batch, so that each gradient is a plain sum over
micro-batches and ranks. The files of the techniques communicate gradients, activations and weights; this one
communicates scalars only: token counts, losses, metrics.
"""
if __name__ == "__main__":
    import config

    settings = config.from_command_line()  # before torch is imported, so that a wrong flag is answered at once

import gc
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

import checkpoint
import collectives
import config
import costs
import dryrun
import faults
import footprint
import huggingface
import search
from checkpoint import Saver, host_group
from checks import need
from collectives import Group, Groups, all_reduce, rank, size
from cp import shard_sequences
from data import Codec, Corpus, MicroBatch, Samples, codec_of
from dp import assign_to_buckets
from ep import Balance, update_biases
from fp8 import RECIPES, Fp8
from graphs import Captured, leave_default_stream
from groups import AXES, build_groups
from model import Execution, Llama
from noise import GradientNoise
from param import IGNORED, acc_dtype, draw
from pp import Pipeline
from profiling import named, profiling
from sampling import sample
from schedules import plan_of
from zero import UPDATE_RULES, Optimizer

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


# ---- the run --------------------------------------------------------------------------------------------------------

@dataclass
class RunState:
    """How far a run has come. Checkpoints save all fields but the activity."""
    step: int = 0  # how many are done
    samples: int = 0  # read from the data so far
    tokens: int = 0  # in these samples
    skipped: int = 0  # steps so far without an update: the gradient was not finite, or a spike
    norms: list[float] = field(default_factory=lambda: [0, 0.0, 0.0])  # see faults.Guard
    left_out: list[list[int]] = field(default_factory=list)  # [first, end] of samples that a rewind has left out
    rewinds: int = 0  # so far
    activity: str = "before the first step"  # for the message if the run fails

    def progress(self) -> dict:
        return {name: value for name, value in asdict(self).items() if name != "activity"}

    def restore(self, saved: dict) -> None:
        for name in self.progress().keys() & saved.keys():  # a checkpoint of an earlier version may lack some
            setattr(self, name, saved[name])


@dataclass
class Job:
    """A run and what it consists of on this rank."""
    settings: config.Config
    groups: Groups
    device: torch.device
    training: Samples
    validation: Samples | None
    state: RunState
    log: "Log"
    host: Group = None  # all ranks, on gloo
    model: Llama | None = None
    optimizer: Optimizer | None = None
    saver: Saver | None = None
    guard: faults.Guard | None = None


def main(settings: config.Config) -> None:
    state, run = RunState(), settings.run
    if run.dry_run:
        return dry_run(settings)
    sys.stdout, sys.stderr = faults.Tolerant(sys.stdout), faults.Tolerant(sys.stderr)
    stop, watchdog = faults.Stop(run.time_limit), None
    stop.listen()
    try:  # mistakes of the user: one line, no traceback
        device, device_reason = choose_device(run.device)
        if settings.grid.grid == "auto":
            settings = choose_grid(settings, device)
        check_device(settings.precision, device)
        need(device.type == "cuda" or not run.memory_snapshot, f"--memory-snapshot {run.memory_snapshot}: needs a GPU")
        training = open_samples(settings, settings.data.data, settings.optim.seed)
        validation = open_samples(settings, settings.data.val_data, None) if settings.data.val_data else None
    except ValueError as error:
        config.refuse(error)
    if settings.precision.dtype == "auto":
        settings.precision.dtype = "bf16" if device.type == "cuda" else "fp32"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            watchdog = faults.Watchdog(run.timeout, lambda: state.activity, stop)
        with collectives.world(device, run.timeout) if "WORLD_SIZE" in os.environ else nullcontext():
            train(settings, training, validation, device, device_reason, state, stop, watchdog)
            stop.ending = True
    except Exception as error:
        faults.fail(state.activity, error, watchdog, stop)


def train(settings: config.Config, training: Samples, validation: Samples | None, device: torch.device,
          device_reason: str, state: RunState, stop: faults.Stop | None = None,
          watchdog: faults.Watchdog | None = None) -> None:
    """device_reason: why this device, for the first line. state is updated as the run goes on."""
    groups = build_groups(settings.grid, settings.model, settings.run.timeout)
    if watchdog:
        watchdog.learn(groups)
    job = Job(settings, groups, device, training, validation, state, Log(settings, groups, device))
    job.log.start(device_reason, training)
    if settings.run.graph:
        leave_default_stream(device)
    try:  # mistakes of the user that show only now, on every rank
        check_memory(settings, groups, device)
        begin_or_resume(job)
    except ValueError as error:
        config.refuse(error)
    job.log.begin(state.step)
    job.guard = faults.Guard(stop or faults.Stop(), groups["world"], device, state.norms, settings.run.skip_spikes)
    run = settings.run
    with without_garbage_collector(), profiling(run.profile, run.memory_snapshot, job.log.rank, device) as end_step:
        train_steps(job, end_step)
    finish(job)


def train_steps(job: Job, end_step: Callable[[], None]) -> None:
    """The loop: until --steps are done, or the run is asked to end. end_step: see profiling.py."""
    settings, groups, state, guard = job.settings, job.groups, job.state, job.guard
    optim, run = settings.optim, settings.run
    measured = run.metrics and settings.grid.cp == 1 and size(groups["data"]) > 1
    noise = GradientNoise(job.optimizer, size(groups["data"])) if measured else None
    compute_gradients = partial(forward_backward, job.model, job.optimizer, groups=groups)
    if run.graph:  # the optimizer's update is not captured, as its learning rate changes
        compute_gradients = Captured(compute_gradients)
    upcoming = read(job) if state.step < optim.steps else None
    while state.step < optim.steps and not guard.stopping:
        step, first, began = state.step, state.samples, time.perf_counter()
        state.activity = f"in step {step}"
        collectives.sent.clear()
        guard.begin_step()
        lr, limit, (sequences, micro_batches) = learning_rate(step, optim), guard.limit(), upcoming
        with named("forward and backward"):
            loss = compute_gradients(micro_batches)
        with named("optimizer"):
            norm = job.optimizer.step(lr, limit, guard.ballot())
        balance = update_balance(job.model, groups, norm < limit, sequences) if settings.model.experts else {}
        state.step += 1
        state.samples += sequences
        state.tokens += sequences * settings.batch.seq
        if state.step < optim.steps:
            with named("read data"):
                upcoming = read(job)  # while the device computes
            state.activity = f"in step {step}"
        loss, norm = collectives.to_host(loss, norm)  # waits for the device
        guard.after_step(step, first, norm, limit)
        state.skipped += bool(guard.streak)
        record = job.log.record(step, state, sequences, loss, norm, lr, time.perf_counter() - began) | guard.metrics()
        record |= {name: value.item() for name, value in balance.items()}
        record |= noise.estimate(sequences * settings.batch.seq) if noise else {}
        if job.validation and not guard.stopping and is_due(step, settings.data.eval_every, optim.steps):
            state.activity = f"evaluating after step {step}"
            record["val_loss"] = validation_loss(job)
        saves = job.saver and (guard.stopping or is_due(step, run.save_every, optim.steps))
        if run.check_replicas and (saves or is_due(step, run.check_replicas, math.inf)):
            record["check_replicas_s"] = faults.check_replicas(job.optimizer, job.model.routers, groups)
        if saves:
            record |= save(job)
        job.log.write(record)
        end_step()
        if len(guard.streak) == run.max_skipped > 0 and not guard.stopping:
            rewind(job)
            upcoming = read(job)


def read(job: Job) -> tuple[int, list[MicroBatch]]:
    """(sequences of the global batch, this rank's micro-batches) of the step that begins now."""
    state = job.state
    state.activity = f"in step {state.step}"
    sequences = sequences_at(state.tokens, job.settings.batch.ramp())
    state.samples = faults.next_sample(state.samples, sequences, state.left_out)
    micro_batches = local_micro_batches(job.training, state.samples, sequences, job.settings, job.groups)
    return sequences, [micro_batch.to(job.device) for micro_batch in micro_batches]


def save(job: Job) -> dict:
    """Save the state after the last step, in the background. Returns what the metrics say of it."""
    job.state.activity = f"saving after step {job.state.step - 1}"
    wait = job.saver.save(job.state.step, description(job))
    return dict(save_wait_s=wait, save_gb_per_s=job.saver.bytes_per_s / 1e9)


def rewind(job: Job) -> None:
    """Go back to the newest checkpoint from before the steps in a row that were skipped, and leave out the samples of
    those. Raises faults.Failure if --rewind does not allow it, or there is none."""
    state, run, guard = job.state, job.settings.run, job.guard
    (step, first), end = guard.streak[0], state.samples
    what = f"{len(guard.streak)} steps in a row, from step {step} on, were skipped"
    if state.rewinds == run.rewind:
        raise faults.Failure(f"{what}: lower --lr, raise --max-skipped, or allow to go back to the last checkpoint and "
                             "leave out these samples, with --rewind" + (f" {run.rewind + 1}" if run.rewind else ""))
    state.activity = f"going back from step {state.step}"
    job.saver.finish()
    before = [path for path in config.candidates("auto", run.out) if config.step_of(Path(path)) <= step]
    before, *_ = checkpoint.exchange(before, job.host)
    if not before:
        raise faults.Failure(f"{what}, and there is no checkpoint of an earlier step")
    path = checkpoint.find_whole(before, job.host)
    left_out, rewinds = [*state.left_out, [first, end]], state.rewinds + 1
    restore(job, path, config.read_run(path))
    state.left_out, state.rewinds = left_out, rewinds
    guard.streak.clear()
    guard.norms = state.norms
    job.saver.set_aside(state.step)
    job.log.begin(state.step)
    faults.warn(f"{what}: went back to {path}, and leave out samples {first} to {end - 1}", job.groups["world"])


def choose_grid(settings: config.Config, device: torch.device) -> config.Config:
    """The settings with what search.py chooses for this machine, which is said. Raises ValueError if nothing fits."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        machine = search.this_machine(ranks_here, gpu.name, gpu.total_memory)
    else:
        machine = search.this_machine(ranks_here)
    settings, reason = search.fill_grid(settings, int(os.environ.get("WORLD_SIZE", 1)), machine)
    if int(os.environ.get("RANK", 0)) == 0:
        print("auto    " + reason, flush=True)
    return settings


def dry_run(settings: config.Config) -> None:
    """Run a step on fake tensors as --rank of --gpus ranks, and print what it would need, compute and send."""
    precision, run, began = settings.precision, settings.run, time.perf_counter()
    if precision.dtype == "auto":
        precision.dtype = "bf16"  # as on GPUs
    try:
        check_device(precision, torch.device("cpu"))
    except ValueError as error:
        config.refuse(error)
    with dryrun.fake_world(run.gpus, run.rank):
        groups = build_groups(settings.grid, settings.model)
        print(first_lines(settings, groups, f"none (dry run), {run.gpus:,} ranks"), flush=True)
        with dryrun.fake_tensors():
            found = measured_step(settings, groups)
        print(dryrun.report(found, groups, memory_of_rank(settings, groups), time.perf_counter() - began))


def measured_step(settings: config.Config, groups: Groups) -> dryrun.DryRun:
    """What this rank needs, computes and sends in the first step, of --batch-ramp's largest batch."""
    model, optimizer = build(settings, groups, torch.device("cpu"), DTYPES[settings.precision.dtype], filled=False)
    sequences = max(sequences for sequences, _ in settings.batch.ramp())
    samples = dryrun.ZeroSamples(settings.batch.seq)
    micro_batches = local_micro_batches(samples, 0, sequences, settings, groups)

    def step() -> None:
        forward_backward(model, optimizer, micro_batches, groups)
        norm = optimizer.step(settings.optim.lr)
        if settings.model.experts:
            update_balance(model, groups, norm.isfinite(), sequences)
    return dryrun.measure(step, model, optimizer, model.pipeline.engine(len(micro_batches)), groups)


def begin_or_resume(job: Job) -> None:
    """Make the model and its optimizer, with initial weights or as a checkpoint has them; and the Saver, if something
    is to be saved. Raises ValueError, on every rank, for a checkpoint, data or a folder that cannot be used."""
    settings, run, state, groups, path = job.settings, job.settings.run, job.state, job.groups, ""
    host = host_group(run.timeout) if run.out or run.resume or run.init_from or run.export_hf else None
    for samples in filter(None, (job.training, job.validation)):
        checkpoint.agree(samples.identity, host)  # reads tokens: one outside the vocabulary ends the run now
    sections = [section for name, section in asdict(settings).items() if name not in ("data", "given")]
    faults.agree_on({"settings": sections, "data": job.training.identity(),
                     "version of Python or torch": (sys.version, torch.__version__)}, groups["world"], job.device)
    dtype = DTYPES[settings.precision.dtype]
    job.host, (job.model, job.optimizer) = host, build(settings, groups, job.device, dtype, filled=False)
    if run.resume:
        found = checkpoint.agree(lambda: config.candidates(run.resume, run.out), host)
        path = checkpoint.find_whole(checkpoint.exchange(found, host)[0], host)
        saved = config.read_run(path)
        checkpoint.agree(lambda: check_data(job.training, saved, settings), host)
        restore(job, path, saved)
        if rank(groups["world"]) == 0:
            print(f"resumed {path} after {state.step} steps: later ones, if there were any, are lost and taken again",
                  flush=True)
    else:
        def fill() -> None:
            job.optimizer.load(huggingface.source(run.init_from) if run.init_from else draw(settings.optim.seed))
        checkpoint.agree(fill, host)
    pieces = list(checkpoint.pieces_of_run(job.optimizer, job.model.routers, groups, saving=True))
    out = run.out if state.step < settings.optim.steps else ""  # without a step left there is nothing to save
    folder = out or (run.export_hf and os.path.join(run.export_hf, ".checkpoint"))
    continues = bool(path) and os.path.realpath(os.path.dirname(path)) == os.path.realpath(folder)
    if folder:
        job.saver = Saver(folder, pieces, run.keep, host, state.step if continues else 0, temporary=not out)


def restore(job: Job, path: str, saved: dict) -> None:
    """Load a checkpoint. saved: its run.json."""
    job.state.restore(saved)
    checkpoint.load(path, job.optimizer, job.model.routers, job.groups, job.host)


def check_data(training: Samples, saved: dict, settings: config.Config) -> None:
    """Raises ValueError if the samples are not those of the checkpoint, of which `saved` is the run.json."""
    for name, value in training.identity().items():
        need(value == saved["corpus"][name] or settings.run.insist,
             f"--resume {settings.run.resume}: the data differs, its {name} was {saved['corpus'][name]} and is "
             f"{value}; give --insist to change it")


def description(job: Job) -> dict:
    """run.json without its list of files: progress, settings, model, grid, data, tokenizer."""
    settings, given = job.settings, dict(job.settings.given)
    for name in ("data", "val_data"):
        given[name] = [os.path.abspath(path) for path in given[name]]
    for name in ("out", "metrics"):
        given[name] = given[name] and os.path.abspath(given[name])
    return job.state.progress() | dict(
        settings=given, model=asdict(settings.model), grid=asdict(settings.grid), ranks=size(job.groups["world"]),
        corpus=job.training.identity(), tokenizer=tokenizer_folder(settings, job.training), torch=torch.__version__)


def tokenizer_folder(settings: config.Config, training: Samples) -> str:
    """The folder of the run's tokenizer.json: that of --init-from, of the checkpoint's run, or of the token files."""
    run, corpus = settings.run, training.corpus
    resumed = config.resumed_run(run.resume, run.out) or dict(tokenizer="")
    for folder in (run.init_from, resumed["tokenizer"], "" if corpus.is_text else str(corpus.files[0].parent)):
        if folder and os.path.isfile(os.path.join(folder, "tokenizer.json")):
            return os.path.abspath(folder)
    return ""


def finish(job: Job) -> None:
    """After the last step: evaluate, if no step did; finish saving and export; sample. Of a run that was asked to end:
    finish saving."""
    settings, state, log, saver, problem = job.settings, job.state, job.log, job.saver, ""
    run, stopping = settings.run, job.guard.stopping
    if job.validation and log.last_loss is None:
        state.activity = "evaluating"
        log.validated(state.step, validation_loss(job))
    log.close(state)
    if saver:
        state.activity = "saving"
        if log.last_loss is None:  # no step was left to train, so none has saved
            saver.save(state.step, description(job))
        problem = saver.finish()
    if stopping and rank(job.groups["world"]) == 0:
        saved = f"continue with --out {run.out} --resume auto" if run.out else "nothing is saved: there is no --out"
        print(f"ended after {state.step} of {settings.optim.steps} steps, as asked "
              f"({job.guard.stop.reason or 'on another rank'}): {saved}")
    if run.export_hf and not problem and not stopping:
        state.activity = "exporting"
        dtype = settings.precision.dtype
        saver.export(run.export_hf, "fp32" if dtype == "fp64" else dtype, state.step)
    if run.sample and math.isfinite(log.last_loss or 0.0) and not stopping:
        state.activity = "sampling"
        if codec := codec_of(job.training.corpus, tokenizer_folder(settings, job.training)):
            continue_prompt(job.model, codec, settings, job.groups, job.device)
        elif rank(job.groups["world"]) == 0:
            print("no sample: the data are tokens, without a tokenizer.json beside them", file=sys.stderr)
    if problem:
        raise faults.Failure(problem)  # the work of the last steps is lost: nobody shall take this run for a good one


def is_due(step: int, every: int, steps: float) -> bool:
    """Whether this step is the last, or a multiple of `every` steps has now been done. every=0: only after the last."""
    return step == steps - 1 or (every > 0 and (step + 1) % every == 0)


@contextmanager
def without_garbage_collector() -> Iterator[None]:
    """Collect once, then switch Python's collector off: a step leaves no reference cycles, and a collection would only
    delay kernel launches."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


# ---- one step -------------------------------------------------------------------------------------------------------

def forward_backward(model: Llama, optimizer: Optimizer, micro_batches: list[MicroBatch],
                     groups: Groups) -> torch.Tensor:
    """Forward and backward of a step: the gradient of the mean loss over all valid tokens of the global batch.

    Returns that mean. Its denominator is counted over all ranks and micro-batches before the first backward, so that
    every gradient is a plain sum from there on. Auxiliary losses of experts are means over the global batch's
    sequences.
    """
    # Context parallel ranks have shards of the same sequences.
    sequences = sum(len(batch.tokens) for batch in micro_batches) * size(groups["data"]) // size(groups["cp"])
    valid = sum((batch.labels != IGNORED).sum() for batch in micro_batches)  # tokens with a loss, on this rank
    counting = all_reduce(valid, groups["data"], async_op=True)  # of all ranks, once the last stage waits for it
    total = torch.zeros((), dtype=acc_dtype(model.execution.dtype), device=valid.device)

    def forward(stage: int, k: int, x: torch.Tensor | None) -> torch.Tensor:
        batch, loss_grad = micro_batches[k], None
        if stage == model.last_stage:
            counting.wait()
            loss_grad = optimizer.scale_loss(1 / valid.clamp(min=1).to(total.dtype))  # perhaps no token is valid
        y = model(batch.tokens, batch.positions, batch.documents, stage=stage, x=x, labels=batch.labels,
                  loss_grad=loss_grad, sequence_weight=optimizer.scale_loss(1 / sequences))
        if stage == model.last_stage:
            total.add_(y.detach())
            y = y * loss_grad
        return y

    # The engine calls `forward` for each micro-batch and stage, and runs backward from what the last stage returned.
    engine = model.pipeline.engine(len(micro_batches))
    optimizer.begin_step(engine.backwards)
    engine.run(forward, model.boundary_shape(micro_batches[0].tokens), model.execution.dtype)
    counting.wait()  # ranks without the last stage have not waited in forward
    optimizer.finish_step()  # of gradients: waits for their reductions
    all_reduce(total, groups["data"])
    all_reduce(total, groups["pp"])  # one pipeline rank has it, the others zeros
    return total / valid.clamp(min=1)


def update_balance(model: Llama, groups: Groups, finite: torch.Tensor, sequences: int) -> dict[str, torch.Tensor]:
    """Update the routers' biases after a step, if it was `finite`. Returns the metrics of experts: aux_loss, the
    auxiliary losses, summed over layers and averaged over sequences; load_max_over_mean, the tokens of the most loaded
    expert over its layer's mean, for the worst layer."""
    load, loss = torch.zeros(2, dtype=torch.float64, device=finite.device).unbind()
    if model.routers:  # the layers of a pipeline rank may all be dense
        load, loss = update_biases(model.routers, (groups["data"], groups["tp"]), finite)
    all_reduce(load, groups["pp"], collectives.MAX)
    all_reduce(loss, groups["pp"])
    return dict(aux_loss=loss / sequences, load_max_over_mean=load)


def local_micro_batches(samples: Samples, first: int, sequences: int, settings: config.Config, groups: Groups,
                        end: int | None = None) -> list[MicroBatch]:
    """This rank's part of the samples first … first + sequences - 1; those from number `end` on get no labels."""
    grid, cp = settings.grid, groups["cp"]
    dp_rank = rank(groups["data"]) // size(cp)  # context parallel ranks, the innermost, read the same sequences
    micro_batches = samples.step(first, sequences, settings.batch.micro_batch, dp_rank, grid.dp, end)
    return [MicroBatch(*shard_sequences(*micro_batch, size(cp), rank(cp), grid.tp if grid.sp else 1))
            for micro_batch in micro_batches]


def learning_rate(step: int, optim: config.Optim) -> float:
    """The rate of step 0, 1, … steps - 1: a linear warmup to lr, then constant, or down to min_lr at the last step."""
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    if optim.lr_schedule == "constant":
        return optim.lr
    if optim.lr_schedule == "wsd":  # warmup, stable, decay: Hu et al. 2024
        fraction = min(1.0, (optim.steps - 1 - step) / (0.2 * optim.steps))
    else:
        fraction = (1 + math.cos(math.pi * (step - optim.warmup + 1) / (optim.steps - optim.warmup))) / 2
    return optim.min_lr + (optim.lr - optim.min_lr) * fraction


def sequences_at(tokens: int, ramp: list[tuple[int, float]]) -> int:
    """The global batch, in sequences, after so many tokens. ramp: see config.Batch.ramp."""
    return [sequences for sequences, start in ramp if start <= tokens][-1]


# ---- evaluation and sampling ----------------------------------------------------------------------------------------

def validation_loss(job: Job) -> float | None:
    """The mean loss over the first samples: --eval-steps global batches (of a ramp's first size), or all there are.
    None if the run is asked to end meanwhile."""
    settings, samples = job.settings, job.validation
    sequences = settings.batch.ramp()[0][0]
    end = min(settings.data.eval_steps * sequences, samples.spans)

    def global_batches() -> Iterator[list[MicroBatch]]:
        for first in range(0, end, sequences):
            if job.guard.agree_to_stop():
                return
            micro_batches = local_micro_batches(samples, first, sequences, settings, job.groups, end)
            yield [micro_batch.to(job.device) for micro_batch in micro_batches]
    loss = mean_loss(job.model, global_batches(), job.groups)
    return None if job.guard.stopping else loss


@torch.no_grad()
def mean_loss(model: Llama, global_batches: Iterable[list[MicroBatch]], groups: Groups) -> float:
    """The mean loss over all valid tokens of all ranks' micro-batches. Every rank must have equally many of them."""
    summed = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)  # losses, tokens
    for micro_batches in global_batches:
        def forward(stage: int, k: int, x: torch.Tensor | None, given=micro_batches) -> torch.Tensor:
            batch = given[k]
            y = model(batch.tokens, batch.positions, batch.documents, stage=stage, x=x, labels=batch.labels)
            if stage == model.last_stage:
                summed.add_(torch.stack((y.double(), (batch.labels != IGNORED).sum().double())))
            return y

        engine = model.pipeline.engine(len(micro_batches), evaluating=True)
        engine.run(forward, model.boundary_shape(micro_batches[0].tokens), model.execution.dtype)
    for axis in ("data", "pp"):
        all_reduce(summed, groups[axis])
    return (summed[0] / summed[1].clamp(min=1)).item()


def continue_prompt(model: Llama, codec: Codec, settings: config.Config, groups: Groups, device: torch.device,
                    length: int = 240) -> None:
    """Print how the model continues --sample by `length` tokens.

    The first rank of the data axis, with its tp and pp partners, can do this alone, unless ZeRO-3 or expert parallelism
    shards weights over the data axis: then all ranks take part.
    """
    if rank(groups["data"]) == 0 or settings.grid.zero == 3 or settings.grid.ep > 1:
        begin = [] if codec.separator is None else [codec.separator]
        prompt = torch.tensor([[*begin, *codec.encode(settings.run.sample)]], device=device)
        tokens = sample(model, prompt, length)[0, len(begin):].tolist()
        if rank(groups["world"]) == 0:
            text = codec.decode(tokens)  # whose control characters would ring and erase
            print("".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text))


# ---- the model and its optimizer ------------------------------------------------------------------------------------

def build_pipeline(settings: config.Config, group: Group, device: torch.device | str = "cpu") -> Pipeline:
    """The stages that the schedule gives this rank, and the plan of any number of micro-batches."""
    grid, batch = settings.grid, settings.batch
    most = max(sequences for sequences, _ in batch.ramp()) // batch.micro_batch // grid.dp
    return Pipeline(partial(plan_of, grid), costs.stages_of(settings), most, group, device)


def build(settings: config.Config, groups: Groups, device: torch.device, dtype: torch.dtype,
          filled: bool = True) -> tuple[Llama, Optimizer]:
    """The model and its optimizer, with the seed's initial weights if they are to be filled, else with zeros."""
    grid, optim = settings.grid, settings.optim
    model = build_model(settings, groups, device, dtype)
    optimizer = Optimizer(model.units(), groups, bucket_mb=grid.bucket_mb, level=grid.zero, rule=optim.optimizer,
                          betas=optim.betas, weight_decay=optim.weight_decay, clip=optim.clip,
                          moments_dtype=moments_dtype(settings, dtype), last_unit=model.head,
                          reduce_dtype=torch.bfloat16 if settings.precision.reduce_dtype == "bf16" else None)
    if filled:
        optimizer.load(draw(optim.seed))
    return model, optimizer


def build_model(settings: config.Config, groups: Groups, device: torch.device | str, dtype: torch.dtype) -> Llama:
    """The model. Its parameters have no memory until an Optimizer makes their buckets, no values until its `load`."""
    grid, precision, optim = settings.grid, settings.precision, settings.optim
    fp8_linear, fp8_experts = fp8_of(settings, groups, dtype)
    execution = Execution(dtype=dtype, device=device, attention=precision.attention, recompute=precision.recompute,
                          cp_style=grid.cp_style, sequence=grid.sp, async_tp=grid.async_tp, keep_gathered=grid.sp_keep,
                          fp8_linear=fp8_linear, fp8_experts=fp8_experts, fp8_layers=settings.fp8_layers())
    balance = Balance(optim.aux_loss, optim.aux_over, optim.router_z_loss, optim.bias_rate)
    return Llama(settings.model, groups, execution, pipeline=build_pipeline(settings, groups.get("pp"), device),
                 z_loss=optim.z_loss, balance=balance)


def fp8_of(settings: config.Config, groups: Groups, dtype: torch.dtype) -> tuple[Fp8 | None, Fp8 | None]:
    """(the Fp8 of linear layers, that of experts). All ranks with shards of a tensor agree on its tensorwise scale: for
    activations cp and tp, which share sequences, and for experts' inputs also ep; for weights tp, or ep."""
    precision, cached = settings.precision, settings.grid.zero < 3
    if precision.fp8 == "none":
        return None, None
    recipe = RECIPES[precision.fp8]._replace(pow2=precision.fp8_pow2)
    cp, tp, ep = (groups.get(axis) for axis in ("cp", "tp", "ep"))
    return (Fp8(recipe, dtype, amax_groups=(cp, tp), weight_amax_groups=(tp,), cached=cached),
            Fp8(recipe, dtype, amax_groups=(cp, tp, ep), weight_amax_groups=(ep,), cached=cached))


def moments_dtype(settings: config.Config, dtype: torch.dtype) -> torch.dtype:
    """The dtype of AdamW's moments in a run in `dtype`."""
    return torch.bfloat16 if settings.precision.moments == "bf16" else acc_dtype(dtype)


def extra_state(model: Llama, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """The state that belongs to no parameter, by name; to restore it, copy into these tensors."""
    return optimizer.extra_state() | {router.name: router.bias for router in model.routers}


def open_samples(settings: config.Config, paths: list[str], seed: int | None) -> Samples:
    """The samples of these files, shuffled by a seed or in their own order. Raises ValueError naming a bad file."""
    data = settings.data
    try:
        corpus = Corpus(paths, settings.model.vocab, data.data_dtype, data.separator)
    except OSError as error:
        raise ValueError(f"{error.filename}: cannot be read: {error.strerror}") from None
    return Samples(corpus, settings.batch.seq, seed, data.doc_mask)


# ---- the device -----------------------------------------------------------------------------------------------------

def choose_device(asked: str) -> tuple[torch.device, str]:
    """(device of this rank, why). asked: "auto", "cpu" or "cuda".

    "auto" takes GPUs if this machine has one for each of its ranks, and the CPU if it has none. Raises ValueError if it
    has some, but too few, or if "cuda" is asked for and there are too few.
    """
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if asked == "cpu":
        return torch.device("cpu"), "as asked"
    if gpus >= ranks:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        return device, torch.cuda.get_device_name(device)
    if gpus or asked == "cuda":
        raise ValueError(f"--device {asked}: {ranks} ranks on this machine and {gpus} GPUs: "
                         + (f"use --nproc_per_node={gpus} or " if gpus else "use ") + "--device cpu")
    return torch.device("cpu"), "there is no GPU here"


def check_device(precision: config.Precision, device: torch.device) -> None:
    """Raises ValueError for what this device cannot run. FP8 needs a GPU of compute capability 8.9 or more, blockwise
    exactly 9 (cuBLAS); on a CPU Triton's kernels need its interpreter, which computes bf16 wrongly."""
    if precision.fp8 != "none" and device.type == "cuda":
        capability, name = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
        if capability < (8, 9) or (precision.fp8_recipe().blocks and capability[0] != 9):
            other = ", or --fp8 tensorwise" if capability >= (8, 9) else ""
            raise ValueError(f"--fp8 {precision.fp8}: cannot run on {name}: use a Hopper GPU, or --fp8 none{other}")
    if precision.attention == "triton" and device.type == "cpu":
        config.need(os.environ.get("TRITON_INTERPRET") == "1", "--attention triton needs a GPU, or TRITON_INTERPRET=1 "
                    "to be interpreted, slowly: use auto or math")
        config.need(precision.dtype != "bf16", "--attention triton with --dtype bf16: Triton's interpreter computes it "
                    "wrongly, use fp32, or --attention auto or math")


def check_memory(settings: config.Config, groups: Groups, device: torch.device) -> None:
    """Raises ValueError if weights, gradients and optimizer state take more than there is, or all more than twice."""
    parts = memory_of_rank(settings, groups, fused=device.type == "cuda")
    needed = max(sum(parts[kind] for kind in ("weights", "gradients", "optimizer")), sum(parts.values()) / 2)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else (
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / ranks)
    need(needed <= memory, f"--preset {settings.model.preset}: takes {format_bytes(sum(parts.values()))} on this rank, "
         f"which has {format_bytes(memory)}: use a smaller model or --micro-batch, or more ranks with --zero 3 or --tp")


# ---- what is printed and written ------------------------------------------------------------------------------------

class Log:
    """The first lines, the progress bar and the metrics of every step. Rank 0 alone prints and writes."""

    def __init__(self, settings: config.Config, groups: Groups, device: torch.device):
        self.settings, self.groups, self.device = settings, groups, device
        self.ranks, self.rank = size(groups["world"]), rank(groups["world"])
        self.is_first_rank = self.rank == 0
        dtype = DTYPES[settings.precision.dtype]
        has_peak = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)  # the peak of FP8 runs, too
        self.peak = costs.peak_flops(torch.cuda.get_device_name(device)) if has_peak else None
        self.flops = costs.flops_by_convention(settings)
        self.last_loss: float | None = None  # of the last step that this process trained; None: it trained none
        self.noise: list[tuple[float, float]] = []  # noise_trace and noise_gradient2 of each step
        self.metrics_begun = self.metrics_failed = False
        self.bar = tqdm(total=settings.optim.steps, unit="step", disable=True)

    def start(self, device_reason: str, samples: Samples) -> None:
        if self.is_first_rank:
            ranks = f"{self.ranks} ranks, {dist.get_backend()}" if self.groups["world"] else "one process"
            device = f"{self.device.type} ({device_reason}), {ranks}"
            print(first_lines(self.settings, self.groups, device, samples), flush=True)

    def begin(self, step: int) -> None:
        """The next step is this one: the run begins, is resumed, or has gone back."""
        self.bar.close()
        self.bar = tqdm(total=self.settings.optim.steps, initial=step, unit="step", dynamic_ncols=True,
                        disable=not self.is_first_rank or not sys.stderr.isatty())
        self.metrics_begun = False

    def append(self, record: dict) -> None:
        """Write a line of metrics. The first one drops those of later steps, and of other runs."""
        path, text = self.settings.run.metrics, as_json(record) + "\n"
        try:
            if not self.metrics_begun and os.path.isfile(path):
                with open(path) as file:
                    lines = [line for line in file if is_before(line, record["step"])]
                checkpoint.write_text(Path(path), "".join(lines))
            self.metrics_begun = True
            with open(path, "a") as file:  # anew for every line: the file may have been removed
                file.write(text)
            self.metrics_failed = False
        except OSError as error:
            if not self.metrics_failed:
                faults.warn(f"--metrics {path}: {error.strerror}: training goes on without", self.groups["world"])
            self.metrics_failed = True

    def record(self, step: int, state: RunState, sequences: int, loss: float, norm: float, lr: float,
               seconds: float) -> dict:
        """The metrics of a step; `skipped` and `tokens` count from the beginning of the run."""
        rate = sequences * self.settings.batch.seq / seconds
        utilisation = {name: flops * rate / self.ranks / self.peak if self.peak else None
                       for name, flops in self.flops.items()}
        return dict(
            step=step, tokens=state.tokens, loss=loss, grad_norm=norm, lr=lr,
            step_s=seconds, tokens_per_s=rate, tokens_per_s_per_gpu=rate / self.ranks, **utilisation,
            memory_gb=peak_memory(self.device) / 1e9,
            comm_gb={axis: collectives.sent[axis] / 1e9 for axis in AXES if size(self.groups[axis]) > 1},
            skipped=state.skipped)

    def write(self, record: dict) -> None:
        self.last_loss = record["loss"]
        if record.get("val_loss") is not None:
            self.validated(record["step"] + 1, record["val_loss"])
        if math.isfinite(record.get("noise_trace", math.nan)):
            self.noise.append((record["noise_trace"], record["noise_gradient2"]))
        if self.settings.run.metrics and self.is_first_rank:
            self.append(record)
        done, steps = record["step"] + 1, self.settings.optim.steps
        progress = f"loss {record['loss']:.3f}, {record['tokens_per_s']:,.0f} tokens/s"
        self.bar.set_postfix_str(progress, refresh=False)
        self.bar.update()
        if self.is_first_rank and self.bar.disable and (done % max(1, steps // 20) == 0 or done == steps):
            print(f"step {done}/{steps}: {progress}", file=sys.stderr, flush=True)

    def validated(self, steps: int, loss: float) -> None:
        if self.is_first_rank:
            self.bar.write(f"after {steps} steps: validation loss {loss:.4f}", file=sys.stdout)

    def close(self, state: RunState) -> None:
        self.bar.close()
        if self.is_first_rank and self.last_loss is not None:
            print(f"trained {state.step} steps on {state.tokens:,} tokens: "
                  f"last loss {self.last_loss:.4f} nats per token")
            late = self.noise[len(self.noise) // 2:]
            trace, gradient2 = (sum(step[i] for step in late) for i in (0, 1))
            if gradient2 > 0:
                print(f"gradient noise scale of the last {len(late)} steps: {max(0.0, trace / gradient2):,.0f} tokens")


def is_before(line: str, step: int) -> bool:
    """Whether a line of metrics is whole (the last one of a killed run may not be) and of an earlier step."""
    try:
        return json.loads(line)["step"] < step
    except (ValueError, KeyError, TypeError):
        return False


def first_lines(settings: config.Config, groups: Groups, device: str, samples: Samples | None = None) -> str:
    """device, grid, batch, model and, if there are samples, data of a run, a line each."""
    grid, batch, precision, model = settings.grid, settings.batch, settings.precision, settings.model
    shards, count = grid.dp // grid.dp_replicate * grid.cp, costs.parameters(model)
    fp8 = f", linear layers of blocks in fp8 {precision.fp8}" if precision.fp8 != "none" else ""
    sequences, _ = batch.ramp()[0]
    ramp = f"; ramp {batch.batch_ramp}" if batch.batch_ramp else ""
    memory = memory_of_rank(settings, groups, fused=device.startswith("cuda"))
    active = f" ({count.active:,} active)" if model.experts else ""
    lines = [
        f"device  {device}, {precision.dtype}{fp8}",
        f"grid    {grid_line(grid, model, shards)}",
        *([f"        to show a grid; --dp {grid.dp * grid.cp * grid.tp * grid.pp} is pure data parallelism"]
          if settings.shown else []),
        f"batch   global batch {sequences} = micro {batch.micro_batch} x accum "
        f"{sequences // batch.micro_batch // grid.dp} x dp {grid.dp}; {sequences * batch.seq:,} tokens per step{ramp}",
        f"model   {model.preset}: {count.total:,} parameters{active}; rank {rank(groups.get('world'))} needs about "
        + ": ".join((format_bytes(sum(memory.values())), ", ".join(f"{kind} {format_bytes(n)}" for kind, n
                                                                   in memory.items())))]
    if samples:
        lines.append(
            f"data    {len(samples.corpus):,} tokens in {len(samples.corpus.files):,} files: "
            f"{samples.spans:,} samples of {batch.seq}")
    return "\n".join(lines)


def grid_line(grid: config.Grid, model: config.Model, shards: int) -> str:
    """The axes, and what a rank holds of the model and reads of the data. shards: ranks that ZeRO shards over."""
    state = ("", "optimizer state", "gradients, optimizer state", "weights, gradients, optimizer state")[grid.zero]
    layers = "the whole model" if grid.tp == 1 else f"1/{grid.tp} of every layer and " + (
        f"1/{grid.tp} of the tokens between layers" if grid.sp else "all tokens between layers")
    if grid.pp > 1:
        layers = f"{grid.chunks} of {grid.pp * grid.chunks} stages ({grid.schedule}), of these {layers}"
    experts = ""
    if model.experts:
        edp = shards * grid.tp // grid.ep
        experts = f", ep {grid.ep} x edp {edp}"
        layers += f", but {model.experts // grid.ep} of {model.experts} experts"
        state += f" (1/{edp} of experts')"
    holds, sharded = "holds", f", 1/{shards} of its {state}" if shards > 1 and grid.zero else ""
    if sharded and grid.zero == 3:
        holds, sharded = "computes with", f", holds 1/{shards} of its {state}"
    if sharded and grid.dp_replicate > 1:
        sharded += f" in {grid.dp_replicate} replicas"
    reads = f", and reads 1/{grid.dp} of the sequences" if grid.dp > 1 else ""
    reads += (", " if reads else ", and reads ") + f"1/{grid.cp} of each sequence" if grid.cp > 1 else ""
    return (f"pp {grid.pp} x dp {grid.dp} x cp {grid.cp} x tp {grid.tp}{experts}, zero {grid.zero}: a rank {holds} "
            f"{layers}{sharded}{reads}")


def memory_of_rank(settings: config.Config, groups: Groups, fused: bool = False) -> dict[str, int]:
    """Bytes that this rank will hold, by kind, from the shapes of its parameters and the formulas of costs.py."""
    dtype, grid, optim = DTYPES[settings.precision.dtype], settings.grid, settings.optim
    model = build_model(settings, groups, "cpu", dtype)
    buckets: dict[str, list[int]] = {}
    for params in assign_to_buckets(model.units(), 0 if grid.zero == 3 else grid.bucket_mb):
        buckets.setdefault(params[0].spec.data_axis, []).append(sum(param.numel() for param in params))
    moments = len(UPDATE_RULES[optim.optimizer].state) * moments_dtype(settings, dtype).itemsize
    pipeline, has_head = model.pipeline, model.head is not None
    activations = footprint.activation_bytes(settings, dtype.itemsize, pipeline.stages.values(), pipeline.in_flight,
                                             has_head)
    return footprint.memory_bytes(settings, dtype.itemsize, moments, buckets, model.fp8_weights(), activations,
                                  pipeline.in_flight, has_head, fused)


def format_bytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def peak_memory(device: torch.device) -> float:
    """The most this rank has held so far, in bytes: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def as_json(record: dict) -> str:
    """One line of JSON, which has no NaN or inf: they become null."""
    finite = {key: None if isinstance(value, float) and not math.isfinite(value) else value
              for key, value in record.items()}
    return json.dumps(finite)


if __name__ == "__main__":
    main(settings)
