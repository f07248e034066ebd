"""What is measured, and what is found."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

KIB, MIB = 1 << 10, 1 << 20


class Case(msgspec.Struct, frozen=True):
    """So many one-sided writes of so many bytes, in one direction."""

    bytes: int
    writes: int
    # What else is special: the first part of its key.
    kind: str = "write"

    @property
    def key(self) -> str:
        size = f"{self.bytes // MIB}MiB" if self.bytes >= MIB else f"{self.bytes // KIB}KiB"
        return f"{self.kind}/{size}"


class Figure(msgspec.Struct, frozen=True):
    bytes_per_second: float
    messages_per_second: float


class Row(msgspec.Struct, frozen=True):
    """A case by one contender: a figure of each turn, or none where it was lost."""

    case: str
    contender: str
    figures: list[Figure | None]

    @property
    def found(self) -> list[Figure]:
        return [figure for figure in self.figures if figure is not None]

    @property
    def bytes_per_second(self) -> float:
        return statistics.median(figure.bytes_per_second for figure in self.found)

    @property
    def messages_per_second(self) -> float:
        return statistics.median(figure.messages_per_second for figure in self.found)

    def ratio(self, other: Row) -> float:
        """How many times as fast as another: the median over the turns that both have."""
        turns = zip(self.figures, other.figures, strict=True)
        pairs = [(a.bytes_per_second, b.bytes_per_second) for a, b in turns if a and b]
        return statistics.median(ours / theirs for ours, theirs in pairs)


class Aim(msgspec.Struct, frozen=True):
    """One contender is to be at least so many times as fast as another."""

    case: str
    contender: str
    beside: str
    least: float


class Verdict(msgspec.Struct, frozen=True):
    aim: Aim
    ratio: float

    @property
    def met(self) -> bool:
        return self.ratio >= self.aim.least


class Part(msgspec.Struct, frozen=True):
    """One policy's figures of one step of unequal rails."""

    policy: str
    step: str
    share: float
    """Of what is up, from a second after the change to the next."""
    median_ms: float
    p99_ms: float
    recovered_ms: float | None
    """After the change, until a second's worth of bytes is 0.95 of what is up."""


def judge(rows: Sequence[Row], aims: Sequence[Aim]) -> list[Verdict]:
    """How each aim is met whose two rows are there."""
    by_key = {(row.case, row.contender): row for row in rows}
    verdicts = []
    for aim in aims:
        ours, other = (by_key.get((aim.case, name)) for name in (aim.contender, aim.beside))
        if ours and other:
            verdicts.append(Verdict(aim, ours.ratio(other)))
    return verdicts
