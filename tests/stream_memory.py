"""The memory of streams, as torch's caching allocator hands it out.

What the host lets go of is free at once for the stream that it was allocated on. It is overwritten
there, and handed out anew, though other streams may still use it. ``record_stream`` puts that off
until they are done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tests.queued_streams import CapturedGraph, Marker, Stream

#: Bytes of memory that nothing was written to, or that was freed: NaN as any float, -1 as any
#: integer.
POISON = 0xFF
_ROUND = 512


class MemoryBlock:
    """Memory of one tensor at a time."""

    def __init__(self, nbytes: int, stream: Stream) -> None:
        self.bytes = torch.full((nbytes,), POISON, dtype=torch.uint8)
        self.stream = stream
        self.graph: CapturedGraph | None = stream.graph
        self.used_on: set[Stream] = set()

    def record(self, stream: Stream) -> None:
        """As ``record_stream``."""
        if stream is not self.stream:
            self.used_on.add(stream)

    def poison(self, _: Stream) -> None:
        self.bytes.fill_(POISON)


class Allocation:
    """A block until the last tensor there is gone."""

    def __init__(self, block: MemoryBlock) -> None:
        self.block = block

    def __del__(self) -> None:
        self.block.stream.memory.free(self.block)


class StreamMemory:
    """Memory that was allocated on a stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._free: dict[tuple[CapturedGraph | None, int], list[MemoryBlock]] = {}
        self._used: list[tuple[MemoryBlock, list[Marker]]] = []
        """Freed, and used on other streams until they have reached these places."""
        self._all: list[MemoryBlock] = []
        """Kept: a kernel that is at fault still writes there."""
        # Freed by any thread, in the middle of anything.
        self._lock = stream.on.changed

    def allocate(self, nbytes: int) -> Allocation:
        nbytes = max(1, -(-nbytes // _ROUND)) * _ROUND
        with self._lock:
            self._reuse()
            free = self._free.get((self._stream.graph, nbytes))
            if free:
                return Allocation(free.pop())
            self._all.append(MemoryBlock(nbytes, self._stream))
            return Allocation(self._all[-1])

    def free(self, block: MemoryBlock) -> None:
        with self._lock:
            if block.graph is not None and not block.graph.is_open:
                return  # replays use it
            markers = [stream.mark(of_memory=True) for stream in block.used_on]
            self._used.append((block, markers))
            block.used_on = set()
            self._reuse()

    def _reuse(self) -> None:
        """Takes back what other streams are done with, unless the stream is captured meanwhile."""
        left = []
        for block, markers in self._used:
            if block.graph is self._stream.graph and all(marker.over for marker in markers):
                self._stream.launch(block.poison, of_memory=True)
                self._free.setdefault((block.graph, len(block.bytes)), []).append(block)
            else:
                left.append((block, markers))
        self._used = left
