"""fabric-ray moves LLM state (weights, KV pages, MoE tokens) between Ray actors with one-sided
pushes and counted completion."""

from fabric_ray._native import __version__
from fabric_ray.engine import (
    Batch,
    Counter,
    CounterRef,
    EngineAddress,
    EngineConfig,
    Peer,
    Region,
    RegionDescriptor,
    RemoteRegion,
    RemoteSegment,
    Segment,
    SegmentDescriptor,
    Transfer,
    TransferEngine,
    pages,
)
from fabric_ray.errors import FabricError

__all__ = [
    "Batch",
    "Counter",
    "CounterRef",
    "EngineAddress",
    "EngineConfig",
    "FabricError",
    "Peer",
    "Region",
    "RegionDescriptor",
    "RemoteRegion",
    "RemoteSegment",
    "Segment",
    "SegmentDescriptor",
    "Transfer",
    "TransferEngine",
    "__version__",
    "pages",
]
