"""Which elements of a tensor a rank holds, and where in its container.

A layout cuts each dimension of a tensor separately, so a rank's part of a leaf is a product of one
list of intervals per dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

import msgspec

from fabric_ray.plan.types import (
    Concat,
    Layout,
    Leaf,
    Mesh,
    Pad,
    Placement,
    Shard,
    Stack,
    StridedShard,
)

Spans = tuple[tuple[int, int], ...]
"""``(start, length)`` along one dimension, ascending, in the order in which a rank holds them."""

Cuts = tuple[tuple[Placement, int], ...]
"""Placements that cut one dimension, each with its number of ways."""


def extent(spans: Spans) -> int:
    """Elements in all intervals."""
    return sum(length for _, length in spans)


def merged(spans: Iterable[tuple[int, int]]) -> Spans:
    """The same elements, neighbouring intervals joined and empty ones left out."""
    out: list[tuple[int, int]] = []
    for start, length in spans:
        if out and out[-1][0] + out[-1][1] == start:
            out[-1] = (out[-1][0], out[-1][1] + length)
        elif length:
            out.append((start, length))
    return tuple(out)


@lru_cache(maxsize=1 << 16)
def cut_spans(box: tuple[int, int], cuts: Cuts, coords: tuple[int, ...]) -> Spans:
    """What the rank at ``coords`` gets of an interval, as torch cuts it, from left to right."""
    spans: Spans = (box,)
    for (placement, ways), coord in zip(cuts, coords, strict=True):
        size = extent(spans)
        if isinstance(placement, StridedShard):
            step = -(-size // placement.split_factor)
            chunks = [(at, min(step, size - at)) for at in range(0, size, step or 1)]
            parts = [_chunk(at, length, ways, coord) for at, length in chunks]
        else:
            parts = [_chunk(0, size, ways, coord)]
        spans = merged(piece for part in parts for piece in _within(spans, *part))
    return spans


def _chunk(start: int, size: int, ways: int, index: int) -> tuple[int, int]:
    """One of ``ways`` chunks of an interval, the last ones shorter or empty."""
    step = -(-size // ways)
    first = min(size, step * index)
    return start + first, min(size, first + step) - first


def _within(spans: Spans, start: int, length: int) -> Iterator[tuple[int, int]]:
    """``length`` elements from the ``start``-th that the intervals hold."""
    for first, size in spans:
        skipped = min(start, size)
        taken = min(size - skipped, length)
        if taken > 0:
            yield first + skipped, taken
        start, length = start - skipped, length - max(taken, 0)


def box_of(leaf: Leaf) -> Spans:
    """The interval of each dimension that the leaf places."""
    return leaf.slice or tuple((0, size) for size in leaf.tensor.shape)


def cuts_of(leaf: Leaf, dim: int) -> tuple[Cuts, tuple[int, ...]]:
    """What cuts a dimension, and the mesh dimensions that do."""
    found = [
        (mesh_dim, placement, ways)
        for mesh_dim, (placement, ways) in enumerate(
            zip(leaf.placements, leaf.mesh.shape, strict=True)
        )
        if isinstance(placement, (Shard, StridedShard)) and placement.dim == dim
    ]
    return tuple((p, w) for _, p, w in found), tuple(m for m, _, _ in found)


def leaf_spans(leaf: Leaf, rank: int) -> tuple[Spans, ...] | None:
    """What a rank holds of a leaf, per dimension; ``None`` if it isn't in its mesh."""
    coords = _coordinates(leaf.mesh).get(rank)
    if coords is None:
        return None
    out = []
    for dim, box in enumerate(box_of(leaf)):
        cuts, mesh_dims = cuts_of(leaf, dim)
        out.append(cut_spans(box, cuts, tuple(coords[m] for m in mesh_dims)))
    return tuple(out)


@lru_cache(maxsize=1024)
def _coordinates(mesh: Mesh) -> dict[int, tuple[int, ...]]:
    out = {}
    for position, rank in enumerate(mesh.ranks):
        coords = []
        for size in reversed(mesh.shape):
            coords.append(position % size)
            position //= size
        out[rank] = tuple(reversed(coords))
    return out


class Piece(msgspec.Struct, frozen=True):
    """A leaf's part of a rank's container; never empty."""

    leaf: Leaf
    spans: tuple[Spans, ...]
    start: tuple[int, ...]
    """Its first element in the container, stacked dimensions first."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(extent(spans) for spans in self.spans)


Placed = tuple[tuple[int, ...], list[Piece]]
"""A rank's container: its shape, and the pieces in it."""


def place(layout: Layout, rank: int) -> Placed | None:
    """Where the leaves of a layout lie on a rank; ``None`` if it has none of them."""
    if isinstance(layout, Leaf):
        spans = leaf_spans(layout, rank)
        if spans is None:
            return None
        shape = tuple(extent(s) for s in spans)
        return shape, [Piece(layout, spans, (0,) * len(shape))] if all(shape) else []
    if isinstance(layout, Pad):
        inner = place(layout.part, rank)
        return None if inner is None else (layout.shape, inner[1])
    parts = [found for part in layout.parts if (found := place(part, rank)) is not None]
    if not parts:
        return None
    return _stacked(parts) if isinstance(layout, Stack) else _joined(layout, parts)


def _stacked(parts: list[Placed]) -> Placed:
    kept = [part for part in parts if all(part[0])]
    pieces = [
        Piece(piece.leaf, piece.spans, (index, *piece.start))
        for index, (_, inner) in enumerate(kept)
        for piece in inner
    ]
    return (len(kept), *(kept or parts)[0][0]), pieces


def _joined(layout: Concat, parts: list[Placed]) -> Placed:
    axis, at, pieces = layout.axis, 0, []
    for shape, inner in parts:
        for piece in inner:
            start = tuple(s + at * (dim == axis) for dim, s in enumerate(piece.start))
            pieces.append(Piece(piece.leaf, piece.spans, start))
        at += shape[axis]
    first = parts[0][0]
    return (*first[:axis], at, *first[axis + 1 :]), pieces
