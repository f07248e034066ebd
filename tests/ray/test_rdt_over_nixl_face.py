"""The tensor transport that Ray brings for NIXL, over our face of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_rays_own_nixl_transport_moves_tensors_over_our_face() -> None:
    """A cluster of its own: its workers must find the face."""
    face = [sys.executable, "-m", "fabric_ray.compat", "nixl"]
    shims = subprocess.run(face, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    others = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_AUTH_", "RAY_ADDRESS"))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.ray.nixl_world"],
        env=others | {"PYTHONPATH": f"{shims.strip()}:{ROOT}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("arrived\n")
