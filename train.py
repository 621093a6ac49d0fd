"""Train a Llama-style model: read the settings, build the grid, go round the loop.

    python train.py                                   one process
    torchrun --nproc_per_node=8 train.py              8 ranks: NCCL if there is a GPU for each, else CPUs with gloo
    python train.py --help                            every setting

With no flags it trains a 0.8M parameter model on the bytes of Python's own library for about two minutes on two cores.
"""
if __name__ == "__main__":
    import config

    settings = config.from_command_line()  # before torch is imported, so that a wrong flag is answered at once

import json
import math
import os
import resource
import sys
import time
import traceback
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

import collectives
import config
from data import BYTES_SEPARATOR, Corpus, MicroBatch, Samples
from model import IGNORED, Llama, activation_bytes, cross_entropy, flops_per_token, parameter_count, sample
from param import Groups, draw, rank, size
from zero import Optimizer

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}

# Peak dense bf16 TFLOP/s by the name the driver gives; the first that the name contains. Vendors' data sheets.
PEAK_TFLOPS = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "GH200": 989, "B200": 2250, "B300": 2250,
               "A100": 312, "L40S": 362, "MI300X": 1307, "MI325X": 1307}


# ---- the grid -------------------------------------------------------------------------------------------------------

def choose_device(asked: str) -> tuple[torch.device, str]:
    """(device of this rank, why), GPUs when there is one for every rank of this machine.

    Raises ValueError where GPUs are asked for, or would be used by some ranks and not by others.
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


def build_groups(grid: config.Grid, device: torch.device) -> Groups:
    """One group an axis, created in the same order on every rank; None where this process is alone."""
    if not dist.is_initialized():
        return {"world": None, "dp": None}
    mesh = init_device_mesh(device.type, (grid.dp,), mesh_dim_names=("dp",))
    return {"world": dist.group.WORLD, "dp": mesh.get_group("dp")}


def build(settings: config.Config, groups: Groups, device: torch.device, dtype: torch.dtype) -> tuple[Llama, Optimizer]:
    """The model and its optimizer, filled with the seed's weights."""
    model = Llama(settings.model, groups, dtype, device, settings.precision.attention)
    optim = settings.optim
    optimizer = Optimizer({0: model.units()}, groups, settings.grid.bucket_mb, optim.optimizer, optim.betas,
                          weight_decay=optim.weight_decay, clip=optim.clip)
    optimizer.load(draw(optim.seed))
    return model, optimizer


# ---- one step -------------------------------------------------------------------------------------------------------

def gradients(model: Llama, optimizer: Optimizer, micro_batches: list[MicroBatch], groups: Groups) -> torch.Tensor:
    """Forward and backward of a step: the gradient of the mean loss over all valid tokens of the global batch.

    Returns that loss. The number it divides by is counted over all ranks and micro-batches before the first backward,
    so that every gradient is a plain sum from there on.
    """
    valid = sum((batch.labels != IGNORED).sum() for batch in micro_batches)
    counted = collectives.all_reduce(valid, groups["dp"], async_op=True)  # under way during the first forward
    optimizer.begin({0: len(micro_batches)})
    total = 0
    for batch in micro_batches:
        loss = cross_entropy(model(batch.tokens, batch.positions, batch.documents), batch.labels)
        counted.wait()
        (loss / valid.clamp(min=1)).backward()
        total = total + loss.detach()
    optimizer.finish()
    collectives.all_reduce(total, groups["dp"])
    return total / valid.clamp(min=1)


@torch.no_grad()
def evaluate(model: Llama, batches: list[list[MicroBatch]], groups: Groups) -> float:
    """The mean loss over all valid tokens of some global batches, given as this rank's share of each."""
    summed = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)  # losses, tokens
    for batch in (batch for micro_batches in batches for batch in micro_batches):
        summed[0] += cross_entropy(model(batch.tokens, batch.positions, batch.documents), batch.labels)
        summed[1] += (batch.labels != IGNORED).sum()
    collectives.all_reduce(summed, groups["dp"])
    return (summed[0] / summed[1].clamp(min=1)).item()


def learning_rate(step: int, optim: config.Optim) -> float:
    """The rate of step 0, 1, … steps - 1: a linear warmup, then the schedule down to min_lr at the last step."""
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    done = (step - optim.warmup + 1) / (optim.steps - optim.warmup)  # up to 1
    if optim.lr_schedule == "cosine":
        left = (1 + math.cos(math.pi * done)) / 2
    elif optim.lr_schedule == "wsd":  # warmup, stable, decay: Hu et al. 2024
        left = min(1.0, (optim.steps - 1 - step) / (0.2 * optim.steps))
    else:
        return optim.lr
    return optim.min_lr + (optim.lr - optim.min_lr) * left


def sequences_at(tokens: int, ramp: list[tuple[int, float]]) -> int:
    """The global batch once so many tokens have been seen."""
    return [sequences for sequences, start in ramp if start <= tokens][-1]


# ---- what is said ---------------------------------------------------------------------------------------------------

def first_lines(settings: config.Config, device: str, dtype: torch.dtype, samples: Samples) -> str:
    grid, batch = settings.grid, settings.batch
    n, exact = parameter_count(settings.model), torch.promote_types(dtype, torch.float32)
    memory = dict(weights=n * dtype.itemsize, gradients=n * exact.itemsize,
                  optimizer=n * exact.itemsize * (2 + (dtype != exact)),
                  activations=activation_bytes(settings.model, batch.micro_batch, batch.seq, dtype))
    sequences, _ = config.ramp(batch)[0]
    accumulated = sequences // batch.micro_batch // grid.dp
    return "\n".join((
        f"device  {device}, {settings.precision.dtype}",
        f"grid    dp {grid.dp}: " + (f"each rank holds the whole model and reads its 1/{grid.dp} of a step's sequences"
                                     if grid.dp > 1 else "one rank has everything"),
        f"batch   global batch {sequences} = micro {batch.micro_batch} x accum {accumulated} x dp {grid.dp}; "
        f"{sequences * batch.seq:,} tokens a step" + (f"; ramp {batch.batch_ramp}" if batch.batch_ramp else ""),
        f"model   {settings.model.preset}: {n:,} parameters; a rank needs about {gb(sum(memory.values()))}: "
        + ", ".join(f"{name} {gb(count)}" for name, count in memory.items()),
        f"data    {len(samples.corpus):,} tokens in {len(samples.corpus.files):,} files: "
        f"{samples.windows:,} samples of {batch.seq}",
    ))


def gb(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def peak_flops(device: torch.device) -> float | None:
    """Of one GPU, from its name; None for what is not in the table: a utilisation of a guess is no measurement."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak * 1e12 for key, peak in PEAK_TFLOPS.items() if key in name), None)


def memory_used(device: torch.device) -> float:
    """The most this rank has held so far, in bytes: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def as_json(record: dict) -> str:
    """One line. JSON has no NaN: what is not finite becomes null."""
    finite = {key: None if isinstance(value, float) and not math.isfinite(value) else value
              for key, value in record.items()}
    return json.dumps(finite)


# ---- the run --------------------------------------------------------------------------------------------------------

class Progress:
    """How far the run is, for whoever has to say where it failed."""
    step = 0


def train(settings: config.Config, device: torch.device, why: str, progress: Progress) -> None:
    batch, optim, data, run = settings.batch, settings.optim, settings.data, settings.run
    if settings.precision.dtype == "auto":
        settings.precision.dtype = "bf16" if device.type == "cuda" else "fp32"
    dtype = DTYPES[settings.precision.dtype]

    def samples_of(paths: list[str], seed: int | None) -> Samples:
        corpus = Corpus(paths, settings.model.vocab, data.data_dtype, data.separator)
        return Samples(corpus, batch.seq, seed, data.doc_mask)

    samples = samples_of(data.data, optim.seed)
    unseen = samples_of(data.val_data, None) if data.val_data else None
    groups = build_groups(settings.grid, device)
    chief = rank(groups["world"]) == 0
    if chief:
        ranks = f"{size(groups['world'])} ranks, {BACKENDS[device.type]}" if groups["world"] else "one process"
        print(first_lines(settings, f"{device.type} ({why}), {ranks}", dtype, samples), flush=True)
    model, optimizer = build(settings, groups, device, dtype)

    def share(samples: Samples, first: int, sequences: int) -> list[MicroBatch]:
        micro_batches = samples.step(first, sequences, batch.micro_batch, rank(groups["dp"]), size(groups["dp"]))
        return [micro_batch.to(device) for micro_batch in micro_batches]

    ramp, seen, skipped = config.ramp(batch), 0, 0  # seen: samples so far, the whole state of the data
    flops, causal_flops = (flops_per_token(settings.model, batch.seq, causal) for causal in (False, True))
    peak = peak_flops(device)
    log = open(run.metrics, "w") if run.metrics and chief else None
    bar = tqdm(total=optim.steps, unit="step", disable=not chief, dynamic_ncols=True)
    for step in range(optim.steps):
        progress.step, began = step, time.perf_counter()
        collectives.sent.clear()
        sequences = sequences_at(seen * batch.seq, ramp)
        lr = learning_rate(step, optim)
        loss = gradients(model, optimizer, share(samples, seen, sequences), groups)
        norm = optimizer.step(lr)
        loss, norm = loss.item(), norm.item()  # waits for the device
        seen += sequences
        skipped += not math.isfinite(norm)

        seconds, tokens = time.perf_counter() - began, sequences * batch.seq
        rate = tokens / seconds / size(groups["world"])
        record = dict(
            step=step, tokens=seen * batch.seq, loss=loss, grad_norm=norm, lr=lr, step_s=seconds,
            tokens_per_s=tokens / seconds, tokens_per_s_per_gpu=rate,
            mfu=rate * flops / peak if peak else None, mfu_causal=rate * causal_flops / peak if peak else None,
            hfu=rate * flops / peak if peak else None,  # nothing is recomputed: what the model needs is what is done
            memory_gb=memory_used(device) / 1e9,
            comm_gb={"dp": collectives.sent[collectives.name(groups["dp"])] / 1e9}, skipped=skipped)
        last = step == optim.steps - 1
        if unseen and (last or (data.eval_every and (step + 1) % data.eval_every == 0)):
            parts = [share(unseen, i * sequences, sequences) for i in range(data.eval_steps)]
            record["val_loss"] = evaluate(model, parts, groups)
            bar.write(f"step {step}: validation loss {record['val_loss']:.4f}", file=sys.stdout)
        if log:
            print(as_json(record), file=log, flush=True)
        bar.set_postfix_str(f"loss {loss:.3f}, {tokens / seconds:,.0f} tokens/s", refresh=False)
        bar.update()
    bar.close()
    if chief:
        print(f"trained {optim.steps} steps on {seen * batch.seq:,} tokens: loss {loss:.4f} nats a token")
        if run.sample and samples.corpus.is_text:
            prompt = torch.tensor([[BYTES_SEPARATOR, *run.sample.encode()]], device=device)
            written = sample(model, prompt, 240)[0, 1:].tolist()
            print(bytes(byte for byte in written if byte < 256).decode(errors="replace"))


def main(settings: config.Config) -> None:
    progress = Progress()
    try:
        device, why = choose_device(settings.run.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        launched = "WORLD_SIZE" in os.environ  # by torchrun
        with collectives.world(BACKENDS[device.type], settings.run.timeout) if launched else nullcontext():
            train(settings, device, why, progress)
    except ValueError as error:
        if progress.step:
            fail(progress, error)
        config.refuse(error)
    except Exception as error:
        fail(progress, error)


def fail(progress: Progress, error: Exception) -> None:
    """Say where and why, and take the job down: the other ranks may wait for this one, so nothing is waited for."""
    traceback.print_exc()
    rank = os.environ.get("RANK", 0)
    print(f"train.py: rank {rank} failed in step {progress.step}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main(settings)
