"""Layouts of torch tensors: what an FSDP2, HSDP or tensor-parallel module holds on a rank.

Torch is imported when a function is called, so planning itself never needs it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from fabric_ray.plan.errors import InvalidLayout, PlanError
from fabric_ray.plan.report import ParamMeta
from fabric_ray.plan.types import (
    Container,
    DType,
    Leaf,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    Tensor,
)

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor


def param_meta(name: str, tensor: torch.Tensor, *, rank: int | None = None) -> ParamMeta:
    """One rank's report on a tensor.

    Args:
        name: of the logical tensor.
        tensor: a DTensor, or a plain tensor, which counts as whole and held by this rank alone;
            ranks that report the same name hold replicas.
        rank: this process's global rank; asked from torch.distributed when absent (0 without it).

    Raises:
        PlanError: the tensor is sharded in a way the planner has no word for, or this process has
            another rank in the mesh of the DTensor.
    """
    sharded = _as_dtensor(tensor)
    if sharded is None:
        return ParamMeta(
            name=name,
            shape=tuple(tensor.shape),
            dtype=_dtype(tensor),
            mesh_ranks=(distributed_rank() if rank is None else rank,),
            mesh_shape=(1,),
            placements=(Replicate(),),
            local_shape=tuple(tensor.shape),
            local_strides=_byte_strides(tensor),
        )
    # Not to_local(): that is an operation autograd records.
    local = sharded._local_tensor
    mesh = sharded.device_mesh
    if rank is not None:
        _check_rank(name, rank)
    return ParamMeta(
        name=name,
        shape=tuple(tensor.shape),
        dtype=_dtype(tensor),
        mesh_ranks=tuple(mesh.mesh.flatten().tolist()),
        mesh_shape=tuple(mesh.mesh.shape),
        placements=_placements(name, sharded),
        local_shape=tuple(local.shape),
        local_strides=_byte_strides(local),
        mesh_names=tuple(mesh.mesh_dim_names or ()),
    )


def _check_rank(name: str, rank: int) -> None:
    """A mesh counts global ranks: with another number a shard would be another rank's (RS-1)."""
    if (own := distributed_rank(rank)) != rank:
        raise InvalidLayout(
            f"parameter `{name}` is reported for rank {rank}, and this process is rank {own} of "
            "its DTensor's mesh; pass torch.distributed.get_rank() as rank, and the trainers in "
            "the order of these ranks",
            tensor=name,
            rank=rank,
        )


def _as_dtensor(tensor: torch.Tensor) -> DTensor | None:
    # Imported only for DTensors: the import takes seconds.
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def container_from_dtensor(
    name: str, tensor: torch.Tensor, *, rank: int | None = None
) -> Container:
    """The container of one tensor, for a model that only this layout describes.

    The local shard's first byte is the container's. Arguments and errors as :func:`param_meta`;
    to merge what several ranks hold use :func:`fabric_ray.plan.side_from_param_meta`.
    """
    meta = param_meta(name, tensor, rank=rank)
    leaf = Leaf(Tensor(name, meta.shape, meta.dtype), meta.mesh, meta.placements)
    return Container(name, meta.dtype, leaf, meta.strides)


def from_module(
    module: torch.nn.Module, *, rank: int | None = None, buffers: bool = True
) -> list[ParamMeta]:
    """This rank's report on every parameter of a module, in the module's order.

    Args:
        module: plain, or wrapped by ``fully_shard``, ``parallelize_module`` or both.
        rank: as in :func:`param_meta`.
        buffers: whether to report persistent buffers too.

    Raises:
        PlanError: as in :func:`param_meta`.
    """
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return [
        param_meta(name, tensor, rank=rank)
        for name, tensor in module.state_dict().items()
        if _is_tensor(tensor) and tensor.numel() and (buffers or name in parameters)
    ]


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def distributed_rank(otherwise: int = 0) -> int:
    """This process's global rank, if torch.distributed knows it."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else otherwise


def _dtype(tensor: torch.Tensor) -> DType:
    return DType(str(tensor.dtype).removeprefix("torch."), tensor.element_size())


def _byte_strides(local: torch.Tensor) -> tuple[int, ...]:
    return tuple(stride * local.element_size() for stride in local.stride())


def _placements(name: str, tensor: Any) -> tuple[Placement, ...]:
    from torch.distributed.tensor import placement_types as torch_placements

    strided: Any = getattr(torch_placements, "_StridedShard", None)
    found: list[Placement] = []
    for placement in tensor.placements:
        # A strided shard is a subclass of Shard in some releases, so it is asked for first.
        if strided is not None and isinstance(placement, strided):
            found.append(StridedShard(placement.dim, int(placement.split_factor)))
        elif isinstance(placement, torch_placements.Shard):
            found.append(Shard(placement.dim))
        elif isinstance(placement, torch_placements.Replicate):
            found.append(Replicate())
        elif isinstance(placement, torch_placements.Partial):
            found.append(Partial())
        else:
            raise PlanError(
                f"tensor `{name}`: placement {placement} has no meaning here; redistribute the "
                "tensor to Shard or Replicate",
                tensor=name,
            )
    return _in_mesh_order(tuple(found), tensor)


def _in_mesh_order(placements: tuple[Placement, ...], tensor: Any) -> tuple[Placement, ...]:
    """Says a shard order other than from left to right in strided shards.

    A mesh dimension that is applied after ones to its right cuts each of their chunks.
    """
    order = getattr(tensor._spec, "shard_order", None) or ()
    sizes = tensor.device_mesh.mesh.shape
    found = list(placements)
    for entry in order:
        for turn, mesh_dim in enumerate(entry.mesh_dims):
            factor = 1
            for earlier in entry.mesh_dims[:turn]:
                factor *= sizes[earlier] if earlier > mesh_dim else 1
            if factor > 1:
                found[mesh_dim] = StridedShard(entry.tensor_dim, factor)
    return tuple(found)
