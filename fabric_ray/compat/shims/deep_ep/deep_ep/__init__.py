"""DeepEP over fabric-ray. It doesn't take the place of an installed DeepEP."""

from fabric_ray.compat import refuse_installed

refuse_installed("deep_ep", __file__)

from fabric_ray.moe.deepep import (  # noqa: E402
    Buffer,
    Config,
    ElasticBuffer,
    EPHandle,
    EventHandle,
    EventOverlap,
    HybridEPBuffer,
    topk_idx_t,
)

from .utils import check_nvlink_connections, destroy_uccl, initialize_uccl  # noqa: E402

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "check_nvlink_connections",
    "destroy_uccl",
    "initialize_uccl",
    "topk_idx_t",
]
