"""Memory is registered once, for as long as an object needs it."""

from __future__ import annotations

import threading
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing

from fabric_ray.errors import InvalidArgument
from fabric_ray.runtime.rdt.exchange import Exchange
from tests.processes import within
from tests.unit.test_lazy_tensors import Wrapper


def has(exchange: Exchange, count: int) -> None:
    """So many regions are registered, once those that were dropped have ended."""
    within(10, f"{count} regions", lambda: exchange.engine.stats()["regions"] == count)


def test_views_and_repeated_tensors_have_one_registration(holder: Exchange) -> None:
    base = torch.arange(1000.0)
    offer = holder.sources.add("a", [base, base, base[10:20], base[15:400].view(5, 77), base[::1]])
    has(holder, 1)
    assert len(offer.regions) == 1
    assert [(e.offset, e.nbytes) for e in offer.extents[:4]] == [
        (0, 4000),
        (0, 4000),
        (40, 40),
        (60, 1540),
    ]


def test_objects_that_share_memory_keep_it_until_the_last_is_freed(holder: Exchange) -> None:
    base = torch.zeros(1000)
    first = holder.sources.add("a", [base])
    holder.sources.add("b", [base[5:]])
    has(holder, 1)
    holder.sources.remove("a")
    assert holder.sources.add("c", [base]).regions == first.regions, "the same registration"
    holder.sources.remove("b")
    holder.sources.remove("c")
    has(holder, 0)
    assert len(holder.sources) == 0
    assert holder.sources.add("d", [base]).regions != first.regions, "another one (MR-2)"


def test_an_object_that_is_made_again_is_held_once(holder: Exchange) -> None:
    for _ in range(2):  # Ray repeats a task whose answer was lost
        holder.sources.add("a", [torch.zeros(64)])
    holder.sources.remove("a")
    holder.sources.remove("a")  # and frees it twice
    has(holder, 0)


def test_memory_outlives_its_tensor_while_it_is_offered(holder: Exchange) -> None:
    tensor = torch.zeros(64)
    holder.sources.add("a", [tensor])
    with pytest.raises(RuntimeError, match="resize"):
        tensor.untyped_storage().resize_(0)


def test_rs_1_an_offered_tensor_stays_where_readers_read(holder: Exchange) -> None:
    offered, pinned = torch.zeros(64), torch.zeros(64)
    holder.sources.add("a", [offered[3:]])
    holder.sources.pin(pinned)
    for tensor in (offered, pinned):
        at = tensor.data_ptr()
        with pytest.raises(InvalidArgument, match="registered"):
            ForkingPickler.dumps(tensor)
        assert tensor.data_ptr() == at


def test_a_pinned_tensor_stays_registered_until_it_is_unpinned_as_often(holder: Exchange) -> None:
    tensor = torch.zeros(64)
    holder.sources.pin(tensor)
    holder.sources.pin(tensor[3:])
    first = holder.sources.add("a", [tensor])
    holder.sources.remove("a")
    holder.sources.unpin(tensor)
    assert holder.sources.add("a", [tensor]).regions == first.regions
    holder.sources.remove("a")
    assert holder.sources.is_pinned(tensor)
    holder.sources.unpin(tensor)
    has(holder, 0)
    with pytest.raises(InvalidArgument, match="not registered"):
        holder.sources.unpin(tensor)


def test_what_has_no_memory_can_not_be_taken_back(holder: Exchange) -> None:
    wrapper = Wrapper(torch.zeros(8))
    for call in (holder.sources.pin, holder.sources.unpin, holder.sources.is_pinned):
        with pytest.raises(InvalidArgument, match="wraps other tensors and has no memory"):
            call(wrapper)


def refused() -> list[torch.Tensor]:
    freed = torch.zeros(8)
    freed.untyped_storage().resize_(0)
    return [torch.zeros(8, device="meta"), torch.eye(4).to_sparse(), freed]


@pytest.mark.parametrize("number", range(3), ids=["meta", "sparse", "freed"])
def test_what_has_no_memory_to_read_is_refused_and_nothing_is_held(
    holder: Exchange, number: int
) -> None:
    with pytest.raises(InvalidArgument):
        holder.sources.add("a", [torch.zeros(8), refused()[number]])
    assert len(holder.sources) == 0
    has(holder, 0)


def test_threads_that_add_and_remove_leave_nothing(holder: Exchange) -> None:
    base = torch.zeros(4096)

    def churn(name: str) -> None:
        for turn in range(50):
            holder.sources.add(f"{name}{turn}", [base[turn:], torch.zeros(32)])
            holder.sources.remove(f"{name}{turn}")

    threads = [threading.Thread(target=churn, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(holder.sources) == 0
    has(holder, 0)
