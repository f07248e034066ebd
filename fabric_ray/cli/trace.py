"""``fabric-ray trace``: what engines recorded of their transfers, joined at both ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from fabric_ray.cli.console import plain, stdout
from fabric_ray.cli.ending import Code, errors_in_words, fail
from fabric_ray.cli.options import size
from fabric_ray.cli.progress import working
from fabric_ray.errors import given_path
from fabric_ray.observe import Flight, ProcessRecords, join, load, story
from fabric_ray.observe.chrome import trace as chrome_trace
from fabric_ray.observe.client import Silent, ask_records, sockets
from fabric_ray.observe.run_directory import run_dirs

_MOST_ROWS = 40


def trace(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Records written by --dump or observe.dump(), also of other hosts."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace here: open it in ui.perfetto.dev.")
    ] = None,
    dump: Annotated[
        Path | None, typer.Option(help="Write the records here, to be joined elsewhere.")
    ] = None,
    request: Annotated[
        str | None, typer.Option("--id", help="Only this request, as observe.span() named it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Latest transfers of engines: of running processes of this user, or from files.

    A process can be looked into if FABRIC_RAY_OBSERVE=1 is in its environment.

    \b
    Examples:
      FABRIC_RAY_OBSERVE=1 python train.py &      # a process to look into
      fabric-ray trace                            # the latest transfers of this host
      fabric-ray trace --out trace.json           # to be opened in ui.perfetto.dev
      fabric-ray trace --id request-17            # one request's story
      fabric-ray trace --dump node1.json          # on each of several hosts, then:
      fabric-ray trace node1.json node2.json --out trace.json
      fabric-ray trace --json | jq '.flights[-1]'

    Exits with 1 if there is nothing to show, with 2 for files that can't be read or written.
    """
    console = stdout()
    with errors_in_words(), working("asking") as tell:
        processes = _processes(files or [], tell)
        if dump:
            records = b"".join(msgspec.json.encode(p) + b"\n" for p in processes)
            with given_path(dump):
                dump.write_bytes(records)
        tell("joining")
        flights = join(processes)
        if request is not None:
            flights = story(flights, request)
        if out and (flights or request is None):
            timeline = msgspec.json.encode(chrome_trace(processes, flights))
            with given_path(out):
                out.write_bytes(timeline)
    if request is not None and not flights:
        fail(
            f"nothing is recorded of {request!r}: it may be too long ago, or its process isn't "
            "among those that were looked into",
            Code.NO,
        )
    if as_json:
        answer = {"processes": len(processes), "flights": flights}
        typer.echo(msgspec.json.encode(answer).decode())
        return
    _show(console, flights)
    joined = sum(flight.received is not None for flight in flights)
    console.print(
        f"{len(flights)} transfers of {len(processes)} processes, {joined} seen from both ends"
        + (f"; {out} opens in ui.perfetto.dev" if out else "")
    )


def _processes(files: list[Path], tell: Callable[[str], None]) -> list[ProcessRecords]:
    """From files, or of what runs; the command ends if no process can be looked into.

    Raises:
        DecodeError: a file has no records.
    """
    if files:
        return [process for path in files for process in load(path)]
    found = []
    for path in sockets():
        tell(f"asking {path.stem}")
        try:
            found.append(ask_records(path))
        except Silent as silent:
            typer.echo(str(silent), err=True)
    if not found:
        fail(nothing_shown(), Code.NO)
    return found


def nothing_shown() -> str:
    """What to do where no process shows itself."""
    looked_in = " or ".join(map(str, run_dirs()))
    return (
        f"no process shows itself in {looked_in}; start some with FABRIC_RAY_OBSERVE=1, or call "
        "fabric_ray.observe.serve() in them; for other users run this command as them, for other "
        "containers in them, or with FABRIC_RAY_RUN_DIR naming a directory that all share"
    )


def _show(console: Console, flights: list[Flight]) -> None:
    table = plain("transfer", ">bytes", ">queue", ">post", ">wire", ">counted", ">delivered")
    table.columns[0].min_width = 16
    for flight in flights[-_MOST_ROWS:]:
        received = flight.received
        table.add_row(
            _transfer(flight),
            size(flight.nbytes),
            _took(flight.queued, flight.posted),
            _took(flight.posted, flight.all_posted),
            _took(flight.all_posted, flight.wire),
            _took(flight.queued, received.last if received else None),
            _took(flight.queued, received.delivered if received else None),
        )
    if len(flights) > _MOST_ROWS:
        console.print(f"the latest {_MOST_ROWS} of {len(flights)}; --json or --out has all")
    console.print(table)


def _transfer(flight: Flight) -> Text:
    """The request, its two ends, its rails, and what went wrong."""
    ends = f"{flight.writer.name} -> {flight.peer_name or flight.peer[:8]}"
    text = Text(f"{flight.op} {flight.id} {ends}")
    details = "; ".join(filter(None, [", ".join(flight.rails), _remark(flight)]))
    if details:
        text.append(f"\n  {details}", style="dim")
    return text


def _took(begin: int | None, end: int | None) -> str:
    if begin is None or end is None:
        return "-"
    us = (end - begin) / 1e3
    return f"{us / 1e3:.2f} ms" if abs(us) >= 1e3 else f"{us:.1f} us"


def _remark(flight: Flight) -> str:
    words = [
        "" if flight.over else "goes on",
        f"{flight.again} sent again" if flight.again else "",
        f"waited for room {flight.waits} times" if flight.waits else "",
        f"failed: {flight.failure}" if flight.failure else "",
    ]
    return "; ".join(filter(None, words))
