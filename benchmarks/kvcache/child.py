"""An object in a process of its own: `python -m benchmarks.kvcache.child MODULE:CLASS FD`."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import msgspec

from benchmarks.harness.processes import die_with_parent, kill, spawn

_ROOT = str(Path(__file__).resolve().parents[2])
_PATIENCE = 120.0


class Call(msgspec.Struct, frozen=True):
    """A method of the object, or its class if there is no object yet. Values are what MessagePack
    can hold."""

    method: str
    arguments: list[Any]


class Answer(msgspec.Struct, frozen=True):
    value: Any = None
    error: str | None = None


class ChildError(Exception):
    """The process said what is wrong, or has gone."""


class Child:
    """The process, and a call's way to it.

    Args:
        kind: ``module:Class`` of the object.
        arguments: of its constructor.
        threads: that torch may use there.
    """

    def __init__(self, kind: str, *arguments: Any, threads: int = 1) -> None:
        ours, theirs = socket.socketpair()
        self.kind = kind
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by end)
        path = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs:
            self.process: subprocess.Popen[bytes] = spawn(
                [sys.executable, "-m", "benchmarks.kvcache.child", kind, str(theirs.fileno())],
                env={"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
                pass_fds=[theirs.fileno()],
                stdout=self._log,
                stderr=self._log,
            )
        self._line: Connection[Any, Any] = Connection(ours.detach())
        self.begin("__init__", *arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        """What the method returns.

        Raises:
            ChildError: what it raised, or the last words of a process that has ended.
        """
        self.begin(method, *arguments)
        return self.end_call()

    def begin(self, method: str, *arguments: Any) -> None:
        """Starts a call; :meth:`end_call` waits for it."""
        try:
            self._line.send_bytes(msgspec.msgpack.encode(Call(method, list(arguments))))
        except OSError as error:
            raise ChildError(f"{self.kind} has gone: {self._last_words()}") from error

    def end_call(self) -> Any:
        if not self._line.poll(_PATIENCE):
            raise ChildError(f"{self.kind} did not answer within {_PATIENCE:.0f} s")
        try:
            answer = msgspec.msgpack.decode(self._line.recv_bytes(), type=Answer)
        except (EOFError, OSError) as error:
            raise ChildError(f"{self.kind} has gone: {self._last_words()}") from error
        if answer.error is not None:
            raise ChildError(f"{self.kind}: {answer.error}")
        return answer.value

    def answered(self) -> bool:
        """Whether :meth:`end_call` would return at once."""
        return self._line.poll(0)

    def kill(self) -> None:
        """With SIGKILL, at whatever it is doing."""
        kill(self.process)
        self._line.close()
        self._log.close()

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1)
        self._log.seek(0)
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line]
        return lines[-1][:300] if lines else f"exit status {self.process.returncode}"


def main() -> None:
    die_with_parent()
    module, _, name = sys.argv[1].partition(":")
    line: Connection[bytes, bytes] = Connection(int(sys.argv[2]))
    made: Any = None
    while True:
        try:
            call = msgspec.msgpack.decode(line.recv_bytes(), type=Call)
        except EOFError:
            break
        try:
            if call.method == "__init__":
                made = getattr(importlib.import_module(module), name)(*call.arguments)
                value = None
            else:
                value = getattr(made, call.method)(*call.arguments)
            answer = Answer(value)
        except Exception as error:
            traceback.print_exc()
            answer = Answer(error=f"{type(error).__name__}: {error}")
        line.send_bytes(msgspec.msgpack.encode(answer))
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
