"""A GPU primer: a crash course in Triton, with a matmul in nine kernels and GELU in five versions.

Read it before kernels.py and flash.py: each of the nine kernels adds one idea on which these files
rely. `python -m learn.triton_primer` shows the bytes that each kernel reads and, on a GPU, its
speed.

A GPU has 100 to 150 processors (SMs), each with four tensor cores, and one memory for all of them.
An H200 does 989e12 bf16 operations per second and moves 4.8e12 bytes, so it waits for memory unless
it does 206 operations per byte. A bf16 matmul of n x n has n/3 operations per byte if each byte is
moved once, but a simple kernel asks for each byte n times. The kernels form a ladder. Its first
rungs ask for fewer bytes, and its last ones ask for bytes before they need them. All matrices are
row-major: C = A B, A is M x K, B is K x N.

                   a program computes           what is new
    uncoalesced    a piece of a column of C     32 threads read one below the other in A: 32 sectors of 32 bytes. Only
                                                one element of each sector is used
    coalesced      a piece of a row of C        32 threads read side by side in B: 2 sectors, fully used
    coarsened      BM pieces of rows of C       a thread computes BM elements, and uses each element of B BM times
    tiled          a tile of C, BM x BN         an element of A serves BN columns, one of B serves BM rows; tensor cores
    grouped        a larger tile                the order of programs walks down GROUP tiles. Programs that run at the
                                                same time share rows and columns, which they find in the L2 cache
    selected       a tile, also at an edge      threads beyond an edge load an element but use 0 instead. As in a warp
                                                whose threads diverge, both sides of the choice are executed
    masked         the same                     threads beyond an edge load nothing: one path for all, without a branch
    pipelined      the same                     the next tiles are loaded while tensor cores multiply the current ones
    persistent     many tiles in turn           one program per SM; a copy engine (TMA) loads and stores whole tiles

Time is at least max(FLOPs / peak, bytes / bandwidth), the roofline. FLOPs are 2 M N K. There is one bandwidth for
memory and one for the L1 caches, 128 bytes per clock and SM. Bytes, for elements of e bytes:

    asked of L1    uncoalesced: 32 per thread for A, 32 per warp for B;  coalesced: 32 per warp for A, e per thread for
                   B;  coarsened: of B a BM-th;  from tiled on: e (M K ceil(N/BN) + K N ceil(M/BM) + M N), selected
                   with M, N and K of A and B rounded up to tiles
    from memory    programs of one wave (those that run at once) share what is in L2. With R different rows and S
                   different columns of tiles in a wave: e K (R BM + S BN), summed over waves, and e M N for C. For W
                   square tiles the least is R = S = sqrt(W); row-major order has R = 1, S = W. Hence the groups.

GELU, the tanh form: y = x/2 (1 + tanh z/2) = x / (1 + exp(-z)), z = sqrt(8/pi) (x + 0.044715 x^3).
It has nine operations for 8 bytes of fp32, so it is bound by memory. It moves 8 bytes per element
if fused, and 64 if every operation reads and writes memory.

Sources: Hwu, Kirk & El Hajj, Programming Massively Parallel Processors (coalescing, tiling, coarsening, divergence);
Williams et al. 2009 (roofline); Tillet et al. 2019, and Triton's tutorials 03 and 09 (grouping, persistence);
Hendrycks & Gimpel 2016 (GELU). Data sheets of NVIDIA. Shapes: BM, BN, BK of a tile; i, j its indices.
"""
import math
import shutil
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from core.collectives import run_demo

SECTOR = 32  # bytes, the least that memory moves
WARP = 32  # threads that execute one instruction together


class Card(NamedTuple):
    """Peaks per second, SMs and L2, from the data sheet. `ask_device` replaces the values that a
    GPU reports itself."""
    tensor: float  # FLOPs of tensor cores, in bf16, dense
    fma: float  # FLOPs without them, in fp32: SMs x 128 lanes x 2 x clock, the highest
    memory: float  # bytes
    l1: float  # bytes: SMs x 128 x clock
    sms: int = 132
    l2_bytes: int = 50 << 20


def ask_device(card: Card, properties) -> Card:
    """properties: torch.cuda.get_device_properties."""
    sms, clock = properties.multi_processor_count, properties.clock_rate * 1e3  # torch has the highest clock, in kHz
    return card._replace(fma=sms * 256 * clock, l1=sms * 128 * clock, sms=sms, l2_bytes=properties.L2_cache_size)


H200 = Card(tensor=989e12, fma=67e12, memory=4.8e12, l1=132 * 128 * 1.98e9)
CARDS = {"H200": H200, "H100": H200._replace(memory=3.35e12)}  # both SXM


def find_tile(program, tiles_m, tiles_n, GROUP):
    """The tile (i, j), of tiles_m x tiles_n, that a program computes: down GROUP tiles, then the next column of them.

    GROUP = 1 is row-major order, GROUP >= tiles_m is column-major. Kernels, formulas and pictures all call this.
    """
    first = program // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)  # the last group may be lower
    within = program % (GROUP * tiles_n)
    return first + within % height, within // height


find_tile_jit = triton.jit(find_tile)


# ---- the ladder -----------------------------------------------------------------------------------------------------
# a, b, c are pointers. Sums are in fp32, for elements of any dtype.

@triton.jit
def uncoalesced(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    i, col = find_tile_jit(tl.program_id(0), M // BM, N, GROUP)
    rows = i * BM + tl.arange(0, BM)  # one per thread: neighbours are K elements apart in A, and N in C
    acc = tl.full((BM,), 0.0, tl.float32)
    for k in range(K):
        acc += tl.load(a + rows * K + k).to(tl.float32) * tl.load(b + k * N + col).to(tl.float32)
    tl.store(c + rows * N + col, acc.to(c.dtype.element_ty))


@triton.jit
def coalesced(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    row, j = find_tile_jit(tl.program_id(0), M, N // BN, GROUP)
    cols = j * BN + tl.arange(0, BN)  # one per thread: neighbours are contiguous in B and in C
    acc = tl.full((BN,), 0.0, tl.float32)
    for k in range(K):
        acc += tl.load(a + row * K + k).to(tl.float32) * tl.load(b + k * N + cols).to(tl.float32)
    tl.store(c + row * N + cols, acc.to(c.dtype.element_ty))


@triton.jit
def coarsened(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    i, j = find_tile_jit(tl.program_id(0), M // BM, N // BN, GROUP)
    rows, cols = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN)  # a thread has one column, and all of the rows
    acc = tl.full((BM, BN), 0.0, tl.float32)
    for k in range(K):
        acc += tl.load(a + rows[:, None] * K + k).to(tl.float32) * tl.load(b + k * N + cols).to(tl.float32)
    tl.store(c + rows[:, None] * N + cols, acc.to(c.dtype.element_ty))


@triton.jit
def tiled(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    """Also the `grouped` rung, with GROUP > 1 and larger tiles, so that a thread computes more with
    each byte that it reads."""
    i, j = find_tile_jit(tl.program_id(0), M // BM, N // BN, GROUP)
    rows, cols, ks = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN), tl.arange(0, BK)
    in_a, in_b = rows[:, None] * K + ks, ks[:, None] * N + cols
    acc = tl.full((BM, BN), 0.0, tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(tl.load(a + k + in_a), tl.load(b + k * N + in_b), acc)
    tl.store(c + rows[:, None] * N + cols, acc.to(c.dtype.element_ty))


@triton.jit
def selected(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    """Every thread loads an element. Beyond an edge it loads the last one again, and 0 is used
    instead."""
    i, j = find_tile_jit(tl.program_id(0), (M + BM - 1) // BM, (N + BN - 1) // BN, GROUP)
    rows, cols, ks = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.full((BM, BN), 0.0, tl.float32)
    for k in range(0, K, BK):
        at = tl.minimum(k + ks, K - 1)
        a_tile = tl.load(a + tl.minimum(rows, M - 1)[:, None] * K + at)
        b_tile = tl.load(b + at[:, None] * N + tl.minimum(cols, N - 1))
        acc = tl.dot(tl.where((rows[:, None] < M) & (ks < K - k), a_tile, 0.0).to(a.dtype.element_ty),
                     tl.where((ks[:, None] < K - k) & (cols < N), b_tile, 0.0).to(b.dtype.element_ty), acc)
    tl.store(c + rows[:, None] * N + cols, acc.to(c.dtype.element_ty), (rows[:, None] < M) & (cols < N))


@triton.jit
def masked(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    """Also the `pipelined` rung, in which num_stages - 1 loads are in flight. A masked load gives
    0, which adds nothing."""
    i, j = find_tile_jit(tl.program_id(0), (M + BM - 1) // BM, (N + BN - 1) // BN, GROUP)
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
    """A descriptor holds the shape of a matrix. One thread names a tile, and the copy engine
    computes and clips addresses."""
    A = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    B = tl.make_tensor_descriptor(b, [K, N], [N, 1], [BK, BN])
    C = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
    tiles_m, tiles_n = (M + BM - 1) // BM, (N + BN - 1) // BN
    # flatten: one loop over tiles and k, so that the next tile's loads are in flight while this one
    # is stored
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        i, j = find_tile_jit(tile, tiles_m, tiles_n, GROUP)
        acc = tl.full((BM, BN), 0.0, tl.float32)
        for k in range(0, K, BK):
            acc = tl.dot(A.load([i * BM, k]), B.load([k, j * BN]), acc)
        C.store([i * BM, j * BN], acc.to(c.dtype.element_ty))


class Rung(NamedTuple):
    """A kernel with its settings. group: see `find_tile`. resident: programs that run on an SM of sm_90 at once."""
    idea: str
    kernel: Callable
    tile: tuple[int, ...]  # BM, BN, BK; BM, BN of the first three rungs
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


ANY_SHAPE = selected, masked, persistent
# The first two walk along the side on which a tile is one element wide, so they read the same bytes
# from memory.
LADDER = {
    "uncoalesced": Rung("one thread per element", uncoalesced, (128, 1), 1, 4, resident=16),
    "coalesced": Rung("neighbouring threads read neighbours", coalesced, (1, 128), 1 << 20, 4, resident=16),
    "coarsened": Rung("a thread uses an element 8 times", coarsened, (8, 128), 1, 4, resident=16),
    "tiled": Rung("each element read is used 64 times, by tensor cores", tiled, (64, 64, 64), 1, 4, resident=5),
    "grouped": Rung("larger tiles; neighbours in time are neighbours in C", tiled, (128, 128, 64), 16, 4, resident=2),
    "selected": Rung("any shape, by executing both sides", selected, (128, 128, 64), 16, 8, resident=1),
    "masked": Rung("any shape, without a branch", masked, (128, 128, 64), 16, 4, resident=2),
    "pipelined": Rung("loads run ahead; 8 warps share a tile", masked, (128, 256, 64), 16, 8, stages=3),
    "persistent": Rung("tiles are loaded by TMA; no program ends", persistent, (128, 256, 64), 16, 8, stages=3)}


def check(rung: Rung, M: int, N: int, K: int, itemsize: int) -> None:
    """Raise ValueError for a shape that the rung cannot multiply."""
    if min(M, N, K) < 1 or max(M * K, K * N, M * N) >= 1 << 31:
        raise ValueError(f"{M} x {K} by {K} x {N}: kernels count elements in 32 bits, from 1 to 2^31 - 1 of a matrix")
    if rung.kernel is persistent and (K * itemsize % 16 or N * itemsize % 16):
        raise ValueError(f"K = {K} and N = {N}: descriptors need rows of a multiple of 16 bytes, so use multiples of "
                         f"{16 // itemsize}, or the masked rung")
    left = [f"{name} = {extent} is no multiple of {step}" for name, extent, step in zip("MNK", (M, N, K), rung.tile)
            if extent % step]
    if left and rung.kernel not in ANY_SHAPE:
        raise ValueError(f"{', '.join(left)}: pad, or use the masked rung")


def matmul(rung: Rung, a: Tensor, b: Tensor) -> Tensor:
    """a @ b by one kernel: [M, K], [K, N] -> [M, N], all of one dtype; a, b contiguous and aligned to 16 bytes.

    On a GPU tl.dot rounds fp32 factors to TF32. On a CPU Triton's interpreter runs the kernel, if TRITON_INTERPRET=1
    was set before this file was imported. Raises ValueError for bf16 on a CPU, and for shapes that `check` refuses.
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
    tiles_m, tiles_n = rung.tiles(M, N)
    programs = tiles_m * tiles_n
    group = min(rung.group, triton.next_power_of_2(tiles_m))  # the same order; 2^20 * tiles_n could overflow int32
    constants = rung.constants | dict(GROUP=group)
    if rung.kernel is persistent:
        device = a.device  # the allocator must not refer to `a`: Triton would keep it alive
        # On a CPU there are so few programs that each gets several tiles, even of a small matrix.
        on_gpu = device.type == "cuda"
        programs = min(programs, torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 4)
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))
    rung.kernel[(programs,)](a, b, c, M, N, K, **constants, num_warps=rung.warps, num_stages=rung.stages)
    return c


# ---- costs by formula -----------------------------------------------------------------------------------------------

def sectors(stride_bytes: int) -> Counter[int]:
    """Return how many threads each sector serves, in one load by a warp whose threads read
    `stride_bytes` apart."""
    return Counter(thread * stride_bytes // SECTOR for thread in range(WARP))


def bytes_asked(rung: Rung, M: int, N: int, K: int, itemsize: int) -> int:
    """Return the bytes that loads and stores ask of the L1 caches, in sectors.

    Rows must be at least one sector long, and warps full.
    """
    tiles_m, tiles_n = rung.tiles(M, N)
    if rung.kernel is uncoalesced:  # a sector per thread of A, one per warp of B, one per thread of C
        return M * N * K * SECTOR + M * N // WARP * K * SECTOR + M * N * SECTOR
    if rung.kernel is coalesced:
        return M * N // WARP * K * SECTOR + M * N * K * itemsize + M * N * itemsize
    if rung.kernel is coarsened:
        return M * N // WARP * K * SECTOR + M * N * K * itemsize // rung.tile[0] + M * N * itemsize
    if rung.kernel is selected:
        BM, BN, BK = rung.tile
        depth = triton.cdiv(K, BK) * BK
        return itemsize * (depth * tiles_m * tiles_n * (BM + BN) + M * N)
    return itemsize * (M * K * tiles_n + K * N * tiles_m + M * N)


def bytes_moved(rung: Rung, M: int, N: int, K: int, itemsize: int, sms: int = H200.sms,
                l2_bytes: int = H200.l2_bytes) -> int:
    """Return the bytes from and to memory.

    A and B are read once if L2 holds both. If not, programs are assumed to share reads within a
    wave, but not between waves. A wave is rung.resident programs on each SM.
    """
    operands, result = (M * K + K * N) * itemsize, M * N * itemsize
    if operands <= l2_bytes:
        return operands + result
    BM, BN, *_ = rung.tile
    tiles_m, tiles_n = rung.tiles(M, N)
    wave = sms * rung.resident
    lengths = 0
    for start in range(0, tiles_m * tiles_n, wave):
        programs = range(start, min(start + wave, tiles_m * tiles_n))
        rows, cols = map(set, zip(*(find_tile(program, tiles_m, tiles_n, rung.group) for program in programs)))
        lengths += sum(min(BM, M - i * BM) for i in rows) + sum(min(BN, N - j * BN) for j in cols)
    return lengths * K * itemsize + result


def bound(rung: Rung, M: int, N: int, K: int, itemsize: int, card: Card) -> tuple[float, str]:
    """Return the least seconds that a rung can take on a card, and the bound: "compute", "memory"
    or "L1"."""
    return max((2 * M * N * K / (card.tensor if rung.on_tensor_cores else card.fma), "compute"),
               (bytes_moved(rung, M, N, K, itemsize, card.sms, card.l2_bytes) / card.memory, "memory"),
               (bytes_asked(rung, M, N, K, itemsize) / card.l1, "L1"))


# ---- GELU -----------------------------------------------------------------------------------------------------------

def gelu_eager(x: Tensor) -> Tensor:
    """Compute GELU by seven operations of torch, which read nine tensors and write seven. A fused
    kernel reads one and writes one."""
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
    """Compile the source above with nvcc, which takes a minute the first time."""
    from torch.utils.cpp_extension import load_inline

    return load_inline("penteract_gelu", cpp_sources="torch::Tensor gelu(torch::Tensor x);",
                       cuda_sources=GELU_CUDA + GELU_LAUNCH, functions=["gelu"]).gelu


@cache
def gelus() -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the versions of GELU by name. The CUDA version needs nvcc and ninja, with their own
    requirements."""
    versions = {"eager": gelu_eager, "F.gelu": lambda x: F.gelu(x, approximate="tanh"),
                "torch.compile": torch.compile(gelu_eager), "Triton": gelu_triton}
    if shutil.which("nvcc") and shutil.which("ninja"):
        try:
            versions["CUDA"] = gelu_cuda()
        except RuntimeError as error:  # a library or a header is not where nvcc looks
            print(f"GELU in CUDA: {error}", file=sys.stderr)
    return versions


# ---- measuring, on a GPU --------------------------------------------------------------------------------------------

def measure_seconds(function: Callable[..., Tensor], inputs: list[tuple[Tensor, ...]], repeats: int = 20) -> float:
    """Return the median seconds between events around a call. `inputs` take turns, so that none is
    still in L2 at its turn."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for turn in range(-3, repeats):  # the first three compile and warm up
        start, stop = events[max(turn, 0)]
        torch.cuda._sleep(2_000_000)  # a millisecond, so that Python gets ahead of the GPU
        start.record()
        function(*inputs[turn % len(inputs)])
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) / 1e3 for start, stop in events)


def make_cold_inputs(make: Callable[[], tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """Make enough inputs for measure_seconds that, between two uses of one, the others fill L2
    twice."""
    first = make()
    l2 = torch.cuda.get_device_properties(first[0].device).L2_cache_size
    return [first, *(make() for _ in range(math.ceil(2 * l2 / sum(x.nbytes for x in first))))]


def random_pair(n: int) -> tuple[Tensor, Tensor]:
    a, b = torch.randn(2, n, n, device="cuda").bfloat16()
    return a, b


def measure_ladder(n: int, slow_n: int = 2048) -> dict[str, tuple[int, float]]:
    """rung -> (size, seconds) of size x size x size in bf16, torch.mm last; n is a multiple of 128.

    slow_n: the largest size for rungs without tensor cores, which would take seconds.
    """
    measured = {}
    for name, rung in LADDER.items():
        size = n if rung.on_tensor_cores else min(n, slow_n)
        inputs = make_cold_inputs(partial(random_pair, size))
        measured[name] = size, measure_seconds(partial(matmul, rung), inputs)
    return measured | {"torch.mm": (n, measure_seconds(torch.mm, inputs))}


def measure_gelus(n: int) -> dict[str, float]:
    """version -> seconds of GELU of n fp32 numbers."""
    inputs = make_cold_inputs(lambda: (torch.randn(n, device="cuda"),))
    return {name: measure_seconds(gelu, inputs) for name, gelu in gelus().items()}


def format_profile(function: Callable[..., Tensor], *inputs: Tensor) -> str:
    """Return torch.profiler's table of one call: the ten operations and kernels with the most time
    on the device."""
    from torch.profiler import ProfilerActivity, profile

    function(*inputs)
    on_gpu = inputs[0].is_cuda
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu) as profiler:
        function(*inputs)
        if on_gpu:
            torch.cuda.synchronize()
    by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=by, row_limit=10, max_name_column_width=40)


# ---- demo: python -m learn.triton_primer ----------------------------------------------------------------------------

def draw_sectors(name: str, stride_bytes: int, itemsize: int) -> str:
    """Draw the addresses that a warp's first threads read, and below them how many threads each
    sector serves."""
    served = sectors(stride_bytes)
    addresses = " ".join(str(thread * stride_bytes) for thread in range(5))
    strip = "".join(str(served.get(sector, "·")).rjust(3) for sector in range(17))
    return (f"    {name:31s} at bytes {addresses} ...\n        {strip} ...   {len(served)} sectors: "
            f"{len(served) * SECTOR:,} bytes asked for, {WARP * itemsize} used")


def draw_order(group: int, tiles: int, wave: int) -> list[str]:
    """Draw the tiles with the numbers of their programs, and count what the first wave (in
    brackets) reads."""
    number = {find_tile(program, tiles, tiles, group): program for program in range(tiles ** 2)}
    rows, cols = map(set, zip(*(tile for tile, program in number.items() if program < wave)))
    lines = [f"GROUP = {group}"]
    for i in range(tiles):
        row = [number[i, j] for j in range(tiles)]
        lines.append("".join(f"[{program:2d}]" if program < wave else f" {program:2d} " for program in row))
    return [*lines, f"{len(rows)} rows + {len(cols)} columns = {len(rows) + len(cols)}"]


def show_on_cpu(n: int = 8192) -> None:
    """Print what formulas give without a GPU: the bytes that the rungs read, and bounds of their
    times."""
    print("Where the 32 threads of a warp read in one load of bf16, rows of 64; a number is a sector of 32 bytes:\n")
    print(draw_sectors("uncoalesced, a[row + thread, k]", 64 * 2, 2))
    print(draw_sectors("coalesced,   b[k, col + thread]", 2, 2))
    print("\nWhich program computes which tile of 6 x 6; in brackets, 9 that run at once, and what they read:\n")
    for left, right in zip(draw_order(1, 6, 9), draw_order(3, 6, 9)):
        print(f"    {left:30s}{right}".rstrip())
    print(f"\nBytes for {n} x {n} x {n} in bf16 by formula, and the least time that an H200 could take:\n")
    for name, rung in LADDER.items():
        shape = rung, n, n, n, 2
        least, roof = bound(*shape, H200)
        print(f"    {name:12s} asked for {bytes_asked(*shape) / 1e9:8,.0f} GB   from memory "
              f"{bytes_moved(*shape, H200.sms, H200.l2_bytes) / 1e9:4.1f} GB   {least * 1e3:6.1f} ms ({roof})")
    print(f"    A, B and C once                      from memory {3 * n * n * 2 / 1e9:4.1f} GB\n")
    print("Not run: any timing or profile, which need a GPU. tests/test_primer.py interprets the kernels on a CPU.")


def show_on_gpu(n: int = 8192, numbers: int = 1 << 28) -> None:
    """Print measured speeds, compared with the limits of the card."""
    name = torch.cuda.get_device_name()
    words = set(name.split())
    card = None if words & {"PCIe", "NVL"} else next((CARDS[word] for word in CARDS if word in words), None)
    card = card and ask_device(card, torch.cuda.get_device_properties(0))
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}; medians of 20\n")
    before, measured = 0.0, measure_ladder(n)
    for name, (size, seconds) in measured.items():
        rate, rung = 2 * size ** 3 / seconds, LADDER.get(name)
        text = f"    {name:12s} n = {size:5d} {seconds * 1e3:9.3f} ms {rate / 1e12:7.2f} TFLOP/s"
        if card and rung:
            least, roof = bound(rung, size, size, size, 2, card)
            text += f"  {least / seconds:4.0%} of the bound ({roof})"
        if before and rung:
            text += f"  {rate / before:5.2f} x: {rung.idea}"
        print(text)
        before = rate
    print(f"\n    the last rung has {measured['torch.mm'][1] / measured['persistent'][1]:.2f} of the rate of torch.mm "
          "(cuBLAS)\n")
    for name, seconds in measure_gelus(numbers).items():
        rate = 8 * numbers / seconds  # bytes that a fused kernel moves
        print(f"    GELU, {name:14s} {seconds * 1e3:8.3f} ms {rate / 1e9:7,.0f} GB/s, as if fused"
              + (f"  {rate / card.memory:4.0%} of the bound (memory)" if card else ""))
    if "CUDA" not in gelus():
        print("    GELU, CUDA: not run, since it needs nvcc, what it links with, and ninja")
    x = torch.randn(numbers, device="cuda")
    for name, gelu in gelus().items():
        print(f"\nGELU, {name}: what takes most time on the device\n\n{format_profile(gelu, x)}")
    print(f"\nThe last rung\n\n{format_profile(partial(matmul, LADDER['persistent']), *random_pair(n))}")


if __name__ == "__main__":
    run_demo(lambda group: show_on_gpu() if torch.cuda.is_available() else show_on_cpu())
