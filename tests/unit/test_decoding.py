"""Types that many threads meet first at one moment."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from fabric_ray.decoding import converted, from_json, from_msgpack

MANY = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor

import msgspec

from fabric_ray.decoding import converted, from_json, from_msgpack

sys.setswitchinterval(1e-6)
THREADS, TYPES = 16, 300
start = threading.Barrier(THREADS)

def made(n):
    of = msgspec.defstruct(f"Innermost{n}", [(f"y{i}", int | None, None) for i in range(9)])
    for depth in range(9):
        of = msgspec.defstruct(f"Inner{n}_{depth}", [("x", list[of], [])])
    return of

types = [made(n) for n in range(TYPES)]
values = [kind() for kind in types]

def work(number):
    for kind, value in zip(types, values):
        start.wait()
        if number % 3 == 0:
            assert from_msgpack(msgspec.msgpack.encode(value), kind) == value
        elif number % 3 == 1:
            assert from_json(msgspec.json.encode(value), kind) == value
        else:
            assert converted(msgspec.to_builtins(value), kind) == value

with ThreadPoolExecutor(THREADS) as pool:
    list(pool.map(work, range(THREADS)))
"""


def test_threads_may_meet_a_type_at_one_moment() -> None:
    # A crash would take these tests along.
    done = subprocess.run([sys.executable, "-c", MANY], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", [int, tuple[str, int], dict[str, Any]])
def test_what_is_none_of_a_type_is_refused(kind: Any) -> None:
    for decode, data in ((from_msgpack, b"\xc0"), (from_json, b"null"), (converted, None)):
        with pytest.raises(msgspec.ValidationError):
            decode(data, kind)  # type: ignore[operator]


class Named(msgspec.Struct):
    name: str


@pytest.mark.parametrize(
    ("decode", "data"),
    [
        (from_msgpack, b"\x82\xa4name\xa1a\xa4more" + b"\x91" * 100_000 + b"\xc0"),
        (from_msgpack, b"\x81\xa4name\xa1\xff"),
        (from_json, b'{"name": "a", "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        (from_json, b'{"name": "\xff"}'),
    ],
)
def test_nests_and_broken_text_are_errors_of_decoding(decode: Any, data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(data, Named)
