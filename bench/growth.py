"""What a step costs a rank as the work grows, counted and by formula: `python -m bench growth`, in seconds.

Four tables: longer sequences, more ranks, more micro-batches, more experts. Each row is a dry run (run/dryrun.py): the
code that trains, as one of many ranks, in one process. What is counted is exact and the same on every machine; times
are not in it. The model has 4 layers, 512 wide, and runs in bf16 with sequences of 512 tokens in micro-batches of one.

    sent     bytes on the table's axis; formulas leave out router counts, losses and gradient norms
    live     the most bytes alive at once, by plan/memory.py
    FLOPs    of matmuls, by plan/costs.py: every parameter that a token passes through, all scores, and once more those
             that attention computes again in backward
"""
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import config
import train
from collectives import build_groups
from plan import costs
from run import dryrun
from run.device import memory_of_rank
from run.start import table

BASE = "--layers 4 --hidden 512 --heads 8 --kv-heads 4 --ffn 1408 --vocab 16000 --dtype bf16 --micro-batch 1 --seq 512"
ELEMENT, MAIN_GRAD = 2, 4  # bytes: of weights and activations in bf16; of gradients in fp32


class Growth(NamedTuple):
    """A table. flags: of train.py, {} is what grows. rank: the one that is counted, of `ranks`, or of {} if it is 0.
    sent: the bytes on the axis from the settings, and `formula` in letters."""
    grows: str
    flags: str
    values: tuple[int, ...]
    ranks: int
    rank: int
    axis: str
    formula: str
    sent: Callable[[config.Config], float]


class Costs(NamedTuple):
    sent: float  # bytes
    live: float  # bytes
    flops: float


def tensor_bytes(settings: config.Config) -> float:
    model, t = settings.model, settings.grid.tp
    return (10 * model.layers + 5) * ELEMENT * settings.batch.seq * model.hidden * (t - 1) / t


def data_bytes(settings: config.Config) -> float:
    n = settings.grid.dp
    return (MAIN_GRAD + ELEMENT) * costs.parameters(settings.model).total * (n - 1) / n


def pipeline_bytes(settings: config.Config) -> float:
    return 2 * ELEMENT * settings.batch.global_batch * settings.batch.seq * settings.model.hidden


def expert_bytes(settings: config.Config) -> float:
    model, n = settings.model, settings.grid.ep
    copies = round(settings.batch.seq * costs.copies_per_token(model, n) / n) * (n - 1)  # of tokens, to other ranks
    notes = 8 + 4  # times k: bytes of a copy's gates and experts, and of its gates' gradients
    return model.layers * copies * (4 * ELEMENT * model.hidden + notes * model.top_k)


TABLES = [
    Growth("sequence", "--tp 4 --global-batch 1 --seq {}", (512, 1024, 2048, 4096), 4, 0, "tp",
           "(10 L + 5) T H (t-1)/t elements, for L layers, embedding and head", tensor_bytes),
    Growth("ranks", "--dp {} --zero 1 --global-batch 16", (2, 4, 8, 16), 0, 0, "dp",
           "(4 + 2) P (n-1)/n bytes: gradients in fp32, weights in bf16", data_bytes),
    Growth("micro-batches", "--pp 4 --schedule 1f1b --global-batch {}", (2, 4, 8, 16, 32), 4, 1, "pp",
           "2 m T H elements: an activation and a gradient per micro-batch", pipeline_bytes),
    Growth("experts", "--dp 8 --ep 8 --zero 1 --global-batch 8 --expert-ffn 512 --top-k 2 --experts {}",
           (8, 16, 32, 64), 8, 0, "ep", "L u T (8 H + 24) (n-1)/n bytes, u of ep.py: dispatch, combine, gradients",
           expert_bytes)]


def flops_of_rank(settings: config.Config, ranks: int, rank: int) -> float:
    """By formula. The rank is also its pipeline stage, which has no head unless it is the only one."""
    model, seq = settings.model, settings.batch.seq
    layers, per_token = model.layers, costs.flops_per_token(model, seq)
    if settings.grid.pp > 1:
        layers = len(costs.stages_of(settings)[rank])
        per_token -= costs.flops_per_token(replace(model, layers=model.layers - layers), seq)
    per_token += 2 * layers * model.heads * model.head_dim * seq  # scores again, in backward
    return per_token * settings.batch.global_batch * seq * settings.grid.pp / ranks


def count(growth: Growth, value: int) -> tuple[Costs, Costs]:
    """(what the rank's first step costs, the same by formula)."""
    ranks = growth.ranks or value
    settings = config.parse(f"{BASE} {growth.flags.format(value)}".split(), ranks)
    with dryrun.fake_world(ranks, growth.rank):
        groups = build_groups(settings.grid, settings.model)
        live = sum(memory_of_rank(settings, groups["pp"].rank).values())
        with dryrun.fake_tensors():
            found = train.measured_step(settings, groups)
    return (Costs(found.sent[growth.axis], found.peak, found.flops),
            Costs(growth.sent(settings), live, flops_of_rank(settings, ranks, growth.rank)))


def main() -> None:
    print("in brackets: counted / formula")
    for growth in TABLES:
        of = f"rank {growth.rank} of {growth.ranks or 'all'}"
        print(f"\n{growth.grows}: {growth.flags.format('…')}; {of}; sent on {growth.axis}: {growth.formula}")
        rows = [(growth.grows, "MB sent", "MB live at peak", "GFLOPs")]
        for value in growth.values:
            counted, formula = count(growth, value)
            rows.append((f"{value:,}", *(f"{found / unit:,.1f} ({found / wanted:.3f})"
                                         for found, wanted, unit in zip(counted, formula, (1e6, 1e6, 1e9)))))
        print(table(rows, "<>>>"), flush=True)
