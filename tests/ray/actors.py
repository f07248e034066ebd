"""Trainers and rollouts of the tests: small models, nothing hidden."""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fabric_ray import runtime
from fabric_ray.models import ModelConfig
from fabric_ray.plan import Concat, Container, DType, Leaf, Mesh, Replicate, Shard, Side, Tensor
from fabric_ray.weights import WeightSource, WeightTarget
from fabric_ray.weights.replica import LayoutReplica, ReplicaSource

BF16 = DType.of("bfloat16")
SHAPES = {"q": (64, 96), "k": (32, 96), "norm": (96,)}


def values(name: str, version: int) -> torch.Tensor:
    """What a parameter holds at a version."""
    seed = sum(name.encode()) * 1000 + version
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPES[name], generator=generator).to(torch.bfloat16)


def side(rollouts: int, shapes: dict[str, tuple[int, ...]] | None = None) -> Side:
    """q and k in one container, cut by rows; the norm everywhere."""
    shapes = shapes or SHAPES
    mesh = Mesh.line(range(rollouts))

    def leaf(name: str, placement: Any) -> Leaf:
        return Leaf(Tensor(name, shapes[name], BF16), mesh, (placement,))

    qk = Concat(0, (leaf("q", Shard(0)), leaf("k", Shard(0))))
    return Side.of(
        rollouts, [Container("qk", BF16, qk), Container("norm", BF16, leaf("norm", Replicate()))]
    )


def expected(rank: int, rollouts: int, version: int) -> dict[str, torch.Tensor]:
    q, k = (values(name, version).chunk(rollouts)[rank] for name in ("q", "k"))
    return {"qk": torch.cat([q, k]), "norm": values("norm", version)}


class Member:
    """A process that plays one part at a time: starting processes takes longer than the tests."""

    def trainer(self, rank: int, names: list[str], big: int, engine: dict[str, Any]) -> None:
        """Holds some of the parameters whole."""
        self.names = names
        self.tensors = {name: values(name, 0) for name in names}
        if big:
            self.tensors["big"] = torch.zeros(big, dtype=torch.bfloat16)
        self.part: Any = WeightSource(self.tensors, rank=rank, engine=runtime.engine(**engine))

    def serve(self) -> int:
        """Opens the store where two gatherers find each other; returns its port."""
        from fabric_ray.models import fsdp

        self.store = fsdp.serve_store("127.0.0.1", world=2)
        return self.store.port

    def gatherer(
        self, rank: int, port: int, config: ModelConfig, target: Side, engine: dict[str, Any]
    ) -> None:
        """Holds a half of every parameter."""
        from fabric_ray.models import fsdp
        from fabric_ray.models.boxes import InitialWeights

        store = self.store if rank == 0 else None
        fsdp.join(rank=rank, world=2, address="127.0.0.1", port=port, store=store)
        self.model = fsdp.sharded_model(config, fsdp.make_mesh(), InitialWeights(config, seed=1))
        self.part = ReplicaSource(
            self.model,
            LayoutReplica(target),
            rank=rank,
            engine=runtime.engine(**engine),
            bucket=13_000,
        )

    def halve(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.5)

    def gathered(self) -> dict[str, torch.Tensor]:
        from fabric_ray.models.fsdp import full_tensors

        return {name: tensor.clone() for name, tensor in full_tensors(self.model)}

    def rollout(self, rank: int, target: Side, staged: bool, engine: dict[str, Any]) -> None:
        """Holds a target."""
        self.part = WeightTarget(target, rank=rank, engine=runtime.engine(**engine), staged=staged)
        self.committed: list[int] = []
        self.part.on_commit(self.committed.append)

    def leave(self) -> None:
        self.part.close()
        self.part = None
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        runtime.shutdown()

    def pid(self) -> int:
        return os.getpid()

    def train(self, version: int) -> None:
        for name in self.names:
            self.tensors[name].copy_(values(name, version))
        if "big" in self.tensors:
            self.tensors["big"].fill_(version)

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        self.tensors[name] = tensor

    def free(self, name: str) -> None:
        self.tensors[name].untyped_storage().resize_(0)

    def break_hook(self) -> None:
        def fail(version: int) -> None:
            raise RuntimeError(f"no {version} here")

        self.part._hooks.insert(0, fail)

    def state(self) -> tuple[int | None, list[int]]:
        return self.part.version, self.committed

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.part.weights.items()}

    def belongings(self) -> tuple[int, int]:
        """Descriptors of the process, and threads of ours."""
        threads = 0
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has ended
                threads += (task / "comm").read_text().startswith("fabric-")
        return len(os.listdir("/proc/self/fd")), threads


_idle: dict[str, list[Any]] = defaultdict(list)
_homes: dict[Any, str] = {}


def _take(node: str) -> Any:
    if _idle[node]:
        return _idle[node].pop()
    where = NodeAffinitySchedulingStrategy(node, soft=False)
    actor = ray.remote(Member).options(num_cpus=0, scheduling_strategy=where).remote()  # type: ignore[attr-defined]
    _homes[actor] = node
    return actor


def start(
    nodes: list[str],
    *,
    rollouts: int = 2,
    target: Side | None = None,
    staged: bool = True,
    big: int = 0,
    **engine: Any,
) -> tuple[list[Any], list[Any]]:
    """Two trainers on the first node, rollouts on the others."""
    engine = {"peer_timeout": 4.0, **engine}
    trainers = [_take(nodes[0]) for _ in range(2)]
    receivers = [_take(nodes[1 + rank % 2]) for rank in range(rollouts)]
    parts = [
        actor.trainer.remote(rank, names, big, engine)
        for rank, (actor, names) in enumerate(
            zip(trainers, (["q", "norm"], ["k", "norm"]), strict=True)
        )
    ]
    for rank, actor in enumerate(receivers):
        parts.append(actor.rollout.remote(rank, target or side(rollouts), staged, engine))
    ray.get(parts)
    return trainers, receivers


def start_gatherers(
    nodes: list[str], config: ModelConfig, target: Side
) -> tuple[list[Any], list[Any]]:
    """Two trainers that shard a model and gather it, on the first node; rollouts on the others."""
    engine = {"peer_timeout": 4.0}
    trainers = [_take(nodes[0]) for _ in range(2)]
    rollouts = [_take(nodes[1 + rank % 2]) for rank in target.ranks]
    port = ray.get(trainers[0].serve.remote())
    parts = [t.gatherer.remote(i, port, config, target, engine) for i, t in enumerate(trainers)]
    parts += [r.rollout.remote(i, target, True, engine) for i, r in enumerate(rollouts)]
    ray.get(parts)
    return trainers, rollouts


def stop(*groups: list[Any]) -> None:
    """Ends their parts; who was killed is forgotten."""
    left = [(actor, actor.leave.remote()) for group in groups for actor in group]
    for actor, ref in left:
        try:
            ray.get(ref, timeout=30)
            _idle[_homes[actor]].append(actor)
        except ray.exceptions.RayError:
            ray.kill(actor)
            del _homes[actor]
