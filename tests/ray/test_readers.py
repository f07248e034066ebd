"""RS-1 in actors: what a generation reads is of one version, whatever kind of actor runs it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import ray
import torch

from fabric_ray import runtime
from fabric_ray.errors import WeightSyncError
from fabric_ray.plan import Container, DType, Leaf, Mesh, Replicate, Side, Tensor
from fabric_ray.weights import WeightSource, WeightSync, WeightTarget

F32 = DType.of("float32")
SIDE = Side.of(
    1, [Container("w", F32, Leaf(Tensor("w", (4,), F32), Mesh.line([0]), (Replicate(),)))]
)
Seen = tuple[int | None, list[float]]


class Trainer:
    def __init__(self) -> None:
        self.w = torch.zeros(4, dtype=torch.float32)
        self.source = WeightSource({"w": self.w}, rank=0)

    def train(self) -> None:
        self.w.add_(1)

    def stop(self) -> None:
        runtime.shutdown()


class Rollout:
    def __init__(self, *, bind: bool = False) -> None:
        self.module = torch.nn.ParameterDict({"w": torch.zeros(4, dtype=torch.float32)})
        self.module.requires_grad_(False)
        self.bound = self.module["w"].data
        self.target = WeightTarget(SIDE, rank=0, into=self.module if bind else None)

    def seen(self) -> tuple[int | None, float]:
        return self.target.version, float(self.bound[0])

    def generate(self, seconds: float) -> Seen:
        with self.target.reading() as weights:
            w, found = weights["w"], set()
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                found.update(w.tolist())
                time.sleep(0.01)
            return self.target.version, sorted(found)

    def keep(self) -> None:
        self.kept = self.target.weights["w"]


class AsyncRollout:
    def __init__(self) -> None:
        self.target = WeightTarget(SIDE, rank=0)

    async def generate(self, seconds: float) -> Seen:
        async with self.target.reading() as weights:
            w, found = weights["w"], set()
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                found.update(w.tolist())
                await asyncio.sleep(0.01)
            return self.target.version, sorted(found)


def sync_of(rollout: Any, timeout: float = 30.0) -> tuple[WeightSync, Any]:
    trainer = ray.remote(num_cpus=0)(Trainer).remote()  # type: ignore[attr-defined]
    ray.get(trainer.train.remote())
    return WeightSync([trainer], [rollout], timeout=timeout), trainer


@pytest.mark.long
@pytest.mark.parametrize("kind", ["threads", "event loop"])
def test_rs_1_a_generation_of_several_pushes_length_sees_one_version(kind: str) -> None:
    if kind == "threads":
        rollout = ray.remote(num_cpus=0)(Rollout).options(max_concurrency=4).remote()  # type: ignore[attr-defined]
    else:
        rollout = ray.remote(num_cpus=0)(AsyncRollout).remote()  # type: ignore[attr-defined]
    sync, trainer = sync_of(rollout)
    sync.push()
    generations = []
    for _ in range(3):
        generations.append(rollout.generate.remote(1.0))
        ray.get(trainer.train.remote())
        sync.push()
    for version, found in ray.get(generations):
        assert found == [float(version)]
    ray.get(trainer.stop.remote())


@pytest.mark.long
def test_rs_1_what_was_bound_once_is_the_version_in_use_over_five_pushes() -> None:
    rollout = ray.remote(num_cpus=0)(Rollout).remote(bind=True)  # type: ignore[attr-defined]
    sync, trainer = sync_of(rollout)
    seen = []
    for _ in range(5):
        sync.push()
        seen.append(ray.get(rollout.seen.remote()))
        ray.get(trainer.train.remote())
    assert seen == [(v, float(v)) for v in range(1, 6)]


@pytest.mark.long
def test_rs_1_a_tensor_that_an_actor_keeps_is_named() -> None:
    rollout = ray.remote(num_cpus=0)(Rollout).remote()  # type: ignore[attr-defined]
    sync, _ = sync_of(rollout, timeout=1.0)
    sync.push()
    ray.get(rollout.keep.remote())
    with pytest.raises(WeightSyncError, match=r"tensors of version 1, .* still referred to: `w`"):
        sync.push()


def test_what_the_init_of_an_actor_raised_is_in_the_error_and_its_cause() -> None:
    class Broken:
        def __init__(self) -> None:
            _ = 1 / 0

    good = ray.remote(num_cpus=0)(Rollout).remote()  # type: ignore[attr-defined]
    broken = ray.remote(num_cpus=0)(Broken).remote()  # type: ignore[attr-defined]
    with pytest.raises(WeightSyncError, match=r"trainer 0 did not.*__init__ raised ZeroDiv") as e:
        WeightSync([broken], [good]).push()
    assert "in __init__" in str(e.value.__cause__)
