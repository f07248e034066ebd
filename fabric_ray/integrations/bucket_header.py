"""Buckets of a stream of named tensors, each with a header that lists its tensors.

One write carries a bucket: a prefix of fixed size, tensors' bytes, the header. Each receiver has
two slots for buckets; while it reads one, the next arrives in the other. Writes may overtake each
other, so each slot has its own counter.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from fabric_ray.decoding import from_msgpack
from fabric_ray.engine import Transfer
from fabric_ray.errors import DecodeError, FabricError, InvalidArgument

if TYPE_CHECKING:
    import torch

SLOTS = 2
FREE, GAVE_UP = 0, 1
"""Bytes of a reply: a slot is free; the receiver has failed."""
REPLY_BYTES = 2
ALIGN = 256
"""Alignment of tensors, and size of the prefix, in bytes."""
MIN_BUCKET = 4096


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A tensor, or a part of one that is larger than a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Offset in the slot, in bytes."""
    nbytes: int
    start: int
    """Offset in the tensor, in bytes."""


class Reply(msgspec.Struct, frozen=True):
    """Where a receiver writes its replies: one byte per slot."""

    region: bytes
    counter: bytes


class BucketHeader(msgspec.Struct, frozen=True):
    """Describes the contents of a bucket."""

    index: int
    """Index of the bucket in its pass, from 0."""
    version: int | None
    pieces: list[Piece]
    replies: dict[bytes, Reply]
    """Only in the first bucket, by the receivers' first counters."""
    last: bool
    error: str | None = None
    """Why the pass ends early, if it does."""


class Invitation(msgspec.Struct, frozen=True):
    """What a receiver gives its sender: the slots and the counters of their buckets."""

    receiver: str
    """Name, for errors."""
    address: bytes
    region: bytes
    counters: tuple[bytes, ...]
    bucket: int
    """Bytes of one bucket."""

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Invitation:
        try:
            return from_msgpack(data, cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DecodeError(f"not an invitation to send weights: {error}") from error


def slot_bytes(bucket: int) -> int:
    """Bytes of a slot: the prefix and a bucket.

    Raises:
        InvalidArgument: the bucket is too small.
    """
    if bucket < MIN_BUCKET:
        raise InvalidArgument(f"bucket must be >= {MIN_BUCKET} bytes, got {bucket}")
    return ALIGN + bucket


def read_header(slot: torch.Tensor) -> BucketHeader:
    """The header of a bucket that has arrived.

    Raises:
        DecodeError: the header is malformed.
    """
    head = slot[:16].numpy().view("<u8")
    start, nbytes = int(head[0]), int(head[1])
    if start + nbytes > len(slot):
        raise DecodeError("bucket header lies outside its slot")
    try:
        data = slot[start : start + nbytes].numpy().tobytes()
        return from_msgpack(data, BucketHeader)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DecodeError(f"bucket header is malformed: {error}") from error


def write_header(slot: torch.Tensor, start: int, header: BucketHeader) -> int:
    """Writes the header at ``start``, and its position in the prefix; returns the bucket's end."""
    import numpy as np

    data = msgspec.msgpack.encode(header)
    view = slot.numpy()
    view[:16].view("<u8")[:] = (start, len(data))
    view[start : start + len(data)] = np.frombuffer(data, dtype=np.uint8)
    return start + len(data)


Named: TypeAlias = "tuple[str, torch.Tensor]"
Waits: TypeAlias = Generator[Transfer, None, None]
"""A generator of transfers: its caller waits for each, blocking or on an event loop."""


def settle(steps: Iterable[Transfer]) -> None:
    """Waits for each transfer, blocking; errors are left to the generator."""
    for transfer in steps:
        with suppress(FabricError):
            transfer.wait()


async def settle_async(steps: Iterable[Transfer]) -> None:
    """Waits for each transfer on an event loop; errors are left to the generator."""
    for transfer in steps:
        with suppress(FabricError):
            await transfer
