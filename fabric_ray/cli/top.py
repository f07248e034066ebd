"""``fabric-ray top``: the engines of this host, while they work."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fabric_ray.cli.ending import Code, errors_in_words, fail
from fabric_ray.cli.options import size
from fabric_ray.cli.progress import working
from fabric_ray.cli.trace import nobody
from fabric_ray.observe.asking import Silent, ask_metrics, sockets
from fabric_ray.observe.process import ProcessMetrics
from fabric_ray.observe.rates import EngineRow, PeerRow, rows

_STYLES = {"ok": "green", "waits": "yellow", "degraded": "bold yellow", "lost": "bold red"}


def top(
    once: Annotated[
        bool, typer.Option("--once", help="Look twice, one interval apart, and end.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each interval.")
    ] = False,
    interval: Annotated[float, typer.Option(help="Seconds between looks.", min=0.1)] = 1.0,
) -> None:
    """Engines of this user's processes on this host: links, rates, transfers, health.

    A process shows itself if FABRIC_RAY_OBSERVE=1 is in its environment.

    \b
    Examples:
      FABRIC_RAY_OBSERVE=1 python train.py &      # whom to look at
      fabric-ray top                              # until Ctrl-C
      fabric-ray top --interval 0.2
      fabric-ray top --once --json | jq '.engines[].bytes_per_s'

    Ctrl-C ends it with 0. With --once it exits with 1 if no process shows itself.
    """
    look = _Looks()
    with errors_in_words():
        if once:
            _look_once(look, as_json, interval)
            return
        with suppress(KeyboardInterrupt):
            _watch(look, as_json, interval)


def _look_once(look: _Looks, as_json: bool, interval: float) -> None:
    with working("looking"):
        look.rows()
        time.sleep(interval)
        found = look.rows()
    if not look.processes:
        fail(nobody(), Code.NO)
    if as_json:
        typer.echo(msgspec.json.encode({"engines": found}).decode())
    else:
        Console().print(_table(found))


def _watch(look: _Looks, as_json: bool, interval: float) -> None:
    if as_json:
        while True:
            typer.echo(msgspec.json.encode({"engines": look.rows()}).decode())
            time.sleep(interval)
    with Live(auto_refresh=False, screen=True) as live:
        while True:
            found = look.rows()
            shown = _table(found) if look.processes else Text(nobody())
            live.update(Group(shown, Text("Ctrl-C ends it", style="dim")), refresh=True)
            time.sleep(interval)


class _Looks:
    """Looks at all processes, and remembers the one before."""

    def __init__(self) -> None:
        self.processes: dict[Path, ProcessMetrics] = {}

    def rows(self) -> list[EngineRow]:
        found: dict[Path, ProcessMetrics] = {}
        for path in sockets():
            try:
                found[path] = ask_metrics(path)
            except Silent:
                continue
        before, self.processes = self.processes, found
        return [row for path, now in found.items() for row in rows(before.get(path), now)]


def _table(engines: list[EngineRow]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("engine", "peer", "health", "link"):
        table.add_column(heading)
    for heading in ("out/s", "slices/s", "in/s", "p50", "p99", "going on", "under way", "waiting"):
        table.add_column(heading, justify="right")
    table.add_column("since the last look")
    for engine in engines:
        table.add_row(
            Text(f"{engine.engine} (pid {engine.pid})", style="bold"),
            "",
            "",
            "",
            size(engine.bytes_per_s),
            "",
            f"{engine.counted_per_s:.0f}",
            _seconds(engine.wire_p50),
            _seconds(engine.wire_p99),
            str(engine.going_on),
        )
        for peer in engine.peers:
            table.add_row(
                f"  {engine.command}",
                peer.peer,
                Text(peer.health, style=_STYLES[peer.health]),
                f"{peer.links} x {peer.transport}" if peer.transport else peer.state,
                size(peer.bytes_per_s),
                f"{peer.slices_per_s:.0f}",
                "",
                "",
                "",
                "",
                size(peer.under_way),
                str(peer.waiting),
                _changes(peer),
            )
    return table


def _changes(peer: PeerRow) -> str:
    words = {
        "sent again": peer.again,
        "failed": peer.failed,
        "links lost": peer.excluded,
        "found no room": peer.waits,
    }
    return ", ".join(f"{n} {what}" for what, n in words.items() if n)


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"<{value * 1e6:.0f} us" if value < 1e-3 else f"<{value * 1e3:.1f} ms"
