"""An object in a process of its own."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from inspect import isgenerator
from multiprocessing.connection import Connection
from typing import IO, Any

from fabric_ray.bench.processes import die_with_parent, kill, spawn
from fabric_ray.bench.results import ContenderError

_PROGRAM = "from fabric_ray.bench.child import main; main()"
_PATIENCE = 120.0


class Child:
    """The process, and a way to call the object's methods. Both ends are this program's, so calls
    and answers are pickled. A generator's values are answers, one after the other.

    Args:
        maker: ``module:name`` of the object's class, or of a function that makes it.
        arguments: of the maker.
        name: for messages; the maker's by default.
        env: added to this process's environment.
        fds: file descriptors that the process keeps.

    Raises:
        ContenderError: from every method that waits: what the object raised, or the last words of
            a process that has ended.
    """

    def __init__(
        self,
        maker: str,
        *arguments: Any,
        name: str = "",
        env: Mapping[str, str] | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        ours, theirs = socket.socketpair()
        self.name = name or maker
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by kill)
        # It finds what this process finds.
        path = os.pathsep.join([entry or os.getcwd() for entry in sys.path])
        with theirs:
            self.process: subprocess.Popen[bytes] = spawn(
                [sys.executable, "-c", _PROGRAM, maker, str(theirs.fileno())],
                env={**(env or {}), "PYTHONPATH": path},
                pass_fds=[theirs.fileno(), *fds],
                stdout=self._log,
                stderr=self._log,
            )
        self.line: Connection[Any, Any] = Connection(ours.detach())
        self.begin("__init__", *arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        """What the method returns, or the first value of its generator."""
        self.begin(method, *arguments)
        return self.end_call()

    def begin(self, method: str, *arguments: Any) -> None:
        """Starts a call; :meth:`end_call` waits for it."""
        try:
            self.line.send((method, arguments))
        except OSError as error:
            raise self._gone() from error

    def end_call(self, patience: float = _PATIENCE) -> Any:
        """The next answer of the call that was begun."""
        if not self.line.poll(patience):
            raise ContenderError(f"{self.name} did not answer within {patience:.0f} s")
        try:
            value, failure = self.line.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if failure is not None:
            raise ContenderError(f"{self.name}: {failure}")
        return value

    def answered(self) -> bool:
        """Whether :meth:`end_call` would return at once."""
        return self.line.poll(0)

    def close(self, patience: float = 2.0) -> None:
        """Calls the object's ``close``, unless that was begun before, and ends the process."""
        with contextlib.suppress(ContenderError):
            self.begin("close")
        with contextlib.suppress(ContenderError):
            self.end_call(patience)
        self.kill(grace=0.5)

    def kill(self, grace: float = 0.0) -> None:
        """With SIGKILL, whatever it is doing."""
        kill(self.process, grace=grace)
        self.line.close()
        self._log.close()

    def _gone(self) -> ContenderError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1)
        self._log.seek(0)
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line]
        words = [f"exit status {self.process.returncode}", *(x.strip()[:300] for x in lines[-1:])]
        return ContenderError(f"{self.name} has gone: {', '.join(words)}")


def main() -> None:
    """The process: its arguments are the maker and the descriptor of its end of the line."""
    die_with_parent()
    module, _, name = sys.argv[1].partition(":")
    line: Connection[Any, Any] = Connection(int(sys.argv[2]))
    made: Any = None
    method = ""
    while method != "close":
        try:
            method, arguments = line.recv()
        except EOFError:
            break
        try:
            if method == "__init__":
                made, value = getattr(importlib.import_module(module), name)(*arguments), None
            else:
                value = getattr(made, method)(*arguments)
            for answer in value if isgenerator(value) else (value,):
                line.send((answer, None))
        except Exception as error:
            traceback.print_exc()
            line.send((None, f"{type(error).__name__}: {error}"))
    sys.stdout.flush()
    sys.stderr.flush()
    # Some libraries crash in their exit handlers; what matters was said already.
    os._exit(0)
