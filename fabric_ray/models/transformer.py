"""A trainable decoder-only transformer whose parameters bear Hugging Face's names and shapes."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fabric_ray.models.config import ModelConfig, Moe, Rope, Yarn, check_computed

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, each ``[positions, head_dim]``."""


def wide(x: Tensor) -> Tensor:
    """``x`` in the precision of sums and norms: float32, or its own where that is more."""
    return x if x.dtype == torch.float64 else x.float()


def rotation(
    rope: Rope, head_dim: int, positions: int, *, dtype: torch.dtype, device: torch.device
) -> Rotation:
    """The angles by which position turns queries and keys (RoFormer; Llama 3.1 scaling, YaRN)."""
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, head_dim, 2, dtype=precise, device=device) / head_dim
    frequencies = rope.theta**-exponents
    if (scaling := rope.scaling) is not None:
        wavelengths = 2 * math.pi / frequencies
        smooth = (scaling.original_positions / wavelengths - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        smooth = smooth.clamp(0, 1)
        frequencies = frequencies * (smooth + (1 - smooth) / scaling.factor)
    if rope.yarn is not None:
        kept = _kept(rope.theta, rope.yarn, head_dim, frequencies)
        frequencies = frequencies * (kept + (1 - kept) / rope.yarn.factor)
    angles = torch.outer(torch.arange(positions, dtype=torch.int64, device=device), frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    scale = 1.0 if rope.yarn is None else rope.yarn.turned
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def _kept(theta: float, yarn: Yarn, head_dim: int, frequencies: Tensor) -> Tensor:
    """How much of each frequency YaRN keeps: 1 for the fastest, 0 for the slowest."""

    def element(turns: float) -> float:
        """The one that turns so often over the original positions."""
        wavelength = yarn.original_positions / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low = max(math.floor(element(yarn.beta_fast)), 0)
    high = min(math.ceil(element(yarn.beta_slow)), head_dim - 1)
    elements = torch.arange(len(frequencies), dtype=frequencies.dtype, device=frequencies.device)
    return 1 - ((elements - low) / max(high - low, 0.001)).clamp(0, 1)


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Turns ``x`` of shape ``[..., positions, head_dim]``."""
    cos, sin = by
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scales the last dimension to unit root mean square, computed in float32 at least."""
    scaled = wide(x)
    scaled = scaled * torch.rsqrt(scaled.square().mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def route(logits: Tensor, moe: Moe) -> tuple[Tensor, Tensor]:
    """Weights and numbers of the experts of each token, ``[tokens, top_k]`` both."""
    weights, chosen = wide(logits).softmax(-1).topk(moe.top_k, dim=-1)
    if moe.normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), chosen


def _parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """Arbitrary values, on the device that the caller builds the model on."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=torch.get_default_device()))


class Linear(nn.Module):
    """``nn.Linear`` without the initial values, which are about to be replaced."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool) -> None:
        super().__init__()
        self.weight = _parameter((outputs, inputs), dtype)
        self.bias = _parameter((outputs,), dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """``nn.Embedding`` without the initial values."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _parameter((rows, width), dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _parameter((size,), dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, window: int | None, dtype: torch.dtype) -> None:
        super().__init__()
        c = config
        self.head_dim = c.head_dim
        self.window = window
        self.q_proj = Linear(c.hidden, c.q_width, dtype, bias=c.qkv_bias)
        self.k_proj = Linear(c.hidden, c.kv_width, dtype, bias=c.qkv_bias)
        self.v_proj = Linear(c.hidden, c.kv_width, dtype, bias=c.qkv_bias)
        self.o_proj = Linear(c.q_width, c.hidden, dtype, bias=c.out_bias)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps, dtype) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps, dtype) if c.qk_norm else None

    def forward(self, x: Tensor, by: Rotation) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out: Tensor = self.o_proj(attend(q, k, v, by, window=self.window))
        return out


def attend(q: Tensor, k: Tensor, v: Tensor, by: Rotation, *, window: int | None = None) -> Tensor:
    """Causal attention of ``[batch, positions, heads, head_dim]``, fewer heads for k and v.

    With a ``window`` a token sees itself and the ``window - 1`` before it.

    Returns ``[batch, positions, heads * head_dim]``.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    q, k = rotate(q, by), rotate(k, by)
    seen = None
    if window is not None and window < q.shape[2]:
        everything = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device)
        seen = everything.tril().triu(1 - window)
    mixed = F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=True
    )
    return mixed.transpose(1, 2).flatten(2)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, width: int, dtype: torch.dtype, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, width, dtype, bias=bias)
        self.up_proj = Linear(hidden, width, dtype, bias=bias)
        self.down_proj = Linear(width, hidden, dtype, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MixtureOfExperts(nn.Module):
    def __init__(self, config: ModelConfig, moe: Moe, dtype: torch.dtype) -> None:
        super().__init__()
        self.moe = moe
        self.gate = Linear(config.hidden, moe.experts, dtype, bias=False)
        self.experts = nn.ModuleList(
            Mlp(config.hidden, moe.intermediate, dtype) for _ in range(moe.experts)
        )
        width = moe.shared_intermediate
        self.shared_expert = Mlp(config.hidden, width, dtype) if width else None
        self.shared_expert_gate = Linear(config.hidden, 1, dtype, bias=False) if width else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = route(self.gate(tokens), self.moe)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            # Experts without tokens run too: sharded training needs a gradient from every
            # parameter on every rank, or ranks would reduce different sets of them.
            token, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(tokens[token]) * weights[token, place, None])
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            out = out + self.shared_expert_gate(tokens).sigmoid() * self.shared_expert(tokens)
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        c = config
        self.input_layernorm = RMSNorm(c.hidden, c.norm_eps, dtype)
        self.self_attn = Attention(c, c.window_of(layer), dtype)
        self.post_attention_layernorm = RMSNorm(c.hidden, c.norm_eps, dtype)
        if c.moe is not None and c.has_experts(layer):
            self.mlp: nn.Module = MixtureOfExperts(c, c.moe, dtype)
        else:
            self.mlp = Mlp(c.hidden, c.intermediate, dtype, bias=c.mlp_bias)

    def forward(self, x: Tensor, by: Rotation) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), by)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab, config.hidden, dtype)
        self.layers = nn.ModuleList(Block(config, i, dtype) for i in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps, dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(tokens)
        c = self.config
        by = rotation(c.rope, c.head_dim, tokens.shape[-1], dtype=x.dtype, device=x.device)
        for layer in self.layers:
            x = layer(x, by)
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
        self.lm_head = (
            None if config.tied else Linear(config.hidden, config.vocab, dtype, bias=False)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[batch, positions, vocab]`` for token ids ``[batch, positions]`` (int64)."""
        x: Tensor = self.model(tokens)
        if self.lm_head is None:
            return F.linear(x, self.model.embed_tokens.weight)
        logits: Tensor = self.lm_head(x)
        return logits
