"""What ``tests/gpu`` asks of a GPU, asked of one that isn't there (``tests/fake_gpu``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PUSHES = ("tests/gpu/test_weight_pushes.py", "tests/gpu/test_kv_stream.py")
ENGINE = "tests/gpu/test_gpu.py"


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(PUSHES, id="pushes"),
        pytest.param((ENGINE,), id="the engine", marks=pytest.mark.long),
    ],
)
def test_what_a_gpu_is_asked_holds_on_one_that_is_as_late_as_it_may(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--basetemp", str(tmp_path / "inner"), *arguments],
        cwd=ROOT,
        env={**os.environ, "FABRIC_RAY_FAKE_GPU": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-9000:] + done.stderr[-2000:]
