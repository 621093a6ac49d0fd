"""Timelines of a pipeline: in the terminal, as a picture, for a trace viewer; of a plan, or of a measured step.

A row is a rank; a box is a forward, a backward, or half of one, with the number of its micro-batch. spans: for each
rank (action, start, stop), as pp.simulate gives them, where an action is (op, stage, micro-batch).
"""
import json

COLORS = {"F": ("#7aa6da", 110), "B": ("#8cc98c", 114), "I": ("#5fb7b0", 73), "W": ("#c9b458", 179)}


def draw(spans: list[list[tuple]], width: float = 3, color: bool = True) -> str:
    """A row a rank, `width` characters a unit of time, a number a micro-batch; a rank's later stages are underlined."""
    lines = []
    for r, rank in enumerate(spans):
        line, at, first = f"rank {r:2d} ", 0, min(span.action.stage for span in rank)
        for action, start, stop in rank:
            begin, end = round(start * width), round(stop * width)
            text = f"{'' if color else action.op}{action.micro_batch}".center(end - begin - 1)[:max(0, end - begin - 1)]
            line += " " * (begin - at)
            if color:
                underline = "4;" if action.stage != first else ""
                line += f"\033[{underline}48;5;{COLORS[action.op][1]};30m{text}\033[0m "
            else:
                line += text + " "
            at = end
        lines.append(line.rstrip())
    return "\n".join(lines)


def svg(spans: list[list[tuple]], unit: float = 24.0) -> str:
    """The same as a picture. Lighter: a rank's later stages."""
    end = max(rank[-1].stop for rank in spans)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{end * unit + 70:.0f}" height="{len(spans) * 26 + 44}" '
           'font-family="sans-serif" font-size="11">']
    for r, rank in enumerate(spans):
        first = min(span.action.stage for span in rank)
        out.append(f'<text x="4" y="{r * 26 + 21}">rank {r}</text>')
        for (op, stage, k), start, stop in rank:
            x, wide, opacity = 56 + start * unit, (stop - start) * unit, 1 if stage == first else 0.6
            out.append(f'<rect x="{x:.1f}" y="{r * 26 + 6}" width="{wide:.1f}" height="22" fill="{COLORS[op][0]}" '
                       f'fill-opacity="{opacity}" stroke="white"/><text x="{x + wide / 2:.1f}" y="{r * 26 + 21}" '
                       f'text-anchor="middle">{k}</text>')
    words = {"F": "forward", "B": "backward", "I": "of the input", "W": "of the weights"}
    for i, (op, word) in enumerate(words.items()):
        y = len(spans) * 26 + 14
        out.append(f'<rect x="{56 + i * 120}" y="{y}" width="14" height="14" fill="{COLORS[op][0]}"/>'
                   f'<text x="{76 + i * 120}" y="{y + 11}">{word}</text>')
    return "\n".join([*out, "</svg>"])


def chrome_trace(spans: list[list[tuple]], unit_us: float = 1000.0) -> str:
    """For chrome://tracing or Perfetto: a thread a rank."""
    return json.dumps([dict(name=str(action), cat=action.op, ph="X", pid=0, tid=r, ts=start * unit_us,
                            dur=(stop - start) * unit_us)
                       for r, rank in enumerate(spans) for action, start, stop in rank])
