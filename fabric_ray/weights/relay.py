"""Replicas relay a version to each other while it arrives."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from fabric_ray._native import (
    Batch,
    Counter,
    CounterRef,
    Peer,
    Region,
    RegionDescriptor,
    Transfer,
)
from fabric_ray.engine import TransferEngine
from fabric_ray.errors import FabricError, WeightSyncError
from fabric_ray.plan import LocalContainer
from fabric_ray.weights.report import PushTarget
from fabric_ray.weights.stripes import containers_of


def expect_all(
    counters: Sequence[Counter], counts: Sequence[int], writers: list[Peer], timeout: float
) -> list[Transfer]:
    """What ends when each counter has its count. The loss of a writer ends it with an error."""
    return [
        counter.expect(count, writers=writers, timeout=timeout)
        for counter, count in zip(counters, counts, strict=True)
    ]


class RelayWriter:
    """Writes one rollout's memory to a replica, stripe by stripe: one write for each container, so
    that the receiver knows how many to expect."""

    def __init__(
        self,
        engine: TransferEngine,
        containers: Sequence[LocalContainer],
        memory: Region,
        offsets: dict[int, int],
        push_target: PushTarget,
    ) -> None:
        self.name = push_target.name
        self._engine = engine
        self._counters = [CounterRef.from_bytes(counter) for counter in push_target.counters]
        target = engine.import_region(RegionDescriptor.from_bytes(push_target.region))
        self._batches: list[Batch] = []
        for part in containers_of(containers, push_target.stripes, len(push_target.counters)):
            batch = Batch()
            for c in part:
                src, dst = offsets[c.index], push_target.offsets[c.index]
                batch.write(memory, target, c.nbytes, src_offset=src, dst_offset=dst)
            self._batches.append(batch)

    def submit(self, stripe: int, timeout: float) -> Transfer | None:
        """Submits a stripe; returns ``None`` if the stripe is empty."""
        batch = self._batches[stripe]
        if not len(batch):
            return None
        return self._engine.submit(batch, imm=self._counters[stripe], timeout=timeout)

    def send(self, timeout: float) -> None:
        """Sends all stripes and waits until they have arrived.

        Raises:
            FabricError: the replica can't be reached.
        """
        stripes = range(len(self._batches))
        for transfer in [self.submit(stripe, timeout) for stripe in stripes]:
            if transfer is not None:
                transfer.wait()


class Relay:
    """Relays each stripe as soon as it has arrived.

    Args:
        arrivals: one per stripe.
        children: the replicas to relay to.
        timeout: of the whole relay, in seconds.
    """

    def __init__(
        self, arrivals: Sequence[Transfer], children: Sequence[RelayWriter], timeout: float
    ) -> None:
        self._arrivals = arrivals
        self._children = children
        self._deadline = time.monotonic() + timeout
        self._relayed: list[Future[None]] = [Future() for _ in arrivals]
        self._lock = threading.Lock()
        self._in_flight: list[tuple[RelayWriter, Transfer]] = []
        self._failed: dict[str, str] = {}
        self._cancelled = False
        for stripe, arrival in enumerate(arrivals):
            arrival.add_done_callback(partial(self._on_arrival, stripe))

    def wait(self) -> None:
        """Waits until all stripes have arrived here and at the children.

        Raises:
            WeightSyncError: a child could not be reached; the error names it.
            FabricError: a stripe did not arrive here.
        """
        for arrival, relayed in zip(self._arrivals, self._relayed, strict=True):
            arrival.wait()
            relayed.result()
        for child, transfer in self._in_flight:
            try:
                transfer.wait()
            except FabricError as error:
                self._failed.setdefault(child.name, str(error))
        if self._failed:
            causes = "; ".join(f"{label}: {cause}" for label, cause in self._failed.items())
            raise WeightSyncError(f"relay failed: {causes}", failed=self._failed)

    def cancel(self) -> None:
        """Stops the relay. Transfers in flight may still read this memory for a moment. The memory
        of the children is used again only under a new key."""
        with self._lock:
            self._cancelled = True
            for _, transfer in self._in_flight:
                transfer.cancel()
        for arrival in self._arrivals:
            arrival.cancel()

    def _on_arrival(self, stripe: int, arrival: Transfer) -> None:
        try:
            if arrival.exception() is None:
                for child in self._children:
                    self._submit(child, stripe)
        finally:
            self._relayed[stripe].set_result(None)

    def _submit(self, child: RelayWriter, stripe: int) -> None:
        with self._lock:
            if self._cancelled or child.name in self._failed:
                return
            left = max(1e-3, self._deadline - time.monotonic())
            try:
                transfer = child.submit(stripe, left)
            except FabricError as error:
                self._failed[child.name] = str(error)
                return
            if transfer is not None:
                self._in_flight.append((child, transfer))
