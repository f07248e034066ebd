"""What a writer recorded is laid beside what its receiver counted, and beside nothing else."""

from __future__ import annotations

from itertools import chain, repeat
from types import SimpleNamespace

import pytest

from fabric_ray.engine import EngineRecords
from fabric_ray.engine.observability import Arrival, Event, Expected, Part, TransferRecord
from fabric_ray.observe import Clock, ProcessRecords, join, story
from fabric_ray.observe.chrome import trace
from fabric_ray.observe.process import clock

MS = 1_000_000
IMM = 5 << 12


def write(
    id: int, at: int, *, counts: int = 1, peer: str = "b", span: int = 0, weight: int = 1
) -> TransferRecord:
    """Queued at ``at`` ms, posted after 1, acknowledged after 3."""
    return TransferRecord(
        id=id,
        op="write",
        priority="bulk",
        span=span,
        queued=at * MS,
        posted=(at + 1) * MS,
        all_posted=(at + 1) * MS,
        wire=(at + 3) * MS,
        notified=(at + 3) * MS,
        parts=(Part(peer, IMM, counts, 100),),
        parts_lost=0,
        slices=1,
        again=0,
        waits=0,
        rails=(0,),
        over=True,
        weight=weight,
        failure=None,
    )


def engine(
    id: str,
    transfers: tuple[TransferRecord, ...] = (),
    arrivals: tuple[Arrival, ...] = (),
    expectations: tuple[Expected, ...] = (),
    events: tuple[Event, ...] = (),
) -> EngineRecords:
    names = {"a": "writer", "b": "receiver", "c": "other"}
    cursor, rails = (0, 0, 0, 0), (("verbs", "mlx5_0"),)
    return EngineRecords(
        id, names[id], cursor, 0, names, rails, transfers, arrivals, expectations, events
    )


def process(pid: int, *engines: EngineRecords, boot: str = "x", wall: int = 0) -> ProcessRecords:
    return ProcessRecords(pid, "host", "python", Clock(boot, 0, wall), {}, engines)


def counted(at: float, counts: int = 1) -> Arrival:
    return Arrival(int(at * MS), 0, IMM, counts)


def test_a_write_alone_is_joined_exactly() -> None:
    met = Expected(IMM, 1, 9, 0, 3 * MS, None)
    b = engine("b", arrivals=(counted(2.5),), expectations=(met,))
    [flight] = join([process(1, engine("a", (write(1, 0),))), process(2, b)])
    got = flight.received
    assert got is not None
    assert (got.last, got.delivered, got.span, got.exact) == (int(2.5 * MS), 3 * MS, 9, True)
    assert (got.at.name, got.at.pid) == ("receiver", 2)
    assert flight.rails == ("verbs mlx5_0",)


def test_writes_that_overlap_are_taken_in_their_order_and_say_so() -> None:
    a = engine("a", (write(2, 1, counts=2), write(1, 0, counts=3)))
    b = engine("b", arrivals=(counted(2, 1), counted(2.2, 3), counted(3, 1)))
    first, second = join([process(1, a, b)])
    assert first.received
    assert second.received
    assert (first.received.first, first.received.last) == (2 * MS, int(2.2 * MS))
    assert (second.received.first, second.received.last) == (int(2.2 * MS), 3 * MS)
    assert (first.received.exact, second.received.exact) == (False, False)


def test_counts_from_before_a_write_are_not_its_own() -> None:
    a = engine("a", (write(7, 10),))
    b = engine("b", arrivals=(counted(2), counted(3), counted(12)))
    [flight] = join([process(1, a, b)])
    assert flight.received
    assert flight.received.last == 12 * MS


@pytest.mark.parametrize("own", [False, True])
def test_a_count_just_before_a_write_can_be_its_own_only_on_another_host(own: bool) -> None:
    a = engine("a", (write(7, 10),))
    b = engine("b", arrivals=(counted(10.99), counted(12)))
    [flight] = join([process(1, a), process(2, b, boot="y" if own else "x")])
    assert flight.received
    assert flight.received.last == int((10.99 if own else 12) * MS)


def test_a_write_that_overlaps_a_later_one_that_was_not_counted_is_not_exact() -> None:
    a = engine("a", (write(1, 0), write(2, 1), write(3, 20)))
    b = engine("b", arrivals=(counted(2.5),))
    received = [flight.received for flight in join([process(1, a, b)])]
    assert received[0]
    assert not received[0].exact
    assert received[1:] == [None, None]


@pytest.mark.parametrize("arrivals", [(), (counted(2),)])
def test_what_was_not_counted_in_full_has_no_other_end(arrivals: tuple[Arrival, ...]) -> None:
    a = engine("a", (write(1, 0, counts=2),))
    [flight] = join([process(1, a, engine("b", arrivals=arrivals))])
    assert flight.received is None


def test_another_use_of_the_counter_is_another_counter() -> None:
    other = Arrival(2 * MS, 0, IMM + 16, 1)
    [flight] = join([process(1, engine("a", (write(1, 0),)), engine("b", arrivals=(other,)))])
    assert flight.received is None


def test_hosts_are_laid_over_each_other_by_their_wall_clocks() -> None:
    a = process(1, engine("a", (write(1, 0),)), boot="x", wall=1000 * MS)
    b = process(2, engine("b", arrivals=(counted(502),)), boot="y", wall=500 * MS)
    [flight] = join([a, b])
    assert flight.received
    assert (flight.queued, flight.received.last) == (1000 * MS, 1002 * MS)


def test_a_core_lost_between_two_reads_of_the_clocks_moves_no_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = chain([50, 5 * MS], repeat(50))
    now = 0

    def read() -> int:
        nonlocal now
        now += next(steps)
        return now

    clocks = SimpleNamespace(monotonic_ns=read, time_ns=lambda: read() + 1000 * MS)
    monkeypatch.setattr("fabric_ray.observe.process.time", clocks)
    at = clock()
    assert at.wall - at.monotonic == 1000 * MS


def test_one_that_stands_for_many_is_never_exact() -> None:
    a = engine("a", (write(1, 0, weight=16),))
    [flight] = join([process(1, a, engine("b", arrivals=(counted(2),)))])
    assert flight.received
    assert not flight.received.exact


def test_none_is_exact_beside_one_that_stands_for_many() -> None:
    a = engine("a", (write(1, 0), write(2, 50, weight=16)))
    flights = join([process(1, a, engine("b", arrivals=(counted(2), counted(52))))])
    assert [f.received and f.received.exact for f in flights] == [False, False]


def test_writes_of_two_hosts_within_the_difference_of_their_clocks_are_not_exact() -> None:
    a = process(1, engine("a", (write(1, 0),)), boot="x")
    c = process(2, engine("c", (write(1, 2.01),)), boot="z")
    b = process(3, engine("b", arrivals=(counted(2), counted(4.01))), boot="y")
    flights = join([a, b, c])
    assert [f.received and f.received.exact for f in flights] == [False, False]


def test_a_story_has_what_was_asked_and_what_was_written_for_it() -> None:
    met = Expected(IMM, 1, 9, 0, 3 * MS, None)
    b = engine("b", (write(4, 0, peer="a", span=9),), (counted(2.5),), (met,))
    flights = join([process(1, engine("a", (write(1, 0), write(2, 50)))), process(2, b)])
    assert [(f.writer.name, f.id) for f in story(flights, 9)] == [("writer", 1), ("receiver", 4)]
    assert story(flights, 8) == []


def test_a_trace_has_both_ends_and_an_arrow_and_no_lane_twice() -> None:
    lost = Event(4 * MS, "peer lost", "b", None, "it died")
    a = engine("a", (write(1, 0), write(2, 1), write(3, 10)), events=(lost,))
    b = engine("b", arrivals=(counted(2.5), counted(3.5), counted(12)))
    processes = [process(1, a), process(2, b)]
    events = trace(processes, join(processes))["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    sent = [e for e in spans if e["name"] == "write to receiver"]
    assert [e["tid"] for e in sent] == [0, 1, 0]
    assert [e["name"] for e in spans].count("write from writer") == 3
    stages = [e["name"] for e in spans if e["tid"] == 1]
    assert stages == ["write to receiver", "queue", "wire"]
    for outer in sent:
        for e in (e for e in spans if (e["pid"], e["tid"]) == (outer["pid"], outer["tid"])):
            begins = outer["ts"] <= e["ts"] < outer["ts"] + outer["dur"]
            ends = e["ts"] + e["dur"] <= outer["ts"] + outer["dur"]
            assert ends or not begins, "spans of one lane lie in each other"
    starts = {e["id"] for e in events if e["ph"] == "s"}
    ends = {e["id"] for e in events if e["ph"] == "f"}
    assert len(starts) == 3
    assert starts == ends
    [event] = [e for e in events if e["ph"] == "i"]
    assert event["args"]["cause"] == "it died"
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {"writer (host, pid 1)", "receiver (host, pid 2)"}
