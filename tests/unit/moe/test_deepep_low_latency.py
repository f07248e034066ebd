"""DeepEP's low-latency calls as inference engines make them, against sums made in one place."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_ray import errors
from fabric_ray.moe import AllToAll, cast
from fabric_ray.moe.deepep import Buffer, EventHandle, EventOverlap, topk_idx_t
from tests.moe_ranks import ThreadComm, batch, expert, on_all_ranks, on_ranks, unsharded

EXPERTS, TOPK, M = 8, 3, 9


def answers(buffer: Buffer, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Each local expert's, for the rows that came; what fills up is NaN."""
    out = torch.full(x.shape, float("nan"), dtype=torch.bfloat16)
    for local, count in enumerate(counts.tolist()):
        number = buffer.rank * len(counts) + local
        out[local, :count] = expert(number, x[local, :count])
    return out


def low_latency(comm: ThreadComm, **options: Any) -> Buffer:
    return Buffer(None, 0, 0, low_latency_mode=True, num_qps_per_rank=8, comm=comm, **options)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("hooks", [False, True])
def test_a_layer_is_that_of_one_place_bit_by_bit(ranks: int, hooks: bool) -> None:
    def work(comm: ThreadComm) -> None:
        buffer = low_latency(comm)
        for turn, most in enumerate([M, 0, 1, 5]):
            x, idx, w = batch(
                turn * 8 + buffer.rank, most if buffer.rank else M - most, 8, TOPK, 48
            )
            recv, counts, handle, event, hook = buffer.low_latency_dispatch(
                x, idx, M, EXPERTS, use_fp8=False, async_finish=not hooks, return_recv_hook=hooks
            )
            hook() if hook else event.current_stream_wait()
            assert isinstance(recv, torch.Tensor)
            assert recv.shape == (EXPERTS // ranks, M * ranks, 48)
            assert counts.dtype == torch.int32
            y = answers(buffer, recv, counts)
            zero_copy = turn % 2 == 1
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle).copy_(y)
                y = buffer.get_next_low_latency_combine_buffer(handle)
            out = torch.empty_like(x) if turn % 2 else None
            sums, event, hook = buffer.low_latency_combine(
                y, idx, w, handle, zero_copy=zero_copy, return_recv_hook=hooks, out=out
            )
            assert (hook is not None) == hooks
            hook() if hook else event.current_stream_wait()
            assert torch.equal(sums, unsharded(x, idx, w))
            assert out is None or sums is out
        buffer.destroy()

    on_ranks(ranks, work)


@pytest.mark.parametrize("kind", ["float32", "powers of two", "ue8m0"])
def test_scales_are_those_of_the_cast_by_columns(kind: str) -> None:
    ranks, hidden = 2, 512
    scales_dtype = torch.int32 if kind == "ue8m0" else torch.float32

    def work(comm: ThreadComm) -> None:
        buffer = low_latency(comm)
        batches = [batch(r, M - r, EXPERTS, TOPK, hidden) for r in range(ranks)]
        x, idx, w = batches[buffer.rank]
        (recv, scales), counts, handle, _, _ = buffer.low_latency_dispatch(
            x,
            idx,
            M,
            EXPERTS,
            round_scale=kind != "float32",
            use_ue8m0=kind == "ue8m0",
        )
        assert recv.dtype == torch.float8_e4m3fn
        assert scales.dtype == scales_dtype
        assert scales.shape == (4, M * ranks, hidden // (512 if kind == "ue8m0" else 128))
        assert scales.stride(1) == 1
        src_info, layout, m, h, experts = handle
        assert (m, h, experts) == (M, hidden, EXPERTS)
        for local in range(4):
            begin = 0
            for source in range(ranks):
                x_s, idx_s, _ = batches[source]
                tokens = (idx_s == buffer.rank * 4 + local).any(1).nonzero()[:, 0]
                word = int(layout[local, source])
                assert word & 0xFFFFFFFF == len(tokens)
                assert word >> 32 == (begin if len(tokens) else 0)
                of = slice(begin, begin + len(tokens))
                assert torch.equal(src_info[local, of], tokens.to(torch.int32))
                want, want_scales = cast.to_fp8(
                    x_s[tokens], scales=scales_dtype, powers_of_two=kind != "float32"
                )
                assert torch.equal(recv[local, of].view(torch.uint8), want.view(torch.uint8))
                assert torch.equal(scales[local, of], want_scales)
                begin += len(tokens)
            assert counts[local] == begin
        y = answers(buffer, cast.back(recv, scales), counts)
        sums, _, _ = buffer.low_latency_combine(y, idx, w, handle)
        assert torch.equal(
            sums, unsharded(cast.back(*cast.to_fp8(x, powers_of_two=kind != "float32")), idx, w)
        )
        buffer.destroy()

    on_ranks(ranks, work)


@pytest.mark.parametrize("hidden", [64, 48])
def test_four_bits_come_packed_with_their_scales_in_tiles(hidden: int) -> None:
    ranks, local = 2, EXPERTS // 2

    def work(comm: ThreadComm) -> None:
        buffer = low_latency(comm)
        batches = [batch(r, M - r, EXPERTS, TOPK, hidden) for r in range(ranks)]
        x, idx, w = batches[buffer.rank]
        # What callers give beside fp8 has no effect there.
        buffer.low_latency_dispatch(x, idx, M, EXPERTS, use_fp8=False, x_global_scale=w[0])
        scale = torch.tensor(448 * 6 / 5.0)
        (recv, tiles), counts, handle, _, hook = buffer.low_latency_dispatch(
            x, idx, M, EXPERTS, use_fp8=False, use_nvfp4=True, x_global_scale=scale,
            return_recv_hook=True,
        )  # fmt: skip
        assert hook is not None
        hook()
        assert (recv.dtype, tiles.dtype) == (torch.uint8, torch.float8_e4m3fn)
        assert recv.shape == (M * ranks, hidden // 2, local)
        assert recv.permute(2, 0, 1).is_contiguous()
        assert tiles.shape == (32, 4, 1, 4, 1, local)
        assert tiles.permute(5, 2, 4, 0, 1, 3).is_contiguous()
        back = torch.full((local, M * ranks, hidden), float("nan"))
        for expert_here in range(local):
            for row in range(int(counts[expert_here])):
                token = recv[row, :, expert_here]
                scales = tiles[row % 32, row // 32, 0, :, 0, expert_here][: hidden // 16]
                back[expert_here, row] = four_bits(token, scales, scale)
        assert handle[2:] == (M, hidden, EXPERTS)
        y = answers(buffer, back.to(torch.bfloat16), counts)
        sums, _, _ = buffer.low_latency_combine(y, idx, w, handle)
        packed, scales = cast.to_nvfp4(x, scale)
        seen = torch.stack([four_bits(*one, scale) for one in zip(packed, scales, strict=True)])
        assert torch.equal(sums, unsharded(seen.to(torch.bfloat16), idx, w))
        # Routes are made again with tokens of the same form.
        again, _, _ = buffer.low_latency_combine(y, idx, w, handle)
        assert torch.equal(sums, again)
        buffer.destroy()

    on_ranks(ranks, work)


def four_bits(token: torch.Tensor, scales: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The values of a token: 16 to a scale, the first of two in the lower half of a byte."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nibbles = torch.stack([token & 15, token >> 4], 1).flatten().to(torch.int64)
    values = table[nibbles & 7] * torch.where(nibbles & 8 != 0, -1.0, 1.0)
    return (values.view(-1, 16) * scales.float()[:, None] / scale).flatten()


@on_all_ranks(2)
def test_two_batches_overlap_by_their_hooks(comm: ThreadComm) -> None:
    buffer = low_latency(comm)
    stats = torch.zeros(4, dtype=torch.int32)
    for turn in range(3):
        a, b = (batch(turn * 10 + i * 5 + buffer.rank, M - i, EXPERTS, TOPK, 16) for i in (0, 1))
        sent = [
            buffer.low_latency_dispatch(
                x, idx, M, EXPERTS, stats, use_fp8=False, return_recv_hook=True
            )
            for x, idx, _ in (a, b)
        ]
        before = stats.clone()
        combined = []
        for (_, idx, w), (recv, counts, handle, _, hook) in zip((a, b), sent, strict=True):
            hook()
            hook()
            y = answers(buffer, recv, counts)
            combined.append(buffer.low_latency_combine(y, idx, w, handle, return_recv_hook=True))
        for (x, idx, w), (sums, _, hook) in zip((a, b), combined, strict=True):
            hook()
            assert torch.equal(sums, unsharded(x, idx, w))
        assert torch.equal(stats - before, sent[0][1] + sent[1][1])
    buffer.destroy()


@pytest.mark.parametrize("hooks", [False, True])
def test_waits_are_counted_for_the_rank_that_is_late(hooks: bool) -> None:
    ranks, late, seconds = 3, 1, 0.4

    def work(comm: ThreadComm) -> None:
        buffer = low_latency(comm)
        x, idx, w = batch(buffer.rank, M, 6, TOPK, 16)
        dispatched, combined = torch.zeros(2, ranks, dtype=torch.int64)
        for turn in range(2):
            before = dispatched.clone(), combined.clone()
            if turn and buffer.rank == late:
                time.sleep(seconds)
            recv, counts, handle, _, hook = buffer.low_latency_dispatch(
                x, idx, M, 6, use_fp8=False, return_recv_hook=hooks,
                dispatch_wait_recv_cost_stats=dispatched,
            )  # fmt: skip
            if hook is not None:
                # What has arrived when the hook is called was not waited for.
                time.sleep(2 * seconds)
                hook()
            y = answers(buffer, recv, counts)
            if turn and buffer.rank == late:
                time.sleep(seconds)
            buffer.low_latency_combine(y, idx, w, handle, combine_wait_recv_cost_stats=combined)
            comm.all_gather(b"")
        if buffer.rank != late:
            [dispatch_s, combine_s] = (
                (now - then).double() / 1e9
                for now, then in zip((dispatched, combined), before, strict=True)
            )
            assert 0.75 * seconds < combine_s[late] < 20 * seconds
            assert combine_s[buffer.rank] == 0
            assert combine_s.argmax() == late
            if hooks:
                assert dispatch_s[late] < 0.75 * seconds
            else:
                assert 0.75 * seconds < dispatch_s[late] < 20 * seconds
                assert dispatch_s.argmax() == late
        buffer.destroy()

    on_ranks(ranks, work)


@on_all_ranks(2)
def test_a_dispatch_may_stay_without_answers_and_combine_may_leave_experts_out(
    comm: ThreadComm,
) -> None:
    buffer = low_latency(comm)
    x, idx, w = batch(buffer.rank, M, EXPERTS, TOPK, 16)
    for _ in range(5):
        buffer.low_latency_dispatch(x, idx, M, EXPERTS, use_fp8=False)
    recv, counts, handle, _, _ = buffer.low_latency_dispatch(x, idx, M, EXPERTS, use_fp8=False)
    fewer = idx.clone()
    fewer[:, 0] = -1
    sums, _, _ = buffer.low_latency_combine(answers(buffer, recv, counts), fewer, w, handle)
    assert torch.equal(sums, unsharded(x, fewer, w))
    buffer.destroy()


def test_what_is_wrong_or_not_here_is_named_before_anything_is_sent() -> None:
    def work(comm: ThreadComm) -> None:
        buffer = low_latency(comm)
        x, idx, w = batch(0, M, EXPERTS, TOPK, 48)
        send, unsupported, invalid = (
            buffer.low_latency_dispatch,
            errors.Unsupported,
            errors.InvalidArgument,
        )
        waits = torch.zeros(1, dtype=torch.int64)
        bf16: dict[str, Any] = {"use_fp8": False}
        for error, words, options in [
            (invalid, "blocks of 128", {}),
            (invalid, "goes with", {"use_ue8m0": True}),
            (invalid, "exclude", {**bf16, "async_finish": True, "return_recv_hook": True}),
            (invalid, "statistics", {**bf16, "dispatch_wait_recv_cost_stats": waits.int()}),
            (invalid, "x_global_scale", {**bf16, "use_nvfp4": True}),
            (invalid, "use_fp8=False", {"use_nvfp4": True, "x_global_scale": x.sum().float()}),
            (invalid, "float32", {**bf16, "use_nvfp4": True, "x_global_scale": x.sum()}),
            (unsupported, "topk_weights", {**bf16, "topk_weights": w}),
            (unsupported, "e4m3", {**bf16, "use_nvfp4": True, "use_ue8m0_for_sf": True}),
            (invalid, "statistics", {**bf16, "cumulative_local_expert_recv_stats": waits}),
        ]:
            with pytest.raises(error, match=words):
                send(x, idx, M, EXPERTS, **options)
        with pytest.raises(invalid, match="bfloat16"):
            send(x.float(), idx, M, EXPERTS, **bf16)
        with pytest.raises(invalid, match="one row for each"):
            send(x, idx[:2], M, EXPERTS, **bf16)
        with pytest.raises(invalid, match="room for 4"):
            send(x, idx, 4, EXPERTS, **bf16)
        recv, counts, handle, _, hook = send(x, idx, M, EXPERTS, return_recv_hook=True, **bf16)
        combine = buffer.low_latency_combine
        assert isinstance(recv, torch.Tensor)
        with pytest.raises(invalid, match="hook of low_latency_dispatch"):
            combine(recv, idx, w, handle)
        assert hook is not None
        hook()
        other = torch.where(idx >= 0, (idx + 1) % EXPERTS, idx)
        for error, words, args, options in [
            (invalid, "comp_signal", (recv, idx, w, handle), {"overlap": True}),
            (
                invalid,
                "exclude",
                (recv, idx, w, handle),
                {"use_logfmt": True, "zero_copy": True},
            ),
            (
                invalid,
                "statistics",
                (recv, idx, w, handle),
                {"combine_wait_recv_cost_stats": waits.repeat(2)},
            ),
            (invalid, "zero_copy", (recv, idx, w, handle), {"zero_copy": True}),
            (invalid, "same topk_idx", (recv, other, w, handle), {}),
            (invalid, "float32", (recv, idx, w.double(), handle), {}),
            (invalid, "aren't those", (recv, idx[:2], w[:2], handle), {}),
            (invalid, "answers are", (recv[:, :4], idx, w, handle), {}),
            (invalid, "out is", (recv, idx, w, handle), {"out": torch.empty(2, 2)}),
            (
                invalid,
                "contiguous",
                (recv, idx, w, handle),
                {"out": torch.empty(48, M, dtype=torch.bfloat16).T},
            ),
        ]:
            with pytest.raises(error, match=words):
                combine(*args, **options)
        # What goes along with overlap=False is taken, as callers pass it always.
        y = answers(buffer, recv, counts)
        sums, _, _ = combine(
            y, idx, w, handle, overlap=False, packed_recv_count=counts, comp_signal=None,
            block_m=64, threshold=0, num_sms=3,
        )  # fmt: skip
        assert torch.equal(sums, unsharded(x, idx, w))
        with pytest.raises(invalid, match="num_max_dispatch_tokens_per_rank"):
            combine(y, idx, w, (torch.empty(1), *handle[1:]))
        with pytest.raises(unsupported):
            buffer.get_comm_stream()
        buffer.clean_low_latency_buffer(M, 48, EXPERTS)
        buffer.destroy()
        buffer.destroy()
        with pytest.raises(invalid, match="low_latency_mode"):
            Buffer(None, comm=comm).low_latency_dispatch(x, idx, M, EXPERTS)
        with pytest.raises(invalid, match="num_rdma_bytes"):
            Buffer(None, 0, 4096, True, comm=comm).low_latency_dispatch(x, idx, M, EXPERTS, **bf16)

    on_ranks(1, work)
    with pytest.raises(errors.InvalidArgument, match="connects no ranks"):
        Buffer("world")
    with pytest.raises(errors.InvalidArgument, match="one of them"):
        Buffer()


def test_ranks_that_disagree_raise_and_none_waits() -> None:
    def work(comm: ThreadComm) -> str:
        buffer = low_latency(comm)
        x, idx, _ = batch(0, 2, 6, TOPK, 16 + 16 * (comm.rank() == 1))
        with pytest.raises(errors.HandshakeError) as told:
            buffer.low_latency_dispatch(x, idx, M, 6, use_fp8=False)
        uneven = 7 if comm.rank() == 1 else 6
        with pytest.raises((errors.HandshakeError, errors.InvalidArgument), match="evenly"):
            buffer.low_latency_dispatch(x[:, :16], idx, M, uneven, use_fp8=False)
        return str(told.value)

    for text in on_ranks(3, work):
        assert "16" in text
        assert "32" in text


@pytest.mark.parametrize("which", [0, 1])
def test_exchanges_that_are_not_all_made_are_forgotten(
    which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the two that dispatches alternate between has no memory on one rank."""
    descriptor, made = AllToAll.descriptor, [0, 0]

    def work(comm: ThreadComm) -> None:
        buffer, me = low_latency(comm), comm.rank()
        before = buffer.explain()
        comm.all_gather(b"")

        def fails(self: AllToAll, only: int | None = None) -> bytes:
            made[self.rank] += 1
            if self.rank == 1 and made[1] == which + 1:
                raise errors.InvalidArgument("there is no memory")
            return descriptor(self, only)

        monkeypatch.setattr(AllToAll, "descriptor", fails)
        comm.all_gather(b"")
        x, idx, _ = batch(me, M, EXPERTS, TOPK, 48)
        with pytest.raises(errors.FabricError, match="there is no memory"):
            buffer.low_latency_dispatch(x, idx, M, EXPERTS, use_fp8=False)
        assert buffer.explain() == before
        buffer.low_latency_dispatch(x, idx, M, EXPERTS, use_fp8=False)
        buffer.destroy()

    on_ranks(2, work)


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([1, 2, 3]),
    st.integers(1, 4),
    st.integers(1, 40),
    st.integers(1, 300),
    st.integers(1, 6),
)
def test_the_size_hint_suffices(ranks: int, local: int, m: int, hidden: int, topk: int) -> None:
    experts = ranks * local
    hint = Buffer.get_low_latency_rdma_size_hint(m, hidden, ranks, experts)

    def work(comm: ThreadComm) -> None:
        buffer = Buffer(None, 0, hint, True, comm=comm)
        x, idx, _ = batch(0, 1, experts, min(topk, experts), hidden)
        buffer.low_latency_dispatch(x, idx, m, experts, use_fp8=False)
        assert "private" in buffer.explain()
        buffer.destroy()

    on_ranks(ranks, work)


def test_events_and_static_calls_are_there() -> None:
    with Buffer.capture() as event:
        assert isinstance(event, EventOverlap)
    with EventOverlap(EventHandle()) as event:
        assert event.left_out == frozenset()
    assert topk_idx_t == torch.int64
    before = Buffer.num_sms
    Buffer.set_num_sms(24)
    assert Buffer.get_dispatch_config(4).num_sms == Buffer.get_combine_config(4).num_sms == 24
    Buffer.set_num_sms(before)
    with pytest.raises(errors.InvalidArgument, match="even"):
        Buffer.set_num_sms(3)
    config = Buffer.get_dispatch_config(4)
    assert config.get_nvl_buffer_size_hint(4096, 4) > 4 * 256 * 4096
    assert config.get_rdma_buffer_size_hint(4096, 4) == 0
    assert Buffer.is_sm90_compiled()


@pytest.mark.parametrize("topk", [TOPK, 4])
@on_all_ranks(2)
def test_an_expert_that_a_token_names_twice_counts_twice(comm: ThreadComm, topk: int) -> None:
    buffer = low_latency(comm)
    for turn in range(3):
        x, _, w = batch(comm.rank() + turn, M, 8, 3, 48)
        g = torch.Generator().manual_seed(comm.rank() + 7 * turn)
        # More places than a rank has experts, in any order.
        idx = torch.randint(-1, 4, (M, topk), generator=g)
        w = torch.rand(M, topk, generator=g)
        recv, counts, handle, _, _ = buffer.low_latency_dispatch(x, idx, M, 4, use_fp8=False)
        kept = idx if turn else torch.where(torch.arange(topk) == 1, -1, idx)
        y = answers(buffer, recv, counts)
        sums, _, _ = buffer.low_latency_combine(y, kept, w, handle)
        assert torch.equal(sums, unsharded(x, kept, w))
    buffer.destroy()
