"""Why pages didn't come."""

from __future__ import annotations

from fabric_ray.errors import FabricError, HandshakeError


class LayoutMismatch(HandshakeError):
    """Pages of a prefiller and a decoder don't fit together; the text lists all that differs."""


class KvError(FabricError):
    """A request ended without its pages."""

    retryable = False
    """Whether another prefiller may be asked for the same pages."""


class PullCancelled(KvError):
    """The decoder gave the request up."""


class PrefillerLost(KvError):
    """The prefiller died, was silent for too long, declined this decoder, or one of the two parted
    with the other."""

    retryable = True


class PullTimeout(KvError):
    """The pages were not there by the deadline."""

    retryable = True


class PullRefused(KvError):
    """What was asked was not begun, there or here.

    ``retryable`` says whether because the prefiller takes nothing more, or because of what was
    asked: then another one would refuse it as well.
    """


class PrefillFailed(KvError):
    """The engine behind the prefiller gave up; the text says why."""

    retryable = True


class DecoderClosed(KvError):
    """This decoder was closed, or an engine of it."""


_TURNED_AWAY = "turned away"
"""The native core's name of a refusal that isn't because of what was asked."""

_BY_CAUSE: dict[str, type[KvError]] = {
    "cancelled": PullCancelled,
    "lost": PrefillerLost,
    "timed out": PullTimeout,
    "refused": PullRefused,
    _TURNED_AWAY: PullRefused,
    "failed": PrefillFailed,
    "closed": DecoderClosed,
}


def of_cause(cause: str, text: str) -> KvError:
    """The exception for a cause, as the native core names it."""
    error = _BY_CAUSE.get(cause, KvError)(text)
    if cause == _TURNED_AWAY:
        error.retryable = True
    return error
