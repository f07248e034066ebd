"""The benchmark harness end to end: results, page, failures, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil
import pytest

from benchmarks.contenders.fabric import FabricPython, FabricRust
from benchmarks.contenders.floor import Floor
from benchmarks.harness.cases import KIB, MIB, Case, Link, Memory
from benchmarks.harness.contender import Effort
from benchmarks.harness.schedule import Plan, run_cases
from fabric_ray.bench.record import Results
from fabric_ray.bench.results import ContenderError, Report, load
from tests.integration.bench_plain import Liar, Mortal, Plain, Spinner, built

pytest.importorskip("torch", reason="gloo comes with torch: pip install '.[ray]'")

ENDED = {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
ROOT = Path(__file__).resolve().parents[2]
CASE = Case(suite="write", operation="write", link="tcp", bytes=64 * KIB, region=MIB)
PLAN = Plan(turns=2, turn_seconds=0.01)
OURS = ("fabric-rust", "fabric-rust batch", "fabric-python", "fabric-python batch")


@pytest.fixture(scope="module", autouse=True)
def program() -> None:
    built()


def command(out: Path, *only: str) -> list[str]:
    patterns = [word for pattern in only for word in ("--only", pattern)]
    contenders = [word for name in (*OURS, "floor", "gloo") for word in ("--contender", name)]
    options = ["--quick", "--repeat", "2", "--out", str(out)]
    return [sys.executable, "-m", "benchmarks", "run", *options, *contenders, *patterns]


def status(process: psutil.Process) -> str:
    """Of a process that may have ended meanwhile."""
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD


def marked(mark: str) -> list[psutil.Process]:
    """Living processes that inherited `mark`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if status(process) not in ENDED and process.environ().get("FABRIC_BENCH_TEST") == mark:
                found.append(process)
    return found


def environment(mark: str) -> dict[str, str]:
    return {**os.environ, "FABRIC_BENCH_TEST": mark}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, str]:
    out = tmp_path_factory.mktemp("bench")
    mark = str(out)
    only = ("write/*/cold/1MiB", "pages/shm/1024x1KiB", "latency/shm/p*", "rate/shm/native")
    done = subprocess.run(
        command(out, *only),
        cwd=ROOT,
        env=environment(mark),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert marked(mark) == []
    [saved], [page] = out.glob("*.jsonl"), out.glob("*.html")
    assert "write/tcp/cold/1MiB" in done.stdout
    return load(saved), page.read_text()


@pytest.mark.long
def test_every_case_has_its_contenders_with_bytes_checked_and_both_ratios(
    result: tuple[Report, str],
) -> None:
    report, page = result
    assert len(report.rows) == 6
    assert report.left_behind == []
    for row in report.rows:
        assert row.failures == []
        floor = row.figure("floor")
        assert floor is not None
        assert len(floor.turns) == 2
        assert 0 < floor.low <= floor.median <= floor.high
        ours = [figure for figure in row.figures if figure.family == "ours"]
        assert {figure.contender for figure in ours} == set(OURS) & supporters(row.key)
        for figure in ours:
            assert figure.verified or row.suite in ("latency", "rate")
            assert figure.median > 0
            assert figure.of_floor is not None
        for peer in (figure for figure in row.figures if figure.family == "peer"):
            assert peer.verified
            assert peer.ours_over is not None
        assert row.key in page
    assert [row.key for row in report.rows if row.figure("gloo")] == ["write/tcp/cold/1MiB"]
    assert "torch" in report.runs[0].machine.versions
    assert page.count("<svg") >= 4
    for tag in ("<script", "<link ", "<img", "@import"):
        assert tag not in page
    assert not re.search(r"(?:src|href)=[\"']?(?!#)", page.replace('xlink:href="#', ""))


def supporters(key: str) -> set[str]:
    if key.startswith("rate/"):
        one = "fabric-rust" if key.endswith("native") else "fabric-python"
        return {one, f"{one} batch"}
    return {"fabric-python"} if "poll-python" in key else {"fabric-rust", "fabric-python"}


def test_a_contender_whose_bytes_are_wrong_is_failed_and_not_ranked(tmp_path: Path) -> None:
    results = Results(tmp_path / "run.jsonl", {}, [])
    run_cases([CASE], [Floor(), Liar()], PLAN, results)
    [row] = results.rows.values()
    assert [figure.contender for figure in row.figures] == ["floor"]
    [failure] = row.failures
    assert failure.contender == "liar"
    assert "are not at" in failure.reason
    assert results.left_behind == []


def test_a_contender_that_dies_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    later = Case(suite="write", operation="write", link="tcp", bytes=KIB, region=MIB)
    results = Results(tmp_path / "run.jsonl", {}, [])
    run_cases([CASE, later], [Mortal(), Floor()], PLAN, results)
    rows = list(results.rows.values())
    assert [failure.contender for row in rows for failure in row.failures] == ["mortal", "mortal"]
    assert "has gone" in rows[0].failures[0].reason
    assert all(row.figure("floor") for row in rows)
    assert results.left_behind == []


def test_paused_contenders_use_no_processor_time() -> None:
    contender = Spinner()
    others = psutil.Process().children()
    contender.start(CASE)
    try:
        workers = [child for child in psutil.Process().children() if child not in others]
        assert len(workers) == 2
        wait_until(lambda: {status(worker) for worker in workers} == {psutil.STATUS_STOPPED}, 30)
        before = [worker.cpu_times().user for worker in workers]
        time.sleep(0.3)
        assert [worker.cpu_times().user for worker in workers] == before
    finally:
        contender.stop()


def test_a_stopped_contender_leaves_neither_processes_nor_descriptors() -> None:
    contender = Plain()
    others = psutil.Process().children()
    contender.start(CASE)
    contender.stop()
    before = psutil.Process().num_fds()
    for _ in range(3):
        contender.start(CASE)
        assert contender.verify(CASE)
        contender.stop()
    assert psutil.Process().children() == others
    assert psutil.Process().num_fds() == before


@pytest.mark.long
def test_our_receiving_process_ends_with_its_writer_even_while_it_spins() -> None:
    case = msgspec.convert(
        {"suite": "latency", "operation": "latency", "link": "shm", "bytes": 8, "region": MIB}
        | {"temperature": "hot", "waiter": "spin-native"},
        Case,
    )
    ours = FabricRust("fabric-rust")
    ours.start(case)
    try:
        ours.verify(case)
        children = psutil.Process().children(recursive=True)
        [receiver] = [one for one in children if "target" in one.cmdline()]
        [writer] = [one for one in children if "serve" in one.cmdline()]
        with ThreadPoolExecutor(1) as pool:
            turn = pool.submit(ours.measure, case, Effort(operations=1_000_000, samples=100))
            time.sleep(0.2)
            writer.kill()
            with pytest.raises(ContenderError, match="gone"):
                turn.result(timeout=20)
        wait_until(lambda: status(receiver) in ENDED, 30)
    finally:
        ours.stop()


@pytest.mark.parametrize("memory", ["library", "ordinary"])
@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_ours_moves_every_byte_over_every_link(link: Link, memory: Memory) -> None:
    rust, python = FabricRust("fabric-rust"), FabricPython("fabric-python")
    for operation, pages in (("write", 1), ("pages", 8)):
        case = msgspec.convert(
            {"suite": "x", "operation": operation, "link": link, "memory": memory}
            | {"bytes": 4 * KIB, "pages": pages, "region": MIB},
            Case,
        )
        for contender in (rust, python):
            contender.start(case)
            assert contender.verify(case)
    rust.stop()
    python.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_an_interrupted_run_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    """Stopped processes see neither signals nor a closed line; the kernel has to end them."""
    mark = str(tmp_path)
    run = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.bench_plain"],
        cwd=ROOT,
        env=environment(mark),
    )
    wait_until(lambda: any(status(one) == psutil.STATUS_STOPPED for one in marked(mark)), 60)
    run.send_signal(number)
    run.wait(timeout=15)
    wait_until(lambda: not marked(mark), 30)


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
