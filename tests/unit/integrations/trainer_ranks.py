"""A trainer rank in a process of its own, which makes the calls that it is told."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from fabric_ray.errors import FabricError
from fabric_ray.integrations import collective_calls
from fabric_ray.integrations.collective_calls import CollectiveCalls
from fabric_ray.weights.calls import CallFailure
from tests.processes import descriptors, within

TIMEOUT = 5.0


def echo(_: Any, name: str, value: Any) -> tuple[int, Any]:
    return dist.get_rank(), value


def size(_: Any, name: str, value: bytes) -> int:
    return len(value)


def stops(_: Any, name: str, rank: int) -> int:
    """Stops the process of a rank until the test lets it go on."""
    if rank == dist.get_rank():
        os.kill(os.getpid(), signal.SIGSTOP)
    return dist.get_rank()


def tally(_: Any, name: str, value: Any) -> int:
    """How often this process was asked."""
    global _tallied
    _tallied += 1
    return _tallied


def unlisted(_: Any, name: str, value: Any) -> int:
    """No other rank can be asked to call it."""
    return tally(None, name, value)


def process(_: Any, name: str, value: Any) -> int:
    return os.getpid()


def dies(_: Any, name: str, rank: int) -> int:
    if rank == dist.get_rank():
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.get_rank()


_tallied = 0
_ASKED = echo, size, stops, tally, process, dies
CALLS: dict[str, Callable[..., Any]] = {f.__name__: f for f in _ASKED}


def rank(connection: Connection, number: int, ranks: int, store: str) -> None:
    """Takes ``(what, *args)``; answers with the result, or with the error's text and its causes."""
    collective_calls._GRACE_S = 1.0
    dist.init_process_group("gloo", store, rank=number, world_size=ranks)
    calls = CollectiveCalls(timeout=TIMEOUT, functions=CALLS)

    def ask(function: str, value: Any, timeout: float = TIMEOUT) -> list[Any]:
        made = CALLS.get(function, unlisted)
        asked = calls.ask(range(ranks), made, [("", value)] * ranks, timeout)
        return [a.cause if isinstance(a, CallFailure) else a for a in asked]

    def lead_after_stop() -> list[Any]:
        stops(None, "", 0)
        return ask("echo", "late")

    def lead_beside_a_stop(other: int) -> list[Any]:
        ask("stops", other)
        return ask("size", bytes(16 << 20), 2 * TIMEOUT)  # no kernel takes it whole

    def lead_without(other: int) -> list[Any]:
        os.kill(ask("process", None)[other], signal.SIGSTOP)
        return ask("tally", None)

    connection.send("ready")
    while True:
        try:
            what, *args = connection.recv()
        except EOFError:
            return
        try:
            if what == "ask":
                answer: Any = calls.run(lambda args=args: ask(*args))  # type: ignore[misc]
            elif what == "lead after a stop":
                answer = calls.run(lead_after_stop)
            elif what == "ask after a stop":
                answer = calls.run(lambda args=args: lead_beside_a_stop(*args))  # type: ignore[misc]
            elif what == "tally without":
                answer = calls.run(lambda args=args: lead_without(*args))  # type: ignore[misc]
            elif what == "fail":
                failure = ValueError("no engine") if number == args[0] else None
                answer = calls.run(lambda: "led", failure=failure)
            else:
                answer = remake(*args)
        except Exception as error:
            failed = error.fields.get("failed", {}) if isinstance(error, FabricError) else {}
            answer = f"{type(error).__name__}: {error}", failed
        connection.send(answer)


def remake(times: int, closes: bool) -> tuple[int, int]:
    """Makes ends and closes or drops them; returns by how much the process has grown."""

    def once() -> None:
        made = CollectiveCalls(timeout=30.0, functions=CALLS)
        made.run(lambda: made.ask(range(made.size), echo, [("", 1)] * made.size, 30.0))
        if closes:
            made.close()

    return growth(once, times)


def growth(once: Callable[[], object], times: int) -> tuple[int, int]:
    """By how many files and threads the process has grown after the second time, without the help
    of the garbage collector."""

    def has() -> tuple[int, int]:
        return descriptors(), threading.active_count()

    for _ in range(2):
        once()
    gc.collect()
    gc.disable()
    try:
        before = has()
        for _ in range(times):
            once()
        with suppress(AssertionError):  # what serves a connection ends soon after it
            within(5, "the end", lambda: has() <= before)
        files, threads = has()
        return files - before[0], threads - before[1]
    finally:
        gc.enable()
