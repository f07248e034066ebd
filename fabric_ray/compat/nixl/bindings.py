"""The names of ``nixl._bindings`` that callers of ``nixl_agent`` import."""

from __future__ import annotations

from itertools import chain

from fabric_ray.compat.nixl import status
from fabric_ray.compat.nixl.descriptors import (
    descriptors_from_bytes,
    nixlRegDList,
    nixlXferDList,
)
from fabric_ray.compat.nixl.request import nixlXferTelemetry

_ENUMS = (
    status.nixl_mem_t,
    status.nixl_status_t,
    status.nixl_thread_sync_t,
    status.nixl_xfer_op_t,
)
# Enumerations and exceptions; then their members: ``DRAM_SEG``, ``NIXL_READ``, ``NIXL_SUCCESS``...
globals().update((k, v) for k, v in vars(status).items() if "nixl" in k[:4].lower())
globals().update(chain.from_iterable(kind.__members__.items() for kind in _ENUMS))
DEFAULT_COMM_PORT = status.DEFAULT_COMM_PORT
HAVE_UCX_GPU_DEVICE_API = status.HAVE_UCX_GPU_DEVICE_API

__all__ = ["descriptors_from_bytes", "nixlRegDList", "nixlXferDList", "nixlXferTelemetry"]
