"""Raw addresses, as other libraries name memory, to regions and to requests."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fabric_ray.engine import (
    Batch,
    Pages,
    Region,
    RemoteRegion,
    Transfer,
    TransferEngine,
    pages,
)
from fabric_ray.errors import InvalidArgument, OutOfBounds

R = TypeVar("R", Region, RemoteRegion)
Ints = NDArray[np.int64]
Op = Literal["read", "write"]

_WHOLE = 1 << 20
"""Pages are never divided over several NICs: a range of so many bytes is a write of its own."""
_PAGE_NUMBERS = 1 << 32


class Locations(NamedTuple):
    """Of ranges of addresses: the index of the region, and the offset in it."""

    region: Ints
    offset: Ints


class AddressSpace(Generic[R]):
    """Regions by their addresses in their owner's process. Immutable.

    Args:
        regions: first addresses and regions, which may overlap.
    """

    def __init__(self, regions: Iterable[tuple[int, R]] = ()) -> None:
        ordered = sorted(regions, key=lambda entry: entry[0])
        self.regions: list[R] = [region for _, region in ordered]
        self.first = np.array([first for first, _ in ordered], dtype=np.int64)
        self._end = self.first + np.array([r.nbytes for r in self.regions], dtype=np.int64)

    def find(self, addresses: ArrayLike, nbytes: ArrayLike, owner: str) -> Locations:
        """A region that contains all of each range.

        Raises:
            OutOfBounds: no region contains a range; the first such range is named.
        """
        start = _whole_numbers(addresses)
        end = start + _whole_numbers(nbytes)
        region = np.searchsorted(self.first, start, side="right").astype(np.int64) - 1
        inside = region >= 0
        inside[inside] = end[inside] <= self._end[region[inside]]
        for i in np.flatnonzero(~inside):  # overlapping regions: any that contains the range
            having = np.flatnonzero((self.first <= start[i]) & (end[i] <= self._end))
            if not having.size:
                raise OutOfBounds(
                    f"{end[i] - start[i]} bytes at {start[i]:#x} don't lie in one range that "
                    f"{owner} has registered; register them, all of a range at once",
                    offset=int(start[i]),
                    nbytes=int(end[i] - start[i]),
                    limit=0,
                )
            region[i] = having[-1]
        return Locations(region, start - self.first[region])


class Registered:
    """The memory that this process has registered, by address. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[int, tuple[int, Region]] = {}
        self._at: dict[int, list[int]] = {}
        self._next = 0
        self._space: AddressSpace[Region] | None = None
        self.version = 0
        """The number of changes."""

    def add(self, address: int, region: Region) -> None:
        with self._lock:
            self._regions[self._next] = (address, region)
            self._at.setdefault(address, []).append(self._next)
            self._next += 1
            self._changed()

    def take(self, address: int, nbytes: int | None = None) -> Region | None:
        """Removes the latest region that begins there, and returns it; ``None`` without one."""
        with self._lock:
            keys = self._at.get(address, [])
            for key in reversed(keys):
                if nbytes in (None, self._regions[key][1].nbytes):
                    keys.remove(key)
                    if not keys:
                        del self._at[address]
                    self._changed()
                    return self._regions.pop(key)[1]
        return None

    def listed(self) -> tuple[int, list[tuple[int, Region]]]:
        """The version, and first addresses and regions in the order of registration."""
        with self._lock:
            return self.version, list(self._regions.values())

    @property
    def space(self) -> AddressSpace[Region]:
        """The present regions."""
        with self._lock:
            if self._space is None:
                self._space = AddressSpace(self._regions.values())
            return self._space

    def _changed(self) -> None:
        self._space = None
        self.version += 1


class DisjointRanges:
    """Ranges of addresses, of which no two overlap. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: list[int] = []
        self._end: dict[int, int] = {}

    def add(self, first: int, nbytes: int) -> bool:
        """Whether the range was added: not if it overlaps another."""
        end = first + max(nbytes, 1)
        with self._lock:
            at = bisect.bisect_left(self._first, end)
            if at and self._end[self._first[at - 1]] > first:
                return False
            self._first.insert(at, first)
            self._end[first] = end
            return True

    def discard(self, first: int) -> None:
        """Removes the range that begins there."""
        with self._lock:
            if self._end.pop(first, None) is not None:
                del self._first[bisect.bisect_left(self._first, first)]


class EmptyTransfer:
    """The transfer of no bytes: over when it begins."""

    quiesced = True

    def done(self) -> bool:
        return True

    def wait(self) -> None: ...

    result = cancel = wait

    def wait_quiesced(self, timeout: float) -> bool:
        return True

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        callback(self)


def submit(
    engine: TransferEngine, batch: Batch, timeout: float | None = None
) -> Transfer | EmptyTransfer:
    """Begins the copies of a batch, which may be empty."""
    return engine.submit(batch, timeout=timeout) if len(batch) else EmptyTransfer()


def add_copies(
    batch: Batch,
    op: Op,
    local: tuple[Sequence[Region], Locations],
    remote: tuple[Sequence[RemoteRegion], Locations],
    nbytes: Ints,
) -> None:
    """Adds the copy of each range to a batch, in as few operations as possible.

    Ranges that are adjacent on both sides are one write; ranges of equal length between the same
    two regions are pages of one operation.
    """
    (ours, here), (theirs, there) = local, remote
    table = np.stack([here.region, there.region, nbytes, here.offset, there.offset], axis=1)
    table = _joined(table[nbytes > 0])
    order = np.lexsort(table[:, 4::-1].T)
    table = table[order]
    borders = np.flatnonzero(np.any(np.diff(table[:, :3], axis=0), axis=1)) + 1
    for rows in np.split(table, borders):
        if not len(rows):
            continue
        region, mirror = ours[int(rows[0, 0])], theirs[int(rows[0, 1])]
        _add_alike(batch, op, region, mirror, int(rows[0, 2]), rows[:, 3], rows[:, 4])


def _joined(table: Ints) -> Ints:
    """Rows of (region, region, bytes, offset, offset), with adjacent rows joined."""
    if len(table) < 2:
        return table
    before, after = table[:-1], table[1:]
    goes_on = (
        (before[:, 0] == after[:, 0])
        & (before[:, 1] == after[:, 1])
        & (before[:, 3] + before[:, 2] == after[:, 3])
        & (before[:, 4] + before[:, 2] == after[:, 4])
    )
    starts = np.flatnonzero(np.r_[True, ~goes_on])
    joined = table[starts]
    joined[:, 2] = np.add.reduceat(table[:, 2], starts)
    return joined


def _add_alike(
    batch: Batch, op: Op, ours: Region, theirs: RemoteRegion, nbytes: int, here: Ints, there: Ints
) -> None:
    mine, other = _pages(here), _pages(there)
    if len(here) == 1 or nbytes >= _WHOLE or mine is None or other is None:
        for a, b in zip(here.tolist(), there.tolist(), strict=True):
            if op == "write":
                batch.write(ours, theirs, nbytes, src_offset=a, dst_offset=b)
            else:
                batch.read(theirs, ours, nbytes, src_offset=b, dst_offset=a)
    elif op == "write":
        batch.write_pages(nbytes, ours, mine, theirs, other)
    else:
        batch.read_pages(nbytes, theirs, other, ours, mine)


def _pages(offsets: Ints) -> Pages | None:
    """The offsets as numbered pages; ``None`` if no stride numbers them."""
    first = int(offsets.min())
    stride = max(1, int(np.gcd.reduce(offsets - first)))
    numbers = (offsets - first) // stride
    if int(numbers.max()) >= _PAGE_NUMBERS:
        return None
    return pages(numbers, stride=stride, offset=first)


def _whole_numbers(values: ArrayLike) -> Ints:
    array = np.atleast_1d(np.asarray(values))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgument("addresses and lengths must be flat lists of whole numbers")
    if array.size and (int(array.min()) < 0 or int(array.max()) >= 1 << 62):
        raise InvalidArgument("addresses and lengths must lie between 0 and 2^62")
    return array.astype(np.int64)
