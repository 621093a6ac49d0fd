"""Which settings go together, and why.

`parse` turns a command line into the settings of a run, in five steps:

    read      config.read finds which flags are given, and their values
    merge     flags override the preset or, in a resumed run, the settings of the checkpoint
    ranges    each setting is in its range
    defaults  defaults that depend on other settings are filled in, such as --dp from the number of ranks
    check     every rule of the table below holds; then the micro-batch is chosen if it is auto, and the batch and the
              pipeline schedule fit the grid

The function `complete` does the last three.

The table has one row per rule, and there are two kinds of rows:

    Needs("--sp async", grid.tp > 1, "--tp 2 or more")   the setting, what must hold if it is set, what would work
    Divides("--kv-heads", model.heads, "--heads")        the setting, the number it must divide, the name of the number

tests/test_config.py lists, in the order of the table, a command line that each row refuses, and the error. Errors are
ValueErrors of one line: the flag, its value and what would work. Like core/config.py, this file does not import torch.
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
    default_of,
    flag,
    name_of,
    need,
    padded_length,
    problem_of,
    read,
    written,
)
from schedules import SCHEDULES, plan_of

# ---- from a command line to the settings of a run -------------------------------------------------------------------

def parse(arguments: list[str], world: int = 1, inherited: dict[str, Any] | None = None, owner: str = "") -> Config:
    """Return the complete and checked settings of a run on `world` ranks. With --grid auto, the grid is still open.

    inherited: the settings of a checkpoint or of a published model, which replace the preset's. owner: says whose they
    are, for errors, such as "of --preset tiny". If a flag turns experts, latent attention or sites off, every inherited
    setting that needs them (`needs` in core/config.py) has its default again. --head-dim needs neither and stays as
    inherited.
    Raises ValueError, with one line, for settings that cannot run.
    """
    flags = read(arguments)
    assert inherited is not None or not (flags.get("resume") or flags.get("init_from")), (
        "with --resume or --init-from, the caller (run/cli.py) must pass `inherited`")
    preset = flags.get("preset", "tiny")
    name = preset.rpartition("/")[2].lower()  # as published: meta-llama/Llama-3.1-8B
    need(preset in PRESETS, f"--preset {preset}: unknown, "
         + (f"did you mean {name}?" if name in PRESETS else f"use one of {', '.join(PRESETS)}"))
    if inherited is None:
        inherited, owner = PRESETS[preset], f"of --preset {preset}"
    turned_off = [name for name in ("experts", "kv_lora_rank", "sites") if flags.get(name) == default_of(name)]
    inherited = {name: value for name, value in inherited.items()
                 if FIELDS[name].metadata["needs"] not in turned_off}
    values = inherited | flags
    sections = {}
    for name, section in SECTIONS.items():
        sections[name] = section(**{f.name: values[f.name] for f in fields(section) if f.name in values})
    config = Config(**sections)
    config.arguments = list(arguments)
    # `complete` replaces values and never mutates one, so these stay as they are.
    config.before_defaults = {name: config.value(name) for name in FIELDS}
    try:
        complete(config, world)
    except ValueError as error:
        name = name_of(str(error)).rstrip(":")  # every error begins with its flag
        if owner and name in inherited and name not in flags:
            raise ValueError(f"{error} ({flag(name)} is {owner}: give another)") from None
        raise
    return config


def complete(c: Config, ranks: int) -> None:
    """Check ranges, fill in (in place) the defaults that depend on other settings, and check all rules.

    ranks: the number of processes; a dry run takes the number of ranks from its flag instead. Raises ValueError for
    settings that cannot run.
    """
    if c.run.dry_run:
        need(ranks == 1, f"--dry-run on {ranks} ranks: one process pretends to be one of them, leave out torchrun")
        ranks = c.run.dry_run_as()[1]
    c.ranks = ranks
    check_ranges(c)
    # Divisions round down. Where they leave a remainder, a rule refuses the settings.
    model, grid, optim = c.model, c.grid, c.optim
    model.head_dim = model.head_dim or model.hidden // model.heads
    model.expert_ffn = model.expert_ffn or (model.ffn if model.experts else 0)
    if grid.grid == "given":
        grid.virtual_stages = grid.virtual_stages or (SCHEDULES[grid.schedule].chunks if grid.pp > 1 else 1)
        grid.dp = c.ranks // (grid.sites * grid.pp * grid.cp * grid.tp) if grid.dp == -1 else grid.dp
    optim.lr = optim.lr or min(1.2 / model.hidden, 2e-3)
    optim.min_lr = optim.lr / 10 if optim.min_lr == -1 else optim.min_lr
    optim.warmup = min(20, optim.steps // 10) if optim.warmup == -1 else optim.warmup
    if c.data.data_dtype == "auto":
        c.data.data_dtype = "uint16" if model.vocab <= 2**16 else "uint32"
    check_grid(c)
    if grid.grid == "given":
        check_batch(c)
        check_schedule(c)


# ---- the two kinds of rules -----------------------------------------------------------------------------------------

class Needs(NamedTuple):
    """A setting that needs something else.

    Needs("--sp async", grid.tp > 1, "--tp 2 or more"): if --sp is async, grid.tp > 1 must hold; otherwise the error is
    "--sp async needs --tp 2 or more". Needs("--sp", ...), without a value, applies if --sp is not its declared default.
    An auto value that `complete` has filled in counts as set.
    """
    setting: str
    holds: Any
    missing: str

    def check(self, c: Config) -> None:
        _, *values = self.setting.split()
        value, default = c.value(name_of(self.setting)), FIELDS[name_of(self.setting)].default
        is_set = str(value) in values if values else value != default
        need(self.holds or not is_set, f"{as_typed(c, self.setting)} needs {self.missing}")


class Divides(NamedTuple):
    """A setting, given or by default, that must divide a number.

    Divides("--kv-heads", model.heads, "--heads"): otherwise the error is "--kv-heads 3 does not divide --heads (4): use
    one of 1, 2, 4". Every setting divides 0, so a rule whose number is 0 does not apply.
    """
    setting: str
    number: int
    what: str
    hint: str = ""  # another way out, at the end of the error

    def check(self, c: Config) -> None:
        if self.number % c.value(name_of(self.setting)):
            works = divisors(self.number)
            one_of = "one of " if len(works) > 1 else ""
            raise ValueError(f"{as_typed(c, self.setting)} does not divide {self.what} ({self.number}): use "
                             f"{one_of}{', '.join(map(str, works))}{self.hint}")


def as_typed(c: Config, setting: str) -> str:
    """Return the setting of a rule, with its value in this run, as a user types it: "--tp 3", "--tied", "--no-tied"."""
    name = name_of(setting)
    value = c.value(name)
    if value is True:
        return flag(name)
    if value is False:
        return flag(f"no_{name}")
    return f"{flag(name)} {written(name, value)}"


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


# ---- the table of rules ---------------------------------------------------------------------------------------------

def every_rule(c: Config) -> list[Needs | Divides]:
    """Return the table. Rules are checked from top to bottom, so the error of a row may rely on the rows above it.

    All conditions are computed before the first check, from settings whose defaults `complete` has filled in.
    """
    return [*rules_of_config(c), *rules_of_the_model(c), *rules_of_the_grid(c), *rules_of_the_run(c),
            *rules_of_sites(c)]


def rules_of_config(c: Config) -> list[Needs]:
    """The rules that core/config.py declares with `needs`: one setting has no effect without another.

    For example, `dp_replicate` is declared with needs="zero". Its error is "--dp-replicate 2 needs --zero 1 or 2 or 3".
    """
    found = []
    for name, f in FIELDS.items():
        if other := f.metadata["needs"]:
            is_on = c.value(other) != default_of(other)
            values = [str(value) for value in FIELDS[other].metadata["choices"] or () if value]
            found.append(Needs(flag(name), is_on, f"{flag(other)} {' or '.join(values)}".strip()))
    return found


def rules_of_the_model(c: Config) -> list[Needs | Divides]:
    """The rules that concern only the architecture. With --grid auto they are checked before a grid is chosen."""
    model = c.model
    given_head_dim = c.before_defaults["head_dim"]  # by a flag or a preset; 0: it follows from --hidden
    experts_in_reach = model.experts // model.expert_groups * model.top_groups
    by_turns = model.rope_scaling != 1 and model.rope_type in ("llama3", "yarn")
    return [
        Divides("--heads", 0 if given_head_dim else model.hidden, "--hidden", ", or set --head-dim"),
        Divides("--kv-heads", model.heads, "--heads"),
        Needs("--head-dim", model.head_dim % 2 == 0, "to be even: rotary embedding rotates pairs of channels"),

        # Rotary embedding.
        Needs("--rope-type linear yarn", model.rope_scaling != 1, "a --rope-scaling other than 1"),
        Needs("--rope-type yarn", model.rope_theta > 1, "a --rope-theta above 1"),
        Needs("--rope-type dynamic", model.rotated_dim > 2, "heads in which at least 4 channels are rotated"),
        Needs("--original-seq-len", by_turns or model.rope_type == "dynamic",
              "--rope-scaling other than 1 by --rope-type llama3 or yarn, or --rope-type dynamic"),
        Needs("--rope-fast-turns", by_turns, "--rope-scaling other than 1 by --rope-type llama3 or yarn"),
        Needs("--rope-fast-turns", model.fast_turns > 1 or model.fast_turns == 1 and model.rope_type == "yarn",
              "to be above 1, or 1 with --rope-type yarn"),
        Needs("--rope-attention-factor", model.rope_type == "yarn", "--rope-type yarn"),
        Needs("--rope-mscale", model.rope_type == "yarn", "--rope-type yarn"),
        Needs("--no-rope-every", not model.kv_lora_rank, "attention without latents, --kv-lora-rank 0"),

        # Experts.
        Needs("--ffn-bias", not model.experts, "a dense model: experts have no biases"),
        Divides("--expert-groups", model.experts, "--experts"),
        Needs("--top-k 1", model.experts == 1 or not model.router_norm,
              "--no-router-norm: otherwise the expert's weight is always 1, and the router gets no gradient"),
        Needs("--experts", model.top_k <= model.experts, "a --top-k of at most as many"),
        Needs("--top-groups", model.top_groups <= model.expert_groups, "at least as many --expert-groups"),
        Needs("--expert-groups", model.top_k <= experts_in_reach,
              "a --top-k of at most the number of experts in --top-groups groups"),
        Needs("--dense-layers", model.dense_layers < model.layers, "more --layers than these"),

        # Latent attention.
        Needs("--kv-lora-rank", 0 < model.rope_head_dim < model.head_dim and model.rope_head_dim % 2 == 0,
              "an even --rope-head-dim, above 0 and below --head-dim"),
        Needs("--kv-lora-rank", model.value_dim <= model.head_dim, "a --v-head-dim of at most --head-dim"),
        Needs("--kv-lora-rank", model.kv_heads == model.heads,
              "as many --kv-heads as --heads: each head has keys and values of its own"),
        Needs("--kv-lora-rank", not model.qk_norm and not model.qkv_bias,
              "neither --qk-norm nor --qkv-bias: latents have norms of their own"),
        Needs("--out-bias", not model.kv_lora_rank, "attention without latents, --kv-lora-rank 0")]


def rules_of_the_grid(c: Config) -> list[Needs | Divides]:
    """The rules of the axes, which divide ranks, heads, layers, experts and tokens."""
    model, grid, schedule = c.model, c.grid, SCHEDULES[c.grid.schedule]
    more_ranks = ", or start more ranks (torchrun --nproc_per_node)"
    # Schedules with `grouped` set take any number of stages per pipeline rank, and all others a fixed number. `runs` is
    # False for schedules that can only be drawn.
    any_stages = " and ".join(name for name, other in SCHEDULES.items() if other.grouped and other.runs)
    # Styles that exchange keys. ring is named before allgather, the default, which needs no flag.
    by_keys = " or ".join(style for style in reversed(CP_STYLES) if style != "ulysses")
    site = c.ranks // grid.sites  # ranks of a site
    return [
        Divides("--sites", c.ranks, "the number of ranks", more_ranks),
        Divides("--pp", site, "the number of ranks" if grid.sites == 1 else "the ranks of a site", more_ranks),
        Divides("--tp", site // grid.pp, "the ranks that --pp leaves", more_ranks),
        Divides("--cp", site // grid.pp // grid.tp, "the ranks that --pp and --tp leave", more_ranks),

        # Tensor parallelism. The vocabulary need not divide: its shards may differ by one row.
        Divides("--tp", model.heads, "--heads"),
        Divides("--tp", 0 if model.has_experts(0) else model.ffn, "--ffn"),  # 0: there is no dense layer
        Divides("--tp", model.shared_experts * model.expert_ffn, "--shared-experts x --expert-ffn"),
        Needs("--tp", model.kv_heads % grid.tp == 0 or grid.tp % model.kv_heads == 0,
              "--kv-heads that it divides, or that divide it"),
        Needs("--tp", model.vocab >= grid.tp, "a --vocab of at least its size"),
        Needs("--sp async", grid.tp > 1, "--tp 2 or more"),

        # Context parallelism. --cp-style ulysses may have more ranks than key heads: it sends copies of them. With
        # --cp-ulysses U, key groups would exchange the copies as well, so U has to divide the key heads, too.
        Divides("--cp", model.heads // grid.tp if grid.cp_style == "ulysses" else 0,
                "the heads of a tensor-parallel rank", ", or another --cp-style"),
        Divides("--cp-ulysses", grid.cp, "--cp"),
        Divides("--cp-ulysses", max(model.kv_heads // grid.tp, 1), "the --kv-heads of a tensor-parallel rank"),
        Needs("--cp-ulysses", grid.cp > grid.head_ranks,
              f"a larger --cp, and --cp-style {by_keys}: over all ranks it is the same as --cp-style ulysses"),
        Needs("--cp-zigzag document", grid.document_ranks > 1 and c.data.mask_documents and not model.window,
              "--mask-documents, no --window, and --cp ranks that exchange keys, as all styles except ulysses do"),
        Needs("--kv-lora-rank", grid.cp_style == "allgather" and grid.cp_ulysses == 1,
              "--cp-style allgather only: ranks gather latents, and the other styles would send whole heads"),

        # Frequencies of --rope-type dynamic follow from the length of a sequence, which a rank must know.
        Needs("--rope-type dynamic", not c.data.mask_documents,
              "sequences of one document: its frequencies follow from the length, leave out --mask-documents"),
        Needs("--rope-type dynamic",
              padded_length(c.batch.seq_len, grid.cp, grid.sequence_shards) == c.batch.seq_len,
              "a --seq-len that --cp ranks divide without padding, a multiple of 2 x --cp x --tp"),

        # Pipeline parallelism.
        Needs("--schedule", grid.pp > 1, "--pp 2 or more"),
        Needs("--virtual-stages", schedule.allows(grid.virtual_stages) if grid.pp > 1 else grid.virtual_stages == 1,
              f"--pp 2 or more and another --schedule: {any_stages} take any number of stages per rank"),
        Needs("--pp", model.layers >= grid.pp * grid.virtual_stages, "--layers of at least --pp x --virtual-stages"),

        # Data and expert parallelism.
        Divides("--dp-replicate", grid.dp, "--dp"),
        Needs("--dp-replicate", grid.dp * grid.cp > grid.dp_replicate,
              "a larger --dp x --cp: a replica on one rank shards nothing"),
        Divides("--ep", model.experts, "--experts"),
        Divides("--ep", grid.dp // grid.dp_replicate * grid.cp * grid.tp,
                "the ranks of --dp, --cp and --tp in a replica")]


def rules_of_the_run(c: Config) -> list[Needs]:
    """The rules of precision, optimizer, data and run."""
    precision, optim, data, run = c.precision, c.optim, c.data, c.run
    return [
        Needs("--fp8", precision.dtype not in ("fp16", "fp64"), "--dtype bf16, or fp32 where a CPU emulates FP8"),
        Needs("--fp8", c.grid.sp != "async", "--sp on or off: matmuls shard by shard have no FP8 version"),
        # This is about --no-fp8-ends, because a Needs without a value applies if the setting is not its default, on.
        Needs("--fp8-ends", len(c.fp8_layers()), "--fp8, and --layers 3 or more"),
        Needs("--moments-dtype bf16", optim.optimizer == "adamw" and precision.dtype != "fp64",
              "--optimizer adamw, and another --dtype than fp64, whose precision it would undo"),
        Needs("--moments-dtype bf16", optim.betas[1] <= 0.99,
              "--betas whose second is at most 0.99: an average in bf16 cannot move by less than 1/256 of itself"),
        Needs("--reduce-dtype bf16", precision.dtype != "fp64",
              "another --dtype than fp64, whose precision it would undo"),
        Needs("--attention triton", c.model.head_dim <= 256 and precision.dtype != "fp64",
              "--head-dim 256 or less, and another --dtype than fp64"),
        Needs("--kernels torch", precision.attention != "triton", "another --attention than triton"),
        Needs("--offload", precision.recompute == "full" or not precision.offloads("activations"),
              "--recompute full: it offloads the inputs of layers that full recomputation saves"),

        Needs("--min-lr", optim.min_lr <= optim.lr, "an --lr of at least as much"),
        # --steps 0 trains nothing (run/generate.py samples in this way), so the warmup does not matter then.
        Needs("--warmup", optim.warmup <= optim.steps or not optim.steps, "at least as many --steps"),
        Needs("--separator", data.separator < c.model.vocab, "a larger --vocab: the largest token is --vocab - 1"),
        Needs("--rewind", run.max_skipped and run.save_every,
              "--max-skipped, and --save-every, for a checkpoint to go back to"),

        Needs("--offload", not run.dry_run,
              "a real run: in a --dry-run one device stands for GPU and host; python -m plan memory has the formula"),
        Needs("--grid auto", not run.dry_run,
              "a real run: it chooses a grid for this machine; python -m plan search finds the best grid of another "
              "one, which you can give to --dry-run"),
        Needs("--mask-documents", not run.dry_run,
              "a real run: which scores documents mask depends on the data, which --dry-run does not read")]


def rules_of_sites(c: Config) -> list[Needs | Divides]:
    """The rules of DiLoCo: sites are in the same state after every --sync-every steps only."""
    grid, optim, run = c.grid, c.optim, c.run
    alone = grid.sites == 1
    period = optim.sync_every // optim.sync_fragments
    return [
        Divides("--sync-fragments", optim.sync_every, "--sync-every"),
        Needs("--sync-fragments", optim.sync_fragments <= c.model.layers, "at least as many --layers"),
        Needs("--sync-overlap", optim.sync_overlap < period,
              "a --sync-every / --sync-fragments above it: one exchange is under way at a time"),
        Needs("--outer-momentum", optim.outer_momentum < 1, "a value below 1"),
        Needs("--sync-dtype", c.precision.dtype != "fp64",
              "another --dtype than fp64, whose precision it would undo"),

        # What all sites do together, they do after the last fragment. Every setting divides 0, which is no such work.
        Divides("--sync-every", 0 if alone else optim.steps, "--steps"),
        Divides("--sync-every", 0 if alone else run.save_every, "--save-every"),
        Divides("--sync-every", 0 if alone else c.data.eval_every, "--eval-every"),
        Divides("--sync-every", 0 if alone else run.check_replicas, "--check-replicas"),

        Needs("--offload", alone or not c.precision.offloads("optimizer"),
              "--sites 1: the outer optimizer's state stays on the device"),
        Needs("--rewind", alone, "--sites 1: sites skip different steps"),
        Needs("--grid auto", alone, "--sites 1: the planner knows no sites"),
        Needs("--sites", not run.dry_run, "a real run: --dry-run shows one step, in which sites send nothing")]


# ---- checks that are no row of the table ----------------------------------------------------------------------------

def check_ranges(c: Config) -> None:
    """Check each setting by itself."""
    for name in FIELDS:
        problem = problem_of(name, c.value(name))
        need(not problem, f"{flag(name)} {c.value(name)}: {problem}")
    need(len(c.optim.betas) == 2 and all(0 <= beta < 1 for beta in c.optim.betas),
         f"--betas {','.join(map(str, c.optim.betas))}: write two numbers from 0 to below 1, such as 0.9,0.95")
    c.data.weights()  # raises ValueError if --data-weights is malformed


def check_grid(c: Config) -> None:
    """Check the table, and that the axes multiply to the number of ranks.

    With --grid auto, only the rules about the model are checked here. plan/search.py then chooses a grid and calls
    `parse` with it, which checks everything.
    """
    given = c.grid.grid == "given"
    for rule in every_rule(c):
        name = name_of(rule.setting)
        if given or SECTION_OF[name] == "model" or name == "grid":  # the row about --grid auto itself
            rule.check(c)
    if given:
        dp, cp, tp, pp = c.grid.dp, c.grid.cp, c.grid.tp, c.grid.pp
        sites = c.grid.sites
        ranks = sites * dp * cp * tp * pp
        need(ranks == c.ranks, f"{f'--sites {sites} x ' if sites > 1 else ''}--dp {dp} x --cp {cp} x --tp {tp} x "
             f"--pp {pp} = {ranks} ranks, and there are {c.ranks}: "
             f"use --dp {c.ranks // (sites * cp * tp * pp)}, or start {ranks}")
        check_fp8_widths(c)


def check_fp8_widths(c: Config) -> None:
    """Check the widths of the FP8 matmuls of a rank.

    With blockwise scales, they must be multiples of 128, the width of a block. Otherwise they must be multiples of 16,
    the alignment that torch._scaled_mm asks for.
    """
    model, tp, fp8 = c.model, c.grid.tp, c.precision.fp8
    if fp8 == "none":
        return
    unit = 128 if c.precision.fp8_recipe().blocks else 16
    widths = {"--hidden": model.hidden, "--heads x --head-dim": model.heads // tp * model.head_dim,
              "--kv-heads x --head-dim": max(model.kv_heads // tp, 1) * model.head_dim,
              "--ffn": 0 if model.has_experts(0) else model.ffn // tp,
              "--expert-ffn": model.expert_ffn,  # tensor parallelism does not split experts
              "--shared-experts x --expert-ffn": model.shared_experts * model.expert_ffn // tp,
              "--kv-lora-rank": model.kv_lora_rank, "--q-lora-rank": model.q_lora_rank,
              "--heads x --v-head-dim": model.heads // tp * model.value_dim,
              "--heads x --rope-head-dim": model.heads // tp * model.rope_head_dim}
    for name, n in widths.items():
        need(n % unit == 0, f"--fp8 {fp8}: {name} is {n} on a rank of --tp {tp}, and must be a multiple of {unit}")


def check_batch(c: Config) -> None:
    """Check that the batch fits the grid, at every size of a ramp.

    If the micro-batch is auto, choose it: this sets c.batch.micro_batch, in place.
    """
    batch, grid = c.batch, c.grid
    sizes = [size for size, _ in batch.ramp()]
    whole = f"--batch-ramp {batch.batch_ramp}" if batch.batch_ramp else f"--global-batch {batch.global_batch}"
    shares = grid.batch_shares
    dp = f"--dp {grid.dp}" if grid.sites == 1 else f"--sites {grid.sites} x --dp {grid.dp}"
    for size in sizes:
        below = size // shares * shares  # the nearest multiples are this one and the next
        use = f"{below} or {below + shares}" if below else f"{shares}"
        need(size % shares == 0, f"{whole.split()[0]} {size} is not a multiple of {dp}: use {use}")
    share = math.gcd(*sizes) // shares  # sequences per rank; a micro-batch that divides it divides every size
    batch.micro_batch = batch.micro_batch or share // choose_accumulation(share, batch.seq_len, grid)
    micro = f"--micro-batch {batch.micro_batch}"
    tokens = batch.micro_batch * batch.seq_len
    need(grid.cp > 1 or tokens % grid.sequence_shards == 0,  # with cp > 1, config.padded_length makes them fit
         f"--tp {grid.tp} cannot share {micro} x --seq-len {batch.seq_len} = {tokens} tokens in equal parts: use "
         "another --seq-len, or --sp off")
    Divides("--micro-batch", share, f"a rank's share of {whole}").check(c)
    count = max(sizes) // shares // batch.micro_batch
    need(count <= MOST_MICRO_BATCHES, f"{micro} makes {count:,} micro-batches per step of {whole}: must be at most "
                                      f"{MOST_MICRO_BATCHES:,}")


def choose_accumulation(share: int, seq: int, grid: Grid) -> int:
    """Return into how many micro-batches to divide a rank's `share` of sequences.

    Without a pipeline: one. With a pipeline: the smallest number of at least 2 pp, which fills any schedule, or else
    the largest number. Numbers whose micro-batches have tokens that tensor-parallel ranks can share equally come first.
    """
    fills = 2 * grid.pp
    counts = sorted(divisors(share), key=lambda n: (n < fills, abs(n - fills))) if grid.pp > 1 else [1]
    shared = [n for n in counts if grid.cp > 1 or share // n * seq % grid.sequence_shards == 0]
    return (shared or counts)[0]


def check_schedule(c: Config) -> None:
    """Check that the pipeline schedule exists for the number of micro-batches, at every size of a ramp.

    An error names the settings that were given, and not a micro-batch that was chosen from them.
    """
    grid, batch = c.grid, c.batch
    for size, _ in batch.ramp():
        micro_batches = size // grid.batch_shares // batch.micro_batch
        try:
            plan_of(grid, micro_batches)
        except ValueError as error:
            names = ["schedule", "pp", "micro_batch", "batch_ramp" if batch.batch_ramp else "global_batch"]
            flags = [f"{flag(name)} {c.before_defaults[name]}" for name in names if c.before_defaults[name]]
            least = SCHEDULES[grid.schedule].min_micro_batches_per_rank * grid.pp
            enough = least * grid.batch_shares * (c.before_defaults["micro_batch"] or 1)
            hint = f": use {enough} or more sequences per step" if micro_batches < least else ""
            raise ValueError(f"{' '.join(flags)}: {error}{hint}") from None
