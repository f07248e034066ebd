"""The sides of transfers: which regions their descriptors lie in, and the copies between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray

from fabric_ray.compat.addresses import AddressSpace, Ints, Locations, Op, R, add_copies
from fabric_ray.compat.nixl.metadata import Remote
from fabric_ray.compat.nixl.status import as_nixl_errors, nixlInvalidParamError, nixlNotFoundError
from fabric_ray.engine import Batch, Region, RemoteRegion
from fabric_ray.errors import OutOfBounds

Indices = Sequence[int] | NDArray[Any] | None
"""Numbers of descriptors; ``None`` for all."""


class Prepared(Generic[R]):
    """Runs of blocks: block ``i`` of a run begins ``i * stride`` bytes after its first.

    Blocks are numbered through all runs and never written out, for there may be millions.

    Args:
        owner: the agent whose memory it is; ``None`` for the side that posts.
        space: the agent's memory.
        rows: (address, bytes, device), or (address, bytes, device, stride, count).
        remote: the owner, if its metadata was loaded.

    Raises:
        nixlNotFoundError: memory that the agent hasn't registered, or not told of.
        nixlInvalidParamError: rows of another form.
    """

    def __init__(
        self,
        owner: str | None,
        space: AddressSpace[R],
        rows: NDArray[Any],
        remote: Remote | None = None,
    ) -> None:
        self.owner, self.remote = owner, remote
        self.space: AddressSpace[R] = space
        if rows.ndim != 2 or rows.shape[1] not in (3, 5):
            raise nixlInvalidParamError("descriptors must be an Nx3 or an Nx5 array")
        if rows.dtype.kind not in "iu" or (rows.size and int(rows.max()) >= 1 << 62):
            raise nixlInvalidParamError("descriptors are whole numbers below 2^62")
        table = rows.astype(np.int64)
        one = np.ones(len(table), dtype=np.int64)
        self._nbytes = table[:, 1]
        self._stride, count = (table[:, 3], table[:, 4]) if table.shape[1] == 5 else (one, one)
        if (count < 1).any():
            raise nixlInvalidParamError("a run of blocks has one at least")
        self._ends = np.cumsum(count)
        whose = "this agent" if owner is None else f"agent {owner!r}"
        spans = (count - 1) * self._stride + self._nbytes
        self._at = Locations(np.zeros_like(one), np.zeros_like(one))
        some = self._nbytes > 0  # an empty tensor lies nowhere
        try:
            self._at.region[some], self._at.offset[some] = space.find(
                table[some, 0], spans[some], whose
            )
        except OutOfBounds as error:
            raise nixlNotFoundError(str(error)) from error

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def take(self, indices: Indices = None) -> tuple[Locations, Ints]:
        """Where these blocks lie, and how long they are.

        Raises:
            nixlInvalidParamError: there is no such block.
        """
        numbers = np.arange(len(self)) if indices is None else np.asarray(indices)
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            raise nixlInvalidParamError("indices must be a flat list of whole numbers")
        numbers = numbers.astype(np.int64)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < len(self):
            raise nixlInvalidParamError(f"an index lies outside the {len(self)} descriptors")
        run = np.searchsorted(self._ends, numbers, side="right")
        block = numbers - np.r_[np.int64(0), self._ends][run]
        offset = self._at.offset[run] + block * self._stride[run]
        return Locations(self._at.region[run], offset), self._nbytes[run]


class nixl_prepped_dlist_handle:
    """A prepared list of descriptors."""

    def __init__(self, side: Prepared[Any]) -> None:
        self._side: Prepared[Any] | None = side

    def release(self) -> None:
        """Transfers that were made of it are not affected."""
        self._side = None


def copies(
    op: Op,
    local: tuple[Prepared[Region], Indices],
    remote: tuple[Prepared[RemoteRegion], Indices],
) -> tuple[Batch, int, int, list[Region]]:
    """The copies between descriptors of two sides, how many bytes and descriptors they are, and
    the local regions.

    Raises:
        nixlInvalidParamError: descriptors that don't fit one another.
    """
    here, nbytes = local[0].take(local[1])
    there, lengths = remote[0].take(remote[1])
    if not len(nbytes) or not np.array_equal(nbytes, lengths):
        raise nixlInvalidParamError(
            f"{len(nbytes)} local and {len(lengths)} remote descriptors don't fit: as many, of "
            "the same lengths, and one at least are needed"
        )
    batch = Batch()
    sides = (local[0].space.regions, here), (remote[0].space.regions, there)
    with as_nixl_errors():
        add_copies(batch, op, *sides, nbytes)
    used = [local[0].space.regions[i] for i in np.unique(here.region[nbytes > 0])]
    return batch, int(nbytes.sum()), len(nbytes), used
