"""The table of mutations is true: each line that it breaks is there, and every promise has one."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest


def test_every_promise_has_a_mutation_that_applies_once(mutations: ModuleType) -> None:
    assert mutations.wrong(mutations.read()) == []


def test_a_line_that_is_gone_or_not_alone_is_an_error(
    mutations: ModuleType, tmp_path: Path
) -> None:
    source = tmp_path / "native/engine/src"
    source.mkdir(parents=True)
    (source / "a.rs").write_text("one two two")
    edit = mutations.Edit
    mutation = mutations.Mutation("m", "IC-1", ["sim"], [], [edit("a.rs", "two", "")])
    said = mutations.wrong(mutations.Table({}, [mutation]), tmp_path)
    assert "a.rs has 2 times: 'two'" in said[0]
    assert "no check is called 'sim'" in said[1]
    assert "no mutation breaks IC-2" in said
    assert mutations.place(edit("a.rs", "two", "", after="one "), "one two two") == 4
    with pytest.raises(ValueError, match="0 times"):
        mutations.place(edit("a.rs", "three", ""), "one two two")


def test_lines_are_broken_behind_switches(mutations: ModuleType) -> None:
    edit = mutations.Edit
    text = "let a = b + c;\nd();\n"
    edits = [
        (0, edit("", "b", "x", after="a = ")),
        (1, edit("", "b", "y", after="a = ")),
        (2, edit("", "d();", "")),
    ]
    assert mutations.broken(text, edits) == (
        "let a = (if crate::mutant(0) { x } else if crate::mutant(1) { y } else { b }) + c;\n"
        "if crate::mutant(2) {  } else { d(); }\n"
    )
    with pytest.raises(ValueError, match="overlap"):
        mutations.broken(text, [edits[0], (3, edit("", "b + c", "0"))])
