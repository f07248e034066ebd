"""Pushes of DTensors, whose global shape is not what a rank holds; some ranks hold nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard

from fabric_ray import TransferEngine
from fabric_ray.plan import Container, DType, Leaf, Mesh, Replicate, Side, Tensor
from fabric_ray.plan.errors import InvalidLayout
from fabric_ray.weights import WeightSource, WeightSync, WeightTarget
from fabric_ray.weights.quant import Formats, Fp8, quantise, quantised_target
from tests.unit.plan.fake_group import as_rank
from tests.unit.weights.local_sync import InProcess

TRAINERS = 4
SHAPES = {"w": (22, 9), "short": (3, 8), "norm": (2,)}
FORMATS: Formats = {"w": Fp8((4, 4)), "short": Fp8("channel")}


def full(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator).bfloat16()


def sharded(rank: int) -> dict[str, torch.Tensor]:
    """What FSDP leaves on a rank."""
    out = {}
    with as_rank(rank, TRAINERS):
        mesh = init_device_mesh("cpu", (TRAINERS,))
        for name in SHAPES:
            whole = full(name)
            parts = list(whole.chunk(TRAINERS))
            local = parts[rank].clone() if rank < len(parts) else whole[:0].clone()
            shape, stride = whole.shape, whole.stride()
            out[name] = DTensor.from_local(
                local, mesh, [TorchShard(0)], run_check=False, shape=shape, stride=stride
            )
    return out


@pytest.fixture
def connected(
    open_engine: Callable[..., TransferEngine],
) -> Iterator[Callable[[Formats], WeightTarget]]:
    parts: list[WeightSource | WeightTarget] = []

    def connect(formats: Formats) -> WeightTarget:
        dtype, mesh = DType.of("bfloat16"), Mesh.line([0])
        side = Side.of(
            1,
            [
                Container(name, dtype, Leaf(Tensor(name, shape, dtype), mesh, (Replicate(),)))
                for name, shape in SHAPES.items()
            ],
        )
        names = [f"trainer {rank}" for rank in range(TRAINERS)]
        engines = {who: open_engine(who, transport="shm") for who in (*names, "rollout")}
        for rank, who in enumerate(names):
            parts.append(WeightSource(sharded(rank), rank=rank, name=who, engine=engines[who]))
        held = quantised_target(side, formats) if formats else side
        target = WeightTarget(held, rank=0, name="rollout", engine=engines["rollout"])
        parts.append(target)
        sync = WeightSync(
            names, ["rollout"], formats=formats, digest=True, timeout=5.0, calls=InProcess()
        )
        sync.push()
        sync.push()
        return target

    yield connect
    for part in parts:
        part.close()


def test_shards_of_any_size_make_the_whole(connected: Callable[[Formats], WeightTarget]) -> None:
    weights = connected({}).weights
    assert all(torch.equal(weights[name], full(name)) for name in SHAPES)


def test_shards_are_converted_as_the_whole_would_be(
    connected: Callable[[Formats], WeightTarget],
) -> None:
    weights = connected(FORMATS).weights
    for name, fmt in FORMATS.items():
        values, _ = quantise(full(name), fmt)
        assert torch.equal(weights[name].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(weights["norm"], full("norm"))


def test_rs_1_a_rank_that_is_another_in_the_mesh_is_refused(
    open_engine: Callable[..., TransferEngine],
) -> None:
    source = WeightSource(
        sharded(1), rank=0, name="swapped", engine=open_engine("swapped", transport="shm")
    )
    try:
        with (
            as_rank(1, TRAINERS),
            pytest.raises(InvalidLayout, match=r"`w` is reported for rank 0.*rank 1 of its"),
        ):
            source.meta()
    finally:
        source.close()
