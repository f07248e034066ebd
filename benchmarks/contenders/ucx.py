"""UCX by its own `ucx_perftest`: put into memory that UCX allocated, and tag matching.

Both re-use one buffer, so they stand in the hot cases; puts notify no receiver.
"""

from __future__ import annotations

from benchmarks.contenders.programs import ProgramContender
from benchmarks.harness.cases import MIB, Case

_SHM = {"UCX_TLS": "posix,sysv,cma,self"}
_TCP = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}
_OVERALL = 3


class UcxPut(ProgramContender):
    name = "ucx put"
    program = "ucx_perftest"
    obtain = "apt-get install ucx-utils"
    bandwidth = "ucp_put_bw"
    latency = "ucp_put_lat"

    def supports(self, case: Case) -> bool:
        if case.operation == "latency":
            return case.waiter == "spin-native"
        if case.operation == "rate":
            return case.language == "native"
        return case.operation == "write" and case.temperature == "hot"

    def describe(self, case: Case) -> str:
        return "own program, UCX's memory, until the sender's completion, no receiver is notified"

    def environment(self, case: Case) -> dict[str, str]:
        return _SHM if case.link == "shm" else _TCP

    def command(self, case: Case, port: int, iterations: int, server: bool) -> list[str]:
        command = [self.program, "-p", str(port)]
        if server:
            return command
        test = self.latency if case.operation == "latency" else self.bandwidth
        warm = max(1, min(100, iterations // 10))
        command += ["127.0.0.1", "-t", test, "-f", "-v"]
        command += ["-s", str(case.bytes), "-n", str(iterations), "-w", str(warm)]
        # Many large puts in flight over TCP collapse; two are its fastest.
        return [*command, "-O", "2"] if case.link == "tcp" and case.bytes >= MIB else command

    def seconds(self, output: str, case: Case) -> float:
        """The CSV's last line: iterations, percentile, average, overall microseconds, ..."""
        return float(output.strip().splitlines()[-1].split(",")[_OVERALL]) / 1e6


class UcxTag(UcxPut):
    name = "ucx tag"
    bandwidth = "tag_bw"
    latency = "tag_lat"

    def describe(self, case: Case) -> str:
        return "own program, several in flight, until the sender's completion"
