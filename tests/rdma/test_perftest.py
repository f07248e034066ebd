"""perftest in the guest: its figures are read, and what it prints instead is told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.harness.cases import KIB
from benchmarks.rdma import guest
from benchmarks.rdma.__main__ import CASES, FOUR, ONE, beside_perftest, four_rails
from benchmarks.rdma.contenders import Case, Engine, Perftest
from fabric_ray.bench.results import Row

TABLE = """
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 1024       1000             20.21              19.39  \t\t   0.019859
---------------------------------------------------------------------------------------
"""


def test_a_figure_is_the_average_and_not_the_peak() -> None:
    seconds = Perftest().seconds(TABLE, Case(KIB, 1000))
    assert KIB / seconds == pytest.approx(19.39 * 2**20)


@pytest.mark.parametrize(
    ("output", "told"),
    [
        ("Couldn't connect to 10.77.0.2:18600\n", "Couldn't connect"),
        ("1024 1000 0.00 0.00 0.000000\n", "0 MB/s"),
        (f"{TABLE}failed\n", "printed no figure"),
    ],
)
def test_output_without_a_figure_is_shown(output: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Perftest().seconds(output, Case(KIB, 1000))


REPLIES = """{"seconds":[0.5],"transport":"verbs"}
{"seconds":[0.002],"transport":"verbs"}
"""


def test_ours_is_the_last_reply_the_first_only_warms_up() -> None:
    assert Engine().seconds(REPLIES, Case(64 * KIB, 1000)) == pytest.approx(0.002)
    assert Engine().seconds(REPLIES, Case(KIB, 1000)) == pytest.approx(0.002 / 500)


@pytest.mark.parametrize(
    "output", [REPLIES.replace("verbs", "tcp"), REPLIES.splitlines()[0], '{"error": "no NIC"}\n']
)
def test_ours_without_a_figure_over_verbs_is_shown(output: str) -> None:
    with pytest.raises(ValueError, match="printed no figure"):
        Engine().seconds(output, Case(64 * KIB, 1000))


@pytest.mark.rdma
def test_every_case_has_a_figure_in_one_boot() -> None:
    rows: list[Row] = []
    beside_perftest(rows.append, turns=3)
    assert [row.key for row in rows] == [case.header.key for case in CASES]
    for row in rows:
        assert {figure.contender for figure in row.figures} >= {"ib_write_bw"}
        assert all(figure.median > 0 for figure in row.figures)


@pytest.mark.rdma
def test_four_rails_have_a_figure_beside_one() -> None:
    rows: list[Row] = []
    four_rails(rows.append, turns=3)
    [row] = rows
    assert row.figures[0].contender == FOUR
    one = row.figure(ONE)
    assert one is not None
    assert one.ours_over is not None
    assert all(figure.verified for figure in row.figures)


def test_an_interrupted_measurement_keeps_the_cases_that_have_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = [Case(KIB, 1000), Case(64 * KIB, 1000)]

    def interrupted(scripts: Sequence[str], outputs: list[str], **_: object) -> None:
        outputs += [TABLE] * 3
        raise KeyboardInterrupt

    monkeypatch.setattr(guest, "run_scripts", interrupted)
    rows: list[Row] = []
    with pytest.raises(KeyboardInterrupt):
        guest.measure(cases, [Perftest()], rows.append, turns=2)
    # The third output is of the second case, and has no line for its size.
    assert [row.key for row in rows] == [cases[0].header.key]
    assert len(rows[0].figures[0].turns) == 2
