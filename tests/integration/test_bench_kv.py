"""The KV cache benchmarks: each runs on small sizes, and notices wrong bytes and tokens.

Of the one with vLLM's servers, what needs none of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.kvcache.__main__ import app
from benchmarks.kvcache.load import Load, Outcomes, load, row
from benchmarks.kvcache.ttft import MODEL, ttft
from benchmarks.kvcache.vllm import IDLE, Turn, loads, measure, rows
from benchmarks.kvcache.vllm_setups import Setup
from benchmarks.kvcache.watcher import watcher
from fabric_ray.bench.record import Results
from fabric_ray.bench.results import Family
from fabric_ray.bench.results import load as read
from fabric_ray.bench.table import print_report
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


class Memory(Setup):
    """Answers from this process's memory, with no server behind it."""

    def __init__(self, name: str, family: Family, first: Callable[[], int] = lambda: 7) -> None:
        super().__init__(name, family)
        self._first = first
        self.handoff = "sequential" if family == "ours" else ""

    def _tokens(self, prompt: list[int], count: int) -> Iterator[list[int]]:
        yield [self._first()]
        yield prompt[:1] * (count - 1)


SMALL = loads([64], [1, 2], 2)


def recorded_turn(first: float, cpu: float) -> Turn:
    return Turn(firsts=[first, first, 3 * first], seconds=4 * first, cpu=cpu, step=0.005)


def test_turns_of_servers_become_rows_beside_nixl_and_the_plain_server(results: Results) -> None:
    setups = [Memory("plain", "floor"), Memory("fabric-ray", "ours"), Memory("nixl", "peer")]
    found = {
        "plain": [recorded_turn(0.010, 0.2), recorded_turn(0.020, 0.2)],
        "fabric-ray": [recorded_turn(0.020, 0.4), recorded_turn(0.020, 0.6)],
        "nixl": [recorded_turn(0.030, 0.8), recorded_turn(0.050, 0.9)],
    }
    one = SMALL[0]
    results.add(*rows(one, setups, found, {}, block_bytes=500_000_000, complete=True))
    report = read(results.path)
    ttft_row, goodput, cpu = report.rows
    ours, beside = (ttft_row.figure(name) for name in ("fabric-ray", "nixl"))
    assert ours is not None
    assert beside is not None
    assert (ours.median, ours.of_floor, beside.ours_over) == pytest.approx((20, 0.75, 2.0))
    assert ours.details["over nixl"] == "2.00 (1.50 to 2.50)"
    assert ours.details["over plain"] == "0.75 (0.50 to 1.00)"
    assert ours.details["of plain and a step"] == "1.07 (0.80 to 1.33)"
    assert goodput.figures[1].median == pytest.approx(one.requests / 0.080)
    # 64 tokens are two blocks: 0.2 and 0.4 s more than the plain server's for 1 GB a request.
    assert cpu.figures[1].details["beyond plain, s/GB"] == pytest.approx(0.3 / one.requests)
    console = Console(width=400, file=StringIO())
    print_report(report, console, markdown=True)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "| 20 | 15 | 0.75x | nixl 40 | 2.00x |" in shown


def test_a_way_with_other_tokens_is_failed_and_not_ranked(results: Results) -> None:
    setups = [Memory("plain", "floor"), Memory("fabric-ray", "ours")]
    setups.append(Memory("nixl", "peer", lambda: 8))
    measure(setups, SMALL, 2, results, tokens=4, block_bytes=4096, idle=0.01)
    assert len(results.rows) == 3 * len(SMALL) + 1
    for found in results.rows.values():
        assert {figure.contender for figure in found.figures} == {"plain", "fabric-ray"}
        assert found.complete
    failures = [found.failures for key, found in results.rows.items() if key != IDLE]
    assert [[one.contender for one in each] for each in failures] == [["nixl"]] * 3 * len(SMALL)


@pytest.mark.long
def test_turns_before_an_interruption_are_kept_and_measured_again(results: Results) -> None:
    answers = iter(range(40))

    def interrupted() -> int:
        if next(answers, None) is None:
            raise KeyboardInterrupt
        return 7

    plain = Memory("plain", "floor")
    setups = [plain, Memory("fabric-ray", "ours", interrupted)]
    with pytest.raises(KeyboardInterrupt):
        measure(setups, SMALL, 50, results, tokens=4, block_bytes=4096, idle=0.01)
    again = Results(results.path, {}, [])
    assert again.rows
    assert not any(found.complete for found in again.rows.values())
    setups = [plain, Memory("fabric-ray", "ours")]
    measure(setups, SMALL, 2, again, tokens=4, block_bytes=4096, idle=0.01)
    assert all(found.complete for found in read(results.path).rows)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lengths", "64,many"], "expected numbers from 1 to"),
        (["--concurrent", "0"], "expected numbers from 1 to"),
        (["--pairs", "nixl,mooncake"], "got mooncake, expected fabric-ray, nixl or both"),
    ],
)
def test_servers_that_cannot_be_had_are_named(arguments: list[str], said: str) -> None:
    done = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["vllm", *arguments])
    assert done.exit_code == 2, done.output
    assert said in done.stderr


@pytest.mark.long
def test_an_environment_that_lacks_vllm_is_named() -> None:
    # A process of its own: the variable is read once.
    absent = {"FABRIC_RAY_VLLM_PYTHON": "/nonexistent/python", "COLUMNS": "400"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kvcache", "vllm"],
        cwd=ROOT,
        env={**os.environ, **absent},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stdout
    assert "FABRIC_RAY_VLLM_PYTHON" in done.stderr
