"""What a run needs before it runs: does it fit, how long does a step take, which grid is best, what does it cost?

    python -m plan search --preset llama-3.1-70b --gpus 256 --global-batch 1024 --seq-len 8192

A command takes train.py's flags and some of its own; --help lists both. Neither torch nor a GPU is needed. The formulas
are in plan/costs.py and plan/memory.py, the times in plan/step_time.py, the pipelines in schedules.py, the best grid in
plan/search.py, the laws in plan/scaling.py. `python -m tests.published check` prints the error of such predictions on
published runs of other codes.

Letters: N parameters; h hidden, L layers, V vocabulary.
"""
import copy
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

from core import config, rules
from core.config import need, setting
from plan import costs, machines, scaling, search, step_time
from plan.machines import MACHINES, read_machine
from plan.memory import format_bytes
from plan.printing import bar, table
from plan.step_time import Run, parse, predict, with_dtype

GB = 1e9


# ---- what is printed ------------------------------------------------------------------------------------------------

def print_params(run: Run) -> None:
    """Exact, beside h V + L (12 h^2 + 13 h) + 2 h, which the lectures use, and what is different."""
    model = run.settings.model
    ours, gpt = costs.parameters(model), costs.lecture_parameters(model)
    rows = [("vocabulary", ours.embedding + ours.head, gpt["vocabulary"],
             "one tied table, as theirs" if model.tied else "a table for the input and one for the output"),
            ("attention", ours.attention, gpt["attention"],
             "queries, keys and values are made of latents" if model.kv_lora_rank
             else f"{model.kv_heads} of {model.heads} heads have keys and values" if model.kv_heads < model.heads
             else "four matrices, as theirs"),
            ("feed-forward", ours.ffn, gpt["ffn"], f"SwiGLU has 3 h F, F = {model.ffn}; with 8/3 h = "
                                                   f"{8 * model.hidden / 3:,.0f} it would be 8 h^2, as theirs"),
            ("experts", ours.experts, 0, f"{model.experts} per layer, {model.top_k} per token"),
            ("router", ours.router, 0, ""),
            ("projection", ours.projection, 0, "of multi-token prediction, whose block is counted above"),
            ("norms, biases", ours.norms, gpt["norms_and_biases"], "RMSNorm has no biases, nor have matrices")]
    total = sum(gpt.values())
    print(f"{model.preset}: {ours.total:,} parameters, {ours.active:,} active per token")
    rows.append(("total", ours.total, total, f"h V + L (12 h^2 + 13 h) + 2 h is {total / ours.total - 1:+.1%} off "
                                             "(Narayanan et al. 2021)"))
    cells = [(name, f"{count:,}", f"{count / ours.total:.1%}", f"{theirs:,}", why) for name, count, theirs, why in rows
             if count or theirs]
    print(table([("component", "parameters", "share", "GPT formula", "why they differ"), *cells], "<>>><"))


def changed(run: Run, section: str, **values) -> Run | None:
    """The run with these settings of a section changed; None if that cannot run."""
    settings = search.replaced(copy.deepcopy(run.settings), section, **values)
    grid = settings.grid
    try:
        rules.complete(settings, grid.ranks)
    except ValueError:
        return None
    return run._replace(settings=settings)


STATE = {"bf16 weights 2 + gradients 2, fp32 master 4 + moments 8": 16, "with fp32 gradients besides": 20,
         "16 with moments in bf16": 12, "this code: fp32 gradients instead": 18,
         "this code with --moments-dtype bf16": 14}  # bytes per parameter


def print_asked(run: Run, gpus: int, given: dict) -> None:
    """The batch and the machine that are planned for. given: the settings that flags give."""
    batch = run.settings.batch
    sequences, missing = batch.ramp()[-1][0], [name for name in ("global_batch", "seq_len") if name not in given]
    if "batch_ramp" in given:
        missing = [name for name in missing if name != "global_batch"]
    by_default = ""
    if missing and run.settings.model.preset not in ("tiny", "tiny-moe"):
        flags = " and ".join(map(config.flag, missing))
        by_default = f". Warning: {flags} {'are' if missing[1:] else 'is'} not given, and the default is the tiny run's"
    print(f"batch    {sequences:,} sequences of {batch.seq_len:,} tokens, {sequences * batch.seq_len:,} tokens per step"
          + by_default)
    print(f"machine  {gpus:,} x {run.machine.name}, {min(gpus, run.machine.gpus_per_node)} per node, "
          f"{format_bytes(run.machine.memory_bytes)} each; kernels: "
          f"{'of this project (--kernels auto)' if run.fused else 'plain torch'}")
    if run.machine.assumed:
        print(f"         {run.machine.assumed}")


def print_memory(run: Run) -> None:
    settings, machine = run.settings, run.machine
    kinds = step_time.needed_memory(run)
    needed, there = sum(kinds.values()), machine.memory_bytes
    print(f"{machine.name}: the pipeline rank that needs most, of {settings.grid.pp}, needs {format_bytes(needed)} of "
          f"{format_bytes(there)}, {format_bytes(run.constants.reserved)} reserved besides: fits with probability "
          f"{search.shown(step_time.probability_of_fit(run, needed))}")
    print(table([("  " + kind, format_bytes(nbytes), bar(nbytes, there)) for kind, nbytes in kinds.items()], "<><"))
    if run.fused and settings.precision.attention != "triton":
        torch_alone = step_time.needed_memory(changed(run, "precision", kernels="torch"))
        print(f"  with --kernels torch, and in train.py --dry-run, which runs plain torch, temporaries are "
              f"{format_bytes(torch_alone['temporaries'])}")
    print_choices(run)
    print_state(costs.parameters(settings.model).total, settings.model.preset)


def print_choices(run: Run) -> None:
    """What other pipeline ranks need; and what the run would with another recomputation, level of ZeRO or length."""
    settings, there = run.settings, run.machine.memory_bytes
    choices = {"pipeline rank": {str(rank): step_time.memory_of_rank(run, rank) for rank in
                                 range(settings.grid.pp)} if settings.grid.pp > 1 else {}}
    for section, name, values in (("precision", "recompute", costs.RECOMPUTE), ("grid", "zero", (0, 1, 2, 3)),
                                  ("batch", "seq_len", [settings.batch.seq_len << k >> 2 for k in range(6)])):
        made = {str(value): changed(run, section, **{name: value}) for value in values}
        choices[config.flag(name)] = {value: step_time.needed_memory(other) for value, other in made.items() if other}
    for title, choice in choices.items():
        if choice:
            totals = {value: sum(kinds.values()) for value, kinds in choice.items()}
            print(f"by {title}, total and activations:\n" + table([
                ("  " + value, format_bytes(total), format_bytes(choice[value]["activations"]), bar(total, there))
                for value, total in totals.items()], "<>><"))


def print_state(parameters: int, name: str) -> None:
    """Bytes of model state per parameter (Rajbhandari et al. 2020, section 3.1), before anything is sharded."""
    counts = {name: parameters, "1B": 10**9, "7B": 7 * 10**9, "70B": 70 * 10**9, "405B": 405 * 10**9}
    rows = [(f"  {nbytes}: {kind}", *(f"{nbytes * count / GB:,.0f}" for count in counts.values()))
            for kind, nbytes in STATE.items()]
    print(table([("model state, GB, bytes per parameter", *counts), *rows], "<" + ">" * len(counts)))


WHY = {"matmul": "matrix products at the speed that models reach",
       "elementwise": "norms, SwiGLU, residuals: limited by memory",
       "quantise": "operands of FP8 matmuls", "attention": "visible scores",
       "tp": "tensor parallel, not hidden", "cp": "keys and values, not hidden",
       "ep": "dispatch and combine", "offload": "inputs of blocks, to the host and back, not hidden",
       "recomputed": "forward in backward", "launch": "the host launches more slowly than the GPU computes",
       "head": "logits and loss", "bubble": "the pipeline fills, drains or waits", "dp": "data axis, not hidden",
       "tie": "a tied table's gradient, summed over its two stages",
       "optimizer": "gradients, weights and moments, read and written; FP8 weights", "fixed": "per step"}


def accuracy(run: Run) -> list[str]:
    """How far off predictions have been of published runs that had no part in the fit: of the time of such a step, and
    of memory."""
    kind, found, of_memory = step_time.kind_of(run), step_time.held_out()["steps"], step_time.held_out()["memory"]
    lines = [f"accuracy of such runs ({kind}), by runs of other codes that had no part in the fit:"]
    here = found.get(kind)
    if here and here["runs"]:
        lines.append(f"  step: {errors(here)}")
    else:
        why = f", but what the code of all {here['read_off_times']} did was read off their times" if here else ""
        known = [name for name, errors in found.items() if errors["runs"] >= 5]
        nearest = max(known, key=lambda name: [a == b for a, b in zip(name.split(", "), kind.split(", "))])
        lines += [f"  step: unknown. {'Such runs are' if here else 'No such run is'} published{why}",
                  f"  the nearest kind ({nearest}): {errors(found[nearest])}"]
    return [*lines, f"  memory: {errors(of_memory)}. This is of other codes, with their own allocators; the "
            "probability to fit is of this code, whose formula tests compare with counted bytes"]


def errors(found: dict) -> str:
    return (f"median error {found['median']:.0%}, nine of ten within {found['p90']:.0%}; four of five took "
            f"{found['low']:.2f} to {found['high']:.2f} times what was predicted ({found['runs']} of "
            f"{', '.join(found['sources'])})")


def print_step(run: Run) -> None:
    step, found = step_time.step_seconds(run), predict(run)
    batch, grid = run.settings.batch, run.settings.grid
    print(f"{run.machine.name}: {step.seconds:.3f} s per step of {batch.ramp()[-1][0]} sequences, "
          f"{found.tokens_per_s_per_gpu * grid.ranks:,.0f} tokens/s, "
          f"{found.tokens_per_s_per_gpu:,.0f} tokens/s per GPU")
    print(table([("  " + name, f"{seconds:.3f} s", f"{seconds / step.seconds:.1%}", bar(seconds, step.seconds, 30),
                  WHY[name]) for name, seconds in sorted(step.parts.items(), key=lambda item: -item[1]) if seconds > 0],
                "<>><<"))
    print(f"MFU {found.mfu:.1%} (6 N + 12 L h s), {found.mfu_causal:.1%} (6 N + 6 L h s, visible scores), HFU "
          f"{found.hfu:.1%} (with what is recomputed), of {run.machine.peak() / 1e12:,.0f} TFLOP/s in bf16")
    slowest = max(run.code.host_seconds(run, layer) for layer in range(run.settings.model.blocks))
    print(f"launches: this code's host needs up to {slowest * 1e3:.1f} ms per layer, as counted on a CPU")
    print(f"memory {found.memory_gb:.1f} GB, fits with probability {search.shown(found.fits)} (assumed: a standard "
          f"error of {run.constants.spread:.0%})")
    print("\n".join(accuracy(run)))


class Overlap(NamedTuple):
    """What a technique communicates beside the compute that it can hide under; it is exposed where ratio is above 1."""
    technique: str
    bandwidth: float  # bytes per second and rank, of its group
    communication_s: float
    compute_s: float  # at the speed of the best matmul
    formula: str  # of the ratio
    limit: Callable[[float], str]  # the ratio -> when it falls below 1

    @property
    def ratio(self) -> float:
        return self.communication_s / self.compute_s


def overlaps(run: Run) -> list[Overlap]:
    """The Ultra-Scale Playbook's question of each technique, for one layer (pp: one stage), with activations and
    weights in 16 bits and r bytes per element of a reduced gradient.

    F: FLOP/s. B: bandwidth. n: ranks. T: tokens of a micro-batch on a rank. p: multiplications per token in a layer
    (its parameters, and scores); P: in a stage. A forward takes 2 p T / F, a backward twice that.
    """
    model, grid, batch = run.settings.model, run.settings.grid, run.settings.batch
    T = batch.micro_batch * batch.seq_len / grid.cp
    p = costs.forward_flops(costs.llama_layer(model, batch.seq_len)) / 2
    H, q, kv = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    dp, cp, tp, ep = grid.dp * grid.cp, grid.cp, grid.tp, grid.ep
    ring = 1 if model.kv_lora_rank else cp  # latents go round none
    r = costs.reduced_bytes(run.settings, 2)
    layers, keys = model.blocks / (grid.pp * grid.virtual_stages), batch.seq_len / cp
    copies = costs.copies_per_token(model, ep) if model.experts else 0  # of each token, for experts

    def tokens(ratio: float) -> str:
        return f"from {T * ratio:,.0f} tokens per micro-batch on"

    rows = [  # what, n, stride, collective, bytes, FLOPs, ratio, limit
        ("dp: gradients' all-reduce under a backward", dp, tp, "all_reduce", 2 * (dp - 1) / dp * r * p / tp,
         4 * p * T / tp, f"{r // 2} (n-1)/n F / (B T)", tokens),
        ("ZeRO-3: the next layer's all-gather under a forward", dp, tp, "all_gather", (dp - 1) / dp * 2 * p / tp,
         2 * p * T / tp, "(n-1)/n F / (B T)", tokens),
        ("ZeRO-3: all-gather, reduce-scatter under a backward", dp, tp, "all_gather", (dp - 1) / dp * (2 + r) * p / tp,
         4 * p * T / tp, f"{(2 + r) / 4:g} (n-1)/n F / (B T)", tokens),
        ("tp: 2 all-gathers, 2 reduce-scatters of a forward", tp, 1, "all_gather", 4 * (tp - 1) / tp * 2 * T * H,
         2 * p * T / tp, "4 (n-1) H F / (B p)",
         lambda ratio: f"up to {1 + (tp - 1) / ratio:,.1f} ranks, whatever the batch"),
        ("cp: the ring's keys, values under a block of scores", ring, tp, "all_gather", 2 * 2 * kv * T / tp,
         4 * q * T * keys / 2 / tp, "2 kv/q F / (B S/n)",
         lambda ratio: f"from sequences of {batch.seq_len * ratio:,.0f} tokens on"),
        ("pp: a boundary's activations under a stage's forward", grid.pp, tp * dp, "all_gather", 2 * T * H / tp,
         2 * p * layers * T / tp, "H F / (B P)",
         lambda ratio: f"from {layers * ratio:,.2f} layers per stage on, whatever the batch"),
        ("ep: dispatch, combine beside the experts' forward", ep, 1, "all_gather",
         2 * (ep - 1) / ep * 2 * copies * T * H, 6 * model.top_k * T * H * model.expert_ffn,
         "2/3 u (n-1)/n F / (B k ffn)",
         lambda ratio: f"from experts {model.expert_ffn * ratio:,.0f} wide on, whatever the batch")]
    found = []
    for technique, n, stride, collective, nbytes, flops, formula, limit in rows:
        if n > 1:
            bandwidth = 1e9 / machines.collective_seconds(run.machine, 1e9, n, stride, collective)
            found.append(Overlap(technique, bandwidth, nbytes / bandwidth, flops / run.machine.best_matmul(), formula,
                                 limit))
    return found


def print_overlap(run: Run) -> None:
    """Communication beside the compute that can hide it, by technique."""
    print(f"{run.machine.name}: matmuls reach {run.machine.best_matmul() / 1e12:.3g} TFLOP/s")
    rows = [(found.technique, f"{found.bandwidth / GB:.3g} GB/s", f"{found.communication_s * 1e3:.3g} ms",
             f"{found.compute_s * 1e3:.3g} ms", f"{found.ratio:.3g}", found.formula, found.limit(found.ratio))
            for found in overlaps(run)]
    print(table([("per layer (pp: per stage)", "B", "sending", "computing", "ratio", "ratio =", "hidden"), *rows],
                "<>>>><<"))


# ---- search ---------------------------------------------------------------------------------------------------------

def print_search(run: Run, gpus: int, given: dict) -> None:
    found, fell = search.search(run, gpus, given)
    if not found:
        raise ValueError(search.why_none_fits(run, gpus, given, fell))
    gpu_tokens = run.settings.batch.ramp()[-1][0] * run.settings.batch.seq_len / gpus
    print(f"{run.machine.name}, {gpus} GPUs: {len(found)} settings fit; the best by step time divided by the "
          "probability to fit, with what limits each:")
    rows = [(f"{best.seconds:.3f} s", f"{best.rank:.3f} s", f"{gpu_tokens / best.seconds:,.0f}",
             format_bytes(best.memory), search.shown(best.fits), best.limit(), search.describe(best.run.settings))
            for best in found[:10]]
    print(table([("step", "step/fits", "tokens/s/GPU", "memory", "fits", "limit", "flags"), *rows], ">>>>><<"))
    print("a search takes three steps: 1 keeps the settings that fit in memory, 2 those of them that reach the global "
          "batch, 3 the fastest")
    print("others fell: " + "; ".join(f"{why}: {count:,}" for why, count in fell.most_common(8)))


# ---- the command line -----------------------------------------------------------------------------------------------

class Command(NamedTuple):
    answers: str
    example: str  # flags


LLAMA_8B = "--preset llama-3.1-8b --seq-len 8192 --global-batch 128 --micro-batch 1"
COMMANDS = {
    "params": Command("How many parameters has a model, by component, and why does a textbook formula differ?",
                      "--preset llama-3.1-8b"),
    "memory": Command("How much memory does a rank need, by kind, and with another recomputation, level of ZeRO or "
                      "sequence length?", f"{LLAMA_8B} --gpus 8 --zero 3"),
    "step": Command("How long does a step take, and on what? What is its utilisation, and how far off have such "
                    "predictions been?", f"{LLAMA_8B} --gpus 8 --zero 3 --recompute selective"),
    "overlap": Command("Does the communication of each technique hide under compute, and from what batch, length or "
                       "width on?", f"{LLAMA_8B} --gpus 64 --tp 4 --pp 2"),
    "search": Command("Which grid is the best for a model, a batch and a number of GPUs?",
                      "--preset llama-3.1-70b --gpus 256 --global-batch 1024 --seq-len 8192"),
    "scaling": Command("How many days and dollars does a training take, and which size and batch do scaling laws "
                       "advise?", f"{LLAMA_8B} --gpus 64 --train-tokens 1e12"),
    "sites": Command("How rarely must sites exchange weights over a slow link, so that they wait for less than 5% of "
                     "the time?", f"{LLAMA_8B} --gpus 128 --sites 2 --zero 3 --link-gbit 100 --link-ms 30")}
RENAMED = {"balance": "plan overlap", "check": "tests.published check", "fit": "tests.published fit"}
USAGE = f"python -m plan {'|'.join(COMMANDS)} [flags of train.py] [flags of plan]"


@dataclass
class Flags:
    gpus: int = setting(0, "GPUs; 0: as many as the grid's flags multiply to")
    machine: str = setting("h100", f"{', '.join(MACHINES)}; a file of bench/probe.py; cpu: this host; or any name, "
                                   "with the two flags below")
    peak_tflops: float = setting(0.0, "of one GPU: dense, in bf16, with fp32 accumulation; 0: the machine's")
    memory_gb: float = setting(0.0, "of one GPU; 0: the machine's")
    train_tokens: float = setting(0.0, "scaling: tokens; 0: 20 per active parameter")
    price: float = setting(2.5, "scaling: dollars per GPU-hour")
    link_gbit: float = setting(100.0, "sites: bandwidth of the link of a site, in Gbit/s and direction")
    link_ms: float = setting(50.0, "sites: time from one site to the next, in milliseconds")


def print_help(command: str) -> None:
    """command: "" for all commands."""
    print(f"usage: {USAGE.replace('|'.join(COMMANDS), command) if command else USAGE}\n")
    if not command:
        print(__doc__)
    for name, one in COMMANDS.items():
        if command in ("", name):
            print(f"{name:8s} {one.answers}\n         python -m plan {name} {one.example}")
    print("\nflags of train.py: see python train.py --help\nflags of plan:")
    parser = config.make_parser({"": Flags}, "")
    print(*parser.format_help().split("\n\n")[-1].splitlines()[1:], sep="\n")


def world_of(flags: list[str]) -> int:
    return math.prod(max(1, size) for size in search.given_by_flags(flags, step_time.AXES).values())


def main(arguments: list[str]) -> None:
    named = next((word for word in arguments if word in COMMANDS), "")
    if {"-h", "--help"} & set(arguments):
        return print_help(named)
    asked, rest = config.read_known(Flags, config.expand(arguments), USAGE)
    need(rest != [], f"usage: {USAGE}; --help explains")
    need(rest[0] not in RENAMED, f"{rest[0]}: use its new name, python -m {RENAMED.get(rest[0])}")
    need(rest[0] in COMMANDS, f"{rest[0]}: use one of {', '.join(COMMANDS)}")
    command = rest.pop(0)
    given = config.read(rest, [config.flag(declared.name) for declared in fields(Flags)])
    need(asked.gpus >= 0, f"--gpus {asked.gpus}: must be above 0")
    need(asked.gpus <= 10**6, f"--gpus {asked.gpus}: must be at most 1,000,000")  # a search takes 20 s there
    for name in ("peak_tflops", "memory_gb"):
        need(getattr(asked, name) >= 0, f"{config.flag(name)} {getattr(asked, name)}: must be above 0")
    gpus = asked.gpus or world_of(rest)
    machine = (search.this_machine(gpus) if asked.machine == "cpu"
               else read_machine(asked.machine, asked.peak_tflops, asked.memory_gb))
    searching = command == "search"
    settings = parse([*rest, "--grid", "auto"] if searching else rest, gpus)
    need(searching or settings.grid.grid == "given", f"--grid auto: {command} is of a grid that is given; search finds "
                                                     "the best")
    knows_host = machine.host_link and machine.host_memory
    need(settings.precision.offload == "none" or command in ("params", "memory") or knows_host,
         f"--offload {settings.precision.offload}: {asked.machine} has no host_link_bytes_per_s and "
         "host_memory_bytes_per_s, which bench/probe.py measures")
    run = Run(with_dtype(settings, machine), machine)
    if command != "params":
        print_asked(run, gpus, given)
    if command == "search":
        return print_search(run, gpus, search.given_by_flags(rest))
    if command == "scaling":
        rate = predict(run).tokens_per_s_per_gpu * gpus
        return scaling.print_scaling(settings, machine.name, gpus, rate, asked.train_tokens, asked.price)
    if command == "sites":
        need(asked.link_gbit > 0, f"--link-gbit {asked.link_gbit:g}: must be above 0")
        need(settings.grid.sites > 1, f"--sites {settings.grid.sites}: nothing is sent between sites: give 2 or more")
        seconds = step_time.step_seconds(run).seconds
        return scaling.print_sites(settings, machine.name, seconds, asked.link_gbit, asked.link_ms)
    dict(params=print_params, memory=print_memory, step=print_step, overlap=print_overlap)[command](run)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        print(f"plan: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(1)
