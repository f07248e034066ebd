"""Bytes that name who wrote them: no two writers, requests or versions have the same."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

# What memory holds before anything is written to it, and what its owner puts there afterwards.
EMPTY, SCRIBBLE = 0xA5, 0x5C
_TAIL = 1 << 16


def pattern(nbytes: int, *names: object) -> Bytes:
    """``nbytes`` bytes that follow from ``names`` alone."""
    key = int.from_bytes(hashlib.blake2b(repr(names).encode(), digest_size=8).digest(), "little")
    words = np.arange(-(-nbytes // 8), dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words += np.uint64(key)
    words ^= words >> np.uint64(29)
    return words.view(np.uint8)[:nbytes]


def differs(found: Bytes, wanted: Bytes) -> str | None:
    """Where ``found`` is not ``wanted``, in words. The end first: it is what arrives last."""
    if np.array_equal(found[-_TAIL:], wanted[-_TAIL:]) and np.array_equal(found, wanted):
        return None
    wrong = np.flatnonzero(found != wanted)
    if not len(wrong):
        return "bytes were missing, and came while they were looked at"
    return f"{len(wrong)} of {len(found)} bytes are wrong, from {wrong[0]} to {wrong[-1]}"


def mixes(found: Bytes, before: Bytes, after: Bytes) -> str | None:
    """Where ``found`` is neither ``before`` nor ``after``: what a torn write may leave is both."""
    wrong = np.flatnonzero((found != before) & (found != after))
    if not len(wrong):
        return None
    return f"{len(wrong)} of {len(found)} bytes are of no write, from {wrong[0]} to {wrong[-1]}"
