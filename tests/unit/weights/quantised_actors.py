"""Trainers and rollouts of a quantised push as processes that die at a chosen step."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from fabric_ray import TransferEngine
from fabric_ray.errors import WeightSyncError
from fabric_ray.weights import WeightSource, WeightTarget
from fabric_ray.weights.calls import DIED, CallFailure, call_failure
from fabric_ray.weights.conversion import Conversion
from fabric_ray.weights.quant import EdgeExchange, Fp8, quantised_target
from fabric_ray.weights.step_sender import StepSender
from tests.unit.weights.quantised_model import (
    CONVERTED,
    ROLLOUTS,
    SHAPES,
    TRAINERS,
    full,
    shard,
    side,
    whole,
    wrong,
)

FORMAT = Fp8((3, 3))
FORMATS = {CONVERTED: FORMAT}
# So little that a trainer takes several steps.
_WATERMARK = 1024
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])
_CLASSES: dict[str, type] = {
    cls.__name__: cls for cls in (WeightSource, Conversion, EdgeExchange, StepSender, WeightTarget)
}


class Death(NamedTuple):
    """A ``kill -9``, and when."""

    at: str
    """Whose call it is that decides the moment."""
    call: str
    """``Class.method``."""
    nth: int = 0
    """Of its calls from now on."""
    over: bool = False
    """When the call has ended, rather than before it begins."""
    of: str = ""
    """Who dies; by default who makes the call."""

    @property
    def who(self) -> str:
        return self.of or self.at


class Held(NamedTuple):
    """What a rollout runs."""

    version: int | None
    usable: bool
    wrong: list[str]


# In the processes.


def serve(connection: Connection, role: str, rank: int, staged: bool) -> None:
    torch.set_num_threads(1)
    engine = TransferEngine(name=f"{role} {rank}", transport="shm")
    part: Any
    if role == "trainer":
        tensors = {name: shard(full(name, 0), name, rank).clone() for name in SHAPES}
        part = WeightSource(
            tensors, rank=rank, side=side(TRAINERS), engine=engine, watermark=_WATERMARK
        )
        part.tensors = tensors
    else:
        target = quantised_target(whole(ROLLOUTS), FORMATS)
        part = WeightTarget(target, rank=rank, engine=engine, staged=staged)
    while True:
        try:
            number, function, args = connection.recv()
        except EOFError:
            return
        try:
            answer = function(part, *args)
        except Exception as error:
            answer = call_failure(error)
        connection.send((number, answer))


def train(part: Any, version: int) -> None:
    for name, tensor in part.tensors.items():
        tensor.copy_(shard(full(name, version), name, part.rank))


def held(part: WeightTarget) -> Held:
    try:
        part.weights  # noqa: B018  (raises where there is nothing to use)
    except WeightSyncError:
        return Held(part.version, False, [])
    assert part.version is not None
    return Held(part.version, True, wrong(part, FORMAT, part.version))


def here(_: Any) -> None:
    """Answers: what takes its time at the start is over."""


def expect_death(_: Any, death: Death, pid: int) -> None:
    """Has a process killed when this one comes to a call."""
    name, method = death.call.split(".")
    original, calls = getattr(_CLASSES[name], method), iter(range(1 << 30))

    @functools.wraps(original)
    def call(*args: Any, **more: Any) -> Any:
        now = next(calls) == death.nth
        if now and not death.over:
            os.kill(pid, signal.SIGKILL)
        result = original(*args, **more)
        if now and death.over:
            os.kill(pid, signal.SIGKILL)
        if now:
            setattr(_CLASSES[name], method, original)
        return result

    setattr(_CLASSES[name], method, call)


# In the controller.


class _Process:
    def __init__(self, role: str, rank: int, staged: bool) -> None:
        self._connection, theirs = _CONTEXT.Pipe()
        args = (theirs, role, rank, staged)
        self._process = _CONTEXT.Process(target=serve, args=args, daemon=True)
        self._process.start()
        theirs.close()
        self._asked = 0

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def say(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        self._asked += 1
        # Who is dead is found out by hear().
        with contextlib.suppress(OSError):
            self._connection.send((self._asked, function, args))

    def hear(self, until: float) -> Any:
        try:
            while self._connection.poll(max(0.0, until - time.monotonic())):
                number, answer = self._connection.recv()
                if number == self._asked:
                    return answer
        except (EOFError, OSError):
            return CallFailure("its process has ended", DIED)
        return CallFailure("it did not answer")

    def end(self) -> None:
        self._process.kill()
        self._process.join(10)
        self._connection.close()


class ActorProcesses:
    """Trainer and rollout processes, by names such as ``trainer 0``; calls go over pipes."""

    def __init__(self, *, staged: bool) -> None:
        self._staged = staged
        self.trainers = [f"trainer {rank}" for rank in range(TRAINERS)]
        self.rollouts = [f"rollout {rank}" for rank in range(ROLLOUTS)]
        self._processes = {who: self._start(who) for who in (*self.trainers, *self.rollouts)}
        self.each([*self._processes], here)

    def share(self, value: Any) -> Any:
        return value

    def ask(
        self,
        actors: Sequence[str],
        function: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        timeout: float,
    ) -> list[Any]:
        for who, each in zip(actors, args, strict=True):
            self._processes[who].say(function, each)
        until = time.monotonic() + timeout + 5.0
        return [self._processes[who].hear(until) for who in actors]

    def each(
        self, group: Sequence[str], function: Callable[..., Any], *args: Any
    ) -> Mapping[str, Any]:
        """The answers of all actors of a group."""
        answers = self.ask(group, function, [args] * len(group), 100.0)
        for who, answer in zip(group, answers, strict=True):
            assert not isinstance(answer, CallFailure), f"{who}: {answer}"
        return dict(zip(group, answers, strict=True))

    def expect(self, death: Death) -> None:
        self.each([death.at], expect_death, death, self._processes[death.who].pid)

    def replace(self, who: str) -> None:
        """Starts another process in the place of one that has died."""
        self._processes[who].end()
        self._processes[who] = self._start(who)
        self.each([who], here)

    def close(self) -> None:
        for process in self._processes.values():
            process.end()

    def _start(self, who: str) -> _Process:
        role, rank = who.split()
        return _Process(role, int(rank), self._staged)
