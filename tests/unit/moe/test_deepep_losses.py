"""A rank that dies while others hold handles of DeepEP's normal calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fabric_ray import TransferEngine, errors
from fabric_ray.moe.deepep import Buffer, ElasticBuffer
from tests.moe_ranks import WAIT, ThreadComm, batch, on_ranks

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
        buffer = Buffer(comm=comm, engine=engine, max_tokens=M, ranks_per_node=RANKS)
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
            with pytest.raises(errors.PeerLost, match=f"rank {DEAD} takes no part .* new buffer"):
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
