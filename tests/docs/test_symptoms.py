"""docs/troubleshooting.md quotes what errors and logs say, so that it is found by their words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"

# Said by others than us: by torch, whose words are compiled, and by Ray.
TORCH = {"Trying to resize storage that is not resizable"}
RAY = {
    "Unsupported tensor transport protocol",
    "Invalid tensor transport",
    "not found in RDT object store",
    "has no attribute 'rdt_tensors'",
    "Tensor transport metadata is not available",
}
_PYTHONS = {"has no attribute 'rdt_tensors'"}


def quotes() -> Iterator[str]:
    text = re.sub(r"^```.*?^```$", "", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    # What is between backticks may have quotes of its own, as in `--id "push 7"`.
    pieces = text.split("`")
    pieces[1::2] = [piece.replace('"', "'") for piece in pieces[1::2]]
    for quoted in re.findall(r'"([^"]+)"', "`".join(pieces)):
        yield " ".join(quoted.split())


def words_of(*folders: Path) -> str:
    """Sources with their strings in one piece each."""
    files = [p for f in folders for kind in ("*.rs", "*.py") for p in f.rglob(kind)]
    text = "\n".join(path.read_text() for path in files)
    text = re.sub(r"\\\n\s*", "", text)  # Rust's strings go on that way,
    return re.sub(r'"\s*\n\s*f?"', "", text)  # and Python's this


def test_what_the_page_quotes_is_what_the_code_says() -> None:
    said = words_of(ROOT / "fabric_ray", *(ROOT / "native").glob("*/src"))
    found = set(quotes()) - TORCH - RAY
    assert len(found) > 40
    wrong = {quoted for quoted in found if quoted.rstrip(":;") not in said}
    assert not wrong


def test_what_the_page_quotes_of_ray_is_what_ray_says() -> None:
    ray = pytest.importorskip("ray", minversion="2.60", reason="pip install -e '.[ray]'")
    home = Path(ray.__file__).parent
    said = words_of(home / "experimental" / "rdt", home / "_private")
    assert set(quotes()) >= RAY
    assert not {quoted for quoted in RAY - _PYTHONS if quoted not in said}
