"""A job whose Ray hook adds the weight sync backend to SkyRL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fabric_ray.errors import Unsupported
from fabric_ray.integrations.skyrl import runtime_env

ROOT = Path(__file__).resolve().parents[2]

# As SkyRL starts Ray: with variables, and nothing else.
JOB = """
import ray

@ray.remote
def changed():
    import sys
    from fabric_ray.integrations import skyrl
    return own(), [type(f).__module__ for f in sys.meta_path].count(skyrl.__name__)

def own():
    import os
    return os.environ.get("OF_THE_JOB")

ray.init(runtime_env={"env_vars": {"OF_THE_JOB": "kept"}}, log_to_driver=False)
print(ray.get(changed.remote()))
"""


@pytest.mark.long
def test_workers_of_a_job_have_the_backend_and_its_own_variables(cluster: list[str]) -> None:
    import ray

    done = subprocess.run(
        [sys.executable, "-c", JOB],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
            "RAY_RUNTIME_ENV_HOOK": "fabric_ray.integrations.skyrl.runtime_env",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "('kept', 1)"


def test_a_setup_hook_of_the_job_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    assert runtime_env(None) == {
        "worker_process_setup_hook": "fabric_ray.integrations.skyrl.install"
    }
    with pytest.raises(Unsupported, match=r"got 'mine\.hook'"):
        runtime_env({"worker_process_setup_hook": "mine.hook"})
