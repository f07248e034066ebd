"""Whether pushes compare with the version before, by how long pushes have taken."""

from __future__ import annotations

from collections import deque
from typing import Literal

Kind = Literal["changes", "kept", "whole"]
"""A push that compared with the version before; a whole one that kept a copy to compare with; a
whole one that did neither."""

# How much longer changes may take. A millisecond is less than calls of actors vary by.
_MORE, _MORE_S = 1.05, 1e-3
# The least of so many counts, since other work on a machine only ever adds time. The first push of
# changes touches new memory.
_RECENT, _ENOUGH = 3, 2
# Whole pushes between two attempts to send changes: first and at most.
_PAUSE, _LONGEST = 16, 1024


class DeltaChoice:
    """Sends changes as long as that takes no more time than whole pushes.

    On a fast link a whole push takes less time than comparing. A whole push is measured once
    changes have been sent, and whenever they take longer than the last; but not on a link so slow
    that changes take less than half of what the first push took beside keeping its copy.
    """

    def __init__(self) -> None:
        self._changes: deque[float] = deque(maxlen=_RECENT)
        self._whole: deque[float] = deque(maxlen=_RECENT)
        # What changes must not take longer than, where no whole push was measured.
        self._half = 0.0
        self._left, self._pause = 0, _PAUSE
        self._measures = False
        self._slow = 0.0

    @property
    def compares(self) -> bool:
        """Whether the next push compares."""
        return not self._left

    def took(self, kind: Kind, seconds: float, comparing: float = 0.0) -> None:
        """Takes the time of a push.

        Args:
            seconds: from the first byte until all rollouts have confirmed.
            comparing: seconds of it in which trainers compared and copied.
        """
        if kind == "kept":
            self._half = (seconds - comparing) / 2  # the first push also touches new memory
        elif kind == "changes":
            self._changes.append(seconds)
            self._look()
        else:
            self._left = max(0, self._left - 1)
            self._whole.append(seconds)
            if self._measures:
                self._measures = False
                if _is_longer(min(self._changes), seconds):
                    self._give_up()

    @property
    def why_whole(self) -> str:
        """Why pushes are whole at present."""
        if self._measures:
            return "measures how long a whole push takes"
        return f"changes took longer than a whole push: {self._slow:.3f} s"

    def _look(self) -> None:
        changes = min(self._changes)
        if not _is_longer(changes, min(self._whole, default=self._half)):
            self._pause = _PAUSE
        elif len(self._changes) >= _ENOUGH:
            # What is known of whole pushes is old, or too little.
            self._whole.clear()
            self._measures, self._left = True, 1

    def _give_up(self) -> None:
        self._slow = min(self._changes)
        self._left, self._pause = self._pause, min(4 * self._pause, _LONGEST)
        self._changes.clear()


def _is_longer(seconds: float, other: float) -> bool:
    return seconds > _MORE * other + _MORE_S
