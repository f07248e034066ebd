"""`fabric-perf`, the program of this checkout that measures: it answers one JSON request a line.

A reply is `{"seconds": [...]}` (of one operation, one per sample) or `{"error": "..."}`.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.contender import Contender
from fabric_ray.bench.processes import kill, spawn
from fabric_ray.bench.results import ContenderError

OBTAIN = "cargo build --release -p fabric-perf --manifest-path native/Cargo.toml"

_PATIENCE = 70.0


def find_program() -> str | None:
    """`$FABRIC_PERF`, the release build of this checkout, or whatever is on PATH."""
    native = Path(__file__).resolve().parents[2] / "native"
    targets = [os.environ.get("CARGO_TARGET_DIR", ""), str(native / "target")]
    built = [Path(target) / "release" / "fabric-perf" for target in targets if target]
    for path in [Path(os.environ.get("FABRIC_PERF", "-")), *built]:
        if os.access(path, os.X_OK) and path.is_file():
            return str(path)
    return shutil.which("fabric-perf")


def missing() -> str | None:
    return "fabric-perf is not built" if find_program() is None else None


def program() -> str:
    """Its path.

    Raises:
        ContenderError: saying how to build it.
    """
    found = find_program()
    if found is None:
        raise ContenderError(f"fabric-perf is not built; run `{OBTAIN}`")
    return found


def printed(*arguments: str) -> str:
    """What the program prints when it runs to its end.

    Raises:
        ContenderError: with the program's own words.
    """
    command = [program(), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=600, check=False
    )
    if done.returncode:
        raise ContenderError(f"fabric-perf {arguments[0]}: {done.stderr.strip()}")
    return done.stdout


class Service:
    """One running `fabric-perf ... serve`; it sleeps on its input between requests."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = tuple(arguments)
        self._process = spawn(
            [program(), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to `request`.

        Raises:
            ContenderError: with the program's own words, or when it is silent or gone.
        """
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except OSError as error:
            raise ContenderError("fabric-perf has gone") from error
        if not select.select([process.stdout], [], [], _PATIENCE)[0]:
            raise ContenderError(f"fabric-perf took more than {_PATIENCE:.0f} s for {request}")
        line = process.stdout.readline()
        reply: dict[str, Any] = json.loads(line) if line else {"error": "it has gone"}
        if "error" in reply:
            raise ContenderError(f"fabric-perf: {reply['error']}")
        return reply

    def stop(self) -> None:
        kill(self._process)


class ServiceContender(Contender):
    """A contender that asks one such service. Both of its processes park by themselves."""

    obtain = OBTAIN
    _service: Service | None = None

    def available(self) -> str | None:
        return missing()

    def serve(self, *arguments: str) -> None:
        """Start the service, unless it runs already with these arguments."""
        if self._service is None or self._service.arguments != arguments:
            self.stop()
            self._service = Service(arguments)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._service is None:
            raise ContenderError(f"{self.name} is not running")
        return self._service.ask(request)

    def stop(self) -> None:
        service, self._service = self._service, None
        if service is not None:
            service.stop()
