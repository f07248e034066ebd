"""The receiving end of a stream of named tensors."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import suppress
from typing import TYPE_CHECKING

from fabric_ray.engine import (
    CounterRef,
    EngineAddress,
    Region,
    RegionDescriptor,
    Transfer,
    TransferEngine,
)
from fabric_ray.errors import DecodeError, FabricError, NotQuiesced, WeightSyncError
from fabric_ray.integrations.bucket_header import (
    FREE,
    GAVE_UP,
    SLOTS,
    BucketHeader,
    Invitation,
    Named,
    Piece,
    Reply,
    read_header,
    slot_bytes,
)

if TYPE_CHECKING:
    import torch

# A peer on this host lets go within microseconds, unless it is stopped.
_QUIESCE_S = 2.0
_ANSWER_S = 30.0
# Timeouts that a bucket may take: the sender may wait for another receiver, then for a tensor.
_TIMEOUTS = 2


class Inbox:
    """Receives one stream of tensors after another into two slots of host memory.

    Args:
        engine: the receiver's.
        bucket: bytes of a slot.
        receiver: this receiver's name, for senders' errors.
        timeout: seconds that the sender may take for a bucket. It may wait for another receiver as
            long before.
    """

    def __init__(
        self, engine: TransferEngine, bucket: int, *, receiver: str, timeout: float = 300.0
    ) -> None:
        self._engine = engine
        self._bucket = bucket
        self._receiver = receiver
        self._timeout = timeout
        self._slot = slot_bytes(bucket)
        self._memory: Region | None = None
        self._region: Region | None = None
        self._answer: _Answer | None = None

    def invite(self) -> Invitation:
        """Opens the slots for one stream: what a sender needs to know.

        Memory stays from stream to stream; its key doesn't, so that nothing late of an earlier
        stream can land (MR-2).
        """
        self.shut()
        if self._memory is None:
            self._memory = self._engine.alloc(SLOTS * self._slot)
        self._region = self._engine.register(self._memory.numpy())
        self._counters = [self._engine.counter() for _ in range(SLOTS)]
        return Invitation(
            self._receiver,
            self._engine.address.to_bytes(),
            self._region.descriptor().to_bytes(),
            tuple(counter.ref.to_bytes() for counter in self._counters),
            self._bucket,
        )

    def receive(
        self, sender: bytes, version: int | None = None
    ) -> Generator[Transfer | Named, None, None]:
        """Yields what is to be waited for, and tensors as they come.

        A tensor is a view of a slot: it is good until the next is asked for. One that is larger
        than a bucket is put together in memory of its own.

        Args:
            sender: the engine's address.
            version: the one that is expected, if any is.

        Raises:
            WeightSyncError: the sender failed; it says why. Or it sends another version.
            FabricError: it was lost, or was silent for too long.
        """
        assert self._memory is not None
        peer = self._engine.peer(EngineAddress.from_bytes(sender))
        self._engine.connect(peer)
        parts, index, over = _Parts(), 0, False
        answer: _Answer | None = None
        try:
            while not over:
                counter = self._counters[index % SLOTS]
                patience = _TIMEOUTS * self._timeout
                arrival = counter.expect(1, writers=[peer], timeout=patience)
                yield arrival
                arrival.result()
                slot = self._memory.tensor()[index % SLOTS * self._slot :][: self._slot]
                header = read_header(slot)
                if header.index != index:
                    raise DecodeError(f"bucket {header.index} came in place of bucket {index}")
                if answer is None:
                    reply = header.replies.get(self._counters[0].ref.to_bytes())
                    if reply is None:
                        raise DecodeError("the first header names no way to answer this receiver")
                    answer = self._answer = _Answer(self._engine, reply)
                _check(header, version)
                for piece in header.pieces:
                    if (tensor := parts.join(slot, piece)) is not None:
                        yield piece.name, tensor
                if header.last:
                    parts.end()
                freed = answer.give(FREE)
                yield freed
                freed.result()
                over, index = header.last, index + 1
        finally:
            self.shut()
            if answer is not None and not over:
                with suppress(FabricError):
                    answer.give(GAVE_UP)

    def close(self) -> None:
        """Gives the memory back."""
        self.shut()
        self._memory = self._answer = None

    def shut(self) -> None:
        """Nothing can be written to the slots any more."""
        region, self._region = self._region, None
        if region is None:
            return
        try:
            region.deregister(timeout=_QUIESCE_S)
        except NotQuiesced:
            # A sender may still write there: the engine keeps that memory; allocate new memory.
            self._memory = None


def _check(header: BucketHeader, version: int | None) -> None:
    if header.error:
        raise WeightSyncError(
            f"the sender of weights failed: {header.error}", version=header.version
        )
    if None not in (version, header.version) and version != header.version:
        raise WeightSyncError(
            f"weights of version {header.version} came where {version} is expected; start both "
            "ends of an update with the same version",
            version=header.version,
        )


class _Answer:
    """The receiver's word to the sender."""

    def __init__(self, engine: TransferEngine, reply: Reply) -> None:
        self._engine = engine
        self._byte = engine.alloc(1)
        self._byte.numpy()[0] = 1
        self._theirs = engine.import_region(RegionDescriptor.from_bytes(reply.region))
        self._counter = CounterRef.from_bytes(reply.counter)

    def give(self, what: int) -> Transfer:
        return self._engine.write(
            self._byte, self._theirs[what : what + 1], imm=self._counter, timeout=_ANSWER_S
        )


class _Parts:
    """A tensor that comes in several buckets."""

    def __init__(self) -> None:
        self._first: Piece | None = None
        self._whole: torch.Tensor | None = None
        self._got = 0

    def join(self, slot: torch.Tensor, piece: Piece) -> torch.Tensor | None:
        """The tensor, if it is complete with this piece.

        Raises:
            DecodeError: the piece can't be one of this slot and this tensor.
        """
        dtype, nbytes = _form(piece)
        if not 0 <= piece.offset <= piece.offset + piece.nbytes <= len(slot):
            raise DecodeError(f"`{piece.name}` lies outside its bucket")
        data = slot[piece.offset : piece.offset + piece.nbytes]
        try:
            if piece.nbytes == nbytes and self._first is None:
                return data.view(dtype).view(piece.shape)
            return self._add(data, piece, dtype, nbytes)
        except RuntimeError as error:
            raise DecodeError(f"`{piece.name}` can't be what its header says: {error}") from error

    def _add(
        self, data: torch.Tensor, piece: Piece, dtype: torch.dtype, nbytes: int
    ) -> torch.Tensor | None:
        import torch

        if self._first is None:
            self._first, self._got = piece, 0
            self._whole = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        whole, first = self._whole, self._first
        same = (piece.name, piece.dtype, piece.shape) == (first.name, first.dtype, first.shape)
        if whole is None or not same or piece.start != self._got:
            raise DecodeError(f"a part of `{piece.name}` came out of order")
        if piece.start + piece.nbytes > nbytes:
            raise DecodeError(
                f"`{piece.name}` can't be what its header says: its parts are too long"
            )
        whole[piece.start : piece.start + piece.nbytes] = data
        self._got += piece.nbytes
        if self._got < nbytes:
            return None
        self._first = self._whole = None
        return whole.view(dtype).view(piece.shape)

    def end(self) -> None:
        """
        Raises:
            DecodeError: a tensor lacks some of its parts.
        """
        if self._first is not None:
            raise DecodeError(f"the rest of `{self._first.name}` never came")


def _form(piece: Piece) -> tuple[torch.dtype, int]:
    """A tensor's dtype and bytes, by a header that may say anything."""
    import torch

    dtype = getattr(torch, piece.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise DecodeError(f"`{piece.name}` is of dtype {piece.dtype!r}, which there is not")
    if min(piece.shape, default=0) < 0:
        raise DecodeError(f"`{piece.name}` is of shape {piece.shape}, which can't be")
    return dtype, math.prod(piece.shape) * dtype.itemsize
