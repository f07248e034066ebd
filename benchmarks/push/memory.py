"""How much more memory a process takes for a while than it held before, as the kernel counts it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path

import msgspec

_PROC = Path("/proc/self")
_KB = 1024
# What engines allocate, this process's own and others that it has mapped.
_REGION = "/memfd:fabric-ray"


class Temporary(msgspec.Struct, frozen=True):
    """Bytes of one trainer, over what it held before."""

    peak: int
    """The most that its process took, all in all."""
    ring: int = 0
    """Of it, what lies in the memory in which tensors are made ready."""
    watermark: int | None = None
    """What that memory may take at most; ``None`` for contenders that have none."""

    @property
    def shown(self) -> dict[str, float]:
        """By name and unit."""
        found = {"trainer MB": self.peak / 1e6}
        if self.watermark is not None:
            found |= {
                "of it made ready MB": self.ring / 1e6,
                "watermark MB": self.watermark / 1e6,
                "of watermark": self.peak / self.watermark,
            }
        return found


class Mark:
    """What this process holds now: :meth:`peak` is what it takes from here on.

    What peers have allocated and this process maps isn't counted, nor is code that is read in:
    no process lacks either.
    """

    def __init__(self) -> None:
        gc.collect()
        # Memory that was freed and not returned would hide what is taken next.
        ctypes.CDLL(None).malloc_trim(0)
        (_PROC / "clear_refs").write_text("5")  # VmHWM begins anew
        self._status = _status()
        self._known = {m.inode for m in _regions()}

    def peak(self, own: int | None = None, *, mapped: bool = False) -> tuple[int, int]:
        """The most bytes since, and what of it lies in the region at the address ``own``.

        Args:
            mapped: counts all regions that this process has mapped, whose ever they are.
        """
        status, regions = _status(), list(_regions())
        mine = {m.inode for m in regions if own is not None and own in m.addresses}
        ring = sum(m.resident for m in regions if m.inode in mine)
        ours = self._known | mine
        # Mapped pages stay, so that all of them were there at the peak.
        peers = sum(m.resident for m in regions if not mapped and m.inode not in ours)
        code = status["RssFile"] - self._status["RssFile"]
        return status["VmHWM"] - self._status["VmRSS"] - code - peers, ring


class WorkerMemory:
    """What vLLM's worker says of its memory: methods for ``/collective_rpc``, which it has by
    ``--worker-extension-cls``."""

    _mark: Mark

    def mark_memory(self) -> None:
        """From here on memory counts."""
        self._mark = Mark()

    def peak_memory(self) -> int:
        """The most bytes since, with what trainers write into."""
        return self._mark.peak(mapped=True)[0]


class _Mapping(msgspec.Struct, frozen=True):
    """One of several that a region may have: huge pages have their own."""

    inode: str
    addresses: range
    resident: int
    """Bytes."""


def _regions() -> Iterator[_Mapping]:
    inode, addresses = "", range(0)
    for line in (_PROC / "smaps").read_text().splitlines():
        key, *rest = line.split()
        if not key.endswith(":"):
            first, last = (int(end, 16) for end in key.split("-"))
            inode, addresses = rest[3], range(first, last)
            inode = inode if _REGION in rest else ""
        elif key == "Rss:" and inode:
            yield _Mapping(inode, addresses, int(rest[0]) * _KB)


def _status() -> dict[str, int]:
    """Bytes by key."""
    lines = map(str.split, (_PROC / "status").read_text().splitlines())
    return {key[:-1]: int(rest[0]) * _KB for key, *rest in lines if rest[-1:] == ["kB"]}
