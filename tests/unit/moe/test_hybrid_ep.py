"""DeepEP's ``HybridEPBuffer`` as Megatron-Core calls it, against tokens sorted in one place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fabric_ray import errors
from fabric_ray.moe.deepep import HybridEPBuffer
from fabric_ray.moe.deepep.hybrid import indices_to_map
from tests.moe_ranks import ThreadComm, batch, on_all_ranks, on_ranks

EXPERTS, HIDDEN, PAD = 8, 256, 4


def routed(rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, a map with another number of experts for each token, none among them, and probs."""
    x, idx, w = batch(31 * ranks + rank, 7 - rank % 3, EXPERTS, 3, HIDDEN)
    routes, probs = indices_to_map(idx, w, len(x), EXPERTS)
    assert probs is not None
    return x, routes, probs


def permuted(ranks: int, me: int, pad: int, values: list[torch.Tensor]) -> tuple[Any, list[int]]:
    """The values of tokens, by experts of this rank, filled up with zeros."""
    local, parts, counts = EXPERTS // ranks, [], []
    for expert in range(me * local, (me + 1) * local):
        came = torch.cat([value[routed(r, ranks)[1][:, expert]] for r, value in enumerate(values)])
        counts.append(-(-len(came) // pad) * pad)
        parts += [came, came.new_zeros((counts[-1] - len(came), *came.shape[1:]))]
    return torch.cat(parts), counts


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("pad", [None, PAD])
def test_permuted_rows_are_those_of_one_place(ranks: int, pad: int | None) -> None:
    def work(comm: ThreadComm) -> None:
        me = comm.rank()
        buffer = HybridEPBuffer(comm, HIDDEN, 2, EXPERTS // ranks)  # grows
        batches = [routed(r, ranks) for r in range(ranks)]
        x, routes, probs = batches[me]
        for given in (probs, None):
            rows, weights, scales, counts, handle = buffer.dispatch_with_permute(
                hidden=x, routing_map=routes, probs=given, scaling_factor=None, pad_multiple=pad,
                num_of_experts_per_rank=EXPERTS // ranks, num_permuted_tokens=None,
                non_blocking=False,
            )  # fmt: skip
            wanted, each = permuted(ranks, me, pad or 1, [b[0] for b in batches])
            assert torch.equal(rows, wanted)
            assert counts.dtype == torch.int64
            assert counts.tolist() == each
            assert scales is None
            if given is None:
                assert weights is None
            else:
                assert weights is not None
                of_experts = [b[2] for b in batches]
                start = 0
                for local, count in enumerate(each):
                    expert = me * EXPERTS // ranks + local
                    mine = torch.cat(
                        [p[b[1][:, expert], expert]
                         for p, b in zip(of_experts, batches, strict=True)]
                    )  # fmt: skip
                    assert torch.equal(weights[start : start + len(mine)], mine)
                    assert not weights[start + len(mine) : start + count].any()
                    start += count
            sums, back = buffer.combine_with_unpermute(
                hidden=rows, probs=weights, handle=handle, pad_multiple=pad
            )
            times = routes.sum(1, keepdim=True)
            torch.testing.assert_close(sums, (x * times).to(x.dtype), rtol=1e-2, atol=1e-2)
            assert (back is None) == (given is None)
            if back is not None:
                assert torch.equal(back, probs)
            # A backward pass: other values the same ways, with room for as many rows.
            grads, _, _, again, same = buffer.dispatch_with_permute(
                hidden=-x, handle=handle, pad_multiple=pad, num_permuted_tokens=counts.sum(),
            )  # fmt: skip
            assert torch.equal(grads, -rows)
            assert same is handle
            assert torch.equal(again, counts)
        more = int(counts.sum()) + PAD
        rows, _, _, counts, handle = buffer.dispatch_with_permute(
            hidden=x, routing_map=routes, probs=probs, pad_multiple=pad, num_permuted_tokens=more,
            non_blocking=True,
        )  # fmt: skip
        assert len(rows) == more
        assert not rows[-PAD:].any()
        sums, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle, pad_multiple=pad)
        torch.testing.assert_close(sums, (x * times).to(x.dtype), rtol=1e-2, atol=1e-2)
        buffer.destroy()

    on_ranks(ranks, work)


@pytest.mark.parametrize("room", [0, PAD, 3 * PAD, 64])
@on_all_ranks(2)
def test_rows_beyond_a_budget_are_dropped_where_that_is_asked_for(
    comm: ThreadComm, room: int
) -> None:
    """As Megatron-Core with a capacity factor of a rank: it reads the flag, and repeats the step
    without one."""
    me, local = comm.rank(), EXPERTS // 2
    buffer = HybridEPBuffer(comm, HIDDEN, 16, local)
    x, routes, probs = routed(me, 2)
    fused = {"pad_multiple": PAD, "fuse_permute_dispatch": True}
    whole, all_weights, _, all_counts, _ = buffer.dispatch_with_permute(
        hidden=x, routing_map=routes, probs=probs, **fused
    )
    rows, weights, _, counts, handle = buffer.dispatch_with_permute(
        hidden=x, routing_map=routes, probs=probs, num_permuted_tokens=room, non_blocking=True,
        **fused,
    )  # fmt: skip
    fits = min(room, len(whole))
    assert len(rows) == room
    assert torch.equal(rows[:fits], whole[:fits])
    assert weights is not None
    assert all_weights is not None
    assert torch.equal(weights[:fits], all_weights[:fits])
    assert handle[-1].tolist() == [int(room < len(whole))]
    ends = all_counts.cumsum(0).clamp(max=room)
    assert torch.equal(counts, ends.diff(prepend=ends.new_zeros(1)))
    # Rows that were dropped are no part of the sums, here and in the backward pass.
    sums, back = buffer.combine_with_unpermute(
        hidden=rows, probs=weights, handle=handle, pad_multiple=PAD, fuse_unpermute_combine=True
    )
    grads, *_ = buffer.dispatch_with_permute(
        hidden=-x, handle=handle, num_permuted_tokens=room, **fused
    )
    assert torch.equal(grads, -rows)
    # A handle keeps as many rows with any budget.
    for again in (None, len(whole) + 1):
        grads, _, _, same, _ = buffer.dispatch_with_permute(
            hidden=-x, handle=handle, num_permuted_tokens=again, **fused
        )
        assert torch.equal(grads[:fits], -rows[:fits])
        assert not grads[fits:].any()
        assert torch.equal(same, counts)
    more = torch.cat([rows, torch.ones_like(whole)])
    longer, _ = buffer.combine_with_unpermute(hidden=more, handle=handle)
    assert torch.equal(longer, sums)
    said = comm.all_gather(counts.numpy().tobytes())
    kept = torch.frombuffer(bytearray(b"".join(said)), dtype=torch.int64)
    mine = torch.zeros_like(routes)
    for expert in range(EXPERTS):
        before = sum(int(routed(r, 2)[1][:, expert].sum()) for r in range(me))
        tokens = routes[:, expert].nonzero()[:, 0]
        mine[tokens[: max(int(kept[expert]) - before, 0)], expert] = True
    assert back is not None
    assert torch.equal(back, torch.where(mine, probs, 0.0))
    times = mine.sum(1, keepdim=True)
    torch.testing.assert_close(sums, (x * times).to(x.dtype), rtol=1e-2, atol=1e-2)
    with pytest.raises(errors.InvalidArgument, match="num_permuted_tokens is -1"):
        buffer.dispatch_with_permute(hidden=x, handle=handle, num_permuted_tokens=-1)
    if fits:
        with pytest.raises(errors.InvalidArgument, match=f"give the dispatch's {fits}"):
            buffer.combine_with_unpermute(hidden=rows[: fits - 1], handle=handle)
    buffer.destroy()


@pytest.mark.parametrize("per_node", [1, 2])
@on_all_ranks(4)
def test_rows_of_tokens_and_weights_of_a_node(comm: ThreadComm, per_node: int) -> None:
    me, local = comm.rank(), EXPERTS // 4
    buffer = HybridEPBuffer(comm, HIDDEN, 16, local, ranks_per_node=per_node)
    assert (buffer.local_rank, buffer.node_rank) == (me % per_node, me // per_node)
    x, idx, w = batch(me, 6, EXPERTS, 3, HIDDEN)
    bits = x.view(torch.uint8)[:, :HIDDEN].contiguous()
    scales = torch.rand(6, 2)
    routes, probs = indices_to_map(idx, w, 6, EXPERTS)
    assert probs is not None
    rows, weights, came_scales, handle = buffer.dispatch(
        hidden=bits, scaling_factor=scales, topk_idx=idx, topk_weights=w, num_of_experts=EXPERTS
    )
    assert rows.dtype == torch.uint8
    assert came_scales is not None
    assert weights is not None
    assert weights.shape == (len(rows), local * per_node)
    _, _, _, number, here, _, _ = handle
    assert number.tolist() == [len(rows)]
    assert here.shape == (len(rows), local)
    first = me % per_node * local
    assert not weights[:, :first].any()
    assert not weights[:, first + local :].any()
    y = rows.to(torch.bfloat16) * here.sum(1, keepdim=True)
    sums, back = buffer.combine(y, weights, handle)
    times = routes.sum(1, keepdim=True)
    torch.testing.assert_close(sums.float(), (bits * times).float(), rtol=2e-2, atol=1)
    assert back is not None
    assert torch.equal(back, probs)
    again, _, same_scales, _ = buffer.dispatch(
        hidden=bits, scaling_factor=scales, topk_idx=idx, topk_weights=w,
        num_of_experts=EXPERTS, handle=handle,
    )  # fmt: skip
    assert torch.equal(again, rows)
    assert torch.equal(same_scales, came_scales)
    buffer.destroy()


@on_all_ranks(2)
def test_what_is_wrong_is_named(comm: ThreadComm) -> None:
    buffer = HybridEPBuffer(comm, HIDDEN, 8, EXPERTS // 2)
    sizes = (buffer.config.hidden_dim, buffer.config.max_num_of_tokens_per_rank)
    assert sizes == (HIDDEN, 8)
    assert buffer.runtime is not None
    x, routes, probs = routed(comm.rank(), 2)
    call, invalid = buffer.dispatch_with_permute, errors.InvalidArgument
    for words, options in [
        ("num_permuted_tokens", {"routing_map": routes, "non_blocking": True}),
        ("num_of_experts", {"topk_idx": probs.long()}),
        ("give bool", {"routing_map": routes.int()}),
        ("give bool", {"routing_map": routes[:, :4]}),
        ("or a handle", {}),
        ("11 values", {"handle": (1, 2)}),
        ("not of this buffer", {"handle": (None,) * 11}),
    ]:
        with pytest.raises(invalid, match=words):
            call(hidden=x, **options)
    # Rows that no room was asked for are no reason to drop tokens.
    with pytest.raises(invalid, match="num_permuted_tokens is 1; raise it"):
        call(hidden=x, routing_map=routes, num_permuted_tokens=1, non_blocking=True)
    rows, _, _, _, handle = call(hidden=x, routing_map=routes, probs=probs)
    with pytest.raises(invalid, match="rows of answers"):
        buffer.combine_with_unpermute(hidden=rows[1:], handle=handle)
    with pytest.raises(invalid, match="7 values"):
        buffer.combine(rows, handle=handle)
    buffer.destroy()
