"""A rank that dies while others hold handles of DeepEP's normal calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fabric_ray import TransferEngine, errors
from fabric_ray.moe import pplx
from fabric_ray.moe.deepep import Buffer, ElasticBuffer
from tests.host_kernels import Host
from tests.moe_ranks import WAIT, ThreadComm, batch, on_all_ranks, on_ranks

RANKS, DEAD, EXPERTS, TOPK, HIDDEN, M = 3, 1, 12, 4, 24, 16
HERE = [rank for rank in range(RANKS) if rank != DEAD]


def with_a_death(work: Callable[[ThreadComm, TransferEngine, Callable[[], None]], None]) -> None:
    """``work`` on three ranks; the middle one dies where it calls what it is given."""
    died, done = threading.Barrier(RANKS), threading.Barrier(RANKS)

    def on_rank(comm: ThreadComm) -> None:
        engine = TransferEngine(name=f"rank-{comm.rank()}", transport="shm")

        def death() -> None:
            died.wait(WAIT)
            if comm.rank() == DEAD:
                engine.close()
            died.wait(WAIT)

        try:
            work(comm, engine, death)
        finally:
            done.wait(WAIT)
            engine.close()

    on_ranks(RANKS, on_rank)


def tokens(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return batch(5 + rank, 9 - rank, EXPERTS, TOPK, HIDDEN)


def rows_from(ranks: list[int], to: int) -> torch.Tensor:
    parts = []
    for rank in ranks:
        x, idx, _ = tokens(rank)
        parts.append(x[((idx >= 0) & (idx // (EXPERTS // RANKS) == to)).any(1)])
    return torch.cat(parts)


def dispatch(buffer: Buffer, x: torch.Tensor, idx: torch.Tensor) -> Any:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
    recv, *_, handle, _ = buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, idx)
    return recv, handle


def test_rs_1_a_handle_is_refused_once_a_rank_is_lost_that_it_has_rows_of() -> None:
    def work(comm: ThreadComm, engine: TransferEngine, death: Callable[[], None]) -> None:
        me = comm.rank()
        buffer = Buffer(
            enable_shrink=True, comm=comm, engine=engine, max_tokens=M, ranks_per_node=RANKS
        )
        x, idx, _ = tokens(me)
        recv, handle = dispatch(buffer, x, idx)
        assert torch.equal(recv, rows_from([0, 1, 2], me))
        buffer.combine(recv, handle)
        again, *_ = buffer.dispatch(x, handle=handle)
        assert torch.equal(again, recv)
        buffer.combine(again, handle)
        death()
        if me == DEAD:
            return
        # The tokens of the last rank would lie where the handle has the lost one's.
        with pytest.raises(errors.PeerLost, match=f"rank {DEAD} was here .* without the handle"):
            buffer.dispatch(x, handle=handle)
        # And so would answers, whose ways are made again.
        with pytest.raises(errors.PeerLost, match=f"rank {DEAD} was here"):
            buffer.combine(recv, handle)
        for _ in range(2):
            recv, handle = dispatch(buffer, x, idx)
            assert torch.equal(recv, rows_from(HERE, me))
            sums, *_ = buffer.combine(recv, handle)
            of = torch.stack(
                [((idx >= 0) & (idx // (EXPERTS // RANKS) == r)).any(1) for r in HERE]
            ).sum(0)
            assert torch.equal(sums, (x.float() * of[:, None]).to(x.dtype))
            again, *_ = buffer.dispatch(x, handle=handle)
            assert torch.equal(again, recv)
            sums_again, *_ = buffer.combine(again, handle)
            assert torch.equal(sums_again, sums)

    with_a_death(work)


def test_rs_1_an_elastic_buffer_does_not_go_on_without_a_rank() -> None:
    def work(comm: ThreadComm, engine: TransferEngine, death: Callable[[], None]) -> None:
        me = comm.rank()
        buffer = ElasticBuffer(
            comm=comm, engine=engine, num_max_tokens_per_rank=M, ranks_per_node=RANKS
        )
        x, idx, w = tokens(me)
        recv, _, _, handle, _ = buffer.dispatch(x, idx, w, num_experts=EXPERTS)
        buffer.combine(recv, handle)
        again, *_ = buffer.dispatch(x, handle=handle)
        assert torch.equal(again, rows_from([0, 1, 2], me))
        buffer.combine(again, handle)
        death()
        if me == DEAD:
            return
        for call in (
            lambda: buffer.dispatch(x, handle=handle),
            lambda: buffer.combine(recv, handle),
            lambda: buffer.dispatch(x, idx, w, num_experts=EXPERTS),
            buffer.check,
        ):
            with pytest.raises(
                errors.PeerLost, match=f"rank {DEAD} takes no part .* new Buffer or AllToAll"
            ):
                call()

    with_a_death(work)


def test_rs_1_sums_of_an_elastic_buffer_without_a_rank_are_not_handed_out() -> None:
    def work(comm: ThreadComm, engine: TransferEngine, death: Callable[[], None]) -> None:
        buffer = ElasticBuffer(
            comm=comm, engine=engine, num_max_tokens_per_rank=M, ranks_per_node=RANKS
        )
        x, idx, w = tokens(comm.rank())
        recv, _, _, handle, _ = buffer.dispatch(x, idx, w, num_experts=EXPERTS)
        death()
        if comm.rank() != DEAD:
            with pytest.raises(errors.PeerLost, match=f"rank {DEAD} takes no part"):
                buffer.combine(recv, handle)

    with_a_death(work)


class Stall:
    """Two ranks of a drop-in; the second is busy where it says so, until the first one's timeout
    has passed."""

    TIMEOUT = 1.0

    def __init__(self, comm: ThreadComm, engine: TransferEngine, noticed: threading.Event) -> None:
        self.comm, self.options = comm, {"comm": comm, "engine": engine}
        self._noticed = noticed

    def passes(self, one: Callable[[Callable[[], None]], torch.Tensor]) -> list[str]:
        """What each of six passes gave: its sum, or the error. The second pass stalls."""
        found = []
        for number in range(6):

            def stall(now: bool = number == 1) -> None:
                if now and self.comm.rank() == 1:
                    assert self._noticed.wait(WAIT)

            try:
                found.append(f"{one(stall).float().mean().item():g}")
            except errors.PeerLost as error:
                found.append(f"{error.peer}: {error}")
            if found[-1] != "4":
                self._noticed.set()
        return found


X = torch.ones(8, 256, dtype=torch.bfloat16)
IDX = torch.arange(0, 8, 2).repeat(8, 1)  # four experts, two on each rank
WEIGHTS = torch.ones(8, 4)


def low_latency_passes(stall: Stall, **options: Any) -> list[str]:
    buffer = Buffer(None, low_latency_mode=True, timeout=stall.TIMEOUT, **stall.options, **options)

    def one(wait: Callable[[], None]) -> torch.Tensor:
        y, _, handle, *_ = buffer.low_latency_dispatch(X, IDX, 8, 8, use_fp8=False)
        wait()
        assert isinstance(y, torch.Tensor)
        return buffer.low_latency_combine(y, IDX, WEIGHTS, handle)[0]

    return stall.passes(one)


def normal_passes(stall: Stall, **options: Any) -> list[str]:
    options = {"max_tokens": 8} | options
    buffer = Buffer(timeout=stall.TIMEOUT, **stall.options, **options)

    def one(wait: Callable[[], None]) -> torch.Tensor:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(IDX, 8)
        y, *_, handle, _ = buffer.dispatch(X, None, per_rank, None, in_rank, per_expert, IDX)
        wait()
        assert isinstance(y, torch.Tensor)
        assert handle is not None
        return 2 * buffer.combine(y, handle)[0]  # one answer of each rank

    return stall.passes(one)


def elastic_passes(stall: Stall) -> list[str]:
    buffer = ElasticBuffer(
        num_max_tokens_per_rank=8, num_gpu_timeout_secs=int(stall.TIMEOUT), **stall.options
    )

    def one(wait: Callable[[], None]) -> torch.Tensor:
        y, _, _, handle, _ = buffer.dispatch(X, IDX, WEIGHTS, num_experts=8)
        wait()
        assert isinstance(y, torch.Tensor)
        return 2 * buffer.combine(y, handle)[0]

    return stall.passes(one)


def gathered_passes(stall: Stall, **options: Any) -> list[str]:
    return normal_passes(stall, max_tokens=None, **options)


def barrier_passes(stall: Stall) -> list[str]:
    buffer = ElasticBuffer(
        num_max_tokens_per_rank=8, num_gpu_timeout_secs=int(stall.TIMEOUT), **stall.options
    )

    def one(wait: Callable[[], None]) -> torch.Tensor:
        wait()
        buffer.barrier()
        return torch.full((1,), 4.0)

    return stall.passes(one)


def pplx_passes(stall: Stall) -> list[str]:
    there = pplx.AllToAll.intranode(
        8, 8, 4, stall.comm.rank(), 2, 1, 256, 512, 0, timeout=stall.TIMEOUT, **stall.options
    )
    counts = torch.zeros(4, dtype=torch.int32)
    y, out = torch.zeros(4, 16, 256, dtype=torch.bfloat16), torch.zeros(8, 256)

    def one(wait: Callable[[], None]) -> torch.Tensor:
        there.dispatch(counts, y, None, X, None, IDX)
        wait()
        there.combine(out, IDX, WEIGHTS, y)
        return out

    return stall.passes(one)


def after_a_stall(passes: Callable[[Stall], list[str]]) -> list[list[str]]:
    noticed = threading.Event()

    def on_rank(comm: ThreadComm) -> list[str]:
        with TransferEngine(name=f"rank-{comm.rank()}", transport="shm") as engine:
            found = passes(Stall(comm, engine, noticed))
            comm.all_gather(b"")
            return found

    found: list[list[str]] = on_ranks(2, on_rank)
    return found


@pytest.mark.parametrize(
    "passes",
    [
        low_latency_passes,
        normal_passes,
        gathered_passes,
        elastic_passes,
        barrier_passes,
        pplx_passes,
    ],
)
def test_rs_1_a_stall_raises_on_both_ranks_and_no_sum_is_wrong(
    passes: Callable[[Stall], list[str]],
) -> None:
    for rank, found in enumerate(after_a_stall(passes)):
        assert found[0] == "4"
        whole = found.index(next(text for text in found if text != "4"))
        assert whole in (1, 2)
        assert all(text.startswith(f"rank {1 - rank}: rank {1 - rank} takes no part any more")
                   for text in found[whole:])  # fmt: skip


@pytest.mark.parametrize("passes", [low_latency_passes, normal_passes, gathered_passes])
def test_rs_1_a_buffer_that_shrinks_goes_on_without_the_rank_in_each_pass(
    passes: Callable[..., list[str]],
) -> None:
    found, late = after_a_stall(lambda stall: passes(stall, enable_shrink=True))
    whole = found.index("2")
    assert whole in (1, 2)
    assert found == ["4"] * whole + ["2"] * (6 - whole)
    # The rank that stalled is told, and has no sums of its own experts alone.
    told = late.index(next(text for text in late if text != "4"))
    assert all(text.startswith("rank 0: ranks [0] have left this one out") for text in late[told:])
    assert told in (1, 2)


def test_rs_4_buffers_grow_without_a_lost_rank() -> None:
    def work(comm: ThreadComm, engine: TransferEngine, death: Callable[[], None]) -> None:
        buffer = Buffer(
            enable_shrink=True, timeout=2.0, comm=comm, engine=engine, ranks_per_node=RANKS
        )
        x, idx, _ = tokens(comm.rank())
        received, handle = dispatch(buffer, x, idx)
        buffer.combine(received, handle)
        death()
        if comm.rank() == DEAD:
            return
        dispatch(buffer, x, idx)
        many, to = x.repeat(100, 1), idx.repeat(100, 1)
        received, handle = dispatch(buffer, many, to)
        assert len(received) == 100 * len(rows_from(HERE, comm.rank()))
        buffer.combine(received, handle)

    with_a_death(work)


def test_rs_1_a_result_says_which_ranks_it_is_without() -> None:
    def work(comm: ThreadComm, engine: TransferEngine, death: Callable[[], None]) -> None:
        buffer = Buffer(
            None, low_latency_mode=True, enable_shrink=True, timeout=2.0, comm=comm, engine=engine,
            max_tokens=M, ranks_per_node=RANKS,
        )  # fmt: skip
        x, idx, w = tokens(comm.rank())

        def events() -> list[Any]:
            y, _, handle, first, _ = buffer.low_latency_dispatch(x, idx, M, EXPERTS, use_fp8=False)
            _, second, _ = buffer.low_latency_combine(y, idx, w, handle)
            received, way = dispatch(buffer, x, idx)
            return [first.left_out, second.left_out, buffer.combine(received, way)[2].left_out]

        assert events() == [frozenset()] * 3
        comm.all_gather(b"")
        death()
        if comm.rank() == DEAD:
            return
        events()
        # One exchange heard of it, and each of the others goes by that.
        assert events() == [frozenset({DEAD})] * 3

    with_a_death(work)


@pytest.mark.parametrize("kernels", [False, True])
def test_a_low_latency_handle_is_combined_again_without_a_rank_that_was_lost(
    host: Host, kernels: bool
) -> None:
    """As in DeepEP's own test of shrinking. Expert 0 has rows of the dead rank between those of the
    others, expert 1 has no others."""

    def work(comm: ThreadComm, engine: TransferEngine, death: Callable[[], None]) -> None:
        buffer = Buffer(
            None, low_latency_mode=True, enable_shrink=True, timeout=4.0, comm=comm, engine=engine,
            ranks_per_node=RANKS, launcher=host.another() if kernels else None,
        )  # fmt: skip
        x = torch.full((2, HIDDEN), comm.rank() + 1.0, dtype=torch.bfloat16)
        idx, w = (
            torch.tensor([[0, 1 if comm.rank() == DEAD else EXPERTS - 1]] * 2),
            torch.ones(2, 2),
        )

        def dispatched() -> Any:
            y, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, M, EXPERTS, use_fp8=False)
            return y, handle

        def combined(y: torch.Tensor, handle: Any) -> None:
            sums, _, _ = buffer.low_latency_combine(y, idx, w, handle)
            assert torch.equal(sums, 2 * x)

        given = dispatched()
        combined(*given)
        comm.all_gather(b"")
        death()
        if comm.rank() == DEAD:
            return
        for _ in range(3):
            combined(*given)
            combined(*given)
            given = dispatched()
        assert [*buffer.lost] == [DEAD]

    with_a_death(work)


@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_rs_1_a_hook_that_raised_raises_again(call: str) -> None:
    def work(comm: ThreadComm, engine: TransferEngine, death: Callable[[], None]) -> None:
        buffer = Buffer(
            None, low_latency_mode=True, timeout=4.0, comm=comm, engine=engine, ranks_per_node=RANKS
        )
        x, idx, w = tokens(comm.rank())

        def begun() -> Any:
            return buffer.low_latency_dispatch(
                x, idx, M, EXPERTS, use_fp8=False, return_recv_hook=True
            )

        y, _, handle, _, hook = begun()
        hook()
        comm.all_gather(b"")
        death()
        if comm.rank() == DEAD:
            return
        if call == "dispatch":
            hook = begun()[-1]
        else:
            _, _, hook = buffer.low_latency_combine(y, idx, w, handle, return_recv_hook=True)
        for _ in range(2):
            with pytest.raises(errors.PeerLost):
                hook()

    with_a_death(work)


def test_a_rank_that_others_gave_up_destroys_its_buffer_without_them() -> None:
    """As in DeepEP's own test of shrinking, where a rank that fails makes this call alone."""
    others_are_done = threading.Barrier(RANKS)

    def work(comm: ThreadComm) -> None:
        buffer = Buffer(
            None, low_latency_mode=True, enable_shrink=True, timeout=2.0, comm=comm,
            ranks_per_node=RANKS,
        )  # fmt: skip
        x, idx, w = tokens(comm.rank())
        for turn in range(2):
            if turn == 0 or comm.rank() != DEAD:
                y, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, M, EXPERTS, use_fp8=False)
                buffer.low_latency_combine(y, idx, w, handle)
        if comm.rank() == DEAD:
            others_are_done.wait(WAIT)
        buffer.destroy()
        if comm.rank() != DEAD:
            others_are_done.wait(WAIT)
        comm.all_gather(b"")

    on_ranks(RANKS, work)


def test_a_rank_that_does_not_clean_its_buffer_is_masked() -> None:
    """As in DeepEP's own test of shrinking: the mask is read after the call."""

    def work(comm: ThreadComm, engine: TransferEngine, death: Callable[[], None]) -> None:
        buffer = Buffer(
            None, low_latency_mode=True, enable_shrink=True, timeout=4.0, comm=comm, engine=engine,
            ranks_per_node=RANKS,
        )  # fmt: skip
        status = torch.empty(RANKS, dtype=torch.int32)
        buffer.clean_low_latency_buffer(M, HIDDEN, EXPERTS)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0, 0, 0]
        comm.all_gather(b"")
        death()
        if comm.rank() == DEAD:
            return
        buffer.clean_low_latency_buffer(M, HIDDEN, EXPERTS)
        buffer.low_latency_query_mask_buffer(status)
        assert status.nonzero().flatten().tolist() == [DEAD]

    with_a_death(work)


def test_a_buffer_of_many_ranks_that_shrinks_makes_its_exchanges() -> None:
    """A rank's descriptor has a part for each other rank: that of 16 ranks is longer than 8 KB."""
    ranks = 16

    def work(comm: ThreadComm) -> None:
        with TransferEngine(name=f"rank-{comm.rank()}", transport="shm") as engine:
            buffer = Buffer(
                None, low_latency_mode=True, enable_shrink=True, timeout=60.0, comm=comm,
                engine=engine, ranks_per_node=ranks,
            )  # fmt: skip
            x = torch.full((1, 128), float(comm.rank()), dtype=torch.bfloat16)
            idx = torch.tensor([[(comm.rank() + 1) % ranks]])
            y, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, 1, ranks, use_fp8=False)
            sums, _, _ = buffer.low_latency_combine(y, idx, torch.ones(1, 1), handle)
            assert torch.equal(sums, x)
            buffer.destroy()

    on_ranks(ranks, work)


@pytest.mark.parametrize("options", [{"timeout": 5.0}, {"enable_shrink": True}], ids=str)
@on_all_ranks(2)
def test_ranks_that_differ_in_what_a_stall_does_are_refused(
    comm: ThreadComm, options: dict[str, Any]
) -> None:
    mine = options if comm.rank() else {}
    with pytest.raises(errors.HandshakeError, match="differ in timeout and enable_shrink"):
        Buffer(None, low_latency_mode=True, comm=comm, **mine)
