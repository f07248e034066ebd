"""`python -m benchmarks`: run, list, compare; or what else is measured, by its name: kvcache, moe,
observe, plan, push, rails, rdma, rdt (`python -m benchmarks kvcache --help`)."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import compare as comparison
from benchmarks.contenders.registry import contenders
from benchmarks.run import Options, chosen_cases
from benchmarks.run import run as run_benchmarks
from benchmarks.suites import SUITES

OTHERS = ("kvcache", "moe", "observe", "plan", "push", "rails", "rdma", "rdt")

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
# A pipe or a log gets whole rows.
_console = Console(width=None if Console().is_terminal else 200)


def _fail(error: ValueError) -> typer.Exit:
    _console.print(f"[red]{error}[/]", soft_wrap=True)
    return typer.Exit(2)


@app.command()
def run(
    suite: Annotated[list[str] | None, typer.Option(help="Suite to run; may be repeated")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Pattern of case keys, such as 'write/shm/*'")
    ] = None,
    contender: Annotated[
        list[str] | None, typer.Option(help="Contender to include; may be repeated")
    ] = None,
    repeat: Annotated[int | None, typer.Option(min=1, help="Turns per contender and case")] = None,
    quick: Annotated[bool, typer.Option(help="Few cases, short turns")] = False,
    peers: Annotated[bool, typer.Option(help="Measure installed peers")] = True,
    out: Annotated[Path, typer.Option(help="Folder for results")] = Path("bench-results"),
) -> None:
    """Measure, print a table, and save JSON and one HTML page."""
    options = Options(
        suites=tuple(suite or ()),
        only=tuple(only or ()),
        contenders=tuple(contender or ()),
        repeat=repeat,
        quick=quick,
        peers=peers,
        out=out,
    )
    try:
        run_benchmarks(options, _console)
    except ValueError as error:
        raise _fail(error) from error


@app.command("list")
def show(quick: Annotated[bool, typer.Option(help="Those of a quick run")] = False) -> None:
    """Name every case and every contender."""
    for case in chosen_cases(Options(suites=tuple(SUITES), quick=quick)):
        _console.print(case.key, highlight=False)
    here, absent = contenders(peers=True)
    for one in here:
        _console.print(f"contender {one.name}", highlight=False)
    for missing in absent:
        _console.print(f"contender {missing.contender} ({missing.reason})", highlight=False)


@app.command()
def compare(
    before: Path,
    after: Path,
    contender: Annotated[str | None, typer.Option(help="Only this contender")] = None,
) -> None:
    """Print two results side by side."""
    try:
        comparison.compare(before, after, _console, contender=contender)
    except (OSError, ValueError) as error:
        raise _fail(ValueError(str(error))) from error


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in OTHERS:
        # They import what the others don't need: torch, Ray, the guest.
        sys.argv.pop(0)
        runpy.run_module(f"benchmarks.{sys.argv[0]}", run_name="__main__")
    else:
        app()
