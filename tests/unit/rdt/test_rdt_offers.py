"""An offer survives its encoding; other bytes are refused."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fabric_ray.errors import DecodeError
from fabric_ray.runtime.rdt.offer import VERSION, Extent, Holder, Offer

HOLDER = Holder("trainer", "node-a", 7)
OFFER = Offer(HOLDER, (b"descriptor",), (Extent(0, 16, 24, False), Extent(0, 0, 0, False)))
KINDS = [((2, 3), torch.float32), ((0, 5), torch.int8)]


def test_an_offer_is_read_as_it_was_written() -> None:
    assert Offer.from_bytes(OFFER.to_bytes()) == OFFER
    OFFER.check(KINDS)


def test_another_version_says_what_to_install() -> None:
    other = msgspec.structs.replace(OFFER, version=VERSION + 1)
    with pytest.raises(DecodeError, match="install the same fabric-ray"):
        Offer.from_bytes(other.to_bytes())


@given(st.binary(max_size=300))
def test_anything_else_is_a_decode_error(data: bytes) -> None:
    with suppress(DecodeError):
        Offer.from_bytes(data)


@given(st.integers(0, len(OFFER.to_bytes()) - 1), st.integers(0, 255))
def test_a_damaged_offer_is_an_offer_or_a_decode_error(at: int, byte: int) -> None:
    data = bytearray(OFFER.to_bytes())
    data[at] = byte
    with suppress(DecodeError):
        for extent in Offer.from_bytes(bytes(data)).extents:
            assert not extent.nbytes or 0 <= extent.region < len(OFFER.regions)


@pytest.mark.parametrize(
    "extent", [Extent(1, 0, 8, False), Extent(-1, 0, 8, False), Extent(0, -8, 8, False)]
)
def test_a_tensor_outside_the_offered_regions_is_refused(extent: Extent) -> None:
    with pytest.raises(DecodeError):
        Offer.from_bytes(Offer(HOLDER, (b"descriptor",), (extent,)).to_bytes())


@pytest.mark.parametrize(
    "kinds", [KINDS[:1], [((2, 4), torch.float32), KINDS[1]], [((2, 3), torch.int8), KINDS[1]]]
)
def test_shapes_that_contradict_the_offer_are_refused(
    kinds: list[tuple[tuple[int, ...], torch.dtype]],
) -> None:
    with pytest.raises(DecodeError):
        OFFER.check(kinds)
