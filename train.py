"""Train a Llama-style model with 5D parallelism: data, context, tensor, pipeline and expert parallelism.

    --pp 2 --dp 2 --cp 2 --tp 2 arranges 16 ranks in a grid:

                    pp 0: the first layers                     pp 1: the last layers
                 cp 0              cp 1                     cp 0              cp 1
                 tp 0    tp 1      tp 0    tp 1             tp 0    tp 1      tp 0    tp 1
        dp 0        0       1         2       3    ───►        8       9        10      11
        dp 1        4       5         6       7    ───►       12      13        14      15

    dimension    ranks along it have different            enters this file in                     implemented in
    data         sequences of a batch                     local_micro_batches, build_optimizer    dp.py, zero.py
    context      tokens of each sequence                  local_micro_batches, build_model        cp.py
    tensor       parts of each weight matrix              build_model                             tp.py
    pipeline     layers                                   own_stages, build_pipeline              pp.py, schedules.py
    expert       experts of each layer, as --ep says      build_model, update_balance             ep.py

--sites 2 makes two such grids, which train by themselves and exchange what they have learned now and then: build_outer,
diloco.py.

Expert parallelism adds no ranks. With --ep 4 the ranks 0 to 3, which have the same layers, have a quarter of the
experts each, and so do the ranks 4 to 7. Tensor parallel ranks have consecutive numbers. A tensor parallel group is
therefore on one node, if --tp divides the number of ranks on a node.

    python train.py                                   one process
    torchrun --nproc_per_node=8 train.py              8 ranks: NCCL if there is a GPU for each, else CPUs with gloo
    torchrun --nproc_per_node=8 train.py --grid auto  on the grid that is predicted to be the fastest here
    python train.py --dry-run 0/1024                  what a rank of 1,024 would need, compute and send (run/dryrun.py)
    python train.py --help                            every setting

`train` is the whole run: the groups of the grid, a model in which each technique has its place, a pipeline, an
optimizer, and a loop. Its argument `run`, a Run object of run/job.py, has everything that a long run needs besides:
signals, checkpoints, evaluation, metrics, a watchdog.

The files of the techniques communicate gradients, activations and weights. This file communicates only scalars: token
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
from core.groups import build_groups, peers_of, within_site
from core.param import DTYPES, acc_dtype
from cp import shard_sequences
from diloco import Outer
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
    with job.started(settings) as run:  # chooses the device, connects the ranks, starts the watchdog
        train(run)


def train(run: job.Run) -> None:
    """Run the whole training; every rank calls this."""
    settings = run.settings
    # groups: axis of the grid -> this rank's Group, the ranks that differ from it along this axis only. A group of one
    # rank communicates nothing. core/groups.py defines all axes. Besides pp, cp, tp and ep:
    #
    #     data    the ranks that have different tokens, --dp x --cp. Losses are summed over them, and so are all
    #             gradients except those of experts, which are summed over the ranks that hold the same experts.
    #     dp      the ranks that ZeRO shards over: all of "data", or one replica with --dp-replicate. (The flag --dp is
    #             something else: it does not count context parallel ranks.)
    groups = build_groups(settings.grid, settings.model, settings.run.timeout)
    model = build_model(settings, groups, run.device)
    pipeline = build_pipeline(settings, groups, run.device)
    run.begin(groups, model, pipeline)  # prints the plan; refuses what does not fit, before weights are allocated
    optimizer = build_optimizer(settings, model, groups)
    outer = build_outer(settings, optimizer, groups)  # None with one site
    run.load(optimizer)  # fills in weights: initial, published, or a checkpoint's, with the optimizer's state

    # `run` reads a global batch for each step, and calls local_micro_batches to get this rank's part of it. Between
    # steps it evaluates and saves, goes back to a checkpoint if it must, and ends when it is asked to.
    for step in run.steps(local_micro_batches):
        with profile_range("forward and backward"):
            losses = forward_backward(model, pipeline, optimizer, step.micro_batches, groups)
        with profile_range("optimizer"):
            lr = learning_rate(step.number, settings.optim)
            # The run's own numbers, such as requests to stop. `optimizer.step` sums them over all ranks, in place, in
            # the same all-reduce as the norm.
            to_sum = run.to_sum()
            norm = optimizer.step(lr, to_sum=to_sum)
        if outer:
            with profile_range("exchange between sites"):
                outer.step(step.number + 1)
        results = {"loss": losses[0]}
        if settings.model.mtp:
            results["mtp_loss"] = losses[1]
        results |= {"norm": norm, "to_sum": to_sum}
        # step.samples is the whole global batch, not this rank's part: update_balance divides by a site's share of it.
        sequences = len(step.samples) // settings.grid.sites
        results |= update_balance(model, groups, norm.isfinite(), sequences)
        run.end_step(lr, results)


# ---- the model, the pipeline and the optimizer ----------------------------------------------------------------------
# The files of the techniques see only the model's shape and the grid, not the run's settings: here each setting becomes
# an argument of the file that implements it.

def build_model(settings: config.Config, groups: Groups, device: torch.device | str) -> Llama:
    """Build this rank's pipeline stages, with its shards of their layers.

    The parameters have no memory yet: the Optimizer allocates them in buckets, and its `load` fills them.
    """
    grid, precision, optim = settings.grid, settings.precision, settings.optim
    operations.allows_kernels = precision.kernels == "auto"  # global, because functions without a model read it
    execution = Execution(
        dtype=DTYPES[precision.dtype], device=device, attention=precision.attention,
        sequence=grid.sequence_parallel, async_tp=grid.sp == "async",  # tensor parallelism, tp.py
        cp_style=grid.cp_style,  # context parallelism, cp.py
        # rows: where --recompute full saves block inputs, in the host's memory or with None on the device.
        recompute=precision.recompute, rows=HostRows if precision.offloads("activations") else None)  # recompute.py
    balance = Balance(optim.aux_loss, optim.aux_over, optim.router_z_loss, optim.router_bias_rate)  # experts, ep.py
    # `groups` has the sizes of tp, cp and ep, from which each layer takes this rank's shard of its weights.
    model = Llama(settings.model, groups, execution, stages=own_stages(settings, groups["pp"]), balance=balance,
                  z_loss=optim.z_loss, mtp_weight=optim.mtp_weight)
    if precision.fp8 != "none":
        multiply_in_fp8(model, settings, groups)
    return model


def build_pipeline(settings: config.Config, groups: Groups, device: torch.device | str) -> Pipeline:
    """Build the pipeline, which runs a step's forwards and backwards in the order of --schedule (pp.py).

    Without --pp it has one stage: the step is gradient accumulation.
    """
    return Pipeline(partial(plan_of, settings.grid), groups["pp"], device)


def own_stages(settings: config.Config, group: Group) -> Stages:
    """Return this rank's pipeline stages. The layers are divided into stages of equal work, as plan/ predicts it.

    A batch ramp changes the number of micro-batches. The largest number decides how many activations are in flight.
    """
    grid, batch = settings.grid, settings.batch
    max_micro_batches = max(sequences for sequences, _ in batch.ramp()) // batch.micro_batch // grid.batch_shares
    largest_plan = plan_of(grid, max_micro_batches)
    # A stage has the same rank for all micro-batches: look at micro-batch 0. (Only in dualpipe it has two ranks. That
    # schedule is drawn, not run.)
    owners = [largest_plan.owner[stage, 0] for stage in range(largest_plan.stages)]
    own_layers = {stage: layers for stage, layers in enumerate(stages_of(settings)) if owners[stage] == group.rank}
    return Stages(own_layers, owners, in_flight=max(activations_held(largest_plan.ranks[group.rank])))


def multiply_in_fp8(model: Llama, settings: config.Config, groups: Groups) -> None:
    """Let the linear layers and experts of the model's blocks multiply in FP8 (fp8.py).

    Ranks that have shards of one tensor agree on its tensorwise scale. Activations are sharded over cp and tp, experts'
    inputs also over ep. Weights are sharded over tp, the experts of a layer over ep.
    """
    # Reuse the quantized weights across the micro-batches of a step. Under ZeRO-3 that would undo the sharding.
    cached = settings.grid.zero < 3
    recipe, dtype = settings.precision.fp8_recipe(), model.execution.dtype
    cp, tp, ep = (groups[axis] for axis in ("cp", "tp", "ep"))
    linear = Fp8(recipe, dtype, amax_groups=(cp, tp), weight_amax_groups=(tp,), cached=cached)
    experts = Fp8Experts(recipe, dtype, amax_groups=(cp, tp, ep), weight_amax_groups=(ep,), cached=cached)
    for layer, block in model.blocks.items():
        if int(layer) not in settings.fp8_layers():
            continue
        for module in block.modules():
            if module is getattr(block.attention, "to_latents", None):
                continue  # it has few rows: in DeepSeek-V3 576, which is not a multiple of the 128 of a block
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.mm = linear
            elif isinstance(module, GroupedExperts):
                module.mm = experts


def build_optimizer(settings: config.Config, model: Llama, groups: Groups) -> Optimizer:
    """Build the optimizer: the parameters in dp.py's buckets, sharded by zero.py, and their update rule.

    It sums the gradients over the data parallel ranks while backward runs. All weights are zeros until its `load`.
    """
    grid, optim, precision = settings.grid, settings.optim, settings.precision
    # acc_dtype: the dtype in which values of a dtype are accumulated, at least fp32.
    moments = torch.bfloat16 if precision.moments_dtype == "bf16" else acc_dtype(model.execution.dtype)
    groups = within_site(groups)  # so the gradient's norm is that of a site
    return Optimizer(model.units(), groups, bucket_mb=grid.bucket_mb, level=grid.zero, rule=optim.optimizer,
                     betas=optim.betas, weight_decay=optim.weight_decay, clip=optim.grad_clip, moments_dtype=moments,
                     reduce_dtype=torch.bfloat16 if precision.reduce_dtype == "bf16" else None,
                     offload=OffloadedState if precision.offloads("optimizer") else None,
                     # ZeRO-3 keeps the head whole from its forward to its backward, which follows directly in most
                     # schedules.
                     head=model.head,
                     # The ranks that share Muon's work, and where each is in the grid:
                     peers=peers_of(grid, settings.model) if optim.optimizer == "muon" else ())


def build_outer(settings: config.Config, optimizer: Optimizer, groups: Groups) -> Outer | None:
    """Build the outer optimizer, which exchanges the changes of weights between sites (diloco.py)."""
    optim = settings.optim
    if settings.grid.sites == 1:
        return None
    return Outer(optimizer.buckets, groups["sites"], every=optim.sync_every, lr=optim.outer_lr,
                 momentum=optim.outer_momentum, fragments=optim.sync_fragments, overlap=optim.sync_overlap,
                 dtype=settings.precision.sync_dtype)


# ---- a step ---------------------------------------------------------------------------------------------------------

def local_micro_batches(samples: Samples, first: int, sequences: int, settings: config.Config, groups: Groups,
                        end: int | None = None) -> list[MicroBatch]:
    """Return this rank's part of a global batch, the samples first ... first + sequences - 1.

    Data parallel ranks take different sequences, context parallel ranks different tokens of each sequence. Pipeline and
    tensor parallel ranks take the same. Samples from number `end` on get no labels: the last batch of an evaluation may
    be incomplete.
    """
    grid, cp = settings.grid, groups["cp"]
    dp_rank = groups["data"].rank // cp.size  # "data" is --dp x --cp; context parallel ranks read the same sequences
    sequences //= grid.sites  # a site reads neighbouring samples, on any grid
    first += groups["sites"].rank * sequences
    # c               the number of context parallel ranks
    # i               this rank's place among them
    # tp              the number of tensor parallel ranks that split a shard's tokens again
    # document_ranks  how many ranks --cp-zigzag document deals each document to
    shard = partial(shard_sequences, c=cp.size, i=cp.rank, tp=grid.sequence_shards, document_ranks=grid.document_ranks)
    local = []
    for batch in samples.step(first, sequences, settings.batch.micro_batch, dp_rank, grid.dp, end):
        sharded = MicroBatch(*shard(batch.tokens, batch.labels, batch.positions, batch.documents))
        if settings.model.mtp:  # shift first, then shard: the token after a shard's last one is on another rank
            next_tokens, next_labels, *_ = shard(*batch.one_ahead(), batch.positions, batch.documents)
            sharded = sharded._replace(next_tokens=next_tokens, next_labels=next_labels)
        local.append(sharded)
    return local


def forward_backward(model: Llama, pipeline: Pipeline, optimizer: Optimizer, micro_batches: list[MicroBatch],
                     groups: Groups) -> torch.Tensor:
    """Run the forwards and backwards of a step, which accumulate the gradients of the loss of the global batch.

    The loss is the mean over all tokens that have one. Multi-token prediction has a mean of its own, whose weighted
    loss is added. Returns the means: [1], or [2] with multi-token prediction. A mean is nan if no token has a loss.

    Every loss is divided by a count of the whole global batch, over all ranks and micro-batches: token losses by the
    number of tokens that have a loss, auxiliary losses of experts by the number of sequences. So each gradient is a
    plain sum over micro-batches and ranks.
    """
    dp = groups["data"].size // groups["cp"].size  # as --dp: context parallel ranks have the same sequences
    sequences = sum(len(batch.tokens) for batch in micro_batches) * dp
    token_counts = sum(batch.count_labels() for batch in micro_batches)  # tokens that have a loss, [1] or [2]
    all_reduce(token_counts, groups["data"])
    token_counts = token_counts.to(acc_dtype(model.execution.dtype))
    # The model returns sums of token losses. The gradient of each sum is 1 / count, in fp16 times the loss scale.
    loss_grad = optimizer.scale_loss(1 / token_counts.clamp(min=1))  # min=1 avoids 1 / 0
    loss_grad[1:].mul_(model.mtp_weight)  # [1:] is empty without multi-token prediction
    aux_loss_scale = optimizer.scale_loss(1 / sequences)
    loss_sums = torch.zeros_like(token_counts)

    def forward(stage: int, k: int, x: torch.Tensor | None) -> torch.Tensor:
        """Stage `stage` of micro-batch k. x: the previous stage's activation. Returns an activation, or the loss."""
        batch = micro_batches[k]
        # The fused loss computes its gradients in forward already. For this it needs loss_grad, the gradient that its
        # result will get in backward. The value that `model` returns is still the plain sum of the tokens' losses.
        # `y * loss_grad` below makes autograd pass exactly loss_grad back to it.
        y = model(batch.tokens, batch.positions, batch.documents, stage=stage, x=x, labels=batch.labels,
                  next_tokens=batch.next_tokens, next_labels=batch.next_labels, loss_grad=loss_grad,
                  aux_loss_scale=aux_loss_scale)
        if stage < model.last_stage:
            return y
        loss_sums.add_(y.detach())  # of this micro-batch's tokens; equal on all tensor parallel ranks
        return (y * loss_grad).sum()

    # The engine calls `forward` for each micro-batch and each stage of this rank, and runs backward from the loss that
    # the last stage returned. Meanwhile hooks start to reduce each bucket when its last gradient is complete.
    engine = pipeline.engine(len(micro_batches))
    optimizer.begin_step(len(micro_batches))  # zeroes gradients; each stage will have that many backward passes
    engine.run(forward, model.boundary_shape(micro_batches[0].tokens), model.execution.dtype)
    optimizer.finish_step()  # waits for the reductions of gradients
    all_reduce(loss_sums, groups["data"])
    all_reduce(loss_sums, groups["pp"])  # only the rank with the last stage has the losses, the others have zeros
    return loss_sums / token_counts  # nan if no token has a loss: there is no mean


def update_balance(model: Llama, groups: Groups, updated: torch.Tensor, sequences: int) -> dict[str, torch.Tensor]:
    """Update the routers' biases, which balance the load of experts, and return the experts' metrics.

    updated: whether the optimizer has updated weights. If it skipped the step, biases stay as they are, too.
    Returns {} for a model without experts, otherwise

        aux_loss              the auxiliary losses, summed over layers, averaged over sequences
        load_max_over_mean    the imbalance: the tokens of the busiest expert, divided by the mean of its layer's
                              experts, in the layer where this is largest
    """
    if not model.config.experts:
        return {}
    imbalance = torch.zeros((), dtype=torch.float64, device=updated.device)
    loss = torch.zeros((), dtype=torch.float64, device=updated.device)
    if model.routers:  # the layers of a pipeline rank may all be dense
        imbalance, loss = update_biases(model.routers, (groups["data"], groups["tp"]), updated)
    all_reduce(imbalance, groups["pp"], MAX)
    all_reduce(loss, groups["pp"])
    return dict(aux_loss=loss / sequences, load_max_over_mean=imbalance)


def learning_rate(step: int, optim: config.Optim) -> float:
    """Return the learning rate of a step, counted from 0.

    After a linear warmup to lr it follows optim.lr_schedule:

        constant    stays at lr
        cosine      falls to min_lr at the last step
        wsd         (warmup, stable, decay) stays at lr, then falls linearly to min_lr over the last fifth of the steps
    """
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    if optim.lr_schedule == "constant":
        return optim.lr
    # The command line has checked this. A program that calls only this function has not.
    config.need(optim.lr_schedule in ("cosine", "wsd"), f"--lr-schedule {optim.lr_schedule}: is unknown")
    if optim.lr_schedule == "wsd":  # Hu et al. 2024
        fraction = min(1.0, (optim.steps - 1 - step) / (0.2 * optim.steps))  # 1 before the last fifth
    else:
        fraction = (1 + math.cos(math.pi * (step - optim.warmup + 1) / (optim.steps - optim.warmup))) / 2
    return optim.min_lr + (optim.lr - optim.min_lr) * fraction


# ---- the dry run ----------------------------------------------------------------------------------------------------

def measured_step(settings: config.Config, groups: Groups) -> dryrun.DryRun:
    """Measure this rank's memory, work and communication in a step with the largest batch of --batch-ramp.

    run/dryrun.py calls this.
    """
    model = build_model(settings, groups, "cpu")
    pipeline = build_pipeline(settings, groups, "cpu")
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
