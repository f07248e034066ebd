"""Models that are small enough to be computed anywhere, and whose vocabulary is bytes."""

from __future__ import annotations

from typing import Any

from fabric_ray.inference.errors import InferenceError
from fabric_ray.models.config import Latent, ModelConfig, Moe
from fabric_ray.models.kinds import Kind

BYTE_VOCAB = 258
"""256 bytes, then begin and end of a text."""


def _tiny(kind: Kind, **changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "vocab": BYTE_VOCAB,
        "hidden": 64,
        "layers": 4,
        "heads": 8,
        "kv_heads": 4,
        "head_dim": 8,
        "intermediate": 128,
        "dtype": "float32",
    }
    return ModelConfig(kind, **fields | changes)


TINY: dict[str, ModelConfig] = {
    "tiny-llama": _tiny("llama"),
    "tiny-qwen3": _tiny("qwen3", kv_heads=2, head_dim=16, qk_norm=True, tied=True),
    "tiny-qwen3-moe": _tiny(
        "qwen3_moe",
        layers=3,
        kv_heads=2,
        head_dim=16,
        qk_norm=True,
        moe=Moe(experts=8, top_k=2, intermediate=32),
    ),
    "tiny-mla": _tiny(
        "deepseek_v2",
        layers=3,
        kv_heads=8,
        head_dim=24,
        latent=Latent(kv_rank=32, nope_dim=16, rope_dim=8, value_dim=16, q_rank=48),
    ),
    "tiny-hybrid": _tiny("qwen3", qk_norm=True, window=24, windowed_layers=(0, 1, 3)),
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
