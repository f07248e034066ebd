"""What a machine without a GPU can show: what is missing is said, and nothing else suffers. And
windows, the half of staging that needs no GPU."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch

from fabric_ray import TransferEngine
from fabric_ray.errors import InvalidArgument, PeerLost, ResourceError, TransportUnavailable
from tests.processes import Other

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@without_gpu
def test_rs_2_cuda_ipc_that_was_asked_for_says_what_is_missing() -> None:
    with pytest.raises(TransportUnavailable, match=r"cuda_ipc: .*(libcuda|cuInit)"):
        TransferEngine(transport="cuda_ipc")
    with pytest.raises(TransportUnavailable, match=r"libcuda|cuInit"):
        TransferEngine(require="cuda_ipc")


@without_gpu
def test_words_and_flags_for_kernels_need_a_gpu() -> None:
    with TransferEngine() as engine:
        with pytest.raises(ResourceError, match="needs a GPU"):
            engine.watch(print, device=0)
        transfer = engine.counter().expect(1, timeout=1)
        with pytest.raises(ResourceError, match="needs a GPU"):
            transfer.flag(device=0)
        watcher = engine.watch(lambda _old, _new: None)
        assert watcher.home == "host memory"
        assert not hasattr(watcher, "__cuda_array_interface__")
        region = engine.register(np.zeros(8))
        assert region.cuda_device is None
        assert not hasattr(region, "__cuda_array_interface__")


def test_other_devices_are_refused_by_name() -> None:
    with TransferEngine() as engine, pytest.raises(InvalidArgument, match="meta"):
        engine.register(torch.empty(8, device="meta"))


def hold(connection: Connection, transport: str) -> None:
    array = np.zeros(64 << 20, dtype=np.uint8)
    engine = TransferEngine(transport=transport, token=b"t", stage_foreign=True)
    region, counter = engine.register(array), engine.counter()
    connection.send((region.descriptor(), counter.ref))
    while connection.recv() == "check":
        counter.wait(1, timeout=20)
        # IC-2: at this moment, all of it.
        connection.send((bytes(array[:1000]), int(array.sum(dtype=np.int64))))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_ic_2_and_rs_4_memory_that_the_kernel_must_not_reach(transport: str) -> None:
    source = np.random.default_rng(1).integers(0, 256, 64 << 20, dtype=np.uint8)
    options = {"transport": transport, "token": b"t", "stage_foreign": True}
    with Other(hold, transport) as other, TransferEngine(**options) as engine:
        descriptor, counter = other.hear()
        src, dst = engine.register(source), engine.import_region(descriptor)
        for _ in range(3):
            engine.write(src, dst, imm=counter)
            head, total = other.ask("check")
            assert head == bytes(source[:1000])
            assert total == int(source.sum(dtype=np.int64))
        said = str(engine.explain(dst.peer))
        assert "staged through a window" in said, said

        under_way = [engine.write(src, dst) for _ in range(20)]
        other.kill()
        start = time.monotonic()
        ends = [transfer.exception() for transfer in under_way if not _ends(transfer)]
        assert time.monotonic() - start < 2.5
        assert all(isinstance(end, PeerLost) for end in ends), ends
        src.deregister()


def _ends(transfer: object) -> bool:
    """Waits; whether it ended well."""
    try:
        transfer.wait(10)  # type: ignore[attr-defined]
    except PeerLost:
        return False
    return True
