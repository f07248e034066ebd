"""Reports of real FSDP2 modules, made by torch itself rank after rank in one process."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fabric_ray.plan import (
    Concat,
    Container,
    DType,
    InvalidLayout,
    Leaf,
    Mesh,
    ParamMeta,
    Partial,
    PartialPlacement,
    Replicate,
    Shard,
    Side,
    StridedShard,
    Tensor,
    apply,
    plan,
    side_from_param_meta,
)
from fabric_ray.plan.dtensor import container_from_dtensor, from_module, param_meta

from .fake_group import as_rank, local_bytes, local_of

WORLD = 8


class Block(nn.Module):
    """Sizes that no mesh divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 22)
        self.down = nn.Linear(22, 10)
        self.norm = nn.LayerNorm(10)
        self.register_buffer("scale", torch.arange(3.0))


def full_block() -> Block:
    torch.manual_seed(7)
    return Block()


def gathered(shard: Callable[[Block], nn.Module]) -> tuple[Side, dict]:
    """What all ranks report of a sharded block, and their memory."""
    reports, memory = {}, {}
    for rank in range(WORLD):
        with as_rank(rank, WORLD):
            module = shard(full_block())
            reports[rank] = from_module(module, rank=rank)
            for name, tensor in module.state_dict().items():
                if local_of(tensor).numel():
                    memory[rank, name] = local_bytes(tensor)
    return side_from_param_meta(reports), memory


def engines() -> Side:
    """Three tensor-parallel ranks with the biases fused."""
    f32 = DType.of("float32")
    state = full_block().state_dict()
    t = {name: Tensor(name, tuple(value.shape), f32) for name, value in state.items()}
    mesh = Mesh.line([0, 1, 2])
    split = {"up.weight": 0, "down.weight": 1}
    containers = [
        Container(n, f32, Leaf(t[n], mesh, (Shard(split[n]) if n in split else Replicate(),)))
        for n in ("up.weight", "down.weight", "norm.weight", "norm.bias", "scale")
    ]
    biases = tuple(Leaf(t[n], mesh, (Shard(0),)) for n in ("up.bias", "down.bias"))
    return Side.of(3, [*containers, Container("bias", f32, Concat(0, biases))])


def chunk(value: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    return torch.chunk(value, 3, dim=dim)[rank]


def expected(rank: int) -> dict[str, torch.Tensor]:
    state = full_block().state_dict()
    bias = torch.cat([chunk(state[n], 0, rank) for n in ("up.bias", "down.bias")])
    whole = {n: state[n] for n in ("norm.weight", "norm.bias", "scale")}
    up, down = chunk(state["up.weight"], 0, rank), chunk(state["down.weight"], 1, rank)
    return {**whole, "up.weight": up, "down.weight": down, "bias": bias}


def fsdp(module: Block) -> nn.Module:
    return fully_shard(module, mesh=init_device_mesh("cpu", (WORLD,)))


def hsdp(module: Block) -> nn.Module:
    return fully_shard(module, mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=("r", "s")))


def fsdp_tp(module: Block) -> nn.Module:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    # Without a source rank every rank cuts its own full weights: the same ones, by the seed.
    parallelize_module(module, mesh["tp"], styles, src_data_rank=None)
    return fully_shard(module, mesh=mesh["dp"])


def hsdp_tp(module: Block) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("r", "s", "tp"))
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(module, mesh["tp"], styles, src_data_rank=None)
    return fully_shard(module, mesh=mesh["r", "s"])


def offloaded(module: Block) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("r", "s"))
    return fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


def by_columns(module: Block) -> nn.Module:
    """FSDP2 cuts the dimension that it is told to, if that can be done evenly."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("r", "s"))
    return fully_shard(module, mesh=mesh, shard_placement_fn=lambda p: TorchShard(p.ndim - 1))


def replicated(module: Block) -> nn.Module:
    return module


WAYS = [fsdp, hsdp, fsdp_tp, hsdp_tp, offloaded, by_columns, replicated]


@pytest.mark.parametrize("shard", WAYS, ids=lambda f: f.__name__)
def test_a_sharded_module_fills_tensor_parallel_engines(shard):
    source, memory = gathered(shard)
    target = engines()
    planned = plan(source, target, min_split_bytes=1)
    got = {}
    for rank in target.ranks:
        for local in planned.local_containers("target", rank):
            got[rank, local.name] = np.zeros(local.nbytes, np.uint8)
    apply(planned, memory, got)
    for rank in target.ranks:
        for name, value in expected(rank).items():
            moved = torch.from_numpy(got[rank, name]).view(torch.float32).reshape(value.shape)
            assert torch.equal(moved, value), (rank, name)


def test_fsdp_over_tp_is_reported_as_strided_shards():
    source, _ = gathered(fsdp_tp)
    by_name = {container.name: container.layout for container in source.containers}
    assert by_name["up.weight"].placements == (StridedShard(0, 2), Shard(0))
    assert by_name["down.weight"].placements == (Shard(0), Shard(1))


@pytest.mark.parametrize(("rows", "is_supported"), [(7, False), (10, True)])
def test_fsdp_over_tp_of_unequal_shards_is_refused_for_what_it_is(rows, is_supported):
    reports = {}
    for rank in range(6):
        with as_rank(rank, 6):
            mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
            layer = nn.Linear(4, rows, bias=False)
            shards = distribute_tensor(layer.weight, mesh["tp"], [TorchShard(0)])
            layer.weight = nn.Parameter(shards)
            reports[rank] = from_module(fully_shard(layer, mesh=mesh["dp"]))
    if is_supported:
        side_from_param_meta(reports)
        return
    with pytest.raises(InvalidLayout, match=r"`weight` .* 7 is no multiple; have fully_shard"):
        side_from_param_meta(reports)


def test_what_tp_leaves_alone_is_one_container_of_replicas():
    source, _ = gathered(fsdp_tp)
    norms = [container for container in source.containers if container.name == "norm.weight"]
    assert [norm.layout.mesh.shape for norm in norms] == [(2, 4)]
    assert norms[0].layout.placements == (Replicate(), Shard(0))
    scale = next(c.layout for c in source.containers if c.name == "scale")
    assert set(scale.mesh.ranks) == set(range(WORLD))
    assert set(scale.placements) == {Replicate()}


@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        ((7, 5), (TorchShard(0), TorchShard(0))),
        ((7, 5), (TorchShard(1), TorchShard(0))),
        ((3, 2), (TorchShard(0), TorchReplicate())),
        ((9,), (TorchReplicate(), TorchShard(0))),
    ],
)
def test_a_dtensor_container_has_torchs_local_shape_on_every_rank(shape, placements):
    full = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    side, memory = {}, {}
    for rank in range(WORLD):
        with as_rank(rank, WORLD):
            mesh = init_device_mesh("cpu", (2, 4))
            tensor = distribute_tensor(full, mesh, placements, src_data_rank=None)
            side[rank] = container_from_dtensor("t", tensor)
            if tensor._local_tensor.numel():
                memory[rank, "t"] = local_bytes(tensor)
    assert len(set(side.values())) == 1
    whole = Container(
        "t", side[0].dtype, Leaf(side[0].layout.tensor, Mesh.line([0]), (Replicate(),))
    )
    planned = plan(Side.of(WORLD, [side[0]]), Side.of(1, [whole]))
    got = np.zeros(full.numel() * 4, np.uint8)
    apply(planned, memory, {(0, "t"): got})
    assert torch.equal(torch.from_numpy(got).view(torch.float32).reshape(shape), full)
    reported = {(c.name, r) for r in range(WORLD) for c in planned.local_containers("source", r)}
    assert reported == {(name, rank) for rank, name in memory}


def test_another_shard_order_becomes_a_strided_shard():
    """Torch says right-to-left sharding in two ways; both mean the same here."""
    with as_rank(5, WORLD):
        mesh = init_device_mesh("cpu", (4, 2))
        tensor = distribute_tensor(
            torch.zeros(16, 3), mesh, (TorchShard(0), TorchShard(0)), src_data_rank=None
        )
        entry = type(tensor._spec.shard_order[0])
        tensor._spec.shard_order = (entry(tensor_dim=0, mesh_dims=(1, 0)),)
        assert param_meta("t", tensor).placements == (StridedShard(0, 2), Shard(0))


def test_partial_tensors_are_reported_and_then_refused():
    with as_rank(0, WORLD):
        mesh = init_device_mesh("cpu", (WORLD,))
        tensor = DTensor.from_local(torch.zeros(4), mesh, [TorchPartial()], run_check=False)
        container = container_from_dtensor("grad", tensor)
    assert container.layout.placements == (Partial(),)
    whole = Container(
        "grad", container.dtype, Leaf(container.layout.tensor, Mesh.line([0]), (Replicate(),))
    )
    with pytest.raises(PartialPlacement, match=r"`grad`.*reduce it"):
        plan(Side.of(WORLD, [container]), Side.of(1, [whole]))


def test_strided_views_keep_their_strides():
    view = torch.zeros(6, 8)[:, :5]
    container = container_from_dtensor("view", view, rank=3)
    assert container.strides == (32, 4)
    assert container.layout.mesh.ranks == (3,)
    assert container_from_dtensor("dense", torch.zeros(6, 5)).strides is None


def test_buffers_can_be_left_out():
    names = [meta.name for meta in from_module(full_block(), buffers=False)]
    assert "scale" not in names
    assert "norm.weight" in names


@pytest.mark.parametrize(
    "sent",
    [
        lambda metas: pickle.loads(pickle.dumps(metas)),
        lambda metas: msgspec.msgpack.decode(msgspec.msgpack.encode(metas), type=list[ParamMeta]),
    ],
)
def test_reports_of_one_mesh_hold_its_ranks_once_wherever_they_arrive(sent):
    with as_rank(3, WORLD):
        metas = from_module(fsdp(full_block()), rank=3, buffers=False)
    arrived = sent(metas)
    assert arrived == metas
    assert len({id(meta.mesh_ranks) for meta in arrived}) == 1
