"""A short soak, and what its judge takes for growth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.soak.run import Outcome, Soak
from tests.soak.trend import MIB, PER_PEER, Sample, trends

FLAT = Sample(0.0, 20 * MIB, 60 * MIB, 30, 6, 4, 0)


def series(change: Callable[[int], dict[str, int]], n: int = 40) -> list[Sample]:
    """Samples that differ from a flat one as ``change`` says."""
    return [
        dataclasses.replace(
            FLAT, **{name: getattr(FLAT, name) + more for name, more in change(i).items()}
        )
        for i in range(n)
    ]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda i: {}, []),
        # Each round leaks a bit.
        (lambda i: {"descriptors": i // 4}, ["descriptors"]),
        (lambda i: {"threads": i // 8}, ["threads"]),
        (lambda i: {"mappings": i}, ["mappings"]),
        (lambda i: {"in_use": i * 100_000}, ["in_use"]),
        (lambda i: {"resident": i * MIB}, ["resident"]),
        # What goes up and down, what was there from the start on, and a single outlier are none.
        (lambda i: {"descriptors": 12 * (i % 2), "in_use": 4 * MIB * (i % 3)}, []),
        (lambda i: {"descriptors": min(i, 10), "threads": min(i, 10)}, []),
        (lambda i: {"descriptors": 500 * (i == 39), "threads": 50 * (i == 38)}, []),
        # Tables have room for the peers that were met, and what was known of those is forgotten.
        (lambda i: {"peers": 1000 * i, "in_use": 1000 * i * PER_PEER}, []),
        (lambda i: {"peers": 1000 * i, "in_use": 3000 * i * PER_PEER}, ["in_use"]),
    ],
)
def test_growth_is_told_from_noise(
    change: Callable[[int], dict[str, int]], found: list[str]
) -> None:
    assert [t.measure for t in trends("p", series(change)) if t.grows] == found


def test_a_few_samples_tell_no_trend() -> None:
    assert trends("p", [FLAT] * 3) == []


@pytest.mark.long
def test_peers_that_come_and_go_leave_nothing_and_break_nothing() -> None:
    """IC-1, IC-2, MR-2, RS-1: in short what `make soak` does for hours."""

    def play(transport: str) -> Outcome:
        return Soak(transport, seed=1).play(6.0)

    with ThreadPoolExecutor(2) as pool:
        for outcome in pool.map(play, ["shm", "tcp"]):
            assert outcome.broken == []
            assert outcome.visits >= 64
            assert outcome.requests > 0
            assert set(outcome.samples) == {"hub", "visitors", "decoder", "prefiller"}
            held = ("descriptors", "threads", "mappings")
            grown = [t for t in outcome.trends() if t.measure in held and t.grows]
            assert grown == []
