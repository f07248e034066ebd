"""Figures as text, with the aims beside them."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.rails.simulator import Phase, Report
from benchmarks.sheets import Sheet

SHARE, P99, RECOVERY_MS, FAILOVER_MS = 0.95, 0.6, 1000.0, 50.0
"""What issue 4 asks for."""


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _ratio(phase: Phase, reference: Phase) -> str:
    ours, theirs = phase.times.p99_us, reference.times.p99_us
    return f"{ours / theirs:.2f}" if ours and theirs else "-"


def phases(reports: Sequence[Report]) -> Sheet:
    """A line for each policy in each phase of each scenario."""
    names = ("up, GB/s", "share", "settled", "median, us", "P99, us", "P99 / static")
    sheet = Sheet(title="simulated rails", columns=("scenario", "ms", "policy", *names))
    turns = {r.scenario.name: r for r in reports if r.policy == "round-robin"}
    for report in reports:
        name = report.scenario.name
        sheet.figures[f"{name} {report.policy}"] = report.summary
        reference = turns.get(name, report)
        for phase, static in zip(report.summary.phases, reference.summary.phases, strict=True):
            cells = (
                f"{phase.capacity:.1f}",
                f"{phase.share:.3f}",
                f"{phase.settled:.3f}",
                _number(phase.times.median_us),
                _number(phase.times.p99_us),
                _ratio(phase, static),
            )
            span = f"{phase.from_ms:g}-{phase.to_ms:g}"
            sheet.rows.append((name, span, report.policy, *cells))
    return sheet


def losses(reports: Sequence[Report]) -> Sheet:
    """What losing and finding rails took."""
    times = ("ms", "in flight", "over after, ms", "added, ms", "back to 0.95 after, ms")
    sheet = Sheet(
        title="lost and returned",
        columns=("scenario", "policy", "rail", "what", *times),
        notes=tuple(f"missed: {miss}" for miss in missed(reports)),
    )
    for report in reports:
        head = (report.scenario.name, report.policy)
        for loss in report.summary.losses:
            cells = (f"{loss.at_ms:g}", str(loss.in_flight), f"{loss.over_ms:.2f}")
            added = f"{loss.added_ms:.2f}"
            sheet.rows.append((*head, str(loss.rail), "lost", *cells, added, ""))
        for back in report.summary.returns:
            recovered = _number(back.recovered_ms)
            at = f"{back.at_ms:g}"
            sheet.rows.append((*head, str(back.rail), "back", at, "", "", "", recovered))
    return sheet


def missed(reports: Sequence[Report]) -> list[str]:
    """The aims that adaptive spraying doesn't meet, in words.

    Blocks below 4 MiB and single prompts don't fill the rails whatever the policy: no aims there.
    """
    turns = {r.scenario.name: r for r in reports if r.policy == "round-robin"}
    found = []
    for report in (r for r in reports if r.policy == "adaptive"):
        name = report.scenario.name
        if name.startswith("tent"):
            continue
        for phase in report.summary.phases:
            if phase.settled < SHARE:
                found.append(f"{name}: {phase.settled:.3f} of the capacity from {phase.from_ms} ms")
        unequal = len(set(report.scenario.rails)) > 1
        if unequal and name in turns:
            ours, static = report.summary.times.p99_us, turns[name].summary.times.p99_us
            if ours and static and ours > P99 * static:
                found.append(f"{name}: P99 is {ours / static:.2f} of static")
        for loss in report.summary.losses:
            if loss.added_ms > FAILOVER_MS:
                found.append(f"{name}: failover added {loss.added_ms:.1f} ms")
        for back in report.summary.returns:
            if back.recovered_ms is None or back.recovered_ms > RECOVERY_MS:
                found.append(f"{name}: recovery took {back.recovered_ms} ms")
    return found
