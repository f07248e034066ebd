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
from benchmarks.harness.roles import PATIENCE, Role, SenderRole, Stamps, Sync, TargetRole
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

    def __init__(self, sync: Sync) -> None:
        super().__init__(sync)
        self._engine: TransferEngine | None = None
        self._laid: tuple[str, str, int] | None = None

    def prepare(self, case: Case) -> bytes:
        wanted = (case.link, case.memory, case.region)
        if self._engine is None or self._laid is None or self._laid[0] != case.link:
            self.close()
            self._engine = TransferEngine(transport=case.link, copy_threads=1)
            self._laid = None
        if self._laid != wanted:
            self.region = self._allocate(self._engine, case)
            self.memory = self.region.numpy()
            self._laid = wanted
        self.engine = self._engine
        self.counter: Counter = self.engine.counter()
        self.seen = 0
        return msgspec.msgpack.encode(
            (self.region.descriptor().to_bytes(), self.counter.ref.to_bytes())
        )

    def _allocate(self, engine: TransferEngine, case: Case) -> Region:
        if case.memory == "ordinary":
            return engine.register(ordinary_memory(case.region))
        return engine.alloc(case.region)

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
        return self._one_by_one(case, operations * samples)

    def sample(self, case: Case, operations: int) -> Callable[[], None]:
        if case.operation == "latency":
            return lambda: self._echo(case, operations)
        if case.operation == "rate":
            return lambda: self._stream(case, operations)
        steps = [step(case, self.moved + number) for number in range(operations)]
        if case.operation == "write":
            places = [int(one.sources[0]) * case.bytes for one in steps]
            return lambda: self._writes(case, places)
        calls = [
            (
                pages(range(int(sources[0]), int(sources[-1]) + 1), stride=case.bytes),
                pages(targets, stride=case.bytes),
            )
            for sources, targets in steps
        ]

        def paged() -> None:
            for sources, targets in calls:
                self.engine.write_pages(
                    case.bytes, self.region, sources, self.remote, targets, imm=self.imm
                ).wait()

        return paged

    def _writes(self, case: Case, places: list[int]) -> None:
        for at in places:
            self.write(case, at).wait()

    def _stream(self, case: Case, operations: int) -> None:
        write, region, remote, imm = self.engine.write, self.region, self.remote, self.imm
        for _ in itertools.repeat(None, operations - 1):
            write(region, remote, case.bytes, imm=imm)
        self.write(case).wait()

    def _echo(self, case: Case, operations: int) -> None:
        for _ in range(operations):
            self.write(case)
            self.poll_for(1)

    def _one_by_one(self, case: Case, count: int) -> Stamps:
        """The target answers each; only a parked one is left alone before the next."""
        starts: list[int] = []
        self.sync.await_ready()
        for _ in range(count):
            if case.waiter == "parked":
                time.sleep(_REST_S)
            starts.append(time.monotonic_ns())
            self.write(case)
            self.poll_for(1)
        self.sync.finished()
        return Stamps(starts=starts)


class BatchSender(Sender):
    def sample(self, case: Case, operations: int) -> Callable[[], None]:
        whole, rest = divmod(operations, BATCH)
        many, few = self._batch(case, BATCH), self._batch(case, rest)

        def submit() -> None:
            last = [self.engine.submit(many) for _ in range(whole)][-1:]
            if rest:
                last = [self.engine.submit(few)]
            last[0].wait()

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
        elif case.waiter == "asyncio":
            ends = asyncio.run(self._await(case, count))
        else:
            ends = self._block(case, count)
        self.sync.await_finished()
        return Stamps(ends=ends)

    def sample(self, case: Case, operations: int) -> Callable[[], None]:
        if case.operation == "latency":
            return lambda: self._echo(case, operations)
        count = case.pages * operations if case.operation == "pages" else operations
        return lambda: self.poll_for(count)

    def _echo(self, case: Case, operations: int) -> None:
        for _ in range(operations):
            self.poll_for(1)
            self.write(case)

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
        self.sync.ready()
        return [ends.get(timeout=PATIENCE) for _ in range(count)]

    async def _await(self, case: Case, count: int) -> list[int]:
        ends: list[int] = []
        self.sync.ready()
        for _ in range(count):
            await self.counter.expect()
            ends.append(time.monotonic_ns())
            self.write(case)
        return ends

    def _block(self, case: Case, count: int) -> list[int]:
        ends: list[int] = []
        self.sync.ready()
        for _ in range(count):
            self.counter.wait()
            ends.append(time.monotonic_ns())
            self.write(case)
        return ends
