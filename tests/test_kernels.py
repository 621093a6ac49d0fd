"""All kernels except attention against references in fp64: interpreted on CPUs, compiled on a GPU."""
import math
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import runs
import torch
from ahead import run
from exact import DEVICE, Broken, compare, dense_attention, gpu, is_refused, leaves, numbers

import cp
import ep
import flash
import fp8
import fp8_kernels
import kernels
import operations
import tp
from core import rules
from core.param import IGNORED
from run.device import check_device
from run.meter import Meter
from tp import cross_entropy

# Ours, and the same in torch, of fp64 inputs; of a norm also shapes of the inputs.
NORM = (lambda x, weight, y=None: operations.RMSNormFunction.apply(x * 1, y, weight, 1e-5),
        lambda x, weight, y=None: kernels.rms_norm_reference(x, y, weight, 1e-5), [(7, 40), (40,), (7, 40)])


def rotation(angle: torch.Tensor, heads: list[int]) -> tuple[Callable, Callable]:
    cos, sin = angle.cos(), angle.sin()
    return (lambda x: operations.RotateFunction.apply(x * 1, cos, sin, heads),
            lambda x: kernels.rope_reference(x, cos.double(), sin.double(), sum(heads[:2])).split(heads, 2))


def entropy(labels: torch.Tensor, z_loss: float = 0.0, **options) -> tuple[Callable, Callable]:
    """The incoming gradient is not 1, as forward is told."""
    return (lambda x, weight: kernels.linear_cross_entropy(x, weight, labels, z_loss=z_loss, loss_grad=numbers(seed=7),
                                                           **options),
            lambda x, weight: cross_entropy(x @ weight.t(), labels, z_loss=z_loss))


@pytest.fixture
def uses_kernels(monkeypatch, request):
    """They are used, unless a test asks for torch, too."""
    monkeypatch.setattr(operations, "uses_kernels", lambda x: getattr(request, "param", True))


def test_programs_that_share_rows_are_two_per_sm_of_the_gpu(monkeypatch):
    for sms in 132, 78:  # an H200, an H20
        monkeypatch.setattr(torch.cuda, "get_device_properties",
                            lambda device, sms=sms: SimpleNamespace(multi_processor_count=sms))
        assert kernels.count_programs.__wrapped__(torch.device("cuda")) == 2 * sms


kernel_or_torch = pytest.mark.parametrize("uses_kernels", [False, True], indirect=True)


# ---- norms, rotary embedding, SwiGLU --------------------------------------------------------------------------------

@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 16), (1, 1), (20, 1000), (1, 2 ** 15)])
def test_rms_norm(shape, monkeypatch, uses_kernels):
    """Alone, where the stream is returned, too, and of a sum."""
    monkeypatch.setattr(kernels, "count_programs", lambda device: 3)  # fewer than rows, and no divisor
    x, weight, residual = numbers(*shape), numbers(shape[-1], seed=1), numbers(*shape, seed=2)
    compare(*(lambda x, weight, norm=norm: norm(x, weight)[1] for norm in NORM[:2]), [x, weight])
    compare(*NORM[:2], [x, weight])
    compare(*NORM[:2], [x, weight, residual])


@kernel_or_torch
def test_a_residual_stream_has_the_bits_of_separate_operations(uses_kernels):
    """In 16 bits, forward and backward. So a norm that backward makes again, without the sum, has the same bits."""
    found, derivatives = [], [numbers(7, 40, seed=seed, dtype=torch.float16) for seed in (3, 4, 5)]
    norm = SimpleNamespace(eps=1e-5)
    for together in (True, False):
        x, norm.weight, y = leaves(*(numbers(*shape, seed=1, dtype=torch.float16) for shape in NORM[2]))
        if together:
            total, first = operations.RMSNorm.branch(norm, x * 1)
            total, second = operations.RMSNorm.branch(norm, total, y)
        else:
            total, first = x + y, operations.RMSNorm.forward(norm, x)
            second = operations.RMSNorm.forward(norm, total)
        torch.autograd.backward((total, first, second), derivatives)
        found.append((total, first, second, x.grad, y.grad, norm.weight.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found))


@pytest.mark.parametrize("rows_of", ["sequence", "batch"])
@pytest.mark.parametrize("D, heads", [(16, [3, 2, 2]), (10, [2, 1, 1]), (2, [4])])
def test_rope(uses_kernels, D, heads, rows_of):
    """Of queries and keys beside values, and of queries alone."""
    positions = torch.arange(6.0) if rows_of == "sequence" else torch.tensor([[0.0, 1, 2, 0, 1, 2], [5, 4, 3, 2, 1, 0]])
    angle = positions[..., None, None].double().to(DEVICE) * 10000 ** -torch.linspace(0, 1, D // 2, device=DEVICE)
    compare(*rotation(angle.float(), heads), [numbers(2, 6, sum(heads), D)])


@kernel_or_torch
def test_rope_is_in_place_leaves_other_heads_alone_and_takes_gradients_of_any_layout(uses_kernels):
    """Of all heads of a token, values among them, and of some of them. Attention may return gradients [B, heads, S, D];
    seen as [B, S, heads, D], like x, they are not contiguous."""
    wide, angle = numbers(2, 6, 5, 16), torch.arange(6.0, device=DEVICE)[:, None, None] * numbers(8)
    angles, rotated, before = (angle.cos(), angle.sin()), wide[:, :, :3].clone(), wide.clone()
    for heads, counts in ((wide[:, :, :4], [2, 1, 1]), (rotated, [2, 1])):
        parts = operations.rotate_and_split(heads, angles, counts)
        places = [4 * 16 * sum(counts[:i]) for i in range(len(counts))]
        assert [part.data_ptr() - heads.data_ptr() for part in parts] == places
    assert torch.equal(wide[:, :, :3], rotated) and torch.equal(wide[:, :, 3:], before[:, :, 3:])
    grads = [numbers(2, heads, 6, 16, seed=seed).transpose(1, 2) for seed, heads in enumerate((2, 2, 1))]
    found = leaves(before, before)
    for x, gradients in zip(found, (grads, [grad.contiguous() for grad in grads])):
        torch.autograd.backward(operations.rotate_and_split(x * 1, angles, [2, 2, 1]), gradients)
    assert not grads[0].is_contiguous() and torch.equal(*(x.grad for x in found))


@pytest.mark.parametrize("shape", [(7, 2), (2, 3, 10), (3, 50)])
def test_swiglu(shape, monkeypatch, uses_kernels):
    monkeypatch.setattr(kernels, "SWIGLU_BLOCK", 16)
    compare(operations.swiglu, kernels.swiglu_reference, [numbers(*shape) * 3])


def test_nothing_goes_in_and_nothing_comes_out(uses_kernels):
    x, weight = leaves(numbers(0, 16), numbers(16))
    total, y = operations.RMSNormFunction.apply(x, x, weight, 1e-5)
    out = operations.swiglu(operations.RMSNormFunction.apply(y, None, weight, 1e-5)[1] + total)
    q, = operations.RotateFunction.apply(out.view(0, 3, 2, 4) * 1, numbers(3, 1, 2), numbers(3, 1, 2), [2])
    q.sum().backward()
    assert x.grad.shape == (0, 16) and torch.equal(weight.grad, torch.zeros_like(weight))
    for count in (0, 3):  # no tokens, and no labels
        x, weight = leaves(numbers(count, 8), numbers(9, 8))
        loss = kernels.linear_cross_entropy(x, weight, torch.full((count,), IGNORED, device=DEVICE))
        loss.backward()
        assert loss == 0 and not x.grad.any() and not weight.grad.any()


def test_fp16_is_computed_in_fp32_and_rounded_once():
    """Rows whose squares fp16 cannot hold; an epsilon that counts, of inputs both large and small."""
    half = partial(numbers, dtype=torch.float16)
    x, dy, weight = 40 * half(7, 300), half(7, 300, seed=1), half(300, seed=2)
    x[3] *= 2.0 ** -7
    y, angle = half(7, 300, seed=3), numbers(7, 1, 5)
    cos, sin, qkv = angle.cos(), angle.sin(), half(1, 7, 4, 10)
    wide, wide_weight, wide_qkv = (each.double().requires_grad_() for each in (x, weight, qkv))
    norm, swiglu = torch.nn.functional.rms_norm(wide, (300,), wide_weight, 0.5), kernels.swiglu_reference(wide)
    rotated = kernels.rope_reference(wide_qkv, cos.double(), sin.double(), 3)
    dx, dweight = torch.autograd.grad(norm, [wide, wide_weight], dy.double())
    dswiglu, = torch.autograd.grad(swiglu, wide, dy[:, :150].double())
    dqkv, = torch.autograd.grad(rotated, wide_qkv, qkv.double())
    total, normal = kernels.rms_norm(x, y, weight, 0.5)
    turned, back = qkv.clone(), qkv.clone()
    kernels.rope_(turned, cos, sin, 3)
    kernels.rope_(back, cos, sin, 3, -1.0)
    found = kernels.rms_norm_backward(dy, None, x, weight, 0.5)
    torch.testing.assert_close(found[1].double(), dweight, rtol=1e-5, atol=1e-4)
    for got, want in ((kernels.rms_norm(x, None, weight, 0.5)[1], norm), (found[0], dx), (kernels.swiglu(x), swiglu),
                      (normal, torch.nn.functional.rms_norm(total.double(), (300,), weight.double(), 0.5)),
                      (kernels.swiglu(x, dy[:, :150]), dswiglu), (turned, rotated), (back, dqkv)):
        assert got.dtype == torch.float16
        # Half a step; and what fp32 loses where terms cancel.
        torch.testing.assert_close(got.double(), want, rtol=2.0 ** -11 + 2.0 ** -18, atol=2.0 ** -18)


def apart(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, with others between them in memory."""
    return torch.stack((x, torch.full_like(x, torch.nan)), -1)[..., 0]


def test_operands_need_not_be_contiguous(uses_kernels):
    x, y, weight, angle, dq = numbers(7, 40), numbers(7, 40, seed=1), numbers(40), numbers(7, 1, 4), numbers(1, 7, 2, 8)
    for operator, operands in [
            (lambda x: kernels.rms_norm(x, None, weight, 1e-5), [x]), (kernels.swiglu, [x]),
            (lambda x, y: kernels.rms_norm(x, y, weight, 1e-5), [x, y]),
            (lambda dy, more, x: kernels.rms_norm_backward(dy, more, x, weight, 1e-5), [y, numbers(7, 40, seed=2), x]),
            (kernels.swiglu, [x, numbers(7, 20)]),
            (lambda *angles: operations.rotate_and_split(dq.clone(), angles, [2]), [angle.cos(), angle.sin()]),
            (lambda labels: kernels.linear_cross_entropy(x, y, labels.view(torch.long)),
             [torch.arange(7, device=DEVICE).view(torch.double)])]:
        torch.testing.assert_close(operator(*map(apart, operands)), operator(*operands), rtol=0, atol=0)


# ---- cross-entropy --------------------------------------------------------------------------------------------------

def some_labels(T: int, V: int) -> torch.Tensor:
    labels = torch.randint(0, V, (T,), generator=torch.Generator().manual_seed(T)).to(DEVICE)
    labels[::4] = IGNORED
    return labels


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("z_loss, V, scale", [(0.0, 37, 1), (0.1, 37, 1), (0.0, 1, 1), (0.0, 9000, 1), (0.0, 37, 1000)])
def test_linear_cross_entropy(chunk, z_loss, V, scale):
    """Of a large vocabulary, which is read in blocks, the last block has the largest logits."""
    growing = torch.linspace(0.5, 4, V, device=DEVICE)[:, None]
    compare(*entropy(some_labels(5, V), z_loss, chunk=chunk), [numbers(5, 4) * scale, numbers(V, 4, seed=1) * growing])


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_the_plain_cross_entropy_is_torch_s_and_the_formula_s(z_loss):
    """Results and gradients in fp64; the z-loss is added by its formula."""
    labels, (x, weight) = some_labels(11, 37), leaves(numbers(11, 8), numbers(37, 8, seed=1), dtype=torch.float64)
    logits = x @ weight.t()
    squares = torch.logsumexp(logits, 1).square()[labels != IGNORED].sum()
    want = torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED) + z_loss * squares
    plain = kernels.linear_cross_entropy_reference(x, weight, labels, z_loss)
    for got, exact in zip((plain, *torch.autograd.grad(plain, [x, weight])),
                          (want, *torch.autograd.grad(want, [x, weight]))):
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_the_fused_cross_entropy_is_the_plain_one(chunk):
    labels = some_labels(11, 37)
    compare(entropy(labels, 0.1, chunk=chunk)[0],
            lambda x, weight: kernels.linear_cross_entropy_reference(x, weight, labels, 0.1),
            [numbers(11, 4), numbers(37, 4, seed=1)])


@pytest.mark.parametrize("compute, dtype", [(kernels.cross_entropy_, torch.float16),
                                            (kernels.cross_entropy_reference_, torch.float16),
                                            (kernels.cross_entropy_reference_, torch.bfloat16)])
def test_a_fused_loss_in_16_bits_rounds_the_gradients_of_logits_and_nothing_else(monkeypatch, compute, dtype):
    """16 bits have these logits, multiples of 1/16 up to 8. So the loss is off by sums in fp32; the products of dz by
    half a unit in the last place, u, of each of their terms, and by another one of the result."""
    monkeypatch.setattr(kernels, "cross_entropy_", compute)
    generator, u = torch.Generator().manual_seed(0), torch.finfo(dtype).eps / 2
    given = [torch.randint(-4, 5, shape, generator=generator).to(DEVICE) / 4 for shape in ((60, 8), (37, 8))]
    labels, loss_grad = some_labels(60, 37), torch.tensor(64.0, device=DEVICE)
    x, weight = leaves(*given, dtype=dtype)
    total = torch.zeros(37, 8, device=DEVICE)
    weight.sink = SimpleNamespace(main_grad=lambda weight: total)
    loss = kernels.linear_cross_entropy(x, weight, labels, loss_grad=loss_grad)
    (loss * loss_grad).backward()

    wide, matrix = leaves(*given, dtype=torch.float64)
    logits = wide @ matrix.t()
    logits.retain_grad()
    want = torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)
    (64 * want).backward()
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(want.item(), rel=2.0 ** -20)
    dz = logits.grad.abs()
    for found, exact, terms in ((x.grad, wide.grad, dz @ matrix.abs()), (total, matrix.grad, dz.t() @ wide.abs())):
        assert ((found - exact).abs() <= u * (terms + exact.abs()) + 2.0 ** -16).all()
        assert (found != exact).any()


def test_beside_a_chunk_of_logits_nothing_is_as_large_as_the_weight():
    """With a main gradient, as in training: at 16k tokens and 128k words 0.05 of what torch takes for both passes."""
    T, H, V, chunk = 64, 32, 512, 16
    x, weight = leaves(numbers(T, H), numbers(V, H))
    main_grad, asked = torch.zeros(V, H, device=DEVICE), []
    weight.sink = SimpleNamespace(main_grad=lambda _: asked.append(1) or main_grad)
    with Meter() as meter:
        loss = kernels.linear_cross_entropy(x, weight, some_labels(T, V), chunk=chunk)
        before = main_grad.sum().item()
        loss.backward()
    assert len(asked) == T // chunk + 1  # backward, too, names its use of the weight, and adds nothing
    assert 0 < meter.peak["other"] - 4 * chunk * V - 4 * T * H < 12 * 4 * T < 4 * V * H  # a chunk, dx, little else
    assert main_grad.sum() == before != 0 and weight.grad is None


def test_gradients_are_added_and_are_those_announced():
    x, weight = leaves(numbers(6, 8), numbers(9, 8))
    for _ in range(2):
        kernels.linear_cross_entropy(x, weight, some_labels(6, 9)).backward()
    once = leaves(x, weight)
    kernels.linear_cross_entropy(*once, some_labels(6, 9)).backward()
    torch.testing.assert_close([x.grad, weight.grad], [2 * single.grad for single in once])
    if DEVICE == "cpu":  # on a GPU the process would end
        loss = kernels.linear_cross_entropy(x, weight, some_labels(6, 9), loss_grad=torch.tensor(0.5))
        with pytest.raises(RuntimeError, match="not loss_grad"):
            (0.25 * loss).backward()


def test_gradients_that_nobody_wants_are_not_made(monkeypatch):
    monkeypatch.setattr(kernels, "cross_entropy_", compute := Mock(wraps=kernels.cross_entropy_))
    x, weight = leaves(numbers(6, 8), numbers(9, 8))
    with torch.no_grad():
        kernels.linear_cross_entropy(x, weight, some_labels(6, 9))
    kernels.linear_cross_entropy(x.detach(), weight, some_labels(6, 9)).backward()
    assert [call.kwargs["gradient"] for call in compute.mock_calls] == [False, True]
    assert x.grad is None and weight.grad is not None


# ---- experts --------------------------------------------------------------------------------------------------------

TABLE = torch.randint(-1, 5, (7, 3), generator=torch.Generator().manual_seed(3), device="cpu")  # -1 and 4: no copy
TABLE[2] = -1
TABLE = TABLE.to(DEVICE)
COPIES = ep.sort_copies(TABLE, 4, 12)


def sum_of_copies(x: torch.Tensor) -> torch.Tensor:
    """Copies are sorted by destination, and those of one destination by item."""
    items = [item for destination in range(4) for item, row in enumerate(TABLE.tolist()) if destination in row
             for _ in range(row.count(destination))]
    return x.new_zeros(7, x.shape[1]).index_add(0, torch.tensor(items, device=DEVICE), x)


@pytest.mark.parametrize("width", [1, 20, 1300])  # 1300: two programs an item
def test_copies_of_tokens_are_summed(uses_kernels, width):
    """By combine's forward, and dispatch's backward. Item 2 has no copy."""
    assert (TABLE[2] < 0).all() and len(COPIES.cells) == 12 == ((TABLE >= 0) & (TABLE < 4)).sum()
    compare(combined, sum_of_copies, [numbers(12, width)])
    compare(lambda x: ep.Permute.apply(x, COPIES), lambda x: x[COPIES.cells // 3], [numbers(7, width)])


def test_copies_in_16_bits_are_summed_in_fp32_and_in_order():
    """1 + 2^-11 + 2^-11 is 1 + 2^-10, though 1 + 2^-11 is 1 in fp16."""
    x = torch.tensor([[2.0 ** -11], [1.0], [2.0 ** -11]], dtype=torch.float16, device=DEVICE)
    order, starts = torch.tensor([1, 0, 2], device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    assert kernels.sum_rows(x, order, starts).item() == 1 + 2.0 ** -10
    assert kernels.sum_rows(x[:0], order[:0], starts).item() == 0


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0], [70, 0, 0, 129]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weight_gradients_of_all_experts_are_added_by_one_launch(uses_kernels, counts, dtype):
    """To fp32. A matrix of an expert without rows keeps its bits. The host reads nothing: a route has only `ends`."""
    ends, start = torch.tensor(counts, device=DEVICE).cumsum(0).int(), 0
    dy, x = (numbers(sum(counts), width, dtype=dtype) for width in (40, 70))
    dw = numbers(len(counts), 40, 70)
    before, route = dw.clone(), SimpleNamespace(ends=ends)
    with patch.object(kernels, "launch", Mock(wraps=kernels.launch)) as launch:
        if dtype == torch.float16:
            ep.GroupedMatmul().wgrad(dw, dy, x, route)
        else:  # matmuls of torch are faster there
            kernels.add_expert_gradients(dw, dy, x, ends)
    assert launch.call_count == 1
    for got, old, count in zip(dw, before, counts):
        rows, start = slice(start, start + count), start + count
        exact = old.double() + torch.einsum("rn,rk->nk", dy[rows].double(), x[rows].double())
        assert torch.equal(got, old) if count == 0 else (got - exact).abs().max() < 1e-5 * exact.abs().max()


def test_weight_gradients_of_experts_are_not_rounded_before_they_are_added():
    """1 + 2^-12 is 1 in 16 bits."""
    dy, x = torch.ones(2, 16, dtype=torch.float16), torch.ones(2, 16, dtype=torch.float16)
    x[1], dw = 2.0 ** -12, torch.zeros(1, 16, 16)
    dy, x, dw, ends = (tensor.to(DEVICE) for tensor in (dy, x, dw, torch.tensor([2], dtype=torch.int32)))
    kernels.add_expert_gradients(dw, dy, x, ends)
    assert (dw == 1 + 2.0 ** -12).all()


# ---- kernels that do not run: torch computes in their place ----------------------------------------------------------

def break_kernels(monkeypatch, *names: str) -> tuple[list[Broken], dict[str, str]]:
    """(these kernels, which from now on do not run; the failures that are known, none so far)"""
    broken, failed = {name: Broken(name) for name in names}, {}
    for module in kernels, flash, fp8_kernels:
        for name, instead in (broken | dict(failed=failed)).items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, instead)
    return [*broken.values()], failed


DOCUMENTS = torch.arange(20, device=DEVICE)[None] // 7
ATTENTIONS = [(partial(flash.flash_attention, mask=mask), lambda q, k, v, mask=mask: dense_attention(q, k, v, mask)[0],
               [(1, 4, 20, 16), (1, 2, 20, 16), (1, 2, 20, 16)])
              for mask in (operations.CAUSAL, operations.Mask(window=6), operations.Mask(documents=(DOCUMENTS,) * 2))]
def combined(x: torch.Tensor) -> torch.Tensor:
    return ep.Combine.apply(x * 1, SimpleNamespace(to_experts=COPIES, to_ranks=None))


REPLACED = {  # kernel -> what launches it: ours, the same in torch, the shapes of the inputs
    "rms_norm_kernel": [NORM], "rms_norm_backward_kernel": [NORM],
    "rope_kernel": [(*rotation(numbers(6, 1, 4), [3, 1, 2]), [(2, 6, 6, 8)])],
    "swiglu_kernel": [(operations.swiglu, kernels.swiglu_reference, [(7, 20)])],
    "sum_rows_kernel": [(combined, sum_of_copies, [(12, 20)])],
    "cross_entropy_kernel": [(*entropy(some_labels(11, 37), 0.1, chunk=4), [(11, 8), (37, 8)])],
    "flash_forward_kernel": ATTENTIONS, "flash_dq_kernel": ATTENTIONS, "flash_dkv_kernel": ATTENTIONS}


@pytest.mark.parametrize("name", REPLACED)
def test_torch_replaces_a_kernel_that_does_not_run(monkeypatch, uses_kernels, name):
    """Results and gradients are right from the first launch on; it is not tried again."""
    (broken,), failed = break_kernels(monkeypatch, name)
    for ours, exact, shapes in REPLACED[name]:
        for _ in range(2):
            compare(ours, exact, [numbers(*shape, seed=i) for i, shape in enumerate(shapes)])
    assert broken.tries == 1 and failed == {name: "RuntimeError: no such"}


def test_the_first_and_the_last_rank_say_that_a_kernel_does_not_run(monkeypatch, capsys, uses_kernels):
    monkeypatch.setattr(kernels, "dist", ranks := Mock(get_world_size=lambda: 4))
    for rank in range(4):
        ranks.get_rank.return_value = rank
        break_kernels(monkeypatch, "swiglu_kernel")
        operations.swiglu(numbers(3, 8))
        says = "swiglu_kernel does not run here, torch computes in its place: RuntimeError: no such\n"
        assert capsys.readouterr().out == says * (rank in (0, 3))


@pytest.mark.parametrize("options", [dict(scale=torch.tensor(0.01)), dict(), dict(tiles=True)])
def test_torch_replaces_a_quantise_kernel_that_does_not_run(monkeypatch, options):
    x, want = numbers(128, 256), fp8.quantise(numbers(128, 256), fp8.E4M3, **options)
    monkeypatch.setattr(operations, "uses_kernels", lambda x: True)
    (broken,), _ = break_kernels(monkeypatch, "quantise_kernel")
    for one, other in zip(fp8.quantise(x, fp8.E4M3, **options), want):
        assert torch.equal(one.data.view(torch.uint8), other.data.view(torch.uint8))
        assert torch.equal(one.scales, other.scales)
    assert broken.tries == 1


def test_blocks_of_context_parallelism_have_a_way_back_too(monkeypatch):
    """Where some rows see nothing: their logsumexp is -inf; backward is given that of all blocks, which is not."""
    mask, (q, k, v, do) = operations.Mask(False, 20, None, 30), [numbers(1, 2, 33, 16, seed=i) for i in range(4)]
    o, lse = flash.flash_forward(q, k, v, mask)
    merged = do, q, k, v, o, lse.logaddexp(torch.ones_like(lse)), mask
    want = o, lse, *flash.flash_backward(*merged)
    _, failed = break_kernels(monkeypatch, "flash_forward_kernel", "flash_dq_kernel")
    torch.testing.assert_close((*flash.flash_forward(q, k, v, mask), *flash.flash_backward(*merged)), want)
    assert lse.isneginf().any() and len(failed) == 2


@pytest.mark.skipif(DEVICE == "cuda", reason="compiled kernels need tensors on the GPU")
@pytest.mark.parametrize("fp8_flags, tolerance", [("", 1e-6), ("--fp8 tensorwise", 1e-4)])
def test_a_run_in_which_no_kernel_works_is_one_with_kernels_torch(monkeypatch, tmp_path, fp8_flags, tolerance):
    """As on a GPU. Neither a kernel that failed nor --kernels torch lets any be tried."""
    flags = ("--layers 3 --hidden 32 --heads 4 --kv-heads 2 --ffn 32 --vocab 300 --seq-len 16 --global-batch 4 "
             "--steps 3 "
             f"--dtype fp32 --z-loss 0.01 --qk-norm --mask-documents --sample-prompt= --data {__file__} {fp8_flags}")
    names = [name for name in (*vars(kernels), *vars(flash), *vars(fp8_kernels)) if name.endswith("_kernel")]
    (broken, failed), found, real = break_kernels(monkeypatch, *names), [], operations.uses_kernels
    for module in operations, tp, cp:
        monkeypatch.setattr(module, "uses_kernels", lambda x: real(SimpleNamespace(is_cuda=True, dtype=x.dtype)))
    for kind in "torch", "auto":
        assert not any(kernel.tries for kernel in broken)
        runs.run(f"{flags} --kernels {kind} --metrics {tmp_path}/{kind}")
        found.append([record[key] for record in runs.metrics(tmp_path / kind) for key in ("loss", "grad_norm")])
    unused = {"flash_dkv_kernel", "sum_rows_kernel", "expert_gradients_kernel"}  # dkv: dq failed before it; no experts
    unused |= {"quantise_kernel"} if not fp8_flags else set()
    assert set(failed) == set(names) - unused and {kernel.tries for kernel in broken} == {0, 1}
    assert found[1] == pytest.approx(found[0], rel=tolerance) and len(found[0]) == 2 * 3


def test_without_triton_one_trains_and_a_gpu_run_is_told_what_to_do(monkeypatch):
    run("import sys\nsys.modules['triton'] = None\nimport train, fp8\nfp8.demo()")
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(ValueError, match="^--kernels auto: Triton does not run here .*: use --kernels torch$"):
        check_device(rules.parse([]), torch.device("cuda"))
    check_device(rules.parse(["--kernels", "torch"]), torch.device("cuda"))


# ---- what is refused ------------------------------------------------------------------------------------------------

CROSS_ENTROPY = dict(loss_grad=torch.ones((), device=DEVICE), first=0, z_loss=0.0, statistics=True, gradient=True)
HEADS, ROW, ANGLES = (1, 3, 2, 8), (3, 8), (3, 1, 4)
REFUSED = {  # what is launched -> what the error says
    "norm weight": (lambda n: kernels.rms_norm(n(*ROW), None, n(7), 1e-5), "of 7 .* for rows of 8"),
    "too wide a norm": (lambda n: kernels.rms_norm(n(1, 2 ** 15 + 1), None, n(2 ** 15 + 1), 1e-5), "1 to 32768"),
    "two types": (lambda n: kernels.rms_norm(n(*ROW), n(*ROW).half(), n(8), 1e-5), "8.* torch.float32"),
    "two devices": (lambda n: kernels.launch(None, (1,), n(3), n(3).to("meta")), f"on {DEVICE}.* and on meta"),
    "other sines": (lambda n: kernels.rope_(n(*HEADS), n(*ANGLES), n(1, *ANGLES), 1), "cos .*, x"),
    "too few angles": (lambda n: kernels.rope_(n(1, 4, 2, 8), n(*ANGLES), n(*ANGLES), 1), r"x .*\[1, 4, 2, 8\]"),
    "too few heads": (lambda n: kernels.rope_(n(*HEADS), n(*ANGLES), n(*ANGLES), 3), "no 3 heads"),
    "heads apart": (lambda n: kernels.rope_(n(1, 2, 3, 8).mT.mT.transpose(1, 2), n(*ANGLES), n(*ANGLES), 2), "apart"),
    "odd width": (lambda n: kernels.swiglu(n(3, 7)), "gate and up"),
    "dy of another width": (lambda n: kernels.swiglu(n(*ROW), n(3, 7)), "half as wide"),
    "labels": (lambda n: kernels.linear_cross_entropy(n(*ROW), n(9, 8), some_labels(4, 9)), "3 tokens"),
    "logits apart": (lambda n: kernels.cross_entropy_(apart(n(3, 9)), some_labels(3, 9), *[n(3)] * 2, **CROSS_ENTROPY),
                     "must be contiguous"),
    "vocab": (lambda n: kernels.linear_cross_entropy(n(*ROW), n(9, 8), some_labels(3, 9), vocab_size=6), "0, 6"),
}
if DEVICE == "cpu":  # compiled, bf16 is right
    REFUSED["bf16"] = (lambda n: kernels.swiglu(n(*ROW).bfloat16()), "interpreted take no torch.bfloat16")
    REFUSED["no GPU"] = (lambda n: patch.object(kernels, "INTERPRETED", False)(kernels.swiglu)(n(2, 4)),
                         "^kernels run on GPUs, not on cpu, or interpreted: set TRITON_INTERPRET=1 before the import$")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_launched_is_refused_in_a_line(name):
    is_refused(*REFUSED[name])


# ---- on a GPU only --------------------------------------------------------------------------------------------------

@gpu
def test_more_than_two_billion_elements():
    """Offsets are 64 bits: the last rows of tensors of 2^31 elements and more are right."""
    x = numbers(1, 2 ** 16, dtype=torch.bfloat16).expand(2 ** 15 + 8, -1).contiguous()
    last, weight = x[-1:].clone(), numbers(2 ** 16, dtype=torch.bfloat16)[:2 ** 15]
    torch.testing.assert_close(kernels.swiglu(x)[-1:], kernels.swiglu(last))
    halves = x.view(-1, 2 ** 15)
    normal = kernels.rms_norm(halves, None, weight, 1e-5)[1][-2:]
    torch.testing.assert_close(normal, kernels.rms_norm(last.view(2, -1), None, weight, 1e-5)[1])
    one = torch.ones(len(x), device=DEVICE)
    kernels.cross_entropy_(x, one.long(), one, one.clone(), **CROSS_ENTROPY)
    kernels.cross_entropy_(last, one.long()[:1], one[:1].clone(), one[:1].clone(), **CROSS_ENTROPY)
    assert torch.equal(x[-1:], last) and math.isclose(last.double().sum().item(), 0, abs_tol=1e-2)
