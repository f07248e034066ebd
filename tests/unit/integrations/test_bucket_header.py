"""Headers, pieces and messages of any bytes: their content, or an error of decoding."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fabric_ray.errors import DecodeError
from fabric_ray.integrations.bucket_header import (
    ALIGN,
    BucketHeader,
    Invitation,
    Piece,
    Reply,
    read_header,
    slot_bytes,
    write_header,
)
from fabric_ray.integrations.inbox import _Parts
from fabric_ray.integrations.vllm_kv_offer import from_text, joined, to_text
from fabric_ray.integrations.vllm_kv_plan import Claim

SLOT = slot_bytes(4096)
HEADER = BucketHeader(0, 3, [Piece("w", "float32", (2, 8), ALIGN, 64, 0)], {}, last=True)
NUMBERS = st.integers(-8, SLOT + 8) | st.integers(-(1 << 63), (1 << 63) - 1)
DTYPES = st.sampled_from(
    ["float32", "bfloat16", "int8", "bool", "complex64", "quint4x2", "load", "os", "", "x.y"]
)
PIECES = st.builds(
    Piece,
    name=st.sampled_from("ab"),
    dtype=DTYPES,
    shape=st.lists(st.integers(-1, 40), max_size=3).map(tuple),
    offset=NUMBERS,
    nbytes=NUMBERS,
    start=NUMBERS,
)


def bucket(header: BucketHeader) -> Any:
    slot = torch.zeros(SLOT, dtype=torch.uint8)
    write_header(slot, ALIGN + 64, header)
    return slot


@settings(deadline=None)
@given(at=st.integers(0, 200), value=st.integers(0, 255))
def test_a_damaged_bucket_is_another_header_or_an_error(at: int, value: int) -> None:
    slot = bucket(HEADER)
    assert read_header(slot) == HEADER
    slot[at if at < 16 else ALIGN + 64 + at - 16] = value
    try:
        header = read_header(slot)
    except DecodeError:
        return
    for piece in header.pieces:
        try:
            tensor = _Parts().join(slot, piece)
        except DecodeError:
            continue
        assert tensor is None or tensor.nbytes == piece.nbytes


@settings(deadline=None)
@given(head=st.binary(min_size=16, max_size=16), rest=st.binary(max_size=64))
def test_any_bytes_are_a_header_or_an_error(head: bytes, rest: bytes) -> None:
    slot = torch.frombuffer(bytearray((head + rest).ljust(SLOT, b"\0")), dtype=torch.uint8)
    try:
        read_header(slot)
    except DecodeError:
        return


@settings(deadline=None)
@given(st.lists(PIECES, max_size=5))
@example([Piece("a", "float32", (0,), 0, 1, 0)])
def test_rs_1_pieces_make_whole_tensors_of_their_own_bytes_or_an_error(pieces: list[Piece]) -> None:
    slot, parts = torch.arange(SLOT).to(torch.uint8), _Parts()
    first = None
    for piece in pieces:
        first = first or piece
        try:
            tensor = parts.join(slot, piece)
        except DecodeError:
            return
        if tensor is None:
            continue
        assert tuple(tensor.shape) == piece.shape
        if first is piece:
            there = slot[piece.offset : piece.offset + piece.nbytes]
            assert tensor.data_ptr() == there.data_ptr()
        assert tensor.nbytes == math.prod(piece.shape) * tensor.itemsize
        first = None


def part(name: str, start: int, nbytes: int, **other: Any) -> Piece:
    return Piece(name, "int8", (8,), ALIGN, nbytes, start, **other)


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([part("a", 0, 4)], "rest of `a` never came"),
        ([part("a", 0, 4), part("b", 4, 4)], "part of `b` came out of order"),
        ([part("a", 0, 4), part("b", 0, 8)], "part of `b` came out of order"),
        ([part("a", 0, 4), part("a", 0, 4)], "out of order"),
        ([part("a", 0, 4), part("a", 4, 16)], "`a` can't be what its header says"),
        ([part("a", 0, -1)], "outside its bucket"),
    ],
)
def test_rs_1_a_tensor_that_lacks_a_part_is_none(pieces: list[Piece], says: str) -> None:
    slot, parts = torch.zeros(SLOT, dtype=torch.uint8), _Parts()

    def join() -> None:
        for piece in pieces:
            assert parts.join(slot, piece) is None
        parts.end()

    with pytest.raises(DecodeError, match=says):
        join()


INVITATION = Invitation("w", b"a", b"r", (b"c", b"d"), 4096)
CLAIM = Claim("t", b"d", "a", 2, "v")


@given(st.binary(max_size=80), st.integers(0, 40), st.integers(0, 255))
def test_what_workers_tell_each_other_is_itself_or_an_error(
    data: bytes, at: int, value: int
) -> None:
    reply = msgspec.msgpack.encode(Reply(b"r", b"c"))
    for whole, decode in (
        (INVITATION.to_bytes(), Invitation.from_bytes),
        (CLAIM.encoded(), Claim.decoded),
    ):
        changed = bytearray(whole)
        changed[at % len(whole)] = value
        for said in (data, bytes(changed), whole[: at % len(whole)], reply):
            try:
                decode(said)
            except DecodeError:
                continue
    assert Invitation.from_bytes(INVITATION.to_bytes()) == INVITATION
    assert Claim.decoded(CLAIM.encoded()) == CLAIM


@given(
    st.lists(st.binary(max_size=200), min_size=1, max_size=64), st.text(max_size=60), st.integers(0)
)
def test_an_offers_text_brings_it_back_and_other_text_is_an_error(
    stages: list[bytes], text: str, cut: int
) -> None:
    whole = to_text(stages)
    assert from_text(whole) == tuple(stages)
    for said in (text, whole[: cut % len(whole)], cut):
        try:
            from_text(said)
        except DecodeError:
            continue


@given(st.binary(max_size=60))
def test_workers_offers_join_or_an_error_says_why(body: bytes) -> None:
    try:
        joined([b"FRkv" + body])
    except DecodeError:
        return
