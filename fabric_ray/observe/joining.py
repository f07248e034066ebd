"""Both ends of transfers, joined: what a writer recorded with what its receiver counted.

Nothing on the wire names a transfer. What both ends know is the counter: its owner, its slot and
its generation. So the writes that name a counter, in the order in which they were posted, are laid
beside the counts that arrived there. Where two of them were under way at once, which count is whose
can't be told apart, and they are taken in their order: ``exact`` says whether it was so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import inf

import msgspec

from fabric_ray import _native
from fabric_ray.engine import EngineRecords
from fabric_ray.engine.observability import Arrival, Expected, Part, TransferRecord
from fabric_ray.observe.process import ProcessRecords

# How far the wall clocks of two hosts of one site may be apart. Processes of one boot need nothing:
# they share a clock, read before a write is posted and after a poll has found its count.
_HOST_SKEW_NS = 50_000


class Place(msgspec.Struct, frozen=True):
    """An engine, and where it runs."""

    engine: str
    name: str
    pid: int
    host: str


class Received(msgspec.Struct, frozen=True):
    """What the other end saw of a transfer. Times are nanoseconds since 1970."""

    at: Place
    first: int
    """The first of its writes was counted."""
    last: int
    """The last of them was: all bytes were readable."""
    delivered: int | None
    """The waiting caller was notified."""
    span: int
    """Of the request that expected them; 0 for none."""
    exact: bool
    """No other write to the same counter that was recorded was under way at the same time, and none
    was left out of the records as a sample."""


class Flight(msgspec.Struct, frozen=True):
    """One part of one transfer, seen from both ends. Times are nanoseconds since 1970."""

    writer: Place
    id: int
    op: str
    priority: str
    span: int
    peer: str
    """The other engine's id, and its name as the writer knows it."""
    peer_name: str
    nbytes: int
    counts: int
    queued: int
    posted: int | None
    all_posted: int | None
    wire: int | None
    notified: int | None
    rails: tuple[str, ...]
    """``verbs mlx5_0``, ``shm``."""
    slices: int
    again: int
    waits: int
    over: bool
    weight: int
    failure: str | None
    received: Received | None
    """None where nothing counts, or where the receiver's records weren't at hand or had no room."""


class _End(msgspec.Struct, frozen=True, eq=False):
    """An engine's records, and how far its clock is from 1970."""

    place: Place
    records: EngineRecords
    boot: str
    offset: int

    def wall(self, at: int | None) -> int | None:
        return None if at is None else at + self.offset


class _Claim(msgspec.Struct):
    """A write that is to be counted by a counter."""

    writer: _End
    record: TransferRecord
    part: Part
    index: int


def join(processes: Iterable[ProcessRecords]) -> list[Flight]:
    """All transfers of some processes, oldest first; one with parts for several counters or peers
    is as many."""
    ends = {end.records.id: end for end in _ends(processes)}
    claims: dict[tuple[str, int], list[_Claim]] = defaultdict(list)
    every: list[_Claim] = []
    for end in ends.values():
        for record in end.records.transfers:
            for index, part in enumerate(record.parts):
                claim = _Claim(end, record, part, index)
                every.append(claim)
                if part.counts and record.posted is not None:
                    claims[part.peer, part.imm].append(claim)
    received: dict[int, Received] = {}
    for (owner, imm), of_counter in claims.items():
        if owner in ends:
            received |= _received(ends[owner], imm, of_counter)
    flights = [_flight(claim, received.get(id(claim))) for claim in every]
    return sorted(flights, key=lambda flight: (flight.queued, flight.id))


def _ends(processes: Iterable[ProcessRecords]) -> Iterator[_End]:
    offsets: dict[str, int] = {}
    for process in processes:
        # Processes of one boot have one clock, and so must have one offset.
        offset = offsets.setdefault(process.at.boot, process.at.wall - process.at.monotonic)
        for records in process.engines:
            place = Place(records.id, records.name, process.pid, process.host)
            yield _End(place, records, process.at.boot, offset)


def _received(owner: _End, imm: int, claims: list[_Claim]) -> dict[int, Received]:
    """By claim, what a counter's owner saw."""

    def posted(claim: _Claim) -> int:
        return (claim.record.posted or 0) + claim.writer.offset

    def done(claim: _Claim) -> int:
        return (claim.record.all_posted or 0) + claim.writer.offset

    def wire(claim: _Claim) -> int:
        return (claim.record.wire or 0) + claim.writer.offset

    def skew(claim: _Claim) -> int:
        return _HOST_SKEW_NS if claim.writer.boot != owner.boot else 0

    def earliest(claim: _Claim) -> int:
        return posted(claim) - skew(claim)

    claims.sort(key=lambda claim: (done(claim), claim.record.id, claim.index))
    arrivals = _Arrivals([a for a in owner.records.arrivals if a.imm == imm], owner.offset)
    waits = [e for e in owner.records.expectations if e.imm == imm and e.failure is None]
    spans = [arrivals.take(c.part.counts, not_before=earliest(c)) for c in claims]
    ends = [
        max(span[1], wire(c) + skew(c)) if span else inf
        for c, span in zip(claims, spans, strict=True)
    ]
    met = _overlapping([(earliest(c), end) for c, end in zip(claims, ends, strict=True)])
    sampled = any(claim.record.weight > 1 for claim in claims)
    found: dict[int, Received] = {}
    for claim, span, overlaps in zip(claims, spans, met, strict=True):
        if span is None:
            continue
        first, last = span
        wait = _expectation(waits, last - owner.offset)
        found[id(claim)] = Received(
            at=owner.place,
            first=first,
            last=last,
            delivered=owner.wall(wait.notified) if wait else None,
            span=wait.span if wait else 0,
            exact=not overlaps and not sampled,
        )
    return found


class _Arrivals:
    """The counts of one counter, to be taken in their order."""

    def __init__(self, arrivals: list[Arrival], offset: int) -> None:
        self._left = [(arrival.at + offset, arrival.counts) for arrival in arrivals]
        self._at = 0

    def take(self, counts: int, not_before: int) -> tuple[int, int] | None:
        """When the first and the last of so many counts arrived. Counts before ``not_before`` are
        skipped: they belong to writes without a record."""
        while self._at < len(self._left) and self._left[self._at][0] < not_before:
            self._at += 1
        first = last = None
        while counts > 0 and self._at < len(self._left):
            at, here = self._left[self._at]
            taken = min(here, counts)
            first, last = (at if first is None else first), at
            counts -= taken
            self._left[self._at] = (at, here - taken)
            if here == taken:
                self._at += 1
        return (first, last) if first is not None and last is not None and counts == 0 else None


def _overlapping(intervals: Sequence[tuple[int, float]]) -> list[bool]:
    """Which of these have a moment in common with another one."""
    overlaps = [False] * len(intervals)
    last = None
    for i in sorted(range(len(intervals)), key=lambda i: intervals[i]):
        begin, end = intervals[i]
        if last is not None and begin <= intervals[last][1]:
            overlaps[i] = overlaps[last] = True
        if last is None or end > intervals[last][1]:
            last = i
    return overlaps


def _expectation(waits: list[Expected], counted: int) -> Expected | None:
    """The one that was met with what was counted then, or next."""
    later = (wait for wait in waits if wait.notified >= counted)
    return min(later, key=lambda wait: wait.notified, default=None)


def _flight(claim: _Claim, received: Received | None) -> Flight:
    record, part, writer = claim.record, claim.part, claim.writer
    rails = writer.records.rails
    return Flight(
        writer=writer.place,
        id=record.id,
        op=record.op,
        priority=record.priority,
        span=record.span,
        peer=part.peer,
        peer_name=writer.records.peers.get(part.peer, ""),
        nbytes=part.nbytes,
        counts=part.counts,
        queued=record.queued + writer.offset,
        posted=writer.wall(record.posted),
        all_posted=writer.wall(record.all_posted),
        wire=writer.wall(record.wire),
        notified=writer.wall(record.notified),
        rails=tuple(" ".join(filter(None, rails[i])) for i in record.rails if i < len(rails)),
        slices=record.slices,
        again=record.again,
        waits=record.waits,
        over=record.over,
        weight=record.weight,
        failure=record.failure,
        received=received,
    )


def story(flights: Iterable[Flight], request: str | int) -> list[Flight]:
    """What was done for one request: what it asked for itself, and what others wrote to the
    counters that it waited on.

    Args:
        request: as :func:`fabric_ray.observe.span` named it, or the number that it yielded.
    """
    span = _native.span_of(request) if isinstance(request, str) else request
    return [
        flight
        for flight in flights
        if flight.span == span or (flight.received and flight.received.span == span)
    ]
