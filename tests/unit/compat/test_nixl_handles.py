"""Handles of the NIXL face that their owner lets go of without a word."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from fabric_ray.compat.nixl import nixl_agent, nixl_agent_config

SIZE = 4096


@pytest.fixture
def memory() -> np.ndarray[Any, Any]:
    return np.arange(2 * SIZE, dtype=np.uint32).astype(np.uint8)


@pytest.fixture
def agent(memory: np.ndarray[Any, Any]) -> nixl_agent:
    agent = nixl_agent("alone", nixl_agent_config())
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    return agent


def posted(agent: nixl_agent, memory: np.ndarray[Any, Any]) -> Any:
    """A transfer from the second half of the memory to the first."""
    sides = [agent.get_xfer_descs([(memory.ctypes.data + at, SIZE, 0)], "DRAM") for at in (0, SIZE)]
    assert sides[0] is not None
    assert sides[1] is not None
    handle = agent.initialize_xfer("READ", sides[0], sides[1], "alone")
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
    assert list(agent._dropped) == [request]
    agent.get_new_notifs()
    assert not agent._dropped


def test_dropped_handles_are_released_by_the_next_that_is_made(
    agent: nixl_agent, memory: np.ndarray[Any, Any]
) -> None:
    for _ in range(3):
        side = agent.prep_xfer_dlist("", [(memory.ctypes.data, SIZE, 0)], "DRAM")
        handle = posted(agent, memory)
        assert not agent._dropped
        del side, handle
        assert len(agent._dropped) == 1
