"""Ourselves pushing the weights of a model: `fabric-ray demo weights`, which trains in between.

One run of the demo makes several pushes; each is a turn. It times a plain copy of the same bytes
by as many threads right after each push, and that is the floor beside it.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.contenders.fabric import unusable
from benchmarks.harness.cases import Case
from benchmarks.harness.contender import ContenderError, Effort, Family, Measurement
from benchmarks.harness.processes import kill, spawn

_PATIENCE = 600.0
_PUSHES = 7
_NEEDS = ("ray", "torch", "safetensors", "matplotlib")


def _program() -> str | None:
    beside = Path(sys.executable).parent / "fabric-ray"
    return str(beside) if beside.is_file() else shutil.which("fabric-ray")


class Demo:
    """Runs of the demo, made when a push is asked for that no run so far has."""

    def __init__(self) -> None:
        self._case: Case | None = None
        self._pushes: list[dict[str, Any]] = []
        self._failure: ContenderError | None = None
        self.summary: dict[str, Any] = {}

    def choose(self, case: Case) -> None:
        if case != self._case:
            self._case, self._pushes, self._failure = case, [], None

    def push(self, number: int) -> dict[str, Any]:
        """The seconds of push `number` and of its floor, and the bytes of either.

        Raises:
            ContenderError: when the demo fails, or finds wrong bytes.
        """
        if self._failure is not None:
            raise self._failure
        while number >= len(self._pushes):
            try:
                self._run()
            except ContenderError as error:
                self._failure = error
                raise
        return self._pushes[number]

    def _run(self) -> None:
        program, case = _program(), self._case
        if program is None or case is None:
            raise ContenderError("fabric-ray is not installed; run `make setup`")
        with tempfile.TemporaryDirectory(prefix="bench-weights-") as folder:
            command = [program, "demo", "weights", "--json", "--output", folder]
            # Weights are bf16.
            command += ["--parameters", str(case.bytes // 2), "--pushes", str(_PUSHES + 1)]
            process = spawn(
                [*command, "--transport", case.link],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            try:
                out, errors = process.communicate(timeout=_PATIENCE)
            except subprocess.TimeoutExpired as error:
                raise ContenderError(f"the demo did not end in {_PATIENCE:.0f} s") from error
            finally:
                kill(process)
        if process.returncode != 0:
            words = errors.decode(errors="replace").strip().splitlines() or ["it said nothing"]
            raise ContenderError(f"the demo ended with {process.returncode}: {words[-1][:300]}")
        self.summary = json.loads(out.splitlines()[-1])
        if not self.summary["verified"]:
            raise ContenderError("the demo found wrong bytes on a rollout")
        # The first touches memory that the later ones find in place.
        self._pushes += self.summary["pushes"][1:]


DEMO = Demo()


class _Push:
    threads = 2
    obtain = "pip install -e '.[ray]'"
    name: str
    family: Family
    column: str

    def __init__(self) -> None:
        self._next = 0

    def available(self) -> str | None:
        missing = [need for need in _NEEDS if importlib.util.find_spec(need) is None]
        return f"{', '.join(missing)} not installed" if missing else unusable()

    def supports(self, case: Case) -> bool:
        return case.operation == "push"

    def describe(self, case: Case) -> str:
        raise NotImplementedError

    def start(self, case: Case) -> None:
        DEMO.choose(case)
        self._next = 0

    def verify(self, case: Case) -> bool:
        """The demo compares every byte of every push with a reference."""
        DEMO.push(0)
        return True

    def measure(self, case: Case, effort: Effort) -> Measurement:
        """One push, as if it had moved `case.bytes`. The turns before this one took the pushes
        before it, so the floor of a turn is that of the same push."""
        del effort
        push = DEMO.push(self._next)
        self._next += 1
        share = case.bytes / DEMO.summary["bytes"]
        return Measurement(seconds=[float(push[self.column]) * share])

    def pause(self) -> None:
        """The demo has ended."""

    def resume(self) -> None:
        return

    def stop(self) -> None:
        return


class WeightPush(_Push):
    name = "fabric-ray push"
    family: Family = "ours"
    column = "seconds"

    def describe(self, case: Case) -> str:
        found = DEMO.summary
        return (
            f"{found['trainers']} trainers into {found['rollouts']} rollouts, "
            f"{found['bytes'] / 1e6:.0f} MB, until all have confirmed"
        )


class PushFloor(_Push):
    name = "push floor"
    family: Family = "floor"
    column = "floor_seconds"

    def describe(self, case: Case) -> str:
        return "a plain copy of the same bytes by as many threads, right after each push"
