"""How a controller reaches the processes that hold sources and targets."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from fabric_ray.errors import FabricError, WeightSyncError

DIED = "died"


class Unanswered(NamedTuple):
    """In place of an answer."""

    cause: str
    kind: str = ""
    """The error's class, by name, if there was one; ``DIED`` where its process has ended."""
    error: BaseException | None = None
    """What was raised, if it can be had here."""


class Calls(Protocol):
    """Calls to actors, or to whatever stands in their place.

    A call is ``function(actor, *args)``, made where the actor lives; ``function`` is a plain
    function of a module, so that it can be named there.
    """

    def share(self, value: Any) -> Any:
        """What to pass in place of a value that several actors are given."""

    def ask(
        self,
        actors: Sequence[Any],
        function: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        timeout: float,
    ) -> list[Any]:
        """Calls all at once; returns their answers in order.

        Whoever fails, dies or is silent for ``timeout`` seconds gives :class:`Unanswered`.

        Raises:
            WeightSyncError: there is no way to anybody; nothing was asked.
        """


class RayCalls:
    """Calls by ``__ray_call__``, which any Ray actor answers."""

    def share(self, value: Any) -> Any:
        import ray

        _need_ray()
        # It travels to each node once.
        return ray.put(value)

    def ask(
        self,
        actors: Sequence[Any],
        function: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        timeout: float,
    ) -> list[Any]:
        import ray
        from ray.exceptions import RayError

        _need_ray()
        refs = [_asked(actor, function, each) for actor, each in zip(actors, args, strict=True)]
        # Whoever acts within the time should be able to say what took it.
        deadline = time.monotonic() + timeout + 5.0
        answers: list[Any] = []
        for ref in refs:
            if isinstance(ref, Unanswered):
                answers.append(ref)
                continue
            try:
                answers.append(ray.get(ref, timeout=max(0.1, deadline - time.monotonic())))
            except (RayError, FabricError) as error:
                answers.append(_unanswered(error, timeout))
        return answers


def _need_ray() -> None:
    """That Ray runs: asked for anything, it would otherwise start a cluster without any actors.

    Raises:
        WeightSyncError: it doesn't.
    """
    import ray

    if not ray.is_initialized():
        raise WeightSyncError(
            "ray doesn't run in this process, or not any more, so nobody can be asked; call "
            "ray.init(), then make the actors and a WeightSync of them"
        )


def _asked(actor: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What the answer will come by, or why there will be none."""
    try:
        return actor.__ray_call__.remote(function, *args)
    except Exception as error:
        return Unanswered(
            f"it can't be asked ({error}); if ray was restarted, make the actors and the "
            "WeightSync anew",
            type(error).__name__,
            error,
        )


def _unanswered(error: BaseException, timeout: float) -> Unanswered:
    from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

    from fabric_ray.runtime.causes import cause_of, original

    if isinstance(error, ActorUnavailableError):
        return Unanswered("its actor can't be reached at the moment", type(error).__name__, error)
    if isinstance(error, RayActorError):
        return Unanswered(f"its actor has died: {cause_of(error)}", DIED, error)
    if isinstance(error, GetTimeoutError):
        return Unanswered(f"it did not answer within {timeout:g} s; see whether it is stuck")
    return unanswered(original(error))


def unanswered(error: BaseException) -> Unanswered:
    """What to answer where a call has raised."""
    kind = type(error).__name__
    told = str(error) if isinstance(error, FabricError) else f"{kind}: {error}"
    return Unanswered(told, kind, error)
