"""The reference model: a trainable decoder-only transformer with Hugging Face's names and shapes.

Trainers call it on whole rows of tokens. An engine that keeps keys and values passes an
:class:`Attend` of its own: everything else is computed here for both.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fabric_ray.models.config import Latent, ModelConfig, Moe, Rope, Yarn, check_computed

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, each ``[positions, 1, width]``: all heads of a position turn alike."""


class Attend(Protocol):
    """How the queries of a layer meet the keys and values of tokens before them."""

    def __call__(self, layer: Attention, queries: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        """Mixed values ``[..., positions, heads, width]``.

        Args:
            layer: gives its number, its window, the scale of scores, and keys and values.
            queries: ``[..., positions, heads, width]``.
            kept: what a cache keeps of the same tokens, ``[..., positions, kept heads, width]``.
        """


def rotation(rope: Rope, width: int, positions: Tensor, dtype: torch.dtype) -> Rotation:
    """The angles by which positions turn queries and keys (RoFormer; Llama 3.1 scaling, YaRN)."""
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, width, 2, dtype=precise, device=positions.device) / width
    frequencies = rope.theta**-exponents
    if (scaling := rope.scaling) is not None:
        wavelengths = 2 * math.pi / frequencies
        smooth = (scaling.original_positions / wavelengths - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        smooth = smooth.clamp(0, 1)
        frequencies = frequencies * (smooth + (1 - smooth) / scaling.factor)
    if rope.yarn is not None:
        kept = _kept(rope.theta, rope.yarn, width, frequencies)
        frequencies = frequencies * (kept + (1 - kept) / rope.yarn.factor)
    angles = torch.outer(positions, frequencies)[:, None]
    angles = torch.cat([angles, angles], dim=-1)
    scale = 1.0 if rope.yarn is None else rope.yarn.turned
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def _kept(theta: float, yarn: Yarn, width: int, frequencies: Tensor) -> Tensor:
    """How much of each frequency YaRN keeps: 1 for the fastest, 0 for the slowest."""

    def element(turns: float) -> float:
        """The one that turns so often over the original positions."""
        wavelength = yarn.original_positions / (turns * 2 * math.pi)
        return width * math.log(wavelength) / (2 * math.log(theta))

    low = max(math.floor(element(yarn.beta_fast)), 0)
    high = min(math.ceil(element(yarn.beta_slow)), width - 1)
    elements = torch.arange(len(frequencies), dtype=frequencies.dtype, device=frequencies.device)
    return 1 - ((elements - low) / max(high - low, 0.001)).clamp(0, 1)


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Turns ``x`` of shape ``[..., positions, heads, width]``."""
    cos, sin = by
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _pairs_apart(x: Tensor) -> Tensor:
    """DeepSeek turns neighbouring elements together, ``rotate`` those half a width apart."""
    return x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)


def _linear(inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias, dtype=dtype)


class Attention(nn.Module):
    """What an :class:`Attend` asks of a layer."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        self.number = number
        self.window = config.window_of(number)
        """Tokens that a token sees, itself included; ``None`` for all before it."""
        self.scale: float = config.head_dim**-0.5
        """By which products of queries and keys are multiplied."""

    def keys_values(self, kept: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Keys and values to attend to, from what was kept (any leading dimensions)."""
        k, v = kept
        return k, v


class GroupedAttention(Attention):
    """Heads of queries that share keys and values (GQA)."""

    def __init__(self, config: ModelConfig, number: int, dtype: torch.dtype) -> None:
        super().__init__(config, number)
        c = config
        self.head_dim = c.head_dim
        self.q_proj = _linear(c.hidden, c.q_width, dtype, bias=c.qkv_bias)
        self.k_proj = _linear(c.hidden, c.kv_width, dtype, bias=c.qkv_bias)
        self.v_proj = _linear(c.hidden, c.kv_width, dtype, bias=c.qkv_bias)
        self.o_proj = _linear(c.q_width, c.hidden, dtype, bias=c.out_bias)
        self.q_norm = nn.RMSNorm(c.head_dim, c.norm_eps, dtype=dtype) if c.qk_norm else None
        self.k_norm = nn.RMSNorm(c.head_dim, c.norm_eps, dtype=dtype) if c.qk_norm else None

    def forward(self, x: Tensor, by: Rotation, attend: Attend) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        mixed = attend(self, rotate(q, by), (rotate(k, by), v))
        out: Tensor = self.o_proj(mixed.flatten(-2))
        return out


class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-V2, section 2.1), with the projections of keys and
    values absorbed into queries and outputs: one latent per token is all that is attended to."""

    def __init__(
        self, config: ModelConfig, latent: Latent, number: int, dtype: torch.dtype
    ) -> None:
        super().__init__(config, number)
        c, z = config, latent
        self.heads, self.latent = c.heads, z
        if c.rope.yarn is not None:
            self.scale *= c.rope.yarn.scores
        if z.q_rank:
            self.q_a_proj = _linear(c.hidden, z.q_rank, dtype)
            self.q_a_layernorm = nn.RMSNorm(z.q_rank, c.norm_eps, dtype=dtype)
            self.q_b_proj = _linear(z.q_rank, c.q_width, dtype)
        else:
            self.q_proj = _linear(c.hidden, c.q_width, dtype)
        self.kv_a_proj_with_mqa = _linear(c.hidden, z.kv_rank + z.rope_dim, dtype)
        self.kv_a_layernorm = nn.RMSNorm(z.kv_rank, c.norm_eps, dtype=dtype)
        self.kv_b_proj = _linear(z.kv_rank, c.heads * (z.nope_dim + z.value_dim), dtype)
        self.o_proj = _linear(c.heads * z.value_dim, c.hidden, dtype)

    def forward(self, x: Tensor, by: Rotation, attend: Attend) -> Tensor:
        z = self.latent
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if z.q_rank else self.q_proj(x)
        q_plain, q_rope = torch.split(
            q.unflatten(-1, (self.heads, -1)), [z.nope_dim, z.rope_dim], dim=-1
        )
        kept = self.kv_a_proj_with_mqa(x)[..., None, :]
        latent, rope = torch.split(kept, [z.kv_rank, z.rope_dim], dim=-1)
        by_head = self.kv_b_proj.weight.view(self.heads, -1, z.kv_rank)
        to_keys, to_values = torch.split(by_head, [z.nope_dim, z.value_dim], dim=1)
        q_absorbed = torch.einsum("...hn,hnr->...hr", q_plain, to_keys)
        queries = torch.cat([q_absorbed, rotate(_pairs_apart(q_rope), by)], dim=-1)
        rope = rotate(_pairs_apart(rope), by)
        mixed = attend(self, queries, (self.kv_a_layernorm(latent), rope))
        values = torch.einsum("...hr,hvr->...hv", mixed, to_values)
        out: Tensor = self.o_proj(values.flatten(-2))
        return out

    def keys_values(self, kept: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        latent, rope = kept
        return torch.cat([latent, rope], dim=-1), latent


def attend_rows(layer: Attention, queries: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
    """The :class:`Attend` of whole rows ``[batch, positions, heads, width]``, which keeps
    nothing."""
    count = queries.shape[1]
    seen = None
    if layer.window is not None and layer.window < count:
        everything = torch.ones(count, count, dtype=torch.bool, device=queries.device)
        seen = everything.tril().triu(1 - layer.window)
    q, *by_head = (tensor.transpose(1, 2) for tensor in (queries, *kept))
    return masked_attention(layer, q, tuple(by_head), seen).transpose(1, 2)


def masked_attention(
    layer: Attention, q: Tensor, kept: tuple[Tensor, ...], seen: Tensor | None
) -> Tensor:
    """Attention of ``[rows, heads, tokens, width]``; keys and values may have fewer heads.

    Args:
        layer: gives keys, values and the scale of scores.
        q: queries.
        kept: what keys and values follow from.
        seen: what sees what, ``[..., tokens, kept tokens]``; ``None`` where that is causal.

    Returns:
        ``[rows, heads, tokens, width of values]``.
    """
    k, v = layer.keys_values(kept)
    if q.shape[2] == 1:
        # Heads that share keys become queries beside each other: keys needn't be repeated.
        folded = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=seen, scale=layer.scale)
        return out.reshape(*q.shape[:3], -1)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, is_causal=seen is None, scale=layer.scale, enable_gqa=True
    )


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, width: int, dtype: torch.dtype, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = _linear(hidden, width, dtype, bias=bias)
        self.up_proj = _linear(hidden, width, dtype, bias=bias)
        self.down_proj = _linear(width, hidden, dtype, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Experts(nn.ModuleList):
    """All experts of a layer in one place; :class:`fabric_ray.moe.layer.ParallelExperts` has them
    on ranks."""

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sums of experts' answers, ``[tokens, hidden]``.

        Args:
            tokens: ``[tokens, hidden]``.
            chosen: int64 ``[tokens, top_k]``, the experts of each token.
            weights: ``[tokens, top_k]``.
        """
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self):
            # Experts without tokens run too: sharded training needs a gradient from every
            # parameter on every rank, or ranks would reduce different sets of them.
            token, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(tokens[token]) * weights[token, place, None])
        return out


class MixtureOfExperts(nn.Module):
    def __init__(self, config: ModelConfig, moe: Moe, dtype: torch.dtype) -> None:
        super().__init__()
        self.moe = moe
        self.gate = _linear(config.hidden, moe.experts, dtype)
        self.experts: nn.Module = Experts(
            Mlp(config.hidden, moe.intermediate, dtype) for _ in range(moe.experts)
        )
        if moe.shared_intermediate:
            shared = Mlp(config.hidden, moe.shared_intermediate, dtype)
            if moe.shared_gate:
                self.shared_expert = shared
                self.shared_expert_gate = _linear(config.hidden, 1, dtype)
            else:
                self.shared_experts = shared

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self._route(tokens)
        out: Tensor = self.experts(tokens, chosen, weights)
        if self.moe.shared_intermediate and self.moe.shared_gate:
            out = out + self.shared_expert_gate(tokens).sigmoid() * self.shared_expert(tokens)
        elif self.moe.shared_intermediate:
            out = out + self.shared_experts(tokens)
        return out.view_as(x)

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts of each token, ``[tokens, top_k]`` both."""
        logits = self.gate(tokens)
        precise = logits if logits.dtype == torch.float64 else logits.float()
        weights, chosen = precise.softmax(-1).topk(self.moe.top_k, dim=-1)
        if self.moe.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(logits.dtype), chosen


class Block(nn.Module):
    def __init__(self, config: ModelConfig, number: int, dtype: torch.dtype) -> None:
        super().__init__()
        c = config
        self.input_layernorm = nn.RMSNorm(c.hidden, c.norm_eps, dtype=dtype)
        if c.latent is None:
            self.self_attn: Attention = GroupedAttention(c, number, dtype)
        else:
            self.self_attn = LatentAttention(c, c.latent, number, dtype)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden, c.norm_eps, dtype=dtype)
        if c.moe is not None and c.has_experts(number):
            self.mlp: nn.Module = MixtureOfExperts(c, c.moe, dtype)
        else:
            self.mlp = Mlp(c.hidden, c.intermediate, dtype, bias=c.mlp_bias)

    def forward(self, x: Tensor, by: Rotation, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), by, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden, dtype=dtype)
        self.layers = nn.ModuleList(Block(config, i, dtype) for i in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, config.norm_eps, dtype=dtype)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states ``[..., positions, hidden]``, from which logits are computed."""
        x: Tensor = self.embed_tokens(tokens)
        by = rotation(self.config.rope, self.config.rope_dim, positions, x.dtype)
        for layer in self.layers:
            x = layer(x, by, attend)
        out: Tensor = self.norm(x)
        return out


class Transformer(nn.Module):
    """The model of a :class:`ModelConfig`.

    Its parameters have arbitrary values until ``load_parameters`` fills them; make it under
    ``torch.device("meta")`` to give them no memory before.

    Raises:
        UnsupportedModel: of models of this kind, or of this variant, only parameters are known.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        check_computed(config)
        dtype: torch.dtype = getattr(torch, config.dtype)
        self.config = config
        self.model = Decoder(config, dtype)
        self.lm_head = None if config.tied else _linear(config.hidden, config.vocab, dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[batch, positions, vocab]`` for token ids ``[batch, positions]`` (int64)."""
        positions = torch.arange(tokens.shape[-1], dtype=torch.int64, device=tokens.device)
        return self.logits(self.model(tokens, positions, attend_rows))

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the next token, from what the decoder gives."""
        if self.lm_head is None:
            return F.linear(hidden, self.model.embed_tokens.weight)
        logits: Tensor = self.lm_head(hidden)
        return logits
