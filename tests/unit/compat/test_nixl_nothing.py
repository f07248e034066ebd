"""Requests of the NIXL face that have nothing to copy, and what an agent keeps of what is said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fabric_ray.compat.nixl import agent as module
from fabric_ray.compat.nixl import nixl_agent, nixl_agent_config


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> nixl_agent:
    monkeypatch.setenv("FABRIC_RAY_TRANSPORT", "shm")
    return nixl_agent("itself", nixl_agent_config(capture_telemetry=True))


def test_a_request_of_no_bytes_is_done_at_once_and_tells_of_it(agent: nixl_agent) -> None:
    array: np.ndarray[Any, Any] = np.zeros(64, dtype=np.uint8)
    agent.register_memory([(array.ctypes.data, array.nbytes, 0, "")], "DRAM")
    none = agent.get_xfer_descs([(array.ctypes.data, 0, 0), (array.ctypes.data + 8, 0, 0)], "DRAM")
    assert none is not None
    handle = agent.initialize_xfer("WRITE", none, none, "itself", b"nothing")
    for _ in range(2):
        assert agent.transfer(handle) == "DONE"
        assert agent.check_xfer_state(handle) == "DONE"
        assert agent.get_new_notifs() == {"itself": [b"nothing"]}
    assert agent.get_xfer_telemetry(handle).totalBytes == 0
    agent.release_xfer_handle(handle)


def test_what_nobody_looks_for_is_kept_up_to_a_bound(
    agent: nixl_agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST", 3)
    for said in range(3):
        agent.send_notif("itself", b"%d" % said)
    assert not agent.check_remote_xfer_done("itself", b"9")
    agent.send_notif("itself", b"9")
    assert not agent.check_remote_xfer_done("itself", b"9"), "it waits"
    for said in range(3):
        assert agent.check_remote_xfer_done("itself", b"%d" % said)
    assert agent.check_remote_xfer_done("itself", b"9")
    assert agent.notifs == {}
