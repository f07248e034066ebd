"""Why a request ends without its tokens."""

from __future__ import annotations

from fabric_ray.errors import FabricError


class ServeError(FabricError):
    """A request that ends without its tokens; the message names the cause.

    ``status`` is the HTTP status, ``kind`` OpenAI's ``type``, ``code`` a word for programs.
    """

    status = 500
    kind = "server_error"
    code = "internal_error"
    retryable = False
    """Whether another replica may be asked."""


class BadRequest(ServeError, ValueError):
    """It can't be carried out as asked. ``param`` names the field."""

    status = 400
    kind = "invalid_request_error"
    code = "invalid_value"


class NotFound(BadRequest):
    """There is no such model or path."""

    status = 404
    code = "not_found"


class TooLarge(BadRequest):
    """Its body is longer than the router reads."""

    status = 413
    code = "too_large"


class BodyTimeout(BadRequest):
    """The body did not arrive in time."""

    status = 408
    code = "body_timeout"


class Busy(ServeError):
    """All that could do it have their hands full; nothing was done."""

    status = 429
    kind = "rate_limit_error"
    code = "busy"
    retryable = True


class NoPrefill(ServeError):
    """No prefiller computed the prompt. The message tells what became of each attempt."""

    status = 503
    code = "prefill_failed"
    retryable = True


class DecoderLost(ServeError):
    """The replica that generated the tokens is gone."""

    status = 503
    code = "decoder_lost"
    retryable = True


class Unavailable(ServeError):
    """The replica can't go on; Serve replaces it."""

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
"""By the name that goes over the wire."""
