"""Paired turns: contenders take turns inside every case, in an order that rotates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from benchmarks.harness import stats
from benchmarks.harness.cases import Case
from benchmarks.harness.contender import Contender, ContenderError, Effort, Measurement
from benchmarks.harness.processes import Remains
from benchmarks.harness.record import Results
from benchmarks.harness.results import Failure, Figure, make_figure, make_row

T = TypeVar("T")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How long to measure: `turns` turns of about `turn_seconds` for each contender and case."""

    turns: int
    turn_seconds: float = 0.1


def rotated(contenders: Sequence[T], turn: int) -> list[T]:
    """The order of a turn: each begins as often as any other."""
    shift = turn % max(1, len(contenders))
    return [*contenders[shift:], *contenders[:shift]]


class _Entry:
    """One contender's progress through one case."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self.verified = False
        self.effort = Effort(operations=1, samples=1)
        self.turns: list[Measurement] = []


def run_cases(
    cases: Sequence[Case], contenders: Sequence[Contender], plan: Plan, results: Results
) -> None:
    """Measure every case that the results don't have; what contenders left behind is removed.

    A contender runs from its first case to its last, paused except in its own turns. A row is kept
    at once, also the one that an exception interrupts, with the turns it has.
    """
    remains = Remains()
    try:
        for number, case in enumerate(cases):
            if not results.has(case.key):
                results.say(f"{number + 1}/{len(cases)} {case.key}")
                _run_case(case, contenders, plan, remains, results)
            for contender in contenders:
                if not any(contender.takes_part(later) for later in cases[number + 1 :]):
                    contender.stop()
    finally:
        for contender in contenders:
            contender.stop()
        remains.clear()
        results.left_behind += remains.found


def _run_case(
    case: Case, contenders: Sequence[Contender], plan: Plan, remains: Remains, results: Results
) -> None:
    failures: list[Failure] = []
    entries: list[_Entry] = []

    def attempt(entry: _Entry, action: Callable[[_Entry], None]) -> bool:
        try:
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

    complete = False
    try:
        for contender in contenders:
            if contender.takes_part(case):
                entry = _Entry(contender)
                if attempt(entry, begin):
                    entries.append(entry)
        remains.look()
        for number in range(plan.turns):
            failed = [one for one in rotated(entries, number) if not attempt(one, turn)]
            entries = [entry for entry in entries if entry not in failed]
        complete = True
    finally:
        figures = [_figure(entry, case) for entry in entries if entry.turns]
        if figures or complete:
            results.add(make_row(case.header, figures, failures, complete=complete))


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
    chosen = [turn.chosen for turn in entry.turns if turn.chosen]
    names = {name for turn in entry.turns for name in turn.parts}
    return make_figure(
        case.header,
        contender.name,
        contender.family,
        [turn.seconds for turn in entry.turns],
        threads=contender.threads,
        note=contender.describe(case),
        chosen=max(set(chosen), key=chosen.count) if chosen else "",
        verified=entry.verified,
        parts={
            name: stats.median([turn.parts[name] for turn in entry.turns if name in turn.parts])
            for name in sorted(names)
        },
    )
