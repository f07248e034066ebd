"""``fabric-ray top``: the engines of this host, while they work."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fabric_ray.cli.console import plain, stdout
from fabric_ray.cli.ending import Code, errors_in_words, fail
from fabric_ray.cli.keys import keys
from fabric_ray.cli.options import size
from fabric_ray.cli.progress import working
from fabric_ray.cli.trace import nothing_shown
from fabric_ray.observe.client import Silent, ask_metrics, ask_records, sockets
from fabric_ray.observe.process import ProcessMetrics, ProcessRecords
from fabric_ray.observe.rates import OLDEST, EngineRow, Going, PeerRow, going_on, rows

_STYLES = {"ok": "green", "waits": "yellow", "degraded": "bold yellow", "lost": "bold red"}


def top(
    once: Annotated[
        bool, typer.Option("--once", help="Look twice, one interval apart, and end.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each interval.")
    ] = False,
    interval: Annotated[
        float, typer.Option(help="Seconds between looks.", min=0.1, max=3600)
    ] = 1.0,
) -> None:
    """Engines of this user's processes on this host: links, rates, transfers, health.

    A process shows itself if FABRIC_RAY_OBSERVE=1 is in its environment.

    \b
    Examples:
      FABRIC_RAY_OBSERVE=1 python train.py &      # a process to look at
      fabric-ray top                              # until q or Ctrl-C
      fabric-ray top --interval 0.2
      fabric-ray top --once --json | jq '.engines[].bytes_per_s'

    q and Ctrl-C end it with 0. With --once it exits with 1 if no process shows itself.
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
        fail(nothing_shown(), Code.NO)
    if as_json:
        typer.echo(msgspec.json.encode({"engines": found}).decode())
    else:
        stdout().print(_view(found))


def _watch(look: _Looks, as_json: bool, interval: float) -> None:
    if as_json:
        while True:
            typer.echo(msgspec.json.encode({"engines": look.rows()}).decode())
            time.sleep(interval)
    if not (pipe := stdout()).is_terminal:
        while True:
            pipe.print(_shown(look))
            pipe.file.flush()
            time.sleep(interval)
    with keys() as pressed, Live(auto_refresh=False, screen=True) as live:
        end = f"{'q' if pressed else 'Ctrl-C'} ends it"
        while True:
            live.update(Group(_shown(look), Text(end, style="dim")), refresh=True)
            if _wants_to_leave(pressed, interval):
                return


def _wants_to_leave(pressed: Callable[[float], str] | None, seconds: float) -> bool:
    """Waits for the next look, whatever else is pressed; whether ``q`` was pressed before."""
    if pressed is None:
        time.sleep(seconds)
        return False
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if pressed(left) in ("q", "Q"):
            return True
    return False


class _Looks:
    """Looks at all processes, and remembers the one before."""

    def __init__(self) -> None:
        self.processes: dict[Path, ProcessMetrics] = {}

    def rows(self) -> list[EngineRow]:
        found: dict[Path, ProcessMetrics] = {}
        under_way: dict[Path, ProcessRecords] = {}
        for path in sockets():
            with suppress(Silent):
                found[path] = ask_metrics(path)
                if question := going_on(found[path]):
                    under_way[path] = ask_records(path, question, oldest=OLDEST)
        before, self.processes = self.processes, found
        return [
            row
            for path, now in found.items()
            for row in rows(before.get(path), now, under_way.get(path))
        ]


def _shown(look: _Looks) -> Group | Text:
    found = look.rows()
    return _view(found) if look.processes else Text(nothing_shown())


def _view(engines: list[EngineRow]) -> Group:
    parts: list[Text | Table | str] = []
    # Containers of this host: a process id alone may be that of several.
    several = len({engine.host for engine in engines}) > 1
    for engine in engines:
        parts += [*_engine(engine, several), ""]
    if any(engine.transfers for engine in engines):
        parts.append(_going(engines))
    return Group(*parts)


def _going(engines: list[EngineRow]) -> Table:
    """The oldest transfers that go on."""
    table = plain("|open", "engine", "to", ">bytes", ">for", "")
    for engine in engines:
        for one in engine.transfers:
            facts = size(one.nbytes), f"{one.age:.1f} s", _of(one)
            table.add_row(one.op, engine.engine, _some(one.peers), *facts)
        if (others := engine.going_on - len(engine.transfers)) > 0 and engine.transfers:
            table.add_row(f"{others} more", engine.engine, "", "", "", "")
    return table


def _some(peers: tuple[str, ...]) -> str:
    more = f" and {len(peers) - 3} more" if len(peers) > 3 else ""
    return ", ".join(peers[:3]) + more


def _of(one: Going) -> str:
    said = [one.span] if one.span else []
    return ", ".join(said if one.posted else [*said, "waits for its first post"])


def _engine(engine: EngineRow, with_host: bool) -> list[Text | Table]:
    """A heading, the engine's own rates, and a table of its peers; fits into 80 columns."""
    host = f" on {engine.host}" if with_host else ""
    heading = Text(f"{engine.engine} (pid {engine.pid}{host})", style="bold")
    heading.append(f"  {engine.command}", style="dim")
    heading.no_wrap, heading.overflow = True, "ellipsis"
    rates = Text(
        f"  out {size(engine.bytes_per_s)}/s, counted {engine.counted_per_s:.0f}/s, "
        f"wire p50 {_seconds(engine.wire_p50)}, p99 {_seconds(engine.wire_p99)}, "
        f"{engine.going_on} open"
    )
    if not engine.peers:
        return [heading, rates]
    figures = (">out/s", ">slices/s", ">in flight", ">waiting")
    table = plain("  peer", "|health", "|link", *figures)
    for peer in engine.peers:
        table.add_row(
            f"  {peer.peer}",
            Text(peer.health, style=_STYLES[peer.health]),
            f"{peer.links} x {peer.transport}" if peer.transport else peer.state,
            size(peer.bytes_per_s),
            f"{peer.slices_per_s:.0f}",
            size(peer.under_way),
            str(peer.waiting),
        )
        if changes := _changes(peer):
            table.add_row(Text(f"    {changes}", style="yellow"))
    return [heading, rates, table]


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
