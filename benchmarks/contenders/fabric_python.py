"""The engine from Python: writes that are waited for, and every way of noticing them."""

from __future__ import annotations

import asyncio
import itertools
import queue
import time
from collections.abc import Callable

import msgspec

from benchmarks.contenders.fabric import BATCH
from benchmarks.harness.cases import Case
from benchmarks.harness.data import ordinary_memory, step
from benchmarks.harness.roles import PATIENCE, Role, SenderRole, Stamps, TargetRole
from fabric_ray import (
    Batch,
    Counter,
    CounterRef,
    Region,
    RegionDescriptor,
    RemoteRegion,
    Transfer,
    TransferEngine,
    pages,
)

_REST_S = 1e-3


class _End(Role):
    """An engine with one region and one counter; both ends can write to the other."""

    _engine: TransferEngine | None = None
    _laid: tuple[str, str, int] = ("", "", 0)

    def prepare(self, case: Case) -> bytes:
        wanted = (case.link, case.memory, case.region)
        if self._engine is None or self._laid[0] != case.link:
            self.close()
            self._engine = TransferEngine(transport=case.link, copy_threads=1)
            self._laid = ("", "", 0)
        self.engine = engine = self._engine
        if self._laid != wanted:
            ordinary = case.memory == "ordinary"
            self.region: Region = (
                engine.register(ordinary_memory(case.region))
                if ordinary
                else engine.alloc(case.region)
            )
            self.memory = self.region.numpy()
            self._laid = wanted
        self.counter: Counter = engine.counter()
        self.seen = 0
        return msgspec.msgpack.encode(
            (self.region.descriptor().to_bytes(), self.counter.ref.to_bytes())
        )

    def bind(self, case: Case, description: bytes) -> None:
        region, counter = msgspec.msgpack.decode(description, type=tuple[bytes, bytes])
        self.remote: RemoteRegion = self.engine.import_region(RegionDescriptor.from_bytes(region))
        self.imm: CounterRef = CounterRef.from_bytes(counter)

    def write(self, case: Case, at: int = 0) -> Transfer:
        return self.engine.write(
            self.region, self.remote, case.bytes, src_offset=at, dst_offset=at, imm=self.imm
        )

    def poll_for(self, count: int) -> None:
        """Poll until `count` more writes have been counted, for half a minute or so."""
        self.seen += count
        poll, wanted = self.counter.poll, self.seen
        for _ in itertools.repeat(None, 1 << 28):
            if poll() >= wanted:
                return
        raise TimeoutError(f"{wanted - poll()} of {count} writes did not arrive")

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


class Sender(_End, SenderRole):
    _touched: Region | None = None

    def bind(self, case: Case, description: bytes) -> None:
        """Write the whole of a new region once, as a long-lived peer will have: what maps lazily
        is mapped. The target's memory is laid out anew after that."""
        super().bind(case, description)
        if self._touched is not self.region:
            self.engine.write(self.region, self.remote).wait()
            self._touched = self.region

    def run(self, case: Case, operations: int, samples: int) -> Stamps:
        if case.operation != "latency" or case.waiter == "poll-python":
            return super().run(case, operations, samples)
        # The target answers each; only a parked one is left alone before the next.
        starts: list[int] = []
        self.sync.wait()
        for _ in range(operations * samples):
            if case.waiter == "parked":
                time.sleep(_REST_S)
            starts.append(time.monotonic_ns())
            self.write(case)
            self.poll_for(1)
        self.sync.signal()
        return Stamps(starts=starts)

    def sample(self, case: Case, operations: int) -> Callable[[], None]:
        numbers = range(self.moved, self.moved + operations)

        def echo() -> None:
            for _ in range(operations):
                self.write(case)
                self.poll_for(1)

        def stream() -> None:
            write, region, remote, imm = self.engine.write, self.region, self.remote, self.imm
            for _ in itertools.repeat(None, operations - 1):
                write(region, remote, case.bytes, imm=imm)
            self.write(case).wait()

        def single() -> None:
            for at in places:
                self.write(case, at).wait()

        def paged() -> None:
            for sources, targets in calls:
                self.engine.write_pages(
                    case.bytes, self.region, sources, self.remote, targets, imm=self.imm
                ).wait()

        if case.operation == "write":
            places = [int(step(case, number).sources[0]) * case.bytes for number in numbers]
            return single
        if case.operation != "pages":
            return echo if case.operation == "latency" else stream
        calls = [
            (
                pages(range(int(sources[0]), int(sources[-1]) + 1), stride=case.bytes),
                pages(targets, stride=case.bytes),
            )
            for sources, targets in (step(case, number) for number in numbers)
        ]
        return paged


class BatchSender(Sender):
    def sample(self, case: Case, operations: int) -> Callable[[], None]:
        whole, rest = divmod(operations, BATCH)
        batches = [self._batch(case, BATCH)] * whole + [self._batch(case, rest)] * bool(rest)

        def submit() -> None:
            [self.engine.submit(batch) for batch in batches][-1].wait()

        return submit

    def _batch(self, case: Case, count: int) -> Batch:
        batch = Batch()
        for _ in range(count):
            batch.write(self.region, self.remote, case.bytes, imm=self.imm)
        return batch


class Target(_End, TargetRole):
    def run(self, case: Case, operations: int, samples: int) -> Stamps:
        if case.waiter in (None, "poll-python"):
            return super().run(case, operations, samples)
        count = operations * samples
        if case.waiter == "callback-python":
            ends = self._call_back(case, count)
        else:
            ends = asyncio.run(self._await(case, count))
        self.sync.wait()
        return Stamps(ends=ends)

    def sample(self, case: Case, operations: int) -> Callable[[], None]:
        def echo() -> None:
            for _ in range(operations):
                self.poll_for(1)
                self.write(case)

        count = case.pages * operations if case.operation == "pages" else operations
        return echo if case.operation == "latency" else lambda: self.poll_for(count)

    def _call_back(self, case: Case, count: int) -> list[int]:
        """Each callback arms the next before it answers, so that no write comes early."""
        ends: queue.SimpleQueue[int] = queue.SimpleQueue()
        left = itertools.count(count - 1, -1)

        def arrived(transfer: Transfer) -> None:
            now = time.monotonic_ns()
            transfer.result()
            if next(left) > 0:
                self.counter.expect().add_done_callback(arrived)
            self.write(case)
            ends.put(now)

        self.counter.expect().add_done_callback(arrived)
        self.sync.signal()
        return [ends.get(timeout=PATIENCE) for _ in range(count)]

    async def _await(self, case: Case, count: int) -> list[int]:
        """Into asyncio, or the thread that waits (`parked`)."""
        ends: list[int] = []
        self.sync.signal()
        for _ in range(count):
            if case.waiter == "asyncio":
                await self.counter.expect()
            else:
                self.counter.wait()
            ends.append(time.monotonic_ns())
            self.write(case)
        return ends
