"""DeepEP's normal calls as inference engines and trainers make them, against sums in one place."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fabric_ray import errors
from fabric_ray.moe import cast
from fabric_ray.moe.comm import GroupComm
from fabric_ray.moe.deepep import Buffer, Handle
from tests.examples import by_turns
from tests.host_kernels import Host, launching
from tests.moe_ranks import ThreadComm, batch, expert, on_all_ranks, on_ranks, unsharded
from tests.processes import Other

EXPERTS, TOPK = 12, 4


def dispatch(buffer: Buffer, x: Any, idx: torch.Tensor, w: torch.Tensor, **options: Any) -> Any:
    """The two calls, as vLLM and SGLang write them."""
    per_rank, per_rdma_rank, per_expert, in_rank, event = buffer.get_dispatch_layout(
        topk_idx=idx,
        num_experts=EXPERTS,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    )
    return buffer.dispatch(
        x=x,
        handle=None,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=idx,
        topk_weights=w,
        config=Buffer.get_dispatch_config(buffer.group_size),
        previous_event=event,
        async_finish=True,
        allocate_on_comm_stream=True,
        **options,
    )


def local(idx: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    each = EXPERTS // ranks
    return torch.where((idx >= 0) & (idx // each == rank), idx - rank * each, -1)


def summed(x: torch.Tensor, idx: torch.Tensor, w: torch.Tensor, ranks: int) -> torch.Tensor:
    """Sums of the ranks' sums, for each rank's are rounded on their way."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    for rank in range(ranks):
        mine = local(idx, rank, ranks)
        there = (mine >= 0).any(1)
        out[there] += unsharded(x, mine, w, first=rank * EXPERTS // ranks)[there].float()
    return out


def layer(buffer: Buffer, seed: int, tokens: int, **options: Any) -> None:
    """One forward pass, everything in it compared."""
    ranks = buffer.group_size
    batches = [batch(seed + r, tokens + r, EXPERTS, TOPK, 40) for r in range(ranks)]
    x, idx, w = batches[buffer.rank]
    recv, recv_idx, recv_w, counts, handle, event = dispatch(
        buffer, x, idx, w, expert_alignment=4, **options
    )
    event.current_stream_wait()
    wanted = []
    for x_s, idx_s, w_s in batches:
        mine = local(idx_s, buffer.rank, ranks)
        here = (mine >= 0).any(1)
        wanted.append((x_s[here], mine[here], torch.where(mine >= 0, w_s, 0.0)[here]))
    want_x, want_idx, want_w = (torch.cat(of) for of in zip(*wanted, strict=True))
    rows = len(want_x)
    assert torch.equal(recv[:rows], want_x)
    assert recv_idx.dtype == torch.int64
    assert torch.equal(recv_idx[:rows], want_idx)
    assert torch.equal(recv_w[:rows], want_w)
    if worst := options.get("num_worst_tokens"):
        assert len(recv) == len(recv_idx) == len(recv_w) == worst
        assert (recv_idx[rows:] == -1).all()
        assert counts == []
    else:
        assert len(recv) == rows
        per_expert = [int((want_idx == e).sum()) for e in range(EXPERTS // ranks)]
        assert counts == [-(-n // 4) * 4 for n in per_expert]
    y = unsharded(recv, recv_idx, recv_w, first=buffer.rank * EXPERTS // ranks)
    sums, none, event = buffer.combine(
        x=y,
        handle=handle,
        topk_weights=None,
        config=Buffer.get_combine_config(ranks),
        previous_event=Buffer.capture(),
        async_finish=False,
        allocate_on_comm_stream=False,
    )
    assert none is None
    assert torch.equal(sums, summed(x, idx, w, ranks).to(torch.bfloat16))


def buffer_of(host: Host, comm: ThreadComm, on_kernels: str, per_node: int | None = None) -> Buffer:
    """A buffer, which kernels serve on this rank if it is their turn."""
    options: dict[str, Any] = {}
    if on_kernels in ("all", f"{comm.rank() % 2}"):
        options = launching(host, comm.stack, None if per_node in (None, comm.size()) else 2)
    return Buffer(None, comm=comm, ranks_per_node=per_node, **options)


@pytest.mark.parametrize(("ranks", "on_kernels"), by_turns([1, 2, 4], ["no", "all", "1"]))
def test_a_layer_is_that_of_one_place_bit_by_bit(ranks: int, on_kernels: str, host: Host) -> None:
    def work(comm: ThreadComm) -> None:
        buffer = buffer_of(host, comm, on_kernels)
        # Buffers grow on the way.
        for turn, tokens in enumerate([3, 0, 200, 17]):
            layer(buffer, turn * 8, tokens)
        layer(buffer, 50, 5, num_worst_tokens=40)
        buffer.check()
        buffer.destroy()

    on_ranks(ranks, work)


@on_all_ranks(2)
def test_with_max_tokens_nothing_is_gathered_between_exchanges(comm: ThreadComm) -> None:
    buffer = Buffer(None, comm=comm, max_tokens=16)
    layer(buffer, 0, 9)
    gathered = list(comm._board.gathers)
    for turn in range(3):
        layer(buffer, turn, 9 + turn)
    assert comm._board.gathers[comm.rank()] == gathered[comm.rank()]
    x, idx, w = batch(0, 17, EXPERTS, TOPK, 40)
    with pytest.raises(errors.InvalidArgument, match="max_tokens is 16"):
        dispatch(buffer, x, idx, w)
    buffer.destroy()


@on_all_ranks(2)
def test_rs_1_over_several_nodes_calls_raise_once_a_rank_is_masked(comm: ThreadComm) -> None:
    buffer = Buffer(comm=comm, max_tokens=16, ranks_per_node=1)
    layer(buffer, 0, 8)
    comm.all_gather(b"")
    # Sums would lack its answers, and nothing here could say so.
    buffer.low_latency_update_mask_buffer(1 - comm.rank(), True)
    x, idx, w = batch(0, 8, EXPERTS, TOPK, 40)
    for _ in range(3):
        with pytest.raises(errors.PeerLost, match=f"rank {1 - comm.rank()} "):
            dispatch(buffer, x, idx, w)
    buffer.destroy()


@on_all_ranks(2)
def test_scales_go_with_their_tokens_and_biases_are_added_before_rounding(comm: ThreadComm) -> None:
    buffer = Buffer(None, comm=comm)
    x, idx, w = batch(buffer.rank, 11, EXPERTS, TOPK, 256)
    x8, scales = cast.to_fp8(x)
    (recv, recv_scales), recv_idx, recv_w, _, handle, _ = dispatch(
        buffer, (x8, scales.T.contiguous().T), idx, w
    )
    assert recv.dtype == torch.float8_e4m3fn
    there = cast.back(recv, recv_scales)
    y = unsharded(there, recv_idx, recv_w, first=buffer.rank * 6)
    bias = [batch(70 + i, 11, EXPERTS, TOPK, 256)[0] for i in range(2)]
    want = summed(cast.back(x8, scales), idx, w, 2)
    # One handle, any number of answers.
    for given, added in [
        (None, want),
        (bias[0], want + bias[0].float()),
        ((bias[0], bias[1]), want + bias[0].float() + bias[1].float()),
    ]:
        sums, _, _ = buffer.combine(y, handle, bias=given)
        assert torch.equal(sums, added.to(torch.bfloat16))
    buffer.destroy()


@pytest.mark.parametrize("on_kernels", ["no", "all"])
@pytest.mark.parametrize("per_node", [2, 1])
@on_all_ranks(2)
def test_trainers_go_back_the_way_they_came(
    comm: ThreadComm, per_node: int, on_kernels: str, host: Host
) -> None:
    """Layers forward, then backward: a combine's gradient is dispatched with the handle, a
    dispatch's is combined with it, its weights too."""
    buffer = buffer_of(host, comm, on_kernels, per_node)
    done: list[tuple[Handle, torch.Tensor, torch.Tensor, int]] = []
    for number in range(3):
        x, idx, w = batch(number * 5 + buffer.rank, 10 - buffer.rank, EXPERTS, TOPK, 24)
        recv, _, _, _, handle, _ = dispatch(buffer, x, idx, w)
        buffer.combine(recv, handle)
        done.append((handle, idx, w, number))
    for handle, idx, w, number in reversed(done):
        grads = [batch(90 + number * 5 + r, 10 - r, EXPERTS, TOPK, 24)[0].float() for r in range(2)]
        recv, *none, _ = buffer.dispatch(grads[buffer.rank], handle=handle)
        assert none == [None] * 4
        came, here_w = [], []
        for r, grad in enumerate(grads):
            _, idx_s, w_s = batch(number * 5 + r, 10 - r, EXPERTS, TOPK, 24)
            mine = local(idx_s, buffer.rank, 2)
            here = (mine >= 0).any(1)
            came.append(grad[here])
            here_w.append(torch.where(mine >= 0, w_s, 0.0)[here])
        assert torch.equal(recv, torch.cat(came))
        weights = torch.cat(here_w)
        sums, back, _ = buffer.combine(recv, handle, topk_weights=weights)
        ranks = (torch.stack([local(idx, r, 2) >= 0 for r in range(2)])).any(2).sum(0)
        assert torch.equal(sums, grads[buffer.rank] * ranks[:, None])
        assert torch.equal(back, torch.where(idx >= 0, w, 0.0))
    buffer.destroy()


@on_all_ranks(2)
def test_rs_1_what_a_device_took_by_a_handle_is_checked_for_losses_once(
    comm: ThreadComm, host: Host
) -> None:
    buffer = buffer_of(host, comm, "all")
    x, idx, w = batch(buffer.rank, 8, EXPERTS, TOPK, 24)
    *_, handle, _ = dispatch(buffer, x, idx, w)
    buffer.dispatch(x, handle=handle)
    buffer.check()
    buffer.dispatch(x, handle=handle)
    comm.all_gather(b"")
    # The device was not waited for: it may have been lost before its rows arrived.
    buffer.low_latency_update_mask_buffer(1 - buffer.rank, True)
    with pytest.raises(errors.PeerLost, match="was here when the handle was made"):
        buffer.check()
    buffer.check()
    comm.all_gather(b"")
    buffer.destroy()


@on_all_ranks(2)
def test_two_batches_may_be_under_way(comm: ThreadComm) -> None:
    buffer = Buffer(None, comm=comm)
    for turn in range(2):
        held = []
        # One more than there are exchanges: the first one's routes are made anew.
        for i in range(3):
            x, idx, w = batch(turn * 9 + i * 2 + buffer.rank, 7 + i, EXPERTS, TOPK, 24)
            recv, recv_idx, recv_w, _, handle, _ = dispatch(buffer, x, idx, w)
            y = unsharded(recv, recv_idx, recv_w, first=buffer.rank * 6)
            held.append((y, handle, summed(x, idx, w, 2).to(torch.bfloat16)))
        for y, handle, want in held:
            assert torch.equal(buffer.combine(y, handle)[0], want)
    buffer.destroy()


@on_all_ranks(2)
def test_what_is_wrong_is_named_and_others_are_told(comm: ThreadComm) -> None:
    buffer = Buffer(None, comm=comm)
    x, idx, w = batch(0, 6, EXPERTS, TOPK, 40)
    invalid = errors.InvalidArgument
    with pytest.raises(invalid, match="evenly"):
        buffer.get_dispatch_layout(idx, 13)
    with pytest.raises(invalid, match="are named"):
        buffer.get_dispatch_layout(idx + 12, EXPERTS)
    layout = buffer.get_dispatch_layout(idx, EXPERTS)
    per_rank, _, per_expert, in_rank, _ = layout
    with pytest.raises(invalid, match="differ"):
        buffer.dispatch(x, None, per_rank, None, ~in_rank, per_expert)
    with pytest.raises(invalid, match="get_dispatch_layout"):
        buffer.dispatch(x, topk_idx=idx)
    with pytest.raises(invalid, match="isn't that"):
        buffer.dispatch(x, None, per_rank, None, ~in_rank, per_expert, idx, w)
    with pytest.raises(invalid, match="num_worst_tokens"):
        dispatch(buffer, x, idx, w, num_worst_tokens=5)
    # One rank's mistake is that rank's error, and the others are told.
    if buffer.rank == 0:
        with pytest.raises(invalid, match="weights are"):
            dispatch(buffer, x, idx, w[:2])
    else:
        with pytest.raises(errors.HandshakeError, match="rank 0 could not take part: weights"):
            dispatch(buffer, x, idx, w)
    with pytest.raises(errors.HandshakeError, match="different tokens"):
        dispatch(buffer, x[:, : 8 + 8 * buffer.rank], idx, w)
    recv, recv_idx, recv_w, _, handle, _ = dispatch(buffer, x, idx, w)
    with pytest.raises(invalid, match="are needed"):
        buffer.combine(recv[:1], handle)
    with pytest.raises(invalid, match="bias"):
        buffer.combine(recv, handle, bias=recv)
    with pytest.raises(invalid, match="weights"):
        buffer.combine(recv, handle, topk_weights=recv_w.double())
    with pytest.raises(invalid, match="leave them out"):
        buffer.dispatch(x, handle, topk_idx=idx)
    with pytest.raises(invalid, match="is for 6"):
        buffer.dispatch(x[:2], handle)
    y = unsharded(recv, recv_idx, recv_w, first=buffer.rank * 6)
    assert torch.equal(buffer.combine(y, handle)[0], summed(x, idx, w, 2).to(torch.bfloat16))
    # Another exchange would take the others' part.
    with pytest.raises(invalid, match="lie on meta, and those of earlier calls on"):
        buffer._normal.receive(handle, y.float().to("meta"))
    buffer.destroy()


@on_all_ranks(2)
def test_answers_that_are_refused_leave_their_ways_where_they_were(comm: ThreadComm) -> None:
    buffer = Buffer(None, comm=comm)
    x, idx, w = batch(buffer.rank, 6, EXPERTS, TOPK, 40)
    recv, recv_idx, recv_w, _, handle, _ = dispatch(buffer, x, idx, w)
    y = unsharded(recv, recv_idx, recv_w, first=buffer.rank * 6)
    with pytest.raises(errors.InvalidArgument, match="are needed"):
        buffer._normal.receive(handle, y[:1])
    # To make them again would take the others' part.
    assert [lane.handle for lane in buffer._normal._lanes.popitem()[1]] == [handle]
    comm.all_gather(b"")


def process(connection: Connection, rank: int, ranks: int, store: str) -> None:
    """A rank as a process with a gloo group."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    buffer = Buffer(dist.group.WORLD, 1 << 20, 0, low_latency_mode=True)
    for turn, tokens in enumerate([5, 0, 30]):
        layer(buffer, turn * 8, tokens)
    x, idx, w = batch(rank, 6, EXPERTS, TOPK, 128)
    recv, counts, handle, _, hook = buffer.low_latency_dispatch(
        x, idx, 8, EXPERTS, use_fp8=False, return_recv_hook=True
    )
    assert hook is not None
    assert isinstance(recv, torch.Tensor)
    hook()
    each = EXPERTS // ranks
    for number, count in enumerate(counts.tolist()):
        recv[number, :count] = expert(rank * each + number, recv[number, :count])
    sums, _, _ = buffer.low_latency_combine(recv, idx, w, handle)
    assert torch.equal(sums, unsharded(x, idx, w))
    buffer.destroy()
    dist.destroy_process_group()
    connection.send("the sums agree")


@pytest.mark.parametrize(
    ("backend", "device"), [("gloo", "cpu"), ("cpu:gloo,cuda:gloo", "cpu"), ("cuda:gloo", "cuda")]
)
def test_ranks_gather_where_the_group_can(backend: str, device: str, tmp_path: Any) -> None:
    """A backend for GPUs alone takes nothing from the host; it is asked for nothing there."""
    store = tmp_path / "store"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    try:
        comm = GroupComm(dist.group.WORLD)
        assert comm.device.type == device
        if device == "cpu":
            assert comm.all_gather(b"here") == [b"here"]
            assert comm.all_gather(b"") == [b""]
    finally:
        dist.destroy_process_group()


def test_ranks_may_be_processes_of_a_gloo_group(tmp_path: Any) -> None:
    store = str(tmp_path / "store")
    with Other(process, 0, 2, store) as a, Other(process, 1, 2, store) as b:
        assert [one.hear(120) for one in (a, b)] == ["the sums agree"] * 2


IDLE = [(0, 0), (0, 5), (5, 0), (0, 0)]
"""Tokens of two ranks in four layers."""


@pytest.mark.parametrize("per_node", [1, 2])
@pytest.mark.parametrize("options", [{}, {"max_tokens": 8}], ids=str)
@on_all_ranks(2)
def test_ranks_without_tokens_take_part(
    comm: ThreadComm, per_node: int, options: dict[str, Any]
) -> None:
    buffer = Buffer(None, comm=comm, ranks_per_node=per_node, **options)
    for seed, tokens in enumerate(IDLE):
        x, idx, w = batch(seed, tokens[comm.rank()], EXPERTS, TOPK, 40)
        recv, _, recv_w, _, handle, _ = dispatch(buffer, x, idx, w)
        sums, weights, _ = buffer.combine(recv, handle, recv_w)
        of = torch.stack([(local(idx, r, 2) >= 0).any(1) for r in range(2)]).sum(0)
        assert torch.equal(sums, x * of[:, None])
        assert weights.shape == w.shape
        again, *_ = buffer.dispatch(x, handle=handle)
        assert torch.equal(again, recv)
        assert torch.equal(buffer.combine(again, handle)[0], sums)
    buffer.destroy()


@pytest.mark.parametrize("per_node", [1, 2])
@on_all_ranks(2)
def test_an_expert_that_a_token_names_twice_counts_twice(comm: ThreadComm, per_node: int) -> None:
    buffer = Buffer(None, comm=comm, ranks_per_node=per_node)
    x, _, w = batch(comm.rank(), 5, EXPERTS, TOPK, 40)
    idx = torch.full((5, TOPK), 3)
    idx[:, 0] = EXPERTS - 1
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
    assert per_expert[3] == 5 * (TOPK - 1)
    assert per_rank.tolist() == [5, 5]
    recv, _, weights, counts, handle, _ = buffer.dispatch(
        x, None, per_rank, None, in_rank, per_expert, idx, w
    )
    assert handle is not None
    assert counts is not None
    assert sum(counts) == 10 * (1 if comm.rank() else TOPK - 1)
    y = (recv.float() * weights.sum(1, keepdim=True)).to(x.dtype)
    sums, *_ = buffer.combine(y, handle)
    first = (x.float() * w[:, :1]).to(x.dtype).float()
    others = (x.float() * w[:, 1:].sum(1, keepdim=True)).to(x.dtype).float()
    assert torch.equal(sums, (first + others).to(x.dtype))
    buffer.destroy()
