"""How much memory this process may use: the machine's, or what its control group has of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process may use.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_group_limits(root)])


def _group_limits(root: Path) -> Iterator[int]:
    """Limits of the process's control group and of those around it, version 2 and 1."""
    for file in _limit_files(root):
        try:
            said = file.read_text().strip()
        except OSError:  # a container sees only the last part of the path
            continue
        if said.isdigit():  # not "max"
            yield int(said)


def _limit_files(root: Path) -> Iterator[Path]:
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            top, name = mount, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        path = PurePosixPath(group)
        for around in (path, *path.parents):
            yield top / str(around).lstrip("/") / name
