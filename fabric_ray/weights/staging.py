"""Memory that a version arrives in before it is used."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from fabric_ray._native import Region
from fabric_ray.engine import TransferEngine
from fabric_ray.errors import NotQuiesced
from fabric_ray.plan import LocalContainer
from fabric_ray.tensors import wait_for_kernels

if TYPE_CHECKING:
    import torch

# Alignment of containers in bytes; enough for any kernel.
_ALIGN = 256
# A running peer on this host releases a region within microseconds.
_QUIESCE_S = 2.0


def _caller() -> int:
    """Identifies the current task in an event loop, else the thread."""
    if asyncio._get_running_loop() is not None and (task := asyncio.current_task()):
        return id(task)
    return threading.get_ident()


class _Loan(NamedTuple):
    array: weakref.ref[Any]
    """Under the tensor that was lent and its views."""
    since: float
    caller: int


class _LentOnGpu:
    """What a lent tensor on a GPU and all its views refer to."""

    def __init__(self, part: torch.Tensor) -> None:
        self._part = part

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self._part.data_ptr(), False)
        return {"shape": tuple(self._part.shape), "typestr": "|u1", "data": data, "version": 2}


class ReceiveMemory:
    """Memory that peers write to, registered apart from its allocation, so that its key can
    change.

    Args:
        device: the GPU that it lies on; ``None``: on the host.
    """

    def __init__(
        self, engine: TransferEngine, nbytes: int, device: torch.device | None = None
    ) -> None:
        self._device = device
        if device is None:
            self._memory: Any = engine.alloc(max(nbytes, 1)).numpy()
        else:
            import torch

            # Padding is never written.
            self._memory = torch.zeros(max(nbytes, 1), dtype=torch.uint8, device=device)
            # The allocator may have freed memory that kernels still use.
            wait_for_kernels([self._memory])
        self._engine = engine
        self.region: Region = engine.register(self._memory)

    def revoke(self) -> bool:
        """Gives the memory a new key: writes with the old key are refused (MR-2).

        Returns ``False`` if a peer may still write with the old key; the caller must then discard
        this memory.
        """
        try:
            self.region.deregister(timeout=_QUIESCE_S)
        except NotQuiesced:
            return False
        self.region = self._engine.register(self._memory)
        return True


def wait_for_readers(memory: Iterable[ReceiveMemory]) -> None:
    """Waits for kernels of readers that have left: they may still read (RS-1)."""
    if on_gpu := [each._memory for each in memory if each._device is not None]:
        wait_for_kernels(on_gpu)


class StagingMemory(ReceiveMemory):
    """Memory for one version of all containers."""

    def __init__(
        self,
        engine: TransferEngine,
        containers: tuple[LocalContainer, ...],
        device: torch.device | None = None,
    ) -> None:
        self.offsets: dict[int, int] = {}
        end = 0
        for c in containers:
            self.offsets[c.index] = end
            end += -(-c.nbytes // _ALIGN) * _ALIGN
        super().__init__(engine, end, device)
        self._lent: dict[str, list[_Loan]] = {}

    def lend(self, container: LocalContainer) -> torch.Tensor:
        """A container as a tensor for users. :meth:`lent` lists it as long as the tensor, a view
        or an array refers to its memory. Listed memory is not overwritten (RS-1)."""
        import torch

        start = self.offsets[container.index]
        array = self._memory[start : start + container.nbytes]
        if self._device is None:
            flat = torch.from_numpy(array)
        else:
            array = _LentOnGpu(array)
            flat = torch.as_tensor(array, dtype=torch.uint8, device=self._device)
        loan = _Loan(weakref.ref(array), time.monotonic(), _caller())
        self._lent[container.name] = [*self._loans(container.name), loan]
        return _shaped(flat, container)

    def lent(self) -> dict[str, float]:
        """Containers that users still refer to, and for how many seconds."""
        now = time.monotonic()
        self._lent = {name: loans for name in self._lent if (loans := self._loans(name))}
        return {name: now - loans[0].since for name, loans in self._lent.items()}

    def describe_lent(self, version: int) -> tuple[str, ...]:
        """What :meth:`lent` lists, for errors."""
        lent = self.lent()
        if not lent:
            return ()
        few = ", ".join(f"`{name}`" for name in list(lent)[:3])
        more = f" and {len(lent) - 3} more" if len(lent) > 3 else ""
        return (
            f"tensors of version {version}, taken up to {max(lent.values()):.1f} s ago, are "
            f"still referred to: {few}{more}",
        )

    def is_lent_to_caller(self) -> bool:
        """Whether a tensor that the calling thread or task was lent is still referred to."""
        caller = _caller()
        return any(loan.caller == caller for name in self._lent for loan in self._loans(name))

    def _loans(self, name: str) -> list[_Loan]:
        """Those of a container that are still referred to, the oldest first."""
        return [loan for loan in self._lent.get(name, ()) if loan.array() is not None]

    def views(self, containers: tuple[LocalContainer, ...]) -> dict[str, torch.Tensor]:
        """All containers as tensors. Commits don't wait for these, so they stay in the package."""
        import torch

        device = self._device or torch.device("cpu")
        flat = torch.as_tensor(self._memory, dtype=torch.uint8, device=device)
        at = self.offsets
        return {c.name: _shaped(flat[at[c.index] : at[c.index] + c.nbytes], c) for c in containers}


def _shaped(flat: torch.Tensor, container: LocalContainer) -> torch.Tensor:
    import torch

    part = flat.view(getattr(torch, container.dtype))
    steps = tuple(stride // part.element_size() for stride in container.strides)
    return part.as_strided(container.shape, steps)
