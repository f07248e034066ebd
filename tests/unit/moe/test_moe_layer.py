"""A layer of experts: routes by hand, and the same bits on ranks as in one place."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fabric_ray import TransferEngine, errors
from fabric_ray.moe import AllToAll
from fabric_ray.moe.arithmetic import FAST
from fabric_ray.moe.autograd import Differentiable
from fabric_ray.moe.layer import MoeConfig, MoeLayer, MoeWeights, ParallelMoeLayer, Traffic, route
from tests.moe_ranks import ThreadComm, on_ranks
from tests.throughput_ranks import throughput_rank
from tests.unit.moe.moe_ranks import exchanges, together, tokens

QWEN = MoeConfig(hidden=48, experts=8, topk=3, intermediate=20)
DEEPSEEK = MoeConfig(
    hidden=32,
    experts=16,
    topk=4,
    intermediate=24,
    shared_intermediate=40,
    score="sigmoid",
    scale=2.5,
    groups=4,
    kept_groups=2,
    bias=True,
    dtype="bfloat16",
)


def by_hand(logits: list[float], config: MoeConfig, bias: list[float]) -> dict[int, float]:
    """The route of one token, by the papers' words."""
    row = torch.tensor(logits, dtype=torch.float64)
    scores = row.softmax(0) if config.score == "softmax" else row.sigmoid()
    preferred = dict(enumerate((scores + torch.tensor(bias, dtype=torch.float64)).tolist()))
    size = config.experts // config.groups

    def worth(group: int) -> float:
        return sum(sorted((preferred[group * size + i] for i in range(size)), reverse=True)[:2])

    kept = sorted(range(config.groups), key=worth, reverse=True)[: config.kept_groups]
    allowed = [e for e in preferred if e // size in kept]
    chosen = sorted(allowed, key=lambda e: preferred[e], reverse=True)[: config.topk]
    total = sum(float(scores[e]) for e in chosen) if config.normalise else 1.0
    return {e: float(scores[e]) / total * config.scale for e in chosen}


@pytest.mark.parametrize("config", [QWEN, DEEPSEEK], ids=["qwen3", "deepseek-v3"])
@settings(deadline=None)
@given(seed=st.integers(0, 10_000))
def test_routes_are_those_of_the_papers(config: MoeConfig, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, config.experts, generator=generator)
    bias = torch.randn(config.experts, generator=generator) * (0.3 if config.bias else 0.0)
    chosen, weights = route(logits, config, bias if config.bias else None)
    for t in range(5):
        expected = by_hand(logits[t].tolist(), config, bias.tolist())
        assert chosen[t].tolist() == list(expected)
        assert weights[t].tolist() == pytest.approx(list(expected.values()), rel=1e-5)


def test_of_equal_scores_the_lower_expert_is_chosen() -> None:
    chosen, weights = route(torch.zeros(2, 8), QWEN)
    assert chosen.tolist() == [[0, 1, 2]] * 2
    assert torch.allclose(weights, torch.tensor(1 / 3))


def sliced(whole: MoeWeights, experts: range) -> MoeWeights:
    here = slice(experts.start, experts.stop)
    return MoeWeights(
        whole.router, whole.bias, whole.w13[here], whole.w2[here], whole.shared_w13, whole.shared_w2
    )


def layers_of(
    config: MoeConfig, whole: MoeWeights, alls: list[AllToAll], max_tokens: int = 32, **options: Any
) -> list[ParallelMoeLayer]:
    """The layer on each rank."""
    options["max_tokens"] = max_tokens
    return [ParallelMoeLayer(config, sliced(whole, a.local_experts), a, **options) for a in alls]


def test_an_expert_has_the_same_weights_on_any_rank() -> None:
    whole = MoeWeights.random(DEEPSEEK, seed=3)
    part = MoeWeights.random(DEEPSEEK, seed=3, experts=range(4, 8))
    assert torch.equal(part.w13, whole.w13[4:8])
    assert torch.equal(part.w2, whole.w2[4:8])
    assert not torch.equal(whole.w13, MoeWeights.random(DEEPSEEK, seed=4).w13)
    assert not torch.equal(whole.w13, MoeWeights.random(DEEPSEEK, seed=3, name="other").w13)


@pytest.mark.parametrize("config", [QWEN, DEEPSEEK], ids=["qwen3", "deepseek-v3"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_have_the_bits_of_one_place(config: MoeConfig, ranks: int) -> None:
    weights = MoeWeights.random(config, seed=0)
    whole = MoeLayer(config, weights)
    with exchanges(config, ranks) as alls:
        layers = layers_of(config, weights, alls)
        for turn, counts in enumerate([(32, 0, 1, 7), (3, 31, 16, 0), (0, 0, 0, 0)]):
            x = tokens(turn, sum(counts[:ranks]), config)
            expected = whole.forward(x)
            parts = x.split(counts[:ranks])
            found = together([partial(layers[i].forward, parts[i]) for i in range(ranks)])
            assert torch.equal(torch.cat(found), expected)


@settings(max_examples=12, deadline=None)
@given(counts=st.tuples(*[st.integers(0, 40)] * 2), seed=st.integers(0, 1000))
def test_random_divisions_of_tokens_change_no_bit(counts: tuple[int, int], seed: int) -> None:
    weights = MoeWeights.random(QWEN, seed=seed)
    whole = MoeLayer(QWEN, weights)
    x = tokens(seed, sum(counts), QWEN)
    expected = whole.forward(x)
    assert torch.equal(torch.cat([whole.forward(row[None]) for row in x] or [x]), expected)
    with exchanges(QWEN, 2, max_tokens=16) as alls:
        layers = layers_of(QWEN, weights, alls, 16)
        parts = x.split(counts)
        found = together([lambda i=i: layers[i].forward(parts[i], rounds=3) for i in range(2)])
        assert torch.equal(torch.cat(found), expected)


def test_a_masked_rank_leaves_its_experts_out_and_nothing_else() -> None:
    weights = MoeWeights.random(DEEPSEEK, seed=0)
    whole = MoeLayer(DEEPSEEK, weights)
    with exchanges(DEEPSEEK, 4) as alls:
        layers = layers_of(DEEPSEEK, weights, alls, shrink=True)
        for a in alls[:2] + alls[3:]:
            a.mask(2)
        for a in alls[:2] + alls[3:]:
            alls[2].mask(a.rank)
        here = [0, 1, 3]
        parts = {r: tokens(r, 9, DEEPSEEK) for r in here}
        found = together([lambda r=r: layers[r].forward(parts[r]) for r in here])
        gone = alls[2].local_experts
        for r, y in zip(here, found, strict=True):
            assert torch.equal(y, whole.forward(parts[r], left_out=gone))
            assert not torch.equal(y, whole.forward(parts[r]))


def test_rs_1_a_layer_raises_once_a_rank_is_lost() -> None:
    weights = MoeWeights.random(QWEN, seed=0)
    with exchanges(QWEN, 2) as alls:
        [layer] = layers_of(QWEN, weights, alls[:1], 8)
        alls[0].set_timeout(0.2)
        # The other rank makes no call: the pass that loses it raises, and so does the next one.
        for _ in range(2):
            with pytest.raises(
                errors.PeerLost, match=r"rank 1 was lost: .*; its experts are missing"
            ):
                layer.forward(tokens(0, 4, QWEN))


def reference(config: MoeConfig, w: MoeWeights, x: Tensor) -> Tensor:
    """By the formula, in double precision."""
    chosen, weights = route(x.double().float() @ w.router.t(), config, w.bias)
    out = torch.zeros(x.shape, dtype=torch.float64)

    def mlp(row: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        gate, up = (w13.double() @ row).chunk(2)
        return w2.double() @ (gate * gate.sigmoid() * up)

    for t, row in enumerate(x.double()):
        for k, e in enumerate(chosen[t]):
            out[t] += float(weights[t, k]) * mlp(row, w.w13[e], w.w2[e])
        if w.shared_w13 is not None and w.shared_w2 is not None:
            out[t] += mlp(row, w.shared_w13, w.shared_w2)
    return out


@pytest.mark.parametrize("fast", [False, True])
def test_the_layer_is_its_formula(fast: bool) -> None:
    options = {"shared_intermediate": 24, "score": "sigmoid", "bias": True}
    config = MoeConfig(hidden=48, experts=8, topk=3, intermediate=20, **options)  # type: ignore[arg-type]
    weights = MoeWeights.random(config, seed=0)
    layer = MoeLayer(config, weights, **({"arithmetic": FAST} if fast else {}))
    x = tokens(5, 20, config)
    found = layer.forward(x).double()
    torch.testing.assert_close(found, reference(config, weights, x), rtol=1e-4, atol=1e-5)


def test_traffic_counts_rows_and_bytes_that_left() -> None:
    weights = MoeWeights.random(QWEN, seed=0)
    with exchanges(QWEN, 2) as alls:
        layers = layers_of(QWEN, weights, alls)
        x = [tokens(r, 10, QWEN) for r in range(2)]
        together([lambda r=r: layers[r].forward(x[r]) for r in range(2)])
        routes = [layers[r]._route(x[r])[0] for r in range(2)]
        away = [int((routes[r] // 4 != r).sum()) for r in range(2)]
        for r, layer in enumerate(layers):
            assert layer.traffic.rows == sum(int((i // 4 == r).sum()) for i in routes)
            assert layer.traffic.dispatched_nbytes == away[r] * 48 * 4
            assert layer.traffic.combined_nbytes == away[1 - r] * 48 * 4
            assert layer.traffic.exchanges == 1
        both = layers[0].traffic + layers[1].traffic
        assert both.rows == 2 * 10 * 3
        assert Traffic() + both == both


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"topk": 9}, "topk is 9"),
        ({"groups": 3}, "equally large"),
        ({"groups": 4, "topk": 3}, "keep more"),
        ({"hidden": 0}, "hidden is 0"),
        ({"shared_intermediate": -1}, "no shared expert"),
        ({"dtype": "float16"}, "float16"),
        ({"groups": 2, "kept_groups": 3}, "no more are kept"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=words):
        MoeConfig(**options)  # type: ignore[arg-type]


def test_rs_1_a_layer_whose_sums_are_made_on_the_way_does_not_go_on_without_a_rank() -> None:
    weights = MoeWeights.random(QWEN, seed=0)

    def work(comm: ThreadComm) -> None:
        sizes = {"experts": QWEN.experts, "topk": QWEN.topk, "hidden": QWEN.hidden}
        given = {**sizes, "max_tokens": 8, "dtype": torch.float32, "answer_dtype": torch.float32}
        a = throughput_rank(comm, ranks_per_node=1, **given)
        layer = ParallelMoeLayer(QWEN, sliced(weights, a.local_experts), a, max_tokens=8)
        layer.forward(tokens(comm.rank(), 5, QWEN))
        comm.all_gather(b"")
        if comm.rank() == 0:
            a.mask(2, "it was unplugged")
        comm.all_gather(b"")
        for _ in range(0 if comm.rank() == 2 else 3):
            with pytest.raises(errors.PeerLost, match="rank 2 "):
                layer.forward(tokens(comm.rank(), 5, QWEN))

    on_ranks(4, work)


def test_gradients_of_the_fixed_arithmetic_are_refused_before_anything_is_sent() -> None:
    weights = MoeWeights.random(QWEN, seed=0)
    x = tokens(0, 3, QWEN)
    with TransferEngine(name="rank-0", transport="shm") as engine:
        a = Differentiable(
            engine, rank=0, ranks=1, experts=QWEN.experts, topk=QWEN.topk, hidden=QWEN.hidden,
            max_tokens=4, dtype=torch.float32,
        )  # fmt: skip
        a.connect([a.card()])
        layer = ParallelMoeLayer(QWEN, weights, a, max_tokens=4)
        want = layer.forward(x)
        # Of what is reached only when tokens have come, too.
        for wanted in (x, weights.router, weights.w2):
            wanted.requires_grad_()
            with pytest.raises(errors.InvalidArgument, match="arithmetic=FAST"):
                layer.forward(x)
            with torch.no_grad():
                assert torch.equal(layer.forward(x), want)
            wanted.requires_grad_(False)


def test_what_a_layer_can_not_take_is_refused_before_it_is_sent() -> None:
    weights = MoeWeights.random(QWEN, seed=0)
    with pytest.raises(errors.InvalidArgument, match="w13 is"):
        MoeLayer(QWEN, sliced(weights, range(4)))
    with exchanges(QWEN, 1, max_tokens=4) as [a]:
        layer = ParallelMoeLayer(QWEN, weights, a, max_tokens=4)
        with pytest.raises(errors.InvalidArgument, match="more rounds"):
            layer.forward(tokens(0, 9, QWEN), rounds=2)
        with pytest.raises(errors.InvalidArgument, match="leave experts out"):
            layer.forward(tokens(0, 2, QWEN), left_out=[1])
        assert layer.forward(tokens(0, 9, QWEN), rounds=3).shape == (9, 48)
