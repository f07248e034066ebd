"""The same model as an inference engine computes it, from the containers of all its ranks.

One process plays every rank: what ranks would add up over the wire is added here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fabric_ray.models.config import ModelConfig, Moe, check_computed
from fabric_ray.models.transformer import Rotation, attend, rms_norm, rotation, route, wide

RankWeights = Mapping[str, Tensor]
"""The containers of one rank, by name."""


@torch.no_grad()
def forward(
    config: ModelConfig, ranks: Sequence[RankWeights], tokens: Tensor, *, ep: int = 1
) -> Tensor:
    """Logits ``[batch, positions, vocab]`` of a replica whose ranks hold ``ranks``.

    Args:
        config: the model.
        ranks: containers as ``fabric_ray.weights.families`` lays them out, rank 0 first.
        tokens: ids ``[batch, positions]``, int64.
        ep: groups of ranks that own whole experts.

    Raises:
        UnsupportedModel: models of this kind or variant can't be computed.
    """
    check_computed(config)
    c = config
    x = embed(ranks, tokens)
    by = rotation(c.rope, c.head_dim, tokens.shape[-1], dtype=x.dtype, device=x.device)
    first = ranks[0]
    for layer in range(c.layers):
        prefix = f"model.layers.{layer}."
        normed = rms_norm(x, first[prefix + "input_layernorm.weight"], c.norm_eps)
        x = x + _attention(c, ranks, prefix + "self_attn.", normed, by, c.window_of(layer))
        normed = rms_norm(x, first[prefix + "post_attention_layernorm.weight"], c.norm_eps)
        x = x + feed_forward(c, ranks, layer, normed, ep=ep)
    return logits(c, ranks, rms_norm(x, first["model.norm.weight"], c.norm_eps))


def embed(ranks: Sequence[RankWeights], tokens: Tensor) -> Tensor:
    """Each rank looks up the ids in its share of the vocabulary."""
    parts = []
    for index, rank in enumerate(ranks):
        table = rank["model.embed_tokens.weight"]
        local = tokens - index * table.shape[0]
        mine = (local >= 0) & (local < table.shape[0])
        parts.append(table[local.where(mine, 0)] * mine[..., None])
    return sum(parts[1:], parts[0])


def _attention(
    c: ModelConfig,
    ranks: Sequence[RankWeights],
    prefix: str,
    x: Tensor,
    by: Rotation,
    window: int | None,
) -> Tensor:
    tp = len(ranks)
    heads, kv_heads = c.heads // tp, max(1, c.kv_heads // tp)
    parts = []
    for rank in ranks:
        qkv = F.linear(x, rank[prefix + "qkv_proj.weight"], rank.get(prefix + "qkv_proj.bias"))
        by_head = qkv.view(*qkv.shape[:-1], -1, c.head_dim)
        q, k, v = torch.split(by_head, [heads, kv_heads, kv_heads], dim=-2)
        if c.qk_norm:
            q = rms_norm(q, rank[prefix + "q_norm.weight"], c.norm_eps)
            k = rms_norm(k, rank[prefix + "k_norm.weight"], c.norm_eps)
        parts.append(F.linear(attend(q, k, v, by, window=window), rank[prefix + "o_proj.weight"]))
    return reduce(parts, ranks[0].get(prefix + "o_proj.bias"))


def feed_forward(
    c: ModelConfig, ranks: Sequence[RankWeights], layer: int, x: Tensor, *, ep: int = 1
) -> Tensor:
    """What a layer does after attention, to its normed input."""
    prefix = f"model.layers.{layer}.mlp."
    if c.moe is not None and c.has_experts(layer):
        return _experts(c.moe, ranks, prefix, x, ep)
    return _mlp(ranks, prefix, x)


def logits(c: ModelConfig, ranks: Sequence[RankWeights], x: Tensor) -> Tensor:
    """Of normed hidden states; each rank has those of its share of the vocabulary."""
    head = "model.embed_tokens.weight" if c.tied else "lm_head.weight"
    parts = [F.linear(x, rank[head]) for rank in ranks]
    return torch.cat(parts, dim=-1)[..., : c.vocab]


def _mlp(ranks: Sequence[RankWeights], prefix: str, x: Tensor) -> Tensor:
    parts = []
    for rank in ranks:
        bias = rank.get(prefix + "gate_up_proj.bias")
        gate, up = F.linear(x, rank[prefix + "gate_up_proj.weight"], bias).chunk(2, dim=-1)
        parts.append(F.linear(F.silu(gate) * up, rank[prefix + "down_proj.weight"]))
    return reduce(parts, ranks[0].get(prefix + "down_proj.bias"))


def _experts(moe: Moe, ranks: Sequence[RankWeights], prefix: str, x: Tensor, ep: int) -> Tensor:
    tokens = x.flatten(0, -2)
    weights, chosen = route(F.linear(tokens, ranks[0][prefix + "gate.weight"]), moe)
    parts = []
    inner = len(ranks) // ep
    first = 0
    for index, rank in enumerate(ranks):
        w13, w2 = rank[prefix + "experts.w13_weight"], rank[prefix + "experts.w2_weight"]
        part = torch.zeros_like(tokens)
        for local in range(w13.shape[0]):
            token, place = (chosen == first + local).nonzero(as_tuple=True)
            gate, up = F.linear(tokens[token], w13[local]).chunk(2, dim=-1)
            out = F.linear(F.silu(gate) * up, w2[local])
            part.index_add_(0, token, out * weights[token, place, None])
        parts.append(part)
        if index % inner == inner - 1:
            first += w13.shape[0]
    if moe.shared_intermediate and not moe.shared_gate:
        parts.append(_mlp(ranks, prefix + "shared_experts.", tokens))
    elif moe.shared_intermediate:
        gate = F.linear(tokens, ranks[0][prefix + "shared_expert_gate.weight"]).sigmoid()
        parts.append(gate * _mlp(ranks, prefix + "shared_expert.", tokens))
    return reduce(parts, None).view_as(x)


def reduce(parts: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """What an all-reduce over the ranks gives: added one by one, in their order."""
    total = functools.reduce(torch.add, map(wide, parts)).to(parts[0].dtype)
    return total if bias is None else total + bias
