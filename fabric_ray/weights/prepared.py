"""What a trainer has ready for each rollout, from push to push."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from fabric_ray.weights.report import Arm

T = TypeVar("T")


class _Place(NamedTuple):
    """What requests to a rollout depend on."""

    region: bytes
    stripes: int


class Prepared(Generic[T]):
    """Requests to rollouts, put together once for each place that they are written to."""

    def __init__(self) -> None:
        self._known: dict[int, dict[_Place, T]] = {}

    def of(self, arm: Arm, make: Callable[[Arm], T]) -> T:
        """The requests for the rollout of an arm; ``make`` puts them together."""
        known = self._known.setdefault(arm.rank, {})
        place = _Place(arm.region, len(arm.counters))
        if place not in known:
            # Those that an abort has given another key are of no use any more.
            alive = {arm.region, *arm.further}
            self._known[arm.rank] = known = {p: k for p, k in known.items() if p.region in alive}
            known[place] = make(arm)
        return known[place]

    def clear(self) -> None:
        """Forgets all: what they read lies elsewhere now."""
        self._known.clear()


def in_turn(rollouts: Sequence[T], rank: int) -> list[T]:
    """Rollouts, each trainer beginning with another."""
    turn = rank % max(1, len(rollouts))
    return [*rollouts[turn:], *rollouts[:turn]]
