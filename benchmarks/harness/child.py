"""An object in a process of its own: `python -m benchmarks.harness.child MODULE:MAKER FD`."""

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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from benchmarks.harness.contender import ContenderError
from benchmarks.harness.processes import die_with_parent, kill, spawn

_ROOT = str(Path(__file__).resolve().parents[2])
_PATIENCE = 120.0


class Child:
    """The process, and a way to call the object's methods. Both ends are this program's, so calls
    and answers are pickled.

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
        path = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs:
            self.process: subprocess.Popen[bytes] = spawn(
                [sys.executable, "-m", "benchmarks.harness.child", maker, str(theirs.fileno())],
                env={**(env or {}), "PYTHONPATH": path},
                pass_fds=[theirs.fileno(), *fds],
                stdout=self._log,
                stderr=self._log,
            )
        self.line: Connection[Any, Any] = Connection(ours.detach())
        self.begin("__init__", *arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        """What the method returns."""
        self.begin(method, *arguments)
        return self.end_call()

    def begin(self, method: str, *arguments: Any) -> None:
        """Starts a call; :meth:`end_call` waits for it."""
        try:
            self.line.send((method, arguments))
        except OSError as error:
            raise self._gone() from error

    def end_call(self, patience: float = _PATIENCE) -> Any:
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
            line.send((value, None))
        except Exception as error:
            traceback.print_exc()
            line.send((None, f"{type(error).__name__}: {error}"))
    sys.stdout.flush()
    sys.stderr.flush()
    # Some libraries crash in their exit handlers; what matters was said already.
    os._exit(0)


if __name__ == "__main__":
    main()
