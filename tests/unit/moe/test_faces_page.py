"""The page of faces lists the foreign code that is run, with the releases that are fetched."""

from __future__ import annotations

import re
from pathlib import Path

from tests.adapters.moe_callers import CALLERS

ROOT = Path(__file__).parents[3]


def rows() -> dict[str, str]:
    page = (ROOT / "docs/moe-faces.md").read_text().partition("## What was run")[2]
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \| passed \|$", page, re.MULTILINE))


def test_every_caller_is_listed_once_with_its_result() -> None:
    assert {*rows()} == {*CALLERS}


def test_the_releases_are_those_that_are_fetched() -> None:
    fetched = (ROOT / "tests/adapters/packages.txt").read_text() + (ROOT / "Makefile").read_text()
    named = {found for text in rows().values() for found in re.findall(r"(\S+) (\d[\d.]+\d)", text)}
    assert len(named) == 4
    for package, version in named:
        assert f"{package.lower()}=={version}" in fetched
