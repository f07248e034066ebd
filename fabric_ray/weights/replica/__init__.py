"""Weight pushes by way of an engine's replica in a trainer's host memory.

For trainers whose shards can't be described, and engines whose layout only their own loader knows.
A :class:`ReplicaSource` takes the place of a :class:`~fabric_ray.weights.WeightSource`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabric_ray.weights.replica.engine import EngineReplica
    from fabric_ray.weights.replica.layout import LayoutReplica
    from fabric_ray.weights.replica.module import ModuleReplica, module_side
    from fabric_ray.weights.replica.source import ReplicaSource

__all__ = ["EngineReplica", "LayoutReplica", "ModuleReplica", "ReplicaSource", "module_side"]

_MODULES = {
    "EngineReplica": "engine",
    "LayoutReplica": "layout",
    "ModuleReplica": "module",
    "ReplicaSource": "source",
    "module_side": "module",
}


def __getattr__(name: str) -> Any:
    # The controller plans for replicas without torch.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
