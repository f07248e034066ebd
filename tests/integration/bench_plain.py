"""A contender over a plain socket, and the ways in which one can fail."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from benchmarks.contenders.perf import find_program
from benchmarks.harness.cases import Case
from benchmarks.harness.data import ordinary_memory, step
from benchmarks.harness.pair import PairContender
from benchmarks.harness.roles import Role, SenderRole, Stamps, TargetRole
from benchmarks.harness.schedule import Plan, run_cases
from fabric_ray.bench.processes import adopt_orphans, ended_by_signals
from fabric_ray.bench.record import Results

_HERE = "tests.integration.bench_plain"


class Plain(PairContender):
    name = "plain"
    sender = f"{_HERE}:Sender"
    target = f"{_HERE}:Target"

    def available(self) -> str | None:
        return None

    def supports(self, case: Case) -> bool:
        return case.operation == "write"

    def describe(self, case: Case) -> str:
        return "a TCP socket"


class Liar(Plain):
    name = "liar"
    target = f"{_HERE}:FlippingTarget"


class Mortal(Plain):
    name = "mortal"
    target = f"{_HERE}:DyingTarget"


class Spinner(Plain):
    name = "spinner"
    target = f"{_HERE}:SpinningTarget"


class _End(Role):
    def prepare(self, case: Case) -> bytes:
        if not hasattr(self, "memory") or self.memory.size != case.region:
            self.memory = ordinary_memory(case.region)
        return b""

    def blocks(self, case: Case, operations: int) -> list[memoryview]:
        whole = self.memory.data
        numbers = range(self.moved, self.moved + operations)
        places = [int(step(case, number).sources[0]) * case.bytes for number in numbers]
        return [whole[place : place + case.bytes] for place in places]


class Sender(_End, SenderRole):
    def open(self) -> bytes:
        self._listener = socket.create_server(("127.0.0.1", 0))
        return str(self._listener.getsockname()[1]).encode()

    def connect(self, peer: bytes) -> None:
        self._socket, _ = self._listener.accept()

    def sample(self, case: Case, operations: int) -> Callable[[], None]:
        blocks = self.blocks(case, operations)

        def move() -> None:
            for block in blocks:
                self._socket.sendall(block)

        return move


class Target(_End, TargetRole):
    def connect(self, peer: bytes) -> None:
        self._socket = socket.create_connection(("127.0.0.1", int(peer)))

    def sample(self, case: Case, operations: int) -> Callable[[], None]:
        blocks = self.blocks(case, operations)

        def arrive() -> None:
            for block in blocks:
                self._socket.recv_into(block, flags=socket.MSG_WAITALL)

        return arrive


class FlippingTarget(Target):
    """Receives everything, and then one bit of it is wrong."""

    def run(self, case: Case, operations: int, samples: int) -> Stamps:
        stamps = super().run(case, operations, samples)
        self.memory[case.bytes - 1] ^= 1
        return stamps


class DyingTarget(Target):
    def run(self, case: Case, operations: int, samples: int) -> Stamps:
        os._exit(7)


class SpinningTarget(Target):
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
