"""What the trainers of one push tell each other: typed msgpack, decoded by what a frame may say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from fabric_ray.decoding import checked_msgpack
from fabric_ray.weights.calls import CallFailure

Word = TypeVar("Word")

ARRIVES, GIVES_UP = 0, -1
"""Numbers of a trainer's frames that answer no call of a run: it begins the run, it gave it up."""
# The system's waits take no more than 2**31 ms.
_LONGEST_S = 2e6


class Frame(msgspec.Struct, Generic[Word], frozen=True, array_like=True):
    """One message."""

    run: Annotated[int, msgspec.Meta(ge=1)]
    number: Annotated[int, msgspec.Meta(ge=GIVES_UP)]
    """Of the call in its run, from 1; the same for its answer."""
    word: Word

    def encoded(self) -> bytes:
        return msgspec.msgpack.encode(self)


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Trainer 0 calls a function."""

    function: str
    name: str
    """Of the source, for ranks that have not said another."""
    args: list[msgspec.Raw]

    @classmethod
    def of(cls, function: str, args: Sequence[Any]) -> Call:
        """
        Args:
            args: the name, and the function's own.
        """
        return cls(function, args[0], [_raw(each) for each in args[1:]])


class Working(msgspec.Struct, frozen=True, tag="working"):
    """Trainer 0 does something else, for so many seconds at most."""

    what: str
    seconds: Annotated[float, msgspec.Meta(ge=0, le=_LONGEST_S)]


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """Trainer 0 ends the run."""

    version: Annotated[int, msgspec.Meta(ge=0)]
    error: str | None
    failed: dict[str, str]


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """What a call returned."""

    result: msgspec.Raw

    @classmethod
    def of(cls, result: Any) -> Answer:
        return cls(_raw(result))

    def value(self, type: Any) -> Any:
        """
        Raises:
            DecodeError: it has another type.
        """
        return checked_msgpack(self.result, type, "the answer of a call")


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A trainer failed, or gave up."""

    cause: str
    kind: str = ""

    def value(self, _: Any) -> CallFailure:
        return CallFailure(self.cause, self.kind)


FromLeader = Frame[Call | Working | Finished]
FromFollower = Frame[Answer | Failed]


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))
