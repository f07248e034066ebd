"""Layouts evaluated by torch: an implementation that shares nothing with the planner."""

from __future__ import annotations

import numpy as np
import torch
from torch.distributed.tensor import placement_types as tp

from fabric_ray.plan import (
    Concat,
    Container,
    Layout,
    Leaf,
    Pad,
    Placement,
    Shard,
    Side,
    Stack,
    StridedShard,
)

UNTOUCHED = 0xEE


def split(tensor: torch.Tensor, placement: Placement, ways: int, coord: int) -> torch.Tensor:
    """One coordinate's part, by torch's own placement."""
    if isinstance(placement, StridedShard):
        theirs = tp._StridedShard(placement.dim, split_factor=placement.split_factor)
    elif isinstance(placement, Shard):
        theirs = tp.Shard(placement.dim)
    else:
        return tensor
    return theirs._split_tensor(tensor, ways, with_padding=False, contiguous=True)[0][coord]


def evaluate(
    layout: Layout, rank: int, full: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What a rank holds, and which of its elements the layout covers."""
    match layout:
        case Leaf(tensor, mesh, placements, box):
            if rank not in mesh.ranks:
                return None
            local = full[tensor.name]
            for dim, (start, length) in enumerate(box or ()):
                local = local.narrow(dim, start, length)
            grid = np.array(mesh.ranks).reshape(mesh.shape)
            coords = np.argwhere(grid == rank)[0]
            for placement, ways, coord in zip(placements, mesh.shape, coords, strict=True):
                local = split(local, placement, ways, int(coord))
            return local, torch.ones_like(local, dtype=torch.bool)
        case Concat(axis, parts):
            found = [p for p in (evaluate(part, rank, full) for part in parts) if p]
            return _joined(found, lambda values: torch.cat(values, dim=axis))
        case Stack(parts):
            found = [p for p in (evaluate(part, rank, full) for part in parts) if p]
            kept = [p for p in found if p[0].numel()]
            if found and not kept:
                empty = torch.empty((0, *found[0][0].shape), dtype=found[0][0].dtype)
                return empty, torch.empty_like(empty, dtype=torch.bool)
            return _joined(kept, torch.stack)
        case Pad(part, shape):
            inner = evaluate(part, rank, full)
            if inner is None:
                return None
            out = [torch.zeros(shape, dtype=value.dtype) for value in inner]
            for room, value in zip(out, inner, strict=True):
                room[tuple(slice(n) for n in value.shape)] = value
            return out[0], out[1]
    raise AssertionError(layout)


def _joined(found, join):
    if not found:
        return None
    return join([value for value, _ in found]), join([mask for _, mask in found])


def buffer(
    container: Container, rank: int, full: dict[str, torch.Tensor], *, filled: bool
) -> np.ndarray | None:
    """The bytes of a rank's container; elements it doesn't cover are ``UNTOUCHED``."""
    if container.ranks is not None and rank not in container.ranks:
        return None
    found = evaluate(container.layout, rank, full)
    if found is None or not found[0].numel():
        return None
    value, mask = found
    size = container.dtype.itemsize
    strides = container.strides or tuple(s * size for s in value.contiguous().stride())
    reach = sum((n - 1) * s for n, s in zip(value.shape, strides, strict=True)) + size
    out = np.full(reach, UNTOUCHED, dtype=np.uint8)
    view = np.lib.stride_tricks.as_strided(out, (*value.shape, size), (*strides, 1))
    if filled:
        content = value.contiguous().reshape(-1).view(torch.uint8).numpy()
        content = content.reshape(*value.shape, size)
        view[mask.numpy()] = content[mask.numpy()]
    return out


def buffers(
    side: Side, full: dict[str, torch.Tensor], *, filled: bool
) -> dict[tuple[int, str], np.ndarray]:
    found = {
        (rank, container.name): buffer(container, rank, full, filled=filled)
        for container in side.containers
        for rank in side.ranks
    }
    return {key: value for key, value in found.items() if value is not None}
