"""What travels with an object reference: where the tensors' bytes lie, and in whose memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from fabric_ray.decoding import from_msgpack
from fabric_ray.errors import DecodeError

if TYPE_CHECKING:
    import torch

VERSION = 1
"""Of :class:`Offer`. Fields may be added to one version; readers skip what they don't know."""


class Holder(msgspec.Struct, frozen=True):
    """The process that holds the tensors, for people."""

    name: str
    """The actor's name or id, or ``driver``."""
    node: str
    pid: int

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid} on node {self.node})"


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """A tensor's bytes: contiguous, in one region."""

    region: int
    """Which of the offer's regions."""
    offset: int
    nbytes: int
    cuda: bool
    """Whether they lie in a GPU's memory."""


class Offer(msgspec.Struct, frozen=True):
    """All tensors of one object."""

    holder: Holder
    regions: tuple[bytes, ...]
    """Encoded :class:`fabric_ray.RegionDescriptor`, one for each piece of memory."""
    extents: tuple[Extent, ...]
    """One for each tensor; one without bytes has region 0 and isn't looked up."""
    version: int = VERSION

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Offer:
        """Decodes.

        Raises:
            DecodeError: no offer, or one of another version.
        """
        try:
            version = from_msgpack(data, _Versioned).version
            if version != VERSION:
                raise DecodeError(
                    f"the tensors are offered in version {version} and this process reads version "
                    f"{VERSION}; install the same fabric-ray on all nodes"
                )
            offer = from_msgpack(data, cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as cause:
            raise DecodeError(f"this is no offer of tensors: {cause}") from cause
        for extent in offer.extents:
            if extent.nbytes < 0 or extent.offset < 0 or extent.region < 0:
                raise DecodeError(f"a tensor can't lie at {extent}")
            if extent.nbytes and extent.region >= len(offer.regions):
                raise DecodeError(
                    f"a tensor lies in region {extent.region} of {len(offer.regions)}"
                )
        return offer

    def check(self, kinds: Sequence[tuple[Sequence[int], torch.dtype]]) -> None:
        """Compares it with the shapes and dtypes that came with it.

        Raises:
            DecodeError: they speak of other tensors.
        """
        if len(kinds) != len(self.extents):
            raise DecodeError(f"{len(self.extents)} tensors are offered and {len(kinds)} described")
        for extent, (shape, dtype) in zip(self.extents, kinds, strict=True):
            nbytes = math.prod(shape) * dtype.itemsize
            if nbytes != extent.nbytes:
                raise DecodeError(
                    f"a tensor of shape {tuple(shape)} and {dtype} has {nbytes} bytes, and "
                    f"{extent.nbytes} are offered"
                )


class _Versioned(msgspec.Struct):
    version: int
