"""Flights as a Chrome trace, which Perfetto (ui.perfetto.dev) and ``chrome://tracing`` open."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from fabric_ray.observe.joining import Flight, Place
from fabric_ray.observe.process import ProcessRecords

TraceEvent = dict[str, Any]

_T = TypeVar("_T")
# Lanes of what an engine sent, of what it received, and of what happened to its links.
_SENT, _RECEIVED, _EVENTS = 0, 1000, 2000


def trace(processes: Iterable[ProcessRecords], flights: Iterable[Flight]) -> dict[str, Any]:
    """The trace, to be written as JSON. Every engine is a process of it; a transfer and its stages
    lie in one lane of its writer, what its receiver saw in one of the receiver's, and an arrow
    leads from one to the other."""
    processes, flights = list(processes), list(flights)
    pids = _Numbers()
    events: list[TraceEvent] = []
    for engine in sorted({f.writer.engine for f in flights}):
        sent = [f for f in flights if f.writer.engine == engine]
        lanes = _lanes(sent, lambda f: f.queued, _end)
        for lane, flight in lanes:
            events += _sent(flight, pids.of(flight.writer), _SENT + lane)
    arrived = [f for f in flights if f.received]
    for engine in sorted({f.received.at.engine for f in arrived if f.received}):
        here = [f for f in arrived if f.received and f.received.at.engine == engine]
        for lane, flight in _lanes(here, _arrives, _delivered):
            events += _received(flight, pids, _RECEIVED + lane)
    for process in processes:
        events += _link_events(process, pids)
    return {"traceEvents": [*pids.names(), *events], "displayTimeUnit": "ns"}


def _us(ns: int) -> float:
    return ns / 1e3


def _end(flight: Flight) -> int:
    moments = (flight.notified, flight.wire, flight.all_posted, flight.posted, flight.queued)
    return max(moment for moment in moments if moment is not None)


def _arrives(flight: Flight) -> int:
    assert flight.received
    return flight.received.first


def _delivered(flight: Flight) -> int:
    assert flight.received
    return max(flight.received.delivered or 0, flight.received.last)


def _span(name: str, pid: int, tid: int, begin: int, end: int, **args: object) -> TraceEvent:
    return {
        "ph": "X",
        "name": name,
        "cat": "transfer",
        "pid": pid,
        "tid": tid,
        "ts": _us(begin),
        "dur": _us(max(end - begin, 1)),
        "args": args,
    }


def _sent(flight: Flight, pid: int, tid: int) -> Iterator[TraceEvent]:
    title = f"{flight.op} to {flight.peer_name or flight.peer[:8]}"
    yield _span(
        title,
        pid,
        tid,
        flight.queued,
        _end(flight),
        id=flight.id,
        bytes=flight.nbytes,
        priority=flight.priority,
        rails=", ".join(flight.rails),
        slices=flight.slices,
        again=flight.again,
        waits=flight.waits,
        span=f"{flight.span:016x}",
        failure=flight.failure,
        over=flight.over,
    )
    moments = (flight.queued, flight.posted, flight.all_posted, flight.wire, flight.notified)
    for name, begin, end in zip(
        ("queue", "post", "wire", "deliver"), moments, moments[1:], strict=False
    ):
        if begin is not None and end is not None and end > begin:
            yield _span(name, pid, tid, begin, end)
    if flight.received:
        yield _arrow("s", flight, pid, tid, flight.posted or flight.queued)


def _received(flight: Flight, pids: _Numbers, tid: int) -> Iterator[TraceEvent]:
    received = flight.received
    assert received
    pid = pids.of(received.at)
    yield _span(
        f"{flight.op} from {flight.writer.name}",
        pid,
        tid,
        received.first,
        _delivered(flight),
        id=flight.id,
        bytes=flight.nbytes,
        counts=flight.counts,
        exact=received.exact,
        span=f"{received.span:016x}",
    )
    yield _arrow("f", flight, pid, tid, received.first)


def _arrow(phase: str, flight: Flight, pid: int, tid: int, at: int) -> TraceEvent:
    event: TraceEvent = {
        "ph": phase,
        "name": "transfer",
        "cat": "transfer",
        # One transfer may have parts for several peers.
        "id": f"{flight.writer.engine[:8]}-{flight.id}-{flight.peer[:8]}",
        "pid": pid,
        "tid": tid,
        "ts": _us(at),
    }
    return event | {"bp": "e"} if phase == "f" else event


def _link_events(process: ProcessRecords, pids: _Numbers) -> Iterator[TraceEvent]:
    offset = process.at.wall - process.at.monotonic
    for engine in process.engines:
        place = Place(engine.id, engine.name, process.pid, process.host)
        for event in engine.events:
            peer = engine.peers.get(event.peer, event.peer[:8])
            yield {
                "ph": "i",
                "s": "p",
                "name": f"{event.kind}: {peer}",
                "cat": "link",
                "pid": pids.of(place),
                "tid": _EVENTS,
                "ts": _us(event.at + offset),
                "args": {"cause": event.cause, "rail": event.rail},
            }


def _lanes(
    items: Iterable[_T], begin: Callable[[_T], int], end: Callable[[_T], int]
) -> Iterator[tuple[int, _T]]:
    """Lays what overlaps into different lanes, as few as there can be."""
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    lanes = 0
    for item in sorted(items, key=begin):
        while busy and busy[0][0] <= begin(item):
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, lanes = lanes, lanes + 1
        heapq.heappush(busy, (max(end(item), begin(item) + 1), lane))
        yield lane, item


class _Numbers:
    """Numbers for engines: two of one process are two rows."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, Place]] = {}

    def of(self, place: Place) -> int:
        return self._known.setdefault(place.engine, (len(self._known) + 1, place))[0]

    def names(self) -> Iterator[TraceEvent]:
        for number, place in self._known.values():
            name = f"{place.name} ({place.host}, pid {place.pid})"
            yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}
