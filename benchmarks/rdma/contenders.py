"""The programs that write, perftest's and ours, and what they are asked for."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence

import msgspec

from benchmarks.contenders import perf
from benchmarks.harness.cases import KIB, MIB, size
from fabric_ray.bench.results import Family, RowHeader

SENDER, RECEIVER = "rxe_h0r0", "rxe_h1r0"
_RECEIVER_ADDRESS = "10.77.0.2"
_PORT = 18600
# What `ib_write_bw` has.
_IN_FLIGHT = 128


class Case(msgspec.Struct, frozen=True):
    """So many one-sided writes of so many bytes, in one direction."""

    bytes: int
    writes: int
    # What else is special: the second part of its key.
    kind: str = "write"
    aim: str = ""

    @property
    def header(self) -> RowHeader:
        key = f"rdma/{self.kind}/{size(self.bytes)}"
        return RowHeader(key=key, unit="MB/s", amount=self.bytes, aim=self.aim)


class Perftest:
    """`ib_write_bw`: writes without immediates, completions polled, 128 in flight."""

    name: str = "ib_write_bw"
    family: Family = "peer"
    # Debian packages that it needs in the guest.
    packages: tuple[str, ...] = ("perftest",)

    def __init__(self, options: Sequence[str] = ()) -> None:
        self._options = options

    def script(self, case: Case) -> str:
        """Shell lines that run both sides and end when they have."""
        common = ["ib_write_bw", "-F", "-x", "1", "-p", str(_PORT), *self._options]
        common += ["-s", str(case.bytes), "-n", str(case.writes)]
        server = shlex.join([*common, "-d", RECEIVER])
        client = shlex.join([*common, "-d", SENDER, _RECEIVER_ADDRESS])
        listening = f"grep -q ':{_PORT:04X} .* 0A ' /proc/net/tcp /proc/net/tcp6"
        return (
            f"{server} >/dev/null & server=$!\n"
            f"for i in $(seq 200); do {listening} && break; sleep 0.05; done\n"
            f"{client}; status=$?\n"
            # A client that failed leaves a server that waits.
            "[ $status = 0 ] || kill $server\n"
            "wait $server && [ $status = 0 ] || echo failed\n"
        )

    def seconds(self, output: str, case: Case) -> float:
        """Of one write, from what it printed.

        Raises:
            ValueError: if there is no figure in it.
        """
        # bytes, iterations, peak MB/s, average MB/s, million messages/s
        row = re.search(rf"^\s*{case.bytes}\s+{case.writes}((?:\s+[\d.]+){{3}})\s*$", output, re.M)
        if row is None or output.rstrip().endswith("failed"):
            raise ValueError(f"ib_write_bw printed no figure: {last(output)}")
        megabytes = float(row[1].split()[1])
        if not megabytes:
            # It takes its clock from the CPU's cycles, and at times finds no frequency in a guest.
            raise ValueError("ib_write_bw measured 0 MB/s, which can't be")
        # Its MB are MiB.
        return case.bytes / (megabytes * MIB)


class Engine:
    """`fabric-perf`: one-sided counted writes, until the receiver knows that they are there.

    64 KiB and more are single writes with as many in flight as `ib_write_bw` has; smaller ones are
    pages, half of them in one request.
    """

    packages: tuple[str, ...] = ()

    def __init__(
        self,
        name: str = "fabric-rust verbs",
        nics: Sequence[str] = (SENDER,),
        targets: Sequence[str] = (RECEIVER,),
        family: Family = "ours",
    ) -> None:
        self.name, self.family = name, family
        self._nics, self._targets = nics, targets

    def script(self, case: Case) -> str:
        if case.bytes >= 64 * KIB:
            kind = {"kind": "window", "pages": _IN_FLIGHT, "temperature": "hot"}
            warm = min(max(case.writes // 4, 1), _IN_FLIGHT)
            all_of_it, region = case.writes, case.bytes
        else:
            pages = case.writes // 2
            kind = {"kind": "pages", "pages": pages}
            warm, all_of_it, region = 1, 2, pages * case.bytes
        requests = [
            # The receiver sleeps, as perftest's does: spinning would take a CPU from soft-RoCE.
            {**kind, "bytes": case.bytes, "operations": operations, "notice": "wait"}
            for operations in (warm, all_of_it)
        ]
        lines = shlex.join(json.dumps(request) for request in requests)
        return f"printf '%s\\n' {lines} | {serve(self._nics, self._targets, region)}\n"

    def seconds(self, output: str, case: Case) -> float:
        replies = [line for line in output.splitlines() if line.startswith("{")]
        reply = json.loads(replies[-1]) if len(replies) == 2 else {}
        if reply.get("transport") != "verbs":
            raise ValueError(f"{self.name} printed no figure: {last(output)}")
        [seconds] = reply["seconds"]
        return float(seconds) / (1 if case.bytes >= 64 * KIB else case.writes // 2)


Contender = Perftest | Engine


def serve(nics: Sequence[str], targets: Sequence[str], region: int, *options: str) -> str:
    """The shell's command that answers requests over verbs."""
    command = [perf.find_program() or "fabric-perf", "engine", "serve", "--transport", "verbs"]
    command += ["--nics", ",".join(nics), "--target-nics", ",".join(targets)]
    return shlex.join([*command, "--region", str(region), *options])


def last(output: str) -> str:
    """The end of what a program printed, in one line."""
    lines = [line for line in output.splitlines() if line.strip()] or ["it printed nothing"]
    return " / ".join(lines[-3:])[:400]
