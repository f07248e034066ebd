"""Everything that fabric_ray raises on purpose, as one tree under :class:`FabricError`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class FabricError(Exception):
    """What failed, with whom, and what to do next.

    Fields that a program may want (``peer``, ``transport``, ...) are attributes; see
    :attr:`fields` for all of them. What the engine raises has all that its class names.
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
    """A request that can't be carried out as described; nothing was sent."""


@contextmanager
def given_path(path: str | os.PathLike[str]) -> Iterator[None]:
    """Around reading or writing what the user named, and nothing else.

    Raises:
        InvalidArgument: for whatever the system says to that; it names the path.
    """
    try:
        yield
    except OSError as error:
        raise InvalidArgument(f"{os.fspath(path)}: {error.strerror or error}") from error


class OutOfBounds(InvalidArgument):
    """Bytes outside a region; nothing was sent. ``limit`` is the region's bytes, ``what`` says
    which region it is."""

    what: str
    offset: int
    nbytes: int
    limit: int


class Stale(FabricError):
    """A region, address or counter of an earlier life: its owner withdrew it or restarted.
    ``what`` says which."""

    what: str


class Refused(FabricError):
    """The peer said no to an operation: a write, a read, a send."""

    peer: str
    operation: str


class StorageError(FabricError, OSError):
    """A file could not be read or written: a full disk, a broken one, a file that was cut short.

    The message names the file and the cause. The transfer's bytes may have arrived in part; none of
    it was counted. ``peer`` is the other end of the transfer.
    """

    peer: str
    operation: str


class PeerError(FabricError):
    """Something about a peer."""

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
    """No allowed transport leads to the peer; the message says why for each."""


class HandshakeError(PeerError):
    """A peer that speaks another version or knows another token."""


class TransferTimeout(FabricError, TimeoutError):
    """A transfer or expectation that missed its deadline, ``after`` seconds. ``quiesced`` says
    whether no byte of it can land any more.

    ``peer`` is the peer of a transfer, or the ids of the writers that an expectation named, empty
    if it named none; ``missing`` counts the writes that the expectation lacks.
    """

    operation: str
    peer: str
    missing: int
    after: float
    quiesced: bool


class NotQuiesced(FabricError):
    """It can't be shown that nobody writes to the memory any more; the engine keeps it. ``what``
    says which memory, ``after`` how many seconds were waited."""

    what: str
    after: float


class Cancelled(FabricError):
    """It was given up before it was over; ``operation`` is what an engine calls it."""

    operation: str


class EngineClosed(FabricError):
    """The engine was closed."""


class ForkedEngine(FabricError):
    """An engine of the parent process, used after fork."""


class TransportUnavailable(FabricError):
    """A required transport can't be used here; the message names each candidate and why."""


class ResourceError(FabricError, OSError):
    """The system refused something; the message says which limit to raise."""

    call: str


class Unsupported(FabricError, NotImplementedError):
    """A call or an option of another library's interface that isn't here; nothing was done."""


class CompileError(FabricError):
    """A kernel that doesn't compile, or can't be compiled here. ``log``: what the compiler said."""

    log: str


class DecodeError(FabricError, ValueError):
    """Bytes that are not an intact encoding of ``what`` they should be."""

    what: str


class WeightSyncError(FabricError):
    """A weight update that didn't happen. ``failed`` maps receivers to causes."""

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
