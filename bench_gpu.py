"""Kernels and training on one GPU, each beside its rivals: `python bench.py gpu`, nine minutes at most.

ROWS, at the end, says what is measured, the most important first. Kernels: medians of 20 calls between CUDA events, on
random bf16 inputs that take turns so that none is in the L2 cache. Training: runs of Llama in bf16 by train.py's
loop, on sequences of 4096 tokens unless said. A ratio is our time divided by the fastest rival's: below 1 we win. What
is bound by memory is also compared with the rate of a copy. After every row the table is written to RESULTS.md.

Rows are measured in another process, which is replaced after a failure, so that a failing row harms no other. No row
begins after seven minutes. The table names rows without a result, with the reason.

Shapes: B batch, S sequence, N heads, K kv heads, D head dim, T tokens, H hidden, V vocabulary.
"""
import datetime
import gc
import json
import multiprocessing
import os
import re
import statistics
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from types import SimpleNamespace
from typing import NamedTuple
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
from flash import flash_attention
from param import Source, Spec, box_shape, parameter
from primer import LADDER, gelus, make_cold_inputs, matmul, measure_seconds, random_pair
from tp import TensorParallel, column

Tensor = torch.Tensor
Rate = Callable[[float], str]  # of a time in seconds
T, H, FFN = 16384, 4096, 14336  # of most kernels
HEADING = "## One GPU"
RESULTS = os.path.join(os.path.dirname(__file__), "RESULTS.md")


class Result(NamedTuple):
    seconds: float  # ours
    rate: str = ""  # ours
    rivals: dict[str, float] = {}  # seconds, by name


class Row(NamedTuple):
    name: str
    measure: Callable[[], Result]  # picklable
    aim: str = ""  # the largest good ratio, or the rate to reach
    rival: str = ""  # the name of the earlier row that this one is compared with, if any


def compare(ours: Callable, rivals: dict[str, Callable], inputs: list[tuple], rate: Rate) -> Result:
    """All on the same inputs."""
    seconds = measure_seconds(ours, inputs)
    return Result(seconds, rate(seconds), {name: measure_seconds(rival, inputs) for name, rival in rivals.items()})


def random_inputs(*shapes: tuple[int, ...], grad: bool = False) -> list[tuple[Tensor, ...]]:
    """bf16 tensors of these shapes, so many times that none is in the L2 cache when its turn comes."""
    return make_cold_inputs(lambda: tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)
                                 for shape in shapes))


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
    "GEMM": "gemm|nvjet|cutlass|cublas|xmma|wgmma|_mm_", "optimizer": "adam|multi_tensor|foreach"}


def kind_of(kernel: str) -> str:
    """The kind of a kernel, by its name; elementwise if no word of KERNEL_KINDS is in it."""
    kinds = [kind for kind, words in KERNEL_KINDS.items() if re.search(words, kernel, re.IGNORECASE)]
    return kinds[0] if kinds else "elementwise"


def draw_on_gpu(seed: int) -> Source:
    """Replaces param.draw, which takes minutes for billions of values on a CPU. The values depend on the grid."""
    torch.manual_seed(seed)
    return lambda spec, box: torch.randn(box_shape(box), device="cuda").mul_(spec.std).add_(spec.mean)


def train_llama(flags: str, steps: int) -> list[dict]:
    """The metrics of every step of a training run in this process."""
    with tempfile.TemporaryDirectory() as folder:
        defaults = f"--seq 4096 --dtype bf16 --steps {steps} --warmup 0 --sample= --metrics {folder}/metrics"
        settings = config.parse(f"{defaults} {flags}".split())
        samples = train.open_samples(settings, [], 0)
        torch.cuda.reset_peak_memory_stats()
        # --graph changes the current stream, which `with` restores.
        with patch.object(train, "draw", draw_on_gpu), torch.cuda.stream(torch.cuda.current_stream()):
            train.train(settings, samples, None, *train.choose_device("cuda"), train.RunState())
        gc.collect()  # buckets and parameters refer to each other
        with open(f"{folder}/metrics") as file:
            return [json.loads(line) for line in file]


def measure_training(flags: str) -> Result:
    """Medians of the steps after the third of eight."""
    records = train_llama(flags, 8)[3:]
    step_s, rate, mfu, causal, memory = (statistics.median(record[key] for record in records) for key in (
        "step_s", "tokens_per_s", "mfu", "mfu_causal", "memory_gb"))
    return Result(step_s, f"{rate:,.0f} tokens/s, MFU {mfu:.1%} (causal {causal:.1%}), {memory:.0f} GB")


def measure_time_split(flags: str) -> Result:
    """Fractions of a step's time by kind of kernel, from a profile of the last two of four steps."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step_s = train_llama(flags, 4)[-1]["step_s"]
    kernels = sorted((event.time_range.start, event.time_range.end, event.name) for event in profiler.events()
                     if event.device_type == torch.autograd.DeviceType.CUDA)
    updates = [i for i, (_, _, name) in enumerate(kernels) if kind_of(name) == "optimizer"]
    if not updates:
        raise RuntimeError(f"the profiler saw {len(kernels)} kernels, and no optimizer among them")
    kernels = kernels[updates[len(updates) // 2 - 1] + 1:]  # after the second update
    time_of = Counter()
    for start, end, name in kernels:
        time_of[kind_of(name)] += end - start
    total = max(end for _, end, _ in kernels) - kernels[0][0]
    time_of["idle"] = max(0, total - sum(time_of.values()))
    return Result(step_s, ", ".join(f"{kind} {spent / total:.0%}" for kind, spent in time_of.most_common()))


def measure_final_loss(fp8_recipe: str) -> Result:
    """The mean loss of the last 200 of 2,000 steps of a small Llama, as in tests/test_fp8.py."""
    records = train_llama("--layers 2 --hidden 128 --heads 2 --kv-heads 2 --ffn 384 --seq 128 --global-batch 4 "
                          f"--lr 5e-4 --warmup 20 --fp8 {fp8_recipe}", 2000)
    loss = statistics.mean(record["loss"] for record in records[-200:])
    return Result(statistics.median(record["step_s"] for record in records), f"loss {loss:.4f} nats per token")


# ---- kernels --------------------------------------------------------------------------------------------------------

def measure_attention(direction: str, B: int, S: int, N: int, K: int, D: int) -> Result:
    """Causal attention, "forward" or "backward"."""
    def sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    contenders = {"ours": flash_attention, "cuDNN": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
                  "torch's flash": partial(sdpa, SDPBackend.FLASH_ATTENTION)}
    inputs, seconds = random_inputs((B, N, S, D), (B, K, S, D), (B, K, S, D), grad=True), {}
    for name, attend in contenders.items():
        if direction == "forward":
            seconds[name] = measure_seconds(attend, inputs)
        else:
            graphs = [(attend(*qkv), qkv, torch.randn_like(qkv[0])) for qkv in inputs[:2]]
            seconds[name] = measure_seconds(partial(torch.autograd.grad, retain_graph=True), graphs)
    ours, matmuls = seconds.pop("ours"), 2 if direction == "forward" else 5
    return Result(ours, flops_rate(matmuls * B * N * S * S * D)(ours), seconds)  # half of the scores are masked


def measure_loss(V: int = 128256) -> Result:
    """The loss with the head's matmul, forward and backward; also the memory that this takes besides its inputs."""
    x, weight = (torch.randn(n, H, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (T, V))
    labels, main_grad = torch.randint(V, (T,), device="cuda"), torch.zeros(V, H, device="cuda")
    head = torch.nn.Parameter(weight.detach())
    head.sink = SimpleNamespace(main_grad=lambda _: main_grad)  # as in a training run

    def loss_of(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy((x @ weight.t()).float(), labels, reduction="sum")

    compiled = torch.compile(loss_of)
    contenders = {"ours": lambda: torch.autograd.grad(kernels.linear_cross_entropy(x, head, labels), x),
                  "compiled": lambda: torch.autograd.grad(compiled(x, weight), (x, weight)),
                  "eager": lambda: torch.autograd.grad(loss_of(x, weight), (x, weight))}
    seconds, memory = {}, []
    for name, contender in contenders.items():
        seconds[name] = measure_seconds(contender, [()])
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        contender()
        memory.append(f"{name} {(torch.cuda.max_memory_allocated() - before) / 1e9:.1f} GB")
    ours = seconds.pop("ours")
    return Result(ours, f"{flops_rate(6 * T * H * V)(ours)}; extra memory: {', '.join(memory)}", seconds)


def measure_fused(name: str) -> Result:
    """A kernel that is bound by memory; the rivals are a compiled formula and, if there is one, torch's kernel."""
    angle = torch.randn(4096, 1, 64, device="cuda")
    cos, sin = angle.cos(), angle.sin()

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return operations.rms_norm(x, weight, 1e-5)[0]

    def rotate(x: Tensor) -> Tensor:
        a, b = x[:, :40].unflatten(0, (-1, 4096)).float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    def swiglu(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    def swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, -1)
        dy, sigmoid = dy.float(), gate.sigmoid()
        return torch.cat((dy * up * sigmoid * (1 + gate * (1 - sigmoid)), dy * gate * sigmoid), -1).to(x.dtype)

    ours, formula, elements, *shapes = {  # elements: read and written, 2 bytes each
        "RMSNorm": (lambda x, w: kernels.rms_norm(x, w, 1e-5), norm, 2 * T * H, (T, H), (H,)),
        "add and RMSNorm": (lambda x, y, w: kernels.add_rms_norm(x, y, w, 1e-5),
                            lambda x, y, w: (x + y, norm(x + y, w)), 4 * T * H, (T, H), (T, H), (H,)),
        "rotary embedding, 32 + 8 heads of 128": (lambda x: kernels.rope_(x, cos, sin, 40), rotate, 2 * T * 40 * 128,
                                                  (T, 48, 128)),
        "SwiGLU": (kernels.swiglu, swiglu, 3 * T * FFN, (T, 2 * FFN)),
        "SwiGLU backward": (kernels.swiglu_backward, swiglu_backward, 5 * T * FFN, (T, FFN), (T, 2 * FFN)),
        "FP8: 1 x 128 blocks of rows and of columns": (lambda x: fp8_kernels.quantise(x, fp8.E4M3, None, fp8.SMALLEST),
                                                       None, 2 * T * H, (T, H)),
    }[name]
    rivals = {"compiled": torch.compile(formula)} if formula else {}
    if name == "RMSNorm":
        rivals["F.rms_norm"] = lambda x, w: F.rms_norm(x, (H,), w, 1e-5)
    return compare(ours, rivals, random_inputs(*shapes), bytes_rate(2 * elements))


def measure_rms_norm_backward() -> Result:
    weight = torch.ones(H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    graphs = [(F.rms_norm(x.requires_grad_(), (H,), weight, 1e-5), x, dy) for x, dy in random_inputs((T, H), (T, H))]
    return compare(lambda y, x, dy: kernels.rms_norm_backward(dy, None, x, weight, 1e-5),
                   {"F.rms_norm": lambda y, x, dy: torch.autograd.grad(y, (x, weight), dy, retain_graph=True)}, graphs,
                   bytes_rate(3 * T * H * 2))


def measure_fp8_product() -> Result:
    (x, weight), *_ = random_inputs((T, H), (FFN, H))
    a, _ = fp8.quantise(x, fp8.E4M3)
    b, _ = fp8.quantise(weight, fp8.E4M3, tiles=True)
    out = torch.empty(T, FFN, device="cuda", dtype=torch.bfloat16)
    return compare(lambda: fp8_kernels.product(a, b, out), {"F.scaled_mm": lambda: fp8.product(a, b, torch.bfloat16)},
                   [()], flops_rate(2 * T * H * FFN))


def measure_fp8_linear(recipe: str) -> Result:
    """A linear layer, forward and backward."""
    weight = parameter(Spec("w", (FFN, H)), {}, torch.bfloat16, "cuda")
    weight.data = torch.randn(FFN, H, device="cuda", dtype=torch.bfloat16) / 64
    dy = torch.randn(T, FFN, device="cuda", dtype=torch.bfloat16)

    def run(tp: TensorParallel, x: Tensor) -> None:
        column(x.detach().requires_grad_(), weight, tp=tp).backward(dy)

    in_fp8 = TensorParallel(fp8=fp8.Fp8(fp8.RECIPES[recipe], torch.bfloat16))
    return compare(partial(run, in_fp8), {"bf16": partial(run, TensorParallel())}, random_inputs((T, H)),
                   flops_rate(6 * T * H * FFN))


def measure_matmul(rung: str) -> Result:
    n = 8192 if LADDER[rung].on_tensor_cores else 2048
    return compare(partial(matmul, LADDER[rung]), {"torch.mm": torch.mm}, make_cold_inputs(partial(random_pair, n)),
                   flops_rate(2 * n**3))


def measure_gelu() -> Result:
    rivals, inputs = dict(gelus()), make_cold_inputs(lambda: (torch.randn(2**28, device="cuda"),))
    return compare(rivals.pop("Triton"), rivals, inputs, bytes_rate(8 * 2**28))


# ---- the table ------------------------------------------------------------------------------------------------------

SIZES = {  # flags, and the utilisation (6 N + 12 L h S) that is aimed at
    "Llama 1B": ("--preset llama-3.2-1b --micro-batch 4 --global-batch 16", "52%"),
    "Llama 3B": ("--preset llama-3.2-3b --micro-batch 4 --global-batch 16", "55%"),
    "Llama 8B with 16 layers": ("--preset llama-3.1-8b --layers 16 --micro-batch 2 --global-batch 16", "57%")}
LARGEST, (LARGEST_FLAGS, _) = list(SIZES.items())[-1]
SHORT, SHORT_FLAGS = "training Llama 1B, one sequence of 1024", "--preset llama-3.2-1b --seq 1024 --global-batch 1"
COPY = "at least 90% of a copy"
ROWS = [
    *(Row(f"training {name}", partial(measure_training, flags), f"MFU {mfu}") for name, (flags, mfu) in SIZES.items()),
    *(Row(f"attention {direction}, B {B}, S {S}, N {N}, K {K}, D {D}",
          partial(measure_attention, direction, B, S, N, K, D), aim)
      for B, S, N, K, D in ((4, 4096, 32, 8, 128), (2, 8192, 32, 8, 128), (8, 4096, 32, 8, 64))
      for direction, aim in (("forward", "1.33"), ("backward", "1.61"))),
    Row(f"linear cross-entropy, {T} x {H} x 128256", measure_loss, "1.05, with 0.1 of eager's memory"),
    *(Row(name, partial(measure_fused, name), COPY) for name in (
        "RMSNorm", "add and RMSNorm", "rotary embedding, 32 + 8 heads of 128", "SwiGLU", "SwiGLU backward",
        "FP8: 1 x 128 blocks of rows and of columns")),
    Row("RMSNorm backward", measure_rms_norm_backward, COPY),
    *(Row(f"training {LARGEST}, --fp8 {recipe}", partial(measure_training, f"{LARGEST_FLAGS} --fp8 {recipe}"), aim,
          f"training {LARGEST}") for recipe, aim in (("tensorwise", "0.77"), ("blockwise", "0.85"))),
    *(Row(f"FP8: linear layer, {recipe}", partial(measure_fp8_linear, recipe), aim)
      for recipe, aim in (("tensorwise", "0.69"), ("blockwise", "0.80"))),
    Row("FP8: product of blocks", measure_fp8_product, "1.25"),
    *(Row(f"time of a step by kind of kernel, {name}", partial(measure_time_split, flags))
      for name, (flags, _) in reversed(SIZES.items())),
    Row(SHORT, partial(measure_training, SHORT_FLAGS)),
    Row("the same with --graph", partial(measure_training, f"{SHORT_FLAGS} --graph"), "below 1", SHORT),
    *(Row(f"2,000 small steps, --fp8 {recipe}", partial(measure_final_loss, recipe), aim) for recipe, aim in (
        ("none", ""), ("tensorwise", "loss of none + 0.5%"), ("blockwise", "loss of none + 0.25%"))),
    *(Row(f"matmul, {rung}", partial(measure_matmul, rung), "1.09" if rung == "persistent" else "")
      for rung in reversed(LADDER)),
    Row("GELU of 2^28 fp32 numbers", measure_gelu)]


def table(rows: list[Row], outcomes: list[Result | str]) -> str:
    """Markdown. An outcome is a result, or the reason why there is none."""
    lines = ["| what | ours, ms | rate | rivals, ms | ratio: ours / fastest rival | aim |", "|---|---|---|---|---|---|"]
    results = {row.name: outcome for row, outcome in zip(rows, outcomes) if isinstance(outcome, Result)}
    for row, outcome in zip(rows, outcomes):
        if row.name not in results:
            lines.append(f"| {row.name} | not measured: {outcome} | | | | {row.aim} |")
            continue
        rivals = dict(outcome.rivals)
        if row.rival in results:
            rivals[row.rival] = results[row.rival].seconds
        times = ", ".join(f"{name} {seconds * 1e3:.3f}" for name, seconds in rivals.items())
        ratio = f"{outcome.seconds / min(rivals.values()):.2f}" if rivals else ""
        lines.append(f"| {row.name} | {outcome.seconds * 1e3:.3f} | {outcome.rate} | {times} | {ratio} | {row.aim} |")
    return "\n".join(lines)


def replace_section(results: str, text: str) -> str:
    """The text of RESULTS.md with the section under HEADING replaced, or added at the end."""
    before, found, after = results.partition(f"\n{HEADING}\n")
    following = after.find("\n## ") if found else -1
    return f"{before.rstrip()}\n\n{HEADING}\n\n{text}\n" + (after[following:] if following >= 0 else "")


def measure_rows(rows: list[Row], title: str, path: str, start_limit_s: float = 420,
                 row_limit_s: float = 120) -> None:
    """Measure in this order; after every row print its outcome and write the table so far to the file. No row begins
    after start_limit_s; a row that takes longer than row_limit_s is abandoned."""
    began, outcomes, executor = time.monotonic(), [], None
    for row in rows:
        executor = executor or ProcessPoolExecutor(1, multiprocessing.get_context("forkserver"))
        elapsed_s, outcome = time.monotonic() - began, "no time was left"
        try:
            if elapsed_s <= start_limit_s:
                outcome = executor.submit(row.measure).result(row_limit_s)
        except Exception as error:
            traceback.print_exc()
            outcome = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            for process in list(executor._processes.values()):  # Python 3.14 has kill_workers()
                process.kill()
            executor = None
        outcomes.append(outcome)
        print(f"{elapsed_s:.0f} s: {row.name}: {outcome}", flush=True)
        with open(path) as file:
            results = replace_section(file.read(), f"{title}\n\n{table(rows, outcomes)}")
        with open(path, "w") as file:
            file.write(results)


def measure() -> None:
    """Measure ROWS; print them and write them to RESULTS.md."""
    properties = torch.cuda.get_device_properties(0)
    title = (f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, torch {torch.__version__}, triton "
             f"{triton.__version__}, CUDA {torch.version.cuda}, {datetime.date.today()}, `python bench.py gpu`.")
    measure_rows(ROWS, title, RESULTS)
