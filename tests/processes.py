"""Other processes for tests: a function of a test module runs there, with a pipe to talk over."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Forks of a server that has imported what takes a second of CPU time, and nothing of ours.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "pytest", "hypothesis"])


class Other:
    """A process that runs ``target(connection, *args)``; killed when the block ends."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self.connection, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(
            target=_run_there, args=(_Environment(), target, theirs, args), daemon=True
        )
        self.process.start()
        theirs.close()

    def hear(self, timeout: float = 30.0) -> Any:
        if not self.connection.poll(timeout):
            raise TimeoutError(f"the other process said nothing for {timeout} s")
        value = self.connection.recv()
        if isinstance(value, BaseException):
            raise value
        return value

    def say(self, value: Any) -> None:
        self.connection.send(value)

    def ask(self, value: Any, timeout: float = 30.0) -> Any:
        self.say(value)
        return self.hear(timeout)

    def kill(self) -> None:
        """``kill -9``, and wait until it is gone."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(10)

    def signal(self, number: int) -> None:
        """Sends a signal. After SIGSTOP no thread of the process runs any more."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number == signal.SIGSTOP:
            # Other threads go on until the one that takes the signal has been scheduled.
            within(10, "the stop", lambda: not self._runs())

    def _runs(self) -> bool:
        """Whether a thread of the process is not stopped."""
        try:
            tasks = [*Path(f"/proc/{self.process.pid}/task").iterdir()]
            states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks]
        except (FileNotFoundError, ProcessLookupError):  # one has ended meanwhile
            return self.process.is_alive()
        return not {*states} <= {"T", "Z", "X"}

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
        self.connection.close()


class Thread(Other):
    """The same in a thread of this process: for what needs nothing of its own."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self._thread = threading.Thread(target=_caught, args=(target, theirs, args), daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        self._thread.join(30)
        assert not self._thread.is_alive(), "the other side goes on"


def _caught(target: Callable[..., None], connection: Connection, args: tuple[Any, ...]) -> None:
    with contextlib.suppress(Exception):  # it was sent
        _run(target, connection, args)
    connection.close()


class _Environment:
    """The environment of this process. The process that unpickles it takes it over.

    It stands before the target: the target's module may read the environment when it is imported.
    """

    def __reduce__(self) -> tuple[Callable[..., None], tuple[dict[str, str]]]:
        return _take_over, ({**os.environ},)


def _take_over(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _run_there(_: None, *args: Any) -> None:
    _run(*args)


def _run(target: Callable[..., None], connection: Connection, args: tuple[Any, ...]) -> None:
    try:
        target(connection, *args)
    except BaseException as error:  # it is for the other side to judge
        connection.send(error)
        raise


def descriptors() -> int:
    """Files that this process has open."""
    return len(os.listdir("/proc/self/fd"))


def shared_files() -> list[str]:
    """What lies in /dev/shm and was put there by a process of this user, but for the key that is
    kept for all engines of a user. What others put there meanwhile is theirs."""
    user, found = os.geteuid(), []
    for entry in os.scandir("/dev/shm"):
        with contextlib.suppress(FileNotFoundError):  # it has just been removed
            if entry.stat().st_uid == user and entry.name != f"fabric-ray-{user}-key":
                found.append(entry.name)
    return sorted(found)


def within(seconds: float, what: str, done: Callable[[], bool]) -> float:
    """Waits until ``done``; returns how long that took."""
    start = time.monotonic()
    while not done():
        if time.monotonic() - start > seconds:
            raise AssertionError(f"{what} did not happen within {seconds} s")
        time.sleep(0.002)
    return time.monotonic() - start
