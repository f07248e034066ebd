"""Notebooks run from top to bottom, draw, and end with what they were to show."""

from __future__ import annotations

import base64
import importlib.util
import io
import os
import shutil
import socket
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
# Half a minute each.
SLOW = {"plan_your_model.ipynb", "transfers.ipynb", "weight_pushes.ipynb"}
# What a second run of each cell would only make longer.
MEASURES = {"plan_your_model.ipynb", "transfers.ipynb"}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # A cluster of its own, whatever else runs on this machine.
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # The kernel's own, which leaves figures in the notebook.
    monkeypatch.delenv("MPLBACKEND", raising=False)


def run(path: Path, where: Path, times: int = 1) -> Any:
    """The notebook with its outputs, each of its cells run so many times in a row."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [deepcopy(cell) for cell in notebook.cells for _ in range(times)]
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs aren't kept"
    # A busy machine may need longer to start a kernel than nbclient's minute.
    patience = {"timeout": 240, "startup_timeout": 240}
    NotebookClient(notebook, **patience, resources={"metadata": {"path": where}}).execute()
    return notebook


def pictures(cell: Any) -> Iterator[bytes]:
    for output in cell.get("outputs", ()):
        if "image/png" in output.get("data", {}):
            yield base64.b64decode(output.data["image/png"])


def has_marks(png: bytes) -> bool:
    """Whether there is more on it than axes, which are black on white."""
    from matplotlib import image

    pixels = image.imread(io.BytesIO(png))[:, :, :3]
    return bool((pixels.max(axis=2) - pixels.min(axis=2) > 0.2).mean() > 0.001)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.name, marks=[pytest.mark.long] if path.name in SLOW else [])
        for path in NOTEBOOKS
    ],
)
def test_a_notebook_runs_and_draws(path: Path, tmp_path: Path) -> None:
    notebook = run(path, tmp_path, 1 if path.name in MEASURES else 2)
    drawing = [cell for cell in notebook.cells if "plt.subplots(" in cell.source]
    assert drawing
    for cell in drawing:
        found = list(pictures(cell))
        assert len(found) == cell.source.count("plt.subplots("), cell.source
        assert all(map(has_marks, found)), cell.source
    assert "arrived" in notebook.cells[-1].outputs[0].text
    # A file that stayed could be taken for the figures of a later run.
    assert not [*tmp_path.iterdir()]


def test_what_needs_a_clone_is_left_out_in_words_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = importlib.util.find_spec("fabric_ray")
    assert package
    assert package.origin
    elsewhere = tmp_path / "site"
    elsewhere.mkdir()
    (elsewhere / "fabric_ray").symlink_to(Path(package.origin).parent)
    monkeypatch.setenv("PYTHONPATH", str(elsewhere))
    (tmp_path / "work").mkdir()
    copy = tmp_path / "work" / "transfers.ipynb"
    shutil.copy(ROOT / "examples" / "notebooks" / copy.name, copy)
    notebook = nbformat.read(copy, as_version=4)
    # An editable install has the clone on its path.
    hide = (
        "import os, sys\n"
        "sys.path[:] = [p for p in sys.path if not os.path.isdir(p + '/benchmarks')]"
    )
    # The imports and the comparison; the rest is run above.
    kept = [nbformat.v4.new_code_cell(hide), notebook.cells[1], notebook.cells[-2]]
    notebook.cells = kept
    nbformat.write(notebook, copy)
    [output] = run(copy, tmp_path / "work").cells[-1].outputs
    assert "isn't a clone of the repository" in output.text


def test_looking_for_connections_leaves_no_descriptor_open() -> None:
    notebook = nbformat.read(ROOT / "examples" / "notebooks" / "failover.ipynb", as_version=4)
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    names: dict[str, Any] = {}
    exec(sources[0], names)
    connections = next(source for source in sources if "def connections" in source)
    exec(connections.partition("\n\n\n")[0], names)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = [socket.create_connection(server.getsockname()), server.accept()[0]]
        before = len(os.listdir("/proc/self/fd"))
        found = {each.getsockname() for each in names["connections"]().values()}
        assert found >= {end.getsockname() for end in ends}
        for end in ends:
            end.close()
        assert len(os.listdir("/proc/self/fd")) == before - len(ends)
