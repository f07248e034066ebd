"""All contenders on all cases, turn by turn, in one boot of the guest."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Sequence
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


def packages(contenders: Sequence[Contender]) -> list[str]:
    """Debian packages that they need in the guest."""
    return sorted({package for one in contenders for package in one.packages})


def run_scripts(
    scripts: Sequence[str],
    outputs: list[str],
    *,
    limit: int = _TURN_SECONDS,
    rails: int = 1,
    first: str = "",
    options: Sequence[str] = (),
    needed: Sequence[str] = (),
) -> None:
    """Runs scripts one after the other in one boot, and appends to `outputs` what each printed,
    also if it is interrupted; an error of a script stands in its output. `first` are shell lines to
    run before, `needed` are packages.

    Raises:
        ValueError: the guest ended before all scripts had their turn.
    """
    with tempfile.TemporaryDirectory(prefix="fabric-ray-rdma-") as name:
        paths = [Path(name) / f"{index}.out" for index in range(len(scripts))]
        turns = "".join(
            f"timeout {limit} sh -c {shlex.quote(script)} >{path} 2>&1\n"
            for path, script in zip(paths, scripts, strict=True)
        )
        try:
            outcome = guest_run(
                ["sh", "-c", f"( set -e\n{first}\n) || exit\n{turns}"],
                rails=rails,
                rw=[Path(name)],
                packages=list(needed),
                timeout=_BOOT_SECONDS + limit * len(scripts),
                options=[*_CLOCK, *options],
            )
        finally:
            outputs += [path.read_text(errors="replace") for path in paths if path.exists()]
        if len(outputs) < len(paths):
            raise ValueError(f"{outcome.reason}: {last(outcome.stderr)}")


def measure(
    cases: Sequence[Case],
    contenders: Sequence[Contender],
    add: Callable[[Row], object],
    *,
    turns: int,
    rails: int = 1,
    first: str = "",
    options: Sequence[str] = (),
) -> None:
    """Adds a row for each case, of the turns in which all contenders printed a figure; an
    interrupted measurement adds those that it has.

    Raises:
        ValueError: if some contender printed none in half of the turns.
    """
    plan = [(case, turn, one) for case in cases for turn in range(turns) for one in contenders]
    scripts = [one.script(case) for case, _, one in plan]
    outputs: list[str] = []
    try:
        shared = {"rails": rails, "first": first, "options": options}
        run_scripts(scripts, outputs, needed=packages(contenders), **shared)
    finally:
        found: dict[Case, list[dict[str, float]]] = {c: [{} for _ in range(turns)] for c in cases}
        lost: list[ValueError] = []
        for (case, turn, one), output in zip(plan, outputs, strict=False):
            try:
                found[case][turn][one.name] = one.seconds(output, case)
            except ValueError as error:
                lost.append(error)
        for number, case in enumerate(cases, 1):
            complete = len(outputs) >= number * turns * len(contenders)
            _add_row(case, contenders, found[case], add, complete)
    for case in cases:
        if lost and 2 * sum(len(turn) == len(contenders) for turn in found[case]) <= turns:
            raise lost[-1]


def _add_row(
    case: Case,
    contenders: Sequence[Contender],
    turns: Sequence[dict[str, float]],
    add: Callable[[Row], object],
    complete: bool,
) -> None:
    kept = [turn for turn in turns if len(turn) == len(contenders)]
    if not kept:
        return
    taken = {one.name: [turn[one.name] for turn in kept] for one in contenders}
    details = {name: {"messages/s": 1 / stats.median(found)} for name, found in taken.items()}
    families = {one.name: (one.family, taken[one.name]) for one in contenders}
    add(row_of_turns(case.header, families, details, complete=complete))
