"""A model that computes with kernels, as on GPUs but interpreted, has the loss and gradients of one without."""
import importlib
import inspect
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import grids
import pytest
import torch
from program import ROOT

import cp
import ep
import flash
import operations
import tp
import train
from core import config, rules
from core.param import parameter
from cp import choose_attention
from operations import Mask
from run.device import check_device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels need tensors on the GPU")
MODEL = (f"{grids.TINY} --head-dim 16 --vocab 61 --seq-len 12 --global-batch 2 --dtype fp32 --z-loss 0.01 "
         f"--data {__file__}")


def gradients(flags: str) -> list[torch.Tensor]:
    """The loss, and the gradient of every parameter."""
    groups, llama, pipeline, optimizer, share = grids.ready(flags, base=MODEL)
    for bucket in optimizer.buckets:  # larger weights, so that outputs are of order one
        for param in bucket.params:
            if param.ndim > 1:
                param.data.mul_(8)
    share[0].labels[:, 4:] = share[0].tokens[:, 4:]  # most tokens have a label
    loss = train.forward_backward(llama, pipeline, optimizer, share, groups)
    return [loss, *(bucket.view(bucket.grad, param) for bucket in optimizer.buckets for param in bucket.params)]


def choose_as_on_a_gpu(kernel: str, mask, head_dim: int, like: torch.Tensor, dtype: torch.dtype):
    return choose_attention(kernel, mask, head_dim, SimpleNamespace(is_cuda=True, dtype=torch.long), dtype)


@pytest.mark.parametrize("attention, flags", [
    ("auto", "--mask-documents"), ("auto", "--window 5 --full-attention-every 2 --mask-documents"),
    ("triton", "--qk-norm --qkv-bias --tied --recompute full"),
    ("triton", "--experts 4 --expert-ffn 24 --shared-experts 1 --recompute selective")])
def test_a_model_with_kernels_equals_one_without(monkeypatch, attention, flags):
    """With --attention auto, documents and windows also choose flash.py."""
    want, used, attended = gradients(f"--attention math {flags}"), [], []
    flash_attention = flash.flash_attention
    monkeypatch.setattr(flash, "flash_attention", lambda *a, **k: attended.append(a) or flash_attention(*a, **k))
    for module in (operations, tp):
        monkeypatch.setattr(module, "uses_kernels", lambda x: used.append(x) or True)
    if attention == "auto":
        monkeypatch.setattr(cp, "choose_attention", choose_as_on_a_gpu)
    got = gradients(f"--attention {attention} {flags}")
    assert len(used) > 10 and attended
    for ours, plain in zip(got, want):
        assert (ours - plain).abs().max() < 1e-4 * plain.abs().max()
    assert max(grad.abs().max() for grad in want) > 0.01


@pytest.mark.parametrize("interpreted, flags, says", [
    ("0", "", "^--attention triton needs a GPU, or TRITON_INTERPRET=1"),
    ("1", "--dtype bf16", "^--attention triton with --dtype bf16: Triton's interpreter computes it wrongly, use fp32")])
def test_on_a_cpu_triton_is_interpreted_and_not_asked_for_what_it_gets_wrong(monkeypatch, interpreted, flags, says):
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    with pytest.raises(ValueError, match=says):
        check_device(rules.parse(f"--attention triton {flags}".split()), torch.device("cpu"))


def test_gradients_of_gates_are_summed_and_kept_in_fp32():
    """Of 512 products each; in bf16 the sum would be off by up to 2^-9."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.rand(8, width, generator=generator).bfloat16() for width in (1024, 512))
    gates = torch.rand(8, generator=generator).requires_grad_()
    operations.swiglu(x.requires_grad_(), gates).backward(dy)
    products = operations.swiglu(x.detach()).mul(dy).double()  # a gate multiplies the result without gates
    assert gates.grad.double() == pytest.approx(products.sum(-1), rel=1e-5)


def bf16(seed: int, heads: int, *shape: int) -> torch.Tensor:
    return torch.randn(2, heads, *shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=False), Mask(window=9)])
def test_written_out_attention_in_bf16_computes_in_fp32(mask):
    """Scores of up to 30 and more: in bf16 they would be off by a tenth. Blocks, result and gradients, are rounded
    once, also where query heads share a key head. attention_math rounds its probabilities, too, so it gets 1%."""
    q, k, v, do = 4 * bf16(0, 4, 33, 16), 3 * bf16(1, 2, 33, 16), bf16(2, 2, 33, 16), bf16(3, 4, 33, 16)
    exact_o, exact_lse = operations.math_forward(q.double(), k.double(), v.double(), mask)
    o, lse = operations.math_forward(q, k, v, mask)
    assert lse.dtype == torch.float32 and (lse - exact_lse).abs().max() < 1e-4
    exact = operations.math_backward(do.double(), q.double(), k.double(), v.double(), o.double(), exact_lse, mask)
    found = operations.math_backward(do, q, k, v, o, lse, mask)
    for got, want in zip((o, *found), (exact_o, *exact)):
        assert got.dtype == torch.bfloat16
        assert ((got - want).abs() <= want.abs() * 2 ** -8 + want.abs().max() * 1e-5).all()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    whole = operations.attention_math(*leaves, mask)
    for got, want in zip((whole, *torch.autograd.grad(whole, leaves, do)), (exact_o, *exact)):
        assert (got - want).abs().max() < 0.01 * want.abs().max()


def test_norms_rotations_and_losses_in_bf16_are_rounded_once():
    """Results and gradients. A norm's weight has its gradient in fp32."""
    def check(got: torch.Tensor, want: torch.Tensor) -> None:
        assert got.dtype == torch.bfloat16
        assert ((got - want).abs() <= want.abs() * 2 ** -8 + want.abs().max() * 1e-6).all()

    def derive(results, inputs: list[torch.Tensor], up: list[torch.Tensor]) -> list[torch.Tensor]:
        return [*results, *torch.autograd.grad(results, inputs, [grad.to(results[0].dtype) for grad in up])]

    x, weight, total = bf16(0, 40, 96).requires_grad_(), torch.nn.Parameter(1 + bf16(1, 1, 96)[0, 0]), torch.zeros(96)
    weight.sink = SimpleNamespace(main_grad=lambda weight: total)
    got = derive(operations.RMSNormFunction.apply(x, None, weight, 1e-5)[1:], [x], [bf16(2, 40, 96)])
    leaves = [x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    *want, dw = derive([torch.nn.functional.rms_norm(leaves[0], (96,), leaves[1], 1e-5)], leaves, [bf16(2, 40, 96)])
    for ours, exact in zip(got, want, strict=True):
        check(ours, exact)
    assert (total - dw).abs().max() < 1e-6 * dw.abs().max()

    angles = operations.rotary_angles(torch.arange(40), config.Model(head_dim=24), torch.bfloat16)
    x, heads = bf16(3, 40, 4, 24).requires_grad_(), [2, 1, 1]
    ups = [bf16(4 + i, 40, count, 24) for i, count in enumerate(heads)]
    got = derive(operations.rotate_and_split(x * 1, angles, heads), [x], ups)
    exact = x.detach().double().requires_grad_()
    want = derive(operations.rotate_and_split(exact * 1, [part.double() for part in angles], heads), [exact], ups)
    for ours, exact in zip(got, want, strict=True):
        check(ours, exact)

    logits, labels = (4 * bf16(7, 40, 61)).requires_grad_(), torch.arange(80).view(2, 40) % 61
    labels[0] = logits[0].argmax(-1)  # whose gradient is the small difference of a probability and 1
    loss = tp.cross_entropy(logits, labels)
    exact = logits.detach().double().requires_grad_()
    want = torch.nn.functional.cross_entropy(exact.flatten(0, 1), labels.flatten(), reduction="sum")
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)
    check(*(torch.autograd.grad(3 * result, of)[0] for result, of in ((loss, logits), (want, exact))))


# ---- functions with several results ---------------------------------------------------------------------------------

def norm_of_a_sum() -> tuple:
    norm = operations.RMSNorm(partial(parameter, groups={}, dtype=torch.float64), "norm", 6, 1e-5, {})
    norm.weight.data = torch.rand(6).double()
    return norm.branch, torch.randn(2, 4, 6).double().unbind(), [norm.weight]


def rotated_heads() -> tuple:
    angles = operations.rotary_angles(torch.arange(5), config.Model(head_dim=6), torch.float64)
    return lambda x: operations.rotate_and_split(x * 1, angles, [2, 1, 1]), [torch.randn(2, 5, 4, 6).double()], []


def dispatched_tokens() -> tuple:
    """If there are several ranks, tokens and gates pass through StartExchange and FinishExchange."""
    chosen = torch.rand(6, 4).topk(2).indices
    route = ep.make_route(chosen, torch.bincount(chosen.flatten(), minlength=4), grids.everyone())
    return lambda x, gates: route.dispatch(x, gates).wait(), [torch.randn(6, width).double() for width in (3, 2)], []


SEVERAL_RESULTS = {  # function -> what makes (what calls it, its inputs, weights with gradients that bypass autograd)
    operations.RMSNormFunction: norm_of_a_sum, operations.RotateFunction: rotated_heads,
    ep.StartExchange: dispatched_tokens, ep.FinishExchange: dispatched_tokens}


def test_functions_with_several_results_are_known():
    """Those of the files of the root, also a new one, whose backward takes several gradients."""
    for path in ROOT.glob("*.py"):
        if path.stem not in ("kernels", "flash", "fp8_kernels") or find_spec("triton"):
            importlib.import_module(path.stem)
    found, several = [torch.autograd.Function], set()
    for function in found:  # which grows
        found += function.__subclasses__()
        first, *others = [*inspect.signature(function.backward).parameters.values()][1:]
        is_of_root = (ROOT / f"{function.__module__}.py").exists()
        if is_of_root and (others or first.kind == first.VAR_POSITIONAL):
            several.add(function)
    assert len(found) > 20 and several == SEVERAL_RESULTS.keys()


def gradients_by(function: type, used: int, alone: bool) -> list[torch.Tensor]:
    """All gradients if that of a result is 1, and those of the others are 0 or, if alone, missing."""
    torch.manual_seed(0)
    run, inputs, weights = SEVERAL_RESULTS[function]()
    results = run(*(x.requires_grad_() for x in inputs))
    ups = [torch.full_like(y, float(i == used)) for i, y in enumerate(results)]
    torch.autograd.backward(*([results[used]], [ups[used]]) if alone else (results, ups))
    # An input from which no used result is computed has no gradient.
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in (*inputs, *weights)]


def results_used_alone() -> list[tuple]:
    """(function, result, whether its gradients are the same without those of other results, their sum)"""
    found = []
    for function, make in SEVERAL_RESULTS.items():
        run, inputs, _ = make()
        for used in range(len(run(*inputs))):
            alone, want = (gradients_by(function, used, alone) for alone in (True, False))
            same = all(map(torch.equal, alone, want))
            found.append((function.__name__, used, same, sum(grad.abs().sum().item() for grad in want)))
    return found


@pytest.mark.parametrize("n", [1, 2])
def test_each_of_several_results_may_be_the_only_one_that_is_used(pool, n):
    for found in pool.run(n, results_used_alone):
        assert len(found) == 2 + 3 + 2 + 2
        for name, used, same, size in found:
            assert same and size > 0, f"{name}, result {used}"
