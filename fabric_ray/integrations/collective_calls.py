"""Calls among trainers that are made by all of them together: rank 0 leads, the others follow."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from typing import Any, TypeVar

from fabric_ray.errors import WeightSyncError
from fabric_ray.integrations.named_functions import (
    Function,
    NamedFunctions,
    phases_of,
    result_type,
)
from fabric_ray.integrations.trainer_frames import (
    ARRIVES,
    GIVES_UP,
    Answer,
    Call,
    Failed,
    Finished,
    Frame,
    FromLeader,
    Working,
)
from fabric_ray.integrations.trainer_links import LOST, FollowerEnd, LeaderEnd, Link, store_of
from fabric_ray.integrations.worker_rpc import WorkerClient
from fabric_ray.weights.actor_group import causes, names
from fabric_ray.weights.calls import call_failure

T = TypeVar("T")

# A trainer's own timeout error should arrive first.
_LATER_S = 5.0
# Rank 0 computes between its calls: plans of large models take seconds.
_GRACE_S = 30.0
_TELL_S = 5.0

PHASES = phases_of("source")


class _Late(Exception):
    """Trainer 0 does not go on."""


class CollectiveCalls:
    """Calls trainers by rank, and workers by their clients. Each trainer makes one.

    A trainer actor that runs a method answers no actor calls. So rank 0 calls the other trainers
    over connections, at which they wait. A process without groups is the only trainer.

    A rank that comes late, or is stuck, is named after ``timeout`` seconds, and the run fails on
    all ranks. It gets the same error when it comes, so that all ranks begin the next run together.

    Args:
        group: of the trainers; by default the process's first.
        timeout: seconds that ranks wait for each other.
        functions: those that ranks can be asked to call, by name.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        timeout: float,
        functions: Mapping[str, Function] = PHASES,
    ) -> None:
        import torch.distributed as dist

        self.rank, self.size, self._timeout = 0, 1, timeout
        self._functions = NamedFunctions(functions)
        self._leader: LeaderEnd | None = None
        self._follower: FollowerEnd | None = None
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank:
            self._follower = FollowerEnd(store_of(group), self.rank, timeout)
        elif self.size > 1:
            self._leader = LeaderEnd(store_of(group), self.size, timeout)
        self._end = weakref.finalize(self, _close, self._leader or self._follower)
        self._runs = self._number = 0
        # What trainer 0 does: on rank 0 until when it has said so, on the others for how long.
        self._told: tuple[str, float] = ("", 0.0)
        self.version = 0
        """The version in use, the same on all ranks after each run."""
        self.name: str | None = None
        """Of this rank's source, in place of the name in calls."""

    def close(self) -> None:
        """Ends the connections. Ranks that wait in a run fail."""
        self._end()

    def run(self, lead: Callable[[], T], *, failure: Exception | None = None) -> T | int:
        """Runs ``lead`` on rank 0, which may call the other ranks; these follow until it returns.

        Args:
            failure: of this rank, which can't take part: the run fails on all ranks.

        Returns:
            the result of ``lead`` on rank 0, and :attr:`version` on the other ranks.

        Raises:
            WeightSyncError: a rank did not come within the timeout, or failed; ``failed`` names it.
                On the other ranks also, if ``lead`` raised on rank 0.
        """
        self._runs, self._number, self._told = self._runs + 1, ARRIVES, ("", 0.0)
        if self._follower is not None:
            return self._follow(self._follower, failure)
        try:
            self._await_others(failure)
            result = lead()
        except BaseException as error:
            failed = getattr(error, "fields", {}).get("failed", {})
            self._tell(Finished(self.version, f"{type(error).__name__}: {error}", failed))
            raise
        self._tell(Finished(self.version, None, {}))
        return result

    def share(self, value: Any) -> Any:
        """Returns the value unchanged."""
        return value

    def working(self, what: str, seconds: float) -> None:
        """Tells the other ranks what rank 0 does next, and how long it may take."""
        now = time.monotonic()
        said, until = self._told
        if what == said and now + seconds <= until:
            return
        self._told = what, now + seconds + _LATER_S
        self._tell(Working(what, seconds + _LATER_S))

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
        calls = dict(zip(actors, args, strict=True))
        others = [rank for rank in calls if rank]
        if self._leader is not None and others:
            self._number += 1
            for each, ranks in groupby(others, calls.__getitem__):
                call = Call.of(function.__name__, each)
                self._leader.send(ranks, Frame(self._runs, self._number, call), timeout)
        deadline = time.monotonic() + timeout + _LATER_S
        answers: dict[int, Any] = {}
        if 0 in calls:
            answers[0] = self._execute(function, *calls[0])
        if self._leader is not None and others:
            late = f"it did not answer within {timeout:g} s; see whether it is stuck"
            answers |= self._leader.collect(
                others, self._runs, self._number, deadline, late, type=result_type(function)
            )
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

        self.working(function.__name__, timeout)
        with ThreadPoolExecutor(len(workers)) as pool:
            return list(pool.map(one, workers, args))

    def _await_others(self, failure: Exception | None) -> None:
        """
        Args:
            failure: of this rank, which the others are told when they have come.

        Raises:
            WeightSyncError: some have not come in time, or have failed; ``failed`` names them.
        """
        if failure is not None:
            with suppress(WeightSyncError):
                self._await_others(None)
            raise failure
        if self._leader is None:
            return
        self.working("the wait for the other trainers", self._timeout)
        late = (
            f"it did not come within {self._timeout:g} s; see whether it is stuck or has raised, "
            "or raise the timeout"
        )
        deadline = time.monotonic() + self._timeout
        came = self._leader.collect(range(1, self.size), self._runs, ARRIVES, deadline, late)
        failed = {f"trainer {r}": a.cause for r, a in sorted(came.items()) if a is not None}
        if failed:
            raise WeightSyncError(
                f"{names(failed)} did not take part, and nothing was sent: {causes(failed)}",
                version=self.version,
                failed=failed,
            )

    def _tell(self, word: Working | Finished) -> None:
        if self._leader is not None:
            self._number += 1
            self._leader.send(range(1, self.size), Frame(self._runs, self._number, word), _TELL_S)

    def _follow(self, follower: FollowerEnd, failure: Exception | None) -> int:
        self._told = "", self._timeout
        try:
            finished = self._until_finished(follower, failure)
        except _Late as error:
            raise self._late() from error
        except TimeoutError as error:  # within a frame
            follower.close()
            raise self._late() from error
        except (*LOST, RuntimeError) as error:
            follower.close()
            cause = f"its connection ended ({type(error).__name__}: {error})"
            raise WeightSyncError(
                f"trainer 0 was lost: {cause}; see whether its process has ended, and start the "
                "trainers anew; rollouts have one version or stand still",
                version=self.version,
                failed={"trainer 0": cause},
            ) from error
        self.version = finished.version
        if finished.error is not None:
            raise WeightSyncError(
                f"trainer 0 gave up: {finished.error}",
                version=self.version,
                failed=finished.failed,
            )
        return self.version

    def _until_finished(self, follower: FollowerEnd, failure: Exception | None) -> Finished:
        """Answers calls.

        Raises:
            _Late: trainer 0 is silent for longer than it said.
            DecodeError: it asks for what can't be asked.
        """
        link = follower.connect(time.monotonic() + self._timeout + _GRACE_S)
        self._send(link, ARRIVES, _failed(failure) if failure else Answer.of(None), _TELL_S)
        while True:
            seconds = self._told[1]
            if not link.has_frame(time.monotonic() + seconds + _GRACE_S):
                cause = f"it waited for trainer 0 for {seconds:g} s, and gave up"
                self._send(link, GIVES_UP, Failed(cause), _TELL_S)
                raise _Late
            frame = link.receive(FromLeader)
            if frame.run < self._runs:
                continue  # this rank gave it up
            if frame.run > self._runs:
                raise _Late  # it connected when trainer 0 had given it up
            word = frame.word
            if isinstance(word, Finished):
                return word
            if isinstance(word, Working):
                self._told = word.what, word.seconds
                continue
            self._answer(link, frame.number, word)
            # Another rank may be slow to take the call, and to answer it.
            self._told = word.function, 2 * self._timeout + _LATER_S

    def _late(self) -> WeightSyncError:
        what, seconds = self._told
        cause = f"it was silent for {seconds:g} s" + (f", in {what}" if what else "")
        return WeightSyncError(
            f"trainer 0 did not go on: {cause}; see whether it is stuck or has raised, or raise "
            "the timeout; rollouts have one version or stand still",
            version=self.version,
            failed={"trainer 0": cause},
        )

    def _answer(self, link: Link, number: int, call: Call) -> None:
        function, args = self._functions.named(call.function, call.args)
        # RS-3: behind a call that rank 0 still waits for, there is nothing.
        if not link.has_frame(0.0):
            word: Answer | Failed
            try:
                word = Answer.of(function(None, self.name or call.name, *args))
            except Exception as error:
                word = _failed(error)
            self._send(link, number, word, self._timeout)

    def _execute(self, function: Function, name: str, *args: Any) -> Any:
        try:
            return function(None, self.name or name, *args)
        except Exception as error:
            return call_failure(error)._replace(error=None)

    def _send(self, link: Link, number: int, word: Answer | Failed, seconds: float) -> None:
        link.send(Frame(self._runs, number, word).encoded(), seconds)


def _failed(error: Exception) -> Failed:
    cause, kind, _ = call_failure(error)
    return Failed(cause, kind)


def _close(end: LeaderEnd | FollowerEnd | None) -> None:
    if end is not None:
        end.close()
