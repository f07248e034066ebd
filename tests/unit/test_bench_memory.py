"""What a process is said to have taken is what it took, also where it has given it back."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own: what else runs in this one takes memory too.
PROGRAM = """
import numpy as np
from benchmarks.push.memory import Mark
from fabric_ray import TransferEngine

MB = 1_000_000
engine = TransferEngine(name="memory", transport="shm")
before = engine.alloc(32 * MB)
before.numpy()[:] = 1
mark = Mark()
{body}
peak, ring = mark.peak({own})
print(peak, ring)
"""


def taken(body: str, own: str = "None") -> tuple[float, float]:
    """Megabytes that a process takes with a program, and what of it is a region of its own."""
    program = PROGRAM.format(body=body, own=own)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    peak, ring = map(int, done.stdout.split())
    return peak / 1e6, ring / 1e6


def test_memory_that_is_given_back_was_taken() -> None:
    peak, ring = taken("room = np.ones(100 * MB, np.uint8); del room")
    assert peak == pytest.approx(100, abs=6)
    assert ring == 0


def test_memory_that_was_held_before_is_not_taken() -> None:
    assert taken("before.numpy()[:] = 2")[0] == pytest.approx(0, abs=6)


def test_only_the_region_that_is_named_is_ones_own() -> None:
    """Regions of others are mapped here, but it is they who lack the memory."""
    body = """
mine, others = (engine.alloc(64 * MB) for _ in range(2))
room = np.ones(32 * MB, np.uint8)
"""
    peak, ring = taken(body, "mine.addr")
    assert ring == pytest.approx(64, abs=1)
    assert peak == pytest.approx(96, abs=6)
