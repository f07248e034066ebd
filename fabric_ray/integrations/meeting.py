"""Trainers that stand in the same call: the first leads, the others do what it asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from fabric_ray.errors import WeightSyncError
from fabric_ray.integrations.link import Link
from fabric_ray.weights.calls import CallFailure, call_failure

T = TypeVar("T")


class _Over(NamedTuple):
    """What the others are told at the end."""

    version: int
    error: str | None
    failed: dict[str, str]


class _Order(NamedTuple):
    function: Callable[..., Any]
    args: tuple[Any, ...]


class Meeting:
    """Calls to trainers by their ranks, and to workers by their links; all trainers make one.

    An actor that waits inside a method answers no calls, so they go by collectives of a process
    group, which rank 0 begins and the others wait for.

    Args:
        group: carries host memory; by default the process's first.
    """

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist

        self._dist, self._group = dist, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.version = 0
        """The same everywhere after each meeting, whatever became of it."""

    def hold(self, lead: Callable[[], T]) -> T | int:
        """Has rank 0 do something, which may ask the others for their part.

        Returns:
            what ``lead`` does on rank 0, and elsewhere :attr:`version`.

        Raises:
            WeightSyncError: elsewhere, whatever it raised on rank 0.
        """
        if self.rank:
            return self._follow()
        try:
            result = lead()
        except BaseException as error:
            # If the others can't be told, they notice by themselves.
            with suppress(RuntimeError):
                failed = getattr(error, "fields", {}).get("failed", {})
                self._tell(_Over(self.version, f"{type(error).__name__}: {error}", failed))
            raise
        self._tell(_Over(self.version, None, {}))
        return result

    def share(self, value: Any) -> Any:
        """As it is."""
        return value

    def ask(
        self,
        actors: Sequence[Any],
        function: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        timeout: float,
    ) -> list[Any]:
        """As :class:`fabric_ray.weights.calls.Calls`; whoever is asked is of one kind."""
        if not isinstance(actors[0], int):
            return self._workers(actors, function, args, timeout)
        orders = dict(zip(actors, map(_Order, [function] * len(args), args), strict=True))
        try:
            self._dist.scatter_object_list(
                [None], [orders.get(rank) for rank in range(self.size)], 0, self._group
            )
            answers: list[Any] = [None] * self.size
            self._dist.gather_object(_do(orders.get(0)), answers, 0, self._group)
        except RuntimeError as error:
            return [CallFailure(f"the trainers' process group broke: {error}")] * len(actors)
        return [answers[rank] for rank in actors]

    def _workers(
        self,
        links: Sequence[Link],
        function: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        timeout: float,
    ) -> list[Any]:
        def one(link: Link, each: tuple[Any, ...]) -> Any:
            return link.ask(function, each[1:], timeout)  # A worker knows its target's name.

        with ThreadPoolExecutor(len(links)) as pool:
            return list(pool.map(one, links, args))

    def _tell(self, over: _Over) -> None:
        self._dist.scatter_object_list([None], [over] * self.size, 0, self._group)

    def _follow(self) -> int:
        while True:
            box: list[Any] = [None]
            self._dist.scatter_object_list(box, None, 0, self._group)
            if isinstance(box[0], _Over):
                break
            self._dist.gather_object(_do(box[0]), None, 0, self._group)
        self.version = box[0].version
        if box[0].error is not None:
            raise WeightSyncError(
                f"trainer 0 gave up: {box[0].error}", version=self.version, failed=box[0].failed
            )
        return self.version


def _do(order: _Order | None) -> Any:
    if order is None:
        return None
    try:
        return order.function(None, *order.args)
    except Exception as error:
        return call_failure(error)._replace(error=None)  # it need not pickle
