"""A rank leaves once it has its own sums, without loss to others; or others leave it out."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from fabric_ray import TransferEngine, errors
from fabric_ray.moe import AllToAll, ThroughputAllToAll
from fabric_ray.moe.deepep import Buffer
from fabric_ray.moe.deepep.normal import Normal
from fabric_ray.moe.exchanges import Exchanges
from tests.moe_ranks import ThreadComm, batch, on_all_ranks, on_ranks

EXPERTS, TOPK, HIDDEN, M = 6, 3, 8, 40
LATE = 0.3
"""Seconds for which rank 0 lets the others' rows lie, and by which ranks differ."""


def mask_when_all_is_delivered(buffer: Buffer, rank: int) -> None:
    """Answers wait for the rank that opens its memory for them, and are dropped when it is masked
    before."""
    for one in buffer._exchanges._made:
        if isinstance(one, AllToAll):
            one.finish()
    buffer.low_latency_update_mask_buffer(rank, mask=True)


def summed(one: AllToAll | ThroughputAllToAll) -> None:
    """One exchange of which rank 1 wants nothing, for it has no tokens."""
    x, idx, _ = batch(3, M if one.rank == 0 else 0, EXPERTS, TOPK, HIDDEN, torch.float32)
    here = [one.present[int(e) // (EXPERTS // one.ranks)] for e in range(EXPERTS)]
    idx[~torch.tensor(here)[idx]] = -1
    one.dispatch_send(x, idx)
    if one.rank == 0:
        time.sleep(LATE)
    one.combine_send(one.dispatch_recv().x)
    sums = one.combine_recv()
    assert one.left_out == ()
    torch.testing.assert_close(sums, x * (idx >= 0).sum(1, keepdim=True))


def destroyed(comm: ThreadComm, engine: TransferEngine, shape: dict[str, Any]) -> None:
    exchanges = Exchanges(comm, engine, 30.0)
    one = exchanges.make(**shape)
    if comm.rank() < 2:
        # Once a rank is masked, no rank waits for all to arrive.
        exchanges.mask(2)
        summed(one)
        exchanges.close()
    engine.close()


def finished(comm: ThreadComm, engine: TransferEngine, shape: dict[str, Any]) -> None:
    one = AllToAll(engine, rank=comm.rank(), ranks=comm.size(), **shape)
    one.connect(comm.all_gather(one.descriptor()))
    summed(one)
    one.finish()
    engine.close()


def dropped(comm: ThreadComm, engine: TransferEngine, shape: dict[str, Any]) -> None:
    one = AllToAll(engine, rank=comm.rank(), ranks=comm.size(), **shape)
    one.connect(comm.all_gather(one.descriptor()))
    summed(one)
    del one
    comm.all_gather(b"")
    engine.close()


def passed(comm: ThreadComm, engine: TransferEngine, shape: dict[str, Any]) -> None:
    sizes = {"rank": comm.rank(), "ranks": comm.size(), "ranks_per_node": 1}
    one = ThroughputAllToAll(engine, **sizes, **shape)
    one.connect(comm.all_gather(one.descriptor()))
    summed(one)
    del one
    engine.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("leave", [finished, dropped, destroyed, passed])
def test_rs_1_answers_reach_who_asked_though_who_gave_them_is_gone(
    leave: Callable[[ThreadComm, TransferEngine, dict[str, Any]], None], transport: str
) -> None:
    def work(comm: ThreadComm) -> None:
        engine = TransferEngine(name=f"rank-{comm.rank()}", transport=transport)
        shape = {"experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "max_tokens": M}
        kinds = {"dtype": torch.float32, "answer_dtype": torch.float32}
        leave(comm, engine, {**shape, **kinds})

    on_ranks(3 if leave is destroyed else 2, work)


@pytest.mark.parametrize(("low_latency", "per_node"), [(True, 4), (False, 4), (False, 2)], ids=str)
def test_a_healthy_destroy_reports_no_loss(
    low_latency: bool,
    per_node: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank leaves at another time, when all have their sums; and an exchange that is too small
    for normal calls, when all go over to a larger one."""
    renew = Normal._renew

    def renewed(self: Normal, room: int) -> None:
        time.sleep(LATE * self.comm.rank())
        renew(self, room)

    monkeypatch.setattr(Normal, "_renew", renewed)

    def work(comm: ThreadComm) -> None:
        buffer = Buffer(None, low_latency_mode=True, comm=comm, ranks_per_node=per_node)
        for tokens in (8, 8, 8) if low_latency else (8, 600, 600):
            x, idx, w = batch(comm.rank(), tokens, 8, 2, 64)
            if low_latency:
                y, _, handle, *_ = buffer.low_latency_dispatch(x, idx, 8, 8, use_fp8=False)
                buffer.low_latency_combine(y, idx, w, handle)
            else:
                per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 8)
                y, *_, way, _ = buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, idx)
                buffer.combine(y, way)
        buffer.destroy()
        time.sleep(0.1 * comm.rank())

    with caplog.at_level("WARNING"):
        on_ranks(4, work)
        time.sleep(0.5)  # records come from a thread of their own
    assert [record.getMessage() for record in caplog.records] == []


@on_all_ranks(3)
def test_rs_4_a_rank_that_waits_for_one_that_another_masked_is_not_given_up(
    comm: ThreadComm,
) -> None:
    """Rank 0 masks rank 2, and waits for rank 1 in the next exchange. Rank 1 waits for rank 2 in
    the one before, which waits for rank 0 there at first, and then makes no call."""
    buffer = Buffer(low_latency_mode=True, enable_shrink=True, comm=comm, timeout=3.0)
    x, idx, w = batch(comm.rank(), 8, 6, 3, 256)
    idx[0] = torch.tensor([4, -1, -1])  # each rank has rows for rank 2

    def step(masked: int | None = None) -> None:
        if masked is not None:
            # Ranks 1 and 2 wait in the exchange by then.
            time.sleep(0.5)
            buffer.low_latency_update_mask_buffer(masked, mask=True)
        y, _, handle, *_ = buffer.low_latency_dispatch(x, idx, 8, 6, use_fp8=False)
        assert isinstance(y, torch.Tensor)
        buffer.low_latency_combine(y, idx, w, handle)

    step()
    comm.all_gather(b"")
    if comm.rank() == 2:
        with pytest.raises(errors.PeerLost, match=r"ranks \[0\] have left this one out"):
            step()
    else:
        step(masked=2 if comm.rank() == 0 else None)
        for _ in range(3):
            step()
        assert [*buffer.lost] == [2]
    comm.all_gather(b"")
    buffer.leave()


@on_all_ranks(3)
def test_rs_4_a_rank_that_waits_in_one_mode_is_not_given_up_in_the_other(comm: ThreadComm) -> None:
    """Rank 2 makes no call when rank 0 waits for its answers in the low-latency mode. Rank 1 needs
    none, and waits for both in the high-throughput mode."""
    options: dict[str, Any] = {
        "rank": comm.rank(),
        "ranks": 3,
        "experts": 3,
        "topk": 1,
        "hidden": HIDDEN,
        "max_tokens": 1,
        "dtype": torch.float32,
        "answer_dtype": torch.float32,
        "timeout": 1.0,
    }
    engine = TransferEngine(name=f"rank-{comm.rank()}", transport="shm")
    direct = AllToAll(engine, **options)
    high = ThroughputAllToAll(engine, ranks_per_node=1, **options)
    for one in (direct, high):
        one.connect(comm.all_gather(one.descriptor()))
    comm.all_gather(b"")

    def step(one: AllToAll | ThroughputAllToAll, *, answers: bool = True) -> None:
        one.dispatch_send(torch.ones(1, HIDDEN), torch.tensor([[(2, 1, 2)[comm.rank()]]]))
        rows = one.dispatch_recv()
        if answers:
            one.combine_send(rows.x)
            one.combine_recv()

    for one in (direct, high):
        step(one)
    if comm.rank() == 2:
        step(direct, answers=False)
    else:
        step(direct)
        with pytest.raises(errors.PeerLost):
            step(high)
        assert [lost.rank for lost in high.lost] == [2]
    comm.all_gather(b"")
    del one, direct, high
    engine.close()


@pytest.mark.parametrize(("ranks", "leaving"), [(3, [2]), (4, [2, 3])])
@pytest.mark.parametrize("late", [False, True])
def test_ranks_go_on_at_once_without_those_that_destroy_their_buffers(
    ranks: int, leaving: list[int], late: bool
) -> None:
    """They neither wait for one another nor leave these out, also where others make calls when
    they are gone."""

    def work(comm: ThreadComm) -> None:
        with TransferEngine(name=f"rank-{comm.rank()}", transport="shm") as engine:
            buffer = Buffer(
                low_latency_mode=True, enable_shrink=True, comm=comm, engine=engine, timeout=1.0
            )
            x, idx, w = batch(comm.rank(), 8, 2 * ranks, 3, 256)

            def step() -> None:
                y, _, handle, *_ = buffer.low_latency_dispatch(x, idx, 8, 2 * ranks, use_fp8=False)
                assert isinstance(y, torch.Tensor)
                buffer.low_latency_combine(y, idx, w, handle)

            step()
            comm.all_gather(b"")
            if comm.rank() in leaving:
                buffer.destroy()
            if late:
                comm.all_gather(b"")
            if comm.rank() not in leaving:
                for _ in range(3):
                    step()
                assert sorted(buffer.lost) == leaving
                assert not any("did not finish" in cause for cause in buffer.lost.values())
            comm.all_gather(b"")
            buffer.leave()

    on_ranks(ranks, work)


@on_all_ranks(3)
def test_ranks_go_on_without_one_that_destroys_its_buffer_where_they_call_dispatch_first(
    comm: ThreadComm,
) -> None:
    """As in DeepEP's own test of shrinking: the others make the exchange by then."""
    buffer = Buffer(low_latency_mode=True, enable_shrink=True, comm=comm, timeout=20.0)
    x, idx, w = batch(comm.rank(), 8, 6, 3, 256)
    if comm.rank() != 1:
        for _ in range(3):
            y, _, handle, *_ = buffer.low_latency_dispatch(x, idx, 8, 6, use_fp8=False)
            assert isinstance(y, torch.Tensor)
            sums, *_ = buffer.low_latency_combine(y, idx, w, handle)
            here = torch.where((idx < 0) | (idx // 2 == 1), 0.0, w).sum(1, keepdim=True)
            torch.testing.assert_close(sums.float(), x * here, rtol=0.02, atol=0.02)
        assert buffer.lost == {1: "it has destroyed its buffer"}
    buffer.destroy()
    comm.all_gather(b"")


@on_all_ranks(2)
def test_a_rank_that_says_that_it_leaves_is_not_called_unreachable(comm: ThreadComm) -> None:
    """Ranks that write to it once more meet a link that they can't make again."""
    buffer = Buffer(low_latency_mode=True, enable_shrink=True, comm=comm)
    x, idx, w = batch(comm.rank(), 8, 4, 2, 256)
    y, _, handle, *_ = buffer.low_latency_dispatch(x, idx, 8, 4, use_fp8=False)
    assert isinstance(y, torch.Tensor)
    buffer.low_latency_combine(y, idx, w, handle)
    comm.all_gather(b"")
    if comm.rank() == 0:
        for exchange in buffer._exchanges._made:
            exchange.mask(1, "no transport reaches it")
        buffer._exchanges.lose(1, "it has destroyed its buffer")
        assert buffer.lost == {1: "it has destroyed its buffer"}
    comm.all_gather(b"")
    buffer.destroy()


@pytest.mark.parametrize(
    ("half", "again"), [("dispatch_recv", False), ("dispatch_recv", True), ("combine_recv", False)]
)
@on_all_ranks(3)
def test_rs_1_a_normal_call_takes_what_others_sent_before_they_left_its_rank_out(
    comm: ThreadComm, half: str, again: bool
) -> None:
    """``again``: by the handle of an earlier dispatch."""
    buffer = Buffer(None, enable_shrink=True, comm=comm, max_tokens=M)
    x, idx = torch.ones(4, 128, dtype=torch.bfloat16), torch.tensor([[0, 2, 4]]).repeat(4, 1)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 6)

    def step(combines: bool = half == "combine_recv", before: Any = None) -> Any:
        layout = () if before else (per_rank, None, in_rank, per_expert)
        rows, *_, handle, _ = buffer.dispatch(x, before, *layout)
        assert torch.equal(rows, torch.ones(12, 128, dtype=torch.bfloat16))
        if combines:
            assert torch.equal(buffer.combine(rows, handle or before)[0], 3 * x)
        return handle

    before = step(combines=True)
    if again:
        step(combines=True, before=before)
    else:
        before = None
    *_, (lane,) = buffer._normal._lanes.values()
    (counts,) = buffer._normal._counts.values()
    last = counts if half == "dispatch_recv" and not again else lane.exchange
    receive = getattr(last, half)

    def late(*given: Any, **options: Any) -> Any:
        """Rank 2 receives when the others have, and have masked it."""
        comm.all_gather(b"")
        while len(buffer.lost) < 2:
            time.sleep(0.01)
        return receive(*given, **options)

    if comm.rank() == 2:
        setattr(last, half, late)
        step(before=before)
        with pytest.raises(errors.PeerLost, match="left this one out"):
            step(before=before)
    else:
        step(before=before)
        mask_when_all_is_delivered(buffer, 2)
        comm.all_gather(b"")
    comm.all_gather(b"")
    buffer.leave()


@pytest.mark.parametrize("mode", ["low-latency", "normal"])
@on_all_ranks(3)
def test_rs_1_a_call_that_lacks_the_part_of_ranks_that_left_its_rank_out_raises(
    comm: ThreadComm, mode: str
) -> None:
    """Rank 2 has sent, and the others leave it out before they send."""
    buffer = Buffer(
        None, low_latency_mode=True, enable_shrink=True, comm=comm, timeout=60.0, max_tokens=M
    )
    x, idx = torch.ones(4, 128, dtype=torch.bfloat16), torch.tensor([[0, 2, 4]]).repeat(4, 1)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 6)
    if mode == "normal":
        send = partial(buffer.dispatch, x, None, per_rank, None, in_rank, per_expert)
    else:
        send = partial(buffer.low_latency_dispatch, x, idx, 4, 6, use_fp8=False)
    send()
    comm.all_gather(b"")
    if comm.rank() < 2:
        time.sleep(LATE)
        buffer.low_latency_update_mask_buffer(2, mask=True)
        send()
    else:
        with pytest.raises(errors.PeerLost, match="left this one out"):
            send()
    comm.all_gather(b"")
    buffer.leave()


@pytest.mark.parametrize("half", ["dispatch", "combine"])
@on_all_ranks(3)
def test_rs_1_a_rank_takes_what_others_sent_before_they_left_it_out(
    comm: ThreadComm, half: str
) -> None:
    buffer = Buffer(None, low_latency_mode=True, enable_shrink=True, comm=comm)
    x, idx = torch.ones(4, 128, dtype=torch.bfloat16), torch.tensor([[0, 2, 4]]).repeat(4, 1)

    def dispatched(hook: bool = False) -> Any:
        return buffer.low_latency_dispatch(x, idx, 4, 6, use_fp8=False, return_recv_hook=hook)

    def leave_out(hook: Callable[[], None]) -> None:
        """Rank 2 receives when the others have, and have masked it."""
        if comm.rank() == 2:
            comm.all_gather(b"")
            while len(buffer.lost) < 2:
                time.sleep(0.01)
            hook()
            return
        hook()
        mask_when_all_is_delivered(buffer, 2)
        comm.all_gather(b"")

    rows, counts, handle, _, hook = dispatched(hook=True)
    if half == "dispatch":
        leave_out(hook)
        assert counts.tolist() == [12, 0]
        assert torch.equal(rows[0], torch.ones(12, 128, dtype=torch.bfloat16))
    else:
        hook()
        sums, _, hook = buffer.low_latency_combine(
            rows, idx, torch.ones(4, 3), handle, return_recv_hook=True
        )
        leave_out(hook)
        assert torch.equal(sums, 3 * x)
    if comm.rank() == 2:
        with pytest.raises(errors.PeerLost, match="left this one out"):
            dispatched()
    comm.all_gather(b"")
    buffer.leave()
