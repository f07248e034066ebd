"""The processes of a run: started, asked, killed, started again."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.chaos import worker
from tests.chaos.draw import WORKERS
from tests.chaos.reports import Opened

# One process loads everything and forks the others from itself: a new one costs milliseconds.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.chaos.preload"])


class Gone(Exception):
    """A process that has died."""


class Stuck(Exception):
    """A process that did not answer; the text is its stack."""


class Member:
    """One process, and the pipe to it."""

    def __init__(self, make: Callable[[int, str], Any], rank: int, transport: str, stacks: Path):
        self.rank, self.stacks = rank, stacks
        self.connection, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(
            target=worker.main, args=(theirs, make, rank, transport, str(stacks)), daemon=True
        )
        self.process.start()
        theirs.close()
        self._asked = 0
        self.killed_at: float | None = None
        self.opened: Opened | None = None

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def signal(self, number: int) -> None:
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.killed_at = time.monotonic()
        self.signal(signal.SIGKILL)

    def say(self, function: Callable[..., Any], *args: Any) -> int:
        self._asked += 1
        with contextlib.suppress(OSError):
            self.connection.send((self._asked, function, args))
        return self._asked

    def take(self) -> tuple[Any, ...]:
        """Its answer, if it is one to the last question."""
        try:
            number, said = self.connection.recv()
        except (EOFError, OSError):
            return (Gone("its process has died"),)
        return (said,) if number == self._asked else ()

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        self.process.kill()
        self.process.join(10)
        self.process.close()
        self.connection.close()


class ProcessGroup:
    """All processes of one transport.

    Args:
        transport: of their engines.
        make: what each process has, by its rank and transport.
        ranks: those of the processes.
    """

    def __init__(
        self,
        transport: str,
        make: Callable[[int, str], Any] = worker.Worker,
        ranks: Sequence[int] = range(WORKERS),
    ) -> None:
        self.transport, self._make = transport, make
        self._folder = tempfile.TemporaryDirectory(prefix="chaos-")
        self.members = {rank: self._start(rank) for rank in ranks}

    def _start(self, rank: int) -> Member:
        return Member(self._make, rank, self.transport, Path(self._folder.name) / f"stacks-{rank}")

    def renew(self) -> list[int]:
        """Starts the processes again that have died; their ranks."""
        # A process that was killed may take a moment to die.
        dead = [r for r, m in self.members.items() if m.killed_at or not m.process.is_alive()]
        for rank in dead:
            self.members[rank].end()
            self.members[rank] = self._start(rank)
        return dead

    def ask(
        self,
        function: Callable[..., Any],
        args: Mapping[int, tuple[Any, ...]],
        limit: float,
    ) -> dict[int, Any]:
        """The answer of each rank in `args`; an exception if it failed, died (`Gone`) or hangs
        (`Stuck`)."""
        for rank, each in args.items():
            self.members[rank].say(function, *each)
        return self.hear(list(args), limit)

    def hear(self, ranks: list[int], limit: float) -> dict[int, Any]:
        deadline = time.monotonic() + limit
        said: dict[int, Any] = {}
        while missing := [rank for rank in ranks if rank not in said]:
            left = deadline - time.monotonic()
            ready = wait([self.members[r].connection for r in missing], max(0.0, left))
            for rank in missing:
                connection = self.members[rank].connection
                if connection in ready:
                    for answer in self.members[rank].take():
                        said[rank] = answer
            if left <= 0 and not ready:
                for rank in missing:
                    said[rank] = Stuck(self._stack(rank))
        return said

    def _stack(self, rank: int) -> str:
        member = self.members[rank]
        member.signal(signal.SIGUSR1)
        time.sleep(0.2)
        return member.stacks.read_text()[-3000:] or "it says nothing, not even where it stands"

    def close(self) -> None:
        for member in self.members.values():
            member.end()
        self._folder.cleanup()
