"""The tables: what vLLM and SGLang make of each architecture of ``fabric_ray.models.kinds``."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from fabric_ray.models.config import ModelConfig, nested_name
from fabric_ray.models.kinds import ARCHITECTURES, Architecture, Nest
from fabric_ray.weights.families.errors import IncompleteFamily, UnknownFamily
from fabric_ray.weights.families.rules import (
    Cut,
    Derived,
    Family,
    Part,
    Rule,
    Split,
    Vocab,
    Whole,
)

Engine = Literal["sglang", "vllm"]

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


def latent_attention(prefix: str) -> tuple[Rule, ...]:
    """Multi-head latent attention: what leads to the latents whole, what comes from them cut by
    heads."""
    latents = f"{prefix}kv_a_proj_with_mqa.weight"
    return (
        fused(
            f"{prefix}fused_qkv_a_proj_with_mqa.weight",
            (f"{prefix}q_a_proj.weight", Whole()),
            (latents, Whole()),
        ),
        # Where queries aren't compressed.
        same(latents, Whole()),
        same(f"{prefix}q_proj.weight", Split(0, "heads")),
        same(f"{prefix}q_a_layernorm.weight", Whole()),
        same(f"{prefix}q_b_proj.weight", Split(0, "heads")),
        same(f"{prefix}kv_a_layernorm.weight", Whole()),
        same(f"{prefix}kv_b_proj.weight", Split(0, "heads")),
        same(f"{prefix}o_proj.weight", Split(1, "heads")),
        # The indexer of sparse attention (DeepSeek-V3.2), whole on every rank.
        same(f"{prefix}indexer.wq_b.weight", Whole()),
        same(f"{prefix}indexer.wk.weight", Whole()),
        same(f"{prefix}indexer.k_norm.weight", Whole()),
        same(f"{prefix}indexer.k_norm.bias", Whole()),
        same(f"{prefix}indexer.weights_proj.weight", Whole()),
    )


def absorbed(prefix: str) -> tuple[Derived, ...]:
    """Latent attention with the keys' and values' projections absorbed into queries and outputs
    (DeepSeek-V2, section 2.1.2): SGLang's names; vLLM calls the same values ``W_UK_T`` and
    ``W_UV``."""
    source = (f"{prefix}kv_b_proj.weight",)
    return (Derived(f"{prefix}w_kc", source, _w_kc), Derived(f"{prefix}w_vc", source, _w_vc))


def _w_kc(config: ModelConfig, kv_b: Any) -> Any:
    """``[heads, nope_dim, kv_rank]``, in memory with the last two swapped, as the kernels want."""
    keys, _ = _by_head(config, kv_b)
    return keys.transpose(1, 2).contiguous().transpose(1, 2)


def _w_vc(config: ModelConfig, kv_b: Any) -> Any:
    """``[heads, kv_rank, value_dim]``, in memory with the last two swapped."""
    _, values = _by_head(config, kv_b)
    return values.contiguous().transpose(1, 2)


def _by_head(config: ModelConfig, kv_b: Any) -> Any:
    """The heads' projections to keys and to values."""
    if config.latent is None:
        raise IncompleteFamily(
            f"{config.kind} has no latent attention to derive from; use another table",
            family=config.kind,
        )
    sizes = (config.latent.nope_dim, config.latent.value_dim)
    return kv_b.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)


def experts(prefix: str) -> tuple[Rule, ...]:
    """Routed experts, stacked: ``w13`` is gate over up, ``w2`` is down."""
    one = prefix + "experts.{expert}."
    return (
        same(f"{prefix}gate.weight", Whole()),
        same(f"{prefix}gate.e_score_correction_bias", Whole()),
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


def fused_mlp(prefix: str) -> tuple[Rule, ...]:
    """Gate over up as trainers hold it: as one parameter, of which ranks share both halves."""
    return (same(f"{prefix}gate_up_proj.weight", Split(0, chunks=2)),)


_FRAME = (
    same("model.embed_tokens.weight", Vocab()),
    same(_LAYER + "input_layernorm.weight", Whole()),
    same(_LAYER + "post_attention_layernorm.weight", Whole()),
    *mlp(_LAYER + "mlp."),
    same("model.norm.weight", Whole()),
    same("lm_head.weight", Vocab()),
)


def _family(architecture: Architecture) -> Family:
    """A rule applies where its parameters exist."""
    norms = (same(f"{_LAYER}{norm}.weight", Whole()) for norm in architecture.added_norms)
    attend = latent_attention if architecture.latent else attention
    rules = (
        *_FRAME,
        *norms,
        *attend(_LAYER + "self_attn."),
        *fused_mlp(_LAYER + "mlp."),
        *experts(_LAYER + "mlp."),
        *shared_expert(_LAYER + "mlp."),
        *mlp(_LAYER + "mlp.shared_experts."),
    )
    derived = absorbed(_LAYER + "self_attn.") if architecture.latent else ()
    return Family(architecture.name, rules, derived)


FAMILIES: dict[str, Family] = {
    a.name: _family(a) for a in ARCHITECTURES.values() if not a.unknown_layout
}
"""By Hugging Face ``model_type``."""


_VLLM = {"fused_qkv_a_proj_with_mqa": "fused_qkv_a_proj"}
"""Names in which vLLM differs from SGLang."""


def family_of(name: str, *, engine: Engine = "sglang", nest: Nest = "") -> Family:
    """The table of a model type, in an engine's words.

    Args:
        name: the model type.
        engine: vLLM or SGLang.
        nest: the model of text and images that it is the text model of, if it is.

    Raises:
        UnknownFamily: there is none.
    """
    if name not in FAMILIES:
        for architecture in ARCHITECTURES.values():
            if architecture.name == name:
                raise UnknownFamily(
                    f"no family table is called {name!r}: {architecture.unknown_layout}; pass a "
                    "Family of your own, or push by way of a ModuleReplica",
                    family=name,
                )
        raise UnknownFamily(
            f"no family table is called {name!r}; use one of {', '.join(FAMILIES)}, or pass a "
            "Family of your own",
            family=name,
        )
    family = FAMILIES[name]
    for hf, vllm in _VLLM.items() if engine == "vllm" else ():
        rules = tuple(
            msgspec.structs.replace(rule, container=rule.container.replace(hf, vllm))
            for rule in family.rules
        )
        family = msgspec.structs.replace(family, rules=rules)
    return _nested(family) if nest else family


def _nested(family: Family) -> Family:
    """The table of a text model within another: both ends prefix its names."""
    prefix = "language_model."

    def rule(plain: Rule) -> Rule:
        parts = tuple(Part(nested_name(part.parameter), part.cut) for part in plain.parts)
        return msgspec.structs.replace(plain, container=prefix + plain.container, parts=parts)

    derived = tuple(
        msgspec.structs.replace(
            tensor,
            name=prefix + tensor.name,
            containers=tuple(prefix + name for name in tensor.containers),
        )
        for tensor in family.derived
    )
    return msgspec.structs.replace(family, rules=tuple(map(rule, family.rules)), derived=derived)
