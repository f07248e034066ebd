"""What a model is: sizes and switches, and the parameters they imply. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from fabric_ray.models.errors import InvalidConfig

Kind = Literal["llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"]
"""Architectures, by their Hugging Face ``model_type``."""

KINDS: tuple[Kind, ...] = ("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe")

DTypeName = Literal["bfloat16", "float16", "float32"]

LIMIT = 1 << 31
"""No size in a configuration reaches it."""

Shape = tuple[int, ...]


class Llama3Scaling(msgspec.Struct, frozen=True):
    """How Llama 3.1 stretches the wavelengths of rotary embeddings."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


class Rope(msgspec.Struct, frozen=True):
    """Rotary position embeddings."""

    theta: float = 10_000.0
    scaling: Llama3Scaling | None = None


class Moe(msgspec.Struct, frozen=True):
    """The mixture of experts that replaces the MLP of some layers."""

    experts: int
    top_k: int
    intermediate: int
    """Width of each expert."""
    shared_intermediate: int = 0
    """Width of the gated expert that sees every token; 0 where there is none."""
    normalise: bool = True
    """Whether the weights of the chosen experts are scaled to sum to 1."""
    sparse_step: int = 1
    """Every how many layers there are experts."""
    dense_layers: tuple[int, ...] = ()
    """Layers without experts, whatever ``sparse_step`` says."""


class ModelConfig(msgspec.Struct, frozen=True):
    """A decoder-only transformer: RMSNorm, RoPE, grouped queries, SwiGLU, optionally experts.

    Raises:
        InvalidConfig: the sizes contradict each other.
    """

    kind: Kind
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float = 1e-6
    rope: Rope = Rope()
    tied: bool = False
    """Whether the embedding is the output projection too."""
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    """Bias of ``o_proj``."""
    mlp_bias: bool = False
    moe: Moe | None = None
    dtype: DTypeName = "bfloat16"

    def __post_init__(self) -> None:
        _check(self)

    def has_experts(self, layer: int) -> bool:
        moe = self.moe
        return (
            moe is not None and layer not in moe.dense_layers and (layer + 1) % moe.sparse_step == 0
        )

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters."""
        total = 0
        for shape in parameter_shapes(self).values():
            elements = 1
            for size in shape:
                elements *= size
            total += elements
        return total


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every parameter's Hugging Face name and shape, in the order the forward pass uses them."""
    return dict(_parameters(config))


def _parameters(c: ModelConfig) -> Iterator[tuple[str, Shape]]:
    yield "model.embed_tokens.weight", (c.vocab, c.hidden)
    for layer in range(c.layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (c.hidden,)
        yield from _attention(c, prefix + "self_attn.")
        yield prefix + "post_attention_layernorm.weight", (c.hidden,)
        mlp = prefix + "mlp."
        if c.moe is not None and c.has_experts(layer):
            yield from _experts(c, c.moe, mlp)
        else:
            yield from _mlp(mlp, c.hidden, c.intermediate, bias=c.mlp_bias)
    yield "model.norm.weight", (c.hidden,)
    if not c.tied:
        yield "lm_head.weight", (c.vocab, c.hidden)


def _attention(c: ModelConfig, prefix: str) -> Iterator[tuple[str, Shape]]:
    for name, width in (("q", c.q_width), ("k", c.kv_width), ("v", c.kv_width)):
        yield f"{prefix}{name}_proj.weight", (width, c.hidden)
        if c.qkv_bias:
            yield f"{prefix}{name}_proj.bias", (width,)
    if c.qk_norm:
        yield prefix + "q_norm.weight", (c.head_dim,)
        yield prefix + "k_norm.weight", (c.head_dim,)
    yield prefix + "o_proj.weight", (c.hidden, c.q_width)
    if c.out_bias:
        yield prefix + "o_proj.bias", (c.hidden,)


def _mlp(prefix: str, hidden: int, width: int, *, bias: bool) -> Iterator[tuple[str, Shape]]:
    for name, shape in (
        ("gate", (width, hidden)),
        ("up", (width, hidden)),
        ("down", (hidden, width)),
    ):
        yield f"{prefix}{name}_proj.weight", shape
        if bias:
            yield f"{prefix}{name}_proj.bias", shape[:1]


def _experts(c: ModelConfig, moe: Moe, prefix: str) -> Iterator[tuple[str, Shape]]:
    yield prefix + "gate.weight", (moe.experts, c.hidden)
    for expert in range(moe.experts):
        yield from _mlp(f"{prefix}experts.{expert}.", c.hidden, moe.intermediate, bias=False)
    if moe.shared_intermediate:
        shared = prefix + "shared_expert."
        yield from _mlp(shared, c.hidden, moe.shared_intermediate, bias=False)
        yield prefix + "shared_expert_gate.weight", (1, c.hidden)


def _check(c: ModelConfig) -> None:
    sizes = {
        "vocab": c.vocab,
        "hidden": c.hidden,
        "layers": c.layers,
        "heads": c.heads,
        "kv_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "intermediate": c.intermediate,
    }
    if c.moe is not None:
        sizes["experts"] = c.moe.experts
        sizes["top_k"] = c.moe.top_k
        sizes["expert intermediate"] = c.moe.intermediate
        sizes["sparse_step"] = c.moe.sparse_step
    for field, size in sizes.items():
        if not 0 < size < LIMIT:
            raise InvalidConfig(f"{field} is {size}; give 1 to {LIMIT - 1}", field=field)
    if c.layers > 10_000:
        raise InvalidConfig(f"layers is {c.layers}; give at most 10000", field="layers")
    if c.heads % c.kv_heads:
        raise InvalidConfig(
            f"{c.heads} heads can't share {c.kv_heads} kv heads evenly; "
            "give a number of kv heads that divides heads",
            field="kv_heads",
        )
    if c.head_dim % 2:
        raise InvalidConfig(
            f"head_dim is {c.head_dim}; rotary embeddings need an even one", field="head_dim"
        )
    if c.moe is not None:
        _check_moe(c.moe)


def _check_moe(moe: Moe) -> None:
    if moe.experts > 1 << 16:
        raise InvalidConfig(f"experts is {moe.experts}; give at most 65536", field="experts")
    if moe.top_k > moe.experts:
        raise InvalidConfig(
            f"{moe.top_k} of {moe.experts} experts can't be chosen; lower top_k", field="top_k"
        )
    if not 0 <= moe.shared_intermediate < LIMIT:
        raise InvalidConfig(
            f"shared intermediate is {moe.shared_intermediate}; give 0 to {LIMIT - 1}",
            field="shared_intermediate",
        )
