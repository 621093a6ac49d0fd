"""Kernels and training on one GPU, each beside its rivals: `python -m bench gpu --out FOLDER`, nine minutes at most.

PARTS, at the end, says what is measured, in this order, the most important first; `--only NAMES` takes some of them:

    checks      what kernels and calls of torch compute here, against fp64, and the tests that need a GPU
    training    Llama in bf16 and FP8 by train.py's loop, on sequences of 4096 tokens: a step, and its kernels by time
    streams     a matmul beside programs that wait, as collectives do; streams that block each other; the host's link;
                NCCL with two ranks on this GPU, beside one process
    variants    implementations that do the same: the first named is what runs by default, and which one to choose
    matmuls     those of a block and of the head: bf16 and FP8; forward, input gradients, weight gradients
    attention   on heads as the model has them: slices of the product of the fused projection
    kernels     what is bound by memory, and the loss
    more        other training runs, losses after 2,000 steps, learn/gpu.py

Nine minutes are too short for all: the same command goes on where it ended, also on another machine that has FOLDER.
bench/rows.py says which files are in it. What to look for on an unknown GPU, after each command:

    a failing check               mend it first; or train with --kernels torch
    matmuls below 640 TFLOP/s     of an H100 or H200: look at the clocks, and tune nothing
    more than 3% idle             the host is too slow: larger micro-batches, less tensor parallelism
    flash_fwd among the kernels   where torch's attention was expected: cuDNN was refused, find out why
    elementwise above 9%          tile sizes of kernels.py
    FP8 / bf16 above 0.85         FP8 does not pay here
    a variant is faster           it becomes the default if its training row gains 1%, or else its code goes
    more blocked pairs at 8       than at 32 connections: train with CUDA_DEVICE_MAX_CONNECTIONS=32. Nothing here needs
                                  1, by which Megatron orders launches: events order what depends on each other

Kernels: medians of 20 calls between CUDA events, on random bf16 inputs that take turns so that none is in the L2 cache.
Contenders of one row do equal work. A ratio is our time divided by the fastest rival's: below 1 we win. What is bound
by memory is also compared with the rate of a copy. Results are checked against fp64 on smaller inputs. Bursts of calls
find the GPU cool: only `training` has the clocks that a run sustains.

Shapes: B batch, S sequence, N heads, K kv heads, D head dim, T tokens, H hidden, V vocabulary.
"""
import datetime
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
import triton
from torch.profiler import ProfilerActivity, profile

import config
import train
from bench import kernels as bench_kernels
from bench.rows import Result, Row, measure_rows
from config import FP8_RECIPES, need, setting
from param import Source, box_shape
from run import device, job, log
from run.data import open_samples

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


# ---- training -------------------------------------------------------------------------------------------------------

KERNEL_KINDS = {  # by words in a kernel's name; the first kind that fits
    "attention": "flash|fmha|attention|cudnn|sdpa", "loss": "cross_entropy",
    "FP8 casts": "quantise", "GEMM": "gemm|nvjet|cutlass|cublas|xmma|wgmma|_mm_|product_kernel",
    "optimizer": "adam|multi_tensor|foreach"}


def kind_of(kernel: str) -> str:
    """The kind of a kernel, by its name; elementwise if no word of KERNEL_KINDS is in it."""
    kinds = [kind for kind, words in KERNEL_KINDS.items() if re.search(words, kernel, re.IGNORECASE)]
    return kinds[0] if kinds else "elementwise"


def draw_on_gpu(seed: int) -> Source:
    """Replaces param.draw, which takes minutes for billions of values on a CPU. The values depend on the grid."""
    torch.manual_seed(seed)
    return lambda spec, box: torch.randn(box_shape(box), device="cuda").mul_(spec.std).add_(spec.mean)


def train_llama(flags: str, steps: int, profiled: int = 0) -> tuple[list[dict], list[tuple[float, float, str]]]:
    """(the metrics of every step of a training run in this process, the kernels of the last `profiled` steps: their
    start and end in microseconds, and their name)."""
    profiler, write = profile(activities=[ProfilerActivity.CUDA]) if profiled else None, log.Log.write
    (where, reason) = device.choose_device("cuda")
    # A step's record is written when the next one has been launched already, if results are read late.
    last_before = steps - 1 - profiled - job.reads_late(where)

    def write_and_profile(self: log.Log, record: dict) -> None:
        write(self, record)
        if profiled and record["step"] == last_before:
            if where.type == "cuda":
                torch.cuda.synchronize()  # the step that has been launched is not to be in the profile
            profiler.start()
        elif profiled and record["step"] == steps - 1:
            profiler.stop()

    with tempfile.TemporaryDirectory() as folder:
        defaults = f"--seq 4096 --dtype bf16 --steps {steps} --warmup 0 --sample= --metrics {folder}/metrics"
        settings = config.parse(f"{defaults} {flags}".split())
        samples = open_samples(settings, [], 0)
        torch.cuda.reset_peak_memory_stats()
        with patch.object(job, "draw", draw_on_gpu), patch.object(log.Log, "write", write_and_profile):
            train.train(job.Run(settings, samples, None, where, reason))
        gc.collect()  # buckets and parameters refer to each other
        with open(f"{folder}/metrics") as file:
            records = [json.loads(line) for line in file]
    events = profiler.events() if profiler else []
    return records, sorted((event.time_range.start, event.time_range.end, event.name) for event in events
                           if event.device_type == torch.autograd.DeviceType.CUDA)


def describe_kernels(kernels: list[tuple[float, float, str]], steps: int, most: int = 30) -> tuple[str, str]:
    """(fractions of the time by kind of kernel, a table of the kernels that take most) of kernels of some steps."""
    spent, calls = Counter(), Counter()
    for start, end, name in kernels:
        spent[name] += end - start
        calls[name] += 1
    total = max((end for _, end, _ in kernels), default=0) - min((start for start, _, _ in kernels), default=0)
    by_kind = Counter({"idle": max(0, total - sum(spent.values()))})
    for name, time in spent.items():
        by_kind[kind_of(name)] += time
    split = ", ".join(f"{kind} {time / total:.1%}" for kind, time in by_kind.most_common() if total)
    lines = [f"{sum(calls.values()) / steps:,.0f} kernels per step; {split}", "",
             "   ms/step  calls/step   part kernel"]
    lines += [f"{time / 1e3 / steps:10.2f} {calls[name] / steps:11,.0f} {time / total:6.1%} {name[:100]}"
              for name, time in spent.most_common(most)]
    return split, "\n".join(lines)


def measure_training(flags: str, steps: int = 8, profiled: int = 2) -> Result:
    """Medians of the steps after the third, without those profiled; and what kernels the profiled steps launch."""
    records, kernels = train_llama(flags, steps + profiled, profiled)
    step_s, rate, mfu, causal, memory = (statistics.median(record[key] or 0 for record in records[3:steps])
                                         for key in ("step_s", "tokens_per_s", "mfu", "mfu_causal", "memory_gb"))
    split, report = describe_kernels(kernels, profiled) if profiled else ("", "")
    return Result(step_s, f"{rate:,.0f} tokens/s, MFU {mfu:.1%} (causal {causal:.1%}), {memory:.0f} GB; {split}",
                  report=report)


def measure_two_steps(flags: str) -> Result:
    """Whether a run trains at all: two steps with finite losses."""
    records, _ = train_llama(flags, 2)
    losses = [record["loss"] for record in records]
    if not all(0 < loss < 20 for loss in losses):
        raise RuntimeError(f"losses {losses}")
    return Result(records[-1]["step_s"], f"losses {losses[0]:.3f}, {losses[1]:.3f}")


def measure_final_loss(fp8_recipe: str) -> Result:
    """The mean loss of the last 200 of 2,000 steps of a small Llama, as in tests/test_fp8.py."""
    records, _ = train_llama("--layers 2 --hidden 128 --heads 2 --kv-heads 2 --ffn 384 --seq 128 --global-batch 4 "
                             f"--lr 5e-4 --warmup 20 --fp8 {fp8_recipe}", 2000)
    loss = statistics.mean(record["loss"] for record in records[-200:])
    return Result(statistics.median(record["step_s"] for record in records), f"loss {loss:.4f} nats per token")


def run_python(*arguments: str, **environment: str) -> Result:
    """What another process prints, as the row's report."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | environment, timeout=110)  # it ends before the row does
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()]
    return Result(0.0, f"exit code {done.returncode}: {lines[-1]}", report=done.stdout + done.stderr)


# ---- what is measured -----------------------------------------------------------------------------------------------

SIZES = {  # flags, and the utilisation (6 N + 12 L h S) that is aimed at
    "Llama 8B with 16 layers": ("--preset llama-3.1-8b --layers 16 --micro-batch 4 --global-batch 16", "66%"),
    "Llama 3B": ("--preset llama-3.2-3b --micro-batch 4 --global-batch 16", "64%"),
    "Llama 1B": ("--preset llama-3.2-1b --micro-batch 4 --global-batch 16", "62%")}
LARGEST, (LARGEST_FLAGS, _) = next(iter(SIZES.items()))
SMALLEST_FLAGS = SIZES["Llama 1B"][0]
SHORT, SHORT_FLAGS = "training Llama 1B, one sequence of 1024", "--preset llama-3.2-1b --seq 1024 --global-batch 1"
COPY = "at least 90% of a copy"
# Those that need a GPU, and those of kernels, which run compiled where there is one.
TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_kernels.py", "tests/test_flash.py",
         "tests/test_cp.py", "tests/test_fp8.py", "-k", "bf16 or billion or linear_cross_entropy or norm or rope or "
         "swiglu or one_device or a_gpu_computes")
PARTS = {
    "checks": [
        Row("dW in fp32 by addmm.dtype_out", bench_kernels.measure_addmm),
        *(Row(f"F.scaled_mm, {kind}", partial(bench_kernels.measure_scaled_mm, kind))
          for kind in ("one scale", "1 x 128 by 128 x 128", "1 x 128 by 1 x 128")),
        *(Row(f"two steps of Llama 1B, --fp8 {recipe}", partial(measure_two_steps, f"{SMALLEST_FLAGS} --fp8 {recipe}"))
          for recipe in ("none", *FP8_RECIPES)),
        *(Row(f"small attention {direction}", partial(bench_kernels.measure_attention, direction, 1, 1024, 8, 2, 128))
          for direction in ("forward", "backward")),
        Row("small linear cross-entropy", partial(bench_kernels.measure_loss, tokens=2048)),
        Row("tests that need a GPU", partial(run_python, *TESTS))],
    "training": [
        Row(f"training {LARGEST}", partial(measure_training, LARGEST_FLAGS), "MFU 66%"),
        *(Row(f"training {LARGEST}, --fp8 {recipe}", partial(measure_training, f"{LARGEST_FLAGS} --fp8 {recipe}"), aim,
              f"training {LARGEST}") for recipe, aim in (("tensorwise", "0.74"), ("blockwise", "0.83"))),
        Row(f"training {LARGEST}, micro-batch 2",
            partial(measure_training, LARGEST_FLAGS.replace("--micro-batch 4", "--micro-batch 2")), "",
            f"training {LARGEST}"),
        *(Row(f"training {name}", partial(measure_training, flags), f"MFU {mfu}")
          for name, (flags, mfu) in list(SIZES.items())[1:]),
        Row("training Llama 8B, all 32 layers, moments in bf16",  # fits an H200; published on one: 54.5%
            partial(measure_training, "--preset llama-3.1-8b --moments bf16 --micro-batch 1 --global-batch 8"))],
    "streams": [
        *(Row(f"a matmul beside {programs} programs that wait", partial(bench_kernels.measure_beside_waiting, programs))
          for programs in (4, 32)),
        *(Row(f"streams that block each other, {queues} connections", partial(
            run_python, "-c", "from bench.kernels import print_blocked_streams; print_blocked_streams()",
            CUDA_DEVICE_MAX_CONNECTIONS=queues)) for queues in ("8", "32")),
        Row("the link to the host", bench_kernels.measure_host_link),
        *(Row(f"NCCL, two ranks on one GPU, {grid}", partial(
            run_python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "bench", "smoke",
            "--grids", grid)) for grid in ("--zero 1", "--zero 3", "--tp 2", "--pp 2", "--pp 2 --schedule zb-v",
                                           "--cp 2", "--cp 2 --cp-style ring", "--cp 2 --cp-style ulysses"))],
    "variants": [
        *(Row(f"attention under context parallelism, a block {direction}",
              partial(bench_kernels.measure_block_of_keys, direction)) for direction in ("forward", "backward")),
        Row("RMSNorm backward: programs", bench_kernels.measure_norm_programs, COPY)],
    "matmuls": [Row(f"matmul of {name}, {kind}", partial(bench_kernels.measure_block_matmul, kind, *shape))
                for name, shape in bench_kernels.MATMULS.items()
                for kind in ("forward", "input gradients", "weight gradients")],
    "attention": [
        Row(f"attention {direction}, B {B}, S {S}, N {N}, K {K}, D {D}",
            partial(bench_kernels.measure_attention, direction, B, S, N, K, D), aim)
        for B, S, N, K, D in ((4, 4096, 32, 8, 128), (2, 8192, 32, 8, 128), (8, 4096, 32, 8, 64))
        for direction, aim in (("forward", "1.33"), ("backward", "1.61"))] + [
        Row(f"attention {direction}, 8 documents in S 8192", partial(
            bench_kernels.measure_attention, direction, 2, 8192, 32, 8, 128, documents=8))
        for direction in ("forward", "backward")],
    "kernels": [
        Row(f"linear cross-entropy, {bench_kernels.T} x {bench_kernels.H} x 128256", bench_kernels.measure_loss,
            "1.05, with 0.06 of eager's memory"),
        *(Row(name, partial(bench_kernels.measure_fused, name), COPY) for name in bench_kernels.fused()),
        *(Row(f"quantise, {kind}", partial(bench_kernels.measure_quantise, kind), COPY)
          for kind in ("one scale", "1 x 128 blocks of rows and of columns", "128 x 128 tiles")),
        *(Row(f"FP8: linear layer, {recipe}", partial(bench_kernels.measure_fp8_linear, recipe), aim)
          for recipe, aim in (("tensorwise", "0.69"), ("blockwise", "0.80")))],
    "more": [
        Row(SHORT, partial(measure_training, SHORT_FLAGS)),
        *(Row(f"training {LARGEST}, --recompute full --offload {what}",
              partial(measure_training, f"{LARGEST_FLAGS} --recompute full --offload {what}", 5, 1))
          for what in ("none", "activations", "both")),
        *(Row(f"2,000 small steps, --fp8 {recipe}", partial(measure_final_loss, recipe), aim) for recipe, aim in (
            ("none", ""), ("tensorwise", "loss of none + 0.5%"), ("blockwise", "loss of none + 0.25%"))),
        Row("python -m learn.gpu", partial(run_python, "-m", "learn.gpu"))]}


USAGE = f"python -m bench gpu [--out FOLDER] [--only {'|'.join(PARTS)} …] [--minutes M]"


@dataclass
class Flags:
    out: str = setting("gpu-results", "the folder of what is measured")
    only: list = setting(list(PARTS), "parts")
    minutes: float = setting(9.0, "after which nothing is begun")


def parse(flags: list[str]) -> Flags:
    """Raises ValueError for flags that name no part, or no folder."""
    settings, unknown = config.read_known(Flags, flags, USAGE)
    need(not unknown, f"{' '.join(unknown)}: gpu knows --out FOLDER, --only PARTS and --minutes M")
    for part in settings.only:
        need(part in PARTS, f"--only {part}: the parts are {', '.join(PARTS)}")
    need(not os.path.isfile(settings.out), f"--out {settings.out} is a file: name a folder")
    return settings


def measure(flags: list[str]) -> None:
    """Measure the rows of the parts asked for. No row begins in the last two minutes."""
    settings, properties = parse(flags), torch.cuda.get_device_properties(0)
    title = (f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, torch {torch.__version__}, triton "
             f"{triton.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, "
             f"{datetime.date.today()}, `python -m bench gpu {' '.join(flags)}`.")
    rows = [row for part in PARTS if part in settings.only for row in PARTS[part]]
    measure_rows(rows, title, settings.out, start_limit_s=60 * (settings.minutes - 2))
