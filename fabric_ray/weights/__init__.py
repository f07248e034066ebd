"""Weight updates for RL: trainers push sharded weights straight into rollout workers.

A trainer actor makes a :class:`WeightSource` of its model, a rollout actor a :class:`WeightTarget`
of its layout; a :class:`WeightSync` on the driver (or in any actor) plans once and pushes versions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabric_ray.weights.report import ConnectReport, LinkReport, PushReport, Span
from fabric_ray.weights.source import WeightSource
from fabric_ray.weights.target import WeightTarget

if TYPE_CHECKING:
    from fabric_ray.weights.sync import WeightSync

__all__ = [
    "ConnectReport",
    "LinkReport",
    "PushReport",
    "Span",
    "WeightSource",
    "WeightSync",
    "WeightTarget",
]


def __getattr__(name: str) -> Any:
    # Only the controller needs Ray, which takes seconds to import.
    if name == "WeightSync":
        from fabric_ray.weights.sync import WeightSync

        return WeightSync
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
