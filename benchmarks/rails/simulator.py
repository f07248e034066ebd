"""What `fabric-perf rails` prints, and how to have it print."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Literal

from benchmarks.contenders import perf

Policy = Literal["adaptive", "round-robin", "random"]
POLICIES: tuple[Policy, ...] = ("adaptive", "round-robin", "random")


def _read(text: str) -> SimpleNamespace:
    """Objects as `native/perf/src/rails` names their fields; numbers that are none are None."""
    found: SimpleNamespace = json.loads(text, object_hook=lambda found: SimpleNamespace(**found))
    return found


def scenarios() -> list[SimpleNamespace]:
    """Those that have a name."""
    return [_read(line) for line in perf.printed("rails", "list").splitlines()]


def simulate(
    scenario: str, policy: Policy = "adaptive", *, slices: tuple[float, float] | None = None
) -> SimpleNamespace:
    """The report of a scenario.

    Args:
        scenario: its name, or a file with one in JSON.
        slices: the ms of which every slice is wanted.

    Raises:
        ContenderError: with the program's own words.
    """
    span = [] if slices is None else ["--slices", f"{slices[0]}:{slices[1]}"]
    return _read(perf.printed("rails", "run", scenario, "--policy", policy, *span))


def simulate_all(names: list[str], *, jobs: int = 2) -> list[SimpleNamespace]:
    """Each scenario by each policy, several at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        pairs = [(name, policy) for name in names for policy in POLICIES]
        return list(pool.map(lambda pair: simulate(*pair), pairs))
