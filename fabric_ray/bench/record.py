"""The one way in which every benchmark runs: rows are kept as they are measured, then shown."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from fabric_ray.bench.machine import machine
from fabric_ray.bench.page import write_page
from fabric_ray.bench.processes import adopt_orphans, ended_by_signals
from fabric_ray.bench.results import (
    Absent,
    ContenderError,
    End,
    Machine,
    Report,
    Row,
    Run,
    load,
    whole_lines,
)
from fabric_ray.bench.table import print_absent, print_report
from fabric_ray.errors import given_path

OUT = Path("bench-results")

Turns = Annotated[int, typer.Option(min=1, help="Turns of each; figures are medians of them")]
Quick = Annotated[bool, typer.Option("--quick", help="Small sizes, for a look")]
Resume = Annotated[
    Path | None, typer.Option(help="A file to append to; rows that it has aren't measured again")
]


class Results:
    """A run's rows, each appended to its file, if it has one, as soon as it is known."""

    def __init__(
        self, path: Path | None, options: Mapping[str, str] = {}, absent: Sequence[Absent] = ()
    ) -> None:
        self.path = path
        self.rows: dict[str, Row] = {}
        self.left_behind: list[str] = []
        self._console = Console(stderr=True)
        self._began = time.monotonic()
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        here = machine()
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is not a file; give the path of one")
        if _ended_at_once(path):
            os.truncate(path, 0)
        elif path.exists():
            report = load(path)
            _check_machine(path, report, here)
            self.rows = {row.key: row for row in report.rows}
            os.truncate(path, len(whole_lines(path)))
        self._append(
            Run(
                started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                options=dict(options),
                machine=here,
                load=os.getloadavg(),
                absent=list(absent),
            )
        )

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def has(self, *keys: str) -> bool:
        """Whether these rows were measured, with all of their turns."""
        return all(key in self.rows and self.rows[key].complete for key in keys)

    def turns(self, key: str) -> dict[str, list[float]]:
        """Seconds by contender of a row that was measured in part, if at all."""
        row = self.rows.get(key)
        return {figure.contender: list(figure.turns) for figure in row.figures} if row else {}

    def add(self, *rows: Row) -> None:
        for row in rows:
            self.rows[row.key] = row
            self._append(row)

    def end(self) -> None:
        seconds = time.monotonic() - self._began
        self._append(End(seconds=seconds, load=os.getloadavg(), left_behind=self.left_behind))

    def _append(self, line: Run | Row | End) -> None:
        if self.path is None:
            return
        # A file that took a line in part takes no other.
        path, self.path = self.path, None
        with given_path(path), path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
        self.path = path


def _ended_at_once(path: Path) -> bool:
    """Whether a run made the file, and ended before its first line was whole."""
    if not path.exists() or whole_lines(path):
        return False
    begin = b'{"line":"run",'
    return begin.startswith(path.read_bytes()[: len(begin)])


def _check_machine(path: Path, report: Report, here: Machine) -> None:
    """Raises ValueError if rows of the file were measured elsewhere: they would stand beside those
    of this machine, under its name."""
    for there in (run.machine for run in report.runs):
        if (there.cpu, there.cores) != (here.cpu, here.cores):
            raise ValueError(
                f"{path} was measured on {there.cpu}, {there.cores} cores; this process has "
                f"{here.cpu}, {here.cores} cores; give another file"
            )


@contextmanager
def recorded(
    name: str,
    resume: Path | None = None,
    *,
    options: Mapping[str, str] = {},
    absent: Sequence[Absent] = (),
    out: Path = OUT,
) -> Iterator[Results]:
    """A run, for as long as the block lasts: its rows are shown at the end, however it ends.

    Args:
        name: of the file that is made in `out` if none is resumed.
        resume: a file to append to.
        options: kept with the results.
        absent: contenders that can't run here.
    """
    console = console_of()
    print_absent(absent, console)
    began = f"{name}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}.jsonl"
    path = resume or out / began
    with errors_told(2, OSError, ValueError):
        results = Results(path, options, absent)
    adopt_orphans()
    try:
        with errors_told(1, ContenderError, ValueError), ended_by_signals():
            yield results
    finally:
        results.end()
        if results.rows:
            show(path, console)


@contextmanager
def errors_told(code: int, *kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds end the command in one line, with an exit code."""
    try:
        yield
    except kinds as error:
        console_of().print(f"[red]{error}[/]", soft_wrap=True)
        raise typer.Exit(code) from error


def show(path: Path, console: Console, *, markdown: bool = False) -> None:
    """Print the tables of a file, and write its page beside it.

    Raises:
        ValueError: it is no file of results.
    """
    report = load(path)
    page = path.with_suffix(".html")
    write_page(report, page)
    print_report(report, console, markdown=markdown)
    if unfinished := [row.key for row in report.rows if not row.complete]:
        console.print(f"[yellow]interrupted[/] in {', '.join(unfinished)}")
    if not markdown:
        for saved in (path, page):
            console.print(f"saved {saved}", highlight=False, soft_wrap=True)


def console_of() -> Console:
    """A pipe or a log gets whole rows."""
    return Console(width=None if Console().is_terminal else 200)
