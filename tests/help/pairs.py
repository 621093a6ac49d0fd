"""All pairs: grids in which every two features of training meet, as most bugs of combinations need no third.

FEATURES names what a run may have, and IMPOSSIBLE which two never meet; tests/test_grids.py shows that the command line
refuses those. `all_pairs` chooses few small grids by a greedy search that gives the same ones every time.
"""
import random
from functools import cache
from itertools import combinations

LATENT = ("--heads 8 --kv-heads 8 --head-dim 10 --kv-lora-rank 11 --q-lora-rank 14 --rope-head-dim 4 "
          "--v-head-dim 9")
FEATURES = {
    "zero": {"0": "", "1": "--zero 1", "2": "--zero 2", "3": "--zero 3"},
    "replicas": {"1": "", "2": "--dp-replicate 2"},
    "cp": {"none": "", "allgather": "--cp 2", "ring": "--cp 2 --cp-style ring", "ulysses": "--cp 2 --cp-style ulysses",
           "both": "--cp 4 --cp-style ring --cp-ulysses 2"},
    "tp": {"none": "", "sp": "--tp 2", "no sp": "--tp 2 --sp off", "async": "--tp 2 --sp async"},
    "schedule": {"none": "", **{name: f"--pp 2 --layers 4 --schedule {name}" for name in (
        "afab", "1f1b", "interleaved", "zb-h1", "zb1p", "zb-v", "dualpipev")}},
    "experts": {"none": "", "ep 1": "", "edp 1": "", "edp 2": ""},
    "recompute": {"none": "", "selective": "--recompute selective", "full": "--recompute full"},
    "documents": {"mix": "", "masked": "--doc-mask"},
    "seq": {"24": "", "22": "--seq 22"},  # padded with cp
    "kv": {"heads": "", "copies": "--kv-heads 1", "latents": LATENT},  # copies: on each of tp ranks
    "tables": {"two": "", "tied": "--tied"},
    "mtp": {"none": "", "one": "--mtp"},
    "qk": {"plain": "", "norm": "--qk-norm"},
    "biases": {"none": "", "qkv": "--qkv-bias"},
    "optimizer": {"adamw": "", "sgd": "--optimizer sgd", "muon": "--optimizer muon"},
    "batch": {"constant": "", "ramp": "--batch-ramp 8@0,16@1"},
    "dtype": {"fp64": "--dtype fp64", "bf16": "--dtype bf16", "fp16": "--dtype fp16"},
    "fp8": {"none": "", "tensorwise": "--fp8 tensorwise", "blockwise": "--fp8 blockwise"},
    "moments": {"auto": "", "bf16": "--moments bf16"},
}
EXACT = {"dtype": "fp64", "fp8": "none", "moments": "auto"}  # what can be compared with the reference to 1e-10
IMPOSSIBLE = {
    (("zero", "0"), ("replicas", "2")),
    (("tp", "async"), ("fp8", "tensorwise")), (("tp", "async"), ("fp8", "blockwise")),
    *((("dtype", dtype), ("fp8", fp8)) for dtype in ("fp64", "fp16") for fp8 in ("tensorwise", "blockwise")),
    (("dtype", "fp64"), ("moments", "bf16")), *((("optimizer", rule), ("moments", "bf16")) for rule in ("sgd", "muon")),
    (("cp", "both"), ("kv", "copies")),
    *((("cp", style), ("kv", "latents")) for style in ("ring", "ulysses", "both")),
    (("kv", "latents"), ("qk", "norm")), (("kv", "latents"), ("biases", "qkv")),
}
NEVER_WITH = {one: {two for both in IMPOSSIBLE if one in both for two in both} for both in IMPOSSIBLE for one in both}
MIXTRAL = "--experts 8 --top-k 2 --expert-ffn {} --router-z-loss 0.02 --aux-loss 0.3"
DEEPSEEK = ("--experts 8 --top-k 3 --expert-ffn {} --router sigmoid --router-scale 2.5 --expert-groups 4 "
            "--top-groups 2 --shared-experts 2 --dense-layers 1 --bias-rate 0.002 --aux-loss 0.2")
WIDE = "--hidden 128 --heads 4 --kv-heads 4 --head-dim {} --ffn 256"  # which FP8's blocks divide, also at --tp 2
WIDE_LATENT = ("--heads 4 --kv-heads 4 --head-dim 128 --kv-lora-rank 128 --q-lora-rank 256 --rope-head-dim 64 "
               "--v-head-dim 64")
SEQUENCES, MOST_RANKS, TRIED = 16, 8, 200
Choice = dict[str, str]  # feature -> value


def pairs_of(choice: Choice) -> set[tuple]:
    return set(combinations(choice.items(), 2))


def every_pair() -> set[tuple]:
    return {((a, x), (b, y)) for a, b in combinations(FEATURES, 2) for x in FEATURES[a] for y in FEATURES[b]}


def is_exact(choice: Choice) -> bool:
    return EXACT.items() <= choice.items()


def sizes(choice: Choice) -> dict[str, int]:
    """The axes: data parallel ranks are as few as the features need, and two where nothing else is parallel."""
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
    size = sizes(choice)
    return size["dp"] * size["cp"] * size["tp"] * size["pp"]


def cost(choice: Choice) -> int:
    """About in what proportion grids take time: on a CPU FP8 takes three times as long."""
    return (2 + ranks_of(choice) + 2 * (choice["experts"] != "none")) * (1 if choice["fp8"] == "none" else 3)


def grid_of(choice: Choice) -> tuple[int, str]:
    """(ranks, flags). Two accumulations without a pipeline, four with one, half of them in a step of a batch ramp; but
    dualpipev needs four, and rounding errors are compared in the first step, over more tokens."""
    size, wide = sizes(choice), choice["fp8"] != "none"
    accumulated = 4 if size["pp"] > 1 else 2
    flags = [f"--global-batch {SEQUENCES} --micro-batch {SEQUENCES // size['dp'] // accumulated}"]
    if wide:
        flags.append(WIDE.format(128 if choice["kv"] == "copies" else 64))
    flags += [FEATURES[name][value] for name, value in choice.items()]
    ramp = "16@0,24@1" if choice["schedule"] == "dualpipev" else "8@0,16@1" if is_exact(choice) else "16@0,8@1"
    flags = [words.replace(FEATURES["batch"]["ramp"], f"--batch-ramp {ramp}") for words in flags]
    if choice["kv"] == "latents" and wide:
        flags.append(WIDE_LATENT)
    if choice["experts"] != "none":
        kind = DEEPSEEK if choice["experts"] == "edp 1" else MIXTRAL
        flags.append(kind.format(128 if wide else 12) + f" --ep {size['ep']}")
    return ranks_of(choice), " ".join(filter(None, flags))


def draw_choice(generator: random.Random, fixed: Choice) -> Choice:
    """A random choice with the `fixed` values, of which no two are IMPOSSIBLE."""
    choice = dict(fixed)
    names = [name for name in FEATURES if name not in fixed]
    for name in generator.sample(names, len(names)):
        choice[name] = generator.choice([value for value in FEATURES[name]
                                         if NEVER_WITH.get((name, value), set()).isdisjoint(choice.items())])
    return {name: choice[name] for name in FEATURES}


def cover(missing: set[tuple], fixed: Choice, generator: random.Random) -> list[Choice]:
    """Choices with the `fixed` values that together have all `missing` pairs. Each is the best of TRIED random ones: it
    has most new pairs for its cost."""
    out = []
    while missing:
        candidates = [draw_choice(generator, fixed | dict(min(missing))) for _ in range(TRIED)]
        best = max((choice for choice in candidates if ranks_of(choice) <= MOST_RANKS),
                   key=lambda choice: len(pairs_of(choice) & missing) / cost(choice))
        out.append(best)
        missing = missing - pairs_of(best)
    return out


EXTRAS = {  # flags that random grids have besides, most often none of a row
    "window": ["", "", "--window 5", "--window 9 --window-every 2"], "clip": ["", "", "--clip 0"],
    "buckets": ["", "--bucket-mb 0", "--bucket-mb 0.05"], "attention": ["", "", "--attention math"],
    "z loss": ["", "", "--z-loss 0.01"], "head": ["", "", "--head-dim 12"], "vocab": ["", "", "--vocab 101"],
    "rope": ["", "", "--rope-theta 100"]}


def random_grid(seed: int, exact: bool = True) -> tuple[Choice, list[str]]:
    """(a choice, in fp64 if it shall be exact, else in fewer bits; flags of EXTRAS): a different one for every seed. A
    third each has at most 2, 4 and 8 ranks: grids of two cost a seventh of those of eight, and have most of what can go
    wrong. In fewer bits there are no experts: a token that chooses another one hides every other error."""
    generator, fixed = random.Random(f"a grid at random {seed}"), EXACT if exact else {"experts": "none"}
    most, choice = generator.choice((2, 4, MOST_RANKS)), draw_choice(generator, fixed)
    while ranks_of(choice) > most or is_exact(choice) != exact:
        choice = draw_choice(generator, fixed)
    extras = {name: generator.choice(values) for name, values in EXTRAS.items()}
    if not exact:
        del extras["head"]  # FP8's blocks fit other heads
    return choice, [flags for flags in extras.values() if flags]


def simplify(choice: Choice, more: list[str]) -> list[tuple[Choice, list[str]]]:
    """All grids with one feature less."""
    plain = [(choice | {name: next(iter(FEATURES[name]))}, more) for name in FEATURES
             if name not in EXACT and choice[name] != next(iter(FEATURES[name]))]
    plain += [(choice, more[:i] + more[i + 1:]) for i in range(len(more))]
    return [(choice, more) for choice, more in plain if not pairs_of(choice) & IMPOSSIBLE]


@cache  # and not where this file is imported: ranks are told their grid
def all_pairs() -> list[Choice]:
    """Pairs that can be exact meet in grids that are."""
    generator, possible = random.Random(0), every_pair() - IMPOSSIBLE
    exact = cover({pair for pair in possible if all(EXACT.get(name, value) == value for name, value in pair)},
                  EXACT, generator)
    return exact + cover(possible - {pair for choice in exact for pair in pairs_of(choice)}, {}, generator)
