"""What a layer keeps of tokens and what it asks of them: grouped queries, and latent attention."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from fabric_ray.models.config import Latent, ModelConfig, Rope
from fabric_ray.models.tensor_parallel import RankWeights
from fabric_ray.models.transformer import Rotation, rms_norm, rotate, rotation

_POSITIONS = 1024
"""Angles are computed for so many positions at least."""


class Projected(NamedTuple):
    """One rank's share of a batch's tokens."""

    queries: Tensor
    """``[tokens, heads, width]``"""
    kept: tuple[Tensor, ...]
    """What goes to the cache, ``[tokens, held heads, width]`` each, in the layout's order."""


class Heads(Protocol):
    """One kind of attention; ``prefix`` names a layer's weights."""

    @property
    def rope_dim(self) -> int:
        """Width of what position turns."""

    @property
    def scale(self) -> float:
        """By which products of queries and keys are multiplied."""

    def project(self, weights: RankWeights, prefix: str, x: Tensor, by: Rotation) -> Projected:
        """From normed hidden states ``[tokens, hidden]``."""

    def keys_values(self, kept: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Keys and values to attend to, from what was kept (any leading dimensions)."""

    def output(self, weights: RankWeights, prefix: str, mixed: Tensor) -> Tensor:
        """``[tokens, hidden]``, to be summed over ranks, from mixed values
        ``[tokens, heads, width]``."""


class GroupedHeads:
    """Heads of queries that share keys and values (GQA)."""

    def __init__(self, config: ModelConfig, tp: int) -> None:
        self._config = config
        self._sizes = config.heads // tp, max(1, config.kv_heads // tp)
        self.rope_dim = config.head_dim
        self.scale: float = config.head_dim**-0.5

    def project(self, weights: RankWeights, prefix: str, x: Tensor, by: Rotation) -> Projected:
        c, (heads, held) = self._config, self._sizes
        qkv = F.linear(
            x, weights[prefix + "qkv_proj.weight"], weights.get(prefix + "qkv_proj.bias")
        )
        q, k, v = torch.split(qkv.view(len(x), -1, c.head_dim), [heads, held, held], dim=1)
        if c.qk_norm:
            q = rms_norm(q, weights[prefix + "q_norm.weight"], c.norm_eps)
            k = rms_norm(k, weights[prefix + "k_norm.weight"], c.norm_eps)
        return Projected(rotate(q, by), (rotate(k, by), v))

    def keys_values(self, kept: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        k, v = kept
        return k, v

    def output(self, weights: RankWeights, prefix: str, mixed: Tensor) -> Tensor:
        return F.linear(mixed.flatten(1), weights[prefix + "o_proj.weight"])


class LatentHeads:
    """Multi-head latent attention (DeepSeek-V2, section 2.1), with the projections of keys and
    values absorbed into queries and outputs: one latent per token is all that is attended to."""

    def __init__(self, config: ModelConfig, latent: Latent, tp: int) -> None:
        self._latent = latent
        self._eps = config.norm_eps
        self._heads = config.heads // tp
        self.rope_dim = latent.rope_dim
        yarn = config.rope.yarn
        self.scale: float = config.head_dim**-0.5 * (1.0 if yarn is None else yarn.scores)

    def project(self, weights: RankWeights, prefix: str, x: Tensor, by: Rotation) -> Projected:
        z = self._latent
        if z.q_rank:
            down = F.linear(x, weights[prefix + "fused_qkv_a_proj_with_mqa.weight"])
            q_latent, kept = torch.split(down, [z.q_rank, z.kv_rank + z.rope_dim], dim=-1)
            q_latent = rms_norm(q_latent, weights[prefix + "q_a_layernorm.weight"], self._eps)
            q = F.linear(q_latent, weights[prefix + "q_b_proj.weight"])
        else:
            kept = F.linear(x, weights[prefix + "kv_a_proj_with_mqa.weight"])
            q = F.linear(x, weights[prefix + "q_proj.weight"])
        latent, rope = torch.split(kept, [z.kv_rank, z.rope_dim], dim=-1)
        latent = rms_norm(latent, weights[prefix + "kv_a_layernorm.weight"], self._eps)
        rope = rotate(_pairs_apart(rope[:, None]), by)
        by_head = q.view(len(x), self._heads, -1)
        q_plain, q_rope = torch.split(by_head, [z.nope_dim, z.rope_dim], dim=-1)
        to_keys, _ = self._absorbed(weights, prefix)
        q_absorbed = torch.einsum("thn,hnr->thr", q_plain, to_keys)
        q_rope = rotate(_pairs_apart(q_rope), by)
        return Projected(torch.cat([q_absorbed, q_rope], dim=-1), (latent[:, None], rope))

    def keys_values(self, kept: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        latent, rope = kept
        return torch.cat([latent, rope], dim=-1), latent

    def output(self, weights: RankWeights, prefix: str, mixed: Tensor) -> Tensor:
        _, to_values = self._absorbed(weights, prefix)
        values = torch.einsum("thr,hvr->thv", mixed, to_values)
        return F.linear(values.flatten(1), weights[prefix + "o_proj.weight"])

    def _absorbed(self, weights: RankWeights, prefix: str) -> tuple[Tensor, Tensor]:
        """Projections from latents, ``[heads, width, kv_rank]``."""
        z = self._latent
        kv_b = weights[prefix + "kv_b_proj.weight"]
        by_head = kv_b.view(self._heads, -1, kv_b.shape[-1])
        to_keys, to_values = torch.split(by_head, [z.nope_dim, z.value_dim], dim=1)
        return to_keys, to_values


def heads_of(config: ModelConfig, tp: int) -> Heads:
    """The attention of a model on one of ``tp`` ranks."""
    if config.latent is not None:
        return LatentHeads(config, config.latent, tp)
    return GroupedHeads(config, tp)


class Angles:
    """Rotations of positions, computed once for as many as were asked for."""

    def __init__(self, rope: Rope, width: int, dtype: torch.dtype) -> None:
        self._rope, self._width, self._dtype = rope, width, dtype
        self._known = self._compute(_POSITIONS)

    def at(self, positions: Tensor) -> Rotation:
        """Cosines and sines ``[tokens, 1, width]``."""
        most = int(positions.max()) + 1
        if most > len(self._known[0]):
            self._known = self._compute(1 << (most - 1).bit_length())
        cos, sin = self._known
        return cos[positions, None], sin[positions, None]

    def _compute(self, positions: int) -> Rotation:
        device = torch.device("cpu")
        return rotation(self._rope, self._width, positions, dtype=self._dtype, device=device)


def _pairs_apart(x: Tensor) -> Tensor:
    """DeepSeek turns neighbouring elements together, ``rotate`` those half a width apart."""
    return x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
