"""Models of a few thousand parameters, one for each way they can differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from msgspec import structs
from torch import Tensor

from fabric_ray.models import (
    Latent,
    Llama3Scaling,
    ModelConfig,
    Moe,
    Rope,
    Yarn,
    config_from_hf,
    parameter_dtype,
    parameter_shapes,
)
from fabric_ray.models.kinds import ARCHITECTURES


def small(kind: str, **changes: object) -> ModelConfig:
    fields: dict[str, object] = {
        "kind": kind,
        "vocab": 97,
        "hidden": 32,
        "layers": 3,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "intermediate": 48,
        "dtype": "float32",
    }
    return ModelConfig(**fields | changes)  # type: ignore[arg-type]


SMALL = {
    "llama": small("llama"),
    "llama-3.1": small(
        "llama",
        rope=Rope(500_000.0, Llama3Scaling(8.0, 1.0, 4.0, 16)),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    ),
    "qwen2": small("qwen2", qkv_bias=True, tied=True),
    "qwen3": small("qwen3", qk_norm=True, head_dim=16, tied=True, rope=Rope(1e6)),
    "qwen3-windowed": small("qwen3", qk_norm=True, window=7, windowed_layers=(0, 2)),
    "qwen3_moe": small(
        "qwen3_moe",
        qk_norm=True,
        head_dim=16,
        moe=Moe(experts=6, top_k=2, intermediate=24, dense_layers=(1,)),
    ),
    "qwen2_moe": small(
        "qwen2_moe",
        qkv_bias=True,
        moe=Moe(
            experts=6,
            top_k=3,
            intermediate=24,
            shared_intermediate=40,
            normalise=False,
            sparse_step=2,
        ),
    ),
}


_ROUTED = Moe(
    experts=6,
    top_k=2,
    intermediate=24,
    shared_intermediate=24,
    shared_gate=False,
    correction_bias=True,
    dense_layers=(0,),
)
_LATENT = Latent(kv_rank=20, nope_dim=8, rope_dim=4, value_dim=6, q_rank=28)

LAID_OUT = {
    "mistral": small("mistral"),
    "ministral": small("ministral"),
    "glm4": small("glm4", qkv_bias=True, fused_mlp=True, post_norms=True),
    "glm4_moe": small("glm4_moe", qk_norm=True, qkv_bias=True, moe=_ROUTED),
    "deepseek_v3": small(
        "deepseek_v3", kv_heads=4, head_dim=12, latent=_LATENT, moe=_ROUTED, layers=4
    ),
    "glm_moe_dsa": small(
        "glm_moe_dsa",
        kv_heads=4,
        head_dim=12,
        latent=structs.replace(_LATENT, index_heads=3, index_dim=5),
        moe=_ROUTED,
    ),
    "deepseek_v2-lite": small(
        "deepseek_v2",
        kv_heads=4,
        head_dim=12,
        latent=structs.replace(_LATENT, q_rank=0),
        moe=structs.replace(_ROUTED, correction_bias=False, shared_intermediate=48),
    ),
    "kimi_k2": small(
        "kimi_k2",
        kv_heads=4,
        head_dim=12,
        latent=_LATENT,
        moe=structs.replace(_ROUTED, dense_layers=(0, 2)),
    ),
}
"""Models of which no ``config.json`` can be written, and most of which are only laid out."""


def latent(**changes: object) -> ModelConfig:
    fields = {"kv_heads": 4, "head_dim": 12, "latent": _LATENT} | changes
    return small("deepseek_v2", **fields)


LATENT = {
    "mla": latent(),
    "mla-lite": latent(latent=structs.replace(_LATENT, q_rank=0)),
    "mla-moe": latent(
        moe=structs.replace(_ROUTED, shared_intermediate=48, correction_bias=False, normalise=False)
    ),
    "mla-yarn": latent(
        head_dim=16,
        latent=structs.replace(_LATENT, rope_dim=8),
        rope=Rope(100.0, yarn=Yarn(40.0, 64, mscale=0.707, mscale_all_dim=0.9)),
    ),
}
"""Models with latent attention that are computed; no ``config.json`` of them can be written."""

NESTED = {
    "gemma3": small("gemma3_text", nest="gemma3", qk_norm=True, post_norms=True, tied=True),
    "mistral3": small("ministral3", nest="mistral3"),
    "kimi_k25": structs.replace(LAID_OUT["kimi_k2"], nest="kimi_k25"),
}
"""Text models of models of text and images."""


def shrunk(config: ModelConfig) -> ModelConfig:
    """A published model with all its switches, in the sizes of :func:`small`."""
    sizes = small(config.kind)
    latent, moe = config.latent, config.moe
    if latent is not None:
        latent = structs.replace(
            _LATENT,
            q_rank=28 if latent.q_rank else 0,
            index_heads=3 if latent.index_heads else 0,
            index_dim=5 if latent.index_dim else 0,
            unindexed_layers=tuple(n for n in latent.unindexed_layers if n < sizes.layers),
        )
    if moe is not None:
        moe = structs.replace(
            moe,
            experts=6,
            top_k=2,
            intermediate=24,
            shared_intermediate=40 if moe.shared_intermediate else 0,
            dense_layers=tuple(n for n in moe.dense_layers if n < sizes.layers - 1),
        )
    return structs.replace(
        config,
        **{field: getattr(sizes, field) for field in ("vocab", "hidden", "layers", "heads")},
        kv_heads=sizes.heads if latent else sizes.kv_heads,
        head_dim=latent.nope_dim + latent.rope_dim if latent else sizes.head_dim,
        intermediate=sizes.intermediate,
        rope=sizes.rope,
        window=None,
        windowed_layers=(),
        linear=None,
        latent=latent,
        moe=moe,
        dtype=sizes.dtype,
    )


PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text())
"""Published models by name: billions of parameters, and the fields of ``config.json``."""


def _from_published() -> Iterator[tuple[str, ModelConfig]]:
    """One model of each architecture with a known layout that has no model above."""
    done = {config.kind for config in (SMALL | LAID_OUT | NESTED).values()}
    for published in PUBLISHED.values():
        config = config_from_hf(published["config"], quantised=True)
        if config.kind not in done and not ARCHITECTURES[config.kind].unknown_layout:
            done.add(config.kind)
            yield config.kind, shrunk(config)


FROM_PUBLISHED = dict(_from_published())
"""Models of the other architectures: a published ``config.json`` adds a new architecture here."""


def waves(config: ModelConfig) -> dict[str, Tensor]:
    """Weights from a formula, so that recorded results don't hang on a random generator."""
    out = {}
    for i, (name, shape) in enumerate(parameter_shapes(config).items()):
        count = torch.Size(shape).numel()
        phase = torch.arange(count, dtype=torch.float64) * (0.7 + 0.013 * (i % 29)) + i
        wave = 0.3 * phase.sin().reshape(shape)
        if name.endswith("norm.weight"):
            wave = 1 + wave
        out[name] = wave.to(getattr(torch, parameter_dtype(config, name)))
    return out


def some_tokens(config: ModelConfig, *, batch: int = 2, positions: int = 33) -> Tensor:
    return (torch.arange(batch * positions) * 31 % config.vocab).view(batch, positions)
