"""Megatron-Core's containers, by what Hugging Face calls their parts.

One table serves all families, since a rule applies where its parameters exist. The names are those
of Megatron-Core's GPT model, with Transformer Engine's layers or its own (``gpt_layer_specs``).
"""

from __future__ import annotations

from typing import Literal

from fabric_ray.weights.families.rules import Cut, Family, Part, Rule, Split, Vocab, Whole

Layers = Literal["te", "local"]
"""Transformer Engine's, which fuse a norm into the projection after it, or Megatron-Core's own."""

Experts = Literal["grouped", "sequential"]
"""One module that holds all of a rank's experts, or one for each."""

_HF = "model.layers.{layer}."
_ATTN, _MLP = _HF + "self_attn.", _HF + "mlp."
_ROUTER = _MLP + "gate.weight"
_LAYER = "decoder.layers.{layer}."


def megatron_family(
    *, layers: Layers = "te", experts: Experts = "grouped", vocab_multiple: int = 128
) -> Family:
    """The table of a Megatron-Core trainer.

    Args:
        layers: the implementation of its linear layers and norms.
        experts: how experts are held.
        vocab_multiple: the vocabulary is padded to a multiple of this. Megatron's is
            ``make_vocab_size_divisible_by`` times ``tp``.
    """
    rules = (
        _rule(
            "embedding.word_embeddings.weight", "model.embed_tokens.weight", Vocab(vocab_multiple)
        ),
        *_norms(layers),
        *_attention(),
        *_latent_attention(layers),
        *_mlp("mlp.", _MLP),
        *_experts(experts),
        *_post_norms(),
        _rule("decoder.final_layernorm.weight", "model.norm.weight", Whole()),
        _rule("output_layer.weight", "lm_head.weight", Vocab(vocab_multiple)),
    )
    return Family("megatron", rules)


def _rule(container: str, parameter: str, cut: Cut, *, beside: str | None = None) -> Rule:
    return Rule(container, (Part(parameter, cut),), beside)


def _norms(layers: Layers) -> tuple[Rule, ...]:
    """The two norms of a layer; which layer's fuse them depends on what comes after."""
    before, after = f"{_HF}input_layernorm.weight", f"{_HF}post_attention_layernorm.weight"
    apart = (
        _rule(f"{_LAYER}input_layernorm.weight", before, Whole()),
        _rule(f"{_LAYER}pre_mlp_layernorm.weight", after, Whole()),
    )
    if layers == "local":
        return apart
    fused = f"{_LAYER}self_attention.linear_qkv.layer_norm_weight"
    return (
        _rule(fused, before, Whole(), beside=f"{_ATTN}k_proj.weight"),
        apart[0],
        _rule(apart[1].container, after, Whole(), beside=_ROUTER),
        _rule(f"{_LAYER}mlp.linear_fc1.layer_norm_weight", after, Whole()),
    )


def _post_norms() -> tuple[Rule, ...]:
    """Of what attention and MLP give (Megatron-Core's names are Hugging Face's), where there are
    such."""
    names = ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight")
    return tuple(_rule(_LAYER + name, _HF + name, Whole()) for name in names)


def _attention() -> tuple[Rule, ...]:
    """Grouped queries: a group's queries, its key and its value, then the next group's."""
    prefix = f"{_LAYER}self_attention."

    def qkv(kind: str) -> Rule:
        parts = tuple(Part(f"{_ATTN}{x}_proj.{kind}", Split(0, "kv_heads")) for x in "qkv")
        return Rule(f"{prefix}linear_qkv.{kind}", parts, interleaved=True)

    return (
        qkv("weight"),
        qkv("bias"),
        _rule(f"{prefix}q_layernorm.weight", f"{_ATTN}q_norm.weight", Whole()),
        _rule(f"{prefix}k_layernorm.weight", f"{_ATTN}k_norm.weight", Whole()),
        _rule(f"{prefix}linear_proj.weight", f"{_ATTN}o_proj.weight", Split(1, "heads")),
        _rule(f"{prefix}linear_proj.bias", f"{_ATTN}o_proj.bias", Whole()),
    )


def _latent_attention(layers: Layers) -> tuple[Rule, ...]:
    """Megatron-Core's own linear layers cut the way down to the latents too."""
    prefix = f"{_LAYER}self_attention."
    te = layers == "te"
    down: Cut = Whole() if te else Split(0)
    norm = "linear_{}_up_proj.layer_norm_weight" if te else "{}_layernorm.weight"
    return (
        _rule(f"{prefix}linear_q_proj.weight", f"{_ATTN}q_proj.weight", Split(0, "heads")),
        _rule(f"{prefix}linear_q_down_proj.weight", f"{_ATTN}q_a_proj.weight", down),
        _rule(prefix + norm.format("q"), f"{_ATTN}q_a_layernorm.weight", Whole()),
        _rule(f"{prefix}linear_q_up_proj.weight", f"{_ATTN}q_b_proj.weight", Split(0, "heads")),
        _rule(f"{prefix}linear_kv_down_proj.weight", f"{_ATTN}kv_a_proj_with_mqa.weight", down),
        _rule(prefix + norm.format("kv"), f"{_ATTN}kv_a_layernorm.weight", Whole()),
        _rule(f"{prefix}linear_kv_up_proj.weight", f"{_ATTN}kv_b_proj.weight", Split(0, "heads")),
        *_indexer(f"{prefix}core_attention.indexer."),
    )


def _indexer(prefix: str) -> tuple[Rule, ...]:
    """Of sparse attention: the same on every rank."""
    names = {
        "linear_wq_b.weight": "wq_b.weight",
        "linear_wk.weight": "wk.weight",
        "k_norm.weight": "k_norm.weight",
        "k_norm.bias": "k_norm.bias",
        "linear_weights_proj.weight": "weights_proj.weight",
    }
    return tuple(
        _rule(prefix + megatron, f"{_ATTN}indexer.{hf}", Whole()) for megatron, hf in names.items()
    )


def _mlp(megatron: str, hf: str) -> tuple[Rule, ...]:
    """SwiGLU: each rank's share of the gate over its share of up."""
    prefix = _LAYER + megatron

    def fc1(kind: str) -> Rule:
        parts = tuple(Part(f"{hf}{x}_proj.{kind}", Split(0)) for x in ("gate", "up"))
        return Rule(f"{prefix}linear_fc1.{kind}", parts)

    return (
        fc1("weight"),
        fc1("bias"),
        # Where Hugging Face has gate over up as one parameter too.
        _rule(f"{prefix}linear_fc1.weight", f"{hf}gate_up_proj.weight", Split(0, chunks=2)),
        _rule(f"{prefix}linear_fc2.weight", f"{hf}down_proj.weight", Split(1)),
        _rule(f"{prefix}linear_fc2.bias", f"{hf}down_proj.bias", Whole()),
    )


def _experts(experts: Experts) -> tuple[Rule, ...]:
    """Routed experts, a container each, numbered from 0 on every rank; the router; shared ones."""
    prefix = f"{_LAYER}mlp."
    one = f"{_MLP}experts.{{expert}}."
    name = {
        "grouped": "experts.linear_{}.weight{{expert}}",
        "sequential": "experts.local_experts.{{expert}}.linear_{}.weight",
    }[experts]
    gate_up = tuple(Part(f"{one}{x}_proj.weight", Split(0)) for x in ("gate", "up"))
    return (
        _rule(f"{prefix}router.weight", _ROUTER, Whole()),
        _rule(f"{prefix}router.expert_bias", f"{_MLP}gate.e_score_correction_bias", Whole()),
        Rule(prefix + name.format("fc1"), gate_up),
        _rule(prefix + name.format("fc2"), f"{one}down_proj.weight", Split(1)),
        *_mlp("mlp.shared_experts.", f"{_MLP}shared_expert."),
        *_mlp("mlp.shared_experts.", f"{_MLP}shared_experts."),
        _rule(f"{prefix}shared_experts.gate_weight", f"{_MLP}shared_expert_gate.weight", Whole()),
    )
