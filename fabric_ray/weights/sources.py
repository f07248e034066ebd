"""The sources of this process, and the protocol by which a controller calls them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import ParamMeta, Side
from fabric_ray.weights.registry import Registry
from fabric_ray.weights.replica.sides import ReplicaMeta
from fabric_ray.weights.report import PushTarget, Sent, SourceShare

if TYPE_CHECKING:
    from fabric_ray.weights.conversion import Recipe
    from fabric_ray.weights.quant import Invitation

TrainerMeta = list[ParamMeta] | bytes | ReplicaMeta


class Source(Protocol):
    """A trainer's half of a push."""

    rank: int
    side: Side | None

    def meta(self) -> tuple[int, TrainerMeta, bytes]:
        """Rank, metadata of the tensors or the digest of the side, and engine address."""

    def convert(self, session: str, recipe: Recipe, *, again: bool = False) -> Invitation:
        """Prepares conversions to other dtypes."""

    def join(self, session: str, invitations: Mapping[int, Invitation]) -> None:
        """Connects to the other trainers for the exchange of block maxima."""

    def accept(self, share: SourceShare, *, timeout: float = 60.0) -> bool:
        """Takes its share of the plan; returns whether its pushes gather from other trainers."""

    def ready(self, session: str) -> None:
        """Raises what would end its next push before the gather. The other trainers, which don't
        have the error, would wait in theirs."""

    def push(
        self,
        session: str,
        version: int,
        push_targets: list[PushTarget],
        *,
        digest: bool = False,
        timeout: float = 60.0,
    ) -> Sent:
        """Writes its share of a version, and waits until it has arrived."""


def check_rank(rank: int) -> None:
    """Raises InvalidArgument unless ``rank`` is an integer >= 0."""
    if not isinstance(rank, int) or rank < 0:
        raise InvalidArgument(
            f"rank is {rank!r}; give this trainer's index in WeightSync(trainers=...), from 0"
        )


def check_side_rank(rank: int, side: Side) -> None:
    """Compares a rank of a side with torch.distributed's, where both count the same processes.

    With another trainer's rank, shards would go to that trainer's places (RS-1).

    Raises:
        InvalidArgument: they differ.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return
    own, size = dist.get_rank(), dist.get_world_size()
    if own != rank and size == len(side.ranks):
        raise InvalidArgument(
            f"rank is {rank}, and this process is rank {own} of {size} in torch.distributed; let "
            "the side count ranks as torch.distributed does, pass torch.distributed.get_rank() as "
            "rank, and the trainers in the order of these ranks"
        )


SOURCES: Registry[Source] = Registry("weight source")
