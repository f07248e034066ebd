"""The harness's own arithmetic: who moved what, and whose ratio is whose."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.contenders.fabric import FabricLibfabric, FabricPython, FabricRust
from benchmarks.contenders.libfabric import FabTests, PingPong
from benchmarks.contenders.programs import ProgramContender
from benchmarks.contenders.ucx import UcxPut
from benchmarks.harness import data, stats
from benchmarks.harness.cases import KIB, MIB, Case, size
from benchmarks.harness.contender import Effort, Measurement
from benchmarks.harness.results import Row
from benchmarks.harness.schedule import Plan, run_cases
from benchmarks.sheets import Output, Sheet, keeping
from benchmarks.suites import SUITES

WRITE = Case(suite="write", operation="write", link="shm", bytes=4 * KIB, region=64 * KIB)
PAGES = Case(suite="pages", operation="pages", link="shm", bytes=KIB, pages=8, region=64 * KIB)


def delivered(case: Case, operations: int) -> data.Bytes:
    source, memory = data.pattern(case.region), np.zeros(case.region, dtype=np.uint8)
    for number in range(operations):
        for origin, place in zip(*data.step(case, number), strict=True):
            here, there = origin * case.bytes, place * case.bytes
            memory[there : there + case.bytes] = source[here : here + case.bytes]
    return memory


@pytest.mark.parametrize("case", [WRITE, PAGES], ids=lambda case: case.key)
def test_exact_delivery_is_no_fault(case: Case) -> None:
    assert data.fault(case, 3, delivered(case, 3)) is None


@pytest.mark.parametrize("case", [WRITE, PAGES], ids=lambda case: case.key)
@pytest.mark.parametrize("operations", [2, 4], ids=["missing", "one too many"])
def test_missing_and_surplus_operations_are_faults(case: Case, operations: int) -> None:
    assert data.fault(case, 3, delivered(case, operations)) is not None


@given(at=st.integers(0, WRITE.region - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_is_a_fault(at: int, bit: int) -> None:
    memory = delivered(WRITE, 3)
    memory[at] ^= 1 << bit
    assert data.fault(WRITE, 3, memory) is not None


def test_cold_operations_walk_the_region_and_pages_meet_every_place_once() -> None:
    starts = [int(data.step(WRITE, number).sources[0]) for number in range(17)]
    assert starts == [*range(16), 0]
    places = list(itertools.chain(*(data.step(PAGES, number).targets for number in range(8))))
    assert sorted(places) == list(range(64))
    assert places != sorted(places)


def test_hot_operations_stay_on_one_block() -> None:
    hot = Case(suite="write", operation="write", link="shm", bytes=4 * KIB, temperature="hot")
    assert {int(data.step(hot, number).sources[0]) for number in range(9)} == {0}


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
    operations, samples = stats.operations_and_samples(seconds, wanted, budget)
    assert 1 <= operations <= wanted
    assert samples >= 1
    assert operations * samples * seconds <= max(budget, seconds) * 1.001


def test_figures_come_in_the_case_s_unit() -> None:
    assert WRITE.figure(4096e-9) == pytest.approx(1.0)
    assert PAGES.figure(8192e-9) == pytest.approx(1.0)
    latency = Case(suite="latency", operation="latency", link="tcp", bytes=8, waiter="parked")
    assert latency.figure(36e-6) == pytest.approx(36.0)
    assert [size(8), size(64 * KIB), size(256 * MIB)] == ["8B", "64KiB", "256MiB"]


@pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
def test_one_of_ours_is_in_every_case_and_every_case_has_a_name_of_its_own(quick: bool) -> None:
    cases = [case for suite in SUITES.values() for case in suite(quick)]
    mine = (FabricRust("rust"), FabricPython("python"), FabricLibfabric())
    assert [case.key for case in cases if not any(one.supports(case) for one in mine)] == []
    assert len({case.key for case in cases}) == len(cases)


def test_an_interrupted_run_keeps_what_it_has_measured() -> None:
    class Interrupted:
        name, family, threads, obtain = "floor", "floor", 1, ""
        calls = 0

        def measure(self, case: Case, effort: Effort) -> Measurement:
            self.calls += 1
            if self.calls == 7 + 2 + 4:  # a case takes two calls of calibration and five turns
                raise KeyboardInterrupt
            return Measurement(seconds=[1e-3] * effort.samples)

        def describe(self, case: Case) -> str:
            return "never ends"

        def __getattr__(self, name: str) -> object:
            return lambda *_: True

    cases = [WRITE, PAGES]
    kept: list[Row] = []
    plan = Plan(turns=5, turn_seconds=0.01)
    contenders: list[Any] = [Interrupted()]
    with pytest.raises(KeyboardInterrupt):
        run_cases(cases, contenders, plan, lambda text: None, kept.append)
    assert [row.key for row in kept] == [case.key for case in cases]
    assert [len(row.figures[0].turns) for row in kept] == [5, 3]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_table_that_was_interrupted_is_saved_and_shown(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, sheet = tmp_path / "figures.json", Sheet(title="t", columns=("a",))

    def measured() -> Sheet:
        with keeping(lambda: sheet):
            sheet.rows.append(("measured",))
            signal.raise_signal(number)
            sheet.rows.append(("never",))
        return sheet

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        Output("test", path).add(measured)
    assert msgspec.json.decode(path.read_bytes())["sheets"][0]["rows"] == [["measured"]]
    assert "measured" in capsys.readouterr().out


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


@pytest.mark.parametrize("contender", [UcxPut(), FabTests()], ids=lambda one: one.name)
@pytest.mark.parametrize("output", ["", "connect() failed: Connection refused\n"])
def test_output_without_a_figure_is_refused(contender: ProgramContender, output: str) -> None:
    with pytest.raises((ValueError, IndexError)):
        contender.seconds(output, WRITE)


WINDOW = Case(suite="nics", operation="window", link="tcp", bytes=MIB, region=64 * MIB)
HELP = {"1.17": "-B <src_port>", "2.6": "-B <src_port>\n-O <addr>   use the provided addr"}


class Counting(FabricRust):
    """Remembers how much it was told to move."""

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__(name)
        self.seconds = seconds
        self.efforts: set[int] = set()

    def supports(self, case: Case) -> bool:
        return True

    def start(self, case: Case) -> None:
        return

    def verify(self, case: Case) -> bool:
        return True

    def measure(self, case: Case, effort: Effort) -> Measurement:
        self.efforts.add(effort.operations * effort.samples)
        return Measurement(seconds=[self.seconds])


def test_slow_and_fast_contenders_make_equally_many_writes_of_a_window() -> None:
    contenders = [Counting("slow", 1.0), Counting("fast", 1e-6)]
    run_cases([WINDOW], contenders, Plan(turns=2, turn_seconds=0.1), lambda text: None)
    assert [one.efforts for one in contenders] == [{WINDOW.operations}] * 2
    assert WINDOW.operations % 64 == 0


@pytest.mark.parametrize("version", HELP)
def test_fabtests_stand_beside_writes_to_the_memory_that_they_use(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "fi_rma_bw"
    program.write_text(f"#!/bin/sh\necho '{HELP[version]}' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("FABTESTS", str(tmp_path))
    hot = msgspec.structs.replace(WINDOW, temperature="hot")
    peer = FabTests()
    assert peer.available() is None
    assert (peer.supports(hot), peer.supports(WINDOW)) == (version == "1.17", version == "2.6")
    assert peer.client(WINDOW, 7, 640)[:3] == [str(program), "-p", "tcp"]


def test_a_folder_without_fabtests_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABTESTS", str(tmp_path))
    assert FabTests().available() == "fi_rma_bw is not installed"


def test_fabtests_use_the_library_that_we_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRIC_RAY_LIBFABRIC", "/opt/libfabric/lib/libfabric.so.1")
    assert FabTests().environment(WINDOW) == {"LD_LIBRARY_PATH": "/opt/libfabric/lib"}
    monkeypatch.delenv("FABRIC_RAY_LIBFABRIC")
    assert FabTests().environment(WINDOW) == {}
