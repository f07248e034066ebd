"""What a report's plots say is what was measured."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fabric_ray.cli.main import app

pytest.importorskip("matplotlib", reason="reports have plots: pip install '.[ray]'")

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.long
def test_the_command_draws_curves(tmp_path: Path) -> None:
    page = tmp_path / "bench.html"
    asked = ["bench", "--sizes", "16KiB,64KiB", "--turns", "1", "--transports", "tcp"]
    done = CliRunner().invoke(app, [*asked, "--picture", str(page)])
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "cores</title>" in text
    svg = ElementTree.fromstring(text[text.index("<svg") :])
    assert svg.tag == f"{SVG}svg"
    assert sum(1 for _ in svg.iter(f"{SVG}path")) > 10
