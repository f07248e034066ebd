"""Files as regions: spilled to and fetched from by their own engine and by peers."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fabric_ray import Batch, RegionDescriptor, TransferEngine, pages
from fabric_ray.engine import Region, RemoteRegion
from fabric_ray.errors import InvalidArgument, ResourceError, StorageError

Pair = tuple[TransferEngine, TransferEngine]
Open = Callable[..., TransferEngine]


def importing(engine: TransferEngine, region: Region) -> RemoteRegion:
    sent: RegionDescriptor = pickle.loads(pickle.dumps(region.descriptor()))
    return engine.import_region(sent)


def random(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def test_a_peer_spills_pages_to_a_file_and_fetches_them_back(pair: Pair, tmp_path: Path) -> None:
    a, b = pair
    page, n = 16384, 128
    path = tmp_path / "kv.bin"
    spill = b.register_file(path, nbytes=page * n, create=True)
    assert (spill.path, spill.nbytes, spill.mappable) == (path, page * n, False)
    kv = random(page * n)
    source = a.register(kv)
    there = importing(a, spill)
    order = np.random.default_rng(1).permutation(n)
    counter = b.counter()
    transfer = a.write_pages(
        page, source, pages(range(n), stride=page), there, pages(order, stride=page),
        imm=counter.ref,
    )  # fmt: skip
    counter.wait(n, timeout=20)
    on_disk = np.fromfile(path, dtype=np.uint8).reshape(n, page)
    assert np.array_equal(on_disk[order], kv.reshape(n, page))
    transfer.wait(20)
    assert counter.value == n
    spill.sync()

    back = a.alloc(page * n)
    a.read_pages(
        page, there, pages(order, stride=page), back, pages(range(n), stride=page)
    ).wait(20)  # fmt: skip
    assert np.array_equal(back.numpy(), kv)


def test_an_engine_spills_to_its_own_file(open_engine: Open, tmp_path: Path) -> None:
    engine = open_engine()
    memory = engine.alloc(3 << 20)
    memory.numpy()[:] = random(3 << 20)
    file = engine.register_file(tmp_path / "own", nbytes=4 << 20, create=True)
    there = importing(engine, file)
    counter = engine.counter()
    transfer = engine.write(memory, there, 3 << 20, dst_offset=77, imm=counter.ref)
    counter.wait(1, timeout=20)
    transfer.wait(20)
    on_disk = np.fromfile(tmp_path / "own", dtype=np.uint8)
    assert np.array_equal(on_disk[77 : 77 + (3 << 20)], memory.numpy())
    one = engine.write(memory, there, 1)
    assert one.transport == "file"
    one.wait(20)  # a read may overtake a write that is under way
    copy = engine.register_file(tmp_path / "copy", nbytes=4 << 20, create=True)
    engine.read(there, copy).wait(20)
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "own").read_bytes()
    assert "files by" in str(engine.explain(there.peer))


async def test_file_transfers_are_awaited(open_engine: Open, tmp_path: Path) -> None:
    engine = open_engine()
    file = engine.register_file(tmp_path / "f", nbytes=1 << 20, create=True)
    there = importing(engine, file)
    parts = [engine.alloc(1 << 18) for _ in range(4)]
    for i, part in enumerate(parts):
        part.numpy()[:] = i
    await asyncio.gather(
        *(engine.write(p, there, dst_offset=i << 18, nbytes=1 << 18) for i, p in enumerate(parts))
    )
    whole = np.fromfile(tmp_path / "f", dtype=np.uint8).reshape(4, -1)
    assert [set(row) for row in whole.tolist()] == [{0}, {1}, {2}, {3}]


def test_rs_1_a_file_cut_short_is_an_error_that_names_it(pair: Pair, tmp_path: Path) -> None:
    a, b = pair
    path = tmp_path / "checkpoint.bin"
    path.write_bytes(random(1 << 20).tobytes())
    file = b.register_file(path)
    there = importing(a, file)
    with path.open("r+b") as f:
        f.truncate(1000)
    into = a.alloc(1 << 20)
    with pytest.raises(StorageError, match=r"checkpoint\.bin.*cut short") as raised:
        a.read(there, into).wait(20)
    assert raised.value.peer.startswith("b#")
    a.read(there, into, 1000).wait(20)
    file.deregister()


FULL = """
import resource, signal, sys
from fabric_ray import TransferEngine
from fabric_ray.errors import StorageError

transport, path = sys.argv[1:]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
b = TransferEngine(name="b", transport=transport)
a = b if transport == "file" else TransferEngine(name="a", transport=transport)
spill = b.register_file(path, nbytes=8 << 20, create=True)
there = a.import_region(spill.descriptor())
source, counter = a.alloc(4 << 20), b.counter()
a.write(source, there, 1).wait(20)
# From here on the system takes no byte beyond 1 MiB of any file.
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
for _ in range(2):
    try:
        a.write(source, there, 4 << 20, imm=counter.ref).wait(20)
    except StorageError as e:
        assert "spill.bin" in str(e) and "File too large" in str(e), e
    else:
        raise AssertionError("it passed for success")
assert counter.value == 0
a.write(source, there, 1 << 20, imm=counter.ref).wait(20)
counter.wait(1, timeout=20)
assert counter.value == 1
a.close(), b.close()
print("told")
"""


@pytest.mark.parametrize("transport", ["shm", "tcp", "file"])
def test_rs_1_a_write_that_the_system_refuses_is_told_and_never_counted(
    transport: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, transport, str(tmp_path / "spill.bin")],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.stdout == "told\n", done.stdout + done.stderr


def test_files_have_neither_address_nor_array(open_engine: Open, tmp_path: Path) -> None:
    engine = open_engine()
    file = engine.register_file(tmp_path / "f", nbytes=64, create=True)
    for use in (lambda: file.addr, file.numpy, file.tensor):
        with pytest.raises(InvalidArgument, match="has no address"):
            use()
    assert not hasattr(file, "__array_interface__")
    assert str(tmp_path / "f") in repr(file)
    assert file[8:16].path == tmp_path / "f"
    assert engine.alloc(64).path is None
    engine.alloc(64).sync()


def test_what_is_no_file_is_refused(open_engine: Open, tmp_path: Path) -> None:
    engine = open_engine()
    with pytest.raises(ResourceError, match="with create its directory"):
        engine.register_file(tmp_path / "none")
    (tmp_path / "short").write_bytes(b"12345")
    with pytest.raises(InvalidArgument, match="has 5 bytes"):
        engine.register_file(tmp_path / "short", nbytes=6)
    with pytest.raises(InvalidArgument, match="neither a file nor a disk"):
        engine.register_file("/dev/null")
    with pytest.raises(InvalidArgument):
        engine.register_file(tmp_path / "short", nbytes=-1)


def test_segments_span_memory_and_files_and_a_write_counts_once(pair: Pair, tmp_path: Path) -> None:
    a, b = pair
    memory, array = b.alloc(1 << 20), np.zeros(500_000, dtype=np.uint8)
    file = b.register_file(tmp_path / "cold", nbytes=2 << 20, create=True)
    segment = b.segment([memory, file, b.register(array)])
    assert segment.nbytes == (3 << 20) + 500_000
    described = pickle.loads(pickle.dumps(segment.descriptor()))
    assert described == segment.descriptor()
    assert [(at, n) for at, n, *_ in described.parts] == [
        (0, 1 << 20), (1 << 20, 2 << 20), (3 << 20, 500_000)
    ]  # fmt: skip
    places = [place.split(":")[0] for _, _, place, _ in described.parts]
    assert places == ["host", "file", "host"]
    assert all(kinds == b.address.transports for *_, kinds in described.parts)

    remote = a.open_segment(described)
    content = random(segment.nbytes, 4)
    local = a.segment([a.register(content)])
    counter = b.counter()
    batch = Batch()
    batch.write_segment(local, 0, remote, 0, segment.nbytes, imm=counter.ref)
    a.submit(batch).wait(20)
    counter.wait(1, timeout=20)
    there = np.concatenate([memory.numpy(), np.fromfile(tmp_path / "cold", dtype=np.uint8), array])
    assert np.array_equal(there, content)

    back = a.alloc(1 << 20)
    batch = Batch()
    batch.read_segment(a.segment([back]), 0, remote, (1 << 20) - 1000, 1 << 20)
    batch.write_segment(local, 5, remote, 9, 100, imm=counter.ref)
    a.submit(batch).wait(20)
    assert np.array_equal(back.numpy(), content[(1 << 20) - 1000 :][: 1 << 20])
    counter.wait(1, timeout=20)
    assert counter.value == 2
    ways = a.explain(batch).pieces
    assert [(p.op, p.write, p.nbytes, p.remote) for p in ways] == [
        (0, False, 1000, "host"), (0, False, (1 << 20) - 1000, "file"), (1, True, 100, "host")
    ]  # fmt: skip
    assert "direct" in ways[0].way
    assert "at the peer" in ways[1].way
    assert str(a.explain(batch)).count("\n") == 2


def test_gaps_and_borders_of_segments_are_kept(open_engine: Open) -> None:
    engine = open_engine()
    one, two = engine.alloc(64), engine.alloc(64)
    segment = engine.segment([one[:10], (20, two[:10])])
    remote = engine.open_segment(segment.descriptor())
    batch = Batch()
    with pytest.raises(InvalidArgument, match="from byte 10 until 20 there is no part"):
        batch.write_segment(segment, 0, remote, 0, 11)
    with pytest.raises(InvalidArgument, match="lie outside"):
        batch.read_segment(segment, 25, remote, 0, 6)
    assert len(batch) == 0
    for parts in ([], [(5, one), (0, two)], [one, (10, two)]):
        with pytest.raises(InvalidArgument):
            engine.segment(parts)
    with pytest.raises(TypeError, match="made of regions"):
        engine.segment([b"bytes"])  # type: ignore[list-item]
