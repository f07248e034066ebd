"""Block maxima reach those who need them, version after version, or the missing rank is named."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import msgspec
import pytest
import torch

from fabric_ray import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import Container, DType, Leaf, Mesh, Replicate, Shard, Side, Tensor
from fabric_ray.weights.quant import (
    EdgeExchange,
    Edges,
    ExchangeFailed,
    Fp8,
    Invitation,
    RankQuantiser,
)
from tests.unit.quant.local import exchanged, held

Open = Callable[..., TransferEngine]
BF16 = DType.of("bfloat16")
FORMATS = {"*": Fp8((4, 4))}


def uneven() -> Side:
    """Shards of five rows, each of which shares blocks of four with its neighbours, and replicas
    of shards of five columns."""
    rows = Leaf(Tensor("a.weight", (18, 8), BF16), Mesh.line(range(4)), (Shard(0),))
    both = Leaf(Tensor("b.weight", (9, 10), BF16), Mesh(tuple(range(4)), (2, 2)), (REP, Shard(1)))
    return Side.of(4, [Container("a.weight", BF16, rows), Container("b.weight", BF16, both)])


def one_way() -> Side:
    """Rank 0 has all, and sends to ranks of which it needs nothing."""
    tensor = Tensor("a.weight", (14, 8), BF16)
    whole = Container("all", BF16, Leaf(tensor, Mesh.line([0]), (REP,)))
    return Side.of(
        3, [whole, Container("a.weight", BF16, Leaf(tensor, Mesh.line([1, 2]), (Shard(0),)))]
    )


REP = Replicate()


class Rank:
    """A trainer's end, in a thread of its own."""

    def __init__(self, side: Side, rank: int, engine: TransferEngine) -> None:
        self.quantiser = RankQuantiser(side, FORMATS, rank, edges=Edges(side, FORMATS))
        self.engine = engine
        self.exchange = EdgeExchange(engine, self.quantiser.edges)


def connected(side: Side, open_engine: Open, transport: str) -> list[Rank]:
    ranks = [
        Rank(side, rank, open_engine(f"rank-{rank}", transport=transport)) for rank in side.ranks
    ]
    invitations = {
        rank: msgspec.convert(msgspec.to_builtins(one.exchange.invitation), Invitation)
        for rank, one in enumerate(ranks)
    }
    for one in ranks:
        one.exchange.connect(invitations)
    return ranks


def at_once(*calls: Callable[[], None]) -> list[BaseException | None]:
    """What each call raised, in threads."""
    raised: list[BaseException | None] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            calls[index]()
        except BaseException as error:
            raised[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return raised


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("side", [uneven(), one_way()], ids=["uneven", "one-way"])
def test_every_version_gets_its_own_maxima_if_a_rank_is_slow(
    side: Side, open_engine: Open, transport: str
) -> None:
    ranks = connected(side, open_engine, transport)
    shapes = {c.layout.tensor.name: c.layout.tensor.shape for c in side.containers}
    versions = [
        {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()} for _ in range(12)
    ]
    plain = [held(side, full) for full in versions]
    quantisers = {rank: one.quantiser for rank, one in enumerate(ranks)}
    expected = [exchanged(quantisers, tensors) for tensors in plain]

    def train(rank: int) -> None:
        pauses = random.Random(rank)
        for version, tensors in enumerate(plain):
            mine = {name: tensor for (r, name), tensor in tensors.items() if r == rank}
            maxima = ranks[rank].quantiser.partial_maxima(mine)
            if rank == 1 or pauses.random() < 0.2:
                time.sleep(0.01 * pauses.random())
            ranks[rank].exchange.run(version + 1, maxima, timeout=20)
            assert torch.equal(maxima, expected[version][rank]), (rank, version)

    errors = at_once(*(lambda rank=rank: train(rank) for rank in side.ranks))
    assert errors == [None] * len(ranks)
    for one in ranks:
        one.exchange.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_dead_rank_is_named_before_the_deadline(open_engine: Open, transport: str) -> None:
    ranks = connected(uneven(), open_engine, transport)
    first = at_once(*(lambda one=one: run(one, 1) for one in ranks))
    assert first == [None] * 4
    begin = time.monotonic()
    *living, dead = ranks
    errors = at_once(*(lambda one=one: run(one, 2) for one in living), dead.engine.close)
    assert time.monotonic() - begin < 10
    for error in errors[:2]:  # they share no block with it, at most with one who has given up
        assert error is None or 3 not in error.ranks
    assert isinstance(errors[2], ExchangeFailed)
    assert errors[2].ranks == (3,)
    assert errors[2].version == 2
    assert "no block maxima from rank 3" in str(errors[2])
    with pytest.raises(ExchangeFailed, match="its exchange has failed; make new ones"):
        run(ranks[2], 3)


def run(one: Rank, version: int, timeout: float = 20) -> None:
    one.exchange.run(version, torch.zeros(one.quantiser.edges.size), timeout=timeout)


def test_a_rank_that_never_comes_is_named_at_the_deadline(open_engine: Open) -> None:
    ranks = connected(one_way(), open_engine, "shm")
    errors = at_once(*(lambda one=one: run(one, 1, 2.0) for one in ranks[:2]))
    assert [error.ranks for error in errors] == [(2,), (2,)]


def test_closing_ends_a_wait_and_partners_find_out(open_engine: Open) -> None:
    ranks = connected(one_way(), open_engine, "tcp")
    waiting = threading.Timer(0.2, ranks[0].exchange.close)
    waiting.start()
    begin = time.monotonic()
    (error,) = at_once(lambda: run(ranks[0], 1))
    assert isinstance(error, ExchangeFailed)
    with pytest.raises(ExchangeFailed, match=r"no block maxima from rank 0 .*stale") as raised:
        run(ranks[1], 1)
    assert raised.value.ranks == (0,)
    with pytest.raises(ExchangeFailed, match="its exchange is closed"):
        run(ranks[0], 2)
    assert time.monotonic() - begin < 10


def test_ranks_at_different_versions_find_out(open_engine: Open) -> None:
    ranks = connected(one_way(), open_engine, "shm")
    errors = at_once(*(lambda r=r: run(ranks[r], 5 + (r == 2)) for r in range(3)))
    assert [error.ranks for error in errors] == [(2,), (2,), (0, 1)]
    assert "their slots say {2: 6}" in str(errors[0])


def test_ranks_must_agree_on_what_they_exchange(open_engine: Open) -> None:
    side = uneven()
    one = Rank(side, 0, open_engine("a"))
    other = RankQuantiser(side, {"a.*": Fp8((4, 4))}, 1)
    stranger = EdgeExchange(open_engine("b"), other.edges)
    with pytest.raises(InvalidArgument, match="rank 1, which expects another size"):
        one.exchange.connect({1: stranger.invitation})
    with pytest.raises(InvalidArgument, match="which is missing"):
        one.exchange.connect({})


def test_without_shared_blocks_nothing_is_exchanged(open_engine: Open) -> None:
    leaf = Leaf(Tensor("a.weight", (16, 8), BF16), Mesh.line(range(2)), (Shard(0),))
    one = Rank(Side.of(2, [Container("a.weight", BF16, leaf)]), 0, open_engine())
    assert one.quantiser.edges.partners == ()
    one.exchange.connect({})
    run(one, 1)


def test_a_rank_that_fails_before_it_writes_tells_its_partners(open_engine: Open) -> None:
    ranks = connected(uneven(), open_engine, "shm")
    with pytest.raises(IndexError):
        ranks[0].exchange.run(1, torch.zeros(0), timeout=5.0)
    ranks[0].exchange.give_up()
    partner = next(one for one in ranks if 0 in one.exchange._peers)
    # One that isn't told waits until its time is up.
    with pytest.raises(ExchangeFailed):
        run(partner, 1, timeout=1.0)
    assert partner.exchange._version_of(0, 0) == -1
