"""pplx-kernels' calls, against sums made in one place."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fabric_ray import errors
from fabric_ray.moe import cast
from fabric_ray.moe.pplx import AllToAll
from tests.host_kernels import Host
from tests.moe_ranks import ThreadComm, batch, expert, on_all_ranks, on_ranks, unsharded
from tests.processes import Other

EXPERTS, TOPK, M, HIDDEN = 8, 3, 9, 64


def made(rank: int, ranks: int, *, fp8: bool = False, dp: int = 1, **options: Any) -> AllToAll:
    return AllToAll.internode(
        max_num_tokens=M,
        num_experts=EXPERTS,
        experts_per_token=TOPK,
        rank=rank,
        world_size=ranks,
        dp_size=dp,
        hidden_dim=HIDDEN,
        hidden_dim_bytes=HIDDEN * (1 if fp8 else 2),
        hidden_dim_scale_bytes=HIDDEN // 16 * 4 if fp8 else 0,
        **options,
    )


def layer(
    a: AllToAll,
    rank: int,
    ranks: int,
    tokens: int,
    *,
    fp8: bool,
    split: bool,
    dp: int = 1,
    beyond: float = 7.0,
) -> None:
    seed = rank // dp + tokens
    x, _, w = batch(seed, M, EXPERTS, TOPK, HIDDEN)
    g = torch.Generator().manual_seed(seed)
    idx = torch.rand(M, EXPERTS, generator=g).argsort(1)[:, :TOPK].to(torch.uint32)
    local, rows = EXPERTS // ranks, M * ranks // dp
    counts = torch.empty(local, dtype=torch.int32)
    dp_x, dp_scale, out_scale = x, None, None
    if fp8:
        dp_x, dp_scale = cast.to_fp8(x, block=16)
        out_scale = torch.full((local, rows, HIDDEN // 16), 7.0)
        x = cast.back(dp_x, dp_scale)
    out_x = torch.empty(local, rows, HIDDEN, dtype=dp_x.dtype)
    out = torch.full((M, HIDDEN), 7.0, dtype=torch.bfloat16)
    bound = torch.tensor([tokens], dtype=torch.uint32)
    halves = [(True, False), (False, True)] if split else [(True, True)]
    for send, receive in halves:
        a.dispatch(counts, out_x, out_scale, dp_x, dp_scale, idx, bound, send, receive)
    if out_scale is not None:
        # Callers clear what fills up, for experts to read.
        assert all((out_scale[i, n:] == 7).all() for i, n in enumerate(counts.tolist()))
    there = out_x if out_scale is None else cast.back(out_x, out_scale)
    y = torch.full(there.shape, float("nan"), dtype=torch.bfloat16)
    for number, count in enumerate(counts.tolist()):
        y[number, :count] = expert(rank * local + number, there[number, :count])
    for send, receive in halves:
        a.combine(out, idx, w, y, bound, do_send=send, do_recv=receive)
    want = unsharded(x[:tokens], idx[:tokens].to(torch.int64), w)
    assert torch.equal(out[:tokens], want)
    assert (out[tokens:] == beyond).all()


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_layer_is_that_of_one_place_bit_by_bit(ranks: int, fp8: bool) -> None:
    def work(comm: ThreadComm) -> None:
        a = made(comm.rank(), ranks, fp8=fp8, comm=comm)
        for tokens, split in [(M, False), (0, True), (1, False), (5, True)]:
            layer(a, comm.rank(), ranks, tokens, fp8=fp8, split=split)
        a.destroy()
        a.destroy()

    on_ranks(ranks, work)


@pytest.mark.parametrize(("ranks", "dp"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_kernels_make_the_same_layer(ranks: int, dp: int, host: Host) -> None:
    def work(comm: ThreadComm) -> None:
        a = made(comm.rank(), ranks, fp8=True, dp=dp, comm=comm, launcher=host.another())
        for tokens, split in [(M, False), (5, True)]:
            layer(a, comm.rank(), ranks, tokens, fp8=True, split=split, dp=dp, beyond=0.0)
        a.check()
        a.destroy()

    on_ranks(ranks, work)


@pytest.mark.parametrize(("ranks", "dp"), [(2, 2), (4, 2), (8, 4)])
def test_ranks_that_share_tokens_all_get_the_sums(ranks: int, dp: int) -> None:
    def work(comm: ThreadComm) -> None:
        a = made(comm.rank(), ranks, fp8=True, dp=dp, comm=comm)
        for tokens, split in [(M, False), (0, True), (1, False), (5, True)]:
            layer(a, comm.rank(), ranks, tokens, fp8=True, split=split, dp=dp)
        a.destroy()

    on_ranks(ranks, work)


@on_all_ranks(2)
def test_ranks_that_share_tokens_have_no_more_than_there_is_room_for(comm: ThreadComm) -> None:
    a = made(comm.rank(), 2, dp=2, comm=comm)
    x, idx, _ = batch(0, M + 1, EXPERTS, TOPK, HIDDEN)
    counts = torch.empty(4, dtype=torch.int32)
    room = torch.empty(4, M, HIDDEN, dtype=torch.bfloat16)
    with pytest.raises(errors.InvalidArgument, match="10 tokens, and max_num_tokens is 9"):
        a.dispatch(counts, room, None, x, None, idx)
    a.dispatch(counts, room, None, x[:M], None, idx[:M])
    a.destroy()


@on_all_ranks(2)
def test_sums_may_be_wider_than_answers(comm: ThreadComm) -> None:
    a = made(comm.rank(), 2, comm=comm, out_dtype=torch.float32)
    x, _, w = batch(comm.rank(), 4, EXPERTS, TOPK, HIDDEN)
    idx = torch.arange(12, dtype=torch.int32).view(4, 3) % EXPERTS
    counts = torch.empty(4, dtype=torch.int32)
    out_x = torch.empty(4, M * 2, HIDDEN, dtype=torch.bfloat16)
    a.dispatch(counts, out_x, None, x, None, idx)
    out = torch.empty(4, HIDDEN)
    a.combine(out, idx, w, out_x.float())
    want = torch.zeros(4, HIDDEN)
    for k in range(TOPK):
        want += w[:, k : k + 1] * x.float()
    assert torch.equal(out, want)
    a.destroy()


@on_all_ranks(1)
def test_what_is_wrong_or_not_here_is_named_before_anything_is_sent(comm: ThreadComm) -> None:
    with pytest.raises(errors.InvalidArgument, match="dp_size is 2, and there are 1 ranks"):
        AllToAll.intranode(M, EXPERTS, TOPK, 0, 1, 2, HIDDEN, 2 * HIDDEN, 0, comm=comm)
    with pytest.raises(errors.InvalidArgument, match="bytes for 64 elements"):
        AllToAll.intranode(M, EXPERTS, TOPK, 0, 1, 1, HIDDEN, 100, 0, comm=comm)
    with pytest.raises(errors.InvalidArgument, match="rank 1 of 2"):
        AllToAll.intranode(M, EXPERTS, TOPK, 1, 2, 1, HIDDEN, 2 * HIDDEN, 0, comm=comm)
    with pytest.raises(errors.InvalidArgument, match="no torch"):
        made(0, 1)
    a = made(0, 1, comm=comm)
    x, _, w = batch(0, M, EXPERTS, TOPK, HIDDEN)
    idx = torch.arange(M * TOPK).view(M, TOPK) % EXPERTS
    counts = torch.empty(EXPERTS, dtype=torch.int32)
    room = torch.empty(EXPERTS, M, HIDDEN, dtype=torch.bfloat16)
    out = torch.empty(M, HIDDEN, dtype=torch.bfloat16)
    invalid = errors.InvalidArgument
    with pytest.raises(invalid, match="nothing was dispatched"):
        a.combine(out, idx, w, room)
    scale = torch.ones(M, 4)
    bound = torch.tensor([M + 1])
    for words, args in [
        ("out_expert_num_tokens", (counts.long(), room, None, x, None, idx)),
        ("out_expert_x is", (counts, room[:, :, :3], None, x, None, idx)),
        ("out_expert_x is", (counts, room.float(), None, x, None, idx)),
        ("out_expert_x_scale", (counts, room, torch.ones(8, M, 4), x, None, idx)),
        ("scales have 16 bytes", (counts, room, None, x, scale, idx)),
        ("have 2 bytes", (counts, room.float(), None, x.float(), None, idx)),
        ("bound_m is 10", (counts, room, None, x, None, idx, bound)),
        ("one row for each", (counts, room, None, x, None, idx[:2])),
    ]:
        with pytest.raises(invalid, match=words):
            a.dispatch(*args)
    a.dispatch(counts, room, None, x, None, idx)
    for words, args in [
        ("aren't those", (out, idx + 1, w, room)),
        ("answers are", (out, idx, w, room[:, :2])),
        ("answers are", (out, idx, w, room.float())),
        ("out_tokens", (out[:2], idx, w, room)),
        ("out_tokens", (out.double(), idx, w, room)),
        ("weights", (out, idx, w.double(), room)),
    ]:
        with pytest.raises(invalid, match=words):
            a.combine(*args)
    a.combine(out, idx, w, room)
    a.destroy()


def process(connection: Connection, rank: int, ranks: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    a = made(rank, ranks)
    layer(a, rank, ranks, 5, fp8=False, split=True)
    a.destroy()
    with pytest.raises(errors.InvalidArgument, match="group_name: got 'nosuch', expected"):
        made(rank, ranks, group_name="nosuch")
    by_name = made(rank, ranks, fp8=True, group_name=dist.group.WORLD.group_name)
    layer(by_name, rank, ranks, 6, fp8=True, split=False)
    by_name.destroy()
    dist.destroy_process_group()
    connection.send("the sums agree")


def test_ranks_may_be_processes_of_a_gloo_group(tmp_path: Any) -> None:
    store = str(tmp_path / "store")
    with Other(process, 0, 2, store) as a, Other(process, 1, 2, store) as b:
        assert [one.hear(120) for one in (a, b)] == ["the sums agree"] * 2
