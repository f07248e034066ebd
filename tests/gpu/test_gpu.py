"""What only a GPU can show: one GPU, several processes. Each test prints what it saw (``-s``)."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fabric_ray import TransferEngine, pages
from fabric_ray.errors import FabricError, InvalidArgument, PeerLost, ResourceError, Stale
from fabric_ray.kernels import driver, mappable
from tests.gpu.peer import pattern, serve
from tests.processes import Other

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

TRANSPORTS = ["cuda_ipc", "shm", "tcp"]
#: How each moves GPU memory, as ``explain`` must say.
SAID = {
    "cuda_ipc": "copy engine",
    "shm": "staged through pinned host memory",
    "tcp": "staged through pinned host memory",
}
FAKE = bool(os.environ.get("FABRIC_RAY_FAKE_GPU"))
#: Less on a GPU that isn't there, whose copies are slow.
SIZE = (3 if FAKE else 64) << 20


def show(*what: object) -> None:
    print("   ", *what, flush=True)


class Pair:
    """An engine here and one in another process."""

    def __init__(self, other: Other, engine: TransferEngine) -> None:
        self.other = other
        self.engine = engine
        self.address = other.hear(60)
        self.peer = engine.peer(self.address)

    def remote(self, name: str, seed: int, nbytes: int, device: str) -> Any:
        descriptor = self.other.ask(("make", name, seed, nbytes, device), 60)
        return self.engine.import_region(descriptor)

    def local(self, seed: int, nbytes: int, device: str) -> tuple[torch.Tensor, Any]:
        tensor = pattern(seed, nbytes, device)
        torch.cuda.synchronize()
        return tensor, self.engine.register(tensor)

    def explain(self) -> str:
        return str(self.engine.explain(self.peer))


@contextlib.contextmanager
def paired(transport: str, **options: Any) -> Iterator[Pair]:
    torch.empty(1, device="cuda")
    ours = {"transport": transport, "token": b"gpu"}
    with Other(serve, {**ours, **options}) as other, TransferEngine(**ours) as engine:
        yield Pair(other, engine)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ic_2_bytes_are_in_gpu_memory_when_the_counter_says_so(transport: str) -> None:
    with paired(transport) as pair:
        for i, (here, there) in enumerate([("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu")]):
            _, src = pair.local(11 + i, SIZE, here)
            dst = pair.remote(f"to{i}", 1, SIZE, there)
            counter = pair.other.ask(("count", f"c{i}"))
            for round_ in range(5):
                pair.engine.write(src, dst, imm=counter)
                asked = ("holds", f"c{i}", 1, f"to{i}", 11 + i, 0, SIZE)
                same, value = pair.other.ask(asked, 60)
                assert same, f"{here} to {there}, round {round_}"
                assert value == round_ + 1  # IC-1
            # Odd sizes and places.
            pair.engine.write(src, dst, 1001, src_offset=0, dst_offset=7, imm=counter).wait(30)
            same, _ = pair.other.ask(("holds", f"c{i}", 1, f"to{i}", 11 + i, 7, 1001), 60)
            assert same
            start = time.perf_counter()
            for _ in range(4):
                pair.engine.write(src, dst).wait(30)
            speed = 4 * SIZE / (time.perf_counter() - start) / 1e9
            show(f"{transport}: {here} -> {there} {speed:.1f} GB/s")
        said = pair.explain()
        show(said)
        assert SAID[transport] in said


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tensors_of_one_allocator_segment_share_a_registration(transport: str) -> None:
    with paired(transport) as pair:
        # Small tensors come from segments of 2 MiB.
        tensors = [pattern(i, 4096, "cuda") for i in range(64)]
        torch.cuda.synchronize()
        before = pair.engine.stats()["regions"]
        regions = [pair.engine.register(tensor, segment=True) for tensor in tensors]
        made = pair.engine.stats()["regions"] - before
        show(f"{transport}: {len(tensors)} tensors in {made} registrations")
        assert made < len(tensors) // 4
        there = pair.remote("segment", 0, 4096 * len(tensors), "cuda")
        for i, region in enumerate(regions):
            pair.engine.write(region, there, 4096, dst_offset=4096 * i).wait(30)
        back, into = pair.local(99, 4096 * len(tensors), "cuda")
        pair.engine.read(there, into).wait(30)
        assert torch.equal(back.view(len(tensors), 4096), torch.stack(tensors).view(-1, 4096))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_reads_and_pages_of_gpu_memory(transport: str) -> None:
    with paired(transport) as pair:
        src = pair.remote("src", 21, SIZE, "cuda")
        tensor, dst = pair.local(0, SIZE, "cuda")
        pair.engine.read(src, dst).wait(30)
        assert torch.equal(tensor, pattern(21, SIZE, "cuda"))

        page, n = 24 << 10, 1500
        order = torch.randperm(n)
        to = pages(order.tolist(), stride=page)
        counter = pair.other.ask(("count", "pages"))
        back, ours = pair.local(33, page * n, "cuda")
        there = pair.remote("pages", 0, page * n, "cuda")
        start = time.perf_counter()
        straight = pages(range(n), stride=page)
        pair.engine.write_pages(page, ours, straight, there, to, imm=counter).wait(30)
        show(f"{transport}: {n} pages of {page} bytes in {time.perf_counter() - start:.4f} s")
        whole, into = pair.local(0, page * n, "cuda")
        pair.engine.read(there, into).wait(30)
        assert torch.equal(whole.view(n, page)[order], back.view(n, page))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_process_without_cuda_pushes_to_a_gpu(transport: str) -> None:
    """The writer of the bytes sees no GPU at all."""
    program = f"""
import pickle, sys, numpy as np
from fabric_ray import TransferEngine
descriptor, counter = pickle.load(sys.stdin.buffer)
with TransferEngine(transport={transport!r}, token=b"gpu") as engine:
    src = engine.register(np.arange(1 << 20, dtype=np.int64))
    engine.write(src, engine.import_region(descriptor), imm=counter).wait(30)
"""
    with TransferEngine(transport=transport, token=b"gpu") as engine:
        tensor = torch.zeros(1 << 20, dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        region, counter = engine.register(tensor), engine.counter()
        assert region.cuda_device == 0
        subprocess.run(
            [sys.executable, "-c", program],
            input=pickle.dumps((region.descriptor(), counter.ref)),
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            check=True,
            timeout=120,
        )
        counter.wait(1, timeout=30)
        assert torch.equal(tensor, torch.arange(1 << 20, device="cuda"))
        show(f"{transport}: from a process without CUDA")


def test_regions_of_gpu_memory_as_tensors_and_what_is_refused() -> None:
    with TransferEngine() as engine:
        tensor = torch.arange(1000, device="cuda")
        region = engine.register(tensor)
        show(region)
        view = region.tensor(torch.int64)
        view[3] = 77
        assert tensor[3].item() == 77
        assert view.data_ptr() == tensor.data_ptr()
        with pytest.raises(InvalidArgument, match="use tensor"):
            region.numpy()
        with pytest.raises(AttributeError):
            _ = region.__array_interface__
        with pytest.raises(InvalidArgument, match="not contiguous"):
            engine.register(torch.ones(8, 8, device="cuda").t())
        part = region[8:16].tensor(torch.int64)
        assert part.item() == 1
        pinned = engine.register(torch.ones(100).pin_memory())
        assert pinned.cuda_device is None
        assert engine.stats()["regions"] == 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_mr_2_gpu_memory_that_was_deregistered_is_stale_and_can_be_freed(transport: str) -> None:
    with paired(transport) as pair:
        _, src = pair.local(1, SIZE, "cuda")
        dst = pair.remote("gone", 2, SIZE, "cuda")
        pair.engine.write(src, dst).wait(30)
        pair.other.ask(("drop", "gone"), 60)
        with pytest.raises(Stale) as e:
            pair.engine.write(src, dst).wait(30)
        show(f"{transport}: {e.value}")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rs_4_a_killed_peer_ends_what_is_under_way(transport: str) -> None:
    with paired(transport) as pair:
        tensor, src = pair.local(1, SIZE, "cuda")
        dst = pair.remote("to", 2, SIZE, "cuda")
        pair.engine.write(src, dst).wait(30)
        under_way = [pair.engine.write(src, dst) for _ in range(50)]
        pair.other.kill()
        start = time.monotonic()
        ends = []
        for transfer in under_way:
            try:
                transfer.wait(10)
                ends.append("done")
            except PeerLost:
                ends.append("lost")
            except FabricError as e:
                ends.append(type(e).__name__)
        took = time.monotonic() - start
        show(f"{transport}: {ends.count('done')} done, {ends.count('lost')} lost in {took:.2f} s")
        assert took < 2.5
        assert not any("Timeout" in end for end in ends)
        # Our own GPU goes on.
        src.deregister()
        assert torch.equal(tensor, pattern(1, SIZE, "cuda"))


def into_driver_memory(transport: str) -> None:
    """Bytes arrive in memory of the driver's by this transport's own way."""
    with paired(transport) as pair:
        _, src = pair.local(9, SIZE, "cuda")
        dst = pair.remote("to", 6, SIZE, "driver")
        counter = pair.other.ask(("count", "c"))
        pair.engine.write(src, dst, imm=counter).wait(30)
        same, _ = pair.other.ask(("holds", "c", 1, "to", 9, 0, SIZE), 60)
        assert same
        assert SAID[transport] in pair.explain(), pair.explain()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_memory_of_the_driver_takes_the_transports_own_way(transport: str) -> None:
    into_driver_memory(transport)


@pytest.mark.parametrize("nbytes", [1, 4096, (2 << 20) + 1, 4 << 20])
def test_memory_of_the_driver_shares_no_block_with_what_peers_may_not_map(nbytes: int) -> None:
    memory = mappable(nbytes, torch.device("cuda", torch.cuda.current_device()))
    assert memory.shape == (nbytes,)
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    whose = ctypes.c_uint64(memory.data_ptr())
    driver._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), whose)
    torch.cuda.synchronize()
    assert (base.value, size.value % (2 << 20)) == (memory.data_ptr(), 0)


def test_memory_of_the_driver_is_free_with_its_last_reference() -> None:
    memory = mappable(SIZE, torch.device("cuda", torch.cuda.current_device()))
    found = (ctypes.c_uint64(), ctypes.c_size_t())
    whose = (*map(ctypes.byref, found), ctypes.c_uint64(memory.data_ptr()))
    torch.cuda.synchronize()
    with TransferEngine() as engine:
        region = engine.register(memory)
        del memory
        gc.collect()
        driver._call("cuMemGetAddressRange_v2", *whose)
        region.deregister()
        del region

    gc.collect()
    with pytest.raises(ResourceError):
        driver._call("cuMemGetAddressRange_v2", *whose)


@pytest.mark.skipif(FAKE, reason="needs torch's allocators")
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("allocator", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_memory_that_other_processes_cannot_map_is_staged(transport: str, allocator: str) -> None:
    """A process of its own, because the allocator is chosen once; memory of the driver's is as it
    always is."""
    program = f"""
import torch
from tests.gpu.test_gpu import SIZE, into_driver_memory, paired
if __name__ == "__main__":
    with paired({transport!r}) as pair:
        _, src = pair.local(5, SIZE, "cuda")
        dst = pair.remote("to", 6, SIZE, "cuda")
        counter = pair.other.ask(("count", "c"))
        pair.engine.write(src, dst, imm=counter).wait(30)
        same, _ = pair.other.ask(("holds", "c", 1, "to", 5, 0, SIZE), 60)
        assert same
        assert "staged through pinned host memory" in pair.explain(), pair.explain()
    into_driver_memory({transport!r})
"""
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": allocator, "PYTHONPATH": os.getcwd()}
    path = f"/dev/shm/fabric-ray-gpu-{os.getpid()}.py"
    with open(path, "w") as f:
        f.write(program)
    try:
        subprocess.run([sys.executable, path], env=env, check=True, timeout=180)
    finally:
        os.unlink(path)
    show(f"{transport}: {allocator} is staged")


def test_a_word_and_a_flag_that_kernels_share() -> None:
    with TransferEngine() as a, TransferEngine() as b:
        seen: list[tuple[int, int]] = []
        watcher = a.watch(lambda old, new: seen.append((old, new)), device=0)
        show("the word lies in", watcher.home)
        word = torch.as_tensor(watcher, device="cuda")
        for value in (5, 6):
            word.fill_(value)
            torch.cuda.synchronize()
            until = time.monotonic() + 5
            while watcher.value != value and time.monotonic() < until:
                time.sleep(0.001)
        time.sleep(0.05)
        assert seen[-1:], "no change was seen"
        assert seen[-1][1] == 6, seen
        watcher.store(9)
        assert word.item() == 9

        counter = b.counter()
        flag = counter.expect(1, timeout=30).flag(device=0)
        raised = torch.as_tensor(flag, device="cuda")
        assert raised.item() == 0
        assert not flag
        inbox, src = b.alloc(64), a.alloc(64)
        a.write(src, a.import_region(inbox.descriptor()), imm=counter.ref).wait(30)
        until = time.monotonic() + 5
        while raised.item() != 1 and time.monotonic() < until:
            time.sleep(0.001)
        assert raised.item() == 1
        assert flag


def test_an_engine_writes_gpu_memory_to_itself() -> None:
    torch.empty(1, device="cuda")
    for transport in TRANSPORTS:
        with TransferEngine(transport=transport, token=b"gpu") as engine:
            src, dst = pattern(1, SIZE, "cuda"), pattern(2, SIZE, "cuda")
            torch.cuda.synchronize()
            target = engine.register(dst)
            there = engine.import_region(target.descriptor())
            engine.write(engine.register(src), there).wait(30)
            assert torch.equal(src, dst), transport


def test_gpu_memory_is_spilled_to_a_file_and_fetched(tmp_path: Path) -> None:
    torch.empty(1, device="cuda")
    with Other(serve, {"transport": "tcp"}) as other, TransferEngine(transport="tcp") as engine:
        src, back = pattern(1, SIZE, "cuda"), torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        spill = engine.register_file(tmp_path / "spill", nbytes=SIZE, create=True)
        own = engine.import_region(spill.descriptor())
        engine.write(engine.register(src), own).wait(30)
        assert (tmp_path / "spill").read_bytes() == src.cpu().numpy().tobytes()
        engine.read(own, engine.register(back)).wait(30)
        assert torch.equal(src, back)
        # From the file into a peer's GPU, and back into another part of the file.
        other.hear(60)
        theirs = engine.import_region(other.ask(("make", "to", 2, SIZE, "cuda"), 60))
        engine.write(spill, theirs).wait(30)
        back.zero_()
        torch.cuda.synchronize()
        engine.read(theirs, engine.register(back)).wait(30)
        assert torch.equal(src, back)


def test_rs_2_by_default_gpus_of_one_host_take_cuda_ipc() -> None:
    torch.empty(1, device="cuda")
    with Other(serve, {}) as other, TransferEngine() as engine:
        peer = engine.peer(other.hear(60))
        engine.connect(peer)
        descriptor = other.ask(("make", "to", 1, 4096, "cuda"), 60)
        _ = engine.write(
            engine.register(torch.ones(4096, dtype=torch.uint8, device="cuda")),
            engine.import_region(descriptor),
        ).wait(30)
        explained = engine.explain(peer)
        show(explained)
        assert explained.transport == "cuda_ipc"


@pytest.mark.skipif(FAKE, reason="needs a count of a GPU's memory")
def test_nothing_is_left_on_the_gpu() -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        with paired("cuda_ipc") as pair:
            _, src = pair.local(1, SIZE, "cuda")
            pair.engine.write(src, pair.remote("to", 2, SIZE, "cuda")).wait(30)
            del src
    torch.cuda.empty_cache()
    lost = before - torch.cuda.mem_get_info()[0]
    show(f"{lost >> 20} MiB more in use than before")
    assert lost < 256 << 20
