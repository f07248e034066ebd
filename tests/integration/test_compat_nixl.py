"""Two processes with NIXL agents: prepare, post, check, notify, metadata, and failures."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import pytest

from fabric_ray.compat.nixl import nixl_agent, nixl_agent_config
from fabric_ray.compat.nixl.bindings import (
    nixlBackendError,
    nixlInvalidParamError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlRemoteDisconnectError,
)
from fabric_ray.compat.nixl.metadata import Metadata
from tests.ports import free_ports
from tests.processes import Other, within

SIZE = 1 << 20
Array = np.ndarray[Any, Any]


def agent_of(name: str, array: Array, **config: Any) -> nixl_agent:
    agent = nixl_agent(name, nixl_agent_config(**config))
    agent.register_memory([(array.ctypes.data, array.nbytes, 0, "")], "DRAM")
    return agent


def descs(agent: nixl_agent, *rows: tuple[int, int]) -> Any:
    """A list of host memory: address and bytes of each range."""
    return agent.get_xfer_descs([(*row, 0) for row in rows], "DRAM")


def serve(connection: Connection, transport: str, first: bytes) -> None:
    """An agent with memory of a pattern; does as it is told."""
    os.environ["FABRIC_RAY_TRANSPORT"] = transport
    array = np.arange(SIZE, dtype=np.uint32).astype(np.uint8)
    agent = agent_of("target", array)
    agent.add_remote_agent(first)
    connection.send((agent.get_agent_metadata(), array.ctypes.data))
    while True:
        order, *args = connection.recv()
        if order == "bytes":
            connection.send(array.tobytes())
        elif order == "notifications":
            connection.send(agent.get_new_notifs())
        elif order == "notify":
            agent.send_notif("initiator", args[0])
            connection.send(True)
        elif order == "forget":
            agent.deregister_memory(agent.get_reg_descs([(array.ctypes.data, SIZE, 0, "")], "DRAM"))
            connection.send(True)


class Target:
    def __init__(self, other: Other) -> None:
        self.other = other
        self.metadata, self.at = other.hear()

    def bytes(self) -> Array:
        return np.frombuffer(self.other.ask(("bytes",)), dtype=np.uint8)

    def hears(self, message: bytes) -> None:
        """Waits for it, and that nothing else comes."""
        heard: list[bytes] = []
        within(10, f"{message!r}", lambda: bool(heard.extend(self.heard()) or heard))
        assert heard == [message]

    def heard(self) -> list[bytes]:
        return list(self.other.ask(("notifications",)).get("initiator", []))


@pytest.fixture(params=[pytest.param("shm", marks=pytest.mark.long), "tcp"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FABRIC_RAY_TRANSPORT", request.param)
    return str(request.param)


@pytest.fixture
def array() -> Array:
    return np.random.default_rng(1).integers(0, 255, SIZE).astype(np.uint8)


@pytest.fixture
def agent(transport: str, array: Array) -> nixl_agent:
    return agent_of("initiator", array)


@pytest.fixture
def target(transport: str, agent: nixl_agent) -> Iterator[Target]:
    with Other(serve, transport, agent.get_agent_metadata()) as other:
        target = Target(other)
        assert agent.add_remote_agent(target.metadata) == b"target"
        yield target


def move(agent: nixl_agent, handle: Any) -> None:
    agent.transfer(handle)
    settle(agent, handle)


def settle(agent: nixl_agent, handle: Any) -> None:
    within(10, "the transfer", lambda: agent.check_xfer_state(handle) == "DONE")


def test_prepared_blocks_are_read_and_written(
    agent: nixl_agent, array: Array, target: Target
) -> None:
    block, count = 4096, SIZE // 4096
    ours = [(array.ctypes.data + i * block, block, 0) for i in range(count)]
    theirs = np.array([[target.at, block, 0, block, count]], dtype=np.uint64)
    local = agent.prep_xfer_dlist("", ours, "DRAM")
    remote = agent.prep_xfer_dlist("target", theirs, "DRAM")
    before, pattern = array.copy(), target.bytes()
    here = np.array([3, 1, 200], dtype=np.int32)
    handle = agent.make_prepped_xfer("READ", local, here, remote, [9, 10, 255], b"read")
    with pytest.raises(nixlNotPostedError):
        agent.check_xfer_state(handle)
    for message in (b"read", b"again"):
        assert agent.transfer(handle, b"" if message == b"read" else message) in ("PROC", "DONE")
        settle(agent, handle)
        target.hears(message)
    for i, j in zip(here, [9, 10, 255], strict=True):
        before[i * block : (i + 1) * block] = pattern[j * block : (j + 1) * block]
    assert np.array_equal(array, before)
    shuffled = np.random.default_rng(2).permutation(count)
    write = agent.make_prepped_xfer("WRITE", local, np.arange(count), remote, shuffled)
    move(agent, write)
    landed = target.bytes().reshape(count, block)
    assert np.array_equal(landed[shuffled], array.reshape(count, block))
    assert target.heard() == []
    for each in (handle, write):
        agent.release_xfer_handle(each)
    for side in (local, remote):
        agent.release_dlist_handle(side)
    with pytest.raises(nixlInvalidParamError):
        agent.make_prepped_xfer("READ", local, [0], remote, [0])


def test_a_notification_never_overtakes_its_bytes(
    agent: nixl_agent, array: Array, target: Target
) -> None:
    sides = descs(agent, (array.ctypes.data, SIZE)), descs(agent, (target.at, SIZE))
    for turn in range(5):
        array[:] = turn
        handle = agent.initialize_xfer("WRITE", *sides, "target", b"turn %d" % turn)
        agent.transfer(handle)
        target.hears(b"turn %d" % turn)
        assert (target.bytes() == turn).all()
        settle(agent, handle)


def test_agents_notify_one_another(agent: nixl_agent, target: Target) -> None:
    agent.make_connection("target")
    agent.send_notif("target", b"ping \0 \xff")
    target.hears(b"ping \0 \xff")
    assert target.other.ask(("notify", b"pong 17"))
    within(5, "pong", lambda: agent.check_remote_xfer_done("target", b"pong"))
    assert not agent.check_remote_xfer_done("target", b"pong"), "it was taken"
    agent.send_notif("target", b"x" * 1_000_000)
    target.hears(b"x" * 1_000_000)


def test_what_does_not_fit_is_refused_before_anything_is_sent(
    agent: nixl_agent, array: Array, target: Target
) -> None:
    here, there, before = array.ctypes.data, target.at, target.bytes()
    for ours, theirs, error, text in [
        ([(here, 64)], [(there, 32)], nixlInvalidParamError, "fit"),
        ([(here, 64)], [(there, 32), (there + 32, 32)], nixlInvalidParamError, "fit"),
        ([(here, 1), (here, 2)], [(there, 2), (there, 1)], nixlInvalidParamError, "fit"),
        ([(here + SIZE, 1)], [(there, 1)], nixlNotFoundError, "registered"),
        ([(here, 2)], [(there + SIZE - 1, 2)], nixlNotFoundError, "registered"),
    ]:
        with pytest.raises(error, match=text):
            agent.initialize_xfer("WRITE", descs(agent, *ours), descs(agent, *theirs), "target")
    sides = descs(agent, (here, 1)), descs(agent, (there, 1))
    with pytest.raises(nixlNotFoundError, match="unknown"):
        agent.initialize_xfer("WRITE", *sides, "unknown")
    with pytest.raises(KeyError):
        agent.initialize_xfer("WR", *sides, "target")
    assert np.array_equal(target.bytes(), before)


def test_memory_that_was_deregistered_is_not_written(
    agent: nixl_agent, array: Array, target: Target
) -> None:
    sides = descs(agent, (array.ctypes.data, 64)), descs(agent, (target.at, 64))
    handle = agent.initialize_xfer("WRITE", *sides, "target", b"never")
    assert target.other.ask(("forget",))
    before = target.bytes()
    with pytest.raises(nixlRemoteDisconnectError):
        move(agent, handle)
    assert np.array_equal(target.bytes(), before)
    assert target.heard() == []


@pytest.mark.parametrize("added", ["", "whole", "part"])
def test_an_agent_is_forgotten_with_the_error_unless_it_was_added_again(
    agent: nixl_agent, array: Array, target: Target, added: str
) -> None:
    sides = descs(agent, (array.ctypes.data, 64)), descs(agent, (target.at, 64))
    handle = agent.initialize_xfer("WRITE", *sides, "target")
    assert target.other.ask(("forget",))
    if added:
        found = Metadata.from_bytes(target.metadata)
        agent.add_remote_agent(msgspec.structs.replace(found, whole=added == "whole").to_bytes())
    with pytest.raises(nixlRemoteDisconnectError):
        move(agent, handle)
    assert agent.check_remote_metadata("target") == (added == "whole")
    agent.remove_remote_agent("target")
    agent.remove_remote_agent("target")


def test_rs_4_a_dead_agent_is_an_error_and_its_successor_is_usable_at_once(
    transport: str, agent: nixl_agent, array: Array, target: Target
) -> None:
    def read(at: int) -> None:
        sides = descs(agent, (array.ctypes.data, SIZE)), descs(agent, (at, SIZE))
        move(agent, agent.initialize_xfer("READ", *sides, "target"))

    read(target.at)
    target.other.kill()
    with pytest.raises(nixlRemoteDisconnectError):
        read(target.at)
    assert not agent.check_remote_metadata("target"), "vLLM and SGLang add it again"
    with Other(serve, transport, agent.get_agent_metadata()) as other:
        again = Target(other)
        agent.add_remote_agent(again.metadata)
        array[:] = 0
        read(again.at)
        assert np.array_equal(array, again.bytes())


@pytest.mark.parametrize(
    ("op", "error"), [("READ", nixlRemoteDisconnectError), ("WRITE", nixlBackendError)]
)
def test_rs_4_a_transfer_with_an_agent_that_fell_silent_is_released(
    op: str, error: type[Exception], array: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FABRIC_RAY_TRANSPORT", "tcp")
    agent = agent_of("initiator", array)
    with Other(serve, "tcp", agent.get_agent_metadata()) as other:
        target = Target(other)
        agent.add_remote_agent(target.metadata)
        sides = descs(agent, (array.ctypes.data, SIZE)), descs(agent, (target.at, SIZE))
        move(agent, agent.initialize_xfer(op, *sides, "target"))
        other.signal(signal.SIGSTOP)
        handle = agent.initialize_xfer(op, *sides, "target")
        with pytest.raises(error):
            move(agent, handle)
        agent.release_xfer_handle(handle)
        agent.deregister_memory(agent.get_reg_descs([(array.ctypes.data, SIZE, 0, "")], "DRAM"))


def test_parts_of_metadata_add_up(transport: str) -> None:
    memory = np.zeros(8192, dtype=np.uint8)
    at = memory.ctypes.data
    owner = nixl_agent("owner", nixl_agent_config())
    reader = nixl_agent("reader", nixl_agent_config(enable_listen_thread=True, listen_port=0))
    first = owner.register_memory([(at, 4096, 0, "")], "DRAM")
    second = owner.register_memory([(at + 4096, 4096, 0, "")], "DRAM")
    with pytest.raises(nixlNotFoundError, match="connection info"):
        reader.add_remote_agent(owner.get_partial_agent_metadata(first))
    reader.add_remote_agent(owner.get_partial_agent_metadata(first, True))
    assert reader.check_remote_metadata("owner", first.trim())
    assert not reader.check_remote_metadata("owner", second.trim())
    reader.add_remote_agent(owner.get_partial_agent_metadata(second))
    for descs in (first, second):
        assert reader.check_remote_metadata("owner", descs.trim())
    reader.remove_remote_agent("owner")
    assert not reader.check_remote_metadata("owner")


def test_agents_that_listen_exchange_metadata(transport: str) -> None:
    port, _ = free_ports()
    there = nixl_agent("there", nixl_agent_config(enable_listen_thread=True, listen_port=port))
    here = nixl_agent("here", nixl_agent_config())
    here.fetch_remote_metadata("there", "127.0.0.1", port)
    here.send_local_metadata("127.0.0.1", port)
    assert here.check_remote_metadata("there")
    assert there.check_remote_metadata("here")
    with pytest.raises(Exception, match="there"):
        here.fetch_remote_metadata("unknown", "127.0.0.1", port)
    here.invalidate_local_metadata("127.0.0.1", port)
    assert not there.check_remote_metadata("here")
    del there
    with pytest.raises(nixlRemoteDisconnectError, match="no process answers"):
        here.fetch_remote_metadata("there", "127.0.0.1", port)
