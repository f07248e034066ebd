"""The benchmark of expert parallelism: it checks the sums of small exchanges itself."""

from __future__ import annotations

import pytest
import torch

from benchmarks.moe.ranks import NICS, measure, simulate
from benchmarks.moe.shape import Shape, batch, check, expected

SMALL = Shape(ranks=2, tokens=6, hidden=256, experts=8, private_rows=2)


@pytest.mark.long
def test_all_contenders_exchange_the_same_tokens() -> None:
    times = measure(SMALL, ["shm", "tcp", "gloo", "floor"], 1)
    assert {name: len(turns) for name, turns in times.items()} == dict.fromkeys(times, 1)
    assert all(t > 0 for turns in times.values() for one in turns for t in one)


def test_wrong_sums_are_seen() -> None:
    given = batch(SMALL, 0, 0)
    want = expected(SMALL, given)
    check("shm", SMALL, want.clone(), want)
    wrong = want.clone()
    wrong[3, 7] = -wrong[3, 7] - 1
    with pytest.raises(AssertionError, match="1 of 6"):
        check("shm", SMALL, wrong, want)
    assert torch.equal(want, expected(SMALL, batch(SMALL, 0, 0)))


def test_simulated_nics_are_no_quicker_than_their_floor() -> None:
    one = simulate(Shape(ranks=8, tokens=16, hidden=512, experts=32), NICS[0])
    # Virtual time: routes and rows take one way, answers another.
    assert one.dispatch_max_us >= one.dispatch_p50_us > 2.0
    assert one.combine_max_us >= one.combine_p50_us > 2.0
