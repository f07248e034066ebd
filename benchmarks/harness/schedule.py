"""Cases one after the other, in each of which all contenders take turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.harness.cases import Case
from benchmarks.harness.contender import Contender, Effort, Measurement
from benchmarks.harness.remains import Remains
from fabric_ray.bench import stats
from fabric_ray.bench.record import Results
from fabric_ray.bench.results import ContenderError, Failure
from fabric_ray.bench.turns import Entry, take_turns


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How long to measure: `turns` turns of about `turn_seconds` for each contender and case."""

    turns: int
    turn_seconds: float = 0.1


def run_cases(
    cases: Sequence[Case], contenders: Sequence[Contender], plan: Plan, results: Results
) -> None:
    """Measure every case that the results don't have; what contenders left behind is removed.

    A contender runs from its first case to its last, paused except in its own turns.
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
    ready: dict[str, _Ready] = {}
    failures: list[Failure] = []

    def failed(contender: Contender) -> None:
        remains.look()
        contender.stop()

    for contender in contenders:
        if contender.takes_part(case):
            try:
                ready[contender.name] = _Ready(contender, case, plan)
            except ContenderError as error:
                failures.append(Failure(contender=contender.name, reason=str(error)))
                failed(contender)
    remains.look()
    take_turns(
        case.header,
        [
            Entry(name=name, family=one.contender.family, run=one.turn, facts=one.facts)
            for name, one in ready.items()
        ],
        plan.turns,
        results,
        failures=failures,
        on_failure=lambda entry: failed(ready[entry.name].contender),
    )


class _Ready:
    """A contender whose processes are up, whose bytes were compared, and whose effort is known."""

    def __init__(self, contender: Contender, case: Case, plan: Plan) -> None:
        self.contender, self._case = contender, case
        contender.start(case)
        self._verified = contender.verify(case)
        self._effort = self._calibrated(plan.turn_seconds)
        self._turns: list[Measurement] = []

    def turn(self) -> list[float]:
        found = self._measure(self._effort)
        self._turns.append(found)
        return found.seconds

    def facts(self) -> dict[str, Any]:
        chosen = [turn.chosen for turn in self._turns if turn.chosen]
        names = sorted({name for turn in self._turns for name in turn.parts})
        parts = {n: stats.median([t.parts[n] for t in self._turns if n in t.parts]) for n in names}
        return {
            "threads": self.contender.threads,
            "note": self.contender.describe(self._case),
            "chosen": max(set(chosen), key=chosen.count) if chosen else "",
            "verified": self._verified,
            "parts": parts,
        }

    def _measure(self, effort: Effort) -> Measurement:
        self.contender.resume()
        try:
            return self.contender.measure(self._case, effort)
        finally:
            self.contender.pause()

    def _calibrated(self, budget: float) -> Effort:
        """An effort that fills one turn, found by two untimed runs that also warm up."""
        wanted = self._case.operations
        if self._case.operation in ("window", "flight"):
            # As many for all: programs that average over their run include its start and end.
            effort = Effort(operations=wanted, samples=1)
            self._measure(effort)
            return effort
        small = self._measure(Effort(operations=1, samples=1)).seconds[0]
        first, _ = operations_and_samples(small, wanted, budget)
        warm = self._measure(Effort(operations=first, samples=2)).seconds
        operations, samples = operations_and_samples(min(warm), wanted, budget)
        return Effort(operations=operations, samples=samples)


def operations_and_samples(
    seconds: float, wanted: int, budget: float, *, most: int = 200
) -> tuple[int, int]:
    """Operations per sample and samples that fill `budget` seconds at `seconds` an operation.

    Never fewer than one of each; operations shrink below `wanted` only for slow contenders.
    """
    operations = max(1, min(wanted, int(budget / max(seconds, 1e-9))))
    samples = int(budget / max(operations * seconds, 1e-9))
    return operations, max(1, min(most, samples))
