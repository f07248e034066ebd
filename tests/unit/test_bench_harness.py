"""The harness's own arithmetic: who moved what, and whose ratio is whose."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import suites
from benchmarks.contenders.fabric_kv import Shape
from benchmarks.contenders.libfabric import FabTests, PingPong
from benchmarks.contenders.programs import ProgramContender
from benchmarks.contenders.registry import every
from benchmarks.contenders.ucx import UcxPut
from benchmarks.harness import data
from benchmarks.harness.cases import KIB, Case
from benchmarks.harness.contender import Effort, Measurement
from benchmarks.harness.remains import Remains
from benchmarks.harness.schedule import Plan, operations_and_samples, run_cases
from fabric_ray.bench import record, stats
from fabric_ray.bench.record import Results
from fabric_ray.bench.results import RowHeader, load, row_of_turns
from fabric_ray.errors import InvalidArgument

WRITE = Case(suite="write", operation="write", link="shm", bytes=4 * KIB, region=64 * KIB)
PAGES = Case(suite="pages", operation="pages", link="shm", bytes=KIB, pages=8, region=64 * KIB)
KV = next(suites.kv(True))
STEPS: dict[str, tuple[int, Callable[[int], data.Step]]] = {
    "write": (WRITE.bytes, partial(data.step, WRITE)),
    "pages": (PAGES.bytes, partial(data.step, PAGES)),
    "kv": (KV.bytes, Shape.of(KV).step),
}


def delivered(kind: str, operations: int) -> data.Bytes:
    nbytes, step = STEPS[kind]
    region = Shape.of(KV).nbytes if kind == "kv" else 64 * KIB
    source, memory = data.pattern(region), np.zeros(region, dtype=np.uint8)
    for number in range(operations):
        for origin, place in zip(*step(number), strict=True):
            here, there = origin * nbytes, place * nbytes
            memory[there : there + nbytes] = source[here : here + nbytes]
    return memory


def fault(kind: str, memory: data.Bytes) -> str | None:
    nbytes, step = STEPS[kind]
    return data.fault(nbytes, [step(number) for number in range(3)], memory)


@pytest.mark.parametrize("kind", STEPS)
def test_only_exact_delivery_is_no_fault(kind: str) -> None:
    assert [fault(kind, delivered(kind, n)) is None for n in (2, 3, 4)] == [False, True, False]


@given(at=st.integers(0, WRITE.region - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_is_a_fault(at: int, bit: int) -> None:
    memory = delivered("write", 3)
    memory[at] ^= 1 << bit
    assert fault("write", memory) is not None


def test_cold_operations_walk_the_region_and_pages_meet_every_place_once() -> None:
    starts = [int(data.step(WRITE, number).sources[0]) for number in range(17)]
    assert starts == [*range(16), 0]
    places = list(itertools.chain(*(data.step(PAGES, number).targets for number in range(8))))
    assert sorted(places) == list(range(64))
    assert places != sorted(places)


def test_a_paired_ratio_cancels_drift_that_a_ratio_of_medians_would_show() -> None:
    drift = [1.0, 3.0, 9.0]
    one_bad_turn = [2.0, 30.0, 18.0]
    assert stats.median(one_bad_turn) / stats.median(drift) == pytest.approx(6.0)
    assert stats.paired_ratio(one_bad_turn, drift) == pytest.approx(2.0)
    assert stats.paired_ratio([], []) is None


@given(st.floats(1e-9, 10), st.integers(1, 4096), st.floats(0.001, 1))
def test_a_turn_holds_at_least_one_operation_and_about_its_budget(
    seconds: float, wanted: int, budget: float
) -> None:
    operations, samples = operations_and_samples(seconds, wanted, budget)
    assert 1 <= operations <= wanted
    assert samples >= 1
    assert operations * samples * seconds <= max(budget, seconds) * 1.001


@pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
def test_one_of_ours_is_in_every_case_and_every_case_has_a_name_of_its_own(quick: bool) -> None:
    cases = [case for suite in suites.SUITES.values() for case in suite(quick)]
    mine = [one for one in every() if one.family == "ours"]
    assert [case.key for case in cases if not any(one.takes_part(case) for one in mine)] == []
    assert len({case.key for case in cases}) == len(cases)


class Interrupted:
    """Ends the run in its fourth turn of the second case: a case takes two calls to calibrate."""

    name, family, threads, obtain = "floor", "floor", 1, ""
    calls = 0

    def measure(self, case: Case, effort: Effort) -> Measurement:
        self.calls += 1
        if self.calls == 7 + 2 + 4:
            raise KeyboardInterrupt
        return Measurement(seconds=[1e-3] * effort.samples)

    def describe(self, case: Case) -> str:
        return "never ends"

    def __getattr__(self, name: str) -> object:
        return lambda *_: True


def test_an_interrupted_run_keeps_what_it_has_measured_and_is_resumed(tmp_path: Path) -> None:
    path, plan = tmp_path / "run.jsonl", Plan(turns=5, turn_seconds=0.01)
    contender: Any = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        run_cases([WRITE, PAGES], [contender], plan, Results(path, {}, []))
    rows = load(path).rows
    assert [row.key for row in rows] == [WRITE.key, PAGES.key]
    assert [len(row.figures[0].turns) for row in rows] == [5, 3]
    assert [row.complete for row in rows] == [True, False]

    with path.open("ab") as file:
        file.write(b'{"line":"row","key":"cut')  # by a power failure, say
    run_cases([WRITE, PAGES], [contender], plan, Results(path, {}, []))
    assert contender.calls == 7 + 2 + 4 + 7, "the first case was measured again"
    report = load(path)
    assert [len(row.figures[0].turns) for row in report.rows] == [5, 5]
    assert len(report.runs) == 2


def test_a_disk_that_is_full_is_named_and_the_run_is_resumed(tmp_path: Path) -> None:
    path, limits = tmp_path / "run.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    row = row_of_turns(RowHeader(key="a/b", unit="us"), {"floor": ("floor", [1.0, 2.0])})
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        with pytest.raises(InvalidArgument, match=r"run\.jsonl: File too large"):
            Results(path)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.stat().st_size == 64
        results = Results(path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 64, limits[1]))
        with pytest.raises(InvalidArgument, match=r"run\.jsonl: File too large"):
            results.add(row)
        results.end()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    resumed = Results(path)
    assert not resumed.rows
    resumed.add(row)
    assert len(load(path).rows) == 1
    with pytest.raises(ValueError, match="/dev/zero is not a file"):
        Results(Path("/dev/zero"))


@pytest.mark.parametrize("text", ["", "{}\n", '{"line":"end","seconds":1,"load":[0,0,0]}\n'])
def test_a_file_that_holds_no_results_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="some"):
        load(path)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """What was printed since; this process stays no parent of orphans."""
    monkeypatch.setattr(record, "adopt_orphans", lambda: None)
    return lambda: capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_what_was_measured_before_a_signal_is_kept_and_shown(
    number: signal.Signals, tmp_path: Path, shown: Callable[[], str]
) -> None:
    path, header = tmp_path / "run.jsonl", RowHeader(key="suite/first", unit="ms")
    taken = {"ours": ("ours", [1.0, 3.0]), "plain": ("floor", [1.0, 1.0])}

    def interrupted() -> None:
        with record.recorded("test", path) as results:
            results.add(row_of_turns(header, taken))
            signal.raise_signal(number)
            results.add(row_of_turns(RowHeader(key="suite/never", unit="ms"), taken))

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        interrupted()
    assert [row.key for row in load(path).rows] == ["suite/first"]
    out = shown()
    assert "suite/first" in out
    assert "0.67x" in out, "of the floor: the median of 1 and a third"
    assert "suite/first" in path.with_suffix(".html").read_text()


def test_tables_can_be_pasted(tmp_path: Path, shown: Callable[[], str]) -> None:
    path = tmp_path / "run.jsonl"
    taken = {"ours": ("ours", [0.002]), "peer": ("peer", [0.004])}
    with record.recorded("test", path) as results:
        results.add(
            row_of_turns(RowHeader(key="s/a", unit="ms"), taken, {"ours": {"size MB": 3.0}})
        )
    shown()
    record.show(path, record.console_of(), markdown=True)
    assert "| s/a  ms | 2 |  |  | peer 4 | 2.00x |  |  | size MB 3 |" in shown().splitlines()


UCX = """iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr
20000,0.130,0.146,0.151,52.36,52.36,6862408,6862408
"""
FABTESTS = """bytes   iters   total       time     MB/sec    usec/xfer   Mxfers/sec
4k      1k      3.9m        0.01s    382.41      10.71       0.09
"""
PINGPONG = """bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec
64      1k      =1k      125k        0.00s     47.73       1.34       0.75
"""


@pytest.mark.parametrize(
    ("contender", "output", "microseconds"),
    [(UcxPut(), UCX, 0.151), (FabTests(), FABTESTS, 10.71), (PingPong(), PINGPONG, 1.34)],
    ids=lambda value: value.name if isinstance(value, ProgramContender) else "",
)
def test_figures_of_programs_are_read_from_their_own_columns(
    contender: ProgramContender, output: str, microseconds: float
) -> None:
    assert contender.seconds(output, WRITE) == pytest.approx(microseconds / 1e6)


LEAVES = """
import mmap, os, sys, time
for path in sys.argv[1:]:
    file = os.open(path, os.O_CREAT | os.O_RDWR)
    os.truncate(file, 4096)
    kept = mmap.mmap(file, 4096) if path == sys.argv[1] else file
print("ready", flush=True)
time.sleep(600)
"""


def test_what_a_contender_leaves_behind_is_removed_and_what_others_hold_is_not() -> None:
    names = ("mapped", "opened", "shared")
    paths = [Path(f"/dev/shm/bench-test-{os.getpid()}-{name}") for name in names]
    remains = Remains()
    with paths[2].open("w"):
        command = [sys.executable, "-c", LEAVES, *map(str, paths)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as left:
            assert left.stdout is not None
            left.stdout.readline()
            remains.look()
            remains.clear()
            assert not Path(f"/proc/{left.pid}").exists()
    assert [path.exists() for path in paths] == [False, False, True]
    paths[2].unlink()
    assert f"process {left.pid} " in remains.found[0]
    assert remains.found[1:] == [*map(str, paths[:2])]
