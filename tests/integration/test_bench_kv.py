"""The KV cache benchmarks: each runs on small sizes, and notices wrong bytes and tokens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.kvcache.load import Load, Outcomes, load, row
from benchmarks.kvcache.ttft import MODEL, ttft
from benchmarks.kvcache.watcher import watcher
from fabric_ray.bench.record import Results
from fabric_ray.bench.results import load as read
from tests.integration.bench_plain import built

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def program() -> None:
    built()


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "run.jsonl", {}, [])


@pytest.mark.long
@pytest.mark.usefixtures("program")
def test_pages_are_compared_and_held_against_the_floor(tmp_path: Path) -> None:
    path = tmp_path / "kv.jsonl"
    command = [sys.executable, "-m", "benchmarks", "run", "--suite", "kv", "--only", "*KiB"]
    command += ["--contender", "fabric-kv", "--contender", "floor", "--quick", "--repeat", "1"]
    done = subprocess.run(
        [*command, "--resume", str(path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read(path).rows
    assert len(rows) == 4
    for found in rows:
        ours = found.figure("fabric-kv")
        assert found.failures == []
        assert ours is not None
        assert ours.verified
        assert ours.of_floor is not None


@pytest.mark.usefixtures("program")
def test_the_way_from_a_store_to_the_first_post_has_tails(results: Results) -> None:
    watcher(1, 40, results)
    ours = {key: found.figures[0] for key, found in results.rows.items()}
    for name in ("spinning, first post", "woken, Python callback", "napping, Rust callback"):
        figure = ours[f"watcher/{name}"]
        assert 0 < figure.best <= figure.details["p50"] <= figure.details["p99.9"]
    first = ours["watcher/spinning, first post"]
    assert ours["watcher/spinning, Rust callback"].median <= first.median
    assert all(found.figure("flag") or found.figure("futex") for found in results.rows.values())
    assert "watcher/outside, Python callback" in ours


@pytest.mark.long
def test_first_tokens_are_those_of_the_engine_that_is_whole(results: Results) -> None:
    small = msgspec.structs.replace(MODEL, hidden=64, layers=2, vocab=300, intermediate=64)
    ttft([40], 1, results, chunk_tokens=24, config=small)
    ours, whole = results.rows["ttft/40 tokens"].figures
    assert (ours.contender, whole.contender) == ("disaggregated", "whole")
    assert ours.details["steps"] == 2
    assert all(value for name, value in ours.details.items() if name != "difference ms")


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
        limit=100,
    )
    outcomes = Outcomes()
    load(asked, outcomes, lambda text: None)
    assert {one.id for one in outcomes.ended} == {f"r{number}" for number in range(120)}
    assert outcomes.killed > 0
    assert outcomes.wrong == []
    assert outcomes.leaked == []
    assert [one.cause for one in outcomes.ended if one.outcome == "failed"] == []
    ours = row(asked, outcomes).figure("disaggregated")
    assert ours is not None
    assert ours.details["ended"] == "120 of 120"
