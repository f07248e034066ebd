"""ARCHITECTURE.md and CONTRIBUTING.md name files and things that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
FOLDERS = ("native/", "fabric_ray/", "tests/", "scripts/", "docs/", "kernels/")
# A word of someone else: Ray's, torch's, pytest's.
FOREIGN = {"CHANGELOG", "Unreleased", "NAME", "RequestRouter", "RequestRouterConfig", "make"}


def spans(page: Path) -> set[str]:
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return set(re.findall(r"`([^`\n]+)`", text))


@pytest.fixture(scope="module")
def words() -> set[str]:
    files = [
        path
        for folder in ("native", "fabric_ray", "tests")
        for kind in ("*.rs", "*.py", "*.pyi", "*.cuh", "*.cu")
        for path in (ROOT / folder).rglob(kind)
        if "target" not in path.parts and path != Path(__file__)
    ]
    return {word for path in files for word in re.findall(r"\w+", path.read_text())}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_paths_exist(page: Path) -> None:
    paths = {span for span in spans(page) if span.startswith(FOLDERS) and " " not in span}
    paths |= set(re.findall(r"\]\(([^)#:]+)[)#]", page.read_text()))
    assert len(paths) > 10
    missing = {path for path in paths if "NAME" not in path and not (ROOT / path).exists()}
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_types_and_functions_exist(page: Path, words: set[str]) -> None:
    names = {
        part
        for span in spans(page)
        if re.fullmatch(r"[A-Za-z_]\w*(?:(?:::|\.)\w+)*", span)
        for part in re.split(r"::|\.", span)
    }
    assert len(names) > 20
    assert not {n for n in names - FOREIGN if n not in words and not (ROOT / n).exists()}


def test_commands_are_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in [*PAGES, ROOT / "README.md"]:
        # In a span or a block, not in prose.
        named = set(re.findall(r"(?:`|^)make ([a-z][\w-]*)", page.read_text(), re.MULTILINE))
        assert named <= targets, page.name


# NIXL's own.
NIXL = {
    "basic_two_peers.py",
    "expanded_two_peers.py",
    "partial_md_example.py",
    "test_nixl_api.py",
}


def test_sources_that_pages_name_exist() -> None:
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()
    endings = {
        "/".join(path.split("/")[i:]) for path in tracked for i in range(path.count("/") + 1)
    }
    wrong = {
        f"{page.relative_to(ROOT)}: {name}"
        for page in [*ROOT.glob("docs/**/*.md"), ROOT / "README.md", *PAGES]
        for span in spans(page)
        for name in re.findall(r"[\w./-]+\.(?:rs|py|cuh?|toml)\b", span)
        if name not in endings | NIXL and "*" not in span and "NAME" not in name
        if not name.startswith(("my_", "/"))
    }
    assert not wrong
