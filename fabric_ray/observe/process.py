"""Metrics and flight records of a process's engines."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from threading import get_ident

import msgspec

from fabric_ray.decoding import from_json
from fabric_ray.engine import EngineMetrics, EngineRecords, opened
from fabric_ray.engine.observability import Cursor
from fabric_ray.errors import DecodeError
from fabric_ray.observe.spans import names


class Clock(msgspec.Struct, frozen=True):
    """One moment on both clocks of a machine."""

    boot: str
    """Names the machine and its boot: processes of one boot share their monotonic clock."""
    monotonic: int
    """Nanoseconds of the clock that records use."""
    wall: int
    """Nanoseconds since 1970."""


class ProcessMetrics(msgspec.Struct, frozen=True):
    """The metrics of all engines of a process."""

    pid: int
    host: str
    command: str
    at: Clock
    engines: tuple[EngineMetrics, ...]


class ProcessRecords(msgspec.Struct, frozen=True):
    """The flight records of all engines of a process."""

    pid: int
    host: str
    command: str
    at: Clock
    spans: dict[int, str]
    """Names of requests by number, as far as they were used here."""
    engines: tuple[EngineRecords, ...]


@cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{socket.gethostname()}-{os.getpid()}"


def clock() -> Clock:
    """Now."""
    # A thread that loses its core between two reads would move all its records on the wall clock.
    _, monotonic, wall = min(_read_clocks() for _ in range(3))
    return Clock(_boot(), monotonic, wall)


def _read_clocks() -> tuple[int, int, int]:
    """How long the reads took, and both clocks."""
    before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
    return after - before, (before + after) // 2, wall


def _command() -> str:
    return Path(sys.argv[0]).name if sys.argv and sys.argv[0] else Path(sys.executable).name


def metrics() -> ProcessMetrics:
    """The metrics of this process's open engines."""
    engines = tuple(engine.metrics() for engine in opened())
    return ProcessMetrics(os.getpid(), socket.gethostname(), _command(), clock(), engines)


def records(since: Mapping[str, Cursor] | None = None, oldest: int | None = None) -> ProcessRecords:
    """The records of this process's open engines.

    Args:
        since: the cursor of an earlier answer, by engine id.
        oldest: most open transfers of each engine; all if ``None``.
    """
    since, start = since or {}, (0, 0, 0, 0)
    engines = tuple(e.records(since.get(e.id, start), oldest=oldest) for e in opened())
    return ProcessRecords(os.getpid(), socket.gethostname(), _command(), clock(), names(), engines)


def dump(path: str | Path) -> ProcessRecords:
    """Writes the records of this process to a file, for ``fabric-ray trace``; replaces the file
    atomically."""
    found = records()
    path = Path(path)
    # Several threads may write to one path: the last one wins.
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{get_ident()}")
    fresh.write_bytes(msgspec.json.encode(found))
    fresh.replace(path)
    return found


def load(path: str | Path) -> list[ProcessRecords]:
    """Reads the records of a file, with one process on each line.

    Raises:
        DecodeError: the file has no records.
    """
    try:
        return [
            from_json(line, ProcessRecords)
            for line in Path(path).read_bytes().splitlines()
            if line.strip()
        ]
    except (OSError, msgspec.DecodeError) as error:
        raise DecodeError(
            f"{path} has no flight records: {error}; write some with fabric-ray trace --dump"
        ) from None
