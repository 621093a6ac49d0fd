"""Which settings go together, and why.

`parse` turns a command line into the settings of a run:

    read        config.read: which flags are given, with which values
    merge       flags over the preset, or over what a checkpoint's run had
    complete    defaults that follow from other settings, such as --dp from the number of ranks
    check       kinds and ranges, then `every_rule`, then the batch and the schedule

A rule says what must hold and what would work. tests/test_config.py has a command line that each rule refuses. Errors
are ValueErrors of one line: the flag, its value, what works. This file needs the standard library only.
"""
import math
from dataclasses import fields
from typing import Any, NamedTuple

from core.config import (
    CP_STYLES,
    FIELDS,
    MOST_MICRO_BATCHES,
    PRESETS,
    SECTION_OF,
    SECTIONS,
    Config,
    Grid,
    flag,
    name_of,
    need,
    problem_of,
    read,
    written,
)
from schedules import SCHEDULES, plan_of

BY_BLOCKS = [style for style in CP_STYLES if style != "ulysses"]
GROUPED = [name for name, schedule in SCHEDULES.items() if schedule.grouped and schedule.runs]


# ---- from a command line to the settings of a run -------------------------------------------------------------------

def parse(arguments: list[str], world: int = 1, inherited: dict[str, Any] | None = None, owner: str = "") -> Config:
    """The complete and checked settings of a run on `world` ranks (but for --grid auto's grid: see check_grid).

    inherited: settings that flags override, in place of the preset's; owner: whose they are, for errors. Where a flag
    leaves out experts or latent attention, what is inherited of them goes, too. Raises ValueError, one line, for what
    cannot run.
    """
    flags = read(arguments)
    assert inherited is not None or not (flags.get("resume") or flags.get("init_from")), "run/cli.py reads these"
    preset = flags.get("preset", "tiny")
    need(preset in PRESETS, f"--preset {preset}: unknown, use one of {', '.join(PRESETS)}")
    if inherited is None:
        inherited, owner = PRESETS[preset], f"of --preset {preset}"
    for name, f in FIELDS.items():  # such as all that is said of experts
        if f.metadata["needs"] in ("experts", "kv_lora_rank") and flags.get(f.metadata["needs"]) == 0:
            inherited = {other: value for other, value in inherited.items() if other != name}
    values = inherited | flags
    config = Config(**{name: section(**{f.name: values[f.name] for f in fields(section) if f.name in values})
                       for name, section in SECTIONS.items()})
    config.arguments = list(arguments)
    config.before_defaults = {name: config.value(name) for name in FIELDS}  # `complete` changes none of these in place
    try:
        complete(config, world)
    except ValueError as error:
        name = name_of(str(error)).rstrip(":")
        if owner and name in inherited and name not in flags:
            raise ValueError(f"{error} ({flag(name)} is {owner}: give another)") from None
        raise
    return config


def complete(c: Config, ranks: int) -> None:
    """Fill in, in place, defaults that follow from other settings, and check all for `ranks` ranks, or as many as a dry
    run has. Raises ValueError for what cannot run."""
    if c.run.dry_run:
        need(ranks == 1, f"--dry-run on {ranks} ranks: one process pretends to be one of them, leave out torchrun")
        ranks = c.run.dry_run_as()[1]
    c.ranks = ranks
    check_ranges(c)
    model, grid, optim = c.model, c.grid, c.optim  # what does not fit is left for `every_rule` to say
    model.head_dim = model.head_dim or model.hidden // model.heads
    model.expert_ffn = model.expert_ffn or (model.ffn if model.experts else 0)
    if grid.grid == "given":
        grid.virtual_stages = grid.virtual_stages or (SCHEDULES[grid.schedule].chunks if grid.pp > 1 else 1)
        grid.dp = c.ranks // (grid.pp * grid.cp * grid.tp) if grid.dp == -1 else grid.dp
    optim.lr = optim.lr or min(1.2 / model.hidden, 2e-3)
    optim.min_lr = optim.lr / 10 if optim.min_lr == -1 else optim.min_lr
    optim.warmup = min(20, optim.steps // 10) if optim.warmup == -1 else optim.warmup
    if c.data.data_dtype == "auto":
        c.data.data_dtype = "uint16" if model.vocab <= 2**16 else "uint32"
    check_grid(c)
    if grid.grid == "given":
        check_batch(c)
        check_schedule(c)


# ---- rules ----------------------------------------------------------------------------------------------------------

class Needs(NamedTuple):
    """Needs("--sp async", tp > 1, "--tp 2"): where --sp is async, tp > 1 must hold, else the error is "--sp async needs
    --tp 2". Needs("--top-k", experts, "--experts"): the same where --top-k is not its declared default."""
    setting: str
    holds: Any
    missing: str

    def check(self, c: Config) -> None:
        _, *values = self.setting.split()
        value, default = c.value(name_of(self.setting)), FIELDS[name_of(self.setting)].default
        is_set = str(value) in values if values else value != default
        need(self.holds or not is_set, f"{as_typed(c, self.setting)} needs {self.missing}")


class Divides(NamedTuple):
    """Divides("--tp", heads, "--heads"): --tp, its default too, must divide `heads`. 0 is divided by everything."""
    setting: str
    number: int
    what: str
    hint: str = ""

    def check(self, c: Config) -> None:
        if self.number % c.value(name_of(self.setting)):
            works = divisors(self.number)
            raise ValueError(f"{as_typed(c, self.setting)} does not divide {self.what} ({self.number}): use "
                             f"{'one of ' * (len(works) > 1)}{', '.join(map(str, works))}{self.hint}")


def as_typed(c: Config, asked: str) -> str:
    """A setting and its value, as one writes it."""
    name, value = flag(name_of(asked)), c.value(name_of(asked))
    if value is True:
        return name
    return f"--no-{name[2:]}" if value is False else f"{name} {written(name_of(asked), value)}"


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def every_rule(c: Config) -> list[Needs | Divides]:
    """Checked in this order: an error may take the rows before it for granted. All conditions are computed first, with
    the defaults that `complete` has filled in."""
    return [*settings_without_effect(c), *rules_of_the_model(c), *rules_of_the_run(c)]


def settings_without_effect(c: Config) -> list[Needs]:
    """A rule for each field that is declared with `needs`."""
    found = []
    for name, f in FIELDS.items():
        if other := f.metadata["needs"]:
            is_on = c.value(other) not in ("none", "", False, 0, [])
            values = [str(value) for value in FIELDS[other].metadata["choices"] or () if value]
            found.append(Needs(flag(name), is_on, f"{flag(other)} {' or '.join(values)}".strip()))
    return found


def rules_of_the_model(c: Config) -> list[Needs | Divides]:
    model, grid, more_ranks = c.model, c.grid, ", or start more ranks (torchrun --nproc_per_node)"
    return [
        Divides("--heads", 0 if c.before_defaults["head_dim"] else model.hidden, "--hidden", ", or set --head-dim"),
        Divides("--kv-heads", model.heads, "--heads"),
        Divides("--expert-groups", model.experts, "--experts"),
        Divides("--pp", c.ranks, "the number of ranks", more_ranks),
        Divides("--tp", c.ranks // grid.pp, "the ranks that --pp leaves", more_ranks),
        Divides("--cp", c.ranks // grid.pp // grid.tp, "the ranks that --pp and --tp leave", more_ranks),
        Divides("--tp", model.heads, "--heads"),
        Divides("--tp", 0 if model.has_experts(0) else model.ffn, "--ffn"),
        Divides("--tp", model.shared_experts * model.expert_ffn, "--shared-experts x --expert-ffn"),
        Divides("--cp", model.heads // grid.tp if grid.cp_style == "ulysses" else 0,
                "the heads of a tensor parallel rank", ", or another --cp-style"),
        Divides("--cp-ulysses", grid.cp, "--cp"),
        Divides("--cp-ulysses", max(model.kv_heads // grid.tp, 1), "the --kv-heads of a tensor parallel rank"),
        Divides("--dp-replicate", grid.dp, "--dp"),
        Divides("--ep", model.experts, "--experts"),
        Divides("--ep", grid.dp // grid.dp_replicate * grid.cp * grid.tp,
                "the ranks of --dp, --cp and --tp in a replica"),

        Needs("--top-k 1", model.experts == 1 or not model.router_norm,
              "--no-router-norm: else the weights are always 1, and the router gets no gradient"),
        Needs("--experts", model.top_k <= model.experts, "a --top-k that is not above it"),
        Needs("--top-groups", model.top_groups <= model.expert_groups, "as many --expert-groups"),
        Needs("--expert-groups", model.top_k <= model.experts // model.expert_groups * model.top_groups,
              "a --top-k of at most the experts in --top-groups of them"),
        Needs("--dense-layers", model.dense_layers < model.layers, "more --layers than these"),
        Needs("--head-dim", model.head_dim % 2 == 0, "to be even: rotary embedding rotates pairs of channels"),
        Needs("--kv-lora-rank", 0 < model.rope_head_dim < model.head_dim and model.rope_head_dim % 2 == 0,
              "an even --rope-head-dim, above 0 and below --head-dim"),
        Needs("--kv-lora-rank", model.value_dim <= model.head_dim, "a --v-head-dim of at most --head-dim"),
        Needs("--kv-lora-rank", model.kv_heads == model.heads,
              "as many --kv-heads as --heads: each head has keys and values of its own"),
        Needs("--kv-lora-rank", not model.qk_norm and not model.qkv_bias,
              "neither --qk-norm nor --qkv-bias: latents have norms of their own"),
        Needs("--kv-lora-rank", grid.cp_style == "allgather" and grid.cp_ulysses == 1,
              "--cp-style allgather alone: ranks gather latents, others would send whole heads")]


def rules_of_the_run(c: Config) -> list[Needs]:
    model, grid, schedule = c.model, c.grid, SCHEDULES[c.grid.schedule]
    precision, optim, data, run = c.precision, c.optim, c.data, c.run
    return [
        Needs("--schedule", grid.pp > 1, "--pp 2 or more"),
        Needs("--virtual-stages", schedule.allows(grid.virtual_stages) if grid.pp > 1 else grid.virtual_stages == 1,
              f"--pp 2 or more and another --schedule: {' and '.join(GROUPED)} have any number of chunks"),
        Needs("--pp", model.layers >= grid.pp * grid.virtual_stages, "--layers of at least --pp x --virtual-stages"),
        Needs("--cp-ulysses", grid.cp > grid.head_ranks,
              f"--cp above it, and --cp-style {' or '.join(BY_BLOCKS[::-1])}: among all ranks it is ulysses"),
        Needs("--cp-zigzag document", grid.document_ranks > 1 and c.data.mask_documents and not model.window,
              "--mask-documents, no --window, and --cp ranks that exchange keys, as all but ulysses do"),
        Needs("--sp async", grid.tp > 1, "--tp 2 or more"),
        Needs("--tp", model.kv_heads % grid.tp == 0 or grid.tp % model.kv_heads == 0,
              "--kv-heads that it divides, or that divide it"),
        Needs("--tp", model.vocab >= grid.tp, "a --vocab of at least as many"),  # shards may differ
        Needs("--dp-replicate", grid.dp * grid.cp > grid.dp_replicate,
              "--dp x --cp above it, or a replica has one rank and shards nothing"),

        Needs("--fp8", precision.dtype not in ("fp16", "fp64"), "--dtype bf16, or fp32 where a CPU emulates FP8"),
        Needs("--fp8", c.grid.sp != "async", "--sp on or off: matmuls shard by shard have no FP8 version"),
        Needs("--fp8-ends", len(c.fp8_layers()), "--fp8, and --layers 3 or more"),
        Needs("--moments-dtype bf16", optim.optimizer == "adamw" and precision.dtype != "fp64",
              "--optimizer adamw, and another --dtype than fp64, which it would undo"),
        Needs("--moments-dtype bf16", optim.betas[1] <= 0.99,
              "--betas whose second is at most 0.99: an average in bf16 cannot move by less than 1/256 of itself"),
        Needs("--reduce-dtype bf16", precision.dtype != "fp64", "another --dtype than fp64, which it would undo"),
        Needs("--attention triton", c.model.head_dim <= 256 and precision.dtype != "fp64",
              "--head-dim 256 or less, and another --dtype than fp64"),
        Needs("--kernels torch", precision.attention != "triton", "another --attention than triton"),
        Needs("--offload", precision.recompute == "full" or not precision.offloads("activations"),
              "--recompute full: what is offloaded are the inputs of layers that it saves"),

        Needs("--separator", data.separator < c.model.vocab, "a larger --vocab: its last token is --vocab less one"),
        Needs("--min-lr", optim.min_lr <= optim.lr, "an --lr that is not below it"),
        Needs("--warmup", optim.warmup <= optim.steps or not optim.steps, "as many --steps"),
        Needs("--rewind", run.max_skipped and run.save_every,
              "--max-skipped, and --save-every, for a checkpoint to go back to"),
        Needs("--offload", not run.dry_run,
              "a real run: in a --dry-run one device stands for GPU and host; python -m plan memory has the formula"),
        Needs("--grid auto", not run.dry_run, "a real run: it is chosen for the machine that it runs on; ask python -m "
              "plan search for the best grid of another one, and give that to --dry-run"),
        Needs("--mask-documents", not run.dry_run,
              "a real run: what documents hide depends on the data, which --dry-run does not read")]


# ---- checks that need more than one line ----------------------------------------------------------------------------

def check_ranges(c: Config) -> None:
    for name in FIELDS:
        problem = problem_of(name, c.value(name))
        need(not problem, f"{flag(name)} {c.value(name)}: {problem}")
    need(len(c.optim.betas) == 2 and all(0 <= beta < 1 for beta in c.optim.betas),
         f"--betas {','.join(map(str, c.optim.betas))}: write two numbers from 0 to below 1, such as 0.9,0.95")
    c.data.weights()


def check_grid(c: Config) -> None:
    """Raise ValueError unless settings go together; with --grid auto the model's alone: run/job.py lets plan/search.py
    choose a grid, which then calls `parse` again."""
    given = c.grid.grid == "given"
    for rule in every_rule(c):
        name = name_of(rule.setting)
        if given or SECTION_OF[name] == "model" or name == "grid":
            rule.check(c)
    if given:
        dp, cp, tp, pp = c.grid.dp, c.grid.cp, c.grid.tp, c.grid.pp
        ranks = dp * cp * tp * pp
        need(ranks == c.ranks, f"--dp {dp} x --cp {cp} x --tp {tp} x --pp {pp} = {ranks} ranks, and there are "
             f"{c.ranks}: use --dp {c.ranks // (cp * tp * pp)}, or start {ranks}")
        check_fp8_widths(c)


def check_fp8_widths(c: Config) -> None:
    """The extents of FP8 matmuls on a rank: multiples of 128, the width of a block of scales, or of 16, the alignment
    that torch._scaled_mm asks for."""
    model, tp, fp8 = c.model, c.grid.tp, c.precision.fp8
    if fp8 == "none":
        return
    unit = 128 if c.precision.fp8_recipe().blocks else 16
    widths = {"--hidden": model.hidden, "--heads x --head-dim": model.heads // tp * model.head_dim,
              "--kv-heads x --head-dim": max(model.kv_heads // tp, 1) * model.head_dim,
              "--ffn": 0 if model.has_experts(0) else model.ffn // tp, "--expert-ffn": model.expert_ffn,  # not split
              "--shared-experts x --expert-ffn": model.shared_experts * model.expert_ffn // tp,
              "--kv-lora-rank": model.kv_lora_rank, "--q-lora-rank": model.q_lora_rank,
              "--heads x --v-head-dim": model.heads // tp * model.value_dim,
              "--heads x --rope-head-dim": model.heads // tp * model.rope_head_dim}
    for name, n in widths.items():
        need(n % unit == 0, f"--fp8 {fp8}: {name} is {n} on a rank of --tp {tp}, and must be a multiple of {unit}")


def check_batch(c: Config) -> None:
    """Fill in the micro-batch. Every size of a ramp must make whole micro-batches on every rank."""
    batch, grid = c.batch, c.grid
    sizes = [size for size, _ in batch.ramp()]
    whole = f"--batch-ramp {batch.batch_ramp}" if batch.batch_ramp else f"--global-batch {batch.global_batch}"
    for size in sizes:
        below = size // grid.dp * grid.dp
        use = f"{below} or {below + grid.dp}" if below else f"{grid.dp}"
        need(size % grid.dp == 0, f"{whole.split()[0]} {size} is not a multiple of --dp {grid.dp}: use {use}")
    share = math.gcd(*sizes) // grid.dp
    batch.micro_batch = batch.micro_batch or share // choose_micro_batches(share, batch.seq_len, grid)
    asked = f"--micro-batch {batch.micro_batch}"
    tokens = batch.micro_batch * batch.seq_len  # with cp, sequences are padded to fit (padded_length)
    need(grid.cp > 1 or tokens % grid.sequence_shards == 0,
         f"--tp {grid.tp} cannot share {asked} x --seq-len {batch.seq_len} = {tokens} tokens in equal parts: use "
         "another --seq-len, or --sp off")
    Divides("--micro-batch", share, f"a rank's share of {whole}").check(c)
    count = max(sizes) // grid.dp // batch.micro_batch
    need(count <= MOST_MICRO_BATCHES, f"{asked} makes {count:,} micro-batches per step of {whole}: must be at most "
                                      f"{MOST_MICRO_BATCHES:,}")


def choose_micro_batches(share: int, seq: int, grid: Grid) -> int:
    """How many to make of a rank's share of sequences: one; in a pipeline the fewest that fill any schedule (2 pp or
    more), or else the most there can be. Preferably of tokens that tensor parallel ranks can share."""
    fills = 2 * grid.pp
    counts = sorted(divisors(share), key=lambda n: (n < fills, abs(n - fills))) if grid.pp > 1 else [1]
    shared = [n for n in counts if grid.cp > 1 or share // n * seq % grid.sequence_shards == 0]
    return (shared or counts)[0]


def check_schedule(c: Config) -> None:
    """Check that the schedule has a plan for every size of a ramp. An error names what was asked for, not the
    micro-batch that follows from it."""
    grid, batch = c.grid, c.batch
    for size, _ in batch.ramp():
        micro_batches = size // grid.dp // batch.micro_batch
        try:
            plan_of(grid, micro_batches)
        except ValueError as error:
            asked = ["schedule", "pp", "micro_batch", "batch_ramp" if batch.batch_ramp else "global_batch"]
            flags = [f"{flag(name)} {c.before_defaults[name]}" for name in asked if c.before_defaults[name]]
            least = SCHEDULES[grid.schedule].least * grid.pp
            enough = least * grid.dp * (c.before_defaults["micro_batch"] or 1)
            hint = f": use {enough} or more sequences per step" if micro_batches < least else ""
            raise ValueError(f"{' '.join(flags)}: {error}{hint}") from None
