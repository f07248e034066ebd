"""Hugging Face ``config.json``: read, checked, written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from fabric_ray.decoding import converted
from fabric_ray.models.config import (
    LIMIT,
    MAX_LAYERS,
    DTypeName,
    Latent,
    Linear,
    ModelConfig,
    Moe,
)
from fabric_ray.models.errors import InvalidConfig, UnsupportedModel
from fabric_ray.models.kinds import ARCHITECTURES, KINDS, NESTS, Architecture, Kind, Nest
from fabric_ray.models.stored import QUANTISATION_FILES, QUANTISATION_KEYS, quantised_by
from fabric_ray.models.variants import variant_of

CONFIG_FILE = "config.json"

_QUANTISED = (
    "quantised weights; use the unquantised checkpoint, or read the config alone with "
    "quantised=True"
)

Size = Annotated[int, msgspec.Meta(ge=1, lt=LIMIT)]


class _HfConfig(msgspec.Struct):
    """The keys that sizes follow from; others are ignored."""

    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    intermediate_size: Size | None = None
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    layer_types: list[str] | None = None
    full_attention_interval: Size = 4
    sliding_window: int | None = None
    use_sliding_window: bool = False
    max_window_layers: int = 28
    torch_dtype: str | None = None
    dtype: str | None = None
    num_experts: Size | None = None
    num_local_experts: Size | None = None
    num_experts_per_tok: Size | None = None
    moe_intermediate_size: Size | None = None
    shared_expert_intermediate_size: Size | None = None
    norm_topk_prob: bool = False
    decoder_sparse_step: Size = 1
    mlp_only_layers: list[int] | None = None
    n_routed_experts: Size | None = None
    n_shared_experts: int | None = None
    first_k_dense_replace: int = 0
    mlp_layer_types: list[str] | None = None
    moe_layer_freq: Size = 1
    topk_method: str | None = None
    use_qk_norm: bool = False
    q_lora_rank: Size | None = None
    kv_lora_rank: Size | None = None
    qk_nope_head_dim: Size | None = None
    qk_rope_head_dim: Size | None = None
    v_head_dim: Size | None = None
    index_n_heads: Size | None = None
    index_head_dim: Size | None = None
    index_topk_freq: Size = 1
    index_skip_topk_offset: int = 2
    index_topk_pattern: str | list[str] | None = None
    indexer_types: list[str] | None = None
    linear_conv_kernel_dim: Size = 4
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_num_key_heads: Size = 16
    linear_num_value_heads: Size = 32


def read_config(path: Path | str, *, quantised: bool = False) -> ModelConfig:
    """Reads a ``config.json``, or the one in a directory.

    Args:
        path: of the file, or of the directory that it lies in.
        quantised: whether the configuration of a quantised checkpoint will do. It is read as that
            of the model beneath, whose weights are in ``dtype``, unlike those in the files.

    Raises:
        UnsupportedModel: its model type or a variant it asks for isn't implemented.
        InvalidConfig: it is missing, no JSON, lacks a field or contradicts itself.
    """
    path = Path(path)
    if path.is_dir():
        path = path / CONFIG_FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidConfig(
            f"{path} can't be read ({error.strerror}); "
            "give the directory of a Hugging Face checkpoint",
            path=str(path),
        ) from error
    try:
        # As transformers does, this takes Infinity and NaN.
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(f"{path} is no JSON ({error}); restore it", path=str(path)) from error
    # RS-1: quantised weights are refused wherever the checkpoint says that they are.
    if not quantised:
        _refuse_quantisation_files(path)
    return config_from_hf(fields, origin=str(path), quantised=quantised)


def _refuse_quantisation_files(path: Path) -> None:
    """Those that say beside ``config.json`` what it doesn't."""
    for name in QUANTISATION_FILES:
        beside = path.with_name(name)
        if not beside.exists():
            continue
        try:
            said = json.loads(beside.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidConfig(
                f"{beside} can't be read ({error}); restore it", path=str(beside)
            ) from error
        if not isinstance(said, dict) or "quantization" not in said or quantised_by(said):
            raise UnsupportedModel(f"{beside}: {_QUANTISED}", model_type=None)


def config_from_hf(fields: Any, *, origin: str = "config", quantised: bool = False) -> ModelConfig:
    """The model that the fields of a ``config.json`` describe; ``origin`` names it in errors.

    Raises:
        UnsupportedModel: see :func:`read_config`.
        InvalidConfig: see :func:`read_config`.
    """
    fields, nest = _text_model(fields, origin)
    architecture = ARCHITECTURES[fields["model_type"]]
    kind = architecture.name
    given = architecture.defaults | fields
    fields = {key: value for key, value in given.items() if value is not None}
    try:
        raw = converted(fields, _HfConfig)
    except msgspec.ValidationError as error:
        raise InvalidConfig(
            f"{origin}: {str(error)[:1].lower()}{str(error)[1:]}; correct the field"
        ) from error
    if quantised_by(fields) and not quantised:
        raise UnsupportedModel(f"{origin}: {kind} with {_QUANTISED}", model_type=kind)
    variant = variant_of(
        architecture, fields, raw.num_hidden_layers, origin, _HfConfig.__struct_fields__
    )
    latent = _latent(architecture, raw, origin)
    bias = raw.attention_bias
    moe = _moe(architecture, raw, origin)
    return ModelConfig(
        kind=kind,
        vocab=raw.vocab_size,
        hidden=raw.hidden_size,
        layers=raw.num_hidden_layers,
        heads=raw.num_attention_heads,
        kv_heads=(None if latent else raw.num_key_value_heads) or raw.num_attention_heads,
        head_dim=(latent.nope_dim + latent.rope_dim if latent else _head_dim(raw, origin)),
        intermediate=_intermediate(architecture, raw, moe, origin),
        norm_eps=raw.rms_norm_eps,
        rope=variant.rope,
        tied=raw.tie_word_embeddings,
        qk_norm=_switch(architecture.qk_norm, raw.use_qk_norm),
        qkv_bias=_switch(architecture.qkv_bias, bias),
        out_bias=architecture.out_bias and bias,
        mlp_bias=architecture.mlp_bias and raw.mlp_bias,
        fused_mlp=architecture.fused_mlp,
        post_norms=bool(architecture.added_norms),
        moe=moe,
        latent=latent,
        window=raw.sliding_window if variant.windowed_layers else None,
        windowed_layers=variant.windowed_layers,
        linear=_linear(architecture, raw, origin),
        gate=architecture.gate,
        sinks=architecture.sinks,
        dtype=_dtype(kind, raw, origin),
        max_positions=variant.max_positions,
        nest=nest,
        uncomputed=variant.uncomputed,
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The fields of a ``config.json`` that :func:`config_from_hf` reads back to the same.

    Raises:
        UnsupportedModel: models of this kind aren't computed, or have latent attention, so that
            the fields would be incomplete.
    """
    architecture = ARCHITECTURES[config.kind]
    if not architecture.computed or architecture.latent or config.uncomputed or config.nest:
        raise UnsupportedModel(
            f"a config.json of model type {config.kind!r} can't be written; use the one that the "
            "model came with",
            model_type=config.kind,
        )
    windowed = [a.name for a in ARCHITECTURES.values() if a.windows]
    if config.window is not None and not architecture.windows:
        raise UnsupportedModel(
            f"a config.json can't say that a model of type {config.kind!r} has sliding windows; "
            f"use one of {', '.join(windowed)}",
            model_type=config.kind,
        )
    rope: dict[str, Any] = {"rope_theta": config.rope.theta}
    if (scaling := config.rope.scaling) is not None:
        rope["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_positions,
        }
    fields: dict[str, Any] = {
        "architectures": [architecture.computed],
        "model_type": config.kind,
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "attention_bias": config.out_bias,
        "mlp_bias": config.mlp_bias,
        "torch_dtype": config.dtype,
        **rope,
    }
    if config.max_positions is not None:
        fields["max_position_embeddings"] = config.max_positions
    if config.window is not None:
        fields |= {
            "use_sliding_window": True,
            "sliding_window": config.window,
            "layer_types": [
                "full_attention" if config.window_of(layer) is None else "sliding_attention"
                for layer in range(config.layers)
            ],
        }
    if config.moe is not None:
        fields |= {
            "num_experts": config.moe.experts,
            "num_experts_per_tok": config.moe.top_k,
            "moe_intermediate_size": config.moe.intermediate,
            "norm_topk_prob": config.moe.normalise,
            "decoder_sparse_step": config.moe.sparse_step,
            "mlp_only_layers": list(config.moe.dense_layers),
        }
        if config.moe.shared_intermediate:
            fields["shared_expert_intermediate_size"] = config.moe.shared_intermediate
    return fields


def _text_model(fields: Any, origin: str) -> tuple[dict[str, Any], Nest]:
    """The fields of the model that reads text, and what it is a part of."""
    if not isinstance(fields, dict):
        fields = {}
    model_type = fields.get("model_type")
    if model_type in KINDS:
        return fields, ""
    nest = next((n for n in get_args(Nest) if n and n == model_type), None)
    text = fields.get("text_config")
    if nest is None or not isinstance(text, dict):
        nested = (
            f" with a text_config of type {text.get('model_type')!r}"
            if isinstance(text, dict)
            else ""
        )
        raise UnsupportedModel(
            f"{origin}: model type {model_type!r}{nested} isn't supported; use one of "
            f"{', '.join(KINDS)}, or a text_config in one of {', '.join(NESTS)}",
            model_type=model_type,
        )
    shared = ("dtype", "torch_dtype", "tie_word_embeddings", *QUANTISATION_KEYS)
    around = {key: fields[key] for key in shared if fields.get(key) is not None}
    around["model_type"] = NESTS[nest]
    text = around | {k: v for k, v in text.items() if v is not None or k not in around}
    if text["model_type"] not in KINDS:
        raise UnsupportedModel(
            f"{origin}: text_config of type {text['model_type']!r} isn't supported; use one of "
            f"{', '.join(KINDS)}",
            model_type=text["model_type"],
        )
    return text, nest


def _switch(rule: Literal["always", "field", "never"], field: bool) -> bool:
    return rule == "always" or (rule == "field" and field)


def _head_dim(raw: _HfConfig, origin: str) -> int:
    if raw.head_dim is not None:
        return raw.head_dim
    if raw.hidden_size % raw.num_attention_heads:
        raise InvalidConfig(
            f"{origin}: hidden size {raw.hidden_size} isn't a multiple of "
            f"{raw.num_attention_heads} heads; give head_dim",
            field="head_dim",
        )
    return raw.hidden_size // raw.num_attention_heads


def _intermediate(architecture: Architecture, raw: _HfConfig, moe: Moe | None, origin: str) -> int:
    if raw.intermediate_size is not None:
        return raw.intermediate_size
    if moe is not None and all(map(moe.in_layer, range(raw.num_hidden_layers))):
        return moe.intermediate  # no layer has a dense MLP
    return _needed(architecture.name, origin, {"intermediate_size": None})[0]


def _check_types(
    field: str, types: list[str], known: tuple[str, str], raw: _HfConfig, origin: str
) -> None:
    """Refuses anything but one of the known types for each layer."""
    if set(types).difference(known) or len(types) != raw.num_hidden_layers:
        raise InvalidConfig(
            f"{origin}: {len(types)} {field} ({', '.join(sorted(set(types)))}) are given for "
            f"{raw.num_hidden_layers} layers; give {' or '.join(known)} for each",
            field=field,
        )


def _linear(architecture: Architecture, raw: _HfConfig, origin: str) -> Linear | None:
    if not architecture.linear:
        return None
    layers = range(min(raw.num_hidden_layers, MAX_LAYERS))
    types = raw.layer_types or [
        "linear_attention" if (layer + 1) % raw.full_attention_interval else "full_attention"
        for layer in layers
    ]
    _check_types("layer_types", types, ("linear_attention", "full_attention"), raw, origin)
    return Linear(
        layers=tuple(layer for layer in layers if types[layer] == "linear_attention"),
        key_heads=raw.linear_num_key_heads,
        key_dim=raw.linear_key_head_dim,
        value_heads=raw.linear_num_value_heads,
        value_dim=raw.linear_value_head_dim,
        kernel=raw.linear_conv_kernel_dim,
        fused=architecture.linear == "fused",
    )


def _latent(architecture: Architecture, raw: _HfConfig, origin: str) -> Latent | None:
    if not architecture.latent:
        return None
    kind = architecture.name
    fields = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = {field: getattr(raw, field) for field in fields}
    kv_rank, nope_dim, rope_dim, value_dim = _needed(kind, origin, sizes)
    latent = Latent(kv_rank, nope_dim, rope_dim, value_dim, q_rank=raw.q_lora_rank or 0)
    if not architecture.indexer:
        return latent
    indexer = {"index_n_heads": raw.index_n_heads, "index_head_dim": raw.index_head_dim}
    heads, dim = _needed(kind, origin, indexer)
    return msgspec.structs.replace(
        latent, index_heads=heads, index_dim=dim, unindexed_layers=_unindexed_layers(raw, origin)
    )


def _unindexed_layers(raw: _HfConfig, origin: str) -> tuple[int, ...]:
    layers = range(min(raw.num_hidden_layers, MAX_LAYERS))
    types = raw.indexer_types or raw.index_topk_pattern
    if types is None:
        offset = raw.index_skip_topk_offset - 1
        return tuple(n for n in layers if max(n - offset, 0) % raw.index_topk_freq)
    kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in types]
    _check_types("indexer_types", kinds, ("full", "shared"), raw, origin)
    return tuple(n for n in layers if kinds[n] == "shared")


def _routed(architecture: Architecture, raw: _HfConfig, origin: str) -> Moe:
    """Experts as DeepSeek and GLM have them."""
    fields = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    sizes = {field: getattr(raw, field) for field in fields}
    experts, top_k, intermediate = _needed(architecture.name, origin, sizes)
    method = raw.topk_method or architecture.topk_method
    return Moe(
        experts=experts,
        top_k=top_k,
        intermediate=intermediate,
        shared_intermediate=intermediate * (raw.n_shared_experts or 0),
        shared_gate=False,
        correction_bias=method == "noaux_tc",
        normalise=raw.norm_topk_prob,
        dense_layers=_dense_layers(raw, origin),
    )


def _dense_layers(raw: _HfConfig, origin: str) -> tuple[int, ...]:
    layers = range(min(raw.num_hidden_layers, MAX_LAYERS))
    types = raw.mlp_layer_types
    if types is None:
        first, step = raw.first_k_dense_replace, raw.moe_layer_freq
        return tuple(layer for layer in layers if layer < first or layer % step)
    _check_types("mlp_layer_types", types, ("dense", "sparse"), raw, origin)
    return tuple(layer for layer in layers if types[layer] == "dense")


def _moe(architecture: Architecture, raw: _HfConfig, origin: str) -> Moe | None:
    if not architecture.experts:
        return None
    kind = architecture.name
    if architecture.experts == "routed":
        return _routed(architecture, raw, origin)
    stacked = architecture.experts == "stacked"
    width = raw.intermediate_size if stacked else raw.moe_intermediate_size
    needed = {
        "num_experts": raw.num_experts or raw.num_local_experts,
        "num_experts_per_tok": raw.num_experts_per_tok,
        "intermediate_size" if stacked else "moe_intermediate_size": width,
    }
    if architecture.shared_gate:
        needed["shared_expert_intermediate_size"] = raw.shared_expert_intermediate_size
    experts, top_k, intermediate, *shared = _needed(kind, origin, needed)
    return Moe(
        experts=experts,
        top_k=top_k,
        intermediate=intermediate,
        shared_intermediate=shared[0] if shared else 0,
        normalise=raw.norm_topk_prob,
        sparse_step=raw.decoder_sparse_step,
        dense_layers=tuple(raw.mlp_only_layers or ()),
        stacked=stacked,
    )


def _needed(kind: Kind, origin: str, fields: dict[str, int | None]) -> list[int]:
    """The values, all of which must be there."""
    for field, value in fields.items():
        if value is None:
            raise InvalidConfig(f"{origin}: {kind} needs {field}; add it", field=field)
    return [value or 0 for value in fields.values()]


def _dtype(kind: Kind, raw: _HfConfig, origin: str) -> DTypeName:
    asked = raw.torch_dtype or raw.dtype or "float32"
    for name in get_args(DTypeName):
        if asked == name:
            known: DTypeName = name
            return known
    raise UnsupportedModel(
        f"{origin}: dtype {asked!r} isn't supported; use {', '.join(get_args(DTypeName))}",
        model_type=kind,
    )
