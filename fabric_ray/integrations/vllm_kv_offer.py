"""A prefiller's offer, put together from those of its workers, as text that requests carry."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fabric_ray.decoding import from_msgpack
from fabric_ray.errors import DecodeError, InvalidArgument

# An offer begins with a mark and a version; the core checks them.
_HEAD = 4
# Layouts of thousands of layers stay far below; what claims more is no offer.
_MOST_BYTES = 1 << 26


def joined(offers: Sequence[bytes]) -> bytes:
    """One offer of an instance whose workers each offer their own ranks.

    Raises:
        InvalidArgument: they are of different instances, or of none.
        DecodeError: one isn't an offer.
    """
    if not offers:
        raise InvalidArgument("no worker has offered anything; give the prefiller's workers first")
    heads = {offer[:_HEAD] for offer in offers}
    bodies = [_body(offer) for offer in offers]
    ends = [end for body in bodies for end in body["ends"]]
    if len(heads) > 1 or any({**body, "ends": []} != {**bodies[0], "ends": []} for body in bodies):
        raise InvalidArgument(
            "workers of one prefiller offer different caches; start them with one configuration"
        )
    return heads.pop() + msgspec.msgpack.encode({**bodies[0], "ends": ends})


def _body(offer: bytes) -> dict[str, Any]:
    try:
        body = from_msgpack(offer[_HEAD:], dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DecodeError(f"not a prefiller's offer: {error}") from error
    if not isinstance(body.get("ends"), list):
        raise DecodeError("not a prefiller's offer: it names no ends")
    return body


def instance(offers: Mapping[int, bytes]) -> str:
    """As :func:`joined`, of workers by their ranks, as text."""
    return to_text(joined([offers[rank] for rank in sorted(offers)]))


def to_text(offer: bytes) -> str:
    """For ``kv_transfer_params``, which travel as JSON."""
    return base64.b64encode(zlib.compress(offer, 9)).decode()


def from_text(text: object) -> bytes:
    """
    Raises:
        DecodeError: it isn't an offer's text.
    """
    try:
        if not isinstance(text, str):
            raise TypeError(f"a {type(text).__name__}, not a text")
        packed = base64.b64decode(text.encode(), validate=True)
        unpack = zlib.decompressobj()
        offer = unpack.decompress(packed, _MOST_BYTES)
        if not unpack.eof:
            raise ValueError("it is cut short, or too long")
    except (TypeError, ValueError, binascii.Error, zlib.error) as error:
        raise DecodeError(
            f"kv_transfer_params has a `remote_offer` that isn't one ({error}); hand on what the "
            "prefiller's response had"
        ) from None
    return offer
