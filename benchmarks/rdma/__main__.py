"""The command line."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.contenders import perf
from benchmarks.harness.machine import machine
from benchmarks.rdma.cases import Part, Result, Row, Verdict, judge
from benchmarks.rdma.suites import aims, beside_perftest, contenders, four_rails
from benchmarks.rdma.turns import packages
from benchmarks.rdma.unequal import unequal_rails
from tests.rdma.boot import why_no_guest


def show(rows: Sequence[Row], verdicts: Sequence[Verdict], console: Console) -> None:
    """A line for each case and contender, with the aim that it has."""
    table = Table("case", "contender", "MB/s", "messages/s", "times", "beside", title="soft-RoCE")
    table.add_column("aim")
    first: dict[str, Row] = {}
    for row in rows:
        reference = first.setdefault(row.case, row)
        found = [v for v in verdicts if (v.aim.case, v.aim.contender) == (row.case, row.contender)]
        beside = found[0].aim.beside if found else reference.contender
        ratio = found[0].ratio if found else row.ratio(reference)
        table.add_row(
            row.case,
            row.contender,
            f"{row.bytes_per_second / 1e6:.1f}",
            f"{row.messages_per_second:.0f}",
            f"{ratio:.3f}",
            beside if row is not reference else "",
            f"{found[0].aim.least}: {'met' if found[0].met else 'missed'}" if found else "",
        )
    console.print(table)


def show_parts(parts: Sequence[Part], console: Console) -> None:
    """A line for each step by each policy."""
    table = Table("step", "policy", "share of what is up", title="unequal soft-RoCE rails")
    for name in ("median, ms", "P99, ms", "0.95 after, ms"):
        table.add_column(name, justify="right")
    for part in parts:
        recovered = "-" if part.recovered_ms is None else f"{part.recovered_ms:.0f}"
        times = (f"{part.median_ms:.0f}", f"{part.p99_ms:.0f}", recovered)
        table.add_row(part.step, part.policy, f"{part.share:.3f}", *times)
    console.print(table)


def main(
    turns: Annotated[int, typer.Option(min=1, help="Turns per contender and case")] = 5,
    rails: Annotated[bool, typer.Option(help="Measure four rails beside one as well")] = True,
    unequal: Annotated[bool, typer.Option(help="Unequal rails that slow down and fail")] = False,
    single: Annotated[bool, typer.Option(help="Measure one rail beside perftest")] = True,
    out: Annotated[Path, typer.Option(help="Folder for results")] = Path("bench-results"),
) -> None:
    """Measure writes between devices of the soft-RoCE guest, beside perftest."""
    console = Console(width=None if Console().is_terminal else 200)
    reason = why_no_guest(*packages(contenders()))
    if reason is not None:
        console.print(f"[red]no soft-RoCE guest: {reason}[/]", soft_wrap=True)
        raise typer.Exit(2)
    if why := perf.missing():
        console.print(f"[yellow]{why}; run `{perf.OBTAIN}`[/]", soft_wrap=True)
    began, load_before = datetime.datetime.now().astimezone(), os.getloadavg()
    rows: list[Row] = []
    parts: list[Part] = []
    try:
        if single:
            rows += beside_perftest(turns=turns)
        if rails and not perf.missing():
            rows += four_rails(turns=turns)
        if unequal and not perf.missing():
            parts = unequal_rails()
    except ValueError as error:
        console.print(f"[red]{error}[/]", soft_wrap=True)
        raise typer.Exit(1) from error
    verdicts = judge(rows, aims())
    show(rows, verdicts, console)
    show_parts(parts, console)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"rdma-{began:%Y%m%d-%H%M%S}.json"
    result = Result(began.isoformat(), machine(load_before), rows, verdicts, parts)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
    console.print(f"figures: {path}")


if __name__ == "__main__":
    typer.run(main)
