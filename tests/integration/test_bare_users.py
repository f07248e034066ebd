"""The least privileged container: user 1000, without capabilities and without a way to any."""

from __future__ import annotations

import ctypes
import os
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from fabric_ray import TransferEngine
from tests.processes import Other

USER = 1000
BYTES = 1 << 20
_SET_DUMPABLE, _DROP_FROM_BOUNDING_SET, _NO_NEW_PRIVILEGES = 4, 24, 38


def become_bare() -> None:
    """What ``setpriv --reuid 1000 --regid 1000 --clear-groups --bounding-set=-all --inh-caps=-all
    --no-new-privs`` does, of a process whose interpreter may lie where that user can't read."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    highest = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    for capability in range(highest + 1):
        assert prctl(_DROP_FROM_BOUNDING_SET, capability, 0, 0, 0) == 0
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    assert prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
    # A program that such a user starts is; one that has changed its user isn't any more.
    assert prctl(_SET_DUMPABLE, 1, 0, 0, 0) == 0


def standing() -> dict[str, str]:
    """What the kernel says of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    wanted = ("Uid", "CapEff", "CapPrm", "CapBnd", "CapAmb", "NoNewPrivs")
    return {name: status[name].split()[0] for name in wanted}


def receive(connection: Connection, transport: str) -> None:
    """Offers memory of the engine's and memory of its own, and says what came."""
    become_bare()
    with TransferEngine(name="bare receiver", transport=transport) as engine:
        own = np.zeros(BYTES, np.uint8)
        regions = [engine.alloc(BYTES), engine.register(own)]
        counter = engine.counter()
        connection.send(([r.descriptor() for r in regions], counter.ref, standing()))
        counter.wait(len(regions), timeout=60)
        connection.send([bool((region.numpy() == 7).all()) for region in regions])
        connection.recv()


def write(connection: Connection, transport: str) -> None:
    become_bare()
    with TransferEngine(name="bare writer", transport=transport) as engine:
        descriptors, counter = connection.recv()
        source = engine.alloc(BYTES)
        source.numpy()[:] = 7
        for descriptor in descriptors:
            there = engine.import_region(descriptor)
            engine.write(source, there, imm=counter).wait(60)
        connection.send((engine.explain(there.peer).transport, standing()))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_two_processes_without_any_privilege_transfer(transport: str) -> None:
    with Other(receive, transport) as receiver, Other(write, transport) as writer:
        descriptors, counter, there = receiver.hear(60)
        used, here = writer.ask((descriptors, counter), 60)
        assert receiver.hear(60) == [True, True]
        receiver.say("done")
    assert used == transport
    none = f"{0:016x}"
    for status in (here, there):
        assert status == {
            "Uid": str(USER),
            "CapEff": none,
            "CapPrm": none,
            "CapBnd": none,
            "CapAmb": none,
            "NoNewPrivs": "1",
        }
