"""KV cache transfer: paged caches of prefill ranks pushed into those of decode ranks."""

from fabric_ray.kvcache import errors
from fabric_ray.kvcache.decoder import Decoder, Pull
from fabric_ray.kvcache.layout import CacheGroup, CacheLayout, CacheTensor, Place
from fabric_ray.kvcache.prefiller import Job, Prefiller
from fabric_ray.kvcache.terms import RankCache, Terms
from fabric_ray.kvcache.timeline import LayerTimes

__all__ = [
    "CacheGroup",
    "CacheLayout",
    "CacheTensor",
    "Decoder",
    "Job",
    "LayerTimes",
    "Place",
    "Prefiller",
    "Pull",
    "RankCache",
    "Terms",
    "errors",
]
