"""Processes that die, stop, restart or fork: everything ends, with the peer named (RS-4, MR-2)."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import pytest

from fabric_ray import TransferEngine
from fabric_ray.errors import FabricError, PeerLost, Stale, Unreachable
from tests.chaos.belongings import Belongings
from tests.processes import Other, within

MiB = 1 << 20


def serve(connection: Connection, transport: str, name: str, nbytes: int) -> None:
    """Opens an engine with a region and a counter, and does as it is told."""
    engine = TransferEngine(name=name, transport=transport)
    region, counter = engine.alloc(nbytes), engine.counter()
    connection.send((engine.address, region.descriptor(), counter.ref))
    while True:
        order = connection.recv()
        if order == "read":
            connection.send(bytes(region.numpy()[:64]))
        elif order == "count":
            connection.send(counter.poll())
        elif order[0] == "expect":
            peer = engine.peer(order[1])
            waiting = counter.expect(1, writers=[peer])
            engine.connect(peer)
            connection.send("expecting")
            start = time.monotonic()
            error = None
            try:
                waiting.wait(20)
            except FabricError as e:
                error = e
            connection.send((time.monotonic() - start, error))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("delay", [0.0, 0.003, 0.05])
def test_rs_4_kill_9_ends_everything_within_two_seconds(
    transport: str, delay: float, open_engine: Callable[..., TransferEngine]
) -> None:
    a = open_engine("a", transport=transport)
    with Other(serve, transport, "victim", 64 * MiB) as other:
        address, descriptor, ref = other.hear()
        there = a.import_region(descriptor)
        src = a.alloc(64 * MiB)
        a.write(src[:64], there[:64], imm=ref).wait(10)
        counter = a.counter()
        waiting = counter.expect(1, writers=[there.peer])
        unreceived = a.send(there.peer, b"no receiver")
        bulk = [a.write(src, there) for _ in range(4)]
        time.sleep(delay)
        other.kill()
        start = time.monotonic()
        for transfer in (waiting, unreceived):
            with pytest.raises(PeerLost, match="victim#"):
                transfer.wait(10)
        for transfer in bulk:
            within(10, "the end of a write", transfer.done)
            assert transfer.exception() is None or isinstance(transfer.exception(), PeerLost)
        assert time.monotonic() - start < 2.0
        with pytest.raises((PeerLost, Unreachable), match="victim#"):
            a.write(src, there).wait(10)
        assert "victim" in str(a.explain(a.peer(address)))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_rs_4_the_receiver_learns_of_its_writers_death(transport: str) -> None:
    with Other(serve, transport, "receiver", MiB) as receiver:
        receiver.hear()
        with Other(serve, transport, "writer", MiB) as writer:
            address, *_ = writer.hear()
            assert receiver.ask(("expect", address)) == "expecting"
            time.sleep(0.2)
            writer.kill()
            killed = time.monotonic()
            _, error = receiver.hear()
            assert time.monotonic() - killed < 2.0
            assert isinstance(error, PeerLost)
            assert "writer#" in str(error)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_mr_2_a_restart_under_the_same_name_is_another_peer(
    transport: str, open_engine: Callable[..., TransferEngine]
) -> None:
    a = open_engine("a", transport=transport)
    src = a.alloc(64)
    src.numpy()[:] = 7
    old = None
    for life in range(3):
        with Other(serve, transport, "phoenix", 4096) as other:
            _, descriptor, ref = other.hear()
            there = a.import_region(descriptor)
            a.write(src, there[:64], imm=ref).wait(10)
            assert other.ask("read") == bytes([7]) * 64, life
            if old is not None:
                with pytest.raises((PeerLost, Unreachable, Stale)):
                    a.write(src, old[:64]).wait(10)
            # A write is done when its bytes are there; its count may come a moment later.
            within(10, "the count", lambda: other.ask("count"))
            assert other.ask("count") == 1
            other.kill()
            old = there


def test_rs_4_a_stopped_tcp_peer_is_lost_and_a_live_one_is_not(
    open_engine: Callable[..., TransferEngine],
) -> None:
    a = open_engine("a", transport="tcp", peer_timeout=1.0)
    with (
        Other(serve, "tcp", "sleeper", 4096) as sleeper,
        Other(serve, "tcp", "idler", 4096) as idler,
    ):
        asleep, idle = (a.import_region(o.hear()[1]) for o in (sleeper, idler))
        src = a.alloc(4096)
        for there in (asleep, idle):
            a.write(src, there).wait(10)
        waits = [a.counter().expect(1, writers=[r.peer], timeout=30) for r in (asleep, idle)]
        sleeper.signal(signal.SIGSTOP)
        with pytest.raises(PeerLost, match="nothing received for 1s"):
            waits[0].wait(10)
        time.sleep(1.5)
        assert not waits[1].done(), "heartbeats keep an idle link alive"
        a.write(src, idle).wait(10)
        sleeper.signal(signal.SIGCONT)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_ic_4_a_stopped_peer_costs_a_deadline_not_a_hang(
    transport: str, open_engine: Callable[..., TransferEngine]
) -> None:
    a = open_engine("a", transport=transport, peer_timeout=60.0)
    with Other(serve, transport, "sleeper", 64 * MiB) as other:
        _, descriptor, _ = other.hear()
        there = a.import_region(descriptor)
        src = a.alloc(64 * MiB)
        a.write(src[:64], there[:64]).wait(10)
        other.signal(signal.SIGSTOP)
        start = time.monotonic()
        message = a.send(there.peer, b"x", timeout=0.3)
        with pytest.raises(TimeoutError, match=r"sleeper#.*300ms"):
            message.wait(10)
        assert time.monotonic() - start < 5
        other.signal(signal.SIGCONT)


def churn(connection: Connection, transport: str) -> None:
    serve(connection, transport, "churn", MiB)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_nothing_leaks_when_peers_come_and_go(
    transport: str, open_engine: Callable[..., TransferEngine]
) -> None:
    a = open_engine("a", transport=transport)
    src = a.alloc(MiB)

    def round_() -> None:
        with Other(churn, transport) as other:
            _, descriptor, ref = other.hear()
            there = a.import_region(descriptor)
            batch = [a.write(src, there, imm=ref) for _ in range(20)]
            mine = a.alloc(4096)
            a.register(np.zeros(100)).deregister()
            mine.deregister()
            batch[0].wait(10)
            lost = a.counter().expect(1, writers=[there.peer])
            other.kill()
            for t in batch:
                within(10, "the end of a write", t.done)
            with pytest.raises(PeerLost):
                lost.wait(10)

    round_()
    before = Belongings()
    for _ in range(3):
        round_()
    assert before.left(10) is None


def test_nothing_leaks_when_engines_come_and_go() -> None:
    def round_() -> None:
        with TransferEngine(name="a") as a, TransferEngine(name="b", transport="tcp") as b:
            for other in (a, b):
                region = other.alloc(MiB)
                there = a.import_region(region.descriptor())
                counter = other.counter()
                a.write(a.alloc(MiB), there, imm=counter.ref).wait(10)
                counter.wait(1, timeout=10)
                other.watch(lambda old, new: None)
                a.write(a.alloc(8), there[:8]).add_done_callback(lambda t: None)

    round_()
    before = Belongings()
    for _ in range(5):
        round_()
    assert before.left(10) is None
