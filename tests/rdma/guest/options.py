"""What a guest is to be like."""

from __future__ import annotations

import os
from dataclasses import dataclass, field


def _cpus() -> int:
    return min(4, len(os.sched_getaffinity(0)))


@dataclass(frozen=True, kw_only=True)
class Options:
    """One field for each option of the command line; `__main__.py` says what they mean."""

    command: tuple[str, ...] = ()
    hosts: int = 2
    rails: int = 1
    netns: bool = False
    mtu: int = 9000
    rw: tuple[str, ...] = ()
    package: tuple[str, ...] = ()
    setup: str | None = None
    cwd: str | None = None
    cpus: int = field(default_factory=_cpus)
    memory: str = "1024M"
    accel: str = "auto"
    kernel: str | None = None
    boot_timeout: float | None = None
    timeout: float = 300
    verbose: bool = False
    keep: bool = False
    append: str = ""
    qemu_arg: tuple[str, ...] = ()
    stats: bool = False
