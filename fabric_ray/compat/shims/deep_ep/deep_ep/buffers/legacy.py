"""``deep_ep.buffers.legacy``."""

from fabric_ray.moe.deepep import Buffer, Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
