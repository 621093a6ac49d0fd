"""All kernels but those of learn/, compiled for sm_90, which needs no GPU: registers suffice, matmuls are the tensor
cores', casts are one instruction, and memory is read and written 16 bytes at once."""
import json

import pytest
from ahead import COMPILERS, fits, run
from pool import slow

import flash
import fp8_kernels
import kernels

BEGIN = """
import flash
import fp8_kernels
import kernels
import torch
from ahead import only_compile
from operations import Mask

only_compile(flash, fp8_kernels, kernels)
x, weight = torch.zeros(256, 4096, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16)
one = torch.ones(256)
"""
SMALL_KERNELS = """
for other in None, x:
    kernels.rms_norm(x, other, weight, 1e-5)
    kernels.rms_norm_backward(x, other, x, weight, 1e-5)
kernels.rope_(x.view(1, 256, 32, 128), torch.ones(256, 1, 64), torch.ones(256, 1, 64), 24)
kernels.swiglu(x, kernels.swiglu(x))
experts = torch.zeros(4, dtype=torch.int32)
kernels.add_expert_gradients(torch.zeros(4, 4096, 4096), x, x, experts)
kernels.sum_rows(x, one.long(), one.long())
kernels.cross_entropy_(torch.zeros(256, 128256, dtype=torch.bfloat16), one.long(), one, one, loss_grad=one,
                       first=0, z_loss=0.0, statistics=True, gradient=True)
for dtype in torch.float8_e4m3fn, torch.float8_e5m2:
    for options in dict(scale=one), dict(scale=None), dict(scale=None, tiles=True):
        fp8_kernels.quantise(x, dtype, smallest=2.0 ** -100, **options)
"""
ATTENTION = """
packed = (torch.zeros(1, 256, dtype=torch.int32),) * 2
q, k, v = (x.transpose(1, 2) for x in torch.zeros(1, 256, 6, {D}, dtype=torch.bfloat16).split([4, 1, 1], 2))
o, lse = flash.flash_forward(q, k, v, Mask({mask}))
flash.flash_backward(o, q, k, v, o, lse, Mask({mask}))
"""
MATMULS = {"flash_forward_kernel": 2, "flash_dq_kernel": 3, "flash_dkv_kernel": 4}
CASTS = {f"cvt.rn.satfinite.{format}x2.f32" for format in ("e4m3", "e5m2")}  # of two numbers


def compiled(code: str, compiler: str, folder) -> list[tuple[str, dict]]:
    """(kernel, what it uses) of each launch."""
    return [json.loads(line) for line in run(BEGIN + code, compiler, TRITON_CACHE_DIR=str(folder)).splitlines()]


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("D, mask", [(128, "documents=packed"), *slow(
    (64, ""), (128, ""), (128, "window=4096"), (80, "documents=packed"), (192, "documents=packed"))])
def test_attention_for_sm_90_spills_nothing_and_uses_its_matmul(tmp_path, compiler, D, mask):
    """But dk and dv of heads 192 wide, which take all registers."""
    found = compiled(ATTENTION.format(D=D, mask=mask), compiler, tmp_path)
    assert len(found) == 3 and {name for name, _ in found} == MATMULS.keys()
    for name, used in found:
        fits(name, used, spilled=136 if (name, D) == ("flash_dkv_kernel", 192) else 0)
        assert used["wgmma"] >= MATMULS[name] and used["setmaxnreg"] == 0


@pytest.mark.parametrize("compiler", COMPILERS)
def test_small_kernels_for_sm_90_spill_nothing_and_move_16_bytes_at_once(tmp_path, compiler):
    found = compiled(SMALL_KERNELS, compiler, tmp_path)
    names = {name for module in (kernels, flash, fp8_kernels) for name in vars(module) if name.endswith("_kernel")}
    assert {name for name, _ in found} == names - MATMULS.keys() and len(found) == 10 + 6
    for name, used in found:
        fits(name, used)
    experts = dict(found)["expert_gradients_kernel"]
    assert experts["wgmma"]
    assert experts["REG"] <= 128 and 2 * experts["shared"] <= 227 * 1024, "two programs do not fit on an SM"
    casting = [used for name, used in found if name == "quantise_kernel"]
    for i, used in enumerate(casting):
        width, num_warps = ((64, 8), (128, 8), (128, 16))[i % 3]  # one scale, blocks, tiles
        moves = 128 * width // (32 * num_warps) // 8  # of 8 numbers of 16 bits, or 16 of 8 bits in two copies
        assert used["casts"] == [sorted(CASTS)[i // 3]] and used["nan"], "a NaN is not clamped away"
        assert used["loads"] == used["stores"] == moves and used["threads"] == 32 * num_warps and used["REG"] <= 128
