"""What ``nixl._utils`` has: memory by address, for examples and tests that are written to it."""

from __future__ import annotations

import ctypes
import threading

import numpy as np

_lock = threading.Lock()
_held: dict[int, np.ndarray[tuple[int], np.dtype[np.uint8]]] = {}
_PAGE = 4096


def malloc_passthru(size: int) -> int:
    """The address of ``size`` zeroed bytes, of pages of their own."""
    memory = np.zeros(size + _PAGE, dtype=np.uint8)
    address = -(-memory.ctypes.data // _PAGE) * _PAGE
    with _lock:
        _held[address] = memory
    return address


def free_passthru(buf: int) -> None:
    """Gives it back."""
    with _lock:
        del _held[buf]


def ba_buf(addr: int, size: int) -> None:
    """Fills it with 0xba."""
    ctypes.memset(addr, 0xBA, size)


def verify_transfer(addr1: int, addr2: int, size: int) -> None:
    """
    Raises:
        AssertionError: the bytes differ.
    """
    if ctypes.string_at(addr1, size) != ctypes.string_at(addr2, size):
        raise AssertionError(f"{size} bytes at {addr1:#x} and {addr2:#x} differ")
