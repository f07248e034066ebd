"""`python -m benchmarks`: run, list, report, compare; or what else is measured, by its name:
kvcache, moe, plan, push, rails, rdma, rdt (`python -m benchmarks kvcache --help`)."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import compare as comparison
from benchmarks import run as running
from benchmarks.contenders.registry import contenders
from benchmarks.harness import record
from benchmarks.suites import SUITES

OTHERS = ("kvcache", "moe", "plan", "push", "rails", "rdma", "rdt")

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@contextmanager
def _told() -> Iterator[None]:
    """A name or a file that means nothing is an error of one line."""
    try:
        yield
    except (OSError, ValueError) as error:
        record.console_of().print(f"[red]{error}[/]", soft_wrap=True)
        raise typer.Exit(2) from error


@app.command()
def run(
    suite: Annotated[
        list[str] | None, typer.Option(help="May be repeated; by default all but kv and observe")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Pattern of case keys, such as 'write/shm/*'")
    ] = None,
    contender: Annotated[
        list[str] | None, typer.Option(help="Contender to include; may be repeated")
    ] = None,
    repeat: Annotated[int | None, typer.Option(min=1, help="Turns per contender and case")] = None,
    quick: Annotated[bool, typer.Option(help="Few cases, short turns")] = False,
    peers: Annotated[bool, typer.Option(help="Measure installed peers")] = True,
    out: Annotated[Path, typer.Option(help="Folder for results")] = record.OUT,
    resume: record.Resume = None,
) -> None:
    """Measure, print a table, and keep JSON lines and one HTML page."""
    with _told():
        running.run(
            running.Options(
                suites=tuple(suite or ()),
                only=tuple(only or ()),
                contenders=tuple(contender or ()),
                repeat=repeat,
                quick=quick,
                peers=peers,
                out=out,
                resume=resume,
            )
        )


@app.command("list")
def show(quick: Annotated[bool, typer.Option(help="Those of a quick run")] = False) -> None:
    """Name every case and every contender."""
    for case in running.chosen_cases(running.Options(suites=tuple(SUITES), quick=quick)):
        typer.echo(case.key)
    here, absent = contenders(peers=True)
    for one in here:
        typer.echo(f"contender {one.name}")
    for missing in absent:
        typer.echo(f"contender {missing.contender} ({missing.reason})")


@app.command()
def report(
    file: Path,
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables to paste")] = False,
) -> None:
    """Print the tables of a file of results, of any benchmark, and make its page anew."""
    with _told():
        record.show(file, record.console_of(), markdown=markdown)


@app.command()
def compare(
    before: Path,
    after: Path,
    contender: Annotated[str | None, typer.Option(help="Only this contender")] = None,
) -> None:
    """Print two results side by side."""
    with _told():
        comparison.compare(before, after, record.console_of(), contender=contender)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in OTHERS:
        # They import what the others don't need: torch, Ray, the guest.
        sys.argv.pop(0)
        runpy.run_module(f"benchmarks.{sys.argv[0]}", run_name="__main__")
    else:
        app()
