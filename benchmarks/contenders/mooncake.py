"""Mooncake's TransferEngine over TCP.

Its wheel has no call that tells the target, so the clock stops when the sender's blocking call
returns; for latency the target watches the bytes themselves.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec
import numpy as np

from benchmarks.harness.cases import Case
from benchmarks.harness.data import step
from benchmarks.harness.pair import PairContender
from benchmarks.harness.roles import Role, SenderRole, Sync, TargetRole, spin

_MOST_IN_A_BATCH = 1024
"""About 2000 requests in one batch are refused, and the engine is of no use afterwards."""


class Mooncake(PairContender):
    name = "mooncake tcp"
    obtain = "pip install -e '.[bench]', apt-get install libibverbs1"
    env: ClassVar[Mapping[str, str]] = {"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}

    def available(self) -> str | None:
        if importlib.util.find_spec("mooncake") is None:
            return "mooncake is not installed"
        try:
            importlib.import_module("mooncake.engine")
        except ImportError as error:
            return f"mooncake.engine can't be loaded: {error}"
        return None

    def supports(self, case: Case) -> bool:
        if case.link != "tcp":
            return False
        if case.operation == "latency":
            return case.waiter == "poll-python"
        if case.operation == "rate":
            return case.language == "python"
        return case.operation in ("write", "pages")

    def describe(self, case: Case) -> str:
        if case.operation == "latency":
            return "target polls the bytes"
        if case.operation == "pages" and case.pages > _MOST_IN_A_BATCH:
            return f"until the sender's completion; batches of {_MOST_IN_A_BATCH}"
        return "until the sender's completion"


class _End(Role):
    def __init__(self, sync: Sync) -> None:
        super().__init__(sync)
        self._engine: Any = importlib.import_module("mooncake.engine").TransferEngine()

    def open(self) -> bytes:
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("Mooncake's engine did not initialize")
        return f"127.0.0.1:{self._engine.get_rpc_port()}".encode()

    def connect(self, peer: bytes) -> None:
        self._peer = peer.decode()

    def prepare(self, case: Case) -> bytes:
        new = self.ordinary(case, lambda: self._engine.unregister_memory(self.memory.ctypes.data))
        if new and self._engine.register_memory(self.memory.ctypes.data, self.memory.size) != 0:
            raise RuntimeError("Mooncake did not register the memory")
        if case.operation == "latency":
            # Tokens of an earlier run must not be taken for this one's.
            self.memory.fill(0)
        return msgspec.msgpack.encode(self.memory.ctypes.data)

    def bind(self, case: Case, description: bytes) -> None:
        self._far = msgspec.msgpack.decode(description, type=int)

    def write(self, offset: int, count: int) -> None:
        here = self.memory.ctypes.data + offset
        if self._engine.transfer_sync_write(self._peer, here, self._far + offset, count) != 0:
            raise RuntimeError("a Mooncake write failed")

    def watch(self, word: memoryview, value: int) -> None:
        spin(lambda: word[0] == value, "a Mooncake write")


class Sender(_End, SenderRole):
    stops_clock = True

    def sample(self, case: Case, operations: int) -> Callable[[], None]:
        numbers = range(self.moved, self.moved + operations)
        if case.operation == "latency":
            return lambda: self._ping(numbers)
        batches = [
            batch
            for number in numbers
            for batch in self._batches(case, *map(np.ndarray.tolist, step(case, number)))
        ]
        return lambda: self._move(batches)

    def _move(self, batches: list[tuple[list[int], list[int], list[int]]]) -> None:
        for here, there, lengths in batches:
            if len(here) == 1:
                code = self._engine.transfer_sync_write(self._peer, here[0], there[0], lengths[0])
            else:
                code = self._engine.batch_transfer_sync_write(self._peer, here, there, lengths)
            if code != 0:
                raise RuntimeError(f"a Mooncake write of {len(here)} pages returned {code}")

    def _batches(
        self, case: Case, sources: list[int], targets: list[int]
    ) -> list[tuple[list[int], list[int], list[int]]]:
        near, count = self.memory.ctypes.data, case.bytes
        here = [near + source * count for source in sources]
        there = [self._far + target * count for target in targets]
        parts = [slice(at, at + _MOST_IN_A_BATCH) for at in range(0, len(here), _MOST_IN_A_BATCH)]
        return [(here[part], there[part], [count] * len(here[part])) for part in parts]

    def _ping(self, numbers: range) -> None:
        """The ping goes to word 0; the answer comes to word 8, away from it."""
        words = self.memory.data.cast("Q")
        for number in numbers:
            words[0] = number + 1
            self.write(0, 8)
            self.watch(words[8:9], number + 1)


class Target(_End, TargetRole):
    notified = False

    def sample(self, case: Case, operations: int) -> Callable[[], None]:
        numbers = range(self.moved, self.moved + operations)
        return lambda: self._answer(numbers) if case.operation == "latency" else None

    def _answer(self, numbers: range) -> None:
        words = self.memory.data.cast("Q")
        for number in numbers:
            self.watch(words[0:1], number + 1)
            words[8] = number + 1
            self.write(64, 8)
