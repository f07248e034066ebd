"""Raw addresses find their regions, and copies between them land where they should."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_ray import Batch, TransferEngine
from fabric_ray.compat.addresses import AddressSpace, DisjointRanges, Op, Registered, add_copies
from fabric_ray.engine import Region, RemoteRegion
from fabric_ray.errors import InvalidArgument, OutOfBounds
from tests.examples import examples

KiB = 1 << 10


@pytest.fixture(scope="module")
def engine() -> TransferEngine:
    return TransferEngine(name="addresses", transport="shm")


def mirrored(engine: TransferEngine, regions: list[Region]) -> list[RemoteRegion]:
    return [engine.import_region(region.descriptor()) for region in regions]


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_copies_by_address_are_what_a_loop_over_bytes_does(
    engine: TransferEngine, data: st.DataObject
) -> None:
    size, count = 4 * KiB, data.draw(st.integers(1, 40))
    ours, theirs = [engine.alloc(size) for _ in range(2)], [engine.alloc(size) for _ in range(2)]
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 20)))
    for region in ours + theirs:
        region.numpy()[:] = rng.integers(0, 255, size)
    write = data.draw(st.booleans())
    # Offsets that do not overlap at the target, and any at the source.
    slot = data.draw(st.sampled_from([16, 48, 64]))
    per = size // slot
    slots = np.arange(2 * per)[:count]
    if data.draw(st.booleans()):
        slots = rng.permutation(2 * per)[:count]
    nbytes = data.draw(
        st.lists(st.sampled_from([0, 1, slot // 2, slot]), min_size=len(slots), max_size=len(slots))
    )
    target = [(int(s) // per, int(s) % per * slot) for s in slots]
    source = [(int(rng.integers(2)), int(rng.integers(size - slot + 1))) for _ in slots]
    if data.draw(st.booleans()):  # one block after the other
        source = [(i // per, i % per * slot) for i in range(len(slots))]
    local, remote = (source, target) if write else (target, source)
    here = AddressSpace((r.addr, r) for r in ours)
    there = AddressSpace((r.addr, m) for r, m in zip(theirs, mirrored(engine, theirs), strict=True))
    batch = Batch()
    add_copies(
        batch,
        "write" if write else "read",
        (here.regions, here.find([ours[i].addr + at for i, at in local], nbytes, "we")),
        (there.regions, there.find([theirs[i].addr + at for i, at in remote], nbytes, "they")),
        np.array(nbytes, dtype=np.int64),
    )
    expected = [r.numpy().copy() for r in (theirs if write else ours)]
    given_ = ours if write else theirs
    for (i, a), (j, b), n in zip(source, target, nbytes, strict=True):
        expected[j][b : b + n] = given_[i].numpy()[a : a + n]
    if len(batch):
        engine.submit(batch).wait(20)
    for region, bytes_ in zip(theirs if write else ours, expected, strict=True):
        assert np.array_equal(region.numpy(), bytes_)


@pytest.mark.parametrize(("nbytes", "order", "op"), [(32, -1, "write"), (64, 1, "read")])
def test_ten_thousand_equal_blocks_are_one_operation(
    engine: TransferEngine, nbytes: int, order: int, op: Op
) -> None:
    """As pages of one stride, in any order; and joined, where they continue one another."""
    ours, theirs = engine.alloc(1 << 20), engine.alloc(1 << 20)
    here = AddressSpace([(0, ours)])
    there = AddressSpace([(0, mirrored(engine, [theirs])[0])])
    blocks, lengths = np.arange(10_000) * 64, np.full(10_000, nbytes)
    local, remote = here.find(blocks, lengths, "we"), there.find(blocks[::order], lengths, "they")
    batch = Batch()
    add_copies(batch, op, (here.regions, local), (there.regions, remote), lengths)
    assert len(batch) == 1


def test_regions_over_one_another_are_all_found(engine: TransferEngine) -> None:
    region = engine.alloc(4 * KiB)
    whole, part = region, region[KiB : 2 * KiB]
    space = AddressSpace([(KiB, part), (0, whole)])
    found = space.find([KiB, KiB, 0], [KiB, KiB + 1, 4 * KiB], "we")
    assert [space.regions[i].nbytes for i in found.region] == [KiB, 4 * KiB, 4 * KiB]
    assert found.offset.tolist() == [0, KiB, 0]


@pytest.mark.parametrize(("first", "nbytes"), [(-1, 1), (0, -1), (1 << 63, 1)])
def test_numbers_that_are_no_addresses_are_refused(first: int, nbytes: int) -> None:
    with pytest.raises(InvalidArgument):
        AddressSpace[Region]().find([first], [nbytes], "we")


def test_unregistered_memory_is_named(engine: TransferEngine) -> None:
    space = AddressSpace([(4096, engine.alloc(4096))])
    for first, nbytes in [(0, 1), (4095, 2), (8191, 2), (8192, 1)]:
        with pytest.raises(OutOfBounds, match=f"{nbytes} bytes at {first:#x}"):
            space.find([5000, first], [1, nbytes], "we")


def test_memory_is_forgotten_by_its_address_the_latest_first(engine: TransferEngine) -> None:
    registered, region = Registered(), engine.alloc(64)
    registered.add(8, region[:32])
    registered.add(8, region[:64])
    assert registered.listed()[0] == 2
    assert registered.take(8, 16) is None
    assert [registered.take(8).nbytes for _ in range(2)] == [64, 32]  # type: ignore[union-attr]
    assert registered.take(8) is None
    assert registered.listed() == (4, [])


@settings(max_examples=examples(200), deadline=None)
@given(calls=st.lists(st.tuples(st.booleans(), st.integers(0, 24), st.integers(0, 6))))
def test_ranges_that_overlap_are_refused(calls: list[tuple[bool, int, int]]) -> None:
    ranges, held = DisjointRanges(), dict[int, set[int]]()
    for add, first, nbytes in calls:
        if add:
            wanted = set(range(first, first + max(nbytes, 1)))
            fits = wanted.isdisjoint(set().union(*held.values()))
            assert ranges.add(first, nbytes) == fits
            if fits:
                held[first] = wanted
        else:
            ranges.discard(first)
            held.pop(first, None)
