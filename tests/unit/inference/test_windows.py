"""Layers with a sliding window see what they should, and their pages may go when it has passed."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fabric_ray.inference.presets import tiny
from fabric_ray.inference.protocols import NO_PAGE, DecodeRow, PrefillChunk
from fabric_ray.inference.tables import CachePools
from fabric_ray.models.config import ModelConfig
from tests.unit.inference.engines import engine, followed, full_weights, text

HYBRID = tiny("hybrid")


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def token_by_token(c: ModelConfig, w: Mapping[str, Tensor], tokens: list[int]) -> Tensor:
    """Every query on its own, its keys picked one by one."""
    x = w["model.embed_tokens.weight"][tokens]
    half = c.head_dim // 2
    rates = c.rope.theta ** -(torch.arange(half, dtype=torch.float64) / half)

    def turned(vector: Tensor, position: int) -> Tensor:
        a, b = vector[..., :half], vector[..., half:]
        cos, sin = (position * rates).cos(), (position * rates).sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    for layer in range(c.layers):
        p = f"model.layers.{layer}."
        a = p + "self_attn."
        h = norm(x, w[p + "input_layernorm.weight"], c.norm_eps)
        q, k, v = (
            (h @ w[f"{a}{n}_proj.weight"].T).view(len(tokens), -1, c.head_dim) for n in "qkv"
        )
        q = norm(q, w[a + "q_norm.weight"], c.norm_eps)
        k = norm(k, w[a + "k_norm.weight"], c.norm_eps)
        k = torch.stack([turned(key, at) for at, key in enumerate(k)])
        rows = []
        for at in range(len(tokens)):
            seen = range(at + 1)
            if layer in c.windowed_layers:
                assert c.window is not None
                seen = range(max(0, at - c.window + 1), at + 1)
            heads = []
            for head, query in enumerate(turned(q[at], at)):
                kv = head * c.kv_heads // c.heads
                odds = (k[seen.start : seen.stop, kv] @ query / math.sqrt(c.head_dim)).softmax(0)
                heads.append(odds @ v[seen.start : seen.stop, kv])
            rows.append(torch.cat(heads))
        x = x + torch.stack(rows) @ w[a + "o_proj.weight"].T
        h = norm(x, w[p + "post_attention_layernorm.weight"], c.norm_eps)
        gate, up = h @ w[p + "mlp.gate_proj.weight"].T, h @ w[p + "mlp.up_proj.weight"].T
        x = x + (F.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T
    return norm(x, w["model.norm.weight"], c.norm_eps) @ w["lm_head.weight"].T


@pytest.mark.parametrize("chunk", [5, 100])
def test_windowed_logits_are_those_of_picked_keys(chunk: int) -> None:
    tokens = text(53)
    found = followed(engine("tiny-hybrid", tp=2, page_tokens=7), tokens, 45, chunk=chunk)
    expected = token_by_token(HYBRID, full_weights(HYBRID), tokens)[44:]
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


def test_layers_that_look_back_equally_far_are_a_group() -> None:
    full, window = engine("tiny-hybrid", window_pages=5).layout(0).groups
    assert (full.name, full.layers, full.window, full.pages) == ("full", (2,), None, 256)
    assert (window.name, window.layers, window.window, window.pages) == (
        "window",
        (0, 1, 3),
        24,
        5,
    )


def test_pages_before_the_window_may_be_gone() -> None:
    tokens = text(70)
    expected = followed(engine("tiny-hybrid", page_tokens=4), tokens, 60, chunk=10)
    served = engine("tiny-hybrid", page_tokens=4, window_pages=30)
    pools = CachePools(served.layout(0).groups)
    tables = pools.open(tokens, 70)
    out = []
    for start in range(0, 60, 10):
        tables.slide(start)
        chunk = PrefillChunk(tokens[start : start + 10], start, tables.tables, last=start == 50)
        tail = served.prefill(chunk)
    assert tail is not None
    out.append(tail.logits)
    for position in range(60, 70):
        tables.slide(position)
        out.append(served.decode([DecodeRow(tokens[position], position, tables.tables)])[0])
    torch.testing.assert_close(torch.stack(out), expected, atol=1e-9, rtol=0)
    gone = tables.tables[1].count(NO_PAGE)
    assert gone == (69 - 24 + 1) // 4
    assert pools.pools[1].owned_pages == 18 - gone
