"""Notebooks run from top to bottom, and end with what they were to show."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_a_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A cluster of its own, whatever else runs on this machine.
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs aren't kept"
    # A busy machine may need longer to start a kernel than nbclient's minute.
    patience = {"timeout": 240, "startup_timeout": 240}
    NotebookClient(notebook, **patience, resources={"metadata": {"path": tmp_path}}).execute()
    assert "arrived" in notebook.cells[-1].outputs[0].text
