"""What this process offers: tensors by object, their memory registered once however often."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from fabric_ray.engine import Region, TransferEngine
from fabric_ray.errors import InvalidArgument, ResourceError
from fabric_ray.runtime.rdt.offer import Extent, Holder, Offer
from fabric_ray.tensors import check_memory, resolved, wait_for_kernels

_Place: TypeAlias = tuple[torch.device, int]
"""A storage: the device, and the address of its first byte."""


@dataclass
class _Pin:
    region: Region
    count: int = 0


class _Hull:
    """The bytes of one storage between the first and the last that an object needs."""

    def __init__(self, index: int, data: torch.Tensor) -> None:
        self.index = index
        self.data = data
        self.low, self.high = data.storage_offset(), data.storage_offset()

    def cover(self, data: torch.Tensor) -> None:
        self.low = min(self.low, data.storage_offset())
        self.high = max(self.high, data.storage_offset() + data.numel())


class Sources:
    """Registers tensors when an object of them is made and lets go when Ray frees it.

    Memory is registered by whole storages, and once: tensors that overlap, views, and objects that
    share tensors have one registration, which ends with the last of them. May be called from any
    thread.
    """

    def __init__(self, engine: TransferEngine, holder: Holder) -> None:
        self._engine = engine
        self._holder = holder
        # A registration ends with the last object, or pin, that has it.
        self._held: dict[str, list[Region]] = {}
        self._pins: dict[_Place, _Pin] = {}
        self._lock = threading.Lock()

    def add(self, obj_id: str, tensors: Sequence[torch.Tensor]) -> Offer:
        """Offers the tensors of an object until :meth:`remove`.

        One that isn't contiguous, or whose values differ from its bytes (a lazy conjugate), is
        copied. An object that is offered already, by a task that Ray repeats, is offered anew.

        Raises:
            InvalidArgument: a tensor that has no memory of its own, or on a device that is neither
                the host nor a CUDA GPU.
            FabricError: its memory can't be registered.
        """
        flat = [_bytes_of(tensor) for tensor in tensors]
        wait_for_kernels(flat)
        hulls: dict[_Place, _Hull] = {}
        for data in flat:
            if data.numel():
                hulls.setdefault(_place(data), _Hull(len(hulls), data)).cover(data)
        regions = [self._register(hull) for hull in hulls.values()]
        extents = []
        for data in flat:
            hull = hulls.get(_place(data)) if data.numel() else None
            index, offset = (hull.index, data.storage_offset() - hull.low) if hull else (0, 0)
            extents.append(Extent(index, int(offset), data.numel(), data.is_cuda))
        descriptors = tuple(region.descriptor().to_bytes() for region in regions)
        offer = Offer(self._holder, descriptors, tuple(extents))
        with self._lock:
            self._held[obj_id] = regions
        return offer

    def remove(self, obj_id: str) -> None:
        """Withdraws an object's tensors. Readers fail with ``Stale`` from now on, unless another
        object shares the memory."""
        with self._lock:
            held = self._held.pop(obj_id, None)
        del held  # outside the lock: deregistration may wait for peers

    def pin(self, tensor: torch.Tensor) -> None:
        """Registers the storage of a tensor until :meth:`unpin`, as often as it was pinned.

        Raises:
            InvalidArgument: as for :meth:`add`.
        """
        _check(tensor)
        place = _place(tensor)
        with self._lock:
            pin = self._pins.get(place)
            if pin is None:
                pin = self._pins[place] = _Pin(self._engine.register(_whole(tensor), segment=True))
            pin.count += 1

    def unpin(self, tensor: torch.Tensor) -> None:
        """Takes one :meth:`pin` back. Objects that hold the memory keep it registered.

        Raises:
            InvalidArgument: it isn't pinned.
        """
        place = _place(tensor)
        with self._lock:
            pin = self._pins.get(place)
            if pin is None:
                raise InvalidArgument(
                    f"the memory of this tensor of shape {tuple(tensor.shape)} is not registered; "
                    "register_memory() comes first, and each call of it is taken back once"
                )
            pin.count -= 1
            ended = self._pins.pop(place) if not pin.count else None
        del ended

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        with self._lock:
            return _place(tensor) in self._pins

    def __len__(self) -> int:
        """Objects that are offered."""
        return len(self._held)

    def _register(self, hull: _Hull) -> Region:
        part = _whole(hull.data)[hull.low : hull.high]
        try:
            return self._engine.register(part, segment=True)
        except ResourceError:
            # Memory that may only be read, which some NICs don't take.
            return self._engine.register(part.clone())


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values as a flat tensor of bytes: a view of its memory where that holds them in
    order, else of a copy."""
    _check(tensor)
    solid = resolved("the tensor", tensor).contiguous()
    # Not view(-1): a single element may have any stride.
    return solid.as_strided((solid.numel(),), (1,)).view(torch.uint8)


def _check(tensor: torch.Tensor) -> None:
    if tensor.device.type not in ("cpu", "cuda"):
        raise InvalidArgument(
            f"a tensor on {tensor.device} can't be offered, only those in host memory or on a "
            "CUDA GPU; copy it to the host first"
        )
    check_memory("the tensor", tensor, lazy=True)
    if tensor.numel() and not tensor.data_ptr():
        raise InvalidArgument(
            f"the memory of a tensor of shape {tuple(tensor.shape)} was freed; load it again"
        )


def _place(tensor: torch.Tensor) -> _Place:
    check_memory("the tensor", tensor, lazy=True)
    return tensor.device, tensor.untyped_storage().data_ptr()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
