"""The secret that engines share is made of Ray's own, where Ray has one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fabric_ray.errors import InvalidArgument
from fabric_ray.runtime import ray_token

Set = Callable[..., None]


@pytest.fixture
def ray_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Set:
    """Sets Ray's variables, and no others; the home is an empty folder."""
    monkeypatch.setenv("HOME", str(tmp_path))

    def set_(**values: str) -> None:
        for name in ("AUTH_MODE", "AUTH_TOKEN", "AUTH_TOKEN_PATH", "ENABLE_K8S_TOKEN_AUTH"):
            monkeypatch.delenv(f"RAY_{name}", raising=False)
        for name, value in values.items():
            monkeypatch.setenv(f"RAY_{name}", value)

    return set_


def test_the_same_ray_token_makes_the_same_secret_wherever_it_lies(
    ray_says: Set, tmp_path: Path
) -> None:
    ray_says(AUTH_MODE="token", AUTH_TOKEN="a" * 32)
    secret = ray_token()
    assert secret is not None
    assert len(secret) == 32
    assert b"aaaa" not in secret
    named = tmp_path / "named"
    named.write_text("a" * 32 + "\n")
    ray_says(AUTH_MODE="TOKEN", AUTH_TOKEN_PATH=str(named))
    assert ray_token() == secret
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("a" * 32)
    ray_says(AUTH_MODE="token")
    assert ray_token() == secret
    ray_says(AUTH_MODE="token", AUTH_TOKEN="b" * 32)
    assert ray_token() not in (None, secret)


@pytest.mark.parametrize(
    "says",
    [
        {"AUTH_TOKEN": "a" * 32},
        {"AUTH_MODE": "disabled", "AUTH_TOKEN": "a" * 32},
        # Service accounts' tokens are no shared secret.
        {"AUTH_MODE": "token", "AUTH_TOKEN": "a" * 32, "ENABLE_K8S_TOKEN_AUTH": "true"},
    ],
)
def test_where_ray_uses_no_shared_token_none_is_taken(ray_says: Set, says: dict[str, str]) -> None:
    ray_says(**says)
    assert ray_token() is None


def test_a_token_that_can_not_be_read_is_said(ray_says: Set, tmp_path: Path) -> None:
    ray_says(AUTH_MODE="token")
    with pytest.raises(InvalidArgument, match=r"\.ray/auth_token can't be read"):
        ray_token()
    empty = tmp_path / "empty"
    empty.touch()
    ray_says(AUTH_MODE="token", AUTH_TOKEN_PATH=str(empty))
    with pytest.raises(InvalidArgument, match="is empty"):
        ray_token()


def test_outside_a_cluster_there_is_no_token_of_it() -> None:
    ask = "from fabric_ray.runtime import cluster_token; cluster_token()"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    assert "call ray.init() first" in done.stderr


HOMELESS = """
from fabric_ray.errors import InvalidArgument
from fabric_ray.runtime import ray_token
try:
    ray_token()
except InvalidArgument as error:
    print(error)
"""


def test_a_user_without_a_home_is_told_what_to_set(ray_says: Set) -> None:
    stranger = ["unshare", "--user", "--map-user=12345"]
    if subprocess.run([*stranger, "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may not make user namespaces")
    ray_says(AUTH_MODE="token")
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    command = [*stranger, sys.executable, "-c", HOMELESS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "set RAY_AUTH_TOKEN" in done.stdout
