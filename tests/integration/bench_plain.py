"""A contender over a plain socket, and the ways in which one can fail."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from benchmarks.contenders.perf import find_program
from benchmarks.harness import ends
from benchmarks.harness.cases import Case
from benchmarks.harness.data import step
from benchmarks.harness.pair import PairContender
from benchmarks.harness.schedule import Plan, run_cases
from fabric_ray.bench.processes import adopt_orphans, ended_by_signals
from fabric_ray.bench.record import Results


class Plain(PairContender):
    name = "plain"
    # Also where this file is the main program.
    module = "tests.integration.bench_plain"

    def supports(self, case: Case) -> bool:
        return case.operation == "write"

    def describe(self, case: Case) -> str:
        return "a TCP socket"


class Liar(Plain):
    name = "liar"
    target = "FlippingEnd"


class Mortal(Plain):
    name = "mortal"
    target = "DyingEnd"


class Spinner(Plain):
    name = "spinner"
    target = "SpinningEnd"


class End(ends.End):
    def open(self) -> bytes:
        if not self.sends:
            return b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        return str(self._listener.getsockname()[1]).encode()

    def connect(self, peer: bytes) -> None:
        if self.sends:
            self._socket, _ = self._listener.accept()
        else:
            self._socket = socket.create_connection(("127.0.0.1", int(peer)))

    def prepare(self, case: Case) -> bytes:
        self.ordinary(case)
        return b""

    def operation(self, case: Case, number: int) -> memoryview:
        place = int(step(case, number).sources[0]) * case.bytes
        return self.memory.data[place : place + case.bytes]

    def move(self, operation: memoryview) -> None:
        self._socket.sendall(operation)

    def arrive(self, operations: Sequence[memoryview]) -> None:
        for block in operations:
            self._socket.recv_into(block, flags=socket.MSG_WAITALL)


class FlippingEnd(End):
    """Receives everything, and then one bit of it is wrong."""

    def run(self, case: Case, operations: int, samples: int) -> ends.Stamps:
        stamps = super().run(case, operations, samples)
        self.memory[case.bytes - 1] ^= 1
        return stamps


class DyingEnd(End):
    def run(self, case: Case, operations: int, samples: int) -> ends.Stamps:
        os._exit(7)


class SpinningEnd(End):
    """A library with a busy thread of its own."""

    def connect(self, peer: bytes) -> None:
        threading.Thread(target=_spin, daemon=True).start()
        super().connect(peer)


def _spin() -> None:
    while True:
        pass


def built() -> None:
    """Builds `fabric-perf` if no build is there."""
    if find_program() is None:
        manifest = Path(__file__).resolve().parents[2] / "native" / "Cargo.toml"
        build = ["cargo", "build", "--release", "-p", "fabric-perf", "--manifest-path"]
        subprocess.run([*build, str(manifest)], check=True)


def main() -> None:
    """A run that goes on until it is interrupted."""
    cases = [
        Case(suite="write", operation="write", link="tcp", bytes=count, region=1 << 20)
        for count in range(64, 1 << 16, 64)
    ]
    results = Results(Path(os.environ["FABRIC_BENCH_TEST"]) / "run.jsonl", {}, [])
    adopt_orphans()
    with ended_by_signals():
        run_cases(cases, [Plain(), Spinner()], Plan(turns=20, turn_seconds=0.05), results)


if __name__ == "__main__":
    main()
