"""fabric-ray moves LLM state (weights, KV pages, MoE tokens) between Ray actors with one-sided
pushes and counted completion."""

import os

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


def _show_if_asked() -> None:
    """With ``FABRIC_RAY_OBSERVE=1`` a process shows itself from its first engine on."""
    if os.environ.get("FABRIC_RAY_OBSERVE", "0") in ("", "0"):
        return
    from fabric_ray.engine import on_open
    from fabric_ray.observe.serving import serve_quietly

    on_open(lambda _: serve_quietly())


_show_if_asked()
