"""``deep_ep.buffer``, as releases before the second interface have it."""

from fabric_ray.moe.deepep import Buffer, Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
