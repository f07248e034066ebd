"""The exchanges of one rank's face, and their common membership."""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec

from fabric_ray.engine import TransferEngine
from fabric_ray.errors import FabricError, HandshakeError, InvalidArgument, PeerLost, Unsupported
from fabric_ray.moe.all_to_all import AllToAll
from fabric_ray.moe.comm import Comm, agree
from fabric_ray.moe.gather import LEAVES, ROW_NBYTES, Gather
from fabric_ray.moe.throughput import ThroughputAllToAll

_OPTIONS = struct.Struct("<d?")
_LEFT_OUT = "it has left this rank out"

AnyExchange: TypeAlias = AllToAll | ThroughputAllToAll
Made = TypeVar("Made", AllToAll, ThroughputAllToAll)


class _Membership(msgspec.Struct, array_like=True):
    """What a rank tells of its exchanges before ranks are taken back."""

    missing: list[int]
    """Ranks that take no part there."""
    staying: list[bytes]
    """Keys of exchanges with no call under way."""
    in_graphs: list[bytes]
    """Keys of exchanges that CUDA graphs have calls of."""


def used_by_graphs(ranks: Sequence[int]) -> Unsupported:
    """What is wrong with other exchanges in place of those that ranks' CUDA graphs use."""
    return Unsupported(
        f"CUDA graphs of ranks {[*ranks]} have calls of exchanges that this call would replace, "
        "and their replays would give zeros; destroy the graphs and the buffer, make another "
        "buffer on all ranks, and capture again"
    )


def _key(descriptors: Sequence[bytes | None]) -> bytes:
    """What tells an exchange from others, on all ranks that have heard the same."""
    found = hashlib.sha256()
    for one in descriptors:
        found.update(hashlib.sha256(one or b"").digest())
    return found.digest()


class Exchanges:
    """The exchanges that one rank's face makes as shapes come up; all ranks make the same.

    Membership is one for all of them: :meth:`follow` masks a rank that any of them lost in the
    others. A loss that wasn't asked for is an error in every later call, :meth:`check_whole`.

    Args:
        shrink: go on without ranks that are lost; the same on all ranks.
    """

    def __init__(
        self,
        comm: Comm,
        engine: TransferEngine | None,
        timeout: float,
        *,
        shrink: bool = False,
    ) -> None:
        self.comm = comm
        self.shrink = shrink
        self.engine = engine or TransferEngine(name=f"rank-{comm.rank()}")
        self._owned = engine is None
        self.timeout = timeout
        self._made: list[AnyExchange] = []
        self._masked: dict[int, str] = {}
        self._said: dict[int, str] = {}
        """Ranks that said themselves that they take no part any more."""
        self._asked: set[int] = set()
        """Ranks that the caller masked."""
        self._lost_first: set[int] = set()
        """Ranks that this one lost without a word of theirs."""
        self._left_out_by: set[int] = set()
        """Ranks that have told that they left this one out."""
        # Of the five above: a watchdog masks ranks while others call; not held in their calls.
        self._lock = threading.Lock()
        self._closed = False
        self._longest = 0
        """Bytes of the longest descriptor that the group has gathered; the same on all ranks."""
        self.gather: Gather | None = None
        """Gathers without the group, which no lost rank answers."""
        self._keys: dict[AllToAll, bytes] = {}
        """A name of each exchange, the same on all ranks."""
        self._in_graphs: set[bytes] = set()
        self.restored = 0
        """How many times ranks were taken back."""

    def make(self, *, checked: bool = True, **shape: Any) -> AllToAll:
        """A connected exchange; all ranks call it together.

        Args:
            checked: makes none when :meth:`check_whole` raises.

        Raises:
            InvalidArgument: a shape that can't be.
            HandshakeError: ranks disagree; the text lists in what.
            PeerLost: a rank was lost, and exchanges don't shrink.
        """
        if checked:
            self.check_whole()
        made = self._connected(AllToAll, **shape)
        for rank, cause in self.masked.items():
            if made.present[rank]:
                made.mask(rank, cause)
        return made

    def make_throughput(self, **shape: Any) -> ThroughputAllToAll:
        """As :meth:`make`, an exchange for many tokens on many nodes; all ranks take part."""
        return self._connected(ThroughputAllToAll, **shape)

    def _connected(self, kind: Callable[..., Made], **shape: Any) -> Made:
        if self._closed:
            raise InvalidArgument("this was destroyed; make another one")
        try:
            made = kind(
                self.engine,
                rank=self.comm.rank(),
                ranks=self.comm.size(),
                timeout=self.timeout,
                **shape,
            )
            options = _OPTIONS.pack(self.timeout, self.shrink)
            descriptor: bytes | FabricError = options + made.descriptor()
        except FabricError as error:
            descriptor = error
        # No group has an answer from a rank that is gone.
        by_exchange = self.gather if self.shrink or self.masked else None
        gather: Callable[[bytes], Sequence[bytes | None]] = self.comm.all_gather
        gather_long = gather
        if by_exchange is not None:
            rows = self._descriptor_rows()
            gather, gather_long = by_exchange, partial(by_exchange, rows=rows)
            most = rows * ROW_NBYTES - 1  # of agree
            if not isinstance(descriptor, FabricError) and len(descriptor) > most:
                cause = f"descriptor: got {len(descriptor)} bytes, expected at most {most}"
                descriptor = InvalidArgument(f"{cause}; make the buffer anew")
        descriptors = agree(gather_long, descriptor)
        if by_exchange is None:
            self._longest = max(self._longest, *(len(one) for one in descriptors if one))
        connected: bytes | FabricError = b""
        try:
            for rank, one in enumerate(descriptors):
                if one is not None:
                    self._check_options(rank, one)
            made.connect([one and one[_OPTIONS.size :] for one in descriptors])
        except FabricError as error:
            connected = error
        # Who isn't known yet must not be written to.
        agree(gather, connected)
        with self._lock:
            self._made.append(made)
            if isinstance(made, AllToAll):
                self._keys[made] = _key(descriptors)
        return made

    def _descriptor_rows(self) -> int:
        """Rows of :class:`Gather` for a descriptor: its length grows with the ranks and their NICs.
        Numbers in it take more bytes for some shapes than for others."""
        return -(-(self._longest * 5 // 4 + 512) // ROW_NBYTES)

    def _check_options(self, rank: int, descriptor: bytes) -> None:
        """A rank that waits longer than another is given up while it waits itself."""
        found = _OPTIONS.unpack_from(descriptor) if len(descriptor) >= _OPTIONS.size else None
        if found != (self.timeout, self.shrink):
            raise HandshakeError(
                f"ranks differ in timeout and enable_shrink: rank {rank} has {found}, this one has "
                f"{(self.timeout, self.shrink)}; give the same on all ranks",
                peer=f"rank {rank}",
            )

    def forget(self, exchanges: Sequence[AnyExchange]) -> None:
        """Closes exchanges that no rank uses any more; ranks that they lost stay lost."""
        lost = self.masked
        with self._lock:
            self._masked = lost | self._masked
            self._made = [one for one in self._made if one not in exchanges]
            self._keys = {one: key for one, key in self._keys.items() if one not in exchanges}

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of all exchanges."""
        return sum(one.nbytes for one in self._made)

    def explain(self) -> str:
        """What the buffers are for."""
        return "\n\n".join(one.explain() for one in self._made)

    def mask(self, rank: int) -> None:
        """Gives a rank up in all exchanges, those to come included."""
        if not 0 <= rank < self.comm.size() or rank == self.comm.rank():
            raise InvalidArgument(f"rank {rank} is no other rank of {self.comm.size()}")
        with self._lock:
            self._masked.setdefault(rank, "it was masked")
            self._asked.add(rank)
            self._left_out_by.discard(rank)
            made = list(self._made)
        for one in made:
            one.mask(rank)

    def lose(self, rank: int, cause: str) -> None:
        """Goes on without a rank that has said that it takes no part any more."""
        with self._lock:
            self._masked.setdefault(rank, cause)
            self._said[rank] = cause
            self._lost_first.add(rank)
            made = list(self._made)
        for one in made:
            one.mask(rank, cause)

    @property
    def masked(self) -> dict[int, str]:
        """The causes of ranks that were given up in one exchange or another, or have left this one
        out."""
        with self._lock:
            if not self._masked and all(one.is_whole for one in self._made):
                return {}
            lost = {rank: cause for one in self._made for rank, cause in self._lost_in(one)}
            told = {r for one in self._made if isinstance(one, AllToAll) for r in one.given_up_by}
            # A rank that was lost here first leaves this one out in turn.
            self._left_out_by |= told - self._lost_first - self._asked
            # One that has left is met as a lost link, too.
            causes = self._masked | lost | self._said
            return causes | dict.fromkeys(self._left_out_by, _LEFT_OUT)

    def _lost_in(self, exchange: AnyExchange) -> list[tuple[int, str]]:
        """Ranks that an exchange has lost, and why."""
        told = exchange.given_up_by if isinstance(exchange, AllToAll) else ()
        lost = [(one.rank, one.cause) for one in exchange.lost]
        self._lost_first |= {rank for rank, _ in lost} - self._left_out_by - {*told}
        return lost

    def lacking(self, received: AnyExchange | None = None) -> dict[int, str]:
        """As :attr:`masked`, without ranks that have left this one out since they sent their part
        to an exchange that has just ``received``. A device takes no such part."""
        masked = self.masked
        if received is None or received.asynchronous:
            return masked
        lost = {one.rank for one in received.lost}
        return {r: cause for r, cause in masked.items() if r in lost or r not in self._left_out_by}

    def check_whole(self, received: AnyExchange | None = None) -> None:
        """Checks that no rank was lost, unless the caller masked it or chose to go on; and that no
        rank has left this one out, whose sums would lack that rank's part (RS-1).

        Args:
            received: has just received: a rank that has left this one out since it sent its part
                is no error yet, as :meth:`lacking` says.

        Raises:
            PeerLost: a rank was lost: sums lack its part, and so would later sums.
        """
        if self.shrink:
            # First, for it finds out who has left this rank out.
            missing = self.lacking(received)
            lacking = self._left_out_by & missing.keys()
            if lacking:
                ranks = sorted(lacking)
                raise PeerLost(
                    f"ranks {ranks} have left this one out, rank {self.comm.rank()}, and sums here "
                    "lack their part; call clean_mask_buffer() (low_latency_clean_mask_buffer() of "
                    "DeepEP's Buffer) here while those ranks take this one back, or make a new "
                    "Buffer",
                    peer=f"rank {ranks[0]}",
                )
            return
        for rank, cause in self.masked.items():
            if rank not in self._asked:
                raise PeerLost(
                    f"rank {rank} takes no part any more: {cause}; sums lack its part, make a new "
                    "Buffer or AllToAll of the ranks that are left, or with a longer "
                    "timeout if it was busy",
                    peer=f"rank {rank}",
                )

    def follow(self, exchange: AllToAll, receives: bool = False) -> frozenset[int]:
        """Masks in an exchange the ranks that another one lost; all that take no part. An exchange
        that ``receives``, not on a device, takes what ranks sent before they left this one out."""
        masked, here = self.masked, exchange.present
        kept = self._left_out_by if receives and not exchange.asynchronous else ()
        for rank in (rank for rank in masked if here[rank] and rank not in kept):
            exchange.mask(rank, masked[rank])
        return frozenset(masked)

    @property
    def captured(self) -> bool:
        """Whether CUDA graphs have calls of these exchanges."""
        with self._lock:
            return any(isinstance(one, AllToAll) and one.captured for one in self._made)

    def restore(self, rank: int | None = None) -> bool:
        """Takes masked ranks back: one of them, or all. All ranks call it together, those that come
        back too. Whether anything changed. Exchanges that all ranks have, with no call under way,
        stay and connect anew, with CUDA graphs of them; see :meth:`has`. The others are gone, with
        what they had lost, and new ones are made when they are needed.

        Raises:
            Unsupported: CUDA graphs of a rank have calls of exchanges that can't stay. All ranks
                raise it, and nothing has changed.
            PeerLost: a rank doesn't answer: the group's timeout passed, or a rank ended.
            FabricError: a rank's exchanges don't connect. All are gone then, on all ranks.
        """
        stay = {key: one for one, key in self._keys.items() if one.between_exchanges()}
        me, mine = self.comm.rank(), self.masked
        in_graphs = [key for one, key in self._keys.items() if one.captured]
        own = _Membership(missing=[*mine], staying=[*stay], in_graphs=in_graphs)
        said = [
            msgspec.msgpack.decode(one, type=_Membership)
            for one in self.comm.all_gather(msgspec.msgpack.encode(own))
        ]
        pairs = [(r, missing) for r, one in enumerate(said) for missing in one.missing]
        if not any(rank is None or rank in pair for pair in pairs):
            return False
        common = set[bytes].intersection(*(set(one.staying) for one in said))
        if stuck := [r for r, one in enumerate(said) if not common.issuperset(one.in_graphs)]:
            raise used_by_graphs(stuck)
        self._in_graphs = {key for one in said for key in one.in_graphs}
        stays = [stay[key] for key in sorted(common)]
        for one in self._drop(stays):
            one.close()
        with self._lock:
            others = (r for r in mine if rank is not None and rank not in (r, me))
            self._masked = {r: mine[r] for r in others}
            self._said = {r: cause for r, cause in self._said.items() if r in self._masked}
            self._asked &= self._masked.keys()
            self._left_out_by.clear()
            self._lost_first.clear()
        self.restored += 1
        try:
            # No rank lets go while another one would take it for lost.
            self.comm.all_gather(b"")
            self._reconnect(stays)
        except FabricError as error:
            for one in self._drop():
                one.close()
            with self._lock:
                others = (r for r in range(self.comm.size()) if r != me)
                self._masked = dict.fromkeys(others, f"it could not be taken back: {error}")
            raise
        return True

    def _reconnect(self, exchanges: Sequence[AllToAll]) -> None:
        """Connects exchanges anew, on all ranks together; they have no call under way."""
        try:
            for one in exchanges:
                one.disconnect()
            descriptors: bytes | FabricError = msgspec.msgpack.encode(
                [one.descriptor() for one in exchanges]
            )
        except FabricError as error:
            descriptors = error
        said = agree(self.comm.all_gather, descriptors)
        connected: bytes | FabricError = b""
        try:
            by_rank = [msgspec.msgpack.decode(one or b"", type=list[bytes]) for one in said]
            for one, of_ranks in zip(exchanges, zip(*by_rank, strict=True), strict=True):
                one.connect(of_ranks)
        except FabricError as error:
            connected = error
        # Who isn't known yet must not be written to.
        agree(self.comm.all_gather, connected)
        for one in exchanges:
            self.follow(one)

    def has(self, exchange: AnyExchange) -> bool:
        """Whether an exchange is among those that were made: it was neither closed nor dropped."""
        with self._lock:
            return exchange in self._made

    def is_in_graphs(self, exchange: AllToAll) -> bool:
        """Whether CUDA graphs of any rank had calls of an exchange at the last :meth:`restore`."""
        return self._keys.get(exchange) in self._in_graphs

    def leave(self) -> None:
        """Frees the buffers when other ranks have what this one has for them, or are given up. They
        needn't be here, and give this one up when they wait for it."""
        if self._closed:
            return
        self._closed = True
        for one in self._drop():
            # Don't wait for a call of another thread.
            with suppress(InvalidArgument):
                one.finish()
            one.close()
        if self._owned:
            self.engine.close()

    def _drop(self, stays: Collection[AllToAll] = ()) -> list[AllToAll]:
        """Drops all exchanges but those that stay, and returns them; none reports ranks that leave
        it from now on."""
        with self._lock:
            made = self._made
            self._made = [one for one in made if one in stays]
            self._keys = {one: key for one, key in self._keys.items() if one in stays}
        if self.gather is not None and not self.gather.is_one_of(stays):
            self.gather = None
        for one in made:
            one.expect_departures()
        return [one for one in made if isinstance(one, AllToAll) and one not in stays]

    def close(self) -> None:
        """Waits for the device, and until all ranks are here, or have what this one has for them if
        one is masked, and frees the buffers.

        Raises:
            FabricError: what went wrong on the device; all is freed then, too.
        """
        if self._closed:
            return
        self._closed = True
        wrong: list[FabricError] = []
        # The throughput exchange's calls return when their work is done.
        exchanges = [one for one in self._made if isinstance(one, AllToAll)]
        for one in self._made:
            try:
                one.check()
            except FabricError as error:
                wrong.append(error)
            one.expect_departures()
        try:
            if self.shrink and self.gather is not None:
                with suppress(FabricError):  # ranks that gave this one up don't come to the group
                    self.gather(LEAVES)
            elif not self.masked:
                self.comm.all_gather(b"")
        finally:
            for one in exchanges:
                # Don't wait for a call of another thread.
                with suppress(InvalidArgument):
                    one.finish()
            self._made.clear()
            self._keys.clear()
            if self._owned:
                self.engine.close()
        if wrong:
            raise wrong[0]
