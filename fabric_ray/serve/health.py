"""When failures of an engine mean that the replica should be replaced."""

from __future__ import annotations

from fabric_ray.inference.errors import InferenceError

IN_A_ROW = 3
"""Failures of different requests or steps, with nothing that went right between them."""

_NO_MEMORY = "out of memory"


def in_words(error: BaseException) -> str:
    """An exception in one line, for messages."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def is_sticky(error: BaseException) -> bool:
    """Whether the device is lost to this process: after such an error of CUDA every later call
    fails as well. Too little memory isn't one."""
    text = str(error)
    return isinstance(error, RuntimeError) and "CUDA error" in text and _NO_MEMORY not in text


class EngineHealth:
    """What passes or steps of an engine came to; one thread tells, any may ask."""

    def __init__(self) -> None:
        self._failed: list[str] = []
        self._lost: str | None = None

    def worked(self) -> None:
        """A pass or step went right."""
        self._failed.clear()

    def failed(self, what: str, error: BaseException) -> None:
        """A pass or step raised. Input that an engine refuses says nothing of the engine.

        Args:
            what: the request or step. What one request does again and again counts once.
            error: what it raised.
        """
        if isinstance(error, InferenceError):
            return
        if is_sticky(error):
            self._lost = in_words(error)
        if what not in self._failed:
            self._failed.append(what)
        if len(self._failed) >= IN_A_ROW:
            self._lost = f"{len(self._failed)} failures in a row, the last: {in_words(error)}"

    @property
    def lost(self) -> str | None:
        """Why nothing more should be tried with this engine."""
        return self._lost
