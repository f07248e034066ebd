"""The copies of one rank, as columns and as values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from fabric_ray._native import copy_rows

if TYPE_CHECKING:
    from fabric_ray._native import _PlanColumns


class Loop(msgspec.Struct, frozen=True):
    """One level of repetition of a run."""

    count: int
    src_stride: int
    """Bytes from one repetition to the next in the source container."""
    dst_stride: int


class Row(NamedTuple):
    """Equally long runs in a row: run ``i`` lies at ``offset + i * stride`` on either side."""

    nbytes: int
    """Bytes of one run."""
    runs: int
    src_offset: int
    src_stride: int
    dst_offset: int
    dst_stride: int


class Copy(msgspec.Struct, frozen=True):
    """A strided copy between a container here and one at ``peer``."""

    peer: int
    src_container: int
    """Index into the source side's containers."""
    src_offset: int
    """Bytes."""
    dst_container: int
    dst_offset: int
    run: int
    """Bytes that are contiguous on both sides."""
    loops: tuple[Loop, ...]
    """Repetitions of the run, outermost first."""

    @property
    def pages(self) -> int:
        """Runs in the copy: what it adds to the receiver's counter."""
        pages = 1
        for loop in self.loops:
            pages *= loop.count
        return pages

    @property
    def nbytes(self) -> int:
        return self.pages * self.run

    def rows(self) -> Iterator[Row]:
        """The copy as rows, each of which one paged write can move: the longest loop becomes runs,
        the others are unrolled."""
        return (Row(self.run, *row) for row in copy_rows(self))


U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Copies:
    """Copies in order, one array entry each; iterating makes :class:`Copy` values."""

    peer: U32
    src_container: U64
    src_offset: U64
    dst_container: U64
    dst_offset: U64
    run: U64
    loop_count: U32
    """Loops of each copy."""
    loops: U64
    """``[loops of all copies, 3]``: count, source stride, target stride."""

    @classmethod
    def from_columns(cls, columns: _PlanColumns) -> Copies:
        (peer, loop_count), (src_container, src_offset, dst_container, dst_offset), run, loops = (
            columns
        )

        def wide(data: bytes) -> U64:
            return np.frombuffer(data, dtype="<u8")

        return cls(
            peer=np.frombuffer(peer, dtype="<u4"),
            src_container=wide(src_container),
            src_offset=wide(src_offset),
            dst_container=wide(dst_container),
            dst_offset=wide(dst_offset),
            run=wide(run),
            loop_count=np.frombuffer(loop_count, dtype="<u4"),
            loops=wide(loops).reshape(-1, 3),
        )

    def __len__(self) -> int:
        return len(self.run)

    def __iter__(self) -> Iterator[Copy]:
        first = 0
        for i in range(len(self)):
            end = first + int(self.loop_count[i])
            yield Copy(
                peer=int(self.peer[i]),
                src_container=int(self.src_container[i]),
                src_offset=int(self.src_offset[i]),
                dst_container=int(self.dst_container[i]),
                dst_offset=int(self.dst_offset[i]),
                run=int(self.run[i]),
                loops=tuple(Loop(*map(int, row)) for row in self.loops[first:end]),
            )
            first = end
