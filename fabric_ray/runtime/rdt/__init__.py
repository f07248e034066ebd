"""Ray Direct Transport: tensors of object references through the engine.

``fabric_ray.register()`` makes ``@ray.method(tensor_transport="fabric")`` and
``ray.put(..., _tensor_transport="fabric")`` known. Importing this package imports Ray and torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fabric_ray.runtime.rdt.registration import register, transport

__all__ = ["deregister_memory", "empty", "register", "register_memory"]


def register_memory(tensor: torch.Tensor) -> None:
    """Keeps the storage of a tensor registered until :func:`deregister_memory`, so that objects of
    it, and fetches into it, don't pay for registering it. Registering twice counts.

    Raises:
        InvalidArgument: a tensor that has no memory of its own, or on a device that is neither the
            host nor a CUDA GPU.
    """
    transport().exchange().sources.pin(tensor)


def deregister_memory(tensor: torch.Tensor) -> None:
    """Takes one :func:`register_memory` back. Objects that hold the memory keep it registered.

    Raises:
        InvalidArgument: it isn't registered.
    """
    transport().exchange().sources.unpin(tensor)


def empty(shape: Sequence[int] | int, dtype: torch.dtype) -> torch.Tensor:
    """A zeroed tensor in host memory that peers on this host map: objects of it are read without
    the kernel's help.

    Raises:
        InvalidArgument: a size below 0.
        ResourceError: no room; the message says where.
    """
    return transport().exchange().empty(shape, dtype)
