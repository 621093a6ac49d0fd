"""The ladder of matmuls: what each rung computes, asks for and compiles to; GELU in Triton and CUDA.

Kernels run in Triton's interpreter, in fp32; they are compiled for sm_90 by processes of their own, which needs no GPU.
"""
import ctypes
import json
import math
import os
import re
import shutil
import subprocess
from functools import cache, partial
from itertools import product
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"  # before primer defines its kernels

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ahead import by_the_pinned_compiler, run
from exact import gpu
from triton.runtime.interpreter import InterpreterBuilder
from watch import Watch, in_order

from learn import triton_primer as primer
from learn.triton_primer import LADDER, SECTOR, WARP, Rung, bound, bytes_asked, bytes_moved, check, find_tile, matmul
from plan import machines

ANY_SHAPE = [name for name, rung in LADDER.items() if rung.kernel in primer.ANY_SHAPE]
SLOW = "uncoalesced", "coalesced", "coarsened"  # without tensor cores
U = 2.0 ** -24  # half the distance of fp32 numbers, relative


def small(name: str, *tile: int) -> Rung:
    """A rung with tiles that the interpreter gets through."""
    tile = tile or tuple(min(extent, 16) for extent in LADDER[name].tile)
    return LADDER[name]._replace(tile=tile, group=min(LADDER[name].group, 3))


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Of which fp32 adds thousands of products without rounding, in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


# ---- what rungs compute ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", LADDER)
def test_every_rung_multiplies_and_sums_in_fp32(name, dtype):
    """Any order of a sum of K products, each factor exact, is within K u / (1 - K u) of sum |a b| (Higham, 3.5), and is
    then rounded once."""
    M, N, K = (32, 32, 16) if name in SLOW else (32, 48, 64)
    a, b = torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype)
    exact, summed = a.double() @ b.double(), K * U / (1 - K * U) * (a.double().abs() @ b.double().abs())
    once = torch.finfo(dtype).eps / 2 * (exact.abs() + summed) * (dtype != torch.float32)
    assert ((matmul(small(name), a, b) - exact).abs() <= summed + once).all()


@pytest.mark.parametrize("M, N, K", [(1, 4, 4), (17, 20, 36), (33, 12, 16), (16, 48, 20), (50, 68, 4), (1, 1, 1),
                                     (5, 7, 3), (31, 17, 33)])
def test_ragged_matrices(monkeypatch, M, N, K):
    """Masked rungs need no multiple of anything, persistent ones rows of a multiple of 16 bytes. Memory around matrices
    is NaN: a load beyond an edge would show in c, a store in what surrounds it."""
    around = []

    def surrounded(*shape: int) -> torch.Tensor:
        around.append(torch.full((8192,), math.nan))
        return around[-1][1024:][:math.prod(shape)].view(shape)

    a, b = surrounded(M, K).copy_(integers(M, K)), surrounded(K, N).copy_(integers(K, N, seed=1))
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *shape, **of_triton:
                        empty(x, *shape, **of_triton) if of_triton else surrounded(*shape))
    for name in ANY_SHAPE if N % 4 == K % 4 == 0 else ("selected", "masked", "pipelined"):
        assert torch.equal(matmul(small(name), a, b), torch.mm(a, b))
        assert around[-1].isnan().sum() == 8192 - M * N


def test_what_cannot_be_multiplied_is_refused_in_a_line():
    a, b, persistent = integers(16, 16), integers(16, 16), small("persistent")
    calls = [("multiples of 8", check, LADDER["persistent"], 64, 64, 12, 2),
             ("32 bits", check, LADDER["masked"], 1 << 16, 1 << 16, 64, 2),
             ("K = 6 and N = 16: descriptors .* multiples of 4", matmul, persistent, integers(16, 6), integers(6, 16)),
             *((message, matmul, small("masked"), *operands) for message, *operands in [
                 (r"need \(M, K\) by \(K, N\)", a, integers(8, 16)), ("one dtype", a, b.half()),
                 ("without gaps", a.T, b), ("multiple of 16 bytes", integers(257)[1:].view(16, 16), b),
                 ("from 1 to 2", a[:0], b), ("wrongly: use fp32", a.bfloat16(), b.bfloat16())])]
    for rung in map(small, LADDER.keys() - ANY_SHAPE):
        for side, step in enumerate(rung.tile):
            M, N, K = (33 if i == side else 32 for i in range(3))
            calls += [(rf"^{'MNK'[side]} = 33 is no multiple of {step}: pad, or use the masked", matmul, rung,
                       integers(M, K), integers(K, N))] * (step > 1)
    for message, function, *arguments in calls:
        with pytest.raises(ValueError, match=message) as error:
            function(*arguments)
        assert "\n" not in str(error.value)


# ---- the order of programs ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("group", [1, 2, 3, 8, 1 << 20])
def test_every_tile_has_one_program(group):
    for tiles_m, tiles_n in product(range(1, 10), (1, 2, 7)):
        places = [find_tile(program, tiles_m, tiles_n, group) for program in range(tiles_m * tiles_n)]
        assert sorted(places) == [*product(range(tiles_m), range(tiles_n))]
        if group == 1:
            assert places == sorted(places)
        if group >= tiles_m:
            assert [(j, i) for i, j in places] == sorted((j, i) for i, j in places)


def test_the_order_of_many_tiles_does_not_overflow_32_bits():
    """Groups of 2^20 rows, as `coalesced` has, times 4096 columns of tiles are 2^32; so are 2^26 rows times 64."""
    rung = LADDER["coalesced"]._replace(tile=(1, 16), group=1 << 26)
    a, b = integers(2, 8), integers(8, 64 * 16, seed=1)
    assert torch.equal(matmul(rung, a, b), torch.mm(a, b))


# ---- bytes ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", LADDER)
def test_bytes_asked_for_are_those_that_the_interpreter_sees(name, dtype):
    """Its loads and stores ask for elements of tiles, but for sectors where a warp is a row."""
    rung = small(name, *{"uncoalesced": (64, 1), "coalesced": (1, 64), "coarsened": (4, 64)}.get(name, (16, 32, 8)))
    M, N, K = (40, 72, 24) if name in ANY_SHAPE else (64, 64, 16)

    def bytes_of(place_of_mask, builder, pointers, *rest, **options):
        addresses = pointers.data
        if addresses.size == 1 or addresses.ndim == 2 and addresses.shape[1] == 1:  # one for all threads
            return addresses.size * max(rung.tile) // WARP * SECTOR
        if addresses.ndim == 2:
            return np.asarray(rest[place_of_mask].data).sum() * pointers.get_element_ty().primitive_bitwidth // 8
        return sum(len(set(warp // SECTOR)) * SECTOR for warp in addresses.reshape(-1, WARP))

    with in_order((InterpreterBuilder, "create_masked_load", partial(bytes_of, 0)),  # every other load ends there
                  (InterpreterBuilder, "create_masked_store", partial(bytes_of, 1))) as asked:
        matmul(rung, torch.ones(M, K, dtype=dtype), torch.ones(K, N, dtype=dtype))
    assert sum(asked) == bytes_asked(rung, M, N, K, dtype.itemsize)


@pytest.mark.parametrize("name", LADDER)
def test_bytes_moved_are_the_rows_and_columns_that_waves_touch(name):
    rung = small(name)
    for (M, N, K), sms in product([(48, 64, 10), (50, 70, 6)], (1, 2, 5)):
        tiles_m, tiles_n = rung.tiles(M, N)
        places = [find_tile(program, tiles_m, tiles_n, rung.group) for program in range(tiles_m * tiles_n)]
        touched, wave = M * N, sms * rung.resident
        for first in range(0, len(places), wave):
            rows, cols = map(set, zip(*places[first:first + wave]))
            touched += K * sum(min(rung.tile[0], M - i * rung.tile[0]) for i in rows)
            touched += K * sum(min(rung.tile[1], N - j * rung.tile[1]) for j in cols)
        by_formula = bytes_moved(rung, M, N, K, 2, sms, l2_bytes=0)
        assert by_formula == 2 * touched >= bytes_moved(rung, M, N, K, 2, sms) == 2 * (M * K + K * N + M * N)


def test_each_step_saves_what_it_promises():
    n, e = 8192, 2
    asks = {name: bytes_asked(rung, n, n, n, e) for name, rung in LADDER.items()}
    moves = {name: bytes_moved(rung, n, n, n, e) for name, rung in LADDER.items()}
    assert moves["uncoalesced"] == moves["coalesced"]
    assert asks["uncoalesced"] == pytest.approx(33 / 3 * asks["coalesced"], rel=1e-3)  # 32 + 1 sectors; 1 + 2
    assert asks["coalesced"] - asks["coarsened"] == n ** 3 * e * 7 // 8  # of B, which is read once for 8 rows
    assert asks["coarsened"] > 10 * asks["tiled"]
    assert asks["tiled"] / asks["grouped"] == pytest.approx(2, rel=0.01)  # tiles of twice the side
    assert moves["tiled"] > 2 * moves["grouped"]
    for name in ("grouped", "pipelined", "persistent"):  # no other power of two would do better
        others = [bytes_moved(LADDER[name]._replace(group=2 ** power), n, n, n, e) for power in range(8)]
        assert moves[name] == min(others)
    assert asks["grouped"] == asks["masked"] == asks["selected"] and asks["pipelined"] == asks["persistent"]


def test_a_gpu_says_its_sms_its_clock_and_its_l2():
    properties = SimpleNamespace(multi_processor_count=78, clock_rate=1_830_000, L2_cache_size=60 << 20)
    card, rung = primer.ask_device(primer.H200, properties), LADDER["grouped"]
    assert card[:3] == (989e12, pytest.approx(78 * 128 * 2 * 1.83e9), 4.8e12)  # 128 lanes of each SM, two FLOPs
    assert card[3:] == (pytest.approx(78 * 128 * 1.83e9), 78, 60 << 20)
    slow = card._replace(memory=1.0)  # bound by memory: by what this card's waves and L2 share
    for n in (5000, 5500):  # A and B in bf16: 100 MB and 121 MB, more than 60 MiB
        assert bound(rung, n, n, n, 2, slow)[0] == bytes_moved(rung, n, n, n, 2, 78, 60 << 20)
        assert bound(rung, n, n, n, 2, slow)[0] > bytes_moved(rung, n, n, n, 2)
    assert bound(rung, 3800, 3800, 3800, 2, slow)[0] == 3 * 3800 ** 2 * 2  # 57.8 MB: they fit in 60 MiB


def test_the_roof_is_the_largest_of_three():
    rung, card = LADDER["tiled"], primer.Card(tensor=1e3, fma=1.0, memory=1e9, l1=1e9)
    assert bound(rung, 64, 64, 64, 2, card) == (2 * 64 ** 3 / 1e3, "compute")
    assert bound(rung, 64, 64, 64, 2, card._replace(memory=1.0)) == (bytes_moved(rung, 64, 64, 64, 2), "memory")
    assert bound(rung, 64, 64, 64, 2, card._replace(l1=1.0)) == (bytes_asked(rung, 64, 64, 64, 2), "L1")
    assert bound(LADDER["coalesced"], 1, 128, 64, 2, card) == (2 * 128 * 64, "compute")  # no tensor cores
    for name, card in primer.CARDS.items():
        assert card.tensor == machines.CARDS[name.lower()].bf16 * 1e12
        assert card.fma == pytest.approx(132 * 128 * 2 * 1.98e9, rel=0.01)  # SMs, fp32 lanes, an FMA, clock


# ---- what rungs compile to ------------------------------------------------------------------------------------------

AHEAD = """
import json
from learn import triton_primer as primer
from ahead import ahead

pointers, sizes = dict.fromkeys("abc", "*bf16"), dict.fromkeys("MNK", "i32")
made = {name: ahead(rung.kernel, pointers | sizes, rung.constants, num_warps=rung.warps, num_stages=rung.stages)
        for name, rung in primer.LADDER.items()}
made["GELU"] = ahead(primer.gelu_kernel, dict(x="*fp32", y="*fp32", n="i64"), dict(BLOCK=1024))
print(json.dumps(made))
"""
WGMMA, TMA, ASYNC = r"wgmma\.mma_async\S*\.f32\.bf16\.bf16", r"cp\.async\.bulk\.tensor", r"cp\.async\.c[ag]\.shared"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return json.loads(run(AHEAD, TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("ahead"))))


def test_kernels_compile_for_sm_90_without_spills_and_load_as_their_rung_promises(compiled):
    assert {(used["LOCAL"], used["STACK"]) for used in compiled.values()} == {("0", "0")}
    ptx = {name: compiled[name]["ptx"] for name in LADDER}
    for instruction, rungs in (WGMMA, LADDER.keys() - SLOW), (ASYNC, {"pipelined"}), (TMA, {"persistent"}):
        assert {name for name in LADDER if re.search(instruction, ptx[name])} == rungs
    for way in (r"global\.shared", r"shared\S*\.global"):  # c leaves as a and b come
        assert re.search(rf"{TMA}\S*\.{way}", ptx["persistent"])
    copies = re.findall(rf"{ASYNC}\S* \[.*?\], \[.*?\], (\w+)", ptx["pipelined"])
    assert copies and set(copies) == {"0x10"}  # 16 bytes at once by a thread, masked or not
    loads = dict.fromkeys(("tiled", "grouped", "masked"), "v4.b32") | dict.fromkeys(SLOW[:2], "b16")
    for name, load in loads.items():
        assert set(re.findall(r"ld\.global\S*", ptx[name])) == {f"ld.global.{load}"}


@by_the_pinned_compiler
def test_masks_add_no_branch_and_an_sm_holds_as_many_programs_as_the_formula_supposes(compiled):
    """sm_90: 64 warps, 32 programs, 65536 registers, by 8 a thread; 228 KiB shared, of which a program wastes one."""
    assert len({len(re.findall(r"\bbra\b", compiled[name]["ptx"])) for name in ("grouped", "masked")}) == 1
    for name, rung in LADDER.items():
        used, registers = compiled[name], math.ceil(int(compiled[name]["REG"]) / 8) * 8
        assert rung.resident == min(64 // rung.warps, 32, 65536 // (registers * 32 * rung.warps),
                                    (228 << 10) // (used["shared"] + 1024)), name


# ---- GELU -----------------------------------------------------------------------------------------------------------

NUMBERS = torch.cat([torch.linspace(-8, 8, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e-30])])


def assert_gelu(y: torch.Tensor) -> None:
    """Within what rounding does: z's seven roundings become |z| of them in exp(-z), which adds two, as do + and /."""
    x = NUMBERS.double()
    z = math.sqrt(8 / math.pi) * (x + 0.044715 * x ** 3)
    exact = F.gelu(x, approximate="tanh")
    # torch's own formula takes 1 + tanh, which loses all digits for small y: in fp64, 2^-52 of x
    assert ((y.double() - exact).abs() <= exact.abs() * U * (7 * z.abs() + 5) + x.abs() * 2.0 ** -52).all()


@pytest.mark.filterwarnings("ignore:overflow")  # exp(100) is inf, as it should be
def test_without_nvcc_gelu_has_four_versions_of_one_function(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    versions = primer.gelus.__wrapped__()
    assert [*versions] == ["eager", "F.gelu", "torch.compile", "Triton"]
    torch.testing.assert_close(versions.pop("F.gelu")(NUMBERS), versions["eager"](NUMBERS), rtol=1e-5, atol=1e-6)
    for version in versions.values():
        assert_gelu(version(NUMBERS))
        assert version(torch.tensor([100.0, -100.0, 0.0])).tolist() == [100, 0, 0]
        assert version(NUMBERS[:4000].view(2, 40, 50)).shape == (2, 40, 50)


def test_eager_gelu_moves_eight_times_the_bytes():
    moved = []
    with Watch(lambda function, args, kwargs, out: moved.extend(x for x in (*args, out) if torch.is_tensor(x))):
        primer.gelu_eager(NUMBERS)
    assert sum(x.nbytes for x in moved) == 64 * NUMBERS.numel()


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_cuda_gelu_compiles_for_sm_90_without_spills(tmp_path):
    (tmp_path / "gelu.cu").write_text(primer.GELU_CUDA)
    command = ["nvcc", "-cubin", "-arch=sm_90", "-Xptxas", "-v", "-o", tmp_path / "out", tmp_path / "gelu.cu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_cuda_gelu_computes_gelu_when_a_cpu_plays_every_thread(tmp_path):
    (tmp_path / "gelu.cpp").write_text("""
        #include <cmath>
        #define __global__
        static struct { long x; } blockIdx, blockDim, threadIdx;
        """ + primer.GELU_CUDA + """
        extern "C" void run(const float* x, float* y, long n) {
            blockDim.x = 256;
            for (blockIdx.x = 0; blockIdx.x < (n + 255) / 256; blockIdx.x++)
                for (threadIdx.x = 0; threadIdx.x < 256; threadIdx.x++) gelu_kernel(x, y, n);
        }""")
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", tmp_path / "gelu.so", tmp_path / "gelu.cpp"], check=True)
    y = torch.full((NUMBERS.numel() + 256,), math.nan)
    ctypes.CDLL(tmp_path / "gelu.so").run(*(ctypes.c_void_p(x.data_ptr()) for x in (NUMBERS, y)),
                                          ctypes.c_long(NUMBERS.numel()))
    assert_gelu(y[:NUMBERS.numel()])
    assert y[NUMBERS.numel():].isnan().all()


# ---- the demo, and what only a GPU can show -------------------------------------------------------------------------

def test_the_demo_shows_what_there_is_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(primer, "bytes_moved", cache(bytes_moved))
    primer.show_on_cpu()
    out = capsys.readouterr().out
    words = ["32 sectors: 1,024 bytes asked for, 64 used", f" 16 16{15 * '  ·'} ...   2 sectors: 64 bytes asked for",
             "[ 0][ 1][ 2][ 3][ 4][ 5]      [ 0][ 3][ 6]  9  12  15", *(f" {name:12s} asked for " for name in LADDER)]
    assert [text for text in words if text not in out] == []


@pytest.mark.parametrize("card, of_gelu", [
    ("NVIDIA H200", "   50% of the bound (memory)"), ("NVIDIA H100 80GB HBM3", "   72% of the bound (memory)"),
    ("NVIDIA H100 PCIe", "")])
def test_what_a_gpu_would_print(monkeypatch, capsys, card, of_gelu):
    """Where each rung has twice the rate of the one before, torch.mm that of the last, twice; GELU half of a H200's."""
    n, numbers = 4096, 2 ** 20

    def measure(function, inputs):
        if isinstance(function, partial):
            size, = inputs[0].args
            return 2 * size ** 3 / (2e12 * 2 ** [*LADDER.values()].index(function.args[0]))
        return 2 * n ** 3 / 1024e12 if function is torch.mm else 2 * 8 * numbers / 4.8e12

    for name, instead in dict(
            make_cold_inputs=lambda make: [make], gelus=lambda: {"eager": primer.gelu_eager}, measure_seconds=measure,
            random_pair=lambda n: (integers(8, 8), integers(8, 8))).items():
        monkeypatch.setattr(primer, name, instead)
    monkeypatch.setattr(torch, "randn", lambda *shape, device: NUMBERS)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: card)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(
        multi_processor_count=132, clock_rate=1_980_000, L2_cache_size=50 << 20))
    primer.show_on_gpu(n, numbers)
    out = capsys.readouterr().out
    for i, (line, name) in enumerate(zip(out.splitlines()[2:], LADDER)):
        assert line.startswith(f"    {name:12s} n = {2048 if name in SLOW else n:5d} ")
        assert f" {2 ** (i + 1):.2f} TFLOP/s" in line and (i == 0 or line.endswith(f"   2.00 x: {LADDER[name].idea}"))
        assert (" of the bound (" in line) == (of_gelu != "")
    assert "the last rung has 0.50 of the rate of torch.mm" in out and "GELU, CUDA: not run" in out
    assert f"2,400 GB/s, as if fused{of_gelu}\n" in out
    profile = out[out.index("GELU, eager: what takes most time"):out.index("The last rung")]
    assert all(f"aten::{name}" in profile for name in ("pow", "exp", "div"))


@gpu
def test_compiled_rungs_multiply_in_bf16_and_every_gelu_agrees():
    run("""
import torch
from learn import triton_primer as primer
for name, rung in primer.LADDER.items():
    any_shape = rung.kernel in primer.ANY_SHAPE
    for M, N, K in [(512, 768, 256)] + [(1000, 520, 264), (17, 8, 72)] * any_shape:
        a, b = (torch.randint(-8, 9, shape, device="cuda").bfloat16() for shape in ((M, K), (K, N)))
        exact = (a.double() @ b.double()).bfloat16()  # sums are exact in fp32, and rounded once
        assert torch.equal(primer.matmul(rung, a, b), exact), (name, M, N, K)
x = torch.linspace(-8, 8, 100001, device="cuda")
exact = torch.nn.functional.gelu(x.double(), approximate="tanh")
for name, way in primer.gelus().items():
    torch.testing.assert_close(way(x).double(), exact, rtol=0, atol=8 * 2.0 ** -22, msg=name)  # four roundings of 8
    assert "CUDA" in primer.format_profile(way, x)
""")


@gpu
@pytest.mark.timing
def test_the_ladder_climbs_to_torch_mm():
    rows = json.loads(run("import json; from learn import gpu; print(json.dumps(triton_primer.measure_ladder(8192)))"))
    rate = {name: size ** 3 / seconds for name, (size, seconds) in rows.items()}
    assert rate["coalesced"] > 2 * rate["uncoalesced"] and rate["tiled"] > 5 * rate["coalesced"]
    assert rate["pipelined"] > rate["tiled"] and rate["persistent"] > 0.92 * rate["torch.mm"]
