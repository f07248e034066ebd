"""Checks the arguments of a weight target and of its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.plan import Side
from fabric_ray.weights.destination import VersionSink
from fabric_ray.weights.modules import reshard
from fabric_ray.weights.report import TargetShare
from fabric_ray.weights.self_described import side_of

if TYPE_CHECKING:
    import torch


def gpu_of(device: Any) -> torch.device | None:
    """The GPU on which versions arrive; ``None`` for memory of the host.

    Raises:
        InvalidArgument: it is neither.
    """
    if device is None:
        return None
    import torch

    found = torch.device(device)
    if found.type not in ("cpu", "cuda"):
        raise InvalidArgument(
            f"device is {found}, expected the host (`cpu`) or a CUDA GPU, such as `cuda:0`"
        )
    if found.type == "cpu":
        return None
    # The current device may be another in the threads of a push.
    index = torch.cuda.current_device() if found.index is None else found.index
    return torch.device("cuda", index)


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


def check_delta(share: TargetShare, device: torch.device | None) -> None:
    """Raises InvalidArgument if versions come as changes where none can be applied."""
    if share.delta and device is not None:
        raise InvalidArgument(
            f"changes are applied in memory of the host, and versions arrive on {device}; leave "
            "out device of the WeightTarget, or delta of the WeightSync"
        )


def check_commit(version: int, in_use: int | None, confirmed: int | None, *, joining: bool) -> None:
    """Raises WeightSyncError unless a version is newer than the one in use, and confirmed (RS-3).

    Args:
        joining: a replica wrote the version, so it may equal the version in use.
    """
    if version < (in_use or 0) or (version == in_use and not joining):
        raise WeightSyncError(
            f"commit failed: got version {version}, expected more than {in_use}, the version in "
            "use",
            version=version,
        )
    if confirmed != version:
        raise WeightSyncError(
            f"commit failed: got version {version}, expected {confirmed}, the version that was "
            "confirmed",
            version=version,
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
