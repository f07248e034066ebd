"""Reads of offered tensors: many at a time, into new tensors or given ones."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias
from weakref import WeakSet

import torch

from fabric_ray.engine import Batch, Region, RegionDescriptor, Transfer, TransferEngine
from fabric_ray.engine.memory import is_free_here
from fabric_ray.errors import Cancelled, FabricError, InvalidArgument
from fabric_ray.runtime.rdt.offer import Offer
from fabric_ray.runtime.rdt.pool import Pool
from fabric_ray.runtime.rdt.sources import Sources
from fabric_ray.tensors import wait_for_kernels

Kinds: TypeAlias = Sequence[tuple[Sequence[int], torch.dtype]]
"""Shape and dtype of each tensor."""

_QUIET_S = 2.0


class Fetch:
    """The tensors of one object, on their way."""

    def __init__(
        self,
        engine: TransferEngine,
        obj_id: str,
        offer: Offer,
        tensors: list[torch.Tensor],
        transfer: Transfer | None,
    ) -> None:
        self._engine = engine
        self.obj_id = obj_id
        self.offer = offer
        self.tensors = tensors
        self.ended = False
        """Whether no caller waits for the fetch any more."""
        self._transfer = transfer

    def wait(self, timeout: float | None) -> list[torch.Tensor]:
        """Waits for all bytes; returns the tensors (RS-1).

        Args:
            timeout: seconds; afterwards the fetch continues.

        Raises:
            TimeoutError: bytes are missing after ``timeout``.
            FabricError: the fetch failed. The message says if the buffers can't be reused.
        """
        if self._transfer is None:
            return self.tensors
        try:
            self._transfer.wait(timeout)
        except FabricError as error:
            if not self.wait_settled():
                error.args = (
                    f"{error}; bytes may still land in the buffers: don't use them again",
                )
            raise
        return self.tensors

    def cancel(self) -> None:
        """Cancels the fetch for its waiters, unless it is complete."""
        if self._transfer is not None:
            self._transfer.cancel()

    def wait_settled(self) -> bool:
        """Waits a moment for :attr:`settled`, and returns it."""
        if self._transfer is not None:
            self._transfer.wait_quiesced(_QUIET_S)
        return self.settled

    @property
    def settled(self) -> bool:
        """Whether no byte of it can land any more (MR-1)."""
        return self._transfer is None or is_free_here(self._engine, self._transfer.quiesced)


class Fetches:
    """Starts fetches, and ends them by object. May be called from any thread.

    Args:
        engine: reads.
        sources: knows what memory is registered for good.
        pool: memory for tensors without a given buffer.
        timeout: seconds that a fetch may take.
    """

    def __init__(
        self, engine: TransferEngine, sources: Sources, pool: Pool, *, timeout: float
    ) -> None:
        self._engine = engine
        self._sources = sources
        self._pool = pool
        self._timeout = timeout
        self._in_flight: WeakSet[Fetch] = WeakSet()
        # A fetch may end in the middle of anything, on any thread: it is only left here.
        self._unsettled: deque[Fetch] = deque()
        self._aborted: dict[str, float] = {}
        self._lock = threading.Lock()

    def start(
        self,
        obj_id: str,
        offer: Offer,
        kinds: Kinds,
        into: Sequence[torch.Tensor] | None = None,
    ) -> Fetch:
        """Begins to read an object's tensors and returns at once.

        Args:
            obj_id: what :meth:`abort` calls it.
            offer: where they are.
            kinds: what they are.
            into: a tensor for each, of its shape and dtype and contiguous, on any device; without
                them new ones, on the kind of device that the source has.

        Raises:
            InvalidArgument: a given tensor doesn't suit.
            DecodeError: the offer and `kinds` contradict each other.
            Cancelled: it was aborted before, or meanwhile.
            FabricError: the read can't begin.
        """
        offer.check(kinds)
        if into is not None:
            _check_given(into, kinds)
        with self._lock:
            self._forget()
            if self._aborted.pop(obj_id, 0.0) > time.monotonic():
                raise Cancelled("the fetch was aborted before it began")
        tensors: list[torch.Tensor] = []
        batch = Batch()
        remote = [
            self._engine.import_region(RegionDescriptor.from_bytes(data)) for data in offer.regions
        ]
        for number, (extent, (shape, dtype)) in enumerate(zip(offer.extents, kinds, strict=True)):
            given = None if into is None else into[number]
            tensor, region = self._place(shape, dtype, cuda=extent.cuda, given=given)
            tensors.append(tensor)
            if region is not None:
                batch.read(remote[extent.region], region, extent.nbytes, src_offset=extent.offset)
        wait_for_kernels(into or ())
        _wait_for_stream(tensors)
        transfer = self._engine.submit(batch, timeout=self._timeout) if len(batch) else None
        fetch = Fetch(self._engine, obj_id, offer, tensors, transfer)
        with self._lock:
            aborted = self._aborted.pop(obj_id, 0.0) > time.monotonic()
            if not aborted:
                self._in_flight.add(fetch)
        if aborted:
            self.end(fetch)
            raise Cancelled("the fetch was aborted while it began")
        return fetch

    def end(self, fetch: Fetch) -> None:
        """Ends a fetch. Its tensors are kept until no byte can land in them (MR-1).

        Takes no lock: the garbage collector may call it while this thread holds the lock.
        """
        if fetch.ended:
            return
        fetch.ended = True
        fetch.cancel()
        if not fetch.settled:
            self._unsettled.append(fetch)

    def abort(self, obj_id: str) -> None:
        """Ends the fetches of an object, or the next one if none has begun."""
        with self._lock:
            found = [fetch for fetch in self._going_on() if fetch.obj_id == obj_id]
            if not found:
                self._aborted[obj_id] = time.monotonic() + self._timeout
        for fetch in found:
            fetch.cancel()

    def __len__(self) -> int:
        """Number of fetches in flight, or with memory that is not quiesced."""
        with self._lock:
            self._forget()
            return len(self._going_on()) + len(self._unsettled)

    def _going_on(self) -> list[Fetch]:
        return [fetch for fetch in self._in_flight if not fetch.ended]

    def _forget(self) -> None:
        for _ in range(len(self._unsettled)):
            fetch = self._unsettled.popleft()
            if not fetch.settled:
                self._unsettled.append(fetch)
        now = time.monotonic()
        self._aborted = {obj_id: end for obj_id, end in self._aborted.items() if end > now}

    def _place(
        self, shape: Sequence[int], dtype: torch.dtype, *, cuda: bool, given: torch.Tensor | None
    ) -> tuple[torch.Tensor, Region | None]:
        """Where a tensor comes, and the region that is read into; none if it has no bytes."""
        tensor = given
        if tensor is None:
            if not cuda and (lent := self._pool.lend(shape, dtype)) is not None:
                return lent
            tensor = torch.empty(tuple(shape), dtype=dtype, device="cuda" if cuda else "cpu")
        if not tensor.numel():
            return tensor, None
        # Memory that is registered for good isn't registered again.
        pinned = self._sources.is_pinned(tensor)
        return tensor, self._engine.register(tensor.detach(), segment=pinned)


def _check_given(given: Sequence[torch.Tensor], kinds: Kinds) -> None:
    if len(given) != len(kinds):
        raise InvalidArgument(f"{len(kinds)} tensors come and {len(given)} buffers are there")
    for number, (tensor, (shape, dtype)) in enumerate(zip(given, kinds, strict=True)):
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
            raise InvalidArgument(
                f"buffer {number} has shape {tuple(tensor.shape)} and {tensor.dtype}, and a tensor "
                f"of shape {tuple(shape)} and {dtype} comes"
            )
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise InvalidArgument(
                f"buffer {number} is not contiguous, or a lazy conjugate or negative; give one "
                "whose bytes are its values"
            )


def _wait_for_stream(tensors: Sequence[torch.Tensor]) -> None:
    """Kernels that were launched before may still use memory that the allocator hands out again,
    to the same stream."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
