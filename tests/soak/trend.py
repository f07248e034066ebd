"""Whether what a process holds stays as it is, judged from samples over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

MIB = 1 << 20
# Samples of which the first are left out: caches fill, allocators find their size.
WARM = 0.25
# Of each peer that it met, bytes: tables have grown. What is known of one takes twenty times as
# much, and is forgotten.
PER_PEER = 64


@dataclass(frozen=True)
class Sample:
    """What a process holds between two rounds."""

    seconds: float
    """Since the beginning."""
    in_use: int
    """Bytes that its allocator has handed out."""
    resident: int
    """Bytes of memory that are its own: without what it shares."""
    descriptors: int
    threads: int
    mappings: int
    """Of shared memory."""
    peers: int
    """That it has met so far."""


@dataclass(frozen=True)
class Trend:
    """One measure of one process."""

    process: str
    measure: str
    first: float
    """The median of the third after the warm-up, and of the last."""
    last: float
    most: float
    allowed: float
    """Growth that is none: noise, and what is known to be kept."""

    @property
    def growth(self) -> float:
        return self.last - self.first

    @property
    def grows(self) -> bool:
        return self.growth > self.allowed


def thirds(values: Sequence[float]) -> tuple[float, float]:
    """The medians of the first and the last third of what comes after the warm-up."""
    warm = values[int(len(values) * WARM) :]
    n = max(1, len(warm) // 3)
    return median(warm[:n]), median(warm[-n:])


def trends(process: str, samples: Sequence[Sample]) -> list[Trend]:
    """Of each measure, the trend; none of fewer samples than tell one."""
    if len(samples) < 4:
        return []
    met = thirds([s.peers for s in samples])
    known = PER_PEER * (met[1] - met[0])

    def trend(measure: str, allowed: float, share: float = 0.0) -> Trend:
        values = [float(getattr(s, measure)) for s in samples]
        first, last = thirds(values)
        return Trend(process, measure, first, last, max(values), allowed + share * first)

    return [
        trend("in_use", MIB + known, 0.02),
        trend("resident", 8 * MIB + known, 0.05),
        trend("descriptors", 2),
        trend("threads", 1),
        trend("mappings", 2),
    ]
