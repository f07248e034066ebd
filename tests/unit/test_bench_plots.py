"""What a report's plots say is what was measured."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.harness.cases import KIB, Case
from fabric_ray.bench.page import colours_of, svg_of
from fabric_ray.bench.results import Row, row_of_turns
from fabric_ray.cli.main import app

pytest.importorskip("matplotlib", reason="reports have plots: pip install '.[ray]'")

SVG = "{http://www.w3.org/2000/svg}"


def row(case: Case, **medians: float) -> Row:
    header = case.header
    taken = {}
    for name, median in medians.items():
        seconds = header.amount / median / 1e9 if header.size else median / 1e6
        taken[name] = ("floor" if name == "floor" else "ours", [seconds])
    return row_of_turns(header, taken)


def drawn(found: Row) -> ElementTree.Element:
    return ElementTree.fromstring(svg_of([found], "title", colours_of([found])))


def widths(picture: ElementTree.Element, colours: set[str]) -> list[float]:
    """Of the bars in these colours."""
    out = []
    for path in picture.iter(f"{SVG}path"):
        if any(colour in path.get("style", "") for colour in colours):
            xs = [float(x) for x, _ in re.findall(r"[ML] (\S+) (\S+)", path.get("d", ""))]
            out.append(max(xs) - min(xs))
    return out


LATENCY = Case(suite="latency", operation="latency", link="shm", waiter="parked", bytes=8)
WRITE = Case(suite="write", operation="write", link="shm", bytes=4 * KIB, region=64 * KIB)


def test_bars_are_as_long_as_what_they_say() -> None:
    found = row(LATENCY, ours=20.0, floor=30.0)
    picture = drawn(found)
    bars = widths(picture, set(colours_of([found]).values()))
    assert len(bars) == 2
    assert max(bars) / min(bars) == pytest.approx(1.5, rel=1e-3)


def test_a_curve_of_one_size_has_numbers_at_its_side() -> None:
    picture = drawn(row(WRITE, ours=19.1, floor=24.7))
    texts = {"".join(text.itertext()).strip() for text in picture.iter(f"{SVG}text")}
    assert {"19.1", "24.7", "4KiB"} <= texts


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
