"""DeepEP's second interface as its own tests call it, against sums in one place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fabric_ray import errors
from fabric_ray.moe import cast
from fabric_ray.moe.deepep import ElasticBuffer, EPHandle
from tests.host_kernels import Host, launching
from tests.moe_ranks import ThreadComm, batch, on_all_ranks, on_ranks

EXPERTS, TOPK, HIDDEN, M, ALIGNMENT = 8, 3, 256, 16, 4


def buffer_of(
    host: Host, comm: ThreadComm, on_kernels: bool, per_node: int, once: bool
) -> ElasticBuffer:
    options: dict[str, Any] = {
        "num_max_tokens_per_rank": M, "ranks_per_node": per_node,
        "allow_multiple_reduction": not once,
    }  # fmt: skip
    if on_kernels:
        options |= launching(host, comm.stack, None if per_node == comm.size() else 2)
    return ElasticBuffer(comm=comm, **options)


def tokens_of(rank: int, seed: int) -> int:
    return max(1, M - 5 * rank) if seed % 2 == 0 else (0, M, 1, 7)[rank]


def batches(ranks: int, seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    found = [batch(seed + r, tokens_of(r, seed), EXPERTS, TOPK, HIDDEN) for r in range(ranks)]
    return [(x, idx, w.masked_fill(idx < 0, 0.0)) for x, idx, w in found]


def arrived(rank: int, ranks: int, seed: int) -> tuple[Tensor, ...]:
    """What comes here: tokens, experts, weights, and numbers among all ranks' tokens."""
    local, parts = EXPERTS // ranks, []
    for source, (x, idx, w) in enumerate(batches(ranks, seed)):
        mine = torch.where((idx >= 0) & (idx // local == rank), idx - rank * local, -1)
        here = (mine >= 0).any(1)
        number = source * M + torch.arange(len(x))
        parts.append((x[here], mine[here], w.masked_fill(mine < 0, 0.0)[here], number[here]))
    return tuple(torch.cat(of) for of in zip(*parts, strict=True))


def aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def check_values_of_kernels(buffer: ElasticBuffer, handle: EPHandle, idx: Tensor) -> None:
    """Slots on one node; over several, values that are kept, compared with themselves, not read."""
    if buffer.num_scaleout_ranks > 1:
        assert torch.equal(handle.dst_buffer_slot_idx, handle.dst_buffer_slot_idx)
        for name in ("dst_buffer_slot_idx", "token_metadata_at_forward", "channel_linked_list"):
            with pytest.raises(errors.Unsupported, match=f"{name} .* read recv_src_metadata"):
                getattr(handle, name).max()
        return
    assert handle.token_metadata_at_forward is handle.channel_linked_list is None
    want, sent = torch.full(idx.shape, -1), [0] * buffer.num_ranks
    for token, experts in enumerate(idx.tolist()):
        last = {e * buffer.num_ranks // EXPERTS: k for k, e in enumerate(experts) if e >= 0}
        for rank, k in last.items():
            want[token, k] = buffer.rank_idx * M + sent[rank]
            sent[rank] += 1
    assert torch.equal(handle.dst_buffer_slot_idx, want.int())


def step(buffer: ElasticBuffer, seed: int, fp8: bool) -> None:
    """Forward, and by its handle again; both layouts."""
    rank, ranks = buffer.rank_idx, buffer.num_ranks
    local = EXPERTS // ranks
    x, idx, w = batches(ranks, seed)[rank]
    sent = cast.to_fp8(x) if fp8 else x
    want_x, want_idx, want_w, numbers = arrived(rank, ranks, seed)
    counts = [int((want_idx == e).sum()) for e in range(local)]
    stats = torch.full((local,), 7, dtype=torch.int32)
    given: dict[str, Any] = {
        "x": sent, "topk_idx": idx, "topk_weights": w, "num_experts": EXPERTS,
        "num_max_tokens_per_rank": M, "expert_alignment": ALIGNMENT,
        "previous_event": buffer.capture(),
    }  # fmt: skip

    def plain(received: Any) -> Tensor:
        return cast.back(*received) if fp8 else received

    recv, recv_idx, recv_w, handle, event = buffer.dispatch(
        **given, cumulative_local_expert_recv_stats=stats
    )
    event.current_stream_wait()
    want_x = cast.back(*cast.to_fp8(want_x)) if fp8 else want_x
    assert torch.equal(plain(recv), want_x)
    assert recv_idx is not None
    assert recv_w is not None
    assert torch.equal(recv_idx, want_idx)
    assert torch.equal(recv_w, want_w)
    assert stats.tolist() == [7 + n for n in counts]
    assert handle.num_recv_tokens_per_expert_list == [aligned(n) for n in counts]
    ends = torch.tensor([aligned(n) for n in counts]).cumsum(0).tolist()
    assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
    assert torch.equal(handle.recv_src_metadata[:, 0].long(), numbers)
    places = numbers // M % buffer.num_scaleup_ranks
    sums = [int((places <= p).sum()) for p in range(buffer.num_scaleup_ranks)]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == sums
    assert (handle.num_experts, handle.expert_alignment) == (EXPERTS, ALIGNMENT)
    again, again_idx, none, same, _ = buffer.dispatch(sent, handle=handle)
    assert torch.equal(plain(again), want_x)
    assert torch.equal(again_idx, want_idx)
    assert none is None
    assert same is handle
    check_values_of_kernels(buffer, handle, idx)

    # The other layout, and its columns.
    wide, none, wide_w, slots, _ = buffer.dispatch(
        **given, do_expand=True, use_tma_aligned_col_major_sf=True
    )
    assert none is None
    assert slots.psum_num_recv_tokens_per_scaleup_rank.tolist() == sums
    if fp8:
        assert wide[1].stride()[0] == 1
    starts = [0, *ends]
    for e, n in enumerate(counts):
        assert int(slots.psum_num_recv_tokens_per_expert[e]) == starts[e] + n
        of = slice(starts[e], starts[e] + n)
        token, place = (want_idx == e).nonzero(as_tuple=True)
        assert torch.equal(plain(wide)[of], want_x[token])
        assert torch.equal(wide_w[of], want_w[token, place])
        assert torch.equal(
            slots.recv_src_metadata[token, 2 + place].long(), torch.arange(starts[e], starts[e] + n)
        )
        assert not plain(wide)[starts[e] + n : starts[e + 1]].any()
        assert not wide_w[starts[e] + n : starts[e + 1]].any()
    assert len(wide_w) == starts[-1] == slots.num_expanded_tokens
    cached, _, cached_w, _, _ = buffer.dispatch(
        sent, handle=slots, topk_weights=w, do_expand=True, do_zero_padding=True
    )
    assert torch.equal(plain(cached), plain(wide))
    assert torch.equal(cached_w, wide_w)

    # Answers: each row is answered with a multiple of itself, and each slot with itself.
    there = [(idx >= 0) & (idx // local == r) for r in range(ranks)]
    own = (cast.back(*sent) if fp8 else x).float()
    bias = (torch.randn(x.shape).to(torch.bfloat16), torch.randn(x.shape).to(torch.bfloat16))
    per_node = buffer.num_scaleup_ranks

    def once(part: Tensor) -> Tensor:
        """A part of sums, as it is sent."""
        return part.to(torch.bfloat16).float() if buffer.allow_multiple_reduction else part

    def summed(of_rank: Any) -> Tensor:
        total = torch.zeros(x.shape)
        for first in range(0, ranks, per_node):
            of_node = torch.zeros(x.shape)
            for r in range(first, first + per_node):
                of_node += of_rank(r)
            total += once(of_node) if per_node < ranks else of_node
        return total

    rows = summed(lambda r: own * 2**r * there[r].any(1)[:, None])
    out, out_w, _ = buffer.combine(want_x * 2**rank, handle, topk_weights=recv_w, bias=bias[0])
    assert torch.equal(out, (rows + bias[0].float()).to(torch.bfloat16))
    assert torch.equal(out_w, w)
    folded = summed(lambda r: once(own * there[r].sum(1)[:, None]))
    out, out_w, _ = buffer.combine(plain(wide), slots, topk_weights=wide_w, bias=bias)
    assert torch.equal(out, (folded + bias[0].float() + bias[1].float()).to(torch.bfloat16))
    assert torch.equal(out_w, w)


@pytest.mark.parametrize(
    ("ranks", "per_node", "once", "on_kernels"),
    [
        pytest.param(*shape, on_kernels, marks=pytest.mark.long if on_kernels and slow else [])
        for shape, slow in {
            (1, 1, False): 0, (2, 2, True): 1, (4, 4, False): 1, (4, 2, False): 1, (4, 2, True): 1,
            (2, 1, False): 1,
        }.items()
        for on_kernels in (False, True)
    ],
)  # fmt: skip
def test_both_layouts_and_both_ways_are_those_of_one_place(
    host: Host, ranks: int, per_node: int, once: bool, on_kernels: bool
) -> None:
    def work(comm: ThreadComm) -> None:
        buffer = buffer_of(host, comm, on_kernels, per_node, once)
        assert buffer.get_logical_domain_size() == (ranks // per_node, per_node)
        for seed, fp8 in enumerate([False, True, False]):
            step(buffer, seed, fp8)
        buffer.check()
        buffer.barrier()
        assert buffer.runtime is not None
        assert buffer.runtime.get_num_rdma_ranks() == ranks // per_node
        buffer.destroy()
        assert buffer.runtime is None

    on_ranks(ranks, work)


@on_all_ranks(2)
def test_without_a_cpu_sync_there_is_room_for_all(comm: ThreadComm) -> None:
    buffer = ElasticBuffer(comm=comm, num_max_tokens_per_rank=M)
    x, idx, w = batches(2, 0)[comm.rank()]
    want_x, want_idx, _, _ = arrived(comm.rank(), 2, 0)
    recv, recv_idx, recv_w, handle, _ = buffer.dispatch(
        x, idx, w, num_experts=EXPERTS, do_cpu_sync=False
    )
    assert len(recv) == len(recv_w) == 2 * M
    assert torch.equal(recv[: len(want_x)], want_x)
    assert torch.equal(recv_idx[: len(want_x)], want_idx)
    assert (recv_idx[len(want_x) :] == -1).all()
    out, _, _ = buffer.combine(recv, handle)
    ranks = torch.stack([((idx >= 0) & (idx // 4 == r)).any(1) for r in range(2)]).sum(0)
    assert torch.equal(out, (x.float() * ranks[:, None]).to(torch.bfloat16))
    wide, *_, handle, _ = buffer.dispatch(
        x, idx, w, num_experts=EXPERTS, do_cpu_sync=False, do_expand=True, expert_alignment=8
    )
    assert len(wide) == 2 * M * TOPK + 7 * 4 + (-(2 * M * TOPK + 7 * 4) % 8)
    out, _, _ = buffer.combine(wide, handle)
    assert out.shape == x.shape
    buffer.destroy()


@on_all_ranks(2)
def test_buffers_are_those_of_the_most_tokens_that_were_named(comm: ThreadComm) -> None:
    buffer = ElasticBuffer(comm=comm, num_max_tokens_per_rank=M)
    x, idx, w = batches(2, 0)[comm.rank()]

    def there_and_back(most: int) -> None:
        recv, _, _, handle, _ = buffer.dispatch(
            x, idx, w, num_experts=EXPERTS, num_max_tokens_per_rank=most
        )
        assert torch.equal(recv, arrived(comm.rank(), 2, 0)[0])
        assert handle.num_max_tokens_per_rank == most
        buffer.combine(recv, handle)

    there_and_back(4 * M)
    nbytes = buffer._exchanges.nbytes
    for most in (M, 2 * M, 3 * M, 4 * M):
        there_and_back(most)
    assert buffer._exchanges.nbytes == nbytes
    # A handle outlives the buffers that it was made with.
    recv, _, _, handle, _ = buffer.dispatch(x, idx, w, num_experts=EXPERTS)
    there_and_back(8 * M)
    assert buffer._exchanges.nbytes < 2.2 * nbytes
    again, *_ = buffer.dispatch(x, handle=handle)
    assert torch.equal(again, recv)
    buffer.destroy()


@pytest.mark.parametrize("once", [False, True])
@on_all_ranks(2)
def test_the_size_hint_suffices_for_slots(comm: ThreadComm, once: bool) -> None:
    most, hidden = 256, 2048
    buffer = ElasticBuffer(
        comm=comm, num_max_tokens_per_rank=most, allow_multiple_reduction=not once
    )
    _, idx, _ = batches(2, 0)[comm.rank()]
    x = torch.ones(len(idx), hidden, dtype=torch.bfloat16)
    buffer.dispatch(x, idx, num_experts=EXPERTS, do_expand=True)
    hint = ElasticBuffer.get_buffer_size_hint(
        comm, most, hidden, TOPK, allow_multiple_reduction=not once
    )
    (lane,) = buffer._normal._lanes.values()
    assert lane[0].exchange.nbytes <= hint
    buffer.destroy()


@on_all_ranks(1)
def test_what_a_caller_does_to_results_changes_no_handle(comm: ThreadComm) -> None:
    buffer = ElasticBuffer(comm=comm, num_max_tokens_per_rank=M)
    x, idx, w = batches(1, 0)[0]
    _, found, _, handle, _ = buffer.dispatch(x, idx, w, num_experts=EXPERTS)
    want = found.clone()
    found.fill_(7)
    assert torch.equal(buffer.dispatch(x, handle=handle)[1], want)
    buffer.destroy()


@on_all_ranks(2)
def test_what_does_not_fit_and_what_there_is_not_is_said(comm: ThreadComm) -> None:
    buffer = ElasticBuffer(
        comm=comm, num_max_tokens_per_rank=M, allow_hybrid_mode=False, ranks_per_node=1
    )
    assert buffer.get_physical_domain_size() == (2, 1)
    assert buffer.get_logical_domain_size() == (1, 2)
    x, idx, w = batches(2, 0)[comm.rank()]
    recv, _, recv_w, handle, _ = buffer.dispatch(x, idx, w, num_experts=EXPERTS)
    given = {"topk_idx": idx, "num_experts": EXPERTS}
    for words, call in [
        ("send fewer", lambda: buffer.dispatch(x, **given, num_max_tokens_per_rank=len(x) - 1)),
        *(
            (
                r"give torch.int32 \[4\]",
                lambda stats=stats: buffer.dispatch(
                    x, **given, cumulative_local_expert_recv_stats=stats
                ),
            )
            for stats in (torch.zeros(4), torch.zeros(3).int(), torch.zeros(4, 1).int())
        ),
        ("or a handle", lambda: buffer.dispatch(x)),
        ("or a handle", lambda: buffer.dispatch(x, idx)),
        ("evenly", lambda: buffer.dispatch(x, idx, num_experts=7)),
        ("leave them out", lambda: buffer.dispatch(x, idx, handle=handle)),
        ("leave them out", lambda: buffer.dispatch(x, handle=handle, do_cpu_sync=True)),
        ("handle's is", lambda: buffer.dispatch(x, handle=handle, expert_alignment=3)),
        ("handle's is", lambda: buffer.dispatch(x, handle=handle, do_expand=True)),
        ("the handle is for", lambda: buffer.dispatch(x[:0], handle=handle)),
        ("are needed", lambda: buffer.combine(recv[:0], handle)),
        ("bias", lambda: buffer.combine(recv, handle, bias=recv[:0])),
        ("weights", lambda: buffer.combine(recv, handle, topk_weights=recv_w.double())),
    ]:
        with pytest.raises(errors.InvalidArgument, match=words):
            call()
    buffer.destroy()


@pytest.mark.parametrize("expand", [False, True])
@on_all_ranks(2)
def test_an_expert_that_a_token_names_twice_counts_twice(comm: ThreadComm, expand: bool) -> None:
    buffer = ElasticBuffer(comm=comm, num_max_tokens_per_rank=8, ranks_per_node=2)
    x, idx = torch.ones(4, 64, dtype=torch.bfloat16), torch.tensor([[7, 2, 7]]).repeat(4, 1)
    w = torch.tensor([[1.0, 2.0, 4.0]]).repeat(4, 1)
    y, _, weights, handle, _ = buffer.dispatch(x, idx, w, num_experts=8, do_expand=expand)
    assert isinstance(y, torch.Tensor)
    assert weights is not None
    by = weights if expand else weights.sum(1)
    sums, *_ = buffer.combine((y.float() * by[:, None]).to(y.dtype), handle)
    assert torch.equal(sums, 7 * x)
    buffer.destroy()
