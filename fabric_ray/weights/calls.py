"""Calls of a controller to the actors that hold sources and targets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from fabric_ray.errors import FabricError, InvalidArgument, WeightSyncError

DIED = "died"


class CallFailure(NamedTuple):
    """Stands for the answer of a call that failed."""

    cause: str
    kind: str = ""
    """Class name of the error, if there is one; ``DIED`` if the process has ended."""
    error: BaseException | None = None
    """The error, if it could be transported."""


class Calls(Protocol):
    """Runs functions in actors.

    A call runs ``function(actor, *args)`` in the actor's process; ``function`` is a module-level
    function, so that it can be pickled by name.
    """

    def share(self, value: Any) -> Any:
        """Returns what to pass for a large value in calls to several actors."""

    def ask(
        self,
        actors: Sequence[Any],
        function: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        timeout: float,
    ) -> list[Any]:
        """Calls all actors at once; returns their answers in order.

        The answer of an actor that fails, dies or exceeds ``timeout`` seconds is a
        :class:`CallFailure`.

        Raises:
            WeightSyncError: no actor could be called.
        """


class RayCalls:
    """Calls Ray actors by ``__ray_call__``, which every actor has."""

    def __init__(self) -> None:
        self._ready: set[Any] = set()
        """Actors that have answered a call."""

    def share(self, value: Any) -> Any:
        import ray

        _need_ray()
        # Ray transports an object to each node once.
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
        refs = [_submit(actor, function, a) for actor, a in zip(actors, args, strict=True)]
        # 5 s more, so that an actor's own timeout error arrives first.
        deadline = time.monotonic() + timeout + 5.0
        answers: list[Any] = []
        for actor, ref in zip(actors, refs, strict=True):
            if isinstance(ref, CallFailure):
                answers.append(ref)
                continue
            try:
                answers.append(ray.get(ref, timeout=max(0.1, deadline - time.monotonic())))
                self._ready.add(actor)
            except (RayError, FabricError) as error:
                answers.append(_call_failure(error, timeout, ready=actor in self._ready))
        return answers


def check_handles(role: str, actors: Iterable[Any]) -> None:
    """Raises InvalidArgument unless all of ``actors`` are handles of Ray actors, each once."""
    seen: list[Any] = []
    for index, actor in enumerate(actors):
        # A class of actors has `__ray_call__` too, but no `remote` of it.
        if not hasattr(getattr(actor, "__ray_call__", None), "remote"):
            raise InvalidArgument(
                f"{role}[{index}] is {type(actor).__name__}, expected an actor handle; pass what "
                "ray.remote(Class).remote(...) returns, of the actor that holds the weights"
            )
        if actor in seen:
            raise InvalidArgument(
                f"{role}[{index}] is the actor of {role}[{seen.index(actor)}] again, expected "
                "each actor once; make one actor for each rank"
            )
        seen.append(actor)


def _need_ray() -> None:
    """Raises WeightSyncError if Ray doesn't run: a call would start an empty cluster."""
    import ray

    if not ray.is_initialized():
        raise WeightSyncError(
            "ray doesn't run in this process, or not any more, so no actor can be called; call "
            "ray.init(), then make the actors and a WeightSync of them"
        )


def _submit(actor: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Returns the reference of the answer, or a CallFailure."""
    try:
        return actor.__ray_call__.remote(function, *args)
    except Exception as error:
        return CallFailure(
            f"its actor can't be called ({error}); if ray was restarted, make the actors and the "
            "WeightSync anew",
            type(error).__name__,
            error,
        )


def _call_failure(error: BaseException, timeout: float, *, ready: bool = True) -> CallFailure:
    """The answer of a call that raised ``error``.

    Args:
        ready: whether the actor has answered a call before.
    """
    from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

    from fabric_ray.runtime.causes import cause_of, original

    if isinstance(error, ActorUnavailableError):
        return CallFailure("its actor can't be reached at the moment", type(error).__name__, error)
    if isinstance(error, RayActorError):
        return CallFailure(f"its actor has died: {cause_of(error)}", DIED, error)
    if isinstance(error, GetTimeoutError):
        if not ready:
            return CallFailure(
                f"it is not ready yet after {timeout:g} s, for it has answered no call so far; see "
                "in `ray list actors` whether it waits for resources, see what its __init__ does, "
                "or raise the timeout"
            )
        return CallFailure(f"it did not answer within {timeout:g} s; see whether it is stuck")
    return call_failure(original(error))


def call_failure(error: BaseException) -> CallFailure:
    """The answer of a call that raised ``error``."""
    kind = type(error).__name__
    cause = str(error) if isinstance(error, FabricError) else f"{kind}: {error}"
    return CallFailure(cause, kind, error)
