"""The documentation is built, and no link or anchor in it leads nowhere."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.lacks import lacks

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_documentation_is_built_without_a_complaint(tmp_path: Path) -> None:
    if find_spec("mkdocs") is None:
        lacks("FABRIC_RAY_DOCS", "mkdocs isn't installed: pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sources = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    folders = [s.parent if s.stem == "index" else s.with_suffix("") for s in sources]
    assert sources
    assert [f for f in folders if not (tmp_path / f / "index.html").exists()] == []
