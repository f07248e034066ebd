"""A contender made of two Python processes, one at each end of the link."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, ClassVar

import msgspec

from benchmarks.harness import worker
from benchmarks.harness.cases import Case
from benchmarks.harness.contender import ContenderError, Effort, Family, Measurement
from benchmarks.harness.processes import kill, signal_group, spawn
from benchmarks.harness.roles import Stamps

_PATIENCE = 60.0
_ROOT = str(Path(__file__).resolve().parents[2])


class WorkerProcess:
    """One worker process and the line to it."""

    def __init__(self, role: str, sync: socket.socket, env: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self.role = role
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by end)
        path = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "benchmarks.harness.worker", role]
        with theirs:
            self.process: subprocess.Popen[bytes] = spawn(
                [*command, str(theirs.fileno()), str(sync.fileno())],
                env={**env, "PYTHONPATH": path},
                pass_fds=[theirs.fileno(), sync.fileno()],
                stdout=self.log,
                stderr=self.log,
            )
        self.line: Connection[Any, Any] = Connection(ours.detach())

    def tell(self, command: worker.Command) -> None:
        try:
            self.line.send_bytes(msgspec.msgpack.encode(command))
        except OSError as error:
            raise ContenderError(f"{self.role} has gone: {self.last_words()}") from error

    def hear(self, patience: float = _PATIENCE) -> worker.Reply:
        if not self.line.poll(patience):
            raise ContenderError(f"{self.role} did not answer within {patience:.0f} s")
        try:
            reply = msgspec.msgpack.decode(self.line.recv_bytes(), type=worker.Reply)
        except (EOFError, OSError) as error:
            raise ContenderError(f"{self.role} has gone: {self.last_words()}") from error
        if reply.error is not None:
            raise ContenderError(f"{self.role}: {reply.error}")
        return reply

    def last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1)
        self.log.seek(0)
        lines = [line for line in self.log.read().decode(errors="replace").splitlines() if line]
        ended = f"exit status {self.process.returncode}"
        return f"{ended}, {lines[-1].strip()[:300]}" if lines else ended

    def end(self, patience: float = 2.0) -> None:
        """Ask it to close (it may have been told already), then see that it is gone."""
        with contextlib.suppress(ContenderError):
            self.tell(worker.Close())
            self.hear(patience)
        kill(self.process, grace=0.5)
        self.line.close()
        self.log.close()


def seconds_of(sent: Stamps, ends: list[int], effort: Effort) -> list[float]:
    """Seconds of one operation for each sample, from the sender's starts and anybody's ends.

    Raises:
        ContenderError: when stamps are missing.
    """
    if len(sent.starts) != effort.samples or len(ends) != effort.samples:
        raise ContenderError(
            f"{len(sent.starts)} starts and {len(ends)} ends came back for {effort.samples} samples"
        )
    share = sent.per_operation / effort.operations / 1e9
    return [(end - start) * share for start, end in zip(sent.starts, ends, strict=True)]


class PairContender:
    """Drives a sender and a target role (see `roles.Role`); a subclass names them.

    `sender` and `target` are `module:Class`. Idle processes are stopped by a signal, so that a
    library with busy threads costs the others nothing; `pausable = False` leaves them running.
    """

    name: str
    family: Family = "peer"
    threads = 1
    obtain = ""
    sender: str
    target: str
    env: ClassVar[Mapping[str, str]] = {}
    pausable = True

    def __init__(self) -> None:
        self._ends: tuple[WorkerProcess, WorkerProcess] | None = None

    def start(self, case: Case) -> None:
        try:
            if self._ends is None:
                self._bring_up()
            self.resume()
            self._prepare(case)
        except ContenderError:
            self.stop()
            raise
        self.pause()

    def verify(self, case: Case) -> bool:
        self.resume()
        operations = min(case.operations, 64)
        # The first operations may set up lanes and pages; then the memory is laid out anew.
        self._run(case, Effort(operations=1, samples=1))
        self._prepare(case)
        self._run(case, Effort(operations=operations, samples=1))
        _, target = self._both()
        if case.operation in ("write", "pages"):
            target.tell(worker.Check(case, operations))
            target.hear()
        self.pause()
        return case.operation in ("write", "pages")

    def measure(self, case: Case, effort: Effort) -> Measurement:
        sent, received = self._run(case, effort)
        return Measurement(seconds=seconds_of(sent, received.ends or sent.ends, effort))

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        self.resume()
        ends, self._ends = self._ends, None
        # Some libraries only close when both ends do.
        for end in ends or ():
            with contextlib.suppress(ContenderError):
                end.tell(worker.Close())
        for end in ends or ():
            end.end()

    def _signal(self, number: signal.Signals) -> None:
        if self.pausable and self._ends is not None:
            for end in self._ends:
                signal_group(end.process, number)

    def _bring_up(self) -> None:
        near, far = socket.socketpair()
        with near, far:
            self._ends = (
                WorkerProcess(self.sender, near, self.env),
                WorkerProcess(self.target, far, self.env),
            )
        sender, target = self._exchange(worker.Open(), worker.Open())
        self._exchange(worker.Connect(target.blob), worker.Connect(sender.blob))

    def _prepare(self, case: Case) -> None:
        sender, target = self._exchange(worker.Prepare(case, True), worker.Prepare(case, False))
        self._exchange(worker.Bind(case, target.blob), worker.Bind(case, sender.blob))

    def _run(self, case: Case, effort: Effort) -> tuple[Stamps, Stamps]:
        command = worker.Run(case, effort.operations, effort.samples)
        sent, received = self._exchange(command, command)
        return sent.stamps or Stamps(), received.stamps or Stamps()

    def _exchange(
        self, to_sender: worker.Command, to_target: worker.Command
    ) -> tuple[worker.Reply, worker.Reply]:
        sender, target = self._both()
        target.tell(to_target)
        sender.tell(to_sender)
        # Whichever speaks first is heard first: one end's error should not wait for the other.
        first = sender.line in wait([sender.line, target.line], _PATIENCE)
        near = sender.hear() if first else None
        far = target.hear()
        return near or sender.hear(), far

    def _both(self) -> tuple[WorkerProcess, WorkerProcess]:
        if self._ends is None:
            raise ContenderError(f"{self.name} is not running")
        return self._ends
