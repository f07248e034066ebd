"""The engine's side of a weight push: fused, stacked, padded containers on tensor-parallel ranks.

Ranks ``i * tp`` to ``i * tp + tp - 1`` are replica ``i`` of the engine. With ``ep`` above 1 the
ranks of a replica form ``ep`` groups of neighbours; a group owns whole experts and its ``tp / ep``
ranks share each of them, as in SGLang (and vLLM, where ``ep`` equals ``tp``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from fabric_ray.models.config import ModelConfig, Shape, parameter_shapes
from fabric_ray.plan.types import (
    ITEMSIZES,
    Concat,
    Container,
    DType,
    Layout,
    Leaf,
    Mesh,
    Pad,
    Placement,
    Replicate,
    Shard,
    Side,
    Stack,
    Tensor,
)
from fabric_ray.weights.families.errors import InvalidRanks
from fabric_ray.weights.families.matching import Match, match
from fabric_ray.weights.families.rules import Cut, Family, Part, Split, Vocab
from fabric_ray.weights.families.sharing import (
    check_shares,
    owned_experts,
    parallel_sizes,
    shares,
)
from fabric_ray.weights.families.tables import family_of


class ContainerSpec(msgspec.Struct, frozen=True):
    """A buffer that an engine rank has to hold, row-major."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZES[self.dtype]


def target_side(
    config: ModelConfig,
    *,
    tp: int,
    ep: int = 1,
    ranks: Sequence[int] | None = None,
    family: Family | None = None,
) -> Side:
    """What every rank of an inference engine holds of a model.

    Args:
        config: the model.
        tp: ranks of one replica of the engine.
        ep: groups among them that own whole experts.
        ranks: all ranks, replica after replica; ``0`` to ``tp - 1`` by default.
        family: a table other than the one of ``config.kind``.

    Raises:
        FamilyError: one of its subclasses, which names family and parameter.
    """
    engine = _Engine(config, tp=tp, ep=ep, ranks=ranks, family=family)
    containers = [engine.container(found) for found in engine.matches]
    return Side.of(engine.ranks, containers)


def target_containers(
    config: ModelConfig,
    *,
    tp: int,
    ep: int = 1,
    rank: int,
    family: Family | None = None,
) -> tuple[ContainerSpec, ...]:
    """The buffers of rank ``rank`` (0 to ``tp - 1``) of a replica, padding included.

    Raises:
        FamilyError: as :func:`target_side`.
    """
    engine = _Engine(config, tp=tp, ep=ep, ranks=None, family=family)
    if not 0 <= rank < tp:
        raise InvalidRanks(
            f"rank {rank} is none of a replica of tp={tp}; use 0 to {tp - 1}",
            family=engine.family.name,
        )
    return tuple(engine.spec(found, rank) for found in engine.matches)


class _Engine:
    """One model under one table on one set of ranks."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        tp: int,
        ep: int,
        ranks: Sequence[int] | None,
        family: Family | None,
    ) -> None:
        self.config = config
        self.family = family_of(config.kind) if family is None else family
        parallel_sizes(config, self.family, tp, ep)
        self.tp, self.ep = tp, ep
        self.ranks = tuple(range(tp)) if ranks is None else tuple(ranks)
        if not self.ranks or len(self.ranks) % tp:
            raise InvalidRanks(
                f"{len(self.ranks)} ranks don't make whole replicas of tp={tp}; give a multiple",
                family=self.family.name,
            )
        self.shapes = parameter_shapes(config)
        self.matches = match(self.family, self.shapes)
        check_shares(config, self.family, self.matches, self.shapes, tp=tp, ep=ep)
        self.dtype = DType.of(config.dtype)

    def container(self, found: Match) -> Container:
        layout: Layout
        if found.rule.stacked:
            layout = Stack(
                tuple(
                    self._fuse(found, expert, self._group(group))
                    for group in range(self.ep)
                    for expert in self._owned(found, group)
                )
            )
        else:
            layout = self._fuse(found, 0, range(self.tp))
        # The last ranks' shares of a small vocabulary may be nothing but padding.
        ranks = self.ranks if isinstance(layout, Pad) else None
        return Container(found.container, self.dtype, layout, ranks=ranks)

    def spec(self, found: Match, rank: int) -> ContainerSpec:
        stacked = found.rule.stacked
        ways = self.tp // self.ep if stacked else self.tp
        local = [
            self._local_shape(part.cut, self.shapes[name], ways)
            for part, name in zip(found.rule.parts, found.members[0], strict=True)
        ]
        shape: Shape = (sum(s[0] for s in local), *local[0][1:])
        if stacked:
            shape = (len(self._owned(found, rank // ways)), *shape)
        return ContainerSpec(found.container, shape, self.dtype.name)

    def _owned(self, found: Match, group: int) -> range:
        return owned_experts(len(found.members), self.ep, group)

    def _group(self, group: int) -> range:
        size = self.tp // self.ep
        return range(group * size, (group + 1) * size)

    def _fuse(self, found: Match, expert: int, positions: range) -> Layout:
        parts = tuple(
            self._part(part, name, positions)
            for part, name in zip(found.rule.parts, found.members[expert], strict=True)
        )
        return parts[0] if len(parts) == 1 else Concat(0, parts)

    def _part(self, part: Part, name: str, positions: range) -> Layout:
        tensor = Tensor(name, self.shapes[name], self.dtype)
        if isinstance(part.cut, Vocab):
            return self._vocab(tensor, part.cut, positions)
        if isinstance(part.cut, Split):
            found = shares(self.config, part.cut, tensor.shape, len(positions))
            assert found is not None, "check_shares has passed"
            return self._leaf(tensor, positions, Shard(part.cut.dim), found)
        return self._leaf(tensor, positions, Replicate(), (1, len(positions)))

    def _leaf(
        self, tensor: Tensor, positions: range, placement: Placement, sharing: tuple[int, int]
    ) -> Leaf:
        """``sharing``: different shares, and neighbours that hold each."""
        ranks = self._everywhere(positions)
        replicas = len(ranks) // len(positions)
        dims: list[tuple[int, Placement]] = [
            (replicas, Replicate()),
            (sharing[0], placement),
            (sharing[1], Replicate()),
        ]
        dims = [(size, p) for size, p in dims if size > 1] or [(1, Replicate())]
        mesh = Mesh(ranks, tuple(size for size, _ in dims))
        return Leaf(tensor, mesh, tuple(p for _, p in dims))

    def _vocab(self, tensor: Tensor, cut: Vocab, positions: range) -> Layout:
        rows, *rest = tensor.shape
        each = _padded_rows(rows, cut, len(positions))
        whole = tuple((0, size) for size in rest)
        parts = []
        for index, position in enumerate(positions):
            start = index * each
            if start < rows:
                mesh = Mesh.line(self._everywhere(range(position, position + 1)))
                rows_here = (start, min(each, rows - start))
                parts.append(Leaf(tensor, mesh, (Replicate(),), (rows_here, *whole)))
        return Pad(Concat(0, tuple(parts)), (each, *rest))

    def _everywhere(self, positions: range) -> tuple[int, ...]:
        """These positions of every replica, replica after replica."""
        return tuple(
            self.ranks[first + position]
            for first in range(0, len(self.ranks), self.tp)
            for position in positions
        )

    def _local_shape(self, cut: Cut, shape: Shape, ways: int) -> Shape:
        if isinstance(cut, Vocab):
            return (_padded_rows(shape[0], cut, ways), *shape[1:])
        if isinstance(cut, Split):
            found = shares(self.config, cut, shape, ways)
            assert found is not None, "check_shares has passed"
            return tuple(n // found[0] if d == cut.dim else n for d, n in enumerate(shape))
        return shape


def _padded_rows(rows: int, cut: Vocab, ways: int) -> int:
    """Rows of each share, padding included."""
    step = math.lcm(cut.multiple, ways)
    return -(-rows // step) * step // ways
