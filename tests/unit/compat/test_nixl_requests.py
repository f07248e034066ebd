"""Requests of a NIXL agent to itself: empty ones, dropped handles, and notifications."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from fabric_ray.compat.nixl import agent as module
from fabric_ray.compat.nixl import nixl_agent, nixl_agent_config
from tests.processes import within

SIZE = 4096


@pytest.fixture
def memory() -> np.ndarray[Any, Any]:
    return np.arange(2 * SIZE, dtype=np.uint32).astype(np.uint8)


@pytest.fixture
def agent(memory: np.ndarray[Any, Any], monkeypatch: pytest.MonkeyPatch) -> nixl_agent:
    monkeypatch.setenv("FABRIC_RAY_TRANSPORT", "shm")
    agent = nixl_agent("alone", nixl_agent_config(capture_telemetry=True))
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    return agent


def posted(agent: nixl_agent, memory: np.ndarray[Any, Any]) -> Any:
    """A transfer from the second half of the memory to the first."""
    at = memory.ctypes.data
    sides = [agent.get_xfer_descs([(first, SIZE, 0)], "DRAM") for first in (at, at + SIZE)]
    handle = agent.initialize_xfer("READ", *sides, "alone")
    agent.transfer(handle)
    return handle


def test_the_garbage_collector_may_drop_a_handle_while_its_request_is_busy(
    agent: nixl_agent, memory: np.ndarray[Any, Any]
) -> None:
    handles = [posted(agent, memory)]
    request = handles[0]._made
    dropped = threading.Event()

    def collect() -> None:
        with request._lock:  # as where a collection happens to begin
            handles.clear()
        dropped.set()

    threading.Thread(target=collect, daemon=True).start()
    assert dropped.wait(20)
    assert list(agent._dropped.waiting) == [request]
    agent.get_new_notifs()
    assert not agent._dropped.waiting


def test_the_next_call_releases_dropped_handles(
    agent: nixl_agent, memory: np.ndarray[Any, Any]
) -> None:
    for _ in range(3):
        side = agent.prep_xfer_dlist("", [(memory.ctypes.data, SIZE, 0)], "DRAM")
        handle = posted(agent, memory)
        assert not agent._dropped.waiting
        del side, handle
        assert len(agent._dropped.waiting) == 1


def test_a_request_of_no_bytes_is_done_at_once_and_notifies(
    agent: nixl_agent, memory: np.ndarray[Any, Any]
) -> None:
    at = memory.ctypes.data
    empty = agent.get_xfer_descs([(at, 0, 0), (at + 8, 0, 0)], "DRAM")
    handle = agent.initialize_xfer("WRITE", empty, empty, "alone", b"empty")
    for _ in range(2):
        assert agent.transfer(handle) == "DONE"
        assert agent.check_xfer_state(handle) == "DONE"
        assert agent.get_new_notifs() == {"alone": [b"empty"]}
    assert agent.get_xfer_telemetry(handle).totalBytes == 0
    agent.release_xfer_handle(handle)


def test_an_empty_tensor_is_moved_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("FABRIC_RAY_TRANSPORT", "shm")
    holder, reader = nixl_agent("holder"), nixl_agent("reader")
    theirs = [torch.arange(10.0), torch.empty(0), torch.ones(3)]
    ours = [torch.zeros_like(tensor) for tensor in theirs]

    def register(agent: nixl_agent, tensors: list[Any]) -> list[Any]:
        """As Ray's transport does it, one storage after the other."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        rows = [[(s.data_ptr(), s.nbytes(), 0, "")] for s in storages]
        return [agent.register_memory(row, "cpu") for row in rows]

    register(holder, theirs)
    registered = register(reader, ours)
    reader.add_remote_agent(holder.get_agent_metadata())
    part = holder.get_partial_agent_metadata(holder.get_reg_descs(theirs))
    assert reader.add_remote_agent(part) == b"holder"
    sides = [reader.get_xfer_descs(tensors) for tensors in (ours, theirs)]
    handle = reader.initialize_xfer("READ", *sides, "holder")
    reader.transfer(handle)
    within(20, "the transfer", lambda: reader.check_xfer_state(handle) == "DONE")
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for descs in registered:
        reader.deregister_memory(descs)


def test_unread_notifications_are_kept_up_to_a_bound(
    agent: nixl_agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST", 3)
    for number in range(3):
        agent.send_notif("alone", b"%d" % number)
    assert not agent.check_remote_xfer_done("alone", b"9")
    agent.send_notif("alone", b"9")
    assert not agent.check_remote_xfer_done("alone", b"9"), "it waits"
    for number in range(3):
        assert agent.check_remote_xfer_done("alone", b"%d" % number)
    assert agent.check_remote_xfer_done("alone", b"9")
    assert agent.notifs == {}
