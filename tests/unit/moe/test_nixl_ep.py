"""NIXL-EP's ``Buffer`` as vLLM and SGLang call it: ranks of a store that become more and fewer."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fabric_ray import errors
from fabric_ray.moe import cast
from fabric_ray.moe.nixl_ep import Buffer
from fabric_ray.moe.store_comm import StoreComm
from tests.host_kernels import Host
from tests.moe_ranks import batch, expert, unsharded

EACH, TOPK, M, HIDDEN = 2, 3, 8, 512


def made(rank: int, store: Any, most: int, **options: Any) -> Buffer:
    buffer = Buffer(rank=rank, tcp_store_group=store, **options)
    nbytes = Buffer.get_rdma_size_hint(M, HIDDEN, most, most * EACH)
    buffer.update_memory_buffers(num_ranks=most, num_experts_per_rank=EACH, num_rdma_bytes=nbytes)
    return buffer


def layer(buffer: Buffer, turn: int, ranks: int, room: int | None, *, fp8: bool = False) -> None:
    """One pass of as many ranks, with results that have room for others."""
    x, idx, w = batch(turn * 8 + buffer.rank, M - turn % 3, ranks * EACH, TOPK, HIDDEN)
    got, counts, handle, _, hook = buffer.dispatch(
        x, idx, M, room and room * EACH, use_fp8=fp8, async_finish=False, return_recv_hook=True
    )
    assert hook is not None
    hook()
    rows = got[0] if isinstance(got, tuple) else got
    assert rows.shape == (EACH, M * (room or ranks), HIDDEN)
    assert handle[1].shape == (EACH, room or ranks)
    if isinstance(got, tuple):
        assert got[1].stride(1) == 1
        rows = cast.back(*got)
    y = torch.full(rows.shape, float("nan"), dtype=torch.bfloat16)
    for number, count in enumerate(counts.tolist()):
        y[number, :count] = expert(buffer.rank * EACH + number, rows[number, :count])
    out = torch.empty_like(x)
    _, _, hook = buffer.combine(
        y, idx, w, handle, async_finish=False, zero_copy=False, return_recv_hook=True, out=out
    )
    assert hook is not None
    hook()
    seen = cast.back(*cast.to_fp8(x)) if fp8 else x
    assert torch.equal(out, unsharded(seen, idx, w))


def on_threads(ranks: int, work: Any) -> None:
    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(work, range(ranks)))


@pytest.mark.parametrize("room", [None, 4, 5])
def test_ranks_join_and_leave_at_the_end(room: int | None) -> None:
    """As vLLM scales: new ranks connect while the others stage them, and take part on commit."""
    store, few, many = dist.HashStore(), 2, 4
    grown, shrunk = threading.Barrier(many), threading.Barrier(many)

    def work(rank: int) -> None:
        buffer = made(rank, store, 5, timeout_ms=20_000)
        status = torch.empty(5, dtype=torch.int32)
        old = rank < few
        if old:
            buffer.connect_ranks(range(few))
            layer(buffer, 0, few, room)
            buffer.connect_ranks(range(few, many), activate=False)
            layer(buffer, 1, few, room, fp8=True)
            buffer.query_mask_buffer(status)
            assert status.tolist() == [0, 0, 1, 1, 1]
            for other in range(few, many):
                buffer.update_mask_buffer(other, mask=False)
        else:
            buffer.connect_ranks(range(many))
        grown.wait(60)
        for turn in (2, 3):
            layer(buffer, turn, many, room, fp8=turn == 3)
        buffer.query_mask_buffer(status)
        assert status.tolist() == [0, 0, 0, 0, 1]
        buffer.barrier()
        shrunk.wait(60)
        if old:
            buffer.disconnect_ranks([2, 3])
            layer(buffer, 4, few, room)
        buffer.destroy()

    def both(rank: int) -> None:
        # The new ranks' destroy waits for none of those that went on.
        work(rank)

    on_threads(many, both)


def alone(buffer: Buffer, ranks: int) -> None:
    """One pass of one of as many ranks, without the others' experts."""
    first = buffer.rank * EACH
    x, idx, w = batch(buffer.rank, M, ranks * EACH, TOPK, HIDDEN)
    rows, counts, handle, _, _ = buffer.dispatch(x, idx, M, use_fp8=False)
    assert isinstance(rows, torch.Tensor)
    assert rows.shape == (EACH, M * ranks, HIDDEN)
    y = torch.zeros_like(rows)
    for number, count in enumerate(counts.tolist()):
        y[number, :count] = expert(first + number, rows[number, :count])
    out, _, _ = buffer.combine(y, idx, w, handle)
    here = (idx >= first) & (idx < first + EACH)
    assert torch.equal(out, unsharded(x, torch.where(here, idx, -1), w))


def test_ranks_that_mask_all_others_run_alone_and_come_back() -> None:
    """As vLLM does while it warms up one rank."""
    store, met = dist.HashStore(), threading.Barrier(2)

    def work(rank: int) -> None:
        buffer = made(rank, store, 2)
        buffer.connect_ranks([0, 1])
        layer(buffer, 0, 2, None)
        met.wait(60)
        buffer.update_mask_buffer(1 - rank, mask=True)
        alone(buffer, 2)
        buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
        buffer.update_mask_buffer(1 - rank, mask=False)
        layer(buffer, 1, 2, None)
        buffer.clean_mask_buffer()
        layer(buffer, 2, 2, None)
        buffer.destroy()

    on_threads(2, work)


@pytest.mark.parametrize("on_kernels", [False, True])
def test_a_rank_that_joins_runs_alone_while_the_others_serve(on_kernels: bool, host: Host) -> None:
    """As vLLM warms up a new worker: it masks all others and takes them back without them."""
    store, few, many, new = dist.HashStore(), 2, 3, 2
    warm, committed = threading.Event(), threading.Barrier(many)

    def work(rank: int) -> None:
        launcher = host.another() if on_kernels else None
        buffer = made(rank, store, many, timeout_ms=20_000, launcher=launcher)
        status = torch.empty(many, dtype=torch.int32)
        if rank == new:
            buffer.connect_ranks(range(many))
            for _ in range(2):
                for other in range(few):
                    buffer.update_mask_buffer(other, mask=True)
                buffer.query_mask_buffer(status)
                assert status.tolist() == [1, 1, 0]
                alone(buffer, many)
                buffer.barrier()
                for other in range(few):
                    buffer.update_mask_buffer(other, mask=False)
                buffer.query_mask_buffer(status)
                assert status.tolist() == [0, 0, 0]
            warm.set()
        else:
            buffer.connect_ranks(range(few))
            buffer.connect_ranks([new], activate=False)
            for turn in range(3):
                layer(buffer, turn, few, None)
            assert warm.wait(30)
            layer(buffer, 3, few, None)
            buffer.update_mask_buffer(new, mask=False)
        committed.wait(60)
        for turn in (4, 5):
            layer(buffer, turn, many, None, fp8=turn == 5)
        buffer.barrier()
        buffer.destroy()

    on_threads(many, work)


def test_a_rank_that_is_masked_by_hand_is_left_out_from_the_next_call_on() -> None:
    store, met, ranks = dist.HashStore(), threading.Barrier(3), 3

    def work(rank: int) -> None:
        buffer = made(rank, store, ranks)
        buffer.connect_ranks(range(ranks))
        layer(buffer, 0, ranks, None)
        met.wait(60)
        if rank < 2:
            for wrong in (rank, ranks, -1):
                with pytest.raises(errors.InvalidArgument, match="is no other rank of 3"):
                    buffer.update_mask_buffer(wrong, mask=True)
            buffer.update_mask_buffer(2, mask=True)
            x, idx, w = batch(rank, M, ranks * EACH, TOPK, HIDDEN)
            rows, counts, handle, event, _ = buffer.dispatch(x, idx, M, use_fp8=False)
            y = torch.zeros_like(rows)
            for number, count in enumerate(counts.tolist()):
                y[number, :count] = expert(rank * EACH + number, rows[number, :count])
            out, event, _ = buffer.combine(y, idx, w, handle)
            assert event.left_out == {2}
            assert torch.equal(out, unsharded(x, torch.where(idx < 2 * EACH, idx, -1), w))
        met.wait(60)
        # Together: calls have left it out.
        buffer.clean_mask_buffer() if rank == 2 else buffer.update_mask_buffer(2, mask=False)
        layer(buffer, 1, ranks, None)
        buffer.destroy()

    on_threads(ranks, work)


def test_ranks_that_were_left_out_come_back_at_once() -> None:
    """Those that miss them unmask each; those that miss none clean their marks, once."""
    store, met, ranks, few = dist.HashStore(), threading.Barrier(4), 4, 2

    def work(rank: int) -> None:
        buffer = made(rank, store, ranks, timeout_ms=4000)
        buffer.connect_ranks(range(ranks))
        layer(buffer, 0, ranks, None)
        met.wait(60)
        if rank < few:
            for other in range(few, ranks):
                buffer.update_mask_buffer(other, mask=True)
            x, idx, _ = batch(rank, M, ranks * EACH, TOPK, HIDDEN)
            buffer.dispatch(x, idx, M, use_fp8=False)
        met.wait(60)
        if rank < few:
            for other in range(ranks):
                buffer.update_mask_buffer(other, mask=False)
        else:
            buffer.clean_mask_buffer()
        layer(buffer, 1, ranks, None)
        buffer.destroy()

    on_threads(ranks, work)


def test_a_rank_takes_back_ranks_that_take_part_without_them() -> None:
    """As SGLang clears marks: each scheduler by its own clock, itself included."""
    store, ranks, turns = dist.HashStore(), 2, 2

    def work(rank: int) -> None:
        buffer = made(rank, store, ranks, timeout_ms=4000)
        buffer.connect_ranks(range(ranks))
        for turn in range(turns):
            layer(buffer, turn, ranks, None)
            if turn == rank:
                for other in range(ranks):
                    buffer.update_mask_buffer(other, mask=False)
        layer(buffer, turns, ranks, None)
        with pytest.raises(errors.InvalidArgument, match="rank 2 is out of range"):
            buffer.update_mask_buffer(2, mask=False)
        buffer.destroy()

    on_threads(ranks, work)


@pytest.mark.parametrize("both", [False, True])
def test_ranks_that_mask_each_other_in_the_middle_come_back_together(both: bool) -> None:
    store, met = dist.HashStore(), threading.Barrier(2)

    def work(rank: int) -> None:
        buffer = made(rank, store, 2, timeout_ms=1000)
        buffer.connect_ranks([0, 1])
        x, idx, w = batch(rank, M, 2 * EACH, TOPK, HIDDEN)
        rows, counts, handle, _, _ = buffer.dispatch(x, idx, M, use_fp8=False)
        y = torch.zeros_like(rows)
        for number, count in enumerate(counts.tolist()):
            y[number, :count] = expert(rank * EACH + number, rows[number, :count])
        met.wait(60)
        if both or not rank:  # the other one notices that nothing comes
            buffer.update_mask_buffer(1 - rank, mask=True)
            _, event, _ = buffer.combine(y, idx, w, handle)
            assert event.left_out == {1 - rank}
            alone(buffer, 2)
        met.wait(60)
        if rank and not both:
            # It has heard of it without a call, and is told what to do.
            status = torch.empty(2, dtype=torch.int32)
            buffer.query_mask_buffer(status)
            assert status.tolist() == [1, 0]
            for _ in range(2):
                with pytest.raises(errors.PeerLost, match=r"\[0\] have left .*clean_mask_buffer"):
                    buffer.dispatch(x, idx, M, use_fp8=False)
        buffer.update_mask_buffer(1 - rank, mask=False)
        layer(buffer, 1, 2, None)
        buffer.destroy()

    on_threads(2, work)


def test_high_throughput_calls_are_deepeps() -> None:
    store = dist.HashStore()

    def work(rank: int) -> None:
        buffer = made(rank, store, 2, low_latency_mode=False)
        buffer.connect_ranks([0, 1])
        x, idx, w = batch(rank, M, 4, TOPK, HIDDEN)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 4)
        with pytest.raises(errors.Unsupported, match="use_nvfp4"):
            buffer.low_latency_dispatch(x, idx, M, use_nvfp4=True)
        recv, *_, handle, _ = buffer.ht_dispatch(
            x, None, per_rank, None, in_rank, per_expert, idx, w, 1, Buffer.get_dispatch_config(2)
        )
        sums, _, _ = buffer.ht_combine(recv, handle)
        assert torch.equal(sums, (x * in_rank.sum(1, keepdim=True)).to(x.dtype))
        buffer.destroy()

    on_threads(2, work)


def test_rank_0_runs_without_others_until_they_connect() -> None:
    """As in the elastic tests of NIXL-EP."""
    store = dist.HashStore()

    def work(rank: int) -> None:
        buffer = made(rank, store, 2)
        if rank == 0:
            x, idx, w = batch(0, M, EACH, 1, HIDDEN)
            for _ in range(2):
                y, _, handle, *_ = buffer.dispatch(x, idx, M, EACH, use_fp8=False)
                assert isinstance(y, torch.Tensor)
                sums, *_ = buffer.combine(y, idx, w, handle)
                wanted = x.float() * torch.where(idx < 0, 0.0, w)
                torch.testing.assert_close(sums.float(), wanted, rtol=0.02, atol=0.02)
        buffer.connect_ranks([1 - rank])
        layer(buffer, 2, 2, None)
        buffer.destroy()
        with pytest.raises(errors.InvalidArgument, match="no rank is connected"):
            buffer.barrier()

    on_threads(2, work)


def test_what_is_wrong_is_named() -> None:
    store, invalid = dist.HashStore(), errors.InvalidArgument
    buffer = Buffer(rank=0, tcp_store_group=store)
    with pytest.raises(invalid, match="connect_ranks"):
        buffer.barrier()
    with pytest.raises(invalid, match="behind update_memory_buffers"):
        buffer.connect_ranks([0])
    buffer = made(0, store, 2)
    for ranks in ([2], [1, 2]):
        with pytest.raises(invalid, match="connect 0 to some number of 2"):
            buffer.connect_ranks(ranks)
    buffer.connect_ranks([0])
    with pytest.raises(invalid, match="disconnect the last"):
        buffer.disconnect_ranks([0])
    with pytest.raises(invalid, match="num_experts is 3"):
        buffer.dispatch(torch.zeros(1, 512), torch.zeros(1, 1), M, 3)
    assert buffer.runtime is not None
    buffer.destroy()
    assert buffer.runtime is None
    with pytest.raises(errors.PeerLost, match="rank 1 did not connect"):
        StoreComm(dist.HashStore(), 0, 2, timeout=0.2).all_gather(b"")


@pytest.mark.parametrize("present", [(0, 1), (1, 2), (0,), (2,)])
def test_ranks_connect_after_an_attempt_that_failed(present: tuple[int, ...]) -> None:
    store, ranks = dist.HashStore(), 3

    def fail(rank: int) -> None:
        with pytest.raises(errors.PeerLost, match=r"did not connect within 0\.3 s"):
            StoreComm(store, rank, ranks, timeout=0.3).all_gather(b"of an attempt that failed")

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(fail, present))

    for turn in range(2):
        last = (2, 0)[turn]  # rank 0 comes before the others, or behind them

        def work(rank: int, turn: int = turn, last: int = last) -> None:
            time.sleep(0.1 * (rank == last))
            comm = StoreComm(store, rank, ranks, timeout=20)
            assert comm.all_gather(bytes([turn, rank])) == [bytes([turn, r]) for r in range(ranks)]

        on_threads(ranks, work)


def test_ranks_in_between_leave_and_others_take_their_places() -> None:
    """As in the elastic tests of NIXL-EP."""
    ranks, store, met = 4, dist.HashStore(), threading.Barrier(4)

    def without(buffer: Buffer, turn: int, left: set[int]) -> None:
        """One pass of which those have no part."""
        x, idx, w = batch(turn * 8 + buffer.rank, M, ranks * EACH, TOPK, HIDDEN)
        idx[torch.isin(idx // EACH, torch.tensor([*left]))] = -1
        y, _, handle, *_ = buffer.dispatch(x, idx, M, ranks * EACH, use_fp8=False)
        assert isinstance(y, torch.Tensor)
        sums, *_ = buffer.combine(y, idx, w, handle)
        wanted = x.float() * torch.where(idx < 0, 0.0, w).sum(1, keepdim=True)
        torch.testing.assert_close(sums.float(), wanted, rtol=0.02, atol=0.02)
        status = torch.empty(ranks, dtype=torch.int32)
        buffer.query_mask_buffer(status)
        assert {*status.nonzero().flatten().tolist()} == left

    def work(rank: int) -> None:
        buffer = made(rank, store, ranks)
        buffer.connect_ranks(set(range(ranks)) - {rank})
        layer(buffer, 0, ranks, None)
        left = set[int]()
        for turn in (1, 2):
            met.wait(60)
            left.add(turn)
            if rank in left:
                buffer.destroy()
                continue
            buffer.disconnect_ranks([turn])
            without(buffer, turn, left)
        if rank in (0, 3):
            with pytest.raises(errors.InvalidArgument, match=r"ranks \[1, 2\] were disconnected"):
                buffer.clean_mask_buffer()
        else:
            buffer = made(rank, store, ranks)
        buffer.connect_ranks({1, 2} if rank in (0, 3) else set(range(ranks)) - {rank})
        layer(buffer, 3, ranks, None)
        buffer.destroy()

    on_threads(ranks, work)
