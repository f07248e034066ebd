"""Hugging Face ``config.json``: read, checked, written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec

from fabric_ray.models.config import (
    KINDS,
    LIMIT,
    DTypeName,
    Kind,
    Llama3Scaling,
    ModelConfig,
    Moe,
    Rope,
)
from fabric_ray.models.errors import InvalidConfig, UnsupportedModel

CONFIG_FILE = "config.json"

_ARCHITECTURES: dict[Kind, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}

Size = Annotated[int, msgspec.Meta(ge=1, lt=LIMIT)]


class _RopeFields(msgspec.Struct):
    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: Size = 8192


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
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
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


def read_config(path: Path | str) -> ModelConfig:
    """Reads a ``config.json``, or the one in a directory.

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
    return config_from_hf(fields, origin=str(path))


def config_from_hf(fields: Any, *, origin: str = "config") -> ModelConfig:
    """The model that the fields of a ``config.json`` describe; ``origin`` names it in errors.

    Raises:
        UnsupportedModel: see :func:`read_config`.
        InvalidConfig: see :func:`read_config`.
    """
    kind = _kind(fields, origin)
    try:
        raw = msgspec.convert(fields, _HfConfig)
    except msgspec.ValidationError as error:
        raise InvalidConfig(
            f"{origin}: {str(error)[:1].lower()}{str(error)[1:]}; correct the field"
        ) from error
    _refuse_variants(raw, origin)
    return ModelConfig(
        kind=kind,
        vocab=raw.vocab_size,
        hidden=raw.hidden_size,
        layers=raw.num_hidden_layers,
        heads=raw.num_attention_heads,
        kv_heads=raw.num_key_value_heads or raw.num_attention_heads,
        head_dim=_head_dim(kind, raw, origin),
        intermediate=raw.intermediate_size,
        norm_eps=raw.rms_norm_eps,
        rope=_rope(raw, origin),
        tied=raw.tie_word_embeddings,
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        qkv_bias=kind in ("qwen2", "qwen2_moe") or raw.attention_bias,
        out_bias=kind not in ("qwen2", "qwen2_moe") and raw.attention_bias,
        mlp_bias=kind == "llama" and raw.mlp_bias,
        moe=_moe(kind, raw, origin),
        dtype=_dtype(raw, origin),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The fields of a ``config.json`` that :func:`config_from_hf` reads back to the same."""
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


def _refuse_variants(raw: _HfConfig, origin: str) -> None:
    problem = None
    if raw.quantization_config is not None:
        problem = "quantised weights; use the unquantised checkpoint"
    elif raw.hidden_act != "silu":
        problem = f"activation {raw.hidden_act!r}; only 'silu' is implemented"
    elif raw.use_sliding_window or (raw.layer_types and set(raw.layer_types) != {"full_attention"}):
        problem = "sliding-window attention; only full attention is implemented"
    if problem is not None:
        raise UnsupportedModel(
            f"{origin}: {raw.model_type} with {problem}", model_type=raw.model_type
        )


def _head_dim(kind: Kind, raw: _HfConfig, origin: str) -> int:
    if raw.head_dim is not None:
        return raw.head_dim
    if kind in ("qwen3", "qwen3_moe"):
        return 128
    if raw.hidden_size % raw.num_attention_heads:
        raise InvalidConfig(
            f"{origin}: hidden size {raw.hidden_size} isn't a multiple of "
            f"{raw.num_attention_heads} heads; give head_dim",
            field="head_dim",
        )
    return raw.hidden_size // raw.num_attention_heads


def _rope(raw: _HfConfig, origin: str) -> Rope:
    fields = raw.rope_parameters or raw.rope_scaling or _RopeFields()
    theta = fields.rope_theta or raw.rope_theta or 10_000.0
    rope_type = fields.rope_type or fields.type or "default"
    if rope_type == "default":
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


def _moe(kind: Kind, raw: _HfConfig, origin: str) -> Moe | None:
    if kind not in ("qwen2_moe", "qwen3_moe"):
        return None
    experts = raw.num_experts or raw.num_local_experts
    needed = {
        "num_experts": experts,
        "num_experts_per_tok": raw.num_experts_per_tok,
        "moe_intermediate_size": raw.moe_intermediate_size,
    }
    if kind == "qwen2_moe":
        needed["shared_expert_intermediate_size"] = raw.shared_expert_intermediate_size
    for field, value in needed.items():
        if value is None:
            raise InvalidConfig(f"{origin}: {kind} needs {field}; add it", field=field)
    return Moe(
        experts=experts or 0,
        top_k=raw.num_experts_per_tok or 0,
        intermediate=raw.moe_intermediate_size or 0,
        shared_intermediate=(
            raw.shared_expert_intermediate_size or 0 if kind == "qwen2_moe" else 0
        ),
        normalise=raw.norm_topk_prob,
        sparse_step=raw.decoder_sparse_step,
        dense_layers=tuple(raw.mlp_only_layers or ()),
    )


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
