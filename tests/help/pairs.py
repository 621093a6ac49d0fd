"""All pairs: grids in which every two features of training meet. Most bugs of combinations need
only two features.

FEATURES names the features of a run, and IMPOSSIBLE the pairs that never meet. tests/test_grids.py
shows that the command line refuses these pairs. data/pairs.txt has a few small grids, chosen by
`python tests/help/pairs.py`. A new schedule or style must be named here before a grid can have it.
"""
import random
from itertools import combinations
from math import prod
from pathlib import Path

import numpy as np

LATENT = ("--heads 8 --kv-heads 8 --head-dim 10 --kv-lora-rank 11 --q-lora-rank 14 --rope-head-dim 4 "
          "--v-head-dim 9")
FEATURES = {
    "zero": {"0": "", "1": "--zero 1", "2": "--zero 2", "3": "--zero 3"},
    "replicas": {"1": "", "2": "--dp-replicate 2"},
    "cp": {"none": "", "allgather": "--cp 2", "ring": "--cp 2 --cp-style ring", "ulysses": "--cp 2 --cp-style ulysses",
           "both": "--cp 4 --cp-style ring --cp-ulysses 2"},
    "tp": {"none": "", "sp": "--tp 2", "no sp": "--tp 2 --sp off", "async": "--tp 2 --sp async"},
    "schedule": {"none": "", **{name: f"--pp 2 --schedule {name}" for name in (
        "afab", "1f1b", "interleaved", "zb-h1", "zb1p", "zb-v", "dualpipev")}},
    "experts": {"none": "", "ep 1": "", "edp 1": "", "edp 2": ""},
    "recompute": {"none": "", "selective": "--recompute selective", "full": "--recompute full"},
    "documents": {"mix": "", "masked": "--mask-documents"},
    "seq_len": {"24": "", "22": "--seq-len 22"},  # padded with cp
    "kv": {"heads": "", "copies": "--kv-heads 1", "latents": LATENT},  # copies: on each tp rank
    "tables": {"two": "", "tied": "--tied"}, "mtp": {"none": "", "one": "--mtp"},
    "qk": {"plain": "", "norm": "--qk-norm"}, "biases": {"none": "", "qkv": "--qkv-bias"},
    "optimizer": {"adamw": "", "sgd": "--optimizer sgd", "muon": "--optimizer muon"},
    "batch": {"constant": "", "ramp": "--batch-ramp"},
    "dtype": {"fp64": "--dtype fp64", "bf16": "--dtype bf16", "fp16": "--dtype fp16"},
    "fp8": {"none": "", "tensorwise": "--fp8 tensorwise", "blockwise": "--fp8 blockwise"},
    "moments_dtype": {"auto": "", "bf16": "--moments-dtype bf16"},
}
PLAIN = {name: next(iter(values)) for name, values in FEATURES.items()}
EXACT = {"dtype": "fp64", "fp8": "none", "moments_dtype": "auto"}  # needed to compare with the reference to 1e-10
IMPOSSIBLE = {
    (("zero", "0"), ("replicas", "2")),
    (("tp", "async"), ("fp8", "tensorwise")), (("tp", "async"), ("fp8", "blockwise")),
    *((("dtype", dtype), ("fp8", fp8)) for dtype in ("fp64", "fp16") for fp8 in ("tensorwise", "blockwise")),
    (("dtype", "fp64"), ("moments_dtype", "bf16")),
    *((("optimizer", rule), ("moments_dtype", "bf16")) for rule in ("sgd", "muon")),
    (("cp", "both"), ("kv", "copies")),
    *((("cp", style), ("kv", "latents")) for style in ("ring", "ulysses", "both")),
    (("kv", "latents"), ("qk", "norm")), (("kv", "latents"), ("biases", "qkv")),
}
NEVER_WITH = {one: {two for both in IMPOSSIBLE if one in both for two in both} for both in IMPOSSIBLE for one in both}
MIXTRAL = "--experts 8 --top-k 2 --expert-ffn {} --router-z-loss 0.02 --aux-loss 0.3"
DEEPSEEK = ("--experts 8 --top-k 3 --expert-ffn {} --router sigmoid --router-scale 2.5 --expert-groups 4 "
            "--top-groups 2 --shared-experts 2 --dense-layers 1 --router-bias-rate 0.002 --aux-loss 0.2")
WIDE = "--hidden 128 --heads 4 --kv-heads 4 --head-dim {} --ffn 256"  # divisible by FP8's blocks, also at --tp 2
WIDE_LATENT = ("--heads 4 --kv-heads 4 --head-dim 128 --kv-lora-rank 128 --q-lora-rank 256 --rope-head-dim 64 "
               "--v-head-dim 64")
MOST_RANKS, TRIED, ROUNDS = 8, 20_000, 3000
CHOSEN = Path(__file__).parent.parent / "data" / "pairs.txt"
SLOWER = {("experts", "ep 1"): 1.4, ("experts", "edp 1"): 1.4, ("experts", "edp 2"): 1.4, ("recompute", "full"): 1.2,
          ("kv", "latents"): 1.2, ("cp", "ring"): 1.2, ("cp", "both"): 1.2,
          ("tp", "async"): 1.5, ("fp8", "tensorwise"): 3, ("fp8", "blockwise"): 3}
Choice = dict[str, str]  # feature -> value


def pairs_of(choice: Choice) -> set[tuple]:
    return set(combinations(choice.items(), 2))


def every_pair() -> set[tuple]:
    return {((a, x), (b, y)) for a, b in combinations(FEATURES, 2) for x in FEATURES[a] for y in FEATURES[b]}


def is_exact(choice: Choice) -> bool:
    return EXACT.items() <= choice.items()


def sizes(choice: Choice) -> dict[str, int]:
    """Return the sizes of the axes. dp is as small as the features allow, but 2 if nothing else is
    parallel."""
    cp, tp, pp = (dict(none=1, both=4).get(choice[name], 2) for name in ("cp", "tp", "schedule"))
    replicas = int(choice["replicas"])
    ep = 2 if choice["experts"].startswith("edp") else 1
    edp = 2 if choice["experts"] == "edp 2" else 1
    dp = replicas
    while (dp // replicas * cp * tp < ep * edp or (choice["zero"] != "0" and dp // replicas * cp == 1)
           or dp * cp * tp * pp == 1):
        dp *= 2
    return dict(dp=dp, cp=cp, tp=tp, pp=pp, ep=ep)


def ranks_of(choice: Choice) -> int:
    return prod(size for axis, size in sizes(choice).items() if axis != "ep")  # ep shares other axes' ranks


def length_of(choice: Choice) -> tuple[int, int]:
    """Return (layers, accumulated micro-batches). They are few, and odd in a pipeline unless the
    schedule needs other numbers."""
    layers = 4 if choice["schedule"] in ("interleaved", "zb1p", "zb-v", "dualpipev") else 3
    return layers, dict(none=2, dualpipev=4).get(choice["schedule"], 3)


def cost(choice: Choice) -> float:
    """Estimate the time of a grid on a CPU, in relative terms.

    It is fitted to 94 other grids. The logarithms of the times of the chosen grids differ from it
    by 0.27 (standard deviation).
    """
    layers, accumulated = length_of(choice)
    blocks = (layers / sizes(choice)["pp"] + (choice["mtp"] != "none")) * accumulated * (2 if is_exact(choice) else 1)
    slower = prod(SLOWER.get(item, 1) for item in choice.items())
    if choice["optimizer"] == "muon":  # it multiplies matrices in bf16, and matrices of FP8 grids are large
        slower *= 1.2 if choice["fp8"] == "none" else 3
    return (1 + ranks_of(choice)) * (5 + blocks) * slower


def grid_of(choice: Choice) -> tuple[int, str]:
    """Return (ranks, flags).

    In a batch ramp, one step has one micro-batch less than the other. In exact grids this is the
    first step. In others it is the second, because rounding errors are compared in the first.
    dualpipev needs four micro-batches, so its second step has one more instead.
    """
    size, wide = sizes(choice), choice["fp8"] != "none"
    layers, accumulated = length_of(choice)
    micro_batch = max(1, (8 if size["pp"] == 1 else 4) // size["dp"])
    together = micro_batch * size["dp"]  # sequences of a micro-batch on all data parallel ranks
    first, second = (0, 1) if choice["schedule"] == "dualpipev" else (-1, 0) if is_exact(choice) else (0, -1)
    ramp = f"--batch-ramp {(accumulated + first) * together}@0,{(accumulated + second) * together}@1"
    flags = [f"--layers {layers} --global-batch {accumulated * together} --micro-batch {micro_batch}"]
    if wide:
        flags.append(WIDE.format(128 if choice["kv"] == "copies" else 64))
    flags += [ramp if (name, value) == ("batch", "ramp") else FEATURES[name][value] for name, value in choice.items()]
    if choice["kv"] == "latents" and wide:
        flags.append(WIDE_LATENT)
    if choice["experts"] != "none":
        kind = DEEPSEEK if choice["experts"] == "edp 1" else MIXTRAL
        flags.append(kind.format(128 if wide else 12) + f" --ep {size['ep']}")
    return ranks_of(choice), " ".join(filter(None, flags))


def draw_choice(generator: random.Random, fixed: Choice) -> Choice:
    """Draw a random choice that has the `fixed` values and no IMPOSSIBLE pair."""
    choice = dict(fixed)
    names = [name for name in FEATURES if name not in fixed]
    for name in generator.sample(names, len(names)):
        choice[name] = generator.choice([value for value in FEATURES[name]
                                         if NEVER_WITH.get((name, value), set()).isdisjoint(choice.items())])
    return {name: choice[name] for name in FEATURES}


def cover(missing: set[tuple], fixed: Choice, generator: random.Random) -> list[Choice]:
    """Return choices with the `fixed` values that together have all `missing` pairs.

    Of TRIED random choices, take the one with the most new pairs for its cost, until no pair is
    missing. Then, ROUNDS times, drop some and complete the rest again. Keep the result if it is
    cheaper.
    """
    each = TRIED // len(missing)
    tried = [draw_choice(generator, fixed | dict(pair)) for pair in sorted(missing) for _ in range(each)]
    tried = [choice for choice in tried if ranks_of(choice) <= MOST_RANKS]
    costs = np.array([cost(choice) for choice in tried])
    has = np.array([[pair in pairs for pair in missing] for pairs in map(pairs_of, tried)], np.float32)

    def complete(chosen: list[int]) -> list[int]:
        left = ~has[chosen].any(0)
        while left.any():
            chosen = [*chosen, int((has @ left / costs).argmax())]
            left &= has[chosen[-1]] == 0
        return chosen

    best = complete([])
    for _ in range(ROUNDS):
        other = complete(generator.sample(best, len(best) - generator.randint(1, 5)))
        best = min(best, other, key=lambda chosen: costs[chosen].sum())
    return [tried[i] for i in best]


EXTRAS = {  # more flags of random grids; most often none of a row is drawn
    "window": ["", "", "--window 5", "--window 9 --full-attention-every 2"], "grad_clip": ["", "", "--grad-clip 0"],
    "buckets": ["", "--bucket-mb 0", "--bucket-mb 0.05"], "attention": ["", "", "--attention math"],
    "z loss": ["", "", "--z-loss 0.01"], "head": ["", "", "--head-dim 12"], "vocab": ["", "", "--vocab 101"],
    "rope": ["", "", "--rope-theta 100"]}


def random_grid(seed: int, exact: bool = True) -> tuple[Choice, list[str]]:
    """Return (a choice, flags of EXTRAS), different for every seed. exact: in fp64; otherwise in
    fewer bits.

    One third of the grids has at most 2 ranks, one third at most 4, and one third at most 8. A grid
    of two costs a seventh of a grid of eight, and has most of what can go wrong. In fewer bits
    there are no experts, because a token that chooses another expert hides every other error.
    """
    generator, fixed = random.Random(f"a grid at random {seed}"), EXACT if exact else {"experts": "none"}
    most, choice = generator.choice((2, 4, MOST_RANKS)), draw_choice(generator, fixed)
    while ranks_of(choice) > most or is_exact(choice) != exact:
        choice = draw_choice(generator, fixed)
    extras = {name: generator.choice(values) for name, values in EXTRAS.items()}
    if not exact:
        del extras["head"]  # FP8's blocks need other heads
    return choice, [flags for flags in extras.values() if flags]


def simplify(choice: Choice, more: list[str]) -> list[tuple[Choice, list[str]]]:
    """Return all grids with one feature less."""
    plain = [(choice | {name: value}, more) for name, value in PLAIN.items()
             if name not in EXACT and choice[name] != value]
    plain += [(choice, more[:i] + more[i + 1:]) for i in range(len(more))]
    return [(choice, more) for choice, more in plain if not pairs_of(choice) & IMPOSSIBLE]


def all_pairs() -> list[Choice]:
    """Return the chosen grids. In the file, each is a line of values, in the order of FEATURES."""
    return [dict(zip(FEATURES, line.split(", "), strict=True)) for line in CHOSEN.read_text().splitlines()]


def choose(generator: random.Random) -> list[Choice]:
    """Choose grids for all pairs. Pairs that can be exact meet in exact grids."""
    possible = every_pair() - IMPOSSIBLE
    exact = cover({pair for pair in possible if all(EXACT.get(name, value) == value for name, value in pair)},
                  EXACT, generator)
    return exact + cover(possible - {pair for choice in exact for pair in pairs_of(choice)}, {}, generator)


if __name__ == "__main__":
    tries = []
    for seed in range(3):
        tries.append(choose(random.Random(seed)))
        print(f"seed {seed}: {len(tries[-1])} grids, which cost {sum(map(cost, tries[-1])):.0f}", flush=True)
    best = min(tries, key=lambda choices: sum(map(cost, choices)))
    CHOSEN.write_text("".join(", ".join(choice.values()) + "\n" for choice in best))
