"""What planning and pushing cost beside the bytes: thousands of tiny tensors."""

from __future__ import annotations

import statistics
from typing import Any

import msgspec
import ray
import torch

from fabric_ray import runtime
from fabric_ray.plan import Container, DType, Leaf, Mesh, Replicate, Side, Tensor
from fabric_ray.weights import WeightSource, WeightSync, WeightTarget
from fabric_ray.weights.quant import Fp8, quantised_target

TRAINERS, ROLLOUTS = 2, 2
_SHAPE = (16, 16)


class Overhead(msgspec.Struct, frozen=True):
    """Seconds."""

    tensors: int
    nbytes: int
    connect: float
    push: float
    """Median, as they are."""
    push_fp8: float
    """Median, each made fp8 on the way."""


class _Trainer:
    def __init__(self, rank: int, count: int) -> None:
        runtime.engine(name=f"trainer-{rank}")
        tensors = {f"t{i}": torch.full(_SHAPE, float(i % 100)).bfloat16() for i in range(count)}
        self.sources = [WeightSource(tensors, rank=rank, name=name) for name in ("plain", "fp8")]


class _Rollout:
    def __init__(self, rank: int, side: Side, fp8: Side) -> None:
        runtime.engine(name=f"rollout-{rank}")
        self.targets = [
            WeightTarget(held, rank=rank, name=name)
            for name, held in (("plain", side), ("fp8", fp8))
        ]


def overhead(tensors: int, turns: int) -> Overhead:
    """Times connections and pushes of that many tensors of 512 bytes."""
    dtype, mesh = DType.of("bfloat16"), Mesh.line(range(ROLLOUTS))
    side = Side.of(
        ROLLOUTS,
        [
            Container(f"t{i}", dtype, Leaf(Tensor(f"t{i}", _SHAPE, dtype), mesh, (Replicate(),)))
            for i in range(tensors)
        ],
    )
    formats = {"t*": Fp8(_SHAPE)}
    trainer, rollout = (ray.remote(num_cpus=0)(one) for one in (_Trainer, _Rollout))
    trainers = [trainer.remote(rank, tensors) for rank in range(TRAINERS)]
    fp8 = quantised_target(side, formats)
    rollouts = [rollout.remote(rank, side, fp8) for rank in range(ROLLOUTS)]
    ray.get([actor.__ray_ready__.remote() for actor in (*trainers, *rollouts)])
    plain = WeightSync(trainers, rollouts, name="plain")
    quantised = WeightSync(trainers, rollouts, name="fp8", formats=formats)
    connected = plain.connect()
    return Overhead(
        tensors,
        connected.nbytes,
        sum(connected.seconds.values()),
        _median(plain, turns),
        _median(quantised, turns),
    )


def _median(sync: Any, turns: int) -> float:
    sync.push()
    return statistics.median(sync.push().seconds for _ in range(turns))
