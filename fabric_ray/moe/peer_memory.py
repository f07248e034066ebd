"""Memory of all ranks that each of them writes to and reads from, with counters of these writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import torch
from torch import Tensor

from fabric_ray._native import Batch, CounterRef, RegionDescriptor, Transfer
from fabric_ray.engine import SymmetricMemory, TransferEngine, pages
from fabric_ray.errors import FabricError, HandshakeError, PeerLost, TransferTimeout
from fabric_ray.moe.comm import agree


class PeerMemory:
    """A region and counters of this rank, and those of all others. All ranks make it together, with
    the same sizes.

    Args:
        engine: this rank's.
        all_gather: each rank's bytes, by rank.
        nbytes: of each rank's region.
        counters: of each rank.
        timeout: seconds after which a rank that doesn't write is given up.

    Raises:
        InvalidArgument: ranks differ in ``nbytes``.
        HandshakeError: ranks differ in ``counters``; or one could not make its memory.
    """

    def __init__(
        self,
        engine: TransferEngine,
        all_gather: Callable[[bytes], Sequence[bytes]],
        *,
        nbytes: int,
        counters: int,
        timeout: float,
    ) -> None:
        self._engine, self.nbytes, self._timeout = engine, nbytes, timeout
        self._sent: deque[Transfer] = deque()
        try:
            self._region = engine.alloc(max(nbytes, 1))
            self._counters = [engine.counter() for _ in range(counters)]
            refs = [counter.ref.to_bytes() for counter in self._counters]
            own: bytes | FabricError = msgspec.msgpack.encode(
                [self._region.descriptor().to_bytes(), *refs]
            )
        except FabricError as error:
            own = error
        regions, self._refs = [], []
        for rank, one in enumerate(agree(all_gather, own)):
            descriptor, *refs = msgspec.msgpack.decode(one or b"", type=list[bytes])
            if len(refs) != counters:
                raise HandshakeError(
                    f"rank {rank} counts writes by {len(refs)} counters, this one by {counters}; "
                    "give the same sizes on all ranks",
                    peer=f"rank {rank}",
                )
            regions.append(RegionDescriptor.from_bytes(descriptor))
            self._refs.append([CounterRef.from_bytes(ref) for ref in refs])
        self._memory = SymmetricMemory(engine, self._region, regions)

    @property
    def rank(self) -> int:
        """This rank."""
        return self._memory.rank

    @property
    def others(self) -> list[int]:
        """All other ranks, from the one behind this one on."""
        ranks = len(self._memory)
        return [(self.rank + i) % ranks for i in range(1, ranks)]

    def tensor(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """A part of this rank's region from a byte on; what peers write shows there."""
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        return self._memory.here(offset, nbytes).tensor(dtype, shape)

    def write(self, rank: int, src: int, dst: int, nbytes: int, counter: int) -> None:
        """Sends bytes of this rank's region to another rank's, and counts there when they are
        readable; with ``nbytes`` 0 it only counts. Returns at once."""
        while self._sent and self._sent[0].done():
            self._sent.popleft()
        self._sent.append(
            self._engine.write(
                self._memory.here(src, nbytes),
                self._memory.at(rank, dst, nbytes),
                imm=self._refs[rank][counter],
                timeout=self._timeout,
            )
        )

    def wait(self, counter: int, ranks: Sequence[int], writes: int = 1) -> None:
        """Waits until so many more writes of these ranks have been counted.

        Raises:
            PeerLost: a rank was lost, or did not write within the timeout.
        """
        peers = [self._memory.at(rank, 0, 0).peer for rank in ranks]
        try:
            self._counters[counter].wait(writes, writers=peers, timeout=self._timeout)
        except TransferTimeout as error:
            names = ", ".join(f"rank {rank}" for rank in ranks)
            raise PeerLost(
                f"{names} did not send within {self._timeout:g} s: {error.missing} of {writes} "
                "writes are missing; look for a rank that ended or made other calls",
                peer=names,
            ) from error

    def read_rows(self, rows: Tensor, row_nbytes: int, per_rank: int) -> tuple[Tensor, Transfer]:
        """Begins to read rows of any ranks.

        Args:
            rows: int64, of all ranks' rows behind one another.
            row_nbytes: bytes of one.
            per_rank: rows of each rank.

        Returns:
            uint8 ``[rows, row_nbytes]``, filled when the transfer is over.
        """
        found, region = self._engine.empty((len(rows), row_nbytes), torch.uint8)
        batch = Batch()
        for rank in self._memory.ranks:
            [into] = torch.where(rows // per_rank == rank)
            if len(into):
                batch.read_pages(
                    row_nbytes,
                    self._memory.at(rank, 0, self.nbytes),
                    pages((rows[into] % per_rank).numpy(), stride=row_nbytes),
                    region,
                    pages(into.numpy(), stride=row_nbytes),
                )
        return found, self._engine.submit(batch, timeout=self._timeout)

    def finish(self) -> None:
        """Waits until other ranks have what this one has sent; those that are gone are not waited
        for."""
        for transfer in self._sent:
            with suppress(FabricError):
                transfer.wait()
        self._sent.clear()
