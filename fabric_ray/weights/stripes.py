"""Stripes: parts of a version that are counted and relayed separately."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fabric_ray.plan import Copy, LocalContainer


def stripes(containers: Sequence[LocalContainer], container_count: int, count: int) -> list[int]:
    """The stripe of each container of a side, in order and about equal in bytes.

    Args:
        containers: a rank's, in order of urgency.
        container_count: number of containers of the side; those of other ranks get stripe 0.
        count: number of stripes.
    """
    out = [0] * container_count
    total, before = sum(c.nbytes for c in containers), 0
    for c in containers:
        # By its midpoint, so that a large container doesn't pull its neighbours along.
        out[c.index] = (2 * before + c.nbytes) * count // (2 * total)
        before += c.nbytes
    return out


def pages(copies: Iterable[Copy], stripe_of: Sequence[int], count: int) -> list[int]:
    """Number of pages of copies, by stripe."""
    out = [0] * count
    for copy in copies:
        out[stripe_of[copy.dst_container]] += copy.pages
    return out


def containers_of(
    containers: Iterable[LocalContainer], stripe_of: Sequence[int], count: int
) -> list[list[LocalContainer]]:
    """A rank's containers by stripe."""
    out: list[list[LocalContainer]] = [[] for _ in range(count)]
    for c in containers:
        out[stripe_of[c.index]].append(c)
    return out
