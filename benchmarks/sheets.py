"""A table of figures, as it is printed, pasted into pages, and kept."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.harness.processes import ended_by_signals
from benchmarks.harness.results import save

Turns = Annotated[int, typer.Option(min=1, help="Turns of each; figures are medians of them")]
Quick = Annotated[bool, typer.Option("--quick", help="Small sizes, for a look")]
Json = Annotated[Path | None, typer.Option("--json", help="A file for all figures")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Tables to paste, nothing else")]


class Sheet(msgspec.Struct, kw_only=True):
    """One table."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = []
    notes: tuple[str, ...] = ()
    figures: dict[str, object] = {}
    """What it was made from, by name, with units in the names."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    sheets: list[Sheet]
    load: tuple[float, float, float]
    """The machine's load average when the run began."""


def show(sheet: Sheet) -> None:
    console = Console(width=None if Console().is_terminal else 160)
    table = Table(title=sheet.title, title_justify="left")
    for number, column in enumerate(sheet.columns):
        table.add_column(column, justify="right" if number else "left")
    for row in sheet.rows:
        table.add_row(*row)
    console.print(table)
    for note in sheet.notes:
        console.print(note, highlight=False, soft_wrap=True)


def markdown(sheet: Sheet) -> str:
    """Ready to be pasted."""
    lines = [f"**{sheet.title}**", "", _line(sheet.columns), _line(["---"] * len(sheet.columns))]
    lines += [_line(row) for row in sheet.rows]
    for note in sheet.notes:
        lines += ["", note]
    return "\n".join(lines)


def load_note(load: tuple[float, float, float]) -> str:
    """How busy the machine was with other work."""
    cores = len(os.sched_getaffinity(0))
    state = "busy" if load[0] > cores / 2 else "quiet"
    return f"load average {load[0]:.1f} on {cores} cores when the run began: a {state} machine"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Percentiles as tables of latencies have them; `values` must not be empty."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {
        "avg": statistics.fmean(ordered),
        "min": ordered[0],
        "p50": at(0.5),
        "p90": at(0.9),
        "p99": at(0.99),
        "p99.9": at(0.999),
        "max": ordered[-1],
    }


def verdict(met: bool) -> str:
    return "met" if met else "missed"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


@contextmanager
def keeping(make: Callable[[], Sheet]) -> Iterator[None]:
    """Has an exception that ends the block carry the sheet of what was measured before it."""
    try:
        yield
    except BaseException as error:
        with suppress(Exception):  # where nothing was measured, there is no sheet
            error.sheet = make()  # type: ignore[attr-defined]
        raise


class Output:
    """Where a run's tables go. The file is written after each, also after one that was interrupted.

    Args:
        name: of the run, and of its file in `bench-results` where no other is named.
        json: the file.
        markdown: whether tables are printed to be pasted.
    """

    def __init__(self, name: str, json: Path | None = None, *, markdown: bool = False) -> None:
        self._json = json or Path("bench-results") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}.json"
        self._markdown = markdown
        self._progress = Console(stderr=True)
        self._report = Report(sheets=[], load=os.getloadavg())

    def say(self, text: str) -> None:
        self._progress.print(text, highlight=False)

    def add(self, make: Callable[[], Sheet]) -> None:
        try:
            with ended_by_signals():
                sheet = make()
        except BaseException as error:
            if (found := getattr(error, "sheet", None)) is not None:
                self._put(found)
                self.say("it ended early; what was measured before is kept")
                self.end()
            raise
        self._put(sheet)

    def end(self) -> None:
        print(load_note(self._report.load))
        self.say(f"figures: {self._json}")

    def _put(self, sheet: Sheet) -> None:
        self._report.sheets.append(sheet)
        save(self._report, self._json)
        if self._markdown:
            print(markdown(sheet), end="\n\n")
        else:
            show(sheet)
