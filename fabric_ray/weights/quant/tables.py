"""What engines quantise of known models: linear projections and experts, nothing else."""

from __future__ import annotations

from fabric_ray.weights.quant.errors import UnsupportedFormat
from fabric_ray.weights.quant.formats import Format

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_LATENT_ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")

_FUSED_MLP = ("gate_up_proj", "down_proj")

_PROJECTIONS = (*_ATTENTION, *_MLP)
_LATENT_PROJECTIONS = ("q_proj", "o_proj", *_LATENT_ATTENTION, *_MLP)

QUANTISED: dict[str, tuple[str, ...]] = {
    "llama": _PROJECTIONS,
    "qwen2": _PROJECTIONS,
    "qwen3": _PROJECTIONS,
    "qwen2_moe": _PROJECTIONS,
    "qwen3_moe": _PROJECTIONS,
    "glm4": (*_ATTENTION, *_FUSED_MLP),
    "glm4_moe": _PROJECTIONS,
    "deepseek_v2": _LATENT_PROJECTIONS,
    "deepseek_v3": _LATENT_PROJECTIONS,
    "kimi_k2": _LATENT_PROJECTIONS,
}
"""By Hugging Face ``model_type``: modules whose weights vLLM and SGLang keep quantised. Norms,
embeddings, routers, ``lm_head`` and biases stay as they are."""


def linear_formats(family: str, fmt: Format) -> dict[str, Format]:
    """One format for all that engines quantise of a family.

    Raises:
        UnsupportedFormat: no list has that name.
    """
    if family not in QUANTISED:
        raise UnsupportedFormat(
            f"no list says what engines quantise of {family!r}; use one of {', '.join(QUANTISED)}, "
            "or write the patterns out"
        )
    return {f"*.{module}.weight": fmt for module in QUANTISED[family]}
