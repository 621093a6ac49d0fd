"""The parts of the benchmarks that need no measuring: who is compared, how tables and results are written."""
import contextlib
import io
import os
import subprocess
import sys
from unittest.mock import patch

import pytest

import bench
import bench_gpu
import config
from bench_gpu import Row

ROOT = os.path.dirname(config.__file__)


def test_a_section_is_added_once_and_then_replaced():
    first = bench_gpu.written("# Results\n\nold\n", "## One GPU", "a\nb")
    assert first == "# Results\n\nold\n\n## One GPU\n\na\nb\n"
    second = bench_gpu.written(first + "\n## More\n\nkept\n", "## One GPU", "c")
    assert second == "# Results\n\nold\n\n## One GPU\n\nc\n\n## More\n\nkept\n"


def test_a_table_has_a_line_a_row():
    lines = bench_gpu.table([Row("x", 0.0015, "3 TB/s", "torch 2.000 ms", 0.75, "1.0"), Row("y", 1.0)]).splitlines()
    assert lines[2] == "| x | 1.500 ms | 3 TB/s | torch 2.000 ms | 0.75 | 1.0 |"
    assert lines[3] == "| y | 1000.000 ms |  |  |  |  |"


@pytest.mark.parametrize("kernel, kind", [
    ("flash_forward_kernel", "attention"), ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention"),
    ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "GEMM"), ("sm90_xmma_gemm_bf16bf16_bf16f32", "GEMM"),
    ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"), ("softmax_kernel", "loss"),
    ("rms_norm_backward_kernel", "elementwise"), ("vectorized_elementwise_kernel", "elementwise")])
def test_time_is_split_by_the_names_of_kernels(kernel, kind):
    assert bench_gpu.kind_of(kernel) == kind


@pytest.mark.parametrize("size", bench_gpu.SIZES)
def test_the_sizes_that_are_trained_can_be(size):
    flags, wanted = bench_gpu.SIZES[size]
    settings = config.parse(f"--seq 4096 --dtype bf16 {flags}".split())
    assert settings.batch.seq == 4096 and settings.batch.global_batch % settings.batch.micro_batch == 0


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    done = subprocess.run([sys.executable, "bench.py", "gpu"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (2, "bench.py: gpu needs a GPU, and there is none here\n")


# ---- rows against rivals --------------------------------------------------------------------------------------------

def row(name: str, flags: list[str]) -> str:
    """What the first rank prints of a comparison of small sizes, whose times are those of one step each."""
    turns = bench.take_turns
    small = dict(CP_SEQUENCES=(256, 512), PP_TOKENS=16, EP_TOKENS=64,
                 take_turns=lambda contenders, repeats, steps: turns(contenders, 1, 1))
    with patch.multiple(bench, **small), contextlib.redirect_stdout(io.StringIO()) as printed:
        bench.BENCHES[name](flags)
    return printed.getvalue()


SMALL = "--layers 2 --hidden 32 --heads 4 --kv-heads 4 --ffn 48 --seq 32 --global-batch 4".split()


@pytest.mark.parametrize("name, ranks, rivals", [
    ("train", 1, ["transformers + fused AdamW"]), ("dp", 2, ["DistributedDataParallel"]),
    ("zero", 2, ["ZeroRedundancyOptimizer", "fully_shard"]), ("tp", 2, ["DTensor", "DTensor"]),
    ("cp", 2, ["by hand, 256 tokens", "by hand, 512 tokens"]),
    ("pp", 4, ["Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"]),
    ("ep", 2, ["ep 1"])])
def test_a_row_measures_us_and_its_rivals(pool, name, ranks, rivals):
    printed, *others = pool.run(ranks, "test_bench:row", name=name, flags=SMALL)
    assert not any(others)
    lines = [line for line in printed.splitlines() if "tokens/s" in line]
    assert [line.strip().split("  ")[0] for line in lines if "ratio 1.00" in line] == rivals
    assert all(float(line.split("ratio ")[1]) > 0 for line in lines) and len(lines) > len(rivals)
    if ranks > 1:
        sent = [float(line.split()[2]) for line in printed.splitlines() if "MB sent" in line]
        assert len(sent) == len(lines) and all(sent[:-1]) and (name == "ep") == (sent[-1] == 0)


def test_a_row_on_one_process_needs_no_ranks():
    assert row("ep", []).count("tokens/s") == 3
