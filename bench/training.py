"""Measure training on one GPU: the time of a step of train.py's loop, and the time of each kernel
that it launches.

`python -m bench gpu` runs these rows (bench/gpu.py). A training row runs in its own process, on
sequences of 4096 tokens, with random weights that are drawn on the GPU.
"""
import gc
import json
import math
import re
import statistics
import tempfile
from collections import Counter
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

import train
from bench.rows import Result
from core import config, rules
from core.param import Source, box_shape
from run import device, job, log
from run.data import open_samples


def settings_of(flags: str, steps: int = 10) -> config.Config:
    return rules.parse(f"--seq-len 4096 --dtype bf16 --steps {steps} --warmup 0 --sample-prompt= {flags}".split())


# ---- a run and its kernels ------------------------------------------------------------------------------------------
KERNEL_KINDS = {  # kind -> a pattern for a kernel's name; the first match counts
    "attention": "flash|fmha|attention|cudnn|sdpa", "loss": "cross_entropy",
    "FP8 casts": "quantise", "GEMM": "gemm|nvjet|cutlass|cublas|xmma|wgmma|_mm_|expert_gradients",
    "optimizer": "adam|multi_tensor|foreach"}


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name; "elementwise" if no pattern of KERNEL_KINDS matches."""
    kinds = [kind for kind, words in KERNEL_KINDS.items() if re.search(words, kernel, re.IGNORECASE)]
    return kinds[0] if kinds else "elementwise"


def draw_on_gpu(seed: int) -> Source:
    """Replace param.draw, which takes minutes for billions of values on a CPU. The values depend on
    the grid."""
    torch.manual_seed(seed)
    return lambda spec, box: torch.randn(box_shape(box), device="cuda").mul_(spec.std).add_(spec.mean)


def train_llama(flags: str, steps: int, profiled: int = 0) -> tuple[list[dict], list[tuple[float, float, str]]]:
    """Train in this process and return (the metrics of every step, the kernels of the last
    `profiled` steps).

    A kernel is (start, end, name), in microseconds.
    """
    profiler, write = profile(activities=[ProfilerActivity.CUDA]) if profiled else None, log.Log.write
    where, reason = device.choose_device("cuda")
    # If results are read late, a step's record is written after the next step has been launched.
    last_before = steps - 1 - profiled - job.reads_late(where)

    def write_and_profile(self: log.Log, record: dict) -> None:
        write(self, record)
        if profiled and record["step"] == last_before:
            if where.type == "cuda":
                torch.cuda.synchronize()  # keeps the step that has been launched out of the profile
            profiler.start()
        elif profiled and record["step"] == steps - 1:
            profiler.stop()

    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(f"{flags} --metrics {folder}/metrics", steps)
        device.check_device(settings, where)
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
    """Return (fractions of the time by kind of kernel, a table of the kernels that take the most
    time)."""
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


# ---- rows -----------------------------------------------------------------------------------------------------------

def measure_training(flags: str, steps: int = 8, profiled: int = 2) -> Result:
    """Measure the medians of the steps after the third, and the kernels of the last, profiled
    steps.

    Profiled steps do not count in the medians. Raise RuntimeError if a loss is not finite.
    """
    records, kernels = train_llama(flags, steps + profiled, profiled)
    losses = [record["loss"] for record in records]
    if not all(loss and math.isfinite(loss) for loss in losses):
        raise RuntimeError(f"losses {losses}")
    step_s, rate, mfu, causal, memory = (statistics.median(record[key] or 0 for record in records[3:steps])
                                         for key in ("step_s", "tokens_per_s", "mfu", "mfu_causal", "memory_gb"))
    split, report = describe_kernels(kernels, profiled) if profiled else ("", "")
    return Result(step_s, f"{rate:,.0f} tokens/s, MFU {mfu:.1%} (causal {causal:.1%}), {memory:.0f} GB, loss "
                  f"{losses[0]:.2f} to {losses[-1]:.2f}; {split}", report=report)


def measure_final_loss(fp8_recipe: str) -> Result:
    """Measure the mean loss of the last 200 of 2,000 steps of a small Llama, as in
    tests/test_fp8.py."""
    records, _ = train_llama("--layers 2 --hidden 128 --heads 2 --kv-heads 2 --ffn 384 --seq-len 128 --global-batch 4 "
                             f"--lr 5e-4 --warmup 20 --fp8 {fp8_recipe}", 2000)
    loss = statistics.mean(record["loss"] for record in records[-200:])
    return Result(statistics.median(record["step_s"] for record in records), f"loss {loss:.4f} nats per token")
