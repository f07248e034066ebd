"""Weight updates for RL: trainers push sharded weights straight into rollout workers.

A trainer actor makes a :class:`WeightSource` of its model, a rollout actor a :class:`WeightTarget`
of its layout; a :class:`WeightSync` on the driver (or in any actor) plans once and pushes versions.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabric_ray.weights.hooks import EngineHooks
    from fabric_ray.weights.report import ConnectReport, LinkReport, PushReport, Span, Temporary
    from fabric_ray.weights.source import WeightSource
    from fabric_ray.weights.sync import WeightSync
    from fabric_ray.weights.target import WeightTarget

__all__ = [
    "ConnectReport",
    "EngineHooks",
    "LinkReport",
    "PushReport",
    "Span",
    "Temporary",
    "WeightSource",
    "WeightSync",
    "WeightTarget",
]

_MODULES = {
    "EngineHooks": "hooks",
    "WeightSource": "source",
    "WeightSync": "sync",
    "WeightTarget": "target",
}


def __getattr__(name: str) -> Any:
    # Layouts need no torch and only the controller needs Ray; both take seconds to import.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'report')}"), name)
