"""What callers of DeepEP do beside one dispatch and one combine: handles that are used again,
layouts without experts, events, overlap with a GEMM, ranks that come back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from fabric_ray import TransferEngine, errors
from fabric_ray.moe import cast
from fabric_ray.moe.deepep import Buffer, Config, ElasticBuffer, EventHandle, EventOverlap
from tests.moe_ranks import ThreadComm, batch, expert, on_all_ranks, on_ranks, unsharded

EXPERTS, TOPK, M, HIDDEN = 8, 3, 9, 512


def low_latency(comm: ThreadComm, **options: Any) -> Buffer:
    return Buffer(None, low_latency_mode=True, comm=comm, **options)


def experts(buffer: Buffer, recv: Any, counts: torch.Tensor) -> torch.Tensor:
    x = cast.back(*recv) if isinstance(recv, tuple) else recv
    out = torch.full(x.shape, float("nan"), dtype=torch.bfloat16)
    for local, count in enumerate(counts.tolist()):
        out[local, :count] = expert(buffer.rank * len(counts) + local, x[local, :count])
    return out


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("hooks", [False, True])
def test_a_handle_is_combined_any_number_of_times(ranks: int, hooks: bool) -> None:
    def work(comm: ThreadComm) -> None:
        buffer = low_latency(comm)
        kept = []
        for turn, use_fp8 in enumerate([False, True, False, False]):
            x, idx, w = batch(turn * 8 + buffer.rank, M - turn, EXPERTS, TOPK, HIDDEN)
            recv, counts, handle, event, hook = buffer.low_latency_dispatch(
                x, idx, M, EXPERTS, use_fp8=use_fp8,
                async_finish=not hooks, return_recv_hook=hooks,
            )  # fmt: skip
            hook() if hooks else event.current_stream_wait()
            seen = cast.back(*cast.to_fp8(x)) if use_fp8 else x
            kept.append((idx, w, handle, experts(buffer, recv, counts), unsharded(seen, idx, w)))
        # The first two are older than what lies ready; the handle may have been packed anew.
        for zero_copy in (False, True, False):
            for idx, w, handle, y, wanted in kept:
                x = y
                if zero_copy:
                    buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = y
                    x = torch.full_like(y, 7)
                sums, event, hook = buffer.low_latency_combine(
                    x, idx, w, (*handle,), zero_copy=zero_copy, use_logfmt=not zero_copy,
                    async_finish=not hooks, return_recv_hook=hooks,
                )  # fmt: skip
                hook() if hooks else event.current_stream_wait()
                assert torch.equal(sums, wanted)
        buffer.destroy()

    on_ranks(ranks, work)


@pytest.mark.long
@on_all_ranks(2)
def test_a_combine_waits_for_the_signals_of_a_gemm(comm: ThreadComm) -> None:
    buffer = low_latency(comm, timeout=3.0)
    x, idx, w = batch(buffer.rank, M, EXPERTS, TOPK, 48)
    recv, counts, handle, _, _ = buffer.low_latency_dispatch(x, idx, M, EXPERTS, use_fp8=False)
    assert isinstance(recv, torch.Tensor)
    block, local = 4, len(counts)
    blocks = -(-recv.shape[1] // block)
    signal = torch.zeros(local * blocks, dtype=torch.int32)
    of_experts = torch.zeros(local, dtype=torch.int32)
    y = torch.zeros_like(recv)

    def gemm() -> None:
        y.copy_(experts(buffer, recv, counts))
        for number, count in enumerate(counts.tolist()):
            # No more than the blocks that have rows, as DeepGEMM does.
            signal.view(local, blocks)[number, : -(-count // block)] = 2
        of_experts.fill_(5)

    for how in (
        {"packed_recv_count": counts, "comp_signal": signal, "block_m": block, "threshold": 2},
        {"src_signals": of_experts, "src_signal_expect_value": 5},
    ):
        signal.zero_()
        of_experts.zero_()
        with pytest.raises(errors.TransferTimeout, match="signals of the GEMM"):
            buffer.low_latency_combine(y, idx, w, handle, overlap=True, **how)
        other = threading.Timer(0.1, gemm)
        other.start()
        sums, _, _ = buffer.low_latency_combine(y, idx, w, handle, overlap=True, **how)
        assert torch.equal(sums, unsharded(x, idx, w))
        other.join()
    on_gpu = torch.zeros(4, dtype=torch.int32, device="meta")
    with pytest.raises(errors.Unsupported, match="behind the GEMM"):
        buffer.low_latency_combine(
            y, idx, w, handle, overlap=True, src_signals=on_gpu, src_signal_expect_value=1
        )
    buffer.destroy()


@pytest.mark.parametrize("per_node", [1, 2, 4])
@on_all_ranks(4)
def test_tokens_go_by_a_layout_without_their_experts(comm: ThreadComm, per_node: int) -> None:
    buffer = Buffer(None, comm=comm, ranks_per_node=per_node)
    assert buffer.runtime is not None
    assert buffer.runtime.get_num_rdma_ranks() == 4 // per_node
    me, local = comm.rank(), EXPERTS // 4
    batches = [batch(r, 6 + r, EXPERTS, TOPK, 40) for r in range(4)]
    x, idx, w = batches[me]
    per_rank, per_node_rank, per_expert, in_rank, event = buffer.get_dispatch_layout(idx, EXPERTS)
    layout = (None, per_rank, per_node_rank, in_rank, per_expert)
    for alignment in (1, 4):
        recv, no_idx, no_weights, counts, handle, event = buffer.dispatch(
            x, *layout, expert_alignment=alignment, previous_event=event, async_finish=True
        )
        event.current_stream_wait()
        assert no_idx is no_weights is None
        named = torch.cat([i.flatten() for _, i, _ in batches])
        found = [int((named == me * local + n).sum()) for n in range(local)]
        assert counts == [-(-n // alignment) * alignment for n in found]
        assert isinstance(recv, torch.Tensor)
        assert handle is not None
        with_experts, *_, same, _ = buffer.dispatch(x, *layout, topk_idx=idx, topk_weights=w)
        assert isinstance(with_experts, torch.Tensor)
        assert torch.equal(recv, with_experts)
        for one in (handle, same):
            check = check_fields if per_node == 4 else check_fields_over_nodes
            check(one, batches, me)
        # A trainer saves the tensors for its backward pass, and gets a plain tuple back.
        for one in (handle, (*handle,), [*same]):
            sums, _, _ = buffer.combine(recv, one)
            times = in_rank.sum(1, keepdim=True)
            assert torch.equal(sums, (x.float() * times).to(torch.bfloat16))
            again, *_ = buffer.dispatch(x, one)
            assert torch.equal(again, recv)
    with pytest.raises(errors.InvalidArgument, match="what dispatch returned"):
        buffer.combine(recv, handle[:3])
    buffer.destroy()
    assert buffer.runtime is None


def check_fields(handle: Any, batches: list[Any], me: int) -> None:
    """What DeepEP's own tests and those who log read of a handle."""
    prefix, sent, starts, numbers, in_rank, heads = handle
    here = [((idx // (EXPERTS // 4) == me) & (idx >= 0)).any(1) for _, idx, _ in batches]
    assert prefix[:, me].tolist() == torch.tensor([int(h.sum()) for h in here]).cumsum(0).tolist()
    assert sent.shape == starts.shape == (4, 1)
    assert numbers.dtype == prefix.dtype == sent.dtype == heads.dtype == torch.int32
    begin = 0
    for source, end in enumerate(prefix[:, me].tolist()):
        assert numbers[begin:end].tolist() == here[source].nonzero()[:, 0].tolist()
        begin = end
    assert torch.equal(sent[:, 0].to(torch.int64), in_rank.sum(0))
    assert torch.equal(heads >= 0, in_rank)
    assert torch.equal(heads.amax(0) + 1, sent[:, 0])


def check_fields_over_nodes(handle: Any, batches: list[Any], me: int) -> None:
    """The ten values of DeepEP's internode dispatch; its test and NIXL-EP's read ``handle[-4]``."""
    in_rank, to_nodes, sent, *starts, recv_rdma, recv_starts, came, meta, heads, nvl = handle
    ranks, nodes = in_rank.shape[1], len(to_nodes)
    here = [((idx // (EXPERTS // 4) == me) & (idx >= 0)).any(1) for _, idx, _ in batches]
    each = [int(h.sum()) for h in here]
    assert handle[-4] is came
    assert came.tolist() == torch.tensor(each).cumsum(0).tolist()
    source, bits = meta.view(torch.int32).T
    of_rows = [rank // (ranks // nodes) for rank, n in enumerate(each) for _ in range(n)]
    assert source.tolist() == of_rows
    assert set(bits.tolist()) <= {1 << me % (ranks // nodes)}
    in_node = in_rank.view(len(in_rank), nodes, -1).any(2)
    for tokens, count, head in ((in_rank, sent, None), (in_node, to_nodes, heads)):
        assert count.shape == (tokens.shape[1], 1)
        assert torch.equal(count[:, 0].to(torch.int64), tokens.sum(0))
        if head is not None:
            assert torch.equal(head >= 0, tokens)
            assert torch.equal(head.amax(0) + 1, count[:, 0])
    assert starts[0].shape == (nodes, 1)
    assert recv_starts.shape == (ranks, 1)
    reads: list[Callable[[Any], Any]] = [len, torch.sum, torch.Tensor.tolist, lambda t: t[0]]
    for name, value in (("recv_rdma_rank_prefix_sum", recv_rdma), ("send_nvl_head", nvl)):
        for read in reads:
            with pytest.raises(errors.Unsupported, match=f"^{name} of a dispatch over several"):
                read(value)
    assert {one.dtype for one in (to_nodes, sent, came, heads, nvl, recv_rdma)} == {torch.int32}


class _Layer(torch.autograd.Function):
    """A layer of identical experts, whose handle's tensors are kept as NeMo Automodel keeps them:
    a checkpoint gives those of a second forward pass to the handle of the first."""

    FIELDS = (
        "topk_idx", "psum_num_recv_tokens_per_scaleup_rank", "psum_num_recv_tokens_per_expert",
        "recv_src_metadata", "dst_buffer_slot_idx", "token_metadata_at_forward",
        "channel_linked_list", "num_unaligned_recv_tokens_per_expert",
    )  # fmt: skip

    @staticmethod
    def forward(ctx: Any, x: Any, idx: Any, buffer: ElasticBuffer) -> Any:
        y, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=EXPERTS)
        ctx.buffer, ctx.handle = buffer, handle
        ctx.kept = [name for name in _Layer.FIELDS if getattr(handle, name, None) is not None]
        ctx.save_for_backward(*(getattr(handle, name) for name in ctx.kept))
        return buffer.combine(y, handle)[0]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        for name, tensor in zip(ctx.kept, ctx.saved_tensors, strict=True):
            setattr(ctx.handle, name, tensor)
        rows, *_ = ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle)
        return ctx.buffer.combine(rows, ctx.handle)[0], None, None


@pytest.mark.parametrize("per_node", [1, 2])
@on_all_ranks(2)
def test_a_checkpoint_may_keep_what_is_in_a_handle(comm: ThreadComm, per_node: int) -> None:
    buffer = ElasticBuffer(comm=comm, num_max_tokens_per_rank=M, ranks_per_node=per_node)
    x, idx, _ = batch(comm.rank(), 6, EXPERTS, TOPK, HIDDEN)
    x = x.requires_grad_()
    out = checkpoint(_Layer.apply, x, idx, buffer, use_reentrant=False)
    out.sum().backward()
    ranks = torch.stack([((idx >= 0) & (idx * 2 // EXPERTS == r)).any(1) for r in range(2)]).sum(0)
    assert torch.equal(out, x * ranks[:, None])
    assert torch.equal(x.grad, ranks[:, None].expand(x.shape).to(x.dtype))
    buffer.destroy()


@on_all_ranks(2)
def test_one_scale_for_a_token_may_lie_in_a_row(comm: ThreadComm) -> None:
    buffer = Buffer(None, comm=comm)
    x, idx, w = batch(comm.rank(), 6, EXPERTS, TOPK, 128)
    x8, scales = cast.to_fp8(x)
    layout = buffer.get_dispatch_layout(idx, EXPERTS)
    per_rank, _, per_expert, in_rank, _ = layout
    layout_args = (None, per_rank, None, in_rank, per_expert, idx, w)
    (a, a_scales), *_ = buffer.dispatch((x8, scales), *layout_args)
    (b, b_scales), *_, handle, _ = buffer.dispatch((x8, scales[:, 0]), *layout_args)
    assert b_scales.ndim == 1
    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert torch.equal(a_scales[:, 0], b_scales)
    (_, c_scales), *_ = buffer.dispatch((x8, scales[:, 0]), handle=handle)
    assert torch.equal(c_scales, b_scales)
    buffer.destroy()


@on_all_ranks(2)
def test_four_bit_tokens_go_with_the_scales_of_their_scales(comm: ThreadComm) -> None:
    """As in the tests of DeepEP's ``hybrid-ep`` branch."""
    g, other = torch.Generator().manual_seed(comm.rank()), 1 - comm.rank()
    theirs = torch.Generator().manual_seed(other)

    def four_bits(g: torch.Generator, last: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        tokens, scales = (
            torch.randint(-(1 << 31), (1 << 31) - 1, (M, width), generator=g, dtype=torch.int32)
            for width in (HIDDEN // 8, HIDDEN // 64)
        )
        return tokens, scales, torch.rand(M, *last, generator=g)

    buffer = Buffer(None, comm=comm, ranks_per_node=2)
    idx = torch.full((M, 1), other * (EXPERTS // 2))
    layout = buffer.get_dispatch_layout(idx, EXPERTS)
    for last in ((1,), (), (2, 3)):
        x, wanted = four_bits(g, last), four_bits(theirs, last)
        given = (layout[0], None, layout[3], layout[2], idx)
        received, *_, handle, _ = buffer.dispatch(x, None, *given)  # type: ignore[arg-type]
        again, *_ = buffer.dispatch(x, handle)  # type: ignore[arg-type]
        for found in (received, again):
            for one, as_sent in zip(found, wanted, strict=True):
                assert one.dtype == as_sent.dtype
                assert torch.equal(one, as_sent)
    wrong: Any = (x[0], x[1], x[2].double()), (x[0], x[1], x[2][:1]), (*x, x[2]), (x[0],)
    for one in wrong:
        with pytest.raises(errors.InvalidArgument, match=r"tensors for tokens|four-bit tokens are"):
            buffer.dispatch(one, None, *given)  # type: ignore[arg-type]
    buffer.destroy()


def test_events_release_and_call_back() -> None:
    called: list[int] = []
    event = Buffer.capture()
    assert isinstance(event.event, EventHandle)
    event.register_hook_after_wait(lambda: called.append(1))
    with pytest.raises(errors.InvalidArgument, match="registered already"):
        event.register_hook_after_wait(lambda: None)
    event.current_stream_wait()
    event.current_stream_wait()
    assert called == [1]
    assert event.event is not None
    with event(release_handle=True) as same:
        assert same is event
    assert event.event is None
    other = EventOverlap(EventHandle(), (torch.empty(1),))
    other.current_stream_wait(release_handle=True)
    assert other.event is other.extra_tensors is None


@on_all_ranks(1)
def test_a_buffer_gives_out_memory_of_its_own(comm: ThreadComm) -> None:
    buffer = Buffer(None, 64, 1 << 20, True, comm=comm, use_fabric=True)
    assert buffer.group is comm
    whole = buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True)
    x, idx, w = batch(0, M, EXPERTS, TOPK, 48)
    recv, counts, handle, _, _ = buffer.low_latency_dispatch(x, idx, M, EXPERTS, use_fp8=False)
    whole.zero_()
    assert whole.shape == (1 << 20,)
    memory = StorageWeakRef(whole.untyped_storage())
    del whole
    assert memory.expired(), "memory that a caller cleared is kept"
    sums, _, _ = buffer.low_latency_combine(experts(buffer, recv, counts), idx, w, handle)
    assert torch.equal(sums, unsharded(x, idx, w))
    part = buffer.get_local_buffer_tensor(torch.float32, torch.Size([2, 3]), offset=4)
    assert part.shape == (2, 3)
    part.fill_(2)
    assert buffer.get_local_buffer_tensor(torch.float32).tolist() == [0] * 4 + [2] * 6 + [0] * 6
    with pytest.raises(errors.InvalidArgument, match="more bytes"):
        buffer.get_local_buffer_tensor(torch.float32, torch.Size([17]))
    buffer.destroy()


class Mpi:
    """The calls of mpi4py's communicators that DeepEP makes."""

    def __init__(self, comm: ThreadComm) -> None:
        self.Get_rank, self.Get_size, self.allgather = comm.rank, comm.size, comm.all_gather


@on_all_ranks(2)
def test_a_communicator_of_mpi_connects_ranks(comm: ThreadComm) -> None:
    buffer = Buffer(None, low_latency_mode=True, comm=Mpi(comm))
    x, idx, _ = batch(buffer.rank, M, EXPERTS, TOPK, 48)
    _, counts, *_ = buffer.low_latency_dispatch(x, idx, M, EXPERTS, use_fp8=False)
    wanted = torch.cat([batch(r, M, EXPERTS, TOPK, 48)[1].flatten() for r in range(2)])
    assert int(counts.sum()) == int((wanted[wanted >= 0] // 4 == buffer.rank).sum())
    buffer.destroy()


def test_configs_are_checked_as_there() -> None:
    config = Config(20, 8, 256)
    assert (config.num_sms, config.num_max_nvl_chunked_send_tokens) == (20, 8)
    assert Config(20, 8, 256, 12, 128).num_max_rdma_chunked_recv_tokens == 132
    for wrong in ((-2,), (20, 0), (20, 256, 256), (20, 8, 256, 0, 128)):
        with pytest.raises(errors.InvalidArgument, match=r"chunk|SMs"):
            Config(*wrong)


def passes(buffer: Buffer, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One low-latency and one normal pass: each token's sums, of as many answers as came."""
    x, idx, w = batch(turn * 8 + buffer.rank, M, 6, TOPK, 48)
    x, w = torch.ones_like(x), torch.ones_like(w)
    y, _, handle, *_ = buffer.low_latency_dispatch(x, idx, M, 6, use_fp8=False)
    assert isinstance(y, torch.Tensor)
    low, _, _ = buffer.low_latency_combine(y, idx, w, handle)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 6)
    y, *_, way, _ = buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, idx, w)
    assert isinstance(y, torch.Tensor)
    assert way is not None
    normal, _, _ = buffer.combine(y, way)
    low_whole, normal_whole = (idx >= 0).sum(1), in_rank.sum(1)
    return low[:, 0].float() / low_whole, normal[:, 0].float() / normal_whole


def whole(found: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return all(torch.equal(sums.nan_to_num(1.0), torch.ones(M)) for sums in found)


@pytest.mark.parametrize("how", ["one by one", "all"])
@on_all_ranks(3)
def test_ranks_that_were_masked_come_back(comm: ThreadComm, how: str) -> None:
    buffer = low_latency(comm, enable_shrink=True, timeout=20.0, ranks_per_node=3)
    status = torch.empty(3, dtype=torch.int32)
    assert whole(passes(buffer, 0))
    for turn in (1, 2):
        # A rank that is masked lacks what has not left yet.
        comm.all_gather(b"")
        if comm.rank() != 2:
            buffer.low_latency_update_mask_buffer(2, True)
            assert not whole(passes(buffer, turn))
            buffer.low_latency_query_mask_buffer(status)
            assert status.tolist() == [0, 0, 1]
        if how == "all":
            buffer.low_latency_clean_mask_buffer()
        else:
            for rank in range(3):
                buffer.low_latency_update_mask_buffer(rank, mask=False)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0, 0, 0]
        assert not buffer.lost
        for again in range(3):
            assert whole(passes(buffer, turn + again))
    buffer.destroy()


def test_a_rank_that_was_too_late_comes_back() -> None:
    noticed = threading.Event()

    def work(comm: ThreadComm) -> None:
        buffer = low_latency(comm, enable_shrink=True, timeout=1.0, ranks_per_node=2)
        assert whole(passes(buffer, 0))
        if comm.rank() == 1:
            assert noticed.wait(60)
            for turn in (1, 2):
                with pytest.raises(errors.PeerLost, match=r"ranks \[0\] have left this one out"):
                    passes(buffer, turn)
        else:
            assert not all(whole(passes(buffer, turn)) for turn in (1, 2))
        noticed.set()
        buffer.low_latency_clean_mask_buffer()
        assert all(whole(passes(buffer, turn)) for turn in (3, 4))
        buffer.destroy()

    on_ranks(2, work)


@pytest.mark.parametrize("ranks", [3, 4])
def test_rs_4_a_rank_that_dies_before_the_first_call_of_a_shape_is_left_out(ranks: int) -> None:
    """As in DeepEP's own test of shrinking: it dies where it would call dispatch first."""
    dead, done = 1, threading.Barrier(ranks)

    def work(comm: ThreadComm) -> None:
        engine = TransferEngine(name=f"rank-{comm.rank()}", transport="shm")
        buffer = low_latency(
            comm, engine=engine, enable_shrink=True, timeout=2.0, ranks_per_node=ranks
        )
        comm.all_gather(b"")
        if comm.rank() == dead:
            engine.close()
            done.wait(120)
            return
        comm.all_gather = None  # type: ignore[assignment, method-assign]
        status = torch.empty(ranks, dtype=torch.int32)
        for turn, use_fp8 in enumerate([False, True, False]):
            x, idx, w = batch(turn * 8 + comm.rank(), M, ranks * 2, TOPK, HIDDEN)
            recv, counts, handle, _, _ = buffer.low_latency_dispatch(
                x, idx, M, ranks * 2, use_fp8=use_fp8
            )
            sums, event, _ = buffer.low_latency_combine(
                experts(buffer, recv, counts), idx, w, handle
            )
            assert event.left_out == {dead}
            seen = cast.back(*cast.to_fp8(x)) if use_fp8 else x
            assert torch.equal(sums, unsharded(seen, torch.where(idx // 2 == dead, -1, idx), w))
            buffer.low_latency_query_mask_buffer(status)
            assert status.tolist() == [int(rank == dead) for rank in range(ranks)]
        done.wait(120)
        engine.close()

    on_ranks(ranks, work)


@on_all_ranks(2)
def test_uccls_calls_are_taken(comm: ThreadComm) -> None:
    with pytest.raises(ValueError, match="nodes have 1 of 2 ranks"):
        Buffer(None, comm=comm, is_intranode=True, ranks_per_node=1)
    buffer = Buffer(
        None, low_latency_mode=True, explicitly_destroy=True, is_intranode=True, comm=comm
    )
    buffer.connect_atomic_buffer(None)
    x, idx, w = batch(buffer.rank, M, EXPERTS, TOPK, HIDDEN)
    for _ in range(2):
        recv, counts, handle, _, _ = buffer.low_latency_dispatch(x, idx, M, EXPERTS, use_fp8=False)
        sums, _, _ = buffer.low_latency_combine(experts(buffer, recv, counts), idx, w, handle)
        assert torch.equal(sums, unsharded(x, idx, w))
        buffer.reset_rdma_buffer()
    buffer.destroy()
