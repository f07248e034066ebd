"""What an examination finds."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["ok", "absent", "warn", "fail"]
"""``absent``: not there, and nothing here needs it. ``warn``: works, but worse than it could.
``fail``: something that is there doesn't work."""


class Speed(msgspec.Struct, frozen=True):
    """How a link between two hosts did, as its sender saw it."""

    latency_us: float
    """Microseconds from a write of 8 bytes to its acknowledgement, the median of many."""
    bytes_per_s: float
    """Bytes a second of large writes, one under way behind the other."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

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
