"""`python -m benchmarks`: run, list, report, compare; or what else is measured, by its name:
kvcache, moe, plan, push, rails, rdma, rdt (`python -m benchmarks kvcache --help`)."""

from __future__ import annotations

import fnmatch
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.contenders.registry import contenders
from benchmarks.harness.cases import Case
from benchmarks.harness.schedule import Plan, run_cases
from benchmarks.suites import DEFAULT, SUITES
from fabric_ray.bench import record, table

OTHERS = ("kvcache", "moe", "plan", "push", "rails", "rdma", "rdt")

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
Names = list[str] | None


def chosen_cases(
    suites: Sequence[str] = DEFAULT, only: Sequence[str] = ("*",), *, quick: bool = False
) -> list[Case]:
    """Cases of the suites whose key matches one of `only`.

    Raises:
        ValueError: for an unknown suite, or when nothing matches.
    """
    if unknown := set(suites) - set(SUITES):
        raise ValueError(
            f"no suite is called {', '.join(sorted(unknown))}; known: {', '.join(SUITES)}"
        )
    cases = [case for name in suites for case in SUITES[name](quick)]
    found = [case for case in cases if any(fnmatch.fnmatchcase(case.key, one) for one in only)]
    if not found:
        raise ValueError("no case matches; `python -m benchmarks list` names them all")
    return found


@app.command()
def run(
    suite: Annotated[
        Names, typer.Option(help="May be repeated; by default all but kv and observe")
    ] = None,
    only: Annotated[Names, typer.Option(help="Pattern of case keys, such as 'write/shm/*'")] = None,
    contender: Annotated[Names, typer.Option(help="To include; may be repeated")] = None,
    repeat: Annotated[int | None, typer.Option(min=1, help="Turns per contender and case")] = None,
    quick: Annotated[bool, typer.Option(help="Few cases, short turns")] = False,
    peers: Annotated[bool, typer.Option(help="Measure installed peers")] = True,
    out: Annotated[Path, typer.Option(help="Folder for results")] = record.OUT,
    resume: record.Resume = None,
) -> None:
    """Measure, print a table, and keep JSON lines and one HTML page."""
    plan = Plan(turns=repeat or (3 if quick else 7), turn_seconds=0.03 if quick else 0.1)
    options = {
        "suites": " ".join(suite or ["all"]),
        "only": " ".join(only or ["all"]),
        "contenders": " ".join(contender or ["all"]),
        "quick": str(quick).lower(),
        "peers": str(peers).lower(),
        "turns": str(plan.turns),
        "turn_seconds": str(plan.turn_seconds),
    }
    with record.errors_told(2, ValueError):
        cases = chosen_cases(suite or DEFAULT, only or ("*",), quick=quick)
        here, absent = contenders(peers=peers, names=contender or ())
    with record.recorded("bench", resume, options=options, absent=absent, out=out) as results:
        run_cases(cases, here, plan, results)


@app.command("list")
def show(quick: Annotated[bool, typer.Option(help="Those of a quick run")] = False) -> None:
    """Name every case and every contender."""
    for case in chosen_cases(tuple(SUITES), quick=quick):
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
    with record.errors_told(2, OSError, ValueError):
        record.show(file, record.console_of(), markdown=markdown)


@app.command()
def compare(
    before: Path,
    after: Path,
    contender: Annotated[str | None, typer.Option(help="Only this contender")] = None,
) -> None:
    """Print two results side by side."""
    with record.errors_told(2, OSError, ValueError):
        table.compare(before, after, record.console_of(), contender=contender)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in OTHERS:
        # They import what the others don't need: torch, Ray, the guest.
        sys.argv.pop(0)
        runpy.run_module(f"benchmarks.{sys.argv[0]}", run_name="__main__")
    else:
        app()
