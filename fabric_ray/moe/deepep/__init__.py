"""DeepEP's interfaces over :class:`fabric_ray.moe.AllToAll`, on the host and on a GPU."""

import torch

from fabric_ray.moe.deepep.buffer import Buffer
from fabric_ray.moe.deepep.elastic import ElasticBuffer
from fabric_ray.moe.deepep.event import EventHandle, EventOverlap
from fabric_ray.moe.deepep.hybrid import HybridEPBuffer
from fabric_ray.moe.deepep.layout import EPHandle
from fabric_ray.moe.deepep.sizes import Config
from fabric_ray.moe.deepep.ways import Handle

topk_idx_t = torch.int64
"""The dtype of ``topk_idx``."""

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "Handle",
    "HybridEPBuffer",
    "topk_idx_t",
]
