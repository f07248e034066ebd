"""What a process holds that could leak, and the disk that is full for it alone."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import time
from collections import Counter
from pathlib import Path

from fabric_ray import TransferEngine
from tests.processes import shared_files

_NEW_MOUNTS, _PRIVATE = 0x20000, 0x44000
_FULL = Path("/dev/shm")


def full_disk() -> str | None:
    """Gives this process a /dev/shm of its own without a free byte; says why it can't be had.

    It has the user's key, by which engines without a token know each other.
    """
    key = _FULL / f"fabric-ray-{os.geteuid()}-key"
    with TransferEngine():  # makes the key
        kept = key.read_bytes()
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.unshare(_NEW_MOUNTS)
        or libc.mount(b"none", b"/", None, _PRIVATE, None)
        or libc.mount(b"full", bytes(_FULL), b"tmpfs", 0, b"size=16k")
    ):
        return os.strerror(ctypes.get_errno())
    key.touch(0o600)
    key.write_bytes(kept)
    with contextlib.suppress(OSError), open(_FULL / "filler", "wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass
    return None


def spill_folder() -> Path:
    return _FULL


class Belongings:
    """Descriptors, threads, mappings of shared memory, children, entries in /dev/shm."""

    def __init__(self) -> None:
        gc.collect()
        self.fds = sorted(filter(None, map(_target, os.listdir("/proc/self/fd"))))
        self.threads = sorted(filter(None, map(_name, os.listdir("/proc/self/task"))))
        self.maps = Path("/proc/self/maps").read_text().count("memfd:")
        self.shm = shared_files()
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        self.children = children.read_text().split() if children.exists() else []

    def more_than(self, other: Belongings) -> str | None:
        """What there is that there wasn't."""
        more = []
        for what in ("fds", "threads", "shm", "children"):
            extra = Counter(getattr(self, what)) - Counter(getattr(other, what))
            more += [f"{n} more of {what}: {each}" for each, n in extra.items()]
        if self.maps > other.maps:
            more.append(f"{self.maps - other.maps} more mappings of shared memory")
        return "; ".join(more) or None

    def left(self, seconds: float) -> str | None:
        """What this process holds that it did not hold then, if it still does after so many
        seconds. What was held for earlier tests may go meanwhile."""
        deadline = time.monotonic() + seconds
        while more := Belongings().more_than(self):
            if time.monotonic() > deadline:
                return more
            time.sleep(0.02)
        return None


def _name(task: str) -> str | None:
    try:
        name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
        # Started once in a process, with the first need.
        return None if name in ("fabric-log", "fabric-release") else name
    except OSError:
        return None  # it has just ended


def _target(fd: str) -> str | None:
    try:
        # Numbers of sockets and pipes differ each time.
        return os.readlink(f"/proc/self/fd/{fd}").split(":[")[0]
    except OSError:
        return None  # the directory that was being read


class _Mallinfo(ctypes.Structure):
    """What glibc's allocator says of itself (mallinfo2)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def in_use() -> int:
    """Bytes that this process has allocated and not freed. What the kernel counts as resident is no
    measure: the allocator keeps freed memory that lies between other memory."""
    gc.collect()
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except AttributeError:  # not glibc, or one before 2.33
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    ask.restype = _Mallinfo
    found = ask()
    return int(found.uordblks + found.hblkhd)
