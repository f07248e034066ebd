"""Public models by name: their shapes, as their ``config.json`` gives them."""

from __future__ import annotations

from fabric_ray.models.config import Latent, ModelConfig, Moe
from fabric_ray.models.errors import UnsupportedModel

_DEEPSEEK_LATENT = Latent(kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, q_rank=1536)


def _routed(experts: int, top_k: int, intermediate: int, shared: int, dense: int) -> Moe:
    """Experts behind ``dense`` layers without, beside ``shared`` that see every token."""
    return Moe(
        experts=experts,
        top_k=top_k,
        intermediate=intermediate,
        shared_intermediate=shared * intermediate,
        shared_gate=False,
        correction_bias=True,
        dense_layers=tuple(range(dense)),
    )


PRESETS: dict[str, ModelConfig] = {
    "deepseek-v3": ModelConfig(
        kind="deepseek_v3",
        vocab=129_280,
        hidden=7168,
        layers=61,
        heads=128,
        kv_heads=128,
        head_dim=192,
        intermediate=18_432,
        moe=_routed(256, 8, 2048, shared=1, dense=3),
        latent=_DEEPSEEK_LATENT,
    ),
    "kimi-k2": ModelConfig(
        kind="kimi_k2",
        vocab=163_840,
        hidden=7168,
        layers=61,
        heads=64,
        kv_heads=64,
        head_dim=192,
        intermediate=18_432,
        moe=_routed(384, 8, 2048, shared=1, dense=1),
        latent=_DEEPSEEK_LATENT,
    ),
    "moonlight-16b-a3b": ModelConfig(
        kind="deepseek_v3",
        vocab=163_840,
        hidden=2048,
        layers=27,
        heads=16,
        kv_heads=16,
        head_dim=192,
        intermediate=11_264,
        moe=_routed(64, 6, 1408, shared=2, dense=1),
        latent=Latent(kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
    ),
    "glm-z1-9b": ModelConfig(
        kind="glm4",
        vocab=151_552,
        hidden=4096,
        layers=40,
        heads=32,
        kv_heads=2,
        head_dim=128,
        intermediate=13_696,
        qkv_bias=True,
        fused_mlp=True,
        post_norms=True,
    ),
    "glm-4.7-flash": ModelConfig(
        kind="glm4_moe_lite",
        vocab=154_880,
        hidden=2048,
        layers=47,
        heads=20,
        kv_heads=20,
        head_dim=256,
        intermediate=10_240,
        moe=_routed(64, 4, 1536, shared=1, dense=1),
        latent=Latent(kv_rank=512, nope_dim=192, rope_dim=64, value_dim=256, q_rank=768),
    ),
    "glm-5": ModelConfig(
        kind="glm_moe_dsa",
        vocab=154_880,
        hidden=6144,
        layers=78,
        heads=64,
        kv_heads=64,
        head_dim=256,
        intermediate=12_288,
        moe=_routed(256, 8, 2048, shared=1, dense=3),
        latent=Latent(
            kv_rank=512,
            nope_dim=192,
            rope_dim=64,
            value_dim=256,
            q_rank=2048,
            index_heads=32,
            index_dim=128,
        ),
    ),
    "glm-4.5-air": ModelConfig(
        kind="glm4_moe",
        vocab=151_552,
        hidden=4096,
        layers=46,
        heads=96,
        kv_heads=8,
        head_dim=128,
        intermediate=10_944,
        qkv_bias=True,
        moe=_routed(128, 8, 1408, shared=1, dense=1),
    ),
    "qwen3-235b-a22b": ModelConfig(
        kind="qwen3_moe",
        vocab=151_936,
        hidden=4096,
        layers=94,
        heads=64,
        kv_heads=4,
        head_dim=128,
        intermediate=12_288,
        qk_norm=True,
        moe=Moe(experts=128, top_k=8, intermediate=1536),
    ),
    "qwen3-30b-a3b": ModelConfig(
        kind="qwen3_moe",
        vocab=151_936,
        hidden=2048,
        layers=48,
        heads=32,
        kv_heads=4,
        head_dim=128,
        intermediate=6144,
        qk_norm=True,
        moe=Moe(experts=128, top_k=8, intermediate=768),
    ),
    "llama-3.1-8b": ModelConfig(
        kind="llama",
        vocab=128_256,
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14_336,
    ),
}
"""By name. Multi-token-prediction layers are left out, as engines leave them out."""


def preset(name: str) -> ModelConfig:
    """A public model by name, in any case.

    Raises:
        UnsupportedModel: none has that name.
    """
    config = PRESETS.get(name.lower())
    if config is None:
        raise UnsupportedModel(
            f"no model is called {name!r}; use one of {', '.join(PRESETS)}, or the path of a "
            "config.json",
            model_type=None,
        )
    return config
