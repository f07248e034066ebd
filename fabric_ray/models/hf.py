"""Hugging Face ``config.json``: read, checked, written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec

from fabric_ray.decoding import converted
from fabric_ray.models.config import (
    COMPUTED,
    KINDS,
    LIMIT,
    MAX_LAYERS,
    DTypeName,
    Kind,
    Latent,
    Llama3Scaling,
    ModelConfig,
    Moe,
    Rope,
    Yarn,
)
from fabric_ray.models.errors import InvalidConfig, UnsupportedModel
from fabric_ray.models.stored import QUANTISATION_FILES, quantised_by

CONFIG_FILE = "config.json"

_ARCHITECTURES: dict[Kind, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}

_WINDOWED: tuple[Kind, ...] = ("qwen2", "qwen3")
"""Kinds some layers of which may have a sliding window."""
_INDEXED = ("deepseek_v32", "glm_moe_dsa")
"""Kinds that choose what is attended to."""
_LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", *_INDEXED)
_ROUTED = (*_LATENT, "glm4_moe")
"""Kinds whose shared experts have no gate."""

_QUANTISED = (
    "quantised weights; use the unquantised checkpoint, or read the config alone with "
    "quantised=True"
)

Size = Annotated[int, msgspec.Meta(ge=1, lt=LIMIT)]


class _RopeFields(msgspec.Struct):
    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: Size = 8192
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


class _HfConfig(msgspec.Struct):
    """The keys that change what is computed; others are ignored."""

    model_type: str
    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    intermediate_size: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float | None = None
    rope_scaling: _RopeFields | None = None
    rope_parameters: _RopeFields | None = None
    use_sliding_window: bool | None = None
    sliding_window: Size | None = None
    max_window_layers: int = 28
    layer_types: list[str] | None = None
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
        fields = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise InvalidConfig(f"{path} is no JSON ({error}); restore it", path=str(path)) from error
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
    kind = _kind(fields, origin)
    try:
        raw = converted(fields, _HfConfig)
    except msgspec.ValidationError as error:
        raise InvalidConfig(
            f"{origin}: {str(error)[:1].lower()}{str(error)[1:]}; correct the field"
        ) from error
    _refuse_variants(fields, raw, origin, quantised)
    latent = _latent(kind, raw, origin)
    windowed = _windowed_layers(raw, origin) if kind in _WINDOWED else ()
    return ModelConfig(
        kind=kind,
        vocab=raw.vocab_size,
        hidden=raw.hidden_size,
        layers=raw.num_hidden_layers,
        heads=raw.num_attention_heads,
        kv_heads=(None if latent else raw.num_key_value_heads) or raw.num_attention_heads,
        head_dim=latent.nope_dim + latent.rope_dim if latent else _head_dim(kind, raw, origin),
        intermediate=raw.intermediate_size,
        norm_eps=raw.rms_norm_eps,
        rope=_rope(kind, raw, origin),
        tied=raw.tie_word_embeddings,
        qk_norm=kind in ("qwen3", "qwen3_moe") or (kind == "glm4_moe" and raw.use_qk_norm),
        qkv_bias=kind in ("qwen2", "qwen2_moe") or raw.attention_bias,
        out_bias=kind not in ("qwen2", "qwen2_moe", "glm4", "glm4_moe") and raw.attention_bias,
        mlp_bias=kind == "llama" and raw.mlp_bias,
        fused_mlp=kind == "glm4",
        post_norms=kind == "glm4",
        moe=_routed(kind, raw, origin) if kind in _ROUTED else _moe(kind, raw, origin),
        latent=latent,
        window=raw.sliding_window if windowed else None,
        windowed_layers=windowed,
        dtype=_dtype(raw, origin),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The fields of a ``config.json`` that :func:`config_from_hf` reads back to the same.

    Raises:
        UnsupportedModel: of models of this kind only the parameters are known, not how to compute
            them, so that the fields would be incomplete.
    """
    if config.kind not in COMPUTED:
        raise UnsupportedModel(
            f"a config.json of model type {config.kind!r} can't be written; use the one that the "
            "model came with",
            model_type=config.kind,
        )
    if config.window is not None and config.kind not in _WINDOWED:
        raise UnsupportedModel(
            f"a config.json can't say that a model of type {config.kind!r} has sliding windows; "
            f"use one of {', '.join(_WINDOWED)}",
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
        "architectures": [_ARCHITECTURES[config.kind]],
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


def _kind(fields: Any, origin: str) -> Kind:
    model_type = fields.get("model_type") if isinstance(fields, dict) else None
    for kind in KINDS:
        if kind == model_type:
            return kind
    raise UnsupportedModel(
        f"{origin}: model type {model_type!r} isn't supported; use one of {', '.join(KINDS)}",
        model_type=model_type,
    )


def _refuse_variants(fields: dict[str, Any], raw: _HfConfig, origin: str, quantised: bool) -> None:
    problem = None
    if quantised_by(fields) and not quantised:
        problem = _QUANTISED
    elif raw.hidden_act != "silu":
        problem = f"activation {raw.hidden_act!r}; only 'silu' is implemented"
    elif raw.model_type in _WINDOWED:
        unknown = set(raw.layer_types or ()) - {"full_attention", "sliding_attention"}
        if unknown:
            problem = f"layers of type {min(unknown)!r}; only full and sliding ones are implemented"
    elif raw.use_sliding_window or (raw.layer_types and set(raw.layer_types) != {"full_attention"}):
        problem = (
            "sliding-window attention; only full attention is implemented for it, windows for "
            f"{' and '.join(_WINDOWED)}"
        )
    if problem is not None:
        raise UnsupportedModel(
            f"{origin}: {raw.model_type} with {problem}", model_type=raw.model_type
        )


def _windowed_layers(raw: _HfConfig, origin: str) -> tuple[int, ...]:
    """As Qwen's configurations say it."""
    if not raw.use_sliding_window or raw.sliding_window is None:
        return ()
    if raw.layer_types is None:
        layers = range(min(raw.num_hidden_layers, MAX_LAYERS))
        return tuple(layer for layer in layers if layer >= raw.max_window_layers)
    if len(raw.layer_types) != raw.num_hidden_layers:
        raise InvalidConfig(
            f"{origin}: {len(raw.layer_types)} layer_types are given for {raw.num_hidden_layers} "
            "layers; give one for each",
            field="layer_types",
        )
    return tuple(n for n, kind in enumerate(raw.layer_types) if kind == "sliding_attention")


def _head_dim(kind: Kind, raw: _HfConfig, origin: str) -> int:
    if raw.head_dim is not None:
        return raw.head_dim
    if kind in ("qwen3", "qwen3_moe", "glm4"):
        return 128
    if raw.hidden_size % raw.num_attention_heads:
        raise InvalidConfig(
            f"{origin}: hidden size {raw.hidden_size} isn't a multiple of "
            f"{raw.num_attention_heads} heads; give head_dim",
            field="head_dim",
        )
    return raw.hidden_size // raw.num_attention_heads


def _rope(kind: Kind, raw: _HfConfig, origin: str) -> Rope:
    fields = raw.rope_parameters or raw.rope_scaling or _RopeFields()
    theta = fields.rope_theta or raw.rope_theta or 10_000.0
    rope_type = fields.rope_type or fields.type or "default"
    if kind == "deepseek_v2" and rope_type == "yarn":
        return Rope(theta, yarn=_yarn(fields, origin))
    # Scaling changes what is computed, not what is held.
    if rope_type == "default" or kind not in COMPUTED:
        return Rope(theta)
    if rope_type != "llama3":
        raise UnsupportedModel(
            f"{origin}: rotary embeddings of type {rope_type!r} aren't supported; "
            "use 'default' or 'llama3'",
            model_type=raw.model_type,
        )
    scaling = Llama3Scaling(
        fields.factor,
        fields.low_freq_factor,
        fields.high_freq_factor,
        fields.original_max_position_embeddings,
    )
    return Rope(theta, scaling)


def _yarn(fields: _RopeFields, origin: str) -> Yarn:
    if not 1 <= fields.factor < math.inf:
        raise InvalidConfig(
            f"{origin}: rotary embeddings are stretched by a factor of {fields.factor}; give 1 or "
            "more",
            field="rope_scaling",
        )
    return Yarn(
        fields.factor,
        fields.original_max_position_embeddings,
        beta_fast=fields.beta_fast or 32.0,
        beta_slow=fields.beta_slow or 1.0,
        mscale=fields.mscale or 0.0,
        mscale_all_dim=fields.mscale_all_dim or 0.0,
    )


def _latent(kind: Kind, raw: _HfConfig, origin: str) -> Latent | None:
    if kind not in _LATENT:
        return None
    fields = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = {field: getattr(raw, field) for field in fields}
    kv_rank, nope_dim, rope_dim, value_dim = _needed(kind, origin, sizes)
    latent = Latent(kv_rank, nope_dim, rope_dim, value_dim, q_rank=raw.q_lora_rank or 0)
    if kind not in _INDEXED:
        return latent
    indexer = {"index_n_heads": raw.index_n_heads, "index_head_dim": raw.index_head_dim}
    heads, dim = _needed(kind, origin, indexer)
    return msgspec.structs.replace(latent, index_heads=heads, index_dim=dim)


def _routed(kind: Kind, raw: _HfConfig, origin: str) -> Moe:
    """Experts as DeepSeek and GLM have them."""
    fields = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    sizes = {field: getattr(raw, field) for field in fields}
    experts, top_k, intermediate = _needed(kind, origin, sizes)
    method = raw.topk_method or ("greedy" if kind == "deepseek_v2" else "noaux_tc")
    return Moe(
        experts=experts,
        top_k=top_k,
        intermediate=intermediate,
        shared_intermediate=intermediate * (raw.n_shared_experts or 0),
        shared_gate=False,
        correction_bias=method == "noaux_tc",
        normalise=raw.norm_topk_prob,
        dense_layers=tuple(
            layer
            for layer in range(min(raw.num_hidden_layers, MAX_LAYERS))
            if layer < raw.first_k_dense_replace or layer % raw.moe_layer_freq
        ),
    )


def _moe(kind: Kind, raw: _HfConfig, origin: str) -> Moe | None:
    if kind not in ("qwen2_moe", "qwen3_moe"):
        return None
    needed = {
        "num_experts": raw.num_experts or raw.num_local_experts,
        "num_experts_per_tok": raw.num_experts_per_tok,
        "moe_intermediate_size": raw.moe_intermediate_size,
    }
    if kind == "qwen2_moe":
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
    )


def _needed(kind: Kind, origin: str, fields: dict[str, int | None]) -> list[int]:
    """The values, all of which must be there."""
    for field, value in fields.items():
        if value is None:
            raise InvalidConfig(f"{origin}: {kind} needs {field}; add it", field=field)
    return [value or 0 for value in fields.values()]


def _dtype(raw: _HfConfig, origin: str) -> DTypeName:
    asked = raw.torch_dtype or raw.dtype or "float32"
    for name in get_args(DTypeName):
        if asked == name:
            known: DTypeName = name
            return known
    raise UnsupportedModel(
        f"{origin}: dtype {asked!r} isn't supported; use {', '.join(get_args(DTypeName))}",
        model_type=raw.model_type,
    )
