"""A GPU primer: one matmul in seven kernels, each faster than the last by one idea, and one GELU in five ways.

A GPU has 100 to 150 processors (SMs), each with four tensor cores, and one memory that all of them share. An H200 does
989e12 operations a second in bf16 and moves 4.8e12 bytes, so it waits for memory unless it does 206 with every byte. A
bf16 matmul of n x n has n/3 operations for a byte, if each byte comes once. A simple kernel asks for each n times. The
ladder is about asking less, and about asking before one needs it. C = A B, A is M x K, B is K x N, all row-major:

                   a program computes ...                and what it reads, in steps of k
                                      N
    uncoalesced    a piece of a column of C              ┌ ─ ─ B ─ ─ ┐      32 threads read one below the other in A:
                                                         │     █     │      32 sectors of 32 bytes, each for one element
    coalesced      a piece of a row of C                 │     █     │      32 threads read side by side in B:
                                                         └ ─ ─ ─ ─ ─ ┘      2 sectors, used whole
    tiled          a tile, BM x BN                  ┌ A ┐┌ ─ ─ C ─ ─ ┐      each element of A serves BN columns, each of
                                                    │███││     █     │      B serves BM rows, on tensor cores
    grouped        a larger tile, in an order       │   ││           │      programs that run at once share rows and
                   that walks down GROUP tiles      └ ─ ┘└ ─ ─ ─ ─ ─ ┘      columns, and find them in the L2 cache
    masked         a tile that may hang over an edge: threads beyond it take part, and touch nothing; nobody branches
    pipelined      the same; the next steps' tiles are being loaded while tensor cores multiply this one's
    persistent     many tiles, one after the other, as many programs as SMs; a copy engine (TMA) fetches whole tiles

Time is at least max(FLOPs / peak, bytes / bandwidth), the roofline, with a roof for memory and one for the L1 caches,
which answer 128 bytes a clock and SM to whatever is asked for. FLOPs are 2 M N K. Bytes, for elements of e:

    asked for      uncoalesced: 32 bytes a thread for A, and 32 a warp for B;  coalesced: 32 a warp for A, e a thread
                   for B;  from tiled on: e (M K ceil(N/BN) + K N ceil(M/BM) + M N)
    from memory    L2 serves what the programs of one wave share: for R different rows and S different columns of tiles
                   in a wave, e K (R BM + S BN), summed over waves, and e M N for C. For a wave of W square tiles the
                   least is R = S = sqrt(W); in row-major order it is R = 1, S = W. That is why one groups.

GELU, the tanh form: y = x/2 (1 + tanh z/2) = x / (1 + exp(-z)), z = sqrt(8/pi) (x + 0.044715 x^3). It has nine
operations for 8 bytes of fp32, so nothing but bytes counts: 8 if fused, 64 if every operation reads and writes.

Sources: Hwu, Kirk & El Hajj, Programming Massively Parallel Processors (coalescing, tiling, coarsening, divergence);
Williams et al. 2009 (roofline); Tillet et al. 2019, and Triton's tutorials 03 and 09 (grouping, persistence);
Hendrycks & Gimpel 2016 (GELU). Data sheets of NVIDIA. Shapes: BM, BN, BK of a tile; i, j its indices.
"""
import math
import os
import shutil
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read where kernels are defined: they are run by Python then

import triton
import triton.language as tl

Tensor = torch.Tensor
SECTOR, WARP = 32, 32  # bytes that memory moves at least; threads that execute one instruction together
L2_BYTES = 50 << 20  # of H100 and H200


class Card(NamedTuple):
    """Peaks a second, from the data sheet."""
    tensor: float  # FLOPs of tensor cores, in bf16, dense
    fma: float  # FLOPs without them, in fp32
    memory: float  # bytes
    l1: float  # bytes: SMs x 128 x clock, the highest


CARDS = {"H200": Card(989e12, 67e12, 4.8e12, 132 * 128 * 1.98e9),
         "H100": Card(989e12, 67e12, 3.35e12, 132 * 128 * 1.98e9)}  # both SXM


def place(program, tiles_m, tiles_n, GROUP):
    """Which tile (i, j) of tiles_m x tiles_n a program computes: down GROUP tiles, then the next column of them.

    GROUP = 1 is row-major order, GROUP >= tiles_m is column-major. Kernels, formulas and pictures all call this.
    """
    first = program // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)  # the last group may be lower
    within = program % (GROUP * tiles_n)
    return first + within % height, within // height


placed = triton.jit(place)


# ---- the ladder -----------------------------------------------------------------------------------------------------
# a, b, c are pointers; sums are in fp32, whatever the elements are.

@triton.jit
def uncoalesced(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    i, col = placed(tl.program_id(0), M // BM, N, GROUP)
    rows = i * BM + tl.arange(0, BM)  # neighbouring threads: neighbouring rows, K elements apart in A and N in C
    acc = tl.full((BM,), 0.0, tl.float32)
    for k in range(K):
        acc += tl.load(a + rows * K + k).to(tl.float32) * tl.load(b + k * N + col).to(tl.float32)
    tl.store(c + rows * N + col, acc.to(c.dtype.element_ty))


@triton.jit
def coalesced(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    row, j = placed(tl.program_id(0), M, N // BN, GROUP)
    cols = j * BN + tl.arange(0, BN)  # neighbouring threads: neighbouring columns, side by side in B and in C
    acc = tl.full((BN,), 0.0, tl.float32)
    for k in range(K):
        acc += tl.load(a + row * K + k).to(tl.float32) * tl.load(b + k * N + cols).to(tl.float32)
    tl.store(c + row * N + cols, acc.to(c.dtype.element_ty))


@triton.jit
def tiled(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    """Also `grouped`, which has larger tiles, so that a thread computes more of what it reads, and GROUP > 1."""
    i, j = placed(tl.program_id(0), M // BM, N // BN, GROUP)
    rows, cols, ks = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN), tl.arange(0, BK)
    in_a, in_b = rows[:, None] * K + ks, ks[:, None] * N + cols
    acc = tl.full((BM, BN), 0.0, tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(tl.load(a + k + in_a), tl.load(b + k * N + in_b), acc)
    tl.store(c + rows[:, None] * N + cols, acc.to(c.dtype.element_ty))


@triton.jit
def masked(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    """Also `pipelined`, where num_stages - 1 loads are under way. A masked load gives 0, which adds nothing."""
    i, j = placed(tl.program_id(0), (M + BM - 1) // BM, (N + BN - 1) // BN, GROUP)
    rows, cols, ks = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN), tl.arange(0, BK)
    in_a, in_b = rows[:, None] * K + ks, ks[:, None] * N + cols
    acc = tl.full((BM, BN), 0.0, tl.float32)
    for k in range(0, K, BK):
        a_tile = tl.load(a + k + in_a, (rows[:, None] < M) & (ks < K - k), 0.0)
        b_tile = tl.load(b + k * N + in_b, (ks[:, None] < K - k) & (cols < N), 0.0)
        acc = tl.dot(a_tile, b_tile, acc)
    tl.store(c + rows[:, None] * N + cols, acc.to(c.dtype.element_ty), (rows[:, None] < M) & (cols < N))


@triton.jit
def persistent(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    """A descriptor knows a matrix' shape: one thread names a tile, and the copy engine finds and clips addresses."""
    A = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    B = tl.make_tensor_descriptor(b, [K, N], [N, 1], [BK, BN])
    C = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
    tiles_m, tiles_n = (M + BM - 1) // BM, (N + BN - 1) // BN
    # flatten: one loop over tiles and k, so that the next tile's loads are under way while this one is stored
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        i, j = placed(tile, tiles_m, tiles_n, GROUP)
        acc = tl.full((BM, BN), 0.0, tl.float32)
        for k in range(0, K, BK):
            acc = tl.dot(A.load([i * BM, k]), B.load([k, j * BN]), acc)
        C.store([i * BM, j * BN], acc.to(c.dtype.element_ty))


class Rung(NamedTuple):
    """A kernel with its settings. group: see `place`. resident: programs that an SM of sm_90 holds at once."""
    idea: str
    kernel: Callable
    tile: tuple[int, ...]  # BM, BN, BK; of the first two rungs BM, BN
    group: int
    warps: int
    stages: int = 1
    resident: int = 1

    @property
    def constants(self) -> dict[str, int]:
        return dict(zip(("BM", "BN", "BK"), self.tile), GROUP=self.group)

    @property
    def on_tensor_cores(self) -> bool:
        return len(self.tile) == 3

    def tiles(self, M: int, N: int) -> tuple[int, int]:
        return triton.cdiv(M, self.tile[0]), triton.cdiv(N, self.tile[1])


# The first two walk along the side where a tile is one element wide, and so have the same bytes from memory.
LADDER = {
    "uncoalesced": Rung("a thread an element", uncoalesced, (128, 1), 1, 4, resident=16),
    "coalesced": Rung("threads side by side read side by side", coalesced, (1, 128), 1 << 20, 4, resident=16),
    "tiled": Rung("what is read is used 64 times, by tensor cores", tiled, (64, 64, 64), 1, 4, resident=5),
    "grouped": Rung("larger tiles; neighbours in time are neighbours in C", tiled, (128, 128, 64), 16, 4, resident=2),
    "masked": Rung("any shape, without a branch", masked, (128, 128, 64), 16, 4, resident=2),
    "pipelined": Rung("loads run ahead; 8 warps share a tile", masked, (128, 256, 64), 16, 8, stages=3),
    "persistent": Rung("tiles come by TMA; no program ends", persistent, (128, 256, 64), 16, 8, stages=3)}


def check(rung: Rung, M: int, N: int, K: int, itemsize: int) -> None:
    """Raises ValueError for a shape that the rung cannot do."""
    if min(M, N, K) < 1 or max(M * K, K * N, M * N) >= 1 << 31:
        raise ValueError(f"{M} x {K} by {K} x {N}: kernels count elements in 32 bits, from 1 to 2^31 - 1 of a matrix")
    if rung.kernel is persistent and (K * itemsize % 16 or N * itemsize % 16):
        raise ValueError(f"K = {K} and N = {N}: descriptors need rows of a multiple of 16 bytes, so use multiples of "
                         f"{16 // itemsize}, or the masked rung")
    left = [f"{name} = {extent} is no multiple of {step}" for name, extent, step in zip("MNK", (M, N, K), rung.tile)
            if extent % step]
    if left and rung.kernel not in (masked, persistent):
        raise ValueError(f"{', '.join(left)}: pad, or use the masked rung")


def matmul(rung: Rung, a: Tensor, b: Tensor) -> Tensor:
    """a @ b by one kernel. a: (M, K), b: (K, N), contiguous, aligned to 16 bytes, of one dtype, which (M, N) gets too.

    In fp32 a GPU's tl.dot rounds what it multiplies to TF32. On CPU Triton's interpreter runs the kernel, provided that
    TRITON_INTERPRET=1 was set before this file was imported. It computes bf16 wrongly: ValueError, as for what `check`
    refuses.
    """
    (M, K), N = a.shape, b.shape[1]
    if b.shape[0] != K or a.dtype != b.dtype:
        raise ValueError(f"{a.dtype} {tuple(a.shape)} by {b.dtype} {tuple(b.shape)}: need (M, K) by (K, N), one dtype")
    if not all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (a, b)):
        raise ValueError("kernels read rows without gaps, that start at a multiple of 16 bytes: use clones")
    if a.dtype == torch.bfloat16 and not a.is_cuda:
        raise ValueError("Triton's interpreter computes bf16 wrongly: use fp32 or fp16 on CPU")
    check(rung, M, N, K, a.itemsize)
    c = a.new_empty(M, N)
    programs = math.prod(rung.tiles(M, N))
    if rung.kernel is persistent:
        device = a.device  # not a itself, which Triton would keep alive
        programs = min(programs, processors(device))
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))
    rung.kernel[(programs,)](a, b, c, M, N, K, **rung.constants, num_warps=rung.warps, num_stages=rung.stages)
    return c


def processors(device: torch.device) -> int:
    """SMs of a GPU; on CPU 4, few enough for a program to get several tiles of a small matrix."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


# ---- what it costs --------------------------------------------------------------------------------------------------

def sectors(stride_bytes: int) -> Counter[int]:
    """One load by a warp, thread by thread `stride_bytes` apart: for each sector, how many threads it serves."""
    return Counter(thread * stride_bytes // SECTOR for thread in range(WARP))


def bytes_asked(rung: Rung, M: int, N: int, K: int, itemsize: int) -> int:
    """Bytes that loads and stores ask the caches for: sectors, of which tiles use every byte.

    Rows are taken to be a sector long or more, and warps to be full.
    """
    tiles_m, tiles_n = rung.tiles(M, N)
    if rung.kernel is uncoalesced:  # A: a sector a thread, B: one for all threads of a warp, C: one a thread
        return M * N * K * SECTOR + M * N // WARP * K * SECTOR + M * N * SECTOR
    if rung.kernel is coalesced:
        return M * N // WARP * K * SECTOR + M * N * K * itemsize + M * N * itemsize
    return itemsize * (M * K * tiles_n + K * N * tiles_m + M * N)


def bytes_moved(rung: Rung, M: int, N: int, K: int, itemsize: int, sms: int = 132, l2_bytes: int = L2_BYTES) -> int:
    """Bytes from and to memory, if a wave's programs keep step and share in L2, and the next wave finds nothing there.

    A wave: rung.resident programs on each SM. Where L2 holds both A and B, they come once.
    """
    once = (M * K + K * N) * itemsize
    (BM, BN, *_), (tiles_m, tiles_n) = rung.tile, rung.tiles(M, N)
    tiles, read = tiles_m * tiles_n, 0
    wave = sms * rung.resident
    for start in range(0, tiles, wave):
        places = [place(program, tiles_m, tiles_n, rung.group) for program in range(start, min(start + wave, tiles))]
        rows, cols = ({place[side] for place in places} for side in (0, 1))
        read += K * itemsize * (sum(min(BM, M - i * BM) for i in rows) + sum(min(BN, N - j * BN) for j in cols))
    return (once if once <= l2_bytes else read) + M * N * itemsize


def bound(rung: Rung, M: int, N: int, K: int, itemsize: int, card: Card) -> tuple[float, str]:
    """Seconds that a rung takes at least, and the roof that it is under."""
    return max((2 * M * N * K / (card.tensor if rung.on_tensor_cores else card.fma), "compute"),
               (bytes_moved(rung, M, N, K, itemsize) / card.memory, "memory"),
               (bytes_asked(rung, M, N, K, itemsize) / card.l1, "L1"))


# ---- GELU -----------------------------------------------------------------------------------------------------------

def gelu_eager(x: Tensor) -> Tensor:
    """In torch's operations: seven, which read nine tensors and write seven, where one and one would do."""
    return x / (1 + torch.exp(-math.sqrt(8 / math.pi) * (x + 0.044715 * x ** 3)))


@triton.jit
def gelu_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, at < n)
    z = 1.5957691216057308 * v * (1 + 0.044715 * v * v)
    tl.store(y + at, v / (1 + tl.exp(-z)), at < n)


def gelu_triton(x: Tensor) -> Tensor:
    """x: fp32, any shape, contiguous."""
    y = torch.empty_like(x)
    gelu_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    return y


GELU_CUDA = """
__global__ void gelu_kernel(const float* x, float* y, long n) {
    long at = (long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < n) {  // the only branch: it splits one warp, the last
        float v = x[at];
        float z = 1.5957691216057308f * v * (1.0f + 0.044715f * v * v);
        y[at] = v / (1.0f + expf(-z));
    }
}
"""
GELU_LAUNCH = """
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

torch::Tensor gelu(torch::Tensor x) {
    TORCH_CHECK(x.is_cuda() && x.is_contiguous() && x.scalar_type() == torch::kFloat, "x: fp32, contiguous, on a GPU");
    auto y = torch::empty_like(x);
    long n = x.numel();
    gelu_kernel<<<(n + 255) / 256, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(
        x.data_ptr<float>(), y.data_ptr<float>(), n);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return y;
}
"""


def gelu_cuda() -> Callable[[Tensor], Tensor]:
    """Compiles the source above, with nvcc; takes a minute, the first time."""
    from torch.utils.cpp_extension import load_inline

    return load_inline("penteract_gelu", cpp_sources="torch::Tensor gelu(torch::Tensor x);",
                       cuda_sources=GELU_CUDA + GELU_LAUNCH, functions=["gelu"]).gelu


@cache
def gelus() -> dict[str, Callable[[Tensor], Tensor]]:
    """Every way that works here; what is missing of CUDA's tools does not stop the others."""
    ways = {"eager": gelu_eager, "F.gelu": lambda x: F.gelu(x, approximate="tanh"),
            "torch.compile": torch.compile(gelu_eager), "Triton": gelu_triton}
    if shutil.which("nvcc") and shutil.which("ninja"):
        try:
            ways["CUDA"] = gelu_cuda()
        except RuntimeError as error:  # a library or a header is not where nvcc looks
            print(f"GELU in CUDA: {error}", file=sys.stderr)
    return ways


# ---- measuring, on a GPU --------------------------------------------------------------------------------------------

class Measured(NamedTuple):
    name: str
    seconds: float
    flops: float
    bytes: float


def timed(function: Callable[..., Tensor], inputs: list[tuple[Tensor, ...]], repeats: int = 20) -> float:
    """Median seconds between events around a call. Inputs take turns, so that none is in L2 when its turn comes."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for turn in range(-3, repeats):  # the first ones compile, and warm up
        start, stop = events[max(turn, 0)]
        torch.cuda._sleep(2_000_000)  # a millisecond, in which Python gets ahead of the GPU
        start.record()
        function(*inputs[turn % len(inputs)])
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) / 1e3 for start, stop in events)


def rotated(make: Callable[[], tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """Inputs to take turns: all but any one of them are together twice as large as L2, or larger."""
    first = make()
    l2 = torch.cuda.get_device_properties(first[0].device).L2_cache_size
    return [first, *(make() for _ in range(math.ceil(2 * l2 / sum(x.nbytes for x in first))))]


def random_pair(n: int) -> tuple[Tensor, Tensor]:
    a, b = torch.randn(2, n, n, device="cuda").bfloat16()
    return a, b


def ladder(n: int, slow_n: int = 2048) -> list[Measured]:
    """Every rung on n x n x n in bf16, and torch.mm at last; n a multiple of 128. Bytes: see bytes_moved.

    slow_n: the most for rungs without tensor cores, which would take seconds.
    """
    sms, done = processors(torch.device("cuda")), []
    for name, rung in LADDER.items():
        size = n if rung.on_tensor_cores else min(n, slow_n)
        seconds = timed(partial(matmul, rung), rotated(partial(random_pair, size)))
        done.append(Measured(name, seconds, 2 * size ** 3, bytes_moved(rung, size, size, size, 2, sms)))
    seconds = timed(torch.mm, rotated(partial(random_pair, n)))
    return [*done, Measured("torch.mm", seconds, 2 * n ** 3, 3 * n ** 2 * 2)]


def elementwise(n: int) -> list[Measured]:
    """GELU of n fp32 numbers in every way; bytes are those of one pass, which is what a fused kernel moves."""
    inputs = rotated(lambda: (torch.randn(n, device="cuda"),))
    return [Measured(name, timed(way, inputs), 9 * n, 8 * n) for name, way in gelus().items()]


def profiled(function: Callable[..., Tensor], *inputs: Tensor) -> str:
    """torch.profiler's table of one call: the ten operations and kernels that took most time on the device."""
    from torch.profiler import ProfilerActivity, profile

    function(*inputs)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * inputs[0].is_cuda
    with profile(activities=activities) as profiler:
        function(*inputs)
        if inputs[0].is_cuda:
            torch.cuda.synchronize()
    by = "self_device_time_total" if inputs[0].is_cuda else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=by, row_limit=10, max_name_column_width=40)


# ---- demo: python primer.py -----------------------------------------------------------------------------------------

def draw_sectors(name: str, stride_bytes: int, itemsize: int) -> str:
    """Addresses of a warp's first threads; and a row of memory: for each sector, how many threads it serves."""
    served = sectors(stride_bytes)
    addresses = " ".join(str(thread * stride_bytes) for thread in range(5))
    strip = "".join(str(served.get(at, "·")).rjust(3) for at in range(17))
    return (f"    {name:31s} at bytes {addresses} ...\n        {strip} ...   {len(served)} sectors: "
            f"{len(served) * SECTOR:,} bytes asked for, {WARP * itemsize} used")


def draw_order(group: int, tiles: int, wave: int) -> list[str]:
    """Tiles with the numbers of their programs, the first wave in brackets; and what that wave reads."""
    number = {place(program, tiles, tiles, group): program for program in range(tiles ** 2)}
    first = [at for at, program in number.items() if program < wave]
    rows, cols = (len({at[side] for at in first}) for side in (0, 1))
    lines = ["".join(f"[{number[i, j]:2d}]" if (i, j) in first else f" {number[i, j]:2d} " for j in range(tiles))
             for i in range(tiles)]
    return [f"GROUP = {group}", *lines, f"{rows} rows + {cols} columns = {rows + cols}"]


def on_cpu(n: int = 8192) -> None:
    """Everything that can be seen without a GPU."""
    torch.manual_seed(0)
    print("There is no GPU here, so Triton's interpreter runs the kernels: what they compute, not how fast.\n")
    print("Where the 32 threads of a warp read in one load of bf16, rows of 64; a number is a sector of 32 bytes:\n")
    print(draw_sectors("uncoalesced, a[row + thread, k]", 64 * 2, 2))
    print(draw_sectors("coalesced,   b[k, col + thread]", 2, 2))
    print("\nWhich program computes which tile of 6 x 6; in brackets, 9 that run at once, and what they read:\n")
    for left, right in zip(draw_order(1, 6, 9), draw_order(3, 6, 9)):
        print(f"    {left:30s}{right}".rstrip())
    print(f"\nBytes for {n} x {n} x {n} in bf16 by formula, and the least time that an H200 could take:\n")
    for name, rung in LADDER.items():
        shape = rung, n, n, n, 2
        least, roof = bound(*shape, CARDS["H200"])
        print(f"    {name:12s} asked for {bytes_asked(*shape) / 1e9:8,.0f} GB   from memory "
              f"{bytes_moved(*shape) / 1e9:4.1f} GB   {least * 1e3:6.1f} ms ({roof})")
    print(f"    {'each once':12s} {'':21s}   from memory {3 * n * n * 2 / 1e9:4.1f} GB\n")
    print("Interpreted, beside torch.mm in fp64:\n")
    for name, rung in LADDER.items():
        small = rung._replace(tile=tuple(min(extent, 16) for extent in rung.tile))
        M, N, K = (40, 36, 28) if rung.kernel in (masked, persistent) else (32, 32, 16)
        a, b = torch.randn(M, K), torch.randn(K, N)
        worst = (matmul(small, a, b) - a.double() @ b.double()).abs().max().item()
        tile = " x ".join(map(str, small.tile))
        print(f"    {name:12s} {M} x {N} x {K}, tiles {tile:12s}  largest error {worst:.0e}")
    x = torch.randn(5000)
    worst = (gelu_triton(x) - F.gelu(x.double(), approximate="tanh")).abs().max().item()
    print(f"    {'GELU':12s} {'5,000 numbers':32s}  largest error {worst:.0e}\n")
    print("Not run: any timing or profile; bf16; GELU by torch.compile and CUDA; torch.mm beside the last rung.")


def on_gpu(n: int = 8192, numbers: int = 1 << 28) -> None:
    """Rates of everything, beside what the card can do."""
    name = torch.cuda.get_device_name()
    words = set(name.split())
    card = None if words & {"PCIe", "NVL"} else next((CARDS[word] for word in CARDS if word in words), None)
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}; medians of 20\n")
    *rows, mm = ladder(n)
    before = None
    for row in [*rows, mm]:
        rate, rung, size = row.flops / row.seconds, LADDER.get(row.name), round((row.flops / 2) ** (1 / 3))
        text = f"    {row.name:12s} n = {size:5d} {row.seconds * 1e3:9.3f} ms {rate / 1e12:7.2f} TFLOP/s"
        if card and rung:
            least, roof = bound(rung, size, size, size, 2, card)
            text += f"  {least / row.seconds:4.0%} of the bound ({roof})"
        if before and rung:
            text += f"  {rate / before:5.2f} x: {rung.idea}"
        print(text)
        before = rate
    print(f"\n    the last rung has {mm.seconds / rows[-1].seconds:.2f} of the rate of torch.mm (cuBLAS)\n")
    for row in elementwise(numbers):
        rate = row.bytes / row.seconds
        print(f"    GELU, {row.name:14s} {row.seconds * 1e3:8.3f} ms {rate / 1e9:7,.0f} GB/s, as if fused"
              + (f"  {rate / card.memory:4.0%} of the bound (memory)" if card else ""))
    if "CUDA" not in gelus():
        print("    GELU, CUDA: not run, which takes nvcc, what it links with, and ninja")
    x, (a, b) = torch.randn(numbers, device="cuda"), random_pair(n)
    for way, function in gelus().items():
        print(f"\nGELU, {way}: what took most time on the device\n\n{profiled(function, x)}")
    print(f"\nThe last rung\n\n{profiled(partial(matmul, LADDER['persistent']), a, b)}")


if __name__ == "__main__":
    on_gpu() if torch.cuda.is_available() else on_cpu()
