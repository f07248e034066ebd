"""Callbacks of an inference engine around a change of its weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from fabric_ray.errors import WeightSyncError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class EngineHooks:
    """Callbacks of the engine around a :class:`WeightTarget`; override those it needs.

    A push calls each at most once, in this order, under SGLang's names: ``pause_generation``, then
    the weights change, ``post_process_weights``, ``flush_cache``, ``update_weight_version``,
    ``continue_generation``. They run in the thread of the actor's calls, within the timeout of the
    push. Kernels that a callback launches have to end before it returns, since the engine may
    compute in other streams.
    """

    def pause_generation(self) -> None:
        """Pauses the engine; returns when it no longer reads the weights.

        With staging, it runs right before the flip; without, before the first byte is written. If
        it fails, the weights of this rollout don't change.
        """

    def post_process_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Computes tensors that the engine derives from ``weights``, e.g. by
        :func:`fabric_ray.weights.families.post_load`."""

    def flush_cache(self) -> None:
        """Drops results of the earlier weights, such as keys and values."""

    def update_weight_version(self, version: int) -> None:
        """Records the version in use."""

    def continue_generation(self) -> None:
        """Ends the pause, also after a failed push or a failed ``pause_generation``. After another
        callback has failed, the engine stands still until a push whose callbacks succeed."""


class Pause:
    """Pauses the engine, and continues it once the weights are usable."""

    def __init__(self, hooks: EngineHooks) -> None:
        self._hooks = hooks
        self._paused = False

    def begin(self) -> None:
        """Pauses the engine, unless it is paused.

        Raises:
            WeightSyncError: the hook failed; the engine was continued.
        """
        if self._paused:
            return
        self._paused = True
        if failed := attempt("pause_generation", self._hooks.pause_generation):
            self.end()
            raise WeightSyncError(f"{failed}; generation continues with the earlier weights")

    def end(self) -> str | None:
        """Continues the engine if it is paused; returns why that failed."""
        if not self._paused:
            return None
        self._paused = False
        return attempt("continue_generation", self._hooks.continue_generation)


def run_commit_hooks(
    on_commit: Iterable[Callable[[int], None]],
    hooks: EngineHooks,
    version: int,
    weights: Mapping[str, torch.Tensor],
) -> list[str | None]:
    """Runs the hooks after a commit; returns their errors, since a commit can't be undone."""
    return [
        *(attempt("on_commit", partial(hook, version)) for hook in on_commit),
        attempt("post_process_weights", partial(hooks.post_process_weights, weights)),
        attempt("flush_cache", hooks.flush_cache),
        attempt("update_weight_version", partial(hooks.update_weight_version, version)),
    ]


def attempt(name: str, call: Callable[[], object]) -> str | None:
    """Runs ``call``; returns why it failed in one line, or ``None``."""
    try:
        call()
    except Exception as error:
        logger.exception("%s failed", name)
        return f"{name}: {type(error).__name__}: {error}"
    return None
