"""docs/integrations.md has the table of models that the adapters' tests run."""

from __future__ import annotations

from pathlib import Path

from tests.adapters.kv_models import MOVED, SERVERS, tables

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_table_that_is_tested() -> None:
    page = (ROOT / "docs" / "integrations.md").read_text()
    assert f"\n\n{tables()}\n\n" in page, "python -m tests.adapters.kv_models prints it"


def test_modules_with_servers_are_there() -> None:
    named = [each.servers for each in MOVED.values() if each.servers]
    assert named
    assert all((ROOT / SERVERS / name).exists() for name in named)
