"""All suites by name, in the order in which a run takes them."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.harness.cases import Case
from benchmarks.suites import healing, latency, nics, pages, rate, tent, weights, write

Suite = Callable[[bool], list[Case]]
"""Cases of a suite; True asks for the few that `--quick` runs."""

SUITES: dict[str, Suite] = {
    "write": write.cases,
    "pages": pages.cases,
    "latency": latency.cases,
    "rate": rate.cases,
    "nics": nics.cases,
    "tent": tent.cases,
    "healing": healing.cases,
    "weights": weights.cases,
}
