"""The JSON that a run leaves behind. All speeds are in the case's unit, ratios are of speeds."""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmarks.harness.cases import Case, Unit
from benchmarks.harness.contender import Family

SCHEMA = 1


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One contender in one case.

    `turns` are the median seconds of one operation in each turn, in turn order. `median`, `best`,
    `low` and `high` (quartiles of the turns) are in the case's unit. `of_floor` is the speed over
    that of the floor with the same number of threads, `ours_over` our speed over this contender's;
    both are medians of per-turn ratios.
    """

    contender: str
    family: Family
    threads: int
    median: float
    best: float
    low: float
    high: float
    turns: list[float]
    samples: int
    note: str = ""
    chosen: str = ""
    verified: bool = True
    of_floor: float | None = None
    ours_over: float | None = None
    parts: dict[str, float] = {}


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A contender that did not finish a case, or whose bytes were wrong: not ranked."""

    contender: str
    reason: str


class Row(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    unit: Unit
    case: Case
    figures: list[Figure]
    failures: list[Failure] = []

    def figure(self, contender: str) -> Figure | None:
        return next((f for f in self.figures if f.contender == contender), None)


class Absent(msgspec.Struct, frozen=True, kw_only=True):
    """A contender that can't run here, why, and how to get it."""

    contender: str
    reason: str
    obtain: str


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    cpu: str
    cores: int
    caches: dict[str, str]
    memory_bytes: int
    kernel: str
    python: str
    versions: dict[str, str]
    commit: str
    load_before: tuple[float, float, float]
    load_after: tuple[float, float, float]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    schema: int
    started: str
    seconds: float
    options: dict[str, str]
    machine: Machine
    rows: list[Row]
    absent: list[Absent] = []
    left_behind: list[str] = []
    """Processes and shared-memory files that contenders left and the harness removed."""


def save(report: object, path: Path) -> None:
    """Write JSON; an interruption leaves either the file of before or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    new.replace(path)


def load(path: Path) -> Report:
    """Read and check a result.

    Raises:
        ValueError: naming the file, when it is not a result of this schema.
    """
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path} is not a benchmark result: {error}") from error
    if report.schema != SCHEMA:
        raise ValueError(
            f"{path} has schema {report.schema}, this program reads {SCHEMA}; measure again"
        )
    return report
