"""System limits and errors in users' code: each ends in an error that says what to do, and leaks
nothing."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_ray import TransferEngine
from fabric_ray.errors import (
    EngineClosed,
    FabricError,
    InvalidArgument,
    PeerLost,
    ResourceError,
    Stale,
    TransferTimeout,
    Unreachable,
)
from tests.chaos.belongings import Belongings
from tests.processes import Other, descriptors, within

TRANSPORTS = ["shm", "tcp"]


def serve(connection: Connection, transport: str) -> None:
    """An engine with a region; runs functions."""
    engine = TransferEngine(name="server", transport=transport)
    region = engine.alloc(4096)
    connection.send(region.descriptor())
    while True:
        connection.send(connection.recv()())


# limits


def with_a_full_shm(connection: Connection) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private = 0x20000, 0x44000
    isolated = libc.unshare(new_mounts) == 0
    isolated = isolated and libc.mount(b"none", b"/", None, private, None) == 0
    isolated = isolated and libc.mount(b"t", b"/dev/shm", b"tmpfs", 0, b"size=64k") == 0
    if not isolated:
        return connection.send(os.strerror(ctypes.get_errno()))
    with pytest.raises(OSError, match="No space"):
        Path("/dev/shm/filler").write_bytes(bytes(1 << 20))
    with TransferEngine(transport="shm") as a, TransferEngine(transport="shm") as b:
        src, dst = a.alloc(1 << 20), b.alloc(1 << 20)
        src.numpy()[:] = 7
        a.write(src, a.import_region(dst.descriptor())).wait(10)
        assert dst.numpy().min() == 7
    connection.send(os.listdir("/dev/shm"))


def test_a_full_dev_shm_is_nothing_to_the_engine() -> None:
    with Other(with_a_full_shm) as other:
        said = other.hear()
    if isinstance(said, str):
        pytest.skip(f"this process may not mount a file system of its own: {said}")
    assert said == ["filler"]


def test_more_memory_than_there_is(open_engine: Callable[..., TransferEngine]) -> None:
    engine = open_engine()
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # A thread that has just started has the name of the one that started it.
    within(10, "the engine's last thread", lambda: "fabric-beats" in Belongings().threads)
    before = Belongings()
    for nbytes in (2 * physical, 1 << 50):
        with pytest.raises(ResourceError, match="free memory, ask for less, or raise"):
            engine.alloc(nbytes)
    with pytest.raises(InvalidArgument, match="more than can exist"):
        engine.alloc(1 << 63)
    assert Belongings().more_than(before) is None
    assert engine.alloc(4096).nbytes == 4096


def limit_descriptors(spare: int | None) -> None:
    """Leaves this process ``spare`` descriptors more than it has."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    soft = hard if spare is None else descriptors() + spare
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def kept() -> int:
    """The number of descriptors without those that a thread has open for a moment."""

    def count() -> int:
        time.sleep(0.001)
        return descriptors()

    return min(count() for _ in range(20))


def open_many(connection: Connection, transport: str | None) -> None:
    engines = []
    TransferEngine().close()  # whatever is loaded on first use
    limit_descriptors(40)
    try:
        while True:
            before = kept()
            engines.append(TransferEngine(**{"transport": transport} if transport else {}))
    except ResourceError as e:
        connection.send((str(e), e.call, kept() - before))
    limit_descriptors(None)
    engines.append(TransferEngine())
    connection.send([e.alloc(8).nbytes for e in engines])


@pytest.mark.parametrize("transport", [*TRANSPORTS, None])
def test_engines_that_find_no_descriptors_name_the_limit(transport: str | None) -> None:
    with Other(open_many, transport) as other:
        text, call, left = other.hear()
        assert "raise the open-file limit of this process (ulimit -n: " in text
        assert call in text
        assert left == 0
        assert set(other.hear()) == {8}


def connect_many(connection: Connection, transport: str) -> None:
    engine = TransferEngine(name="many", transport=transport)
    src = engine.alloc(8)
    remotes = [engine.import_region(d) for d in connection.recv()]
    limit_descriptors(10)

    def write(remote: Any) -> str:
        try:
            engine.write(src, remote).wait(20)
        except FabricError as e:
            return f"{type(e).__name__}: {e}"
        return "done"

    connection.send([write(r) for r in remotes])
    limit_descriptors(None)
    connection.send([write(r) for r in remotes])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_peers_that_find_no_descriptors_name_the_limit(
    transport: str, open_engine: Callable[..., TransferEngine]
) -> None:
    peers = [open_engine(f"p{i}", transport=transport) for i in range(6)]
    regions = [p.alloc(8) for p in peers]
    with Other(connect_many, transport) as other:
        first = other.ask([r.descriptor() for r in regions])
        assert first[0] == "done"
        assert first[-1].startswith("ResourceError: ")
        assert "raise the open-file limit" in first[-1]
        assert other.hear() == ["done"] * 6


HOARD: list[int] = []


def starve() -> None:
    limit_descriptors(20)
    with contextlib.suppress(OSError):
        while True:
            HOARD.append(os.dup(0))


def feed() -> None:
    limit_descriptors(None)
    while HOARD:
        os.close(HOARD.pop())


def use_of_a_core() -> float:
    start = time.process_time()
    time.sleep(1)
    return time.process_time() - start


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_receiver_without_descriptors_neither_spins_nor_forgets(
    transport: str, open_engine: Callable[..., TransferEngine]
) -> None:
    a = open_engine("a", transport=transport)
    with Other(serve, transport) as server:
        there, src = a.import_region(server.hear()), a.alloc(4096)
        server.ask(starve)
        late = a.write(src, there)
        assert server.ask(use_of_a_core) < 0.1
        server.ask(feed)
        # It waited in the accept queue, or failed in time because no peer answers.
        with contextlib.suppress(Unreachable, PeerLost):
            late.wait(10)
        a.write(src, there).wait(10)


def without_locked_memory(connection: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
    with TransferEngine() as a, TransferEngine() as b:
        src, counter = a.alloc(1 << 20), b.counter()
        for dst in (b.alloc(1 << 20), b.register(np.zeros(1 << 20, np.uint8))):
            a.write(src, a.import_region(dst.descriptor()), imm=counter.ref).wait(10)
        counter.wait(2, timeout=10)
    connection.send("done")


def test_a_low_memlock_limit_does_not_matter() -> None:
    with Other(without_locked_memory) as other:
        assert other.hear() == "done"


def test_rs_2_a_transport_that_is_left_out_is_logged(
    open_engine: Callable[..., TransferEngine], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="fabric_ray.native"):
        engine = open_engine(bind=("192.0.2.1",), token="t")
        within(5, "a warning", lambda: "transport left out; transport: tcp" in caplog.text)
    assert engine.address.transports == ["shm"]
    assert "no interface of this machine has the address 192.0.2.1" in caplog.text


# users' code


def hang_on(kind: str, a: TransferEngine, b: TransferEngine, callback: Callable[..., Any]) -> Any:
    """Has ``b`` call ``callback`` once for what ``kind`` says; returns what must be kept."""
    if kind == "done":
        return b.counter().expect(0).add_done_callback(callback)
    if kind == "message":
        b.receive(callback)
        return a.send(a.peer(b.address), b"x")
    watcher = b.watch(callback)
    watcher.store(1)
    return watcher


@pytest.mark.parametrize("kind", ["done", "message", "watcher"])
def test_a_callback_that_raises_is_reported_by_name(
    kind: str, open_engine: Callable[..., TransferEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda u: reports.append((u.object, u.exc_value)))
    a, b = open_engine("a"), open_engine("b")

    def clumsy(*_: Any) -> None:
        raise KeyError("oops")

    kept = hang_on(kind, a, b, clumsy)
    within(10, "the report", lambda: bool(reports))
    named, error = reports[0]
    assert (named.__name__, type(error)) == ("clumsy", KeyError)
    src, dst = a.alloc(8), b.alloc(8)
    a.write(src, a.import_region(dst.descriptor())).wait(10)
    again = threading.Event()
    b.counter().expect(0).add_done_callback(lambda _: again.set())
    assert again.wait(10), "the callback thread goes on"
    del kept


@pytest.mark.parametrize("kind", ["done", "message", "watcher"])
def test_a_callback_may_close_its_engine(
    kind: str, open_engine: Callable[..., TransferEngine]
) -> None:
    a, b = open_engine("a"), open_engine("b")
    closed = threading.Event()

    def close(*_: Any) -> None:
        b.close()
        closed.set()

    kept = hang_on(kind, a, b, close)
    assert closed.wait(10)
    with pytest.raises(EngineClosed):
        b.alloc(8)
    del kept


def test_every_use_of_a_closed_engine_says_so(open_engine: Callable[..., TransferEngine]) -> None:
    a, b = open_engine("a"), open_engine("b")
    src, there, peer = a.alloc(8), a.import_region(b.alloc(8).descriptor()), a.peer(b.address)
    group, counter = a.peer_group([peer]), a.counter()
    waiting = counter.expect(1)
    threads = [threading.Thread(target=a.close) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(10)
    uses: list[Callable[[], Any]] = [
        lambda: waiting.wait(10),
        lambda: a.alloc(8),
        lambda: a.register(np.zeros(8)),
        lambda: a.peer(b.address),
        lambda: a.connect(peer),
        lambda: a.import_region(b.alloc(8).descriptor()),
        lambda: a.peer_group([peer]),
        lambda: a.write(src, there).wait(10),
        lambda: a.read(there, src).wait(10),
        lambda: a.send(peer, b"x").wait(10),
        lambda: a.barrier(group, 1).wait(10),
        lambda: a.watch(print),
        lambda: a.receive(print),
        lambda: a.counter(),
        lambda: a.drain(),
        lambda: counter.expect(1).wait(10),
    ]
    for use in uses:
        with pytest.raises(EngineClosed, match="open a new one"):
            use()


def test_registrations_that_overlap_are_independent(pair: Any) -> None:
    a, b = pair
    memory = np.zeros(4096, np.uint8)
    front, back = b.register(memory[:3000]), b.register(memory[1000:])
    to_front, to_back = (a.import_region(r.descriptor()) for r in (front, back))
    src = a.register(np.full(3096, 3, np.uint8))
    a.write(src, to_front, 3000).wait(10)
    front.deregister()
    with pytest.raises(Stale):
        a.write(src, to_front, 3000).wait(10)
    a.write(src, to_back).wait(10)
    assert memory.min() == 3


def test_a_timeout_says_who_and_how_much_is_missing(
    open_engine: Callable[..., TransferEngine],
) -> None:
    a, b = open_engine("a"), open_engine("b")
    with pytest.raises(TransferTimeout, match="4 writes are missing") as e:
        b.counter().wait(4, timeout=0.01)
    assert (e.value.peer, e.value.missing) == ("", 4)
    with pytest.raises(TransferTimeout, match="1 write is missing") as e:
        b.counter().wait(1, writers=[b.peer(a.address)], timeout=0.01)
    assert e.value.peer == b.peer(a.address).label
