"""Strangers at the door and forged values: turned away in words, while real peers are served."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
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
from tests.integration.strangers import TRANSPORTS, Stranger, hello, sealed, tcp_port
from tests.processes import Other, descriptors, within


def serve(connection: Connection, transport: str) -> None:
    """An engine with a region and a counter; runs functions that take it."""
    engine = TransferEngine(name="server", transport=transport, token="t", bind=("127.0.0.1",))
    region, counter = engine.alloc(4096), engine.counter()
    port = tcp_port() if transport == "tcp" else 0
    connection.send((engine.address, region.descriptor(), counter.ref, port))
    while True:
        connection.send(connection.recv()(engine, counter))


def count_descriptors(*_: Any) -> int:
    return descriptors()


def count_arrived(_: TransferEngine, counter: Any) -> int:
    return int(counter.value)


# strangers


def proof_of_nothing(stranger: Stranger) -> None:
    assert b"FRhs" in stranger.hear()
    stranger.say(sealed(b"FRhs", b"\x02" + bytes(32)))


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
            (hello(address.id, version=2), None, b""),
            (hello(address.id, protocol=(9, 9)), None, b"no common protocol version"),
            (of_others, None, b"is gone"),
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
        within(5, "a warning", lambda: "a connection came to nothing" in caplog.text)
    assert e.value.peer.startswith("b#")


def visit_as_another_user(connection: Connection, token: str | None) -> None:
    """Gives up this process's user, and tells what a write came to."""
    os.setgid(1000)
    os.setuid(1000)
    with TransferEngine(name="other", transport="shm", token=token) as engine:
        there = engine.import_region(connection.recv())
        try:
            engine.write(engine.alloc(8), there, 8).wait(10)
        except FabricError as error:
            connection.send((type(error).__name__, str(error)))
        else:
            connection.send(None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("token", [None, "t"])
def test_without_a_token_another_users_process_is_a_stranger(
    token: str | None, open_engine: Callable[..., TransferEngine]
) -> None:
    engine = open_engine("owner", transport="shm", token=token)
    region = engine.alloc(8)
    with Other(visit_as_another_user, token) as visitor:
        said = visitor.ask(region.descriptor())
    if token:
        assert said is None
    else:
        kind, text = said
        assert kind == "HandshakeError"
        assert "user 0's and not this one's; give both engines the same token" in text


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


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
