"""Engines of a cluster share a secret: Ray's token makes it where Ray has one."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from fabric_ray.runtime import cluster_token, ray_token

ROOT = Path(__file__).parents[2]


@ray.remote(num_cpus=0)
def theirs() -> bytes:
    return cluster_token()


@pytest.mark.long
def test_a_cluster_has_one_secret_and_rays_token_goes_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = cluster_token()
    assert ray.get(theirs.remote()) == drawn == cluster_token()
    assert len(drawn) == 32
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    assert cluster_token() == ray_token() != drawn


@pytest.mark.long
def test_engines_of_a_cluster_that_ray_guards_by_a_token_share_it() -> None:
    """A cluster of its own: whether Ray asks for tokens is settled when it starts."""
    program = [sys.executable, "-m", "tests.ray.token_world"]
    guarded = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    others = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_AUTH_", "RAY_ADDRESS"))}
    done = subprocess.run(
        program, env=others | guarded, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("arrived\n")
