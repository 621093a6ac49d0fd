"""Kernels against their references in fp64: on CPUs in Triton's interpreter, on a GPU compiled. And, wherever there is
ptxas, compiled for an H100 or H200: do they use its matmul instruction, and do their registers suffice?"""
import json
import math
import os
import subprocess
import sys

import pytest
import torch

import cp
import kernels
import operations
from kernels import Tiling, flash_attention, flash_backward, flash_forward
from param import IGNORED
from tp import cross_entropy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # the interpreter at log2(0) = -inf


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def leaves(*tensors: torch.Tensor, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    out = [x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in tensors]
    for x in out:
        x.sink = None  # as a parameter of the model, whose gradient autograd collects
    return out


def close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    """Within some roundings of fp32: 1e-5 of the value; or, where terms cancel, 2^-20 of the largest, at least of 1."""
    assert ours.dtype == torch.float32 and ours.shape == exact.shape
    largest = max([1.0, *exact[exact.isfinite()].abs().tolist()])
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=largest * 2 ** -20)


def compare(ours, exact, inputs: list[torch.Tensor]) -> None:
    """Results and gradients of functions of tensors, for the same derivative of every result."""
    single, double = leaves(*inputs), leaves(*inputs, dtype=torch.float64)
    results, wanted = ours(*single), exact(*double)
    results, wanted = (x if isinstance(x, tuple) else (x,) for x in (results, wanted))
    derivatives = [numbers(*x.shape, seed=7) for x in results]
    torch.autograd.backward(results, derivatives)
    torch.autograd.backward(wanted, [x.double() for x in derivatives])
    for one, other in zip((*results, *(x.grad for x in single)), (*wanted, *(x.grad for x in double))):
        close(one, other)


# ---- attention ------------------------------------------------------------------------------------------------------

@pytest.fixture(params=["16x32", "32x16"])
def tiles(request, monkeypatch):
    monkeypatch.setattr(kernels, "FP32_TILING", Tiling(*map(int, request.param.split("x")), 4, 1))


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(kernels, "FP32_TILING", Tiling(16, 16, 4, 1))


def heads(rows: int, columns: int, N: int = 2, K: int = 1, D: int = 16, B: int = 2) -> list[torch.Tensor]:
    return [numbers(B, N, rows, D), numbers(B, K, columns, D, seed=1), numbers(B, K, columns, D, seed=2)]


def documents_of(kind: str, rows: int, columns: int, B: int = 2) -> tuple[torch.Tensor, torch.Tensor] | None:
    generator = torch.Generator().manual_seed(3)
    both = [torch.randint(0, 4, (B, n), generator=generator) for n in (rows, columns)]
    if kind == "packed":  # each in one piece, some missing here or there; the last tokens are of the same one
        both = [x.sort().values for x in both]
    if kind == "alone":
        both = [torch.arange(n).flip(0).expand(B, n) for n in (rows, columns)]
    if kind == "none meet":
        both = [both[0], both[1] + 4]
    return None if kind == "one" else tuple(x.to(DEVICE) for x in both)


def attention_agrees(inputs, causal, documents):
    compare(lambda q, k, v: flash_forward(q, k, v, causal, documents)[0],
            lambda q, k, v: kernels.attention_reference(q, k, v, causal, documents)[0], inputs)
    lse = flash_forward(*inputs, causal, documents)[1]
    close(lse, kernels.attention_reference(*(x.double() for x in inputs), causal, documents)[1])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows, columns", [(33, 33), (17, 40), (40, 17), (1, 1)])
def test_attention_of_any_length(tiles, rows, columns, causal):
    attention_agrees(heads(rows, columns, B=1), causal, None)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["packed", "in any order", "alone", "none meet"])
def test_attention_of_documents(small_tiles, kind, causal):
    attention_agrees(heads(37, 37, N=1), causal, documents_of(kind, 37, 37))


@pytest.mark.parametrize("kind", ["packed", "in any order"])
def test_documents_of_queries_and_keys_may_differ(small_tiles, kind):
    attention_agrees(heads(21, 50), False, documents_of(kind, 21, 50))


@pytest.mark.parametrize("N, K", [(6, 6), (6, 2), (6, 1)])
def test_heads_share_keys(N, K):
    attention_agrees(heads(24, 24, N, K), True, None)


@pytest.mark.parametrize("D", [2, 10, 64, 96, 128])
def test_attention_of_any_width(D):
    attention_agrees(heads(40, 40, D=D, B=1), True, None)


@pytest.mark.parametrize("B, rows, columns", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
def test_attention_of_nothing(B, rows, columns):
    q, k, v = leaves(*heads(rows, columns, B=B))
    o, lse = flash_forward(q, k, v, False)
    assert not o.any() and lse.isneginf().all()
    o.sum().backward()
    assert not any(x.grad.any() for x in (q, k, v))


def test_large_scores_do_not_overflow(small_tiles):
    """Scores of some thousands, whose roundings exponentials carry over to probabilities."""
    q, k, v = heads(37, 37)
    q, k = q * 30, k * 30
    o, lse = flash_forward(q, k, v)
    exact, exact_lse = kernels.attention_reference(*(x.double() for x in (q, k, v)))
    rounding = (q @ k.transpose(2, 3)).abs().max().item() * 16 ** -0.5 * 2 ** -22
    torch.testing.assert_close(o.double(), exact, rtol=0, atol=rounding)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=rounding)
    assert all(x.isfinite().all() for x in flash_backward(numbers(*o.shape), q, k, v, o, lse))


def test_strides_do_not_matter(small_tiles):
    """Heads cut out of one matmul's result; a derivative that is one number seen everywhere."""
    qkv, = leaves(numbers(2, 37, 6, 16))
    q, k, v = (x.transpose(1, 2) for x in qkv.split([4, 1, 1], 2))
    o = flash_attention(q, k, v)
    assert o.transpose(1, 2).is_contiguous()
    o.sum().backward()
    exact, = leaves(qkv, dtype=torch.float64)
    q, k, v = (x.transpose(1, 2) for x in exact.split([4, 1, 1], 2))
    kernels.attention_reference(q, k, v)[0].sum().backward()
    close(qkv.grad, exact.grad)


def test_the_same_bits_every_time(small_tiles):
    q, k, v = heads(40, 40, 4, 2, B=1)
    o, lse = flash_forward(q, k, v)
    first, second = (flash_backward(numbers(*o.shape), q, k, v, o, lse) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_tiles_that_nobody_sees_are_not_loaded():
    """Documents of 5, 27, 1 and 47 tokens, tiles of 16 x 16: those that have a pair of the same document, no more."""
    documents = torch.arange(4, device=DEVICE).repeat_interleave(torch.tensor([5, 27, 1, 47], device=DEVICE))[None]
    for numbers_of in (documents, torch.zeros_like(documents)):
        pairs = (numbers_of.mT == numbers_of).tril()
        wanted = pairs.unflatten(0, (-1, 16)).unflatten(-1, (-1, 16)).any(-1).any(1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "FP32_TILING", Tiling(16, 16, 4, 1))
            assert kernels.tiles_loaded(numbers_of, 16, 16) == wanted.tolist()


def test_backward_loads_no_tile_that_nobody_sees(small_tiles):
    """A query's nan reaches the gradients of keys in tiles with its own, and of none after it or of other documents."""
    documents = torch.arange(2, device=DEVICE).repeat_interleave(32)[None]
    q, k, v = heads(64, 64, 1, 1, B=1)
    o, lse = flash_forward(q, k, v, True, (documents, documents))
    do = torch.zeros_like(o)
    do[:, :, 20] = torch.nan
    dq, dk, dv = flash_backward(do, q, k, v, o, lse, True, (documents, documents))
    assert dv.isnan().any(-1).flatten().tolist() == [True] * 32 + [False] * 32
    assert dk.isnan().any(-1).flatten().tolist() == [True] * 32 + [False] * 32
    assert dq.isnan().any(-1).flatten().tolist() == [row == 20 for row in range(64)]


@pytest.mark.parametrize("style", ["ring", "allgather"])
def test_attention_in_pieces(small_tiles, style):
    """As a block of context parallelism, with nothing else told: rows of all ranks, merged by logsumexp."""
    block, c, S, (q, k, v) = cp.Block(flash_forward, flash_backward), 2, 36, heads(36, 36, B=1)
    do, (dq, dk, dv), o = numbers(*q.shape, seed=9), (torch.zeros_like(x) for x in (q, k, v)), torch.empty_like(q)
    for i in range(c):
        own, pieces = cp.places(S, c, i), cp.pieces_of(style, S, c, i, None, q.dtype)
        keys = [cp.places(S, c, (i - t) % c) if style == "ring" else cp.gathered_order(S, c)
                for t in range(len(pieces))]
        here, (part, lse) = q[:, :, own], cp.results_for(q[:, :, own])
        for piece, where in zip(pieces, keys):
            cp.add_piece(part, lse, here, k[:, :, where], v[:, :, where], piece, block)
        o[:, :, own], share = part, torch.zeros_like(here)
        for piece, where in zip(pieces, keys):
            dkv = torch.zeros(2, *k[:, :, where].shape, device=DEVICE)
            cp.add_gradients(share, dkv, do[:, :, own], here, k[:, :, where], v[:, :, where], part, lse, piece, block)
            dk[:, :, where] += dkv[0]
            dv[:, :, where] += dkv[1]
        dq[:, :, own] = share
    exact = leaves(q, k, v, dtype=torch.float64)
    wanted = kernels.attention_reference(*exact)[0]
    wanted.backward(do.double())
    for ours, other in zip((o, dq, dk, dv), (wanted.detach(), *(x.grad for x in exact))):
        close(ours, other)


# ---- norms, rotary embedding, SwiGLU --------------------------------------------------------------------------------

@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 16), (1, 1), (20, 1000)])
def test_rms_norm(shape, monkeypatch):
    monkeypatch.setattr(kernels, "PROGRAMS", 3)  # fewer than rows, and no divisor
    x, weight, residual = numbers(*shape), numbers(shape[-1], seed=1), numbers(*shape, seed=2)
    compare(lambda x, weight: kernels.rms_norm(x, weight, 1e-5),
            lambda x, weight: kernels.rms_norm_reference(x, weight, 1e-5), [x, weight])

    def exact(x, residual, weight):
        return x + residual, kernels.rms_norm_reference(x + residual, weight, 1e-5)
    compare(lambda x, residual, weight: kernels.add_rms_norm(x, residual, weight, 1e-5), exact, [x, residual, weight])


def test_the_reference_is_torchs_norm():
    x, weight = numbers(5, 16).double(), numbers(16).double()
    wanted = torch.nn.functional.rms_norm(x, (16,), weight, 1e-3)
    torch.testing.assert_close(kernels.rms_norm_reference(x, weight, 1e-3), wanted)


@pytest.mark.parametrize("rows_of", ["sequence", "batch"])
@pytest.mark.parametrize("D, turned, all_heads", [(16, 3, 5), (10, 1, 1), (2, 4, 4)])
def test_rope(monkeypatch, D, turned, all_heads, rows_of):
    monkeypatch.setattr(operations, "fused", lambda x: True)
    positions = torch.arange(6.0) if rows_of == "sequence" else torch.tensor([[0.0, 1, 2, 0, 1, 2], [5, 4, 3, 2, 1, 0]])
    angle = positions[..., None, None].double().to(DEVICE) * 10000 ** -torch.linspace(0, 1, D // 2, device=DEVICE)
    compare(lambda x: operations.Rotate.apply(x * 1, angle.cos().float(), angle.sin().float(), turned),
            lambda x: kernels.rope_reference(x, angle.float().cos().double(), angle.float().sin().double(), turned),
            [numbers(12, all_heads, D)])


def test_rope_is_in_place_and_turns_as_the_model_does():
    qkv = numbers(6, 5, 16)
    angle = torch.arange(6.0, device=DEVICE)[:, None, None] * torch.linspace(1, 0.1, 8, device=DEVICE)
    wanted = qkv.clone()
    operations.turn_(wanted, angle.cos(), angle.sin(), 4)
    kernels.rope_(qkv[:, :4], angle.cos(), angle.sin(), 4)  # rows of a wider tensor
    torch.testing.assert_close(qkv, wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(qkv[:, 4], wanted[:, 4])


@pytest.mark.parametrize("shape", [(7, 2), (2, 3, 10), (3, 50)])
def test_swiglu(shape, monkeypatch):
    monkeypatch.setattr(kernels, "SWIGLU_BLOCK", 16)
    compare(kernels.swiglu, kernels.swiglu_reference, [numbers(*shape) * 3])
    compare(operations.SwiGLU.apply, kernels.swiglu_reference, [numbers(*shape) * 3])


def test_nothing_goes_in_and_nothing_comes_out(monkeypatch):
    monkeypatch.setattr(operations, "fused", lambda x: True)
    x, weight = leaves(numbers(0, 16), numbers(16))
    total, y = kernels.add_rms_norm(x, x, weight, 1e-5)
    out = kernels.swiglu(kernels.rms_norm(y, weight, 1e-5) + total)
    operations.Rotate.apply(out.view(0, 2, 4) * 1, numbers(3, 1, 2), numbers(3, 1, 2), 1).sum().backward()
    assert x.grad.shape == (0, 16) and torch.equal(weight.grad, torch.zeros_like(weight))


# ---- cross-entropy --------------------------------------------------------------------------------------------------

def some_labels(T: int, V: int) -> torch.Tensor:
    labels = torch.randint(0, V, (T,), generator=torch.Generator().manual_seed(T)).to(DEVICE)
    labels[::4] = IGNORED
    return labels


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("weighted, z_loss", [(False, 0.0), (True, 0.1)])
def test_linear_cross_entropy(chunk, weighted, z_loss):
    """For a derivative that is not 1, of a sum in which tokens count differently."""
    x, weight, labels = numbers(11, 8), numbers(37, 8, seed=1), some_labels(11, 37)
    weights = numbers(11, seed=2).exp() if weighted else None
    compare(lambda x, weight: kernels.linear_cross_entropy(x, weight, labels, weights, z_loss, chunk=chunk),
            lambda x, weight: kernels.linear_cross_entropy_reference(x, weight, labels, weights, z_loss), [x, weight])


@pytest.mark.parametrize("V, scale", [(1, 1), (9000, 1), (37, 1000)])
def test_any_vocabulary_and_any_logits(V, scale):
    x, weight, labels = numbers(5, 4) * scale, numbers(V, 4, seed=1), some_labels(5, V)
    compare(lambda x, weight: kernels.linear_cross_entropy(x, weight, labels),
            lambda x, weight: kernels.linear_cross_entropy_reference(x, weight, labels), [x, weight])


def test_gradients_are_added_and_may_be_asked_for_twice():
    x, weight = leaves(numbers(6, 8), numbers(9, 8))
    loss = kernels.linear_cross_entropy(x, weight, some_labels(6, 9))
    loss.backward(retain_graph=True)
    once = x.grad.clone(), weight.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * once[0]) and torch.equal(weight.grad, 2 * once[1])


def test_gradients_that_nobody_wants_are_not_made(monkeypatch):
    wanted = []
    softmax_ = kernels.softmax_
    monkeypatch.setattr(kernels, "softmax_", lambda *a: (wanted.append(a[-1]), softmax_(*a)))
    x, weight = leaves(numbers(6, 8), numbers(9, 8))
    labels = some_labels(6, 9)
    with torch.no_grad():
        kernels.linear_cross_entropy(x, weight, labels)
    kernels.linear_cross_entropy(x.detach(), weight, labels).backward()
    assert wanted == [False, True] and x.grad is None and weight.grad is not None


def test_no_tokens_and_no_labels():
    for count in (0, 3):
        x, weight = leaves(numbers(count, 8), numbers(9, 8))
        loss = kernels.linear_cross_entropy(x, weight, torch.full((count,), IGNORED, device=DEVICE))
        loss.backward()
        assert loss == 0 and not x.grad.any() and not weight.grad.any()


def vocabulary_of_rank(bounds: list[int]) -> list[torch.Tensor]:
    """Loss and gradients of x and of this rank's rows, by `linear_cross_entropy` and by the model's cross_entropy."""
    group = torch.distributed.group.WORLD
    held = slice(bounds[group.rank()], bounds[group.rank() + 1])
    labels, weights, found = some_labels(11, bounds[-1]), numbers(11, seed=2).exp(), []
    for fused in (True, False):
        x, weight = leaves(numbers(11, 8), numbers(bounds[-1], 8, seed=1)[held])
        if fused:
            loss = kernels.linear_cross_entropy(x, weight, labels, weights, 0.1, held, group, chunk=4)
        else:
            loss = cross_entropy(x @ weight.t(), labels, weights, 0.1, held, group)
        (loss * 3).backward()
        found += [loss.detach().cpu(), x.grad.cpu(), weight.grad.cpu()]
    return found


def test_vocabulary_in_uneven_parts(pool):
    bounds = [0, 5, 20, 37]
    x, weight = leaves(numbers(11, 8), numbers(37, 8, seed=1), dtype=torch.float64)
    wanted = kernels.linear_cross_entropy_reference(x, weight, some_labels(11, 37), numbers(11, seed=2).exp(), 0.1)
    (3 * wanted).backward()
    ranks = pool.run(3, "test_kernels:vocabulary_of_rank", bounds=bounds)
    close(sum(found[1] for found in ranks), x.grad.cpu())
    close(torch.cat([found[2] for found in ranks]), weight.grad.cpu())
    for loss, dx, dw, plain_loss, plain_dx, plain_dw in ranks:
        close(loss, wanted.detach().cpu())
        for ours, models in ((loss, plain_loss), (dx, plain_dx), (dw, plain_dw)):
            torch.testing.assert_close(ours, models, rtol=1e-5, atol=2e-6)


# ---- as operators of torch ------------------------------------------------------------------------------------------

OPERATORS = ["flash_attention", "flash_attention with documents", "flash_attention_backward", "rms_norm",
             "add_rms_norm", "rms_norm_backward", "rope_", "rope_backward", "swiglu", "swiglu_backward", "softmax_"]


@pytest.mark.parametrize("name", OPERATORS)
def test_torch_accepts_the_operator(name):
    """Schema, derivative, fake tensors and tracing with sizes left open."""
    q, k, v = leaves(*heads(9, 9, B=1))
    documents = documents_of("packed", 9, 9, B=1)
    o, lse = (x.detach() for x in flash_forward(q, k, v))
    x, weight, angle = *leaves(numbers(3, 8), numbers(8)), numbers(3, 1, 4)
    statistics = [torch.ones(3, device=DEVICE) for _ in range(3)]
    inputs = {
        "flash_attention": (q, k, v, True, None, None),
        "flash_attention with documents": (q, k, v, False, *documents),
        "flash_attention_backward": (o, q.detach(), k.detach(), v.detach(), o, lse, True, None, None),
        "rms_norm": (x, weight, 1e-5), "add_rms_norm": (x, x.detach() + 1, weight, 1e-5),
        "rms_norm_backward": (x.detach(), x.detach(), x.detach(), weight.detach(), 1e-5),
        "rope_": (numbers(3, 2, 8), angle.cos(), angle.sin(), 1),
        "rope_backward": (numbers(3, 2, 8), angle.cos(), angle.sin(), 1),
        "swiglu": (x,), "swiglu_backward": (numbers(3, 4), x.detach()),
        "softmax_": (numbers(3, 8), some_labels(3, 8), *statistics, 0, 0.1, True, True),
    }
    torch.library.opcheck(getattr(torch.ops.penteract, name.split()[0]).default, inputs[name])


def test_a_compiler_sees_nodes():
    def layer(x, weight):
        q = kernels.rms_norm(x, weight, 1e-5).unflatten(-1, (2, 8)).transpose(1, 2)
        return kernels.swiglu(flash_attention(q, q, q).transpose(1, 2).flatten(2))
    inputs = [numbers(1, 9, 16), numbers(16)]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = []
    for function in (layer, compiled):
        x, weight = leaves(*inputs)
        y = function(x, weight)
        y.sum().backward()
        found.append((y, x.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found))


Q, KV, HEADS, ROW, ANGLES = (1, 2, 8, 16), (1, 1, 8, 16), (3, 2, 8), (3, 8), (3, 1, 4)
REFUSED = {  # what is launched -> what the error says
    "keys and values differ": (lambda n: flash_forward(n(*Q), n(*KV), n(1, 1, 9, 16)), "B K columns D"),
    "widths differ": (lambda n: flash_forward(n(*Q), n(1, 1, 8, 8), n(1, 1, 8, 8)), "must be B N rows D"),
    "no batch": (lambda n: flash_forward(*[n(2, 8, 16)] * 3), "must be B N rows D"),
    "heads": (lambda n: flash_forward(n(1, 3, 8, 16), *[n(1, 2, 8, 16)] * 2), "3 heads cannot share 2"),
    "too wide": (lambda n: flash_forward(*[n(1, 1, 8, 130)] * 3), "130 wide"),
    "two types": (lambda n: flash_forward(n(*Q), *[n(*KV).half()] * 2), "one type"),
    "fp64": (lambda n: flash_forward(*[n(*Q).double()] * 3), "float64 is not among"),
    "documents of other keys": (lambda n: flash_forward(n(*Q), *[n(*KV)] * 2, True, documents_of("packed", 8, 9, 1)),
                                r"\[1, 8\] integers"),
    "no integers": (lambda n: flash_attention(n(*Q), *[n(*KV)] * 2, True, n(1, 8)), "integers"),
    "other do": (lambda n: flash_backward(n(*KV), n(*Q), *[n(*KV)] * 2, n(*Q), n(1, 2, 8)), "as q"),
    "gain": (lambda n: kernels.rms_norm(n(*ROW), n(7), 1e-5), "as long as rows"),
    "residual": (lambda n: kernels.add_rms_norm(n(*ROW), n(2, 8), n(8), 1e-5), "shape"),
    "wide angles": (lambda n: kernels.rope_(n(*HEADS), n(3, 1, 8), n(3, 1, 8), 1), "must be T heads 16"),
    "too few angles": (lambda n: kernels.rope_(n(4, 2, 8), n(*ANGLES), n(*ANGLES), 1), "4 tokens"),
    "too few heads": (lambda n: kernels.rope_(n(*HEADS), n(*ANGLES), n(*ANGLES), 3), "3 heads"),
    "odd width": (lambda n: kernels.swiglu(n(3, 7)), "gate and up"),
    "other dy": (lambda n: kernels.swiglu_backward(n(3, 7), n(*ROW)), "half as wide"),
    "other head": (lambda n: kernels.linear_cross_entropy(n(*ROW), n(9, 7), some_labels(3, 9)), "T H, V H"),
    "labels": (lambda n: kernels.linear_cross_entropy(n(*ROW), n(9, 8), some_labels(4, 9)), "3 tokens"),
    "held": (lambda n: kernels.linear_cross_entropy(n(*ROW), n(9, 8), some_labels(3, 9), held=slice(3, 9)), "3..9"),
    "chunk": (lambda n: kernels.linear_cross_entropy(n(*ROW), n(9, 8), some_labels(3, 9), chunk=0), "chunk"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_launched_is_refused_in_a_line(name):
    launch, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as caught:
        launch(numbers)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(DEVICE == "cuda", reason="compiled, bf16 is right")
def test_the_interpreter_refuses_what_it_gets_wrong():
    with pytest.raises(ValueError, match="bfloat16 is not among"):
        kernels.swiglu(numbers(3, 8, dtype=torch.bfloat16))


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300,
                          env=compiling | environment)


def test_training_does_not_need_triton():
    result = run("import sys\nsys.modules['triton'] = None\nimport train")
    assert result.returncode == 0, result.stderr


def test_without_a_gpu_one_is_told_what_to_do():
    result = run("import torch, kernels\nkernels.swiglu(torch.zeros(2, 4))")
    assert result.stderr.strip().endswith("ValueError: kernels run on GPUs, not on cpu, or interpreted: set "
                                          "TRITON_INTERPRET=1 before the import")


# ---- costs ----------------------------------------------------------------------------------------------------------

def test_costs_are_those_published():
    """Figure 2 of Dao et al. 2022, to its last digit."""
    shape = dict(B=64, N=16, S=1024, D=64)
    for how, gflops, gigabytes in (("standard", 66.6, 40.3), ("flash 1", 75.2, 4.4)):
        assert round(kernels.published_flops(how, **shape) / 1e9, 1) == gflops
        assert round(kernels.attention_cost(how, **shape).nbytes / 1e9, 1) == gigabytes


def test_flops_are_what_torch_counts():
    """The reference's matmuls, of which backward needs twice as many; kernels make scores three times instead of once,
    and dp twice."""
    from torch.utils.flop_counter import FlopCounterMode
    q, k, v = leaves(*heads(32, 32, 2, 2, B=3))
    with FlopCounterMode(display=False) as counter:
        kernels.attention_reference(q, k, v)[0].sum().backward()
    flops = {how: kernels.attention_cost(how, 3, 2, 32, 16).flops for how in ("standard", "flash 1", "here")}
    assert flops["standard"] == counter.get_total_flops()
    assert [flops[how] / flops["standard"] for how in ("flash 1", "here")] == [7 / 6, 9 / 6]


# ---- compiled for sm_90, without a GPU ------------------------------------------------------------------------------

COMPILE = """
import json
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
import kernels
from ahead import resources

class Hopper:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0

def compile_only(self, *args, grid, warmup, **options):
    kernel = launch(self, *args, grid=grid, warmup=True, **options)
    used = resources(kernel.asm["cubin"])
    found = {name: int(used[name]) for name in ("REG", "STACK", "LOCAL")}
    print(json.dumps([label, kernel.metadata.name, found | {
        "wgmma": kernel.asm["ptx"].count("wgmma.mma_async"), "shared": kernel.metadata.shared}]))

launch, JITFunction.run = JITFunction.run, compile_only
triton.runtime.driver.set_active(Hopper())
kernels.check_launch = lambda *tensors: None

packed = (torch.zeros(1, 256, dtype=torch.int32),) * 2
for D, cases in (64, ((True, None), (True, packed))), (128, ((True, None), (False, None), (True, packed))):
    for causal, documents in cases:
        label = f"width {D}, {'not ' * (not causal)}causal{', documents' * (documents is not None)}"
        qkv = torch.zeros(1, 256, 6, D, dtype=torch.bfloat16)
        q, k, v = (x.transpose(1, 2) for x in qkv.split([4, 1, 1], 2))
        o, lse = kernels.flash_forward(q, k, v, causal, documents)
        kernels.flash_backward(o, q, k, v, o, lse, causal, documents)
label = "rows"
x, weight = torch.zeros(8, 4096, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16)
kernels.rms_norm(x, weight, 1e-5)
kernels.add_rms_norm(x, x, weight, 1e-5)
kernels.rms_norm_backward(x, x, x, weight, 1e-5)
kernels.rope_(x.view(8, 32, 128), torch.ones(8, 1, 64), torch.ones(8, 1, 64), 24)
kernels.swiglu_backward(kernels.swiglu(x), x)
one = torch.ones(8)
kernels.softmax_(torch.zeros(8, 128256, dtype=torch.bfloat16), one.long(), one, one, one, 0, 0.0, True, True)
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> list:
    result = run(COMPILE, TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")))
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_registers_suffice(compiled):
    """Nothing is spilled to memory, and shared memory to what a program may have on an H100 or H200, 227 KiB."""
    assert {name for _, name, _ in compiled} == {name for name in vars(kernels) if name.endswith("_kernel")}
    for label, name, found in compiled:
        assert found["STACK"] == found["LOCAL"] == 0 and found["REG"] <= 255, (label, name, found)
        assert found["shared"] <= 227 * 1024, (label, name, found)


def test_attention_uses_the_matmul_instruction_of_hopper(compiled):
    matmuls = {"flash_forward_kernel": 2, "flash_dq_kernel": 3, "flash_dkv_kernel": 4}
    found = [(name, found["wgmma"]) for label, name, found in compiled if name in matmuls]
    assert len(found) == 5 * len(matmuls)
    assert all(count >= matmuls[name] for name, count in found)


# ---- on a GPU only --------------------------------------------------------------------------------------------------

@gpu
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("kind", ["one", "packed"])
def test_attention_in_bf16(D, kind):
    """No further from the exact result than twice torch's own attention in bf16."""
    S, documents = 1000, documents_of(kind, 1000, 1000)
    inputs = [x.bfloat16() for x in heads(S, S, 8, 2, D)]
    exact, ours, torchs = leaves(*inputs, dtype=torch.float64), leaves(*inputs), leaves(*inputs)
    do = numbers(2, 8, S, D, dtype=torch.bfloat16)
    results = [kernels.attention_reference(*exact, True, documents)[0], flash_forward(*ours, True, documents)[0]]
    mask = operations.visible(torch.arange(S, device=DEVICE), S, documents and documents[0])
    results.append(operations.attention_sdpa(*torchs, mask))
    for result in results:
        result.backward(do.to(result.dtype))
    for one in zip(*([result, *(x.grad for x in leaves_)] for result, leaves_ in zip(results, (exact, ours, torchs)))):
        wanted, mine, theirs = (x.double() for x in one)
        assert (mine - wanted).norm() <= 2 * (theirs - wanted).norm()


@gpu
def test_more_than_two_billion_elements():
    """Offsets are 64 bits: the last rows of tensors of 2^31 elements and more are right."""
    x = numbers(1, 2 ** 16, dtype=torch.bfloat16).expand(2 ** 15 + 8, -1).contiguous()
    last, weight = x[-1:].clone(), numbers(2 ** 16, dtype=torch.bfloat16)[:2 ** 15]
    torch.testing.assert_close(kernels.swiglu(x)[-1:], kernels.swiglu(last))
    halves = x.view(-1, 2 ** 15)
    normal = kernels.rms_norm(halves, weight, 1e-5)[-2:]
    torch.testing.assert_close(normal, kernels.rms_norm(last.view(2, -1), weight, 1e-5))
    one = torch.ones(len(x), device=DEVICE)
    kernels.softmax_(x, one.long(), one, one.clone(), one.clone(), 0, 0.0, True, True)
    kernels.softmax_(last, one.long()[:1], one[:1], one[:1].clone(), one[:1].clone(), 0, 0.0, True, True)
    assert torch.equal(x[-1:], last) and math.isclose(last.double().sum().item(), 0, abs_tol=1e-2)
