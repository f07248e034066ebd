"""Executes a plan on buffers of this process: the reference for everything that moves bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_ray.plan.copies import Copy
from fabric_ray.plan.errors import BufferMismatch
from fabric_ray.plan.planner import Plan, SideName

BufferKey = tuple[int, str]
"""``(rank, container name)``."""

_Bytes = npt.NDArray[np.uint8]


def apply(plan: Plan, sources: Mapping[BufferKey, Any], targets: Mapping[BufferKey, Any]) -> int:
    """Copies every byte of a plan between buffers and returns how many there were.

    Args:
        plan: what to copy.
        sources: for each source rank and container an object with the buffer protocol, contiguous
            (C order), whose first byte is the container's.
        targets: the same for target ranks; writable.

    Raises:
        BufferMismatch: a buffer is missing, too short, not contiguous or not writable; nothing has
            been written then.
    """
    readers, writers = _Buffers(plan, "source", sources), _Buffers(plan, "target", targets)
    moves: list[tuple[_Bytes, _Bytes]] = []
    for rank in plan.ranks("source"):
        for copy in plan.for_source(rank):
            source = readers.strided(
                rank, copy.src_container, copy.src_offset, copy, [x.src_stride for x in copy.loops]
            )
            target = writers.strided(
                copy.peer,
                copy.dst_container,
                copy.dst_offset,
                copy,
                [x.dst_stride for x in copy.loops],
            )
            moves.append((target, source))
    for target, source in moves:
        target[...] = source
    return sum(target.size for target, _ in moves)


class _Buffers:
    """One side's buffers as arrays of bytes, looked up by rank and container index."""

    def __init__(self, plan: Plan, side: SideName, buffers: Mapping[BufferKey, Any]) -> None:
        self._side = side
        self._names = plan.containers(side)
        self._buffers = buffers
        self._views: dict[tuple[int, int], _Bytes] = {}

    def strided(self, rank: int, index: int, offset: int, copy: Copy, strides: list[int]) -> _Bytes:
        """The bytes one end of a copy touches, as ``[*counts, run]``."""
        view = self._view(rank, index)
        counts = [loop.count for loop in copy.loops]
        reach = sum((n - 1) * stride for n, stride in zip(counts, strides, strict=True))
        if offset + reach + copy.run > view.size:
            raise self._mismatch(
                rank,
                index,
                f"holds {view.size} bytes but the plan reaches {offset + reach + copy.run}; pass "
                "the buffer the layout describes",
            )
        return np.lib.stride_tricks.as_strided(
            view[offset:], shape=(*counts, copy.run), strides=(*strides, 1)
        )

    def _view(self, rank: int, index: int) -> _Bytes:
        known = self._views.get((rank, index))
        if known is not None:
            return known
        key = (rank, self._names[index])
        if key not in self._buffers:
            raise self._mismatch(rank, index, "is missing; pass one under (rank, container name)")
        memory = memoryview(self._buffers[key])
        if not memory.c_contiguous:
            raise self._mismatch(rank, index, "has gaps; pass contiguous memory")
        if self._side == "target" and memory.readonly:
            raise self._mismatch(rank, index, "is read-only; pass writable memory")
        view = np.frombuffer(memory, dtype=np.uint8)
        self._views[rank, index] = view
        return view

    def _mismatch(self, rank: int, index: int, problem: str) -> BufferMismatch:
        name = self._names[index]
        return BufferMismatch(
            f"{self._side} buffer of container `{name}` on rank {rank} {problem}",
            container=name,
            rank=rank,
        )
