"""``nixl_ep.utils``."""

from fabric_ray.moe.deepep import EventOverlap

__all__ = ["EventOverlap"]
