"""Updates as lines, an outcome as a table and a curve, and for programs as JSON values."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from fabric_ray.demo.rl.options import LOGPROB_TOLERANCE, RISE, Outcome, Update
from fabric_ray.demo.rl.plot import plot

HEADER = (
    f"{'step':>5} {'version':>7} {'reward':>7} {'solved':>6}  {'staleness':<16} "
    f"{'samples/s':>9} {'push ms':>7}  generating"
)


def line(update: Update) -> str:
    """One update, under :data:`HEADER`."""
    u = update
    return (
        f"{u.step:>5} {u.version:>7} {u.reward:>7.3f} {u.solved:>6.0%}  "
        f"{_histogram(u.staleness):<16} {sum(u.staleness.values()) / u.seconds:>9.0f} "
        f"{u.push_seconds * 1e3:>7.1f}  {u.generating_in_training:>4.0%}"
    )


def summary(outcome: Outcome) -> dict[str, Any]:
    """Machine-readable."""
    o = outcome
    first, last = o.quarters
    return {
        "verified": o.verified,
        "checks": o.checks,
        "reward": {
            "first_quarter": first,
            "last_quarter": last,
            "rise": last - first,
            "rise_required": RISE,
            "solved": o.updates[-1].solved,
        },
        "logprob_difference": max(u.mismatch for u in o.updates),
        "logprob_tolerance": LOGPROB_TOLERANCE,
        "versions": o.updates[-1].version,
        "wrong": o.wrong,
        "bytes": o.nbytes,
        "push_seconds": statistics.median(u.push_seconds for u in o.updates),
        "staleness": _staleness(o),
        "discarded": sum(u.discarded for u in o.updates),
        "generating_in_training": _share(o, "train_seconds", "generating_in_training"),
        "generating_in_push": _share(o, "push_seconds", "generating_in_push"),
        "samples_per_s": o.options.samples * len(o.updates) / o.seconds,
        "seconds": o.seconds,
        "parameters": o.parameters,
        "transport": o.transport,
        "example": o.example,
        "timeline": o.timeline,
        "options": msgspec.to_builtins(o.options, enc_hook=str),
        "updates": [msgspec.to_builtins(u) for u in o.updates],
    }


def show(outcome: Outcome, console: Console) -> None:
    """Prints what was found, the curve and the verdict."""
    o, said = outcome, summary(outcome)
    first, last = o.quarters
    console.print(f"\nReward by update, {o.options.samples} samples each")
    console.print(plot([update.reward for update in o.updates]), highlight=False)
    asked, answered = o.example
    console.print(f"One of the last samples: {asked}  →  {answered}\n", highlight=False)
    told = {
        "weights_equal": f"{said['versions']} versions on {o.options.rollouts} rollouts, every bit",
        "logprobs_agree": f"of every sample learned from, within {said['logprob_difference']:.0e}; "
        f"{LOGPROB_TOLERANCE:.0e} is allowed",
        "staleness_bounded": f"{_histogram(_staleness(o))}; at most {o.options.staleness}, "
        f"{said['discarded']} samples discarded",
        "reward_rose": f"from {first:.3f} in the first quarter to {last:.3f} in the last; "
        f"{RISE} more is required",
    }
    table = Table(show_header=False)
    for check, holds in o.checks.items():
        verdict = "[green]yes[/]" if holds else "[red]no[/]"
        table.add_row(check.replace("_", " "), verdict, told[check])
    console.print(table)
    console.print(
        f"{o.seconds:.0f} s, {said['samples_per_s']:.0f} samples/s; a push of {o.nbytes:,} bytes "
        f"over {o.transport} took {said['push_seconds'] * 1e3:.1f} ms."
    )
    console.print(
        f"Rollouts generated in {said['generating_in_training']:.0%} of the training time and in "
        f"{said['generating_in_push']:.0%} of the push time. "
        f"Timeline: {o.timeline}"
    )


def _histogram(staleness: dict[int, int]) -> str:
    total = sum(staleness.values())
    return " ".join(f"{behind}:{n / total:.0%}" for behind, n in staleness.items())


def _staleness(o: Outcome) -> dict[int, int]:
    total: Counter[int] = Counter()
    for update in o.updates:
        total.update(update.staleness)
    return dict(sorted(total.items()))


def _share(o: Outcome, seconds: str, share: str) -> float:
    """The mean of a share of times, the longer ones counting more."""
    weights: list[float] = [getattr(u, seconds) for u in o.updates]
    shares: list[float] = [getattr(u, share) for u in o.updates]
    return sum(w * s for w, s in zip(weights, shares, strict=True)) / sum(weights)
