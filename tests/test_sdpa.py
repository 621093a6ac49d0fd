"""Which of torch's attention kernels may compute what. Their results are compared in test_cp.py and test_flash.py."""
import gc

import pytest
import torch
from exact import dense_attention
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend

import sdpa
from operations import Mask, attention_math, math_forward

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a test on the GPU may have set the order already")


def test_two_blocks_in_plain_calls_are_attention_to_all_keys():
    """Result and gradients to 1e-10, with fewer key and value heads than query heads, and unequal rows and columns."""
    q, k, v, do = (torch.randn(2, heads, length, 24, dtype=torch.float64)
                   for heads, length in ((6, 40), (3, 56), (3, 56), (6, 40)))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o, _ = dense_attention(*leaves, Mask(causal=False))
    wanted = [o.detach(), *torch.autograd.grad(o, leaves, do)]
    for found, want in zip(sdpa.attend_in_two_blocks(q, k, v, do), wanted, strict=True):
        assert (found - want).abs().max() < 1e-10 * want.abs().max()


@pytest.mark.parametrize("width, dtype, kv_heads", [
    (64, torch.bfloat16, 2), (64, torch.float32, 8), (256, torch.bfloat16, 2), (264, torch.bfloat16, 8),
    (64, torch.float16, 2)])
def test_grouped_queries_on_a_gpu_have_a_fused_kernel_in_16_and_32_bits(monkeypatch, width, dtype, kv_heads):
    """In fp32, and for heads wider than 256, none takes fewer key than query heads: torch would save the scores. By
    fake tensors of a GPU."""
    given = []

    def attend(q, k, v, visible, *, is_causal, enable_gqa):
        given.append((k.shape[1], v.shape[1], enable_gqa))
        return q

    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(sdpa, "set_sdpa_order", lambda: None)
    with FakeTensorMode():
        q, k, v = (torch.empty(1, heads, 16, width, device="cuda", dtype=dtype) for heads in (8, 2, 2))
        sdpa.attention_sdpa(q, k, v, Mask())
    assert given == [(kv_heads, kv_heads, kv_heads < 8)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=False), Mask(window=4)])
def test_blocks_that_no_fused_operator_of_a_gpu_takes_are_computed_by_matmuls(monkeypatch, dtype, mask):
    """cuDNN and flash need 16 bits, no mask tensor, and a width that is a multiple of 8 and at most 256: their private
    operators raise otherwise. Matmuls compute all other blocks, in forward and backward. By fake tensors of a GPU."""
    called = []
    for kernel in ("gpu", "math"):
        for way in ("forward", "backward"):
            monkeypatch.setattr(sdpa, f"{kernel}_{way}", lambda *_, name=f"{kernel} {way}": called.append(name))
    widths = range(2, 300, 2)
    with FakeTensorMode():
        for width in widths:
            q, k, v = (torch.empty(1, heads, 16, width, device="cuda", dtype=dtype) for heads in (4, 2, 2))
            sdpa.sdpa_forward(q, k, v, mask)
            sdpa.sdpa_backward(q, q, k, v, q, None, mask)
    fused = {width for width in widths if width in range(8, 257, 8) and dtype.itemsize == 2 and not mask.window}
    assert called == [f"{'gpu' if width in fused else 'math'} {way}" for width in widths
                      for way in ("forward", "backward")]


@pytest.mark.parametrize("device, dtype, mask, widths, taken, called", [  # taken: what torch says of cuDNN
    ("cuda", torch.bfloat16, Mask(), (192, 128), True, ["torch 128", "gpu 128"]),
    ("cuda", torch.bfloat16, Mask(), (192, 128), False, ["gpu 192", "gpu 192"]),
    ("cuda", torch.bfloat16, Mask(), (192, 96), True, ["gpu 192", "gpu 192"]),  # taken in forward only
    ("cuda", torch.bfloat16, Mask(False), (128, 64), True, ["torch 64", "gpu 64"]),
    ("cuda", torch.bfloat16, Mask(window=4), (192, 128), True, ["torch 128", "math 128"]),
    ("cuda", torch.float32, Mask(), (192, 128), False, ["torch 128", "math 128"]),
    ("cpu", torch.float32, Mask(), (192, 128), False, ["cpu 192", "cpu 192"])])
def test_values_are_padded_to_the_width_of_keys_only_for_flash(monkeypatch, device, dtype, mask, widths, taken, called):
    """For whole sequences, then for a block: what computes them, and the width of values that it is given; the result
    is as wide as values."""
    found = []

    def noted(name: str):
        def attend(q, k, v, *rest, **options):
            found.append(f"{name} {v.shape[-1]}")
            o = q.new_empty(*q.shape[:3], v.shape[-1])
            return o if name == "torch" else (o, q)
        return attend

    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", noted("torch"))
    monkeypatch.setattr(sdpa, "gpu_forward", noted("gpu"))
    monkeypatch.setattr(sdpa, "math_forward", noted("math"))
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", noted("cpu"))
    monkeypatch.setattr(sdpa, "can_use_cudnn_attention", lambda params: taken)
    monkeypatch.setattr(sdpa, "choose_sdpa_kernels", lambda cudnn: None)
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 4, 16, width, device=device, dtype=dtype) for width in (*widths[:1], *widths))
        results = sdpa.attention_sdpa(q, k, v, mask), sdpa.sdpa_forward(q, k, v, mask)[0]
    assert found == called and all(o.shape == v.shape for o in results)


@pytest.mark.parametrize("forward", [sdpa.sdpa_forward, math_forward])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows, columns", [(24, 24), (300, 600), (2, 3)])
def test_rows_that_see_no_key_of_a_block_have_no_weight_and_are_zeros(forward, dtype, rows, columns):
    """cp.merge multiplies such rows by 0, which does not remove NaN. flash.py's are in test_flash.py."""
    queries, keys = torch.arange(rows)[None] % 2, torch.zeros(1, columns, dtype=torch.long)  # odd rows see no key
    q, k, v = (torch.randn(1, heads, length, 16, dtype=dtype)
               for heads, length in ((4, rows), (2, columns), (2, columns)))
    o, lse = forward(q, k, v, Mask(causal=False, documents=(queries, keys)))
    assert lse[:, :, 1::2].isneginf().all() and not o[:, :, 1::2].any()
    assert lse[:, :, 0::2].isfinite().all() and o[:, :, 0::2].any(-1).all()


@pytest.fixture
def sdpa_kernels(monkeypatch):
    """Of every call of torch's attention, which here computes nothing, the kernels that torch may choose, in order."""
    given = []

    def attend(q, k, v, visible, **_):
        on = dict(zip([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
                       SDPBackend.MATH], [cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(),
                                          cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()]))
        given.append([kernel for kernel in map(SDPBackend, torch._C._get_sdp_priority_order()[:4]) if on[kernel]])
        return q

    cuda = torch.backends.cuda
    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", attend)
    try:
        yield given
    finally:
        sdpa.set_sdpa_order().__exit__(None, None, None)
        sdpa.set_sdpa_order.cache_clear()


def test_cudnn_gets_neither_wide_heads_nor_masks_and_gets_all_others_also_after_those(monkeypatch, sdpa_kernels):
    """Wide heads, except those of DeepSeek, with values of 128 beside keys of 192. By fake tensors of a GPU."""
    wanted, all_kernels = [], sdpa.SDPA_ORDER
    monkeypatch.setattr(sdpa, "can_use_cudnn_attention", lambda params: torch.backends.cuda.cudnn_sdp_enabled())
    with FakeTensorMode():
        documents = (torch.zeros(1, 16, device="cuda"),) * 2
        masks = {"causal": Mask(), "unmasked": Mask(causal=False), "window": Mask(window=4), "cached": Mask(offset=3),
                 "documents": Mask(documents=documents, tensor=torch.ones(1, 1, 16, 16, device="cuda").bool())}
        for width, values in (64, 64), (192, 192), (128, 128), (136, 136), (256, 256), (192, 128), (80, 80), (80, 48):
            for name, mask in masks.items():
                q, k, v = (torch.empty(1, 4, 16, d, device="cuda", dtype=torch.bfloat16)
                           for d in (width, width, values))
                sdpa.attention_sdpa(q, k, v, mask)
                cudnn = (width <= 128 or values == 128) and name in ("causal", "unmasked")
                wanted.append(all_kernels if cudnn else all_kernels[1:])
    assert all_kernels[0] == SDPBackend.CUDNN_ATTENTION and sdpa_kernels == wanted


def test_torchs_order_of_attention_kernels_is_set_once_and_stays():
    before = torch._C._get_sdp_priority_order()
    context = sdpa.set_sdpa_order()
    try:
        assert sdpa.set_sdpa_order() is context
        gc.collect()
        assert torch._C._get_sdp_priority_order()[:4] == [int(kernel) for kernel in sdpa.SDPA_ORDER] != before[:4]
    finally:
        context.__exit__(None, None, None)
        sdpa.set_sdpa_order.cache_clear()
    assert torch._C._get_sdp_priority_order() == before


def test_the_demo_names_the_kernel_that_is_called(cudnn):
    """cuDNN's is a stand-in on the CPU; attention in plain torch calls none."""
    q, k, v = torch.ones(1, 4, 6, 8), torch.ones(1, 2, 6, 8), torch.ones(1, 2, 6, 8)
    called = [sdpa.find_kernel(attend, q, k, v, Mask())
              for attend in (sdpa.gpu_forward, sdpa.sdpa_forward, sdpa.attention_sdpa, attention_math)]
    assert called == ["cudnn", "flash_for_cpu", "flash_for_cpu", "math"]
