"""``deep_ep.utils.event``."""

from fabric_ray.moe.deepep import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
