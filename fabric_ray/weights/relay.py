"""How rollouts that hold the same pass a version on to each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from fabric_ray._native import Batch, CounterRef, Region, RegionDescriptor, Transfer
from fabric_ray.engine import TransferEngine
from fabric_ray.errors import FabricError, WeightSyncError
from fabric_ray.plan import LocalContainer
from fabric_ray.weights.report import Arm
from fabric_ray.weights.stripes import containers_of


class Copying:
    """Writes one rollout's memory to another that holds the same, stripe by stripe: one write for
    each container, so that the receiver can tell how many to expect."""

    def __init__(
        self,
        engine: TransferEngine,
        containers: Sequence[LocalContainer],
        memory: Region,
        offsets: dict[int, int],
        arm: Arm,
    ) -> None:
        self.name = arm.name
        self._engine = engine
        self._counters = [CounterRef.from_bytes(counter) for counter in arm.counters]
        target = engine.import_region(RegionDescriptor.from_bytes(arm.region))
        self._batches: list[Batch] = []
        for part in containers_of(containers, arm.stripes, len(arm.counters)):
            batch = Batch()
            for c in part:
                ours, theirs = offsets[c.index], arm.offsets[c.index]
                batch.write(memory, target, c.nbytes, src_offset=ours, dst_offset=theirs)
            self._batches.append(batch)

    def submit(self, stripe: int, timeout: float) -> Transfer | None:
        """Starts to send a stripe; ``None`` if nothing is in it."""
        batch = self._batches[stripe]
        if not len(batch):
            return None
        return self._engine.submit(batch, imm=self._counters[stripe], timeout=timeout)

    def send(self, timeout: float) -> None:
        """Sends all that is there, and returns when it has arrived.

        Raises:
            FabricError: the other can't be reached.
        """
        stripes = range(len(self._batches))
        for transfer in [self.submit(stripe, timeout) for stripe in stripes]:
            if transfer is not None:
                transfer.wait()


class Relay:
    """Passes on what arrives, as soon as a stripe of it is complete.

    Args:
        arrivals: one for each stripe.
        children: who gets it from here.
        timeout: seconds for all of it.
    """

    def __init__(
        self, arrivals: Sequence[Transfer], children: Sequence[Copying], timeout: float
    ) -> None:
        self._arrivals = arrivals
        self._children = children
        self._deadline = time.monotonic() + timeout
        self._passed: list[Future[None]] = [Future() for _ in arrivals]
        self._lock = threading.Lock()
        self._under_way: list[tuple[Copying, Transfer]] = []
        self._failed: dict[str, str] = {}
        self._over = False
        for stripe, arrival in enumerate(arrivals):
            arrival.add_done_callback(partial(self._pass_on, stripe))

    def wait(self) -> None:
        """Returns when all has come and gone.

        Raises:
            WeightSyncError: somebody did not get it, by name.
            FabricError: not all of it came.
        """
        for arrival, passed in zip(self._arrivals, self._passed, strict=True):
            arrival.wait()
            passed.result()
        for child, transfer in self._under_way:
            try:
                transfer.wait()
            except FabricError as error:
                self._failed.setdefault(child.name, str(error))
        if self._failed:
            causes = "; ".join(f"{who}: {cause}" for who, cause in self._failed.items())
            raise WeightSyncError(f"it could not be passed on to {causes}", failed=self._failed)

    def cancel(self) -> None:
        """Passes nothing on any more. What is under way may still be read for a moment; the memory
        that it goes to has another key before anybody uses it again."""
        with self._lock:
            self._over = True
            for _, transfer in self._under_way:
                transfer.cancel()
        for arrival in self._arrivals:
            arrival.cancel()

    def _pass_on(self, stripe: int, arrival: Transfer) -> None:
        try:
            if arrival.exception() is None:
                for child in self._children:
                    self._submit(child, stripe)
        finally:
            self._passed[stripe].set_result(None)

    def _submit(self, child: Copying, stripe: int) -> None:
        with self._lock:
            if self._over or child.name in self._failed:
                return
            left = max(1e-3, self._deadline - time.monotonic())
            try:
                transfer = child.submit(stripe, left)
            except FabricError as error:
                self._failed[child.name] = str(error)
                return
            if transfer is not None:
                self._under_way.append((child, transfer))
