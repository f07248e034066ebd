"""Variants of a model that change what is computed from its parameters, but not their sizes.

They are read only of models that are computed. What isn't implemented is described, not raised:
a push or a plan of such a model needs sizes alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Any

import msgspec

from fabric_ray.decoding import converted
from fabric_ray.models.config import MAX_LAYERS, Llama3Scaling, Rope, Yarn
from fabric_ray.models.errors import InvalidConfig
from fabric_ray.models.kinds import COMPUTED, Architecture

_LAYER_TYPES = {"full_attention", "sliding_attention"}

_ROUTER: dict[str, tuple[Any, ...]] = {
    "routed_scaling_factor": (None, 1, 1.0),
    "n_group": (None, 1),
    "topk_group": (None, 1),
    "topk_method": (None, "greedy"),
    "scoring_func": (None, "softmax"),
    "norm_topk_prob": (None, False),
}
"""Values of DeepSeek's router fields under which the plain router is computed."""

_SUSPECT = re.compile(
    r"scal|multipl|_mult|mup_|_model_base|factor|cap$|capping|rope|rotary|ntk|logn|window|bias|norm"
    r"|attention|attn|(^|_)act(_|$)|activation|clip|limit|gate|router|routing|group|sink|alibi"
    r"|position_embed|residual|chunk|sparse|index|logit|softmax|temperature|shared|skip|share_|kv_"
    r"|causal|direction|nope|linearity|parallel|sandwich|pre_ln|post_ln|loop|recur"
)
"""What names of fields hold that may change arithmetic."""

_ALWAYS_ON = re.compile(r"causal|^(use_)?(rope|rotary(_emb\w*)?|(rms_?|pre_)?norm|residual)$")
"""Names of switches for what is always computed: off, they change arithmetic."""

_INERT = re.compile(
    r"dropout|pdrop|_drop$|flash|sdpa|_to_keep$|loss|_implementation$|^initializer_range|^max_position_embeddings$|^rms_norm_eps$"
    r"|^output_(attentions|hidden_states|router_logits|scores)$|^use_cache$"
    r"|_token(_\w*(id|index)\w*)?$|^image_"
    r"|^transformers_|^_name_or_path$|^auto_map$|^architectures$"
    r"|^router_jitter_noise$|quanti|compression"
)
"""Names of fields that change nothing when a model computes logits."""

_READ = frozenset(
    {
        *("hidden_act", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
    }
)
"""Fields that are read here."""


class _RopeFields(msgspec.Struct):
    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    partial_rotary_factor: float | None = None
    max_position_embeddings: int | None = None
    finetuned: bool | None = None


class _Unread(Exception):
    """A variant that isn't implemented; its text says which."""


class Variant(msgspec.Struct, frozen=True):
    """What a ``config.json`` says about arithmetic."""

    rope: Rope = Rope()
    windowed_layers: tuple[int, ...] = ()
    max_positions: int | None = None
    uncomputed: str = ""
    """What it asks for that isn't implemented, and a way out."""


def variant_of(
    architecture: Architecture,
    fields: dict[str, Any],
    layers: int,
    origin: str,
    read: Collection[str],
) -> Variant:
    """The variant that the fields of a ``config.json`` describe; nulls are left out of them.

    Args:
        architecture: of the model.
        fields: all of them.
        layers: how many there are.
        origin: names the file in errors.
        read: fields that sizes are read from.

    Raises:
        InvalidConfig: they contradict each other.
    """
    if architecture.name not in COMPUTED:
        return Variant()
    windowed = _windowed_layers(fields, layers, origin) if architecture.windows else ()
    try:
        _number("rms_norm_eps", fields.get("rms_norm_eps", 1e-6), least=0.0)
        if (act := fields.get("hidden_act", "silu")) != "silu":
            raise _Unread(f"activation {act!r}; only 'silu' is implemented")
        _check_layer_types(architecture, fields)
        rope = _rope(architecture, fields, origin)
        positions = _max_positions(fields)
        _check_router(architecture, fields)
        _check_others(fields, _READ.union(_ROUTER, read))
    except _Unread as unread:
        return Variant(windowed_layers=windowed, uncomputed=str(unread))
    return Variant(rope, windowed, positions)


def _number(field: str, value: Any, *, least: float) -> float:
    """A finite number above ``least``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _Unread(f"{field} {value!r}; give a number")
    if not least < value < math.inf:
        raise _Unread(f"{field} {value!r}; give a finite number above {least:g}")
    return float(value)


def _max_positions(fields: dict[str, Any]) -> int | None:
    """With YaRN and Llama 3.1's scaling the field is that of the scaled embeddings already."""
    value = fields.get("max_position_embeddings")
    if value is None:
        return None
    number = _number("max_position_embeddings", value, least=0.0)
    if number != int(number):
        raise _Unread(f"max_position_embeddings {value!r}; give a whole number")
    return int(number)


def _check_layer_types(architecture: Architecture, fields: dict[str, Any]) -> None:
    types = set(fields.get("layer_types", ()))
    if unknown := types - _LAYER_TYPES:
        raise _Unread(f"layers of type {min(unknown)!r}; only full and sliding ones are computed")
    windows = fields.get("use_sliding_window") or "sliding_attention" in types
    if windows and not architecture.windows:
        raise _Unread("sliding-window attention; only full attention is computed for it")
    if "sliding_attention" in types and not fields.get("use_sliding_window"):
        raise _Unread("layers of type 'sliding_attention' without use_sliding_window; set it")


def _windowed_layers(fields: dict[str, Any], layers: int, origin: str) -> tuple[int, ...]:
    """As Qwen's configurations say it."""
    if not fields.get("use_sliding_window") or fields.get("sliding_window") is None:
        return ()
    types = fields.get("layer_types")
    if types is None:
        first = fields.get("max_window_layers", 28)
        return tuple(layer for layer in range(min(layers, MAX_LAYERS)) if layer >= first)
    if len(types) != layers:
        raise InvalidConfig(
            f"{origin}: {len(types)} layer_types are given for {layers} layers; give one for each",
            field="layer_types",
        )
    return tuple(n for n, kind in enumerate(types) if kind == "sliding_attention")


def _rope(architecture: Architecture, fields: dict[str, Any], origin: str) -> Rope:
    said = [fields[k] for k in ("rope_parameters", "rope_scaling") if fields.get(k)]
    if len(said) == 2 and said[0] != said[1]:
        raise _Unread("rope_parameters and rope_scaling that differ; leave one of them out")
    raw = said[0] if said else {}
    if not isinstance(raw, dict):
        raise _Unread(f"rotary embeddings {raw!r}; give an object")
    if any(isinstance(value, dict) for value in raw.values()):
        raw = _of_all_layers(raw, fields)
    given = {k: v for k, v in raw.items() if v is not None}
    style = given.get("rope_type", given.get("type", "default"))
    # A field that isn't read may change the angles (RS-1).
    if unread := given.keys() - set(_RopeFields.__struct_fields__):
        raise _Unread(f"rotary embeddings of type {style!r} with {min(unread)!r}")
    try:
        rope = converted(given, _RopeFields)
    except msgspec.ValidationError as error:
        raise _Unread(f"rotary embeddings of type {style!r}: {error}") from None
    partial = rope.partial_rotary_factor
    if partial is None:
        partial = fields.get("partial_rotary_factor", 1)
    if partial != 1:
        raise _Unread(f"partial_rotary_factor {partial!r}; only 1 is computed")
    theta = fields.get("rope_theta", 10_000.0) if rope.rope_theta is None else rope.rope_theta
    theta = _number("rope_theta", theta, least=1.0)
    style = rope.rope_type or rope.type or "default"
    if style == "default":
        return Rope(theta)
    if style == "yarn" and architecture.latent:
        return Rope(theta, yarn=_yarn(rope, origin))
    if style == "llama3" and not architecture.latent:
        return Rope(theta, _llama3(rope))
    known = "'default' and 'yarn'" if architecture.latent else "'default' and 'llama3'"
    raise _Unread(f"rotary embeddings of type {style!r}; only {known} are computed for it")


def _of_all_layers(raw: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """The one description of rotary embeddings that all types of layers share."""
    used = set(fields.get("layer_types") or raw)
    found = [raw.get(kind) for kind in sorted(used)]
    first = found[0]
    if not isinstance(first, dict) or any(other != first for other in found):
        raise _Unread(
            f"rope_parameters by type of layer that differ ({', '.join(map(repr, sorted(raw)))}); "
            "only one for all layers is computed"
        )
    return first


def _llama3(rope: _RopeFields) -> Llama3Scaling:
    values = (
        rope.factor,
        rope.low_freq_factor,
        rope.high_freq_factor,
        rope.original_max_position_embeddings,
    )
    factor, low, high, original = values
    if factor is None or low is None or high is None or original is None:
        raise _Unread("rotary embeddings of type 'llama3' that lack a field; add it")
    for field in ("factor", "low_freq_factor", "original_max_position_embeddings"):
        _number(f"{field} of 'llama3'", getattr(rope, field), least=0.0)
    _number("high_freq_factor of 'llama3'", high, least=low)
    return Llama3Scaling(factor, low, high, original)


def _yarn(rope: _RopeFields, origin: str) -> Yarn:
    if rope.factor is None or rope.original_max_position_embeddings is None:
        raise _Unread(
            "rotary embeddings of type 'yarn' without factor or original_max_position_embeddings; "
            "add it"
        )
    if not 1 <= rope.factor < math.inf:
        raise InvalidConfig(
            f"{origin}: rotary embeddings are stretched by a factor of {rope.factor}; give 1 or "
            "more",
            field="rope_scaling",
        )
    return Yarn(
        rope.factor,
        rope.original_max_position_embeddings,
        beta_fast=rope.beta_fast or 32.0,
        beta_slow=rope.beta_slow or 1.0,
        mscale=rope.mscale or 0.0,
        mscale_all_dim=rope.mscale_all_dim or 0.0,
    )


def _check_router(architecture: Architecture, fields: dict[str, Any]) -> None:
    for field, neutral in _ROUTER.items() if architecture.experts else ():
        if field == "norm_topk_prob" and architecture.experts == "named":
            continue
        if fields.get(field) not in neutral:
            raise _Unread(f"{field} {fields[field]!r}; only {neutral[-1]!r} is computed")


def _check_others(fields: dict[str, Any], read: Collection[str]) -> None:
    """Refuses fields that nothing here reads and whose names say that they change arithmetic."""
    for field, value in sorted(fields.items()):
        if field in read or _INERT.search(field):
            continue
        if _SUSPECT.search(field) and not _inert(field, value):
            raise _Unread(f"{field} {value!r}, which isn't implemented")


def _inert(field: str, value: Any) -> bool:
    """Whether a switch is as a plain model has it, or a factor 1."""
    if _ALWAYS_ON.search(field):
        return value is None or value is True
    return value is not True and value in (None, False, 0, 1, "", [], {})
