"""Experts on ranks give the bits that they give in one place, or say who is missing."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fabric_ray import errors
from fabric_ray.demo.moe_model import OnePlace, RowMlp
from fabric_ray.moe import AllToAll
from fabric_ray.moe.layer import ParallelExperts
from tests.moe_ranks import ThreadComm, on_ranks
from tests.throughput_ranks import throughput_rank
from tests.unit.moe.moe_ranks import joined, on_each, together

EXPERTS, TOPK, HIDDEN, WIDTH = 8, 3, 48, 20
SIZES = {"experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN}
FLOATS = {"dtype": torch.float32, "answer_dtype": torch.float32}
Batch = tuple[Tensor, Tensor, Tensor]


def expert(number: int) -> RowMlp:
    generator = torch.Generator().manual_seed(number)
    made = RowMlp(HIDDEN, WIDTH, torch.float32)
    for weight in made.parameters():
        weight.data = torch.randn(weight.shape, generator=generator)
    return made.requires_grad_(False)


WHOLE = OnePlace(map(expert, range(EXPERTS)))


def batch(seed: int, tokens: int) -> Batch:
    """Tokens, their experts and weights."""
    g = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, EXPERTS, generator=g).argsort(1)[:, :TOPK].contiguous()
    return torch.randn(tokens, HIDDEN, generator=g), chosen, torch.rand(tokens, TOPK, generator=g)


def experts_of(a: AllToAll, max_tokens: int = 32, *, shrink: bool = False) -> ParallelExperts:
    return ParallelExperts(a, expert, max_tokens=max_tokens, shrink=shrink)


@settings(max_examples=12, deadline=None)
@given(
    counts=st.one_of(*(st.tuples(*[st.integers(0, 32)] * ranks) for ranks in (1, 2, 4))),
    seed=st.integers(0, 1000),
)
def test_ranks_have_the_bits_of_one_place(counts: tuple[int, ...], seed: int) -> None:
    whole = batch(seed, sum(counts))
    expected = WHOLE(*whole)
    parts = list(zip(*(t.split(list(counts)) for t in whole), strict=True))
    with joined([None] * len(counts), max_tokens=32, **SIZES, **FLOATS) as ranks:
        found = on_each(ranks, lambda a: experts_of(a)(*parts[a.rank]))
    assert torch.equal(torch.cat(found), expected)


def test_a_masked_rank_leaves_its_experts_out_and_nothing_else() -> None:
    with joined([None] * 4, max_tokens=32, **SIZES, **FLOATS) as ranks:
        gone, here = ranks[2], ranks[:2] + ranks[3:]
        for a in here:
            a.mask(2)
            gone.mask(a.rank)
        layers = [experts_of(a, shrink=True) for a in here]
        parts = [batch(a.rank, 9) for a in here]
        found = together([partial(one, *part) for one, part in zip(layers, parts, strict=True)])
        smaller = OnePlace(WHOLE)
        smaller.left_out = tuple(gone.local_experts)
        for part, sums in zip(parts, found, strict=True):
            assert torch.equal(sums, smaller(*part))
            assert not torch.equal(sums, WHOLE(*part))


def test_rs_1_a_layer_raises_once_a_rank_is_lost() -> None:
    with joined([None] * 2, max_tokens=8, **SIZES, **FLOATS) as ranks:
        layer = experts_of(ranks[0], 8)
        ranks[0].set_timeout(0.2)
        # The other rank makes no call: the pass that loses it raises, and so does the next one.
        for _ in range(2):
            with pytest.raises(
                errors.PeerLost, match=r"rank 1 was lost: .*; its experts are missing"
            ):
                layer(*batch(0, 4))


def test_rs_1_a_layer_whose_sums_are_made_on_the_way_does_not_go_on_without_a_rank() -> None:
    def work(comm: ThreadComm) -> None:
        a = throughput_rank(comm, ranks_per_node=1, max_tokens=8, **{**SIZES, **FLOATS})
        layer = ParallelExperts(a, expert, max_tokens=8, shrink=True)
        given = batch(comm.rank(), 5)
        torch.testing.assert_close(layer(*given), WHOLE(*given), rtol=1e-4, atol=1e-3)
        comm.all_gather(b"")
        if comm.rank() == 0:
            a.mask(2, "it was unplugged")
        comm.all_gather(b"")
        for _ in range(0 if comm.rank() == 2 else 3):
            with pytest.raises(errors.PeerLost, match="rank 2 "):
                layer(*given)

    on_ranks(4, work)
