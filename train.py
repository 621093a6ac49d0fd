"""Train a Llama-style model: read the settings, build the grid, go round the loop.

    python train.py                                   one process
    torchrun --nproc_per_node=8 train.py              8 ranks: NCCL if there is a GPU for each, else CPUs with gloo
    python train.py --help                            every setting

With no flags it trains a 0.8M parameter model on the bytes of Python's own library for about two minutes on two cores.
"""
if __name__ == "__main__":
    import config

    settings = config.from_command_line()  # before torch is imported, so that a wrong flag is answered at once

import datetime
import gc
import json
import math
import os
import re
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from tqdm import tqdm

import collectives
import config
from cp import cut
from data import BYTES_SEPARATOR, Corpus, MicroBatch, Samples
from dp import composition
from ep import Balance, rebalance
from fp8 import RECIPES, Fp8
from graphs import Recorded, prepare
from model import Llama, activation_bytes, active_count, flops_per_token, parameter_count
from param import IGNORED, Groups, at_least_fp32, draw, rank, size
from pp import Pipeline, Plan, partition, plan
from recompute import extra_flops, llama_layer
from sampling import sample
from zero import Optimizer, bytes_held

AXES = ("world", "pp", "tie", "data", "replicate", "dp", "cp", "tp", "kv", "kv_copy", "ep", "edp")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}

# Peak dense TFLOP/s in bf16 and fp16, by words of the name that the driver gives; the first fits. From data sheets.
PEAK_TFLOPS = {"H100 PCIe": 756, "H100 NVL": 835, "H200 NVL": 835, "H100": 989, "H200": 989, "GH200": 989, "B200": 2250,
               "GB200": 2500, "B300": 2250, "GB300": 2500, "A100": 312, "L40S": 362, "MI300X": 1307, "MI325X": 1307}


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


def check_fp8(recipe: str, device: torch.device) -> None:
    """Raises ValueError where a GPU has no such FP8: it came with compute capability 8.9; cuBLAS has blocks for 9."""
    if recipe == "none" or device.type == "cpu":
        return
    capability, name = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
    if capability < (8, 9) or (recipe == "blockwise" and capability[0] != 9):
        other = ", or --fp8 tensorwise" if capability >= (8, 9) else ""
        raise ValueError(f"--fp8 {recipe}: cannot run on {name}: use a Hopper GPU, or --fp8 none{other}")


def check_triton(precision: config.Precision, device: torch.device) -> None:
    """Raises ValueError where kernels cannot run: on a CPU, unless it interprets them, and then in bf16."""
    if precision.attention == "triton" and device.type == "cpu":
        config.need(os.environ.get("TRITON_INTERPRET") == "1", "--attention triton needs a GPU, or TRITON_INTERPRET=1 "
                    "to be interpreted, slowly: use auto or math")
        config.need(precision.dtype != "bf16", "--attention triton with --dtype bf16: Triton's interpreter computes "
                    "nonsense with it, use fp32, or --attention auto or math")


def build_groups(grid: config.Grid, model: config.Model, timeout_s: float = 600) -> Groups:
    """The groups of every axis, created in the same order on every rank; None where a rank is alone.

    world: everybody. pp: those that have other layers; tie: of these, the two that have a tied table. data: all that
    have other tokens, replicate x dp. dp: those that share out optimizer state; cp: the innermost of these, which have
    parts of the same sequences. tp: those that share layers; where they are more than there are heads of keys and
    values, kv: one for each head, kv_copy: those of a head. Experts see the ranks of dp x tp as edp x ep: ep: those
    that have all experts between them; edp: those that have the same ones.
    """
    groups: Groups = dict.fromkeys(AXES)
    if not dist.is_initialized():
        return groups

    def add(axis: str, shape: tuple[int, ...], *along: int) -> None:
        """The groups of ranks that differ in these coordinates alone, when all ranks in order have such a shape."""
        others = [i for i in range(len(shape)) if i not in along]
        ranks = torch.arange(math.prod(shape)).view(shape)
        members = ranks.permute(*others, *along).flatten(len(others)).flatten(0, -2)  # a group a row
        if members.shape[1] > 1:
            timeout = datetime.timedelta(seconds=timeout_s)
            groups[axis], _ = dist.new_subgroups_by_enumeration(members.tolist(), timeout=timeout)
            if axis == "pp" and grid.schedule not in ("zb-v", "dualpipev"):  # whose last stage is beside the first
                groups["tie"], _ = dist.new_subgroups_by_enumeration(members[:, [0, -1]].tolist(), timeout=timeout)

    shards, heads = grid.dp // grid.dp_replicate, min(grid.tp, model.kv_heads)
    shape = grid.pp, grid.dp_replicate, shards, grid.cp, heads, grid.tp // heads
    pp, replicate, shard, cp, kv, kv_copy = range(6)
    add("pp", shape, pp)
    add("data", shape, replicate, shard, cp)
    add("replicate", shape, replicate)
    add("dp", shape, shard, cp)
    add("cp", shape, cp)
    add("tp", shape, kv, kv_copy)
    if grid.tp > model.kv_heads:
        add("kv", shape, kv)
        add("kv_copy", shape, kv_copy)
    if model.experts:
        folded = grid.pp, grid.dp_replicate, shards * grid.cp * grid.tp // grid.ep, grid.ep
        add("edp", folded, 2)
        add("ep", folded, 3)
    return groups | {"world": dist.group.WORLD}


def plan_of(grid: config.Grid, micro_batches: int) -> Plan:
    """Who does what in a step. Raises ValueError if the schedule cannot have so many micro-batches."""
    return plan(grid.schedule if grid.pp > 1 else "1f1b", grid.pp, micro_batches, grid.chunks, grid.pp_group)


def pipeline(settings: config.Config, group: collectives.Group, device: torch.device | str = "cpu") -> Pipeline:
    """Layers cut into stages of equal work, which is FLOPs, those of the head included."""
    model, grid, batch = settings.model, settings.grid, settings.batch
    work = [sum(part.flops for part in llama_layer(model, batch.seq, torch.float32, number=number))
            for number in range(model.layers)]
    unit, head = max(work), 2 * model.vocab * model.hidden
    cuts = partition([flops / unit for flops in work], grid.pp * grid.chunks, last=head / unit)
    most = max(sequences for sequences, _ in batch.ramp()) // batch.micro_batch // grid.dp
    return Pipeline(partial(plan_of, grid), cuts, most, group, device)


def moments_dtype(settings: config.Config, dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if settings.precision.moments == "bf16" else at_least_fp32(dtype)


def fp8_layers(settings: config.Config, groups: Groups, dtype: torch.dtype) -> tuple[Fp8, Fp8] | None:
    """How linear layers and experts multiply in FP8. Ranks of cp and tp have parts of one micro-batch's activations."""
    precision, stays = settings.precision, settings.grid.zero < 3
    if precision.fp8 == "none":
        return None
    recipe, parts = RECIPES[precision.fp8]._replace(pow2=precision.fp8_pow2), (groups["cp"], groups["tp"])
    return (Fp8(recipe, dtype, parts, (groups["tp"],), cached=stays),
            Fp8(recipe, dtype, (*parts, groups["ep"]), (groups["ep"],), cached=stays))


def build(settings: config.Config, groups: Groups, device: torch.device, dtype: torch.dtype) -> tuple[Llama, Optimizer]:
    """The model and its optimizer, filled with the seed's weights."""
    grid, optim, precision = settings.grid, settings.optim, settings.precision
    model = Llama(settings.model, groups, dtype, device, precision.attention, precision.recompute, grid.sp,
                  grid.async_tp, optim.z_loss, grid.sp_keep, grid.cp_style, pipeline(settings, groups["pp"], device),
                  Balance(optim.aux_loss, optim.aux_over, optim.router_z_loss, optim.bias_rate),
                  fp8_layers(settings, groups, dtype), precision.fp8_ends)
    optimizer = Optimizer(model.chunks(), groups, grid.bucket_mb, grid.zero, optim.optimizer, optim.betas,
                          weight_decay=optim.weight_decay, clip=optim.clip, moments=moments_dtype(settings, dtype),
                          last=model.head)
    optimizer.load(draw(optim.seed))
    return model, optimizer


def numbers(model: Llama, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """The state that belongs to no parameter, by name; to restore it, copy into these."""
    return optimizer.numbers() | {router.name: router.bias for router in model.routers}


# ---- one step -------------------------------------------------------------------------------------------------------

def gradients(model: Llama, optimizer: Optimizer, micro_batches: list[MicroBatch], groups: Groups) -> torch.Tensor:
    """Forward and backward of a step: the gradient of the mean loss over all valid tokens of the global batch.

    Returns that loss. The number it divides by is counted over all ranks and micro-batches before the first backward,
    so that every gradient is a plain sum from there on. Losses that balance experts are means over the sequences.
    """
    sequences = sum(len(batch.tokens) for batch in micro_batches) * size(groups["data"]) // size(groups["cp"])
    valid = sum((batch.labels != IGNORED).sum() for batch in micro_batches)
    counted = collectives.all_reduce(valid, groups["data"], async_op=True)  # under way during the first forward
    total = torch.zeros((), dtype=model.wide, device=valid.device)

    def forward(stage: int, k: int, x: torch.Tensor | None) -> torch.Tensor:
        batch = micro_batches[k]
        y = model(batch.tokens, batch.positions, batch.documents, stage=stage, x=x, labels=batch.labels,
                  weight=optimizer.scaled(1 / sequences))
        if stage < model.last:
            return y
        counted.wait()
        total.add_(y.detach())
        return optimizer.scaled(y / valid.clamp(min=1))

    engine = model.pipeline.engine(len(micro_batches))
    optimizer.begin(engine.backwards)
    engine.run(forward, model.between(micro_batches[0].tokens), model.dtype)
    counted.wait()
    optimizer.finish()
    for axis in ("data", "pp"):  # one pipeline rank has it, the others zeros
        collectives.all_reduce(total, groups[axis])
    return total / valid.clamp(min=1)


def balanced(model: Llama, groups: Groups, finite: torch.Tensor, sequences: int) -> dict[str, float]:
    """What metrics say of experts after a step: the losses that balance them, and of all layers the highest load of an
    expert over the mean one. finite: whether the step was one, else biases stay."""
    worst, cost = torch.zeros(2, dtype=torch.float64, device=finite.device).unbind()
    if model.routers:  # the layers of a pipeline rank may all be dense
        worst, cost = rebalance(model.routers, (groups["data"], groups["tp"]), finite)
    collectives.all_reduce(worst, groups["pp"], collectives.MAX)
    collectives.all_reduce(cost, groups["pp"])
    return dict(aux_loss=cost.item() / sequences, load_max_over_mean=worst.item())


@torch.no_grad()
def evaluate(model: Llama, rounds: Iterable[list[MicroBatch]], groups: Groups) -> float:
    """The mean loss over all valid tokens of all ranks' micro-batches, of which each rank gives equally many."""
    summed = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)  # losses, tokens
    for micro_batches in rounds:
        def forward(stage: int, k: int, x: torch.Tensor | None, given=micro_batches) -> torch.Tensor:
            batch = given[k]
            y = model(batch.tokens, batch.positions, batch.documents, stage=stage, x=x, labels=batch.labels)
            if stage == model.last:
                summed.add_(torch.stack((y.double(), (batch.labels != IGNORED).sum().double())))
            return y

        engine = model.pipeline.engine(len(micro_batches), evaluating=True)
        engine.run(forward, model.between(micro_batches[0].tokens), model.dtype)
    for axis in ("data", "pp"):
        collectives.all_reduce(summed, groups[axis])
    return (summed[0] / summed[1].clamp(min=1)).item()


def share(samples: Samples, first: int, sequences: int, settings: config.Config, groups: Groups,
          end: int | None = None) -> list[MicroBatch]:
    """What this rank computes of `sequences` samples, of which those from number `end` on have no labels."""
    grid, (c, i) = settings.grid, (size(groups["cp"]), rank(groups["cp"]))
    sharers = grid.tp if grid.sp else 1
    reader = rank(groups["data"]) // c  # context parallel ranks are the innermost, and read the same sequences
    return [MicroBatch(*cut(*vars(batch).values(), c, i, sharers)) for batch in
            samples.step(first, sequences, settings.batch.micro_batch, reader, grid.dp, end)]


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

def first_lines(settings: config.Config, groups: Groups, device: str, dtype: torch.dtype, samples: Samples) -> str:
    grid, batch, precision = settings.grid, settings.batch, settings.precision
    stages = pipeline(settings, groups.get("pp"))
    model = Llama(settings.model, groups, pipeline=stages, fp8=fp8_layers(settings, groups, dtype),
                  fp8_ends=precision.fp8_ends)
    chunks = model.chunks()
    buckets = composition(chunks, 0 if grid.zero == 3 else grid.bucket_mb)
    shards = grid.dp // grid.dp_replicate * grid.cp
    moments = moments_dtype(settings, dtype) if settings.optim.optimizer == "adamw" else None
    memory = Counter()
    for axis, n in ("dp", shards), ("edp", shards * grid.tp // grid.ep):
        counts = [sum(param.numel() for param in bucket) for bucket in buckets if bucket[0].spec.data == axis]
        memory.update(bytes_held(counts, grid.zero, n, dtype, moments) if counts else {})
    if precision.fp8 != "none" and grid.zero < 3:
        memory["FP8 weights"] = 2 * model.fp8_weights()
    memory["activations"] = activation_bytes(settings, dtype, stages)
    state = ("", "optimizer state", "gradients, optimizer state", "weights, gradients, optimizer state")[grid.zero]
    copies = f" in {grid.dp_replicate} replicas" if grid.dp_replicate > 1 else ""
    layers = "the whole model" if grid.tp == 1 else f"1/{grid.tp} of every layer and " + (
        f"1/{grid.tp} of the tokens between layers" if grid.sp else "all tokens between layers")
    if grid.pp > 1:
        layers = f"{grid.chunks} of {grid.pp * grid.chunks} stages ({grid.schedule}), of these {layers}"
    experts = active = ""
    if settings.model.experts:
        same = shards * grid.tp // grid.ep
        experts = f", ep {grid.ep} x edp {same}"
        layers += f", but {settings.model.experts // grid.ep} of {settings.model.experts} experts"
        state += f" (1/{same} of experts')"
        active = f" ({active_count(settings.model):,} active)"
    sequences, _ = batch.ramp()[0]
    accumulated = sequences // batch.micro_batch // grid.dp
    return "\n".join((
        f"device  {device}, {precision.dtype}" + (
            f", linear layers of blocks in fp8 {precision.fp8}" if precision.fp8 != "none" else ""),
        f"grid    pp {grid.pp} x dp {grid.dp} x cp {grid.cp} x tp {grid.tp}{experts}, zero {grid.zero}: a rank holds "
        + layers + (f", 1/{shards} of that of {state}{copies}" if shards > 1 and grid.zero else "")
        + f", and reads 1/{grid.dp} of the sequences" + (f", 1/{grid.cp} of each" if grid.cp > 1 else ""),
        f"batch   global batch {sequences} = micro {batch.micro_batch} x accum {accumulated} x dp {grid.dp}; "
        f"{sequences * batch.seq:,} tokens a step" + (f"; ramp {batch.batch_ramp}" if batch.batch_ramp else ""),
        f"model   {settings.model.preset}: {parameter_count(settings.model):,} parameters{active}; a rank needs about "
        + f"{gb(sum(memory.values()))}: " + ", ".join(f"{name} {gb(count)}" for name, count in memory.items()),
        f"data    {len(samples.corpus):,} tokens in {len(samples.corpus.files):,} files: "
        f"{samples.windows:,} samples of {batch.seq}",
    ))


def gb(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Of one GPU, from its name; None for what is not in the table: a utilisation of a guess is no measurement."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    words = set(re.split("[ -]", torch.cuda.get_device_name(device)))
    return next((peak * 1e12 for key, peak in PEAK_TFLOPS.items() if set(key.split()) <= words), None)


def utilisation(settings: config.Config, dtype: torch.dtype, peak: float | None) -> Callable[[float], dict]:
    """(tokens a second of a GPU) -> the part of its peak that their FLOPs are: with all scores counted, with those that
    are seen, and with what is computed again, too."""
    model, precision, seq = settings.model, settings.precision, settings.batch.seq
    flops, causal = (flops_per_token(model, seq, causal) for causal in (False, True))
    repeated = sum(extra_flops(llama_layer(model, seq, dtype, precision.attention, number=number), precision.recompute)
                   for number in range(model.layers))
    counts = dict(mfu=flops, mfu_causal=causal, hfu=flops + repeated)
    return lambda rate: {name: count * rate / peak if peak else None for name, count in counts.items()}


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
    step: int | None = None


def open_samples(settings: config.Config, paths: list[str], seed: int | None) -> Samples:
    data = settings.data
    corpus = Corpus(paths, settings.model.vocab, data.data_dtype, data.separator)
    return Samples(corpus, settings.batch.seq, seed, data.doc_mask)


@contextmanager
def without_collector() -> Iterator[None]:
    """A step leaves no cycles behind, and looking for some would let the device wait."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def train(settings: config.Config, samples: Samples, unseen: Samples | None, device: torch.device, why: str,
          progress: Progress) -> None:
    batch, optim, data, run = settings.batch, settings.optim, settings.data, settings.run
    dtype = DTYPES[settings.precision.dtype]
    groups = build_groups(settings.grid, settings.model, run.timeout)
    ranks = size(groups["world"])
    chief = rank(groups["world"]) == 0
    if chief:
        where = f"{ranks} ranks, {dist.get_backend()}" if groups["world"] else "one process"
        print(first_lines(settings, groups, f"{device.type} ({why}), {where}", dtype, samples), flush=True)
    if run.graph:
        prepare(device)
    model, optimizer = build(settings, groups, device, dtype)

    def forward_and_backward(micro_batches: list[MicroBatch]) -> torch.Tensor:
        return gradients(model, optimizer, micro_batches, groups)

    step_of = Recorded(forward_and_backward) if run.graph else forward_and_backward

    def validation_loss() -> float:
        at_once, wanted = ramp[0][0], min(data.eval_steps * ramp[0][0], unseen.windows)
        return evaluate(model, ([micro_batch.to(device) for micro_batch in
                                 share(unseen, first, at_once, settings, groups, wanted)]
                                for first in range(0, wanted, at_once)), groups)

    ramp, seen, skipped = batch.ramp(), 0, 0  # seen: samples so far, the whole state of the data
    used = utilisation(settings, dtype, peak_flops(device, dtype))
    metrics = open(run.metrics, "w") if run.metrics and chief else None
    bar = tqdm(total=optim.steps, unit="step", disable=not chief, dynamic_ncols=True)

    def read(step: int) -> tuple[int, list[MicroBatch]]:
        """The sequences of a step, which begins with sample number `seen`, and this rank's micro-batches of it."""
        progress.step, sequences = step, sequences_at(seen * batch.seq, ramp)
        return sequences, [batch.to(device) for batch in share(samples, seen, sequences, settings, groups)]

    following = read(0)
    with without_collector():
        for step in range(optim.steps):
            progress.step, began = step, time.perf_counter()
            collectives.sent.clear()
            lr, (sequences, micro_batches) = learning_rate(step, optim), following
            loss = step_of(micro_batches)
            norm = optimizer.step(lr)
            balance = balanced(model, groups, norm.isfinite(), sequences) if settings.model.experts else {}
            seen += sequences
            if step + 1 < optim.steps:
                following = read(step + 1)  # while the device is at work
                progress.step = step
            loss, norm = loss.item(), norm.item()  # waits for it
            skipped += not math.isfinite(norm)

            seconds = time.perf_counter() - began
            rate = sequences * batch.seq / seconds
            record = dict(
                step=step, tokens=seen * batch.seq, loss=loss, grad_norm=norm, lr=lr, step_s=seconds, tokens_per_s=rate,
                tokens_per_s_per_gpu=rate / ranks, **used(rate / ranks), memory_gb=memory_used(device) / 1e9,
                comm_gb={axis: collectives.sent[collectives.name(groups[axis])] / 1e9
                         for axis in AXES if size(groups[axis]) > 1}, skipped=skipped, **balance)
            if unseen and (step == optim.steps - 1 or (data.eval_every and (step + 1) % data.eval_every == 0)):
                record["val_loss"] = validation_loss()
                if chief:
                    bar.write(f"step {step}: validation loss {record['val_loss']:.4f}", file=sys.stdout)
            if metrics:
                print(as_json(record), file=metrics, flush=True)
            bar.set_postfix_str(f"loss {loss:.3f}, {rate:,.0f} tokens/s", refresh=False)
            bar.update()
    bar.close()
    if chief:
        print(f"trained {optim.steps} steps on {seen * batch.seq:,} tokens: loss {loss:.4f} nats a token in the last")
    if run.sample and math.isfinite(loss) and samples.corpus.is_text:
        continue_prompt(model, settings, groups, device, chief)


def continue_prompt(model: Llama, settings: config.Config, groups: Groups, device: torch.device, chief: bool) -> None:
    """Print what the model writes; it takes one replica of the weights, wherever its parts are."""
    if rank(groups["data"]) == 0 or settings.grid.zero == 3 or settings.grid.ep > 1:
        prompt = torch.tensor([[BYTES_SEPARATOR, *settings.run.sample.encode()]], device=device)
        written = sample(model, prompt, 240)[0, 1:].tolist()
        if chief:
            print(bytes(byte for byte in written if byte < 256).decode(errors="replace"))


def main(settings: config.Config) -> None:
    progress, run = Progress(), settings.run
    try:  # what the user can mend, and every rank finds alike
        device, why = choose_device(run.device)
        check_fp8(settings.precision.fp8, device)
        check_triton(settings.precision, device)
        for sequences, _ in settings.batch.ramp():
            micro_batches = sequences // settings.grid.dp // settings.batch.micro_batch
            try:
                plan_of(settings.grid, micro_batches)
            except ValueError as error:
                raise ValueError(f"--micro-batch {settings.batch.micro_batch}: {error}") from None
        samples = open_samples(settings, settings.data.data, settings.optim.seed)
        unseen = open_samples(settings, settings.data.val_data, None) if settings.data.val_data else None
    except ValueError as error:
        config.refuse(error)
    if settings.precision.dtype == "auto":
        settings.precision.dtype = "bf16" if device.type == "cuda" else "fp32"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        by_torchrun = "WORLD_SIZE" in os.environ
        with collectives.world(device, run.timeout) if by_torchrun else nullcontext():
            train(settings, samples, unseen, device, why, progress)
    except Exception as error:
        fail(progress, error)


def fail(progress: Progress, error: Exception) -> None:
    """Say where and why, and take the job down: the other ranks may wait for this one, so nothing is waited for."""
    traceback.print_exc()
    when = "before the first step" if progress.step is None else f"in step {progress.step}"
    print(f"train.py: rank {os.environ.get('RANK', 0)} failed {when}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main(settings)
