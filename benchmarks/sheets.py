"""A table of figures, as it is printed, pasted into pages, and kept."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table


class Sheet(msgspec.Struct, frozen=True, kw_only=True):
    """One table."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    figures: dict[str, object] = {}
    """What it was made from, by name, with units in the names."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    sheets: list[Sheet]
    load: tuple[float, float, float]
    """The machine's load average when the run began."""


def show(sheet: Sheet, console: Console) -> None:
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


class Output:
    """Where a run's tables go."""

    def __init__(self, json: Path | None, *, markdown: bool) -> None:
        self._json, self._markdown = json, markdown
        self._console = Console(width=None if Console().is_terminal else 160)
        self._progress = Console(stderr=True)
        self._report = Report(sheets=[], load=os.getloadavg())

    def say(self, text: str) -> None:
        self._progress.print(text, highlight=False)

    def add(self, make: Callable[[], Sheet]) -> None:
        sheet = make()
        self._report.sheets.append(sheet)
        if self._markdown:
            print(markdown(sheet), end="\n\n")
        else:
            show(sheet, self._console)

    def end(self) -> None:
        note = load_note(self._report.load)
        if self._markdown:
            print(note)
        else:
            self._console.print(note, highlight=False)
        if self._json is not None:
            self._json.parent.mkdir(parents=True, exist_ok=True)
            self._json.write_bytes(msgspec.json.format(msgspec.json.encode(self._report), indent=1))
            self.say(f"figures: {self._json}")
