"""Many threads read metrics and records of a process while its transfers run."""

from __future__ import annotations

import random
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fabric_ray import Counter, RemoteRegion, TransferEngine, observe
from fabric_ray.observe import chrome, client, prometheus
from tests.at_once import THREADS, at_once, attributes

ROUNDS = 3
WRITES = 5
NBYTES = 64


@dataclass
class World:
    """What all threads use."""

    a: TransferEngine
    b: TransferEngine
    there: RemoteRegion
    counter: Counter
    endpoint: observe.Endpoint
    folder: Path

    @property
    def engines(self) -> set[str]:
        return {self.a.id, self.b.id}


def transfer(w: World, number: int) -> None:
    src = w.a.alloc(NBYTES)
    with observe.span(f"thread {number}") as span:
        writes = [w.a.write(src, w.there, imm=w.counter.ref) for _ in range(WRITES)]
    for write in writes:
        write.wait(60)
    found = [r for e in observe.records().engines for r in e.transfers if r.span == span]
    assert len(found) % WRITES == 0
    assert len(found) >= WRITES
    assert observe.records().spans[span] == f"thread {number}"


def metrics(w: World, number: int) -> None:
    assert w.engines <= {engine.id for engine in observe.metrics().engines}


def records(w: World, number: int) -> None:
    """Records since a cursor: no transfer appears twice."""
    first = observe.records()
    cursors = {engine.id: engine.cursor for engine in first.engines}
    later = observe.records(cursors)
    for before, after in zip(first.engines, later.engines, strict=True):
        assert before.id == after.id
        known = {r.id for r in before.transfers if r.over}
        assert known.isdisjoint(r.id for r in after.transfers)


def trace(w: World, number: int) -> None:
    path = w.folder / f"{number}.json"
    dumped = observe.dump(path)
    assert observe.load(path) == [dumped]
    # All threads write this file: it must hold one whole dump.
    observe.dump(w.folder / "of all.json")
    assert len(observe.load(w.folder / "of all.json")) == 1
    flights = observe.join([dumped])
    mine = observe.story(flights, f"thread {number}")
    assert all(f.writer.engine == w.a.id and f.nbytes == NBYTES for f in mine)
    assert chrome.trace([dumped], flights)["traceEvents"]


def endpoint(w: World, number: int) -> None:
    with observe.Endpoint() as own:
        for port in (own.port, w.endpoint.port):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as said:
                assert b"fabric_ray" in said.read()
    assert "fabric_ray" in prometheus.text()


def ask(w: World, number: int) -> None:
    """Others look in while the window is opened and shut."""
    path = observe.serve(w.folder)
    try:
        assert w.engines <= {engine.id for engine in client.ask_metrics(path).engines}
        assert w.engines <= {engine.id for engine in client.ask_records(path).engines}
    except client.Silent:
        pass  # another thread has shut it
    if number % 8 == 0:
        observe.stop()


CALLS: list[Callable[[World, int], None]] = [transfer, metrics, records, trace, endpoint, ask]
VALUES = {"Clock", "Flight", "Place", "ProcessMetrics", "ProcessRecords", "Received"}


def test_every_public_call_of_observe_is_made() -> None:
    assert set(observe.__all__) <= attributes(__file__) | VALUES


@pytest.mark.long
def test_32_threads_look_while_they_transfer(
    open_engine: Callable[..., TransferEngine], tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    a, b = open_engine("a", op_timeout=120.0), open_engine("b", op_timeout=120.0)
    counter, inbox = b.counter(), b.alloc(NBYTES)
    there = a.import_region(inbox.descriptor())
    with observe.Endpoint() as endpoint_:
        world = World(a, b, there, counter, endpoint_, tmp_path)

        def work(number: int) -> None:
            draw = random.Random(number)
            for _ in range(ROUNDS):
                for call in draw.sample(CALLS, len(CALLS)):
                    call(world, number)

        transfer(world, THREADS)  # so that the first look finds records
        try:
            at_once(work)
        finally:
            observe.stop()
    written = (THREADS * ROUNDS + 1) * WRITES
    counter.wait(written, timeout=60)
    [told] = [engine for engine in observe.metrics().engines if engine.id == b.id]
    assert (told.counted, told.ghosts) == (written, 0)
    assert not list(tmp_path.glob("*.sock"))


def test_engines_come_and_go_while_threads_look(
    open_engine: Callable[..., TransferEngine],
) -> None:
    stays = open_engine("stays")

    def work(number: int) -> None:
        for _ in range(40):
            if number % 8:
                found = {engine.id for engine in observe.metrics().engines}
                assert stays.id in found
            else:
                with TransferEngine(transport="shm") as engine:
                    assert engine.id in {told.id for told in observe.metrics().engines}

    at_once(work)
