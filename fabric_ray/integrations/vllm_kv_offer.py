"""A prefiller's offer, put together from those of its workers, as text that requests carry."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from fabric_ray.decoding import from_msgpack
from fabric_ray.errors import DecodeError, InvalidArgument
from fabric_ray.kvcache import CacheLayout
from fabric_ray.kvcache.errors import LayoutMismatch

# An offer begins with a mark and a version; the core checks them.
_HEAD = 4
# Layouts of thousands of layers stay far below; what claims more is no offer.
_MOST_BYTES = 1 << 26
_MOST_STAGES = 64


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


def instance(offers: Mapping[tuple[int, int], bytes]) -> str:
    """The offer of an instance, whose workers offer by stage of the pipeline and rank in it."""
    stages = groupby(sorted(offers), key=lambda worker: worker[0])
    return to_text([joined([offers[worker] for worker in stage]) for _, stage in stages])


def check_stages(stages: Sequence[bytes], layout: CacheLayout) -> None:
    """Checks that each layer of a decoder comes from one stage of the prefiller (RS-1). Without
    stages the core compares all layers.

    Raises:
        LayoutMismatch: layers that no stage has, or several.
        DecodeError: one isn't an offer.
    """
    offered: Counter[tuple[str, int]] = Counter()
    has_stages = layout.is_stage or len(stages) > 1
    for stage in stages:
        try:
            theirs = msgspec.convert(_body(stage)["layouts"], list[CacheLayout])[0]
        except (KeyError, IndexError, msgspec.ValidationError) as error:
            raise DecodeError(f"not a prefiller's offer: it has no layouts ({error})") from error
        has_stages |= theirs.is_stage
        offered.update((group.name, layer) for group in theirs.groups for layer in group.layers)
    for group in layout.groups if has_stages else ():
        wrong = {layer: offered[group.name, layer] for layer in group.layers}
        wrong = {layer: count for layer, count in wrong.items() if count != 1}
        if wrong:
            layer, count = next(iter(wrong.items()))
            raise LayoutMismatch(
                f"the caches don't fit: of {len(stages)} stages of the prefiller {count or 'none'} "
                f"offers layer {layer} of group {group.name}, and {len(wrong)} layers of it don't "
                "come from one stage each; start both ends with the same model and cache"
            )


def to_text(stages: Sequence[bytes]) -> str:
    """The offers of all stages, for ``kv_transfer_params``, which travel as JSON."""
    return base64.b64encode(zlib.compress(msgspec.msgpack.encode(list(stages)), 9)).decode()


def from_text(text: object) -> tuple[bytes, ...]:
    """The offers of a prefiller's stages.

    Raises:
        DecodeError: it isn't an offer's text.
    """
    try:
        if not isinstance(text, str):
            raise TypeError(f"a {type(text).__name__}, not a text")
        packed = base64.b64decode(text.encode(), validate=True)
        unpack = zlib.decompressobj()
        encoded = unpack.decompress(packed, _MOST_BYTES)
        if not unpack.eof:
            raise ValueError("it is cut short, or too long")
        stages = from_msgpack(encoded, tuple[bytes, ...])
        if not 0 < len(stages) <= _MOST_STAGES:
            raise ValueError(f"it has {len(stages)} stages, expected 1 to {_MOST_STAGES}")
    except (TypeError, ValueError, msgspec.MsgspecError, binascii.Error, zlib.error) as error:
        raise DecodeError(
            f"kv_transfer_params has a `remote_offer` that isn't one ({error}); hand on what the "
            "prefiller's response had"
        ) from None
    return stages
