"""The parts of the benchmarks that need no measuring: who is compared, how tables and results are written."""
import os
import subprocess
import sys

import pytest

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
