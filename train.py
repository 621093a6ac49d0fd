"""Train a Llama-style model with 5D parallelism: data, context, tensor, pipeline and expert parallelism.

    python train.py                                   one process
    torchrun --nproc_per_node=8 train.py              8 ranks: NCCL if there is a GPU for each, else CPUs with gloo
    torchrun --nproc_per_node=8 train.py --grid auto  on the grid that is predicted to be the fastest here
    python train.py --dry-run 0/1024                  what a rank of 1,024 would need, compute and send (run/dryrun.py)
    python train.py --help                            every setting

`train` is the whole run: a grid of ranks, a model in which each technique has its place, an optimizer, and a loop. What
a long run needs besides (signals, checkpoints, evaluation, metrics, a watchdog) is behind `run`, of run/job.py.

The files of the techniques communicate gradients, activations and weights; this one communicates scalars only: token
counts, losses, metrics.
"""
if __name__ == "__main__":
    from run import cli

    settings = cli.from_command_line()  # before torch is imported, so that a wrong flag is answered at once

import math
from functools import partial

import torch

import operations
from core import config
from core.collectives import MAX, Group, Groups, all_reduce
from core.groups import build_groups, peers_of
from core.param import DTYPES, acc_dtype
from cp import shard_sequences
from ep import Balance, GroupedExperts, update_biases
from fp8 import Fp8, Fp8Experts
from model import Execution, Llama, Stages
from plan.costs import stages_of
from pp import Pipeline, profile_range
from run import dryrun, job
from run.data import MicroBatch, Samples
from run.offload import HostRows, OffloadedState
from schedules import activations_held, plan_of
from tp import ColumnParallelLinear, RowParallelLinear
from zero import Optimizer


def main(settings: config.Config) -> None:
    if settings.run.dry_run:
        return dryrun.main(settings, measured_step)
    with job.started(settings) as run:  # the device, ranks that know each other, signals, the watchdog
        train(run)


def train(run: job.Run) -> None:
    """The run of one rank.

    The ranks are a grid pp x dp x cp x tp, tp innermost: its ranks have consecutive numbers. `groups`
    has this rank's Group along each axis, also of size 1 (then its collectives are the identity).
    core/groups.py defines all axes, also the axes of experts and of hybrid sharding. Two of them:

        data    dp x cp: the ranks with different tokens, over which gradients and losses are summed
        dp      not --dp: the ranks over which ZeRO shards. They include context parallel ranks, and
                with --dp-replicate they are the ranks of one replica.
    """
    settings = run.settings
    groups = build_groups(settings.grid, settings.model, settings.run.timeout)
    model = build_model(settings, groups, run.device)
    pipeline = build_pipeline(settings, groups, run.device)
    # Says what will happen; ends here, before weights are allocated, if that does not fit.
    run.begin(groups, model, pipeline)
    optimizer = build_optimizer(settings, model, groups)
    run.load(optimizer)  # weights: initial ones, published ones, or a checkpoint's, with the optimizer's state
    # A step has a number, samples (the global batch's) and micro_batches (this rank's part, by the function below).
    # Between steps `run` evaluates, saves, rewinds, and ends when asked to.
    for step in run.steps(local_micro_batches):
        with profile_range("forward and backward"):
            losses = forward_backward(model, pipeline, optimizer, step.micro_batches, groups)
        with profile_range("optimizer"):
            lr = learning_rate(step.number, settings.optim)
            to_sum = run.to_sum()  # requests to stop, seconds, noise: summed over ranks with the norm, in place
            norm = optimizer.step(lr, to_sum=to_sum)
        results = dict(zip(("loss", "mtp_loss"), losses), norm=norm, to_sum=to_sum)
        run.end_step(lr, results | update_balance(model, groups, norm.isfinite(), sequences=len(step.samples)))


# ---- the model and its optimizer ------------------------------------------------------------------------------------
# Techniques do not see the settings: here each setting becomes an argument of the file that implements it.

def build_model(settings: config.Config, groups: Groups, device: torch.device | str) -> Llama:
    """This rank's pipeline stages, with its shards of their layers. The parameters are not allocated yet: the Optimizer
    allocates them in buckets, its `load` fills them."""
    grid, precision, optim = settings.grid, settings.precision, settings.optim
    operations.allows_kernels = precision.kernels == "auto"  # global: functions without a model read it
    execution = Execution(
        dtype=DTYPES[precision.dtype], device=device, attention=precision.attention,
        sequence=grid.sequence_parallel, async_tp=grid.sp == "async",  # tp.py
        cp_style=grid.cp_style,  # cp.py
        recompute=precision.recompute, rows=HostRows if precision.offloads("activations") else None)  # recompute.py
    balance = Balance(optim.aux_loss, optim.aux_over, optim.router_z_loss, optim.router_bias_rate)  # of experts, ep.py
    model = Llama(settings.model, groups, execution, stages=own_stages(settings, groups["pp"]), balance=balance,
                  z_loss=optim.z_loss, mtp_weight=optim.mtp_weight)
    if precision.fp8 != "none":
        multiply_in_fp8(model, settings, groups)
    return model


def build_pipeline(settings: config.Config, groups: Groups, device: torch.device | str) -> Pipeline:
    """The engines that run a step's forwards and backwards in the order of --schedule (pp.py)."""
    return Pipeline(partial(plan_of, settings.grid), groups["pp"], device)


def own_stages(settings: config.Config, group: Group) -> Stages:
    """Return this rank's pipeline stages. The layers are divided into stages of equal work, as plan/ predicts it."""
    grid, batch = settings.grid, settings.batch
    max_micro_batches = max(sequences for sequences, _ in batch.ramp()) // batch.micro_batch // grid.dp
    largest = plan_of(grid, max_micro_batches)
    owners = [largest.owner[stage, 0] for stage in range(largest.stages)]  # the same for all micro-batches
    layers = {stage: layers for stage, layers in enumerate(stages_of(settings)) if owners[stage] == group.rank}
    return Stages(layers, owners, in_flight=max(activations_held(largest.ranks[group.rank])))


def multiply_in_fp8(model: Llama, settings: config.Config, groups: Groups) -> None:
    """Let blocks of the model multiply in FP8. Ranks with shards of one tensor agree on its tensorwise scale: of
    activations over cp and tp, of experts' inputs also over ep; of weights over tp, of whole experts' over ep."""
    cached = settings.grid.zero < 3  # FP8 weights stay for all micro-batches; ZeRO-3 frees what they are cast from
    recipe, dtype = settings.precision.fp8_recipe(), model.execution.dtype
    cp, tp, ep = (groups[axis] for axis in ("cp", "tp", "ep"))
    linear = Fp8(recipe, dtype, amax_groups=(cp, tp), weight_amax_groups=(tp,), cached=cached)
    experts = Fp8Experts(recipe, dtype, amax_groups=(cp, tp, ep), weight_amax_groups=(ep,), cached=cached)
    for layer, block in model.blocks.items():
        if int(layer) not in settings.fp8_layers():
            continue
        for module in block.modules():
            if module is getattr(block.attention, "to_latents", None):
                continue  # few rows, not a multiple of a block's 128 in DeepSeek-V3
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.mm = linear
            elif isinstance(module, GroupedExperts):
                module.mm = experts


def build_optimizer(settings: config.Config, model: Llama, groups: Groups) -> Optimizer:
    """The buckets of dp.py, sharded by zero.py, and their update. All weights are zeros until `load`."""
    grid, optim, precision = settings.grid, settings.optim, settings.precision
    moments = torch.bfloat16 if precision.moments_dtype == "bf16" else acc_dtype(model.execution.dtype)
    return Optimizer(model.units(), groups, bucket_mb=grid.bucket_mb, level=grid.zero, rule=optim.optimizer,
                     betas=optim.betas, weight_decay=optim.weight_decay, clip=optim.grad_clip, moments_dtype=moments,
                     reduce_dtype=torch.bfloat16 if precision.reduce_dtype == "bf16" else None,
                     offload=OffloadedState if precision.offloads("optimizer") else None,
                     head=model.head,  # its backward follows its forward: ZeRO-3 keeps it whole between them
                     peers=peers_of(grid, settings.model) if optim.optimizer == "muon" else ())  # share Muon's work


# ---- a step ---------------------------------------------------------------------------------------------------------

def local_micro_batches(samples: Samples, first: int, sequences: int, settings: config.Config, groups: Groups,
                        end: int | None = None) -> list[MicroBatch]:
    """This rank's part of the samples first … first + sequences - 1; those from number `end` on get no labels, as the
    last batch of an evaluation may be incomplete."""
    grid, cp = settings.grid, groups["cp"]
    dp_rank = groups["data"].rank // cp.size  # context parallel ranks, innermost in "data", read the same sequences
    shard = partial(shard_sequences, c=cp.size, i=cp.rank, tp=grid.sequence_shards, document_ranks=grid.document_ranks)
    out = []
    for batch in samples.step(first, sequences, settings.batch.micro_batch, dp_rank, grid.dp, end):
        sharded = MicroBatch(*shard(batch.tokens, batch.labels, batch.positions, batch.documents))
        if settings.model.mtp:  # whole sequences are shifted, then sharded: what follows a shard is on another rank
            next_tokens, next_labels, *_ = shard(*batch.one_ahead(), batch.positions, batch.documents)
            sharded = sharded._replace(next_tokens=next_tokens, next_labels=next_labels)
        out.append(sharded)
    return out


def forward_backward(model: Llama, pipeline: Pipeline, optimizer: Optimizer, micro_batches: list[MicroBatch],
                     groups: Groups) -> torch.Tensor:
    """Forward and backward of a step: the gradient of the mean loss over all valid tokens of the global batch.

    Returns that mean, [1]; with multi-token prediction, whose loss times its weight is added, both means, [2].
    Auxiliary losses of experts are means over the global batch's sequences. Every loss is divided by the number of all
    ranks' and micro-batches' tokens or sequences, so that each gradient is a plain sum over micro-batches and ranks.
    """
    dp = groups["data"].size // groups["cp"].size  # context parallel ranks have shards of the same sequences
    sequences = sum(len(batch.tokens) for batch in micro_batches) * dp
    valid = sum(batch.count_labels() for batch in micro_batches)  # tokens that have a loss, [1] or [2]
    all_reduce(valid, groups["data"])
    valid = valid.clamp(min=1).to(acc_dtype(model.execution.dtype))  # 1: perhaps no token has
    # The model returns sums of losses. The loss (in fp16, times its loss scale) is these times their gradient:
    loss_grad = optimizer.scale_loss(1 / valid)
    loss_grad[1:].mul_(model.mtp_weight)
    aux_loss_scale = optimizer.scale_loss(1 / sequences)
    total = torch.zeros_like(valid)

    def forward(stage: int, k: int, x: torch.Tensor | None) -> torch.Tensor:
        batch = micro_batches[k]
        # The fused loss computes its gradients in forward, so it takes there the one that it will get in backward.
        y = model(batch.tokens, batch.positions, batch.documents, stage=stage, x=x, labels=batch.labels,
                  next_tokens=batch.next_tokens, next_labels=batch.next_labels, loss_grad=loss_grad,
                  aux_loss_scale=aux_loss_scale)
        if stage < model.last_stage:
            return y
        total.add_(y.detach())  # the sum over this micro-batch's tokens, the same on all tp ranks
        return (y * loss_grad).sum()

    # The engine calls `forward` for each micro-batch and stage, and runs backward from what the last stage returned.
    # Meanwhile hooks start to reduce each bucket when its last gradient is complete.
    engine = pipeline.engine(len(micro_batches))
    optimizer.begin_step(len(micro_batches))  # zeroes gradients; each stage will have so many backward passes
    engine.run(forward, model.boundary_shape(micro_batches[0].tokens), model.execution.dtype)
    optimizer.finish_step()  # waits for the reductions of gradients
    all_reduce(total, groups["data"])
    all_reduce(total, groups["pp"])  # one pipeline rank has it, the others zeros
    return total / valid


def update_balance(model: Llama, groups: Groups, updated: torch.Tensor, sequences: int) -> dict[str, torch.Tensor]:
    """Update the routers' biases. updated: False if the step was skipped; then biases stay as they are.

    Returns the metrics of experts, if the model has any: aux_loss, the auxiliary losses, summed over layers and
    averaged over sequences; load_max_over_mean, the tokens of the most loaded expert over its layer's mean, for the
    worst layer.
    """
    if not model.model.experts:
        return {}
    load, loss = torch.zeros(2, dtype=torch.float64, device=updated.device).unbind()
    if model.routers:  # the layers of a pipeline rank may all be dense
        load, loss = update_biases(model.routers, (groups["data"], groups["tp"]), updated)
    all_reduce(load, groups["pp"], MAX)
    all_reduce(loss, groups["pp"])
    return dict(aux_loss=loss / sequences, load_max_over_mean=load)


def learning_rate(step: int, optim: config.Optim) -> float:
    """The rate of a step, counted from 0: a linear warmup to lr; then constant, or down to min_lr at the last step, by
    a cosine or, with "wsd", linearly over the last fifth of the steps."""
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    if optim.lr_schedule == "constant":
        return optim.lr
    config.need(optim.lr_schedule in ("cosine", "wsd"), f"--lr-schedule {optim.lr_schedule}: is unknown")
    if optim.lr_schedule == "wsd":  # warmup, stable, decay: Hu et al. 2024
        fraction = min(1.0, (optim.steps - 1 - step) / (0.2 * optim.steps))  # 1 before the last fifth
    else:
        fraction = (1 + math.cos(math.pi * (step - optim.warmup + 1) / (optim.steps - optim.warmup))) / 2
    return optim.min_lr + (optim.lr - optim.min_lr) * fraction


# ---- the dry run ----------------------------------------------------------------------------------------------------

def measured_step(settings: config.Config, groups: Groups) -> dryrun.DryRun:
    """What this rank needs, computes and sends in the first step, of --batch-ramp's largest batch (run/dryrun.py)."""
    model, pipeline = build_model(settings, groups, "cpu"), build_pipeline(settings, groups, "cpu")
    optimizer = build_optimizer(settings, model, groups)
    sequences = max(sequences for sequences, _ in settings.batch.ramp())
    samples = dryrun.ZeroSamples(settings.batch.seq_len)
    micro_batches = local_micro_batches(samples, 0, sequences, settings, groups)

    def step() -> None:
        forward_backward(model, pipeline, optimizer, micro_batches, groups)
        norm = optimizer.step(settings.optim.lr)
        update_balance(model, groups, norm.isfinite(), sequences)
    return dryrun.measure(step, model, optimizer, pipeline.engine(len(micro_batches)), groups)


if __name__ == "__main__":
    main(settings)
