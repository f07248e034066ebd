"""Decoding by types, from any thread.

msgspec looks into a type when it meets it first. Threads that do so at one moment may find it half
looked into, and crash, so here they do it one after another.
"""

from __future__ import annotations

import os
import threading
from typing import Any, TypeVar, overload

import msgspec

from fabric_ray.errors import DecodeError

T = TypeVar("T")

# What is run under it may come here again.
_lock = threading.RLock()
_msgpack: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
_json: dict[Any, msgspec.json.Decoder[Any]] = {}


@overload
def from_msgpack(data: bytes | msgspec.Raw, type: type[T]) -> T: ...
@overload
def from_msgpack(data: bytes | msgspec.Raw, type: Any) -> Any: ...
def from_msgpack(data: bytes | msgspec.Raw, type: Any) -> Any:
    """
    Raises:
        DecodeError: of msgspec: it is none of that type.
    """
    if (decoder := _msgpack.get(type)) is None:
        with _lock:
            decoder = _msgpack[type] = msgspec.msgpack.Decoder(type)
    return _decoded(decoder, data)


@overload
def checked_msgpack(data: bytes | msgspec.Raw, type: type[T], what: str) -> T: ...
@overload
def checked_msgpack(data: bytes | msgspec.Raw, type: Any, what: str) -> Any: ...
def checked_msgpack(data: bytes | msgspec.Raw, type: Any, what: str) -> Any:
    """As :func:`from_msgpack`, of any bytes.

    Args:
        what: they should be, for the error.

    Raises:
        DecodeError: they are none.
    """
    try:
        return from_msgpack(data, type)
    except msgspec.MsgspecError as error:
        raise DecodeError(f"not {what}: {error}", what=what) from error


@overload
def from_json(data: bytes, type: type[T]) -> T: ...
@overload
def from_json(data: bytes, type: Any) -> Any: ...
def from_json(data: bytes, type: Any) -> Any:
    """
    Raises:
        DecodeError: of msgspec: it is none of that type.
    """
    if (decoder := _json.get(type)) is None:
        with _lock:
            decoder = _json[type] = msgspec.json.Decoder(type)
    return _decoded(decoder, data)


def _decoded(decoder: Any, data: Any) -> Any:
    try:
        return decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        # Text that is none, and what is nested too deeply, in fields that the type lacks, too.
        raise msgspec.DecodeError(str(error)) from error


@overload
def converted(value: Any, type: type[T]) -> T: ...
@overload
def converted(value: Any, type: Any) -> Any: ...
def converted(value: Any, type: Any) -> Any:
    """What plain values are, as a type.

    Raises:
        ValidationError: of msgspec: they are none.
    """
    with _lock:
        return msgspec.convert(value, type)


def _anew() -> None:
    # The thread that held it doesn't exist in the child.
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_anew)
