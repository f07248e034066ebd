"""The layouts of modules that describe themselves, and the refusal of those that don't."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import Container, Leaf, Mesh, Replicate, Side
from fabric_ray.plan.dtensor import container_from_dtensor, distributed_rank
from fabric_ray.plan.types import Layout, Pad
from fabric_ray.weights.modules import named, ties
from fabric_ray.weights.stacked import as_experts

if TYPE_CHECKING:
    import torch

_MEGATRON_SIZES = {
    "tp": "get_tensor_model_parallel_world_size",
    "pp": "get_pipeline_model_parallel_world_size",
    "ep": "get_expert_model_parallel_world_size",
    "etp": "get_expert_tensor_parallel_world_size",
}


def side_of(into: torch.nn.Module | Mapping[str, torch.Tensor]) -> tuple[Side, int]:
    """A rollout's module, whole on one rank, or on all ranks of torch.distributed as its DTensors
    say; and this process's rank there.

    Further names of tied tensors are left out, and experts are tensors of their own.

    Raises:
        InvalidArgument: the module doesn't say which part of the model it holds.
        PlanError: a DTensor's layout has no description.
    """
    tensors = named(into).tensors
    check_describes_itself(into)
    world, rank = 1, 0
    if any(hasattr(tensor, "full_tensor") for tensor in tensors.values()):
        import torch.distributed as dist

        world, rank = dist.get_world_size(), distributed_rank()
    tied = ties(tensors)
    containers = [
        _container(name, tensor, world)
        for name, tensor in tensors.items()
        if tensor.numel() and name not in tied
    ]
    return as_experts(Side.of(world, containers)), rank


def on_all(side: Side, rollouts: int) -> Side:
    """The side of one rank, held by each of so many rollouts."""
    mesh = Mesh.line(rollouts)

    def on_each(layout: Layout) -> Layout:
        if isinstance(layout, Leaf):
            return msgspec.structs.replace(layout, mesh=mesh, placements=(Replicate(),))
        if isinstance(layout, Pad):
            return msgspec.structs.replace(layout, part=on_each(layout.part))
        return msgspec.structs.replace(layout, parts=tuple(map(on_each, layout.parts)))

    containers = [
        msgspec.structs.replace(c, layout=on_each(c.layout), ranks=c.ranks and mesh.ranks)
        for c in side.containers
    ]
    return Side.of(rollouts, containers)


def check_describes_itself(model: Any) -> None:
    """Refuses modules whose plain tensors are parts of a model: plain tensors count as whole, so
    one rank's part would be taken for all (RS-1).

    Raises:
        InvalidArgument: Megatron-Core or transformers made it so; the error names the sizes.
    """
    _refuse_megatron(model)
    for part in model.modules() if hasattr(model, "modules") else ():
        # Transformers 5.10 gives layers plain parts and this mark; 5.19 makes DTensors.
        mesh = vars(part).get("_hf_device_mesh")
        if mesh is not None and mesh.size() > 1:
            raise InvalidArgument(
                f"transformers has divided the module over {mesh.size()} ranks (tp_plan), and its "
                "tensors don't say which part of the model they are; divide it with FSDP2 or with "
                "torch's parallelize_module, whose tensors are DTensors, or give a side"
            )


def _refuse_megatron(model: Any) -> None:
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized() or not _is_megatron(model):
        return
    sizes = {axis: getattr(state, size)() for axis, size in _MEGATRON_SIZES.items()}
    if max(sizes.values()) > 1:
        shown = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
        raise InvalidArgument(
            f"the module is Megatron-Core's with {shown}, and its tensors don't say which part of "
            "the model they are; call WeightSource(model, config=config) with the configuration "
            "of its Hugging Face model"
        )


def _is_megatron(model: Any) -> bool:
    """Whether its parameters have the marks of Megatron-Core, in a mapping or a module."""
    tensors = model.values() if isinstance(model, Mapping) else model.parameters()
    return any(hasattr(tensor, "tensor_model_parallel") for tensor in tensors)


def _container(name: str, tensor: torch.Tensor, world: int) -> Container:
    # The version arrives row-major, in memory of its own: strides of the module don't matter.
    container = msgspec.structs.replace(container_from_dtensor(name, tensor), strides=None)
    if hasattr(tensor, "full_tensor"):
        return container
    assert isinstance(container.layout, Leaf), "of one tensor"
    leaf = Leaf(container.layout.tensor, Mesh.line(world), (Replicate(),))
    return msgspec.structs.replace(container, layout=leaf)
