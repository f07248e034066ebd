"""The architectures: one entry each says how parameters follow from a ``config.json``.

A new one is an entry of :data:`ARCHITECTURES`, and its name in :data:`Kind`. Engines' layouts,
trainers and formats follow from it and from the names of its parameters.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

Kind = Literal[
    "llama",
    "mistral",
    "ministral",
    "ministral3",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "gemma3_text",
    "gpt_oss",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "kimi_k2",
]
"""Architectures, by their Hugging Face ``model_type``."""

KINDS: tuple[Kind, ...] = get_args(Kind)

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_LATENT = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


class Architecture(msgspec.Struct, frozen=True):
    """What the parameters of one architecture are, beyond the sizes in its ``config.json``."""

    name: Kind
    computed: str = ""
    """Hugging Face's class, where ``fabric_ray.models.transformer`` computes it."""
    windows: bool = False
    """Whether sliding windows are computed."""
    experts: Literal["", "named", "routed", "stacked"] = ""
    """Whether there are experts, and by whose fields they are described: Qwen's, DeepSeek's or
    gpt-oss's."""
    topk_method: Literal["greedy", "noaux_tc"] = "noaux_tc"
    """How ``routed`` experts are chosen where ``config.json`` doesn't say."""
    shared_gate: bool = False
    """Whether the shared expert of ``named`` experts must be there; it has a gate."""
    latent: bool = False
    indexer: bool = False
    linear: Literal["", "fused", "split"] = ""
    """Whether some layers attend linearly (gated delta rule), by two projections or by four."""
    gate: bool = False
    """Whether ``q_proj`` gives a gate beside each query."""
    qk_norm: Literal["always", "field", "never"] = "never"
    qkv_bias: Literal["always", "field", "never"] = "field"
    out_bias: bool = True
    """Whether ``attention_bias`` is of ``o_proj`` too."""
    mlp_bias: bool = False
    """Whether ``mlp_bias`` is read."""
    sinks: bool = False
    """Whether each head has an attention sink."""
    fused_mlp: bool = False
    added_norms: tuple[str, ...] = ()
    """A layer's norms beyond the two of Llama: between attention and MLP, and after the MLP."""
    defaults: dict[str, Any] = {}
    """Fields of ``config.json`` and what transformers takes for those that are missing, where that
    isn't what ``fabric_ray.models.hf`` takes. A null counts as given."""
    centred_norms: bool = False
    """Whether norms of hidden states multiply by ``1 + weight``, not by ``weight``."""
    rotates_pairs: bool = False
    """Whether positions rotate neighbouring elements of a head, not elements of its halves, where
    attention isn't latent."""
    quantised: tuple[str, ...] = ()
    """Modules whose weights engines keep quantised, where that is known."""
    unknown_layout: str = ""
    """Why engines' layouts of it are not known, if so."""
    unknown_megatron: str = ""
    """Why Megatron-Core's layout of it is not known, if so."""


_DELTA = (
    "engines merge and interleave the projections of linear attention, and a push copies bytes in "
    "their order"
)
_NO_DELTA = "it has no rules for the projections of linear attention"
_DEEPSEEK = {"n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536}

ARCHITECTURES: dict[Kind, Architecture] = {
    a.name: a
    for a in (
        Architecture("llama", "LlamaForCausalLM", mlp_bias=True, quantised=(*_ATTENTION, *_MLP)),
        Architecture(
            "mistral",
            qkv_bias="never",
            out_bias=False,
            defaults={"num_key_value_heads": 8},
            quantised=(*_ATTENTION, *_MLP),
        ),
        Architecture(
            "ministral",
            qkv_bias="never",
            out_bias=False,
            defaults={"num_key_value_heads": 8},
            quantised=(*_ATTENTION, *_MLP),
        ),
        Architecture(
            "ministral3",
            qkv_bias="never",
            out_bias=False,
            defaults={"num_key_value_heads": 8, "head_dim": 128},
            quantised=(*_ATTENTION, *_MLP),
        ),
        Architecture(
            "qwen2",
            "Qwen2ForCausalLM",
            windows=True,
            qkv_bias="always",
            out_bias=False,
            defaults={"num_key_value_heads": 32},
            quantised=(*_ATTENTION, *_MLP),
        ),
        Architecture(
            "qwen3",
            "Qwen3ForCausalLM",
            windows=True,
            qk_norm="always",
            defaults={"num_key_value_heads": 32, "head_dim": 128},
            quantised=(*_ATTENTION, *_MLP),
        ),
        Architecture(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            experts="named",
            shared_gate=True,
            qkv_bias="always",
            out_bias=False,
            defaults={"num_key_value_heads": 16},
            quantised=(*_ATTENTION, *_MLP),
        ),
        Architecture(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            experts="named",
            qk_norm="always",
            defaults={"num_key_value_heads": 4},
            quantised=(*_ATTENTION, *_MLP),
        ),
        Architecture(
            "qwen3_next",
            centred_norms=True,
            experts="named",
            shared_gate=True,
            linear="fused",
            gate=True,
            qk_norm="always",
            defaults={"num_key_value_heads": 2, "head_dim": 256},
            unknown_layout=_DELTA,
            unknown_megatron=_NO_DELTA,
        ),
        Architecture(
            "qwen3_5_text",
            centred_norms=True,
            linear="split",
            gate=True,
            qk_norm="always",
            defaults={"num_key_value_heads": 4, "head_dim": 256},
            unknown_layout=_DELTA,
            unknown_megatron=_NO_DELTA,
        ),
        Architecture(
            "qwen3_5_moe_text",
            centred_norms=True,
            experts="named",
            shared_gate=True,
            linear="split",
            gate=True,
            qk_norm="always",
            defaults={"num_key_value_heads": 2, "head_dim": 256},
            unknown_layout=_DELTA,
            unknown_megatron=_NO_DELTA,
        ),
        Architecture(
            "gemma3_text",
            centred_norms=True,
            qk_norm="always",
            added_norms=("pre_feedforward_layernorm", "post_feedforward_layernorm"),
            defaults={
                "vocab_size": 262208,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "tie_word_embeddings": True,
            },
            quantised=(*_ATTENTION, *_MLP),
            unknown_megatron="it has no rules for the norms before and after the MLP",
        ),
        Architecture(
            "gpt_oss",
            experts="stacked",
            sinks=True,
            defaults={"num_key_value_heads": 8, "head_dim": 64, "attention_bias": True},
            unknown_layout="engines transpose its stacked experts ([experts, hidden, 2 * "
            "intermediate], gate and up interleaved), and a push copies bytes in their order",
            unknown_megatron="it has no rules for stacked experts and attention sinks",
        ),
        Architecture(
            "glm4",
            rotates_pairs=True,
            out_bias=False,
            fused_mlp=True,
            added_norms=("post_self_attn_layernorm", "post_mlp_layernorm"),
            defaults={"num_key_value_heads": 2, "head_dim": 128},
            quantised=(*_ATTENTION, "gate_up_proj", "down_proj"),
        ),
        Architecture(
            "glm4_moe",
            experts="routed",
            qk_norm="field",
            out_bias=False,
            defaults={"num_key_value_heads": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
            quantised=(*_ATTENTION, *_MLP),
        ),
        Architecture(
            "glm4_moe_lite",
            experts="routed",
            latent=True,
            defaults={"n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 768},
        ),
        Architecture(
            "glm_moe_dsa",
            experts="routed",
            latent=True,
            indexer=True,
            defaults=_DEEPSEEK | {"q_lora_rank": 2048},
        ),
        Architecture(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            experts="routed",
            topk_method="greedy",
            latent=True,
            defaults={"n_shared_experts": 2, "q_lora_rank": 1536},
            quantised=(*_LATENT, *_MLP),
        ),
        Architecture(
            "deepseek_v3",
            experts="routed",
            latent=True,
            defaults=_DEEPSEEK,
            quantised=(*_LATENT, *_MLP),
        ),
        Architecture(
            "deepseek_v32", experts="routed", latent=True, indexer=True, defaults=_DEEPSEEK
        ),
        Architecture(
            "kimi_k2",
            experts="routed",
            latent=True,
            defaults=_DEEPSEEK,
            quantised=(*_LATENT, *_MLP),
        ),
    )
}

COMPUTED: tuple[Kind, ...] = tuple(a.name for a in ARCHITECTURES.values() if a.computed)
"""Those that ``fabric_ray.models.transformer`` computes; of others the parameters are known."""

Nest = Literal["", "gemma3", "kimi_k25", "mistral3", "qwen3_5", "qwen3_5_moe"]

NESTS: dict[str, Kind] = {
    "gemma3": "gemma3_text",
    "kimi_k25": "deepseek_v3",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Models of text and images, by ``model_type``, and what their ``text_config`` is by default. The
text model's parameters lie below ``model.language_model``, as in transformers 5."""
