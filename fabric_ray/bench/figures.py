"""What was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

import msgspec

PING_NBYTES = 8
"""Of a write that is answered, for latency."""

Unit = Literal["GB/s", "us"]


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One way, one size."""

    way: str
    """A transport, or the floor: ``copy`` or ``socket``."""
    nbytes: int
    """Of one write."""
    unit: Unit
    """1e9 bytes per second; microseconds of one trip, half of a round."""
    median: float
    best: float
    floor: str | None
    """The plain code that it is compared with; ``None`` for plain code, or where there is none."""
    of_floor: float | None
    """Our speed over the floor's, the median over turns: 1 is all that there is."""
    verified: bool
    """Every byte was compared in the other process."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that was measured."""

    cpu: str
    cores: int
    """That this process may use."""
    turns: int
    seconds: float
    figures: tuple[Figure, ...]


def figure(
    way: str,
    nbytes: int,
    unit: Unit,
    turns: Sequence[float],
    floor: tuple[str, Sequence[float]] | None,
) -> Figure:
    """Sums up the turns of one way; those of its floor were taken in between."""
    better = max if unit == "GB/s" else min
    ratios = []
    if floor is not None:
        ratios = [
            ours / plain if unit == "GB/s" else plain / ours
            for ours, plain in zip(turns, floor[1], strict=True)
        ]
    return Figure(
        way=way,
        nbytes=nbytes,
        unit=unit,
        median=statistics.median(turns),
        best=better(turns),
        floor=floor[0] if floor else None,
        of_floor=statistics.median(ratios) if ratios else None,
        verified=True,
    )
