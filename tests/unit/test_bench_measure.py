"""``fabric_ray.bench.measure``: each transport beside its floor, bytes compared, nothing left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fabric_ray import bench
from fabric_ray.bench.local import Copy, Pair
from fabric_ray.bench.record import Results
from fabric_ray.bench.results import load
from fabric_ray.errors import FabricError, InvalidArgument
from tests.chaos.belongings import Belongings


@pytest.mark.long
def test_each_transport_is_measured_beside_its_floor() -> None:
    bench.measure(sizes=[4096], turns=1)  # what is loaded once
    before, told = Belongings(), []
    report = bench.measure(sizes=[4096, 1 << 20], turns=2, tell=told.append)
    assert Belongings().more_than(before) is None
    rows = {row.key: row for row in report.rows}
    for size in ("4KiB", "1MiB"):
        for transport, plain in (("shm", "copy"), ("tcp", "socket")):
            floor, ours = rows[f"bench/{transport}/{size}"].figures
            assert (floor.contender, ours.contender) == (plain, transport)
            assert floor.of_floor is None
            assert ours.of_floor is not None
    trips = [row for row in report.rows if row.unit == "us"]
    found = [[f.contender for f in row.figures] for row in trips]
    assert found == [["shm"], ["socket", "tcp"]], "nothing plain is like shm"
    figures = [figure for row in report.rows for figure in row.figures]
    assert all(f.verified and f.median > 0 and len(f.turns) == 2 for f in figures)
    assert "tcp/4KiB: tcp, turn 2 of 2" in told


def test_what_was_measured_before_an_interruption_is_kept_and_not_measured_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "bench.jsonl"

    def interrupt(what: str) -> None:
        if what.startswith("shm/8KiB: shm, turn 2"):
            raise KeyboardInterrupt

    asked: dict[str, list[object]] = {"transports": ["shm"], "sizes": [4096, 8192]}
    with pytest.raises(KeyboardInterrupt):
        bench.measure(**asked, turns=2, tell=interrupt, results=Results(path))  # type: ignore[arg-type]
    rows = {row.key: row for row in load(path).rows}
    assert [row.complete for row in rows.values()] == [True, False]
    measured: list[str] = []
    results = Results(path)
    report = bench.measure(**asked, turns=2, tell=measured.append, results=results)  # type: ignore[arg-type]
    assert report.rows[0] == rows["bench/shm/4KiB"]
    assert not any(what.startswith("shm/4KiB") for what in measured)
    assert all(row.complete for row in load(path).rows)


def test_rows_of_an_earlier_run_are_reported_with_the_turns_that_they_have(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    bench.measure(transports=["shm"], sizes=[4096], turns=1, results=Results(path))
    report = bench.measure(transports=["shm"], sizes=[4096], turns=3, results=Results(path))
    assert report.turns == 1


@pytest.mark.parametrize("changes", [{"cpu": "Another CPU"}, {"cores": 4096}], ids=str)
def test_rows_of_another_machine_are_not_shown_as_those_of_this_one(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    path = tmp_path / "bench.jsonl"
    Results(path).end()
    Results(path).end()  # the same machine
    run, *rest = path.read_bytes().splitlines(keepends=True)
    there = json.loads(run)
    there["machine"] |= changes
    path.write_bytes(json.dumps(there).encode() + b"\n" + b"".join(rest))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=rf"was measured on .*{next(iter(changes.values()))}"):
        Results(path)
    assert path.read_bytes() == before


def test_a_size_that_is_given_twice_is_measured_and_shown_once() -> None:
    report = bench.measure(transports=["shm", "shm"], sizes=[4096, 4096], turns=1)
    keys = [row.key for row in report.rows]
    assert keys == ["bench/shm/4KiB", "bench/shm/one trip"]


@pytest.mark.parametrize("name", ["copy", "socket", "shm"])
def test_bytes_that_arrived_wrong_are_noticed(name: str) -> None:
    found = Copy() if name == "copy" else Pair(name)
    try:
        found.stream(4096, 4)
        found.memory[3 * 4096 + 17] ^= 1
        found.stream(4096, 3)
        with pytest.raises(FabricError, match="are not those that were sent"):
            found.stream(4096, 4)
    finally:
        found.close()


def test_another_process_that_dies_is_an_error_and_not_a_wait() -> None:
    found = Pair("shm")
    try:
        found.stream(4096, 4)
        found._far.process.kill()
        found._far.process.wait()
        with pytest.raises(FabricError):
            found.stream(4096, 4)
    finally:
        found.close()


@pytest.mark.parametrize(
    "wrong", [{"sizes": [0]}, {"sizes": [1 << 30]}, {"turns": 0}, {"transports": []}]
)
def test_what_can_not_be_measured_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        bench.measure(**wrong)  # type: ignore[arg-type]
