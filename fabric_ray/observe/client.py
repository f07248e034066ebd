"""Reads metrics and records of a process over its socket: one line of JSON each way."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from fabric_ray.decoding import from_json
from fabric_ray.engine.observability import Cursor
from fabric_ray.errors import FabricError, InvalidArgument
from fabric_ray.observe.process import ProcessMetrics, ProcessRecords
from fabric_ray.observe.run_directory import check_run_dir, run_dirs

LONGEST_QUESTION = 1 << 20
_LONGEST_ANSWER = 1 << 30
_TIMEOUT_S = 5.0


class AskMetrics(msgspec.Struct, frozen=True, tag="metrics", tag_field="ask"):
    """For :class:`ProcessMetrics`."""


class AskRecords(msgspec.Struct, frozen=True, tag="records", tag_field="ask"):
    """For :class:`ProcessRecords` since a cursor of each engine, by id."""

    since: dict[str, Cursor] = {}
    oldest: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Most open transfers of each engine, the oldest first; all by default."""


Question = AskMetrics | AskRecords

_Answer = TypeVar("_Answer", ProcessMetrics, ProcessRecords)


class _Refusal(msgspec.Struct, frozen=True):
    error: str


class Silent(FabricError):
    """A process doesn't answer, or its answer can't be decoded."""


def sockets(directory: Path | None = None) -> list[Path]:
    """Sockets of all processes of this user.

    Args:
        directory: by default all that :func:`run_dirs` names.

    Raises:
        InvalidArgument: other users may write to the directory, by default to the first.
    """
    first, *others = [directory] if directory else run_dirs()
    found = _sockets_in(first)
    for other in others:
        # Anyone may have made it.
        with contextlib.suppress(InvalidArgument):
            found += _sockets_in(other)
    return found


def _sockets_in(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    check_run_dir(directory)
    return sorted(directory.glob("*.sock"))


def ask_metrics(path: Path) -> ProcessMetrics:
    """The metrics of one process.

    Raises:
        Silent: the process is gone, or doesn't answer.
    """
    return _ask(path, AskMetrics(), ProcessMetrics)


def ask_records(
    path: Path, since: dict[str, Cursor] | None = None, *, oldest: int | None = None
) -> ProcessRecords:
    """The records of one process.

    Args:
        since: the cursor of an earlier answer, by engine id.
        oldest: most open transfers of each engine; an older release ignores it.

    Raises:
        Silent: the process is gone, or doesn't answer.
    """
    return _ask(path, AskRecords(since or {}, oldest), ProcessRecords)


def _ask(path: Path, question: Question, answer: type[_Answer]) -> _Answer:
    reply = bytearray()
    try:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(_TIMEOUT_S)
            peer.connect(str(path))
            peer.sendall(msgspec.json.encode(question) + b"\n")
            while len(reply) < _LONGEST_ANSWER and (part := peer.recv(1 << 16)):
                reply += part
    except ConnectionRefusedError:
        # The socket has outlived its process.
        with contextlib.suppress(OSError):
            path.unlink()
        raise Silent(f"{path.stem}: the process is gone") from None
    except OSError as error:
        raise Silent(f"{path.stem}: {error.strerror or error}") from None
    try:
        return from_json(bytes(reply), answer)
    except msgspec.DecodeError as error:
        with contextlib.suppress(msgspec.DecodeError):
            refusal = from_json(bytes(reply), _Refusal)
            raise Silent(f"{path.stem}: {refusal.error}") from None
        raise Silent(
            f"{path.stem}: cannot decode its answer ({error}); it may run another version"
        ) from None
