"""Checks the arguments of a weight target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import Side
from fabric_ray.weights.destination import VersionSink
from fabric_ray.weights.modules import reshard
from fabric_ray.weights.self_described import side_of


def check_arguments(side: Any, more: Sequence[Any], into: Any) -> None:
    """Raises InvalidArgument where a call gives an argument in the place of another."""
    advice = "call WeightTarget(into=module) or WeightTarget(side, rank=rank, into=module)"
    if side is None and (into is None or isinstance(into, VersionSink)):
        raise InvalidArgument(
            "side is missing, and there is no module to take it from; call "
            "WeightTarget(into=module), or give the side"
        )
    if side is not None and not isinstance(side, Side):
        raise InvalidArgument(
            f"side is {type(side).__name__}, expected a fabric_ray.plan.Side; {advice}, with the "
            "side that describes the module's tensors"
        )
    if more:
        raise InvalidArgument(
            f"WeightTarget got {len(more) + 1} positional arguments, expected the side alone "
            f"(the second is {type(more[0]).__name__}); {advice}"
        )
    if into is not None and not isinstance(into, (Mapping, VersionSink)):
        import torch

        if not isinstance(into, torch.nn.Module):
            raise InvalidArgument(
                f"into is {type(into).__name__}, expected a module or a mapping of names to "
                f"tensors; {advice}"
            )


def side_and_rank(side: Side | None, rank: int | None, into: Any) -> tuple[Side, int]:
    """The side and the rank in it; without a side, those of the module.

    Raises:
        InvalidArgument: the side has no such rank, or the module doesn't describe itself.
    """
    reshard(into)
    if side is None:
        side, own = side_of(into)
        # Rollouts that hold all of a model are replicas, whatever their number.
        rank = own if rank is None or side.ranks == (0,) else rank
    if rank is None or rank not in side.ranks:
        raise InvalidArgument(f"rank {rank!r} is not among the side's ranks {side.ranks}")
    return side, rank
