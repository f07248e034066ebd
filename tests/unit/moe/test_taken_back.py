"""Ranks that were lost or masked, and live, come back to the same exchanges."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fabric_ray import errors
from fabric_ray.moe import AllToAll, device, device_memory, nixl_ep
from fabric_ray.moe.deepep import Buffer, shared_calls
from tests.host_graph import Graph
from tests.host_kernels import Host
from tests.moe_ranks import ThreadComm, batch, layer, on_all_ranks, unsharded
from tests.unit.moe.moe_ranks import joined, on_each, together

EXPERTS, TOPK, HIDDEN, M, RANKS = 6, 3, 256, 8, 3
WAIT = 60.0
SIZES = {"experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "max_tokens": M}


@pytest.mark.parametrize("kernels", [pytest.param(False, marks=pytest.mark.long), True])
def test_exchanges_connect_again_after_ranks_went_on_apart(host: Host, kernels: bool) -> None:
    """Ranks 0 and 1 make more exchanges than rank 2, which is late and has its own ones."""
    launchers = [host.another() if kernels else None for _ in range(RANKS)]
    with joined(launchers, timeout=2.0, **SIZES) as ranks:

        def whole(a: AllToAll, seed: int) -> None:
            x, idx, w = batch(seed * 10 + a.rank, M, EXPERTS, TOPK, HIDDEN)
            assert torch.equal(layer(a, x, idx, w), unsharded(x, idx, w))

        def apart(a: AllToAll) -> None:
            for _ in range(2 if a.rank < 2 else 1):
                x, idx, w = batch(a.rank, M, EXPERTS, TOPK, HIDDEN)
                layer(a, x, idx, w)

        on_each(ranks, lambda a: whole(a, 0))
        on_each(ranks[:2], apart)
        apart(ranks[2])
        for turn in (1, 2):
            assert all(a.between_exchanges() for a in ranks)
            for a in ranks:
                a.disconnect()
            assert not any(a.present[r] for a in ranks for r in range(RANKS) if r != a.rank)
            with pytest.raises(errors.InvalidArgument, match="is not connected"):
                whole(ranks[0], turn)
            descriptors = [a.descriptor() for a in ranks]
            for a in ranks:
                a.connect(descriptors)
            for again in range(3):
                on_each(ranks, lambda a, seed=turn + again: whole(a, seed))  # type: ignore[misc]
            assert all(a.is_whole and a.lost == () for a in ranks)
        ranks[0].dispatch_send(*batch(0, M, EXPERTS, TOPK, HIDDEN)[:2])
        if not kernels:
            with pytest.raises(errors.InvalidArgument, match="disconnect is not next"):
                ranks[0].disconnect()


def test_a_rank_that_lets_go_first_sends_what_others_lack() -> None:
    """Rank 0 has all its rows while most of those to rank 1 wait for room there."""
    sizes = SIZES | {"max_tokens": 64}
    ended = threading.Event()
    with joined([None, None], timeout=20.0, private_rows=1, shared_rows=4, **sizes) as ranks:

        def work(a: AllToAll) -> None:
            x, idx, _ = batch(a.rank, 64, EXPERTS, TOPK, HIDDEN)
            a.dispatch_send(x, idx)
            if a.rank:
                # Not before rank 0 lets go, unless it waits for this rank.
                ended.wait(1.0)
            got = a.dispatch_recv()
            if a.rank == 0:
                a.disconnect()
                ended.set()
            else:
                assert a.lost == ()
                assert (got.x.float().abs().sum(1) > 0).all()

        on_each(ranks, work)


Capture: TypeAlias = Callable[[], Any]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Capture:
    """A capture of the calls of this thread."""
    threads: set[int] = set()
    for where in (device_memory, shared_calls):
        monkeypatch.setattr(where, "is_captured", lambda _: threading.get_ident() in threads)

    @contextmanager
    def capture() -> Iterator[None]:
        threads.add(threading.get_ident())
        yield
        threads.discard(threading.get_ident())

    return capture


def whole(x: Tensor, idx: Tensor, w: Tensor) -> Tensor:
    """The sums of tokens whose experts answer them as they are."""
    return (x.float() * torch.where(idx < 0, 0.0, w).sum(1, keepdim=True)).to(x.dtype)


def low_latency(buffer: Buffer, seed: int) -> tuple[Tensor, Tensor]:
    """The sums of such tokens, and what they should be."""
    x, idx, w = batch(10 * seed + buffer.rank, M, EXPERTS, TOPK, HIDDEN)
    y, _, handle, *_ = buffer.low_latency_dispatch(x, idx, M, EXPERTS, use_fp8=False)
    assert isinstance(y, Tensor)
    sums, *_ = buffer.low_latency_combine(y, idx, w, handle)
    return sums, whole(x, idx, w)


def check_sums(found: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(*found, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kernels", [pytest.param(False, marks=pytest.mark.long), True])
@on_all_ranks(RANKS)
def test_ranks_come_back_to_the_same_exchanges(comm: ThreadComm, host: Host, kernels: bool) -> None:
    launcher = host.another() if kernels else None
    buffer = Buffer(
        low_latency_mode=True, enable_shrink=True, comm=comm, launcher=launcher, timeout=20.0
    )
    check_sums(low_latency(buffer, 0))
    made = [*buffer._exchanges._made]
    for turn in (1, 2):
        comm.all_gather(b"")
        if comm.rank() < 2:
            buffer.low_latency_update_mask_buffer(2, mask=True)
            for _ in range(turn):  # an odd number leaves the alternating exchanges apart
                low_latency(buffer, turn)
        comm.all_gather(b"")
        buffer.low_latency_clean_mask_buffer()
        assert buffer._exchanges._made == made
        for again in range(3):
            check_sums(low_latency(buffer, turn + again))
        assert buffer.lost == {}
    buffer.destroy()


def test_no_exchange_is_under_way_when_a_device_has_ended_it(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host hears of the end a little later, and is waited for."""
    waits, finish = list[device.DeviceSteps](), device.DeviceSteps.finish

    def waited(steps: device.DeviceSteps) -> None:
        waits.append(steps)
        finish(steps)

    with joined([host.another(), host.another()], timeout=20.0, **SIZES) as ranks:
        batches = [batch(a.rank, M, EXPERTS, TOPK, HIDDEN) for a in ranks]
        on_each(ranks, lambda a: layer(a, *batches[a.rank]))
        monkeypatch.setattr(device.DeviceSteps, "finish", waited)
        for a in ranks:
            assert a.between_exchanges()
            assert waits.pop() is a._steps


@on_all_ranks(2)
def test_graphs_are_replayed_when_ranks_were_taken_back(
    comm: ThreadComm, host: Host, captured: Capture
) -> None:
    graph, me = Graph(), comm.rank()
    buffer = Buffer(
        low_latency_mode=True, enable_shrink=True, comm=comm, timeout=20.0,
        launcher=graph.launcher(host.another()),
    )  # fmt: skip
    outs = [torch.empty(M, HIDDEN, dtype=torch.bfloat16) for _ in range(2)]
    batches = [batch(10 * seed + me, M, EXPERTS, TOPK, HIDDEN) for seed in range(2)]
    wanted = [whole(*one) for one in batches]

    def calls() -> None:
        for (x, idx, w), out in zip(batches, outs, strict=True):
            y, _, handle, *_ = buffer.low_latency_dispatch(x, idx, M, EXPERTS, use_fp8=False)
            assert isinstance(y, Tensor)
            buffer.low_latency_combine(y, idx, w, handle, out=out)

    calls()
    with captured(), graph.capture():
        calls()

    def step() -> bool:
        comm.all_gather(b"")
        for out in outs:
            out.zero_()
        graph.replay()
        buffer.check()
        return all(
            torch.allclose(o, w, rtol=0.02, atol=0.02) for o, w in zip(outs, wanted, strict=True)
        )

    assert step()
    for rank in (None, 0, 1):
        comm.all_gather(b"")
        buffer.low_latency_update_mask_buffer(1 - me, mask=True)
        assert not step()
        if rank is None:
            buffer.low_latency_clean_mask_buffer()
        else:
            buffer.low_latency_update_mask_buffer(rank, mask=False)
        assert buffer.lost == {}
        for _ in range(3):
            assert step()
    buffer.destroy()


@on_all_ranks(2)
def test_rs_1_ranks_are_not_taken_back_without_an_exchange_of_a_graph(
    comm: ThreadComm, host: Host, captured: Capture
) -> None:
    """Rank 1's graph has calls of an exchange that rank 0 has left in the middle."""
    buffer = Buffer(
        low_latency_mode=True, enable_shrink=True, comm=comm, timeout=20.0, launcher=host.another()
    )
    with captured() if comm.rank() else nullcontext():
        low_latency(buffer, 0)
    low_latency(buffer, 1)
    buffer.check()
    comm.all_gather(b"")
    buffer.low_latency_update_mask_buffer(1 - comm.rank(), mask=True)
    if comm.rank() == 0:
        slots = next(iter(buffer._low_latency._slots.values()))
        slots[0].exchange.close()
    there = buffer.explain()
    for _ in range(2):
        with pytest.raises(errors.Unsupported, match=r"graphs of ranks \[1\] .*capture again"):
            buffer.low_latency_clean_mask_buffer()
    assert buffer.explain() == there
    assert [*buffer.lost] == [1 - comm.rank()]
    buffer.leave()


@on_all_ranks(2)
def test_rs_1_a_device_combines_no_handle_without_rows_of_a_rank_that_came_back(
    comm: ThreadComm, host: Host
) -> None:
    buffer = Buffer(
        low_latency_mode=True, enable_shrink=True, comm=comm, timeout=20.0, launcher=host.another()
    )
    low_latency(buffer, 0)
    comm.all_gather(b"")
    buffer.low_latency_update_mask_buffer(1 - comm.rank(), mask=True)
    x, idx, w = batch(comm.rank(), M, EXPERTS, TOPK, HIDDEN)
    y, _, handle, *_ = buffer.low_latency_dispatch(x, idx, M, EXPERTS, use_fp8=False)
    assert isinstance(y, Tensor)
    buffer.low_latency_combine(y, idx, w, handle)
    buffer.low_latency_clean_mask_buffer()
    with pytest.raises(errors.InvalidArgument, match="a rank came back since the dispatch"):
        buffer.low_latency_combine(y, idx, w, handle)
    for turn in range(3):
        check_sums(low_latency(buffer, turn))
    buffer.destroy()


@on_all_ranks(2)
def test_a_rank_that_missed_larger_buffers_comes_back(comm: ThreadComm) -> None:
    buffer = Buffer(enable_shrink=True, comm=comm, timeout=20.0, ranks_per_node=2)

    def normal(tokens: int) -> None:
        x, idx, w = batch(comm.rank(), tokens, EXPERTS, TOPK, HIDDEN)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
        rows, *_, handle, _ = buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, idx, w)
        assert isinstance(rows, Tensor)
        assert handle is not None
        sums, *_ = buffer.combine(rows, handle)
        if not buffer.lost:
            times = in_rank.sum(1, keepdim=True)
            assert torch.equal(sums, (x.float() * times).to(x.dtype))

    normal(8)
    comm.all_gather(b"")
    buffer.low_latency_update_mask_buffer(1 - comm.rank(), mask=True)
    normal(8 if comm.rank() else 300)
    buffer.low_latency_clean_mask_buffer()
    for tokens in (8, 200, 8, 400):
        normal(tokens)
    buffer.destroy()


def test_a_rank_that_others_left_out_is_told_by_nixl_ep() -> None:
    """It hears of it without a call, and its own unmasking takes it back."""
    store, met = dist.HashStore(), threading.Barrier(RANKS)

    def work(rank: int) -> None:
        buffer = nixl_ep.Buffer(rank=rank, tcp_store_group=store)
        buffer.update_memory_buffers(RANKS, 2, 0)
        buffer.connect_ranks(range(RANKS))
        x, idx, w = batch(rank, M, EXPERTS, TOPK, HIDDEN)

        def check() -> None:
            y, _, handle, *_ = buffer.dispatch(x, idx, M, use_fp8=False)
            assert isinstance(y, Tensor)
            sums, *_ = buffer.combine(y, idx, w, handle)
            check_sums((sums, whole(x, idx, w)))

        for clean in (False, True):
            check()
            met.wait(WAIT)
            if rank < 2:
                buffer.update_mask_buffer(2, mask=True)
                buffer.dispatch(x, idx, M, use_fp8=False)
            met.wait(WAIT)
            status = torch.empty(RANKS, dtype=torch.int32)
            buffer.query_mask_buffer(status)
            assert status.tolist() == ([1, 1, 0] if rank == 2 else [0, 0, 1])
            if rank == 2:
                for _ in range(2):
                    with pytest.raises(errors.PeerLost, match=r"\[0, 1\].* clean_mask_buffer\(\)"):
                        buffer.dispatch(x, idx, M, use_fp8=False)
            if clean:
                buffer.clean_mask_buffer()
            else:
                for other in range(RANKS):
                    buffer.update_mask_buffer(other, mask=False)
        check()
        buffer.destroy()

    together([lambda rank=rank: work(rank) for rank in range(RANKS)])  # type: ignore[misc]


def test_a_rank_that_others_left_out_before_its_first_call_masks_them_and_runs_alone() -> None:
    store, met = dist.HashStore(), threading.Barrier(RANKS)

    def work(rank: int) -> None:
        buffer = nixl_ep.Buffer(rank=rank, tcp_store_group=store)
        buffer.update_memory_buffers(RANKS, 2, 0)
        buffer.connect_ranks(range(RANKS))
        x, idx, w = batch(rank, M, EXPERTS, TOPK, HIDDEN)

        def sums(idx: Tensor) -> tuple[Tensor, Tensor]:
            y, _, handle, *_ = buffer.dispatch(x, idx, M, use_fp8=False)
            assert isinstance(y, Tensor)
            combined, *_ = buffer.combine(y, idx, w, handle)
            return combined, whole(x, idx, w)

        if rank < 2:
            buffer.update_mask_buffer(2, mask=True)
            buffer.dispatch(x, idx, M, use_fp8=False)
        met.wait(WAIT)
        if rank == 2:
            for other in (0, 1):
                buffer.update_mask_buffer(other, mask=True)
            check_sums(sums(torch.where(idx // 2 == rank, idx, -1)))
        met.wait(WAIT)
        buffer.clean_mask_buffer()
        check_sums(sums(idx))
        buffer.destroy()

    together([lambda rank=rank: work(rank) for rank in range(RANKS)])  # type: ignore[misc]
