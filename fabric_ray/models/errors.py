"""What is refused about models and checkpoints."""

from __future__ import annotations

from fabric_ray.errors import FabricError


class ModelError(FabricError, ValueError):
    """A model description or a checkpoint that can't be used."""


class UnsupportedModel(ModelError):
    """An architecture, or a variant of one, that isn't implemented. ``model_type``."""


class InvalidConfig(ModelError):
    """A configuration that is unreadable or contradicts itself. ``field`` where it is one."""


class CheckpointError(ModelError):
    """A checkpoint that is incomplete, damaged or doesn't fit its configuration.

    ``path``, and ``parameter`` where it is about one.
    """
