"""An idle engine uses no CPU; engines that many threads open and close leak nothing."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest

from fabric_ray import TransferEngine
from fabric_ray.errors import EngineClosed
from tests.at_once import at_once
from tests.chaos.belongings import Belongings
from tests.processes import Other, within

THREADS = 16
SECONDS = 5.0


def idle(connection: Connection) -> None:
    """Connects to two peers, then says how much processor time three seconds of nothing took."""
    engine = TransferEngine(name="idle")
    src, counter = engine.alloc(64), engine.counter()
    remotes = [engine.import_region(d) for d in connection.recv()]
    for there in remotes:
        engine.write(src, there).wait(10)
    kept = counter.expect(1, writers=[there.peer for there in remotes])
    time.sleep(0.5)
    start = time.process_time()
    time.sleep(3)
    used = time.process_time() - start
    connection.send((used, [engine.explain(there.peer).transport for there in remotes]))
    del kept


def test_an_idle_engine_uses_less_than_a_hundredth_of_a_core(
    open_engine: Callable[..., TransferEngine],
) -> None:
    regions = [open_engine(t, transport=t).alloc(64) for t in ("shm", "tcp")]
    with Other(idle) as other:
        used, transports = other.ask([r.descriptor() for r in regions])
    assert transports == ["shm", "tcp"]
    assert used < 0.03, f"{used:.3f} s of processor time in 3 s"


class Churn:
    """State that the threads of a churn share."""

    def __init__(self, transport: str, receiver: TransferEngine) -> None:
        self.transport = transport
        self.region, self.counter = receiver.alloc(4096), receiver.counter()
        self.lock = threading.Lock()
        self.engines = self.submitted = self.confirmed = 0

    def let_go(self) -> None:
        del self.region, self.counter

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds

        def work(seed: int) -> None:
            draw = random.Random(seed)
            while time.monotonic() < end:
                self._open_write_close(draw)

        at_once(work, threads=THREADS, seconds=seconds + 30)

    def _open_write_close(self, draw: random.Random) -> None:
        with TransferEngine(name="brief", transport=self.transport) as engine:
            there = engine.import_region(self.region.descriptor())
            src, n = engine.alloc(4096), draw.randrange(1, 20)
            writes = [engine.write(src, there, imm=self.counter.ref) for _ in range(n)]
            if draw.random() < 0.5:
                for write in writes:
                    write.wait(20)
        # Without a wait the engine may have closed first; the write then fails.
        over = [write.exception() for write in writes]
        assert all(e is None or isinstance(e, EngineClosed) for e in over), over
        with self.lock:
            self.engines += 1
            self.submitted += n
            self.confirmed += over.count(None)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_ic_3_threads_that_open_write_and_close_count_right_and_leak_nothing(
    transport: str, open_engine: Callable[..., TransferEngine]
) -> None:
    receiver = open_engine("receiver", transport=transport)
    Churn(transport, receiver).run(0.3)
    time.sleep(2.5)  # half-open connections are given up after 2 s
    before = Belongings()
    churn = Churn(transport, receiver)
    churn.run(SECONDS)
    assert churn.engines > 2 * THREADS
    within(10, "the last counts", lambda: churn.counter.value >= churn.confirmed)
    assert churn.counter.value <= churn.submitted
    churn.let_go()
    assert before.left(10) is None
