"""NIXL-EP over fabric-ray."""

from fabric_ray.moe.deepep import Config, EventHandle, EventOverlap, topk_idx_t
from fabric_ray.moe.nixl_ep import Buffer

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"]
