"""``fabric-ray doctor``: what this machine can and can't do, and why."""

from __future__ import annotations

import json
import logging
from typing import Annotated

import msgspec
import typer

from fabric_ray import doctor as doctors
from fabric_ray.cli.console import stdout
from fabric_ray.cli.ending import Code, errors_in_words, fail
from fabric_ray.cli.findings import show
from fabric_ray.cli.progress import working
from fabric_ray.doctor.examine import BUDGET
from fabric_ray.errors import FabricError

WAIT = 600.0
"""Seconds for a user to type a command on another host."""

_DAY_S = 86_400.0


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    nics: Annotated[str, typer.Option(help="Only these NICs: names or globs with commas.")] = "",
    provider: Annotated[
        str | None, typer.Option(help="Judge libfabric by this provider instead of efa.")
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(help=f"Seconds for the writes, {BUDGET:g} unless named.", min=1.0, max=_DAY_S),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also list what is absent and not needed.")
    ] = False,
    listen: Annotated[
        bool, typer.Option("--listen", help="Wait for the doctor of another host.")
    ] = False,
    peer: Annotated[
        str | None, typer.Option(help="Try every link to the host that printed this text.")
    ] = None,
    wait: Annotated[
        float | None,
        typer.Option(
            help=f"Seconds that --listen waits, {WAIT:g} unless named.", min=1.0, max=_DAY_S
        ),
    ] = None,
) -> None:
    """Libraries, NICs, GIDs and limits, and a byte-checked write over every usable pair.

    What isn't there is no fault: a machine without NICs is healthy if shared memory and TCP work.

    Between two hosts: --listen on one prints the command for the other. That connects, writes
    over every transport and NIC that both have, both ways, and compares every byte.
    FABRIC_RAY_TOKEN, _BIND and _PORTS are as for all engines; without a token one is drawn for
    this visit, and the text holds it.

    \b
    Examples:
      fabric-ray doctor                         # start here when something doesn't work
      fabric-ray doctor --all                   # every GID and offer, also those without a use
      fabric-ray doctor --nics 'mlx5_*'         # only these, by name or glob
      fabric-ray doctor --provider tcp          # libfabric by another provider than EFA's
      fabric-ray doctor --json | jq .healthy    # for scripts
      fabric-ray doctor --listen                # on one host, and on the other
      fabric-ray doctor --peer fabric1-...      # what the first has printed

    Exits with 0 if everything that is there works and was tried in time, else with 1.
    """
    # What went wrong is in the findings.
    logging.getLogger("fabric_ray.native").setLevel(logging.ERROR)
    names = [n.strip() for n in nics.split(",") if n.strip()]
    if listen and peer is not None:
        fail("--listen is for one host, --peer for the other")
    if listen and budget is not None:
        fail("the visiting host decides how long it tries: give --budget to --peer there")
    if wait is not None and not listen:
        fail("--wait is for --listen: nothing else waits")
    if listen:
        report = _wait_for_a_visit(provider, names, wait or WAIT, as_json)
    elif peer is not None:
        report = _visit(peer, provider, names, budget or BUDGET)
    else:
        report = _examine(provider, names, budget or BUDGET)
    if as_json:
        typer.echo(json.dumps({**msgspec.to_builtins(report), "healthy": report.healthy}))
    else:
        show(stdout(), report, everything)
    raise typer.Exit(Code.DONE if report.healthy else Code.NO)


def _examine(provider: str | None, nics: list[str], budget: float) -> doctors.Report:
    with working("looking") as tell:
        return doctors.examine(
            nics=nics,
            provider=provider,
            budget=budget,
            on_finding=lambda found: tell(f"{found.subject}: {found.status}"),
        )


def _visit(text: str, provider: str | None, nics: list[str], budget: float) -> doctors.Report:
    with errors_in_words(), working("shaking hands") as tell:
        return doctors.visit(
            text,
            provider=provider,
            nics=nics,
            budget=budget,
            on_finding=lambda found: tell(f"{found.subject}: {found.status}"),
        )


def _wait_for_a_visit(
    provider: str | None, nics: list[str], seconds: float, as_json: bool
) -> doctors.Report:
    with errors_in_words():
        host = doctors.Host(provider=provider, nics=nics)
    with host:
        command = f"fabric-ray doctor --peer {host.invitation}"
        if as_json:
            typer.echo(json.dumps({"peer": str(host.invitation), "command": command}))
        else:
            typer.echo(f"on the other host, type:\n\n{command}\n")
        with working(f"waiting for it, {seconds:.0f} s at most") as tell:
            try:
                return host.wait(seconds, lambda name: tell(f"visited by {name}"))
            except FabricError as error:
                fail(str(error), Code.NO)
