"""Fetched tensors are those that were offered, or there is an error and nothing lands late."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from fabric_ray import Batch, Transfer, TransferEngine
from fabric_ray.errors import Cancelled, DecodeError, FabricError, InvalidArgument, PeerLost, Stale
from fabric_ray.runtime.rdt.exchange import Exchange
from fabric_ray.runtime.rdt.fetches import Fetch
from fabric_ray.runtime.rdt.offer import Holder, Offer
from fabric_ray.runtime.rdt.transport import FabricFetchRequest, FabricTransport
from tests.on_device import on_device, on_wait
from tests.processes import Other, within

BIG = 4 << 20


def kinds(tensors: Sequence[torch.Tensor]) -> list[tuple[Sequence[int], torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


def fetch(
    holder: Exchange,
    reader: Exchange,
    tensors: Sequence[torch.Tensor],
    into: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    offer = Offer.from_bytes(holder.sources.add("a", tensors).to_bytes())
    begun = reader.fetches.start("a", offer, kinds(tensors), into)
    got = begun.wait(20)
    reader.fetches.end(begun)
    return got


def every_kind() -> list[torch.Tensor]:
    grid = torch.arange(60.0).view(6, 10)
    return [
        grid,
        grid.t(),
        grid[:, 3:5],
        grid[2:4],
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.randn(33).to(torch.bfloat16),
        torch.tensor([True, False, True]),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.arange(5, dtype=torch.int64).expand(3, 5),
        torch.nn.Parameter(torch.ones(3)),
        torch.randn(300_000),
    ]


def test_rs_1_every_kind_of_tensor_arrives_as_it_was(holder: Exchange, reader: Exchange) -> None:
    tensors = every_kind()
    for got, was in zip(fetch(holder, reader, tensors), tensors, strict=True):
        assert got.dtype == was.dtype
        assert torch.equal(got, was.detach().resolve_conj().resolve_neg())
        assert not got.requires_grad


def test_rs_1_kernels_of_any_stream_end_before_an_offer_and_before_given_memory_is_written(
    holder: Exchange, reader: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait() -> None:
        raise InterruptedError(f"waits while {given[0]} is there")

    given = torch.ones(4)
    on_wait(monkeypatch, wait)
    with pytest.raises(InterruptedError):
        holder.sources.add("a", [on_device(torch.zeros(4))])
    with pytest.raises(InterruptedError, match="while 1"):
        fetch(holder, reader, [torch.zeros(4)], [on_device(given)])


def test_tensors_arrive_in_given_memory_even_across_views(
    holder: Exchange, reader: Exchange
) -> None:
    home = torch.zeros(100)
    given = [home[10:20], home[20:50].view(5, 6)]
    got = fetch(holder, reader, [torch.ones(10), torch.full((5, 6), 2.0)], given)
    assert [tensor.data_ptr() for tensor in got] == [tensor.data_ptr() for tensor in given]
    assert home.tolist() == [0.0] * 10 + [1.0] * 10 + [2.0] * 30 + [0.0] * 50


def test_pinned_buffers_are_not_registered_again(holder: Exchange, reader: Exchange) -> None:
    given = torch.zeros(1000)
    reader.sources.pin(given)
    before = reader.engine.stats()["regions"]
    offer = holder.sources.add("a", [torch.ones(100)])
    begun = reader.fetches.start("a", offer, [((100,), torch.float32)], [given[100:200]])
    assert reader.engine.stats()["regions"] == before
    begun.wait(20)
    assert given.sum() == 100


def test_memory_for_the_kernel_free_path_is_offered_like_any_other(
    holder: Exchange, reader: Exchange
) -> None:
    tensor = holder.empty((3, 1000), torch.float32)
    assert torch.equal(tensor, torch.zeros(3, 1000))
    tensor.fill_(4)
    assert torch.equal(fetch(holder, reader, [tensor[1:]])[0], tensor[1:])


@pytest.mark.parametrize(
    "given",
    [
        [torch.zeros(8)],
        [torch.zeros(8), torch.zeros(7)],
        [torch.zeros(8), torch.zeros(8, dtype=torch.float64)],
        [torch.zeros(8), torch.zeros(16)[::2]],
    ],
    ids=["too few", "shape", "dtype", "strides"],
)
def test_memory_that_does_not_suit_is_refused_before_anything_is_read(
    holder: Exchange, reader: Exchange, given: list[torch.Tensor]
) -> None:
    with pytest.raises(InvalidArgument):
        fetch(holder, reader, [torch.ones(8), torch.ones(8)], given)
    assert all(not tensor.any() for tensor in given)


def test_mr_2_an_object_that_was_freed_is_stale(holder: Exchange, reader: Exchange) -> None:
    tensor = torch.ones(BIG)
    offer = holder.sources.add("a", [tensor])
    holder.sources.remove("a")
    begun = reader.fetches.start("a", offer, kinds([tensor]))
    with pytest.raises(Stale):
        begun.wait(20)
    reader.fetches.end(begun)
    assert len(reader.fetches) == 0


def test_shapes_that_contradict_the_offer_are_refused(holder: Exchange, reader: Exchange) -> None:
    offer = holder.sources.add("a", [torch.ones(4)])
    with pytest.raises(DecodeError):
        reader.fetches.start("a", offer, [((5,), torch.float32)])


def test_rs_4_a_holder_that_is_gone_is_an_error(holder: Exchange, reader: Exchange) -> None:
    offer = holder.sources.add("a", [torch.ones(BIG)])
    holder.close()
    with pytest.raises(FabricError):
        reader.fetches.start("a", offer, [((BIG,), torch.float32)]).wait(20)


def hold(connection: Connection) -> None:
    """Holds a tensor until it is told to go."""
    engine = TransferEngine(name="other", transport="tcp", peer_timeout=60)
    exchange = Exchange(engine, Holder("other", "there", 2), timeout=60)
    tensor = torch.ones(BIG)
    connection.send(exchange.sources.add("a", [tensor]).to_bytes())
    connection.recv()


@pytest.fixture
def over_tcp() -> Iterator[Exchange]:
    engine = TransferEngine(name="over tcp", transport="tcp", peer_timeout=60)
    with engine:
        yield Exchange(engine, Holder("over tcp", "here", 1), timeout=60)


def test_mr_1_an_aborted_fetch_ends_at_once_and_keeps_its_memory_until_it_is_quiet(
    over_tcp: Exchange,
) -> None:
    kind = [((BIG,), torch.float32)]
    with Other(hold) as other:
        offer = Offer.from_bytes(other.hear())
        assert over_tcp.fetches.start("a", offer, kind).wait(20)[0].sum() == BIG
        other.signal(signal.SIGSTOP)
        begun = over_tcp.fetches.start("a", offer, kind)
        outcome: list[BaseException] = []

        def wait(begun: Fetch) -> None:
            try:
                begun.wait(50)
            except BaseException as error:
                outcome.append(error)

        waiting = threading.Thread(target=wait, args=(begun,))
        waiting.start()
        over_tcp.fetches.abort("a")
        waiting.join(30)
        assert not waiting.is_alive(), "MR-1: an aborted fetch does not end"
        assert [type(error) for error in outcome] == [Cancelled]
        address = begun.tensors[0].data_ptr()
        quiet = begun.settled
        over_tcp.fetches.end(begun)
        del begun, waiting
        outcome.clear()
        if not quiet:  # then no other fetch may get that memory
            assert len(over_tcp.fetches) == 1
            lent = over_tcp.pool.lend(*kind[0])
            assert lent is not None
            assert lent[0].data_ptr() != address
        other.signal(signal.SIGCONT)
        assert over_tcp.fetches.start("a", offer, kind).wait(20)[0].sum() == BIG


def test_a_fetch_that_was_aborted_before_it_began_does_not_begin(
    holder: Exchange, reader: Exchange
) -> None:
    offer = holder.sources.add("a", [torch.ones(4)])
    reader.fetches.abort("a")
    with pytest.raises(Cancelled):
        reader.fetches.start("a", offer, [((4,), torch.float32)])
    assert reader.fetches.start("a", offer, [((4,), torch.float32)]).wait(20)[0].sum() == 4


def test_an_abort_while_a_fetch_begins_ends_that_one(
    holder: Exchange, reader: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer, kind = holder.sources.add("a", [torch.ones(4)]), [((4,), torch.float32)]
    submit = reader.engine.submit

    def aborted(batch: Batch, **how: Any) -> Transfer:  # as another thread would at this moment
        reader.fetches.abort("a")
        return submit(batch, **how)

    with monkeypatch.context() as patch:
        patch.setattr(reader.engine, "submit", aborted)
        with pytest.raises(Cancelled, match="while it began"):
            reader.fetches.start("a", offer, kind)
    within(30, "its end", lambda: len(reader.fetches) == 0)
    assert reader.fetches.start("a", offer, kind).wait(20)[0].sum() == 4


def test_a_wait_that_is_too_short_leaves_the_fetch_going(over_tcp: Exchange) -> None:
    kind = [((BIG,), torch.float32)]
    with Other(hold) as other:
        offer = Offer.from_bytes(other.hear())
        over_tcp.fetches.start("a", offer, kind).wait(20)
        other.signal(signal.SIGSTOP)
        begun = over_tcp.fetches.start("a", offer, kind)
        with pytest.raises(TimeoutError) as caught:
            begun.wait(0)
        assert not isinstance(caught.value, FabricError)
        other.signal(signal.SIGCONT)
        assert begun.wait(20)[0].sum() == BIG


def test_mr_1_a_fetch_that_is_late_is_cancelled_and_says_whether_its_buffer_is_free(
    over_tcp: Exchange,
) -> None:
    kind, given = [((BIG,), torch.float32)], torch.zeros(BIG)
    with Other(hold) as other:
        offer = Offer.from_bytes(other.hear())
        over_tcp.fetches.start("a", offer, kind).wait(20)
        other.signal(signal.SIGSTOP)
        begun = over_tcp.fetches.start("a", offer, kind, [given])
        request = FabricFetchRequest("a", [], begun, over_tcp)
        with pytest.raises(TimeoutError, match="not fetched from other") as caught:
            FabricTransport().wait_fetch_complete(request, timeout=0)
        free = "its buffers are free" in str(caught.value)
        assert free or "may still land" in str(caught.value)
        with pytest.raises(Cancelled):
            begun.wait(20)
        assert len(over_tcp.fetches) == (not begun.settled)
        if free:
            other.signal(signal.SIGCONT)
            assert over_tcp.fetches.start("b", offer, kind).wait(20)[0].sum() == BIG
            assert given.sum() == 0


def test_the_garbage_collector_may_end_a_fetch_while_fetches_are_looked_at(
    holder: Exchange, reader: Exchange
) -> None:
    offer = holder.sources.add("a", [torch.ones(4)])
    begun = reader.fetches.start("a", offer, [((4,), torch.float32)])
    request = FabricFetchRequest("a", [], begun, reader)
    ended = threading.Event()

    def collect() -> None:
        nonlocal request
        with reader.fetches._lock:  # as where a collection happens to begin
            del request
        ended.set()

    threading.Thread(target=collect, daemon=True).start()
    assert ended.wait(20)
    assert begun.ended


def test_rs_4_a_holder_that_is_killed_in_the_middle_is_named(over_tcp: Exchange) -> None:
    kind = [((BIG,), torch.float32)]
    with Other(hold) as other:
        offer = Offer.from_bytes(other.hear())
        over_tcp.fetches.start("a", offer, kind).wait(20)
        other.signal(signal.SIGSTOP)
        begun = over_tcp.fetches.start("a", offer, kind)
        other.kill()
        with pytest.raises(PeerLost, match="other"):
            begun.wait(20)


def test_rs_4_memory_of_a_fetch_from_a_holder_that_fell_silent_is_free_again() -> None:
    kind = [((BIG,), torch.float32)]
    with Other(hold) as other, TransferEngine(transport="tcp", peer_timeout=1) as engine:
        reader = Exchange(engine, Holder("reader", "here", 1), timeout=60, idle=64 << 20)
        offer = Offer.from_bytes(other.hear())
        reader.fetches.start("a", offer, kind).wait(20)
        other.signal(signal.SIGSTOP)
        begun = reader.fetches.start("a", offer, kind)
        with pytest.raises(PeerLost) as caught:
            begun.wait(20)
        assert "may still land" not in str(caught.value)
        reader.fetches.end(begun)
        assert len(reader.fetches) == 0
