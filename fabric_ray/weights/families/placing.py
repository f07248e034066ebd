"""Parameters on ranks, in the words of :mod:`fabric_ray.plan`: what a cut means where."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import product

import msgspec

from fabric_ray.models.config import ModelConfig, Shape
from fabric_ray.plan.types import (
    Concat,
    Layout,
    Leaf,
    Mesh,
    Pad,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    Tensor,
)
from fabric_ray.weights.families.errors import Indivisible
from fabric_ray.weights.families.rules import Cut, Part, Rule, Split, Vocab
from fabric_ray.weights.families.sharing import shares


class Grid(msgspec.Struct, frozen=True, dict=True):
    """Ranks that share parameters between them: replicas, and in each a rank for every share."""

    replicas: tuple[tuple[int, ...], ...]

    @property
    def ways(self) -> int:
        return len(self.replicas[0])

    # One tuple for the meshes of all leaves: there are ten thousands of both.
    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for replica in self.replicas for rank in replica)

    def part(self, positions: range) -> Grid:
        """Some positions of every replica."""
        return Grid(tuple(tuple(replica[p] for p in positions) for replica in self.replicas))


def fuse(config: ModelConfig, rule: Rule, tensors: Sequence[Tensor], grid: Grid) -> Layout:
    """The parts of a rule's container.

    Raises:
        Indivisible: the ranks can't share a parameter evenly.
    """
    if rule.interleaved:
        return _interleave(config, tensors, grid)
    parts = [
        place(config, part, tensor, grid) for part, tensor in zip(rule.parts, tensors, strict=True)
    ]
    return parts[0] if len(parts) == 1 else Concat(0, tuple(parts))


def place(config: ModelConfig, part: Part, tensor: Tensor, grid: Grid) -> Layout:
    """One parameter, cut as its part says.

    Raises:
        Indivisible: the ranks can't share it evenly.
    """
    if isinstance(part.cut, Vocab):
        return _vocab(tensor, part.cut, grid)
    if isinstance(part.cut, Split):
        sharing = _sharing(config, part.cut, tensor.name, tensor.shape, grid.ways)
        dim, chunks = part.cut.dim, part.cut.chunks
        placement = Shard(dim) if chunks == 1 else StridedShard(dim, chunks)
        return _leaf(tensor, grid, placement, sharing)
    return _leaf(tensor, grid, Replicate(), (1, grid.ways))


def local_shape(config: ModelConfig, cut: Cut, name: str, shape: Shape, ways: int) -> Shape:
    """What one of ``ways`` ranks holds, padding included.

    Raises:
        Indivisible: the ranks can't share it evenly.
    """
    if isinstance(cut, Vocab):
        return (_padded_rows(shape[0], cut, ways), *shape[1:])
    if isinstance(cut, Split):
        count, _ = _sharing(config, cut, name, shape, ways)
        return tuple(n // count if d == cut.dim else n for d, n in enumerate(shape))
    return shape


def _sharing(
    config: ModelConfig, cut: Split, name: str, shape: Shape, ways: int
) -> tuple[int, int]:
    found = shares(config, cut, shape, ways)
    if found is None:
        raise Indivisible(
            f"dimension {cut.dim} of {name} (size {shape[cut.dim]}) can't be shared evenly by "
            f"{ways} ranks without cutting a {cut.unit.removesuffix('s').replace('_', ' ')}; use "
            "another parallel size",
            family=config.kind,
            parameter=name,
        )
    return found


def _leaf(tensor: Tensor, grid: Grid, placement: Placement, sharing: tuple[int, int]) -> Leaf:
    """``sharing``: different shares, and neighbours that hold each."""
    dims: list[tuple[int, Placement]] = [
        (len(grid.replicas), Replicate()),
        (sharing[0], placement),
        (sharing[1], Replicate()),
    ]
    dims = [(size, p) for size, p in dims if size > 1] or [(1, Replicate())]
    mesh = Mesh(grid.ranks, tuple(size for size, _ in dims))
    return Leaf(tensor, mesh, tuple(p for _, p in dims))


def _rows(tensor: Tensor, start: int, count: int, grid: Grid) -> Leaf:
    """Some rows of a tensor, the same on all ranks."""
    rest = tuple((0, size) for size in tensor.shape[1:])
    return Leaf(tensor, Mesh.line(grid.ranks), (Replicate(),), ((start, count), *rest))


def _vocab(tensor: Tensor, cut: Vocab, grid: Grid) -> Layout:
    rows, *rest = tensor.shape
    each = _padded_rows(rows, cut, grid.ways)
    parts = tuple(
        _rows(tensor, start, min(each, rows - start), grid.part(range(position, position + 1)))
        for position in range(grid.ways)
        if (start := position * each) < rows
    )
    return Pad(Concat(0, parts), (each, *rest))


def _interleave(config: ModelConfig, tensors: Sequence[Tensor], grid: Grid) -> Layout:
    """Per key/value head a share of every tensor; all these rows are cut evenly, between heads or
    within one where there are fewer of them than ranks."""
    heads, ways = config.kv_heads, grid.ways
    each, more = divmod(sum(tensor.shape[0] for tensor in tensors), ways)
    for tensor in tensors:
        if (heads % ways and ways % heads) or more or tensor.shape[0] % heads:
            raise Indivisible(
                f"the {heads} kv heads that {tensor.name} is interleaved by can't be shared evenly "
                f"by {ways} ranks; use a tp that divides them, or a multiple",
                family=config.kind,
                parameter=tensor.name,
            )
    parts, at = [], 0
    for head, tensor in product(range(heads), tensors):
        size = tensor.shape[0] // heads
        begin, end = head * size, (head + 1) * size
        while begin < end:
            count = min(end - begin, each - at % each)
            owner = grid.part(range(at // each, at // each + 1))
            parts.append(_rows(tensor, begin, count, owner))
            begin, at = begin + count, at + count
    return Concat(0, tuple(parts))


def _padded_rows(rows: int, cut: Vocab, ways: int) -> int:
    """Rows of each share, padding included."""
    step = math.lcm(cut.multiple, ways)
    return -(-rows // step) * step // ways
