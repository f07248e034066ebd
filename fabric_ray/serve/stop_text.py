"""The text of a completion up to its first stop text."""

from __future__ import annotations

from collections.abc import Sequence

from fabric_ray.inference.tokenizer import Tokenizer


class StopTextFilter:
    """Turns tokens into text, and holds back what may be the start of a stop text.

    Args:
        tokenizer: the model's.
        stop: texts that end the completion; they aren't part of it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._stream = tokenizer.stream()
        self._stop = tuple(text for text in stop if text)
        self._sent = ""
        self._held = ""
        self.stopped = False
        """A stop text was found."""

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """The text that this token makes certain.

        Args:
            token: the next one.
            may_stop: whether a stop text that this token completes ends the completion.
        """
        return self._add(self._stream.push(token), may_stop=may_stop)

    def end(self) -> str:
        """The rest, when no token follows."""
        if self.stopped:
            return ""
        fresh = self._add(self._stream.end())
        if self.stopped:
            return fresh
        rest, self._held = self._held, ""
        self._sent += rest
        return fresh + rest

    def whole(self) -> str:
        """The whole text, when no token follows."""
        self.end()
        return self._sent

    def _add(self, text: str, *, may_stop: bool = True) -> str:
        if self.stopped:
            return ""
        self._held += text
        stops = self._stop if may_stop else ()
        found = [at for at in (self._held.find(stop) for stop in stops) if at >= 0]
        if found:
            fresh, self._held, self.stopped = self._held[: min(found)], "", True
        else:
            keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
            cut = len(self._held) - keep
            fresh, self._held = self._held[:cut], self._held[cut:]
        self._sent += fresh
        return fresh


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper start of ``stop``."""
    for count in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-count:]):
            return count
    return 0
