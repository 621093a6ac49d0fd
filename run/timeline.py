"""Pictures of pipelines: who does what when, as simulated.

    python -m run.timeline [--pp 4] [--micro-batches 8] [--svg plans.svg]           all schedules
    python -m run.timeline --schedule zb-v --costs 1,1.2,0.8                        one of them, with measured times

`--profile` of a run writes traces in which every action has its name.
"""
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from core.config import need, positive, read_known, setting
from run.cli import refuse
from schedules import SCHEDULES, Costs, Plan, Span, activations_held, bubble, make_plan, simulate

COLORS = {"F": ("#7aa6da", 110, "forward"), "B": ("#8cc98c", 114, "backward"),  # SVG, terminal, legend
          "I": ("#5fb7b0", 73, "backward, input"), "W": ("#c9b458", 179, "backward, weights")}
MOST = 1000  # ranks, and micro-batches, that are drawn


def draw(spans: list[list[Span]], color: bool = True, columns: float = 600) -> str:
    """A row per rank, of about `columns` characters at most. Each action is a box with the number of its micro-batch
    (without color: op and number), or, where that does not fit, with its op. A rank's later stages are underlined
    (without color: their ops are in lower case)."""
    longest = max(len(str(action.micro_batch)) for row in spans for action, _, _ in row) + (0 if color else 1)
    shortest = min(stop - start for row in spans for _, start, stop in row)
    width = min(max(3, longest + 1) / shortest, columns / max(row[-1].stop for row in spans))  # characters per unit
    lines = []
    for r, row in enumerate(spans):
        line, at, first_stage = f"rank {r:2d} ", 0, min(span.action.stage for span in row)
        for (op, stage, k), start, stop in row:
            begin, end, later = round(start * width), round(stop * width), stage != first_stage
            room = max(0, end - begin - 1)
            shown = op.lower() if later and not color else op
            text = f"{'' if color else shown}{k}"
            text = (text if len(text) <= room else shown[:room]).center(room)
            if color:
                text = f"\033[{'4;' * later}48;5;{COLORS[op][1]};30m{text}\033[0m"
            line += " " * (begin - at) + text + " " * (end > begin)
            at = end
        lines.append(line.rstrip())
    return "\n".join(lines)


def held_by_rank(spans: list[list[Span]]) -> list[list[float]]:
    """Activations that each rank holds after each action, in those of 1/p of the layers for one micro-batch."""
    stages = 1 + max(span.action.stage for row in spans for span in row)
    return [[held * len(spans) / stages for held in activations_held([span.action for span in row])] for row in spans]


def summary(spans: list[list[Span]]) -> str:
    """Both conventions of the bubble: of 1F1B (p-1)/(m+p-1) of the step, and (p-1)/m of the rest of it."""
    end, idle, held = max(row[-1].stop for row in spans), bubble(spans), max(map(max, held_by_rank(spans)))
    return (f"{end:.4g} units of time, the worst rank idle for {idle:.3g} ({idle / end:.1%}, or "
            f"{idle / (end - idle):.1%} of the rest), holding up to {held:g} micro-batches")


def svg(panels: dict[str, list[list[Span]]], width: float = 780.0) -> str:
    """`draw` as SVG, for several schedules to one scale: title -> spans. A rank's later stages are lighter; the area
    below a rank's actions is the activations that it holds."""
    unit = width / max(row[-1].stop for spans in panels.values() for row in spans)  # pixels per unit of time
    most = max(max(held) for spans in panels.values() for held in held_by_rank(spans))
    out, y = [], 4
    for name, spans in panels.items():
        out.append(f'<text class="title" x="4" y="{y + 12}">{name}: {summary(spans)}</text>')
        for r, (row, held) in enumerate(zip(spans, held_by_rank(spans))):
            top, first = y + 20 + r * 34, min(span.action.stage for span in row)
            out.append(f'<text x="4" y="{top + 12}">rank {r}</text>')
            line = f"M56 {top + 31}"
            for ((op, stage, k), start, stop), now in zip(row, held):
                x, wide, faded = 56 + start * unit, (stop - start) * unit, "" if stage == first else ' opacity=".55"'
                out.append(f'<rect class="{op}" x="{x:.1f}" y="{top}" width="{wide:.1f}" height="16"{faded}/>')
                if wide > 5 * len(str(k)):
                    out.append(f'<text class="k" x="{x + wide / 2:.1f}" y="{top + 12}">{k}</text>')
                line += f"H{x if op == 'F' else x + wide:.1f}V{top + 31 - 13 * now / most:.1f}"
            out.append(f'<path class="held" d="{line}Z"/>')
        end, y = max(row[-1].stop for row in spans), y + 20 + len(spans) * 34
        for tick in range(0, int(end) + 1, round(end / 80) * 10 or 5):
            out.append(f'<path d="M{56 + tick * unit:.1f} {y}v4"/><text class="k" x="{56 + tick * unit:.1f}" '
                       f'y="{y + 14}">{tick}</text>')
        y += 24
    ops = {span.action.op for spans in panels.values() for row in spans for span in row}
    for i, op in enumerate(op for op in COLORS if op in ops):
        out.append(f'<rect class="{op}" x="{56 + i * 126}" y="{y}" width="14" height="14"/>'
                   f'<text x="{76 + i * 126}" y="{y + 11}">{COLORS[op][2]}</text>')
    out.append(f'<text x="56" y="{y + 30}">numbers: micro-batches; lighter: a rank\'s later model chunks; grey: '
               f'activations held, up to {most:g} micro-batches of a rank\'s layers</text>')
    style = "".join(f".{op}{{fill:{color};stroke:#fff}}" for op, (color, _, _) in COLORS.items())
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 76:.0f}" height="{y + 40}" font-family="sans-serif" '
        f'font-size="11"><style>path{{stroke:#777}}.held{{fill:#bbb;stroke:none}}.title{{font-weight:bold}}'
        f'.k{{text-anchor:middle;font-size:9px}}{style}</style>',
        '<rect width="100%" height="100%" fill="#fff"/>', *out, "</svg>\n"])


# ---- python -m run.timeline -----------------------------------------------------------------------------------------

USAGE = "python -m run.timeline [--schedule NAME] [--pp P] [--micro-batches M] [--svg FILE] …"


@dataclass
class Flags:
    schedule: str = setting("all", "which one", (*SCHEDULES, "all"))
    pp: int = setting(4, "ranks")
    micro_batches: int = setting(8, "of a step")
    virtual_stages: int = positive(0, "model chunks per rank; auto: as many as the schedule needs", auto=True)
    group: int = setting(0, "micro-batches per interleaved group; 0: as few as possible")
    costs: str = setting("1,1,1", "times of a rank for F, I and W, for all its model chunks together")
    svg: str = setting("", "write the picture here")


def chosen_plans(args: Flags) -> dict[str, Plan]:
    """The plan of each schedule to draw. Raises ValueError."""
    folder = os.path.dirname(args.svg)
    need(os.path.isdir(folder or "."), f"--svg {args.svg}: there is no folder {folder}")
    need(not os.path.isdir(args.svg), f"--svg {args.svg}: is a folder, name a file")
    costs = args.costs.split(",")
    need(len(costs) == 3 and all(re.fullmatch(r"[\d.]+", cost) and 0 < float(cost) < 1e6 for cost in costs),
         f"--costs {args.costs}: write three numbers, above 0 and below a million, such as 1,1,1")
    need(max(args.pp, args.micro_batches) <= MOST,
         f"--pp {args.pp}, --micro-batches {args.micro_batches}: must be at most {MOST}")
    names = SCHEDULES if args.schedule == "all" else [args.schedule]
    need(len(names) == 1 or not args.virtual_stages and not args.group,
         "--virtual-stages and --group are for one schedule: name it with --schedule")
    return {name: make_plan(name, args.pp, args.micro_batches, args.virtual_stages, args.group) for name in names}


def main(arguments: list[str]) -> None:
    args, rest = read_known(Flags, arguments, USAGE)
    need(not rest, f"{' '.join(rest)}: unknown, usage: {USAGE}")
    plans, costs = chosen_plans(args), [float(cost) for cost in args.costs.split(",")]
    panels = {name: simulate(chosen, Costs(*(cost * args.pp / chosen.stages for cost in costs)))
              for name, chosen in plans.items()}
    color, longest = sys.stdout.isatty(), max(row[-1].stop for spans in panels.values() for row in spans)
    columns = shutil.get_terminal_size((120, 24)).columns - 9
    print("F forward, B backward, I its half for the input, W that for the weights; later model chunks of a rank are "
          + ("underlined" if color else "in lower case") + "\n")
    for name, spans in panels.items():
        share = max(row[-1].stop for row in spans) / longest
        print(draw(spans, color, columns=share * min(columns, 3 * longest)))
        print(f"{name}: {summary(spans)}\n")
    if len(panels) > 1:
        order = sorted(panels, key=lambda name: bubble(panels[name]))
        print(f"Ranks are idle least with {order[0]}, for {bubble(panels[order[0]]):.3g} units, and longest "
              f"with {order[-1]}, for {bubble(panels[order[-1]]):.3g}.")
    if args.svg:
        Path(args.svg).write_text(svg(panels))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        refuse(error, "run.timeline")
