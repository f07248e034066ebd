"""Tensors cut into what an engine rank holds, as an engine's own loader does it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from fabric_ray.models import ModelConfig, parameter_shapes
from fabric_ray.plan import Copy, Plan, Replicate, Side, plan
from fabric_ray.plan.types import Container, DType, Leaf, Mesh, Tensor

DTYPE = torch.bfloat16


def whole_side(config: ModelConfig) -> Side:
    """One rank that holds every tensor whole, under its Hugging Face name."""
    dtype, mesh = DType.of("bfloat16"), Mesh.line([0])
    return Side.of(
        1,
        [
            Container(name, dtype, Leaf(Tensor(name, shape, dtype), mesh, (Replicate(),)))
            for name, shape in parameter_shapes(config).items()
        ],
    )


class Loader:
    """Memory for what a rank holds, and the copies that fill it from tensors or shards.

    Args:
        routes: from the holders of the tensors to all ranks.
        rank: this one.
    """

    def __init__(self, routes: Plan, rank: int) -> None:
        containers = routes.local_containers("target", rank)
        self.held = {
            c.name: torch.zeros(c.nbytes // DTYPE.itemsize, dtype=DTYPE) for c in containers
        }
        names = routes.containers("source"), routes.containers("target")
        self._copies: dict[tuple[int, str], list[tuple[str, Copy]]] = defaultdict(list)
        for copy in routes.for_target(rank):
            key = copy.peer, names[0][copy.src_container]
            self._copies[key].append((names[1][copy.dst_container], copy))

    def load(self, name: str, tensor: torch.Tensor, *, holder: int = 0) -> None:
        """Copies the parts of a holder's tensor or shard that belong here."""
        flat = tensor.view(-1)
        for container, copy in self._copies[holder, name]:
            source = _part(flat, copy, [x.src_stride for x in copy.loops], copy.src_offset)
            room = self.held[container]
            _part(room, copy, [x.dst_stride for x in copy.loops], copy.dst_offset).copy_(source)

    def wanted(self) -> list[tuple[int, str]]:
        """Holders and names of all that is cut up here."""
        return list(self._copies)

    def differs(self, weights: Mapping[str, torch.Tensor]) -> list[str]:
        """Containers whose bytes are others than in ``weights``."""
        bits = torch.int16
        return [
            name
            for name, room in self.held.items()
            if not torch.equal(room.view(bits), weights[name].reshape(-1).view(bits))
        ]


def routes_of_whole(config: ModelConfig, target: Side) -> Plan:
    """From whole tensors to every rank."""
    return plan(whole_side(config), target)


def _part(flat: torch.Tensor, copy: Copy, strides: list[int], offset: int) -> torch.Tensor:
    size = flat.element_size()
    counts = [loop.count for loop in copy.loops]
    shape = (*counts, copy.run // size)
    # From the storage's begin, wherever the tensor begins in it.
    at = flat.storage_offset() + offset // size
    return flat.as_strided(shape, (*(s // size for s in strides), 1), at)
