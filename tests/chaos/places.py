"""Memory of transfers: what it must hold before, after, and when its owner uses it again."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np

from fabric_ray import TransferEngine, pages
from fabric_ray.errors import NotQuiesced
from tests.chaos.draw import Piece, Round
from tests.chaos.pattern import EMPTY, SCRIBBLE, Bytes, differs, mixes, pattern

# Guard bytes on either side of a write; they must not change.
_GUARD = 192


def _spread(piece: Piece) -> int:
    return 2 if piece.kind in ("pages", "read_pages") else 1


class Place:
    """One end of a transfer in this process.

    Pages lie in every second slot, backwards at the receiving end. Everything between them, before
    and behind is guarded.
    """

    def __init__(
        self, engine: TransferEngine, stage: Round, piece: Piece, *, source: bool, mappable: bool
    ) -> None:
        self.piece, self.source = piece, source
        nbytes = 2 * _GUARD + piece.page_nbytes * piece.page_count * _spread(piece)
        self.array = engine.alloc(nbytes).numpy() if mappable else np.empty(nbytes, np.uint8)
        self.array[:] = EMPTY
        self.wanted = self.array.copy()
        bytes_ = pattern(piece.nbytes, *stage.names, piece.actor, piece.other, piece.id)
        slots = self._slots(self.wanted)
        slots[:] = bytes_.reshape(piece.page_count, piece.page_nbytes)
        if source:
            self.array[:] = self.wanted
        self.region = engine.register(self.array)
        # What its owner put there once it was theirs again.
        self.scribbled = False
        self.gone = False

    def _slots(self, image: Bytes) -> Any:
        step = _spread(self.piece)
        slots = image[_GUARD:-_GUARD].reshape(-1, self.piece.page_nbytes)[::step]
        return slots if self.source else slots[::-1]

    @staticmethod
    def pages_of(piece: Piece, *, source: bool) -> Any:
        """Which pages one end of a transfer uses, in their order."""
        slots = [_spread(piece) * i for i in range(piece.page_count)]
        if not source:
            slots.reverse()
        return pages(slots, stride=piece.page_nbytes, offset=_GUARD)

    def pages(self) -> Any:
        return self.pages_of(self.piece, source=self.source)

    @property
    def offset(self) -> int:
        """Where the bytes of a transfer without pages begin."""
        return _GUARD

    def whole(self) -> str | None:
        return differs(self.array, self.wanted)

    def torn(self) -> str | None:
        before = np.full(1, EMPTY, np.uint8)
        return mixes(self.array, before, self.wanted)

    def scribble(self) -> None:
        """Its owner uses it again: nothing may land any more."""
        self.array[:] = SCRIBBLE
        self.scribbled = True
        self.wanted = self.wanted[:0]

    def disturbed(self) -> str | None:
        if not self.scribbled:
            return None
        wrong = np.flatnonzero(self.array != SCRIBBLE)
        return f"{len(wrong)} bytes landed afterwards, from {wrong[0]}" if len(wrong) else None

    def withdraw(self, timeout: float) -> bool:
        """Ends the registration; false if it can't be shown that no peer writes."""
        if self.gone:
            return True
        try:
            self.region.deregister(timeout)
        except NotQuiesced:
            return False
        self.gone = True
        return True


class Spill(Place):
    """A destination in a file without a byte on a disk that is full: no write to it can succeed.

    Looking at it would end this process: a hole that can't be filled is SIGBUS.
    """

    def __init__(self, engine: TransferEngine, piece: Piece, folder: Path) -> None:
        self.piece, self.source = piece, False
        self._path = folder / f"spill-{piece.id}"
        nbytes = 2 * _GUARD + piece.nbytes * _spread(piece)
        with open(self._path, "w+b") as file:
            file.truncate(nbytes)
            self.array = np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
        self.region = engine.register(self.array)
        self.scribbled = self.gone = False

    def whole(self) -> str | None:
        return "it is said to be on a disk that has no room for it"

    def torn(self) -> str | None:
        return None

    def scribble(self) -> None:
        pass

    def withdraw(self, timeout: float) -> bool:
        done = super().withdraw(timeout)
        self._path.unlink(missing_ok=True)
        return done
