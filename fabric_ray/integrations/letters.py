"""What a stream of named tensors is cut into: buckets, each with a letter that says what it holds.

A bucket is written in one piece: a head of fixed size, tensors' bytes, the letter. Each receiver
has two slots for buckets; while it reads one, the next arrives in the other. Writes may overtake
each other, so each slot has a counter of its own.
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
"""Bytes of a reply: a slot is free; there is no use in sending more."""
REPLY_BYTES = 2
ALIGN = 256
"""Tensors begin at multiples of so many bytes; so many are the head."""
MIN_BUCKET = 4096


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A tensor, or a part of one that is larger than a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Where it lies in the slot, in bytes."""
    nbytes: int
    start: int
    """Which of the tensor's bytes it begins with."""


class Reply(msgspec.Struct, frozen=True):
    """Where a receiver says that a slot is free, or that it gives up: a byte for each."""

    region: bytes
    counter: bytes


class Letter(msgspec.Struct, frozen=True):
    """What a bucket holds."""

    index: int
    """Buckets before it."""
    version: int | None
    pieces: list[Piece]
    replies: dict[bytes, Reply]
    """In the first alone, by the receivers' first counters."""
    last: bool
    error: str | None = None
    """Why nothing comes after it, if not because all was sent."""


class Invitation(msgspec.Struct, frozen=True):
    """A receiver, to whoever is to send: where its slots are, and what counts their buckets."""

    who: str
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
    """Bytes of a slot: the head and a bucket.

    Raises:
        InvalidArgument: too small a bucket.
    """
    if bucket < MIN_BUCKET:
        raise InvalidArgument(f"a bucket of {bucket} bytes is too small; give {MIN_BUCKET} or more")
    return ALIGN + bucket


def read_letter(slot: torch.Tensor) -> Letter:
    """The letter of a bucket that has arrived.

    Raises:
        DecodeError: it isn't intact.
    """
    head = slot[:16].numpy().view("<u8")
    start, nbytes = int(head[0]), int(head[1])
    if start + nbytes > len(slot):
        raise DecodeError("a bucket's letter lies outside its slot")
    try:
        data = slot[start : start + nbytes].numpy().tobytes()
        return from_msgpack(data, Letter)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DecodeError(f"a bucket came with a broken letter: {error}") from error


def write_letter(slot: torch.Tensor, start: int, letter: Letter) -> int:
    """Puts it at ``start``, and where it is in the head; returns where the bucket ends."""
    import numpy as np

    data = msgspec.msgpack.encode(letter)
    view = slot.numpy()
    view[:16].view("<u8")[:] = (start, len(data))
    view[start : start + len(data)] = np.frombuffer(data, dtype=np.uint8)
    return start + len(data)


Named: TypeAlias = "tuple[str, torch.Tensor]"
Waits: TypeAlias = Generator[Transfer, None, None]
"""Steps that have to wait: whoever runs them waits for each transfer, in its own way."""


def settle(steps: Iterable[Transfer]) -> None:
    """Runs steps, blocking; how a transfer ended is for the steps to see."""
    for transfer in steps:
        with suppress(FabricError):
            transfer.wait()


async def settle_async(steps: Iterable[Transfer]) -> None:
    """Runs steps on an event loop."""
    for transfer in steps:
        with suppress(FabricError):
            await transfer
