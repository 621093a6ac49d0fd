"""What a run prints and writes: its first lines, its progress, its metrics, profiles, the gradient noise scale."""
import json
import math
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count, takewhile

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule
from tqdm import tqdm

from core import config
from core.collectives import ALONE, Groups, all_reduce
from core.groups import AXES
from core.param import DTYPES, Spec, is_first_replica
from plan import costs, machines
from plan.memory import format_bytes
from run.cli import LATER_S, METRIC, SOON_S, counted, is_stdout, say
from run.device import memory_of_rank, uses_kernels


class Log:
    """The first lines, the progress bar and the metrics of every step. All ranks call it; only rank 0 has output."""

    def __init__(self, settings: config.Config, groups: Groups, device: torch.device):
        self.settings, self.groups, self.device = settings, groups, device
        self.ranks, self.rank = groups["world"].size, groups["world"].rank
        self.is_first_rank = self.rank == 0
        dtype = DTYPES[settings.precision.dtype]
        # FP8 runs are measured against the peak of bf16, too.
        self.has_peak = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
        self.peak = machines.peak_flops(torch.cuda.get_device_name(device)) if self.has_peak else None
        self.flops = costs.flops_by_convention(settings)  # per token: mfu, mfu_causal and hfu
        self.last_loss: float | None = None  # of the last step of this process with a target; None before its first
        self.last_lap = 0.0
        self.noise: list[tuple[float, float]] = []  # noise_trace and noise_gradient2 of each step, on rank 0
        self.metrics_begun = self.metrics_failed = self.said_empty = False
        self.curves: list[TensorBoard | Wandb] = []
        self.next_line = math.inf  # when the next line of progress is due, by time.monotonic
        self.bar = tqdm(total=settings.optim.steps, unit="step", disable=True)

    def start(self, device_reason: str, model, samples) -> None:
        """Print the first lines; and warn if a layer was changed, but not what plan/ knows of it."""
        built = count_parameters(model, self.groups, self.device)
        counted = costs.parameters(self.settings.model).total
        if self.is_first_rank:
            ranks = f"{self.ranks} ranks, {dist.get_backend()}" if self.groups["world"].size > 1 else "one process"
            device = f"{self.device.type} ({device_reason}), {ranks}"
            fused = uses_kernels(self.settings, self.device)
            print(first_lines(self.settings, self.groups, device, built, samples, fused), flush=True)
            if self.has_peak and not self.peak:
                say(f"{device_reason}: its peak is not known here, so mfu, mfu_causal and hfu are null")
            if built != counted:
                say(f"warning: the model has {built:,} parameters, but plan/costs.py counts {counted:,}: predicted "
                    "memory, times and MFU are wrong until parameters, layer_elements, layer_matrices and llama_layer "
                    "there are changed like the model")

    def open_curves(self) -> None:
        """Open what --tensorboard and --wandb ask for, on the first rank. Raises ValueError if that fails."""
        for name, kind in (("tensorboard", TensorBoard), ("wandb", Wandb)):
            asked = self.settings.value(name)
            if asked and self.is_first_rank:
                try:
                    self.curves.append(kind(self.settings))
                except Exception as error:  # whatever a package raises, if nobody is logged in, for example
                    raise ValueError(f"{config.flag(name)} {asked}: {error}".splitlines()[0]) from None

    def begin(self, step: int) -> None:
        """Prepare the bar and the metrics for `step`, when the run begins, is resumed, or has gone back."""
        self.bar.close()
        self.bar = tqdm(total=self.settings.optim.steps, initial=step, unit="step", dynamic_ncols=True,
                        disable=not self.is_first_rank or not sys.stderr.isatty())
        self.metrics_begun = False
        self.next_line = time.monotonic() + SOON_S
        self.for_each_curve(lambda curve: curve.begin(step))

    def for_each_curve(self, work: Callable[["TensorBoard | Wandb"], None]) -> None:
        """Do the work for every curve. One that fails is dropped with a warning: training goes on without it."""
        for curve in list(self.curves):
            try:
                work(curve)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}".splitlines()[0]
                say(f"warning: --{curve.name}: {problem}: training goes on without")
                self.curves.remove(curve)

    def append(self, record: dict) -> None:
        """Append `record` to --metrics. The first call removes records of this and later steps from the file."""
        path = self.settings.run.metrics
        try:
            if not self.metrics_begun:
                os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
                if os.path.isfile(path):
                    cut(path, record["step"])
            with open(os.dup(1) if is_stdout(path) else path, "a") as file:
                file.write(as_json(record) + "\n")
            self.metrics_begun, self.metrics_failed = True, False
        except OSError as error:
            if not self.metrics_failed:
                say(f"warning: --metrics {path}: {error.strerror}: training goes on without")
            self.metrics_begun, self.metrics_failed = False, True  # the next one is not appended to a torn line

    def lap(self, began: float) -> float:
        """Seconds since `began`, or since the last call if that was later."""
        began, self.last_lap = max(began, self.last_lap), time.perf_counter()
        return self.last_lap - began

    def metrics(self, step, *, skipped: int, loss: float, norm: float, seconds: float) -> dict:
        """The metrics of a step; memory_gb, the peak so far, and comm_gb are this rank's. step: a job.Step.
        skipped: number of steps since the beginning of the run."""
        rate = len(step.samples) * self.settings.batch.seq_len / seconds
        utilisation = {name: flops * rate / self.ranks / self.peak if self.peak else None
                       for name, flops in self.flops.items()}
        return dict(
            step=step.number, tokens=step.tokens, loss=loss, grad_norm=norm, lr=step.lr,
            step_s=seconds, tokens_per_s=rate, tokens_per_s_per_gpu=rate / self.ranks, **utilisation,
            memory_gb=peak_memory(self.device) / 1e9,
            comm_gb={axis: step.sent[axis] / 1e9 for axis in AXES if self.groups[axis].size > 1},
            skipped=skipped)

    def write(self, record: dict) -> None:
        empty = math.isnan(record["loss"]) and math.isfinite(record["grad_norm"])  # which is 0, not that of nan
        if empty and self.is_first_rank and not self.said_empty:
            say(f"warning: step {record['step']} has no loss: none of its tokens is a target (said once)")
        self.said_empty |= empty
        if self.last_loss is None or math.isnan(self.last_loss) or not empty:
            self.last_loss = record["loss"]
        if "val_loss" in record:
            self.print_validation_loss(record["step"] + 1, record["val_loss"])
        if self.is_first_rank and math.isfinite(record.get("noise_trace", math.nan)):
            self.noise.append((record["noise_trace"], record["noise_gradient2"]))
        if self.settings.run.metrics and self.is_first_rank:
            self.append(record)
        self.for_each_curve(lambda curve: curve.write(record["step"], scalars(record)))
        done, steps = record["step"] + 1, self.settings.optim.steps
        progress = f"loss {record['loss']:.3f}, {record['tokens_per_s']:,.0f} tokens/s"
        self.bar.set_postfix_str(progress, refresh=False)
        self.bar.update()
        is_due = done % max(1, steps // 20) == 0 or done == steps or time.monotonic() >= self.next_line
        if self.is_first_rank and self.bar.disable and is_due:
            self.next_line = time.monotonic() + LATER_S
            print(f"step {done}/{steps}: {progress}", file=sys.stderr, flush=True)

    def print_validation_loss(self, steps: int, loss: float | None) -> None:
        if self.is_first_rank and loss is not None:  # None: the run was asked to end meanwhile
            self.bar.write(f"after {counted(steps, 'step')}: validation loss {loss:.4f}", file=sys.stdout)

    def close(self, steps: int, tokens: int) -> None:
        self.bar.close()
        self.for_each_curve(lambda curve: curve.close())
        if self.is_first_rank and self.last_loss is not None:
            nothing_learned = self.said_empty and math.isnan(self.last_loss)
            loss = "no target" if nothing_learned else f"last loss {self.last_loss:.4f} nats per token"
            print(f"trained {counted(steps, 'step')} on {tokens:,} tokens: {loss}")
            late = self.noise[len(self.noise) // 2:]
            trace = sum(trace for trace, _ in late)
            gradient2 = sum(gradient2 for _, gradient2 in late)
            if gradient2 > 0:
                print(f"gradient noise scale of the last {counted(len(late), 'step')}: "
                      f"{max(0.0, trace / gradient2):,.0f} tokens")


def cut(path: str, step: int) -> None:
    """Remove the metrics of `step` and of later ones, or a line that a killed run or a full disk has torn, and all that
    follows. In place: a link stays one, and a crash loses nothing else."""
    def stays(line: bytes) -> bool:
        metric = re.match(re.escape(METRIC) + rb" (\d+)", line)
        return is_whole(line) and not (metric and int(metric[1]) >= step)

    with open(path, "r+b") as file:
        size, last = 0, b"\n"
        for last in takewhile(stays, file):
            size += len(last)
        file.truncate(size)
        if not last.endswith(b"\n"):  # torn between the line and its end
            file.seek(size)
            file.write(b"\n")


def is_whole(line: bytes) -> bool:
    try:
        return line.endswith(b"\n") or isinstance(json.loads(line), dict)
    except ValueError:
        return False


def count_parameters(model, groups: Groups, device: torch.device) -> int:
    """Return how many parameters a model.Llama has on all ranks together. Every rank calls it."""
    specs = {param.spec.name: param.spec for param in model.parameters()}  # with the shapes of whole tensors
    if groups["tie"].rank > 0:  # the first stage counts what it shares with the last
        specs = {name: spec for name, spec in specs.items() if "tie" not in spec.along}
    total = torch.tensor(sum(math.prod(spec.shape) for spec in specs.values()), device=device)
    all_reduce(total, groups["pp"])
    return int(total)


def first_lines(settings: config.Config, groups: Groups, device: str, built: int | None = None, samples=None,
                fused: bool = False) -> str:
    """The lines that describe a run: device, in words; grid, batch, model and, if there are run.data.Samples, data.
    built: the model's number of parameters. None stands for the count of plan/costs.py. fused: whether to count memory
    for fused kernels, as on GPUs."""
    grid, batch, precision, model = settings.grid, settings.batch, settings.precision, settings.model
    total = costs.parameters(model)
    fp8 = f", linear layers of blocks in fp8 {precision.fp8}" if precision.fp8 != "none" else ""
    sequences, _ = batch.ramp()[0]
    ramp = f"; ramp {batch.batch_ramp}" if batch.batch_ramp else ""
    memory = memory_of_rank(settings, groups.get("pp", ALONE).rank, fused)
    kinds = ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in memory.items())
    of_sites = f" x sites {grid.sites}" if grid.sites > 1 else ""
    active = f" ({total.active:,} active)" if model.experts else ""
    lines = [f"device  {device}, {precision.dtype}{fp8}", f"grid    {grid_line(grid, model)}"]
    if settings.grid_is_example:
        ranks = grid.dp * grid.cp * grid.tp * grid.pp
        small = ", --preset tiny the smallest model" if model.hidden != type(model).hidden else ""
        lines.append(f"        (chosen to show the axes; --dp {ranks} is pure data parallelism{small})")
    lines += [
        f"batch   global batch {sequences} = micro {batch.micro_batch} x accum "
        f"{sequences // batch.micro_batch // grid.batch_shares} x dp {grid.dp}{of_sites}; "
        f"{sequences * batch.seq_len:,} tokens per step{ramp}",
        f"model   {model.preset}: {built or total.total:,} parameters{active}; "
        f"rank {groups.get('world', ALONE).rank} needs about {format_bytes(sum(memory.values()))}: {kinds}"]
    if samples:
        targets = samples.corpus.targets()
        masked = f", of which {targets:,} are targets," if targets < len(samples.corpus) else ""
        lines.append(
            f"data    {len(samples.corpus):,} tokens{masked} in {counted(len(samples.corpus.files), 'file')}: "
            f"{counted(samples.spans, 'sample')} of {batch.seq_len}{times_read(settings, samples)}")
    return "\n".join(lines)


def times_read(settings: config.Config, samples) -> str:
    """How often the run reads the samples of each source; "" if it reads none of them twice, or has a batch ramp."""
    if settings.batch.batch_ramp:
        return ""
    count = settings.optim.steps * settings.batch.global_batch
    weights = [source.weight for source in samples.corpus.sources]
    times = [count * weight / sum(weights) / spans for weight, spans in zip(weights, samples.spans_of)]
    return f", read {' and '.join(f'{each:.3g}' for each in times)} times" if max(times) > 1 else ""


def grid_line(grid: config.Grid, model: config.Model) -> str:
    """The axes' sizes, and which part of model and data each rank has."""
    shards = grid.dp // grid.dp_replicate * grid.cp  # of ZeRO
    state = ("", "optimizer state", "gradients, optimizer state", "weights, gradients, optimizer state")[grid.zero]
    layers = "the whole model" if grid.tp == 1 else f"1/{grid.tp} of every layer and " + (
        f"1/{grid.tp} of the tokens between layers" if grid.sequence_parallel else "all tokens between layers")
    if grid.pp > 1:
        layers = f"{grid.virtual_stages} of {grid.pp * grid.virtual_stages} stages ({grid.schedule}), of these {layers}"
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
    parts = (grid.batch_shares, "of the sequences"), (grid.cp, "of each sequence")
    reads = ", ".join(f"1/{ranks} {of}" for ranks, of in parts if ranks > 1)
    sites = f"sites {grid.sites} x " if grid.sites > 1 else ""
    return (f"{sites}pp {grid.pp} x dp {grid.dp} x cp {grid.cp} x tp {grid.tp}{experts}, zero {grid.zero}: "
            f"a rank {holds} {layers}{sharded}{', and reads ' + reads if reads else ''}")


def peak_memory(device: torch.device) -> float:
    """This rank's peak of memory so far, in bytes: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def as_json(record: dict) -> str:
    """`record` as one line of JSON; NaN and inf, which JSON lacks, become null."""
    finite = {key: None if isinstance(value, float) and not math.isfinite(value) else value
              for key, value in record.items()}
    return json.dumps(finite)


# ---- TensorBoard and Weights & Biases -------------------------------------------------------------------------------

def scalars(record: dict) -> dict[str, float]:
    """The finite numbers of a record of metrics by name, except the step. {"comm_gb": {"dp": 1}} is comm_gb/dp."""
    found = {}
    for name, value in record.items():
        if isinstance(value, dict):
            found |= {f"{name}/{part}": number for part, number in value.items()}
        else:
            found[name] = value
    return {name: number for name, number in found.items()
            if name != "step" and number is not None and math.isfinite(number)}


class TensorBoard:
    """The metrics as scalars, in files of events in the folder of --tensorboard."""
    name = "tensorboard"

    def __init__(self, settings: config.Config):
        from torch.utils.tensorboard import SummaryWriter
        self.folder, self.open, self.writer = settings.run.tensorboard, SummaryWriter, None

    def begin(self, step: int) -> None:
        """Begin a file. TensorBoard then ignores what earlier files say of `step` and of later ones."""
        self.close()
        self.writer = self.open(self.folder, purge_step=step)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        for name, number in numbers.items():
            self.writer.add_scalar(name, number, step)
        self.writer.flush()  # so that a run that fails has its last steps there, too

    def close(self) -> None:
        if self.writer:
            self.writer.close()


class Wandb:
    """The metrics as a run of Weights & Biases. Its id is kept in the folder of checkpoints, so that a resumed run
    continues it. wandb takes steps in order: of steps that are taken again, it keeps what came first."""
    name = "wandb"

    def __init__(self, settings: config.Config):
        import wandb
        asked = settings.run
        self.file = os.path.join(asked.checkpoint_dir, "wandb-run") if asked.checkpoint_dir else ""
        number = None
        if asked.resume and self.file and os.path.isfile(self.file):
            with open(self.file) as file:
                number = file.read().strip()
        self.run = wandb.init(project=asked.wandb, id=number, resume="allow", allow_val_change=True,
                              config={name: settings.value(name) for name in config.FIELDS})

    def begin(self, step: int) -> None:
        if self.file:
            with open(self.file, "w") as file:
                file.write(self.run.id + "\n")

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self.run.log(numbers, step=step)

    def close(self) -> None:
        self.run.finish()


# ---- profiles -------------------------------------------------------------------------------------------------------

WAIT, ACTIVE = 3, 3  # steps that are not recorded, and steps that are


@contextmanager
def profiling(folder: str, snapshot: str, rank: int, device: torch.device) -> Iterator[Callable[[], None]]:
    """Yield a function to be called after each step. folder, snapshot: --profile and --memory-snapshot; "": off.

    Earlier steps than those recorded allocate, compile and connect. In folder/rank-0.json … (for Perfetto) every phase
    of a step and every action of a pipeline has a name, such as "F1.0", the forward of stage 1 for micro-batch 0;
    kernels lie under the name that launched them. The first rank also prints the ten operations that take longest.
    """
    cuda = device.type == "cuda"
    if snapshot:
        os.makedirs(os.path.dirname(snapshot) or ".", exist_ok=True)
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    with start_profiler(folder, rank, cuda) if folder else nullcontext() as profiler:
        numbers = count(1)

        def end_step() -> None:
            if profiler:
                profiler.step()
            if snapshot and rank == 0 and next(numbers) <= WAIT + ACTIVE:  # anew: a run that fails has the last one
                torch.cuda.memory._dump_snapshot(snapshot)

        yield end_step


def start_profiler(folder: str, rank: int, cuda: bool) -> profile:
    os.makedirs(folder, exist_ok=True)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda

    def write(profiler: profile) -> None:
        path = os.path.join(folder, f"rank-{rank}.json")
        profiler.export_chrome_trace(path)
        if rank == 0:
            by = "self_device_time_total" if cuda else "self_cpu_time_total"  # without the operations that they call
            table = profiler.key_averages().table(sort_by=by, row_limit=10, max_name_column_width=58)
            print(table, end="", flush=True)
            if os.path.exists(path) and not os.path.exists(f"{path}.tmp"):
                print(f"written: {path}", flush=True)
            else:  # of which torch says nothing
                say(f"warning: --profile {folder}: the trace could not be written there: is the disk full?")

    return profile(activities=activities, schedule=schedule(wait=WAIT - 1, warmup=1, active=ACTIVE, repeat=1),
                   on_trace_ready=write, acc_events=True)


# ---- the gradient noise scale ---------------------------------------------------------------------------------------
#
# Up to which size is a larger batch worth its tokens? The gradient of a batch of b tokens is the true gradient G plus
# noise of covariance S/b. In expectation its squared norm is |G|^2 + tr(S)/b. Data parallel training has gradients of
# two batch sizes in every step: each rank's own before the reduction (b = B/n) and the reduced one (b = B). So
#
#     |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b)          tr(S) = (|g_b|^2 - |g_B|^2) / (1/b - 1/B)
#
# Both estimates are unbiased but noisy: average them over steps before dividing. tr(S) / |G|^2, in tokens, is the batch
# at which a step makes half of the progress of an infinite batch. McCandlish et al. 2018, An Empirical Model of
# Large-Batch Training, appendix A.1. n ranks, B tokens per step, b tokens per local gradient.

def solve(b: float, small: float, B: float, large: float) -> tuple[float, float]:
    """(|G|^2, tr(S)) from the squared norms `small` and `large` of gradients of b and of B tokens."""
    return (B * large - b * small) / (B - b), (small - large) / (1 / b - 1 / B)


class GradientNoise:
    """Measures the noise of the gradients of an Optimizer (zero.py). ranks: the number of data parallel ranks.

    One pass over the gradients and no collective: Optimizer.step sums `squares` with the clipping norm. Left out are
    experts and parameters whose gradient is partial over tensor parallel ranks (norms). At ZeRO levels 2 and 3 every
    micro-batch is reduced, so b is the size of a rank's micro-batch. Context parallel ranks share sequences, whose
    tokens are not independent: with them there is no estimate.
    """

    def __init__(self, optimizer, ranks: int):
        self.optimizer, self.buckets, self.ranks = optimizer, optimizer.buckets, ranks
        self.reductions = 0  # of the first bucket in this step: 1, or one per micro-batch
        self.local = torch.zeros((), dtype=self.buckets[0].acc_dtype, device=self.buckets[0].device)
        for bucket in self.buckets:
            bucket.start_reduction = partial(self.measure_and_start, bucket, bucket.start_reduction)

    def counts(self, bucket, spec: Spec) -> bool:
        """Whether this rank counts the parameter: one of the ranks with the same shard and the same tokens does."""
        return not spec.partial_axes and spec.data_axis == "dp" and is_first_replica(spec, bucket.groups)

    def measure_and_start(self, bucket, start_reduction: Callable[[], None]) -> None:
        """Add the squared norm of the bucket's local gradient, then start its reduction."""
        if bucket is self.buckets[0]:
            self.reductions += 1
        for start, stop, spec in bucket.spans:
            if self.counts(bucket, spec):
                self.local += torch.linalg.vector_norm(bucket.grad[start:stop]).square()
        start_reduction()

    def squares(self) -> torch.Tensor:
        """After the reductions of a step, before its update: this rank's terms of |g_B|^2, and of the sum over ranks of
        |b/B g_b|^2."""
        large = torch.zeros_like(self.local)
        for bucket in self.buckets:
            for start, stop, spec in bucket.spans:
                if self.counts(bucket, spec) and bucket.owns(spec):
                    large += torch.linalg.vector_norm(bucket.within_shard(bucket.grad_shard, start, stop)).square()
        squares = torch.stack((large, self.local)) / self.optimizer.scale_loss(1.0) ** 2
        self.count, self.reductions = self.ranks * self.reductions, 0
        self.local = torch.zeros_like(self.local)
        return squares

    def estimate(self, tokens: int, sums: torch.Tensor) -> dict[str, torch.Tensor]:
        """Estimates of the last step, scalars: noise_gradient2, |G|^2, and noise_trace, tr(S). tokens: B. sums [2]:
        `squares`, summed over ranks."""
        large, small = sums.double().unbind()
        gradient2, trace = solve(tokens / self.count, small * self.count, tokens, large)
        return dict(noise_gradient2=gradient2, noise_trace=trace)
