"""A case: one operation with its size, link and memory, measured by every contender alike."""

from __future__ import annotations

from typing import Literal

import msgspec

from fabric_ray.bench.results import RowHeader, Unit
from fabric_ray.bench.table import size

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
REGION = 256 * MIB
WINDOW = 64
"""Writes in flight of the cases that say how many."""

Operation = Literal["write", "pages", "latency", "rate", "window", "flight"]
Link = Literal["shm", "tcp"]
Temperature = Literal["cold", "hot"]
Memory = Literal["library", "ordinary"]
Waiter = Literal[
    "spin-native", "callback-native", "poll-python", "callback-python", "asyncio", "parked"
]
Language = Literal["native", "python"]

_SINGLE = ("write", "window", "flight")


class Case(msgspec.Struct, frozen=True):
    """What one operation is.

    write: `bytes` contiguous bytes and a notification. pages: `pages` pages of `bytes` bytes each
    in one call, from successive places to shuffled ones. latency: `bytes` bytes and a
    notification into a `waiter`. rate: one of many small writes from one thread. window: one of
    many writes of `bytes` bytes and a notification each, 64 in flight; every contender makes
    equally many. flight: the same with `window` in flight from `submitters` threads, of ours and of
    plain copies.
    """

    suite: str
    operation: Operation
    link: Link
    bytes: int
    pages: int = 1
    temperature: Temperature = "cold"
    memory: Memory = "library"
    waiter: Waiter | None = None
    language: Language | None = None
    window: int = WINDOW
    submitters: int = 1
    region: int = REGION
    label: str = ""
    aim: str = ""
    name_prefix: str = ""
    """Only contenders whose names begin with it take part."""

    @property
    def key(self) -> str:
        """A name that is the same in every run, such as `write/shm/cold/1MiB`."""
        parts: list[str] = [self.suite, self.link]
        if self.memory == "ordinary":
            parts.append("ordinary")
        if self.operation in _SINGLE:
            parts += [self.temperature, size(self.bytes)]
        elif self.operation == "pages":
            parts.append(f"{self.pages}x{size(self.bytes)}")
        else:
            parts += filter(None, [self.waiter or self.language])
        return "/".join([*parts, self.label] if self.label else parts)

    @property
    def unit(self) -> Unit:
        return {"latency": "us", "rate": "op/s"}.get(self.operation, "GB/s")  # type: ignore[return-value]

    @property
    def operations(self) -> int:
        """Operations in one sample: enough for a clock to see, few enough to stay a sample."""
        match self.operation:
            case "write":
                return max(1, min(256, MIB // self.bytes))
            case "window":
                return max(4, min(128, GIB // self.bytes // WINDOW)) * WINDOW
            case "flight":
                return max(4 * self.window, min(8192, GIB // self.bytes))
            case "latency":
                return 100 if self.waiter in ("spin-native", "poll-python") else 1
            case "rate":
                return 4096
        return 1

    @property
    def header(self) -> RowHeader:
        """What a row of results says about the case."""
        curve = self.unit == "GB/s"
        group = [self.suite, self.link]
        if self.operation in _SINGLE:
            group.append(self.temperature)
        if self.memory == "ordinary":
            group.append("ordinary memory")
        if self.operation == "pages":
            group.append(f"{self.pages} pages a call")
        return RowHeader(
            key=self.key,
            unit=self.unit,
            amount=self.bytes * self.pages if curve else 1,
            group=", ".join(group),
            size=self.bytes if curve else None,
            aim=self.aim,
        )
