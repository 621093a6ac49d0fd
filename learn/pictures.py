"""Draw the pictures of README.md, docs/RUNNING.md and the pages, with the code that they show.

    python -m learn.pictures                        list the pictures, and how long each takes
    python -m learn.pictures grid schedules         draw these two, in pictures/, or in --out FOLDER
    python -m learn.pictures all                    draw every picture of the list
    python -m learn.pictures loss a.jsonl b.jsonl   draw the losses of runs, also the validation losses, in one
                                                    picture. The files were written by --metrics

Each function below draws one picture, and its first line describes the picture. The numbers are
computed by plan/, schedules.py and cp.py, or measured here. This needs matplotlib
(requirements-test.txt).

docs/pictures/ holds the published pictures. After changing the code that a picture shows, draw it
again: `python -m learn.pictures NAME --out docs/pictures`.
"""
import argparse
import inspect
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from pydoc_data import topics
from typing import NamedTuple

try:
    import matplotlib
except ImportError:
    print("learn.pictures: matplotlib is missing: pip install -r requirements-test.txt", file=sys.stderr)
    sys.exit(2)
import torch
import torch.nn.functional as F
from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from torch.distributed import TCPStore

import ep
import schedules
import train
from core import config, rules
from core.collectives import ALONE
from core.config import need
from core.groups import build_groups
from core.param import Spec, draw, parameter
from cp import own_chunks
from learn import Parser
from plan import costs, machines, search, step_time
from plan.__main__ import overlaps
from run.data import open_samples
from run.meter import Meter
from run.timeline import svg

FOLDER = Path(__file__).parent.parent / "pictures"  # the default of --out; git ignores it
COLORS = {"dp": "#4c78a8", "cp": "#2a9d8f", "tp": "#e07b39", "pp": "#8e5ea2", "ep": "#c8443c"}
KINDS = {"weights": "#4c78a8", "gradients": "#54a24b", "optimizer": "#e0a030", "activations": "#c8443c",
         "temporaries": "#999999"}
RANKS = ["#7aa6da", "#8cc98c", "#e0b15e", "#c98ac0"]
matplotlib.rcdefaults()  # ignores the user's matplotlibrc
matplotlib.rcParams.update({
    "svg.fonttype": "none", "svg.hashsalt": "penteract", "font.size": 9, "axes.titlesize": 9.5, "legend.fontsize": 8.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titleweight": "bold", "legend.frameon": False,
    "font.family": ["DejaVu Sans", "sans-serif"], "figure.constrained_layout.use": True})


def as_svg(figure: Figure) -> str:
    """Return the figure as SVG.

    Its background is white, to be readable on dark pages. It has no date, so that equal pictures
    are equal files.
    """
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None}, facecolor="white")
    pyplot.close(figure)
    text = re.sub(r'<!--.*?-->| id="(text|patch|line2d|xtick|ytick|axes|figure|legend)_[0-9]+"', "", text.getvalue(),
                  flags=re.DOTALL)
    text = re.sub(r'"[^"]*"', lambda attribute: re.sub(r"(\.[0-9])[0-9]+", r"\1", attribute[0]), text)  # one decimal
    return re.sub(r"\s*\n\s*", "\n", text)


def bare(axes, x: tuple[float, float], y: tuple[float, float]) -> None:
    """Remove the axes, and use these limits and one scale for x and y."""
    axes.set_axis_off()
    axes.set_aspect("equal")
    axes.set_xlim(*x)
    axes.set_ylim(*y)


def arrow(axes, start, end, color: str, style: str = "<->", **options) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=11, color=color, lw=1.8, shrinkA=0,
                                   shrinkB=0, **options))


def box(axes, x: float, y: float, width: float, height: float, text: str = "", color: str = "#dde7f3", **options):
    options = {"edgecolor": "#666666", "lw": 0.8, "clip_on": False} | options
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, **options))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8)


# ---- the grid and its schedules -------------------------------------------------------------------------------------

def grid() -> Figure:
    """Sixteen ranks as pp 2 x dp 2 x cp 2 x tp 2, numbered as train.py does, with experts over ep 4."""
    figure, axes = pyplot.subplots(figsize=(9, 4.9))
    numbers = torch.arange(16).view(2, 2, 2, 2)  # pp, dp, cp, tp: the last varies fastest
    for p, d, c, t in product(range(2), repeat=4):
        x, y = p * 6.4 + t * 2.4, (1 - d) * 3.4 + (1 - c) * 1.5
        box(axes, x, y, 1.7, 1.0, f"rank {numbers[p, d, c, t]}", ["#fbe3d3", "#f6c6a7"][t], edgecolor=COLORS["cp"])
        if t == 0 and c == 0:
            axes.add_patch(Rectangle((x - .25, y - 1.75), 4.6, 3, fill=False, ls="--", lw=1.4, edgecolor=COLORS["ep"]))
        if t == 0:
            arrow(axes, (x + 1.7, y + .5), (x + 2.4, y + .5), COLORS["tp"])
        if c == 0:
            arrow(axes, (x + .85, y), (x + .85, y - .5), COLORS["cp"])
    for p in range(2):  # ranks at the same place of two dashed boxes
        arrow(axes, (p * 6.4 + 2.05, 3.15), (p * 6.4 + 2.05, 2.75), COLORS["dp"])
        arrow(axes, (4.35, 1.25 + p * 3.4), (6.15, 1.25 + p * 3.4), COLORS["pp"])
        axes.text(p * 6.4 + 2.05, 6.25, f"pipeline stage {p}: {['first', 'second'][p]} half of the layers", ha="center",
                  color=COLORS["pp"], weight="bold")
        for d in range(2):
            axes.text(p * 6.4 + 4.5, (1 - d) * 3.4 + 2.55, f"dp {d}", color=COLORS["dp"], weight="bold")
    notes = {"tp": "tensor: 1/2 of every matrix, 1/2 of the tokens in between; several exchanges per layer: innermost",
             "cp": "context: 1/2 of every sequence; keys and values in each attention",
             "ep": "expert: these four ranks have each expert once; tokens are sent to theirs and back in each layer",
             "dp": "data (0 with 4): different sequences; gradients are summed once per step; ZeRO shards replicas",
             "pp": "pipeline (0 with 8): different layers; activations at each stage boundary: outermost"}
    for i, (axis, note) in enumerate(notes.items()):
        axes.text(-.25, -.85 - i * .48, axis, color=COLORS[axis], weight="bold")
        axes.text(.45, -.85 - i * .48, note)
    bare(axes, (-.5, 12.2), (-3.1, 6.7))
    return figure


def timelines(which: list[str]) -> str:
    panels = {}
    for schedule in which:
        made = schedules.make_plan(schedule, 4, 8)
        panels[schedule] = schedules.simulate(made, schedules.Costs(*[4 / made.stages] * 3))
    return svg(panels)


def timeline() -> str:
    """What a pipeline schedule improves: less idle time, or fewer saved activations."""
    return timelines(["afab", "1f1b", "interleaved", "zb-v"])


def all_schedules() -> str:
    """Every schedule for four ranks and eight micro-batches, on one time scale."""
    return timelines(list(schedules.SCHEDULES))


def bubble() -> Figure:
    """More micro-batches make every bubble smaller; zero-bubble schedules start smaller."""
    figure, axes = pyplot.subplots(figsize=(8.6, 3.6))
    counts = range(16, 129, 8)
    for i, name in enumerate(name for name in schedules.SCHEDULES if name not in ("afab", "zb-h2")):
        shares = []
        for m in counts:
            made = schedules.make_plan(name, 8, m)
            spans = schedules.simulate(made, schedules.Costs(*[8 / made.stages] * 3))
            shares.append(100 * schedules.bubble(spans) / max(rank[-1].stop for rank in spans))
        axes.plot(counts, shares, marker="osv^D<>"[i % 7], ms=4, lw=1.3, label="afab, 1f1b" if name == "1f1b" else name)
    axes.set(xlabel="micro-batches per step", ylabel="% of the step", xticks=range(16, 129, 16), ylim=0,
             title="The bubble on 8 pipeline ranks, if F, I and W take equally long")
    axes.legend(ncols=2)
    return figure


# ---- memory and step time, as plan/ predicts them -----------------------------------------------------------------

def stacked(axes, bars: dict[str, dict[str, float]], title: str, limit: float = 0.0) -> None:
    """Draw horizontal bars of bytes by kind, from top to bottom."""
    for row, kinds in enumerate(bars.values()):
        at = 0.0
        for kind, color in KINDS.items():
            value = kinds[kind] / 1e9
            axes.barh(row, value, left=at, color=color, height=0.7)
            at += value
        axes.text(at, row, f" {at:,.0f}", va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), bars)
    axes.invert_yaxis()
    axes.set_title(title, loc="left")
    axes.set_xlabel("GB on the rank that needs most")
    axes.set_xlim(0, 1.12 * max(sum(kinds.values()) for kinds in bars.values()) / 1e9)
    if limit:
        axes.axvline(limit, color="black", lw=1, ls=":")


def memory() -> Figure:
    """What fills a GPU, by ZeRO level, sequence length, recomputation and grid; dotted: the 80 GB of an H100."""
    def of(**request) -> dict[str, float]:
        request = dict(global_batch=256, micro_batch=1, machine="h100") | request
        return step_time.needed_memory(step_time.run_of(request))

    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6))
    eight = dict(preset="llama-3.1-8b")
    stacked(axes[0, 0], {f"ZeRO-{level}": of(**eight, seq_len=4096, dp=64, zero=level) for level in range(4)},
            "Llama 3.1 8B, dp 64, sequences of 4,096", 80)
    stacked(axes[0, 1], {f"{seq:,}": of(**eight, seq_len=seq, dp=64, zero=3)
                         for seq in (2048, 4096, 8192, 16384, 32768)},
            "the same, ZeRO-3, by sequence length", 80)
    stacked(axes[1, 0], {way: of(**eight, seq_len=16384, dp=64, zero=3, recompute=way) for way in costs.RECOMPUTE},
            "the same, 16,384 tokens, by what is recomputed", 80)
    seventy = dict(preset="llama-3.1-70b", seq_len=8192, recompute="selective")
    grids = ((256, 1, 1, 1, 3), (32, 8, 1, 1, 1), (8, 8, 4, 1, 1), (4, 8, 4, 2, 1), (2, 8, 8, 2, 1))
    stacked(axes[1, 1], {f"dp {dp} tp {tp} pp {pp} cp {cp}, ZeRO-{zero}": of(**seventy, dp=dp, tp=tp, pp=pp, cp=cp,
                                                                                zero=zero)
                         for dp, tp, pp, cp, zero in grids}, "Llama 3.1 70B on 256 GPUs, by grid", 80)
    handles = [Rectangle((0, 0), 1, 1, color=color) for color in KINDS.values()]
    figure.legend(handles, KINDS, loc="outside lower center", ncols=5)
    return figure


def planner() -> Figure:
    """The planner's map: for each model and number of H100s, the fastest grid that fits, and its
    utilisation. (For Mixtral's 8 experts, ep 8 is given. A search of all sizes takes longer and
    finds the same.)"""
    models = {"llama-3.2-1b": (256, {}), "llama-3.1-8b": (512, {}), "llama-3.1-70b": (1024, {}),
              "mixtral-8x7b": (512, dict(ep=8))}
    gpus = (8, 32, 128, 512)
    figure, axes = pyplot.subplots(figsize=(9, 3.6))
    cells = torch.full((len(models), len(gpus)), float("nan"))
    for (row, (preset, (batch, given))), (column, count) in product(enumerate(models.items()), enumerate(gpus)):
        run = step_time.run_of(dict(preset=preset, seq_len=8192, global_batch=max(batch, count), machine="h100"))
        found, _ = search.search(run, count, given, simulated=10)
        text = "does not fit"
        if found:
            settings = found[0].run.settings
            cells[row, column] = 100 * step_time.predict(found[0].run).mfu
            axes_of = [f"{axis} {getattr(settings.grid, axis)}" for axis in ("dp", "cp", "tp", "pp", "ep")
                       if getattr(settings.grid, axis) > 1]
            text = f"{', '.join(axes_of)}\nZeRO-{settings.grid.zero}, {cells[row, column]:.0f}%"
            text += {"none": "", "selective": "\nselective", "full": "\nfull"}[settings.precision.recompute]
        axes.text(column, row, text, ha="center", va="center", fontsize=8)
    axes.imshow(cells, cmap="YlGn", vmin=0, vmax=90, aspect="auto")
    axes.set(xticks=range(len(gpus)), yticks=range(len(models)), title="The fastest grid that fits, and its predicted "
             "MFU, for 8,192 tokens on H100s")
    axes.set_xticklabels([f"{count} GPUs" for count in gpus])
    axes.set_yticklabels(models)
    axes.spines[:].set_visible(False)
    return figure


def scaling() -> Figure:
    """The cost of an axis as it grows, for a 3.6B model: the playbook's fastest runs (dots) and
    plan/ (lines)."""
    from tests.published import runs as published
    from tests.published.requests import run_of
    runs = [row for row in published.rows() if row.table == "playbook_runs" and row.step_s
            and row.request["hidden"] == 3072 and row.request["global_batch"] == 256]
    panels = {"data parallel ranks": lambda r: r["gpus"] if r["tp"] == r["pp"] == 1 else 0,
              "tensor parallel ranks of 128": lambda r: r["tp"] if r["pp"] == 1 and r["gpus"] == 128 else 0,
              "pipeline ranks of 128": lambda r: r["pp"] if r["tp"] == 1 and r["gpus"] == 128 else 0}
    figure, axes = pyplot.subplots(2, 4, figsize=(11, 5), sharey="row")

    def draw_line(column: int, requests: dict[int, dict], **style) -> None:
        found = [step_time.predict(run_of(request)) for request in requests.values()]
        axes[0, column].plot([*requests], [one.tokens_per_s_per_gpu for one in found], color=COLORS["dp"], **style)
        axes[1, column].plot([*requests], [one.memory_gb for one in found], color=COLORS["dp"], **style)
        for axis in axes[:, column]:
            axis.set_xscale("log", base=2)
            axis.set_xticks([*requests], map(str, requests))

    for column, (title, ranks_of) in enumerate(panels.items()):
        best: dict[int, published.Row] = {}
        for row in runs:
            if size := ranks_of(row.request):
                best[size] = min(best.get(size, row), row, key=lambda row: row.step_s)
        requests = {size: best[size].request for size in sorted(best)}
        draw_line(column, requests, label="predicted")
        measured = [256 * 4096 / best[size].step_s / best[size].request["gpus"] for size in requests]
        for axis, dots in zip(axes[:, column], (measured, [best[size].memory_gb for size in requests])):
            axis.plot([*requests], dots, "ko", ms=4, label="measured")
        axes[0, column].set_title(title)
        if column == 1:
            draw_line(column, {size: request | dict(sp="off") for size, request in requests.items()}, ls="--",
                      label="without sequence parallelism")
    long = next(row.request for row in runs if row.request["dp"] == 128) | dict(seq_len=32768, global_batch=128)
    draw_line(3, {cp: long | dict(cp=cp, dp=128 // cp) for cp in (2, 4, 8, 16)})
    axes[0, 3].set_title("context parallel ranks of 128,\n32,768 tokens (not measured)")
    axes[0, 0].set(ylabel="tokens/s per GPU", ylim=0)
    axes[1, 0].set(ylabel="GB per GPU", ylim=(0, 120))
    figure.legend(*axes[0, 1].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


# ---- how techniques work --------------------------------------------------------------------------------------------

def overlap() -> Figure:
    """Where communication is hidden: four layers of Llama 3.1 8B on 64 H100s, with times of plan/.
    Computation waits for communication that it does not cover.

    F3, B3: the forward and the backward of layer 3. R3: the reduction of its gradient over the ranks. w3: the gather of
    its weights. k1: the next shard of keys and values.
    """
    run = step_time.run_of(dict(preset="llama-3.1-8b", dp=32, cp=2, zero=1, seq_len=16384, global_batch=256,
                                micro_batch=1,
                              machine="h100"))
    times = {found.technique.split(":")[0] + (" back" if "backward" in found.technique else ""): found
             for found in overlaps(run)}
    gather, reduce, ring = (times[name].communication_s * 1e3 for name in ("ZeRO-3", "dp back", "cp"))
    forward, block = times["ZeRO-3"].compute_s * 1e3, times["cp"].compute_s * 1e3
    layers, rows = range(4), []  # (lane, start, duration, label)
    compute = [(0, i * forward, forward, f"F{i}") for i in layers]
    compute += [(0, (4 + 2 * i) * forward, 2 * forward, f"B{3 - i}") for i in layers]

    def chain(starts: list[float], duration: float, names: list[str]) -> list[tuple]:
        """Schedule the messages of one network. Each begins when it is ready and the message before
        it has ended."""
        out, free = [], 0.0
        for may, name in zip(starts, names):
            began = max(may, free)
            free = began + duration
            out.append((1, began, duration, name))
        return out

    ready = [(4 + 2 * (i + 1)) * forward for i in layers]  # gradients of layer 3 - i
    names = [f"R{3 - i}" for i in layers]
    rows.append(("data parallelism: all-reduce of gradients under backward", compute + chain(ready, reduce, names)))
    rows.append(("ZeRO-1: weights gathered under the next forward, reduce-scatter of gradients under backward", compute
                 + chain([0.0] * 4, gather, [f"w{i}" for i in layers])
                 + chain(ready, reduce / 2, names)))
    fetched = [0.0, *[i * forward for i in range(3)], *[(4 + 2 * i) * forward - forward for i in layers]]
    rows.append(("ZeRO-3: each layer's weights gathered under the one before, forward and backward",
                 compute + chain(fetched, gather, [*(f"w{i}" for i in layers), *(f"w{3 - i}" for i in layers)])
                 + [(2, at, reduce / 2, name) for at, name in zip(ready, names)]))
    rows.append(("context parallelism: the ring's next keys and values under a block of scores",
                 [(0, i * block, block, "scores") for i in layers]
                 + chain([i * block for i in range(3)], ring, [f"k{i + 1}" for i in range(3)])))
    figure, axes = pyplot.subplots(4, 1, figsize=(9, 6))
    for axis, (title, bars) in zip(axes, rows):
        for lane, began, duration, label in bars:
            axis.barh(-lane, duration, left=began, height=0.8, edgecolor="white",
                      color=[COLORS["dp"], COLORS["tp"], COLORS["pp"]][lane])
            axis.text(began + duration / 2, -lane, label, ha="center", va="center", color="white", fontsize=7)
        lanes = 1 + max(lane for lane, *_ in bars)
        axis.set_yticks([-lane for lane in range(lanes)], ["compute", "network", "network"][:lanes])
        axis.set_title(title, loc="left")
    axes[-1].set_xlabel("ms")
    return figure


def layer() -> Figure:
    """The part of a layer on rank 1 of four: tokens x hidden, an input and an output matrix, and
    eight experts. ZeRO-3 shards flat tensors: the second quarter is half of A, and two of the
    experts."""
    figure, axes = pyplot.subplots(figsize=(9.4, 2.9))
    ways = {"one process": {}, "tp": dict(A="rows", B="columns"),
            "tp with sp": dict(X="tokens", A="rows", B="columns"), "cp": dict(X="zig-zag"),
            "ZeRO-3": dict(A="half", B="none", E="experts"), "ep": dict(X="tokens", E="experts")}
    for column, (name, how) in enumerate(ways.items()):
        x = column * 3.1
        axes.text(x + 1, 5.55, name, ha="center", weight="bold")
        parts = {"X": (x, 3.6, 2, 1.6, "X"), "A": (x, 1.9, 0.9, 1.2, "A"), "B": (x + 1.1, 1.9, 0.9, 1.2, "B")}
        parts |= {f"E{i}": (x + 0.51 * (i % 4), 0.6 - 0.6 * (i // 4), 0.45, 0.5, str(i)) for i in range(8)}
        for key, (left, bottom, width, height, text) in parts.items():
            cut = how.get(key[0])
            whole = cut is None or (cut == "experts" and int(key[1:]) in (2, 3))
            color = {"X": "#f6c6a7", "A": "#7aa6da", "B": "#7aa6da", "E": "#e79a9a"}[key[0]]
            box(axes, left, bottom, width, height, "", color if whole else "#f4f4f4")
            quarter = {"rows": (0, .5, 1, .25), "tokens": (0, .5, 1, .25), "columns": (.25, 0, .25, 1),
                       "half": (0, 0, 1, .5)}.get(cut)
            shards = [quarter] if quarter else [(0, .75, 1, .125), (0, .125, 1, .125)] if cut == "zig-zag" else []
            for at, up, wide, high in shards:
                axes.add_patch(Rectangle((left + at * width, bottom + up * height), wide * width, high * height,
                                         facecolor=color, edgecolor="#666666", lw=0.6))
            axes.text(left + width / 2, bottom + height / 2, text, ha="center", va="center", fontsize=8)
    for y, text in ((4.4, "tokens x hidden"), (2.5, "matrices"), (0.5, "experts")):
        axes.text(-.3, y, text, ha="right", va="center")
    bare(axes, (-3.2, 18.4), (-.3, 6))
    return figure


def zero_bubble() -> Figure:
    """Why a bubble can be filled: the W of a stage waits only for its own B. Everything else waits
    for a neighbour."""
    figure, axes = pyplot.subplots(figsize=(7.4, 2.3))
    for column in range(3):
        for row, (name, color) in enumerate((("W", "#54a24b"), ("B (dX)", "#4c78a8"), ("F", "#e07b39"))):
            box(axes, column * 3, row * 1.3, 1.7, .8, f"{name}\nstage {column}", color, alpha=.55)
        if column < 2:
            arrow(axes, (column * 3 + 1.7, 3.0), (column * 3 + 3, 3.0), "black", "->")
            arrow(axes, (column * 3 + 3, 1.7), (column * 3 + 1.7, 1.7), "black", "->")
        arrow(axes, (column * 3 + .5, 1.3), (column * 3 + .5, .8), "black", "->")
        arrow(axes, (column * 3 + 1.2, 2.6), (column * 3 + 1.2, 2.1), "black" if column == 2 else "#999999", "->")
    axes.text(8.2, 3.0, "activations, stage by stage", va="center")
    axes.text(8.2, 1.7, "their gradients, back", va="center")
    axes.text(8.2, .4, "weight gradients: any time\nbefore the optimizer", va="center")
    bare(axes, (-.2, 12.4), (-.2, 3.6))
    return figure


def hierarchy() -> Figure:
    """A GPU's memories: each is larger and slower than the one above (A100: Dao et al. 2022; H100: plan/)."""
    figure, axes = pyplot.subplots(figsize=(7.4, 3.2))
    h100 = machines.MACHINES["h100"]
    node, network = h100.levels
    rows = [("SRAM of the SMs", "20 MB", "19 TB/s", "A100"), ("HBM", "40 GB", "1.5 TB/s", "A100"),
            ("HBM", f"{h100.memory_bytes / 2**30:.0f} GiB", f"{h100.memory_bandwidth / 1e12:.2f} TB/s", "H100"),
            ("other GPUs of the node", "", f"{node.bandwidth_bytes_per_s / 1e9:.0f} GB/s", "H100, measured"),
            ("the host's memory", ">1 TB", f"{h100.host_link / 1e9:.0f} GB/s (A100's figure: 12.8)", "H100, its link"),
            ("other nodes", "", f"{network.bandwidth_bytes_per_s / 1e9:.0f} GB/s", "H100, measured")]
    for i, (name, size, speed, of) in enumerate(rows):
        half = 1.5 + 0.62 * i
        box(axes, -half, -i, 2 * half, 0.9, f"{name}  {size}", ["#c8443c", "#e07b39", "#e0a030", "#54a24b", "#4c78a8",
                                                                "#8e5ea2"][i], alpha=.5)
        axes.text(5, .45 - i, f"{speed}   {of}", va="center")
    bare(axes, (-4.8, 9.8), (-5.2, 1.1))
    return figure


def zigzag() -> Figure:
    """Causal attention on four ranks: contiguous shards are unequal work, and zig-zag shards are
    equal work."""
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.9))
    owner = {chunk: rank for rank in range(4) for chunk in own_chunks(4, rank)}
    for ax, name, of in ((axes[0], "contiguous", lambda chunk: chunk // 2), (axes[1], "zig-zag", owner.get)):
        work = [0] * 4
        for query, key in product(range(8), repeat=2):
            if key <= query:
                box(ax, key, 7 - query, 1, 1, str(of(query)), RANKS[of(query)], edgecolor="white")
                work[of(query)] += 1
        ax.set_title(f"{name}: {', '.join(map(str, work))} blocks on ranks 0 to 3", loc="left")
        ax.text(4, -.55, "chunks of keys", ha="center")
        ax.text(-.35, 4, "chunks of queries", va="center", rotation=90)
        bare(ax, (-.9, 8.1), (-1, 8.1))
    return figure


def ring() -> Figure:
    """A ring all-reduce of four chunks on four ranks: n - 1 hops of reduce-scatter, then n - 1 hops
    of all-gather. In each hop each rank sends one chunk. A cell shows the ranks whose terms have
    been summed."""
    figure, axes = pyplot.subplots(1, 7, figsize=(9, 2.0))
    have = [[{rank} for _ in range(4)] for rank in range(4)]
    for hop, ax in enumerate(axes):
        for rank, chunk in product(range(4), repeat=2):
            terms = have[rank][chunk]
            box(ax, rank, 3 - chunk, 1, 1, "Σ" if len(terms) == 4 else "".join(map(str, sorted(terms))),
                ["#eef3f9", "#c5d8ee", "#94bbe3", "#f3b562"][len(terms) - 1], edgecolor="white")
        lap = "reduce-scatter" if 0 < hop < 4 else "all-gather"
        ax.set_title("at first" if hop == 0 else f"hop {hop}\n{lap}", fontsize=8)
        for k in range(4):
            ax.text(k + .5, -.45, k, ha="center", fontsize=7)
            if hop == 0:
                ax.text(-.3, 3.5 - k, "abcd"[k], va="center", ha="center", fontsize=7)
        moved = [(rank, (rank - hop) % 4 if hop < 3 else (rank + 4 - hop) % 4) for rank in range(4)]
        sent = [(rank, chunk, set(have[rank][chunk])) for rank, chunk in moved]
        for rank, chunk, terms in sent:
            have[(rank + 1) % 4][chunk] |= terms
        bare(ax, (-.5, 4.1), (-.7, 4.1))
    figure.supxlabel("ranks 0 to 3, chunks a to d; a rank sends one chunk per hop, 2 (n-1)/n of all", fontsize=9)
    return figure


def collectives() -> Figure:
    """The result of each collective on four ranks: letters are chunks, and digits are the ranks
    that they come from."""
    chunks, ranks = "abcd", "0123"
    shards = [[f"{chunks[r]}{r}" if c == r else "" for c in range(4)] for r in range(4)]
    full = [[f"{c}{r}" for c in chunks] for r in ranks]
    summed, nothing = [f"Σ{c}" for c in chunks], [""] * 4
    shown = {"broadcast": ([full[0]] + [nothing] * 3, [full[0]] * 4), "reduce": (full, [summed] + [nothing] * 3),
             "all-reduce": (full, [summed] * 4),
             "reduce-scatter": (full, [[s if i == r else "" for i, s in enumerate(summed)] for r in range(4)]),
             "all-gather": (shards, [[f"{c}{r}" for r, c in enumerate(chunks)]] * 4),
             "all-to-all": (full, [[f"{chunks[r]}{s}" for s in ranks] for r in range(4)]),
             "scatter": ([full[0]] + [nothing] * 3, [[f"{c}0" if i == r else "" for i, c in enumerate(chunks)]
                                                     for r in range(4)]),
             "gather": (shards, [[f"{c}{r}" for r, c in enumerate(chunks)]] + [nothing] * 3)}
    figure, axes = pyplot.subplots(4, 2, figsize=(9, 6.4))
    for ax, (name, states) in zip(axes.flat, shown.items()):
        for left, state in zip((0, 5.6), states):
            for row, cells in enumerate(state):
                for column, cell in enumerate(cells):
                    color = "#f7f7f7" if not cell else "#f3b562" if "Σ" in cell else RANKS[int(cell[1])]
                    box(ax, left + column, 3 - row, 1, 1, cell, color, edgecolor="white")
                ax.text(left - .15, 3.5 - row, row, ha="right", va="center", fontsize=7.5)
        arrow(ax, (4.2, 2), (5.1, 2), "#666666", "->")
        ax.set_title(name, loc="left")
        bare(ax, (-.7, 9.8), (-.1, 4.1))
    figure.supxlabel("a row is a rank; to the left before, to the right after", fontsize=9)
    return figure


def formats() -> Figure:
    """Number formats: their range from smallest to largest on a scale of powers of two, and their precision."""
    figure, axes = pyplot.subplots(figsize=(8.6, 2.7))
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "FP8 E5M2": torch.float8_e5m2,
              "FP8 E4M3": torch.float8_e4m3fn}
    for row, dtype in enumerate(dtypes.values()):
        info = torch.finfo(dtype)
        least, normal, most = (torch.tensor(x, dtype=torch.float64).log2().item() for x in
                               (info.tiny * info.eps, info.tiny, info.max))
        axes.barh(row, most - normal, left=normal, color=COLORS["dp"], height=.55)
        axes.barh(row, normal - least, left=least, color="#bcd0e6", height=.55)
        axes.text(most + 3, row, f"steps of 1/{1 / info.eps:,.0f}, up to {info.max:.3g}", va="center", fontsize=8)
    axes.set_yticks(range(len(dtypes)), dtypes)
    axes.invert_yaxis()
    axes.set(xlabel="power of two (light: subnormal numbers, with fewer digits)", xlim=(-155, 235),
             xticks=range(-150, 151, 50))
    axes.axvline(0, color="#888888", lw=.6)
    return figure


# ---- measured -------------------------------------------------------------------------------------------------------

class Recorder(Meter):
    """A Meter that also keeps the live bytes after each operation."""

    def __init__(self):
        super().__init__()
        self.samples: list[dict[str, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(function, types, args, kwargs)
        self.samples.append(self.live())
        return out


def steps() -> Figure:
    """Live bytes in the first four steps, by kind, counted after every operation of a small Llama on one process."""
    settings = rules.parse("--layers 8 --seq-len 512 --global-batch 8 --micro-batch 4 --device cpu".split())
    device = torch.device("cpu")
    groups = build_groups(settings.grid, settings.model)
    samples = open_samples(settings, [], 0)
    settings.precision.dtype = "fp32"
    model, pipeline = train.build_model(settings, groups, device), train.build_pipeline(settings, groups, device)
    optimizer = train.build_optimizer(settings, model, groups)
    optimizer.load(draw(settings.optim.seed))
    meter, ends = Recorder(), []
    for bucket in optimizer.buckets:
        meter.label("gradients", bucket.grad)
        meter.label("optimizer", bucket.master, *bucket.state.values())
        meter.label("weights", bucket.weights)
    with meter:
        for step in range(4):
            batches = train.local_micro_batches(samples, step * 8, 8, settings, groups)
            train.forward_backward(model, pipeline, optimizer, batches, groups)
            optimizer.step(1e-3)
            ends.append(len(meter.samples))
    series = {kind: [sample[kind] / 1e6 for sample in meter.samples] for kind in ("weights", "gradients", "optimizer")}
    series["activations"] = [sample["other"] / 1e6 for sample in meter.samples]
    for step, (first, last) in enumerate(zip([0, *ends], ends)):
        at = max(range(first, last), key=lambda i: sum(values[i] for values in series.values()))
        kinds = ", ".join(f"{kind} {values[at]:.1f}" for kind, values in series.items())
        print(f"step {step}: peak {sum(values[at] for values in series.values()):.1f} MB: {kinds}")
    figure, axes = pyplot.subplots(figsize=(8.6, 3.4))
    thin = slice(None, None, max(1, len(meter.samples) // 400))
    axes.stackplot(range(len(meter.samples))[thin], *[values[thin] for values in series.values()], labels=series,
                   colors=[KINDS[kind] for kind in series], lw=0)
    axes.vlines(ends[:-1], 0, axes.get_ylim()[1], color="#555555", lw=.7, ls=":")
    axes.set(xlabel="operations; dotted: ends of steps", ylabel="MB", xlim=(0, ends[-1]),
             title="Four steps of two micro-batches: activations grow in forward, shrink in backward")
    axes.legend(loc="upper right", ncols=4)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.15)
    return figure


GRIDS = {"one process": (1, ""), "dp 4": (4, "--dp 4"), "dp 4, ZeRO-3": (4, "--dp 4 --zero 3"),
         "tp 2": (2, "--tp 2"), "cp 4, ring": (4, "--cp 4 --cp-style ring"),
         "pp 4, 1f1b": (4, "--pp 4 --micro-batch 1"),
         "dp 2, tp 2, ZeRO-1": (4, "--tp 2 --zero 1"),
         "dp 2, cp 2, ulysses, ZeRO-2": (4, "--cp 2 --cp-style ulysses --zero 2 --micro-batch 2"),
         "tp 2, pp 2, zb-v": (4, "--tp 2 --pp 2 --schedule zb-v --micro-batch 1"),
         "dp 2, pp 2, interleaved": (4, "--pp 2 --schedule interleaved --micro-batch 1"),
         "dp 2, tp 2, pp 2": (8, "--tp 2 --pp 2 --micro-batch 1"),
         "cp 2, tp 2, pp 2, zb-h1": (8, "--cp 2 --tp 2 --pp 2 --schedule zb-h1 --micro-batch 2")}


FP8 = {"bf16": (1, ""), "fp32": (1, "--dtype fp32"), "FP8, a scale per tensor": (1, "--fp8 tensorwise"),
       "FP8, a scale per block": (1, "--fp8 blockwise")}


def as_rank(rank: int, ranks: int, port: int, flags: list[str], log: str) -> None:
    """Train as one rank that torchrun has started, in a process that has loaded train.py already."""
    os.environ |= {name: str(value) for name, value in dict(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        TORCHELASTIC_USE_AGENT_STORE=True).items()}
    torch.set_num_threads(1)
    with open(log, "a") as file:
        sys.stdout = sys.stderr = file
        train.main(rules.parse(flags, ranks))


def train_runs(common: str, runs: dict[str, tuple[int, str]]) -> Figure:
    """Train `runs` on the texts of Python's help() and draw their losses. runs: title -> (ranks,
    flags)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "torch._dynamo", "train"])
    with tempfile.TemporaryDirectory() as folder:
        for number, (title, (ranks, flags)) in enumerate(runs.items()):
            print(f"{title}, {number + 1} of {len(runs)}", file=sys.stderr, flush=True)
            store, path = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), os.path.join(folder, title)
            flags = [*common.split(), *flags.split(), "--device", "cpu", "--data", topics.__file__, "--sample-prompt=",
                     "--metrics", f"{path}.jsonl"]
            started = [context.Process(target=as_rank, args=(rank, ranks, store.port, flags, f"{path}.log"))
                       for rank in range(ranks)]
            for process in started:
                process.start()
            for process in started:
                process.join()
            if any(process.exitcode for process in started):
                raise RuntimeError(f"{title}: {Path(f'{path}.log').read_text()}")
        return loss([read_losses(os.path.join(folder, f"{title}.jsonl")) for title in runs])


def losses() -> Figure:
    """Twelve grids train the same model in fp64. Their losses are equal up to rounding."""
    return train_runs("--dtype fp64 --hidden 64 --ffn 176 --steps 12 --seq-len 32 --global-batch 8", GRIDS)


def fp8() -> Figure:
    """Losses with FP8 matmuls, emulated on a CPU, follow the losses with bf16. The curve of fp32
    shows how much rounding alone changes a run."""
    return train_runs("--dtype bf16 --kv-heads 4 --ffn 384 --steps 40 --seq-len 64 --global-batch 8", FP8)


class Losses(NamedTuple):
    """The losses of a run: step -> nats per token. validation: at the steps after which it was evaluated."""
    name: str
    training: dict[int, float]
    validation: dict[int, float]


def read_losses(path: str, name: str = "") -> Losses:
    """Return the losses in a file of --metrics. name: the name of the run; "" for the name of the
    file.

    Raise ValueError if the file is missing or has no metrics.
    """
    try:
        with open(path) as file:
            rows = [json.loads(line) for line in file]
        training, validation = ({row["step"]: row[kind] for row in rows if row.get(kind) is not None}
                                for kind in ("loss", "val_loss"))
        need(rows == [] or "loss" in rows[0], "its lines have no loss")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: cannot be read as --metrics: {error}") from None
    need(training != {}, f"{path}: is empty")
    return Losses(name or Path(path).stem, training, validation)


def read_all_losses(paths: list[str]) -> list[Losses]:
    """Return the losses of each file. If files share a name, such as runs/a/metrics and
    runs/b/metrics, use their paths."""
    stems = [Path(path).stem for path in paths]
    return [read_losses(path, path if stems.count(stem) > 1 else stem) for path, stem in zip(paths, stems)]


def loss(runs: list[Losses]) -> Figure:
    """Losses of runs by step, with validation losses as dots, and the difference of each run from
    the first run."""
    first, *others = runs
    figure, axes = pyplot.subplots(1, 2 if others else 1, figsize=(9, 3.9), squeeze=False)
    for number, run in enumerate(runs):
        color = pyplot.cm.tab20((2 * number + number // 10) % 20)
        style = dict(color=color, ls=["-", "--", ":"][number % 3], lw=1.6)
        axes[0, 0].plot(run.training.keys(), run.training.values(), label=run.name, **style)
        if run.validation:
            axes[0, 0].plot(run.validation.keys(), run.validation.values(), color=color, ls="none", marker="o", ms=5,
                            mec="black", mew=0.7, label=f"{run.name}, validation")
        if number:
            shared = [step for step in run.training if step in first.training]
            gaps = [max(abs(run.training[step] - first.training[step]), 1e-17) for step in shared]
            axes[0, 1].semilogy(shared, gaps, **style)
    axes[0, 0].set(xlabel="step", ylabel="nats per token", title="loss")
    if others:
        axes[0, 1].set(xlabel="step", title=f"absolute difference to “{first.name}”")
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def train_experts(balance: ep.Balance, steps: int = 300) -> tuple[list[float], float]:
    """Train a model to predict each byte of argparse.py from the 4 bytes before it: an embedding, 8
    experts (one per token), and a head.

    Returns each expert's share of the tokens, and the mean loss in nats per byte, over the last 20 steps.
    """
    E, H, context, batch = 8, 64, 4, 256
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    make = partial(parameter, groups={}, dtype=torch.float32)
    shapes = {"embedding": (256, H // context), "router": (E, H), "head": (256, H)}
    embedding, w_router, head = [make(Spec(name, shape, std=0.1)) for name, shape in shapes.items()]
    network = ep.GroupedExperts(make, *(Spec(name, shape, std=0.1) for name, shape in (
        ("w_gate_up", (E, 2 * H, H)), ("w_down", (E, H, H)))))
    params = [embedding, w_router, head, *network.parameters()]
    for param in params:
        param.data = draw(0)(param.spec, param.box)
    router = ep.Router("experts", w_router, config.Model(experts=E, top_k=1, router_norm=False), balance)
    info = ep.RoutingInfo(torch.zeros(batch, dtype=torch.long), 1, aux_loss_scale=1.0)
    optimizer, generator = torch.optim.AdamW(params, lr=3e-3), torch.Generator().manual_seed(0)
    loads, mean_loss = torch.zeros(E), 0.0
    for step in range(steps):
        positions = torch.randint(len(text) - context, (batch,), generator=generator)
        x = embedding[text[positions[:, None] + torch.arange(context)]].flatten(1)
        h = F.rms_norm(x, (H,))
        route, gates = router(h, info, ALONE)
        y = route.combine(network(*route.dispatch(h, gates).wait(), route))
        loss = F.cross_entropy((x + y) @ head.t(), text[positions + context])
        loss.backward()
        if step >= steps - 20:
            loads += router.load
            mean_loss += loss.item() / 20
        optimizer.step()
        optimizer.zero_grad()
        ep.update_biases([router], ())
    return (loads / loads.sum()).tolist(), mean_loss


def experts() -> Figure:
    """Tokens of each expert after 300 steps, relative to the mean: without balancing, and with two
    ways of balancing."""
    ways = {"nothing": ep.Balance(), "an auxiliary loss": ep.Balance(aux_loss=0.1),
            "biases": ep.Balance(router_bias_rate=0.01)}
    figure, axes = pyplot.subplots(1, 3, figsize=(9, 2.7), sharey=True)
    for ax, (way, balance) in zip(axes, ways.items()):
        shares, final = train_experts(balance)
        ax.bar(range(8), [8 * share for share in shares], color=COLORS["ep"])
        ax.axhline(1, color="#555555", lw=.8, ls=":")
        ax.set_title(f"balanced by {way}: loss {final:.2f}", fontsize=8.5)
        ax.set(xlabel="expert", xticks=range(8))
    axes[0].set_ylabel("load / mean")
    return figure


class Picture(NamedTuple):
    draw: Callable[[], Figure | str]  # str: SVG
    seconds: int  # about, on two idle cores


PICTURES = {
    "grid": Picture(grid, 1), "timeline": Picture(timeline, 1), "schedules": Picture(all_schedules, 1),
    "bubble": Picture(bubble, 3), "memory": Picture(memory, 1), "planner": Picture(planner, 30),
    "zigzag": Picture(zigzag, 1), "ring": Picture(ring, 1), "collectives": Picture(collectives, 1),
    "formats": Picture(formats, 1), "scaling": Picture(scaling, 1), "overlap": Picture(overlap, 1),
    "layer": Picture(layer, 1), "zero-bubble": Picture(zero_bubble, 1), "hierarchy": Picture(hierarchy, 1),
    "steps": Picture(steps, 7), "experts": Picture(experts, 6), "losses": Picture(losses, 60),
    "fp8": Picture(fp8, 30)}


def describe(name: str) -> str:
    """Return a line of the list: the name, the seconds, and the description."""
    picture = PICTURES[name]
    text = inspect.getdoc(picture.draw).replace("\n", " ")
    sentence = re.match(r".*?\.(?= [A-Z(]|  |$)", text)[0]
    return f"{name:12s} {picture.seconds:3d} s   {sentence}"


def chosen(names: list[str]) -> dict[str, Callable[[], Figure | str]]:
    """Return name of a file -> the function that draws it.

    Raise ValueError for a name that is not in the list, or for a file of metrics that cannot be
    read.
    """
    if names[:1] == ["loss"] and names[1:]:
        return {"loss": partial(loss, read_all_losses(names[1:]))}
    if names == ["all"]:
        names = list(PICTURES)
    for name in names:
        need(name in PICTURES, f"{name}: unknown, use {', '.join(PICTURES)}, or all of them by all, or loss FILES")
    return {name: PICTURES[name].draw for name in names}


def main(arguments: list[str]) -> None:
    parser = Parser("learn.pictures", __doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a picture; or all; or loss and the files of runs")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=FOLDER, help="where to draw [pictures/]")
    asked = parser.parse_args(arguments)
    try:
        need(not asked.out.exists() or asked.out.is_dir(), f"--out {asked.out}: is a file, name a folder")
        pictures = chosen(asked.names)
    except ValueError as error:
        parser.error(str(error))
    if not pictures:
        print("\n".join(["python -m learn.pictures NAME draws one of these:", "", *map(describe, PICTURES)]))
        return
    torch.set_num_threads(1)
    asked.out.mkdir(parents=True, exist_ok=True)
    for name, make in pictures.items():
        drawn = make()
        file = asked.out / f"{name}.svg"
        file.write_text(drawn if isinstance(drawn, str) else as_svg(drawn), encoding="utf-8")
        print(file, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
