"""``deep_ep.buffers.elastic``."""

from fabric_ray.moe.deepep import ElasticBuffer, EPHandle, EventHandle, EventOverlap

__all__ = ["EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap"]
