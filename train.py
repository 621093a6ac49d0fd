"""Train a Llama-style model: read the settings, build the grid, go round the loop.

    python train.py                                   one process
    torchrun --nproc_per_node=8 train.py              8 ranks: NCCL if there is a GPU for each, else CPUs with gloo
    torchrun --nproc_per_node=8 train.py --grid auto  on the grid that is predicted to be the fastest here
    python train.py --dry-run --gpus 1024             what a rank of 1,024 would need, compute and send (run/dryrun.py)
    python train.py --help                            every setting

The file reads from the whole to its parts: the run; its loop, step by step; a step's data and rate; evaluation and
sampling; the dry run. assemble.py puts a run together from its settings, run/job.py begins, resumes and saves it,
run/log.py prints and writes what it does.

A step divides every loss by the number of valid tokens of the global batch, so that each gradient is a plain sum over
micro-batches and ranks. The files of the techniques communicate gradients, activations and weights; this one
communicates scalars only: token counts, losses, metrics.
"""
if __name__ == "__main__":
    import config

    settings = config.from_command_line()  # before torch is imported, so that a wrong flag is answered at once

import gc
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import assemble
import collectives
import config
from checks import need
from collectives import Groups, HostCopy, all_reduce, build_groups, rank, size
from cp import shard_sequences
from ep import update_biases
from model import Llama
from param import IGNORED, acc_dtype
from pp import named
from run import dryrun, faults
from run.data import Codec, MicroBatch, Samples, codec_of
from run.job import Job, RunState, begin_or_resume, description, rewind, save
from run.log import GradientNoise, Log, first_lines, profiling
from run.sampling import sample
from zero import Optimizer

# ---- the run --------------------------------------------------------------------------------------------------------

def main(settings: config.Config) -> None:
    state, run = RunState(), settings.run
    if run.dry_run:
        return dry_run(settings)
    sys.stdout, sys.stderr = faults.Tolerant(sys.stdout), faults.Tolerant(sys.stderr)
    stop, watchdog, store = faults.Stop(run.time_limit, run.timeout), None, None
    stop.listen()
    try:  # mistakes of the user: one line, no traceback
        device, device_reason = assemble.choose_device(run.device)
        if settings.grid.grid == "auto":
            settings = assemble.choose_grid(settings, device)
        if settings.precision.dtype == "auto":
            settings.precision.dtype = "bf16" if device.type == "cuda" else "fp32"
        assemble.check_device(settings, device)
        need(device.type == "cuda" or not run.memory_snapshot, f"--memory-snapshot {run.memory_snapshot}: needs a GPU")
        training = assemble.open_samples(settings, settings.data.data, settings.optim.seed)
        validation = assemble.open_samples(settings, settings.data.val_data, None) if settings.data.val_data else None
    except ValueError as error:
        config.refuse(error)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        if "WORLD_SIZE" in os.environ:
            store = collectives.meet(run.timeout, stop.end_if_asked)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            watchdog = faults.Watchdog(store.clone(), run.timeout, lambda: state.activity, stop)
        with collectives.world(device, run.timeout, store) if store else nullcontext():
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
    try:  # mistakes of the user that show only now, on every rank
        assemble.check_memory(settings, groups, device)
        begin_or_resume(job)
    except ValueError as error:
        config.refuse(error)
    job.log.begin(state.step)
    job.guard = faults.Guard(stop or faults.Stop(), groups["world"], device, state.norms, settings.run.skip_spikes)
    run, pipeline = settings.run, job.model.pipeline
    pipeline.timed = bool(run.profile)
    with without_garbage_collector(), profiling(run.profile, run.memory_snapshot, job.log.rank, device) as end_step:
        train_steps(job, end_step)
    if run.profile and settings.grid.pp > 1:
        pipeline.draw_timeline(Path(run.profile, "pipeline.svg"))
    finish(job)


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


# ---- the loop -------------------------------------------------------------------------------------------------------

class Issued(NamedTuple):
    """A step that the device has been given, and what the host will need when it reads the step's results."""
    step: int
    samples: range
    tokens: int  # since the beginning of the run
    lr: float
    began: float
    sent: Counter[str]  # bytes by axis
    results: HostCopy


def train_steps(job: Job, end_step: Callable[[], None]) -> None:
    """The loop: until --steps are done, or the run is asked to end. end_step: see run/log.py.

    A GPU computes a step while the host issues the next one; only then the host reads the step's results, so that the
    GPU never waits for it. It reads them at once where something else waits for the step: see `needs_pause`.
    """
    settings, groups, state, guard = job.settings, job.groups, job.state, job.guard
    optim, run = settings.optim, settings.run
    measured = run.metrics and settings.grid.cp == 1 and size(groups["data"]) > 1
    noise = GradientNoise(job.optimizer, size(groups["data"])) if measured else None
    compute_gradients = partial(forward_backward, job.model, job.optimizer, groups=groups)
    upcoming = read(job) if state.step < optim.steps else None
    unread: Issued | None = None

    def too_many_skipped() -> bool:
        return 0 < run.max_skipped <= len(guard.streak) and not guard.stopping

    while state.step < optim.steps and not guard.stopping:
        issued = issue_step(job, compute_gradients, noise, *upcoming)
        if state.step < optim.steps:
            with named("read data"):
                upcoming = read(job)  # while the device computes
            state.activity = f"in step {issued.step}"
        if unread:
            job.log.write(read_results(job, unread))
        unread = issued
        reads_now = guard.stopping or not reads_late(job.device) or needs_pause(job, issued.step)
        if reads_now and not too_many_skipped():
            record, unread = read_results(job, issued), None
            job.log.write(record | pause(job, issued.step))
        end_step()
        if too_many_skipped():
            rewind(job)
            upcoming, unread = read(job), None


def issue_step(job: Job, compute_gradients: Callable[[list[MicroBatch]], torch.Tensor], noise: GradientNoise | None,
               sequences: int, micro_batches: list[MicroBatch]) -> Issued:
    """Give a step to the device: gradients, the optimizer's update, and a copy of what the host wants to know."""
    settings, state, guard, began = job.settings, job.state, job.guard, time.perf_counter()
    state.activity = f"in step {state.step}"
    step, first, lr = state.step, state.samples, learning_rate(state.step, settings.optim)
    collectives.sent.clear()
    guard.begin_step()
    with named("forward and backward"):
        loss = compute_gradients(micro_batches)
    with named("optimizer"):
        limit, ballot = guard.limit(), guard.ballot()
        norm = job.optimizer.step(lr, limit, ballot)
    results = dict(loss=loss, norm=norm, limit=limit, mean=guard.update_statistics(norm, limit), ballot=ballot)
    if settings.model.experts:
        results |= update_balance(job.model, job.groups, norm < limit, sequences)
    if noise:
        results |= noise.estimate(sequences * settings.batch.seq)
    state.step += 1
    state.samples += sequences
    state.tokens += sequences * settings.batch.seq
    return Issued(step, range(first, state.samples), state.tokens, lr, began, collectives.sent.copy(),
                  HostCopy(**results))


def forward_backward(model: Llama, optimizer: Optimizer, micro_batches: list[MicroBatch],
                     groups: Groups) -> torch.Tensor:
    """Forward and backward of a step: the gradient of the mean loss over all valid tokens of the global batch.

    Returns that mean. Its denominator is counted over all ranks and micro-batches before the first backward, so that
    every gradient is a plain sum from there on. Auxiliary losses of experts are means over the global batch's
    sequences.
    """
    # The axis "data" is dp x cp, and context parallel ranks have shards of the same sequences.
    sequences = sum(len(batch.tokens) for batch in micro_batches) * size(groups["data"]) // size(groups["cp"])
    # `valid`, the tokens with a loss, is this rank's count until all_reduce has made it that of all ranks.
    valid = sum((batch.labels != IGNORED).sum() for batch in micro_batches)
    counting = all_reduce(valid, groups["data"], async_op=True)
    total = torch.zeros((), dtype=acc_dtype(model.execution.dtype), device=valid.device)

    def forward(stage: int, k: int, x: torch.Tensor | None) -> torch.Tensor:
        batch, loss_grad = micro_batches[k], None
        if stage == model.last_stage:
            counting.wait()
            # The fused loss computes its gradient in forward, so it must know what backward will multiply it by.
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


def update_balance(model: Llama, groups: Groups, updated: torch.Tensor, sequences: int) -> dict[str, torch.Tensor]:
    """Update the routers' biases, if the step was not skipped: if it has `updated` the weights.

    Returns the metrics of experts: aux_loss, the auxiliary losses, summed over layers and averaged over sequences;
    load_max_over_mean, the tokens of the most loaded expert over its layer's mean, for the worst layer.
    """
    load, loss = torch.zeros(2, dtype=torch.float64, device=updated.device).unbind()
    if model.routers:  # the layers of a pipeline rank may all be dense
        load, loss = update_biases(model.routers, (groups["data"], groups["tp"]), updated)
    all_reduce(load, groups["pp"], collectives.MAX)
    all_reduce(loss, groups["pp"])
    return dict(aux_loss=loss / sequences, load_max_over_mean=load)


def reads_late(device: torch.device) -> bool:
    """Whether a step's results are read after the next step has been issued. On a CPU they are there at once."""
    return device.type == "cuda"


def read_results(job: Job, issued: Issued) -> dict:
    """Wait for a step's results, let the guard see them, and return the step's metrics."""
    found, state, guard = issued.results.read(), job.state, job.guard
    loss, norm, limit, mean, ballot = (found.pop(name) for name in ("loss", "norm", "limit", "mean", "ballot"))
    guard.after_step(issued.step, issued.samples, norm=norm, limit=limit, mean=mean, ballot=ballot)
    state.skipped += bool(guard.streak)
    if job.saver:
        job.saver.note(issued.step + 1)
    metrics = job.log.metrics(issued, skipped=state.skipped, loss=loss, norm=norm, seconds=job.log.lap(issued.began))
    return metrics | guard.metrics() | found


def needs_pause(job: Job, step: int) -> bool:
    """Whether something follows this step that needs its results: an evaluation, a save, or the end."""
    data, run, steps = job.settings.data, job.settings.run, job.settings.optim.steps
    intervals = run.save_every, run.check_replicas, data.eval_every if job.validation else 0
    return any(is_due(step, every, steps) for every in intervals)


def pause(job: Job, step: int) -> dict:
    """Between two steps: evaluate, compare replicas and save, if it is time to. Returns their metrics."""
    settings, groups, state, guard, record = job.settings, job.groups, job.state, job.guard, {}
    run, steps = settings.run, settings.optim.steps
    if job.validation and not guard.stopping and is_due(step, settings.data.eval_every, steps):
        state.activity = f"evaluating after step {step}"
        record["val_loss"] = validation_loss(job)
    saves = needs_checkpoints(job) and (guard.stopping or is_due(step, run.save_every, steps))
    if run.check_replicas and (saves or is_due(step, run.check_replicas, math.inf)):
        record["check_replicas_s"] = faults.check_replicas(job.optimizer, job.model.routers, groups)
    if saves:
        record |= save(job)
    return record


def finish(job: Job) -> None:
    """After the last step: evaluate, if no step did; finish saving and export; sample. Of a run that was asked to end:
    finish saving."""
    settings, state, log, saver, problem = job.settings, job.state, job.log, job.saver, ""
    if job.validation and log.last_loss is None:
        state.activity = "evaluating"
        log.print_validation_loss(state.step, validation_loss(job))
    run, stopping = settings.run, job.guard.stopping
    log.close(state.step, state.tokens)
    if saver:
        state.activity = "saving"
        if log.last_loss is None and needs_checkpoints(job):  # no step was left to train, so none has saved
            saver.save(state.step, description(job))
        problem = saver.finish()
    if log.last_loss is not None and state.skipped == state.step and not stopping:
        problem = problem or (f"all {state.step} steps were skipped, so the weights are those of the beginning: lower "
                              "--lr, or look at the data and the weights that the run began with")
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
        if codec := codec_of(job.training.corpus, job.tokenizer):
            continue_prompt(job.model, codec, settings, job.groups, job.device)
        elif rank(job.groups["world"]) == 0:
            print("no sample: the data are tokens, without a tokenizer.json beside them", file=sys.stderr)
    if problem:
        raise faults.Failure(problem)  # work is lost, or none was done: nobody shall take this run for a good one


def needs_checkpoints(job: Job) -> bool:
    """Without --out a checkpoint is for the export alone, which a run that was asked to end skips."""
    return job.saver is not None and bool(job.settings.run.out or not job.guard.stopping)


def is_due(step: int, every: int, steps: float) -> bool:
    """Whether this step is the last, or a multiple of `every` steps has now been done. every=0: only after the last."""
    return step == steps - 1 or (every > 0 and (step + 1) % every == 0)


# ---- data and rates -------------------------------------------------------------------------------------------------

def read(job: Job) -> tuple[int, list[MicroBatch]]:
    """(sequences of the global batch, this rank's micro-batches) of the step that begins now."""
    state = job.state
    state.activity = f"in step {state.step}"
    sequences = sequences_at(state.tokens, job.settings.batch.ramp())
    state.samples = faults.next_sample(state.samples, sequences, state.left_out)
    micro_batches = local_micro_batches(job.training, state.samples, sequences, job.settings, job.groups)
    return sequences, on_device(job, micro_batches)


def on_device(job: Job, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
    documents = size(job.groups["cp"]) == 1  # context parallel ranks read them on the host
    return [micro_batch.to(job.device, documents) for micro_batch in micro_batches]


def local_micro_batches(samples: Samples, first: int, sequences: int, settings: config.Config, groups: Groups,
                        end: int | None = None) -> list[MicroBatch]:
    """This rank's part of the samples first … first + sequences - 1; those from number `end` on get no labels."""
    grid, cp = settings.grid, groups["cp"]
    dp_rank = rank(groups["data"]) // size(cp)  # context parallel ranks, the innermost, read the same sequences
    micro_batches = samples.step(first, sequences, settings.batch.micro_batch, dp_rank, grid.dp, end)
    return [MicroBatch(*shard_sequences(*micro_batch, size(cp), rank(cp), grid.sequence_shards))
            for micro_batch in micro_batches]


def sequences_at(tokens: int, ramp: list[tuple[int, float]]) -> int:
    """The global batch, in sequences, after so many tokens. ramp: see config.Batch.ramp."""
    return [sequences for sequences, start in ramp if start <= tokens][-1]


def learning_rate(step: int, optim: config.Optim) -> float:
    """The rate of step 0, 1, … steps - 1: a linear warmup to lr; then constant, or down to min_lr at the last step, by
    a cosine or, with "wsd", linearly over the last fifth of the steps."""
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    if optim.lr_schedule == "constant":
        return optim.lr
    if optim.lr_schedule == "wsd":  # warmup, stable, decay: Hu et al. 2024
        fraction = min(1.0, (optim.steps - 1 - step) / (0.2 * optim.steps))
    else:
        fraction = (1 + math.cos(math.pi * (step - optim.warmup + 1) / (optim.steps - optim.warmup))) / 2
    return optim.min_lr + (optim.lr - optim.min_lr) * fraction


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
            yield on_device(job, local_micro_batches(samples, first, sequences, settings, job.groups, end))
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


# ---- the dry run ----------------------------------------------------------------------------------------------------

def dry_run(settings: config.Config) -> None:
    """Run a step on fake tensors as --rank of --gpus ranks, and print what it would need, compute and send."""
    precision, run, began = settings.precision, settings.run, time.perf_counter()
    if precision.dtype == "auto":
        precision.dtype = "bf16"  # as on GPUs
    try:
        assemble.check_device(settings, torch.device("cpu"))
    except ValueError as error:
        config.refuse(error)
    with dryrun.fake_world(run.gpus, run.rank):
        groups = build_groups(settings.grid, settings.model)
        print(first_lines(settings, groups, f"none (dry run), {run.gpus:,} ranks"), flush=True)
        with dryrun.fake_tensors():
            found = measured_step(settings, groups)
        formula = assemble.memory_of_rank(settings, groups)
        print(dryrun.report(found, groups, formula, time.perf_counter() - began))
        if run.metrics:
            dryrun.write(run.metrics, found, groups, formula)


def measured_step(settings: config.Config, groups: Groups) -> dryrun.DryRun:
    """What this rank needs, computes and sends in the first step, of --batch-ramp's largest batch."""
    dtype = assemble.DTYPES[settings.precision.dtype]
    model, optimizer = assemble.build(settings, groups, torch.device("cpu"), dtype, filled=False)
    sequences = max(sequences for sequences, _ in settings.batch.ramp())
    samples = dryrun.ZeroSamples(settings.batch.seq)
    micro_batches = local_micro_batches(samples, 0, sequences, settings, groups)

    def step() -> None:
        forward_backward(model, optimizer, micro_batches, groups)
        norm = optimizer.step(settings.optim.lr)
        if settings.model.experts:
            update_balance(model, groups, norm.isfinite(), sequences)
    return dryrun.measure(step, model, optimizer, model.pipeline.engine(len(micro_batches)), groups)


if __name__ == "__main__":
    main(settings)
