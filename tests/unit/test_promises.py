"""Each promise is cited where it is kept, borne by a test and broken by a mutation, and
``docs/design/promises.md`` names nothing that isn't there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, get_args

import pytest

from fabric_ray.engine.config import TransportName

ROOT = Path(__file__).parents[2]
PAGE = "docs/design/promises.md"
CRATES = ("native/engine", "native/kvcache", "native/moe")
BASES = ("", *(f"{crate}/{part}" for crate in CRATES for part in ("src", "tests")))
TRANSPORTS = {*get_args(TransportName), "sim"}
IN_TESTS = re.compile(r"\n#\[cfg\(.*test.*\)\]\nmod \w+ \{")


class Tree(NamedTuple):
    """A checkout, read."""

    kept: dict[str, str]
    """Code, without its tests."""
    tests: dict[str, str]

    @classmethod
    def read(cls, root: Path) -> Tree:
        sources = [p for crate in CRATES for p in (root / crate / "src").rglob("*.rs")]
        rust = {p: p.read_text() for p in sources}
        package = {p: p.read_text() for p in (root / "fabric_ray").rglob("*.py")}
        shown = [p for crate in CRATES for p in (root / crate / "tests").rglob("*.rs")]
        shown += (root / "tests").rglob("*.py")
        tests = rust | {p: p.read_text() for p in shown}
        code = {p: IN_TESTS.split(text)[0] for p, text in rust.items()} | package
        name = {p: p.relative_to(root).as_posix() for p in (*code, *tests)}
        return cls(
            {name[p]: text for p, text in code.items() if not p.stem.endswith("tests")},
            {name[p]: text for p, text in tests.items()},
        )


def cites(text: str, promise: str) -> bool:
    return re.search(rf"\b{promise}\b", text) is not None


def bears(test: str, promise: str) -> bool:
    """Whether a test's name has the promise's in it: ``ic_1_...``."""
    return f"_{promise.lower().replace('-', '_')}_" in f"_{test}"


def lacks(tree: Tree, table: Any, promises: list[str]) -> Iterator[str]:
    """What a promise lacks; and the files in which a mutation breaks one that they don't cite."""
    named = re.findall(r"\b(?:fn|def) (\w+)\(", "\n".join(tree.tests.values()))
    for promise in promises:
        if not any(cites(text, promise) for text in tree.kept.values()):
            yield f"no code cites {promise}"
        if not any(bears(name, promise) for name in named):
            yield f"no test bears the name of {promise}"
        if not any(m.promise == promise for m in table.mutations):
            yield f"no mutation breaks {promise}"
    for m in table.mutations:
        for edit in m.edits:
            if not cites(tree.kept.get(edit.path, ""), m.promise):
                yield f"{edit.path} doesn't cite {m.promise}, which it breaks when {m.name}"


class Row(NamedTuple):
    promise: str
    kept: list[str]
    shown: list[str]
    broken: list[str]
    partly: set[str]


def rows(page: str) -> list[Row]:
    out = []
    for line in page.split("## Where")[1].splitlines():
        if re.match(r"\| (IC|MR|RS)-\d \|", line):
            promise, kept, shown, broken, partly = (c.strip() for c in line[1:-1].split("|"))
            code = [re.findall(r"`([^`]+)`", cell) for cell in (kept, shown)]
            places = {p.strip() for p in partly.split(",")} - {""}
            out.append(Row(promise, *code, broken.split("; "), places))
    return out


def gaps(page: str) -> dict[str, set[str]]:
    """Over which transports each promise has known gaps."""
    out: dict[str, set[str]] = {}
    known = page.split("## Known gaps")[1]
    for promise, transports in re.findall(r"^- \*\*(\S+)\*\* \(([^)]*)\)", known, re.MULTILINE):
        places = {t.strip() for t in transports.split(",")} & {"all", *TRANSPORTS}
        out[promise] = out.get(promise, set()) | places
    return {promise: {"all"} if "all" in places else places for promise, places in out.items()}


def find(tree: dict[str, str], place: str) -> str | None:
    """The text of the file that is meant by ``file::item``, if it has the item."""
    file, _, item = place.partition("::")
    words = r"fn|struct|enum|trait|type|const|static|def|class"
    for base in BASES:
        text = tree.get(f"{base}/{file}".strip("/"))
        if text is not None and re.search(rf"\b(?:{words}) {item}\b", text):
            return text
    return None


def untrue(page: str, tree: Tree, table: Any, promises: list[str]) -> Iterator[str]:
    """What the page says that isn't so."""
    table_rows = rows(page)
    if [row.promise for row in table_rows] != promises:
        yield f"the rows are {[row.promise for row in table_rows]}"
    known = gaps(page)
    for row in table_rows:
        for place in row.kept:
            text = find(tree.kept, place)
            if text is None or not cites(text, row.promise):
                yield f"{row.promise}: `{place}` is not there, or its file doesn't cite it"
        for place in row.shown:
            text = find(tree.tests, place)
            if text is None or not bears(place.partition("::")[2], row.promise):
                yield f"{row.promise}: test `{place}` is not there, or has another name"
        if not (row.kept and row.shown):
            yield f"{row.promise}: the page names no place, or no test"
        mine = {m.name for m in table.mutations if m.promise == row.promise}
        yield from (f"{row.promise}: no mutation {name!r}" for name in set(row.broken) - mine)
        if row.partly != known.get(row.promise, set()):
            elsewhere = known.get(row.promise)
            yield f"{row.promise}: over {row.partly}, but the known gaps are {elsewhere}"


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree.read(ROOT)


def test_every_promise_is_cited_shown_and_broken(tree: Tree, mutations: ModuleType) -> None:
    assert list(lacks(tree, mutations.read(), mutations.PROMISES)) == []


def test_the_page_names_only_what_is_there(tree: Tree, mutations: ModuleType) -> None:
    page = (ROOT / PAGE).read_text()
    assert list(untrue(page, tree, mutations.read(), mutations.PROMISES)) == []
