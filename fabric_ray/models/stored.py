"""Quantised weights: how they are recognised in files and in memory. No torch here."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from fabric_ray.models.errors import CheckpointError

PLAIN = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Dtypes whose elements are the values of a weight, by their name in safetensors headers."""

HEAD = "lm_head.weight"

QUANTISATION_KEYS = ("quantization_config", "compression_config", "quantization")
"""Fields of ``config.json`` that say how weights are quantised."""

QUANTISATION_FILES = (
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
)
"""Files of ModelOpt, AutoGPTQ, AutoAWQ and AutoRound beside ``config.json`` that say it."""

_COMPANION = re.compile(
    r"(scales?(_inv|_?\d+)?|scaling_factors?|zero_points?|qweight|qzeros|g_idx|packed|blocks"
    r"|absmax|quant_map|SCB|weight_shape)$"
)
"""How names end of tensors without which a quantised weight has no values."""

_CACHE_SCALE = re.compile(r"(^|[._])(q|k|v|kv|prob)(_cache)?_scales?$|_proj\.output_scale$")
"""Scales of quantised key/value caches, which change no weight."""

_LAYER = re.compile(r"^(.*\.)?layers\.\d+\.")

_NO_ARITHMETIC = re.compile(r"(^|\.)(rotary_emb|indexer)\.|(^|[._])masks?$|position_ids$")
"""Tensors of a layer that follow from its configuration, or that not all layers use."""

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


class PlainTensors(Mapping[str, Any]):
    """Full tensors by name. One whose elements aren't the values of a weight is refused when it is
    read, before it is fused with others: torch promotes integers to their dtype (RS-1).

    Args:
        tensors: by name.
        names: of the weights that are read.
        where: what holds them, for errors.

    Raises:
        CheckpointError: as :func:`check_plain` and :func:`check_companions`.
    """

    def __init__(self, tensors: Mapping[str, Any], names: Collection[str], where: str) -> None:
        check_companions(names, tensors, where)
        check_tied(names, tensors, where, lambda a, b: bool((tensors[a] == tensors[b]).all()))
        self._tensors, self._where = tensors, where

    def __getitem__(self, name: str) -> Any:
        tensor = self._tensors[name]
        check_plain(name, tensor.dtype, self._where)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def check_companions(names: Collection[str], stored: Iterable[str], where: str) -> None:
    """Refuses what is stored for a weight that is read and would be ignored: its scales, packed
    values in its place, a bias, adapter or norm that the configuration doesn't have.

    Args:
        names: of the weights that are read.
        stored: names of all tensors that there are.
        where: what holds them, for the error.

    Raises:
        CheckpointError: names the first weight or layer and what belongs to it.
    """
    modules = {name.rpartition(".")[0]: name for name in sorted(names)}
    layers = {at[0] for name in names if (at := _LAYER.match(name))}
    for name in stored:
        if name in names or _CACHE_SCALE.search(name):
            continue
        scales = bool(_COMPANION.search(name))
        owner = next((w for w in _owners(name, modules, scales) if w in names), None)
        at = _LAYER.match(name)
        if owner is None and at and at[0] in layers and not _NO_ARITHMETIC.search(name):
            owner = at[0].removesuffix(".")
        if owner is not None:
            advice = (
                _ADVICE if scales else "use the config of this checkpoint, or merge or remove it"
            )
            raise CheckpointError(
                f"{where}: {name} is stored with {owner} and would be ignored, which gives other "
                f"results; {advice}",
                path=where,
                parameter=owner,
            )


def check_tied(
    names: Collection[str],
    stored: Collection[str],
    where: str,
    same: Callable[[str, str], bool],
) -> None:
    """Refuses a head that is stored and isn't the embedding, which is read in its place.

    Args:
        names: of the weights that are read.
        stored: names of all tensors that there are.
        where: what holds them, for the error.
        same: compares two tensors by their names.

    Raises:
        CheckpointError: they differ.
    """
    if HEAD in names or HEAD not in stored:
        return
    embedding = next(name for name in names if name.endswith("embed_tokens.weight"))
    if not same(HEAD, embedding):
        raise CheckpointError(
            f"{where}: {HEAD} differs from {embedding}, and would be ignored, as the config says "
            "tie_word_embeddings; set that to false, or remove the tensor",
            path=where,
            parameter=HEAD,
        )


def _owners(name: str, modules: Mapping[str, str], scales: bool) -> Iterator[str]:
    """Weights that a tensor may belong to, by its name."""
    if scales:
        # `experts.down_proj_scales` of `experts.down_proj` or of `experts.down_proj.weight`.
        stem = _COMPANION.sub("", name).rstrip("._")
        yield from (stem, f"{stem}.weight")
    module = name.rpartition(".")[0]
    if module in modules:
        yield modules[module]
    while module:
        # `q_proj.weight.absmax`, `q_proj.input_quantizer.scale`, `q_proj.lora_A.weight`.
        yield from (module, f"{module}.weight")
        module = module.rpartition(".")[0]


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
