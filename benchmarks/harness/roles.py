"""The two ends of a pair, as a contender writes them, and how they keep in step."""

from __future__ import annotations

import importlib
import select
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
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


class Role(ABC):
    """One end of a pair. Calls come in the order of the methods; `prepare`, `bind` and `run`
    repeat. `prepare` and `bind` of both ends happen before any `run`."""

    memory: Bytes
    """The region that operations read from (sender) or land in (target)."""
    moved: int = 0
    """Operations since the last `prepare`; both ends count them alike."""
    _filled: Bytes | None = None

    def __init__(self, sync: Sync) -> None:
        self.sync = sync

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

    @abstractmethod
    def run(self, case: Case, operations: int, samples: int) -> Stamps:
        """Do or await `samples` samples."""

    @abstractmethod
    def sample(self, case: Case, operations: int) -> Callable[[], object]:
        """One sample, to be called while the clock runs; what can be prepared is prepared here."""

    def settle(self) -> None:
        """Let go of what `sample` prepared, when its clock has stopped."""
        return

    def begin(self, case: Case, sender: bool) -> bytes:
        """`prepare`, with the memory laid out: the pattern, or zeros at the target; returns the
        description."""
        description = self.prepare(case)
        self.moved = 0
        if not sender:
            self.memory.fill(0)
        elif self._filled is not self.memory:
            data.fill(self.memory)
            self._filled = self.memory
        return description

    def check(self, case: Case, operations: int) -> str | None:
        """What is wrong with `memory` after `operations` operations since `prepare`, or None."""
        steps = [data.step(case, number) for number in range(operations)]
        return data.fault(case.bytes, steps, self.memory)

    def close(self) -> None:
        """Leave in peace, as far as the library can."""
        return

    def ordinary(self, case: Case, release: Callable[[], object] = lambda: None) -> bool:
        """Have `memory` be ordinary memory of the case's size; whether it is new. `release` is
        called before another one is given back."""
        if hasattr(self, "memory"):
            if self.memory.size == case.region:
                return False
            release()
        self.memory = data.ordinary_memory(case.region)
        return True


class SenderRole(Role):
    """The end whose calls start the clock.

    `stops_clock` says that an operation is over when its call returns, since the target is not
    notified; otherwise the target stops the clock. A round trip always ends here.
    """

    stops_clock = False

    def run(self, case: Case, operations: int, samples: int) -> Stamps:
        starts: list[int] = []
        ends: list[int] = []
        for _ in range(samples):
            move = self.sample(case, operations)
            self.moved += operations
            self.sync.wait()
            starts.append(time.monotonic_ns())
            move()
            ends.append(time.monotonic_ns())
            self.sync.signal()
            self.settle()
        if case.operation == "latency":
            return Stamps(starts=starts, ends=ends, per_operation=0.5)
        return Stamps(starts=starts, ends=ends if self.stops_clock else [])


class TargetRole(Role):
    """The end that the bytes arrive at."""

    notified = True
    progress: Callable[[], object] | None = None
    """Called until the sender has finished, where its completions need this end."""

    def run(self, case: Case, operations: int, samples: int) -> Stamps:
        ends: list[int] = []
        for _ in range(samples):
            arrive = self.sample(case, operations)
            self.moved += operations
            self.sync.signal()
            arrive()
            ends.append(time.monotonic_ns())
            self.settle()
            self.sync.wait(self.progress)
        return Stamps(ends=ends if self.notified and case.operation != "latency" else [])


def make_role(kind: str, descriptor: int, *arguments: Any) -> Role:
    """A role by its ``module:Class``, in the process that runs it."""
    module, _, name = kind.partition(":")
    role: Role = getattr(importlib.import_module(module), name)(Sync(descriptor), *arguments)
    return role


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
