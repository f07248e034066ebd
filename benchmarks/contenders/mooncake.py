"""Mooncake's TransferEngine over TCP.

Its wheel has no call that tells the target, so the clock stops when the sender's blocking call
returns; for latency the target watches the bytes themselves.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from benchmarks.harness import ends
from benchmarks.harness.cases import Case
from benchmarks.harness.data import step
from benchmarks.harness.pair import PairContender

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


class End(ends.End):
    notifies = False

    def open(self) -> bytes:
        self._engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
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
        words = self.memory.data.cast("Q")
        # The ping goes to word 0; the answer comes to word 8, away from it.
        self._out, self._in = (words[0:1], words[8:9]) if self.sends else (words[8:9], words[0:1])

    def operation(self, case: Case, number: int) -> Any:
        """Batches of addresses here, addresses there and lengths; a token for latency."""
        if case.operation == "latency":
            return number + 1
        here, there = (pages * case.bytes for pages in step(case, number))
        columns = here + self.memory.ctypes.data, there + self._far, np.full_like(here, case.bytes)
        parts = range(0, len(here), _MOST_IN_A_BATCH)
        return [[c[at : at + _MOST_IN_A_BATCH].tolist() for c in columns] for at in parts]

    def move(self, operation: Any) -> None:
        if isinstance(operation, int):
            self._out[0] = operation
            at = 0 if self.sends else 64
            operation = [[[self.memory.ctypes.data + at], [self._far + at], [8]]]
        for here, there, lengths in operation:
            if len(here) == 1:
                code = self._engine.transfer_sync_write(self._peer, here[0], there[0], lengths[0])
            else:
                code = self._engine.batch_transfer_sync_write(self._peer, here, there, lengths)
            if code != 0:
                raise RuntimeError(f"a Mooncake write of {len(here)} pages returned {code}")

    def arrive(self, operations: Sequence[Any]) -> None:
        if isinstance(operations[0], int):
            ends.spin(lambda: self._in[0] == operations[0], "a Mooncake write")
