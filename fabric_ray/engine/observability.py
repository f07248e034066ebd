"""What an engine tells of its work: numbers, and the flight recorder's records.

Times are nanoseconds of the machine's monotonic clock (``time.monotonic_ns``).
"""

from __future__ import annotations

from heapq import nsmallest
from typing import Any, Literal

import msgspec

Class = Literal["latency", "bulk", "background"]

CLASSES: tuple[Class, ...] = ("latency", "bulk", "background")


class Histogram(msgspec.Struct, frozen=True):
    """Durations by powers of two."""

    buckets: tuple[int, ...]
    """Bucket ``i`` counts those below ``2**i`` ns that no lower one does; the last has no bound."""
    total: int
    """Nanoseconds of all together."""

    @property
    def count(self) -> int:
        return sum(self.buckets)

    def quantile(self, q: float) -> float | None:
        """Seconds that so large a part of them took at most, to a power of two; None of none."""
        left = q * self.count
        if not self.count:
            return None
        for i, n in enumerate(self.buckets):
            left -= n
            if left <= 0:
                return (1 << i) / 1e9
        return (1 << len(self.buckets)) / 1e9


class Stages(msgspec.Struct, frozen=True):
    """How long the stages of transfers of one class took that one rail carried, or carried last."""

    priority: Class
    queue: Histogram
    """From the request to its first work request."""
    post: Histogram
    """From the first work request to the last."""
    wire: Histogram
    """Of a work request, until it was acknowledged."""
    deliver: Histogram
    """From the last acknowledgement until whoever waits was told."""


class RailMetrics(msgspec.Struct, frozen=True):
    """One NIC, or one transport within this host."""

    transport: str
    device: str
    """The NIC; empty where there is none."""
    window: int
    """Bytes that may be under way over it at a time."""
    under_way: int
    stages: tuple[Stages, ...]
    """Of the classes that it has carried."""


class Tally(msgspec.Struct, frozen=True):
    """Work requests of one class over one rail to one peer."""

    priority: Class
    slices: int
    nbytes: int
    again: int
    """Of the slices, those that were sent before."""
    failed: int


class PeerRail(msgspec.Struct, frozen=True):
    """What went over one rail to one peer."""

    rail: int
    """Its place among the engine's rails."""
    excluded: int
    """How often a link over it was lost or given up."""
    tallies: tuple[Tally, ...]


class PeerMetrics(msgspec.Struct, frozen=True):
    """One peer."""

    id: str
    name: str
    state: Literal["idle", "connecting", "up", "lost"]
    transport: str | None
    links: int
    waiting: int
    """Operations that wait for room."""
    under_way: int
    """Bytes under way to it, as far as they are limited."""
    waits: dict[Class, int]
    """Operations that found no room in a window of a rail or of the peer."""
    rails: tuple[PeerRail, ...]


class EngineMetrics(msgspec.Struct, frozen=True):
    """All that an engine counts, since it was opened."""

    id: str
    name: str
    counted: int
    """Writes that arrived here and were counted."""
    ghosts: int
    """Immediates of an earlier use of their counter: not counted."""
    regions: int
    retiring: int
    """Regions whose deregistration isn't over."""
    going_on: int
    """Requests that are not over."""
    expected: Histogram
    """How long expectations waited until they were full."""
    rails: tuple[RailMetrics, ...]
    peers: tuple[PeerMetrics, ...]


class Part(msgspec.Struct, frozen=True):
    """What of a transfer went to one counter of one peer."""

    peer: str
    """The peer's id."""
    imm: int
    """The counter's value on the wire, with its generation."""
    counts: int
    """How many writes it is to count there; 0 where nothing counts."""
    nbytes: int


class TransferRecord(msgspec.Struct, frozen=True):
    """One request of the engine that recorded it."""

    id: int
    op: str
    priority: Class
    span: int
    """Of the request that it was made for, see :func:`fabric_ray.observe.span`; 0 for none."""
    queued: int
    """The engine was asked."""
    posted: int | None
    """Its first work request was given to a link."""
    all_posted: int | None
    """The latest of them was."""
    wire: int | None
    """The latest of them was acknowledged."""
    told: int | None
    """Whoever waits was told its result."""
    parts: tuple[Part, ...]
    parts_lost: int
    """Parts that are no longer known."""
    slices: int
    again: int
    """Work requests that were sent before, over a link that was lost."""
    waits: int
    """How often it found no room in a window."""
    rails: tuple[int, ...]
    """Those that carried some of it."""
    over: bool
    """Nothing of it is under way."""
    weight: int
    """How many transfers like it this one stands for."""
    failure: str | None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class Arrival(msgspec.Struct, frozen=True):
    """Writes that were counted: their bytes are readable from then on."""

    at: int
    rail: int
    imm: int
    counts: int


class Expected(msgspec.Struct, frozen=True):
    """A wait for counts that is over."""

    imm: int
    counts: int
    span: int
    begun: int
    told: int
    failure: str | None


class Event(msgspec.Struct, frozen=True):
    """Something that happened to the way to a peer."""

    at: int
    kind: Literal["link up", "link down", "stalled", "peer lost"]
    peer: str
    rail: int | None
    cause: str


Cursor = tuple[int, int, int, int]


class EngineRecords(msgspec.Struct, frozen=True):
    """What the flight recorder of an engine has."""

    id: str
    name: str
    cursor: Cursor
    """To be given when asking again."""
    missed: int
    """Records that were written over before they were read."""
    peers: dict[str, str]
    """Names by id."""
    rails: tuple[tuple[str, str], ...]
    """Transports and NICs."""
    transfers: tuple[TransferRecord, ...]
    """Those that are over, then those that are not."""
    arrivals: tuple[Arrival, ...]
    expectations: tuple[Expected, ...]
    events: tuple[Event, ...]


def metrics_of(name: str, id: str, raw: dict[str, Any]) -> EngineMetrics:
    """What the native core tells, with names."""
    plain = ("counted", "ghosts", "regions", "retiring", "going_on")
    return EngineMetrics(
        id=id,
        name=name,
        expected=_histogram(raw["expected"]),
        rails=tuple(map(_rail, raw["rails"])),
        peers=tuple(map(_peer, raw["peers"])),
        **{what: raw[what] for what in plain},
    )


def records_of(name: str, id: str, raw: dict[str, Any], oldest: int | None = None) -> EngineRecords:
    """What the native core tells, with names; peers by their ids. Of the transfers that are not
    over all, or the ``oldest`` so many."""
    ids = [peer for peer, _ in raw["peers"]]
    transfers = raw["transfers"] if oldest is None else _shortened(raw["transfers"], oldest)
    return EngineRecords(
        id=id,
        name=name,
        cursor=raw["cursor"],
        missed=raw["missed"],
        # Places that nobody has any more have no name.
        peers={peer: name for peer, name in raw["peers"] if name},
        rails=tuple(raw["rails"]),
        transfers=tuple(_transfer(ids, t) for t in transfers),
        arrivals=tuple(Arrival(*a) for a in raw["arrivals"]),
        expectations=tuple(Expected(*e) for e in raw["expectations"]),
        events=tuple(_event(ids, e) for e in raw["events"]),
    )


def _shortened(raw: list[tuple[Any, ...]], oldest: int) -> list[tuple[Any, ...]]:
    going_on: list[tuple[Any, ...]] = []
    over: list[tuple[Any, ...]] = []
    for transfer in raw:
        (over if _is_over(transfer) else going_on).append(transfer)
    return over + nsmallest(oldest, going_on, key=_queued)


def _histogram(raw: tuple[list[int], int]) -> Histogram:
    return Histogram(tuple(raw[0]), raw[1])


def _rail(raw: tuple[Any, ...]) -> RailMetrics:
    transport, device, window, under_way, stages = raw
    of_class = (Stages(priority, *map(_histogram, each)) for priority, *each in stages)
    return RailMetrics(transport, device, window, under_way, tuple(of_class))


def _peer(raw: tuple[Any, ...]) -> PeerMetrics:
    id, name, state, transport, links, waiting, under_way, waits, rails = raw
    tallies = (
        PeerRail(rail, excluded, tuple(Tally(*tally) for tally in each))
        for rail, excluded, each in rails
    )
    return PeerMetrics(
        id, name, state, transport, links, waiting, under_way, dict(waits), tuple(tallies)
    )


def _queued(raw: tuple[Any, ...]) -> int:
    _, moments, _, _, _, _ = raw
    return int(moments[0])


def _is_over(raw: tuple[Any, ...]) -> bool:
    _, _, _, _, (_, _, _, _, over, _), _ = raw
    return bool(over)


def _transfer(ids: list[str], raw: tuple[Any, ...]) -> TransferRecord:
    (id, op, priority, span), moments, parts, parts_lost, how, failure = raw
    queued, posted, all_posted, wire, told = moments
    slices, again, waits, rails, over, weight = how
    return TransferRecord(
        id=id,
        op=op,
        priority=priority,
        span=span,
        queued=queued,
        posted=posted,
        all_posted=all_posted,
        wire=wire,
        told=told,
        parts=tuple(Part(ids[peer], *rest) for peer, *rest in parts),
        parts_lost=parts_lost,
        slices=slices,
        again=again,
        waits=waits,
        rails=tuple(i for i in range(32) if rails >> i & 1),
        over=over,
        weight=weight,
        failure=failure,
    )


def _event(ids: list[str], raw: tuple[Any, ...]) -> Event:
    at, kind, peer, rail, cause = raw
    return Event(at, kind, ids[peer], rail, cause)
