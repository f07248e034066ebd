"""What can be asked of a process over its socket: one line of JSON, and one of JSON back."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from fabric_ray.decoding import from_json
from fabric_ray.engine.seeing import Cursor
from fabric_ray.errors import FabricError
from fabric_ray.observe.places import check_run_dir, run_dir
from fabric_ray.observe.process import ProcessMetrics, ProcessRecords

LONGEST_QUESTION = 1 << 20
_LONGEST_ANSWER = 1 << 30
_PATIENCE_S = 5.0


class AskMetrics(msgspec.Struct, frozen=True, tag="metrics", tag_field="ask"):
    """For :class:`ProcessMetrics`."""


class AskRecords(msgspec.Struct, frozen=True, tag="records", tag_field="ask"):
    """For :class:`ProcessRecords` since a cursor of each engine, by id."""

    since: dict[str, Cursor] = {}
    oldest: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Of each engine's transfers that go on, so many; all if it isn't said."""


Question = AskMetrics | AskRecords

_Answer = TypeVar("_Answer", ProcessMetrics, ProcessRecords)


class _Refusal(msgspec.Struct, frozen=True):
    error: str


class Silent(FabricError):
    """A process doesn't answer, or not with what was asked."""


def sockets(directory: Path | None = None) -> list[Path]:
    """Those of all processes that may be looked into.

    Raises:
        InvalidArgument: the directory isn't this user's alone.
    """
    directory = directory or run_dir()
    if not directory.is_dir():
        return []
    check_run_dir(directory)
    return sorted(directory.glob("*.sock"))


def ask_metrics(path: Path) -> ProcessMetrics:
    """The numbers of one process.

    Raises:
        Silent: it is gone, or doesn't answer.
    """
    return _ask(path, AskMetrics(), ProcessMetrics)


def ask_records(
    path: Path, since: dict[str, Cursor] | None = None, *, oldest: int | None = None
) -> ProcessRecords:
    """The records of one process.

    Args:
        since: of an engine, by id, the cursor of an earlier answer.
        oldest: of each engine's transfers that go on, so many at most. An older release tells all.

    Raises:
        Silent: it is gone, or doesn't answer.
    """
    return _ask(path, AskRecords(since or {}, oldest), ProcessRecords)


def _ask(path: Path, question: Question, answer: type[_Answer]) -> _Answer:
    heard = bytearray()
    try:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(_PATIENCE_S)
            peer.connect(str(path))
            peer.sendall(msgspec.json.encode(question) + b"\n")
            while len(heard) < _LONGEST_ANSWER and (piece := peer.recv(1 << 16)):
                heard += piece
    except ConnectionRefusedError:
        # Its process is gone: nobody listens at a socket that outlived it.
        with contextlib.suppress(OSError):
            path.unlink()
        raise Silent(f"{path.stem}: the process is gone") from None
    except OSError as error:
        raise Silent(f"{path.stem}: {error.strerror or error}") from None
    try:
        return from_json(bytes(heard), answer)
    except msgspec.DecodeError as error:
        with contextlib.suppress(msgspec.DecodeError):
            refusal = from_json(bytes(heard), _Refusal)
            raise Silent(f"{path.stem}: {refusal.error}") from None
        raise Silent(
            f"{path.stem}: its answer isn't understood ({error}); it may run another version"
        ) from None
