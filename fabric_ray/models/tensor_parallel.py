"""From the containers that an inference engine holds back to a model's parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fabric_ray.models.config import ModelConfig, check_computed

RankWeights = Mapping[str, Tensor]
"""The containers of one rank, by name."""

Parts = Sequence[Tensor]
"""A container on all ranks."""


def full_parameters(
    config: ModelConfig, ranks: Sequence[RankWeights], *, ep: int = 1
) -> dict[str, Tensor]:
    """Every parameter by its Hugging Face name; those of a single rank are views.

    Args:
        config: the model.
        ranks: containers as ``fabric_ray.weights.families`` lays them out, rank 0 first.
        ep: groups of ranks that own whole experts.

    Raises:
        UnsupportedModel: models of this kind or variant can't be computed.
    """
    check_computed(config)
    out: dict[str, Tensor] = {}
    for name in ranks[0]:
        out.update(_parameters(config, name, [rank[name] for rank in ranks], ep))
    return out


def _parameters(c: ModelConfig, name: str, parts: Parts, ep: int) -> Iterator[tuple[str, Tensor]]:
    module, _, kind = name.rpartition(".")
    path, _, container = module.rpartition(".")
    if kind == "w13_weight":
        gate, up = _halves(parts, dim=1)
        yield from _experts(f"{module}.{{}}.gate_proj.weight", gate, ep, dim=0)
        yield from _experts(f"{module}.{{}}.up_proj.weight", up, ep, dim=0)
    elif kind == "w2_weight":
        yield from _experts(f"{module}.{{}}.down_proj.weight", parts, ep, dim=1)
    elif container == "qkv_proj":
        q, k, v = _heads(c, parts)
        for letter, tensor in (("q", q), ("k", k), ("v", v)):
            yield f"{path}.{letter}_proj.{kind}", tensor
    elif container == "gate_up_proj":
        gate, up = _halves(parts, dim=0)
        yield f"{path}.gate_proj.{kind}", _joined(gate, dim=0)
        yield f"{path}.up_proj.{kind}", _joined(up, dim=0)
    elif container == "fused_qkv_a_proj_with_mqa":
        assert c.latent is not None, "only latent attention has it"
        yield f"{path}.q_a_proj.weight", parts[0][: c.latent.q_rank]
        yield f"{path}.kv_a_proj_with_mqa.weight", parts[0][c.latent.q_rank :]
    elif container in ("embed_tokens", "lm_head"):
        yield name, _joined(parts, dim=0)[: c.vocab]
    elif container in ("q_proj", "q_b_proj", "kv_b_proj"):
        yield name, _joined(parts, dim=0)
    elif container in ("o_proj", "down_proj") and kind == "weight":
        yield name, _joined(parts, dim=1)
    else:
        yield name, parts[0]  # the same on every rank


def _heads(c: ModelConfig, parts: Parts) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values; ranks that hold the same key and value heads are neighbours."""
    tp = len(parts)
    queries, held = c.q_width // tp, max(1, c.kv_heads // tp) * c.head_dim
    q, k, v = zip(*(torch.split(part, [queries, held, held]) for part in parts), strict=True)
    step = max(1, tp // c.kv_heads)
    return _joined(q, dim=0), _joined(k[::step], dim=0), _joined(v[::step], dim=0)


def _halves(parts: Parts, *, dim: int) -> tuple[Parts, Parts]:
    first, second = zip(*(part.chunk(2, dim) for part in parts), strict=True)
    return first, second


def _experts(name: str, parts: Parts, ep: int, *, dim: int) -> Iterator[tuple[str, Tensor]]:
    """Neighbours share experts; a group of them owns those after the group before it."""
    inner, number = len(parts) // ep, 0
    for first in range(0, len(parts), inner):
        for shares in zip(*(part.unbind() for part in parts[first : first + inner]), strict=True):
            yield name.format(number), _joined(shares, dim=dim)
            number += 1


def _joined(parts: Parts, *, dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)
