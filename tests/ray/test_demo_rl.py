"""The RL demo: it learns, and every version, log-probability and staleness is as promised."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from fabric_ray.demo.options import Rl as Options
from fabric_ray.demo.rl.loop import run
from tests.ray.demo_command import run_demo


@pytest.mark.long
def test_the_command_learns_and_prints_one_json_object(cluster: list[str], tmp_path: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    result = run_demo("rl", "--steps", "24", "--output", str(tmp_path), address=address)
    assert result["versions"] == 25
    assert [u["version"] for u in result["updates"]] == list(range(2, 26))
    assert result["reward"]["last_quarter"] > result["reward"]["first_quarter"] + 0.1
    assert set(result["staleness"]) <= {"0", "1"}
    # Rollouts go on while trainers learn and push.
    assert result["generating_in_training"] > 0.5
    assert result["generating_in_push"] > 0.5


@pytest.mark.long
def test_without_staleness_every_sample_is_on_policy(cluster: list[str], tmp_path: Path) -> None:
    outcome = run(
        Options(
            steps=4, staleness=0, trainers=1, rollouts=3, transport="tcp", output=tmp_path / "out"
        )
    )
    checks = dict(outcome.checks)
    checks.pop("reward_rose")
    assert all(checks.values())
    assert [set(u.staleness) for u in outcome.updates] == [{0}] * 4
    assert outcome.transport == "tcp"
    assert Path(outcome.timeline).read_bytes().startswith(b"\x89PNG")
    # The first update of an on-policy sample has a ratio of 1.
    assert all(u.clipped == 0 for u in outcome.updates)
