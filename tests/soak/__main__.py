"""``python -m tests.soak``: peers, regions, grants, counters and requests come and go for hours;
memory, descriptors and threads of the processes that stay must not grow."""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.soak.run import Outcome, Soak
from tests.soak.trend import MIB, Trend

console = Console(stderr=True, width=110)


def main(
    hours: Annotated[float, typer.Option(help="how long; fractions are fine")] = 1.0,
    transport: Annotated[str, typer.Option(help="shm, tcp, or both with a comma")] = "shm,tcp",
    seed: Annotated[int | None, typer.Option(help="draws requests; chosen if not given")] = None,
) -> None:
    """Soaks each transport for so long, all at once. Exits with 1 if something grows or breaks."""
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    names, seconds = transport.split(","), hours * 3600
    console.print(f"seed {seed}")
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:

        def play(name: str) -> Outcome:
            task = progress.add_task(name, total=seconds)
            return Soak(name, seed).play(seconds, lambda s: progress.update(task, completed=s))

        with ThreadPoolExecutor(len(names)) as pool:
            outcomes = list(pool.map(play, names))
    for outcome in outcomes:
        _show(outcome)
    sys.exit(any(outcome.failed for outcome in outcomes))


def _show(outcome: Outcome) -> None:
    title = (
        f"{outcome.transport}: {outcome.rounds} rounds in {outcome.seconds:.0f} s, "
        f"{outcome.visits} visits, {outcome.requests} requests for pages, {outcome.kills} kills"
    )
    table = Table(title=title, title_justify="left")
    for column in ("process", "what", "after warm-up", "at the end", "most", "growth", "allowed"):
        table.add_column(column, justify="left" if column in ("process", "what") else "right")
    for trend in outcome.trends():
        shown = [_number(trend, n) for n in (trend.first, trend.last, trend.most)]
        style = "red" if trend.grows else None
        growth = (_number(trend, trend.growth), _number(trend, trend.allowed))
        table.add_row(trend.process, trend.measure, *shown, *growth, style=style)
    console.print(table)
    for what in outcome.broken:
        console.print(f"broken: {what}", style="red", markup=False)
    if not outcome.failed:
        console.print("[green]nothing grows, and no promise was broken")


def _number(trend: Trend, value: float) -> str:
    in_bytes = trend.measure in ("in_use", "resident")
    return f"{value / MIB:.2f} MiB" if in_bytes else f"{value:g}"


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
