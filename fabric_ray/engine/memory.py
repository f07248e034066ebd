"""From a user's object to the memory behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from fabric_ray._native import Pages
from fabric_ray.errors import InvalidArgument
from fabric_ray.tensors import check_memory

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

_DLPACK_CUDA = 2
_PAGES = 1 << 32


def memory_of(obj: Any) -> tuple[int, int, Any]:
    """Address, bytes and owner of the memory behind ``obj``.

    Takes torch tensors, numpy arrays, and whatever offers DLPack or the buffer protocol. It must be
    contiguous, writable (peers will write to it), and on the host or a CUDA GPU.
    """
    if hasattr(obj, "untyped_storage"):
        return _of_tensor(obj)
    if _is_on_gpu(obj):
        from torch.utils.dlpack import from_dlpack

        addr, nbytes, keep = _of_tensor(from_dlpack(obj))
        return addr, nbytes, (obj, keep)
    array = obj if isinstance(obj, np.ndarray) else _as_array(obj)
    if not array.flags.c_contiguous:
        raise InvalidArgument(
            f"an array of shape {array.shape} with strides {array.strides} is not contiguous; "
            "register the array it is a view of, or a contiguous copy"
        )
    if not array.flags.writeable:
        raise InvalidArgument(
            "the memory is read-only, but peers may write to registered memory; copy it into "
            "memory from TransferEngine.alloc"
        )
    if array.dtype.hasobject:
        raise InvalidArgument(
            "an array of Python objects holds pointers, which mean nothing to peers"
        )
    if array.nbytes == 0:
        raise InvalidArgument("an empty array has no memory to register")
    return array.ctypes.data, array.nbytes, (obj, array)


def _is_on_gpu(obj: Any) -> bool:
    if not hasattr(obj, "__dlpack_device__"):
        return False
    with contextlib.suppress(BufferError, RuntimeError, TypeError, ValueError):
        return bool(obj.__dlpack_device__()[0] == _DLPACK_CUDA)
    return False  # why, is found out when its memory is asked for


def _as_array(obj: Any) -> np.ndarray[Any, Any]:
    try:
        if hasattr(obj, "__dlpack__"):
            return np.from_dlpack(obj)
        return np.frombuffer(obj, dtype=np.uint8)
    except (BufferError, RuntimeError, TypeError, ValueError) as cause:
        raise InvalidArgument(
            f"{type(obj).__name__} has no memory that can be registered ({cause}): give a tensor, "
            "an array, or an object with DLPack or the buffer protocol, in host memory"
        ) from cause


def _of_tensor(tensor: Any) -> tuple[int, int, Any]:
    import torch

    check_memory("the tensor", tensor)
    if tensor.device.type not in ("cpu", "cuda"):
        raise InvalidArgument(
            f"a tensor on {tensor.device} can't be registered, only those in host memory or on a "
            "CUDA GPU; copy it to the host first"
        )
    if not tensor.is_contiguous():
        raise InvalidArgument(
            f"a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} is not "
            "contiguous; register its base tensor, or a contiguous copy"
        )
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        raise InvalidArgument("an empty tensor has no memory to register")
    # The storage, not the tensor: rebinding the tensor must not free what peers reach. Nor must
    # resizing: torch refuses that for a storage that numpy has seen.
    storage = tensor.untyped_storage()
    if tensor.storage_offset() * tensor.element_size() + nbytes > storage.nbytes():
        raise InvalidArgument(
            f"the memory of a tensor of shape {tuple(tensor.shape)} was freed; load it again"
        )
    if tensor.is_cuda:
        # A GPU storage can't be kept from being resized; torch's allocator at least keeps the
        # segment mapped.
        return tensor.data_ptr(), nbytes, storage
    seen = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
    return tensor.data_ptr(), nbytes, (storage, seen)


def segment_of(obj: Any, addr: int, nbytes: int) -> tuple[int, int]:
    """Address and bytes of what the memory behind ``obj`` is a part of, on the host."""
    if not hasattr(obj, "untyped_storage"):
        return addr, nbytes
    storage = obj.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def pages(indices: ArrayLike | Iterable[int], *, stride: int, offset: int = 0) -> Pages:
    """Which pages of a region, in order: page ``i`` lies at ``offset + indices[i] * stride``.

    Args:
        indices: page numbers below 2^32; a ``range`` with step 1 costs nothing to describe.
        stride: bytes between neighbouring page numbers.
        offset: bytes before page 0.

    Raises:
        InvalidArgument: indices that aren't such numbers, or a negative stride or offset.
    """
    stride, offset = index(stride), index(offset)
    if stride < 0 or offset < 0:
        raise InvalidArgument("stride and offset of pages must not be negative")
    if isinstance(indices, range) and indices.step == 1 and 0 <= indices.start <= indices.stop:
        if indices.stop > _PAGES:
            raise InvalidArgument(f"page indices must lie between 0 and {_PAGES - 1}")
        return Pages._range(indices.start, len(indices), stride, offset)
    array = _flat(indices)
    if array.size and (int(array.min()) < 0 or int(array.max()) >= _PAGES):
        raise InvalidArgument(f"page indices must lie between 0 and {_PAGES - 1}")
    return Pages._listed(np.ascontiguousarray(array, dtype=np.uint32).tobytes(), stride, offset)


def _flat(indices: ArrayLike | Iterable[int]) -> np.ndarray[Any, Any]:
    try:
        array = np.asarray(indices if hasattr(indices, "__array__") else list(indices))  # type: ignore[arg-type]
    except ValueError:  # lists of unequal lengths
        array = np.zeros((0, 0))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgument("page indices must be a flat sequence of integers")
    return array
