"""``nixl_ep.buffer``."""

from fabric_ray.moe.nixl_ep import DEFAULT_TIMEOUT_MS, Buffer

__all__ = ["DEFAULT_TIMEOUT_MS", "Buffer"]
