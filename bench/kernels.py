"""The rows of `python -m bench gpu` about single kernels: ours, their rivals, and the same in fp64.

Each function builds the contenders of one row, which do equal work on equal inputs, and returns the
result of `compare` in bench/rows.py. bench/gpu_rows.py lists the rows.

Shapes: B batch, S sequence, N heads, K kv heads, D head dim, T tokens, H hidden, V vocabulary.
"""
import itertools
import time
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.language.extra.cuda import globaltimer

import flash
import fp8
import fp8_kernels
import kernels
import operations
from bench.rows import Rate, Result, compare, measure_seconds
from core.config import FP8_RECIPES
from core.gradients import accumulate_product
from core.param import Spec, parameter
from sdpa import attention_sdpa, gpu_backward, gpu_forward
from tp import Column, Matmul, TensorParallel

T, S, H, FFN = 16384, 4096, 4096, 14336  # of most kernels
EXPERTS = {"128 experts as in Qwen3-30B-A3B": (128, 1536, 2048, 512),  # gate and up: experts, N, K, rows of each
           "8 experts as in Mixtral 8x7B": (8, 28672, 4096, 2048)}


def random_tensors(*shapes: tuple[int, ...], grad: bool = False) -> tuple[Tensor, ...]:
    """Return random tensors in bf16."""
    return tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad) for shape in shapes)


def in_fp64(function: Callable) -> Callable:
    """Return the function of the same numbers in fp64."""
    return lambda *inputs: function(*(x.double() for x in inputs))


def flops_rate(flops: float) -> Rate:
    return lambda seconds: f"{flops / seconds / 1e12:.0f} TFLOP/s"


@cache
def copy_rate() -> float:
    """Return the bytes per second, read and written, of a copy of 1 GiB."""
    x = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    return 2 * x.nbytes / measure_seconds(torch.clone, x)


def bytes_rate(nbytes: float) -> Rate:
    return lambda seconds: f"{nbytes / seconds / 1e12:.2f} TB/s, {nbytes / seconds / copy_rate():.0%} of a copy"


# ---- matmuls --------------------------------------------------------------------------------------------------------

MATMULS = {"qkv": (8192, 6144, 4096), "attention out": (8192, 4096, 4096), "gate and up": (8192, 28672, 4096),
           "down": (8192, 4096, 14336), "head, 4096 tokens": (4096, 128256, 4096)}  # T, N, K of X W^T


def measure_block_matmul(kind: str, tokens: int, N: int, K: int) -> Result:
    """Measure X W^T, its input gradients, or its weight gradients added to an fp32 matrix.

    It is measured in bf16 and in both FP8 recipes. Operands in FP8 are quantised beforehand.
    """
    x, w, dy = random_tensors((tokens, K), (N, K), (tokens, N))
    a, b = {"forward": (x, w.t()), "input gradients": (dy, w), "weight gradients": (dy.t(), x)}[kind]
    out = torch.zeros(N, K, device="cuda")

    def contender(recipe: str) -> Callable[[], Any]:
        if recipe == "bf16":
            return partial(accumulate_product, out, a, b) if kind == "weight gradients" else partial(torch.mm, a, b)
        layer, weight = fp8.Fp8(FP8_RECIPES[recipe], torch.bfloat16), parameter(Spec("w", (N, K)), {}, w.dtype, "cuda")
        weight.data = w
        in_rows, in_columns = layer.quantise_weight((weight,))
        (dy_rows, dy_columns), (x_rows, x_columns) = layer.prepare_grad(dy), layer.quantise_tokens(x)[0]
        if kind == "weight gradients":
            return lambda: out.add_(fp8.product(dy_columns, x_columns, out.dtype))
        if kind == "forward":
            return partial(fp8.product, x_rows, in_rows, w.dtype, fast=not layer.recipe.blocks)
        return partial(fp8.product, dy_rows, in_columns, w.dtype)

    contenders = {"bf16": contender("bf16")}
    if kind == "weight gradients":
        contenders["bf16, rounded, then added"] = lambda: out.add_(a @ b)
    for recipe in FP8_RECIPES if N < 128256 else ():  # the head is never in FP8
        contenders[recipe] = contender(recipe)
    return compare(contenders, (), flops_rate(2 * tokens * N * K))


# ---- kernels --------------------------------------------------------------------------------------------------------

def heads_of_the_model(B: int, S: int, N: int, K: int, D: int) -> tuple[Tensor, ...]:
    """Return q [B, N, S, D], k and v [B, K, S, D], and a gradient of the result.

    They have the layouts of training: q, k and v are slices of the output of the fused projection,
    and the gradient is as the following matmul returns it.
    """
    qkv, do = random_tensors((B, S, N + 2 * K, D), (B, S, N, D))
    return *(x.transpose(1, 2).detach().requires_grad_() for x in qkv.split([N, K, K], 2)), do.transpose(1, 2)


def measure_attention(direction: str, B: int, S: int, N: int, K: int, D: int, documents: int = 1) -> Result:
    """Measure causal attention, "forward" or "backward", in sequences of `documents` equally long
    documents.

    With more than one document, torch's only kernel is the one with a mask [S, S].
    """
    def ids(q: Tensor) -> Tensor:
        return torch.arange(q.shape[2], device=q.device).mul(documents).div(q.shape[2]).int().expand(len(q), -1)

    def mask(q: Tensor) -> operations.Mask:
        return operations.Mask(documents=(ids(q), ids(q))) if documents > 1 else operations.CAUSAL

    def sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def sdpa_with_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_sdpa(q, k, v, mask(q))

    def exact(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Tensor | tuple[Tensor, ...]:
        qkv = [x.detach().double().requires_grad_() for x in (q, k, v)]
        o = operations.attention_math(*qkv, mask(q))
        return torch.autograd.grad(o, qkv, do.double()) if direction == "backward" else o.detach()

    def forward(attend: Callable) -> Callable:
        return lambda q, k, v, do: attend(q, k, v).detach()

    def backward(attend: Callable) -> Callable:
        graph = cache(attend)  # the warm-up computes it
        return lambda q, k, v, do: torch.autograd.grad(graph(q, k, v), (q, k, v), do, retain_graph=True)

    contenders = {"ours": lambda q, k, v: flash.flash_attention(q, k, v, mask(q))}
    contenders |= {"torch's, with a mask": sdpa_with_mask} if documents > 1 else {
        "cuDNN": partial(sdpa, SDPBackend.CUDNN_ATTENTION), "torch's flash": partial(sdpa, SDPBackend.FLASH_ATTENTION)}
    one_way, matmuls = (forward, 2) if direction == "forward" else (backward, 5)
    return compare({name: one_way(attend) for name, attend in contenders.items()},
                   heads_of_the_model(B, S, N, K, D),
                   flops_rate(matmuls * B * N * S * S * D / documents),  # half of the scores are masked
                   exact, partial(heads_of_the_model, 1, min(S, 1024), N, K, D))


def measure_block_of_keys(direction: str, rows: int = 4096, columns: int = 2048, N: int = 32, K: int = 8,
                          D: int = 128) -> Result:
    """Measure a block of context parallelism: a rank's queries and an earlier chunk of keys. See
    cp.py.

    direction: "forward" or "backward".
    """
    mask = operations.Mask(causal=False)
    kernels = {"cuDNN": (gpu_forward, gpu_backward),  # torch's choice for such heads
               "flash.py": (flash.flash_forward, flash.flash_backward)}

    def make(rows: int, columns: int) -> tuple[Tensor, ...]:
        shapes = [(1, rows, N, D), (1, columns, K, D), (1, columns, K, D), (1, rows, N, D)]
        return tuple(x.transpose(1, 2) for x in random_tensors(*shapes))

    @cache  # the warm-up computes it
    def result(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return flash.flash_forward(q, k, v, mask)

    def attend(name: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
        forward, backward = kernels[name]
        return forward(q, k, v, mask) if direction == "forward" else backward(do, q, k, v, *result(q, k, v), mask)

    def exact(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
        o, lse = operations.math_forward(q, k, v, mask)
        return (o, lse) if direction == "forward" else operations.math_backward(do, q, k, v, o, lse, mask)

    matmuls = 2 if direction == "forward" else 5
    return compare({name: partial(attend, name) for name in kernels},
                   make(rows, columns),
                   flops_rate(2 * matmuls * N * rows * columns * D), in_fp64(exact),
                   partial(make, min(rows, 512), min(columns, 256)))


def measure_norm_programs() -> Result:
    """Measure RMSNorm's backward in a residual stream, with 2, 4 and 8 programs per SM."""
    def backward(programs: int, dy: Tensor, dtotal: Tensor, x: Tensor, weight: Tensor) -> tuple:
        with patch.object(kernels, "count_programs", lambda device: programs):
            return kernels.rms_norm_backward(dy, dtotal, x, weight, 1e-5)

    def exact(dy: Tensor, dtotal: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        dx, dweight = norm_backward(dy, x, weight)
        return dx + dtotal, dweight

    inputs = random_tensors(*[(T, H)] * 3, (H,))
    default = kernels.count_programs(inputs[0].device)
    return compare({f"{times * default} programs": partial(backward, times * default) for times in (1, 2, 4)},
                   inputs, bytes_rate(8 * T * H), in_fp64(exact),
                   partial(random_tensors, *[(S, H)] * 3, (H,)))


def measure_loss(V: int = 128256, tokens: int = 16384) -> Result:
    """Measure the loss with the head's matmul, forward and backward, and the memory that it takes
    besides its inputs.

    The weight's gradient is added to an fp32 matrix.
    """
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

    result, memory = compare(contenders, (), flops_rate(6 * tokens * H * V), exact), []
    for name in ("ours", *result.rivals):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        contenders[name]()
        memory.append(f"{name} {(torch.cuda.max_memory_allocated() - before) / 1e9:.2f} GB")
    return result._replace(rate=f"{result.rate}; extra memory: {', '.join(memory)}")


def norm_backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = (leaf.detach().requires_grad_() for leaf in (x, weight))
    return torch.autograd.grad(F.rms_norm(x, weight.shape, weight, 1e-5), (x, weight), dy)


@cache
def angles() -> tuple[Tensor, Tensor]:
    angle = torch.arange(S, device="cuda")[:, None, None] * torch.logspace(0, -4, 64, device="cuda")
    return angle.cos(), angle.sin()


def rotate(x: Tensor) -> Tensor:
    kernels.rope_(x, *angles(), 40)
    return x[:, :, :40]


def swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    dy_acc, sigmoid = dy.float(), gate.sigmoid()
    return torch.cat((dy_acc * up * sigmoid * (1 + gate * (1 - sigmoid)), dy_acc * gate * sigmoid), -1).to(x.dtype)


def fused() -> dict[str, tuple[Callable, Callable, int, list[tuple[int, ...]]]]:
    """Return kernels bound by memory: name -> (ours, the formula, elements read and written, shapes
    of the inputs)."""
    return {
        "RMSNorm": (lambda x, w: kernels.rms_norm(x, None, w, 1e-5)[1],
                    lambda x, w: kernels.rms_norm_reference(x, None, w, 1e-5)[1], 2 * T * H, [(T, H), (H,)]),
        "add and RMSNorm": (lambda x, y, w: kernels.rms_norm(x, y, w, 1e-5),
                            lambda x, y, w: kernels.rms_norm_reference(x, y, w, 1e-5), 4 * T * H,
                            [(T, H), (T, H), (H,)]),
        "RMSNorm backward": (lambda dy, x, w: kernels.rms_norm_backward(dy, None, x, w, 1e-5), norm_backward,
                             3 * T * H, [(T, H), (T, H), (H,)]),
        "rotary embedding, 32 + 8 heads of 128": (rotate, lambda x: kernels.rope_reference(x[:, :, :40], *angles(), 40),
                                                  2 * T * 40 * 128, [(T // S, S, 48, 128)]),
        "SwiGLU": (kernels.swiglu, kernels.swiglu_reference, 3 * T * FFN, [(T, 2 * FFN)]),
        "SwiGLU backward": (lambda dy, x: kernels.swiglu(x, dy), swiglu_backward, 5 * T * FFN,
                            [(T, FFN), (T, 2 * FFN)])}


def measure_fused(name: str) -> Result:
    """Measure a kernel of `fused`. The rivals are torch.compile and, for norms, torch's own kernel."""
    ours, formula, elements, shapes = fused()[name]
    contenders = {"ours": ours}
    if name == "RMSNorm backward":  # the rival's time includes a forward
        contenders["F.rms_norm, forward and backward"] = formula
    else:
        contenders["compiled"] = torch.compile(formula)
    if name == "RMSNorm":
        contenders["F.rms_norm"] = lambda x, w: F.rms_norm(x, (H,), w, 1e-5)
    checked = [(S, *shape[1:]) if shape[0] == T else shape for shape in shapes]
    return compare(contenders, random_tensors(*shapes), bytes_rate(2 * elements), in_fp64(formula),
                   partial(random_tensors, *checked))


def copies_of_tokens(k: int, copies: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [copies, width], k copies of each token in random order; the order; the start of
    each token in the order."""
    order = torch.randn(copies, device="cuda").argsort()
    return *random_tensors((copies, width)), order, torch.arange(copies // k, device="cuda") * k


def measure_sum_of_copies(k: int = 8) -> Result:
    """Measure the sum of each token's k copies, as ep.py computes it."""
    def sum_bags(x: Tensor, order: Tensor, starts: Tensor) -> Tensor:
        return torch.embedding_bag(x, order, starts, mode=0)[0]

    def exact(x: Tensor, order: Tensor, starts: Tensor) -> Tensor:
        return x.double()[order].unflatten(0, (-1, k)).sum(1)

    return compare({"ours": kernels.sum_rows, "embedding_bag": sum_bags}, copies_of_tokens(k, T, H),
                   bytes_rate(2 * (T + T // k) * H), exact, partial(copies_of_tokens, k, S, H))


def measure_expert_gradients(experts: int, N: int, K: int, rows: int) -> Result:
    """Measure the weight gradients of experts [N, K] with `rows` rows each, added to fp32."""
    def make(rows: int) -> tuple[Tensor, ...]:
        ends = torch.arange(1, experts + 1, device="cuda") * rows
        return torch.zeros(experts, N, K, device="cuda"), *random_tensors(
            (experts * rows, N), (experts * rows, K)), ends.int()

    def added(add: Callable) -> Callable:
        return lambda dw, *inputs: (add(dw, *inputs), dw)[1]

    def by_expert(dw: Tensor, dy: Tensor, x: Tensor, ends: Tensor) -> None:
        for matrix, dy_rows, x_rows in zip(dw, dy.chunk(experts), x.chunk(experts)):
            accumulate_product(matrix, dy_rows.t(), x_rows)

    def exact(dw: Tensor, dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
        return dy.double().unflatten(0, (experts, -1)).mT @ x.double().unflatten(0, (experts, -1))

    return compare({"ours": added(kernels.add_expert_gradients), "a matmul per expert": added(by_expert)}, make(rows),
                   flops_rate(2 * experts * rows * N * K), exact, partial(make, min(rows, 64)))


def measure_quantise(kind: str) -> Result:
    """Measure making both FP8 copies of x [T, H]: two bytes read per element, and two written.

    The rival is our formula, compiled.
    """
    scale = torch.ones((), device="cuda") if kind == "one scale" else None
    tiles = kind == "128 x 128 tiles"

    def by_torch(x: Tensor) -> tuple:
        if scale is not None:
            return fp8.quantise_at_scale(x, scale, fp8.E4M3)
        if tiles:
            return fp8.quantise_blocks(x, fp8.E4M3, fp8.BLOCK)
        return *fp8.quantise_blocks(x, fp8.E4M3), *fp8.quantise_blocks(x.t(), fp8.E4M3)

    contenders = {"ours": lambda x: fp8_kernels.quantise(x, fp8.E4M3, scale, fp8.SMALLEST, tiles=tiles),
                  "compiled" if scale is None and not tiles else "compiled, without the columnwise copy":
                  torch.compile(by_torch)}
    return compare(contenders, random_tensors((T, H)), bytes_rate(4 * T * H))


def measure_fp8_linear(recipe: str) -> Result:
    """Measure a linear layer, forward and backward. As in training, the weight's gradient is added
    to an fp32 matrix."""
    weight, main_grad = parameter(Spec("w", (FFN, H)), {}, torch.bfloat16, "cuda"), torch.zeros(FFN, H, device="cuda")
    weight.data = torch.randn(FFN, H, device="cuda", dtype=torch.bfloat16) / 64
    weight.sink = SimpleNamespace(main_grad=lambda _: main_grad)
    dy = torch.randn(T, FFN, device="cuda", dtype=torch.bfloat16)

    def run(mm: Matmul, x: Tensor) -> None:
        Column.apply(x.detach().requires_grad_(), TensorParallel(), mm, True, weight).backward(dy)

    contenders = {"ours": partial(run, fp8.Fp8(FP8_RECIPES[recipe], torch.bfloat16)), "bf16": partial(run, Matmul())}
    return compare(contenders, random_tensors((T, H)), flops_rate(6 * T * H * FFN))


# ---- streams --------------------------------------------------------------------------------------------------------

@triton.jit
def wait_kernel(nanoseconds):
    """Let each program keep an SM busy, like a collective that waits for another rank."""
    start = globaltimer()
    while globaltimer() - start < nanoseconds:
        pass


def measure_beside_waiting(programs: int, shape: tuple[int, int, int] = (8192, 28672, 4096)) -> Result:
    """Measure a matmul [M, K] x [K, N] while `programs` programs wait on another stream.

    The rival is the same matmul with nothing beside it.
    """
    M, N, K = shape
    (a, b), beside = random_tensors((M, K), (K, N)), torch.cuda.Stream()

    def multiply_beside_waiting() -> Tensor:
        with torch.cuda.stream(beside):
            wait_kernel[(programs,)](10_000_000, num_warps=16)  # longer than the matmul, so they never end before it
        return torch.matmul(a, b)

    alone, seconds = measure_seconds(torch.matmul, a, b), measure_seconds(multiply_beside_waiting)
    return Result(seconds, flops_rate(2 * M * N * K)(seconds), {"alone": alone})


def print_blocked_streams(count: int = 12) -> None:
    """Print which of `count` streams block each other because both use the same queue of the
    device.

    A device has CUDA_DEVICE_MAX_CONNECTIONS queues. CUDA reads the variable when it starts.
    """
    streams, x, blocked = [torch.cuda.Stream() for _ in range(count)], torch.zeros(1, device="cuda"), []
    for first, second in itertools.permutations(range(count), 2):
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[first]):
            torch.cuda._sleep(10_000_000)  # 5 ms
            torch.cuda._sleep(1000)  # waits for the first, and so does everything behind it in the queue
        with torch.cuda.stream(streams[second]):
            x.add_(1)
            began = time.perf_counter()
            torch.cuda.current_stream().synchronize()
        if time.perf_counter() - began > 2e-3:
            blocked.append((first, second))
    print(f"{len(blocked)} of {count * (count - 1)} pairs of streams block each other: {blocked[:20]}")


def measure_host_link(nbytes: int = 2**31) -> Result:
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    gpu = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    back, there = (measure_seconds(partial(target.copy_, non_blocking=True), source)
                   for target, source in ((host, gpu), (gpu, host)))
    return Result(back, f"{nbytes / back / 1e9:.1f} GB/s to the host, {nbytes / there / 1e9:.1f} GB/s to the GPU")
