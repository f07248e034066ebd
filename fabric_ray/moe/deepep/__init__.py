"""DeepEP's interfaces over :class:`fabric_ray.moe.AllToAll`, on the host and on a GPU."""

from fabric_ray.moe.deepep.buffer import Buffer
from fabric_ray.moe.deepep.elastic import ElasticBuffer
from fabric_ray.moe.deepep.event import EventOverlap
from fabric_ray.moe.deepep.layout import EPHandle
from fabric_ray.moe.deepep.normal import Handle
from fabric_ray.moe.deepep.sizes import Config

__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "EventOverlap", "Handle"]
