"""The Python that the documentation shows runs, page by page, and so do the examples."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.run_page import blocks

ROOT = Path(__file__).parents[2]
PAGES = [p for p in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")] if any(blocks(p))]
EXAMPLES = sorted(ROOT.glob("examples/*.py"))


def run(*command: str) -> str:
    # A cluster of its own, whatever else runs on this machine.
    ray = {"RAY_ADDRESS": "local", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | ray,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_a_page_shows_runs(page: Path) -> None:
    run("tests/docs/run_page.py", str(page))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.name)
def test_an_example_runs_and_says_that_the_bytes_arrived(example: Path) -> None:
    assert "arrived" in run("tests/docs/run_page.py", str(example))
