"""A replica's memory, registered once for all ranks that it is loaded as."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from fabric_ray._native import Region
from fabric_ray.engine import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import LocalContainer
from fabric_ray.tensors import check_memory
from fabric_ray.weights.local import describe_tensor
from fabric_ray.weights.replica.sides import unnamed

if TYPE_CHECKING:
    from fabric_ray.weights.replica.engine import EngineReplica


class ReplicaMemory:
    """The storages that engine tensors lie in, and their registrations."""

    def __init__(self, rank: int, engine: TransferEngine, replica: EngineReplica) -> None:
        self.rank = rank
        self.engine = engine
        self._replica = replica
        self._regions: dict[int, Region] = {}

    @property
    def nbytes(self) -> int:
        return sum(region.nbytes for region in self._regions.values())

    def places(self, containers: Iterable[LocalContainer]) -> dict[int, tuple[Region, int]]:
        """Where each of a plan's source containers begins.

        Raises:
            InvalidArgument: an engine tensor isn't what the rollouts hold; names it.
        """
        out: dict[int, tuple[Region, int]] = {}
        used: dict[int, Region] = {}
        tensors: dict[int, Mapping[str, torch.Tensor]] = {}
        for container in containers:
            name, rollout = unnamed(container.name)
            if rollout not in tensors:
                tensors[rollout] = self._replica.tensors(rollout)
            tensor = self._checked(container, tensors[rollout].get(name))
            storage = tensor.untyped_storage()
            at = storage.data_ptr()
            if at not in used:
                used[at] = self._regions.get(at) or self.engine.register(
                    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                )
            out[container.index] = used[at], tensor.data_ptr() - at
        # A region keeps its memory, so no other can have come to lie at its address.
        self._regions = used
        return out

    def close(self) -> None:
        self._regions.clear()

    def _checked(self, container: LocalContainer, tensor: torch.Tensor | None) -> torch.Tensor:
        wanted = _laid_out(container.dtype, container.shape, container.strides)
        found = "missing"
        if tensor is not None:
            check_memory(f"`{unnamed(container.name)[0]}` of the replica", tensor)
            strides = [stride * tensor.element_size() for stride in tensor.stride()]
            found = _laid_out(tensor.dtype, tensor.shape, strides)
        if tensor is None or found != wanted:
            name, rollout = unnamed(container.name)
            raise InvalidArgument(
                f"`{name}` of rollout {rollout} is {wanted}, and {found} in the replica of trainer "
                f"{self.rank}; make the replica of the rollouts' engine"
            )
        return tensor


def _laid_out(dtype: object, shape: Sequence[int], strides: Sequence[int]) -> str:
    steps = [step for size, step in zip(shape, strides, strict=True) if size > 1]
    return f"{describe_tensor(dtype, shape)} with strides {steps} bytes"
