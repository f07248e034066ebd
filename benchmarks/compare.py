"""Two results side by side: what got faster or slower, and against which contender."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness.results import TIMES, Figure, Report, Row, load
from benchmarks.harness.table import number, ratio


def compare(before: Path, after: Path, console: Console, *, contender: str | None = None) -> None:
    """Print both figures of every case that both results have.

    The last column holds the change against the floor of each run, which is what is left when the
    machine itself was faster or slower that day.

    Raises:
        ValueError: when a file is not a result, or they share no case.
    """
    old, new = load(before), load(after)
    later = {row.key: row for row in new.rows}
    pairs = [(row, later[row.key]) for row in old.rows if row.key in later]
    if not pairs:
        raise ValueError(f"{before} and {after} have no case in common")
    table = Table(pad_edge=False)
    for heading in ("case", "contender"):
        table.add_column(heading, no_wrap=True)
    for heading in (before.stem, after.stem, "speed", "speed over floor"):
        table.add_column(heading, justify="right")
    for earlier, row in pairs:
        for figure in earlier.figures:
            other = row.figure(figure.contender)
            if other is not None and contender in (None, figure.contender):
                table.add_row(*_cells(earlier, figure, other))
    console.print(table)
    _print_machines(old, new, console)


def _cells(row: Row, old: Figure, new: Figure) -> tuple[str, ...]:
    faster = old.median / new.median if row.unit in TIMES else new.median / old.median
    steady = new.of_floor / old.of_floor if new.of_floor and old.of_floor else None
    return (
        f"{row.key}  {row.unit}",
        old.contender,
        number(old.median, row.unit),
        number(new.median, row.unit),
        ratio(faster),
        ratio(steady),
    )


def _print_machines(old: Report, new: Report, console: Console) -> None:
    was, now = old.runs[-1].machine, new.runs[-1].machine
    for name in ("cpu", "cores", "kernel"):
        if getattr(was, name) != getattr(now, name):
            console.print(
                f"[yellow]different {name}[/]: {getattr(was, name)} and {getattr(now, name)}"
            )
    for name in sorted(was.versions.keys() | now.versions.keys()):
        versions = [machine.versions.get(name, "none") for machine in (was, now)]
        if versions[0] != versions[1]:
            console.print(f"different {name}: {' and '.join(versions)}", highlight=False)
