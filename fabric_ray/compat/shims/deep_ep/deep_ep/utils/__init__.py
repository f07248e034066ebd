"""``deep_ep.utils``: events."""

from fabric_ray.moe.deepep import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
