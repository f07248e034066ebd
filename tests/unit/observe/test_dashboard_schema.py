"""The dashboard is one that Grafana's own types read, and nothing in it is unknown to them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fabric_ray.observe.dashboard import dashboard

models = pytest.importorskip(
    "grafana_foundation_sdk.models.dashboard", reason="pip install grafana-foundation-sdk"
)
encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins")


def read(board: dict[str, Any]) -> dict[str, Any]:
    """A dashboard as Grafana's types understand it, written out again."""
    plugins.register_default_plugins()
    again = models.Dashboard.from_json(board)
    written: dict[str, Any] = json.loads(json.dumps(again, cls=encoder.JSONEncoder))
    return written


def lost(before: Any, after: Any, where: str = "") -> list[str]:
    """What isn't there any more, or is something else; defaults may be added."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [w for key in before for w in lost(before[key], after.get(key), f"{where}/{key}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [w for i, (a, b) in pairs for w in lost(a, b, f"{where}/{i}")]
    return [] if before == after else [where]


@pytest.fixture
def board() -> dict[str, Any]:
    return dashboard()


def test_grafanas_types_read_all_of_the_dashboard(board: dict[str, Any]) -> None:
    assert lost(board, read(board)) == []
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_panels_of_the_dashboard_do_not_overlap(board: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24, "Grafana's grid has 24 columns"
        taken |= cells
