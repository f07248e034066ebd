"""A small model in bf16: trainers hold rows of it, rollouts all of it, converted on the way."""

from __future__ import annotations

from typing import Any

import torch

from fabric_ray.plan import Container, DType, Leaf, Mesh, Replicate, Shard, Side, Tensor
from fabric_ray.weights import WeightTarget
from fabric_ray.weights.quant import Format, quantise

TRAINERS, ROLLOUTS = 3, 2
BF16 = DType.of("bfloat16")
# 22 rows are 8, 8 and 6 on the trainers: blocks of 3 rows lie on two of them.
SHAPES = {f"layers.{i}.weight": (12 + 10 * (i % 2), 9) for i in range(5)} | {"norm": (6,)}
CONVERTED = "layers.*.weight"
"""The pattern of what is converted."""


def side(ranks: int) -> Side:
    mesh = Mesh.line(range(ranks))

    def container(name: str, placement: Any) -> Container:
        return Container(name, BF16, Leaf(Tensor(name, SHAPES[name], BF16), mesh, (placement,)))

    sharded = [container(n, Shard(0) if n != "norm" else Replicate()) for n in SHAPES]
    return Side.of(ranks, sharded)


def whole(ranks: int) -> Side:
    """Rollouts that hold everything."""
    mesh = Mesh.line(range(ranks))
    return Side.of(
        ranks,
        [
            Container(name, BF16, Leaf(Tensor(name, shape, BF16), mesh, (Replicate(),)))
            for name, shape in SHAPES.items()
        ],
    )


def full(name: str, version: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * version + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator).to(torch.bfloat16)


def shard(tensor: torch.Tensor, name: str, rank: int) -> torch.Tensor:
    return tensor if name == "norm" else tensor.chunk(TRAINERS)[rank]


def wrong(target: WeightTarget, fmt: Format, version: int) -> list[str]:
    """What a rollout holds that isn't made of whole tensors of that version."""
    expected: dict[str, torch.Tensor] = {"norm": full("norm", version)}
    for name in SHAPES:
        if name != "norm":
            values, scales = quantise(full(name, version), fmt)
            expected[name] = values
            found = [n for n in target.weights if n.startswith(name + "_")]
            if scales is not None:
                expected[found[0]] = scales.reshape(target.weights[found[0]].shape)
    assert set(expected) == set(target.weights)
    return [
        f"{name} at {target.rank}"
        for name, tensor in expected.items()
        if not torch.equal(
            target.weights[name].contiguous().view(torch.uint8),
            tensor.contiguous().view(torch.uint8),
        )
    ]
