"""Block maxima from rank to rank, by counted writes.

Each rank has one region that is registered once: for every partner a slot of incoming and one of
outgoing maxima, all of it twice. Rounds take turns between the halves, each with a counter of its
own. A rank begins round ``n + 1`` when it has read what round ``n`` brought, and ends it when all
its partners have begun theirs. So a writer of round ``n + 2`` knows that the half it writes
to has been read, and a count of the next round can't be taken for one of this. To that end every
partner writes in every round, if only its version.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fabric_ray.engine import Batch, CounterRef, Peer, RegionDescriptor, Transfer, TransferEngine
from fabric_ray.errors import FabricError, InvalidArgument, TransferTimeout
from fabric_ray.weights.quant.edges import RankEdges
from fabric_ray.weights.quant.errors import ExchangeFailed

_HEADER = 8
"""Bytes before the maxima of a slot: the version."""
_NONE = np.zeros(0, dtype=np.int64)
_GIVEN_UP = -1
"""In place of a version."""
_FAREWELL_S = 1.0

_Version = npt.NDArray[np.int64]
_Maxima = npt.NDArray[np.float32]


class Invitation(msgspec.Struct, frozen=True):
    """Where a rank takes maxima."""

    region: bytes
    counters: tuple[bytes, bytes]
    """Of even and of odd rounds."""
    slots: dict[int, tuple[int, int]]
    """Per partner, offset in a half and bytes."""


class EdgeExchange:
    """One rank's end of the exchange.

    Make one per rank, pass the :attr:`invitation` of all ranks to each :meth:`connect`, then call
    :meth:`run` on all ranks once for each version. After an error, close it and connect new ones.

    Args:
        engine: this rank's; ranks must not share one.
        edges: what this rank sends and gets.
    """

    def __init__(self, engine: TransferEngine, edges: RankEdges) -> None:
        self._engine = engine
        self._edges = edges
        self._incoming = _slots(edges, {p: len(ids) for p, ids in edges.receives.items()})
        self._outgoing = _slots(edges, {p: len(ids) for p, ids in edges.sends.items()})
        self._half = _end(self._incoming)
        self._region = engine.alloc(max(8, 2 * (self._half + _end(self._outgoing))))
        self._memory = self._region.numpy()
        self._counters = (engine.counter(), engine.counter())
        self._peers: dict[int, Peer] = {}
        self._batches: list[Batch] = []
        self._expected: Transfer | None = None
        self._rounds = 0
        self._broken: str | None = "isn't connected"

    @property
    def invitation(self) -> Invitation:
        """For the other ranks."""
        taken = self._region[: max(8, 2 * self._half)]
        even, odd = (counter.ref.to_bytes() for counter in self._counters)
        return Invitation(taken.descriptor().to_bytes(), (even, odd), self._incoming)

    def connect(self, invitations: Mapping[int, Invitation]) -> None:
        """Prepares the writes to all partners.

        Raises:
            InvalidArgument: a partner's invitation is missing, or made for another side.
        """
        for rank in self._edges.partners:
            invitation = invitations.get(rank)
            wanted = self._outgoing[rank][1]
            if invitation is None or invitation.slots.get(self._edges.rank, (0, 0))[1] != wanted:
                raise InvalidArgument(
                    f"rank {self._edges.rank} has {wanted} bytes for rank {rank}, which "
                    f"{'is missing' if invitation is None else 'expects another size'}; connect "
                    "all ranks of one side with the same formats"
                )
        self._batches = [Batch(), Batch()]
        for rank in self._edges.partners:
            invitation = invitations[rank]
            region = self._engine.import_region(RegionDescriptor.from_bytes(invitation.region))
            self._peers[rank] = region.peer
            offset, nbytes = invitation.slots[self._edges.rank]
            for parity, batch in enumerate(self._batches):
                source = self._outgoing_at(rank, parity)
                half = region.nbytes // 2
                batch.write(
                    self._region[source : source + nbytes],
                    region.slice(parity * half + offset, nbytes),
                    imm=CounterRef.from_bytes(invitation.counters[parity]),
                )
        self._broken = None

    def run(self, version: int, maxima: Tensor, *, timeout: float | None = None) -> None:
        """Sends this rank's maxima and takes in those of its partners.

        Args:
            version: of the push; all ranks must be at the same.
            maxima: float32 ``[edges.size]`` from
                :meth:`~fabric_ray.weights.quant.RankQuantiser.partial_maxima`; is completed.
            timeout: seconds; by default the engine's ``op_timeout``.

        Raises:
            ExchangeFailed: a partner is lost, at another version or too late; names it.
        """
        if self._broken is not None:
            raise ExchangeFailed(
                f"rank {self._edges.rank} can't exchange block maxima: its exchange "
                f"{self._broken}; make new ones on all ranks and connect them",
                ranks=(),
                version=version,
            )
        if not self._peers:
            return
        parity = self._rounds % 2
        self._fill(parity, version, maxima)
        # What fails before is given up in this round, which the partners wait for.
        self._rounds += 1
        try:
            self._move(parity, timeout)
        except BaseException as cause:
            self._end("has failed")
            if not isinstance(cause, FabricError):
                raise
            raise self._failure(version, parity, cause) from cause
        if self._late(version, parity):
            self._end("has failed")
            raise self._failure(version, parity, None)
        for rank, places in self._edges.receives.items():
            _, received = self._slot(self._incoming_at(rank, parity), len(places))
            at = torch.from_numpy(places)
            maxima[at] = torch.maximum(maxima[at], torch.from_numpy(received.copy()))

    def give_up(self) -> None:
        """Ends it before a round that partners begin or have begun: they hear of it at once, by a
        version that there is not."""
        if self._broken is None and self._peers:
            parity = self._rounds % 2
            for rank in self._peers:
                self._slot(self._outgoing_at(rank, parity), 0)[0][0] = _GIVEN_UP
            with contextlib.suppress(FabricError):
                self._engine.submit(self._batches[parity], timeout=_FAREWELL_S).wait()
        self._end("was given up")

    def close(self) -> None:
        """Ends it, and a :meth:`run` in another thread. Partners find out when they write; the
        memory goes when none of them can reach it any more."""
        self._end("is closed")

    def _end(self, why: str) -> None:
        self._broken = self._broken or why
        self._region.revoke()
        if self._expected is not None:
            self._expected.cancel()

    def _fill(self, parity: int, version: int, maxima: Tensor) -> None:
        for rank in self._peers:
            places = self._edges.sends.get(rank, _NONE)
            header, values = self._slot(self._outgoing_at(rank, parity), len(places))
            header[0] = version
            values[:] = maxima[torch.from_numpy(places)].numpy()

    def _move(self, parity: int, timeout: float | None) -> None:
        """Writes to all partners and waits until all have written."""
        sent = self._engine.submit(self._batches[parity], timeout=timeout)
        peers = list(self._peers.values())
        counter = self._counters[parity]
        self._expected = counter.expect(len(peers), writers=peers, timeout=timeout)
        if self._broken is not None:  # by another thread, which may have looked before
            self._expected.cancel()
        sent.wait()  # first: what is refused tells at once that a partner has ended its exchange
        self._expected.wait()

    def _failure(self, version: int, parity: int, cause: FabricError | None) -> ExchangeFailed:
        told = "" if isinstance(cause, TransferTimeout) else str(cause)
        named = [rank for rank, peer in self._peers.items() if peer.label in told]
        late = self._late(version, parity)
        ranks = tuple(named or late or self._peers)
        at = {rank: self._version_of(rank, parity) for rank in late}
        why = f"{cause}" if cause is not None else f"their slots say {at}"
        return ExchangeFailed(
            f"rank {self._edges.rank}, version {version}: no block maxima from rank "
            f"{', '.join(map(str, ranks))} ({why}); give the version up, then connect the ranks "
            "that live anew",
            ranks=ranks,
            version=version,
        )

    def _late(self, version: int, parity: int) -> list[int]:
        """Partners whose slots don't hold this version."""
        return [rank for rank in self._peers if self._version_of(rank, parity) != version]

    def _version_of(self, rank: int, parity: int) -> int:
        return int(self._slot(self._incoming_at(rank, parity), 0)[0][0])

    def _incoming_at(self, rank: int, parity: int) -> int:
        return parity * self._half + self._incoming[rank][0]

    def _outgoing_at(self, rank: int, parity: int) -> int:
        return 2 * self._half + parity * _end(self._outgoing) + self._outgoing[rank][0]

    def _slot(self, offset: int, count: int) -> tuple[_Version, _Maxima]:
        start = offset + _HEADER
        values = self._memory[start : start + 4 * count]
        return self._memory[offset:start].view(np.int64), values.view(np.float32)


def _slots(edges: RankEdges, counts: Mapping[int, int]) -> dict[int, tuple[int, int]]:
    """Offset and bytes of each partner's slot, one behind the other."""
    out: dict[int, tuple[int, int]] = {}
    for rank in edges.partners:
        out[rank] = _end(out), _HEADER + 4 * counts.get(rank, 0)
    return out


def _end(slots: Mapping[int, tuple[int, int]]) -> int:
    """Bytes of all slots, each aligned to its version."""
    return max((-(-(offset + nbytes) // 8) * 8 for offset, nbytes in slots.values()), default=0)
