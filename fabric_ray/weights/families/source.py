"""The simplest other end: ranks that hold every parameter whole, under its own name."""

from __future__ import annotations

from collections.abc import Sequence

from fabric_ray.models.config import ModelConfig, Shape, parameter_dtype, parameter_shapes
from fabric_ray.plan.types import Container, DType, Leaf, Mesh, Replicate, Side, Tensor


def source_side(config: ModelConfig, *, ranks: Sequence[int] = (0,)) -> Side:
    """A side of full parameters, on one rank or replicated on several.

    Trainers that shard describe themselves instead: see ``fabric_ray.plan.dtensor``.
    """
    mesh = Mesh.line(ranks)

    def whole(name: str, shape: Shape) -> Container:
        dtype = DType.of(parameter_dtype(config, name))
        return Container(name, dtype, Leaf(Tensor(name, shape, dtype), mesh, (Replicate(),)))

    return Side.of(ranks, [whole(*item) for item in parameter_shapes(config).items()])
