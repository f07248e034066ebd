"""A ring of temporary memory for tensors that are prepared before they are sent.

A push prepares tensors (casts, quantises or gathers them) step by step, and prepares a step while
earlier steps are sent. A *watermark* limits the ring (fabric-lib, section 5: in-flight temporary
memory). Steps and sizes are the same in every push, so the slices are computed once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from fabric_ray.errors import InvalidArgument

# Alignment of slices in bytes; enough for any kernel and dtype.
ALIGN = 256


class RingSlice(NamedTuple):
    """A step's temporary memory."""

    offset: int
    """Bytes from the start of the ring."""
    after: int
    """The last step whose memory this slice reuses: wait until it has been sent. -1: none."""


def ring_slices(sizes: Iterable[int], watermark: int) -> list[RingSlice]:
    """Allocates steps in order from a ring of ``watermark`` bytes.

    Steps are freed in order, so a wait for ``after`` covers all steps before it.

    Args:
        sizes: bytes of each step; 0 for a step without prepared tensors.
        watermark: bytes.

    Raises:
        InvalidArgument: a step needs more than ``watermark`` bytes.
    """
    held: deque[tuple[int, int, int]] = deque()
    out, head, after = [], 0, -1
    for step, size in enumerate(sizes):
        if size > watermark:
            raise InvalidArgument(
                f"step {step} needs {size} bytes of temporary memory at once, more than the "
                f"watermark of {watermark}; raise the watermark to that"
            )
        if not size:
            out.append(RingSlice(0, -1))
            continue
        begin = head if head + size <= watermark else 0
        end = begin + size
        while any(first < end and begin < last for _, first, last in held):
            after = held.popleft()[0]
        held.append((step, begin, end))
        out.append(RingSlice(begin, after))
        head = min(-(-end // ALIGN) * ALIGN, watermark)
    return out
