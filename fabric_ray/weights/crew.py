"""Trainers or rollouts as the controller sees them: by number, and by what each answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fabric_ray.errors import WeightSyncError
from fabric_ray.weights.calls import DIED, Calls, Unanswered
from fabric_ray.weights.quant import ExchangeFailed


class Crew:
    """Actors of one role.

    Args:
        role: what to call them.
        actors: by number.
        name: of the sources or targets that they hold.
        calls: how they are reached.
        timeout: seconds that a stage may take.
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
        """Whose process is known to have ended, and why."""
        self.raised: BaseException | None = None
        """What was raised first where the last call failed."""

    def each(self, *args: Any) -> dict[int, tuple[Any, ...]]:
        """The same arguments for everybody."""
        return dict.fromkeys(self.actors, args)

    def who(self, number: int) -> str:
        return f"{self._role} {number}"

    def all(
        self, function: Callable[..., Any], what: str, args: Mapping[int, tuple[Any, ...]]
    ) -> dict[int, Any]:
        """What ``function`` returns in each actor that there are arguments for.

        Raises:
            WeightSyncError: one failed; it is named.
        """
        results, failed = self.some(function, args)
        if failed:
            raise WeightSyncError(
                f"{names(failed)} did not {what}: {causes(failed)}", failed=failed
            ) from self.raised
        return results

    def some(
        self, function: Callable[..., Any], args: Mapping[int, tuple[Any, ...]]
    ) -> tuple[dict[int, Any], dict[str, str]]:
        """Results of those who answered, and who failed why."""
        self.raised = None
        if not args:
            return {}, {}
        actors = [self.actors[number] for number in args]
        each = [(self._name, *more) for more in args.values()]
        results: dict[int, Any] = {}
        silent: list[tuple[int, Unanswered]] = []
        answers = self._calls.ask(actors, function, each, self._timeout)
        for number, answer in zip(args, answers, strict=True):
            if isinstance(answer, Unanswered):
                silent.append((number, answer))
                if answer.kind == DIED:
                    self.dead[number] = answer.cause
            else:
                results[number] = answer
        # Who only missed another comes last.
        silent.sort(key=lambda one: one[1].kind == ExchangeFailed.__name__)
        self.raised = next((answer.error for _, answer in silent if answer.error), None)
        return results, {self.who(number): answer.cause for number, answer in silent}


def causes(failed: Mapping[str, str]) -> str:
    return "; ".join(f"{who}: {cause}" for who, cause in failed.items())


def names(failed: Mapping[str, str]) -> str:
    return " and ".join(failed)
