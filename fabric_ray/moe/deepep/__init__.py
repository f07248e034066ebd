"""DeepEP's legacy interface over :class:`fabric_ray.moe.AllToAll`, on host tensors."""

from fabric_ray.moe.deepep.buffer import Buffer
from fabric_ray.moe.deepep.event import EventOverlap
from fabric_ray.moe.deepep.normal import Handle
from fabric_ray.moe.deepep.sizes import Config

__all__ = ["Buffer", "Config", "EventOverlap", "Handle"]
