"""Trainers and engines in one process: what is held, and what a planned push leaves behind."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from fabric_ray.models import ModelConfig, parameter_dtype, parameter_shapes
from fabric_ray.models.boxes import BoxSource, load_parameters
from fabric_ray.models.fsdp import make_mesh
from fabric_ray.models.transformer import Transformer
from fabric_ray.plan import (
    DType,
    ParamMeta,
    Replicate,
    Shard,
    Side,
    apply,
    plan,
    side_from_param_meta,
)
from fabric_ray.plan.dtensor import from_module
from fabric_ray.weights.families import target_containers, target_side
from tests.unit.plan.fake_group import as_rank, local_bytes, local_of

Memory = dict[tuple[int, str], np.ndarray]


def raw(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def noise(config: ModelConfig) -> dict[str, Tensor]:
    """Random bits: no two elements are likely to agree, and NaNs must survive too."""
    generator = torch.Generator().manual_seed(3)

    def bits(name: str, shape: tuple[int, ...]) -> Tensor:
        dtype = parameter_dtype(config, name)
        size = (*shape, DType.of(dtype).itemsize)
        drawn = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        return drawn.view(getattr(torch, dtype)).reshape(shape)

    return {name: bits(name, shape) for name, shape in parameter_shapes(config).items()}


def chunked(full: Mapping[str, Tensor], world: int, *, replicas: int = 1) -> tuple[Side, Memory]:
    """Trainers that hold ``torch.chunk``s of every parameter, and their memory."""
    reports: dict[int, list[ParamMeta]] = {rank: [] for rank in range(world * replicas)}
    memory: Memory = {}
    for name, tensor in full.items():
        chunks = tensor.chunk(world)
        chunks += (tensor[:0],) * (world - len(chunks))
        for rank in reports:
            local = chunks[rank % world]
            strides = tuple(s * local.element_size() for s in local.stride())
            dtype = DType(str(tensor.dtype).removeprefix("torch."), tensor.element_size())
            reports[rank].append(
                ParamMeta(
                    name=name,
                    shape=tuple(tensor.shape),
                    dtype=dtype,
                    mesh_ranks=tuple(reports),
                    mesh_shape=(replicas, world),
                    placements=(Replicate(), Shard(0)),
                    local_shape=tuple(local.shape),
                    local_strides=strides,
                )
            )
            if local.numel():
                memory[rank, name] = raw(local)
    return side_from_param_meta(reports), memory


def fully_sharded(
    config: ModelConfig, source: BoxSource, world: int, *, replicas: int = 1
) -> tuple[Side, Memory]:
    """What torch's own FSDP2 makes of the model on each rank."""
    reports, memory = {}, {}
    for rank in range(world * replicas):
        with as_rank(rank, world * replicas):
            model = Transformer(config)
            load_parameters(model, source)
            for module in (*model.model.layers, model):
                fully_shard(module, mesh=make_mesh(replicas=replicas))
            reports[rank] = from_module(model, rank=rank)
            for name, parameter in model.named_parameters():
                if local_of(parameter).numel():
                    memory[rank, name] = local_bytes(parameter)
    return side_from_param_meta(reports), memory


def pushed(
    config: ModelConfig,
    source: Side,
    memory: Memory,
    *,
    tp: int,
    ep: int = 1,
    dp: int = 1,
    ranks: tuple[int, ...] | None = None,
) -> list[dict[str, Tensor]]:
    """Every engine rank's containers after a push into zeroed memory."""
    target = target_side(config, tp=tp, ep=ep, dp=dp, ranks=ranks)
    held: list[dict[str, Tensor]] = []
    room: Memory = {}
    for index, rank in enumerate(target.ranks):
        specs = target_containers(config, tp=tp, ep=ep, dp=dp, rank=index % (tp * dp))
        held.append({s.name: torch.zeros(s.shape, dtype=getattr(torch, s.dtype)) for s in specs})
        room |= {(rank, name): raw(tensor) for name, tensor in held[-1].items()}
    apply(plan(source, target, min_split_bytes=1), memory, room)
    return held


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Same names, shapes, dtypes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype), name
        np.testing.assert_array_equal(raw(found[name]), raw(tensor), err_msg=name)
