"""Everything that can be measured on one GPU, in one call: `python bench.py gpu`; no part begins after seven minutes.

Every kernel beside its alternatives, in the same process, on random data: medians of 20 calls between events, with
inputs that take turns so that none is in the L2 cache. Then training runs of three sizes of Llama through train.py's
own loop, and where their time goes. A ratio is our time over the best alternative's: below 1 we are faster. What is
bound by memory is also compared with this GPU's rate of copying. One table is printed and written to RESULTS.md, with
hardware, versions and date; what there was no time for is named.
"""
import datetime
import gc
import json
import os
import re
import statistics
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import config
import train
from param import Source, box_shape

MINUTES = 9
HEADING = "## One GPU"


class Row(NamedTuple):
    """A line of the table. seconds: of ours. rate: of ours, as text. wanted: the largest good ratio, or the rate to
    reach, as text."""
    what: str
    seconds: float
    rate: str = ""
    other: str = ""
    ratio: float | None = None
    wanted: str = ""


def beside(what: str, ours: Callable, others: dict[str, Callable], inputs: list[tuple], rate: Callable[[float], str],
           wanted: str) -> Row:
    """Ours and the fastest of the others, on the same inputs."""
    from primer import timed

    seconds, times = timed(ours, inputs), {name: timed(other, inputs) for name, other in others.items()}
    best = min(times, key=times.get)
    return Row(what, seconds, rate(seconds), f"{best} {times[best] * 1e3:.3f} ms", seconds / times[best], wanted)


def made(*shapes: tuple[int, ...], grad: bool = False) -> list[tuple[torch.Tensor, ...]]:
    """Random bf16 inputs, enough of them that none is in the L2 cache when its turn comes."""
    from primer import rotated

    return rotated(lambda: tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)
                                 for shape in shapes))


# ---- kernels --------------------------------------------------------------------------------------------------------

def attention() -> Iterator[Row]:
    import flash
    from primer import timed

    def theirs(backend: SDPBackend, q, k, v) -> torch.Tensor:
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def backward(o, inputs, do) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(o, inputs, do, retain_graph=True)

    backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    def row(what: str, times: dict[str, float], flops: float, wanted: str) -> Row:
        ours, *others = times.items()
        return Row(f"attention {what}", ours[1], f"{flops / ours[1] / 1e12:.0f} TFLOP/s",
                   ", ".join(f"{way} {seconds * 1e3:.3f} ms" for way, seconds in others), ours[1] / times["cuDNN"],
                   f"{wanted} of cuDNN")

    for B, S, N, K, D in ((4, 4096, 32, 8, 128), (2, 8192, 32, 8, 128), (8, 4096, 32, 8, 64)):
        flops = 4 * B * N * S * S * D / 2
        inputs, name = made((B, N, S, D), (B, K, S, D), (B, K, S, D), grad=True), f"B {B}, S {S}, N {N}/{K}, D {D}"
        ways = {"ours": flash.flash_attention} | {way: partial(theirs, backend) for way, backend in backends.items()}
        times = {way: timed(run, inputs) for way, run in ways.items()}
        yield row(f"forward, {name}", times, flops, "1/0.75")
        graphs = {way: [(run(*three), three, torch.randn_like(three[0])) for three in inputs[:2]]
                  for way, run in ways.items()}
        times = {way: timed(backward, given) for way, given in graphs.items()}
        yield row(f"backward, {name}", times, 2.5 * flops, "1/0.62")


def copy_rate() -> float:
    """Bytes a second, read and written, of a copy of a gigabyte."""
    from primer import timed

    x = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    return 2 * x.nbytes / timed(torch.clone, [(x,)])


def memory_bound() -> Iterator[Row]:
    import kernels
    import operations

    T, H, copy = 16384, 4096, copy_rate()
    yield Row("copy of 1 GiB", 2**31 / copy, f"{copy / 1e12:.2f} TB/s")
    weight = torch.ones(H, device="cuda", dtype=torch.bfloat16)

    def share(nbytes: int) -> Callable[[float], str]:
        return lambda s: f"{nbytes / s / 1e12:.2f} TB/s, {nbytes / s / copy:.0%} of a copy"

    def norm(x):
        return operations.rms_norm(x, weight, 1e-5)[0]

    def rotate(x):
        a, b = x[:, :40].unflatten(0, (-1, 4096)).float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    def swiglu(x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    def swiglu_backward(dy, x):
        (gate, up), dy = x.float().chunk(2, -1), dy.float()
        sigmoid = gate.sigmoid()
        return torch.cat((dy * up * sigmoid * (1 + gate * (1 - sigmoid)), dy * gate * sigmoid), -1).to(x.dtype)

    one, two, wanted = made((T, H)), made((T, H), (T, H)), "at least 90% of a copy"
    yield beside("RMSNorm", lambda x: kernels.rms_norm(x, weight, 1e-5),
                 {"F.rms_norm": lambda x: F.rms_norm(x, (H,), weight, 1e-5), "compiled": torch.compile(norm)}, one,
                 share(2 * T * H * 2), wanted)
    leaf = weight.clone().requires_grad_()
    graphs = [(F.rms_norm(x.requires_grad_(), (H,), leaf, 1e-5), x, dy) for x, dy in made((T, H), (T, H))]
    yield beside("RMSNorm backward", lambda y, x, dy: kernels.rms_norm_backward(dy, None, x, weight, 1e-5),
                 {"F.rms_norm": lambda y, x, dy: torch.autograd.grad(y, (x, leaf), dy, retain_graph=True)}, graphs,
                 share(3 * T * H * 2), wanted)
    added = torch.compile(lambda x, y: (x + y, norm(x + y)))
    yield beside("add and RMSNorm", lambda x, y: kernels.add_rms_norm(x, y, weight, 1e-5), {"compiled": added}, two,
                 share(4 * T * H * 2), wanted)
    angle = torch.randn(4096, 1, 64, device="cuda")
    cos, sin = angle.cos(), angle.sin()
    yield beside("rotary embedding, 32 + 8 heads of 128", lambda x: kernels.rope_(x, cos, sin, 40),
                 {"compiled": torch.compile(rotate)}, made((T, 48, 128)), share(2 * T * 40 * 128 * 2), wanted)
    yield beside("SwiGLU", kernels.swiglu, {"compiled": torch.compile(swiglu)}, made((T, 2 * 14336)),
                 share(3 * T * 14336 * 2), wanted)
    yield beside("SwiGLU backward", kernels.swiglu_backward,
                 {"compiled": torch.compile(swiglu_backward)}, made((T, 14336), (T, 2 * 14336)),
                 share(5 * T * 14336 * 2), wanted)


def cross_entropy() -> Iterator[Row]:
    import kernels
    from primer import timed

    M, H, V = 16384, 4096, 128256
    (x, weight), = made((M, H), (V, H), grad=True)[:1]
    labels = torch.randint(V, (M,), device="cuda")
    parameter, main = torch.nn.Parameter(weight.detach()), torch.zeros_like(weight, dtype=torch.float32)
    parameter.sink = SimpleNamespace(main_grad=lambda _: main)  # as in a training run

    def ours(x):
        loss = kernels.linear_cross_entropy(x, parameter, labels)
        return torch.autograd.grad(loss, x)

    def whole(x, weight):
        return F.cross_entropy((x @ weight.t()).float(), labels, reduction="sum")

    compiled = torch.compile(whole)
    seconds, extra = {}, {}
    ways = {"ours": lambda: ours(x), "compiled": lambda: torch.autograd.grad(compiled(x, weight), (x, weight)),
            "eager": lambda: torch.autograd.grad(whole(x, weight), (x, weight))}
    for name, way in ways.items():
        seconds[name] = timed(way, [()])
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        way()
        extra[name] = torch.cuda.max_memory_allocated() - before
    rate = f"{6 * M * H * V / seconds['ours'] / 1e12:.0f} TFLOP/s, {extra['ours'] / 1e9:.1f} GB of extra memory"
    yield Row(f"linear cross-entropy, {M} x {H} x {V}", seconds["ours"], rate,
              f"compiled {seconds['compiled'] * 1e3:.1f} ms, {extra['compiled'] / 1e9:.1f} GB; eager "
              f"{extra['eager'] / 1e9:.1f} GB", seconds["ours"] / seconds["compiled"], "1.05; 0.1 of eager's memory")


def matmuls() -> Iterator[Row]:
    from primer import elementwise, ladder

    *rungs, theirs = ladder(8192)
    for rung in rungs:
        same = rung.flops == theirs.flops
        yield Row(f"matmul, {rung.name}", rung.seconds, f"{rung.flops / rung.seconds / 1e12:.0f} TFLOP/s",
                  f"torch.mm {theirs.seconds * 1e3:.3f} ms" if same else "",
                  rung.seconds / theirs.seconds if same else None, "1/0.92" if rung is rungs[-1] else "")
    ways = elementwise(2**28)
    for way in ways:
        yield Row(f"GELU, {way.name}", way.seconds, f"{way.bytes / way.seconds / 1e12:.2f} TB/s")


def low_precision() -> Iterator[Row]:
    import fp8
    import fp8_kernels
    from param import Spec, parameter
    from primer import timed
    from tp import TensorParallel, column

    T, K, N, bf16, copy, enough = 16384, 4096, 14336, torch.bfloat16, copy_rate(), "at least 90% of a copy"
    inputs = made((T, K))
    seconds = timed(lambda x: fp8_kernels.quantise(x, fp8.E4M3, None, fp8.SMALLEST), inputs)
    nbytes = T * K * (2 + 1 + 1)
    yield Row("FP8: quantise, 1 x 128 blocks, rows and columns", seconds,
              f"{nbytes / seconds / 1e12:.2f} TB/s, {nbytes / seconds / copy:.0%} of a copy", wanted=enough)
    weight = parameter(Spec("w", (N, K)), {}, bf16, "cuda")
    weight.data, up = torch.randn(N, K, device="cuda", dtype=bf16) / 64, torch.randn(T, N, device="cuda", dtype=bf16)
    (a, _), (b, _) = fp8.quantise(inputs[0][0], fp8.E4M3), fp8.quantise(weight.detach(), fp8.E4M3, tiles=True)
    out, flops = torch.empty(T, N, device="cuda", dtype=bf16), 2 * T * K * N
    yield beside(f"FP8: product in blocks, {T} x {K} x {N}", lambda: fp8_kernels.product(a, b, out),
                 {"F.scaled_mm": lambda: fp8.product(a, b, bf16)}, [()],
                 lambda s: f"{flops / s / 1e12:.0f} TFLOP/s", "1/0.8")

    def linear(tp: TensorParallel, x: torch.Tensor) -> None:
        column(x.detach().requires_grad_(), weight, tp=tp).backward(up)

    plain = partial(linear, TensorParallel())
    for name, wanted in ("tensorwise", "1/1.45"), ("blockwise", "1/1.25"):
        low = partial(linear, TensorParallel(fp8=fp8.Fp8(fp8.RECIPES[name], bf16)))
        yield beside(f"FP8: linear layer, {name}, forward and backward", low, {"bf16": plain}, inputs,
                     lambda s: f"{3 * flops / s / 1e12:.0f} TFLOP/s", wanted)


# ---- training -------------------------------------------------------------------------------------------------------

SIZES = {  # flags, and the utilisation (6 N + 12 L h S) that is aimed at
    "Llama 1B": ("--preset llama-3.2-1b --micro-batch 4 --global-batch 16", 0.52),
    "Llama 3B": ("--preset llama-3.2-3b --micro-batch 4 --global-batch 16", 0.55),
    "Llama 8B, 16 layers": ("--preset llama-3.1-8b --layers 16 --micro-batch 2 --global-batch 16", 0.57)}
KINDS = {  # of kernels, by words in their names; the first that fits
    "attention": "flash|fmha|attention|cudnn|sdpa", "loss": "softmax_kernel|cross_entropy",
    "GEMM": "gemm|nvjet|cutlass|cublas|xmma|wgmma|_mm_", "optimizer": "adam|multi_tensor|foreach"}


def kind_of(kernel: str) -> str:
    """The kind of a kernel, by its name; elementwise if no word of KINDS is in it."""
    return next((kind for kind, words in KINDS.items() if re.search(words, kernel, re.IGNORECASE)), "elementwise")


def drawn_here(seed: int) -> Source:
    """Initial values drawn on the GPU, not equal on every grid: a CPU takes minutes for billions of them."""
    torch.manual_seed(seed)
    return lambda spec, box: torch.randn(box_shape(box), device="cuda").mul_(spec.std).add_(spec.mean)


def run(flags: str, steps: int) -> list[dict]:
    """The records of a training run in this process."""
    with tempfile.NamedTemporaryFile("r") as metrics:
        how = f"--seq 4096 --dtype bf16 --steps {steps} --warmup 0 --sample= --metrics {metrics.name}"
        settings = config.parse(f"{how} {flags}".split())
        device, why = train.choose_device("cuda")
        samples = train.open_samples(settings, [], 0)
        torch.cuda.reset_peak_memory_stats()
        # --graph changes the current stream, which is restored here
        with patch.object(train, "draw", drawn_here), torch.cuda.stream(torch.cuda.current_stream()):
            train.train(settings, samples, None, device, why, train.RunState())
        tidy()
        return [json.loads(line) for line in metrics]


def tidy() -> None:
    """Release the memory of a run."""
    gc.collect()
    torch.cuda.empty_cache()


def time_split(flags: str) -> str:
    """Shares of a step's time by kind of kernel, from a profile of the last two of four steps."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run(flags, 4)
    kernels = sorted((event.time_range.start, event.time_range.end, event.name) for event in profiler.events()
                     if event.device_type == torch.autograd.DeviceType.CUDA)
    updates = [i for i, (*_, name) in enumerate(kernels) if kind_of(name) == "optimizer"]
    if not updates:
        return f"{len(kernels)} kernels seen by the profiler, no optimizer among them"
    kernels = kernels[updates[len(updates) // 2 - 1] + 1:]  # from the end of the second update on
    spent = Counter()
    for start, end, name in kernels:
        spent[kind_of(name)] += end - start
    whole = max(end for _, end, _ in kernels) - kernels[0][0]
    spent["idle"] = max(0, whole - sum(spent.values()))
    return ", ".join(f"{kind} {share / whole:.0%}" for kind, share in spent.most_common())


def loss_gap() -> Iterator[Row]:
    """2,000 steps of a small Llama from the same weights, as tests/test_fp8.py has them; losses of the last 200."""
    flags = ("--layers 2 --hidden 128 --heads 2 --kv-heads 2 --ffn 384 --seq 128 --global-batch 4 --lr 5e-4 "
             "--warmup 20 --fp8 ")
    runs = {name: run(flags + name, 2000) for name in ("none", "tensorwise", "blockwise")}
    last = {name: statistics.mean(record["loss"] for record in records[-200:]) for name, records in runs.items()}
    for name, wanted in ("tensorwise", "0.5%"), ("blockwise", "0.25%"):
        step, gap = statistics.median(record["step_s"] for record in runs[name]), last[name] / last["none"] - 1
        yield Row(f"FP8: 2,000 small steps, {name}", step, f"loss {gap:+.2%}", f"bf16 {last['none']:.4f} nats",
                  wanted=f"at most {wanted}")


def graph() -> Iterator[Row]:
    small = "--preset llama-3.2-1b --seq 1024 --global-batch 1"
    plain, replayed = (statistics.median(record["step_s"] for record in run(small + how, 16)[5:])
                     for how in ("", " --graph"))
    yield Row("training Llama 1B, 1024 tokens a step, --graph", replayed, other=f"without {plain * 1e3:.1f} ms",
              ratio=replayed / plain, wanted="below 1")


def training(name: str) -> Iterator[Row]:
    flags, wanted = SIZES[name]
    last = run(flags, 8)[3:]
    step, rate, mfu, causal = (statistics.median(record[key] for record in last) for key in
                               ("step_s", "tokens_per_s", "mfu", "mfu_causal"))
    yield Row(f"training {name}, 4096 tokens a sequence, bf16", step, f"{rate:,.0f} tokens/s, MFU {mfu:.1%} (causal "
              f"{causal:.1%}), {last[-1]['memory_gb']:.0f} GB", wanted=f"MFU {wanted:.0%}")
    for recipe, wanted in (("tensorwise", "1/1.3"), ("blockwise", "1/1.18")) if name == list(SIZES)[-1] else ():
        low = statistics.median(record["step_s"] for record in run(f"{flags} --fp8 {recipe}", 8)[3:])
        yield Row(f"training {name}, --fp8 {recipe}", low, other=f"bf16 {step * 1e3:.0f} ms", ratio=low / step,
                  wanted=wanted)
    yield Row(f"training {name}, where the time goes", step, time_split(flags))


# ---- the table ------------------------------------------------------------------------------------------------------

PARTS = {"attention": attention, "memory-bound": memory_bound, "cross-entropy": cross_entropy,
         **{name: partial(training, name) for name in SIZES}, "low precision": low_precision, "matmuls": matmuls,
         "loss gap": loss_gap,
         "graph": graph}  # last: a capture that fails leaves an allocator that nothing else can use


def table(rows: list[Row]) -> str:
    lines = ["| what | ours | rate | compared with | ratio | aim |", "|---|---|---|---|---|---|"]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append(f"| {row.what} | {row.seconds * 1e3:.3f} ms | {row.rate} | {row.other} | {ratio} | {row.wanted} |")
    return "\n".join(lines)


def written(results: str, heading: str, text: str) -> str:
    """The text of RESULTS.md with the section under this heading replaced, or added at the end."""
    before, found, after = results.partition(f"\n{heading}\n")
    following = after.find("\n## ") if found else -1
    return f"{before.rstrip()}\n\n{heading}\n\n{text}\n" + (after[following:] if following >= 0 else "")


def measure() -> None:
    """Run every part while there is time; print the table and write it to RESULTS.md after each."""
    began, rows, missing = time.monotonic(), [], []
    properties = torch.cuda.get_device_properties(0)
    import triton

    for name, part in PARTS.items():
        if time.monotonic() - began > (MINUTES - 2) * 60:
            missing.append(f"{name}: no time was left")
            continue
        try:
            tidy()
            rows += part()
        except Exception as error:  # one part that fails must not hide the others
            traceback.print_exc()
            missing.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        print(f"{name}: {time.monotonic() - began:.0f} s since the start", flush=True)
        text = (f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, torch {torch.__version__}, triton "
                f"{triton.__version__}, CUDA {torch.version.cuda}, {datetime.date.today()}, `python bench.py gpu`.\n\n"
                + table(rows) + "".join(f"\n\nNot measured: {line}" for line in missing))
        with open(os.path.join(os.path.dirname(__file__), "RESULTS.md"), "r+") as file:
            results = written(file.read(), HEADING, text)
            file.seek(0)
            file.write(results)
            file.truncate()
    print(text)
