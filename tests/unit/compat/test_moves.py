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


def opened(array: Bytes, port: int = 0) -> TransferEngine:
    engine = TransferEngine()
    assert engine.initialize(f"{HOST}:{port}" if port else HOST, "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(array.ctypes.data, array.nbytes) == 0
    return engine


class Pair:
    """Two engines with an array each; the first writes to the second."""

    def __init__(self) -> None:
        self.ours, self.theirs = np.arange(SIZE).astype(np.uint8), np.zeros(SIZE, dtype=np.uint8)
        self.here, self.there = opened(self.ours), opened(self.theirs)
        self.port = self.there.get_rpc_port()
        self.session = f"{HOST}:{self.port}"

    def write(self, to: Bytes | None = None) -> int:
        target = self.theirs if to is None else to
        where = self.ours.ctypes.data, target.ctypes.data, SIZE
        return self.here.transfer_sync_write(self.session, *where)

    def end_peer(self) -> None:
        del self.there
        gc.collect()

    def restart_peer(self, array: Bytes) -> None:
        """At the same port, with this memory."""
        self.end_peer()
        self.theirs, self.there = array, opened(array, self.port)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setenv("FABRIC_RAY_TRANSPORT", "shm")
    return Pair()


def test_mr_2_a_restarted_peer_is_not_written_until_the_caller_knows(pair: Pair) -> None:
    assert pair.write() == 0
    pair.theirs[:] = 0
    pair.restart_peer(pair.theirs)  # The same addresses, as if by chance.
    assert pair.here.send_probe(pair.session) == 0
    assert pair.write() == -1
    assert not pair.theirs.any()
    assert pair.here.get_first_buffer_address(pair.session) == pair.theirs.ctypes.data
    assert pair.write() == 0
    assert np.array_equal(pair.ours, pair.theirs)


def test_a_peer_that_restarted_elsewhere_in_memory_is_named(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    assert pair.write() == 0
    pair.restart_peer(np.zeros(SIZE, dtype=np.uint8))
    assert pair.write() == -1
    assert "has restarted" in caplog.text
    assert not pair.theirs.any()
    assert pair.write() == 0


def test_a_peer_that_is_gone_is_forgotten(pair: Pair) -> None:
    assert pair.write() == 0
    sessions = pair.here._opened()
    assert pair.session in sessions._known
    pair.end_peer()
    assert pair.write() == -1
    assert pair.session not in sessions._known


def test_an_answer_that_comes_late_is_not_taken_for_the_newest(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = np.zeros(SIZE, dtype=np.uint8)
    sessions, asked = pair.here._opened(), []
    ask = sessions.ask

    def slow(*question: Any) -> Any:
        answer = ask(*question)
        asked.append(answer)
        if len(asked) == 1:
            # Another thread learns first of what the peer registers meanwhile.
            assert pair.there.register_memory(more.ctypes.data, SIZE) == 0
            sessions.learn(pair.session)
        return answer

    monkeypatch.setattr(sessions, "ask", slow)
    told = sessions.learn(pair.session)
    assert asked[0].version < asked[1].version == told.version == sessions.at(pair.session).version
    assert pair.write(more) == 0
    assert np.array_equal(pair.ours, more)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]], ids=["none", "one", "two"])
def test_an_empty_transfer_is_done(pair: Pair, lengths: list[int]) -> None:
    ours, theirs = ([a.ctypes.data] * len(lengths) for a in (pair.ours, pair.theirs))
    where = pair.session, ours, theirs, lengths
    assert pair.here.batch_transfer_sync(*where, TransferOpcode.Write) == 0
    number = pair.here.batch_transfer_async_read(*where)
    assert number > 0
    assert pair.here.transfer_check_status(number) == 1
    assert pair.here.transfer_check_status(number) == -1, "it is forgotten"


def test_mr_1_memory_that_was_registered_anew_is_not_tried_again_while_the_first_may_land(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    for quiet, code in ((True, 0), (False, -1)):
        assert pair.write() == 0
        assert pair.there.unregister_memory(pair.theirs.ctypes.data) == 0
        assert pair.there.register_memory(pair.theirs.ctypes.data, SIZE) == 0
        monkeypatch.setattr(Move, "quiet", quiet)
        assert pair.write() == code
    assert pair.write() == 0
