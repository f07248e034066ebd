"""How intervals and blocks meet along one dimension."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from fabric_ray.weights.quant.spans import Spans, merged


@lru_cache(maxsize=1 << 16)
def owned(spans: Spans, size: int) -> Spans:
    """The blocks whose first element lies in the intervals."""
    firsts = ((-(-start // size), -(-(start + length) // size)) for start, length in spans)
    return merged((first, last - first) for first, last in firsts)


class Zone(msgspec.Struct, frozen=True):
    """Neighbouring elements that a rank holds: equally large parts of neighbouring blocks."""

    start: int
    """In the rank's own elements."""
    count: int
    """Blocks."""
    size: int
    """Elements of each."""
    block: int
    """The first of them."""
    row: int
    """The same, among the blocks that the rank touches."""
    whole: bool
    """Whether each is all of its block."""
    begins: bool
    """Whether each has its block's first element."""


class Axis(msgspec.Struct, frozen=True):
    """One dimension of a rank's piece of a tensor, in blocks."""

    zones: tuple[Zone, ...]
    touched: tuple[int, ...]
    """Blocks of which the rank has a part, ascending."""
    whole: tuple[bool, ...]
    """Whether one zone has all of it."""

    @property
    def owned(self) -> tuple[int, ...]:
        """Those of the touched, by position, whose first element is here."""
        return tuple(i for z in self.zones if z.begins for i in range(z.row, z.row + z.count))


@lru_cache(maxsize=1 << 14)
def axis_of(spans: Spans, size: int, end: int) -> Axis:
    """Cuts a rank's intervals of a dimension of ``end`` elements at every ``size``-th."""
    zones: list[Zone] = []
    touched: list[int] = []
    whole: list[bool] = []
    at = 0
    for start, length in spans:
        stop = start + length
        while start < stop:
            block = start // size
            count = max(1, (stop - start) // size) if start % size == 0 else 1
            taken = min(count * size, stop - start, (block + count) * size - start)
            if not touched or touched[-1] != block:
                touched.append(block)
                whole.append(False)
            row = len(touched) - 1
            touched.extend(range(block + 1, block + count))
            begins = start % size == 0
            is_whole = begins and start + taken == min((block + count) * size, end)
            whole[row:] = [is_whole] * count
            zones.append(Zone(at, count, taken // count, block, row, is_whole, begins))
            start, at = start + taken, at + taken
    return Axis(tuple(zones), tuple(touched), tuple(whole))
