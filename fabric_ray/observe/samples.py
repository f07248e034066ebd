"""Metrics by one rule: ``fabric_ray_<what>[_<unit>][_total]``, the unit a base unit in full (bytes,
seconds), ``_total`` on what only grows; labels name the engine first, then the rail or the peer,
then the class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from fabric_ray.engine import EngineMetrics
from fabric_ray.engine.observability import Histogram

Kind = Literal["counter", "gauge", "histogram"]

_ENGINE = ("engine", "engine_id")
_RAIL = (*_ENGINE, "transport", "device")
_PEER = (*_ENGINE, "peer", "peer_id")
_TO = (*_PEER, "transport", "device", "priority")


class Family(msgspec.Struct, frozen=True):
    """One metric."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]


class Sample(msgspec.Struct, frozen=True):
    """One value of a metric, with the labels of its family in their order."""

    family: Family
    labels: tuple[str, ...]
    value: float | Histogram


_STAGES = {
    "queue": "from a request to its first work request",
    "post": "from a request's first work request to its last",
    "wire": "until a work request was acknowledged",
    "deliver": "from the last acknowledgement until the waiting caller was notified",
}


FAMILIES: list[Family] = []
"""All metrics of engines, in the order in which they are told."""


def _family(name: str, kind: Kind, help: str, labels: tuple[str, ...]) -> Family:
    family = Family(f"fabric_ray_{name}", kind, help, labels)
    FAMILIES.append(family)
    return family


COUNTED = _family("writes_counted_total", "counter", "Writes counted on arrival.", _ENGINE)
GHOSTS = _family(
    "ghosts_total", "counter", "Immediates of an earlier use of their counter, dropped.", _ENGINE
)
REGIONS = _family("regions", "gauge", "Registered regions.", _ENGINE)
RETIRING = _family("regions_retiring", "gauge", "Regions whose end isn't proven yet.", _ENGINE)
GOING_ON = _family("requests_going_on", "gauge", "Requests that are not over.", _ENGINE)
EXPECTED = _family("expectation_seconds", "histogram", "Until an expectation was full.", _ENGINE)
WINDOW = _family("rail_window_bytes", "gauge", "Bytes that may be under way.", _RAIL)
UNDER_WAY = _family("rail_under_way_bytes", "gauge", "Bytes that are under way.", _RAIL)
STAGE = {
    stage: _family(
        f"transfer_{stage}_seconds", "histogram", f"Seconds {what}.", (*_RAIL, "priority")
    )
    for stage, what in _STAGES.items()
}
LINKS = _family("peer_links", "gauge", "Links to a peer that are up.", _PEER)
PEER_UP = _family("peer_up", "gauge", "1 if a peer is connected, 0 if not.", _PEER)
WAITING = _family("peer_waiting", "gauge", "Operations that wait for room.", _PEER)
WAITS = _family(
    "quota_waits_total", "counter", "Operations that found no room.", (*_PEER, "priority")
)
EXCLUDED = _family(
    "exclusions_total",
    "counter",
    "Times that a link was lost or given up.",
    (*_PEER, "transport", "device"),
)
SLICES = _family("slices_total", "counter", "Work requests posted.", _TO)
BYTES = _family("bytes_total", "counter", "Bytes posted.", _TO)
RETRIES = _family("retries_total", "counter", "Work requests sent again.", _TO)
FAILURES = _family("failures_total", "counter", "Work requests that failed.", _TO)


def samples(engines: Iterable[EngineMetrics]) -> list[Sample]:
    """All values of some engines, family by family."""
    found = [sample for engine in engines for sample in _of_engine(engine)]
    order = {family.name: i for i, family in enumerate(FAMILIES)}
    return sorted(found, key=lambda sample: order[sample.family.name])


def _of_engine(engine: EngineMetrics) -> Iterator[Sample]:
    me = (engine.name, engine.id)
    for family, value in (
        (COUNTED, engine.counted),
        (GHOSTS, engine.ghosts),
        (REGIONS, engine.regions),
        (RETIRING, engine.retiring),
        (GOING_ON, engine.going_on),
        (EXPECTED, engine.expected),
    ):
        yield Sample(family, me, value)
    for rail in engine.rails:
        labels = (*me, rail.transport, rail.device)
        yield Sample(WINDOW, labels, rail.window)
        yield Sample(UNDER_WAY, labels, rail.under_way)
        for stages in rail.stages:
            for stage, family in STAGE.items():
                yield Sample(family, (*labels, stages.priority), getattr(stages, stage))
    yield from _of_peers(engine, me)


def _of_peers(engine: EngineMetrics, me: tuple[str, str]) -> Iterator[Sample]:
    for peer in engine.peers:
        them = (*me, peer.name, peer.id)
        yield Sample(LINKS, them, peer.links)
        yield Sample(PEER_UP, them, int(peer.state == "up"))
        yield Sample(WAITING, them, peer.waiting)
        for priority, waits in peer.waits.items():
            yield Sample(WAITS, (*them, priority), waits)
        for part in peer.rails:
            rail = engine.rails[part.rail]
            way = (*them, rail.transport, rail.device)
            if part.tallies or part.excluded:
                yield Sample(EXCLUDED, way, part.excluded)
            for tally in part.tallies:
                labels = (*way, tally.priority)
                yield Sample(SLICES, labels, tally.slices)
                yield Sample(BYTES, labels, tally.nbytes)
                yield Sample(RETRIES, labels, tally.again)
                yield Sample(FAILURES, labels, tally.failed)
