"""The engine from Python: writes that are waited for, and every kind of notice."""

from __future__ import annotations

import asyncio
import itertools
import queue
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.contenders.fabric import BATCH
from benchmarks.harness import ends
from benchmarks.harness.cases import Case
from benchmarks.harness.data import ordinary_memory, step
from fabric_ray import (
    Batch,
    CounterRef,
    Region,
    RegionDescriptor,
    Transfer,
    TransferEngine,
    pages,
)

_REST_S = 1e-3


class End(ends.End):
    """An engine with one region and one counter; both ends can write to the other."""

    _engine: TransferEngine | None = None
    _laid: tuple[str, str, int] = ("", "", 0)
    _touched: Region | None = None

    def prepare(self, case: Case) -> bytes:
        wanted = (case.link, case.memory, case.region)
        if self._engine is None or self._laid[0] != case.link:
            self.close()
            self._engine = TransferEngine(transport=case.link, copy_threads=1)
            self._laid = ("", "", 0)
        self.engine = engine = self._engine
        if self._laid != wanted:
            self.region: Region = (
                engine.register(ordinary_memory(case.region))
                if case.memory == "ordinary"
                else engine.alloc(case.region)
            )
            self.memory = self.region.numpy()
            self._laid = wanted
        self._case, self._counter, self._seen = case, engine.counter(), 0
        return msgspec.msgpack.encode(
            (self.region.descriptor().to_bytes(), self._counter.ref.to_bytes())
        )

    def bind(self, case: Case, description: bytes) -> None:
        """The sender writes the whole of a new region once, as a long-lived peer will have: what
        maps lazily is mapped. The target's memory is laid out anew after that."""
        region, counter = msgspec.msgpack.decode(description, type=tuple[bytes, bytes])
        self.remote = self.engine.import_region(RegionDescriptor.from_bytes(region))
        self.imm = CounterRef.from_bytes(counter)
        if self.sends and self._touched is not self.region:
            self.engine.write(self.region, self.remote).wait()
            self._touched = self.region

    def operation(self, case: Case, number: int) -> Any:
        """Where a write begins; pages here and there."""
        if not self.sends or case.operation in ("latency", "rate"):
            return 0
        sources, targets = step(case, number)
        if case.operation == "write":
            return int(sources[0]) * case.bytes
        here = range(int(sources[0]), int(sources[-1]) + 1)
        return pages(here, stride=case.bytes), pages(targets, stride=case.bytes)

    def move(self, operation: Any) -> None:
        if isinstance(operation, int):
            self.write(operation).wait()
        else:
            sources, targets = operation
            nbytes, near, far = self._case.bytes, self.region, self.remote
            self.engine.write_pages(nbytes, near, sources, far, targets, imm=self.imm).wait()

    def write(self, at: int = 0) -> Transfer:
        return self.engine.write(
            self.region, self.remote, self._case.bytes, src_offset=at, dst_offset=at, imm=self.imm
        )

    def stream(self, operations: Sequence[Any]) -> None:
        write, region, remote, imm = self.engine.write, self.region, self.remote, self.imm
        nbytes = self._case.bytes
        for _ in itertools.repeat(None, len(operations) - 1):
            write(region, remote, nbytes, imm=imm)
        self.write().wait()

    def arrive(self, operations: Sequence[Any]) -> None:
        self.poll_for(self._case.pages * len(operations))

    def poll_for(self, count: int) -> None:
        """Poll until `count` more writes have been counted, for half a minute or so."""
        self._seen += count
        poll, wanted = self._counter.poll, self._seen
        for _ in itertools.repeat(None, 1 << 28):
            if poll() >= wanted:
                return
        raise TimeoutError(f"{wanted - poll()} of {count} writes did not arrive")

    def sample(self, case: Case, operations: Sequence[Any]) -> None:
        if case.operation != "latency":
            super().sample(case, operations)
            return
        # A write is not waited for: its answer says that it has come.
        for _ in operations:
            if self.sends:
                self.write()
            self.poll_for(1)
            if not self.sends:
                self.write()

    def run(self, case: Case, operations: int, samples: int) -> ends.Stamps:
        if case.waiter in (None, "poll-python"):
            return super().run(case, operations, samples)
        count = operations * samples
        if self.sends:
            # The target answers each; only a parked one is left alone before the next.
            starts: list[int] = []
            self.sync.wait()
            for _ in range(count):
                if case.waiter == "parked":
                    time.sleep(_REST_S)
                starts.append(time.monotonic_ns())
                self.write()
                self.poll_for(1)
            self.sync.signal()
            return ends.Stamps(starts=starts)
        if case.waiter == "callback-python":
            arrived = self._call_back(count)
        else:
            arrived = asyncio.run(self._await(count, parked=case.waiter == "parked"))
        self.sync.wait()
        return ends.Stamps(ends=arrived)

    def _call_back(self, count: int) -> list[int]:
        """Each callback arms the next before it answers, so that no write comes early."""
        found: queue.SimpleQueue[int] = queue.SimpleQueue()
        left = itertools.count(count - 1, -1)

        def arrived(transfer: Transfer) -> None:
            now = time.monotonic_ns()
            transfer.result()
            if next(left) > 0:
                self._counter.expect().add_done_callback(arrived)
            self.write()
            found.put(now)

        self._counter.expect().add_done_callback(arrived)
        self.sync.signal()
        return [found.get(timeout=ends.PATIENCE) for _ in range(count)]

    async def _await(self, count: int, *, parked: bool) -> list[int]:
        """Into asyncio, or into a thread that waits and does nothing else."""
        found: list[int] = []
        self.sync.signal()
        for _ in range(count):
            if parked:
                self._counter.wait()
            else:
                await self._counter.expect()
            found.append(time.monotonic_ns())
            self.write()
        return found

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


class BatchEnd(End):
    """Small writes, many in a submit."""

    def ready(self, case: Case, operations: int) -> Sequence[Any]:
        if not self.sends:
            return range(operations)
        whole, rest = divmod(operations, BATCH)
        return [self._batch(case, BATCH)] * whole + [self._batch(case, rest)] * bool(rest)

    def stream(self, operations: Sequence[Any]) -> None:
        [self.engine.submit(batch) for batch in operations][-1].wait()

    def _batch(self, case: Case, count: int) -> Batch:
        batch = Batch()
        for _ in range(count):
            batch.write(self.region, self.remote, case.bytes, imm=self.imm)
        return batch
