"""Checks of the settings, and the defaults that follow from other settings.

A check raises ValueError with one line that names the flag, its value and what would work. What is checked are the
sections of a config.Config. Like config.py this needs the standard library alone.
"""
import math
import os
from dataclasses import fields

import schedules
from schedules import SCHEDULES

EXPERT_FIELDS = ("top_k", "expert_ffn", "shared_experts", "dense_layers", "router", "router_norm", "router_scale",
                 "expert_groups", "top_groups")
METRIC = b'{"step":'  # how a line of --metrics begins


def complete(config, world: int) -> None:
    """Fill in, in place, defaults that follow from other settings, and check all for `world` ranks.

    Raises ValueError for what cannot run. The order matters: a check reads what earlier ones have filled in.
    """
    if config.run.dry_run:
        check_dry_run(config.run, config.data, config.grid, world)
        world = config.run.gpus
    check_model(config.model)
    check_experts(config.model)
    if config.grid.grid == "auto":
        return  # plan/search.py chooses one, with which all is checked
    check_grid(config.grid, config.model, world)
    check_batch(config.batch, config.grid)
    check_schedule(config.batch, config.grid)
    check_optim(config.optim, config.model, config.precision)
    check_attention(config.precision, config.model)
    check_fp8(config.precision, config.model, config.grid)
    check_offload(config)
    check_data(config.data, config.model)
    check_run(config.run)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def need(condition: bool, line: str) -> None:
    """Raise ValueError(line) unless the condition holds."""
    if not condition:
        raise ValueError(line)


LARGEST, MOST_LAYERS, MOST_MICRO_BATCHES = 2**40, 10_000, 100_000  # beyond these a check would take minutes


def need_at_most(value: float, most: int, line: str) -> None:
    need(value <= most, f"{line}: must be at most {most:,}")


def need_not_negative(section, *names: str, positive: bool = False) -> None:
    for name in names:
        value, must_be = getattr(section, name), "above 0 and finite" if positive else "finite and not negative"
        need(0 <= value < math.inf and not (positive and value == 0), f"{flag(name)} {value}: must be {must_be}")
        if isinstance(value, int):
            need_at_most(value, LARGEST, f"{flag(name)} {value}")


def need_positive(section, *names: str) -> None:
    need_not_negative(section, *names, positive=True)


def divisors(n: int) -> str:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return ", ".join(str(d) for d in dict.fromkeys((*small, *(n // d for d in reversed(small)))))


def check_model(model) -> None:
    need_positive(model, "layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
    need_at_most(model.layers, MOST_LAYERS, f"--layers {model.layers}")
    need_positive(model, "rope_theta", "rope_scaling", "norm_eps")
    need_not_negative(model, "head_dim")
    if model.head_dim == 0:
        need(model.hidden % model.heads == 0,
             f"--heads {model.heads} does not divide --hidden {model.hidden}: use one of {divisors(model.hidden)}, "
             "or set --head-dim")
        model.head_dim = model.hidden // model.heads
    need(model.head_dim % 2 == 0, f"--head-dim {model.head_dim} is odd: rotary embedding rotates pairs of channels, "
                                  "use an even one")
    need_not_negative(model, "window", "window_every")
    need(model.window or not model.window_every, f"--window-every {model.window_every} without --window: all layers "
                                                 "have full attention")
    need(model.heads % model.kv_heads == 0,
         f"--kv-heads {model.kv_heads} does not divide --heads {model.heads}: use one of {divisors(model.heads)}")


def check_experts(model) -> None:
    need_not_negative(model, "experts", "expert_ffn", "shared_experts", "dense_layers")
    need_positive(model, "top_k", "router_scale", "expert_groups", "top_groups")
    if not model.experts:
        defaults = {f.name: f.default for f in fields(model)}
        for name in EXPERT_FIELDS:
            value = getattr(model, name)
            need(value == defaults[name], f"{flag(name)} {value} needs --experts")
        return
    model.expert_ffn = model.expert_ffn or model.ffn
    need(model.experts == 1 or model.top_k > 1 or not model.router_norm,
         "--top-k 1 with --router-norm: weights are always 1, so the loss gives the router no gradient, use "
         "--no-router-norm")
    need(model.top_k <= model.experts, f"--top-k {model.top_k} is more than --experts {model.experts}")
    need(model.dense_layers < model.layers,
         f"--dense-layers {model.dense_layers} of --layers {model.layers} leaves none with experts: use less")
    groups = model.expert_groups
    need(model.experts % groups == 0,
         f"--expert-groups {groups} does not divide --experts {model.experts}: use one of {divisors(model.experts)}")
    need(model.top_groups <= groups, f"--top-groups {model.top_groups} is more than --expert-groups {groups}")
    allowed = model.experts // groups * model.top_groups
    need(model.top_k <= allowed, f"--top-k {model.top_k}: a token may use only {allowed} experts, with --top-groups "
                                 f"{model.top_groups} of --expert-groups {groups}")


def check_grid(grid, model, world: int) -> None:
    need_positive(grid, "tp", "cp", "pp", "ep")
    need_not_negative(grid, "chunks", "pp_group")
    need(world % grid.pp == 0, f"--pp {grid.pp} does not divide {count(world)}: {use_of(world, grid.pp)}")
    check_pipeline(grid, model)
    of_stage, stages = world // grid.pp, f" of a pipeline stage at --pp {grid.pp}" if grid.pp > 1 else ""
    need(of_stage % grid.tp == 0,
         f"--tp {grid.tp} does not divide the {count(of_stage)}{stages}: {use_of(of_stage, grid.tp)}")
    check_tensor_parallel(grid, model)
    rest = of_stage // grid.tp
    need(rest % grid.cp == 0, f"--cp {grid.cp} does not divide the {count(rest)} that --pp {grid.pp} and --tp "
                              f"{grid.tp} leave: {use_of(rest, grid.cp)}")
    check_context_parallel(grid, model)
    if grid.dp == -1:
        grid.dp = rest // grid.cp
    need_positive(grid, "dp")
    ranks = grid.dp * grid.cp * grid.tp * grid.pp
    need(ranks == world, f"--dp {grid.dp} x --cp {grid.cp} x --tp {grid.tp}{f' x --pp {grid.pp}' if stages else ''} "
                         f"need {count(ranks)}, and there are {world}: use --dp {rest // grid.cp}, or start "
                         f"{count(ranks)} (torchrun --nproc_per_node={ranks} on one machine)")
    need_not_negative(grid, "bucket_mb")
    need_positive(grid, "dp_replicate")
    need(grid.dp % grid.dp_replicate == 0,
         f"--dp-replicate {grid.dp_replicate} does not divide --dp {grid.dp}: use one of {divisors(grid.dp)}")
    need(grid.dp_replicate == 1 or grid.zero > 0,
         f"--dp-replicate {grid.dp_replicate} needs something that is sharded: use --zero 1, 2 or 3")
    need(grid.dp_replicate == 1 or grid.dp // grid.dp_replicate * grid.cp > 1,
         f"--dp-replicate {grid.dp_replicate} leaves shards of one rank at --dp {grid.dp}: use less, or --zero 0")
    check_expert_parallel(grid, model)


def count(ranks: int) -> str:
    return f"{ranks} rank{'s' if ranks > 1 else ''}"


def use_of(ranks: int, wanted: int) -> str:
    """What works in place of an axis of `wanted` ranks where there are `ranks`."""
    return f"use one of {divisors(ranks)}" if ranks > 1 else f"start more ranks, torchrun --nproc_per_node={wanted}"


def check_pipeline(grid, model) -> None:
    """Fill in the model chunks per rank."""
    schedule = SCHEDULES[grid.schedule]
    need(grid.pp > 1 or grid.schedule == "1f1b", f"--schedule {grid.schedule} at --pp {grid.pp}: there is no pipeline, "
                                                 "use --pp 2 or more, or --schedule 1f1b")
    if grid.chunks == 0:
        grid.chunks = schedule.default_chunks() if grid.pp > 1 else 1
    need(grid.pp > 1 or grid.chunks == 1, f"--chunks {grid.chunks} without --pp: there is nothing to interleave with")
    need(grid.pp == 1 or not schedule.chunks or grid.chunks == schedule.chunks,
         f"--chunks {grid.chunks}: --schedule {grid.schedule} has {schedule.chunks} per rank; any number goes with "
         + " and ".join(name for name, other in SCHEDULES.items() if not other.chunks))
    need(grid.pp_group == 0 or (grid.pp > 1 and schedule.grouped), f"--pp-group {grid.pp_group}: only --schedule "
         + " and ".join(name for name, other in SCHEDULES.items() if other.grouped)
         + ", with --pp 2 or more, have groups of micro-batches")
    stages = grid.pp * grid.chunks
    need(model.layers >= stages, f"--pp {grid.pp} with --chunks {grid.chunks} splits {model.layers} layers into "
                                 f"{stages} stages: use less, or --layers {stages}")


def check_tensor_parallel(grid, model) -> None:
    tp, kv = grid.tp, model.kv_heads
    for name in ("heads", "ffn") if model.dense_layers or not model.experts else ("heads",):  # experts are not sharded
        n = getattr(model, name)
        need(n % tp == 0, f"--tp {tp} does not divide {flag(name)} {n}: use one of {divisors(n)}")
    n = model.shared_experts * model.expert_ffn
    need(n % tp == 0, f"--tp {tp} does not divide the {n} channels of --shared-experts: use one of {divisors(n)}")
    need(kv % tp == 0 or tp % kv == 0, f"--tp {tp} and --kv-heads {kv}: one must be a multiple of the other")
    need(model.vocab >= tp, f"--tp {tp} is more than --vocab {model.vocab}: some ranks would have no rows of it")
    need(not grid.async_tp or tp > 1, "--sp async at --tp 1: there is no communication to overlap, use --tp 2 or more")


def check_context_parallel(grid, model) -> None:
    heads = model.heads // grid.tp
    need(grid.cp == 1 or not grid.style().whole_sequences or heads % grid.cp == 0,
         f"--cp {grid.cp} --cp-style {grid.cp_style}: cannot share the {heads} heads of a tensor parallel rank, use "
         f"one of {divisors(heads)}, or another --cp-style")


def check_expert_parallel(grid, model) -> None:
    if grid.ep == 1:
        return
    need(model.experts > 0, f"--ep {grid.ep}: --preset {model.preset} has no experts, use --experts or --ep 1")
    need(model.experts % grid.ep == 0,
         f"--ep {grid.ep} does not divide --experts {model.experts}: use one of {divisors(model.experts)}")
    ranks = grid.dp // grid.dp_replicate * grid.cp * grid.tp
    need(ranks % grid.ep == 0, f"--ep {grid.ep} does not divide the {count(ranks)} of --dp, --cp and --tp"
         f"{' in a replica' if grid.dp_replicate > 1 else ''}: use one of {divisors(ranks)}")


def check_batch(batch, grid) -> None:
    """Fill in the micro-batch."""
    need_positive(batch, "seq", "global_batch")
    need_not_negative(batch, "micro_batch")
    usage = f'--batch-ramp "{batch.batch_ramp}": write sequences@tokens, such as "16@0,32@1e6"'
    try:
        sizes, starts = zip(*batch.ramp())
    except ValueError:
        raise ValueError(usage) from None
    need(min(sizes) > 0, usage)
    need(starts[0] == 0, f"{usage}, beginning at 0 tokens")
    need(all(a < b for a, b in zip(starts, starts[1:])), f"{usage}, each stage after the one before")

    name = "--batch-ramp" if batch.batch_ramp else "--global-batch"
    for size in sizes:
        below = size // grid.dp * grid.dp
        use = f"{below} or {below + grid.dp}" if below else f"{grid.dp}"
        need(size % grid.dp == 0, f"{name} {size} is not a multiple of --dp {grid.dp}: use {use}")
    if batch.micro_batch == 0:
        batch.micro_batch = default_micro_batch(math.gcd(*sizes) // grid.dp, batch, grid)
    for size in sizes:
        share = size // grid.dp
        need(share % batch.micro_batch == 0,
             f"--micro-batch {batch.micro_batch} does not divide a rank's share of {name} {size}, "
             f"which is {share} at --dp {grid.dp}: use one of {divisors(share)}")
        need_at_most(share // batch.micro_batch, MOST_MICRO_BATCHES, f"--micro-batch {batch.micro_batch} makes "
                     f"{share // batch.micro_batch:,} micro-batches per step of {name} {size}")
    tokens = batch.micro_batch * batch.seq  # with cp, sequences are padded to fit (config.padded_length)
    need(not grid.sequence_parallel or grid.cp > 1 or tokens % grid.tp == 0,
         f"--tp {grid.tp} cannot share --micro-batch {batch.micro_batch} x --seq {batch.seq} = {tokens} tokens in "
         "equal parts: use another --seq, or --sp off")


def default_micro_batch(share: int, batch, grid) -> int:
    """All of a rank's share of a step; of a pipeline as many sequences as leave 2 pp micro-batches, which fill any
    schedule, or the next larger number of them, or the next smaller one. Their tokens must suit tensor parallelism."""
    fills = 2 * grid.pp
    counts = [*range(fills, 100 * fills), *range(fills - 1, 0, -1)] if grid.pp > 1 else [1]
    sizes = [share // count for count in counts if share % count == 0]
    return next((size for size in sizes if grid.cp > 1 or size * batch.seq % grid.sequence_shards == 0), sizes[0])


def check_schedule(batch, grid) -> None:
    for sequences, _ in batch.ramp():
        try:
            schedules.plan_of(grid, sequences // grid.dp // batch.micro_batch)
        except ValueError as error:
            raise ValueError(f"--micro-batch {batch.micro_batch} at {sequences} sequences per step: {error}") from None


def check_optim(optim, model, precision) -> None:
    """Fill in learning rates and warmup."""
    need_not_negative(optim, "steps")
    need_not_negative(optim, "lr", "weight_decay", "clip", "seed", "z_loss")
    need_not_negative(optim, "aux_loss", "router_z_loss", "bias_rate")
    for name in ("router_z_loss", "bias_rate"):
        value = getattr(optim, name)
        need(model.experts or value == 0, f"{flag(name)} {value} without --experts: there is no router")
    if optim.lr == 0:
        optim.lr = min(1.2 / model.hidden, 2e-3)
    if optim.min_lr == -1:
        optim.min_lr = optim.lr / 10
    need(0 <= optim.min_lr <= optim.lr, f"--min-lr {optim.min_lr}: must lie between 0 and --lr {optim.lr}")
    if optim.warmup == -1:
        optim.warmup = min(20, optim.steps // 10)
    need_not_negative(optim, "warmup")
    need(optim.steps == 0 or optim.warmup <= optim.steps,
         f"--warmup {optim.warmup} is longer than the run: --steps {optim.steps}")
    need(all(0 <= beta < 1 for beta in optim.betas), f"--betas {optim.betas}: each must be at least 0 and below 1")
    need(precision.reduce_dtype == "fp32" or precision.dtype != "fp64",
         "--reduce-dtype bf16 with --dtype fp64 would undo it: use --reduce-dtype fp32")
    if precision.moments == "bf16":
        need(optim.optimizer != "sgd", f"--moments bf16 is for --optimizer adamw, not {optim.optimizer}")
        need(precision.dtype != "fp64", "--moments bf16 with --dtype fp64 would undo it: use --moments auto")
        need(optim.betas[1] <= 0.99, f"--moments bf16 with --betas {optim.betas}: an average in bf16 cannot move by "
                                     "less than 1/256 of itself, use a second beta of at most 0.99")


def check_attention(precision, model) -> None:
    if precision.attention == "triton":
        need(precision.dtype != "fp64", "--attention triton with --dtype fp64: the kernel has at most fp32, use "
                                        "--attention auto or math")
        need(model.head_dim <= 128, f"--attention triton with --head-dim {model.head_dim}: the kernel has at most 128, "
                                    "use --attention auto or math")


def check_fp8(precision, model, grid) -> None:
    fp8, tp = precision.fp8, grid.tp
    if fp8 == "none":
        need(precision.fp8_ends, "--no-fp8-ends without --fp8: no block multiplies in FP8")
        need(not precision.fp8_pow2, "--fp8-pow2 without --fp8: there are no scales")
        return
    need(precision.dtype not in ("fp16", "fp64"),
         f"--fp8 {fp8} with --dtype {precision.dtype}: FP8 goes with bf16, or with fp32 where a CPU emulates it")
    need(precision.fp8_ends or model.layers > 2,
         f"--no-fp8-ends: of --layers {model.layers} none would multiply in FP8, use 3 or more, or --fp8 none")
    need(not grid.async_tp, f"--fp8 {fp8} with --sp async: matmuls shard by shard have no FP8 version, use one of them")
    unit = 128 if precision.fp8_recipe().blocks else 16  # the blocks' size; what FP8 matmuls demand of their extents
    widths = {"--hidden": model.hidden, "--heads x --head-dim": model.heads // tp * model.head_dim,
              "--kv-heads x --head-dim": max(model.kv_heads // tp, 1) * model.head_dim}
    if not model.experts or model.dense_layers:
        widths["--ffn"] = model.ffn // tp
    if model.experts:
        widths["--expert-ffn"] = model.expert_ffn
        if model.shared_experts:
            widths["--shared-experts x --expert-ffn"] = model.shared_experts * model.expert_ffn // tp
    for name, n in widths.items():
        need(n % unit == 0, f"--fp8 {fp8}: {name} is {n} on a rank of --tp {tp}, and must be a multiple of {unit}")


def check_offload(config) -> None:
    precision = config.precision
    need(not precision.offloads("activations") or precision.recompute == "full",
         f"--offload {precision.offload} with --recompute {precision.recompute}: what is offloaded are the inputs of "
         "blocks, add --recompute full")
    need(precision.offload == "none" or not config.run.dry_run,
         f"--offload {precision.offload} with --dry-run: one device stands for GPU and host, python -m plan memory has "
         "the formula")


def check_data(data, model) -> None:
    """Fill in the dtype of tokens."""
    if data.data_dtype == "auto":
        data.data_dtype = "uint16" if model.vocab <= 2**16 else "uint32"
    need_not_negative(data, "eval_every")
    need_positive(data, "eval_steps")
    for name in ("data", "val_data"):
        for path in getattr(data, name):
            need(os.path.exists(path), f"{flag(name)} {path}: no such file or folder")
    need(data.val_data or not data.eval_every, f"--eval-every {data.eval_every} needs --val-data to evaluate on")
    need(-1 <= data.separator < model.vocab,
         f"--separator {data.separator} is outside the vocabulary: use 0 to {model.vocab - 1}, or -1")


def check_run(run) -> None:
    need_positive(run, "timeout")
    need_not_negative(run, "save_every", "keep", "time_limit", "max_skipped", "rewind", "skip_spikes", "check_replicas")
    need(run.save_every and run.max_skipped or not run.rewind, f"--rewind {run.rewind} needs --save-every, for a "
                                                               "checkpoint to go back to, and --max-skipped")
    need(run.out or not run.save_every, f"--save-every {run.save_every} needs --out, the folder to save in")
    for name in ("out", "export_hf", "profile"):
        path = getattr(run, name)
        need(not os.path.exists(path) or os.path.isdir(path), f"{flag(name)} {path}: is a file, name a folder")
    need(run.timeout <= 1e7, f"--timeout {run.timeout}: must be at most 1e7 seconds")
    snapshot = os.path.dirname(run.memory_snapshot) or "."
    need(os.path.isdir(snapshot), f"--memory-snapshot {run.memory_snapshot}: there is no folder {snapshot}")
    need(run.dry_run or not (run.gpus or run.rank), f"--gpus {run.gpus} --rank {run.rank}: only --dry-run pretends to "
         "be one of many ranks; torchrun --nproc_per_node starts them")
    folder = os.path.dirname(run.metrics) or "."
    need(os.path.isdir(folder), f"--metrics {run.metrics}: there is no folder {folder}")
    need(not os.path.isdir(run.metrics), f"--metrics {run.metrics}: is a folder, name a file")
    target = run.metrics if os.path.exists(run.metrics) else folder
    need(not run.metrics or os.access(target, os.W_OK), f"--metrics {run.metrics}: {target} cannot be written to")
    if os.path.isfile(run.metrics) and not run.dry_run:  # which is what a resumed run cuts, so it must be of metrics
        need(os.access(run.metrics, os.R_OK), f"--metrics {run.metrics}: cannot be read")
        with open(run.metrics, "rb") as file:
            need(os.path.getsize(run.metrics) == 0 or any(line.startswith(METRIC) for line in file),
                 f"--metrics {run.metrics}: has lines, but none of metrics: name another file, or remove it")


def check_dry_run(run, data, grid, world: int) -> None:
    need(world == 1, f"--dry-run on {count(world)}: one process pretends to be one of --gpus, leave out torchrun")
    need(run.gpus > 0, f"--dry-run with --gpus {run.gpus}: say how many ranks the run would have, such as --gpus 64")
    need(grid.grid == "given", "--dry-run with --grid auto: search chooses for the machine that it runs on; ask "
                               "python -m plan search for the best grid of another one, and give that")
    need(0 <= run.rank < run.gpus, f"--rank {run.rank}: the ranks of --gpus {run.gpus} are 0 to {run.gpus - 1}")
    need(not data.doc_mask, "--dry-run with --doc-mask: what documents hide depends on the data, leave one of them out")
