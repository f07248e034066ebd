"""Engines on starved hosts lose no healthy peer, and notice dead and stopped ones (RS-4)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from fabric_ray import TransferEngine
from fabric_ray.errors import PeerLost
from tests.processes import Other

TIMEOUT_S = 0.25


def starved(connection: Connection, cpu: int) -> None:
    """Opens an engine whose worker gets almost no core: others keep its only one busy."""
    engine = TransferEngine(name="starved", transport="tcp", peer_timeout=TIMEOUT_S)
    region = engine.alloc(4096)
    connection.send((engine.address, region.descriptor()))
    assert connection.recv() == "starve"
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "fabric-worker":
            os.sched_setaffinity(int(task.name), {cpu})
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
    connection.send("starving")
    connection.recv()


@contextmanager
def occupied(cpu: int, processes: int) -> Iterator[None]:
    """One core that has more to do than it can, for a minute at most."""
    code = f"import os, time; os.sched_setaffinity(0, {{{cpu}}}); end = time.time() + 60\n"
    code += "while time.time() < end: pass"
    busy = [subprocess.Popen([sys.executable, "-ISc", code]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_rs_4_a_peer_whose_worker_gets_no_core_is_not_lost(
    open_engine: Callable[..., TransferEngine],
) -> None:
    cpu = min(os.sched_getaffinity(0))
    a = open_engine("a", transport="tcp", peer_timeout=TIMEOUT_S)
    with Other(starved, cpu) as other:
        address, descriptor = other.hear()
        there, src = a.import_region(descriptor), a.alloc(4096)
        a.write(src, there).wait(10)
        waiting = a.counter().expect(1, writers=[a.peer(address)], timeout=60)
        with occupied(cpu, 6):
            assert other.ask("starve") == "starving"
            time.sleep(12 * TIMEOUT_S)
            assert not waiting.done(), waiting.exception()
        other.signal(signal.SIGSTOP)
        stopped = time.monotonic()
        with pytest.raises(PeerLost, match="nothing received for 250ms"):
            waiting.wait(20)
        assert time.monotonic() - stopped < 8 * TIMEOUT_S
        other.signal(signal.SIGCONT)
