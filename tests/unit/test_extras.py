"""What errors tell users to install is what the package declares."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from fabric_ray.extras import EXTRAS, how_to_install

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")

ROOT = Path(__file__).parents[2]
DECLARED: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]


def whole(extra: str) -> Iterator[str]:
    """An extra's requirements, with those of the extras that it names, without markers."""
    for requirement in DECLARED[extra]:
        if named := re.fullmatch(r"fabric-ray\[(.+)\]", requirement):
            for other in named[1].split(","):
                yield from whole(other)
        else:
            yield requirement.split(";")[0].strip()


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_an_error_says_installs_what_the_extra_declares(extra: str) -> None:
    assert sorted(EXTRAS[extra]) == sorted(whole(extra))
    command = how_to_install(extra).removeprefix("run: ").split(" (")[0]
    assert shlex.split(command) == ["pip", "install", *EXTRAS[extra]]
    assert f"[{extra}]" in how_to_install(extra)


def test_only_what_is_missing_is_asked_for() -> None:
    said = how_to_install("ray", "matplotlib")
    assert said == "run: pip install 'matplotlib>=3.8,<4' (fabric-ray's extra [ray])"


def test_no_page_and_no_message_takes_it_from_an_index() -> None:
    """There is none that has it."""
    places = ["README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("fabric_ray/**/*.py")]
    places += [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("tests/**/*.py")]
    places += ROOT.glob("examples/**/*")
    from_index = re.compile(r"pip install [^\n(#]*fabric-" + r"ray\b")
    for path in map(Path, places):
        path = ROOT / path
        if path.is_file() and path != Path(__file__):
            found = from_index.search(path.read_text(errors="replace"))
            assert not found, f"{path.relative_to(ROOT)}: {found and found[0]}"
