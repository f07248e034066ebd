"""``fabric_ray.bench``: each way beside its floor, bytes compared, nothing left behind."""

from __future__ import annotations

import pytest

from fabric_ray import bench
from fabric_ray.bench.figures import figure
from fabric_ray.bench.ways import Copy, Engine, Socket, Way
from fabric_ray.errors import FabricError, InvalidArgument
from tests.conftest import Belongings

POOL = 1 << 20


def test_each_transport_is_measured_beside_its_floor(belongings: type[Belongings]) -> None:
    bench.measure(sizes=[4096], turns=1)  # what is loaded once
    before, told = belongings(), []
    report = bench.measure(sizes=[4096, 1 << 20], turns=2, tell=told.append)
    assert belongings() == before
    found = {(f.way, f.nbytes): f for f in report.figures}
    for nbytes in (4096, 1 << 20):
        assert found["shm", nbytes].floor == "copy"
        assert found["tcp", nbytes].floor == "socket"
        for way in ("copy", "socket"):
            assert found[way, nbytes].of_floor is None
    ping = bench.PING_NBYTES
    assert {way for way, nbytes in found if nbytes == ping} == {"shm", "tcp", "socket"}
    assert found["shm", ping].of_floor is None, "nothing plain is like it"
    assert found["tcp", ping].unit == "us"
    assert all(f.verified and f.median > 0 for f in report.figures)
    assert "tcp, 4096 bytes, turn 2 of 2" in told


def test_figures_are_medians_and_ratios_of_turns() -> None:
    speed = figure("shm", 1, "GB/s", [1.0, 2.0, 30.0], ("copy", [2.0, 2.0, 10.0]))
    assert (speed.median, speed.best, speed.of_floor) == (2.0, 30.0, 1.0)
    latency = figure("tcp", 8, "us", [10.0, 20.0, 40.0], ("socket", [5.0, 10.0, 40.0]))
    assert (latency.median, latency.best, latency.of_floor) == (20.0, 10.0, 0.5)


@pytest.mark.parametrize("way", ["copy", "socket", "shm"])
def test_bytes_that_arrived_wrong_are_noticed(way: str) -> None:
    found: Way = {"copy": Copy, "socket": Socket}.get(way, lambda n: Engine("shm", n))(POOL)
    try:
        found.restart()
        found.stream(4096, 4)
        found.verify(4 * 4096)
        with pytest.raises(FabricError, match="are not those that were sent"):
            found.verify(5 * 4096)
    finally:
        found.close()


def test_another_process_that_dies_is_an_error_and_not_a_wait() -> None:
    way = Engine("shm", POOL)
    try:
        way.stream(4096, 4)
        way._process.kill()
        way._process.wait()
        with pytest.raises(FabricError):
            way.stream(4096, 4)
    finally:
        way.close()


@pytest.mark.parametrize(
    "wrong", [{"sizes": [0]}, {"sizes": [1 << 30]}, {"turns": 0}, {"transports": []}]
)
def test_what_can_not_be_measured_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        bench.measure(**wrong)  # type: ignore[arg-type]
