"""Where a demo runs: its Ray cluster, its output, its failures."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from fabric_ray.errors import FabricError, InvalidArgument, given_path
from fabric_ray.runtime.causes import cause_of


@contextmanager
def cluster(address: str | None) -> Iterator[None]:
    """Ray at ``address`` or ``RAY_ADDRESS``, or started here; stopped in the end unless it was
    running."""
    address = address or os.environ.get("RAY_ADDRESS")
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if not address:
        settings |= {"include_dashboard": False, "object_store_memory": 128 << 20}
    running = ray.is_initialized()
    try:
        _knock(address or "local")
        if not running:
            ray.init(address=address or "local", **settings)
    except OSError as error:
        raise InvalidArgument(
            f"no Ray cluster answers at {address} ({error}); name one that runs by --address or "
            "RAY_ADDRESS, or none to have Ray started here"
        ) from error
    if running:
        yield
        return
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raises OSError if nobody listens at ``host:port``: Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()


@contextmanager
def named_failures() -> Iterator[None]:
    """What an actor raised comes out as it was, if it has a name; Ray's own errors as ours."""
    try:
        yield
    except RayTaskError as error:
        cause = error.cause
        raise cause if isinstance(cause, FabricError) else error from error.__cause__
    except RayError as error:
        raise FabricError(f"an actor of the demo failed: {cause_of(error)}") from error


def make_output(directory: Path) -> None:
    """Raises InvalidArgument if results can't be written there."""
    with given_path(directory):
        directory.mkdir(parents=True, exist_ok=True)
        # It may have been there, and belong to somebody else.
        TemporaryFile(dir=directory).close()
