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


CASES = {
    "memory that is given back was taken": ("room = np.ones(100 * MB, np.uint8); del room", 100, 0),
    "memory that was held before is not taken": ("before.numpy()[:] = 2", 0, 0),
    # Regions of others are mapped here, but it is they who lack the memory.
    "only the region that is named is one's own": (
        "mine, others = (engine.alloc(64 * MB) for _ in range(2))\n"
        "room = np.ones(32 * MB, np.uint8)",
        96,
        64,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_process_takes(case: str) -> None:
    body, peak, ring = CASES[case]
    program = PROGRAM.format(body=body, own="mine.addr" if ring else "None")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    found = [int(word) / 1e6 for word in done.stdout.split()]
    assert found == [pytest.approx(peak, abs=6), pytest.approx(ring, abs=1)]
