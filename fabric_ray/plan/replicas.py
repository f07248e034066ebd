"""Ranks that hold the same bytes, such as the replicas of an engine."""

from __future__ import annotations

import msgspec

from fabric_ray._native import holders
from fabric_ray.plan.planner import encoded
from fabric_ray.plan.types import Side


def replica_groups(side: Side) -> tuple[tuple[int, ...], ...]:
    """The ranks of a target side, in groups that hold the same boxes at the same bytes.

    Each rank is in one group; a rank that holds nothing is alone in its group.

    Raises:
        PlanError: the side is invalid.
    """
    _, groups = holders(encoded(side, "target"))
    idle = set(side.ranks).difference(*groups)
    return tuple(sorted([tuple(group) for group in groups] + [(rank,) for rank in idle]))


def first_replicas(side: Side) -> Side:
    """The target side in which only the first rank of each replica group holds containers.

    Raises:
        PlanError: the side is invalid.
    """
    by_container, groups = holders(encoded(side, "target"))
    first = {group[0] for group in groups}
    containers = tuple(
        msgspec.structs.replace(container, ranks=tuple(r for r in ranks if r in first))
        for container, ranks in zip(side.containers, by_container, strict=True)
    )
    return msgspec.structs.replace(side, containers=containers)
