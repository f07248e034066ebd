"""What planning and pushing cost beside the bytes: thousands of tiny tensors."""

from __future__ import annotations

import ray
import torch

from fabric_ray import runtime
from fabric_ray.plan import Container, DType, Leaf, Mesh, Replicate, Side, Tensor
from fabric_ray.weights import WeightSource, WeightSync, WeightTarget
from fabric_ray.weights.quant import Fp8, quantised_target

TRAINERS, ROLLOUTS = 2, 2
_SHAPE = (16, 16)


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


def overhead(tensors: int, turns: int) -> dict[str, list[float]]:
    """Seconds of a connection and of pushes of that many tensors of 512 bytes, as they are and
    each made fp8 on the way."""
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
    return {
        "connect": [sum(connected.seconds.values())],
        "push": _pushes(plain, turns),
        "push, made fp8": _pushes(quantised, turns),
    }


def _pushes(sync: WeightSync, turns: int) -> list[float]:
    sync.push()
    return [sync.push().seconds for _ in range(turns)]
