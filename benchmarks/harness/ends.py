"""The two ends of a pair, as a contender writes them, and how they keep in step."""

from __future__ import annotations

import importlib
import select
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from benchmarks.harness import data
from benchmarks.harness.cases import Case
from benchmarks.harness.data import Bytes

PATIENCE = 30.0
"""Seconds after which an operation that did not arrive is an error."""


class Stamps(msgspec.Struct, frozen=True, kw_only=True):
    """Monotonic nanoseconds of each sample's start and end, as far as this end saw them.

    `per_operation` is what one operation of the sample counts for: 0.5 for round trips.
    """

    starts: list[int] = []
    ends: list[int] = []
    per_operation: float = 1.0


class Sync:
    """A socket between the two ends that starts and ends each sample, outside the clock."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)

    def signal(self) -> None:
        """Target: I am watching from now on. Sender: all operations are complete on my side."""
        self._socket.send(b".")

    def wait(self, progress: Callable[[], object] | None = None) -> None:
        """Sleep until the other end has said so, or keep calling `progress`."""
        end = time.monotonic() + PATIENCE
        while not select.select([self._socket], [], [], 0 if progress else PATIENCE)[0]:
            if time.monotonic() > end:
                raise TimeoutError(f"the other end said nothing for {PATIENCE:.0f} s")
            if progress is not None:
                progress()
        if not self._socket.recv(1):
            raise ConnectionError("the other end has gone")


class End(ABC):
    """A library at one end of a pair, the sender or the target (`sends`).

    Calls come in the order of the methods; `prepare`, `bind` and `run` repeat. `prepare` and `bind`
    of both ends happen before any `run`. A subclass that answers round trips has both `move` and
    `arrive` work at either end.
    """

    memory: Bytes
    """The region that operations read from (sender) or land in (target)."""
    moved: int = 0
    """Operations since the last `prepare`; both ends count them alike."""
    notifies = True
    """False: the target is not told of what arrives, and the clock stops when `move` returns."""
    progress: Callable[[], object] | None = None
    """Called by the target until the sender has finished, where its completions need that."""
    _filled: Bytes | None = None

    def __init__(self, sync: Sync, sends: bool) -> None:
        self.sync, self.sends = sync, sends

    def open(self) -> bytes:
        """Start the library; returns what the other end needs to connect."""
        return b""

    def connect(self, peer: bytes) -> None:
        """Both ends are called at the same time."""
        del peer

    @abstractmethod
    def prepare(self, case: Case) -> bytes:
        """Have `memory` ready for `case`; returns its description."""

    def bind(self, case: Case, description: bytes) -> None:
        """Take the other end's description."""
        del case, description

    def ready(self, case: Case, operations: int) -> Sequence[Any]:
        """One sample's operations, prepared before the clock starts."""
        return [self.operation(case, self.moved + number) for number in range(operations)]

    def operation(self, case: Case, number: int) -> Any:
        """Operation `number` since `prepare`, prepared."""
        del case
        return number

    @abstractmethod
    def move(self, operation: Any) -> None:
        """Make one, until it is complete at this end."""

    def stream(self, operations: Sequence[Any]) -> None:
        """Make small ones, with as many in flight as the library likes."""
        for operation in operations:
            self.move(operation)

    @abstractmethod
    def arrive(self, operations: Sequence[Any]) -> None:
        """Wait until as many of the other end's have arrived; nothing where none is told."""

    def settle(self) -> None:
        """Let go of what `ready` made, when its clock has stopped."""
        return

    def close(self) -> None:
        """Leave in peace, as far as the library can."""
        return

    def begin(self, case: Case) -> bytes:
        """`prepare`, with the memory laid out: the pattern, or zeros at the target; returns the
        description."""
        description = self.prepare(case)
        self.moved = 0
        if not self.sends:
            self.memory.fill(0)
        elif self._filled is not self.memory:
            data.fill(self.memory)
            self._filled = self.memory
        return description

    def run(self, case: Case, operations: int, samples: int) -> Stamps:
        """Do or await `samples` samples."""
        starts: list[int] = []
        ends: list[int] = []
        for _ in range(samples):
            ready = self.ready(case, operations)
            self.moved += operations
            if self.sends:
                self.sync.wait()
            else:
                self.sync.signal()
            starts.append(time.monotonic_ns())
            self.sample(case, ready)
            ends.append(time.monotonic_ns())
            if self.sends:
                self.sync.signal()
                self.settle()
            else:
                self.settle()
                self.sync.wait(self.progress)
        if case.operation == "latency":
            # A round trip ends where it began.
            return Stamps(starts=starts, ends=ends if self.sends else [], per_operation=0.5)
        return Stamps(starts=starts, ends=ends if self.sends != self.notifies else [])

    def sample(self, case: Case, operations: Sequence[Any]) -> None:
        """One sample, while the clock runs."""
        if case.operation == "latency":
            for one in operations:
                if self.sends:
                    self.move(one)
                self.arrive([one])
                if not self.sends:
                    self.move(one)
        elif not self.sends:
            self.arrive(operations)
        elif case.operation == "rate":
            self.stream(operations)
        else:
            for one in operations:
                self.move(one)

    def check(self, case: Case, operations: int) -> str | None:
        """What is wrong with `memory` after `operations` operations since `prepare`, or None."""
        steps = [data.step(case, number) for number in range(operations)]
        return data.fault(case.bytes, steps, self.memory)

    def ordinary(self, case: Case, release: Callable[[], object] = lambda: None) -> bool:
        """Have `memory` be ordinary memory of the case's size; whether it is new. `release` is
        called before another one is given back."""
        if hasattr(self, "memory"):
            if self.memory.size == case.region:
                return False
            release()
        self.memory = data.ordinary_memory(case.region)
        return True


def make_end(kind: str, descriptor: int, sends: bool, *arguments: Any) -> End:
    """An end by its ``module:Class``, in the process that runs it."""
    module, _, name = kind.partition(":")
    made = getattr(importlib.import_module(module), name)
    end: End = made(Sync(descriptor), sends, *arguments)
    return end


def spin(ready: Callable[[], bool], what: str) -> None:
    """Poll until `ready`, for at most `PATIENCE` seconds."""
    turns = 0
    end = 0.0
    while not ready():
        turns += 1
        if turns & 1023 == 0:
            now = time.monotonic()
            end = end or now + PATIENCE
            if now > end:
                raise TimeoutError(f"{what} did not arrive within {PATIENCE:.0f} s")
