"""libfabric by its own programs: `fi_pingpong`, and fabtests where they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

from benchmarks.contenders.programs import ProgramContender, column, free_port, table
from benchmarks.harness.cases import WINDOW, Case


class PingPong(ProgramContender):
    """Messages, half a round trip."""

    name = "libfabric pingpong"
    program = "fi_pingpong"
    obtain = "apt-get install libfabric-bin"

    def supports(self, case: Case) -> bool:
        return case.operation == "latency" and case.waiter == "spin-native"

    def describe(self, case: Case) -> str:
        return "own program, messages, half a round trip"

    def command(self, case: Case, port: int, iterations: int, server: bool) -> list[str]:
        ends = ["-B", str(port)] if server else ["-P", str(port), "127.0.0.1"]
        numbers = ["-I", str(iterations), "-S", str(case.bytes)]
        return [self.program, "-p", case.link, "-e", "rdm", *numbers, *ends]

    def seconds(self, output: str, case: Case) -> float:
        return float(column(table(output), "usec/xfer")) / 1e6


class FabTests(PingPong):
    """RMA writes with remote completion data."""

    name = "libfabric rma"
    program = "fi_rma_bw"
    obtain = (
        "build fabtests of https://github.com/ofiwg/libfabric and put them on PATH, "
        "or name their folder by FABTESTS"
    )

    def available(self) -> str | None:
        return None if _fabtest(self.program) else f"{self.program} is not installed"

    def supports(self, case: Case) -> bool:
        if case.operation == "latency":
            return case.waiter == "spin-native" and _fabtest("fi_rma_pingpong") is not None
        if case.operation == "rate":
            return case.language == "native"
        if case.operation == "window":
            program = _fabtest(self.program)
            walks = "cold" if program is not None and _walks(program) else "hot"
            return case.temperature == walks
        return case.operation == "write" and case.temperature == "hot"

    def describe(self, case: Case) -> str:
        if case.operation == "latency":
            return "own program, write with data, half a round trip"
        if case.operation == "window":
            return f"own program, {WINDOW} writes with data, then an answer, then the next {WINDOW}"
        return "own program, write with data, several in flight, until the sender's completion"

    def environment(self, case: Case) -> dict[str, str]:
        """The library that we use, too."""
        named = os.environ.get("FABRIC_RAY_LIBFABRIC")
        return {"LD_LIBRARY_PATH": str(Path(named).parent)} if named else {}

    def command(self, case: Case, port: int, iterations: int, server: bool) -> list[str]:
        program = "fi_rma_pingpong" if case.operation == "latency" else self.program
        command = [_fabtest(program) or program, "-p", case.link, "-e", "rdm", "-o", "writedata"]
        if case.operation == "window":
            command += ["-W", str(WINDOW)]
        # Before 1.18 both sides would take one default port for their endpoint.
        command += [f"-b={port}", "-B", str(free_port())]
        command += ["-I", str(iterations), "-S", str(case.bytes)]
        return command if server else [*command, "127.0.0.1"]


class DeliveredFabTests(FabTests):
    """The same, with what we ask for as well: a write is over when the peer has its bytes."""

    name = "libfabric rma delivered"

    def supports(self, case: Case) -> bool:
        return case.operation == "window" and super().supports(case)

    def describe(self, case: Case) -> str:
        return f"{super().describe(case)}; each acknowledged by its receiver"

    def command(self, case: Case, port: int, iterations: int, server: bool) -> list[str]:
        program, *options = super().command(case, port, iterations, server)
        return [program, "-U", *options]


def _fabtest(name: str) -> str | None:
    """Below `$FABTESTS`, or on PATH."""
    folder = os.environ.get("FABTESTS")
    return shutil.which(name, path=folder) if folder else shutil.which(name)


@lru_cache
def _walks(program: str) -> bool:
    """Whether a window's writes go to places of their own; before 1.19 all went to the first. The
    option -O came with it."""
    done = subprocess.run([program, "-h"], capture_output=True, text=True, timeout=10, check=False)
    return "-O <" in done.stdout + done.stderr
