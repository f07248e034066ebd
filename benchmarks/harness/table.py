"""Figures as people read them, and the table that a run prints."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.harness.cases import Unit
from benchmarks.harness.results import Absent, Figure, Report, Row


def number(value: float, unit: Unit) -> str:
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
    return min(peers, key=lambda f: sorted(f.turns)[len(f.turns) // 2], default=None)


def ranked(row: Row) -> list[Figure]:
    """Ours first, then floors, then peers from the fastest to the slowest."""
    place = {"ours": 0, "floor": 1, "peer": 2}
    slower = row.unit == "us"
    return sorted(
        row.figures,
        key=lambda f: (place[f.family], f.median if slower else -f.median),
    )


def print_report(report: Report, console: Console) -> None:
    """One table per suite, then what failed and what was left behind."""
    for suite in dict.fromkeys(row.case.suite for row in report.rows):
        console.print(_suite(suite, [row for row in report.rows if row.case.suite == suite]))
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


def _suite(suite: str, rows: list[Row]) -> Table:
    table = Table(title=suite, title_justify="left", pad_edge=False)
    table.add_column("case", no_wrap=True)
    for heading in ("ours", "floor", "of floor", "best peer", "ours / it"):
        table.add_column(heading, justify="right")
    table.add_column("others, ours over each")
    for row in rows:
        mine, peer, plain = ours(row), best_peer(row), floor(row)
        shown = (mine, plain, peer)
        others = [f for f in ranked(row) if f not in shown]
        table.add_row(
            f"{row.key}  {row.unit}",
            number(mine.median, row.unit) if mine else "",
            number(plain.median, row.unit) if plain else "",
            ratio((mine or peer).of_floor) if mine or peer else "",  # type: ignore[union-attr]
            f"{peer.contender} {number(peer.median, row.unit)}" if peer else "",
            ratio(peer.ours_over) if peer else "",
            ", ".join(_short(figure, row.unit) for figure in others),
        )
    return table


def _short(figure: Figure, unit: Unit) -> str:
    over = f" ({ratio(figure.ours_over)})" if figure.ours_over else ""
    return f"{figure.contender} {number(figure.median, unit)}{over}"
