"""A lock under which a later call of a controller ends an earlier one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from fabric_ray.errors import Stale

OUTDATED = (
    "another WeightSync has connected here since, or another push was begun; push with that one, "
    "or call connect() to take over again"
)


class LatestCallLock:
    """Runs one call at a time. After a timeout, a controller calls again while its push still runs
    here; the later call ends the earlier one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.latest: object = None
        """Identity of the latest call, running or waiting."""

    @contextmanager
    def acquire(self) -> Iterator[Callable[[], None]]:
        """Yields a check for long calls to run before each step. The check raises ``Stale`` once a
        later call waits."""
        mine = self.latest = object()

        def check_latest() -> None:
            if self.latest is not mine:
                raise Stale(OUTDATED)

        with self._lock:
            yield check_latest

    @contextmanager
    def between_calls(self) -> Iterator[None]:
        """Waits for the call that runs, and ends none."""
        with self._lock:
            yield


class _OfSession(Protocol):
    @property
    def session(self) -> str: ...


T = TypeVar("T", bound=_OfSession)


def require_session(session: str, held: T | None) -> T:
    """Returns ``held`` if it belongs to ``session``.

    Raises:
        Stale: it belongs to another session, or is ``None``.
    """
    if held is None or held.session != session:
        raise Stale(OUTDATED)
    return held
