"""The KV cache benchmarks: each runs on small sizes, and notices wrong bytes and tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks.contenders.perf import find_program
from benchmarks.harness.data import pattern
from benchmarks.kvcache.load import Load, load
from benchmarks.kvcache.shape import Shape, page_cases, r1_cases
from benchmarks.kvcache.transfers import pages
from benchmarks.kvcache.ttft import MODEL, ttft
from benchmarks.kvcache.watcher import watcher
from benchmarks.sheets import Sheet, markdown, spread

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def program() -> None:
    """The floor and the watcher's path, built if no release build is there."""
    if find_program() is None:
        manifest = str(ROOT / "native" / "Cargo.toml")
        build = ["cargo", "build", "--release", "-p", "fabric-perf", "--manifest-path", manifest]
        subprocess.run(build, check=True)


def quiet(text: str) -> None:
    del text


def test_a_page_that_lies_elsewhere_is_seen() -> None:
    shape = Shape.of(page_cases(quick=True)[0])
    source = pattern(shape.nbytes).reshape(shape.layers, shape.held_pages, shape.page_nbytes)
    memory = np.zeros(shape.nbytes, dtype=np.uint8)
    cells = memory.reshape(source.shape)

    def deliver(number: int) -> None:
        memory[:] = 0
        origins, places = shape.tables(number)
        for layer in range(shape.layers):
            cells[layer, places] = source[layer, origins]

    deliver(0)
    assert shape.fault(1, memory) is None
    deliver(1)
    assert "is not in page" in (shape.fault(1, memory) or ""), "operation 0 was not delivered"
    deliver(0)
    origins, places = shape.tables(0)
    cells[2, places[1]] = source[2, origins[0]]
    assert "layer 2" in (shape.fault(1, memory) or "")
    deliver(0)
    cells[0, shape.tables(1)[1][0], 8] = 1
    assert "where none belong" in (shape.fault(1, memory) or "")


def test_the_prompt_of_deepseek_r1_is_61_layers_of_32_pages_of_144_kib() -> None:
    shape = Shape.of(r1_cases(quick=True)[0])
    assert (shape.layers, shape.layer_pages, shape.page_nbytes) == (61, 32, 144 * 1024)
    assert shape.tokens == 4096
    assert shape.layout().buffers == (61 * 32 * 144 * 1024,)


@pytest.mark.long
@pytest.mark.usefixtures("program")
def test_pages_are_compared_and_held_against_the_floor() -> None:
    sheet = pages(1, quiet, quick=True)
    assert not [note for note in sheet.notes if note.startswith("failed")]
    ours = [row for row in sheet.rows if row[1] == "fabric-kv"]
    assert len(ours) == 4
    for row in ours:
        assert float(row[2]) > 0
        assert row[6] == "compared"
        assert float(row[4]) > 0, "of the floor"


@pytest.mark.usefixtures("program")
def test_the_way_from_a_store_to_the_first_post_has_tails() -> None:
    sheet = watcher(1, 40, quiet)
    us = sheet.figures["us"]
    assert isinstance(us, dict)
    for name in (
        "spinning: first post",
        "woken: Python callback",
        "napping: Rust callback",
    ):
        assert 0 < us[name]["min"] <= us[name]["p50"] <= us[name]["p99.9"] <= us[name]["max"]
    assert us["spinning: Rust callback"]["p50"] <= us["spinning: first post"]["p50"]
    assert any(name.startswith("floor") for name in us)


@pytest.mark.long
def test_first_tokens_are_those_of_the_engine_that_is_whole() -> None:
    small = msgspec.structs.replace(MODEL, hidden=64, layers=2, vocab=300, intermediate=64)
    sheet = ttft([40], 1, quiet, chunk_tokens=24, config=small)
    (row,) = sheet.rows
    turns = sheet.figures["seconds"]
    assert isinstance(turns, dict)
    (turn,) = turns["40"]
    assert all(turn[name] > 0 for name in ("whole", "split", "step", "compute", "moved", "asked"))
    assert row[sheet.columns.index("steps")] == "2"


@pytest.mark.long
def test_all_requests_end_when_prefillers_are_killed() -> None:
    asked = Load(
        requests=120,
        concurrent=60,
        cancelled=0.3,
        patience=0.5,
        kill_every=0.4,
        kills=2,
        prompt_tokens=(16, 128),
        distinct=20,
        limit=100,
    )
    sheet, outcomes = load(asked, quiet)
    assert sorted(one.number for one in outcomes.ended) == list(range(120))
    assert outcomes.killed > 0
    assert outcomes.wrong == []
    assert outcomes.leaked == []
    causes = [one.cause for one in outcomes.ended if one.outcome == "failed"]
    assert causes == []
    assert ("requests that ended", "120 of 120") in sheet.rows


@pytest.mark.long
def test_the_command_line_prints_a_table_to_paste_and_keeps_figures(tmp_path: Path) -> None:
    path = tmp_path / "out" / "load.json"
    command = [sys.executable, "-m", "benchmarks.kvcache", "load", "--requests", "6"]
    command += ["--concurrent", "3", "--prefillers", "1", "--decoders", "1", "--markdown"]
    done = subprocess.run(
        [*command, "--json", str(path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "| requests that ended | 6 of 6 |" in done.stdout
    (sheet,) = json.loads(path.read_bytes())["sheets"]
    assert len(sheet["figures"]["outcomes"]["ended"]) == 6


def test_percentiles_and_pasted_tables() -> None:
    found = spread([float(i) for i in range(1000)])
    assert (found["p50"], found["p99"], found["p99.9"], found["max"]) == (500, 990, 999, 999)
    sheet = Sheet(title="t", columns=("a", "b"), rows=(("1", "2"),), notes=("n",))
    assert markdown(sheet) == "**t**\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\nn"
