"""The table of mutations is true: each line that it breaks is there, and every promise has one."""

from __future__ import annotations

from types import ModuleType


def test_every_promise_has_a_mutation_that_applies_once(mutations: ModuleType) -> None:
    assert mutations.wrong(mutations.read()) == []
