"""All errors that fabric_ray raises, as one tree under :class:`FabricError`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class FabricError(RuntimeError):
    """Base class. The text says what failed, at which peer, and what to do next.

    It is a ``RuntimeError``, as errors of torch and of the libraries are whose interfaces are here:
    callers of DeepEP, NIXL-EP and pplx-garden catch that.

    Fields (``peer``, ``transport``, ...) are attributes; :attr:`fields` has all of them. An error
    of the engine has all fields that its class declares.
    """

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        # Only called for what isn't there otherwise.
        if name != "fields" and name in self.__dict__.get("fields", {}):
            return self.fields[name]
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.args[0], self.fields))


def _rebuild(cls: type[FabricError], message: str, fields: dict[str, Any]) -> FabricError:
    return cls(message, **fields)


class InvalidArgument(FabricError, ValueError):
    """A request is invalid; nothing was sent."""


@contextmanager
def given_path(path: str | os.PathLike[str]) -> Iterator[None]:
    """Wraps file access under a path from the user.

    Raises:
        InvalidArgument: for any ``OSError``; the text names the path.
    """
    try:
        yield
    except OSError as error:
        raise InvalidArgument(f"{os.fspath(path)}: {error.strerror or error}") from error


class OutOfBounds(InvalidArgument):
    """An access is outside a region; nothing was sent. ``limit`` is the region's size in bytes,
    ``what`` describes the region."""

    what: str
    offset: int
    nbytes: int
    limit: int


class Stale(FabricError):
    """A region, address or counter of an earlier incarnation: its owner withdrew it or restarted.
    ``what`` describes it."""

    what: str


class Refused(FabricError):
    """The peer refused an operation: a write, a read, a send."""

    peer: str
    operation: str


class StorageError(FabricError, OSError):
    """A file could not be read or written: a full or broken disk, or a truncated file.

    The message names the file and the cause. The transfer's bytes may have arrived in part; none of
    it was counted. ``peer`` is the other end of the transfer.
    """

    peer: str
    operation: str


class PeerError(FabricError):
    """Base class of errors of one peer."""

    peer: str


class _LinkLost(PeerError, ConnectionError):
    """A link to a peer was lost.

    ``nic`` is the local one, empty where there is none, and ``rail`` its number. ``errno`` is what
    a system call returned, ``incarnation`` the peer's: an engine's id or a rank's number. Each of
    the three is ``None`` where it isn't known.
    """

    transport: str
    nic: str
    rail: int | None
    incarnation: str | None

    def __init__(self, message: str, **fields: Any) -> None:
        unknown = {"errno": None, "rail": None, "incarnation": None, "transport": "", "nic": ""}
        super().__init__(message, **{**unknown, **fields})
        self.errno = self.fields["errno"]  # OSError has an attribute of this name.


class PeerLost(_LinkLost):
    """A peer died or can't be reached any more."""


class RailLost(_LinkLost):
    """One of several rails failed while it carried the transfer; others still reach the peer.

    Send again; if the transfer was counted, with a fresh counter: its count may have arrived.
    """


class Unreachable(PeerError, ConnectionError):
    """No allowed transport reaches the peer; the text says why for each."""


class HandshakeError(PeerError):
    """A peer has another protocol version or another token."""


class TransferTimeout(FabricError, TimeoutError):
    """A transfer or expectation missed its deadline, ``after`` seconds. ``quiesced``: no byte of it
    can land any more.

    ``peer`` is the peer of a transfer, or the ids of the writers that an expectation named, empty
    if it named none; ``missing`` counts the writes that the expectation lacks.
    """

    operation: str
    peer: str
    missing: int
    after: float
    quiesced: bool


class NotQuiesced(FabricError):
    """A peer may still write to the memory after ``after`` seconds; the engine keeps it. ``what``
    describes the memory."""

    what: str
    after: float


class Cancelled(FabricError):
    """An operation was cancelled before it completed; ``operation`` is its name."""

    operation: str


class EngineClosed(FabricError):
    """The engine was closed."""


class ForkedEngine(FabricError):
    """An engine of the parent process, used after fork."""


class TransportUnavailable(FabricError):
    """A required transport can't be used here; the message names each candidate and why."""


class ResourceError(FabricError, OSError):
    """The system refused ``call``; the text says which limit to raise."""

    call: str


class Unsupported(FabricError, NotImplementedError):
    """A call or option of another library's interface is not supported; nothing was done."""


class CompileError(FabricError):
    """A kernel does not compile, or can't be compiled here. ``log``: the compiler's output."""

    log: str


class DecodeError(FabricError, ValueError):
    """Bytes are not a valid encoding of ``what``."""

    what: str


class WeightSyncError(FabricError):
    """A weight update failed. ``failed`` maps actors to causes."""

    version: int
    failed: dict[str, str]


__all__ = [
    "Cancelled",
    "CompileError",
    "DecodeError",
    "EngineClosed",
    "FabricError",
    "ForkedEngine",
    "HandshakeError",
    "InvalidArgument",
    "NotQuiesced",
    "OutOfBounds",
    "PeerError",
    "PeerLost",
    "RailLost",
    "Refused",
    "ResourceError",
    "Stale",
    "StorageError",
    "TransferTimeout",
    "TransportUnavailable",
    "Unreachable",
    "Unsupported",
    "WeightSyncError",
]
