"""All kernels but those of learn/, compiled for sm_90, which needs no GPU: registers suffice, matmuls are the tensor
cores', casts are one instruction, and memory is read and written 16 bytes at once."""
import json

import pytest
from ahead import COMPILERS, fits, run

import flash
import kernels

LAUNCHES = """
import flash
import kernels
import torch
from ahead import only_compile
from operations import Mask

only_compile(flash, kernels)
x, weight = torch.zeros(256, 4096, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16)
one = torch.ones(256)
for other in None, x:
    kernels.rms_norm(x, other, weight, 1e-5)
    kernels.rms_norm_backward(x, other, x, weight, 1e-5)
kernels.rope_(x.view(1, 256, 32, 128), torch.ones(256, 1, 64), torch.ones(256, 1, 64), 24)
kernels.swiglu(x, kernels.swiglu(x))
kernels.cross_entropy_(torch.zeros(256, 128256, dtype=torch.bfloat16), one.long(), one, one, loss_grad=one,
                       first=0, z_loss=0.0, statistics=True, gradient=True)
packed = (torch.zeros(1, 256, dtype=torch.int32),) * 2
for D, mask in (64, Mask()), (128, Mask()), (128, Mask(documents=packed)), (128, Mask(window=4096)), (
        80, Mask(documents=packed)), (192, Mask(documents=packed)):
    q, k, v = (x.transpose(1, 2) for x in torch.zeros(1, 256, 6, D, dtype=torch.bfloat16).split([4, 1, 1], 2))
    o, lse = flash.flash_forward(q, k, v, mask)
    flash.flash_backward(o, q, k, v, o, lse, mask)
for dtype in torch.float8_e4m3fn, torch.float8_e5m2:
    for options in dict(scale=one), dict(scale=None), dict(scale=None, tiles=True):
        kernels.quantise(x, dtype, smallest=2.0 ** -100, **options)
"""
MATMULS = {"flash_forward_kernel": 2, "flash_dq_kernel": 3, "flash_dkv_kernel": 4}
CASTS = {f"cvt.rn.satfinite.{format}x2.f32" for format in ("e4m3", "e5m2")}  # of two numbers


@pytest.mark.parametrize("compiler", COMPILERS)
def test_kernels_for_sm_90_spill_nothing_and_use_its_instructions(tmp_path, compiler):
    lines = run(LAUNCHES, compiler, TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    found = [json.loads(line) for line in lines]
    names = {name for module in (kernels, flash) for name in vars(module) if name.endswith("_kernel")}
    assert {name for name, _ in found} == names and len(found) == 8 + 6 * 3 + 6
    for i, (name, used) in enumerate(found):
        wide = (name, i) == ("flash_dkv_kernel", 25)  # of heads 192 wide: dk and dv take all registers
        fits(name, used, spilled=136 if wide else 0)
        assert used["wgmma"] >= MATMULS.get(name, 0) and used["setmaxnreg"] == 0
    casting = [used for name, used in found if name == "quantise_kernel"]
    for i, used in enumerate(casting):
        width, num_warps = ((64, 8), (128, 8), (128, 16))[i % 3]  # one scale, blocks, tiles
        moves = 128 * width // (32 * num_warps) // 8  # of 8 numbers of 16 bits, or 16 of 8 bits in two copies
        assert used["casts"] == [sorted(CASTS)[i // 3]] and used["nan"], "a NaN is not clamped away"
        assert used["loads"] == used["stores"] == moves and used["threads"] == 32 * num_warps and used["REG"] <= 128
