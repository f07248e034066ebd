"""A NIXL agent over the engine: register, prepare, post, check, notify, metadata as bytes.

Agents reach agents of this face alone, not NIXL's own.
"""

from fabric_ray.compat.nixl.agent import (
    DEFAULT_COMM_PORT,
    nixl_agent,
    nixl_agent_config,
    nixl_backend_handle,
    nixl_prepped_dlist_handle,
    nixl_thread_sync_t,
    nixl_xfer_handle,
)
from fabric_ray.compat.nixl.status import NixlError

__all__ = [
    "DEFAULT_COMM_PORT",
    "NixlError",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_backend_handle",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
]
