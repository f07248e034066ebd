"""The TransferEngine: one-sided pushes and counted completion between processes."""

from fabric_ray._native import (
    Batch,
    Counter,
    CounterRef,
    EngineAddress,
    Flag,
    Message,
    Pages,
    Peer,
    PeerGroup,
    Region,
    RegionDescriptor,
    RemoteRegion,
    RemoteSegment,
    Segment,
    SegmentDescriptor,
    Transfer,
    Watcher,
)
from fabric_ray.engine.config import EngineConfig
from fabric_ray.engine.core import (
    Explanation,
    Path,
    Paths,
    Rail,
    TransferEngine,
    Verdict,
    on_open,
    opened,
)
from fabric_ray.engine.memory import pages
from fabric_ray.engine.observability import EngineMetrics, EngineRecords
from fabric_ray.engine.symmetric import SymmetricMemory

__all__ = [
    "Batch",
    "Counter",
    "CounterRef",
    "EngineAddress",
    "EngineConfig",
    "EngineMetrics",
    "EngineRecords",
    "Explanation",
    "Flag",
    "Message",
    "Pages",
    "Path",
    "Paths",
    "Peer",
    "PeerGroup",
    "Rail",
    "Region",
    "RegionDescriptor",
    "RemoteRegion",
    "RemoteSegment",
    "Segment",
    "SegmentDescriptor",
    "SymmetricMemory",
    "Transfer",
    "TransferEngine",
    "Verdict",
    "Watcher",
    "on_open",
    "opened",
    "pages",
]
