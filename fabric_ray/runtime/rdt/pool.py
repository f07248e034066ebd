"""Memory for tensors that arrive: kept warm, and lent again when the last tensor in it is gone.

New memory costs a page fault for every few kilobytes, more than the copy itself; registering costs
as much again on a NIC. A block pays for both once.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from fabric_ray.engine import Region, TransferEngine

SMALLEST = 64 << 10
"""Tensors of fewer bytes come into memory of their own."""
LIMIT_VARIABLE = "FABRIC_RAY_RDT_POOL_BYTES"
_MOST = 4 << 30


def default_limit() -> int:
    """Bytes that may lie idle: what the environment says, else a sixteenth of the machine's memory
    and no more than 4 GiB."""
    given = os.environ.get(LIMIT_VARIABLE)
    if given is not None:
        return max(0, int(given))
    return min(_MOST, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 16)


def capacity(nbytes: int) -> int:
    """Bytes of the block for so many: up to an eighth more, so that sizes that differ a little
    share blocks."""
    step = max(mmap.PAGESIZE, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


class _Block:
    """A piece of memory, registered for as long as it exists."""

    def __init__(self, engine: TransferEngine, nbytes: int) -> None:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(AttributeError, OSError):  # not all systems have huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.array = np.frombuffer(memory, dtype=np.uint8)
        self.region: Region = engine.register(self.array)


class _Loan:
    """One tensor's hold on a block: numpy and torch keep it for as long as they show the memory."""

    def __init__(self, pool: Pool, block: _Block, nbytes: int) -> None:
        self._pool, self._block = pool, block
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (block.array.ctypes.data, False),
        }

    def __del__(self) -> None:
        self._pool._returned.append(self._block)
        self._pool._settle()


class Pool:
    """Blocks by size.

    Args:
        engine: registers them.
        limit: bytes that may lie idle; further blocks are given back to the system.
    """

    def __init__(self, engine: TransferEngine, limit: int) -> None:
        self._engine = engine
        self._limit = limit
        self._idle: dict[int, list[_Block]] = defaultdict(list)
        self.idle_bytes = 0
        # A loan may end in the middle of anything, on any thread: it only leaves the block here.
        self._returned: deque[_Block] = deque()
        self._lock = threading.Lock()

    def lend(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, Region] | None:
        """An uninitialised tensor in host memory and its region; ``None`` if it is too small to be
        worth it."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if nbytes < SMALLEST:
            return None
        size = capacity(nbytes)
        self._settle()
        with self._lock:
            block = self._idle[size].pop() if self._idle.get(size) else None
            if block is not None:
                self.idle_bytes -= size
        if block is None:
            block = _Block(self._engine, size)
        array = np.asarray(_Loan(self, block, nbytes))
        return torch.from_numpy(array).view(dtype).view(tuple(shape)), block.region[:nbytes]

    def _settle(self) -> None:
        """Puts what came back where it is found. Whoever holds the lock does it for others."""
        while self._returned and self._lock.acquire(blocking=False):
            try:
                while self._returned:
                    block = self._returned.popleft()
                    size = block.array.nbytes
                    if self.idle_bytes + size <= self._limit:
                        self._idle[size].append(block)
                        self.idle_bytes += size
                    del block
            finally:
                self._lock.release()
