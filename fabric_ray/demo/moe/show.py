"""An outcome for people, as tables, and for programs, as JSON values."""

from __future__ import annotations

import statistics
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from fabric_ray.demo.moe.options import Outcome, Phase


def summary(outcome: Outcome) -> dict[str, Any]:
    """Machine-readable; times are seconds."""
    options, moe = outcome.options, outcome.options.model.moe
    return {
        "verified": outcome.verified,
        "checks": outcome.checks,
        "ranks": options.ranks,
        "experts": moe.experts,
        "topk": moe.topk,
        "hidden": moe.hidden,
        "phases": [_phase(phase) for phase in outcome.phases],
        "loss": msgspec.to_builtins(outcome.loss),
        "joined_seconds": outcome.joined,
    }


def show(outcome: Outcome, console: Console) -> None:
    """Prints the tables and the verdict."""
    for phase in outcome.phases:
        console.print(_table(phase))
    loss = outcome.loss
    by = ", ".join(f"rank {rank}" for rank in loss.by) or "Ray"
    console.print(
        f"kill -9 of rank {loss.rank}: named by {by} after {loss.seconds:.2f} s, results without "
        f"it after {loss.recovered:.2f} s; replaced within {outcome.joined:.1f} s"
    )
    console.print(f"its cause: {loss.cause}", highlight=False, markup=False)
    console.print(outcome.explanation.splitlines()[-1].strip(), "of exchange memory on each rank")
    for check, holds in outcome.checks.items():
        console.print(f"{'[green]yes[/]' if holds else '[red]no [/]'}  {check}")


def _phase(phase: Phase) -> dict[str, Any]:
    return {
        **msgspec.to_builtins(phase, str_keys=True),
        "equal": phase.equal,
        "step_seconds": statistics.median(phase.seconds),
    }


def _table(phase: Phase) -> Table:
    gone = phase.left_out
    without = f", without experts {gone[0]} to {gone[-1]}" if gone else ""
    table = Table(
        title=f"{phase.name}{without}: {phase.tokens} tokens in "
        f"{phase.steps} steps, {statistics.median(phase.seconds) * 1e3:.0f} ms each",
        title_justify="left",
    )
    for name in ("rank", "rows of its experts", "load", "dispatched", "combined"):
        table.add_column(name, justify="right")
    for name in ("dispatch", "combine"):
        table.add_column(f"{name} [dim]ms[/]", justify="right")
    mean = statistics.mean(t.rows for t in phase.traffic.values()) or 1.0
    for rank, one in sorted(phase.traffic.items()):
        each = max(1, one.exchanges)
        table.add_row(
            str(rank),
            str(one.rows),
            f"{one.rows / mean:.2f}",
            f"{one.dispatched_nbytes / 1e3:.1f} kB",
            f"{one.combined_nbytes / 1e3:.1f} kB",
            f"{one.dispatch_seconds / each * 1e3:.2f}",
            f"{one.combine_seconds / each * 1e3:.2f}",
        )
    return table
