"""Two processes with Mooncake's ``TransferEngine``: its callers' calls, and failures."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from fabric_ray.compat import shim_path
from fabric_ray.compat.mooncake import TransferEngine, TransferNotify, TransferOpcode
from tests.processes import Other, within

SIZE = 1 << 20
HOST = "127.0.0.1"


def opened(transport: str, host: str = HOST) -> TransferEngine:
    os.environ["FABRIC_RAY_TRANSPORT"] = transport
    engine = TransferEngine()
    assert engine.initialize(host, "P2PHANDSHAKE", "rdma", "") == 0
    return engine


def serve(connection: Connection, transport: str, host: str, token: str | None) -> None:
    """Registers memory and does as it is told."""
    if token is not None:
        os.environ["FABRIC_RAY_TOKEN"] = token
    engine = opened(transport, host)
    memory: list[np.ndarray[Any, Any]] = []
    while True:
        order, *args = connection.recv()
        if order == "port":
            connection.send(engine.get_rpc_port())
        elif order == "add":
            memory.append(np.zeros(args[0], dtype=np.uint8))
            assert engine.register_memory(memory[-1].ctypes.data, args[0]) == 0
            connection.send(memory[-1].ctypes.data)
        elif order == "again":
            assert engine.unregister_memory(memory[-1].ctypes.data) == 0
            assert engine.register_memory(memory[-1].ctypes.data, len(memory[-1])) == 0
            connection.send(True)
        elif order in ("register", "unregister"):
            connection.send(getattr(engine, f"{order}_memory")(*args))
        elif order == "bytes":
            connection.send(memory[-1].tobytes())
        elif order == "notifies":
            connection.send([(note.name, note.msg) for note in engine.get_notifies()])


class Peer:
    def __init__(self, other: Other) -> None:
        self.other = other
        self.session = f"{HOST}:{other.ask(('port',))}"

    def add(self, nbytes: int) -> int:
        return int(self.other.ask(("add", nbytes)))

    def bytes(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.other.ask(("bytes",)), dtype=np.uint8)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What :func:`opened` sets ends with the test."""
    monkeypatch.setenv("FABRIC_RAY_TRANSPORT", "auto")
    monkeypatch.delenv("FABRIC_RAY_TRANSPORT")


@pytest.fixture(params=["shm", pytest.param("tcp", marks=pytest.mark.long)])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FABRIC_RAY_TRANSPORT", request.param)
    return str(request.param)


@pytest.fixture
def peer(transport: str) -> Iterator[Peer]:
    with Other(serve, transport, HOST, None) as other:
        yield Peer(other)


@pytest.fixture
def engine(transport: str) -> TransferEngine:
    return opened(transport)


@pytest.fixture
def buffer(engine: TransferEngine) -> np.ndarray[Any, Any]:
    array = np.random.default_rng(0).integers(0, 255, SIZE).astype(np.uint8)
    assert engine.register_memory(array.ctypes.data, SIZE) == 0
    return array


def test_a_notification_comes_after_the_bytes(
    engine: TransferEngine, buffer: np.ndarray[Any, Any], peer: Peer
) -> None:
    there, note = peer.add(SIZE), TransferNotify("weights", "version 3")
    where = peer.session, buffer.ctypes.data, there, SIZE, TransferOpcode.Write
    assert engine.transfer_sync(*where, note) == 0
    heard: list[tuple[str, str]] = []
    within(
        5, "the notification", lambda: bool(heard.extend(peer.other.ask(("notifies",))) or heard)
    )
    assert heard == [("weights", "version 3")]
    assert engine.transfer_sync(*where, TransferNotify("", "x" * 70_000)) == -1


def test_a_peer_may_register_more_and_anew(
    engine: TransferEngine, buffer: np.ndarray[Any, Any], peer: Peer
) -> None:
    here, first = buffer.ctypes.data, peer.add(4096)
    assert engine.transfer_sync_write(peer.session, here, first, 4096) == 0
    second = peer.add(4096)
    assert engine.transfer_sync_write(peer.session, here, second, 4096) == 0
    assert peer.other.ask(("again",))
    # The same incarnation: the address means the same memory, by its new key.
    assert engine.transfer_sync_write(peer.session, here + 4096, second, 4096) == 0
    assert np.array_equal(peer.bytes(), buffer[4096:8192])


def test_mr_1_no_peer_writes_once_memory_is_unregistered(
    engine: TransferEngine, buffer: np.ndarray[Any, Any], peer: Peer
) -> None:
    here, there = buffer.ctypes.data, peer.add(4096)
    assert engine.transfer_sync_write(peer.session, here, there, 4096) == 0
    landed = peer.bytes()
    for first, nbytes in [(there, 4096), (there, 1), (there + 4095, 1), (there - 1, 2)]:
        assert peer.other.ask(("register", first, nbytes)) == -7, "as Mooncake refuses an overlap"
    assert peer.other.ask(("unregister", there)) == 0
    assert engine.transfer_sync_write(peer.session, here + 4096, there, 4096) == -1
    assert np.array_equal(peer.bytes(), landed)
    assert peer.other.ask(("register", there, 4096)) == 0


def test_what_can_not_be_done_is_a_code_and_a_line_in_the_log(
    engine: TransferEngine,
    buffer: np.ndarray[Any, Any],
    peer: Peer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    there, here = peer.add(4096), buffer.ctypes.data
    for local, remote, nbytes in [
        (here, there + 1, 4096),
        (here - 1, there, 4096),
        (0, there, 1),
        (here, 0, 1),
    ]:
        assert engine.transfer_sync_write(peer.session, local, remote, nbytes) == -1
        assert "don't lie in one range" in caplog.text
        caplog.clear()
    assert not peer.bytes().any(), "nothing was sent"
    assert engine.batch_transfer_sync_write(peer.session, [here], [], [1]) == -1
    assert engine.transfer_sync_write("127.0.0.1:1", here, there, 1) == -1
    assert "no process answers at 127.0.0.1:1" in caplog.text
    assert engine.transfer_sync_write("nonsense:port", here, there, 1) == -1
    assert engine.send_probe("127.0.0.1:1") < 0
    assert engine.unregister_memory(4096) < 0
    assert engine.transfer_check_status(12345) == -1
    assert engine.batch_register_memory([here, 0], [1, 1]) < 0
    assert TransferEngine().transfer_sync_write(peer.session, here, there, 1) == -1
    assert TransferEngine().initialize(HOST, "etcd://host", "tcp", "") == -1
    assert "P2PHANDSHAKE" in caplog.text


def test_a_dead_peer_is_an_error_and_its_successor_is_found(
    transport: str, engine: TransferEngine, buffer: np.ndarray[Any, Any]
) -> None:
    here = buffer.ctypes.data
    with Other(serve, transport, HOST, None) as first:
        peer = Peer(first)
        there = peer.add(4096)
        assert engine.transfer_sync_write(peer.session, here, there, 4096) == 0
        first.kill()
        assert engine.transfer_sync_write(peer.session, here, there, 4096) == -1
    with Other(serve, transport, peer.session, None) as second:
        again = Peer(second)
        assert again.session == peer.session
        there = again.add(4096)
        assert engine.transfer_sync_write(peer.session, here, there, 4096) == 0
        assert np.array_equal(again.bytes(), buffer[:4096])


def test_peers_need_the_same_token(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FABRIC_RAY_TOKEN", "ours")
    engine = opened("tcp")
    array = np.ones(64, dtype=np.uint8)
    assert engine.register_memory(array.ctypes.data, 64) == 0
    for token, code in (("ours", 0), ("theirs", -1)):
        with Other(serve, "tcp", HOST, token) as other:
            peer = Peer(other)
            there = peer.add(64)
            assert engine.transfer_sync_write(peer.session, array.ctypes.data, there, 64) == code
    assert "FABRIC_RAY_TOKEN" in caplog.text


def test_rs_2_rdma_is_not_replaced_silently(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("FABRIC_RAY_TRANSPORT", raising=False)
    monkeypatch.setenv("FABRIC_RAY_NICS", "no_such_nic")
    assert TransferEngine().initialize(HOST, "P2PHANDSHAKE", "rdma", "") == -1
    assert "rdma" in caplog.text
    monkeypatch.delenv("FABRIC_RAY_NICS")
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    assert TransferEngine().initialize(HOST, "P2PHANDSHAKE", "rdma", "") == 0


def test_the_shim_is_found_by_import() -> None:
    code = "import mooncake.engine as e; print(e.TransferEngine.__module__)"
    environment = os.environ | {"PYTHONPATH": f"{shim_path('mooncake')}:{':'.join(sys.path)}"}
    said = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert said.stdout.strip() == "fabric_ray.compat.mooncake", said.stderr
