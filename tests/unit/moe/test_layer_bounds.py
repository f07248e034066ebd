"""FAST on ranks is FAST in one place, within what formats and lengths of sums say."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fabric_ray.moe.arithmetic import FAST, FIXED
from fabric_ray.moe.bounds import Bound, layer_bound
from fabric_ray.moe.layer import MoeConfig, MoeLayer, MoeWeights, ParallelMoeLayer
from tests.examples import examples
from tests.moe_ranks import ThreadComm, on_ranks
from tests.throughput_ranks import throughput_rank
from tests.unit.moe.moe_ranks import exchanges, together, tokens


@st.composite
def configs(draw: Any) -> MoeConfig:
    groups = draw(st.sampled_from([1, 2, 4]))
    return MoeConfig(
        hidden=draw(st.sampled_from([16, 96, 257])),
        experts=8,
        topk=draw(st.integers(1, 3)),
        intermediate=draw(st.sampled_from([8, 70])),
        shared_intermediate=draw(st.sampled_from([0, 24])),
        score=draw(st.sampled_from(["softmax", "sigmoid"])),
        normalise=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        groups=groups,
        kept_groups=2 if groups > 1 else 1,
        bias=draw(st.booleans()),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
    )


def within(found: torch.Tensor, other: torch.Tensor, bound: Bound, times: float) -> bool:
    apart = (found.double() - other.double()).abs()
    return bool((apart <= times * bound.error)[bound.settled].all())


@settings(max_examples=examples(20), deadline=None)
@given(
    config=configs(),
    seed=st.integers(0, 1 << 20),
    count=st.integers(1, 16),
    scale=st.floats(0.1, 100),
)
# Errors of scores that are larger than the scores.
@example(
    config=MoeConfig(
        hidden=16, experts=8, topk=1, intermediate=8, score="sigmoid", groups=2, kept_groups=2,
        bias=True,
    ),
    seed=40,
    count=16,
    scale=30.0,
)  # fmt: skip
def test_every_evaluation_is_within_the_bound(
    config: MoeConfig, seed: int, count: int, scale: float
) -> None:
    weights = MoeWeights.random(config, seed=seed)
    fast = MoeLayer(config, weights, arithmetic=FAST)
    x = tokens(seed, count, config) * scale
    bound = layer_bound(fast, x)
    whole = fast.forward(x)
    assert within(whole, bound.sums, bound, 1)
    assert within(MoeLayer(config, weights, arithmetic=FIXED).forward(x), bound.sums, bound, 1)
    # As many ranks as there are tokens: each is computed by itself.
    assert within(torch.cat([fast.forward(one) for one in x.split(1)]), whole, bound, 2)


@settings(max_examples=5, deadline=None)
@given(config=configs(), seed=st.integers(0, 1 << 20), ranks=st.sampled_from([2, 4]))
def test_a_layer_on_ranks_is_that_of_one_place_within_twice_the_bound(
    config: MoeConfig, seed: int, ranks: int
) -> None:
    whole = MoeLayer(config, MoeWeights.random(config, seed=seed), arithmetic=FAST)
    x = tokens(seed, 9 * ranks, config)
    bound = layer_bound(whole, x)
    with exchanges(config, ranks) as alls:
        layers = [
            ParallelMoeLayer(
                config,
                MoeWeights.random(config, seed=seed, experts=a.local_experts),
                a,
                max_tokens=32,
                arithmetic=FAST,
            )
            for a in alls
        ]
        parts = x.split(9)
        works = [partial(one.forward, part) for one, part in zip(layers, parts, strict=True)]
        found = torch.cat(together(works))
    assert within(found, whole.forward(x), bound, 2)


@settings(max_examples=2, deadline=None)
@given(
    config=configs(),
    seed=st.integers(0, 1 << 20),
    place=st.sampled_from([(2, 1), (4, 2), (4, 1), (2, 2)]),
)
def test_a_layer_over_nodes_is_that_of_one_place_within_twice_the_bound(
    config: MoeConfig, seed: int, place: tuple[int, int]
) -> None:
    ranks, per_node = place
    whole = MoeLayer(config, MoeWeights.random(config, seed=seed), arithmetic=FAST)
    x = tokens(seed, 9 * ranks, config)
    bound = layer_bound(whole, x, by_nodes=True)
    parts = x.split(9)

    def work(comm: ThreadComm) -> torch.Tensor:
        one = throughput_rank(
            comm, ranks_per_node=per_node, experts=config.experts, topk=config.topk,
            hidden=config.hidden, max_tokens=5, dtype=config.torch_dtype,
            answer_dtype=config.torch_dtype,
        )  # fmt: skip
        weights = MoeWeights.random(config, seed=seed, experts=one.local_experts)
        layer = ParallelMoeLayer(config, weights, one, max_tokens=5, arithmetic=FAST)
        found = layer.forward(parts[comm.rank()], rounds=2)
        assert layer.traffic.exchanges == 2
        return found

    found = torch.cat(on_ranks(ranks, work))
    assert within(found, bound.sums, bound, 1)
    assert within(found, whole.forward(x), bound, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bound_is_small_enough_to_tell_a_wrong_weight(dtype: Any) -> None:
    config = MoeConfig(hidden=256, experts=8, topk=2, intermediate=64, dtype=dtype)
    weights = MoeWeights.random(config, seed=1)
    layer = MoeLayer(config, weights, arithmetic=FAST)
    x = tokens(1, 64, config)
    bound = layer_bound(layer, x)
    assert bound.settled.float().mean() > 0.9
    wrong = weights.w2.clone()
    wrong[:, :, 0] *= -1
    other = MoeLayer(config, replace(weights, w2=wrong), arithmetic=FAST)
    assert not within(other.forward(x), layer.forward(x), bound, 2)
    typical = bound.sums.square().mean().sqrt()
    assert bound.error.mean() < typical * {"float32": 1e-2, "bfloat16": 1.0}[dtype]


def test_experts_that_are_as_good_are_not_settled() -> None:
    config = MoeConfig(hidden=16, experts=4, topk=1, intermediate=8)
    weights = MoeWeights.random(config, seed=2)
    router = weights.router.clone()
    router[1] = router[0]
    layer = MoeLayer(config, replace(weights, router=router), arithmetic=FAST)
    x = tokens(2, 64, config)
    chosen = (x @ router.t()).argmax(1) < 2
    settled = layer_bound(layer, x).settled
    assert not settled[chosen].any()
    assert settled[~chosen].any()


def within_everywhere(layer: MoeLayer, x: torch.Tensor) -> Bound:
    bound = layer_bound(layer, x)
    assert (bound.error > 0).all()
    for arithmetic in (FAST, FIXED):
        found = MoeLayer(layer.config, layer.weights, arithmetic=arithmetic).forward(x)
        assert within(found, bound.sums, bound, 1)
    return bound


def far_below_zero(topk: int, times: float, **options: Any) -> tuple[MoeLayer, torch.Tensor]:
    """Experts whose scores are next to nothing, for any of the tokens."""
    config = MoeConfig(hidden=16, experts=4, topk=topk, intermediate=8, score="sigmoid", **options)
    router = times * (torch.full((4, 16), -3.0) - 0.1 * torch.arange(4)[:, None])
    bias = torch.arange(4.0) if config.bias else None
    weights = replace(MoeWeights.random(config, seed=1), router=router, bias=bias)
    x = torch.rand(8, 16, generator=torch.Generator().manual_seed(0)) + 0.5
    return MoeLayer(config, weights, arithmetic=FAST), x


@pytest.mark.parametrize("times", [1.0, 2.0, 8.0])
def test_weights_that_are_lost_in_rounding_have_no_bound(times: float) -> None:
    layer, x = far_below_zero(2, times, bias=True)
    bound = within_everywhere(layer, x)
    assert not bound.settled.any()
    assert bound.error.isinf().all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_that_overflow_have_no_bound(dtype: Any) -> None:
    config = MoeConfig(hidden=16, experts=4, topk=2, intermediate=8, dtype=dtype)
    weights = MoeWeights.random(config, seed=1)
    layer = MoeLayer(config, replace(weights, w13=weights.w13 * 1e20), arithmetic=FAST)
    x = tokens(1, 8, config)
    assert not layer.forward(x).isfinite().all()
    assert not within_everywhere(layer, x).settled.any()


def test_experts_that_are_left_out_are_left_out_of_the_bound() -> None:
    config = MoeConfig(hidden=16, experts=4, topk=2, intermediate=8, shared_intermediate=8)
    layer = MoeLayer(config, MoeWeights.random(config, seed=3), arithmetic=FAST)
    x = tokens(3, 16, config)
    bound = layer_bound(layer, x, left_out=[0, 2])
    assert within(layer.forward(x, left_out=[0, 2]), bound.sums, bound, 1)
    assert not within(layer.forward(x), bound.sums, bound, 1)


def test_sums_that_cancel_are_off_by_their_length() -> None:
    """The exact sums are zeros, and rounding what comes out of them says nothing."""
    config = MoeConfig(hidden=512, experts=2, topk=1, intermediate=16)
    weights = MoeWeights.random(config, seed=4)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(4))
    half = weights.w13[..., :256]
    layer = MoeLayer(
        config, replace(weights, w13=torch.cat([half, half[..., order]], -1)), arithmetic=FAST
    )
    first = tokens(4, 32, config)[:, :256]
    x = torch.cat([first, -first[:, order]], 1)
    bound = layer_bound(layer, x)
    found = layer.forward(x)
    assert found.any()
    assert within(found, bound.sums, bound, 1)
