"""Quantised weights: how they are recognised in files and in memory. No torch here."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from fabric_ray.models.errors import CheckpointError

PLAIN = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Dtypes whose elements are the values of a weight, by their name in safetensors headers."""

QUANTISATION_KEYS = ("quantization_config", "compression_config", "quantization")
"""Fields of ``config.json`` that say how weights are quantised."""

QUANTISATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files of ModelOpt, AutoGPTQ and AutoAWQ beside ``config.json`` that say it."""

_COMPANION = re.compile(
    r"(scales?(_inv|_?\d+)?|scaling_factors?|zero_points?|qweight|qzeros|g_idx|packed|blocks"
    r"|absmax|quant_map|SCB|weight_shape)$"
)
"""How names end of tensors without which a quantised weight has no values."""

_CACHE_SCALE = re.compile(r"(^|[._])(q|k|v|kv|prob)(_cache)?_scales?$")
"""Scales of quantised key/value caches, which change no weight."""

_ADVICE = "use the unquantised checkpoint, or dequantise it with its scales first"


def plain_dtype(dtype: object) -> bool:
    """Whether a dtype of torch, or its name, is that of plain floats."""
    return str(dtype).removeprefix("torch.") in PLAIN.values()


def check_plain(name: str, dtype: object, where: str) -> None:
    """Refuses a tensor whose elements aren't the values of a weight.

    Args:
        name: of the tensor.
        dtype: of torch, or the name of one.
        where: what holds the tensor, for the error.

    Raises:
        CheckpointError: names the tensor and its dtype.
    """
    if not plain_dtype(dtype):
        found = str(dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{where}: {name} is stored as {found}, expected {', '.join(PLAIN.values())}; a cast "
            f"without its scales gives other values: {_ADVICE}",
            path=where,
            parameter=name,
        )


def check_companions(names: Collection[str], stored: Iterable[str], where: str) -> None:
    """Refuses scales and packed values beside the weights that are read, or in their place.

    Args:
        names: of the weights that are read.
        stored: names of all tensors that there are.
        where: what holds them, for the error.

    Raises:
        CheckpointError: names the first weight and what belongs to it.
    """
    modules = {name.rpartition(".")[0]: name for name in sorted(names)}
    for name in stored:
        if name in names or not _COMPANION.search(name) or _CACHE_SCALE.search(name):
            continue
        # `w.weight_scale_inv`, `w.qweight`, `w.weight.absmax`; `experts.down_proj_scales`.
        module = name.rpartition(".")[0]
        weight = next((w for w in _candidates(name, module, modules) if w in names), None)
        if weight is not None:
            raise CheckpointError(
                f"{where}: {name} is stored beside {weight} and would be ignored, so that its "
                f"values would be wrong; {_ADVICE}",
                path=where,
                parameter=weight,
            )


def _candidates(name: str, module: str, modules: dict[str, str]) -> Iterable[str]:
    yield module
    yield _COMPANION.sub("", name).rstrip("._")
    if module in modules:
        yield modules[module]


def quantised_by(fields: dict[str, Any]) -> str | None:
    """The field of a ``config.json`` that says that weights are quantised, if one does."""
    for key in QUANTISATION_KEYS:
        said = fields.get(key)
        if said is not None and not (isinstance(said, dict) and _cache_alone(said)):
            return key
    return None


def _cache_alone(said: dict[str, Any]) -> bool:
    """Whether key/value caches are quantised and weights are not, as ModelOpt writes it."""
    return "quant_algo" in said and said["quant_algo"] is None
