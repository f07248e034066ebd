"""What a model is: sizes and switches, and the parameters they imply. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import msgspec

from fabric_ray.models.errors import InvalidConfig, UnsupportedModel
from fabric_ray.models.kinds import ARCHITECTURES, COMPUTED, Kind, Nest

DTypeName = Literal["bfloat16", "float16", "float32"]

LIMIT = 1 << 31
"""No size in a configuration reaches it."""

MAX_LAYERS = 10_000

Shape = tuple[int, ...]


class Llama3Scaling(msgspec.Struct, frozen=True):
    """How Llama 3.1 stretches the wavelengths of rotary embeddings."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


class Yarn(msgspec.Struct, frozen=True):
    """How DeepSeek stretches rotary embeddings (YaRN, section 3)."""

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    """Elements that turn so many times over the original positions keep their wavelength."""
    beta_slow: float = 1.0
    """Those that turn no more often have it stretched by ``factor``."""
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    @property
    def turned(self) -> float:
        """By which what was turned is multiplied."""
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def scores(self) -> float:
        """By which products of queries and keys are multiplied."""
        return self._magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _magnitude(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


class Rope(msgspec.Struct, frozen=True):
    """Rotary position embeddings."""

    theta: float = 10_000.0
    scaling: Llama3Scaling | None = None
    yarn: Yarn | None = None


class Moe(msgspec.Struct, frozen=True):
    """The mixture of experts that replaces the MLP of some layers."""

    experts: int
    top_k: int
    intermediate: int
    """Width of each expert."""
    shared_intermediate: int = 0
    """Width of the expert that sees every token; 0 where there is none."""
    shared_gate: bool = True
    """Whether that expert has a gate; one without goes by the name of ``shared_experts``."""
    correction_bias: bool = False
    """Whether the router has a bias that only chooses (DeepSeek-V3, section 2.1.2)."""
    normalise: bool = True
    """Whether the weights of the chosen experts are scaled to sum to 1."""
    sparse_step: int = 1
    """Every how many layers there are experts."""
    dense_layers: tuple[int, ...] = ()
    """Layers without experts, whatever ``sparse_step`` says."""
    stacked: bool = False
    """Whether a layer's experts are one parameter with biases, input by output (gpt-oss)."""

    def in_layer(self, layer: int) -> bool:
        return layer not in self.dense_layers and (layer + 1) % self.sparse_step == 0


class Latent(msgspec.Struct, frozen=True):
    """Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values of all heads are
    computed from one short vector per token."""

    kv_rank: int
    """Width of that vector."""
    nope_dim: int
    """Width of a head's queries and keys that position doesn't turn."""
    rope_dim: int
    """Width of what it does turn; the keys' is shared by all heads."""
    value_dim: int
    q_rank: int = 0
    """Width of the vector that queries are computed from; 0 where it is the hidden state."""
    index_heads: int = 0
    """Heads of the indexer that chooses which tokens are attended to (DeepSeek-V3.2); 0 where all
    are."""
    index_dim: int = 0
    """Width of each of them."""
    unindexed_layers: tuple[int, ...] = ()
    """Layers without an indexer: they attend to what the layer before them chose (GLM-5.2)."""


class Linear(msgspec.Struct, frozen=True):
    """Linear attention by the gated delta rule, which some layers have (Qwen3-Next, Qwen3.5)."""

    layers: tuple[int, ...]
    key_heads: int
    """Heads of queries, and of keys."""
    key_dim: int
    value_heads: int
    value_dim: int
    kernel: int
    """Tokens that the convolution over queries, keys and values sees."""
    fused: bool = False
    """Whether its inputs come from two projections (Qwen3-Next) or from four (Qwen3.5)."""


class ModelConfig(msgspec.Struct, frozen=True):
    """A decoder-only transformer: RMSNorm, RoPE, grouped queries or latent attention, SwiGLU,
    optionally experts.

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
    fused_mlp: bool = False
    """Whether gate and up are one parameter, ``gate_up_proj``: all of gate, then all of up."""
    post_norms: bool = False
    """Whether a layer has two norms more; the architecture says which."""
    moe: Moe | None = None
    latent: Latent | None = None
    """With it ``head_dim`` is the width of a head's queries and keys, turned or not."""
    window: int | None = None
    """How many tokens ``windowed_layers`` see, the token itself included."""
    windowed_layers: tuple[int, ...] = ()
    """Layers with a sliding window; others see everything before."""
    linear: Linear | None = None
    gate: bool = False
    """Whether ``q_proj`` gives a gate of the output beside each head's query."""
    sinks: bool = False
    """Whether each head has an attention sink."""
    dtype: DTypeName = "bfloat16"
    max_positions: int | None = None
    """Most tokens of a sequence; ``None`` where the ``config.json`` gives no limit, or the model
    isn't computed here."""
    nest: Nest = ""
    """The model of text and images that it is the text model of, by ``model_type``."""
    uncomputed: str = ""
    """What its ``config.json`` asks for that isn't computed here; sizes hold all the same."""

    def __post_init__(self) -> None:
        _check(self)

    def has_experts(self, layer: int) -> bool:
        return self.moe is not None and self.moe.in_layer(layer)

    def window_of(self, layer: int) -> int | None:
        """How many tokens a layer sees; ``None`` for all."""
        return self.window if layer in self.windowed_layers else None

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def rope_dim(self) -> int:
        """Width of what position turns of a head."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters."""
        return sum(map(math.prod, parameter_shapes(self).values()))


def check_computed(config: ModelConfig) -> None:
    """Refuses models of which only the parameters are known.

    Raises:
        UnsupportedModel: models of this kind, or this variant of it, aren't computed.
    """
    problem = config.uncomputed and f"{config.kind} with {config.uncomputed}"
    if config.kind not in COMPUTED:
        problem = (
            f"models of type {config.kind!r} can't be computed here, only laid out; use one of "
            f"{', '.join(COMPUTED)}"
        )
    elif config.nest:
        problem = f"the text model of {config.nest} can't be computed here, only laid out"
    elif config.moe is not None and config.moe.correction_bias:
        problem = "routers with a correction bias aren't computed; use a model without"
    elif config.latent is not None and config.latent.index_heads:
        problem = "sparse attention isn't computed; use a model without an indexer"
    # RS-1: nothing is computed with the arithmetic of another model.
    if problem:
        raise UnsupportedModel(problem, model_type=config.kind)


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every parameter's Hugging Face name and shape, in the order the forward pass uses them."""
    shapes = dict(_parameters(config))
    if not config.nest:
        return shapes
    return {nested_name(name): shape for name, shape in shapes.items()}


def nested_name(name: str) -> str:
    """A text model's parameter, as transformers 5 calls it within a model of text and images."""
    if not name.startswith("model."):
        return name
    return f"model.language_model.{name.removeprefix('model.')}"


def parameter_dtype(config: ModelConfig, name: str) -> DTypeName:
    """A parameter's dtype: ``config.dtype``, but float32 for routers' correction biases."""
    return "float32" if name.endswith(".e_score_correction_bias") else config.dtype


def _parameters(c: ModelConfig) -> Iterator[tuple[str, Shape]]:
    yield "model.embed_tokens.weight", (c.vocab, c.hidden)
    for layer in range(c.layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (c.hidden,)
        if c.linear is not None and layer in c.linear.layers:
            yield from _linear_attention(c, c.linear, prefix + "linear_attn.")
        elif c.latent is None:
            yield from _attention(c, prefix + "self_attn.")
        else:
            indexed = layer not in c.latent.unindexed_layers
            yield from _latent_attention(c, c.latent, prefix + "self_attn.", indexed)
        added = ARCHITECTURES[c.kind].added_norms if c.post_norms else ()
        for norm in added[:1]:
            yield f"{prefix}{norm}.weight", (c.hidden,)
        yield prefix + "post_attention_layernorm.weight", (c.hidden,)
        mlp = prefix + "mlp."
        if c.moe is not None and c.has_experts(layer):
            yield from (_stacked_experts if c.moe.stacked else _experts)(c, c.moe, mlp)
        else:
            yield from _dense_mlp(c, mlp)
        for norm in added[1:]:
            yield f"{prefix}{norm}.weight", (c.hidden,)
    yield "model.norm.weight", (c.hidden,)
    if not c.tied:
        yield "lm_head.weight", (c.vocab, c.hidden)


def _attention(c: ModelConfig, prefix: str) -> Iterator[tuple[str, Shape]]:
    if c.sinks:
        yield prefix + "sinks", (c.heads,)
    q_width = 2 * c.q_width if c.gate else c.q_width
    for name, width in (("q", q_width), ("k", c.kv_width), ("v", c.kv_width)):
        yield f"{prefix}{name}_proj.weight", (width, c.hidden)
        if c.qkv_bias:
            yield f"{prefix}{name}_proj.bias", (width,)
    if c.qk_norm:
        yield prefix + "q_norm.weight", (c.head_dim,)
        yield prefix + "k_norm.weight", (c.head_dim,)
    yield prefix + "o_proj.weight", (c.hidden, c.q_width)
    if c.out_bias:
        yield prefix + "o_proj.bias", (c.hidden,)


def _linear_attention(c: ModelConfig, linear: Linear, prefix: str) -> Iterator[tuple[str, Shape]]:
    keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
    heads = linear.value_heads
    if linear.fused:
        inputs = {"qkvz": 2 * keys + 2 * values, "ba": 2 * heads}
    else:
        inputs = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
    for name, width in inputs.items():
        yield f"{prefix}in_proj_{name}.weight", (width, c.hidden)
    yield prefix + "conv1d.weight", (2 * keys + values, 1, linear.kernel)
    yield prefix + "dt_bias", (linear.value_heads,)
    yield prefix + "A_log", (linear.value_heads,)
    yield prefix + "norm.weight", (linear.value_dim,)
    yield prefix + "out_proj.weight", (c.hidden, values)


def _latent_attention(
    c: ModelConfig, latent: Latent, prefix: str, indexed: bool
) -> Iterator[tuple[str, Shape]]:
    if latent.q_rank:
        yield prefix + "q_a_proj.weight", (latent.q_rank, c.hidden)
        yield prefix + "q_a_layernorm.weight", (latent.q_rank,)
        yield prefix + "q_b_proj.weight", (c.q_width, latent.q_rank)
    else:
        yield prefix + "q_proj.weight", (c.q_width, c.hidden)
    yield prefix + "kv_a_proj_with_mqa.weight", (latent.kv_rank + latent.rope_dim, c.hidden)
    yield prefix + "kv_a_layernorm.weight", (latent.kv_rank,)
    kv_width = c.heads * (latent.nope_dim + latent.value_dim)
    yield prefix + "kv_b_proj.weight", (kv_width, latent.kv_rank)
    if latent.index_heads and indexed:
        index_width = latent.index_heads * latent.index_dim
        yield prefix + "indexer.wq_b.weight", (index_width, latent.q_rank)
        yield prefix + "indexer.wk.weight", (latent.index_dim, c.hidden)
        yield prefix + "indexer.k_norm.weight", (latent.index_dim,)
        yield prefix + "indexer.k_norm.bias", (latent.index_dim,)
        yield prefix + "indexer.weights_proj.weight", (latent.index_heads, c.hidden)
    yield prefix + "o_proj.weight", (c.hidden, c.heads * latent.value_dim)


def _dense_mlp(c: ModelConfig, prefix: str) -> Iterator[tuple[str, Shape]]:
    if not c.fused_mlp:
        yield from _mlp(prefix, c.hidden, c.intermediate, bias=c.mlp_bias)
        return
    yield prefix + "gate_up_proj.weight", (2 * c.intermediate, c.hidden)
    yield prefix + "down_proj.weight", (c.hidden, c.intermediate)


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
    if moe.correction_bias:
        yield prefix + "gate.e_score_correction_bias", (moe.experts,)
    for expert in range(moe.experts):
        yield from _mlp(f"{prefix}experts.{expert}.", c.hidden, moe.intermediate, bias=False)
    if moe.shared_intermediate:
        shared = prefix + ("shared_expert." if moe.shared_gate else "shared_experts.")
        yield from _mlp(shared, c.hidden, moe.shared_intermediate, bias=False)
        if moe.shared_gate:
            yield prefix + "shared_expert_gate.weight", (1, c.hidden)


def _stacked_experts(c: ModelConfig, moe: Moe, prefix: str) -> Iterator[tuple[str, Shape]]:
    yield prefix + "router.weight", (moe.experts, c.hidden)
    yield prefix + "router.bias", (moe.experts,)
    yield prefix + "experts.gate_up_proj", (moe.experts, c.hidden, 2 * moe.intermediate)
    yield prefix + "experts.gate_up_proj_bias", (moe.experts, 2 * moe.intermediate)
    yield prefix + "experts.down_proj", (moe.experts, moe.intermediate, c.hidden)
    yield prefix + "experts.down_proj_bias", (moe.experts, c.hidden)


def _check(c: ModelConfig) -> None:
    fields = ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate")
    sizes: dict[str, int] = {field: getattr(c, field) for field in fields}
    if c.moe is not None:
        sizes["experts"] = c.moe.experts
        sizes["top_k"] = c.moe.top_k
        sizes["expert intermediate"] = c.moe.intermediate
        sizes["sparse_step"] = c.moe.sparse_step
    _check_layers(c)
    if c.latent is not None:
        _check_latent(c, c.latent)
        sizes["kv_rank"] = c.latent.kv_rank
        sizes["value_dim"] = c.latent.value_dim
        sizes["q_rank"] = c.latent.q_rank or 1
    for field, size in sizes.items():
        if not 0 < size < LIMIT:
            raise InvalidConfig(f"{field} is {size}; give 1 to {LIMIT - 1}", field=field)
    if c.layers > MAX_LAYERS:
        raise InvalidConfig(f"layers is {c.layers}; give at most {MAX_LAYERS}", field="layers")
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
    _check_windows(c)
    if c.rope.yarn is not None and c.latent is None:
        raise InvalidConfig(
            "rope has yarn, which is known of latent attention only; leave it out", field="rope"
        )


def _check_windows(c: ModelConfig) -> None:
    if (c.window is None) != (not c.windowed_layers):
        raise InvalidConfig(
            f"window is {c.window} and windowed_layers {list(c.windowed_layers)}; give both or "
            "neither",
            field="window",
        )
    if c.window is not None and not 0 < c.window < LIMIT:
        raise InvalidConfig(f"window is {c.window}; give 1 to {LIMIT - 1}", field="window")
    if any(not 0 <= layer < c.layers for layer in c.windowed_layers):
        raise InvalidConfig(
            f"windowed_layers {list(c.windowed_layers)} are not all among {c.layers} layers; "
            f"give 0 to {c.layers - 1}",
            field="windowed_layers",
        )


def _check_layers(c: ModelConfig) -> None:
    architecture = ARCHITECTURES[c.kind]
    known = {"fused_mlp": architecture.fused_mlp, "post_norms": bool(architecture.added_norms)}
    for field, there in known.items():
        if getattr(c, field) and not there:
            raise InvalidConfig(f"{field} is none of {c.kind}'s; leave it out", field=field)
    if c.fused_mlp and c.mlp_bias:
        raise InvalidConfig("a fused MLP has no bias; leave mlp_bias out", field="mlp_bias")


def _check_latent(c: ModelConfig, latent: Latent) -> None:
    if not ARCHITECTURES[c.kind].latent:
        raise InvalidConfig(f"{c.kind} has no latent attention; leave it out", field="latent")
    for field in ("qk_norm", "qkv_bias", "out_bias"):
        if getattr(c, field):
            raise InvalidConfig(f"{field} has no meaning in latent attention", field=field)
    parts = latent.nope_dim, latent.rope_dim
    if c.head_dim != sum(parts) or min(parts) < 1:
        raise InvalidConfig(
            f"head_dim is {c.head_dim}; with latent attention give nope_dim + rope_dim, both "
            f"positive, here {latent.nope_dim} + {latent.rope_dim}",
            field="head_dim",
        )
    if latent.index_heads and not (latent.q_rank and latent.index_dim):
        raise InvalidConfig(
            f"an indexer of {latent.index_heads} heads needs q_rank and index_dim; here they are "
            f"{latent.q_rank} and {latent.index_dim}",
            field="index_heads",
        )
    if c.kv_heads != c.heads:
        raise InvalidConfig(
            f"kv_heads is {c.kv_heads}; latent attention has one for each of {c.heads} heads",
            field="kv_heads",
        )


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
