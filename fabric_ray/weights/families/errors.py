"""What is refused about a model and an engine's way to cut it."""

from __future__ import annotations

from fabric_ray.errors import FabricError


class FamilyError(FabricError, ValueError):
    """A model that a family's table can't lay out. ``family``, ``parameter``."""


class UnknownFamily(FamilyError):
    """No table has that name."""


class IncompleteFamily(FamilyError):
    """A table that leaves a parameter out, uses one twice or fuses what isn't there."""


class Indivisible(FamilyError):
    """Heads, columns or experts that the ranks can't share evenly. ``allowed``: what would do."""


class InvalidRanks(FamilyError):
    """Tensor- or expert-parallel sizes, or a list of ranks, that mean nothing."""
