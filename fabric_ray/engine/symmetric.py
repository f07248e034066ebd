"""Symmetric memory: the same layout on every rank of a group, so that an address is a rank and an
offset."""

from __future__ import annotations

from collections.abc import Sequence

from fabric_ray._native import Engine, PeerGroup, Region, RegionDescriptor, RemoteRegion
from fabric_ray.errors import InvalidArgument, OutOfBounds


class SymmetricMemory:
    """One region of each rank, all equally long.

    What lies where is for its users to agree on; they pass ranks and offsets around, nothing else.
    Ranks that are left out (dead, or not there yet) keep their numbers. When ranks come or go, make
    another one from the new descriptors: nothing is registered for it.

    Args:
        engine: this rank's.
        region: this rank's part.
        descriptors: of every rank's part in the order of ranks, this one's included; ``None`` for a
            rank that is left out.

    Raises:
        InvalidArgument: parts of unequal lengths, two of one engine, or this rank's isn't there.
    """

    def __init__(
        self, engine: Engine, region: Region, descriptors: Sequence[RegionDescriptor | None]
    ) -> None:
        present = {rank: d for rank, d in enumerate(descriptors) if d is not None}
        own = region.descriptor()
        mine = [rank for rank, d in present.items() if d == own]
        if len(mine) != 1:
            raise InvalidArgument(
                f"this rank's part is there {len(mine)} times; put its descriptor at its rank, once"
            )
        owners: dict[str, int] = {}
        for rank, d in present.items():
            if d.nbytes != own.nbytes:
                raise InvalidArgument(
                    f"rank {rank} has {d.nbytes} bytes and rank {mine[0]} has {own.nbytes}; "
                    "allocate as many on every rank"
                )
            other = owners.setdefault(d.owner.id, rank)
            if other != rank:
                raise InvalidArgument(
                    f"ranks {other} and {rank} are parts of one engine, whose counters couldn't "
                    "tell them apart; open an engine for each"
                )
        self._size = len(descriptors)
        self._region = region
        self._parts = {rank: engine.import_region(d) for rank, d in present.items()}
        self._rank = mine[0]
        others = [part.peer for rank, part in self._parts.items() if rank != self._rank]
        self._group = engine.peer_group(others)

    def __len__(self) -> int:
        """Ranks, those left out included."""
        return self._size

    @property
    def nbytes(self) -> int:
        """Bytes of each rank's part."""
        return self._region.nbytes

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that are there, in order."""
        return tuple(self._parts)

    @property
    def group(self) -> PeerGroup:
        """The others that are there, by rank: for barriers, and as the writers to expect."""
        return self._group

    def at(self, rank: int, offset: int, nbytes: int) -> RemoteRegion:
        """``nbytes`` bytes from ``offset`` on a rank, this one included, to be named in requests.

        None at all will do for a write that only counts.

        Raises:
            InvalidArgument: there is no such rank, or it is left out.
            OutOfBounds: the bytes don't lie inside.
        """
        part = self._parts.get(rank)
        if part is None:
            why = "is left out" if 0 <= rank < len(self) else f"is none of the {len(self)}"
            raise InvalidArgument(f"rank {rank} {why}; those that are there: {list(self.ranks)}")
        self._check(rank, offset, nbytes)
        return part.slice(offset, nbytes)

    def here(self, offset: int, nbytes: int) -> Region:
        """``nbytes`` bytes from ``offset`` of this rank's own part.

        Raises:
            OutOfBounds: the bytes don't lie inside.
        """
        self._check(self._rank, offset, nbytes)
        return self._region.slice(offset, nbytes)

    def _check(self, rank: int, offset: int, nbytes: int) -> None:
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise OutOfBounds(
                f"symmetric memory: {nbytes} bytes from {offset} on rank {rank} lie outside its "
                f"{self.nbytes} bytes",
                offset=offset,
                nbytes=nbytes,
                limit=self.nbytes,
            )
