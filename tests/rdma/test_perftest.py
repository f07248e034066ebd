"""perftest in the guest: its figures are read, and what it prints instead is told."""

from __future__ import annotations

import pytest

from benchmarks.rdma.cases import KIB, Aim, Case, Figure, Row, judge
from benchmarks.rdma.contenders import Engine, Perftest
from benchmarks.rdma.suites import CASES, aims, beside_perftest, four_rails

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


def test_an_aim_is_judged_where_both_of_its_rows_are() -> None:
    rows = [
        Row("write/1KiB", name, [Figure(speed, speed)]) for name, speed in [("one", 2), ("four", 6)]
    ]
    wanted = [
        Aim("write/1KiB", "four", "one", 3.5),
        Aim("write/1KiB", "four", "one", 2.5),
        Aim("write/1KiB", "four", "none", 1.0),
    ]
    verdicts = judge(rows, wanted)
    assert [(v.aim.least, v.ratio, v.met) for v in verdicts] == [
        (3.5, 3.0, False),
        (2.5, 3.0, True),
    ]


@pytest.mark.rdma_full
def test_every_case_has_a_figure_in_one_boot() -> None:
    rows = beside_perftest(turns=3)
    assert {row.case for row in rows} == {case.key for case in CASES}
    for row in rows:
        case = next(case for case in CASES if case.key == row.case)
        assert len(row.figures) == 3
        for figure in row.found:
            # Both are of the same run: perftest prints 5 digits of one and 6 places of the other.
            rate = figure.bytes_per_second / case.bytes
            assert figure.messages_per_second == pytest.approx(rate, rel=0.02, abs=1)


@pytest.mark.rdma_full
def test_four_rails_carry_three_and_a_half_times_what_one_carries() -> None:
    verdicts = [v for v in judge(four_rails(turns=3), aims()) if "rails" in v.aim.contender]
    assert [v.aim.least for v in verdicts] == [3.5]
    assert verdicts[0].met, verdicts[0]
