"""Classifies a failed attempt to have a prompt computed."""

from __future__ import annotations

from enum import Enum, IntEnum, auto

from fabric_ray.errors import InvalidArgument, Stale
from fabric_ray.inference.errors import InferenceError
from fabric_ray.kvcache.errors import (
    DecoderClosed,
    KvError,
    PrefillerLost,
    PrefillFailed,
    PullCancelled,
    PullRefused,
    PullTimeout,
    RefusalReason,
)


class FailureKind(Enum):
    """Why an attempt failed, which decides what is tried next."""

    BUSY = auto()
    """The prefiller has too many requests; ask it again after a pause."""
    TOO_LONG = auto()
    """No prefiller of the deployment has pages for the prompt; the client must shorten it."""
    FAILED = auto()
    """The prefiller couldn't compute or didn't accept the prompt; another one may."""
    STALE = auto()
    """The session with the prefiller has ended; open another one."""
    SLOW = auto()
    """The prefiller missed the deadline; avoid it for a while."""
    LOST = auto()
    """The prefiller is gone, silent or not reachable; avoid it for a while."""
    LOCAL = auto()
    """This decoder is at fault or closed; no prefiller can help."""


class AvoidLevel(IntEnum):
    """How strongly the next attempt avoids a prefiller."""

    NONE = 0
    SLOW = 1
    """It missed the deadline of a recent request."""
    TRIED = 2
    """This request was sent to it before."""
    MISSED = 3
    """It missed this request's deadline."""
    LOST = 4
    """It was lost recently."""


_BY_REASON = {
    RefusalReason.BUSY: FailureKind.BUSY,
    RefusalReason.TOO_LONG: FailureKind.TOO_LONG,
}
_BY_CLASS: tuple[tuple[type[Exception] | tuple[type[Exception], ...], FailureKind], ...] = (
    (Stale, FailureKind.STALE),
    (PullTimeout, FailureKind.SLOW),
    (PrefillerLost, FailureKind.LOST),
    (PrefillFailed, FailureKind.FAILED),
    ((PullCancelled, DecoderClosed), FailureKind.LOCAL),
    (KvError, FailureKind.FAILED),
    ((InvalidArgument, InferenceError), FailureKind.LOCAL),
)


def failure_kind(error: Exception) -> FailureKind:
    """The kind of an attempt's error; one that isn't about the request means that the prefiller
    can't be reached."""
    if isinstance(error, PullRefused):
        if error.reason is not None:
            return _BY_REASON[error.reason]
        return FailureKind.FAILED if error.retryable else FailureKind.LOCAL
    for classes, kind in _BY_CLASS:
        if isinstance(error, classes):
            return kind
    return FailureKind.LOST
