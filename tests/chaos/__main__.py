"""``python -m tests.chaos``: as many rounds as you have time for."""

from __future__ import annotations

import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.chaos.kv.world import KvWorld
from tests.chaos.world import MIB, Summary, World

console = Console(stderr=True)


def main(
    rounds: Annotated[int, typer.Option(help="over all transports together")] = 1000,
    seed: Annotated[int | None, typer.Option(help="draws everything; chosen if not given")] = None,
    transport: Annotated[str, typer.Option(help="shm, tcp, or both with a comma")] = "tcp,shm",
    first: Annotated[int, typer.Option(help="the first round, to look at one again")] = 0,
    kv: Annotated[bool, typer.Option("--kv", help="KV pages, decoders and prefillers")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the summary as JSON")] = False,
) -> None:
    """Transfers and weight pushes, or requests for pages, while processes die and sockets break."""
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    names = transport.split(",")
    world = KvWorld if kv else World
    console.print(f"seed {seed}")
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:

        def play(name: str, count: int) -> Summary:
            task = progress.add_task(name, total=count)
            return world(seed, name).play(first, count, lambda: progress.advance(task))

        counts = [len(range(i, rounds, len(names))) for i in range(len(names))]
        with ThreadPoolExecutor(len(names)) as pool:
            summaries = list(pool.map(play, names, counts))
    if as_json:
        print(json.dumps([_plain(s) for s in summaries], indent=1))
    for summary in summaries:
        _show(summary)
    sys.exit(any(summary.broken for summary in summaries))


def _plain(summary: Summary) -> dict[str, object]:
    return {**vars(summary), "notes": sorted(summary.notes)}


def _show(summary: Summary) -> None:
    each = summary.seconds / max(1, summary.rounds)
    title = f"{summary.transport}: {summary.rounds} rounds, {each:.2f} s each"
    table = Table("faults", "rounds", title=title, title_justify="left")
    for name, count in sorted(summary.faults.items()):
        table.add_row(name, str(count))
    console.print(table)
    table = Table("what came of it", "times")
    for name, count in sorted(summary.results.items()):
        table.add_row(name, str(count))
    console.print(table)
    if summary.in_use:
        first, last = (b / MIB for b in (summary.in_use[0], summary.in_use[-1]))
        console.print(f"memory of the eldest: {first:.1f} MiB, at last {last:.1f} MiB")
    for note in sorted(summary.notes):
        console.print(f"[yellow]note: {note}")
    for what in summary.broken:
        console.print(f"broken: {what}", style="red", markup=False)
    if not summary.broken:
        console.print("[green]no promise was broken")


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
