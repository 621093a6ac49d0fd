"""Tables and bars, as the planner prints them."""
from collections.abc import Iterable, Sequence
from typing import Any


def table(rows: Iterable[Sequence[Any]], align: str) -> str:
    """Lines of cells in columns, two spaces apart. align: "<" or ">" for each column."""
    rows = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{cell:{to}{width}}" for cell, to, width in zip(row, align, widths)).rstrip()
                     for row in rows)


def bar(value: float, whole: float, width: int = 40) -> str:
    return "█" * round(width * min(1.0, value / whole)) if whole else ""
