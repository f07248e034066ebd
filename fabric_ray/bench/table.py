"""Figures as people read them, and the tables that a run prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fabric_ray.bench import stats
from fabric_ray.bench.results import TIMES, Absent, Figure, Report, Row, Unit, load

_HEADINGS = ("case", "ours", "floor", "of floor", "best peer", "ours / it", "aim")
_ORDER = ("ours", "floor", "peer")


def size(count: int) -> str:
    """`count` bytes as people write it: 4KiB, 256MiB."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit}{name}"
    return f"{count}B"


def number(value: float, unit: Unit | str) -> str:
    """Three figures: 5.31, 0.146, 1.2 M, 344 k."""
    if unit == "op/s":
        for limit, letter in ((1e6, " M"), (1e3, " k")):
            if value >= limit:
                return f"{value / limit:.3g}{letter}"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def ratio(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}x" if value >= 0.1 else f"{value:.2g}x"


def ranked(row: Row) -> list[Figure]:
    """Ours first, then floors, then peers from the fastest to the slowest."""
    return sorted(row.figures, key=lambda f: (_ORDER.index(f.family), stats.median(f.turns)))


def details(figure: Figure) -> str:
    """What else was measured, in one line."""
    return ", ".join(
        f"{name} {value if isinstance(value, str) else number(value, '')}"
        for name, value in figure.details.items()
    )


def print_report(report: Report, console: Console, *, markdown: bool = False) -> None:
    """One table per suite, then what failed and what was left behind."""
    for suite, rows in report.suites.items():
        last = ["details"] if any(f.details for row in rows for f in row.figures) else []
        headings = [*_HEADINGS, "others, ours over each", *last]
        cells = [_cells(row)[: len(headings)] for row in rows]
        if markdown:
            lines = [headings, ["---"] * len(headings), *cells]
            text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
            console.print(f"**{suite}**\n\n{text}\n", markup=False, highlight=False, soft_wrap=True)
        else:
            console.print(_table(headings, range(1, len(_HEADINGS) - 1), cells, title=suite))
    for row in report.rows:
        for failed in row.failures:
            console.print(f"[red]failed[/] {row.key}  {failed.contender}: {escape(failed.reason)}")
    for remain in report.left_behind:
        console.print(f"[yellow]left behind and removed[/] {remain}")


def print_absent(absent: Iterable[Absent], console: Console) -> None:
    for missing in absent:
        console.print(
            f"[yellow]not here[/] {missing.contender}: {escape(missing.reason)}; get it with: "
            f"{escape(missing.obtain)}",
            highlight=False,
            soft_wrap=True,
        )


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
    cells = []
    for row, other in pairs:
        for was in row.figures:
            now = other.figure(was.contender)
            if now is None or contender not in (None, was.contender):
                continue
            faster = was.median / now.median if row.unit in TIMES else now.median / was.median
            steady = now.of_floor / was.of_floor if now.of_floor and was.of_floor else None
            shown = number(was.median, row.unit), number(now.median, row.unit)
            key = f"{row.key}  {row.unit}"
            cells.append([key, was.contender, *shown, ratio(faster), ratio(steady)])
    headings = ["case", "contender", before.stem, after.stem, "speed", "speed over floor"]
    console.print(_table(headings, range(2, 6), cells))
    facts = [
        {"cpu": m.cpu, "cores": m.cores, "kernel": m.kernel, **m.versions}
        for m in (old.runs[-1].machine, new.runs[-1].machine)
    ]
    for name in dict.fromkeys([*facts[0], *facts[1]]):
        values = [str(each.get(name, "none")) for each in facts]
        if values[0] != values[1]:
            console.print(f"different {name}: {' and '.join(values)}", highlight=False)


def _cells(row: Row) -> list[str]:
    """The first of ours, the floor with as many threads, the fastest peer, then all others."""
    order = ranked(row)
    # Not the fastest of ours: the one that others are held against.
    mine = next((f for f in row.figures if f.family == "ours"), None)
    threads = mine.threads if mine else 1
    plain = next((f for f in order if f.family == "floor" and f.threads == threads), None)
    peer = next((f for f in order if f.family == "peer"), None)
    main = mine or peer
    others = (
        f"{f.contender} {number(f.median, row.unit)}"
        + (f" ({ratio(f.ours_over)})" if f.ours_over else "")
        for f in order
        if f not in (mine, plain, peer)
    )
    return [
        f"{row.key}  {row.unit}",
        number(mine.median, row.unit) if mine else "",
        number(plain.median, row.unit) if plain else "",
        ratio(main.of_floor) if main else "",
        f"{peer.contender} {number(peer.median, row.unit)}" if peer else "",
        ratio(peer.ours_over) if peer else "",
        row.aim,
        ", ".join(others),
        details(main) if main else "",
    ]


def _table(
    headings: Sequence[str], figures: range, rows: Iterable[Sequence[str]], title: str | None = None
) -> Table:
    table = Table(title=title, title_justify="left", pad_edge=False)
    for at, heading in enumerate(headings):
        table.add_column(heading, no_wrap=not at, justify="right" if at in figures else "left")
    for row in rows:
        table.add_row(*map(escape, row))
    return table
