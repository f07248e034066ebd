"""Ranks that hold the same, such as the replicas of an engine."""

from __future__ import annotations

import msgspec

from fabric_ray._native import holders
from fabric_ray.plan.planner import encoded
from fabric_ray.plan.types import Side


def twins(side: Side) -> tuple[tuple[int, ...], ...]:
    """The ranks of a target layout in groups that hold the same boxes at the same bytes.

    Every rank is in one group; those that hold nothing are alone.

    Raises:
        PlanError: the layout means nothing.
    """
    _, groups = holders(encoded(side, "target"))
    idle = set(side.ranks).difference(*groups)
    return tuple(sorted([tuple(group) for group in groups] + [(rank,) for rank in idle]))


def first_replicas(side: Side) -> Side:
    """The target layout in which only the first rank of each group of twins holds anything.

    Raises:
        PlanError: the layout means nothing.
    """
    by_container, groups = holders(encoded(side, "target"))
    first = {group[0] for group in groups}
    containers = tuple(
        msgspec.structs.replace(container, ranks=tuple(r for r in ranks if r in first))
        for container, ranks in zip(side.containers, by_container, strict=True)
    )
    return msgspec.structs.replace(side, containers=containers)
