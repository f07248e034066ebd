"""Figures as text, with the aims beside them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.rails.simulator import Phase, Report

SHARE, P99, RECOVERY_MS, FAILOVER_MS = 0.95, 0.6, 1000.0, 50.0
"""What issue 4 asks for."""


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _ratio(phase: Phase, reference: Phase) -> str:
    ours, theirs = phase.times.p99_us, reference.times.p99_us
    return f"{ours / theirs:.2f}" if ours and theirs else "-"


def show_phases(reports: Sequence[Report], console: Console) -> None:
    """A line for each policy in each phase of each scenario."""
    table = Table("scenario", "ms", "policy", title="simulated rails")
    for name in ("up, GB/s", "share", "settled", "median, us", "P99, us", "P99 / static"):
        table.add_column(name, justify="right")
    turns = {r.scenario.name: r for r in reports if r.policy == "round-robin"}
    for report in reports:
        reference = turns.get(report.scenario.name, report)
        for phase, static in zip(report.summary.phases, reference.summary.phases, strict=True):
            table.add_row(
                report.scenario.name,
                f"{phase.from_ms:g}-{phase.to_ms:g}",
                report.policy,
                f"{phase.capacity:.1f}",
                f"{phase.share:.3f}",
                f"{phase.settled:.3f}",
                _number(phase.times.median_us),
                _number(phase.times.p99_us),
                _ratio(phase, static),
            )
    console.print(table)


def show_losses(reports: Sequence[Report], console: Console) -> None:
    """What losing and finding rails took."""
    table = Table("scenario", "policy", "rail", "what", title="lost and returned")
    for name in ("ms", "in flight", "over after, ms", "added, ms", "back to 0.95 after, ms"):
        table.add_column(name, justify="right")
    for report in reports:
        head = (report.scenario.name, report.policy)
        for loss in report.summary.losses:
            times = (f"{loss.over_ms:.2f}", f"{loss.added_ms:.2f}", "")
            at = (f"{loss.at_ms:g}", str(loss.in_flight))
            table.add_row(*head, str(loss.rail), "lost", *at, *times)
        for back in report.summary.returns:
            recovered = _number(back.recovered_ms)
            table.add_row(*head, str(back.rail), "back", f"{back.at_ms:g}", "", "", "", recovered)
    console.print(table)


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
