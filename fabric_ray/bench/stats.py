"""Medians, spreads and paired ratios."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from statistics import median

__all__ = ["median", "paired_ratio", "quartiles", "spread"]


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The 25th and 75th percentile; one value is both."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def spread(values: Sequence[float]) -> dict[str, float]:
    """Percentiles as tables of latencies have them; `values` must not be empty."""
    ordered = sorted(values)
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
    last = len(ordered) - 1
    return {name: ordered[min(last, int(share * len(ordered)))] for name, share in shares.items()}


def paired_ratio(over: Sequence[float], under: Sequence[float]) -> float | None:
    """The median of `over[i] / under[i]`, turn by turn: drift of the machine hits both sides of
    each ratio alike, so this is steadier than a ratio of medians. None without common turns."""
    ratios = [a / b for a, b in zip(over, under, strict=False) if b > 0]
    return median(ratios) if ratios else None
