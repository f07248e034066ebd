"""A pair of pushes of the same tensors, by changes and whole, whose results must be equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fabric_ray import TransferEngine
from fabric_ray.plan import Container, DType, Leaf, Mesh, Replicate, Shard, Side, Tensor
from fabric_ray.weights import WeightSource, WeightSync, WeightTarget
from fabric_ray.weights.quant import Formats, quantised_target
from tests.unit.weights.local_sync import InProcess

# Sizes in elements: one is cut into many blocks, one has runs of a few elements only.
SHAPES = {"embed": (1000, 96), "up": (256, 512), "down": (512, 128), "norm": (96,)}
TRAINERS, TP = 2, 2
_ALONG = {"embed": 0, "up": 0, "down": 1, "norm": None}


def _side(ranks: int, engines: int, dtypes: Mapping[str, str], along: Mapping[str, Any]) -> Side:
    mesh = Mesh(tuple(range(ranks)), (engines, ranks // engines))
    containers = []
    for name, shape in SHAPES.items():
        dtype, dim = DType.of(dtypes[name]), along[name]
        placement = Replicate() if dim is None else Shard(dim)
        leaf = Leaf(Tensor(name, shape, dtype), mesh, (Replicate(), placement))
        containers.append(Container(name, dtype, leaf))
    return Side.of(ranks, containers)


class World(InProcess, WeightSync):
    """Two FSDP-like trainers and tensor-parallel rollouts, in one process."""

    def __init__(
        self,
        *,
        engines: int = 1,
        staged: bool = True,
        into: bool = False,
        dtype: str = "bfloat16",
        arriving: str = "bfloat16",
        formats: Formats | None = None,
        prefix: str = "",
        **options: Any,
    ) -> None:
        self.prefix = prefix
        """Of the actors' names."""
        held = dict.fromkeys(SHAPES, dtype)
        source = _side(TRAINERS, 1, held, {"embed": 0, "up": 0, "down": 0, "norm": None})
        target = _side(engines * TP, engines, dict.fromkeys(SHAPES, arriving), _ALONG)
        self._side = quantised_target(target, formats) if formats else target
        trainers = [f"{prefix}trainer {i}" for i in range(TRAINERS)]
        rollouts = [f"{prefix}rollout {i}" for i in range(engines * TP)]
        super().__init__(trainers, rollouts, formats=formats, timeout=5.0, calls=self, **options)
        self._staged, self._into = staged, into
        self.engines = {who: TransferEngine(name=who, transport="shm") for who in trainers}
        whole = {
            name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, shape in SHAPES.items()
        }
        self.tensors = [
            {
                name: (t if name == "norm" else t.chunk(TRAINERS)[rank]).clone()
                for name, t in whole.items()
            }
            for rank in range(TRAINERS)
        ]
        self.sources = [
            WeightSource(self.tensors[i], rank=i, side=source, name=who, engine=self.engines[who])
            for i, who in enumerate(trainers)
        ]
        self.targets = [self._target(who, rank) for rank, who in enumerate(rollouts)]

    def another(self, rank: int) -> str:
        """A further rollout, whose number is the next."""
        who = f"{self.prefix}rollout {len(self.targets)}"
        self.targets.append(self._target(who, rank))
        return who

    def _target(self, who: str, rank: int) -> WeightTarget:
        self.engines[who] = TransferEngine(name=who, transport="shm")
        into = None
        if self._into:
            from fabric_ray.weights.replica.sides import whole_plan

            containers = whole_plan(self._side).local_containers("target", rank)
            dtypes = {c.name: getattr(torch, c.dtype) for c in containers}
            into = {c.name: torch.zeros(c.shape, dtype=dtypes[c.name]) for c in containers}
        options: dict[str, Any] = {"rank": rank, "name": who, "engine": self.engines[who]}
        return WeightTarget(self._side, staged=self._staged, into=into, **options)

    def train(self, share: float, seed: int) -> None:
        """Changes about this share of the elements of each tensor, on all trainers alike where they
        hold the same."""
        for rank, tensors in enumerate(self.tensors):
            for number, (name, tensor) in enumerate(tensors.items()):
                owner = 0 if name == "norm" else rank
                generator = torch.Generator().manual_seed(1000 * seed + 10 * number + owner)
                chosen = torch.rand(tensor.shape, generator=generator) < share
                values = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
                tensor.copy_(torch.where(chosen, values, tensor))

    def in_use(self, number: int) -> dict[str, torch.Tensor]:
        """The bytes of a rollout's version in use."""
        return {
            name: tensor.contiguous().view(-1).view(torch.uint8).clone()
            for name, tensor in self.targets[number].weights.items()
        }

    def spoil(self, number: int, name: str) -> None:
        """Changes an element of the version in use, as broken memory would."""
        target = self.targets[number]
        container = next(c for c in target._layout if c.name == name)
        staging = target._staging[target._live]
        flat = staging._memory
        flat[staging.offsets[container.index] + container.nbytes // 2] ^= 0x55

    def close(self) -> None:
        for part in (*self.sources, *self.targets):
            part.close()
        for engine in self.engines.values():
            engine.close()


class Pair:
    """A world that sends changes, and one that sends everything, trained and called alike."""

    def __init__(self, *, delta: Any = "always", **options: Any) -> None:
        self.delta, self.whole = World(delta=delta, **options), World(prefix="whole ", **options)

    def train(self, share: float, seed: int) -> None:
        for world in (self.delta, self.whole):
            world.train(share, seed)

    def push(self) -> Any:
        """Pushes in both; returns the report of the one that sends changes."""
        self.whole.push()
        return self.delta.push()

    def differ(self) -> list[str]:
        """What differs between the rollouts of the two."""
        assert self.delta.rollouts == self.whole.rollouts
        found = []
        for number in self.delta.rollouts:
            mine, wanted = self.delta.in_use(number), self.whole.in_use(number)
            assert mine.keys() == wanted.keys()
            found += [f"`{n}` of rollout {number}" for n in mine if not mine[n].equal(wanted[n])]
        return found

    def close(self) -> None:
        self.delta.close()
        self.whole.close()
