"""An engine's metrics, and the records of its flight recorder.

Times are nanoseconds of the machine's monotonic clock (``time.monotonic_ns``).
"""

from __future__ import annotations

from heapq import nsmallest
from typing import Any, Literal

import msgspec

Class = Literal["latency", "bulk", "background"]

CLASSES: tuple[Class, ...] = ("latency", "bulk", "background")


class Histogram(msgspec.Struct, frozen=True):
    """Durations, in buckets of powers of two."""

    buckets: tuple[int, ...]
    """Bucket ``i`` counts durations in ``[2**(i-1), 2**i)`` ns; the last has no upper bound."""
    total: int
    """Sum in nanoseconds."""

    @property
    def count(self) -> int:
        return sum(self.buckets)

    def quantile(self, q: float) -> float | None:
        """The quantile in seconds, rounded up to a power of two ns; ``None`` without values."""
        left = q * self.count
        if not self.count:
            return None
        for i, n in enumerate(self.buckets):
            left -= n
            if left <= 0:
                return (1 << i) / 1e9
        return (1 << len(self.buckets)) / 1e9


class Stages(msgspec.Struct, frozen=True):
    """Durations of transfer stages, of one priority class on one rail."""

    priority: Class
    queue: Histogram
    """From the request to its first work request."""
    post: Histogram
    """From the first work request to the last."""
    wire: Histogram
    """From posting a work request until its acknowledgement."""
    deliver: Histogram
    """From the last acknowledgement until the waiter was notified."""


class RailMetrics(msgspec.Struct, frozen=True):
    """One NIC, or one transport within this host."""

    transport: str
    device: str
    """The NIC; empty where there is none."""
    window: int
    """Limit of bytes in flight."""
    under_way: int
    stages: tuple[Stages, ...]
    """By class, of the classes that it has carried."""


class Tally(msgspec.Struct, frozen=True):
    """Work requests of one class over one rail to one peer."""

    priority: Class
    slices: int
    nbytes: int
    again: int
    """Slices that were retransmitted."""
    failed: int


class PeerRail(msgspec.Struct, frozen=True):
    """Traffic over one rail to one peer."""

    rail: int
    """Index among the engine's rails."""
    excluded: int
    """Number of links over it that were lost or closed."""
    tallies: tuple[Tally, ...]


class PeerMetrics(msgspec.Struct, frozen=True):
    """One peer."""

    id: str
    name: str
    state: Literal["idle", "connecting", "up", "lost"]
    transport: str | None
    links: int
    waiting: int
    """Operations that wait for a window."""
    under_way: int
    """Bytes in flight to it that count against its window."""
    waits: dict[Class, int]
    """Operations that had to wait for a window of a rail or of the peer."""
    rails: tuple[PeerRail, ...]


class EngineMetrics(msgspec.Struct, frozen=True):
    """An engine's counts since it was opened."""

    id: str
    name: str
    counted: int
    """Writes that arrived and were counted."""
    ghosts: int
    """Immediates of an earlier use of their counter: not counted."""
    regions: int
    retiring: int
    """Regions that are being deregistered."""
    going_on: int
    """Requests that are not complete."""
    expected: Histogram
    """Durations of expectations until they were fulfilled."""
    rails: tuple[RailMetrics, ...]
    peers: tuple[PeerMetrics, ...]


class Part(msgspec.Struct, frozen=True):
    """The part of a transfer that went to one counter of one peer."""

    peer: str
    """The peer's id."""
    imm: int
    """The counter's value on the wire, with its generation."""
    counts: int
    """Writes that it counts there; 0 without a counter."""
    nbytes: int


class TransferRecord(msgspec.Struct, frozen=True):
    """One request of the engine that recorded it."""

    id: int
    op: str
    priority: Class
    span: int
    """Id of its span, see :func:`fabric_ray.observe.span`; 0 without one."""
    queued: int
    """When the engine got the request."""
    posted: int | None
    """When its first work request was posted."""
    all_posted: int | None
    """When its last work request was posted."""
    wire: int | None
    """When its last work request was acknowledged."""
    notified: int | None
    """When the waiter was notified of the result."""
    parts: tuple[Part, ...]
    parts_lost: int
    """Parts that the recorder dropped."""
    slices: int
    again: int
    """Work requests that were retransmitted after a link was lost."""
    waits: int
    """Number of waits for a window."""
    rails: tuple[int, ...]
    """Rails that carried parts of it."""
    over: bool
    """Whether it is complete."""
    weight: int
    """Number of transfers that this sample represents."""
    failure: str | None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class Arrival(msgspec.Struct, frozen=True):
    """Counted writes; their bytes are readable from ``at`` on."""

    at: int
    rail: int
    imm: int
    counts: int


class Expected(msgspec.Struct, frozen=True):
    """A completed expectation."""

    imm: int
    counts: int
    span: int
    begun: int
    notified: int
    failure: str | None


class Event(msgspec.Struct, frozen=True):
    """A change of the path to a peer."""

    at: int
    kind: Literal["link up", "link down", "stalled", "peer lost"]
    peer: str
    rail: int | None
    cause: str


Cursor = tuple[int, int, int, int]


class EngineRecords(msgspec.Struct, frozen=True):
    """The contents of an engine's flight recorder."""

    id: str
    name: str
    cursor: Cursor
    """Pass it to the next call."""
    missed: int
    """Records that were overwritten before they were read."""
    peers: dict[str, str]
    """Names by id."""
    rails: tuple[tuple[str, str], ...]
    """Transports and NICs."""
    transfers: tuple[TransferRecord, ...]
    """Complete transfers, then incomplete ones."""
    arrivals: tuple[Arrival, ...]
    expectations: tuple[Expected, ...]
    events: tuple[Event, ...]


def metrics_of(name: str, id: str, raw: dict[str, Any]) -> EngineMetrics:
    """Metrics from the native core's tuples."""
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
    """Records from the native core's tuples; peers by id. Of incomplete transfers, only the
    ``oldest`` if given."""
    ids = [peer for peer, _ in raw["peers"]]
    transfers = raw["transfers"] if oldest is None else _shortened(raw["transfers"], oldest)
    return EngineRecords(
        id=id,
        name=name,
        cursor=raw["cursor"],
        missed=raw["missed"],
        # Unused peer slots have no name.
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
    queued, posted, all_posted, wire, notified = moments
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
        notified=notified,
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
