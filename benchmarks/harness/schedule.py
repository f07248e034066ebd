"""Paired turns: contenders take turns inside every case, in an order that rotates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from benchmarks.harness import stats
from benchmarks.harness.cases import Case
from benchmarks.harness.contender import Contender, ContenderError, Effort, Measurement
from benchmarks.harness.processes import Remains
from benchmarks.harness.results import Failure, Figure, Row

Say = Callable[[str], None]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How long to measure: `turns` turns of about `turn_seconds` for each contender and case."""

    turns: int
    turn_seconds: float


class _Entry:
    """One contender's progress through one case."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self.verified = False
        self.effort = Effort(operations=1, samples=1)
        self.turns: list[Measurement] = []


def run_cases(
    cases: Sequence[Case],
    contenders: Sequence[Contender],
    plan: Plan,
    say: Say,
    keep: Callable[[Row], None] = lambda row: None,
) -> tuple[list[Row], list[str]]:
    """Measure every case; returns the rows and what contenders left behind (now removed).

    A contender runs from its first case to its last, paused except in its own turns. `keep` gets
    each row at once, also the one that an exception interrupts, with the turns it has.
    """
    remains = Remains()
    rows: list[Row] = []
    try:
        for number, case in enumerate(cases):
            say(case.key)
            rows.append(_run_case(case, contenders, plan, say, remains, keep))
            for contender in contenders:
                if not any(contender.supports(later) for later in cases[number + 1 :]):
                    contender.stop()
    finally:
        for contender in contenders:
            contender.stop()
        remains.clear()
    return rows, remains.found


def _run_case(
    case: Case,
    contenders: Sequence[Contender],
    plan: Plan,
    say: Say,
    remains: Remains,
    keep: Callable[[Row], None],
) -> Row:
    failures: list[Failure] = []
    entries: list[_Entry] = []

    def attempt(entry: _Entry, action: Callable[[_Entry], None]) -> bool:
        try:
            say(f"{case.key}  {entry.contender.name}")
            action(entry)
        except ContenderError as error:
            failures.append(Failure(contender=entry.contender.name, reason=str(error)))
            remains.look()
            entry.contender.stop()
            return False
        return True

    def begin(entry: _Entry) -> None:
        entry.contender.start(case)
        entry.verified = entry.contender.verify(case)
        entry.effort = _calibrate(entry.contender, case, plan)

    def turn(entry: _Entry) -> None:
        entry.turns.append(_turn(entry.contender, case, entry.effort))

    for contender in contenders:
        if contender.supports(case):
            entry = _Entry(contender)
            if attempt(entry, begin):
                entries.append(entry)
    remains.look()
    try:
        for number in range(plan.turns):
            shift = number % max(1, len(entries))
            order = entries[shift:] + entries[:shift]
            failed = [entry for entry in order if not attempt(entry, turn)]
            entries = [entry for entry in entries if entry not in failed]
    finally:
        figures = _with_ratios([_figure(entry, case) for entry in entries if entry.turns])
        row = Row(key=case.key, unit=case.unit, case=case, figures=figures, failures=failures)
        keep(row)
    return row


def _turn(contender: Contender, case: Case, effort: Effort) -> Measurement:
    contender.resume()
    try:
        return contender.measure(case, effort)
    finally:
        contender.pause()


def _calibrate(contender: Contender, case: Case, plan: Plan) -> Effort:
    """An effort that fills one turn, found by two untimed runs that also warm up."""
    if case.operation in ("window", "flight"):
        # As many for all: programs that average over their run include its start and end.
        effort = Effort(operations=case.operations, samples=1)
        _turn(contender, case, effort)
        return effort
    small = _turn(contender, case, Effort(operations=1, samples=1)).seconds
    first, _ = stats.operations_and_samples(small[0], case.operations, plan.turn_seconds)
    warm = _turn(contender, case, Effort(operations=first, samples=2)).seconds
    operations, samples = stats.operations_and_samples(
        min(warm), case.operations, plan.turn_seconds
    )
    return Effort(operations=operations, samples=samples)


def _figure(entry: _Entry, case: Case) -> Figure:
    contender = entry.contender
    turns = [stats.median(turn.seconds) for turn in entry.turns]
    every = [seconds for turn in entry.turns for seconds in turn.seconds]
    ends = [case.figure(seconds) for seconds in stats.quartiles(turns)]
    chosen = [turn.chosen for turn in entry.turns if turn.chosen]
    names = {name for turn in entry.turns for name in turn.parts}
    return Figure(
        contender=contender.name,
        family=contender.family,
        threads=contender.threads,
        median=case.figure(stats.median(turns)),
        best=case.figure(min(every)),
        low=min(ends),
        high=max(ends),
        turns=turns,
        samples=len(every),
        note=contender.describe(case),
        chosen=max(set(chosen), key=chosen.count) if chosen else "",
        verified=entry.verified,
        parts={
            name: stats.median([turn.parts[name] for turn in entry.turns if name in turn.parts])
            for name in sorted(names)
        },
    )


def _with_ratios(figures: list[Figure]) -> list[Figure]:
    floors = {figure.threads: figure for figure in figures if figure.family == "floor"}
    ours = next((f for f in figures if f.family == "ours"), None)

    def ratio(over: Figure | None, under: Figure | None) -> float | None:
        # Turns are seconds, so the slower one divided by the faster one is a ratio of speeds.
        return stats.paired_ratio(over.turns, under.turns) if over and under else None

    return [
        msgspec.structs.replace(
            figure,
            of_floor=None
            if figure.family == "floor"
            else ratio(floors.get(figure.threads), figure),
            ours_over=None if figure.family == "ours" else ratio(figure, ours),
        )
        for figure in figures
    ]
