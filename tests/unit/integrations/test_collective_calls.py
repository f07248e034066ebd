"""Calls among trainers: one that is stuck is named in time, and nothing is left behind."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_ports
from tests.processes import Other
from tests.unit.integrations.trainer_ranks import TIMEOUT, rank

RANKS = 3
ALL = (0, 1, 2)
WELL = [(r, "x") for r in ALL]


class Trainers:
    def __init__(self, store: str) -> None:
        self.ranks = [Other(rank, number, RANKS, store) for number in range(RANKS)]

    def say(self, *command: Any) -> None:
        for each in self.ranks:
            each.say(command)

    def hear(self, *ranks: int) -> list[Any]:
        return [self.ranks[number].hear(60.0) for number in ranks]

    def ask(self, *command: Any) -> list[Any]:
        self.say(*command)
        return self.hear(*ALL)


@pytest.fixture
def trainers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trainers]:
    in_file = getattr(request, "param", "tcp") == "file"
    store = f"file://{tmp_path}/s" if in_file else f"tcp://127.0.0.1:{free_ports()[0]}"
    made = Trainers(store)
    assert made.hear(*ALL) == ["ready"] * RANKS
    yield made
    for each in made.ranks:
        with suppress(ProcessLookupError):  # it was killed
            each.signal(signal.SIGCONT)
        each.__exit__()


@pytest.mark.parametrize(
    "trainers", ["tcp", pytest.param("file", marks=pytest.mark.long)], indirect=True
)
def test_rank_0_gets_the_answers_of_all_ranks(trainers: Trainers) -> None:
    for _ in range(2):
        assert trainers.ask("ask", "echo", "x") == [WELL, 0, 0]
    assert trainers.ask("ask", "size", bytes(20 << 20)) == [[20 << 20] * RANKS, 0, 0]


def test_rs_4_a_trainer_that_does_not_come_is_named_and_the_next_run_has_it(
    trainers: Trainers,
) -> None:
    assert trainers.ask("ask", "echo", "x") == [WELL, 0, 0]
    trainers.ranks[1].signal(signal.SIGSTOP)
    start = time.monotonic()
    trainers.say("ask", "echo", "x")
    for text, failed in trainers.hear(0, 2):
        assert f"trainer 1: it did not come within {TIMEOUT:g} s" in text
        assert failed.keys() == {"trainer 1"}
    assert time.monotonic() - start < TIMEOUT + 20.0
    trainers.ranks[1].signal(signal.SIGCONT)
    [(text, failed)] = trainers.hear(1)
    assert failed.keys() == {"trainer 1"}
    assert trainers.ask("ask", "echo", "x") == [WELL, 0, 0]


def test_rs_4_a_trainer_that_is_stuck_in_a_call_is_named_and_the_next_run_has_it(
    trainers: Trainers,
) -> None:
    trainers.say("ask", "stops", 1)
    [answers, _] = trainers.hear(0, 2)
    assert answers == [0, f"it did not answer within {TIMEOUT:g} s; see whether it is stuck", 2]
    trainers.ranks[1].signal(signal.SIGCONT)
    assert trainers.hear(1) == [0]
    assert trainers.ask("ask", "echo", "x") == [WELL, 0, 0]


@pytest.mark.long
def test_rs_3_a_trainer_makes_no_call_that_trainer_0_has_given_up(trainers: Trainers) -> None:
    trainers.say("tally without", 1)
    [answers, _] = trainers.hear(0, 2)
    assert answers[::2] == [1, 1]
    trainers.ranks[1].signal(signal.SIGCONT)
    trainers.hear(1)
    assert trainers.ask("ask", "tally", None)[0] == [2, 1, 2]


def test_rs_4_trainer_0_that_is_stuck_is_named_and_leads_the_next_run(trainers: Trainers) -> None:
    assert trainers.ask("ask", "echo", "x") == [WELL, 0, 0]
    trainers.say("lead after a stop")
    for text, failed in trainers.hear(1, 2):
        assert "see whether it is stuck" in text
        assert failed.keys() == {"trainer 0"}
    trainers.ranks[0].signal(signal.SIGCONT)
    [(own, *others)] = trainers.hear(0)
    assert own == (0, "late")
    assert all("gave up" in cause for cause in others), "nothing is computed for a run that failed"
    assert trainers.ask("ask", "echo", "x") == [WELL, 0, 0]


@pytest.mark.long
def test_rs_4_the_store_may_be_stuck_before_the_first_run(trainers: Trainers) -> None:
    trainers.ranks[0].signal(signal.SIGSTOP)
    trainers.say("ask", "echo", "x")
    for text, failed in trainers.hear(1, 2):
        assert "trainer 0 did not go on" in text
        assert failed.keys() == {"trainer 0"}
    trainers.ranks[0].signal(signal.SIGCONT)


@pytest.mark.long
def test_rs_4_a_trainer_that_reads_nothing_keeps_no_call_from_the_others(
    trainers: Trainers,
) -> None:
    trainers.say("ask after a stop", 1)
    [answers, _] = trainers.hear(0, 2)
    assert answers[::2] == [16 << 20] * 2
    assert answers[1].startswith("it did not take a call")
    trainers.ranks[1].signal(signal.SIGCONT)
    trainers.hear(1)
    assert trainers.ask("ask", "echo", "x") == [WELL, 0, 0]


def test_a_function_that_is_not_listed_is_made_on_no_other_rank(trainers: Trainers) -> None:
    [own, one, two] = trainers.ask("ask", "unlisted", "x")
    assert own[0] == 1
    assert all("its connection ended" in cause for cause in own[1:])
    for text, failed in (one, two):
        assert "`unlisted` is no function that can be called here" in text
        assert failed.keys() == {"trainer 0"}
    assert trainers.ask("ask", "tally", "x")[0] == [2, 1, 1]


@pytest.mark.parametrize("which", [0, 1])
def test_rs_4_a_trainer_that_failed_before_the_run_fails_it_on_all_at_once(
    trainers: Trainers, which: int
) -> None:
    assert trainers.ask("fail", None) == ["led", 0, 0]
    start = time.monotonic()
    for text, failed in trainers.ask("fail", which):
        assert "no engine" in text
        assert set(failed) <= {f"trainer {which}"}
    assert time.monotonic() - start < TIMEOUT
    assert trainers.ask("ask", "echo", "x") == [WELL, 0, 0]


@pytest.mark.parametrize("which", [0, 1])
def test_rs_4_a_trainer_that_is_killed_is_named_at_once(trainers: Trainers, which: int) -> None:
    start = time.monotonic()
    trainers.say("ask", "dies", which)
    if which:
        [answers, _] = trainers.hear(0, 2)
        assert answers[::2] == [0, 2]
        assert time.monotonic() - start < TIMEOUT
        assert "its connection ended" in answers[1]
        return
    for _, failed in trainers.hear(1, 2):
        assert failed.keys() == {"trainer 0"}
    assert time.monotonic() - start < TIMEOUT


@pytest.mark.long
@pytest.mark.parametrize("closes", [True, False])
def test_ends_that_are_closed_or_dropped_leave_no_file_and_no_thread(
    trainers: Trainers, closes: bool
) -> None:
    for files, threads in trainers.ask("remake", 10, closes):
        assert files <= 0
        assert threads <= 0
