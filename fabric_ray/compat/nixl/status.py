"""NIXL's enumerations and exceptions, by their names there."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager

from fabric_ray.errors import (
    Cancelled,
    FabricError,
    InvalidArgument,
    PeerError,
    Stale,
    Unsupported,
)

NIXL_INIT_AGENT = ""
DEFAULT_COMM_PORT = 8888
HAVE_UCX_GPU_DEVICE_API = False


class nixl_mem_t(enum.IntEnum):
    DRAM_SEG = 0
    VRAM_SEG = 1
    BLK_SEG = 2
    OBJ_SEG = 3
    FILE_SEG = 4


class nixl_xfer_op_t(enum.IntEnum):
    NIXL_READ = 0
    NIXL_WRITE = 1


class nixl_thread_sync_t(enum.IntEnum):
    """All are served alike: an agent may be used from any thread."""

    NIXL_THREAD_SYNC_NONE = 0
    NIXL_THREAD_SYNC_STRICT = 1
    NIXL_THREAD_SYNC_RW = 2
    NIXL_THREAD_SYNC_DEFAULT = 0


class nixl_status_t(enum.IntEnum):
    NIXL_IN_PROG = 1
    NIXL_SUCCESS = 0
    NIXL_ERR_NOT_POSTED = -1
    NIXL_ERR_INVALID_PARAM = -2
    NIXL_ERR_BACKEND = -3
    NIXL_ERR_NOT_FOUND = -4
    NIXL_ERR_MISMATCH = -5
    NIXL_ERR_NOT_ALLOWED = -6
    NIXL_ERR_REPOST_ACTIVE = -7
    NIXL_ERR_UNKNOWN = -8
    NIXL_ERR_NOT_SUPPORTED = -9


class NixlError(FabricError):
    """What all exceptions of this face have in common; NIXL's own have nothing."""


class nixlNotPostedError(NixlError):
    """The request was not posted yet."""


class nixlInvalidParamError(NixlError):
    """A request that can't be carried out as described; nothing was sent."""


class nixlBackendError(NixlError):
    """The engine failed; the cause is the engine's error."""


class nixlNotFoundError(NixlError):
    """An agent, a backend, or memory that was not registered."""


class nixlMismatchError(NixlError):
    """Metadata that is not an agent's, or of a version that isn't spoken here."""


class nixlNotAllowedError(NixlError):
    """Not in the state that this is in."""


class nixlRepostActiveError(NixlError):
    """The request is still under way."""


class nixlUnknownError(NixlError):
    """Nothing here raises it."""


class nixlNotSupportedError(NixlError):
    """A call or an option that isn't here; nothing was done."""


class nixlRemoteDisconnectError(NixlError):
    """The remote agent was lost, restarted, or can't be reached."""


class nixlCancelledError(NixlError):
    """It was given up before it was over."""


class nixlNoTelemetryError(NixlError):
    """Telemetry is off."""


def as_nixl(error: FabricError) -> NixlError:
    """An engine's error as the exception that callers of NIXL expect, with its message."""
    if isinstance(error, NixlError):
        return error
    kinds: tuple[tuple[type[FabricError], type[NixlError]], ...] = (
        (PeerError, nixlRemoteDisconnectError),
        (Stale, nixlRemoteDisconnectError),
        (Cancelled, nixlCancelledError),
        (InvalidArgument, nixlInvalidParamError),
        (Unsupported, nixlNotSupportedError),
    )
    kind = next((ours for theirs, ours in kinds if isinstance(error, theirs)), nixlBackendError)
    found = kind(str(error), **error.fields)
    found.__cause__ = error
    return found


@contextmanager
def as_nixl_errors() -> Iterator[None]:
    """Raises errors of an engine as :func:`as_nixl` has them."""
    try:
        yield
    except NixlError:
        raise
    except FabricError as error:
        raise as_nixl(error) from error
