"""Simulated rails from the command line: a scenario of the user, its figures and its picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.rails.__main__ import rows
from benchmarks.rails.simulator import POLICIES, scenarios, simulate, simulate_all
from fabric_ray.bench.results import ContenderError
from tests.integration.bench_plain import built

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def program() -> None:
    built()


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


@pytest.mark.long
def test_the_same_scenario_has_the_same_figures(short: str) -> None:
    assert simulate(short) == simulate(short)


def test_a_scenario_is_rows_by_policy(short: str) -> None:
    reports = simulate_all([short])
    assert [report.policy for report in reports] == list(POLICIES)
    found = {row.key: row for row in rows(reports)}
    last = found["rails/short/100-250 ms"]
    assert last.figures[-1].median == pytest.approx(90 / 8), "the floor: all three rails"
    adaptive, blind = last.figures[0], last.figures[1]
    assert adaptive.contender == "adaptive"
    assert adaptive.of_floor is not None
    assert adaptive.of_floor > 0.95
    assert blind.of_floor is not None
    assert blind.of_floor < 0.95, "in turns, the slowest rail holds the others up"
    assert found["rails/short/100-250 ms, P99"].unit == "us"
    assert found["rails/short/lost at 60 ms"].figures[0].details["in flight"] == 8
    assert found["rails/short/back at 100 ms"].figures[0].median > 0


def test_a_failover_can_be_watched(short: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "picture.png"
    command = [sys.executable, "-m", "benchmarks.rails", "failover", short]
    command += ["--around", "59", "63", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "60 ms: rail 0 lost, 8 in flight" in done.stdout
    assert "bytes were sent again" in done.stdout


def test_a_scenario_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ContenderError, match="story") as refused:
        simulate("nowhere")
    assert all(known.name in str(refused.value) for known in scenarios())
