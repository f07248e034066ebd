"""``examples/rl``: a loop of Ray actors that learns with real vLLM engines."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from tests.adapters.vllm import servers
from tests.adapters.vllm.test_weights import plugin_path

pytestmark = servers.needed


def run(*arguments: str) -> dict[str, Any]:
    with plugin_path() as path:
        done = subprocess.run(
            [servers.PYTHON, servers.ROOT / "examples/rl/grpo.py", "--json", *arguments],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=840,
        )
    assert done.stdout, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if found["verified"] else 1)
    return found


@pytest.mark.timeout(900)
def test_rs_3_vllm_draws_each_token_by_the_version_that_it_names_while_trainers_learn() -> None:
    found = run("--steps", "40")
    assert found["checks"] == {
        "versions_arrived": True,
        "logprobs_agree": True,
        "staleness_bounded": True,
        "reward_rose": True,
    }
    assert found["verified"] is True
    assert [update["version"] for update in found["updates"]] == list(range(2, 42))
    assert found["bytes_of_a_push"] > 0
    assert found["samples_of_two_versions"] > 0


@pytest.mark.timeout(600)
def test_without_staleness_no_token_is_of_an_older_version() -> None:
    found = run("--steps", "4", "--staleness", "0", "--trainers", "1", "--rollouts", "1")
    checks = dict(found["checks"])
    checks.pop("reward_rose")
    assert all(checks.values())
    assert list(found["tokens_by_versions_behind"]) == ["0"]
