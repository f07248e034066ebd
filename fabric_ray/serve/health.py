"""Decides when an engine's failures require a new replica."""

from __future__ import annotations

from fabric_ray.inference.errors import InferenceError, NonFiniteLogits

IN_A_ROW = 3
"""Failures of different requests or steps without a success between them."""


def one_line(error: BaseException) -> str:
    """An exception as one line, for messages."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def is_sticky(error: BaseException) -> bool:
    """Whether every later CUDA call of this process fails as well, which too little memory doesn't
    cause. Torch before 2.8 has no class for such an error, only a text."""
    text = str(error)
    is_cuda = isinstance(error, RuntimeError) and "CUDA error" in text
    return is_cuda and "out of memory" not in text


class EngineHealth:
    """Counts failures of an engine. One thread reports; any thread may read :attr:`lost`."""

    def __init__(self) -> None:
        self._failed: list[str] = []
        self._lost: str | None = None

    def worked(self) -> None:
        """A pass or step succeeded."""
        self._failed.clear()

    def failed(self, what: str, error: BaseException) -> None:
        """A pass or step raised, or gave logits that aren't finite. Input that an engine refuses
        doesn't count.

        Args:
            what: the request or step; repeated failures of one request count once.
            error: what it raised.
        """
        if isinstance(error, InferenceError) and not isinstance(error, NonFiniteLogits):
            return
        if is_sticky(error):
            self._lost = one_line(error)
        if what not in self._failed:
            self._failed.append(what)
        if len(self._failed) >= IN_A_ROW:
            self._lost = f"{len(self._failed)} failures in a row, the last: {one_line(error)}"

    @property
    def lost(self) -> str | None:
        """Why the engine must not be used any more, if so."""
        return self._lost
