"""What an engine says of its work is what it did."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fabric_ray import TransferEngine, errors, pages
from fabric_ray.engine.observability import EngineRecords, TransferRecord, records_of
from fabric_ray.observe import span

Pair = tuple[TransferEngine, TransferEngine]
Open = Callable[..., TransferEngine]


def latest(records: EngineRecords, op: str) -> TransferRecord:
    return next(t for t in reversed(records.transfers) if t.op == op)


def test_a_write_has_all_its_moments_in_order(pair: Pair) -> None:
    a, b = pair
    inbox, counter = b.alloc(1 << 20), b.counter()
    there = a.import_region(inbox.descriptor())
    a.write(a.alloc(1 << 20), there, imm=counter.ref).wait(10)
    counter.wait(1, timeout=10)
    record = latest(a.records(), "write")
    moments = [record.queued, record.posted, record.all_posted, record.wire, record.notified]
    assert all(m is not None for m in moments)
    assert moments == sorted(m for m in moments if m is not None)
    assert record.over
    assert record.failure is None
    [part] = record.parts
    assert (part.peer, part.counts, part.nbytes) == (b.id, 1, 1 << 20)
    arrived = [x for x in b.records().arrivals if x.imm == part.imm]
    assert sum(x.counts for x in arrived) == 1
    [met] = b.records().expectations
    assert (met.imm, met.counts, met.failure) == (part.imm, 1, None)
    assert met.begun <= met.notified
    assert arrived[0].at <= met.notified


def test_pages_and_scatters_say_what_went_where(pair: Pair, open_engine: Open) -> None:
    a, b = pair
    c = open_engine("c", transport=a.config.transport)
    src = a.alloc(1 << 16)
    inboxes = [e.alloc(1 << 16) for e in (b, c)]
    targets = [a.import_region(inbox.descriptor()) for inbox in inboxes]
    a.write_pages(
        1024, src, pages(range(64), stride=1024), targets[0], pages(range(64), stride=1024), imm=7
    ).wait(10)
    a.scatter(src, [(t, 0, 0, 4096) for t in targets], imm=8).wait(10)
    records = a.records()
    [part] = latest(records, "paged write").parts
    assert (part.counts, part.nbytes) == (64, 65536)
    parts = latest(records, "scatter").parts
    assert [(p.peer, p.counts, p.nbytes) for p in parts] == [(b.id, 1, 4096), (c.id, 1, 4096)]
    assert records.peers[b.id] == "b"


def test_slots_without_a_peer_are_not_listed() -> None:
    empty = dict.fromkeys(("rails", "transfers", "arrivals", "expectations", "events"), ())
    peers = (("0" * 32, ""), ("7" * 32, "b"))
    raw = {**empty, "peers": peers, "cursor": (0, 0, 0, 0), "missed": 0}
    records = records_of("a", "1" * 32, raw)
    assert records.peers == {"7" * 32: "b"}


def test_records_after_a_cursor_are_only_the_new_ones(pair: Pair) -> None:
    a, b = pair
    inbox = b.alloc(1 << 16)
    there = a.import_region(inbox.descriptor())
    src = a.alloc(1 << 16)
    a.write(src, there).wait(10)
    first = a.records()
    a.write(src, there).wait(10)
    second = a.records(first.cursor)
    assert [t.op for t in first.transfers] == ["write"]
    assert [t.id for t in second.transfers] == [first.transfers[-1].id + 1]
    assert second.missed == 0
    assert a.records(second.cursor).transfers == ()


def test_what_failed_says_why_and_what_goes_on_is_shown(open_engine: Open) -> None:
    a, b = open_engine("a", transport="tcp"), open_engine("b", transport="tcp")
    inbox = b.alloc(64)
    there = a.import_region(inbox.descriptor())
    a.write(a.alloc(64), there).wait(10)
    waiting = a.send(there.peer, b"x", timeout=30)
    open_ones = [t for t in a.records().transfers if not t.over]
    assert [t.op for t in open_ones] == ["send"]
    assert open_ones[0].notified is None
    waiting.cancel()
    with pytest.raises(errors.Cancelled):
        waiting.wait(10)
    assert "cancelled" in (latest(a.records(), "send").failure or "")


def test_a_span_marks_what_is_done_within_it_and_nothing_else(pair: Pair) -> None:
    a, b = pair
    inbox, counter = b.alloc(64), b.counter()
    there = a.import_region(inbox.descriptor())
    src = a.alloc(64)
    with span("request 17") as number:
        waits = counter.expect(1)
        a.write(src, there, imm=counter.ref).wait(10)
        with span("inner") as inner:
            a.write(src, there, imm=counter.ref).wait(10)
    a.write(a.alloc(1 << 16)[:64], there, imm=counter.ref).wait(10)
    waits.wait(10)
    spans = [t.span for t in a.records().transfers if t.op == "write"]
    # Small writes without a name may be left out.
    assert spans[:2] == [number, inner]
    assert set(spans[2:]) <= {0}
    assert [e.span for e in b.records().expectations] == [number]


def test_metrics_count_what_was_moved(pair: Pair) -> None:
    a, b = pair
    inbox = b.alloc(1 << 20)
    there = a.import_region(inbox.descriptor())
    for _ in range(3):
        a.write(a.alloc(1 << 20), there, imm=1).wait(10)
    b.plain_counter(1).wait(3, timeout=10)
    metrics = a.metrics()
    [peer] = [p for p in metrics.peers if p.id == b.id]
    assert (peer.state, peer.name, peer.transport) == ("up", "b", a.config.transport[0])
    tallies = [t for rail in peer.rails for t in rail.tallies if t.priority == "bulk"]
    assert sum(t.nbytes for t in tallies) == 3 << 20
    assert sum(t.failed for t in tallies) == 0
    stages = [s for rail in metrics.rails for s in rail.stages if s.priority == "bulk"]
    assert sum(s.queue.count for s in stages) == 3
    assert all(s.wire.quantile(0.5) for s in stages)
    assert b.metrics().counted == 3


def test_the_loss_of_a_peer_is_an_event(open_engine: Open) -> None:
    a, b = open_engine("a", transport="tcp"), open_engine("b", transport="tcp")
    inbox = b.alloc(64)
    there = a.import_region(inbox.descriptor())
    a.write(a.alloc(64), there).wait(10)
    lost = a.counter().expect(1, writers=[there.peer])
    b.close()
    with pytest.raises(errors.PeerLost):
        lost.wait(10)
    kinds = [(e.kind, e.peer) for e in a.records().events]
    assert ("link up", there.peer.id) in kinds
    assert kinds[-1] == ("peer lost", there.peer.id)
    assert [e.failure is None for e in a.records().expectations] == [False]
