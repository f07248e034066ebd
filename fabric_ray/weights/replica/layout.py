"""A replica of an engine with a known layout: whole tensors are copied by the plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch

from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import Copy, LocalContainer, Plan, Side, Tensor
from fabric_ray.weights.local import describe_tensor
from fabric_ray.weights.replica.sides import whole_plan, whole_tensors

# Suits any kernel, and every dtype.
_ALIGN = 256


class LayoutReplica:
    """The containers of a side, such as :func:`fabric_ray.weights.families.target_side` describes.

    Args:
        side: the same that the rollouts' targets were given.
    """

    def __init__(self, side: Side) -> None:
        self.side = side
        self._known: dict[int, _AsRank] = {}
        self._offsets: dict[str, int] = {}
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def ranks(self) -> Sequence[int]:
        return self.side.ranks

    def needs(self, rank: int, tensors: Mapping[str, Tensor]) -> Mapping[str, Collection[str]]:
        copies = self._plan.for_target(rank)
        out: dict[str, set[str]] = defaultdict(set)
        pairs = np.unique(np.stack([copies.dst_container, copies.src_container]), axis=1)
        for container, whole in pairs.T.tolist():
            name = self._parts[whole]
            self._check(tensors.get(name))
            out[self._names[container]].add(name)
        return out

    def reserve(self, ranks: Sequence[int], names: Collection[str]) -> None:
        sizes: dict[str, int] = {}
        for rank in ranks:
            for name, container in self._as(rank).containers.items():
                if name in names:
                    sizes[name] = max(sizes.get(name, 0), container.nbytes)
        self._offsets, end = {}, 0
        for name, nbytes in sizes.items():
            self._offsets[name] = end
            end += -(-nbytes // _ALIGN) * _ALIGN
        if end != self._memory.numel():
            self._memory = torch.zeros(end, dtype=torch.uint8, device="cpu")

    def tensors(self, rank: int) -> Mapping[str, torch.Tensor]:
        out = {}
        for name, container in self._as(rank).containers.items():
            if name in self._offsets:
                typed = self._bytes(name, container).view(getattr(torch, container.dtype))
                itemsize = typed.element_size()
                strides = tuple(stride // itemsize for stride in container.strides)
                out[name] = typed.as_strided(container.shape, strides)
        return out

    def load(self, rank: int, tensors: Mapping[str, torch.Tensor]) -> None:
        as_rank = self._as(rank)
        moves: list[tuple[torch.Tensor, torch.Tensor]] = []
        padded: dict[str, torch.Tensor] = {}
        for part, tensor in tensors.items():
            source = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            for copy in as_rank.copies.get(part, ()):
                name = self._names[copy.dst_container]
                if name not in self._offsets:
                    continue
                target = self._bytes(name, as_rank.containers[name])
                if name in as_rank.padded:
                    padded[name] = target
                moves.append((_end(target, copy, "dst"), _end(source, copy, "src")))
        for target in padded.values():
            # Where one rollout has padding, another may have left values.
            target.zero_()
        for target, source in moves:
            target.copy_(source)

    @cached_property
    def _plan(self) -> Plan:
        return whole_plan(self.side)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return self._plan.containers("target")

    @cached_property
    def _parts(self) -> tuple[str, ...]:
        return self._plan.containers("source")

    @cached_property
    def _wholes(self) -> dict[str, Tensor]:
        return whole_tensors(self.side)

    def _as(self, rank: int) -> _AsRank:
        if rank not in self._known:
            self._known[rank] = _AsRank(self._plan, rank)
        return self._known[rank]

    def _check(self, tensor: Tensor | None) -> None:
        """That a tensor, if it comes, is what the side is made of."""
        if tensor is None or tensor == self._wholes[tensor.name]:
            return
        expected = self._wholes[tensor.name]
        found = describe_tensor(tensor.dtype.name, tensor.shape)
        wanted = describe_tensor(expected.dtype.name, expected.shape)
        raise InvalidArgument(
            f"`{tensor.name}` differs from the rollouts' side: got {found}, expected {wanted}; "
            "gather the tensors of that side's model, and give ReplicaSource the formats, if any"
        )

    def _bytes(self, name: str, container: LocalContainer) -> torch.Tensor:
        at = self._offsets[name]
        return self._memory[at : at + container.nbytes]


class _AsRank:
    """What is put where on one rollout."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.containers = {c.name: c for c in plan.local_containers("target", rank)}
        self.copies: dict[str, list[Copy]] = defaultdict(list)
        """By whole tensor."""
        wholes, names = plan.containers("source"), plan.containers("target")
        filled = dict.fromkeys(self.containers, 0)
        for copy in plan.for_target(rank):
            self.copies[wholes[copy.src_container]].append(copy)
            filled[names[copy.dst_container]] += copy.nbytes
        self.padded = {n for n, c in self.containers.items() if filled[n] < c.nbytes}


def _end(memory: torch.Tensor, copy: Copy, which: str) -> torch.Tensor:
    """The bytes that one end of a copy touches: ``[*counts, run]``."""
    strides = [getattr(loop, f"{which}_stride") for loop in copy.loops]
    counts = [loop.count for loop in copy.loops]
    begin = memory.storage_offset() + getattr(copy, f"{which}_offset")
    return memory.as_strided((*counts, copy.run), (*strides, 1), begin)
