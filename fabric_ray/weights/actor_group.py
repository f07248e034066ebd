"""The actors that a controller calls: all trainers, or all rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fabric_ray.errors import Stale, WeightSyncError
from fabric_ray.weights.calls import DIED, CallFailure, Calls
from fabric_ray.weights.quant import ExchangeFailed


class ActorGroup:
    """Actors of one role, by number.

    Args:
        role: "trainer" or "rollout", for errors.
        actors: by number.
        name: of the sources or targets in the actors.
        calls: calls functions in the actors.
        timeout: of each phase, in seconds.
    """

    def __init__(
        self, role: str, actors: Mapping[int, Any], name: str, calls: Calls, timeout: float
    ) -> None:
        self._role = role
        self.actors = dict(actors)
        self._name = name
        self._calls = calls
        self._timeout = timeout
        self.dead: dict[int, str] = {}
        """Why a process has ended, by the actor's number."""
        self.raised: BaseException | None = None
        """The first error of the last call."""
        self.stale: set[int] = set()
        """Actors that refused the last call, because another controller has connected."""

    def same_args(self, *args: Any) -> dict[int, tuple[Any, ...]]:
        """The same arguments for all actors."""
        return dict.fromkeys(self.actors, args)

    def label(self, number: int) -> str:
        return f"{self._role} {number}"

    def call_all(
        self, function: Callable[..., Any], what: str, args: Mapping[int, tuple[Any, ...]]
    ) -> dict[int, Any]:
        """Calls ``function`` in each actor of ``args``; returns the results by number.

        Raises:
            WeightSyncError: a call failed; the error names the actors.
        """
        results, failed = self.call(function, args)
        if failed:
            raise WeightSyncError(
                f"{names(failed)} did not {what}: {causes(failed)}", failed=failed
            ) from self.raised
        return results

    def call(
        self, function: Callable[..., Any], args: Mapping[int, tuple[Any, ...]]
    ) -> tuple[dict[int, Any], dict[str, str]]:
        """Calls ``function`` in each actor of ``args``; returns results by number, and causes of
        failed calls by label."""
        self.raised, self.stale = None, set()
        if not args:
            return {}, {}
        actors = [self.actors[number] for number in args]
        full_args = [(self._name, *more) for more in args.values()]
        results: dict[int, Any] = {}
        failures: list[tuple[int, CallFailure]] = []
        answers = self._calls.ask(actors, function, full_args, self._timeout)
        for number, answer in zip(args, answers, strict=True):
            if isinstance(answer, CallFailure):
                failures.append((number, answer))
                if answer.kind == DIED:
                    self.dead[number] = answer.cause
                elif answer.kind == Stale.__name__:
                    self.stale.add(number)
            else:
                results[number] = answer
        # A failed exchange follows from another actor's failure, so it is listed last.
        failures.sort(key=lambda failure: failure[1].kind == ExchangeFailed.__name__)
        self.raised = next((answer.error for _, answer in failures if answer.error), None)
        return results, {self.label(number): answer.cause for number, answer in failures}


def causes(failed: Mapping[str, str]) -> str:
    return "; ".join(f"{label}: {cause}" for label, cause in failed.items())


def names(failed: Mapping[str, str]) -> str:
    return " and ".join(failed)
