"""Models that are small enough to be computed anywhere, and whose vocabulary is bytes."""

from __future__ import annotations

from fabric_ray.inference.errors import InferenceError
from fabric_ray.models.config import Latent, ModelConfig, Moe

BYTE_VOCAB = 258
"""256 bytes, then begin and end of a text."""

TINY: dict[str, ModelConfig] = {
    "tiny-llama": ModelConfig(
        kind="llama",
        vocab=BYTE_VOCAB,
        hidden=64,
        layers=4,
        heads=8,
        kv_heads=4,
        head_dim=8,
        intermediate=128,
        dtype="float32",
    ),
    "tiny-qwen3": ModelConfig(
        kind="qwen3",
        vocab=BYTE_VOCAB,
        hidden=64,
        layers=4,
        heads=8,
        kv_heads=2,
        head_dim=16,
        intermediate=128,
        qk_norm=True,
        tied=True,
        dtype="float32",
    ),
    "tiny-qwen3-moe": ModelConfig(
        kind="qwen3_moe",
        vocab=BYTE_VOCAB,
        hidden=64,
        layers=3,
        heads=8,
        kv_heads=2,
        head_dim=16,
        intermediate=128,
        qk_norm=True,
        moe=Moe(experts=8, top_k=2, intermediate=32),
        dtype="float32",
    ),
    "tiny-mla": ModelConfig(
        kind="deepseek_v2",
        vocab=BYTE_VOCAB,
        hidden=64,
        layers=3,
        heads=8,
        kv_heads=8,
        head_dim=24,
        intermediate=128,
        latent=Latent(kv_rank=32, nope_dim=16, rope_dim=8, value_dim=16, q_rank=48),
        dtype="float32",
    ),
    "tiny-hybrid": ModelConfig(
        kind="qwen3",
        vocab=BYTE_VOCAB,
        hidden=64,
        layers=4,
        heads=8,
        kv_heads=4,
        head_dim=8,
        intermediate=128,
        qk_norm=True,
        window=24,
        windowed_layers=(0, 1, 3),
        dtype="float32",
    ),
}
"""By name: grouped queries, norms of queries and keys, experts, latents, sliding windows."""


def tiny(name: str) -> ModelConfig:
    """One of the small models, with or without ``tiny-`` before its name.

    Raises:
        InferenceError: none has that name.
    """
    config = TINY.get(name) or TINY.get(f"tiny-{name}")
    if config is None:
        raise InferenceError(f"no small model is called {name!r}; use one of {', '.join(TINY)}")
    return config
