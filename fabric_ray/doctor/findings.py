"""Findings and the report of an examination."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

Status = Literal["ok", "absent", "warn", "fail"]
"""``absent``: not there, and nothing here needs it. ``warn``: works, but worse than it could.
``fail``: something that is there doesn't work."""


class Speed(msgspec.Struct, frozen=True):
    """Speed of a link between two hosts, measured by the sender."""

    latency_us: float
    """Median microseconds from a write of 8 bytes to its acknowledgement."""
    bytes_per_s: float
    """Bytes per second of large writes, two under way."""


class Finding(msgspec.Struct, frozen=True):
    """One examined item."""

    code: str
    """Names the kind of finding for programs: ``memlock``, ``port``, ``write``."""
    subject: str
    """What was looked at: ``mlx5_0 port 1``."""
    status: Status
    detail: str
    remedy: str = ""
    speed: Speed | None = None
    """Of writes between two hosts."""


class Report(msgspec.Struct, frozen=True):
    """Everything that was looked at, in the order of the layers."""

    findings: tuple[Finding, ...]
    seconds: float

    @property
    def healthy(self) -> bool:
        """Whether everything that is there works."""
        return all(f.status != "fail" for f in self.findings)


def collected(
    findings: Iterable[Finding], on_finding: Callable[[Finding], object] | None
) -> Report:
    """Looks at everything; calls ``on_finding`` with each finding at once."""
    began = time.monotonic()
    found = []
    for finding in findings:
        found.append(finding)
        if on_finding is not None:
            on_finding(finding)
    return Report(tuple(found), time.monotonic() - began)
