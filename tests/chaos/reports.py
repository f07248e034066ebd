"""What processes tell each other about a round."""

from __future__ import annotations

from typing import NamedTuple

from fabric_ray import EngineAddress
from tests.chaos.draw import Piece, Round
from tests.chaos.pattern import pattern

# Beyond all deadlines: what isn't over by then hangs.
GRACE = 3.0


# Stand for the id of a transfer: a write to memory that is gone, an allocation beyond a limit.
GHOST, NO_ROOM = -1, -2


class Opened(NamedTuple):
    address: EngineAddress
    full: bool
    """Whether it can have memory on a full disk."""
    no_full_disk: str | None


class Ended(NamedTuple):
    """What became of a transfer or an expectation."""

    id: int
    error: str | None
    """The error's class; ``None`` for success, ``hang`` if it never ended."""
    text: str
    began: float
    """By the clock that all processes of a host share."""
    ended: float
    quiesced: bool | None = True
    wrong: tuple[str, ...] = ()
    """Broken promises that only this process could see."""


def content(stage: Round, piece: Piece) -> bytes:
    """A message: its number, and bytes that only its sender writes."""
    body = pattern(piece.nbytes, *stage.names, piece.actor, piece.other, piece.id)
    return piece.id.to_bytes(4, "little") + stage.number.to_bytes(4, "little") + body.tobytes()
