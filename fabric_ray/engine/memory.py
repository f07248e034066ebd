"""From a user's object to the memory behind it."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from fabric_ray._native import Engine, Pages
from fabric_ray.errors import InvalidArgument
from fabric_ray.tensors import check_memory

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike

_DLPACK_CUDA = 2
_PAGES = 1 << 32
# Methods of a torch storage that give it other memory and free what it had. numpy keeps host
# storages from being resized; no torch call keeps one from being shared.
_MOVERS_OF_HOST, _MOVERS_OF_GPU = ("_share_fd_cpu_", "_share_filename_cpu_"), ("resize_",)
_FIXED = "_fabric_ray_fixed"


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
    return array.ctypes.data, array.nbytes, (obj, array, _fixed_owners(array))


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
    # torch calls GPUs of ROCm cuda, too. Their memory would be taken for the host's.
    by_hip = tensor.device.type == "cuda" and torch.version.hip is not None
    if by_hip or tensor.device.type not in ("cpu", "cuda"):
        where = f"{tensor.device} of ROCm" if by_hip else tensor.device
        raise InvalidArgument(
            f"a tensor on {where} can't be registered, only those in host memory or on a "
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
    fixed = fix_storage(storage)
    if tensor.is_cuda:
        # `Tensor.resize_` can't be refused on a GPU; torch's allocator keeps the segment mapped.
        return tensor.data_ptr(), nbytes, (storage, fixed)
    seen = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
    return tensor.data_ptr(), nbytes, (storage, seen, fixed)


class FixedStorage:
    """Keeps a torch storage at its address in this process for as long as it is referred to."""

    def __init__(self) -> None:
        self.process = os.getpid()


def fix_storage(storage: torch.UntypedStorage) -> FixedStorage:
    """Makes a storage refuse to move: peers would go on with memory that is freed (MR-1), and its
    tensors would lack what peers have written (IC-2).

    torch has one Python object for a storage as long as the storage lives, and calls methods of
    that object to share its memory with other processes.
    """
    own = vars(storage)
    fixed: FixedStorage | None = own[_FIXED]() if _FIXED in own else None
    if fixed is None:
        fixed = FixedStorage()
        own[_FIXED] = weakref.ref(fixed)
        for method in _MOVERS_OF_HOST if storage.device.type == "cpu" else _MOVERS_OF_GPU:
            own[method] = partial(_move, weakref.ref(storage), method)
    return fixed


def _move(reference: weakref.ref[torch.UntypedStorage], method: str, *args: Any) -> Any:
    """A method of a storage that may move it, unless it is kept in place."""
    storage: Any = reference()
    fixed = vars(storage)[_FIXED]()
    if fixed and fixed.process == os.getpid() and _would_move(storage, method, *args):
        raise InvalidArgument(
            f"{storage.nbytes()} bytes of a tensor can't move to other memory: they are "
            "registered, and peers would go on with the old memory; call share_memory_() before "
            "the tensor is registered, send a clone() to the other process, or end the "
            "registration first"
        )
    return getattr(type(storage), method)(storage, *args)


def _would_move(storage: Any, method: str, *args: Any) -> bool:
    if method == "resize_":
        return args != (storage.nbytes(),)
    by_fd = False
    with contextlib.suppress(RuntimeError):  # raised unless it is shared in this way
        storage._get_shared_fd()
        by_fd = True
    return not storage.is_shared() or by_fd != (method == "_share_fd_cpu_")


def _fixed_owners(array: Any) -> list[Any]:
    """Keeps the owner of an array's memory from moving it: numpy doesn't resize what has weak
    references, even with ``refcheck=False``."""
    kept: list[Any] = []
    while isinstance(array, (np.ndarray, memoryview)):
        if isinstance(array, np.ndarray):
            kept.append(weakref.ref(array))
        array = array.base if isinstance(array, np.ndarray) else array.obj
    if hasattr(array, "untyped_storage"):
        kept.append(fix_storage(array.untyped_storage()))
    return kept


def segment_of(obj: Any, addr: int, nbytes: int) -> tuple[int, int]:
    """Address and bytes of what the memory behind ``obj`` is a part of, on the host."""
    if not hasattr(obj, "untyped_storage"):
        return addr, nbytes
    storage = obj.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def is_free_here(engine: Engine, quiesced: bool | None) -> bool:
    """Whether no transfer in this state touches memory of this process any more (MR-1).

    Where ``quiesced`` is ``None`` a link was lost. Its work ends at this end before the loss is
    reported, and may still land at the other; libfabric alone cannot end it.
    """
    return quiesced is True or (quiesced is None and "libfabric" not in engine.address.transports)


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
