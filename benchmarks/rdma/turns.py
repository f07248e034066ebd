"""All contenders on all cases, turn by turn, in one boot of the guest."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rdma.cases import Case, Figure, Row
from benchmarks.rdma.contenders import Contender, last
from tests.rdma.boot import Outcome, guest_run

_BOOT_SECONDS = 60.0
_TURN_SECONDS = 60
# Without KVM a guest distrusts its cycle counter, and each look at the clock leaves the guest: that
# costs ours a microsecond a poll, while perftest reads cycles.
_CLOCK = ("--append", "tsc=reliable")


def packages(rivals: Sequence[Contender]) -> list[str]:
    """Debian packages that they need in the guest."""
    return sorted({package for rival in rivals for package in rival.packages})


def measure(
    cases: Sequence[Case],
    rivals: Sequence[Contender],
    *,
    turns: int,
    rails: int = 1,
    first: str = "",
    options: Sequence[str] = (),
) -> list[Row]:
    """A row for each case and contender; `first` are shell lines to run before the first turn.

    Raises:
        ValueError: if a contender failed, or printed no figure in half of its turns.
    """
    plan = [(case, rival, turn) for case in cases for turn in range(turns) for rival in rivals]
    with tempfile.TemporaryDirectory(prefix="fabric-ray-rdma-") as name:
        folder = Path(name)
        kept = [
            _kept(folder / str(index), rival.script(case))
            for index, (case, rival, _) in enumerate(plan)
        ]
        outcome = guest_run(
            ["sh", "-c", f"( set -e\n{first}\n) || exit\n{''.join(kept)}"],
            rails=rails,
            rw=[folder],
            packages=packages(rivals),
            timeout=_BOOT_SECONDS + _TURN_SECONDS * len(plan),
            options=[*_CLOCK, *options],
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
        raise ValueError(f"{outcome.reason}: {last(outcome.stderr)}")
    output = path.with_suffix(".out").read_text(errors="replace")
    if status.read_text().strip() != "0":
        raise ValueError(f"{rival.name} failed at {case.key}: {last(output)}")
    return output
