"""A clone that nothing was compiled into says so, and what to do."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "fabric_ray"


def test_importing_a_clone_without_its_core_says_what_to_run(tmp_path: Path) -> None:
    (tmp_path / "fabric_ray").mkdir()
    shutil.copy(PACKAGE / "__init__.py", tmp_path / "fabric_ray")
    command = [sys.executable, "-c", "import fabric_ray"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert said.startswith(f"ModuleNotFoundError: {tmp_path}/fabric_ray has no compiled core")
    assert "run pip install -e '.[ray]'" in said
    assert "another exception" not in done.stderr
    assert "direct cause" not in done.stderr
