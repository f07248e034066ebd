"""What a contender is, and when its clock starts and stops.

The clock starts at the sender's call and stops when the target has been notified and knows that
the bytes are there. A contender that cannot notify stops at its sender's completion and says so in
`describe`. A *sample* is `Effort.operations` operations one after the other (each after the
sender's completion of the one before; a `rate` case may keep as many in flight as it likes),
divided by their number. Both ends of a pair share one host and so one monotonic clock.

`latency` is half a round trip for waiters that spin or poll, and one way by both ends' stamps for
callbacks, asyncio and parked receivers (parked: nothing was sent for at least 500 us; otherwise
the receiver answers each write and the next one follows at once).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec

from benchmarks.harness.cases import Case
from fabric_ray.bench.results import Family


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """How much to measure in one turn: `samples` samples of `operations` operations."""

    operations: int
    samples: int


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one operation, one figure per sample; `chosen` names the routine if several ran,
    `parts` holds the median seconds of each of them."""

    seconds: list[float]
    chosen: str = ""
    parts: dict[str, float] = {}


class Contender(ABC):
    """One library in one configuration, running as processes of its own.

    The scheduler calls `start` and `verify` once per case, then `resume`, `measure`, `pause` once
    per turn, and `stop` when no later case needs it. Between `pause` and `resume` it may use no
    CPU time. `start` after `start` changes the case; after `stop` or an error it brings up new
    processes.
    """

    name: str
    """Shown in tables; unique."""
    family: Family = "peer"
    threads: int = 1
    """Copying threads; the floor it is held against has the same number."""
    obtain: str = ""
    """How a user gets it, one line."""

    def available(self) -> str | None:
        """None, or why it can't run here; costs little and starts nothing."""
        return None

    @abstractmethod
    def supports(self, case: Case) -> bool:
        """Whether it has the operation."""

    def takes_part(self, case: Case) -> bool:
        return self.name.startswith(case.name_prefix) and self.supports(case)

    @abstractmethod
    def describe(self, case: Case) -> str:
        """Configuration, and where the clock stops if not at the target's notification."""

    def start(self, case: Case) -> None:  # noqa: B027
        """Get processes, connections and memory ready for `case`, and pause.

        Raises:
            ContenderError: naming the step that failed.
        """

    def verify(self, case: Case) -> bool:
        """Move one sample untimed and compare the target's whole memory with what must be there.

        Returns False if it is a program whose bytes can't be seen from outside.

        Raises:
            ContenderError: when bytes are wrong or missing.
        """
        del case
        return False

    @abstractmethod
    def measure(self, case: Case, effort: Effort) -> Measurement:
        """One turn.

        Raises:
            ContenderError: when an operation failed or took too long.
        """

    def pause(self) -> None:  # noqa: B027
        """By default it sleeps by itself between turns, or nothing of it runs."""

    def resume(self) -> None:  # noqa: B027
        """The counterpart of `pause`."""

    def stop(self) -> None:  # noqa: B027
        """End every process for sure. Never raises; may be called twice."""
