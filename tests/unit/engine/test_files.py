"""Files as regions: spilled to and fetched from by their own engine and by peers."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fabric_ray import Batch, RegionDescriptor, TransferEngine
from fabric_ray.engine import Region, RemoteRegion
from fabric_ray.errors import InvalidArgument, ResourceError

Pair = tuple[TransferEngine, TransferEngine]
Open = Callable[..., TransferEngine]


def importing(engine: TransferEngine, region: Region) -> RemoteRegion:
    sent: RegionDescriptor = pickle.loads(pickle.dumps(region.descriptor()))
    return engine.import_region(sent)


def random(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


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
