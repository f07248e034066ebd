"""How much of one thing's time another took place in."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]
"""Begin and end, in seconds since the epoch."""


def covered(interval: Interval, by: Iterable[Interval]) -> float:
    """The share of ``interval`` that lies within ``by``, whose parts don't overlap; 0 to 1."""
    start, end = interval
    if end <= start:
        return 0.0
    inside = sum(max(0.0, min(end, e) - max(start, s)) for s, e in by)
    return min(1.0, inside / (end - start))
