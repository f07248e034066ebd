"""``fabric-ray doctor``: what this machine can and can't do, and why."""

from __future__ import annotations

import json
import logging
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fabric_ray import doctor as doctors
from fabric_ray.cli.ending import Code
from fabric_ray.cli.progress import working
from fabric_ray.doctor.examine import BUDGET

_STYLES = {"ok": "green", "absent": "dim", "warn": "yellow", "fail": "bold red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    nics: Annotated[str, typer.Option(help="Only these NICs: names or globs with commas.")] = "",
    provider: Annotated[
        str | None, typer.Option(help="Judge libfabric by this provider instead of efa.")
    ] = None,
    budget: Annotated[float, typer.Option(help="Seconds for the writes.", min=1.0)] = BUDGET,
    everything: Annotated[
        bool, typer.Option("--all", help="Also list what is absent and not needed.")
    ] = False,
) -> None:
    """Libraries, NICs, GIDs and limits, and a byte-checked write over every usable pair.

    What isn't there is no fault: a machine without NICs is healthy if shared memory and TCP work.

    \b
    Examples:
      fabric-ray doctor                         # start here when something doesn't work
      fabric-ray doctor --all                   # every GID and offer, also those without a use
      fabric-ray doctor --nics 'mlx5_*'         # only these, by name or glob
      fabric-ray doctor --provider tcp          # libfabric by another provider than EFA's
      fabric-ray doctor --json | jq .healthy    # for scripts

    Exits with 0 if everything that is there works, else with 1.
    """
    # What went wrong is in the findings.
    logging.getLogger("fabric_ray.native").setLevel(logging.ERROR)
    names = [n.strip() for n in nics.split(",") if n.strip()]
    with working("looking") as tell:
        report = doctors.examine(
            nics=names,
            provider=provider,
            budget=budget,
            on_finding=lambda found: tell(f"{found.subject}: {found.status}"),
        )
    if as_json:
        typer.echo(json.dumps({**msgspec.to_builtins(report), "healthy": report.healthy}))
    else:
        _show(Console(), report, everything)
    raise typer.Exit(Code.DONE if report.healthy else Code.NO)


def _show(console: Console, report: doctors.Report, everything: bool) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("", "what", "found"):
        table.add_column(heading)
    hidden = 0
    for f in report.findings:
        if f.status == "absent" and f.code in ("gid", "offer") and not everything:
            hidden += 1
            continue
        detail = Text(f.detail)
        if f.remedy and f.status in ("warn", "fail"):
            detail.append(f"\n→ {f.remedy}", style="italic")
        table.add_row(Text(f.status, style=_STYLES[f.status]), Text(f.subject), detail)
    console.print(table)
    if hidden:
        console.print(f"{hidden} unused GIDs and offers are not shown; --all shows them")
    bad = sum(f.status == "fail" for f in report.findings)
    words = "all that is there works" if report.healthy else f"{bad} failed"
    console.print(f"{words}; {report.seconds:.1f} s", style=_STYLES["ok" if not bad else "fail"])
