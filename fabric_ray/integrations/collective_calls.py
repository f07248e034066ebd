"""Calls among trainers over collectives of a process group: rank 0 leads, the others follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from fabric_ray.errors import WeightSyncError
from fabric_ray.integrations.worker_rpc import WorkerClient
from fabric_ray.weights.calls import CallFailure, call_failure

T = TypeVar("T")


class _Finished(NamedTuple):
    """Ends a run at the followers."""

    version: int
    error: str | None
    failed: dict[str, str]


class _RemoteCall(NamedTuple):
    function: Callable[..., Any]
    args: tuple[Any, ...]


class CollectiveCalls:
    """Calls trainers by rank, and workers by their clients. Each trainer makes one.

    A trainer actor that runs a method answers no actor calls. So rank 0 calls the other trainers by
    collectives of a process group, in which they wait. A process without groups is the only
    trainer.

    Args:
        group: carries host memory; by default the process's first.
    """

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist

        self._dist, self._group = dist, group
        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.version = 0
        """The version in use, the same on all ranks after each run."""

    def run(self, lead: Callable[[], T]) -> T | int:
        """Runs ``lead`` on rank 0, which may call the other ranks; these follow until it returns.

        Returns:
            the result of ``lead`` on rank 0, and :attr:`version` on the other ranks.

        Raises:
            WeightSyncError: on the other ranks, if ``lead`` raised on rank 0.
        """
        if self.rank:
            return self._follow()
        try:
            result = lead()
        except BaseException as error:
            # If the broadcast fails, the other ranks fail in their own collective.
            with suppress(RuntimeError):
                failed = getattr(error, "fields", {}).get("failed", {})
                self._finish(_Finished(self.version, f"{type(error).__name__}: {error}", failed))
            raise
        self._finish(_Finished(self.version, None, {}))
        return result

    def share(self, value: Any) -> Any:
        """Returns the value unchanged."""
        return value

    def ask(
        self,
        actors: Sequence[Any],
        function: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        timeout: float,
    ) -> list[Any]:
        """As :class:`fabric_ray.weights.calls.Calls`; all actors are ranks, or all are clients."""
        if not isinstance(actors[0], int):
            return self._call_workers(actors, function, args, timeout)
        calls = dict(zip(actors, map(_RemoteCall, [function] * len(args), args), strict=True))
        if self.size == 1:
            return [_execute(calls[rank]) for rank in actors]
        try:
            self._dist.scatter_object_list(
                [None], [calls.get(rank) for rank in range(self.size)], 0, self._group
            )
            answers: list[Any] = [None] * self.size
            self._dist.gather_object(_execute(calls.get(0)), answers, 0, self._group)
        except RuntimeError as error:
            return [CallFailure(f"the trainers' process group broke: {error}")] * len(actors)
        return [answers[rank] for rank in actors]

    def _call_workers(
        self,
        workers: Sequence[WorkerClient],
        function: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        timeout: float,
    ) -> list[Any]:
        def one(worker: WorkerClient, each: tuple[Any, ...]) -> Any:
            return worker.ask(function, each[1:], timeout)  # A worker knows its target's name.

        with ThreadPoolExecutor(len(workers)) as pool:
            return list(pool.map(one, workers, args))

    def _finish(self, finished: _Finished) -> None:
        if self.size == 1:
            return
        self._dist.scatter_object_list([None], [finished] * self.size, 0, self._group)

    def _follow(self) -> int:
        while True:
            box: list[Any] = [None]
            try:
                self._dist.scatter_object_list(box, None, 0, self._group)
                if isinstance(box[0], _Finished):
                    break
                self._dist.gather_object(_execute(box[0]), None, 0, self._group)
            except RuntimeError as error:
                raise WeightSyncError(
                    f"the trainers' process group broke: {error}; trainer 0 may have ended, so "
                    "start the trainers anew; rollouts have one version or stand still",
                    version=self.version,
                ) from error
        self.version = box[0].version
        if box[0].error is not None:
            raise WeightSyncError(
                f"trainer 0 gave up: {box[0].error}", version=self.version, failed=box[0].failed
            )
        return self.version


def _execute(call: _RemoteCall | None) -> Any:
    if call is None:
        return None
    try:
        return call.function(None, *call.args)
    except Exception as error:
        return call_failure(error)._replace(error=None)  # it may not pickle
