"""Trainers that gather, replicas and rollouts within one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fabric_ray import TransferEngine
from fabric_ray.plan import Side
from fabric_ray.weights import WeightSync, WeightTarget
from fabric_ray.weights.replica import EngineReplica, LayoutReplica, ReplicaSource
from tests.unit.weights.local_sync import InProcess

Tensors = Mapping[str, torch.Tensor]


class Setup(InProcess):
    """Stages of trainers with equal weights, and the rollouts of a side.

    Args:
        stages: how many trainers each has, and what they gather.
        side: the rollouts'.
        replica: makes a trainer's.
    """

    def __init__(
        self,
        stages: Sequence[tuple[int, Tensors]],
        side: Side,
        *,
        replica: Callable[[], EngineReplica] | None = None,
        staged: bool = True,
        digest: bool = True,
        timeout: float = 5.0,
        leave: Sequence[str] = (),
        relay: bool = False,
        lost: Any = "raise",
        **options: Any,
    ) -> None:
        self.engines: dict[str, TransferEngine] = {}
        self.sources: list[ReplicaSource] = []
        for stage, (count, tensors) in enumerate(stages):
            for _ in range(count):
                who = f"trainer {len(self.sources)}"
                source = ReplicaSource(
                    tensors,
                    replica() if replica else LayoutReplica(side),
                    rank=len(self.sources),
                    stage=stage,
                    name=who,
                    engine=self._engine(who),
                    **options,
                )
                self.sources.append(source)
        self._side, self._staged = side, staged
        self.targets: list[WeightTarget] = []
        for rank in side.ranks:
            self.another(rank)
        self.sync = WeightSync(
            [source.name for source in self.sources],
            [target.name for target in self.targets],
            digest=digest,
            timeout=timeout,
            leave=leave,
            relay=relay,
            lost=lost,
            calls=self,
        )

    def another(self, rank: int) -> str:
        """A further rollout; its number is the next."""
        who = f"rollout {len(self.targets)}"
        engine = self._engine(who)
        target = WeightTarget(self._side, rank=rank, name=who, engine=engine, staged=self._staged)
        self.targets.append(target)
        return who

    def _engine(self, who: str) -> TransferEngine:
        self.engines[who] = TransferEngine(name=who, transport="shm")
        return self.engines[who]

    def kill(self, who: str) -> None:
        self.dead.add(who)
        self.engines[who].close()

    def close(self) -> None:
        for part in (*self.sources, *self.targets):
            part.close()
        for engine in self.engines.values():
            engine.close()


def split(full: Tensors, stages: int) -> list[dict[str, torch.Tensor]]:
    """A model's parameters by pipeline stage: layers in equal numbers, the frame at the ends."""
    layers = 1 + max(int(name.split(".")[2]) for name in full if ".layers." in name)
    out: list[dict[str, torch.Tensor]] = [{} for _ in range(stages)]
    for name, tensor in full.items():
        if ".layers." in name:
            stage = int(name.split(".")[2]) * stages // layers
        else:
            stage = 0 if "embed" in name else stages - 1
        out[stage][name] = tensor
    return out


def closing(made: list[Setup]) -> Iterator[Callable[..., Setup]]:
    """For fixtures."""

    def make(*args: Any, **options: Any) -> Setup:
        made.append(Setup(*args, **options))
        return made[-1]

    yield make
    for setup in made:
        setup.close()
