"""Blocks that lie on several ranks: the maxima that each rank needs and sends. Pure, no I/O.

A block's maximum is the maximum over its parts. Ranks with equal shards (replicas) are one class;
a rank that has a part of a block gets the part's maximum of every other class from one of its
members, so that replicas of a whole model exchange among themselves.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from fabric_ray.plan.types import Leaf, Side, leaves
from fabric_ray.weights.quant.blocks import Axis, axis_of
from fabric_ray.weights.quant.formats import Cast, Formats, Scaled, block_of, format_of
from fabric_ray.weights.quant.spans import Spans, leaf_spans

Ids = npt.NDArray[np.int64]
"""Blocks by their place in the row-major grid, or places in a vector of maxima; ascending."""

Shape = tuple[int, ...]
_Held = tuple[tuple[Leaf, tuple[int, ...] | None], ...]


class TensorEdges(msgspec.Struct):
    """One rank's edge blocks of one tensor."""

    incomplete: Ids
    """Blocks that none of its pieces has all of."""
    sends: dict[int, Ids]
    """The blocks whose maxima each rank receives."""
    receives: dict[int, Ids]

    @property
    def blocks(self) -> Ids:
        """All blocks whose maxima are needed before anything is quantised."""
        return np.unique(np.concatenate([self.incomplete, *self.sends.values()]))


class RankEdges(msgspec.Struct):
    """One rank's edge blocks of all tensors, in one vector of float32 maxima."""

    rank: int
    tensors: dict[str, tuple[int, Ids]]
    """Where a tensor's blocks begin in the vector, and which they are."""
    size: int
    """Elements of the vector."""
    sends: dict[int, Ids]
    """Per rank, the elements that it gets, in the order in which it expects them."""
    receives: dict[int, Ids]

    @property
    def partners(self) -> tuple[int, ...]:
        """Ranks that send to this one or get something from it."""
        return tuple(sorted({*self.sends, *self.receives}))


class Edges:
    """The edge blocks of a side.

    Every rank that makes it from equal arguments gets the same.

    Raises:
        UnsupportedFormat: as :func:`~fabric_ray.weights.quant.quantised_source`.
    """

    def __init__(self, side: Side, formats: Formats) -> None:
        held: dict[str, list[tuple[Leaf, tuple[int, ...] | None]]] = defaultdict(list)
        kinds: dict[str, Scaled] = {}
        for container in side.containers:
            fmt = format_of(container, formats)
            if fmt is None or isinstance(fmt, Cast):
                continue
            for leaf in leaves(container.layout):
                held[leaf.tensor.name].append((leaf, container.ranks))
                kinds[leaf.tensor.name] = fmt
        # Layers repeat each other: only the geometry of a tensor matters.
        self._forms: dict[str, dict[int, TensorEdges]] = {}
        known: dict[tuple[object, ...], dict[int, TensorEdges]] = {}
        for name, parts in held.items():
            shape = parts[0][0].tensor.shape
            block = block_of(kinds[name], shape)
            places = tuple((x.mesh, x.placements, x.slice, only) for x, only in parts)
            key = (shape, block, places)
            if key not in known:
                known[key] = _exchanged(shape, block, tuple(parts))
            if known[key]:
                self._forms[name] = known[key]

    def sizes(self) -> dict[int, int]:
        """Elements of the vectors of all ranks that have edge blocks."""
        sizes: Counter[int] = Counter()
        forms = {id(form): form for form in self._forms.values()}
        for which, times in Counter(map(id, self._forms.values())).items():
            for rank, edges in forms[which].items():
                sizes[rank] += times * len(edges.blocks)
        return dict(sizes)

    def of_rank(self, rank: int) -> RankEdges:
        """What one rank sends and gets; empty where all its blocks are whole."""
        tensors: dict[str, tuple[int, Ids]] = {}
        sends: dict[int, list[Ids]] = defaultdict(list)
        receives: dict[int, list[Ids]] = defaultdict(list)
        size = 0
        for name, form in self._forms.items():
            if rank not in form:
                continue
            edges = form[rank]
            blocks = edges.blocks
            tensors[name] = (size, blocks)
            for by_peer, out in ((edges.sends, sends), (edges.receives, receives)):
                for peer, ids in by_peer.items():
                    out[peer].append(size + np.searchsorted(blocks, ids))
            size += len(blocks)
        return RankEdges(rank, tensors, size, _joined(sends), _joined(receives))


def _joined(parts: Mapping[int, list[Ids]]) -> dict[int, Ids]:
    return {peer: np.concatenate(parts[peer]) for peer in sorted(parts)}


class _Shards(msgspec.Struct):
    """Equal shards: their holders, and the blocks that they cross."""

    ranks: list[int]
    touched: Ids
    incomplete: Ids


def _exchanged(shape: Shape, block: Shape, held: _Held) -> dict[int, TensorEdges]:
    """The edges of one tensor, for the ranks that have any."""
    classes = _classes(shape, block, held)
    if not any(len(one.incomplete) for one in classes):
        return {}
    of_rank: dict[int, set[int]] = defaultdict(set)
    for index, one in enumerate(classes):
        for rank in one.ranks:
            of_rank[rank].add(index)
    wanted: dict[tuple[int, int], list[Ids]] = defaultdict(list)
    for mine, other in itertools.permutations(range(len(classes)), 2):
        needing, giving = classes[mine], classes[other]
        shared = _common(needing.incomplete, giving.touched)
        if not len(shared):
            continue
        for turn, rank in enumerate(needing.ranks):
            if other not in of_rank[rank]:
                wanted[giving.ranks[turn % len(giving.ranks)], rank].append(shared)
    return _by_rank(classes, of_rank, wanted)


def _by_rank(
    classes: list[_Shards],
    of_rank: Mapping[int, set[int]],
    wanted: Mapping[tuple[int, int], list[Ids]],
) -> dict[int, TensorEdges]:
    sends: dict[int, dict[int, Ids]] = defaultdict(dict)
    receives: dict[int, dict[int, Ids]] = defaultdict(dict)
    for (giver, getter), parts in wanted.items():
        sends[giver][getter] = receives[getter][giver] = np.unique(np.concatenate(parts))
    out = {}
    for rank, mine in of_rank.items():
        incomplete = np.unique(np.concatenate([classes[i].incomplete for i in mine]))
        if len(incomplete) or rank in sends:
            out[rank] = TensorEdges(incomplete, sends[rank], receives[rank])
    return out


def _common(one: Ids, other: Ids) -> Ids:
    if not len(one) or not len(other) or one[-1] < other[0] or other[-1] < one[0]:
        return one[:0]
    return np.intersect1d(one, other, assume_unique=True)


def _classes(shape: Shape, block: Shape, held: _Held) -> list[_Shards]:
    """Distinct shards of a tensor, in the order of their boxes."""
    holders: dict[tuple[Spans, ...], list[int]] = defaultdict(list)
    for leaf, only in held:
        for rank in leaf.mesh.ranks:
            spans = leaf_spans(leaf, rank)
            if spans is None or not all(spans) or (only is not None and rank not in only):
                continue
            if rank not in holders[spans]:
                holders[spans].append(rank)
    grid = tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
    out = []
    for spans in sorted(holders):
        axes = [axis_of(s, b, n) for s, b, n in zip(spans, block, shape, strict=True)]
        touched = grid_ids(grid, [axis.touched for axis in axes])
        out.append(_Shards(sorted(holders[spans]), touched, touched[~_whole(axes)]))
    return out


def _whole(axes: list[Axis]) -> npt.NDArray[np.bool_]:
    """Of each block that the axes touch, whether all of it is there."""
    out = np.ones(1, dtype=np.bool_)
    for axis in axes:
        out = (out[:, None] & np.asarray(axis.whole)).ravel()
    return out


def grid_ids(grid: Shape, places: list[tuple[int, ...]]) -> Ids:
    """The row-major ids of a product of places per dimension."""
    steps = [math.prod(grid[dim + 1 :]) for dim in range(len(grid))]
    out: Ids = np.zeros(1, dtype=np.int64)
    for step, where in zip(steps, places, strict=True):
        out = (out[:, None] + step * np.asarray(where, dtype=np.int64)).ravel()
    return out
