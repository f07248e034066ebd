"""``deep_ep.hybrid_ep_buffer``."""

from fabric_ray.moe.deepep import HybridEPBuffer
from fabric_ray.moe.deepep.hybrid import indices_to_map

__all__ = ["HybridEPBuffer", "indices_to_map"]
