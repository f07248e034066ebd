"""docs/dependencies.md says of every dependency why it is here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")

ROOT = Path(__file__).parents[2]
NAMES = set(re.findall(r"[\w-]+", (ROOT / "docs" / "dependencies.md").read_text()))


def python_packages() -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    for requirement in sum(extras, project["dependencies"]):
        name = re.split(r"[^\w-]", requirement)[0]
        if name != project["name"]:
            yield name


def rust_crates() -> Iterator[str]:
    for manifest in ROOT.glob("native/*/Cargo.toml"):
        crate = tomllib.loads(manifest.read_text())
        for table in (crate, *crate.get("target", {}).values()):
            for kind in ("dependencies", "dev-dependencies", "build-dependencies"):
                yield from (n for n in table.get(kind, {}) if not n.startswith("fabric-"))


@pytest.mark.parametrize("name", sorted({*python_packages(), *rust_crates()}))
def test_a_dependency_has_a_reason(name: str) -> None:
    assert name in NAMES, f"docs/dependencies.md doesn't say what {name} is for"
