"""Engines of a cluster share a secret: Ray's token makes it where Ray has one."""

from __future__ import annotations

import pytest
import ray

from fabric_ray.runtime import cluster_token, ray_token


@ray.remote(num_cpus=0)
def theirs() -> bytes:
    return cluster_token()


def test_a_cluster_has_one_secret_and_rays_token_goes_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = cluster_token()
    assert ray.get(theirs.remote()) == drawn == cluster_token()
    assert len(drawn) == 32
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    assert cluster_token() == ray_token() != drawn
