"""The parts of a version that are counted, and passed on, each by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fabric_ray.plan import Copy, LocalContainer


def stripes(containers: Sequence[LocalContainer], container_count: int, count: int) -> list[int]:
    """The stripe of every container of a side, the most urgent first, about equal in bytes.

    Args:
        containers: those that a rank has, in order.
        container_count: of the side; those that the rank lacks are in the first stripe.
        count: of stripes.
    """
    out = [0] * container_count
    total, before = sum(c.nbytes for c in containers), 0
    for c in containers:
        # By its middle: a large one doesn't draw its neighbours along.
        out[c.index] = (2 * before + c.nbytes) * count // (2 * total)
        before += c.nbytes
    return out


def pages(copies: Iterable[Copy], stripe_of: Sequence[int], count: int) -> list[int]:
    """Pages of copies, by stripe."""
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
