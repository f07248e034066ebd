"""Simulated rails from the command line: a scenario of the user, its figures and its picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.contenders.perf import find_program
from benchmarks.rails.simulator import (
    POLICIES,
    Change,
    Report,
    Scenario,
    SimulatorError,
    scenarios,
    simulate,
    simulate_all,
)
from benchmarks.rails.tables import missed

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def program() -> None:
    """The program that simulates, built if no release build is there."""
    if find_program() is None:
        manifest = str(ROOT / "native" / "Cargo.toml")
        build = ["cargo", "build", "--release", "-p", "fabric-perf", "--manifest-path", manifest]
        subprocess.run(build, check=True)


@pytest.fixture
def short(tmp_path: Path) -> str:
    """Three rails, one of which is lost for 40 ms."""
    scenario = {
        "name": "short",
        "shows": "a loss",
        "rails": [40, 40, 10],
        "latency_us": [1, 2],
        "run_ms": 250,
        "changes": [
            {"at_ms": 60, "rail": 0, "what": {"lost": 0.5}},
            {"at_ms": 100, "rail": 0, "what": "back"},
        ],
        "load": {"threads": 1, "in_flight": 8, "transfer": {"write": {"bytes": 1 << 20}}},
    }
    path = tmp_path / "short.json"
    path.write_text(json.dumps(scenario))
    return str(path)


def test_a_loss_is_seen_slice_by_slice(short: str) -> None:
    report = simulate(short, slices=(0, 250))
    lost = [s for s in report.slices if s.fate == "lost"]
    again = [s for s in report.slices if s.again]
    assert lost
    assert {s.rail for s in lost} == {0}
    # Lost slices are sent again over the rails that are up.
    assert {s.rail for s in again} == {1, 2}
    assert sum(s.bytes for s in again) == report.summary.again
    [loss], [back] = report.summary.losses, report.summary.returns
    assert loss.in_flight == 8
    assert back.recovered_ms is not None
    done = sum(s.bytes for s in report.slices if s.fate == "done")
    assert done == report.summary.bytes == sum(map(sum, report.arrived))


def test_the_same_scenario_has_the_same_figures(short: str) -> None:
    assert simulate(short) == simulate(short)


def test_what_misses_its_aim_is_named(short: str) -> None:
    adaptive, turns, _ = simulate_all([short])
    assert [r.policy for r in (adaptive, turns)] == list(POLICIES[:2])
    assert missed([adaptive, turns]) == []
    # Blind turns, taken for ours, miss it.
    [*_, last] = turns.summary.phases
    assert last.settled < 0.95
    named = missed([msgspec.structs.replace(turns, policy="adaptive"), turns])
    assert any(f"of the capacity from {last.from_ms}" in miss for miss in named)


def test_a_failover_can_be_watched(short: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "picture.png"
    command = [sys.executable, "-m", "benchmarks.rails", "failover", short]
    command += ["--around", "59", "63", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "bytes were sent again" in done.stdout


def test_a_scenario_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(SimulatorError, match="story") as refused:
        simulate("nowhere")
    assert all(known.name in str(refused.value) for known in scenarios())


def test_what_is_up_follows_the_changes() -> None:
    changes = [Change(10, 0, "silent"), Change(20, 1, {"rate": 8.0}), Change(30, 0, "back")]
    scenario = Scenario("s", "", [80.0, 16.0], 40, changes)
    assert scenario.capacity() == [(0.0, 12.0), (10, 2.0), (20, 1.0), (30, 11.0)]


def test_reports_say_what_they_are_of(short: str) -> None:
    report: Report = simulate(short, "random")
    assert (report.scenario.name, report.policy) == ("short", "random")
