"""Symmetric memory: an address is a rank and an offset, and nothing outside it is reached."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabric_ray import TransferEngine
from fabric_ray.engine import Region, RegionDescriptor, SymmetricMemory
from fabric_ray.errors import FabricError, InvalidArgument, OutOfBounds
from tests.examples import examples

Open = Callable[..., TransferEngine]
Ranks = tuple[list[TransferEngine], list[Region]]
NBYTES = 4096


@pytest.fixture
def three(open_engine: Open) -> Ranks:
    engines = [open_engine(f"rank-{r}") for r in range(3)]
    return engines, [engine.alloc(NBYTES) for engine in engines]


def joined(ranks: Ranks, *, without: tuple[int, ...] = ()) -> list[SymmetricMemory | None]:
    """What each rank makes of the descriptors of all."""
    engines, regions = ranks
    descriptors: list[RegionDescriptor | None] = [
        None if rank in without else region.descriptor() for rank, region in enumerate(regions)
    ]
    return [
        None if rank in without else SymmetricMemory(engines[rank], regions[rank], descriptors)
        for rank in range(len(engines))
    ]


def one(ranks: Ranks, rank: int, **options: tuple[int, ...]) -> SymmetricMemory:
    memory = joined(ranks, **options)[rank]
    assert memory is not None
    return memory


def test_every_rank_writes_to_every_rank_at_the_same_offset(three: Ranks) -> None:
    engines, regions = three
    for memory, engine in zip(joined(three), engines, strict=True):
        assert memory is not None
        assert (len(memory), memory.nbytes, memory.ranks) == (3, NBYTES, (0, 1, 2))
        source = engine.alloc(16)
        source.numpy()[:] = 1 + memory.rank
        for rank in memory.ranks:
            engine.write(source, memory.at(rank, 100 * memory.rank, 16)).wait(10)
    for region in regions:
        for rank in range(3):
            assert (region.numpy()[100 * rank : 100 * rank + 16] == 1 + rank).all()
            assert not region.numpy()[100 * rank + 16 : 100 * rank + 100].any()


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rank=st.integers(-3, 6),
    offset=st.integers(-2 * NBYTES, 2 * NBYTES) | st.integers(),
    nbytes=st.integers(-NBYTES, 2 * NBYTES) | st.integers(),
)
def test_mr_3_an_address_lies_inside_or_is_refused(
    three: Ranks, rank: int, offset: int, nbytes: int
) -> None:
    memory = one(three, 1)
    inside = offset >= 0 and nbytes >= 0 and offset + nbytes <= NBYTES
    if rank in range(3) and inside:
        assert memory.at(rank, offset, nbytes).nbytes == nbytes
        assert memory.here(offset, nbytes).nbytes == nbytes
        return
    with pytest.raises(InvalidArgument) as refused:
        memory.at(rank, offset, nbytes)
    assert isinstance(refused.value, OutOfBounds) == (rank in range(3))
    if not inside:
        with pytest.raises(OutOfBounds) as outside:
            memory.here(offset, nbytes)
        assert (outside.value.offset, outside.value.limit) == (offset, NBYTES)


def test_a_rank_that_is_left_out_keeps_its_number(three: Ranks) -> None:
    memory = one(three, 2, without=(1,))
    assert (len(memory), memory.rank, memory.ranks) == (3, 2, (0, 2))
    assert [peer.name for peer in memory.group.peers] == ["rank-0"]
    with pytest.raises(
        InvalidArgument, match=r"rank 1 is left out; those that are there: \[0, 2\]"
    ):
        memory.at(1, 0, 8)
    with pytest.raises(InvalidArgument, match="rank -1 is none of the 3"):
        memory.at(-1, 0, 8)


def test_the_group_has_all_other_ranks(three: Ranks) -> None:
    engines, _ = three
    memories = joined(three)
    for memory, engine in zip(memories, engines, strict=True):
        assert memory is not None
        assert [p.name for p in memory.group.peers] == [
            f"rank-{r}" for r in range(3) if r != memory.rank
        ]
        engine.barrier(memory.group, 5).wait(10)
    for memory, engine in zip(memories, engines, strict=True):
        assert memory is not None
        engine.plain_counter(5).wait(len(memory.group), writers=memory.group.peers, timeout=10)


def test_a_rank_alone_has_itself(open_engine: Open) -> None:
    engine = open_engine()
    region = engine.alloc(NBYTES)
    memory = SymmetricMemory(engine, region, [None, region.descriptor()])
    assert (memory.rank, memory.ranks, len(memory.group)) == (1, (1,), 0)
    source = engine.alloc(8)
    source.numpy()[:] = 3
    engine.write(source, memory.at(1, 0, 8)).wait(10)
    assert (memory.here(0, 8).numpy() == 3).all()


def test_parts_that_make_no_symmetric_memory(three: Ranks) -> None:
    engines, regions = three
    engine, region = engines[0], regions[0]
    own, other = region.descriptor(), regions[1].descriptor()
    for descriptors, why in (
        ([other, None], "0 times"),
        ([own, own], "2 times"),
        ([own, regions[1][:100].descriptor()], "rank 1 has 100 bytes and rank 0 has 4096"),
        ([own, other, engines[1].alloc(NBYTES).descriptor()], "ranks 1 and 2 are parts of one"),
    ):
        with pytest.raises(InvalidArgument, match=why):
            SymmetricMemory(engine, region, descriptors)


def test_a_part_of_a_region_will_do(three: Ranks) -> None:
    engines, regions = three
    parts = [region[1024:2048] for region in regions]
    memory = one((engines, parts), 0)
    source = engines[0].alloc(1024)
    source.numpy()[:] = 9
    engines[0].write(source, memory.at(1, 0, 1024)).wait(10)
    assert (regions[1].numpy()[1024:2048] == 9).all()
    assert not regions[1].numpy()[2048:].any()
    with pytest.raises(FabricError):
        memory.at(1, 1, 1024)
