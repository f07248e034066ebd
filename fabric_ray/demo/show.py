"""An outcome for people, as a table, and for programs, as JSON values."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from fabric_ray.demo.options import Outcome, Push

# A terminal of 80 columns holds this many versions, a screen this many links.
_COLUMNS = 5
_LINKS = 16


def summary(outcome: Outcome) -> dict[str, Any]:
    """Machine-readable: rates in 1e9 bytes per second, medians over the pushes."""
    seconds = statistics.median(p.report.seconds for p in outcome.pushes)
    floor = statistics.median(p.floor_seconds for p in outcome.pushes)
    nbytes = outcome.connect.nbytes
    return {
        "verified": outcome.verified,
        "bytes": nbytes,
        "seconds": seconds,
        "gbytes_per_s": nbytes / seconds / 1e9,
        "floor_gbytes_per_s": nbytes / floor / 1e9,
        "times_floor": statistics.median(
            p.report.seconds / p.floor_seconds for p in outcome.pushes
        ),
        "model": outcome.model,
        "parameters": outcome.parameters,
        "trainers": outcome.trainers,
        "rollouts": outcome.rollouts,
        "copy_threads_per_trainer": outcome.threads,
        "connect": msgspec.to_builtins(outcome.connect),
        "links": [msgspec.to_builtins(link) for link in outcome.links],
        "pushes": [
            {
                "version": p.report.version,
                "verified": p.verified,
                "bytes_checked": sum(c.nbytes for c in p.checked),
                "wrong": [name for c in p.checked for name in c.wrong],
                "seconds": p.report.seconds,
                "gbytes_per_s": p.report.gbytes_per_s,
                "floor_seconds": p.floor_seconds,
                "stages": p.report.stages,
                "losses": p.losses,
            }
            for p in outcome.pushes
        ],
        "timeline": outcome.timeline,
    }


def show(outcome: Outcome, console: Console) -> None:
    """Prints the table and the verdict."""
    shown = outcome.pushes[-_COLUMNS:]
    table = Table(
        title=f"{outcome.model}, {outcome.parameters / 1e6:.0f} M parameters: "
        f"{outcome.trainers} FSDP2 trainers into {outcome.rollouts} tensor-parallel rollouts",
        title_justify="left",
    )
    table.add_column("version")
    for push in shown:
        table.add_column(str(push.report.version), justify="right")
    table.add_column("median", justify="right", style="bold")

    def row(name: str, unit: str, digits: int, value: Callable[[Push], float]) -> None:
        found = [value(push) for push in shown]
        middle = statistics.median(value(push) for push in outcome.pushes)
        label = f"{name} [dim]{unit}[/]" if unit else name
        table.add_row(label, *(f"{v:.{digits}f}" for v in (*found, middle)))

    if outcome.pushes[0].losses:
        row("loss after training", "", 3, lambda p: p.losses[-1])
    for stage in outcome.pushes[0].report.stages:
        row(stage, "ms", 1, partial(_stage_ms, stage))
    row("whole push", "ms", 1, lambda p: p.report.seconds * 1e3)
    table.add_section()
    row("rate", "GB/s", 2, lambda p: p.report.gbytes_per_s)
    row("floor", "GB/s", 2, lambda p: p.report.nbytes / p.floor_seconds / 1e9)
    row("time over floor", "x", 2, lambda p: p.report.seconds / p.floor_seconds)
    table.add_section()
    for i, link in enumerate(outcome.links[:_LINKS]):
        name = f"{link.trainer} to {link.rollout}, {link.transport}, {link.nbytes / 1e6:.1f} MB"
        row(name, "GB/s", 2, partial(_link_rate, i))
    table.add_section()
    table.add_row("every byte as in the reference", *map(_verdict, shown), "")
    console.print(table)
    c = outcome.connect
    if len(outcome.links) > _LINKS:
        console.print(f"{len(outcome.links) - _LINKS} more links; --json lists them")
    times = ", ".join(f"{stage} {s * 1e3:.0f} ms" for stage, s in c.seconds.items())
    console.print(f"Connected once: {c.copies} copies planned; {times}.")
    threads = f"{outcome.threads} thread{'s' if outcome.threads > 1 else ''}"
    console.print(
        f"Floor: plain copies of the same bytes by {threads} in each trainer, after each push."
    )
    console.print(f"Bytes of one version: {c.nbytes:,}. Timeline: {outcome.timeline}")


def _stage_ms(stage: str, push: Push) -> float:
    return push.report.stages[stage] * 1e3


def _link_rate(link: int, push: Push) -> float:
    return push.report.links[link].gbytes_per_s


def _verdict(push: Push) -> str:
    if any(c.wrong for c in push.checked):
        return f"[red]{sum(len(c.wrong) for c in push.checked)} differ[/]"
    return "[green]yes[/]" if push.verified else "[red]no change[/]"
