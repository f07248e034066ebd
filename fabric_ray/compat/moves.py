"""Copies between addresses of this process and of a peer, which a session id names."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fabric_ray.compat.addresses import Op, Registered, add_copies, submit
from fabric_ray.compat.sessions import Session, Sessions
from fabric_ray.engine import Batch
from fabric_ray.errors import (
    FabricError,
    InvalidArgument,
    OutOfBounds,
    PeerLost,
    Stale,
    Unreachable,
)

_log = logging.getLogger("fabric_ray.compat.mooncake")

_QUIESCE_S = 10.0
_OUTDATED = (Stale, PeerLost, Unreachable)
"""What is known of the peer is outdated; the next call asks it again."""


class Copies(NamedTuple):
    """Of each range: its address here, its address at the peer, its bytes."""

    op: Op
    here: Sequence[int]
    there: Sequence[int]
    nbytes: Sequence[int]


class Move:
    """Copies in progress to one incarnation of a peer.

    Raises:
        InvalidArgument: lists of unequal lengths.
        OutOfBounds: memory is not registered.
        Stale: the peer has restarted: ask it for its addresses again.
        PeerError: it can't be reached.
    """

    def __init__(
        self,
        sessions: Sessions,
        registered: Registered,
        target: str,
        copies: Copies,
        *,
        timeout: float,
        session: Session | None = None,
    ) -> None:
        self._sessions, self._target = sessions, target
        self.session = session or sessions.at(target)
        batch = self._batch(registered, copies)
        # Each gigabyte adds a second, as in Mooncake.
        seconds = timeout + float(np.sum(copies.nbytes)) / 1e9
        try:
            self._transfer = submit(sessions.engine, batch, seconds)
        except _OUTDATED:
            sessions.forget(target, self.session)
            raise

    def done(self) -> bool:
        return self._transfer.done()

    @property
    def quiet(self) -> bool:
        """Whether no byte of it can land any more."""
        return self._transfer.quiesced is True

    def finish(self) -> None:
        """Waits for its end; if it failed, until no byte of it can land any more (MR-1)."""
        try:
            self._transfer.wait()
        except FabricError as error:
            if isinstance(error, _OUTDATED):
                self._sessions.forget(self._target, self.session)
            if self._transfer.wait_quiesced(_QUIESCE_S) is not True:
                _log.error("bytes of the failed transfer may still land; keep its buffers")
            raise

    def _batch(self, registered: Registered, copies: Copies) -> Batch:
        if not len(copies.here) == len(copies.there) == len(copies.nbytes):
            raise InvalidArgument("there must be as many buffers as peer addresses and lengths")
        batch = Batch()
        if not len(copies.nbytes):
            return batch
        here = registered.space
        local = here.find(copies.here, copies.nbytes, "this process")
        try:
            remote = self.session.space.find(copies.there, copies.nbytes, self._target)
        except OutOfBounds:  # It may have registered more since.
            self.session = self._sessions.again(self._target, self.session)
            remote = self.session.space.find(copies.there, copies.nbytes, self._target)
        there = self.session.space
        nbytes = np.asarray(copies.nbytes, dtype=np.int64)
        add_copies(batch, copies.op, (here.regions, local), (there.regions, remote), nbytes)
        return batch


def move_and_wait(
    sessions: Sessions, registered: Registered, target: str, copies: Copies, timeout: float
) -> Session:
    """Returns the peer when all bytes are in place.

    If the peer has registered its memory again, asks it and makes a second try. That needs the same
    incarnation, and a first try of which no byte can land any more (MR-1).
    """
    session, first = sessions.at(target), None
    try:
        first = Move(sessions, registered, target, copies, timeout=timeout, session=session)
        first.finish()
        return first.session
    except Stale:
        if first is not None and not first.quiet:
            raise
        session = sessions.again(target, first.session if first is not None else session)
    second = Move(sessions, registered, target, copies, timeout=timeout, session=session)
    second.finish()
    return second.session


__all__ = ["Copies", "Move", "move_and_wait"]
