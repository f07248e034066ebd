"""What the planner refuses, one class for each reason."""

from __future__ import annotations

from fabric_ray.errors import FabricError


class PlanError(FabricError, ValueError):
    """A side, a pair of sides or a plan is invalid; the text names tensor, rank and remedy."""

    def __init__(
        self,
        message: str,
        *,
        tensor: str | None = None,
        container: str | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(message, tensor=tensor, container=container, rank=rank)
        self.tensor = tensor
        self.container = container
        self.rank = rank


class InvalidLayout(PlanError):
    """A mesh, placement, slice, container or side that means nothing."""


class PartialPlacement(PlanError):
    """A tensor whose shards are summands; it must be reduced first."""


class DtypeMismatch(PlanError):
    """Two places disagree on a tensor's dtype."""


class ShapeMismatch(PlanError):
    """Two places disagree on a shape, or the parts of a layout don't fit each other."""


class MissingTensors(PlanError):
    """The target asks for tensors that no source container holds."""


class ExtraTensors(PlanError):
    """The source holds tensors that no target container asks for."""


class Uncovered(PlanError):
    """A part of a tensor that a target needs is held by no source rank."""


class OverlappingElements(PlanError):
    """Strides under which two elements of a container share bytes."""


class PlanTooLarge(PlanError):
    """Sizes or counts beyond what a plan can hold."""


class PlanDecodeError(PlanError):
    """Bytes that are no plan of this version."""


class UnknownRank(PlanError):
    """A rank that the side doesn't have."""


class BufferMismatch(PlanError):
    """A buffer that is missing, too short, not contiguous or not writable."""


class InconsistentReports(PlanError):
    """Ranks that report different things about one parameter."""
