"""KV cache transfer: paged caches of prefill ranks pushed into those of decode ranks."""

from fabric_ray.kvcache.layout import CacheGroup, CacheLayout, CacheTensor, Place

__all__ = ["CacheGroup", "CacheLayout", "CacheTensor", "Place"]
