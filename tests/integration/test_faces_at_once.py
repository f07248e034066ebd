"""Mooncake's and NIXL's classes from many threads at once, as both say that they may be used."""

from __future__ import annotations

import random
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from fabric_ray.compat.mooncake import TransferEngine, TransferNotify, TransferOpcode
from fabric_ray.compat.nixl import nixl_agent, nixl_agent_config
from fabric_ray.compat.nixl.bindings import (
    nixlInvalidParamError,
    nixlNotFoundError,
    nixlNotSupportedError,
)
from fabric_ray.errors import Unsupported
from tests.at_once import THREADS, at_once, unused
from tests.ports import free_ports
from tests.processes import within

ROUNDS = 2
SIZE = 8192
HOST = "127.0.0.1"
Array = np.ndarray[Any, Any]


def memory(fill: int = 0) -> Array:
    return np.full(SIZE, fill, dtype=np.uint8)


@pytest.fixture(autouse=True, params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FABRIC_RAY_TRANSPORT", request.param)
    return str(request.param)


# Mooncake


@dataclass
class Mooncake:
    """What all threads use."""

    here: TransferEngine
    there: TransferEngine
    peer: str
    heard: Counter[str] = field(default_factory=Counter)
    """Only one thread at a time adds."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    kept: list[Array] = field(default_factory=list)
    """Kept alive: an asynchronous transfer fails where an address was registered anew."""

    def ends(self, number: int) -> tuple[Array, Array]:
        """Memory of a thread at both ends, all of its own value and zeros, registered."""
        ours, theirs = memory(number + 1), memory()
        self.kept.append(theirs)
        assert self.here.register_memory(ours.ctypes.data, SIZE) == 0
        assert self.there.register_memory(theirs.ctypes.data, SIZE) == 0
        return ours, theirs

    def over(self, ours: Array, theirs: Array) -> None:
        assert self.here.unregister_memory(ours.ctypes.data) == 0
        assert self.there.unregister_memory(theirs.ctypes.data) == 0

    def hear(self) -> None:
        notes = self.there.get_notifies()
        with self.lock:
            self.heard.update(note.msg for note in notes)


def synchronously(w: Mooncake, number: int) -> None:
    ours, theirs = w.ends(number)
    here, there, half = ours.ctypes.data, theirs.ctypes.data, SIZE // 2
    note = TransferNotify(f"thread {number}", f"{number}")
    assert w.here.transfer_sync(w.peer, here, there, half, TransferOpcode.Write, note) == 0
    assert w.here.transfer_sync_write(w.peer, here + half, there + half, 64) == 0
    pieces = [here + half + 64], [there + half + 64], [half - 64]
    assert w.here.batch_transfer_sync_write(w.peer, *pieces) == 0
    assert np.array_equal(ours, theirs)
    ours[:] = 0
    assert w.here.transfer_sync_read(w.peer, here, there, half) == 0
    assert w.here.batch_transfer_sync_read(w.peer, [here + half], [there + half], [64]) == 0
    assert w.here.batch_transfer_sync(w.peer, *pieces, TransferOpcode.Read) == 0
    assert np.array_equal(ours, theirs)
    w.hear()
    w.over(ours, theirs)


def asynchronously(w: Mooncake, number: int) -> None:
    ours, theirs = w.ends(number)
    here, there, half = ours.ctypes.data, theirs.ctypes.data, SIZE // 2
    one = w.here.batch_transfer_async(w.peer, [here], [there], [64], TransferOpcode.Write)
    two = w.here.batch_transfer_async_write(w.peer, [here + 64], [there + 64], [half - 64])
    three = w.here.transfer_submit_write(w.peer, here + half, there + half, half)
    assert len({one, two, three, 0}) == 4
    assert w.here.get_batch_transfer_status([one, two]) == 0
    within(60, "the write", lambda: w.here.transfer_check_status(three) == 1)
    assert w.here.transfer_check_status(three) == -1, "it is forgotten"
    assert np.array_equal(ours, theirs)
    ours[:] = 0
    back = w.here.batch_transfer_async_read(w.peer, [here], [there], [SIZE])
    assert w.here.get_batch_transfer_status([back]) == 0
    assert np.array_equal(ours, theirs)
    w.over(ours, theirs)


def managed(w: Mooncake, number: int) -> None:
    at = w.here.allocate_managed_buffer(64)
    assert at
    assert w.here.write_bytes_to_buffer(at, bytes([number]) * 64, 64) == 0
    assert w.here.read_bytes_from_buffer(at, 64) == bytes([number]) * 64
    assert w.here.read_bytes_from_buffer(at, 65) == b"", "not all of it is registered"
    assert w.here.free_managed_buffer(at, 64) == 0


def many(w: Mooncake, number: int) -> None:
    arrays = [memory() for _ in range(3)]
    places = [array.ctypes.data for array in arrays]
    assert w.here.batch_register_memory(places, [SIZE] * 3) == 0
    assert w.here.batch_unregister_memory(places) == 0


def questions(w: Mooncake, number: int) -> None:
    assert w.here.send_probe(w.peer) == 0
    assert w.here.get_first_buffer_address(w.peer)
    assert w.here.get_rpc_port() != w.there.get_rpc_port()
    assert w.here.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == -1
    for handle in (w.here.get_engine, w.here.get_engine_ptr):
        with pytest.raises(Unsupported):
            handle()
    w.hear()


def test_every_public_call_is_made() -> None:
    assert not unused(__file__, TransferEngine, nixl_agent)


def test_every_call_of_mooncakes_engine_from_32_threads_at_once() -> None:
    here, there = TransferEngine(), TransferEngine()
    for engine in (here, there):
        assert engine.initialize(HOST, "P2PHANDSHAKE", "", "") == 0
    kept = memory()
    assert there.register_memory(kept.ctypes.data, SIZE) == 0
    world = Mooncake(here, there, f"{HOST}:{there.get_rpc_port()}")
    calls = [synchronously, asynchronously, managed, many, questions]

    def work(number: int) -> None:
        draw = random.Random(number)
        for _ in range(ROUNDS):
            for call in draw.sample(calls, len(calls)):
                call(world, number)

    def heard() -> bool:
        world.hear()
        return world.heard.total() >= ROUNDS * THREADS

    at_once(work)
    # The last ones have reached the process, and perhaps not yet the engine's inbox.
    within(60, "the last notification", heard)
    assert world.heard == Counter({str(n): ROUNDS for n in range(THREADS)})


# NIXL


@dataclass
class Nixl:
    """What all threads use: an agent, one that listens, and one that comes and goes."""

    here: nixl_agent
    there: nixl_agent
    brief: nixl_agent
    port: int


def registered(agent: nixl_agent, array: Array) -> Any:
    return agent.register_memory([(array.ctypes.data, SIZE, 0, "")], "DRAM")


def both(w: Nixl, number: int) -> tuple[Array, Array, list[Any]]:
    """A thread's arrays at both ends, known to this end, and their registrations."""
    ours, theirs = memory(number + 1), memory()
    mine, others = registered(w.here, ours), registered(w.there, theirs)
    told = w.there.get_partial_agent_metadata(others, inc_conn_info=True)
    assert w.here.add_remote_agent(told) == b"there"
    return ours, theirs, [mine, others]


def end(w: Nixl, lists: list[Any]) -> None:
    for agent, descs in zip((w.here, w.there), lists, strict=True):
        agent.deregister_memory(descs)


def settle(w: Nixl, handle: Any) -> None:
    within(60, "the transfer", lambda: w.here.check_xfer_state(handle) == "DONE")


def prepared(w: Nixl, number: int) -> None:
    ours, theirs, lists = both(w, number)
    local = w.here.prep_xfer_dlist("", [(ours.ctypes.data, SIZE, 0)], "DRAM")
    remote = w.here.prep_xfer_dlist("there", [(theirs.ctypes.data, SIZE, 0)], "DRAM")
    tag = f"prepared by {number}.".encode()
    handle = w.here.make_prepped_xfer("WRITE", local, [0], remote, [0], tag)
    w.here.transfer(handle)
    assert w.here.query_xfer_backend(handle) == "UCX"
    settle(w, handle)
    assert np.array_equal(ours, theirs)
    assert w.here.get_xfer_telemetry(handle).totalBytes == SIZE
    with pytest.raises(nixlNotSupportedError):
        w.here.estimate_xfer_cost(handle)
    hears(w, tag)
    w.here.release_xfer_handle(handle)
    for side in (local, remote):
        w.here.release_dlist_handle(side)
    end(w, lists)


def listed(w: Nixl, number: int) -> None:
    ours, theirs, lists = both(w, number)
    theirs[:] = 200
    mine = w.here.get_xfer_descs([(ours.ctypes.data, SIZE, 0)], "DRAM")
    other = w.here.get_xfer_descs([(theirs.ctypes.data, SIZE, 0)], "DRAM")
    sent = w.here.get_serialized_descs(other)
    assert w.here.deserialize_descs(sent) == other
    assert w.here.check_remote_metadata("there", other)
    handle = w.here.initialize_xfer("READ", mine, other, "there")
    w.here.transfer(handle)
    settle(w, handle)
    assert np.array_equal(ours, theirs)
    w.here.release_xfer_handle(handle)
    end(w, lists)


def hears(w: Nixl, tag: bytes) -> None:
    """The other agent has it once, whichever thread asks there."""
    within(60, f"{tag!r}", lambda: w.there.check_remote_xfer_done("here", tag))
    assert not w.there.check_remote_xfer_done("here", tag)


def notified(w: Nixl, number: int) -> None:
    tag = f"from {number}.".encode()
    w.here.send_notif("there", tag)
    w.there.update_notifs()
    hears(w, tag)
    assert w.here.get_new_notifs() == {}


def introduced(w: Nixl, number: int) -> None:
    """An agent that any thread adds and removes while others do so too."""
    assert w.here.add_remote_agent(w.brief.get_agent_metadata()) == b"brief"
    with suppress(nixlNotFoundError):  # another thread was faster
        w.here.make_connection("brief")
    w.here.remove_remote_agent("brief")
    w.brief.fetch_remote_metadata("there", HOST, w.port)
    w.brief.send_local_metadata(HOST, w.port)
    w.brief.send_partial_agent_metadata(
        w.brief.get_reg_descs([], "DRAM"), True, ip_addr=HOST, port=w.port
    )
    w.brief.invalidate_local_metadata(HOST, w.port)


def questions_of_nixl(w: Nixl, number: int) -> None:
    assert "UCX" in w.here.get_plugin_list()
    assert w.here.get_plugin_mem_types("UCX") == w.here.get_backend_mem_types("UCX")
    assert w.here.get_plugin_params("UCX") == w.here.get_backend_params("UCX")
    with pytest.raises(nixlInvalidParamError, match="was created before"):
        w.here.create_backend("UCX")
    with pytest.raises(nixlNotSupportedError):
        w.here.get_remote_descs([(1, 2, 0, "there")], "DRAM")
    with pytest.raises(nixlNotSupportedError):
        w.here.query_memory([], "UCX", "DRAM")
    with pytest.raises(nixlNotSupportedError):
        w.here.prep_mem_view(w.here.get_xfer_descs([(1, 2, 0)], "DRAM"))
    with pytest.raises(nixlNotSupportedError):
        w.here.release_mem_view(1)


def test_each_of_many_notifications_is_found_by_one_of_32_threads() -> None:
    here, there = nixl_agent("here"), nixl_agent("there")
    there.add_remote_agent(here.get_agent_metadata())
    here.add_remote_agent(there.get_agent_metadata())
    found: list[int] = []

    def work(number: int) -> None:
        mine = 0
        for turn in range(100):
            here.send_notif("there", f"{number} {turn}".encode())
            # Whichever it is: all begin alike.
            mine += there.check_remote_xfer_done("here", b"")
        found.append(mine)

    def rest() -> bool:
        found.append(there.check_remote_xfer_done("here", b""))
        return sum(found) >= THREADS * 100

    at_once(work)
    # The last ones have reached the process, and perhaps not yet the agent.
    within(60, f"the last of {THREADS * 100} notifications", rest)
    assert not there.check_remote_xfer_done("here", b"")
    assert sum(found) == THREADS * 100


def test_every_call_of_a_nixl_agent_from_32_threads_at_once() -> None:
    port, _ = free_ports()
    here = nixl_agent("here", nixl_agent_config(capture_telemetry=True))
    there = nixl_agent("there", nixl_agent_config(enable_listen_thread=True, listen_port=port))
    brief = nixl_agent("brief", nixl_agent_config())
    there.add_remote_agent(here.get_agent_metadata())
    here.add_remote_agent(there.get_agent_metadata())
    world = Nixl(here, there, brief, port)
    calls = [prepared, listed, notified, introduced, questions_of_nixl]

    def work(number: int) -> None:
        draw = random.Random(number)
        for _ in range(ROUNDS):
            for call in draw.sample(calls, len(calls)):
                call(world, number)

    at_once(work)
    assert there.update_notifs() == {}
