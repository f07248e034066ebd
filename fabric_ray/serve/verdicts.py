"""What a failed attempt says of the prefiller that was asked."""

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
)
from fabric_ray.serve.wire import Reason


class Verdict(Enum):
    """What follows from an attempt that failed."""

    BUSY = auto()
    """It has too much to do; it may be asked again after a pause."""
    TOO_LONG = auto()
    """No prefiller of the deployment has pages for the prompt: the client's to change."""
    FAILED = auto()
    """It couldn't compute this prompt, or didn't take it: another may."""
    STALE = auto()
    """The meeting with it is over; if it lives, it is met anew."""
    SLOW = auto()
    """It missed the deadline: others should be asked before it for a while."""
    LOST = auto()
    """It is gone, silent, or can't be met: it isn't asked for a while."""
    HERE = auto()
    """This decoder is at fault or closed: asking others changes nothing."""


class Reluctance(IntEnum):
    """How little a prefiller is wanted for the next attempt; least first."""

    NONE = 0
    SLOW = 1
    """It missed the deadline of some request lately."""
    TRIED = 2
    """This request was asked of it before."""
    MISSED = 3
    """It missed this request's deadline."""
    LOST = 4
    """It was lost lately."""


_BY_REASON = {Reason.BUSY: Verdict.BUSY, Reason.TOO_LONG: Verdict.TOO_LONG}
_NOT_ITS_WORDS = (PrefillerLost, PullTimeout, PullCancelled, DecoderClosed)
_BY_CLASS: tuple[tuple[type[Exception] | tuple[type[Exception], ...], Verdict], ...] = (
    (Stale, Verdict.STALE),
    (PullTimeout, Verdict.SLOW),
    (PrefillerLost, Verdict.LOST),
    (PrefillFailed, Verdict.FAILED),
    (PullCancelled, Verdict.HERE),
    (DecoderClosed, Verdict.HERE),
    (KvError, Verdict.FAILED),
    ((InvalidArgument, InferenceError), Verdict.HERE),
)


def verdict(error: Exception) -> Verdict:
    """Of an attempt's error. Those that aren't about the request mean that the prefiller can't be
    reached, or met."""
    if isinstance(error, KvError) and not isinstance(error, _NOT_ITS_WORDS):
        reason = Reason.of(error)
        if reason is not None:
            return _BY_REASON[reason]
    if isinstance(error, PullRefused):
        # Retryable where it isn't about what was asked; else all prefillers would refuse it.
        return Verdict.FAILED if error.retryable else Verdict.HERE
    for cls, found in _BY_CLASS:
        if isinstance(error, cls):
            return found
    return Verdict.LOST
