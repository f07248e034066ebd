"""The tables: what vLLM and SGLang make of each architecture. A new one is a new entry."""

from __future__ import annotations

from fabric_ray.weights.families.errors import UnknownFamily
from fabric_ray.weights.families.rules import Cut, Family, Part, Rule, Split, Vocab, Whole

_LAYER = "model.layers.{layer}."


def same(name: str, cut: Cut) -> Rule:
    """A parameter that the engine keeps under its own name."""
    return Rule(name, (Part(name, cut),))


def fused(container: str, *parts: tuple[str, Cut]) -> Rule:
    """Parameters that the engine keeps as one."""
    return Rule(container, tuple(Part(name, cut) for name, cut in parts))


def mlp(prefix: str) -> tuple[Rule, ...]:
    """A SwiGLU block: gate and up as one, cut by columns; down cut to match."""
    gate_up = [
        fused(
            f"{prefix}gate_up_proj.{kind}",
            (f"{prefix}gate_proj.{kind}", Split(0)),
            (f"{prefix}up_proj.{kind}", Split(0)),
        )
        for kind in ("weight", "bias")
    ]
    down = same(f"{prefix}down_proj.weight", Split(1))
    return (*gate_up, down, same(f"{prefix}down_proj.bias", Whole()))


def attention(prefix: str) -> tuple[Rule, ...]:
    """Grouped-query attention: q, k and v as one, cut by heads; o cut to match."""
    qkv = [
        fused(
            f"{prefix}qkv_proj.{kind}",
            (f"{prefix}q_proj.{kind}", Split(0, "heads")),
            (f"{prefix}k_proj.{kind}", Split(0, "kv_heads")),
            (f"{prefix}v_proj.{kind}", Split(0, "kv_heads")),
        )
        for kind in ("weight", "bias")
    ]
    return (
        *qkv,
        same(f"{prefix}q_norm.weight", Whole()),
        same(f"{prefix}k_norm.weight", Whole()),
        same(f"{prefix}o_proj.weight", Split(1, "heads")),
        same(f"{prefix}o_proj.bias", Whole()),
    )


def experts(prefix: str) -> tuple[Rule, ...]:
    """Routed experts, stacked: ``w13`` is gate over up, ``w2`` is down."""
    one = prefix + "experts.{expert}."
    return (
        same(f"{prefix}gate.weight", Whole()),
        fused(
            f"{prefix}experts.w13_weight",
            (f"{one}gate_proj.weight", Split(0)),
            (f"{one}up_proj.weight", Split(0)),
        ),
        fused(f"{prefix}experts.w2_weight", (f"{one}down_proj.weight", Split(1))),
    )


def shared_expert(prefix: str) -> tuple[Rule, ...]:
    """The expert that sees every token, and its gate."""
    return (
        *mlp(f"{prefix}shared_expert."),
        same(f"{prefix}shared_expert_gate.weight", Whole()),
    )


_DENSE = (
    same("model.embed_tokens.weight", Vocab()),
    same(_LAYER + "input_layernorm.weight", Whole()),
    *attention(_LAYER + "self_attn."),
    same(_LAYER + "post_attention_layernorm.weight", Whole()),
    *mlp(_LAYER + "mlp."),
    same("model.norm.weight", Whole()),
    same("lm_head.weight", Vocab()),
)

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("llama", _DENSE),
        Family("qwen2", _DENSE),
        Family("qwen3", _DENSE),
        Family("qwen2_moe", (*_DENSE, *experts(_LAYER + "mlp."), *shared_expert(_LAYER + "mlp."))),
        Family("qwen3_moe", (*_DENSE, *experts(_LAYER + "mlp."))),
    )
}
"""By Hugging Face ``model_type``."""


def family_of(name: str) -> Family:
    """The table of a model type.

    Raises:
        UnknownFamily: there is none.
    """
    if name not in FAMILIES:
        raise UnknownFamily(
            f"no family table is called {name!r}; use one of {', '.join(FAMILIES)}, or pass a "
            "Family of your own",
            family=name,
        )
    return FAMILIES[name]
