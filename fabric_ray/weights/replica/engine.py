"""What stands for an inference engine on a trainer: its tensors, in host memory, one rank's at a
time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from fabric_ray.plan import Side, Tensor

if TYPE_CHECKING:
    import torch


class EngineReplica(Protocol):
    """One engine rank's tensors after another, in the same memory.

    :class:`~fabric_ray.weights.replica.LayoutReplica` and
    :class:`~fabric_ray.weights.replica.ModuleReplica` are two; another engine's needs these five.
    """

    @property
    def ranks(self) -> Sequence[int]:
        """The rollouts that it can be loaded as."""

    @property
    def side(self) -> Side | None:
        """The rollouts' layout, if known; the controller compares it with the rollouts' own."""

    def needs(self, rank: int, tensors: Mapping[str, Tensor]) -> Mapping[str, Collection[str]]:
        """By engine tensor of a rollout: those of ``tensors`` that it is made of, all of which must
        have been loaded before it may be sent.

        Args:
            tensors: the whole tensors that will come.

        Raises:
            InvalidArgument: one isn't what the engine expects under its name.
        """

    def reserve(self, ranks: Sequence[int], names: Collection[str]) -> None:
        """Nothing but these engine tensors of these rollouts will be loaded and sent."""

    def tensors(self, rank: int) -> Mapping[str, torch.Tensor]:
        """What has been reserved, as one rollout has it. A name stays at its memory."""

    def load(self, rank: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fills engine tensors as they are on one rollout from whole tensors, in host memory."""
