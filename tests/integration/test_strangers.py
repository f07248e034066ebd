"""Unauthenticated peers and forged values are refused with an error; real peers are served."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabric_ray import CounterRef, EngineAddress, RegionDescriptor, TransferEngine
from fabric_ray.errors import (
    DecodeError,
    FabricError,
    HandshakeError,
)
from tests.examples import examples
from tests.integration.strangers import (
    HANDSHAKE,
    TRANSPORTS,
    Stranger,
    hello,
    mac,
    sealed,
    tcp_port,
)
from tests.processes import Other, descriptors, within


def serve(connection: Connection, transport: str) -> None:
    """An engine with a region and a counter; runs functions that take it."""
    engine = TransferEngine(name="server", transport=transport, token="t", bind=("127.0.0.1",))
    region, counter = engine.alloc(4096), engine.counter()
    port = tcp_port() if transport == "tcp" else 0
    connection.send((engine.address, region.descriptor(), counter.ref, port))
    while True:
        connection.send(connection.recv()(engine, counter))


def count_descriptors(engine: TransferEngine, _: Any) -> int:
    # Takes the engine's lock: the thread that has it may still close a descriptor that it sent.
    engine.metrics()
    return descriptors()


def count_arrived(_: TransferEngine, counter: Any) -> int:
    return int(counter.value)


# strangers


def proof_of_nothing(stranger: Stranger) -> None:
    assert b"FRhs" in stranger.hear()
    stranger.say(sealed(b"FRhs", b"\x02" + bytes(32), HANDSHAKE))


def leaves(stranger: Stranger) -> None:
    stranger.hear()
    stranger.socket.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_strangers_are_turned_away_and_the_real_peer_is_served(
    transport: str, open_engine: Callable[..., TransferEngine]
) -> None:
    a = open_engine("a", transport=transport, token="t")
    with Other(serve, transport) as server:
        address, descriptor, ref, port = server.hear()
        there, src = a.import_region(descriptor), a.alloc(4096)
        a.write(src, there, imm=ref).wait(10)
        before = server.ask(count_descriptors)

        good, of_others = hello(address.id), hello("00" * 16)
        says: list[tuple[bytes, Callable[[Stranger], None] | None, bytes]] = [
            (b"", None, b""),  # stays, and says nothing
            (os.urandom(500), None, b""),
            (b"GET / HTTP/1.1\r\n\r\n" + bytes(100), None, b""),
            (good[:-1], None, b""),
            (good[:9], None, b""),
            (hello(address.id, version=HANDSHAKE - 1), None, b"upgrade the older side"),
            (hello(address.id, version=HANDSHAKE + 1), None, b""),
            (hello(address.id, protocol=(9, 9)), None, b"no common protocol version"),
            (of_others, None, b"has ended"),
            (good, leaves, b""),
            (good, proof_of_nothing, b"the tokens differ"),
        ]
        strangers = [Stranger(transport, address.id, port) for _ in says]
        for stranger, (message, _, _) in zip(strangers, says, strict=True):
            if message:
                stranger.say(message)
        for stranger, (_, then, _) in zip(strangers, says, strict=True):
            if then:
                then(stranger)
        for _ in range(100):
            a.write(src, there, imm=ref).wait(10)
        for stranger, (message, _, answer) in zip(strangers, says, strict=True):
            assert answer in stranger.hear_to_the_end(), message[:20]
        within(30, "the end of all strangers", lambda: server.ask(count_descriptors) == before)
        assert server.ask(count_arrived) == 101


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_another_token_is_a_handshake_error_that_both_sides_hear_of(
    transport: str,
    open_engine: Callable[..., TransferEngine],
    caplog: pytest.LogCaptureFixture,
) -> None:
    a = open_engine("a", transport=transport, token="one")
    b = open_engine("b", transport=transport, token="two")
    there = a.import_region(b.alloc(8).descriptor())
    with caplog.at_level(logging.WARNING, logger="fabric_ray.native"):
        with pytest.raises(HandshakeError, match="give both engines the same token") as e:
            a.write(a.alloc(8), there).wait(10)
        within(
            5, "a warning", lambda: "a connection ended before its peer was proven" in caplog.text
        )
    assert e.value.peer.startswith("b#")


STRANGER = 65534
_NEW_MOUNTS, _PRIVATE = 0x20000, 0x44000


def visit_as_another_user(connection: Connection, transport: str, token: str | None) -> None:
    """Gives up this process's user, and tells what a counted write and a message came to."""
    os.setgid(STRANGER)
    os.setuid(STRANGER)
    with TransferEngine(name="other", transport=transport, token=token) as engine:
        descriptor, ref = connection.recv()
        there, said = engine.import_region(descriptor), []
        acts: list[Callable[[], object]] = [
            lambda: engine.write(engine.alloc(8), there, 8, imm=ref).wait(10),
            lambda: engine.send(there.peer, b"hello").wait(10),
        ]
        for act in acts:
            try:
                act()
            except FabricError as error:
                said.append((type(error).__name__, str(error)))
        connection.send(said)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("token", [None, "t"])
def test_ic_2_without_a_token_another_users_process_counts_nothing_and_sends_nothing(
    token: str | None, transport: str, open_engine: Callable[..., TransferEngine]
) -> None:
    engine = open_engine("owner", transport=transport, token=token, bind=("127.0.0.1",))
    region, counter = engine.alloc(8), engine.counter()
    came: list[bytes] = []
    engine.receive(lambda message: came.append(bytes(message.data)), count=4, max_nbytes=64)
    with Other(visit_as_another_user, transport, token) as visitor:
        said = visitor.ask((region.descriptor(), counter.ref))
    if token:
        assert said == []
        within(5, "a count", lambda: counter.value == 1)
        within(5, "a message", lambda: came == [b"hello"])
        return
    assert [kind for kind, _ in said] == ["HandshakeError"] * 2
    assert all("give both engines the same token" in text for _, text in said), said
    assert all("user" in text for _, text in said), said
    assert (counter.value, came) == (0, [])


def test_ic_2_who_claims_the_kernels_word_over_tcp_is_a_stranger(
    open_engine: Callable[..., TransferEngine],
) -> None:
    engine = open_engine("owner", transport="tcp")
    stranger = Stranger("tcp", engine.address.id, tcp_port())
    said = hello(engine.address.id, secret=0)
    stranger.say(said)
    proof = mac(bytes(32), b"initiator", said, stranger.hear_message())
    stranger.say(sealed(b"FRhs", b"\x02" + proof, HANDSHAKE))
    assert b"give both engines the same token" in stranger.hear_to_the_end()


def write_from_another_container(connection: Connection) -> None:
    """A process of the same user whose ``/dev/shm`` is its own."""
    libc = ctypes.CDLL(None)
    apart = libc.unshare(_NEW_MOUNTS) == 0 and libc.mount(b"none", b"/", None, _PRIVATE, None) == 0
    if not apart or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None):
        connection.send("no mounts")
        return
    connection.send("ready")
    with TransferEngine(name="other", transport="tcp") as engine:
        there = engine.import_region(connection.recv())
        try:
            engine.write(engine.alloc(8), there, 8).wait(10)
        except FabricError as error:
            connection.send(f"{type(error).__name__}: {error}")


def test_without_a_token_containers_are_told_to_set_one(
    open_engine: Callable[..., TransferEngine],
) -> None:
    engine = open_engine("owner", transport="tcp")
    with Other(write_from_another_container) as other:
        if other.hear() != "ready":
            pytest.skip("this process may not mount")
        said = other.ask(engine.alloc(8).descriptor())
    assert said.startswith("HandshakeError: ")
    assert "share /dev/shm" in said
    assert "give both engines the same token" in said


def test_counters_are_not_the_same_in_every_engine(
    open_engine: Callable[..., TransferEngine],
) -> None:
    a, b = open_engine("a"), open_engine("b")

    def refs(engine: TransferEngine) -> set[bytes]:
        counters: list[Any] = [engine.counter() for _ in range(64)]
        return {counter.ref.to_bytes()[-5:] for counter in counters}

    of_a, of_b = refs(a), refs(b)
    assert len(of_a) == 64
    assert len(of_a & of_b) < 8


# floods


def flood(connection: Connection, transport: str) -> None:
    """Opens many connections that say nothing, and keeps them until it is told to end."""
    address, port, count = connection.recv()
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    held = []
    for _ in range(count):
        with contextlib.suppress(OSError):
            held.append(Stranger(transport, address, port))
    connection.send(len(held))
    connection.recv()


def serve_with_few_files(connection: Connection, transport: str) -> None:
    """An engine in a process that may open 1024 files, and how often it can't open one."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    with TransferEngine(name="few", transport=transport, token="t", bind=("127.0.0.1",)) as engine:
        port = tcp_port() if transport == "tcp" else 0
        region = engine.alloc(8)
        connection.send((engine.address.id, port, region.descriptor()))
        failed, most = 0, 0
        while not connection.poll(0.002):
            try:
                with open("/dev/null"):
                    most = max(most, descriptors())
            except OSError:
                failed += 1
        before = time.process_time()
        time.sleep(0.5)
        connection.send((failed, most, time.process_time() - before))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_idle_strangers_leave_files_to_the_application_and_room_for_peers(
    transport: str, open_engine: Callable[..., TransferEngine]
) -> None:
    with Other(serve_with_few_files, transport) as server, Other(flood, transport) as strangers:
        address, port, descriptor = server.hear()
        strangers.say((address, port, 1500))
        for name in ("while they come", "beside them"):
            peer = open_engine(name, transport=transport, token="t")
            peer.write(peer.alloc(8), peer.import_region(descriptor)).wait(30)
            if name == "while they come":
                strangers.hear(60)
        failed, most, busy = server.ask("how was it")
        assert failed == 0
        assert 40 < most < 1024 - 100
        assert busy < 0.4, "its worker spins"


def test_a_flood_of_junk_is_a_few_lines_of_the_log(
    open_engine: Callable[..., TransferEngine], caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine("owner", transport="tcp")
    port = tcp_port()
    with caplog.at_level(logging.INFO, logger="fabric_ray.native"):
        for _ in range(2000):
            stranger = Stranger("tcp", engine.address.id, port)
            stranger.say(b"junk")
            stranger.socket.close()
        within(
            10, "a warning", lambda: "a connection ended before its peer was proven" in caplog.text
        )
        time.sleep(0.2)
    lines = [
        r
        for r in caplog.records
        if "a connection ended before its peer was proven" in r.getMessage()
    ]
    assert 1 <= len(lines) <= 20


# damaged values


@pytest.mark.parametrize("cls", [EngineAddress, RegionDescriptor, CounterRef])
def test_values_of_another_version_say_which(
    cls: Any, open_engine: Callable[..., TransferEngine]
) -> None:
    engine = open_engine()
    value = {
        EngineAddress: engine.address,
        RegionDescriptor: engine.alloc(8).descriptor(),
        CounterRef: engine.counter().ref,
    }[cls].to_bytes()
    with pytest.raises(DecodeError, match="wire version 7, this build reads 1; upgrade"):
        cls.from_bytes(sealed(value[:4], value[10:], version=7))


@pytest.fixture(scope="module", params=TRANSPORTS)
def forging(request: pytest.FixtureRequest) -> Iterator[tuple[Any, ...]]:
    with (
        TransferEngine(name="a", transport=request.param) as a,
        TransferEngine(name="b", transport=request.param) as b,
    ):
        src, memory = a.alloc(8192), np.zeros(3 * 4096, np.uint8)
        src.numpy()[:] = 7
        region = b.register(memory[4096:8192])
        yield a, src, memory, region.descriptor().to_bytes(), region


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(at=st.integers(1, 14), value=st.integers(0, 255))
def test_mr_3_a_forged_descriptor_reaches_nothing_outside_its_region(
    forging: tuple[Any, ...], at: int, value: int
) -> None:
    a, src, memory, honest, _ = forging
    body = bytearray(honest[10:])
    body[-at] = value
    try:
        descriptor = RegionDescriptor.from_bytes(sealed(honest[:4], bytes(body)))
    except DecodeError:
        return
    there = a.import_region(descriptor)
    with contextlib.suppress(FabricError):
        a.write(src, there, min(there.nbytes, 8192)).wait(10)
    assert not memory[:4096].any()
    assert not memory[8192:].any()
