"""Errors of requests."""

from __future__ import annotations

from fabric_ray.errors import FabricError


class ServeError(FabricError):
    """A request failed; the message names the cause.

    ``status`` is the HTTP status, ``kind`` OpenAI's ``type``, ``code`` a word for programs.
    """

    status = 500
    kind = "server_error"
    code = "internal_error"
    retryable = False
    """Whether another replica may be asked."""


class BadRequest(ServeError, ValueError):
    """The request is invalid. ``param`` names the field."""

    status = 400
    kind = "invalid_request_error"
    code = "invalid_value"


class NotFound(BadRequest):
    """There is no such model or path."""

    status = 404
    code = "not_found"


class TooLarge(BadRequest):
    """The body is longer than ``router.max_body``."""

    status = 413
    code = "too_large"


class BodyTimeout(BadRequest):
    """The body did not arrive in time."""

    status = 408
    code = "body_timeout"


class Busy(ServeError):
    """All replicas have as many requests as they take; nothing was done."""

    status = 429
    kind = "rate_limit_error"
    code = "busy"
    retryable = True


class NoPrefill(ServeError):
    """No prefiller computed the prompt; the message has the cause of each attempt."""

    status = 503
    code = "prefill_failed"
    retryable = True


class DecoderLost(ServeError):
    """The decoder died while it generated."""

    status = 503
    code = "decoder_lost"
    retryable = True


class Unavailable(ServeError):
    """The replica failed; Serve replaces it."""

    status = 503
    code = "unavailable"
    retryable = True


KINDS: dict[str, type[ServeError]] = {
    cls.__name__: cls
    for cls in (
        ServeError,
        BadRequest,
        NotFound,
        TooLarge,
        BodyTimeout,
        Busy,
        NoPrefill,
        DecoderLost,
        Unavailable,
    )
}
"""Errors by the name in :attr:`Failed.kind`."""
