"""An outcome for people, as tables, and for programs, as JSON values."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from fabric_ray.demo.kvcache.options import Answer, Layer, Outcome

_WIDTH = 32


def summary(outcome: Outcome) -> dict[str, Any]:
    """Machine-readable; times are seconds."""
    good = [a for a in outcome.answers if a.error is None and not a.wrong]
    span = max((a.began + a.seconds for a in outcome.answers), default=0.0)
    return {
        "verified": outcome.verified,
        "checks": outcome.checks,
        "streamed": msgspec.to_builtins(outcome.streamed),
        "requests": len(outcome.answers),
        "failed": dict(Counter(a.error for a in outcome.answers if a.error is not None)),
        "wrong": sum(a.wrong for a in outcome.answers),
        "goodput_tokens_per_s": sum(a.tokens for a in good) / span if span else 0.0,
        "request_seconds": {"p50": _quantile(good, 50), "p99": _quantile(good, 99)},
        "events": msgspec.to_builtins(outcome.events),
        "replicas": list(outcome.replicas),
        "model": outcome.options.model,
    }


def show(outcome: Outcome, console: Console) -> None:
    """Prints the tables and the verdict."""
    said, found = outcome.streamed, summary(outcome)
    table = Table(title="The streamed completion", title_justify="left", show_header=False)
    table.add_row("first token, seen by the client", f"{said.first_token * 1e3:.0f} ms")
    for name, value in said.timings.items():
        shown = f"{value * 1e3:.1f} ms" if isinstance(value, float) else str(value)
        table.add_row(name.replace("_", " "), shown)
    table.add_row("tokens", str(said.tokens))
    console.print(table)
    console.print(_timeline(said.layers))
    table = Table(title="Under load", title_justify="left", show_header=False)
    table.add_row("requests", str(found["requests"]))
    table.add_row("goodput", f"{found['goodput_tokens_per_s']:.0f} tokens/s")
    for name, seconds in found["request_seconds"].items():
        table.add_row(f"{name} of a request", f"{seconds * 1e3:.0f} ms")
    for cause, count in found["failed"].items():
        table.add_row(f"[red]{cause}[/]", str(count))
    console.print(table)
    for check, holds in outcome.checks.items():
        console.print(f"{'[green]yes[/]' if holds else '[red]no [/]'}  {check}")


def _timeline(layers: Sequence[Layer]) -> Table:
    """A row for each layer: the time in which it was computed, then that of its transfer."""
    title = "Its layers, milliseconds from the begin of the prompt's last pass"
    table = Table(title=title, title_justify="left")
    for name in ("layer", "computed", "posted", "delivered"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("[blue]compute[/] [red]transfer[/]", no_wrap=True)
    end = max((layer.delivered for layer in layers), default=0.0)
    before = 0.0
    for layer in layers:
        times = (layer.computed, layer.posted, layer.delivered)
        at = [round(t / end * _WIDTH) for t in (before, layer.computed, layer.delivered)]
        # What is too short for a cell has one all the same.
        computing = max(1, at[1] - at[0])
        sending = max(1, at[2] - max(at[1], at[0] + 1))
        bar = f"{' ' * at[0]}[blue]{'█' * computing}[/][red]{'▒' * sending}[/]"
        table.add_row(str(layer.layer), *(f"{t * 1e3:.2f}" for t in times), bar)
        before = layer.computed
    return table


def _quantile(answers: Sequence[Answer], percent: int) -> float:
    seconds = [a.seconds for a in answers]
    if len(seconds) < 2:
        return seconds[0] if seconds else 0.0
    return statistics.quantiles(seconds, n=100)[percent - 1]
