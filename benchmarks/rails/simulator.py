"""What `fabric-perf rails` prints, and how to have it print."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import msgspec

from benchmarks.contenders import perf

Policy = Literal["adaptive", "round-robin", "random"]
POLICIES: tuple[Policy, ...] = ("adaptive", "round-robin", "random")


class Change(msgspec.Struct, frozen=True):
    """What happens to a rail: `{"rate": Gb/s}`, `{"lost": ms until told}`, `silent` or `back`."""

    at_ms: float
    rail: int
    what: str | dict[str, float]

    @property
    def said(self) -> str:
        if isinstance(self.what, str):
            return "out, no notice" if self.what == "silent" else "back"
        [(kind, value)] = self.what.items()
        return f"{value:g} Gb/s" if kind == "rate" else "out"


class Scenario(msgspec.Struct, frozen=True):
    name: str
    shows: str
    rails: list[float]
    run_ms: float
    changes: list[Change]

    def capacity(self) -> list[tuple[float, float]]:
        """What the rails that are up can carry from some time on: ms, GB/s."""
        rates, up = list(self.rails), [True] * len(self.rails)
        found = [(0.0, sum(rates) / 8)]
        for change in self.changes:
            if isinstance(change.what, dict) and "rate" in change.what:
                rates[change.rail] = change.what["rate"]
            else:
                up[change.rail] = change.what == "back"
            now = sum(rate for rate, is_up in zip(rates, up, strict=True) if is_up)
            found.append((change.at_ms, now / 8))
        return found


class Times(msgspec.Struct, frozen=True):
    transfers: int
    median_us: float | None
    p99_us: float | None


class Phase(msgspec.Struct, frozen=True):
    from_ms: float
    to_ms: float
    capacity: float
    share: float
    settled: float
    times: Times


class Loss(msgspec.Struct, frozen=True):
    at_ms: float
    rail: int
    in_flight: int
    over_ms: float
    added_ms: float


class Return(msgspec.Struct, frozen=True):
    at_ms: float
    rail: int
    used_ms: float | None
    recovered_ms: float | None


class Summary(msgspec.Struct, frozen=True):
    phases: list[Phase]
    losses: list[Loss]
    returns: list[Return]
    times: Times
    rate: float
    again: int
    bytes: int


class Slice(msgspec.Struct, frozen=True):
    """Times in ns."""

    rail: int
    posted: int
    ended: int
    bytes: int
    fate: Literal["done", "lost", "under-way"]
    again: bool


class Report(msgspec.Struct, frozen=True):
    scenario: Scenario
    policy: Policy
    summary: Summary
    arrived: list[list[int]]
    """Bytes that arrived in each millisecond, by rail."""
    slices: list[Slice]


class SimulatorError(Exception):
    """The program is missing, or says why not."""


def _program() -> str:
    program = perf.find_program()
    if program is None:
        raise SimulatorError(f"fabric-perf is not built; run `{perf.OBTAIN}`")
    return program


def scenarios() -> list[Scenario]:
    """Those that have a name."""
    done = subprocess.run([_program(), "rails", "list"], capture_output=True, check=False)
    if done.returncode:
        raise SimulatorError(done.stderr.decode(errors="replace").strip())
    return [msgspec.json.decode(line, type=Scenario) for line in done.stdout.splitlines()]


def simulate(
    scenario: str, policy: Policy = "adaptive", *, slices: tuple[float, float] | None = None
) -> Report:
    """Carry a scenario out.

    Args:
        scenario: its name, or a file with one in JSON.
        slices: the ms of which every slice is wanted.

    Raises:
        SimulatorError: with the program's own words.
    """
    command = [_program(), "rails", "run", scenario, "--policy", policy]
    if slices is not None:
        command += ["--slices", f"{slices[0]}:{slices[1]}"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise SimulatorError(done.stderr.decode(errors="replace").strip())
    return msgspec.json.decode(done.stdout, type=Report)


def simulate_all(names: list[str], *, jobs: int = 2) -> list[Report]:
    """Each scenario by each policy, several at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        pairs = [(name, policy) for name in names for policy in POLICIES]
        return list(pool.map(lambda pair: simulate(*pair), pairs))
