"""Rates of engines, from two samples of their metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from fabric_ray.engine import EngineMetrics, EngineRecords
from fabric_ray.engine.observability import CLASSES, Cursor, Histogram, PeerMetrics, TransferRecord
from fabric_ray.observe.process import ProcessMetrics, ProcessRecords

Health = Literal["ok", "waits", "degraded", "lost"]

OLDEST = 8
"""Most open transfers that are listed."""

_NOTHING_OVER: Cursor = (2**62,) * 4


class PeerRow(msgspec.Struct, frozen=True):
    """An engine's path to one peer since the last sample."""

    peer: str
    peer_id: str
    health: Health
    """``lost``: no connection; ``degraded``: since the last sample a transfer failed, was sent
    again, or a link was lost; ``waits``: work exceeds the room for it."""
    state: str
    transport: str | None
    links: int
    bytes_per_s: float
    slices_per_s: float
    again: int
    """Since the last sample, as are the next three."""
    failed: int
    excluded: int
    waits: int
    waiting: int
    under_way: int


class Going(msgspec.Struct, frozen=True):
    """An open transfer."""

    op: str
    peers: tuple[str, ...]
    """Names of peers; ids of peers without a name."""
    nbytes: int
    age: float
    """Seconds since the request."""
    posted: bool
    """Whether a part of it was posted; before that it waits for room or for a link."""
    span: str
    """The name of its request, if it has one."""


class EngineRow(msgspec.Struct, frozen=True):
    """One engine since the last sample."""

    pid: int
    host: str
    command: str
    engine: str
    engine_id: str
    going_on: int
    counted_per_s: float
    bytes_per_s: float
    wire_p50: float | None
    """Median seconds of work requests since the last sample, to a power of two; ``None`` without
    any."""
    wire_p99: float | None
    peers: tuple[PeerRow, ...]
    transfers: tuple[Going, ...] = ()
    """Those that go on, the oldest first, at most :data:`OLDEST`."""


def rows(
    before: ProcessMetrics | None, now: ProcessMetrics, under_way: ProcessRecords | None = None
) -> list[EngineRow]:
    """What happened between two looks at a process; with one look only, since its engines opened,
    and rates are 0.

    Args:
        under_way: what it told when asked for :func:`going_on`.
    """
    seconds = (now.at.monotonic - before.at.monotonic) / 1e9 if before else 0.0
    earlier = {engine.id: engine for engine in before.engines} if before else {}
    going = {e.id: _going(e, under_way) for e in under_way.engines} if under_way else {}
    return [
        _engine(now, engine, earlier.get(engine.id), seconds, going.get(engine.id, ()))
        for engine in now.engines
    ]


def going_on(now: ProcessMetrics) -> dict[str, Cursor]:
    """The question for records of what goes on in a process, and of nothing that is over; empty if
    nothing goes on."""
    if not any(engine.going_on for engine in now.engines):
        return {}
    return {engine.id: _NOTHING_OVER for engine in now.engines}


def _rate(grown: float, seconds: float) -> float:
    return grown / seconds if seconds > 0 else 0.0


def _going(engine: EngineRecords, process: ProcessRecords) -> tuple[Going, ...]:
    transfers = sorted((t for t in engine.transfers if not t.over), key=lambda t: t.queued)
    at, spans = process.at.monotonic, process.spans
    return tuple(_one(t, at, engine.peers, spans) for t in transfers[:OLDEST])


def _one(t: TransferRecord, at: int, peers: Mapping[str, str], spans: Mapping[int, str]) -> Going:
    return Going(
        op=t.op,
        peers=tuple(dict.fromkeys(peers.get(part.peer, part.peer) for part in t.parts)),
        nbytes=t.nbytes,
        age=max(0.0, (at - t.queued) / 1e9),
        posted=t.posted is not None,
        span=spans.get(t.span, ""),
    )


def _engine(
    process: ProcessMetrics,
    now: EngineMetrics,
    before: EngineMetrics | None,
    seconds: float,
    transfers: tuple[Going, ...],
) -> EngineRow:
    earlier = {peer.id: peer for peer in before.peers} if before else {}
    # Who is only known and never was reached has nothing to show.
    shown = [peer for peer in now.peers if peer.state != "idle" or peer.rails]
    peers = tuple(_peer(peer, earlier.get(peer.id), seconds) for peer in shown)
    wire = _grown(_wire(now), _wire(before) if before else None)
    return EngineRow(
        pid=process.pid,
        host=process.host,
        command=process.command,
        engine=now.name,
        engine_id=now.id,
        going_on=now.going_on,
        counted_per_s=_rate(now.counted - (before.counted if before else 0), seconds),
        bytes_per_s=sum(peer.bytes_per_s for peer in peers),
        wire_p50=wire.quantile(0.5),
        wire_p99=wire.quantile(0.99),
        peers=peers,
        transfers=transfers,
    )


class _Sums(msgspec.Struct, frozen=True):
    slices: int = 0
    nbytes: int = 0
    again: int = 0
    failed: int = 0
    excluded: int = 0
    waits: int = 0

    def since(self, other: _Sums) -> _Sums:
        return _Sums(*(getattr(self, f) - getattr(other, f) for f in self.__struct_fields__))


def _sums(peer: PeerMetrics) -> _Sums:
    tallies = [tally for rail in peer.rails for tally in rail.tallies]
    return _Sums(
        slices=sum(t.slices for t in tallies),
        nbytes=sum(t.nbytes for t in tallies),
        again=sum(t.again for t in tallies),
        failed=sum(t.failed for t in tallies),
        excluded=sum(rail.excluded for rail in peer.rails),
        waits=sum(peer.waits.get(priority, 0) for priority in CLASSES),
    )


def _peer(now: PeerMetrics, before: PeerMetrics | None, seconds: float) -> PeerRow:
    grown = _sums(now).since(_sums(before) if before else _Sums())
    return PeerRow(
        peer=now.name,
        peer_id=now.id,
        health=_health(now, grown),
        state=now.state,
        transport=now.transport,
        links=now.links,
        bytes_per_s=_rate(grown.nbytes, seconds),
        slices_per_s=_rate(grown.slices, seconds),
        again=grown.again,
        failed=grown.failed,
        excluded=grown.excluded,
        waits=grown.waits,
        waiting=now.waiting,
        under_way=now.under_way,
    )


def _health(peer: PeerMetrics, grown: _Sums) -> Health:
    if peer.state == "lost":
        return "lost"
    if grown.again or grown.failed or grown.excluded:
        return "degraded"
    return "waits" if peer.waiting else "ok"


def _wire(engine: EngineMetrics) -> Histogram:
    every = [stages.wire for rail in engine.rails for stages in rail.stages]
    width = max((len(h.buckets) for h in every), default=0)
    counts = tuple(sum(h.buckets[i] for h in every) for i in range(width))
    return Histogram(counts, sum(h.total for h in every))


def _grown(now: Histogram, before: Histogram | None) -> Histogram:
    if before is None:
        return now
    # A rail that carried nothing before had no buckets.
    earlier = before.buckets + (0,) * (len(now.buckets) - len(before.buckets))
    counts = tuple(a - b for a, b in zip(now.buckets, earlier, strict=True))
    return Histogram(counts, now.total - before.total)
