"""AdamW in one pass: the steps of torch's, interpreted on CPUs; bytes and launches, counted; compiled for sm_90."""
import json
import re
from collections import Counter

import pytest
import torch
import triton
from ahead import COMPILERS, run
from exact import DEVICE, numbers
from grids import ALONE
from torch import nn
from torch.optim.adamw import adamw as torch_adamw

import adamw
import zero
from param import Spec, parameter
from zero import Optimizer

SPECS = [Spec("a", (64, 128)), Spec("b", (40,), decay=False), Spec("c", (33, 5)), Spec("d", (7,), decay=False)]


class Unit(nn.Module):
    def __init__(self, specs: list[Spec], groups: dict, dtype: torch.dtype):
        super().__init__()
        self.weights = nn.ParameterList(parameter(spec, groups, dtype, DEVICE) for spec in specs)

    def forward(self, x: torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor:
        return x * sum((weight * grad).sum() for weight, grad in zip(self.weights, grads))


def train(rule: str, groups: dict, level: int, dtype: torch.dtype, moments: torch.dtype | None = None,
          bad: float | None = None) -> dict[str, torch.Tensor]:
    """State, weights and norms after three steps, of which the second has a gradient `bad`, if any."""
    unit = Unit(SPECS, groups, dtype)
    optimizer = Optimizer({0: [unit]}, groups, level=level, rule=rule, clip=3.0, moments_dtype=moments)
    if optimizer.loss_scale:
        optimizer.loss_scale.value.fill_(8.0)
    optimizer.load(lambda spec, box: numbers(*spec.shape)[box].cpu())
    norms = []
    for step in range(3):
        grads = [numbers(*spec.shape, seed=step).to(dtype) for spec in SPECS]
        if bad is not None and step == 1:
            grads[0][1, 2] = bad
        optimizer.begin_step({0: 1})
        x = torch.ones((), device=DEVICE, dtype=dtype, requires_grad=True)
        optimizer.scale_loss(unit(x, grads)).backward()
        optimizer.finish_step()
        norms.append(optimizer.step(0.1))
    bucket, = optimizer.buckets
    bucket.unshard()
    weights = {"weights": bucket.weights[:bucket.numel].clone()}
    return bucket.state | weights | {"norms": torch.stack(norms), "steps": optimizer.steps}


def equal_but_for_rounding(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        rounding = 1e-6 if wanted.dtype == torch.float32 else torch.finfo(wanted.dtype).eps
        largest = wanted.where(wanted.isfinite(), 0).abs().max().item()
        assert ours[name].dtype == wanted.dtype
        torch.testing.assert_close(ours[name], wanted, rtol=0, atol=rounding * (1 + largest), equal_nan=True)


@pytest.mark.parametrize("dtype, moments, bad", [
    (torch.float32, None, None), (torch.float32, None, torch.nan), (torch.float16, None, None),
    (torch.float16, None, torch.inf)])
def test_three_steps_are_those_of_torch(monkeypatch, dtype, moments, bad):
    theirs = train("adamw", ALONE, 0, dtype, moments, bad)
    monkeypatch.setattr(zero, "uses_kernels", lambda x: True)
    ours = train("adamw-one-pass", ALONE, 0, dtype, moments, bad)
    equal_but_for_rounding(ours, theirs)
    assert ours["steps"] == (3 if bad is None else 2)


def test_a_table_is_built_once_and_again_when_gradients_have_moved(monkeypatch):
    """An update zeroes the gradient for the next step; a step that is begun again, without one, does that itself."""
    made, usual = [], adamw.OnePass
    monkeypatch.setattr(adamw, "OnePass", lambda spans: (made.append(spans), usual(spans))[1])
    monkeypatch.setattr(zero, "uses_kernels", lambda x: True)
    unit = Unit(SPECS[1:2], ALONE, torch.float32)
    optimizer = Optimizer({0: [unit]}, ALONE, rule="adamw-one-pass")
    bucket, = optimizer.buckets

    def step(updates: bool = True) -> None:
        optimizer.begin_step({0: 1})
        unit(torch.ones((), device=DEVICE, requires_grad=True), [torch.ones(40, device=DEVICE)]).backward()
        optimizer.finish_step()
        assert bucket.grad[:40].unique().tolist() == [1]
        if updates:
            optimizer.step(0.1)

    for updates in (True, True, False, True):
        step(updates)
    assert len(made) == 1
    bucket.grad = None
    weight = bucket.master[0].item()
    step()
    assert len(made) == 2 and bucket.master[0] < weight


def train_on_ranks(level: int) -> tuple[dict, dict]:
    groups = ALONE | {name: torch.distributed.group.WORLD for name in ("world", "dp")}
    theirs = train("adamw", groups, level, torch.float32)
    zero.uses_kernels = lambda x: True
    try:
        return train("adamw-one-pass", groups, level, torch.float32), theirs
    finally:
        zero.uses_kernels = lambda x: x.is_cuda


@pytest.mark.parametrize("level", range(4))
def test_shards_take_the_same_steps(pool, level):
    for ours, theirs in pool.run(3, "test_adamw:train_on_ranks", level=level):
        equal_but_for_rounding(ours, theirs)


def spans_of(count: int, elements: int, moments: torch.dtype) -> list[adamw.Span]:
    return [adamw.Span(*(numbers(elements, seed=i).abs().to(dtype) for dtype in (
        torch.float32, torch.float32, moments, moments, torch.float16)), i % 2 == 0, i != 1, i != 2)
        for i in range(count)]


def update(spans: list[adamw.Span], **settings) -> torch.Tensor:
    one_pass = adamw.OnePass(spans)
    squared = one_pass.squared_norm()
    zero_, steps = torch.zeros((), device=DEVICE), torch.full((), 2.0, device=DEVICE)
    one_pass.update(0.5, zero_, steps, **dict(lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1) | settings)
    return squared


def test_spans_decay_are_counted_and_zeroed_as_they_say():
    """Two spans of several programs and one of a few elements; 16-bit moments, which are rounded once."""
    spans = [*spans_of(3, 9000, torch.float16), *spans_of(1, 5, torch.float16)]
    before = [[x.double() for x in span.tensors()] for span in spans]
    squared = update(spans)
    exact = sum(grad.square().sum() for span, (_, grad, *_) in zip(spans, before) if span.owned)
    torch.testing.assert_close(squared.double(), exact, rtol=1e-6, atol=0)
    for span, (master, grad, m, v, _) in zip(spans, before):
        assert span.grad.any() != span.zeroes
        torch_adamw([master], [grad / 2], [m], [v], [], [torch.full((), 2.0, device=DEVICE)], fused=True, lr=0.1,
                    beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1 * span.decays, amsgrad=False, maximize=False)
        torch.testing.assert_close(span.master.double(), master, rtol=1e-6, atol=1e-6)
        for ours, wanted in (span.m, m), (span.v, v):
            assert ((ours.double() - wanted).abs() <= wanted.abs() * 2 ** -11 + 2 ** -24).all()
        assert torch.equal(span.weights, span.master.half())


def test_a_first_step_is_as_long_as_the_rate():
    """To all digits of fp32, although 1 - 0.999 has four in it."""
    span, = spans_of(1, 5, torch.float32)
    before = span.master.clone()
    for moment in (span.m, span.v):
        moment.zero_()
    zero_ = torch.zeros((), device=DEVICE)
    adamw.OnePass([span]).update(1.0, zero_, zero_, lr=100.0, betas=(0.9, 0.999), eps=0.0, weight_decay=0.0)
    torch.testing.assert_close(span.master, before - 100, rtol=1e-6, atol=0)


@pytest.mark.skipif(DEVICE == "cuda", reason="counts what the interpreter does")
@pytest.mark.parametrize("moments, wanted", [(torch.float32, 38), (torch.float16, 30)])
def test_bytes_per_parameter_are_those_of_the_formula(monkeypatch, moments, wanted):
    moved, builder = Counter(), triton.runtime.interpreter.InterpreterBuilder

    def counting(name):
        method = getattr(builder, name)

        def count(self, pointers, *args):
            mask = args[0] if name.endswith("load") else args[1]
            if mask.data.size == adamw.BLOCK:
                moved[name] += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
            return method(self, pointers, *args)
        return count

    for name in ("create_masked_load", "create_masked_store"):
        monkeypatch.setattr(builder, name, counting(name))
    spans = [span._replace(owned=True, zeroes=True) for span in spans_of(2, 5000, moments)]
    update(spans)
    assert sum(moved.values()) == wanted * 10_000
    total = next(line for line in adamw.__doc__.splitlines() if "total" in line)
    assert str(wanted) in total.split()[2:]


class Counted:
    """A kernel whose launches are counted."""

    def __init__(self, kernel):
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid):
        self.launches += 1
        return self.kernel[grid]


@pytest.mark.parametrize("count", [1, 40])
def test_launches_do_not_depend_on_the_number_of_parameters(monkeypatch, count):
    kernels = [Counted(adamw.squares_kernel), Counted(adamw.adamw_kernel)]
    monkeypatch.setattr(adamw, "squares_kernel", kernels[0])
    monkeypatch.setattr(adamw, "adamw_kernel", kernels[1])
    update(spans_of(count, 100, torch.float32))
    assert [kernel.launches for kernel in kernels] == [1, 1]
    assert update(spans_of(count, 0, torch.float32)) == 0  # a shard that is all padding
    assert [kernel.launches for kernel in kernels] == [1, 1]


def test_vector_loads_need_addresses_and_lengths_that_are_multiples_of_16():
    def aligned(length: int, *first: int) -> bool:
        """With spans that begin at these elements of a buffer of fp32 and of one of 16 bits."""
        wide, narrow = (torch.zeros(4 * length, dtype=dtype, device=DEVICE) for dtype in (torch.float32, torch.float16))
        assert wide.data_ptr() % 16 == narrow.data_ptr() % 16 == 0
        spans = [adamw.Span(*(x[i:i + length] for x in (wide, wide, wide, wide, narrow)), True, True, True)
                 for i in first]
        return adamw.OnePass(spans).options["ALIGNED"]
    assert aligned(32, 0, 32, 8) and aligned(16, 16)
    assert not aligned(32, 0, 4)  # 8 bytes into the buffer of 16 bits
    assert not aligned(32, 2, 32) and not aligned(33, 0) and not aligned(40, 0) and not aligned(20, 0)


def test_a_table_is_known_by_the_addresses_of_all_spans():
    """Of those without elements, too: most shards lack a span, and their table must not be rebuilt in every step."""
    spans = [*spans_of(2, 8, torch.float32), *spans_of(1, 0, torch.float32)]
    assert adamw.OnePass(spans).addresses == adamw.addresses(spans)


@pytest.mark.parametrize("change, message", [
    (lambda span: span._replace(grad=span.grad.double()), "needs fp32 master weights and gradients"),
    (lambda span: span._replace(m=span.m[:5]), "spans must be flat"),
    (lambda span: span._replace(master=torch.zeros(16)[::2]), "spans must be flat"),
    (lambda span: span._replace(m=span.m.half(), v=span.v.half()), "one type of moments and of weights"),
    (lambda span: span._replace(v=span.v.half()), "one type of moments and of weights, not torch.float32, "
     "torch.float32, torch.float32, torch.float16, torch.float16$"),
    (lambda span: span._replace(weights=span.weights.float()), "one type of moments and of weights")])
def test_spans_that_do_not_fit_are_refused(change, message):
    first, second = spans_of(2, 8, torch.float32)
    with pytest.raises(ValueError, match=message):
        adamw.OnePass([first, change(second)])


@pytest.mark.skipif(DEVICE == "cuda", reason="shows what happens without a GPU")
def test_without_a_gpu_one_pass_is_refused(monkeypatch):
    monkeypatch.setattr(adamw, "INTERPRETED", False)
    with pytest.raises(ValueError, match="one pass of AdamW runs on GPUs, not on cpu"):
        adamw.OnePass(spans_of(1, 8, torch.float32))


AHEAD = """
import json
import adamw, triton.language as tl
from ahead import ahead

shape = dict(SPANS=64, COLUMNS=adamw.COLUMNS, BLOCK=adamw.BLOCK, ALIGNED=True)
scalars = dict.fromkeys(("lr", "weight_decay", "beta1", "beta2", "eps"), "fp32")
made = {str(moment): ahead(adamw.adamw_kernel, dict(table="*i64", spans="i32", scalars="*fp32") | scalars,
                           dict(MOMENT=moment, WEIGHT=tl.bfloat16, COPY=True) | shape, num_warps=8)
        for moment in (tl.float32, tl.bfloat16)}
made["norm"] = ahead(adamw.squares_kernel, dict(table="*i64", spans="i32", partial="*fp32"), shape, num_warps=8)
print(json.dumps(made))
"""


@pytest.mark.slow
@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled_for_sm_90_a_thread_moves_16_bytes_at_once_and_spills_nothing(tmp_path, compiler):
    for name, used in json.loads(run(AHEAD, compiler, TRITON_CACHE_DIR=str(tmp_path))).items():
        assert used["STACK"] == used["LOCAL"] == "0" and int(used["REG"]) <= 128, name
        vectors = Counter(re.findall(r"(?:ld|st)\.global\S*", used["ptx"]))
        assert vectors["ld.global.v4.b32"] == {"fp32": 16, "bf16": 12, "norm": 4}[name]
        assert vectors["st.global.v4.b32"] == {"fp32": 18, "bf16": 14, "norm": 0}[name]
