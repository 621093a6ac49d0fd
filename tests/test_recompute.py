"""Recomputed layers: the same gradients from saved inputs alone, sharded over ranks, in memory allocated once."""
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from grids import everyone
from pool import slow

from core import rules
from core.collectives import ALONE
from core.param import parameter
from ep import RoutingInfo
from model import ForwardContext
from operations import RMSNorm
from plan.costs import (
    RECOMPUTE,
    Activation,
    Layer,
    experts_half,
    forward_flops,
    llama_layer,
    recomputed_flops,
    saved_bytes,
)
from plan.memory import layer_options
from recompute import CheckpointArena, Recompute, checkpoint, decide_once, drop, is_recomputing
from run.meter import Meter
from test_ep import make_layer
from tp import TensorParallel


def train_mlp(run) -> tuple[list[torch.Tensor], int]:
    """Train three residual layers by three steps of SGD: (their weights, bytes that live before a backward).

    run(block, x): calls block(x), and may recompute it.
    """
    torch.manual_seed(0)
    x, target = torch.randn(2, 9, 20, dtype=torch.float64)
    weights = [torch.randn(20, 20, dtype=torch.float64).div(4).requires_grad_() for _ in range(6)]
    meter = Meter()
    meter.label("inputs", x, target, *weights)
    for _ in range(3):
        with meter:
            y = x.requires_grad_()
            for up, down in zip(weights[0::2], weights[1::2]):
                y = run(lambda x, up=up, down=down: x + torch.sigmoid(torch.tanh(x @ up) @ down), y)
            kept = meter.settled()["other"]
            (y - target).square().mean().backward()
        del y
        x.grad = None
        with torch.no_grad():
            for weight in weights:
                weight -= weight.grad
                weight.grad = None
    return [weight.detach() for weight in weights], kept


def test_the_plain_checkpoint_trains_as_no_checkpoint_and_keeps_the_inputs_of_blocks():
    """Equal to the bit, also to torch's own. Kept are the results of three blocks, the last of which is no input."""
    wanted, everything = train_mlp(lambda block, x: block(x))
    ours, kept = train_mlp(checkpoint)
    torchs, _ = train_mlp(partial(torch.utils.checkpoint.checkpoint, use_reentrant=True))
    for one, other, want in zip(ours, torchs, wanted, strict=True):
        assert torch.equal(one, want) and torch.equal(other, want)
    assert kept == 3 * 9 * 20 * 8 < everything


def share_checkpoints() -> None:
    """Three steps of five layers on ranks that hold the same activations, beside the same without checkpoints."""
    torch.manual_seed(0)
    group, x = everyone(), torch.randn(3, 8, 20, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(20, 20, dtype=torch.float64).div(4).requires_grad_() for _ in range(5)]
    meter, recompute, seen = Meter(), Recompute("full", 5, group), []
    arena = recompute.arena = CheckpointArena(5, x, group)
    meter.label("arena", arena.shards, arena.whole)
    meter.label("rest", x, *weights)

    def forward(how: Recompute) -> torch.Tensor:
        y = x
        for weight in weights:
            y = how(lambda x, weight=weight: x + torch.tanh(x @ weight).square() @ weight, y)
        return y

    want = torch.autograd.grad(forward(Recompute("none")).square().sum(), [x, *weights])
    gathers = 5 * [("_allgather_base_", x.nbytes)] if group.size > 1 else []
    for _ in range(3):
        for tensor in (x, *weights):
            tensor.grad = None
        meter.collectives.clear()
        with meter:
            y = forward(recompute)
            between = dict(meter.settled())  # forward is over, backward has not begun
            y.square().sum().backward()
        del y
        assert all(torch.equal(grad, got.grad) for grad, got in zip(want, [x, *weights]))
        assert [(call.name, call.bytes) for call in meter.collectives] == gathers
        assert between["arena"] == 5 * x.nbytes // group.size + (x.nbytes if gathers else 0)
        assert between["other"] <= 2 * x.nbytes, "between forward and backward there is no activation but the last"
        seen.append((between, dict(meter.peak)))
    assert seen[0] == seen[2], "later steps use the same memory"


@pytest.mark.parametrize("n", [1, 2, 4, *slow(8)])
def test_checkpoints_are_shared_and_gathered_once_a_layer(pool, n):
    pool.run(n, share_checkpoints)


def test_a_checkpoint_that_cannot_be_shared_is_refused():
    with pytest.raises(ValueError, match="7 ranks cannot share a checkpoint of 480 elements in equal parts"):
        CheckpointArena(1, torch.zeros(3, 8, 20), SimpleNamespace(size=7))


def test_inputs_of_another_shape_have_an_arena_of_their_own():
    """As where the number of rows of a micro-batch changes during a run."""
    recomputing = Recompute("full", slots=2)
    for rows in (4, 6, 2):
        x = torch.full((rows, 3), 5.0, requires_grad=True)
        recomputing(lambda x: x * x, recomputing(lambda x: 2 * x, x)).sum().backward()
        assert torch.equal(x.grad, torch.full((rows, 3), 40.0))
        assert recomputing.arena.shards.shape == (2, rows * 3) and len(recomputing.arena.free_slots) == 2


@pytest.mark.parametrize("run", [1, 2])
def test_a_block_that_fails_leaves_nothing_switched_on(run):
    x, seen = torch.ones(3, requires_grad=True), []

    def block(x):
        seen.append(is_recomputing())
        if len(seen) == run:
            raise ValueError("fails")
        return x * decide_once(lambda: 2)

    with pytest.raises(ValueError, match="fails"):
        Recompute("full")(block, x).sum().backward()
    assert seen == [False, True][:run] and not is_recomputing()
    Recompute("full")(block, x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2] and [decide_once(lambda i=i: i) for i in range(2)] == [0, 1]


# ---- the paper, and other layers ------------------------------------------------------------------------------------

PAPER = {  # Tables 3 and 5 and figure 1 of Korthikanti et al. 2022: 2048 tokens, 8 tensor parallel ranks, A100
    # heads, hidden, layers, pp, chunks of layers of a pipeline rank, batch, micro-batch, GPUs; of an iteration with
    # sequence parallelism and selective recomputation seconds, MFU and HFU; GiB of activations of the first rank with
    # tensor parallelism alone, and with both
    "22B": (64, 6144, 48, 1, 1, 4, 4, 8, 1.10, 41.5, 43.7, (59.25, 9.5625)),
    "175B": (96, 12288, 96, 8, 3, 64, 1, 64, 13.75, 51.4, 52.8, (66.84375, 12.3515625)),
    "530B": (128, 20480, 105, 35, 3, 280, 1, 280, 37.83, 56.0, 57.0, (114.0234375, 23.076171875)),
    "1T": (160, 25600, 128, 64, 1, 512, 1, 512, 71.49, 56.3, 57.0, (131.25, 26.5625))}


def gpt_layer(hidden: int, heads: int, seq: int) -> Layer:
    """The layer of Korthikanti et al. 2022, section 4: 16 bits, GELU, dropout, scores saved: s b h (34 + 5 a s / h).

    Attention's FLOPs count all scores, masked ones too, as the paper and torch do. "selective" means what it does in
    that paper: only the scores are recomputed (in model.py norms and SwiGLU are, too).
    """
    h, scores = hidden, heads * seq
    return dict(
        input=Activation(2 * h, "full", "sp"),
        attention_norm=Activation(2 * h, "selective", "sp"),
        qkv=Activation(6 * h, "selective", "tp", 6 * h * h),
        softmax=Activation(2 * scores, "none", "tp", 4 * h * seq),  # q k^T and softmax v
        softmax_dropped=Activation(2 * scores, "none", "tp"),
        softmax_mask=Activation(scores, "none", "tp"),
        attention=Activation(2 * h, "selective", "tp"),
        attention_mask=Activation(h, "selective", "sp", 2 * h * h),
        residual=Activation(2 * h, "selective", "sp"),
        ffn_norm=Activation(2 * h, "selective", "sp"),
        up=Activation(8 * h, "selective", "tp", 8 * h * h),
        gelu=Activation(8 * h, "selective", "tp"),
        ffn_mask=Activation(h, "selective", "sp"),
        output=Activation(0, "full", "sp", 8 * h * h))


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_own_layer_gives_the_papers_numbers(name):
    heads, h, layers, pp, chunks, batch, micro_batch, gpus, seconds, mfu, hfu, gib = PAPER[name]
    s, t, layer = 2048, 8, gpt_layer(h, heads, 2048)
    scores = 5 * heads * s / h
    base, both = saved_bytes(layer, "none", t, sp=False), saved_bytes(layer, "selective", t)
    found = (saved_bytes(layer, "none"), base, saved_bytes(layer, "none", t),
             saved_bytes(layer, "selective", t, sp=False), both, saved_bytes(layer, "full"))
    table2 = 34 + scores, 10 + (24 + scores) / t, (34 + scores) / t, 10 + 24 / t, 34 / t, 2
    assert found == pytest.approx([h * factor for factor in table2])
    in_flight = layers * (1 + (pp - 1) / (pp * chunks) if chunks > 1 else 1)
    assert [s * micro_batch * in_flight * nbytes / 2**30 for nbytes in (base, both)] == pytest.approx(gib)

    model = 3 * layers * forward_flops(layer) + 6 * h * 51200  # of the logits
    percent = 100 * batch * s / seconds / gpus / 312e12
    assert percent * model == pytest.approx(mfu, abs=0.2)
    model += 3 * layers * recomputed_flops(layer, "selective")  # as the paper counts
    assert percent * model == pytest.approx(hfu, abs=0.2)


def saved_and_flops(run, x: torch.Tensor, weights: list[torch.Tensor]) -> tuple[int, int]:
    """Bytes that live between forward and backward besides x and the result, and FLOPs of both."""
    meter = Meter()
    meter.label("inputs", x, *weights)
    with meter:
        y = run(x)
        nbytes = meter.live()["other"] - y.nbytes
        y.sum().backward()
    return nbytes, meter.flops


def test_a_gpt_layer_keeps_what_the_paper_says():
    """Written in plain torch in bf16, with dropout. The paper leaves out the statistics that norms save per token."""
    b, s, h, heads = 2, 24, 32, 4
    norms = [torch.nn.LayerNorm(h).bfloat16() for _ in range(2)]
    wqkv, wo, up, down = (torch.nn.Linear(*shape).bfloat16() for shape in ((h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)))

    def dropped(x):  # F.dropout saves a mask of one byte per element only on GPUs
        return torch.native_dropout(x, 0.1, True)[0]

    def layer(x):
        q, k, v = wqkv(norms[0](x)).view(b, s, 3, heads, h // heads).permute(2, 0, 3, 1, 4)
        scores = dropped((q @ k.transpose(-1, -2)).softmax(-1))
        x = x + dropped(wo((scores @ v).transpose(1, 2).reshape(b, s, h)))
        return x + dropped(down(F.gelu(up(norms[1](x)))))

    x = torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True)
    params = [p for module in (*norms, wqkv, wo, up, down) for p in module.parameters()]
    nbytes, flops = saved_and_flops(layer, x, params)
    parts = gpt_layer(h, heads, s)
    left_out = nbytes + x.nbytes - b * s * saved_bytes(parts, "none")
    assert left_out in (b * s * 8, b * s * 16)  # mean and deviation in two norms, of two or four bytes
    assert flops == 3 * b * s * forward_flops(parts)


@pytest.mark.parametrize("name, none, selective", [("llama-3.1-8b", 139, 94), ("mixtral-8x7b", 242, 168),
                                                   ("deepseek-v3", 458, 307)])
def test_kilobytes_per_token_that_a_layer_saves(name, none, selective):
    """Of three architectures in 16 bits, at 4,096 tokens; GPT-3's layer keeps 34 or 2 bytes of each of 12,288 channels.
    """
    layer = llama_layer(rules.parse(["--preset", name]).model, 4096)
    assert [round(saved_bytes(layer, mode) / 1e3) for mode in ("none", "selective")] == [none, selective]
    gpt = gpt_layer(12288, 96, 2048)
    assert [round(saved_bytes(gpt, mode) / 1e3) for mode in RECOMPUTE] == [1401, 418, 25]
    assert recomputed_flops(gpt, "selective") / (3 * forward_flops(gpt)) == pytest.approx(0.009, abs=5e-4)


SELECTIVE = Recompute("selective")


def test_inputs_of_a_dropped_result_need_no_gradient():
    """Its weight still has one; and integers can have none."""
    weight, x, a = (torch.ones(3, requires_grad=True) for _ in range(3))
    constant, index = torch.full((3,), 2.0), torch.tensor([0, 2])
    y = (h := constant * weight) * a
    SELECTIVE.drop(h, y, lambda constant: constant * weight, constant)
    z = (picked := x[index]) * a[:2]
    SELECTIVE.drop(picked, z, lambda x, index: x[index], x, index)
    (y.sum() + z.sum()).backward()
    assert weight.grad.tolist() == [2.0] * 3 and x.grad.tolist() == [1.0, 0.0, 1.0] and a.grad.tolist() == [3, 3, 2]


@pytest.mark.parametrize("mode, on", [("selective", False), ("none", True), ("full", True)])
def test_nothing_is_dropped_in_other_modes_nor_where_no_backward_follows(mode, on):
    x, a = torch.randn(4, 3, requires_grad=True), torch.randn(3, 2, requires_grad=True)
    with torch.set_grad_enabled(on):
        y = (h := x.tanh()) @ a
    Recompute(mode).drop(h, y, torch.tanh, x)
    assert torch.equal(h, x.tanh())


def test_dropped_results_take_no_memory_but_where_backward_is_and_are_refilled_once_for_all_who_saved_them():
    """Of 12 layers, each read twice, once through a view. When backward reaches the first, what was refilled for those
    behind it is gone, and so is what it was made of, though the loss, and with it the graph, is still there."""
    runs, seen, meter, size = [], [], Meter(), 64 * 64 * 4
    x, *weights = (torch.randn(64, 64, requires_grad=True) for _ in range(13))

    def function(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x.sigmoid()

    def forward(recompute: Recompute) -> torch.Tensor:
        y = x
        for weight in weights:
            before, h = y, function(y)
            y = h @ weight + h[::2].repeat(2, 1) @ weight
            recompute.drop(h, y, function, before)
        return y.sum()

    want = torch.autograd.grad(forward(Recompute()), [x, *weights])
    meter.label("inputs", x, *weights)
    x.register_hook(lambda grad: seen.append(meter.live()["other"]))
    with meter:
        loss = forward(SELECTIVE)
        saved = meter.live()["other"] - loss.nbytes
        loss.backward()
        del loss
    assert saved == (11 + 12) * size  # what they are made of, besides x; and the copies that `repeat` makes of views
    assert seen[0] - 12 * size < 5 * size  # besides the weights' gradients
    assert len(runs) == 12 + 24 and meter.live()["other"] == 13 * size
    torch.testing.assert_close([x.grad, *(weight.grad for weight in weights)], list(want))


@pytest.mark.parametrize("until, raises", [("y", True), ("out", False)])
def test_a_result_that_is_dropped_too_early_raises(until, raises):
    """The example of recompute.py: a backward that does not wait for that of `until` reads empty memory."""
    x, w, gate = (torch.randn(*shape, requires_grad=True) for shape in ((8, 5), (5, 3), (5, 3)))
    h = x.tanh()
    y, z = h @ w, h @ gate
    out = y + z
    drop(h, dict(y=y, out=out)[until], torch.tanh, x)
    if raises:
        with pytest.raises(RuntimeError, match="storage of size 0"):
            out.sum().backward()
    else:
        out.sum().backward()
        torch.testing.assert_close(gate.grad, x.tanh().T @ torch.ones(8, 3))
        assert torch.equal(gate.grad, w.grad)


def test_views_of_a_dropped_result_are_refilled():
    """A part of it, transposed, as a matmul saves it, or all of it; and for each backward of a graph that is kept."""
    x, a = torch.randn(7, 6, requires_grad=True), torch.randn(4, 3, requires_grad=True)

    def loss(y: torch.Tensor) -> torch.Tensor:
        return (y[2:6, 1:].t() @ a).square().sum() + (y.view(6, 7) @ y).square().sum() + (y @ y.t()).square().sum()

    want = torch.autograd.grad(loss(x.tanh()), [x, a])
    got = loss(h := x.tanh())
    SELECTIVE.drop(h, got, torch.tanh, x)
    for _ in range(2):
        assert all(map(torch.equal, torch.autograd.grad(got, [x, a], retain_graph=True), want))


@pytest.mark.parametrize("mode", RECOMPUTE)
@pytest.mark.parametrize("flags", [
    "--experts 8", "--experts 8 --aux-loss 0", "--experts 8 --aux-loss 0 --router-z-loss 1",
    "--experts 8 --top-k 3 --router-z-loss 0.1", "--experts 12 --top-k 5 --shared-experts 1 --router sigmoid",
    "--experts 8 --top-k 1 --no-router-norm"])
def test_a_mixture_of_experts_keeps_what_the_formula_says(mode, flags):
    flags = f"--hidden 16 --heads 2 --kv-heads 2 --expert-ffn 24 --dtype fp32 {flags}"
    settings = rules.parse(flags.split())
    model, optim, S = settings.model, settings.optim, 20
    layer, recompute = make_layer(flags, ALONE, torch.float32), Recompute(mode)
    norm = RMSNorm(partial(parameter, groups={}, dtype=torch.float32), "norm", 16, 1e-5, {})
    norm.weight.data.fill_(1)
    tokens = RoutingInfo(torch.arange(2).repeat_interleave(S), 2, aux_loss_scale=0.5)

    def block(x):
        y = layer(h := norm(x), ForwardContext(TensorParallel(), S, None, {}, recompute, tokens))
        recompute.drop(h, y, norm, x)
        return y

    x = torch.randn(2 * S, 16, requires_grad=True)
    recompute.arena = CheckpointArena(1, x)  # the formula counts its memory as the layer's input
    there = [norm.weight, *layer.parameters(), layer.router.bias, layer.router.load, layer.router.loss,
             tokens.sequence_ids, recompute.arena.shards, recompute.arena.whole]
    nbytes, flops = saved_and_flops(partial(recompute, block), x, there)
    made = experts_half(model, layer_options(settings, 4))
    # Of the losses' factors backward needs none; but a block that runs again takes over those of its first run.
    coefficients = 3 * (model.experts + 1) * 4 if mode == "full" and (optim.aux_loss or optim.router_z_loss) else 0
    ends = 4 * model.experts  # of the experts' rows. Those of several ranks are made of a list, unseen by a meter
    assert nbytes == 2 * S * saved_bytes(made, mode) + coefficients + ends
    assert flops == 2 * S * (3 * forward_flops(made) + recomputed_flops(made, mode))
