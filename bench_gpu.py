"""Kernels and training on one GPU, each beside its rivals: `python bench.py gpu --out FOLDER`, nine minutes at most.

PARTS, at the end, says what is measured, the most important first; `--only NAMES` takes some of them, in this order:

    checks      what kernels and calls of torch compute here, against fp64, and the tests that need a GPU
    training    Llama in bf16 and FP8 by train.py's loop, on sequences of 4096 tokens: a step, and its kernels by time
    matmuls     those of a block and of the head: bf16 and FP8; forward, input gradients, weight gradients
    attention   on heads as the model has them: slices of the product of the fused projection
    kernels     what is bound by memory, and the loss
    variants    implementations that do the same: the first named is what runs by default, and which one to choose
    more        other training runs, losses after 2,000 steps, the primer's kernels

On an unknown GPU run them one after the other, each within ten minutes: `--only checks`, then `--only training
matmuls`, which decide what to tune, then the others. bench_rows.py says which files are in FOLDER.

Kernels: medians of 20 calls between CUDA events, on random bf16 inputs that take turns so that none is in the L2 cache.
Contenders of one row do equal work. A ratio is our time divided by the fastest rival's: below 1 we win. What is bound
by memory is also compared with the rate of a copy. Results are checked against fp64 on smaller inputs. Bursts of calls
find the GPU cool: only `training` has the clocks that a run sustains.

Shapes: B batch, S sequence, N heads, K kv heads, D head dim, T tokens, H hidden, V vocabulary.
"""
import argparse
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
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import config
import fp8
import fp8_kernels
import kernels
import operations
import train
from bench_rows import Rate, Result, Row, compare, measure_rows
from checks import need
from flash import flash_attention
from param import Source, Spec, accumulate_product, box_shape, parameter
from primer import LADDER, gelu_eager, gelu_triton, make_cold_inputs, matmul, measure_seconds, random_pair
from tp import TensorParallel, column
from zero import Optimizer

Tensor = torch.Tensor
T, S, H, FFN = 16384, 4096, 4096, 14336  # of most kernels
ROOT = os.path.dirname(os.path.abspath(__file__))


def random_inputs(*shapes: tuple[int, ...], grad: bool = False) -> list[tuple[Tensor, ...]]:
    """bf16 tensors of these shapes, so many times that none is in the L2 cache when its turn comes."""
    return make_cold_inputs(partial(random_tensors, *shapes, grad=grad))


def random_tensors(*shapes: tuple[int, ...], grad: bool = False) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad) for shape in shapes)


def in_fp64(function: Callable) -> Callable:
    """The same function of the same numbers in fp64."""
    return lambda *inputs: function(*(x.double() for x in inputs))


def flops_rate(flops: float) -> Rate:
    return lambda seconds: f"{flops / seconds / 1e12:.0f} TFLOP/s"


@cache
def copy_rate() -> float:
    """Bytes per second, read and written, of a copy of 1 GiB."""
    x = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    return 2 * x.nbytes / measure_seconds(torch.clone, [(x,)])


def bytes_rate(nbytes: float) -> Rate:
    return lambda seconds: f"{nbytes / seconds / 1e12:.2f} TB/s, {nbytes / seconds / copy_rate():.0%} of a copy"


# ---- training -------------------------------------------------------------------------------------------------------

KERNEL_KINDS = {  # by words in a kernel's name; the first kind that fits
    "attention": "flash|fmha|attention|cudnn|sdpa", "loss": "softmax_kernel|cross_entropy",
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
    profiler, write = profile(activities=[ProfilerActivity.CUDA]) if profiled else None, train.Log.write

    def write_and_profile(log: train.Log, record: dict) -> None:  # between two steps, when the GPU has nothing to do
        write(log, record)
        if profiled and record["step"] == steps - 1 - profiled:
            profiler.start()
        elif profiled and record["step"] == steps - 1:
            profiler.stop()

    with tempfile.TemporaryDirectory() as folder:
        defaults = f"--seq 4096 --dtype bf16 --steps {steps} --warmup 0 --sample= --metrics {folder}/metrics"
        settings = config.parse(f"{defaults} {flags}".split())
        samples = train.open_samples(settings, [], 0)
        torch.cuda.reset_peak_memory_stats()
        # --graph changes the current stream, which `with` restores.
        with patch.object(train, "draw", draw_on_gpu), patch.object(train.Log, "write", write_and_profile), \
                torch.cuda.stream(torch.cuda.current_stream()):
            train.train(settings, samples, None, *train.choose_device("cuda"), train.RunState())
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


# ---- checks ---------------------------------------------------------------------------------------------------------

def run_gpu_tests() -> Result:
    """The tests that need a GPU, and those of kernels, which run compiled where there is one."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_kernels.py",
               "tests/test_flash.py", "-k", "bf16 or billion or linear_cross_entropy or norm or rope or swiglu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()]
    return Result(0.0, f"exit code {done.returncode}: {lines[-1]}", report=done.stdout + done.stderr)


def measure_addmm() -> Result:
    """accumulate_product, which training uses for weight gradients: bf16 operands, added to an fp32 matrix."""
    def make() -> tuple[Tensor, ...]:
        return *random_tensors((2048, 1024), (2048, 1536)), torch.randn(1024, 1536, device="cuda")

    def add(dy: Tensor, x: Tensor, out: Tensor) -> Tensor:
        accumulate_product(out, dy.t(), x)
        return out

    return compare({"ours": add}, [make()], flops_rate(2 * 2048 * 1024 * 1536),
                   in_fp64(lambda dy, x, out: out + dy.t() @ x), make)


def measure_scaled_mm(kind: str) -> Result:
    """F.scaled_mm on operands as the recipes have them, against the product in fp64 of what they stand for."""
    x, w = random_tensors((1024, 2048), (512, 2048))
    one = x.abs().amax().float() / 448 if kind == "one scale" else None
    a, _ = fp8.quantise(x, fp8.E4M3, one)
    b, _ = fp8.quantise(w, fp8.E4M3, one, tiles=kind == "1 x 128 by 128 x 128")

    def exact() -> Tensor:
        a64, b64 = (fp8.dequantise(fp8.Quantised(q.data.cpu(), q.scales.cpu()), torch.float64) for q in (a, b))
        return (a64 @ b64.t()).cuda()

    contenders = {"F.scaled_mm": lambda: fp8.product(a, b, torch.bfloat16)}
    if one is None:
        out = torch.empty(1024, 512, device="cuda", dtype=torch.bfloat16)
        contenders["Triton"] = lambda: fp8_kernels.product(a, b, out)
    return compare(contenders, [()], flops_rate(2 * x.numel() * len(w)), exact)


# ---- matmuls --------------------------------------------------------------------------------------------------------

MATMULS = {"qkv": (8192, 6144, 4096), "attention out": (8192, 4096, 4096), "gate and up": (8192, 28672, 4096),
           "down": (8192, 4096, 14336), "head, 4096 tokens": (4096, 128256, 4096)}  # T, N, K of X W^T


def measure_block_matmul(kind: str, tokens: int, N: int, K: int) -> Result:
    """X W^T, its input gradients, or its weight gradients added to an fp32 matrix, in bf16 and in both FP8 recipes.
    Operands in FP8 are quantised beforehand."""
    x, w, dy = random_tensors((tokens, K), (N, K), (tokens, N))
    a, b = {"forward": (x, w.t()), "input gradients": (dy, w), "weight gradients": (dy.t(), x)}[kind]
    out = torch.zeros(N, K, device="cuda")

    def contender(recipe: str) -> Callable[[], Any]:
        if recipe == "bf16":
            return partial(accumulate_product, out, a, b) if kind == "weight gradients" else partial(torch.mm, a, b)
        layer = fp8.Fp8(fp8.RECIPES[recipe], torch.bfloat16)
        if kind == "weight gradients":
            return partial(layer.add_weight_grad, out, layer.quantise(dy, True)[1], layer.quantise(x, False)[1])
        weight = parameter(Spec("w", (N, K)), {}, torch.bfloat16, "cuda")
        weight.data = w
        if kind == "forward":
            return partial(layer.output, layer.quantise(x, False)[0], (weight,))
        return partial(layer.input_grad, layer.quantise(dy, True)[0], (weight,))

    contenders = {"bf16": contender("bf16")}
    if kind == "weight gradients":
        contenders["bf16, rounded, then added"] = lambda: out.add_(a @ b)
    for recipe in fp8.RECIPES if N < 128256 else ():  # the head is never in FP8
        contenders[recipe] = contender(recipe)
    return compare(contenders, [()], flops_rate(2 * tokens * N * K))


# ---- kernels --------------------------------------------------------------------------------------------------------

def heads_of_the_model(B: int, S: int, N: int, K: int, D: int) -> tuple[Tensor, ...]:
    """q [B, N, S, D], k and v [B, K, S, D]: slices of the product of the fused projection, as Attention has them; and
    a gradient of the result, as the matmul after it returns it."""
    qkv, do = random_tensors((B, S, N + 2 * K, D), (B, S, N, D))
    return *(x.transpose(1, 2).detach().requires_grad_() for x in qkv.split([N, K, K], 2)), do.transpose(1, 2)


def attention_in_fp64(q: Tensor, k: Tensor, v: Tensor, do: Tensor, backward: bool) -> Tensor | tuple[Tensor, ...]:
    qkv = [x.detach().double().requires_grad_() for x in (q, k, v)]
    o = operations.attention_math(*qkv, operations.CAUSAL)
    return torch.autograd.grad(o, qkv, do.double()) if backward else o.detach()


def measure_attention(direction: str, B: int, S: int, N: int, K: int, D: int) -> Result:
    """Causal attention, "forward" or "backward"."""
    def sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def forward(attend: Callable) -> Callable:
        return lambda q, k, v, do: attend(q, k, v).detach()

    def backward(attend: Callable) -> Callable:
        graph = cache(attend)  # the warm-up computes it
        return lambda q, k, v, do: torch.autograd.grad(graph(q, k, v), (q, k, v), do, retain_graph=True)

    contenders = {"ours": flash_attention, "cuDNN": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
                  "torch's flash": partial(sdpa, SDPBackend.FLASH_ATTENTION)}
    one_way, matmuls = (forward, 2) if direction == "forward" else (backward, 5)
    return compare({name: one_way(attend) for name, attend in contenders.items()},
                   make_cold_inputs(partial(heads_of_the_model, B, S, N, K, D))[:3],
                   flops_rate(matmuls * B * N * S * S * D),  # half of the scores are masked
                   partial(attention_in_fp64, backward=direction == "backward"),
                   partial(heads_of_the_model, 1, min(S, 1024), N, K, D))


def measure_loss(V: int = 128256, tokens: int = 16384) -> Result:
    """The loss with the head's matmul, forward and backward, the weight's gradient added to an fp32 matrix; also the
    memory that this takes besides its inputs."""
    x, weight = random_tensors((tokens, H), (V, H), grad=True)
    labels, main_grad = torch.randint(V, (tokens,), device="cuda"), torch.zeros(V, H, device="cuda")
    head = torch.nn.Parameter(weight.detach())
    head.sink = SimpleNamespace(main_grad=lambda _: main_grad)  # as in a training run

    def loss_of(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy((x @ weight.t()).float(), labels, reduction="sum")

    def by_torch(function: Callable) -> Tensor:
        dx, dw = torch.autograd.grad(function(x, weight), (x, weight))
        main_grad.add_(dw)
        return dx

    contenders = {"ours": lambda: torch.autograd.grad(kernels.linear_cross_entropy(x, head, labels), x)[0],
                  "compiled": partial(by_torch, torch.compile(loss_of)), "eager": partial(by_torch, loss_of)}

    def exact() -> Tensor:
        matrix = weight.detach().double()
        return torch.cat([((rows.double() @ matrix.t()).softmax(1) - F.one_hot(label, V)) @ matrix
                          for rows, label in zip(x.detach().split(512), labels.split(512))])

    result, memory = compare(contenders, [()], flops_rate(6 * tokens * H * V), exact), []
    for name in ("ours", *result.rivals):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        contenders[name]()
        memory.append(f"{name} {(torch.cuda.max_memory_allocated() - before) / 1e9:.2f} GB")
    return result._replace(rate=f"{result.rate}; extra memory: {', '.join(memory)}")


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return operations.rms_norm(x, weight, 1e-5)[0]


def norm_backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = (leaf.detach().requires_grad_() for leaf in (x, weight))
    return torch.autograd.grad(F.rms_norm(x, weight.shape, weight, 1e-5), (x, weight), dy)


@cache
def angles() -> tuple[Tensor, Tensor]:
    angle = torch.arange(S, device="cuda")[:, None, None] * torch.logspace(0, -4, 64, device="cuda")
    return angle.cos(), angle.sin()


def rotate(x: Tensor) -> Tensor:
    a, b = x[:, :40].unflatten(0, (-1, S)).float().chunk(2, -1)
    cos, sin = angles()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype).flatten(0, 1)


def rotate_by_kernel(x: Tensor) -> Tensor:
    kernels.rope_(x, *angles(), 40)
    return x[:, :40]


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    dy_acc, sigmoid = dy.float(), gate.sigmoid()
    return torch.cat((dy_acc * up * sigmoid * (1 + gate * (1 - sigmoid)), dy_acc * gate * sigmoid), -1).to(x.dtype)


def fused() -> dict[str, tuple[Callable, Callable, int, list[tuple[int, ...]]]]:
    """Kernels that are bound by memory: (ours, the formula, elements read and written, shapes of the inputs)."""
    return {
        "RMSNorm": (lambda x, w: kernels.rms_norm(x, w, 1e-5), norm, 2 * T * H, [(T, H), (H,)]),
        "add and RMSNorm": (lambda x, y, w: kernels.add_rms_norm(x, y, w, 1e-5),
                            lambda x, y, w: (x + y, norm(x + y, w)), 4 * T * H, [(T, H), (T, H), (H,)]),
        "RMSNorm backward": (lambda dy, x, w: kernels.rms_norm_backward(dy, None, x, w, 1e-5), norm_backward,
                             3 * T * H, [(T, H), (T, H), (H,)]),
        "rotary embedding, 32 + 8 heads of 128": (rotate_by_kernel, rotate, 2 * T * 40 * 128, [(T, 48, 128)]),
        "SwiGLU": (kernels.swiglu, swiglu, 3 * T * FFN, [(T, 2 * FFN)]),
        "SwiGLU backward": (kernels.swiglu_backward, swiglu_backward, 5 * T * FFN, [(T, FFN), (T, 2 * FFN)])}


def measure_fused(name: str) -> Result:
    """The rivals are torch.compile and, for norms, torch's own kernel."""
    ours, formula, elements, shapes = fused()[name]
    contenders = {"ours": ours}
    if name == "RMSNorm backward":  # the rival's time includes a forward
        contenders["F.rms_norm, forward and backward"] = formula
    else:
        contenders["compiled"] = torch.compile(formula)
    if name == "RMSNorm":
        contenders["F.rms_norm"] = lambda x, w: F.rms_norm(x, (H,), w, 1e-5)
    checked = [(S, *shape[1:]) if shape[0] == T else shape for shape in shapes]
    return compare(contenders, random_inputs(*shapes), bytes_rate(2 * elements), in_fp64(formula),
                   partial(random_tensors, *checked))


def measure_quantise(kind: str) -> Result:
    """Both FP8 copies of x [T, H]: two bytes read per element and two written. The rival is our formula, compiled."""
    scale = torch.ones((), device="cuda") if kind == "one scale" else None
    tiles = kind == "128 x 128 tiles"

    def by_torch(x: Tensor) -> tuple:
        if scale is not None:
            return fp8.quantise_at_scale(x, scale, fp8.E4M3)
        if tiles:
            return fp8.quantise_blocks(x, fp8.E4M3, False, fp8.BLOCK)
        return *fp8.quantise_blocks(x, fp8.E4M3, False), *fp8.quantise_blocks(x.t(), fp8.E4M3, False)

    contenders = {"ours": lambda x: fp8_kernels.quantise(x, fp8.E4M3, scale, fp8.SMALLEST, tiles=tiles),
                  "compiled" if scale is None and not tiles else "compiled, without the columnwise copy":
                  torch.compile(by_torch)}
    return compare(contenders, random_inputs((T, H)), bytes_rate(4 * T * H))


def measure_fp8_linear(recipe: str) -> Result:
    """A linear layer, forward and backward, the weight's gradient added to an fp32 matrix as in training."""
    weight, main_grad = parameter(Spec("w", (FFN, H)), {}, torch.bfloat16, "cuda"), torch.zeros(FFN, H, device="cuda")
    weight.data = torch.randn(FFN, H, device="cuda", dtype=torch.bfloat16) / 64
    weight.sink = SimpleNamespace(main_grad=lambda _: main_grad)
    dy = torch.randn(T, FFN, device="cuda", dtype=torch.bfloat16)

    def run(tp: TensorParallel, x: Tensor) -> None:
        column(x.detach().requires_grad_(), weight, tp=tp).backward(dy)

    contenders = {"ours": partial(run, TensorParallel(fp8=fp8.Fp8(fp8.RECIPES[recipe], torch.bfloat16))),
                  "bf16": partial(run, TensorParallel())}
    return compare(contenders, random_inputs((T, H)), flops_rate(6 * T * H * FFN))


def measure_adamw(side: int = 16384) -> Result:
    """A step of the optimizer for side x side weights, from zeroing the gradient to the 16-bit weights."""
    small, lr, decay = 256, 1e-2, 0.1
    grads = torch.randn(small * small, device="cuda") / small

    @cache
    def optimizer_of(rule: str, side: int) -> Optimizer:
        unit = torch.nn.Module()
        unit.weight = parameter(Spec("w", (side, side)), {}, torch.bfloat16, "cuda")
        optimizer = Optimizer({0: [unit]}, dict.fromkeys(("world", "replicate", "dp")), rule=rule, weight_decay=decay)
        optimizer.buckets[0].master.fill_(1.0)
        return optimizer

    def step(rule: str, side: int) -> Tensor:
        optimizer = optimizer_of(rule, side)
        optimizer.begin_step({0: 1})
        if side == small:
            optimizer.buckets[0].grad_shard.copy_(grads)
        optimizer.step(lr)
        return optimizer.buckets[0].master

    def exact(side: int) -> Tensor:  # the first moments are the gradient, once their bias is corrected
        clipped = grads.double() / max(1, grads.double().norm() + 1e-6)
        return 1 - lr * decay - lr * clipped / (clipped.abs() + 1e-8)

    return compare({rule: partial(step, rule) for rule in ("adamw", "adamw-one-pass")}, [(side,)],
                   bytes_rate(38 * side * side), exact, lambda: (small,))


def measure_matmul(rung: str) -> Result:
    n = 8192 if LADDER[rung].on_tensor_cores else 2048
    return compare({"ours": partial(matmul, LADDER[rung]), "torch.mm": torch.mm},
                   make_cold_inputs(partial(random_pair, n)), flops_rate(2 * n**3),
                   in_fp64(torch.mm), partial(random_pair, 1024))


def measure_gelu() -> Result:
    contenders = {"ours": gelu_triton, "compiled": torch.compile(gelu_eager), "eager": gelu_eager,
                  "F.gelu": partial(F.gelu, approximate="tanh")}
    return compare(contenders, make_cold_inputs(lambda: (torch.randn(2**28, device="cuda"),)), bytes_rate(8 * 2**28))


# ---- what is measured -----------------------------------------------------------------------------------------------

SIZES = {  # flags, and the utilisation (6 N + 12 L h S) that is aimed at
    "Llama 8B with 16 layers": ("--preset llama-3.1-8b --layers 16 --micro-batch 4 --global-batch 16", "66%"),
    "Llama 3B": ("--preset llama-3.2-3b --micro-batch 4 --global-batch 16", "64%"),
    "Llama 1B": ("--preset llama-3.2-1b --micro-batch 4 --global-batch 16", "62%")}
LARGEST, (LARGEST_FLAGS, _) = next(iter(SIZES.items()))
SMALLEST_FLAGS = SIZES["Llama 1B"][0]
SHORT, SHORT_FLAGS = "training Llama 1B, one sequence of 1024", "--preset llama-3.2-1b --seq 1024 --global-batch 1"
COPY = "at least 90% of a copy"
PARTS = {
    "checks": [
        Row("dW in fp32 by addmm.dtype_out", measure_addmm),
        *(Row(f"F.scaled_mm, {kind}", partial(measure_scaled_mm, kind))
          for kind in ("one scale", "1 x 128 by 128 x 128", "1 x 128 by 1 x 128")),
        *(Row(f"two steps of Llama 1B, --fp8 {recipe}", partial(measure_two_steps, f"{SMALLEST_FLAGS} --fp8 {recipe}"))
          for recipe in ("none", *fp8.RECIPES)),
        *(Row(f"small attention {direction}", partial(measure_attention, direction, 1, 1024, 8, 2, 128))
          for direction in ("forward", "backward")),
        Row("small linear cross-entropy", partial(measure_loss, tokens=2048)),
        Row("tests that need a GPU", run_gpu_tests)],
    "training": [
        Row(f"training {LARGEST}", partial(measure_training, LARGEST_FLAGS), "MFU 66%"),
        *(Row(f"training {LARGEST}, --fp8 {recipe}", partial(measure_training, f"{LARGEST_FLAGS} --fp8 {recipe}"), aim,
              f"training {LARGEST}") for recipe, aim in (("tensorwise", "0.74"), ("blockwise", "0.83"))),
        Row(f"training {LARGEST}, micro-batch 2",
            partial(measure_training, LARGEST_FLAGS.replace("--micro-batch 4", "--micro-batch 2")), "",
            f"training {LARGEST}"),
        *(Row(f"training {name}", partial(measure_training, flags), f"MFU {mfu}")
          for name, (flags, mfu) in list(SIZES.items())[1:])],
    "matmuls": [Row(f"matmul of {name}, {kind}", partial(measure_block_matmul, kind, *shape))
                for name, shape in MATMULS.items() for kind in ("forward", "input gradients", "weight gradients")],
    "attention": [
        Row(f"attention {direction}, B {B}, S {S}, N {N}, K {K}, D {D}",
            partial(measure_attention, direction, B, S, N, K, D), aim)
        for B, S, N, K, D in ((4, 4096, 32, 8, 128), (2, 8192, 32, 8, 128), (8, 4096, 32, 8, 64))
        for direction, aim in (("forward", "1.33"), ("backward", "1.61"))],
    "kernels": [
        Row(f"linear cross-entropy, {T} x {H} x 128256", measure_loss, "1.05, with 0.06 of eager's memory"),
        *(Row(name, partial(measure_fused, name), COPY) for name in fused()),
        *(Row(f"quantise, {kind}", partial(measure_quantise, kind), COPY)
          for kind in ("one scale", "1 x 128 blocks of rows and of columns", "128 x 128 tiles")),
        *(Row(f"FP8: linear layer, {recipe}", partial(measure_fp8_linear, recipe), aim)
          for recipe, aim in (("tensorwise", "0.69"), ("blockwise", "0.80")))],
    "variants": [
        Row("a step of the optimizer, 268M parameters", measure_adamw, "at least 90% of a copy, 38 bytes a parameter"),
        Row(f"training {LARGEST}, --optimizer adamw-one-pass",
            partial(measure_training, f"{LARGEST_FLAGS} --optimizer adamw-one-pass"), "0.99", f"training {LARGEST}")],
    "more": [
        Row(SHORT, partial(measure_training, SHORT_FLAGS)),
        Row("the same with --graph", partial(measure_training, f"{SHORT_FLAGS} --graph", profiled=0), "below 1", SHORT),
        *(Row(f"2,000 small steps, --fp8 {recipe}", partial(measure_final_loss, recipe), aim) for recipe, aim in (
            ("none", ""), ("tensorwise", "loss of none + 0.5%"), ("blockwise", "loss of none + 0.25%"))),
        *(Row(f"matmul, {rung}", partial(measure_matmul, rung), "1.09" if rung == "persistent" else "")
          for rung in reversed(LADDER)),
        Row("GELU of 2^28 fp32 numbers", measure_gelu)]}


def parse(flags: list[str]) -> argparse.Namespace:
    """Raises ValueError for flags that name no part, or no folder."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--out", default="gpu-results")
    parser.add_argument("--only", nargs="+", default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=9.0)
    try:
        settings, unknown = parser.parse_known_args(flags)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
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
             f"{datetime.date.today()}, `python bench.py gpu {' '.join(flags)}`.")
    rows = [row for part in PARTS if part in settings.only for row in PARTS[part]]
    measure_rows(rows, title, settings.out, start_limit_s=60 * (settings.minutes - 2))
