"""Where bytes lie that are made ready before they are sent: a ring that never grows.

A push makes tensors ready (casts, quantises, gathers them) step by step, and the next step is made
ready while earlier ones are still being sent. What that takes is bounded by a *watermark*
(fabric-lib, section 5: in-flight temporary memory). Steps and sizes are the same at every push, so
their places are worked out once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from fabric_ray.errors import InvalidArgument

# Suits any kernel, and every dtype.
ALIGN = 256


class Place(NamedTuple):
    """A step's temporary memory."""

    offset: int
    """Bytes from the begin of the ring."""
    after: int
    """The last step whose memory this takes over: all up to it must have been sent. -1: none."""


def places(sizes: Iterable[int], watermark: int) -> list[Place]:
    """Places steps one behind the other in a ring of ``watermark`` bytes.

    Steps end in order: whoever waits for ``after`` waits for all before it too.

    Args:
        sizes: bytes that each step needs, in the order of steps; 0 for a step that is sent from
            where its tensors lie.
        watermark: bytes.

    Raises:
        InvalidArgument: a step needs more than all of it.
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
            out.append(Place(0, -1))
            continue
        begin = head if head + size <= watermark else 0
        end = begin + size
        while any(first < end and begin < last for _, first, last in held):
            after = held.popleft()[0]
        held.append((step, begin, end))
        out.append(Place(begin, after))
        head = min(-(-end // ALIGN) * ALIGN, watermark)
    return out
