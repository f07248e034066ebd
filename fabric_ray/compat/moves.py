"""Copies between addresses of this process and of a peer that is named by its session id."""

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
"""What was known of the peer holds no longer; the next call asks it anew."""


class Copies(NamedTuple):
    """What goes where: addresses here and there, and bytes, of each range."""

    op: Op
    here: Sequence[int]
    there: Sequence[int]
    nbytes: Sequence[int]


class Move:
    """Copies under way to one incarnation of a peer.

    Raises:
        InvalidArgument: lists of unequal lengths.
        OutOfBounds: memory that isn't registered.
        Stale: the peer is another than it was: its addresses have to be asked for again.
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
        # A gigabyte a second at least, as Mooncake reckons.
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
        """Whether it is known that nothing of it can land any more."""
        return self._transfer.quiesced is True

    def finish(self) -> None:
        """Waits until it is over, and quiet if it failed (MR-1)."""
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


def moved(
    sessions: Sessions, registered: Registered, target: str, copies: Copies, timeout: float
) -> Session:
    """The peer, when all bytes are in place. It may have registered its memory anew: what it says
    now holds for the whole batch, if it is the same incarnation and the first try is quiet (MR-1).
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


__all__ = ["Copies", "Move", "moved"]
