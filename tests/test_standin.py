"""What a GPU is given in a step: launches, streams, waits and memory, by a stand-in for CUDA, cuBLAS and NCCL.

torch's CUDA build with its allocator and ProcessGroupNCCL, Triton and train.py are the real ones; what they call is
written down and computes nothing (data/standin.c). This file is also the program that trains, as rank 0.
PENTERACT_CUDA_PYTHON names the Python that runs it, with torch for CUDA 13; by default the one that runs the tests.
"""
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import train
from core import collectives, rules
from core.groups import build_groups
from plan.memory import memory_of_rank
from run.dryrun import ZeroSamples

pytestmark = pytest.mark.slow
ROOT, PYTHON = Path(__file__).parent.parent, os.environ.get("PENTERACT_CUDA_PYTHON", sys.executable)
INCLUDES = "nvidia/cu13/include", "triton/backends/nvidia/include", "nvidia/nccl/include"
MODEL = "--preset llama-3.1-8b --seq-len 4096 --micro-batch 1 --dtype bf16 --layers"
MODES = {"one": (1, "--global-batch 1"), "dp": (2, "--global-batch 2 --dp 2"), "tp": (2, "--global-batch 1 --tp 2"),
         "zero 3": (4, "--global-batch 4 --dp 4 --zero 3"), "pp": (2, "--global-batch 4 --pp 2"),
         "experts": (1, "--global-batch 1 --experts 32 --top-k 4 --expert-ffn 1024"),
         "cp": (2, "--global-batch 1 --cp 2"), "ring": (2, "--global-batch 1 --cp 2 --cp-style ring"),
         "latents": (1, "--global-batch 1 --kv-heads 32 --kv-lora-rank 512 --q-lora-rank 1536 --head-dim 192 "
                        "--rope-head-dim 64 --v-head-dim 128 --recompute selective")}


def main(library: str, log: str, ranks: str, *flags: str) -> None:
    """Print the most bytes that the allocator has given out, and the host's seconds for a forward and a backward."""
    standin, device, split_group = ctypes.CDLL(library), torch.device("cuda", 0), dist.split_group

    def say(line: str, **tensors: list[torch.Tensor]) -> None:
        stores = [(how, x.untyped_storage()) for how, found in tensors.items() for x in found]
        line = " ".join([line, *(f"{how} {store.data_ptr():x} {store.nbytes():x}" for how, store in stores)])
        standin.standin_say(ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), line.encode())

    def attention(q, k, v, *_, **__):
        o = torch.empty_like(q[..., :v.shape[-1]])
        lse, empty = q.new_empty(*q.shape[:3], 1, dtype=torch.float32), q.new_empty(0)
        say("launch attention", r=[q, k, v], w=[o, lse])
        return o, lse, empty, empty, q.shape[2], k.shape[2], empty, empty, empty

    def attention_backward(do, q, k, v, o, lse, *_, **__):
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        say("launch attention_backward", r=[do, q, k, v, o, lse], w=grads)
        return grads

    def split(*, split_ranks, **options):
        ctypes.c_int.in_dll(standin, "standin_split").value = next(len(group) for group in split_ranks if 0 in group)
        return split_group(split_ranks=split_ranks, **options)

    aten, dist.split_group = torch.library.Library("aten", "IMPL"), split
    aten.impl("_scaled_dot_product_cudnn_attention", attention, "CUDA")
    aten.impl("_scaled_dot_product_cudnn_attention_backward", attention_backward, "CUDA")
    torch.autograd.set_multithreading_enabled(False)  # all in the thread whose queries of events standin.c answers
    torch.cuda.set_device(device)
    settings = rules.parse(list(flags), int(ranks))
    os.environ.update(RANK="0", WORLD_SIZE=ranks)
    collectives.world(device, store=dist.HashStore()).__enter__()  # and never left
    groups = build_groups(settings.grid, settings.model)
    model, pipeline = train.build_model(settings, groups, device), train.build_pipeline(settings, groups, device)
    optimizer, samples = train.build_optimizer(settings, model, groups), ZeroSamples(settings.batch.seq_len)

    def step() -> float:
        batches = train.local_micro_batches(samples, 0, settings.batch.global_batch, settings, groups)
        batches, began = [batch.to(device) for batch in batches], time.thread_time()
        say("mark")
        train.forward_backward(model, pipeline, optimizer, batches, groups)
        say("mark")
        seconds = time.thread_time() - began
        optimizer.step(1e-3)
        return seconds

    step(), step()  # Triton compiles, and the allocator finds out what it needs
    standin.standin_open(log.encode())
    step(), step()  # the second one reads weights that the first one's update gathers
    standin.standin_open(None)
    print(json.dumps([torch.cuda.max_memory_allocated(), min(step() for _ in range(10))]), flush=True)
    os._exit(0)  # else it would wait for ranks that do not exist


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(mode, layers) -> (lines of the log, of two steps, bytes, seconds)."""
    program = "import torch; print(torch.version.cuda, torch.__path__[0])"
    found = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True).stdout.split()
    if not shutil.which("gcc") or not found or not found[0].startswith("13."):
        pytest.skip(f"needs gcc, and in {PYTHON} torch for CUDA 13 (PENTERACT_CUDA_PYTHON)")
    folder, packages = tmp_path_factory.mktemp("standin"), Path(found[1]).parent
    library, log = folder / "libcuda.so.1", folder / "log"
    (folder / "libcuda.so").symlink_to(library)  # as Triton's linker looks for it
    headers = [header.read_text() for place in INCLUDES for header in (packages / place).rglob("*.h")]
    names = set(re.findall(r"\b(?:cu|cuda|__cuda|cublas|cublasLt|nccl)[A-Z]\w*", "".join(headers)))  # also of types
    (folder / "rest.c").write_text("".join(f"__attribute__((weak)) int {name}() {{ return 0; }}\n" for name in names))
    subprocess.run(["gcc", "-w", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library,
                    *(f"-I{packages / place}" for place in INCLUDES), ROOT / "tests/data/standin.c", folder / "rest.c"],
                   check=True)
    env = os.environ | dict(LD_PRELOAD=str(library), TRITON_LIBCUDA_PATH=str(folder), TRITON_INTERPRET="0")

    @cache
    def run(mode: str, layers: int) -> tuple[list[str], int, float]:
        ranks, flags = MODES[mode]
        words = [PYTHON, __file__, library, log, str(ranks), *f"{MODEL} {layers} {flags}".split()]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return log.read_text().splitlines(), *json.loads(done.stdout.splitlines()[-1])
    return run


class Call(NamedTuple):
    number: int
    stream: str  # "0": the one that computes
    kind: str
    name: str
    touches: list[tuple[str, int, int]]  # "r" or "w", start, stop
    after: dict[str, int]  # stream -> its last call that has ended when this one begins

    def follows(self, other: "Call") -> bool:
        return self.after.get(other.stream, -1) >= other.number


def read(lines: list[str]) -> list[Call]:
    """The calls, each with what its stream, or the host, has waited for by then."""
    calls, clocks, events = [], defaultdict(dict), defaultdict(dict)
    for number, (stream, kind, name, *touched) in enumerate(f"{line} -".split() for line in lines):
        if kind == "record":
            events[name] = dict(clocks[stream])
        elif kind in ("wait", "reached"):
            for waiting in [clocks[stream]] if kind == "wait" else clocks.values():
                waiting |= {other: max(last, waiting.get(other, -1)) for other, last in events[name].items()}
        else:
            spans = zip(touched[::3], touched[1::3], touched[2::3])
            touches = [(how, int(start, 16), int(start, 16) + int(size, 16)) for how, start, size in spans]
            calls.append(Call(number, stream, kind, name, touches, dict(clocks[stream])))
            clocks[stream][stream] = number
    return calls


def last_step(lines: list[str]) -> list[Call]:
    """Its forward and backward."""
    *_, start, end = [number for number, line in enumerate(lines) if line == "0 mark"]
    return read(lines[start:end])


def races(calls: list[Call]) -> list[tuple[str, str]]:
    """What touches the same memory on two streams, one of which writes it, in an order that no event decides."""
    return [(one.name, other.name) for i, other in enumerate(calls) for one in calls[:i]
            if one.stream != other.stream and not other.follows(one)
            for how, start, stop in one.touches for what, begin, end in other.touches
            if "w" in (how, what) and start < end and begin < stop]


# Of a layer, forward and backward. torch's own: a residual's sum; the zeros in the layer's bucket of gradients; of each
# norm's weight the sum over programs, and what adds it to the bucket; dq, dk and dv stacked.
LAUNCHES = dict(matmul=12, attention=1, attention_backward=1, rms_norm_kernel=2, rms_norm_backward_kernel=2,
                rope_kernel=2, swiglu_kernel=2, torch=7)


@pytest.mark.parametrize("mode, collectives", [  # tp's all-reduce: of its norms' gradients
    ("one", {}), ("zero 3", dict(all_gather=2, reduce_scatter=1)),
    ("tp", dict(all_gather=6, reduce_scatter=4, all_reduce=1))])
def test_a_layer_is_so_many_launches(run, mode, collectives):
    (more, _, slower), (fewer, _, faster) = run(mode, 3), run(mode, 2)
    three, two = (Counter(call.name for call in last_step(lines) if call.kind in ("launch", "collective"))
                  for lines in (more, fewer))
    print(f"{mode}: {(slower - faster) * 1e3:.2f} ms of the host for a layer's forward and backward")
    assert three - two == LAUNCHES | {f"{name}@0": count for name, count in collectives.items()}


def test_experts_on_one_rank_are_launched_together_and_counted_on_the_device(run):
    """Of a layer: the gradients of both matrices of all experts, combine's forward, and dispatch's backward."""
    calls = last_step(run("experts", 3)[0])
    launched = Counter(call.name for call in calls)
    assert launched["expert_gradients_kernel"] == launched["sum_rows_kernel"] == 3 * 2
    assert launched["matmul"] == 3 * (2 * 3 + 1) + 3  # qkv, out; the router, fp32 in backward; the head
    copied = [call for call in calls if call.name == "memory" and
              any(how == "w" and start < 1 << 60 for how, start, _ in call.touches)]
    assert copied == [], "the host reads no counts"


def test_cudnn_gets_values_of_latents_as_they_are(run):
    """Of 128 beside keys of 192: it reads both from one tensor, and what it writes is as wide as values."""
    calls = [call for call in last_step(run("latents", 3)[0]) if call.name == "attention"]
    element = 2 * 32 * 4096  # bytes of one number of all heads of all tokens
    for call in calls:
        sizes = [(how, (stop - start) / element) for how, start, stop in call.touches]
        assert sizes[:4] == [("r", 192), ("r", 192 + 128), ("r", 192 + 128), ("w", 128)]
    assert len(calls) == 3


@pytest.mark.parametrize("mode", MODES)
def test_streams_wait_for_each_other_and_the_host_for_none(run, mode):
    """Collectives wait for all that came before them: what torch's and Triton's kernels touch is not known."""
    lines = run(mode, 3)[0]
    calls = read(lines)
    assert not {"malloc", "sync"} & {call.kind for call in calls} and races(calls) == []
    one_rank = MODES[mode][0] == 1
    assert one_rank or races(read([line for line in lines if " wait " not in line]))  # it would have seen them
    for i, call in enumerate(calls):
        if call.stream != "0":
            assert call.follows(next(before for before in calls[i::-1] if before.stream == "0"))
            assert any(later.follows(call) for later in calls[i:] if later.stream == "0")


@pytest.mark.parametrize("mode, collective, launch, counts", [
    ("dp", "all_reduce", "matmul", [24, 16, 8, 0, 0]),  # the head, three blocks, the embedding
    ("zero 3", "all_gather", "matmul", [0, 0, 4, 4, 4, 0, 8, 8]),  # embedding, blocks, head; blocks from last to first
    ("zero 3", "reduce_scatter", "matmul", [8, 8, 8, 0, 0]),
    ("tp", "all_gather", "matmul", [0] * 6 + [0, 1] * 6 + [0]),  # in backward of a row and of a column parallel layer
    ("tp", "reduce_scatter", "matmul", [0] * 7 + [1] * 6),
    ("cp", "all_gather", "attention", [1] * 6 + [0] * 6),
    ("cp", "all_gather", "attention_backward", [0] * 6 + [1] * 6),
    ("ring", "recv", "attention", [1] * 3 + [0] * 6), ("ring", "recv", "attention_backward", [0] * 3 + [1, 0] * 3)])
def test_collectives_hide_under_what_their_files_say(run, mode, collective, launch, counts):
    """For each collective of a step, beside the stream that computes: the launches from it to what waits for it."""
    calls = last_step(run(mode, 3)[0])
    own = [call for call in calls if call.stream == "0" and call.name == launch]
    assert counts == [sum(call.number > one.number and not call.follows(one) for call in own)
                      for one in calls if one.stream != "0" and one.name.startswith(collective)]


def test_a_pipeline_sends_and_receives_on_streams_of_their_own(run):
    calls = [call for call in read(run("pp", 3)[0]) if call.name.startswith(("send", "recv"))]
    assert {call.name for call in calls} == {"send@1", "recv@2"}  # communicator 0 is the world's
    assert len({(call.name, call.stream) for call in calls}) == len({call.stream for call in calls} - {"0"}) == 2


@pytest.mark.parametrize("mode", MODES)
def test_the_allocator_s_peak_is_the_plan_s(run, mode):
    ranks, flags = MODES[mode]
    plan = memory_of_rank(rules.parse(f"{MODEL} 3 {flags}".split(), ranks), 0, 2, fused=True)
    assert run(mode, 3)[1] == pytest.approx(sum(plan.values()), rel=0.03)


if __name__ == "__main__":
    main(*sys.argv[1:])
