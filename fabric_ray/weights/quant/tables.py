"""What engines quantise of known models: linear projections and experts, nothing else."""

from __future__ import annotations

from fabric_ray.models.kinds import ARCHITECTURES
from fabric_ray.weights.quant.errors import UnsupportedFormat
from fabric_ray.weights.quant.formats import Format

QUANTISED: dict[str, tuple[str, ...]] = {
    a.name: a.quantised for a in ARCHITECTURES.values() if a.quantised
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
