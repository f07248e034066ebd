"""Changes are sent only while they take no longer than whole pushes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric_ray.weights.delta import DeltaChoice

SECONDS = st.floats(1e-4, 100.0)


class Course:
    """Pushes whose times are given."""

    def __init__(self) -> None:
        self.choice = DeltaChoice()
        self.kinds: list[str] = []
        self.seconds = 0.0
        self._kept = False

    def push(self, whole: float, changes: float, copying: float) -> None:
        """
        Args:
            copying: seconds that keeping a copy takes beside a whole push.
        """
        if not self.choice.compares:
            kind, seconds = "whole", whole
        elif self._kept:
            kind, seconds = "changes", changes
        else:
            kind, seconds = "kept", whole + copying
        self._kept = kind != "whole"
        self.choice.took(kind, seconds, 0.0 if kind == "whole" else copying)
        self.kinds.append(kind)
        self.seconds += seconds


@pytest.fixture
def course() -> Callable[..., Course]:
    def run(number: int, whole: float, changes: float, copying: float) -> Course:
        made = Course()
        for _ in range(number):
            made.push(whole, changes, copying)
        return made

    return run


@given(SECONDS, st.floats(0.01, 100.0), st.floats(0.0, 10.0))
def test_in_the_long_run_pushes_take_no_longer_than_whole_ones(
    whole: float, ratio: float, copying: float
) -> None:
    made, number = Course(), 4000
    for _ in range(number):
        made.push(whole, ratio * whole, copying * whole)
    # A dozen attempts, each of which keeps a copy and sends changes twice.
    attempts = 12 * whole * (copying + 2 * ratio)
    assert made.seconds <= number * (1.05 * whole + 1e-3) + attempts


@given(SECONDS, st.floats(0.0, 1.0), st.floats(0.0, 10.0))
def test_changes_that_take_less_time_are_sent(whole: float, ratio: float, copying: float) -> None:
    made = Course()
    for _ in range(100):
        made.push(whole, ratio * whole, copying * whole)
    assert made.kinds.count("whole") <= 1
    assert made.kinds.count("changes") >= 97


def test_a_slow_link_carries_one_whole_push(course: Callable[..., Course]) -> None:
    made = course(20, whole=60.0, changes=4.0, copying=1.0)
    assert set(made.kinds[1:]) == {"changes"}


def test_a_fast_link_has_whole_pushes_soon(course: Callable[..., Course]) -> None:
    made = course(20, whole=0.015, changes=0.25, copying=0.1)
    assert made.kinds[:4] == ["kept", "changes", "changes", "whole"]
    assert set(made.kinds[4:]) == {"whole"}


def test_one_slow_push_among_fast_ones_changes_nothing(course: Callable[..., Course]) -> None:
    made = course(10, whole=0.5, changes=0.3, copying=0.1)
    made.push(whole=5.0, changes=3.0, copying=0.1)
    made.push(whole=0.5, changes=0.3, copying=0.1)
    assert made.kinds.count("whole") == 1
    assert set(made.kinds[5:]) == {"changes"}


def test_changes_come_back_when_the_link_gets_slow(course: Callable[..., Course]) -> None:
    made = course(20, whole=0.015, changes=0.25, copying=0.1)
    for _ in range(40):
        made.push(whole=2.0, changes=0.4, copying=0.1)
    assert set(made.kinds[-20:]) == {"changes"}


def test_a_machine_that_gets_slow_is_measured_before_changes_are_given_up(
    course: Callable[..., Course],
) -> None:
    made = course(10, whole=0.5, changes=0.3, copying=0.1)
    for _ in range(10):
        made.push(whole=5.0, changes=3.0, copying=0.1)
    assert made.kinds.count("whole") == 2
    assert made.kinds[-1] == "changes"
