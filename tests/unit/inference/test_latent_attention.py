"""Latent attention computes what Hugging Face's does, absorbed or not, paged or not."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from msgspec import structs
from torch import Tensor
from torch.nn import functional as F

from fabric_ray.inference.engine import TorchEngine
from fabric_ray.inference.model import Model
from fabric_ray.inference.presets import tiny
from fabric_ray.inference.spec import CacheSpec
from fabric_ray.models.config import Latent, ModelConfig, Moe, Rope, Yarn
from fabric_ray.models.errors import UnsupportedModel
from tests.unit.inference.engines import engine, followed, full_weights, text
from tests.unit.models.small_models import small, some_tokens, waves

LATENT = Latent(kv_rank=20, nope_dim=8, rope_dim=4, value_dim=6, q_rank=28)
EXPERTS = Moe(
    experts=6,
    top_k=2,
    intermediate=24,
    shared_intermediate=48,
    shared_gate=False,
    normalise=False,
    dense_layers=(0,),
)


def latent(**changes: object) -> ModelConfig:
    fields = {"kv_heads": 4, "head_dim": 12, "latent": LATENT} | changes
    return small("deepseek_v2", **fields)


MODELS = {
    "dense": latent(),
    "lite": latent(latent=structs.replace(LATENT, q_rank=0)),
    "moe": latent(moe=EXPERTS),
    "yarn": latent(
        head_dim=16,
        latent=structs.replace(LATENT, rope_dim=8),
        rope=Rope(100.0, yarn=Yarn(40.0, 64, mscale=0.707, mscale_all_dim=0.9)),
    ),
}

# Hugging Face transformers 5.23, float32, weights and tokens as in small_models: logits of ids
# 0, 1, 2, 50 and 96 at the last position of the second row.
RECORDED = {
    "dense": [-0.2596, -0.1641, 0.0854, -0.2573, 0.2379],
    "lite": [0.1820, -0.4248, -0.2550, 0.4779, 0.3338],
    "moe": [0.1972, -0.4958, -0.2397, -0.3173, -0.5283],
    "yarn": [-0.4267, -0.1570, 0.2600, -0.3839, 0.4314],
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_hugging_face(name: str) -> None:
    config = MODELS[name]
    model = Model.of(config, waves(config), tp=2, revision="waves")
    served = TorchEngine(model, CacheSpec(page_tokens=5))
    tokens = some_tokens(config)[1].tolist()
    logits = followed(served, tokens, 25, chunk=11)[-1, [0, 1, 2, 50, 96]]
    torch.testing.assert_close(logits, torch.tensor(RECORDED[name]), atol=2e-4, rtol=0)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def turned(x: Tensor, theta: float) -> Tensor:
    """Neighbours are complex numbers, ``[positions, ..., width]``."""
    rates = theta ** -(torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])
    angles = torch.outer(torch.arange(len(x), dtype=torch.float64), rates)
    by = torch.polar(torch.ones_like(angles), angles).view(len(x), *[1] * (x.dim() - 2), -1)
    as_complex = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(as_complex * by).flatten(-2)


def expanded(c: ModelConfig, w: Mapping[str, Tensor], tokens: list[int]) -> Tensor:
    """Keys and values of every head written out, nothing absorbed, paged or shared."""
    z = c.latent
    assert z is not None
    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(c.layers):
        p = f"model.layers.{layer}."
        a = p + "self_attn."
        h = norm(x, w[p + "input_layernorm.weight"], c.norm_eps)
        q = norm(h @ w[a + "q_a_proj.weight"].T, w[a + "q_a_layernorm.weight"], c.norm_eps)
        q = (q @ w[a + "q_b_proj.weight"].T).view(len(tokens), c.heads, -1)
        down = h @ w[a + "kv_a_proj_with_mqa.weight"].T
        kv = norm(down[:, : z.kv_rank], w[a + "kv_a_layernorm.weight"], c.norm_eps)
        kv = (kv @ w[a + "kv_b_proj.weight"].T).view(len(tokens), c.heads, -1)
        rope = turned(down[:, z.kv_rank :], c.rope.theta)[:, None].expand(-1, c.heads, -1)
        k = torch.cat([kv[..., : z.nope_dim], rope], dim=-1)
        q = torch.cat([q[..., : z.nope_dim], turned(q[..., z.nope_dim :], c.rope.theta)], dim=-1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / c.head_dim**0.5
        later = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
        odds = scores.masked_fill(later, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", odds, kv[..., z.nope_dim :]).flatten(1)
        x = x + mixed @ w[a + "o_proj.weight"].T
        h = norm(x, w[p + "post_attention_layernorm.weight"], c.norm_eps)
        gate, up = h @ w[p + "mlp.gate_proj.weight"].T, h @ w[p + "mlp.up_proj.weight"].T
        x = x + (F.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T
    return norm(x, w["model.norm.weight"], c.norm_eps) @ w["lm_head.weight"].T


@pytest.mark.parametrize("tp", [1, 4])
def test_absorbed_and_paged_equals_expanded_and_whole(tp: int) -> None:
    tokens = text(47)
    config = tiny("mla")
    found = followed(engine("tiny-mla", tp=tp, page_tokens=6), tokens, 40, chunk=17)
    expected = expanded(config, full_weights(config), tokens)[39:]
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


def test_every_rank_keeps_the_same_latents() -> None:
    served = engine("tiny-mla", tp=4)
    followed(served, text(30), 25)
    first = served.buffers(0)[0]
    assert first.any()
    assert all(torch.equal(served.buffers(rank)[0], first) for rank in range(4))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (small("deepseek_v3", kv_heads=4, head_dim=12, latent=LATENT), "'deepseek_v3'"),
        (latent(moe=structs.replace(EXPERTS, correction_bias=True)), "correction bias"),
        (latent(latent=structs.replace(LATENT, index_heads=2, index_dim=4)), "sparse attention"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(config: ModelConfig, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        Model.random(config)
