"""The sending end of a stream of named tensors: the same buckets to several receivers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from fabric_ray.engine import (
    CounterRef,
    EngineAddress,
    Region,
    RegionDescriptor,
    Transfer,
    TransferEngine,
)
from fabric_ray.errors import FabricError, InvalidArgument, WeightSyncError
from fabric_ray.integrations.bucket_header import (
    ALIGN,
    GAVE_UP,
    REPLY_BYTES,
    SLOTS,
    BucketHeader,
    Invitation,
    Piece,
    Reply,
    Waits,
    slot_bytes,
    write_header,
)
from fabric_ray.tensors import resolved, wait_for_kernels

if TYPE_CHECKING:
    import torch


class Outbox:
    """Streams tensors to receivers, bucket by bucket, one pass after another.

    A receiver that fails gets no further buckets of a pass; the others get all of them.
    :meth:`finish` names the failed receivers. :meth:`put` copies a tensor, so that its memory can
    be reused at once.

    Args:
        engine: sends.
        bucket: bytes of a bucket; two are kept in host memory.
        timeout: seconds that receivers may take for a bucket, all at the same time.
    """

    def __init__(self, engine: TransferEngine, bucket: int, *, timeout: float = 300.0) -> None:
        self._engine = engine
        self._bucket = bucket
        self._timeout = timeout
        self._slot = slot_bytes(bucket)
        self._memory: Region | None = None
        self.begin([])

    def begin(self, invitations: Sequence[Invitation], version: int | None = None) -> None:
        """Begins a pass to these receivers; without receivers, tensors are accepted and dropped.

        Raises:
            InvalidArgument: a receiver has buckets of another size.
        """
        self._to = []
        for invitation in invitations:
            if invitation.bucket != self._bucket:
                raise InvalidArgument(
                    f"{invitation.receiver} has buckets of {invitation.bucket} bytes, expected the "
                    f"sender's {self._bucket}; give both the same size"
                )
        if invitations and self._memory is None:
            self._memory = self._engine.alloc(SLOTS * self._slot)
        self._version, self._index = version, 0
        self._to = [_Receiver(self._engine, each) for each in invitations]
        self._replies: dict[bytes, Reply] = {r.counters[0].to_bytes(): r.reply() for r in self._to}
        self._empty()

    @property
    def sent(self) -> int:
        """Buckets of this pass that have left."""
        return self._index

    def put(self, name: str, tensor: torch.Tensor) -> Waits:
        """Adds a tensor; sends the bucket that is full by then."""
        if not self._to:
            return
        import torch

        # A GPU's tensor is copied behind the kernels of its stream.
        if tensor.device.type == "cpu":
            wait_for_kernels([tensor])
        data = resolved(f"`{name}`", tensor).contiguous().reshape(-1).view(torch.uint8)
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        # In one piece if it can be: then it is used where it lies.
        if data.numel() > self._room(name, shape) and self._pieces:
            yield from self._send()
        start, more = 0, True
        while more:
            room = self._room(name, shape)
            if room <= 0:
                if not self._pieces:
                    raise InvalidArgument(f"`{name}` doesn't fit any bucket; give larger ones")
                yield from self._send()
                continue
            nbytes = min(room, data.numel() - start)
            self._add(Piece(name, dtype, shape, self._at, nbytes, start), data)
            start += nbytes
            more = start < data.numel()

    def finish(self) -> Waits:
        """Sends the rest; over when every receiver has used all of it.

        Raises:
            WeightSyncError: some haven't; ``failed`` names them.
        """
        if not self._to:
            return
        yield from self._send(last=True)
        yield from self._used(self._index)
        for receiver in self._to:
            yield from receiver.wrote(0)
        failed = {r.name: r.failed for r in self._to if r.failed}
        if failed:
            causes = "; ".join(f"{name}: {cause}" for name, cause in failed.items())
            raise WeightSyncError(
                f"weights did not reach {' and '.join(failed)}: {causes}",
                version=self._version,
                failed=failed,
            )

    def fail(self, cause: str) -> Waits:
        """Tells all receivers that nothing more comes, and why."""
        self._empty()
        if self._to:
            yield from self._send(last=True, error=cause)

    def close(self) -> None:
        """Gives the memory back."""
        self._to, self._memory = [], None

    def _add(self, piece: Piece, data: torch.Tensor) -> None:
        end = piece.offset + piece.nbytes
        self._open()[piece.offset : end].copy_(data[piece.start : piece.start + piece.nbytes])
        self._pieces.append(piece)
        self._said += len(msgspec.msgpack.encode(piece))
        self._at = -(-end // ALIGN) * ALIGN

    def _open(self) -> torch.Tensor:
        """The slot that is being filled."""
        assert self._memory is not None
        at = self._index % SLOTS * self._slot
        return self._memory.tensor()[at : at + self._slot]

    def _empty(self) -> None:
        """Nothing is in the bucket yet."""
        self._at = ALIGN
        self._pieces: list[Piece] = []
        self._said: int = 1024 + len(msgspec.msgpack.encode(self._replies))

    def _room(self, name: str, shape: Sequence[int]) -> int:
        """Bytes left for a piece of this tensor, beside the header that names it."""
        named = len(name.encode()) + 9 * len(shape) + 64
        return self._slot - ALIGN - self._at - self._said - named

    def _send(self, *, last: bool = False, error: str | None = None) -> Waits:
        """Sends the bucket, and waits until the next can be filled."""
        header = BucketHeader(
            self._index,
            self._version,
            self._pieces,
            self._replies,
            last,
            error and error[:500],
        )
        nbytes = write_header(self._open(), self._at, header)
        assert self._memory is not None
        at = self._index % SLOTS * self._slot
        yield from self._used(self._index - SLOTS + 1)
        for receiver in self._to:
            receiver.write(self._memory[at : at + nbytes], self._index, self._timeout)
        self._index += 1
        self._replies = {}
        self._empty()
        for receiver in self._to:
            yield from receiver.wrote(1)

    def _used(self, buckets: int) -> Waits:
        """Until each receiver has used so many buckets, or failed; the timeout is of all."""
        for receiver in self._to:
            receiver.expect_use(buckets, self._timeout)
        for receiver in self._to:
            yield from receiver.used(buckets, self._timeout)


class _Receiver:
    """One receiver, as the sender sees it."""

    def __init__(self, engine: TransferEngine, invitation: Invitation) -> None:
        self.name = invitation.receiver
        self.failed: str | None = None
        self.counters = [CounterRef.from_bytes(data) for data in invitation.counters]
        self._engine = engine
        self._peer = engine.peer(EngineAddress.from_bytes(invitation.address))
        self._slots = engine.import_region(RegionDescriptor.from_bytes(invitation.region))
        self._said = engine.alloc(REPLY_BYTES)
        self._freed = engine.counter()
        self._expected: Transfer | None = None
        self._used = 0
        self._writes: list[Transfer] = []
        engine.connect(self._peer)

    def reply(self) -> Reply:
        return Reply(self._said.descriptor().to_bytes(), self._freed.ref.to_bytes())

    def write(self, bucket: Region, index: int, timeout: float) -> None:
        """Writes a bucket into its slot."""
        if self.failed:
            return
        at = index % SLOTS * (self._slots.nbytes // SLOTS)
        slot, imm = self._slots[at : at + bucket.nbytes], self.counters[index % SLOTS]
        try:
            self._writes.append(self._engine.write(bucket, slot, imm=imm, timeout=timeout))
        except FabricError as error:
            self.failed = str(error)

    def wrote(self, under_way: int) -> Waits:
        """Until no more than so many buckets are under way to it."""
        while len(self._writes) > under_way:
            transfer = self._writes.pop(0)
            yield transfer
            self._see(transfer)

    def expect_use(self, buckets: int, timeout: float) -> None:
        """Starts the timeout of :meth:`used`, unless it runs."""
        if not self.failed and self._used < buckets and self._expected is None:
            self._expected = self._freed.expect(1, writers=[self._peer], timeout=timeout)

    def used(self, buckets: int, timeout: float) -> Waits:
        """Until it has used so many buckets, or failed."""
        while not self.failed and self._used < buckets:
            self.expect_use(buckets, timeout)
            assert self._expected is not None
            freed, self._expected = self._expected, None
            yield freed
            self._see(freed)
            if not self.failed and self._said.numpy()[GAVE_UP]:
                self.failed = "it gave up; its own error says why"
            self._used += 1

    def _see(self, transfer: Transfer) -> None:
        if error := transfer.exception():
            self.failed = self.failed or str(error)
