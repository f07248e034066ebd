"""libfabric by its own programs: `fi_pingpong`, and fabtests where they are installed."""

from __future__ import annotations

from benchmarks.contenders.programs import ProgramContender, column, table
from benchmarks.harness.cases import Case


class PingPong(ProgramContender):
    """Messages, half a round trip."""

    name = "libfabric pingpong"
    program = "fi_pingpong"
    obtain = "apt-get install libfabric-bin"

    def supports(self, case: Case) -> bool:
        return case.operation == "latency" and case.waiter == "spin-native"

    def describe(self, case: Case) -> str:
        return "own program, messages, half a round trip"

    def server(self, case: Case, port: int, iterations: int) -> list[str]:
        return [*self._common(case, iterations), "-B", str(port)]

    def client(self, case: Case, port: int, iterations: int) -> list[str]:
        return [*self._common(case, iterations), "-P", str(port), "127.0.0.1"]

    def _common(self, case: Case, iterations: int) -> list[str]:
        command = [self.program, "-p", case.link, "-e", "rdm"]
        return [*command, "-I", str(iterations), "-S", str(case.bytes)]

    def seconds(self, output: str, case: Case) -> float:
        return float(column(table(output), "usec/xfer")) / 1e6


class FabTests(ProgramContender):
    """RMA writes with remote completion data."""

    name = "libfabric rma"
    program = "fi_rma_bw"
    obtain = "build fabtests of https://github.com/ofiwg/libfabric and put them on PATH"

    def supports(self, case: Case) -> bool:
        if case.operation == "latency":
            return case.waiter == "spin-native"
        if case.operation == "rate":
            return case.language == "native"
        return case.operation == "write" and case.temperature == "hot"

    def describe(self, case: Case) -> str:
        if case.operation == "latency":
            return "own program, write with data, half a round trip"
        return "own program, write with data, several in flight, until the sender's completion"

    def server(self, case: Case, port: int, iterations: int) -> list[str]:
        return self._common(case, port, iterations)

    def client(self, case: Case, port: int, iterations: int) -> list[str]:
        return [*self._common(case, port, iterations), "127.0.0.1"]

    def _common(self, case: Case, port: int, iterations: int) -> list[str]:
        program = "fi_rma_pingpong" if case.operation == "latency" else self.program
        command = [program, "-p", case.link, "-e", "rdm", "-o", "writedata"]
        return [*command, f"-b={port}", "-I", str(iterations), "-S", str(case.bytes)]

    def seconds(self, output: str, case: Case) -> float:
        return float(column(table(output), "usec/xfer")) / 1e6
