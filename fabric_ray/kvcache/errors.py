"""Why a request for pages failed."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Literal, TypeAlias

from fabric_ray.errors import FabricError, HandshakeError


class RefusalReason(Enum):
    """Why a prefiller's engine refused a request; see :meth:`Job.refuse`."""

    BUSY = "busy"
    """It has too many requests, and may take this one later."""
    TOO_LONG = "too_long"
    """It has too few pages for the prompt, however few other requests it has."""


class LayoutMismatch(HandshakeError):
    """The page layouts of a prefiller and a decoder don't match; the text lists all differences."""


class KvError(FabricError):
    """A request ended without its pages."""

    retryable = False
    """Whether another prefiller may be asked for the same pages."""


class PullCancelled(KvError):
    """The decoder cancelled the request."""


class PrefillerLost(KvError):
    """The prefiller died, sent no heartbeat in time or declined this decoder, or one of the two
    disconnected."""

    retryable = True


class PullTimeout(KvError):
    """The pages did not arrive by the deadline."""

    retryable = True


class PullRefused(KvError):
    """The decoder or the prefiller refused the request before any work on it.

    ``retryable`` is true where the prefiller takes no more requests, and false where the request
    itself is at fault. ``reason`` is what the prefiller's engine gave, if it refused.
    """

    reason: RefusalReason | None

    def __init__(
        self, message: str, *, retryable: bool = False, reason: RefusalReason | None = None
    ) -> None:
        super().__init__(message, retryable=retryable, reason=reason)
        self.retryable, self.reason = retryable, reason


class PrefillFailed(KvError):
    """The engine behind the prefiller failed; the text says why."""

    retryable = True


class DecoderClosed(KvError):
    """This decoder or one of its engines is closed."""


KvEvent: TypeAlias = Literal["ready", "failed", "released", "stopped"]
"""What the native core reports of a request."""

KvCause: TypeAlias = Literal[
    "",
    "cancelled",
    "closed",
    "failed",
    "lost",
    "refused",
    "refused_busy",
    "refused_here",
    "refused_too_long",
    "timed_out",
]
"""What the native core calls a cause; empty for an event without one."""


def _refused(retryable: bool, reason: RefusalReason | None = None) -> Callable[[str], KvError]:
    return lambda text: PullRefused(text, retryable=retryable, reason=reason)


_BY_CAUSE: dict[KvCause, Callable[[str], KvError]] = {
    "cancelled": PullCancelled,
    "closed": DecoderClosed,
    "failed": PrefillFailed,
    "lost": PrefillerLost,
    "refused": _refused(False),
    "refused_busy": _refused(True, RefusalReason.BUSY),
    "refused_here": _refused(True),
    "refused_too_long": _refused(False, RefusalReason.TOO_LONG),
    "timed_out": PullTimeout,
}


def error_for(cause: KvCause, text: str) -> KvError:
    """The exception for a cause of the native core."""
    return _BY_CAUSE[cause](text)
