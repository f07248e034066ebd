"""What an inference engine does around a change of its weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from fabric_ray.errors import WeightSyncError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class EngineHooks:
    """The engine around a :class:`WeightTarget`; override what it needs.

    A push calls them in this order, each at most once, by the names that SGLang gives them:
    ``pause_generation``, then the weights change, ``post_process_weights``, ``flush_cache``,
    ``update_weight_version``, ``continue_generation``. They run where the actor's calls run, within
    the timeout of the push.
    """

    def pause_generation(self) -> None:
        """Returns when nothing reads the weights any more.

        Called right before the flip where versions are staged, before the first byte where they
        are written in place. If it fails, the weights don't change here.
        """

    def post_process_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Computes what the engine derives from ``weights``, e.g. by
        :func:`fabric_ray.weights.families.post_load`."""

    def flush_cache(self) -> None:
        """Drops what was computed with the weights before, such as keys and values."""

    def update_weight_version(self, version: int) -> None:
        """Takes note of the version in use."""

    def continue_generation(self) -> None:
        """Ends the pause, also after a push that failed, and after a pause that did."""


class Pause:
    """Whether the engine stands still, and that it goes on whenever there are weights to use."""

    def __init__(self, hooks: EngineHooks) -> None:
        self._hooks = hooks
        self._paused = False

    def begin(self) -> None:
        """Has the engine pause, if it doesn't.

        Raises:
            WeightSyncError: it couldn't; it was told to go on.
        """
        if self._paused:
            return
        self._paused = True
        if failed := attempt("pause_generation", self._hooks.pause_generation):
            self.end()
            raise WeightSyncError(f"{failed}; generation goes on with the weights as they were")

    def end(self) -> str | None:
        """Has the engine go on, if it was paused; returns why it couldn't."""
        if not self._paused:
            return None
        self._paused = False
        return attempt("continue_generation", self._hooks.continue_generation)


def attempt(name: str, call: Callable[[], object]) -> str | None:
    """Why ``call`` failed, in a line; ``None`` if it didn't."""
    try:
        call()
    except Exception as error:
        logger.exception("%s failed", name)
        return f"{name}: {type(error).__name__}: {error}"
    return None
