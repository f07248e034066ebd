"""Weight updates for RL: trainers push sharded weights straight into rollout workers.

A trainer actor makes a :class:`WeightSource` of its model, a rollout actor a :class:`WeightTarget`
of its layout; a :class:`WeightSync` on the driver (or in any actor) plans once and pushes versions.
"""

from fabric_ray.weights.report import ConnectReport, LinkReport, PushReport, Span
from fabric_ray.weights.source import WeightSource
from fabric_ray.weights.sync import WeightSync
from fabric_ray.weights.target import WeightTarget

__all__ = [
    "ConnectReport",
    "LinkReport",
    "PushReport",
    "Span",
    "WeightSource",
    "WeightSync",
    "WeightTarget",
]
