"""perftest in the guest: its figures are read, and what it prints instead is told."""

from __future__ import annotations

import pytest

from benchmarks.rdma import CASES, KIB, Case, Engine, Figure, Perftest, Row, measure

TABLE = """
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 1024       1000             20.21              19.39  \t\t   0.019859
---------------------------------------------------------------------------------------
"""


def test_a_figure_is_the_average_and_not_the_peak() -> None:
    figure = Perftest().figure(TABLE, Case(KIB, 1000))
    assert figure == Figure(bytes_per_second=19.39 * 2**20, messages_per_second=19_859.0)


def test_output_without_a_figure_is_shown() -> None:
    with pytest.raises(ValueError, match="Couldn't connect"):
        Perftest().figure("Couldn't connect to 10.77.0.2:18600\n", Case(KIB, 1000))


def test_a_figure_of_nothing_is_none() -> None:
    with pytest.raises(ValueError, match="0 MB/s"):
        Perftest().figure("1024 1000 0.00 0.00 0.000000\n", Case(KIB, 1000))


REPLIES = """{"seconds":[0.5],"transport":"verbs"}
{"seconds":[0.002],"transport":"verbs"}
"""


def test_ours_is_the_last_reply_the_first_only_warms_up() -> None:
    large = Engine().figure(REPLIES, Case(64 * KIB, 1000))
    assert large == Figure(bytes_per_second=64 * KIB / 0.002, messages_per_second=500.0)
    pages = Engine().figure(REPLIES, Case(KIB, 1000))
    assert pages == Figure(bytes_per_second=500 * KIB / 0.002, messages_per_second=250_000.0)


@pytest.mark.parametrize(
    "output", [REPLIES.replace("verbs", "tcp"), REPLIES.splitlines()[0], '{"error": "no NIC"}\n']
)
def test_ours_without_a_figure_over_verbs_is_shown(output: str) -> None:
    with pytest.raises(ValueError, match="printed no figure"):
        Engine().figure(output, Case(64 * KIB, 1000))


def test_contenders_are_compared_turn_by_turn() -> None:
    def row(*speeds: float) -> Row:
        figures = [Figure(speed, speed) if speed else None for speed in speeds]
        return Row("write/1KiB", "one", figures)

    assert row(9, 18, 0, 5).ratio(row(10, 20, 1, 0)) == pytest.approx(0.9)


@pytest.mark.rdma_full
def test_every_case_has_a_figure_in_one_boot() -> None:
    rows = measure(turns=3)
    assert {row.case for row in rows} == {case.key for case in CASES}
    for row in rows:
        case = next(case for case in CASES if case.key == row.case)
        assert len(row.figures) == 3
        for figure in row.found:
            # Both are of the same run: perftest prints 5 digits of one and 6 places of the other.
            rate = figure.bytes_per_second / case.bytes
            assert figure.messages_per_second == pytest.approx(rate, rel=0.02, abs=1)
