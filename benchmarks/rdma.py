"""`python -m benchmarks.rdma`: writes between two soft-RoCE devices, beside perftest.

Absolute speed means nothing in a guest whose CPUs are emulated; the ratio of two programs in one
boot does. Contenders take turns, so that what else the machine does meets all of them.
"""

from __future__ import annotations

import json
import re
import shlex
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.contenders import perf
from tests.rdma.boot import Outcome, guest_run, why_no_guest

KIB, MIB = 1 << 10, 1 << 20

SENDER, RECEIVER = "rxe_h0r0", "rxe_h1r0"
_RECEIVER_ADDRESS = "10.77.0.2"
_PORT = 18600
_BOOT_SECONDS = 60.0
_TURN_SECONDS = 60
# What `ib_write_bw` has.
_IN_FLIGHT = 128


class Case(msgspec.Struct, frozen=True):
    """So many one-sided writes of so many bytes, in one direction, by one queue pair."""

    bytes: int
    writes: int

    @property
    def key(self) -> str:
        size = f"{self.bytes // MIB}MiB" if self.bytes >= MIB else f"{self.bytes // KIB}KiB"
        return f"write/{size}"


# A second or so for each, where the CPU is emulated.
CASES = (Case(KIB, 20_000), Case(64 * KIB, 1_000), Case(MIB, 60))


class Figure(msgspec.Struct, frozen=True):
    bytes_per_second: float
    messages_per_second: float


class Contender(Protocol):
    """A program that measures a case in the guest and prints its figure."""

    name: str
    # Debian packages that it needs there.
    packages: tuple[str, ...]

    def script(self, case: Case) -> str:
        """Shell lines that run both sides and end when they have."""

    def figure(self, output: str, case: Case) -> Figure:
        """What it printed.

        Raises:
            ValueError: if there is no figure in it.
        """


class Perftest:
    """`ib_write_bw`: writes without immediates, completions polled, 128 in flight."""

    name: str = "ib_write_bw"
    packages: tuple[str, ...] = ("perftest",)

    def script(self, case: Case) -> str:
        common = ["ib_write_bw", "-F", "-x", "1", "-p", str(_PORT)]
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
            "wait $server && [ $status = 0 ]\n"
        )

    def figure(self, output: str, case: Case) -> Figure:
        # bytes, iterations, peak MB/s, average MB/s, million messages/s
        row = re.search(rf"^\s*{case.bytes}\s+{case.writes}((?:\s+[\d.]+){{3}})\s*$", output, re.M)
        if row is None:
            raise ValueError(f"ib_write_bw printed no figure: {_last(output)}")
        megabytes, millions = (float(word) for word in row[1].split()[1:])
        if not megabytes:
            # It takes its clock from the CPU's cycles, and at times finds no frequency in a guest.
            raise ValueError("ib_write_bw measured 0 MB/s, which can't be")
        # Its MB are MiB.
        return Figure(bytes_per_second=megabytes * MIB, messages_per_second=millions * 1e6)


class Engine:
    """`fabric-perf`: one-sided counted writes, until the receiver knows that they are there.

    64 KiB and more are single writes with as many in flight as `ib_write_bw` has; smaller ones are
    pages, half of them in one request.
    """

    name: str = "fabric-rust verbs"
    packages: tuple[str, ...] = ()

    def __init__(self, nics: Sequence[str] = (SENDER,), targets: Sequence[str] = (RECEIVER,)):
        self._nics, self._targets = nics, targets

    def script(self, case: Case) -> str:
        if case.bytes >= 64 * KIB:
            kind = {"kind": "window", "pages": _IN_FLIGHT, "temperature": "hot"}
            warm, all_of_it, region = min(case.writes, _IN_FLIGHT), case.writes, case.bytes
        else:
            pages = case.writes // 2
            kind = {"kind": "pages", "pages": pages}
            warm, all_of_it, region = 1, 2, pages * case.bytes
        requests = [
            # The receiver sleeps, as perftest's does: spinning would take a CPU from soft-RoCE.
            json.dumps({**kind, "bytes": case.bytes, "operations": operations, "notice": "wait"})
            for operations in (warm, all_of_it)
        ]
        command = [perf.find_program() or "fabric-perf", "engine", "serve", "--transport", "verbs"]
        command += ["--nics", ",".join(self._nics), "--target-nics", ",".join(self._targets)]
        command += ["--region", str(region)]
        return f"printf '%s\\n' {shlex.join(requests)} | {shlex.join(command)}\n"

    def figure(self, output: str, case: Case) -> Figure:
        replies = [line for line in output.splitlines() if line.startswith("{")]
        reply = json.loads(replies[-1]) if len(replies) == 2 else {}
        if reply.get("transport") != "verbs":
            raise ValueError(f"{self.name} printed no figure: {_last(output)}")
        [seconds] = reply["seconds"]
        writes = 1 if case.bytes >= 64 * KIB else case.writes // 2
        return Figure(
            bytes_per_second=case.bytes * writes / seconds, messages_per_second=writes / seconds
        )


def contenders() -> list[Contender]:
    """The reference first."""
    ours: list[Contender] = [] if perf.missing() else [Engine()]
    return [Perftest(), *ours]


class Row(msgspec.Struct, frozen=True):
    """A case by one contender: a figure of each turn, or none where it was lost."""

    case: str
    contender: str
    figures: list[Figure | None]

    @property
    def found(self) -> list[Figure]:
        return [figure for figure in self.figures if figure is not None]

    @property
    def bytes_per_second(self) -> float:
        return statistics.median(figure.bytes_per_second for figure in self.found)

    @property
    def messages_per_second(self) -> float:
        return statistics.median(figure.messages_per_second for figure in self.found)

    def ratio(self, other: Row) -> float:
        """How many times as fast as another: the median over the turns that both have."""
        turns = zip(self.figures, other.figures, strict=True)
        pairs = [(a.bytes_per_second, b.bytes_per_second) for a, b in turns if a and b]
        return statistics.median(ours / theirs for ours, theirs in pairs)


def measure(
    cases: Sequence[Case] = CASES, rivals: Sequence[Contender] | None = None, *, turns: int = 5
) -> list[Row]:
    """All contenders on all cases, turn by turn, in one boot.

    Raises:
        ValueError: if a contender failed, or printed no figure in half of its turns.
    """
    rivals = contenders() if rivals is None else rivals
    plan = [(case, rival, turn) for case in cases for turn in range(turns) for rival in rivals]
    with tempfile.TemporaryDirectory(prefix="fabric-ray-rdma-") as name:
        folder = Path(name)
        script = "".join(
            _kept(folder / str(index), rival.script(case))
            for index, (case, rival, _) in enumerate(plan)
        )
        outcome = guest_run(
            ["sh", "-c", script],
            rw=[folder],
            packages=sorted({package for rival in rivals for package in rival.packages}),
            timeout=_BOOT_SECONDS + _TURN_SECONDS * len(plan),
        )
        figures: dict[tuple[str, str], list[Figure | None]] = {}
        lost: dict[tuple[str, str], ValueError] = {}
        for index, (case, rival, _) in enumerate(plan):
            output = _output(folder / str(index), rival, case, outcome)
            at = (case.key, rival.name)
            try:
                figures.setdefault(at, []).append(rival.figure(output, case))
            except ValueError as error:
                figures[at].append(None)
                lost[at] = error
    for at, reason in lost.items():
        if 2 * figures[at].count(None) >= turns:
            raise reason
    return [Row(case, contender, found) for (case, contender), found in figures.items()]


def _kept(path: Path, script: str) -> str:
    """A turn whose output and status stay in the folder that the guest may write to."""
    quoted = shlex.quote(script)
    return f"timeout {_TURN_SECONDS} sh -c {quoted} >{path}.out 2>&1; echo $? >{path}.status\n"


def _output(path: Path, rival: Contender, case: Case, outcome: Outcome) -> str:
    status = path.with_suffix(".status")
    if not status.exists():
        raise ValueError(f"{outcome.reason}: {_last(outcome.stderr)}")
    output = path.with_suffix(".out").read_text(errors="replace")
    if status.read_text().strip() != "0":
        raise ValueError(f"{rival.name} failed at {case.key}: {_last(output)}")
    return output


def _last(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()] or ["it printed nothing"]
    return " / ".join(lines[-3:])[:400]


def show(rows: Sequence[Row], console: Console) -> None:
    """A line for each case and contender, and how it compares with the case's first."""
    table = Table("case", "contender", "MB/s", "messages/s", "beside the first", title="soft-RoCE")
    first: dict[str, Row] = {}
    for row in rows:
        reference = first.setdefault(row.case, row)
        table.add_row(
            row.case,
            row.contender,
            f"{row.bytes_per_second / 1e6:.1f}",
            f"{row.messages_per_second:.0f}",
            f"{row.ratio(reference):.3f}",
        )
    console.print(table)


def main(
    turns: Annotated[int, typer.Option(min=1, help="Turns per contender and case")] = 5,
    out: Annotated[Path | None, typer.Option(help="File for the figures, as JSON")] = None,
) -> None:
    """Measure writes between two devices of the soft-RoCE guest, beside perftest."""
    console = Console(width=None if Console().is_terminal else 200)
    rivals = contenders()
    reason = why_no_guest(*sorted({package for rival in rivals for package in rival.packages}))
    if reason is not None:
        console.print(f"[red]no soft-RoCE guest: {reason}[/]", soft_wrap=True)
        raise typer.Exit(2)
    try:
        rows = measure(rivals=rivals, turns=turns)
    except ValueError as error:
        console.print(f"[red]{error}[/]", soft_wrap=True)
        raise typer.Exit(1) from error
    show(rows, console)
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1))


if __name__ == "__main__":
    typer.run(main)
