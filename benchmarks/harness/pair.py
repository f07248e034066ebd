"""A contender made of two Python processes, one at each end of the link."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Mapping
from multiprocessing.connection import wait
from typing import Any

from benchmarks.harness.cases import Case
from benchmarks.harness.contender import Contender, Effort, Measurement
from benchmarks.harness.ends import Stamps
from fabric_ray.bench.child import Child
from fabric_ray.bench.processes import signal_group
from fabric_ray.bench.results import ContenderError

_PATIENCE = 60.0
_END = "benchmarks.harness.ends:make_end"


class PairContender(Contender):
    """Drives a sender and a target (see `ends.End`), by default of the class `End` beside a
    subclass; `arguments` are their constructors'.

    Idle processes are stopped by a signal, so that a library with busy threads costs the others
    nothing; `pausable = False` leaves them running.
    """

    sender = "End"
    target = "End"
    module: str = ""
    """Of the ends, if it isn't that of the class."""
    arguments: tuple[Any, ...] = ()
    env: Mapping[str, str] = {}
    pausable = True
    _ends: tuple[Child, Child] | None = None

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
        compared = case.operation in ("write", "pages")
        if compared and (fault := target.call("check", case, operations)):
            raise ContenderError(f"{target.name}: {fault}")
        self.pause()
        return compared

    def measure(self, case: Case, effort: Effort) -> Measurement:
        sent, received = self._run(case, effort)
        # A round trip ends at the sender, whose samples are halved.
        ends = received.ends or sent.ends
        if len(sent.starts) != effort.samples or len(ends) != effort.samples:
            raise ContenderError(
                f"{len(sent.starts)} starts and {len(ends)} ends came back for {effort.samples} "
                "samples"
            )
        share = sent.per_operation / effort.operations / 1e9
        spans = zip(sent.starts, ends, strict=True)
        return Measurement(seconds=[(end - start) * share for start, end in spans])

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
                end.begin("close")
        for end in ends or ():
            end.close()

    def _signal(self, number: signal.Signals) -> None:
        if self.pausable and self._ends is not None:
            for end in self._ends:
                signal_group(end.process, number)

    def _bring_up(self) -> None:
        near, far = socket.socketpair()
        with near, far:
            self._ends = self._end(self.sender, near, True), self._end(self.target, far, False)
        for end in self._ends:
            end.end_call(_PATIENCE)
        sender, target = self._exchange("open")
        self._exchange("connect", (target,), (sender,))

    def _end(self, name: str, sync: socket.socket, sends: bool) -> Child:
        number = sync.fileno()
        kind = f"{self.module or type(self).__module__}:{name}"
        arguments = kind, number, sends, *self.arguments
        shown = f"{kind} ({'sender' if sends else 'target'})"
        return Child(_END, *arguments, name=shown, env=self.env, fds=[number])

    def _prepare(self, case: Case) -> None:
        sender, target = self._exchange("begin", (case,), (case,))
        self._exchange("bind", (case, target), (case, sender))

    def _run(self, case: Case, effort: Effort) -> tuple[Stamps, Stamps]:
        arguments = (case, effort.operations, effort.samples)
        return self._exchange("run", arguments, arguments)

    def _exchange(
        self, method: str, to_sender: tuple[Any, ...] = (), to_target: tuple[Any, ...] = ()
    ) -> tuple[Any, Any]:
        sender, target = self._both()
        target.begin(method, *to_target)
        sender.begin(method, *to_sender)
        # Whichever answers first is read first: one end's error should not wait for the other.
        if sender.line in wait([sender.line, target.line], _PATIENCE):
            near = sender.end_call(_PATIENCE)
            return near, target.end_call(_PATIENCE)
        far = target.end_call(_PATIENCE)
        return sender.end_call(_PATIENCE), far

    def _both(self) -> tuple[Child, Child]:
        if self._ends is None:
            raise ContenderError(f"{self.name} is not running")
        return self._ends
