"""How large a model, on how much data: scaling laws, the critical batch, days and cost, a ring between datacentres.

    python -m plan scaling --preset llama-3.1-8b --gpus 64 --train-tokens 1e12

Letters: N parameters, D tokens, C = 6 N D FLOPs (Kaplan et al. 2020); L nats per token.
"""
from __future__ import annotations

import math
from typing import NamedTuple

from core.config import Config
from plan import costs
from plan.printing import table

PF_DAY = 8.64e19  # FLOPs: 1e15 per second for a day (Kaplan et al. 2020)


class Fit(NamedTuple):
    """L(N, D) = E + A / N^alpha + B / D^beta, whose minimum at C = 6 N D is N = G (C/6)^a, with a = beta / (alpha +
    beta) and G = (alpha A / beta B)^(1 / (alpha + beta)) (Hoffmann et al. 2022, equation 4)."""
    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def optimum(self, flops: float) -> tuple[float, float]:
        """(N, D) with the least loss."""
        both = self.alpha + self.beta
        scale = (self.alpha * self.A / (self.beta * self.B)) ** (1 / both)
        parameters = scale * (flops / 6) ** (self.beta / both)
        return parameters, flops / 6 / parameters

    def loss(self, parameters: float, tokens: float) -> float:
        return self.E + self.A / parameters ** self.alpha + self.B / tokens ** self.beta


FITS = {"approach 3, as printed (Hoffmann 2022)": Fit(1.69, 406.4, 410.7, 0.34, 0.28),
        "approach 3, unrounded (its TeX source)": Fit(1.6933736809989528, 406.4010175194737, 410.7228269450398,
                                                      0.33917084, 0.2849083),
        "refit (Besiroglu et al. 2024)": Fit(1.81686, 482.00572, 2085.4342, 0.34781, 0.36585)}


def power_law(flops: float, parameters: float, at_flops: float, exponent: float) -> tuple[float, float]:
    found = parameters * (flops / at_flops) ** exponent
    return found, flops / 6 / found


def optima(flops: float) -> dict[str, tuple[float, float]]:
    """(N, D) that each law says is best for so many FLOPs. Approaches 1 and 2: through the rows for 67B and 1T of their
    tables, with exponents that are printed with two digits."""
    laws = {"approach 1 (Hoffmann 2022, table 3)": power_law(flops, 67e9, 5.76e23, 0.50),
            "approach 2 (Hoffmann 2022, table A3)": power_law(flops, 1e12, 1.59e26, 0.49)}
    laws |= {name: fit.optimum(flops) for name, fit in FITS.items()}
    return laws | {"Kaplan et al. 2020": power_law(flops, 1.3e9, PF_DAY, 0.73)}


class Training(NamedTuple):
    """A training run, as published. flops_per_s: of a GPU, counted in hardware, with what is recomputed. recomputed:
    every forward, in backward."""
    parameters: float
    tokens: float
    gpus: int
    flops_per_s: float
    recomputed: bool = True

    @property
    def pf_days(self) -> float:
        return 6 * self.parameters * self.tokens / PF_DAY

    @property
    def days(self) -> float:
        """8 N D / (n X) with recomputation, 6 N D / (n X) without (Narayanan et al. 2021, equation 4)."""
        flops = (8 if self.recomputed else 6) * self.parameters * self.tokens
        return flops / (self.gpus * self.flops_per_s) / 86400

    @property
    def gpu_hours(self) -> float:
        return 24 * self.days * self.gpus


TRAININGS = {"GPT-3 (Narayanan et al. 2021)": Training(174.6e9, 300e9, 1024, 140e12),
             "1T (Narayanan et al. 2021)": Training(1008e9, 450e9, 3072, 163e12),
             "OPT-175B (Zhang et al. 2022)": Training(175e9, 300e9, 992, 147e12)}  # all on A100s

# Parameters and tokens of large models, as Hoffmann et al. 2022 have them in table 1, beside their own.
MODELS = {"LaMDA": (137e9, 168e9), "GPT-3": (175e9, 300e9), "Jurassic-1": (178e9, 300e9), "Gopher": (280e9, 300e9),
          "MT-NLG": (530e9, 270e9), "Chinchilla": (70e9, 1.4e12)}
OPT_FLOPS = 4.30e23  # of OPT-175B


def optima_of_opt() -> dict[str, tuple[float, float]]:
    """(N, D) for OPT's compute by equation 10 of Hoffmann et al. 2022, and with their three exponents a of N in its
    place: beta = alpha a / (1 - a) (a table of a lecture, Berkeley CS 288)."""
    betas = {"equation 10": 0.28} | {f"approach {i}, a = {a:g}": 0.34 * a / (1 - a)
                                     for i, a in enumerate((0.50, 0.49, 0.46), 1)}
    return {name: Fit(1.69, 406.4, 410.7, 0.34, beta).optimum(OPT_FLOPS) for name, beta in betas.items()}


def critical_batch(loss: float) -> float:
    """Tokens: 2e8 L^(-1/0.21), at which steps and tokens are both twice their least (Kaplan et al. 2020, section 5.1;
    McCandlish et al. 2018)."""
    return 2e8 * loss ** (-1 / 0.21)


def critical_batch_of_minimax(loss: float) -> float:
    """Tokens: the power law through the losses at which MiniMax-01 (2025) doubled its batch, from 2.22 with 16M tokens
    to 1.58 with 128M. Losses are per token, and so depend on the tokenizer."""
    return 16e6 * (2.22 / loss) ** (math.log(128 / 16) / math.log(2.22 / 1.58))


def ramp(final: int, seq: int) -> str:
    """A --batch-ramp of four doublings up to the final number of sequences, at the tokens where MiniMax-01 doubled, in
    proportion to the critical batch: 1, 11.4 and 68 times the first stage's 69B tokens at a last batch of 128M."""
    first = 69e9 * final * seq / 128e6
    starts = (0, first, first * 790 / 69, first * 4700 / 69)
    return ",".join(f"{max(1, final >> (3 - i))}@{start:.3g}" for i, start in enumerate(starts))


def ring_seconds(parameters: float, km: float, bytes_per_s: float, sites: int = 23, itemsize: int = 2) -> float:
    """Of an all-reduce round a ring of datacentres, km long, in both directions at once: each carries half of the
    2 (n-1)/n of all bytes that a ring sends, and the latency is one lap of light in glass, at 2e8 m/s (Epoch AI 2025:
    72T parameters, 23 sites, 4,800 km). bytes_per_s: of a link in one direction."""
    return (sites - 1) / sites * parameters * itemsize / bytes_per_s + km * 1000 / 2e8


SENT = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 4 / 128}  # --sync-dtype -> bytes per element, with the scale of a block
# epoch.ai/blog/could-decentralized-training-solve-ais-power-problem
EPOCH = "72T parameters over 23 sites on a ring of 4,800 km at 6 Pb/s each way (Epoch AI 2025)"
WAITS = 0.05  # the part of the time that sites may wait for their exchange


def exchange_bytes(elements: float, sites: int, dtype: str) -> float:
    """Bytes that a site sends in an exchange of so many elements (diloco.py): 2 (n-1)/n of all in an all-reduce; in
    int8, n-1 times all in an all-gather."""
    return (sites - 1 if dtype == "int8" else 2 * (sites - 1) / sites) * elements * SENT[dtype]


def exchange_seconds(elements: float, sites: int, dtype: str, gbit: float, ms: float) -> float:
    """Of such an exchange round a ring of sites: n-1 hops for an all-gather, 2 (n-1) for an all-reduce."""
    hops = (1 if dtype == "int8" else 2) * (sites - 1)
    return exchange_bytes(elements, sites, dtype) / (gbit * 1e9 / 8) + hops * ms / 1e3


def least_steps(exchange_s: float, step_s: float) -> int:
    """H, so that sites that wait for each exchange wait for at most WAITS of the time."""
    return max(1, math.ceil(exchange_s * (1 - WAITS) / WAITS / step_s))


def print_sites(settings: Config, machine: str, step_s: float, gbit: float, ms: float) -> None:
    """How long exchanges take, and how rarely or under how many steps they must happen."""
    grid, optim = settings.grid, settings.optim
    copies = grid.dp_replicate if grid.zero else grid.dp * grid.cp  # each sends all weights
    elements = copies * costs.parameters(settings.model).total
    print(f"{grid.sites} sites of {grid.ranks // grid.sites:,} x {machine}, {step_s:.3g} s per step; links of {gbit:g} "
          f"Gbit/s and {ms:g} ms; {elements:,} elements of each site" + (
              f", in {copies} copies: --zero 1 without replicas sends one" if copies > 1 else ""))
    rows = [("--sync-dtype", "GB per exchange", "exchange", f"waits {WAITS:.0%} if H is", "or hidden if tau is")]
    for dtype in SENT:
        seconds = exchange_seconds(elements, grid.sites, dtype, gbit, ms)
        hidden = exchange_seconds(elements / optim.sync_fragments, grid.sites, dtype, gbit, ms)
        gigabytes = exchange_bytes(elements, grid.sites, dtype) / 1e9
        rows.append((f"  {dtype}", f"{gigabytes:,.1f}", f"{seconds:.3g} s", f"{least_steps(seconds, step_s):,}",
                     f"{math.ceil(hidden / step_s):,}"))
    print(table(rows, "<>>>>"))
    print(f"tau: of one of {optim.sync_fragments} fragments (--sync-fragments)")
    epochs = ring_seconds(72e12, 4800, 6e15 / 8)
    print(f"beside it: {EPOCH}: an all-reduce in bf16 takes {epochs:.3f} s, which is {WAITS:.0%} of the time if H "
          f"steps take {epochs * (1 - WAITS) / WAITS:.1f} s")


def print_models() -> None:
    """Large models beside the optima for the same FLOPs, and the optima for OPT's."""
    rows = [("large models, and what was best for their C", "N", "D", "D/N", "C", "N, D: Hoffmann 2022",
             "N, D: Kaplan 2020")]
    for name, (parameters, data) in MODELS.items():
        flops = 6 * parameters * data
        best = [optima(flops)[law] for law in ("approach 1 (Hoffmann 2022, table 3)", "Kaplan et al. 2020")]
        rows.append(("  " + name, f"{parameters:.3g}", f"{data:.3g}", f"{data / parameters:.1f}", f"{flops:.3g}",
                     *(f"{n:.3g}, {d:.3g}" for n, d in best)))
    print(table(rows, "<>>>>>>"))
    rows = [("  " + name, f"{n:.3g}", f"{d:.3g}") for name, (n, d) in optima_of_opt().items()]
    print(table([(f"compute-optimal for OPT-175B's {OPT_FLOPS:.3g} FLOPs", "N", "D"), *rows], "<>>"))


def print_scaling(settings: Config, machine: str, gpus: int, rate: float, tokens: float, price: float) -> None:
    """rate: tokens per second of all GPUs. tokens: 0 for 20 per active parameter. price: dollars per GPU-hour."""
    count = costs.parameters(settings.model)
    tokens = tokens or 20 * count.active
    flops = 6 * count.active * tokens
    seconds = tokens / rate
    print(f"{settings.model.preset}: N {count.active:,} active, D {tokens:.3g} tokens ({tokens / count.active:.1f} per "
          f"parameter): C = 6 N D = {flops:.3g} FLOPs = {flops / PF_DAY:,.1f} PF-days")
    hours = gpus * seconds / 3600
    print(f"on {gpus} x {machine}, as `step` predicts: {seconds / 86400:,.2f} days, {hours:,.0f} GPU-hours, "
          f"{hours * price:,.0f} dollars at {price} per GPU-hour")
    rows = [("  " + name, f"{parameters:.3g}", f"{data:.3g}", f"{data / parameters:.1f}",
             f"{FITS[name].loss(parameters, data):.3f}" if name in FITS else "")
            for name, (parameters, data) in optima(flops).items()]
    print(table([("compute-optimal for these FLOPs", "N", "D", "D/N", "loss"), *rows], "<>>>>"))
    rows = [("  " + name, f"{run.parameters:.3g}", f"{run.tokens:.3g}", f"{run.pf_days:,.0f}", f"{run.days:.1f}",
             f"{run.gpu_hours:,.0f}") for name, run in TRAININGS.items()]
    print(table([("published runs on A100s", "N", "D", "PF-days", "days", "GPU-hours"), *rows], "<>>>>>"))
    print_models()
    loss = FITS["refit (Besiroglu et al. 2024)"].loss(count.active, tokens)
    sequences = settings.batch.ramp()[-1][0]
    print(f"loss of this N and D: {loss:.3f} nats per token (refit); critical batch {critical_batch(loss):.3g} tokens "
          f"(Kaplan et al. 2020) or {critical_batch_of_minimax(loss):.3g} (MiniMax-01), this run's "
          f"{sequences * settings.batch.seq_len:.3g}")
    if sequences >= 8 and sequences % (8 * settings.grid.batch_shares) == 0:
        print(f'a ramp in proportion to MiniMax-01\'s: --batch-ramp "{ramp(sequences, settings.batch.seq_len)}"')
    ours, epochs = (ring_seconds(parameters, 4800, 6e15 / 8) for parameters in (count.total, 72e12))
    print("an all-reduce in bf16 round a ring of 23 datacentres, 4,800 km long, at 6 Pb/s each way: "
          f"{ours:.3f} s; of 72T parameters (Epoch AI 2025) {epochs:.3f} s")
