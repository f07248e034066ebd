"""Every HTML report that the project writes, as a browser shows it.

Pictures go to ``FABRIC_RAY_SCREENS``, if that is set.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from benchmarks.contenders.perf import find_program
from tests.docs.browser import Browser, Shown, browser
from tests.lacks import lacks

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-c", "from fabric_ray.cli.main import app; app()")
PUSH = ("llama-3.1-8b", "--trainer", "fsdp=8", "--rollout", "tp=2,engines=2")

pytest.importorskip("matplotlib", reason="reports have plots: pip install '.[ray]'")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def window(pages: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    kept = os.environ.get("FABRIC_RAY_SCREENS")
    shots = Path(kept).resolve() if kept else tmp_path_factory.mktemp("shots")
    shots.mkdir(exist_ok=True)
    with browser(pages, shots) as found:
        yield found


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def ink(shown: Shown) -> float:
    """The share of pixels that aren't the background, which is what most of them are."""
    pixels = (shown.pixels() * 255).astype(np.uint32)
    packed = pixels[:, :, 0] << 16 | pixels[:, :, 1] << 8 | pixels[:, :, 2]
    _, counts = np.unique(packed, return_counts=True)
    return 1 - float(counts.max() / counts.sum())


def colours(shown: Shown) -> int:
    """Distinct colours, in steps that the eye sees."""
    steps = (shown.pixels() * 15).astype(np.uint32)
    return len(np.unique(steps.reshape(-1, 3), axis=0))


def check(shown: Shown) -> None:
    """What holds for any page: drawn, legible in the window, and without complaints."""
    assert shown.complaints == []
    assert not shown.overflows
    assert ink(shown) > 0.01
    assert all(loaded and min(size) > 100 for *size, loaded in shown.pictures)


def test_a_plan_is_drawn_as_one_map(window: Browser, pages: Path) -> None:
    page = pages / "plan.html"
    run(*COMMAND, "plan", *PUSH, "--picture", str(page))
    shown = window.show(page)
    check(shown)
    assert shown.title == "llama-3.1-8b as bfloat16 fsdp=8 to tp=2,engines=2"
    assert len(shown.pictures) == 1
    assert colours(shown) > 10, "a map has a scale of colours"


def test_a_simulation_is_drawn_as_curves(window: Browser, pages: Path) -> None:
    page = pages / "simulate.html"
    run(*COMMAND, "simulate", *PUSH, "--sensitivity", str(page))
    shown = window.show(page)
    check(shown)
    assert len(shown.pictures) == 1
    assert colours(shown) > 5


@pytest.mark.long
def test_a_measurement_is_drawn_as_curves(window: Browser, pages: Path) -> None:
    page = pages / "bench.html"
    run(*COMMAND, "bench", "--sizes", "16KiB,256KiB,4MiB", "--turns", "3", "--picture", str(page))
    shown = window.show(page)
    check(shown)
    assert "cores" in shown.title
    assert len(shown.pictures) == 1
    assert colours(shown) > 5


@pytest.mark.long
def test_a_benchmarks_report_has_its_plots_and_its_tables(
    window: Browser, pages: Path, tmp_path: Path
) -> None:
    if find_program() is None:
        pytest.skip("the floor is measured by fabric-perf: make test builds it")
    cases = ("write/shm/cold/1MiB", "write/tcp/cold/1MiB", "latency/shm/parked")
    names = ("floor", "fabric-python")
    words = [word for case in cases for word in ("--only", case)]
    words += [word for name in names for word in ("--contender", name)]
    options = ["--quick", "--repeat", "2", "--no-peers", "--out", str(tmp_path)]
    run(sys.executable, "-m", "benchmarks", "run", *options, *words)
    page = pages / "benchmarks.html"
    shutil.copy(next(tmp_path.glob("*.html")), page)
    shown = window.show(page)
    check(shown)
    assert shown.title == "fabric-ray benchmarks"
    for word in (*cases, *names, "processor", "of floor"):
        assert word in shown.text
    assert len(shown.pictures) == 3


def test_what_is_broken_is_noticed(window: Browser, pages: Path) -> None:
    broken = pages / "broken.html"
    broken.write_text(
        "<!doctype html><title>broken</title><body><p style='display:none'>hidden</p>"
        "<div style='width:3000px'>wide</div><img src=none.png>"
        "<script>nothing.to.see()</script>"
    )
    shown = window.show(broken)
    assert any("nothing is not defined" in said for said in shown.complaints)
    assert shown.overflows
    assert "hidden" not in shown.text
    assert [loaded for *_, loaded in shown.pictures] == [False]
    assert ink(shown) < 0.01


@pytest.fixture(scope="module")
def site(pages: Path) -> Path:
    """The documentation, built so that any link that leads nowhere is an error."""
    if find_spec("mkdocs") is None:
        lacks("FABRIC_RAY_DOCS", "mkdocs isn't installed: pip install '.[docs]'")
    built = pages / "site"
    run(sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(built))
    return built


def test_the_documentation_is_built_without_a_complaint(site: Path) -> None:
    sources = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    folders = [s.parent if s.stem == "index" else s.with_suffix("") for s in sources]
    assert sources
    assert [f for f in folders if not (site / f / "index.html").exists()] == []


@pytest.mark.long
def test_the_documentation_is_drawn_page_by_page(window: Browser, site: Path) -> None:
    wanted = {
        "index.html": ("fabric-ray", "Start from what you do"),
        "concepts/index.html": ("Why counting, and not ordering", "Layers"),
        "quickstart/index.html": ("You serve a model with Ray Serve",),
        "failover/index.html": (),
    }
    for name, words in wanted.items():
        shown = window.show(site / name)
        assert shown.complaints == []
        assert not shown.overflows
        assert all(loaded for *_, loaded in shown.pictures)
        assert all(word in shown.text for word in words)
        assert ink(shown) > 0.03
