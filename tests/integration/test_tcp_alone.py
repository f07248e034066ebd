"""An engine that is told to use one transport opens nothing of another (RS-2)."""

from __future__ import annotations

import os
from ctypes import CDLL
from ctypes.util import find_library
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from fabric_ray import TransferEngine
from tests.lacks import lacks
from tests.processes import Other

LIBRARIES = ("libibverbs", "libmlx5", "librdmacm", "libfabric", "libefa", "libcuda", "libgdrapi")


def opened() -> set[str]:
    """Those libraries, and device files of NICs and GPUs, that this process has."""
    mapped = Path("/proc/self/maps").read_text()
    found = {name for name in LIBRARIES if f"/{name}." in mapped}
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the listing's own
            continue
        if target.startswith(("/dev/infiniband", "/dev/nvidia")):
            found.add(target)
    return found


def transfer(connection: Connection, options: dict[str, str]) -> None:
    """Opens two engines, transfers, and sends the transport and the files that are open."""
    with TransferEngine(name="a", **options) as a, TransferEngine(name="b", **options) as b:
        inbox, counter = b.alloc(4096), b.counter()
        there = a.import_region(inbox.descriptor())
        a.write(a.alloc(4096), there, imm=counter.ref).wait(30)
        counter.wait(1, timeout=30)
        connection.send((a.explain(there.peer).transport, opened()))


def installed(library: str) -> str:
    """Its file's name; where it isn't installed, the test is left out."""
    name = find_library(library)
    if name is None:
        lacks("FABRIC_RAY_RDMA", f"lib{library} isn't installed: apt-get install lib{library}1")
    return name


def opens(connection: Connection, library: str) -> None:
    """Loads one library, and sends the files that are open."""
    CDLL(library)  # stays open until the process ends
    connection.send(opened())


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_an_engine_of_one_transport_opens_no_library_of_nics(transport: str) -> None:
    with Other(transfer, {"transport": transport}) as other:
        assert other.hear(60) == (transport, set())


@pytest.mark.parametrize("library", ["ibverbs", "fabric"])
def test_a_library_of_nics_that_a_process_opens_is_found(library: str) -> None:
    """That what the test above looks for would be seen."""
    with Other(opens, installed(library)) as other:
        assert f"lib{library}" in other.hear(60)


def test_one_that_may_use_anything_asks_libfabric_for_nics() -> None:
    """libibverbs isn't opened before sysfs shows a device; libfabric knows its own."""
    installed("fabric")
    with Other(transfer, {}) as other:
        _, found = other.hear(60)
    assert "libfabric" in found
