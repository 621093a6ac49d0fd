"""ZeRO: the update, precision, collectives and live bytes. tests/test_grids.py proves that it equals torch.optim."""
import math
from functools import cache
from itertools import chain

import grids
import pytest
import sharding
import torch
from grids import MIXTRAL, NO_GROUPS, for_each
from pool import slow
from sharding import Unit
from torch import nn
from watch import in_order, waits

import zero
from core import config
from core.collectives import ALONE, sent
from core.gradients import stacked_view
from core.param import Spec
from optimizers import UPDATE_RULES
from run import dryrun
from test_grids import compare, model_flags, truth
from zero import Optimizer


def sharded() -> dict:
    """Groups in which all ranks share each unit's weights."""
    return NO_GROUPS | {"world": grids.everyone(), "dp": grids.everyone()}


def make(*specs: Spec, dtype=torch.float32, groups=NO_GROUPS, **settings) -> tuple[list[nn.Parameter], Optimizer]:
    """Parameters and their optimizer, filled with ones."""
    unit = Unit(*specs, dtype=dtype)
    optimizer = Optimizer({0: [unit]}, groups, **settings)
    optimizer.load(lambda spec, box: torch.ones([s.stop - s.start for s in box]))
    return list(unit.weights), optimizer


def step(params: list[nn.Parameter], optimizer: Optimizer, grads: list[torch.Tensor], lr: float = 0.1) -> torch.Tensor:
    optimizer.begin_step(1)
    sum((p * grad.to(p.dtype)).sum() for p, grad in zip(params, grads)).backward()
    optimizer.finish_step()
    return optimizer.step(lr)


# ---- the plain version: level 1 of one flat buffer ------------------------------------------------------------------

ROWS = [[1, 4], [2, 3], [5, 1]]  # of each micro-batch of each rank: unequal, or a mean of means would go unnoticed


def plain_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()  # 58 parameters, not a multiple of 3


def plain_loss(model: nn.Sequential, ranks: int, rank: int, number: int) -> torch.Tensor:
    """The sum of squares of a micro-batch, divided by the rows of all ranks."""
    generator = torch.Generator().manual_seed(10 * rank + number)
    inputs = torch.randn(ROWS[rank][number], 5, generator=generator, dtype=torch.float64)
    return model(inputs).square().sum() / sum(map(sum, ROWS[:ranks]))


def trained_plainly() -> dict:
    group, model = grids.everyone(), plain_model()
    optimizer = zero.PlainLevel1(model.parameters(), group, lambda shard: torch.optim.AdamW(shard, lr=0.1))
    for _ in range(3):
        sent.clear()
        for number in range(2):
            plain_loss(model, group.size, group.rank, number).backward()
        optimizer.step()
    state, = optimizer.optimizer.state.values()
    return dict(weights=[param.detach().clone() for param in model.parameters()], sent=sum(sent.values()),
                moments=[state["exp_avg"].numel(), state["exp_avg_sq"].numel()])


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_plain_level_1_trains_as_one_process_does(pool, ranks):
    """It sends a reduce-scatter and an all-gather of 58 elements and padding, and has moments of its shard only."""
    model = plain_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        for rank in range(ranks):
            for number in range(2):
                plain_loss(model, ranks, rank, number).backward()
        optimizer.step()
    want, length = [param.detach() for param in model.parameters()], math.ceil(58 / ranks)
    for seen in pool.run(ranks, trained_plainly):
        torch.testing.assert_close(seen["weights"], want, rtol=0, atol=1e-12)
        assert seen["sent"] == 2 * (ranks - 1) * length * 8 and seen["moments"] == [length, length]


# ---- the update -----------------------------------------------------------------------------------------------------

def test_every_optimizer_has_an_update_rule():
    assert UPDATE_RULES.keys() == config.OPTIMIZERS.keys()


@pytest.mark.parametrize("rule", UPDATE_RULES)
def test_a_rule_updates_each_element_by_itself(rule):
    """So shards are updated as the whole is. The rule gets what decays and what does not as tensors of their own."""
    generator, common = torch.Generator().manual_seed(0), dict(rule=rule, clip=0.0, weight_decay=0.0)
    (whole,), one = make(Spec("w", (6,)), **common)
    parts, other = make(Spec("a", (2,)), Spec("b", (4,), decay=False), **common)
    for _ in range(3):
        grad = torch.randn(6, generator=generator)
        step([whole], one, [grad])
        step(parts, other, list(grad.split([2, 4])))
    assert torch.equal(torch.cat([part.data for part in parts]), whole.data) and whole.ne(1).all()


@pytest.mark.parametrize("rule", UPDATE_RULES)
def test_without_gradients_weights_decay_and_nothing_else_happens(rule):
    """Each step by lr x weight decay of themselves, and norms and biases not at all."""
    params, optimizer = make(Spec("w", (3,)), Spec("norm", (3,), decay=False), rule=rule, weight_decay=0.5)
    for _ in range(2):
        step(params, optimizer, [torch.zeros(3), torch.zeros(3)], lr=0.1)
    assert params[0].tolist() == pytest.approx([0.95 ** 2] * 3) and params[1].tolist() == [1.0] * 3


def test_one_rank_has_nothing_to_shard():
    """So at no level are there weights beside the shard, or gradients that are freed."""
    for level in range(4):
        bucket, = make(Spec("w", (8, 8)), level=level)[1].buckets
        assert bucket.weight_shard.data_ptr() == bucket.weights.data_ptr()
        assert bucket.grad_shard.data_ptr() == bucket.grad.data_ptr()


def test_parameters_treated_alike_are_one_span_and_neighbours_stay_neighbours():
    groups = NO_GROUPS | {"tp": ALONE}
    unit = Unit(Spec("norm", (4,), {"tp": "partial"}, decay=False), Spec("wq", (8, 4)), Spec("bias", (5,), decay=False),
                Spec("wk", (2, 4)), Spec("wv", (2, 4)), Spec("router", (3, 4), {"tp": "partial"}), groups=groups)
    bucket, = Optimizer({0: [unit]}, groups).buckets
    assert [p.spec.name for p in bucket.params] == ["wq", "wk", "wv", "bias", "router", "norm"]
    assert [(start, stop) for start, stop, _ in bucket.spans] == [(0, 48), (48, 53), (53, 65), (65, 69)]
    bucket.begin_step(1)
    wq, wk, wv = (bucket.main_grad(p) for p in bucket.params[:3])
    assert stacked_view([wq, wk, wv]).shape == (12, 4)


@pytest.mark.parametrize("me", [0, 2])
def test_shards_of_an_odd_number_of_ranks_begin_at_multiples_of_16_bytes(me):
    with dryrun.fake_world(3, me):
        bucket, = make(Spec("a", (7, 5)), dtype=torch.bfloat16, groups=sharded(), level=1)[1].buckets
    assert bucket.numel == 48 and bucket.shard == slice(me * 16, me * 16 + 16)  # of 35 weights
    assert (bucket.weight_shard.data_ptr() - bucket.weights.data_ptr()) % 16 == 0


def test_small_steps_move_bf16_weights():
    """100 steps of 1e-4 change a weight of 1 by 1e-2; without a master weight, bf16 would round every step away."""
    params, optimizer = make(Spec("w", (8,)), dtype=torch.bfloat16, weight_decay=0.0, clip=0.0)
    for _ in range(100):
        step(params, optimizer, [torch.ones(8)], lr=1e-4)
    bucket = optimizer.buckets[0]
    assert bucket.master.tolist() == pytest.approx([1 - 1e-2] * 8, abs=1e-5)
    assert torch.equal(params[0].data, bucket.master.bfloat16()) and (params[0] < 1).all()


@pytest.mark.parametrize("dtype, error", [(torch.float64, 1e-7), (torch.float32, 1e-6)])  # 1e-6 is added to the norm
def test_clipping_scales_the_whole_gradient_to_the_limit(dtype, error):
    specs, how = [Spec("a", (4,)), Spec("b", (5, 4))], dict(dtype=dtype, clip=0.5, weight_decay=0.0)
    params, optimizer = make(*specs, rule="sgd", **how)
    large = [torch.full((4,), 3.0), torch.full((5, 4), 4.0)]
    norm = step(params, optimizer, large, lr=1.0)
    assert norm.item() == pytest.approx(math.sqrt(4 * 9 + 20 * 16), rel=1e-12 if dtype == torch.float64 else error)
    moved = torch.cat([(1 - p).flatten() for p in params])
    assert moved.norm().item() == pytest.approx(0.5, rel=error)
    assert (moved[4:] / moved[0]).tolist() == pytest.approx([4 / 3] * 20)
    below = step(params, optimizer, [torch.full((4,), 1e-3), torch.zeros(5, 4)], lr=1.0)
    assert below.item() == pytest.approx(2e-3)
    assert (params[0] + moved[0] - 1).tolist() == pytest.approx([-1e-3] * 4, rel=100 * error)
    params, optimizer = make(*specs, **how)
    step(params, optimizer, large)
    momentum = torch.cat([bucket.state["m"] for bucket in optimizer.buckets])
    assert momentum.norm().item() == pytest.approx((1 - 0.9) * 0.5, rel=error)


@pytest.mark.parametrize("flags", ["--zero 1 --mtp",
                                   "--bucket-mb 0.01616"])  # 50.5 rows of the table, of 40 gradients in fp64
def test_buckets_of_tensor_parallel_ranks_have_one_layout(flags):
    """Else their shards would be of other elements, of which gradients that are partial over tp are summed. A table of
    101 rows has unequal shards; a matrix that is partial over tp reaches over several shards."""
    layouts = []
    for rank in range(2):
        with dryrun.fake_world(8, rank), dryrun.fake_tensors():
            settings = grids.settings_of(f"--tp 2 --dp 4 --micro-batch 4 --vocab 101 {flags}", 8)
            *_, optimizer = grids.build(settings)
            layouts.append([(bucket.numel, [(param.spec.name, bucket.offset[param]) for param in bucket.params])
                            for bucket in optimizer.buckets])
    assert layouts[0] == layouts[1]


@pytest.mark.parametrize("rule", UPDATE_RULES)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_step_that_is_not_finite_changes_nothing(rule, bad, clip):
    (param,), optimizer = make(Spec("w", (2, 3)), rule=rule, clip=clip)
    step([param], optimizer, [torch.ones(2, 3)])
    bucket = optimizer.buckets[0]
    before = {what: state.clone() for what, state in bucket.state.items()}
    grad = torch.ones(2, 3)
    grad[1, 2] = bad
    assert not step([param], optimizer, [grad]).isfinite()
    assert all(torch.equal(was, bucket.state[what]) for what, was in before.items())
    assert optimizer.steps == 1
    step([param], optimizer, [torch.ones(2, 3)])
    assert bucket.master.isfinite().all() and not torch.equal(before["master"], bucket.master)


def test_a_step_without_a_gradient_is_noticed():
    _, optimizer = make(Spec("w", (4,)))
    with pytest.raises(AssertionError, match="w: a step without a gradient would leave the other ranks waiting"):
        optimizer.begin_step(0)


@pytest.mark.parametrize("stages", ["ab", "ba"])
def test_gradients_are_finished_in_one_order_however_a_pipeline_rank_lists_its_stages(stages):
    optimizer = Optimizer({stage: [Unit(Spec(stage, (3,)))] for stage in stages}, NO_GROUPS)
    with in_order(*((bucket, "finish_step", bucket.name) for bucket in optimizer.buckets)) as finished:
        optimizer.finish_step()
    assert finished == ["a", "b"]


def level_3(unit=Unit, has_head: bool = False) -> tuple[nn.Sequential, Optimizer]:
    """Four units on the first of two ranks, and their optimizer; the last may be a head."""
    units = [unit(Spec(f"{i}.a", (3, 3)), Spec(f"{i}.b", (3, 3))) for i in range(4)]
    optimizer = Optimizer({0: units}, sharded(), level=3, head=units[-1] if has_head else None)
    optimizer.begin_step(1)
    return nn.Sequential(*units), optimizer


def whole(optimizer: Optimizer) -> list[int]:
    """Of which units the weights are gathered."""
    return [i for i, bucket in enumerate(optimizer.buckets) if bucket.weights.untyped_storage().nbytes()]


def test_at_level_3_an_input_without_gradient_is_refused():
    """Its unit's backward would never be announced."""
    with dryrun.fake_world(2, 0):
        units, _ = level_3()
        with pytest.raises(ValueError, match="ZeRO level 3: the input of Unit does not require grad"):
            units(torch.ones(2, 3))


@pytest.mark.parametrize("has_head, stay", [(False, []), (True, [2, 3])])
def test_at_level_3_units_are_gathered_one_ahead_and_only_the_head_stays_whole_until_backward(has_head, stay):
    """When a unit's result is there, its weights and those of the next unit are whole; when the result's gradient is
    there, its weights and those of the unit before it. The head's backward follows at once, for which the unit before
    it is prefetched. A pipeline stage without the head runs its backward much later."""
    class Watched(Unit):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            seen.append(whole(optimizer))
            if y.requires_grad:
                y.register_hook(lambda _: seen.append(whole(optimizer)))
            return y

    seen = []
    with dryrun.fake_world(2, 0):
        units, optimizer = level_3(Watched, has_head)
        for _ in range(2):  # the second time after an evaluation, which must leave nothing gathered
            y = units(torch.ones(2, 3, requires_grad=True))
            seen.append(whole(optimizer))
            y.sum().backward()
            optimizer.finish_step()
            with torch.no_grad():
                units(torch.ones(2, 3))
            optimizer.begin_step(1)
    forward, backward = [[0, 1], [1, 2], [2, 3], [3]], [[2, 3], [1, 2], [0, 1], [0]]
    assert seen == 2 * (forward + [stay] + backward + forward)


def test_new_values_wait_for_a_gather_of_the_old_ones():
    """Else it would overwrite them when it ends."""
    with dryrun.fake_world(2, 0), in_order((zero, "all_gather", "gather"), waits("wait")) as events:
        optimizer = Optimizer({0: [Unit(Spec("a", (4, 4)))]}, sharded(), level=1)
        for _ in range(2):
            optimizer.load(lambda spec, box: (events.append("read"), torch.ones([s.stop - s.start for s in box]))[1])
    assert events == ["read", "gather", "wait", "read", "gather"]


# ---- collectives ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("n", [2, *slow(3, 4, 8)])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_elements_sent_are_those_of_the_stage(pool, n, accumulated):
    """Times n/(n-1): 2P, (A+1)P, and 3AP less two all-gathers: the first unit's backward reads no weights, and the last
    unit's directly follows its forward. Gradients are sent in fp32, weights in the run's dtype."""
    batch = f"--global-batch {n * accumulated} --micro-batch 1"
    both = torch.float32, torch.bfloat16
    for dtype in both if n > 2 else both[accumulated - 1:accumulated]:
        cases = [dict(flags=f"--zero {level} {batch}", dtype=dtype) for level in (1, 2, 3)]
        for level, ranks in enumerate(for_each(pool, n, sharding.sent, cases), 1):
            for seen in ranks:
                assert len(seen["padded"]) == 6 and not seen["others"]
                P, first, last, A = sum(seen["padded"]), seen["padded"][0], seen["padded"][-1], accumulated
                gradients = seen["by_op"]["_reduce_scatter_base_"] / 4
                weights = seen["by_op"]["_allgather_base_"] / dtype.itemsize
                want = {1: (P, P), 2: (A * P, P), 3: (A * P, 2 * A * P - A * (first + last))}[level]
                assert (gradients, weights) == want and seen["by_op"]["allreduce_"] == 0


def test_gradients_are_reduced_while_backward_goes_on(pool):
    """Six buckets, one per unit; two micro-batches. The last gradient of a bucket launches its reduction, which nobody
    waits for; of a hybrid the next bucket's then launches the sum over replicas, and one is left at the end."""
    cases = [(0, False), *((level, hybrid) for level in (1, 2, 3) for hybrid in (False, True))]
    lines = [dict(flags=f"--zero {level}{' --dp-replicate 2' * hybrid}") for level, hybrid in cases]
    found = for_each(pool, 4, sharding.events, lines)
    for level, hybrid, seen in ((*case, seen) for case, ranks in zip(cases, found, strict=True) for seen in ranks):
        kind, reductions = "reduce_scatter dp" if level else "all_reduce dp", 12 if level >= 2 else 6
        backward, after = seen[:seen.index("finish")], seen[seen.index("finish") + 1:]
        launched = [event for event in backward if event != "ready"]
        assert launched.count(kind) == reductions and launched[-1] == kind
        assert launched.count("all_reduce replicate") == len(launched) - reductions == (5 if hybrid else 0)
        assert after == ["all_reduce replicate"] * hybrid
        gradients = [backward[:i].count("ready") for i, event in enumerate(backward) if event == kind]
        assert sorted(set(gradients)) == gradients and gradients[-1] == backward.count("ready")
        assert level >= 2 or gradients[0] > gradients[-1] / 2, "not before the last micro-batch"


@pytest.mark.parametrize("ranks, flags", [
    (4, "--zero 3 --dp-replicate 2"), (2, "--zero 2"), (2, "--cp 2 --cp-style ring"),
    (2, f"{MIXTRAL} --ep 2 --zero 2"), (2, "--pp 2 --schedule interleaved --layers 4 --tied"), *slow(
        (2, "--zero 0"), (2, "--zero 1"), (2, "--zero 3"), (4, "--zero 1 --dp-replicate 2"),
        (2, "--pp 2 --schedule zb-v --layers 4"), (4, "--micro-batch 6 --pp 4 --schedule 1f1b --layers 4"),
        (4, "--micro-batch 6 --pp 2 --zero 3 --schedule dualpipev --layers 4"),
        (4, "--pp 2 --tp 2 --schedule zb-h1"), (4, "--pp 2 --cp 2 --schedule afab --cp-style ring"),
        (4, f"{MIXTRAL} --pp 2 --ep 2 --schedule zb1p --layers 4 --zero 2 --micro-batch 6"),
        (2, "--cp 2"), (2, "--tp 2"), (2, "--tp 2 --sp async"), (2, f"{MIXTRAL} --tp 2 --ep 2"),
        (4, f"{MIXTRAL} --cp 2 --ep 2 --zero 3"), (2, "--cp 2 --cp-style ulysses --zero 1"),
        (4, "--tp 2 --zero 3 --recompute full"))])
def test_every_collective_is_waited_for_before_its_tensors_are_used(pool, ranks, flags):
    """Where every result is written only by wait(), and inputs are compared there, a grid still equals one process."""
    flags = f"--micro-batch 12 {flags} --bucket-mb 0"
    results, want = pool.run(ranks, sharding.delayed, flags=flags), truth(model_flags(flags))
    assert results[0]["norm"] == pytest.approx(want["norm"], rel=1e-11)
    compare(grids.whole([result["params"] for result in results]), want["params"], "weights")


def summed_over_micro_batches() -> list[float]:
    """What one gradient of 1, followed by 300 of 2^-9, add up to on two ranks at level 2."""
    weights, optimizer = make(Spec("a", (4, 4)), Spec("b", (4, 4)), groups=sharded(), level=2,
                              reduce_dtype=torch.bfloat16)
    optimizer.begin_step(301)
    for grad in (1.0, *[2**-9] * 300):
        sum((weight * grad).sum() for weight in weights).backward()
    optimizer.finish_step()
    return optimizer.buckets[0].grad_shard.unique().tolist()


def test_micro_batches_are_summed_in_fp32_whatever_is_sent(pool):
    """A sum in bf16 would stay at 2."""
    assert pool.run(2, summed_over_micro_batches) == 2 * [[2 * (1 + 300 * 2**-9)]]


def after_a_failed_step(level: int) -> list[list[float]]:
    """What a step of one micro-batch adds up to after a step that ended after its first of two."""
    units = [Unit(Spec(name, (3, 3)), Spec(f"{name}2", (3, 3))) for name in "ab"]
    optimizer = Optimizer({0: units}, sharded(), level=level, bucket_mb=0)
    optimizer.load(lambda spec, box: torch.ones([s.stop - s.start for s in box]))
    for micro_batches in (2, 1):
        optimizer.begin_step(micro_batches)
        for bucket in optimizer.buckets:
            bucket.unshard()
        sum((weight * 3.0).sum() for unit in units for weight in unit.weights).backward()
    optimizer.finish_step()
    return [bucket.within_shard(bucket.grad_shard, 0, 18).unique().tolist() for bucket in optimizer.buckets]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_step_after_one_that_failed_has_only_its_own_gradients(pool, level):
    """The failed step may have left reductions running."""
    for rank in pool.run(2, after_a_failed_step, level=level):
        assert rank == [[6.0], [6.0]]


def test_gradients_that_are_sent_to_nobody_are_not_rounded():
    [weight], optimizer = make(Spec("weight", (4, 4)), reduce_dtype=torch.bfloat16, rule="sgd", clip=0.0)
    step([weight], optimizer, [torch.full((4, 4), 1 / 3)])
    assert optimizer.buckets[0].grad_shard.unique().tolist() == [torch.tensor(1 / 3).item()]


@pytest.mark.parametrize("flags", ["--zero 0", "--zero 3 --dp-replicate 2"])
def test_gradients_sent_in_bf16_take_half_the_bytes_and_are_rounded(pool, flags):
    """Half a unit in the last place (2^-9) of each rank's term, and of each partial sum of n ranks."""
    exact, rounded = for_each(pool, 4, sharding.sent, [
        dict(flags=f"--global-batch 16 --micro-batch 2 {flags} --reduce-dtype {dtype}", dtype=torch.bfloat16)
        for dtype in ("fp32", "bf16")])
    for one, half in zip(exact, rounded):
        assert all(2 * half["by_op"][op] == one["by_op"][op] for op in ("allreduce_", "_reduce_scatter_base_"))
    exact, rounded = (grids.whole([rank["grads"] for rank in ranks]) for ranks in (exact, rounded))
    errors = [(rounded[name] - exact[name]).norm() / exact[name].norm() for name in exact]
    assert 2**-12 < max(errors) < 4 * 2**-9


def test_a_hybrid_sums_over_replicas_what_a_rank_owns_once(pool):
    cases = [dict(flags=f"--zero {level} --dp-replicate 2 --global-batch 12 --micro-batch 1", dtype=torch.float32)
             for level in (1, 2, 3)]
    for seen in chain(*for_each(pool, 4, sharding.sent, cases)):
        assert seen["by_op"]["allreduce_"] / 4 == sum(seen["padded"])


def test_a_table_that_two_stages_of_a_rank_use_is_reduced_once_a_micro_batch(pool):
    """zb-v has the embedding and the head on one rank. Each backward of a micro-batch adds to the tied table."""
    flags = "--tied --pp 2 --schedule zb-v --layers 4 --zero 2 --global-batch 8 --micro-batch 1"
    for seen in pool.run(4, sharding.sent, flags=flags, dtype=torch.float32):
        assert seen["by_op"]["_reduce_scatter_base_"] / 4 == 4 * sum(seen["padded"])


# ---- live bytes -----------------------------------------------------------------------------------------------------

@cache
def held(pool, level: int, dtype: torch.dtype, moments: str) -> list[dict]:
    flags = f"--zero {level} --moments-dtype {moments} --global-batch 4 --micro-batch 1"
    return pool.run(2, sharding.held, flags=flags, dtype=dtype)


@pytest.mark.parametrize("level, dtype, moments", [
    pytest.param(level, dtype, moments, marks=() if fast else pytest.mark.slow, id=f"{level}, {dtype}, {moments}")
    for level in range(4) for dtype, moments, fast in (
        (torch.bfloat16, "auto", True), (torch.float32, "auto", False), (torch.bfloat16, "bf16", level == 3))])
def test_live_bytes_are_those_of_the_formula(pool, level, dtype, moments):
    """All storages that exist, at every operation. With fp32 moments, of which an update makes no
    copies, activations and all that is neither weights, gradients nor optimizer state are the same at every level."""
    n, e, state = 2, dtype.itemsize, {"auto": 8, "bf16": 4}[moments] + (4 if dtype == torch.bfloat16 else 0)
    for seen in held(pool, level, dtype, moments):
        P, two = sum(seen["padded"]), sum(sorted(seen["padded"])[-2:])
        rest, peak = seen["rest"], seen["peak"]
        assert rest["optimizer"] == peak["optimizer"] == state * P // (n if level else 1)
        assert rest["weights"] == e * P // (n if level == 3 else 1)
        assert peak["weights"] == rest["weights"] + (e * two if level == 3 else 0)
        if level < 2:
            # The fp32 copies of bf16 moments during an update are as large as a gradient, and measured as such.
            copies = 8 * max(seen["padded"]) if moments == "bf16" and level == 0 else 0
            assert rest["gradients"] == peak["gradients"] - copies == 4 * P
        else:
            assert rest["gradients"] == 0 and peak["gradients"] == 4 * two
            assert rest["gradient shards"] == 4 * P // n
            more = 3 * 4 * max(seen["padded"]) // n  # one being received, two moments in fp32
            assert peak["gradient shards"] <= rest["gradient shards"] + more
        assert rest["other"] < 4096, "something else stays alive"
        usual = max(seen["peak"]["other"] for seen in held(pool, 0, dtype, "auto"))
        assert moments == "bf16" or peak["other"] <= 1.01 * usual, "sharding adds to what autograd keeps"


def test_with_replicas_two_whole_gradients_exist_too(pool):
    """Though a reduction then waits twice, for the sum over shards and for that over replicas."""
    flags = "--zero 2 --dp-replicate 2 --global-batch 8 --micro-batch 1"
    for seen in pool.run(4, sharding.held, flags=flags, dtype=torch.bfloat16):
        assert seen["peak"]["gradients"] == 4 * sum(sorted(seen["padded"])[-2:])


def test_forwards_without_a_backward_leave_no_weights(pool):
    """Old ones would be those of the next step's forward, and gathered ones would take memory after an evaluation."""
    usual, interrupted = for_each(pool, 2, sharding.trained, [
        dict(flags="--zero 3", steps=2, lr=1e-2, forwards=forwards) for forwards in (0, 2)])
    for (want, _), (got, left) in zip(usual, interrupted):
        assert left == [0, 0] and all(torch.equal(a[-1], b[-1]) for a, b in zip(want, got, strict=True))


# ---- precision ------------------------------------------------------------------------------------------------------

def test_all_ranks_skip_a_step_that_overflows(pool):
    for seen in pool.run(4, sharding.overflow):
        assert seen == [(True, True, 1024.0, 1.0), (False, False, 512.0, 1.0), (False, False, 256.0, 1.0),
                        (True, True, 256.0, 2.0)]


def weights_of(pool, cases: list[dict]) -> list[dict[str, torch.Tensor]]:
    trained = for_each(pool, 2, sharding.trained, cases)
    return [grids.whole([pieces for pieces, _ in ranks]) for ranks in trained]


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_fp16_takes_the_step_of_fp32(pool, clip):
    """Of SGD, which unlike AdamW shows the size of gradients."""
    half, full = weights_of(pool, [dict(flags=f"--zero 1 --optimizer sgd --grad-clip {clip}", dtype=dtype)
                                   for dtype in (torch.half, torch.float)])
    for name, want in full.items():
        assert (half[name] - want).norm() < 0.01 * want.norm(), name


def test_the_loss_scale_follows_the_rule_of_torch():
    """Also where each step is another optimizer's, which goes on with the state that checkpoints have."""
    rejected = (0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0)
    optimizers = [make(Spec("w", (4,)), dtype=torch.float16)[1] for _ in (*rejected, "after them")]
    ours, theirs = optimizers[0].loss_scale, torch.amp.GradScaler("cpu")
    assert (ours.value, ours.interval) == (theirs.get_scale(), theirs.get_growth_interval())
    theirs.set_growth_interval(3)
    weight = torch.zeros(1, requires_grad=True)
    rule = torch.optim.SGD([weight], lr=0.0)
    for bad, optimizer, after in zip(rejected, optimizers, optimizers[1:]):
        weight.grad = torch.tensor([torch.inf if bad else 1.0])
        theirs.scale(torch.zeros(1))
        theirs.step(rule)
        theirs.update()
        optimizer.loss_scale.interval = 3
        optimizer.loss_scale.update(torch.tensor(float(bad)))
        for name, number in after.extra_state().items():
            number.copy_(optimizer.extra_state()[name])
        assert after.loss_scale.value.item() == theirs.get_scale()


def test_bf16_moments_train_almost_as_fp32_ones(pool):
    usual, low = weights_of(pool, [dict(flags=f"--zero 1 --moments-dtype {moments}", steps=8, lr=1e-3)
                                   for moments in ("auto", "bf16")])
    for name, fp32 in usual.items():
        difference = (low[name] - fp32).norm() / fp32.norm()
        assert 0 < difference < 0.02, name  # neither nan nor infinite
