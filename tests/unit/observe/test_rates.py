"""What happened between two looks, and how an engine's ways are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fabric_ray import TransferEngine, observe
from fabric_ray.engine import EngineMetrics
from fabric_ray.engine.observability import Histogram, PeerMetrics, PeerRail, Tally
from fabric_ray.observe import Clock, ProcessMetrics
from fabric_ray.observe.client import ask_records
from fabric_ray.observe.rates import OLDEST, going_on, rows

PEER = PeerMetrics("2", "b", "up", "shm", 1, 0, 0, {"bulk": 0}, ())


def look(seconds: float, *peers: PeerMetrics, counted: int = 0) -> ProcessMetrics:
    nothing = Histogram((0,) * 40, 0)
    engine = EngineMetrics("1", "a", counted, 0, 0, 0, 0, nothing, (), peers)
    return ProcessMetrics(1, "h", "python", Clock("x", int(seconds * 1e9), 0), (engine,))


def peer(excluded: int = 0, waits: int = 0, **tally: int) -> PeerMetrics:
    sums: dict[str, Any] = {"slices": 0, "nbytes": 0, "again": 0, "failed": 0} | tally
    rail = PeerRail(0, excluded, (Tally("bulk", **sums),))
    return msgspec.structs.replace(PEER, rails=(rail,), waits={"bulk": waits})


def test_rates_are_of_the_time_between_two_looks() -> None:
    before = look(10, peer(nbytes=100, slices=1), counted=5)
    now = look(12, peer(nbytes=500, slices=11), counted=15)
    [row] = rows(before, now)
    [to] = row.peers
    assert (row.bytes_per_s, row.counted_per_s) == (200, 5)
    assert (to.bytes_per_s, to.slices_per_s) == (200, 5)


def test_one_look_alone_has_no_rates() -> None:
    [row] = rows(None, look(1, peer(nbytes=100)))
    assert row.bytes_per_s == 0


@pytest.mark.parametrize("what", ["again", "failed"])
def test_a_way_on_which_something_went_wrong_is_degraded_until_the_next_look(what: str) -> None:
    fine, wrong = peer(), peer(**{what: 1})
    assert rows(look(1, fine), look(2, wrong))[0].peers[0].health == "degraded"
    assert rows(look(2, wrong), look(3, wrong))[0].peers[0].health == "ok"


def test_a_lost_link_degrades_and_a_lost_peer_is_lost() -> None:
    assert rows(look(1, peer()), look(2, peer(excluded=1)))[0].peers[0].health == "degraded"
    lost = msgspec.structs.replace(PEER, state="lost")
    assert rows(look(1, PEER), look(2, lost))[0].peers[0].health == "lost"
    waits = msgspec.structs.replace(PEER, waiting=3)
    assert rows(None, look(2, waits))[0].peers[0].health == "waits"


def test_who_was_never_reached_is_not_shown() -> None:
    idle = msgspec.structs.replace(PEER, state="idle", transport=None, links=0)
    assert rows(None, look(1, idle))[0].peers == ()


def test_what_goes_on_is_told_with_its_peer_and_nothing_that_is_over(
    pair: tuple[TransferEngine, TransferEngine], tmp_path: Path
) -> None:
    a, b = pair
    peer, inbox = a.peer(b.address), b.alloc(4096)
    a.write(a.alloc(4096), a.import_region(inbox.descriptor())).wait(10)
    assert going_on(observe.metrics()) == {}
    # No engine receives them yet.
    with observe.span("request 9"):
        sent = [a.send(peer, b"x" * 500, timeout=60) for _ in range(OLDEST + 3)]
    now = observe.metrics()
    told = ask_records(observe.serve(tmp_path / "run"), going_on(now), oldest=OLDEST)
    observe.stop()
    # The process may have other engines, which are idle.
    assert [len(engine.transfers) for engine in told.engines if engine.transfers] == [OLDEST]
    [row] = [row for row in rows(None, now, told) if row.engine_id == a.id]
    assert row.going_on == OLDEST + 3
    assert {(t.op, t.peers, t.nbytes, t.span) for t in row.transfers} == {
        ("send", ("b",), 500, "request 9")
    }
    ages = [t.age for t in row.transfers]
    assert len(ages) == OLDEST
    assert ages == sorted(ages, reverse=True)
    assert ages[-1] >= 0
    b.receive(lambda _: None)
    for transfer in sent:
        transfer.wait(10)
    assert going_on(observe.metrics()) == {}
