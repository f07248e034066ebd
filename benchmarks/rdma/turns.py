"""All contenders on all cases, turn by turn, in one boot of the guest."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rdma.contenders import Case, Contender, last
from fabric_ray.bench import stats
from fabric_ray.bench.results import Row, row_of_turns
from tests.rdma.boot import guest_run

_BOOT_SECONDS = 60.0
_TURN_SECONDS = 60
# Without KVM a guest distrusts its cycle counter, and each look at the clock leaves the guest: that
# costs ours a microsecond a poll, while perftest reads cycles.
_CLOCK = ("--append", "tsc=reliable")


def packages(rivals: Sequence[Contender]) -> list[str]:
    """Debian packages that they need in the guest."""
    return sorted({package for rival in rivals for package in rival.packages})


def guest_outputs(
    scripts: Sequence[str],
    *,
    limit: int = _TURN_SECONDS,
    rails: int = 1,
    first: str = "",
    options: Sequence[str] = (),
    needed: Sequence[str] = (),
) -> list[str]:
    """What each script printed, one after the other in one boot; an error of one stands in its
    output. `first` are shell lines to run before, `needed` are packages.

    Raises:
        ValueError: the guest ended before all scripts had their turn.
    """
    with tempfile.TemporaryDirectory(prefix="fabric-ray-rdma-") as name:
        paths = [Path(name) / f"{index}.out" for index in range(len(scripts))]
        turns = "".join(
            f"timeout {limit} sh -c {shlex.quote(script)} >{path} 2>&1\n"
            for path, script in zip(paths, scripts, strict=True)
        )
        outcome = guest_run(
            ["sh", "-c", f"( set -e\n{first}\n) || exit\n{turns}"],
            rails=rails,
            rw=[Path(name)],
            packages=list(needed),
            timeout=_BOOT_SECONDS + limit * len(scripts),
            options=[*_CLOCK, *options],
        )
        if not paths[-1].exists():
            raise ValueError(f"{outcome.reason}: {last(outcome.stderr)}")
        return [path.read_text(errors="replace") for path in paths]


def measure(
    cases: Sequence[Case],
    rivals: Sequence[Contender],
    *,
    turns: int,
    rails: int = 1,
    first: str = "",
    options: Sequence[str] = (),
) -> list[Row]:
    """A row for each case, of the turns in which all contenders printed a figure.

    Raises:
        ValueError: if some contender printed none in half of the turns.
    """
    plan = [(case, turn, rival) for case in cases for turn in range(turns) for rival in rivals]
    outputs = guest_outputs(
        [rival.script(case) for case, _, rival in plan],
        rails=rails,
        first=first,
        options=options,
        needed=packages(rivals),
    )
    found: dict[Case, list[dict[str, float]]] = {case: [{} for _ in range(turns)] for case in cases}
    lost: list[ValueError] = []
    for (case, turn, rival), output in zip(plan, outputs, strict=True):
        try:
            found[case][turn][rival.name] = rival.seconds(output, case)
        except ValueError as error:
            lost.append(error)
    rows = []
    for case in cases:
        kept = [turn for turn in found[case] if len(turn) == len(rivals)]
        if 2 * len(kept) <= turns and lost:
            raise lost[-1]
        taken = {one.name: [turn[one.name] for turn in kept] for one in rivals}
        details = {name: {"messages/s": 1 / stats.median(turns)} for name, turns in taken.items()}
        families = {one.name: (one.family, taken[one.name]) for one in rivals}
        rows.append(row_of_turns(case.header, families, details))
    return rows
