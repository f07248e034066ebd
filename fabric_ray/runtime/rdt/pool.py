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
from itertools import count
from typing import Any

import numpy as np
import torch

from fabric_ray.engine import Region, TransferEngine
from fabric_ray.runtime.rdt.machine import memory_bytes

SMALLEST = 64 << 10
"""Tensors of fewer bytes come into memory of their own."""
LIMIT_VARIABLE = "FABRIC_RAY_RDT_POOL_BYTES"
_MOST = 2 << 30
_SHARE = 32


def default_limit() -> int:
    """Bytes that may lie idle: what the environment says, else a thirty-second of the memory that
    this process may use and no more than 2 GiB, since many actors share a host."""
    given = os.environ.get(LIMIT_VARIABLE)
    if given is not None:
        return max(0, int(given))
    return min(_MOST, memory_bytes() // _SHARE)


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
        self.turn = 0
        """When it came back: blocks with lower numbers have lain idle longer."""


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
        limit: bytes that may lie idle; beyond them the blocks that have lain idle longest are given
            back to the system, and so are larger ones.
    """

    def __init__(self, engine: TransferEngine, limit: int) -> None:
        self._engine = engine
        self._limit = limit
        self._idle: dict[int, deque[_Block]] = defaultdict(deque)
        self.idle_bytes = 0
        self._turns = count()
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

    def close(self) -> None:
        """Nothing lies idle from now on; what is lent stays until it comes back."""
        with self._lock:
            self._limit = 0
            gone = self._shrink(0)
        gone.clear()
        self._settle()

    def _settle(self) -> None:
        """Returns freed blocks to the pool; the lock's holder does it for all threads."""
        while self._returned and self._lock.acquire(blocking=False):
            gone: list[_Block] = []
            try:
                while self._returned:
                    gone += self._keep(self._returned.popleft())
            finally:
                self._lock.release()
            gone.clear()  # outside of the lock: unmapping takes time

    def _keep(self, block: _Block) -> list[_Block]:
        """Has it lie idle if it may; returns what must go for that, or the block itself."""
        size = block.array.nbytes
        if size > self._limit:
            return [block]
        gone = self._shrink(self._limit - size)
        block.turn = next(self._turns)
        self._idle[size].append(block)
        self.idle_bytes += size
        return gone

    def _shrink(self, limit: int) -> list[_Block]:
        """Takes out what has lain idle longest until no more than so many bytes do."""
        gone = []
        while self.idle_bytes > limit:
            oldest = min(filter(None, self._idle.values()), key=lambda blocks: blocks[0].turn)
            gone.append(oldest.popleft())
            self.idle_bytes -= gone[-1].array.nbytes
        return gone
