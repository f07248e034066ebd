"""The physical floor of a push: the same bytes copied by nothing but ``memmove``."""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

# Far beyond any cache, so that every pass finds its bytes cold.
_BLOCK = 256 << 20


class PlainCopy:
    """Memory and threads for plain copies.

    Args:
        threads: that share each copy.
    """

    def __init__(self, threads: int) -> None:
        self._src = np.ones(_BLOCK, dtype=np.uint8)
        self._dst = np.ones(_BLOCK, dtype=np.uint8)
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)

    def run(self, nbytes: int) -> float:
        """Seconds to copy ``nbytes``, evenly shared by the threads."""
        each = -(-nbytes // self._threads)
        start = time.perf_counter()
        list(self._pool.map(self._share, range(self._threads), [each] * self._threads))
        return time.perf_counter() - start

    def _share(self, thread: int, nbytes: int) -> None:
        room = _BLOCK // self._threads
        at = thread * room
        while nbytes:
            n = min(nbytes, room)
            ctypes.memmove(self._dst.ctypes.data + at, self._src.ctypes.data + at, n)
            nbytes -= n
