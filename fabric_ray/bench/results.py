"""What a run leaves behind: a file of JSON lines, each appended as soon as it is known.

A line is a `Run`, a `Row` or an `End`. A resumed run appends to its file, and a later row replaces
an earlier one of its key. Times are seconds of one operation; figures are in the row's unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from fabric_ray.bench import stats
from fabric_ray.errors import FabricError

SCHEMA = 2

Unit = Literal["GB/s", "MB/s", "us", "ms", "s", "op/s"]
Family = Literal["ours", "floor", "peer"]
TIMES = {"us": 1e6, "ms": 1e3, "s": 1.0}
_SPEEDS = {"GB/s": 1e-9, "MB/s": 1e-6, "op/s": 1.0}


class ContenderError(FabricError):
    """A contender could not start, failed while running, or delivered wrong bytes."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One contender in one case.

    `turns` are the median seconds of one operation in each turn, in turn order. `median`, `best`,
    `low` and `high` (quartiles of the turns) are in the row's unit. `of_floor` is the speed over
    that of the floor with the same number of threads, `ours_over` our speed over this contender's;
    both are medians of per-turn ratios.
    """

    contender: str
    family: Family
    threads: int = 1
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
    details: dict[str, float | str] = {}
    """What else was measured, with units in the names."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A contender that did not finish a case, or whose bytes were wrong: not ranked."""

    contender: str
    reason: str


class RowHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a row measures, and how it is shown."""

    key: str
    """Unique; its first part is the suite."""
    unit: Unit
    amount: float = 1.0
    """Bytes or operations that the time is of, where the unit is a speed."""
    group: str = ""
    """Title of the plot that the row belongs into; rows of a plot share their unit."""
    size: int | None = None
    """Bytes, where the plot is a curve over sizes."""
    aim: str = ""

    @property
    def suite(self) -> str:
        return self.key.partition("/")[0]

    @property
    def plot(self) -> str:
        return self.group or f"{self.suite}, {self.unit}"

    def value(self, seconds: float) -> float:
        """`seconds` of one operation in this row's unit."""
        if self.unit in TIMES:
            return seconds * TIMES[self.unit]
        return self.amount / seconds * _SPEEDS[self.unit]


class Row(RowHeader, frozen=True, kw_only=True, tag="row", tag_field="line"):
    figures: list[Figure]
    failures: list[Failure] = []
    complete: bool = True
    """False if the run ended before all turns."""

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


class Run(msgspec.Struct, frozen=True, kw_only=True, tag="run", tag_field="line"):
    """The first line, and one for each time that the run was resumed."""

    schema: int = SCHEMA
    started: str
    options: dict[str, str]
    machine: Machine
    load: tuple[float, float, float]
    absent: list[Absent] = []


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end", tag_field="line"):
    seconds: float
    load: tuple[float, float, float]
    left_behind: list[str] = []
    """Processes and shared-memory files that contenders left and the harness removed."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A file, read."""

    runs: list[Run]
    rows: list[Row]
    ends: list[End] = []

    @property
    def suites(self) -> dict[str, list[Row]]:
        names = dict.fromkeys(row.suite for row in self.rows)
        return {name: [row for row in self.rows if row.suite == name] for name in names}

    @property
    def left_behind(self) -> list[str]:
        return [one for end in self.ends for one in end.left_behind]


def make_figure(
    header: RowHeader,
    contender: str,
    family: Family,
    turns: Sequence[Sequence[float]],
    **facts: Any,
) -> Figure:
    """The figure of a contender from its samples, turn by turn."""
    medians = [stats.median(samples) for samples in turns]
    ends = [header.value(seconds) for seconds in stats.quartiles(medians)]
    return Figure(
        contender=contender,
        family=family,
        median=header.value(stats.median(medians)),
        best=header.value(min(min(samples) for samples in turns)),
        low=min(ends),
        high=max(ends),
        turns=medians,
        samples=sum(map(len, turns)),
        **facts,
    )


def make_row(
    header: RowHeader,
    figures: Sequence[Figure],
    failures: Sequence[Failure] = (),
    *,
    complete: bool = True,
) -> Row:
    """A row with its ratios; the first of our figures is the one that others are held against."""
    floors = {figure.threads: figure for figure in figures if figure.family == "floor"}
    ours = next((f for f in figures if f.family == "ours"), None)

    def ratio(over: Figure | None, under: Figure | None) -> float | None:
        # Turns are seconds, so the slower one divided by the faster one is a ratio of speeds.
        return stats.paired_ratio(over.turns, under.turns) if over and under else None

    compared = []
    for one in figures:
        of_floor = None if one.family == "floor" else ratio(floors.get(one.threads), one)
        ours_over = None if one.family == "ours" else ratio(one, ours)
        compared.append(msgspec.structs.replace(one, of_floor=of_floor, ours_over=ours_over))
    facts = msgspec.structs.asdict(header)
    return Row(**facts, figures=compared, failures=list(failures), complete=complete)


def row_of_turns(
    header: RowHeader,
    taken: Mapping[str, tuple[Family, Sequence[float]]],
    details: Mapping[str, Mapping[str, float | str]] = {},
    *,
    complete: bool = True,
) -> Row:
    """A row from the seconds of each contender's turns; `details` is by contender, too."""
    figures = [
        make_figure(header, name, family, [[s] for s in turns], details=dict(details.get(name, {})))
        for name, (family, turns) in taken.items()
        if turns
    ]
    return make_row(header, figures, complete=complete)


def load(path: Path) -> Report:
    """Read and check a file of results; a line that an interruption cut off is left out.

    Raises:
        ValueError: naming the file, when it holds no results of this schema.
    """
    decoder = msgspec.json.Decoder(Run | Row | End)
    try:
        lines = decoder.decode_lines(whole_lines(path))
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path} is not a file of benchmark results: {error}") from error
    runs = [line for line in lines if isinstance(line, Run)]
    if not runs or runs[0].schema != SCHEMA:
        found = f"schema {runs[0].schema}" if runs else "no run"
        raise ValueError(f"{path} has {found}, expected schema {SCHEMA}; measure again")
    rows = {line.key: line for line in lines if isinstance(line, Row)}
    ends = [line for line in lines if isinstance(line, End)]
    return Report(runs=runs, rows=list(rows.values()), ends=ends)


def whole_lines(path: Path) -> bytes:
    """What the file holds up to the end of its last whole line."""
    text = path.read_bytes()
    return text[: text.rfind(b"\n") + 1]
