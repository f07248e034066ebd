"""Gradients through exchanges, against those of the unsharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_ray import errors
from fabric_ray.moe import ThroughputAllToAll
from fabric_ray.moe.autograd import Differentiable, combine, dispatch
from tests.examples import examples
from tests.moe_ranks import ThreadComm, batch, on_all_ranks, on_ranks, rank_of

HIDDEN = 12


def exchange(comm: ThreadComm, **options: Any) -> Differentiable:
    made: Differentiable = rank_of(Differentiable, comm, hidden=HIDDEN, max_tokens=16, **options)
    return made


def parameters(experts: int, layers: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    g = torch.Generator().manual_seed(99)
    return (torch.randn(layers, experts, HIDDEN, HIDDEN, generator=g) / HIDDEN**0.5).to(dtype)


def expert(matrix: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ matrix)


def unsharded(
    x: torch.Tensor, idx: torch.Tensor, w: torch.Tensor, matrices: torch.Tensor
) -> torch.Tensor:
    """All experts for all tokens; those that aren't a token's have no weight."""
    for matrix in matrices:
        each = torch.stack([expert(m, x) for m in matrix], 1)
        chosen = torch.nn.functional.one_hot(idx + 1, len(matrix) + 1)[:, :, 1:].to(w.dtype)
        x = x + torch.einsum("tk,tke,teh->th", w, chosen, each)
    return x


def sharded(
    a: Differentiable,
    x: torch.Tensor,
    idx: torch.Tensor,
    w: torch.Tensor,
    matrices: torch.Tensor,
    multiple: int,
) -> torch.Tensor:
    """Layers through one exchange; ``matrices`` are this rank's."""
    by_nodes = isinstance(a.tokens, ThroughputAllToAll)
    for number, matrix in enumerate(matrices):
        # Weights may be given to either call where answers come back one by one.
        early = by_nodes or number % 2 == 1
        got = dispatch(a, x, idx, weights=w if early else None, multiple=multiple)
        y = [expert(m, part) for m, part in zip(matrix, _split(got), strict=True)]
        x = x + combine(a, torch.cat(y), None if early else w)
    return x


def _split(got: Any) -> list[torch.Tensor]:
    """Each expert's rows, those that fill up included."""
    ends = [*got.starts.tolist()[1:], len(got.x)]
    return [got.x[b:e] for b, e in zip(got.starts.tolist(), ends, strict=True)]


def close(got: torch.Tensor | None, want: torch.Tensor | None) -> None:
    assert got is not None
    assert want is not None
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


PLACES = [(1, None), (2, None), (3, None), (1, 1), (2, 1), (2, 2), (3, 1), (4, 2)]
"""Ranks, and how many of them are a node in the high-throughput mode."""


@pytest.mark.long
@settings(max_examples=examples(32), deadline=None)
@given(
    place=st.sampled_from(PLACES),
    rings=st.sampled_from([(1, 2, 1), (4, 2, 2), (3, 3, 3)]),
    local=st.integers(1, 3),
    topk=st.integers(1, 3),
    layers=st.integers(1, 3),
    multiple=st.sampled_from([1, 4]),
    seed=st.integers(0, 1000),
    counts=st.lists(st.integers(0, 16), min_size=4, max_size=4),
    kind=st.sampled_from(["some", "hot", "none"]),
)
def test_gradients_are_those_of_the_unsharded_model(
    place: tuple[int, int | None],
    rings: tuple[int, int, int],
    local: int,
    topk: int,
    layers: int,
    multiple: int,
    seed: int,
    counts: list[int],
    kind: str,
) -> None:
    ranks, per_node = place
    options = {"ranks_per_node": per_node}
    options |= dict(zip(("chunk", "ring_chunks", "channels"), rings, strict=True))
    experts = ranks * local
    topk = min(topk, experts)
    whole = parameters(experts, layers).requires_grad_()
    inputs = [
        batch(seed * 7 + r, counts[r], experts, topk, HIDDEN, torch.float32) for r in range(4)
    ]
    for _, idx, _ in inputs:
        if kind != "some":
            idx[:] = -1
        if kind == "hot":
            idx[:, -1] = 0
    outside = [
        batch(seed + r, counts[r], experts, topk, HIDDEN, torch.float32)[0] for r in range(4)
    ]
    wanted = []
    for (x, idx, w), g in zip(inputs[:ranks], outside, strict=False):
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        out = unsharded(x, idx, w, whole)
        out.backward(g)
        wanted.append((out.detach(), x.grad, w.grad))

    def work(comm: ThreadComm) -> None:
        a = exchange(comm, experts=experts, topk=topk, dtype=torch.float32, **options)
        of = slice(comm.rank() * local, (comm.rank() + 1) * local)
        mine = whole.detach()[:, of].clone().requires_grad_()
        x, idx, w = inputs[comm.rank()]
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        out = sharded(a, x, idx, w, mine, multiple)
        want_out, want_x, want_w = wanted[comm.rank()]
        close(out, want_out)
        # Twice over one graph: routes are gone over as often as needed.
        for _ in range(2):
            x.grad = w.grad = mine.grad = None
            out.backward(outside[comm.rank()], retain_graph=True)
            close(x.grad, want_x)
            close(w.grad, want_w)
            assert whole.grad is not None
            close(mine.grad, whole.grad[:, of])

    on_ranks(ranks, work)


@pytest.mark.parametrize("per_node", [None, 1, 2])
@on_all_ranks(2)
def test_gradients_of_rows_find_their_way_after_other_exchanges(
    comm: ThreadComm, per_node: int | None
) -> None:
    """As of a loss on what experts get, whose answers were summed up long ago."""
    a = exchange(comm, experts=4, topk=2, dtype=torch.float32, ranks_per_node=per_node)
    x, idx, w = batch(comm.rank(), 6, 4, 2, HIDDEN, torch.float32)
    x.requires_grad_()
    first = dispatch(a, x, idx, weights=w)
    combine(a, first.x)
    other, other_idx, _ = batch(9 + comm.rank(), 3, 4, 2, HIDDEN, torch.float32)
    combine(a, dispatch(a, other, other_idx).x, None)
    first.x.square().sum().backward()
    assert x.grad is not None
    times = (idx >= 0).sum(1, keepdim=True)
    torch.testing.assert_close(x.grad, 2 * x.detach() * times)
    # And while the dispatch is open whose answers would be multiplied by weights.
    x.grad = None
    dispatch(a, x, idx, weights=w).x.square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach() * times)


@on_all_ranks(2)
def test_without_weights_and_in_bfloat16_gradients_flow_too(comm: ThreadComm) -> None:
    a = exchange(comm, experts=4, topk=2)
    x, idx, _ = batch(comm.rank(), 6, 4, 2, HIDDEN)
    x.requires_grad_()
    got = dispatch(a, x, idx)
    out = combine(a, got.x * 2)
    grad = batch(40 + comm.rank(), 6, 4, 2, HIDDEN)[0]
    out.backward(grad)
    times = (idx >= 0).sum(1, keepdim=True)
    assert torch.equal(out, (x.float() * 2 * times).to(torch.bfloat16))
    assert x.grad is not None
    assert torch.equal(x.grad, (grad.float() * 2 * times).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("per_node", [None, 1, 2])
def test_gradients_of_short_numbers_are_near_and_the_same_bits_each_time(
    per_node: int | None, dtype: torch.dtype
) -> None:
    experts, topk, ranks = 8, 3, 4
    whole = parameters(experts, 1, dtype)

    def work(comm: ThreadComm) -> list[torch.Tensor]:
        a = exchange(
            comm, experts=experts, topk=topk, dtype=dtype, ranks_per_node=per_node, chunk=2
        )
        mine = whole[:, comm.rank() * 2 :][:, :2].clone().requires_grad_()
        x, idx, w = batch(comm.rank(), 5 * comm.rank(), experts, topk, HIDDEN, dtype)
        x, w = x.requires_grad_(), w.requires_grad_()
        found: list[torch.Tensor] = []
        for _ in range(2):
            x.grad = w.grad = mine.grad = None
            out = sharded(a, x, idx, w, mine, 1)
            out.float().square().sum().backward()
            grads = (x.grad, w.grad, mine.grad)
            found += [out.detach(), *(g for g in grads if g is not None)]
        assert all(torch.equal(found[i], found[i + 4]) for i in range(4))
        exact = [t.detach().float().requires_grad_() for t in (x, w)]
        wanted = unsharded(exact[0], idx, exact[1], whole.float())
        wanted.square().sum().backward()
        # Some eight roundings of numbers that are a few units large.
        near = 16 * torch.finfo(dtype).eps
        for got, want in zip(found, [wanted, exact[0].grad, exact[1].grad], strict=False):
            assert want is not None
            scale = want.abs().amax() if want.numel() else 0.0
            assert ((got.float() - want).abs() <= near * scale).all()
        return found

    on_ranks(ranks, work)


@on_all_ranks(2)
def test_weights_are_given_once_and_early_where_sums_are_made_on_the_way(comm: ThreadComm) -> None:
    for per_node in (None, 1):
        a = exchange(comm, experts=4, topk=2, ranks_per_node=per_node)
        x, idx, w = batch(comm.rank(), 6, 4, 2, HIDDEN)
        got = dispatch(a, x, idx, weights=w)
        with pytest.raises(errors.InvalidArgument, match="leave them out here"):
            combine(a, got.x, w)
        combine(a, got.x)
        got = dispatch(a, x, idx)
        if per_node is not None:
            with pytest.raises(errors.InvalidArgument, match="give weights to dispatch"):
                combine(a, got.x, w)
        combine(a, got.x)
        for bad, words in [(w[:2], "6 are needed"), (w.double(), "give torch.float32")]:
            with pytest.raises(errors.InvalidArgument, match=words):
                dispatch(a, x, idx, weights=bad)


@pytest.mark.parametrize("per_node", [None, 1])
@on_all_ranks(2)
def test_weights_that_change_after_a_dispatch_change_no_gradient(
    comm: ThreadComm, per_node: int | None
) -> None:
    a = exchange(comm, experts=4, topk=2, dtype=torch.float32, ranks_per_node=per_node)
    x, idx, w = batch(comm.rank(), 6, 4, 2, HIDDEN, torch.float32)
    found = []
    for changed in (False, True):
        leaf = w.clone().requires_grad_()
        rows = x.clone().requires_grad_()
        given = leaf * 1.0
        got = dispatch(a, rows, idx, weights=given)
        if changed:
            with torch.no_grad():
                given.fill_(5.0)
        sums = combine(a, got.x * 3.0)
        sums.square().sum().backward()
        found.append([sums.detach(), rows.grad, leaf.grad])
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)


@on_all_ranks(2)
def test_rs_1_an_expert_that_a_token_names_twice_has_no_gradient(comm: ThreadComm) -> None:
    a = exchange(comm, experts=4, topk=3, dtype=torch.float32)
    x, idx = torch.ones(2, HIDDEN), torch.tensor([[-1, 2, -1], [3, 1, 3]])
    with pytest.raises(
        errors.InvalidArgument, match=r"token 1 .* expert 3 twice, which has no gradient"
    ):
        dispatch(a, x, idx)


@on_all_ranks(3)
def test_rs_1_a_lost_rank_ends_the_pass_over_nodes_by_name(comm: ThreadComm) -> None:
    a = exchange(comm, experts=6, topk=2, dtype=torch.float32, ranks_per_node=1, timeout=20.0)
    x, idx, w = batch(comm.rank(), 6, 6, 2, HIDDEN, torch.float32)
    w.requires_grad_()
    sums = combine(a, dispatch(a, x.requires_grad_(), idx, weights=w).x)
    comm.all_gather(b"")
    if comm.rank() == 0:
        a.mask(2, "it was unplugged")
    comm.all_gather(b"")
    if comm.rank() < 2:
        with pytest.raises(errors.PeerLost, match="rank 2 "):
            sums.sum().backward()
        # For good: what others still have under way with it is none of its business.
        for _ in range(2):
            with pytest.raises(errors.PeerLost, match=r"rank 2 was lost .* exchange anew"):
                dispatch(a, x, idx)
        with pytest.raises(errors.PeerLost, match="rank 2 "):
            a.check()


@on_all_ranks(2)
def test_rs_1_a_lost_rank_ends_the_pass_by_name(comm: ThreadComm) -> None:
    a = exchange(comm, experts=4, topk=2, dtype=torch.float32)
    x, idx, w = batch(comm.rank(), 6, 4, 2, HIDDEN, torch.float32)
    sums = combine(a, dispatch(a, x.requires_grad_(), idx).x, w)
    comm.all_gather(b"")
    a.tokens.mask(1 - comm.rank(), "it was unplugged")
    with pytest.raises(errors.PeerLost, match=f"rank {1 - comm.rank()} .* it was unplugged"):
        sums.sum().backward()
    with pytest.raises(errors.PeerLost, match="unplugged"):
        dispatch(a, x, idx)


@on_all_ranks(1)
def test_what_does_not_fit_is_refused(comm: ThreadComm) -> None:
    a = exchange(comm, experts=4, topk=2, dtype=torch.float32)
    x, idx, w = batch(0, 6, 4, 2, HIDDEN, torch.float32)
    with pytest.raises(errors.InvalidArgument, match="dispatch first"):
        combine(a, x, w)
    with pytest.raises(errors.InvalidArgument, match="bfloat16"):
        dispatch(a, x.bfloat16(), idx)
    with pytest.raises(errors.DecodeError, match="no descriptor"):
        a.connect([b"", b"x"])
    with pytest.raises(errors.InvalidArgument, match="can't be summed"):
        exchange(comm, experts=4, topk=2, dtype=torch.float8_e4m3fn)
    first = dispatch(a, x.clone().requires_grad_(), idx)
    with pytest.raises(errors.InvalidArgument, match="weights"):
        combine(a, first.x, w.double())
    with pytest.raises(errors.InvalidArgument, match="are needed"):
        combine(a, first.x[:1], w)
    with pytest.raises(errors.InvalidArgument, match="were dispatched"):
        combine(a, torch.cat([first.x, first.x[:1]]), w)
    sums = combine(a, first.x, w)
    second = dispatch(a, x, idx)
    sums.sum().backward()
    with pytest.raises(errors.InvalidArgument, match="backward pass came between"):
        combine(a, second.x, w)
