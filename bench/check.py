"""Do our kernels run here, and are they correct? Compare each with torch and with fp64, on a
model's shapes.

    python -m bench check [--preset llama-3.1-8b]

Run this command first on a new machine. On a GPU it checks in bf16, and in FP8 if the GPU supports
it. Without a GPU it uses Triton's interpreter, in fp32.

Each forward and each backward has a line. It shows the largest error of the kernel's results
relative to fp64, the same error of torch in the kernel's dtype, and a verdict:

- "ok": the kernel's error is at most twice torch's.
- "differs": it is larger. --kernels torch trains without our kernels.
- "does not run": the kernel does not compile or launch. The reason follows. Training uses torch
  instead, and says so.

The exit code is 0 if every line is ok, and 1 otherwise. Full errors are on stderr.
"""
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import torch
import triton
from torch import Tensor

import ep
import flash
import fp8
import fp8_kernels
import kernels
import operations
from bench.rows import Row, Worker, first_line, relative_error
from core import config, rules
from core.param import IGNORED, acc_dtype
from operations import Mask, rotate_and_split
from plan.printing import table
from run.cli import told_if_slow
from sdpa import attention_sdpa
from tp import cross_entropy

USAGE = "python -m bench check [--preset NAME]"
ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE, TOKENS = ("cuda", torch.bfloat16, 528) if ON_GPU else ("cpu", torch.float32, 48)  # no whole tiles


@dataclass
class Flags:
    preset: str = config.setting("", "a model with the shapes to check; by default llama-3.1-8b on a GPU, else tiny")


def cases(model: config.Model, T: int = TOKENS) -> dict[str, tuple[Callable, Callable, list[tuple[int, ...]]]]:
    """Return name -> (a function that launches kernels, the same in torch, the shapes of their
    arguments).

    The two may be one function that has both paths.
    """
    H, N, K, D, V = model.hidden, model.heads, model.kv_heads, model.head_dim, model.vocab
    angles = operations.rotary_angles(torch.arange(T, device=DEVICE), model, torch.float32)
    labels = torch.arange(T, device=DEVICE) * 7919 % V
    labels[::5] = IGNORED
    documents = (torch.arange(T, device=DEVICE)[None] // (T // 3),) * 2
    def quantised(x: Tensor, **options) -> tuple[Tensor, ...]:
        if x.dtype == torch.float64:
            return x, x.t()
        both = fp8.quantise(x.detach(), fp8.E4M3, **options)
        return tuple(fp8.dequantise(fp8.Quantised(q.data.cpu(), q.scales.cpu()), x.dtype).to(DEVICE) for q in both)

    norm, width = operations.RMSNormFunction.apply, min(H, 256)  # width: of the head, to save memory
    same = {"RMSNorm": (lambda x, w: norm(x, None, w, 1e-5)[1], [(T, H), (H,)]),
            "add and RMSNorm": (lambda x, y, w: norm(x, y, w, 1e-5), [(T, H), (T, H), (H,)]),
            "rotary embedding": (lambda x: rotate_and_split(x * 1, [part.to(acc_dtype(x.dtype)) for part in angles],
                                                            [N, K, K]), [(1, T, N + 2 * K, D)]),
            "SwiGLU": (operations.swiglu, [(T, 2 * model.ffn)])}
    if ON_GPU and torch.cuda.get_device_capability() >= (8, 9):
        for name, options in {"one scale": dict(scale=torch.tensor(0.01, device=DEVICE)), "1 x 128 blocks": {},
                              "128 x 128 tiles": dict(tiles=True)}.items():
            same[f"FP8, {name}"] = partial(quantised, **options), [(128, H + -H % 128)]
    copies = ep.sort_copies(torch.arange(2 * T, device=DEVICE).view(T, 2) % 3, 3, 2 * T)
    route = SimpleNamespace(to_experts=copies, to_ranks=None)
    same["sum of experts' copies"] = lambda x: ep.Combine.apply(x * 1, route), [(2 * T, H)]
    out = {name: (function, function, shapes) for name, (function, shapes) in same.items()}

    def expert_gradients(add: Callable, dy: Tensor, x: Tensor) -> Tensor:
        dw = torch.zeros(3, dy.shape[1], x.shape[1], dtype=acc_dtype(x.dtype), device=DEVICE)
        add(dw, dy.detach(), x.detach(), torch.tensor([T // 3, T // 3, T], dtype=torch.int32, device=DEVICE))
        return dw

    out["experts' weight gradients"] = *(partial(expert_gradients, add) for add in (
        kernels.add_expert_gradients, kernels.add_expert_gradients_reference)), [(T, 2 * width), (T, width)]
    out["cross-entropy"] = (
        lambda x, w: kernels.linear_cross_entropy(x / width ** 0.5, w, labels, z_loss=0.01, chunk=T // 2 + 1),
        lambda x, w: cross_entropy(x / width ** 0.5 @ w.t(), labels, z_loss=0.01), [(T, width), (V, width)])
    for name, mask in dict(causal=Mask(), window=Mask(window=T // 3), documents=Mask(documents=documents)).items():
        out[f"attention, {name}"] = (partial(flash.flash_attention, mask=mask), partial(
            attention_sdpa, mask=mask), [(1, N, T, D), (1, K, T, D), (1, K, T, D)])
    return out


def compute(function: Callable, inputs: list[Tensor], uses_kernels: bool) -> list[tuple[Tensor, ...] | str]:
    """Return [results, gradients if there are any].

    If a kernel fails, the list ends with the reason instead.
    """
    leaves, found = [x.detach().clone().requires_grad_() for x in inputs], []
    for x in leaves:
        x.sink = None  # see gradients.main_grad
    try:
        with patch.object(operations, "uses_kernels", lambda x: uses_kernels):
            results = function(*leaves)
            results = results if isinstance(results, tuple) else (results,)
            found.append(tuple(x.detach() for x in results))
            if results[0].requires_grad:
                torch.manual_seed(1)
                grads = [torch.randn(x.shape).to(DEVICE, DTYPE) if x.ndim else torch.ones_like(x) for x in results]
                torch.autograd.backward(results, [grad.to(x.dtype) for grad, x in zip(grads, results)])
                found.append(tuple(x.grad for x in leaves))
    except Exception as error:
        if not uses_kernels:
            raise
        traceback.print_exc()
        found.append(first_line(error))
    return found


def check(name: str, preset: str) -> list[tuple[str, ...]]:
    """Check one case and return its lines of the table."""
    def launch(kernel: triton.JITFunction, grid: tuple[int, ...], *args, **options) -> None:
        kernel[grid](*args, **options)  # kernels.launch would fall back to torch if the kernel does not run
    ours, torchs, shapes = cases(rules.parse(["--preset", preset]).model)[name]
    torch.manual_seed(0)
    inputs, rows = [torch.randn(shape).to(DEVICE, DTYPE) for shape in shapes], []
    with (patch.object(kernels, "launch", launch), patch.object(flash, "launch", launch),
          patch.object(fp8_kernels, "launch", launch)):
        found = compute(ours, inputs, True)
    others, exact = compute(torchs, inputs, False), compute(torchs, [x.double() for x in inputs], False)
    for step, result, other, right in zip(("", " backward"), found, others, exact):
        error, verdict, allowed = "", "ok", relative_error(other, right)
        if isinstance(result, str):
            verdict = f"does not run: {result}"
        elif not (error := relative_error(result, right)) <= 2 * allowed + 1e-6:
            verdict = "differs"
        rows.append((name + step, " ".join("x".join(map(str, shape)) for shape in shapes),
                     error and f"{error:.1e}", f"{allowed:.1e}", verdict))
    return rows


def main(arguments: list[str]) -> None:
    flags, rest = config.read_known(Flags, arguments, USAGE)
    config.need(not rest, f"{' '.join(rest)}: unknown, usage: {USAGE}")
    preset, worker = flags.preset or ("llama-3.1-8b" if ON_GPU else "tiny"), Worker()
    rows = [("kernel", "shapes", "its error", "torch's", "verdict")]
    for name in cases(rules.parse(["--preset", preset]).model):  # on a GPU by another process: a failure may end it
        with told_if_slow(f"checking {name}", "bench.check"):
            found = worker.measure(Row(name, partial(check, name, preset)), 60) if ON_GPU else check(name, preset)
        rows += [(name, "", "", "", f"does not run: {found}")] if isinstance(found, str) else found
    where = torch.cuda.get_device_name() if ON_GPU else "CPU, interpreted"
    print(f"{preset}, {DTYPE}, {where}, torch {torch.__version__}, triton {triton.__version__}\n{table(rows, '<<>><')}")
    sys.exit(any(row[-1] != "ok" for row in rows[1:]))
