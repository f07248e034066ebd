"""The simplest other end: ranks that hold every parameter whole, under its own name."""

from __future__ import annotations

from collections.abc import Sequence

from fabric_ray.models.config import ModelConfig, parameter_shapes
from fabric_ray.plan.types import Container, DType, Leaf, Mesh, Replicate, Side, Tensor


def source_side(config: ModelConfig, *, ranks: Sequence[int] = (0,)) -> Side:
    """A side of full parameters, on one rank or replicated on several.

    Trainers that shard describe themselves instead: see ``fabric_ray.plan.dtensor``.
    """
    dtype = DType.of(config.dtype)
    mesh = Mesh.line(ranks)
    containers = [
        Container(name, dtype, Leaf(Tensor(name, shape, dtype), mesh, (Replicate(),)))
        for name, shape in parameter_shapes(config).items()
    ]
    return Side.of(ranks, containers)
