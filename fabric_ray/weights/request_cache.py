"""A trainer's requests for each rollout, kept between pushes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from fabric_ray.weights.report import PushTarget

T = TypeVar("T")


class _Key(NamedTuple):
    """What the requests for a rollout depend on."""

    region: bytes
    stripes: int


class RequestCache(Generic[T]):
    """Requests for rollouts, built once for each region that they write to."""

    def __init__(self) -> None:
        self._known: dict[int, dict[_Key, T]] = {}

    def get(self, target: PushTarget, build: Callable[[PushTarget], T]) -> T:
        """The requests for a push target, from ``build`` where none are cached."""
        known = self._known.setdefault(target.rank, {})
        key = _Key(target.region, len(target.counters))
        if key not in known:
            # An abort changes a region's key: requests for the old key are dropped.
            valid = {target.region, *target.further}
            self._known[target.rank] = known = {k: v for k, v in known.items() if k.region in valid}
            known[key] = build(target)
        return known[key]

    def clear(self) -> None:
        """Drops all requests, since the memory that they read has moved."""
        self._known.clear()


def rotated(rollouts: Sequence[T], rank: int) -> list[T]:
    """Rollouts in an order that begins with a different one for each trainer rank."""
    first = rank % max(1, len(rollouts))
    return [*rollouts[first:], *rollouts[:first]]
