"""Whom a trainer's half of a push listens to: one call at a time, of the latest session."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from fabric_ray.errors import Stale

_OUTDATED = (
    "another WeightSync has connected to this trainer since, or another push was begun; push with "
    "that one, or call connect() to take over again"
)


class Claims:
    """Calls that take turns. A controller that has waited long enough goes on while a push is still
    running here, so a later call ends an earlier one."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self.latest: object = None
        """Of the last call that came, whether it had its turn or not."""

    @contextmanager
    def claim(self) -> Iterator[Callable[[], None]]:
        """This call's turn. A long one calls what it is given before each of its steps: that raises
        ``Stale`` once a later call waits."""
        mine = self.latest = object()

        def proceed() -> None:
            if self.latest is not mine:
                raise Stale(_OUTDATED)

        with self._turn:
            yield proceed


class _OfSession(Protocol):
    @property
    def session(self) -> str: ...


T = TypeVar("T", bound=_OfSession)


def of_session(session: str, held: T | None) -> T:
    """What this trainer holds, for a call that must be of the same session.

    Raises:
        Stale: the call is of another, or nothing is held.
    """
    if held is None or held.session != session:
        raise Stale(_OUTDATED)
    return held
