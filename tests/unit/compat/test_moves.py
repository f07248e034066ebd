"""Two of Mooncake's engines in one process: restarted peers, lost peers, empty transfers."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from fabric_ray.compat.mooncake import TransferEngine, TransferOpcode
from fabric_ray.compat.moves import Move

HOST = "127.0.0.1"
SIZE = 4096
Bytes = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def _shm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRIC_RAY_TRANSPORT", "shm")


def opened(array: Bytes, port: int = 0) -> TransferEngine:
    engine = TransferEngine()
    assert engine.initialize(f"{HOST}:{port}" if port else HOST, "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(array.ctypes.data, array.nbytes) == 0
    return engine


def arrays() -> tuple[Bytes, Bytes]:
    return np.arange(SIZE).astype(np.uint8), np.zeros(SIZE, dtype=np.uint8)


def test_mr_2_a_restarted_peer_is_not_written_until_the_caller_knows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, theirs = arrays()
    here, there = opened(ours), opened(theirs)
    port = there.get_rpc_port()
    where = f"{HOST}:{port}", ours.ctypes.data, theirs.ctypes.data, SIZE
    assert here.transfer_sync_write(*where) == 0
    theirs[:] = 0
    del there
    gc.collect()
    again = opened(theirs, port)  # The same addresses, as if by chance.
    assert here.send_probe(where[0]) == 0
    assert here.transfer_sync_write(*where) == -1
    assert not theirs.any()
    assert here.get_first_buffer_address(where[0]) == theirs.ctypes.data
    assert here.transfer_sync_write(*where) == 0
    assert np.array_equal(ours, theirs)
    assert again.get_rpc_port() == port


def test_a_peer_that_restarted_elsewhere_in_memory_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, theirs = arrays()
    other = np.zeros(SIZE, dtype=np.uint8)
    here, there = opened(ours), opened(theirs)
    port = there.get_rpc_port()
    session = f"{HOST}:{port}"
    assert here.transfer_sync_write(session, ours.ctypes.data, theirs.ctypes.data, SIZE) == 0
    del there
    gc.collect()
    again = opened(other, port)
    assert here.transfer_sync_write(session, ours.ctypes.data, other.ctypes.data, SIZE) == -1
    assert "has restarted" in caplog.text
    assert not other.any()
    assert here.transfer_sync_write(session, ours.ctypes.data, other.ctypes.data, SIZE) == 0
    assert again.get_rpc_port() == port


def test_a_peer_that_is_gone_is_forgotten() -> None:
    ours, theirs = arrays()
    here, there = opened(ours), opened(theirs)
    session = f"{HOST}:{there.get_rpc_port()}"
    assert here.transfer_sync_write(session, ours.ctypes.data, theirs.ctypes.data, SIZE) == 0
    sessions = here._opened()
    assert session in sessions._known
    del there
    gc.collect()
    assert here.transfer_sync_write(session, ours.ctypes.data, theirs.ctypes.data, SIZE) == -1
    assert session not in sessions._known


def test_an_answer_that_comes_late_is_not_taken_for_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = arrays()
    more = np.zeros(SIZE, dtype=np.uint8)
    here, there = opened(ours), opened(theirs)
    name, sessions = f"{HOST}:{there.get_rpc_port()}", here._opened()
    asked, ask = [], sessions.ask

    def slow(*question: Any) -> Any:
        answer = ask(*question)
        asked.append(answer)
        if len(asked) == 1:
            # Another thread learns first of what the peer registers meanwhile.
            assert there.register_memory(more.ctypes.data, SIZE) == 0
            sessions.learn(name)
        return answer

    monkeypatch.setattr(sessions, "ask", slow)
    told = sessions.learn(name)
    assert asked[0].version < asked[1].version == told.version == sessions.at(name).version
    assert here.transfer_sync_write(name, ours.ctypes.data, more.ctypes.data, SIZE) == 0
    assert np.array_equal(ours, more)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]], ids=["none", "one", "two"])
def test_an_empty_transfer_is_done(lengths: list[int]) -> None:
    ours, theirs = arrays()
    here, there = opened(ours), opened(theirs)
    session = f"{HOST}:{there.get_rpc_port()}"
    where = [ours.ctypes.data] * len(lengths), [theirs.ctypes.data] * len(lengths), lengths
    assert here.batch_transfer_sync(session, *where, TransferOpcode.Write) == 0
    number = here.batch_transfer_async_read(session, *where)
    assert number > 0
    assert here.transfer_check_status(number) == 1
    assert here.transfer_check_status(number) == -1, "it is forgotten"


def test_mr_1_memory_that_was_registered_anew_is_not_tried_again_while_the_first_may_land(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = arrays()
    here, there = opened(ours), opened(theirs)
    session = f"{HOST}:{there.get_rpc_port()}"
    where = session, ours.ctypes.data, theirs.ctypes.data, SIZE
    for quiet, code in ((True, 0), (False, -1)):
        assert here.transfer_sync_write(*where) == 0
        assert there.unregister_memory(theirs.ctypes.data) == 0
        assert there.register_memory(theirs.ctypes.data, SIZE) == 0
        monkeypatch.setattr(Move, "quiet", quiet)
        assert here.transfer_sync_write(*where) == code
    assert here.transfer_sync_write(*where) == 0
