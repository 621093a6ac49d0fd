"""The rows of each stage of `python -m bench gpu`, in sizes that fit the card, with the expected
figures.

    training    Llama in bf16 and FP8 by train.py's loop (bench/training.py): a step, and its kernels by time
    kernels     matmuls of a block and of the head: bf16 and FP8; forward, input gradients, weight gradients
                attention, on heads as in the model: slices of the output of the fused projection
                short training runs: one short sequence, and experts
                kernels that are bound by memory, the kernels of experts, and the loss
    rest        variants: alternative implementations. The first one named is the default
                streams: a matmul beside programs that wait, as collectives do; streams that block each other
                the link to the host; other training runs, also of 2,000 small steps; learn/triton_primer.py

Expected figures are for one H200. They were computed before this had run on any GPU, from bytes,
operations, published rates of cuBLAS and cuDNN, and a memory bandwidth of 4.2 TB/s. An H100 has the
same processors and 3.0 TB/s. The utilisation (6 N + 12 L h S) of a training row follows from the
rate that its matmuls sustain. For the largest row it is 61% at 640 TFLOP/s and 67% at 720. The gain
from FP8 is reduced by the time of its casts.

Shapes: B batch, S sequence, N heads, K kv heads, D head dim, T tokens, H hidden.
"""
import os
import subprocess
import sys
from functools import partial
from typing import NamedTuple

from bench import kernels
from bench.rows import ROW_LIMIT_S, Result, Row
from bench.training import measure_final_loss, measure_training, settings_of
from core.config import FP8_RECIPES
from plan.memory import format_bytes
from run.device import memory_of_rank

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FITS = 0.9  # the part of a card's memory that a training run may need; the rest is for CUDA itself and fragmentation
EXPERTS_FIT = 0.7  # plan/memory.py does not count the padding of each expert's rows and of its FP8 copies
COPY = "85-93% of a copy"


# ---- training -------------------------------------------------------------------------------------------------------

class Size(NamedTuple):
    name: str
    flags: str
    expected: str = ""


EXPERTS = "no figure: it must train. On one rank the host waits in no layer, so idle is what its launches cost"
SIZES = {  # model -> its sizes, the largest first. A card gets the first one that fits
    "8B": [Size("Llama 8B with 16 layers", "--preset llama-3.1-8b --layers 16 --micro-batch 4 --global-batch 16",
                "2.7-2.95 s, 22-24k tokens/s, MFU 61-67%, idle < 1%"),
           Size("Llama 8B with 8 layers, micro-batch 2",
                "--preset llama-3.1-8b --layers 8 --micro-batch 2 --global-batch 16", "MFU 63%"),
           Size("Llama 8B with 4 layers, micro-batch 1",
                "--preset llama-3.1-8b --layers 4 --micro-batch 1 --global-batch 16")],
    "whole 8B": [Size("Llama 8B, all 32 layers, moments in bf16",
                      "--preset llama-3.1-8b --moments-dtype bf16 --micro-batch 1 --global-batch 8",
                      "2.7-2.95 s, 11-12.2k tokens/s, MFU 58-64%; published: 10,471 tokens/s (KempnerForge, which "
                      "recomputes all)")],
    "3B": [Size("Llama 3B", "--preset llama-3.2-3b --micro-batch 4 --global-batch 16",
                "2.4-2.65 s, 25-27k tokens/s, MFU 59-65%"),
           Size("Llama 3B, micro-batch 1", "--preset llama-3.2-3b --micro-batch 1 --global-batch 16", "MFU 60%"),
           Size("Llama 3B with 8 layers, micro-batch 1",
                "--preset llama-3.2-3b --layers 8 --micro-batch 1 --global-batch 16")],
    "1B": [Size("Llama 1B", "--preset llama-3.2-1b --micro-batch 4 --global-batch 16",
                "1.0-1.1 s, 60-65k tokens/s, MFU 55-60%: the head takes 17%, and heads are 64 wide"),
           Size("Llama 1B, micro-batch 1", "--preset llama-3.2-1b --micro-batch 1 --global-batch 16"),
           Size("Llama 1B with 8 layers, micro-batch 1",
                "--preset llama-3.2-1b --layers 8 --micro-batch 1 --global-batch 16")],
    "short": [Size("Llama 1B, one sequence of 1024", "--preset llama-3.2-1b --seq-len 1024 --global-batch 1",
                   "MFU 15-30%, idle > 40%: the host takes about 2 ms a layer, the GPU 0.8")],
    "experts": [Size("Qwen3-30B-A3B with 4 layers",
                     "--preset qwen3-30b-a3b --layers 4 --micro-batch 2 --global-batch 8",
                     EXPERTS),
                Size("Qwen3-30B-A3B with 2 layers",
                     "--preset qwen3-30b-a3b --layers 2 --micro-batch 2 --global-batch 8",
                     EXPERTS),
                Size("Qwen3-30B-A3B with 1 layer, micro-batch 1",
                     "--preset qwen3-30b-a3b --layers 1 --micro-batch 1 --global-batch 8", EXPERTS)]}
FP8_EXPECTED = {"tensorwise": "0.76-0.82 of bf16", "blockwise": "0.87-0.95 of bf16"}


def bytes_needed(size: Size, fp8: bool) -> int:
    """Return the bytes of a run, by plan/memory.py. fp8: the largest of all recipes."""
    flags = [size.flags, *(f"{size.flags} --fp8 {recipe}" for recipe in FP8_RECIPES if fp8)]
    return max(sum(memory_of_rank(settings_of(each), 0, fused=True).values()) for each in flags)


def training_row(model: str, memory: int, more: str = "", expected: str = "", fp8: bool = False, **steps: int) -> Row:
    """Return a row for the first size that fits a card with `memory` bytes.

    If no size fits, the row says so. fp8: the size must also fit in FP8. more: additional flags.
    Their row has this `expected`, and its rival is the row without them. steps: see
    measure_training.
    """
    most = memory * (EXPERTS_FIT if model == "experts" else FITS)
    size = next((size for size in SIZES[model] if bytes_needed(size, fp8) <= most), None)
    if size is None:
        size = SIZES[model][-1]
        why = f"takes {format_bytes(bytes_needed(size, fp8))}, and may take {format_bytes(most)} here"
        return Row(f"training {size.name}{f', {more}' if more else ''}", partial(str, why), size.expected)
    if not more:
        return Row(f"training {size.name}", partial(measure_training, size.flags, **steps), size.expected)
    return Row(f"training {size.name}, {more}", partial(measure_training, f"{size.flags} {more}", **steps), expected,
               f"training {size.name}")


def training_rows(memory: int) -> list[Row]:
    """Return the rows, the most informative first."""
    largest = partial(training_row, "8B", memory, fp8=True)
    tensorwise, blockwise = (largest(f"--fp8 {recipe}", FP8_EXPECTED[recipe]) for recipe in FP8_RECIPES)
    return [largest(), tensorwise, training_row("whole 8B", memory), training_row("1B", memory), blockwise,
            training_row("3B", memory)]


# ---- kernels --------------------------------------------------------------------------------------------------------

PRODUCTS = {  # matmul of a linear layer -> expected figures
    "forward": "bf16 650-750 TFLOP/s, tensorwise 1150-1400, blockwise 800-1000",
    "input gradients": "bf16 650-750 TFLOP/s, tensorwise 1000-1200, blockwise 800-1000",
    "weight gradients": "bf16 600-700 TFLOP/s, tensorwise 1000-1200, blockwise 800-1000"}
HEADS = {128: {"forward": "cuDNN 520-600 TFLOP/s, ours 330-420", "backward": "cuDNN 400-470 TFLOP/s, ours 220-300"},
         64: {"forward": "both 330-390 TFLOP/s", "backward": ""}}  # by their width


def kernel_rows(memory: int) -> list[Row]:
    """Return the rows of the stage kernels.

    First come rows bound by the tensor cores, then two training runs bound by the host, then rows
    bound by memory.
    """
    matmuls = [Row(f"matmul of {name}, {kind}", partial(kernels.measure_block_matmul, kind, *shape), expected)
               for name, shape in kernels.MATMULS.items() for kind, expected in PRODUCTS.items()]
    attention = [Row(f"attention {direction}, B {B}, S {S}, N {N}, K {K}, D {D}",
                     partial(kernels.measure_attention, direction, B, S, N, K, D), expected)
                 for B, S, N, K, D in ((4, 4096, 32, 8, 128), (2, 8192, 32, 8, 128), (8, 4096, 32, 8, 64))
                 for direction, expected in HEADS[D].items()]
    attention += [Row(f"attention {direction}, 8 documents in S 8192",
                      partial(kernels.measure_attention, direction, 2, 8192, 32, 8, 128, documents=8))
                  for direction in ("forward", "backward")]
    host = [training_row("short", memory), training_row("experts", memory, fp8=True, steps=6, profiled=1)]
    fused = [Row(name, partial(kernels.measure_fused, name), COPY) for name in kernels.fused()]
    quantise = [Row(f"quantise, {kind}", partial(kernels.measure_quantise, kind), COPY)
                for kind in ("one scale", "1 x 128 blocks of rows and of columns", "128 x 128 tiles")]
    linear = [Row(f"FP8: linear layer, {recipe}", partial(kernels.measure_fp8_linear, recipe), expected)
              for recipe, expected in (("tensorwise", "0.69 of bf16"), ("blockwise", "0.80 of bf16"))]
    experts = [Row("sum of 8 copies of tokens for experts", kernels.measure_sum_of_copies, COPY)]
    experts += [Row(f"weight gradients of {name}", partial(kernels.measure_expert_gradients, *shape),
                    "") for name, shape in kernels.EXPERTS.items()]
    loss = Row(f"linear cross-entropy, {kernels.T} x {kernels.H} x 128256", kernels.measure_loss,
               "620-680 TFLOP/s, 1.05 of the fastest, with 0.06 of eager's memory")
    return [*matmuls, *attention, *host, *fused, *quantise, *linear, *experts, loss]


# ---- the rest -------------------------------------------------------------------------------------------------------

def run_python(*arguments: str, **environment: str) -> Result:
    """Run Python in another process and return what it prints as the row's report."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | environment, timeout=ROW_LIMIT_S - 5)  # it ends before the row does
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()]
    return Result(0.0, f"exit code {done.returncode}: {lines[-1]}", report=done.stdout + done.stderr)


def other_rows(memory: int) -> list[Row]:
    variants = [Row(f"attention under context parallelism, a block {direction}",
                    partial(kernels.measure_block_of_keys, direction)) for direction in ("forward", "backward")]
    variants.append(Row("RMSNorm backward: programs", kernels.measure_norm_programs, COPY))
    waiting = [Row(f"a matmul beside {programs} programs that wait", partial(kernels.measure_beside_waiting, programs))
               for programs in (4, 32)]
    blocked = [Row(f"streams that block each other, {queues} connections", partial(
        run_python, "-c", "from bench.kernels import print_blocked_streams; print_blocked_streams()",
        CUDA_DEVICE_MAX_CONNECTIONS=queues)) for queues in ("8", "32")]
    link = Row("the link to the host", kernels.measure_host_link)
    experts = training_row("experts", memory, "--fp8 blockwise", "it must train", fp8=True, steps=6, profiled=1)
    smaller = training_row("8B", memory, "--micro-batch 2", fp8=True)
    smaller = [smaller] if SIZES["8B"][0].name in smaller.name else []  # a smaller card has only one size
    steps = [Row(f"2,000 small steps, --fp8 {recipe}", partial(measure_final_loss, recipe), expected)
             for recipe, expected in (("none", ""), ("tensorwise", "at most 0.5% above the loss of none"),
                                      ("blockwise", "at most 0.25% above the loss of none"))]
    offload = [training_row("8B", memory, f"--recompute full --offload {what}", fp8=True, steps=5, profiled=1)
               for what in ("none", "activations", "both")]
    return [*variants, *waiting, *blocked, link, experts, *smaller, *steps, *offload,
            Row("python -m learn.triton_primer", partial(run_python, "-m", "learn.triton_primer"))]


def rows_of(memory: int) -> dict[str, list[Row]]:
    """Return stage -> its rows, for a card with `memory` bytes."""
    return dict(training=training_rows(memory), kernels=kernel_rows(memory), rest=other_rows(memory))
