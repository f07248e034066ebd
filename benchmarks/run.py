"""`python -m benchmarks run`: choose cases and contenders, and measure them in turns."""

from __future__ import annotations

import fnmatch
from pathlib import Path

import msgspec

from benchmarks.contenders.registry import contenders as find_contenders
from benchmarks.harness.cases import Case
from benchmarks.harness.record import OUT, recorded
from benchmarks.harness.schedule import Plan, run_cases
from benchmarks.suites import DEFAULT, SUITES


class Options(msgspec.Struct, frozen=True, kw_only=True):
    suites: tuple[str, ...] = ()
    quick: bool = False
    only: tuple[str, ...] = ()
    contenders: tuple[str, ...] = ()
    peers: bool = True
    repeat: int | None = None
    out: Path = OUT
    resume: Path | None = None

    @property
    def plan(self) -> Plan:
        if self.quick:
            return Plan(turns=self.repeat or 3, turn_seconds=0.03)
        return Plan(turns=self.repeat or 7)


def chosen_cases(options: Options) -> list[Case]:
    """Cases of the suites asked for whose key matches one of `only`.

    Raises:
        ValueError: for an unknown suite, or when nothing matches.
    """
    unknown = set(options.suites) - set(SUITES)
    if unknown:
        raise ValueError(
            f"no suite is called {', '.join(sorted(unknown))}; known: {', '.join(SUITES)}"
        )
    names = options.suites or DEFAULT
    cases = [
        case
        for name in names
        for case in SUITES[name](options.quick)
        if any(fnmatch.fnmatchcase(case.key, pattern) for pattern in options.only or ("*",))
    ]
    if not cases:
        raise ValueError("no case matches; `python -m benchmarks list` names them all")
    return cases


def run(options: Options) -> None:
    """Measure, and keep lines of JSON and a page below `options.out`.

    Raises:
        ValueError: for options that name nothing.
    """
    cases = chosen_cases(options)
    here, absent = find_contenders(peers=options.peers, names=options.contenders)
    kept = {
        **{name: str(value) for name, value in msgspec.structs.asdict(options).items() if value},
        **{name: str(value) for name, value in msgspec.structs.asdict(options.plan).items()},
    }
    with recorded("bench", options.resume, options=kept, absent=absent, out=options.out) as results:
        run_cases(cases, here, options.plan, results)
