"""`python -m benchmarks run`: choose, measure, save, print."""

from __future__ import annotations

import fnmatch
import os
import time
from datetime import datetime, timezone
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.contenders.registry import contenders as find_contenders
from benchmarks.harness.cases import Case
from benchmarks.harness.machine import machine
from benchmarks.harness.page import write_page
from benchmarks.harness.processes import adopt_orphans, ended_by_signals
from benchmarks.harness.results import SCHEMA, Report, Row, save
from benchmarks.harness.schedule import Plan, run_cases
from benchmarks.harness.table import print_absent, print_report
from benchmarks.suites import SUITES


class Options(msgspec.Struct, frozen=True, kw_only=True):
    suites: tuple[str, ...] = ()
    quick: bool = False
    only: tuple[str, ...] = ()
    contenders: tuple[str, ...] = ()
    peers: bool = True
    repeat: int | None = None
    out: Path = Path("bench-results")

    @property
    def plan(self) -> Plan:
        if self.quick:
            return Plan(turns=self.repeat or 3, turn_seconds=0.03)
        return Plan(turns=self.repeat or 7, turn_seconds=0.1)


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
    names = options.suites or tuple(SUITES)
    cases = [case for name in names for case in SUITES[name](options.quick)]
    if options.only:
        cases = [
            case
            for case in cases
            if any(fnmatch.fnmatchcase(case.key, pattern) for pattern in options.only)
        ]
    if not cases:
        raise ValueError("no case matches; `python -m benchmarks list` names them all")
    return cases


def run(options: Options, console: Console) -> Report:
    """Measure, save JSON and page below `options.out`, and print the table.

    The JSON is saved after every case. An interrupted run prints and saves what it has measured.

    Raises:
        ValueError: for options that name nothing.
    """
    cases = chosen_cases(options)
    here, absent = find_contenders(peers=options.peers, names=options.contenders)
    print_absent(absent, console)
    load, began, clock = os.getloadavg(), datetime.now(timezone.utc), time.monotonic()
    stem = options.out / f"bench-{began:%Y%m%d-%H%M%S}"
    keys = [case.key for case in cases]
    rows: list[Row] = []
    left_behind: list[str] = []

    def report() -> Report:
        return Report(
            schema=SCHEMA,
            started=began.isoformat(timespec="seconds"),
            seconds=time.monotonic() - clock,
            options=_shown(options),
            machine=machine(load),
            rows=rows,
            absent=absent,
            left_behind=left_behind,
        )

    def keep(row: Row) -> None:
        rows.append(row)
        save(report(), stem.with_suffix(".json"))

    adopt_orphans()
    try:
        with ended_by_signals(), _progress(console) as bar:
            task = bar.add_task("", total=len(cases))

            def say(text: str) -> None:
                bar.update(task, description=text)
                if text in keys:
                    bar.update(task, completed=keys.index(text))
                    if not console.is_terminal:
                        console.print(f"{keys.index(text) + 1}/{len(keys)} {text}", highlight=False)

            left_behind += run_cases(cases, here, options.plan, say, keep)[1]
    finally:
        if rows:
            save(report(), stem.with_suffix(".json"))
            write_page(report(), stem.with_suffix(".html"))
            print_report(report(), console)
            if len(rows) < len(cases):
                console.print(f"[yellow]interrupted[/] in case {len(rows)} of {len(cases)}")
            for suffix in (".json", ".html"):
                console.print(f"saved {stem.with_suffix(suffix)}", highlight=False, soft_wrap=True)
    return report()


def _shown(options: Options) -> dict[str, str]:
    plan = options.plan
    return {
        "suites": " ".join(options.suites) or "all",
        "quick": str(options.quick).lower(),
        "only": " ".join(options.only) or "all",
        "contenders": " ".join(options.contenders) or "all",
        "peers": str(options.peers).lower(),
        "turns": str(plan.turns),
        "turn_seconds": str(plan.turn_seconds),
    }


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<48}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        refresh_per_second=2,
    )
