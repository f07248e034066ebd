"""The sources of this process: what a controller may ask of a trainer's half of a push."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import Side
from fabric_ray.weights.registry import Registry
from fabric_ray.weights.report import Arm, Sent, SourceShare

if TYPE_CHECKING:
    from fabric_ray.weights.conversion import Recipe
    from fabric_ray.weights.quant import Invitation


class Source(Protocol):
    """A trainer's half, whatever it sends its weights from."""

    rank: int
    side: Side | None

    def meta(self) -> tuple[int, Any, bytes]:
        """Rank, what it holds, and where its engine is."""

    def convert(self, session: str, recipe: Recipe, *, again: bool = False) -> Invitation:
        """Gets ready to send other dtypes than it holds."""

    def join(self, session: str, invitations: Mapping[int, Invitation]) -> None:
        """Takes part in the exchange that conversion needs."""

    def accept(self, share: SourceShare, *, timeout: float = 60.0) -> None:
        """Takes its part of the route."""

    def push(
        self,
        session: str,
        version: int,
        arms: list[Arm],
        *,
        digest: bool = False,
        timeout: float = 60.0,
    ) -> Sent:
        """Writes its part of a version, and waits until it is there."""


def check_rank(rank: int) -> None:
    """That a trainer can have that place.

    Raises:
        InvalidArgument: it can't.
    """
    if not isinstance(rank, int) or rank < 0:
        raise InvalidArgument(
            f"rank is {rank!r}; give this trainer's index in WeightSync(trainers=...), from 0"
        )


SOURCES: Registry[Source] = Registry("weight source")
