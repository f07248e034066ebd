"""Figures as people read them, and the tables that a run prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.harness import stats
from benchmarks.harness.results import Absent, Figure, Report, Row, Unit

_HEADINGS = ("case", "ours", "floor", "of floor", "best peer", "ours / it", "aim")


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


def ours(row: Row) -> Figure | None:
    """Our first figure, which others are held against."""
    return next((f for f in row.figures if f.family == "ours"), None)


def floor(row: Row) -> Figure | None:
    """The floor with as many threads as our first figure."""
    mine = ours(row)
    threads = mine.threads if mine else 1
    return next((f for f in row.figures if f.family == "floor" and f.threads == threads), None)


def best_peer(row: Row) -> Figure | None:
    """The fastest contender that is neither ours nor a floor."""
    peers = [figure for figure in row.figures if figure.family == "peer"]
    return min(peers, key=lambda f: stats.median(f.turns), default=None)


def ranked(row: Row) -> list[Figure]:
    """Ours first, then floors, then peers from the fastest to the slowest."""
    place = {"ours": 0, "floor": 1, "peer": 2}
    return sorted(row.figures, key=lambda f: (place[f.family], stats.median(f.turns)))


def details(figure: Figure) -> str:
    """What else was measured, in one line."""
    return ", ".join(
        f"{name} {value if isinstance(value, str) else number(value, '')}"
        for name, value in figure.details.items()
    )


def print_report(report: Report, console: Console, *, markdown: bool = False) -> None:
    """One table per suite, then what failed and what was left behind."""
    for suite, rows in report.suites.items():
        headings, cells = _headings(rows), [_cells(row) for row in rows]
        if markdown:
            lines = [headings, ["---"] * len(headings), *cells]
            text = "\n".join(_line(line[: len(headings)]) for line in lines)
            console.print(f"**{suite}**\n\n{text}\n", markup=False, highlight=False, soft_wrap=True)
        else:
            console.print(_table(suite, headings, cells))
    for row in report.rows:
        for failure in row.failures:
            console.print(
                f"[red]failed[/] {row.key}  {failure.contender}: {escape(failure.reason)}"
            )
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


def _headings(rows: Sequence[Row]) -> list[str]:
    last = ["details"] if any(figure.details for row in rows for figure in row.figures) else []
    return [*_HEADINGS, "others, ours over each", *last]


def _cells(row: Row) -> list[str]:
    mine, peer, plain = ours(row), best_peer(row), floor(row)
    main = mine or peer
    others = [f for f in ranked(row) if f not in (mine, plain, peer)]
    return [
        f"{row.key}  {row.unit}",
        number(mine.median, row.unit) if mine else "",
        number(plain.median, row.unit) if plain else "",
        ratio(main.of_floor) if main else "",
        f"{peer.contender} {number(peer.median, row.unit)}" if peer else "",
        ratio(peer.ours_over) if peer else "",
        row.aim,
        ", ".join(_others(others, row.unit)),
        details(main) if main else "",
    ]


def _others(figures: Sequence[Figure], unit: Unit) -> Iterator[str]:
    for figure in figures:
        over = f" ({ratio(figure.ours_over)})" if figure.ours_over else ""
        yield f"{figure.contender} {number(figure.median, unit)}{over}"


def _table(suite: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=suite, title_justify="left", pad_edge=False)
    for index, heading in enumerate(headings):
        figures = 0 < index < len(_HEADINGS) - 1
        table.add_column(heading, no_wrap=not index, justify="right" if figures else "left")
    for row in rows:
        table.add_row(*map(escape, row[: len(headings)]))
    return table


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
