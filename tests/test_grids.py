"""Every grid is equal to one process: all gradients, the norm, and what two optimizer steps make of everything.

A new grid is one more line in GRIDS: (ranks, flags).
"""
import re
from contextlib import closing
from functools import lru_cache
from statistics import median

import grids
import pairs
import pytest
import reference
import torch
from grids import DEEPSEEK, LATENT, MIXTRAL
from pool import Pool
from program import ROOT

from core import rules
from core.param import DTYPES

GRIDS = [
    (1, "--micro-batch 8"),
    (1, "--micro-batch 3 --tied"),
    (2, "--micro-batch 6"),
    (2, "--micro-batch 6 --tied --bucket-mb 0.05"),
    (2, "--micro-batch 6 --attention math --grad-clip 0"),
    (2, "--micro-batch 6 --zero 1"),
    (2, "--micro-batch 6 --zero 2"),
    (3, "--micro-batch 4 --zero 1 --bucket-mb 0.05"),
    (4, "--micro-batch 3 --zero 1 --dp-replicate 2"),
    (4, "--micro-batch 3 --zero 2 --dp-replicate 2"),
    (4, "--micro-batch 6 --pp 2 --zero 3 --schedule dualpipev --layers 4 --tied"),  # stages that share gathered weights
    (2, f"--global-batch 12 --micro-batch 3 {MIXTRAL} --tp 2 --sp off --ep 2 --seq-len 21"),  # 63 tokens on 2 ranks
    (2, "--micro-batch 12 --tp 2"),
    (2, "--micro-batch 12 --tp 2 --sp off --tied"),
    (2, "--micro-batch 12 --tp 2 --qk-norm --qkv-bias --recompute selective --z-loss 0.01"),
    (3, "--micro-batch 16 --tp 3 --heads 6 --kv-heads 3 --ffn 57"),
    (4, "--micro-batch 24 --tp 4 --kv-heads 2"),
    (2, "--micro-batch 12 --cp 2"),
    (3, "--micro-batch 16 --cp 3 --cp-style ring --seq-len 23"),
    (3, "--micro-batch 16 --cp 3 --cp-style ulysses --heads 6 --kv-heads 2 --recompute selective"),
    (2, "--micro-batch 12 --pp 2"),
    (2, "--micro-batch 6 --pp 2 --schedule afab --tied"),
    (2, "--micro-batch 6 --pp 2 --schedule interleaved --layers 7 --virtual-stages 3 --recompute full"),
    (3, "--micro-batch 24 --pp 3 --tied"),
    (3, "--micro-batch 8 --pp 3 --schedule zb-v --layers 6 --tied --recompute full"),
    (1, f"--micro-batch 8 {MIXTRAL}"),
    (1, f"--micro-batch 6 {DEEPSEEK} --recompute selective"),
    (1, "--micro-batch 8 --mtp --mtp-weight 0.1 --z-loss 0.01 --mask-documents"),
    (2, "--micro-batch 12 --mtp --cp 2 --seq-len 21"),
    (4, "--micro-batch 6 --mtp --tp 2 --zero 3"),
    (2, "--micro-batch 12 --mtp --pp 2 --layers 2 --recompute full"),  # alone on its stage
    (2, f"--micro-batch 6 {MIXTRAL} --ep 2"),
    (2, f"--micro-batch 12 {MIXTRAL} --aux-over micro-batch --ep 2 --zero 1"),
    (2, f"--micro-batch 6 {MIXTRAL} --tp 2 --ep 2"),
    (2, f"--micro-batch 12 {DEEPSEEK} --tp 2 --sp off --ep 2"),
    (2, f"--micro-batch 12 {MIXTRAL} --cp 2 --ep 2 --seq-len 21"),
    (4, f"--micro-batch 6 {MIXTRAL} --ep 4"),
    (1, "--micro-batch 8 --window 5 --full-attention-every 2 --qk-norm"),
    (2, "--micro-batch 12 --cp 2 --window 7 --recompute full"),
    (2, "--micro-batch 12 --pp 2 --schedule zb-h1 --window 6 --full-attention-every 2"),
    (3, "--micro-batch 16 --cp 3 --cp-style ring --seq-len 23 --window 9 --full-attention-every 3 --attention math"),
    (4, "--micro-batch 24 --cp 4 --cp-ulysses 2 --window 7 --mask-documents --zero 1"),
    (2, "--micro-batch 12 --cp 2 --cp-zigzag document --mask-documents --seq-len 21"),
    (1, f"--micro-batch 8 {LATENT} --recompute selective"),
    (1, f"--micro-batch 12 {LATENT} --q-lora-rank 0 --attention math --recompute full --window 7 "
        "--full-attention-every 2"),
    (2, f"--micro-batch 12 {LATENT} --v-head-dim 10 --tp 2 --zero 1"),
    (4, f"--micro-batch 24 {LATENT} --tp 4 --sp off --recompute selective --attention math"),
    (2, "--micro-batch 12 --tp 2 --qkv-bias --out-bias --ffn-bias --recompute full --rope-scaling 3 "
        "--original-seq-len 30 --rope-theta 50"),
    (4, "--micro-batch 6 --tp 2 --sp off --pp 2 --schedule zb-h1 --out-bias --ffn-bias --no-rope-every 2 "
        "--rope-type linear --rope-scaling 3"),
    (2, "--micro-batch 12 --cp 2 --rope-type dynamic --rope-scaling 3 --original-seq-len 10 --no-rope-every 3 "
        "--qk-norm"),
    (2, f"--micro-batch 12 {LATENT} --tp 2 --zero 3 --rope-type yarn --rope-scaling 3 --original-seq-len 12 "
        "--rope-theta 10 --rope-fast-turns 1 --rope-mscale 0.7 --rope-attention-factor 1.3"),
    (2, "--micro-batch 6 --mtp --rope-type yarn --rope-scaling 3 --original-seq-len 40 --rope-fast-turns 4"),
]
MORE = [  # in the slow tier: axes of more ranks than pairs have, and what is beside the features
    (4, "--micro-batch 24 --cp 4 --cp-style ring --cp-zigzag document --mask-documents --zero 1 --attention math"),
    (3, f"--micro-batch 16 {LATENT} --cp 3 --seq-len 23 --mask-documents --attention math --q-lora-rank 0"),
    (4, "--micro-batch 6 --pp 4 --schedule dualpipev --layers 8 --tied --recompute full"),
    (8, "--micro-batch 2 --tied --bucket-mb 0"),
    (8, "--micro-batch 3 --zero 3"),
    (8, "--micro-batch 12 --cp 2 --cp-style ulysses --tp 4 --kv-heads 2 --zero 1 --recompute full --qk-norm --tied"),
    (4, "--micro-batch 24 --tp 4 --kv-heads 2 --sp off --recompute selective --attention math"),
    (8, "--micro-batch 24 --tp 8 --kv-heads 2 --bucket-mb 0"),
    (8, "--micro-batch 24 --cp 8 --cp-style ring --seq-len 30"),
    (2, "--micro-batch 6 --mtp --pp 2 --schedule zb-v --layers 4"),  # whose first rank has the last stage, too
    (8, "--micro-batch 24 --cp 8 --cp-style ring --cp-ulysses 4 --mask-documents --zero 3"),
    (8, "--micro-batch 3 --zero 2 --dp-replicate 4"),
    (3, "--micro-batch 16 --tp 3 --heads 6 --kv-heads 3 --ffn 57 --sp off --vocab 257 --tied --recompute full"),
    (8, "--micro-batch 6 --tp 4 --zero 3 --kv-heads 2 --vocab 257 --recompute selective"),
    (4, "--micro-batch 12 --cp 4 --cp-style ring --window 8 --zero 3 --tied"),
    (8, "--micro-batch 12 --cp 8 --cp-style ulysses --kv-heads 2 --seq-len 32"),
    (8, "--micro-batch 12 --cp 8 --cp-ulysses 4 --seq-len 30 --mask-documents --attention math --recompute selective "
        "--tied"),
    (8, f"--micro-batch 6 {MIXTRAL} --cp 4 --cp-style ring --cp-ulysses 2 --ep 4 --zero 3"),
    (8, "--micro-batch 12 --cp 8 --cp-style ring --cp-ulysses 2 --cp-zigzag document --mask-documents --recompute "
        "selective"),
    (8, f"--micro-batch 6 {MIXTRAL} --cp 4 --cp-zigzag document --mask-documents --tp 2 --ep 4 --zero 2 --seq-len 21"),
    (8, "--micro-batch 6 --cp 4 --cp-ulysses 2 --cp-zigzag document --mask-documents --pp 2 --schedule zb-h1"),
    (8, "--micro-batch 6 --pp 4 --zero 2 --schedule zb1p --layers 8 --tied"),
    (4, f"--micro-batch 12 {MIXTRAL} --aux-over micro-batch --cp 2 --tp 2 --sp off --ep 4 --recompute selective"),
    (4, "--micro-batch 6 --mtp --pp 4 --schedule interleaved --layers 9 --virtual-stages 2 --recompute full"),
    (8, f"--micro-batch 6 {DEEPSEEK} --mtp --pp 2 --ep 4 --schedule zb1p --layers 5 --zero 2"),
    (8, f"--micro-batch 6 {MIXTRAL} --ep 8 --optimizer sgd"),
    (8, f"--micro-batch 3 {DEEPSEEK} --tp 2 --ep 8 --bucket-mb 0"),
    (8, f"--micro-batch 12 {DEEPSEEK} --pp 2 --cp 2 --tp 2 --ep 4 --schedule dualpipev --layers 5 --recompute full"),
    (8, f"--micro-batch 12 {LATENT} --cp 8 --seq-len 30 --recompute selective"),
    (8, f"--micro-batch 12 {LATENT} --tp 8 --bucket-mb 0 --tied"),
    (8, f"--micro-batch 12 {LATENT} {DEEPSEEK} --pp 2 --cp 2 --tp 2 --ep 4 --schedule zb-v --layers 5"),
]
# What docs/PLAYBOOK.md runs: five dimensions, each of at least two.
FIVE_DIMENSIONS = "--dp 2 --cp 2 --tp 2 --pp 2 --ep 4 --zero 1 --schedule zb-h1 --recompute selective"
# Flags that must not change a result.
NOT_THE_MODEL = ("--micro-batch", "--bucket-mb", "--attention", "--zero", "--dp-replicate", "--tp", "--recompute",
                 "--sp", "--cp", "--cp-style", "--cp-zigzag", "--cp-ulysses", "--pp", "--schedule", "--virtual-stages",
                 "--ep", "--dp")


@lru_cache(maxsize=32)  # a random grid has a truth of its own
def truth(flags: str, steps: int = grids.STEPS) -> dict:
    """What the reference makes of the model and optimizer that the flags ask for."""
    settings = grids.settings_of(flags)
    given = [(tokens, labels, grids.begins(tokens, settings)) for tokens, labels in grids.batches(settings)[:steps]]
    return reference.train(grids.initial(settings), given, settings.model, settings.optim, settings.batch.micro_batch)


def model_flags(grid: str) -> str:
    names = [name for name in NOT_THE_MODEL if name != "--micro-batch" or "--aux-over" not in grid]
    return re.sub(rf"({'|'.join(names)}) \S+ ?", "", grid).strip()


def compare(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], what: str) -> None:
    """Every tensor by name, to 1e-10 of its largest element. A parameter that was never compared is a failure."""
    assert got.keys() == want.keys(), f"{what}: compared {sorted(got)}, and there are {sorted(want)}"
    for name, tensor in want.items():
        error = (got[name] - tensor).abs().max() / tensor.abs().max()
        assert error < 1e-10, f"{what} of {name} differs by {error:.1e} of its largest element"  # a NaN fails, too


def cases(grids: list[tuple[int, str]], marks=()) -> list:
    return [pytest.param(ranks, grid, id=f"{ranks} ranks {grid}", marks=marks) for ranks, grid in grids]


@pytest.mark.parametrize("ranks, grid", cases(GRIDS) + cases(MORE, [pytest.mark.slow]))
def test_a_grid_equals_one_process(pool, ranks, grid):
    equals_one_process(pool, ranks, grid)


# ---- grids at random ------------------------------------------------------------------------------------------------

@pytest.mark.random
@pytest.mark.parametrize("exact", [True, False], ids=["fp64", "fewer bits"])
def test_a_grid_at_random(pool, number, exact):
    """`pytest -m random --grids 200`: as many seeds, each in fp64 and in fewer bits. Of a grid that fails the simplest
    that still does is named."""
    choice, more = pairs.random_grid(number, exact)
    problem = problem_of(pool, choice, more)
    while problem and (less := next((less for less in pairs.simplify(choice, more) if problem_of(pool, *less)), None)):
        choice, more = less
        problem = problem_of(pool, choice, more)
    assert not problem, problem


def problem_of(pool, choice: pairs.Choice, more: list[str]) -> str:
    """Where a grid differs from one process; "" if it does not."""
    ranks, flags = pairs.grid_of(choice)
    grid = " ".join([flags, *more])
    try:
        is_as_one_process(pool, ranks, grid)
    except (AssertionError, RuntimeError) as error:
        return f"{ranks} ranks {grid}: {error}"
    return ""


def pytest_generate_tests(metafunc):
    if metafunc.function is test_a_grid_at_random:
        first, count = metafunc.config.getoption("--first-grid"), metafunc.config.getoption("--grids")
        metafunc.parametrize("number", range(first, first + count))


# ---- all pairs of features ------------------------------------------------------------------------------------------

def pairs_that_meet(exact: bool) -> list[tuple[int, str]]:
    return [pairs.grid_of(choice) for choice in pairs.all_pairs() if pairs.is_exact(choice) == exact]


def test_every_two_features_are_together_in_a_grid_or_refused():
    met = set().union(*map(pairs.pairs_of, pairs.all_pairs()))
    assert pairs.every_pair() - met == pairs.IMPOSSIBLE
    for both in sorted(pairs.IMPOSSIBLE):
        ranks, flags = pairs.grid_of(pairs.PLAIN | dict([("dtype", "bf16"), *both]))
        named = [(name, value) for name, value in both if value not in ("0", "fp64")] or [both[1]]
        with pytest.raises(ValueError) as refusal:
            rules.parse(flags.split(), ranks)
        for name, value in named:  # the value, or the flag that gives it
            words = [value, *(word for word in pairs.FEATURES[name][value].split() if word.startswith("--"))]
            assert any(word in str(refusal.value) for word in words), both


@pytest.mark.parametrize("ranks, grid", cases(pairs_that_meet(True) + pairs_that_meet(False)))
def test_features_that_meet_are_as_in_one_process(pool, ranks, grid):
    is_as_one_process(pool, ranks, grid)


def is_as_one_process(pool: Pool, ranks: int, grid: str) -> None:
    if "--dtype fp64" in grid:
        equals_one_process(pool, ranks, grid)
    else:
        errs_as_one_process_does(pool, ranks, grid)


def errs_as_one_process_does(pool: Pool, ranks: int, grid: str) -> None:
    """No gradient is further from the truth in fp64 than 1.3 times what one process makes of it, or of half of all (of
    a handful of numbers it may be near by luck), or, with experts, of the worst (another token may choose another
    expert). In FP8 1.5 times: two ranks with copies of a head quantise two parts of one gradient, whose errors add up
    to the square root of 2. And more by three times the standard deviation, 1 / sqrt(n), of the ratio of two norms of
    n errors: what chance does to small tensors. (Of 8 seeds the 6 numbers of a key's bias or norm erred up to 2.4 times
    as much as one process's, another one each time; in one of 30 grids 2.1 times, on one model of CPU alone.)"""
    steps = 2 if "--batch-ramp" in grid else 1  # the first one's gradients are compared
    results = pool.run(ranks, grids.run, grid=grid, last=steps)
    want, limits = alone(model_flags(grid))
    grads, usual = want["grads"][0], (max if "--experts" in grid else median)(limits.values())
    for name, error in errors(results, want).items():
        factor = 1.5 if "--fp8" in grid else 1.3
        if name in grads:
            factor *= 1 + 3 / grads[name].numel()**0.5
        limit = factor * max(limits[name], usual)
        assert error < limit, f"{name} errs by {error:.2e}, more than {limit:.2e}"
    assert all(result["rounded"] for result in results), "weights are the rounded master weights"
    check_agreement(results)


@lru_cache(maxsize=32)  # a random grid has a truth of its own
def alone(flags: str) -> tuple[dict, dict[str, float]]:
    """The truth in fp64 of what a run in fewer bits computes, and how far one process is from it."""
    want = truth(re.sub(r"--(dtype|fp8|moments-dtype) \S+ ?", "", flags), steps=1)
    return want, errors([grids.run(flags, last=1)], want)


def errors(results: list[dict], want: dict) -> dict[str, float]:
    """Of the loss and every gradient of the first step, which all begin with the same weights, relative to its norm."""
    grads = grids.whole([result["grads"][0] for result in results])
    assert grads.keys() == want["grads"][0].keys()
    out = {name: ((grads[name].double() - true).norm() / true.norm()).item() for name, true in want["grads"][0].items()}
    return out | {"loss": max(abs(result["loss"][0] / want["loss"][0] - 1) for result in results)}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("model", ["", LATENT, "--experts 2 --top-k 2 --expert-ffn 20 --shared-experts 1",
                                   "--mtp --recompute full"], ids=["dense", "latents", "experts", "mtp"])
def test_one_process_errs_by_the_roundings_of_what_it_stores(model, dtype):
    """The reference, rounded where a run has 16 bits, errs as much: to a tenth, and chance as in `errs_as_one_process_
    does`. Every token has all experts, since rounding may change a choice."""
    flags = f"--layers 2 --micro-batch 4 {model}"
    settings = grids.settings_of(flags)
    tokens, labels = grids.batches(settings)[0]
    weights = {name: value.to(DTYPES[dtype]).double() for name, value in grids.initial(settings).items()}

    def by_reference() -> dict[str, torch.Tensor]:
        given = [(tokens, labels, grids.begins(tokens, settings))]
        return reference.train(weights, given, settings.model, settings.optim, settings.batch.micro_batch)["grads"][0]

    exact, result = by_reference(), grids.run(f"{flags} --dtype {dtype}", last=1)
    with reference.Rounding(DTYPES[dtype], scale=1024.0 if dtype == "fp16" else 1.0):
        rounded = by_reference()
    found, scale = grids.whole([result["grads"][0]]), result["extra_state"].get("scale", 1.0)
    limits = {name: (rounded[name] - true).norm() / true.norm() for name, true in exact.items()}
    for name, true in exact.items():
        error = (found[name].double() / scale - true).norm() / true.norm()
        limit = 1.1 * (1 + 3 / true.numel()**0.5) * max(limits[name], median(limits.values()))
        assert error < limit, f"{name} errs by {error:.2e}, more than {limit:.2e}"


@pytest.mark.slow
@pytest.mark.parametrize("experts", [MIXTRAL, DEEPSEEK], ids=["mixtral", "deepseek"])
def test_five_dimensions_equal_one_process(experts):
    with closing(Pool(16)) as pool:
        equals_one_process(pool, 16, f"--micro-batch 6 {experts} {FIVE_DIMENSIONS} --tied --layers 4")


def test_five_dimensions_are_what_the_playbook_page_runs():
    page = (ROOT / "docs" / "PLAYBOOK.md").read_text()
    assert f"torchrun --nproc_per_node=16 train.py --preset tiny-moe {FIVE_DIMENSIONS}" in page


def equals_one_process(pool: Pool, ranks: int, grid: str) -> None:
    results, want = pool.run(ranks, grids.run, grid=grid), truth(model_flags(grid))
    for step in range(grids.STEPS):
        for result in results:
            assert result["loss"][step] == pytest.approx(want["loss"][step], rel=1e-11)
            assert result["norm"][step] == pytest.approx(want["norm"][step], rel=1e-11)
        owned = sum(result["square"][step] for result in results)
        assert owned == pytest.approx(want["norm"][step] ** 2, rel=1e-11), "squares of the owned parts"
        grads = grids.whole([result["grads"][step] for result in results])
        compare(grads, want["grads"][step], f"step {step}: gradient")
    for what in ("params", "m", "v"):
        if what in want:
            compare(grids.whole([result[what] for result in results]), want[what], what)
    biases = [item for result in results for item in result["extra_state"].items() if item[0] not in ("steps", "scale")]
    assert {name for name, _ in biases} == want["biases"].keys()
    assert all(torch.equal(bias, want["biases"][name]) for name, bias in biases)
    check_agreement(results)


def check_agreement(results: list[dict]) -> None:
    """Whoever holds the same part of a parameter holds the same bits, and every rank of a group issued the same
    collectives in the same order."""
    bits, calls = {}, {}
    for rank, result in enumerate(results):
        for place, there in result["visible"].items():
            assert bits.setdefault(place, there) == there, f"rank {rank} has other bits in {place}"
        for group in {call.group for call in result["collectives"]}:
            issued = [call for call in result["collectives"] if call.group == group]
            assert calls.setdefault(group, issued) == issued, f"rank {rank} called group {group} differently"


def test_clipping_and_masks_are_active():
    """What would make the comparisons above too easy."""
    settings, want = grids.settings_of(""), truth("")
    assert min(want["norm"]) > 1.5 * settings.optim.grad_clip
    for _, labels in grids.batches(settings):
        ignored = (labels < 0).double().mean(1)
        assert (ignored == 1).any() and ((0 < ignored) & (ignored < 1)).any()


def test_a_process_group_of_one_rank_changes_nothing(pool):
    """An axis of size 1 is no axis: weights after two steps, which the moments are in, are the same bits."""
    grid = "--micro-batch 8 --tied"
    (there,), alone = pool.run(1, grids.run, grid=grid), grids.run(grid)
    assert all(there[what] == alone[what] for what in ("visible", "loss", "norm"))
