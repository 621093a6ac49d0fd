"""Check what the code assumes about GPUs: `python -m bench.probe_gpu`, ten seconds.

Each question has a line with the answer and the expected answer. Errors are relative to fp64: |x -
exact| / |exact|. If a question fails, its line shows the error, and the others go on. On a CPU the
same questions run in seconds, except for rates.
"""
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

import ep
import fp8
import operations
import sdpa
from bench.rows import first_line, measure_seconds, relative_error
from core import config
from core.config import FP8_RECIPES
from core.gradients import accumulate_product
from core.param import Spec, parameter
from run import cli

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Question = tuple[str, Callable[[], Any], str]  # the question, a function that answers it, the expected answer
FP8_EXPECTED = {"tensorwise": "3.7e-02 5.9e-02 5.9e-02, as dY has one bit less",
                "blockwise": "3.7e-02 each, of one row's dW 0"}


def normal(*shape: int, std: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * std).bfloat16()


def in_e_notation(errors: list[float]) -> str:
    return " ".join(f"{error:.1e}" for error in errors)


# ---- linear layers --------------------------------------------------------------------------------------------------

def fp8_weight(*shape: int) -> torch.nn.Parameter:
    weight = parameter(Spec("w", shape), {}, torch.bfloat16, DEVICE)
    weight.data = normal(*shape)
    return weight


def fp8_errors(recipe: str, rows: int, K: int = 512, N: int = 256) -> str:
    """Return the errors of Y, dX and dW of a linear layer whose input has `rows` rows."""
    mm, x, dy, weight = fp8.Fp8(FP8_RECIPES[recipe], torch.bfloat16), normal(rows, K), normal(rows, N), fp8_weight(N, K)
    y, copies, dw = mm.forward(x, (weight,)), mm.prepare_grad(dy), torch.zeros(N, K, device=DEVICE)
    dx = mm.dgrad(copies, (weight,))
    mm.wgrad(dw, copies, x)
    x64, dy64, w64 = x.double(), dy.double(), weight.detach().double()
    exact = x64 @ w64.t(), dy64 @ w64, dy64.t() @ x64
    return in_e_notation([relative_error(*pair) for pair in zip((y, dx, dw), exact)])


def fp8_expert_errors(recipe: str, rows: list[int], K: int = 512, N: int = 256) -> str:
    """Return the same errors of experts. rows: the number of rows of each expert."""
    mm, route = fp8.Fp8Experts(FP8_RECIPES[recipe], torch.bfloat16), SimpleNamespace(rows_per_expert=rows)
    x, dy, weight = normal(sum(rows), K), normal(sum(rows), N), fp8_weight(len(rows), N, K)
    y, (for_dgrad, for_wgrad) = mm.forward(x, weight, route), mm.prepare_grad(dy, route)
    dx, dw = mm.dgrad(for_dgrad, weight, route), torch.zeros(weight.shape, device=DEVICE)
    mm.wgrad(dw, for_wgrad, x, route)
    xs, dys, matrices = x.double().split(rows), dy.double().split(rows), weight.detach().double()
    exact = (torch.cat([x @ w.t() for x, w in zip(xs, matrices)]), torch.cat([dy @ w for dy, w in zip(dys, matrices)]),
             torch.stack([dy.t() @ x for x, dy in zip(xs, dys)]))
    return in_e_notation([relative_error(*pair) for pair in zip((y, dx, dw), exact)])


def grouped_mm_error(rows: list[int], K: int = 512, N: int = 256) -> float | tuple[int, ...]:
    """Return the error of grouped_mm, or the shape of its result if there are no rows."""
    x, matrices = normal(sum(rows), K), normal(len(rows), N, K)
    ends = torch.tensor(rows, device=DEVICE).cumsum(0).int()
    y = F.grouped_mm(x, matrices.transpose(1, 2), offs=ends)
    exact = [part.double() @ matrix.double().t() for part, matrix in zip(x.split(rows), matrices)]
    return relative_error(y, torch.cat(exact)) if len(x) else tuple(y.shape)


def addmm_error(T: int = 2048, N: int = 1024, K: int = 1536) -> float:
    """Return the error of dW in fp32 after a product of bf16 matrices has been added to it."""
    dy, x, out = normal(T, N), normal(T, K), torch.randn(N, K, device=DEVICE)
    exact = out.double() + dy.double().t() @ x.double()
    accumulate_product(out, dy.t(), x)
    return relative_error(out, exact)


def linear_layers() -> Iterator[Question]:
    for recipe, expected in FP8_EXPECTED.items():
        for rows in 300, 301, 302, 1:
            yield f"FP8 {recipe}, {rows} rows, Y dX dW", partial(fp8_errors, recipe, rows), expected
        rows = [300, 301, 302, 1, 0]
        yield f"FP8 {recipe}, experts of {rows} rows", partial(fp8_expert_errors, recipe, rows), expected
    yield "grouped_mm", partial(grouped_mm_error, [100, 0, 37, 119]), "1e-03 to 3e-03"
    yield "grouped_mm, no rows", partial(grouped_mm_error, [0, 0, 0, 0]), "(0, 256)"
    yield "dW added to fp32 by addmm", addmm_error, "below 1e-05: the product is not rounded"


def is_quotient(divide: Callable[[Tensor], Tensor]) -> bool:
    """Return whether 4.5 / 448 has the same bits on this device as on a CPU."""
    amax = torch.tensor(4.5)
    return divide(amax.to(DEVICE)).item() == (amax / torch.tensor(448.0)).item()


def divisions() -> Iterator[Question]:
    yield "amax / 448 has the bits of a CPU", partial(is_quotient, lambda amax: amax / 448.0), (
        "False on a GPU, which multiplies with the reciprocal of a host's number")
    yield "an FP8 scale has the bits of a CPU", partial(
        is_quotient, lambda amax: fp8.scale_of(amax, fp8.E4M3)), "True: it is divided by a tensor on the device"


# ---- attention ------------------------------------------------------------------------------------------------------

def sdpa_choice(N: int, K: int, D: int, has_mask: bool = False, S: int = 4096) -> str:
    """Return torch's choice of kernel for training, with heads that are slices of the output of a
    fused projection."""
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in normal(2, S, N + 2 * K, D).split([N, K, K], 2))
    mask = None
    if has_mask:
        mask = torch.ones(S, S, dtype=torch.bool, device=DEVICE).tril()
        k, v = operations.repeat_kv_heads(q, k, v)
    sdpa.choose_sdpa_kernels(sdpa.fits_cudnn(q, v) and not has_mask)
    choice = torch._fused_sdp_choice(q, k, v, mask, 0.0, not has_mask, enable_gqa=q.shape[1] > k.shape[1])
    return SDPBackend(choice).name


def attention_errors(D: int, window: int = 0, S: int = 512) -> str:
    """Return the errors of dq, dk and dv."""
    mask = operations.Mask(window=window)
    q, k, v = (normal(1, 4, S, D).requires_grad_() for _ in range(3))
    exact, do = [x.detach().double().requires_grad_() for x in (q, k, v)], normal(1, 4, S, D)
    right = torch.autograd.grad(operations.attention_math(*exact, mask), exact, do.double())
    found = torch.autograd.grad(sdpa.attention_sdpa(q, k, v, mask), (q, k, v), do)
    return in_e_notation([relative_error(*pair) for pair in zip(found, right)])


def latent_attention(S: int = 512) -> str:
    """Return the kernel that torch chooses, and the errors of o, dq, dk and dv."""
    q, k, v, do = (normal(1, 16, S, D).requires_grad_() for D in (192, 192, 128, 128))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    sdpa.choose_sdpa_kernels(sdpa.fits_cudnn(q, v))
    choice = SDPBackend(torch._fused_sdp_choice(q, k, v, None, 0.0, True)).name
    o, right = sdpa.attention_sdpa(q, k, v, operations.CAUSAL), operations.attention_math(*exact, operations.CAUSAL)
    found, wanted = torch.autograd.grad(o, (q, k, v), do), torch.autograd.grad(right, exact, do.double())
    return f"{choice} {in_e_notation([relative_error(*pair) for pair in zip((o, *found), (right, *wanted))])}"


def attention() -> Iterator[Question]:
    for N, K, D in (32, 8, 128), (32, 8, 64), (24, 8, 128):
        yield f"SDPA, {N} and {K} heads of {D}", partial(sdpa_choice, N, K, D), (
            "CUDNN_ATTENTION; if FLASH_ATTENTION: why was cuDNN refused?")
    for D in 192, 256:
        yield f"SDPA, 16 heads of {D}", partial(sdpa_choice, 16, 16, D), (
            "FLASH_ATTENTION, as torch may refuse cuDNN's backward")
    yield "SDPA with a mask, 32 and 8 heads of 128", partial(sdpa_choice, 32, 8, 128, has_mask=True), (
        "EFFICIENT_ATTENTION: cuDNN's backward may give NaN (pytorch#196678)")
    for D in 64, 128, 192, 256:
        yield f"attention's backward, heads of {D}", partial(attention_errors, D), "2e-03 to 6e-03"
    yield "latent attention, values of 128 not padded to 192", latent_attention, (
        "CUDNN_ATTENTION 2e-03 to 6e-03 on Hopper. If another: why does sdpa.py pad values?")
    yield "attention's backward, a window in 448 tokens", partial(attention_errors, 128, 100, 448), "2e-03 to 6e-03"


# ---- experts' tokens ------------------------------------------------------------------------------------------------

def rates_of_copies(T: int = 8192, k: int = 8, H: int = 2048) -> str:
    """Return the bytes per second of ep.Copies: gathering k copies of each of T tokens, and summing
    them."""
    copies = ep.sort_copies(torch.rand(T, 64, device=DEVICE).topk(k).indices, 64, T * k)
    x, rows, nbytes = normal(T, H), normal(T * k, H), 2 * (T + T * k) * H
    gather, summed = measure_seconds(copies.permute, x), measure_seconds(copies.unpermute, rows)
    return f"gather {nbytes / gather / 1e12:.2f} TB/s, sum {nbytes / summed / 1e12:.2f} TB/s"


def experts() -> Iterator[Question]:
    yield "copies of tokens for experts", rates_of_copies, (
        "3 TB/s or more; if the sum is below 1.5, embedding_bag has run in place of the kernel")


def ask(question: Question) -> str:
    what, find_out, expected = question
    try:
        found = find_out()
    except Exception as error:
        found = first_line(error)[:200]
    found = f"{found:.1e}" if isinstance(found, float) else found
    return f"{what}: {found}   (expected: {expected})"


def main() -> None:
    torch.manual_seed(0)
    for questions in linear_layers, divisions, attention, *([experts] if DEVICE == "cuda" else []):
        for question in questions():
            print(ask(question), flush=True)


if __name__ == "__main__":
    try:
        config.make_parser({}, __doc__, "python -m bench.probe_gpu").parse_args()  # there is no flag except --help
    except ValueError as error:
        cli.refuse(error, "bench.probe_gpu")
    main()
