"""A replayed step equals an executed one: to the bit as a list of operations on a CPU, and as a CUDA graph."""
import re

import grids
import pytest
import torch

import assemble
import config
import graphs
import model
import operations
import tp
import train
from graphs import Captured
from run import job
from run.data import MicroBatch
from run.meter import Meter

CPU, GPU = torch.device("cpu"), torch.cuda.is_available()
SMALL = ("--layers 3 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --seq 24 --global-batch 4 --micro-batch 2 --steps 6 "
         "--dtype fp32 --warmup 2 --sample= --eval-every 2 --eval-steps 1 "
         f"--data {__file__} --val-data {__file__}")


def trained(flags: str, capsys, device: torch.device = CPU) -> tuple[list[str], dict[str, list[float]], int]:
    """The last lines that a run prints, its last weights, and how often Python executed the model's forward."""
    settings, made, calls = config.parse(f"{SMALL} {flags}".split()), [], []
    samples = assemble.open_samples(settings, settings.data.data, 0)
    build, forward = assemble.build, model.Llama.forward

    def watched(*args, **options):
        made[:] = build(*args, **options)
        return made

    def counted(llama, *args, **others):
        calls.append(torch.is_grad_enabled())
        return forward(llama, *args, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "build", watched)
        patch.setattr(model.Llama, "forward", counted)
        train.train(settings, samples, samples, device, "", job.RunState())
    weights = {bucket.name: bucket.master.tolist() for bucket in made[1].buckets}
    return capsys.readouterr().out.splitlines()[-3:], weights, sum(calls)


@pytest.mark.parametrize("flags, forwards", [
    ("", 6), ("--recompute selective --tied", 6), ("--recompute full --qk-norm --attention math", 6),
    ("--dtype bf16 --moments bf16 --z-loss 0.01", 6), ("--dtype fp16", 6),
    ("--fp8 tensorwise --hidden 64 --ffn 64 --dtype bf16", 6),
    ("--experts 4 --top-k 2 --expert-ffn 24 --bias-rate 0.01 --router-z-loss 0.1 --dtype bf16", 6),
    ("--experts 4 --top-k 1 --no-router-norm --expert-ffn 24 --shared-experts 1 --dtype bf16 --recompute full", 6),
    ("--batch-ramp 2@0,4@144 --steps 8", 3 * 1 + 3 * 2), ("--batch-ramp 4@0,6@96", 1 * 2 + 3 * 3)])
def test_a_replayed_step_equals_an_executed_one(flags, forwards, capsys):
    """Two steps are executed and one is captured, anew where batches grow; evaluations in between are executed."""
    said, weights, _ = trained(flags, capsys)
    assert len(said) == 3
    assert trained(f"{flags} --graph", capsys) == (said, weights, forwards)


def test_documents_are_replayed(tmp_path, capsys):
    """And their positions: texts of 3 to 8 bytes, several in a sequence."""
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text("abcdefgh"[:3 + number % 6])
    flags = f"--doc-mask --data {tmp_path}"
    settings = config.parse(f"{SMALL} {flags}".split())
    sequences = assemble.open_samples(settings, settings.data.data, 0).step(0, 24, 2, 0, 1)
    assert all((batch.documents.diff() > 0).any(1).all() for batch in sequences)
    assert trained(flags, capsys)[:2] == trained(f"{flags} --graph", capsys)[:2]


@pytest.mark.skipif(GPU, reason="kernels are compiled here, and want a GPU")
def test_kernels_are_captured(monkeypatch):
    """As operators of torch, here interpreted."""
    settings = config.parse(f"{SMALL} --layers 1 --attention triton --recompute selective".split())
    for module in (operations, tp):
        monkeypatch.setattr(module, "uses_kernels", lambda x: True)
    llama, optimizer = assemble.build(settings, grids.ALONE, CPU, torch.float32)
    tokens = torch.randint(256, (3, 2, 1, 8), generator=torch.Generator().manual_seed(0))

    def run(batches):
        return train.forward_backward(llama, optimizer, batches, grids.ALONE)

    captured, found = Captured(run, warmups=1), []
    for step in (run, captured):
        for batch in tokens:
            loss = step([MicroBatch(*batch)])
            found.append([loss.clone(), *(bucket.grad.clone() for bucket in optimizer.buckets)])
    for executed, replayed in zip(found[:3], found[3:]):
        assert all(torch.equal(one, other) for one, other in zip(executed, replayed))
    assert not torch.equal(found[0][0], found[1][0])


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("look", [lambda x: x.sum().item(), lambda x: x[x > 2], lambda x: x.nonzero(),
                                  lambda x: torch.equal(x, x), lambda x: x.index_put_((x > 0,), torch.zeros(3)),
                                  lambda x: x.index_put((x > 0,), torch.zeros(3)),
                                  lambda x: x[(x > 0).byte()]])  # a mask, as booleans are
def test_what_looks_at_values_cannot_be_captured(look):
    captured, batch = Captured(lambda batches: look(batches[0].tokens), warmups=0), MicroBatch(*torch.ones(2, 1, 3))
    with pytest.raises(RuntimeError, match="looks at a value"):
        captured([batch])


@pytest.mark.parametrize("index", [
    lambda x: (x > 2)[torch.tensor([2, 0])],  # a table of booleans, no mask
    lambda x: x.index_put_((torch.tensor([0, 2]),), torch.ones(2)),
    lambda x: x.index_put_((x > 2,), torch.tensor(0.0)), lambda x: x.index_put((x > 2,), torch.tensor(0.0))])
def test_indices_that_count_no_values_are_captured(index):
    captured = Captured(lambda x: index(x.clone()).clone(), warmups=0)
    for x in (torch.tensor([1.0, 2, 3]), torch.tensor([3.0, 2, 1]), torch.tensor([5.0, 6, 7])):
        assert torch.equal(captured(x), index(x.clone()))


def test_batches_of_another_structure_are_captured_anew():
    """Also where their tensors have the same shapes: here the one that is left out changes."""
    captured = Captured(lambda pair: 2 * pair[0] if pair[1] is None else 3 * pair[1], warmups=0)
    x, y = torch.ones(2), torch.full((2,), 5.0)
    for pair in ([x, None], [y, None], [None, y], [None, x], [x, None]):
        want = 2 * pair[0] if pair[1] is None else 3 * pair[1]
        assert torch.equal(captured(pair), want)
    assert captured([torch.ones(3), None]).tolist() == [2, 2, 2]


def test_replays_leave_the_callers_tensors_alone():
    captured, given = Captured(lambda x: 2 * x, warmups=1), [torch.full((2,), float(i)) for i in range(4)]
    assert [captured(x).tolist() for x in given] == [[0, 0], [2, 2], [4, 4], [6, 6]]
    assert [x.tolist() for x in given] == [[0, 0], [1, 1], [2, 2], [3, 3]]


def test_batches_that_cannot_be_replayed_are_refused():
    captured, x = Captured(lambda batches: batches[0] * 2, warmups=1), torch.arange(3)
    captured([x])
    for _ in range(2):  # while warming up, and captured
        with pytest.raises(ValueError, match=r"^cannot replay batches of \[torch.float32\]: .* have \[torch.int64\]$"):
            captured([x.float()])
        captured([x])
    for batches, found in (([x, 0.5], r"\['Tensor', 'float'\]"), ([], r"\[\]"), ([None], r"\['NoneType'\]")):
        with pytest.raises(ValueError, match=rf"^cannot replay batches of {found}: need tensors \(and None\)$"):
            captured(batches)


@pytest.mark.skipif(GPU, reason="its times are those of a CPU")
def test_the_demo_compares_medians_and_counts_operations(monkeypatch, capsys):
    """Of eight layers, each of which moves the clock on by 1.5 ms; replayed, Python executes none of them."""
    clock = [0.0]

    class Layer(torch.nn.Linear):
        def __init__(self, width, *_, **__):
            super().__init__(width, width)

        def forward(self, x):
            clock[0] += 0.0015
            return super().forward(x)

    made = []
    monkeypatch.setattr(torch.nn, "TransformerEncoderLayer", Layer)
    monkeypatch.setattr(graphs.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(graphs, "Captured", lambda run: made.append(Captured(run)) or made[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    graphs.demo()
    with Meter(memory=False) as meter:
        made[0].run(torch.randn(1, 16, 64))
    assert capsys.readouterr().out.splitlines() == [
        "Forward and backward of 8 layers and 16 tokens: 12.0 ms executed, 0.0 ms replayed.",
        f"A CPU calls each of {meter.operations} operations; a GPU launches all in one call."]


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("flags", ["--dtype bf16", "--dtype bf16 --recompute full --attention triton", "--dtype fp16",
                                   "--batch-ramp 2@0,4@144 --steps 8"])
def test_a_gpu_replays_what_it_executes(flags, capsys):
    """Not to the bit: an embedding's gradient is added in any order."""
    device = torch.device("cuda")
    runs = [trained(flags + how, capsys, device) for how in ("", " --graph")]
    losses = [[float(loss) for loss in re.findall(r"loss (\d+\.\d+)", "\n".join(said))] for said, *_ in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and len(losses[0]) == 3 and runs[1][2] < runs[0][2]


@pytest.mark.parametrize("flags, world, line", [
    ("--graph", 2, "--graph with 2 ranks: communication is not captured"),
    ("--graph --experts 4 --dtype fp16", 1, "--graph with --experts 4: how"),
    ("--graph --experts 4 --expert-ffn 20", 1, "--graph with --experts 4: how"),
    ("--graph --experts 4 --fp8 tensorwise --expert-ffn 64", 1, "--graph with --experts 4: how"),
])
def test_what_cannot_be_captured_is_refused(flags, world, line):
    with pytest.raises(ValueError, match=f"^{line}"):
        config.parse(flags.split(), world)


def test_experts_are_captured_on_a_cpu_in_bf16_only():
    settings = config.parse("--graph --experts 4 --expert-ffn 64".split())
    for dtype, device in ("bf16", "cpu"), ("fp32", "cuda"):
        settings.precision.dtype = dtype
        assemble.check_device(settings, torch.device(device))
    with pytest.raises(ValueError, match="^--graph with --experts 4 on a CPU: captures no other dtype than --dtype bf"):
        assemble.check_device(settings, CPU)
