"""The engine's side of a weight push: fused, stacked, padded containers on an engine's ranks.

A replica of the engine has ``dp`` groups of ``tp`` ranks. Each group holds everything but the
experts; experts are spread over all groups. Of the ``size = dp * tp`` ranks of replica ``i``, which
are ``i * size`` and on, neighbours form ``ep`` groups; such a group owns whole experts and its
``size / ep`` ranks share each of them, as in SGLang (and vLLM, where ``ep`` equals ``size``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from fabric_ray.models.config import ModelConfig, Shape, parameter_dtype, parameter_shapes
from fabric_ray.plan.types import (
    ITEMSIZES,
    Container,
    DType,
    Layout,
    Pad,
    Side,
    Stack,
    Tensor,
)
from fabric_ray.weights.families.errors import IncompleteFamily, InvalidRanks
from fabric_ray.weights.families.matching import Match, match
from fabric_ray.weights.families.placing import Grid, fuse, local_shape
from fabric_ray.weights.families.rules import Family
from fabric_ray.weights.families.sharing import (
    check_shares,
    owned_experts,
    parallel_sizes,
    replica_sizes,
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
    dp: int = 1,
    ranks: Sequence[int] | None = None,
    family: Family | None = None,
) -> Side:
    """What every rank of an inference engine holds of a model.

    Args:
        config: the model.
        tp: ranks that share everything but experts.
        ep: groups of ranks of a replica that own whole experts.
        dp: groups of ``tp`` ranks in a replica: data-parallel attention.
        ranks: all ranks, replica after replica; one replica, numbered from 0, by default.
        family: a table other than the one of ``config.kind``.

    Raises:
        FamilyError: one of its subclasses, which names family and parameter.
    """
    engine = _Engine(config, tp=tp, ep=ep, dp=dp, ranks=ranks, family=family)
    containers = [engine.container(found) for found in engine.matches]
    return Side.of(engine.ranks, containers)


def target_containers(
    config: ModelConfig,
    *,
    tp: int,
    ep: int = 1,
    dp: int = 1,
    rank: int,
    family: Family | None = None,
) -> tuple[ContainerSpec, ...]:
    """The buffers of rank ``rank`` (0 to ``dp * tp - 1``) of a replica, padding included.

    Raises:
        FamilyError: as :func:`target_side`.
    """
    engine = _Engine(config, tp=tp, ep=ep, dp=dp, ranks=None, family=family)
    if not 0 <= rank < engine.size:
        raise InvalidRanks(
            f"rank {rank} is out of range [0, {engine.size}) of a replica "
            f"of {replica_sizes(tp, dp)}",
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
        dp: int,
        ranks: Sequence[int] | None,
        family: Family | None,
    ) -> None:
        self.config = config
        self.family = family_of(config.kind, nest=config.nest) if family is None else family
        parallel_sizes(config, self.family, tp=tp, ep=ep, dp=dp)
        self.tp, self.ep, self.size = tp, ep, tp * dp
        self.ranks = tuple(range(self.size)) if ranks is None else tuple(ranks)
        if not self.ranks or len(self.ranks) % self.size:
            raise InvalidRanks(
                f"{len(self.ranks)} ranks don't make whole replicas of {replica_sizes(tp, dp)}; "
                "give a multiple",
                family=self.family.name,
            )
        self.shapes = parameter_shapes(config)
        self.matches = match(self.family, self.shapes)
        _stacked_only(self.family, self.matches)
        check_shares(config, self.family, self.matches, self.shapes, tp=tp, ep=ep, dp=dp)
        self.grid = self._rows(tp)
        experts = self._rows(self.size)
        self.expert_grids = [experts.part(self._group(group)) for group in range(ep)]

    def _rows(self, size: int) -> Grid:
        starts = range(0, len(self.ranks), size)
        return Grid(tuple(self.ranks[first : first + size] for first in starts))

    def container(self, found: Match) -> Container:
        layout: Layout
        if found.rule.per_expert:
            layout = Stack(
                tuple(
                    self._fuse(found, expert, grid)
                    for group, grid in enumerate(self.expert_grids)
                    for expert in self._owned(found, group)
                )
            )
        else:
            layout = self._fuse(found, 0, self.grid)
        # The last ranks' shares of a small vocabulary may be nothing but padding.
        ranks = self.ranks if isinstance(layout, Pad) else None
        return Container(found.container, self._dtype(found), layout, ranks=ranks)

    def spec(self, found: Match, rank: int) -> ContainerSpec:
        per_expert = found.rule.per_expert
        ways = self.size // self.ep if per_expert else self.tp
        local = [
            local_shape(self.config, part.cut, name, self.shapes[name], ways)
            for part, name in zip(found.rule.parts, found.members[0], strict=True)
        ]
        shape: Shape = (sum(s[0] for s in local), *local[0][1:])
        if per_expert:
            shape = (len(self._owned(found, rank // ways)), *shape)
        return ContainerSpec(found.container, shape, self._dtype(found).name)

    def _owned(self, found: Match, group: int) -> range:
        return owned_experts(len(found.members), self.ep, group)

    def _group(self, group: int) -> range:
        size = self.size // self.ep
        return range(group * size, (group + 1) * size)

    def _dtype(self, found: Match) -> DType:
        return DType.of(parameter_dtype(self.config, found.members[0][0]))

    def _fuse(self, found: Match, expert: int, grid: Grid) -> Layout:
        dtype = self._dtype(found)
        tensors = [Tensor(name, self.shapes[name], dtype) for name in found.members[expert]]
        return fuse(self.config, found.rule, tensors, grid)


def _stacked_only(family: Family, matches: Sequence[Match]) -> None:
    for found in matches:
        if "{expert}" in found.container:
            raise IncompleteFamily(
                f"family {family.name} gives each expert a container ({found.container}), and "
                "engines stack them; take {expert} out of the container's name",
                family=family.name,
                parameter=found.members[0][0],
            )
