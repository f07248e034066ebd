"""The number of rows that come, which the host knows before a device has them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from fabric_ray import errors
from fabric_ray.kernels import structs
from fabric_ray.kernels.steps import StepKind
from fabric_ray.moe import AllToAll, device, device_memory
from fabric_ray.moe.deepep import Buffer, ElasticBuffer, ways
from tests.host_kernels import Host, StepByStep
from tests.moe_ranks import WAIT, ThreadComm, batch, on_all_ranks
from tests.unit.moe.moe_ranks import joined, on_each

EXPERTS, TOPK, M, HIDDEN = 4, 2, 9, 24
SIZES: dict[str, Any] = {"experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "max_tokens": M}


class Behind(StepByStep):
    """Launches steps in order on a thread, and one kind of them not before it is let."""

    def __init__(self, host: Host, held: StepKind) -> None:
        super().__init__(host.another())
        self.go, self._held = threading.Event(), held
        self._thread = ThreadPoolExecutor(1)

    def step(self, step: structs.Step, launch: Callable[[], None]) -> None:
        def later() -> None:
            if step.kind == self._held:
                assert self.go.wait(WAIT)
            launch()

        self._thread.submit(later)

    def finish(self) -> None:
        """Lets them go, and waits for all."""
        self.go.set()
        self._thread.shutdown()


def exchanged(a: AllToAll, seed: int, exact: bool, **order: int) -> list[Any]:
    """All rows of one exchange, and the sums."""
    x, idx, w = batch(seed + a.rank, M - a.rank, EXPERTS, TOPK, HIDDEN)
    a.dispatch_send(x, idx)
    counts = a.arriving() if exact else None
    got = a.dispatch_recv(counts=counts, **order)
    assert counts is None or counts == got.counts.tolist()
    y = got.x.clone()
    found: list[Any] = [got.x[got.of(e)].clone() for e in range(len(got.counts))]
    for e in range(len(got.counts)):
        y[got.of(e)] *= e + 2
    a.combine_send(y)
    return [*found, len(got.x) if exact else None, a.combine_recv(w)]


@pytest.mark.parametrize("order", [{}, {"multiple": 4}, {"stride": 2 * M}], ids=str)
@pytest.mark.parametrize("shared_rows", [None, 3])
def test_a_device_takes_as_many_rows_as_come(
    host: Host, order: dict[str, int], shared_rows: int | None
) -> None:
    sizes = {**SIZES, "shared_rows": shared_rows, "private_rows": 2}

    def exact(a: AllToAll) -> list[Any]:
        return exchanged(a, 0, True, **order)

    with joined([None, None], **sizes) as ranks:
        wanted = on_each(ranks, exact)
    with joined([host.another(), None], **sizes) as ranks:
        found = on_each(ranks, exact)
        # The next one has room for all that can come.
        more = on_each(ranks, lambda a: exchanged(a, 0, False, **order))
        for a in ranks:
            a.check()
    for of_rank, others, after in zip(found, wanted, more, strict=True):
        assert of_rank[-2] == others[-2]
        for one, other, third in zip(of_rank, others, after, strict=True):
            if isinstance(one, Tensor):
                assert torch.equal(one, other)
                assert torch.equal(third, other)


def test_the_host_waits_neither_for_tokens_nor_for_work_behind_them(host: Host) -> None:
    launcher = Behind(host, StepKind.PACK_ROWS)
    with joined([launcher], **SIZES) as [a]:
        x, idx, w = batch(0, M, EXPERTS, TOPK, HIDDEN)
        a.dispatch_send(x, idx)
        counts = a.arriving()
        assert not launcher.go.is_set()
        assert counts == [int((idx == e).sum()) for e in range(EXPERTS)]
        got = a.dispatch_recv(counts=counts)
        a.combine_send(got.x)
        sums = a.combine_recv(w)
        launcher.finish()
        a.check()
        assert got.counts.tolist() == counts
        for e in range(EXPERTS):
            assert torch.equal(got.x[got.of(e)], x[(idx == e).any(1)])
        wanted = (x.float() * torch.where(idx >= 0, w, 0.0).sum(1, keepdim=True)).to(x.dtype)
        torch.testing.assert_close(sums, wanted, rtol=0.02, atol=0.02)


def test_rs_4_a_device_that_never_comes_to_its_dispatch_is_waited_for_sixteen_timeouts(
    host: Host,
) -> None:
    launcher = Behind(host, StepKind.BEGIN_EXCHANGE)
    with joined([launcher], **SIZES, timeout=0.02) as [a]:
        x, idx, _ = batch(0, M, EXPERTS, TOPK, HIDDEN)
        with pytest.raises(errors.InvalidArgument, match="is not next"):
            a.arriving()
        a.dispatch_send(x, idx)
        with pytest.raises(errors.Cancelled, match="did not reach dispatch_send"):
            a.arriving()
        launcher.finish()
        assert a.arriving() == [int((idx == e).sum()) for e in range(EXPERTS)]


def test_rs_4_an_exchange_that_is_closed_ends_the_wait_for_its_rows(host: Host) -> None:
    launcher = Behind(host, StepKind.BEGIN_EXCHANGE)
    with joined([launcher], **SIZES) as [a]:
        x, idx, _ = batch(0, M, EXPERTS, TOPK, HIDDEN)
        a.dispatch_send(x, idx)
        closing = threading.Timer(0.2, a.close)
        closing.start()
        with pytest.raises(errors.Cancelled, match="was closed"):
            a.arriving()
        closing.join()
        launcher.finish()


def test_tokens_that_go_nowhere_are_told_of_when_rows_have_come(host: Host) -> None:
    with joined([host.another()], **SIZES) as [a]:
        x, idx, _ = batch(0, M, EXPERTS, TOPK, HIDDEN)
        idx[0, 0] = EXPERTS
        a.dispatch_send(x, idx)
        a.dispatch_recv(counts=a.arriving())
        with pytest.raises(errors.InvalidArgument, match="index 0 of token 0 is no expert"):
            a.check(wait=False)
        a.check(wait=False)


def test_rs_1_more_rows_than_there_is_room_for_are_answered_by_zeros(host: Host) -> None:
    with joined([host.another(), None], **SIZES) as ranks:

        def work(a: AllToAll) -> list[Tensor]:
            found = []
            for few in (False, True, False):
                x, idx, w = batch(a.rank, M, EXPERTS, TOPK, HIDDEN)
                idx = torch.where(idx < EXPERTS // 2, idx, -1)  # of the first rank alone
                a.dispatch_send(x, idx)
                counts = a.arriving()
                if few and not a.rank:
                    counts = [0, *counts[1:]]
                got = a.dispatch_recv(counts=counts)
                if few and not a.rank:
                    with pytest.raises(errors.InvalidArgument, match="there is room for fewer"):
                        a.check()
                a.combine_send(torch.ones_like(got.x))
                found.append(a.combine_recv(w))
            a.check()
            return found

        for first, zeros, last in on_each(ranks, work):
            assert first.any()
            assert not zeros.any()
            assert torch.equal(first, last)


def test_counts_are_those_of_the_local_experts(host: Host) -> None:
    with joined([host.another()], **SIZES) as [a]:
        x, idx, _ = batch(0, M, EXPERTS, TOPK, HIDDEN)
        a.dispatch_send(x, idx)
        with pytest.raises(errors.InvalidArgument, match="counts are of 1 experts; give 4"):
            a.dispatch_recv(counts=[1])
        with pytest.raises(errors.InvalidArgument, match="stride is 2, and an expert may get 3"):
            a.dispatch_recv(counts=[3, 0, 0, 0], stride=2)
        a.dispatch_recv(counts=a.arriving())


def test_a_captured_dispatch_is_not_waited_for(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    with joined([host.another()], **SIZES) as [a]:
        x, idx, _ = batch(0, M, EXPERTS, TOPK, HIDDEN)
        monkeypatch.setattr(device_memory, "is_captured", lambda _: True)
        a.dispatch_send(x, idx)
        with pytest.raises(errors.Unsupported, match="in a CUDA graph"):
            a.arriving()
        assert len(a.dispatch_recv().x) == M * TOPK
        monkeypatch.undo()
        a.dispatch_send(x, idx)
        assert sum(a.arriving()) == int((idx >= 0).sum())
        a.dispatch_recv()


@pytest.mark.parametrize("elastic", [False, True])
@on_all_ranks(2)
def test_rs_1_a_rank_that_is_lost_while_rows_are_counted_is_told_of_by_the_call(
    comm: ThreadComm, host: Host, elastic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, idx, w = batch(comm.rank(), M, EXPERTS, TOPK, HIDDEN)
    buffer: Any = (
        ElasticBuffer(comm=comm, num_max_tokens_per_rank=M, launcher=host.another())
        if elastic
        else Buffer(comm=comm, max_tokens=M, launcher=host.another())
    )
    comm.all_gather(b"")
    tally, me = ways.tally, threading.get_ident()

    def lost(numbers: Tensor, size: int) -> Tensor:
        if threading.get_ident() == me and buffer._normal._last is not None:
            # As a device's host learns of it when its kernels wait for the rows.
            buffer._normal._last.mask(1, "it fell silent")
        return tally(numbers, size)

    if not comm.rank():
        monkeypatch.setattr(ways, "tally", lost)
    comm.all_gather(b"")
    # The other rank may hear of it in its call.
    told: Any = suppress(errors.PeerLost)
    with told if comm.rank() else pytest.raises(errors.PeerLost, match="fell silent"):
        if elastic:
            buffer.dispatch(x, idx, w, num_experts=EXPERTS)
        else:
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
            buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, idx, w)
    comm.all_gather(b"")
    buffer._exchanges.leave()


@on_all_ranks(2)
def test_normal_calls_wait_for_no_whole_device(
    comm: ThreadComm, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other streams of a device may hold kernels that wait for other ranks."""
    x, idx, w = batch(comm.rank(), M, EXPERTS, TOPK, HIDDEN)
    buffer = Buffer(comm=comm, max_tokens=M, launcher=host.another())
    elastic = ElasticBuffer(comm=comm, num_max_tokens_per_rank=M, launcher=host.another())

    def calls() -> None:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
        rows, *_, handle, _ = buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, idx, w)
        assert isinstance(rows, Tensor)
        buffer.combine(rows, handle)
        rows, *_ = buffer.dispatch(x, handle=handle)
        assert isinstance(rows, Tensor)
        buffer.combine(rows, handle)
        for expand in (False, True):
            rows, *_, of_elastic, _ = elastic.dispatch(
                x, idx, w, num_experts=EXPERTS, do_expand=expand
            )
            assert isinstance(rows, Tensor)
            elastic.combine(rows, of_elastic)

    def refused(_: Any) -> None:
        raise AssertionError("a call waited for the device")

    calls()  # makes the exchanges
    comm.all_gather(b"")
    if not comm.rank():
        monkeypatch.setattr(device.DeviceSteps, "finish", refused)
    comm.all_gather(b"")
    calls()
    comm.all_gather(b"")
    monkeypatch.undo()
    comm.all_gather(b"")
    buffer.destroy()
    elastic.destroy()
