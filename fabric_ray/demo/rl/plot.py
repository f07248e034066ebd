"""A curve in text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def plot(values: Sequence[float], *, width: int = 60, height: int = 6) -> str:
    """Columns from 0 to 1; where there are more values than ``width``, a column is the mean of
    several."""
    columns = [_eighths(value, height) for value in _binned(values, width)]
    rows = []
    for row in reversed(range(height)):
        label = {height - 1: "1.0", 0: "0.0"}.get(row, "")
        cells = "".join(_EIGHTHS[min(8, max(0, full - 8 * row))] for full in columns)
        rows.append(f"{label:>3} │{cells}")
    return "\n".join(rows)


def _eighths(value: float, height: int) -> int:
    return round(min(1.0, max(0.0, value)) * 8 * height)


def _binned(values: Sequence[float], width: int) -> list[float]:
    bins = min(width, len(values))
    edges = [i * len(values) // bins for i in range(bins + 1)] if bins else [0]
    return [statistics.fmean(values[a:b]) for a, b in pairwise(edges)]
